"""Quantised matrices in int8 or int4, which replace the model's own.

The model uses its matrices in `F.linear` only, and `F.linear` lets its arguments take over by
`__torch_function__`. So an object that computes its own product can be a matrix, and model.py stays
as it is.

    kind    bits / weight   each row of a matrix is stored as
    int8    8 + 32 / K      K whole numbers from -127 to 127, times one scale
    int4    5               groups of 32 whole numbers from 0 to 15, with a step and an offset each

When a pass waits for memory, a product that reads fewer bits is faster. machine/bits.cpp has one
for few rows on a CPU. In all other cases the full matrix is rebuilt for each product, which takes
longer than reading it would. There the gain is memory, not time.

The quantised model is the best draft that needs no training. It is nearly always right, and it
takes as long as reading its bytes. `layerskip.SelfDraft` drafts with it.
"""
import copy

import torch
import torch.nn.functional as F
from torch import nn

from checkpoint import put
from machine import rows
from machine.rows import FLOATS, PACKED, Weight, describe
from model import Placement

SHARE = 32      # weights of a tile in each of its rows; in int4 they share a step and an offset
OUTPUTS = 16    # rows of a tile, which machine/bits.cpp computes side by side
SURE = 0.9      # of the most likely tokens, which a head in int4 must find for a draft
ROWS = 64       # quantised at a time, so that temporary memory stays small


def nonzero(scale):
    """Scales to divide by. If all weights are 0, any scale will do."""
    return scale.masked_fill(scale == 0, 1)


class Matrix(nn.Module):
    """An object that `F.linear` accepts in place of an (N, K) matrix of this dtype. Few rows on a
    CPU are multiplied with what it stores (machine/rows.cpp), all others with the full matrix."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear and len(args) == 2:
            return args[1].product(args[0])
        return NotImplemented

    def describe(self):
        """The matrix for machine/rows.cpp; None if it has no product for this kind."""

    def full(self, dtype):
        """The matrix that this replaces, (N, K); None if several processes share it."""

    def product(self, x):
        """x (..., K) -> (..., N)"""
        few = x.numel() <= PACKED * x.shape[-1] and not x.is_cuda and x.dtype in FLOATS
        weight = self.describe() if few and rows.library() else None
        if weight is None:
            return F.linear(x, self.full(x.dtype))
        return rows.call(rows.library(), x, weight, x.dtype)

    def __getitem__(self, ids):
        """Some rows of a head, for a draft vocabulary, as a plain matrix."""
        return self.full(self.dtype)[ids]


class Looped(Matrix):
    """A plain matrix, whose product with few rows machine/rows.cpp computes."""

    def __init__(self, w):
        super().__init__(w.dtype)
        self.register_buffer("w", w)

    def describe(self):
        return describe(self.w)

    def full(self, dtype):
        return self.w.to(dtype)


class Integers(Matrix):
    """A matrix of whole numbers in tiles of 16 outputs x 32 weights, as machine/bits.cpp reads it.

    With `rounds`, few rows of x are rounded as well, to int8 with a scale for each 32 numbers. Then
    a product takes as long as reading the matrix. A draft may do so, because only the target
    decides what is written. Without it, x stays as it is.
    """
    rounds = False

    def __init__(self, w):
        super().__init__(w.dtype)
        self.rows, self.columns = w.shape
        parts = [self.pack(*self.encode(some)) for some in w.split(ROWS)]
        for name, part in zip(self.names, zip(*parts, strict=True), strict=True):
            self.register_buffer(name, torch.cat(part))

    def __getitem__(self, ids):
        """Some rows of a head, in the same bits."""
        some = copy.copy(self)
        some.rows = len(ids)
        numbers = [part[ids] for part in self.numbers()]
        some._buffers = dict(zip(self.names, self.pack(*numbers), strict=True))
        return some

    def detach(self):   # as tensors have it; nothing here is trained
        return self

    def describe(self):
        form = "in bfloat16" if self.dtype == torch.bfloat16 else "as it is"
        kind = rows.INTEGERS[self.bits, "rounded" if self.rounds else form]
        scale = self._buffers.get("scale")
        return Weight(self.tiles.data_ptr(), None if scale is None else scale.data_ptr(),
                      self.rows, self.columns, kind)


def tiled(t):
    """t (N, K, ...) -> (tiles of 16 rows, tiles of 32 columns, 16, 32, ...), padded with zeros.

    >>> tiled(torch.ones(20, 40)).shape
    torch.Size([2, 2, 16, 32])
    """
    N, K = t.shape
    t = F.pad(t, (0, -K % SHARE, 0, -N % OUTPUTS))
    return t.unflatten(1, (-1, SHARE)).unflatten(0, (-1, OUTPUTS)).transpose(1, 2)


def untiled(tiles, N, K):
    """The inverse of `tiled`. (N, K)"""
    return tiles.transpose(1, 2).flatten(2, 3).flatten(0, 1)[:N, :K]


class Int8(Integers):
    """Each row is multiplied by one scale, and its largest magnitude becomes 127."""
    bits = 8
    names = "tiles", "scale"

    def encode(self, w):
        """Some rows (R, K) -> codes (R, K) and scales (R, 1)."""
        w = w.float()       # half precision is too coarse for a scale
        scale = nonzero(w.abs().amax(1, keepdim=True) / 127)
        return (w / scale).round().to(torch.int8), scale

    def pack(self, codes, scale):
        lines = tiled(codes).unflatten(3, (8, 4)).transpose(2, 3)       # (.., .., 8, 16, 4)
        scale = F.pad(scale, (0, 0, 0, -len(scale) % OUTPUTS))
        return lines.flatten(2), scale

    def numbers(self):
        lines = self.tiles.unflatten(2, (8, OUTPUTS, 4)).transpose(2, 3)
        return untiled(lines.flatten(3), self.rows, self.columns), self.scale[: self.rows]

    def full(self, dtype):
        codes, scale = self.numbers()
        return (codes * scale).to(dtype)


class Int4(Integers):
    """Weight k of a group of 32 is offset + code * step. The smallest weight becomes 0, and the
    largest 15. A shorter last group of a row is padded with zeros."""
    bits = 4
    names = ("tiles",)

    def encode(self, w):
        """Some rows (R, K) -> codes (R, K), and steps and offsets (R, K / 32)."""
        groups = F.pad(w.float(), (0, -w.shape[1] % SHARE)).unflatten(1, (-1, SHARE))
        low, high = groups.aminmax(dim=2)                                       # (R, K / 32)
        step = nonzero((high - low) / 15).to(torch.bfloat16)
        offset = low.to(torch.bfloat16)
        codes = (groups - offset.float()[..., None]) / step.float()[..., None]
        codes = codes.round().clamp(0, 15).to(torch.uint8).flatten(1)
        return codes[:, : self.columns], step, offset

    def pack(self, codes, step, offset):
        """Low halves of bytes hold the first 16 codes of a group, and high ones the others."""
        low, high = tiled(codes).unflatten(3, (2, 4, 4)).unbind(3)              # (.., .., 16, 4, 4)
        lines = (low | high << 4).transpose(2, 3).flatten(2)                    # (.., .., 256)
        pairs = []
        for part in (step, offset):
            part = F.pad(part, (0, 0, 0, -len(part) % OUTPUTS)).unflatten(0, (-1, OUTPUTS))
            pairs.append(part.mT.contiguous().view(torch.uint8))                # (.., .., 32)
        return [torch.cat([lines, *pairs], 2)]

    def numbers(self):
        lines, *pairs = self.tiles.split([256, 32, 32], 2)
        lines = lines.unflatten(2, (4, OUTPUTS, 4)).transpose(2, 3)             # (.., .., 16, 4, 4)
        codes = torch.stack([lines & 15, lines >> 4], 3).flatten(3)
        pairs = [part.contiguous().view(torch.bfloat16).mT.flatten(0, 1) for part in pairs]
        return untiled(codes, self.rows, self.columns), *(part[: self.rows] for part in pairs)

    def full(self, dtype):
        codes, step, offset = self.numbers()
        step, offset = (part.float().repeat_interleave(SHARE, 1)[:, : self.columns]
                        for part in (step, offset))
        return (offset + codes * step).to(dtype)


KINDS = {"int8": Int8, "int4": Int4}


def quantise(model, kind="int8", head=None, rounds=False):
    """A copy of a model with quantised matrices in its blocks. Embeddings, norms and head are
    shared with the model, not copied. `head` is the kind of the output head, if it is quantised as
    well. `rounds` is for a copy that only drafts (see `Integers`). A quantised model is quantised
    again from its present values. Cast a model before this, because a later cast would include the
    scales."""
    model = model.bare
    twin = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})

    def replace(module, name, w, kind):
        if isinstance(w, Matrix):
            full = w.full(model.tok.dtype)
            if full is None:    # each process quantises its own part
                return replace(w, "own", w.own, kind)
            w = full
        put(module, name, KINDS[kind](w.detach()))

    for b in twin.blocks:
        replace(b.attn, "wqkv", b.attn.wqkv, kind)
        replace(b.attn, "wo", b.attn.wo, kind)
        replace(b.mlp, "gate_up", b.mlp.gate_up, kind)
        replace(b.mlp, "down", b.mlp.down, kind)
    if head:
        replace(twin, "head", twin.tok if twin.head is None else twin.head, head)
    for module in twin.modules():
        if isinstance(module, Integers):
            module.rounds = rounds
    return twin


@torch.inference_mode()
def draft_copy(model, kind, ids):
    """A quantised copy of a model that drafts. In int4 some heads lose what the blocks keep
    (SmolLM2's names another token at every seventh place), and others lose nothing. So a head is in
    int8 unless in int4 it names the model's own most likely token after nearly each of these ids
    (T,), which should be some text."""
    twin = quantise(model, kind, kind, rounds=True)
    if kind == "int4":
        model = model.bare
        tokens = torch.tensor([ids], device=model.tok.device)
        at = Placement.span(0, len(ids), model.tok.device)
        x = model.run(model.embed(tokens), at)
        same = twin.unembed(x).argmax(-1) == model.unembed(x).argmax(-1)
        if same.float().mean() < SURE:
            twin = quantise(model, kind, "int8", rounds=True)
    return twin


def quantise_head(model):
    """Replace the output head of a model by one in int8, in place. An embedding stays as it is. In
    int4 a head may move the distributions further than all other matrices together
    (lab/BENCHMARKS.md)."""
    put(model, "head", Int8(model.tok if model.head is None else model.head))
