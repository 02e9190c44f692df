"""Functions cut out of the library by `ast`: what is left of them is a stub, and an answer takes their place.

The one thing to remember: the library is the solution. Nothing here is a copy of it, so nothing can fall out
of step with it.
"""
import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HARMLESS = {"math", "random", "itertools", "functools", "collections", "dataclasses", "typing", "torch"}


class Refused(Exception):
    """An answer that cannot be run, and why, in one line."""


def source(module):
    return (ROOT / module).read_text(encoding="utf-8")


def find(tree, name):
    """The function `f` or method `C.f` in a parsed file; None where there is none."""
    body = tree.body
    for part in name.split("."):
        node = next((n for n in reversed(body)      # the last one counts, as in Python
                     if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name == part), None)
        if node is None:
            return None
        body = node.body
    return node if isinstance(node, ast.FunctionDef) else None


def span(node):
    """Its lines [first, last), counted from 0, with its decorators."""
    return min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1, node.end_lineno


def head(node):
    """How many of its lines come before its body: signature and docstring."""
    body = node.body[ast.get_docstring(node) is not None :]
    first = body[0].lineno - 1 if body else node.end_lineno
    return first - span(node)[0]


def original(module, name):
    """The lines of a function as the library has it, inside its class where it is a method."""
    text = source(module)
    first, last = span(find(ast.parse(text), name))
    return text.splitlines()[first:last]


def stub(module, name):
    """Signature, docstring and `raise NotImplementedError`. A method stands in its class."""
    text = source(module)
    node = find(ast.parse(text), name)
    first, _ = span(node)
    lines = text.splitlines()[first : first + head(node)]
    lines = [*lines, " " * (node.col_offset + 4) + "raise NotImplementedError"]
    if "." in name:
        outer = next(n for n in ast.parse(text).body
                     if isinstance(n, ast.ClassDef) and n.name == name.split(".")[0])
        bases = f"({', '.join(map(ast.unparse, outer.bases))})" if outer.bases else ""
        lines = [f"class {outer.name}{bases}:", *lines]
    return "\n".join(lines) + "\n"


def opening(module, text):
    """The lines with which a student's file of this text begins: the imports of math and torch, and of what
    else the module or the specifications import and assign, as far as the text names it."""
    named = {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)} | {"math", "torch"}
    lines = ["import math", "import torch"]
    for node in [*ast.parse(source("exercises/specs.py")).body, *ast.parse(source(module)).body]:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            node.names = [n for n in node.names if (n.asname or n.name) in named]
            known = node.names and ast.unparse(node).split()[1].split(".")[0] in HARMLESS
        else:
            known = isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) in named
        lines += [ast.unparse(node)] if known and ast.unparse(node) not in lines else []
    return sorted(lines, key=lambda line: (" = " in line, line.startswith("from")))


# --- reading an answer


def signature(node):
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


def check_imports(tree, module):
    """What the library's module imports is there already; a few harmless modules may be added."""
    lines, own = source(module).splitlines(), Path(module).stem
    known = {n.split()[1].split(".")[0] for n in lines if n.startswith(("import ", "from "))}
    for node in ast.walk(tree):
        names = ([alias.name for alias in node.names] if isinstance(node, ast.Import) else
                 [node.module or "."] if isinstance(node, ast.ImportFrom) else [])
        for name in names:
            if name.split(".")[0] == own:
                raise Refused(f"line {node.lineno}: it imports {name}, in which it is to stand itself")
            if name.split(".")[0] not in known | HARMLESS:
                raise Refused(f"line {node.lineno}: it imports {name}; an exercise needs torch and math "
                              "alone")


def extras(tree, module, asked, answers):
    """Top-level statements of a file beside the functions and classes that were asked for: helpers. One that
    has the name of something in the library's module is refused, as it would change other functions; and so
    is a method beside the `answers`, of whose class nothing else is taken."""
    taken = {n.name for n in ast.parse(source(module)).body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    found = []
    for node in tree.body:
        if getattr(node, "name", None) in asked or isinstance(node, ast.Expr):
            for lost in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(lost, ast.FunctionDef) and lost.name not in answers:
                    raise Refused(f"line {lost.lineno}: put `{lost.name}` outside of its class, as a "
                                  "function")
            continue
        if getattr(node, "name", None) in taken:
            raise Refused(f"line {node.lineno}: the library has a `{node.name}` already; give your helper "
                          "another name")
        if isinstance(node, (ast.Import, ast.ImportFrom)) and "__future__" in ast.unparse(node):
            raise Refused(f"line {node.lineno}: an exercise needs no __future__")
        found.append(node)
    return found


def moved(line, before, after):
    """A line that was indented by `before` columns, indented by `after`."""
    return " " * after + line[before:] if line[:before].isspace() or not before else line


def put(module, names, text, disguises=None):
    """The module with the functions of an answer in place of its own: a list of (line, line of the answer or
    None). disguises: {name: a Disguise} for a variant, see variants.py. Raises Refused, in one line, for an
    answer that cannot be put there, and NotImplementedError for one that is still the stub."""
    tree, lines, disguises = parse(text), text.splitlines(), disguises or {}
    own = source(module)
    where, result = ast.parse(own), [(line, None) for line in own.splitlines()]
    pairs = []
    for name in names:
        old, d = find(where, name), disguises.get(name)
        asked, want = (name, signature(old)) if d is None else (d.name, (d.decorators, d.head))
        new = find(tree, asked)
        if new is None:
            raise Refused(f"`{asked}` is not there any more: keep the line `{want[1]}:`")
        if signature(new)[0] != want[0] and not want[0]:
            raise Refused(f"line {new.lineno}: take the decorator of `{asked}` away")
        if signature(new) != want:
            raise Refused(f"line {new.lineno}: the signature is another one; keep `{want[1]}:`"
                          + "".join(f" under `@{decorator}`" for decorator in want[0]))
        if name == "verify" and any(getattr(n, "id", "") == "verify_tree" for n in ast.walk(new)):
            raise Refused(f"line {new.lineno}: `verify_tree` is exercise 15; write `{asked}` itself")
        pairs.append((old, new, d))
    if all(is_stub(new) for _, new, _ in pairs):
        raise NotImplementedError
    check_imports(tree, module)
    outer = {name.split(".")[0] for name in names}
    helpers = extras(tree, module, outer | {d.name.split(".")[0] for d in disguises.values()},
                     {new.name for _, new, _ in pairs})
    for old, new, d in sorted(pairs, key=lambda three: -three[0].lineno):  # from the end, so that lines stay
        block = [(moved(lines[i], new.col_offset, old.col_offset), i + 1) for i in range(*span(new))]
        if d is not None:
            block += [("", None), *((" " * old.col_offset + line, None) for line in d.wrapper)]
        result[slice(*span(old))] = block
    first = min(span(n)[0] for n in where.body if getattr(n, "name", None) in outer)
    added = []
    for node in helpers:
        start = span(node)[0] if hasattr(node, "decorator_list") else node.lineno - 1
        added += [(lines[i], i + 1) for i in range(start, node.end_lineno)]
    return result[:first] + added + result[first:]
