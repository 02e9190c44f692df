"""The museum: each bug is off by what its page says, ours is not, and grader or porting kit see it."""
import importlib
import inspect
import json
import re
import sys
from pathlib import Path

import pytest

import sampling
from exercises import museum
from exercises.museum import EXHIBITS, OURS, RIGHT, changed, five, laws, off, show
from exercises.tasks import TASKS
from porting import check, library_port

each_exhibit = pytest.mark.parametrize("e", EXHIBITS, ids=[e.name for e in EXHIBITS])
CASES = {n: case for n, case in check.read_cases(check.TRACES).items() if case[0]["step"] >= 8}


def plant(monkeypatch, e):
    """The bug takes the place of ours wherever a module holds it."""
    name, function, *_ = changed(e)
    if name == "Coins":
        method = e.scope.split(".")[1]
        monkeypatch.setattr(sampling.Coins, method, getattr(function, method))
        return
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is OURS[name]:
            monkeypatch.setattr(module, name, function)


def inputs(node):
    """(what, call) for each set of arguments of a test."""
    file, name = node.partition("[")[0].split("::")
    test = getattr(importlib.import_module(file.removesuffix(".py")), name)
    mark = next((m for m in getattr(test, "pytestmark", ()) if m.name == "parametrize"), None)
    names = [word.strip() for word in mark.args[0].split(",")] if mark else []
    more = {}
    if "record_property" in inspect.signature(test).parameters:
        more = {"record_property": lambda *_: None}
    for values in mark.args[1] if mark else [()]:
        values = values if len(names) > 1 else [values] if names else []
        given = dict(zip(names, values, strict=True)) | more
        yield f"{name}{values}", lambda test=test, given=given: test(**given)


def refused(e):
    """The inputs of the exercise's own tests that the bug fails."""
    task = next(task for task in TASKS if e.scope in task.functions)
    found = []
    for what, call in (pair for node in task.tests for pair in inputs(node)):
        try:
            call()
        except (Exception, pytest.fail.Exception):
            found.append(what)
    return found


def wrong_cases():
    """The numbers of the porting kit's cases that the library now answers wrongly."""
    found = []
    for number, (request, expect) in CASES.items():
        try:
            got = json.loads(json.dumps(library_port.answer(request)[0]))
        except Exception:
            found.append(number)
            continue
        if check.differ(expect["answer"], got, 1e-6, []):
            found.append(number)
    return found


PAGE = (Path(museum.__file__).with_name("museum.md")).read_text(encoding="utf-8")
SECTIONS = dict(enumerate(PAGE.split("\n## ")[1:], 1))


@each_exhibit
def test_a_bug_is_off_by_what_the_page_says_and_ours_is_not(e):
    section = SECTIONS[EXHIBITS.index(e) + 1]
    lines = list(show(e))
    assert "```diff\n" + "\n".join(lines) + "\n```" in section
    assert e.link in section and e.name.lower() in section.lower().partition("\n")[0]
    assert float(lines[-1].removeprefix("off by ")) > 0.02
    assert off(e, OURS) < (0.002 if "points" in e.case else 1e-12)


@each_exhibit
def test_the_grader_refuses_it_by_two_inputs_and_the_porting_kit_by_the_cases_of_the_page(e, monkeypatch):
    """`until`, `flip` and the loop are no exercises."""
    plant(monkeypatch, e)
    assert e.scope in ("until", "Coins.flip", "rounds_with_cache") or len(refused(e)) >= 2
    said = SECTIONS[EXHIBITS.index(e) + 1].partition("*Seen by*")[2].replace("\n", " ")
    cases = [int(n) for words in re.findall(r"ases? (\d+(?: and \d+)*)", said) for n in words.split(" and ")]
    assert set(cases) <= set(wrong_cases())


def test_the_tests_of_ours_that_the_page_names_for_what_is_no_exercise():
    until = changed(next(e for e in EXHIBITS if e.scope == "until"))[1]
    assert until({0}, [5, 0, 7]) != [5, 0], "its example"


def test_shared_noise_by_hand():
    """Token 0 is rejected half of the time. Then 1 and 2 race with rates .6 and .4. That token 0 came first,
    at a time T from Exp(1), delays each by q T / rate: by .5 T and .25 T. So 2 starts .25 T earlier."""
    e = next(e for e in EXHIBITS if e.scope == "Coins.choose")
    got, _ = laws(e)
    first = [sum(weight for text, weight in got.items() if text[0] == t) for t in range(3)]
    second = 0.3 + 0.5 * 0.6 / (1 + 0.4 * 0.25)
    assert first == pytest.approx([0.1, second, 0.9 - second], abs=2e-3)
    assert off(e._replace(p=[[0.1, 0.8, 0.1], [1, 0, 0]])) < 2e-3, "one token alone has p > q: nothing is off"


# --- which of these five is wrong?


@pytest.mark.parametrize("number", range(len(RIGHT)))
def test_what_is_called_right_is_right(number):
    for p, q in (([0.5, 0.3, 0.2], [0.2, 0.2, 0.6]), ([0.0, 1.0], [0.5, 0.5]), ([0.9, 0.1], [0.9, 0.1])):
        e = museum.of_verify("", "", RIGHT[number], [p] * 3, [q] * 2)
        assert off(e) < 1e-12


def test_each_sheet_has_one_wrong_verifier_and_an_answer_is_judged(capsys):
    p, q = [0.6, 0.3, 0.1], [0.2, 0.3, 0.5]
    sheets = set()
    for seed in range(20):
        rows, wrong = five(seed)
        sheets.add(tuple(e.changes for e in rows))
        assert museum.judge(seed, wrong, p, q)[0]
        other = wrong % 5 + 1
        assert museum.judge(seed, other, p, q) == (
            False, f"the law of number {other} is right for these p and q, and for all others")
    assert len(sheets) > 15
    seed = next(seed for seed in range(20) if "softmax" in five(seed)[0][five(seed)[1] - 1].name)
    says = museum.judge(seed, five(seed)[1], [0.5] * 2, [0.5] * 2)[1]
    assert "but with these p and q its law is right" in says
    words = f"--five 0 --answer {five(0)[1]} --p 0.6 0.4 --q 0.2 0.8"
    assert museum.main(words.split()) == 0
    assert capsys.readouterr().out.startswith("right: with these p and q, number ")


@pytest.mark.parametrize("words, says", [
    ("--answer 9 --p 1 0 --q 1 0", "--answer must be a number from 1 to 5, got 9"),
    ("--answer 1 --p 0.5 0.6 --q 1 0", "--p must be a distribution"),
    ("--answer 1 --p 0.5 0.5 --q 1", "--q must be a distribution, both of as many tokens")])
def test_a_bad_answer_gets_one_line(words, says, capsys):
    with pytest.raises(SystemExit) as stop:
        museum.main(["--five", "1", *words.split()])
    assert stop.value.code == 2 and says in capsys.readouterr().err.splitlines()[-1]
