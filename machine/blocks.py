"""A pass as a function of tensors, which is what can be recorded; and one whose small kernels are
joined.

All blocks of a model compute the same function with different weights. So each kind of sub-layer is
compiled once, and called with the weights of every block.
"""
import copy

import torch
import torch.nn.functional as F
from torch import nn

from kvcache import KVCache
from model import Placement


class Slots(KVCache):
    """Some layers of a cache, {layer: (keys, values)}, (B, Hkv, S, D) each, as inputs of a
    recording. slots (B, T): where it writes."""

    def __init__(self, c, layers, slots):
        self.layers = layers
        rows = torch.arange(len(slots), device=slots.device)[:, None, None]
        heads = torch.arange(c.n_kv_heads, device=slots.device)[:, None]
        self.here = rows, heads, slots[:, None]  # (B, Hkv, T) together

    def write(self, layer, k, v, at, start=0):
        keys, values = self.layers[layer]
        # trap: for `scatter_` Inductor copies the cache in every layer
        keys[self.here] = k
        values[self.here] = v
        return keys[:, :, start : at.end], values[:, :, start : at.end]


def place(width, first, end):
    """The Placement of a block of `width` tokens from the positions first (B, 1) on, in a cache of
    which `end` slots are read. Beyond the last slot there is nothing to write to."""
    steps = torch.arange(width, device=first.device)
    last = torch.arange(end, device=first.device)[-1]
    slots = torch.minimum(first + steps, last)
    return Placement(slots, slots, 0, end)


def pairs(c, sublayers, caches, slots):
    """The Slots of the attentions among the sub-layers. caches: keys and values of each."""
    layers = [i // 2 for i in sublayers if i % 2 == 0]
    keys_and_values = zip(caches[::2], caches[1::2], strict=True)
    return Slots(c, dict(zip(layers, keys_and_values, strict=True)), slots)


def run_piece(sublayers, model, x, first, cos, sin, *caches):
    """`sublayers` of the model for x (B, W, dim) from the positions first (B, 1) on. cos, sin
    (reach, D): the table of angles, whose length is the number of slots that all layers read,
    sliding ones, too; caches: keys and values of each attention."""
    at = place(x.shape[1], first, cos.shape[0])
    cache = pairs(model.c, sublayers, caches, at.slots)
    return model.run(x, at, cache, sublayers, table=(cos, sin))


def pad(x, width):
    """x (B, T, dim) with dead rows after it: (B, width, dim)."""
    if x.shape[1] < width:
        x = F.pad(x, (0, 0, 0, width - x.shape[1]))
    return x.contiguous()


# --- for CUDA graphs: fewer kernels


def piece(model, x, slots, cos, sin, masks, *caches):
    """Sub-layer `model.only`. slots (B, W); masks: of the pass; caches: keys and values of an
    attention."""
    at = Placement(slots, slots, 0, cos.shape[0])
    cache = pairs(model.c, [model.only], caches, slots)
    return model.run(x, at, cache, [model.only], table=(cos, sin), masks=masks)


def shell(model, i):
    """A model for one sub-layer, its number `only`. To a compiler all MLPs look the same, and all
    attentions with a window, and all without one."""
    few = copy.copy(model)
    layer, is_mlp = divmod(i, 2)
    place = 0
    if model.c.window is not None and not is_mlp:   # every second block has a window
        place = layer % 2
    few._modules = {**model._modules, "blocks": nn.ModuleList([model.blocks[layer]] * (place + 1))}
    few.only = 2 * place + is_mlp
    return few


def any_length(dim, *tensors):
    """Tell the compiler that these differ in length, so that one program serves all."""
    for t in tensors:
        torch._dynamo.maybe_mark_dynamic(t, dim)


def joined(compiled, sublayers, model, x, first, cos, sin, *caches):
    """`run_piece`, with each sub-layer by `compiled`, a compiled `piece`: Inductor joins the small
    kernels."""
    any_length(0, cos, sin)
    any_length(2, *caches)
    at = place(x.shape[1], first, cos.shape[0])
    masks = model.build_masks(at, x.shape[1], 0)
    any_length(4, *masks.values())
    pairs_left = iter(zip(caches[::2], caches[1::2], strict=True))
    for i in sublayers:
        mine = () if i % 2 else next(pairs_left)
        x = compiled(shell(model, i), x, at.slots, cos, sin, masks, *mine)
    return x
