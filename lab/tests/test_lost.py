"""What the lab keeps although it loses by the project's own tables: SWIFT, CLaSp, KnapSpec, M2R2,
Hidden Transfer, prophets, HAMburger, sparse drafts and published rules. Each does what its paper
says, and none changes the text or its distribution."""
import doctest
from dataclasses import replace
from itertools import combinations

import promises
import pytest
import tiny
import torch
import torch.nn.functional as F
from test_heads import GROVE, Turns, both_ways, wild
from tiny import LIVELY, PROMPTS, TINY, TINY_GEMMA, Unsure, each_family, make, read, state_of

from control import best_gamma
from drafter import wanted
from kvcache import KVCache
from lab import clasp, doctor, figures, gguf, hamburger, sparse, transfer
from lab.bench import shared
from lab.clasp import CLaSp, KnapSpec, nearest
from lab.hamburger import BurgerDraft, Hamburger, begins, latest, losses, write
from lab.m2r2 import M2R2
from lab.rules import AdaptiveExit, AnnealedConfidence, DoNoHarm, Entropy, Gate, Schedule, Thompson
from lab.sparse import SparseDraft
from lab.swift import SWIFT
from lab.then import Then
from lab.transfer import Transfer
from layerskip import SelfDraft
from methods.costs import Machine
from methods.counts import Beta
from methods.lookup import NGram
from methods.prophet import Prophet
from methods.trees import Siblings
from model import Placement
from sampling import to_probs
from search import Teacher
from speculative import generate, rounds


def short_texts(rows=1):
    """The State of so many texts of one token."""
    return state_of([[1]] * rows, [99] * rows)


def outcome(*pairs):
    """The round in which row b drafted pairs[b][0] tokens, pairs[b][1] accepted;
    None: it had ended."""
    drafted, kept = zip(*(pair or (0, 0) for pair in pairs), strict=True)
    return tiny.make_round([[0] * (pair[1] + 1) if pair else [] for pair in pairs], kept, drafted)


def wild_burger(model, **shape):
    """A HAMburger with random new parts, and a trunk that is no longer the model."""
    made = Hamburger(model, **shape).requires_grad_(False)
    g, trunk = torch.Generator().manual_seed(1), set(made.trunk.parameters())
    for p in made.parameters():
        noise = torch.randn(p.shape, generator=g, dtype=torch.float64).to(p)
        p += (0.02 if p in trunk else 0.3) * noise
    return made


def free(m):
    """Costs with which almost any draft gains."""
    return Machine.of(m.c.n_layers, 1.0, 2.0, 0.0)


DRAFTERS = {
    "swift": lambda m: SWIFT(m, skip_ratio=0.7, window=3, every=2, threshold=0.2, widths=(2,)),
    "clasp": lambda m: CLaSp(m, skips=5, every=1, threshold=0.1),
    "knapspec": lambda m: KnapSpec(m, machine=free(m), every=3),
    "m2r2": lambda m: wild(M2R2(m, 3)).drafter(4),
    "m2r2, siblings": lambda m: Siblings(wild(M2R2(m, 5, 4)).drafter(3), [3, 1]),
    "transfer": lambda m: wild(Transfer(m, 0, 4)).drafter(Unsure(4)),
    "transfer, tree": lambda m: wild(Transfer(m, 4, 4)).drafter(4, GROVE),
    "prophet": lambda m: Then(wild(Prophet(m, 2)).drafter(3), NGram(2, 1)),
    "hamburger": lambda m: Then(BurgerDraft(wild_burger(m), 0.5), NGram(3, 1)),
    "sparse": lambda m: SparseDraft(m, 4, 1, 3),
    "sparse, in turns": lambda m: Turns(
        SparseDraft(m, 3, 1, 3), SelfDraft(m, range(8), 3), NGram(3, 1)),
    "do no harm": lambda m: NGram(DoNoHarm(0.1, 3), 1)}
SHORT = {    # drafts of one or two tokens
    "swift": (TINY, lambda m: SWIFT(m, 2, 0.5, 1, every=2, threshold=0.5, widths=(1,))),
    "gemma2 clasp": (TINY_GEMMA, lambda m: CLaSp(m, 2, skips=1, every=1, threshold=0.6)),
    "knapspec": (replace(TINY, n_layers=5), lambda m: KnapSpec(m, 2, free(m), every=1)),
    "gemma2 m2r2": (TINY_GEMMA, lambda m: wild(M2R2(m, 2, 2)).drafter(2)),
    "gemma2 transfer": (TINY_GEMMA, lambda m: wild(Transfer(m, 2, 2)).drafter(2, [0, 0, 1])),
    "hamburger": (TINY, lambda m: BurgerDraft(wild_burger(m, most=3, blocks=1), 0.5)),
    "sparse, siblings": (TINY, lambda m: Siblings(SparseDraft(m, 1, 0, 1), [1])),
    "gemma2 sparse": (TINY_GEMMA, lambda m: SparseDraft(m, Unsure(2), 1, 1)),
    "entropy": (TINY, lambda m: SelfDraft(m, range(4), Entropy(2, 0.35))),  # sees what was drawn
    "annealed": (TINY, lambda m: SelfDraft(m, range(4), AnnealedConfidence(2, 2 / 3, 0.5))),
    "do no harm": (TINY, lambda m: SelfDraft(m, range(4), DoNoHarm(0.1, 2)))}
HEADS = {"m2r2": lambda m: M2R2(m, 3, 4), "transfer": lambda m: Transfer(m, 3, 3),
         "from the embedding": lambda m: Transfer(m, 0, 3), "prophet": lambda m: Prophet(m, 2)}
test_greedy_identity = promises.greedy_identity(DRAFTERS, on=["cpu"])
test_greedy_identity_on_a_gpu = promises.greedy_identity(DRAFTERS, ["swift"], on=["cuda"])
test_poison = promises.poison(DRAFTERS, ["swift", "clasp", "knapspec", "sparse"], count=12)
test_exact_law = promises.exact_law(SHORT)
test_drafts_are_what_training_sees = promises.right_drafts(both_ways(HEADS))
test_one_wait_a_round = promises.one_wait_a_round(DRAFTERS, ["m2r2", "transfer, tree", "sparse"])


# --- SWIFT


def test_the_first_and_the_last_block_stay():
    swift = SWIFT(make(replace(LIVELY["llama"], n_layers=12)))
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


# --- CLaSp and KnapSpec


@each_family
def test_clasp_judges_by_the_states_of_the_last_accepted_token(models, family, monkeypatch):
    m, seen = models[family], []
    monkeypatch.setattr(clasp, "nearest", lambda states, run, times, most: (
        seen.append((states,
                     [run(u, torch.stack([states[u] + 1, states[u]]))[1] for u in range(6)]))
        or ([[1], [1, 3]], None)))
    drafter, taps = CLaSp(m, 3, skips=2, every=1, threshold=0.0), list(range(1, 12, 2))
    ends = [[len(p) for p in PROMPTS[:3]]]
    for state, r in rounds(m, PROMPTS[:3], 8, drafter):
        lengths = zip(state.known, r.new, r.accepted.tolist(), strict=True)
        ends.append([len(text) - len(new) + kept for text, new, kept in lengths])
    for (states, ran), places in zip(seen, ends, strict=True):
        for b, (text, end) in enumerate(zip(state.known, places, strict=True)):
            _, trace = read(m, text[:end], taps)
            for u, tap in enumerate(taps):
                assert (states[u + 1][b] - trace[tap][0, -1]).abs().max() < 1e-9
                assert (ran[u][b] - trace[tap][0, -1]).abs().max() < 1e-9
    assert drafter.sublayers == [0, 1, 4, 5, 8, 9, 10, 11]


def turns(angles):
    """The states and `run` of units that turn a vector. What is skipped is
    missing from their sum."""
    turn = [torch.tensor([[torch.cos(a), torch.sin(a)], [-torch.sin(a), torch.cos(a)]])
            for a in angles]
    states = [torch.tensor([[1.0, 0.0]])]
    for matrix in turn:
        states.append(states[-1] @ matrix)
    return states, lambda u, x: x @ turn[u]


def test_times_by_brute_force():
    """Of all sets that save a given time the one that turns least is skipped; nothing
    of time 0 is."""
    angles, times = torch.tensor([0.31, 0.1, 0.17, 0.05, 0.23, 0.02]), [2, 1, 3, 1, 2, 0]
    sets, ends = nearest(*turns(angles), times, sum(times))
    every = [list(some) for n in range(1, 6) for some in combinations(range(5), n)]
    for time, found in enumerate(sets, 1):
        fit = [some for some in every if sum(times[u] for u in some) == time]
        assert found == min(fit, key=lambda some: float(angles[some].sum()), default=None)
        if found:
            left = angles.sum() - angles[found].sum()
            assert torch.allclose(ends[time][0], torch.stack([torch.cos(left), torch.sin(left)]))
    few, _ = nearest(*turns(angles), times, sum(times), least=0.99)
    assert few[0] == [3] and few[-1] is None, "what turns away too far is given up"


def test_knapspec_drafts_with_the_set_that_promises_most_and_not_at_all_where_none_gains(
        monkeypatch):
    m = make(LIVELY["llama"])
    drafter, m.unembed = KnapSpec(m, machine=free(m)), lambda x: x
    assert drafter.times == [0, 0, 1, 2, 1, 2, 1, 2, 1, 2, 0, 0]
    ends = torch.eye(17)[:13, None].repeat(1, 4, 1)         # (J, N, V) one-hot "states"
    states = [None] * 12 + [torch.eye(17)[torch.tensor([0, 0, 1, 2])]]
    # their best tokens: 1 everywhere, 2 everywhere; each right once
    monkeypatch.setattr(clasp, "nearest", lambda *_, **__: ([[4], [4, 6]] + [None] * 10, ends))
    drafter.choose(states, None)
    assert drafter.rule.longest == 0 and drafter.sublayers == [
        *range(12)], "alpha 1/3 against c 17/18"
    ends[2] = states[-1]                    # the second one is always right: alpha 5/6, and c 4/6
    drafter.machine = Machine.of(6, 1.0, 1e-9, 0.0)
    drafter.choose(states, None)
    assert drafter.sublayers == [0, 1, 2, 3, 5, 7, 8, 9, 10, 11] and drafter.rule.longest > 0


# --- HAMburger


def test_the_merging_by_hand(models):
    """One head at a time. A single token stays as it is, and padding is not read."""
    burger, ids = wild_burger(models["llama"]), [3, 7, 2]
    tokens = torch.tensor([[[*ids, 9], [5, 9, 9, 9]]])
    got = burger.compose(tokens, torch.tensor([[3, 1]]))[0]
    x = burger.trunk.tok[ids]                                                   # (3, dim)
    mean, pieces = x.mean(0), []
    keys, values = (x @ burger.kv.T + burger.place[:3]).chunk(2, -1)
    for query, k, v in zip(mean.chunk(4), keys.chunk(4, -1), values.chunk(4, -1), strict=True):
        pieces.append((k @ query / 8**0.5).softmax(0) @ v)
    assert torch.allclose(got[0], mean + burger.out @ torch.cat(pieces))
    assert torch.equal(got[1], burger.trunk.tok[5])
    x = torch.stack([burger.trunk.embed(torch.tensor([5]))[0], got[0]])[None]
    at = Placement(torch.tensor([[0, 3]]), torch.tensor([[0, 1]]), 0, 4)  # stands at its last token
    want = burger.trunk.run(x, at._replace(end=2), table=burger.trunk.angles(4))[0, 1]
    assert torch.allclose(latest(burger, [[[5], ids]])[0, 0, 3], want)


def said(burger, row, entry, p):
    """After the entries `row` and the tokens `entry`: KL(p || what a step says), its stop logit."""
    x = burger.following(latest(burger, [row]), torch.tensor([[entry]]).long())[0, 0, -1]
    q = burger.trunk.unembed(x[None, None])[0, 0].log_softmax(-1)
    return float((p.exp() * (p - q)).sum()), burger.ending(x)


TEXTS = torch.tensor([[1, 5, 3, 2, 9, 4, 4, 7, 7, 7], [3, 8, 8, 8, 1, 2, 2, 16, 0, 4]])


@each_family
def test_learning_sees_what_writing_computes(models, family, monkeypatch):
    """Each token of a text, said by hand from the entries before it, and the same losses."""
    monkeypatch.setattr(hamburger, "SHARE", 0.97)           # a random model is never sure
    burger, p, kl, stop = wild_burger(models[family]), models[family](TEXTS).log_softmax(-1), [], []
    first = begins(F.pad(-(p.exp() * p).sum(-1)[:, :-1], (1, 0)), 4)
    assert 0.3 < first.double().mean() < 0.9, "entries of several tokens"
    for b, text in enumerate(TEXTS.tolist()):
        row, entry = [[text[0]]], []
        for t in range(1, len(text)):
            if first[b, t] and t > 1:
                row, entry = [*row, entry], []
            far, ends = said(burger, row, entry, p[b, t - 1])
            kl.append(far)
            if t + 1 < len(text):
                stop.append(float(F.softplus(-ends if first[b, t + 1] else ends)))
            entry = [*entry, text[t]]
    assert [float(x) for x in losses(burger, models[family], TEXTS)] == pytest.approx(
        [sum(kl) / len(kl), sum(stop) / len(stop)])


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
    written.sure = [[1.0, 0.5 - 1e-9], [], [0.5 - 1e-9]]
    rule.learn(state, written)
    assert rule.how_far(state) == [0, 4, 0], "a row that has ended keeps what was known"
    written.sure = [[0.0, 0.5], [], [0.5]]
    rule.learn(state, written)
    assert rule.how_far(state) == [4, 4, 4]


def play(rule, good, count):
    """How many tokens each row drafts in each of `count` rounds, (count, B). good: are all of a
    row's drafts accepted, or none?"""
    state, asked = short_texts(len(good)), []
    rule.begin(state)
    for _ in range(count):
        asked.append(wanted(state, rule))
        drafts = zip(asked[-1], good, strict=True)
        rule.learn(state, outcome(*((gamma, gamma * right) for gamma, right in drafts)))
    return torch.tensor(asked)


def test_do_no_harm_tries_a_useless_draft_as_often_as_was_saved_for():
    found = play(DoNoHarm(0.25), [True, False], 120)
    assert found[:, 0].max() == 16 and found[:10, 0].min() > 0, "it does not wait for the bad one"
    assert found[:, 1].max() == 1 and found[:, 1].sum() * 0.25 <= 0.01 * 120 + 1
    free = play(DoNoHarm(0.0), [False], 200)[100:].sum()     # its estimate only falls to .045
    assert free <= 100 * 0.01 / DoNoHarm.FLOOR + 1
    rule = DoNoHarm(0.6)
    found = sum(int(play(rule, [False], 9).sum()) for _ in range(20))
    assert 2 <= found <= 1 + 180 * 0.01 / 0.6, "a new text brings no free try"


def test_do_no_harm_estimates_by_hand():
    rule = DoNoHarm(0.2)
    rule.begin(short_texts(2))
    rule.learn(None, outcome((3, 1), (0, 0)))
    rule.learn(None, outcome((3, 3), (5, 0)))
    assert rule.seen[0].mean() == pytest.approx((3.95 + 1) / (3.95 + 0.95 + 2))
    assert (rule.seen[1].hits, rule.seen[1].misses) == (0, 1)
    assert (rule.past.hits, rule.past.misses) == pytest.approx(((0.95 + 3) * 0.95, 0.95 * 0.95 + 1))
    rule.begin(short_texts(3))
    rule.seen[0].add(5, 5)
    assert rule.seen[1] == rule.past != rule.seen[0], "rows start alike and then learn apart"
    rule.seen, rule.saved = [Beta(hits, 10.0 - hits) for hits in range(11)], [0.0] * 11
    assert rule.how_far(None) == [best_gamma((hits + 1) / 12, 0.2) for hits in range(11)]


# --- heads and worked examples


@pytest.mark.parametrize("module", [
    doctor, figures, gguf, hamburger, shared, sparse, transfer], ids=lambda module: module.__name__)
def test_examples(module):
    failed, attempted = doctest.testmod(module)
    assert attempted and not failed


@each_family
def test_what_is_untrained_is_the_model_itself(models, truth, family):
    m, ids = models[family], PROMPTS[0]
    entries = list(write(Hamburger(m), ids, 9, 2.0))
    assert entries == [[t] for t in truth[family][0][:9]], "entries of one token"
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
