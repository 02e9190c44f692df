"""Pace never changes the text, never loses more than it may, and chooses what promises most."""
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import expected
import promises
import pytest
import torch
from matplotlib import image
from test_control import Foretold
from test_heads import wild
from tiny import LIVELY, LLAMA, PROMPTS, TINY, TINY_GEMMA, each_family, make, make_round, oracle, warm

from benchmarks import dynamic as bench_dynamic
from benchmarks.drafters import After, Method, metered
from benchmarks.shared import SETS, prompt_ids
from control import MOST, Beta, Costs, plan, weight_costs
from layerskip import SelfDraft, ShortHead, Teacher, early_exit, without
from methods import pace
from methods.heads import M2R2, Eagle, ExitBlock, Kangaroo, Medusa, Prophet, Transfer, shorter
from methods.pace import (
    REST,
    SHADOW,
    SLOWER,
    STAKE,
    TAIL,
    TRUST,
    Memory,
    Pace,
    Way,
    candidates,
    head_draft,
    self_draft,
)
from sampling import Coins, to_probs
from speculative import Drafter, ModelDraft, Wrapper, generate, rounds
from support import plots

SKIP = without(6, attn=[1, 4], mlp=[2])
LOOP = [[1, 2, 3, 4] * 4, [7, 7, 7, 7, 7], [5, 6, 5, 6, 5, 6], [9]]  # what n-grams like
CHEAP = Costs((0.02,) * 8 + (2.5,) * 4, 0.01)  # self-drafts are nearly free


def everything(m, costs=CHEAP, L=6):
    """Pace with ways of all kinds."""
    small = make(replace(m.c, n_layers=1), 5, m.tok.device)
    ways = candidates(m, costs, SKIP) + candidates(m, costs, None, [4, 9, 0, 2, 16, 3])
    return Pace(m, [*ways, Way("small", ModelDraft(small, 0), lambda n: 0.1)], costs, risk=0.5)


def some_heads(m):
    """A head of each kind, with wild weights: what they draft is worth nothing."""
    return [wild(head) for head in (Kangaroo(m, 2), ExitBlock(m, 1), M2R2(m, 2), Medusa(m, 3),
                                    Medusa(m, 2, True), Transfer(m, 3, 2), Prophet(m, 1))]


def with_heads(m, costs=CHEAP):
    """Pace with trained heads, with and without a draft vocabulary, and one exit."""
    ways = [head_draft(head, costs, ids) for head in some_heads(m) for ids in (None, [4, 9, 0, 2, 16, 3])]
    return Pace(m, [*ways, self_draft("exit 1", m, range(2), costs)], costs, risk=0.5)


PACES = {"by weights": Pace, "cheap": everything, "heads": with_heads,
         "two": lambda m: Pace(m, [self_draft("exit 3", m, early_exit(6, 3), CHEAP)], CHEAP, most=3)}
test_greedy_identity = promises.greedy_identity(PACES)
test_rows_equal_solo_runs = promises.rows_equal_solo_runs(PACES, ["cheap"])
test_poison = promises.poison(PACES, ["cheap", "heads"], 14)
test_short_answers = promises.short_answers(PACES, ["cheap"])


@each_family
@pytest.mark.parametrize("name", PACES)
def test_texts_that_repeat_themselves_stay_as_they_are(models, family, name):
    m = models[family]
    for prompts in (LOOP, LOOP[:1]):
        assert promises.write(m, PACES[name](m), 20, prompts) == [oracle(m, p, 20) for p in prompts]


def tiny_heads(m):
    costs = Costs((0.02,) * 5 + (9.0,), 0.0)
    ways = [head_draft(wild(head), costs) for head in (Kangaroo(m, 1), Transfer(m, 1, 2), Medusa(m, 2))]
    return Pace(m, ways, costs, most=2, risk=0.9)


def tiny_pace(m):
    costs = Costs((0.02,) * 5 + (9.0,), 0.0)
    ways = [self_draft("exit 1", m, range(2), costs), self_draft("skip", m, [0, 1, 3, 5], costs)]
    return Pace(m, ways, costs, most=2, risk=0.9)


LAWS = {"llama": (TINY, tiny_pace), "gemma2": (TINY_GEMMA, tiny_pace),
        "llama, heads": (TINY, tiny_heads), "gemma2, heads": (TINY_GEMMA, tiny_heads)}
test_exact_law = promises.exact_law(LAWS)
test_exact_law_of_a_ragged_batch = promises.exact_law_of_a_ragged_batch(LAWS, ["llama"])


@pytest.mark.parametrize("begin", [everything, with_heads])
def test_the_same_seed_repeats_everything(models, begin):
    m, runs = models["llama"], []
    for _ in range(2):
        drafter = begin(m)
        out = [generate(m, PROMPTS, 16, drafter, lambda x: to_probs(x, 0.9), Coins(s))[0] for s in (1, 2)]
        runs.append((out, drafter.chosen, drafter.purse))
    assert runs[0] == runs[1]


# --- what it may lose


@pytest.fixture(scope="module")
def long():
    """A model and a text of 200 new tokens that it writes."""
    m = make(replace(LLAMA, max_len=256))
    return m, PROMPTS[0] + generate(m, PROMPTS[:1], 200)[0][0]


EVEN = Costs((1.0,) * 12, 1.0)


def foretold(name, price, texts, good):
    """The way of a draft that knows the texts where they are good."""
    return Way(name, Foretold(texts, good), lambda n: price, stops=False)


def spent(drafter, r, price, costs):
    """What a round took, by the prices alone: its draft, which a tail adds nothing to, and its block."""
    K = r.draft.tokens.shape[1]
    return price * (max(drafter.pair.drafted) if drafter.pair else K) + costs.block(K + 1)


@pytest.mark.parametrize("honest", [0, 70])
@pytest.mark.parametrize("price", [0.01, 0.3, 3.0])
def test_a_useless_way_costs_risk_and_one_per_cent_at_most(long, price, honest):
    """In the prices' own units, whatever it promised before: over each stretch from the start on."""
    m, text = long
    for blocks in (((1, 1.0),), ((1, 1.0), (17, 3.0))):
        costs = Costs((1.0,) * 12, 1.0, blocks)
        way = foretold("liar", price, [text], [lambda n: n < honest])
        drafter, won = Pace(m, [way], costs, risk=0.01), 0.0
        taken, tokens, tried = 0.0, 0, 0
        for _, r in rounds(m, PROMPTS[:1], 200, drafter):
            if drafter.way is drafter.nothing or drafter.way is drafter.copying:
                taken += spent(drafter, r, 0.0, costs)
            else:
                taken, tried = taken + spent(drafter, r, price, costs), tried + 1
            tokens += len(r.new[0])
            won = max(won, tokens - taken)
            assert taken <= tokens * 1.01 + STAKE + 1e-9 and drafter.purse > -1e-9
        assert tokens == 200 and taken <= 200 * (1 + 0.01 + 0.01)
        assert tried > 0 or price == 3.0, "it was never tried"
        if honest and price < 0.5:
            assert won > 10 and taken < 200 - 0.5 * won, "most of what it won while it was good is kept"


@each_family
@pytest.mark.parametrize("rows", [1, 3])
def test_by_weights_it_is_never_slower_than_it_promises(family, rows):
    """A draft of each kind alone, and all at once, of which little is accepted, priced by what the passes
    really read; the prompt's own reading apart. Nothing is read that is not booked."""
    m = make(replace(LIVELY[family], max_len=256), 4)
    costs, heads = replace(weight_costs(m.c), slot=0.0), some_heads(m)  # the meter does not count slots
    ways = candidates(m, costs, SKIP, None, heads) + candidates(m, costs, None, [4, 9, 0, 2, 16, 3])
    with metered([m], heads) as read:
        for some in (*([way] for way in ways), ways):
            total, drafter = 0.0, Pace(m, some, costs, risk=0.1)
            if len(some) == 1:
                drafter.lookup.found = lambda state: [[]] * rows        # else it would win, and only it draft
            begin = drafter.lookup.begin
            drafter.lookup.begin = lambda state, trace, begin=begin: (begin(state, trace), read.clear())
            for i in range(1, 3):
                generate(m, [PROMPTS[(i + b) % 4] for b in range(rows)], 40, drafter)
                total += sum(read) / costs.whole
                assert total <= 40 * i * 1.1 + STAKE
                assert -1e-9 < drafter.purse <= STAKE + 40 * i * 1.1 - total + 1e-6
            way = some[0]       # one so dear that it can gain nothing is not tried out, and an exit is scored
            assert len(some) > 1 or way.leaves or way.price(9) > 0.7 or way.name in drafter.chosen


def test_a_row_that_wins_does_not_make_the_others_wait(long):
    """Of two rows one knows the answer. What it wins is no time won for the other, and so none is spent."""
    m, text = long
    for good in ([True, False], [False, True], [True, True]):
        way = foretold("known", 0.3, [text, text], good)
        drafter, taken = Pace(m, [way], EVEN), 0.0
        for _, r in rounds(m, [PROMPTS[0]] * 2, 200, drafter):
            drafted = drafter.way is way
            taken += spent(drafter, r, 0.3 * drafted, EVEN)
            assert drafter.purse > -1e-9
        if all(good):
            assert taken < 120, "both rows win"
        else:
            assert taken <= 200 * 1.01 + STAKE and len(drafter.chosen) > 1


@pytest.mark.parametrize("honest", [0, 70])
def test_costs_that_grow_with_the_text_are_booked_as_they_grow(long, honest):
    """A pass takes three times as long at the end as at the beginning, and what was won early was won in
    short passes: so it pays for few of the long ones."""
    m, text = long
    costs = Costs((1.0,) * 12, 1.0, ((1, 1.0), (17, 1.5)), slot=0.02)
    whole, own = costs.pricing(range(12)), costs.pricing(range(4))
    way = foretold("liar", 0.0, [text], [lambda n: n < honest])
    way.price = lambda n: own(n) / whole(n)
    drafter, taken, plain = Pace(m, [way], costs), 0.0, 0.0
    for state, r in rounds(m, PROMPTS[:1], 200, drafter):
        K, n = r.draft.tokens.shape[1], len(state.known[0]) - len(r.new[0])
        drafted = (max(drafter.pair.drafted) if drafter.pair else K) * (drafter.way is way)
        taken += sum(own(n + k) for k in range(drafted)) + costs.block(K + 1) * whole(n + K)
        plain += sum(whole(n + k) for k in range(len(r.new[0])))
        assert taken <= plain * 1.01 + STAKE * costs.whole
        assert drafter.purse * costs.whole <= plain * 1.01 + STAKE * costs.whole - taken + 1e-6
    assert whole(208) > 2.5 * whole(8) and drafter.chosen["liar"] > 1


def test_a_way_that_can_never_be_paid_for_does_not_stop_the_others(long, monkeypatch):
    """One that becomes good late is tried again, though another one may well be better."""
    monkeypatch.setattr(pace, "MARGIN", 0.0)
    m, text = long
    for first in (False, True):
        dear = replace(foretold("dear", 0.01, [text], [False]), once=lambda block: 3.5, alpha=0.6)
        ways = [dear, foretold("late", 0.6, [text], [lambda n: n > 60])]    # not worth it at .5
        drafter = Pace(m, ways[::-1] if first else ways, EVEN, risk=0.05)
        drafter.lookup.found, drafter.purse = lambda state: [[]], 10.0
        assert generate(m, PROMPTS[:1], 200, drafter)[1] < 150 and "dear" not in drafter.chosen


def test_what_is_tried_is_paid_for_by_what_was_saved(long):
    """While another way wins one that is never right is tried as often as was saved for; and one that could
    not win back what a try loses is not tried at all."""
    m, text = long

    def tries(price, saved):
        ways = [replace(foretold("good", 0.4, [text], [True]), alpha=0.99),
                replace(foretold("liar", price, [text], [False]), alpha=0.4)]
        drafter = Pace(m, ways, EVEN, risk=0.0, most=2, fade=0.5)
        drafter.lookup.found, drafter.purse, drafter.saved = lambda state: [[]], 90.0, saved
        generate(m, PROMPTS[:1], 200, drafter)
        return drafter.chosen.get("liar", 0)
    assert tries(0.05, 0.0) == 0 < tries(0.05, 0.5) <= 2 < 4 < tries(0.05, STAKE)
    assert tries(0.14, STAKE) <= 1, "it may well promise 1.67 instead of 1.65"


def test_a_perfect_way_is_drawn_out(long):
    m, text = long
    drafter = Pace(m, [foretold("sure", 0.1, [text], [True])], EVEN)
    lengths = [int(r.proposed) for _, r in rounds(m, PROMPTS[:1], 200, drafter)]
    assert max(lengths) == 16 and len(lengths) < 30


def test_it_changes_to_what_is_better_and_back(long):
    """Two ways, each right where the other one is wrong; and what was learnt outlives the run."""
    m, text = long
    ways = [foretold("early", 0.2, [text], [lambda n: n < 100]),
            foretold("late", 0.2, [text], [lambda n: n > 100])]
    drafter, used = Pace(m, ways, EVEN, risk=0.1), []
    for state, r in rounds(m, PROMPTS[:1], 200, drafter):
        if int(r.accepted) > 1:
            used.append((drafter.way.name, len(state.known[0])))
    assert {name for name, n in used if n < 100} == {"early"}
    assert sum(name == "late" for name, _ in used) > 3, "it found the other one"
    early, forgotten = (memory.skills[0].hits for memory in (drafter.past, drafter.rows[0]))
    assert early > 2 * forgotten > 0, "what outlives the text fades slower"
    known = [skill.mean() for skill in drafter.past.skills]
    drafter.begin(state, {tap: None for tap in drafter.taps})
    assert [skill.mean() for skill in drafter.rows[0].skills] == known != [0.5, 0.5]


# --- what it knows


@each_family
@pytest.mark.parametrize("probs", [to_probs, warm], ids=["greedy", "sampled"])
def test_a_trace_tells_of_every_exit(models, monkeypatch, family, probs):
    """Whatever drafts: the counts are what `Teacher` finds, which drafts at each place."""
    m = models[family]
    monkeypatch.setattr(Pace, "experiment", lambda self, doubted: setattr(self, "scores", True))
    short = ShortHead(m, [4, 9, 0, 2, 16, 3])
    ways = [self_draft("exit 2", m, range(4), CHEAP), self_draft("exit 5", m, range(10), CHEAP),
            self_draft("short", short, range(6), CHEAP)]
    drafter = Pace(m, ways, CHEAP, risk=50.0, fade=1.0)
    *_, (state, _) = rounds(m, PROMPTS, 12, drafter, probs, Coins(5))
    for b, (prompt, text) in enumerate(zip(PROMPTS, state.known, strict=True)):
        teacher = Teacher(m, text, probs)
        for i, (subs, head) in enumerate(((range(4), None), (range(10), None), (range(6), short))):
            a = teacher.acceptance(subs, head)
            hits = float(a[: len(prompt)].sum() + a[len(prompt) - 1 : len(text) - 1].sum())
            skill = drafter.rows[b].skills[i]
            assert skill.hits == pytest.approx(hits, abs=1e-5)
            assert skill.hits + skill.misses == pytest.approx(len(text))
    assert set(drafter.chosen) - {"nothing", "n-gram"}, "the case should have drafts"
    past = drafter.past.skills[0]
    assert past.hits + past.misses == pytest.approx(sum(map(len, state.known)))


def test_a_draft_is_taken_at_its_word_until_it_is_known_better(models):
    """By tenths of how sure it was, each of which fades by itself."""
    drafter = Pace(models["llama"], [Way("", SelfDraft(models["llama"], range(2), 0), lambda n: 0.1)], CHEAP)
    assert [beta.mean() for beta in drafter.trust[0]] == pytest.approx(
        [0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95, 0.95])
    assert [int(10 * (k / 10)) for k in range(11)] == list(range(11)), "a tenth stays itself"
    for hit, sure in ((0.75, 0.99), (0.0, 0.05), (1.0, 0.9)):
        drafter.learn(0, 0, hit, sure)
    assert drafter.trust[0][9].mean() == pytest.approx((0.75 * TRUST + 1 + 1.9) / (TRUST + 1 + 2))
    assert drafter.trust[0][0].mean() == pytest.approx(0.1 / 3)
    for memory in (drafter.past, drafter.rows[0]):
        assert (memory.skills[0].hits, memory.skills[0].misses) == (1.75, 1.25)


def test_what_a_heads_file_says_is_where_its_counts_begin(models):
    m = models["llama"]
    head = Medusa(m, 2)
    assert head_draft(head, CHEAP).alpha == 0.5
    head.ranks = [0.75, 0.125]
    drafter = Pace(m, [head_draft(head, CHEAP)], CHEAP)
    assert drafter.past.skills[0].mean() == drafter.rows[0].skills[0].mean() == 0.75


def test_what_an_n_gram_would_have_copied(models):
    """Each row learns its own, and the past of all; old copies fade when there is a new one. A tail goes on
    where nothing was found, so that it is worth what is found in the round after such a one."""
    drafter = Pace(models["llama"], [], CHEAP, fade=0.5)
    drafter.start(4)
    drafter.live, drafter.found = [0, 1, 2, 3], [[5, 6, 7], [5, 6], [], [1]]
    drafter.read(make_round([[5, 6, 9], [5, 6], [3], [2]], [0] * 4, [0] * 4))
    counts = [(row.copied.hits, row.copied.misses) for row in (*drafter.rows, drafter.past)]
    assert counts[:4] == [(2, 1), (2, 0), (0, 0), (0, 1)], "2 of 3, 2 of 2 so far, none, 0 of 1"
    slow = 0.5**SLOWER
    assert counts[4] == pytest.approx((2 * slow * slow + 2 * slow, slow * slow + 1)), "of all, and slowly"
    assert [row.tail() for row in (*drafter.rows, drafter.past)] == [0.0] * 5, "a text has just begun"
    drafter.live, drafter.found = [1, 2], [[], [5, 6], [7, 8, 9], []]
    drafter.read(make_round([[5, 6, 9], [1], [7, 8, 1], [2]], [0] * 4, [0] * 4))
    assert (drafter.rows[0].copied.hits, drafter.rows[1].copied.hits) == (2, 1), "only the live rows learn"
    assert [row.tail() for row in (*drafter.rows, drafter.past)] == [0, 0, 2 / 2, 0, 2 / 2]
    drafter.rests = True            # a rest fades nothing but what it tells of
    drafter.live, drafter.found = [1], [[], [], [], []]
    for _ in range(50):
        drafter.read(make_round([[5], [1], [7], [2]], [0] * 4, [0] * 4))
    assert drafter.rows[1].followed.misses == pytest.approx(2.0) and drafter.rows[1].copied.hits == 1


def test_outcomes_are_counted_by_hand(models):
    """Two rows: one refused at its second token, one accepted whole. Overlaps where there are logits, with
    how sure the draft was; else what became of it."""
    m = models["llama"]
    drafter = Pace(m, [Way("", SelfDraft(m, range(2), 0), lambda n: 0.1)], CHEAP)
    drafter.start(2)
    drafter.way, drafter.pair, drafter.sures = drafter.ways[0], None, []
    q = torch.zeros(2, 3, 9)
    q[:, :, 0] = torch.tensor([[0.5, 1.0, 0.0], [0.25, 0.125, 0.0]])
    r = make_round([[1, 1], [1, 1, 1]], [1, 2], [3, 2], [[0, 0, 0], [0, 0, 0]], q)
    drafter.count(r)
    both = [(row.skills[0].hits, row.skills[0].misses) for row in drafter.rows]
    assert both == [(1, 1), (2, 0)] and drafter.trust[0][5].hits > 2.5
    drafter.past, drafter.trust = Memory([0.5], 0.99), [[Beta() for _ in range(11)]]
    drafter.start(2)
    drafter.sures = [torch.tensor([9, 0]), torch.tensor([9, 1]), torch.tensor([3, 3])]
    r.p[:] = torch.tensor([0.25] + [0.75 / 8] * 8)
    drafter.count(r)
    first, second = (row.skills[0] for row in drafter.rows)
    assert first.hits == pytest.approx(0.5) and first.hits + first.misses == pytest.approx(2)
    assert second.hits == pytest.approx(0.375) and second.hits + second.misses == pytest.approx(2)
    nine, zero, one, three = (drafter.trust[0][tenth].hits for tenth in (9, 0, 1, 3))
    assert (nine, zero, one) == pytest.approx((0.25 * (1 + TRUST), 0.25, 0.125))
    assert three == 0, "what was not proposed was not tested"


def test_the_purse_by_hand(models):
    """A draft of two at .25 and a scored trace, where three tokens were written; then a tail's lost work."""
    m, costs = models["llama"], Costs((1.0,) * 12, 4.0, ((1, 1.0), (17, 3.0)))
    drafter = asked(Pace(m, [self_draft("exit 2", m, range(4), costs)], costs, risk=0.5))
    drafter.way, drafter.tail, drafter.price, drafter.once = drafter.ways[0], False, 0.25, 0.0
    drafter.sures, drafter.scores, r = [None, None], True, make_round([[1, 1, 1]], [2], [2], [[0, 0]])
    drafter.pay(r)
    assert drafter.purse == pytest.approx(STAKE + 3 * 1.5 - 0.5 - 1.25 - SHADOW * 0.25 * 1.25)
    before, drafter.tail, drafter.scores = drafter.purse, True, False
    drafter.pay(make_round([[1]], [0], [4], [[0] * 4]))
    assert drafter.purse == pytest.approx(before + 1.5 - 0.5 - 4 / 16 - 1.5)
    before, drafter.way, drafter.tail, drafter.sures = drafter.purse, drafter.nothing, False, []
    drafter.price = 0.0
    drafter.pay(make_round([[1]], [0], [0]))
    assert drafter.purse == pytest.approx(before + 0.5)


# --- what it decides


def asked(drafter, rows=1, n=10):
    drafter.start(rows)
    drafter.live, drafter.n, drafter.grown, drafter.slope = list(range(rows)), n, 1.0, 0.0
    return drafter


def test_promises_are_the_formula():
    """With one row, blocks for free and no tail they are those of `plan`."""
    generator = random.Random(2)
    for _ in range(40):
        alpha, price = generator.random(), generator.random()
        way = Way("", Drafter(), lambda n, price=price: price)
        drafter = asked(Pace(make(TINY), [way], Costs((1.0,) * 6, 1.0)))
        bill = drafter.bill(way, False)
        promise, (length,) = drafter.promise([alpha], [16], bill, False)
        assert length == plan(alpha, alpha, price, 16)
        assert promise == pytest.approx(sum(alpha**k for k in range(length + 1)) / (length * price + 1))
        assert drafter.promise([alpha], [2], bill, False)[1][0] <= 2


def test_promises_of_blocks_tails_and_rows_by_hand():
    costs = Costs((1.0,) * 6, 2.0, ((1, 1.0), (2, 1.5), (17, 9.0)))
    way = Way("", Drafter(), lambda n: 0.1, None, 0.25)
    drafter = asked(Pace(make(TINY), [way], costs))
    assert [drafter.bill(way, False)(g) for g in range(3)] == pytest.approx([1.0, 1.6, 0.2 + 2.0])
    assert drafter.bill(way, True)(1) == pytest.approx(0.1 + 0.25 + costs.block(2 + TAIL))
    assert asked(drafter, 2).bill(way, False)(1) == pytest.approx(0.1 + costs.block(4) / 1.5), "of two rows"
    drafter.slope = 0.01                # each token makes the next one dearer
    assert drafter.bill(way, False)(2) == pytest.approx((0.2 + costs.block(6) / 1.5) * 1.02)
    bill = [1.0, 1.25, 1.5].__getitem__
    assert drafter.promise([0.5, 0.9], [2, 2], bill, False) == (
        pytest.approx((1.5 + 0.25 * 0 + 1 + 0.9 + 0.81) / 2 / 1.5), [1, 2])
    drafter.rows[0].followed.hits, drafter.rows[0].followed.misses = 6.0, 1.0       # three follow
    promise, lengths = drafter.promise([0.5, 0.0], [2, 2], bill, True)
    assert lengths == [1, 0] and promise == pytest.approx((1 + 0.5 + 0.5 * 3 + 1) / 2 / 1.25)
    drafter.live = [0]
    assert drafter.promise([0.5, 0.9], [2, 0], bill, False) == (pytest.approx(1.5 / 1.25), [1, 0])


def test_one_more_is_drafted_while_its_gain_exceeds_its_price(models):
    """Two rows whose tokens are accepted with .9 and .3, at a rate of 2 tokens a pass and a price of .2: one
    more must promise .4 tokens."""
    drafter = Pace(models["llama"], [], Costs((1.0,) * 12, 1.0, ((1, 1.0), (3, 1.0), (17, 2.4))))
    drafter.check = drafter.checking(drafter.nothing)
    drafter.table, drafter.mean = torch.full((11,), 0.5), torch.tensor([0.9, 0.9])
    drafter.table[10], drafter.reach, drafter.sures = 0.9, torch.ones(2), []
    drafter.rate, drafter.price = 2.0, 0.2
    sure = torch.tensor([[50.0] + [0.0] * 16, [0.0] * 17])      # probability 1, and 1/17
    assert drafter.enough(0, sure).tolist() == [False, False]   # .81 and .45 against .4
    assert drafter.enough(1, sure).tolist() == [False, True]    # .729 and .225 against .4 + .2
    assert drafter.enough(2, sure).tolist() == [False, True]    # .656 against .6
    assert drafter.enough(3, sure).tolist() == [True, True]     # .59
    assert [x.tolist() for x in drafter.sures[:1]] == [[10, 0]]


def test_nothing_is_drafted_where_nothing_pays(models):
    """Exits that cost nearly a whole pass; and the trace is asked for only where it is to be scored, since
    recorded passes have none."""
    m, seen = models["llama"], []
    costs = Costs((1.0,) * 12, 100.0)
    drafter = Pace(m, costs=costs, risk=0.01)
    for state, r in rounds(m, PROMPTS, 20, drafter):
        seen.append((r.draft.tokens.shape[1], bool(r.trace), drafter.scores))
        assert bool(state.taps) == drafter.scores
    assert {K for K, *_ in seen if K} <= {1, 2, 3, 4, 5, 6, 7, 8} and all(a == b for _, a, b in seen)
    assert not [name for name in drafter.chosen if name.startswith("exit")]


def test_a_draft_must_promise_a_little_more_than_plain_decoding(long):
    """Two texts, in which a draft of one token promises 4 % more, and 6 %."""
    m, text = long
    for gain, drafts in ((0.04, False), (0.06, True)):
        way = replace(foretold("known", 1.5 / (1 + gain) - 1, [text], [True]), alpha=0.5)
        drafter = Pace(m, [way], EVEN, risk=0.0, most=1)
        drafter.lookup.found, drafter.saved = lambda state: [[]], 0.0
        next(rounds(m, PROMPTS[:1], 9, drafter))
        assert (drafter.way is way) == drafts


def test_an_experiment_costs_what_it_loses_to_plain_decoding(long):
    """At .5 a token, of which a half is expected to be accepted, it loses nothing on average: where nothing
    drafts, the margin is no loss."""
    m, text = long
    drafter = Pace(m, [foretold("liar", 0.5, [text], [False])], EVEN, risk=0.0, most=1)
    drafter.lookup.found, drafter.purse, drafter.saved = lambda state: [[]], 4.0, 0.05
    next(rounds(m, PROMPTS[:1], 9, drafter))
    assert drafter.way is drafter.ways[0] and drafter.saved == pytest.approx(0.05)


def test_it_rests_where_nothing_promises_a_gain(long):
    """It thinks again after some rounds, or when the text repeats itself; a plain round earns its risk all
    the same."""
    m, text = long
    drafter, thoughts = Pace(m, [foretold("dear", 2.0, [text], [True])], EVEN, risk=0.125), []
    drafter.lookup.found = lambda state: [[text[43] ^ 1] if len(state.known[0]) == 43 else []]
    choose = drafter.choose
    drafter.choose = lambda state: (thoughts.append(len(state.known[0])), choose(state))
    drafter.saved = 0.0
    assert generate(m, PROMPTS[:1], 60, drafter)[1] == 60 and drafter.chosen["nothing"] >= 59
    first = len(PROMPTS[0])
    assert thoughts == [*range(first, 43, REST), 43, *range(44, first + 60, REST)], "it copies once, at 43"
    lost = drafter.chosen.get("n-gram", 0) * (EVEN.block(2) - 1)
    assert drafter.purse == pytest.approx(STAKE + 60 * 0.125 - lost) and drafter.saved == STAKE


def test_experiments_are_saved_for(long, monkeypatch):
    """A way that is never good, at .5 a token: tried at most once in .5 / risk rounds, and not for the stake.
    That it is no good is known beforehand in the next text; once it is forgotten, it is tried again."""
    monkeypatch.setattr(pace, "MARGIN", 0.0)
    m, text = long
    for risk, least, most in ((0.01, 2, 4), (0.05, 3, 20), (0.0, 0, 0)):
        drafter, tried = Pace(m, [foretold("liar", 0.5, [text], [False])], EVEN, risk=risk), []
        drafter.lookup.found = lambda state: [[]]
        for told in (False, True, False):
            if not told:
                drafter.past = Memory([0.5], 0.99)
            sizes = [r.draft.tokens.shape[1] for _, r in rounds(m, PROMPTS[:1], 200, drafter)
                     if drafter.way.name == "liar" and not drafter.tail]
            tried += sizes
            assert len(sizes) == 0 if told else least <= len(sizes) <= most
            assert 0.5 * sum(tried) <= 600 * risk and drafter.purse >= STAKE


def test_a_longest_draft_of_nothing_is_plain_decoding(models):
    m = models["llama"]
    drafter = Pace(m, candidates(m, CHEAP, SKIP), CHEAP, most=0)
    assert generate(m, PROMPTS[:1], 9, drafter)[1] == 9 and drafter.chosen == {"nothing": 9}
    with pytest.raises(ValueError, match="gamma, how many tokens to draft"):
        Pace(m, most=-1)


def test_candidates_and_their_prices(models):
    m, costs = models["llama"], weight_costs(LLAMA)
    ways = candidates(m, costs, SKIP, [1, 2, 3])
    assert [way.name for way in ways] == ["exit 1", "exit 2", "skip set"]
    assert [way.leaves for way in ways] == [1, 2, None]
    for way, subs in zip(ways, (range(2), range(4), SKIP), strict=True):
        assert way.drafter.sublayers == list(subs) and way.drafter.model.share == 3 / 17
        assert way.price(50) == costs.step(subs, 3 / 17, 50) != costs.step(subs, 3 / 17)
    assert ways[1].shared == sum(costs.sublayers[:4]) / costs.whole
    assert ways[2].shared == sum(costs.sublayers[:2]) / costs.whole, "attention 1 is its first gap"
    assert [way.name for way in candidates(m, costs)] == ["exit 1", "exit 2"]
    deep = SimpleNamespace(c=replace(LLAMA, n_layers=24))
    names = [way.name for way in candidates(deep, Costs((1.0,) * 48, 1.0))]
    assert names == ["exit 2", "exit 4", "exit 6", "exit 8"]


def test_scoring_reads_each_head_once(models):
    """Two exits of each head: their rows go through it side by side, as a block twice as wide."""
    m, costs = models["llama"], Costs((1.0,) * 12, 4.0, ((1, 1.0), (3, 2.0)))
    both = candidates(m, costs) + candidates(m, costs, None, [1, 2, 3])
    assert Pace(m, both, costs).scoring_price(1) == pytest.approx(SHADOW * 1.5 * 4 / 16 * (1 + 3 / 17))
    assert Pace(m, both, costs).scoring_price(2) == pytest.approx(SHADOW * 2.5 * 4 / 16 * (1 + 3 / 17))
    assert Pace(m, both, costs).scoring_price(99) == pytest.approx(SHADOW * 99.5 * 4 / 16 * (1 + 3 / 17))
    assert Pace(m, [self_draft("skip", m, SKIP, costs)], costs).scoring_price(1) == 0


@each_family
def test_trained_heads_and_their_prices(models, family):
    """By hand, with all parts of a table different: what stands in the table, and a head's own weights at the
    rate of the blocks."""
    m = models[family]
    c, by = m.c, weight_costs(m.c)
    costs = Costs(tuple(2.0 * x for x in by.sublayers), by.head, ((1, 1.0), (17, 2.0)), 3.0, 10, c.window)
    kangaroo, block, _, medusa, own_head, transfer, prophet = some_heads(m)
    whole, ids = costs.price(range(12), 1.0, 50), [1, 2, 3]

    def own(head):
        return 2.0 * sum(p.numel() for p in head.weights.parameters())
    for head, E, missed in ((kangaroo, 2, costs.sublayers[0] * 1.25), (block, 1, costs.sublayers[0] * 1.25),
                            (Eagle(m), 0, sum(costs.sublayers[:2]) * 0.25)):    # an eagle reads them with D
        way = head_draft(head, costs, ids)
        want = costs.price(range(2 * E), 3 / 17, 50) + own(head) + 3.0 * 40
        assert way.price(50) == pytest.approx(want / whole)
        assert way.shared == sum(costs.sublayers[: 2 * E]) / costs.whole and way.rides == (0.0, 0)
        way.drafter.unread = 5
        assert way.once(costs.block) == pytest.approx(missed / costs.whole)
        assert way.once(lambda T: 9.0) > way.once(costs.block), "of a larger batch it may be more"
    for head, steps in ((medusa, 3), (prophet, MOST)):
        way = head_draft(head, costs)
        each = own(head) / (3 if steps == 3 else 1)
        assert way.price(50) == pytest.approx((costs.head + each) / whole)
        assert (way.most, way.shared, way.once(costs.block)) == (steps, 0.0, 0.0)
    assert head_draft(own_head, costs, ids).price(50) == pytest.approx(own(own_head) / 2 / whole)
    way = head_draft(transfer, costs)
    assert way.price(50) == pytest.approx(costs.head / whole) and way.most == 2
    assert way.once(costs.block) == pytest.approx(own(transfer) / costs.whole)
    assert way.rides == (pytest.approx(sum(costs.sublayers[6:]) / costs.whole), 2)
    drafter = asked(Pace(m, [way], costs))
    above, once = way.rides[0], way.once(costs.block)
    want = 2 * way.price(10) + once + costs.block(3) + above * (costs.block(9) - costs.block(3))
    assert drafter.bill(way, False)(2) == pytest.approx(want), "two rows ride along with each of three tokens"
    names = [way.name for way in candidates(m, costs, SKIP, None, some_heads(m)[:2])]
    assert names == ["exit 1", "exit 2", "skip set", "kangaroo", "exit block"]


def test_a_head_with_a_draft_vocabulary_drafts_nothing_else(models):
    """But for one with output heads of its own; and the head itself stays as it was."""
    m, ids = models["llama"], [4, 9, 0, 2, 16, 3]
    for head in some_heads(m):
        for used in (shorter(head, ids), head):
            wide = used is head or head.shape.get("own_head", False)
            for _, r in rounds(m, PROMPTS[:1], 6, used.drafter(1), warm, Coins(1)):
                if r.draft.tokens.shape[1]:
                    assert (r.draft.q[0, 0].nonzero()[:, 0].tolist() == sorted(ids)) != wide


def test_a_head_is_not_asked_for_more_tokens_than_it_has_steps(models):
    m = models["llama"]
    drafter = Pace(m, [head_draft(Medusa(m, 2), CHEAP)], CHEAP, risk=0.5)
    drafter.past.skills[0].hits = 100.0
    lengths = [int(r.proposed[0]) for _, r in rounds(m, PROMPTS[:1], 30, drafter)
               if drafter.way is drafter.ways[0] and not drafter.tail]
    assert max(lengths) == 2


def test_rows_that_have_to_ride_along_get_a_round_for_it(models, monkeypatch):
    """A transfer that is tried out drafts in the round after the one in which its rows rode along."""
    monkeypatch.setattr(pace, "MARGIN", 0.0)
    m = models["llama"]
    way = head_draft(wild(Transfer(m, 3, 2)), EVEN)
    drafter, seen = Pace(m, [way], EVEN, risk=0.0), []
    way.price, drafter.purse = (lambda n: 0.25), STAKE + 1.2       # it promises nothing, so it is tried out
    drafter.lookup.found = lambda state: [[]]
    drafter.saved = 0.35        # of which the rows and the draft after them take .347, so it is tried once
    for _, r in rounds(m, PROMPTS[:1], 12, drafter):
        seen.append((drafter.way is way, int(r.proposed[0]), "extra" in r.trace))
    assert seen[0] == (True, 0, True), "one round for the rows, one to draft"
    assert seen[1][0] and seen[1][1] > 0 and seen[1][2]
    assert not any(mine for mine, *_ in seen[3:]), "there is nothing left to try it again"


def test_what_a_kangaroo_missed_it_reads_at_once(models):
    """While others draft it reads nothing; before it drafts again, all of it in one pass."""
    m = models["gemma2"]
    head = wild(Kangaroo(m, 2))
    drafter, passes, run = head.drafter(2), [], head.own.run
    head.own.run = lambda x, *args, **kwargs: passes.append(x.shape[1]) or run(x, *args, **kwargs)
    turns = iter([Drafter()] * 7)
    asking = Wrapper(drafter)
    asking.propose = lambda state: next(turns, drafter).propose(state)
    for i, (state, _) in enumerate(rounds(m, PROMPTS[:2], 14, asking)):
        if i == 6:
            assert passes == [8] and drafter.unread == 7, "the prompt, and seven tokens to come"
        if i == 7:
            assert passes == [8, 7, 1, 1] and [len(text) for text in state.known] >= [16, 10]
            break


def test_only_the_target_itself_can_teach(models):
    with pytest.raises(ValueError, match="give it the model that decodes"):
        generate(models["llama"], PROMPTS, 4, Pace(make(LLAMA, 9)))


def test_a_way_that_is_refused_gets_fewer_tokens_than_the_purse_holds(models):
    """At the start two passes may be lost: eight tokens of .25, not sixteen."""
    m = models["llama"]
    drafter = Pace(m, [Way("sure", SelfDraft(m, range(2), 0), lambda n: 0.25)], EVEN)
    drafter.past.skills[0].hits = 100.0
    _, r = next(rounds(m, PROMPTS[:1], 40, drafter))
    assert 1 <= r.draft.tokens.shape[1] <= 8 and drafter.lengths == [8]


# --- the benchmark


def test_the_stream_changes_its_kind():
    tokenizer, c = expected.byte_tokenizer(), replace(LLAMA, bos=None)
    prompts, kinds = bench_dynamic.stream(tokenizer, c, 4)
    assert kinds == [name for name in SETS for _ in range(4)] * 2 and len(prompts) == 32
    for name in SETS:
        mine = [ids for ids, kind in zip(prompts, kinds, strict=True) if kind == name]
        assert mine == prompt_ids(name, tokenizer, c)
    assert bench_dynamic.stream(tokenizer, c, 1)[1] == list(SETS) * 2


def test_the_stream_on_a_tiny_model(models, tmp_path):
    """Every method writes the same text; regret, choices and alphas are what they are called."""
    m, a = models["llama"], SimpleNamespace(new=6, dtype="float64", repeats=1, quick=False, model="tiny",
                                            machine="here", only=None)
    heads = [wild(Kangaroo(m, 2)), wild(Medusa(m, 3)), wild(Transfer(m, 3, 2))]
    bench = bench_dynamic.Stream(a, {"float64": (m, None)}, PROMPTS, {}, {"float64": heads})
    bar = SimpleNamespace(update=lambda: None, reset=lambda n: None, set_postfix_str=lambda *a, **b: None)
    kinds, costs = ["stories", "stories", "code", "code"], weight_costs(m.c)
    column = bench_dynamic.column(a, bench, kinds, SKIP, [4, 9, 0, 2], costs, bar)
    rows, choices, alphas, found, reached = column
    fixed = [name for name in rows if "gamma" in name and "EESD" not in name] + ["n-gram"]
    assert {"plain", "SWIFT", "CLaSp", "DEL", "Pace", "exit 1, gamma 2", "skip set, gamma 2",
            "medusa, gamma 3", "transfer, gamma 2", "kangaroo, gamma 3", "exit 1, gamma 2, n-gram tail",
            "exit 1, draft vocabulary, gamma 2"} <= set(rows) and len(rows) == len(fixed) + 10 + 5 + 1
    assert found == [] and len(choices) == 4 and all(sum(rounds.values()) for rounds in choices)
    for key, source in (("clock", "ratios"), ("weights", "read")):
        best = [max(1.0, *(rows[name][source][i] for name in fixed)) for i in range(4)]
        for r in rows.values():
            regret = math.prod(b / x for b, x in zip(best, r[source], strict=True)) ** 0.25 - 1
            assert r[key]["regret"] == pytest.approx(regret) and list(r[key]["sets"]) == ["stories", "code"]
            assert r[key]["sets"]["code"] == pytest.approx(math.sqrt(r[source][2] * r[source][3]))
        of = {name: r[key]["ratio"] for name, r in rows.items()}
        top = max(of[name] for name in fixed)
        assert reached[key]["over it"] == pytest.approx(of["Pace"] / top)
        assert reached[key]["over SWIFT"] == pytest.approx(of["Pace"] / of["SWIFT"])
        code = max(rows[name][key]["sets"]["code"] for name in fixed)
        share = reached[key]["of each kind's best"]["code"]
        assert share == pytest.approx(rows["Pace"][key]["sets"]["code"] / code)
    assert rows["plain"]["read"] == pytest.approx([1.0] * 4) and rows["plain"]["clock"]["ratio"] == 1
    for name, r in rows.items():
        assert ("deciding" in r) == (name in ("SWIFT", "CLaSp", "DEL", "DEL, few exits", "Pace"))
        assert 0 < r.get("deciding", 0.5) < 1
    text = bench_dynamic.markdown(a, {"greedy": column}, kinds)
    assert text.count("\n| Pace |") == 1 and text.count("- Pace by the ") == 2
    assert "| alpha of exit | 1 | 2 | 3 | 4 | 5 |" in text and len(alphas) == 5
    plots.choices({"greedy": choices}, kinds, "tiny", tmp_path / "choices.part")
    assert image.imread(tmp_path / "choices.part", "png").shape[2] == 4, "whatever the file is called"
    a.only = ["skip"]
    methods, names = bench_dynamic.all_methods(a, bench, SKIP, None, costs, {})
    assert names == ["n-gram", "skip set, gamma 2"] and set(methods) == {*names, *bench_dynamic.NEEDED}


def test_alphas_are_those_of_the_texts(models):
    """What DEL expected at the start of each prompt, and what the texts say, after the prompt only."""
    m, prompts = models["gemma2"], PROMPTS[:2]
    a = SimpleNamespace(new=9, dtype="float64")
    bench, thoughts = bench_dynamic.Stream(a, {"float64": (m, None)}, prompts, {}, {"float64": []}), {}
    methods, texts = {"plain": Method(gamma=0)}, [oracle(m, ids, 9) for ids in prompts]
    methods["plain"].samples = {i: [SimpleNamespace(ids=text)] for i, text in enumerate(texts)}
    thoughts["DEL"] = [SimpleNamespace(alphas=[[0.2, 0.3, 0.4, 0.5, 0.6], [0.4, 0.3, 0.4, 0.5, 0.8]])]
    found = bench_dynamic.alphas_of(bench, methods, thoughts)
    assert [x for x, _ in found.values()] == pytest.approx([0.3, 0.3, 0.4, 0.5, 0.7])
    for e, (_, alpha) in found.items():
        hits = []
        for ids, text in zip(prompts, texts, strict=True):
            whole = Teacher(m, ids + text).acceptance(early_exit(6, e)).tolist()
            hits.append(sum(whole[len(ids) - 1 :]) / len(whole[len(ids) - 1 :]))
        assert alpha == pytest.approx(sum(hits) / 2)


def test_what_is_timed_is_metered_with_the_matrices_of_heads(models, monkeypatch):
    """By hand: a pass for each round, and for each drafted token a matrix and the output head; an eagle also
    reads its block."""
    m, costs = models["llama"], weight_costs(LLAMA)
    a, heads = SimpleNamespace(new=12, dtype="float64"), [Medusa(m, 3), Transfer(m, 3, 2)]
    bench = bench_dynamic.Stream(a, {"float64": (m, None)}, PROMPTS, {}, {"float64": heads})
    s = bench.write(lambda model, small: heads[0].drafter(2), 0)
    proposed = sum(int(r.draft.tokens.shape[1]) for _, r in rounds(m, PROMPTS[:1], 12, heads[0].drafter(2)))
    assert s.read == pytest.approx(s.passes + proposed * (32 * 32 + costs.head) / costs.whole)
    s = bench.write(lambda model, small: heads[1].drafter(0), 0)
    assert s.read == pytest.approx(12 * (1 + 2 * 32 * 32 / costs.whole))
    eagle, steps = Eagle(m), []
    bench.heads["float64"].append(eagle)
    join = Eagle.join
    monkeypatch.setattr(Eagle, "join", lambda *args: steps.append(32 * 32) or join(*args))
    s = bench.write(lambda model, small: After(eagle.drafter(2), steps.clear), 0)
    own = sum(steps) + len(steps) * sum(costs.sublayers[:2]) + s.proposed * costs.head
    assert len(steps) >= s.proposed > 0 and s.read == pytest.approx(s.passes + own / costs.whole)
    assert "after" not in vars(heads[0]) and "run" not in vars(m), "the meter is taken away"


def test_what_lives_through_the_stream(models):
    """One drafter for a whole run, and another one for the next; how long it thinks, and what it chose."""
    m, seen = models["llama"], []
    method = bench_dynamic.living(Pace, seen)
    first = method.start()
    assert first(m, None) is first(m, None) is seen[0] and method.start()(m, None) is seen[1]
    for prompt in PROMPTS[:2]:
        list(rounds(m, [prompt], 9, seen[0]))
    pace = seen[0].drafters[0]
    counts = seen[0].choices()
    assert sum(sum(rounds.values()) for rounds in counts) == sum(pace.chosen.values())
    assert len(counts) == 2 and 0 < seen[0].seconds < 60
