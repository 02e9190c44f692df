"""Pace never changes the text, never loses more than it may, and chooses what promises most."""
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import expected
import pytest
import torch
from matplotlib import image
from test_control import Foretold, Poisoned
from test_speculative import TINY, TINY_GEMMA, TOP_P, assert_same_law, target_law
from tiny import LIVELY, LLAMA, PROMPTS, devices, each_family, law, make, make_round, oracle

from benchmarks import dynamic as bench_dynamic
from benchmarks.drafters import Bench, metered
from benchmarks.shared import SETS, prompt_ids
from control import Costs, plan, weight_costs
from layerskip import SelfDraft, ShortHead, Teacher, early_exit, keep
from methods import pace as module
from methods.pace import STAKE, TAIL, Pace, Skill, Way, candidates, self_draft
from sampling import Coins, to_probs
from speculative import ModelDraft, generate, rounds
from support import plots

SKIP = keep(6, attn=[1, 4], mlp=[2])
LOOP = [[1, 2, 3, 4] * 4, [7, 7, 7, 7, 7], [5, 6, 5, 6, 5, 6], [9]]  # what n-grams like
CHEAP = Costs((0.02,) * 8 + (2.5,) * 4, 0.01)  # self-drafts are nearly free


def everything(m, costs=CHEAP, L=6):
    """Pace with ways of all kinds."""
    small = make(replace(m.c, n_layers=1), 5, m.tok.device)
    ways = candidates(m, costs, SKIP) + candidates(m, costs, None, [4, 9, 0, 2, 16, 3])
    return Pace(m, [*ways, Way("small", ModelDraft(small, 0), lambda n: 0.1)], costs, risk=0.5)


PACES = {"by weights": Pace, "cheap": everything,
         "two": lambda m: Pace(m, [self_draft("exit 3", m, early_exit(6, 3), CHEAP)], CHEAP, most=3)}
each_pace = pytest.mark.parametrize("name", PACES)


# --- nothing changes the text


@devices
@each_family
@each_pace
def test_greedy_identity(family, name, device):
    m, count = make(LIVELY[family], device=device), 20 if device == "cpu" else 8
    for prompts in (PROMPTS, LOOP)[: 1 + (device == "cpu")]:
        drafter, out = PACES[name](m), [[] for _ in prompts]
        for _, r in rounds(m, prompts, count, drafter):
            assert drafter.purse > -1e-9
            for row, new in zip(out, r.new, strict=True):
                row += new
        assert out == [oracle(m, p, count) for p in prompts]
    assert set(drafter.chosen) - {"nothing"}, "it drafted nothing"


@each_family
def test_rows_equal_solo_runs_and_short_answers_are_short(models, family):
    m = models[family]
    for prompt in (*PROMPTS[:2], LOOP[0]):
        for count in (0, 1, 2, 12):
            assert generate(m, [prompt], count, everything(m))[0] == [oracle(m, prompt, count)]


@each_family
def test_dead_slots_are_never_read(models, family):
    m = models[family]
    runs = [[(r.new, r.accepted.tolist(), r.proposed.tolist()) for _, r in rounds(m, PROMPTS, 14, drafter)]
            for drafter in (everything(m), Poisoned(everything(m)))]
    assert runs[0] == runs[1]


LAWS = {"llama": TINY, "gemma2": TINY_GEMMA}


def tiny_pace(m):
    costs = Costs((0.02,) * 5 + (9.0,), 0.0)
    ways = [self_draft("exit 1", m, range(2), costs), self_draft("skip", m, [0, 1, 3, 5], costs)]
    return Pace(m, ways, costs, most=2, risk=0.9)


@pytest.mark.parametrize("family", LAWS)
def test_exact_law(family):
    m, probs, drafted = make(LAWS[family], 3), lambda x: to_probs(x, **TOP_P), set()

    def run(coins):
        out = []
        for _, r in rounds(m, [[1, 2, 1]], 3, tiny_pace(m), probs, coins):
            out += r.new[0]
            drafted.add(int(r.proposed))
        return tuple(out)

    assert_same_law(law(run), target_law(m, [1, 2, 1], probs, 3))
    assert len(drafted) > 1, "the case should have drafts of several lengths"


def test_exact_law_of_a_ragged_batch():
    m, probs, prompts = make(TINY, 3), lambda x: to_probs(x, 1.5, top_p=0.7), [[1, 2, 1], [2]]
    got = law(lambda coins: tuple(map(tuple, generate(m, prompts, 2, tiny_pace(m), probs, coins)[0])))
    alone = [target_law(m, p, probs, 2) for p in prompts]
    assert_same_law(got, {(a, b): u * v for a, u in alone[0].items() for b, v in alone[1].items()})


def test_the_same_seed_repeats_everything(models):
    m, runs = models["llama"], []
    for _ in range(2):
        drafter = everything(m)
        out = [generate(m, PROMPTS, 16, drafter, lambda x: to_probs(x, 0.9), Coins(s))[0] for s in (1, 2)]
        runs.append((out, drafter.chosen, drafter.purse))
    assert runs[0] == runs[1]


# --- what it may lose


@pytest.fixture(scope="module")
def long():
    """A model and a text of 200 new tokens that it writes."""
    m = make(replace(LLAMA, max_len=256))
    return m, PROMPTS[0] + generate(m, PROMPTS[:1], 200)[0][0]


class Liar(Foretold):
    """Knows the answer for its first `honest` tokens, and then says something else."""

    def __init__(self, text, honest):
        super().__init__([text], [True], 0)
        honest_say = self.say

        def say(state):
            rows = honest_say(state)
            return rows if len(state.known[0]) < honest else [[(t + 1) % 17 for t in row] for row in rows]
        self.say = say


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
        way = Way("liar", Liar(text, honest), lambda n: price, stops=False)
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
def test_by_weights_it_is_never_slower_than_it_promises(family):
    """Random exits, of which little is accepted, priced by what the passes really read."""
    m = make(replace(LIVELY[family], max_len=256), 4)
    costs, drafter = weight_costs(m.c), Pace(m, risk=0.02)
    costs = replace(costs, slot=0.0)    # which the meter does not count
    drafter = Pace(m, costs=costs, risk=0.02)
    for prompt in PROMPTS[:2]:
        stream = rounds(m, [prompt], 120, drafter)
        with metered([m]) as read:
            next(stream)                # the prompt's passes are in here: one more, and what scores it
            before = sum(read) - costs.whole
            for _ in stream:
                pass
        assert sum(read) - before <= 120 * 1.02 * costs.whole + 2 * STAKE * costs.whole


def test_a_perfect_way_is_drawn_out(long):
    m, text = long
    drafter = Pace(m, [Way("sure", Liar(text, 999), lambda n: 0.1, stops=False)], Costs((1.0,) * 12, 1.0))
    lengths = [int(r.proposed) for _, r in rounds(m, PROMPTS[:1], 200, drafter)]
    assert max(lengths) == 16 and len(lengths) < 30


def test_it_changes_to_what_is_better_and_back(long):
    """Two ways, each right where the other one is wrong; and what was learnt outlives the run."""
    m, text = long
    first, second = Liar(text, 100), Liar(text, 999)
    late = second.say
    second.say = lambda state: (late(state) if len(state.known[0]) > 100 else
                                [[(t + 1) % 17 for t in row] for row in late(state)])
    ways = [Way("early", first, lambda n: 0.2, stops=False), Way("late", second, lambda n: 0.2, stops=False)]
    drafter, used = Pace(m, ways, Costs((1.0,) * 12, 1.0), risk=0.1), []
    for state, r in rounds(m, PROMPTS[:1], 200, drafter):
        if int(r.accepted) > 1:
            used.append((drafter.way.name, len(state.known[0])))
    assert {name for name, n in used if n < 100} == {"early"}
    assert sum(name == "late" for name, _ in used) > 3, "it found the other one"
    known = [skill.known() for skill in drafter.past]
    drafter.begin(state, {tap: None for tap in drafter.taps})
    assert [skill.known() for skill in drafter.skills[0]] == known and max(known) > 1


# --- what it knows


@each_family
@pytest.mark.parametrize("probs", [to_probs, lambda x: to_probs(x, 1.0)], ids=["greedy", "sampled"])
def test_a_trace_tells_of_every_exit(models, monkeypatch, family, probs):
    """Whatever drafts: the counts are what `Teacher` finds, which drafts at each place."""
    m = models[family]
    monkeypatch.setattr(module, "DOUBT", math.inf)      # score every round
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
            skill = drafter.skills[b][i]
            assert skill.all.hits == pytest.approx(hits, abs=1e-5)
            assert skill.known() == pytest.approx(len(text))
    assert set(drafter.chosen) - {"nothing", "n-gram"}, "the case should have drafts"
    assert drafter.past[0].known() == pytest.approx(sum(map(len, state.known)))


def test_skills_fade_and_believe_the_draft_at_first():
    skill = Skill()
    assert skill.by_tenths() == pytest.approx([(2 * i + 1) / 20 for i in range(10)]) and skill.known() == 0
    skill.add(0.75, 0.99), skill.add(1.0, 1.0), skill.add(0.0, 0.05)
    assert (skill.all.hits, skill.all.misses) == (1.75, 1.25) and skill.known() == 3
    assert skill.by_tenths()[9] == pytest.approx((1.75 + 1.9) / 4)
    assert skill.by_tenths()[0] == pytest.approx(0.1 / 3)
    twin = skill.copy()
    twin.fade(0.5)
    assert (twin.all.hits, twin.tenths[9].hits, skill.all.hits) == (0.875, 0.875, 1.75)


def test_what_an_n_gram_would_have_copied(models):
    drafter = Pace(models["llama"], [], CHEAP, fade=0.5)
    drafter.live, drafter.found = [0, 1, 2, 3], [[5, 6, 7], [5, 6], [], [1]]
    drafter.read(make_round([[5, 6, 9], [5, 6], [3], [2]], [0] * 4, [0] * 4))
    assert (drafter.copied.hits, drafter.copied.misses) == (4, 2), "2 of 3, 2 of 2 so far, none, 0 of 1"
    assert (drafter.followed.hits, drafter.followed.misses) == (4, 4)
    drafter.live = [1]
    drafter.read(make_round([[5, 6, 9], [1], [3], [2]], [0] * 4, [0] * 4))
    assert (drafter.copied.hits, drafter.copied.misses) == (2, 2)


def test_outcomes_are_counted_by_hand(models):
    """Two rows: one refused at its second token, one accepted whole. Overlaps where there are logits, with
    how sure the draft was; else what became of it."""
    m = models["llama"]
    drafter = Pace(m, [Way("", SelfDraft(m, range(2), 0), lambda n: 0.1)], CHEAP)
    drafter.skills = [[skill.copy() for skill in drafter.past] for _ in range(2)]
    drafter.way, drafter.pair, drafter.sures = drafter.ways[0], None, []
    q = torch.zeros(2, 3, 9)
    q[:, :, 0] = torch.tensor([[0.5, 1.0, 0.0], [0.25, 0.125, 0.0]])
    r = make_round([[1, 1], [1, 1, 1]], [1, 2], [3, 2], [[0, 0, 0], [0, 0, 0]], q)
    drafter.count(r)
    both = [(row[0].all.hits, row[0].all.misses) for row in drafter.skills]
    assert both == [(1, 1), (2, 0)] and drafter.past[0].tenths[5].hits == 3
    drafter.skills = [[Skill()], [Skill()]]
    drafter.sures = [torch.tensor([9, 0]), torch.tensor([9, 1]), torch.tensor([3, 3])]
    r.p[:] = torch.tensor([0.25] + [0.75 / 8] * 8)
    drafter.count(r)
    first, second = (row[0] for row in drafter.skills)
    assert first.all.hits == pytest.approx(0.5) and first.known() == pytest.approx(2)
    assert first.tenths[9].hits == pytest.approx(0.5) and second.tenths[0].hits == pytest.approx(0.25)
    assert second.tenths[1].hits == pytest.approx(0.125) and second.known() == pytest.approx(2)
    assert second.tenths[3].hits == 0, "what was not proposed was not tested"


def test_the_purse_by_hand(models):
    """A draft of two at .25 and a scored trace, where three tokens were written; then a tail's lost work."""
    m, costs = models["llama"], Costs((1.0,) * 12, 4.0, ((1, 1.0), (17, 3.0)))
    drafter = Pace(m, [self_draft("exit 2", m, range(4), costs)], costs, risk=0.5)
    drafter.live, drafter.way, drafter.tail, drafter.price = [0], drafter.ways[0], False, 0.25
    drafter.sures, drafter.scores, r = [None, None], True, make_round([[1, 1, 1]], [2], [2], [[0, 0]])
    drafter.pay(r)
    assert drafter.purse == pytest.approx(STAKE + 3 * 1.5 - 0.5 - 1.25 - 0.25 * 1.25)
    before, drafter.tail, drafter.scores = drafter.purse, True, False
    drafter.pay(make_round([[1]], [0], [4], [[0] * 4]))
    assert drafter.purse == pytest.approx(before + 1.5 - 0.5 - 4 / 16 - 1.5)
    before, drafter.way, drafter.tail, drafter.sures = drafter.purse, drafter.nothing, False, []
    drafter.price = 0.0
    drafter.pay(make_round([[1]], [0], [0]))
    assert drafter.purse == pytest.approx(before + 0.5)


# --- what it decides


def asked(drafter, rows=1, n=10):
    drafter.live, drafter.n = list(range(rows)), n
    return drafter


def test_promises_are_the_formula():
    """With one row, blocks for free and no tail they are those of `plan`."""
    generator = random.Random(2)
    for _ in range(40):
        alpha, price = generator.random(), generator.random()
        drafter = asked(Pace(make(TINY), [], Costs((1.0,) * 6, 1.0)))
        way = Way("", None, lambda n, price=price: price)
        bill = drafter.bill(way, False)
        promise, (length,) = drafter.promise([alpha], [16], bill, 0.0)
        assert length == plan(alpha, alpha, price, 16)
        assert promise == pytest.approx(sum(alpha**k for k in range(length + 1)) / (length * price + 1))
        assert drafter.promise([alpha], [2], bill, 0.0)[1][0] <= 2


def test_promises_of_blocks_tails_and_rows_by_hand():
    costs = Costs((1.0,) * 6, 2.0, ((1, 1.0), (2, 1.5), (17, 9.0)))
    drafter, way = asked(Pace(make(TINY), [], costs), 2), Way("", None, lambda n: 0.1, None, 0.25)
    assert drafter.bill(way, False)[:3] == pytest.approx([1.0, 1.6, 0.2 + 2.0])
    assert drafter.bill(way, True)[1] == pytest.approx(0.1 + 0.25 + costs.block(2 + TAIL))
    bill = [1.0, 1.25, 1.5]
    assert drafter.promise([0.5, 0.9], [2, 2], bill, 0.0) == (
        pytest.approx((1.5 + 0.25 * 0 + 1 + 0.9 + 0.81) / 2 / 1.5), [1, 2])
    promise, lengths = drafter.promise([0.5, 0.0], [2, 2], bill, 3.0)
    assert lengths == [1, 0] and promise == pytest.approx((1 + 0.5 + 0.5 * 3 + 1) / 2 / 1.25)
    drafter.live = [0]
    assert drafter.promise([0.5, 0.9], [2, 0], bill, 0.0) == (pytest.approx(1.5 / 1.25), [1, 0])


def test_one_more_is_drafted_while_its_gain_exceeds_its_price(models):
    """Two rows whose tokens are accepted with .9 and .3, at a rate of 2 tokens a pass and a price of .2: one
    more must promise .4 tokens."""
    drafter = Pace(models["llama"], [], Costs((1.0,) * 12, 1.0, ((1, 1.0), (3, 1.0), (17, 2.4))))
    drafter.table, drafter.mean = torch.full((2, 10), 0.5), torch.tensor([0.9, 0.9])
    drafter.table[0, 9], drafter.reach, drafter.sures = 0.9, torch.ones(2), []
    drafter.rate, drafter.price = 2.0, 0.2
    sure = torch.tensor([[50.0] + [0.0] * 16, [0.0] * 17])      # probability 1, and 1/17
    assert drafter.enough(0, sure).tolist() == [False, False]   # .81 and .45 against .4
    assert drafter.enough(1, sure).tolist() == [False, True]    # .729 and .225 against .4 + .2
    assert drafter.enough(2, sure).tolist() == [False, True]    # .656 against .6
    assert drafter.enough(3, sure).tolist() == [True, True]     # .59
    assert [x.tolist() for x in drafter.sures[:1]] == [[9, 0]]


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


def test_experiments_are_saved_for(long):
    """A way that is never good, at .5 a token: tried at first, and then once in .5 / risk rounds."""
    m, text = long
    for risk, least, most in ((0.01, 2, 6), (0.05, 10, 24), (0.0, 1, 2)):
        way = Way("liar", Liar(text, 0), lambda n: 0.5, stops=False)
        drafter = Pace(m, [way], Costs((1.0,) * 12, 1.0), risk=risk)
        tried = [r.draft.tokens.shape[1] for _, r in rounds(m, PROMPTS[:1], 200, drafter)
                 if drafter.way.name == "liar" and not drafter.tail]
        assert least <= len(tried) <= most and 0.5 * sum(tried) <= STAKE + 200 * risk


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
    m, costs = models["llama"], Costs((1.0,) * 12, 4.0, ((1, 1.0), (3, 2.0)))
    both = candidates(m, costs) + candidates(m, costs, None, [1, 2, 3])
    assert Pace(m, both, costs).scoring_price(1) == pytest.approx(4 / 16 * (1 + 3 / 17))
    assert Pace(m, both, costs).scoring_price(2) == pytest.approx(1.5 * 4 / 16 * (1 + 3 / 17))
    assert Pace(m, [self_draft("skip", m, SKIP, costs)], costs).scoring_price(1) == 0


def test_only_the_target_itself_can_teach(models):
    with pytest.raises(ValueError, match="give it the model that decodes"):
        generate(models["llama"], PROMPTS, 4, Pace(make(LLAMA, 9)))


def test_a_way_that_is_refused_gets_fewer_tokens_than_the_purse_holds(models):
    """At the start one pass may be lost: four tokens of .25, not sixteen."""
    drafter = Pace(models["llama"], [Way("sure", SelfDraft(models["llama"], range(2), 0), lambda n: 0.25)],
                   Costs((1.0,) * 12, 1.0))
    drafter.past[0].all.hits = 100.0
    _, r = next(rounds(models["llama"], PROMPTS[:1], 40, drafter))
    assert 1 <= r.draft.tokens.shape[1] <= 4 and drafter.lengths == [4]


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
    m, a = models["llama"], SimpleNamespace(new=10, dtype="float64", repeats=1, quick=False, model="tiny",
                                            machine="here")
    bench = Bench(a, {"float64": (m, None)}, PROMPTS, {})
    bar = SimpleNamespace(update=lambda: None, reset=lambda n: None, set_postfix_str=lambda *a, **b: None)
    kinds = ["stories", "stories", "code", "code"]
    rows, choices, alphas, found = bench_dynamic.column(a, bench, kinds, SKIP, None, weight_costs(m.c), bar)
    assert {"plain", "SWIFT", "CLaSp", "DEL", "Pace", "exit 1, gamma 2", "skip set, gamma 2"} <= set(rows)
    assert found == [] and len(choices) == 4 and all(sum(rounds.values()) for rounds in choices)
    assert set(alphas) == {1, 2, 3, 4, 5} and all(0 < x < 1 for x in alphas.values())
    fixed = [name for name in rows if "gamma" in name] + ["n-gram"]
    best = [max(1.0, *(rows[name]["ratios"][i] for name in fixed)) for i in range(4)]
    for name, r in rows.items():
        regret = math.prod(b / x for b, x in zip(best, r["ratios"], strict=True)) ** 0.25 - 1
        assert r["regret"] == pytest.approx(regret) and list(r["sets"]) == ["stories", "code"]
        assert r["sets"]["code"] == pytest.approx(math.sqrt(r["ratios"][2] * r["ratios"][3]))
        assert ("deciding" in r) == (name in ("SWIFT", "CLaSp", "DEL", "DEL, few exits", "Pace"))
        assert 0 < r.get("deciding", 0.5) < 1
    results = {"greedy": (rows, choices, alphas, found)}
    text = bench_dynamic.markdown(a, results, kinds)
    assert text.count("\n| Pace |") == 1 and "- exit 1: alpha " in text
    plots.choices({"greedy": choices}, kinds, "tiny", tmp_path / "choices.part")
    assert image.imread(tmp_path / "choices.part", "png").shape[2] == 4, "whatever the file is called"


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
