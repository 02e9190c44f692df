"""Block verification (Sun et al., ICLR 2025, arXiv 2403.10444, Algorithm 2). It judges a draft as a
whole. The text has the same distribution as with `verify`, and from two drafted tokens on, more are
accepted on average."""
import torch
import torch.nn.functional as F

from verification import against, next_token, verify


def verify_block(p, q, tokens, coins, length=None):
    """`verify` for the draft as a whole. It takes, returns and spends the same.

    A token with p > q makes up for an earlier one with p < q:

        w_0 = 1, w_i = min(1, w_{i-1} p/q)      the weight of the first i tokens
        Z = sum of max(w_i p - q, 0)            over the token after them
        Z / (Z + 1 - w_i)                       the chance that they pass; of the whole draft: w_K

    Every prefix flips a coin, and the longest that passes is accepted, even if a shorter one
    failed. At least i tokens are then accepted with probability w_i. The proof starts from the end.
    More than i are accepted with probability w_i - Z, the sum of min(w_i p, q), and exactly i with
    (1 - w_i + Z) Z / (Z + 1 - w_i) = Z. Together that is w_i.

    >>> from sampling import Coins
    >>> p = torch.tensor([[[1/3, 2/3]] * 3])                # the example of the paper, section 3
    >>> q = torch.tensor([[[2/3, 1/3]] * 2])
    >>> accepted, token = verify_block(p, q, torch.tensor([[0, 1]]), Coins(1))
    >>> accepted.tolist(), token.tolist()       # 0 fails alone, but 0, 1 passes: w = 1/2, then 1
    ([2], [1])
    """
    if tokens.shape[1] == 0:
        return verify(p, q, tokens, coins)
    q, ratio, live = against(p, q, tokens, length)
    weights = [torch.ones_like(p[:, 0, 0])]
    for r in ratio.unbind(1):
        weights.append((weights[-1] * r).clamp(max=1))
    weight = torch.stack(weights, 1)                                            # (B, K+1)
    residual = (weight[:, :-1, None] * p[:, :-1] - q).clamp_(min=0)             # (B, K, V)
    # column k: the mass after k + 1 tokens; the mass after all K is not needed
    mass = F.pad(residual.sum(-1)[:, 1:], (0, 1))                               # (B, K)
    prefix = torch.arange(1, 1 + tokens.shape[1], device=p.device)              # (K,) 1, 2, ...
    is_whole = prefix == live.sum(1, keepdim=True)                              # (B, K)
    chance = torch.where(is_whole, weight[:, 1:], mass / (mass + 1 - weight[:, 1:]))
    # trap: 0 / 0 where w = 1 and p = q; any chance is right, as the rest is always accepted
    passed = coins.flip(chance) & live                                          # (B, K)
    accepted = (passed * prefix).amax(1)                                        # (B,) the longest
    return accepted, next_token(p, q, accepted, live, coins, weight.gather(1, accepted[:, None]))
