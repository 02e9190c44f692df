"""README and BENCHMARKS.md tell the truth: the example prints what its comments say, every module is named,
imports run upward, commands parse, and figures are those of the files that hold them."""
import ast
import graphlib
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

import bench
import generate
import search
import train
import train_heads
from benchmarks import counts
from control import expected_speedup, expected_tokens

ROOT = Path(__file__).parent.parent
README, BENCHMARKS = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "BENCHMARKS.md"))
TWIN = json.loads((ROOT / "weights" / "twin.json").read_text(encoding="utf-8"))


def test_example_prints_what_its_comments_say(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    code = re.search(r"```python\n(.*?)```", README, re.S)[1]
    exec(compile(code, "README.md", "exec"), {})  # the README's own code
    beside = [m[1] for line in code.splitlines() if (m := re.match(r"print\(.*\) +# (.*)$", line))]
    alone = [line[2:] for line in code.splitlines() if line.startswith("# ")]
    printed = capsys.readouterr().out.splitlines()
    assert sorted(printed) == sorted(beside + alone) and len(printed) == 5


def test_the_readme_is_one_page():
    """But for the table of papers, in which each system has a row."""
    assert len(README[: README.index("| paper |")].splitlines()) <= 162


def test_the_example_of_the_formula():
    """"With alpha = .7, c = .2 and gamma = 2 these are 2.19 tokens for 1.4 passes: 1.56 times"."""
    words = " ".join(README.split())
    cases = re.findall(r"alpha = (\.\d+),? (?:and )?c = (\.\d+)(?: and gamma = (\d))? .*?"
                       r"(\d\.\d+) tokens for (\d\.\d+) passes(?::| is) (\d?\.\d+) times", words)
    assert len(cases) == 2
    for alpha, cost, gamma, tokens, passes, speed in cases:
        alpha, cost, gamma = float(alpha), float(cost), int(gamma or 1)
        assert float(tokens) == pytest.approx(expected_tokens(alpha, gamma))
        assert float(passes) == pytest.approx(gamma * cost + 1)
        assert float(speed) == pytest.approx(expected_speedup(alpha, gamma, cost), abs=0.005)


# --- the files


LIBRARY = "model", "kvcache", "sampling", "verification", "speculative", "layerskip", "control"
COMMANDS = "generate", "search", "train", "train_heads", "bench"
CODE = {p.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): p
        for folder in (".", "methods", "machine", "support", "benchmarks")
        for p in sorted((ROOT / folder).glob("*.py"))}
EXERCISES, PORTING = ({f"{folder}.{p.stem}": p for p in sorted((ROOT / folder).glob("*.py"))}
                      for folder in ("exercises", "porting"))
EVERY = CODE | EXERCISES | PORTING
ORDER = (README[README.index("## Reading order") : README.index("## Your own model")]
         + BENCHMARKS[BENCHMARKS.index("## What measures what") :])
LISTED = re.findall(r"`([\w/]+)\.py` (?:\| |\()(\d+)", ORDER)


def test_reading_order_names_every_module_once():
    assert sorted(name.replace("/", ".") for name, _ in LISTED) == sorted(CODE)


def lines(name):
    return len(CODE[name].read_text(encoding="utf-8").splitlines())


def test_line_counts_are_about_right():
    for name, count in LISTED:
        assert abs(lines(name.replace("/", ".")) - int(count)) <= 10, f"{name} has grown or shrunk"
    core = re.search(r"have ([\d,]+) lines", ORDER)[1]
    assert abs(sum(map(lines, LIBRARY)) - int(core.replace(",", ""))) <= 30


def imports(path):
    """The modules of this repository that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inside & set(EVERY) or {node.module}
    return {name for name in found if name in EVERY}


def allowed(name):
    """What a module may import."""
    methods, machine, support, benchmarks = (
        {other for other in CODE if other.startswith(folder)}
        for folder in ("methods.", "machine.", "support.", "benchmarks."))
    below = set(LIBRARY) | {"support.files"}
    if name in LIBRARY:
        return set(LIBRARY[: LIBRARY.index(name)])
    if name == "support.files":
        return set()
    if name == "minimal":
        return set(LIBRARY) | {"checkpoint"}
    if name in ("gaussian", "checkpoint"):
        return below
    if name in methods:
        return below | {"gaussian", "checkpoint"} | methods
    if name in machine | support:
        return below | {"gaussian", "checkpoint"} | methods | machine | support
    return set(CODE) - {"bench", "minimal"} - (benchmarks if name in COMMANDS and name != "bench" else set())


@pytest.mark.parametrize("name", CODE)
def test_imports_run_upward(name):
    assert imports(CODE[name]) <= allowed(name)


@pytest.mark.parametrize("name", EXERCISES)
def test_exercises_import_nothing_of_the_library(name):
    """An answer is to meet the copy that it is put into, and no module that was imported before."""
    assert imports(EXERCISES[name]) <= set(EXERCISES)


@pytest.mark.parametrize("name", EVERY)
def test_no_function_is_longer_than_forty_lines(name):
    """Those of the ports in numpy are to be read by people of other languages, and have at most twenty."""
    found = ast.walk(ast.parse(EVERY[name].read_text(encoding="utf-8")))
    long = {f.name: f.end_lineno - f.lineno + 1 for f in found if isinstance(f, ast.FunctionDef)}
    assert not {f: n for f, n in long.items() if n > (20 if name.startswith("porting.numpy") else 40)}


def test_no_imports_go_round_in_a_circle():
    graphlib.TopologicalSorter({name: imports(path) for name, path in CODE.items()}).prepare()


# --- what is quoted


PARSE = {"bench": bench.parse, "generate": generate.parse, "search": search.parse, "train": train.parse,
         "train_heads": train_heads.parse}
BOTH = README + BENCHMARKS
QUOTED = re.findall(r"^python (\w+)\.py(?: (.*))?$|`python (\w+)\.py(?: ([^`]*))?`", BOTH, re.M)
QUOTED = sorted({(a or b, x or y) for a, x, b, y in QUOTED})


def test_commands_are_quoted():
    assert {name for name, _ in QUOTED} >= {"bench", "generate"} and len(QUOTED) >= 7


@pytest.mark.parametrize("command, flags", QUOTED)
def test_every_quoted_command_parses(command, flags, monkeypatch):
    monkeypatch.chdir(ROOT)
    PARSE[command](shlex.split(flags))


def test_every_quoted_target_and_link_exists():
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    quoted = {a or b for a, b in re.findall(r"^make (\w+)|`make (\w+)`", BOTH, re.M)}
    assert {"demo", "test"} <= quoted <= set(targets)
    for target in re.findall(r"\]\(([^)#]+)\)", BOTH):
        assert target.startswith("https://") or (ROOT / target).is_file(), target


def test_the_citation_is_complete():
    cff = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cff["cff-version"] == "1.2.0" and cff["title"] == README.splitlines()[0].removeprefix("# ")
    assert re.fullmatch(r"\d+\.\d+\.\d+", cff["version"]) and cff["message"]
    assert cff["authors"] == [{"name": "The contributors"}]
    assert (ROOT / "LICENSE").read_text(encoding="utf-8").startswith(f"{cff['license']} License")


# --- figures


def cells(text):
    """What stands in the tables of a text."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return {cell.strip() for row in rows for cell in row.split("|")}


def test_our_figures_in_the_table_of_papers_stand_in_the_benchmarks():
    rows = [row.split("|") for row in README[README.index("| paper |") :].splitlines()[2:] if row]
    assert len(rows) >= 9 and all(len(row) == 6 for row in rows)
    known = {figure for cell in cells(BENCHMARKS) for figure in cell.split(" (")}   # clock (weights)
    known |= set(re.findall(r"-\.\d\d", BENCHMARKS))
    for _, paper, files, ours, published, _ in rows:
        figures = re.findall(r"-?\d*\.\d\d", ours)
        assert figures and set(figures) <= known, f"{paper}: {ours}"
        assert all((ROOT / name).is_file() for name in re.findall(r"`([\w/.]+)`", files)), paper
        assert not re.search(r"\d", published) or "(" in published, f"{paper}: who says so?"


PAPER = r"\d{4}\.\d{5}"
OTHERS = {"1503.02531", "1909.08053", "2305.07185", "2309.17453"}    # no ways to draft


def test_the_table_of_papers_names_every_system_of_the_code():
    """With a file that says so; and the code names no paper that is not in it."""
    table = README[README.index("| paper |") :]
    named = {name: set(re.findall(PAPER, path.read_text(encoding="utf-8"))) for name, path in CODE.items()
             if not name.startswith("benchmarks.")}
    assert set.union(*named.values()) - OTHERS <= set(re.findall(PAPER, table))
    for row in table.splitlines()[2:]:
        texts = [(ROOT / name).read_text(encoding="utf-8") for name in re.findall(r"`([\w/.]+\.py)`", row)]
        papers = set(re.findall(rf"abs/({PAPER})", row))
        first = re.search(r"\w+", row)[0]       # of the oldest ones the code gives the authors
        assert papers & set(re.findall(PAPER, "".join(texts))) or first in "".join(texts), row


def test_the_counts_of_operations_are_those_of_the_code():
    table, _, _ = counts.run(None)
    assert table in BENCHMARKS


def of_files(name, key, exit_layer):
    return [table[key][exit_layer - 1] for table in TWIN[name]["files"].values()]


def test_the_twin_table_says_what_the_file_says():
    exits = [int(e) for e in re.search(r"\| exit after block \|([\d |]+)\|\n", BENCHMARKS)[1].split("|")]
    keys = {"loss": "loss", "alpha": "agreement", "speed-up": "speedup"}
    rows = re.findall(r"^\| (loss|alpha|speed-up).*: (recipe|plain) \|(.*)\|$", BENCHMARKS, re.M)
    assert len(rows) == 6
    for key, name, row in rows:
        for e, cell in zip(exits, row.split("|"), strict=True):
            found = of_files(name, keys[key], e) if cell.strip() else []
            assert not found or float(cell) == pytest.approx(sum(found) / len(found), abs=0.0051)
    spread = re.search(r"alpha of exit 2 is (\S+) to (\S+) with the recipe, and (\S+) to (\S+) without",
                       " ".join(BENCHMARKS.split()))
    found = [end(of_files(name, "agreement", 2)) for name in ("recipe", "plain") for end in (min, max)]
    assert [float(x.rstrip(".*")) for x in spread.groups()] == pytest.approx(found, abs=0.0051)


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
    """Four models, and heads for them."""
    models, heads = ([p.stat().st_size for p in (ROOT / "weights").rglob(f"{name}.safetensors")]
                     for name in ("model", "heads"))
    assert len(models) == 4 and sum(models) < 46e6 and sum(heads) < 6e6
