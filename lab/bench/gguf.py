"""A Llama of this library -> one GGUF file, which is what llama.cpp reads; written out from the format's
specification (version 3: magic, metadata, where each tensor lies, the tensors).

The one thing to remember: llama.cpp rotates neighbours (x_2i, x_2i+1) where `model.rotate` rotates the halves
(x_i, x_{i+D/2}), so the rows of Q and K are written in another order.
"""
import struct
from pathlib import Path

import torch

from checkpoint import parts, stored_shape
from model import frequencies

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
ALIGNMENT = 32
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
         "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
         "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}


def string(text):
    return struct.pack("<Q", len(text.encode())) + text.encode()


def value(v):
    """A metadata value after the number of its type: uint32, float32 or a string."""
    if isinstance(v, str):
        return struct.pack("<I", 8) + string(v)
    return struct.pack("<If", 6, v) if isinstance(v, float) else struct.pack("<II", 4, v)


def padded(size):
    return -size % ALIGNMENT


def neighbours(w, head_dim):
    """Rows (H * D, dim) in the order 0, D/2, 1, D/2 + 1 ... of each head: what was half a head apart is next
    to each other.

    >>> neighbours(torch.arange(8.0)[:, None], 4).flatten().tolist()
    [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]
    """
    return w.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def metadata(c):
    """No vocabulary: texts go in and out as ids."""
    shape = {"context_length": c.max_len, "embedding_length": c.dim, "block_count": c.n_layers,
             "feed_forward_length": c.hidden_dim, "attention.head_count": c.n_heads,
             "attention.head_count_kv": c.n_kv_heads, "attention.key_length": c.head_dim,
             "attention.value_length": c.head_dim, "rope.dimension_count": c.head_dim,
             "rope.freq_base": c.rope_theta, "attention.layer_norm_rms_epsilon": c.norm_eps,
             "vocab_size": c.vocab_size}
    return {"general.architecture": "llama", "tokenizer.ggml.model": "none",
            **{f"llama.{key}": v for key, v in shape.items()}}


def tensors(model):
    """(name, tensor) for all that the file holds. Vectors are float32: llama.cpp takes them in no other
    type."""
    c = model.c
    for name, part in parts(model):
        w = part.detach().reshape(stored_shape(part)).cpu()
        name = name.removesuffix(".weight")
        if name.endswith(("q_proj", "k_proj")):
            w = neighbours(w, c.head_dim)
        block = name.split(".")[2] if name.startswith("model.layers.") else None
        name = NAMES[name.removeprefix(f"model.layers.{block}.")] + ".weight"
        yield name if block is None else f"blk.{block}.{name}", w.float() if w.dim() == 1 else w
    if c.rope_scaling:  # by what each angle is divided: whatever the scaling, nothing else need be told
        plain = frequencies(c.head_dim, c.rope_theta)
        yield "rope_freqs.weight", (plain / frequencies(c.head_dim, c.rope_theta, c.rope_scaling)).float()


def write(model, path):
    """Raises ValueError for Gemma-2 and for a dtype that GGUF does not have."""
    c, dtype = model.c, model.tok.dtype
    if c.post_norm or dtype not in TYPES:
        raise ValueError(f"only a Llama in {', '.join(str(t)[6:] for t in TYPES)} can be written as GGUF")
    known, index, at, count = metadata(c), b"", 0, 0
    for name, w in tensors(model):
        # trap: the sizes stand from the innermost to the outermost, the other way round from a shape
        sizes = struct.pack(f"<I{w.dim()}Q", w.dim(), *reversed(w.shape))
        index += string(name) + sizes + struct.pack("<IQ", TYPES[w.dtype], at)
        size = w.numel() * w.element_size()
        at, count = at + size + padded(size), count + 1
    head = b"GGUF" + struct.pack("<IQQ", 3, count, len(known))
    head += b"".join(string(key) + value(v) for key, v in known.items()) + index
    with open(Path(path), "wb") as file:
        file.write(head + bytes(padded(len(head))))
        for _, w in tensors(model):
            data = w.contiguous().view(torch.uint8).numpy()
            file.write(data.tobytes() + bytes(padded(data.nbytes)))
