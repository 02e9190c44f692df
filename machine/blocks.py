"""A pass as a function of tensors, which is what can be recorded; and one whose small kernels are
joined.

All blocks of a model compute the same function with different weights. So each kind of sub-layer is
compiled once, and called with the weights of every block.
"""
import copy
from functools import cache

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


def widen(at, dead, end):
    """The Placement with as many dead tokens after the block, in a cache of which `end` slots are
    read. Beyond the last slot there is nothing to write to."""
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


def stack_masks(model, at):
    """What `Transformer.build_masks` returns as one tensor: a mask for
    layers without a window, and one for those with a window if there are any. (1 or 2, B or 1, 1,
    1, T, S)"""
    return torch.stack([*model.build_masks(at, 0).values()])


class Bands:
    """What `stack_masks` returns for a chain that stands in the same slots in all rows. Whether a
    token sees a key depends only on how far apart they are, so that its mask is part of one line,
    and that of the next token begins an entry earlier:

        line             0  0  0  0  0  -  -  -  -      (-: -inf) for 5 slots
        token in slot 2        0  0  0  -  -
        token in slot 3     0  0  0  0  -

    With a window the line begins with -inf, too. Cutting takes a fifth of the time of making masks.
    """

    def __init__(self, model):
        self.model = model
        self.lines = None       # (1 or 2, 2 * reach): entry `reach` is that of a token for itself

    def __call__(self, first, T, end):
        """The masks of the tokens in the slots first .. first+T-1 for `end` slots. (1 or 2, 1, 1,
        1, T, end)"""
        reach = max(first + T, end)
        if self.lines is None or self.lines.shape[1] < 2 * reach:
            self.draw(2 * reach)
        start = self.lines.shape[1] // 2 - first
        rows = self.lines.unfold(1, end, 1)[:, start - T + 1 : start + 1].flip(1)
        return rows[:, None, None, None]

    def draw(self, reach):
        """Draw the lines for masks of up to `reach` slots."""
        model = self.model
        ahead = torch.arange(-reach, reach, device=model.tok.device)    # how far a key is ahead
        zeros = torch.zeros((), dtype=model.attention_dtype(), device=ahead.device)
        lines = []
        for window in dict.fromkeys((None, model.c.window)):
            hidden = ahead > 0
            if window is not None:
                hidden = hidden | (ahead <= -window)
            lines.append(zeros.masked_fill(hidden.expand(2 * reach), -torch.inf))
        self.lines = torch.stack(lines)


def pairs(c, sublayers, caches, slots):
    """The Slots of the attentions among the sub-layers. caches: keys and values of each."""
    layers = [i // 2 for i in sublayers if i % 2 == 0]
    keys_and_values = zip(caches[::2], caches[1::2], strict=True)
    return Slots(c, dict(zip(layers, keys_and_values, strict=True)), slots)


def ends(sublayers):
    """The sub-layers of a piece whose outputs it returns: all MLPs, and the last."""
    return [i for i in sublayers if i % 2 or i == sublayers[-1]]


def run_piece(sublayers, model, x, positions, slots, masks, cos, sin, *caches):
    """`sublayers` of the model for x (B, W, dim), whose tokens stand at positions and slots (B, W).
    masks: see `stack_masks`; all layers read as many slots as they are long, sliding ones, too.
    cos, sin (S, D): the table of angles. caches: keys and values of each attention. Returns x after
    each of the `ends` (N, B, W, dim)."""
    at = Placement(positions, slots, 0, masks.shape[-1])
    cache = pairs(model.c, sublayers, caches, slots)
    masks = dict(zip((None, model.c.window), masks, strict=False))
    trace = dict.fromkeys(ends(sublayers))
    model.run(x, at, cache, sublayers, trace, (cos, sin), masks)
    return torch.stack([*trace.values()])


def pad(x, width):
    """x (B, T, dim) with dead rows after it: (B, width, dim)."""
    if x.shape[1] < width:
        x = F.pad(x, (0, 0, 0, width - x.shape[1]))
    return x.contiguous()


# --- for CUDA graphs: fewer kernels


def piece(model, *tensors):
    """`run_piece` for sub-layer `model.only`: (B, W, dim)."""
    return run_piece([model.only], model, *tensors)[0]


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


def joined(compiled, sublayers, model, x, positions, slots, masks, cos, sin, *caches):
    """`run_piece`, with each sub-layer by `compiled`, a compiled `piece`: Inductor joins the small
    kernels."""
    any_length(0, cos, sin)
    any_length(2, *caches)
    any_length(5, masks)
    pairs_left = iter(zip(caches[::2], caches[1::2], strict=True))
    states = {}
    for i in sublayers:
        mine = () if i % 2 else next(pairs_left)
        x = compiled(shell(model, i), x, positions, slots, masks, cos, sin, *mine)
        states[i] = x
    return torch.stack([states[i] for i in ends(sublayers)])


# trap: the pattern matcher takes masked grouped attention for another pattern, and the result is
# wrong
NO_PATTERNS = {"pattern_matcher": False}


@cache
def compiled_piece():
    """One for all models, compiled anew for each shape."""
    # trap: after eight, which is usual, it gives up silently
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(piece, options=NO_PATTERNS)
