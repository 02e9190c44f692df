"""DoNoHarm, a rule of the lab, drafts as far as pays, and tries a useless draft as often as it has
saved for."""
import pytest
import torch
from test_control import outcome
from tiny import state_of

from control import best_gamma
from drafter import wanted
from lab.rules import DoNoHarm
from methods.counts import Beta


def alike(rows):
    return state_of([[1]] * rows, [99] * rows)


def play(rule, good, count):
    """How many tokens each row drafts in each of `count` rounds, (count, B). good: are all of a
    row's drafts accepted, or none?"""
    state, asked = alike(len(good)), []
    rule.begin(state)
    for _ in range(count):
        asked.append(wanted(state, rule))
        drafts = zip(asked[-1], good, strict=True)
        rule.learn(state, outcome(*((gamma, gamma * right) for gamma, right in drafts)))
    return torch.tensor(asked)


def test_do_no_harm_tries_a_useless_draft_as_often_as_was_saved_for():
    found = play(DoNoHarm(0.25), [True, False], 120)
    assert found[:, 0].max() == 16 and found[:10, 0].min() > 0, "it does not wait for the bad one"
    assert found[:, 1].max() == 1 and found[:, 1].sum() * 0.25 <= 0.01 * 120 + 1
    free = play(DoNoHarm(0.0), [False], 200)[100:].sum()     # its estimate only falls to .045
    assert free <= 100 * 0.01 / DoNoHarm.FLOOR + 1
    rule = DoNoHarm(0.6)
    found = sum(int(play(rule, [False], 9).sum()) for _ in range(20))
    assert 2 <= found <= 1 + 180 * 0.01 / 0.6, "a new text brings no free try"


def test_do_no_harm_estimates_by_hand():
    rule = DoNoHarm(0.2)
    rule.begin(alike(2))
    rule.learn(None, outcome((3, 1), (0, 0)))
    rule.learn(None, outcome((3, 3), (5, 0)))
    assert rule.seen[0].mean() == pytest.approx((3.95 + 1) / (3.95 + 0.95 + 2))
    assert (rule.seen[1].hits, rule.seen[1].misses) == (0, 1)
    assert (rule.past.hits, rule.past.misses) == pytest.approx(((0.95 + 3) * 0.95, 0.95 * 0.95 + 1))
    rule.begin(alike(3))
    rule.seen[0].add(5, 5)
    assert rule.seen[1] == rule.past != rule.seen[0], "rows start alike and then learn apart"
    rule.seen, rule.saved = [Beta(hits, 10.0 - hits) for hits in range(11)], [0.0] * 11
    assert rule.how_far(None) == [best_gamma((hits + 1) / 12, 0.2) for hits in range(11)]
