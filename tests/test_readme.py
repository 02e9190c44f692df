"""The README tells the truth: its example prints what its comments say, and its table names every module."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_example_prints_what_its_comments_say(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    code = re.search(r"```python\n(.*?)```", README, re.S)[1]
    exec(compile(code, "README.md", "exec"), {})  # the README's own code
    behind_print = [m[1] for line in code.splitlines() if (m := re.match(r"print\(.*\) +# (.*)$", line))]
    alone = [line[2:] for line in code.splitlines() if line.startswith("# ")]
    printed = capsys.readouterr().out.splitlines()
    assert sorted(printed) == sorted(behind_print + alone) and len(printed) == 7


CODE = sorted(p.relative_to(ROOT).as_posix() for folder in (".", "support", "benchmarks")
              for p in (ROOT / folder).glob("*.py"))
LISTED = re.findall(r"^\| `([\w/]+\.py)` \| (\d+) \|", README, re.M)


def test_reading_order_names_every_module():
    assert sorted(name for name, _ in LISTED) == CODE


def test_line_counts_are_about_right():
    for name, lines in LISTED:
        assert abs(len((ROOT / name).read_text().splitlines()) - int(lines)) <= 10, f"{name} has grown"


TWIN = json.loads((ROOT / "weights" / "twin.json").read_text(encoding="utf-8"))


def twin_mean(name, key, exit_layer):
    files = TWIN[name]["files"].values()
    return sum(table[key][exit_layer - 1] for table in files) / len(files)


def test_the_twin_table_says_what_the_file_says():
    exits = [int(e) for e in re.search(r"\| exit behind block \|([\d |]+)\|\n", README)[1].split("|")]
    keys = {"loss": "loss", "alpha": "agreement", "speed-up": "speedup"}
    rows = re.findall(r"^\| (loss|alpha|speed-up).*: (recipe|plain) \|(.*)\|$", README, re.M)
    assert len(rows) == 6
    for key, name, cells in rows:
        for e, cell in zip(exits, cells.split("|"), strict=True):
            assert not cell.strip() or float(cell) == pytest.approx(twin_mean(name, keys[key], e), abs=0.0051)


def test_the_recipe_is_worth_something():
    """At a quarter and at half of the layers, on every file."""
    assert TWIN["recipe"]["tokens"] == TWIN["plain"]["tokens"]
    assert TWIN["recipe"]["parameters"] == TWIN["plain"]["parameters"]
    for file, table in TWIN["recipe"]["files"].items():
        L = len(table["agreement"])
        for e in (L // 4, L // 2):
            gain = table["agreement"][e - 1] - TWIN["plain"]["files"][file]["agreement"][e - 1]
            assert gain >= 0.15, f"{file}, exit {e}"


def test_all_weights_together_are_small():
    sizes = [p.stat().st_size for p in (ROOT / "weights").rglob("*.safetensors") if p.stem == "model"]
    assert len(sizes) == 3 and sum(sizes) < 45e6
