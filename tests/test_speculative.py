"""The loop is lossless: greedy text is the plain one token for token, and the law of sampled text
is the target's, for every drafter, both families and ragged batches."""
import math
import random
from copy import copy
from dataclasses import replace
from unittest.mock import Mock

import promises
import pytest
import torch
from expected import byte_tokenizer
from promises import Turns, compared, reader
from tiny import (
    LIVELY,
    PROMPTS,
    TINY,
    TINY_GEMMA,
    TINY_GEMMA3,
    Says,
    Unsure,
    each_family,
    make,
    read,
    small,
)

from control import Confidence
from drafter import ModelDraft
from kvcache import KVCache, new_cache
from lab.then import Then
from layerskip import SelfDraft, without
from machine.quant import quantise
from methods.lookup import NGram
from methods.standin import Padded, ShortHead
from model import Placement, StandIn
from sampling import to_probs
from speculative import generate, rounds

FULL = range(12)


def dice(most=6, ends=True):
    """Another length for each row and round, or nothing in all rows; where it `ends`, also drafts
    that end anywhere."""
    draw = random.Random(1)
    stop = lambda k, logits, token: [draw.random() < 0.2 for _ in token]        # noqa: E731

    def gammas(state):
        longest = draw.choice((0, most, most))
        return [draw.randint(0, longest) for _ in state.known]
    return Says(gammas, stop if ends else None)


def padded(m, V):
    """A draft model with V ids, which stands in for one with the ids of m."""
    return Padded(make(replace(m.c, n_layers=1, vocab_size=V), 7, m.tok.device), m.c.vocab_size)


DRAFTERS = {
    "none": lambda m: None,
    "ngram": lambda m: NGram(4, 2),
    "exit": lambda m: SelfDraft(m, range(8), 4),
    "skip": lambda m: SelfDraft(m, without(6, attn=[1, 4], mlp=[2]), 3),
    "model": lambda m: ModelDraft(small(m), 4),
    "exit, diced": lambda m: SelfDraft(m, range(8), dice()),
    "model, diced": lambda m: ModelDraft(small(m), dice()),
    "ngram, diced": lambda m: NGram(dice(ends=False), 1),
    "model, model": lambda m: Then(ModelDraft(small(m), dice(3)), ModelDraft(m, dice(4))),
    "exit, model, ngram": lambda m: Then(
        SelfDraft(m, range(8), 2), Then(ModelDraft(small(m), dice(3, False)), NGram(3, 1))),
    "another model's skip": lambda m: ModelDraft(make(m.c, 9, m.tok.device), 3, [0, 1, 3, 4, 8]),
    "exit, short head": lambda m: SelfDraft(ShortHead(m, [4, 9, 0, 2, 16, 3]), range(8), 4),
    "copy in int4": lambda m: SelfDraft(quantise(m, "int4", head="int4"), FULL, dice()),
    "copy, short head": lambda m: SelfDraft(
        ShortHead(quantise(m, head="int8"), [4, 9, 0, 2, 16, 3]), without(6, attn=[2]), Unsure(4)),
    "model in int4": lambda m: ModelDraft(quantise(small(m), "int4", head="int4"), Unsure(4)),
    "model of fewer ids": lambda m: ModelDraft(padded(m, 12), 4),
    "model of more ids": lambda m: ModelDraft(padded(m, 20), 4),
    "long": lambda m: SelfDraft(m, range(10), 12),  # longer than the spare slots after the limit
}
PAIRS = ["model, model", "exit, model, ngram"]
SOME = ["none", "ngram", "skip", "model", "long", *PAIRS]
test_greedy_identity = promises.greedy_identity(DRAFTERS, on=["cpu"])     # a GPU: test_paper_gpu.py
test_poison = promises.poison(
    DRAFTERS, ["exit, diced", "model, diced", "copy in int4", "copy, short head", *PAIRS])
test_end_of_text_at_every_position = promises.end_of_text(
    DRAFTERS, ["ngram", "exit", "skip", *PAIRS], range(7))
test_context_limit = promises.context_limit(DRAFTERS, SOME)
test_proposing_again = promises.proposing_again(DRAFTERS, ["exit", "skip", "model"])
test_damaged_weights = promises.damaged_weights(DRAFTERS, SOME)


# --- drafts: a perfect one is accepted whole, and what it shares with the target is not run again


@each_family
@pytest.mark.parametrize("gamma", [0, 1, 4])
def test_empty_skip_set_needs_the_fewest_passes(models, family, gamma):
    m = models[family]
    for drafter in (SelfDraft(m, without(6), gamma), ModelDraft(m, gamma)):
        for n in (1, gamma + 1, gamma + 2, 23):
            outputs, passes = generate(m, PROMPTS, n, drafter)
            assert passes == math.ceil(n / (gamma + 1)) and all(len(o) == n for o in outputs)


@pytest.mark.parametrize("sublayers, shared", [
    (range(8), 8), ([0, 1, 3, 4], 2), (range(1, 12), 0), (FULL, 12)])
def test_what_is_shared_is_handed_over_and_not_run_again(models, monkeypatch, sublayers, shared):
    m = models["llama"]
    monkeypatch.setattr(m, "run", Mock(wraps=m.run))
    drafter = SelfDraft(m, sublayers, 3)
    drafter.taps = range(12)
    _, r = next(rounds(m, PROMPTS, 20, drafter))
    assert r.draft.reuse.first == shared
    assert [*r.draft.reuse.trace] == [*range(shared)]
    assert list(m.run.call_args.args[3]) == list(range(shared, 12)), "the others, and only those"
    for b, prompt in enumerate(PROMPTS):
        _, trace = read(m, prompt + r.draft.tokens[b].tolist(), drafter.taps)
        for tap, state in trace.items():
            assert (r.trace[tap][b] - state[0, len(prompt) - 1 :]).abs().max() < 1e-9


def skipping(m, draft, sublayers, rule, far):
    """A SelfDraft by `draft`, which is m or a copy, compared with what its sub-layers say behind
    the target's own keys."""
    def by_hand(text, tokens):
        ids, n = torch.tensor([text + tokens]), len(text)
        cache = KVCache(m.c, 1, ids.shape[1], torch.float64)
        m.run(m.embed(ids[:, :n]), Placement.span(0, n), cache)     # the last one is read again
        xs = [draft.run(draft.embed(ids[:, i : i + 1]), Placement.span(i, i + 1), cache, sublayers)
              for i in range(n - 1, ids.shape[1] - 1)]
        return draft.unembed(torch.cat(xs, 1))[0].softmax(-1)
    return compared(SelfDraft(draft, sublayers, rule), by_hand, far)


test_drafts_are_right = promises.right_drafts({
    "exit": lambda m, far: skipping(m, m, range(8), dice(ends=False), far),
    "skip": lambda m, far: skipping(m, m, without(6, attn=[1, 4], mlp=[2]), 3, far),
    "copy in int4": lambda m, far: skipping(
        m, quantise(m, "int4", head="int4"), range(12), dice(ends=False), far),
    "model": lambda m, far: reader(small(m), dice(ends=False), far),
    # whatever is accepted in between, it has not read it
    "model in turns": lambda m, far: Turns(
        reader(small(m), dice(ends=False), far), NGram(4, 1), SelfDraft(m, range(12), 2)),
    # a draft model behind which others went on has also read their tokens
    "model, model": lambda m, far: Then(
        reader(small(m), dice(ends=False), far), ModelDraft(m, dice(ends=False)))})


@pytest.mark.parametrize("V", [12, 20])
def test_ids_that_only_one_model_has_are_never_drafted(models, V):
    m = models["llama"]
    stand_in, both = padded(m, V), min(V, 17)
    q = stand_in.unembed(read(stand_in, [1, 5, 16])[0]).softmax(-1)
    want = stand_in.bare(torch.tensor([[1, 5, both - 1]]))[..., :both].softmax(-1)
    assert q.shape == (1, 3, 17) and q[..., both:].sum() == 0
    assert (q[..., :both] - want).abs().max() < 1e-12


def test_a_stand_in_with_the_same_blocks_shares_and_a_copy_does_not(models, truth):
    """Sharing is right for whatever wraps the target, and wrong for a model of other weights, which
    only drafts on the target's cache. One of another shape cannot."""
    m, wrapped = models["llama"], StandIn(models["llama"])
    wrapped.model = m
    for target, drafted in ((wrapped, m), (m, copy(wrapped))):
        _, r = next(rounds(target, PROMPTS, 9, SelfDraft(drafted, range(8), 2)))
        assert r.draft.reuse is not None
    stranger = make(m.c, 3)
    steps = [*rounds(m, PROMPTS, 9, SelfDraft(stranger, range(8), 2))]
    assert all(r.draft.reuse is None for _, r in steps)
    assert [text[-9:] for text in steps[-1][0].known] == [row[:9] for row in truth["llama"]]
    with pytest.raises(ValueError, match="or with a quantised copy of it"):
        next(rounds(m, PROMPTS, 9, SelfDraft(small(m), range(4), 2)))


# --- what a round tells


@each_family
@pytest.mark.parametrize("place", range(0, 6, 2))
def test_what_an_end_of_text_cuts_off_was_never_tested(models, truth, family, place):
    """A perfect draft of five whose third token ends the text:
    three of three are accepted, not of five."""
    m = models[family]
    for prompt, answer in zip(PROMPTS, truth[family], strict=True):
        first = answer.index(answer[place]) + 1
        _, r = next(rounds(m, [prompt], 20, SelfDraft(m, FULL, 5), eos=[answer[place]]))
        drafted = [min(first, 5)]
        assert r.proposed.tolist() == r.accepted.tolist() == drafted and len(r.new[0]) == first


@each_family
def test_sure_is_the_raw_softmax_of_each_new_token(models, family):
    m, probs = models[family], lambda x: to_probs(x, 0.7, top_p=0.8)
    for state, r in rounds(m, PROMPTS, 12, SelfDraft(m, range(8), 3), probs):
        for text, new, sure in zip(state.known, r.new, r.sure, strict=True):
            assert len(sure) == len(new)
            p = m(torch.tensor([text]))[0].softmax(-1)
            for i, (token, chance) in enumerate(zip(new, sure, strict=True), len(text) - len(new)):
                assert chance == pytest.approx(float(p[i - 1, token]), abs=1e-9)


@pytest.mark.parametrize("rows", [4, 1])
def test_drafts_never_overrun_even_if_they_ignore_what_is_left(models, truth, rows):
    class Overrunning(SelfDraft):
        def propose(self, state):
            left, state.left = state.left, [99] * rows
            draft = super().propose(state)
            state.left = left
            return draft

    m, want = models["llama"], truth["llama"][:rows]
    for n in (0, 1, 3, 7):
        got = promises.write(m, Overrunning(m, range(8), 6), n, PROMPTS[:rows])
        assert got == [row[:n] for row in want]


# --- the exact law: every outcome of the production loop, enumerated

LAWS = {
    "ngram": (TINY, lambda m: NGram(2, 1)),
    "exit": (TINY, lambda m: SelfDraft(m, range(4), 2)),
    "gemma2 skip": (TINY_GEMMA, lambda m: SelfDraft(m, [0, 2, 3, 5], 2)),
    "exit, stopped": (TINY, lambda m: SelfDraft(m, range(4), Unsure(2))),
    "sure exit, ngram":
        (TINY, lambda m: Then(SelfDraft(m, range(4), Confidence(0.6, 2)), NGram(2, 1))),
    "exit, model": (TINY, lambda m: Then(SelfDraft(m, range(4), 1), ModelDraft(small(m), 1))),
    "model, gated": (TINY, lambda m: ModelDraft(make(replace(TINY, n_layers=1), 7),
                                                Says(lambda state: 2 * (len(state.known[0]) > 3)))),
    "gemma3 skip": (TINY_GEMMA3, lambda m: SelfDraft(m, [0, 1, 4, 5], 2)),
    "gemma2 short head": (TINY_GEMMA, lambda m: SelfDraft(ShortHead(m, [1, 2]), [0, 2, 3, 5], 2)),
    "copy in int4": (TINY, lambda m: SelfDraft(quantise(m, "int4", head="int4"), range(4),
                                               Unsure(2))),
    "gemma2 copy": (TINY_GEMMA, lambda m: SelfDraft(quantise(m), [0, 1, 3], 2)),
    "model in int4": (TINY, lambda m: ModelDraft(quantise(small(m), "int4", head="int4"), 2)),
    "model of fewer ids": (TINY, lambda m: ModelDraft(padded(m, 2), 2)),
    "gemma2 model of more ids": (TINY_GEMMA, lambda m: ModelDraft(padded(m, 5), 2))}
test_exact_law = promises.exact_law(LAWS, count=3)
test_exact_law_of_a_ragged_batch = promises.exact_law_of_a_ragged_batch(
    LAWS, ["exit, stopped", "sure exit, ngram"])


@each_family
def test_a_cache_of_an_earlier_run_needs_no_cleaning(models, truth, family):
    m = models[family]
    cache = new_cache(m, 4, 45)
    for drafter in SelfDraft(m, range(8), 4), NGram(4, 2), None:
        cache.k.mul_(-3).add_(1)
        cache.v.mul_(-3).add_(1)
        outputs, _ = generate(m, PROMPTS, 24, drafter, cache=cache)
        assert outputs == [row[:24] for row in truth[family]]


# --- n-grams (by hand and by a search: test_suffix.py)


def test_an_ngram_knows_nothing_of_the_text_before(models):
    used = NGram(3, 1)
    runs = [[r.draft.tokens.tolist() for _, r in rounds(models["llama"], prompts, 20, drafter)]
            for prompts, drafter in ((PROMPTS, used), (PROMPTS[::-1], used),
                                     (PROMPTS[::-1], NGram(3, 1)))]
    assert runs[1] == runs[2]


# --- bad input, and nothing to do


ENCODING = byte_tokenizer().encode("a")


def other(**changes):
    return make(replace(LIVELY["llama"], **changes))


@pytest.mark.parametrize("call, message", [
    (lambda m: rounds(m, [[1], []], 5), "prompt 1 is empty"),
    (lambda m: rounds(m, [[1] * 64], 5), "prompt 0 has 64 tokens and fills the context of 64"),
    (lambda m: rounds(m, [[1, 17]], 5), "prompt 0 holds token id 17, but ids run from 0 to 16"),
    *((lambda m, prompts=prompts: rounds(m, prompts, 5), "must be lists of token ids")
      for prompts in ("12", ["12"], [1, 2], [["1"]], [[0.5]], ENCODING, [ENCODING])),
    (lambda m: rounds(m, [[1]], -1), "max_new must be at least 0, got -1"),
    (lambda m: SelfDraft(m, [0, 12], 3), "sub-layers must rise within 0 .. 11"),
    (lambda m: ModelDraft(m, 1.5), "gamma, how many tokens to draft"),
    (lambda m: NGram(2, 0), "n, the number of tokens to look up"),
    (lambda m: NGram(Unsure(4), 2), "an n-gram is copied at once"),
    (lambda m: generate(m, [[1]], 5, ModelDraft(other(vocab_size=18), 2)), "18, the target's 17"),
    (lambda m: generate(m, [[1]], 20, ModelDraft(other(max_len=16), 2)), "16, .* answer need 21")])
def test_bad_input_is_named(models, call, message):
    with pytest.raises(ValueError, match=message):
        call(models["llama"])


def test_what_just_fits(models):
    m = models["llama"]
    assert generate(m, [], 5) == ([], 0)
    assert generate(m, [[1]], 15, ModelDraft(other(max_len=16), 2))[0] == generate(m, [[1]], 15)[0]


def test_a_model_that_has_generated_can_still_be_trained():
    m = make(LIVELY["llama"])
    generate(m, [[1, 2]], 3)
    m.requires_grad_(True)
    m(torch.tensor([[1, 2, 3]])).sum().backward()
    assert m.blocks[0].attn.wqkv.grad.abs().sum() > 0
