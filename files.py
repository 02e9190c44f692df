"""Reading and writing files. Bad input gives one clear line, and a kill at any moment loses
nothing.

A new file replaces the old one only once all of it is on the disk.
"""
import json
import os
import re
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer


def note(topic, line):
    """A line on standard error, apart from what a command prints."""
    print(f"{topic}: {line}", file=sys.stderr, flush=True)


def begin(path, writer=""):
    """(the file that a link at `path` leads to, an empty temporary file in its folder, and the
    permissions of the new file, which are the old file's or what the umask leaves)."""
    target = Path(os.path.realpath(path))
    if target.exists() and not (target.is_file() and os.access(target, os.W_OK)):
        raise OSError("not a file that may be written")
    temporary = target.with_name(f"{target.name}{writer}.part")
    temporary.touch()
    mode = (target if target.exists() else temporary).stat().st_mode
    return target, temporary, mode


def check_writable(path):
    """Raise OSError where `replacing` would fail only after minutes of work."""
    try:
        begin(path)[1].unlink()
    except OSError as e:
        raise OSError(f"{path}: cannot be written ({e.strerror or e})") from None


@contextmanager
def replacing(path, writer=""):
    """A temporary path to write to, which replaces `path` once all is written. After a kill at any
    moment either the old file is there or the new one. `writer` is part of the temporary name, if
    several processes may write at once. Raises OSError if it cannot be written."""
    temporary = None
    try:
        target, temporary, mode = begin(path, writer)
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


def write_file(path, text):
    """Replace a file by a text; see `replacing`."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def check_there(path):
    """Raise FileNotFoundError where there is no file. A pipe counts as one."""
    if path.is_symlink() and not path.exists():
        raise FileNotFoundError(f"{path}: a broken link, probably from an interrupted download; "
                                "download it again")
    if not path.exists() or path.is_dir():
        raise FileNotFoundError(f"{path}: no such file")


def check_folder(folder):
    """Raise FileNotFoundError where there is no folder."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: there is no such folder{download_first(folder)}")


def download_first(name):
    """The end of a message that says how to get a folder of this name. It is empty unless the name
    looks like OWNER/MODEL, a model on the Hugging Face hub."""
    owner, _, model = str(name).partition("/")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)) or Path(owner).exists():
        return ""
    return ("; if it is a model on the Hugging Face hub, download it first: "
            f"hf download {name} --local-dir runs/{model}")


def check_fetched(path, start):
    """Raise ValueError for the pointer that Git leaves in place of a file that LFS has not
    fetched."""
    if start.startswith("version https://git-lfs"):
        raise ValueError(f"{path}: a Git LFS pointer instead of the file: run git lfs pull in its "
                         "folder")


def read_text(path):
    check_there(path)
    try:
        text = path.read_text(encoding="utf-8-sig")     # skips a byte order mark
    except (UnicodeDecodeError, OSError) as e:
        raise ValueError(f"{path}: not readable as UTF-8 text ({e})") from None
    check_fetched(path, text)
    return text


def parse_json(text):
    """The value of a JSON text; None if it is not valid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def read_json(path):
    content = parse_json(read_text(path))
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, whole and valid")
    return content


@contextmanager
def guarded(what):
    """Any exception raised inside becomes a ValueError of one line.

    trap: when the tokenizer library, which is written in Rust, panics at a damaged file, it raises
    a BaseException, not an Exception.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as e:
        reason = str(e) if isinstance(e, ValueError) else repr(e)
        raise ValueError(f"{what}: {' '.join(reason.split())[:300]}") from None


def open_with(reader, path, what):
    """reader(path). Raises FileNotFoundError or ValueError. what: the message if the reader
    fails."""
    check_there(path)
    with open(path, encoding="latin-1") as file:    # which takes any bytes
        check_fetched(path, file.read(64))
    with guarded(f"{path}: {what}"):
        return reader(str(path))


def read_tokenizer(folder):
    """The tokenizer of a Hugging Face folder."""
    tokenizer = open_with(Tokenizer.from_file, folder / "tokenizer.json", "not a readable "
                                                                          "tokenizer")
    tokenizer.no_padding()  # trap: the file may ask for a length, but a prompt must stay as it is
    tokenizer.no_truncation()
    return tokenizer


@dataclass(frozen=True)
class Stored:
    """A tensor of a safetensors file; indexing reads it. For that the file is opened again, because
    all that was read of an open file stays in memory."""
    path: str
    name: str
    dtype: str
    shape: tuple

    def __getitem__(self, index):
        return safe_open(self.path, framework="pt").get_slice(self.name)[index]


def find_weights(folder):
    """{tensor name: its Stored}, from the single file of a Hugging Face folder or from all files
    that its index names."""
    single = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    paths = [single]
    found = {}
    if not single.is_file() and index.is_file():
        listed = read_json(index)
        with guarded(f"{index}: weight_map must name a file for each tensor"):
            paths = [folder / name for name in sorted(set(listed["weight_map"].values()))]
            if any(path.parent != folder or path.name == ".." for path in paths):
                raise ValueError("a file outside this folder")
    elif not single.is_file() and any(folder.glob("*.bin")):
        raise ValueError(f"{folder}: only pickles, which can run code and are never opened; "
                         "convert them by transformers: "
                         "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER)")
    reader = partial(safe_open, framework="pt")
    for path in paths:
        file = open_with(reader, path, "truncated or damaged safetensors file")
        for name in file.keys():
            part = file.get_slice(name)
            found[name] = Stored(str(path), name, part.get_dtype(), tuple(part.get_shape()))
    return found
