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
        return one_hot(logits.max(-1).indices, logits)
    # trap: subtract the maximum first, or a small temperature overflows; below 1e-38 it would be 0
    logits = (logits - logits.amax(-1, keepdim=True)) / max(temperature, 1e-30)
    if top_k is None and top_p in (None, 1) and min_p is None:
        return logits.softmax(-1)
    order = logits.sort(dim=-1, descending=True, stable=True)
    ids = order.indices[..., :top_k]                                            # (..., k)
    p = order.values[..., :top_k].softmax(-1)                                   # (..., k), falling
    if top_p not in (None, 1):  # trap: with top_p = 1 a rounded sum could still cut the tail
        p = p.masked_fill(p.cumsum(-1) - p >= top_p, 0)
    if min_p is not None:
        p = p.masked_fill(p < min_p * p[..., :1], 0)
    return torch.zeros_like(logits).scatter_(-1, ids, p / p.sum(-1, keepdim=True))


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
        """Turn p (B, T, V) into what tokens are drawn from. Plain coins return it unchanged. A
        `Race` settles which token wins each position, and returns the winner's one-hot. Each row of
        p describes the token after the one at position + offset (B or 1, T)."""
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


def row_seeds(seed, rows):
    """A seed for each row of a batch. The first row has `seed` itself, so it writes what it would
    write alone, and row b has number b of the seed's stream, times 2^53. (A `Race` of the first row
    begins at number V, so the streams have nothing in common.)

    >>> row_seeds(7, 3)
    [7, 151215513962380, 8113330931062309]
    """
    return [seed, *(int(u * 2**53) for u in uniforms(seed, 1, rows - 1).tolist())]


class Race(Coins):
    """Coins that belong to positions. A token depends on the seed, its position and p, and on
    nothing else.

    The tokens of the vocabulary race for a position. Token v arrives after e_v / p_v, where e_v is
    drawn from the exponential distribution Exp(1) by (seed, position, v). The first to arrive is
    written, which is v with probability p_v. A draft runs the same race with its q. So p and q
    become the one-hots of their winners, a drafted token is accepted if both name the same, and no
    drafter can change a token. They agree with probability

        sum over v of 1 / sum over w of max(p_w / p_v, q_w / q_v)

    which is at least (1 - TV) / (1 + TV) and at most 1 - TV, the rate of `verify` for one token,
    where TV is half the sum of |p - q| (Daliri, Musco and Suresh 2024, arXiv 2408.07978,
    drafter-invariant decoding).

    `seed` is a list with one seed for each row of a batch, as `row_seeds` makes it. If it is one
    number, all rows run the same races, and equal prompts get equal texts.

    >>> p = torch.tensor([[[0.5, 0.3, 0.2]]])
    >>> [Race(seed).settle(p, torch.tensor([[7]])).argmax().item() for seed in (0, 1)]
    [2, 1]
    """

    def __init__(self, seed=0):
        seeds = [seed] if isinstance(seed, int) else seed
        super().__init__(seeds[0])
        self.seeds = torch.tensor([signed(one) for one in seeds])

    def settle(self, p, position, offset=0):
        V = p.shape[-1]
        first = (position[..., None] + offset + 1) * V
        number = first + torch.arange(V, device=p.device)                       # (B or 1, T, V)
        u = uniform(self.seeds.to(p.device)[:, None, None], number)
        arrives = u.neg_().log1p_().neg_() / p                                  # (B, T, V)
        # trap: where both p and u are 0 it is NaN, which argmin takes for the least
        return one_hot(arrives.nan_to_num_(nan=torch.inf).argmin(-1), p)
