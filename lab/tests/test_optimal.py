"""The linear program against what is known. Block verification is the optimum of a chain, siblings
are a flow. And what the page says."""
from pathlib import Path

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import command, wide

from lab import optimal
from lab.optimal import accepted, agreement, chain_rule, gain, largest, optimum, pair, rules
from methods.trees import verify_tree
from verification import verify, verify_block

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
        p, q = pair(seed, 1)
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
    law = dict.fromkeys([(0,), (1,), (0, 0), (0, 1), (1, 0)], wide([1, 0])) | {(): wide([0.5, 0.5])}
    draft = {(): wide([1, 0]), **dict.fromkeys([(0,), (1,)], wide([0.5, 0.5]))}
    one, two = (accepted(judge, law, draft, [0, 1])
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
