"""A KV cache with no length: slot = position, and a block of tokens sees the slots before its own first slot,
and itself.

The one thing to remember: rolling back is starting the next block earlier. There is no truncate, no padding
mask and no realignment, and the rows of a batch advance at different rates for free, because dead slots are
outside every mask and are overwritten before anybody reads them. The rule behind it: a layer that runs a
block must already hold every slot before it.
"""
import torch


class KVCache:
    def __init__(self, c, batch, slots, dtype, device=None):
        # trap: zeros, not empty. A dead slot is masked to weight 0, but 0 * NaN is NaN.
        self.k = torch.zeros(c.n_layers, batch, c.n_kv_heads, slots, c.head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)                                   # both (L, B, Hkv, S, D)
        self.layers = list(zip(self.k, self.v, strict=True))                # views: one less indexing a write

    def write(self, layer, k, v, slots, end, recent=None):
        """Store k, v (B, Hkv, T, D) at `slots`, a slice or (B, T), and return what the block may read: the
        slots before `end`, (B, Hkv, end, D), or with `recent` only the last that many of them."""
        keys, values = self.layers[layer]
        if isinstance(slots, slice):
            keys[:, :, slots], values[:, :, slots] = k, v
        else:
            at = slots[:, None, :, None].expand_as(k)
            keys.scatter_(2, at, k)
            values.scatter_(2, at, v)
        read = slice(0 if recent is None else max(0, end - recent), end)
        return keys[:, :, read], values[:, :, read]

    def fork(self, rows=1):
        """A copy, each row `rows` times in a row, for scoring passes that must not touch committed slots."""
        twin = object.__new__(KVCache)
        twin.k, twin.v = self.k.repeat_interleave(rows, 1), self.v.repeat_interleave(rows, 1)
        twin.layers = list(zip(twin.k, twin.v, strict=True))
        return twin
