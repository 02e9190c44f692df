"""How a failing test speaks to a student who has just written the function: given, expected, got,
their difference, and the likely mistake, which is named only where it gives just what came out."""
import random
from contextlib import contextmanager, suppress

import pytest
import torch
from tiny import law

from exercises.answers import mutants
from exercises.cuts import Stale

NEAR = ("right but for rounding: is something computed in float32? "
        "What comes in float64 must stay so")
CLOSE = "right but for something small: is an epsilon added, or a constant rounded?"


def fail(given, want, got, why=None, off=None):
    rows = {"given": given, "expected": want, "got": got, "difference": off, "likely": why}
    pytest.fail("\n".join(f"{name:14}{row}" for name, row in rows.items() if row is not None),
                pytrace=False)


def promise(kept, given, want, got, why=None):
    """Fail unless it is kept."""
    if not kept:
        fail(given, want, got if isinstance(got, str) else short(got), why)


@contextmanager
def no_other_chance(given):
    """All chance must come from the coins that the function is given."""
    before = torch.get_rng_state(), random.getstate()
    try:
        yield
    finally:
        if not torch.equal(before[0], torch.get_rng_state()) or before[1] != random.getstate():
            fail(given, "all chance comes from the coins", "random numbers of your own",
                 "with torch.rand, multinomial and the like no run can be repeated, and no test "
                 "can try every outcome; use only the coins that the text of the exercise names")


def short(value):
    """A tensor or a number as a student reads it."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(short, value)) + "]"
    return str(value)


def where(got, want, most=24):
    """Both and their difference as text: whole where they are small,
    else where they differ most."""
    off = got.double() - want.double()
    if want.numel() <= most:
        return tuple(map(short, (want, got, off)))
    at = [int(i) for i in torch.unravel_index(off.abs().nan_to_num(torch.inf).argmax(), off.shape)]
    return tuple(f"{short(t[tuple(at)])} at {at}, where they differ most" for t in (want, got, off))


def compare(got, want, mistakes, given="the worked example of this test", rtol=1e-12):
    """got must be want; if it is a well-known wrong answer, say which mistake gives it."""
    if not isinstance(got, torch.Tensor):
        fail(given, short(want), f"{got!r:.200}", "that is no tensor")
    want = want if isinstance(want, torch.Tensor) else torch.as_tensor(want, dtype=got.dtype)
    if got.shape != want.shape or got.dtype != want.dtype:
        fail(given, *(f"shape {tuple(t.shape)} in {t.dtype}" for t in (want, got)),
             known(got, mistakes))
    if not torch.allclose(got, want, rtol=rtol, atol=1e-12):
        expected, came, off = where(got, want)
        near = NEAR if torch.allclose(got, want, rtol=1e-5, atol=1e-7) else None
        if near and got.dtype == torch.float64 and torch.allclose(got, want, rtol=1e-8, atol=0):
            near = CLOSE
        fail(given, expected, came, known(got, mistakes) or near,
             off if got.is_floating_point() else None)


def known(got, mistakes):
    for why, wrong in mistakes.items():
        wrong = torch.as_tensor(wrong, dtype=got.dtype)
        if got.shape == wrong.shape and torch.allclose(got, wrong, rtol=1e-6, equal_nan=True):
            return why
    return None


class Mistakes:
    """{what to say: what call(function) gives} for each wrong answer of exercises/wrong.txt. It is
    computed only where a test fails. run: the calls are call(function, coins), for a law. What
    raises an error gives ()."""

    def __init__(self, name, call, run=False):
        self.name, self.call, self.run = name, call, run

    def items(self):
        rows = ()
        with suppress(Stale):       # the library itself may be what is wrong
            rows = mutants(self.name)
        for why, function in rows:
            def given(*coins, function=function):
                try:
                    return self.call(function, *coins)
                except (Exception, pytest.fail.Exception):
                    return ()
            yield why, given if self.run else given()


def picture(mask):
    """(T, S) -> one string a token: x where it may read the slot."""
    return ["".join(".x"[bool(v)] for v in row) for row in mask]


def look(got, want, mistakes, given="the worked example of this test"):
    """got (T, S) must look like want; if it is a well-known wrong answer,
    say which mistake gives it."""
    got = picture(got)
    if got != want:
        why = next((why for why, wrong in mistakes.items() if got == wrong), None)
        rows = [t for t, row in enumerate(want) if len(want) <= 12 or row != got[t]][:12]
        at = f"; rows {rows}, which differ" * (len(want) > 12)
        fail(given + at, " ".join(want[t] for t in rows), " ".join(got[t] for t in rows), why)


# --- distributions


def same_law(run, want, mistakes, given, otherwise=None, finish=dict):
    """run(coins) -> outcome must have the distribution `want`, {outcome: probability}, once
    `finish` has made whole outcomes of those that it got. mistakes: {why: a run that makes it}; the
    one that gives the very same distribution is named, or else `otherwise`."""
    with no_other_chance(given):
        got = finish(law(run))
    if not equal(got, want):
        off = {key: got.get(key, 0.0) - want.get(key, 0.0) for key in got | want}
        worst = sorted(off, key=lambda key: -abs(off[key]))[:4]
        expected, came, far = (", ".join(f"{key}: {table.get(key, 0.0):{digits}}" for key in worst)
                               for table, digits in ((want, ".4g"), (got, ".4g"), (off, "+.2g")))
        why = next((why for why, wrong in mistakes.items() if equal(got, finish(law(wrong)))),
                   otherwise)
        if all(abs(x) < 1e-4 for x in off.values()):
            why = ("right but for something small: is it computed in float32, is an epsilon added, "
                   "or a threshold? q of a token that was drawn from q is never 0, and of what is "
                   "left ask whether it is > 0")
        fail(given, expected, came, why, far)


def equal(a, b, tolerance=1e-12):
    return all(abs(a.get(key, 0.0) - b.get(key, 0.0)) < tolerance for key in a.keys() | b.keys())
