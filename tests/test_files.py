"""Files are replaced as a whole."""
import os
from pathlib import Path

import pytest
from safetensors import SafetensorError, safe_open
from tiny import tree

import checkpoint
from machine import files
from machine.files import cache_file, find_hashed, keep_hashed, replacing

STORED = Path(__file__).resolve().parents[1] / "weights/stories-draft"


@pytest.mark.parametrize("error", [SafetensorError("full"), None])
def test_a_failure_leaves_the_old_file(error, monkeypatch, tmp_path):
    """While the new one is written, or, None, when it is to take the old one's place."""
    def replace(*_):
        assert calls == ["fsync"], "what is not on the disk may be lost in a power cut"
        raise OSError("no")
    path, calls = tmp_path / "file", []
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", lambda _: calls.append("fsync"))
    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="file: cannot be written"), replacing(path) as part:
        part.write_text("half of the n")
        if error:
            raise error
    assert tree(tmp_path) == {str(path): b"old"}


@pytest.mark.parametrize("home", ["caches", "", None])
def test_a_cache_folder_that_is_no_absolute_path_is_ignored(home, monkeypatch, tmp_path):
    """As the XDG specification says; else the cache would lie wherever a program runs."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if home is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", home)
    assert cache_file("x") == tmp_path / ".cache" / "self-speculative-decoding" / "x"


def test_permissions_links_and_what_cannot_be_written(tmp_path):
    """New files have what the umask leaves, old ones keep theirs, and a link stays a link."""
    old, link, dangling = tmp_path / "old", tmp_path / "link", tmp_path / "dangling"
    old.write_text("x")
    old.chmod(0o640)
    link.symlink_to(old)
    dangling.symlink_to(tmp_path / "later")
    umask = os.umask(0o077)
    try:
        for path in (tmp_path / "new", link, dangling):
            files.check_writable(path)
            files.write_file(path, "y")
            assert path.read_text() == "y"
    finally:
        os.umask(umask)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"new": 0o600, "old": 0o640, "link": 0o640, "later": 0o600, "dangling": 0o600}
    assert link.is_symlink() and dangling.is_symlink()
    for path in (tmp_path, tmp_path / "none" / "x", old / "x"):
        for write in (files.check_writable, lambda path: files.write_file(path, "y")):
            with pytest.raises(OSError, match="cannot be written"):
                write(path)


def test_weights_are_not_held_in_memory_by_the_file_that_they_were_read_from(monkeypatch):
    """While a model was loaded, it took twice its size."""
    opened = []

    class Watched:
        def __init__(self, path, framework):
            self.file = safe_open(path, framework)
            self.keys, self.get_slice = self.file.keys, self.file.get_slice
            opened.append(path)

        def __del__(self):
            opened.pop()

    monkeypatch.setattr(checkpoint, "safe_open", Watched)
    found = checkpoint.find_weights(STORED)
    assert not opened
    assert all(stored[:].shape == stored.shape for stored in found.values())
    assert not opened, "a file that stays open keeps its pages"


def test_what_is_kept_is_found_only_as_it_was_written(tmp_path):
    keep_hashed(tmp_path / "rows-1", ".so", b"loops")
    [path] = tmp_path.iterdir()
    for content in (b"loop", b"loopx", b"", b"another library"):
        assert find_hashed(tmp_path / "rows-1", ".so") == path
        path.write_bytes(content)
        assert find_hashed(tmp_path / "rows-1", ".so") is None and not path.exists()
        path.write_bytes(b"loops")
    assert find_hashed(tmp_path / "rows-2", ".so") is None
