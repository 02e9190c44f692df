"""From logits to distribution to token, by hand: what stays, in which order, how ties end, and which uniforms
are spent on what.
"""
import hashlib
import math
from itertools import islice

import pytest
import torch
from tiny import GEMMA, LLAMA, PROMPTS, Fixed, devices, make, warm

from layerskip import SelfDraft
from sampling import Coins, to_probs, uniforms
from speculative import ModelDraft, NGram, Rule, Then, generate

ALMOST_ONE = 1 - 2**-53    # the largest uniform there is
halves = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


def from_p(*p):
    """Logits of which to_probs(temperature=1) gives p back."""
    return torch.tensor(p, dtype=torch.float64).log()


def near(got, *want):
    return torch.allclose(got, torch.tensor(want, dtype=got.dtype), rtol=1e-12, atol=1e-15)


# --- one setting at a time; what each does, by hand: test_by_hand.py::test_probabilities


@devices
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_temperature_0_is_an_exact_one_hot_and_ties_go_to_the_lower_id(dtype, device):
    logits = torch.randn(3, 2, 4096, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    at = torch.tensor([[4095, 1], [77, 2048], [0, 4094]])
    for b in range(3):
        for t in range(2):
            logits[b, t, at[b, t] :: 13] = 9    # a tie with every 13th behind it
    p = to_probs(logits)
    assert p.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(p.argmax(-1).cpu(), at)
    assert torch.equal(p.amax(-1), torch.ones(3, 2, dtype=p.dtype, device=device)) and p.sum() == 6


def test_temperature_0_does_not_care_for_the_other_settings():
    p = to_probs(from_p(0.1, 0.4, 0.4, 0.1), 0.0, top_k=3, top_p=0.1, min_p=1.0)
    assert p.tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("temperature", [1e-30, 1e-45, 5e-324])
@pytest.mark.parametrize("settings", [{}, dict(top_k=3), dict(top_p=0.9), dict(min_p=0.1)], ids=str)
def test_a_tiny_temperature_is_no_nan(temperature, settings):
    logits = torch.tensor([60000.0, -60000.0, 59999.0, 60000.01])
    assert to_probs(logits, temperature, **settings).tolist() == [0, 0, 0, 1]
    assert to_probs(torch.tensor([1.0, 3.0, 3.0]), temperature, **settings).sum() == 1
    assert to_probs(torch.tensor([1e9, 2e9]), temperature, **settings).tolist() == [0, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_top_k_keeps_exactly_k_and_ties_go_to_the_lower_id(dtype):
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0, 3.0, 0.0], dtype=dtype)
    assert near(to_probs(logits, 1.0, top_k=1), 0, 1, 0, 0, 0, 0)
    assert near(to_probs(logits, 1.0, top_k=2), 0, 0.5, 0, 0.5, 0, 0), "two of the three tied, the lower ids"
    many = torch.zeros(5000, dtype=dtype)
    for k in (1, 7, 4999):
        p = to_probs(many, 1.0, top_k=k)
        assert p.count_nonzero() == k and p[:k].all()


def test_top_k_beyond_the_vocabulary_keeps_all():
    p = from_p(0.5, 0.25, 0.125, 0.125)
    for k in (4, 5, 10**6):
        assert near(to_probs(p, 1.0, top_k=k), 0.5, 0.25, 0.125, 0.125)


@halves
def test_top_p_1_does_nothing_even_to_a_long_tail(dtype):
    """The running sum of 50,000 rounded numbers reaches 1 before its end."""
    logits = (torch.randn(2, 50_000, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    p = to_probs(logits, 1.0)
    assert p.all()
    assert torch.equal(to_probs(logits, 1.0, top_p=1.0), p) and torch.equal(to_probs(logits, 1.0, top_p=1), p)
    assert torch.equal(to_probs(logits, 1.0, top_k=49_999, top_p=1.0), to_probs(logits, 1.0, top_k=49_999))


# --- all settings together


SETTINGS = [dict(temperature=t, top_k=k, top_p=p, min_p=m) for t in (0.3, 1.0, 1.7) for k in (None, 5, 40)
            for p in (None, 0.5, 0.9) for m in (None, 0.05, 0.5)]


def test_random_logits_give_what_transformers_gives():
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
    logits = torch.randn(8, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    warpers = dict(top_k=TopKLogitsWarper, top_p=TopPLogitsWarper, min_p=MinPLogitsWarper)
    for s in SETTINGS:
        scores = TemperatureLogitsWarper(s["temperature"])(None, logits)
        for key, warper in warpers.items():
            scores = scores if s[key] is None else warper(s[key])(None, scores)
        got = to_probs(logits, **s)
        assert torch.allclose(got, scores.softmax(-1), rtol=1e-12, atol=1e-15), s


# --- types and shapes


@halves
def test_half_types_are_raised_and_float64_stays(dtype):
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    for settings in ({}, dict(temperature=1.0), dict(temperature=1.0, top_k=9, top_p=0.9, min_p=0.01)):
        got = to_probs(logits.to(dtype), **settings)
        assert got.dtype == torch.float32
        assert torch.equal(got, to_probs(logits.to(dtype).float(), **settings)), "raised before anything else"
        assert to_probs(logits.double(), **settings).dtype == torch.float64


def test_each_row_stands_for_itself_and_the_logits_stay():
    logits = torch.randn(3, 2, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kept = logits.clone()
    for s in (dict(temperature=0.0), *SETTINGS):
        p = to_probs(logits, **s)
        assert p.shape == logits.shape and torch.allclose(p.sum(-1), torch.ones(3, 2).double(), atol=1e-14)
        assert torch.equal(p[2, 1], to_probs(logits[2, 1], **s))
        assert torch.equal(p[1], to_probs(logits[1], **s))
    assert torch.equal(logits, kept)


@pytest.mark.parametrize("name, values", {
    "temperature": [-1.0, -1e-9, math.inf, math.nan], "top_k": [0, -3, 1.5, 2.0, math.inf, math.nan],
    "top_p": [0.0, -0.5, 1.0001, math.nan], "min_p": [0.0, -0.5, 1.0001, math.nan]}.items(), ids=str)
def test_a_setting_out_of_range_is_named(name, values):
    for value in values:
        with pytest.raises(ValueError, match=rf"^{name} must .*{value}$"):
            to_probs(torch.zeros(3), **{"temperature": 1.0, name: value})


# --- coins


@devices
def test_the_stream_does_not_depend_on_the_purchases(device):
    """Whatever it is cut into: also where what was computed ahead runs out within a cut."""
    want = uniforms(7, 0, 30_000)
    for sizes in ([30_000], [1] * 50 + [4096, 4095, 3, 10_000, 1, 0, 5000], [4000, 97, 4096, 20_000]):
        coins = Coins(7)
        got = torch.cat([coins.take(size, torch.device(device)) for size in sizes])
        assert torch.equal(got.cpu(), want[: len(got)])


def splitmix64(seed):
    """An implementation that shares nothing with ours: Python's own integers, one number at a time."""
    mask, state = 2**64 - 1, seed % 2**64
    while True:
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
        yield z ^ z >> 31


def test_the_coins_are_splitmix64():
    """The published first values of seed 1234567, and a thousand of other seeds."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431,
                 16408922859458223821]
    assert list(islice(splitmix64(1234567), 5)) == published
    assert uniforms(1234567, 0, 5).tolist() == [(z >> 11) / 2**53 for z in published]
    for seed in (0, 1, -1, 7, 2**63 - 1, -(2**63), 2**64 - 1):
        want = [(z >> 11) / 2**53 for z in islice(splitmix64(seed), 1000)]
        assert uniforms(seed, 0, 1000).tolist() == want and uniforms(seed, 400, 9).tolist() == want[400:409]
    assert uniforms(0, 0, 3).tolist() == [0.8833108082136426, 0.43152799704850997, 0.026433771592597743]


def test_uniforms_lie_between_0_and_1_and_fill_it_evenly():
    got = uniforms(3, 0, 100_000)
    assert 0 <= float(got.min()) and float(got.max()) < 1
    counts = torch.histc(got, 20, 0, 1)
    assert float(((counts - 5000) ** 2 / 5000).sum()) < 43.8, "chi-square, 19 degrees of freedom, p = .001"


def test_seeds_differ_and_repeat():
    one, again, other = (Coins(seed).take(100, torch.device("cpu")) for seed in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert torch.equal(Coins().take(9, torch.device("cpu")), Coins(0).take(9, torch.device("cpu")))


def test_flips_of_certain_things():
    nan, inf = math.nan, math.inf
    prob = torch.tensor([[0.0, 1.0, 1.5, inf, nan], [0.0, 1.0, 1.5, inf, nan]])
    got = Fixed(*[0.0] * 5, *[ALMOST_ONE] * 5).flip(prob)
    assert got.tolist() == [[False, True, True, True, False]] * 2


def test_flips_by_hand():
    prob = torch.tensor([0.25, 0.2501, 0.25, ALMOST_ONE], dtype=torch.float64)
    got = Fixed(0.25, 0.25, 0.2499, ALMOST_ONE).flip(prob)
    assert got.tolist() == [False, True, True, False], "true iff u < prob"


def test_a_long_tail_of_small_weights_is_not_lost():
    """A running sum in float32 moves in steps of 1e-7 there: twelve tokens at a time, or never."""
    weights = torch.tensor([1.0] + [1e-8] * 50_000)
    got = Fixed(1.00025 / 1.0005).choose(weights).item()
    assert got == pytest.approx(25_000, abs=2), "the running sum is rounded: small weights need float64"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_token_of_weight_zero_is_never_chosen(dtype):
    generator = torch.Generator().manual_seed(0)
    for tail in (0, 1, 50):
        for _ in range(20):
            some = torch.rand(2, 30, generator=generator, dtype=dtype) * 1e-3
            some[:, 10:13] = 0
            weights = torch.nn.functional.pad(some, (tail, tail))
            picks = Fixed(0.0, ALMOST_ONE).choose(weights)
            assert picks.tolist() == [tail, tail + 29], "u = 0 takes the first with weight, u -> 1 the last"
    assert Fixed(0.0, 0.5, ALMOST_ONE).choose(torch.eye(3)[[1, 1, 1]]).tolist() == [1, 1, 1]


def test_choices_have_any_shape_of_rows():
    weights = torch.rand(2, 3, 5, generator=torch.Generator().manual_seed(0))
    flat = Coins(3).choose(weights.view(6, 5))
    assert torch.equal(Coins(3).choose(weights), flat.view(2, 3)) and flat.dtype == torch.long
    assert Coins(3).choose(weights[0, 0]).shape == ()


@devices
def test_choices_follow_the_weights(device):
    """Pearson's chi-square of 40,000 choices among four: above 16.3 once in a thousand seeds."""
    weights = torch.tensor([0.3, 0.0, 0.05, 0.05, 0.6], device=device)
    counts = torch.bincount(Coins(11).choose(weights.expand(40_000, 5)).cpu(), minlength=5)
    expected = 40_000 * weights.cpu()
    assert counts[1] == 0
    assert float(((counts - expected) ** 2 / expected)[[0, 2, 3, 4]].sum()) < 16.3
    heads = Coins(12).flip(torch.full((40_000,), 0.3, device=device)).sum()
    assert abs(int(heads) - 12_000) < 3.3 * math.sqrt(40_000 * 0.3 * 0.7)


# --- in which order the library spends them


class Ledger(Coins):
    """Coins that write down what they are spent on."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.spent, self.uniforms = [], 0

    def take(self, count, device):
        self.uniforms += count
        return super().take(count, device)

    def flip(self, prob):
        self.spent.append(("flip", *prob.shape))
        return super().flip(prob)

    def choose(self, weights):
        self.spent.append(("choose", math.prod(weights.shape[:-1])))
        return super().choose(weights)


@pytest.mark.parametrize("probs", [to_probs, warm], ids=["greedy", "sampled"])
def test_a_plain_round_spends_one_choice_a_row(probs):
    """One code path: a one-hot is a distribution like any other, and no setting changes the order."""
    coins = Ledger()
    generate(make(LLAMA), PROMPTS, 5, probs=probs, coins=coins)
    assert coins.spent == [("choose", 4)] * 5 and coins.uniforms == 20


@pytest.mark.parametrize("gamma", [1, 3])
def test_a_speculative_round_spends_drafts_then_flips_then_one_choice(gamma):
    """A poor draft, so that rejections occur: the flips behind one are spent all the same."""
    coins, gammas = Ledger(), []

    class Watched(Rule):
        def gamma(self, state):
            gammas.append(min(gamma, max(state.left_cpu) - 1))
            return gamma

    generate(make(LLAMA), PROMPTS, 9, ModelDraft(make(GEMMA, 1), Watched(gamma)), warm, coins)
    want = []
    for K in gammas:
        want += [("choose", 4)] * K + [("flip", 4, K)] * (K > 0) + [("choose", 4)]
    assert coins.spent == want and len(gammas) > 3
    assert coins.uniforms == sum(4 * (2 * K + 1) for K in gammas)


def test_certain_drafts_spend_flips_and_one_choice():
    coins = Ledger()
    generate(make(LLAMA), [[1, 2, 3, 1, 2]], 4, NGram(2, 2), warm, coins)
    assert coins.spent[:2] == [("flip", 1, 2), ("choose", 1)]


ORDERS = {1: "f9ee7d76"}  # of each version the hash of what is spent on what; a new order needs a new version


def test_the_order_of_spending_has_a_version():
    """Ports and recorded runs depend on it: whoever changes the order raises `Coins.version`."""
    class Stop(Rule):
        def stop(self, k, logits, token):
            return token % 3 == 0

    m, draft, spent = make(LLAMA), make(GEMMA, 1), []
    for drafter in (None, NGram(3, 1), ModelDraft(draft, 2), ModelDraft(draft, Stop(3)),
                    SelfDraft(m, range(8), 3), Then(SelfDraft(m, range(8), 2), NGram(2, 1))):
        for prompts in (PROMPTS, PROMPTS[:1]):
            coins = Ledger(5)
            generate(m, prompts, 7, drafter, warm, coins)
            spent += [coins.spent, coins.uniforms]
    got = hashlib.sha256(repr(spent).encode()).hexdigest()[:8]
    assert got == ORDERS.get(Coins.version), f"the order is another one ({got}): raise Coins.version"
