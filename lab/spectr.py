"""Several drafts for one place, drawn independently from q. How often can one of them be kept?

`verify_tree` tries them in turn, each against what the one before left of p; k-SEQ (SpecTr, arXiv
2310.15141) each against p / rho. Medusa's typical acceptance does not write p's law.
`python -m lab.spectr`
"""
from itertools import product

import torch

from lab.bench.shared import page, table
from support import cli

PAIRS = {"alike": ([0.5, 0.3, 0.2], [0.4, 0.4, 0.2]),
         "q is surer": ([0.5, 0.3, 0.2], [0.9, 0.05, 0.05]),
         "p is surer": ([0.9, 0.06, 0.04], [0.5, 0.3, 0.2]),
         "apart": ([0.1, 0.2, 0.7], [0.6, 0.3, 0.1])}


def solve(p, q, k):
    """rho (B, 1), SpecTr's gamma, and beta (B, 1), how often one draft then passes; p, q (B, V).
    rho is the smallest number at which k drafts write no token too often, which is so where
    1 - (1 - beta)^k <= rho beta (its section 4). It lies in [1, k]; by bisection."""
    low = torch.ones_like(p[:, :1])
    high = k * low
    for _ in range(60):
        rho = (low + high) / 2
        beta = torch.minimum(q, p / rho).sum(-1, keepdim=True)
        fits = 1 - (1 - beta) ** k <= rho * beta
        low = torch.where(fits, low, rho)
        high = torch.where(fits, rho, high)
    return high, torch.minimum(q, p / high).sum(-1, keepdim=True)


def k_seq(p, q, drafts, coins):
    """In k-SEQ drafts (B, k), drawn from q (B, V), pass with probability min(1, p / (rho q)).
    Returns the first that did (B,), k if none did, and the token (B,): that draft, or one from what
    p has left."""
    k = drafts.shape[1]
    rho, beta = solve(p, q, k)
    passed = coins.flip(p.gather(1, drafts) / (rho * q.gather(1, drafts)))                  # (B, k)
    first = torch.where(passed, torch.arange(k, device=p.device), k).amin(1)
    written = torch.minimum(q, p / rho) * (1 - (1 - beta) ** k) / beta.clamp(min=1e-300)    # (B, V)
    left = (p - written).clamp(min=0)
    left = torch.where(left.sum(-1, keepdim=True) > 0, left, p)  # trap: 0 if p = q, up to rounding
    candidates = torch.cat([drafts, coins.choose(left)[:, None]], 1)  # (B, k+1)
    return first, candidates.gather(1, first[:, None])[:, 0]


def chances(p, q, k):
    """How often one of k drafts is kept, for p, q (V,), tried in turn, by k-SEQ, and at most. The
    most is the value of a linear program, from sets of drafts to tokens, and so its smallest cut:
    tokens in H are kept at most p(H) of the time, and a draft is outside of H 1 - q(H)^k of the
    time. There are 2^V cuts."""
    refused = 1.0
    left = p
    for _ in range(k):
        left = (left / left.sum().clamp(min=1e-300) - q).clamp(min=0)
        refused *= float(left.sum())
    _, beta = solve(p[None], q[None], k)
    cuts = (torch.tensor(cut) for cut in product((False, True), repeat=len(p)))
    return 1 - refused, 1 - (1 - float(beta)) ** k, min(float(p[H].sum() + 1 - q[H].sum() ** k)
                                                        for H in cuts)


def typical(p, q, k, epsilon=0.09, delta=0.3):
    """The law (V,) under typical acceptance (Medusa, arXiv 2401.10774; the constants of its code):
    of k drafts the likeliest under p is kept if its p exceeds min(epsilon, delta exp(-H(p))); else
    p's likeliest token is written. p, q (V,); ours is that the drafts are drawn from q."""
    p, order = p.sort(descending=True, stable=True)
    worse = (1 - q[order].cumsum(0)).clamp(min=0)    # (V,) q's mass of the less likely tokens
    best = (worse + q[order]) ** k - worse**k    # how often a token is the likeliest draft
    best[p <= min(epsilon, delta * float((-torch.special.entr(p).sum()).exp()))] = 0
    best[0] += 1 - best.sum()
    return torch.zeros_like(p).scatter(0, order, best)


def main(argv=None):
    rows = []
    for (name, pair), k in product(PAIRS.items(), (1, 2, 3)):
        p, q = torch.tensor(pair, dtype=torch.float64)
        off = float((typical(p, q, k) - p).abs().sum() / 2)
        rows.append([name, str(k), *(f"{x:.3f}" for x in (*chances(p, q, k), off))])
    head = ["p and q", "k", "in turn", "k-SEQ", "optimum", "typical: distance to p"]
    print(page(table(head, rows)))


if __name__ == "__main__":
    raise SystemExit(cli.main(main, []))
