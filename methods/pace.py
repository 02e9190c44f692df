"""Pace: before every draft, choose how to draft and how far, so that the time buys the most tokens.

Prices are known before a round begins, in passes of the target over one token:

    an arm          a way to draft, with a cost for g drafts, their verification included
    an exit         a trace of the target shows what it would have drafted, also while others draft
    an n-gram       the text shows what it would have copied; as a tail it continues another arm's draft
    all else        skip sets and trained heads: only their own drafts show what they are worth

Guarantee: a round begins only if the balance covers its cost with nothing accepted, so the balance never
falls below 0; hence cost <= STAKE + (1 + risk) x tokens, whatever the drafts are worth.
"""
from dataclasses import replace
from functools import cache

import torch

from control import MOST, Beta, weight_costs
from methods.arms import FADE, Arm, candidates
from methods.drafting import same_model
from methods.dynamic import last_places, overlaps
from methods.then import Then
from speculative import Drafter, NGram, Rule, Wrapper

STAKE = 2.0     # passes that may be lost before anything is won
EVERY = 16      # rounds between two explorations
TAIL = 8        # tokens that an n-gram may copy
WINDOW = 32     # places at the prompt's end on which the exits are scored
TRIAL = 3       # tokens that are drafted to explore an arm
IDLE = 3        # rounds without a thought where nothing gains, unless the text repeats itself
MARGIN = 0.05   # an arm must promise this much more than plain decoding, since choosing takes time, too


class Pace(Wrapper):
    """Draft in the way, and as far, as promises the most tokens for the time; the outermost drafter. arms: by
    default `candidates(model, costs)`; their drafters have a Calibrated rule. costs: a Costs table, by
    weights unless given. risk: what exploring may cost, as a part of plain decoding. most: the longest draft,
    which a tail may exceed. What is learnt outlives the run. chosen: {name: rounds}.

    In a batch the rows share each pass, and so the arm; the guarantee counts the tokens of the row that has
    the fewest. Not in the prices: the prompt, and the time that choosing takes.
    """

    def __init__(self, model, arms=None, costs=None, risk=0.01, most=MOST):
        self.model, self.costs, self.risk = model, costs or weight_costs(model.c), risk
        self.most = Rule(most).most                 # checked like any other length
        self.arms = candidates(model, self.costs) if arms is None else list(arms)
        self.lookup = NGram(TAIL, 3, again=True)
        self.nothing, self.copying = (Arm(name, drafter, lambda n: 0.0) for name, drafter in (
            ("nothing", Drafter()), ("n-gram", self.lookup)))
        super().__init__(*(arm.drafter for arm in self.arms), self.lookup)
        self.exits = [arm for arm in self.arms if arm.leaves]
        self.needed, last = bool(self.taps), 2 * model.c.n_layers - 1
        self.taps = tuple(sorted({*self.taps, last, *(2 * arm.leaves - 1 for arm in self.exits)}))
        self.whole = self.costs.pricing(range(last + 1))
        self.copied, self.tails = Beta(), Beta()    # tokens copied right; the same per round without a copy
        self.balance, self.chosen, self.due = STAKE, {}, 0
        self.n = 0      # how long the text is

    def begin(self, state, trace):
        same_model(self.model, state)
        super().begin(state, trace)
        rows = len(state.known)
        self.before, self.written, self.least = [True] * rows, [0] * rows, 0
        self.block = cache(lambda T: self.costs.block(rows * T) / self.costs.block(rows))
        self.arm, self.idle = self.nothing, 0
        for arm in self.arms:       # another text: what is known counts as two drafts
            arm.drafter.rule.skill = Beta(prior=arm.drafter.rule.past.mean())
        self.look(state)
        loss = (self.scoring(WINDOW) + self.costs.head / self.costs.whole * self.block(WINDOW)) * self.grown
        if self.exits and self.most and loss <= self.balance - STAKE / 2:
            self.balance -= loss
            places, true = last_places(state, trace, WINDOW)
            self.score(state, places, state.probs(self.model.unembed(places[self.taps[-1]])), true.tolist())

    # --- before a round

    def look(self, state):
        """How long the text is, how far a draft may go, and how much dearer a pass is than a first one."""
        self.n, self.room = max(map(len, state.known)), max(0, min(self.most, max(state.left_cpu) - 1))
        self.grown = self.whole(self.n) / self.costs.whole

    def cost(self, arm, g, T, tail=False):
        """Passes that a round costs that drafts g tokens with an arm and verifies T tokens."""
        return arm.once(self.block) + g * arm.price(self.n) + arm.shared * tail + self.block(T)

    def promise(self, arm, alpha, most, tail=False):
        """(tokens per pass, g) at the best length whose cost the balance covers; (1, 0) if none gains."""
        best, length, tokens, reach, price = 1.0, 0, 1.0, 1.0, arm.price(self.n)
        gain = self.tails.hits / (self.tails.misses + 1) if tail else 0.0   # where all g are accepted
        for g in range(1, min(most, arm.most, self.room) + 1):
            reach *= alpha
            tokens += reach
            cost = self.cost(arm, g, 1 + g + TAIL * tail, tail)
            if (cost - 1) * self.grown > self.balance:
                break
            if tokens + reach * gain > best * cost:
                best, length = (tokens + reach * gain) / cost, g
            elif reach < best * price:      # each further token adds less than it costs
                break
        return best, length

    def choose(self):
        """Set arm, tail and the length to what promises most; now and then to what might."""
        self.arm, self.tail, self.length, self.rate = self.nothing, False, 0, 1 + MARGIN
        share = sum(map(bool, self.found)) / len(self.found)        # of the rows that an n-gram can continue
        options = [(self.copying, share * self.copied.mean(), max(map(len, self.found)), False)]
        tails = (False, True) if self.tails.hits > 0.2 * self.tails.misses else (False,)
        options += [(arm, arm.drafter.rule.skill.mean(), MOST, tail) for arm in self.arms for tail in tails]
        self.due -= 1
        if self.due <= 0:
            self.due, self.scores = EVERY, bool(self.exits)
            options += [(arm, arm.drafter.rule.skill.high(), TRIAL, False)
                        for arm in self.arms if not arm.leaves]
        for arm, alpha, most, tail in options:
            rate, length = self.promise(arm, alpha, most, tail)
            if rate > self.rate:
                self.arm, self.tail, self.length, self.rate = arm, tail, length, rate

    def propose(self, state):
        self.found, self.scores = self.lookup.found(state), False
        self.idle = 0 if any(self.found) else max(0, self.idle - 1)
        if not self.idle:
            self.look(state)
            self.choose()
            self.prepare()
        name = self.arm.name + ", then n-gram" * self.tail
        self.chosen[name] = self.chosen.get(name, 0) + 1
        traced = bool(self.scores or self.needed)       # what is not traced can be replayed from a recording
        self.pair = Then(self.arm.drafter, self.lookup) if self.tail else None
        draft = (self.pair or self.arm.drafter).propose(state if traced else replace(state, taps=()))
        return replace(draft.cut(self.length + TAIL * self.tail), traced=traced)

    def prepare(self):
        """Spare some rounds where nothing gains; otherwise let the rule stop, or go on as far as is paid."""
        worst = self.cost(self.arm, self.length, 1 + self.length + TAIL * self.tail, self.tail)
        spare = self.balance - (worst - 1) * self.grown
        self.scores = self.scores and self.scoring(1 + self.length + TAIL * self.tail) * self.grown <= spare
        if self.arm is self.nothing:
            self.idle = 0 if self.scores else IDLE
        elif self.arm is not self.copying:
            rule, price = self.arm.drafter.rule, self.arm.price(self.n)
            rule.bars = [self.rate * (price + self.block(k + 3) - self.block(k + 2))
                         for k in range(self.arm.most)]
            rule.most = self.length
            while not self.scores and rule.most < min(self.room, self.arm.most):
                T = 2 + rule.most + TAIL * self.tail
                if (self.cost(self.arm, rule.most + 1, T, self.tail) - 1) * self.grown > self.balance:
                    break
                rule.most += 1
            self.length = rule.most

    # --- after a round

    def observe(self, state, r):
        T, drawn = r.p.shape[1], self.arm not in (self.nothing, self.copying)
        self.drafted = len(self.arm.drafter.rule.sure) if drawn else 0
        cost = self.cost(self.arm, self.drafted, T, self.tail) + (self.scoring(T) if self.scores else 0.0)
        self.written = [n + len(new) for n, new in zip(self.written, r.new, strict=True)]
        least = min(n for n, new in zip(self.written, r.new, strict=True) if new)
        self.balance += ((1 + self.risk) * (least - self.least) - cost) * self.grown
        self.least = least
        for arm in self.arms:
            if arm is not self.arm:
                arm.drafter.rule.fade()     # the one that drafted does so itself
            (self.pair if self.tail and arm is self.arm else arm.drafter).observe(state, r)
        if not self.tail:
            self.lookup.observe(state, r)
        if self.scores:
            true = [[k < len(new) for k in range(T)] for new in r.new]
            self.score(state, r.trace, r.p, true)
        self.read(r)

    def scoring(self, places):
        """Passes that it costs to see what each exit would have drafted there: rows of the head, and
        half as much again to compare p and q."""
        share = sum(getattr(arm.drafter.model, "share", 1.0) for arm in self.exits)
        return 1.5 * share * self.costs.head / self.costs.whole * self.block(places)

    def score(self, state, trace, p, true):
        """Count what the exits would have drafted at the places where true[b][k]."""
        for arm in self.exits:
            if arm is not self.arm:
                logits = arm.drafter.model.unembed(trace[2 * arm.leaves - 1])
                hits, sure = torch.stack(overlaps(state.probs, p, logits)).tolist()         # (B, T) both
                for b, places in enumerate(true):
                    for k in (k for k, yes in enumerate(places) if yes):
                        arm.drafter.rule.count(hits[b][k], int(10 * sure[b][k]))

    def read(self, r):
        """Count what an n-gram would have copied, whatever drafted: the text shows it."""
        for b, new in enumerate(r.new):
            same = [x == y for x, y in zip(self.found[b], new, strict=False)]
            right = [*same, False].index(False)
            if same:
                self.copied.fade(FADE)
                self.copied.add(right, right < len(same))
            if new and not self.before[b]:
                self.tails.fade(FADE)
                self.tails.add(right, 1)
            self.before[b] = bool(same)

    def beliefs(self):
        """{name: (acceptance rate as believed now, passes per drafted token)} of each arm."""
        known = {arm.name: (arm.drafter.rule.skill.mean(), arm.price(self.n)) for arm in self.arms}
        return known | {"n-gram": (self.copied.mean(), 0.0)}
