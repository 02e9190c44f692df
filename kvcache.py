"""A KV cache that stores no fill level: slot = position in a text, and a block of tokens sees the slots
before its own first slot, and itself.

The one thing to remember: rolling back is starting the next block earlier.

    slot              3   4   5   6
    this round        D   d1  d2  d3     d1 is accepted, d2 refused, and t is chosen in its place
    next round                t   e1     the block starts at t and overwrites what d2 and d3 left

So there is no truncation, no padding mask and no realignment, and the rows of a batch advance at different
rates for free: a dead slot is hidden by every mask until it is overwritten. The rule on which it all rests: a
layer that runs a block must already hold every slot before it.
"""
import torch


class KVCache:
    def __init__(self, c, batch, slots, dtype, device=None):
        # trap: zeros, not empty. A dead slot is masked to weight 0, but 0 * NaN is NaN.
        self.k = torch.zeros(c.n_layers, batch, c.n_kv_heads, slots, c.head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)                                   # both (L, B, Hkv, S, D)
        self.layers = list(zip(self.k, self.v, strict=True))                # views: a write indexes only once

    def write(self, layer, k, v, slots, end, recent=None):
        """Store k, v (B, Hkv, T, D) at `slots`, a slice or (B, T), and return what the block may read: the
        slots before `end`, (B, Hkv, end, D), or only the last `recent` of them."""
        keys, values = self.layers[layer]
        if isinstance(slots, slice):
            keys[:, :, slots], values[:, :, slots] = k, v
        else:
            at = slots[:, None, :, None].expand_as(k)
            keys.scatter_(2, at, k)
            values.scatter_(2, at, v)
        read = slice(0 if recent is None else max(0, end - recent), end)
        return keys[:, :, read], values[:, :, read]

    def move(self, src, dst):
        """Copy the slots src (B, A) to dst (B, A), in all layers at once. The two may overlap."""
        for t in (self.k, self.v):
            shape = *t.shape[:3], src.shape[1], t.shape[4]                      # (L, B, Hkv, A, D)
            source, target = (slots[None, :, None, :, None].expand(shape) for slots in (src, dst))
            t.scatter_(3, target, t.gather(3, source))


class Beside:
    """A cache for a block of which only the first T tokens are kept: the others foresee, see each other from
    the slot `end` on, for this one pass, and what they write goes nowhere."""

    def __init__(self, cache, T, end):
        self.cache, self.T, self.end = cache, T, end

    def write(self, layer, k, v, slots, end, recent):
        T = self.T
        if T > 0:   # trap: in training nothing may be written to what gradients flow through
            self.cache.write(layer, k[:, :, :T], v[:, :, :T], slots[:, :T], self.end)
        keys, values = (t[:, :, end - recent : self.end] for t in self.cache.layers[layer])
        return torch.cat([keys, k[:, :, T:]], 2), torch.cat([values, v[:, :, T:]], 2)
