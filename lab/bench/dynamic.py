"""Drafts that adapt, on a stream of prompts whose kind changes: what is published, fixed drafts, and Pace.

The one thing to remember: on one kind of text a fixed draft is hard to beat; a rule that adapts is worth what
it loses to the best fixed draft of each prompt, its regret, which nobody could have known beforehand.
"""
import statistics
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise

from tqdm import tqdm

from control import Confidence, DoNoHarm, weight_costs
from lab.bench.drafters import TAIL, Bench, Method, divergences, fixed, row, ruled
from lab.bench.shared import SETS, beside, figures, load_both, page, prompt_ids
from lab.clasp import CLaSp, KnapSpec
from lab.rules import AdaptiveExit, AnnealedConfidence, Entropy, Schedule, Thompson, ValueGate
from lab.swift import SWIFT
from layerskip import early_exit
from machine.quant import byte_costs, size
from methods.arms import candidates
from methods.dynamic import DEL
from methods.pace import Pace
from speculative import NGram, Wrapper
from support.cli import read_skip, read_vocab
from support.drafts import LARGE, trained_beside
from support.measure import as_data, kept_costs, read_costs

TURN = 4  # prompts of one kind in a row
GAMMAS = 1, 2, 4
NEEDED = "plain", "n-gram", "Pace"      # whatever --only says


def stream(tokenizer, c, each):
    """The prompts, and the kind of each: `each` of every kind, then `each` of every kind again, ..."""
    sets = {name: prompt_ids(name, tokenizer, c) for name in SETS}
    some = [(name, ids) for first in range(0, 2 * TURN, TURN)
            for name in SETS for ids in sets[name][first : first + each]]
    return [ids for _, ids in some], [name for name, _ in some]


class Stream(Bench):
    """A Bench for which drafters live on from prompt to prompt. trained: {dtype: heads}."""

    def __init__(self, a, models, prompts, flags, trained):
        super().__init__(a, models, prompts, flags, trained[a.dtype])
        self.trained = trained

    def heads_of(self, model):
        return self.trained[next(dtype for dtype, (target, _) in self.models.items() if target is model)]


class Thinking(Wrapper):
    """A drafter, and how often it had chosen each way to draft at the start of each prompt."""

    def __init__(self, drafter):
        super().__init__(drafter)
        self.chosen = []

    def seen(self):
        return Counter(getattr(self.drafters[0], "chosen", {}))

    def begin(self, state, trace):
        super().begin(state, trace)
        self.chosen.append(self.seen())

    def choices(self):
        """[{way: rounds}] of each prompt."""
        counts = pairwise([*self.chosen, self.seen()])
        return [dict(now - before) for before, now in counts]


def living(make):
    """The Method of a drafter that lives through the whole stream, and so keeps what it learns."""
    return Method(lambda: cache(lambda model, small: make(model)))


# --- the methods


def fixed_drafts(a, bench, skip, vocab):
    """{name: Method} of drafts that never change, and the exits among them."""
    L, methods = bench.model.c.n_layers, {}
    exits = sorted({max(1, L // 12), max(1, L // 6), max(1, L // 4)})
    for e in exits[1:2] if a.quick else exits:
        for gamma in GAMMAS[1:2] if a.quick else GAMMAS:
            methods |= fixed(f"exit {e}", early_exit(L, e), gamma)
    methods["n-gram"] = Method(lambda: lambda model, small: NGram(TAIL, 3))
    if not a.quick:
        for e in exits[:2]:
            for gamma in GAMMAS[1:]:
                methods[f"exit {e}, gamma {gamma}, n-gram tail"] = ruled(
                    early_exit(L, e), lambda gamma=gamma: gamma, tail=True)
        subs = early_exit(L, e := exits[len(exits) // 2])
        methods |= fixed("skip set", skip, 2) if skip else {}
        methods |= fixed(f"exit {e}, draft vocabulary", subs, 2, vocab) if vocab else {}
        for i, head in enumerate(bench.heads_of(bench.model)):
            gamma = min(3, getattr(head, "steps", 3))
            methods[f"{head.kind}, gamma {gamma}"] = Method(lambda i=i, gamma=gamma: lambda model, small: (
                bench.heads_of(model)[i].drafter(gamma)))
    return methods, exits


def rules(L, e, cost):
    """{name: a function that makes the rule} of what others and we have published to go with one exit."""
    return {"FS, +1 / -1": lambda: Schedule(6), "heuristic, +2 / -1": lambda: Schedule(5, up=2),
            "Draft & Verify, adaptive": AdaptiveExit, "Kangaroo's confidence": lambda: Confidence(0.6),
            "SVIP, entropy": Entropy, "EESD, Thompson": Thompson,
            "SpecBound, annealed": lambda: AnnealedConfidence(e / L), "do no harm": lambda: DoNoHarm(cost),
            "expected-value gate": lambda: ValueGate(cost)}


def all_methods(a, bench, skip, vocab, costs):
    """({name: Method}, the names of the fixed ones)"""
    L, (methods, exits) = bench.model.c.n_layers, fixed_drafts(a, bench, skip, vocab)
    names, e, step = list(methods), exits[len(exits) // 2], weight_costs(bench.model.c).step
    subs = early_exit(L, e)
    methods |= {f"exit {e}, {name}": ruled(subs, rule) for name, rule in rules(L, e, step(subs)).items()}
    for e in exits[:2]:
        subs = early_exit(L, e)
        methods[f"exit {e}, do no harm, n-gram tail"] = ruled(subs, partial(DoNoHarm, step(subs)), tail=True)
    makers = {"SWIFT": SWIFT, "CLaSp": partial(CLaSp, skips=max(1, round(0.45 * L))), "DEL": DEL,
              "KnapSpec": lambda m: KnapSpec(m, costs),
              "DEL, few exits": lambda m: DEL(m, exits, every=4),
              "Pace": lambda m: Pace(m, candidates(m, costs, skip, vocab, bench.heads_of(m)), costs)}
    methods |= {name: living(make) for name, make in makers.items()}
    methods = {"plain": Method(gamma=0)} | methods
    if a.only:
        methods = {name: m for name, m in methods.items()
                   if name in NEEDED or any(word in name for word in a.only)}
    return methods, [name for name in names if name in methods]


# --- what is reported


def along(values, best, kinds):
    """What a stream tells of one ratio to plain decoding for each prompt: the mean, that of each kind, and
    the regret against the best fixed draft, or none, of each prompt."""
    pairs = list(zip(values, kinds, strict=True))
    return {"ratio": statistics.geometric_mean(values), "ratios": values,
            "sets": {kind: statistics.geometric_mean(x for x, k in pairs if k == kind)
                     for kind in dict.fromkeys(kinds)},
            "regret": statistics.geometric_mean(b / x for b, x in zip(best, values, strict=True)) - 1}


def both_ways(rows, methods, names, kinds):
    """Fill in what only a stream tells, by the clock and by the weights that were read."""
    for name, m in methods.items():
        rows[name]["read"] = [sum(len(s.ids) for s in m.samples[i]) / sum(s.read for s in m.samples[i])
                              for i in range(len(kinds))]
    for key, source in (("clock", "ratios"), ("weights", "read")):
        best = [max(1.0, *(rows[name][source][i] for name in names)) for i in range(len(kinds))]
        for r in rows.values():
            r[key] = along(r[source], best, kinds)


def column(a, bench, kinds, skip, vocab, costs, bar):
    """One table: {method: row}, and where texts parted."""
    few = bench.prompts[::TURN][: len(SETS)]
    methods, names = all_methods(a, bench, skip, vocab, costs)
    bar.reset(len(methods) * (len(few) * bench.greedy + 1 + a.repeats * len(bench.prompts)))
    if bench.greedy:
        Stream(a, bench.models, few, {}, bench.trained).check_texts(methods, bar)
    bench.run(methods, bar)
    rows = {name: row(replace(m, sublayers=None), methods["plain"], []) for name, m in methods.items()}
    both_ways(rows, methods, names, kinds)
    return rows, divergences(bench, methods, "the stream")


COLUMNS = {"ratio to plain": "{clock[ratio]:.2f}", "regret": "{clock[regret]:.0%}",
           "by weights": "{weights[ratio]:.2f}", "its regret": "{weights[regret]:.0%}",
           "tau": "{tau:.2f}", "accepted": "{acceptance:.2f}"}


def markdown(a, results, kinds):
    lines = [f"{a.model}, {a.dtype}; {a.machine}; batch 1, {len(kinds)} prompts, whose kind changes every "
             f"{1 if a.quick else TURN}, up to {a.new} new tokens each, {a.repeats} interleaved runs; regret "
             "against the best fixed draft, or none, of each prompt; the last columns are ratios by the "
             "clock; on the first prompt of each kind the greedy texts were plain decoding's in float64", ""]
    for title, (rows, _) in results.items():
        columns = COLUMNS | {kind: f"{{clock[sets][{kind}]:.2f}}" for kind in kinds}
        lines += [f"**{title}**", "", *figures(rows.items(), columns)]
    return page(lines)


# --- the command


def run(a):
    a.repeats = a.repeats or 1
    models, tokenizer = load_both(a)
    heads = {dtype: trained_beside(a.model, model) for dtype, (model, _) in models.items()}
    model = models[a.dtype][0]
    skip = beside(a, "skip", a.skip, read_skip, model.c.n_layers)
    vocab = beside(a, "draft_vocab", a.draft_vocab, read_vocab, model.c.vocab_size)
    how = a.costs or ("measured" if size(model.blocks) >= LARGE else "weights")
    costs = (byte_costs(model) if how == "weights" else
             kept_costs(model) if how == "measured" else read_costs(how, model.c))
    prompts, kinds = stream(tokenizer, model.c, 1 if a.quick else TURN)
    if a.quick:
        prompts, kinds = prompts[: len(SETS)], kinds[: len(SETS)]
    tasks, results = [("greedy", {}), ("T 0.8", {"temperature": 0.8})], {}
    with tqdm(disable=None) as bar:
        for title, flags in tasks[:1] if a.quick else tasks:
            bar.set_description(title)
            bench = Stream(a, models, prompts, flags, heads)
            results[title] = column(a, bench, kinds, skip, vocab, costs, bar)
    parts = zip(("results", "divergences"), zip(*results.values(), strict=True), strict=True)
    data = {name: dict(zip(results, values, strict=True)) for name, values in parts}
    data["divergences"].pop("T 0.8", None)      # where texts are drawn they may differ
    data |= {"kinds": kinds, "costs": how, "cost_table": as_data(costs), "new": a.new,
             "repeats": a.repeats, "model": str(a.model)}
    return markdown(a, results, kinds), data
