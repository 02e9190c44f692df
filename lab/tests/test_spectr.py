"""k-SEQ and typical acceptance by all their outcomes, and the optimum of one place."""
from itertools import combinations_with_replacement
from math import factorial

import networkx
import pytest
import torch
from tiny import law, wide

from lab.spectr import PAIRS, chances, k_seq, typical
from methods.trees import verify_tree

LAWS = [(wide(p), wide(q)) for p, q in [*PAIRS.values(), ([0.0, 0.4, 0.6], [0.5, 0.0, 0.5]),
                                        ([1.0, 0.0, 0.0], [0.0, 0.5, 0.5]), ([0.2, 0.3, 0.5],) * 2]]


def each(test):
    """With each pair and one to three drafts."""
    return pytest.mark.parametrize("k", [1, 2, 3])(
        pytest.mark.parametrize("p, q", LAWS, ids=str)(test))


def drawn(q, k, coins):
    """k independent drafts. (1, k)"""
    return torch.stack([coins.choose(q) for _ in range(k)])[None]


@each
def test_k_seq_writes_p_and_keeps_what_the_formula_says(p, q, k):
    """So do siblings in turn, which keep no more; neither exceeds the optimum."""
    def once(coins):
        first, token = k_seq(p[None], q[None], drawn(q, k, coins), coins)
        return int(token), int(first) < k

    def in_turn(coins):
        tokens = drawn(q, k, coins)
        node, token = verify_tree(p.expand(1, k + 1, 3), tokens, torch.zeros_like(tokens), coins,
                                  q.expand(1, k, 3))
        return int(tokens[0, node - 1]) if node else int(token), bool(node)

    for run, chance in zip((in_turn, once), chances(p, q, k), strict=False):
        found = law(run)
        written = [sum(found.get((t, kept), 0.0) for kept in (False, True)) for t in range(3)]
        assert written == pytest.approx(p.tolist(), abs=1e-12)
        assert sum(w for (_, kept), w in found.items() if kept) == pytest.approx(chance, abs=1e-12)
    turn, seq, most = chances(p, q, k)
    assert turn <= seq + 1e-12 and seq <= most + 1e-12


@each
def test_the_optimum_is_the_largest_flow_from_sets_of_drafts_to_tokens(p, q, k):
    graph = networkx.DiGraph()
    for drafts in combinations_with_replacement(range(3), k):
        ways = factorial(k)
        for t in set(drafts):
            ways //= factorial(drafts.count(t))
            graph.add_edge(drafts, t)
        graph.add_edge("drafts", drafts, capacity=float(ways * q[list(drafts)].prod()))
    for t in range(3):
        graph.add_edge(t, "text", capacity=float(p[t]))
    flow = networkx.maximum_flow_value(graph, "drafts", "text")
    assert chances(p, q, k)[2] == pytest.approx(flow, abs=1e-9)


@each
def test_typical_acceptance(p, q, k):
    bar = min(0.09, 0.3 * float(torch.exp(-torch.special.entr(p).sum())))

    def once(coins):
        passed = [t for t in drawn(q, k, coins)[0].tolist() if p[t] > bar]
        return max(passed, key=lambda t: (p[t], -t), default=int(p.argmax()))

    found = law(once)
    want = [found.get(t, 0.0) for t in range(3)]
    assert typical(p, q, k).tolist() == pytest.approx(want, abs=1e-12)
