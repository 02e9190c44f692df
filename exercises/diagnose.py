"""Diagnose. A student gets a function of the library with one mistake in it, and what the failing
test printed. Which line is wrong, and why?

    python exercises/diagnose.py OUT                   write six cases into OUT/diagnose
    python exercises/diagnose.py OUT --variant SEED    six of these twelve, drawn by the seed
    python exercises/diagnose.py OUT --grade           say of each whether the line is right

The mistakes are rows of tests/mistakes.txt, so each has a test that notices it, and none of them
stands in a function that is an exercise. The code is shown as the engine writes it, without
comments. Twelve are in diagnose.md, with their answers; `classroom.py` draws from all others.
"""
import argparse
import ast
import difflib
import random
import re
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from exercises import cuts  # noqa: E402
from tests import mistakes  # noqa: E402

COUNT = 6


class Case(NamedTuple):
    mistake: cuts.Change    # a row of tests/mistakes.txt
    why: str                # what a good answer says; shown when the line is right


NAMED = {(m.scope, m.why): m for m in mistakes.MISTAKES}
PAGE = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
TABLE = [line.strip("|").split("|") for line in PAGE.partition("|---")[2].splitlines()[1:]]
CASES = [Case(NAMED[function.strip(), reason.strip()], why.strip())
         for function, reason, why in TABLE]


@cache
def others():
    """The cases that diagnose.md does not have: every other mistake of one line."""
    from exercises.tasks import TASKS

    asked = {name for task in TASKS for name in task.functions}
    known = {case.mistake for case in CASES}
    found = [Case(m, m.why) for m in mistakes.MISTAKES
             if m.why and m.scope and m.scope not in asked and m not in known
             and m.file.endswith(".py") and not m.file.startswith(("lab/", "exercises/"))]
    return [case for case in found if len(mutated(case)[1]) == 1]


def number(n):
    """Case n, counted from 1: the twelve, and after them the private ones."""
    return CASES[n - 1] if n <= len(CASES) else others()[n - len(CASES) - 1]


def mutated(case):
    """The lines of the function with its mistake, and the numbers, from 1, of the lines that it
    changes."""
    m = case.mistake
    source = (ROOT / m.file).read_text(encoding="utf-8")
    right, wrong = (cuts.bare(cuts.find(ast.parse(text), m.scope)).splitlines()
                    for text in (source, cuts.change(source, m.scope, m.old, m.new)))
    changes = difflib.SequenceMatcher(None, right, wrong, autojunk=False).get_opcodes()
    where = {n + 1 for kind, _, _, a, b in changes if kind != "equal"
             for n in range(a, max(b, a + 1))}
    return wrong, where


@cache
def failure(case, most=30):
    """What the failing test prints, without paths of this machine."""
    m = case.mistake
    with tempfile.TemporaryDirectory(prefix="diagnose-") as made:
        mistakes.plant(m, made)
        status = mistakes.run_tests([m.shown], made, mistakes.LIMIT, ("--tb=short", "-rN"),
                                    f"{made}/out")
        out = Path(made, "out").read_text(encoding="utf-8", errors="replace")
    if status != 1:
        raise RuntimeError(f"{m.shown} does not fail: {out}")
    lines = [re.sub(r"\S*/site-packages/", "", line.replace(made + "/", ""))
             for line in out.splitlines()]
    lines = [line[:400] for line in lines if line.strip(" ^")]
    start = next(i for i, line in enumerate(lines) if "FAILURES" in line) + 1
    end = next(i for i, line in enumerate(lines) if line.startswith("!!!"))
    shown = lines[start:end]
    return shown if len(shown) <= most else [*shown[: most // 2], "...", *shown[-most // 2 :]]


def show(number, case):
    """The text of one case."""
    numbered = [f"{i:3} | {line}" for i, line in enumerate(mutated(case)[0], 1)]
    return "\n".join([
        f"Diagnose {number}: `{case.mistake.scope}` of {case.mistake.file}. One line is wrong. "
        "Which, and why?", "", "line: ?", "why: ?", "", *numbered, "",
        "What the failing test printed:", "", *failure(case), ""])


def write(out, seed=None, private=False):
    """Six cases in OUT/diagnose, by the seed if there is one: of the twelve, or of the private
    ones. Raises FileExistsError where the folder exists already."""
    folder = out / "diagnose"
    if folder.exists():
        raise FileExistsError(f"{folder} is not empty: nothing was written")
    some = list(range(1, COUNT + 1))
    if seed is not None:
        some = list(range(1, len(CASES) + 1))
        if private:
            some = list(range(len(CASES) + 1, len(CASES) + len(others()) + 1))
        random.Random(seed).shuffle(some)
    texts = {}
    for n in some:
        with suppress(RuntimeError, StopIteration):     # its test says nothing that can be shown
            texts[n] = show(n, number(n))
        if len(texts) == COUNT:
            break
    folder.mkdir(parents=True)
    for n, text in texts.items():
        (folder / f"{n:02}.txt").write_text(text, encoding="utf-8")
    return folder


def answered(out):
    """The files of OUT/diagnose, by their numbers."""
    found = (out / "diagnose").glob("[0-9]*.txt")
    return sorted((path for path in found if path.stem.isdigit()), key=lambda path: int(path.stem))


def right_lines(path):
    """The numbers of the lines that are wrong in a case."""
    return mutated(number(int(path.stem)))[1]


def grade(path):
    """(status, comment) for one answered case."""
    case = number(int(path.stem))
    text = path.read_text(encoding="utf-8", errors="replace")
    line, why = (re.search(rf"^{word}:[ \t]*(.*?)\s*$", text, re.M) for word in ("line", "why"))
    if not line or not line[1].isdigit():
        return "to do", ""
    if int(line[1]) not in right_lines(path):
        return "failed", f"line {line[1]} is as the library has it"
    comment = f"compare your reason with this: {case.why}"
    if not why or why[1] in ("", "?"):
        comment = "say why, too; " + comment
    return "passed", comment


def main(argv=None):
    p = argparse.ArgumentParser(description="Which line is wrong, and why?")
    p.add_argument("out", type=Path, metavar="OUT", help="the student's folder")
    p.add_argument("--variant", type=int, metavar="SEED", help="six of the twelve, by the seed")
    p.add_argument("--grade", action="store_true", help="grade what was answered in OUT/diagnose")
    a = p.parse_args(argv)
    if not a.grade:
        try:
            folder = write(a.out, a.variant)
        except OSError as e:
            sys.exit(str(e))
        print(f"{COUNT} cases are in {folder}: put the number of the wrong line after `line:`, "
              "and say why")
        return 0
    files = answered(a.out)
    found = [grade(path) for path in files]
    for path, (status, comment) in zip(files, found, strict=True):
        function = number(int(path.stem)).mistake.scope
        print(f"{path.stem}  {function:24} {status}" + f"\n      {comment}" * bool(comment))
    passed = sum(status == "passed" for status, _ in found)
    print(f"{passed} of {len(files)} passed")
    return int(not files or passed < len(files))


if __name__ == "__main__":
    sys.exit(main())
