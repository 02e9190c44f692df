"""Which sub-layers to skip: what a skip set is worth on a text, and the search for a good one.

    python search.py --model weights/stories-llama --text stories.txt --trials 200 --out found
    python generate.py "Once upon a time" --model weights/stories-llama --skip found/skip.json

The one thing to remember: a trial is one pass over a text and needs no stopwatch. Trial i depends
only on the seed and the trials before it, so a search that was killed can go on where it stopped.
"""
import itertools
import math
import signal
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

if __name__ == "__main__":      # until the modules are loaded, Ctrl-C ends without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch

import checkpoint
from control import acceptance_rate, best_along
from kvcache import KVCache
from layerskip import check_sublayers, shared_prefix
from model import Placement, Refused, Transformer
from sampling import to_probs

# added to the diagonal, relative to the signal, so that rounding makes no matrix indefinite
JITTER = 1e-10
FIRST = 10      # random trials at the start
REFIT = 5       # trials between two fits of the process
DRAWS = 1000    # random sets that may be drawn for one trial
STARTS = 8, 16  # of a local search: this many of the best known sets, and of random ones


class Teacher:
    """One pass of the target over a text. It is kept, so that any number of drafts can be scored
    against it without decoding. The question is how likely the *first* drafted token after each
    position is to be accepted. All positions draft in one pass, each in its own spare slot. For a
    text of T = 4:

        slot      0 1 2 3 | 4 5 6 7
        query 2   x x . . | . . x .     the target's keys before position 2, and the draft's at it
    """

    @torch.inference_mode()
    def __init__(self, model: Transformer, ids: Sequence[int], probs: Callable = to_probs):
        c = model.c
        T = len(ids)
        if not 0 < T <= c.max_len:
            raise Refused(f"a text of {T} tokens cannot be scored: the context holds 1 to "
                          f"{c.max_len}")
        self.model = model
        self.probs = probs
        self.cache = KVCache(c, 1, 2 * T, model.attention_dtype(), model.tok.device)
        self.tokens = torch.tensor([ids], device=model.tok.device)              # (1, T)
        x = model.embed(self.tokens)
        trace = dict.fromkeys(range(2 * c.n_layers))
        model.run(x, Placement.span(0, T, x.device), self.cache, trace=trace)
        self.states = [x, *trace.values()]          # states[i] enters sub-layer i: (1, T, dim) each
        self.p = probs(model.unembed(self.states[-1]))      # (1, T, V)

    @torch.inference_mode()
    def q(self, sublayers: Sequence[int], short=None) -> torch.Tensor:
        """The distributions (1, T, V) that the token after each position is drafted from. `short`
        is a `ShortHead`, if the draft has one."""
        subs = check_sublayers(sublayers, self.model.c.n_layers)
        shared = shared_prefix(subs)
        T = self.p.shape[1]
        here = torch.arange(T, device=self.p.device)[None]
        spare = here + T
        own = torch.eye(T, dtype=torch.bool, device=self.p.device)[None]
        at = Placement(here, spare, 0, 2 * T, own)
        x = self.model.run(self.states[shared], at, self.cache, subs[shared:])
        return self.probs((short or self.model).unembed(x))

    def acceptance(self, sublayers: Sequence[int], short=None) -> torch.Tensor:
        """The acceptance rate of a first token after each position. (T,) float64, on the CPU"""
        return self.overlap(self.q(sublayers, short))

    def overlap(self, q):
        """The acceptance rate of tokens that are drawn from any q (1, T, V)."""
        # NaN means an overflow, which `verify` rejects
        return acceptance_rate(self.p, q)[0].cpu().nan_to_num(0.0)


class Calibration:
    """The text that skip sets are scored on, which is the first `tokens` tokens of its documents.
    Each has a Teacher. `short` is a ShortHead that replaces the model while it drafts."""

    def __init__(self, model, tokenizer, documents, tokens, probs=to_probs, short=None):
        self.short = short
        self.share = short.share if short else 1.0
        self.ids = []
        for text in documents:
            ids = checkpoint.encode(tokenizer, text, model.c.bos)
            self.ids.append(ids[: min(tokens, model.c.max_len)])
            tokens -= len(self.ids[-1])
            if tokens <= 0:
                break
        self.teachers = [Teacher(model, ids, probs) for ids in self.ids]


# speedup is what the search maximises, cost is the c of the formulas, and gamma is the best one
Trial = namedtuple("Trial", "speedup alpha cost gamma")


def speedup(calibration: Calibration, machine, sublayers: Sequence[int]) -> Trial:
    """The expected speed-up with the best gamma (Leviathan et al. 2023, Theorem 3.8, on acceptances
    along a text). Gamma is at least 1, so that values below 1 still tell a bad set from a worse
    one."""
    series = [t.acceptance(sublayers, calibration.short) for t in calibration.teachers]
    cost = machine.draft(sublayers, calibration.share).start
    gamma, gain = best_along(series, cost, least=1, pass_cost=partial(machine.verify, 0))
    return Trial(gain, float(torch.cat(series).mean()), cost, gamma)


def distances(a, b, groups):
    """How many bits differ per group. a (N, n), b (M, n) -> (G, N, M). For `groups` see
    `GaussianProcess`."""
    kinds = torch.nn.functional.one_hot(groups).T.to(a.dtype)[:, None]          # (G, 1, n)
    return torch.cdist(a * kinds, b * kinds, p=1)


def kernel(d, theta):
    """The covariance of two sets, exp(theta_s - sum over g of e^theta_g d_g). d (G, N, M) ->
    (N, M).

    theta (G + 2,) holds the logarithms of the weight of each group, of the signal's variance
    (theta_s) and of the noise's variance, in this order. Each bit that differs contributes a
    factor e^-weight, so the matrix over all sets is a Kronecker product of positive definite 2 x 2
    matrices.
    """
    return torch.exp(theta[-2] - (theta[:-2].exp()[:, None, None] * d).sum(0))


class GaussianProcess:
    """Regression on observed values (Rasmussen and Williams 2006, Algorithm 2.1), in float64.

    y (N,) are the values observed at the sets z (N, n). `groups` (n,) holds the group of each
    bit, counted from 0. The bits of a group share one weight. A fit starts at theta, or at the
    centre of the priors if theta is None. If `fit` is false, theta stays as it is. Inside, y is
    scaled to mean 0 and standard deviation 1.
    """

    def __init__(self, z, y, groups, theta=None, fit=True):
        y = y.double()
        self.z = z.double()
        self.groups = groups
        self.mean = float(y.mean())
        self.std = max(float(y.std(correction=0)), 1e-12)
        self.y = (y - self.mean) / self.std
        self.d = distances(self.z, self.z, groups)
        centre = [math.log(1 / z.shape[1])] * len(self.d) + [0.0, math.log(1e-3)]
        self.prior = torch.tensor(centre, dtype=torch.float64)                  # (G + 2,)
        self.theta = self.prior if theta is None else torch.tensor(theta, dtype=torch.float64)
        if fit:
            self.fit()
        self.L = torch.linalg.cholesky(self.covariance(self.theta))             # (N, N)
        self.dual = torch.cholesky_solve(self.y[:, None], self.L)          # (N, 1): covariance^-1 y

    def covariance(self, theta):
        noise = theta[-1].exp() + JITTER * theta[-2].exp()
        return kernel(self.d, theta) + noise * torch.eye(len(self.y), dtype=torch.float64)

    def loss(self, theta):
        """Minus the log marginal likelihood (ibid., eq. 2.30), minus the log of a weak normal prior
        with a standard deviation of 2. Without the prior, a few values could move theta
        anywhere."""
        L = torch.linalg.cholesky(self.covariance(theta))
        half = torch.linalg.solve_triangular(L, self.y[:, None], upper=False)   # (N, 1)
        loss = 0.5 * half.square().sum() + L.diagonal().log().sum()
        loss = loss + 0.5 * len(self.y) * math.log(2 * math.pi)
        return loss + 0.125 * (theta - self.prior).square().sum()

    def fit(self):
        """Minimise the loss over theta. If the result is not finite, the old theta stays."""
        theta = self.theta.clone().requires_grad_()

        def closure():
            loss = self.loss(theta)
            theta.grad, = torch.autograd.grad(loss, theta)
            return loss

        torch.optim.LBFGS([theta], max_iter=30, line_search_fn="strong_wolfe").step(closure)
        if theta.isfinite().all():
            self.theta = theta.detach()

    def predict(self, z):
        """Mean and standard deviation (M,) of the noiseless value at the sets z (M, n)."""
        k = kernel(distances(self.z, z.double(), self.groups), self.theta)      # (N, M)
        half = torch.linalg.solve_triangular(self.L, k, upper=False)            # (N, M)
        mean = (k.T @ self.dual)[:, 0]                                          # (M,)
        variance = (self.theta[-2].exp() - half.square().sum(0)).clamp(min=0)   # (M,)
        return self.mean + self.std * mean, self.std * variance.sqrt()


def expected_improvement(mean, std, best):
    """E[max(0, f - best)] for a normal f with this mean and deviation
    (Jones et al. 1998, eq. 15)."""
    gap = mean - best
    std = std.clamp(min=1e-12)
    u = gap / std
    # trap: where the mean is far below the best, the two terms nearly cancel, and
    # torch.special.ndtr on many numbers at once is not exact enough for that
    above = torch.special.log_ndtr(u).exp()                         # the chance that f exceeds best
    density = torch.exp(-0.5 * u * u) / math.sqrt(2 * math.pi)
    return (gap * above + std * density).clamp(min=0)


def climb(score, starts, allowed):
    """Local search. From each start (S, n), flip the bit that raises the score most, until none
    does. Returns the ends (S, n) and their scores (S,).

    score(z) and allowed(z) take sets (M, n). They return a score and a bool for each (M,).
    """
    z = starts.double()
    n = z.shape[1]
    value = score(z)
    flips = torch.eye(n, dtype=torch.float64)
    while True:
        near = (z[:, None] - flips).abs()                                 # (S, n, n): bit j flipped
        flat = near.flatten(0, 1)                                               # (S * n, n)
        scores = torch.where(allowed(flat), score(flat), -math.inf).view(len(z), n)
        top, which = scores.max(1)                                              # (S,)
        better = top > value
        if not better.any():
            return z, value
        z = torch.where(better[:, None], near[torch.arange(len(z)), which], z)
        value = torch.where(better, top, value)


# --- the search


@dataclass(frozen=True)
class Space:
    """All sets that may be tried, as vectors of bits. Bit j is 1 if sub-layer `skippable[j]` is
    skipped. At least one sub-layer stays."""
    n_layers: int
    skippable: tuple[int, ...]

    def sublayers(self, z):
        """The sub-layers that stay."""
        gone = {sub for sub, bit in zip(self.skippable, z, strict=True) if bit}
        return [i for i in range(2 * self.n_layers) if i not in gone]

    def allowed(self, z):
        """z (..., n) -> (...) bool."""
        return z.sum(-1) < 2 * self.n_layers

    def random(self, g):
        """First draw the number of skips, where each is equally likely, and then a set of that
        size."""
        most = min(len(self.skippable), 2 * self.n_layers - 1)
        count = int(torch.randint(most + 1, (), generator=g))
        z = torch.zeros(len(self.skippable), dtype=torch.float64)
        z[torch.randperm(len(z), generator=g)[:count]] = 1
        return z

    def groups(self):
        """The group of each bit, for the kernel. It is 0 for attention and 1 for an MLP."""
        return torch.tensor([sub % 2 for sub in self.skippable])


def propose(space, entries, seed):
    """The trial after those in `entries`, as (z, theta). z (n,) is the set to try, or None if all
    the sets that were drawn are known. theta holds the hyper-parameters of the process. The first
    trials are random and have None."""
    bits = [[float(b) for b in e["bits"]] for e in entries]
    zs = torch.tensor(bits, dtype=torch.float64)                                # (N, n)
    ys = torch.tensor([e["speedup"] for e in entries], dtype=torch.float64)     # (N,)
    g = torch.Generator().manual_seed((seed * 1_000_003 + len(entries)) % 2**63)
    drawn = (space.random(g) for _ in range(DRAWS))
    untried = (z for z in drawn if z.tolist() not in bits)
    if len(entries) < FIRST:
        return next(untried, None), None
    theta = entries[-1]["theta"]
    due = theta is None or len(entries) % REFIT == 0
    process = GaussianProcess(zs, ys, space.groups(), theta, fit=due)
    known, others = STARTS
    best = zs[ys.argsort(descending=True, stable=True)[:known]]
    starts = torch.stack([*best, *itertools.islice(drawn, others)])
    z = most_promising(process, float(ys.max()), starts, space.allowed)
    if z is None:
        z = next(untried, None)
    return z, process.theta.tolist()


def most_promising(process, best, starts, allowed):
    """The untried set (n,) with the highest expected improvement over `best` that a local search
    finds, or None if it finds no untried one."""
    def score(z):
        tried = torch.cdist(z, process.z, p=1).min(1).values < 0.5
        mean, std = process.predict(z)
        return expected_improvement(mean, std, best).masked_fill(tried, -math.inf)

    ends, scores = climb(score, starts, allowed)
    if float(scores.max()) == -math.inf:
        return None
    return ends[int(scores.argmax())]


def search(space: Space, evaluate: Callable, count: int, seed: int = 0,
           entries: Sequence[dict] = ()) -> Iterator[dict]:
    """Continue from the trials in `entries` until there are `count`, or until no new set is found.
    evaluate(sublayers) returns a Trial, and each is yielded as an entry of the log."""
    entries = list(entries)
    while len(entries) < count:
        z, theta = propose(space, entries, seed)
        if z is None:
            return
        t = evaluate(space.sublayers(z))
        entries.append({
            "trial": len(entries),
            "bits": "".join(str(int(b)) for b in z),
            "alpha": t.alpha,
            "c": t.cost,
            "gamma": t.gamma,
            "speedup": t.speedup,
            "theta": theta})
        yield entries[-1]


if __name__ == "__main__":
    from support.search import main  # late: only the command needs it, not the lesson above
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
