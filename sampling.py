"""Logits -> distribution -> token. One `to_probs` serves target, draft and plain decoding.

The one thing to remember: every random decision about a text is a flip or a choice. Both spend
uniforms, random numbers in [0, 1), of a `Coins` object. Replace it to replay a run, or to enumerate
all outcomes.
"""
import torch

from model import Refused


def to_probs(logits, temperature=0.0, top_k=None, top_p=None, min_p=None):
    """Logits (..., V) -> probabilities (..., V), in float32 or wider.

    The order is fixed: temperature, top-k, top-p (Holtzman et al. 2020), min-p (Nguyen et al.
    2024). Exactly min(top_k, V) tokens stay; top-p keeps the smallest set whose mass reaches it, at
    least one token; then tokens below min_p times the most likely one go. Ties are broken towards
    the lower id. Temperature 0 is an exact one-hot. Raises ValueError for a setting out of range.

    >>> logits = torch.tensor([2.0, 1.0, 1.0, 0.0])
    >>> to_probs(logits)                                    # greedy is sampling from a one-hot
    tensor([1., 0., 0., 0.])
    >>> to_probs(logits, temperature=1.0)
    tensor([0.5344, 0.1966, 0.1966, 0.0723])
    >>> to_probs(logits, temperature=1.0, top_k=2)      # of the two equal logits the lower id stays
    tensor([0.7311, 0.2689, 0.0000, 0.0000])
    """
    check(temperature, top_k, top_p, min_p)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature == 0:
        return one_hot(logits.argmax(-1), logits)
    # trap: subtract the maximum first, or a small temperature overflows; below 1e-38 it would be 0
    logits = (logits - logits.amax(-1, keepdim=True)) / max(temperature, 1e-30)
    p = logits.softmax(-1)
    if top_k is None and top_p in (None, 1) and min_p is None:
        return p
    ids = survivors(logits, p, top_k, top_p, min_p)                             # (C,)
    order = logits.index_select(-1, ids).sort(dim=-1, descending=True, stable=True)
    ids = ids.take(order.indices[..., :top_k])                                  # (..., k)
    p = p.gather(-1, ids)                                                       # (..., k), falling
    if top_k is not None:
        p = scaled(p)
    if top_p not in (None, 1):  # trap: with top_p = 1 a rounded sum could still cut the tail
        p = p.masked_fill(p.cumsum(-1) - p >= top_p, 0)
    if min_p is not None:
        p = p.masked_fill(p < min_p * p[..., :1], 0)
    return torch.zeros_like(logits).scatter_(-1, ids, scaled(p))


def survivors(logits, p, top_k, top_p, min_p):
    """The ids (C,), rising, of all tokens that the cuts may leave in some row of p (..., V), the
    softmax of the logits. Only these need to be sorted: to sort a whole vocabulary takes half as
    long as a pass of a small model."""
    V = p.shape[-1]
    if top_k is not None:
        stays = logits >= logits.topk(min(top_k, V)).values[..., -1:]
    elif min_p is not None:
        stays = p >= min_p * p.amax(-1, keepdim=True)
    else:   # all tokens below this weigh less than half of 1 - top_p, and are not needed
        stays = p >= (1 - top_p) / (2 * V)
    return indices(stays)


def indices(mask):
    """The ids (C,), rising, of what is True in some row of mask (..., V). If there is none, as
    beside NaN, and on a GPU, which would have to be waited for, these are all ids."""
    V = mask.shape[-1]
    ids = mask.nonzero()[:, -1] if not mask.is_cuda else ()
    if not len(ids):
        return torch.arange(V, device=mask.device)
    return ids if mask.numel() == V else ids.unique()


def scaled(p):
    """p (..., n) divided by its sum."""
    # trap: `sum` splits a long row among threads, and its order depends on n; a running sum has one
    # order, so that a row has the same bits alone and among others
    return p / p.cumsum(-1)[..., -1:]


def one_hot(ids, like):
    """The distributions (..., V) that are sure of ids (...), in the dtype and V of `like`
    (..., V)."""
    shape = *ids.shape, like.shape[-1]
    return like.new_zeros(shape).scatter_(-1, ids[..., None], 1.0)


def raw_probs(logits):
    """The model's own distribution, without temperature or cuts, in float32 or wider."""
    return logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def check(temperature=0.0, top_k=None, top_p=None, min_p=None):
    """Raise ValueError for a sampling setting out of range."""
    if not 0 <= temperature < float("inf"):
        raise Refused(f"temperature must be 0 (greedy) or a positive number, got {temperature}")
    if top_k is not None and not (isinstance(top_k, int) and top_k >= 1):
        raise Refused(f"top_k must be a whole number, at least 1, got {top_k}")
    for name, value in (("top_p", top_p), ("min_p", min_p)):
        if value is not None and not 0 < value <= 1:
            raise Refused(f"{name} must lie in (0, 1], got {value}")


# --- randomness


def signed(n):
    """The int64 with the same 64 bits as an unsigned number. (torch has no unsigned arithmetic.)"""
    return (n + 2**63) % 2**64 - 2**63


def shift(z, bits):
    """z >> bits, shifting in zeros. (In torch, >> shifts in copies of the sign bit.)"""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def uniforms(seed, first, count, device=None):
    """Numbers first .. first + count - 1 of the stream of a seed, in [0, 1). (count,) float64

    This is SplitMix64 (Steele, Lea & Flood 2014), ten lines in any language. Number i is the top 53
    bits of mix(seed + (i + 1) * 0x9E3779B97F4A7C15), times 2^-53, with arithmetic modulo 2^64.

    >>> uniforms(0, 0, 2).tolist()
    [0.8833108082136426, 0.43152799704850997]
    """
    return uniform(signed(seed), torch.arange(first, first + count, device=device))


def uniform(seed, i):
    """Number i of the stream of a seed, for int64 tensors of any shape, in [0, 1). float64"""
    z = (i + 1) * signed(0x9E3779B97F4A7C15) + seed     # integers: exact everywhere
    z ^= shift(z, 30)
    z *= signed(0xBF58476D1CE4E5B9)
    z ^= shift(z, 27)
    z *= signed(0x94D049BB133111EB)
    z ^= shift(z, 31)
    return shift(z, 11).double() * 2.0**-53


class Coins:
    """The uniforms of one seed, spent one after the other. The stream is the same on every device
    and in every port, and it does not depend on how many are computed at once.

    The order of spending is part of the interface, since ports and golden traces depend on it. Each
    drafted token that is drawn spends one uniform per row; copied tokens spend none. In a tree, a
    chain is drawn first, then the siblings of its tokens, rank by rank. Verifying K drafted tokens
    spends K per row, even after a rejection. Then one per row chooses the next token.
    `version` counts the changes to this order.
    """
    version = 1

    def __init__(self, seed=0):
        self.seed = seed
        self.index = 0                                      # number of the next uniform
        self.pool = torch.empty(0, dtype=torch.float64)     # the next uniforms, computed ahead

    def take(self, count, device):
        """The next `count` uniforms. (count,)"""
        if len(self.pool) < count or self.pool.device != device:
            self.pool = uniforms(self.seed, self.index, max(4096, count), device)
        taken = self.pool[:count]
        self.pool = self.pool[count:]
        self.index += count
        return taken

    def flip(self, prob):
        """True with probability min(1, prob), for prob of any shape; never for NaN."""
        return self.take(prob.numel(), prob.device).view(prob.shape) < prob

    def settle(self, p, position, offset=0):
        """The distributions (B, T, V) that tokens are drawn from. Of these coins it is p itself. A
        `machine.exact.Race` returns the one-hot of each position's winner. Each row of p describes
        the token after the one at position + offset (B or 1, T).
        """
        return p

    def choose(self, weights):
        """Indices drawn in proportion to weights (..., V), which need not sum to 1. One uniform is
        mapped to each by the inverse of the cumulative distribution over rising ids."""
        cdf = weights.cumsum(-1, dtype=torch.float64)                           # (..., V)
        total = cdf[..., -1:]                                                   # (..., 1)
        u = self.take(total.numel(), cdf.device).view(total.shape)
        # `right` skips weights of zero; the clamp is for weights all zero or NaN, which callers
        # report
        ids = torch.searchsorted(cdf, u * total, right=True)
        return ids.clamp_(max=cdf.shape[-1] - 1)[..., 0]
