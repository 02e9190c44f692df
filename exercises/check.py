"""Test the grader. A stub must be "to do". The library's own code and right answers written
differently must pass. A wrong answer must fail with a message that names its mistake, and so must
each case of "Diagnose". So must the museum's bugs, whatever is said.

    python exercises/check.py [WORDS]  exercises whose names contain one of the words, or diagnose
"""
import ast
import copy
import itertools
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from exercises import answers, diagnose, splice  # noqa: E402
from exercises.cuts import change, find, read  # noqa: E402
from exercises.grade import CONTEXT, WORKERS, grade  # noqa: E402
from exercises.tasks import TASKS  # noqa: E402

MUSEUM = read(Path(__file__).with_name("museum.txt"))


def exhibits(task):
    """(name, text) of each row of the museum that is in one of the functions of a task."""
    for (name, scope), rows in itertools.groupby(MUSEUM, key=lambda row: (row.why, row.scope)):
        if scope in task.functions:
            text = answers.original(task)
            for row in rows:
                text = change(text, "", row.old, row.new)
            yield name, text


TRAPS = """
import torch

FIRST = {}

def kept(x):    # the grader calls again with the same memory
    if isinstance(x, torch.Tensor):
        return x.clone()
    if isinstance(x, dict):
        return dict(x)
    if isinstance(x, (list, tuple)) and not hasattr(x, "_fields"):
        return type(x)(map(kept, x))
    return x

def spoil(x):
    if isinstance(x, torch.Tensor):
        x.logical_not_() if x.dtype == torch.bool else x.add_(1)
    if isinstance(x, (list, dict)):
        x.append(0) if isinstance(x, list) else x.clear()
    parts = x if isinstance(x, (list, tuple)) else ()
    for part in vars(x).values() if hasattr(x, "known") else parts:
        spoil(part)
"""
KINDS = {   # mistakes that any function can make: {kind: (code, what the message must say)}
    "random": ("torch.rand(1)\nreturn right(*given)", "random numbers of your own"),
    "constant": ("return FIRST.setdefault(0, right(*given))", "")}
OBJECTS = set("self paged coins step store score allowed pass_cost rule layer device probs".split())
NUMBERS = set(
    "cap head_dim theta end window start temperature top_k top_p min_p best offset alpha gamma "
    "cost most least plain seconds drafted verified share bits size bandwidth call group rows "
    "width cache flops rate ahead step steps L every scale threshold first T size window".split())


def traps(task):
    """(kind, text, words of the message) for each function: the original in a wrapper that makes a
    mistake, such as changing an argument."""
    for name in task.functions:
        node = find(ast.parse(splice.source(task.module)), name)
        arguments = [arg.arg for arg in node.args.args]
        kinds = dict(KINDS) if arguments else {}
        if name == "ring_counterexample":   # a search may be random: its text names no coins
            del kinds["random"]
        if name == "keep":      # it returns nothing
            del kinds["constant"]
        for i, argument in enumerate(arguments):
            if argument not in OBJECTS and (name, argument) != ("ring_counterexample", "gamma"):
                kinds[f"`{argument}` ignored"] = (
                    f"given[{i}] = FIRST.setdefault({i}, kept(given[{i}]))\n"
                    "return right(*given)", "")
            if argument not in OBJECTS | NUMBERS:
                kinds[f"`{argument}` changed"] = (
                    f"result = right(*given)\nspoil(given[{i}])\nreturn result", "stays as it is")
        for kind, (body, says) in kinds.items():
            body = f"given = [{', '.join(arguments)}]\n{body}"
            yield f"{name}, {kind}", behind(task, name, body), says


def behind(task, name, body):
    """The text of such a wrapper: its function `name` has this body, in which `right` is the
    original."""
    tree = ast.parse(answers.original(task))
    node = find(tree, name)
    right = copy.copy(node)
    right.name = "right"
    right.decorator_list = []
    node.body = ast.parse(body).body
    return "\n".join([TRAPS, ast.unparse(right), ast.unparse(tree)])


def cases(task):
    """(task, kind, text, the expected status, words of the message)"""
    stub = "\n".join(splice.stub(task.module, name) for name in task.functions)
    yield task, "the stub", stub, "to do", ""
    yield task, "the original", answers.original(task), "passed", ""
    for text in answers.right(task):
        yield task, "another shape", text, "passed", ""
    for text, says in answers.wrong(task):
        yield task, f"wrong: {says}", text, "failed", says
    for name, text in exhibits(task):
        status = "passed" if name.startswith("right") else "failed"
        yield task, f"museum: {name}", text, status, ""
    for what, text, says in traps(task):
        yield task, f"trap: {what}", text, "failed", says


def problem(job):
    """What is wrong with a verdict; "" if nothing is."""
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
    """The same for a case of "Diagnose": exactly one line must be wrong, and its test must fail."""
    case = diagnose.CASES[number - 1]
    where, text = diagnose.mutated(case)[1], "\n".join(diagnose.failure(case))
    found = "\nE  " in text or "\nexpected  " in text
    return "" if len(where) == 1 and found else f"case {number}: lines {where}\n{text}"


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
