"""Finds functions in source text and changes them. The tests, the grader and the porting kit use it
to plant mistakes, which are listed in catalogues of one format.

It works on the code of one function as `ast.unparse` writes it, without its docstring. Comments,
line breaks and the place of a function in its file therefore do not matter.
"""
import ast
import itertools
import textwrap
from typing import NamedTuple


class Change(NamedTuple):
    """A row of a catalogue."""
    file: str           # or an exercise
    scope: str          # `function` or `Class.method`
    old: str            # a piece of code that stands there once
    new: str
    why: str = ""       # what its author was thinking, or what breaks
    shown: str = ""     # the test that must fail


def read(path):
    """The changes of a catalogue. A line begins with `#` (a file), `##` (a function), `-` (old
    code), `+` (new code), `=` (why) or `@` (the test), and neighbours with the same mark belong
    together. A row leaves out what is the same as in the row before it. All other lines are for
    readers."""
    found = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for mark, group in itertools.groupby(lines, key=lambda line: line.partition(" ")[0]):
        text = "\n".join(line.partition(" ")[2] for line in group)
        if mark == "#":
            file, scope, old = text, "", ""
        elif mark == "##":
            scope = text
        elif mark == "-":
            old = text
        elif mark == "+":
            found.append(Change(file, scope, old, text))
        elif mark == "=":
            found[-1] = found[-1]._replace(why=text.replace("\n", " "))
        elif mark == "@":
            found[-1] = found[-1]._replace(shown=text)
    return found


class Stale(Exception):
    """A change that no longer fits the code."""


def find(tree, scope):
    """The function or class `scope` in a parsed file. The last one of that name counts, as in
    Python."""
    node = tree
    for part in filter(None, scope.split(".")):
        kinds = ast.FunctionDef, ast.ClassDef
        inside = (n for n in reversed(node.body) if isinstance(n, kinds) and n.name == part)
        node = next(inside, None)
        if node is None:
            raise Stale(f"there is no {scope}")
    return node


def bare(node):
    """The code of a function, class or file as `ast.unparse` writes it, without docstrings."""
    tree = ast.parse(ast.unparse(node))
    documented = ast.Module | ast.ClassDef | ast.FunctionDef
    for n in ast.walk(tree):
        if isinstance(n, documented) and ast.get_docstring(n) is not None:
            n.body = n.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def normal(fragment):
    """A fragment as `ast.unparse` writes it. If it is not Python by itself, it stays as it is."""
    try:
        return ast.unparse(ast.parse(textwrap.dedent(fragment).strip()))
    except SyntaxError:
        return fragment


def change(source, scope, old, new):
    """The source with `new` in place of `old` inside `scope` (or anywhere in the file if that is
    ""). Raises Stale unless `old` stands there exactly once."""
    node = find(ast.parse(source), scope)
    code, old, new = bare(node), normal(old), normal(new)
    depths = [" " * n for n in range(0, 40, 4)] if "\n" in old else [""]
    found = [(pad, code.count(textwrap.indent(old, pad).lstrip())) for pad in depths]
    hits = [pad for pad, count in found if count == 1]
    if not hits or len(hits) < len([count for _, count in found if count]):
        count = max(count for _, count in found)
        raise Stale(f"found {count} times in {scope or 'the file'}: {old!r}\n{code}")
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
