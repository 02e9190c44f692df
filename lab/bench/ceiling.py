"""How much could any draft gain on this model, and what do the drafts at hand promise?

A greedy text can be foreseen, and a perfect draft would always be right. A sampled text cannot,
because its tokens are drawn by chance, and no draft knows the outcome. The most that a draft of P
tokens can bring is then the tree of the P most likely continuations, by the target's own p, because
the number of accepted tokens is on average the sum of their probabilities (cf. Pankratov and
Alistarh, arXiv 2512.11718). A node is always less likely than its parent, so the tree grows best
first.

Everything is scored in a few passes over texts that the model wrote itself. Nothing is drafted.
"""
import heapq
from functools import partial

import torch

from control import MOST, acceptance_rate, best_along
from kvcache import KVCache
from lab import doctor
from lab.bench.shared import SETS, figures, prompt_ids
from lab.train_heads import judged
from layerskip import early_exit
from machine.exact import fast
from machine.quant import quantise
from methods import heads
from methods.lookup import Suffix
from model import Placement
from sampling import to_probs
from search import Teacher
from speculative import State, generate
from support.auto import trained_beside
from support.measure import kept_costs, measure_step

PROBS = {"greedy": to_probs, "T 1": partial(to_probs, temperature=1.0)}
EXITS = 1, 2, 4, 6      # eighths of the blocks
NODES = 4, 8, 16
PLACES = 32     # where the best trees are grown, spread over the texts
NEW = 32        # tokens of each text
DRAFTS = {"c": "{c:.2f}", "alpha, greedy": "{greedy[alpha]:.2f}", "best K": "{greedy[gamma]}",
          "promised": "{greedy[gain]:.2f}", "limit": "{greedy[limit]}",
          "alpha, T 1": "{T 1[alpha]:.2f}", "its best K": "{T 1[gamma]}",
          "it promises": "{T 1[gain]:.2f}", "its limit": "{T 1[limit]}"}
CEILING = {"cost of the block": "{block:.2f}", "tokens per round, T 1": "{T 1:.2f}",
           "speed-up, T 1": "{T 1 gain:.2f}", "speed-up, greedy": "{greedy gain:.2f}"}


# --- the most that any draft could bring


@torch.inference_mode()
def best_trees(spots, nodes):
    """{P: the expected tokens per round of the best tree of P drafted tokens}, for each P of
    `nodes`, averaged over the spots. spots: [(Teacher, n)], where a round starts after n tokens.

    All spots grow one node per pass. The path to it is read again each time, which is cheaper than
    it sounds, because a path is short.
    """
    model = spots[0][0].model
    probs = spots[0][0].probs
    device = model.tok.device
    most = max(nodes)
    slots = max(n for _, n in spots) + most
    cache = KVCache(model.c, len(spots), slots, model.attention_dtype(), device)
    chances = [[] for _ in spots]       # of the nodes that a tree has
    waiting = [[] for _ in spots]       # heaps of (-chance, path)
    for b, (teacher, n) in enumerate(spots):
        cache.k[:, b, :, :n] = teacher.cache.k[:, 0, :, :n]
        cache.v[:, b, :, :n] = teacher.cache.v[:, 0, :, :n]
        add_children(waiting[b], 1.0, (), teacher.p[0, n - 1], most)
    first = torch.tensor([[n] for _, n in spots], device=device)
    for size in range(1, most + 1):
        paths = []
        for b, heap in enumerate(waiting):
            chance, path = heapq.heappop(heap)
            chances[b].append(-chance)
            paths.append(path)
        if size == most:
            break
        last = torch.tensor([len(path) - 1 for path in paths], device=device)
        width = max(map(len, paths))
        tokens = torch.tensor([[*path, *[0] * (width - len(path))] for path in paths],
                              device=device)
        at = (first + torch.arange(width, device=device)).clamp_(max=slots - 1)     # (B, T)
        end = min(int(at.max()) + 1, slots)
        x = model.run(model.embed(tokens), Placement(at, at, int(first.min()), end), cache)
        x = x[torch.arange(len(paths), device=device), last]                        # (B, dim)
        for b, p in enumerate(probs(model.unembed(x[:, None]))[:, 0]):
            add_children(waiting[b], chances[b][-1], paths[b], p, most)
    return {P: 1 + sum(sum(row[:P]) for row in chances) / len(spots) for P in nodes}


def add_children(heap, chance, path, p, most):
    """Add to a heap the likeliest tokens after a path that comes about with this chance."""
    best = p.topk(min(most, len(p)))
    for share, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        heapq.heappush(heap, (-chance * share, (*path, token)))


# --- what drafts promise


def written(model, tokenizer, new, probs):
    """One answer to a prompt of each kind, as [(ids, how many of them are the prompt)]."""
    c = model.c
    prompts = [prompt_ids(name, tokenizer, c)[0][: c.max_len // 2] for name in SETS]
    answers, _ = generate(model, prompts, new, None, probs, eos=c.eos)
    return [(ids + answer, len(ids)) for ids, answer in zip(prompts, answers, strict=True)]


def copied(teacher, start):
    """The acceptance rate of a token that lookup copies, after each number of tokens of a Teacher's
    text, from `start` on. It is p of the token, or 0 where lookup finds nothing."""
    ids = teacher.tokens[0].tolist()
    lookup = Suffix(1)
    state = State.start(teacher.model, [ids[:start]], 2, (), teacher.probs, None)
    lookup.begin(state, {})
    rates = []
    for n in range(start, len(ids) + 1):
        state.known = [ids[:n]]
        lookup.enter(state)
        path = lookup.found(state)[0]
        rates.append(float(teacher.p[0, n - 1, path[0]]) if path else 0.0)
    return torch.tensor(rates).double()


@torch.no_grad()
def scored(teacher, start, exits, twin, trained):
    """{draft: the acceptance rates along a Teacher's text, from `start` tokens on}"""
    count = teacher.tokens.shape[1] - start + 1
    rates = {"lookup": copied(teacher, start)}
    rates |= {name: teacher.acceptance(sublayers) for name, sublayers in exits.items()}
    x = twin.run(twin.embed(teacher.tokens), Placement.span(0, teacher.p.shape[1]))
    rates["itself in int4"] = teacher.overlap(teacher.probs(twin.unembed(x)))
    for head in trained:
        draft, target = map(teacher.probs, next(judged(head, teacher.tokens)))  # its first step
        rates[head.kind] = acceptance_rate(target, draft)[0].cpu().nan_to_num(0.0)
    return {name: rate[-count:] for name, rate in rates.items()}


def spread(texts, places):
    """About `places` pairs (Teacher, n), as many in each text. texts: [(Teacher, start)]"""
    found = []
    each = max(1, places // len(texts))
    for teacher, start in texts:
        end = teacher.tokens.shape[1]
        steps = torch.linspace(start, end, min(each, end - start + 1)).long().tolist()
        found += [(teacher, n) for n in steps]
    return found


def worth(a, model, tokenizer):
    """(lines of the two tables, their data)"""
    L = model.c.n_layers
    quick = fast(model) if a.fast else model
    machine, _ = kept_costs(quick)
    block = partial(machine.verify, 0)
    twin = quantise(model, "int4", head="int4", rounds=True)
    trained = trained_beside(a.model, model)
    exits = {f"exit {e}": early_exit(L, e) for e in sorted({max(1, L * i // 8) for i in EXITS})}
    prices = {"lookup": 0.0, **{e: machine.draft(subs).start for e, subs in exits.items()},
              "itself in int4": measure_step(quick, quick.alongside(twin)),
              **{head.kind: heads.drafting(head, machine).start for head in trained}}
    drafts = {name: {"c": c} for name, c in prices.items()}
    most = {P: {"greedy": P + 1.0} for P in NODES}
    new = min(a.new, NEW)
    for how, probs in PROBS.items():
        texts = [(Teacher(model, ids, probs), start)
                 for ids, start in written(quick, tokenizer, new, probs)]
        rates = [scored(*text, exits, twin, trained) for text in texts]
        for name, c in prices.items():
            series = [row[name] for row in rates]
            alpha = float(torch.cat(series).mean())
            gamma, gain = best_along(series, c, pass_cost=block)
            limit = doctor.limit([alpha] * MOST, c, block)
            drafts[name][how] = {"alpha": alpha, "gamma": gamma, "gain": gain, "limit": limit}
        if how != "greedy":
            for P, tokens in best_trees(spread(texts, PLACES), NODES).items():
                most[P][how] = tokens
    for P, tokens in most.items():
        tokens["block"] = block(P + 1)
        tokens |= {f"{how} gain": tokens[how] / tokens["block"] for how in PROBS}
    lines = [f"What drafts promise on its own answers ({new} tokens each), "
             f"in {'fast' if a.fast else 'eager'} passes. The limit is what would bring most if it "
             "were halved: the rejections (alpha), the price of a drafted token (c), or what a "
             "block costs more than a token (v).", "",
             *figures(drafts.items(), DRAFTS, "draft"),
             "The most that any draft could bring, even one that costs nothing:", "",
             *figures(((f"any {P} tokens", row) for P, row in most.items()), CEILING, "draft")]
    return lines, {"drafts": drafts, "most": most}
