"""A pass as a function of tensors, so that it can be recorded, and the same with its small kernels
joined.

All blocks of a model compute the same function with different weights. So each kind of sub-layer is
compiled once, and called with the weights of every block.
"""
import copy
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from kvcache import KVCache
from model import Placement


class Slots(KVCache):
    """Some layers of a cache as inputs of a recording. `layers` maps each to its keys and values,
    (B, Hkv, S, D) each, and slots (B, T) are the ones it writes to."""

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


def widen(at, dead, end):
    """The Placement with `dead` dead tokens after the block, in a cache of `end` slots. Tokens
    beyond the last slot write to it."""
    if dead == 0:
        return at._replace(first=0, end=end, same=False)
    steps = torch.arange(1, dead + 1, device=at.slots.device)

    def follow(t):
        return torch.cat([t, (t[:, -1:] + steps).clamp(max=end - 1)], 1)

    slots = follow(at.slots)
    positions = slots if at.positions is at.slots else follow(at.positions)
    tree = at.tree
    if tree is not None:
        # trap: a token that saw nothing would become NaN, which spreads through the cache
        itself = torch.eye(dead, dtype=torch.bool, device=tree.device).expand(len(tree), -1, -1)
        tree = F.pad(tree, (0, dead, 0, dead))
        tree[:, -dead:, -dead:] = itself
    return Placement(positions, slots, 0, end, tree)


def pad(x, width):
    """x (B, T, dim) with dead rows after it. (B, width, dim)"""
    if x.shape[1] < width:
        x = F.pad(x, (0, 0, 0, width - x.shape[1]))
    return x.contiguous()


class Piece(NamedTuple):
    """Some sub-layers of a pass, as a function of tensors. It returns x after each of the `traced`
    ones and after the last, (N, B, W, dim). Masks are made inside, and so are the slots of a chain,
    because starting a kernel takes longer than running it, and a recording starts all at once.
    """
    sublayers: tuple
    traced: tuple
    chain: bool     # the tokens stand one after another, slot = position; else they are a tree

    def placed(self, at, B, W):
        """The tensors of a call that differ between two blocks. For a chain this is its first slot
        (B, 1). For a tree these are slots and positions (B, W), and who sees whom (B, W, W)."""
        if self.chain:
            return [at.slots[:, :1].expand(B, 1).contiguous()]
        each = at.slots.expand(B, W), at.positions.expand(B, W), at.tree.expand(B, W, W)
        return [t.contiguous() for t in each]

    def unpack(self, model, W, tensors):
        """(Placement, masks, (cos, sin), cache) of a block of W tokens. `tensors` are the ones from
        `placed`, then the angles of all slots (1 or 2, S, D), then keys and values of each
        attention. All layers read S slots, even sliding ones."""
        if self.chain:
            first, cos, sin, *caches = tensors
            steps = torch.arange(W, device=first.device)
            end = cos.shape[1]
            slots = (first + steps).clamp(max=end - 1)          # dead tokens follow the block
            at = Placement(slots, slots, 0, end)
        else:
            slots, positions, tree, cos, sin, *caches = tensors
            at = Placement(positions, slots, 0, cos.shape[1], tree)
        layers = [i // 2 for i in self.sublayers if i % 2 == 0]
        keys_and_values = zip(caches[::2], caches[1::2], strict=True)
        cache = Slots(model.c, dict(zip(layers, keys_and_values, strict=True)), slots)
        return at, model.build_masks(at, 0), (cos, sin), cache

    def __call__(self, model, x, *tensors):
        at, masks, table, cache = self.unpack(model, x.shape[1], tensors)
        trace = dict.fromkeys(self.traced)
        y = model.run(x, at, cache, self.sublayers, trace, table, masks)
        return torch.stack([*trace.values(), y])

    def joined(self, compiled, model, x, *tensors):
        """Like `__call__`, but each sub-layer runs through `compiled`, a compiled `single`, whose
        small kernels Inductor joins."""
        at, masks, table, cache = self.unpack(model, x.shape[1], tensors)
        states = {}
        for i in self.sublayers:
            layer, is_mlp = divmod(i, 2)
            window = model.c.window_of(layer)
            mine = () if is_mlp else cache.layers[layer]
            mask = masks[window]
            turns = [t[-1:] if window else t[:1] for t in table]
            any_length(1, *turns)
            any_length(2, *mine)
            any_length(4, mask)
            x = compiled(shell(model, i), x, at.positions, at.slots, mask, *turns, *mine)
            states[i] = x
        return torch.stack([*(states[i] for i in self.traced), x])

    def program(self, compiled, model, x, *tensors):
        """Like `__call__`, which is `compiled` as one."""
        cos, sin, *caches = tensors[1 if self.chain else 3 :]
        any_length(1, cos, sin)
        any_length(2, *caches)
        return compiled(self, model, x, *tensors)


# --- for CUDA graphs: fewer kernels


def single(model, x, positions, slots, mask, cos, sin, *cache):
    """x after the sub-layer `model.only` (B, W, dim)."""
    at = Placement(positions, slots, 0, mask.shape[-1])
    cache = Slots(model.c, {model.only // 2: cache}, slots)
    masks = dict.fromkeys((None, model.c.window), mask)
    return model.run(x, at, cache, [model.only], None, (cos, sin), masks)


def shell(model, i):
    """A model for one sub-layer, its number `only`. To a compiler all MLPs look the same, and so do
    all attentions, because `single` is given the mask."""
    few = copy.copy(model)
    layer, is_mlp = divmod(i, 2)
    few._modules = {**model._modules, "blocks": nn.ModuleList([model.blocks[layer]])}
    few.only = is_mlp
    return few


def any_length(dim, *tensors):
    """Tell the compiler that these tensors vary in length, so that one program serves all."""
    for t in tensors:
        torch._dynamo.maybe_mark_dynamic(t, dim)


# trap: the pattern matcher takes masked grouped attention for another pattern, and the result is
# wrong
NO_PATTERNS = {"pattern_matcher": False}


@cache
def compiled(f):
    """f, compiled once for all models, and again for each shape."""
    # trap: after eight compilations, the default, it gives up silently
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(f, options=NO_PATTERNS)
