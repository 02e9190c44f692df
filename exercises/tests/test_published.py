"""Two published results: exercises 17 and 18, exercises/published.py."""
import random

import torch
from teach import compare, fail, promise, short
from tiny import law, wide

from exercises.published import break_even, counterexample, draft_cost, first_failure, speed


def test_a_counterexample_to_the_first_failure():
    """The published mistake must show in the distribution of the first two tokens."""
    p, q = (torch.as_tensor(t).double() for t in counterexample())
    for name, t, rows in (("p", p, 3), ("q", q, 2)):
        given = "counterexample()"
        want = f"{name} of shape ({rows}, V), whose rows are distributions"
        promise(t.shape == (rows, p.shape[-1]), given, want, t,
                "the target judges two drafts and gives a bonus token: three rows")
        promise((t >= 0).all() and ((t.sum(-1) - 1).abs() < 1e-6).all(), given, want, t,
                "probabilities lie from 0 to 1, and those of a row sum to 1")
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)

    def text(coins):
        tokens = coins.choose(q)
        accepted, token = first_failure(p[None], q[None], tokens[None], coins)
        out = [*tokens[:accepted].tolist(), token]
        return tuple([*out, *(int(coins.choose(row)) for row in p[len(out) :])][:2])

    got = law(text)
    off = max(abs(weight - float(p[0, a] * p[1, b])) for (a, b), weight in got.items())
    if off < 0.01:
        fail(f"p = {short(p)}, q = {short(q)}", "texts with another distribution than p's",
             f"p's, or nearly: off by {off:.2g}",
             "where p = q nothing is ever rejected, and every form is right"
             if torch.allclose(p[:2], q) else
             "the first token comes out right in this form; let the "
             "first draft be one that is often rejected (p < q), and look at the second")


def test_a_published_run():
    plain, seconds, rows = 2.0873 / 128, 3.4368, [
        (0.818, 2, 0.967, 3, 1.873), (1, 2, 0.967, 3, 2), (0.818, 2, 0.967, 2, 1),
        (0.818, 2, 0.07, 2, 1)]
    compare(wide([draft_cost(plain, seconds, 129, 86)]), [0.967098], {
        "the passes of the target took time, too: subtract them first": [seconds / plain / 129],
        "these are seconds: divide by those of a pass of the target":
            [(seconds - 86 * plain) / 129]},
        f"plain = {plain:.6f}, seconds = {seconds}, drafted = 129, verified = 86", 1e-5)
    given = f"(share, gamma, cost, drafted, verified) = {rows}"
    compare(wide([speed(*row) for row in rows]), [0.552158, 0.612120, 0.898432, 2.312281], {
        "share is accepted / proposed, and no alpha (exercise 16): "
        "a round yields 1 + gamma share tokens":
            [(1 + s + s * s) / (d * c + v) for s, _, c, d, v in rows],
        "this is the paper's price, gamma c + 1; count the passes that these rounds take":
            [(1 + g * s) / (g * c + 1) for s, g, c, *_ in rows]}, given, 1e-5)
    compare(wide([break_even(s, g, d, v) for s, g, _, d, v in rows]),
            [0.254333, 1 / 3, 0.818, 0.818], {
        "that holds for gamma passes of the draft model and one of the target; "
        "here each counts as given":
            [s for s, *_ in rows],
        "the passes of the target come first: only what is left can pay for drafts":
            [(1 + g * s) / d for s, g, _, d, _ in rows]}, given, 1e-5)


def test_drawn_runs():
    draw = random.Random(0)
    for _ in range(30):
        share, gamma, cost = draw.random(), draw.randint(1, 9), draw.uniform(0.01, 2)
        drafted, verified = draw.uniform(1, 12), draw.uniform(1, 3)
        plain = draw.uniform(1e-3, 2)
        row = share, gamma, cost, drafted, verified
        run = plain, plain * (drafted * cost + verified), drafted, verified
        compare(wide([draft_cost(*run)]), [cost], {},
                f"(plain, seconds, drafted, verified) = {run}", 1e-9)
        tokens = 1 + gamma * share
        compare(wide([speed(*row)]), [tokens / (drafted * cost + verified)], {},
                f"(share, gamma, cost, drafted, verified) = {row}", 1e-9)
        compare(wide([break_even(share, gamma, drafted, verified)]),
                [(tokens - verified) / drafted], {},
                f"(share, gamma, drafted, verified) = {(share, gamma, drafted, verified)}", 1e-9)
