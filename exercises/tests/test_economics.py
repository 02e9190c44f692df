"""What drafting gains on a machine: exercises 20 and 21, exercises/economics.py."""

import pytest
from mistaken import gives
from teach import Mistakes, compare
from tiny import wide

from control import expected_tokens
from exercises.economics import best_bits, cost_in_bits, largest_batch, pass_seconds


def test_the_cost_of_few_bits():
    """By hand: a billion weights at 100 GB/s take 20 ms in 16 bits, and 5.625 ms in 4.5."""
    gives(cost_in_bits, {
        (4, 1e9, 1e11, 0.0): 5.625 / 20, (4, 1e9, 1e11, 0.005): 10.625 / 25,
        (8, 2e9, 5e10, 0.01): 52.5 / 90, (16, 1e9, 1e11, 0.001): 1.0,
        (4, 1e9, 1e11, 0.0, 128): 4.125 / 16}, "bits, size, bandwidth, call, maybe group")


FAST = (1e9, 1e12, 0.0)     # size, bandwidth, call: c = 0.15625, 0.28125, 0.53125 in 2, 4, 8 bits
SLOW = (1e9, 1e12, 0.01)    # most of a pass is `call`: drafts cost nearly as much as they bring


def once(T):
    return 1.0


def dear(T):
    """A pass over T tokens on a machine that has little to compute with."""
    return 1 + 0.25 * (T - 1)


def check_bits(alphas, machine, pass_cost, most, want=None):
    """best_bits must find the fastest of all pairs; by hand it is `want`."""
    found = {(16, 0): 1.0}
    costs = {bits: cost_in_bits(bits, *machine) for bits in alphas}
    for bits, alpha in alphas.items():
        for gamma in range(1, most + 1):
            price = gamma * costs[bits] + pass_cost(gamma + 1)
            found[bits, gamma] = expected_tokens(alpha, gamma) / price
    best = want or max(found, key=found.get)

    def picks(f):
        return wide(f(dict(alphas), *machine, pass_cost, most))

    compare(picks(best_bits), wide([*best, found[best]]), Mistakes("best_bits", picks),
            f"alphas = {alphas}, which cost {costs}, a pass over 2 tokens {pass_cost(2)} and over "
            f"4 {pass_cost(4)}, most = {most}; (bits, gamma, speed)", 1e-9)


@pytest.mark.parametrize("case", [
    ({2: 0.1, 4: 0.8, 8: 0.9}, FAST, once, 8, (4, 3)),
    ({4: 0.4, 8: 0.95}, (4e9, 1e12, 0.0), once, 8, (8, 5)),
    ({4: 0.8, 8: 0.9}, FAST, dear, 8, (4, 2)),
    ({2: 0.9, 4: 0.95}, FAST, once, 3, (2, 3)),
    ({2: 0.97}, FAST, once, 30, (2, 16)),
    ({4: 0.5, 8: 0.55}, (3e9, 5e11, 0.004), once, 8, (4, 1)),
    ({4: 0.6, 8: 0.8}, SLOW, dear, 8, (16, 0))],
    ids=["fewest bits lose", "more bits win", "wide passes are dear", "long drafts are cut",
         "long drafts are right", "one token at a time", "no draft pays"])
def test_the_best_bits(case):
    check_bits(*case)


# --- a batch


def test_the_time_of_a_pass():
    """By hand: 2 GB at 100 GB/s take 20 ms, and 64 times 5 tokens 2e9 operations each at 10 TFLOPS
    64 ms."""
    gives(pass_seconds, {
        (1, 1, 1e9, 1e6, 1e11, 1e13): 0.02001, (8, 5, 1e9, 1e6, 1e11, 1e13): 0.02008,
        (64, 5, 1e9, 1e6, 1e11, 1e13): 0.064, (64, 5, 1e9, 1e9, 1e11, 1e13): 0.66,
        (200, 1, 1e9, 1e6, 1e11, 1e13): 0.04, (1, 2000, 3e9, 1e6, 2e11, 5e12): 2.4,
        (2, 1, 3e9, 1e7, 2e11, 5e12): 0.0301}, "rows, width, size, cache, bandwidth, flops")


def roofline(cache):
    """A pass over a billion weights, at 100 GB/s and 10 TFLOPS."""
    def seconds(rows, width):
        return max((2e9 + rows * cache) / 1e11, 2e9 * rows * width / 1e13)
    return seconds


def bumpy(rows, width):
    """Seven rows fill the machine's tiles badly: a pass over more of them is faster again."""
    return rows * width if rows == 7 else 10 + rows


def check_batch(alpha, gamma, cost, seconds, most, want):
    def size(f):
        return wide([f(alpha, gamma, cost, seconds, most)])

    def takes(width):
        return [round(seconds(rows, width), 6) for rows in (1, 8, 64)]

    compare(size(largest_batch), [want], Mistakes("largest_batch", size),
            f"alpha = {alpha}, gamma = {gamma}, cost = {cost}, most = {most}; a plain pass over 1, "
            f"8 and 64 texts takes {takes(1)} s, one that verifies {takes(gamma + 1)} s; the "
            "largest batch")


@pytest.mark.parametrize("case", [
    (0.7, 3, 0.1, roofline(1e6), 500, 57), (0.7, 3, 0.1, roofline(1e9), 500, 500),
    (0.7, 3, 0.1, bumpy, 12, 12), (0.6, 2, 0.1, lambda rows, width: 10 + 5 * rows * width, 9, 1),
    (0.3, 2, 0.5, roofline(1e6), 500, 0), (0.8, 6, 0.05, roofline(1e6), 500, 53)],
    ids=["short texts", "long texts", "the largest, not the first that loses", "one text alone",
         "a draft too dear", "long drafts"])
def test_the_largest_batch(case):
    check_batch(*case)
