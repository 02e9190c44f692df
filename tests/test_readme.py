"""README tells the truth: the example prints what it says there, links lead somewhere, and imports
run upward."""
import ast
import re
import shlex
from pathlib import Path

import pytest

import generate
from support import compare

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_example_prints_what_its_comments_say(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    code = re.search(r"```python\n(.*?)```", README, re.S)[1]
    exec(compile(code, "README.md", "exec"), {})  # the README's own code
    says = re.findall(r"^(?:print\(.*\) +)?# (.*)$", code, re.M)
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(says) and len(says) == 3


def test_the_readers_own_drafter_writes_the_same_text(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "REPEATS", 1)
    Path("mine.py").write_text(re.search(r"```python\n(# mine.py.*?)```", README, re.S)[1])
    command = re.search(r"`python generate.py ([^`]*mine.py[^`]*)`", README)[1]
    assert generate.main([*shlex.split(command), "--dtype", "float32", "--max-new", "40"]) == 0
    said = capsys.readouterr().out
    assert "identical to plain decoding" in said and "drafted tokens accepted" in said


def test_every_target_and_link_is_there():
    """That its commands parse: lab/tests/test_benchmarks.py."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert set(re.findall(r"(?:^|`)make ([\w-]+)", README, re.M)) <= set(targets)
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert link.startswith("https://") or (page.parent / link).exists(), link


def test_the_picture_of_the_house_shows_every_file_at_the_root():
    shown = re.findall(r"\w+\.py", (ROOT / "docs" / "house.svg").read_text(encoding="utf-8"))
    assert sorted(shown) == sorted(path.name for path in ROOT.glob("*.py"))


# each imports only earlier ones
LIBRARY = ["model", "kvcache", "sampling", "verification", "drafter", "speculative",
           "layerskip", "control", "families", "checkpoint", "search", "minimal"]
ALSO = {
    "support": {"methods", "machine"},
    "search": {"support"}}              # which is also a command


@pytest.mark.parametrize("name", [*LIBRARY, "methods", "machine", "support"])
def test_imports_run_one_way(name):
    """The library imports nothing but itself; nothing of it imports the lab."""
    own = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or path.is_dir()}
    may = {name, *LIBRARY[: LIBRARY.index(name) if name in LIBRARY else None], *ALSO.get(name, ())}
    for path in [ROOT / f"{name}.py"] if name in LIBRARY else (ROOT / name).glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        found = {f"{node.module}.{alias.name}" if node.module in own else node.module
                 for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
        found |= {alias.name for node in nodes if isinstance(node, ast.Import)
                  for alias in node.names}
        wrong = [other for other in found - may if other.split(".")[0] in own - may]
        assert not wrong, f"{path.name} imports {wrong}"
