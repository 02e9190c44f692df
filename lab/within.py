"""Speculation inside speculation (methods/within.py), as drafters for generate.py, and measured.

    generate.py --draft lab/within.py:lookup    lookup inside the model in int4
    python -m lab.within --model DIR            what it brings, beside the formula for two levels
"""
import copy
import statistics
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch

import checkpoint
from control import expected_speedup, nested_cost
from drafter import Drafter
from lab.bench.real import PROMPTS
from lab.bench.shared import page, table
from lab.train_heads import ask
from layerskip import SelfDraft, early_exit
from machine.exact import fast
from machine.quant import quantise
from methods import heads
from methods.suffix import Suffix
from methods.within import Within
from speculative import rounds
from support import cli
from support.texts import read_texts

NEW = 64        # tokens of a text
REPEATS = 3


@cache      # a drafter is made for each run, and a copy takes seconds
def in_four_bits(model):
    return model.alongside(quantise(model, "int4", head="int4", rounds=True))


def lookup(model, gamma):
    return Within(in_four_bits(model), Suffix(3), gamma)


# --- measured


class Inside(NamedTuple):
    """One round inside a draft: tokens drafted and accepted, seconds of drafting and of the rest."""
    drafted: int
    accepted: int
    drafting: float
    rest: float


class Watch(Drafter):
    """An inner drafter with a stopwatch. seen: the Inside of each of its rounds."""

    def __init__(self, inner, seen):
        self.inner = inner
        self.seen = seen
        self.taps = inner.taps
        self.begin = inner.begin
        self.observe = inner.observe

    def propose(self, state):
        self.began = perf_counter()
        draft = self.inner.propose(state)
        self.drafted = perf_counter()
        return draft

    def ahead(self, state, r):
        """Called after each round inside."""
        drafting = self.drafted - self.began
        rest = perf_counter() - self.drafted
        self.seen.append(Inside(int(r.proposed[0]), int(r.accepted[0]), drafting, rest))
        later = copy.copy(self)
        later.inner = self.inner.ahead(state, r)
        return later


class Text(NamedTuple):
    """A text but for its first round, which reads the prompt."""
    seconds: float
    tokens: int
    rounds: int
    accepted: int
    tested: int


def write(model, ids, drafter, seen=None):
    """The Text. seen: cleared of its first round."""
    steps = rounds(model, [ids], NEW, drafter, eos=model.c.eos)
    next(steps)
    if seen is not None:
        seen.clear()
    start = perf_counter()
    done = [r for _, r in steps]
    seconds = perf_counter() - start
    accepted = [int(r.accepted[0]) for r in done]
    tested = [min(int(r.proposed[0]), int(r.accepted[0]) + 1) for r in done]
    return Text(seconds, sum(len(r.new[0]) for r in done), len(done), sum(accepted), sum(tested))


def judge(model, twin, prompts, inner, gamma):
    """{what: figure} of the twin's drafts of gamma tokens, for which `inner` drafts. Costs are in rounds of
    plain decoding."""
    alone = SelfDraft(twin, range(2 * model.c.n_layers), gamma)
    both = Within(twin, inner, gamma)
    model.rehearse(lambda: [write(model, ids, d) for ids in prompts for d in (None, alone, both)])
    texts = defaultdict(list)
    seen = []
    for ids in prompts * REPEATS:
        texts["plain"].append(write(model, ids, None))
        texts["alone"].append(write(model, ids, alone))
        ours = []
        texts["within"].append(write(model, ids, Within(twin, Watch(inner, ours), gamma), ours))
        seen += ours
    total = {name: Text(*map(sum, zip(*found, strict=True))) for name, found in texts.items()}
    unit = total["plain"].seconds / total["plain"].tokens
    n = total["within"]

    drafted = sum(r.drafted for r in seen)
    tested = sum(min(r.drafted, r.accepted + 1) for r in seen)
    alpha_1 = sum(r.accepted for r in seen) / tested
    c_0 = sum(r.drafting for r in seen) / drafted / unit
    blocks = defaultdict(list)          # {tokens of a block: its costs}
    for r in seen:
        blocks[r.drafted + 1].append(r.rest / unit)
    costs = {T: statistics.mean(each) for T, each in blocks.items()}

    def pass_cost(T):
        """Of a block of T tokens, or as many as were seen."""
        return costs[min(costs, key=lambda width: abs(width - T))]

    inside = sum(r.drafting + r.rest for r in seen)
    most = max(costs) - 1               # tokens that inner drafts
    alpha_2 = n.accepted / n.tested
    c = nested_cost(alpha_1, most, c_0, gamma, pass_cost) / gamma
    at_best = nested_cost(1.0, most, c_0, gamma, pass_cost) / gamma
    v = (n.seconds - inside) / n.rounds / unit
    return {
        "alpha 1": alpha_1,
        "c 0": c_0,
        "rounds that draft": sum(r.drafted > 0 for r in seen) / len(seen),
        "a block of 1": costs[1],
        "the longest": costs[max(costs)],
        "alpha 2": alpha_2,
        "v": v,
        "c, formula": c,
        "c": inside / n.rounds / gamma / unit,
        "predicted": expected_speedup(alpha_2, gamma, c, v),
        "if alpha 1 were 1": expected_speedup(alpha_2, gamma, at_best, v),
        "measured": n.tokens / n.seconds * unit,
        "int4 alone": total["alone"].tokens / total["alone"].seconds * unit,
    }


def parse(argv):
    p = cli.Parser(description="Speculation at two levels, measured.", allow_abbrev=False)
    p.add_argument("--model", required=True, metavar="DIR",
                   help="a chat model, with heads/eagle in its folder")
    p.add_argument("--prompts", type=int, default=2, metavar="N", help="how many questions (default: 2)")
    return p.parse_args(argv)


def run(argv):
    a = parse(argv)
    model, tokenizer = checkpoint.load(a.model, "cpu", torch.bfloat16)
    model = fast(model)
    twin = in_four_bits(model)
    L = model.c.n_layers
    inner = {
        "lookup": Suffix(3),
        "exit": SelfDraft(twin, early_exit(L, max(1, L // 6)), 1),
        "EAGLE": heads.load(Path(a.model) / "heads" / "eagle", twin).drafter(1)}
    prompts = ask(a.model, tokenizer, read_texts(PROMPTS / "chat.jsonl", "prompt", "\n")[: a.prompts])
    lines = []
    for (name, drafter), gamma in [(pair, gamma) for pair in inner.items() for gamma in (3, 5)]:
        found = judge(model, twin, prompts, drafter, gamma)
        lines.append([f"{name}, gamma {gamma}", *(f"{x:.2f}" for x in found.values())])
    print(page(table(["inside int4", *found], lines)))


if __name__ == "__main__":
    sys.exit(cli.main(run, sys.argv[1:]))
