"""Pace never changes the text, never loses more than it may, and chooses what promises most."""
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from unittest.mock import Mock

import promises
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_heads import wild
from tiny import LLAMA, PROMPTS, TINY_GEMMA, each_family, make, make_round, small, state_of, warm

from control import MOST, expected_tokens
from drafter import ModelDraft
from layerskip import SelfDraft, without
from machine.exact import Race, exactly
from methods.arms import (
    BIN_FADE,
    FADE,
    IDLE,
    PRIOR,
    Arm,
    Calibrated,
    Copies,
    candidates,
    head_draft,
    self_draft,
    smaller,
)
from methods.costs import Line, Machine, by_weights
from methods.counts import Beta, Shortest
from methods.eagle import Eagle
from methods.kangaroo import Kangaroo
from methods.medusa import Medusa
from methods.pace import OVERHEAD, RISK, STAKE, Choice, Pace, promise
from methods.prophet import Prophet
from methods.standin import ShortHead
from model import StandIn
from sampling import Coins, to_probs
from speculative import generate, rounds

SKIP = without(6, attn=[1, 4], mlp=[2])
IDS = [4, 9, 0, 2, 16, 3]
CHEAP = Machine(6, 0.003, 0.003, 0.002)     # self-drafts are nearly free
EVEN = replace(Machine.of(2, 3.0, 3.0, 1.0), unit=1.0)


def bold(pace):
    """It may lose much, so it tries much, even in a short text."""
    pace.balance = 20.0
    return pace


def cheap(m, clock=None):
    """With arms of all kinds, with and without a draft vocabulary."""
    heads = [wild(head) for head in (Kangaroo(m, 2), Medusa(m, 3), Prophet(m, 1))]
    arms = candidates(m, CHEAP, SKIP) + candidates(m, CHEAP, None, IDS, small=(small(m), 0.1))
    arms += [head_draft(head, CHEAP, ids) for head in heads for ids in (None, IDS)]
    return bold(Pace(m, arms, CHEAP, clock=clock))


def tiny_pace(m):
    machine = Machine(3, 0.003, 0.003, 0.0)
    arms = [self_draft("exit 1", m, range(2), machine), head_draft(wild(Medusa(m, 2)), machine)]
    return bold(Pace(m, arms, machine, longest=2))


def liar(seed):
    """A clock that moves by anything, in either direction."""
    random = Random(seed)
    return lambda: random.choice([0.0, 1.0, random.uniform(-9, 9), random.expovariate(1e-3)])


PACES = {"by weights": Pace, "cheap": cheap, "a lying clock": lambda m: cheap(m, liar(1)),
         "the rule alone": lambda m: SelfDraft(m, range(8), Calibrated([0.4] * 6, 6))}
test_greedy_identity = promises.greedy_identity(PACES)
test_poison = promises.poison(PACES, ["cheap"], 14)
test_damaged_weights = promises.damaged_weights(PACES, ["the rule alone"])
test_exact_law = promises.exact_law({"gemma2": (TINY_GEMMA, tiny_pace)})


@each_family
def test_the_clock_changes_drafts_and_no_text(models, family):
    """With --exact not even a sampled one, though what lying clocks choose differs."""
    m = exactly(make(models[family].c).float(), False)
    paces = [cheap(m, liar(seed)) for seed in range(4)]
    plain, *texts = (generate(m, PROMPTS, 30, drafter, warm, Race([1, 2, 3, 4]))[0]
                     for drafter in (None, *paces))
    assert texts == 4 * [plain]
    assert len({str(pace.chosen) for pace in paces}) > 1


# --- the guarantee


TARGET = make(replace(LLAMA, n_layers=2, max_len=256))


WRONG = make(TARGET.c, 1)


def never_stops(prior):
    """A rule that never stops by itself."""
    rule = Calibrated(prior=prior)
    rule.bins = [Beta(1e9)] * 11
    return rule


def an_arm(model, price, rule, name="right", **more):
    return Arm(name, ModelDraft(model, rule), Line(price), **more)


def pace_of(*arms, machine=EVEN, **more):
    """A Pace that never copies."""
    pace = Pace(TARGET, arms, machine, **more)
    pace.copies.drafter.best = lambda *_: (0.0, 0, [])
    return pace


class Half(StandIn):
    """Right in the first rows, and wrong in the others."""
    right = 1

    def unembed(self, x):
        logits = self.model.unembed(x)
        return torch.cat([logits[: self.right], logits[self.right :].flip(-1)])


@given(st.floats(0.01, 0.6), st.floats(0.0, 0.2), st.integers(1, 3), st.integers(0, 99))
@settings(max_examples=25, derandomize=True, deadline=None)
def test_it_costs_no_more_than_it_may(price, slope, B, seed):
    """Up to any round, whatever its arms are worth and promise. What a row wins it wins for itself
    only."""
    m = TARGET
    machine = replace(EVEN, wide=((1, 1.0), (17, 1 + 16 * slope)))
    rules = [never_stops(0.98) if seed % 3 else Calibrated(prior=0.98) for _ in range(3)]
    drafters = (ModelDraft(Half(m), rules[0]), ModelDraft(WRONG, rules[1]),
                SelfDraft(m, [0, 1], rules[2]))
    arms = [Arm("", drafter, Line(price), slope) for drafter in drafters]
    pace = Pace(m, arms[seed % 3 :] + arms[: seed % 3], machine)
    prompts = [PROMPTS[(seed + b) % 4] for b in range(B)]
    taken = 0.0
    for state, r in rounds(m, prompts, 40, pace, warm if seed % 2 else to_probs, Coins(seed)):
        K = r.p.shape[1] - 1
        taken += machine.verify(0, 1 + K)
        taken += (slope + price * K) * (K > 0 and pace.choice.arm in arms)
        rows = zip(state.known, prompts, r.new, strict=True)
        least = min(len(text) - len(ids) for text, ids, new in rows if new)
        assert taken <= STAKE + (1 + RISK) * least + 1e-9 and pace.balance > -1e-9


class Hours:
    """A clock that only the code below moves."""
    now = 0.0

    def __call__(self):
        return self.now


class Dear(StandIn):
    """The target, whose passes take `plain` seconds, and those over several tokens `wide`."""

    def __init__(self, clock, plain=1.0, wide=1.0):
        super().__init__(TARGET)
        self.clock = clock
        self.plain = plain
        self.wide = wide

    def run(self, x, at, cache=None, *rest, **named):
        self.clock.now += self.plain if x.shape[1] == 1 else self.wide
        return self.model.run(x, at, cache, *rest, **named)


class Late(ModelDraft):
    """Its drafted tokens take `each` seconds; and what choosing took before."""

    def __init__(self, model, clock, each):
        super().__init__(model, never_stops(0.9))
        self.clock = clock
        self.each = each
        self.rounds = []    # tokens drafted

    def propose(self, state):
        draft = super().propose(state)
        self.rounds.append(draft.tokens.shape[1])
        self.clock.now += self.each * self.rounds[-1]
        return draft


@pytest.mark.parametrize("told, true", [(0.02, 0.9), (0.3, 0.3), (0.9, 0.1)])
@pytest.mark.parametrize("right", [False, True])
def test_by_the_clock_a_wrong_price_is_soon_right(told, true, right):
    """A table that is wrong misleads it for two rounds with each arm, and no further."""
    clock = Hours()
    late = Late(TARGET if right else WRONG, clock, true)
    pace = pace_of(Arm("late", late, Line(told)), clock=clock)
    start = None
    for state, _ in rounds(Dear(clock), PROMPTS[:1], 200, pace):
        start = start or clock.now - 1 - true * (late.rounds or [0])[0]
        written = len(state.known[0]) - len(PROMPTS[0])
        lessons = sum(late.rounds[:2]) * max(0.0, true - told)
        assert clock.now - start <= STAKE + (1 + RISK) * written + lessons + 1e-9
    if right:
        assert clock.now - start < (0.75 if true < 0.5 else 1.03) * written


@pytest.mark.parametrize("true", [1.1, 2.0])
def test_blocks_that_are_dearer_than_the_table_says(true):
    """Every draft is right, and a block of two takes twice a pass where the table says 1.1: it
    stops to draft, where plain decoding is as good, and writes no less."""
    clock = Hours()
    machine = replace(EVEN, wide=((1, 1.0), (2, 1.1)))
    late = Late(TARGET, clock, 0.1)
    pace = pace_of(Arm("late", late, Line(0.1), longest=1), machine=machine, clock=clock)
    generate(Dear(clock, wide=true), PROMPTS[:1], 200, pace)
    assert clock.now < (0.65 if true == 1.1 else 1.03) * 200
    assert (sum(late.rounds) > 90) == (true == 1.1)


def test_a_slower_machine_changes_nothing():
    """Where passes and drafts take three times what the table says, each round is the same, and
    what is done between rounds costs nothing."""
    found = []
    for slow in (1.0, 3.0):
        clock = Hours()
        late = Late(TARGET, clock, 0.5 * slow)
        pace = pace_of(Arm("late", late, Line(0.5)), clock=clock)
        for _ in rounds(Dear(clock, slow, slow), PROMPTS[:1], 100, pace):
            clock.now += 5 * (slow - 1)
        found.append([*late.rounds, pace.balance])
    assert found[0] == pytest.approx(found[1])


@pytest.mark.parametrize("price, alpha, most, drafted", [
    ((1 + Beta().high()) / 1.04 - 1, 0.5, 1, 0), ((1 + Beta().high()) / 1.06 - 1, 0.5, 1, 1),
    (0.5, 1.0, 16, 8), (0.01, 1.0, 16, 16), (0.01, 1.0, 20, 20)])
def test_the_first_draft(price, alpha, most, drafted):
    """None for a gain of 4 %, one for 6 %; what half the stake pays for; as many as it may."""
    arm = an_arm(TARGET, price, never_stops(alpha), longest=most)
    _, r = next(rounds(TARGET, PROMPTS[:1], 40, pace_of(arm, longest=most)))
    assert r.draft.tokens.shape[1] == drafted


def test_a_longer_text_makes_passes_dearer(models):
    machine = Machine.of(6, 1.0, 1.0, 8.0, slope=0.1)
    pace = Pace(models["llama"], [], machine)
    next(rounds(models["llama"], [[1] * 5, [1] * 50], 9, pace))
    assert pace.choice.costs[0] == pytest.approx(1 + 50 * 6 * 0.1 / 20)
    assert len(pace.choice.costs) <= 9


@pytest.mark.parametrize("name, prior, price", [("nothing", 0.0, 0.9), ("right", 1.0, 0.01)])
def test_a_choice_holds_for_several_rounds(name, prior, price):
    """Choosing takes a fifth of a pass. A choice that is made again holds for as long as it has
    lasted, at most until choosing takes a hundredth. Where it takes no time, each round chooses."""
    for thinking in (0.2, 0.0):
        clock = Hours()
        pace = pace_of(an_arm(TARGET, price, Calibrated(prior=prior), longest=1), clock=clock)
        awake = []

        def best(*_, awake=awake, clock=clock, thinking=thinking):
            clock.now += thinking
            awake.append(1)
            return 0.0, 0, []

        pace.copies.drafter.best = best
        _, passes = generate(Dear(clock), PROMPTS[:1], 44, pace)
        plain = 44 if name == "nothing" else 2      # the third and the nineteenth, by the clock
        assert passes == (44 + plain) / 2 and pace.chosen[name] >= passes - 2
        assert len(awake) == passes if thinking == 0 else 4 <= len(awake) <= 8
        assert pace.choice.holds <= thinking / OVERHEAD


def test_choosing_is_paid_from_the_balance():
    """Where nothing gains it costs the stake and the RISK that tokens allow, and no more."""
    clock = Hours()
    pace = pace_of(clock=clock)

    def look(state):
        clock.now += 2.0
        pace.copies.drafter.matched = [0]
        pace.copies.longest = 0

    pace.copies.look = look
    began = 0.0
    for state, _ in rounds(Dear(clock), PROMPTS[:1], 200, pace):
        began = began or clock.now - 3.0
        assert clock.now - began <= STAKE + 2.0 + (1 + RISK) * len(state.known[0][3:]) + 1e-9
        assert pace.balance >= 0


def test_a_rule_that_takes_long_is_not_asked():
    """Then the arm drafts the length that is best by its acceptance rate, and learns it all the
    same."""
    for asks in True, False:
        rule = Calibrated(prior=0.6)
        rule.asks = asks
        rule.unlikely = Mock(wraps=rule.unlikely)
        steps = rounds(TARGET, PROMPTS[:1], 60, pace_of(an_arm(TARGET, 0.2, rule)))
        lengths = [r.draft.tokens.shape[1] for _, r in steps]
        assert rule.unlikely.called == asks and rule.acceptance.mean() > 0.9
        assert asks or lengths[0] == 2, "1.96 / 1.4 is more than 1.6 / 1.2 and 2.176 / 1.6"


# --- what it knows


def test_it_changes_to_what_is_better_and_remembers():
    """A model that is wrong promises much at first, and again when its last try is long ago."""
    arms = [an_arm(WRONG, 0.2, Calibrated(prior=0.9), "wrong"),
            an_arm(TARGET, 0.2, Calibrated(prior=0.3))]
    pace = pace_of(*arms)
    generate(TARGET, PROMPTS[:1], 200, pace)
    wrong = pace.chosen["wrong"]
    assert pace.chosen["right"] > 5 * wrong > 0
    bad, good = (arm.drafter.rule.acceptance for arm in arms)
    assert bad.mean() < 0.9 < good.mean()
    assert bad.misses < 2, "what is known of it fades while the other one drafts"
    generate(TARGET, PROMPTS[1:2], 20, pace)
    assert pace.chosen["wrong"] - wrong <= 1


def test_the_summary_by_hand():
    """Of what drafted. One token with 1.5 in 1.25 passes is the best draft of the first."""
    pace = pace_of(an_arm(TARGET, 0.25, Calibrated()), an_arm(WRONG, 0.2, Calibrated(), "wrong"))
    pace.chosen.update(right=3, nothing=2)
    assert pace.summary() == (
        "rounds: right 3 (50% accepted, cost 0.25, promise 1.20), nothing 2")


def test_an_unlucky_draft_is_made_again():
    """Its first two drafts are wrong, and cost more than three passes. There is enough left for a
    third one, and later texts begin with the whole stake again."""
    unlucky = Half(TARGET)
    unlucky.right = 0
    rule = Calibrated(prior=0.95, tests=8)
    rule.asks = False       # so that drafts are long
    pace = pace_of(an_arm(unlucky, 0.5, rule))
    lowest = STAKE
    for _ in rounds(TARGET, PROMPTS[:1], 32, pace):
        unlucky.right = int(pace.chosen["right"] >= 2)
        lowest = min(lowest, pace.balance)
    assert lowest < STAKE - 3 and pace.chosen["right"] > 4 and pace.balance > STAKE
    pace.balance = 0.1
    next(rounds(TARGET, PROMPTS[:1], 32, pace))
    assert pace.balance > STAKE - 1


def test_what_would_have_been_copied():
    """By the length that matched: one token; two and three, 2 of 3 and then 2 of 2."""
    copies = Copies()
    copies.drafter.matched, copies.found = [3, 2, 0, 1], [[5, 6, 7], [5, 6], [], [1]]
    copies.learn([[5, 6, 9], [5, 6], [3], [2]])
    one, two = copies.rates[:2]
    assert (one.hits, one.misses, two.hits, two.misses) == (0, 1, 2 * FADE + 2, FADE)
    assert one.mean() == pytest.approx(2 * (1 - 0.5**0.5) / 3)
    assert two.mean() == pytest.approx((2 * FADE + 4 - 0.5**0.5) / (3 * FADE + 4))


def test_the_shortest_row_that_has_not_ended_counts():
    shortest = Shortest(2)
    rounds_ = [[1], [1, 1]], [[1], [1]], [[1] * 3, []], [[1], []]
    assert [shortest.gain(new) for new in rounds_] == [1, 1, 3, 1]


# --- the rule


def test_one_more_is_drafted_while_its_chance_exceeds_its_price():
    rule = Calibrated([0.4, 0.6, 0.6, 0.6], prior=0.9)
    rule.bins = [Beta(prior=0.5)] * 10 + [Beta(prior=0.9)]
    assert rule.how_far(state_of([[1], [1]], [9, 9])) == MOST
    sure = torch.tensor([[50.0] + [0.0] * 16, [0.0] * 17])              # probability 1, and 1/17
    assert rule.stop(0, sure, None) == [False, False]           # .81 and .45 against .4
    assert rule.stop(1, sure, None) == [False, True]            # .729 and .225 against .6
    assert [rule.stop(k, sure, None) for k in (2, 3)] == [[False, True], [True, True]]
    assert rule.tenths[0] == [10, 0]


def test_outcomes_are_counted_by_hand():
    """One row rejected at its second token, one accepted whole. In other drafters' rounds it only
    fades."""
    rule, r = Calibrated(), make_round([[1, 1], [1, 1, 1]], [1, 2], [3, 2])
    assert [beta.mean() for beta in rule.bins] == pytest.approx(
        [0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95, 0.95, 0.95])
    rule.learn(None, r)
    assert rule.acceptance.hits == rule.acceptance.misses == 0
    rule.tenths = [[9, 9], [0, 1], [3, 3]]
    rule.learn(None, r)
    assert (rule.acceptance.hits, rule.acceptance.misses) == (3, 1) and rule.tenths == []
    assert [rule.bins[tenth].hits for tenth in (9, 0, 1, 3)] == [BIN_FADE + 1, 0, 1, 0]
    rule.learn(None, r)
    assert (rule.acceptance.hits, rule.acceptance.misses) == (3 * IDLE, IDLE)


# --- prices, by hand


@given(st.floats(0, 0.99), st.floats(0, 1))
def test_promises_are_the_formula(alpha, price):
    rate, g = promise([1 + k * price for k in range(17)], alpha)
    speeds = [expected_tokens(alpha, k) / (1 + k * price) for k in range(17)]
    assert rate == pytest.approx(max(speeds)) == pytest.approx(speeds[g])


def test_it_drafts_further_where_one_more_token_does_not_pay(models):
    """A block of three costs as much as one of four. After a token the second by itself would cost
    more than it brings, but the second and third together do not."""
    machine = Machine.of(6, 1.0, 1.0, 2.0)
    machine = replace(machine, wide=((1, 1.0), (2, 1.3), (3, 2.0), (4, 2.0), (17, 20.0)))
    arm = Arm("", ModelDraft(models["llama"], Calibrated(prior=0.95)), Line(0.4))
    pace = Pace(models["llama"], [arm], machine)
    pace.balance = 9.0
    choice = pace.offer(arm, 0, 16)
    assert choice.costs[:4] == pytest.approx([1.0, 1.7, 2.8, 3.2])
    assert pace.length_for(choice) == len(choice.costs) - 1
    speed = (1 + 0.95 + 0.95**2 + 0.95**3) / 3.2
    bars = arm.drafter.rule.bars
    assert bars[:2] == pytest.approx([speed * 1.5 / 1.95, speed * 0.4])
    assert speed * 1.1 > 1 and min(bars[2:]) == 1.0


def test_offers_of_blocks_by_hand(models):
    """Two drafted tokens cost .05 + .2, the block of three 1.5 + 7.5 / 15; reading costs .2. Half
    of the balance may be lost."""
    machine = replace(Machine.of(6, 1.0, 1.0, 2.0), wide=((1, 1.0), (2, 1.5), (17, 9.0)))
    drafter = ModelDraft(models["llama"], 2)
    drafter.follower = SimpleNamespace(unread=3, filled=[3])
    arm = Arm("", drafter, Line(0.1), 0.05, 0.1)
    pace = Pace(models["llama"], [arm], machine)
    for balance, thinking, most, costs in (
            (9.0, 0.0, 2, [1, 1.65, 2.25]), (9.0, 0.0, 1, [1, 1.65]), (2.88, 0.0, 2, [1, 1.65]),
            (2.92, 0.0, 2, [1, 1.65, 2.25]), (2.92, 0.1, 2, [1, 1.65]), (1.6, 0.0, 2, [1])):
        pace.balance = balance
        choice = pace.offer(arm, 0, most, thinking)
        assert choice.costs == pytest.approx(costs)
        assert choice.thinking + choice.reading == pytest.approx(thinking + 0.2)
    pace.balance, pace.choice = 9.0, Choice(arm, [1, 1.65], 0.1, 0.2)
    pace.shortest = Shortest(1)
    pace.observe(state_of([[1, 2, 3]], [5]), make_round([[1, 1]], [1], [1]))
    assert pace.balance == pytest.approx(9 + 2 * (1 + RISK) - 1.65 - 0.3)


def test_candidates_and_their_prices(models):
    m, machine = models["llama"], by_weights(LLAMA)
    arms = candidates(m, machine, SKIP, [1, 2, 3])
    assert [arm.name for arm in arms] == ["exit 1", "exit 2", "skip set"]
    for arm, subs in zip(arms, (range(2), range(4), SKIP), strict=True):
        assert arm.drafter.sublayers == list(subs) and arm.drafter.model.share == 3 / 17
        assert arm.each == machine.draft(subs, 3 / 17)
    dear = replace(machine, step=0.8 * machine.head)    # a step costs what most of the head does
    for count, shorter in (10, False), (3, True):
        arms = candidates(m, dear, SKIP, list(range(count)))
        assert {isinstance(arm.drafter.model, ShortHead) for arm in arms} == {shorter}
    heads = [Medusa(m, 3), Prophet(m, 3), Eagle(m)]
    for best in heads:      # the best by their training
        for head in heads:
            head.ranks = [0.9 if head is best else 0.2]
        names = [arm.name for arm in candidates(m, CHEAP, SKIP, None, heads)]
        assert names == [best.kind, "exit 1", "exit 2"]
    other = smaller(small(m), 0.2, replace(EVEN, wide=((1, 1.0), (2, 1.5), (17, 9.0))))
    other.drafter.follower = SimpleNamespace(unread=9)
    assert other.catch_up() == pytest.approx(8 * 0.1), "half of a step, as a wide pass is read"


@each_family
def test_trained_heads_and_their_prices(models, family):
    """A head's own weights cost what the blocks' do, here twice what a weight of the head does."""
    m, by = models[family], by_weights(models[family].c)
    machine = Machine.of(6, 2 * by.attention, 2 * by.mlp, by.head, 0.0, by.slope,
                         ((1, 1.0), (17, 2.0)))
    weight = 2 / by.unit / machine.unit
    block = machine.attention + machine.mlp
    for head, E, own in ((Kangaroo(m, 2), 2, machine.attention), (Eagle(m), 0, block)):
        arm = head_draft(head, machine, [1, 2, 3])
        trunk = machine.draft(range(2 * E), 3 / 17)
        assert arm.each == pytest.approx((trunk.start + weight * head.count(),
                                          trunk.slope + machine.slope))
        assert arm.once == (own if E else 0.0), "an adapter reads D as well"
        arm.drafter.follower = SimpleNamespace(unread=5)
        assert arm.catch_up() == pytest.approx(4 * own / 16)
        assert arm.cost(50, 2) == pytest.approx(arm.once + 2 * arm.each.at(50))
    for head, steps in ((Medusa(m, 3), 3), (Prophet(m, 1), MOST)):
        arm, own = head_draft(head, machine), weight * head.count() / (3 if steps == 3 else 1)
        assert arm.cost(50, 2) == pytest.approx(2 * (machine.head + own))
        assert (arm.longest, arm.catch_up()) == (steps, 0.0)
        assert arm.drafter.rule.acceptance.mean() == 0.5
    head = Medusa(m, 2)
    head.ranks = [0.75, 0.125]
    arm = head_draft(head, machine, [1, 2, 3])
    assert arm.cost(50, 1) == pytest.approx(3 / 17 * machine.head + weight * head.count() / 2)
    assert arm.drafter.rule.acceptance == Beta(0.75 * PRIOR, 0.25 * PRIOR, 0.75)


def test_what_makes_no_sense(models):
    m = models["llama"]
    with pytest.raises(ValueError, match="model that decodes"):
        generate(m, PROMPTS, 4, Pace(make(LLAMA, 9)))
    pace = Pace(m, candidates(m, CHEAP, SKIP), CHEAP, longest=0)
    assert generate(m, PROMPTS[:1], 9, pace)[1] == 9 and pace.chosen == {"nothing": 9}
