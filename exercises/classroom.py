"""A whole class: a folder for each student, and a table of marks.

    python exercises/classroom.py make CLASS NAMES --key SECRET             NAMES: a name per line
    python exercises/classroom.py key CLASS --key SECRET                    the right answers
    python exercises/classroom.py grade CLASS --key SECRET --only 4 6 8 > marks.csv

CLASS/NAME is what `start.py` writes, with two sheets: `five.txt`, five verifiers of which one is
wrong, and the folder `diagnose`. Both are drawn for each student from the key and the name, so keep
the key to yourself. The grader draws its inputs from the key as well. It runs the students' code.
"""
import argparse
import csv
import hashlib
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from exercises import diagnose, domains, museum, start  # noqa: E402
from exercises.grade import CONTEXT, LIMIT, WORKERS, grade_file, only  # noqa: E402

POINTS = 4      # of an exercise, of the right verifier, and of the p and q that show it
SHEET = """Which of these five verifiers is wrong? Give two distributions of as many tokens each, at
least two, for which the law of its text is another one than p. You have one try.

answer: ?
p: ?
q: ?

"""


def seed_of(key, name):
    return int(hashlib.sha256(f"{key}\n{name}".encode()).hexdigest()[:12], 16)


def students(folder):
    found = sorted(path for path in folder.iterdir() if path.is_dir())
    if not found:
        raise ValueError(f"there is no student's folder in {folder}")
    return found


def make(folder, names, key):
    """A folder for each name. Raises FileExistsError where one holds anything."""
    for name in names:
        if name in (".", "..") or re.search(r'[/\\:*?"<>|\x00-\x1f]', name):
            raise ValueError(f"{name!r} cannot be the name of a folder")
    for name in names:
        out = folder / name
        start.write(out)
        diagnose.write(out, seed_of(key, name), private=True)
        rows, _ = museum.five(seed_of(key, name))
        sheet = "\n".join(f"{i}.\n" + "\n".join(museum.diff(e)) + "\n"
                          for i, e in enumerate(rows, 1))
        (out / "five.txt").write_text(SHEET + sheet, encoding="utf-8")


def judged(path, seed):
    """(points, what there is to say) of a sheet "five"."""
    if not path.is_file():
        return 0, "no five.txt"
    text = path.read_text(encoding="utf-8", errors="replace")
    found = {word: re.search(rf"^{word}:[ \t]*(.*?)\s*$", text, re.M)
             for word in ("answer", "p", "q")}
    given = {word: re.findall(r"\d*\.?\d+(?:/\d+)?", match[1]) if match else []
             for word, match in found.items()}
    if not given["answer"]:
        return 0, "no answer"
    number = int(float(given["answer"][0].split("/")[0]))
    if number != museum.five(seed)[1]:
        return 0, f"number {number} is right"
    try:
        p, q = ([fraction(x) for x in given[word]] for word in "pq")
        right, why = museum.judge(seed, number, p, q)
    except ValueError as e:
        return POINTS, str(e)
    return POINTS * (1 + right), why


def fraction(word):
    over, _, under = word.partition("/")
    return float(over) / float(under or 1)


def marks(job):
    """The row of one student."""
    path, tasks, key, seconds = job
    os.environ[domains.SEED] = key
    seed = seed_of(key, path.name)
    row = {"student": path.name}
    for task in tasks:
        verdict = grade_file(task, path, seconds)
        row[f"{task.number} {task.name}"] = POINTS * (verdict.status == "passed")
    row["diagnose, lines"] = sum(diagnose.grade(case)[0] == "passed"
                                 for case in diagnose.answered(path))
    row["five"], row["about five"] = judged(path / "five.txt", seed)
    row["sum"] = sum(value for value in row.values() if isinstance(value, int))
    return row


def parse(argv):
    p = argparse.ArgumentParser(description="A whole class. `grade` runs the students' code.")
    p.add_argument("what", choices=["make", "key", "grade"])
    p.add_argument("folder", type=Path, metavar="CLASS", help="a folder with one for each student")
    p.add_argument("names", type=Path, nargs="?", metavar="NAMES",
                   help="for make: a file with a name in each line")
    p.add_argument("--key", required=True, help="any secret word; the same for all three")
    p.add_argument("--only", nargs="+", default=[], metavar="N", help="the exercises that were set")
    p.add_argument("--seconds", type=float, default=LIMIT, help="for the tests of one exercise")
    a = p.parse_args(argv)
    if a.what == "make" and not (a.names and a.names.is_file()):
        p.error("make needs a file with a name in each line")
    if a.what != "make" and not a.folder.is_dir():
        p.error(f"there is no folder {a.folder}")
    return p, a


def main(argv=None):
    p, a = parse(argv)
    try:
        tasks = only(a.only)
        if a.what == "make":
            lines = a.names.read_text(encoding="utf-8-sig").splitlines()
            names = [line.strip() for line in lines if line.strip()]
            make(a.folder, names, a.key)
            print(f"{len(names)} folders are in {a.folder}")
            return 0
        found = students(a.folder)
    except (OSError, KeyError, ValueError) as e:
        p.error(str(e.args[0] if isinstance(e, KeyError) else e))
    table = csv.writer(sys.stdout, lineterminator="\n")
    if a.what == "key":
        table.writerow(["student", "five", "diagnose"])
        for path in found:
            lines = [f"{case.stem}: line {min(diagnose.right_lines(case))}"
                     for case in diagnose.answered(path)]
            table.writerow([path.name, museum.five(seed_of(a.key, path.name))[1],
                            "; ".join(lines)])
        return 0
    import pytest  # noqa: F401  before the processes are forked
    import torch  # noqa: F401
    jobs = [(path, tasks, a.key, a.seconds) for path in found]
    with ProcessPoolExecutor(WORKERS, CONTEXT) as pool:
        for n, row in enumerate(pool.map(marks, jobs)):
            if n == 0:
                table.writerow(row)
            table.writerow(row.values())
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
