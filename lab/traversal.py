"""Traversal verification: what block verification is to a chain, for a tree.

Recursive rejection (`methods.trees.verify_tree`) starts at the root and never goes below a rejected node.
Here the walk starts at the leaves: a path of likely tokens is accepted as a whole, also where its first token
alone would have been rejected. It is exact and accepts a little more (`python -m lab.bench block`), but each
step depends on the one before: a loop on the host for every row. Among siblings alone both are the same.
"""
import torch


def verify_traversal(p, tokens, parents, coins, q=None, length=None):
    """Traversal verification (Weng et al., NeurIPS 2025, arXiv 2505.12398). Arguments and results are those
    of `verify_tree`. Each row spends one coin for each leaf that it tries, and then one for its token."""
    B, K = tokens.shape
    found = [one_tree(p[b], tokens[b].tolist(), parents.expand(B, K)[b].tolist(), coins,
                      torch.eye(p.shape[2]).to(p)[tokens[b]] if q is None else q[b],
                      K if length is None else int(length[b])) for b in range(B)]
    return tuple(torch.stack(column) for column in zip(*found, strict=True))


def one_tree(p, tokens, parents, coins, q, live):
    """(the last accepted node, the token after it) of one tree: p (K+1, V), q (K, V)."""
    children = {u: [k for k in range(1, live + 1) if parents[k - 1] == u] for u in range(live + 1)}
    p, weight = list(p), {0: torch.ones_like(p[0, 0])}
    while True:
        node, above = 0, None
        while children[node]:       # down to the first leaf: the weight of a path grows as that of a block
            above, node = node, children[node][0]
            if node not in weight:
                t = tokens[node - 1]
                weight[node] = (weight[above] * p[above][t] / q[node - 1][t]).clamp(max=1)
        if node == 0 or coins.flip(weight[node]):
            return torch.tensor(node), coins.choose(p[node])
        # Its parent goes on with what the leaf has left of it, and with the other children.
        left = (weight[above] * p[above] - q[node - 1]).clamp(min=0)
        mass = left.sum()
        p[above] = left / mass if mass > 0 else p[above]
        children[above].remove(node)
        # trap: the root's weight stays 1, also where p = q up to rounding and nothing is left
        weight[above] = (mass / (mass + 1 - weight[above])).nan_to_num(1.0)
