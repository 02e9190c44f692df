"""Does the grader grade? Stubs must be "to do", originals and right answers of another shape must pass, and
of each wrong answer the message must name its very mistake. Cases of "Diagnose" must have a test that fails.

    python exercises/check.py [WORDS]      only exercises whose names contain one of the words, or diagnose

The one thing to remember: a grader that nobody tests accepts wrong programs.
"""
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from exercises import diagnose, splice, variants  # noqa: E402
from exercises.answers import SHAPES, WRONG  # noqa: E402
from exercises.grade import CONTEXT, grade  # noqa: E402
from exercises.tasks import TASKS  # noqa: E402
from tests.mistakes import change  # noqa: E402

WORKERS = min(2, os.cpu_count() or 1)


def answer(task):
    """The originals of a task, written as a student's file would have them."""
    parts = []
    for name in task.functions:
        parts += [f"class {name.split('.')[0]}:"] * ("." in name)
        parts += [*splice.original(task.module, name), ""]
    return "\n".join(parts)


def changed(task, row):
    """The text of a wrong answer."""
    old, new, _ = row
    return change(answer(task), "", old, new)


def cases(task):
    """(what, text, what the verdict must be, words of its message, the seed of the variant or None)"""
    def of_all(make, *seed):
        return "\n".join(make(task.module, name, *seed) for name in task.functions)

    yield "the stub", of_all(splice.stub), "to do", "", None
    yield "the original", answer(task), "passed", "", None
    for row in WRONG[task.name]:
        yield f"wrong: {row[2]}", changed(task, row), "failed", row[2], None
    for text in SHAPES.get(task.name, ()):
        yield "another shape", text, "passed", "", None
    yield "the stub of a variant", of_all(variants.stub, 1), "to do", "", 1
    yield "the solution of a variant", of_all(variants.solution, 1), "passed", "", 1
    yield "the original in a variant", answer(task), "failed", "is not there any more: keep the line `def ", 1


def problem(job):
    """What is wrong with a case; "" where all is as it should be."""
    if isinstance(job, int):
        return diagnosed(job)
    task, what, text, status, words, seed = job
    verdict = grade(task, text, seed=seed)
    if verdict.status != status:
        return f"{task.name}, {what}: {verdict.status}, expected {status}\n{verdict.message}"
    if words not in verdict.message:
        return f"{task.name}, {what}: the message names another mistake\n{verdict.message}"
    return ""


def diagnosed(number):
    """What is wrong with a case: it must fail, be told by one place, and know right from wrong."""
    case = diagnose.CASES[number - 1]
    with tempfile.TemporaryDirectory() as folder:
        path, text = Path(folder) / f"{number:02}.txt", diagnose.show(number, case)
        lines, where = diagnose.mutated(case)
        for n in range(1, len(lines) + 1):
            path.write_text(text.replace("line: ?", f"line: {n}", 1), encoding="utf-8")
            if (diagnose.grade(path)[0] == "passed") != (n in where):
                return f"case {number}: line {n} is misjudged"
    return "" if len(where) == 1 and "\nE  " in text else f"case {number}: {where}\n{text}"


def main(words):
    todo = [(task, *case) for task in TASKS if not words or any(word in task.name for word in words)
            for case in cases(task)]
    if not words or "diagnose" in words:
        todo += range(1, len(diagnose.CASES) + 1)
    import pytest  # noqa: F401  once, before the processes are forked
    import torch  # noqa: F401
    with ProcessPoolExecutor(WORKERS, CONTEXT) as pool:
        wrong = 0
        for job, why in zip(todo, pool.map(problem, todo), strict=True):
            wrong += bool(why)
            about = f"diagnose: {job}" if isinstance(job, int) else f"{job[0].name}: {job[1]}"
            print(f"{'WRONG' if why else 'ok':6}{about}", *[why] * bool(why), sep="\n", flush=True)
    print(f"{len(todo) - wrong} right, {wrong} wrong")
    return int(wrong > 0 or not todo)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
