"""The kit for engines: its cases are what the library says, whatever the rounding; it passes what
is right and names what is wrong; and an engine in C passes."""
import json
import math
import random
import re
import shutil
import subprocess
import sys
import warnings
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from test_porting import script
from tiny import command

from porting import engine, library_engine, make
from porting.make import ENGINES, replies, wrong_engine

PORTING = Path(__file__).parents[1]
KIT = json.loads(engine.CASES.read_text(encoding="utf-8"))
CASES = KIT["cases"]
CALLS = [case for case in CASES if "law" not in case]
LAWS = [case for case in CASES if "law" in case]
call = command(engine.main)


# --- the cases


def test_there_are_over_two_hundred_and_laws_among_them():
    assert [case["case"] for case in CASES] == list(range(1, 225))
    assert min(Counter(case["rule"] for case in CALLS).values()) >= 20 and len(LAWS) >= 12
    assert {case["rule"] for case in LAWS} == {"token", "block", "tree", "match"}
    assert KIT["mistakes"] == [mistake for *_, mistake in ENGINES]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_library_says_what_the_cases_say(dtype):
    for case in CASES:
        got = make.engine_answer(case, partial(library_engine.answer, dtype=dtype))
        exact = got == case["answer"]
        assert exact or "law" in case and engine.alike(case["answer"], got), case["case"]


def test_nothing_hangs_on_rounding():
    """Every decision has a margin, and numbers that are off by 1e-5 decide it alike."""
    noise = random.Random(0)

    def off(value):
        if isinstance(value, list):
            return [off(x) for x in value]
        return value if value is None else value * (1 + 1e-5 * noise.uniform(-1, 1))

    for case in CALLS:
        assert case["margin"] == pytest.approx(make.engine_margin(case), abs=1e-6), case["case"]
        if not make.is_exact(case):
            assert case["margin"] >= make.ENGINE_MARGIN, case["case"]
            near = case | {key: off(case[key]) for key in ("p", "q", "uniforms")}
            assert make.engine_answer(near) == case["answer"], case["case"]


def test_the_uniforms_of_a_race_are_those_of_its_seed_and_position():
    """So an engine may use the numbers that it is given and need not make them."""
    def winners(p, uniforms):
        pairs = [zip(row, us, strict=True) for row, us in zip(p, uniforms, strict=True)]
        arrives = [[-math.log1p(-u) / x if x > 0 else math.inf for x, u in row] for row in pairs]
        return [row.index(min(row)) for row in arrives]

    for case in CALLS:
        if case["rule"] == "race":
            first = winners(case["p"], case["uniforms"])
            drafted = winners(case["q"], case["uniforms"][:-1])
            accepted = next((k for k, t in enumerate(drafted) if t != first[k]), len(drafted))
            assert case["answer"] == {
                "tokens": drafted, "accepted": accepted, "token": first[accepted]}


def test_the_laws_are_those_of_the_target():
    """To the last digit, as the grids fit the numbers; and the paper's example of block
    verification accepts 11/9 tokens instead of 10/9 (Sun et al. 2025, section 3)."""
    assert max(case["answer"]["off"] for case in LAWS) < 1e-9
    p, q = [[1 / 3, 2 / 3]] * 3, [[2 / 3, 1 / 3]] * 2
    paper, = (case for case in LAWS if case["p"] == p and case["q"] == q)
    assert paper["rule"] == "block" and paper["answer"]["accepted"] == pytest.approx(11 / 9)
    assert make.engine_answer(paper | {"rule": "token"}) == pytest.approx(
        {"off": 0, "accepted": 10 / 9})


def test_a_law_by_hand():
    """p is (1/2, 1/2), and the draft is always token 0. An engine that always accepts it is off by
    1/2. One that never does, and draws from p, is right, but accepts nothing."""
    case = {"case": 1, "rule": "token", "law": [2, 2], "p": [[0.5, 0.5]] * 2, "q": [[1.0, 0.0]],
            "tokens": None, "length": 1}
    requests = engine.requests_of(case)
    uniforms = [request["uniforms"] for request in requests]
    assert uniforms == [[0.25, 0.25], [0.25, 0.75], [0.75, 0.25], [0.75, 0.75]]
    always = [{"accepted": 1, "token": int(last > 0.5)} for _, last in uniforms]
    assert engine.law_of(case, always) == {"off": 0.5, "accepted": 1.0}
    never = [{"accepted": 0, "token": int(last > 0.5)} for _, last in uniforms]
    assert engine.law_of(case, never) == {"off": 0.0, "accepted": 0.0}
    assert make.engine_answer(case) == {"off": 0.0, "accepted": 0.5}


# --- engines


@pytest.mark.parametrize("number", range(len(ENGINES)),
                         ids=[row[-1].replace(" ", "-") for row in ENGINES])
def test_a_wrong_engine_is_named(number):
    """By the calls of its rule alone, and no other mistake explains them. At least two cases see
    it."""
    file, *change, mistake = ENGINES[number]
    seen = [case for case in CASES if str(number) in case["wrong"]]
    cases = [case for case in CALLS if case["rule"] == seen[0]["rule"]]
    found = engine.judge(cases, replies(wrong_engine(file, *change), cases))
    said = [line.strip() for line in engine.report(cases, KIT["mistakes"], found)]
    assert len(seen) >= 2 and sum(line.endswith("gives all these answers.") for line in said) == 1
    assert f"An engine in which {mistake} gives all these answers." in said


def test_what_the_laws_forgive():
    """An engine that spends its uniforms in another way writes texts of the right law. One that
    tests a block token by token only accepts too little. One that accepts all is off."""
    def said(mistake, rule):
        row = next(row for row in ENGINES if row[-1] == mistake)
        cases = [case for case in CASES if case["rule"] == rule]
        found = engine.judge(cases, replies(wrong_engine(*row[:-1]), cases))
        laws = [found[case["case"]][1] for case in cases if "law" in case]
        return str(engine.report(cases, KIT["mistakes"], found)), laws

    report, laws = said("the uniform of the choice is spent before the flips", "token")
    assert not any(laws) and "cases right; but the law of its texts is right" in report
    report, laws = said("drafts are tested token by token", "block")
    assert "but the law" not in report and "right, but 1.1111 drafted tokens" in str(laws)
    report, laws = said("every draft is accepted", "token")
    assert "but the law" not in report and all("distribution, off by" in law for law in laws)


README = (PORTING / "README.md").read_text(encoding="utf-8")
OURS, THEIRS = re.findall(r"```python\n(import json.*?)```", README, re.S)
TEXTS = ["--texts", 500]


@pytest.mark.parametrize("code, flags, status, words", [
    (f"import sys\nsys.path.insert(0, {str(PORTING.parent)!r})\n{OURS}", [], 0, "cases right"),
    (THEIRS, TEXTS, 0, "the distribution is right, and"),
    (THEIRS.replace(": K + 1]]).log()", ": K + 1]])"), TEXTS, 1, "another distribution")],
    ids=["the library", "transformers", "transformers, given probabilities as logits"])
def test_the_examples_in_the_text_are_engines(call, tmp_path, code, flags, status, words):
    (tmp_path / "mine.py").write_text(code)
    got, out, _ = call("--rule", "token", *flags, sys.executable, tmp_path / "mine.py")
    assert got == status and words in out, out


def test_what_an_engine_gets_holds_no_answer():
    for case in CASES:
        for request in engine.requests_of(case)[:2]:
            assert not engine.KEPT_HERE & request.keys() and "uniforms" in request


def test_an_engine_in_c_passes(call, tmp_path):
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        warnings.warn("no C compiler here: engine.c was not run", stacklevel=1)
        return
    built = tmp_path / "engine"
    subprocess.run([compiler, "-O2", "-Wall", "-Wextra", "-Werror", "-o", built,
                    PORTING / "engine.c"], check=True)
    status, out, _ = call("--rule", "token", built)
    assert status == 0 and re.search(r"^token (\d+) of \1 cases right$", out, re.M)
    status, out, _ = call(built)
    assert status == 1 and re.search(r"^block 0 of \d+ cases right, the others todo$", out, re.M)


def test_many_texts_tell_an_engine_with_its_own_noise():
    noise = random.Random(1)

    def said(reply):
        found = []
        for case in LAWS:
            if case["rule"] == "token":
                sent = [r | {"uniforms": [noise.random() for _ in r["p"]]}
                        for r in engine.many_requests(case, 2000, noise)]
                answers = {r["case"]: reply(r) for r in sent}
                found.append(engine.judge_texts(case, sent, answers, noise)[0])
        return found

    from_p = next(row for row in ENGINES if row[-1] == "the replacement is drawn from p")
    wrong = said(wrong_engine(*from_p[:-1]))
    assert sum("another distribution" in words for words in wrong) >= 4
    never = said(lambda r: {"accepted": 0,
                            "token": noise.choices(range(len(r["p"][0])), r["p"][0])[0]})
    assert all("distribution is right, but 0.0000 drafted tokens" in words for words in never)


@pytest.mark.parametrize("answer, words", [
    ({"accepted": 0, "token": -1}, "token: expected a whole number from 0 to"),
    ({"accepted": True, "token": 0}, "accepted: expected a whole number from 0 to"),
    ({"accepted": 99, "token": 0}, "got 99"),
    ({"token": 0}, "accepted: expected a whole number from 0 to"),
])
def test_an_answer_of_the_wrong_form_is_told_from_a_wrong_one(call, answer, words):
    status, out, _ = call("--rule", "token", *script(
        f"print(json.dumps({{'case': case['case'], **{answer}}}))"))
    assert status == 1 and words in out and "an engine in which" not in out


def test_engines_that_fail(call, tmp_path):
    status, out, _ = call("--rule", "race", *script("sys.exit('no memory')"))
    assert status == 1 and "race  0 of" in out and "its last words are 'no memory'" in out
    call.refuses(["no_engine"], tmp_path, "no_engine: cannot be run")
