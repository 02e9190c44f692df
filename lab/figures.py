"""Figures in documents come from stored results.

    python -m lab.figures            fills the documents in
    python -m lab.figures --check    names each figure that differs from its result, or has none

A result is lab/results/NAME.json: what was run, at which commit, when, on what, how often, and a
tree of figures. `python -m lab.bench WHAT --out lab/results/NAME` writes one. A document says in
comments, which no reader sees, where its figures are kept: after a figure in the text, and above a
table, whose rows and columns have the names of the tree.

    Suffix decoding gains 1.07<!-- NAME/PART/suffix/chat/ratio --> with Python 3.11<!-- given -->.

    <!-- table: NAME/PART (ratio tau) -->
    | greedy | chat |
    |---|---|
    | suffix | 1.07 (1.17) |

A row with one bold cell names the next PART, and `by 2` takes the first two cells as the name of a
row. The text is its own template: a figure keeps its decimals, its sign, its commas and its %.
"""
import argparse
import json
import re
import sys
from functools import cache
from pathlib import Path

from machine.files import write_file
from model import Refused
from support import cli

ROOT = Path(__file__).resolve().parents[1]
# in which part of a line each decimal must have its result: papers' own figures have none
DOCUMENTS = {"README.md": ".*", "lab/BENCHMARKS.md": ".*", "lab/BOOK.md": ".*",
             "docs/names.md": ".*", "docs/papers.md": r"(?:\|[^|]*){3}"}
NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?%?"
FIGURE = re.compile(rf"({NUMBER})<!-- (.+?) -->")
TABLE = re.compile(r"^ *<!-- table: (.+?)(?: \((.+)\))?(?: by (\d))? -->\n((?: *\|.*\n)+)", re.M)
KEY = re.compile(r"(?<! )/(?! )")    # "recorded / transformers" is one key
DECIMAL = re.compile(r"(?<![\w.,/])(?<!T )(?<!temperature )(?<!top-p )\d*\.\d+(?!\.?\d|\w)")
NO_TEXT = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)|\[\d{4}\.\d{5}", re.S)   # code and addresses


@cache
def stored(name):
    """The tree of figures of lab/results/NAME.json."""
    file = ROOT / "lab" / "results" / f"{name}.json"
    if not file.is_file():
        raise Refused(f"no result {name}: lab/results/{name}.json is missing")
    data = json.loads(file.read_text(encoding="utf-8"))
    return data.get("results", data)


def look(path):
    """The figure at NAME/key/key. Raises Refused if there is none."""
    name, *keys = path
    found = stored(name)
    for key in keys:
        if not isinstance(found, dict) or key not in found:
            raise Refused(f"lab/results/{name}.json has no figure {'/'.join(keys)}")
        found = found[key]
    return found


def printed(figure, like):
    """The figure as text with the decimals, the sign, the commas and the % of another.

    >>> printed(0.0234, "+1.6%"), printed(1234.5, "1,000")
    ('+2.3%', '1,234')
    """
    decimals = len(like.strip("%").partition(".")[2])
    sign = "+" * (like[0] in "+-")
    comma = "," * ("," in like)
    percent = "%" * like.endswith("%")
    return f"{figure * 100 ** len(percent):{sign}{comma}.{decimals}f}{percent}"


def cell(text, path, fields):
    """A cell of a table, filled in. A result is a number, a list of them, or has named fields."""
    numbers = re.findall(NUMBER, text)
    if not numbers:
        return text
    found = look(path)
    if isinstance(found, dict):
        found = [found[field] for field in fields if field in found]
    found = found if isinstance(found, list) else [found]
    if len(found) != len(numbers):
        raise Refused(f"{'/'.join(path)} has {len(found)} figures, but the text {text}")
    left = iter(found)
    return re.sub(NUMBER, lambda old: printed(next(left), old[0]), text)


def table(match):
    """A table and the comment above it, filled in."""
    base, fields, names, lines = match.groups()
    base = KEY.split(base)
    names = int(names or 1)
    head, rule, *rows = [line.split("|") for line in lines.splitlines()]
    columns = [name.strip() for name in head]
    for row in rows:
        cells = [part.strip() for part in row]
        if not any(cells[2:]):
            base = [*base[:-1], cells[1].strip("*")]
            continue
        name = ", ".join(cells[1 : 1 + names])
        for i in range(1 + names, len(row) - 1):
            row[i] = row[i].replace(cells[i], cell(cells[i], [*base, name, columns[i]],
                                                   (fields or "").split()))
    start = match[0][: -len(lines)]
    return start + "".join("|".join(row) + "\n" for row in (head, rule, *rows))


def filled(text):
    """A document with its figures from the results."""
    text = TABLE.sub(table, text)
    return FIGURE.sub(lambda m: m[0] if m[2] == "given" else
                      f"{printed(look(KEY.split(m[2])), m[1])}<!-- {m[2]} -->", text)


def unbound(text, part):
    """The numbers of the lines that have a decimal without a result in this part of the line."""
    for pattern in (NO_TEXT, TABLE, FIGURE):
        text = pattern.sub(lambda m: "\n" * m[0].count("\n"), text)
    parts = (re.match(part, line) for line in text.split("\n"))
    return [i for i, m in enumerate(parts, 1) if m and DECIMAL.search(m[0])]


def run(argv):
    p = cli.Parser(usage="python -m lab.figures [--check]", description=__doc__,
                   formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--check", action="store_true", help="write nothing")
    a = p.parse_args(argv)
    wrong = []
    for name, part in DOCUMENTS.items():
        old = (ROOT / name).read_text(encoding="utf-8")
        new = filled(old)
        pairs = zip(old.split("\n"), new.split("\n"), strict=True)
        changed = [i for i, (was, now) in enumerate(pairs, 1) if was != now]
        wrong += [f"{name}:{i}: not the result" for i in changed if a.check]
        wrong += [f"{name}:{i}: figures without a result" for i in unbound(old, part)]
        if changed and not a.check:
            write_file(ROOT / name, new)
    print("\n".join(wrong) or "every figure is its result's")
    return int(bool(wrong))


def main(argv=None):
    return cli.main(run, argv)


if __name__ == "__main__":
    sys.exit(main())
