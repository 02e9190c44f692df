"""The benchmark of a real model, on a small one that a template makes a chat model."""
import json
import shutil
import sys

import pytest
from tiny import command

import checkpoint
from lab.bench import __main__ as bench
from lab.bench import llamacpp
from lab.bench.real import dither
from lab.bench.shared import WEIGHTS
from lab.save import save_head
from machine.quant import SHARE, Int4
from methods.eagle import Eagle

call = command(bench.main)


@pytest.fixture
def folder(tmp_path):
    """A small model that a template makes a chat model, with a head that was not trained."""
    folder = shutil.copytree(WEIGHTS / "stories-draft", tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    head = Eagle(checkpoint.load(folder, "cpu")[0])
    (folder / "heads" / "eagle").mkdir(parents=True)
    save_head(head, folder / "heads" / "eagle")
    (folder / "heads" / "eagle" / "draft_vocab.json").write_text(
        json.dumps({"ids": [*range(1000)]}))
    return folder


def test_the_whole_benchmark(call, tmp_path, folder):
    status, out, err = call("real", "--model", folder, "--new", "8", "--prompts", "maths",
                            "--only", "eagle", "exit", "int4", "auto", "former", "--out",
                            tmp_path / "made")
    assert status == 0 and "| eagle, tree of 8 | " in out, err
    assert "plain decoding's in float64" in out and "real: maths, T 0, after" in err
    data = json.loads((tmp_path / "made.json").read_text())
    settings = "T 0", "T 0.8", "T 0.7, top-p 0.8, top-k 20"
    assert {*data["results"]} == {*settings}
    assert data["command"].startswith("python -m lab.bench real --model ") and data["commit"]
    for ways in data["results"].values():
        rows = {name: kinds["maths"] for name, kinds in ways.items()}
        assert "predicted" in rows["eagle, gamma 2"] and rows["auto"]["tau"] >= 1
        assert rows["int4, gamma 3"]["tau"] > 2, "it is nearly the model"
        assert rows["int4, gamma 3"]["bytes"] < 0.4
    assert "transformers, plain" in data["results"]["T 0"]


def test_a_small_model_drafts_for_a_real_one_and_texts_agree_to_the_bit(call, tmp_path, folder):
    """In fast passes the timed texts are checked themselves. A file is a kind of its own."""
    (tmp_path / "own.txt").write_text("Who is Lily?\nWhere is Tom?\n")
    status, out, err = call(
        "real", "--model", folder, "--draft-model", folder, "--fast", "--new", "8", "--prompts",
        tmp_path / "own.txt", "--only", "small model", "int8", "auto", "--out", tmp_path / "made")
    assert status == 0 and "plain decoding's to the bit" in out, err
    ways = json.loads((tmp_path / "made.json").read_text())["results"]["T 0"]
    rows = {name: kinds["own"] for name, kinds in ways.items()}
    assert {*rows} == {"plain", "int8, gamma 3", "small model, gamma 3",
                       "small model in int4, gamma 3", "small model in int4, gamma 5", "auto"}
    itself = rows["small model, gamma 3"]
    assert itself["tested"] == itself["bytes"] == 1, "it is the model"
    assert rows["small model in int4, gamma 3"]["bytes"] < 0.4


def test_what_follows_draft_in_generate_is_a_way(call, tmp_path, folder):
    """Also with a rule or a drafter of a file, which lives through the prompts."""
    lines = "exit --rule lab/rules.py:Gate --gamma 3", "lab/swift.py:SWIFT", "exit --gamma 2"
    status, _, err = call("real", "--model", folder, "--fast", "--new", "8", "--prompts",
                          "stories", "--quick", "2", "--draft", *lines, "--out", tmp_path / "made")
    assert status == 0, err
    ways = json.loads((tmp_path / "made.json").read_text())["results"]["T 0.8"]
    rows = {name: kinds["stories"] for name, kinds in ways.items()}
    names = [*rows]
    assert names == ["plain", "exit, rule lab/rules.py:Gate, gamma 3", "lab/swift.py:SWIFT",
                     "exit, gamma 2"]
    assert all(len(r["ratios"]) == 2 for r in rows.values())
    assert ["predicted" in rows[name] for name in names] == [False, False, False, True]


def test_noise_takes_the_weights_off_the_grid_of_int4(folder):
    """A model that came in int4 is int4's to the bit, and no longer so after noise of one step."""
    model, _ = checkpoint.load(folder, "cpu")
    w = model.blocks[0].mlp.down
    w.copy_(Int4(w).full(w.dtype))
    off = [(Int4(w).full(w.dtype) - w).norm() / w.norm()]
    before = w.clone()
    dither(model)
    off.append((Int4(w).full(w.dtype) - w).norm() / w.norm())
    _, steps, _ = Int4(before).numbers()
    step = steps.float().repeat_interleave(SHARE, 1)[:, : w.shape[1]]
    assert off[0] < 0.01 < 0.03 < off[1]
    assert (w - before).abs().max() < 0.51 * step.max()


def test_llama_cpp_is_asked_for_by_name_and_its_text_ends_where_ours_does(call, monkeypatch):
    class Llama:
        def n_vocab(self):
            return 49152

        def reset(self):
            self.calls = []

        def generate(self, ids, temp):
            self.calls.append((ids, temp))
            yield from (7, 8, 2, 9)

    llama = Llama()
    assert llamacpp.ask(llama, {8}, [1, 5], 0, 3).ids == [7, 8] and llama.calls == [([1, 5], 0.0)]
    assert llamacpp.ask(llama, {4}, [1], 0, 3).ids == [7, 8, 2]
    with pytest.raises(ValueError, match="another vocabulary"):
        llamacpp.check_vocabulary(llama, checkpoint.read_config(WEIGHTS / "stories-draft"))
    monkeypatch.setitem(sys.modules, "llama_cpp", None)     # as where it is not installed
    status, _, err = call("real", "--only", "llama.cpp", "--prompts", "maths", "--quick")
    assert status == 2 and "llama_cpp is not installed" in err and "Traceback" not in err
