"""Functions of the library, each alone, by examples that are small enough to follow on paper. With
each stand the answers that well-known mistakes give."""
import math
import random
from dataclasses import replace

import pytest
import torch
from teach import compare, fail, known, no_other_chance, promise, short
from test_sampling import ALMOST_ONE, from_p
from tiny import GEMMA, LLAMA, Fixed, wide

from control import best_along, best_gamma, expected_tokens, expected_tokens_along
from kvcache import KVCache
from model import Attention, Placement, RMSNorm, frequencies, rope
from sampling import Race, signed, to_probs, uniform

# --- from logits to probabilities


def roots(p, power):
    powers = [x**power for x in p]
    return [x / sum(powers) for x in powers]


PROBS = {   # settings, the softmax of the logits, what comes out, {mistake: what it gives instead}
    "greedy": (dict(temperature=0.0), [0.125, 0.375, 0.375, 0.125], [0, 1, 0, 0], {
        "a tie at temperature 0 goes to the lower id, it is not shared": [0, 0.5, 0.5, 0],
        "a tie goes to the lower id, not to the higher one": [0, 0, 1, 0],
        "temperature 0 is the exact one-hot of the largest logit": [0.125, 0.375, 0.375, 0.125]}),
    "temperature": (
        dict(temperature=0.5), [0.5, 0.25, 0.125, 0.125], roots([0.5, 0.25, 0.125, 0.125], 2), {
            "the logits are divided by the temperature, not multiplied":
                roots([0.5, 0.25, 0.125, 0.125], 0.5)}),
    "top-k": (dict(temperature=1.0, top_k=2), [0.1, 0.2, 0.35, 0.35], [0, 0, 0.5, 0.5], {
        "what stays must be scaled to sum to 1": [0, 0, 0.35, 0.35],
        "the least likely tokens stay": [1 / 3, 2 / 3, 0, 0]}),
    "top-k, ties": (dict(temperature=1.0, top_k=2), [0.1, 0.3, 0.3, 0.3], [0, 0.5, 0.5, 0], {
        "exactly k stay: of those tied at the border the lower ids": [0, 1 / 3, 1 / 3, 1 / 3],
        "of tied tokens the lower ids stay, not the higher ones": [0, 0, 0.5, 0.5]}),
    "top-p": (dict(temperature=1.0, top_p=0.6), [0.125, 0.5, 0.125, 0.25], [0, 2 / 3, 0, 1 / 3], {
        "the token with which the mass reaches top_p must stay": [0, 1, 0, 0],
        "what stays must be scaled to sum to 1": [0, 0.5, 0, 0.25],
        "the running sum goes from the most likely token down, not over ids": [0.2, 0.8, 0, 0]}),
    "top-p, reached": (dict(temperature=1.0, top_p=0.5), [0.25, 0.5, 0.125, 0.125], [0, 1, 0, 0], {
        "one too many: the set stops as soon as its mass *reaches* top_p": [1 / 3, 2 / 3, 0, 0]}),
    "min-p": (dict(temperature=1.0, min_p=0.4), [0.125, 0.5, 0.125, 0.25], [0, 2 / 3, 0, 1 / 3], {
        "the bound is min_p times the largest probability, not min_p itself": [0, 1, 0, 0],
        "what stays must be scaled to sum to 1": [0, 0.5, 0, 0.25]}),
    "min-p, reached": (dict(temperature=1.0, min_p=1.0), [0.2, 0.4, 0.4], [0, 0.5, 0.5], {
        "a token with exactly min_p times the largest stays: drop only those below": [math.nan] * 3,
        "of tied tokens all stay: drop only those below the bound": [0, 1, 0]}),
    "top-k, then top-p": (
        dict(temperature=1.0, top_k=2, top_p=0.5), [0.4, 0.3, 0.2, 0.1], [1, 0, 0, 0], {
            "top_k comes before top_p, and what it leaves is scaled first": [4 / 7, 3 / 7, 0, 0]}),
    "top-p, then min-p": (
        dict(temperature=1.0, top_p=0.75, min_p=0.5), [0.4, 0.25, 0.2, 0.15],
        [0.4 / 0.85, 0.25 / 0.85, 0.2 / 0.85, 0], {
            "min_p comes after top_p, and loses what it leaves": [0.4 / 0.65, 0.25 / 0.65, 0, 0]}),
    "all four": (
        dict(temperature=0.5, top_k=3, top_p=0.75, min_p=0.7), roots([0.4, 0.3, 0.2, 0.1], 0.5),
        [4 / 7, 3 / 7, 0, 0], {})}


def check_probabilities(logits, settings, want, mistakes, given):
    got = to_probs(logits, **settings)
    if got.shape == logits.shape and bool(got.isnan().any()):
        fail(given, "probabilities", "NaN", known(got, mistakes) or
             "NaN: was a softmax taken of nothing but -inf, or 0 / 0?")
    compare(got, want, mistakes, given, rtol=1e-9)


@pytest.mark.parametrize("name", PROBS)
def test_probabilities(name):
    settings, p, want, mistakes = PROBS[name]
    falling = sorted(want, reverse=True)
    if falling != want:
        mistakes = mistakes | {"these are in falling order; put each back at its id": falling}
    check_probabilities(from_p(*p), settings, want, mistakes,
                        f"the logits log {short(p)}, whose softmax is just that, and {settings}")


def slow_probs(logits, temperature, top_k=None, top_p=None, min_p=None, mistake=None):
    """By its definition, token by token; with a mistake that a student might make."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: top_k if temperature else 1]
    p, raw = ([math.exp((logits[i] - max(logits)) / (t or 1)) for i in order]
              for t in (temperature, 1))
    p, total, kept = [x / sum(p) for x in p], 0.0, {}
    for i, x, old in zip(order, p, raw, strict=True):
        likely = (old if mistake == "raw" else x / p[0]) >= (min_p or 0)
        if likely and (top_p is None or total < top_p - 1e-12):
            kept[i] = x
        total += x
    return [kept.get(i, 0.0) / sum(kept.values()) for i in range(len(logits))]


def test_probabilities_of_drawn_settings():
    """Temperatures from 0.02 to 500, with all cuts, ties, and tokens that are ruled out."""
    draw = random.Random(0)
    for _ in range(300):
        logits = [draw.choice([draw.gauss(0, 3), draw.gauss(0, 3), 1.0, -math.inf])
                  for _ in range(draw.randint(0, 9))] + [draw.gauss(0, 3)]
        settings = [draw.choice([0.0, *[math.exp(draw.uniform(-4, 6)) for _ in range(9)]]),
                    draw.choice([None, draw.randint(1, 12)]),
                    draw.choice([None, draw.uniform(0.01, 1)]),
                    draw.choice([None, draw.uniform(0.01, 1)])]
        compare(to_probs(wide(logits), *settings), slow_probs(logits, *settings), {
            "min_p compares the probabilities before the temperature; it comes last":
                slow_probs(logits, *settings, mistake="raw")},
            f"logits {short(logits)}, temperature, top_k, top_p, min_p = {short(settings)}", 1e-9)


# --- choices


CHOICES = [
    ([0.1, 0.0, 0.2, 0.1], [0.2, 0.251, 0.9, 0.05, 0.249, ALMOST_ONE], [0, 2, 3, 0, 0, 3], {
        "the weights need not sum to 1: u must be scaled by their sum": [2, 2, 3, 0, 2, 3],
        "this is the most likely id, whatever u is": [2] * 6,
        "1 - u was looked up: as random, but ports repeat the stream of u": [3, 2, 0, 3, 3, 0],
        "the running sum goes over rising ids, not over falling weights": [2, 2, 3, 2, 2, 3]}),
    ([0.0, 0.5, 0.5], [0.0, 0.4, ALMOST_ONE], [1, 1, 2], {
        "u = 0 chose a token of probability zero: take the first id whose running sum *exceeds* u "
        "times the sum": [0, 1, 2]})]


@pytest.mark.parametrize("weights, us, want, mistakes", CHOICES, ids=[str(c[0]) for c in CHOICES])
def test_choices(weights, us, want, mistakes):
    got, given = [], f"the weights {weights} and the uniforms u = {us}, one each"
    for u in us:
        coins = Fixed(u, *[0.5] * 9)
        with no_other_chance(given):
            got.append(coins.choose(wide([weights])))
        if len(coins.uniforms) < 9:
            fail(given, "one uniform for each row of weights", f"{10 - len(coins.uniforms)}",
                 "Gumbel-max takes one per token; turn a single one into an id by the running sum "
                 "of the weights")
        if not isinstance(got[-1], torch.Tensor) or got[-1].shape != (1,):
            fail(given, "for weights (1, V) an index of shape (1,)", f"{got[-1]!r:.100}")
    compare(torch.cat(got), want, mistakes, given)


# --- the cache: slots of one number each, so that they can be read


def to(*slots, end=None, positions=None):
    """A Placement at these slots of each row, by default those of its positions."""
    slots = torch.tensor(slots)
    positions = slots if positions is None else torch.tensor(positions)
    return Placement(positions, slots, int(positions.min()),
                     int(slots.max()) + 1 if end is None else end)


# writes (layer, keys, where, maybe start), the keys that the last one returns, and mistakes
WRITES = {
    "the old and the new": (
        [(0, [[1, 2, 3]], Placement.span(0, 3)), (0, [[4, 5]], Placement.span(3, 5))],
        [[1, 2, 3, 4, 5]], {
            "only the new block comes back; it must read the slots before it, too": [[4, 5]],
            "the old slots come back alone: write first, then read": [[1, 2, 3, 0, 0]],
            "all slots come back; only those before `at.end` may be read": [[1, 2, 3, 4, 5, 0]],
            "nothing is kept from the first write": [[0, 0, 0, 4, 5]]}),
    "over what was refused": (
        [(0, [[1, 2, 3, 4]], Placement.span(0, 4)), (0, [[7]], Placement.span(2, 3)),
         (0, [[8]], to([3], end=6))],
        [[1, 2, 7, 8, 0, 0]], {
            "the block stands after what was written last, not in its slots": [[1, 2, 3, 4, 7, 8]],
            "`at.end` is ignored: it says where to stop reading": [[1, 2, 7, 8]]}),
    "rows": (
        [(0, [[1, 2, 3], [4, 5, 6]], Placement.span(0, 3)),
         (0, [[7, 8], [9, 10]], to([1, 3], [0, 2], end=5))], [[1, 7, 3, 8, 0], [9, 5, 10, 0, 0]], {
            "all rows went to row 0's slots: slots is (B, T), each row has its own":
                [[1, 7, 3, 8, 0], [4, 9, 6, 10, 0]],
            "the slots are not contiguous: each token goes to its own":
                [[1, 7, 8, 0, 0], [9, 10, 6, 0, 0]],
            "`at.end` is ignored: it says where to stop reading": [[1, 7, 3, 8], [9, 5, 10, 0]]}),
    "more to read than was written": (
        [(0, [[1, 2, 3, 4], [5, 6, 7, 8]], Placement.span(1, 5)),
         (0, [[9], [10]], Placement.span(1, 2)._replace(end=4))], [[0, 9, 2, 3], [0, 10, 6, 7]], {
            "it was written up to `at.end`; T tokens go to T slots": [[0, 9, 9, 9], [0, *[10] * 3]],
            "`at.end` is ignored: it says where to stop reading": [[0, 9], [0, 10]]}),
    "siblings": (
        [(0, [[1, 2]], Placement.span(0, 2)),
         (0, [[3, 4, 5]], to([2, 3, 4], positions=[[2, 3, 3]]))], [[1, 2, 3, 4, 5]], {
            "tokens went to their positions, which siblings share; take `at.slots`":
                [[1, 2, 3, 5, 0]],
            "tokens went to their positions; take `at.slots`": [[1, 2, 3, 4, 0]]}),
    "layers": (
        [(0, [[1, 2]], Placement.span(0, 2)), (1, [[3]], Placement.span(2, 3))], [[0, 0, 3]], {
            "`layer` is ignored: all layers share the slots of one": [[1, 2, 3]]}),
    "start": (
        [(0, [[1, 2, 3, 4]], Placement.span(0, 4)), (0, [[5]], Placement.span(4, 5), 3)],
        [[4, 5]], {
            "`start` is ignored": [[1, 2, 3, 4, 5]],
            "it counts from the slot `start` on, this one included": [[5]]}),
    "one row of slots for all": (
        [(0, [[1, 2], [3, 4]], to([2, 0], end=3))], [[2, 0, 1], [4, 0, 3]], {
            "only the first row was written; one row of slots serves all": [[2, 0, 1], [0, 0, 0]]})}


@pytest.mark.parametrize("name", WRITES)
def test_a_write(name):
    """Values are ten times the keys. There are 2 layers of 6 slots."""
    writes, want, mistakes = WRITES[name]
    c = replace(LLAMA, n_layers=2, n_kv_heads=1, head_dim=1)
    cache = KVCache(c, len(want), 6, torch.float64)
    for layer, keys, at, *start in writes:
        k = wide(keys)[:, None, :, None]                                        # (B, 1, T, 1)
        found = cache.write(layer, k, 10 * k, at, *start)
    given = "; then ".join(
        f"keys {keys} to slots {short(at.slots)} of layer {layer}, end = {at.end}"
        + "".join(f", start = {n}" for n in start) for layer, keys, at, *start in writes)
    if not (isinstance(found, tuple) and len(found) == 2
            and found[0].dim() == found[1].dim() == 4):
        fail(given, "a pair (keys, values), both (B, Hkv, S, D)", f"{found!r:.100}")
    promise(found[0].dtype == found[1].dtype == torch.float64, "a cache in float64", "float64",
            str(found[0].dtype), "what is read has the type of the cache")
    keys, values = (t[:, 0, :, 0] for t in found)
    compare(keys, want, mistakes, given)
    compare(values, 10 * keys, {"keys are stored where values belong": keys}, "the same, values")


# --- a race for each place


RACES = {
    "place": "every place has the same noise: number each by its position times V, plus the token",
    "before": "the noise is that of the token before: a token stands at position + offset + 1",
    "offset": "`offset` is left out: the place is position + offset + 1",
    "rows": "each row of a batch has its own seed: self.seeds (B,)",
    "draws": "noise by the number of draws: only the seed, the position and the token may count",
    "uniform": "u / p is no race of the right law: an arrival is exponential, -log(1 - u) / p",
    "times": "a likelier token arrives earlier: divide by p, do not multiply",
    "last": "the first to arrive is written, not the last",
    "greedy": "the likeliest token wins every time: where is the noise?"}


def slow_race(p, position, offset, seeds, mistake=None):
    """`Race.settle` by its definition, number by number; with a mistake that a student might
    make."""
    B, T, V = p.shape
    wins = torch.zeros_like(p)
    for b, t in [(b, t) for b in range(B) for t in range(T)]:
        place = int(position[b % len(position), t]) + (0 if mistake == "offset" else offset)
        place += mistake != "before"
        times = []
        for v in range(V):
            number = {"place": v, "draws": (b * T + t) * V + v}.get(mistake, place * V + v)
            seed = seeds[0 if mistake in ("rows", "draws") else b]
            u = float(uniform(signed(seed), torch.tensor(number)))
            arrives = u if mistake == "uniform" else -math.log1p(-u)
            arrives = (arrives * float(p[b, t, v]) if mistake == "times"
                       else arrives / float(p[b, t, v]))
            times.append(-arrives if mistake == "last" else arrives)
        winner = int(p[b, t].argmax()) if mistake == "greedy" else times.index(min(times))
        wins[b, t, winner] = 1
    return wins


@pytest.mark.parametrize("offset", [0, 3])
def test_winners_of_a_race(offset):
    p = wide([0.4, 0.3, 0.2, 0.1]).repeat(2, 80, 1)
    position, seeds = torch.arange(160).view(2, 80) + 5, [3, -8]
    got = Race(seeds).settle(p.clone(), position, offset)
    compare(got, slow_race(p, position, offset, seeds), {
        why: slow_race(p, position, offset, seeds, name) for name, why in RACES.items()},
        "two rows of seeds 3 and -8, p = .4 .3 .2 .1 everywhere, positions 5 to 84 and 85 to 164, "
        f"offset {offset}")


def test_what_has_no_chance_never_wins():
    """Of one seed number 16 of the stream is 0: that of token 0 at position 4."""
    seed = signed(-17 * 0x9E3779B97F4A7C15 % 2**64)
    got = Race(seed).settle(wide([[[0.0, 0.0, 1.0, 0.0]]]), torch.tensor([[3]]))
    compare(got, [[[0, 0, 1, 0]]], {
        "u = 0 beside p = 0 is 0 / 0, which argmin takes for the least: it must never win":
            [[[1, 0, 0, 0]]]},
        "p = 0 0 1 0, and u of token 0 is 0")


# --- what drafting is worth


def test_expected_tokens_of_a_number():
    cases = [(0.8, 5), (0.5, 2), (1.0, 3), (0.0, 4), (0.7, 0), (1, 4), (0, 2), (0.9995, 9),
             (0.9999999, 3)]
    got = [expected_tokens(alpha, gamma) for alpha, gamma in cases]
    compare(wide(got), [sum(alpha**i for i in range(gamma + 1)) for alpha, gamma in cases], {
        "the bonus token is missing: one token comes even if no draft is accepted":
            [sum(alpha**i for i in range(1, gamma + 1)) for alpha, gamma in cases],
        "a draft counts only if all before it are accepted, too: alpha^2, alpha^3, not alpha each":
            [1 + alpha * gamma for alpha, gamma in cases],
        "the sum ends one too early: it has gamma + 1 terms, 1 to alpha^gamma":
            [sum(alpha**i for i in range(gamma)) for alpha, gamma in cases]},
        f"(alpha, gamma) = {cases}", rtol=1e-9)


def test_expected_tokens_along_texts():
    # texts of one length may be a tensor
    compare(wide(float(expected_tokens_along(torch.ones(2, 4), 3))), 4.0, {},
            "two texts of four acceptances of 1, as one tensor (2, 4), gamma = 3")
    series = wide([0.9, 0.2, 0.5])
    one, two = 1 + 0.9 + 0.9 * 0.2, 1 + 0.2 + 0.2 * 0.5
    starts = 0.1    # how likely the second round starts at position 1; only there it fits in
    mean = float(series.mean())
    got = [expected_tokens_along(texts, 2) for texts in ([series], [series, wide([1, 1])])]
    want = [(one + starts * two) / (1 + starts), (one + starts * two + 3) / (2 + starts)]
    compare(wide([float(x) for x in got]), want, {
        "the formula at the mean of the series; rounds must be followed along it":
            [sum(mean**i for i in range(3)), sum(0.72**i for i in range(3))],
        "every position counts alike; a round starts only where the one before it ended":
            [(one + two) / 2, (one + two + 3) / 3],
        "a round too few: one that drafts to the very end of the series fits, too": [one] * 2},
        "acceptances .9 .2 .5 along a text and gamma = 2: the first round starts at 0, the second "
        "at 1 (if the first draft was rejected, probability 0.1) or not at all; then with a second "
        "text, 1 1", rtol=1e-9)


def test_best_gamma_of_a_number():
    cases = [(0.8, 0.2), (0.8, 0.05), (0.3, 0.4), (0.4, 0.4)]
    compare(torch.tensor([best_gamma(alpha, c) for alpha, c in cases]), [4, 8, 0, 0], {
        "the most tokens are not the best speed: divide by what a round costs": [16, 16, 16, 16],
        "a round costs a pass of the target, too: gamma * c + 1": [0, 0, 0, 0],
        "of equal speeds the shortest draft is best": [4, 8, 0, 1],
        "0 is a gamma, too: do not draft where nothing is gained": [4, 8, 1, 1]},
            f"(alpha, c) = {cases}")


def test_best_gamma_within_its_bounds():
    dear = [1.0, 1.0, 2.0, 3.0, 4.0]
    got = [best_gamma(0.8, 0.05, most=3), best_gamma(0.3, 0.4, least=3),
           best_gamma(0.8, 0.05, 4, pass_cost=lambda T: dear[T - 1])]
    compare(torch.tensor(got), [3, 3, 1], {
        "`pass_cost` is ignored: a pass over gamma + 1 tokens may take longer than one over one":
            [3, 3, 4],
        "pass_cost(T) is asked for T = gamma; the pass that verifies reads gamma + 1 tokens":
            [3, 3, 2]},
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
        falls = next((g for g in range(least, most) if speeds[g + 1] < speeds[g]), most)
        compare(torch.tensor([got]), [want], {
            "it stops where the speed first falls; it may rise again further on": [falls]},
            f"alpha = {alpha:.6g}, c = {cost:.6g}, most = {most}, least = {least}, pass_cost(1), "
            f"(2), ... = {short(table)}, so speeds {short(speeds)} for gamma = 0, 1, ...")


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
    c = replace(LLAMA, norm_eps=0.5, norm_offset=offset)
    norm = RMSNorm(c, 2).double().requires_grad_(False)
    x, w = wide([[3.0, 4.0]]), wide([1.0, 2.0])
    norm.weight.copy_(w)
    mean = 12.5                                                                # of the squares
    why = "Gemma-2 multiplies by offset + w, which is 1 + w"
    if offset == 0:
        why = "the weight is 1 + w only where the offset says so (Gemma-2)"
    compare(norm(x), x / math.sqrt(mean + 0.5) * (offset + w), {
        "the norm subtracts no mean: this is LayerNorm":
            (x - 3.5) / math.sqrt(0.25 + 0.5) * (offset + w),
        "eps is added to the mean of the squares, inside the root":
            x / (math.sqrt(mean) + 0.5) * (offset + w),
        "it is the *mean* of the squares, not their sum": x / math.sqrt(25 + 0.5) * (offset + w),
        "the weight is missing": x / math.sqrt(mean + 0.5),
        why: x / math.sqrt(mean + 0.5) * (1 - offset + w)},
        f"x = [3, 4], the weight [1, 2], eps = .5, offset = {offset}", rtol=1e-9)


PAST = 2    # slots that are filled before the block
ATTENTION = {
    "still": "queries and keys are not rotated: without positions attention knows no order",
    "keys": "the keys are not rotated; both are, so that their product knows the distance",
    "values": "values are rotated; only queries and keys are",
    "scale": "the scores are not scaled: multiply by self.scale before the softmax",
    "default": "the scale is not always head_dim ** -.5: take self.scale",
    "late": "the mask is added before the soft-cap, which turns -inf into -cap: nothing is hidden",
    "no cap": "the soft-cap of the scores is missing (Gemma-2)",
    "mask": "the mask is ignored",
    "first mask": "every row gets the mask of row 0; each has its own",
    "flat": "the heads of a token belong side by side: (B, T, H, D), so transpose, then reshape",
    "new": "only the block's own keys are read; `store` returns the slots before it, too",
    "tile": "queries and keys are paired wrongly: G queries that stand side by side share a key"}


def slow_attention(a, x, cos, sin, mask, past, mistake=None):
    """Attention.forward by its definition, head by head; with a mistake that a student might
    make."""
    (B, T, _), (Hkv, N, D), cap = x.shape, a.grouped, a.c.attn_softcap
    qkv = a.project(x).double()                 # it has tests of its own
    q, k, v, G = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :], N - 2

    def turn(h):
        c, s = (t if h.dim() == 5 else t.squeeze(-2) for t in (cos, sin))
        return h * c + h.roll(D // 2, -1) * s

    q = q if mistake == "still" else turn(q)
    k = k if mistake in ("still", "keys") else turn(k)
    v = turn(v) if mistake == "values" else v
    keys, values = (torch.cat(two, 1) for two in zip(past, (k, v), strict=True))    # (B, S, Hkv, D)
    mask = mask[:1] if mistake == "first mask" else mask
    if mistake == "new":
        keys, values, mask = k, v, mask[..., PAST:]
    scale = {"scale": 1.0, "default": D**-0.5}.get(mistake, a.scale)
    heads = []
    for h in range(Hkv * G):
        own = h % Hkv if mistake == "tile" else h // G
        scores = torch.einsum("btd,bsd->bts", q[:, :, h // G, h % G], keys[:, :, own]) * scale
        scores = scores + mask[:, 0, 0] if mistake == "late" else scores
        scores = scores if mistake == "no cap" or cap is None else torch.tanh(scores / cap) * cap
        scores = scores if mistake in ("late", "mask") else scores + mask[:, 0, 0]
        heads.append(torch.einsum("bts,bsd->btd", scores.softmax(-1), values[:, :, own]))
    if mistake == "flat":
        heads = [torch.stack(heads, 1).reshape(B, T, -1)]
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
    a, made = Attention(c).double().requires_grad_(False), torch.Generator().manual_seed(1)

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
            {why: slow_attention(a, x, cos, sin, mask, past, name)
             for name, why in ATTENTION.items()}, given, rtol=1e-8)
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
