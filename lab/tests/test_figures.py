"""The figures of documents are those of stored results."""
import json
import re

import pytest

from lab import figures
from model import Refused

LAB = figures.ROOT / "lab"

@pytest.mark.parametrize("name", figures.DOCUMENTS)
def test_a_document_prints_its_results(name):
    """Each figure of README.md and BENCHMARKS.md has one, each table of the lab book, and our
    figures beside those of papers."""
    text = (figures.ROOT / name).read_text(encoding="utf-8")
    assert figures.filled(text) == text, "run python -m lab.figures"
    assert not figures.unbound(text, figures.DOCUMENTS[name])


def test_a_result_says_how_it_was_made():
    used = set()
    for name in figures.DOCUMENTS:
        text = (figures.ROOT / name).read_text(encoding="utf-8")
        used |= set(re.findall(r"<!-- (?:table: )?([\w-]+)", text))
    for page in (*(figures.ROOT / "notebooks").glob("*.py"), *LAB.glob("notebooks/*.py")):
        used |= set(re.findall(r'stored\("([\w-]+)"\)', page.read_text(encoding="utf-8")))
    for file in LAB.glob("results/*.json"):
        data = json.loads(file.read_text(encoding="utf-8"))
        assert {"command", "commit", "date", "machine", "runs"} <= data.keys(), file.name
        assert file.stem in used, f"nothing prints {file.name}"


@pytest.fixture
def result(monkeypatch):
    tree = {"T 0": {"auto": {"chat": {"ratio": 1.384, "tau": 2.0}}, "int4": {"chat": [4, 5]}},
            "T 1": {"auto": {"chat": {"ratio": 0.5, "tau": 1.0}}}, "gain / loss": 0.0163}
    monkeypatch.setattr(figures, "stored", lambda name: {"a": tree}[name])


def test_a_table_by_hand(result):
    old = """<!-- table: a/T 0 (ratio tau) -->
| greedy | chat |
|---|---|
| auto | 9.99 (9.9) |
| int4 | 1 of 9 |
| **T 1** | |
| auto | 9.9 (-) |

After it."""
    with pytest.raises(Refused, match="2 figures, but the text 9.9 "):
        figures.filled(old)
    new = old.replace("(-)", "(3.00)")
    assert figures.filled(new) == (
        new.replace("9.99 (9.9)", "1.38 (2.0)").replace("1 of 9", "4 of 5")
        .replace("9.9 (3.00)", "0.5 (1.00)"))
    assert not figures.unbound(new, r".*")
    with pytest.raises(Refused, match="no figure T 0/suffix/chat"):
        figures.filled(new.replace("| int4", "| suffix"))


def test_a_text_by_hand(result):
    text = """At T 0.8 `x 1.5` is 7.7<!-- a/T 0/auto/chat/ratio -->,
of 2.5<!-- given --> in 3.12.4 and a 1.5B: +7.7%<!-- a/gain / loss -->.
| Another has 3.0 |"""
    assert figures.filled(text) == text.replace("7.7<", "1.4<").replace("+7.7%", "+1.6%")
    assert figures.unbound(text + "\n1.5", r".*") == [3, 4]
    assert figures.unbound(text + "\n1.5", r"\|.*") == [3]
