"""A ring of slots: exercise 26, exercises/serving.py."""
import itertools

import pytest
import torch
from teach import Mistakes, compare

from exercises.serving import replay, ring_size


def slow_mask(first, T, size, window):
    """`ring_mask` position by position."""
    mask = torch.zeros(T, size, dtype=torch.bool)
    for t in range(T):
        for j in range(max(0, first + t - window + 1), first + t + 1):
            mask[t, j % size] = True
    return mask


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
