"""Does the grader work? Stubs must be "to do", originals and correct answers of another shape must pass, and
the message for each wrong answer must name the mistake. Each case of "Diagnose" must have a test that fails.

    python exercises/check.py [WORDS]      only exercises whose names contain one of the words, or diagnose
"""
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from exercises import diagnose, splice  # noqa: E402
from exercises.answers import SHAPES, WRONG  # noqa: E402
from exercises.grade import CONTEXT, grade  # noqa: E402
from exercises.tasks import TASKS  # noqa: E402
from tests.mistakes import change  # noqa: E402

WORKERS = min(2, os.cpu_count() or 1)


def answer(task):
    """The originals of a task, as they would stand in a student's file."""
    return "\n".join(line for name in task.functions for line in [*splice.original(task.module, name), ""])


def wrong_answers(task):
    """(text, what the message must say)"""
    for old, rows in WRONG[task.name].items():
        for new, says in rows.items():
            yield change(answer(task), "", old, new), says


def cases(task):
    """(task, what, text, what the verdict must be, words of its message)"""
    yield task, "the stub", "\n".join(splice.stub(task.module, name) for name in task.functions), "to do", ""
    yield task, "the original", answer(task), "passed", ""
    for text in SHAPES.get(task.name, ()):
        yield task, "another shape", text, "passed", ""
    for text, says in wrong_answers(task):
        yield task, f"wrong: {says}", text, "failed", says


def problem(job):
    """What is wrong with a case; "" if nothing is."""
    if isinstance(job, int):
        return diagnosed(job)
    task, what, text, status, words = job
    verdict = grade(task, text)
    if verdict.status != status:
        return f"{task.name}, {what}: {verdict.status}, expected {status}\n{verdict.message}"
    if words not in verdict.message:
        return f"{task.name}, {what}: the message names another mistake\n{verdict.message}"
    return ""


def diagnosed(number):
    """What is wrong with a case of "Diagnose": one line must be wrong, and its test must fail."""
    case = diagnose.CASES[number - 1]
    where, text = diagnose.mutated(case)[1], "\n".join(diagnose.failure(case))
    return "" if len(where) == 1 and "\nE  " in text else f"case {number}: lines {where}\n{text}"


def main(words):
    jobs = [job for task in TASKS if not words or any(word in task.name for word in words)
            for job in cases(task)]
    if not words or "diagnose" in words:
        jobs += range(1, len(diagnose.CASES) + 1)
    import pytest  # noqa: F401  once, before the processes are forked
    import torch  # noqa: F401
    with ProcessPoolExecutor(WORKERS, CONTEXT) as pool:
        wrong = 0
        for job, why in zip(jobs, pool.map(problem, jobs), strict=True):
            wrong += bool(why)
            about = f"diagnose: {job}" if isinstance(job, int) else f"{job[0].name}: {job[1]}"
            print(f"{'WRONG' if why else 'ok':6}{about}", *[why] * bool(why), sep="\n", flush=True)
    print(f"{len(jobs) - wrong} right, {wrong} wrong")
    return int(wrong > 0 or not jobs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
