"""Counts of what became of drafts, for rules and drafters that learn while they run."""
from dataclasses import dataclass


@dataclass
class Beta:
    """An acceptance rate estimated from counts that fade, as the mean of a Beta distribution. The
    estimate before any count, `prior`, weighs as much as two tests. At 0.5 this is Laplace's rule
    of succession."""
    hits: float = 0.0
    misses: float = 0.0
    prior: float = 0.5

    def mean(self):
        return (self.hits + 2 * self.prior) / (self.hits + self.misses + 2)

    def high(self):
        """An optimistic estimate, one standard deviation above the mean and at most 1."""
        mean = self.mean()
        return min(1.0, mean + (mean * (1 - mean) / (self.hits + self.misses + 3)) ** 0.5)

    def fade(self, factor):
        self.hits *= factor
        self.misses *= factor

    def add(self, hits, misses):
        self.hits += hits
        self.misses += misses


class Shortest:
    """Counts the tokens of the row that has written the fewest, of those that have not ended."""

    def __init__(self, rows):
        self.written = [0] * rows
        self.least = 0

    def gain(self, new):
        """How many that row has gained by the `new` tokens of each row."""
        self.written = [n + len(tokens) for n, tokens in zip(self.written, new, strict=True)]
        least = min(n for n, tokens in zip(self.written, new, strict=True) if tokens)
        gained = least - self.least
        self.least = least
        return gained


def outcomes(r):
    """(drafted, accepted) of each row."""
    return list(zip(r.proposed.tolist(), r.accepted.tolist(), strict=True))
