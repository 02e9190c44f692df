"""Small reconstructions of ProphetNet, HAMburger and a sparse self-draft. Each answers one question
that its paper leaves open, with one table. (BOOK.md says how M2R2 is asked.)

For greedy answers it prints the share of drafted tokens that were accepted, tau, and the speed-up,
counting the weights read.
"""
import copy
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import checkpoint
from control import best_gamma, expected_speedup
from lab import corpus, train, train_heads
from lab.aside import masks
from lab.bench.shared import SETS, SHAPES, load, page, prompt_ids, read_prompts, table
from lab.hamburger import BurgerDraft, Hamburger, tune, write
from lab.sparse import SparseDraft, sparse, step_cost
from lab.train_heads import OWN
from lab.transfer import Transfer, riders
from methods import heads
from methods.costs import by_weights
from model import Placement
from search import Teacher
from speculative import rounds
from support.stats import Counts

CONTEXT, BATCH, GAMMA, SINKS = 128, 8, 3, 4
COLD = 0.5                              # the temperature that HAMburger imitates
CONFIDENCES = 0.5, 0.8, 0.9, 2.0        # 2: no head is so sure, so that each step says one token
LARGE, WINDOW = "Llama 3.1 8B", 1024    # of the sparse draft on paper
TITLES = {"prophet": "ProphetNet: does it help a model to foresee more than the next token?",
          "hamburger": "HAMburger, by confidence: what is left of its speed where it is checked?",
          "sparse": "A sparse self-draft, by its window: how much of the text must a draft see?",
          "paper": f"On paper, {LARGE} in half precision, by the tokens before the draft"}


class Sizes(NamedTuple):
    """How much of everything."""
    text: int = 150_000     # tokens that the model writes itself
    streams: int = 280_000  # tokens that each ProphetNet learns from
    seeds: int = 3          # of ProphetNets
    burger: int = 280       # steps of HAMburger
    measured: int = 4096    # tokens of held-out text


SIZES = Sizes()


def own_text(model, tokenizer, count, measured, length=256):
    """A Corpus of what the model writes, `count` tokens to learn from and `measured` others to
    measure on, in texts of at most `length`, since a group of texts takes as long as its
    longest."""
    streams = [{OWN: train_heads.write_text(model, tokens, seed, min(length, model.c.max_len))}
               for seed, tokens in enumerate((count, measured))]
    return corpus.split(*streams, [1.0], tokenizer, CONTEXT)


def worth(model, prompts, drafter, new, cost):
    """What is reported of a drafter. The prompts are one batch. cost(K) is what a draft of K tokens
    takes, in passes of the target, by the weights that it reads."""
    counts = Counts()
    for _, r in rounds(model, prompts, new, drafter, eos=model.c.eos):
        counts.add(r)
    return {"accepted": counts.accepted / max(1, counts.proposed), "tau": counts.tau,
            "speed-up": counts.tau / (1 + cost(counts.proposed / max(1, counts.turns)))}


# --- ProphetNet


def stream_losses(model, head, batch):
    """The cross-entropy of each stream for windows (B, T+1). The model's own comes first, then the
    losses of the rows of the head, a Transfer from the embeddings on, each of which foresees a
    token further. (ProphetNet is an encoder and a decoder; this is a decoder alone.) All is one
    pass, so that the losses of the rows also train the keys and values that they read."""
    T = batch.shape[1] - 1
    N = head.steps
    x = model.embed(batch[:, :-1])
    x = model.run(torch.cat([x, head.spread(x).flatten(1, 2)], 1), riders(T, N, batch.device))
    rows = [x[:, :T], *x[:, T:].unflatten(1, (T, N)).unbind(2)]                 # (B, T, dim) each
    return [F.cross_entropy(model.unembed(row[:, : T - k]).flatten(0, 1),
                            batch[:, 1 + k :].flatten())
            for k, row in enumerate(rows)]


class Streams(train.Run):
    """As `train.Run`, with streams that foresee more than the next token. Each counts the same, as
    in the code of ProphetNet."""

    def __init__(self, a, text, device, streams):
        self.streams = streams
        super().__init__(a, text, device)

    def build(self):
        model, optimisers = super().build()
        self.head = Transfer(model, 0, self.streams - 1)
        own = train.adamw(self.head.weights.parameters(), self.a.lr)
        return nn.ModuleList([model, self.head.weights]), [*optimisers, own]

    def objective(self, batch):
        found = stream_losses(self.model, self.head, batch)
        return sum(found) / len(found), found[0]


def prophet(text, device, streams, seed, tokens, *flags):
    """A finished run of a tiny model with so many streams. `flags` are flags of lab/train.py."""
    a = train.parse([
        *f"--out nowhere --data given --device {device.type} --dtype float32 --seed {seed} "
         f"--tokens {tokens} --context {CONTEXT} --batch {BATCH} --warmup 20 --layers 4 --dim 128 "
         "--heads 2 --kv-heads 1 --hidden 352 --dropout 0 --exit-weight 0".split(), *flags])
    run = train.Run(a, text, device) if streams == 1 else Streams(a, text, device, streams)
    while run.step < run.steps:
        run.train_step()
    return run


def prophets(text, device, new):
    """{streams: the model's own loss by seed, in nats per token of held-out text, and what the last
    seed's streams are worth as drafts}"""
    held_out = text.valid[OWN]
    found = {"1 stream": {}, "3 streams": {}}
    for seed, name in product(range(SIZES.seeds), found):
        run = prophet(text, device, int(name[0]), seed, SIZES.streams)
        said = train.evaluate(run.model, held_out, CONTEXT, SIZES.measured)
        found[name][f"loss, seed {seed}"] = said["loss"][-1]
    prompts = held_out[: 16 * (min(128, len(held_out)) // 16)].view(-1, 16).tolist()
    c = heads.drafting(run.head).start
    found["3 streams"] |= worth(run.model, prompts, run.head.drafter(2), min(new, CONTEXT - 16),
                                lambda K: c * K)
    return found


# --- HAMburger


def cooled(model, temperature):
    """A copy that says at temperature 1 what the model says at this one; where logits have a
    soft-cap, it has at least the same best tokens."""
    cold = copy.deepcopy(model)
    offset = model.c.norm_offset
    cold.norm.weight.data = (offset + cold.norm.weight.data) / temperature - offset
    return cold


def hamburgers(model, tokenizer, prompts, new):
    """{confidence: what was found} of one HAMburger. Alone it writes another text, by entries of
    several tokens; as a drafter it is exact. It imitates the model at a lower temperature, because
    at temperature 1 a small one is hardly ever sure."""
    machine = by_weights(model.c)
    cold = cooled(model, COLD)
    burger = Hamburger(cold)
    text = own_text(cold, tokenizer, SIZES.text, SIZES.measured)
    tune(burger, cold, [text.batch(0, i, BATCH // 2, CONTEXT - 1).long().to(model.tok.device)
                        for i in range(SIZES.burger)])
    small = machine.draft(range(2 * burger.micro.c.n_layers)).start     # the decoder's

    def cost(K):
        return (1 + small * (K - 1)) * (K > 0)

    found = {}
    for confidence in CONFIDENCES:
        entries = [entry for ids in prompts for entry in write(burger, ids, new, confidence)]
        tokens = sum(map(len, entries)) / len(entries)
        found[str(confidence)] = {
            "tokens a step alone": tokens, "speed-up alone": tokens / cost(tokens),
            **worth(model, prompts, BurgerDraft(burger, confidence), new, cost)}
    return found


# --- a sparse self-draft


@torch.inference_mode()
def sparse_acceptance(teacher, sinks, window):
    """How likely the first drafted token after each position of the teacher's text is accepted, if
    the draft sees so few tokens. As in `Teacher.q`, each position has a slot of its own.
    (T,) float64"""
    m = teacher.model
    T = teacher.p.shape[1]
    at = torch.arange(T, device=teacher.p.device)
    own = torch.eye(T, dtype=torch.bool, device=at.device)
    seen = torch.cat([sparse(at[:, None], T, sinks, window) & ~own, own], 1)    # (T, 2T)
    hidden = masks(m, at[None], torch.cat([at, at])[None], seen[None])
    at = Placement(at[None], T + at[None], 0, 2 * T)
    x = m.bare.run(teacher.states[0], at, teacher.cache, masks=hidden)
    return teacher.overlap(teacher.probs(m.unembed(x)))


def long_texts(tokenizer, c, count):
    """The longest texts of support/prompts, as ids, cut to the same length, at most 256 tokens."""
    texts = [checkpoint.encode(tokenizer, line["text"], c.bos)[: min(256, c.max_len)]
             for name in SETS for line in read_prompts(name)]
    texts = sorted(texts, key=len, reverse=True)[:count]
    return [ids[: len(texts[-1])] for ids in texts]


def sparse_drafts(model, texts, new):
    """{window: what was found} in the second halves of texts of the same length: alpha with sinks
    and without, the share of the keys and values that is not read at their middle, and tau where
    greedy text goes on."""
    half = len(texts[0]) // 2
    teachers = [Teacher(model, ids) for ids in texts]

    def alpha(sinks, window):
        rates = [sparse_acceptance(t, sinks, window)[half:] for t in teachers]
        return float(torch.cat(rates).mean())

    found = {}
    for window in (w for w in (8, 16, 32, 64, 128) if w < half):
        drafter = SparseDraft(model, GAMMA, SINKS, window)
        drafted = worth(model, [ids[:half] for ids in texts], drafter, min(new, half - 1), float)
        found[str(window)] = {"alpha": alpha(SINKS, window), "without sinks": alpha(0, window),
                              "not read": 1 - (SINKS + window) / (1.5 * half + 1),
                              "tau": drafted["tau"]}
    return found


def paper():
    """{tokens before it: what a pass of a large model reads in half precision, and what a draft
    with all its weights gains at most}"""
    c = SHAPES[LARGE]
    machine = by_weights(c)
    found = {}
    for n in (1024 * 2**k for k in range(8)):
        cache = n * c.n_layers * machine.slope * machine.unit
        cost = step_cost(machine, n, SINKS, WINDOW)
        row = {"GB read": 2 * (machine.unit + cache) / 1e9, "of keys and values": 2 * cache / 1e9,
               "c": cost}
        for alpha in (0.8, 0.9):
            gamma = best_gamma(alpha, cost)
            row |= {f"gamma if alpha is {alpha}": gamma,
                    f"speed-up if alpha is {alpha}": expected_speedup(alpha, gamma, cost)}
        found[f"{n:,}"] = row
    return found


# --- the command


def shown(rows):
    """The lines of a table of {name: {what: figure}}. The last one has all the figures."""
    head = list(list(rows.values())[-1])
    return table(["", *head], [[name, *(f"{row[key]:.4g}" if key in row else "" for key in head)]
                               for name, row in rows.items()])


def run(a):
    model, tokenizer = load(a, "float32")
    kinds = [prompt_ids(name, tokenizer, model.c) for name in SETS]
    prompts = [ids for kind in kinds for ids in kind[: a.quick or 4]]
    text = own_text(model, tokenizer, 2 * SIZES.text, SIZES.measured)
    data = {"prophet": prophets(text, model.tok.device, a.new),
            "hamburger": hamburgers(model, tokenizer, prompts, a.new),
            "sparse": sparse_drafts(model, long_texts(tokenizer, model.c, 16), a.new),
            "paper": paper()}
    lines = [f"{a.model}, float32; {a.machine}; {2 * SIZES.text:,} tokens of its own text; gamma "
             f"{GAMMA}, {SINKS} sinks", ""]
    for name, rows in data.items():
        lines += [f"**{TITLES[name]}**", "", *shown(rows)]
    return page(lines), data
