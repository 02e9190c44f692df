"""Cuts functions out of the library with `ast`, so that a stub remains, and takes from an answer
what is run.

The library is the solution. Nothing here is a copy of it, so the two cannot differ.
"""
import ast
import io
import re
import symtable
import tokenize
from pathlib import Path

from exercises.cuts import Stale, find

ROOT = Path(__file__).resolve().parent.parent
HARMLESS = {
    "__future__", "bisect", "collections", "copy", "dataclasses", "functools", "heapq",
    "itertools", "math", "operator", "random", "sampling", "torch", "typing"}
# Ways to code that is not in scope. An answer's own variables may have these names, too, and its
# attributes and keys those of the builtins.
BUILTINS = {"eval", "exec", "globals", "open"}
AROUND = {
    "__import__", "__builtins__", "__loader__", "__spec__", "__globals__", "__dict__", "__code__",
    "__closure__", "__wrapped__", "__subclasses__", "_getframe", "builtins", "importlib", "inspect",
    "os", "_os", "sys", "_sys"}
# each could stand in for another one
RIVALS = {
    "verification.py": ("verify",), "methods/block.py": ("verify_block",),
    "methods/trees.py": ("verify_tree",)}
HELPERS = {"verification.py": ("against", "next_token")}        # half the work of a judge


class Refused(Exception):
    """An answer that cannot be run, and why, in one line."""


def source(module):
    return (ROOT / module).read_text(encoding="utf-8")


def span(node):
    """Its lines [first, last), counted from 0, with its decorators."""
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
    return first - 1, node.end_lineno


def head(node):
    """How many of its lines come before its body: signature and docstring."""
    body = node.body[ast.get_docstring(node) is not None :]
    return (body[0].lineno - 1 if body else node.end_lineno) - span(node)[0]


def original(module, name):
    """The lines of a function of the library; of a method, below the line of its class."""
    text = source(module)
    outer = name.rpartition(".")[0]
    lines = text.splitlines()[slice(*span(find(ast.parse(text), name)))]
    return [f"class {outer}:"] * bool(outer) + lines


def stub(module, name):
    """The same, but with `raise NotImplementedError` in place of the body."""
    node, method = find(ast.parse(source(module)), name), "." in name
    lines = original(module, name)[: head(node) + method]
    return "\n".join([*lines, " " * (node.col_offset + 4) + "raise NotImplementedError"]) + "\n"


def hollow(module, names):
    """The source of a module without these functions: what calls one of them fails."""
    lines = source(module).splitlines()
    nodes = [find(ast.parse(source(module)), name) for name in names]
    for node in sorted(nodes, key=lambda node: -node.lineno):
        first, last = span(node)
        pad = " " * (node.col_offset + 4)
        says = f"the {node.name} of the library is out of reach: write your own"
        lines[first + head(node) : last] = [f"{pad}raise NotImplementedError({says!r})"]
    return "\n".join(lines) + "\n"


def opening(module, text):
    """The lines with which a student's file of this text begins: imports, and the constants that it
    names."""
    named = {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)}
    constants = []
    for n in ast.parse(source(module)).body:
        if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") in named:
            constants.append(ast.unparse(n))
        if isinstance(n, ast.ImportFrom):   # a constant of another module
            shared = {alias.name for alias in n.names if alias.name.isupper()} & named
            if shared:
                constants += opening(f"{n.module}.py", " ".join(sorted(shared)))[3:]
    return ["import math", "", "import torch", *constants]


# --- reading an answer


def read(path):
    """The text of an answer as Python reads it: a byte order mark, another encoding that its first
    lines name, any kind of line end. Raises Refused, in one line, for bytes that are no text."""
    data = path.read_bytes()
    try:
        text = data.decode(tokenize.detect_encoding(io.BytesIO(data).readline)[0])
    except UnicodeDecodeError as e:
        # trap: e.start counts from the end of a byte order mark; so does e.object, but not data
        line = 1 + len(re.findall(b"\r\n?|\n", e.object[: e.start]))
        raise Refused(f"line {line}: this is not {e.encoding}: save it as UTF-8") from None
    except SyntaxError as e:
        raise Refused(f"line 1 or 2: {e.msg}: save it as UTF-8") from None
    return re.sub("\r\n?", "\n", text)


def signature(node):
    """Decorators and first line, without annotations. A mode of torch, which changes no value, is
    left to the answer."""
    bare = ast.parse(ast.unparse(node)).body[0]
    for arg in [*bare.args.posonlyargs, *bare.args.args, *bare.args.kwonlyargs]:
        arg.annotation = None
    decorators = [text for text in map(ast.unparse, bare.decorator_list)
                  if text not in ("torch.inference_mode()", "torch.no_grad()")]
    return decorators, f"def {bare.name}({ast.unparse(bare.args)})"


def parse(text):
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError) as e:
        where = f"line {e.lineno}: " if getattr(e, "lineno", None) else ""
        raise Refused(f"{where}this is not Python yet ({getattr(e, 'msg', e)})") from None


def is_stub(node):
    body = [n for n in node.body
            if not isinstance(n, ast.Expr) or not isinstance(n.value, ast.Constant)]
    return all(isinstance(n, ast.Raise) and "NotImplementedError" in ast.unparse(n) for n in body)


def answered(tree, name, want):
    """The function of an answer that is to stand for `name`, whose signature must be `want`."""
    try:
        new = find(tree, name)
    except Stale:
        new = None
    if not isinstance(new, ast.FunctionDef):
        raise Refused(f"`{name}` is not there any more: keep the line `{want[1]}:`")
    if signature(new)[0] and not want[0]:
        raise Refused(f"line {new.lineno}: take the decorator of `{name}` away")
    if signature(new) != want:
        raise Refused(f"line {new.lineno}: the signature is another one; keep `{want[1]}:`"
                      + "".join(f" under `@{decorator}`" for decorator in want[0]))
    return new


def check(node, module):
    """Raise Refused for a call that waits for input, for an import that an exercise does not need,
    and for the usual ways to code that is not in scope, such as the tests. It does not stop a
    determined student, but it says that this is no answer."""
    known = {n.split()[1].split(".")[0] for n in source(module).splitlines()
             if n.startswith(("import ", "from "))} | HARMLESS | {Path(module).stem}
    for call in ast.walk(node):
        name = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
        if name in ("breakpoint", "input") or name.endswith(".set_trace"):
            raise Refused(f"line {call.lineno}: `{name}()` waits for you to type: take it out")
    own = {inner.id for inner in ast.walk(node)
           if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)}
    own |= {inner.arg for inner in ast.walk(node) if isinstance(inner, ast.arg)}
    for inner in ast.walk(node):
        names = set()
        wanted = []
        if isinstance(inner, ast.Import):
            wanted = [alias.name for alias in inner.names]
        elif isinstance(inner, ast.ImportFrom):
            wanted = [inner.module or "."]
            names = {alias.name for alias in inner.names}
        elif isinstance(inner, ast.Name):
            names = {inner.id} - own
        elif isinstance(inner, ast.Attribute):
            names = {inner.attr}
        elif isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            names = {inner.value}
        for name in wanted:
            if name.split(".")[0] not in known - AROUND:
                raise Refused(f"line {inner.lineno}: it imports {name}; {why_not(name)}")
        around = AROUND | BUILTINS if isinstance(inner, (ast.Name, ast.ImportFrom)) else AROUND
        for name in names & around:
            raise Refused(f"line {inner.lineno}: `{name}` goes around the exercise, to code that "
                          "is not in scope: write the function itself")


def why_not(name):
    """Why an exercise does without a module."""
    if name.split(".")[0] == "numpy":
        return ("its arrays know neither gradients nor devices, and change dtypes silently; "
                "torch has the same functions under nearly the same names")
    if any((ROOT / folder / f"{name}.py").exists() for folder in ("tests", "exercises/tests")):
        return "these are the tests: write the function itself"
    return "an exercise needs torch and math alone"


def sets(node):
    """The global names that a statement sets, or whose object it changes; "*" where it does not
    say."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    found = set()
    for inner in ast.walk(node):
        if isinstance(inner, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in inner.names}
        if isinstance(inner, (ast.FunctionDef, ast.ClassDef)):
            found.add(inner.name)
        method = isinstance(inner, ast.Call) and inner is getattr(node, "value", None)
        place = inner.func if method and isinstance(node, ast.Expr) else inner
        store = place is not inner or isinstance(getattr(inner, "ctx", None), (ast.Store, ast.Del))
        while isinstance(place, (ast.Subscript, ast.Attribute)):    # TABLE[0] = 1, TABLE.append(1)
            place = place.value
        if isinstance(place, ast.Name) and store and place.id not in HARMLESS:
            found.add(place.id)
    return found


def uses(node):
    """The global names that a statement reads, or that its functions will read when they are
    called."""
    found, tables = set(), [symtable.symtable(ast.unparse(node), "answer", "exec")]
    for table in tables:
        found |= {s.get_name() for s in table.get_symbols() if s.is_global() or table is tables[0]}
        tables += table.get_children()
    return found


def code(module, names, text, file="answer.py"):
    """What is run of an answer: the functions `names`, and of the rest what they need, in its
    order. A trial below them is not run. Raises Refused, in one line, for an answer that cannot be
    run, and NotImplementedError for one that is still the stub."""
    tree, own = parse(text), ast.parse(source(module))
    news = [answered(tree, name, signature(find(own, name))) for name in names]
    if all(map(is_stub, news)):
        raise NotImplementedError
    kept = {}       # {place in the file: statement}
    for full in names:
        outer = find(tree, full.split(".")[0])
        for inner in outer.body if "." in full else ():
            if isinstance(inner, ast.FunctionDef) and f"{outer.name}.{inner.name}" not in names:
                raise Refused(f"line {inner.lineno}: put `{inner.name}` outside of its class, "
                              "as a function")
        if "." in full:
            outer.body = [n for n in news if n in outer.body]
            outer.bases = []
            outer.decorator_list = []
        kept[outer.lineno] = outer
    tops = {full.split(".")[0] for full in names}
    rest = [n for n in tree.body if getattr(n, "name", None) not in tops]
    asked = set().union(*map(uses, kept.values()))
    while more := [n for n in rest if sets(n) & (asked | {"*"})]:
        rest = [n for n in rest if n not in more]
        kept |= {n.lineno: n for n in more}
        asked |= set().union(*map(uses, more))
    body = [kept[line] for line in sorted(kept)]
    for node in body:
        check(node, module)
    return compile(ast.Module(body, []), file, "exec", dont_inherit=True)
