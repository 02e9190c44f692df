"""Pace never changes the text, never loses more than it may, and chooses what promises most."""
from dataclasses import replace
from types import SimpleNamespace

import promises
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_heads import wild
from tiny import LLAMA, PROMPTS, TINY_GEMMA, each_family, make, make_round, small, state_of, warm

from control import MOST, Costs, expected_tokens, weight_costs
from drafter import ModelDraft
from layerskip import SelfDraft, without
from machine.standin import StandIn
from methods.arms import BIN_FADE, FADE, PRIOR, Arm, Calibrated, candidates, head_draft, self_draft
from methods.counts import Beta
from methods.heads import Eagle, Kangaroo, Medusa, Prophet
from methods.pace import OVERHEAD, RISK, STAKE, Pace
from methods.standin import ShortHead
from sampling import Coins, to_probs
from speculative import generate, rounds
from support.measure import priced

SKIP = without(6, attn=[1, 4], mlp=[2])
IDS = [4, 9, 0, 2, 16, 3]
CHEAP = Costs((0.02,) * 8 + (2.5,) * 4, 0.01)   # self-drafts are nearly free
EVEN = Costs((3.0,) * 4, 1.0)    # of a model of two blocks


def each(price):
    """What an arm costs whose tokens all cost the same."""
    return lambda n, g: g * price


def bold(pace):
    """It may lose much, so it tries much, even in a short text."""
    pace.balance = 20.0
    return pace


def cheap(m):
    """With arms of all kinds, with and without a draft vocabulary."""
    heads = [wild(head) for head in (Kangaroo(m, 2), Medusa(m, 3), Prophet(m, 1))]
    arms = candidates(m, CHEAP, SKIP) + candidates(m, CHEAP, None, IDS, small=(small(m), 0.1))
    arms += [head_draft(head, CHEAP, ids) for head in heads for ids in (None, IDS)]
    return bold(Pace(m, arms, CHEAP))


def tiny_pace(m):
    costs = Costs((0.02,) * 5 + (9.0,), 0.0)
    arms = [self_draft("exit 1", m, range(2), costs), head_draft(wild(Medusa(m, 2)), costs)]
    return bold(Pace(m, arms, costs, most=2))


PACES = {"by weights": Pace, "cheap": cheap,
         "the rule alone": lambda m: SelfDraft(m, range(8), Calibrated([0.4] * 6, 6))}
test_greedy_identity = promises.greedy_identity(PACES)
test_poison = promises.poison(PACES, ["cheap"], 14)
test_damaged_weights = promises.damaged_weights(PACES, ["the rule alone"])
test_exact_law = promises.exact_law({"gemma2": (TINY_GEMMA, tiny_pace)})


# --- the guarantee


TARGET = make(replace(LLAMA, n_layers=2, max_len=256))


def never_stops(prior):
    """A rule that never stops by itself."""
    rule = Calibrated(prior=prior)
    rule.bins = [Beta(1e9)] * 11
    return rule


class Half(StandIn):
    """Right in the first row, and wrong in the others."""

    def __init__(self, model):
        self.model = model

    def unembed(self, x):
        logits = self.model.unembed(x)
        return torch.cat([logits[:1], logits[1:].flip(-1)])


@given(st.floats(0.01, 0.6), st.floats(0.0, 0.2), st.integers(1, 3), st.integers(0, 99))
@settings(max_examples=25, derandomize=True, deadline=None)
def test_it_costs_no_more_than_it_may(price, slope, B, seed):
    """Up to any round, whatever its arms are worth and promise. What a row wins it wins for itself
    only."""
    m = TARGET
    costs = replace(EVEN, passes=((1, 1.0), (17, 1 + 16 * slope)))
    rules = [never_stops(0.98) if seed % 3 else Calibrated(prior=0.98) for _ in range(3)]
    drafters = (ModelDraft(Half(m), rules[0]), ModelDraft(make(m.c, 1), rules[1]),
                SelfDraft(m, [0, 1], rules[2]))
    arms = [Arm("", drafter, lambda n, g: slope + g * price) for drafter in drafters]
    pace = Pace(m, arms[seed % 3 :] + arms[: seed % 3], costs)
    prompts = [PROMPTS[(seed + b) % 4] for b in range(B)]
    taken = 0.0
    for state, r in rounds(m, prompts, 40, pace, warm if seed % 2 else to_probs, Coins(seed)):
        T = r.p.shape[1]
        taken += costs.pass_cost(B * T) / costs.pass_cost(B)
        taken += (slope + price * (T - 1)) * (pace.arm in arms)
        rows = zip(state.known, prompts, r.new, strict=True)
        least = min(len(text) - len(ids) for text, ids, new in rows if new)
        assert taken <= STAKE + (1 + RISK) * least + 1e-9 and pace.balance > -1e-9


@pytest.mark.parametrize("price, alpha, most, drafted", [
    ((1 + Beta().high()) / 1.04 - 1, 0.5, 1, 0), ((1 + Beta().high()) / 1.06 - 1, 0.5, 1, 1),
    (0.25, 1.0, 16, 8), (0.01, 1.0, 16, 16), (0.01, 1.0, 20, 20)])
def test_the_first_draft(price, alpha, most, drafted):
    """None for a gain of 4 %, one for 6 %; as many as two passes pay for; as many as it may."""
    arm = Arm("right", ModelDraft(TARGET, never_stops(alpha)), each(price), most)
    _, r = next(rounds(TARGET, PROMPTS[:1], 40, Pace(TARGET, [arm], EVEN, most=most)))
    assert r.draft.tokens.shape[1] == drafted


def test_a_longer_text_makes_passes_dearer(models):
    pace = Pace(models["llama"], [], Costs((1.0,) * 12, 8.0, slot=0.1))
    next(rounds(models["llama"], [[1] * 5, [1] * 50], 9, pace))
    assert (pace.n, pace.grown, pace.room) == (50, 50 / 20, 8)


@pytest.mark.parametrize("name, prior, price", [("nothing", 0.0, 0.9), ("right", 1.0, 0.01)])
def test_a_choice_holds_for_several_rounds(name, prior, price):
    """Choosing takes a fifth of a pass. A choice made again holds for one round more, then for 3,
    7, 15 and at most 20, whatever it is. Counting weights it is free."""
    for thinking, times in (2.6, 5), (0.0, None):
        arm = Arm("right", ModelDraft(TARGET, Calibrated(prior=prior)), each(price), 1)
        pace, awake = Pace(TARGET, [arm], replace(EVEN, thinking=thinking)), []
        pace.lookup.best = lambda *_, awake=awake: awake.append(1) or (0.0, 0, [])
        _, passes = generate(TARGET, PROMPTS[:1], 44, pace)
        assert passes == (44 if name == "nothing" else 22) and pace.chosen[name] >= passes - 1
        assert len(awake) == (times or passes) and pace.pause == (20 if times else 0)


def test_a_rule_that_takes_long_is_not_asked():
    """Then the arm drafts the length that is best by its acceptance rate, and learns it all the
    same."""
    asked = []
    for asking in 0.5 * OVERHEAD, 2 * OVERHEAD:
        rule = Calibrated(prior=0.6)
        ask = rule.unlikely
        rule.unlikely = lambda *args, ask=ask: asked.append(1) or ask(*args)
        arm = priced(Arm("right", ModelDraft(TARGET, rule), each(0.2)), (0.0, 0.2, asking))
        pace = Pace(TARGET, [arm], EVEN)
        pace.lookup.best = lambda *_: (0.0, 0, [])      # no copies
        asked.clear()
        generate(TARGET, PROMPTS[:1], 60, pace)
        assert rule.acceptance.mean() > 0.9 and bool(asked) == (asking < OVERHEAD)


# --- what it knows


def test_it_changes_to_what_is_better_and_remembers():
    """A model that is wrong promises much at first, and again when its last try is long ago."""
    arms = [Arm(name, ModelDraft(model, Calibrated(prior=prior)), each(0.2))
            for name, model, prior in (("wrong", make(TARGET.c, 1), 0.9), ("right", TARGET, 0.3))]
    pace = Pace(TARGET, arms, EVEN)
    pace.lookup.best = lambda *_: (0.0, 0, [])
    generate(TARGET, PROMPTS[:1], 200, pace)
    assert pace.chosen["right"] > 5 * pace.chosen["wrong"] > 0
    before, known = dict(pace.chosen), [arm.drafter.rule.acceptance.mean() for arm in arms]
    assert known[0] < 0.9 < known[1]
    assert pace.summary().startswith(f"right in {before['right']} rounds "
                                     f"({known[1]:.0%} accepted, each token costs 20% of a pass)")
    generate(TARGET, PROMPTS[1:2], 20, pace)
    assert pace.chosen["wrong"] - before["wrong"] <= 1


def test_what_would_have_been_copied(models):
    """By the length that matched: one token; two and three, 2 of 3 and then 2 of 2."""
    pace = Pace(models["llama"], [], CHEAP)
    pace.lookup.matched, pace.copies = [3, 2, 0, 1], [[5, 6, 7], [5, 6], [], [1]]
    pace.learn_copies([[5, 6, 9], [5, 6], [3], [2]])
    one, two = pace.copy_rates[1:3]
    assert (one.hits, one.misses, two.hits, two.misses) == (0, 1, 2 * FADE + 2, FADE)
    assert (one.mean(), two.mean()) == (1 / 3, (2 * FADE + 2 + 1.5) / (3 * FADE + 4))


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
    assert (rule.acceptance.hits, rule.acceptance.misses) == (3 * FADE, FADE)


# --- prices, by hand


@given(st.floats(0, 0.99), st.floats(0, 1))
def test_promises_are_the_formula(alpha, price):
    """With blocks for free."""
    pace = Pace(TARGET, [])
    pace.passes, pace.room, pace.balance = [1.0] * 18, 16, 99.0
    rate, g = pace.promise(Arm("", None, each(price)), alpha)
    speeds = [expected_tokens(alpha, k) / (1 + k * price) for k in range(17)]
    assert rate == pytest.approx(max(speeds)) == pytest.approx(speeds[g])


def test_promises_of_blocks_by_hand(models):
    costs = Costs((1.0,) * 12, 2.0, ((1, 1.0), (2, 1.5), (17, 9.0)))
    arm = Arm("", None, lambda n, g: 0.2 + 0.05 * (g > 0) + 0.1 * g)
    pace = Pace(models["llama"], [], costs)
    pace.passes = list(map(costs.pass_cost, range(4)))
    pace.room, pace.balance = 2, 9.0
    assert pace.promise(arm, 1.0) == (pytest.approx(max(2 / 1.65, 3 / 2.25)), 2), "room for two"
    # of 1.25 for two and .65 for one, and .2 for reading
    for pace.balance, g in (0.9, 1), (0.7, 0):
        assert pace.promise(arm, 1.0)[1] == g
    arm.longest, pace.balance, pace.thinking = 1, 9.0, 0.4
    assert pace.promise(arm, 1.0) == (1.0, 0), "to choose costs something, too"
    pace.pause = 1
    assert pace.promise(arm, 1.0) == (pytest.approx(2 / 1.85), 1)


def test_candidates_and_their_prices(models):
    m, costs = models["llama"], weight_costs(LLAMA)
    arms = candidates(m, costs, SKIP, [1, 2, 3])
    assert [arm.name for arm in arms] == ["exit 1", "exit 2", "skip set"]
    for arm, subs in zip(arms, (range(2), range(4), SKIP), strict=True):
        assert arm.drafter.sublayers == list(subs) and arm.drafter.model.share == 3 / 17
        price, whole = costs.pricing(subs, 3 / 17), costs.pricing(range(12))
        assert arm.drafting(50, 1) == price(50) / whole(50) != costs.step(subs, 3 / 17)
    dear = replace(costs, call=0.8 * costs.head)    # a step costs what most of the head does
    for count, shorter in (10, False), (3, True):
        arms = candidates(m, dear, SKIP, list(range(count)))
        assert {isinstance(arm.drafter.model, ShortHead) for arm in arms} == {shorter}
    heads = [Medusa(m, 3), Prophet(m, 3), Eagle(m)]
    for best in heads:      # the best by their training
        for head in heads:
            head.ranks = [0.9 if head is best else 0.2]
        assert [arm.name for arm in candidates(m, CHEAP, SKIP, None, heads)] == [best.kind]


@each_family
def test_trained_heads_and_their_prices(models, family):
    """All parts of the table are different; a head's own weights cost what the blocks' do."""
    m, by = models[family], weight_costs(models[family].c)
    costs = Costs(tuple(2.0 * x for x in by.sublayers), by.head, ((1, 1.0), (17, 2.0)), 3.0,
                  10, m.c.window)
    whole, slots = costs.pricing(range(12))(50), 3.0 * 40
    for head, E, once, own in ((Kangaroo(m, 2), 2, costs.sublayers[0], costs.sublayers[0]),
                               (Eagle(m), 0, 0.0, sum(costs.sublayers[:2]))):      # with D
        arm = head_draft(head, costs, [1, 2, 3])
        trunk = costs.pricing(range(2 * E), 3 / 17)(50)
        price, late = (trunk + 2 * head.count() + slots) / whole, own / costs.whole / 4
        assert [arm.drafting(50, g) for g in (0, 1, 3)] == pytest.approx(
            [0, once / costs.whole + price, once / costs.whole + 3 * price])
        arm.drafter.follower = SimpleNamespace(unread=5, filled=[0])
        assert arm.drafting(50, 0) == pytest.approx(late)
        assert arm.drafting(50, 2) == pytest.approx(late + once / costs.whole + 2 * price)
    for head, steps in ((Medusa(m, 3), 3), (Prophet(m, 1), MOST)):
        arm, own = head_draft(head, costs), 2 * head.count() / (steps if steps == 3 else 1)
        assert arm.drafting(50, 2) == pytest.approx(2 * (costs.head + own) / whole)
        assert (arm.longest, arm.drafting(50, 0)) == (steps, 0.0)
        assert arm.drafter.rule.acceptance.mean() == 0.5
    head = Medusa(m, 2)
    head.ranks = [0.75, 0.125]
    arm = head_draft(head, costs, [1, 2, 3])
    assert arm.drafting(50, 1) == pytest.approx((3 / 17 * costs.head + head.count()) / whole)
    assert arm.drafter.rule.acceptance == Beta(0.75 * PRIOR, 0.25 * PRIOR, 0.75)


def test_what_makes_no_sense(models):
    m = models["llama"]
    with pytest.raises(ValueError, match="model that decodes"):
        generate(m, PROMPTS, 4, Pace(make(LLAMA, 9)))
    pace = Pace(m, candidates(m, CHEAP, SKIP), CHEAP, most=0)
    assert generate(m, PROMPTS[:1], 9, pace)[1] == 9 and pace.chosen == {"nothing": 9}
