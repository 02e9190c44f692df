"""Functions of the library, each alone, by examples that are small enough to follow on paper, and
what their domains (test_domains.py) do not reach. A wrong answer is told from others by what the
mistakes of exercises/wrong.txt give."""
import pytest
import torch
from teach import Mistakes, compare, fail, known, short
from test_sampling import from_p
from tiny import wide

from control import best_along
from machine.exact import Race
from sampling import to_probs
from search import climb

# --- from logits to probabilities


def roots(p, power):
    powers = [x**power for x in p]
    return [x / sum(powers) for x in powers]


PROBS = {   # settings, the softmax of the logits, what comes out
    "greedy": (dict(temperature=0.0), [0.125, 0.375, 0.375, 0.125], [0, 1, 0, 0]),
    "temperature": (
        dict(temperature=0.5), [0.5, 0.25, 0.125, 0.125], roots([0.5, 0.25, 0.125, 0.125], 2)),
    "top-k": (dict(temperature=1.0, top_k=2), [0.1, 0.2, 0.35, 0.35], [0, 0, 0.5, 0.5]),
    "top-k, ties": (dict(temperature=1.0, top_k=2), [0.1, 0.3, 0.3, 0.3], [0, 0.5, 0.5, 0]),
    "top-p": (dict(temperature=1.0, top_p=0.6), [0.125, 0.5, 0.125, 0.25], [0, 2 / 3, 0, 1 / 3]),
    "top-p, reached": (dict(temperature=1.0, top_p=0.5), [0.25, 0.5, 0.125, 0.125], [0, 1, 0, 0]),
    "min-p": (dict(temperature=1.0, min_p=0.4), [0.125, 0.5, 0.125, 0.25], [0, 2 / 3, 0, 1 / 3]),
    "min-p, reached": (dict(temperature=1.0, min_p=1.0), [0.2, 0.4, 0.4], [0, 0.5, 0.5]),
    "top-k, then top-p": (
        dict(temperature=1.0, top_k=2, top_p=0.5), [0.4, 0.3, 0.2, 0.1], [1, 0, 0, 0]),
    "top-p, then min-p": (
        dict(temperature=1.0, top_p=0.75, min_p=0.5), [0.4, 0.25, 0.2, 0.15],
        [0.4 / 0.85, 0.25 / 0.85, 0.2 / 0.85, 0]),
    "all four": (
        dict(temperature=0.5, top_k=3, top_p=0.75, min_p=0.7), roots([0.4, 0.3, 0.2, 0.1], 0.5),
        [4 / 7, 3 / 7, 0, 0])}


def check_probabilities(logits, settings, want, given):
    got = to_probs(logits, **settings)
    mistakes = Mistakes("to_probs", lambda f: f(logits, **settings))
    if got.shape == logits.shape and bool(got.isnan().any()):
        fail(given, "probabilities", "NaN", known(got, mistakes) or
             "NaN: was a softmax taken of nothing but -inf, or 0 / 0?")
    compare(got, want, mistakes, given, rtol=1e-9)


def among(row, V, other=0.0):
    """The numbers of a row, far apart in one of V, which is `other` elsewhere."""
    whole = torch.full((V,), other, dtype=torch.float64)
    step = V // len(row)
    whole[step - 1 : step * len(row) : step] = torch.as_tensor(row, dtype=torch.float64)
    return whole


@pytest.mark.parametrize("name", PROBS)
def test_probabilities(name):
    settings, p, want = PROBS[name]
    check_probabilities(from_p(*p), settings, want,
                        f"the logits log {short(p)}, whose softmax is just that, and {settings}")
    V = 16_384
    check_probabilities(among(from_p(*p), V, -1e4), settings, among(want, V),
                        f"{V:,} tokens, of which some have these logits and all others -10,000; "
                        f"{settings}")


# --- a race for each place


def test_the_winners_of_few_tokens_are_those_of_the_whole_vocabulary():
    """Where a cut leaves few, only these race, with the numbers that they have among all."""
    p = torch.zeros(2, 3, 1000).double()
    chances = {(0, 0): [7, 999], (0, 1): [0, 8, 500], (0, 2): [3], (1, 0): [8, 9], (1, 2): [0, 5]}
    for (b, t), ids in chances.items():
        p[b, t, ids] = 1 / len(ids)
    p[1, 1] = 1 / 1000
    position = torch.tensor([[4, 5, 6], [90, 91, 92]])
    for places in ([0, 2], [0, 1, 2]):      # in the second case one row has all of them
        few, at = p[:, places], position[:, places]
        got = Race([3, -8]).settle(few, at)
        everyone = few.clamp(min=1e-30)     # which wins once in 10^30 races
        compare(got, Race([3, -8]).settle(everyone, at), {},
                f"two to three tokens of 1,000 at the places {at.tolist()}, seeds 3 and -8")


# --- what drafting is worth


def test_the_best_gamma_along_texts():
    """No draft is longer than the longest text."""
    texts = [torch.ones(2), torch.ones(5)]
    for most, want in ((9, 5), (3, 3)):
        got, _ = best_along(texts, 0.1, most)
        compare(torch.tensor(got), want, {}, f"c = .1, series of ones, 2 and 5 long, most = {most}")


# --- a search


def test_a_climb_that_takes_back_what_it_did():
    """A way of seven flips through sets of four bits, of which each is next to no other of the
    way."""
    way, worth = [wide([0, 0, 0, 0])], {(0, 0, 0, 0): 1.0}
    for bit in (0, 1, 2, 0, 3, 1, 0):
        way.append((way[-1] - torch.eye(4).double()[bit]).abs())
        worth[tuple(way[-1].int().tolist())] = 1.0 + len(worth)
    score = lambda z: wide([worth.get(tuple(row), 0.0) for row in z.int().tolist()])    # noqa: E731
    ends, _ = climb(score, torch.stack([way[0], way[4]]), lambda z: z[:, 0] < 2)
    compare(ends.double(), torch.stack([way[-1]] * 2), {
        "it ends after as many flips as there are bits": torch.stack([way[4], way[-1]])},
        "scores that rise along 0000 1000 1100 1110 0110 0111 0011 1011 and are 0 elsewhere, "
        "from the first "
        "and from the fifth of these")
