"""The loop is lossless: greedy text is the plain one token for token, and the law of sampled text is the
target's, for every drafter, both families and ragged batches."""
import math
from dataclasses import replace

import promises
import pytest
import torch
from promises import compared, reader
from test_by_hand import drafted_states
from tiny import DEVICES, LIVELY, PROMPTS, TINY, TINY_GEMMA, Says, Unsure, each_family, make, read, small

from kvcache import KVCache
from layerskip import SelfDraft, ShortHead, without
from sampling import Coins, to_probs
from speculative import Draft, Drafter, ModelDraft, NGram, Wrapper, generate, prefill, rounds
from verification import verify

FULL = range(12)


@pytest.fixture(scope="module", params=DEVICES)
def models(request):
    return {family: make(c, device=request.param) for family, c in LIVELY.items()}


def known(state):
    """How many tokens are known: a number that differs from round to round."""
    return sum(map(len, state.known))


def gate():
    """Draft only in rounds that start with an odd number of tokens in the first row."""
    return Says(lambda state: 4 * (len(state.known[0]) % 2))


def on_and_off():
    return Says(lambda state: (4, 0, 0, 0, 2)[known(state) % 5])


class Shifting(SelfDraft):
    """Another skip set in every round, and another gamma."""

    def __init__(self, m):
        super().__init__(m, FULL, Says(lambda state: known(state) % 6))

    def propose(self, state):
        count = known(state)
        self.sublayers = [i for i in FULL if count >> i % 5 & 1 or i == count % 12]
        return super().propose(state)


SOME = [4, 9, 0, 2, 16, 3]  # a draft vocabulary
DRAFTERS = {
    "none": lambda m: None,
    "ngram": lambda m: NGram(4, 2),
    "exit": lambda m: SelfDraft(m, range(8), 4),
    "skip": lambda m: SelfDraft(m, without(6, attn=[1, 4], mlp=[2]), 3),
    "skip first": lambda m: SelfDraft(m, range(1, 12), 3),
    "skip all attention": lambda m: SelfDraft(m, range(1, 12, 2), 3),
    "model": lambda m: ModelDraft(small(m), 4),
    "exit, stopped": lambda m: SelfDraft(m, range(8), Unsure(5)),
    "model, stopped": lambda m: ModelDraft(small(m), Unsure(5)),
    "exit, gated": lambda m: SelfDraft(m, range(8), gate()),
    "model, gated": lambda m: ModelDraft(small(m), gate()),
    "ngram, gated": lambda m: NGram(gate(), 1),
    "another model's exit": lambda m: SelfDraft(make(m.c, 9, m.tok.device), range(8), 3),
    "another model's skip": lambda m: SelfDraft(make(m.c, 9, m.tok.device), without(6, attn=[1], mlp=[2]), 3),
    "exit, short head": lambda m: SelfDraft(ShortHead(m, SOME), range(8), 4),
    "model, short head": lambda m: ModelDraft(ShortHead(small(m), SOME), 4),
    "long": lambda m: SelfDraft(m, range(10), 12),  # longer than the spare slots after the limit
}
RESTLESS = {"shifting": Shifting, "model": lambda m: ModelDraft(m, Says(lambda state: known(state) % 6))}
test_greedy_identity = promises.greedy_identity(DRAFTERS)
test_rows_equal_solo_runs = promises.rows_equal_solo_runs(DRAFTERS)
test_poison = promises.poison(RESTLESS)
test_end_of_text_at_every_position = promises.end_of_text(
    DRAFTERS, ["none", "exit", "skip", "model", "ngram", "long"])
test_context_limit = promises.context_limit(DRAFTERS, ["none", "exit", "skip", "model", "ngram", "long"])
test_damaged_weights = promises.damaged_weights(DRAFTERS)
test_short_answers = promises.short_answers(DRAFTERS, ["none", "exit", "model", "ngram"])


@each_family
def test_the_trace_of_a_long_prompt_is_whole(models, family):
    m, tokens = models[family], torch.tensor([PROMPTS[0], PROMPTS[3]], device=models[family].tok.device)
    whole, parts = {2: None, 11: None}, {2: None, 11: None}
    for trace, block in ((whole, 8), (parts, 3)):
        x = prefill(m, tokens, KVCache(m.c, 2, 16, torch.float64, tokens.device), trace=trace, block=block)
        assert torch.equal(trace[11], x)
    assert all((whole[tap] - parts[tap]).abs().max() < 1e-12 for tap in whole)


# --- a perfect draft: the only test that sees a drafter's own mistakes, which otherwise just cost acceptance


PERFECT = {
    "self": lambda m: SelfDraft(m, FULL, 4),
    "model": lambda m: ModelDraft(m, 4),
    "model, one": lambda m: ModelDraft(m, 1),
    "self, stopped": lambda m: SelfDraft(m, FULL, Says(4, lambda k, logits, token: token == 3)),
    "model, gated": lambda m: ModelDraft(m, gate()),
    "self, uneven": lambda m: SelfDraft(m, FULL, Says(lambda state: [0, 3, 1, 2])),
}


@each_family
@pytest.mark.parametrize("temperature", [0, 1.3])
@pytest.mark.parametrize("name", PERFECT)
def test_perfect_draft_is_accepted_whole(models, family, temperature, name):
    m, drafted = models[family], 0
    for _, r in rounds(m, PROMPTS, 40, PERFECT[name](m), lambda x: to_probs(x, temperature)):
        assert r.accepted.tolist() == r.proposed.tolist()
        drafted += int(r.proposed.sum())
    assert drafted > 60


@each_family
@pytest.mark.parametrize("gamma", [0, 1, 2, 4, 12])
def test_empty_skip_set_needs_the_fewest_passes(models, family, gamma):
    m = models[family]
    for drafter in (SelfDraft(m, without(6), gamma), ModelDraft(m, gamma)):
        for n in (1, gamma, gamma + 1, gamma + 2, 23):
            outputs, passes = generate(m, PROMPTS, n, drafter)
            assert passes == math.ceil(n / (gamma + 1)) and all(len(o) == n for o in outputs)


@pytest.mark.parametrize("sublayers, shared", [
    (range(8), 8), ([0, 1, 3, 4], 2), (range(1, 12), 0), (FULL, 12)])
def test_what_is_shared_is_handed_over_and_not_run_again(models, sublayers, shared):
    """The trace is whole whatever was reused: it is that of the same text run by hand."""
    m, ran, run = models["llama"], [], models["llama"].run

    def check(trace, texts, starts):
        for b, (text, start) in enumerate(zip(texts, starts, strict=True)):
            for tap, x in read(m, text, Tapped.taps)[1].items():
                got = trace[tap][b, : len(text) - start]
                assert (got - x[0, start:]).abs().max() < 1e-9, f"sub-layer {tap}"

    class Tapped(SelfDraft):
        taps = (0, 3, 7, 11)

        def begin(self, state, trace):
            super().begin(state, trace)
            check(trace, PROMPTS, [0] * 4)

    def watched(x, positions, cache, sublayers, **kwargs):
        ran.append(list(FULL if sublayers is None else sublayers))
        return run(x, positions, cache, sublayers, **kwargs)

    for state, r in rounds(m, PROMPTS, 20, Tapped(m, sublayers, 3)):
        if r.draft.tokens.shape[1] < 3:
            break
        assert r.draft.reuse[0] == shared and r.draft.reuse[1].shape == (4, 4, 32)
        assert list(r.trace) == [0, 3, 7, 11]
        known = [text[: len(text) - len(new)] for text, new in zip(state.known, r.new, strict=True)]
        block = [text + draft for text, draft in zip(known, r.draft.tokens.tolist(), strict=True)]
        check(r.trace, block, [len(text) - 1 for text in known])
    m.run = watched
    try:
        next(rounds(m, PROMPTS, 20, SelfDraft(m, sublayers, 3)))
    finally:
        del m.run
    assert ran[-1] == list(range(shared, 12)), "verification runs the other sub-layers, and only those"


def by_sublayers(m, sublayers, far):
    """Compared with the same sub-layers run by hand on a cache that the whole model has filled."""
    def by_hand(text, tokens):
        return m.unembed(drafted_states(m, text, tokens, sublayers)[None])[0].softmax(-1)
    return compared(SelfDraft(m, sublayers, 3), by_hand, far)


# a draft model, also after refusals and a gate; and sub-layers
test_drafts_are_right = promises.right_drafts({
    "the target": lambda m, far: reader(m, 3, far),
    "model": lambda m, far: reader(small(m), on_and_off(), far),
    "exit": lambda m, far: by_sublayers(m, range(8), far),
    "skip": lambda m, far: by_sublayers(m, [0, 1, 3, 4, 7, 10], far),
    "skip first": lambda m, far: by_sublayers(m, range(1, 12), far),
})


# --- where answers end


@each_family
@pytest.mark.parametrize("place", range(6))
def test_what_an_end_of_text_cuts_off_was_never_tested(models, truth, family, place):
    """A perfect draft of five whose third token ends the text: three of three accepted, not three of five."""
    m = models[family]
    for prompt, answer in zip(PROMPTS, truth[family], strict=True):
        first = answer.index(answer[place]) + 1
        _, r = next(rounds(m, [prompt], 20, SelfDraft(m, FULL, 5), eos=[answer[place]]))
        drafted = [min(first, 5)]
        assert (r.proposed.tolist(), r.accepted.tolist(), len(r.new[0])) == (drafted, drafted, first)


@each_family
def test_sure_is_the_raw_softmax_of_each_new_token(models, family):
    m = models[family]
    for state, r in rounds(m, PROMPTS, 12, SelfDraft(m, range(8), 3), lambda x: to_probs(x, 0.7, top_p=0.8)):
        for text, new, sure in zip(state.known, r.new, r.sure, strict=True):
            assert len(sure) == len(new)
            p = m(torch.tensor([text], device=m.tok.device))[0].softmax(-1)
            for i, (token, chance) in enumerate(zip(new, sure, strict=True), len(text) - len(new)):
                assert chance == pytest.approx(float(p[i - 1, token]), abs=1e-9)


def test_a_stand_in_with_the_same_blocks_shares_and_a_copy_does_not(models):
    """Sharing would be wrong for a model of other weights, and is right for whatever wraps the target."""
    class StandIn:
        def __init__(self, model):
            self.model = model

        def __getattr__(self, name):
            return getattr(self.model, name)

    m = models["llama"]
    copied = make(m.c, device=m.tok.device)
    for target, drafted, shares in ((StandIn(m), m, True), (m, StandIn(m), True), (m, copied, False)):
        _, r = next(rounds(target, PROMPTS, 9, SelfDraft(drafted, range(8), 2)))
        assert (r.draft.reuse is not None) == shares


def test_a_wrapper_hands_everything_on(models):
    m = models["llama"]
    inner = SelfDraft(m, range(8), 3)
    inner.taps = (5, 1)
    outer = Wrapper(inner, Drafter())
    assert outer.taps == (1, 5) and outer.drafters[0] is inner
    alone = [(r.new, list(r.trace), r.proposed.tolist()) for _, r in rounds(m, PROMPTS, 20, inner)]
    assert [(r.new, sorted(r.trace), r.proposed.tolist()) for _, r in rounds(m, PROMPTS, 20, outer)] == [
        (new, sorted(taps), proposed) for new, taps, proposed in alone]


def test_accepted_counts_only_what_was_kept(models, truth):
    m, early = models["llama"], 0
    eos = {truth["llama"][0][0]}
    for _, r in rounds(m, PROMPTS, 9, SelfDraft(m, FULL, 4), eos=eos):
        for new, accepted, proposed in zip(r.new, r.accepted.tolist(), r.proposed.tolist(), strict=True):
            assert accepted <= min(len(new), proposed) and int(r.draft.length.min()) >= 0
            if not new:
                assert proposed == 0, "a finished row proposes nothing"
                early += 1
    assert early, "one row must end before the others"


def test_nothing_to_do(models):
    assert generate(models["llama"], [], 5) == ([], 0)
    assert generate(models["llama"], [[1]], 0) == ([[]], 0)


@each_family
@pytest.mark.parametrize("rows", [4, 1])
def test_drafts_never_overrun_even_if_they_ignore_what_is_left(models, truth, family, rows):
    class Certain(Drafter):
        def propose(self, state):
            return Draft(torch.full((rows, 30), 3, device=state.n.device))

    class Overrunning(SelfDraft):
        def propose(self, state):
            left, state.left_cpu = state.left_cpu, [99] * rows
            draft = super().propose(state)
            state.left_cpu = left
            return draft

    m = models[family]
    for drafter in (Certain(), Overrunning(m, range(8), 6)):
        for n in (1, 3, 7):
            assert generate(m, PROMPTS[:rows], n, drafter)[0] == [row[:n] for row in truth[family][:rows]]


# --- the exact law: every outcome of the production loop, enumerated

LAWS = {
    "none": (TINY, lambda m: None),
    "ngram": (TINY, lambda m: NGram(2, 1)),
    "exit": (TINY, lambda m: SelfDraft(m, range(4), 2)),
    "skip": (TINY, lambda m: SelfDraft(m, [0, 1, 3, 5], 2)),
    "model": (TINY, lambda m: ModelDraft(make(replace(TINY, n_layers=1), 7), 2)),
    "gemma2 exit": (TINY_GEMMA, lambda m: SelfDraft(m, range(4), 2)),
    "gemma2 skip": (TINY_GEMMA, lambda m: SelfDraft(m, [0, 2, 3, 5], 2)),
    "exit, top-k": (TINY, lambda m: SelfDraft(m, range(4), 2), dict(temperature=1.5, top_k=2)),
    "exit, min-p": (TINY, lambda m: SelfDraft(m, range(4), 2), dict(temperature=2.0, min_p=0.2)),
    "exit, stopped": (TINY, lambda m: SelfDraft(m, range(4), Unsure(2))),
    "model, gated": (TINY, lambda m: ModelDraft(make(replace(TINY, n_layers=1), 7),
                                                Says(lambda state: 2 * (len(state.known[0]) > 3)))),
    "another model's exit": (TINY, lambda m: SelfDraft(make(TINY, 9), range(4), 2)),
    "short head": (TINY, lambda m: SelfDraft(ShortHead(m, [2, 0]), range(4), 2)),
    "gemma2 short head": (TINY_GEMMA, lambda m: SelfDraft(ShortHead(m, [1, 2]), [0, 2, 3, 5], 2)),
}


test_exact_law = promises.exact_law(LAWS)
test_exact_law_of_a_ragged_batch = promises.exact_law_of_a_ragged_batch(LAWS, ["exit, stopped"])


# --- drafters


def test_ngram_copies_the_latest_continuation():
    texts = [[1, 2, 3, 9, 1, 2, 4, 5, 1, 2], [7, 7, 7], [6], [1, 2, 3, 4]]
    _, r = next(rounds(make(LIVELY["llama"]), texts, 9, NGram(3, 2)))
    drafts = [row[:n] for row, n in zip(r.draft.tokens.tolist(), r.proposed.tolist(), strict=True)]
    assert drafts == [[4, 5, 1], [7], [], []]


def test_a_copy_may_go_on_with_itself():
    """As in LZ77: a text that repeats one token, or three, is copied as far as is wanted."""
    texts = [[7, 7, 7], [5, 1, 2, 3, 1, 2], [1, 2, 3, 9, 8, 1, 2], [6]]
    _, r = next(rounds(make(LIVELY["llama"]), texts, 9, NGram(5, 2, again=True)))
    drafts = [row[:n] for row, n in zip(r.draft.tokens.tolist(), r.proposed.tolist(), strict=True)]
    assert drafts == [[7] * 5, [3, 1, 2, 3, 1], [3, 9, 8, 1, 2], []]


def test_a_model_that_has_generated_can_still_be_trained():
    m = make(LIVELY["llama"])
    generate(m, [[1, 2]], 3)
    m.requires_grad_(True)
    m(torch.tensor([[1, 2, 3]])).sum().backward()
    assert m.blocks[0].attn.wqkv.grad.abs().sum() > 0


# --- bad input


@pytest.mark.parametrize("prompts, max_new, message", [
    ([[1], []], 5, "prompt 1 is empty"),
    ([[1] * 64], 5, "prompt 0 has 64 tokens and fills the context of 64"),
    ([[1, 17]], 5, "prompt 0 holds token id 17, but ids run from 0 to 16"),
    ([[-1]], 5, "prompt 0 holds token id -1"),
    ([[1]], -1, "max_new must be at least 0, got -1")])
def test_bad_prompts(models, prompts, max_new, message):
    with pytest.raises(ValueError, match=message):
        rounds(models["llama"], prompts, max_new)


@pytest.mark.parametrize("build, message", [
    (lambda m: SelfDraft(m, [], 3), "leaves no sub-layer"),
    (lambda m: SelfDraft(m, [0, 12], 3), "sub-layers must rise within 0 .. 11"),
    (lambda m: SelfDraft(m, [1, 0], 3), "sub-layers must rise"),
    (lambda m: SelfDraft(m, range(4), -1), "gamma, how many tokens to draft"),
    (lambda m: ModelDraft(m, 1.5), "gamma, how many tokens to draft"),
    (lambda m: NGram(-2, 1), "gamma, how many tokens to draft"),
    (lambda m: NGram(2, 0), "n, the number of tokens to look up"),
    (lambda m: NGram(Unsure(4), 2), "an n-gram is copied at once, with no logits for Unsure to stop at")])
def test_bad_drafters(models, build, message):
    with pytest.raises(ValueError, match=message):
        build(models["llama"])


def test_vocabularies_must_match(models):
    m = models["llama"]
    other = make(replace(m.c, vocab_size=18), device=m.tok.device)
    with pytest.raises(ValueError, match="vocabulary is 18, the target's 17"):
        generate(m, PROMPTS, 5, ModelDraft(other, 2))
    p, q = torch.full((1, 2, 2), 0.5), torch.full((1, 1, 3), 1 / 3)
    with pytest.raises(ValueError, match="vocabulary of 3, the target of 2"):
        verify(p, q, torch.tensor([[1]]), Coins(0))


def test_draft_model_with_a_short_context(models):
    m = models["llama"]
    short = make(replace(m.c, max_len=16), device=m.tok.device)
    with pytest.raises(ValueError, match="context is 16, but prompt and answer need 28"):
        generate(m, PROMPTS, 20, ModelDraft(short, 2))
    assert generate(m, PROMPTS, 8, ModelDraft(short, 2))[0] == generate(m, PROMPTS, 8)[0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers(value):
    m = make(LIVELY["llama"])
    honest = m.unembed
    m.unembed = lambda x: honest(x).index_fill(2, torch.tensor([3]), value)
    with pytest.raises(ValueError, match="logits for row 0 are NaN or infinite"):
        generate(m, [[1, 2]], 5)
