"""The benchmark of trained heads, whose trees are those that promise most."""
import json
import shutil

import torch
from tiny import command

import checkpoint
from lab.bench import __main__ as bench
from lab.bench import heads as measured
from lab.bench.shared import WEIGHTS
from methods import heads
from methods.heads import Kangaroo, Medusa

call = command(bench.main)


def test_the_shapes_of_a_head_are_those_that_promise_most(models, monkeypatch):
    head = Kangaroo(models["llama"], 2)
    head.ranks = [0.8, 0.1]
    monkeypatch.setattr(measured, "NODES", 4)
    chain, tree = measured.shapes(head, 0.3).values()
    assert chain == [0, 1, 2], "2.95 tokens for 1.9 passes"
    assert tree == [0, 0, 1, 1], "2.62 tokens for 1.6 passes"


def test_the_whole_benchmark(call, tmp_path):
    """With untrained heads beside the weights."""
    folder = shutil.copytree(WEIGHTS / "stories-draft", tmp_path / "model")
    m, _ = checkpoint.load(folder, "cpu", torch.bfloat16)
    for head in (Kangaroo(m, 1), Medusa(m, 2)):
        (folder / "heads" / head.kind).mkdir(parents=True)
        heads.save(head, folder / "heads" / head.kind)
    status, out, err = call("heads", "--model", folder, "--quick", "--new", "8", "--repeats", "1",
                            "--prompts", "code", "--out", tmp_path / "made")
    assert (status, err) == (0, "")
    data = json.loads((tmp_path / "made.json").read_text())
    for rows in data["results"].values():
        assert {"do no harm, n-gram tail", "medusa, tree of 8", "kangaroo, do no harm"} <= {*rows}
        assert all(r["tau"] >= 1 and f"| {name} | " in out for name, r in rows.items())
