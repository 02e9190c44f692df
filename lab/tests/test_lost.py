"""What the lab keeps although it loses by the project's own tables (SWIFT, published rules, M2R2,
Hidden Transfer, prophets). Each does what its paper says, and none changes the text or its law."""
import doctest
from dataclasses import replace

import promises
import pytest
import torch
from test_control import outcome
from test_heads import GROVE, both_ways, wild
from tiny import LLAMA, PROMPTS, TINY, TINY_GEMMA, Unsure, each_family, make, read, state_of

from drafter import NGram
from kvcache import KVCache
from lab import gguf, hamburger, sparse, transfer
from lab.m2r2 import M2R2
from lab.rules import AdaptiveExit, AnnealedConfidence, Entropy, Gate, Schedule, Thompson
from lab.swift import SWIFT
from lab.transfer import Transfer
from layerskip import SelfDraft
from methods.heads import Prophet
from methods.then import Then
from methods.trees import Siblings
from sampling import to_probs
from search import Teacher
from speculative import generate, rounds


def short_texts(rows=1):
    """The State of so many texts of one token."""
    return state_of([[1]] * rows, [99] * rows)


DRAFTERS = {
    "swift": lambda m: SWIFT(m, skip_ratio=0.7, window=3, every=2, threshold=0.2, widths=(2,)),
    "m2r2": lambda m: wild(M2R2(m, 3)).drafter(4),
    "m2r2, siblings": lambda m: Siblings(wild(M2R2(m, 5, 4)).drafter(3), [3, 1]),
    "transfer": lambda m: wild(Transfer(m, 0, 4)).drafter(Unsure(4)),
    "transfer, tree": lambda m: wild(Transfer(m, 4, 4)).drafter(4, GROVE),
    "prophet": lambda m: Then(wild(Prophet(m, 2)).drafter(3), NGram(2, 1)),
}
SHORT = {    # drafts of one or two tokens
    "swift": (TINY, lambda m: SWIFT(m, 2, 0.5, 1, every=2, threshold=0.5, widths=(1,))),
    "gemma2 m2r2": (TINY_GEMMA, lambda m: wild(M2R2(m, 2, 2)).drafter(2)),
    "gemma2 transfer": (TINY_GEMMA, lambda m: wild(Transfer(m, 2, 2)).drafter(2, [0, 0, 1])),
}
RULES = {    # that see what was drawn
    "entropy": lambda m: SelfDraft(m, range(4), Entropy(2, 0.35)),
    "annealed": lambda m: SelfDraft(m, range(4), AnnealedConfidence(2, 2 / 3, 0.5)),
}
HEADS = {"m2r2": lambda m: M2R2(m, 3, 4), "transfer": lambda m: Transfer(m, 3, 3),
         "from the embedding": lambda m: Transfer(m, 0, 3), "prophet": lambda m: Prophet(m, 2)}
test_greedy_identity = promises.greedy_identity(DRAFTERS, on=["cpu"])
test_greedy_identity_on_a_gpu = promises.greedy_identity(DRAFTERS, ["swift"], on=["cuda"])
test_poison = promises.poison(DRAFTERS, ["swift"], count=12)
test_exact_law = promises.exact_law({name: (TINY, build) for name, build in RULES.items()})
test_exact_law_of_drafters = promises.exact_law(SHORT, count=2)
test_drafts_are_what_training_sees = promises.right_drafts(both_ways(HEADS))
test_one_wait_a_round = promises.one_wait_a_round(DRAFTERS, ["m2r2", "transfer, tree"])


# --- SWIFT


def test_the_first_and_the_last_block_stay():
    swift = SWIFT(make(replace(LLAMA, n_layers=12)))
    assert sorted(swift.gone) == [2, 3, 6, 7, 10, 11, 14, 15, 18], "blocks 1, 3, 5, ... first"
    tried = [swift.random_set() for _ in range(40)]
    assert len(set(tried)) > 10 and {len(gone) for gone in tried} == {9}
    assert set().union(*tried) == set(range(2, 22))


@each_family
def test_matchness_is_that_of_drafts_along_the_window(models, family):
    """Of the first six tokens that each row wrote, as `Teacher` drafts them."""
    m, swift = models[family], SWIFT(models[family], window=6)
    *_, (state, _) = rounds(m, PROMPTS, 9)
    swift.start = list(map(len, PROMPTS))
    for rows, gone in (([0, 1, 2, 3], swift.gone), ([1], {4, 7, 9})):
        subs = swift.kept(gone)
        want = [Teacher(m, state.known[b], to_probs).acceptance(subs)[n - 1 : n + 5]
                for b, n in enumerate(swift.start) if b in rows]
        with torch.inference_mode():
            assert swift.score(state, gone, rows) == pytest.approx(float(torch.cat(want).mean()))


def test_the_incumbent_is_scored_first_and_again_in_a_new_text(models):
    m, worth, asked = models["llama"], {}, []
    swift = SWIFT(m, window=3, threshold=0.99)
    swift.score = lambda state, gone, rows: (
        asked.append((list(map(len, state.known)), gone, rows)) or worth.get(gone, 0.4))
    first = swift.gone
    worth[first] = 0.5
    generate(m, PROMPTS[:2], 12, swift)
    assert asked[0][1] == swift.gone == first and len(asked) > 3 and swift.stale == swift.tried
    for lengths, _, rows in asked:      # whole windows only
        assert rows == [b for b in (0, 1) if lengths[b] >= len(PROMPTS[b]) + 3]
    count, worth[first] = len(asked), 0.1               # worth less in another text
    generate(m, PROMPTS[1:2], 12, swift)
    assert asked[count][1] == first and swift.gone == asked[count + 1][1] != first
    assert swift.draft.sublayers == swift.kept(swift.gone)
    for end in ("none", "stale", "tried", "best"):  # too many in vain, or in all; a good set
        vars(swift).update({"stale": 0, "tried": 0, "best": 0.5} | {end: 1001})
        asked.clear()
        swift.observe(*next(rounds(m, PROMPTS[:1], 4)))
        assert bool(asked) == (end == "none")


def test_a_row_at_the_end_of_the_context_has_no_window(models):
    m, swift = models["llama"], SWIFT(models["llama"], window=16)   # longer than the spare slots
    ids = [PROMPTS[0][:4], (PROMPTS[1] * 40)[: m.c.max_len - 3]]
    assert generate(m, ids, 20, swift)[0] == generate(m, ids, 20)[0] and swift.tried > 0


# --- rules


@pytest.mark.parametrize("rule, want", [
    (Schedule(2, up=2), [2, 4, 6, 5, 4, 3, 2, 4]),
    (Schedule(15), [15, 16, 16, 15, 14, 13, 12, 13])])
def test_schedules_by_hand(rule, want):
    """Two drafts are accepted whole, four only in part, and then one whole; a row without drafts
    learns nothing."""
    state, asked = short_texts(2), []
    rule.begin(state)
    for whole in (True, True, False, False, False, False, True, True):
        gamma, other = rule.how_far(state)
        rule.learn(state, outcome((gamma, gamma - (not whole)), (0, 0)))
        asked.append(gamma)
    assert asked == want and other == rule.start


def test_stop_rules_by_hand():
    """Annealed: 1 / (1 + exp(-3 / T)) is .95 at T = 1, and .82 at T = 2; of 1 it is .73 and .62.
    Entropy: of four tokens alike H = log 4 = 1.386, sqrt(.15 H) = .456; a draft vocabulary of two:
    .322."""
    logits, token = torch.tensor([[3.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 0])
    for depth, bar, want in ((1, 0.7, [False, False]), (1, 0.85, [False, True]),
                             (0, 0.7, [False, True]), (0, 0.85, [True, True])):
        assert AnnealedConfidence(depth=depth, threshold=bar).stop(0, logits, token) == want
    logits = torch.tensor([[0.0] * 4, [9.0, 0.0, 0.0, 0.0], [0.0, 0.0, -torch.inf, -torch.inf]])
    for bar, want in ((0.3, [True, False, True]), (0.4, [True, False, False]), (0.46, [False] * 3)):
        assert Entropy(threshold=bar).stop(0, logits, torch.zeros(3).long()) == want


def test_thompson_draws_from_what_became_of_drafts():
    rule, state = Thompson(8), short_texts(2)
    rule.begin(state)
    fresh = torch.tensor([rule.how_far(state) for _ in range(40)]).double()
    assert 1.5 < fresh.mean() < 4 and len(fresh.unique()) > 4
    for _ in range(60):
        rule.learn(state, outcome((4, 4), (4, 0)))
    assert [(b.hits, b.misses) for b in rule.seen] == [(240, 0), (0, 60)], "each row on its own"
    rule.begin(state)       # what is learnt outlives the run
    lengths = torch.tensor([rule.how_far(state) for _ in range(50)]).double()
    assert lengths[:, 0].mean() > 7 and lengths[:, 1].mean() < 1.2 and int(lengths.min()) == 1


def test_adaptive_exit_by_hand():
    """m <- m / 2 + share / 2; the threshold moves by a tenth of .01: up while m < .9, else down,
    but not if nothing stopped the draft. Rows are apart, and a new text of as many goes on."""
    rule, state = AdaptiveExit(), short_texts(2)
    rule.begin(state)
    for drafted, kept, mean, threshold in (
            (4, 4, 0.5, 0.601), (4, 4, 0.75, 0.602), (4, 4, 0.875, 0.603), (12, 12, 0.9375, 0.603),
            (0, 0, 0.9375, 0.603), (4, 4, 0.96875, 0.602), (4, 1, 0.609375, 0.603)):
        rule.learn(state, outcome((drafted, kept), None))
        assert rule.acceptance == pytest.approx([mean, 0], abs=1e-12)
        assert rule.threshold == pytest.approx([threshold, 0.6], abs=1e-12)
    rule.begin(state)
    rule.how_far(state)
    close = torch.tensor([[0.6015, 0.3985]] * 2).log()
    assert rule.stop(0, close, torch.zeros(2).long()) == [True, False]
    rule.begin(short_texts(1))
    assert rule.threshold == [0.6], "other rows know nothing"


def test_the_gate_drafts_after_a_last_token_that_the_target_was_sure_of():
    rule, state, written = Gate(4), short_texts(3), outcome((4, 1), None, (0, 0))
    rule.begin(state)
    assert rule.how_far(state) == [4, 4, 4], "the target has not judged the prompt"
    rule.learn(state, replace(written, sure=[[1.0, 0.5 - 1e-9], [], [0.5 - 1e-9]]))
    assert rule.how_far(state) == [0, 4, 0], "a row that has ended keeps what was known"
    rule.learn(state, replace(written, sure=[[0.0, 0.5], [], [0.5]]))
    assert rule.how_far(state) == [4, 4, 4]


# --- heads and worked examples


@pytest.mark.parametrize("module", [gguf, hamburger, sparse, transfer],
                         ids=lambda module: module.__name__)
def test_examples(module):
    failed, attempted = doctest.testmod(module)
    assert attempted and not failed


@each_family
def test_heads_start_as_the_model_itself(models, family):
    m, ids = models[family], PROMPTS[0]
    row, bare = ([r.accepted.tolist() for _, r in rounds(m, PROMPTS, 20, drafter)]
                 for drafter in (M2R2(m, 2).drafter(3), SelfDraft(m, range(4), 3)))
    assert row == bare, "an untrained second row is the first one"
    cache = KVCache(m.c, 1, 8, torch.float64)
    _, trace = read(m, ids, [11], cache)
    for k, said in Transfer(m, 6, 2).predict(torch.tensor([ids]), trace, cache):
        assert (said - m.unembed(trace[11])[:, :-k]).abs().max() < 1e-9
    prophet, half = Prophet(m, 2).own.blocks[1].mlp, m.c.hidden_dim // 2
    x = torch.linspace(-1, 1, m.c.dim, dtype=torch.float64)
    gate, up = (w @ x for w in m.blocks[1].mlp.gate_up.chunk(2))
    some = m.blocks[1].mlp.act(gate[:half]) * up[:half]
    assert torch.allclose(prophet(x[None])[0], m.blocks[1].mlp.down[:, :half] @ some)
