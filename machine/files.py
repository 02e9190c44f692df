"""Notes on standard error; files that are replaced as a whole; and the user's cache folder, which
keeps compiled loops and measured costs between runs. All that is in it can be made again, and the
name of a file says what it depends on.
"""
import contextlib
import hashlib
import os
import platform
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError

from model import Refused


def note(topic, line):
    """A line on standard error, apart from what a command prints."""
    print(f"{topic}: {line}", file=sys.stderr, flush=True)


def open_temporary(path, writer=""):
    """(the file that a link at `path` leads to, an empty temporary file in its folder, and the
    permissions of the new file, which are the old file's or what the umask leaves)."""
    target = Path(os.path.realpath(path))
    if target.exists() and not (target.is_file() and os.access(target, os.W_OK)):
        raise OSError("not a file that may be written")
    temporary = target.with_name(f"{target.name}{writer}.part")
    temporary.touch()
    mode = (target if target.exists() else temporary).stat().st_mode
    return target, temporary, mode


@contextmanager
def replacing(path, writer=""):
    """A temporary path to write to, which replaces `path` once all is written. After a kill at any
    moment either the old file is there or the new one. `writer` is part of the temporary name, if
    several processes may write at once. Raises OSError if it cannot be written."""
    temporary = None
    try:
        target, temporary, mode = open_temporary(path, writer)
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(mode)   # trap: safetensors makes new files readable only by their owner
        os.replace(temporary, target)
    except (OSError, SafetensorError) as e:
        why = e
        if isinstance(e, OSError):
            why = e.strerror or e
        raise OSError(f"{path}: cannot be written ({why}); what was there before is "
                      "untouched") from None
    finally:
        if temporary:
            temporary.unlink(missing_ok=True)


def check_writable(path):
    """Raise OSError where `replacing` would fail only after minutes of work."""
    try:
        open_temporary(path)[1].unlink()
    except OSError as e:
        raise OSError(f"{path}: cannot be written ({e.strerror or e})") from None


def write_file(path, text):
    """Replace a file by a text; see `replacing`."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_beside(path, read, *args):
    """read(path, *args) of a file that may lie beside the weights. Returns None if there is no
    such file or if it cannot be used, because a stray file must not end a run."""
    try:
        return read(path, *args) if path.is_file() else None
    except (Refused, OSError) as e:
        note("left out", e)
        return None


# --- the cache folder


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


def digest(*contents):
    """A short hash of bytes."""
    return hashlib.sha256(b"\0".join(contents)).hexdigest()[:16]


def keep_hashed(stem, suffix, content):
    """`keep` in a file whose name ends with the hash of its content. `stem` is its path
    without the hash and the suffix."""
    keep(stem.with_name(f"{stem.name}-{digest(content)}{suffix}"), content)


def find_hashed(stem, suffix):
    """The path of what `keep_hashed` wrote, or None. A file that was damaged later is removed."""
    for path in stem.parent.glob(f"{stem.name}-*{suffix}"):
        with contextlib.suppress(OSError):
            if path.stem.endswith(digest(path.read_bytes())):
                return path
            path.unlink()
    return None


def processor():
    """What tells this processor from others. A model's name is not enough, because ARM processors
    have none and virtual machines share theirs."""
    names = ("model name", "flags", "Features", "CPU implementer", "CPU part", "CPU variant")
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")
    except OSError:
        return platform.processor() or platform.machine()
    return "\n".join(line for line in first.splitlines() if line.startswith(names))


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
    machine = processor(), hardware(device), device.type
    return digest(repr((torch.__version__, machine, model.c, weights, facts)).encode())
