"""What the command lines share: bad input is one clear line and exit status 2, never a traceback.

The one thing to remember: a ValueError or an OSError is a message to the user; anything else is our own bug.
"""
import argparse
import io
import itertools
import math
import os
import platform
import re
import sys
from pathlib import Path

import torch

from control import Costs
from layerskip import without
from support.files import read_json


class Parser(argparse.ArgumentParser):
    """argparse, except that a wrong flag raises ValueError like all other bad input."""

    def error(self, message):
        raise ValueError(f"{message}; see --help")


def read_skip(text, n_layers):
    """The sub-layers that stay. text: "a3,m4", which skips attention 3 and MLP 4, or the name of a file with
    {"attn": [...], "mlp": [...]}, whose other keys are ignored."""
    sets = skip_set(text)
    attn, mlp = sets.get("attn", []), sets.get("mlp", [])
    if not all(isinstance(s, list) and all(type(i) is int for i in s) for s in (attn, mlp)):
        raise ValueError(f'{text}: "attn" and "mlp" must be lists of block numbers')
    return without(n_layers, attn, mlp)


def read_gamma(text):
    """How far the search that wrote the file `text` found it best to draft, 0 where it found no gain. None if
    the file does not say, or if text is no file but a skip set such as "a3,m4"."""
    gamma = skip_set(text).get("gamma")
    if gamma is not None and not (type(gamma) is int and gamma >= 0):
        raise ValueError(f'{text}: "gamma" must be a whole number from 0 up')
    return gamma


def read_vocab(path, vocab_size):
    """The ids of a draft vocabulary, the most frequent first, from a file with {"ids": [...]}."""
    ids = read_json(Path(path)).get("ids")
    fine = isinstance(ids, list) and all(type(i) is int and 0 <= i < vocab_size for i in ids)
    if not fine or not 0 < len(set(ids)) == len(ids):
        raise ValueError(f'{path}: expected different token ids from 0 to {vocab_size - 1} under "ids", as '
                         "search.py --draft-vocab writes them")
    return ids


def read_beside(folder, name, read, size):
    """read(FILE, size) of NAME.json beside the weights. None where there is no such file, or one that is not
    ours: what lies beside the weights by chance must not end a run."""
    path = Path(folder) / f"{name}.json"
    try:
        return read(str(path), size) if path.is_file() else None
    except (ValueError, OSError) as e:
        print(f"left out: {e}", file=sys.stderr, flush=True)
        return None


def read_costs(path, c):
    """The Costs that `lab.bench costs --out` wrote for a model of this shape: {"sublayers": [2L numbers],
    "head": number}, and maybe "blocks": [[T, relative to one token], ...], "slot", "call" and "at"; see
    Costs."""
    raw = read_json(Path(path))
    parts, at, slot, call = (raw.get(key, usual) for key, usual in
                             (("sublayers", None), ("at", 0), ("slot", 0.0), ("call", 0.0)))
    fine = isinstance(parts, list) and all(map(is_cost, [*parts, raw.get("head")]))
    if not fine or len(parts) != 2 * c.n_layers or sum(parts) <= 0:
        raise ValueError(f'{path}: expected {2 * c.n_layers} costs under "sublayers" and one under "head", '
                         "as lab.bench costs --out writes them for this model")
    blocks = raw.get("blocks", [[1, 1.0]])
    fine = isinstance(blocks, list) and blocks and all(
        isinstance(b, list) and len(b) == 2 and type(b[0]) is int and is_cost(b[1]) and b[1] > 0
        for b in blocks) and [1] == blocks[0][:1]
    if not fine or any(one[0] >= other[0] for one, other in itertools.pairwise(blocks)):
        raise ValueError(f'{path}: expected pairs under "blocks", [tokens, cost relative to one token], of '
                         "rising widths from 1 on")
    if not (is_cost(slot) and is_cost(call)) or type(at) is not int or at < 0:
        raise ValueError(f'{path}: expected costs under "slot" and "call", and a number of tokens under "at"')
    window = c.window if slot else None
    return Costs(tuple(parts), raw["head"], tuple(map(tuple, blocks)), slot, at, window, call)


def is_cost(x):
    return type(x) in (int, float) and 0 <= x < math.inf


def skip_set(text):
    names = [name.strip() for name in text.split(",")]
    if all(re.fullmatch(r"[am][0-9]{1,6}", name) for name in names):
        return {key: [int(name[1:]) for name in names if name[0] == key[0]] for key in ("attn", "mlp")}
    sets = read_json(Path(text))
    if not {"attn", "mlp"} & sets.keys():
        raise ValueError(f'{text}: expected block numbers under "attn" and "mlp", as search.py writes them')
    return sets


def machine(device):
    """What the model runs on: the name of the GPU, or of the processor with the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'s' * (threads > 1)}"


def lacks_memory(error):
    """Whether there was too little memory. trap: other errors name it, too, such as CUDA's "an illegal memory
    access", and those are bugs."""
    words = "DefaultCPUAllocator", "CUDA error: out of memory"  # torch has no class of its own for these two
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(w in str(error) for w in words)


def open_streams():
    """Let the program print whatever it wants, wherever its output goes."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # trap: it is closed, and then `print` takes the other one
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
    if isinstance(sys.stdout, io.TextIOWrapper):  # not so in a notebook
        sys.stdout.reconfigure(errors="replace")  # the encoding of a pipe may lack most characters


def read_input():
    """Standard input as text; bytes that are not UTF-8 become surrogates."""
    if sys.stdin is None:
        raise ValueError("standard input is closed: give the text in another way")
    sys.stdin.reconfigure(encoding="utf-8-sig", errors="surrogateescape", newline=None)
    return sys.stdin.read()


def main(run, argv):
    """Exit status: what run(argv) returns, or 0; 2 after bad input, told in one line; 130 after Ctrl-C; 141
    if whoever read our output has left."""
    open_streams()
    try:
        return run(argv) or 0
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as e:
        message = str(e)
    except (RuntimeError, MemoryError) as e:
        if not lacks_memory(e):
            raise
        message = "not enough memory for this model, batch and context: try smaller ones, or a half dtype"
    except KeyboardInterrupt:
        return 130
    line = "".join(char if char.isprintable() else "\ufffd" for char in " ".join(message.split()))
    if len(line) > 360:  # a damaged file can quote itself at any length
        line = f"{line[:240]} ... {line[-100:]}"
    print(f"{os.path.basename(run.__code__.co_filename)}: {line}", file=sys.stderr)
    return 2
