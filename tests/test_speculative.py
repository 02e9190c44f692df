"""The loop is lossless: greedy text is the plain one token for token, and the law of sampled text is the
target's, for every drafter, both families and ragged batches."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import DEVICES, FAMILIES, LLAMA, PROMPTS, law, make, oracle

from kvcache import KVCache
from layerskip import SelfDraft, ShortHead, keep
from model import Config
from sampling import Coins, to_probs, uniforms
from speculative import (
    Draft,
    Drafter,
    ModelDraft,
    NGram,
    Rule,
    Wrapper,
    chain,
    generate,
    prefill,
    rounds,
    verify,
)

SHIPPED = Path(__file__).parent.parent / "weights"
FULL = range(2 * LLAMA.n_layers)


def small(m, seed=5):
    return make(replace(m.c, n_layers=2), seed, m.tok.device)


class Unsure(Rule):
    """End a row where the most likely token has less than .6."""

    def stop(self, k, logits, token):
        return logits.softmax(-1).amax(-1) < 0.6


class Says(Rule):
    """gamma by a function of the state, and a stop rule by another one."""

    def __init__(self, gamma, stop=None):
        super().__init__(0)
        self.gamma, self.stop = gamma, stop


def gate():
    """Draft only in rounds that start with an odd number of tokens in the first row."""
    return Says(lambda state: 4 * (len(state.known[0]) % 2))


SOME = [4, 9, 0, 2, 16, 3]  # a draft vocabulary
DRAFTERS = {
    "none": lambda m: None,
    "ngram": lambda m: NGram(4, 2),
    "exit": lambda m: SelfDraft(m, range(8), 4),
    "skip": lambda m: SelfDraft(m, keep(6, attn=[1, 4], mlp=[2]), 3),
    "skip first": lambda m: SelfDraft(m, range(1, 12), 3),
    "skip all attention": lambda m: SelfDraft(m, range(1, 12, 2), 3),
    "model": lambda m: ModelDraft(small(m), 4),
    "exit, stopped": lambda m: SelfDraft(m, range(8), Unsure(5)),
    "model, stopped": lambda m: ModelDraft(small(m), Unsure(5)),
    "exit, gated": lambda m: SelfDraft(m, range(8), gate()),
    "model, gated": lambda m: ModelDraft(small(m), gate()),
    "ngram, gated": lambda m: NGram(gate(), 1),
    "another model's exit": lambda m: SelfDraft(make(m.c, 9, m.tok.device), range(8), 3),
    "another model's skip": lambda m: SelfDraft(make(m.c, 9, m.tok.device), keep(6, attn=[1], mlp=[2]), 3),
    "exit, short head": lambda m: SelfDraft(ShortHead(m, SOME), range(8), 4),
    "model, short head": lambda m: ModelDraft(ShortHead(small(m), SOME), 4),
    "long": lambda m: SelfDraft(m, range(10), 12),  # longer than the spare slots after the limit
}
each_family = pytest.mark.parametrize("family", FAMILIES)
each_drafter = pytest.mark.parametrize("name", DRAFTERS)


@pytest.fixture(scope="module", params=DEVICES)
def models(request):
    return {family: make(c, device=request.param) for family, c in FAMILIES.items()}


@pytest.fixture(scope="module")
def truth(models):
    return {family: [oracle(m, p, 40) for p in PROMPTS] for family, m in models.items()}


# --- greedy identity


@each_family
@each_drafter
def test_greedy_identity(models, truth, family, name):
    m = models[family]
    assert generate(m, PROMPTS, 40, DRAFTERS[name](m))[0] == truth[family]


@each_family
@each_drafter
def test_rows_equal_solo_runs(models, truth, family, name):
    m = models[family]
    count = 24 if m.tok.device.type == "cpu" else 8
    for prompt, want in zip(PROMPTS, truth[family], strict=True):
        assert generate(m, [prompt], count, DRAFTERS[name](m))[0] == [want[:count]]


@each_family
def test_poison(models, truth, family):
    """Nothing after the last known token is ever read: fill it with large finite garbage after each round,
    in tokens and both caches, while gamma and the skip set change at random."""

    class Poisoned(SelfDraft):
        def observe(self, state, r):
            for b, text in enumerate(state.known):
                n = len(text)
                state.cache.k[:, b, :, n - 1 :] = state.cache.v[:, b, :, n - 1 :] = 1e4
                state.tokens[b, n:] = 16
            count = sum(map(len, state.known))
            self.rule = Rule(count % 6)
            self.sublayers = [i for i in FULL if count >> i % 5 & 1 or i == count % 12]

    class PoisonedModel(ModelDraft):
        def observe(self, state, r):
            super().observe(state, r)
            for b, held in enumerate(self.held):
                self.cache.k[:, b, :, held:] = self.cache.v[:, b, :, held:] = 1e4
            self.rule = Rule(sum(map(len, state.known)) % 6)

    m = models[family]
    assert generate(m, PROMPTS, 40, Poisoned(m, range(6), 5))[0] == truth[family]
    perfect = PoisonedModel(m, 3)
    for state, r in rounds(m, PROMPTS, 40, perfect):  # noqa: B007
        assert r.accepted.tolist() == r.proposed.tolist(), "the draft model read a slot that it did not hold"
    assert [t[len(p) :] for t, p in zip(state.known, PROMPTS, strict=True)] == truth[family]


@each_family
@pytest.mark.parametrize("block", [1, 3, 8])
def test_prefill_blocks_agree(models, family, block):
    m, tokens = models[family], torch.tensor([PROMPTS[0], PROMPTS[3]], device=models[family].tok.device)
    caches = [KVCache(m.c, 2, 16, torch.float64, tokens.device) for _ in range(2)]
    xs = [prefill(m, tokens, cache, block=b) for cache, b in zip(caches, (block, 8), strict=True)]
    assert (xs[0] - xs[1]).abs().max() < 1e-12
    assert (caches[0].k - caches[1].k).abs().max() < 1e-12


@each_family
def test_the_trace_of_a_long_prompt_is_whole(models, family):
    m, tokens = models[family], torch.tensor([PROMPTS[0], PROMPTS[3]], device=models[family].tok.device)
    whole, parts = {2: None, 11: None}, {2: None, 11: None}
    for trace, block in ((whole, 8), (parts, 3)):
        x = prefill(m, tokens, KVCache(m.c, 2, 16, torch.float64, tokens.device), trace=trace, block=block)
        assert torch.equal(trace[11], x)
    assert all((whole[tap] - parts[tap]).abs().max() < 1e-12 for tap in whole)


# --- a perfect draft: the only test that sees a drafter's own mistakes, which otherwise just cost acceptance


@each_family
@pytest.mark.parametrize("temperature", [0, 1.3])
@pytest.mark.parametrize(
    "make_drafter",
    [
        lambda m: SelfDraft(m, FULL, 4),
        lambda m: ModelDraft(m, 4),
        lambda m: ModelDraft(m, 1),
        lambda m: SelfDraft(m, FULL, Says(lambda state: 4, lambda k, logits, token: token == 3)),
        lambda m: ModelDraft(m, gate()),
    ],
    ids=["self", "model", "model, one", "self, stopped", "model, gated"],
)
def test_perfect_draft_is_accepted_whole(models, family, temperature, make_drafter):
    m, drafted = models[family], 0
    for _, r in rounds(m, PROMPTS, 40, make_drafter(m), lambda x: to_probs(x, temperature)):
        assert r.accepted.tolist() == r.proposed.tolist()
        drafted += int(r.proposed.sum())
    assert drafted > 60


@each_family
def test_a_draft_model_that_is_the_target_says_just_what_it_says(models, family):
    """To the last digits, in rows that stand at different places, and beyond the window of 5."""
    m, seen = models[family], 0
    for _, r in rounds(m, PROMPTS, 20, ModelDraft(m, 3), lambda logits: logits.softmax(-1), Coins(2)):
        for q, p, length in zip(r.draft.q if r.draft.q is not None else (), r.p, r.draft.length.tolist(),
                                strict=False):
            assert (q[:length] - p[:length]).abs().sum() < 1e-11
            seen += length
    assert seen > 40


@each_family
@pytest.mark.parametrize("gamma", [0, 1, 2, 4, 12])
def test_empty_skip_set_needs_the_fewest_passes(models, family, gamma):
    m = models[family]
    for drafter in (SelfDraft(m, keep(6), gamma), ModelDraft(m, gamma)):
        for n in (1, gamma, gamma + 1, gamma + 2, 23):
            outputs, passes = generate(m, PROMPTS, n, drafter)
            assert passes == math.ceil(n / (gamma + 1)) and all(len(o) == n for o in outputs)


@each_family
def test_the_draft_model_has_read_every_token(models, family):
    """Also after refusals and a gate: its first draft is what it says on the text without a cache."""
    m, seen = models[family], []

    class Watched(ModelDraft):
        def propose(self, state):
            draft = super().propose(state)
            for b, text in enumerate(state.known):
                if draft.q is not None and state.left_cpu[b]:
                    want = self.model(torch.tensor([text], device=state.n.device))[0, -1].softmax(-1)
                    seen.append(float((draft.q[b, 0] - want).abs().max()))
            return draft

    drafter = Watched(small(m), Says(lambda state: (4, 0, 0, 0, 2)[sum(map(len, state.known)) % 5]))
    generate(m, PROMPTS, 40, drafter, lambda logits: to_probs(logits, 1.0))
    assert len(seen) > 20 and max(seen) < 1e-9


@pytest.mark.parametrize(
    "sublayers, shared", [(range(8), 8), ([0, 1, 3, 4], 2), (range(1, 12), 0), (FULL, 12)]
)
def test_what_is_shared_is_handed_over_and_not_run_again(models, sublayers, shared):
    """The trace is whole whatever was reused: it is that of the same block run by hand."""
    m, ran, run = models["llama"], [], models["llama"].run

    class Tapped(SelfDraft):
        taps = (0, 3, 7, 11)

        def begin(self, state, trace):
            super().begin(state, trace)
            self.prompts = trace

    def watched(x, positions, cache, sublayers, **kwargs):
        ran.append(list(FULL if sublayers is None else sublayers))
        return run(x, positions, cache, sublayers, **kwargs)

    drafter = Tapped(m, sublayers, 3)
    for state, r in rounds(m, PROMPTS, 20, drafter):
        if set(drafter.prompts) == {0, 3, 7, 11}:
            drafter.prompts = {tap: x.clone() for tap, x in drafter.prompts.items()} | {"seen": True}
            for b, prompt in enumerate(PROMPTS):
                want = dict.fromkeys(Tapped.taps)
                m.run(m.embed(torch.tensor([prompt], device=m.tok.device)), slice(0, len(prompt)), trace=want)
                for tap, x in want.items():
                    assert (drafter.prompts[tap][b, : len(prompt)] - x[0]).abs().max() < 1e-9
        if r.draft.tokens.shape[1] < 3:
            break
        assert r.draft.reuse[0] == shared and r.draft.reuse[1].shape == (4, 4, 32)
        assert list(r.trace) == [0, 3, 7, 11]
        for b, (text, new) in enumerate(zip(state.known, r.new, strict=True)):
            before = text[: len(text) - len(new)]
            ids = torch.tensor([before + r.draft.tokens[b].tolist()], device=m.tok.device)
            want = dict.fromkeys(Tapped.taps)
            m.run(m.embed(ids), slice(0, ids.shape[1]), trace=want)
            for tap, x in want.items():
                assert (r.trace[tap][b] - x[0, len(before) - 1 :]).abs().max() < 1e-9, f"sub-layer {tap}"
    assert "seen" in drafter.prompts
    m.run = watched
    try:
        next(rounds(m, PROMPTS, 20, SelfDraft(m, sublayers, 3)))
    finally:
        del m.run
    assert ran[-1] == list(range(shared, 12)), "verification runs the other sub-layers, and only those"


@each_family
@pytest.mark.parametrize("sublayers", [range(8), [0, 1, 3, 4, 7, 10], range(1, 12)])
def test_self_drafts_are_what_their_sublayers_say(models, family, sublayers):
    """Each q against the same sub-layers run by hand on a cache that the whole model has filled."""
    m, far = models[family], []

    class Watched(SelfDraft):
        def propose(self, state):
            draft = super().propose(state)
            for b, text in enumerate(state.known):
                n, cache = len(text), KVCache(m.c, 1, 99, torch.float64, state.n.device)
                ids = torch.tensor([text + draft.tokens[b].tolist()], device=state.n.device)
                if n > 1:
                    prefill(m, ids[:, : n - 1], cache)
                for k in range(min(draft.tokens.shape[1], state.left_cpu[b] - 1)):
                    at = slice(n - 1 + k, n + k)
                    x = m.run(m.embed(ids[:, at]), at, cache, list(sublayers))
                    far.append(float((draft.q[b, k] - m.unembed(x)[0, -1].softmax(-1)).abs().max()))
            return draft

    for prompts in (PROMPTS, PROMPTS[:1]):
        generate(m, prompts, 24, Watched(m, sublayers, 3), lambda logits: to_probs(logits, 1.0))
    assert len(far) > 50 and max(far) < 1e-9


# --- where answers end


@pytest.mark.parametrize("name", ["none", "exit", "skip", "model", "ngram", "long"])
@each_family
def test_end_of_text_at_every_position(models, truth, family, name):
    """Each token of the answer in turn is an end-of-text id, alone and with a second one, so that it falls on
    every place of a draft; each row ends after its own first one."""
    m = models[family]
    for i in range(12) if m.tok.device.type == "cpu" else (0, 4, 8):
        for eos in ({truth[family][0][i]}, {truth[family][0][i], truth[family][1][0]}):
            want = [
                row[: next((j + 1 for j, t in enumerate(row[:12]) if t in eos), 12)] for row in truth[family]
            ]
            assert generate(m, PROMPTS, 12, DRAFTERS[name](m), eos=eos)[0] == want


@each_family
def test_what_an_end_of_text_cuts_off_was_never_tested(models, truth, family):
    """A perfect draft of five whose third token ends the text: three of three accepted, not three of five."""
    m = models[family]
    for i, prompt in enumerate(PROMPTS):
        eos = truth[family][i][2]
        first = truth[family][i].index(eos) + 1
        _, r = next(rounds(m, [prompt], 20, SelfDraft(m, FULL, 5), eos=[eos]))
        assert (r.proposed.tolist(), r.accepted.tolist(), len(r.new[0])) == ([first], [first], first)


@each_family
def test_sure_is_the_raw_softmax_of_each_new_token(models, family):
    m = models[family]
    for state, r in rounds(m, PROMPTS, 12, SelfDraft(m, range(8), 3), lambda x: to_probs(x, 0.7, top_p=0.8)):
        for text, new, sure in zip(state.known, r.new, r.sure, strict=True):
            assert len(sure) == len(new)
            p = m(torch.tensor([text], device=m.tok.device))[0].softmax(-1)
            for i, (token, chance) in enumerate(zip(new, sure, strict=True), len(text) - len(new)):
                assert chance == pytest.approx(float(p[i - 1, token]), abs=1e-9)


def test_a_stand_in_with_the_same_blocks_shares_and_a_copy_does_not(models):
    """Sharing would be wrong for a model of other weights, and is right for whatever wraps the target."""
    class StandIn:
        def __init__(self, model):
            self.model = model

        def __getattr__(self, name):
            return getattr(self.model, name)

    m = models["llama"]
    copied = make(m.c, device=m.tok.device)
    for target, drafted, shares in ((StandIn(m), m, True), (m, StandIn(m), True), (m, copied, False)):
        _, r = next(rounds(target, PROMPTS, 9, SelfDraft(drafted, range(8), 2)))
        assert (r.draft.reuse is not None) == shares


def test_a_rule_that_cannot_be_obeyed_is_refused():
    with pytest.raises(ValueError, match="an n-gram is copied at once, with no logits for Unsure to stop at"):
        NGram(Unsure(4), 2)


def test_a_wrapper_hands_everything_on(models):
    class Tapped(SelfDraft):
        taps = (5, 1)

    m = models["llama"]
    inner = Tapped(m, range(8), 3)
    outer = Wrapper(inner, Drafter())
    assert outer.taps == (1, 5) and outer.drafters[0] is inner
    alone = [(r.new, list(r.trace), r.proposed.tolist()) for _, r in rounds(m, PROMPTS, 20, inner)]
    assert [(r.new, sorted(r.trace), r.proposed.tolist()) for _, r in rounds(m, PROMPTS, 20, outer)] == [
        (new, sorted(taps), proposed) for new, taps, proposed in alone]


def test_accepted_counts_only_what_was_kept(models, truth):
    m, early = models["llama"], 0
    eos = {truth["llama"][0][0]}
    for _, r in rounds(m, PROMPTS, 9, SelfDraft(m, FULL, 4), eos=eos):
        for new, accepted, proposed in zip(r.new, r.accepted.tolist(), r.proposed.tolist(), strict=True):
            assert accepted <= min(len(new), proposed) and int(r.draft.length.min()) >= 0
            if not new:
                assert proposed == 0, "a finished row proposes nothing"
                early += 1
    assert early, "one row must end before the others"


@pytest.mark.parametrize("name", ["none", "exit", "skip", "model", "ngram", "long"])
@each_family
def test_context_limit(family, name):
    """Rows reach the limit one by one, the last of them inside a draft; end-of-text on the very last slot
    counts."""
    m = make(replace(FAMILIES[family], max_len=20))
    want = [oracle(m, p, 20 - len(p)) for p in PROMPTS]
    assert generate(m, PROMPTS, 99, DRAFTERS[name](m))[0] == want
    eos = {want[0][-1]} - set(want[0][:-1])
    assert generate(m, PROMPTS[:1], 99, DRAFTERS[name](m), eos=eos)[0] == want[:1]


@pytest.mark.parametrize("name", ["none", "exit", "model", "ngram"])
def test_max_new_around_gamma(models, truth, name):
    m = models["llama"]
    for n in range(8):
        assert generate(m, PROMPTS, n, DRAFTERS[name](m))[0] == [row[:n] for row in truth["llama"]]


def test_nothing_to_do(models):
    assert generate(models["llama"], [], 5) == ([], 0)
    assert generate(models["llama"], [[1]], 0) == ([[]], 0)


@each_family
@pytest.mark.parametrize("rows", [4, 1])
def test_drafts_never_overrun_even_if_they_ignore_what_is_left(models, truth, family, rows):
    class Certain(Drafter):
        def propose(self, state):
            return Draft(torch.full((rows, 30), 3, device=state.n.device))

    class Overrunning(SelfDraft):
        def propose(self, state):
            left, state.left_cpu = state.left_cpu, [99] * rows
            draft = super().propose(state)
            state.left_cpu = left
            return draft

    m = models[family]
    for drafter in (Certain(), Overrunning(m, range(8), 6)):
        for n in (1, 3, 7):
            assert generate(m, PROMPTS[:rows], n, drafter)[0] == [row[:n] for row in truth[family][:rows]]


# --- the exact law: every outcome of the production loop, enumerated

TINY = Config(
    vocab_size=3, dim=16, n_layers=3, n_heads=2, n_kv_heads=1, head_dim=8, hidden_dim=24, max_len=32
)
TINY_GEMMA = replace(
    TINY,
    tied=True,
    act="gelu",
    norm_offset=1.0,
    embed_scale=4.0,
    post_norm=True,
    query_scale=0.3,
    attn_softcap=5.0,
    final_softcap=3.0,
    window=2,
)
TOP_P = dict(temperature=2.0, top_p=0.9)
LAWS = {
    "none": (TINY, lambda m: None, TOP_P),
    "ngram": (TINY, lambda m: NGram(2, 1), TOP_P),
    "exit": (TINY, lambda m: SelfDraft(m, range(4), 2), TOP_P),
    "skip": (TINY, lambda m: SelfDraft(m, [0, 1, 3, 5], 2), TOP_P),
    "model": (TINY, lambda m: ModelDraft(make(replace(TINY, n_layers=1), 7), 2), TOP_P),
    "gemma2 exit": (TINY_GEMMA, lambda m: SelfDraft(m, range(4), 2), TOP_P),
    "gemma2 skip": (TINY_GEMMA, lambda m: SelfDraft(m, [0, 2, 3, 5], 2), TOP_P),
    "exit, top-k": (TINY, lambda m: SelfDraft(m, range(4), 2), dict(temperature=1.5, top_k=2)),
    "exit, min-p": (TINY, lambda m: SelfDraft(m, range(4), 2), dict(temperature=2.0, min_p=0.2)),
    "exit, stopped": (TINY, lambda m: SelfDraft(m, range(4), Unsure(2)), TOP_P),
    "model, gated": (TINY, lambda m: ModelDraft(make(replace(TINY, n_layers=1), 7),
                                                Says(lambda state: 2 * (len(state.known[0]) > 3))), TOP_P),
    "another model's exit": (TINY, lambda m: SelfDraft(make(TINY, 9), range(4), 2), TOP_P),
    "short head": (TINY, lambda m: SelfDraft(ShortHead(m, [2, 0]), range(4), 2), TOP_P),
    "gemma2 short head": (TINY_GEMMA, lambda m: SelfDraft(ShortHead(m, [1, 2]), [0, 2, 3, 5], 2), TOP_P),
}


def target_law(m, prompt, probs, count):
    """{answer: probability} by multiplying the target's own conditionals, without loop or cache."""
    out = {(): 1.0}
    for _ in range(count):
        out = {
            ids + (t,): w * float(p)
            for ids, w in out.items()
            for t, p in enumerate(probs(m(torch.tensor([[*prompt, *ids]]))[0, -1]))
            if p > 0
        }
    return out


def assert_same_law(got, want):
    assert max(abs(got.get(k, 0) - want.get(k, 0)) for k in got.keys() | want.keys()) < 1e-12
    assert len(want) > 4, "a law of so few outcomes proves little"


@pytest.mark.parametrize("name", LAWS)
def test_exact_law(name):
    c, make_drafter, settings = LAWS[name]
    m, probs = make(c, 3), lambda x: to_probs(x, **settings)
    drafter, drafted = make_drafter(m), []

    def run(coins):
        out = []
        for _, r in rounds(m, [[1, 2, 1]], 3, drafter, probs, coins):
            out += r.new[0]
            drafted.append(int(r.proposed))
        return tuple(out)

    assert_same_law(law(run), target_law(m, [1, 2, 1], probs, 3))
    assert name == "none" or len(set(drafted)) > 1, "the case should have drafts of several lengths"


def test_exact_law_of_a_ragged_batch_with_a_stop_rule():
    m, probs = make(TINY, 3), lambda x: to_probs(x, 1.5, top_p=0.7)
    prompts = [[1, 2, 1], [2]]
    drafter = SelfDraft(m, range(4), Unsure(2))
    got = law(lambda coins: tuple(map(tuple, generate(m, prompts, 2, drafter, probs, coins)[0])))
    alone = [target_law(m, p, probs, 2) for p in prompts]
    assert_same_law(got, {(a, b): u * v for a, u in alone[0].items() for b, v in alone[1].items()})


# --- verify, on its own


class Fixed(Coins):
    """Prescribed uniforms."""

    def __init__(self, *uniforms):
        super().__init__()
        self.pool = torch.tensor(uniforms, dtype=torch.float64)


def one(p, q, tokens, *uniforms, length=None):
    p, q, tokens, length = (None if t is None else torch.tensor([t]) for t in (p, q, tokens, length))
    return [int(t) for t in verify(p, q, tokens, Fixed(*uniforms), length)]


P = [[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]]
Q = [[0.2, 0.5, 0.3]]


def test_verify_by_hand():
    assert one(P, Q, [0], 0.999, 0.0) == [1, 0], "p >= q must always be accepted"
    assert one(P, Q, [1], 0.59, 0.05) == [1, 0], (
        "accepted with probability p/q = .6; then the bonus comes from p"
    )
    assert one(P, Q, [1], 0.61, 0.999) == [0, 0], (
        "a refused token is replaced from max(p - q, 0), here only token 0"
    )
    assert one(P, Q, [1], 0.0, 0.35, length=0) == [0, 0], "what was not proposed is never accepted"
    assert one(P, Q, [1], 0.0, 0.55, length=0) == [0, 1], "where nothing was proposed the token comes from p"


def test_verify_certain_proposals():
    assert one(P, None, [1], 0.29, 0.75) == [1, 2], "a certain proposal is accepted with probability p"
    assert one(P, None, [1], 0.31, 0.72) == [0, 2], "its refusal removes it from p: .5 and .2 remain"
    assert one(P, None, [1], 0.31, 0.70) == [0, 0]


def test_verify_takes_p_where_nothing_is_left():
    """Rounding can make a refusal possible where p = q: then max(p - q, 0) is all zero."""
    assert one(P, [P[0]], [1], 1.0, 0.6) == [0, 1]


def test_verify_ignores_dead_nan_drafts():
    nan = float("nan")
    assert one(P, [[nan, nan, nan]], [1], 0.0, 0.6) == [0, 1]


def test_verify_counts_up_to_the_first_refusal():
    p = [[0.5, 0.5], [0.5, 0.5], [0.5, 0.5], [1.0, 0.0]]
    assert one(p, [[1.0, 0.0]] * 3, [0, 0, 0], 0.4, 0.6, 0.4, 0.0)[0] == 1


def test_vocabularies_must_match(models):
    m = models["llama"]
    other = make(replace(LLAMA, vocab_size=18), device=m.tok.device)
    with pytest.raises(ValueError, match="vocabulary is 18, the target's 17"):
        generate(m, PROMPTS, 5, ModelDraft(other, 2))
    with pytest.raises(ValueError, match="vocabulary of 3, the target of 2"):
        one([[0.5, 0.5], [0.5, 0.5]], Q, [1], 0.5, 0.5)


# --- chain


def test_chain_keeps_the_token_that_stops_it_and_computes_no_further_step(models):
    m, steps = models["llama"], []

    class Watched(SelfDraft):
        def propose(self, state):
            def step(token, k):
                steps.append(k)
                return torch.zeros(len(state.known), 1, 17, device=state.n.device)

            stops = lambda k, logits, token: torch.tensor(  # noqa: E731
                [k == 1, k == 2, k == 0, k == 2], device=state.n.device)
            tokens, q, length = chain(state, step, Says(lambda state: 6, stops))
            assert tokens.shape == (4, 3) and q.shape == (4, 3, 17) and length.tolist() == [2, 3, 1, 3]
            return Draft(tokens, q, length)

    next(rounds(m, PROMPTS, 20, Watched(m, range(4), 6)))
    assert steps == [0, 1, 2]


# --- drafters


def test_ngram_copies_the_latest_continuation():
    m = make(replace(LLAMA, max_len=64))
    drafts = []

    class Seen(NGram):
        def propose(self, state):
            d = super().propose(state)
            drafts.append(
                [row[:n] for row, n in zip(d.tokens.tolist(), d.length.tolist(), strict=True)]
                if d.length is not None
                else None
            )
            return d

    next(rounds(m, [[1, 2, 3, 9, 1, 2, 4, 5, 1, 2], [7, 7, 7], [6], [1, 2, 3, 4]], 9, Seen(3, 2)))
    assert drafts == [[[4, 5, 1], [7], [], []]]


def test_minus_infinity_is_noticed():
    m = make(LLAMA)
    honest = m.unembed
    m.unembed = lambda x: honest(x).index_fill(2, torch.tensor([3]), -math.inf)
    with pytest.raises(ValueError, match="logits for row 0 are NaN or infinite"):
        generate(m, [[1, 2]], 5)


def test_positions_counted_from_the_last_known_token(models):
    m = models["llama"]
    state, _ = next(rounds(m, PROMPTS, 3))
    n = state.n[:, None]
    assert torch.equal(state.at(0, 1), torch.cat([n - 1, n], 1))
    assert torch.equal(state.at(0, 1, 1), torch.cat([n - 1, n, n], 1)), "siblings of a tree share a position"


def test_a_model_that_has_generated_can_still_be_trained():
    m = make(LLAMA)
    generate(m, [[1, 2]], 3)
    m.requires_grad_(True)
    m(torch.tensor([[1, 2, 3]])).sum().backward()
    assert m.blocks[0].attn.wqkv.grad.abs().sum() > 0


# --- bad input


@pytest.mark.parametrize(
    "prompts, max_new, message",
    [
        ([[1], []], 5, "prompt 1 is empty"),
        ([[1] * 64], 5, "prompt 0 has 64 tokens and fills the context of 64"),
        ([[1, 17]], 5, "prompt 0 holds token id 17, but ids run from 0 to 16"),
        ([[-1]], 5, "prompt 0 holds token id -1"),
        ([[1]], -1, "max_new must be at least 0, got -1"),
    ],
)
def test_bad_prompts(models, prompts, max_new, message):
    with pytest.raises(ValueError, match=message):
        rounds(models["llama"], prompts, max_new)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda m: SelfDraft(m, [], 3), "leaves no sub-layer"),
        (lambda m: SelfDraft(m, [0, 12], 3), "sub-layers must rise within 0 .. 11"),
        (lambda m: SelfDraft(m, [1, 0], 3), "sub-layers must rise"),
        (lambda m: SelfDraft(m, range(4), -1), "gamma, how many tokens to draft"),
        (lambda m: ModelDraft(m, 1.5), "gamma, how many tokens to draft"),
        (lambda m: NGram(-2, 1), "gamma, how many tokens to draft"),
        (lambda m: NGram(2, 0), "n, the number of tokens to look up"),
    ],
)
def test_bad_drafters(models, build, message):
    with pytest.raises(ValueError, match=message):
        build(models["llama"])


def test_draft_model_with_a_short_context(models):
    m = models["llama"]
    short = make(replace(LLAMA, max_len=16), device=m.tok.device)
    with pytest.raises(ValueError, match="context is 16, but prompt and answer need 28"):
        generate(m, PROMPTS, 20, ModelDraft(short, 2))
    assert generate(m, PROMPTS, 8, ModelDraft(short, 2))[0] == generate(m, PROMPTS, 8)[0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_damaged_weights_are_noticed(value):
    m = make(LLAMA)
    m.norm.weight.data[3] = value
    with pytest.raises(ValueError, match="logits for row 0 are NaN or infinite"):
        generate(m, [[1, 2]], 5)


# --- GPU


@pytest.mark.parametrize("device", DEVICES)
def test_same_seed_same_uniforms_on_every_device(device):
    got = Coins(7).take(5000, torch.device(device)).cpu()
    assert torch.equal(got, uniforms(7, 0, 5000))
