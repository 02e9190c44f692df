"""How a failing test speaks to somebody who has just written the function: what was given, what was expected,
what came, and the likely mistake, which is named only where what came is just what that mistake gives."""
import pytest
import torch
from tiny import law


def fail(given, want, got, why=None):
    lines = [f"given         {given}", f"expected      {want}", f"what came     {got}"]
    pytest.fail("\n".join(lines + [f"likely        {why}"] * bool(why)), pytrace=False)


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
    """Both as text: whole where they are small, else the place where they differ most."""
    if want.numel() <= most:
        return short(want), short(got)
    far = (got.double() - want.double()).abs().nan_to_num(torch.inf)
    at = [int(i) for i in torch.unravel_index(far.argmax(), far.shape)]
    return tuple(f"{short(t[tuple(at)])} at {at}, where they differ most" for t in (want, got))


def compare(got, want, mistakes, given="the worked example of this test", rtol=1e-12):
    """got must be want; if it is a well-known wrong answer, say which mistake gives it."""
    if not isinstance(got, torch.Tensor):
        fail(given, short(want), f"{got!r:.200}", "that is no tensor")
    want = torch.as_tensor(want, dtype=got.dtype)
    if got.shape != want.shape:
        fail(given, f"shape {tuple(want.shape)}", f"shape {tuple(got.shape)}", known(got, mistakes))
    if not torch.allclose(got, want, rtol=rtol, atol=1e-12):
        fail(given, *where(got, want), known(got, mistakes))


def known(got, mistakes):
    for why, wrong in mistakes.items():
        wrong = torch.as_tensor(wrong, dtype=got.dtype)
        if got.shape == wrong.shape and torch.allclose(got, wrong, rtol=1e-6, equal_nan=True):
            return why
    return None


def picture(mask):
    """(T, S) -> one string a token: x where it may read the slot."""
    return ["".join(".x"[bool(v)] for v in row) for row in mask]


def look(got, want, mistakes, given="the worked example of this test"):
    """got (T, S) must look like want; if it is a well-known wrong answer, say which mistake gives it."""
    got = picture(got)
    if got != want:
        fail(given, " ".join(want), " ".join(got),
             next((why for why, wrong in mistakes.items() if got == wrong), None))


# --- distributions


def same_law(run, want, mistakes, given, otherwise=None):
    """run(coins) -> outcome must have the distribution `want`, {outcome: probability}. mistakes: {why: a run
    that makes it}; the one that gives the very same distribution is named, or else `otherwise`."""
    got = law(run)
    if not equal(got, want):
        worst = sorted(got | want, key=lambda key: -abs(got.get(key, 0.0) - want.get(key, 0.0)))[:4]
        expected, came = (", ".join(f"{key}: {table.get(key, 0.0):.4g}" for key in worst)
                          for table in (want, got))
        why = next((why for why, wrong in mistakes.items() if equal(got, law(wrong))), otherwise)
        fail(given, expected, came, why)


def equal(a, b, tolerance=1e-12):
    return all(abs(a.get(key, 0.0) - b.get(key, 0.0)) < tolerance for key in a.keys() | b.keys())
