"""When to draft, how far, and what it gains.

The one thing to remember: drafting gains only where alpha exceeds c. Alpha is the chance that the
first token of a draft is accepted, and c is the cost of a drafted step relative to a target pass.

A rule says how far to draft; no rule can change the distribution of the text. Confidence is a
probability before temperature and cuts, because at temperature 0 the cut distribution is always 1.
"""
import torch

from drafter import MOST, Rule
from model import Refused
from sampling import raw_probs


def expected_tokens(alpha, gamma):
    """Tokens per target pass with gamma drafted tokens, if each tested token is accepted with
    probability alpha, like the first. The sum is (1 - alpha^(gamma+1)) / (1 - alpha), and gamma + 1
    at alpha = 1 (Leviathan et al. 2023, eq. 1).

    >>> round(expected_tokens(0.8, 2), 2)                       # 1 + 0.8 + 0.64
    2.44
    """
    return sum(alpha ** i for i in range(gamma + 1))


def expected_tokens_along(series, gamma):
    """Tokens per target pass along texts whose acceptance rates are known. `series` is a list of
    tensors (T,), and series[j][i] is the probability that a token drafted after position i of text
    j is accepted.

    Rounds follow one another along a text. The formula at the mean would be too high or too low,
    because accepted tokens come in groups, and a round starts after the token that ended the one
    before. Raises ValueError if no text is as long as a draft.

    >>> import torch
    >>> round(expected_tokens_along([torch.tensor([0.9, 0.2])], 2), 2)      # 1 + 0.9 + 0.9 * 0.2
    2.08
    """
    tokens = 0.0
    rounds = 0.0
    for rates in series:
        alpha = rates.tolist()
        starts = [1.0] + [0.0] * (len(alpha) + 1)   # the chances that a round starts here
        for i in range(len(alpha) - gamma + 1):
            reach = starts[i]
            rounds += reach
            tokens += reach
            for k in range(i, i + gamma):
                starts[k + 1] += reach * (1 - alpha[k])
                reach *= alpha[k]
                tokens += reach
            starts[i + gamma + 1] += reach
    if not rounds:
        raise Refused(f"no series of acceptances is as long as a draft of {gamma} tokens")
    return tokens / rounds


def round_cost(gamma: int, cost: float, verify_cost: float = 1.0) -> float:
    """The cost of a round, in target passes over one token. `cost` is the cost of a drafted step,
    which is the paper's c. `verify_cost` is the cost of the pass over gamma + 1 tokens, which is 1
    in the paper."""
    return gamma * cost + verify_cost


def expected_speedup(alpha: float, gamma: int, cost: float, verify_cost: float = 1.0) -> float:
    """The speed relative to plain decoding (Leviathan et al. 2023, Theorem 3.8)."""
    return expected_tokens(alpha, gamma) / round_cost(gamma, cost, verify_cost)


def best_gamma(alpha, cost, most=MOST, least=0, pass_cost=lambda T: 1.0):
    """The gamma >= `least` with the highest expected speed-up. With least = 0 it is 0
    (do not draft) if no speed-up exceeds 1. pass_cost(T) is the cost of a pass over T tokens
    relative to one token.

    >>> best_gamma(0.8, 0.2), best_gamma(0.8, 0.05), best_gamma(0.3, 0.4)
    (4, 8, 0)
    """
    def speed(gamma):
        return expected_speedup(alpha, gamma, cost, pass_cost(gamma + 1))

    return max(range(least, most + 1), key=speed)


def best_along(series, cost, most=MOST, least=0, pass_cost=lambda T: 1.0):
    """The best gamma and its speed-up along texts whose acceptance rates are known. No gamma beyond
    the longest text is tried. The arguments are as for `expected_tokens_along` and
    `best_gamma`."""
    def speed(gamma):
        return expected_tokens_along(series, gamma) / round_cost(gamma, cost, pass_cost(gamma + 1))

    most = min(most, max(map(len, series)))
    gamma = max(range(least, most + 1), key=speed)
    return gamma, speed(gamma)


class Confidence(Rule):
    """Stop after a token whose probability in the draft is below `threshold`. It is 0.4 in
    transformers (assistant_confidence_threshold) and 0.6 in Kangaroo (arXiv 2404.18911)."""

    def __init__(self, threshold: float, gamma: int = MOST):
        super().__init__(gamma)
        self.threshold = threshold

    def stop(self, k, logits, token):
        return (confidence(logits, token) < self.threshold).tolist()


def acceptance_rate(p, q):
    """How likely a token that is drawn from q is to be accepted. It is the sum of q min(1, p / q),
    which equals the sum of min(p, q) (Leviathan et al. 2023, Corollary 3.6). p and q (..., V) ->
    (...) float64"""
    # trap: a float32 sum of probabilities can exceed 1
    return torch.minimum(p, q).double().sum(-1).clamp(max=1)


def confidence(logits, token):
    """The raw probability of `token`. logits (B, V), token (B,) -> (B,)"""
    return raw_probs(logits).gather(1, token[:, None])[:, 0]
