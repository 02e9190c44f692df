"""Files are replaced as a whole."""
import os

import pytest
from safetensors import SafetensorError
from tiny import tree

from support import files


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
    with pytest.raises(OSError, match="file: cannot be written"), files.replacing(path) as part:
        part.write_text("half of the n")
        if error:
            raise error
    assert tree(tmp_path) == {str(path): b"old"}


def test_two_runs_may_keep_one_file_at_once(monkeypatch, tmp_path):
    """While one of them is in the middle of writing, the other one does all of it."""
    honest, path = os.fsync, tmp_path / "cache" / "a"

    def interrupted(file):
        monkeypatch.setattr(os, "fsync", honest)
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: 12345)
            files.keep("a", b"other", path.parent)
        assert files.kept("a", path.parent).read_bytes() == b"other"

    monkeypatch.setattr(os, "fsync", interrupted)
    assert files.keep("a", b"own", path.parent) == files.kept("a", path.parent) == path
    assert path.read_bytes() == b"own"
    assert [p.name for p in path.parent.iterdir()] == ["a"]
