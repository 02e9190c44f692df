"""Rules that only a benchmark compares: each does what its source says, by hand, and none changes the law
of the text."""
import random
from dataclasses import replace

import promises
import pytest
import torch
from test_control import outcome, play, state_of
from tiny import TINY

from control import Beta, Gate
from lab.rules import AnnealedConfidence, Entropy, Schedule, Thompson, ValueGate
from layerskip import SelfDraft
from speculative import NGram

LAWS = {
    "schedule": lambda m: NGram(Schedule(1), 1),
    "gate": lambda m: SelfDraft(m, range(4), Gate(2, 0.6)),
    "value gate": lambda m: SelfDraft(m, range(4), ValueGate(0.4, 2)),
    "thompson": lambda m: SelfDraft(m, range(4), Thompson(2, seed=3)),
    "entropy": lambda m: SelfDraft(m, range(4), Entropy(0.35, gamma=2)),
    "annealed": lambda m: SelfDraft(m, range(4), AnnealedConfidence(2 / 3, 0.5, gamma=2)),
}
test_exact_law = promises.exact_law({name: (TINY, build) for name, build in LAWS.items()})


def sure_of(r, sure):
    """The target was so sure of each row's last new token, and certain of those before it."""
    return replace(r, sure=[[1.0] * len(row[1:]) + [sure] * len(row[:1]) for row in r.new])


@pytest.mark.parametrize("rule, want", [
    (Schedule(2), [2, 3, 4, 3, 2, 1, 1, 2]),
    (Schedule(2, up=2), [2, 4, 6, 5, 4, 3, 2, 4]),
    (Schedule(2, up=0, down=0), [2] * 8),
    (Schedule(5, down=3, most=4), [5, 5, 5, 2, 1, 1, 1, 2]),
    (Schedule(15), [15, 16, 16, 15, 14, 13, 12, 13]),
], ids=["+1/-1", "heuristic", "constant", "bounded by its start", "at most 16"])
def test_schedules_by_hand(rule, want):
    """Two drafts are accepted whole, four only in part, and then one whole."""
    state, asked = state_of(), []
    rule.begin(state)
    for whole in (True, True, False, False, False, False, True, True):
        gamma, = rule.gamma(state)
        rule.learn(state, outcome((gamma, gamma - (not whole))))
        asked.append(gamma)
    assert asked == want


def test_schedules_keep_rows_apart_and_start_anew():
    rule, state = Schedule(3), state_of(4)
    rule.begin(state)
    rule.learn(state, outcome((3, 3), (3, 2), (0, 0), None))
    assert rule.gamma(state) == [4, 2, 3, 3], "no draft teaches nothing"
    rule.begin(state_of(2))
    assert rule.gamma(state) == [3, 3]


def test_annealed_confidence_by_hand():
    """1 / (1 + exp(-3 / T)) is .95 at T = 1, and .82 at T = 2; of 1 it is .73 and .62."""
    logits, token = torch.tensor([[3.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 0])
    for depth, bar, want in (
            (0, 0.75, [False, True]), (0, 0.85, [True, True]), (0, 0.7, [False, True]),
            (1, 0.85, [False, True]), (1, 0.7, [False, False])):
        assert AnnealedConfidence(depth, bar).stop(0, logits, token).tolist() == want
    assert AnnealedConfidence(0.25, slope=2).temperature == 2.5


def test_entropy_by_hand():
    """Four tokens alike: H = log 4 = 1.386, sqrt(.15 H) = .456; a draft vocabulary of two: .322."""
    logits = torch.tensor([[0.0] * 4, [9.0, 0.0, 0.0, 0.0], [0.0, 0.0, -torch.inf, -torch.inf]])
    for threshold, want in (
            (0.3, [True, False, True]), (0.4, [True, False, False]), (0.46, [False] * 3)):
        assert Entropy(threshold).stop(0, logits, torch.zeros(3).long()).tolist() == want


def test_thompson_draws_from_what_became_of_drafts():
    rule, state = Thompson(8, seed=1), state_of(2)
    rule.begin(state)
    fresh = torch.tensor([rule.gamma(state) for _ in range(40)]).double()
    assert 1.5 < fresh.mean() < 4 and len(fresh.unique()) > 4
    for _ in range(60):
        rule.learn(state, outcome((4, 4), (4, 0)))
    assert [(b.hits, b.misses) for b in rule.seen] == [(240, 0), (0, 60)], "each row on its own"
    rule.begin(state)       # what is learnt outlives the run
    lengths = torch.tensor([rule.gamma(state) for _ in range(50)]).double()
    assert lengths[:, 0].mean() > 7 and lengths[:, 1].mean() < 1.2 and int(lengths.min()) == 1
    assert play(Thompson(0), [True, False], 5).sum() == 0


def test_a_prior_counts_as_two_drafts_also_when_drawing():
    beta, generator = Beta(1, 1, prior=0.8), random.Random(1)
    draws = torch.tensor([beta.draw(generator) for _ in range(4000)])
    assert float(draws.mean()) == pytest.approx(beta.mean(), abs=0.01)
    assert float(draws.std()) == pytest.approx(beta.high() - beta.mean(), abs=0.01)


def test_the_gate_drafts_after_a_last_token_that_the_target_was_sure_of():
    rule, state = Gate(4), state_of(3)
    rule.begin(state)
    assert rule.gamma(state) == [4, 4, 4], "the target has not judged the prompt"
    rule.learn(state, sure_of(outcome((4, 1), None, (0, 0)), 0.5 - 1e-9))
    assert rule.gamma(state) == [0, 4, 0], "a row that has ended keeps what was known"
    rule.learn(state, sure_of(outcome((0, 0), None, (0, 0)), 0.5))
    assert rule.gamma(state) == [4, 4, 4]


def test_value_gate_counts_by_hand():
    """First drafts count for the class of the token before them, later ones together."""
    rule, state = ValueGate(0.1, fade=0.5), state_of(4)
    rule.sure = [0.05, 1.0, 0.5, 0.59]
    rule.gamma(state)
    rule.learn(state, sure_of(outcome((4, 2), (3, 0), (4, 4), (0, 0)), 0.31))
    count = [(b.hits, b.misses) for b in rule.first]
    assert count[0] == (1, 0) and count[9] == (0, 1) and count[5] == (1, 0)
    assert sum(map(sum, count)) == 3 and (rule.later.hits, rule.later.misses) == (4, 1)
    rule.gamma(state)
    rule.learn(state, outcome((1, 1), (2, 1), (1, 0), None))
    count = [(b.hits, b.misses) for b in rule.first]
    assert count[0] == (0.5, 0) and count[9] == (0, 0.5) and count[5] == (0.5, 0)
    assert count[3] == (2, 1) and (rule.later.hits, rule.later.misses) == (2, 1.5)


def test_value_gate_drafts_where_it_pays_and_tries_again():
    """Where later drafts are always accepted, the first one still has to pay."""
    rule = ValueGate(0.9, 12)
    rule.sure, rule.later = [0.15, 0.35, 0.95], Beta(900.0, 0.0)
    rule.first[1], rule.first[9] = Beta(0.0, 5.0), Beta(500.0, 0.0)
    assert rule.gamma(None) == [0, 1, 12], "of a class of which it knows nothing it tries a token"
    for _ in range(300):
        rule.learn(None, outcome(None, None, None))
    assert rule.gamma(None)[0] == 1, "what is known fades"
    assert play(ValueGate(0.3, 0), [True, False], 20).sum() == 0
