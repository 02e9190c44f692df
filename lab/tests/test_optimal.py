"""The linear program against what is known. Block verification is the optimum of a chain, siblings
are a flow. What the page says. And SpecTr's k-SEQ and typical acceptance by all their
outcomes."""
from itertools import combinations_with_replacement
from math import factorial
from pathlib import Path

import networkx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import command, law, wide

from lab import optimal
from lab.optimal import accepted, agreement, chain_rule, gain, largest, optimum, pair, rules
from lab.spectr import PAIRS, chances, k_seq, typical
from methods.block import verify_block
from methods.trees import verify_tree
from verification import verify

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "optimal.md").read_text(encoding="utf-8")
call = command(optimal.main)


def test_a_linear_program_by_hand():
    """3 x + 2 y under x + y <= 4, x + 3 y <= 6, x <= 3: at (3, 1). And one whose corners
    coincide."""
    three = largest(wide([3, 2]), wide([[1, 1], [1, 3], [1, 0]]), wide([4, 6, 3]))
    two = largest(wide([1, 1]), wide([[1, -1], [-1, 1], [1, 1]]), wide([0, 0, 2]))
    assert (three, two) == pytest.approx((11, 2))


@given(st.integers(0, 10_000), st.integers(1, 3))
@settings(max_examples=8, deadline=None)
def test_block_verification_is_the_optimum_of_a_chain(seed, K):
    """No rule that ends in one more token and then p accepts more; what may change later tokens,
    could."""
    p, q = pair(seed)
    parents = list(range(K))
    block = accepted(chain_rule(verify_block), p, q, parents)
    assert optimum(p, q, parents) == pytest.approx(block, abs=1e-9)
    assert agreement(p, q, K) >= block - 1e-12
    single = accepted(chain_rule(verify), p, q, parents)
    assert single == pytest.approx(accepted(verify_tree, p, q, parents))


def test_the_optimum_of_siblings_is_the_largest_flow_from_trees_to_tokens():
    for seed in range(4):
        p, q = pair(seed)
        graph = networkx.DiGraph()
        for first in range(3):
            graph.add_edge(first, "sink", capacity=float(p[()][first]))
            for second in {0, 1, 2} - {first}:
                chance = q[()][first] * q[()][second] / (1 - q[()][first])
                graph.add_edge("source", (first, second), capacity=float(chance))
                graph.add_edge((first, second), first)
                graph.add_edge((first, second), second)
        flow = networkx.maximum_flow_value(graph, "source", "sink")
        assert optimum(p, q, [0, 0]) == pytest.approx(flow)


def test_no_rule_exceeds_the_optimum():
    for seed in range(3):
        for parents in ([0, 0], [0, 0, 1], [0, 0, 1, 2]):
            found = rules(parents, *pair(seed))
            assert found["token by token"] <= found["optimum"] + 1e-9


def test_the_answers_of_the_exercise():
    assert gain([0.25, 0.75], [0.75, 0.25]) == pytest.approx((0.75, 0.875))
    steps = [i / 10 for i in range(1, 10)]
    gains = (gain([a, 1 - a], [b, 1 - b]) for a in steps for b in steps)
    assert max(block - single for single, block in gains) < 0.125
    p = dict.fromkeys([(0,), (1,), (0, 0), (0, 1), (1, 0)], wide([1, 0])) | {(): wide([0.5, 0.5])}
    draft = {(): wide([1, 0]), **dict.fromkeys([(0,), (1,)], wide([0.5, 0.5]))}
    one, two = (accepted(judge, p, draft, [0, 1])
                for judge in (verify_tree, chain_rule(verify_block)))
    assert (one, two) == pytest.approx((0.75, 1.0))


def test_the_command_prints_what_the_page_says(call):
    status, out, _ = call("--p", 0.25, 0.75, "--q", 0.75, 0.25)
    assert not status and out.strip() in PAGE
    status, out, _ = call("--pairs", 1)
    assert not status and len(out.splitlines()) == 2 + 5
    for words in (["--pairs", 0], ["--p", 0.5, 0.6, "--q", 1, 0], ["--p", 0.5, 0.5]):
        with pytest.raises(ValueError, match="must be"):
            optimal.main([str(word) for word in words])


# --- several drafts of one place


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
def test_typical_acceptance_by_all_outcomes(p, q, k):
    bar = min(0.09, 0.3 * float(torch.exp(-torch.special.entr(p).sum())))

    def once(coins):
        passed = [t for t in drawn(q, k, coins)[0].tolist() if p[t] > bar]
        return max(passed, key=lambda t: (p[t], -t), default=int(p.argmax()))

    found = law(once)
    assert typical(p, q, k).tolist() == pytest.approx([found.get(t, 0.0) for t in range(3)],
                                                      abs=1e-12)
