"""Rules, and drafts behind one another, decide how much is drafted and never what is written; each rule does
what its source says; and the speed-up model is arithmetic, checked by hand, by brute force and against what
others published."""
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import promises
import pytest
import torch
from promises import Watched, reader
from test_speculative import FULL
from tiny import LIVELY, LLAMA, PROMPTS, TINY, Says, each_family, make, oracle, small, warm

from control import (
    AdaptiveExit,
    Beta,
    Confidence,
    Costs,
    DoNoHarm,
    Gate,
    Schedule,
    ValueGate,
    best_gamma,
    confidence,
    expected_speedup,
    expected_tokens,
    plan,
    weight_costs,
)
from layerskip import SelfDraft, early_exit, without
from model import Config, Transformer
from sampling import Coins, to_probs
from speculative import Draft, Drafter, ModelDraft, NGram, Rule, Then, chain, generate, join, rounds, wanted


class Dice(Rule):
    """Another length for each row and round, and drafts that end anywhere. Remembers what became of them."""

    def __init__(self, most=6, ends=0.2):
        super().__init__(most)
        self.random, self.ends, self.seen = random.Random(1), ends, []

    def gamma(self, state):
        return [self.random.randint(0, self.most) for _ in state.known]

    def stop(self, k, logits, token):
        return torch.tensor([self.random.random() < self.ends for _ in token])

    def learn(self, state, r):
        self.seen += zip(r.proposed.tolist(), r.accepted.tolist(), map(len, r.new), strict=True)


class Lengths(Dice):
    """Dice that only say how far, for what cannot stop between tokens."""
    stop = None


class Say(Drafter):
    """Proposes rows of copied tokens that a function of the state gives."""

    def __init__(self, say, rule=0):
        super().__init__(rule)
        self.say = say

    def propose(self, state):
        rows = self.say(state)
        K = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (K - len(row)) for row in rows])
        return Draft(tokens, None, torch.tensor([len(row) for row in rows])) if K else Draft.none(state)


class Foretold(Say):
    """Under a rule: rows that know the answer, or say something else. good: for each row True, False, or a
    function of how many tokens it knows."""

    def __init__(self, texts, good, rule=0):
        knows = [right if callable(right) else lambda n, right=right: right for right in good]

        def say(state):
            rows = zip(texts, knows, state.known, wanted(state, self.rule)[0], strict=True)
            return [[t if right(len(known)) else (t + 1) % 17 for t in text[len(known) : len(known) + most]]
                    for text, right, known, most in rows]
        super().__init__(say, rule)


def exit_draft(m, rule):
    return SelfDraft(m, range(8), rule)


RULES = {
    "always": lambda: Rule(3),
    "+1/-1": lambda: Schedule(2),
    "heuristic": lambda: Schedule(3, up=2),
    "constant": lambda: Schedule(3, up=0, down=0),
    "confidence": lambda: Confidence(0.4, 5),
    "adaptive exit": lambda: AdaptiveExit(target=0.6, epsilon=0.3, gamma=5),
    "gate": lambda: Gate(4),
    "value gate": lambda: ValueGate(0.3, 6),
    "do no harm": lambda: DoNoHarm(0.3, 6),
    "dice": Dice,
    "lengths": Lengths,
}
PARTS = {
    "exit": exit_draft,
    "skip set": lambda m, rule: SelfDraft(m, without(6, attn=[1, 4], mlp=[2]), rule),
    "model": lambda m, rule: ModelDraft(small(m), rule),
    "n-gram": lambda m, rule: NGram(rule, 1),
}
PAIRS = {
    "exit, n-gram": lambda m: Then(SelfDraft(m, range(8), 3), NGram(4, 2)),
    "sure exit, n-gram": lambda m: Then(exit_draft(m, Confidence(0.4, 5)), NGram(4, 1)),
    "n-gram, n-gram": lambda m: Then(NGram(2, 2), NGram(3, 1)),
    "model, n-gram": lambda m: Then(ModelDraft(small(m), 3), NGram(4, 1)),
    "exit, model": lambda m: Then(SelfDraft(m, range(8), 2), ModelDraft(small(m), 3)),
    "dice, dice": lambda m: Then(exit_draft(m, Dice()), NGram(Lengths(), 1)),
    "dice, dice model": lambda m: Then(ModelDraft(small(m), Dice(3)), ModelDraft(m, Dice(4))),
    "three": lambda m: Then(
        SelfDraft(m, range(8), 2), Then(ModelDraft(small(m), Lengths(3)), NGram(3, 1))),
}
DRAFTERS = PAIRS | {
    f"{part}, {rule}": lambda m, part=part, rule=rule: PARTS[part](m, RULES[rule]())
    for part in PARTS for rule in RULES if part != "n-gram" or not RULES[rule]().stop}


test_greedy_identity = promises.greedy_identity(DRAFTERS, on=["cpu"])
test_rows_equal_solo_runs = promises.rows_equal_solo_runs(PAIRS)
test_poison = promises.poison(DRAFTERS, [*PAIRS, "exit, dice", "skip set, dice", "model, dice",
                                         "n-gram, lengths", "exit, do no harm"])
test_end_of_text = promises.end_of_text(
    DRAFTERS, ["exit, n-gram", "dice, dice model", "three", "exit, do no harm"], range(2, 12, 3))
test_context_limit = promises.context_limit(DRAFTERS)
test_short_answers = promises.short_answers(DRAFTERS)


LAWS = {
    "gate": (TINY, lambda m: SelfDraft(m, range(4), Gate(2, 0.6))),
    "value gate": (TINY, lambda m: SelfDraft(m, range(4), ValueGate(0.4, 2))),
    "do no harm": (TINY, lambda m: SelfDraft(m, range(4), DoNoHarm(0.1, 2))),
    "confidence": (TINY, lambda m: SelfDraft(m, range(4), Confidence(0.6, 2))),
    "adaptive exit": (TINY, lambda m: SelfDraft(
        m, range(4), AdaptiveExit(target=0.5, beta2=0.5, epsilon=0.5, gamma=2))),
    "n-gram, schedule": (TINY, lambda m: NGram(Schedule(1), 1)),
    "exit, n-gram": (TINY, lambda m: Then(SelfDraft(m, range(4), 1), NGram(2, 1))),
    "sure exit, n-gram": (TINY, lambda m: Then(SelfDraft(m, range(4), Confidence(0.6, 2)), NGram(2, 1))),
    "exit, model": (TINY, lambda m: Then(
        SelfDraft(m, range(4), 1), ModelDraft(make(replace(TINY, n_layers=1), 7), 1))),
    "n-gram, exit": (TINY, lambda m: Then(NGram(1, 1), SelfDraft(m, range(4), 1))),
}
test_exact_law = promises.exact_law(LAWS)
test_exact_law_of_a_ragged_batch = promises.exact_law_of_a_ragged_batch(
    LAWS, ["gate", "do no harm", "sure exit, n-gram"])


# --- each row its own length


@each_family
def test_rows_draft_as_many_as_they_are_told(models, family):
    m = models[family]
    _, same = next(rounds(m, PROMPTS, 20, SelfDraft(m, range(8), 5)))
    for make_drafter in (lambda g: SelfDraft(m, range(8), g), lambda g: ModelDraft(m, g)):
        for lengths in ([0, 5, 1, 3], [2, 2, 2, 2], [0, 0, 0, 0]):
            _, r = next(rounds(m, PROMPTS, 20, make_drafter(Says(lengths))))
            assert r.proposed.tolist() == lengths and r.draft.tokens.shape[1] == max(lengths)
    for b, n in enumerate(same.accepted.tolist()):
        for g in range(6):
            lengths = [5 - g] * 4
            lengths[b] = g
            _, r = next(rounds(m, PROMPTS, 20, SelfDraft(m, range(8), Says(lengths))))
            assert r.draft.tokens[b, :g].tolist() == same.draft.tokens[b, :g].tolist()
            assert int(r.accepted[b]) == min(n, g), "what other rows do is nothing to a row"


def steps_of(m, rule, prompts=PROMPTS, count=20):
    """How many steps `chain` computes in each round, and what each row proposes."""
    steps, seen = [], []

    class Watched(Drafter):
        def propose(self, state):
            def step(token, k):
                steps.append(k)
                return torch.zeros(len(state.known), 1, 17)
            steps.clear()
            return Draft(*chain(state, step, rule))

    for _, r in rounds(m, prompts, count, Watched()):
        seen.append((len(steps), r.proposed.tolist()))
    return seen


def test_no_step_is_computed_once_all_rows_have_ended(models):
    m, never = models["llama"], lambda k, logits, token: torch.zeros(4, dtype=torch.bool)
    ends = lambda k, logits, token: torch.tensor([False, k == 1, k == 0, k == 3])  # noqa: E731
    assert steps_of(m, Says([2, 6, 6, 6], ends))[0] == (4, [2, 2, 1, 4])
    assert steps_of(m, Says([2, 1, 0, 3], never))[0] == (3, [2, 1, 0, 3])
    assert steps_of(m, Says([0, 0, 0, 0], ends))[0] == (0, [0, 0, 0, 0])
    assert steps_of(m, Says([2, 1, 0, 3]))[0] == (3, [2, 1, 0, 3])


def test_a_row_with_little_room_keeps_no_step_alive():
    """The first row may emit 3 tokens, the other ends its draft at once: two steps, though gamma is 9."""
    m = make(replace(LLAMA, max_len=11))
    second_ends = lambda k, logits, token: torch.tensor([False, True])  # noqa: E731
    assert steps_of(m, Says(9, second_ends), [[1] * 8, [2]], 99)[0] == (2, [2, 1])


def test_wanted_by_hand():
    state = SimpleNamespace(left_cpu=[9, 3, 1, 0])
    assert wanted(state, Rule(5)) == ([5, 2, 0, 0], True)
    assert wanted(state, Says([5, 0, 4, 4])) == ([5, 0, 0, 0], True)
    assert wanted(state, Rule(0)) == ([0] * 4, False)
    assert wanted(SimpleNamespace(left_cpu=[9, 9]), Says([2, 2])) == ([2, 2], False)
    with pytest.raises(ValueError):
        wanted(state, Says([1, 1]))


@each_family
def test_a_draft_model_behind_which_others_go_on_has_read_every_token(models, family):
    """Where its own draft of a row was shorter than the longest, the text went on with another's tokens."""
    m, far, tail = models[family], [], Lengths(6)
    drafter = Then(reader(small(m), Dice(6, 0), far), ModelDraft(m, tail))
    generate(m, PROMPTS, 40, drafter, warm, Coins(2))
    assert len(far) > 20 and max(far) < 1e-9
    assert sum(kept for _, kept, _ in tail.seen) > 15


def test_an_n_gram_knows_nothing_of_the_text_before(models):
    m = models["llama"]
    used, fresh = NGram(3, 1), NGram(3, 1)
    generate(m, PROMPTS, 20, used)
    others = [[4, 4, 9], [6, 3, 5, 3], [16, 2, 2], [1]]
    runs = [[r.draft.tokens.tolist() for _, r in rounds(m, others, 20, n_gram)] for n_gram in (used, fresh)]
    assert runs[0] == runs[1]


# --- the rules by hand


def state_of(rows=1):
    return SimpleNamespace(known=[[1, 1, 0] for _ in range(rows)], left_cpu=[99] * rows, send=torch.as_tensor)


def outcome(state, *pairs, sure=0.5):
    """The round in which row b drafted pairs[b][0] tokens and pairs[b][1] were accepted; None: the row had
    ended. The target gives each new token `sure`."""
    drafted, kept = zip(*((0, 0) if p is None else p for p in pairs), strict=True)
    new = [[] if p is None else [0] * (p[1] + 1) for p in pairs]
    for text, more in zip(state.known, new, strict=True):
        text += more
    return SimpleNamespace(proposed=torch.tensor(drafted), accepted=torch.tensor(kept), new=new,
                           sure=[[sure] * len(row) for row in new])


def play(rule, pairs):
    """What the rule asks for at the start and after each round of one row."""
    state, asked = state_of(), []
    rule.begin(state)
    for pair in [*pairs, None]:
        asked.append(wanted(state, rule)[0][0])
        rule.learn(state, outcome(state, pair))
    return asked


@pytest.mark.parametrize("rule, want", [
    (Schedule(2), [2, 3, 4, 3, 2, 1, 1, 1, 2]),
    (Schedule(2, up=2), [2, 4, 6, 5, 4, 3, 2, 2, 4]),
    (Schedule(2, up=0, down=0), [2] * 9),
    (Schedule(2, most=3), [2, 3, 3, 2, 1, 1, 1, 1, 2]),
    (Schedule(5, down=3, most=4), [5, 5, 5, 2, 1, 1, 1, 1, 2]),
    (Schedule(15), [15, 16, 16, 15, 14, 13, 12, 12, 13]),
    (Rule(3), [3] * 9),
], ids=["+1/-1", "heuristic", "constant", "bounded", "bounded by its start", "at most 16", "no schedule"])
def test_schedules_by_hand(rule, want):
    assert play(rule, [(2, 2), (3, 3), (4, 3), (3, 0), (2, 1), (1, 0), (0, 0), (1, 1)]) == want


def test_schedules_keep_rows_apart_and_start_anew():
    rule, state = Schedule(3), state_of(4)
    rule.begin(state)
    rule.learn(state, outcome(state, (3, 3), (3, 2), (0, 0), None))
    assert rule.gamma(state) == [4, 2, 3, 3]
    rule.begin(state_of(2))
    assert rule.gamma(state) == [3, 3]


@pytest.mark.parametrize("temperature, threshold", [(0, 0.4), (1.5, 0.25)])
def test_confidence_stops_behind_the_low_token_and_keeps_it(models, temperature, threshold):
    """A draft with the whole model is judged by the raw probabilities that it computes without a cache."""
    m, ends = models["llama"], []

    def look(state, draft):
        for b, text in enumerate(state.known):
            most = min(6, state.left_cpu[b] - 1)
            n = min(most, int(draft.length[b])) if most > 0 else 0
            if n > 0:
                drawn = draft.tokens[b, :n]
                p = m(torch.tensor([text + drawn.tolist()]))[0, len(text) - 1 : -1].softmax(-1)
                low = (p.gather(1, drawn[:, None])[:, 0] < threshold).tolist()
                assert not any(low[:-1]) and (low[-1] or n == most)
                ends.append((n, low[-1]))

    drafter = Watched(SelfDraft(m, FULL, Confidence(threshold, 6)), look)
    generate(m, PROMPTS, 40, drafter, lambda logits: to_probs(logits, temperature), Coins(2))
    assert len({n for n, _ in ends}) > 3 and {low for _, low in ends} == {True, False}


def test_confidence_is_the_raw_probability_in_float32_or_wider():
    logits = torch.tensor([[0.0, math.log(3)], [math.log(9), 0.0]])
    assert confidence(logits, torch.tensor([1, 1])).tolist() == pytest.approx([0.75, 0.1])
    half = torch.tensor([[100.0, 99.0]], dtype=torch.bfloat16)
    got = confidence(half, torch.tensor([0]))
    assert got.dtype == torch.float32 and float(got) == pytest.approx(1 / (1 + math.exp(-1)), rel=1e-5)
    assert confidence(logits.double(), torch.tensor([1, 1])).dtype == torch.float64


ADAPTIVE = [
    (AdaptiveExit(), [(4, 4), (4, 4), (4, 4), (12, 12), (0, 0), (4, 4), (4, 1), (12, 12), (2, 1)],
     [(0.5, 0.601), (0.75, 0.602), (0.875, 0.603), (0.9375, 0.603), (0.9375, 0.603), (0.96875, 0.602),
      (0.609375, 0.603), (0.8046875, 0.604), (0.65234375, 0.605)]),
    (AdaptiveExit(threshold=0.4, target=0.5, beta1=0.25, beta2=0.8, epsilon=0.1, gamma=3),
     [(2, 1), (2, 2), (3, 3), (1, 0)],
     [(0.375, 0.42), (0.84375, 0.4), (0.9609375, 0.4), (0.240234375, 0.42)])]


@pytest.mark.parametrize("rule, pairs, want", ADAPTIVE, ids=["as in the paper", "other numbers"])
def test_adaptive_exit_by_hand(rule, pairs, want):
    """m <- m / 2 + share / 2; the threshold moves by a tenth of .01: up while m < .9, else down, but not if
    nothing stopped the draft."""
    state = state_of()
    rule.begin(state)
    for pair, expected in zip(pairs, want, strict=True):
        rule.learn(state, outcome(state, pair))
        assert (rule.acceptance[0], rule.threshold[0]) == pytest.approx(expected, abs=1e-12)


def test_adaptive_exit_keeps_rows_apart_and_remembers():
    rule, state = AdaptiveExit(), state_of(3)
    assert (rule.target, rule.most) == (0.9, 12), "those of the paper"
    rule.begin(state)
    rule.learn(state, outcome(state, (4, 4), None, (2, 0)))
    rule.learn(state, outcome(state, (4, 4), None, (12, 12)))
    held = [pytest.approx(t) for t in (0.602, 0.6, 0.602)]
    assert rule.threshold == held and rule.acceptance == [0.75, 0, 0.5]
    rule.begin(state_of(3))
    assert rule.threshold == held, "what a text taught is where the next one starts"
    rule.begin(state_of(2))
    assert rule.threshold == [0.6, 0.6], "other rows know nothing"


def test_adaptive_exit_stops_each_row_at_its_own_threshold(models):
    m, rule = models["llama"], AdaptiveExit(gamma=4)
    rule.threshold, rule.acceptance = [0.0, 1.1, 1.1, 0.0], [0.0] * 4
    _, r = next(rounds(m, PROMPTS, 20, exit_draft(m, rule)))
    assert r.proposed.tolist() == [4, 1, 1, 4]


# --- gates


@pytest.mark.parametrize("temperature", [0, 1.4])
@each_family
def test_the_gate_drafts_after_tokens_that_the_target_was_sure_of(models, family, temperature):
    """As the target says without a cache; also of a rule of the second of two drafters."""
    m, answers = models[family], set()
    for pair in (False, True):
        rule = Gate(3, 0.7)
        drafter = exit_draft(m, rule)
        if pair:
            drafter = Then(SelfDraft(m, range(10), Says([3, 1, 2, 0])), NGram(rule, 1))
        sure = [1.0] * 4
        room = [30] * 4
        for state, r in rounds(m, PROMPTS, 30, drafter, lambda logits: to_probs(logits, temperature)):
            if not pair:
                assert r.proposed.tolist() == [
                    min(3, max(0, left - 1)) * (s >= 0.7) for s, left in zip(sure, room, strict=True)]
            for b, text in enumerate(state.known):
                if r.new[b]:
                    sure[b] = float(m(torch.tensor([text[:-1]]))[0, -1].softmax(-1)[text[-1]])
            assert rule.sure == pytest.approx(sure, abs=1e-9)
            assert rule.gamma(state) == [3 if s >= 0.7 else 0 for s in sure]
            answers.update(rule.gamma(state))
            room = list(state.left_cpu)
    assert answers == {0, 3}


def test_the_gate_is_open_at_first_and_at_exactly_its_threshold():
    rule, state = Gate(4), state_of(3)
    rule.begin(state)
    assert rule.gamma(state) == [4, 4, 4]
    rule.learn(state, outcome(state, (4, 1), None, (0, 0), sure=0.5 - 1e-9))
    assert rule.gamma(state) == [0, 4, 0], "a row that has ended keeps what was known"
    rule.learn(state, outcome(state, (0, 0), None, (0, 0), sure=0.5))
    assert rule.gamma(state) == [4, 4, 4]
    rule.learn(state, outcome(state, (0, 0), (0, 0), (0, 0), sure=0.1))
    rule.begin(state)
    assert rule.gamma(state) == [4, 4, 4]


def test_value_gate_counts_by_hand():
    """First drafts count for the class of the token before them, later ones together, up to the refusal."""
    rule, state = ValueGate(0.1, fade=0.5), state_of(4)
    rule.begin(state)
    rule.sure = [0.05, 0.95, 0.5, 0.59]
    rule.gamma(state)
    rule.learn(state, outcome(state, (4, 2), (3, 0), (4, 4), (0, 0), sure=0.31))
    count = [(b.hits, b.misses) for b in rule.first]
    assert count[0] == (1, 0) and count[9] == (0, 1) and count[5] == (1, 0)
    assert sum(map(sum, count)) == 3 and (rule.later.hits, rule.later.misses) == (4, 1)
    assert rule.sure == pytest.approx([0.31] * 4)
    rule.gamma(state)
    rule.learn(state, outcome(state, (1, 1), (2, 1), (1, 0), None))
    count = [(b.hits, b.misses) for b in rule.first]
    assert count[0] == (0.5, 0) and count[9] == (0, 0.5) and count[5] == (0.5, 0) and count[3] == (2, 1)
    assert (rule.later.hits, rule.later.misses) == (2, 1.5)


def test_value_gate_classes_are_tenths():
    rule = ValueGate(0.2)
    for sure, tenth in ((0, 0), (0.099, 0), (0.1, 1), (0.45, 4), (0.89, 8), (0.95, 9), (1.0, 9)):
        assert rule.kind(sure) is rule.first[tenth]


def test_value_gate_drafts_only_where_it_pays_and_tries_again():
    """Behind unsure tokens (.15) first drafts are refused, behind sure ones (.95) whole drafts accepted."""
    rule, state = ValueGate(0.3, 8), state_of(2)
    rule.begin(state)
    for _ in range(40):
        rule.sure = [0.15, 0.95]
        low, high = rule.gamma(state)
        rule.learn(state, outcome(state, (low, 0), (high, high)))
    assert (low, high) == (0, 8)
    assert rule.first[1].mean() <= 0.3 < 0.9 < rule.later.mean(), "though later drafts are always accepted"
    rule.begin(state)
    rule.sure, asked = [0.15, 0.15], []
    for _ in range(200):
        asked.append(rule.gamma(state)[0])
        rule.learn(state, outcome(state, (0, 0), (0, 0)))
        rule.sure = [0.15, 0.15]
    assert asked[0] == 0 and asked[-1] > 0, "what is known fades"


def test_value_gate_tries_a_class_that_it_knows_nothing_of():
    """Or with a prior of one half it would never draft where c is higher."""
    rule = ValueGate(0.9, 12)
    rule.sure, rule.first[3] = [0.35, 0.95], Beta(0.0, 0.6)
    assert rule.gamma(None) == [0, 1]


# --- do no harm


@pytest.fixture(scope="module")
def long():
    """A model, and two texts with 200 tokens each that it writes."""
    m, prompts = make(replace(LLAMA, max_len=256)), PROMPTS[:2]
    return m, [p + new for p, new in zip(prompts, generate(m, prompts, 200)[0], strict=True)]


def tried(long, good, rule, count):
    """How many tokens rows propose that know their text (True) or say something else. (rounds, rows)"""
    m, texts = long
    rows = rounds(m, PROMPTS[: len(good)], count, Foretold(texts[: len(good)], good, rule))
    return torch.stack([r.proposed for _, r in rows])


def test_a_useless_draft_costs_three_per_cent_at_most(long):
    found = tried(long, [False], DoNoHarm(0.8), 128)
    assert len(found) == 128, "not one draft is accepted"
    assert found[0] == 1 and found.sum() >= 2, "it tries at once, and again"
    assert found.sum() * 0.8 <= 0.03 * 128 + 0.8 and found.sum() * 0.8 <= 0.01 * 128 + 0.8


def test_a_hopeless_row_and_a_good_one_do_not_mix(long):
    found = tried(long, [True, False], DoNoHarm(0.25), 120)
    assert found[:, 0].max() == 16 and found[:10, 0].min() > 0
    assert found[:, 1].max() == 1 and found[:, 1].sum() * 0.25 <= 0.01 * 120 + 1


def test_do_no_harm_estimates_by_hand():
    rule, state = DoNoHarm(0.3), state_of(2)
    rule.begin(state)
    rule.learn(state, outcome(state, (3, 1), (0, 0)))
    assert [s.mean() for s in rule.seen] == [0.5, 0.5] and rule.past.mean() == 0.5
    rule.learn(state, outcome(state, (3, 3), (5, 0)))
    assert rule.seen[0].mean() == pytest.approx((3.95 + 1) / (3.95 + 0.95 + 2))
    assert (rule.seen[1].hits, rule.seen[1].misses) == (0, 1)
    assert rule.past.hits == pytest.approx((0.95 + 3) * 0.95)
    assert rule.past.misses == pytest.approx(0.95 * 0.95 + 1)
    rule.begin(state_of(3))
    assert [(s.hits, s.misses) for s in rule.seen] == [(rule.past.hits, rule.past.misses)] * 3
    rule.seen[0].add(5, 5)
    assert rule.past.hits < 4 > rule.seen[1].hits, "rows start alike and then learn apart"


def test_do_no_harm_keeps_its_purse_from_text_to_text(long):
    """Else each new text would be worth a first try."""
    rule = DoNoHarm(0.6)
    found = sum(int(tried(long, [False], rule, 9).sum()) for _ in range(20))
    assert 2 <= found <= 1 + 180 * 0.01 / 0.6
    rule.begin(state_of(3))
    assert rule.saved == [0.6] * 3, "other rows start anew"


def test_do_no_harm_asks_for_the_best_gamma():
    """From what it knows of each row; where that is 0, for one token whenever a row has saved up for it."""
    rng, rates = random.Random(5), (0, 0.5, 0.97)
    for c in (0.1, 0.2, 0.45, 0.9):
        rule, state, tries = DoNoHarm(c, risk=0.02), state_of(3), 0
        rule.begin(state)
        saved = [c] * 3
        for _ in range(150):
            asked = rule.gamma(state)
            for b, seen in enumerate(rule.seen):
                best = best_gamma(seen.mean(), c)
                if best == 0:
                    saved[b] += 0.02
                    if saved[b] >= c:
                        saved[b], best, tries = saved[b] - c, 1, tries + 1
                assert asked[b] == best
            kept = [next((i for i in range(g) if rng.random() >= rate), g)
                    for g, rate in zip(asked, rates, strict=True)]
            rule.learn(state, outcome(state, *zip(asked, kept, strict=True)))
        assert tries > 3


def test_laplace_succession():
    beta = Beta()
    assert beta.mean() == 0.5
    beta.add(2, 1)
    assert beta.mean() == 3 / 5
    twin = replace(beta)
    beta.fade(0.5)
    assert (beta.hits, beta.misses, twin.hits, twin.misses) == (1, 0.5, 2, 1)


def test_what_is_known_beforehand_counts_as_two_drafts():
    beta = Beta(prior=0.8)
    assert beta.mean() == 0.8 and beta.high() == 1.0, "a standard deviation is more than .2"
    beta.add(1, 1)
    assert beta.mean() == pytest.approx(2.6 / 4)
    generator = random.Random(1)
    draws = [beta.draw(generator) for _ in range(4000)]
    mean = sum(draws) / 4000
    assert mean == pytest.approx(2.6 / 4, abs=0.01)
    spread = (sum((x - mean) ** 2 for x in draws) / 4000) ** 0.5
    assert beta.high() - beta.mean() == pytest.approx(spread, abs=0.01), "a standard deviation"


# --- a drafter under a rule


class Told(Rule):
    """Writes down what it is told and asked."""

    def __init__(self, most, told):
        super().__init__(most)
        self.told = told

    def begin(self, state):
        self.told.append("begin")

    def gamma(self, state):
        self.told.append("gamma")
        return self.most

    def learn(self, state, r):
        self.told.append(("learn", *sorted(r.trace)))


def test_a_rule_and_its_drafter_are_told_everything(models):
    m, told = models["llama"], []

    class Tapped(SelfDraft):
        taps = (11, 2)

        def begin(self, state, trace):
            super().begin(state, trace)
            told.append({tap: tuple(x.shape) for tap, x in trace.items()})

    for second in (False, True):
        told.clear()
        tapped = Tapped(m, range(8), Told(1, told))
        next(rounds(m, PROMPTS, 9, Then(NGram(0, 1), tapped) if second else tapped))
        assert told == ["begin", {11: (4, 8, 32), 2: (4, 8, 32)}, "gamma", ("learn", 2, 11)]
    tapped, plain = Tapped(m, range(8), 0), NGram(1, 1)
    assert Then(tapped, plain).taps == Then(plain, tapped).taps == (2, 11)
    assert Then(plain, NGram(1, 2)).taps == ()


@pytest.mark.parametrize("part", PARTS)
def test_every_drafter_tells_its_rule_once_a_round(models, part):
    m, told = models["llama"], []
    _, passes = generate(m, PROMPTS, 9, PARTS[part](m, Told(2, told)))
    assert told == ["begin"] + ["gamma", ("learn",)] * passes


@pytest.mark.parametrize("rule", [
    Confidence(0.4, 0), AdaptiveExit(gamma=0), Gate(0), ValueGate(0.3, 0), DoNoHarm(0.3, 0)])
def test_a_rule_of_no_tokens_never_drafts(models, rule):
    m, want = models["llama"], oracle(models["llama"], PROMPTS[0], 30)
    shown = [r for _, r in rounds(m, PROMPTS[:1], 30, exit_draft(m, rule))]
    assert sum((r.new[0] for r in shown), []) == want
    assert all(r.draft.tokens.shape[1] == 0 for r in shown)


def test_a_useless_draft_that_costs_nothing_is_given_up(long):
    """Of a draft that is never accepted the estimate falls to .045 only: a cost below that must not keep it
    drafting."""
    for cost in (0.0, 0.01, 0.044):
        assert tried(long, [False], DoNoHarm(cost), 200)[100:].sum() <= 100 * 0.01 / DoNoHarm.FLOOR + 1


@pytest.mark.parametrize("build", [lambda: Rule(-1), lambda: Schedule(1.5), lambda: Gate("2")])
def test_a_rule_needs_a_length(build):
    with pytest.raises(ValueError, match="gamma, how many tokens to draft, must be a whole number"):
        build()


# --- one draft behind another


def test_each_row_goes_on_where_its_own_draft_ends(models):
    """Gaps close row by row, and the second drafter is shown the text with the first draft."""
    m, seen = models["llama"], []
    first, second = [[4, 5, 6], [7], [], [8, 9]], [[1], [2, 3], [4, 4, 4], []]

    def tail(state):
        seen.append(state)
        return second

    state, r = next(rounds(m, PROMPTS, 20, Then(Say(lambda s: first), Say(tail))))
    assert r.proposed.tolist() == [4, 3, 3, 2] and r.draft.q is None and r.draft.reuse is None
    got = [row[:n] for row, n in zip(r.draft.tokens.tolist(), r.proposed.tolist(), strict=True)]
    assert got == [a + b for a, b in zip(first, second, strict=True)]
    shown, = seen
    assert shown.known == [p + a for p, a in zip(PROMPTS, first, strict=True)]
    assert shown.n.tolist() == [len(t) for t in shown.known]
    assert shown.left_cpu == shown.left.tolist() == [17, 19, 20, 18]
    for b, text in enumerate(shown.known):
        assert shown.tokens[b, : len(text)].tolist() == text
    assert [t[: len(p)] for t, p in zip(state.known, PROMPTS, strict=True)] == PROMPTS


def test_a_shown_draft_leaves_the_true_state_alone(models):
    m = models["llama"]
    state, _ = next(rounds(m, PROMPTS, 20))
    before = state.tokens.clone(), list(map(list, state.known)), list(state.left_cpu), state.n.clone()
    Then(Say(lambda s: [[4], [5, 6], [], [7]]), Say(lambda s: [[1]] * 4)).propose(state)
    assert torch.equal(state.tokens, before[0]) and (state.known, state.left_cpu) == before[1:3]
    assert torch.equal(state.n, before[3])


def test_the_first_draft_is_clipped_to_each_rows_room():
    """It may say too much; the tail then stands behind what is left of it."""
    m, shown = make(replace(LLAMA, max_len=12)), []

    def tail(state):
        shown.append([len(t) for t in state.known])
        return [[1]] * 4

    first = Say(lambda s: [[3] * 6] * 4)
    want = [oracle(m, p, 12 - len(p)) for p in PROMPTS]
    assert generate(m, PROMPTS, 99, Then(first, Say(tail)))[0] == want
    assert shown[0] == [11, 8, 7, 11]


def draft(tokens, lengths=None, q=None, reuse=None):
    return Draft(torch.tensor(tokens), q, None if lengths is None else torch.tensor(lengths), reuse)


@pytest.mark.parametrize("drawn", [(False, False), (True, False), (False, True), (True, True)])
def test_joined_drafts_are_drawn_from_what_each_was_drawn_from(drawn):
    head, tail = [[1, 2], [0, 9]], [[3, 4, 9], [2, 1, 0]]
    qs = [torch.rand(2, K, 10).double() if q else None for K, q in zip((2, 3), drawn, strict=True)]
    length = torch.tensor([2, 1])
    got = join(draft(head, q=qs[0]), length, draft(tail, [2, 3], qs[1]), 2)
    assert got.length.tolist() == [4, 4] and got.reuse is None
    assert got.tokens[:, :4].tolist() == [[1, 2, 3, 4], [0, 2, 1, 0]]
    if not any(drawn):
        assert got.q is None
        return
    hot = torch.eye(10, dtype=torch.float64)
    a, b = (hot[torch.tensor(t)] if q is None else q for q, t in zip(qs, (head, tail), strict=True))
    assert torch.equal(got.q[:, :4], torch.stack([torch.cat([a[0], b[0, :2]]), torch.cat([a[1, :1], b[1]])]))


def test_joined_with_nothing_before_or_behind():
    empty, some = draft([[], []]), draft([[3, 4], [5, 6]], [2, 0])
    empty.tokens = empty.tokens.long()
    got = join(empty, torch.tensor([0, 0]), some, 0)
    assert got.tokens.tolist() == [[3, 4], [5, 6]] and got.length.tolist() == [2, 0]
    full = draft([[3, 4], [5, 6]], [2, 2], reuse=(2, "x"))
    got = join(full, torch.tensor([2, 1]), empty, 2)
    assert got.tokens is full.tokens and got.length.tolist() == [2, 1] and got.reuse == (2, "x")
    assert join(full, torch.tensor([2, 1]), draft([[1], [1]]), 2).length.tolist() == [3, 2]


def test_what_is_shared_is_handed_over_unless_there_is_a_tail(models):
    m, kept, dropped = models["llama"], 0, 0
    for _, r in rounds(m, PROMPTS, 40, Then(SelfDraft(m, range(8), 2), NGram(4, 2))):
        tail = r.draft.tokens.shape[1] > 2
        if r.draft.tokens.shape[1] >= 2:
            assert (r.draft.reuse is None) == tail
            kept, dropped = kept + (not tail), dropped + tail
    assert kept and dropped


def part_outcomes(m, first, second, eos=()):
    """What the rules of two drafters learn of one round: (proposed, accepted, written) of each row. first,
    second: of each row, which of the tokens that the drafter says are right."""
    rules = Lengths(), Lengths()
    want = [oracle(m, p, 12) for p in PROMPTS]

    def say(rows):
        def row(b, text, right):
            at = len(text) - len(PROMPTS[b])
            return [want[b][at + i] if ok else (want[b][at + i] + 1) % 17 for i, ok in enumerate(right)]
        return lambda state: [row(b, t, r) for b, (t, r) in enumerate(zip(state.known, rows, strict=True))]

    pair = Then(Say(say(first), rules[0]), Say(say(second), rules[1]))
    next(rounds(m, PROMPTS, 12, pair, eos=eos))
    return rules[0].seen, rules[1].seen


def test_each_rule_learns_of_its_own_part(models):
    """A tail after a refusal was not proposed."""
    T, F = True, False
    first = [[T, T], [T, F], [], [T, T, T]]
    second = [[T, F], [T, T], [T, T], [F]]
    a, b = part_outcomes(models["llama"], first, second)
    assert a == [(2, 2, 4), (2, 1, 2), (0, 0, 3), (3, 3, 4)]
    assert b == [(2, 1, 2), (0, 0, 0), (2, 2, 3), (1, 0, 1)]


def test_each_rule_learns_what_an_end_of_text_left(models, truth):
    """Behind the end nothing was refused, on whichever place of the first draft and the tail it falls."""
    first, second = [[]] * 3 + [[True] * 2], [[]] * 3 + [[True] * 2]
    row = truth["llama"][3]
    for i in range(4):
        place = row.index(row[i])
        a, b = part_outcomes(models["llama"], first, second, eos=[row[i]])
        assert a[3][:2] == ((2, 2) if place >= 1 else (1, 1))
        assert b[3][:2] == (max(0, min(place - 1, 2)),) * 2
    assert len(set(row[:4])) > 2


# --- the speed-up model


def walks(text, gamma, at=0):
    """(tokens, rounds) to be expected from position `at` on, by trying every outcome of every round."""
    if at > len(text) - gamma:
        return 0.0, 0.0
    tokens, rounds, reach = 0.0, 1.0, 1.0
    for k in range(gamma + 1):
        stop = reach * (1 - text[at + k]) if k < gamma else reach
        if stop:
            more = walks(text, gamma, at + k + 1)
            tokens, rounds = tokens + stop * (k + 1 + more[0]), rounds + stop * more[1]
        reach -= stop
    return tokens, rounds


def test_expected_tokens_along_a_series_by_trying_every_outcome():
    rng = random.Random(0)
    texts = [[rng.choice([0.0, 1.0, rng.random()]) for _ in range(n)] for n in (17, 9, 3)]
    series = [torch.tensor(text, dtype=torch.float64) for text in texts]
    assert expected_tokens(series, 0) == 1
    for gamma in range(1, 17):
        of_each = [walks(text, gamma) for text in texts]
        tokens, rounds = (sum(column) for column in zip(*of_each, strict=True))
        assert expected_tokens(series, gamma) == pytest.approx(tokens / rounds, rel=1e-12)
        assert expected_tokens(series[0], gamma) == pytest.approx(of_each[0][0] / of_each[0][1], rel=1e-12)


def test_best_gamma_by_brute_force():
    rng = random.Random(1)
    for _ in range(300):
        alpha, c, most = rng.random(), rng.random() * 0.9, rng.randint(0, 20)
        speed = [(1 - alpha ** (g + 1)) / (1 - alpha) / (g * c + 1) for g in range(most + 1)]
        assert best_gamma(alpha, c, most) == speed.index(max(speed))
        assert expected_speedup(alpha, most, c) == pytest.approx(speed[-1], rel=1e-12)
    assert best_gamma(1.0, 0.5) == 16 and best_gamma(0.0, 0.1) == 0 and best_gamma(0.4, 0.4) == 0


def test_plan_by_brute_force():
    rng = random.Random(2)
    for _ in range(500):
        first, later, c, most = rng.random(), rng.random(), rng.random(), rng.randint(0, 20)
        speed = [(1 + sum(first * later**i for i in range(g))) / (g * c + 1) for g in range(most + 1)]
        assert plan(first, later, c, most) == speed.index(max(speed))
        assert plan(later, later, c, most) == best_gamma(later, c, most)
        assert (plan(first, later, c, 16) > 0) == (first > c), "whatever is known of later drafts"
    assert plan(0.5, 0.5, 0.5, 9) == 0, "where nothing is gained nothing is drafted"


@pytest.mark.parametrize("tied", [False, True])
@each_family
def test_weight_costs_count_what_a_pass_reads(family, tied):
    """The matrices of each sub-layer and the head once; no norms, and no embedding that is only looked up."""
    m = Transformer(replace(LIVELY[family], tied=tied, vocab_size=23))
    costs = weight_costs(m.c)
    parts = [part for block in m.blocks for part in (block.attn, block.mlp)]
    assert list(costs.sublayers) == [sum(p.numel() for p in part.parameters()) for part in parts]
    assert costs.head == m.tok.numel()
    matrices = sum(p.numel() for p in m.parameters() if p.dim() == 2)
    assert sum(costs.sublayers) + costs.head == matrices - (0 if tied else m.tok.numel())


def test_costs_by_hand():
    costs = Costs((3.0, 5.0, 7.0, 11.0), 4.0)
    assert costs.step(range(4)) == 1 and costs.step([]) == 4 / 30
    assert costs.step(early_exit(2, 1)) == 12 / 30
    assert costs.step(early_exit(2, 1), share=0.25) == 9 / 30, "a quarter of the head's rows"
    assert costs.step(without(2, attn=[0], mlp=[1])) == (5 + 7 + 4) / 30
    called = replace(costs, call=10.0)
    assert called.step(range(4)) == 1 and called.step([], share=0.25) == (1 + 10) / 40
    assert [costs.block(T) for T in (1, 2, 17, 99)] == [1.0] * 4, "by weights"
    measured = replace(costs, blocks=((1, 1.0), (3, 1.5), (5, 3.5)))
    assert [measured.block(T) for T in range(1, 8)] == [1.0, 1.25, 1.5, 2.5, 3.5, 4.5, 5.5]
    odd = replace(costs, blocks=((1, 1.0), (3, 1.5), (5, 1.25)))
    assert [odd.block(T) for T in (4, 5, 9)] == [1.375, 1.25, 1.25], "a wider block is never cheaper"


def test_a_wider_block_costs_what_it_costs():
    """2.44 tokens, for two drafted steps of .2 and a block of three tokens that costs 1.5 single ones."""
    assert expected_speedup(0.8, 2, 0.2, 1.5) == pytest.approx(2.44 / 1.9)
    for block in (lambda T: 1.0, lambda T: 1 + 0.1 * (T - 1), lambda T: float(T)):
        gains = [expected_speedup(0.8, gamma, 0.05, block(gamma + 1)) for gamma in range(17)]
        assert best_gamma(0.8, 0.05, block=block) == gains.index(max(gains))
    assert best_gamma(0.8, 0.05, block=lambda T: 1 + 0.1 * (T - 1)) < best_gamma(0.8, 0.05)
    assert best_gamma(0.8, 0.05, block=lambda T: float(T)) == 0


# --- what others published, from their figures alone


def test_a_skip_set_of_gemma_2_9b_cannot_gain():
    """19 of 42 attentions and 18 of 42 MLPs skipped: 48.82 tokens/s of the draft alone, 29.65 of
    the target, 40.57 % of the drafts accepted, and 24.08 tokens/s of both together."""
    shape = Config(vocab_size=256_000, dim=3584, n_layers=42, n_heads=16, n_kv_heads=8, head_dim=256,
                   hidden_dim=14_336, tied=True)
    c = weight_costs(shape).step(without(42, range(19), range(18)))
    assert abs(c - 29.65 / 48.82) < 0.005
    assert all(expected_speedup(0.4057, gamma, c) < 1 for gamma in range(1, 30))
    assert best_gamma(0.4057, c) == 0


@pytest.mark.parametrize("layers, attn, mlp, ceiling, shape", [
    (40, 24, 10, 1.57, dict(dim=5120, n_heads=40, n_kv_heads=40, head_dim=128, hidden_dim=13_824)),
    (80, 47, 37, 1.93, dict(dim=8192, n_heads=64, n_kv_heads=8, head_dim=128, hidden_dim=28_672)),
], ids=["Llama-2-13B", "Llama-2-70B"])
def test_ceilings_of_the_skip_sets_of_draft_and_verify(layers, attn, mlp, ceiling, shape):
    """No draft can be accepted more often than always: by weights their speed-up stays below 1/c."""
    costs = weight_costs(Config(vocab_size=32_000, n_layers=layers, **shape))
    c = costs.step(without(layers, range(attn), range(mlp)))
    assert 1 / c == pytest.approx(ceiling, abs=0.005)
    assert all(expected_speedup(1.0, gamma, c) < 1 / c for gamma in range(100))
