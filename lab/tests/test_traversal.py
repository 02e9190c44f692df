"""Traversal verification: exact for any tree, and never worse than recursive rejection. All enumerated."""
from functools import partial
from itertools import combinations, permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_by_outcomes import SMALL, after, one_walk, planted, rows_stand_for_themselves, writes_the_law
from test_verify_block import laws
from tiny import law, plant

from lab.traversal import verify_traversal
from methods.trees import verify_tree
from verification import verify_block

TREES = [0], [0, 0], [0, 1, 0], [0, 0, 2], [0, 0, 1, 1], [0, 1, 1]


one_tree = partial(one_walk, judge=verify_traversal)


@pytest.mark.parametrize("parents", TREES, ids=str)
def test_drawn_siblings(parents):
    writes_the_law(one_tree, "a tree", parents, 3)


@pytest.mark.parametrize("parents, tokens", [([0, 0, 2], [1, 2, 0]), ([0, 0, 1, 1], [0, 2, 1, 2])], ids=str)
def test_copied_siblings(parents, tokens):
    writes_the_law(one_tree, "copied tokens", parents, 3, tokens)


@pytest.mark.parametrize("dead", [0.0, torch.nan])
def test_rows_stand_for_themselves(dead):
    parents = [[0, 0], [0, 1]]
    rows_stand_for_themselves(
        lambda p, tokens, q, coins, length: verify_traversal(p, tokens, torch.tensor(parents), coins, q,
                                                             length), parents, [1, 2], 0, dead)


def depth(judge, p, q, parents):
    """How many tokens of a tree drawn from q are accepted on average; p and q by depth."""
    def run(coins):
        tokens, drawn, ways = plant(parents, lambda way: q[len(way)], coins)
        node, _ = judge(torch.stack([p[len(way)] for way in ways])[None], torch.tensor([tokens]),
                        torch.tensor([parents]), coins, torch.stack(drawn)[None])
        return len(ways[int(node)])
    return sum(n * weight for n, weight in law(run).items())


@given(st.data(), st.sampled_from(TREES[2:]))
@settings(max_examples=15, deadline=None)
def test_it_accepts_at_least_as_much(data, parents):
    p, q = data.draw(laws(4)), data.draw(laws(4)) + 0.1
    assert depth(verify_traversal, p, q, parents) >= depth(verify_tree, p, q, parents) - 1e-12


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_of_two_siblings_no_exact_rule_accepts_more_than_the_optimum(data):
    """The least of p(H) + 1 - Pr(both drafts lie in H) over all sets H of tokens (max-flow min-cut; as a
    transport in Sun et al. 2023, arXiv 2310.15141)."""
    p, q = data.draw(laws(2)), data.draw(laws(1)) + 0.1
    q = q / q.sum()
    sets = [list(H) for n in range(4) for H in combinations(range(3), n)]
    both = lambda H: sum(float(q[0, a] * q[0, b] / (1 - q[0, a])) for a, b in permutations(H, 2))  # noqa: E731
    optimum = min(float(p[0, H].sum()) + 1 - both(H) for H in sets)
    for judge in (verify_tree, verify_traversal):
        assert depth(judge, p, q, [0, 0]) <= optimum + 1e-12


def test_of_a_chain_it_is_block_verification():
    def kept(judge):
        def run(coins):
            tokens, q, way = planted(coins, range(3), SMALL)
            p = after(way, SMALL.p)[None]
            return int(judge(p, torch.stack(q)[None], torch.tensor([tokens]), coins)[0])
        return law(run)
    chain = torch.arange(3)[None]
    want = kept(verify_block)
    got = kept(lambda p, q, tokens, coins: verify_traversal(p, tokens, chain, coins, q))
    assert got == pytest.approx(want)
