"""Speculation inside speculation (methods/within.py), as drafters for generate.py, and measured.

    generate.py --draft lab/within.py:lookup    lookup inside the model in int4; `early`: its exit after
                                                a sixth of the blocks
    python -m lab.within MODEL                  what the formula for two levels says, and what is true: of
                                                lookup, the exit, and EAGLE from MODEL/heads/eagle
"""
import copy
import statistics
import sys
from functools import partial
from pathlib import Path
from time import perf_counter

import torch

import checkpoint
from control import expected_speedup, nested_cost
from lab.bench.real import PROMPTS
from lab.bench.shared import page, table
from lab.train_heads import ask
from layerskip import SelfDraft, early_exit
from machine.quant import quantise
from machine.recorded import Recorded
from methods import heads
from methods.suffix import Suffix
from methods.within import Within
from speculative import Drafter, rounds
from support import cli
from support.drafts import recorded_with
from support.files import read_texts

NEW = 64
REPEATS = 3
GAMMAS = 3, 5


def copied(model):
    return recorded_with(model, quantise(model, "int4", head="int4"))


def lookup(model, gamma):
    return Within(copied(model), Suffix(3), gamma)


def early(model, gamma):
    twin = copied(model)
    return Within(twin, SelfDraft(twin, early_exit(twin.c.n_layers, max(1, twin.c.n_layers // 6)), 1), gamma)


def eagle(folder, model, gamma):
    twin = copied(model)
    return Within(twin, heads.load(Path(folder) / "heads" / "eagle", twin).drafter(1), gamma)


class Watch(Drafter):
    """An inner drafter with a stopwatch. seen: (drafted, tested, accepted, its seconds, the seconds of the
    copy's round) of each round inside."""

    def __init__(self, inner, seen):
        self.inner, self.taps, self.seen = inner, inner.taps, seen
        self.begin, self.observe = inner.begin, inner.observe

    def propose(self, state):
        start = perf_counter()
        draft = self.inner.propose(state)
        self.end = perf_counter()
        self.took = self.end - start
        return draft

    def ahead(self, state, r):
        now = perf_counter()
        drafted = int(r.proposed[0])
        kept = int(r.accepted[0])
        self.seen.append((drafted, min(drafted, kept + 1), kept, self.took, now - self.end))
        later = copy.copy(self)
        later.inner = self.inner.ahead(state, r)
        return later


def write(model, ids, drafter):
    """(seconds after the prompt, rounds) of one text."""
    start, done = None, []
    for _, r in rounds(model, [ids], NEW, drafter, eos=model.c.eos):
        now = perf_counter()
        if start is None:       # the first round follows the prompt: leave it out
            start = now
        else:
            done.append(r)
    return perf_counter() - start, done


def judge(model, prompts, make, gamma):
    """{what: figure} of one way of two levels. make(model, gamma) -> Within."""
    drafter, seen, plain, ours = make(model, gamma), [], [], []
    inner = drafter.inner
    for _ in range(2 if hasattr(model, "rehearse") else 1):
        work = [partial(write, model, ids, d) for ids in prompts for d in (None, drafter)]
        getattr(model, "rehearse", lambda act: act())(lambda work=work: [act() for act in work])
    for ids in prompts * REPEATS:
        plain.append(write(model, ids, None))
        drafter.inner = Watch(inner, seen)
        ours.append(write(model, ids, drafter))

    def speed(runs):
        return sum(len(r.new[0]) for _, done in runs for r in done) / sum(s for s, _ in runs)

    pass_ = 1 / speed(plain)
    after = [r for _, done in ours for r in done]
    drafted, tested, kept, took, blocks = (sum(column) for column in zip(*seen, strict=True))
    width = {}
    for row in seen:
        width.setdefault(row[0] + 1, []).append(row[4] / pass_)
    cost = {T: statistics.mean(times) for T, times in width.items()}
    nearest = lambda T: cost[min(cost, key=lambda w: abs(w - T))]  # noqa: E731
    alpha = kept / max(1, tested)
    asked = max(row[0] for row in seen)     # gamma 1
    c0 = took / max(1, drafted) / pass_
    outer = sum(int(r.accepted[0]) for r in after)
    outer_tested = sum(min(int(r.accepted[0]) + 1, int(r.proposed[0])) for r in after)
    alpha2 = outer / outer_tested
    total = sum(s for s, _ in ours) / pass_
    rest = (total - (took + blocks) / pass_ * len(after) / (len(after) + len(ours))) / len(after)
    c = nested_cost(alpha, asked, c0, gamma, nearest) / gamma
    return {"alpha 1": alpha, "c 0": c0, "drafting rounds": sum(row[0] > 0 for row in seen) / len(seen),
            "c 1 of 1": nearest(1), "c 1 of 1 + gamma 1": nearest(asked + 1), "alpha 2": alpha2, "c": c,
            "c measured": (took + blocks) / pass_ / gamma / (len(after) + len(ours)), "v": rest,
            "predicted": expected_speedup(alpha2, gamma, c, rest), "measured": speed(ours) * pass_}


def parse(argv):
    p = cli.Parser(usage="python -m lab.within MODEL", description="Two levels.", allow_abbrev=False)
    p.add_argument("model")
    return p.parse_args(argv)


def run(argv):
    folder = parse(argv).model
    model, tokenizer = checkpoint.load(folder, "cpu", torch.bfloat16)
    model = Recorded(model)
    prompts = ask(folder, tokenizer, read_texts(PROMPTS / "chat.jsonl", "prompt", "\n")[:2])
    rows = {}
    for name, make in {"lookup": lookup, "exit": early, "eagle": partial(eagle, folder)}.items():
        for gamma in GAMMAS:
            rows[f"{name}, gamma {gamma}"] = judge(model, prompts, make, gamma)
    head = ["inside int4", *next(iter(rows.values()))]
    print(page(table(head, [[name, *(f"{x:.3f}" for x in r.values())] for name, r in rows.items()])))


if __name__ == "__main__":
    sys.exit(cli.main(run, None))
