"""Packed weights: matrices reordered once into the layout that this processor reads best.

A product with one row of x waits for memory, and one with two to sixteen rows should take no
longer: then a round of speculative decoding costs as much as a token. On many CPUs `F.linear` is
far from that, because it reorders the matrix for every block of a few tokens. oneDNN, the library
behind it, can do that beforehand; a packed matrix takes as much memory, with the same rounding. If
single rows are faster unpacked, both forms are kept: the plain matrix for single rows, the packed
one for blocks.
"""
import statistics
import time

import torch
import torch.nn.functional as F

from checkpoint import put
from machine.quant import Matrix, size

LARGE = 64e6                # bytes of a model's blocks from which on it is worth measuring
HUGE = 2e9                  # bytes that are too much to keep twice
MEASURED = 2.5e8            # bytes to measure with: more than a processor's caches hold
ROWS = 8                    # rows of x in a typical round of speculative decoding


class Packed(Matrix):
    """A matrix w (N, K), float32 or bfloat16, on a CPU with oneDNN. keep: w itself for single
    rows."""

    def __init__(self, w, keep=False):
        super().__init__(w.dtype)
        w = w.detach().contiguous()
        self.plain = w if keep else None        # no buffer, so that `size` does not count it
        self.register_buffer("packed", torch.ops.mkldnn._reorder_linear_weight(w, ROWS))

    def product(self, x):
        if self.plain is not None and x.shape[:-1].numel() == 1:
            return F.linear(x, self.plain)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")

    def full(self, dtype):
        return self.packed.to_dense().to(dtype)

    def __getitem__(self, rows):
        """Some rows of a head, for a draft vocabulary: packed, too."""
        return Packed(self.packed.to_dense()[rows], self.plain is not None)

    def detach(self):   # like a tensor's; nothing here is trained
        return self


def packs(dtype):
    """Whether oneDNN packs matrices of this type here. bfloat16 needs a processor with AVX-512."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32


def multiplies(dtype):
    """Whether this processor has units that multiply packed matrices of this type at full speed."""
    if dtype == torch.bfloat16:
        return packs(dtype) and torch.cpu._is_avx512_bf16_supported()
    return packs(dtype)


def pack(model, keep=False):
    """Pack the matrices of a model's blocks, and its output head, in place. A tied head becomes a
    matrix of its own, as the embedding stays unpacked. Cast a model before this, not after it."""
    for module in list(model.blocks.modules()):
        for name, w in list(module.named_parameters(recurse=False)):
            if w.dim() == 2:
                put(module, name, Packed(w, keep))
    put(model, "head", Packed(model.tok if model.c.tied else model.head, keep))
    return model


@torch.inference_mode()
def gain(model, rows, repeats=7):
    """The speed-up from packing, for products with this many rows of x."""
    some = model.blocks[: max(1, int(MEASURED / size(model.blocks[0])))]
    plain = [w for w in some.parameters() if w.dim() == 2]
    took = []
    for matrices in plain, [Packed(w) for w in plain]:
        seconds = []
        for _ in range(repeats):    # one form after the other: in a run, too, caches hold only one
            start = time.perf_counter()
            for w, matrix in zip(plain, matrices, strict=True):
                F.linear(w.new_ones(1, rows, w.shape[1]), matrix)
            seconds.append(time.perf_counter() - start)
        took.append(statistics.median(seconds))
    return took[0] / took[1]


def pack_where_it_pays(model):
    """The model, packed if it is large and on a CPU where that makes blocks of tokens faster."""
    w = model.blocks[0].mlp.down
    weight = size(model.blocks)     # in bytes
    can = isinstance(w, torch.Tensor) and not w.is_cuda and packs(w.dtype)
    if not can or weight < LARGE or gain(model, ROWS) <= 1.05:
        return model
    keep = gain(model, 1) < 0.95
    if keep and weight >= HUGE:
        return model
    return pack(model, keep)
