"""Near-tie or bug, on the shipped model: its own text, one with an odd token, and one that a tie decides."""
import json
from pathlib import Path

import pytest
import torch
from tiny import command

import checkpoint
from lab import verdict
from speculative import generate

MODEL = Path(__file__).resolve().parents[2] / "weights" / "stories-draft"
FLAGS = "--model", MODEL, "--prompt", "Once upon a time"
call = command(verdict.main)


@pytest.fixture(scope="module")
def ids():
    model, tokenizer = checkpoint.load(MODEL, "cpu", torch.float32)
    prompt = checkpoint.encode(tokenizer, "Once upon a time", model.c.bos)
    steps = generate(model, [prompt], 12)[0][0]
    second = model(torch.tensor([prompt + steps[:5]]))[0, -1].topk(2).indices[1]
    return steps, int(second), tokenizer


def test_verdicts(call, ids, tmp_path):
    steps, second, tokenizer = ids
    ours, theirs = tmp_path / "ours.json", tmp_path / "theirs.json"
    ours.write_text(json.dumps(steps))
    (tmp_path / "ours.txt").write_text(tokenizer.decode(steps), encoding="utf-8")
    assert call(*FLAGS, ours, tmp_path / "ours.txt")[:2] == (0, "equal: 12 tokens\n")
    theirs.write_text(json.dumps(steps[:5] + [second]))
    status, said, *_ = call(*FLAGS, ours, theirs)
    assert said.startswith("after 5 equal tokens") and status == ("NOT" in said)
    theirs.write_text(json.dumps(steps[:5] + [1]))
    assert call(*FLAGS, ours, theirs, "--dtype", "float32")[0] == 1
    theirs.write_text(json.dumps(steps[:5]))
    assert "one text ends" in call(*FLAGS, ours, theirs)[1]
    theirs.write_text('{"ids": 3}')
    call.refuses([*FLAGS, ours, theirs], tmp_path, "theirs.json", "list of token ids")
