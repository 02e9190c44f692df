"""Files that are replaced as a whole, and files that may lie beside the weights."""
from machine.kept import note, open_temporary, replacing
from model import Refused


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
    """read(path, *args) of a file that may lie beside the weights. It is None if there is no such
    file or if it cannot be used, because a stray file must not end a run."""
    try:
        return read(path, *args) if path.is_file() else None
    except (Refused, OSError) as e:
        note("left out", e)
        return None
