"""From logits to distribution to token: types, shapes, extreme settings, the published stream, and
which uniforms are spent on what. What each setting does: test_by_hand.py::test_probabilities."""
import hashlib
import math

import pytest
import torch
from teach import Mistakes, compare, short
from tiny import GEMMA, LLAMA, PROMPTS, Fixed, Unsure, make, warm

from drafter import ModelDraft
from lab.then import Then
from layerskip import SelfDraft
from methods.lookup import NGram
from methods.trees import Siblings
from sampling import Coins, to_probs, uniforms
from speculative import generate, rounds

ALMOST_ONE = 1 - 2**-53    # the largest uniform there is
SETTINGS = [dict(temperature=t, top_k=k, top_p=p, min_p=m) for t in (0.3, 1.7) for k in (None, 5)
            for p in (None, 0.5, 0.9) for m in (None, 0.05)]
halves = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


def from_p(*p):
    """Logits of which to_probs(temperature=1) gives p back."""
    return torch.tensor(p, dtype=torch.float64).log()


def some_logits(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


# --- to_probs


def gives(want, logits, temperature, **settings):
    compare(to_probs(logits, temperature, **settings), want,
            Mistakes("to_probs", lambda f: f(logits, temperature, **settings)),
            f"the logits {short(logits)}, temperature = {temperature}, {settings}", 1e-5)


@pytest.mark.parametrize("temperature", [1e-30, 5e-324])
@pytest.mark.parametrize("settings", [{}, dict(top_k=3, top_p=0.9, min_p=0.1)], ids=str)
def test_a_tiny_temperature_is_no_nan(temperature, settings):
    for logits, want in (([60000.0, -60000.0, 59999.0, 60000.01], [0, 0, 0, 1]),
                         ([1e9, 2e9], [0, 1]), ([1.0, 3.0, 3.0], [0, 0.5, 0.5])):
        gives(want, torch.tensor(logits), temperature, **settings)


def test_each_row_stands_for_itself():
    """However far apart they are."""
    rows = torch.tensor([[0.1, 0.2, 0.4], [3e6, 0.0, 1.0]])
    gives(torch.stack([to_probs(row, 1.0) for row in rows]), rows, 1.0)


@halves
def test_top_p_1_does_nothing_even_to_a_long_tail(dtype):
    """The running sum of 50,000 rounded numbers reaches 1 before its end."""
    logits = (some_logits(2, 50_000) * 4).to(dtype)
    for top_k in (None, 49_999):
        p = to_probs(logits, 1.0, top_k)
        assert p.dtype == torch.float32 and p.equal(to_probs(logits, 1.0, top_k, top_p=1.0))


def test_random_logits_give_what_transformers_gives():
    import transformers as hf
    logits = some_logits(8, 40) * 2
    warpers = dict(top_k=hf.TopKLogitsWarper, top_p=hf.TopPLogitsWarper, min_p=hf.MinPLogitsWarper)
    for s in SETTINGS:
        scores = hf.TemperatureLogitsWarper(s["temperature"])(None, logits)
        for key, warper in warpers.items():
            scores = scores if s[key] is None else warper(s[key])(None, scores)
        assert torch.allclose(to_probs(logits, **s), scores.softmax(-1), rtol=1e-12, atol=1e-15), s


@halves
def test_half_types_are_raised(dtype):
    logits = some_logits(50).to(dtype)
    for settings in (dict(temperature=0.0), dict(temperature=1.0), SETTINGS[-1]):
        assert to_probs(logits, **settings).equal(to_probs(logits.float(), **settings))


def sorted_probs(logits, temperature, top_k=None, top_p=None, min_p=None):
    """`to_probs` of one row by sorting all of it."""
    order = (logits / temperature).sort(descending=True, stable=True)
    p = order.values[:top_k].softmax(0)
    if top_p is not None:
        p[p.cumsum(0) - p >= top_p] = 0
    if min_p is not None:
        p[p < min_p * p[0]] = 0
    return torch.zeros_like(logits).scatter_(0, order.indices[:top_k], p / p.sum())


CUTS = [dict(top_k=20), dict(top_k=1000), dict(top_p=0.95), dict(top_p=0.999), dict(min_p=0.01),
        dict(top_k=20, top_p=0.8), dict(top_p=0.9, min_p=0.001),
        dict(top_k=50, top_p=0.95, min_p=0.02)]


@pytest.mark.parametrize("scale", [0.0, 0.5, 2.0, 9.0])
def test_only_what_may_stay_is_sorted(scale):
    """From equal logits to a single likely token. As in bfloat16, many are equal, also at a cut."""
    logits = (some_logits(3, 30_000) * scale).bfloat16().double()
    for settings in CUTS:
        got = to_probs(logits, 0.7, **settings)
        want = torch.stack([sorted_probs(row, 0.7, **settings) for row in logits])
        assert (got > 0).equal(want > 0), settings
        assert torch.allclose(got, want, rtol=1e-12, atol=1e-12), settings


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("V", [1000, 32_768, 49_152, 151_936, 262_144])
def test_a_row_has_the_same_bits_alone_and_among_others(V, threads):
    """Sums over 32,768 numbers and more are split among threads if there is only one row."""
    logits = (some_logits(4, V) * 3).bfloat16()
    logits[1] *= 3      # few candidates among many
    for settings in ({}, *CUTS):
        threads(1)
        p = to_probs(logits, 0.8, **settings)
        for count in (1, 2):
            threads(count)
            again = to_probs(logits, 0.8, **settings)
            alone = torch.stack([to_probs(row, 0.8, **settings) for row in logits])
            block = to_probs(logits[:, None], 0.8, **settings)[:, 0]
            assert p.equal(again) and p.equal(alone) and p.equal(block), (settings, count)


@pytest.mark.parametrize("settings", [{}, *CUTS], ids=str)
def test_nan_stays_nan_in_its_row(settings):
    """The loop reports it, and other rows know nothing."""
    logits = some_logits(3, 50)
    logits[1, 7] = math.nan
    p = to_probs(logits, 1.0, **settings)
    assert p[1].isnan().any() and p[[0, 2]].equal(to_probs(logits[[0, 2]], 1.0, **settings))
    assert to_probs(logits[1], 1.0, **settings).isnan().any()


@pytest.mark.parametrize("name, values", {
    "temperature": [-1.0, -1e-9, math.inf, math.nan], "top_k": [0, -3, 1.5, 2.0, math.nan],
    "top_p": [0.0, 1.0001, math.nan], "min_p": [0.0, 1.0001, math.nan]}.items(), ids=str)
def test_a_setting_out_of_range_is_named(name, values):
    for value in values:
        with pytest.raises(ValueError, match=f"^{name} must .*{value}$"):
            to_probs(torch.zeros(3), **{"temperature": 1.0, name: value})


# --- coins; that purchases of any size give one stream: test_properties.py


def test_the_published_values_of_splitmix64():
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431,
                 16408922859458223821]
    assert uniforms(1234567, 0, 5).tolist() == [(z >> 11) / 2**53 for z in published]


def test_flips_are_true_where_u_is_below_prob():
    prob = torch.tensor([0.0, 1.0, math.inf, math.nan, 0.25, 0.2501, 0.25], dtype=torch.float64)
    got = Fixed(0.0, ALMOST_ONE, ALMOST_ONE, 0.0, 0.25, 0.25, 0.2499).flip(prob)
    assert got.tolist() == [False, True, True, False, False, True, True]


def test_a_long_tail_of_small_weights_is_not_lost():
    """A running sum in float32 moves in steps of 1e-7 there: twelve tokens at a time, or never."""
    weights = torch.tensor([1.0] + [1e-8] * 50_000)
    assert abs(int(Fixed(1.00025 / 1.0005).choose(weights)) - 25_000) <= 2
    # in the middle of what belongs to each of some ids, by float64
    weights = some_logits(50_000).abs().float()
    ends, ids = weights.double().cumsum(0), torch.arange(100, 50_000, 4_990)
    coins = Fixed(*((ends[ids] - weights[ids].double() / 2) / ends[-1]).tolist())
    assert coins.choose(weights.expand(10, -1)).equal(ids)


@pytest.mark.parametrize("weights", [[0.0, 0.0, 0.0], [math.nan] * 3], ids=str)
def test_weights_of_which_none_counts_give_an_id_all_the_same(weights):
    """Callers report them, so a choice must not fail before."""
    got = Fixed(0.0, 0.5, ALMOST_ONE).choose(torch.tensor([weights] * 3))
    assert got.shape == (3,) and bool(((got >= 0) & (got < 3)).all())


def test_a_token_of_weight_zero_is_never_chosen():
    """Of 30 weights between zeros, u = 0 chooses the first, and u -> 1 the last."""
    for tail in (0, 1, 50):
        for some in some_logits(20, 2, 30).abs() * 1e-3:
            weights = torch.nn.functional.pad(some.float(), (tail, tail))
            assert Fixed(0.0, ALMOST_ONE).choose(weights).tolist() == [tail, tail + 29]
    assert Fixed(0.0, 0.5, ALMOST_ONE).choose(torch.eye(3)[[1, 1, 1]]).tolist() == [1, 1, 1]


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


@pytest.mark.parametrize("room, widths, drawn", [
    (9, [], [4] * 3), (3, [], [4] * 2), (20, [3, 1], [4, 4, 4, 12, 4])])
def test_a_round_spends_drafts_then_flips_then_one_choice(room, widths, drawn):
    """Siblings are drawn after the chain, rank by rank. No more drafts are drawn than can be
    emitted before the token that comes after them."""
    coins, draft = Ledger(), Siblings(ModelDraft(make(GEMMA, 1), 3), widths)
    next(rounds(make(LLAMA), PROMPTS, room, draft, warm, coins))
    K = sum(drawn) // 4
    assert coins.spent == [*(("choose", n) for n in drawn), ("flip", 4, K), ("choose", 4)]
    assert coins.uniforms == 4 * (K + K + 1)


ORDERS = {1: "b56de1aa"}    # of each version the hash of what is spent on what


def test_the_order_of_spending_has_a_version():
    """Ports and recorded runs depend on it: who changes the order raises `Coins.version`."""
    m, draft, spent = make(LLAMA), make(GEMMA, 1), []
    for drafter in (None, NGram(3, 1), ModelDraft(draft, 2), ModelDraft(draft, Unsure(3)),
                    SelfDraft(m, range(8), 3), Then(SelfDraft(m, range(8), 2), NGram(2, 1))):
        for prompts in (PROMPTS, PROMPTS[:1]):
            coins = Ledger(5)
            generate(m, prompts, 7, drafter, warm, coins)
            spent += [coins.spent, coins.uniforms]
    got = hashlib.sha256(repr(spent).encode()).hexdigest()[:8]
    assert got == ORDERS.get(Coins.version), f"another order ({got}): raise Coins.version"
