"""The process against its dense formulas, expected improvement against an integral, the climb by flips."""
import itertools
import math

import pytest
import torch
from teach import compare, fail
from tiny import wide

from gaussian import GaussianProcess, climb, distances, expected_improvement, kernel

WIDTH = 2.0  # of the priors on the logs


def vectors(count, n, seed=0):
    return torch.randint(2, (count, n), generator=torch.Generator().manual_seed(seed)).double()


def every(n):
    return wide(list(itertools.product((0, 1), repeat=n)))


def normal(count, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(a, b, groups, theta):
    """The kernel, bit by bit."""
    def k(x, y):
        weight = sum(math.exp(theta[g]) for p, q, g in zip(x, y, groups, strict=True) if p != q)
        return math.exp(theta[-2]) * math.exp(-weight)
    return wide([[k(x, y) for y in b.tolist()] for x in a.tolist()])


THETA = [-1.0, 0.3, 0.4, math.log(0.05)]
GROUPS = torch.tensor([0, 1, 0, 1, 1, 0, 1])


@pytest.fixture
def some():
    """Twelve observed sets of seven bits, some of them twice, and a process over them that was not fitted."""
    z, y = vectors(12, 7), 3 + 2 * normal(12)
    return z, y, GaussianProcess(z, y, GROUPS, THETA, fit=False)


# --- kernel


def test_distances_by_brute_force():
    a, b = vectors(5, 7, 1), vectors(4, 7, 2)
    want = [[[sum(float(x[j] != y[j]) for j in range(7) if GROUPS[j] == g) for y in b] for x in a]
            for g in (0, 1)]
    assert distances(a, b, GROUPS).tolist() == want


def test_the_kernel_by_hand():
    d = wide([[[0, 2]], [[1, 3]]])                                              # two groups, one set by two
    got = kernel(d, wide([math.log(0.5), math.log(0.25), math.log(4.0), 123.0]))
    assert got.tolist() == [pytest.approx([4 * math.exp(-0.25), 4 * math.exp(-1 - 0.75)], rel=1e-12)]


def test_the_eigenvalues_of_the_kernel():
    """Of all sets of six bits they are those of a Kronecker product."""
    groups = torch.tensor([0, 1] * 3)
    K = kernel(distances(every(6), every(6), groups), wide(THETA))
    rho = [math.exp(-math.exp(THETA[g])) for g in groups]
    want = sorted(math.exp(THETA[2]) * math.prod(1 + s * r for s, r in zip(signs, rho, strict=True))
                  for signs in itertools.product((1, -1), repeat=6))
    assert torch.linalg.eigvalsh(K).tolist() == pytest.approx(want, rel=1e-9)
    assert want[0] == pytest.approx(math.exp(THETA[2]) * math.prod(1 - r for r in rho), rel=1e-12)


# --- the process


def test_values_of_any_type_are_float64_inside(some):
    z, y, _ = some
    few = (1 + 1e-6 * y).float()
    one, other = (GaussianProcess(z, values, GROUPS, THETA, fit=False) for values in (few, few.double()))
    assert one.y.dtype == torch.float64 and torch.equal(one.y, other.y) and one.std == other.std


def test_predictions_by_the_dense_formula(some):
    z, y, process = some
    new, average, spread = vectors(3, 7, 3), float(y.mean()), float(y.std(correction=0))
    noise, signal = 0.05 + 1e-10 * math.exp(THETA[2]), math.exp(THETA[2])
    inverse = torch.linalg.inv(by_hand(z, z, GROUPS, THETA) + noise * torch.eye(12).double())
    k, v = by_hand(z, new, GROUPS, THETA), (y - average) / spread
    mean, variance = k.T @ inverse @ v, signal - (k * (inverse @ k)).sum(0)
    assert float(variance.min()) > 0.01
    right = torch.stack([average + spread * mean, spread * variance.sqrt()])
    mistakes = {
        "inside, y has mean 0: add self.mean": [spread * mean, spread * variance.sqrt()],
        "inside, y has deviation 1: multiply both by self.std": [average + mean, variance.sqrt()],
        "the standard deviation is inside, too, relative to self.std":
            [average + spread * mean, variance.sqrt()],
        "this is the variance; take its root": [average + spread * mean, spread * variance],
        "the noise does not belong to the value: leave it out of the variance":
            [average + spread * mean, spread * (variance + noise).sqrt()],
        "without data the variance is that of the signal, exp(theta[-2]), not 1":
            [average + spread * mean, spread * (variance - signal + 1).clamp(min=0).sqrt()],
        "values near each other are counted twice: k.T @ covariance^-1 @ y, not k.T @ y":
            [average + spread * (k.T @ v), spread * variance.sqrt()],
        "the variance is that before any data; what the data tell must be subtracted":
            [average + spread * mean, spread * torch.full((3,), signal).double().sqrt()]}
    got = process.predict(new)
    compare(torch.stack([*got]), right, {why: torch.stack(wrong) for why, wrong in mistakes.items()},
            "twelve observed sets and three new ones: [means, standard deviations]", rtol=1e-8)


def dense_loss(z, y, theta):
    """Minus the log marginal likelihood and the log priors, up to the constants of the latter."""
    noise = math.exp(theta[3]) + 1e-10 * math.exp(theta[2])
    K = by_hand(z, z, GROUPS, theta) + noise * torch.eye(len(y)).double()
    y = (y - y.mean()) / y.std(correction=0)
    likelihood = float(-0.5 * y @ torch.linalg.inv(K) @ y - 0.5 * torch.linalg.slogdet(K).logabsdet)
    means = [math.log(1 / 7), math.log(1 / 7), 0.0, math.log(1e-3)]
    priors = sum(-0.5 * ((t - m) / WIDTH) ** 2 for t, m in zip(theta, means, strict=True))
    return -likelihood + 0.5 * len(y) * math.log(2 * math.pi) - priors


def test_the_loss_is_the_dense_formula(some):
    z, y, process = some
    for theta in (THETA, [0.0, -2.0, -0.5, -3.0], [-3.0, 1.0, 1.0, 0.5]):
        assert float(process.loss(wide(theta))) == pytest.approx(dense_loss(z, y, theta), rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_fitting_lowers_the_loss_to_where_it_is_flat(seed):
    z, y = vectors(30, 7, seed), normal(30, seed)
    process = GaussianProcess(z, y, GROUPS)
    start = GaussianProcess(z, y, GROUPS, fit=False).theta
    assert start.tolist() == pytest.approx([math.log(1 / 7)] * 2 + [0.0, math.log(1e-3)])
    assert float(process.loss(process.theta)) < float(process.loss(start)) - 0.5
    for step in 1e-5 * torch.eye(4).double():
        slope = (process.loss(process.theta + step) - process.loss(process.theta - step)) / 2e-5
        assert abs(float(slope)) < 0.02
    again = GaussianProcess(z, y, GROUPS, process.theta.tolist())
    assert float(again.loss(again.theta)) <= float(process.loss(process.theta)) + 1e-9


@pytest.mark.parametrize("heavy", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_fitting_finds_which_group_of_bits_matters(seed, heavy):
    groups = torch.arange(10) % 2
    z = vectors(40, 10, seed)
    y = z @ torch.where(groups == heavy, 1.0, 0.05).double() * (1 + 0.2 * normal(10, seed).sum())
    theta = GaussianProcess(z, y, groups).theta
    assert float(theta[heavy]) > float(theta[1 - heavy]) + 1


def test_fitting_tells_noise_from_signal():
    groups, z = torch.arange(8) % 2, vectors(60, 8)
    clear, noisy = (GaussianProcess(z, y, groups).theta for y in (z.sum(1), z.sum(1) + 3 * normal(60)))
    assert float(noisy[-1]) > float(clear[-1]) + 2


def test_a_fit_that_goes_astray_leaves_the_parameters(monkeypatch, some):
    z, y, _ = some

    def astray(self, closure):
        closure()
        self.param_groups[0]["params"][0].data.fill_(math.nan)
    monkeypatch.setattr(torch.optim.LBFGS, "step", astray)
    assert GaussianProcess(z, y, GROUPS, THETA).theta.tolist() == THETA


def test_where_there_is_hardly_noise_it_says_what_was_observed():
    z, y = every(5)[::2], 10 + normal(16)
    mean, std = GaussianProcess(z, y, torch.arange(5) % 2, [-1.0, -1.0, 0.0, -40.0], fit=False).predict(z)
    assert mean.tolist() == pytest.approx(y.tolist(), abs=1e-6)
    assert float(std.max()) < 1e-4
    far = GaussianProcess(z, y, torch.arange(5) % 2, [3.0, 3.0, 0.0, -40.0], fit=False)
    mean, std = far.predict(every(5)[1::2])
    assert mean.tolist() == pytest.approx([float(y.mean())] * 16, abs=1e-3), "far from all it knows the mean"
    assert std.tolist() == pytest.approx([float(y.std(correction=0))] * 16, rel=1e-3)


def test_other_units_of_the_values_change_nothing_else():
    z, y, new = vectors(15, 7), normal(15), vectors(6, 7, 1)
    (mean, std), (mean_b, std_b) = (GaussianProcess(z, v, GROUPS).predict(new) for v in (y, 1000 - 50 * y))
    assert mean_b.tolist() == pytest.approx((1000 - 50 * mean).tolist(), rel=1e-9)
    assert std_b.tolist() == pytest.approx((50 * std).tolist(), rel=1e-6)


@pytest.mark.parametrize("y", [[0.1] * 6, [0] * 6, [1, 1, 2, 2, 2, 1], [0, 0, 0, 0, 0, 1e9]], ids=str)
@pytest.mark.parametrize("same", [1, 2, 6])
def test_equal_values_and_sets_that_come_twice_break_nothing(same, y):
    z = vectors(6, 7)
    z[:same] = z[0]
    process = GaussianProcess(z, wide(y), GROUPS)
    mean, std = process.predict(every(7))
    assert mean.isfinite().all() and std.isfinite().all() and process.theta.isfinite().all()
    spread = max(y) - min(y)
    assert min(y) - spread - 1e-9 < float(mean.min()) <= float(mean.max()) < max(y) + spread + 1e-9
    assert len(set(y)) > 1 or float(std.max()) < 1e-10, "equal values: it is sure of them"


def test_a_single_observation_is_enough():
    mean, std = GaussianProcess(vectors(1, 3), wide([2.5]), torch.tensor([1, 1, 1])).predict(every(3))
    assert mean.tolist() == [2.5] * 8 and std.isfinite().all()


# --- expected improvement


def improvement(mean, std, best):
    return expected_improvement(wide(mean), wide(std), best)


@pytest.mark.parametrize("mean, std, best", [(0, 1, 0), (1, 2, 3), (-1, 0.5, -2), (5, 0.1, 4), (1, 0.01, 1)])
def test_expected_improvement_is_the_integral(mean, std, best):
    at = torch.linspace(mean - 12 * std, mean + 12 * std, 200_001, dtype=torch.float64)
    density = torch.exp(-0.5 * ((at - mean) / std) ** 2) / (std * math.sqrt(2 * math.pi))
    want = float(torch.trapezoid((at - best).clamp(min=0) * density, at))
    assert float(improvement([mean], [std], best)[0]) == pytest.approx(want, rel=1e-6)


def test_without_doubt_the_improvement_is_the_gap():
    assert improvement([3, 1, 2], [0, 0, 0], 2.0).tolist() == pytest.approx([1, 0, 0], abs=1e-11)


def test_expected_improvement_is_exact_far_below_the_best_and_never_negative():
    below = [-4.0 - i / 2 for i in range(16)]  # torch's ndtr of a few is exact, that of many is not
    for u, got in zip(below, improvement(below, [1.0] * 16, 0.0).tolist(), strict=True):
        tail = 0.5 * math.erfc(-u / math.sqrt(2))
        want = u * tail + math.exp(-0.5 * u * u) / math.sqrt(2 * math.pi)
        assert got == pytest.approx(want, rel=1e-8, abs=0)
    mean = torch.linspace(-60, 60, 100_001, dtype=torch.float64)
    assert float(expected_improvement(mean, torch.ones_like(mean), 0.0).min()) >= 0


# --- the climb


WEIGHTS = wide([3, -1, 0.5, -2, 0.25, 4])


def freely(z):
    return torch.ones(len(z), dtype=torch.bool)


def test_a_climb_finds_the_optimum_of_a_sum_from_anywhere():
    ends, values = climb(lambda z: z @ WEIGHTS, every(6), freely)
    assert ends.tolist() == [(WEIGHTS > 0).double().tolist()] * 64
    assert values.tolist() == [7.75] * 64


def test_a_climb_ends_where_no_allowed_flip_is_better():
    table = normal(64)
    score = lambda z: table[(z @ 2 ** torch.arange(6).double()).long()]         # noqa: E731
    allowed = lambda z: (z.sum(-1) >= 2) & (z.sum(-1) <= 4)                     # noqa: E731
    starts = every(6)[allowed(every(6))]
    ends, values = climb(score, starts, allowed)
    assert allowed(ends).all() and torch.equal(values, score(ends))
    for start, end, value in zip(starts, ends, values, strict=True):
        near = (end - torch.eye(6).double()).abs()
        assert not (allowed(near) & (score(near) > value)).any()
        assert float(score(start[None])) <= float(value)
    assert len({tuple(e) for e in ends.tolist()}) > 1, "this landscape has several tops"
    free = climb(score, starts, freely)[0]
    assert not allowed(free).all(), "and better sets that are not allowed"


def test_a_climb_takes_the_best_flip_not_the_first_that_is_better():
    """From 00 the first flip gains 1 and ends there, the second gains 2."""
    values = {(0, 0): 0.0, (1, 0): 1.0, (0, 1): 2.0, (1, 1): -1.0}
    score = lambda z: wide([values[tuple(r)] for r in z.int().tolist()])        # noqa: E731
    ends, tops = climb(score, torch.zeros(1, 2), freely)
    assert ends.tolist() == [[0, 1]] and tops.tolist() == [2.0]


def test_a_climb_leaves_a_start_that_is_worth_nothing_and_rests_on_a_plain():
    starts = wide([[0, 0, 0, 0], [0, 1, 1, 0]])
    score = lambda z: torch.where(z.sum(-1) == 0, -math.inf, 1.0).double()      # noqa: E731
    ends, values = climb(score, starts, freely)
    assert float(ends[0].sum()) == 1 and torch.equal(ends[1], starts[1]) and values.tolist() == [1.0, 1.0]
    ends, values = climb(lambda z: torch.full((len(z),), -math.inf).double(), starts, freely)
    assert torch.equal(ends, starts) and values.tolist() == [-math.inf] * 2


# --- what students write: messages that name the mistake


def test_improvements_by_hand():
    mean, std, best = wide([0.0, 1.0, -1.0]), wide([1.0, 2.0, 0.5]), 0.5
    u = (mean - best) / std
    above, density = 0.5 * torch.erfc(-u / math.sqrt(2)), torch.exp(-0.5 * u * u) / math.sqrt(2 * math.pi)
    compare(expected_improvement(mean, std, best), (mean - best) * above + std * density, {
        "this is how likely it improves; the question is by how much on average": above,
        "the second term, std * density, is missing": ((mean - best) * above).clamp(min=0),
        "std * density, the second term, is missing, and so it can be negative": (mean - best) * above,
        "the first term, gap * probability, is missing": std * density,
        "the density must be multiplied by std": (mean - best) * above + density,
        "the gap is upside down: mean - best": (best - mean) * (1 - above) + std * density,
        "doubt counts for nothing: this is max(0, mean - best)": (mean - best).clamp(min=0)},
        "means 0 1 -1, deviations 1 2 .5, the best so far .5", rtol=1e-9)


def climbed(weights, start, allowed=freely, most=1000):
    """The end of a climb on a sum of weights, whose scores may be asked for so often and no more."""
    asked = []

    def score(z):
        asked.append(len(z))
        if len(asked) > most:
            fail(f"the weights {weights} and the start {start}", "an end after a few steps",
                 f"a walk that has not ended after {most}", "flip a bit only where the score *rises*, or "
                     "it walks to and fro for ever where two sets are worth the same")
        return z @ wide(weights)

    ends, values = climb(score, wide([start]), allowed)
    if ends.shape != (1, len(start)) or values.shape != (1,):
        fail("one start", f"ends (1, {len(start)}) and values (1,)", f"{tuple(ends.shape)}, "
            f"{tuple(values.shape)}")
    compare(values, ends @ wide(weights), {
        "the scores are those of the starts; return those of the ends":
            [float(wide([start]) @ wide(weights))]},
        f"the score of the end {ends.tolist()} under the weights {weights}")
    return ends


def test_a_climb_by_hand():
    compare(climbed([1.0, 3.0, 2.0], [0, 0, 0]), [[1, 1, 1]], {
        "it ends after one flip; go on as long as one raises the score": [[0, 1, 0]],
        "it goes down": [[0, 0, 0]]}, "the weights 1 3 2, from 000")
    compare(climbed([1.0, -3.0, 2.0], [0, 1, 0]), [[1, 0, 1]], {
        "bits are only set; a flip also takes one away": [[1, 1, 1]]}, "the weights 1 -3 2, from 010")
    compare(climbed([1.0, 3.0, 2.0], [0, 0, 0], lambda z: z.sum(-1) <= 2), [[0, 1, 1]], {
        "`allowed` is ignored": [[1, 1, 1]],
        "it takes the first flip that is better; take the best": [[1, 1, 0]]},
        "the weights 1 3 2, from 000, where at most two bits may be set")
    compare(climbed([0.0, 0.0], [0, 1]), [[0, 1]], {"it moves where nothing is gained": [[1, 1]]}, "the "
        "weights 0 0")


def test_climbs_do_not_wait_for_each_other():
    ends, _ = climb(lambda z: z @ wide([1.0, 1.0, 1.0]), wide([[1, 1, 1], [0, 0, 0], [1, 0, 1]]), freely)
    compare(ends, [[1, 1, 1]] * 3, {
        "all stop as soon as one of them stands at its top": [[1, 1, 1], [0, 0, 0], [1, 0, 1]]},
        "three starts, of which the first is at the top already")
