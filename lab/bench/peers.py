"""Other programs on the same weights, with the same prompt and as many threads: llama.cpp, where it is
installed, and transformers at its fastest.

The one thing to remember: a peer that is not there is a row that is not there.
"""
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch

from checkpoint import parts, stored_shape
from lab.bench.shared import table
from model import frequencies

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}    # their numbers in a GGUF file


def neighbours(w, head_dim):
    """Rows (H * D, dim) in the order 0, D/2, 1, D/2 + 1 ... of each head: llama.cpp rotates neighbours
    (x_2i, x_2i+1) where `model.rotate` rotates the halves (x_i, x_{i+D/2}).

    >>> neighbours(torch.arange(8.0)[:, None], 4).flatten().tolist()
    [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]
    """
    return w.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def write_gguf(model, path):
    """A Llama as one GGUF file, which is what llama.cpp reads, without a vocabulary: texts go in and out as
    ids. Raises ValueError for Gemma-2 and for a dtype that GGUF does not have."""
    from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map

    c, names = model.c, get_tensor_name_map(MODEL_ARCH.LLAMA, model.c.n_layers)
    if c.post_norm or model.tok.dtype not in TYPES:
        raise ValueError(f"only a Llama in {', '.join(str(t)[6:] for t in TYPES)} can be written as GGUF")
    file = GGUFWriter(path, "llama")
    for name, value in {
            "tokenizer_model": "none", "vocab_size": c.vocab_size, "context_length": c.max_len,
            "embedding_length": c.dim, "block_count": c.n_layers, "feed_forward_length": c.hidden_dim,
            "head_count": c.n_heads, "head_count_kv": c.n_kv_heads, "key_length": c.head_dim,
            "value_length": c.head_dim, "rope_dimension_count": c.head_dim, "rope_freq_base": c.rope_theta,
            "layer_norm_rms_eps": c.norm_eps}.items():
        getattr(file, f"add_{name}")(value)

    def add(name, w):
        # vectors are float32: llama.cpp takes them in no other type; numpy has no bfloat16, so bytes go in
        w = (w.float() if w.dim() == 1 else w).contiguous()
        kind = GGMLQuantizationType(TYPES[w.dtype])
        file.add_tensor(name, w.view(torch.uint8).numpy(), raw_dtype=kind)

    for name, part in parts(model):
        w = part.detach().reshape(stored_shape(part)).cpu()
        turned = name.endswith(("q_proj.weight", "k_proj.weight"))
        add(names.get_name(name, (".weight",)), neighbours(w, c.head_dim) if turned else w)
    if c.rope_scaling:  # by what each angle is divided: whatever the scaling, nothing else need be known
        plain = frequencies(c.head_dim, c.rope_theta)
        add("rope_freqs.weight", (plain / frequencies(c.head_dim, c.rope_theta, c.rope_scaling)).float())
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


class LlamaCpp:
    """llama.cpp, by way of llama-cpp-python, with its own defaults."""

    def __init__(self, model):
        from llama_cpp import Llama
        threads, dtype = torch.get_num_threads(), model.tok.dtype
        kept = TYPES[torch.float32 if dtype == torch.float32 else torch.float16]    # of keys and values
        with tempfile.TemporaryDirectory() as made:
            path = Path(made) / "model.gguf"
            write_gguf(model, path)
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

    def __init__(self, theirs, slots):
        from transformers import StaticCache
        self.model, self.cache = theirs, lambda: StaticCache(config=theirs.config, max_cache_len=slots)
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


def find_peers(model):
    """{name: write(prompt, new)} of those that are installed and can compute this model."""
    found = all(map(find_spec, ("llama_cpp", "gguf"))) and not model.tok.is_cuda
    return {"llama.cpp": LlamaCpp(model).write} if (
        found and not model.c.post_norm and model.tok.dtype in TYPES) else {}


def markdown(results, new):
    """A row for each peer of each model; no table where there is none."""
    rows = [[name, peer, f"{new / r['decode'][peer]:.1f}", f"{r['decode'][peer] / r['decode']['ours']:.2f}",
             f"{same} of {new}"]
            for name, r in results.items() for peer, same in r["peers"].items()]
    head = ["model, dtype", "peer", "tokens/s", "ours / peer", "same first tokens"]
    return table(head, rows) if rows else []
