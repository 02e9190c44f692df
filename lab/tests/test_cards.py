"""The commands on the cards of the shipped weights can be followed. They parse, and name what
exists."""
import re
import shlex
from pathlib import Path

import pytest

from lab import train, train_heads
from support import generate, search

ROOT = Path(__file__).resolve().parents[2]
CARDS = sorted((ROOT / "weights").glob("**/README.md")) + [ROOT / "weights" / "twin.json"]
PARSE = {"generate.py": generate.parse, "search.py": search.parse, "-m lab.train": train.parse,
         "-m lab.train_heads": train_heads.parse}
WRITTEN = {"--out"}
OWN = "DATA/", "PHASE", "runs/"     # folders of the reader's own, which the card explains


@pytest.mark.parametrize("card", CARDS, ids=lambda card: str(card.relative_to(ROOT / "weights")))
def test_every_command_parses_and_names_files_that_exist(card, monkeypatch):
    monkeypatch.chdir(ROOT)
    commands = re.findall(r'[`"]python (-m [\w.]+|\w+\.py) ([^`"]*)[`"]',
                          card.read_text(encoding="utf-8"))
    assert commands, "no card without one"
    for program, flags in commands:
        words = shlex.split(flags)
        PARSE[program](words)
        for flag, word in zip(["", *words], words, strict=False):
            path = word.split("=")[0]
            if "/" in word and flag not in WRITTEN and not path.startswith(OWN):
                assert Path(path).exists(), word
