"""Near-tie or bug, for the shipped model's own text, one with an odd token, and one that a tie
decides."""
import json
import shutil
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


@pytest.mark.parametrize("prompt, ours, theirs, status, said", [
    ("Once upon a time", b"s there", b" there", 1, "after 0 equal tokens"),  # "times" is one token
    # " there" is one, too
    ("Once upon a time ", b"there was", b"there is", 1, "after 1 equal tokens"),
    ("Once upon a time", b" there\r\n", b" there\n", 1, "after 1 equal tokens"),
    ("Once upon a time", b"\xef\xbb\xbf there", b" there", 0, "equal: 1 tokens"),
    ("Once upon a time", b"\xef\xbb\xbf\xef\xbb\xbf there", b" there", 1, "after 0 equal tokens")],
                         ids=str)
def test_texts_are_compared_with_their_prompt(call, tmp_path, prompt, ours, theirs, status, said):
    """They are compared as bytes. A byte order mark is skipped once, and ends of lines differ."""
    files = tmp_path / "a.txt", tmp_path / "b.txt"
    for file, text in zip(files, (ours, theirs), strict=True):
        file.write_bytes(text)
    got = call("--model", MODEL, "--prompt", prompt, *files, "--dtype", "float64")
    assert got[0] == status and got[1].startswith(said), got


def test_texts_that_leave_nothing_of_the_prompt(call, tmp_path):
    """Of a tokenizer that writes no begin-of-text id."""
    files = tmp_path / "a.txt", tmp_path / "b.txt"
    for file, text in zip(files, ("nce", "h"), strict=True):
        file.write_text(text)
    folder = shutil.copytree(MODEL, tmp_path / "model")
    spec = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(spec | {"post_processor": None}))
    call.refuses(["--model", folder, "--prompt", "O", *files], tmp_path, "name a longer prompt")


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
