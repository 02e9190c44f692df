"""The benchmark of a real model, on a small one that a template makes a chat model."""
import json
import shutil

from tiny import command

import checkpoint
from lab.bench import __main__ as bench
from lab.bench.shared import WEIGHTS
from methods import heads

call = command(bench.main)


def test_the_whole_benchmark(call, tmp_path):
    folder = shutil.copytree(WEIGHTS / "stories-draft", tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    head = heads.Eagle(checkpoint.load(folder, "cpu")[0])
    (folder / "heads" / "eagle").mkdir(parents=True)
    heads.save(head, folder / "heads" / "eagle")
    (folder / "heads" / "eagle" / "draft_vocab.json").write_text(json.dumps({"ids": [*range(1000)]}))
    status, out, err = call("real", "--model", folder, "--quick", "--new", "8", "--prompts", "maths",
                            "--only", "eagle", "exit", "auto", "former", "--out", tmp_path / "made")
    assert status == 0 and "| eagle, tree of 8 | " in out
    data = json.loads((tmp_path / "made.json").read_text())
    assert {*data["results"]} == {"maths, T 0", "maths, T 0.8"} and "exit 1" in data["promised"]["maths"]
    for rows in data["results"].values():
        assert "predicted" in rows["eagle, gamma 2"] and rows["auto"]["tau"] >= 1
    assert "transformers, plain" in data["results"]["maths, T 0"]
    status, out, _ = call("block", "--model", folder, "--heads", folder / "heads/eagle", "--quick", "--new",
                          "8", "--prompts", "maths")
    assert status == 0 and out.startswith("1 prompts") and "| 0.8 | 6 | 1." in out
