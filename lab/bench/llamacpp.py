"""How fast llama.cpp writes with SmolLM2 or another GGUF file, in bfloat16, as this library reads
it, and quantised, as the file came.

It needs the package llama-cpp-python, built for the machine that it runs on.
"""
import ctypes
import tempfile
import time
from functools import partial
from itertools import islice
from pathlib import Path

import torch

import checkpoint
from lab.bench.shared import Sample
from lab.gguf import smollm
from methods.arms import COPY
from model import Refused

REACH = 2048    # tokens of the longest text
NAMES = ("llama.cpp, bfloat16", "llama.cpp, bfloat16, lookup",
         "llama.cpp, as it came", "llama.cpp, as it came, lookup")


def ways(a, names):
    """{name: a way to decode, as in real.py} of the NAMES that are among the names. Raises
    ValueError for a file with another vocabulary than --model has."""
    from llama_cpp import Llama, llama_cpp
    from llama_cpp._logger import set_verbose
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    set_verbose(False)
    file = a.gguf or str(smollm())
    c = checkpoint.read_config(Path(a.model))
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        wide = Path(folder) / "wide.gguf"
        how = llama_cpp.llama_model_quantize_default_params()
        how.ftype, how.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_BF16, True
        llama_cpp.llama_model_quantize(file.encode(), bytes(wide), ctypes.byref(how))
        for name in filter(NAMES.__contains__, names):
            looks = "lookup" in name
            llama = Llama(
                str(wide) if "bfloat16" in name else file, n_ctx=REACH, verbose=False,
                n_threads=torch.get_num_threads(), n_threads_batch=torch.get_num_threads(),
                draft_model=LlamaPromptLookupDecoding(2, COPY) if looks else None, logits_all=looks)
            check_vocabulary(llama, c)
            found[name] = lambda llama=llama: partial(ask, llama, c.eos)
    return found


def check_vocabulary(llama, c):
    if llama.n_vocab() != c.vocab_size:
        raise Refused("llama.cpp has another vocabulary than --model: name its file with "
                      "--gguf, or take SmolLM2 (make smollm)")


def ask(llama, eos, ids, seed, new):
    """A Sample. `seed` changes nothing, because the text is greedy."""
    llama.reset()
    steps = llama.generate(ids, temp=0.0)
    text = [next(steps)]        # the first token comes with the prompt
    start = time.perf_counter()
    for token in islice(steps, new - 1):
        if text[-1] in eos:
            break
        text.append(token)
    return Sample(text, (time.perf_counter() - start) * len(text) / max(1, len(text) - 1))
