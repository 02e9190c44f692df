"""The process by its dense formulas, the improvement as an integral, the climb by flips."""
import itertools
import math

import pytest
import torch
from teach import compare, fail, promise
from tiny import wide

from search import GaussianProcess, climb, distances, expected_improvement, kernel

THETA = [-1.0, 0.3, 0.4, math.log(0.05)]
GROUPS = torch.tensor([0, 1, 0, 1, 1, 0, 1])
EVERY = {n: wide(list(itertools.product((0, 1), repeat=n))) for n in (3, 6, 7)}


def vectors(count, n, seed=0):
    return torch.randint(2, (count, n), generator=torch.Generator().manual_seed(seed)).double()


def normal(count):
    return torch.randn(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def by_hand(a, b, theta):
    """The kernel, bit by bit."""
    weights = wide(theta[:-2]).exp()[GROUPS] * (a[:, None] != b)
    return math.exp(theta[-2]) * torch.exp(-weights.sum(-1))


@pytest.fixture
def some():
    """Twelve observed sets of seven bits, some of them twice, and a process without a fit."""
    z, y = vectors(12, 7), 3 + 2 * normal(12)
    return z, y, GaussianProcess(z, y, GROUPS, THETA, fit=False)


def test_the_kernel_by_hand():
    a, b = vectors(5, 7, 1), vectors(4, 7, 2)
    torch.testing.assert_close(kernel(distances(a, b, GROUPS), wide(THETA)), by_hand(a, b, THETA))


def test_predictions_by_the_dense_formula(some):
    z, y, process = some
    new, average, spread = vectors(3, 7, 3), float(y.mean()), float(y.std(correction=0))
    noise, signal = 0.05 + 1e-10 * math.exp(THETA[2]), math.exp(THETA[2])
    inverse = torch.linalg.inv(by_hand(z, z, THETA) + noise * torch.eye(12).double())
    k, v = by_hand(z, new, THETA), (y - average) / spread
    mean, variance = k.T @ inverse @ v, signal - (k * (inverse @ k)).sum(0)
    right = torch.stack([average + spread * mean, spread * variance.sqrt()])
    mistakes = {
        "inside, y has mean 0: add self.mean": [spread * mean, spread * variance.sqrt()],
        "inside, y has deviation 1: multiply both by self.std": [average + mean, variance.sqrt()],
        "this is the variance; take its root": [average + spread * mean, spread * variance],
        "the noise does not belong to the value: leave it out of the variance":
            [average + spread * mean, spread * (variance + noise).sqrt()],
        "without data the variance is that of the signal, exp(theta[-2]), not 1":
            [average + spread * mean, spread * (variance - signal + 1).clamp(min=0).sqrt()],
        "values near each other are counted twice: k.T @ covariance^-1 @ y, not k.T @ y":
            [average + spread * (k.T @ v), spread * variance.sqrt()]}
    compare(torch.stack([*process.predict(new)]), right,
            {why: torch.stack(wrong) for why, wrong in mistakes.items()},
            "twelve observed sets and three new ones: [means, standard deviations]", rtol=1e-8)


def test_the_loss_is_the_dense_formula(some):
    """Minus the log marginal likelihood and the log priors, up to the constants of the latter."""
    z, y, process = some
    v, centre = (y - y.mean()) / y.std(correction=0), wide([1 / 7, 1 / 7, 1, 1e-3]).log()
    for theta in map(wide, (THETA, [0.0, -2.0, -0.5, -3.0], [-3.0, 1.0, 1.0, 0.5])):
        noise = theta[3].exp() + 1e-10 * theta[2].exp()
        K = by_hand(z, z, theta.tolist()) + noise * torch.eye(12).double()
        want = -torch.distributions.MultivariateNormal(torch.zeros(12).double(), K).log_prob(v)
        want += (((theta - centre) / 2) ** 2).sum() / 2
        assert float(process.loss(theta)) == pytest.approx(float(want), rel=1e-9)


def test_fitting_ends_where_the_loss_is_flat():
    fitted = GaussianProcess(vectors(30, 7), normal(30), GROUPS)
    assert torch.autograd.functional.jacobian(fitted.loss, fitted.theta).abs().max() < 0.02


@pytest.mark.parametrize("y", [[0.1] * 6, [0] * 6, [1, 1, 2, 2, 2, 1], [0] * 5 + [1e9]], ids=str)
def test_equal_values_and_sets_that_come_twice_break_nothing(y):
    z, spread = vectors(6, 7)[[0, 0, 0, 3, 4, 5]], max(y) - min(y)
    mean, std = GaussianProcess(z, wide(y), GROUPS).predict(EVERY[7])
    assert min(y) - spread - 1e-9 < mean.min() <= mean.max() < max(y) + spread + 1e-9
    assert std.isfinite().all() and (spread > 0 or std.max() < 1e-10)


def test_a_single_observation_is_enough():
    mean, std = GaussianProcess(vectors(1, 3), wide([2.5]), torch.tensor([1, 1, 1])).predict(
        EVERY[3])
    compare(mean, [2.5] * 8, {}, "one observed set of value 2.5: the means of all eight sets")
    promise(std.isfinite().all(), "one observed set: the deviations", "finite numbers", std)


def test_a_variance_that_rounding_made_negative(some):
    z, y, _ = some
    process = GaussianProcess(z, y, GROUPS, [*THETA[:3], -40.0], fit=False)     # almost no noise
    process.L = process.L * (1 - 1e-8)
    _, std = process.predict(z)
    promise(std.isfinite().all() and float(std.min()) >= 0,
            "sets that were observed, whose variance rounding has made negative",
            "deviations from 0 up", std, "the root of a negative number is NaN: clamp the variance")
    promise(float(std.max()) < 1e-3 * float(process.std), "sets that were observed without noise",
            "deviations of nearly 0", std, "clamp the variance at 0, not above it")


def test_improvements_by_hand():
    """As an integral over all that the value may be."""
    mean, std, best = wide([0, 1, -1, 1, 1, 0, 0.5, 0.5]), wide([1, 2, 0.5, 0.01, 0, 0, 0, 3]), 0.5
    u = torch.linspace(-12, 12, 200_001, dtype=torch.float64)[:, None]
    density = torch.exp(-0.5 * u**2) / math.sqrt(2 * math.pi)
    integral = torch.trapezoid((mean + std * u - best).clamp(min=0) * density, u, dim=0)
    gap = mean - best
    u = gap / std.clamp(min=1e-12)
    above = 0.5 * torch.erfc(-u / math.sqrt(2))
    there = torch.exp(-0.5 * u**2) / math.sqrt(2 * math.pi)
    got = expected_improvement(mean, std, best)
    promise(not got.isnan().any(), "a mean that is the best so far, 0.5, and a deviation of 0",
            "an improvement of 0", got, "0 / 0 is NaN: a deviation may be 0")
    compare(got, integral, {
        "this is how likely it improves; the question is by how much on average": above,
        "the second term, std * density, is missing": (gap * above).clamp(min=0),
        "the density must be multiplied by std": gap * above + there,
        "the gap is upside down: mean - best": std * there - gap * (1 - above)},
        "means 0 1 -1 1 1 0 .5 .5, deviations 1 2 0.5 0.01 0 0 0 3, the best so far 0.5", rtol=1e-6)


def test_expected_improvement_is_exact_far_below_the_best_and_never_negative():
    below = [-4.0 - i / 2 for i in range(16)]  # torch's ndtr of a few is exact, that of many is not
    want = [u * math.erfc(-u / 2**0.5) / 2 + math.exp(-u * u / 2) / (2 * math.pi)**0.5
            for u in below]
    got = expected_improvement(wide(below), torch.ones(16).double(), 0.0)
    compare(got / wide(want), torch.ones(16).double(), {},
            "means of -4, -4.5 to -11.5, deviations of 1, the best 0: what came divided by the "
            "exact value. Far below, ndtr is not exact enough", 1e-8)
    many = torch.linspace(-60, 60, 100_001, dtype=torch.float64)
    least = float(expected_improvement(many, torch.ones_like(many), 0.0).min())
    promise(least >= 0, "100,001 means from -60 to 60, deviations of 1, the best 0",
            "none below 0", least, "two terms cancel, and rounding leaves less than nothing: clamp")


def check_climb(weights, starts, want, mistakes, most=3):
    """Climb on a sum of weights, where at most `most` bits may be set."""
    given, asked = f"the weights {weights}, from {starts}, at most {most} bits", itertools.count()
    weights, starts = wide(weights), wide(starts)

    def score(z):
        if next(asked) > 100:
            fail(given, "an end after a few steps", "a walk that has not ended after 100",
                 "flip a bit only where the score *rises*, or it walks to and fro where two sets "
                 "are worth the same")
        return z @ weights

    ends, values = (t.double() for t in climb(score, starts, lambda z: z.sum(-1) <= most))
    compare(values, ends @ weights, {
        "the scores are those of the starts; return those of the ends": starts @ weights},
        f"{given}: the scores of the ends {ends.tolist()}")
    compare(ends, want, mistakes, given)


def test_a_climb_by_hand():
    check_climb([1, 3, 2], [[0, 0, 0]], [[1, 1, 1]], {
        "it ends after one flip; go on as long as one raises the score": [[0, 1, 0]],
        "it goes down": [[0, 0, 0]]})
    check_climb([1, -3, 2], [[0, 1, 0]], [[1, 0, 1]], {
        "bits are only set; a flip also takes one away": [[1, 1, 1]]})
    check_climb([1, 3, 2], [[0, 0, 0]], [[0, 1, 1]], {
        "`allowed` is ignored": [[1, 1, 1]],
        "it takes the first flip that is better; take the best": [[1, 1, 0]]}, most=2)
    check_climb([0, 0], [[0, 1]], [[0, 1]], {"it moves where nothing is gained": [[1, 1]]})
    check_climb([1, 1, 1], [[1, 1, 1], [0, 0, 0], [1, 0, 1]], [[1, 1, 1]] * 3, {
        "all stop as soon as one of them stands at its top": [[1, 1, 1], [0, 0, 0], [1, 0, 1]]})
    check_climb([1e-9, 2e-9], [[0, 0]], [[1, 1]], {
        "a gain of 1e-9 is one, too: ask whether a score is larger, without a threshold": [[0, 0]]})


def test_a_climb_ends_where_no_allowed_flip_is_better():
    """Also from starts that are worth nothing. All scores are far below 0:
    none can mean "not allowed"."""
    table = normal(64) - 1e6
    table[8:24] = -math.inf
    score = lambda z: table[(z @ 2 ** torch.arange(6).double()).long()]         # noqa: E731
    allowed = lambda z: (z.sum(-1) >= 2) & (z.sum(-1) <= 4)                     # noqa: E731
    ends, values = (t.double() for t in climb(score, EVERY[6][allowed(EVERY[6])], allowed))
    given = ("64 sets of 6 bits of any scores, some of them -inf; 2 to 4 bits may be set; "
             "from every such set")
    promise(allowed(ends).all(), given, "ends of 2 to 4 bits", ends[~allowed(ends)],
            "never enter what is not allowed")
    compare(values.nan_to_num(neginf=-9e6), score(ends).nan_to_num(neginf=-9e6), {},
            f"{given}: the scores of the ends")
    near = (ends[:, None] - torch.eye(6).double()).abs()
    higher = (allowed(near) & (score(near) > values[:, None])).any(1)
    promise(not higher.any() and len(ends.unique(dim=0)) > 1, given,
            "ends that no allowed flip makes better",
            ends[higher][:2], "go on as long as an allowed flip raises the score, also from -inf")
