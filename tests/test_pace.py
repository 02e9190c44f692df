"""Pace never changes the text, never loses more than it may, and chooses what promises most."""
import random
from dataclasses import replace
from types import SimpleNamespace

import promises
import pytest
import torch
from test_control import Say
from test_heads import wild
from tiny import LLAMA, PROMPTS, TINY_GEMMA, each_family, make, make_round, warm

from control import MOST, Beta, Costs, plan, weight_costs
from layerskip import ShortHead, without
from methods import pace
from methods.heads import M2R2, Eagle, Kangaroo, Medusa, Prophet, Transfer, count, shorter
from methods.pace import STAKE, TAIL, TRUST, Memory, Pace, Way, candidates, head_draft, self_draft
from sampling import Coins
from search import Teacher
from speculative import Drafter, ModelDraft, generate, rounds, wanted

SKIP, IDS = without(6, attn=[1, 4], mlp=[2]), [4, 9, 0, 2, 16, 3]
CHEAP = Costs((0.02,) * 8 + (2.5,) * 4, 0.01)   # self-drafts are nearly free
EVEN = Costs((3.0,) * 4, 1.0)    # of a model of two blocks


def with_heads(m):
    """Pace with ways of all kinds, with and without a draft vocabulary."""
    heads = [wild(head) for head in (Kangaroo(m, 2), M2R2(m, 2), Medusa(m, 3), Transfer(m, 3, 2))]
    ways = candidates(m, CHEAP, SKIP, None, heads) + candidates(m, CHEAP, None, IDS, heads)
    return Pace(m, ways, CHEAP, risk=0.5)


def cheap(m):
    model = make(replace(m.c, n_layers=1), 5, m.tok.device)
    ways = [*candidates(m, CHEAP, SKIP), Way("small", ModelDraft(model, 0), lambda n: 0.1)]
    return Pace(m, ways, CHEAP, risk=0.5)


PACES = {"by weights": Pace, "cheap": cheap, "heads": with_heads}
test_greedy_identity = promises.greedy_identity(PACES)
test_rows_equal_solo_runs = promises.rows_equal_solo_runs(PACES, ["cheap"])
test_poison = promises.poison(PACES, ["cheap", "heads"], 14)
test_short_answers = promises.short_answers(PACES, ["cheap"])
test_damaged_weights = promises.damaged_weights(PACES, ["cheap"])


def tiny_pace(m):
    costs = Costs((0.02,) * 5 + (9.0,), 0.0)
    ways = [self_draft("exit 1", m, range(2), costs), head_draft(wild(Transfer(m, 1, 2)), costs)]
    return Pace(m, ways, costs, most=2, risk=0.9)


test_exact_law = promises.exact_law({"gemma2": (TINY_GEMMA, tiny_pace)})


# --- what it may lose


@pytest.fixture(scope="module")
def long():
    """A model and a text with 200 new tokens that it writes."""
    m = make(replace(LLAMA, n_layers=2, max_len=256))
    return m, PROMPTS[0] + generate(m, PROMPTS[:1], 200)[0][0]


def foretold(name, price, text, *good, **more):
    """The way of a draft that knows the text where the row's good(length), and is wrong elsewhere."""
    def say(state):
        rows = zip(good, state.known, wanted(state, drafter.rule)[0], strict=True)
        return [[(t + (not right(len(known)))) % 17 for t in text[len(known) : len(known) + most]]
                for right, known, most in rows]
    drafter = Say(say)
    return Way(name, drafter, lambda n: price, stops=False, **more)


def always(n):
    return True


def never(n):
    return False


def begun(m, ways, costs=EVEN, purse=STAKE, saved=STAKE, **flags):
    """A Pace that owns so much, and never finds an n-gram."""
    drafter = Pace(m, ways, costs, **flags)
    drafter.lookup.found = lambda state: [[] for _ in state.known]
    drafter.purse, drafter.saved = purse, saved
    return drafter


FLAT, RISING = ((1, 1.0),), ((1, 1.0), (17, 3.0))


@pytest.mark.parametrize("price, blocks, good", [
    (0.01, FLAT, [never]), (0.3, RISING, [never]), (3.0, FLAT, [never]),
    (0.3, RISING, [lambda n: n < 70]), (0.3, FLAT, [always, never]), (0.3, FLAT, [never, always])])
def test_it_loses_no_more_than_it_may(long, price, blocks, good):
    """By the prices alone, from the start to any round. What a row wins it wins for itself only."""
    m, text = long
    costs, B, taken, won, written = replace(EVEN, blocks=blocks), len(good), 0.0, 0.0, 0
    way = foretold("way", price, text, *good)
    drafter = Pace(m, [way], costs)
    for state, r in rounds(m, [PROMPTS[0]] * B, 200, drafter):
        K = r.draft.tokens.shape[1]
        drafted = (max(drafter.pair.drafted) if drafter.pair else K) * (drafter.way is way)
        taken += price * drafted + costs.block(B * (K + 1)) / costs.block(B)
        written = min(map(len, state.known)) - len(PROMPTS[0])
        won = max(won, written - taken)
        assert taken <= written * 1.01 + STAKE + 1e-9 and drafter.purse > -1e-9
    assert price > 1 or "way" in drafter.chosen, "it was never tried"
    if good[0](0) and B == 1:   # most of what it won while it was good is kept
        assert won > 10 and taken < 200 - 0.5 * won


def test_what_is_tried_out_by_hand(models):
    """A token for .5 that is accepted once in four times: a try loses .25 on average, .5 at worst. Both
    must be there, the worst beside the stake; and it must be able to win its loss back in five rounds.
    What is too dear ever to be tried stops no other."""
    dear = Way("dear", Drafter(), lambda n: 0.0, once=lambda block: 3.5)
    way, beliefs = Way("way", Drafter(), lambda n: 0.5), [Beta(0.0, 2.0)]
    for saved, purse, high, tried, left, due in (
            (0.3, 2.6, 1.3, True, 0.05, 0.0), (0.2, 2.6, 1.3, False, 0.2, 0.25),
            (0.3, 2.4, 1.3, False, 0.3, 0.25), (0.3, 2.6, 1.09, False, 0.3, 0.0)):
        drafter = asked(Pace(models["llama"], [dear, way], Costs((1.0,) * 12, 1.0)))
        drafter.way, drafter.tail, drafter.lengths, drafter.rate = drafter.nothing, False, [0], 1.05
        drafter.saved, drafter.purse = saved, purse
        drafter.experiment([(9.0, dear, beliefs, [1]), (high, way, beliefs, [1])])
        assert (drafter.way is way, drafter.lengths) == (tried, [int(tried)])
        assert (drafter.saved, drafter.due) == pytest.approx((left, due))


def test_it_changes_to_what_is_better_and_remembers(long):
    """Two ways, each right where the other one is wrong; and what was learnt outlives the run."""
    m, text = long
    ways = [foretold("early", 0.2, text, lambda n: n < 100),
            foretold("late", 0.2, text, lambda n: n > 100)]
    drafter, used = begun(m, ways, risk=0.1), []
    for state, r in rounds(m, PROMPTS[:1], 200, drafter):
        used += [(drafter.way.name, len(state.known[0]))] * (int(r.accepted) > 1)
    assert {name for name, n in used if n < 100} == {"early"}
    assert sum(name == "late" for name, _ in used) > 3, "it found the other one"
    early, forgotten = (memory.skills[0].hits for memory in (drafter.past, drafter.rows[0]))
    assert early > 2 * forgotten > 0, "what outlives the text fades slower"
    known = [skill.mean() for skill in drafter.past.skills]
    drafter.start(1)
    assert [skill.mean() for skill in drafter.rows[0].skills] == known != [0.5, 0.5]


@pytest.mark.parametrize("price, alpha, most, drafted", [
    (1.5 / 1.04 - 1, 0.5, 1, 0), (1.5 / 1.06 - 1, 0.5, 1, 1), (0.25, 1.0, 16, 8), (0.01, 1.0, 16, 16)
], ids=["a gain of 4 %", "of 6 %", "as far as two passes pay", "as far as it goes"])
def test_the_first_draft(long, price, alpha, most, drafted):
    m, text = long
    drafter = begun(m, [foretold("way", price, text, always, alpha=alpha)], saved=0.0, most=most)
    _, r = next(rounds(m, PROMPTS[:1], 40, drafter))
    assert r.draft.tokens.shape[1] == drafted


def test_it_rests_where_nothing_promises_a_gain(long):
    """It thinks again after eight rounds, or when the text repeats itself, and earns meanwhile."""
    m, text = long
    drafter, thoughts = begun(m, [foretold("dear", 2.0, text, always)], saved=0.0, risk=0.125), []
    wrong = (text[43] + 1) % 17
    drafter.lookup.found = lambda state: [[wrong] if len(state.known[0]) == 43 else []]
    choose = drafter.choose
    drafter.choose = lambda state: (thoughts.append(len(state.known[0])), choose(state))
    assert generate(m, PROMPTS[:1], 60, drafter)[1] == 60
    assert thoughts == [*range(8, 43, 8), 43, *range(44, 68, 8)], "it finds a copy at 43"
    assert drafter.purse == pytest.approx(STAKE + 60 * 0.125) and drafter.saved == STAKE


def test_the_trace_is_asked_for_only_where_it_is_to_be_scored(models):
    """Since recorded passes have none."""
    drafter, scored = Pace(models["llama"], costs=CHEAP, risk=0.2), []
    for state, r in rounds(models["llama"], PROMPTS, 30, drafter):
        scored.append(drafter.scores)
        assert bool(r.trace) == bool(state.taps) == drafter.scores
    assert {True, False} == set(scored)


# --- what it knows


@each_family
def test_a_trace_tells_of_every_exit(models, monkeypatch, family):
    """Whatever drafts: the counts are what `Teacher` finds, which drafts at each place."""
    m = models[family]
    monkeypatch.setattr(Pace, "experiment", lambda self, doubted: setattr(self, "scores", True))
    exits = [(range(4), m), (range(10), m), (range(6), ShortHead(m, IDS))]
    ways = [self_draft("", head, subs, CHEAP) for subs, head in exits]
    drafter = Pace(m, ways, CHEAP, risk=50.0, fade=1.0)
    *_, (state, _) = rounds(m, PROMPTS, 12, drafter, warm, Coins(5))
    for row, prompt, text in zip(drafter.rows, PROMPTS, state.known, strict=True):
        teacher, n = Teacher(m, text, warm), len(prompt)
        for skill, (subs, head) in zip(row.skills, exits, strict=True):
            a = teacher.acceptance(subs, head)
            hits = float(a[:n].sum() + a[n - 1 : len(text) - 1].sum())
            assert skill.hits == pytest.approx(hits, abs=1e-5)
            assert skill.hits + skill.misses == pytest.approx(len(text))


def test_a_draft_is_taken_at_its_word_until_it_is_known_better(models):
    """By tenths of how sure it was, each of which fades by itself."""
    drafter = Pace(models["llama"], [Way("", Drafter(), lambda n: 0.1)], CHEAP)
    assert [beta.mean() for beta in drafter.trust[0]] == pytest.approx(
        [0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95, 0.95])
    for hit, sure in ((0.75, 0.99), (0.0, 0.05), (1.0, 0.9)):
        drafter.learn(0, 0, hit, sure)
    assert drafter.trust[0][9].mean() == pytest.approx((0.75 * TRUST + 1 + 1.9) / (TRUST + 1 + 2))
    assert drafter.trust[0][0].mean() == pytest.approx(0.1 / 3)
    for memory in (drafter.past, drafter.rows[0]):
        assert (memory.skills[0].hits, memory.skills[0].misses) == (1.75, 1.25)


def test_what_an_n_gram_would_have_copied(models):
    """Each row learns its own. A tail goes on where nothing was found, so that it is worth what is
    found in the round after such a one."""
    drafter = Pace(models["llama"], [], CHEAP, fade=0.5)
    drafter.start(4)
    drafter.live, drafter.found = [0, 1, 2, 3], [[5, 6, 7], [5, 6], [], [1]]
    drafter.read(make_round([[5, 6, 9], [5, 6], [3], [2]], [0] * 4, [0] * 4))
    counts = [(row.copied.hits, row.copied.misses) for row in drafter.rows]
    assert counts == [(2, 1), (2, 0), (0, 0), (0, 1)], "2 of 3, 2 of 2 so far, none, 0 of 1"
    assert drafter.past.copied.hits < 4, "old copies fade when there are new ones"
    drafter.live, drafter.found = [1, 2], [[], [5, 6], [7, 8, 9], []]
    drafter.read(make_round([[5, 6, 9], [1], [7, 8, 1], [2]], [0] * 4, [0] * 4))
    assert drafter.rows[1].copied.hits == 1
    assert [row.tail() for row in drafter.rows] == [0, 0, 2 / 2, 0]
    drafter.live, drafter.found = [1], [[]] * 4
    for _ in range(50):
        drafter.read(make_round([[5], [1], [7], [2]], [0] * 4, [0] * 4))
    assert drafter.rows[1].followed.misses == pytest.approx(2.0)


def test_outcomes_are_counted_by_hand(models):
    """One row refused at its second token, one accepted whole. Overlaps where there are logits,
    with how sure the draft was; else what became of it."""
    drafter = asked(Pace(models["llama"], [Way("", Drafter(), lambda n: 0.1)], CHEAP), 2)
    drafter.way, drafter.pair, drafter.sures = drafter.ways[0], None, []
    q = torch.zeros(2, 3, 9)
    q[:, :, 0] = torch.tensor([[0.5, 1.0, 0.0], [0.25, 0.125, 0.0]])
    r = make_round([[1, 1], [1, 1, 1]], [1, 2], [3, 2], [[0, 0, 0], [0, 0, 0]], q)
    drafter.count(r)
    assert [(row.skills[0].hits, row.skills[0].misses) for row in drafter.rows] == [(1, 1), (2, 0)]
    drafter.past, drafter.trust = Memory([0.5], 0.99), [[Beta() for _ in range(11)]]
    drafter.start(2)
    drafter.sures = [torch.tensor([9, 0]), torch.tensor([9, 1]), torch.tensor([3, 3])]
    r.p[:] = torch.tensor([0.25] + [0.75 / 8] * 8)
    drafter.count(r)
    assert [row.skills[0].hits for row in drafter.rows] == pytest.approx([0.5, 0.375])
    assert [row.skills[0].misses for row in drafter.rows] == pytest.approx([1.5, 1.625])
    hits = [drafter.trust[0][tenth].hits for tenth in (9, 0, 1, 3)]
    assert hits == pytest.approx([0.25 * (1 + TRUST), 0.25, 0.125, 0])


# --- prices, by hand


def asked(drafter, rows=1, n=10):
    drafter.start(rows)
    drafter.live, drafter.n, drafter.grown, drafter.slope = list(range(rows)), n, 1.0, 0.0
    return drafter


def test_the_purse_by_hand(models):
    """A draft of two at .25 and a scored trace, where three tokens were written; then a tail's lost
    work, in a text where a pass takes twice as long, and .01 more with each token."""
    m, costs = models["llama"], Costs((1.0,) * 12, 4.0, ((1, 1.0), (17, 3.0)))
    drafter = asked(Pace(m, [self_draft("exit 2", m, range(4), costs)], costs, risk=0.5))
    drafter.way, drafter.tail, drafter.price, drafter.once = drafter.ways[0], False, 0.25, 0.125
    drafter.sures, drafter.scores = [None, None], True
    drafter.pay(make_round([[1, 1, 1]], [2], [2], [[0, 0]]))
    assert drafter.purse == pytest.approx(STAKE + 3 * 1.5 - 0.125 - 0.5 - 1.25 - 1.5 * 0.25 * 1.25)
    before, drafter.tail, drafter.scores = drafter.purse, True, False
    drafter.grown, drafter.slope = 2.0, 0.01
    drafter.pay(make_round([[1]], [0], [4], [[0] * 4]))
    taken = (0.125 + 0.5 + 4 / 16 + 1.5) * 1.04
    assert drafter.purse == pytest.approx(before + (1.5 - taken) * 2)


def test_a_longer_text_makes_passes_dearer(models):
    drafter = Pace(models["llama"], [], Costs((1.0,) * 12, 8.0, slot=0.1))
    drafter.look(SimpleNamespace(known=[[1] * 5, [1] * 50]))
    assert (drafter.n, drafter.grown, drafter.slope) == (50, 50 / 20, pytest.approx(0.6 / 50))


def test_promises_are_the_formula(models):
    """With one row, blocks for free and no tail they are those of `plan`."""
    generator, drafter = random.Random(2), asked(Pace(models["llama"], []))
    for _ in range(40):
        alpha, price = generator.random(), generator.random()
        bill = lambda g, price=price: g * price + 1  # noqa: E731
        promise, (length,) = drafter.promise([alpha], [16], bill, False)
        assert length == plan(alpha, alpha, price, 16)
        assert promise == pytest.approx(sum(alpha**k for k in range(length + 1)) / bill(length))


def test_promises_of_blocks_tails_and_rows_by_hand(models):
    costs = Costs((1.0,) * 12, 2.0, ((1, 1.0), (2, 1.5), (17, 9.0)))
    way = Way("", Drafter(), lambda n: 0.1, None, 0.25)
    drafter = asked(Pace(models["llama"], [way], costs))
    assert [drafter.bill(way, False)(g) for g in range(3)] == pytest.approx([1.0, 1.6, 0.2 + 2.0])
    assert drafter.bill(way, True)(1) == pytest.approx(0.1 + 0.25 + costs.block(2 + TAIL))
    assert asked(drafter, 2).bill(way, False)(1) == pytest.approx(0.1 + costs.block(4) / 1.5)
    drafter.slope = 0.01                # each token makes the next one dearer
    assert drafter.bill(way, False)(2) == pytest.approx((0.2 + costs.block(6) / 1.5) * 1.02)
    bill = [1.0, 1.25, 1.5].__getitem__
    promise, lengths = drafter.promise([0.5, 0.9], [2, 2], bill, False)
    assert lengths == [1, 2] and promise == pytest.approx((1.5 + 1 + 0.9 + 0.81) / 2 / 1.5)
    drafter.rows[0].followed = Beta(6.0, 1.0)       # three follow
    promise, lengths = drafter.promise([0.5, 0.0], [2, 2], bill, True)
    assert lengths == [1, 0] and promise == pytest.approx((1 + 0.5 + 0.5 * 3 + 1) / 2 / 1.25)
    drafter.live = [0]
    assert drafter.promise([0.5, 0.9], [2, 0], bill, False) == (pytest.approx(1.5 / 1.25), [1, 0])


def test_one_more_is_drafted_while_its_gain_exceeds_its_price(models):
    """Two rows, at a rate of 2 tokens a pass and a price of .2: one more must promise .4 tokens."""
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
    # two exits of each of two heads are scored: they go through it as a block twice as wide
    costs = Costs((1.0,) * 12, 4.0, ((1, 1.0), (3, 2.0)))
    both = candidates(m, costs) + candidates(m, costs, None, [1, 2, 3])
    assert Pace(m, both, costs).scoring_price(2) == pytest.approx(1.5 * 2.5 * 4 / 16 * (1 + 3 / 17))


@each_family
def test_trained_heads_and_their_prices(models, family):
    """All parts of the table are different; a head's own weights cost what those of the blocks do."""
    m = models[family]
    by = weight_costs(m.c)
    twice = tuple(2.0 * x for x in by.sublayers)
    costs = Costs(twice, by.head, ((1, 1.0), (17, 2.0)), 3.0, 10, m.c.window)
    whole, slots = costs.price(range(12), 1.0, 50), 3.0 * 40
    for head, E, missed in ((Kangaroo(m, 2), 2, costs.sublayers[0] * 1.25),
                            (Eagle(m), 0, sum(costs.sublayers[:2]) * 0.25)):    # with D
        way = head_draft(head, costs, [1, 2, 3])
        trunk = costs.price(range(2 * E), 3 / 17, 50)
        assert way.price(50) == pytest.approx((trunk + 2 * count(head) + slots) / whole)
        assert way.shared == sum(costs.sublayers[: 2 * E]) / costs.whole
        way.drafter.unread = 5
        assert way.once(costs.block) == pytest.approx(missed / costs.whole)
    for head, steps in ((Medusa(m, 3), 3), (Prophet(m, 1), MOST)):
        way, own = head_draft(head, costs), 2 * count(head) / (3 if steps == 3 else 1)
        assert way.price(50) == pytest.approx((costs.head + own) / whole)
        assert (way.most, way.shared, way.once(costs.block), way.alpha) == (steps, 0.0, 0.0, 0.5)
    own_head = Medusa(m, 2, True)
    own_head.ranks = [0.75, 0.125]
    way = head_draft(own_head, costs, [1, 2, 3])
    assert way.price(50) == pytest.approx(count(own_head) / whole) and way.alpha == 0.75
    adapters = M2R2(m, 2)
    once = head_draft(adapters, costs).once(costs.block)
    assert once == pytest.approx(2 * count(adapters) / costs.whole)
    way = head_draft(Transfer(m, 3, 2), costs)
    above, own = sum(costs.sublayers[6:]) / costs.whole, 2 * count(Transfer(m, 3, 2)) / costs.whole
    assert way.price(50) == pytest.approx(costs.head / whole) and way.most == 2
    drafter = asked(Pace(m, [way], costs))
    riding = above * (costs.block(9) - costs.block(3))      # two rows beside each of three tokens
    assert drafter.bill(way, False)(2) == pytest.approx(
        2 * way.price(10) + own + costs.block(3) + riding)


# --- heads


def test_a_head_is_asked_for_what_it_can_say(models):
    """For no more tokens than it has steps, and for none but those of its draft vocabulary."""
    m = models["llama"]
    drafter = begun(m, [head_draft(wild(Medusa(m, 2)), CHEAP, IDS)], CHEAP, risk=0.5)
    drafter.past.skills[0].hits = 100.0
    drafts = [r.draft for _, r in rounds(m, PROMPTS[:1], 20, drafter, warm, Coins(1))]
    drafts = [draft for draft in drafts if draft.tokens.shape[1]]
    assert max(draft.tokens.shape[1] for draft in drafts) == 2
    assert all(draft.q[0, 0].nonzero()[:, 0].tolist() == sorted(IDS) for draft in drafts)
    head = Medusa(m, 2)
    assert head.model is m and shorter(head, IDS).model is not m, "the head itself stays as it was"


def test_rows_that_have_to_ride_along_get_a_round_for_it(models, monkeypatch):
    """A transfer that is tried out drafts in the round after the one in which its rows rode."""
    monkeypatch.setattr(pace, "MARGIN", 0.0)
    m = models["llama"]
    costs = Costs((1.0,) * 12, 1.0)
    way = head_draft(wild(Transfer(m, 3, 2)), costs)
    way.price = lambda n: 0.25          # it promises nothing, so it is tried out
    drafter = begun(m, [way], costs, STAKE + 1.2, 0.35, risk=0.0)   # enough for one try
    seen = [(drafter.way is way, int(r.proposed[0]) > 0, "extra" in r.trace)
            for _, r in rounds(m, PROMPTS[:1], 12, drafter)]
    assert seen[:2] == [(True, False, True), (True, True, True)]
    assert not any(mine for mine, *_ in seen[3:]), "there is nothing left to try it again"


def test_what_makes_no_sense(models):
    m = models["llama"]
    with pytest.raises(ValueError, match="give it the model that decodes"):
        generate(m, PROMPTS, 4, Pace(make(LLAMA, 9)))
    with pytest.raises(ValueError, match="gamma, how many tokens to draft"):
        Pace(m, most=-1)
    drafter = Pace(m, candidates(m, CHEAP, SKIP), CHEAP, most=0)
    assert generate(m, PROMPTS[:1], 9, drafter)[1] == 9 and drafter.chosen == {"nothing": 9}
