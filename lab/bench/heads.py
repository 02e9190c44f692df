"""What trained heads on the same frozen weights cost and gain, compared with one another."""
from functools import partial
from itertools import product
from pathlib import Path

import torch

from drafter import NGram
from lab.bench.drafters import COPY, Bench, Method, fixed, header, own_methods, pilot
from lab.bench.shared import SETS, figures, load_both, page, prompt_ids, tables
from lab.rules import DoNoHarm
from lab.train_heads import KINDS
from layerskip import early_exit
from methods import heads
from methods.then import Then
from methods.trees import ancestors, best_tree, tree_tokens

NODES = 8       # of a tree
LEVELS = 8      # no chain or tree here is deeper


def shapes(head, cost):
    """{name: parents} of the chain and of the tree that promise most, where a level costs what its
    weights say, and further nodes nothing."""
    K, ranks = min(LEVELS, head.price.longest), head.ranks or [0.5]
    gamma = max(range(1, K + 1), key=lambda g: tree_tokens(range(g), ranks) / (1 + g * cost))
    return {f"gamma {gamma}": list(range(gamma)),
            f"tree of {NODES}": best_tree(ranks, NODES, cost, 0.0, head.branches, K) or [0]}


def head_methods(name, loaded):
    """{name: Method} of one head: a chain, a tree, and the rule that drafts as far as it pays,
    alone and with an n-gram tail, as the exits have it that need no
    training. loaded: {dtype: head}."""
    head, methods = next(iter(loaded.values())), {}
    cost = heads.pricing(head)(0)
    for shape, parents in shapes(head, cost).items():
        levels = int(ancestors(torch.tensor([parents])).sum(-1).max()) - 1
        make = partial(drafter, loaded, levels, parents if "tree" in shape else None, False)
        facts = {"parents": parents, "tau_predicted": tree_tokens(parents, head.ranks or [0.5])}
        methods[f"{name}, {shape}"] = Method(lambda make=make: make, gamma=levels, facts=facts)
    for tail in (False, True):
        methods[f"{name}, do no harm{', n-gram tail' * tail}"] = Method(lambda tail=tail: partial(
            drafter, loaded, DoNoHarm(cost, head.price.longest), None, tail))
    return methods


def drafter(loaded, rule, shape, tail, model, small):
    made = loaded[model.tok.dtype].drafter(rule, shape)
    return Then(made, NGram(COPY, 3)) if tail else made


def column(bench, found, title):
    """One table: {method: row}. found: {name: {dtype: head}}."""
    L = bench.model.c.n_layers
    texts, cost, exits = pilot(bench, L)
    free, best = own_methods(L, exits, None, cost), dict(exits)
    methods = {"plain": free["plain"]}
    layers = {h.shape["exit_layer"] for h in bench.heads if "exit_layer" in h.shape}
    for e in sorted(layers | {exits[0][0]}):
        methods |= fixed(f"exit {e}", early_exit(L, e), best.get(e, 2))
    methods |= {name: free[name] for name in ("do no harm", "do no harm, n-gram tail")}
    for name, loaded in found.items():
        methods |= head_methods(name, loaded)
    return bench.table(methods, texts, title)


COLUMNS = {"ratio to plain": "{ratio:.2f}", "by weights": "{by_weights:.2f}", "tau": "{tau:.2f}",
           "tau by ranks": "{tau_predicted:.2f}", "c": "{c:.3f}", "block": "{block:.2f}",
           "first token accepted": "{first:.2f}"}
FACTS = {"kind": "{kind}", "parameters": "{parameters}", "c by weights": "{c_weights:.3f}",
         "acceptance by rank": "{ranks}"}


def run(a):
    repeats = a.repeats or 3
    models, tokenizer = load_both(a)
    where = Path(a.heads or f"{a.model}/heads")
    model = models[a.dtype][0]
    folders = sorted(file.parent for file in where.glob(f"*/{heads.FILE}"))
    if not folders:
        raise FileNotFoundError(f"{where}: no trained heads, as lab/train_heads.py writes them")
    found = {folder.name: {m.tok.dtype: heads.load(folder, m, KINDS) for m, _ in models.values()}
             for folder in folders}
    own = {name: loaded[model.tok.dtype] for name, loaded in found.items()}
    facts = {name: {"kind": h.kind, "shape": h.shape, "c_weights": heads.pricing(h)(0),
                    "parameters": h.count(), "ranks": " / ".join(f"{x:.2f}" for x in h.ranks)}
             for name, h in own.items()}
    results = {}
    for T, name in product((0.0, 0.8), a.prompts or SETS):
        prompts, title = prompt_ids(name, tokenizer, model.c)[: a.quick], f"{name}, T {T:g}"
        bench = Bench(models, prompts, {"temperature": T} if T else {}, a.new, repeats,
                      own.values())
        results[title] = column(bench, found, title)
    data = {"results": results, "heads": facts}
    lines = header(a, repeats, "in float64; c and block: by the clock; by ranks: Sequoia's formula")
    return page(lines + figures(facts.items(), FACTS, "heads") + tables(results, COLUMNS)), data
