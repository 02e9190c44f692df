"""When to draft and how far, and what it is worth.

The one thing to remember: drafting gains only where alpha > c, the share of first drafts that are accepted
above the cost of a drafted step relative to a pass of the target.
"""
from dataclasses import dataclass

import torch

MOST = 16  # no longer drafts are considered


def expected_tokens(alpha, gamma):
    """Tokens that a target pass yields behind gamma drafts: (1 - alpha^(gamma+1)) / (1 - alpha), gamma + 1 at
    alpha = 1 (Leviathan et al. 2023, eq. 1).

    alpha: a number, or a series (T,) of acceptances at successive positions of a text. Of a series it is the
    mean run over all starts: acceptances cluster, and so the mean of powers is not the power of the mean.
    """
    a = torch.as_tensor(alpha, dtype=torch.float64)
    if a.dim() == 0:
        return float((a ** torch.arange(gamma + 1)).sum())
    if len(a) < max(1, gamma):
        raise ValueError(f"{len(a)} acceptances are too few for drafts of {gamma} tokens")
    runs = a.unfold(0, gamma, 1).cumprod(1) if gamma else a.new_zeros(1, 1)     # (starts, gamma)
    return 1 + float(runs.sum(1).mean())


def expected_speedup(alpha, gamma, c):
    """Over plain decoding, where verifying gamma + 1 tokens costs as much as one (Leviathan et al. 2023,
    Theorem 3.8)."""
    return expected_tokens(alpha, gamma) / (gamma * c + 1)


def best_gamma(alpha, c, most=MOST):
    """The gamma of the highest expected speed-up; 0, do not draft, where none exceeds 1."""
    return max(range(most + 1), key=lambda gamma: expected_speedup(alpha, gamma, c))


@dataclass(frozen=True)
class Costs:
    """What each part of a pass over one token takes, in any unit: `sublayers` (2L), `head`."""
    sublayers: tuple[float, ...]
    head: float

    def c(self, sublayers):
        """The cost of a drafted step relative to a pass of the target: the head is part of both."""
        return (sum(self.sublayers[i] for i in sublayers) + self.head) / (sum(self.sublayers) + self.head)


def weight_costs(c):
    """Costs by bytes: reading the weights is what takes the time when one token is written after another."""
    attn = c.dim * c.head_dim * (2 * c.n_heads + 2 * c.n_kv_heads)
    return Costs((attn, 3 * c.dim * c.hidden_dim) * c.n_layers, c.vocab_size * c.dim)
