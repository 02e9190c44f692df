"""A KV cache that stores no length, because slot = position in a text. A block of tokens sees
itself and the slots before its own first slot.

The one thing to remember: to roll back, start the next block earlier.

    slot              3   4   5   6
    this round        D   d1  d2  d3     D is known; d1 is accepted, and t replaces the rejected d2
    next round                t   e1     the block starts at t and overwrites what d2 and d3 left

So there is no truncation, no padding mask and no realignment. The rows of a batch advance at
different rates for free, because a slot after the text is dead, and every mask hides it until it is
overwritten. One invariant makes this work: before a layer runs a block, its cache holds every
earlier slot.
"""
from functools import partial

import torch

from model import Placement


class KVCache:
    def __init__(self, c, batch, slots, dtype, device=None):
        # trap: zeros, not empty. A dead slot is masked to weight 0, but 0 * NaN is NaN.
        shape = c.n_layers, batch, c.n_kv_heads, slots, c.head_dim
        k = torch.zeros(shape, dtype=dtype, device=device)
        self.use(k, torch.zeros_like(k))

    def use(self, k, v):
        """Keep keys and values in this memory, (L, B, Hkv, S, D) each."""
        self.k = k
        self.v = v
        self.layers = list(zip(k, v, strict=True))      # views: a write indexes once

    def write(self, layer, k, v, at, start=0):
        """Store k, v (B, Hkv, T, D) in the slots of their tokens, `at` a Placement, and return what
        these tokens may read, which is the slots start .. at.end-1, (B, Hkv, S, D)."""
        keys, values = self.layers[layer]
        T = k.shape[2]
        if at.same:
            here = slice(at.first, at.first + T)
            keys[:, :, here] = k
            values[:, :, here] = v
        else:
            slots = at.slots[:, None, :, None].expand_as(k)
            keys.scatter_(2, slots, k)
            values.scatter_(2, slots, v)
        return keys[:, :, start : at.end], values[:, :, start : at.end]

    def move(self, src, dst):
        """Copy the slots src (B, A) to dst (B, A), in all layers at once. The two may overlap."""
        for t in (self.k, self.v):
            shape = *t.shape[:3], src.shape[1], t.shape[4]                      # (L, B, Hkv, A, D)
            source = src[None, :, None, :, None].expand(shape)
            target = dst[None, :, None, :, None].expand(shape)
            t.scatter_(3, target, t.gather(3, source))


def new_cache(model, batch, slots):
    """A cache for this number of texts and slots. A model may hand out one again that is no longer
    in use, with whatever it holds, or one with more slots."""
    make = partial(
        KVCache, model.c, batch, slots, model.attention_dtype(), model.tok.device)
    return model.cache(make, batch, slots)


def pick(x, index):
    """The vectors of x (B, T, dim) at `index` (B, N) in each row. (B, N, dim)"""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))


def prefill(model, tokens, cache, trace=None):
    """Run the model over tokens (B, T) into slots 0 .. T-1, `model.chunk` tokens at a time. Returns
    x (B, T, dim). `Transformer.run` explains trace."""
    xs = []
    traces = []
    for i, part in enumerate(tokens.split(model.chunk, 1)):
        first = i * model.chunk
        at = Placement.span(first, first + part.shape[1], tokens.device)
        traces.append(dict.fromkeys(trace or ()))
        xs.append(model.run(model.embed(part), at, cache, None, traces[-1]))
    for tap in trace or ():
        trace[tap] = torch.cat([part[tap] for part in traces], 1)
    return torch.cat(xs, 1)
