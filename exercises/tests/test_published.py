"""A published result: exercise 17, exercises/published.py."""
import torch
from teach import fail, promise, short
from tiny import law

from exercises.published import counterexample, first_failure


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
