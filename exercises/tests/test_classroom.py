"""A whole class: folders, sheets and marks."""
import csv
import io
import subprocess
import sys

import pytest

from exercises import classroom, diagnose, museum, splice
from exercises.answers import original
from exercises.classroom import seed_of
from exercises.tasks import choose, file_name

NAMES = ["Ada Lovelace", "M\u00fcller, J."]


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A class of two."""
    monkeypatch.setattr(diagnose, "failure", lambda case: ["E   it fails"])
    (tmp_path / "names.txt").write_text("\n".join(["", *NAMES, ""]), encoding="utf-8")
    argv = ["make", tmp_path / "class", tmp_path / "names.txt", "--key", "secret"]
    assert classroom.main([str(word) for word in argv]) == 0
    return tmp_path / "class"


def test_each_student_has_sheets_of_their_own(made):
    sheets = [(made / name / "five.txt").read_text(encoding="utf-8") for name in NAMES]
    cases = [[path.stem for path in diagnose.answered(made / name)] for name in NAMES]
    assert sheets[0] != sheets[1] and cases[0] != cases[1]
    assert all(int(n) > len(diagnose.CASES) for row in cases for n in row), "none is public"
    for name in NAMES:
        stub = (made / name / "09_verify.py").read_text(encoding="utf-8")
        assert str(made) not in stub and f"grade.py '{name}' 9" in stub
        assert (made / name / "AGENTS.md").is_file()


def test_a_class_is_graded_in_one_table(made):
    ada = made / NAMES[0]
    task = choose("8")
    (ada / file_name(task)).write_text(original(task), encoding="utf-8")
    seed = seed_of("secret", NAMES[0])
    sheet = (ada / "five.txt").read_text(encoding="utf-8")
    p, q = next((p, q) for p, q in museum.PROBES if museum.judge(
        seed, museum.five(seed)[1], p, q)[0])
    for word, given in (("answer", museum.five(seed)[1]), ("p", p), ("q", q)):
        sheet = sheet.replace(f"{word}: ?", f"{word}: {given}")
    (ada / "five.txt").write_text(sheet, encoding="utf-8")
    case = diagnose.answered(ada)[0]
    line = min(diagnose.right_lines(case))
    case.write_text(case.read_text().replace("line: ?", f"line: {line}"))
    helped = splice.original("verification.py", "verify")       # by the library's `against`
    task = choose("9")
    (made / NAMES[1] / file_name(task)).write_text("\n".join(["import torch", *helped, ""]))
    # in a process of its own: a fork of this one holds modules of this folder's tests
    grade = [classroom.__file__, "grade", str(made), "--key", "secret", "--only", "8", "9", "16"]
    out = subprocess.run([sys.executable, *grade], capture_output=True, text=True, check=True)
    first, second = csv.DictReader(io.StringIO(out.stdout))
    assert first["student"] == NAMES[0] and first["8 Coins.choose"] == "4"
    assert (first["16 alpha"], first["diagnose, lines"], first["five"]) == ("0", "1", "8")
    assert first["sum"] == "13" and second["sum"] == "0" and second["student"] == NAMES[1]
    assert second["9 verify"] == "0", "grade.py says that `against` is out of reach"
    assert second["about five"] == "no answer"


@pytest.mark.parametrize("words, says", [
    (["grade", "none", "--key", "k"], "there is no folder none"),
    (["make", "class", "--key", "k"], "make needs a file with a name in each line"),
    (["grade", ".", "--key", "k", "--only", "99"], "there is no exercise '99'")])
def test_what_cannot_be_is_said_in_one_line(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a student").mkdir()
    with pytest.raises(SystemExit) as stop:
        classroom.main(words)
    assert stop.value.code == 2 and says in capsys.readouterr().err.splitlines()[-1]
