"""What the command lines share. Bad input is one clear line and exit status 2, never a traceback.

Refused and OSError are one-line messages to the user, wherever they are raised. Any other exception
is our own bug, and shows its traceback.
"""
import argparse
import contextlib
import io
import math
import os
import sys
from pathlib import Path

import torch

from model import Refused

DTYPES = {name: vars(torch)[name] for name in ("float32", "bfloat16", "float16", "float64")}


class Parser(argparse.ArgumentParser):
    """argparse, except that a wrong flag raises Refused like all other bad input."""

    def error(self, message):
        raise Refused(f"{message}; see --help")


# --- a command's streams and threads


def open_streams():
    """Put the empty device where standard input or output was closed, as by `<&-` and `>&-`."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if vars(sys)[name] is None:
            setattr(sys, name, open(os.devnull, mode))


def quota(root=Path("/")):
    """How many processors the control group of this process may use. Infinity if it may use all.
    Containers are limited in this way, and torch starts a thread for each processor of the host."""
    least = math.inf
    try:
        path = (root / "proc/self/cgroup").read_text().partition("0::/")[2].split("\n")[0]
    except OSError:
        return least
    top = root / "sys/fs/cgroup"
    for folder in (top / path, *(top / path).parents):      # each of them limits those below it
        with contextlib.suppress(OSError, ValueError):
            most, period = (folder / "cpu.max").read_text().split()
            least = min(least, int(most) / int(period))
    with contextlib.suppress(OSError, ValueError):      # of version 1
        most, period = (int((top / f"cpu/cpu.cfs_{name}_us").read_text())
                        for name in ("quota", "period"))
        if most > 0:
            least = min(least, most / period)
    return least


def limit_threads():
    """Use no more threads than the quota allows, unless OMP_NUM_THREADS says how many."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, int(min(torch.get_num_threads(), quota()))))


def main(run, argv):
    """Returns the exit status, which is what run(argv) returns, or 0. It is 2 after bad input, with
    one line that says why, 130 after Ctrl-C, and 141 if the program that reads our output has
    ended."""
    open_streams()
    limit_threads()
    if isinstance(sys.stdout, io.TextIOWrapper):  # not so in a notebook
        sys.stdout.reconfigure(errors="replace")  # the encoding of a pipe may lack most characters
    try:
        status = run(argv) or 0
        sys.stdout.flush()   # trap: at the interpreter's exit it is too late to catch a closed pipe
        return status
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Refused as e:
        message = str(e)
    except OSError as e:
        message = str(e)
        if e.filename and e.strerror:
            message = f"{e.filename}: {e.strerror}"
    except (RuntimeError, MemoryError) as e:
        # torch has no class for these. trap: CUDA's "illegal memory access" mentions memory, and is
        # a bug
        words = "DefaultCPUAllocator", "CUDA error: out of memory"
        memory = isinstance(e, (MemoryError, torch.OutOfMemoryError))
        if not memory and not any(word in str(e) for word in words):
            raise
        message = ("not enough memory for this model, batch and context: "
                   "try smaller ones, or half precision")
    except KeyboardInterrupt:
        return 130
    line = "".join(char if char.isprintable() else "\ufffd" for char in " ".join(message.split()))
    print(f"{name_of(run)}: {line}", file=sys.stderr)
    return 2


def name_of(run):
    """The name of a command as it is typed, from the file of `run` or a package's folders."""
    path = Path(run.__code__.co_filename)
    if path.name == "__main__.py":
        return f"{path.parts[-3]}.{path.parts[-2]}"
    return path.name
