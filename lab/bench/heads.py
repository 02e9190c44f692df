"""Trained heads beside one another, on the same frozen weights: what they say, cost and gain.

The one thing to remember: tau, the tokens that a pass writes, says how well a head drafts; the speed-up also
says what its drafts cost. A head is worth its training where it beats the best draft that needs none.
"""
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from control import MOST, DoNoHarm
from lab.bench.drafters import TAIL, Bench, Method, fixed, own_methods, pilot
from lab.bench.shared import SETS, figures, load_both, page, prompt_ids, steps
from lab.train_heads import KINDS
from layerskip import early_exit
from methods import heads
from methods.heads import AHEAD
from methods.then import Then
from methods.trees import best_tree, tree_tokens
from speculative import NGram, ancestors

NODES = 8               # of the tree in every table
SIZES = 4, 8, 16, 32    # of the trees of stories
LEVELS = 8              # no chain or tree here is deeper


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


# --- the ways to draft


def shapes(head, sizes):
    """{name: parents} of the chain that promises most, and of the best tree for each of `sizes`, where a
    level costs what its weights say, and further nodes nothing."""
    cost, K, ranks = heads.pricing(head)(0), min(LEVELS, farthest(head)), head.ranks or [0.5]
    gamma = max(range(1, K + 1), key=lambda g: tree_tokens(range(g), ranks) / (1 + g * cost))
    found = {f"gamma {gamma}": list(range(gamma))}
    for nodes in sizes:
        found[f"tree of {nodes}"] = best_tree(ranks, nodes, cost, 0.0, head.branches, K) or [0]
    return found


def head_methods(name, loaded, sizes):
    """({name: Method}, {name: what is known before it is timed}) of one head: a chain, trees, and the rule
    that drafts as far as it pays, alone and with an n-gram tail, as the exits have it that need no training.
    loaded: {dtype: head}."""
    head, methods, known = next(iter(loaded.values())), {}, {}
    cost = heads.pricing(head)(0)
    for shape, parents in shapes(head, sizes).items():
        tree, levels = "tree" in shape, int(ancestors(torch.tensor([parents])).sum(-1).max()) - 1
        make = partial(drafter, loaded, levels, parents if tree else None)
        methods[f"{name}, {shape}"] = Method(lambda make=make: make, gamma=levels)
        known[f"{name}, {shape}"] = {
            "head": name, "parents": parents, "tree": tree, "c_weights": cost,
            "tau_predicted": tree_tokens(parents, head.ranks or [0.5])}
    if "inject_layer" not in head.shape:        # its rows ride along even where it rests
        for tail in (False, True):
            title = f"{name}, do no harm{', n-gram tail' * tail}"
            methods[title] = Method(partial(ruled_head, loaded, cost, min(MOST, farthest(head)), tail))
            known[title] = {"head": name}
    return methods, known


def drafter(loaded, rule, shape, model, small):
    return loaded[model.tok.dtype].drafter(rule, shape)


def ruled_head(loaded, cost, most, tail):
    make = partial(drafter, loaded, DoNoHarm(cost, most), None)
    return lambda model, small: Then(make(model, small), NGram(TAIL, 3)) if tail else make(model, small)


def column(bench, found, title, sizes, bar):
    """One table: {method: row}, and where greedy texts parted. found: {name: {dtype: head}}."""
    L = bench.model.c.n_layers
    texts, cost, exits = pilot(bench, L)
    free, best = own_methods(L, exits, None, cost, False), dict(exits)
    methods, known = {"plain": free["plain"]}, {}
    layers = {h.shape["exit_layer"] for h in bench.heads if "exit_layer" in h.shape}
    for e in sorted(layers | {exits[0][0]}):
        methods |= fixed(f"exit {e}", early_exit(L, e), best.get(e, 2))
    methods |= {name: free[name] for name in ("do no harm", "do no harm, n-gram tail")}
    for name, loaded in found.items():
        more, facts = head_methods(name, loaded, sizes)
        methods, known = methods | more, known | facts
    rows, parted = bench.table(methods, texts, title, bar)
    return {name: r | known.get(name, {}) for name, r in rows.items()}, parted


# --- what is reported


COLUMNS = {"ratio to plain": "{ratio:.2f}", "by weights": "{by_weights:.2f}", "tau": "{tau:.2f}",
           "tau by ranks": "{tau_predicted:.2f}", "c": "{c:.3f}", "c by weights": "{c_weights:.3f}",
           "block": "{block:.2f}", "alpha by position": "{places}"}
FACTS = {"kind": "{kind}", "parameters": "{parameters}", "c by weights": "{c_weights:.3f}",
         "acceptance by rank": "{ranks}"}


def markdown(a, results, facts):
    lines = [f"{a.model}, {a.dtype}; {a.machine}; torch {torch.__version__}; batch 1, up to {a.new} new "
             f"tokens after each prompt of support/prompts, {a.repeats} interleaved runs; every greedy "
             "text is that of plain decoding in float64; c and block: by the clock of the loop; by ranks: "
             "Sequoia's formula; by position: how often it was accepted where it was tested", ""]
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
    free = {name: r["ratio"] for name, r in rows.items() if "head" not in r}
    best, trained = max(free, key=free.get), {name: r["ratio"] for name, r in rows.items() if "head" in r}
    if not trained:
        return f"Without training {best} is best, {free[best]:.2f} times plain decoding."
    top = max(trained, key=trained.get)
    return (f"Best: {top}, {trained[top]:.2f} times plain decoding, and {trained[top] / free[best]:.2f} "
            f"times the best without training, {best}.")


def run(a):
    a.repeats = a.repeats or (1 if a.quick else 3)
    where, (models, tokenizer) = folders(a), load_both(a)
    model = models[a.dtype][0]
    found = {name: {m.tok.dtype: heads.load(folder, m, KINDS) for m, _ in models.values()}
             for name, folder in where.items()}
    own = {name: loaded[model.tok.dtype] for name, loaded in found.items()}
    facts = {name: {"kind": h.kind, "shape": h.shape, "c_weights": heads.pricing(h)(0),
                    "parameters": heads.count(h), "ranks": steps(h.ranks)} for name, h in own.items()}
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
    return page(markdown(a, results, facts)), data
