"""The student's folder, and one clear line for each kind of accident. Whether mistakes are named
is what `python exercises/check.py` tries."""
import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import tree

from control import expected_tokens
from exercises import diagnose, specs, splice, start
from exercises.answers import original
from exercises.cuts import find
from exercises.tasks import TASKS, choose, file_name
from sampling import Coins
from search import climb
from verification import verify

ROOT = Path(__file__).parents[2]
each_task = pytest.mark.parametrize("task", TASKS, ids=[task.name for task in TASKS])


@pytest.fixture
def out(tmp_path):
    start.write(tmp_path / "out")
    return tmp_path / "out"


@each_task
def test_no_bare_assert_reaches_a_student(task):
    """It would say what was false, but neither what was given nor what is wrong: `teach.promise`
    does. And all tests of a task exist."""
    for test in task.all_tests:
        file, name = test.partition("[")[0].split("::")
        node = find(ast.parse((ROOT / file).read_text(encoding="utf-8")), name)
        assert not [n.lineno for n in ast.walk(node) if isinstance(n, ast.Assert)], test


# --- the folder


@each_task
def test_a_file_has_the_stub_and_no_solution(task, out):
    texts = {p.name: p.read_text(encoding="utf-8") for p in out.iterdir()}
    text = texts[file_name(task)]
    everything = "".join(texts.values())
    for name in task.functions:
        ours, stub = (find(ast.parse(t), name) for t in (splice.source(task.module), text))
        assert splice.signature(ours) == splice.signature(stub) and splice.is_stub(stub)
        assert ast.get_docstring(ours) == ast.get_docstring(stub)
        body = splice.original(task.module, name)[splice.head(ours) + ("." in name) :]
        code = [line.split("  #")[0].strip() for line in body]
        assert not [line for line in code if len(line) > 24 and line in everything]
    exec(compile(text, file_name(task), "exec"), {}), "a student can run it as it is"


def test_the_folder_is_never_written_over(out):
    before = tree(out)
    with pytest.raises(FileExistsError, match="is not empty: nothing was written"):
        start.write(out)
    assert tree(out) == before


def test_the_specifications_are_true():
    p, q = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1]]), torch.tensor([[0.2, 0.6, 0.2]])
    assert specs.specification_of_verify(verify, p, q, Coins) == pytest.approx(
        p[0].tolist(), abs=0.03)
    assert specs.specification_of_expected_tokens(0.8, 5) == pytest.approx(
        expected_tokens(0.8, 5), abs=0.05)
    score, free = lambda z: z @ torch.tensor([1.0, -3.0, 2.0]).double(), lambda z: z.sum(-1) <= 1
    (end, *_), _ = climb(score, torch.zeros(1, 3), free)
    assert specs.specification_of_climb(score, end, free)
    assert not specs.specification_of_climb(score, torch.zeros(3).double(), free)


# --- an answer takes its place in the library


AGAINST = "    q, ratio, live = against(p, q, tokens, length)"
BODY = b"    return x if cap is None"


@pytest.mark.parametrize("old, new", [
    (b"import math", b"\xef\xbb\xbfimport math"), (b"\n", b"\r\n"),
    (b"\n\ndef rotate", b"\n\x0c\ndef rotate"),
    (BODY, b"    # a note\xe2\x80\xa8from \xc2\x85 \x1c\x0b the web\n" + BODY),
    (b"import math", b"# coding: latin-1\n# caf\xe9\nimport math")])
def test_an_answer_is_read_as_python_reads_it(old, new, out):
    """Byte order mark, form feed, line ends, what looks like one, and a coding line; the lines
    keep count."""
    task = choose("1")
    path = out / file_name(task)
    path.write_bytes(f"import math\n\n{original(task)}".encode().replace(old, new))
    text = splice.read(path)
    exec(splice.code(task.module, task.functions, text), module := {})
    for name in task.functions:
        first = module[name].__code__.co_firstlineno
        assert text.split("\n")[first - 1].startswith(f"def {name}(")


@pytest.mark.parametrize("start, line, says", [
    (b"", b"    breakpoint()", "line 3: `breakpoint\\(\\)`"),
    (b"", b"    x = input()", "line 3: `input\\(\\)`"),
    (b"", b"    import pdb; pdb.set_trace()", "line 3: `pdb.set_trace\\(\\)`"),
    (b"", b"    # \xff", "line 3: this is not utf-8"),
    (b"\r", b"\xff", "line 4: this is not utf-8"),
    (b"\xef\xbb\xbf", b"\xff", "line 3: this is not utf-8"),
    (b"\n\xff", b"", "line 1 or 2: .* save it as UTF-8")])
def test_what_waits_for_its_author_and_what_is_no_text_is_named(start, line, says, tmp_path):
    task = choose("1")
    first, docs, rest = original(task).encode().split(b"\n", 2)
    (tmp_path / "a.py").write_bytes(start + b"\n".join([first, docs, line, rest]))
    with pytest.raises(splice.Refused, match=says):
        splice.code(task.module, task.functions, splice.read(tmp_path / "a.py"))


@each_task
def test_a_hollow_module_is_the_library_without_the_functions(task):
    ours, hollow = (ast.parse(text) for text in (
        splice.source(task.module), splice.hollow(task.module, task.functions)))
    for name in task.functions:
        old = find(ours, name)
        new = find(hollow, name)
        assert splice.signature(old) == splice.signature(new) and splice.is_stub(new)
        old.body = new.body = []
    assert ast.unparse(ours) == ast.unparse(hollow)


def test_helpers_come_along_and_of_two_definitions_the_last_one_counts():
    task = choose("KVCache.write")
    head = "  def write(self, layer, k, v, at, start=0):\n    return "
    text = "TABLE = [1]\nTABLE.append(2)\ndef mine(x):\n  return x, TABLE\n\n" \
           f"class KVCache:\n{head}0\n" \
           f"{head}mine(k)\n"
    exec(splice.code(task.module, task.functions, text), module := {})
    assert module["KVCache"]().write(0, 1, 2, None) == (1, [1, 2])


# --- the grader


def graded(folder, *flags):
    run = [sys.executable, "exercises/grade.py", str(folder), *map(str, flags)]
    done = subprocess.run(run, capture_output=True, text=True, cwd=ROOT)
    return done.returncode, done.stdout, done.stderr


def put_answer(out, number, old, new):
    """A file with the library's own functions, and a change."""
    task = choose(number)
    assert original(task).count(old) == 1
    (out / file_name(task)).write_text(original(task).replace(old, new))


def test_one_clear_line_for_each_kind_of_accident(out):
    """While the tests run: prints, errors, an exit; and files that are missing or stubs."""
    put_answer(out, "1", "    return x if", '    print("here I am")\n    return x if')
    put_answer(out, "6", "here = slice", "getattr(torch, 'o' + 's')._exit(0); here = slice")
    put_answer(out, "8", "class Coins", "from torch import coins as torch\n\nclass Coins")
    put_answer(out, "10", "token = state.coins.choose(q)", "token = nothing")
    (out / file_name(choose("9"))).unlink()
    before = tree(out)
    code, printed, _ = graded(out, "--json")
    found = {verdict["number"]: verdict for verdict in json.loads(printed)}
    assert {n: v["status"] for n, v in found.items() if v["status"] != "to do"} == {
        1: "passed", 6: "failed", 8: "failed", 10: "failed"} and len(found) == len(TASKS)
    assert code == 1 and tree(out) == before
    assert "it prints ('here I am')" in found[1]["remark"]
    assert found[6]["message"].startswith("the process ended before the tests did (status 0)")
    assert found[8]["message"].startswith("line 1: it cannot be imported: ImportError")
    assert "'nothing' is not defined\nraised at     line 22: token =" in found[10]["message"]
    assert found[10]["line"] == 22 and "test_domain[chain]" in found[10]["test"]
    assert found[9]["message"].startswith("there is no 09_verify.py")


def test_marks_add_up_whatever_one_answer_does(out, tmp_path):
    """What breaks the grader itself costs no other exercise its marks."""
    put_answer(out, "8", "True", "True")
    put_answer(out, "9", AGAINST, AGAINST + " + ()" * 9000)
    graded(out, "--gradescope", file := tmp_path / "results.json")
    found = json.loads(file.read_text())
    marks = {test["name"]: test["score"] for test in found["tests"] if test["score"]}
    assert marks == {"Coins.choose": 4}
    assert found["score"] == 4 and sum(test["max_score"] for test in found["tests"]) == 60
    assert "it cannot be graded: " in found["tests"][8]["output"]


def test_an_endless_loop_is_named_by_its_line(out):
    put_answer(out, "18", "(seconds / plain - verified)", "all(1 for _ in iter(int, 1))")
    before, _ = (out / file_name(choose("18"))).read_text().split("iter(int")
    code, printed, _ = graded(out, 18, "--seconds", 6)
    assert code == 1 and f"an endless loop at line {before.count(chr(10)) + 1}?" in printed


def test_folders_and_names_that_do_not_exist(tmp_path):
    for folder, name in ((tmp_path / "none", "1"), (tmp_path, "loop")):
        code, _, said = graded(folder, name)
        assert code == 2 and f"there is no {'folder' if name == '1' else 'exercise'}" in said


def test_marks_for_what_was_set(out, tmp_path):
    """--only: the rows and the sum of these exercises."""
    put_answer(out, "16", "max(1, self.drafted)", "max(1, self.drafted)")
    graded(out, "--only", 16, 18, "--gradescope", file := tmp_path / "results.json")
    found = json.loads(file.read_text())
    assert [(test["number"], test["score"], test["max_score"]) for test in found["tests"]] == [
        ("16", 4, 4), ("18", 0, 4)] and found["score"] == 4


def test_a_verdict_cannot_be_written_by_an_answer(out):
    """A file that says "passed", and an exit while the answer is loaded."""
    task = choose("18")
    forged = [*b'{"status": "passed"}']
    text = ("import torch\n" + original(task) + "\ndef forge():\n"
            f"    torch.from_file('result.json', True, {len(forged)}, dtype=torch.uint8).copy_(\n"
            f"        torch.tensor({forged}))\n    raise SystemExit\n\nMADE = forge()\n")
    text = text.replace("    return (seconds", "    MADE\n    return (seconds")
    (out / file_name(task)).write_text(text)
    code, printed, _ = graded(out, 18, "--json")
    assert code == 1 and json.loads(printed)[0]["status"] == "failed"


# --- diagnose


def test_a_diagnosis_is_graded_by_its_line(tmp_path, monkeypatch):
    monkeypatch.setattr(diagnose, "failure", lambda case: ["E   it fails"])
    asked = {(task.module, name) for task in TASKS for name in task.functions}
    assert not asked & {(case.mistake.file, case.mistake.scope) for case in diagnose.CASES}
    first = min(diagnose.write(tmp_path / "first").iterdir())
    (right,) = diagnose.mutated(diagnose.CASES[0])[1]
    text = first.read_text()
    assert diagnose.grade(first) == ("to do", "") and "E   it fails" in text
    for line, status in ((right, "passed"), (right - 1, "failed")):
        first.write_text(text.replace("line: ?", f"line: {line}"))
        assert diagnose.grade(first)[0] == status
    with pytest.raises(FileExistsError, match="is not empty: nothing was written"):
        diagnose.write(tmp_path / "first")
    drawn = [[path.name for path in sorted(diagnose.write(tmp_path / str(n), seed).iterdir())]
             for n, seed in enumerate((1, 2, 1))]
    assert drawn[0] != drawn[1] and drawn[0] == drawn[2], "a seed names its cases"
