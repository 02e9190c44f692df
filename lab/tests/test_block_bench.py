"""Small tables of block verification and token by token, plain decoding, products of few rows, long
prompts, exact texts."""
import pytest
import torch

from lab.bench import __main__ as bench
from lab.bench import block, exact, plain, rows


def test_block_verification_accepts_more(monkeypatch):
    monkeypatch.setattr(block, "GAMMAS", (4,))
    monkeypatch.setattr(block, "TEMPERATURES", (1.0,))
    a = bench.parse(["block", "--model", "weights/stories-plain", "--dtype", "float32", "--new",
                     "24", "--quick", "--prompts", "stories"])
    text, data = block.run(a)
    (row,) = data["rows"]
    assert 1 < row["tau"]["token by token"] and 1 < row["tau"]["block"] and "| 1.0 | 4 | " in text


def test_plain_decoding_beside_transformers(monkeypatch):
    """With --fast it stopped at the first comparison of two texts."""
    monkeypatch.setattr(plain, "BATCHES", (1, 2))
    monkeypatch.setattr(plain, "compiled", lambda theirs, prompt, new: lambda: plain.their_text(
        theirs, torch.tensor([prompt]), new).tolist())      # compiling takes half a minute
    text, data = plain.run(
        bench.parse(["plain", "--fast", "--model", "weights/stories-plain", "--new", "8",
                     "--repeats", "1"]))
    assert [*data["results"]] == ["stories-plain, bfloat16", "stories-plain, float32"]
    for found in data["results"].values():
        assert found["ways"].keys() == {"transformers", "ours", "transformers, compiled",
                                        "ours, fast"}
    ways = found["ways"]
    assert all(way["same"] == 8 for way in ways.values()) and ways["ours, fast"]["share"] > 0


def test_products_of_few_rows():
    """Of every form, from one row to sixteen, beside reading its bytes; and where
    there are no loops."""
    flags = ["rows", "--model", "weights/stories-plain", "--repeats", "1"]
    text, data = rows.run(bench.parse([*flags, "--dtype", "float32"]))
    forms = "F.linear", "the loop", "int8", "int8, x rounded", "int4", "int4, x rounded"
    assert {*data["times"]} == {f"{form}, {what}" for form in forms
                                for what in (*rows.ROWS, "memory")}
    assert all(f"| {form} | " in text for form in forms) and min(data["times"].values()) > 0
    with pytest.raises(ValueError, match="^no loops for float64 on cpu"):
        rows.run(bench.parse([*flags, "--dtype", "float64"]))


def test_reading_a_prompt(monkeypatch):
    monkeypatch.setattr(plain, "PROMPTS", (8, 80))
    a = bench.parse(["prompts", "--model", "weights/stories-plain", "--repeats", "1"])
    text, data = plain.run_prompts(a)
    assert [row[0] for row in data["rows"]] == ["8", "80"] and "| fused, times as fast |" in text


def test_what_changes_an_exact_text_and_what_does_not(monkeypatch):
    monkeypatch.setattr(exact, "BLOCKS", (3, 7))
    monkeypatch.setattr(exact, "MORE", (100,))
    a = bench.parse(["exact", "--model", "weights/stories-plain", "--new", "8", "--repeats", "1"])
    text, data = exact.run(a)
    counts = {what: rows for (what, _), rows in data["counts"]}
    kept = ("drafted by an exit", "drafted by lookup", "in blocks of 3", "in blocks of 7",
            "in a batch of four")
    for what in kept:
        texts, equal, compared = counts[what]
        assert texts == 4 and equal == compared == 4 * 8, what
    assert "| in a batch of four | 4 of 4 | 100% | " in text and min(data["cost"].values()) > 0


def test_of_three_prompts_all_texts_are_the_same_with_exact(monkeypatch):
    """And the count counts. Where each drafted text ends in another token, none is the same."""
    a = bench.parse(["exact", "--model", "weights/stories-plain", "--new", "8", "--prompts", "3"])
    text, data = exact.run(a)
    kept = {what: count for what, count in data["counts"].items()
            if what.endswith(", with --exact")}
    assert {*kept.values()} == {3} and {what.split(",")[0]
                                        for what in kept} >= {"lookup", "itself in int4"}
    assert "| lookup | " in text and text.count("3 of 3") >= len(kept)
    write = exact.write

    def wrong(model, coins, probs, prompts, seeds, new, slots, drafter=None):
        (found,), seconds = write(model, coins, probs, prompts, seeds, new, slots, drafter)
        found[0][-1] += drafter is not None
        return [found], seconds

    monkeypatch.setattr(exact, "write", wrong)
    assert {*exact.run(a)[1]["counts"].values()} == {0}
