"""Two small tables: block verification beside token by token, and packed matrices beside plain ones."""
from lab.bench import __main__ as bench
from lab.bench import block, plain


def test_block_verification_accepts_more(monkeypatch):
    monkeypatch.setattr(block, "GAMMAS", (4,))
    monkeypatch.setattr(block, "TEMPERATURES", (1.0,))
    a = bench.parse(["block", "--model", "weights/stories-plain", "--dtype", "float32", "--new", "24",
                     "--repeats", "1", "--quick", "--prompts", "stories"])
    text, data = block.run(a)
    (row,) = data["rows"]
    assert 1 < row["tau"]["token by token"] and 1 < row["tau"]["block"] and "| 1.0 | 2 / 2 / 2 |" in text


def test_packed_matrices():
    a = bench.parse(["packed", "--model", "weights/stories-plain", "--dtype", "float32", "--repeats", "1"])
    text, data = plain.run_packed(a)
    assert "| packed |" in text and min(data["times"].values()) > 0
