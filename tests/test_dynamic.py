"""Drafts that change while they run: no choice of theirs changes the text, and each choice is the one that
its paper describes, found again here by slower ways."""
import random
from dataclasses import replace
from types import SimpleNamespace

import promises
import pytest
import torch
from tiny import LIVELY, LLAMA, PROMPTS, TINY, TINY_GEMMA, devices, each_family, make, make_round, small, warm

from control import MOST, AnnealedConfidence, Costs, Entropy, Thompson, confidence, plan, weight_costs
from kvcache import KVCache
from layerskip import SelfDraft, Teacher, early_exit
from methods.dynamic import DEL, SWIFT, CLaSp, aside, nearest, overlaps
from methods.trees import Siblings
from sampling import Coins, to_probs
from speculative import Drafter, ModelDraft, NGram, Then, generate, prefill, rounds


class Restless(Drafter):
    """Another drafter, or none, in every round, by dice; and another skip set for the one that has one."""

    def __init__(self, m, seed=1):
        super().__init__()
        self.random, L = random.Random(seed), m.c.n_layers
        self.skip, self.deep = SelfDraft(m, range(2), 3), SelfDraft(m, range(2 * L - 2), 4)
        self.drafters = [Drafter(), self.skip, self.deep, NGram(3, 1), ModelDraft(small(m), 3),
                         Siblings(self.deep, [2, 1]), Then(self.skip, NGram(2, 1))]

    def begin(self, state, trace):
        for drafter in self.drafters:
            drafter.begin(state, trace)
        self.kinds = set()

    def propose(self, state):
        L = state.model.c.n_layers
        self.skip.sublayers = sorted(self.random.sample(range(2 * L), self.random.randint(1, 2 * L)))
        self.now = self.random.randrange(len(self.drafters))
        self.kinds.add(self.now)
        return self.drafters[self.now].propose(state)

    def observe(self, state, r):
        for i, drafter in enumerate(self.drafters):
            if i == self.now or not hasattr(drafter, "drafters"):
                drafter.observe(state, r)


DRAFTERS = {
    "swift": lambda m: SWIFT(m, window=5, every=3),
    "swift, wide": lambda m: SWIFT(m, 0.7, window=3, every=2, threshold=0.2, widths=(2,)),
    "clasp": lambda m: CLaSp(m, 2, every=4, threshold=0.1),
    "clasp, most": lambda m: CLaSp(m, 5, every=1, threshold=0.1),
    "del": lambda m: DEL(m, costs=Costs((1.0,) * 12, 0.0)),
    "del, some": lambda m: DEL(m, [2, 5], Costs((0.01,) * 8 + (9.0,) * 4, 0.0), every=3, gamma=4, window=3),
    "restless": Restless,
}
test_greedy_identity = promises.greedy_identity(DRAFTERS)
test_rows_equal_solo_runs = promises.rows_equal_solo_runs(DRAFTERS)
test_short_answers = promises.short_answers(DRAFTERS)
test_poison = promises.poison(DRAFTERS)     # neither drafts nor what scores them read what is dead


def test_the_restless_one_tries_everything(models):
    drafter = Restless(models["llama"])
    generate(models["llama"], PROMPTS, 20, drafter)
    assert len(drafter.kinds) >= 5


LAWS = {
    "swift": (TINY, lambda m: SWIFT(m, 0.5, window=1, every=2, threshold=0.5, gamma=2, widths=(1,))),
    "clasp": (TINY, lambda m: CLaSp(m, 1, every=1, threshold=0.6, gamma=2)),
    "del": (TINY, lambda m: DEL(m, costs=Costs((0.02,) * 5 + (9.0,), 0.0), gamma=2)),
    "gemma2 del": (TINY_GEMMA, lambda m: DEL(m, costs=Costs((0.02,) * 5 + (9.0,), 0.0), gamma=2)),
    "gemma2 clasp": (TINY_GEMMA, lambda m: CLaSp(m, 1, every=1, threshold=0.6, gamma=2)),
    "thompson": (TINY, lambda m: SelfDraft(m, range(4), Thompson(2, seed=3))),
    "entropy": (TINY, lambda m: SelfDraft(m, range(4), Entropy(0.35, gamma=2))),
    "annealed": (TINY, lambda m: SelfDraft(m, range(4), AnnealedConfidence(2 / 3, 0.5, gamma=2))),
}


SLOW = ["swift", "clasp", "gemma2 clasp"]
test_exact_law = promises.exact_law(LAWS, [name for name in LAWS if name not in SLOW])
test_exact_law_of_the_slow = promises.exact_law(LAWS, SLOW, count=2, room=2)
test_exact_law_of_a_ragged_batch = promises.exact_law_of_a_ragged_batch(LAWS, ["swift", "clasp", "del"])


def test_only_the_target_itself_can_teach(models):
    m, other = models["llama"], make(LLAMA, 9)
    for drafter in (SWIFT(other), CLaSp(other, 2), DEL(other)):
        with pytest.raises(ValueError, match="give it the model that decodes"):
            generate(m, PROMPTS, 4, drafter)


# --- trying a draft without a trace


@devices
@each_family
@pytest.mark.parametrize("subs", [range(12), [0, 1, 3, 5, 8], range(1, 12, 2)],
                         ids=["whole", "some", "MLPs"])
def test_a_draft_is_tried_as_it_would_be_drafted(family, subs, device):
    """Each token as the first of a draft after the text before it, run by hand; the cache stays as it is, and
    what is dead is not read."""
    m, T, n = make(LIVELY[family], device=device), 3, [9, 4]
    generator = torch.Generator().manual_seed(1)
    texts, tokens = (torch.randint(17, (2, k), generator=generator).to(device) for k in (9, T))
    cache = KVCache(m.c, 2, 12, torch.float64, device)
    prefill(m, texts, cache)
    at = torch.tensor([[9, 7, 2], [4, 4, 0]], device=device)
    for row, length in enumerate(n):
        cache.k[:, row, :, length:], cache.v[:, row, :, length:] = 1e3, -1e3
    before = cache.k.clone(), cache.v.clone()
    got = aside(m, cache, m.embed(tokens), at, subs)
    assert torch.equal(cache.k, before[0]) and torch.equal(cache.v, before[1])
    for row in range(2):
        for t in range(T):
            here, alone = int(at[row, t]), KVCache(m.c, 1, 12, torch.float64, device)
            if here:
                prefill(m, texts[row : row + 1, :here], alone)
            x = m.run(m.embed(tokens[row : row + 1, t : t + 1]), slice(here, here + 1), alone, list(subs))
            assert (got[row, t] - x[0, 0]).abs().max() < 1e-11


def test_overlaps_by_hand():
    p = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    logits = torch.tensor([[0.2, 0.8], [0.4, 0.6]]).log()
    hit, sure = overlaps(warm, p, logits)
    assert hit.tolist() == pytest.approx([0.7, 0.4]) and sure.tolist() == pytest.approx([0.8, 0.6])
    hit, sure = overlaps(to_probs, p, logits)
    assert hit.tolist() == [0.5, 0.0] and sure.tolist() == pytest.approx([0.8, 0.6]), "greedy, but still raw"
    assert hit.dtype == sure.dtype == torch.float64
    assert float(overlaps(lambda x: x, torch.ones(1, 2), torch.ones(1, 2))[0]) == 1, "never above 1"


# --- SWIFT


def test_swift_has_the_constants_of_its_code(models):
    m = make(replace(LLAMA, n_layers=12))
    swift = SWIFT(m)
    assert (swift.window, swift.enough, swift.patience, swift.most, swift.every) == (32, 0.95, 300, 1000, 25)
    assert swift.count == int(2 * 10 * 0.45) == 9
    assert sorted(swift.gone) == [2, 3, 6, 7, 10, 11, 14, 15, 18], "blocks 1, 3, 5, ... first"
    assert swift.draft.rule.threshold == 0.8 and swift.draft.rule.most == 25
    assert len({tuple(sorted(swift.random_set())) for _ in range(20)}) > 10
    assert all(len(gone) == 9 and 2 <= min(gone) <= max(gone) < 22
               for gone in (swift.random_set() for _ in range(20))), "first and last block stay"


@each_family
def test_matchness_is_that_of_drafts_along_the_window(models, family):
    """Each place of the first tokens that each row wrote, drafted by hand by the loop."""
    m, W = models[family], 6
    swift = SWIFT(m, window=W)
    *_, (state, _) = rounds(m, PROMPTS, 9)
    swift.start = list(map(len, PROMPTS))
    for rows in ([0, 1, 2, 3], [1], [2, 3]):
        for gone in (swift.gone, frozenset([4, 7, 9]), frozenset([2])):
            hits = []
            for b in rows:
                for k in range(W):
                    text = state.known[b][: swift.start[b] + k]
                    _, r = next(rounds(m, [text], 2, SelfDraft(m, swift.kept(gone), 1)))
                    hits.append(int(r.draft.tokens[0, 0]) == state.known[b][len(text)])
            with torch.inference_mode():
                assert swift.score(state, gone, rows) == pytest.approx(sum(hits) / len(hits))
    assert [gone for gone, _ in swift.seen][:2] == [frozenset([2, 3, 6]), frozenset([4, 7, 9])]


class Scripted(SWIFT):
    """Scores by a function of the set instead of the text, and notes what was scored when."""

    def score(self, state, gone, rows):
        self.asked.append((len(state.known[0]), gone, tuple(rows)))
        self.seen.append((gone, self.worth(gone)))
        return self.seen[-1][1]


def scripted(m, worth, **flags):
    swift = Scripted(m, window=3, threshold=0.99, **flags)
    swift.asked, swift.worth = [], worth
    return swift


def test_the_incumbent_is_scored_first_and_again_in_a_new_text(models):
    m = models["llama"]
    worths = [0.5]
    swift = scripted(m, lambda gone: worths[0] if gone == first else 0.4)
    first = swift.gone
    generate(m, PROMPTS[:1], 12, swift)
    at, gone, rows = swift.asked[0]
    assert gone == first and at - len(PROMPTS[0]) >= 3 and rows == (0,)
    assert len(swift.asked) > 3 and swift.gone == first and swift.stale == swift.tried
    count, worths[0] = len(swift.asked), 0.1            # worth less in another text
    generate(m, PROMPTS[1:2], 12, swift)
    assert swift.asked[count][1] == first and swift.gone != first, "the next best takes its place"
    assert swift.draft.sublayers == [i for i in range(12) if i not in swift.gone]


def test_a_window_counts_only_where_it_is_whole(models):
    swift = scripted(models["llama"], lambda gone: 0.5)
    for state, r in rounds(models["llama"], PROMPTS[:2], 12, swift):  # noqa: B007
        written = [len(text) - len(p) for text, p in zip(state.known, PROMPTS, strict=False)]
        if swift.asked and swift.asked[-1][0] == len(state.known[0]):
            assert swift.asked[-1][2] == tuple(b for b, n in enumerate(written) if n >= 3)
    assert swift.asked


def test_a_row_at_the_end_of_the_context_has_no_window(models):
    m = models["llama"]
    ids = [PROMPTS[0][:4], (PROMPTS[1] * 40)[: m.c.max_len - 3]]
    swift = SWIFT(m, window=16)     # longer than the spare slots
    assert generate(m, ids, 20, swift)[0] == generate(m, ids, 20)[0] and swift.tried > 0


@pytest.mark.parametrize("flags, tries", [({"patience": 4}, 5), ({"most": 6}, 6), ({"enough": 0.3}, 0)])
def test_the_search_ends(models, flags, tries):
    """After too many candidates that are no better, after so many in all, or when the set is good enough."""
    swift = scripted(models["llama"], lambda gone: 0.4, **flags)
    for prompt in PROMPTS[:2]:
        generate(models["llama"], [prompt], 20, swift)
    assert swift.tried == tries and swift.best == 0.4


def test_a_search_that_ended_begins_again_where_its_set_is_bad(models):
    worths = [0.99]
    swift = scripted(models["llama"], lambda gone: worths[0])
    generate(models["llama"], PROMPTS[:1], 20, swift)
    assert swift.tried == 0
    worths[0] = 0.5
    generate(models["llama"], PROMPTS[:1], 20, swift)
    assert swift.tried > 0


def test_a_search_needs_something_to_skip():
    with pytest.raises(ValueError, match="^of 3 blocks SWIFT skips none at a ratio of 0.45$"):
        SWIFT(make(replace(LLAMA, n_layers=3)))


def test_every_so_often_the_process_is_asked(models):
    """On values that one sub-layer decides, its sets are better than random ones."""
    m = make(replace(LLAMA, n_layers=8))
    swift = SWIFT(m, every=10)
    swift.best, found = 0.0, []
    for i in range(1, 41):
        swift.tried = i
        gone = swift.candidate()
        assert len(gone) == swift.count
        value = sum(sub % 2 == 0 for sub in gone) / swift.count     # attentions are easily spared
        swift.seen.append((gone, value))
        swift.best = max(swift.best, value)
        found.append((i % 10 == 0, value))
    asked = [value for process, value in found if process]
    others = [value for process, value in found if not process]
    assert min(asked[1:]) > sum(others) / len(others) + 0.15 and len(asked) == 4


# --- CLaSp


def clasp_by_hand(m, texts, places, most):
    """The table of sets, whose states are computed anew for each: those of a token after so many blocks,
    where a draft leaves out some of them, on a cache that the whole model has filled."""
    rows = []
    for text, at in zip(texts, places, strict=True):
        cache, ids = KVCache(m.c, 1, 64, torch.float64), torch.tensor([text[: at + 1]])
        prefill(m, ids, cache)
        rows.append((m.embed(ids[:, at:]), slice(at, at + 1), cache))

    def after(row, gone, upto):
        x, at, cache = row
        return m.run(x, at, cache, [i for i in range(2 * upto) if i // 2 not in gone])[0, 0]

    def near(gone, upto):
        pairs = [(after(row, gone, upto), after(row, (), upto)) for row in rows]
        return sum(float(torch.cosine_similarity(a, b, 0)) for a, b in pairs) / len(pairs)

    table = {0: ()}
    for u in range(m.c.n_layers):
        options = {j: [table[j]] if j in table else [] for j in range(most + 1)}
        for j in range(most):
            if j in table:
                options[j + 1].append((*table[j], u))
        table = {j: max(sets, key=lambda gone, u=u: near(gone, u + 1)) for j, sets in options.items() if sets}
    return table[most]


@each_family
def test_clasp_chooses_by_the_last_accepted_token(models, family):
    """At the end of the prompt, and after every four tokens; ragged rows together."""
    m = models[family]
    for prompts in (PROMPTS[:3], PROMPTS[:1]):
        clasp, chosen, due, places = CLaSp(m, 2, every=4, threshold=0.0, gamma=3), set(), None, None
        for state, r in rounds(m, prompts, 14, clasp):
            if due is None:     # the choice at the prompt's end was made before this round
                longest, due = max(map(len, prompts)), max(map(len, prompts)) + 4
            longest = max(map(len, state.known))
            if longest >= due and len(chosen) < 2:
                places = [len(text) - len(new) - 1 + k
                          for text, new, k in zip(state.known, r.new, r.accepted.tolist(), strict=True)]
                gone = clasp_by_hand(m, state.known, places, 2)
                assert clasp.sublayers == [i for i in range(12) if i // 2 not in gone]
                chosen.add(gone)
            due = longest + 4 if longest >= due else due
            assert clasp.due == due
        assert places is not None


@each_family
def test_clasp_chooses_before_the_first_round(models, family):
    m = models[family]
    clasp = CLaSp(m, 2)
    next(rounds(m, PROMPTS, 9, clasp))
    gone = clasp_by_hand(m, PROMPTS, [len(p) - 1 for p in PROMPTS], 2)
    assert clasp.sublayers == [i for i in range(12) if i // 2 not in gone]
    assert clasp.due == 8 + 128 and (clasp.rule.threshold, clasp.rule.most) == (0.7, 8)


def test_the_dynamic_programme_by_hand():
    """Units that turn a vector by an angle: the target ends at the sum, and what turns least is skipped."""
    angles = torch.tensor([0.5, 0.1, 0.3, 0.05])

    def turned(x, angle):
        c, s = torch.cos(angle), torch.sin(angle)
        return x @ torch.tensor([[c, s], [-s, c]])

    states = [torch.tensor([[1.0, 0.0]])]
    for angle in angles:
        states.append(turned(states[-1], angle))
    run = lambda u, x: turned(x, angles[u])  # noqa: E731
    assert nearest(states, run, range(4), 3) == [[3], [1, 3], [1, 2, 3]]
    assert nearest(states, run, [0, 2], 2) == [[2], [0, 2]], "what is not free stays"
    assert nearest(states, run, range(4), 1) == [[3]]


@pytest.mark.parametrize("skips", [0, 6, -1])
def test_clasp_skips_some_blocks_and_not_all(models, skips):
    with pytest.raises(ValueError, match="CLaSp skips from 1 to 5 of 6 blocks"):
        CLaSp(models["llama"], skips)


# --- DEL


FREE = Costs((0.001,) * 11 + (1.0,), 0.0)    # with these every draft gains, the earlier ones more


@devices
@each_family
@pytest.mark.parametrize("probs", [to_probs, warm], ids=["greedy", "sampled"])
def test_shadows_are_what_each_exit_would_have_drafted(family, probs, device):
    """Along every text, whatever drafted: the counts are sums of what `Teacher` finds, which drafts at each
    place. With omega = 1 nothing fades."""
    m = make(LIVELY[family], device=device)
    drafted = DEL(m, [1, 3, 5], FREE, omega=1.0, gamma=3, window=2)
    *_, (state, _) = rounds(m, PROMPTS, 12, drafted, probs, Coins(5))
    want = torch.zeros(3, dtype=torch.float64)
    for prompt, text in zip(PROMPTS, state.known, strict=True):
        teacher = Teacher(m, text, probs)
        places = slice(max(0, len(prompt) - 2), len(prompt))            # before the first round
        later = slice(len(prompt) - 1, len(text) - 1)                   # and each new token's
        for e, exit_layer in enumerate([1, 3, 5]):
            a = teacher.acceptance(early_exit(6, exit_layer))
            want[e] += a[places].sum() + a[later].sum()
    hits, misses, sure, unsure = drafted.counts
    assert (hits - want).abs().max() < 1e-6
    places = sum(min(2, len(p)) for p in PROMPTS) + sum(len(t) - len(p) for p, t in zip(PROMPTS, state.known,
                                                                                     strict=True))
    assert (hits + misses).tolist() == pytest.approx([places] * 3)
    assert bool((0 < sure).all()) and bool((sure <= hits).all()) and bool((unsure <= misses).all())


def headless(m, exits, costs, omega=1.0):
    """A DEL whose exits' states are logits already, and a state for it."""
    drafter = DEL(m, exits, costs, omega)
    drafter.model = SimpleNamespace(unembed=lambda x: x, c=m.c)
    return drafter, SimpleNamespace(probs=to_probs)


def test_counts_fade_by_hand(models):
    """Two places a round: one that agrees, sure to .9, and one that does not, sure to .6."""
    drafter, state = headless(models["llama"], [1], FREE, omega=0.5)
    logits = torch.tensor([[[0.9, 0.1], [0.4, 0.6], [0.5, 0.5]]]).log()          # (1, 3, 2)
    p = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]])
    true = torch.tensor([[True, True, False]])
    for _ in range(2):
        drafter.score(state, {1: logits}, p, true)
    assert drafter.counts[:, 0].tolist() == pytest.approx([1.5, 1.5, 1.5 * 0.9, 1.5 * 0.6])
    assert drafter.rule.threshold == pytest.approx(((1.35 + 1) / 2.5 + 0.9 / 2.5) / 2)
    drafter.score(state, {1: logits}, p, torch.zeros(1, 3, dtype=torch.bool))
    assert drafter.counts[:, 0].tolist() == pytest.approx([0.75, 0.75, 0.75 * 0.9, 0.75 * 0.6])


def test_del_begins_with_a_prior_and_not_with_nan(models):
    drafter = DEL(models["llama"], costs=FREE, window=1)
    assert drafter.rule.threshold == 0.5 and not drafter.counts.any() and drafter.omega == 0.95
    assert drafter.longest == 18 and drafter.exits == [1, 2, 3, 4, 5] and DEL(models["llama"]).window == 32
    costs = Costs((0.7 * 3, 0.0) + (0.3 * 3 / 10,) * 10, 0.0)                   # exit 1 costs .7 of a pass
    drafter, state = headless(models["llama"], [1], FREE)
    logits, nowhere = torch.zeros(1, 1, 17, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.bool)
    drafter.score(state, {1: logits}, to_probs(logits), nowhere)
    assert drafter.rule.threshold == 0.5 and drafter.rule.most == 18, "at first alpha = .5, and so the bar"
    drafter, state = headless(models["llama"], [1], costs)
    drafter.score(state, {1: logits}, to_probs(logits), ~nowhere)
    assert drafter.counts[:2, 0].tolist() == [1, 0] and drafter.rule.most == 0, "one hit: alpha = 2/3 < .7"


@pytest.mark.parametrize("head, drafts", [(0.0, True), (20.0, False)])
def test_del_knows_the_heads_share(models, head, drafts):
    """Exits of which two thirds are accepted gain, unless the head is most of the model; then none drafts."""
    drafter, state = headless(models["llama"], [1, 2], Costs((1.0,) * 12, head))
    drafter.counts = torch.tensor([[20.0, 20.0], [10.0, 9.0], [18.0, 18.0], [5.0, 5.0]], dtype=torch.float64)
    logits, nowhere = torch.zeros(1, 1, 17, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.bool)
    drafter.score(state, {1: logits, 3: logits}, logits, nowhere)
    gains = [plan(21 / 32, 21 / 32, (2 + head) / (12 + head), 18)]
    assert (drafter.rule.most == 18) == drafts == (gains[0] > 0)
    assert drafter.sublayers == [0, 1] and (not drafts or drafter.rule.threshold == pytest.approx(
        (19 / 21 + 5 / 11) / 2))


@each_family
def test_del_drafts_at_the_exit_that_pays_and_not_at_all_where_none_does(models, family):
    m = models[family]
    plain = DEL(m, costs=Costs((1.0,) * 12, 100.0))
    tried = [int(r.proposed.sum()) for _, r in rounds(m, PROMPTS, 20, plain)]
    assert sum(tried) == 0 and bool((plain.counts[:2].sum(0) > 15).all()), "and it goes on learning"
    costs = Costs((0.001,) * 10 + (5.0, 5.0), 0.0)      # all exits are nearly free: the best alpha wins
    drafter = DEL(m, costs=costs, omega=1.0)
    for state, r in rounds(m, PROMPTS, 30, drafter, warm):  # noqa: B007
        if r.draft.tokens.shape[1]:
            assert r.draft.reuse[0] % 2 == 0
    alphas = (drafter.counts[0] + 1) / (drafter.counts[:2].sum(0) + 2)
    assert drafter.sublayers == early_exit(6, 1 + int(alphas.argmax()))


def test_shadows_are_scored_as_often_as_asked(models):
    calls = []

    class Watched(DEL):
        def score(self, *args):
            calls.append(1)
            super().score(*args)

    n = len([r for _, r in rounds(models["llama"], PROMPTS, 20, Watched(models["llama"], every=3))])
    assert len(calls) == 1 + n // 3


# --- three more rules


def test_entropy_by_hand():
    """Four tokens alike: H = log 4 = 1.386, so sqrt(.15 H) = .456."""
    even, sure = torch.zeros(4), torch.tensor([9.0, 0.0, 0.0, 0.0])
    short = torch.tensor([0.0, 0.0, -torch.inf, -torch.inf])       # a draft vocabulary: H = log 2, .322
    logits = torch.stack([even, sure, short])
    for threshold, want in ((0.3, [True, False, True]), (0.4, [True, False, False]), (0.46, [False] * 3)):
        assert Entropy(threshold).stop(0, logits, torch.zeros(3).long()).tolist() == want
    rule = Entropy()
    assert (rule.threshold, rule.scale, rule.most) == (0.3, 0.15, 40)


def test_annealed_confidence_by_hand():
    logits, token = torch.tensor([[3.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 0])
    for depth, temperature in ((0.0, 2.0), (0.5, 1.5), (1.0, 1.0)):
        want = confidence(logits / temperature, token) < 0.7
        assert AnnealedConfidence(depth, 0.7).stop(0, logits, token).tolist() == want.tolist()
    assert AnnealedConfidence(0.25, slope=2).temperature == 2.5
    assert AnnealedConfidence(0.0, 0.75).stop(0, logits, token).tolist() == [False, True]
    assert AnnealedConfidence(1.0, 0.75).stop(0, logits, token).tolist() == [False, True]
    assert AnnealedConfidence(0.0, 0.82).stop(0, logits, token).tolist() == [True, True]
    assert AnnealedConfidence(1.0, 0.82).stop(0, logits, token).tolist() == [False, True]


def test_thompson_draws_from_what_became_of_drafts():
    rule, state = Thompson(8, seed=1), SimpleNamespace(known=[[1], [1]])
    rule.begin(state)
    for _ in range(60):
        rule.learn(state, make_round([[1], [1]], [4, 0], [4, 4]))
    assert [(b.hits, b.misses) for b in rule.seen] == [(240, 0), (0, 60)], "each row on its own"
    lengths = torch.tensor([rule.gamma(state) for _ in range(50)]).double()
    assert lengths[:, 0].mean() > 7 and lengths[:, 1].mean() < 1.2 and int(lengths.min()) == 1
    again = Thompson(8, seed=1)
    again.begin(state)
    fresh = [again.gamma(state) for _ in range(20)]
    assert len({tuple(x) for x in fresh}) > 5 and 1.5 < torch.tensor(fresh).double().mean() < 4
    rule.begin(state)
    assert rule.seen[0].hits == 240, "what is learnt outlives the run"
    assert Thompson(0).most == 0 and Thompson().most == MOST
    empty = Thompson(0)
    empty.begin(state)
    assert empty.gamma(state) == [0, 0]


# --- costs that grow with the text


def test_costs_grow_with_what_attention_reads():
    costs = Costs((2.0, 3.0) * 4, 4.0, slot=0.1, at=10, window=20)
    assert costs.price(range(8)) == costs.whole == 24
    assert costs.price([1, 3], n=50) == 10, "an MLP reads no text"
    assert costs.price([2], 0.0, 50) == pytest.approx(2 + 4) and costs.price([2], 0.0, 0) == pytest.approx(1)
    assert costs.price([4], 0.0, 50) == pytest.approx(2 + 1), "even blocks see a window"
    assert costs.price([4], 0.0, 15) == pytest.approx(2.5)
    whole = costs.price(range(8), 1.0, 50)
    assert whole == pytest.approx(24 + 2 * 4 + 2 * 1)
    assert costs.step([0, 1], 0.5, 50) == pytest.approx((5 + 1 + 2) / whole)
    assert costs.step([0, 1], 0.5) == pytest.approx(7 / 24)


@each_family
def test_by_weights_a_token_more_is_a_key_and_a_value_more(family):
    c = LIVELY[family]
    costs = weight_costs(c)
    assert costs.slot == 2 * c.n_kv_heads * c.head_dim and costs.at == 0 and costs.window == c.window
    assert costs.price([2], 0.0, 7) - costs.price([2], 0.0, 6) == costs.slot
