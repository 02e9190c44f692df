"""The answers that we know to each exercise: the library's own, right ones written differently
(right.txt) and wrong ones (wrong.txt). check.py grades them all. And a test names a student's
mistake by them, where a wrong answer gives just what the student's function gave."""
import ast
from contextlib import suppress
from functools import cache
from pathlib import Path

from exercises import splice
from exercises.cuts import bare, change, read
from exercises.tasks import choose

RIGHT, WRONG = (read(Path(__file__).with_name(f"{name}.txt")) for name in ("right", "wrong"))


def original(task):
    """The functions of a task and their helpers, as they would stand in a student's file."""
    names = task.functions + splice.HELPERS.get(task.module, ())
    return "\n".join(line for name in names for line in [*splice.original(task.module, name), ""])


def right(task):
    return [row.new for row in RIGHT if row.file == task.name]


def wrong(task):
    """[(text, what the grader must say)]"""
    ours = original(task)
    return [(change(ours, "", row.old, row.new) if row.old else row.new, row.why)
            for row in WRONG if row.file == task.name]


def changes(name):
    """(old, new, why) of the wrong answers to an exercise that change a piece of the original."""
    return [(row.old, row.new, row.why) for row in WRONG if row.file == name and row.old]


@cache
def mutants(name):
    """[(what to say, the function or method `name` with that mistake)]"""
    task, found = choose(name), []
    others = {other.split(".")[0] for other in task.functions if other != name}

    def code(text):
        """What of an answer makes `name`."""
        return [bare(node) for node in ast.parse(text).body
                if getattr(node, "name", None) not in others]

    for text, why in wrong(task):
        with suppress(Exception):       # some cannot even be imported
            if why and code(text) != code(original(task)):
                found.append((why, function(module(task, text), name)))
    return found


def module(task, text):
    """The names of a task's module, with an answer in place of its functions."""
    names = dict(vars(task.library))
    exec(splice.code(task.module, task.functions, text), names)
    return names


def function(space, name):
    """The function or method `name` of a module's names."""
    outer, _, last = name.rpartition(".")
    found = vars(space[outer])[last] if outer else space[name]
    return found.fget if isinstance(found, property) else found


@cache
def reference(name, library):
    """The library's own function of this name, which an answer replaces; or, to compare the library
    itself with, a right answer that was written differently, where there is one."""
    task = choose(name)
    text = original(task) if library or not right(task) else right(task)[0]
    return function(module(task, text), name)
