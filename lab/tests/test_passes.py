"""Small tables of plain decoding, products of few rows, exact texts and block verification."""
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


def test_what_changes_an_exact_text_and_what_does_not(monkeypatch):
    """And the count counts. Where each drafted text ends in another token, none is the same."""
    a = bench.parse(["exact", *PLAIN, "--new", "8", "--repeats", "1", "--quick", "3"])
    text, data = exact.run(a)
    for what, cells in data["found"].items():
        if what != "on one thread":     # where a sum may have another order
            assert cells["greedy, with --exact"] == cells["T 0.8, with --exact"] == "3 of 3", what
        assert float(cells["T 0.8, time"]) > 0
    assert "| in a batch | 3 of 3 | " in text and "| drafted by itself in int4 | " in text
    write = exact.write

    def wrong(*args, draft=None):
        found = write(*args, **({"draft": draft} if draft else {}))
        return [[*ids[:-1], ids[-1] + bool(draft)] for ids in found]

    monkeypatch.setattr(exact, "write", wrong)
    a.repeats = None
    found = exact.run(a)[1]["found"]
    assert {*found["drafted by lookup"].values()} == {"0 of 3"}


def test_block_verification_is_compared_for_each_draft(monkeypatch):
    monkeypatch.setattr(block, "GAMMAS", (4,))
    monkeypatch.setattr(block, "TEMPERATURES", (1.0,))
    a = bench.parse(["block", *PLAIN, "--dtype", "float32", "--new", "24", "--quick", "--prompts",
                     "stories", "--draft", "exit", "int4"])
    text, data = block.run(a)
    left_early, rounded = (row["tau"] for row in data["rows"])
    assert min(*left_early.values(), *rounded.values()) > 1
    assert left_early["token by token"] != left_early["block"], "by the same seeds"
    assert "| int4 | 1.0 | 4 | " in text
