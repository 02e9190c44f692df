"""A Gaussian process over bit vectors, by hand: which set of sub-layers should be tried next?

The one thing to remember: a process says of every set what it expects and how unsure it is; the next trial
goes where the expected improvement over the best one so far is largest.

A bit is 1 where a sub-layer is skipped. N sets observed, M asked about, n bits; float64 throughout.
"""
import math

import torch
import torch.nn.functional as F

JITTER = 1e-10  # on the diagonal, relative to the signal: rounding must not make a matrix indefinite


def distances(a, b, groups):
    """Hamming distances within each group of bits. a (N, n), b (M, n), groups (n,) ids from 0: (G, N, M)."""
    kinds = F.one_hot(groups).T.to(a.dtype)                                     # (G, n)
    a, b = a * kinds[:, None], b * kinds[:, None]                               # (G, N, n), (G, M, n)
    return a.sum(-1)[:, :, None] + b.sum(-1)[:, None] - 2 * a @ b.mT


def kernel(d, theta):
    """exp(theta_s - sum over groups of e^theta_g d_g): d (G, N, M), theta (G + 2,) = logs of each group's
    weight, of the signal's variance and of the noise's -> (N, M).

    Each bit contributes a factor of 1 where two sets agree and rho = exp(-weight) where they differ, so the
    matrix over all 2^n sets is a Kronecker product of [[1, rho], [rho, 1]]: positive definite, its smallest
    eigenvalue the product of all 1 - rho. Why not a smooth kernel on a box [0, 1]^n, cut at a half, as Draft
    & Verify's search does? There two points of the same cell are the same set, with the same value, but far
    apart, and the process learns a staircase that does not exist.
    """
    return torch.exp(theta[-2] - (theta[:-2].exp()[:, None, None] * d).sum(0))


class GaussianProcess:
    """Regression on observed values (Rasmussen and Williams 2006, Algorithm 2.1).

    z (N, n) bits, y (N,) values, groups (n,): bits of a group weigh alike. theta: where the search for
    hyper-parameters starts; by default, and always inside, y is standardised.
    """

    def __init__(self, z, y, groups, theta=None, fit=True):
        self.z, self.groups = z.double(), groups
        self.mean, self.std = float(y.mean()), max(float(y.std(correction=0)), 1e-12)
        self.y = (y.double() - self.mean) / self.std
        self.d = distances(self.z, self.z, groups)
        G = len(self.d)
        start = [math.log(1 / max(1, z.shape[1]))] * G + [0.0, math.log(1e-3)] if theta is None else theta
        self.theta = torch.tensor(start, dtype=torch.float64)
        if fit:
            self.fit()
        self.L = torch.linalg.cholesky(self.covariance(self.theta))
        self.alpha = torch.cholesky_solve(self.y[:, None], self.L)              # (N, 1)

    def covariance(self, theta):
        noise = theta[-1].exp() + JITTER * theta[-2].exp()
        return kernel(self.d, theta) + noise * torch.eye(len(self.y), dtype=torch.float64)

    def loss(self, theta):
        """Minus the log marginal likelihood (ibid., eq. 2.30), and weak priors that keep a handful of values
        from saying anything about the logs (normal, of width 2 around where they start)."""
        L = torch.linalg.cholesky(self.covariance(theta))
        half = torch.linalg.solve_triangular(L, self.y[:, None], upper=False)
        prior = theta.new_tensor([math.log(1 / self.z.shape[1])] * len(self.d) + [0.0, math.log(1e-3)])
        return (0.5 * half.square().sum() + L.diagonal().log().sum()
                + 0.5 * len(self.y) * math.log(2 * math.pi) + 0.125 * (theta - prior).square().sum())

    def fit(self, steps=30):
        theta = self.theta.clone().requires_grad_()
        optimiser = torch.optim.LBFGS([theta], max_iter=steps, line_search_fn="strong_wolfe")

        def closure():
            optimiser.zero_grad()
            loss = self.loss(theta)
            loss.backward()
            return loss

        with torch.enable_grad():
            optimiser.step(closure)
        if bool(theta.isfinite().all()):  # else: as it was
            self.theta = theta.detach()

    def predict(self, z):
        """Mean and standard deviation of the value, without noise, at z (M, n): two tensors (M,)."""
        k = kernel(distances(self.z, z.double(), self.groups), self.theta)      # (N, M)
        half = torch.linalg.solve_triangular(self.L, k, upper=False)
        variance = (self.theta[-2].exp() - half.square().sum(0)).clamp(min=0)
        return self.mean + self.std * (k.T @ self.alpha)[:, 0], self.std * variance.sqrt()


def expected_improvement(mean, std, best):
    """E[max(0, f - best)] of normal f (Jones et al. 1998, eq. 15)."""
    gap, std = mean - best, std.clamp(min=1e-12)
    u = gap / std
    # trap: far below the best the two terms all but cancel, and torch's ndtr of many is not exact enough
    below = torch.special.log_ndtr(u).exp()
    return (gap * below + std * torch.exp(-0.5 * u * u) / math.sqrt(2 * math.pi)).clamp(min=0)


def climb(score, starts, allowed):
    """Local search by flips: from each start (S, n) to the best neighbour, one flip away, as long as that is
    better. score: (M, n) -> (M,), allowed: (M, n) -> (M,) bool. Returns the ends (S, n) and their scores."""
    z, n = starts.double(), starts.shape[1]
    value = score(z)
    flips = torch.eye(n, dtype=torch.float64)
    while True:
        near = (z[:, None] - flips).abs()                                       # (S, n, n): flipped
        flat = near.flatten(0, 1)
        scores = torch.where(allowed(flat), score(flat), -math.inf).view(len(z), n)
        top, which = scores.max(1)
        better = top > value
        if not better.any():
            return z, value
        z = torch.where(better[:, None], near[torch.arange(len(z)), which], z)
        value = torch.where(better, top, value)
