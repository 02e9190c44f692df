"""A pass as a function of tensors, which is what can be recorded; and one whose small kernels are joined.

The one thing to remember: all blocks of a model compute the same function of other weights. So it is
compiled once, for the first of them, and called with the weights of each.
"""
import copy

import torch
from torch import nn

from kvcache import KVCache
from model import Placement


class Slots(KVCache):
    """Some layers of a cache, {layer: (keys, values)}, (B, Hkv, S, D) each, as inputs of a recording.
    slots (B, T): where it writes."""

    def __init__(self, c, layers, slots):
        self.layers = layers
        rows = torch.arange(len(slots), device=slots.device)[:, None, None]
        heads = torch.arange(c.n_kv_heads, device=slots.device)[:, None]
        self.here = rows, heads, slots[:, None]                                # (B, Hkv, T) together

    def write(self, layer, k, v, at, start=0):
        keys, values = self.layers[layer]
        # trap: for `scatter_` Inductor copies the cache in every layer
        keys[self.here] = k
        values[self.here] = v
        return keys[:, :, start : at.end], values[:, :, start : at.end]


def place(width, first, end):
    """The Placement of a block of `width` tokens from the positions first (B, 1) on, in a cache of which
    `end` slots are read. Beyond the last slot there is nothing to write to."""
    steps = torch.arange(width, device=first.device)
    last = torch.arange(end, device=first.device)[-1]
    slots = torch.minimum(first + steps, last)
    return Placement(slots, slots, 0, end)


def pairs(c, sublayers, caches, slots):
    """The Slots of the attentions among the sub-layers. caches: keys and values of each."""
    layers = (i // 2 for i in sublayers if i % 2 == 0)
    return Slots(c, dict(zip(layers, zip(caches[::2], caches[1::2], strict=True), strict=True)), slots)


def block(sublayers, model, x, first, cos, sin, *caches):
    """`sublayers` of the model for x (B, W, dim) from the positions first (B, 1) on. cos, sin
    (reach, D): the table of angles, whose length is the number of slots that all layers read,
    sliding ones, too; caches: keys and values of each attention."""
    at = place(x.shape[1], first, cos.shape[0])
    return model.run(x, at, pairs(model.c, sublayers, caches, at.slots), sublayers, table=(cos, sin))


# --- for CUDA graphs: fewer kernels


def piece(model, x, slots, cos, sin, masks, *caches):
    """All sub-layers of a model of few blocks. slots (B, W); masks: those of the pass."""
    sublayers = range(len(caches))      # an attention and an MLP for each pair of keys and values
    at = Placement(slots, slots, 0, cos.shape[0])
    cache = pairs(model.c, sublayers, caches, slots)
    return model.run(x, at, cache, sublayers, table=(cos, sin), masks=masks)


def any_length(dim, *tensors):
    """Tell the compiler that these differ in length, so that one program serves all."""
    for t in tensors:
        torch._dynamo.maybe_mark_dynamic(t, dim)


def shell(model, first, count):
    """A model of some of its blocks."""
    few = copy.copy(model)
    few._modules = {**model._modules, "blocks": nn.ModuleList(list(model.blocks)[first : first + count])}
    return few


def joined(compiled, sublayers, model, x, first, cos, sin, *caches):
    """`block`, with each whole block of the model by `compiled`, a compiled `piece`. Inductor joins the small
    kernels between the products: on an H100 a pass of the shape of Llama 3.2 1B takes 1.34 ms, not 1.86."""
    c, caches = model.c, list(caches)
    any_length(0, cos, sin)
    any_length(2, *caches)
    count = 1 if c.window is None else 2    # trap: with a window every second block differs
    at = place(x.shape[1], first, cos.shape[0])
    masks = model.masks(at, x.shape[1], 0)
    any_length(4, *masks.values())
    sublayers = tuple(sublayers)
    while sublayers:
        start = sublayers[0]
        whole = tuple(range(start, start + 2 * count))
        if start % (2 * count) == 0 and sublayers[: 2 * count] == whole:
            theirs = caches[: 2 * count]
            few = shell(model, start // 2, count)
            x = compiled(few, x, at.slots, cos, sin, masks, *theirs)
            sublayers = sublayers[2 * count :]
        else:       # part of a block, such as what a skipped layer leaves
            theirs = caches[: 2 * (start % 2 == 0)]
            cache = pairs(c, [start], theirs, at.slots)
            x = model.run(x, at, cache, [start], table=(cos, sin), masks=masks)
            sublayers = sublayers[1:]
        caches = caches[len(theirs) :]
    return x
