"""Two published results to explain, with the tests that grade them: exercises 17 and 18. The run of 18 is in
github.com/shreyansh26/Speculative-Decoding: README.md, runs/draft_model_ultrachat3000_len2_nonvllm.jsonl."""
import torch
from teach import compare, fail, short
from tiny import law, wide


def first_failure(p, q, tokens, coins):
    """`verification.verify_block` gone wrong: prefix i passes with its weight w_i = min(1, w_{i-1} p/q), and
    the draft ends at the first coin that fails. p (1, 3, V), q (1, 2, V), tokens (1, 2)."""
    ratio = (p[0, :2].gather(1, tokens[0, :, None]) / q[0].gather(1, tokens[0, :, None]))[:, 0]
    first = ratio[0].clamp(max=1)
    weight = torch.stack([first, (first * ratio[1]).clamp(max=1)])
    accepted = int(coins.flip(weight).long().cumprod(0).sum())
    left = p[0, accepted] - (q[0, accepted] if accepted < 2 else 0)
    return accepted, int(coins.choose(left.clamp(min=0) if left.clamp(min=0).sum() > 0 else p[0, accepted]))


def counterexample():
    """(p (3, V), q (2, V)), distributions in float64 of three tokens of the target and two of the draft, each
    the same whatever came before, for which `first_failure` writes texts with another distribution than p's.
    Two tokens are enough: V = 2."""
    p = torch.tensor([[1.0, 2.0]] * 3, dtype=torch.float64) / 3
    q = torch.tensor([[2.0, 1.0]] * 2, dtype=torch.float64) / 3
    return p, q


def test_a_counterexample_to_the_first_failure():
    """The published mistake must show in the distribution of the first two tokens."""
    p, q = counterexample()
    for name, t, rows in (("p", p, 3), ("q", q, 2)):
        if t.shape != (rows, p.shape[-1]) or not torch.allclose(t.sum(-1), torch.ones(rows).double()):
            fail("counterexample()", f"{name} of shape ({rows}, V), whose rows are distributions",
                 f"{short(t)}", "the target judges two drafts and gives a bonus token: three rows")

    def text(coins):
        tokens = coins.choose(q)
        accepted, token = first_failure(p[None], q[None], tokens[None], coins)
        out = [*tokens[:accepted].tolist(), token]
        return tuple([*out, *(int(coins.choose(row)) for row in p[len(out) :])][:2])

    got = law(text)
    off = max(abs(weight - float(p[0, a] * p[1, b])) for (a, b), weight in got.items())
    if off < 0.01:
        fail(f"p = {short(p)}, q = {short(q)}", "texts with another distribution than p's",
             f"p's, or nearly: off by {off:.2g}", "where p = q nothing is ever rejected, and every form is "
             "right" if torch.allclose(p[:2], q) else "the first token comes out right in this form; let the "
             "first draft be one that is often rejected (p < q), and look at the second")


def draft_cost(plain, seconds, drafted, verified):
    """What a pass of the draft model cost, in passes of the target: the paper's c. The run took `seconds` for
    `drafted` passes of the draft model and `verified` passes of the target, each of which took `plain`."""
    return (seconds / plain - verified) / drafted


def speed(share, gamma, cost, drafted, verified):
    """The speed relative to plain decoding. A round drafts gamma tokens, of which `share` is accepted, in
    `drafted` passes of the draft model, each at this cost, and `verified` passes of the target."""
    return (1 + gamma * share) / (drafted * cost + verified)


def break_even(share, gamma, drafted, verified):
    """The cost of a draft pass at which such rounds are as fast as plain decoding."""
    return (1 + gamma * share - verified) / drafted


def test_a_published_run():
    plain, seconds, rows = 2.0873 / 128, 3.4368, [
        (0.818, 2, 0.967, 3, 1.873), (1, 2, 0.967, 3, 2), (0.818, 2, 0.967, 2, 1), (0.818, 2, 0.07, 2, 1)]
    compare(wide([draft_cost(plain, seconds, 129, 86)]), [0.967098], {
        "the passes of the target took time, too: subtract them first": [seconds / plain / 129],
        "these are seconds: divide by those of a pass of the target": [(seconds - 86 * plain) / 129]},
        f"plain = {plain:.6f}, seconds = {seconds}, drafted = 129, verified = 86", 1e-5)
    given = f"(share, gamma, cost, drafted, verified) = {rows}"
    compare(wide([speed(*row) for row in rows]), [0.552158, 0.612120, 0.898432, 2.312281], {
        "share is accepted / proposed, and no alpha (exercise 16): a round yields 1 + gamma share tokens":
            [(1 + s + s * s) / (d * c + v) for s, _, c, d, v in rows],
        "this is the paper's price, gamma c + 1; count the passes that these rounds take":
            [(1 + g * s) / (g * c + 1) for s, g, c, *_ in rows]}, given, 1e-5)
    compare(wide([break_even(s, g, d, v) for s, g, _, d, v in rows]), [0.254333, 1 / 3, 0.818, 0.818], {
        "that holds for gamma passes of the draft model and one of the target; here each counts as given":
            [s for s, *_ in rows],
        "the passes of the target come first: only what is left can pay for drafts":
            [(1 + g * s) / d for s, g, _, d, _ in rows]}, given, 1e-5)
