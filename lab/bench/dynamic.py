"""Drafts that adapt, beside fixed ones, on a stream of prompts whose kind changes. The regret of a
rule is what it loses to the best fixed draft of each prompt."""
import statistics
from functools import cache, partial
from itertools import product

from control import Confidence, weight_costs
from drafter import NGram
from lab.bench.drafters import COPY, Bench, Method, check_only, chosen, fixed, header, ruled
from lab.bench.shared import SETS, beside, load_both, page, prompt_ids, tables
from lab.clasp import CLaSp, KnapSpec
from lab.rules import AdaptiveExit, AnnealedConfidence, DoNoHarm, Entropy, Schedule, Thompson
from lab.swift import SWIFT
from layerskip import early_exit
from methods.arms import candidates
from methods.dynamic import DEL
from methods.pace import Pace
from methods.standin import read_vocab
from support.cli import read_skip
from support.drafts import trained_beside
from support.measure import kept_costs

TURN = 4  # prompts of one kind in a row
GAMMAS = 1, 2, 4


def stream(tokenizer, c, each):
    """The prompts, and the kind of each. `each` of every kind come first, then `each`
    of every kind again, ..."""
    sets = {name: prompt_ids(name, tokenizer, c) for name in SETS}
    some = [(name, ids) for first in range(0, 2 * TURN, TURN)
            for name in SETS for ids in sets[name][first : first + each]]
    return [ids for _, ids in some], [name for name, _ in some]


def living(make):
    """The Method of a drafter that lives through the whole stream, and so keeps what it learns."""
    return Method(lambda: cache(lambda model, small: make(model)))


# --- the methods


def fixed_drafts(L, exits, skip, vocab, trained):
    """{name: Method} of drafts that never change. trained: {dtype: heads}."""
    methods = {}
    for e, gamma in product(exits, GAMMAS):
        methods |= fixed(f"exit {e}", early_exit(L, e), gamma)
    methods["n-gram"] = Method(lambda: lambda model, small: NGram(COPY, 3))
    for e, gamma in product(exits[:2], GAMMAS[1:]):
        methods[f"exit {e}, gamma {gamma}, n-gram tail"] = ruled(
            early_exit(L, e), lambda gamma=gamma: gamma, tail=True)
    subs = early_exit(L, e := exits[len(exits) // 2])
    methods |= fixed("skip set", skip, 2) if skip else {}
    methods |= fixed(f"exit {e}, draft vocabulary", subs, 2, vocab) if vocab else {}
    for i, head in enumerate(next(iter(trained.values()))):
        gamma = min(3, head.price.longest)
        methods[f"{head.kind}, gamma {gamma}"] = Method(
            lambda i=i, gamma=gamma: lambda model, small: (
                trained[model.tok.dtype][i].drafter(gamma)))
    return methods


def rules(L, e, cost):
    """{name: a function that makes the rule} of what others and we have published to
    go with one exit."""
    return {"FS, +1 / -1": lambda: Schedule(6), "heuristic, +2 / -1": lambda: Schedule(5, up=2),
            "Draft & Verify, adaptive": AdaptiveExit,
            "Kangaroo's confidence": lambda: Confidence(0.6),
            "SVIP, entropy": Entropy, "EESD, Thompson": Thompson,
            "SpecBound, annealed": lambda: AnnealedConfidence(depth=e / L),
            "do no harm": lambda: DoNoHarm(cost)}


def all_methods(c, skip, vocab, trained, costs):
    """({name: Method}, the names of the fixed ones)"""
    L, step = c.n_layers, weight_costs(c).step
    exits = sorted({max(1, L // 12), max(1, L // 6), max(1, L // 4)})
    methods = fixed_drafts(L, exits, skip, vocab, trained)
    names, e = list(methods), exits[len(exits) // 2]
    subs = early_exit(L, e)
    methods |= {f"exit {e}, {name}": ruled(subs, rule)
                for name, rule in rules(L, e, step(subs)).items()}
    for e in exits[:2]:
        subs = early_exit(L, e)
        methods[f"exit {e}, do no harm, n-gram tail"] = ruled(subs, partial(DoNoHarm, step(subs)),
                                                              tail=True)
    makers = {"SWIFT": SWIFT, "CLaSp": CLaSp, "DEL": DEL,
              "KnapSpec": lambda m: KnapSpec(m, costs=costs),
              "DEL, few exits": lambda m: DEL(m, exits=exits, every=4),
              "Pace": lambda m: Pace(m, candidates(m, costs, skip, vocab, trained[m.tok.dtype]),
                                     costs)}
    methods |= {name: living(make) for name, make in makers.items()}
    return {"plain": Method(gamma=0)} | methods, names


# --- what is reported


def along(values, best, kinds):
    """What a stream tells of one ratio to plain decoding for each prompt: the mean, that of each
    kind, and the regret against the best fixed draft, or none, of each prompt."""
    pairs = list(zip(values, kinds, strict=True))
    return {"ratio": statistics.geometric_mean(values), "ratios": values,
            "sets": {kind: statistics.geometric_mean(x for x, k in pairs if k == kind)
                     for kind in dict.fromkeys(kinds)},
            "regret": statistics.geometric_mean(
                b / x for b, x in zip(best, values, strict=True)) - 1}


def column(bench, methods, names, kinds, title):
    """One table, see `Bench.table`, with what only a stream tells, by the clock and by the weights
    that were read. names: of the fixed drafts."""
    first = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    rows = bench.table(methods, [], title, first)
    for name, m in methods.items():
        rows[name]["read"] = [sum(len(s.ids) for s in m.samples[i])
                              / sum(s.read for s in m.samples[i]) for i in range(len(kinds))]
    for key, source in (("clock", "ratios"), ("weights", "read")):
        best = [max([1.0, *(rows[name][source][i] for name in names if name in rows)])
                for i in range(len(kinds))]
        for r in rows.values():
            r[key] = along(r[source], best, kinds)
    return rows


COLUMNS = {"ratio to plain": "{clock[ratio]:.2f}", "regret": "{clock[regret]:.0%}",
           "by weights": "{weights[ratio]:.2f}", "its regret": "{weights[regret]:.0%}",
           "tau": "{tau:.2f}", **{kind: f"{{clock[sets][{kind}]:.2f}}" for kind in SETS}}


def run(a):
    repeats, (models, tokenizer) = a.repeats or 1, load_both(a)
    model = models[a.dtype][0]
    trained = {m.tok.dtype: trained_beside(a.model, m) for m, _ in models.values()}
    skip = beside(a, "skip", a.skip, read_skip, model.c.n_layers)
    vocab = beside(a, "draft_vocab", a.draft_vocab, read_vocab, model.c.vocab_size)
    costs = kept_costs(model)
    (prompts, kinds), results = stream(tokenizer, model.c, a.quick or TURN), {}
    for title, flags in (("greedy", {}), ("T 0.8", {"temperature": 0.8})):
        bench = Bench(models, prompts, flags, a.new, repeats, trained[model.tok.dtype])
        methods, names = all_methods(model.c, skip, vocab, trained, costs)
        check_only(a.only, methods)
        results[title] = column(bench, chosen(methods, a.only), names, kinds, title)
    lines = header(a, repeats, "in float64 on the first prompt of each kind; regret against the "
                   "best fixed draft, or none, of each prompt; the last columns are ratios by the "
                   "clock")
    data = {"results": results, "kinds": kinds, "cost_table": vars(costs)}
    return page(lines + tables(results, COLUMNS)), data
