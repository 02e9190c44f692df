"""Grade the answers in a student's folder: each takes the original's place in a temporary copy of the
library, and the library's tests of that function are run there.

    python exercises/grade.py OUT              all exercises
    python exercises/grade.py OUT verify       one of them, by its name or number
    python exercises/grade.py OUT --json       the same for a course's server

The one thing to remember: what is graded is the text and its distribution, never speed and never an
acceptance rate. A correct answer that gains less than it could passes, and the remark beside it says why.

This runs the code in OUT. It guards against accidents, such as endless loops, but not against malice: a
server should give it a sandbox without network, with a user and limits of its own, and a fresh copy of this
repository.
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
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from exercises import splice  # noqa: E402
from exercises.tasks import TASKS, VARIANT, choose, file_name  # noqa: E402
from exercises.variants import disguise  # noqa: E402

LIMIT = 60  # seconds for the tests of one exercise; they take two or three
CONTEXT = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")


class Verdict(NamedTuple):
    exercise: str
    number: int
    status: str         # "passed", "failed", or "to do": it is still the stub
    message: str = ""   # what failed: what was given, expected, what came, and the likely mistake
    test: str = ""      # the test that failed
    line: int = 0       # the line of the student's file at which an error was raised
    remark: str = ""    # of an answer that is right: why it gains less than it could, and that it prints


# --- inside the process that runs the tests


class Watch:
    """A plugin of pytest that writes down, in result.json, what the first failure was."""

    def __init__(self, module, lines):
        self.module, self.lines, self.found, self.printed = module, lines, {"remarks": []}, ""

    def pytest_runtest_logstart(self, nodeid):
        Path("running.txt").write_text(nodeid, encoding="utf-8")

    def pytest_exception_interact(self, node, call, report):
        if "message" in self.found:     # then this is pytest itself, which stops at the first failure
            return
        value = call.excinfo.value
        message = str(value) or repr(value)
        if type(value).__name__ == "CollectError":      # what pytest makes of an ImportError
            return self.unimportable(message)
        blame = next((e for e in reversed(call.excinfo.traceback)
                      if str(e.path).endswith(os.sep + self.module) and self.lines[e.lineno]), None)
        line = self.lines[blame.lineno] if blame else 0
        if not isinstance(value, AssertionError) and type(value).__name__ != "Failed":
            message = f"{type(value).__name__}: {message}"
            if blame:
                message += f"\nraised at     line {line}: {str(blame.statement).strip()}"
        elif type(value).__name__ != "Failed":
            message = re.split(r"\n(?=assert )", message)[0]
        self.found |= {"test": node.nodeid.split("/")[-1], "message": message[:4000], "line": line,
                       "about": getattr(getattr(node, "function", None), "__doc__", "") or ""}

    def unimportable(self, message):
        """One line about an import that fails, outside of functions."""
        at = [self.lines[int(n) - 1] for n in re.findall(rf"^{re.escape(self.module)}:(\d+):", message, re.M)]
        errors = re.findall(r"^E +(.*)$", message, re.M)
        line = next((n for n in reversed(at) if n), 0)
        self.found |= {"test": "", "line": line, "about": "",
                       "message": f"line {line}: it cannot be imported: {(errors or [message])[-1]}"[:4000]}

    def pytest_runtest_logreport(self, report):
        self.printed = self.printed or report.capstdout
        self.found["remarks"] += [v for name, v in report.user_properties if name == "remark"
                                  and v not in self.found["remarks"]] if report.when == "call" else []

    def pytest_sessionfinish(self, exitstatus):
        self.found |= {"status": int(exitstatus), "printed": self.printed.strip().partition("\n")[0][:80]}
        Path("result.json").write_text(json.dumps(self.found), encoding="utf-8")


def run_tests(folder, module, lines, tests, limit):
    """What the process does; it is forked from one that holds torch, whose import outlasts most tests."""
    import pytest

    os.chdir(folder)
    sys.path[:] = [p for p in sys.path if Path(p).resolve() not in (ROOT, ROOT / "exercises", ROOT / "tests")]
    out = os.open("out.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    faulthandler.dump_traceback_later(0.9 * limit, file=open("hang.txt", "w"))
    argv = ["-x", "-p", "no:cacheprovider", "-p", "no:faulthandler", f"--basetemp={folder}/made", "--tb=no"]
    pytest.main([*argv, *(f"tests/{test}" for test in tests)], plugins=[Watch(module, lines)])
    os._exit(0)


# --- outside


def copy_library(folder):
    """What the tests need, so that nothing that an answer does reaches the library itself."""
    for file in [*ROOT.glob("*.py"), ROOT / "pyproject.toml"]:
        shutil.copy(file, folder)
    for name in ("tests", "support", "methods", "machine"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))


def hanging(folder, module, lines, limit):
    """One line about a process that did not end."""
    test = (folder / "running.txt").read_text().split("::")[-1] if (folder / "running.txt").exists() else ""
    trace = (folder / "hang.txt").read_text() if (folder / "hang.txt").exists() else ""
    at = next((lines[int(n) - 1] for n in re.findall(rf'{re.escape(module)}", line (\d+)', trace)
               if lines[int(n) - 1]), None)
    where = f" at line {at}" if at else ""
    return test, f"it has not ended after {limit:g} seconds: an endless loop{where}?", at or 0


def grade(task, text, limit=LIMIT, seed=None):
    """The Verdict on the text of an answer; seed: of the variant that it answers."""
    verdict = Verdict(task.name, task.number, "failed")
    disguises = {} if seed is None else {name: disguise(task.module, name, seed) for name in task.functions}
    try:
        spliced = splice.put(task.module, task.functions, text, disguises)
    except NotImplementedError:
        return verdict._replace(status="to do")
    except splice.Refused as e:
        return verdict._replace(message=str(e))
    lines = [origin for _, origin in spliced]
    with tempfile.TemporaryDirectory(prefix="grade-") as made:
        folder = Path(made)
        copy_library(folder)
        (folder / task.module).write_text("\n".join(line for line, _ in spliced) + "\n", encoding="utf-8")
        module = Path(task.module).name
        process = CONTEXT.Process(target=run_tests, args=(made, module, lines, task.tests, limit))
        process.start()
        process.join(limit)
        if process.is_alive():
            process.kill()
            process.join()
            test, message, line = hanging(folder, module, lines, limit)
            return verdict._replace(test=test, message=message, line=line)
        if not (folder / "result.json").exists():
            return verdict._replace(message="the process ended before the tests did "
                                            f"(status {process.exitcode}): does it call exit?")
        return judge(verdict, json.loads((folder / "result.json").read_text(encoding="utf-8")))


def judge(verdict, found):
    """From what the plugin wrote down to a Verdict."""
    remarks = list(found["remarks"])
    if found["printed"]:
        remarks.append(f"it prints ({found['printed']!r}): take that out before you hand it in")
    if "message" in found:
        about = " ".join(found["about"].split()) if "given" not in found["message"] else ""
        message = found["message"] + (f"\nthe test      {about}" if about else "")
        return verdict._replace(message=message, test=found["test"], line=found["line"],
                                remark="; ".join(remarks))
    if found["status"] != 0:
        return verdict._replace(message=f"the tests could not be run (pytest's status {found['status']})")
    return verdict._replace(status="passed", remark="; ".join(remarks))


def read(task, folder):
    """The text of a student's file; None where there is no such file."""
    path = folder / file_name(task)
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None


def variant(folder):
    """The seed of a student's folder; None where it is none of a variant."""
    path = folder / VARIANT
    return int(path.read_text(encoding="utf-8")) if path.is_file() else None


def show(verdict):
    """A row of the table, and below it what there is to say."""
    yield f"{verdict.number:2}  {verdict.exercise:32} {verdict.status}"
    for line in verdict.message.splitlines():
        yield f"      {line}"
    if verdict.remark:
        yield f"      remark: {verdict.remark}"


def main(argv=None):
    p = argparse.ArgumentParser(description="Grade the answers in a student's folder. It runs their code.",
                                epilog="A server should give it a sandbox.")
    p.add_argument("out", type=Path, metavar="OUT", help="the folder that start.py made")
    p.add_argument("name", nargs="?", help="one exercise, by its name or number")
    p.add_argument("--json", action="store_true", help="one JSON list instead of a table")
    p.add_argument("--variant", type=int, metavar="SEED", help="the seed of the folder (default: what its "
                   f"{VARIANT} says, which a student can delete)")
    p.add_argument("--seconds", type=float, default=LIMIT, help="for the tests of one exercise")
    a = p.parse_args(argv)
    if not a.out.is_dir():
        p.error(f"there is no folder {a.out}: make one with python exercises/start.py {a.out}")
    try:
        tasks = TASKS if a.name is None else [choose(a.name)]
    except KeyError as e:
        p.error(e.args[0])
    try:
        verdicts, seed = [], variant(a.out) if a.variant is None else a.variant
    except ValueError:
        p.error(f"{a.out / VARIANT} holds no seed: say it, --variant SEED")
    with suppress(ImportError):
        import pytest  # noqa: F401  before the processes are forked
        import torch  # noqa: F401
    for task in tasks:
        if sys.stderr.isatty():
            print(f"{task.number:2}  {task.name:32} ...", end="\r", file=sys.stderr, flush=True)
        text = read(task, a.out)
        verdicts.append(grade(task, text, a.seconds, seed) if text is not None else
                        Verdict(task.name, task.number, "to do", f"there is no {file_name(task)} in {a.out}"))
        if not a.json:
            print(*show(verdicts[-1]), sep="\n", flush=True)
    if a.json:
        print(json.dumps([v._asdict() for v in verdicts], indent=1))
    else:
        print(f"{sum(v.status == 'passed' for v in verdicts)} of {len(verdicts)} passed")
    return int(any(v.status != "passed" for v in verdicts))


if __name__ == "__main__":
    sys.exit(main())
