"""Pace: before every draft, choose how to draft and how far, so that the time buys the most tokens.

The one thing to remember: the prices are known beforehand, so whatever an experiment can lose is known, too,
and no more is risked than was saved for it. Hence a promise that we found in no published system: by its
prices never slower than plain decoding by more than `risk`, and the STAKE of two passes, whatever drafts.

    nothing         costs 1 pass and writes 1 token: the unit for everything else
    an exit         a trace of the target tells what it would have drafted, also while others draft
    an n-gram       the text itself tells what it would have copied
    all else        skip sets and trained heads: only their own drafts tell, so each is tried again where it
                    may well be better than what drafts now (a head's file says what to expect at first)

Prices are relative to a pass of the target over one token, as everywhere, and grow with the text.
"""
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch

from control import MOST, Beta, weight_costs
from layerskip import SelfDraft, ShortHead, early_exit, shared_prefix
from methods.drafting import same_model
from methods.dynamic import last_places, overlaps
from methods.heads import pricing, shorter
from sampling import raw_probs
from speculative import Draft, Drafter, NGram, Rule, Then, Wrapper

TAIL = 8        # tokens that an n-gram may add, or copies alone
WINDOW = 32     # the prompt's last places, which tell the first alphas
STAKE = 2.0     # what may be lost before anything is won, in passes: 1 % of two hundred tokens
FEW = 0.2       # tokens that an n-gram has to add on average, to be weighed
TRIAL = 3       # tokens that are drafted to try a way out
HOPE = 5.0      # an experiment must be able to win back in so many rounds what it loses
SHADOW = 1.5    # what it takes to score an exit at a place, in rows of the head: p and q are compared, too
TRUST = 0.98    # the part of the counts in `trust` that stays after each new token
MARGIN = 0.05   # so much more than plain decoding a draft must promise, as thinking takes time, too
SLOWER = 0.2    # what outlives a text fades by fade**SLOWER a round: five times slower
REST = 8        # where nothing promises a gain, rounds until it thinks again, unless the text repeats itself


@dataclass(eq=False)
class Way:
    """A way to draft. price(n): what a drafted token takes after n others, relative to a pass. `self_draft`
    and `head_draft` know all the rest:

    leaves: the block after which an early exit leaves, so that a trace tells what it would draft. shared: the
    part of a pass that is lost where an n-gram adds to its draft. once(block): what a round takes besides its
    tokens, such as to read what was missed. rides: (part, N): beside each token of the block N more rows run
    through this part of a pass (Hidden Transfer). most: the longest draft that it can make. stops: False for
    a drafter that does not ask after each token whether to stop, because it copies. alpha: how often its
    tokens are accepted, as far as that is known beforehand."""
    name: str
    drafter: Drafter
    price: Callable
    leaves: int | None = None
    shared: float = 0.0
    once: Callable = lambda block: 0.0
    rides: tuple = (0.0, 0)
    most: int = MOST
    stops: bool = True
    alpha: float = 0.5


def self_draft(name, model, sublayers, costs):
    """The Way of a SelfDraft. model: the target, or a ShortHead in its stead."""
    exact, share = shared_prefix(sublayers), getattr(model, "share", 1.0)
    leaves = exact // 2 if exact == len(sublayers) and exact % 2 == 0 else None
    own, whole = costs.pricing(sublayers, share), costs.pricing(range(2 * model.c.n_layers))
    return Way(name, SelfDraft(model, sublayers, 0), lambda n: own(n) / whole(n), leaves,
               sum(costs.sublayers[:exact]) / costs.whole)


def head_draft(head, costs, vocab=None):
    """The Way of a trained head (methods/heads.py), with a draft vocabulary (its ids) if there is one."""
    head = shorter(head, vocab) if vocab else head
    share = len(vocab) / head.model.c.vocab_size if vocab else 1.0
    way = Way(head.kind.replace("_", " "), head.drafter(0), pricing(head, costs, share),
              most=getattr(head, "steps", MOST), alpha=head.ranks[0] if head.ranks else 0.5)
    if "exit_layer" in head.shape:
        way.shared = sum(costs.sublayers[: 2 * head.shape["exit_layer"]]) / costs.whole
    whole = costs.pricing(range(2 * head.model.c.n_layers))
    if "rank" in head.shape:        # its second row runs for the last token, too, from which nobody drafts
        trunk = costs.pricing(range(2 * head.shape["exit_layer"]), 0.0)
        adapters = pricing(head, costs, 0.0)(costs.at) - trunk(costs.at) / whole(costs.at)
        way.once = lambda block: adapters
    if hasattr(way.drafter, "unread"):
        apart = "exit_layer" in head.shape  # an attention reads what it missed; an eagle's block, with D
        own = sum(costs.sublayers[: 1 if apart else 2]) / costs.whole
        way.once = lambda block: own * (block(max(1, way.drafter.unread)) - (not apart))
    if "inject_layer" in head.shape:
        way.rides = sum(costs.sublayers[2 * head.shape["inject_layer"] :]) / costs.whole, head.steps
        own = pricing(head, costs, 0.0)(costs.at) - costs.call / costs.whole
        spread, part = head.steps * own, costs.pricing((), share)
        way.once, way.price = lambda block: spread, lambda n: part(n) / whole(n)    # one matrix for all rows
    return way


def candidates(model, costs, skip=None, vocab=None, heads=()):
    """The usual ways: a few exits; a skip set (its sub-layers) if there is one; trained heads. All of them
    draft with a vocabulary of their own (its ids) if there is one."""
    L = model.c.n_layers
    drafting = ShortHead(model, vocab) if vocab else model
    exits = sorted({max(1, round(L * part)) for part in (1 / 12, 1 / 6, 1 / 4, 1 / 3)} - {L})
    drafts = {f"exit {e}": early_exit(L, e) for e in exits} | ({"skip set": skip} if skip else {})
    return ([self_draft(name, drafting, subs, costs) for name, subs in drafts.items()]
            + [head_draft(head, costs, vocab) for head in heads])


class Memory:
    """What is known of one text, or of all of them, as counts that fade: the part `keep` of them stays.
    skills: how often the tokens of each way are accepted. copied: how often those of an n-gram are. followed:
    what comes after rounds in which the n-gram had found nothing: how many rounds (misses), and how many of
    its tokens were right in them (hits)."""

    def __init__(self, alphas, keep, copied=0.5):
        self.skills, self.keep = [Beta(prior=alpha) for alpha in alphas], keep
        self.copied, self.followed = Beta(prior=copied), Beta()

    def fresh(self, keep):
        """For a new text: what is known here is known beforehand there. `followed` goes on as it is."""
        new = Memory([skill.mean() for skill in self.skills], keep, self.copied.mean())
        new.followed = replace(self.followed)
        return new

    def fade(self):
        for skill in self.skills:
            skill.fade(self.keep)

    def read(self, right, found, before):
        """Of an n-gram's `found` tokens so many were right; `before`: it had found some the time before. Its
        counts fade here, whenever the text tells of it again."""
        if found:
            self.copied.fade(self.keep)
            self.copied.add(right, right < found)
        if not before:
            self.followed.fade(self.keep)
            self.followed.add(right, 1)

    def tail(self):
        """How many tokens an n-gram is expected to add where a draft was accepted whole."""
        return self.followed.hits / (self.followed.misses + 1)


class Pace(Wrapper):
    """Draft in the way, and as far, as promises the most tokens for each unit of time; see above. It should
    be the outermost drafter.

    ways: a list of Way, whose drafters get a rule of its own; by default `candidates(model, costs)`. costs: a
    Costs table, by weights unless one is given. risk: what experiments may cost, as a part of plain decoding.
    most: the longest draft, to which an n-gram may add. What is learnt outlives the run, in `past`; each row
    starts from it and learns for itself, in `rows`, which fade by `fade` a round, but not while it rests.
    trust: how often a draft that was so sure of a token was right, of all rows. chosen: {name: rounds} over
    its life.

    In a batch the rows share each pass, and so the way, which is that of the most tokens over all rows. The
    promise holds for the row with the fewest new tokens, for each of which plain decoding needs a pass. What
    a fast row wins does not pay for a slow one. It is kept over the life of a Pace: what was won on one text
    may be lost on the next one. Where a batch is ragged, or another one larger, a pass is what it is for the
    longest row, and for that batch. Not in the prices, and so not in the promise: the reading of the prompt,
    the time of its own thinking, and what a recorded model loses in rounds that are traced.
    """

    def __init__(self, model, ways=None, costs=None, risk=0.01, most=MOST, fade=0.95):
        self.model, self.costs = model, costs or weight_costs(model.c)
        self.ways = candidates(model, self.costs) if ways is None else list(ways)
        self.lookup = NGram(TAIL, 3, again=True)
        self.nothing = Way("nothing", Drafter(), lambda n: 0.0)
        self.copying = Way("n-gram", self.lookup, lambda n: 0.0, stops=False)
        super().__init__(*(way.drafter for way in self.ways), self.lookup)
        told = Rule(0)      # is told how far to draft, and asks after each token whether one more would pay
        told.gamma = lambda state: self.lengths
        told.stop = lambda k, logits, token: self.enough(k, logits)
        for way in self.ways:
            way.drafter.rule = told
        self.exits = [i for i, way in enumerate(self.ways) if way.leaves]
        self.heads = {}     # {the model of some exits, or what stands in for it: these exits}
        for i in self.exits:
            self.heads.setdefault(self.ways[i].drafter.model, []).append(i)
        self.last, self.needed = 2 * model.c.n_layers - 1, self.taps
        self.own = {*(2 * self.ways[i].leaves - 1 for i in self.exits), self.last}
        self.taps = tuple(sorted({*self.needed, *self.own}))
        self.risk, self.most, self.fade = risk, Rule(most).most, fade   # checked like any other length
        self.whole = self.costs.pricing(range(2 * model.c.n_layers))
        self.past = Memory([way.alpha for way in self.ways], fade**SLOWER)
        self.purse = self.saved = STAKE
        self.trust = [[Beta(prior=min(i + 0.5, 9.5) / 10) for i in range(11)] for _ in self.ways]
        self.chosen, self.n = {}, 0
        self.start(1)

    def start(self, rows):
        """For so many rows: nothing is written yet, and what a pass over T tokens of each takes."""
        self.rows, self.written = [self.past.fresh(self.fade) for _ in range(rows)], [0] * rows
        self.least, self.begun, self.due, self.before = 0, None, 0.0, [True] * rows
        self.rest, self.rests = 0, False
        self.block = cache(lambda T: self.costs.block(rows * T) / self.costs.block(rows))
        self.fixed = {(way, tail): [way.shared * tail + self.checking(way)(T + TAIL * tail)
                                    for T in range(1, self.most + 2)]
                      for way in (self.nothing, self.copying, *self.ways) for tail in (False, True)}

    def begin(self, state, trace):
        same_model(self.model, state)
        super().begin(state, trace)
        few = {tap for tap in state.taps if tap not in self.own} | set(self.needed)
        self.few_taps, self.all_taps = tuple(sorted(few)), tuple(sorted(few | self.own))
        self.start(len(state.known))
        self.look(state)
        head = self.costs.head / self.costs.whole       # of the target itself
        loss = (self.scoring_price(WINDOW) + head * self.block(WINDOW)) * self.grown
        if self.exits and self.most and loss <= self.purse - STAKE / 2:
            self.purse -= loss
            places, true = last_places(state, {tap: trace[tap] for tap in self.own}, WINDOW)
            self.score(state, places, state.probs(self.model.unembed(places[self.last])), true.tolist())

    # --- what to do now

    def look(self, state):
        """How long the text is, how much dearer a pass is than one after `costs.at` tokens, and how much one
        token more will add to that."""
        self.n = max(map(len, state.known))
        self.grown = self.whole(self.n) / self.costs.whole
        self.slope = self.whole(self.n + 1) / self.whole(self.n) - 1

    def propose(self, state):
        self.live = [b for b, left in enumerate(state.left_cpu) if left > 0]
        self.found, self.sures = self.lookup.found(state), []
        self.rest = 0 if any(self.found) else max(0, self.rest - 1)
        self.rests = self.rest > 0
        if self.rests:      # all is as it was chosen last: nothing
            self.chosen[self.way.name] += 1
            return Draft.none(state)
        self.look(state)
        self.choose(state)
        state.taps = self.all_taps if self.scores else self.few_taps
        name = self.way.name + ", then n-gram" * self.tail
        self.chosen[name] = self.chosen.get(name, 0) + 1
        self.price, self.once = self.way.price(self.n), self.way.once(self.block)
        if self.way is self.copying:
            self.lookup.rule.most = max(self.lengths)
        elif self.way is not self.nothing:
            self.prepare(state)
        self.pair = Then(self.way.drafter, self.lookup) if self.tail else None
        draft = (self.pair or self.way.drafter).propose(state)
        self.lookup.rule.most = TAIL
        return draft

    def prepare(self, state):
        """What `enough` needs while tokens are drafted."""
        i = self.ways.index(self.way)
        self.check = self.checking(self.way)
        self.table = state.send([beta.mean() for beta in self.trust[i]])        # (11,)
        self.mean = state.send([row.skills[i].mean() for row in self.rows])     # (B,)
        self.reach = torch.ones_like(self.mean)     # how likely all drafted tokens so far are accepted

    def enough(self, k, logits):
        """After k + 1 drafted tokens: does what one more promises fall below its price, in tokens? (B,)"""
        tenth = (10 * raw_probs(logits).amax(-1)).int()                         # (B,) 0 to 10
        self.sures.append(tenth)
        self.reach = self.reach * self.table.index_select(0, tenth)
        more = self.price + self.check(k + 3) - self.check(k + 2)
        return self.reach * self.mean < self.rate * more

    def choose(self, state):
        """Set way, tail and lengths to what promises most; rate: how many tokens it promises for the time of
        a pass; scores: whether this round also scores the exits. Where nothing promises MARGIN more than 1,
        nothing is drafted. What may well be better than the best is tried out, if there is enough saved."""
        self.way, self.tail, self.lengths, self.scores = self.nothing, False, [0] * len(self.rows), False
        self.rate, doubted = 1 + MARGIN, []
        left = [max(0, min(self.most, left - 1)) for left in state.left_cpu]
        for way, tail, beliefs, rooms in self.options(left):
            bill = self.bill(way, tail)
            most = self.paid(bill)
            rooms = [min(most, room) for room in rooms]
            promise, lengths = self.promise([belief.mean() for belief in beliefs], rooms, bill, tail)
            if promise > self.rate:
                self.rate = promise
                self.take(way, tail, lengths, rooms)
            if self.saved >= self.due and not tail and way is not self.copying:
                high, lengths = self.promise([belief.high() for belief in beliefs], rooms, bill, tail)
                doubted.append((high, way, beliefs, lengths))
        if self.begun:                          # its rows rode along in the last round, and now it drafts
            self.try_out(*self.begun)
        elif doubted:
            self.experiment(sorted(doubted, key=lambda each: -each[0]))
        if self.way is self.nothing and not (self.begun or self.scores):
            self.rest = REST

    def options(self, left):
        """(way, tail, what is known of it in each row, how far it may draft there) of all there are."""
        copied = [row.copied for row in self.rows]
        yield self.copying, False, copied, list(map(min, map(len, self.found), left))
        tails = (False, True) if max(row.tail() for row in self.rows) > FEW else (False,)
        for i, way in enumerate(self.ways):
            skills = [row.skills[i] for row in self.rows]
            for tail in tails:
                yield way, tail, skills, [min(way.most, more) for more in left]

    def paid(self, bill):
        """The longest draft that the purse can pay for if none of it is accepted."""
        paid = 1 + self.purse / self.grown
        if bill(self.most) <= paid:
            return self.most
        return next(g for g in range(self.most) if bill(g + 1) > paid)

    def promise(self, alphas, rooms, bill, tail):
        """(tokens for the time of a pass, the best length of each row). Where a draft is accepted whole, a
        tail adds some tokens."""
        lengths, tokens = [], 0.0
        for b, (alpha, room) in enumerate(zip(alphas, rooms, strict=True)):
            best, length, most, expected, reach, before = 1.0, 0, 1.0, 1.0, 1.0, bill(0)
            after = self.rows[b].tail() if tail else 0.0
            for g in range(1, room + 1):
                reach *= alpha
                expected += reach
                written, taken = expected + reach * after, bill(g)
                if written > best * taken:
                    best, length, most = written / taken, g, written
                elif reach < best * (taken - before):   # nor will a longer one be: each adds less
                    break
                before = taken
            lengths.append(length)
            tokens += most * (b in self.live)
        longest = max(lengths)
        return (tokens / len(self.live) / bill(longest) if longest else 1.0), lengths

    def take(self, way, tail, lengths, rooms):
        """Draft so. A way that can stop may go on for as long as `enough` says."""
        self.way, self.tail, self.lengths = way, tail, lengths
        if way.stops:
            self.lengths = [room * (want > 0) for room, want in zip(rooms, lengths, strict=True)]

    # --- what it takes

    def checking(self, way):
        """T -> what the pass takes that verifies T tokens of each row, with the rows that ride along."""
        part, rows = way.rides
        if not rows:
            return self.block
        return lambda T: self.block(T) + part * (self.block(T * (1 + rows)) - self.block(T))

    def bill(self, way, tail):
        """g -> what a round takes in which g tokens are drafted, and a tail, relative to a pass over one
        token at its beginning. The text grows while it drafts."""
        once, price, fixed = way.once(self.block), way.price(self.n), self.fixed[way, tail]
        more, slope = TAIL * tail, self.slope
        return lambda g: (once + g * price + fixed[g]) * (1 + slope * (g + more))

    def pay(self, r):
        """Book what the round wrote and what it took. The purse is what was won over plain decoding, in
        passes over a text that has just begun. It never falls below 0."""
        T = r.p.shape[1]
        drafted = len(self.sures) or (max(self.pair.drafted) if self.tail else T - 1)
        again = self.tail and drafted > 0 and r.draft.reuse is None
        taken = self.once + drafted * self.price + self.way.shared * again + self.checking(self.way)(T)
        taken = taken * (1 + self.slope * (T - 1)) + (self.scoring_price(T) if self.scores else 0.0)
        for b in self.live:
            self.written[b] += len(r.new[b])
        least, before = min(self.written[b] for b in self.live), self.least
        self.purse += ((least - before) * (1 + self.risk) - taken) * self.grown
        self.saved = min(STAKE, self.saved + (least - before) * self.risk)
        self.least = least

    # --- what may be risked

    def scoring_price(self, places):
        """What it takes to see what every exit would have drafted at so many places: rows of the head."""
        return SHADOW * self.costs.head / self.costs.whole * sum(
            getattr(model, "share", 1.0) * self.block(len(exits) * places)
            for model, exits in self.heads.items())

    def experiment(self, doubted):
        """Spend what was saved on what may well be better than the best: score the exits in this round; or,
        if nothing tells of it but its own drafts, draft some tokens with it. If it is better, it must win
        back its average loss in HOPE rounds, and that is what is saved for. The worst loss must be in the
        purse, above the stake, which is only for drafts that promise a gain.

        doubted: [(what may well be promised, way, beliefs, by drafts of these lengths)], the best first. due:
        how much has to be saved before it is worth while to think again."""
        self.due, rate = 0.0, 1.0 if self.way is self.nothing else self.rate
        for high, way, beliefs, lengths in doubted:
            few, keep = [min(TRIAL, want) for want in lengths], 0.0
            if way.leaves:
                worst = self.scoring_price(max(self.lengths) + 1 + TAIL * self.tail)
                loss, keep = worst * rate, self.bill(self.way, self.tail)(max(self.lengths)) - 1
            else:
                bill, rides = self.bill(way, False), cold(way)
                time = bill(max(few)) + rides * bill(0)
                tokens = rides + sum(beliefs[b].mean() ** k for b in self.live
                                     for k in range(few[b] + 1)) / len(self.live)
                worst, loss = time - 1 - rides, time * rate - tokens
            # trap: what can never be saved for, or is not worth it, must not stop all others
            if way is self.way or high <= self.rate or loss > min(STAKE, HOPE * (high - self.rate)):
                continue
            if loss > self.saved or worst * self.grown > self.purse - max(STAKE, keep * self.grown):
                self.due = loss
            else:
                self.saved -= loss
                self.scores = way.leaves is not None
                if not self.scores:
                    self.try_out(way, few)
            return

    def try_out(self, way, lengths):
        """Draft so, once its rows have ridden along: if need be, this round carries them for the next one."""
        self.begun = (way, lengths) if cold(way) else None
        self.take(way, False, lengths, lengths)

    # --- what became of it

    def observe(self, state, r):
        super().observe(state, r)
        self.read(r)
        if self.rests:
            self.purse, self.saved = self.purse + self.risk * self.grown, min(STAKE, self.saved + self.risk)
            return
        for memory in (self.past, *self.rows):
            memory.fade()
        self.pay(r)
        if self.scores:
            true = [[k < len(new) for k in range(r.p.shape[1])] for new in r.new]
            self.score(state, r.trace, r.p, true)
        if self.way not in (self.nothing, self.copying) and not (self.scores and self.way.leaves):
            self.count(r)

    def score(self, state, trace, p, true):
        """Count what the exits would have drafted at the places where true[b][k]."""
        for model, exits in self.heads.items():
            states = torch.stack([trace[2 * self.ways[i].leaves - 1] for i in exits])       # (E, B, T, dim)
            logits = model.unembed(states.flatten(0, 1)).unflatten(0, states.shape[:2])
            hits, sures = torch.stack(overlaps(state.probs, p, logits)).tolist()
            for i, hit, sure in zip(exits, hits, sures, strict=True):
                for b, places in enumerate(true):
                    for k in (k for k, yes in enumerate(places) if yes):
                        self.learn(i, b, hit[b][k], sure[b][k])

    def count(self, r):
        """Count what became of the draft: as far as it was accepted, and the first token that was not."""
        way, K = self.ways.index(self.way), len(self.sures)
        if K:
            both = torch.minimum(r.p[:, :K], r.draft.q[:, :K]).sum(-1).clamp(max=1).tolist()    # (B, K)
            tenths = torch.stack(self.sures, 1).tolist()
        heads = self.pair.drafted if self.pair else r.proposed.tolist()
        for b, (drafted, kept) in enumerate(zip(heads, r.accepted.tolist(), strict=True)):
            for k in range(min(drafted, int(r.proposed[b]), kept + 1)):
                # a drafter without logits: whether it was accepted is all there is
                self.learn(way, b, *((both[b][k], tenths[b][k] / 10) if K else (float(k < kept), 0.5)))

    def learn(self, i, b, hit, sure):
        """A token of way i would be accepted with probability `hit`, and the draft was so sure of it."""
        tenth = self.trust[i][int(10 * sure)]
        tenth.fade(TRUST)
        for beta in (tenth, self.past.skills[i], self.rows[b].skills[i]):
            beta.add(hit, 1 - hit)

    def read(self, r):
        """What would an n-gram have copied? The text tells, whatever drafted."""
        for b in self.live:
            same = [x == y for x, y in zip(self.found[b], r.new[b], strict=False)]
            kept = [*same, False].index(False)
            for memory in (self.past, self.rows[b]):
                memory.read(kept, len(same), self.before[b])
            self.before[b] = len(same) > 0

    def beliefs(self):
        """{name: (how often its tokens are accepted, as it is believed now; what one takes, relative to a
        pass)} of each way."""
        known = {way.name: (skill.mean(), way.price(self.n))
                 for way, skill in zip(self.ways, self.past.skills, strict=True)}
        return known | {"n-gram": (self.past.copied.mean(), 0.0)}


def cold(way):
    """Whether a way drafts only if its rows rode along in the round before, and they did not."""
    return bool(way.rides[1]) and way.drafter.cold()
