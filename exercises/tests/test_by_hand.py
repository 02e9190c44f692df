"""Functions of the library, each alone, by examples that are small enough to follow on paper. A
wrong answer is told from others by what the mistakes of exercises/wrong.txt give."""
import math
import random
from dataclasses import replace

import pytest
import torch
from teach import Mistakes, compare, fail, known, no_other_chance, promise, short
from test_sampling import ALMOST_ONE, from_p
from tiny import GEMMA, LLAMA, Fixed, wide

from control import best_along, best_gamma, expected_tokens, expected_tokens_along
from kvcache import KVCache
from machine.exact import Race
from model import Attention, Placement, RMSNorm, frequencies, rope
from sampling import Coins, signed, to_probs, uniform

# --- from logits to probabilities


def roots(p, power):
    powers = [x**power for x in p]
    return [x / sum(powers) for x in powers]


PROBS = {   # settings, the softmax of the logits, what comes out
    "greedy": (dict(temperature=0.0), [0.125, 0.375, 0.375, 0.125], [0, 1, 0, 0]),
    "temperature": (
        dict(temperature=0.5), [0.5, 0.25, 0.125, 0.125], roots([0.5, 0.25, 0.125, 0.125], 2)),
    "top-k": (dict(temperature=1.0, top_k=2), [0.1, 0.2, 0.35, 0.35], [0, 0, 0.5, 0.5]),
    "top-k, ties": (dict(temperature=1.0, top_k=2), [0.1, 0.3, 0.3, 0.3], [0, 0.5, 0.5, 0]),
    "top-p": (dict(temperature=1.0, top_p=0.6), [0.125, 0.5, 0.125, 0.25], [0, 2 / 3, 0, 1 / 3]),
    "top-p, reached": (dict(temperature=1.0, top_p=0.5), [0.25, 0.5, 0.125, 0.125], [0, 1, 0, 0]),
    "min-p": (dict(temperature=1.0, min_p=0.4), [0.125, 0.5, 0.125, 0.25], [0, 2 / 3, 0, 1 / 3]),
    "min-p, reached": (dict(temperature=1.0, min_p=1.0), [0.2, 0.4, 0.4], [0, 0.5, 0.5]),
    "top-k, then top-p": (
        dict(temperature=1.0, top_k=2, top_p=0.5), [0.4, 0.3, 0.2, 0.1], [1, 0, 0, 0]),
    "top-p, then min-p": (
        dict(temperature=1.0, top_p=0.75, min_p=0.5), [0.4, 0.25, 0.2, 0.15],
        [0.4 / 0.85, 0.25 / 0.85, 0.2 / 0.85, 0]),
    "all four": (
        dict(temperature=0.5, top_k=3, top_p=0.75, min_p=0.7), roots([0.4, 0.3, 0.2, 0.1], 0.5),
        [4 / 7, 3 / 7, 0, 0])}


def check_probabilities(logits, settings, want, given):
    got = to_probs(logits, **settings)
    mistakes = Mistakes("to_probs", lambda f: f(logits, **settings))
    if got.shape == logits.shape and bool(got.isnan().any()):
        fail(given, "probabilities", "NaN", known(got, mistakes) or
             "NaN: was a softmax taken of nothing but -inf, or 0 / 0?")
    compare(got, want, mistakes, given, rtol=1e-9)


@pytest.mark.parametrize("name", PROBS)
def test_probabilities(name):
    settings, p, want = PROBS[name]
    check_probabilities(from_p(*p), settings, want,
                        f"the logits log {short(p)}, whose softmax is just that, and {settings}")


def slow_probs(logits, temperature, top_k=None, top_p=None, min_p=None):
    """By its definition, token by token."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: top_k if temperature else 1]
    p = [math.exp((logits[i] - max(logits)) / (temperature or 1)) for i in order]
    p = [x / sum(p) for x in p]
    total = 0.0
    kept = {}
    for i, x in zip(order, p, strict=True):
        if x / p[0] >= (min_p or 0) and (top_p is None or total < top_p - 1e-12):
            kept[i] = x
        total += x
    return [kept.get(i, 0.0) / sum(kept.values()) for i in range(len(logits))]


def test_probabilities_of_drawn_settings():
    """Temperatures from 0.02 to 500, with all cuts, ties, and tokens that are ruled out."""
    draw = random.Random(0)
    for _ in range(300):
        logits = [draw.choice([draw.gauss(0, 3), draw.gauss(0, 3), 1.0, -math.inf])
                  for _ in range(draw.randint(0, 9))] + [draw.gauss(0, 3)]
        settings = dict(temperature=draw.choice([0.0, *[math.exp(draw.uniform(-4, 6))] * 9]),
                        top_k=draw.choice([None, draw.randint(1, 12)]),
                        top_p=draw.choice([None, draw.uniform(0.01, 1)]),
                        min_p=draw.choice([None, draw.uniform(0.01, 1)]))
        check_probabilities(wide(logits), settings, slow_probs(logits, **settings),
                            f"logits {short(logits)}, {settings}")


# --- choices


@pytest.mark.parametrize("weights, us, want", [
    ([0.1, 0.0, 0.2, 0.1], [0.2, 0.251, 0.9, 0.05, 0.249, ALMOST_ONE], [0, 2, 3, 0, 0, 3]),
    ([0.0, 0.5, 0.5], [0.0, 0.4, ALMOST_ONE], [1, 1, 2])], ids=str)
def test_choices(weights, us, want):
    given = f"the weights {weights} and the uniforms u = {us}, one each"

    def each(choose):
        got = []
        for u in us:
            coins = Fixed(u, *[0.5] * 9)
            with no_other_chance(given):
                got.append(choose(coins, wide([weights])))
            if len(coins.uniforms) < 9:
                fail(given, "one uniform for each row of weights", f"{10 - len(coins.uniforms)}",
                     "Gumbel-max takes one per token; turn a single one into an id by the running "
                     "sum of the weights")
            if not isinstance(got[-1], torch.Tensor) or got[-1].shape != (1,):
                fail(given, "for weights (1, V) an index of shape (1,)", f"{got[-1]!r:.100}")
        return torch.cat(got)

    compare(each(Coins.choose), want, Mistakes("Coins.choose", each), given)


# --- the cache: slots of one number each, so that they can be read


def to(*slots, end=None, positions=None):
    """A Placement at these slots of each row, by default those of its positions."""
    slots = torch.tensor(slots)
    positions = slots if positions is None else torch.tensor(positions)
    return Placement(positions, slots, int(positions.min()),
                     int(slots.max()) + 1 if end is None else end)


WRITES = {  # writes (layer, keys, where, maybe start), and the keys that the last one returns
    "the old and the new": (
        [(0, [[1, 2, 3]], Placement.span(0, 3)), (0, [[4, 5]], Placement.span(3, 5))],
        [[1, 2, 3, 4, 5]]),
    "over what was refused": (
        [(0, [[1, 2, 3, 4]], Placement.span(0, 4)), (0, [[7]], Placement.span(2, 3)),
         (0, [[8]], to([3], end=6))], [[1, 2, 7, 8, 0, 0]]),
    "rows": (
        [(0, [[1, 2, 3], [4, 5, 6]], Placement.span(0, 3)),
         (0, [[7, 8], [9, 10]], to([1, 3], [0, 2], end=5))], [[1, 7, 3, 8, 0], [9, 5, 10, 0, 0]]),
    "more to read than was written": (
        [(0, [[1, 2, 3, 4], [5, 6, 7, 8]], Placement.span(1, 5)),
         (0, [[9], [10]], Placement.span(1, 2)._replace(end=4))], [[0, 9, 2, 3], [0, 10, 6, 7]]),
    "siblings": (
        [(0, [[1, 2]], Placement.span(0, 2)),
         (0, [[3, 4, 5]], to([2, 3, 4], positions=[[2, 3, 3]]))], [[1, 2, 3, 4, 5]]),
    "layers": ([(0, [[1, 2]], Placement.span(0, 2)), (1, [[3]], Placement.span(2, 3))],
               [[0, 0, 3]]),
    "start": ([(0, [[1, 2, 3, 4]], Placement.span(0, 4)), (0, [[5]], Placement.span(4, 5), 3)],
              [[4, 5]]),
    "one row of slots for all": ([(0, [[1, 2], [3, 4]], to([2, 0], end=3))],
                                 [[2, 0, 1], [4, 0, 3]])}


@pytest.mark.parametrize("name", WRITES)
def test_a_write(name):
    """Values are ten times the keys. There are 2 layers of 6 slots."""
    writes, want = WRITES[name]
    c = replace(LLAMA, n_layers=2, n_kv_heads=1, head_dim=1)
    given = "; then ".join(
        f"keys {keys} to slots {short(at.slots)} of layer {layer}, end = {at.end}"
        + "".join(f", start = {n}" for n in start) for layer, keys, at, *start in writes)

    def found(write):
        """The keys and the values that the last write returns, (2, B, S)"""
        cache = KVCache(c, len(want), 6, torch.float64)
        for layer, keys, at, *start in writes:
            k = wide(keys)[:, None, :, None]                                    # (B, 1, T, 1)
            pair = write(cache, layer, k, 10 * k, at, *start)
        if not (isinstance(pair, tuple) and [t.dim() for t in pair] == [4, 4]):
            fail(given, "a pair (keys, values), both (B, Hkv, S, D)", f"{pair!r:.100}")
        promise(pair[0].dtype == pair[1].dtype == torch.float64, "a cache in float64", "float64",
                str(pair[0].dtype), "what is read has the type of the cache")
        return torch.stack(pair)[:, :, 0, :, 0]

    keys, values = found(KVCache.write)
    compare(keys, want, Mistakes("KVCache.write", lambda f: found(f)[0]), given)
    compare(values, 10 * keys, Mistakes("KVCache.write", lambda f: found(f)[1]), f"{given}: values")


# --- a race for each place


def slow_race(p, position, offset, seeds):
    """`Race.settle` by its definition, number by number."""
    wins = torch.zeros_like(p)
    for b, row in enumerate(p):
        for t, chances in enumerate(row):
            place = int(position[b % len(position), t]) + offset + 1
            number = place * len(chances) + torch.arange(len(chances))
            us = uniform(signed(seeds[b]), number).tolist()
            arrives = [-math.log1p(-u) / p for u, p in zip(us, chances.tolist(), strict=True)]
            wins[b, t, arrives.index(min(arrives))] = 1
    return wins


@pytest.mark.parametrize("offset", [0, 3])
def test_winners_of_a_race(offset):
    p = wide([0.4, 0.3, 0.2, 0.1]).repeat(2, 80, 1)
    position, seeds = torch.arange(160).view(2, 80) + 5, [3, -8]

    def winners(settle):
        return settle(Race(seeds), p.clone(), position, offset)

    compare(winners(Race.settle), slow_race(p, position, offset, seeds),
            Mistakes("Race.settle", winners),
            "two rows of seeds 3 and -8, p = .4 .3 .2 .1 everywhere, positions 5 to 84 and 85 to "
            f"164, offset {offset}")


def test_what_has_no_chance_never_wins():
    """Of one seed number 16 of the stream is 0: that of token 0 at position 4."""
    race = Race(signed(-17 * 0x9E3779B97F4A7C15 % 2**64))

    def winners(settle):
        return settle(race, wide([[[0.0, 0.0, 1.0, 0.0]], [[0.25] * 4]]), torch.tensor([[3]]))

    compare(winners(Race.settle), [[[0, 0, 1, 0]], [[1, 0, 0, 0]]],
            Mistakes("Race.settle", winners),
            "p = 0 0 1 0 and four times .25, and u of token 0 is 0")


def test_the_winners_of_few_tokens_are_those_of_the_whole_vocabulary():
    """Where a cut leaves few, only these race, with the numbers that they have among all."""
    p = torch.zeros(2, 3, 1000).double()
    chances = {(0, 0): [7, 999], (0, 1): [0, 8, 500], (0, 2): [3], (1, 0): [8, 9], (1, 2): [0, 5]}
    for (b, t), ids in chances.items():
        p[b, t, ids] = 1 / len(ids)
    p[1, 1] = 1 / 1000
    position = torch.tensor([[4, 5, 6], [90, 91, 92]])
    for places in ([0, 2], [0, 1, 2]):      # in the second case one row has all of them
        few, at = p[:, places], position[:, places]
        got = Race([3, -8]).settle(few, at)
        everyone = few.clamp(min=1e-30)     # which wins once in 10^30 races
        compare(got, Race([3, -8]).settle(everyone, at), {},
                f"two to three tokens of 1,000 at the places {at.tolist()}, seeds 3 and -8")


# --- what drafting is worth


def test_expected_tokens_of_a_number():
    cases = [(0.8, 5), (0.5, 2), (1.0, 3), (0.0, 4), (0.7, 0), (1, 4), (0, 2), (0.9995, 9),
             (0.9999999, 3)]

    def each(f):
        return wide([f(alpha, gamma) for alpha, gamma in cases])

    compare(each(expected_tokens),
            [sum(alpha**i for i in range(gamma + 1)) for alpha, gamma in cases],
            Mistakes("expected_tokens", each), f"(alpha, gamma) = {cases}", rtol=1e-9)


def test_expected_tokens_along_texts():
    # texts of one length may be a tensor
    compare(wide(float(expected_tokens_along(torch.ones(2, 4), 3))), 4.0, {},
            "two texts of four acceptances of 1, as one tensor (2, 4), gamma = 3")
    one, two = 1 + 0.9 + 0.9 * 0.2, 1 + 0.2 + 0.2 * 0.5
    starts = 0.1    # how likely the second round starts at position 1; only there it fits in

    def each(f):
        series = wide([0.9, 0.2, 0.5])
        return wide([float(f(texts, 2)) for texts in ([series], [series, wide([1, 1])])])

    want = [(one + starts * two) / (1 + starts), (one + starts * two + 3) / (2 + starts)]
    compare(each(expected_tokens_along), want, Mistakes("expected_tokens_along", each),
            "acceptances .9 .2 .5 along a text and gamma = 2: the first round starts at 0, the "
            "second at 1 (if the first draft was rejected, probability 0.1) or not at all; then "
            "with a second text, 1 1", rtol=1e-9)


def test_best_gamma_of_a_number():
    cases = [(0.8, 0.2), (0.8, 0.05), (0.3, 0.4), (0.4, 0.4)]

    def each(f):
        return torch.tensor([f(alpha, c) for alpha, c in cases])

    compare(each(best_gamma), [4, 8, 0, 0], Mistakes("best_gamma", each), f"(alpha, c) = {cases}")


def test_best_gamma_within_its_bounds():
    dear = [1.0, 1.0, 2.0, 3.0, 4.0]

    def each(f):
        return torch.tensor([f(0.8, 0.05, most=3), f(0.3, 0.4, least=3),
                             f(0.8, 0.05, 4, pass_cost=lambda T: dear[T - 1])])

    compare(each(best_gamma), [3, 3, 1], Mistakes("best_gamma", each),
            "alpha = .8, c = .05, most = 3; alpha = .3, c = .4, least = 3; alpha = .8, c = .05, "
            "most = 4, and blocks of 1, 2, 3, 4, 5 tokens that take 1, 1, 2, 3, 4")


def test_best_gamma_of_drawn_costs():
    """Passes of any price, bounds on both sides, and drafts that never or always pass."""
    draw = random.Random(0)
    for _ in range(150):
        alpha = draw.choice([0, 1, 0.0, 1.0, *[draw.random() for _ in range(8)]])
        cost = draw.uniform(0.01, 0.9)
        least = draw.choice([0, 0, draw.randint(1, 5)])
        most = least + draw.randint(0, 35)
        table = [1.0, *(draw.uniform(0.8, 1 + 0.2 * T) for T in range(most))]
        speeds = [sum(alpha**i for i in range(gamma + 1)) / (gamma * cost + table[gamma])
                  for gamma in range(most + 1)]
        want = max(range(least, most + 1), key=speeds.__getitem__)
        got = best_gamma(alpha, cost, most, least, lambda T, table=table: table[T - 1])
        compare(torch.tensor([got]), [want], {},
                f"alpha = {alpha:.6g}, c = {cost:.6g}, most = {most}, least = {least}, "
                f"pass_cost(1), (2), ... = {short(table)}, so speeds {short(speeds)} for gamma = "
                "0, 1, ...: they may rise again where they have fallen")


def test_expected_tokens_along_drawn_texts():
    """Round after round is played, with its probability."""
    draw = random.Random(0)

    def played(rates, gamma, start=0):
        """(tokens, rounds) expected from `start` on."""
        if start + gamma > len(rates):
            return 0.0, 0.0
        tokens, rounds, reach = 0.0, 1.0, 1.0
        for k in range(gamma + 1):
            tokens += reach
            ends = reach * (1 - rates[start + k] if k < gamma else 1)
            later = played(rates, gamma, start + k + 1)
            tokens += ends * later[0]
            rounds += ends * later[1]
            reach -= ends
        return tokens, rounds

    for _ in range(40):
        texts = [[draw.choice([0.0, 1.0, draw.random(), draw.random()])
                  for _ in range(draw.randint(1, 6))] for _ in range(draw.randint(1, 3))]
        gamma = draw.randint(0, max(map(len, texts)))
        tokens, rounds = map(sum, zip(*(played(rates, gamma) for rates in texts), strict=True))
        got = expected_tokens_along([wide(rates) for rates in texts], gamma)
        compare(wide(float(got)), tokens / rounds, {},
                f"acceptances {short(texts)}, gamma = {gamma}", 1e-9)


def test_a_draft_must_fit_into_a_series():
    for texts in ([torch.ones(2), torch.ones(3)], []):
        try:
            got = expected_tokens_along(texts, 4)
        except ValueError:
            continue
        fail("gamma = 4 and series of at most 3 positions", "a ValueError", got,
             "no round fits into them")
    got, _ = best_along([torch.ones(2), torch.ones(5)], 0.1)
    compare(torch.tensor(got), 5, {}, "c = .1 and series of ones, 2 and 5 long")
    got, _ = best_along([torch.ones(2), torch.ones(5)], 0.1, most=3)
    compare(torch.tensor(got), 3, {}, "the same, and most = 3")


# --- the norm, and attention


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_norm_of_two_numbers(offset):
    norm = RMSNorm(replace(LLAMA, norm_eps=0.5, norm_offset=offset), 2).double()
    x, w = wide([[3.0, 4.0]]), wide([1.0, 2.0])
    norm.requires_grad_(False).weight.copy_(w)
    compare(norm(x), x / math.sqrt((9 + 16) / 2 + 0.5) * (offset + w),
            Mistakes("RMSNorm.forward", lambda f: f(norm, x)),
            f"x = [3, 4], the weight [1, 2], eps = .5, offset = {offset}", rtol=1e-9)


PAST = 2    # slots that are filled before the block


def slow_attention(a, x, cos, sin, mask, past):
    """Attention.forward by its definition, head by head."""
    (Hkv, N, D), cap = a.grouped, a.c.attn_softcap
    qkv = a.project(x).double()                 # it has tests of its own
    q, k, v = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]

    def turn(h):
        c, s = (t if h.dim() == 5 else t.squeeze(-2) for t in (cos, sin))
        return h * c + h.roll(D // 2, -1) * s

    q, k = turn(q), turn(k)
    keys, values = (torch.cat(two, 1) for two in zip(past, (k, v), strict=True))    # (B, S, Hkv, D)
    heads = []
    for g in range(Hkv):
        for n in range(N - 2):
            scores = torch.einsum("btd,bsd->bts", q[:, :, g, n], keys[:, :, g]) * a.scale
            scores = scores if cap is None else torch.tanh(scores / cap) * cap
            chances = (scores + mask[:, 0, 0]).softmax(-1)
            heads.append(torch.einsum("bts,bsd->btd", chances, values[:, :, g]))
    return torch.nn.functional.linear(torch.cat(heads, -1).to(a.wo.dtype), a.wo)


SHAPES = {  # rows, tokens, query heads, key heads, and what is each row's own
    "two rows": (2, 3, 4, 2, ""),
    "rows that differ": (3, 3, 6, 3, "positions, mask"),
    "one token": (3, 1, 4, 1, "mask"),
    "one query for each key": (2, 2, 3, 3, "positions")}


def some_attention(name="two rows", dtype=torch.float64, **fields):
    """A block of tokens after two that are kept; values that no two mistakes share. dtype: of the
    angles, of the mask, and of what is stored."""
    B, T, H, Hkv, own = SHAPES[name]
    c = replace(GEMMA, dim=8, n_heads=H, n_kv_heads=Hkv, head_dim=4, query_scale=0.7,
                attn_softcap=1.5, **fields)
    a = Attention(c).double().requires_grad_(False)
    made = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=made, dtype=torch.float64)

    for w in a.parameters():
        w.copy_(normal(*w.shape))
    x, *past = normal(B, T, 8), normal(B, PAST, Hkv, 4), normal(B, PAST, Hkv, 4)
    at = torch.arange(PAST, PAST + T)
    if "positions" in own:
        at = at + 5 * torch.arange(B)[:, None]
    cos, sin = (t[..., None, None, :].to(dtype) for t in rope(at, frequencies(4, 50.0)))
    mask = torch.full((B, 1, 1, T, PAST + T), -math.inf, dtype=dtype).triu(PAST + 1)
    if "mask" in own:       # each row has one slot of the past that is dead
        mask[torch.arange(B), ..., torch.arange(B) % PAST] = -math.inf
        mask[-1] = 0

    def store(k, v):
        shape = B, Hkv, T, 4
        given = f"{B} rows, {Hkv} key-value heads, {T} tokens, head dimension 4, cos in {dtype}"
        if k.shape != shape or v.shape != shape:
            fail(given, f"store(k, v), both {shape}", f"{tuple(k.shape)} and {tuple(v.shape)}",
                 "store wants (B, Hkv, T, D)")
        if not k.dtype == v.dtype == dtype:
            fail(given, f"store(k, v), both in {dtype}", f"{k.dtype} and {v.dtype}",
                 "attention works in the type of cos")
        return tuple(torch.cat([old.to(dtype).transpose(1, 2), new], 2)
                     for old, new in zip(past, (k, v), strict=True))

    return a, x, cos, sin, mask, past, store


@pytest.mark.parametrize("name", SHAPES)
def test_an_attention_after_a_filled_cache(name):
    a, x, cos, sin, mask, past, store = some_attention(name)
    B, T, H, Hkv, own = SHAPES[name]
    given = (f"{B} rows of {T} tokens after two kept ones, {H} heads in {Hkv} groups, scale .7, "
             f"soft-cap 1.5{f'; each row has its own {own}' * bool(own)}")
    compare(a(x, cos, sin, mask, store), slow_attention(a, x, cos, sin, mask, past),
            Mistakes("Attention.forward", lambda f: f(a, x, cos, sin, mask, store)), given, 1e-8)
    a.c = replace(a.c, attn_softcap=None)
    for given_mask, seen, also in (
            (mask, mask, "without a soft-cap (Llama)"),
            (mask[:1], mask[:1], "with one mask for all rows"),
            (None, 0 * mask.clamp(min=0), "without a mask, as for one token")):
        compare(a(x, cos, sin, given_mask, store), slow_attention(a, x, cos, sin, seen, past), {},
                f"{given}; the same {also}", rtol=1e-8)


def test_an_attention_keeps_types():
    """States and weights in bfloat16, angles in float32: what a model has on a CPU."""
    a, x, cos, sin, mask, past, store = some_attention(dtype=torch.float32)
    got = a.bfloat16()(x.bfloat16(), cos, sin, mask, store)
    want = slow_attention(a, x.bfloat16(), cos.double(), sin.double(), mask.double(), past)
    share = float((got == want).double().mean())
    promise(share > 0.9, "x and weights in bfloat16, cos and sin in float32",
            "rounded once before wo", f"{share:.0%} of the numbers are this",
            "attention works in the type of cos")


def test_an_attention_of_qwen():
    """`project` adds a bias and norms queries and keys."""
    a, x, cos, sin, mask, past, store = some_attention(qkv_bias=True, qk_norm=True)
    compare(a(x, cos, sin, mask, store), slow_attention(a, x, cos, sin, mask, past), {},
            "Qwen: a bias, and norms of queries and keys, which self.project(x) adds", rtol=1e-8)
