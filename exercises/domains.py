"""The domain of each function: what its arguments may be. It is a table in texts.md. A student
reads it, and exercises/tests/test_domains.py draws inputs from it, the bounds of all axes in pairs
and more at random.
"""
import itertools
import os
import random
import re
import zlib
from math import exp, log
from types import SimpleNamespace
from typing import NamedTuple

from exercises.tasks import PAGE

DRAWS = 300         # what is wrong on one in a hundred escapes these one time in twenty
# A lecturer's own number draws other inputs than the public ones: grade.py --seed
SEED = "EXERCISES_SEED"


class Range(NamedTuple):
    low: float
    high: float

    def bounds(self):
        if not isinstance(self.low, int):
            return [self.low, self.high]
        return sorted({self.low, min(self.low + 1, self.high), self.high})

    def draw(self, rng):
        """Evenly over its logarithm, where it spans orders of magnitude."""
        shift = 1 - self.low if isinstance(self.low, int) and self.low <= 0 else 0
        if self.low + shift > 0 and self.high + shift > 20 * (self.low + shift):
            x = exp(rng.uniform(log(self.low + shift), log(self.high + shift))) - shift
        else:
            x = rng.uniform(self.low, self.high)
        return min(self.high, max(self.low, round(x))) if isinstance(self.low, int) else x


def number(word):
    """An int or a float where the word is one, None for "none", and else the word itself."""
    if word == "none":
        return None
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            pass
    return word


def value(text):
    low, dots, high = text.partition(" .. ")
    if not dots:
        return number(text)
    low, high = number(low), number(high)
    return Range(low, int(high) if isinstance(low, int) else high)


def domain(name):
    """{axis: its values and ranges} of a function."""
    found = re.search(rf"^    domain of {re.escape(name)}\n((?:      .*\n)+)", PAGE, re.M)
    rows = [re.split(r" {2,}", line.strip(), maxsplit=1) for line in found[1].splitlines()]
    return {axis: [v for part in values.split("|") for v in weighted(part.strip())]
            for axis, values in rows}


def weighted(text):
    """A value; "mostly x" is drawn more often than the others of its axis."""
    often = text.startswith("mostly ")
    return [value(text.removeprefix("mostly "))] * (12 if often else 1)


def named():
    """The functions that have a domain."""
    return re.findall(r"^    domain of (\S+)$", PAGE, re.M)


def pairs(axes, rng):
    """Rows {axis: bound} in which any two bounds of two axes meet."""
    bounds = {}
    for axis, values in axes.items():
        found = [bound for v in values
                 for bound in (v.bounds() if isinstance(v, Range) else [v])]
        bounds[axis] = [v for i, v in enumerate(found) if v not in found[:i]]
    sides = [[(axis, i) for i in range(len(row))] for axis, row in bounds.items()]
    left = {frozenset(pair) for one, two in itertools.combinations(sides, 2)
            for pair in itertools.product(one, two)}
    while left:
        row = dict(min(left, key=sorted))
        for axis in rng.sample(list(bounds), len(bounds)):
            if axis not in row:
                meets = [sum(frozenset([(axis, i), other]) in left for other in row.items())
                         for i in range(len(bounds[axis]))]
                best = [i for i, count in enumerate(meets) if count == max(meets)]
                row[axis] = rng.choice(best)
        left -= {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
        yield {axis: bounds[axis][i] for axis, i in row.items()}


def size(row):
    """How large an input is, by the numbers of its row."""
    words = " ".join(str(v) for v in row.values() if not str(v)[:1].isalpha())
    return sum(log(1 + float(x)) for x in re.findall(r"\d+\.?\d*(?:e-?\d+)?", words))


def cases(name):
    """All bounds in pairs, and inputs at random, the small ones first. Each has its own random
    numbers, as `draw`, and what there is to say about a right answer, `remarks`."""
    axes = domain(name)
    draws, = axes.pop("draws", [DRAWS])
    seed = zlib.crc32(f"{name} {os.environ.get(SEED, '')}".encode())
    rng = random.Random(seed)
    rows = list(pairs(axes, rng)) if len(axes) > 1 else []
    for _ in range(draws):
        picked = {axis: rng.choice(values) for axis, values in axes.items()}
        rows.append({axis: v.draw(rng) if isinstance(v, Range) else v
                     for axis, v in picked.items()})
    for n, row in enumerate(sorted(rows, key=size)):
        text = ", ".join(f"{axis} {v}" for axis, v in row.items())
        yield SimpleNamespace(**row, name=name, text=text, remarks=[],
                              draw=random.Random(seed + n))
