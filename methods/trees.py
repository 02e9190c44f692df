r"""Trees of drafts hold several tokens for the same place. Which shape of tree is worth its cost?

A sibling is tried only after those before it were rejected. So siblings gain where first choices
are often wrong, and depth gains where they are often right.

    chain           D - d1 - d2 - d3    1 + a + a^2 + a^3 tokens per round, if a first choice is
                                        accepted with probability a
    with siblings   D - d1 - d2 - d3    d4 may take the place of d1, and d5 the place of d2, which
                     \    \             adds b + a b tokens if a second choice is accepted with
                      d4   d5           probability b

A shape is a list of parents, such as [0, 1, 2, 0, 1] for the lower one. The loop knows nothing of
trees. A `Tree` is a Draft that says where its tokens stand and how they are verified, and what is
left of it then is a chain.
"""
import math
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import torch

from drafter import Draft
from methods.wrapper import Wrapper
from sampling import one_hot

# --- a tree as a draft


def ancestors(parents):
    """Which nodes of a tree each node sees, namely itself and its ancestors. Node 0 is the last
    known token, and node k is tokens[:, k - 1] of the Draft. (B or 1, K) -> (B or 1, K+1, K+1) bool

    >>> ancestors(torch.tensor([[0, 1, 0]])).int().tolist()     # 2: a child of 1, 3: a sibling of 1
    [[[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]]
    """
    B, K = parents.shape
    row = torch.arange(B, device=parents.device)
    itself = torch.eye(K + 1, dtype=torch.bool, device=parents.device)
    tree = itself.repeat(B, 1, 1)                                               # (B, K+1, K+1)
    for k in range(1, K + 1):
        tree[:, k] |= tree[row, parents[:, k - 1]]      # a parent comes before its children
    return tree


@dataclass
class Tree(Draft):
    """A Draft whose tokens may be siblings. `length` says how many nodes of each row count, in
    their order. The rest is padding."""
    parents: torch.Tensor = field(kw_only=True)     # (B or 1, K) the parent of each: 0 is the last
    #                                   known token, k is tokens[:, k - 1], which comes before it

    @cached_property
    def seen(self):
        """Its `ancestors`, (B or 1, K+1, K+1) bool."""
        return ancestors(self.parents)

    def cut(self, K):
        return replace(super().cut(K), parents=self.parents[:, :K])

    def place(self, state):
        depth = self.seen.sum(-1) - 1                                           # (B or 1, K+1)
        return super().place(state)._replace(
            positions=state.positions(depth), tree=self.seen, same=False)

    def judge(self, state, r, verify):
        """By `verify_tree`; the argument `verify` is for chains."""
        node, token = verify_tree(r.p, self.tokens, self.parents, state.coins, self.q, self.length)
        return *straighten(state, r, node), token


def straighten(state, r, node):
    """Turn the verified tree of a Round r into a chain that begins with the accepted path, and move
    the cache to match, so that no other code handles trees. The last accepted node is node (B,).
    Returns the Round in the chain's order, and how many of its tokens were accepted (B,).

    After the path come the descendants of its last node, all rejected, and then dead tokens. Its
    length is the most that could have been accepted, the longest branch through that node.

        tree    D - d1 - d2     d1 is rejected, its sibling d3 accepted; nothing is below d3
                 \\
                  d3            nodes 0 D, 1 d1, 2 d2, 3 d3: node is 3
        path    0 3 1 2         first the path, then what is below its end, then the dead
        slots   n-1, n+2, n, n+1 move to n-1, n, n+1, n+2
        chain   d3 | d1 d2      length 1, accepted 1
    """
    tree = r.draft
    B, K = tree.tokens.shape
    place = torch.arange(K + 1, device=node.device)
    row = torch.arange(B, device=node.device)
    seen = tree.seen.expand(B, -1, -1)
    on_path = seen[row, node]                                                   # (B, K+1)
    below = seen[row, :, node]                                                  # (B, K+1)
    path = torch.where(on_path, 0, 2 - below.long()).argsort(dim=1, stable=True)    # (B, K+1)
    slots = state.positions(place)                                              # (B, K+1)
    state.cache.move(slots.gather(1, path), slots)

    def ordered(t, order):
        return t[row[:, None], order]

    live = below & (place <= tree.length[:, None])                              # (B, K+1)
    length = (live * (seen.sum(-1) - 1)).amax(1)                                # (B,)
    order = path[:, 1:] - 1                                                     # (B, K)
    q = None if tree.q is None else ordered(tree.q, order)
    chain = Draft(ordered(tree.tokens, order), q, length)
    trace = {tap: ordered(x, path) for tap, x in r.trace.items()}
    logits = ordered(r.logits, path)
    r = replace(r, draft=chain, logits=logits, p=ordered(r.p, path), trace=trace)
    return r, on_path.sum(1) - 1


def verify_tree(p, tokens, parents, coins, q=None, length=None):
    """Recursive rejection (Sequoia, arXiv 2402.12374, appendix F) is `verify` for a tree, which may
    hold siblings, several drafted tokens for the same place.

    Row k of p (B, K+1, V) is the distribution after node k. tokens (B, K), parents (B or 1, K) and
    length (B,) come from a Tree. Each token was drawn from its row of q (B, K, V), which for a
    later sibling may depend on those before it. q is None for copied drafts. Returns the last
    accepted node (B,), 0 if there is none, and the token after it (B,).

    Siblings are tried in order. If the first is rejected, the token must come from the residual
    max(p - q, 0), scaled to sum to 1. So the residual takes p's place when the second is tried, and
    so on. After an accepted token, its children are tried. Like `verify`, this spends one flip for
    each of the K tokens of every row, tried or not, and then one choice per row.

    >>> from sampling import Coins
    >>> p = torch.tensor([[[0.5, 0.5, 0.0], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]])
    >>> node, token = verify_tree(p, torch.tensor([[2, 0]]), torch.tensor([[0, 0]]), Coins(0))
    >>> node.tolist(), token.tolist()       # 2 is rejected, its sibling 0 is accepted, 1 follows
    ([2], [1])
    """
    B, K = tokens.shape
    row = torch.arange(B, device=p.device)
    place = torch.arange(K, device=p.device)
    if length is None:
        length = torch.full_like(row, K)
    if q is None:
        q = one_hot(tokens, p)
    live = place < length[:, None]                                              # (B, K)
    parents = parents.expand(B, K)
    rest = p.clone()                        # what is left of p at each node if its children fail
    chance = torch.zeros_like(live, dtype=p.dtype)                              # (B, K)
    for k in range(K):
        token = tokens[:, k, None]                                              # (B, 1)
        left = rest[row, parents[:, k]]                                         # (B, V)
        ratio = left.gather(1, token) / q[:, k].gather(1, token)                # (B, 1)
        chance[:, k] = ratio[:, 0]
        less = (left - q[:, k]).clamp_(min=0)
        mass = less.sum(-1, keepdim=True)   # trap: 0 if p = q up to rounding, as in `verify`
        falls = live[:, k, None] & (mass > 0)
        rest[row, parents[:, k]] = torch.where(falls, less / mass, left)
    passed = coins.flip(chance) & live
    node = torch.zeros_like(row)
    for k in range(K):      # the walk: from a node to the first of its children that passed
        child = passed[:, k] & (parents[:, k] == node)
        node = torch.where(child, k + 1, node)
    return node, coins.choose(rest[row, node])


# --- shapes


def tree_tokens(parents, rank_acceptance):
    """Tokens per target pass over a tree. This is 1, plus for each node the product of the
    acceptance rates on the way to it, if all places are alike (Sequoia, arXiv 2402.12374, section
    3.1). rank_acceptance[i] is the chance that a node's child number i is the accepted one. For a
    chain this is `control.expected_tokens`.

    >>> tree_tokens([0, 1, 0], [0.5, 0.25])     # 1 + 0.5 + 0.5 * 0.5 + 0.25
    2.0
    """
    reach = [1.0]
    for k, parent in enumerate(parents):
        reach.append(reach[parent] * rank_acceptance[parents[:k].count(parent)])
    return sum(reach)


def rank_acceptance(p, q, ranks):
    """The chances that the draft's likeliest token, its second and so on is the accepted one, in a
    list of `ranks` numbers. The draft consists of its top tokens. p (..., V) holds the target's
    distributions, one-hot when greedy, and q (..., V) the draft's at the same places, before any
    cut, since a one-hot has no second."""
    return p.gather(-1, q.topk(ranks).indices).flatten(0, -2).double().mean(0).tolist()


def best_tree(rank_acceptance, nodes, depth_cost, node_cost, branches=True, levels=math.inf):
    """The parents of the tree that promises the highest speed, level by level, or [] if none gains.
    It has at most `nodes` nodes and `levels` levels. This is the dynamic programme of Sequoia
    (arXiv 2402.12374, section 3.1).

    For rank_acceptance see `tree_tokens`. Drafting a level costs `depth_cost`, and one more token
    in the verifying pass `node_cost`, both relative to a target pass over one token. Unless
    `branches`, only first children may have children, as in `Siblings`.

    >>> best_tree([0.6, 0.2], 4, depth_cost=0.05, node_cost=0.05)
    [0, 0, 1, 3]
    """
    @cache
    def grow(n, depth, rank):
        """The best n nodes below a node that has its first `rank` children, as (accepted tokens,
        subtrees)."""
        best = 0.0, ()
        largest = n                         # nodes in the next child's subtree, itself included
        if depth == 0 or rank == len(rank_acceptance):
            largest = 0
        elif rank > 0 and not branches:
            largest = min(n, 1)
        for m in range(1, largest + 1):
            inside, below = grow(m - 1, depth - 1, 0)
            later, others = grow(n - m, depth, rank + 1)
            best = max(best, (rank_acceptance[rank] * (1 + inside) + later, (below, *others)))
        return best

    def speed(shape):
        n, depth = shape
        return (1 + grow(n, depth, 0)[0]) / (1 + depth * depth_cost + n * node_cost)

    sizes = [(n, d) for n in range(1, nodes + 1) for d in range(1, min(n, levels) + 1)]
    best = max([(0, 0), *sizes], key=speed)
    parents = []
    families = [(0, grow(*best, 0)[1])]
    for node, family in families:           # a list that grows while it is read
        for below in family:
            parents.append(node)
            families.append((len(parents), below))
    return parents


# --- drafting


class Siblings(Wrapper):
    """A wrapper around a drafter of chains, such as a SelfDraft, that adds siblings, other tokens
    for the same places.

    With widths [3, 1], the first three tokens of the chain get a sibling, and the first one gets a
    second. So a chain of three becomes the tree [0, 1, 2, 0, 1, 2, 0]. Siblings are drawn without
    replacement, each from what is left of q. If nothing is left, as when greedy, the sibling is the
    likeliest unused token, with a one-hot q. `best_tree(..., branches=False)` finds the shape that
    pays.

    For the drafter nothing changes, because it does not draft from siblings, and it learns from a
    chain. In a batch only the rows with the longest chain have siblings, and near the end of an
    answer the last ones are left out. A drafter that draws nothing, such as an n-gram, gets none.
    `reuse` is dropped, because the siblings must pass through all sub-layers anyway.
    """

    def __init__(self, drafter, widths):
        super().__init__(drafter)
        self.widths = widths

    def propose(self, state):
        raw = []                            # the logits of each drafted token, (B, 1, V)

        def noting(logits):
            raw.append(logits)
            return state.probs(logits)

        draft = self.drafters[0].propose(replace(state, probs=noting)).trimmed(state)
        K = draft.tokens.shape[1]
        room = max(state.room) - K
        widths = []
        for width in self.widths:
            width = min(width, K, len(raw), room - sum(widths))
            if width > 0:
                widths.append(width)
        if draft.q is None or not widths:
            return draft
        tokens, q = siblings(draft, torch.cat(raw, 1), widths, state.coins)
        length = torch.where(draft.length == K, K + sum(widths), draft.length)
        parents = state.send([[*range(K), *(k for width in widths for k in range(width))]])
        return Tree(torch.cat(tokens, 1), torch.cat(q, 1), length, parents=parents)


def siblings(draft, logits, widths, coins):
    """Other tokens for the places of a chain, which was drawn from raw logits (B, K, V). Each is
    drawn with one uniform, rank by rank. Returns two lists, the tokens (B, width) of each rank and
    the q (B, width, V) they were drawn from. Rank 0 is the chain itself."""
    left = draft.q
    tokens = [draft.tokens]
    q = [draft.q]
    for width in widths:
        last = tokens[-1][:, :width, None]                                      # (B, width, 1)
        left = left[:, :width].scatter(2, last, 0.0)                            # (B, width, V)
        logits = logits[:, :width].scatter(2, last, -math.inf)
        mass = left.sum(-1, keepdim=True)
        top = one_hot(logits.argmax(-1), left)
        q.append(torch.where(mass > 0, left / mass, top))
        tokens.append(coins.choose(q[-1]))
    return tokens, q


def branch(state, draft, logits, parents):
    """The Tree that grows from a drawn chain (B, K) and the raw logits of each of its places
    (B, K, V). A node's child number i is choice number i for its level, so all families of a level
    hold the same tokens. The text stays exact, because only one of the families is tried. Levels
    deeper than the chain are left out."""
    K = draft.tokens.shape[1]
    depths = [0]
    nodes = []                              # (depth, rank among its siblings)
    for k, parent in enumerate(parents):
        depths.append(depths[parent] + 1)
        if depths[-1] <= K:
            nodes.append((depths[-1], parents[:k].count(parent)))
    ranks = range(1, 1 + max(rank for _, rank in nodes))
    widths = [max(depth for depth, rank in nodes if rank == r) for r in ranks]
    tokens, q = siblings(draft, logits, widths, state.coins)
    tokens = torch.stack([tokens[rank][:, depth - 1] for depth, rank in nodes], 1)
    q = torch.stack([q[rank][:, depth - 1] for depth, rank in nodes], 1)    # (B, nodes, V)
    return Tree(tokens, q, parents=state.send([parents[: len(nodes)]]))
