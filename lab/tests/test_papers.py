"""Every system of docs/papers.md runs, by the commands that stand in its row: as they are, in fast
and in exact passes, sampled and with a batch."""
import json
import re
import shlex
from pathlib import Path

import pytest

import generate
from lab import hamburger, spectr, train_heads
from lab.bench import __main__ as bench
from support import compare

ROOT = Path(__file__).resolve().parents[2]
ROWS = [row.split(" | ")
        for row in (ROOT / "docs" / "papers.md").read_text(encoding="utf-8").splitlines()
        if row.startswith("| ") and not row.startswith("| paper")]
PROGRAMS = {"lab.bench": bench.main, "lab.hamburger": hamburger.main, "lab.spectr": spectr.main,
            "lab.train_heads": train_heads.main}
LITTLE = {"lab.train_heads": ["--text", "1e3", "--tokens", "1e3", "--context", "64"],
          "lab.hamburger": ["--max-new", "8", "--steps", "1"],
          "lab.bench": ["--new", "8", "--prompts", "stories"]}


COMMON = ["--max-new", "8", "--dtype", "float32", "--device", "cpu", "--json"]
WAYS = (        # with a batch, or with one prompt
    ("one", ["--fast"]), ("one", ["--exact"]), ("batch", ["--exact", "--temperature", "0.8"]),
    ("one", ["--temperature", "0.8"]), ("batch", []))
TREES = "a tree cannot be exact", "not allowed with argument"     # --tree, and what SWIFT drafts


def run(capsys, *argv):
    """(status, the JSON that it prints or None, standard error)"""
    capsys.readouterr()
    status = generate.main([*argv, *COMMON])
    out, err = capsys.readouterr()
    return status, json.loads(out) if out else None, err


def check_ways(capsys, words, batch):
    """A command runs in every way, or one line says why not. Without sampling, and in exact passes
    with it, the text is that of plain decoding."""
    prompts = {"one": ["Once upon a time"], "batch": ["--prompt-file", batch]}
    for texts, way in WAYS:
        status, r, err = run(capsys, *prompts[texts], *words, *way, "--compare")
        flags = {*words, *way}
        if status == 2 and "--exact" in way:
            assert any(why in err for why in TREES) and err.count("\n") == 1, (words, way, err)
            continue
        assert status == 0, (words, way, err)
        compared = "--temperature" not in flags or "--exact" in flags
        assert r["identical"] is (True if compared else None), (words, way)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip("| ")[:20])
def test_a_row_runs_for_eight_tokens(row, tmp_path, capsys, monkeypatch):
    """Greedy drafts write the text of plain decoding. What is trained is trained for a moment."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(compare, "REPEATS", 1)
    batch = tmp_path / "batch.txt"
    batch.write_text("One day, a cat\nThe dog ran to the\nOnce upon a time\n")
    commands = re.findall(r"`([^`]+)`", row[-1].replace("runs/", f"{tmp_path}/"))
    assert commands
    for command in commands:
        words = shlex.split(command)
        if words[0] == "python":
            name = words[2]
            assert words[1] == "-m" and not PROGRAMS[name]([*words[3:], *LITTLE.get(name, [])])
            continue
        status, r, _ = run(capsys, "Once upon a time", *words, "--compare")
        assert status == 0 and r["new_tokens"] == 8
        compared = "--temperature" not in words or "--exact" in words
        assert r["identical"] is (True if compared else None)
        check_ways(capsys, words, str(batch))
