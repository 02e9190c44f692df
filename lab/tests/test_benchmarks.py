"""The results page, the lab book and the cards of the shipped weights tell the truth. Commands
parse, files and links exist, the counts are what the code counts, and docs/papers.md says what each
method reached."""
import re
import shlex
from pathlib import Path

import generate
from lab import train, train_heads
from lab.bench import __main__ as bench
from lab.bench import counts
from support import search

ROOT = Path(__file__).resolve().parents[2]
README, PAPERS = ((ROOT / name).read_text(encoding="utf-8")
                  for name in ("README.md", "docs/papers.md"))
BENCHMARKS = (ROOT / "lab" / "BENCHMARKS.md").read_text(encoding="utf-8")
BOOK = (ROOT / "lab" / "BOOK.md").read_text(encoding="utf-8")
PARSE = {"generate.py": generate.parse, "search.py": search.parse, "-m lab.bench": bench.parse,
         "-m lab.train": train.parse, "-m lab.train_heads": train_heads.parse,
         "-m lab.spectr": [].__eq__}     # it takes no flags
CARDS = [*(ROOT / "weights").glob("**/README.md"), ROOT / "weights" / "twin.json"]
OWN = "DATA/", "PHASE", "runs/"     # folders of the reader's own, which the card explains


def test_every_quoted_command_and_link_works(monkeypatch):
    monkeypatch.chdir(ROOT)
    pages = README + BENCHMARKS + BOOK
    quoted = re.findall(r"(?:^|`)python (\w+\.py|-m lab\.\w+)(?![.\w]) ?([^`\n]*)", pages, re.M)
    assert {"-m lab.bench", "generate.py"} <= {name for name, _ in quoted}
    for name, flags in quoted:
        PARSE[name](shlex.split(flags, comments=True))
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert set(re.findall(r"(?:^|`)make ([\w-]+)", BENCHMARKS + BOOK, re.M)) <= set(targets)
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", BENCHMARKS + BOOK):
        assert link.startswith("https://") or (ROOT / "lab" / link).is_file(), link
    titles = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")
              for title in re.findall(r"^#+ (.+)$", BOOK, re.M)]
    assert set(re.findall(r"\]\(BOOK.md#([\w-]+)\)", BENCHMARKS)) <= set(titles)


def test_every_command_of_a_card_parses_and_names_files_that_exist(monkeypatch):
    monkeypatch.chdir(ROOT)
    for card in CARDS:
        commands = re.findall(r'[`"]python (-m [\w.]+|\w+\.py) ([^`"]*)[`"]',
                              card.read_text(encoding="utf-8"))
        assert commands, f"{card} has none"
        for program, flags in commands:
            words = shlex.split(flags)
            PARSE[program](words)
            for flag, word in zip(["", *words], words, strict=False):
                path = word.split("=")[0]
                if "/" in word and flag != "--out" and not path.startswith(OWN):
                    assert Path(path).exists(), f"{card}: {word}"


def test_the_table_of_papers_says_what_each_reached_here():
    """By a figure, which test_figures.py compares with its result, or by a link to where it
    is told."""
    table = PAPERS[PAPERS.index("| paper |") :].splitlines()[2:]
    rows = [row.split("|") for row in table if row.startswith("|")]
    for _, paper, files, ours, *_ in rows:
        assert re.search(r"\d\.\d\d|\]\(\.\./lab/BOOK", ours), f"{paper}: {ours}"
        assert all((ROOT / name).is_file() for name in re.findall(r"`([\w/.]+)`", files)), paper


def test_the_counts_of_operations_are_those_of_the_code(monkeypatch):
    some = "plain", "exit, stop rule"
    monkeypatch.setattr(counts, "DRAFTERS", {name: counts.DRAFTERS[name] for name in some})
    for name, row in counts.counts().items():
        cells = name, *(n for part in row.values() for n in part.values())
        assert f"| {' | '.join(map(str, cells))} |\n" in BENCHMARKS
