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


def outcomes(r):
    """(drafted, accepted) of each row."""
    return list(zip(r.proposed.tolist(), r.accepted.tolist(), strict=True))
