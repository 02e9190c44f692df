"""Fused attention for long prompts, by PyTorch's kernel in place of the explicit products.

Explicit attention writes a score for each pair of tokens to memory, and reads it again for the
soft-cap, the mask, the softmax and the sum. A fused kernel (FlashAttention, arXiv 2205.14135) keeps
a tile of them in the processor's caches. A block of a few tokens gains nothing from that.
"""
import torch.nn.functional as F

from model import Attention, rotate

LONG = 64       # the kernel reads blocks of at least this many tokens
CHUNK = 2048    # tokens of a prompt that are read at once


class Fused(Attention):
    """Attention without a soft-cap, on a CPU, with the weights of an explicit one. A model in half
    precision keeps its keys in float32 there. For this product they are rounded, as on a GPU."""

    def __init__(self, attention):
        vars(self).update(vars(attention))

    def forward(self, x, cos, sin, mask, store):
        """As `Attention.forward`."""
        B, T, _ = x.shape
        if T < LONG:
            return super().forward(x, cos, sin, mask, store)
        qkv = self.project(x).to(cos.dtype)                                 # (B, T, Hkv, G+2, D)
        qk = rotate(qkv[..., :-1, :], cos, sin)
        q = qk[..., :-1, :].flatten(2, 3).transpose(1, 2)                       # (B, H, T, D)
        k = qk[..., -1, :].transpose(1, 2)                                      # (B, Hkv, T, D)
        v = qkv[..., -1, :].transpose(1, 2)
        q, k, v = (t.to(x.dtype) for t in (q, *store(k, v)))                    # k, v: S slots
        causal = mask is not None and is_causal(mask)
        if mask is not None:
            mask = None if causal else mask[:, 0]                               # (B or 1, 1, T, S)
        y = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=causal, scale=self.scale, enable_gqa=True)
        return F.linear(y.transpose(1, 2).flatten(2), self.wo)


def is_causal(mask):
    """Whether in a mask (..., T, S) each token sees itself and all before it, so that the kernel
    can leave out the half of the scores that nobody sees. In a tree, a token does not see the one
    before it; with a window, the last token does not see the first."""
    T, S = mask.shape[-2:]
    if T != S:
        return False
    before = mask.diagonal(-1, -2, -1)
    return not before.any() and not mask[..., -1, 0].any()


def fuse(model):
    """The model, whose attentions are fused where the kernel can be used, in place. On CUDA no
    fused kernel of PyTorch takes both a mask and grouped heads."""
    if model.c.attn_softcap is None and not model.tok.is_cuda:
        for block in model.blocks:
            block.attn = Fused(block.attn)
        model.chunk = CHUNK
    return model
