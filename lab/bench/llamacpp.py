"""llama.cpp on SmolLM2, or on another GGUF file, in bfloat16, as this library reads it, and in the
few bits that it came in.

It needs the package llama-cpp-python, built for the machine that it runs on.
"""
import ctypes
import tempfile
import time
from functools import partial
from itertools import islice
from pathlib import Path

import torch

from lab.bench.drafters import Method, Sample
from lab.gguf import smollm
from methods.pace import COPY
from support.measure import interleave

WIDTHS = 1, 2, 3, 4, 8, 16


def opened(reach, file=None):
    """{name: Llama} for texts of up to `reach` tokens. file: the GGUF
    file, by default SmolLM2's."""
    from llama_cpp import Llama, llama_cpp
    from llama_cpp._logger import set_verbose
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    how = llama_cpp.llama_model_quantize_default_params()
    lookup = LlamaPromptLookupDecoding(2, COPY)
    how.ftype, how.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_BF16, True
    open_ = partial(Llama, n_ctx=reach, verbose=False, n_threads=torch.get_num_threads(),
                    n_threads_batch=torch.get_num_threads())
    set_verbose(False)
    file = file or str(smollm())
    with tempfile.TemporaryDirectory() as folder:
        wide = Path(folder) / "wide.gguf"
        llama_cpp.llama_model_quantize(file.encode(), bytes(wide), ctypes.byref(how))
        files = {"bfloat16": str(wide), "as it came": file}
        plain = {f"llama.cpp, {bits}": open_(path) for bits, path in files.items()}
        return plain | {f"llama.cpp, {bits}, lookup": open_(path, draft_model=lookup,
                                                            logits_all=True)
                        for bits, path in files.items()}


def ways(models, c, new):
    """{name: Method} of what `opened` returned: greedy, up to `new` tokens. c: the Config of the
    model beside it. Raises ValueError if that is another one."""
    if any(llama.n_vocab() != c.vocab_size for llama in models.values()):
        raise ValueError("llama.cpp has another vocabulary than --model: name its file with "
                         "--gguf, or take SmolLM2 (make smollm)")
    return {name: Method(ask=partial(ask, llama, new, c.eos)) for name, llama in models.items()}


def ask(llama, new, eos, ids):
    llama.reset()
    steps = llama.generate(ids, temp=0.0)
    text, start = [next(steps)], time.perf_counter()        # the first token comes with the prompt
    for token in islice(steps, new - 1):
        if text[-1] in eos:
            break
        text.append(token)
    return Sample(text, (time.perf_counter() - start) * len(text) / max(1, len(text) - 1))


def blocks(models, at=64):
    """Lines that say what a pass over a block takes after `at` tokens, relative to
    one of one token."""
    lines = []
    for name, llama in models.items():
        if "lookup" in name:    # the others compute the logits of the last token alone
            llama.reset()
            llama.eval([5] * at)
            seconds = interleave({T: partial(read, llama, at, T) for T in WIDTHS}, 50)
            costs = ", ".join(f"{T}: {s / seconds[1]:.2f}" for T, s in seconds.items())
            lines.append(f"- {name.removesuffix(', lookup')}, blocks of tokens, relative to one: "
                         f"{costs}")
    return lines


def read(llama, at, T):
    llama.n_tokens = at
    llama.eval([5] * T)
