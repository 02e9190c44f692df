"""Grade the answers in a student's folder. Each takes the original's place in a temporary copy of
the library, where the tests of that function are run. guard.py describes what is checked in every
call.

    python exercises/grade.py OUT              all exercises
    python exercises/grade.py OUT verify       one of them, by its name or number
    python exercises/grade.py OUT --only 4 6   those that were set, with marks for them alone
    python exercises/grade.py OUT --json       all of them, as a list of verdicts
    python exercises/grade.py OUT --gradescope FILE      and write marks for a course's server

Only the text and its distribution are graded, never speed or acceptance rate. A correct answer that
gains less than it could passes, with a remark that says why.

This runs the code in OUT. It guards against accidents such as endless loops, but not against
malice. On a server, give it a sandbox without network, with its own user and limits, and a fresh
copy of this repository.
"""
import argparse
import faulthandler
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from exercises import domains, splice  # noqa: E402
from exercises.tasks import TASKS, choose, file_name  # noqa: E402

LIMIT = 60  # seconds for the tests of one exercise; they take two or three
WORKERS = min(2, os.cpu_count() or 1)
CONTEXT = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")


class Verdict(NamedTuple):
    exercise: str
    number: int
    status: str         # "passed", "failed", or "to do": it is still the stub
    message: str = ""   # what failed: given, expected, got, their difference, the likely mistake
    test: str = ""      # the test that failed
    line: int = 0       # the line of the student's file at which an error was raised
    remark: str = ""    # about a correct answer: why it gains less than it could; or that it prints


# --- inside the process that runs the tests


def line_of(trace):
    """The last line of the answer in a traceback, 0 if there is none; and its text."""
    frames = [f for f in traceback.extract_tb(trace) if f.filename == "answer.py"]
    return (frames[-1].lineno, frames[-1].line) if frames else (0, "")


class Watch:
    """A plugin of pytest that sends the first failure to the parent, as fields of a Verdict. It
    goes through a pipe, which an answer cannot open by a name."""

    def __init__(self, pipe):
        self.pipe, self.found, self.remarks = pipe, {}, []

    def pytest_runtest_logstart(self, nodeid):
        Path("running.txt").write_text(nodeid, encoding="utf-8")

    def pytest_exception_interact(self, node, call, report):
        if self.found:      # then this is pytest itself, which stops at the first failure
            return
        value, (line, statement) = call.excinfo.value, line_of(call.excinfo.tb)
        kind, message = type(value).__name__, str(value) or repr(value)
        if kind != "Failed":
            message = f"{kind}: {message}"
            message += (f"\nraised at     line {line}: {statement}" if line else
                        "\nraised by     the test, which cannot use what came back: "
                        "another shape or type?")
            if "view size is not compatible" in message:
                message += ("\nlikely        an input may be a slice or a transpose: "
                            "take reshape, not view")
        about = (getattr(getattr(node, "function", None), "__doc__", "") or
                 node.name.removeprefix("test_").partition("[")[0].replace("_", " "))
        if "given" not in message:
            message += f"\nthe test      {' '.join(about.split())}"
        self.found = {"test": node.nodeid.split("/")[-1], "message": message[:4000], "line": line}

    def pytest_runtest_logreport(self, report):
        printed = report.capstdout.strip().partition("\n")[0][:80]
        if printed and not any(remark.startswith("it prints") for remark in self.remarks):
            self.remarks.append(f"it prints ({printed!r}): take that out before you hand it in")
        self.remarks += [value for name, value in report.user_properties
                         if name == "remark" and value not in self.remarks]

    def pytest_sessionfinish(self, exitstatus):
        self.found["remark"] = "; ".join(self.remarks)
        if exitstatus == 0:
            self.found["status"] = "passed"
        elif "message" not in self.found:
            self.found["message"] = ("the tests could not be run "
                                     f"(pytest's status {int(exitstatus)})")
        self.write()

    def write(self):
        self.pipe.send_bytes(json.dumps(self.found).encode())


def run_tests(folder, task, limit, pipe):
    """What the process does; it is forked from one that holds torch, whose import outlasts most
    tests."""
    import pytest

    from exercises import answers, guard  # noqa: F401  late: torch; but before the path changes

    os.chdir(folder)
    ours = ROOT, ROOT / "exercises", ROOT / "tests"
    sys.path[:] = [p for p in sys.path if Path(p).resolve() not in ours]
    sys.path[:0] = [folder, f"{folder}/tests"]
    # what a parent has imported of the library, such as classroom.py, still holds what is cut out
    for place in sys.path[:2]:
        for file in Path(place).rglob("*.py"):
            sys.modules.pop(".".join(file.relative_to(place).with_suffix("").parts), None)
    out = os.open("out.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    # no test needs a plugin, and loading them takes longer
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    faulthandler.dump_traceback_later(0.9 * limit, file=open("hang.txt", "w"))
    watch, text = Watch(pipe), Path("answer.py").read_text(encoding="utf-8")
    try:
        guard.install(task, splice.code(task.module, task.functions, text))
    except Exception as e:
        line, statement = line_of(e.__traceback__)
        watch.found = {"line": line, "message":
                       f"line {line}: it cannot be imported: {type(e).__name__}: {e}"
                       f"\nraised at     line {line}: {statement}"}
        watch.write()
        os._exit(0)
    # without what the tests here do not need and takes longer than most of them
    unused = ("cacheprovider", "faulthandler", "unraisableexception", "threadexception")
    argv = ["-x", "--assert=plain", "--tb=no", f"--basetemp={folder}/made"]
    argv += [f"-pno:{one}" for one in unused]
    pytest.main([*argv, *task.all_tests], plugins=[watch])
    os._exit(0)


# --- outside


def copy_library(folder, task):
    """What the tests need, so that nothing that an answer does reaches the library itself. The
    functions that the answer stands for, and those that would do its work, are cut out."""
    for file in [*ROOT.glob("*.py"), ROOT / "pyproject.toml"]:
        shutil.copy(file, folder)
    for name in ("tests", "exercises/tests", "support", "methods", "machine"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "lab").mkdir()
    for file in (ROOT / "lab").glob("*.py"):        # some tests are about what is in it
        shutil.copy(file, folder / "lab")
    for module in {task.module for task in TASKS if task.module.startswith("exercises/")}:
        shutil.copy(ROOT / module, folder / module)
    cut = {task.module: task.functions}
    if task.module in splice.RIVALS:
        cut = {module: names + splice.HELPERS.get(module, ())
               for module, names in splice.RIVALS.items()}
    for module, names in cut.items():
        (folder / module).write_text(splice.hollow(module, names), encoding="utf-8")


def hanging(folder, limit):
    """What there is to say about a process that did not end."""
    test, trace = (path.read_text() if (path := folder / name).exists() else ""
                   for name in ("running.txt", "hang.txt"))
    at = next((int(n) for n in re.findall(r'"answer\.py", line (\d+)', trace)), 0)
    where = f" at line {at}" if at else ""
    return {"test": test.split("::")[-1], "line": at,
            "message": f"it has not ended after {limit:g} seconds: an endless loop{where}?"}


def grade(task, text, limit=LIMIT):
    """The Verdict on the text of an answer."""
    verdict = Verdict(task.name, task.number, "failed")
    try:
        splice.code(task.module, task.functions, text)
    except NotImplementedError:
        return verdict._replace(status="to do")
    except splice.Refused as e:
        return verdict._replace(message=str(e))
    with tempfile.TemporaryDirectory(prefix="grade-") as made:
        folder = Path(made)
        copy_library(folder, task)
        (folder / "answer.py").write_text(text, encoding="utf-8")
        ours, pipe = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=run_tests, args=(made, task, limit, pipe))
        process.start()
        pipe.close()
        process.join(limit)
        if process.is_alive():
            process.kill()
            process.join()
            return verdict._replace(**hanging(folder, limit))
        with suppress(EOFError):
            if ours.poll():
                return verdict._replace(**json.loads(ours.recv_bytes()))
        return verdict._replace(message="the process ended before the tests did "
                                        f"(status {process.exitcode}): does it call exit?")


def grade_file(task, folder, limit):
    path = folder / file_name(task)
    if not path.is_file():
        return Verdict(task.name, task.number, "to do", f"there is no {path.name} in {folder}")
    try:
        return grade(task, splice.read(path), limit)
    except splice.Refused as e:
        return Verdict(task.name, task.number, "failed", str(e))
    except Exception as e:      # one answer must not cost the verdicts on all others
        return Verdict(task.name, task.number, "failed",
                       f"it cannot be graded: {type(e).__name__}: {e}")


def only(words):
    """The tasks with these numbers or names, by default all. Raises KeyError for one that does not
    exist."""
    return [choose(word) for word in words] or list(TASKS)


def results(verdicts, tasks=TASKS, marked=range(1, 16)):
    """Gradescope's results.json, with 4 marks for each exercise whose number is in `marked`: those
    of the rubric in README.md, or those that were set. What has no verdict is to do."""
    known, tests = {v.number: v for v in verdicts}, []
    for task in tasks:
        v = known.get(task.number, Verdict(task.name, task.number, "to do"))
        most, passed = 4 * (task.number in marked), v.status == "passed"
        tests.append({"number": str(v.number), "name": v.exercise,
                      "status": "passed" if passed else "failed",
                      "score": most * passed, "max_score": most, "output": "\n".join(show(v)),
                      "output_format": "text"})
    return {"score": sum(test["score"] for test in tests), "visibility": "visible", "tests": tests}


def show(verdict):
    """A row of the table, and below it what there is to say."""
    yield f"{verdict.number:2}  {verdict.exercise:32} {verdict.status}"
    for line in verdict.message.splitlines():
        yield f"      {line}"
    if verdict.remark:
        yield f"      remark: {verdict.remark}"


def main(argv=None):
    p = argparse.ArgumentParser(description="Grade the answers in a student's folder. "
                                            "It runs their code.",
                                epilog="A server should give it a sandbox.")
    p.add_argument("out", type=Path, metavar="OUT", help="the folder that start.py made")
    p.add_argument("name", nargs="?", help="one exercise, by its name or number")
    p.add_argument("--only", nargs="+", metavar="N",
                   help="these exercises, with marks for each: what was set")
    p.add_argument("--seed", help="any word: other inputs are drawn than without it")
    p.add_argument("--json", action="store_true", help="one JSON list instead of a table")
    p.add_argument("--gradescope", type=Path, metavar="FILE",
                   help="also write the marks into a results.json")
    p.add_argument("--seconds", type=float, default=LIMIT, help="for the tests of one exercise")
    a = p.parse_args(argv)
    if not a.out.is_dir():
        p.error(f"there is no folder {a.out}: make one with python exercises/start.py {a.out}")
    try:
        tasks = only(a.only or ([a.name] if a.name else []))
    except KeyError as e:
        p.error(e.args[0])
    if a.seed is not None:
        os.environ[domains.SEED] = a.seed
    marked = [task.number for task in tasks] if a.only else range(1, 16)
    with suppress(ImportError):
        import pytest  # noqa: F401  before the processes are forked
        import torch  # noqa: F401
    verdicts = []
    with ThreadPoolExecutor(WORKERS) as pool:
        for verdict in pool.map(lambda task: grade_file(task, a.out, a.seconds), tasks):
            verdicts.append(verdict)
            # after each exercise: if the server stops this process, the others count
            if a.gradescope:
                found = results(verdicts, tasks if a.only else TASKS, marked)
                a.gradescope.write_text(json.dumps(found, indent=1), encoding="utf-8")
            if not a.json:
                print(*show(verdict), sep="\n", flush=True)
    passed = sum(v.status == "passed" for v in verdicts)
    print(json.dumps([v._asdict() for v in verdicts], indent=1) if a.json else
          f"{passed} of {len(verdicts)} passed")
    return int(passed < len(verdicts))


if __name__ == "__main__":
    sys.exit(main())
