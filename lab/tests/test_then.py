"""Drafts behind one another, by hand. (That no text changes: tests/test_speculative.py.)"""
from copy import deepcopy
from unittest.mock import Mock

import torch
from tiny import PROMPTS, make_round

from drafter import Draft, Drafter, Rule
from lab.then import Then
from speculative import rounds


class Say(Drafter):
    """Proposes rows of copied tokens that a function of the state gives."""

    def __init__(self, say, rule=0):
        super().__init__(rule)
        self.say = say

    def propose(self, state):
        rows = self.say(state)
        tokens = [row + [0] * (max(map(len, rows)) - len(row)) for row in rows]
        return Draft(torch.tensor(tokens), None, torch.tensor([len(row) for row in rows]))


def test_each_row_goes_on_where_its_own_draft_ends(models):
    """The second drafter is shown the text with the first draft."""
    first, second, seen = [[4, 5, 6], [7], [], [8, 9]], [[1], [2, 3], [4, 4, 4], []], []
    state, _ = next(rounds(models["llama"], PROMPTS, 20))
    before = deepcopy((state.tokens.tolist(), state.known, state.left))
    tail = Say(lambda state: seen.append(state) or second)
    draft = Then(Say(lambda state: first), tail).propose(state)
    got = [row[:n] for row, n in zip(draft.tokens.tolist(), draft.length.tolist(), strict=True)]
    assert got == [a + b for a, b in zip(first, second, strict=True)]
    shown, = seen
    assert shown.known == [text + a for text, a in zip(state.known, first, strict=True)]
    assert (shown.n.tolist(), shown.left) == ([*map(len, shown.known)], [16, 18, 19, 17])
    for row, text in zip(shown.tokens.tolist(), shown.known, strict=True):
        assert row[: len(text)] == text
    assert (state.tokens.tolist(), state.known, state.left) == before


def test_each_rule_learns_of_its_own_part():
    """In three rows the first one drafted 2, 2 and 0 tokens.
    Where one was rejected no tail was proposed."""
    a, b = (Say(None, Mock(spec=Rule)) for _ in range(2))
    pair = Then(a, b)
    pair.drafted = [2, 2, 0]
    pair.observe(None, make_round([[1] * 4, [1] * 2, [1] * 3], [3, 1, 2], [4, 4, 2]))
    first, tail = (part.rule.learn.call_args.args[1] for part in (a, b))
    assert (first.proposed.tolist(), first.accepted.tolist()) == ([2, 2, 0], [2, 1, 0])
    assert (tail.proposed.tolist(), tail.accepted.tolist()) == ([2, 0, 2], [1, 0, 2])
    assert list(map(len, tail.new)) == [2, 0, 3]
    a.taps, b.taps = (11, 2), (3,)
    assert Then(a, b).taps == Then(b, a).taps == (2, 3, 11)
