"""The student's folder, and the grader's manners: one clear line for each kind of accident. Whether it names
mistakes is what `python exercises/check.py` tries, with all of them."""
import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import mutants
import pytest
import torch
from tiny import tree

from control import expected_tokens
from exercises import diagnose, splice, start, variants
from exercises.answers import SHAPES, WRONG
from exercises.check import answer, changed
from exercises.specs import (
    SPECS,
    specification_of_climb,
    specification_of_expected_tokens,
    specification_of_verify,
)
from exercises.tasks import TASKS, VARIANT, choose, file_name
from gaussian import climb
from sampling import Coins
from verification import verify

ROOT = Path(__file__).parent.parent
each_task = pytest.mark.parametrize("task", TASKS, ids=[task.name for task in TASKS])


@pytest.fixture
def out(tmp_path):
    start.write(tmp_path / "out")
    return tmp_path / "out"


# --- the tables


def test_fifteen_exercises_in_five_sittings_of_three_and_a_small_one():
    assert [task.number for task in TASKS] == list(range(1, 17))
    assert [task.sitting for task in TASKS] == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3 + [5] * 3 + [4]
    assert TASKS[0].minutes <= 10, "the first is to pass within ten minutes of cloning"
    assert set(WRONG) == {task.name for task in TASKS} and set(SHAPES) <= set(WRONG) and len(SHAPES) >= 6
    for task in TASKS:
        assert all(choose(word) is task for word in (str(task.number), task.name, *task.functions))
    with pytest.raises(KeyError, match="there is no exercise 'loop'; there are: 1 softcap"):
        choose("loop")


def test_the_instructors_syllabus_is_that_of_the_table():
    page = (ROOT / "exercises" / "README.md").read_text(encoding="utf-8")
    for sitting in range(1, 6):
        cells = next(line for line in page.splitlines() if line.startswith(f"| {sitting} |")).split("|")
        tasks = [task for task in TASKS if task.sitting == sitting]
        assert cells[3].strip() == ", ".join(f"{task.number} `{task.name}`" for task in tasks)
        assert int(cells[4]) == sum(task.minutes for task in tasks)
    bugs = page[page.index("| bug |") : page.index("`exercises/answers.py`")]
    assert set(re.findall(r"\| `([\w.]+)` \|$", bugs, re.M)) <= set(WRONG)


@each_task
def test_each_exercise_has_at_least_three_wrong_answers_and_tests_that_exist(task):
    assert len({row[2] for row in WRONG[task.name]}) >= 3
    for row in WRONG[task.name]:
        ast.parse(changed(task, row))
        assert row[2], "a wrong answer without the words that must name it proves nothing"
    for test in task.tests:
        file, name = re.match(r"(.*)::(\w+)", test).groups()
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), test


# --- the folder


@each_task
def test_a_file_has_the_stub_and_no_solution(task, out):
    text = (out / file_name(task)).read_text(encoding="utf-8")
    parsed = ast.parse(text)
    everything = "".join(p.read_text(encoding="utf-8") for p in out.iterdir())
    for name in task.functions:
        ours, stub = (splice.find(ast.parse(t), name) for t in (splice.source(task.module), text))
        assert splice.signature(ours) == splice.signature(stub) and splice.is_stub(stub)
        assert ast.get_docstring(ours) == ast.get_docstring(stub)
        solution = splice.original(task.module, name)[splice.head(ours):]
        longer = [line.split("  #")[0].strip() for line in solution]
        assert not [line for line in longer if len(line) > 24 and line in everything]
    assert ast.get_docstring(parsed).startswith(f"Exercise {task.number}: {task.name}")
    assert max(map(len, text.splitlines())) <= 110


def test_the_folder_is_never_written_over(out):
    before = tree(out)
    command = [sys.executable, str(ROOT / "exercises" / "start.py"), str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "is not empty: nothing was written" in done.stderr and tree(out) == before


def test_the_folder_tells_assistants_to_coach(out):
    assert "do not answer" in (out / "AGENTS.md").read_text()
    readme = (out / "README.md").read_text()
    assert all(f"`{task.name}`" in readme for task in TASKS) and "{" not in readme


def test_the_specifications_are_true():
    p, q = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1]]), torch.tensor([[0.2, 0.6, 0.2]])
    assert specification_of_verify(verify, p, q, Coins) == pytest.approx(p[0].tolist(), abs=0.03)
    assert specification_of_expected_tokens(0.8, 5) == pytest.approx(expected_tokens(0.8, 5), abs=0.05)
    weights, free = torch.tensor([1.0, -3.0, 2.0]).double(), lambda z: z.sum(-1) <= 1
    (end, *_), _ = climb(lambda z: z @ weights, torch.zeros(1, 3), free)
    assert specification_of_climb(lambda z: z @ weights, end, free)
    assert not specification_of_climb(lambda z: z @ weights, torch.zeros(3).double(), free)
    assert set(SPECS) <= {task.name for task in TASKS}


# --- the grader's manners


def graded(folder, *flags):
    done = subprocess.run([sys.executable, "exercises/grade.py", str(folder), *flags], capture_output=True,
                          text=True, cwd=ROOT)
    return done.returncode, done.stdout, done.stderr


REFUSED = [  # number of the exercise, what is changed, and the one line that says so
    (2, ("if scaling is None:", "if scaling is None"), "line 9: this is not Python yet (expected ':')"),
    (3, ("def forward", "def backward"),
     "`RMSNorm.forward` is not there any more: keep the line `def forward(self, x):`"),
    (5, ("class Attention", "import os\n\nclass Attention"),
     "line 1: it imports os; an exercise needs torch and math alone"),
    (5, ("        G = N - 2", "        from numpy import dot as G"),
     "line 6: it imports numpy; an exercise needs torch and math alone"),
    (7, ("top_k=None", "k=None"), "line 1: the signature is another one; keep `def to_probs(logits, "
     "temperature=0.0, top_k=None, top_p=None, min_p=None):`"),
    (9, ("def verify", "from verification import verify\ndef verify"),
     "line 1: it imports verification, in which it is to stand itself"),
    (3, ("    def forward", "    @torch.no_grad()\n    def forward"),
     "line 3: take the decorator of `RMSNorm.forward` away"),
    (3, ("    def forward", "    def helper(self):\n        return 1\n\n    def forward"),
     "line 2: put `helper` outside of its class, as a function"),
    (9, ("    B, K = tokens.shape", "    return verify_tree(p, tokens, torch.zeros(1, 1).long(), coins, q)"),
     "line 1: `verify_tree` is exercise 15; write `verify` itself"),
    (11, ("class SelfDraft:", "def without(x):\n    return x\n\nclass SelfDraft:"),
     "line 1: the library has a `without` already; give your helper another name"),
    (16, ("    @property\n", ""),
     "line 2: the signature is another one; keep `def alpha(self):` under `@property`")]


@pytest.mark.parametrize("number, change, says", REFUSED, ids=[row[2] for row in REFUSED])
def test_what_cannot_be_put_into_the_library_is_refused_in_one_line(number, change, says):
    task = choose(str(number))
    text = answer(task).replace(*change, 1)
    assert text != answer(task)
    with pytest.raises(splice.Refused) as e:
        splice.put(task.module, task.functions, text)
    assert str(e.value) == says and "\n" not in says


@each_task
def test_the_original_put_into_the_library_is_the_library(task):
    spliced = splice.put(task.module, task.functions, answer(task))
    assert [line for line, _ in spliced] == splice.source(task.module).splitlines()
    origin = {line: n for line, n in spliced if n}
    for n, line in enumerate(answer(task).splitlines(), 1):
        assert not line or line.startswith("class ") or origin[line] >= n > 0
    stub = "\n".join(splice.stub(task.module, name) for name in task.functions)
    with pytest.raises(NotImplementedError):
        splice.put(task.module, task.functions, stub)


def test_helpers_come_along_and_other_indents_will_do():
    task = choose("KVCache.write")
    text = ("import itertools\nSIZE = 3\ndef mine(x):\n  return x\n\nclass KVCache:\n"
            "  def write(self, layer, k, v, slots, end, recent=None):\n    return mine(k), v\n")
    spliced = splice.put(task.module, task.functions, text)
    lines, module = [line for line, _ in spliced], {}
    exec(compile("\n".join(lines), "kvcache.py", "exec"), module)     # our own module, with that answer in it
    cache = object.__new__(module["KVCache"])
    assert cache.write(0, 1, 2, None, None) == (1, 2) and module["SIZE"] == 3
    assert hasattr(module["KVCache"], "move"), "the other methods stay"
    assert [(line, n) for line, n in spliced if n] == [
        ("import itertools", 1), ("SIZE = 3", 2), ("def mine(x):", 3), ("  return x", 4),
        ("    def write(self, layer, k, v, slots, end, recent=None):", 7), ("      return mine(k), v", 8)]


def test_of_two_definitions_the_last_one_counts():
    task = choose("alpha")
    text = answer(task) + answer(task).partition("\n")[2].replace("self.hits", "self.tokens")
    assert "self.tokens" in "\n".join(line for line, n in splice.put(task.module, task.functions, text) if n)


def put_answers(out, edits):
    """Files with the library's own functions, each with a change. {number: (old, new)}"""
    for number, change in edits.items():
        task = choose(str(number))
        assert answer(task).count(change[0]) == 1
        (out / file_name(task)).write_text(answer(task).replace(*change))


def test_one_clear_line_for_each_kind_of_accident(out):
    """While the tests run: prints, errors, an exit; and files that are missing or stubs."""
    edits = {
        6: ("keys, values = self", "__import__('os')._exit(0); keys, values = self"),
        8: ("class Coins", "from torch import coins\n\nclass Coins"),
        10: ("token = state.coins.choose(q)", "token = nothing"),
        14: ("def climb", "STEPS = 1 / 0\n\ndef climb")}
    put_answers(out, edits | {1: ("    return x if", '    print("here I am", x.shape)\n    return x if')})
    (out / file_name(choose("9"))).unlink()
    before, library = tree(out), tree(ROOT / "exercises") | {p: p.read_bytes() for p in ROOT.glob("*.py")}
    code, printed, _ = graded(out, "--json")
    found = {verdict["number"]: verdict for verdict in json.loads(printed)}
    assert code == 1 and sorted(found) == list(range(1, 17))
    assert found[1]["status"] == "passed" and "it prints ('here I am torch.Size([4])')" in found[1]["remark"]
    assert found[6]["message"] == "the process ended before the tests did (status 0): does it call exit?"
    assert re.match("line 1: it cannot be imported: ImportError: cannot import .*coins", found[8]["message"])
    assert "'nothing' is not defined\nraised at     line 22: token = nothing" in found[10]["message"]
    assert found[10]["line"] == 22 and found[10]["test"].startswith("test_by_outcomes.py::test_chain_")
    assert found[14]["message"] == (
        "ZeroDivisionError: division by zero\nraised at     line 1: STEPS = 1 / 0")
    assert found[9]["message"].startswith("there is no 09_verify.py")
    assert {n for n in found if found[n]["status"] == "failed"} == set(edits)
    todo = set(range(1, 17)) - {1} - set(edits)
    assert {n for n in found if found[n]["status"] == "to do"} == todo, "stubs"
    assert tree(out) == before
    assert tree(ROOT / "exercises") | {p: p.read_bytes() for p in ROOT.glob("*.py")} == library


def test_the_table_of_one_exercise_and_an_endless_loop(out):
    """The line at which it hangs is named, within the loop."""
    put_answers(out, {4: ("    B, M =", "    while True:\n        B = 1\n    B, M ="),
                      1: ("torch.tanh(x / cap)", "torch.tanh(x)")})
    code, printed, _ = graded(out, "visible", "--seconds", "10")
    loop = (out / "04_visible.py").read_text().splitlines().index("    while True:") + 1
    assert code == 1 and printed in [
        " 4  visible                          failed\n"
        f"      it has not ended after 10 seconds: an endless loop at line {line}?\n0 of 1 passed\n"
        for line in (loop, loop + 1)]
    code, printed, _ = graded(out, "1")
    assert code == 1
    words = "given +softcap", "expected", "what came", "likely +the sum inside tanh is x / cap, not x$"
    assert all(re.search(f"^ +{word}", printed, re.M) for word in words) and "0 of 1 passed" in printed


def test_folders_and_names_that_do_not_exist(tmp_path):
    code, _, said = graded(tmp_path / "none")
    assert code == 2 and "there is no folder" in said and "start.py" in said
    code, _, said = graded(tmp_path, "loop")
    assert code == 2 and "there is no exercise 'loop'" in said


# --- variants


@each_task
def test_a_variant_has_other_names_and_the_same_description(task):
    for name in task.functions:
        seen = set()
        for seed in range(6):
            d, stub = variants.disguise(task.module, name, seed), variants.stub(task.module, name, seed)
            node = splice.find(ast.parse(stub), d.name)
            assert splice.is_stub(node) and splice.signature(node) == (d.decorators, d.head)
            ours = ast.get_docstring(splice.find(ast.parse(splice.source(task.module)), name)) or ""
            assert " ".join(ast.get_docstring(node).split()).endswith(" ".join(ours.split()))
            assert variants.stub(task.module, name, seed) == stub, "a seed names its variant"
            seen.add(d.head)
        assert len(seen) > 1


def test_a_folder_of_a_variant_is_graded_as_one(tmp_path):
    out, task = tmp_path / "out", choose("expected_improvement")
    start.write(out, 3)
    assert "in place of  std * std" in (out / file_name(task)).read_text()
    mine = "\n".join(variants.solution(task.module, name, 3) for name in task.functions)
    (out / file_name(task)).write_text(mine)
    assert graded(out, "13")[:2] == (0, "13  predict, expected_improvement    passed\n1 of 1 passed\n")
    (out / VARIANT).write_text("?")
    code, _, said = graded(out, "13")
    assert code == 2 and said.endswith(f"{out / VARIANT} holds no seed: say it, --variant SEED\n")
    (out / VARIANT).unlink()
    (out / file_name(task)).write_text(answer(task))
    assert graded(out, "13")[0] == 0 and graded(out, "13", "--variant", "3")[0] == 1, "the seed is known"
    with pytest.raises(splice.Refused, match="`GaussianProcess.* is not there any more: keep the line `def"):
        splice.put(task.module, task.functions, answer(task), {
            name: variants.disguise(task.module, name, 3) for name in task.functions})


# --- diagnose


def test_the_cases_of_diagnose_are_rows_of_the_mutants():
    phrases = [m.phrase for m in mutants.MUTANTS]
    asked = {(task.module, name) for task in TASKS for name in task.functions}
    assert len(diagnose.CASES) >= 2 * diagnose.COUNT
    for case in diagnose.CASES:
        lines, where = diagnose.mutated(case)
        assert phrases.count(case.phrase) == 1 and len(where) == 1 and 0 < min(where) <= len(lines)
        assert (diagnose.row(case).file, case.function) not in asked, "that would give an exercise away"


def test_a_diagnosis_is_graded_by_its_line(tmp_path, monkeypatch):
    monkeypatch.setattr(diagnose, "failure", lambda case: ["E   it fails"])
    folder = diagnose.write(tmp_path)
    files = sorted(folder.iterdir())
    assert [path.name for path in files] == [f"{n:02}.txt" for n in range(1, 7)]
    (right,) = diagnose.mutated(diagnose.CASES[0])[1]
    text = files[0].read_text()
    assert diagnose.grade(files[0]) == ("to do", "") and "E   it fails" in text
    files[0].write_text(text.replace("line: ?", f"line: {right}"))
    assert diagnose.grade(files[0])[0] == "passed" and diagnose.grade(files[0])[1].startswith("say why, "
        "too; ")
    files[0].write_text(text.replace("line: ?", f"line: {right}").replace("why: ?", "why: it sees too much"))
    assert diagnose.grade(files[0]) == (
        "passed", f"compare your reason with this: {diagnose.CASES[0].why}")
    files[0].write_text(text.replace("line: ?", f"line: {right - 1}"))
    assert diagnose.grade(files[0]) == ("failed", f"line {right - 1} is as the library has it")
    with pytest.raises(FileExistsError):
        diagnose.write(tmp_path)
    others = [[path.name for path in sorted(diagnose.write(tmp_path / str(seed), seed).iterdir())]
              for seed in (1, 2)]
    assert others[0] != others[1] and all(len(names) == 6 for names in others)
    again = diagnose.write(tmp_path / "again", 1)
    assert [path.name for path in sorted(again.iterdir())] == others[0], "a seed names its cases"
