"""How many drafted tokens can be accepted at all? What each rule accepts, every outcome enumerated,
and the optimum, which is the value of a linear program. docs/optimal.md says what comes out.

    python -m lab.optimal                                   the table
    python -m lab.optimal --p .25 .75 --q .75 .25           what block verification gains here
"""
import statistics
from itertools import product

import torch

from lab.bench.shared import figures, page
from methods.block import verify_block
from methods.trees import verify_tree
from model import Refused
from notebooks.outcomes import every_path, probability, total
from support import cli
from support.flags import within

V = 3
TREES = {"chain of 2": [0, 1], "chain of 3": [0, 1, 2], "2 siblings": [0, 0],
         "2 siblings, 1 child": [0, 0, 1], "2 siblings, a child each": [0, 0, 1, 2]}
RULES = "token by token", "block", "optimum", "agreement"


# --- what a rule accepts


def chain_rule(judge):
    """A judge of chains as one of trees."""
    return lambda p, tokens, parents, coins, q: judge(p, q, tokens, coins)


def drawn(q, parents, coins):
    """(tokens, what each was drawn from, the path to each node) of a tree whose siblings are drawn
    without replacement. q: {path: distribution}, for all paths."""
    tokens = []
    laws = []
    paths = [()]
    for k, parent in enumerate(parents):
        left = q[paths[parent]].clone()
        left[[tokens[j] for j in range(k) if parents[j] == parent]] = 0.0
        laws.append(left / left.sum())
        tokens.append(int(coins.choose(laws[-1])))
        paths.append((*paths[parent], tokens[-1]))
    return tokens, laws, paths


def accepted(judge, p, q, parents):
    """How many tokens of a drawn tree `judge` accepts on average. p, q: {path: distribution}."""
    def depth(coins):
        tokens, laws, paths = drawn(q, parents, coins)
        rows = torch.stack([p[path] for path in paths])
        node, _ = judge(rows[None], torch.tensor([tokens]), torch.tensor([parents]), coins,
                        torch.stack(laws)[None])
        return len(paths[int(node)])
    return sum(depth * chance for depth, chance in total(every_path(depth)).items())


# --- the optimum


def largest(c, A, b):
    """The largest c x with A x <= b and x >= 0, for b >= 0, by the simplex method. Of all columns
    that gain, and of all rows that bound them, the first is taken, so that it ends (Bland 1977)."""
    m, n = A.shape
    table = torch.cat([A, torch.eye(m).to(A), b[:, None]], 1)
    value = torch.cat([-c, torch.zeros(m + 1).to(c)])
    base = list(range(n, n + m))
    while (value[:-1] < -1e-10).any():
        column = int((value[:-1] < -1e-10).nonzero()[0])
        bounds = torch.where(table[:, column] > 1e-10, table[:, -1] / table[:, column], torch.inf)
        tied = (bounds <= bounds.min() + 1e-12).nonzero()[:, 0].tolist()
        row = min(tied, key=lambda i: base[i])
        table[row] /= table[row, column].clone()
        others = torch.arange(m) != row
        table[others] -= table[others, column, None] * table[row]
        value -= value[column].clone() * table[row]
        base[row] = column
    return float(value[-1])


def optimum(p, q, parents):
    """The most that any rule can accept on average, if one more token follows the accepted path,
    and then p.

    x[D, v] is how often tree D is drawn and node v is the last accepted one. A(s) is how often the
    accepted path begins with s. The text s t was accepted, or t follows the accepted path s, or s
    came about otherwise and p wrote t: p(s t) = A(s t) + (how often t follows s) + (p(s) - A(s))
    p(t | s). What follows must not be negative: A(s t) <= A(s) p(t | s). Besides, the sum of x[D,
    v] over v is at most the chance of D.
    """
    every = every_path(lambda coins: drawn(q, parents, coins)[2])
    trees = [(probability(steps), paths) for steps, paths in every]
    texts = sorted({path for _, paths in trees for path in paths[1:]})
    nodes = [(d, path) for d, (_, paths) in enumerate(trees) for path in paths[1:]]
    c = torch.tensor([len(path) for _, path in nodes], dtype=torch.float64)
    A = torch.zeros(len(trees) + len(texts), len(nodes), dtype=torch.float64)
    b = torch.tensor([chance for chance, _ in trees] + [0.0] * len(texts), dtype=torch.float64)
    for row, (*before, last) in enumerate(texts, len(trees)):
        before = tuple(before)
        for i, (d, path) in enumerate(nodes):
            A[d, i] = 1.0
            if path[: len(before) + 1] == (*before, last):
                A[row, i] += 1.0
            if before and path[: len(before)] == before:
                A[row, i] -= float(p[before][last])
        if not before:                      # A(()) = 1
            b[row] = p[()][last]
    return largest(c, A, b)


def agreement(p, q, length):
    """What no rule can exceed, even one that may change every later token. Two texts with
    distributions p and q begin with the same i tokens at most 1 - TV of the time, where TV is the
    total variation of their first i tokens."""
    law = {(): (1.0, 1.0)}
    most = 0.0
    for _ in range(length):
        law = {(*s, t): (one * float(p[s][t]), two * float(q[s][t]))
               for s, (one, two) in law.items() for t in range(len(p[s]))}
        most += sum(map(min, law.values()))
    return most


# --- random pairs


def pair(seed):
    """p and q at each path of fewer than four tokens. p is the softmax of normal logits, and q
    the softmax of these logits with normal noise of the same size."""
    generator = torch.Generator().manual_seed(seed)
    p = {}
    q = {}
    for length in range(4):
        for path in product(range(V), repeat=length):
            logits, noise = torch.randn(2, V, generator=generator, dtype=torch.float64)
            p[path] = logits.softmax(0)
            q[path] = (logits + noise).softmax(0)
    return p, q


def rules(parents, p, q):
    """{rule: accepted tokens}"""
    found = {"token by token": accepted(verify_tree, p, q, parents)}
    if parents == list(range(len(parents))):
        found["block"] = accepted(chain_rule(verify_block), p, q, parents)
        found["agreement"] = agreement(p, q, len(parents))
    return found | {"optimum": optimum(p, q, parents)}


def gain(p, q):
    """(accepted token by token, by blocks) where p and q are the same at both places of a draft."""
    paths = [(), *((t,) for t in range(len(p))), *product(range(len(p)), repeat=2)]
    p = dict.fromkeys(paths, torch.tensor(p).double())
    q = dict.fromkeys(paths, torch.tensor(q).double())
    return tuple(accepted(judge, p, q, [0, 1]) for judge in (verify_tree, chain_rule(verify_block)))


def main(argv=None):
    parser = cli.Parser(description="What each rule of verification accepts, and the optimum.")
    parser.add_argument("--pairs", type=within(1, 10**6), default=40,
                        help="random pairs of p and q")
    parser.add_argument("--p", type=float, nargs="+", default=[],
                        help="the gain of block verification for this p, and")
    parser.add_argument("--q", type=float, nargs="+", default=[],
                        help="this q, the same at both places of a draft")
    a = parser.parse_args(argv)
    if a.p or a.q:
        for row in (a.p, a.q):
            if len(row) != len(a.p) or len(row) < 2 or min(row) < 0 or abs(sum(row) - 1) > 1e-6:
                raise Refused(f"--p and --q must be distributions of as many tokens, got {a.p} "
                              f"and {a.q}")
        one, two = gain(a.p, a.q)
        print(f"token by token {one:.4f}, by blocks {two:.4f}: {two - one:.4f} more accepted")
        return
    found = {}
    for tree, parents in TREES.items():
        rows = [rules(parents, *pair(seed)) for seed in range(a.pairs)]
        found[tree] = {rule: statistics.fmean(row[rule] for row in rows) for rule in rows[0]}
    columns = {rule: f"{{{rule}:.3f}}" for rule in RULES}
    print(page(figures(found.items(), columns, f"accepted tokens, mean of {a.pairs} pairs")))


if __name__ == "__main__":
    raise SystemExit(cli.main(main, None))
