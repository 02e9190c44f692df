"""Packed weights: matrices in the order in which this processor reads them best, put there once.

A product with one row of x waits for memory, and one with two to sixteen rows should wait no longer: then a
round of speculative decoding costs what a token costs. On many CPUs `F.linear` is far from that, as it puts a
matrix in order anew for every block of a few tokens. oneDNN, the library behind it, can do so beforehand; a
packed matrix takes as much memory and is rounded as before. Where single rows are faster without, both are
kept, the plain matrix for them and the packed one for blocks.
"""
import statistics
import time

import torch
import torch.nn.functional as F

from checkpoint import put
from machine.quant import Matrix, size

LARGE, HUGE = 64e6, 2e9     # bytes of a model's blocks: worth measuring; too much to be kept twice
MEASURED = 2.5e8            # bytes that are measured with: more than the caches of a processor hold
ROWS = 8                    # of a block, as rounds of speculative decoding have them


class Packed(Matrix):
    """A matrix w (N, K), float32 or bfloat16, on a CPU with oneDNN. keep: use w itself for single rows."""

    def __init__(self, w, keep=False):
        super().__init__()
        w = w.detach().contiguous()
        self.plain = w if keep else None        # no buffer: it takes no part in what the matrix is worth
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

    def detach(self):   # as of a tensor: nothing of it is trained
        return self


def pack(model, keep=False):
    """Pack the matrices of a model's blocks, and its output head, in place. A tied head is a matrix of its
    own from then on, as the embedding stays as it is. Cast a model before this, not after it."""
    for module in list(model.blocks.modules()):
        for name, w in list(module.named_parameters(recurse=False)):
            if w.dim() == 2:
                put(module, name, Packed(w, keep))
    put(model, "head", Packed(model.tok if model.c.tied else model.head, keep))
    return model


@torch.inference_mode()
def gain(model, rows, repeats=7):
    """How many times as fast the products of a block of that many tokens are when packed."""
    some = model.blocks[: max(1, int(MEASURED / size(model.blocks[0])))]
    plain = [w for w in some.parameters() if w.dim() == 2]
    took = []
    for matrices in plain, [Packed(w) for w in plain]:
        seconds = []
        for _ in range(repeats):    # one after another: while texts are written caches hold one form only
            start = time.perf_counter()
            for w, matrix in zip(plain, matrices, strict=True):
                F.linear(w.new_ones(1, rows, w.shape[1]), matrix)
            seconds.append(time.perf_counter() - start)
        took.append(statistics.median(seconds))
    return took[0] / took[1]


def pack_where_it_pays(model):
    """The model; if it is large and on a CPU on which blocks of tokens are faster so, packed."""
    w, weight = model.blocks[0].mlp.down, size(model.blocks)    # in bytes
    if (torch.backends.mkldnn.is_available() and isinstance(w, torch.Tensor) and not w.is_cuda
            and w.dtype in (torch.float32, torch.bfloat16) and weight >= LARGE and gain(model, ROWS) > 1.05):
        keep = gain(model, 1) < 0.95
        if not keep or weight < HUGE:
            return pack(model, keep)
    return model
