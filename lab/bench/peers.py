"""Other programs on the same weights, with the same prompt and as many threads, where they are installed:
llama.cpp on the CPU, gpt-fast's recipe on a GPU, and transformers at its fastest.

The one thing to remember: a peer that is not there is a row that is not there.
"""
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lab.bench import gguf
from lab.bench.shared import table
from model import frequencies, rope, rotate


class LlamaCpp:
    """llama.cpp, by way of llama-cpp-python, with its own defaults."""

    def __init__(self, model):
        from llama_cpp import Llama
        threads, dtype = torch.get_num_threads(), model.tok.dtype
        kept = gguf.TYPES[torch.float32 if dtype == torch.float32 else torch.float16]  # of keys and values
        with tempfile.TemporaryDirectory() as made:
            path = Path(made) / "model.gguf"
            gguf.write(model, path)
            self.llama = Llama(str(path), n_ctx=model.c.max_len, n_threads=threads, n_threads_batch=threads,
                               n_gpu_layers=0, type_k=kept, type_v=kept, use_mmap=False, verbose=False)

    def write(self, prompt, new):
        """Greedy; the ids."""
        import numpy
        from llama_cpp import llama_get_logits
        self.llama.reset()
        self.llama.eval(prompt)
        ids = []
        while True:
            logits = numpy.ctypeslib.as_array(llama_get_logits(self.llama.ctx), (self.llama.n_vocab(),))
            ids.append(int(logits.argmax()))
            if len(ids) == new:
                return ids
            self.llama.eval(ids[-1:])


class Static:
    """transformers with a cache of fixed size and the step of one token compiled, as its guide to fast
    decoding says. theirs: its model."""

    def __init__(self, theirs, slots, compiled=True):
        from transformers import StaticCache
        self.model, self.step = theirs, theirs
        self.cache = lambda: StaticCache(config=theirs.config, max_cache_len=slots)
        if compiled:
            # trap: a sliding layer's cache counts in Python: were its numbers fixed, each token compiled anew
            self.step = torch.compile(theirs.forward)

    @torch.no_grad()
    def write(self, prompt, new):
        """Greedy; the ids."""
        device, cache, run = self.model.device, self.cache(), self.model
        tokens, at, ids = torch.tensor([prompt], device=device), torch.arange(len(prompt), device=device), []
        for _ in range(new):
            said = run(tokens, past_key_values=cache, cache_position=at, logits_to_keep=1)
            tokens, at, run = said.logits[:, -1:].argmax(-1).clone(), at[-1:] + 1, self.step
            ids.append(tokens)
        return torch.cat(ids, 1)[0].tolist()


class GptFast(torch.nn.Module):
    """gpt-fast's recipe (PyTorch, 2023) on our weights: a cache of fixed size, written in place at a position
    that lies on the device; `scaled_dot_product_attention` over all of it under a mask; and the step of one
    token compiled as a whole, into one CUDA graph."""

    @torch.no_grad()
    def __init__(self, model, compiled=True):
        super().__init__()
        c, w = model.c, model.tok
        self.model, self.shape = model, model.blocks[0].attn.grouped
        at = torch.arange(c.max_len, device=w.device, dtype=torch.float64)
        freqs = frequencies(c.head_dim, c.rope_theta, c.rope_scaling, w.device)
        self.cos, self.sin = (t.to(w.dtype) for t in rope(at, freqs))            # (S, D)
        self.mask = torch.ones(c.max_len, c.max_len, dtype=torch.bool, device=w.device).tril()
        shape = c.n_layers, 2, 1, c.n_kv_heads, c.max_len, c.head_dim
        # trap: a tensor that is no buffer may not be written to inside a graph, and then there is no graph
        self.register_buffer("cache", torch.zeros(shape, dtype=w.dtype, device=w.device))
        self.step = self.forward
        if compiled:
            torch._inductor.config.coordinate_descent_tuning = True
            self.step = torch.compile(self.forward, mode="reduce-overhead", fullgraph=True)

    def attention(self, i, x, at):
        c, (Hkv, N, D), T = self.model.c, self.shape, x.shape[1]
        attn, (keys, values) = self.model.blocks[i].attn, self.cache[i]          # (1, Hkv, S, D) each
        qkv = F.linear(x, attn.wqkv).view(1, T, Hkv, N, D).transpose(1, 2)       # (1, Hkv, T, G+2, D)
        cos, sin = self.cos[at][:, None], self.sin[at][:, None]                  # (T, 1, D)
        qk = rotate(qkv[..., :-1, :], cos, sin)
        keys[:, :, at], values[:, :, at] = qk[..., -1, :], qkv[..., -1, :]
        q = qk[..., :-1, :].transpose(2, 3).flatten(1, 2)                        # (1, H, T, D)
        y = F.scaled_dot_product_attention(q, keys, values, self.mask[at], enable_gqa=c.n_heads > Hkv)
        return F.linear(y.transpose(1, 2).flatten(2), attn.wo)

    def forward(self, tokens, at):
        """The likeliest token (1, 1) after tokens (1, T), which stand at the positions at (T,)."""
        m = self.model
        x = F.embedding(tokens, m.tok)
        for i, b in enumerate(m.blocks):
            x = x + self.attention(i, b.attn_norm(x), at)
            x = x + b.mlp(b.mlp_norm(x))
        return F.linear(m.norm(x[:, -1:]), m.tok if m.head is None else m.head).argmax(-1)

    @torch.no_grad()
    def write(self, prompt, new):
        device = self.model.tok.device
        at = torch.arange(len(prompt), device=device)
        token, at = self.forward(torch.tensor([prompt], device=device), at), at[-1:] + 1
        out = [token]
        with sdpa_kernel(SDPBackend.MATH):  # of which the compiler makes one kernel, better than a ready one
            for _ in range(new - 1):
                token = self.step(token, at).clone()  # trap: the next step overwrites what a graph returned
                out.append(token)
                at = at + 1
        return torch.cat(out, 1)[0].tolist()


def find_peers(model):
    """{name: write(prompt, new)} of those that are installed and can compute this model."""
    if model.c.post_norm:
        return {}
    if model.tok.is_cuda:
        return {"gpt-fast's recipe": GptFast(model).write}
    found = find_spec("llama_cpp") and model.tok.dtype in gguf.TYPES
    return {"llama.cpp": LlamaCpp(model).write} if found else {}


def markdown(results, new):
    """A row for each peer of each model; no table where there is none."""
    rows = [[name, peer, f"{new / r['decode'][peer]:.1f}", f"{r['decode'][peer] / r['decode']['ours']:.2f}",
             f"{same} of {new}"]
            for name, r in results.items() for peer, same in r["peers"].items()]
    head = ["model, dtype", "peer", "tokens/s", "ours / peer", "same first tokens"]
    return table(head, rows) if rows else []
