"""Pace: before every draft, choose how to draft and how far, for the most tokens per second.

Prices are known before a round begins, in target passes over one token. Acceptance rates are
learnt: those of copies from the text, which shows what they would have been worth, all others from
their own drafts.

Guarantee: a round begins only if the balance covers its cost with nothing accepted, so the balance
never falls below 0. Hence cost <= STAKE + (1 + risk) x tokens, however bad the drafts are.
"""
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from control import MOST, Beta, weight_costs
from drafter import Drafter, Wrapper
from layerskip import same_model
from methods.arms import FADE, KNOWN, Arm, candidates
from methods.suffix import DEPTH, Suffix

STAKE = 2.0     # passes that may be lost before anything is won
MARGIN = 0.05   # an arm must promise this much more than plain decoding
REST = 0.02     # of the time: choosing takes no more of it while nothing gains
COPY = 7  # tokens that may be copied: with the last one a block of eight, as recorded ones are


class Choice(NamedTuple):
    """How a round drafts."""
    arm: Arm
    length: int = 0     # the most tokens it drafts
    late: float = 0.0   # the cost, in passes, of what the arm reads first


class Pace(Wrapper):
    """Draft with the arm and the length that promise the most tokens per pass; the outermost
    drafter. arms: by default `candidates(model, costs)`; their drafters have a Calibrated rule.
    Suffix lookup drafts, too. costs: a Costs table, by default counted in weights. risk: what
    exploring may cost, as a share of plain decoding. most: the longest draft. What is learnt
    outlives the run. chosen: {name: rounds}.

    In a batch the rows share each pass, and so the arm; the guarantee counts the tokens of the row
    with the fewest, and leaves out the prompt and the time that choosing takes. Choosing is taken
    to cost what any step costs (`Costs.call`): where nothing gains, it sleeps for some rounds.
    """

    def __init__(self, model, arms=None, costs=None, risk=0.01, most=MOST):
        self.model = model
        self.costs = costs or weight_costs(model.c)
        self.risk = risk
        self.most = most
        self.arms = candidates(model, self.costs) if arms is None else list(arms)
        self.lookup = Suffix(COPY, factor=4.0)      # Pace itself cuts what is too long
        self.nothing = Arm("nothing", Drafter(), lambda n: 0.0)
        self.copying = Arm("suffix", self.lookup, lambda n: 0.0)
        super().__init__(*(arm.drafter for arm in self.arms), self.lookup)
        self.whole = self.costs.pricing(range(2 * model.c.n_layers))
        self.thinking = self.costs.call / self.costs.whole
        # acceptance rates of copied tokens, by `matched.bit_length()`
        self.copied = [Beta(prior=1 - 0.5**k) for k in range(1 + DEPTH.bit_length())]
        self.balance = STAKE
        self.chosen = {}
        self.n = 0

    def begin(self, state, trace):
        same_model(self.model, state)
        super().begin(state, trace)
        rows = len(state.known)
        self.written = [0] * rows
        self.least = 0
        self.asleep = 0
        one = self.costs.pass_cost(rows)
        self.pass_cost = cache(lambda T: self.costs.pass_cost(rows * T) / one)
        for arm in self.arms:
            skill = arm.drafter.rule.skill
            skill.fade(KNOWN / max(KNOWN, skill.hits + skill.misses))   # another text

    # --- before a round

    def look(self, state):
        """Set the text's length, the longest draft, and what a pass costs relative to the first."""
        self.n = max(map(len, state.known))
        self.room = max(0, min(self.most, max(state.left) - 1))
        self.grown = self.whole(self.n) / self.costs.whole

    def cost(self, arm, g):
        """The cost, in passes, of a round: g tokens of an arm, and their verification."""
        return arm.once + g * arm.price(self.n) + self.pass_cost(1 + g)

    def covered(self, cost):
        """Whether the balance covers a round of this cost if nothing is accepted."""
        return (cost - 1) * self.grown <= self.balance

    def promise(self, arm, alpha):
        """(tokens per pass, g) at the best length whose cost the balance covers; (1, 0) if none
        gains. The cost of choosing is counted. That of reading what others wrote
        counts only against the balance, as it occurs once."""
        best = 1.0
        length = 0
        tokens = 1.0
        reach = 1.0
        price = arm.price(self.n)
        late = arm.late(self.pass_cost)
        for g in range(1, min(arm.most, self.room) + 1):
            reach *= alpha
            tokens += reach
            cost = self.cost(arm, g)
            if not self.covered(late + cost):
                break
            if tokens > best * (cost + self.thinking):
                best = tokens / (cost + self.thinking)
                length = g
            elif reach < best * price:      # each further token adds less than it costs
                break
        return best, length

    def choose(self):
        """The Choice that promises most. What is little known is taken to be good: it is tried."""
        matched = self.lookup.matched
        known = [self.copied[m.bit_length()].mean() if m else 0.0 for m in matched]
        self.copying.longest = max(map(len, self.found))
        options = [(self.copying, sum(known) / len(known))]
        options += [(arm, arm.drafter.rule.skill.high()) for arm in self.arms]
        best = 1 + MARGIN
        choice = Choice(self.nothing)
        for arm, alpha in options:
            rate, length = self.promise(arm, alpha)
            if rate > best:
                best = rate
                choice = Choice(arm, length, arm.late(self.pass_cost))
        if choice.arm in self.arms:
            return self.open_end(choice)
        return choice

    def open_end(self, choice):
        """The Choice with all the tokens that the balance covers: the arm's rule ends the draft."""
        arm, length, late = choice
        rule = arm.drafter.rule
        price = arm.price(self.n)
        most = min(self.room, arm.most)
        rate, _ = self.promise(arm, rule.skill.mean())  # what it brings, not what it might bring
        verify_costs = [self.pass_cost(k + 2) for k in range(most + 1)]
        rule.bars = [rate * (price + more - less) for less, more in pairwise(verify_costs)]
        while length < most and self.covered(late + self.cost(arm, length + 1)):
            length += 1
        rule.longest = length
        return Choice(arm, length, late)

    def propose(self, state):
        self.choice = Choice(self.nothing)
        self.found = [[]] * len(state.known)
        self.asleep -= 1
        if self.asleep < 0:
            self.lookup.enter(state)
            self.found = self.lookup.found(state)
            self.look(state)
            self.choice = self.choose()
            if self.choice.arm is self.nothing:
                self.asleep = int(self.thinking / REST)
        name = self.choice.arm.name
        self.chosen[name] = self.chosen.get(name, 0) + 1
        return self.choice.arm.drafter.propose(state).cut(self.choice.length)

    # --- after a round

    def observe(self, state, r):
        K = r.p.shape[1] - 1
        cost = self.choice.late + self.cost(self.choice.arm, K)
        self.written = [n + len(new) for n, new in zip(self.written, r.new, strict=True)]
        least = min(n for n, new in zip(self.written, r.new, strict=True) if new)
        self.balance += ((1 + self.risk) * (least - self.least) - cost) * self.grown
        self.least = least
        for arm in self.arms:
            arm.drafter.observe(state, r)
        self.read(r)

    def read(self, r):
        """Count what would have been copied, whichever arm drafted: the text shows it."""
        for copy, m, new in zip(self.found, self.lookup.matched, r.new, strict=True):
            same = [x == y for x, y in zip(copy, new, strict=False)]
            if same:
                right = [*same, False].index(False)
                copied = self.copied[m.bit_length()]
                copied.fade(FADE)
                copied.add(right, right < len(same))

    def summary(self):
        """One line: how often each arm drafted, and its present estimates."""
        why = {}
        for arm in self.arms:
            alpha = arm.drafter.rule.skill.mean()
            price = arm.price(self.n)
            why[arm.name] = f" ({alpha:.0%} accepted, each token costs {price:.0%} of a pass)"
        often = sorted(self.chosen.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} in {count} rounds{why.get(name, '')}" for name, count in often)
