"""Cuts functions out of the library with `ast`: a stub is what remains, and an answer takes its place.

The library is the solution. Nothing here is a copy of it, so the two cannot differ.
"""
import ast
import io
import re
import tokenize
from pathlib import Path

from tests.mistakes import Stale, find

ROOT = Path(__file__).resolve().parent.parent
HARMLESS = {"math", "random", "itertools", "functools", "collections", "dataclasses", "typing", "torch"}


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
    return [f"class {outer}:"] * bool(outer) + text.splitlines()[slice(*span(find(ast.parse(text), name)))]


def stub(module, name):
    """The same, but with `raise NotImplementedError` in place of the body."""
    node, method = find(ast.parse(source(module)), name), "." in name
    lines = original(module, name)[: head(node) + method]
    return "\n".join([*lines, " " * (node.col_offset + 4) + "raise NotImplementedError"]) + "\n"


def opening(module, text):
    """The lines with which a student's file of this text begins: imports, and the constants that it names."""
    named = {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)}
    constants = [ast.unparse(n) for n in ast.parse(source(module)).body
                 if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") in named]
    return ["import math", *["import random"] * ("random" in named), "", "import torch", *constants]


# --- reading an answer


def read(path):
    """The text of an answer as Python reads it: a byte order mark, another encoding that its first lines
    name, any kind of line end. Raises Refused, in one line, for bytes that are no text."""
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


def check_debugger(node):
    """Raise Refused for a call that waits for input, which a grader has none to give."""
    for call in ast.walk(node):
        name = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
        if name in ("breakpoint", "input") or name.endswith(".set_trace"):
            raise Refused(f"line {call.lineno}: `{name}()` waits for you to type: take it out")


def signature(node):
    """Decorators and first line, without annotations."""
    bare = ast.parse(ast.unparse(node)).body[0]
    for arg in [*bare.args.posonlyargs, *bare.args.args, *bare.args.kwonlyargs]:
        arg.annotation = None
    return [*map(ast.unparse, bare.decorator_list)], f"def {bare.name}({ast.unparse(bare.args)})"


def parse(text):
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError) as e:
        where = f"line {e.lineno}: " if getattr(e, "lineno", None) else ""
        raise Refused(f"{where}this is not Python yet ({getattr(e, 'msg', e)})") from None


def is_stub(node):
    body = [n for n in node.body if not isinstance(n, ast.Expr) or not isinstance(n.value, ast.Constant)]
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
    if name == "verify" and any(getattr(n, "id", "") == "verify_tree" for n in ast.walk(new)):
        raise Refused(f"line {new.lineno}: `verify_tree` is exercise 15; write `{name}` itself")
    return new


def check_imports(tree, module):
    """What the library's module imports is there already; a few harmless modules may be added."""
    known = {n.split()[1].split(".")[0] for n in source(module).splitlines()
             if n.startswith(("import ", "from "))} | HARMLESS
    for node in ast.walk(tree):
        names = ([alias.name for alias in node.names] if isinstance(node, ast.Import) else
                 [node.module or "."] if isinstance(node, ast.ImportFrom) else [])
        for name in names:
            if name.split(".")[0] == Path(module).stem:
                raise Refused(f"line {node.lineno}: it imports {name}, in which it is to stand itself")
            if name.split(".")[0] not in known:
                raise Refused(f"line {node.lineno}: it imports {name}; an exercise needs torch and math "
                              "alone")


def helpers(tree, module, names):
    """The top-level statements of an answer besides the functions `names`, of whose classes nothing else is
    taken. A helper must not have the name of something in the module: it would change other functions."""
    taken = {n.name for n in ast.parse(source(module)).body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    for node in tree.body:
        name = getattr(node, "name", None)
        if name in {full.split(".")[0] for full in names}:
            for inner in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(inner, ast.FunctionDef) and f"{name}.{inner.name}" not in names:
                    raise Refused(f"line {inner.lineno}: put `{inner.name}` outside of its class, as a "
                                  "function")
        elif name in taken:
            raise Refused(f"line {node.lineno}: the library has a `{name}` already; give your helper another "
                          "name")
        elif not isinstance(node, ast.Expr):
            yield node


def put(module, names, text):
    """The module with the functions of an answer in place of its own: a list of (line, line of the answer or
    None). Raises Refused, in one line, for an answer that cannot be put there, and NotImplementedError for
    one that is still the stub."""
    # trap: `splitlines` also splits at form feeds, U+2028 and others, where Python does not
    tree, lines, own = parse(text), text.split("\n"), source(module)
    where, result = ast.parse(own), [(line, None) for line in own.splitlines()]
    olds = [find(where, name) for name in names]
    news = [answered(tree, name, signature(old)) for name, old in zip(names, olds, strict=True)]
    if all(map(is_stub, news)):
        raise NotImplementedError
    others = list(helpers(tree, module, names))
    for node in (*news, *others):
        check_debugger(node)
    check_imports(tree, module)
    added = [(lines[i], i + 1) for node in others for i in range(*span(node))]
    pairs = sorted(zip(olds, news, strict=True), key=lambda pair: -pair[0].lineno)
    for old, new in pairs:      # from the end, so that line numbers stay
        pad, cut = " " * old.col_offset, new.col_offset
        result[slice(*span(old))] = [
            (pad + lines[i][cut:] if not cut or lines[i][:cut].isspace() else lines[i], i + 1)
            for i in range(*span(new))]
    tops = {name.split(".")[0] for name in names}
    first = min(span(n)[0] for n in where.body if getattr(n, "name", None) in tops)
    return result[:first] + added + result[first:]
