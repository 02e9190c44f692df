"""Golden counts: how many drafts the shipped models accept, as tests/golden.json holds it.

    python -m tests.test_golden

writes it again: after weights have changed, never to make a test pass.

A drafter that drafts badly writes the right text, so no test of texts can see it.
These counts can.
"""
import functools
import json
from pathlib import Path

import pytest
import torch

import checkpoint
from drafter import ModelDraft
from layerskip import SelfDraft, without
from methods import heads
from methods.lookup import NGram
from methods.trees import Siblings
from speculative import rounds

ROOT = Path(__file__).resolve().parent.parent
FILE, MODELS = Path(__file__).with_name("golden.json"), ("stories-llama", "stories-gemma2")
TEXTS = ["Once upon a time", "User: I want to book a table.\nAssistant:", "def main():"]
# beyond Gemma's window
LONG = "User: I need a table for two.\nAssistant: Which city should I look in?\n" * 9


def drafters(m, small):
    some = without(m.c.n_layers, [5, 7, 9], [6, 8])
    return {
        "exit 1": SelfDraft(m, range(2), 2),
        "exit 4": SelfDraft(m, range(8), 4),
        "skip": SelfDraft(m, some, 3),
        "model": ModelDraft(small, 3),
        "ngram": NGram(4, 2),
        "exit 1, siblings": Siblings(SelfDraft(m, range(2), 2), [2, 1]),
    }


def trained(m, folder):
    """Drafters with the trained heads of these weights, as chains,
    and two of them also as trees."""
    found = {kind: heads.load(folder / "heads" / kind, m) for kind in sorted(heads.KINDS)
             if (folder / "heads" / kind).is_dir()}
    trees = {f"{kind}, tree": found[kind].drafter(3, [0, 0, 0, 1, 1, 2, 4])
             for kind in ("eagle", "medusa")}
    return {kind: head.drafter(3) for kind, head in found.items()} | trees


@functools.cache
def shipped(name):
    """A shipped model in float64, its drafters by name, and the prompts."""
    m, tokenizer = checkpoint.load(ROOT / "weights" / name, "cpu", torch.float64)
    small, _ = checkpoint.load(ROOT / "weights" / "stories-draft", "cpu", torch.float64)
    texts = [*TEXTS, *[LONG] * bool(m.c.window)]
    prompts = [checkpoint.encode(tokenizer, text, m.c.bos) for text in texts]
    return m, drafters(m, small) | trained(m, ROOT / "weights" / name), prompts


def counts(name, made):
    """[proposed, accepted, passes] of a drafter, greedy, 32 tokens a text."""
    m, every, prompts = shipped(name)
    run = [r for _, r in rounds(m, prompts, 32, every[made])]
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
