"""Reading and writing files, so that bad input gives one clear line and a kill at any moment loses nothing.

The one thing to remember: a new file takes the place of the old one only once all of it is on the disk.
"""
import json
import os
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None
    import msvcrt

TEMPORARY = ".part"  # the ending of a file that is being written
LOCK = ".lock"  # an empty file, held open by the process that writes to its folder


@contextmanager
def replacing(path):
    """A temporary path to write to, which takes the place of `path` once all is written. After a kill at any
    moment either the old file is there or the new one. Raises OSError, in one line, if it cannot be written.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)  # safetensors lets only the owner read
        os.replace(temporary, path)
    except (OSError, SafetensorError) as e:
        raise OSError(f"{path}: cannot be written ({e}); what was there before is untouched") from None
    finally:
        temporary.unlink(missing_ok=True)


def write_file(path, text):
    """Let a text take the place of a file; see `replacing`."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_text(path):
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        return path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as e:
        raise ValueError(f"{path}: not readable as UTF-8 text ({e})") from None


def read_lines(path):
    """[(number, line)] of the lines that are not empty."""
    # trap: `splitlines` also splits at U+2028 and others, which a JSON text may hold
    return [(i, line) for i, line in enumerate(read_text(path).split("\n"), 1) if line.strip()]


def read_jsonl(path, key, expected):
    """The texts under `key` of a file that holds a JSON object in each line. `expected`: what a message says
    is missing."""
    texts = []
    for number, line in read_lines(path):
        try:
            texts.append(json.loads(line)[key])
        except (ValueError, KeyError, TypeError, RecursionError):
            texts.append(None)
        if not isinstance(texts[-1], str) or not texts[-1]:
            raise ValueError(f"{path}, line {number}: expected a JSON object with {expected}")
    return texts


def read_json(path):
    try:
        content = json.loads(read_text(path))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path}: not readable as JSON ({e})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def lock(folder):
    """The lock of a folder, as an open file: until it is closed, every other call raises ValueError, in this
    process and in others. The system closes it when its process ends, even if it is killed; an empty file
    stays and locks nothing."""
    file = open(folder / LOCK, "ab")
    try:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    except (BlockingIOError, PermissionError):
        file.close()
        raise ValueError(f"{folder}: another process is writing here: wait, or name another --out") from None
    return file


def cache_folder():
    """Where this user's programs keep what they can make again."""
    home = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or Path.home() / ".cache"
    return Path(home) / "self-speculative-decoding"
