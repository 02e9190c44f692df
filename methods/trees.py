"""Trees of drafts: several tokens for the same place, and which shape of tree is worth its cost.

A sibling is tried only after those before it were rejected. So siblings gain where first choices
are often wrong, and depth gains where they are often right.

    chain           D - d1 - d2 - d3      1 + a + a^2 + a^3 tokens per round, if a first choice is
                                          accepted with probability a
    with siblings   D - d1 - d2 - d3      d4 may take the place of d1, and d5 that of d2: another b + a b
                     \\    \\               tokens, if a second choice is accepted with probability b
                      d4   d5             shape: [0, 1, 2, 0, 1]

A shape is a list of parents, as in `Draft.parents`. What the loop itself needs for trees is in
speculative.py, and `verify_tree` in verification.py.
"""
import math
from dataclasses import replace
from functools import cache
from itertools import accumulate

import torch

from speculative import Draft, Wrapper

# --- shapes


def chain_with_siblings(gamma, widths):
    """The parents of a chain of gamma tokens, of which the first widths[0] have a sibling, the
    first widths[1] a second one, and so on. It is the shape that `Siblings` drafts.

    >>> chain_with_siblings(3, [2, 1])      # the chain, first siblings, a second sibling
    [0, 1, 2, 0, 1, 0]
    """
    return [*range(gamma), *(k for width in widths for k in range(width))]


def tree_tokens(parents, rank_acceptance):
    """Tokens per target pass over a tree: 1, plus for each node the product of the acceptance rates on the
    way to it (Sequoia, arXiv 2402.12374, section 3.1: all places alike). rank_acceptance[i]: the chance
    that a node's child number i is the accepted one. For a chain this is `control.expected_tokens`.

    >>> tree_tokens([0, 1, 0], [0.5, 0.25])     # 1 + 0.5 + 0.5 * 0.5 + 0.25
    2.0
    """
    reach = [1.0]
    for k, parent in enumerate(parents):
        reach.append(reach[parent] * rank_acceptance[parents[:k].count(parent)])
    return sum(reach)


def rank_acceptance(p, q, ranks):
    """The chance that the draft's likeliest token, its second, ... is the accepted one: a list of
    `ranks` numbers, for a draft of its top tokens. p (..., V): the target's distributions, one-hot when
    greedy; q (..., V): the draft's at the same places, before any cut, since a one-hot has no second."""
    return p.gather(-1, q.topk(ranks).indices).flatten(0, -2).double().mean(0).tolist()


def best_tree(rank_acceptance, nodes, depth_cost, node_cost, branches=True, levels=math.inf):
    """The parents of the tree of at most `nodes` nodes that promises the highest speed, level by
    level; [] if none gains. The dynamic programme of Sequoia (arXiv 2402.12374, section 3.1).

    rank_acceptance: see `tree_tokens`. depth_cost: the cost of drafting a level, node_cost: that of one
    more token in the verifying pass, both relative to a target pass over one token. branches=False:
    only first children may have children, as in `chain_with_siblings`. levels: how deep it may be.

    >>> best_tree([0.6, 0.2], 4, depth_cost=0.05, node_cost=0.05)
    [0, 0, 1, 3]
    """
    @cache
    def grow(n, depth, rank):
        """(accepted tokens, subtrees): the best n nodes below a node that has its first `rank` children."""
        best = 0.0, ()
        most = 0 if depth == 0 or rank == len(rank_acceptance) else n if branches or rank == 0 else min(n, 1)
        for m in range(1, most + 1):        # the next child's subtree has m nodes, itself included
            inside, below = grow(m - 1, depth - 1, 0)
            later, others = grow(n - m, depth, rank + 1)
            best = max(best, (rank_acceptance[rank] * (1 + inside) + later, (below, *others)))
        return best

    def speed(shape):
        n, depth = shape
        return (1 + grow(n, depth, 0)[0]) / (1 + depth * depth_cost + n * node_cost)

    best = max([(0, 0)] + [(n, d) for n in range(1, nodes + 1) for d in range(1, min(n, levels) + 1)],
               key=speed)
    parents, families = [], [(0, grow(*best, 0)[1])]
    for node, family in families:           # a list that grows while it is read
        for below in family:
            parents.append(node)
            families.append((len(parents), below))
    return parents


# --- drafting


class Siblings(Wrapper):
    """A wrapper around a drafter of chains: it adds siblings, other tokens for the same places.

    drafter: such as SelfDraft or ModelDraft, with any rule. widths: how many tokens of the chain, from
    the first on, get a sibling, how many a second one, and so on: [3, 1]. Siblings are drawn without
    replacement, each from what is left of q. If nothing is left, as when greedy, the sibling is the
    likeliest unused token, with a one-hot q. The shape that pays: `best_tree(..., branches=False)`.

    For the drafter nothing changes: it does not draft from siblings, and it learns from a chain. In
    a batch only the rows with the longest chain have siblings, and near the end of an answer the
    last ones are left out. A drafter that draws nothing, such as an n-gram, gets none. `reuse` is
    dropped: the siblings must pass through all sub-layers anyway.
    """

    def __init__(self, drafter, widths):
        super().__init__(drafter)
        self.widths = widths

    def propose(self, state):
        seen = []                           # the logits of each drafted token, (B, 1, V)

        def watched(logits):
            seen.append(logits)
            return state.probs(logits)

        draft = self.drafters[0].propose(replace(state, probs=watched))
        K, widths = draft.tokens.shape[1], []
        for width in self.widths:
            if (width := min(width, K, len(seen), max(state.left_cpu) - 1 - K - sum(widths))) > 0:
                widths.append(width)
        if draft.q is None or not widths:
            return draft
        tree = grow(state, draft, torch.cat(seen, 1), chain_with_siblings(K, widths))
        n, most = draft.length, K + sum(widths)
        return replace(tree, length=n if n is None else torch.where(n == K, most, n), traced=draft.traced)


def grow(state, draft, logits, parents):
    """The Draft of a tree from a drawn chain (B, K) and the raw logits of each of its places
    (B, K, V): a node's child number i is choice number i for its level. So all families of a level
    hold the same tokens. The text stays exact, as only one of the families is tried. parents: as
    `best_tree` or `chain_with_siblings` makes them; levels deeper than the chain are left out."""
    K, depths = draft.tokens.shape[1], [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    nodes = [(depth, parents[:k].count(parents[k])) for k, depth in enumerate(depths[1:]) if depth <= K]
    ranks = range(1, 1 + max(rank for _, rank in nodes))
    widths = [max(depth for depth, rank in nodes if rank == r) for r in ranks]
    tokens, q = siblings(draft, logits, widths, state.coins)                 # (B, K+S), (B, K+S, V)
    starts = [0, *accumulate(widths, initial=K)]        # the first column of each rank
    columns = [starts[rank] + depth - 1 for depth, rank in nodes]
    columns, parents = state.send([columns, parents[: len(nodes)]]).unbind()
    return Draft(tokens[:, columns], q[:, columns], parents=parents[None])


def siblings(draft, logits, widths, coins):
    """A chain, then other tokens for its places in the order of `chain_with_siblings`, each drawn with one
    uniform. logits (B, K, V): the chain's, raw. Returns tokens (B, K+S), drawn from q (B, K+S, V)."""
    last, left, tokens, q = draft.tokens, draft.q, [draft.tokens], [draft.q]
    for width in widths:
        last = last[:, :width, None]                                            # (B, width, 1)
        left = left[:, :width].scatter(2, last, 0.0)                            # (B, width, V)
        logits = logits[:, :width].scatter(2, last, -math.inf)
        mass = left.sum(-1, keepdim=True)
        top = torch.zeros_like(left).scatter_(2, logits.argmax(-1, keepdim=True), 1.0)
        q.append(torch.where(mass > 0, left / mass, top))
        last = coins.choose(q[-1])                                              # (B, width)
        tokens.append(last)
    return torch.cat(tokens, 1), torch.cat(q, 1)
