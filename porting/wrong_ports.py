"""Wrong ports, each made from numpy_port.py by one change: mistakes that check.py must name. And
wrong engines, each made from the library by one change: mistakes that engine.py must name.

make.py runs them all and stores a fingerprint of each wrong answer. A port in any language that
makes one of these mistakes gives one of these answers, so the checker can name the mistake.
"""
from functools import partial
from pathlib import Path

import numpy as np

from exercises.cuts import change, read
from porting.check import ROOT
from porting.library_engine import RULES, answer

SOURCE = Path(__file__).with_name("numpy_port.py").read_text(encoding="utf-8")

ROWS = read(Path(__file__).with_name("wrong.txt"))
MISTAKES = [row[1:5] for row in ROWS if row.file == "porting/numpy_port.py"]
ENGINES = [row[:5] for row in ROWS if row.file != "porting/numpy_port.py"]


def wrong_engine(file, scope, old, new):
    """`library_engine.answer` with a mistake in one function of the library or of itself."""
    space = {"__name__": "engine", "__file__": str(ROOT / "porting" / "library_engine.py")}
    source = change((ROOT / file).read_text(encoding="utf-8"), scope, old, new)
    exec(compile(source, file, "exec"), space)
    if "answer" in space:
        return space["answer"]
    return partial(answer, rules={rule: space.get(f.__name__, f) for rule, f in RULES.items()})


def wrong_port(scope, old, new):
    """The source of the port with that mistake."""
    return change(SOURCE, scope, old, new)


def answers(source, requests):
    """{number: answer} of a port given by its source, run in this process. Failed cases have no
    answer."""
    space, found = {"__name__": "port"}, {}
    exec(compile(source, "wrong port", "exec"), space)  # our own source, with one line changed
    for request in requests:
        if not request["trees"]:
            try:
                with np.errstate(all="ignore"):
                    found[request["case"]] = space["OPS"][request["op"]](request)
            except (ArithmeticError, LookupError, StopIteration, ValueError):
                continue
    return found
