"""The command refuses what it cannot do before it measures, and its figures are those that a row
worked by hand has."""
import json
import math
import sys

import pytest
from tiny import command

import checkpoint
from lab.bench import __main__ as bench
from lab.bench import real
from lab.bench.shared import WEIGHTS, Sample
from support.measure import read_machine

DRAFT = WEIGHTS / "stories-draft"
call = command(bench.main)


def test_flags_that_make_no_sense_are_refused(call, monkeypatch, tmp_path):
    call.refuses(["costs", "--repeats", "0"], tmp_path, "--repeats: must be from 1 to", "got 0")
    call.refuses(["counts", "--repeats", "1"], tmp_path, "unrecognized arguments: --repeats")
    call.refuses(["real", "--model", "someone/a-model"], tmp_path, "hf download someone/a-model")
    call.refuses(["real", "--prompts", "mahts"], tmp_path,
                 "mahts: neither a file nor one of chat")
    call.refuses(["real", "--model", DRAFT, "--draft", "exit --tree 3"], tmp_path,
                 "--draft exit: unrecognized arguments: --tree")
    monkeypatch.setattr(real, "measure", lambda *args: pytest.fail("it measures"))
    call.refuses(["real", "--model", DRAFT, "--only", "plain", "mistyped"], tmp_path,
                 "--only 'mistyped': no way to draft", "exit, gamma 1")
    monkeypatch.setitem(sys.modules, "transformers", None)
    call.refuses(["check", "--model", DRAFT], tmp_path, "transformers is not installed")


def test_results_that_could_not_be_written_are_refused_before_they_are_measured(call, tmp_path):
    (tmp_path / "taken.md").mkdir()
    call.refuses(["costs", "--out", ""], tmp_path, "--out '' names a folder")
    for out, culprit in (("none/x", "none/x.json"), (".", "folder"), ("taken", "taken.md")):
        call.refuses(["costs", "--out", f"{tmp_path}/{out}"], tmp_path, culprit)


def test_the_search_takes_the_table_of_costs(call, tmp_path):
    out = tmp_path / "costs.json"
    assert call("costs", "--model", DRAFT, "--repeats", "1", "--out", out)[0] == 0
    c = checkpoint.read_config(DRAFT)
    found = json.loads(out.read_text())
    machine = read_machine(out, c)
    assert [machine.attention, machine.unit] == pytest.approx([found["attention"], found["unit"]])


def test_a_way_that_writes_another_text_stops_the_benchmark():
    real.check_texts({"plain": [1, 2], "exit": [1, 2]}, "on stories")
    with pytest.raises(RuntimeError, match="^wrong differs from plain decoding on stories$"):
        real.check_texts({"plain": [1, 2], "wrong": [1, 3]}, "on stories")


def sample(tokens, seconds, passes, proposed=0, accepted=0, drafting=0.0):
    return Sample([1] * tokens, seconds, drafting, [(accepted, proposed)] * passes)


def test_a_row_by_hand():
    """Three prompts with two runs each, plain decoding at 3 (2 and 4), 8, 8 tokens/s; 8, 16, 8."""
    plain = [[sample(8, 4.0, 8), sample(8, 2.0, 8)], 2 * [sample(8, 1.0, 8)],
             2 * [sample(8, 1.0, 8)]]
    quick, slow = sample(8, 0.5, 4, 2, 1, 0.25), sample(8, 1.0, 4, 2, 1, 0.5)
    got, ratios = real.row([[slow] * 2, [quick] * 2, [slow] * 2], plain), [8 / 3, 2, 1]
    assert got.pop("ratios") == pytest.approx(ratios) and got.pop("places") == "1.00 / 0.00"
    assert got.pop("texts") == [[1] * 8] * 3
    assert got.pop("deviation") == pytest.approx((19 / 27) ** 0.5), "8/3, 2 and 1 about 17/9"
    assert got == pytest.approx({
        "tokens_per_second": 8, "ratio": math.prod(ratios) ** (1 / 3), "lowest": 1, "tau": 2,
        "alpha": 1, "tested": 1 / 2,
        "c": 2.5 / 48 / (10 / 48), "block": 2.5 / 24 / (10 / 48)})
    itself = real.row(plain, plain)
    assert itself["ratio"] == itself["tau"] == 1 and "c" not in itself
