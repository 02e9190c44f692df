"""Plausible mistakes, each with the test that must notice it: a test of the tests.

    python tests/mistakes.py [WORDS]    make one mistake at a time in a copy and run only its test;
                                        with words, only rows whose file, function or reason has one of them

`change` is the one engine that plants mistakes in source text; exercises and ports use it, too. It works on
the code of one function as `ast.unparse` writes it, without docstring, so that comments, line breaks and the
place of a function in its file break no row. Mistakes in functions that are exercises stand in
exercises/answers.py, where a message must also name each of them.
"""
import ast
import multiprocessing
import os
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
WORKERS, LIMIT = min(2, os.cpu_count() or 1), 120     # seconds for one mistake


class Mistake(NamedTuple):
    file: str
    scope: str      # `function` or `Class.method`
    old: str        # an expression or statement that the function has exactly once
    new: str
    why: str        # what its author was thinking, or what breaks
    test: str       # that must fail: its node id below tests/


class Stale(Exception):
    """A row that no longer fits the code."""


# --- the engine


def find(tree, scope):
    """The function or class `scope` in a parsed file: the last one of that name, as in Python."""
    node = tree
    for part in filter(None, scope.split(".")):
        kinds = ast.FunctionDef, ast.ClassDef
        node = next((n for n in reversed(node.body) if isinstance(n, kinds) and n.name == part), None)
        if node is None:
            raise Stale(f"there is no {scope}")
    return node


def bare(node):
    """The code of a function, class or file as `ast.unparse` writes it, without docstrings."""
    tree = ast.parse(ast.unparse(node))
    for n in ast.walk(tree):
        if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(n) is not None:
            n.body = n.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def normal(fragment):
    """A fragment as `ast.unparse` writes it; one that is not Python by itself stays as it is."""
    try:
        return ast.unparse(ast.parse(textwrap.dedent(fragment).strip()))
    except SyntaxError:
        return fragment


def change(source, scope, old, new):
    """The source with `new` in place of `old` inside `scope` ("": the whole file). Raises Stale unless `old`
    stands there exactly once."""
    node = find(ast.parse(source), scope)
    code, old, new = bare(node), normal(old), normal(new)
    depths = [" " * n for n in range(0, 40, 4)] if "\n" in old else [""]
    found = [(pad, code.count(textwrap.indent(old, pad).lstrip())) for pad in depths]
    hits = [pad for pad, count in found if count == 1]
    if not hits or len(hits) < len([count for _, count in found if count]):
        raise Stale(f"found {max(count for _, count in found)} times in {scope or 'the file'}: {old!r}\n{code}")
    pad = hits[0] if "\n" in old else line_indent(code, old)
    code = code.replace(textwrap.indent(old, hits[0]).lstrip(), textwrap.indent(new, pad).lstrip())
    if not scope:
        return code + "\n"
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
    lines = source.splitlines()
    lines[first : node.end_lineno] = textwrap.indent(code, " " * node.col_offset).splitlines()
    return "\n".join(lines) + "\n"


def line_indent(code, old):
    """The indentation of the line in which `old` begins."""
    line = code[code.rfind("\n", 0, code.index(old)) + 1 :]
    return line[: len(line) - len(line.lstrip())]


# --- trying them


def pytest_in(argv, out):
    """What each process does; it is forked from one that holds torch, whose import outlasts most tests."""
    import pytest

    os.chdir(ROOT)
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() not in (ROOT, ROOT / "tests")]
    for fd in (1, 2):
        os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
    sys.exit(int(pytest.main(["-x", "-p", "no:cacheprovider", "--color=no", *argv])))


def run_tests(tests, before="", limit=None, options=("--tb=no",), out=os.devnull):
    """pytest's exit status; None: out of time. before: a folder whose modules come before the library's."""
    argv = [*options, "-o", f"pythonpath={before} . tests", *(f"tests/{test}" for test in tests)]
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
    text = change((ROOT / m.file).read_text(encoding="utf-8"), m.scope, m.old, m.new)
    path = Path(folder, m.file)
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")


def attempt(m):
    """(what became of a mistake, seconds): KILLED where its test fails."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            plant(m, folder)
        except Stale as e:
            return f"STALE: {e}", 0.0
        status = run_tests([m.test], folder, LIMIT)
    says = {0: "SURVIVED", 1: "KILLED", None: "OUT OF TIME"}
    return says.get(status, f"BROKEN: pytest's status {status}"), time.perf_counter() - start


def main(words):
    chosen = [m for m in MISTAKES if not words or any(word in f"{m.file} {m.scope} {m.why}" for word in words)]
    context, failed = multiprocessing.get_context("forkserver"), []
    context.set_forkserver_preload(["torch", "tokenizers", "pytest"])       # imported once, not for every row
    with ProcessPoolExecutor(WORKERS, context) as pool:
        tests = sorted({m.test for m in chosen})
        for test, status in zip(tests, pool.map(run_tests, [[test] for test in tests]), strict=True):
            failed += [f"{test}: status {status} without any mistake"] * (status != 0)
        for m, (verdict, seconds) in zip(chosen, pool.map(attempt, chosen), strict=True):
            line = f"{verdict:8} {seconds:5.1f} s  {m.file}, {m.scope}: {m.why} ({m.test})"
            print(line, flush=True)
            failed += [line] * (verdict != "KILLED")
    print(*failed, f"{len(chosen)} mistakes, {len(failed)} failed", sep="\n")
    return int(bool(failed) or not chosen)
