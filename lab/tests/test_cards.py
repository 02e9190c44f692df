"""The commands on the cards of the shipped weights can be followed. They parse, and name what
exists."""
import re
import shlex
from pathlib import Path

from test_benchmarks import PARSE, ROOT

CARDS = [*(ROOT / "weights").glob("**/README.md"), ROOT / "weights" / "twin.json"]
OWN = "DATA/", "PHASE", "runs/"     # folders of the reader's own, which the card explains


def test_every_command_parses_and_names_files_that_exist(monkeypatch):
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
