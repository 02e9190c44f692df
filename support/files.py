"""Reading and writing files, so that bad input gives one clear line and a kill at any moment loses nothing.

The one thing to remember: a new file takes the place of the old one only once all of it is on the disk.
"""
import itertools
import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None
    import msvcrt

TEMPORARY = ".part"  # the ending of a file that is being written
BOUNDARY = "<|endoftext|>"  # separates the documents of a file; its id begins a document and ends an answer
PROMPTS = Path(__file__).resolve().parent / "prompts"
LOCK = ".lock"  # an empty file, held open by the process that writes to its folder


@contextmanager
def replacing(path, writer=""):
    """A temporary path to write to, which takes the place of `path` once all is written. After a
    kill at any moment either the old file is there or the new one. writer: part of the temporary
    name, where several processes may write at once. Raises OSError, in one line, if it cannot be
    written.
    """
    temporary = path.with_name(f"{path.name}{writer}{TEMPORARY}")
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
        return path.read_text(encoding="utf-8-sig")  # without the mark that some editors put first
    except (UnicodeDecodeError, OSError) as e:
        raise ValueError(f"{path}: not readable as UTF-8 text ({e})") from None


def read_lines(path):
    """[(number, line)] of the lines that are not empty."""
    # trap: `splitlines` also splits at U+2028 and others, which a JSON text may hold
    return [(i, line) for i, line in enumerate(read_text(path).split("\n"), 1) if line.strip()]


def read_jsonl(path, key, expected):
    """The texts under `key` of a file with one JSON object per line. A .json file may instead hold
    one list, of such objects or of texts. `expected`: what a message says is missing."""
    whole = parse(read_text(path)) if path.suffix.lower() == ".json" else None
    listed, texts = isinstance(whole, list), []
    entries = ([(f"entry {i}", entry) for i, entry in enumerate(whole, 1)] if listed else
               [(f"line {i}", parse(line)) for i, line in read_lines(path)])
    for place, entry in entries:
        text = entry.get(key) if isinstance(entry, dict) else entry if listed else None
        if not isinstance(text, str) or not text:
            raise ValueError(f"{path}, {place}: expected a JSON object with {expected}")
        texts.append(text)
    return texts


def read_documents(path):
    """The documents of a text file, which `<|endoftext|>` separates, or those under "text" in the lines of a
    .jsonl file. Raises ValueError where there is none."""
    if path.suffix.lower() in (".json", ".jsonl"):
        documents = read_jsonl(path, "text", '"text"')
    else:
        documents = [text for part in read_text(path).split(BOUNDARY) if (text := part.strip("\n"))]
    if not documents:
        raise ValueError(f"{path}: no text in it")
    return documents


def read_prompts(name):
    """The lines of support/prompts/NAME.jsonl: {"prompt", "text", "source", "licence"}."""
    return [parse(line) for _, line in read_lines(PROMPTS / f"{name}.jsonl")]


def parse(text):
    """The value of a JSON text; None where it is not valid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def resume(path, header):
    """Make a log of JSON lines ready to be appended to. Returns the lines below its `header` that an earlier
    run wrote, up to one that a kill has cut off; none if it had another header. Raises ValueError for a
    folder that holds something else."""
    found, *lines = map(parse, (read_text(path) if path.is_file() else "").split("\n"))
    if found == header:
        lines = list(itertools.takewhile(bool, lines))
    elif isinstance(found, dict) and found.keys() == header.keys():
        print(f"{path}: of another model, text or flags; the search starts anew", file=sys.stderr)
        lines = []
    elif path.parent.exists() and any(path.parent.iterdir()):
        raise ValueError(f"{path.parent} is not empty, and no search made it: name another --out")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, "".join(json.dumps(line) + "\n" for line in [header, *lines]))
    return lines


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
    """Where this user's programs keep what they can make again. OSError if there is no home."""
    try:
        home = (os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
                or Path.home() / ".cache")
    except RuntimeError:  # HOME is not set, and the system does not know the user
        raise OSError("no home folder: name a cache folder in XDG_CACHE_HOME") from None
    return Path(home) / "self-speculative-decoding"


def kept(name, folder=None):
    """The path of a file in the cache folder; None if it is not there or cannot be read."""
    try:
        path = (folder or cache_folder()) / name
    except OSError:
        return None
    return path if os.path.isfile(path) and os.access(path, os.R_OK) else None


def keep(name, content, folder=None):
    """Write bytes to a file in the cache folder, and return its path. Raises OSError, in one line,
    if that is not possible: the caller reports it and goes on."""
    path = (folder or cache_folder()) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, f".{os.getpid()}") as temporary:
        temporary.write_bytes(content)
    return path
