"""Small tables of plain decoding, products of few rows, long prompts, exact texts and block
verification."""
import pytest
import torch

from lab.bench import __main__ as bench
from lab.bench import block, exact, passes

PLAIN = ["--model", "weights/stories-plain"]


def test_plain_decoding_compared_with_transformers(monkeypatch):
    """It stopped once at the first comparison of two texts."""
    monkeypatch.setattr(passes, "compiled", lambda theirs, prompt, new: lambda: passes.their_text(
        theirs, torch.tensor([prompt]), new)[0].tolist())       # compiling takes half a minute
    a = bench.parse(["plain", *PLAIN, "--dtype", "float32", "--new", "8", "--repeats", "1"])
    text, data = passes.run_plain(a)
    assert [*data["ways"]] == ["transformers", "transformers, compiled", "ours", "ours, fast"]
    assert all(way["same"] == 8 for way in data["ways"].values()) and "| ours, fast | " in text


def test_products_of_few_rows():
    """Of every form, from one row to sixteen, and reading its bytes; and where there are no
    loops."""
    flags = ["rows", *PLAIN, "--repeats", "1"]
    text, data = passes.run_rows(bench.parse([*flags, "--dtype", "float32"]))
    forms = "F.linear", "the loop", "int8", "int8, x rounded", "int4", "int4, x rounded"
    assert {*data["times"]} == {f"{form}, {what}" for form in forms
                                for what in (*passes.ROWS, "memory")}
    assert all(f"| {form} | " in text for form in forms)
    with pytest.raises(ValueError, match="^no loops for float64 on cpu"):
        passes.run_rows(bench.parse([*flags, "--dtype", "float64"]))


def test_reading_a_prompt(monkeypatch):
    monkeypatch.setattr(passes, "PROMPTS", (8, 80))
    text, data = passes.run_prompts(bench.parse(["prompts", *PLAIN, "--repeats", "1"]))
    assert [row[0] for row in data["rows"]] == ["8", "80"] and "| fused, times as fast |" in text


def test_what_changes_an_exact_text_and_what_does_not(monkeypatch):
    """And the count counts. Where each drafted text ends in another token, none is the same."""
    a = bench.parse(["exact", *PLAIN, "--new", "8", "--repeats", "1", "--quick", "3"])
    text, data = exact.run(a)
    kept = {what: found for what, found in data["counts"].items() if "with --exact" in what}
    # on one thread a sum may have another order
    assert {(found["texts"], found["rows"]) for what, found in kept.items()
            if "thread" not in what} == {(3, 1.0)}
    assert len(kept) == 2 * 7 and min(found["time"] for found in kept.values()) > 0
    assert "| in a batch | 3 of 3 (" in text
    write = exact.write

    def wrong(model, prompts, new, slots, coins, probs, seeds, drafter=None):
        found, seconds = write(model, prompts, new, slots, coins, probs, seeds, drafter)
        found[0][0][-1] += drafter is not None
        return found, seconds

    monkeypatch.setattr(exact, "write", wrong)
    a.quick, a.repeats = 1, None
    assert {found["texts"] for what, found in exact.run(a)[1]["counts"].items()
            if what.startswith("drafted")} == {0}


def test_block_verification_accepts_more(monkeypatch):
    monkeypatch.setattr(block, "GAMMAS", (4,))
    monkeypatch.setattr(block, "TEMPERATURES", (1.0,))
    a = bench.parse(["block", *PLAIN, "--dtype", "float32", "--new", "24", "--quick", "--prompts",
                     "stories"])
    text, data = block.run(a)
    (row,) = data["rows"]
    assert 1 < row["tau"]["token by token"] and 1 < row["tau"]["block"]
    assert "| exit | 1.0 | 4 | " in text
