"""Verification, which keeps the text exact. Drafted tokens are tested, and the next token is drawn
from the residual. p is the target's distribution, q the draft's.

The one thing to remember: where nothing was drafted, q = 0 and max(p - q, 0) is simply p. One
formula therefore covers the bonus token, drafts of different lengths and plain decoding.
"""
import torch

from model import Refused
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


# --- the parts of `verify`, which `methods.block` shares


def check_vocabulary(p, q):
    """Raise ValueError if a draft's q has not as many tokens as the target's p."""
    if q is not None and q.shape[-1] != p.shape[-1]:
        raise Refused(f"the draft has a vocabulary of {q.shape[-1]}, "
                      f"the target of {p.shape[-1]}")


def against(p, q, tokens, length=None):
    """Returns (q, ratio, live), by which a draft is judged. q (B, K, V) is one-hot if the tokens
    were copied. ratio (B, K) is p / q at each of them. live (B, K) is False for padding after a
    row's draft."""
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
