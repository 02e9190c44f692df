"""README and BENCHMARKS.md tell the truth: the example prints what it says there, commands parse,
links lead somewhere, imports run upward, figures are those of the files that hold them."""
import ast
import json
import re
import shlex
from pathlib import Path

import pytest

import bench
import generate
import search
import train
import train_heads
from benchmarks import counts

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BENCHMARKS = (ROOT / "BENCHMARKS.md").read_text(encoding="utf-8")
PARSE = {m.__name__: m.parse for m in (bench, generate, search, train, train_heads)}


def test_example_prints_what_its_comments_say(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    code = re.search(r"```python\n(.*?)```", README, re.S)[1]
    exec(compile(code, "README.md", "exec"), {})  # the README's own code
    says = re.findall(r"^(?:print\(.*\) +)?# (.*)$", code, re.M)
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(says) and len(says) == 5


def test_every_quoted_command_and_link_works(monkeypatch):
    monkeypatch.chdir(ROOT)
    quoted = re.findall(r"(?:^|`)python (\w+)\.py ?([^`\n]*)", README + BENCHMARKS, re.M)
    assert {"bench", "generate"} <= {name for name, _ in quoted}
    for name, flags in quoted:
        PARSE[name](shlex.split(flags))
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert set(re.findall(r"(?:^|`)make (\w+)", README + BENCHMARKS, re.M)) <= set(targets)
    for link in re.findall(r"\]\(([^)#]+)\)", README + BENCHMARKS):
        assert link.startswith("https://") or (ROOT / link).is_file(), link


RINGS = ["model", "kvcache", "sampling", "verification", "speculative", "layerskip", "control",
         "gaussian|checkpoint", r"methods\.\w+", r"(machine|support)\.\w+", r"\w+",
         r"benchmarks\.\w+"]
ORDER = {}      # module: (its ring, its file); it imports from rings up to its own, and support.files
for path in (*ROOT.glob("*.py"), *ROOT.glob("*/*.py")):
    name = path.relative_to(ROOT).as_posix()[:-3].replace("/", ".")
    rings = [i for i, names in enumerate(RINGS) if re.fullmatch(names, name)]
    ORDER |= {name: (rings[0], path)} if rings else {}


@pytest.mark.parametrize("name", sorted(ORDER.keys() - {"bench"}))
def test_imports_run_upward(name):
    ring, path = ORDER[name]
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    found = {n.module for n in nodes if isinstance(n, ast.ImportFrom)}
    found |= {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    assert all(ORDER[other][0] <= ring for other in found & ORDER.keys() - {"support.files"})


def test_the_figures_in_the_table_of_papers_stand_in_the_benchmarks():
    rows = [row.split("|") for row in README[README.index("| paper |") :].splitlines()[2:] if row]
    known = set(re.findall(r"-?\d*\.\d\d", BENCHMARKS))
    for _, paper, files, ours, *_ in rows:
        figures = re.findall(r"-?\d*\.\d\d", ours)
        assert figures and set(figures) <= known, f"{paper}: {ours}"
        assert all((ROOT / name).is_file() for name in re.findall(r"`([\w/.]+)`", files)), paper


def test_the_counts_of_operations_are_those_of_the_code(monkeypatch):
    some = "plain", "exit, stop rule"
    monkeypatch.setattr(counts, "DRAFTERS", {name: counts.DRAFTERS[name] for name in some})
    for name, row in counts.counts.__wrapped__().items():
        cells = name, *(n for part in row.values() for n in part.values())
        assert f"| {' | '.join(map(str, cells))} |\n" in BENCHMARKS


def test_the_twin_table_says_what_the_file_says():
    twin = json.loads((ROOT / "weights" / "twin.json").read_text(encoding="utf-8"))
    head = re.search(r"\| exit after block \|([\d |]+)\|\n", BENCHMARKS)[1]
    exits = [int(e) for e in head.split("|")]
    keys = {"loss": "loss", "alpha": "agreement", "speed-up": "speedup"}
    rows = re.findall(r"^\| (loss|alpha|speed-up).*: (recipe|plain) \|(.*)\|$", BENCHMARKS, re.M)
    assert len(rows) == 6
    for key, name, row in rows:
        for e, cell in zip(exits, row.split("|"), strict=True):
            if cell.strip():
                found = [table[keys[key]][e - 1] for table in twin[name]["files"].values()]
                assert float(cell) == pytest.approx(sum(found) / len(found), abs=0.0051)
