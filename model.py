"""The whole forward pass of Llama, Gemma and Qwen, written out in one file.

The one thing to remember: a transformer is 2L residual updates x <- x + f_i(x), where f_2i is
attention i and f_2i+1 is MLP i. `run` applies any subsequence of them, so a self-speculative draft
is nothing but a shorter list of sub-layers.

The letters in shapes stand for B rows (texts), T tokens that a pass reads (a block of tokens, not a
`Block`), S slots of the cache, H query heads in Hkv groups of G = H / Hkv, and D numbers per head.
"""
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

SPARE = 8  # slots after the longest text, where rows near their limit write; nothing reads them


class Refused(ValueError):
    """Bad input, in one line that says what is wrong and what to do. A command prints it and exits
    with status 2. Any other exception is a fault of ours and shows its traceback."""


@dataclass(frozen=True)
class Config:
    """The shape of a model. The defaults are Llama's; the fields at the end are all that the other
    families change."""
    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: dict | None = field(default=None, hash=False)     # see `frequencies`
    tied: bool = False                 # the output head is the embedding matrix
    max_len: int = 2048                # context: prompt and answer together
    bos: int | None = None             # begin-of-text id, put before every prompt
    eos: tuple[int, ...] = ()          # any of these ends an answer
    # --- Gemma-2 and Gemma-3
    act: str = "silu"                  # "silu" (SwiGLU) | "gelu" (GeGLU, tanh approximation)
    norm_offset: float = 0.0           # 1.0: RMSNorm multiplies by (1 + w)
    embed_scale: float = 1.0           # sqrt(dim): embeddings are scaled up
    post_norm: bool = False            # a second norm after attention and after the MLP
    query_scale: float | None = None   # query_pre_attn_scalar ** -0.5 instead of head_dim ** -0.5
    attn_softcap: float | None = None  # 50: scores stay within (-50, 50)
    final_softcap: float | None = None  # 30: the same for logits
    window: int | None = None          # most blocks see the last `window` positions only
    global_every: int = 2              # but every second block (Gemma-3: sixth) sees all
    local_theta: float | None = None   # Gemma-3: the rope_theta of the blocks with a window
    # --- Qwen
    qkv_bias: bool = False             # Qwen2: a bias on queries, keys and values
    qk_norm: bool = False              # Qwen3 and Gemma-3: an RMSNorm of each query and key

    def window_of(self, layer):
        """The window of block `layer`, or None where it sees the whole text.

        >>> c = Config(9, 4, 6, 1, 1, 4, 5, window=512)
        >>> [c.window_of(layer) for layer in range(6)]
        [512, None, 512, None, 512, None]
        """
        return None if (layer + 1) % self.global_every == 0 else self.window


# --- pure functions: what a porter ports first and a student writes


def softcap(x, cap):
    """cap * tanh(x / cap) keeps x within (-cap, cap) (Gemma 2, section 2). With no cap it is x."""
    return x if cap is None else torch.tanh(x / cap) * cap


def frequencies(head_dim, theta, scaling=None, device=None):
    """The angle per position of each rotated pair, theta^(-2i/D) (RoFormer, eq. 15). (D/2,) float64

    scaling "linear" divides all of them by `factor`. "llama3" divides only the slow ones, which
    turn fewer than `low_freq_factor` times within the original context. Those that turn more than
    `high_freq_factor` times stay as they are, and those between the two are blended.
    """
    freqs = theta ** -(torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim)
    if scaling is None:
        return freqs
    slow = freqs / scaling["factor"]
    if scaling["rope_type"] == "linear":
        return slow
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * freqs / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * freqs + (1 - keep) * slow


def rope(positions, freqs):
    """cos and signed sin for `rotate`. positions (...), freqs (D/2,) -> two (..., D), float64.
    The freqs of several bases, (N, 1, D/2), give one table for each."""
    angles = positions[..., None] * freqs                                   # (..., D/2)
    cos = angles.cos()
    sin = angles.sin()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)    # sin holds the rotation's sign


def rotate(x, cos, sin):
    """Turn each pair (x_i, x_{i+D/2}) by its angle. x, cos, sin: (..., D).

    trap: Hugging Face's files pair the two halves like this; Meta's own pair (x_2i, x_2i+1).
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def visible(positions, slots, end, tree=None, window=None):
    """Which slots 0 .. end-1 may each token of a block read? (B, T), (B, T) -> (B, T, end) bool

    Among the slots before the block, a token sees all those below its own position, since slot =
    position there. Within the block it sees the tokens that `tree` (B or 1, T, T) or (T, T) marks,
    or without a tree itself and the tokens before it. `window` hides the keys that are `window` or
    more positions back.

    >>> at = torch.tensor([[2, 3]])         # a block of two tokens, after two filled slots
    >>> visible(at, at, end=5).int().tolist()       # slot 4 is not known yet: no token sees it
    [[[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]]
    >>> visible(at, at, end=5, window=2).int().tolist()
    [[[0, 1, 1, 0, 0], [0, 0, 1, 1, 0]]]
    """
    B, T = slots.shape
    slot = torch.arange(end, device=slots.device)
    if tree is None:
        tree = torch.ones(T, T, dtype=torch.bool, device=slots.device).tril()
    mask = slot < torch.minimum(slots[:, :1], positions)[..., None]         # before the block
    mask = mask.scatter(2, slots[:, None].expand(B, T, T), tree.expand(B, T, T))    # within it
    if window is not None:
        key = slot.expand(B, end).scatter(1, slots, positions)      # (B, end) position of each slot
        mask = mask & (positions[..., None] - key[:, None] < window)
    return mask


class Placement(NamedTuple):
    """Where the T tokens of a block stand.

    The position sets the rotation; the slot is the place in the cache. They differ where several
    tokens share a position, like siblings in a tree and the drafts that `search.Teacher` scores.
    `first` and `end` are numbers on the host, so that a pass never waits for a GPU.
    """
    positions: torch.Tensor             # (B or 1, T)
    slots: torch.Tensor                 # (B or 1, T)
    first: int                          # the lowest position of the block in any row
    end: int                            # one past the last slot that is read
    tree: torch.Tensor | None = None    # (B or 1, T, T) who sees whom, see `visible`; None: a chain
    same: bool = False                  # every row stands at positions and slots first .. first+T-1

    @classmethod
    def span(cls, first, stop, device=None):
        """The positions first .. stop-1 in every row."""
        here = torch.arange(first, stop, device=device)[None]
        return cls(here, here, first, stop, same=True)


# --- modules


def block_only(k, v):
    """What attention reads when there is no cache."""
    return k, v


def weight(*shape):
    return nn.Parameter(torch.empty(shape))   # filled later, by checkpoint.load or by training


class RMSNorm(nn.Module):
    """Scales each vector of `dim` numbers to a root mean square of 1, then by a weight."""

    def __init__(self, c, dim):
        super().__init__()
        self.eps = c.norm_eps
        self.offset = c.norm_offset
        self.weight = weight(dim)

    def forward(self, x):
        if self.offset == 0:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        # trap: 1 + w rounded to bfloat16 is off by 0.14 % on average, so compute in float32
        wide = torch.promote_types(x.dtype, torch.float32)
        w = self.offset + self.weight.to(wide)
        return F.rms_norm(x.to(wide), w.shape, w, self.eps).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention, explicit because soft-caps and trees need the scores.

    For each KV head, wqkv stacks its G query heads, its key and its value, so that one matrix
    product makes all of them. The G queries that share a key become G times as many score rows, so
    that no key is copied.
    """

    def __init__(self, c):
        super().__init__()
        self.c = c
        self.grouped = c.n_kv_heads, c.n_heads // c.n_kv_heads + 2, c.head_dim  # Hkv, G + 2, D
        self.wqkv = weight(math.prod(self.grouped), c.dim)
        self.bias = weight(math.prod(self.grouped)) if c.qkv_bias else None
        self.q_norm = RMSNorm(c, c.head_dim) if c.qk_norm else None
        self.k_norm = RMSNorm(c, c.head_dim) if c.qk_norm else None
        self.wo = weight(c.dim, c.n_heads * c.head_dim)
        self.scale = c.head_dim ** -0.5 if c.query_scale is None else c.query_scale

    def project(self, x):
        """x (B, T, dim) -> the queries, the key and the value of each group, before the rotation
        (B, T, Hkv, G+2, D)."""
        qkv = F.linear(x, self.wqkv)
        if self.bias is not None:       # not inside `linear`: a quantised matrix takes no bias
            qkv = qkv + self.bias
        qkv = qkv.unflatten(-1, self.grouped)
        if self.q_norm is None:
            return qkv
        q, k, v = qkv.split([self.grouped[1] - 2, 1, 1], -2)
        return torch.cat([self.q_norm(q), self.k_norm(k), v], -2)

    def forward(self, x, cos, sin, mask, store):
        """store(k, v), both (B, Hkv, T, D), keeps them and returns all keys and values that the
        block reads, (B, Hkv, S, D). mask (B, 1, 1, T, S) is added to the scores if there is one."""
        B, T, _ = x.shape
        Hkv, N, D = self.grouped
        G = N - 2
        qkv = self.project(x).to(cos.dtype)                                 # (B, T, Hkv, G+2, D)
        qk = rotate(qkv[..., :-1, :], cos, sin)
        q = qk[..., :-1, :] * self.scale                                        # (B, T, Hkv, G, D)
        k = qk[..., -1, :]                                                      # (B, T, Hkv, D)
        v = qkv[..., -1, :]                                                     # (B, T, Hkv, D)
        k, v = store(k.transpose(1, 2), v.transpose(1, 2))                      # (B, Hkv, S, D)
        q = q.permute(0, 2, 3, 1, 4)                                            # (B, Hkv, G, T, D)
        scores = torch.bmm(q.reshape(B * Hkv, G * T, D), k.flatten(0, 1).mT)    # (B*Hkv, G*T, S)
        scores = softcap(scores, self.c.attn_softcap)
        if mask is not None:
            scores.view(B, Hkv, G, T, -1).add_(mask)  # in place: scores are the largest tensor
        y = torch.bmm(scores.softmax(-1), v.flatten(0, 1))                     # (B*Hkv, G*T, D)
        y = y.view(B, Hkv, G, T, D).permute(0, 3, 1, 2, 4).reshape(B, T, -1)    # (B, T, H*D)
        return F.linear(y.to(x.dtype), self.wo)                                 # (B, T, dim)


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.act = {"silu": F.silu, "gelu": partial(F.gelu, approximate="tanh")}[c.act]
        self.gate_up = weight(2 * c.hidden_dim, c.dim)                        # one product for both
        self.down = weight(c.dim, c.hidden_dim)

    def forward(self, x):
        gate, up = F.linear(x, self.gate_up).chunk(2, -1)                       # (B, T, hidden)
        return F.linear(self.act(gate) * up, self.down)                     # (B, T, dim)


class Block(nn.Module):
    """Two sub-layers, each of them norm -> f, in Gemma norm -> f -> norm.

    trap: Hugging Face calls the norm *before* Llama's MLP `post_attention_layernorm`; in Gemma the
    same name is a true post-norm.
    """

    def __init__(self, c):
        super().__init__()
        self.attn = Attention(c)
        self.mlp = MLP(c)
        self.attn_norm = RMSNorm(c, c.dim)
        self.mlp_norm = RMSNorm(c, c.dim)
        self.attn_post = RMSNorm(c, c.dim) if c.post_norm else nn.Identity()
        self.mlp_post = RMSNorm(c, c.dim) if c.post_norm else nn.Identity()


class Transformer(nn.Module):
    chunk = 256     # tokens of a prompt that are read at once: the scores of more take more memory
    widest = 256    # the most tokens that a drafter reads in one pass
    share = 1.0     # of the output head that a draft reads

    def __init__(self, c):
        super().__init__()
        self.c = c
        self.tok = weight(c.vocab_size, c.dim)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.n_layers))
        self.norm = RMSNorm(c, c.dim)
        self.head = None if c.tied else weight(c.vocab_size, c.dim)
        self.table = None

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B, T) ids -> (B, T, dim)."""
        x = F.embedding(tokens, self.tok)
        if self.c.embed_scale == 1:
            return x
        # trap: the original rounds the scale to the type of the weights (59.75, not 59.87)
        return x * torch.tensor(self.c.embed_scale, dtype=x.dtype).item()

    def attention_dtype(self):
        """The dtype of attention and of the cache. On the CPU half precision becomes float32,
        because a product of two half-precision matrices has no fast path there, and the rotation
        casts at no extra cost."""
        w = self.tok
        return w.dtype if w.is_cuda else torch.promote_types(w.dtype, torch.float32)

    def angles(self, end):
        """The tables of cos and sin for N positions, of which there are at least `end`, as two
        (1 or 2, N, D). The first is for blocks that see the whole text, the last for those with a
        window. They have attention's dtype and the weights' device, and double when `end` outgrows
        them, so that a short prompt does not pay for a long context."""
        c = self.c
        t = self.table
        dtype = self.attention_dtype()
        device = self.tok.device
        if t is None or t[0].dtype != dtype or t[0].device != device or t[0].shape[1] < end:
            count = max(256, 1 << (end - 1).bit_length())
            with torch.inference_mode(False):  # trap: training cannot use tensors made in that mode
                freqs = [frequencies(c.head_dim, c.rope_theta, c.rope_scaling, device)]
                if c.local_theta is not None:
                    freqs.append(frequencies(c.head_dim, c.local_theta, device=device))
                positions = torch.arange(count, device=device, dtype=torch.float64)
                turns = rope(positions, torch.stack(freqs)[:, None])        # (1 or 2, N, D) each
                self.table = [part.to(dtype) for part in turns]
        return self.table

    def run(self, x: torch.Tensor, at: Placement, cache=None,
            sublayers: Sequence[int] | None = None, trace: dict | None = None, table=None,
            masks=None) -> torch.Tensor:
        """Apply `sublayers`, by default all, to x (B, T, dim), whose tokens stand `at` a Placement.
        Number 2i is the attention of block i, and 2i+1 its MLP. `run` fills in the values of
        `trace`, a dict {sub-layer: None}, with x (B, T, dim) after each of these sub-layers. A
        caller who has what `angles` and `build_masks` return may pass it as `table` and `masks`."""
        c = self.c
        start = 0                           # the first slot that sliding layers read
        if c.window is not None:
            start = max(0, at.first + 1 - c.window)
        masks = masks or self.build_masks(at, start)
        here = at.positions
        if at.same:
            here = slice(at.first, at.first + x.shape[1])   # a view, no copy
        cos, sin = table or self.angles(at.end)
        cos = cos[:, here].unflatten(-2, (-1, 1, 1))        # 1 or 2 times ([B,] T, 1, 1, D)
        sin = sin[:, here].unflatten(-2, (-1, 1, 1))
        turns = {c.window: (cos[-1], sin[-1]), None: (cos[0], sin[0])}
        store = block_only
        blocks = tuple(self.blocks)         # indexing a ModuleList is slower than a norm
        if sublayers is None:
            sublayers = range(2 * c.n_layers)
        for i in sublayers:
            layer, is_mlp = divmod(i, 2)
            b = blocks[layer]
            if is_mlp:
                x = x + b.mlp_post(b.mlp(b.mlp_norm(x)))
            else:
                window = c.window_of(layer)
                if cache is not None:
                    store = partial(cache.write, layer, at=at, start=start if window else 0)
                y = b.attn(b.attn_norm(x), *turns[window], masks[window], store)
                x = x + b.attn_post(y)
            if trace is not None and i in trace:
                trace[i] = x
        return x

    def build_masks(self, at, start):
        """{window: mask}, (B or 1, 1, 1, T, S), which is 0 where visible and -inf elsewhere. A mask
        of None hides nothing. The key None is for layers without a window, which read all slots.
        The others read the slots from `start` on."""
        reads = {None: 0, self.c.window: start}
        if at.same and at.slots.shape[1] == 1:
            return dict.fromkeys(reads)
        positions, slots = torch.broadcast_tensors(at.positions, at.slots)
        zeros = torch.zeros((), dtype=self.attention_dtype(), device=slots.device)
        masks = {}
        for window, first in reads.items():
            seen = visible(positions, slots, at.end, at.tree, window)           # (B or 1, T, end)
            masks[window] = zeros.masked_fill(~seen[:, None, None, :, first:], -math.inf)
        return masks

    def unembed(self, x: torch.Tensor, only=None) -> torch.Tensor:
        """(B, T, dim) -> raw logits (B, T, V), by the final norm, the output head and the final
        soft-cap. `only` (N, dim) are some rows of the head, for logits (B, T, N)."""
        if only is None:
            only = self.tok if self.head is None else self.head
        return softcap(F.linear(self.norm(x), only), self.c.final_softcap)

    def forward(self, tokens):
        """(B, T) ids -> logits (B, T, V), without a cache."""
        at = Placement.span(0, tokens.shape[1], tokens.device)
        return self.unembed(self.run(self.embed(tokens), at))

    # --- what a stand-in may do in another way

    @property
    def bare(self):
        """The Transformer itself, also of a stand-in."""
        return self

    def linear(self, x, w):
        """x w^T, by a matrix of a trained head. x (..., K), w (N, K) -> (..., N)"""
        return F.linear(x, w)

    def cache(self, make, batch, slots):
        """make(), a new cache of this size; see `kvcache.new_cache`."""
        return make()

    def alongside(self, model):
        """Another model of the same run, such as a draft, computed in the same way as this one."""
        return model

    def rehearse(self, write):
        """Get ready for all passes that write() makes, before anything is timed."""

    def replays(self):
        """Whether passes are computed faster than by the Transformer itself."""
        return False


class StandIn:
    """Takes the place of a model and computes the same passes in another way. A subclass overrides
    some methods, and the model answers all else."""
    model = None    # trap: without it copy.copy, which asks before it is set, would never end

    def __init__(self, model):
        self.model = model

    def __getattr__(self, name):
        return getattr(self.model, name)
