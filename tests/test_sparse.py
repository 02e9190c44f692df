"""A draft that reads few tokens: what it reads, that the text stays, and what it is worth on paper."""
import itertools
from dataclasses import replace

import promises
import pytest
from test_heads import Turns
from test_speculative import SOME
from tiny import (
    LIVELY,
    LLAMA,
    PROMPTS,
    TINY,
    TINY_GEMMA,
    Says,
    Unsure,
    devices,
    each_family,
    fork,
    make,
    warm,
)

from control import Costs, expected_tokens, weight_costs
from layerskip import SelfDraft, ShortHead, early_exit, without
from methods.sparse import SparseDraft, promise, step_cost, unread
from methods.trees import Siblings
from model import Config
from sampling import Coins
from speculative import NGram, Then, generate, rounds

LLAMA_8B = Config(128_256, 4096, 32, 32, 8, 128, 14_336)
DRAFTERS = {
    "sparse": lambda m: SparseDraft(m, 4, 1, 3),
    "itself only": lambda m: SparseDraft(m, 3, 0, 1),
    "stopped": lambda m: SparseDraft(m, Unsure(5), 2, 2),
    "exit": lambda m: SparseDraft(m, 3, 1, 4, early_exit(6, 4)),
    "skip": lambda m: SparseDraft(m, Says(lambda state: len(state.known[0]) % 4), 2, 3, without(6, [1, 4])),
    "short head": lambda m: SparseDraft(ShortHead(m, SOME), 3, 1, 3),
    "siblings": lambda m: Siblings(SparseDraft(m, 3, 1, 2), [3, 1]),
    "and n-gram": lambda m: Then(SparseDraft(m, 2, 1, 3), NGram(2, 1)),
    "in turns": lambda m: Turns(SparseDraft(m, 3, 1, 3), SelfDraft(m, range(8), 3), NGram(3, 1)),
    "long": lambda m: SparseDraft(m, 12, 2, 4),
}
test_greedy_identity = promises.greedy_identity(DRAFTERS)
test_rows_equal_solo_runs = promises.rows_equal_solo_runs(DRAFTERS)
test_it_drafts_for_stand_ins_too = promises.stand_ins(DRAFTERS, ["sparse"])
test_poison = promises.poison(DRAFTERS)
test_context_limit = promises.context_limit(DRAFTERS, ["long"])
test_end_of_text = promises.end_of_text(DRAFTERS, ["sparse"], range(0, 12, 3))
test_one_wait_a_round = promises.one_wait_a_round(DRAFTERS, ["sparse"])


LAWS = {
    "sparse": (TINY, lambda m: SparseDraft(m, 2, 1, 1)),
    "stopped": (TINY, lambda m: SparseDraft(m, Unsure(2), 0, 2)),
    "siblings": (TINY, lambda m: Siblings(SparseDraft(m, 1, 0, 1), [1])),
    "gemma2 exit": (TINY_GEMMA, lambda m: SparseDraft(m, 2, 1, 1, range(4))),
}


test_exact_law = promises.exact_law(LAWS, count=2)


@each_family
def test_the_verifying_pass_writes_all_keys_and_values_anew(models, family):
    """After each round the cache holds what the whole model makes of the text, and nothing rough."""
    m = models[family]
    for state, _ in rounds(m, PROMPTS, 8, SparseDraft(m, 3, 1, 2)):
        for b, text in enumerate(state.known):
            fresh, _ = next(rounds(m, [text], 2))
            n = len(text) - 1
            assert (state.cache.k[:, b, :, :n] - fresh.cache.k[:, 0, :, :n]).abs().max() < 1e-9
            assert (state.cache.v[:, b, :, :n] - fresh.cache.v[:, 0, :, :n]).abs().max() < 1e-9


# --- what it reads


@each_family
@devices
@pytest.mark.parametrize("sinks, window", [(2, 3), (0, 2), (3, 1), (1, 99)])
def test_a_draft_reads_its_sinks_and_its_window_and_nothing_else(family, device, sinks, window):
    """Spoil one slot after the other, each row's own: the draft changes if it is to read it, else not a bit.
    Gemma's odd blocks have no window of their own, so that a sink is read from anywhere."""
    m = make(LIVELY[family], device=device)
    state, _ = next(rounds(m, PROMPTS, 9))
    drafter, cache = SparseDraft(m, 1, sinks, window), state.cache
    drafter.begin(state, {})

    def drafted():
        return drafter.propose(replace(state, cache=fork(state.cache), coins=Coins(0), probs=warm)).q

    want = drafted()
    for j in range(max(map(len, state.known)) - 1):
        state.cache = fork(cache)
        state.cache.v[:, :, :, j] += 3.0
        changed = (drafted() != want).flatten(1).any(1).tolist()
        for text, was in zip(state.known, changed, strict=True):
            own = len(text) - 1
            assert was == (j < own and (j < sinks or own - j < window)), (j, len(text))


@each_family
def test_a_token_that_reads_only_itself_says_what_it_says_alone(models, family):
    m = models[family]
    for _, r in rounds(m, PROMPTS, 12, SparseDraft(m, 3, 0, 1), warm, Coins(1)):
        for k in range(1, r.draft.tokens.shape[1]):
            alone = m(r.draft.tokens[:, k - 1 : k]).softmax(-1)
            assert (r.draft.q[:, k] - alone[:, 0]).abs().max() < 1e-9


@each_family
@pytest.mark.parametrize("sinks, window", [(0, 64), (64, 1)])
def test_a_draft_that_reads_everything_is_always_accepted(models, family, sinks, window):
    m = models[family]
    assert generate(m, PROMPTS, 24, SparseDraft(m, 3, sinks, window))[1] == 6


def test_the_fewer_tokens_it_reads_the_less_is_accepted(models):
    """Else the tests above would prove little."""
    m, rates = models["llama"], []
    for window in (64, 4, 1):
        done = [r for _, r in rounds(m, PROMPTS, 20, SparseDraft(m, 2, 0, window))]
        rates.append(sum(int(r.accepted.sum()) for r in done) / sum(int(r.proposed.sum()) for r in done))
    assert rates[0] == 1 > rates[1] > rates[2]


@each_family
def test_exits_and_skips_are_heeded(models, family):
    """With a window that hides nothing such a draft is that of SelfDraft."""
    m = models[family]
    for subs in (early_exit(6, 4), without(6, [1, 4], [2])):
        _, a = next(rounds(m, PROMPTS, 20, SparseDraft(m, 3, 0, 64, subs), warm, Coins(2)))
        _, b = next(rounds(m, PROMPTS, 20, SelfDraft(m, subs, 3), warm, Coins(2)))
        assert a.draft.tokens.tolist() == b.draft.tokens.tolist()
        assert (a.draft.q - b.draft.q).abs().max() < 1e-9


@pytest.mark.parametrize("sinks, window", [(-1, 3), (2, 0)])
def test_what_makes_no_sense_is_refused(models, sinks, window):
    with pytest.raises(ValueError, match="sinks from 0 up and a window from 1 up, got"):
        SparseDraft(models["llama"], 3, sinks, window)


def test_another_model_is_refused(models):
    with pytest.raises(ValueError, match="give it the model that decodes"):
        generate(models["llama"], PROMPTS, 9, SparseDraft(make(LLAMA, 9), 3))


# --- what it is worth


@pytest.mark.parametrize("own_window", [None, 6])
@pytest.mark.parametrize("sublayers", [None, range(4), [1, 4, 5, 7]])
def test_what_is_not_read_is_counted(own_window, sublayers):
    """Token by token, attention by attention."""
    costs = Costs((5.0, 7.0) * 4, 3.0, slot=2.0, window=own_window)
    subs, seen = range(8) if sublayers is None else sublayers, set()
    for n, sinks, window in itertools.product((0, 1, 4, 9, 20), (0, 1, 3), (1, 2, 5, 8, 30)):
        hidden = 0
        for i, j in itertools.product(subs, range(n)):
            reach = own_window if own_window and i in (0, 4) else 99
            hidden += i % 2 == 0 and n - j < reach and not (j < sinks or n - j < window)
        assert unread(costs, n, sinks, window, sublayers) == 2.0 * hidden
        seen.add(hidden)
    assert len(seen) > 5


def test_the_cost_of_a_step_by_hand():
    """By reading 3 + 5 numbers of weights for 1 + 2 sub-layers, the head, and 2 numbers for each token."""
    costs = Costs((3.0, 5.0, 3.0, 5.0), 4.0, slot=2.0)
    assert step_cost(costs, 100, 4, 17) == (20 + 2 * 2 * 20) / (20 + 2 * 2 * 100)
    assert step_cost(costs, 100, 4, 17, [0, 1], 0.5) == (8 + 2 + 2 * 20) / (20 + 2 * 2 * 100)
    assert step_cost(costs, 10, 4, 17) == 1


def test_the_promise_is_the_best_of_the_formula():
    costs = weight_costs(LLAMA_8B)
    assert promise(costs, 1000, 0.9, 4, 512) == (0, 1.0), "there is little to leave out"
    cost = step_cost(costs, 131_072, 4, 512)
    assert 0.4 < cost < 0.5, "the cache is larger than the weights"
    gamma, speed = promise(costs, 131_072, 0.9, 4, 512)
    assert speed == expected_tokens(0.9, gamma) / (gamma * cost + 1) > 1.3
    others = [expected_tokens(0.9, g) / (g * cost + 1) for g in range(12)]
    assert max(others) == speed and others.index(speed) == gamma
    grows = [promise(costs, n, 0.9, 4, 512)[1] for n in (8_000, 32_000, 131_072)]
    assert grows == sorted(grows) and grows[0] < grows[2]
