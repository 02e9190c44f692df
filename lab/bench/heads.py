"""Trained heads beside one another, on the same frozen weights: what they say, cost and gain.

The one thing to remember: tau, the tokens that a pass writes, says how well a head drafts; the speed-up also
says what its drafts cost. A head is worth its training where it beats the best draft that needs none.
"""
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from control import MOST, DoNoHarm
from lab import plots, train_heads
from lab.bench.drafters import TAIL, Bench, Method, in_the_loop, own_methods, pilot
from lab.bench.shared import SETS, Noting, by_position, figures, load_both, page, prompt_ids, steps
from layerskip import SelfDraft, early_exit
from methods import heads
from methods.heads import AHEAD
from methods.trees import best_tree, tree_tokens
from speculative import Drafter, NGram, Then, ancestors

GAMMA = 3               # tokens that each head drafts while its cost is taken
NODES = 8               # of the tree in every table
SIZES = 4, 8, 16, 32    # of the trees of stories
LEVELS = 8              # no chain or tree here is deeper


# --- the heads


def folders(a):
    """{name: folder} of the trained heads to measure: those of --heads, each a folder of heads or one that
    holds several; by default those beside the weights, and none if there are none. Raises FileNotFoundError
    for a folder of --heads without any."""
    found = []
    for where in map(Path, a.heads or [Path(a.model) / "heads"]):
        files = sorted(where.glob(heads.FILE)) or sorted(where.glob(f"*/{heads.FILE}"))
        if a.heads and not files:
            raise FileNotFoundError(f"{where}: no trained heads, as lab/train_heads.py writes them")
        found += [file.parent for file in files]
    names = [folder.name for folder in found]
    return {name if names.count(name) == 1 else str(folder): folder
            for name, folder in zip(names, found, strict=True)}


def farthest(head):
    """How many tokens it may draft."""
    return {"prophet": AHEAD}.get(head.kind, getattr(head, "steps", MOST))


class Exit(heads.Head):
    """A bare early exit, measured as a head that has no weights of its own."""
    kind, reads = "exit", True

    def __init__(self, model, exit_layer):
        self.subs = early_exit(model.c.n_layers, exit_layer)
        self.model, self.shape, self.weights = model, {"exit_layer": exit_layer}, nn.Module()
        self.taps = self.subs[-1:]

    @staticmethod
    def draft(head, rule):
        return SelfDraft(head.model, head.subs, rule)

    def predict(self, tokens, trace, cache):
        yield 0, self.model.unembed(trace[self.taps[0]])


# --- the ways to draft


@dataclass
class Way:
    """A way to draft, and what is known of it before it is timed. make(model): a fresh drafter."""
    make: object
    parents: list               # of the tree, or of the chain
    step: float                 # what a level costs by weights
    ranks: list                 # see `train_heads.evaluate`
    tree: bool = False
    head: str | None = None
    rounds: list | None = None  # what `method` noted

    @property
    def levels(self):
        return int(ancestors(torch.tensor([self.parents])).sum(-1).max()) - 1

    def method(self, timed):
        """Its Method. Rounds of the model `timed` are noted, those of the last start only."""
        def start():
            self.rounds = []
            return lambda model, small: (Noting(self.make(model), self.rounds) if model is timed
                                         else self.make(model))
        return Method(start, gamma=self.levels)


def head_ways(name, loaded, ranks, cost, sizes):
    """{name: Way} of one head, or of an Exit: the chain of the gamma that promises most, and for each of
    `sizes` the best tree of so many nodes, where these are free and a level costs `cost`. loaded: {dtype:
    head}; ranks: the acceptance of its first, second, ... guess."""
    head = next(iter(loaded.values()))
    K = min(LEVELS, farthest(head))
    gamma = max(range(1, K + 1), key=lambda g: tree_tokens(range(g), ranks) / (1 + g * cost))

    def way(parents, tree):
        made = Way(None, list(parents), heads.step_cost(head), ranks, tree,
                   name if heads.count(head) else None)
        made.make = lambda m: loaded[m.tok.dtype].drafter(made.levels, made.parents if tree else None)
        return made

    ways = {f"{name}, gamma {gamma}": way(range(gamma), False)}
    for nodes in sizes:
        shape = best_tree(ranks, nodes, cost, 0.0, head.branches, K) or [0]
        ways[f"{name}, tree of {nodes}"] = way(shape, True)
    return ways


def ruled_head(name, loaded, cost):
    """{name: Method} of a head under the rule that drafts as far as it pays, alone and with an n-gram tail,
    as the exits have it that need no training. cost: of a drafted token."""
    def start(tail):
        rule = DoNoHarm(cost, min(MOST, farthest(next(iter(loaded.values())))))
        drafter = lambda m: loaded[m.tok.dtype].drafter(rule)  # noqa: E731
        return lambda m, small: Then(drafter(m), NGram(TAIL, 3)) if tail else drafter(m)

    return {f"{name}, do no harm{', n-gram tail' * tail}": Method(partial(start, tail))
            for tail in (False, True)}


# --- one table


def ways_of(bench, found, sizes):
    """({name: Way}, {name: Method} of rules, {name of a rule with a head: the head}, what plain decoding
    wrote, as `pilot` has it). found: {name: {dtype: head}}."""
    model, L = bench.model, bench.model.c.n_layers
    texts, cost, best = pilot(bench, L)
    exits = {loaded[model.tok.dtype].shape.get("exit_layer", best[0][0]) for loaded in found.values()}
    measured = {f"exit {e}": {m.tok.dtype: Exit(m, e) for m, _ in bench.models.values()}
                for e in sorted(exits | {best[0][0]})} | found
    makers = {name: lambda m, small, h=h: h[m.tok.dtype].drafter(min(GAMMA, farthest(h[m.tok.dtype])))
              for name, h in measured.items()}
    seconds, written = in_the_loop(bench, makers | {"plain": lambda m, small: Drafter()})
    ways, owners, free = {}, {}, own_methods(L, best, None, cost, False)
    ruled = {name: free[name] for name in ("do no harm", "do no harm, n-gram tail")}
    ids = torch.tensor(sum(written, []))
    for name, loaded in measured.items():
        head = loaded[model.tok.dtype]
        each = max(0.0, seconds[name] / seconds["plain"] - 1) / min(GAMMA, farthest(head))
        ranks = train_heads.evaluate(head, ids, min(256, len(ids), model.c.max_len), len(ids))["ranks"]
        ways |= head_ways(name, loaded, ranks, each, sizes)
        if name in found and "inject_layer" not in head.shape:     # its rows ride along even where it rests
            methods = ruled_head(name, loaded, each)
            ruled, owners = ruled | methods, owners | dict.fromkeys(methods, name)
    return ways, ruled, owners, texts


def widen(r, way):
    """What is reported of a Way beside what `drafters.row` says."""
    return r | {"alpha": way.ranks[0], "positions": by_position(way.rounds), "c_weights": way.step,
                "tau_predicted": tree_tokens(way.parents, way.ranks), "head": way.head, "tree": way.tree,
                "parents": way.parents}


def column(bench, found, title, sizes, bar):
    """One table: {method: row}, and where greedy texts parted."""
    ways, ruled, owners, texts = ways_of(bench, found, sizes)
    methods = {"plain": Method(gamma=0)}
    methods |= {name: way.method(bench.model) for name, way in ways.items()} | ruled
    rows, parted = bench.table(methods, texts, title, bar)
    for name, way in ways.items():
        rows[name] = widen(rows[name], way)
    for name, head in owners.items():
        rows[name]["head"] = head
    return rows, parted


# --- what is reported


COLUMNS = {"ratio to plain": "{ratio:.2f}", "by weights": "{by_weights:.2f}", "tau": "{tau:.2f}",
           "tau by ranks": "{tau_predicted:.2f}", "alpha": "{alpha:.2f}", "c": "{c:.3f}",
           "c by weights": "{c_weights:.3f}", "block": "{block:.2f}", "alpha by position": "{places}"}
FACTS = {"kind": "{kind}", "parameters": "{parameters}", "c by weights": "{c_weights:.3f}"}


def markdown(a, results, facts):
    lines = [f"{a.model}, {a.dtype}; {a.machine}; torch {torch.__version__}; batch 1, up to {a.new} new "
             f"tokens after each prompt of support/prompts, {a.repeats} interleaved runs; every greedy "
             "text is that of plain decoding in float64; c and block: by the clock of the loop; alpha: of "
             "first guesses; by ranks: Sequoia's formula; by position: where it was tested", ""]
    if not facts:
        lines += [f"No trained heads beside these weights: python -m lab.train_heads KIND --model {a.model} "
                  f"--out {a.model}/heads/KIND", ""]
    else:
        lines += figures(facts.items(), FACTS, "heads")
    for title, rows in results.items():
        told = [(name, r | {"places": steps(r.get("positions", []))}) for name, r in rows.items()]
        lines += [f"**{title}**", "", *figures(told, COLUMNS), verdict(rows), ""]
    return lines


def verdict(rows):
    """Which head is best, and how it compares with the best that needs no training."""
    free = {name: r["ratio"] for name, r in rows.items() if not r.get("head")}
    best, trained = max(free, key=free.get), {name: r["ratio"] for name, r in rows.items() if r.get("head")}
    if not trained:
        return f"Without training {best} is best, {free[best]:.2f} times plain decoding."
    top = max(trained, key=trained.get)
    return (f"Best: {top}, {trained[top]:.2f} times plain decoding, and {trained[top] / free[best]:.2f} "
            f"times the best without training, {best}.")


# --- the command


def run(a):
    a.repeats = a.repeats or (1 if a.quick else 3)
    where, (models, tokenizer) = folders(a), load_both(a)
    model = models[a.dtype][0]
    found = {name: {m.tok.dtype: heads.load(folder, m) for m, _ in models.values()}
             for name, folder in where.items()}
    for loaded in found.values():
        for head in loaded.values():
            head.reach = LEVELS     # an eagle drafts farther than it learns
    own = {name: loaded[model.tok.dtype] for name, loaded in found.items()}
    facts = {name: {"kind": h.kind, "shape": h.shape, "c_weights": heads.step_cost(h),
                    "parameters": heads.count(h)} for name, h in own.items()}
    tasks = [(name, T) for T in (0.0, 0.8) for name in a.prompts or SETS]
    results, notes = {}, []
    with tqdm(disable=None) as bar:
        for name, T in tasks[:: len(a.prompts or SETS)] if a.quick else tasks:
            prompts, title = prompt_ids(name, tokenizer, model.c), f"{name}, T {T:g}"
            bench = Bench(a, models, prompts[:2] if a.quick else prompts, {"temperature": T} if T else {},
                          own.values())
            sizes = SIZES if name == "stories" and not a.quick else [NODES]
            results[title], seen = column(bench, found, title, sizes, bar)
            notes += seen
    data = {"results": results, "heads": facts, "divergences": notes, "new": a.new, "repeats": a.repeats,
            "model": str(a.model)}
    draw = partial(plots.drafted, results, f"{a.model}, {a.dtype}")
    return page(markdown(a, results, facts)), data, draw
