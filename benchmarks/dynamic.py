"""Drafts that adapt, on a stream of prompts whose kind changes: what is published, fixed drafts, and Pace.

The one thing to remember: on one kind of text a fixed draft is hard to beat; a rule that adapts is worth what
it loses to the best fixed draft of each prompt, its regret, which nobody could have known beforehand.
"""
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from tqdm import tqdm

from benchmarks.drafters import Bench, Method, divergences, fixed, row, ruled
from benchmarks.shared import SETS, load, page, prompt_ids, table
from control import AnnealedConfidence, DoNoHarm, Entropy, Schedule, Thompson, weight_costs
from layerskip import early_exit
from methods.dynamic import DEL, SWIFT, CLaSp
from methods.pace import Pace, candidates
from speculative import NGram, Wrapper
from support import plots
from support.cli import read_costs, read_skip, read_vocab

TURN = 4  # prompts of one kind in a row
GAMMAS = 1, 2, 4


def stream(tokenizer, c, each):
    """The prompts, and the kind of each: `each` of every kind, then `each` of every kind again, ..."""
    sets = {name: prompt_ids(name, tokenizer, c) for name in SETS}
    some = [(name, ids) for first in range(0, 2 * TURN, TURN)
            for name in SETS for ids in sets[name][first : first + each]]
    return [ids for _, ids in some], [name for name, _ in some]


class Thinking(Wrapper):
    """A drafter, the seconds that it spends deciding, and what it knew at the start of each prompt."""

    def __init__(self, drafter):
        super().__init__(drafter)
        self.seconds, self.alphas, self.chosen = 0.0, [], []
        if isinstance(drafter, Pace):
            for name in ("choose", "experiment"):
                setattr(drafter, name, self.timed(getattr(drafter, name)))

    def timed(self, act):
        def acted(*args):
            start = time.perf_counter()
            done = act(*args)
            self.seconds += time.perf_counter() - start
            return done
        return acted

    def begin(self, state, trace):
        super().begin(state, trace)
        drafter = self.drafters[0]
        if isinstance(drafter, DEL):
            hits, misses = drafter.counts[:2]
            self.alphas.append(((hits + 1) / (hits + misses + 2)).tolist())
        self.chosen.append(dict(getattr(drafter, "chosen", {})))

    def observe(self, state, r):
        self.timed(super().observe)(state, r)

    def choices(self):
        """[{way: rounds}] of each prompt."""
        after = [*self.chosen[1:], dict(getattr(self.drafters[0], "chosen", {}))]
        rounds = [{name: count - before.get(name, 0) for name, count in now.items()}
                  for before, now in zip(self.chosen, after, strict=True)]
        return [{name: count for name, count in each.items() if count} for each in rounds]


def living(make, seen):
    """The Method of a drafter that lives through the whole stream, and so keeps what it learns. seen: a list
    that gets its Thinking."""

    def start():
        made = []

        def get(model, small):
            if not made:
                made.append(Thinking(make(model)))
                seen.append(made[0])
            return made[0]

        return get

    return Method(start)


def all_methods(a, model, skip, vocab, costs, thoughts):
    """({name: Method}, the names of the fixed ones)"""
    L, methods = model.c.n_layers, {}
    exits = sorted({max(1, L // 12), max(1, L // 6), max(1, L // 4)})
    for e in exits[1:2] if a.quick else exits:
        for gamma in GAMMAS[1:2] if a.quick else GAMMAS:
            methods |= fixed(f"exit {e}", early_exit(L, e), gamma)
    if skip and not a.quick:
        methods |= fixed("skip set", skip, 2)
    methods["n-gram"] = Method(lambda: lambda model, small: NGram(8, 3))
    names = list(methods)
    e = exits[len(exits) // 2]
    subs, cost = early_exit(L, e), weight_costs(model.c).step(early_exit(L, e))
    rules = {"FS, +1 / -1": lambda: Schedule(6), "SVIP, entropy": Entropy, "EESD, Thompson": Thompson,
             "SpecBound, annealed": lambda: AnnealedConfidence(e / L), "do no harm": lambda: DoNoHarm(cost)}
    methods |= {f"exit {e}, {name}": ruled(subs, rule) for name, rule in rules.items()}
    makers = {"SWIFT": SWIFT, "CLaSp": partial(CLaSp, skips=max(1, round(0.45 * L))), "DEL": DEL,
              "DEL, few exits": lambda m: DEL(m, exits, every=4),
              "Pace": lambda m: Pace(m, candidates(m, costs, skip, vocab), costs)}
    for name, make in makers.items():
        methods[name] = living(make, thoughts.setdefault(name, []))
    return {"plain": Method(gamma=0)} | methods, names


def column(a, bench, kinds, skip, vocab, costs, bar):
    """One table: {method: row}, with what only a stream tells; what Pace chose; and the exits' alphas."""
    thoughts = {}
    methods, names = all_methods(a, bench.model, skip, vocab, costs, thoughts)
    bar.reset(len(methods) * (len(bench.prompts) + 1 + a.repeats * len(bench.prompts)))
    bench.check_texts(methods, bar)
    bench.run(methods, bar)
    rows = {name: row(replace(m, sublayers=None), methods["plain"], []) for name, m in methods.items()}
    best = [max(1.0, *(rows[name]["ratios"][i] for name in names)) for i in range(len(kinds))]
    for name, r in rows.items():
        r["sets"] = {kind: statistics.geometric_mean(x for x, k in zip(r["ratios"], kinds, strict=True)
                                                     if k == kind) for kind in dict.fromkeys(kinds)}
        r["regret"] = statistics.geometric_mean(b / x for b, x in zip(best, r["ratios"], strict=True)) - 1
        if name in thoughts:
            whole = sum(sum(s.split.values()) for runs in methods[name].samples.values() for s in runs)
            r["deciding"] = sum(t.seconds for t in thoughts[name][-a.repeats :]) / whole
    known = thoughts["DEL"][-1].alphas
    alphas = {e + 1: statistics.mean(seen) for e, seen in enumerate(zip(*known, strict=True))}
    return rows, thoughts["Pace"][-1].choices(), alphas, divergences(bench, methods, "the stream")


COLUMNS = {"ratio to plain": ("ratio", ".2f"), "by weights": ("by_weights", ".2f"),
           "regret": ("regret", ".0%"), "deciding": ("deciding", ".1%"), "tau": ("tau", ".2f"),
           "accepted": ("acceptance", ".2f")}


def markdown(a, results, kinds):
    lines = [f"{a.model}, {a.dtype}; {a.machine}; batch 1, {len(kinds)} prompts, whose kind changes every "
             f"{1 if a.quick else TURN}, up to {a.new} new tokens each, {a.repeats} interleaved runs; regret "
             "against the best fixed draft, or none, of each prompt; the texts are plain decoding's", ""]
    for title, (rows, _, alphas, _) in results.items():
        body = []
        for name, r in rows.items():
            cells = ("" if r.get(key) is None else format(r[key], form) for key, form in COLUMNS.values())
            body.append([name, *cells, *(f"{x:.2f}" for x in r["sets"].values())])
        lines += [f"**{title}**", "", *table(["", *COLUMNS, *dict.fromkeys(kinds)], body)]
        measured = {e: rows.get(f"exit {e}, gamma 1", {}).get("acceptance") for e in alphas}
        lines += [f"- exit {e}: alpha {alphas[e]:.2f} by its shadow tokens, {alpha:.2f} when it drafts"
                  for e, alpha in measured.items() if alpha is not None]
    return page(lines)


def run(a):
    a.repeats = a.repeats or (1 if a.quick else 3)
    models, found = {}, {name: Path(a.model) / f"{name}.json" for name in ("skip", "vocab")}
    for dtype in (a.dtype, "float64"):
        model, tokenizer = load(a, dtype)
        models[dtype] = model, None
    skip, words = a.skip or found["skip"], a.draft_vocab or found["vocab"]
    skip = read_skip(str(skip), model.c.n_layers) if a.skip or skip.is_file() else None
    vocab = read_vocab(str(words), model.c.vocab_size) if a.draft_vocab or words.is_file() else None
    costs = read_costs(a.costs, model.c) if a.costs else weight_costs(model.c)
    prompts, kinds = stream(tokenizer, model.c, 1 if a.quick else TURN)
    if a.quick:
        prompts, kinds = prompts[: len(SETS)], kinds[: len(SETS)]
    tasks, results = [("greedy", {}), ("T 0.8", {"temperature": 0.8})], {}
    with tqdm(disable=None) as bar:
        for title, flags in tasks[:1] if a.quick else tasks:
            bar.set_description(title)
            bench = Bench(a, models, prompts, flags)
            results[title] = column(a, bench, kinds, skip, vocab, costs, bar)
    chosen = {title: choices for title, (_, choices, _, _) in results.items()}
    data = {"results": {title: rows for title, (rows, *_) in results.items()}, "kinds": kinds,
            "chosen": chosen,
            "alphas": {title: alphas for title, (_, _, alphas, _) in results.items()},
            "divergences": {title: found for title, (*_, found) in results.items() if title == "greedy"},
            "new": a.new, "repeats": a.repeats, "model": str(a.model)}
    return markdown(a, results, kinds), data, partial(plots.choices, chosen, kinds, f"{a.model}, {a.dtype}")
