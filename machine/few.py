"""A stand-in for the model, which computes a pass over few rows on a CPU in one call.

A pass of a small model is hundreds of tiny operations, and starting them takes longer than
computing them. `pass.cpp` has all of them as loops. So a block of a few tokens takes as long as
reading the weights once, and a row of logits has the same bits in every block. Blocks of many
tokens, such as prompts, go to PyTorch where its products of many rows are faster.
"""
from ctypes import byref, c_int64
from functools import cache

import torch
from torch import nn

from kvcache import KVCache
from machine import rows
from machine.files import note
from machine.quant import Integers, Matrix
from machine.rows import FLOATS, PACKED, BlockWeights, Model, Pass, Weight, describe
from machine.tolerance import distance, tolerance
from model import Placement, StandIn, visible

WIDE = 512      # numbers of a head that a pass has room for
NORMS = "attn_norm", "attn_post", "mlp_norm", "mlp_post", "attn.q_norm", "attn.k_norm"
MATRICES = "attn.wqkv", "attn.wo", "mlp.gate_up", "mlp.down"


class FewRows(StandIn):
    """Stands in for a Transformer that is not being trained. Do not move, cast or train the model
    later, because the loops keep addresses."""
    few = 0     # how many rows the loops compute; passes over more of them are PyTorch's

    def __init__(self, model):
        super().__init__(model)
        self.alive = []     # what the structs point to
        self.struct = None  # the Model, if it can be computed in C++
        self.output = None  # its head
        fits = self.tok.dtype in FLOATS and not self.tok.is_cuda and self.c.head_dim <= WIDE
        self.lib = rows.library() if fits else None     # compiled the first time
        if self.lib:
            self.describe()
        if self.struct:
            self.few = self.limit()
            self.check()

    def describe(self):
        """Describe the model to C++, unless a matrix is of a kind that the loops do not know."""
        c = self.c
        blocks = [self.block(i) for i in range(c.n_layers)]
        self.output = describe(self.tok if self.model.head is None else self.model.head)
        if None in (*blocks, self.output):
            return
        hidden = max(block.gate_up.n // 2 for block in blocks)
        self.struct = Model(
            (BlockWeights * len(blocks))(*blocks), c.dim, c.n_heads, c.n_kv_heads, c.head_dim,
            hidden, c.act == "gelu", c.norm_eps, self.blocks[0].attn.scale, c.attn_softcap or 0.0)
        self.final = self.floats(self.norm)

    @torch.inference_mode()
    def check(self):
        """Compare a pass over three tokens with the model's own. If it differs, it is not used."""
        subs = [2 * i + kind for i, b in enumerate(self.blocks)
                for kind, name in enumerate(("attn", "mlp")) if name in b._modules]
        g = torch.Generator().manual_seed(0)
        x = torch.randn(1, 3, self.c.dim, generator=g).to(self.tok.dtype)
        at = Placement.span(0, 3)
        caches = [KVCache(self.c, 1, 4, self.attention_dtype()) for _ in range(2)]
        want = self.model.run(x, at, caches[0], subs)
        off = distance(self.run(x, at, caches[1], subs), want)
        # trap: where x is rounded, a last bit can move a number to its neighbour
        rough = any(isinstance(part, Integers) and part.rounds for part in self.model.modules())
        if not off <= tolerance(torch.bfloat16 if rough else x.dtype, len(subs)):
            self.struct = None
            note("rows", f"passes stay eager, because pass.cpp is off by {off:.2g}")

    def block(self, i):
        """The BlockWeights of block i, or None if a matrix is of a kind that the loops do not know.
        The blocks of trained heads may lack some parts."""
        parts = dict(self.blocks[i].named_modules())
        tensors = dict(self.blocks[i].named_parameters())
        tensors |= {name: part for name, part in parts.items() if isinstance(part, Matrix)}
        there = [describe(tensors[name]) if name in tensors else Weight() for name in MATRICES]
        if None in there:
            return None
        bias = None
        if "attn.bias" in tensors:
            bias = self.keep(tensors["attn.bias"].detach().float())
        norms = [self.floats(parts.get(name)) for name in NORMS]
        return BlockWeights(*norms, bias, *there, self.c.window_of(i) or 0)

    def floats(self, norm):
        """The address of a norm's factors in float32, or None if there is no norm."""
        if norm is None or isinstance(norm, nn.Identity):
            return None
        return self.keep(norm.offset + norm.weight.detach().float())

    def keep(self, t):
        self.alive.append(t.contiguous())
        return self.alive[-1].data_ptr()

    def limit(self):
        """How many rows the loops compute."""
        few = rows.few(self.tok.dtype)
        if any(isinstance(part, Integers) for part in self.model.modules()):
            return max(few, PACKED)
        return few

    @torch.inference_mode()
    def run(self, x, at, cache=None, sublayers=None, trace=None):
        """`Transformer.run`."""
        B, T, dim = x.shape
        if self.struct is None or cache is None or B * T > self.few:
            return self.model.run(x, at, cache, sublayers, trace)
        if sublayers is None:
            sublayers = range(2 * self.c.n_layers)
        if not len(sublayers):
            return x
        trace = {} if trace is None else trace
        order, places, taps = listed(tuple(sublayers), tuple(trace))
        S = cache.k.shape[3]
        positions, slots = (t.expand(B, T).contiguous() for t in (at.positions, at.slots))
        masks = None
        end = S
        if at.tree is not None or at.slots is not at.positions:
            masks = self.masks(at, B)
            end = at.end
        cos, sin = self.model.angles(at.end)
        local = cos.stride(0) * (len(cos) - 1)
        x = x.contiguous()
        out = x.new_empty(len(taps), B, T, dim)
        strides = cache.k.stride()
        p = Pass(
            order, places, len(sublayers), B, T, end, torch.get_num_threads(),
            positions.data_ptr(), slots.data_ptr(), masks.data_ptr() if masks is not None else None,
            cos.data_ptr(), sin.data_ptr(), local, cache.k.data_ptr(), cache.v.data_ptr(),
            *strides[:3], x.data_ptr(), out.data_ptr())
        self.lib.run_pass(byref(self.struct), byref(p), c_int64(FLOATS[x.dtype]))
        for i, y in zip(taps, out, strict=True):
            if i in trace:
                trace[i] = y
        return out[-1]

    def masks(self, at, B):
        """Who sees whom in a tree, without and with a window, as (1 or 2, B, T, end) bytes."""
        positions, slots = torch.broadcast_tensors(at.positions, at.slots)
        windows = [None] if self.c.window is None else [None, self.c.window]
        seen = [visible(positions, slots, at.end, at.tree, window) for window in windows]
        return torch.stack([m.expand(B, -1, -1) for m in seen]).to(torch.uint8)

    @torch.inference_mode()
    def unembed(self, x, only=None):
        """`Transformer.unembed`."""
        weight = self.output if only is None else describe(only)
        if self.struct is None or weight is None or x.shape[:2].numel() > self.few:
            return self.model.unembed(x, only)
        cap = self.c.final_softcap or 0.0
        return rows.call(self.lib, x, weight, x.dtype, self.final, self.c.norm_eps, cap)

    @torch.inference_mode()
    def linear(self, x, w):
        """`Transformer.linear`."""
        weight = describe(w)
        if self.struct is None or weight is None or x.numel() > self.few * x.shape[-1]:
            return self.model.linear(x, w)
        return rows.call(self.lib, x, weight, x.dtype)

    def alongside(self, model):
        return FewRows(model)

    def replays(self):
        return self.struct is not None


@cache
def listed(sublayers, traced):
    """Two arrays and a list. The arrays hold the sub-layers, and the place of each among the
    outputs (or -1). The list holds the sub-layers whose outputs are returned, the last one at the
    end."""
    taps = [i for i in sublayers if i in traced or i == sublayers[-1]]
    places = [taps.index(i) if i in taps else -1 for i in sublayers]
    array = c_int64 * len(sublayers)
    return array(*sublayers), array(*places), taps
