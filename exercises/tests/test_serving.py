"""Drafts under a grammar, and in a ring of slots: exercises 25 and 26, exercises/serving.py."""
import itertools
from functools import partial

import pytest
import torch
from teach import Mistakes, compare, fail, look, picture, same_law
from test_by_outcomes import SMALL, P, after, mixed, planted

from exercises.serving import constrain, replay, ring_counterexample, ring_mask, ring_size
from verification import verify

# three states, and what each forbids
GRAMMAR = torch.tensor([[1, 2, -1], [-1, 2, 0], [0, -1, 1]])


def allowed(row, text, state, grammar=GRAMMAR):
    """A row of p after a text that began in this state, without what the grammar forbids there. A
    text that it forbids goes on from state 0."""
    for token in text:
        state = max(0, int(grammar[state, token]))
    row = row * (grammar[state] >= 0)
    return row / row.sum()


def grammar_law(count, state, start=()):
    """{text: probability} of plain decoding under the grammar, after a text that it may refuse."""
    found = {start: 1.0}
    for _ in range(count - len(start)):
        found = {(*text, t): weight * float(x) for text, weight in found.items()
                 for t, x in enumerate(allowed(P[text[-1] if text else -1], text, state)) if x > 0}
    return found


@pytest.mark.parametrize("K, copied", [
    (1, None), (2, None), (3, None), (2, [0, 1]), (2, [2, 2]), (0, [])])
@pytest.mark.parametrize("state", [0, 1, 2])
def test_a_draft_under_a_grammar(K, copied, state):
    """Drafts from a q that knows no grammar. The texts have the law of plain decoding under it."""
    def run(constrain, coins):
        tokens, q, way = planted(coins, range(K), SMALL, copied)
        ids = torch.tensor([tokens], dtype=torch.long)
        p = constrain(after(way, P)[None], ids, GRAMMAR, torch.tensor([state]))
        accepted, token = verify(p, None if q is None else torch.stack(q)[None], ids, coins)
        return (*way[int(accepted)], int(token))

    def finish(found):
        whole = {}
        for start, weight in found.items():
            for text, more in grammar_law(K + 1, state, start).items():
                whole[text] = whole.get(text, 0.0) + weight * more
        return whole

    what = f"{K} drafts from q" if copied is None else f"the copied proposals {copied}"
    same_law(partial(run, constrain), grammar_law(K + 1, state), Mistakes("constrain", run, True),
             f"{what}, the grammar {GRAMMAR.tolist()}, state {state}; {{text: probability}}",
             finish=finish)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("grammar", [GRAMMAR, GRAMMAR[[1, 2, 0]]], ids=["one grammar", "another"])
def test_each_text_has_its_own_state(grammar, dtype):
    """Four texts at once, with drafts that the grammar allows: so all rows count."""
    p, state, tokens = mixed(3, 5).p[torch.arange(12) % 4].view(4, 3, 3).to(dtype), [0, 1, 2, 1], []
    for b, here in enumerate(state):
        tokens.append([])
        for k in range(2):
            tokens[b].append([t for t in range(3) if grammar[here, t] >= 0][(b + k) % 2])
            here = int(grammar[here, tokens[b][k]])
    want = torch.stack([torch.stack([allowed(p[b, k], tokens[b][:k], state[b], grammar)
                                     for k in range(3)]) for b in range(4)])
    given = p, torch.tensor(tokens), grammar, torch.tensor(state)
    compare(constrain(*given), want, Mistakes("constrain", lambda f: f(*given)),
            f"p {tuple(p.shape)} in {dtype}, tokens {tokens}, states {state}", 1e-6)


# --- a ring

SIZES = [(window, gamma) for window in (1, 2, 3, 4) for gamma in (0, 1, 2, 3)]


def slow_mask(first, T, size, window):
    """`ring_mask` position by position."""
    mask = torch.zeros(T, size, dtype=torch.bool)
    for t in range(T):
        for j in range(max(0, first + t - window + 1), first + t + 1):
            mask[t, j % size] = True
    return mask


def test_the_mask_of_a_ring():
    for window, gamma in SIZES:
        for size, first in itertools.product(range(window, window + gamma + 3), range(9)):
            case = first, gamma + 1, size, window
            look(ring_mask(*case), picture(slow_mask(*case)),
                 Mistakes("ring_mask", lambda f, case=case: picture(f(*case))),
                 f"ring_mask(first, T, size, window) = ring_mask{case}")


def goes_wrong(size, window, gamma):
    """Whether any run of some rounds does: all that each may accept are tried."""
    runs = itertools.product(range(gamma + 1), repeat=5)
    return any(replay(size, window, gamma, run, slow_mask) for run in runs)


@pytest.mark.parametrize("window", [1, 2, 3, 4])
def test_the_size_of_a_ring(window):
    """The smallest size with which no run goes wrong."""
    for gamma in range(4):
        want = next(size for size in itertools.count(window) if not goes_wrong(size, window, gamma))
        compare(torch.tensor(ring_size(window, gamma)), want, Mistakes(
            "ring_size", lambda f, gamma=gamma: f(window, gamma)),
            f"window = {window}, gamma = {gamma}")


def test_a_counterexample_to_a_smaller_ring():
    for window, gamma in [(window, gamma) for window, gamma in SIZES if gamma]:
        run, size = ring_counterexample(window, gamma), window + gamma - 1
        given = f"ring_counterexample({window}, {gamma})"
        if not isinstance(run, list) or not all(type(n) is int and 0 <= n <= gamma for n in run):
            fail(given, f"a list of numbers from 0 to {gamma}, one for each round", f"{run!r:.100}")
        if not replay(size, window, gamma, run, slow_mask):
            fail(given, f"a run in which a ring of {size} slots goes wrong",
                 f"{run}, which does not",
                 "the block must overwrite a key that it reads: let the text outgrow the window")
