"""Suffix decoding: which continuation is copied, and how far; and what every drafter promises."""
import random

import promises
import pytest
from tiny import TINY, make_round, state_of

from lab.then import Then
from layerskip import SelfDraft
from methods.lookup import NGram, Suffix
from speculative import rounds

DRAFTERS = {"suffix": lambda m: Suffix(4), "exit, then suffix": lambda m: Then(
    SelfDraft(m, range(8), 2), Suffix(3))}
test_greedy_identity = promises.greedy_identity(DRAFTERS)
test_end_of_text_at_every_position = promises.end_of_text(DRAFTERS, ["suffix"], range(7))
test_context_limit = promises.context_limit(DRAFTERS, ["suffix"])
test_exact_law = promises.exact_law({"suffix": (TINY, lambda m: Suffix(2))})


def drafts(m, drafter, texts):
    _, r = next(rounds(m, texts, 9, drafter))
    return [row[:n] for row, n in zip(r.draft.tokens.tolist(), r.proposed.tolist(), strict=True)]


@pytest.mark.parametrize("drafter, text, want", [
    # after 1 came 2 twice and 3 once, but after 9, 1 only 3: the longer ending is surer
    (Suffix(1), [1, 2, 5, 1, 2, 6, 9, 1, 3, 9, 1], [3]),
    (Suffix(1), [1, 2, 5, 1, 2, 6, 4, 1, 3, 8, 1], [2]),
    # the shorter ending is surer: 2 after 1 in 3 of 5, but 3 after 9, 1 in 1 of 2
    (Suffix(1), [1, 2, 5, 1, 2, 6, 1, 2, 7, 9, 1, 3, 8, 9, 1, 4, 10, 9, 1], [2]),
    (Suffix(8), [1, 2, 3, 4, 1], [2, 3]),               # an ending of one token is followed for two
    (Suffix(8), [1, 2, 3, 4, 5, 6, 1, 2], [3, 4, 5, 6]),
    (Suffix(3), [1, 2, 3, 4, 5, 6, 1, 2], [3, 4, 5]),
    (Suffix(8, factor=1.0), [1, 2, 3, 4, 5, 6, 1, 2], [3, 4]),
    (Suffix(8), [1, 2, 1, 3, 1, 4, 1, 5, 1], []),       # each had a chance of a quarter
    (Suffix(8), [1, 2, 1, 3, 1], [2, 1]),               # a half, and after 1, 2 there was only 1
    # 2 had a chance of 1/2, and 4 after it of 1/4
    (Suffix(8), [1, 2, 4, 1, 3, 1, 2, 5, 1, 3, 8, 1], [2]),
    (Suffix(8), [7, 7, 7, 7], [7, 7]),                  # no further than the text itself went
    (Suffix(8), [1, 2, 3], [])])
def test_the_most_promising_continuation(models, drafter, text, want):
    assert drafts(models["llama"], drafter, [text]) == [want]


def test_each_row_knows_only_itself(models):
    drafter = Suffix(2)
    assert (drafts(models["llama"], drafter, [[1, 2, 3, 4], [1, 2, 5, 6], [3, 1, 2, 3]])
            == [[], [], [1, 2]])
    assert drafter.matched == [0, 0, 1]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_ngrams_are_those_that_a_search_finds(n):
    """However the text grows, every n-gram but the last is known, with what followed it last."""
    g, drafter = random.Random(n), NGram(4, n)
    state = state_of([[0, 1, 0], [2]], [99, 99])
    drafter.begin(state, {})
    for _ in range(40):
        new = [[g.randrange(3) for _ in range(g.randrange(4))] for _ in state.known]
        for text, more in zip(state.known, new, strict=True):
            text += more
        drafter.observe(state, make_round(new, [0, 0], [0, 0]))
        for text, hit in zip(state.known, drafter.found(state), strict=True):
            starts = [i for i in range(len(text) - n) if text[i : i + n] == text[-n:]]
            want = text[starts[-1] + n :][:4] if starts and len(text) >= n else []
            assert hit == want, text
