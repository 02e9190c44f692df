"""The benchmarks count, forecast and judge as they say, however fast anything is."""
import json
import math
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from tiny import GEMMA, PROMPTS, command, make

import checkpoint
from control import weight_costs
from drafter import Drafter, ModelDraft
from lab.bench import __main__ as bench
from lab.bench import drafters, dynamic
from lab.bench.drafters import Bench, Method, Sample
from lab.bench.shared import WEIGHTS
from layerskip import SelfDraft
from methods.standin import ShortHead
from speculative import rounds
from support.measure import read_costs

DRAFT = WEIGHTS / "stories-draft"
call = command(bench.main)


def bench_of(m, small=None, new=20):
    return Bench({"float64": (m, small)}, PROMPTS, {}, new, 1)


READ = {    # a drafter, and what a token of it reads: w, of the model, and s, of a small one
    "exit": (lambda m, small: SelfDraft(m, range(8), 3), lambda w, s: w.step(range(8))),
    "skip": (lambda m, small: SelfDraft(m, range(1, 12), 3), lambda w, s: w.step(range(1, 12))),
    "short head": (lambda m, small: SelfDraft(ShortHead(m, [4, 9, 0, 2, 16]), range(8), 3),
                   lambda w, s: w.step(range(8), 5 / 17)),
    "draft model": (lambda m, small: ModelDraft(small, 3), lambda w, s: s.whole / w.whole)}


@pytest.mark.parametrize("name, family", [*zip(READ, 2 * ["llama", "gemma2"], strict=True)])
def test_a_round_costs_its_drafts_and_one_pass(models, name, family):
    """What draft and verification share is read once for each token, the last draft included."""
    (drafter, cost), m, small = READ[name], models[family], make(GEMMA, 1)
    own, each = set(vars(m)), cost(weight_costs(m.c), weight_costs(small.c))
    lengths = [r.draft.tokens.shape[1] for _, r in rounds(m, PROMPTS[:1], 20, drafter(m, small))]
    s = bench_of(m, small).write(drafter, 0)
    assert s.read == pytest.approx(sum(k * each + 1 for k in lengths), abs=1e-9)
    assert len(s.ids) == 20 and max(lengths) == 3 and set(vars(m)) == own, "the meter is gone"


def test_flags_that_a_command_does_not_read_are_refused(call, monkeypatch, tmp_path):
    call.refuses(["costs", "--repeats", "0"], tmp_path, "--repeats: must be at least 1, got 0")
    call.refuses(["help", "--repeats", "1"], tmp_path, "unrecognized arguments: --repeats")
    call.refuses(["self", "--twin", DRAFT], tmp_path, "unrecognized arguments: --twin")
    call.refuses(["plain", "--dtype", "float32"], tmp_path, "unrecognized arguments: --dtype")
    call.refuses(["help", "--model", "someone/a-model"], tmp_path, "hf download someone/a-model")
    call.refuses(["heads", "--heads", tmp_path], tmp_path, "no trained heads")
    monkeypatch.setitem(sys.modules, "transformers", None)
    call.refuses(["check", "--model", DRAFT], tmp_path, "transformers is not installed")


@pytest.mark.parametrize("out, culprit", [
    ("none/x", "none/x.json"), ("none/", "folder"), ("taken", "taken.md"), ("there/", "folder"),
    ("there/.", "folder"), ("", "folder")])
def test_results_that_could_not_be_written_are_refused_before_they_are_measured(
        call, tmp_path, out, culprit):
    (tmp_path / "there").mkdir()
    (tmp_path / "taken.md").mkdir()
    call.refuses(["costs", "--out", out and f"{tmp_path}/{out}"], tmp_path, "--out" if out == ""
                 else culprit)


def test_the_search_takes_the_table_of_costs(call, tmp_path):
    assert call("costs", "--model", DRAFT, "--repeats", "1", "--out", tmp_path / "costs")[0] == 0
    c = checkpoint.read_config(DRAFT)
    found = json.loads((tmp_path / "costs.json").read_text())
    assert list(read_costs(tmp_path / "costs.json", c).sublayers) == found["sublayers"]


@pytest.mark.parametrize("what", ["self", "dynamic"])
def test_a_word_that_no_way_to_draft_has_is_refused_before_any_is_timed(call, monkeypatch, tmp_path,
                                                                        what):
    monkeypatch.setattr(Bench, "table", lambda *args: pytest.fail("it measures"))
    monkeypatch.setattr(dynamic, "kept_costs", lambda model: weight_costs(model.c))
    flags = ["--model", DRAFT, "--quick", "--new", "8", "--only", "plain", "mistyped"]
    call.refuses([what, *flags], tmp_path, "--only 'mistyped': no way to draft", "exit 1")


def test_a_method_that_writes_another_text_stops_the_benchmark(models):
    class Liar(Drafter):
        def observe(self, state, r):
            r.new[0][-1] = (r.new[0][-1] + 1) % 17

    b, methods = bench_of(models["llama"], new=8), {"plain": Method(), "theirs": Method(ask=print)}
    b.check_texts(methods, [0, 1])
    methods["wrong"] = Method(lambda: lambda model, small: Liar())
    with pytest.raises(RuntimeError, match="^wrong differs from plain decoding .* prompt 0$"):
        b.check_texts(methods, [0, 1])


def sample(tokens, decode, passes, proposed=0, accepted=0, draft=0.0, read=8.0):
    return Sample([1] * tokens, decode, [(accepted // passes, proposed // passes)] * passes, draft,
                  read)


def test_a_row_by_hand():
    """Three prompts with two runs each, plain decoding at 3 (2 and 4), 8, 8 tokens/s; 8, 16, 8."""
    quick, slow = sample(8, 0.5, 4, 8, 4, 0.25, 3.0), sample(8, 1.0, 4, 8, 4, 0.5, 3.0)
    plain = Method(samples={
        0: [sample(8, 4.0, 8), sample(8, 2.0, 8)], 1: [sample(8, 1.0, 8)] * 2,
        2: [sample(8, 1.0, 8)] * 2})
    fixed = Method(sublayers=[0, 1], gamma=2,
                   samples={0: [slow] * 2, 1: [quick] * 2, 2: [slow] * 2})
    texts = [(SimpleNamespace(acceptance=lambda *_, a=a: torch.tensor(a)), unscored) for a, unscored
             in (([9.0, 0.5, 1.0], 1), ([1.0, 1.0, 0.0], 0), ([1.0], 0))]   # the last is too short
    got, ratios = drafters.row(fixed, plain, texts), [8 / 3, 2, 1]
    assert got.pop("ratios") == pytest.approx(ratios) and got.pop("places") == "1.00 / 0.00"
    assert got == pytest.approx({
        "tokens_per_second": 8, "ratio": math.prod(ratios) ** (1 / 3), "tau": 2,
        "by_weights": 8 / 3, "alpha": 4.5 / 6, "tested": 1 / 2,
        "c": 2.5 / 48 / (10 / 48),          # seconds of drafting per token, against a plain pass
        "block": 2.5 / 24 / (10 / 48), "first": 1,  # of the prompts alone: 1/6 and 1/3, 1/4 and 1/2
        "predicted": math.sqrt((1 + 0.5 + 0.5) / (2 / 6 + 1 / 3) * 3 / (2 / 4 + 1 / 2))})
    fixed.gamma = 4
    assert "predicted" not in drafters.row(fixed, plain, texts), "no text is as long as a draft"
    itself = drafters.row(plain, plain, texts)
    assert [itself[k] for k in ("ratio", "tau", "by_weights")] == [1, 1, 1]


def test_the_benchmark_with_a_skip_set_beside_the_weights(call, tmp_path):
    folder = shutil.copytree(DRAFT, tmp_path / "model")
    (folder / "skip.json").write_text('{"attn": [1]}')
    status, out, err = call("self", "--model", folder, "--quick", "--new", "8", "--repeats", "1",
                            "--prompts", "code", "--out", tmp_path / "made", "--only", "skip set",
                            "gate", "early")
    assert (status, err) == (0, "") and (tmp_path / "made.md").read_text() == out
    rows = json.loads((tmp_path / "made.json").read_text())["results"]["code, greedy"]
    assert rows.pop("transformers, assistant_early_exit")["tokens_per_second"] > 0
    assert {"plain", "skip set, gamma 2", "target gate 0.5"} <= set(rows)
    assert all(f"| {name} |" in out and r["by_weights"] > 0 for name, r in rows.items())
