"""Logits -> distribution -> token. One `to_probs` serves target, draft and plain decoding.

The one thing to remember: every random decision of the library is a flip or a choice, and both spend uniforms
of a `Coins` object. Replace it and a run can be replayed, or every outcome of it enumerated.
"""
import torch


def to_probs(logits, temperature=0.0, top_k=None, top_p=None, min_p=None):
    """Logits (..., V) -> probabilities (..., V), in float32 or wider.

    The order is fixed: temperature, top-k, top-p (Holtzman et al. 2020), min-p (Nguyen et al. 2024). Exactly
    min(top_k, V) tokens stay; top-p keeps the smallest set whose mass reaches it, at least one token; then
    tokens below min_p times the most likely one go. Ties are broken towards the lower id. Temperature 0 is an
    exact one-hot. Raises ValueError for a setting out of range.
    """
    check(temperature, top_k, top_p, min_p)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature == 0:  # greedy is sampling from a one-hot: no second code path
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    # trap: subtract the maximum first, or a small temperature overflows; 1e-30, because float32 ends at 1e-38
    logits = (logits - logits.amax(-1, keepdim=True)) / max(temperature, 1e-30)
    if top_k is None and top_p in (None, 1) and min_p is None:
        return logits.softmax(-1)
    order = logits.sort(dim=-1, descending=True, stable=True)
    p, ids = order.values[..., :top_k].softmax(-1), order.indices[..., :top_k]  # (..., k), falling
    if top_p not in (None, 1):  # trap: with top_p = 1 a rounded running sum could still cut the tail
        p = p.masked_fill(p.cumsum(-1) - p >= top_p, 0)
    if min_p is not None:
        p = p.masked_fill(p < min_p * p[..., :1], 0)
    return torch.zeros_like(logits).scatter_(-1, ids, p / p.sum(-1, keepdim=True))


def check(temperature=0.0, top_k=None, top_p=None, min_p=None):
    """Raise ValueError, in one line, for a sampling setting out of range."""
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be 0 (greedy) or a positive number, got {temperature}")
    if top_k is not None and not (isinstance(top_k, int) and top_k >= 1):
        raise ValueError(f"top_k must be a whole number, at least 1, got {top_k}")
    for name, value in (("top_p", top_p), ("min_p", min_p)):
        if value is not None and not 0 < value <= 1:
            raise ValueError(f"{name} must lie in (0, 1], got {value}")


class Coins:
    """A stream of uniforms in [0, 1): float64 from a CPU generator, whatever the device, so that one seed
    means one stream everywhere. They are bought wholesale, and the stream does not depend on the size of a
    purchase.

    The order in which the library spends them is part of its interface (ports and golden traces depend on
    it): per drafted step one a row; then K flips a row, also after a rejection; then one choice a row.
    """

    def __init__(self, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.pool = torch.empty(0, dtype=torch.float64)

    def take(self, count, device):
        """The next `count` uniforms. (count,)"""
        if len(self.pool) < count or self.pool.device != device:
            fresh = torch.rand(max(4096, count), generator=self.generator, dtype=torch.float64)
            if device.type == "cuda":
                fresh = fresh.pin_memory().to(device, non_blocking=True)    # no waiting for the GPU
            self.pool = torch.cat([self.pool.to(device), fresh])
        taken, self.pool = self.pool[:count], self.pool[count:]
        return taken

    def flip(self, prob):
        """True with the given probability, of any shape. What is above 1 is certain; NaN never happens."""
        return self.take(prob.numel(), prob.device).view(prob.shape) < prob

    def choose(self, weights):
        """Indices drawn in proportion to weights (..., V), which need not sum to 1, by inverse CDF over
        rising id."""
        cdf = weights.double().cumsum(-1)                                   # (..., V)
        u = self.take(cdf[..., 0].numel(), cdf.device).view(*cdf.shape[:-1], 1)
        # `right` steps over weights of zero; the clamp is for weights all zero or NaN, which callers refuse
        return torch.searchsorted(cdf, u * cdf[..., -1:], right=True).clamp_(max=cdf.shape[-1] - 1)[..., 0]
