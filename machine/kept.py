"""What is kept between runs in the user's cache folder.

These are compiled loops and measured costs. Anything here can be made again, and its name says what
it depends on.
"""
import hashlib
import os
import platform
from pathlib import Path

import torch

from files import replacing


def cache_file(name):
    """The path, in the user's cache folder, of a file that can be made again."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(home):     # ignored, as the XDG specification says
        home = os.path.expanduser("~/.cache")
    return Path(home) / "self-speculative-decoding" / name


def keep(path, content):
    """Write bytes to a file in the cache folder. Raises OSError if that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, f".{os.getpid()}") as temporary:
        temporary.write_bytes(content)


def hardware(device):
    """What the model runs on, as the name of the GPU or of the processor with the number of
    threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'s' * (threads > 1)}"


def identity(model, *facts):
    """A hash of everything that measured costs depend on. This is torch, the machine with its
    number of threads, the shapes and dtypes of the weights (not their values), and these facts."""
    weights = [(name, tuple(w.shape), w.dtype) for name, w in model.state_dict().items()]
    device = model.tok.device
    facts = torch.__version__, hardware(device), device.type, model.c, weights, facts
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
