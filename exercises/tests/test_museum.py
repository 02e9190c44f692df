"""The museum: each bug is off by what its page says, and ours is not. That the grader sees those
in exercises is what `python exercises/check.py` tries."""
import json
import os
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny import law as enumerated
from tiny import wide

import control
from exercises import autograder, exam, museum
from exercises.answers import original
from exercises.museum import EXHIBITS, OURS, RIGHT, five, laws, off, show
from exercises.tasks import choose, file_name
from methods.block import verify_block
from model import visible
from verification import verify

PAGE = (Path(museum.__file__).with_name("museum.md")).read_text(encoding="utf-8")
SECTIONS = dict(enumerate(PAGE.split("\n## ")[1:], 1))


@pytest.mark.parametrize("e", EXHIBITS, ids=[e.name for e in EXHIBITS])
def test_a_bug_is_off_by_what_the_page_says_and_ours_is_not(e):
    section = SECTIONS[EXHIBITS.index(e) + 1]
    lines = list(show(e))
    assert "```diff\n" + "\n".join(lines) + "\n```" in section
    assert "](https://" in section and e.name.lower() in section.lower().partition("\n")[0]
    assert float(lines[-1].removeprefix("off by ")) > 0.02
    assert off(e, OURS) < (0.002 if "points" in e.case else 1e-12)


def test_shared_noise_by_hand():
    """Token 0 is rejected half of the time. Then 1 and 2 race with rates .6 and .4. That token 0
    came first, at a time T from Exp(1), delays each by q T / rate: by .5 T and .25 T. So 2 starts
    .25 T earlier."""
    e = next(e for e in EXHIBITS if e.scope == "Coins.choose")
    got, _ = laws(e)
    first = [sum(weight for text, weight in got.items() if text[0] == t) for t in range(3)]
    second = 0.3 + 0.5 * 0.6 / (1 + 0.4 * 0.25)
    assert first == pytest.approx([0.1, second, 0.9 - second], abs=2e-3)
    one = e._replace(p=[[0.1, 0.8, 0.1], [1, 0, 0]])
    assert off(one) < 2e-3, "one token alone has p > q: nothing is off"


# --- which of these five is wrong?


@pytest.mark.parametrize("number", range(len(RIGHT)))
def test_what_is_called_right_is_right(number):
    for p, q in (([0.5, 0.3, 0.2], [0.2, 0.2, 0.6]), ([0.0, 1.0], [0.5, 0.5]),
                 ([0.9, 0.1], [0.9, 0.1])):
        assert off(RIGHT[number]._replace(p=[p] * 3, q=[q] * 2)) < 1e-12


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
    says = [museum.judge(seed, five(seed)[1], [0.5] * 2, [0.5] * 2)[1] for seed in range(9)]
    assert any("but with these p and q its law is right" in why for why in says)
    page = {museum.diff(e)[-1] for e in EXHIBITS}
    assert not any(museum.diff(e)[-1] in page for e in museum.unprinted())
    assert len(museum.unprinted()) > 9
    words = f"--five 0 --answer {five(0)[1]} --p 0.6 0.3 0.1 --q 0.2 0.3 0.5"
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


# --- the exam, and the zip for a server


def accepted(judge, coins, draft=None, q=None):
    return int(judge(coins.choose(q) if draft is None else draft, coins)[0])


def test_the_answers_of_the_exam_are_those_of_the_library():
    """Those that are printed, and those for other numbers."""
    page = Path(museum.__file__).with_name("exam.md").read_text(encoding="utf-8").replace("\n", " ")
    from_p = (("residual = (residual - q).clamp_(min=0)", "residual = p"),)
    for p, q in (([0.6, 0.3, 0.1], [0.3, 0.3, 0.4]), ([0.2, 0.2, 0.6], [0.5, 0.4, 0.1])):
        wrong = EXHIBITS[0]._replace(changes=from_p, p=[p, [1, 0, 0]], q=[q])
        rate, rest, law, far = exam.verifier(p, q)
        assert law == pytest.approx([laws(wrong)[0][t, 0] for t in range(3)])
        assert far == pytest.approx(off(wrong)) and rate == pytest.approx(sum(map(min, p, q)))
        residual = [max(a - b, 0) for a, b in zip(p, q, strict=True)]
        assert rest == pytest.approx([x / sum(residual) for x in residual])

    for p, q in (([0.25, 0.75], [0.75, 0.25]), ([0.4, 0.6], [0.7, 0.3])):
        rows, drawn = wide([p] * 3)[None], wide([q] * 2)[None]
        for rule, (chance, mean) in zip((verify, verify_block), exam.blocks(p, q), strict=True):
            judge = partial(rule, rows, drawn)
            found = enumerated(partial(accepted, judge, draft=torch.tensor([[0, 1]])))
            assert found.get(2, 0.0) == pytest.approx(chance)
            found = enumerated(partial(accepted, judge, q=drawn))
            assert sum(n * weight for n, weight in found.items()) == pytest.approx(mean)

    for alpha, cost, slow in ((0.6, 0.25, 1.5), (0.8, 0.1, 2.0)):
        speeds, wide_pass, share = exam.pays(alpha, cost, slow)
        assert speeds == pytest.approx(
            [control.expected_speedup(alpha, gamma, cost) for gamma in (1, 2, 3)])
        assert wide_pass == pytest.approx(control.expected_speedup(alpha, 2, cost, slow))
        assert share == pytest.approx((control.expected_tokens(alpha, 2) - 1) / 2)

    written, dead, start = exam.cache(5, 3, 1)
    at = torch.tensor([[start]])
    assert visible(at, at, 8)[0, 0].nonzero()[:, 0].tolist() == list(range(start + 1))
    assert (written, dead, start) == ([4, 5, 6, 7], [6, 7], 6)
    for words in ("(0.48, 0.39, 0.13)", "0.12", "0.875",
                  "= 1.28; 1.96 / 1.5 = 1.307; 2.176 / 1.75 = 1.243", "= 0.98"):
        assert words in page


def test_the_zip_grades_an_answer_as_the_server_would(tmp_path):
    source, submission = tmp_path / "source", tmp_path / "submission"
    autograder.write(tmp_path / "a.zip")
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        archive.extractall(source)
        assert archive.getinfo("run_autograder").external_attr >> 16 & 0o111
    submission.mkdir()
    (tmp_path / "results").mkdir()
    task = choose("8")
    (submission / file_name(task)).write_text(original(task), encoding="utf-8")
    done = subprocess.run(["sh", source / "run_autograder"], cwd=tmp_path, capture_output=True,
                          text=True,
                          env=os.environ | {"AT": str(tmp_path), "PY": sys.executable})
    assert not done.returncode, done.stderr
    found = json.loads((tmp_path / "results" / "results.json").read_text())
    marks = {test["name"]: test["score"] for test in found["tests"] if test["score"]}
    assert marks == {"Coins.choose": 4}
    with pytest.raises(SystemExit) as stop:
        autograder.main([str(tmp_path / "a.zip")])
    assert stop.value.code == 2, "nothing is written over"


def test_the_container_makes_what_make_test_needs():
    """Its command is a target of the Makefile, of which `make test` is made."""
    text = (museum.ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8")
    made = json.loads("\n".join(line for line in text.splitlines() if not line.startswith("//")))
    target = made["postCreateCommand"].removeprefix("make .venv/")
    rules = (museum.ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"\n$(VENV)/{target}:" in rules and f"\ntest: $(VENV)/{target}" in rules
