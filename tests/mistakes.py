"""Plausible mistakes, each with the test that must notice it: a test of the tests.

    python tests/mistakes.py [WORDS]

It plants one mistake at a time in a copy of its file and runs only its test, which must have passed
without it; with words, only the rows that have one of them in their file, function or reason.

The mistakes stand in mistakes.txt, and exercises/cuts.py plants them. Those in functions that are
exercises stand in exercises/wrong.txt, where the grader's message must also name them.
"""
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))     # trap: a process that imports this keeps its own order

from exercises.cuts import Stale, change, read  # noqa: E402

WORKERS, LIMIT = min(2, os.cpu_count() or 1), 120     # seconds for one mistake


def node_id(m):
    """`file::name[case]` of the catalogue as pytest has it: tests/test_file.py::test_name[case]"""
    folder = "lab/tests" if m.file.startswith("lab/") else "tests"
    if m.shown.startswith(("by_hand::", "domains::")):      # the grader's
        folder = "exercises/tests"
    return f"{folder}/test_{m.shown.replace('::', '.py::test_')}"


MISTAKES = [m._replace(shown=node_id(m)) for m in read(Path(__file__).with_suffix(".txt"))]


# --- trying them


def pytest_in(argv, out):
    """What each process does; it is forked from one that holds torch, whose import outlasts most
    tests."""
    import pytest

    os.chdir(ROOT)
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() not in (ROOT, ROOT / "tests")]
    for fd in (1, 2):
        os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
    sys.exit(int(pytest.main(["-x", "-p", "no:cacheprovider", "--color=no", *argv])))


def run_tests(tests, before="", limit=None, options=("--tb=no",), out=os.devnull):
    """pytest's exit status; None: out of time. before: a folder whose modules come before the
    library's."""
    argv = [*options, "-o", f"pythonpath={before} . tests", *tests]
    process = multiprocessing.get_context("fork").Process(target=pytest_in, args=(argv, out))
    process.start()
    process.join(limit)
    if process.is_alive():
        process.kill()
        process.join()
        return None
    return process.exitcode


def plant(m, folder):
    """Write the file of a mistake, with the mistake in it, below `folder`."""
    source, path = (Path(root, m.file) for root in (ROOT, folder))
    path.parent.mkdir(exist_ok=True)
    path.write_text(change(source.read_text(encoding="utf-8"), m.scope, m.old, m.new),
                    encoding="utf-8")


def attempt(m):
    """(what became of a mistake, seconds): KILLED where its test fails."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            plant(m, folder)
        except Stale as e:
            return f"STALE: {e}", 0.0
        status = run_tests([m.shown], folder, LIMIT)
    says = {0: "SURVIVED", 1: "KILLED", None: "OUT OF TIME"}
    return says.get(status, f"BROKEN: pytest's status {status}"), time.perf_counter() - start


def main(words):
    chosen = [m for m in MISTAKES
              if not words or any(word in f"{m.file} {m.scope} {m.why}" for word in words)]
    context, failed = multiprocessing.get_context("forkserver"), []
    # imported once, not for every row
    context.set_forkserver_preload(["torch", "tokenizers", "pytest"])
    with ProcessPoolExecutor(WORKERS, context) as pool:
        for m, (verdict, seconds) in zip(chosen, pool.map(attempt, chosen), strict=True):
            line = f"{verdict:8} {seconds:5.1f} s  {m.file}, {m.scope}: {m.why} ({m.shown})"
            print(line, flush=True)
            failed += [line] * (verdict != "KILLED")
    print(*failed, f"{len(chosen)} mistakes, {len(failed)} failed", sep="\n")
    return int(bool(failed) or not chosen)


if __name__ == "__main__":
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    sys.exit(main(sys.argv[1:]))
