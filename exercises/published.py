"""Two published results to explain: exercises 17 and 18, which test_published.py and
test_domains.py in exercises/tests grade. The run of exercise 18 comes from
github.com/shreyansh26/Speculative-Decoding, README.md,
runs/draft_model_ultrachat3000_len2_nonvllm.jsonl."""
import torch


def first_failure(p, q, tokens, coins):
    """`methods.block.verify_block` gone wrong: prefix i passes with its weight w_i = min(1, w_{i-1}
    p/q), and the draft ends at the first coin that fails. p (1, 3, V), q (1, 2, V), tokens (1,
    2)."""
    ratio = (p[0, :2].gather(1, tokens[0, :, None]) / q[0].gather(1, tokens[0, :, None]))[:, 0]
    first = ratio[0].clamp(max=1)
    weight = torch.stack([first, (first * ratio[1]).clamp(max=1)])
    accepted = int(coins.flip(weight).long().cumprod(0).sum())
    left = p[0, accepted] - (q[0, accepted] if accepted < 2 else 0)
    return accepted, int(coins.choose(
        left.clamp(min=0) if left.clamp(min=0).sum() > 0 else p[0, accepted]))


def counterexample():
    """(p (3, V), q (2, V)), distributions in float64 of three tokens of the target and two of the
    draft, each the same whatever came before, for which `first_failure` writes texts with another
    distribution than p's. Two tokens are enough: V = 2."""
    p = torch.tensor([[1.0, 2.0]] * 3, dtype=torch.float64) / 3
    q = torch.tensor([[2.0, 1.0]] * 2, dtype=torch.float64) / 3
    return p, q


def draft_cost(plain, seconds, drafted, verified):
    """What a pass of the draft model cost, in passes of the target: the paper's c. The run took
    `seconds` for `drafted` passes of the draft model and `verified` passes of the target, each of
    which took `plain`."""
    return (seconds / plain - verified) / drafted


def speed(share, gamma, cost, drafted, verified):
    """The speed relative to plain decoding. A round drafts gamma tokens, of which `share` is
    accepted, in `drafted` passes of the draft model, each at this cost, and `verified` passes of
    the target."""
    return (1 + gamma * share) / (drafted * cost + verified)


def break_even(share, gamma, drafted, verified):
    """The cost of a draft pass at which such rounds are as fast as plain decoding."""
    return (1 + gamma * share - verified) / drafted
