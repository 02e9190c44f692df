"""Speculation inside speculation: what is drafted is a text of the copy, by its law, and q is the copy's."""
import promises
import pytest
import torch
from test_heads import wild
from tiny import LIVELY, PROMPTS, TINY, TINY_GEMMA, Unsure, each_family, make, small, warm

from drafter import Drafter, ModelDraft, NGram
from layerskip import SelfDraft
from machine.quant import quantise
from methods.heads import Eagle, Kangaroo, Medusa
from methods.suffix import Suffix
from methods.then import Then
from methods.within import Within
from sampling import Coins
from speculative import generate, rounds


def within(m, inner, rule=4):
    """inner: copy -> drafter."""
    twin = quantise(m, "int4", head="int4")
    return Within(twin, inner(twin), rule)


DRAFTERS = {
    "lookup": lambda m: within(m, lambda twin: NGram(3, 1)),
    "suffix": lambda m: within(m, lambda twin: Suffix(4), 6),
    "exit, stopped": lambda m: within(m, lambda twin: SelfDraft(twin, range(6), Unsure(2)), 5),
    "eagle": lambda m: within(m, lambda twin: wild(Eagle(twin, fused=True)).drafter(2), 5),
    "kangaroo": lambda m: within(m, lambda twin: wild(Kangaroo(twin, 1)).drafter(3), 4),
    "medusa": lambda m: within(m, lambda twin: wild(Medusa(twin, 2)).drafter(2), 4),
    "small model": lambda m: within(m, lambda twin: ModelDraft(small(m), 2), 5)}

test_greedy_identity = promises.greedy_identity(DRAFTERS, on=["cpu"])
test_rows_equal_solo_runs = promises.rows_equal_solo_runs(DRAFTERS)
test_end_of_text = promises.end_of_text(DRAFTERS, places=range(6))
test_context_limit = promises.context_limit(DRAFTERS)
test_short_answers = promises.short_answers(DRAFTERS)
test_poison = promises.poison(DRAFTERS)
test_exact_law = promises.exact_law({
    "lookup": (TINY, lambda m: within(m, lambda twin: NGram(1, 1), 2)),
    "gemma2, exit": (TINY_GEMMA, lambda m: within(m, lambda twin: SelfDraft(twin, range(2), 1), 2)),
    "eagle": (TINY, lambda m: within(m, lambda twin: wild(Eagle(twin)).drafter(1), 2))}, count=2)


@each_family
def test_q_is_the_copys(family):
    """For each drafted token the q that is handed over is what the copy says after the target's keys and its
    own. (That the tokens have this law: test_exact_law.)"""
    m, compared = make(LIVELY[family]), 0
    drafter, alone = DRAFTERS["exit, stopped"](m), within(m, lambda twin: NGram(0, 1), 5)
    for seed in range(40):
        _, r = next(rounds(m, PROMPTS[:1], 9, drafter, warm, Coins(seed)))
        _, plain = next(rounds(m, PROMPTS[:1], 9, alone, warm, Coins(seed)))
        assert r.draft.tokens.shape[1] == plain.draft.tokens.shape[1] == 5
        same = (r.draft.tokens == plain.draft.tokens)[0].cumprod(0).tolist()
        for k, before in enumerate([True, *same[:4]]):
            if before:
                assert torch.allclose(r.draft.q[0, k], plain.draft.q[0, k], atol=1e-9)
                compared += k > 0
    assert compared > 9, "q after drafted tokens"


class Spy(Drafter):
    """Notes the first draft for each draft of the copy: of what the target has judged alone."""

    def __init__(self, inner):
        self.inner, self.taps, self.firsts = inner, inner.taps, []
        self.begin, self.observe, self.ahead = inner.begin, inner.observe, inner.ahead

    def propose(self, state):
        draft = self.inner.propose(state)
        self.firsts.append(([list(text) for text in state.known], draft.q[:, 0]))
        return draft


@each_family
@pytest.mark.parametrize("kind", ["eagle", "kangaroo", "medusa", "small model"])
def test_inside_a_drafter_forgets_what_the_target_did_not_judge(family, kind):
    """Each of its first drafts is that of a new drafter that reads the text so far with the target."""
    m, rejected = make(LIVELY[family]), 0

    def spied():
        drafter = DRAFTERS[kind](m)
        drafter.inner = Spy(drafter.inner)
        return drafter, drafter.inner

    drafter, spy = spied()
    for _, (_, r) in zip(range(6), rounds(m, PROMPTS, 40, drafter), strict=False):
        rejected += int((r.accepted < r.proposed).sum())
    assert rejected and len(spy.firsts) == 6
    for texts, q in spy.firsts:
        fresh, same = spied()
        next(rounds(m, texts, 7, fresh))
        assert torch.allclose(same.firsts[0][1], q, atol=1e-9)


def test_what_chooses_among_drafters_is_refused(models):
    m = models["llama"]
    twin = quantise(m)
    with pytest.raises(ValueError, match="a Then cannot forget"):
        Within(twin, Then(NGram(2, 1), Eagle(twin).drafter(2)), 4)
    with pytest.raises(ValueError, match="model that decodes"):
        generate(m, PROMPTS, 6, Within(twin, Eagle(m).drafter(2), 4))
    assert generate(m, PROMPTS, 6, Within(twin, NGram(2, 1), 0)) == generate(m, PROMPTS, 6)
