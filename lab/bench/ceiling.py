"""How much could any draft gain on this model, and what do the drafts at hand promise?

A greedy text can be foreseen, and a perfect draft would always be right. A sampled text cannot,
because its tokens are drawn by chance, and no draft knows the outcome. The most that a draft of P
tokens can bring is then the tree of the P most likely continuations, by the target's own p, because
the number of accepted tokens is on average the sum of their probabilities (cf. Pankratov and
Alistarh, arXiv 2512.11718). A node is always less likely than its parent, so the tree grows best
first.

Wider or deeper? Where a draft is wrong, the token that the target takes is often its second choice.
A tree that holds this sibling keeps it, for the price of one more token in the block.

Everything is scored in a few passes over texts that the model wrote itself. Nothing is drafted. The
Teachers here hold raw logits, from which each way to sample makes its own p.
"""
import heapq
from functools import partial

import torch

from control import MOST, acceptance_rate, best_along, expected_tokens_along, round_cost
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
CHOICES = {"rejected": "{rejected:.0%}", "2nd": "{2nd:.0%}", "3rd": "{3rd:.0%}", "4th": "{4th:.0%}",
           "a chain promises": "{chain:.2f}", "with one sibling": "{sibling:.2f}"}
CEILING = {"cost of the block": "{block:.2f}", "tokens per round, T 1": "{T 1:.2f}",
           "speed-up, T 1": "{T 1 gain:.2f}", "speed-up, greedy": "{greedy gain:.2f}"}


# --- the most that any draft could bring


@torch.inference_mode()
def best_trees(spots, nodes, probs):
    """{P: the expected tokens per round of the best tree of P drafted tokens}, for each P of
    `nodes`, averaged over the spots. spots: [(Teacher, n)], where a round starts after n tokens.

    All spots grow one node per pass. The path to it is read again each time, which is cheaper than
    it sounds, because a path is short.
    """
    model = spots[0][0].model
    device = model.tok.device
    most = max(nodes)
    slots = max(n for _, n in spots) + most
    cache = KVCache(model.c, len(spots), slots, model.attention_dtype(), device)
    chances = [[] for _ in spots]       # of the nodes that a tree has
    waiting = [[] for _ in spots]       # heaps of (-chance, path)
    for b, (teacher, n) in enumerate(spots):
        cache.k[:, b, :, :n] = teacher.cache.k[:, 0, :, :n]
        cache.v[:, b, :, :n] = teacher.cache.v[:, 0, :, :n]
        add_children(waiting[b], 1.0, (), probs(teacher.p[:, n - 1 : n])[0, 0], most)
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


def raw(logits):
    """In place of the probabilities of a Teacher."""
    return logits


def copied(teacher, start, probs):
    """The acceptance rate of a token that lookup copies, after each number of tokens of a Teacher's
    text, from `start` on. It is p of the token, or 0 where lookup finds nothing."""
    p = probs(teacher.p)
    ids = teacher.tokens[0].tolist()
    lookup = Suffix(1)
    state = State.start(teacher.model, [ids[:start]], 2, (), probs, None)
    lookup.begin(state, {})
    rates = []
    for n in range(start, len(ids) + 1):
        state.known = [ids[:n]]
        lookup.enter(state)
        path = lookup.found(state)[0]
        rates.append(float(p[0, n - 1, path[0]]) if path else 0.0)
    return torch.tensor(rates).double()


@torch.no_grad()
def said(teacher, exits, twin, trained):
    """(draft, its logits, the target's) for each draft. Both are (1, N, V), and of the tokens that
    follow the last N which both have read of a Teacher's text."""
    for name, sublayers in exits.items():
        yield name, teacher.q(sublayers), teacher.p
    x = twin.run(twin.embed(teacher.tokens), Placement.span(0, teacher.p.shape[1]))
    yield "itself in int4", twin.unembed(x), teacher.p
    for head in trained:
        yield head.kind, *next(judged(head, teacher.tokens))        # its first step


def choice(draft, target):
    """Which choice of a draft, counted from 0, is the target's greedy token? The logits (..., V)
    of both -> (...).

    >>> choice(torch.tensor([0.1, 2.0, 1.0, 0.5]), torch.tensor([0.0, 1.0, 0.0, 3.0]))
    tensor(2)
    """
    token = target.argmax(-1, keepdim=True)
    return (draft > draft.gather(-1, token)).sum(-1)


def scored(teacher, start, probs, exits, twin, trained):
    """{draft: the acceptance rates along a Teacher's text, from `start` tokens on}, and {draft:
    which of its choices the target's greedy token is}, without lookup, which makes only one."""
    count = teacher.tokens.shape[1] - start + 1
    rates = {"lookup": copied(teacher, start, probs)}
    choices = {}
    for name, draft, target in said(teacher, exits, twin, trained):
        # NaN means an overflow, which `verify` rejects
        rate = acceptance_rate(probs(target), probs(draft))[0].cpu().nan_to_num(0.0)
        rates[name] = rate[-count:]
        choices[name] = choice(draft, target)[0, -count:].cpu()
    return rates, choices


def wider(choices, series, cost, block):
    """How often the target's token is which choice of a draft, where the first is wrong, and the
    speed-up of the best chain with the second choice beside its first token. The sibling costs a
    place in the block and nothing to draft. Rounds are taken to start anywhere in a text. The
    choices (N,) are from texts whose acceptance rates are the `series`; `block` is the cost of a
    pass over a number of tokens."""
    rejected = int((choices > 0).sum())
    found = {name: float((choices == k).sum()) / max(rejected, 1)
             for k, name in enumerate(("2nd", "3rd", "4th"), 1)}
    second = float((choices == 1).double().mean())
    found["rejected"] = rejected / len(choices)
    found["sibling"] = max(
        (expected_tokens_along(series, gamma) + second) / round_cost(gamma, cost, block(gamma + 2))
        for gamma in range(1, min(MOST, max(map(len, series))) + 1))
    return found


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
        texts = [(Teacher(model, ids, raw), start)
                 for ids, start in written(quick, tokenizer, new, probs)]
        rates, choices = zip(
            *(scored(*text, probs, exits, twin, trained) for text in texts), strict=True)
        for name, c in prices.items():
            series = [row[name] for row in rates]
            alpha = float(torch.cat(series).mean())
            gamma, gain = best_along(series, c, pass_cost=block)
            limit = doctor.limit([alpha] * MOST, c, block)
            drafts[name][how] = {"alpha": alpha, "gamma": gamma, "gain": gain, "limit": limit}
            if how == "greedy" and name in choices[0]:
                seen = torch.cat([row[name] for row in choices])
                drafts[name]["choices"] = wider(seen, series, c, block) | {"chain": gain}
        if how != "greedy":
            for P, tokens in best_trees(spread(texts, PLACES), NODES, probs).items():
                most[P][how] = tokens
    for P, tokens in most.items():
        tokens["block"] = block(P + 1)
        tokens |= {f"{how} gain": tokens[how] / tokens["block"] for how in PROBS}
    lines = [f"What drafts promise on its own answers ({new} tokens each), "
             f"in {'fast' if a.fast else 'eager'} passes. The limit is what would bring most if it "
             "were halved: the rejections (alpha), the price of a drafted token (c), or what a "
             "block costs more than a token (v).", "",
             *figures(drafts.items(), DRAFTS, "draft"),
             "Wider or deeper? Where the first token of a greedy draft is rejected, how often is "
             "the target's token the draft's 2nd, 3rd or 4th choice? And what would its second "
             "choice bring beside the first drafted token?", "",
             *figures(((name, row["choices"]) for name, row in drafts.items() if "choices" in row),
                      CHOICES, "draft"),
             "The most that any draft could bring, even one that costs nothing:", "",
             *figures(((f"any {P} tokens", row) for P, row in most.items()), CEILING, "draft")]
    return lines, {"drafts": drafts, "most": most}
