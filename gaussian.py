"""A Gaussian process over bit vectors, written out: which set of sub-layers should be tried next?

The one thing to remember: for every set the process predicts a value and says how unsure it is; the next
trial goes where the expected improvement over the best value so far is largest.

A bit is 1 where a sub-layer is skipped. N sets were observed, M are asked about, each has n bits; all numbers
are float64.
"""
import math

import torch
import torch.nn.functional as F

JITTER = 1e-10  # added to the diagonal, relative to the signal, so that rounding makes no matrix indefinite


def distances(a, b, groups):
    """How many bits of each group differ: a (N, n), b (M, n) -> (G, N, M). groups (n,) says to which group,
    from 0, each bit belongs."""
    kinds = F.one_hot(groups).T.to(a.dtype)                                     # (G, n)
    a, b = a * kinds[:, None], b * kinds[:, None]                               # (G, N, n), (G, M, n)
    return a.sum(-1)[:, :, None] + b.sum(-1)[:, None] - 2 * a @ b.mT


def kernel(d, theta):
    """The covariance of two sets: exp(theta_s - sum over groups g of e^theta_g d_g). d (G, N, M) -> (N, M).

    theta (G + 2,) holds logarithms: of the weight of each group, of the signal's variance (theta_s), and of
    the noise's variance.

    Each bit contributes a factor: 1 where two sets agree, and rho = exp(-weight) where they differ. So the
    matrix over all 2^n sets is the signal's variance times a Kronecker product of matrices [[1, rho],
    [rho, 1]]. It is positive definite: the smallest eigenvalue of the product is the product of all 1 - rho.

    Draft & Verify's search uses a smooth kernel on the box [0, 1]^n instead, and rounds each coordinate to a
    bit. Two points that round to the same set have the same value but may lie far apart, so the process has
    to learn steps that are only an effect of rounding. Comparing bits avoids them.
    """
    return torch.exp(theta[-2] - (theta[:-2].exp()[:, None, None] * d).sum(0))


class GaussianProcess:
    """Regression on observed values (Rasmussen and Williams 2006, Algorithm 2.1).

    z (N, n): the observed sets, y (N,): their values, groups (n,): the bits of a group share one weight.
    theta: where the fit starts, or what is used where `fit` is false; None is the centre of the priors.
    Inside, y always has mean 0 and deviation 1.
    """

    def __init__(self, z, y, groups, theta=None, fit=True):
        self.z, self.groups, y = z.double(), groups, y.double()
        self.mean, self.std = float(y.mean()), max(float(y.std(correction=0)), 1e-12)
        self.y = (y - self.mean) / self.std
        self.d = distances(self.z, self.z, groups)
        centre = [math.log(1 / z.shape[1])] * len(self.d) + [0.0, math.log(1e-3)]
        self.prior = torch.tensor(centre, dtype=torch.float64)                  # (G + 2,)
        self.theta = self.prior if theta is None else torch.tensor(theta, dtype=torch.float64)
        if fit:
            self.fit()
        self.L = torch.linalg.cholesky(self.covariance(self.theta))             # (N, N)
        self.dual = torch.cholesky_solve(self.y[:, None], self.L)               # (N, 1): covariance^-1 y

    def covariance(self, theta):
        noise = theta[-1].exp() + JITTER * theta[-2].exp()
        return kernel(self.d, theta) + noise * torch.eye(len(self.y), dtype=torch.float64)

    def loss(self, theta):
        """Minus the log marginal likelihood (ibid., eq. 2.30), minus the log of a weak prior: each entry of
        theta is normal around its centre, with a deviation of 2. Without the prior a handful of values could
        move theta anywhere."""
        L = torch.linalg.cholesky(self.covariance(theta))
        half = torch.linalg.solve_triangular(L, self.y[:, None], upper=False)   # (N, 1)
        return (0.5 * half.square().sum() + L.diagonal().log().sum()
                + 0.5 * len(self.y) * math.log(2 * math.pi) + 0.125 * (theta - self.prior).square().sum())

    def fit(self):
        """Move theta to where the loss is lower; keep it where that ends in numbers that are not finite."""
        theta = self.theta.clone().requires_grad_()
        optimiser = torch.optim.LBFGS([theta], max_iter=30, line_search_fn="strong_wolfe")

        def closure():
            optimiser.zero_grad()
            loss = self.loss(theta)
            loss.backward()
            return loss

        with torch.enable_grad():
            optimiser.step(closure)
        if bool(theta.isfinite().all()):
            self.theta = theta.detach()

    def predict(self, z):
        """Mean and standard deviation of the value, without noise, at the sets z (M, n): two tensors (M,)."""
        k = kernel(distances(self.z, z.double(), self.groups), self.theta)      # (N, M)
        half = torch.linalg.solve_triangular(self.L, k, upper=False)            # (N, M)
        variance = (self.theta[-2].exp() - half.square().sum(0)).clamp(min=0)   # (M,)
        return self.mean + self.std * (k.T @ self.dual)[:, 0], self.std * variance.sqrt()


def expected_improvement(mean, std, best):
    """E[max(0, f - best)] for a normal f with this mean and deviation (Jones et al. 1998, eq. 15)."""
    gap, std = mean - best, std.clamp(min=1e-12)
    u = gap / std
    # trap: where the mean is far below the best, the two terms nearly cancel, and torch.special.ndtr of many
    # numbers at once is not exact enough for that
    above = torch.special.log_ndtr(u).exp()                                     # how likely f exceeds best
    return (gap * above + std * torch.exp(-0.5 * u * u) / math.sqrt(2 * math.pi)).clamp(min=0)


def climb(score, starts, allowed):
    """Local search: from each start (S, n), flip the bit that raises the score most, as long as one does.

    score: (M, n) -> (M,), allowed: (M, n) -> (M,) bool. Returns the ends (S, n) and their scores (S,).
    """
    z, n = starts.double(), starts.shape[1]
    value = score(z)
    flips = torch.eye(n, dtype=torch.float64)
    while True:
        near = (z[:, None] - flips).abs()                                       # (S, n, n): bit j flipped
        flat = near.flatten(0, 1)                                               # (S * n, n)
        scores = torch.where(allowed(flat), score(flat), -math.inf).view(len(z), n)
        top, which = scores.max(1)                                              # (S,)
        better = top > value
        if not better.any():
            return z, value
        z = torch.where(better[:, None], near[torch.arange(len(z)), which], z)
        value = torch.where(better, top, value)
