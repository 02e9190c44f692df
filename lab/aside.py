"""Passes that leave no trace in the cache, and masks that no tree can say."""
import math

import torch

from model import Placement


class ScratchTail:
    """A cache for one pass over a block of which it keeps the first T tokens. The others see what
    it holds before the slot `end`, and each other; what they write is forgotten. Their slots begin
    at `end`."""

    def __init__(self, cache, T, end):
        self.cache = cache
        self.T = T
        self.end = end

    def write(self, layer, k, v, at, start=0):
        T = self.T
        if T > 0:   # trap: in training nothing may be written to what gradients flow through
            self.cache.write(layer, k[:, :, :T], v[:, :, :T], at._replace(slots=at.slots[:, :T]))
        keys, values = (t[:, :, start : self.end] for t in self.cache.layers[layer])
        return torch.cat([keys, k[:, :, T:]], 2), torch.cat([values, v[:, :, T:]], 2)


def aside(model, cache, x, positions, sublayers):
    """Run `sublayers` for x (B, T, dim), each token on its own, as the first one of a draft. It
    reads what the cache holds before its position (B, T), and itself. (B, T, dim) It only scores
    drafts, so it need not have the bits of the target's own passes."""
    T = x.shape[1]
    S = cache.k.shape[3]
    slots = torch.arange(S, S + T, device=x.device)[None]
    own = torch.eye(T, dtype=torch.bool, device=x.device)[None]
    at = Placement(positions, slots, 0, S + T, own)
    return model.bare.run(x, at, ScratchTail(cache, 0, S), sublayers)


def masks(model, own, keys, seen):
    """The `masks` of `Transformer.run` for tokens at the positions `own` (B or 1, T) that read the
    slots `seen` (B or 1, T, S), in which the keys stand at the positions `keys` (B or 1, S). The
    Placement must have first = 0."""
    window = model.c.window
    near = seen
    if window is not None:
        near = seen & (own[..., None] - keys[:, None] < window)
    zeros = torch.zeros((), dtype=model.attention_dtype(), device=seen.device)
    return {size: zeros.masked_fill(~what[:, None, None], -math.inf)
            for size, what in ((None, seen), (window, near))}
