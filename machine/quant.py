"""Fewer bits: matrices in int8, int4 or NF4, which replace the model's own.

The model uses its matrices in `F.linear` only, and `F.linear` lets its arguments take over by
`__torch_function__`. So an object that computes its own product can be a matrix, and model.py stays
as it is.

    kind    bits / weight   each row of a matrix is stored as
    int8    8 + 16 / K      K whole numbers from -127 to 127, times one scale in the model's dtype
    int4    5               groups of 32 whole numbers from 0 to 15, with a step and a middle each
    nf4     4.127           blocks of 64 numbers from a table of 16, times the largest magnitude of
                            the block, which is itself stored in 8 bits

When a pass waits for memory, a product that reads fewer bits is faster. Torch has one for int8 and
one for int4, for bfloat16 on a CPU, which are used here. In all other cases the full matrix is
rebuilt for each product, which takes longer than reading it would: there the gain is memory, not
time.

The model in few bits is the best draft that needs no training: it is nearly always right, and it
costs what its bytes cost. `layerskip.SelfDraft` drafts with it.
"""
import copy

import torch
import torch.nn.functional as F
from torch import nn

from checkpoint import put
from control import Costs

SHARE = 32      # weights of int4 that share a step and a middle
BLOCK = 64      # weights that share a magnitude
GROUP = 256     # magnitudes that share a scale
ROWS = 64       # quantised at a time, so that temporary memory stays small


def codebook():
    """The 16 levels of NF4, which normally distributed weights use about equally often (Dettmers et
    al. 2023, QLoRA, section 3 and appendix E). (16,) float32, rising from -1 to 1

    They are quantiles of the normal distribution, 8 of its upper half and 7 of its lower half, and
    0, so that 0 is exact. The probability beyond the outermost is half that of one level of 15 or
    of 16: the mean of 1/30 and 1/32.

    >>> codebook()[:4]
    tensor([-1.0000, -0.6962, -0.5251, -0.3949])
    """
    last = 1 - (1 / 30 + 1 / 32) / 2

    def quantiles(n):
        return torch.special.ndtri(torch.linspace(last, 0.5, n + 1, dtype=torch.float64)[:-1])

    upper = quantiles(8)
    lower = quantiles(7)
    return (torch.cat([-lower, torch.zeros(1), upper.flip(0)]) / upper[0]).float()


def nonzero(scale):
    """Scales to divide by: if all weights are 0, any will do."""
    return scale.masked_fill(scale == 0, 1)


class Matrix(nn.Module):
    """What `F.linear` may get in place of a matrix (N, K) of this dtype."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear and len(args) == 2:
            return args[1].product(args[0])
        return NotImplemented

    def full(self, dtype):
        """The matrix that this replaces, (N, K); None if several processes share it."""

    def product(self, x):
        """x (..., K) -> (..., N)"""
        return F.linear(x, self.full(x.dtype))

    def __getitem__(self, rows):
        """Some rows of a head, for a draft vocabulary: the plain matrix."""
        return self.full(self.dtype)[rows]


class Int8(Matrix):
    """Row n is codes[n] * scale[n]: the largest magnitude of a row becomes 127."""

    def __init__(self, w):
        super().__init__(w.dtype)
        low, high = w.aminmax(dim=1)
        scale = nonzero(torch.maximum(-low, high) / 127)
        wide = torch.promote_types(w.dtype, torch.float32)
        codes = []
        for rows, scales in zip(w.split(ROWS), scale.split(ROWS), strict=True):
            whole = (rows.to(wide) / scales[:, None]).round()
            # trap: a tiny float16 scale is rounded a lot, and codes that do not fit would wrap
            codes.append(whole.clamp(-127, 127).to(torch.int8))
        self.register_buffer("scale", scale)                                    # (N,)
        self.register_buffer("codes", torch.cat(codes))                         # (N, K)

    def product(self, x):
        # trap: torch takes float32, too, but unoptimised: a block of 16 tokens is 100 times slower
        if x.is_cuda or x.dtype != torch.bfloat16:
            return super().product(x)
        rows = x.reshape(-1, x.shape[-1]).contiguous()                          # (B*T, K)
        y = torch._weight_int8pack_mm(rows, self.codes, self.scale.to(x.dtype))
        return y.view(*x.shape[:-1], -1)

    def full(self, dtype):
        return self.codes.to(dtype) * self.scale[:, None].to(dtype)


def pack_nibbles(codes):
    """Numbers from 0 to 15 (N, K), K even, as bytes (N, K / 2): the first of two in the low bits.

    >>> pack_nibbles(torch.tensor([[1, 2, 15, 0]])).tolist()
    [[33, 15]]
    """
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)


def unpack_nibbles(packed):
    """The inverse of `pack_nibbles`."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(1)


class Int4(Matrix):
    """Weight k of a group is middle + (code - 8) * step: its least becomes 0, its largest 15. A
    shorter last group of a row is padded with zeros."""

    def __init__(self, w):
        super().__init__(w.dtype)
        N, self.columns = w.shape
        groups = F.pad(w.float(), (0, -self.columns % SHARE)).unflatten(1, (-1, SHARE))
        low, high = groups.aminmax(dim=2)                                       # (N, groups)
        step = nonzero((high - low) / 15).to(w.dtype)
        middle = (low + 8 * step.float()).to(w.dtype)
        codes = (groups - middle.float()[..., None]) / step.float()[..., None] + 8
        codes = codes.round().clamp(0, 15).to(torch.int32).flatten(1)           # (N, groups * 32)
        # torch's product: a group after the other, (groups, N, 2), and codes in an order of its own
        self.register_buffer("scales", torch.stack([step, middle], -1).transpose(0, 1).contiguous())
        self.fused = self.fits(w)
        if self.fused:
            codes = torch._convert_weight_to_int4pack_for_cpu(codes, 2)
        else:
            codes = pack_nibbles(codes)
        self.register_buffer("codes", codes)                                    # (N, groups * 16)

    @staticmethod
    def fits(w):
        """Whether torch has a product for it."""
        N, K = w.shape
        return w.dtype == torch.bfloat16 and not w.is_cuda and N % 16 == 0 and K % SHARE == 0

    def product(self, x):
        if not self.fused:
            return super().product(x)
        rows = x.reshape(-1, x.shape[-1]).contiguous()                          # (B*T, K)
        y = torch._weight_int4pack_mm_for_cpu(rows, self.codes, SHARE, self.scales)
        return y.view(*x.shape[:-1], -1)

    def full(self, dtype):
        if self.fused:      # what its product makes of the unit vectors
            return self.product(torch.eye(self.columns, dtype=torch.bfloat16)).T.to(dtype)
        codes = unpack_nibbles(self.codes).unflatten(1, (-1, SHARE)).to(dtype)
        step, middle = self.scales.transpose(0, 1).to(dtype)[..., None].unbind(2)
        return (middle + (codes - 8) * step).flatten(1)[:, : self.columns]


class NF4(Matrix):
    """Two levels per byte; each block of 64 along a row is multiplied by its largest magnitude.

    The magnitudes are stored in 8 bits, too ("double quantisation", section 3): minus their mean,
    and with one scale per 256 of them. The paper uses 8-bit floats there, this class whole numbers.
    A shorter last block of a row is padded with zeros.
    """

    def __init__(self, w):
        super().__init__(w.dtype)
        self.columns = w.shape[1]
        levels = codebook().to(w.device)
        self.register_buffer("pairs", torch.cartesian_prod(levels, levels))  # (256, 2) of each byte
        middle = (levels[1:] + levels[:-1]) / 2
        most = []
        codes = []
        for rows in w.split(ROWS):
            b = F.pad(rows.float(), (0, -self.columns % BLOCK))
            b = b.unflatten(1, (-1, BLOCK))                                     # (R, blocks, 64)
            most.append(b.abs().amax(-1))
            relative = b / nonzero(most[-1])[..., None]
            nearest = torch.bucketize(relative, middle, out_int32=True)         # 0 .. 15
            codes.append((16 * nearest[..., ::2] + nearest[..., 1::2]).flatten(1).to(torch.uint8))
        most = torch.cat(most)                                                  # (N, blocks)
        self.register_buffer("codes", torch.cat(codes))                         # (N, blocks * 32)
        self.register_buffer("mean", most.mean())
        groups = (most - self.mean).flatten()
        groups = F.pad(groups, (0, -len(groups) % GROUP)).unflatten(0, (-1, GROUP))  # (groups, 256)
        scale = nonzero(groups.abs().amax(1, keepdim=True) / 127)
        self.register_buffer("scale", scale)                                    # (groups, 1)
        self.register_buffer("most", (groups / scale).round().to(torch.int8))   # (groups, 256)

    def full(self, dtype):
        N = self.codes.shape[0]
        blocks = self.codes.shape[1] * 2 // BLOCK
        most = (self.most * self.scale + self.mean).flatten()[: N * blocks].view(N, blocks, 1)
        levels = F.embedding(self.codes.int(), self.pairs).view(N, blocks, BLOCK)
        return (levels * most).flatten(1)[:, : self.columns].to(dtype)          # (N, K)


KINDS = {"int8": Int8, "int4": Int4, "nf4": NF4}


def quantise(model, kind="int8", head=None):
    """A copy of a model with the matrices of its blocks in few bits. Embeddings, norms and head are
    shared with the model, not copied. head: the kind of the output head, if it shall be in few
    bits, too. A quantised model is quantised again from its present values. Cast a model before
    this, not after it, or the scales are cast, too."""
    while hasattr(model, "model"):      # what stands in for it
        model = model.model
    twin = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    for module in list(twin.blocks.modules()):
        for name, w in [*module.named_parameters(recurse=False), *module.named_children()]:
            if isinstance(w, Matrix):
                w = w.full(model.tok.dtype)
            if isinstance(w, torch.Tensor) and w.dim() == 2:
                put(module, name, KINDS[kind](w.detach()))
    if head:
        w = twin.tok if twin.head is None else twin.head
        if isinstance(w, Matrix):
            w = w.full(model.tok.dtype)
        if w is None:   # several processes share it: each quantises its own rows
            put(twin.head, "own", KINDS[head](twin.head.own.detach()))
        else:
            put(twin, "head", KINDS[head](w.detach()))
    return twin


def rebuild(twin):
    """Put the full matrices in place of those in few bits: no product has to rebuild its own."""
    for module in list(twin.modules()):
        for name, w in list(module.named_children()):
            if isinstance(w, Matrix):
                put(module, name, nn.Parameter(w.full(w.dtype), requires_grad=False))
    return twin


def reads_int4(model):
    """Whether torch has a product of int4 for all matrices of the model's blocks, so that a step in
    int4 takes less than half of the model's time."""
    matrices = [w for w in model.blocks.parameters() if w.dim() == 2]
    return bool(matrices) and all(map(Int4.fits, matrices))


def size(module):
    """How many bytes a module or a tensor takes."""
    if isinstance(module, torch.Tensor):
        return module.nbytes
    tensors = [*module.parameters(), *module.buffers()]
    return sum(t.nbytes for t in tensors)


def byte_costs(model):
    """Costs counted in the bytes that a pass reads, for passes that wait for memory."""
    c = model.c
    parts = tuple(size(part) for b in model.blocks for part in (b.attn, b.mlp))
    head = size(model.tok if model.head is None else model.head)
    slot = 2 * c.n_kv_heads * c.head_dim * model.attention_dtype().itemsize     # a key and a value
    return Costs(parts, head, slot=slot, window=c.window)
