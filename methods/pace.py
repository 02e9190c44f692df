"""Before every draft, choose how to draft and how far, for the most tokens per second.

Costs are known before a round begins, in target passes over one token. Acceptance rates are learnt,
an arm's from its own drafts, and a copy's from the text, whether it was drafted or not.

Guarantee: a round begins only if the balance covers its cost with nothing accepted, so the balance
never falls below 0. Hence cost <= STAKE + (1 + RISK) x tokens, however bad the drafts are.
"""
from collections import Counter
from itertools import pairwise
from typing import NamedTuple

from control import MOST, weight_costs
from drafter import Drafter, Wrapper
from layerskip import same_model
from methods.arms import FADE, KNOWN, Arm, candidates
from methods.counts import Beta
from methods.suffix import DEPTH, Suffix

STAKE = 2.0     # passes that may be lost before anything is won
RISK = 0.01     # what exploring may cost, as a share of plain decoding
MARGIN = 0.05   # an arm must promise this much more than plain decoding
REST = 0.02     # share of the time that choosing may take while no arm gains
COPY = 7  # tokens that may be copied: with the last one a block of eight, as recorded ones are


class Forecast(NamedTuple):
    """What is known before a round begins."""
    n: int          # tokens of the longest text
    room: int       # the longest draft
    grown: float    # the cost of a pass over one token now, relative to one in a short text


class Choice(NamedTuple):
    """The arm that drafts in a round, and what the round costs if it drafts 0, 1, ... tokens."""
    arm: Arm
    costs: list


class Pace(Wrapper):
    """Before each round, choose the arm and the draft length that promise the most tokens per pass.

    Pace must be the outermost drafter. The arms, by default `candidates(model, costs)`, have
    Calibrated rules, and suffix lookup joins them. `costs` is a Costs table, by default counted in
    weights. What is learnt persists across runs, and `chosen` counts the rounds per arm.

    In a batch the rows share each pass and so the arm. The guarantee counts the tokens of the row
    with the fewest, and leaves out the prompt and the time for choosing. That costs about as much
    as any other step (`Costs.call`), so if nothing gains, Pace does not choose for a few rounds.
    """

    def __init__(self, model, arms=None, costs=None, most=MOST):
        self.model = model
        self.costs = costs or weight_costs(model.c)
        self.most = most
        self.arms = candidates(model, self.costs) if arms is None else list(arms)
        self.lookup = Suffix(COPY, factor=4.0)      # Pace itself cuts what is too long
        self.nothing = Arm("nothing", Drafter(), lambda n, g: 0.0)
        self.copying = Arm("suffix", self.lookup, lambda n, g: 0.0)
        super().__init__(*(arm.drafter for arm in self.arms), self.lookup)
        self.whole = self.costs.pricing(range(2 * model.c.n_layers))
        self.thinking = self.costs.call / self.costs.whole
        # acceptance rates of copied tokens, by `matched.bit_length()`
        self.copied = [Beta(prior=1 - 0.5**k) for k in range(1 + DEPTH.bit_length())]
        self.balance = STAKE
        self.chosen = Counter()
        self.now = Forecast(0, most, 1.0)
        self.choice = Choice(self.nothing, [1.0])
        self.found = []         # of each row: what suffix lookup would copy
        self.passes = []        # the cost of a pass over 0, 1, 2, ... tokens of each row
        self.written = []       # of each row: how many tokens
        self.least = 0          # the fewest of a row that was not finished
        self.asleep = 0         # rounds in which it does not choose

    def begin(self, state, trace):
        same_model(self.model, state)
        super().begin(state, trace)
        self.written = [0] * len(state.known)
        self.passes = [self.costs.pass_cost(T, len(state.known)) for T in range(self.most + 3)]
        self.least = 0
        self.asleep = 0
        for arm in self.arms:
            skill = arm.drafter.rule.skill
            skill.fade(KNOWN / max(KNOWN, skill.hits + skill.misses))   # another text

    def look(self, state):
        """The Forecast of the next round."""
        n = max(state.lengths)
        room = min(self.most, max(state.room))
        return Forecast(n, room, self.whole(n) / self.costs.whole)

    def cost(self, arm, g):
        """The cost, in passes, of a round in which the target verifies g tokens of an arm."""
        return arm.drafting(self.now.n, g) + self.passes[1 + g]

    def covered(self, cost):
        """Whether the balance covers a round of this cost if nothing is accepted."""
        return (cost - 1) * self.now.grown <= self.balance

    def promise(self, arm, alpha):
        """(tokens per pass, g) at the best length whose cost the balance covers, or (1, 0) if none
        gains. What an arm reads first occurs once, so it only counts against the balance."""
        best = 1.0
        length = 0
        tokens = 1.0
        reach = 1.0
        further = arm.further(self.now.n)
        catch_up = arm.drafting(self.now.n, 0)
        for g in range(1, min(arm.longest, self.now.room) + 1):
            reach *= alpha
            tokens += reach
            cost = self.cost(arm, g)
            if not self.covered(cost):
                break
            spent = cost - catch_up + self.thinking
            if tokens > best * spent:
                best = tokens / spent
                length = g
            elif reach < best * further:    # each further token adds less than it costs
                break
        return best, length

    def choose(self):
        """The Choice that promises most. An arm that is little known is taken to be good, so that
        it is tried."""
        matched = self.lookup.matched
        known = [self.copied[m.bit_length()].mean() if m else 0.0 for m in matched]
        self.copying.longest = max(map(len, self.found))
        options = [(self.copying, sum(known) / len(known))]
        options += [(arm, arm.drafter.rule.skill.high()) for arm in self.arms]
        best = 1 + MARGIN
        chosen = self.nothing
        length = 0
        for arm, alpha in options:
            rate, far = self.promise(arm, alpha)
            if rate > best:
                best = rate
                chosen = arm
                length = far
        if chosen in self.arms:
            length = self.open_end(chosen, length)
        return Choice(chosen, [self.cost(chosen, g) for g in range(1 + length)])

    def open_end(self, arm, length):
        """How many tokens the balance covers, since the arm's rule ends the draft."""
        rule = arm.drafter.rule
        most = min(self.now.room, arm.longest)
        rate, _ = self.promise(arm, rule.skill.mean())  # what it brings, not what it might bring
        further = arm.further(self.now.n)
        rule.bars = [rate * (further + more - less) for less, more in pairwise(self.passes[2:])]
        while length < most and self.covered(self.cost(arm, length + 1)):
            length += 1
        rule.longest = length
        return length

    def propose(self, state):
        self.now = self.look(state)
        self.choice = Choice(self.nothing, [1.0])
        self.found = [[]] * len(state.known)
        self.asleep -= 1
        if self.asleep < 0:
            self.lookup.enter(state)
            self.found = self.lookup.found(state)
            self.choice = self.choose()
            if self.choice.arm is self.nothing:
                self.asleep = int(self.thinking / REST)
        arm, costs = self.choice
        self.chosen[arm.name] += 1
        return arm.drafter.propose(state).cut(len(costs) - 1)

    def observe(self, state, r):
        cost = self.choice.costs[r.p.shape[1] - 1]
        self.written = [n + len(new) for n, new in zip(self.written, r.new, strict=True)]
        least = min(n for n, new in zip(self.written, r.new, strict=True) if new)
        self.balance += ((1 + RISK) * (least - self.least) - cost) * self.now.grown
        self.least = least
        for arm in self.arms:
            arm.drafter.observe(state, r)
        self.read(r)

    def read(self, r):
        """Count what would have been copied, which the text shows, whichever arm drafted."""
        for copy, m, new in zip(self.found, self.lookup.matched, r.new, strict=True):
            same = [x == y for x, y in zip(copy, new, strict=False)]
            if same:
                right = [*same, False].index(False)
                copied = self.copied[m.bit_length()]
                copied.fade(FADE)
                copied.add(right, right < len(same))

    def summary(self):
        """How often each arm drafted, and its present estimates, as one line."""
        why = {}
        for arm in self.arms:
            alpha = arm.drafter.rule.skill.mean()
            price = arm.further(self.now.n)
            why[arm.name] = f" ({alpha:.0%} accepted, each token costs {price:.0%} of a pass)"
        often = self.chosen.most_common()
        return ", ".join(f"{name} in {count} rounds{why.get(name, '')}" for name, count in often)
