"""Drafts under a grammar, and in a ring of slots: exercises 25 and 26, exercises/serving.py."""
import itertools
from functools import partial

import pytest
import torch
from teach import compare, fail, look, same_law
from test_by_outcomes import SMALL, P, after, mixed, planted

from exercises.serving import constrain, replay, ring_counterexample, ring_mask, ring_size
from verification import verify

# three states, and what each forbids
GRAMMAR = torch.tensor([[1, 2, -1], [-1, 2, 0], [0, -1, 1]])
STATES = {
    "start": "every row has the state of the text before the draft; "
             "row k stands k drafted tokens further",
    "late": "row k has the state after k + 1 drafted tokens; row 0 is about the first of them",
    "not scaled": "what stays must be scaled to sum to 1 before it is compared with q",
    "first": "only row 0 is masked; each row is judged, and the last one gives the bonus token",
    "last": "only the row of the bonus token is masked; "
            "a draft that breaks the grammar must have p = 0",
    "none": "nothing is masked"}


def by_states(p, tokens, grammar, state, mistake=None):
    """`constrain` row by row, by its definition; with a mistake that a student might make."""
    out = p.clone()
    K = tokens.shape[1]
    for b, k in itertools.product(range(len(p)), range(K + 1)):
        here = int(state[b])
        for token in tokens[b, : {"start": 0, "late": k + 1}.get(mistake, k)].tolist():
            here = max(0, int(grammar[here, token]))
        free = mistake == "none" or mistake == "first" and k > 0 or mistake == "last" and k < K
        row = p[b, k] if free else p[b, k] * (grammar[here] >= 0)
        out[b, k] = row if mistake == "not scaled" else row / row.sum()
    return out


def grammar_law(count, state, start=()):
    """{text: probability} of plain decoding under the grammar, after a text that it may refuse."""
    found = {start: 1.0}
    for _ in range(count - len(start)):
        longer = {}
        for text, weight in found.items():
            here, last = state, -1
            for last in text:
                here = max(0, int(GRAMMAR[here, last]))
            row = P[last] * (GRAMMAR[here] >= 0)
            longer |= {(*text, t): weight * float(x / row.sum())
                       for t, x in enumerate(row) if x > 0}
        found = longer
    return found


@pytest.mark.parametrize("K, copied", [
    (1, None), (2, None), (3, None), (2, [0, 1]), (2, [2, 2]), (0, [])])
@pytest.mark.parametrize("state", [0, 1, 2])
def test_a_draft_under_a_grammar(K, copied, state):
    """Drafts from a q that knows no grammar. The texts have the law of plain decoding under it."""
    def run(rule, coins):
        tokens, q, way = planted(coins, range(K), SMALL, copied)
        ids = torch.tensor([tokens], dtype=torch.long)
        p = rule(after(way, P)[None], ids, GRAMMAR, torch.tensor([state]))
        accepted, token = verify(p, None if q is None else torch.stack(q)[None], ids, coins)
        return (*way[int(accepted)], int(token))

    def finish(found):
        whole = {}
        for start, weight in found.items():
            for text, more in grammar_law(K + 1, state, start).items():
                whole[text] = whole.get(text, 0.0) + weight * more
        return whole

    what = f"{K} drafts from q" if copied is None else f"the copied proposals {copied}"
    same_law(partial(run, constrain), grammar_law(K + 1, state),
             {why: partial(run, partial(by_states, mistake=name)) for name, why in STATES.items()},
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
    tokens, state = torch.tensor(tokens), torch.tensor(state)
    got, want = (rule(p, tokens, grammar, state) for rule in (constrain, by_states))
    first = [0] * 4
    compare(got, want, {"all texts have the state of row 0; each has its own": by_states(
        p, tokens[first], grammar, state[first])},
        f"p {tuple(p.shape)} in {dtype}, tokens {tokens.tolist()}, states {state.tolist()}", 1e-6)


# --- a ring


def slow_mask(first, T, size, window, mistake=None):
    """`ring_mask` position by position; with a mistake that a student might make."""
    mask = torch.zeros(T, size, dtype=torch.bool)
    for t in range(T):
        i = first + t if mistake != "same" else first + T - 1
        for j in range(i - window + 1 - (mistake == "wide"), i + 1):
            if j >= 0 or mistake == "before":
                mask[t, j % size] = True
    return mask


MASKS = {
    "same": "all tokens of the block see what its last one sees; each has its own window",
    "wide": "the window counts the token itself",
    "before": "positions before the text hold no keys"}
SIZES = [(window, gamma) for window in (1, 2, 3, 4) for gamma in (0, 1, 2, 3)]


def test_the_mask_of_a_ring():
    for window, gamma in SIZES:
        for size, first in itertools.product(range(window, window + gamma + 3), range(9)):
            case = first, gamma + 1, size, window
            look(ring_mask(*case),
                 ["".join(".x"[seen] for seen in row) for row in slow_mask(*case).tolist()],
                 {why: ["".join(".x"[seen] for seen in row)
                        for row in slow_mask(*case, name).tolist()]
                  for name, why in MASKS.items()},
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
        compare(torch.tensor(ring_size(window, gamma)), want, {
            "a block overwrites keys that its own first tokens still read": window,
            "one more than needed": want + 1, "one too few": want - 1},
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
