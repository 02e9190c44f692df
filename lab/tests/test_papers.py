"""Every system of docs/papers.md runs, by the commands that stand in its row."""
import json
import re
import shlex
from pathlib import Path

import pytest

from lab import hamburger, spectr, train_heads
from lab.bench import __main__ as bench
from support import generate, report

ROOT = Path(__file__).resolve().parents[2]
ROWS = [row.split(" | ")
        for row in (ROOT / "docs" / "papers.md").read_text(encoding="utf-8").splitlines()
        if row.startswith("| ") and not row.startswith("| paper")]
PROGRAMS = {"lab.bench": bench.main, "lab.hamburger": hamburger.main, "lab.spectr": spectr.main,
            "lab.train_heads": train_heads.main}
LITTLE = {"lab.train_heads": ["--text", "1e3", "--tokens", "1e3", "--context", "64"],
          "lab.hamburger": ["--max-new", "8", "--steps", "1"],
          "lab.bench": ["--new", "8", "--prompts", "stories"]}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip("| ")[:20])
def test_a_row_runs_for_eight_tokens(row, tmp_path, capsys, monkeypatch):
    """Greedy drafts write the text of plain decoding. What is trained is trained for a moment."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(report, "REPEATS", 1)
    commands = re.findall(r"`([^`]+)`", row[-1].replace("runs/", f"{tmp_path}/"))
    assert commands
    for command in commands:
        words = shlex.split(command)
        if words[0] == "python":
            name = words[2]
            assert words[1] == "-m" and not PROGRAMS[name]([*words[3:], *LITTLE.get(name, [])])
            continue
        common = ["--max-new", "8", "--dtype", "float32", "--device", "cpu", "--compare", "--json"]
        capsys.readouterr()
        assert generate.main(["Once upon a time", *words, *common]) == 0
        r = json.loads(capsys.readouterr().out)
        assert r["new_tokens"] == 8
        compared = "--temperature" not in words or "--exact" in words
        assert r["identical"] is (True if compared else None)
