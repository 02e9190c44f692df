"""The benchmark of a real model, on a small one that a template makes a chat model."""
import json
import shutil
import sys

import pytest
from tiny import command

import checkpoint
from lab import within
from lab.bench import __main__ as bench
from lab.bench import llamacpp
from lab.bench.shared import WEIGHTS
from methods import heads

call = command(bench.main)


@pytest.fixture
def folder(tmp_path):
    """A small model that a template makes a chat model, with a head that was not trained."""
    folder = shutil.copytree(WEIGHTS / "stories-draft", tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    head = heads.Eagle(checkpoint.load(folder, "cpu")[0])
    (folder / "heads" / "eagle").mkdir(parents=True)
    heads.save(head, folder / "heads" / "eagle")
    (folder / "heads" / "eagle" / "draft_vocab.json").write_text(json.dumps({"ids": [*range(1000)]}))
    return folder


def test_the_copy_in_few_bits_is_made_once_for_all_runs(folder):
    """It was made again for each run."""
    model, _ = checkpoint.load(folder, "cpu")
    assert within.lookup(model, 3).model is within.lookup(model, 5).model


def test_two_levels_are_told_by_the_formula_and_measured(folder, monkeypatch, capsys):
    monkeypatch.setattr(within, "NEW", 24)
    monkeypatch.setattr(within, "REPEATS", 1)
    assert within.run(["--model", str(folder), "--prompts", "1"]) is None
    head, _, *rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert head[-2:] == ["measured", "int4 alone"]
    assert [row[0] for row in rows] == [f"{name}, gamma {gamma}" for name in ("lookup", "exit", "EAGLE")
                                        for gamma in (3, 5)]
    alpha_2 = head.index("alpha 2")
    assert all(0.5 < float(row[alpha_2]) <= 1 for row in rows), "int4 is nearly the model"


def test_the_whole_benchmark(call, tmp_path, folder):
    status, out, err = call("real", "--model", folder, "--quick", "--new", "8", "--prompts", "maths",
                            "--only", "eagle", "exit", "int4", "auto", "former", "--out", tmp_path / "made")
    assert status == 0 and "| eagle, tree of 8 | " in out, err
    data = json.loads((tmp_path / "made.json").read_text())
    assert {*data["results"]} == {"maths, T 0", "maths, T 0.8"} and "exit 1" in data["promised"]["maths"]
    for rows in data["results"].values():
        assert "predicted" in rows["eagle, gamma 2"] and rows["auto"]["tau"] >= 1
        assert rows["int4, gamma 3"]["tau"] > 2, "it is nearly the model"
    assert "transformers, plain" in data["results"]["maths, T 0"]
    status, out, _ = call("block", "--model", folder, "--heads", folder / "heads/eagle", "--quick", "--new",
                          "8", "--prompts", "maths")
    assert status == 0 and out.startswith("1 prompts") and "| 0.8 | 6 | 1." in out


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
    assert llamacpp.ask(llama, 3, {8}, [1, 5]).ids == [7, 8] and llama.calls == [([1, 5], 0.0)]
    assert llamacpp.ask(llama, 3, {4}, [1]).ids == [7, 8, 2]
    with pytest.raises(ValueError, match="another vocabulary"):
        llamacpp.ways({"llama.cpp": llama}, checkpoint.read_config(WEIGHTS / "stories-draft"), 3)
    monkeypatch.setitem(sys.modules, "llama_cpp", None)     # as where it is not installed
    status, _, err = call("real", "--only", "llama.cpp", "--prompts", "maths", "--quick")
    assert status == 2 and "llama_cpp is not installed" in err and "Traceback" not in err
