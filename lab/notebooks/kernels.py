"""Four kernels by hand, in Triton, each beside the line of torch that it replaces: a page for readers who
have Triton, or only its interpreter.

    python -m pip install triton numpy
    TRITON_INTERPRET=1 python lab/notebooks/kernels.py     on a CPU: slow, but step by step
    python lab/notebooks/kernels.py                         on a GPU

A kernel is written for one *program*, and many programs run at once, each with a
number of its own (`program_id`). It loads some numbers, computes with them as long as they are close, and
stores what came out; whatever torch would write to memory between two operations stays where it is.

Nothing else in this repository uses this file. (Triton's own tutorials: triton-lang.org.)
"""
import os
import sys
from pathlib import Path

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch.nn.functional as F  # noqa: E402

from kvcache import KVCache  # noqa: E402
from model import Config, Placement, frequencies, rope, rotate  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


# --- 1. vector addition: what a program is


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)     # which numbers are mine
    inside = at < n                 # trap: the last program's block ends beyond the vector
    tl.store(out + at, tl.load(x + at, inside) + tl.load(y + at, inside), inside)


def add(x, y):
    """x + y"""
    out, block = torch.empty_like(x), 256
    add_kernel[(triton.cdiv(x.numel(), block),)](x, y, out, x.numel(), BLOCK=block)
    return out


# --- 2. RMSNorm: six operations become one, and a row is read once


@triton.jit
def norm_kernel(x, w, out, dim, eps, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)         # a program for each row
    inside = at < dim
    v = tl.load(x + row * dim + at, inside, 0.0).to(tl.float32)     # zeros do not change a sum
    scale = tl.rsqrt(tl.sum(v * v) / dim + eps)
    tl.store(out + row * dim + at, v * scale * tl.load(w + at, inside), inside)


def rms_norm(x, w, eps):
    """F.rms_norm(x, w.shape, w, eps), x (..., dim)"""
    out, dim = torch.empty_like(x), x.shape[-1]
    norm_kernel[(x.numel() // dim,)](x, w, out, dim, eps, BLOCK=triton.next_power_of_2(dim))
    return out


# --- 3. rope: the two halves of a head turn by the angles of its position


@triton.jit
def rope_kernel(x, cos, sin, out, heads, D: tl.constexpr, HALF: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, D)             # a program for each head of each token
    token = row // heads
    other = (at + HALF) % D                                 # its partner in the other half
    v, partner = tl.load(x + row * D + at), tl.load(x + row * D + other)
    turned = v * tl.load(cos + token * D + at) + partner * tl.load(sin + token * D + at)
    tl.store(out + row * D + at, turned)


def turn(x, cos, sin):
    """rotate(x, cos, sin), x (T, heads, D), cos and sin (T, 1, D): the sign of the rotation lives in sin"""
    (T, heads, D), out = x.shape, torch.empty_like(x)
    rope_kernel[(T * heads,)](x, cos, sin, out, heads, D=D, HALF=D // 2)
    return out


# --- 4. rope and write: the key goes straight to its slot, and never to anywhere else


@triton.jit
def write_kernel(qkv, cos, sin, slots, keys, values, S, N: tl.constexpr, Hkv: tl.constexpr,
                 D: tl.constexpr, HALF: tl.constexpr):
    token, head, at = tl.program_id(0), tl.program_id(1), tl.arange(0, D)
    k = qkv + ((token * Hkv + head) * N + N - 2) * D        # of N vectors a group the last two: key and value
    turned = (tl.load(k + at) * tl.load(cos + token * D + at)
              + tl.load(k + (at + HALF) % D) * tl.load(sin + token * D + at))
    slot = (head * S + tl.load(slots + token)) * D          # trap: the slot is data, known to the device only
    tl.store(keys + slot + at, turned)
    tl.store(values + slot + at, tl.load(k + D + at))


def rope_and_write(qkv, cos, sin, slots, keys, values):
    """k, v = rotate(qkv[..., -2, :], cos, sin), qkv[..., -1, :], and `KVCache.write` of both: qkv (T, Hkv,
    G+2, D) into keys and values (Hkv, S, D) at slots (T,)"""
    T, Hkv, N, D = qkv.shape
    write_kernel[(T, Hkv)](qkv, cos, sin, slots, keys, values, keys.shape[1], N=N, Hkv=Hkv, D=D, HALF=D // 2)


# --- each beside its line of torch


def compare(name, got, want):
    off = float((got - want).abs().max() / want.abs().max())
    assert off < 1e-5, f"{name} is off by {off:.1e}"
    print(f"{name:20} {tuple(got.shape)!s:18} largest difference {off:.1e}")


def main():
    torch.manual_seed(0)
    random = lambda *shape: torch.randn(*shape, device=DEVICE)  # noqa: E731
    x, y = random(1000), random(1000)
    compare("vector addition", add(x, y), x + y)
    x, w = random(3, 5, 192), random(192)
    compare("RMSNorm", rms_norm(x, w, 1e-5), F.rms_norm(x, w.shape, w, 1e-5))
    T, Hkv, N, D, S = 5, 2, 4, 64, 32                       # two query heads share a key: N = 2 + 2
    slots = torch.tensor([9, 10, 11, 12, 20], device=DEVICE)
    cos, sin = (part.float()[:, None].contiguous()
                for part in rope(slots.double(), frequencies(D, 10_000.0, device=DEVICE)))  # (T, 1, D)
    x = random(T, Hkv * N, D)
    compare("rope", turn(x, cos, sin), rotate(x, cos, sin))
    qkv = x.view(T, Hkv, N, D)
    c = Config(vocab_size=8, dim=256, n_layers=1, n_heads=4, n_kv_heads=Hkv, head_dim=D, hidden_dim=8)
    cache = KVCache(c, 1, S, torch.float32, DEVICE)
    k, v = rotate(qkv[..., -2, :], cos, sin), qkv[..., -1, :]                               # (T, Hkv, D)
    at = Placement(slots[None], slots[None], 9, S)
    cache.write(0, k.transpose(0, 1)[None], v.transpose(0, 1)[None], at)
    keys, values = (torch.zeros(Hkv, S, D, device=DEVICE) for _ in "kv")
    rope_and_write(qkv, cos, sin, slots, keys, values)
    compare("rope and write, k", keys, cache.k[0, 0])
    compare("rope and write, v", values, cache.v[0, 0])


if __name__ == "__main__":
    main()
