"""Before every draft, choose how to draft and how far, for the most tokens per second.

Costs are known before a round begins, in target passes over one token. Acceptance rates are learnt,
an arm's from its own drafts, and a copy's from the text, whether it was drafted or not.

Guarantee: a round begins only if the balance covers its cost with nothing accepted, so the balance
never falls below 0. Hence cost <= STAKE + (1 + RISK) x tokens, however bad the drafts are.
"""
from collections import Counter
from itertools import pairwise, takewhile

from control import MOST, weight_costs
from drafter import Drafter
from layerskip import same_model
from methods.arms import FADE, PRIOR, Arm, candidates
from methods.counts import Beta
from methods.lookup import DEPTH, Suffix
from methods.wrapper import Wrapper

STAKE = 2.0     # passes that may be lost before anything is won
RISK = 0.005    # what exploring may cost, as a share of plain decoding
MARGIN = 0.05   # an arm must promise this much more than plain decoding
OVERHEAD = 0.01     # the largest share of a round's time that choosing, or a stop rule, may take
COPY = 7    # tokens that may be copied, because with the last one they fill a recorded block of 8


class Pace(Wrapper):
    """Before each round, choose the arm and the draft length that promise the most tokens per pass.

    No drafter around Pace may change its drafts. The arms, by default `candidates(model, costs)`,
    have Calibrated rules, and suffix lookup joins them. `costs` is a Costs table, by default
    counted in weights. What is learnt persists across runs, and `chosen` counts the rounds per
    arm.

    In a batch the rows share each pass and so the arm. The guarantee counts the tokens of the row
    with the fewest, without the prompt. Where a round is short next to the time for choosing
    (`Costs.thinking`), a choice holds for several rounds.
    """

    def __init__(self, model, arms=None, costs=None, most=MOST):
        self.model = model
        self.costs = costs or weight_costs(model.c)
        self.most = most
        self.arms = candidates(model, self.costs) if arms is None else list(arms)
        self.lookup = Suffix(COPY, factor=4.0)      # Pace itself cuts what is too long
        self.copying = Arm("suffix", self.lookup, lambda n, g: 0.0)
        self.nothing = Arm("nothing", Drafter(), lambda n, g: 0.0)
        super().__init__(*(arm.drafter for arm in self.arms), self.lookup)
        self.pass_price = self.costs.pricing(range(2 * model.c.n_layers))
        self.thinking = self.costs.thinking / self.costs.whole
        self.pause = int(self.thinking / OVERHEAD)  # rounds between two decisions
        # how often copied tokens are right, by the bits of the length of their match
        self.copy_rates = [Beta(prior=1 - 0.5**k) for k in range(1 + DEPTH.bit_length())]
        self.balance = STAKE
        self.chosen = Counter()
        # what is known before a round
        self.n = 0              # tokens of the longest text
        self.room = most        # the longest draft
        self.grown = 1.0        # the cost of a pass over one token, relative to one in a short text
        self.passes = []        # the cost of a pass over 0, 1, 2, ... tokens of each row
        self.copies = []        # of each row: what suffix lookup would copy
        # the choice: the arm that drafts, and what the round costs if it drafts 0, 1, ... tokens
        self.arm = self.nothing
        self.round_costs = [1.0]
        self.holds_for = 0      # rounds from now on
        self.held_for = 0       # rounds, counted when it was made
        # the count of tokens
        self.written = []       # of each row
        self.least = 0          # the fewest of a row that was not finished

    def begin(self, state, trace):
        same_model(self.model, state)
        super().begin(state, trace)
        self.written = [0] * len(state.known)
        self.passes = [self.costs.pass_cost(T, len(state.known)) for T in range(self.most + 3)]
        self.least = 0
        self.holds_for = 0
        for rate in (arm.drafter.rule.acceptance for arm in self.arms):
            rate.fade(PRIOR / max(PRIOR, rate.hits + rate.misses))      # another text

    def cost(self, arm, g):
        """The cost, in passes, of a round: choose an arm, draft g tokens and verify them."""
        rounds = 1 if arm is self.copying else 1 + self.pause   # that share the time for choosing
        thinking = self.thinking / rounds * (g > 0)
        return thinking + arm.drafting(self.n, g) + self.passes[1 + g]

    def covered(self, cost):
        """Whether the balance covers a round of this cost if nothing is accepted."""
        return (cost - 1) * self.grown <= self.balance

    def promise(self, arm, alpha):
        """(tokens per pass, g) at the best length whose cost the balance covers, or (1, 0) if none
        gains. What an arm reads first occurs once, so it only counts against the balance."""
        best = 1.0
        length = 0
        tokens = 1.0
        reach = 1.0
        further = arm.further(self.n)
        catch_up = arm.drafting(self.n, 0)
        for g in range(1, min(arm.longest, self.room) + 1):
            reach *= alpha
            tokens += reach
            cost = self.cost(arm, g)
            if not self.covered(cost):
                break
            if tokens > best * (cost - catch_up):
                best = tokens / (cost - catch_up)
                length = g
            elif reach < best * further:    # each further token adds less than it costs
                break
        return best, length

    def choose(self):
        """Take the arm that promises most. An arm that was little tried has an optimistic estimate,
        so that it is explored."""
        self.copying.longest = max(map(len, self.copies))
        alphas = {self.copying: self.copy_rate()}
        for arm in self.arms:
            alphas[arm] = arm.drafter.rule.acceptance.high()
        promises = {arm: self.promise(arm, alpha) for arm, alpha in alphas.items()}
        arm = max(promises, key=promises.get)
        rate, length = promises[arm]
        if rate <= 1 + MARGIN:
            self.take(self.nothing, 0)
        elif arm is self.copying:
            self.take(arm, length)
        else:
            self.take(arm, self.length_for(arm))

    def copy_rate(self):
        """The acceptance rate of what may be copied now, on average over the rows. A long match is
        right more often than a short one."""
        rates = [self.copy_rates[m.bit_length()].mean() if m else 0.0 for m in self.lookup.matched]
        return sum(rates) / len(rates)

    def length_for(self, arm):
        """The longest draft of an arm: any length that its rule allows, if the rule is asked. The
        rule's bars are made for what the arm brings, not for what it might bring."""
        rule = arm.drafter.rule
        rate, length = self.promise(arm, rule.acceptance.mean())
        if not rule.asks:
            return max(1, length)
        further = arm.further(self.n)
        rule.bars = [rate * (further + more - less) for less, more in pairwise(self.passes[2:])]
        return min(self.room, arm.longest)

    def take(self, arm, length):
        """Choose this arm, with as many of these tokens as the balance covers."""
        costs = [self.cost(arm, g) for g in range(1 + length)]
        self.arm = arm
        self.round_costs = list(takewhile(self.covered, costs))
        if not self.round_costs:
            self.arm = self.nothing
            self.round_costs = [1.0]
        elif arm in self.arms:
            arm.drafter.rule.longest = len(self.round_costs) - 1

    def decide(self, state):
        """Choose how this round drafts. A choice that is made again holds longer, for at most
        `pause` rounds, but what may be copied is new in every round."""
        self.copies = [[]] * len(state.known)
        self.holds_for -= 1
        last = self.arm
        if self.holds_for >= 0:
            self.take(last, len(self.round_costs) - 1)
            return
        self.lookup.enter(state)
        self.copies = self.lookup.found(state)
        self.n = max(state.lengths)
        self.room = min(self.most, max(state.room))
        self.grown = self.pass_price(self.n) / self.costs.whole
        self.choose()
        same = self.arm is last is not self.copying
        self.held_for = min(self.pause, 2 * self.held_for + 1) * same
        self.holds_for = self.held_for

    def propose(self, state):
        self.decide(state)
        self.chosen[self.arm.name] += 1
        return self.arm.drafter.propose(state).cut(len(self.round_costs) - 1)

    def observe(self, state, r):
        cost = self.round_costs[r.p.shape[1] - 1]
        self.written = [n + len(new) for n, new in zip(self.written, r.new, strict=True)]
        least = min(n for n, new in zip(self.written, r.new, strict=True) if new)
        self.balance += ((1 + RISK) * (least - self.least) - cost) * self.grown
        self.least = least
        for arm in self.arms:
            arm.drafter.observe(state, r)
        self.learn_copies(r.new)

    def learn_copies(self, new):
        """Compare what could have been copied with what was written, whichever arm drafted."""
        for m, copied, row in zip(self.lookup.matched, self.copies, new, strict=True):
            same = [x == y for x, y in zip(copied, row, strict=False)]
            if same:
                right = [*same, False].index(False)
                rate = self.copy_rates[m.bit_length()]
                rate.fade(FADE)
                rate.add(right, right < len(same))

    def summary(self):
        """How often each arm drafted, and its present estimates, as one line."""
        why = {}
        for arm in self.arms:
            alpha = f"{arm.drafter.rule.acceptance.mean():.0%} accepted"
            why[arm.name] = f" ({alpha}, each token costs {arm.further(self.n):.0%} of a pass)"
        often = self.chosen.most_common()
        return ", ".join(f"{name} in {count} rounds{why.get(name, '')}" for name, count in often)
