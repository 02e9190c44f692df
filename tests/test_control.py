"""Rules, drafts behind one another, and the speed-up model, by hand and against what others
published. (That no rule changes a text: test_speculative.py.)"""
import math
from dataclasses import replace

import pytest
import torch
from tiny import LIVELY, PROMPTS, Says, state_of

from control import Confidence, Costs, best_gamma, confidence, weight_costs
from drafter import Rule, chain, wanted
from layerskip import early_exit, without
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
def test_weight_costs_count_what_a_pass_reads(family):
    """The matrices of each sub-layer and the head once, tied or not; no norms and no embedding. A
    token more in the text is a key and a value more."""
    c = replace(LIVELY[family], vocab_size=23)
    m, costs = Transformer(c), weight_costs(c)
    parts = [part for block in m.blocks for part in (block.attn, block.mlp)]
    assert list(costs.sublayers) == [sum(p.numel() for p in part.parameters()) for part in parts]
    assert costs.head == m.tok.numel() and costs.window == c.window
    price = costs.pricing([2])
    assert price(7) - price(6) == 2 * c.n_kv_heads * c.head_dim


def test_costs_by_hand():
    costs = Costs((3.0, 5.0, 7.0, 11.0), 4.0)
    assert costs.step(range(4)) == 1 and costs.step([]) == 4 / 30
    assert costs.step(early_exit(2, 1), share=0.25) == 9 / 30, "a quarter of the head's rows"
    assert costs.step(without(2, attn=[0], mlp=[1])) == (5 + 7 + 4) / 30
    assert replace(costs, call=10.0).step([], share=0.25) == (1 + 10) / 40
    assert costs.pass_cost(99) == 1.0, "counting the weights read"
    measured = replace(costs, passes=((1, 1.0), (3, 1.5), (5, 3.5)))
    assert [measured.pass_cost(T) for T in range(1, 8)] == [1.0, 1.25, 1.5, 2.5, 3.5, 4.5, 5.5]
    odd = replace(costs, passes=((1, 1.0), (3, 1.5), (5, 1.25)))
    assert [odd.pass_cost(T) for T in (4, 9)] == [1.375, 1.25], "a wider block is never cheaper"


def test_costs_grow_with_what_attention_reads():
    costs = Costs((2.0, 3.0) * 4, 4.0, slot=0.1, context=10, window=20)
    assert costs.pricing(range(8))(10) == costs.whole == 24
    assert costs.pricing(range(8))(50) == pytest.approx(24 + 2 * 4 + 2 * 1)
    assert costs.pricing([1, 3])(50) == 10, "an MLP reads no text"
    assert [costs.pricing([2], 0.0)(n) for n in (0, 10, 50)] == pytest.approx([1, 2, 6])
    assert costs.pricing([4], 0.0)(50) == pytest.approx(2 + 1), "even blocks see a window"


def test_a_skip_set_of_gemma_2_9b_costs_what_others_measured():
    """19 of 42 attentions and 18 of 42 MLPs skipped: 48.82 tokens/s of the draft alone, 29.65 of
    the target; 40.57 % of the drafts were accepted, and both together wrote 24.08 tokens/s."""
    shape = dict(dim=3584, n_layers=42, n_heads=16, n_kv_heads=8, head_dim=256, hidden_dim=14_336)
    costs = weight_costs(Config(vocab_size=256_000, **shape))
    c = costs.step(without(42, range(19), range(18)))
    assert abs(c - 29.65 / 48.82) < 0.005 and best_gamma(0.4057, c) == 0
