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
