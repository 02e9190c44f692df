"""Verification, which keeps the text exact. Drafted tokens are tested, and the next token is drawn
from the residual. p is the target's distribution, q the draft's.

The one thing to remember: where nothing was drafted, q = 0 and max(p - q, 0) is simply p. One
formula therefore covers the bonus token, drafts of different lengths and plain decoding.
"""
import torch
import torch.nn.functional as F

from sampling import one_hot


def verify(p, q, tokens, coins, length=None):
    """Speculative sampling (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023, Theorem 1).

    p (B, K+1, V), q (B, K, V) or None for copied drafts, tokens (B, K), length (B,) or None for K
    everywhere. Returns how many were accepted (B,) and the token after them (B,).

    The text is distributed as if sampled from p. Token t is written as a drafted token with
    probability q(t) min(1, p(t) / q(t)) = min(p(t), q(t)). A drafted token is rejected with
    probability S, the sum of max(p - q, 0). Its replacement is drawn from max(p - q, 0) / S, so t
    is written as a replacement with probability max(p(t) - q(t), 0). Together that is p(t).

    >>> from sampling import Coins
    >>> p = torch.tensor([[[0.9, 0.1], [0.2, 0.8]]])    # for the first token, and the one after it
    >>> q = torch.tensor([[[0.5, 0.5]]])
    >>> accepted, token = verify(p, q, torch.tensor([[0]]), Coins(0))   # 0.9 / 0.5 > 1: accepted
    >>> accepted.tolist(), token.tolist()               # and a bonus token drawn from (0.2, 0.8)
    ([1], [1])
    """
    if tokens.shape[1] == 0:    # nothing was drafted
        return tokens.new_zeros(len(p)), coins.choose(p[:, 0])
    q, ratio, live = against(p, q, tokens, length)
    # Accept token k with probability min(1, p / q). All K are tested at once; `cumprod` ends at the
    # first rejection, and the tests after it do not count.
    passed = coins.flip(ratio) & live                                           # (B, K)
    accepted = passed.cumprod(1).sum(1)                                         # (B,)
    return accepted, next_token(p, q, accepted, live, coins)


def verify_block(p, q, tokens, coins, length=None):
    """Block verification (Sun et al., ICLR 2025, arXiv 2403.10444, Algorithm 2), which is `verify`
    for the draft as a whole. The text has the same distribution, and from two drafted tokens on,
    more are accepted on average.

    It takes, returns and spends the same as `verify`. A token with p > q makes up for an
    earlier one with p < q:

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


# --- the frame of both


def check_vocabulary(p, q):
    """Raise ValueError if a draft's q has not as many tokens as the target's p."""
    if q is not None and q.shape[-1] != p.shape[-1]:
        raise ValueError(f"the draft has a vocabulary of {q.shape[-1]}, "
                         f"the target of {p.shape[-1]}")


def against(p, q, tokens, length=None):
    """Returns (q, ratio, live), the inputs of both verifiers. q (B, K, V) is one-hot if the tokens
    were copied. ratio (B, K) is p / q at each of them. live (B, K) tells which of the K tokens are
    the row's draft."""
    check_vocabulary(p, q)
    if q is None:
        q = one_hot(tokens, p)
    drafted = tokens[..., None]                                                 # (B, K, 1)
    ratio = p[:, :-1].gather(2, drafted) / q.gather(2, drafted)                 # (B, K, 1)
    live = torch.ones_like(tokens, dtype=torch.bool)
    if length is not None:
        live = live.cumsum(1) <= length[:, None]
    return q, ratio[..., 0], live


def next_token(p, q, accepted, live, coins, weight=1.0):
    """The token after the accepted ones (B,). After a rejection it comes from the residual
    max(p - q, 0), and otherwise from p, because q = 0 there. A `weight` (B, 1) multiplies the
    residual's p."""
    row = torch.arange(len(p), device=p.device)
    rejected = accepted < live.sum(1)                                           # (B,)
    p = p[row, accepted]                                                        # (B, V)
    q = q[row, accepted.clamp(max=q.shape[1] - 1)]                              # (B, V)
    residual = weight * p
    residual = (residual - q).clamp_(min=0)
    # trap: where p = q up to rounding, the residual of a rejection can be empty; then p is right
    some = rejected[:, None] & (residual.sum(-1, keepdim=True) > 0)
    return coins.choose(torch.where(some, residual, p))
