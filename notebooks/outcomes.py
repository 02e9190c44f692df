"""Every outcome of a program that draws from `Coins`: one run per path through its decisions."""
from sampling import Coins


class Scripted(Coins):
    """Follows the given decisions, then takes the first option each time. `steps` records each
    decision: the options, their probabilities, and the number of the one taken."""

    def __init__(self, decisions):
        self.decisions = list(decisions)
        self.steps = []

    def decide(self, options, chances):
        k = len(self.steps)
        taken = self.decisions[k] if k < len(self.decisions) else 0
        self.steps.append((options, chances, taken))
        return options[taken]

    def choose(self, weights):                                  # (..., V): there is one row here
        w = weights.flatten().double() / weights.double().sum()
        tokens = w.nonzero()[:, 0].tolist()
        token = self.decide(tokens, w[tokens].tolist())
        return weights.new_tensor(token).long().view(weights.shape[:-1])

    def flip(self, prob):
        def one(chance):
            both = ("accepted", chance), ("rejected", 1 - chance)
            options = [(answer, p) for answer, p in both if p > 0]
            return self.decide(*zip(*options, strict=True)) == "accepted"
        answers = [one(min(1.0, chance)) for chance in prob.flatten().tolist()]
        return prob.new_tensor(answers).bool().view(prob.shape)


def every_path(run):
    """[(steps, outcome)] of all paths that run(coins) can take."""
    paths = []
    decisions = []
    while decisions is not None:
        coins = Scripted(decisions)
        outcome = run(coins)
        paths.append((coins.steps, outcome))
        taken = [k for *_, k in coins.steps]
        while taken and taken[-1] == len(coins.steps[len(taken) - 1][0]) - 1:
            taken.pop()                                         # this decision is done
        decisions = taken[:-1] + [taken[-1] + 1] if taken else None
    return paths


def probability(steps):
    """The product of the probabilities along a path."""
    product = 1.0
    for _, chances, taken in steps:
        product *= chances[taken]
    return product


def total(paths):
    """{outcome: probability}, summed over the paths that lead to it."""
    chances = {}
    for steps, outcome in paths:
        chances[outcome] = chances.get(outcome, 0.0) + probability(steps)
    return chances
