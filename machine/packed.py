"""Packed weights: matrices in the order in which this processor reads them best, put there once.

A product with one row of x waits for memory, and one with two to sixteen rows should wait no longer: then a
round of speculative decoding costs what a token costs. On many CPUs `F.linear` is far from that, as it puts a
matrix in order anew for every block of a few tokens. oneDNN, the library behind it, can do so beforehand; a
packed matrix takes as much memory and is rounded as before.
"""
import statistics
import time

import torch
import torch.nn.functional as F

from checkpoint import put
from machine.quant import Matrix, size

LARGE = 64e6        # bytes of a model's blocks, from which on packing is worth a second of measuring
ROWS = 1, 4, 8      # of the blocks that decide whether it pays


class Packed(Matrix):
    """A matrix (N, K), float32 or bfloat16, on a CPU with oneDNN."""

    def __init__(self, w):
        super().__init__()
        self.register_buffer("packed", torch.ops.mkldnn._reorder_linear_weight(w.detach().contiguous()))

    def product(self, x):
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")

    def full(self, dtype):
        return self.packed.to_dense().to(dtype)

    def __getitem__(self, rows):
        """Some rows of a head, for a draft vocabulary: packed, too."""
        return Packed(self.packed.to_dense()[rows])

    def detach(self):
        return self


def pack(model):
    """Pack the matrices of a model's blocks, and its output head, in place. A tied head is a matrix of its
    own from then on, as the embedding stays as it is. Cast a model before this, not after it."""
    for module in list(model.blocks.modules()):
        for name, w in list(module.named_parameters(recurse=False)):
            if w.dim() == 2:
                put(module, name, Packed(w))
    put(model, "head", Packed(model.tok if model.c.tied else model.head))
    return model


@torch.inference_mode()
def gain(model, repeats=5):
    """How many times as fast the products of a block are when packed, over blocks of ROWS tokens."""
    plain = [w for w in model.blocks[0].parameters() if w.dim() == 2]
    forms, seconds = {"plain": plain, "packed": [Packed(w) for w in plain]}, {"plain": [], "packed": []}
    for _ in range(repeats):
        for form, matrices in forms.items():
            start = time.perf_counter()
            for rows in ROWS:
                for w, matrix in zip(plain, matrices, strict=True):
                    F.linear(w.new_ones(1, rows, w.shape[1]), matrix)
            seconds[form].append(time.perf_counter() - start)
    return statistics.median(seconds["plain"]) / statistics.median(seconds["packed"])


def pack_where_it_pays(model):
    """The model; if it is large and on a CPU on which that is faster, packed."""
    w = model.blocks[0].mlp.down
    fits = (torch.backends.mkldnn.is_available() and isinstance(w, torch.Tensor) and not w.is_cuda
            and w.dtype in (torch.float32, torch.bfloat16) and size(model.blocks) >= LARGE)
    return pack(model) if fits and gain(model) > 1.05 else model
