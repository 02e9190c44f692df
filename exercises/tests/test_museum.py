"""The museum: each bug is off by what its page says, and ours is not. That the grader sees those
in exercises is what `python exercises/check.py` tries."""
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from tiny import law as enumerated
from tiny import wide

import control
from exercises import autograder, museum
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


# --- the exam, and the zip for a server


def test_the_numbers_of_the_exam():
    exam = Path(museum.__file__).with_name("exam.md").read_text(encoding="utf-8").replace("\n", " ")
    p, q = [0.6, 0.3, 0.1], [0.3, 0.3, 0.4]
    assert sum(map(min, p, q)) == pytest.approx(0.7)
    from_p = (("residual = (residual - q).clamp_(min=0)", "residual = p"),)
    wrong = EXHIBITS[0]._replace(changes=from_p, p=[p, [1, 0, 0]], q=[q])
    law = [laws(wrong)[0][t, 0] for t in range(3)]
    assert law == pytest.approx([0.48, 0.39, 0.13]) and off(wrong) == pytest.approx(0.12)

    p, q = wide([[0.25, 0.75]] * 3)[None], wide([[0.75, 0.25]] * 2)[None]
    for rule, whole, mean in ((verify, 1 / 3, 0.75), (verify_block, 1.0, 0.875)):
        draft = torch.tensor([[0, 1]])
        found = enumerated(lambda coins, rule=rule, draft=draft: int(rule(p, q, draft, coins)[0]))
        assert found.get(2, 0.0) == pytest.approx(whole)
        assert rule is verify or found.get(1, 0.0) == 0
        found = enumerated(lambda coins, rule=rule: int(rule(p, q, coins.choose(q), coins)[0]))
        assert sum(n * chance for n, chance in found.items()) == pytest.approx(mean)

    speeds = [control.expected_speedup(0.6, gamma, 0.25) for gamma in (1, 2, 3)]
    assert [f"{speed:.3f}" for speed in speeds] == ["1.280", "1.307", "1.243"]
    assert control.expected_tokens(0.6, 2) / (2 * 0.25 + 1.5) == pytest.approx(0.98)
    assert (control.expected_tokens(0.6, 2) - 1) / 2 == pytest.approx(0.48)
    for words in ("(0.48, 0.39, 0.13)", "0.12", "0.875",
                  "= 1.28; 1.96 / 1.5 = 1.307; 2.176 / 1.75 = 1.243", "= 0.98"):
        assert words in exam

    known, drafted, kept = 5, 3, 1
    block = torch.arange(known - 1, known + drafted)[None]
    after = known + kept                                    # where the replacement stands
    assert block.tolist() == [[4, 5, 6, 7]]
    assert [s for s in block[0].tolist() if s >= after] == [6, 7]
    at = torch.tensor([[after]])
    assert visible(at, at, 8)[0, 0].nonzero()[:, 0].tolist() == list(range(7))


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
