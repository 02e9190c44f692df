"""Speculation inside speculation: what is drafted is a text of the copy, by its law, and q is the copy's."""
import promises
import pytest
import torch
from tiny import LIVELY, PROMPTS, TINY, TINY_GEMMA, Unsure, each_family, make, small, warm

from layerskip import SelfDraft
from machine.quant import quantise
from methods.heads import Eagle
from methods.suffix import Suffix
from methods.within import Within
from sampling import Coins
from speculative import ModelDraft, NGram, generate, rounds


def within(m, inner, rule=4):
    """inner: copy -> drafter."""
    twin = quantise(m, "int4", head="int4")
    return Within(twin, inner(twin), rule)


DRAFTERS = {
    "lookup": lambda m: within(m, lambda twin: NGram(3, 1)),
    "suffix": lambda m: within(m, lambda twin: Suffix(4), 6),
    "exit, stopped": lambda m: within(m, lambda twin: SelfDraft(twin, range(6), Unsure(2)), 5)}

test_greedy_identity = promises.greedy_identity(DRAFTERS, on=["cpu"])
test_rows_equal_solo_runs = promises.rows_equal_solo_runs(DRAFTERS)
test_end_of_text = promises.end_of_text(DRAFTERS)
test_context_limit = promises.context_limit(DRAFTERS)
test_short_answers = promises.short_answers(DRAFTERS)
test_poison = promises.poison(DRAFTERS)
test_exact_law = promises.exact_law({
    "lookup": (TINY, lambda m: within(m, lambda twin: NGram(1, 1), 2)),
    "gemma2, exit": (TINY_GEMMA, lambda m: within(m, lambda twin: SelfDraft(twin, range(2), 1), 2))}, count=2)


@each_family
def test_q_is_the_copys_and_drafted_tokens_have_its_law(family):
    """For each drafted token the q that is handed over is what the copy says after the target's keys and its
    own; and few of its passes are needed if it is drafted for well."""
    m, count = make(LIVELY[family]), 300
    drafter, alone = DRAFTERS["exit, stopped"](m), within(m, lambda twin: NGram(0, 1), 5)
    firsts = torch.zeros(m.c.vocab_size, dtype=torch.float64)
    for seed in range(count):
        _, r = next(rounds(m, PROMPTS[:1], 9, drafter, warm, Coins(seed)))
        _, plain = next(rounds(m, PROMPTS[:1], 9, alone, warm, Coins(seed)))
        assert torch.allclose(r.draft.q[0, 0], plain.draft.q[0, 0], atol=1e-9), "before the first token"
        assert r.draft.tokens.shape[1] == plain.draft.tokens.shape[1] == 5
        firsts[r.draft.tokens[0, 0]] += 1 / count
        same = (r.draft.tokens == plain.draft.tokens)[0].cumprod(0)
        for k in range(1, 5):
            if same[k - 1]:
                assert torch.allclose(r.draft.q[0, k], plain.draft.q[0, k], atol=1e-9)
    assert (firsts - r.draft.q[0, 0]).abs().max() < 0.1


def test_what_keeps_keys_of_its_own_is_refused(models):
    m = models["llama"]
    for inner in (ModelDraft(small(m), 2), Eagle(m).drafter(2)):
        with pytest.raises(ValueError, match="inside, use lookup or a SelfDraft"):
            Within(quantise(m), inner, 4)
    assert generate(m, PROMPTS, 6, Within(quantise(m), NGram(2, 1), 0)) == generate(m, PROMPTS, 6)
