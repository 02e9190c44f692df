"""The README tells the truth: its example prints what its comments say, and its table names every module."""

import re
from pathlib import Path

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


def test_reading_order_names_every_module():
    named = re.findall(r"^\| `(\w+\.py)` \|", README, re.M)
    assert sorted(named) == sorted(p.name for p in ROOT.glob("*.py"))


def test_line_counts_are_about_right():
    for name, lines in re.findall(r"^\| `(\w+\.py)` \| (\d+) \|", README, re.M):
        assert abs(len((ROOT / name).read_text().splitlines()) - int(lines)) <= 10, f"{name} has grown"


def test_modules_import_only_those_above():
    order = [Path(name).stem for name in re.findall(r"^\| `(\w+\.py)` \|", README, re.M)]
    for i, name in enumerate(order):
        found = re.findall(r"^(?:from|import) (\w+)", (ROOT / f"{name}.py").read_text(), re.M)
        assert not set(found) & set(order[i:]), f"{name}.py imports downward"
