"""Block verification: the law of `verify`, with more accepted drafts. By outcomes, enumerated."""
from functools import partial

import promises
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_by_outcomes import batches, chains_stand_for_themselves, one_row, writes_the_law
from test_speculative import LAWS
from tiny import law, wide

from methods.block import verify_block
from methods.trees import verify_tree
from verification import verify

one_block = partial(one_row, judge=verify_block)


@pytest.mark.parametrize("K, length, copied", [
    (1, None, None), (2, None, None), (2, 1, None), (2, 0, None), (3, None, None),
    (2, None, [2, 0])])
def test_drafts(K, length, copied):
    writes_the_law(one_block, f"{K} drafts", range(K), K + 1, copied, length=length)


@batches
def test_rows_stand_for_themselves(unsure, lengths, dead):
    chains_stand_for_themselves(verify_block, lengths, unsure, dead)


SOME = ["exit", "exit, stopped", "ngram", "gemma2 skip"]
test_exact_law = promises.exact_law({name: LAWS[name] for name in SOME}, judge=verify_block)
test_exact_law_of_a_ragged_batch = promises.exact_law_of_a_ragged_batch(LAWS, SOME, verify_block)


@st.composite
def laws(draw, rows):
    """`rows` distributions over 3 tokens, some of whose probabilities are 0. (rows, 3)"""
    row = st.lists(st.integers(0, 4), min_size=3, max_size=3).filter(any)
    return wide(
        [[w / sum(weights) for w in weights] for weights in (draw(row) for _ in range(rows))])


def accepted(judge, p, q):
    """How many of q's drafts (K, V), or of the copied tokens q (K,), are accepted on average.
    p (K+1, V)"""
    def run(coins):
        if q.dim() == 1:
            return int(judge(p[None], None, q[None], coins)[0])
        return int(judge(p[None], q[None], coins.choose(q)[None], coins)[0])
    return sum(n * weight for n, weight in law(run).items())


@pytest.mark.parametrize("judge", [verify, verify_block, verify_tree])
@given(st.data(), st.integers(1, 2))
@settings(max_examples=15, deadline=None)
def test_any_p_keeps_its_law(judge, data, K):
    """Whatever q is, the text is p's. Chains are also trees."""
    p, q = data.draw(laws(K + 1)), data.draw(laws(K))

    def text(coins):
        tokens = coins.choose(q)
        args = (p[None], tokens[None], torch.arange(K)[None], coins,
                q[None]) if judge is verify_tree else (
            p[None], q[None], tokens[None], coins)
        kept, token = map(int, judge(*args))
        out = [*tokens[:kept].tolist(), token]
        return tuple([*out, *(int(coins.choose(row)) for row in p[len(out) :])])

    want = {(): 1.0}
    for row in p:
        want = {(*ids, t): w * float(x) for ids, w in want.items()
                for t, x in enumerate(row) if x > 0}
    assert law(text) == pytest.approx(want)


def test_the_example_of_the_paper():
    """Section 3: 10/9 accepted tokens become 11/9."""
    p, q = torch.tensor([[1, 2]] * 3).double() / 3, torch.tensor([[2, 1]] * 2).double() / 3
    assert accepted(verify, p, q) == pytest.approx(10 / 9)
    assert accepted(verify_block, p, q) == pytest.approx(11 / 9)


@pytest.mark.parametrize("copied", [False, True])
@given(st.data(), st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_it_accepts_at_least_as_much(copied, data, K):
    p, q = data.draw(laws(K + 1)), data.draw(laws(K))
    if copied:
        q = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=K, max_size=K)))
    token_by_token, block = accepted(verify, p, q), accepted(verify_block, p, q)
    assert block >= token_by_token - 1e-12
    assert block == pytest.approx(token_by_token) or not copied and K > 1
