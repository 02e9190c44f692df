"""Before every draft, choose how to draft and how far, for the most tokens per second.

Costs are known before a round begins, in passes of the target over one token of a short text.
Acceptance rates are learnt, an arm's from its own drafts, and a copy's from the text, whether it
was drafted or not. With a clock, costs are learnt as well.

Guarantee: a round begins only if the balance covers what it costs with nothing accepted, so the
balance never falls below 0. Hence a text costs at most STAKE + (1 + RISK) x what plain decoding of
the same tokens costs, and what earlier texts have saved, however bad the drafts are.
"""
from collections import Counter
from dataclasses import dataclass
from itertools import takewhile

from control import MOST
from drafter import Draft, Drafter
from layerskip import same_model
from methods.arms import Arm, Copies, candidates
from methods.costs import Line, bar, between, by_weights, promise
from methods.counts import Shortest
from methods.watch import Watch
from methods.wrapper import Wrapper

STAKE = 8.0     # passes that a text may lose before it wins anything
RISK = 0.005    # what exploring may cost, as a share of plain decoding
MARGIN = 0.05   # an arm must promise this much more than plain decoding
EARLIER = 8     # tests that all earlier texts count for
OVERHEAD = 0.01     # the largest share of a round's time that choosing, or a stop rule, may take


@dataclass
class Choice:
    """How rounds draft until the next choice."""
    arm: Arm
    costs: list             # of a round with 0, 1, ... tokens of this arm
    thinking: float = 0.0   # what choosing has cost in this round
    reading: float = 0.0    # what the arm must read first in this round
    lasted: float = 0.0     # what the rounds with this arm have cost
    holds: float = 0.0      # what rounds may cost until the next choice


class Pace(Wrapper):
    """Before each round, choose the arm and the draft length that promise the most tokens per unit
    of cost.

    No drafter around Pace may change its drafts. The arms, by default `candidates(model, machine)`,
    have Calibrated rules, and suffix lookup joins them. `machine` is by default counted in weights.
    `clock` is a function that returns seconds, in which the machine must then be measured; what the
    clock says may change drafts, never the text. What is learnt persists across runs, and `chosen`
    counts the rounds per arm.

    In a batch the rows share each pass and so the arm. The guarantee counts the tokens of the row
    with the fewest, without the prompt. Where a round is short next to the time for choosing, a
    choice holds for several rounds.
    """

    def __init__(self, model, arms=None, machine=None, longest=MOST, clock=None):
        machine = machine or by_weights(model.c)
        self.model = model
        self.longest = longest
        self.arms = candidates(model, machine) if arms is None else list(arms)
        self.copies = Copies()
        self.nothing = Arm("nothing", Drafter(), Line(0.0))
        self.machine = machine
        # a pass over 0, 1, 2, ... tokens relative to one
        self.wide = [between(machine.wide, max(1, T)) for T in range(longest + 2)]
        self.watch = Watch(clock, machine.unit)
        self.balance = STAKE
        self.shortest = Shortest(0)
        self.choice = Choice(self.nothing, [1.0])
        self.chosen = Counter()
        super().__init__(*(arm.drafter for arm in self.arms), self.copies.drafter)

    def begin(self, state, trace):
        same_model(self.model, state)
        super().begin(state, trace)
        self.shortest = Shortest(len(state.known))
        self.choice.holds = 0.0
        self.balance = max(self.balance, STAKE)     # for each text
        for rate in (arm.drafter.rule.acceptance for arm in self.arms):
            rate.fade(EARLIER / max(EARLIER, rate.hits + rate.misses))

    def propose(self, state):
        self.watch.start()
        self.decide(state)
        if self.watch.due():
            self.chosen[self.nothing.name] += 1
            return Draft.none(state)
        arm = self.choice.arm
        longest = len(self.choice.costs) - 1
        if arm in self.arms:
            arm.drafter.rule.longest = longest
        unread = arm.catch_up()
        draft = arm.propose(state).cut(longest)
        K = draft.tokens.shape[1]
        self.chosen[arm.name if K else self.nothing.name] += 1
        # copies cost nothing, and a GPU is still drafting
        if K and arm in self.arms and not state.n.is_cuda:
            self.watch.stop(arm, unread + arm.cost(max(state.lengths), K))
        return draft

    def decide(self, state):
        """Choose how this round drafts. Where choosing takes long and the same arm wins again, the
        choice holds for more rounds, and nothing else is looked at until then."""
        n = max(state.lengths)
        room = min(self.longest, max(state.room))
        last = self.choice
        if last.holds > 0 or self.watch.ratio("thinking") > self.balance:
            arm = self.nothing if last.arm is self.copies else last.arm
            self.choice = self.offer(arm, n, min(room, len(last.costs) - 1))
            self.choice.lasted = last.lasted
            self.choice.holds = last.holds
            return
        thinking = self.watch.ratio("thinking")
        self.copies.look(state)
        self.choice = self.choose(n, room, thinking)
        if self.choice.arm is last.arm is not self.copies:
            self.choice.lasted = last.lasted
            self.choice.holds = min(last.lasted, thinking / OVERHEAD)
        self.watch.stop("thinking")

    def costs(self, arm, n, room):
        """What a round with 0, 1, ... tokens of this arm costs, by the table and the clock."""
        plain = self.machine.verify(n)
        wide = self.watch.ratio("wide")
        ratio = self.watch.ratio(arm)
        once = ratio * arm.once
        each = ratio * arm.each.at(n)
        passes = self.wide[2 : 2 + min(arm.longest, room)]
        return [plain, *(once + g * each + plain * max(1.0, wide * relative)
                         for g, relative in enumerate(passes, 1))]

    def offer(self, arm, n, room, thinking=0.0):
        """The Choice of an arm, with as many of these tokens as half of the balance covers if
        nothing is accepted. If one draft could lose all of it, no other would be made."""
        if room == 0:   # nothing to decide, in most rounds where no draft gains
            return Choice(arm, [self.machine.verify(n)], thinking)
        plain, *costs = self.costs(arm, n, room)
        reading = self.watch.ratio(arm) * arm.catch_up()
        spare = self.balance / 2 + plain - thinking - reading
        covered = takewhile(lambda cost: cost <= spare, costs)
        return Choice(arm, [plain, *covered], thinking, reading)

    def choose(self, n, room, thinking):
        """The Choice that promises most, if that is more than MARGIN above plain decoding. Catching
        up with the text is paid once, so it is charged to the balance but not to the rate."""
        best = (1 + MARGIN) / self.machine.verify(n)
        found = self.offer(self.nothing, n, 0, thinking)
        length = 0
        for arm in (self.copies, *self.arms):
            choice = self.offer(arm, n, room, thinking)
            speed, far = promise(choice.costs, arm.hope())
            if speed > best:
                best = speed
                found = choice
                length = far
        if found.arm in self.arms:
            length = self.length_for(found)
        del found.costs[1 + length :]
        return found

    def length_for(self, choice):
        """The longest draft of an arm: any length that its rule allows, if the rule is asked. The
        stop thresholds use the mean acceptance, not the optimistic one."""
        rule = choice.arm.drafter.rule
        alpha = rule.acceptance.mean()
        speed, length = promise(choice.costs, alpha)
        if not rule.asks:
            return max(1, length)
        rule.bars = [bar(choice.costs[k:], speed, alpha) for k in range(1, len(choice.costs))]
        return len(choice.costs) - 1

    def observe(self, state, r):
        choice = self.choice
        K = r.p.shape[1] - 1
        plain = choice.costs[0]
        if not state.n.is_cuda:
            self.watch.passed(plain * self.wide[1 + K], K == 0)
        cost = choice.costs[K] + choice.thinking + choice.reading * (K > 0)
        won = self.shortest.gain(r.new) * plain
        self.balance += (1 + RISK) * won - cost
        choice.lasted += cost
        choice.holds -= cost
        for arm in self.arms:
            arm.drafter.observe(state, r)
        self.copies.learn(r.new)

    def summary(self):
        """One line that says how often each arm drafted, if it did, and why: how many of its tokens
        are accepted, what each costs, and what its best draft therefore writes for what a pass
        takes, where plain decoding writes 1."""
        said = []
        for arm in self.arms:
            if not self.chosen[arm.name]:
                continue
            alpha = arm.drafter.rule.acceptance.mean()
            speed, _ = promise(self.costs(arm, 0, self.longest), alpha)
            said.append(f"{arm.name} {self.chosen[arm.name]} ({alpha:.0%} accepted, "
                        f"cost {self.watch.ratio(arm) * arm.each.start:.2f}, "
                        f"promise {speed:.2f})")
        for arm in (self.copies, self.nothing):
            if self.chosen[arm.name]:
                said.append(f"{arm.name} {self.chosen[arm.name]}")
        return "rounds: " + ", ".join(said)
