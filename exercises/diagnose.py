"""Diagnose: a function of the library with one mistake in it, and what the failing test printed. Which line
is wrong, and why?

    python exercises/diagnose.py OUT                   write six cases into OUT/diagnose
    python exercises/diagnose.py OUT --variant SEED    six others, drawn by the seed
    python exercises/diagnose.py OUT --grade           say of each whether the line is right

The mistakes are rows of tests/mistakes.py, so each has a test that notices it, and none of them stands in a
function that is an exercise. The code is shown as the engine writes it, without comments.
"""
import argparse
import ast
import difflib
import random
import re
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests import mistakes  # noqa: E402

COUNT = 6


class Case(NamedTuple):
    function: str
    phrase: str     # the reason in its row of tests/mistakes.py
    why: str        # what a good answer says; shown after the line was found


CASES = [
    Case("ancestors", "siblings see each other's keys in a tree",
         "A node sees itself and what its parent sees. Here it sees all nodes before it, its siblings "
         "among them, as if the tree were a chain."),
    Case("commit", "the next token is put after the whole draft",
         "The token after the last accepted draft belongs right after it, in place of the first that was "
         "refused. Here it goes after all K drafts, and the refused ones stay in the text."),
    Case("KVCache.move", "a move goes the other way",
         "gather reads and scatter writes: the values come from `source` and go to `target`."),
    Case("NGram.enter", "copies from one token too late",
         "What followed an n-gram that starts at i starts at i + n. One further, the first token of what "
         "followed is left out."),
    Case("ModelDraft.propose", "the draft model reads one token only: it misses its own last draft",
         "After a draft that was accepted whole the draft model has read neither its own last draft nor "
         "the bonus token. It must read at least two tokens, or its cache has a hole."),
    Case("Teacher.draft", "a scored draft reads the drafts before it",
         "Each position drafts on its own: of the block a token may see only itself. A triangle lets it "
         "see rough keys of the positions before it, beside their exact ones."),
    Case("Teacher.overlap", "how likely two draws agree, not that a draft is accepted",
         "A draft is accepted with probability sum of min(p, q). The sum of p q is how likely a draw from "
         "p and one from q are the same token, which is less."),
    Case("commit", "the latest end-of-text ends, not the earliest",
         "An accepted draft can hold several end-of-text tokens. The text ends at the first of them."),
    Case("DoNoHarm.begin", "all rows share one estimate",
         "Each row learns from its own drafts and starts with a copy of what earlier texts taught. Here all "
         "rows hold the same object, so that what becomes of one row's drafts counts for all of them."),
    Case("prefill", "prefill: blocks in the wrong slots",
         "Block i starts at i * block, and slot = position. A wrong start puts keys where later tokens "
         "look for others."),
    Case("State.at", "State.at off by one, ragged rows",
         "The last known token of a row with n tokens stands at n - 1, and is offset 0."),
    Case("kernel", "squared distances, as in a smooth kernel",
         "Each bit that differs contributes one factor, so that the distances stand in the exponent as "
         "they are; squared, the matrix over all sets is no product of two-by-two ones any more."),
]


def row(case):
    """Its row of tests/mistakes.py."""
    return next(m for m in mistakes.MISTAKES if (m.scope, m.why) == (case.function, case.phrase))


def mutated(case):
    """The lines of the function with its mistake, and the numbers, from 1, of the lines that it changes."""
    m = row(case)
    source = (ROOT / m.file).read_text(encoding="utf-8")
    right, wrong = (mistakes.bare(mistakes.find(ast.parse(text), m.scope)).splitlines()
                    for text in (source, mistakes.change(source, m.scope, m.old, m.new)))
    changes = difflib.SequenceMatcher(None, right, wrong, autojunk=False).get_opcodes()
    where = {n + 1 for kind, _, _, a, b in changes if kind != "equal" for n in range(a, max(b, a + 1))}
    return wrong, where


def failure(case, most=30):
    """What the failing test prints, without paths of this machine."""
    m = row(case)
    with tempfile.TemporaryDirectory(prefix="diagnose-") as made:
        mistakes.plant(m, made)
        status = mistakes.run_tests([m.test], made, mistakes.LIMIT, ("--tb=short", "-rN"), f"{made}/out")
        out = Path(made, "out").read_text(encoding="utf-8", errors="replace")
    if status != 1:
        raise RuntimeError(f"{m.test} does not fail: {out}")
    lines = [re.sub(r"\S*/site-packages/", "", line.replace(made + "/", "")) for line in out.splitlines()]
    lines = [line[:400] for line in lines if line.strip(" ^")]
    start = next(i for i, line in enumerate(lines) if "FAILURES" in line) + 1
    end = next(i for i, line in enumerate(lines) if line.startswith("!!!"))
    shown = lines[start:end]
    return shown if len(shown) <= most else [*shown[: most // 2], "...", *shown[-most // 2 :]]


def show(number, case):
    """The text of one case."""
    m, (wrong, _) = row(case), mutated(case)
    numbered = [f"{i:3} | {line}" for i, line in enumerate(wrong, 1)]
    return "\n".join([
        f"Diagnose {number}: `{case.function}` of {m.file}. One line is wrong. Which, and why?", "",
        "line: ?", "why: ?", "", *numbered, "", "What the failing test printed:", "", *failure(case), ""])


def write(out, seed=None):
    """Six cases in OUT/diagnose. Raises FileExistsError where the folder exists already."""
    numbers = range(COUNT) if seed is None else random.Random(seed).sample(range(len(CASES)), COUNT)
    folder = out / "diagnose"
    folder.mkdir(parents=True)
    for n in numbers:
        (folder / f"{n + 1:02}.txt").write_text(show(n + 1, CASES[n]), encoding="utf-8")
    return folder


def grade(path):
    """(status, comment) for one answered case."""
    case, text = CASES[int(path.stem) - 1], path.read_text(encoding="utf-8", errors="replace")
    line, why = (re.search(rf"^{word}:[ \t]*(.*?)\s*$", text, re.M) for word in ("line", "why"))
    if not line or not line[1].isdigit():
        return "to do", ""
    if int(line[1]) not in mutated(case)[1]:
        return "failed", f"line {line[1]} is as the library has it"
    empty = not why or why[1] in ("", "?")
    return "passed", ("say why, too; " if empty else "") + f"compare your reason with this: {case.why}"


def main(argv=None):
    p = argparse.ArgumentParser(description="Which line is wrong, and why?")
    p.add_argument("out", type=Path, metavar="OUT", help="the student's folder")
    p.add_argument("--variant", type=int, metavar="SEED", help="six others, drawn by the seed")
    p.add_argument("--grade", action="store_true", help="grade what was answered in OUT/diagnose")
    a = p.parse_args(argv)
    if not a.grade:
        try:
            folder = write(a.out, a.variant)
        except OSError as e:
            sys.exit(str(e))
        print(f"{COUNT} cases are in {folder}: put the number of the wrong line after `line:`, and say why")
        return 0
    files, passed = [path for n in range(1, len(CASES) + 1)
                     if (path := a.out / "diagnose" / f"{n:02}.txt").is_file()], 0
    for path in files:
        status, comment = grade(path)
        passed += status == "passed"
        function = CASES[int(path.stem) - 1].function
        print(f"{path.stem}  {function:24} {status}" + f"\n      {comment}" * bool(comment))
    print(f"{passed} of {len(files)} passed")
    return int(not files or passed < len(files))


if __name__ == "__main__":
    sys.exit(main())
