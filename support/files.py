"""Notes on standard error, and files that are replaced as a whole: an interrupted run leaves every
file either old or new, never half."""
import os
import sys
from contextlib import contextmanager
from pathlib import Path

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


def check_writable(path):
    """Raise OSError where `replacing` would fail only after minutes of work."""
    try:
        open_temporary(path)[1].unlink()
    except OSError as e:
        raise OSError(f"{path}: cannot be written ({e.strerror or e})") from None


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


def write_file(path, text):
    """Replace a file by a text; see `replacing`."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_beside(path, read, *args):
    """read(path, *args) of a file that may lie beside the weights. It is None if there is no such
    file or if it cannot be used, because a stray file must not end a run."""
    try:
        return read(path, *args) if path.is_file() else None
    except (Refused, OSError) as e:
        note("left out", e)
        return None
