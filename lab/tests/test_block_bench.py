"""Small tables: block verification beside token by token, packed matrices beside plain ones, long prompts,
and exact texts."""
from lab.bench import __main__ as bench
from lab.bench import block, exact, plain


def test_block_verification_accepts_more(monkeypatch):
    monkeypatch.setattr(block, "GAMMAS", (4,))
    monkeypatch.setattr(block, "TEMPERATURES", (1.0,))
    a = bench.parse(["block", "--model", "weights/stories-plain", "--dtype", "float32", "--new", "24",
                     "--quick", "--prompts", "stories"])
    text, data = block.run(a)
    (row,) = data["rows"]
    assert 1 < row["tau"]["token by token"] and 1 < row["tau"]["block"] and "| 1.0 | 2 / 2 / 2 |" in text


def test_packed_matrices():
    a = bench.parse(["packed", "--model", "weights/stories-plain", "--dtype", "float32", "--repeats", "1"])
    text, data = plain.run_packed(a)
    assert "| packed |" in text and min(data["times"].values()) > 0


def test_reading_a_prompt(monkeypatch):
    monkeypatch.setattr(plain, "PROMPTS", (8, 80))
    a = bench.parse(["prompts", "--model", "weights/stories-plain", "--repeats", "1"])
    text, data = plain.run_prompts(a)
    assert [row[0] for row in data["rows"]] == ["8", "80"] and "| fused, times as fast |" in text


def test_what_changes_an_exact_text_and_what_does_not():
    a = bench.parse(["exact", "--model", "weights/stories-plain", "--new", "8"])
    text, data = exact.run(a)
    counts = {what: rows for (what, _), rows in data["counts"]}
    for what in "drafted by an exit", "drafted by lookup", "in a batch of four":
        texts, equal, compared = counts[what]
        assert texts == 4 and equal == compared == 4 * 8, what
    assert "| in a batch of four | 4 of 4 | 100% | 4 of 4 | 100% |" in text
