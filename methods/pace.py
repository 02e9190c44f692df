"""Pace: before every draft, choose how to draft and how far, for the most tokens per second.

Prices are known before a round begins, in target passes over one token. Acceptance rates are learnt: those of
copies from the text, which shows what they would have been worth, all others from their own drafts.

Guarantee: a round begins only if the balance covers its cost with nothing accepted, so the balance
never falls below 0. Hence cost <= STAKE + (1 + risk) x tokens, however bad the drafts are.
"""
from functools import cache

from control import MOST, Beta, weight_costs
from methods.arms import FADE, KNOWN, Arm, candidates
from methods.drafting import same_model
from methods.suffix import DEPTH, Suffix
from methods.then import Then
from speculative import Drafter, Wrapper

STAKE = 2.0     # passes that may be lost before anything is won
MARGIN = 0.05   # an arm must promise this much more than plain decoding, since choosing takes time, too
EVERY = 16      # rounds between two explorations
IDLE = 4        # rounds in which only copies are weighed, once nothing gains
TAIL = 7        # tokens that may be copied: with the last one a block of eight, as recorded ones are


class Pace(Wrapper):
    """Draft with the arm and the length that promise the most tokens per pass; the outermost
    drafter. arms: by default `candidates(model, costs)`; their drafters have a Calibrated rule. Suffix
    lookup drafts, too, and may continue an arm's draft (its tail). costs: a Costs table, by default
    counted in weights. risk: what exploring may cost, as a share of plain decoding. most: the
    longest draft, which a tail may exceed. What is learnt outlives the run. chosen: {name: rounds}.

    In a batch the rows share each pass, and so the arm; the guarantee counts the tokens of the row
    with the fewest. The prices leave out the prompt and the time that choosing takes.
    """

    def __init__(self, model, arms=None, costs=None, risk=0.01, most=MOST):
        self.model, self.costs, self.risk, self.most = model, costs or weight_costs(model.c), risk, most
        self.arms = candidates(model, self.costs) if arms is None else list(arms)
        self.lookup = Suffix(TAIL, factor=4.0)      # Pace itself cuts what is too long
        self.nothing, self.copying = (Arm(name, drafter, lambda n: 0.0) for name, drafter in (
            ("nothing", Drafter()), ("suffix", self.lookup)))
        super().__init__(*(arm.drafter for arm in self.arms), self.lookup)
        self.whole = self.costs.pricing(range(2 * model.c.n_layers))
        # of copied tokens, by the number of bits of the length that matched; of tails: tokens, rounds
        self.copied, self.tails = [Beta(prior=1 - 0.5**k) for k in range(1 + DEPTH.bit_length())], Beta()
        self.balance, self.chosen, self.due, self.n = STAKE, {}, 0, 0

    def begin(self, state, trace):
        same_model(self.model, state)
        super().begin(state, trace)
        rows = len(state.known)
        self.arm, self.written, self.least, self.idle = self.copying, [0] * rows, 0, 0
        self.block = cache(lambda T: self.costs.block(rows * T) / self.costs.block(rows))
        for skill in (arm.drafter.rule.skill for arm in self.arms):
            skill.fade(KNOWN / max(KNOWN, skill.hits + skill.misses))   # another text

    # --- before a round

    def look(self, state):
        """Set the text's length, the longest draft, and the cost of a pass relative to the first one."""
        self.n, self.room = max(map(len, state.known)), max(0, min(self.most, max(state.left_cpu) - 1))
        self.grown = self.whole(self.n) / self.costs.whole

    def cost(self, arm, g, tail=0):
        """The cost, in passes, of a round: g tokens of an arm, `tail` copied ones, and the verification."""
        lost = arm.shared if tail else 0.0
        return arm.once + g * arm.price(self.n) + lost + self.block(1 + g + tail)

    def covered(self, cost):
        """Whether the balance covers a round of this cost if nothing is accepted."""
        return (cost - 1) * self.grown <= self.balance

    def promise(self, arm, alpha, tail=0):
        """(tokens per pass, g) at the best length whose cost the balance covers; (1, 0) if none gains. What
        the arm must read first it reads once, so that is covered, but lowers no promise."""
        best, length, tokens, reach, price = 1.0, 0, 1.0, 1.0, arm.price(self.n)
        late = arm.late(self.block)
        gain = self.tails.hits / (self.tails.misses + 1) if tail else 0.0   # if all g are accepted
        for g in range(1, min(arm.most, self.room) + 1):
            reach *= alpha
            tokens += reach
            cost = self.cost(arm, g, tail)
            if not self.covered(late + cost):
                break
            if tokens + reach * gain > best * cost:
                best, length = (tokens + reach * gain) / cost, g
            elif reach < best * price:      # each further token adds less than it costs
                break
        return best, length

    def choose(self):
        """Set arm, tail and length to what promises most; every `EVERY` rounds, to what might."""
        self.due -= 1
        self.arm, self.tail, self.length, self.rate = self.nothing, 0, 0, 1 + MARGIN
        known = [self.copied[m.bit_length()].mean() if m else 0.0 for m in self.matched]
        self.copying.most = max(map(len, self.found))
        options = [(self.copying, sum(known) / len(known), 0)]
        if awake := self.idle == 0:
            tails = (0, TAIL) if self.tails.hits > 0.2 * self.tails.misses else (0,)
            options += [(arm, arm.drafter.rule.skill.mean(), tail) for arm in self.arms for tail in tails]
            if self.due <= 0:
                self.due = EVERY
                options += [(arm, arm.drafter.rule.skill.high(), 0) for arm in self.arms]
        for arm, alpha, tail in options:
            rate, length = self.promise(arm, alpha, tail)
            if rate > self.rate:
                self.arm, self.tail, self.length, self.rate = arm, tail, length, rate
        self.idle = IDLE * (self.arm is self.nothing) if awake else self.idle - 1
        self.late = self.arm.late(self.block)
        if self.arm not in (self.nothing, self.copying):    # its rule ends the draft, or the balance does
            rule, price, most = self.arm.drafter.rule, self.arm.price(self.n), min(self.room, self.arm.most)
            rule.bars = [self.rate * (price + self.block(k + 3) - self.block(k + 2)) for k in range(most)]
            while (self.length < most
                   and self.covered(self.late + self.cost(self.arm, self.length + 1, self.tail))):
                self.length += 1
            rule.most = self.length

    def propose(self, state):
        self.copied_before, self.found = self.arm is self.copying, self.lookup.found(state)
        self.matched = self.lookup.matched      # trap: a tail looks up anew
        self.look(state)
        self.choose()
        name = self.arm.name + ", then suffix" * bool(self.tail)
        self.chosen[name] = self.chosen.get(name, 0) + 1
        self.way = Then(self.arm.drafter, self.lookup) if self.tail else self.arm.drafter
        return self.way.propose(state).cut(self.length + self.tail)

    # --- after a round

    def observe(self, state, r):
        drawn = self.arm not in (self.nothing, self.copying)
        self.drafted = len(self.arm.drafter.rule.sure) if drawn else 0
        cost = self.late + self.cost(self.arm, self.drafted, r.p.shape[1] - 1 - self.drafted)
        self.written = [n + len(new) for n, new in zip(self.written, r.new, strict=True)]
        least = min(n for n, new in zip(self.written, r.new, strict=True) if new)
        self.balance += ((1 + self.risk) * (least - self.least) - cost) * self.grown
        self.least = least
        self.way.observe(state, r)
        for arm in self.arms:
            if arm is not self.arm:
                arm.drafter.observe(state, r)
        self.lookup.observe(state, r)
        self.read(r)

    def read(self, r):
        """Count what would have been copied, whichever arm drafted: the text shows it."""
        for copy, m, new in zip(self.found, self.matched, r.new, strict=True):
            same = [x == y for x, y in zip(copy, new, strict=False)]
            right = [*same, False].index(False)
            if same:
                self.copied[m.bit_length()].fade(FADE)
                self.copied[m.bit_length()].add(right, right < len(same))
            if new and not self.copied_before:      # where a tail would have begun
                self.tails.fade(FADE)
                self.tails.add(right, 1)

    def summary(self):
        """One line: how often each arm drafted, and its present estimates."""
        why = {arm.name: f" ({arm.drafter.rule.skill.mean():.0%} accepted, each token costs "
                         f"{arm.price(self.n):.0%} of a pass)" for arm in self.arms}
        often = sorted(self.chosen.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} in {count} rounds{why.get(name, '')}" for name, count in often)
