"""Qwen2, with a bias on queries, keys and values; Qwen3, with a norm of each query and key; and
Gemma-3, whose blocks with a window turn by a base of their own: every kind of draft writes the text
of an oracle. (Their logits are those of `transformers`: test_checkpoint.py.)"""
import pytest
from test_heads import wild
from tiny import MORE, PROMPTS, make, opened, oracle, small

from drafter import ModelDraft
from layerskip import SelfDraft, without
from machine.exact import Exact
from machine.few import FewRows
from machine.quant import quantise
from machine.recorded import Recorded
from methods.eagle import Eagle
from methods.jump import Jump
from methods.kangaroo import Kangaroo
from methods.lookup import NGram
from methods.medusa import Medusa
from methods.trees import Siblings
from speculative import generate

DRAFTERS = {
    "plain": lambda m: None,
    "exit, siblings": lambda m: Siblings(SelfDraft(m, range(6), 3), [2, 1]),
    "skip": lambda m: SelfDraft(m, without(6, attn=[1, 4], mlp=[2]), 3),
    "model": lambda m: ModelDraft(small(m), 3),
    "n-gram": lambda m: NGram(4, 1),
    "kangaroo": lambda m: wild(Kangaroo(m, 2)).drafter(3),
    "jump": lambda m: wild(Jump(m, 3)).drafter(3),
    "eagle": lambda m: wild(Eagle(m, fused=True)).drafter(3),
    "medusa, tree": lambda m: wild(Medusa(m, 3)).drafter(3, [0, 0, 1, 1, 2, 3])}
WAYS = {
    "eager": lambda m: m,
    "exact": lambda m: Exact(m),
    "in C++": lambda m: FewRows(m.float()),
    "int8": lambda m: quantise(m, "int8"),
    "recorded": lambda m: Recorded(m, opened(), widths=(1, 2, 4, 8))}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", MORE)
def test_every_draft_writes_the_same_text(family, way):
    m = WAYS[way](make(MORE[family]))
    want = [oracle(m.bare, prompt, 10) for prompt in PROMPTS]
    for name, drafter in DRAFTERS.items():
        # --exact refuses trees
        if way != "exact" or name not in ("exit, siblings", "medusa, tree"):
            assert generate(m, PROMPTS, 10, drafter(m))[0] == want, name
