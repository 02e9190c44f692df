"""Figures in documents come from stored results.

    python -m lab.figures            fills the documents in
    python -m lab.figures --check    names each figure that differs from its result, or has none

A result is lab/results/NAME.json: what was run, at which commit, when, on what, how often, and a
tree of figures. `python -m lab.bench WHAT --out lab/results/NAME` writes one. In a document, a
comment above a table or a paragraph says where its figures are kept:

    <!-- table: NAME/PART (ratio tau) -->
    | greedy | chat |
    |---|---|
    | suffix | 1.07 (1.17) |

    <!-- figures: NAME/PART/suffix/chat/ratio; ../tau; - -->
    Suffix decoding gains 1.07 at a tau of 1.17, and T 0.8 is no figure.

A table finds its figures by the names of its rows and columns; a row with one bold cell names the
next PART. `by 2` takes the first two cells as the name of a row,
and the second of two columns of one name is `name, again`. In a paragraph all numbers with a
decimal point are figures, but those of a temperature, in order; `-` is not filled in. The text is
its own template: a figure keeps its decimals, its sign, its commas and its %.
"""
import argparse
import json
import re
import sys
from functools import cache
from pathlib import Path

from model import Refused
from support import cli
from support.files import write_file

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = "README.md", "lab/BENCHMARKS.md", "lab/BOOK.md"
TOLD = "lab/BOOK.md"    # its prose tells of earlier versions; only its tables have results
MARKER = re.compile(r" *(?:- )?<!-- (?P<kind>table|figures): (?P<words>.+) -->")
TABLE = re.compile(r"(.+?)(?: \((.+)\))?(?: by (\d))?")
KEY = re.compile(r"(?<! )/(?! )")    # "recorded / transformers" is one key
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?%?")
DECIMAL = re.compile(r"(?<![\w.,/])(?<!T )(?<!temperature )(?<!top-p )[-+]?\d+\.\d+(?!\.?\d|\w)%?")
NOT_TEXT = re.compile(r"`[^`]*`|\]\([^)]*\)|\[\d{4}\.\d{5}")    # code, addresses, arXiv's numbers


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


def put(pattern, text, figures, where):
    """The text with its numbers replaced by figures, but by those that are None."""
    masked = NOT_TEXT.sub(lambda m: "#" * len(m[0]), text) if pattern is DECIMAL else text
    places = [*pattern.finditer(masked)]
    if len(places) != len(figures):
        raise Refused(f"{where}: {len(places)} figures in the text, {len(figures)} named: {text}")
    for place, figure in reversed([*zip(places, figures, strict=True)]):
        if figure is not None:
            new = printed(figure, place[0])
            text = text[: place.start()] + new + text[place.end() :]
    return text


def cell(text, path, fields, where):
    """A cell of a table, filled in. A result is a number, a list of them, or has named fields."""
    if not NUMBER.search(text):
        return text
    found = look(path)
    if isinstance(found, dict):
        found = [found[field] for field in fields if field in found]
    return put(NUMBER, text, found if isinstance(found, list) else [found], where)


def table(lines, base, fields, names, where):
    """The lines of a table, filled in."""
    split = [[part.strip() for part in line.strip().strip("|").split("|")] for line in lines]
    head = [f"{name}, again" if name in split[0][:i] else name for i, name in enumerate(split[0])]
    done = lines[:2]
    for line, cells in zip(lines[2:], split[2:], strict=True):
        if not any(cells[1:]):
            base = [*base[:-1], cells[0].strip("*")]
            done.append(line)
            continue
        row = ", ".join(cells[:names])
        new = [*cells[:names], *(cell(text, [*base, row, column], fields, where)
                                 for text, column in zip(cells[names:], head[names:], strict=True))]
        indent = line[: len(line) - len(line.lstrip())]
        done.append(f"{indent}| {' | '.join(new)} |")
    return done


def paths(words):
    """The paths of a list: `../key` replaces the last key of the path before, `-` is None."""
    found = []
    last = []
    for word in words.split(";"):
        word = word.strip()
        if word != "-":
            up = word.count("../")
            last = last[: len(last) - up] * bool(up) + KEY.split(word.removeprefix("../" * up))
        found.append(None if word == "-" else last)
    return found


def blocks(lines):
    """[its marker or None, the numbers of its lines] of each paragraph, item of a list or table."""
    found = []
    block = None
    fenced = False
    for i, line in enumerate(lines):
        fence = line.lstrip().startswith("```")
        marker = MARKER.fullmatch(line)
        if fence or fenced or not line.strip():
            block = None
        else:
            item = line.lstrip().startswith("- ") and block and block[1]
            if marker or item or block is None:
                block = [marker, []]
                found.append(block)
            if not marker:
                block[1].append(i)
        fenced ^= fence
    return found


def filled(text, where):
    """(a document with its figures from the results, the paragraphs whose figures have none)"""
    lines = text.split("\n")
    bare = []
    for marker, numbers in blocks(lines):
        block = [lines[i] for i in numbers]
        words = "\n".join(block)
        if marker is None:
            given = where != TOLD or words.lstrip().startswith("|")
            if given and DECIMAL.search(NOT_TEXT.sub("", words)):
                bare.append(f"{where}:{numbers[0] + 1}")
            continue
        place = f"{where}:{numbers[0] + 1}"
        if marker["kind"] == "table":
            base, fields, names = TABLE.fullmatch(marker["words"]).groups()
            block = table(block, KEY.split(base), (fields or "").split(), int(names or 1), place)
        else:
            figures = [path and look(path) for path in paths(marker["words"])]
            block = put(DECIMAL, words, figures, place).split("\n")
        for i, line in zip(numbers, block, strict=True):
            lines[i] = line
    return "\n".join(lines), bare


def run(argv):
    p = cli.Parser(usage="python -m lab.figures [--check]", description=__doc__,
                   formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--check", action="store_true", help="write nothing")
    a = p.parse_args(argv)
    wrong = []
    for name in DOCUMENTS:
        old = (ROOT / name).read_text(encoding="utf-8")
        new, bare = filled(old, name)
        wrong += [f"{place}: figures without a result" for place in bare]
        changed = [i for i, pair in enumerate(zip(old.split("\n"), new.split("\n"), strict=True), 1)
                   if len(set(pair)) > 1]
        if not a.check and changed:
            write_file(ROOT / name, new)
        wrong += [f"{name}:{i}: not the result" for i in changed if a.check]
    print("\n".join(wrong) or "every figure is its result's")
    return int(bool(wrong))


def main(argv=None):
    return cli.main(run, argv)


if __name__ == "__main__":
    sys.exit(main())
