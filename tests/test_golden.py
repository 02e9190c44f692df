"""Golden counts: how many drafts of the shipped heads are accepted, as tests/golden.json holds it.

    python -m tests.test_golden

writes it again: after weights have changed, never to make a test pass.

Heads whose file is misread draft badly but write the right text, so no test of texts can see it,
and a test that saves a head first would misread what it wrote. These counts can.
"""
import functools
import json
from pathlib import Path

import pytest
import torch

import checkpoint
from methods import heads
from speculative import rounds

ROOT = Path(__file__).resolve().parent.parent
FILE, MODELS = Path(__file__).with_name("golden.json"), ("stories-llama", "stories-gemma2")
TEXTS = ["Once upon a time", "User: I want to book a table.\nAssistant:", "def main():"]
# beyond Gemma's window
LONG = "User: I need a table for two.\nAssistant: Which city should I look in?\n" * 9


@functools.cache
def shipped(name):
    """A shipped model in float64, drafters by name with the heads that were trained for it, as
    chains, and two of them also as trees; and the prompts."""
    folder = ROOT / "weights" / name
    m, tokenizer = checkpoint.load(folder, "cpu", torch.float64)
    found = {kind: heads.load(folder / "heads" / kind, m) for kind in sorted(heads.KINDS)
             if (folder / "heads" / kind).is_dir()}
    trees = {f"{kind}, tree": found[kind].drafter(3, [0, 0, 0, 1, 1, 2, 4])
             for kind in ("eagle", "medusa")}
    texts = [*TEXTS, *[LONG] * bool(m.c.window)]
    prompts = [checkpoint.encode(tokenizer, text, m.c.bos) for text in texts]
    return m, {kind: head.drafter(3) for kind, head in found.items()} | trees, prompts


def counts(name, made):
    """[proposed, accepted, passes] of a drafter, greedy, 32 tokens a text."""
    m, drafters, prompts = shipped(name)
    run = [r for _, r in rounds(m, prompts, 32, drafters[made])]
    return [sum(int(r.proposed.sum()) for r in run),
            sum(int(r.accepted.sum()) for r in run), len(run)]


GOLDEN = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name, made", [(name, made) for name in MODELS for made in GOLDEN[name]])
def test_golden_counts(name, made):
    """Gemma-2 has soft-caps, post-norms and sliding layers besides,
    and a prompt longer than their window."""
    assert shipped(name)[1].keys() == GOLDEN[name].keys()
    assert counts(name, made) == GOLDEN[name][made]


if __name__ == "__main__":
    tables = (f'"{name}": {{\n' + ",\n".join(
        f'  "{made}": {counts(name, made)}' for made in shipped(name)[1]) + "}" for name in MODELS)
    FILE.write_text("{" + ",\n".join(tables) + "}\n", encoding="utf-8")
