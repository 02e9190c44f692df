"""SWIFT: no choice of its changes the text, and each choice is the one that its paper describes."""
from dataclasses import replace

import promises
import pytest
import torch
from tiny import LLAMA, PROMPTS, TINY, each_family, make

from lab.swift import SWIFT
from sampling import to_probs
from search import Teacher
from speculative import generate, rounds

DRAFTERS = {"swift": lambda m: SWIFT(m, 0.7, window=3, every=2, threshold=0.2, widths=(2,))}
test_greedy_identity = promises.greedy_identity(DRAFTERS)
test_poison = promises.poison(DRAFTERS, count=12)
LAWS = {"swift": (TINY, lambda m: SWIFT(m, 0.5, 1, every=2, threshold=0.5, gamma=2, widths=(1,)))}
test_exact_law = promises.exact_law(LAWS, count=2, room=2)


def test_the_first_and_the_last_block_stay():
    swift = SWIFT(make(replace(LLAMA, n_layers=12)))
    assert sorted(swift.gone) == [2, 3, 6, 7, 10, 11, 14, 15, 18], "blocks 1, 3, 5, ... first"
    tried = [swift.random_set() for _ in range(40)]
    assert len(set(tried)) > 10 and {len(gone) for gone in tried} == {9}
    assert set().union(*tried) == set(range(2, 22))


@each_family
def test_matchness_is_that_of_drafts_along_the_window(models, family):
    """Of the first six tokens that each row wrote, as `Teacher` drafts them."""
    m, swift = models[family], SWIFT(models[family], window=6)
    *_, (state, _) = rounds(m, PROMPTS, 9)
    swift.start = list(map(len, PROMPTS))
    for rows, gone in (([0, 1, 2, 3], swift.gone), ([1], {4, 7, 9}), ([2, 3], {2})):
        subs = swift.kept(gone)
        want = [Teacher(m, state.known[b], to_probs).acceptance(subs)[n - 1 : n + 5]
                for b, n in enumerate(swift.start) if b in rows]
        with torch.inference_mode():
            assert swift.score(state, gone, rows) == pytest.approx(float(torch.cat(want).mean()))


def scripted(m, worth, **flags):
    """A SWIFT that scores by a function of the set; and what is scored: (lengths, set, rows)."""
    swift, asked = SWIFT(m, window=3, threshold=0.99, **flags), []
    swift.score = lambda state, gone, rows: (
        asked.append((list(map(len, state.known)), gone, rows)) or worth(gone))
    return swift, asked


def test_the_incumbent_is_scored_first_and_again_in_a_new_text(models):
    m, worth = models["llama"], {}
    swift, asked = scripted(m, lambda gone: worth.get(gone, 0.4))
    first = swift.gone
    worth[first] = 0.5
    generate(m, PROMPTS[:2], 12, swift)
    assert asked[0][1] == swift.gone == first and len(asked) > 3 and swift.stale == swift.tried
    for lengths, _, rows in asked:      # whole windows only
        assert rows == [b for b in (0, 1) if lengths[b] >= len(PROMPTS[b]) + 3]
    count, worth[first] = len(asked), 0.1               # worth less in another text
    generate(m, PROMPTS[1:2], 12, swift)
    assert asked[count][1] == first and swift.gone == asked[count + 1][1] != first
    assert swift.draft.sublayers == swift.kept(swift.gone)


@pytest.mark.parametrize("flags, tries", [
    (dict(patience=4), 5), (dict(most=6), 6), (dict(enough=0.3), 0)])
def test_the_search_ends(models, flags, tries):
    """After too many candidates that are no better, after so many in all, or with a good set."""
    swift, _ = scripted(models["llama"], lambda gone: 0.4, **flags)
    generate(models["llama"], PROMPTS[:1], 20, swift)
    assert swift.tried == tries and swift.best == 0.4


def test_a_row_at_the_end_of_the_context_has_no_window(models):
    m, swift = models["llama"], SWIFT(models["llama"], window=16)   # longer than the spare slots
    ids = [PROMPTS[0][:4], (PROMPTS[1] * 40)[: m.c.max_len - 3]]
    assert generate(m, ids, 20, swift)[0] == generate(m, ids, 20)[0] and swift.tried > 0


def test_every_so_often_the_process_is_asked():
    """On values that one sub-layer decides, its sets are better than random ones."""
    swift, found = SWIFT(make(replace(LLAMA, n_layers=8)), every=10), []
    swift.best = 0.0
    for swift.tried in range(1, 41):
        with torch.inference_mode():    # as in the loop
            gone = swift.candidate()
        found.append(sum(sub % 2 == 0 for sub in gone) / len(gone))     # attentions are spared
        swift.seen.append((gone, found[-1]))
        swift.best = max(found)
    assert min(found[19::10]) > sum(found) / 40 + 0.15
