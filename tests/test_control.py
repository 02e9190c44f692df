"""Rules, drafts behind one another, and the speed-up model, by hand and against what others
published. (That no rule changes a text: test_speculative.py.)"""
import math
from dataclasses import replace

import pytest
import torch
from tiny import LIVELY, PROMPTS, Says, state_of

from control import Confidence, best_gamma, confidence, expected_speedup
from drafter import Rule, chain, wanted
from layerskip import early_exit, without
from methods.costs import Line, Machine, by_weights
from methods.counts import Beta
from model import Config, Transformer
from speculative import rounds

# --- rules and drafters


def test_wanted_by_hand():
    state = state_of([[1]] * 4, [9, 3, 1, 0])
    assert wanted(state, Rule(5)) == [5, 2, 0, 0]
    assert wanted(state, Rule(0)) == [0] * 4
    assert wanted(state_of([[1]] * 3, [9, 9, 9]), Says([2, 0, 2])) == [2, 0, 2]


def test_no_step_is_computed_once_all_rows_have_ended(models):
    state, _ = next(rounds(models["llama"], PROMPTS, 20))
    steps, ends = [], lambda k, logits, token: [False, k == 1, k == 0, k == 3]
    step = lambda token, k: steps.append(k) or torch.zeros(4, 1, 17)  # noqa: E731
    draft = chain(state, step, Says([2, 6, 6, 6], ends))
    assert draft.length.tolist() == [2, 2, 1, 4] and steps == [0, 1, 2, 3]


# --- the rules by hand


def test_confidence_is_that_in_the_drawn_token_in_float32():
    logits, drawn = torch.tensor([[0.25, 0.75], [0.9, 0.1]]).log(), torch.tensor([1, 1])
    assert confidence(logits, drawn).tolist() == pytest.approx([0.75, 0.1])
    assert Confidence(0.5).stop(0, logits, drawn) == [False, True]
    half = confidence(torch.tensor([[100.0, 99.0]], dtype=torch.bfloat16), torch.tensor([0]))
    assert float(half) == pytest.approx(1 / (1 + math.exp(-1)), rel=1e-5)


def test_what_is_known_beforehand_counts_as_two_drafts():
    assert Beta(2, 1).mean() == 3 / 5, "Laplace's rule of succession"
    assert Beta(prior=0.8).mean() == 0.8 and Beta(1, 1, 0.8).mean() == pytest.approx(2.6 / 4)
    assert Beta(1, 1, 0.8).high() == pytest.approx(0.65 + (0.65 * 0.35 / 5) ** 0.5)
    assert Beta(prior=0.8).high() == 1.0, "and no more than always"


# --- one draft behind another


@pytest.mark.parametrize("family", LIVELY)
def test_weights_that_a_pass_reads(family):
    """The matrices of each sub-layer and the head once, tied or not; no norms and no embedding. A
    token more in the text is a key and a value more. All is told in passes."""
    c = replace(LIVELY[family], vocab_size=23)
    m, machine = Transformer(c), by_weights(c)
    for part, cost in ("attn", machine.attention), ("mlp", machine.mlp):
        weights = sum(p.numel() for p in getattr(m.blocks[0], part).parameters())
        assert cost * machine.unit == pytest.approx(weights)
    assert machine.head * machine.unit == pytest.approx(m.tok.numel())
    assert machine.draft([2]).slope * machine.unit == pytest.approx(2 * c.n_kv_heads * c.head_dim)


def test_costs_by_hand():
    machine = Machine.of(2, attention=3.0, mlp=5.0, head=4.0)
    assert machine.unit == 20 and machine.verify(0) == machine.verify(0, 99) == 1
    assert machine.draft(range(4)) == Line(1.0) and machine.draft([]).start == 4 / 20
    assert machine.draft(early_exit(2, 1), share=0.25).start == 9 / 20, "a quarter of the head"
    assert machine.draft(without(2, attn=[0], mlp=[1])).start == pytest.approx((5 + 3 + 4) / 20)
    stepping = Machine.of(2, 3.0, 5.0, 4.0, step=10.0)
    assert stepping.draft([], share=0.25, own=0.5).start == pytest.approx((1 + 10) / 30 + 0.5)
    wide = replace(machine, wide=((1, 1.0), (3, 1.5), (5, 3.5)))
    assert [wide.verify(0, T) for T in range(1, 8)] == [1.0, 1.25, 1.5, 2.5, 3.5, 4.5, 5.5]
    assert wide.further() == (15.5 - 1) / 16
    odd = replace(machine, wide=((1, 1.0), (3, 1.5), (5, 1.25)))
    assert [odd.verify(0, T) for T in (4, 9)] == [1.375, 1.25], "a wider block is never cheaper"


def test_costs_grow_with_what_attention_reads():
    """Those of a draft as much as its attentions are."""
    machine = Machine.of(4, 2.0, 3.0, 4.0, slope=0.6, wide=((1, 1.0), (2, 1.5)))
    assert (machine.verify(10), machine.verify(10, 2)) == pytest.approx((2, 3))
    assert machine.draft([1, 3]).slope == 0, "an MLP reads no text"
    assert machine.draft([0, 1, 2]).at(10) == pytest.approx((2 * 2 + 3 + 4 + 2 * 0.6 * 10) / 24)
    assert machine.draft([], reads=True).slope == pytest.approx(0.6 / 24), "an attention of its own"


def test_the_speed_up_by_hand():
    """Two drafted tokens cost .1 each and the block of three 1.2, which brings 1.75 tokens."""
    assert expected_speedup(0.5, 2, 0.1, 1.2) == pytest.approx(1.75 / 1.4)


def test_a_skip_set_of_gemma_2_9b_costs_what_others_measured():
    """19 of 42 attentions and 18 of 42 MLPs skipped: 48.82 tokens/s of the draft alone, 29.65 of
    the target; 40.57 % of the drafts were accepted, and both together wrote 24.08 tokens/s."""
    shape = dict(dim=3584, n_layers=42, n_heads=16, n_kv_heads=8, head_dim=256, hidden_dim=14_336)
    machine = by_weights(Config(vocab_size=256_000, **shape))
    c = machine.draft(without(42, range(19), range(18))).start
    assert abs(c - 29.65 / 48.82) < 0.005 and best_gamma(0.4057, c) == 0
