"""Pace: before every draft, which way to draft, and how far, promises the most tokens for the time they take?

The one thing to remember: a round buys tokens for time. The prices are known beforehand, so whatever an
experiment can lose is known, too, and no more is risked than was saved for it. Hence the promise that no
published system makes: by its prices never slower than plain decoding by more than `risk`, and the STAKE of
one pass, whatever drafts.

    nothing         costs 1 pass and writes 1 token: what all else is measured by
    an exit         a trace of the target tells what it would have drafted, also while others draft
    an n-gram       the text itself tells what it would have copied
    all else        skip sets and trained heads: only their own drafts tell, so each is tried again when its
                    counts have faded

Prices are relative to a pass of the target over one token, as everywhere, and grow with the text.
"""
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cache

import torch

from control import MOST, Beta, weight_costs
from layerskip import SelfDraft, ShortHead, early_exit, shared_prefix
from methods.drafting import same_model
from methods.dynamic import last_places, overlaps
from methods.heads import pricing, shorter
from sampling import raw_probs
from speculative import Drafter, NGram, Rule, Then, Wrapper

TAIL = 8        # tokens that an n-gram may add
WINDOW = 32     # the prompt's last places, which tell the first alphas
STAKE = 1.0     # what may be lost before anything is won, in passes: 1 % of a hundred tokens
DOUBT = 5.0     # what is known from fewer drafts than that, as they fade, is worth another try


@dataclass
class Way:
    """A way to draft. price(n): what a drafted token takes after n others, relative to a pass. `self_draft`
    and `head_draft` know all the rest:

    leaves: the block after which an early exit leaves, so that a trace tells what it would draft. shared: the
    part of a pass that is lost where an n-gram adds to its draft. once(): what it takes now, before its first
    token, to read what it has missed. rides: the part of a pass that N rows run through beside each token of
    the block, and N (Hidden Transfer). most: the longest draft that it can make. stops: False for a drafter
    that does not ask after each token whether to stop, because it copies."""
    name: str
    drafter: Drafter
    price: Callable
    leaves: int | None = None
    shared: float = 0.0
    once: Callable = lambda: 0.0
    rides: tuple = (0.0, 0)
    most: int = MOST
    stops: bool = True


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
              most=getattr(head, "steps", MOST))
    if "exit_layer" in head.shape:
        way.shared = sum(costs.sublayers[: 2 * head.shape["exit_layer"]]) / costs.whole
    whole = costs.pricing(range(2 * head.model.c.n_layers))
    if "rank" in head.shape:        # its second row runs for the last token, too, from which nobody drafts
        trunk = costs.pricing(range(2 * head.shape["exit_layer"]), 0.0)
        adapters = pricing(head, costs, 0.0)(costs.at) - trunk(costs.at) / whole(costs.at)
        way.once = lambda: adapters
    if hasattr(way.drafter, "unread"):
        apart = "exit_layer" in head.shape  # an attention reads what it missed; an eagle's block, with D
        own = sum(costs.sublayers[: 1 if apart else 2]) / costs.whole
        way.once = lambda: own * (costs.block(max(1, way.drafter.unread)) - (not apart))
    if "inject_layer" in head.shape:
        way.rides = sum(costs.sublayers[2 * head.shape["inject_layer"] :]) / costs.whole, head.steps
        spread, part = head.steps * pricing(head, costs, 0.0)(costs.at), costs.pricing((), share)
        way.once, way.price = lambda: spread, lambda n: part(n) / whole(n)      # one matrix for all its rows
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


class Skill:
    """How often a draft is accepted: in all, and by how sure it was, in tenths. Old counts fade. Before it
    knows better it takes a draft at its word."""

    def __init__(self):
        self.all, self.tenths = Beta(), [Beta() for _ in range(10)]

    def fade(self, factor):
        for beta in (self.all, *self.tenths):
            beta.fade(factor)

    def add(self, hit, sure):
        for beta in (self.all, self.tenths[min(9, int(10 * sure))]):
            beta.add(hit, 1 - hit)

    def known(self):
        return self.all.hits + self.all.misses

    def by_tenths(self):
        return [(b.hits + (2 * i + 1) / 10) / (b.hits + b.misses + 2) for i, b in enumerate(self.tenths)]


class Memory:
    """What is known of one text: a Skill for each way; how often an n-gram's tokens are accepted, `copied`;
    and how many of them follow where it is asked, `followed` (hits: tokens; misses: how often)."""

    def __init__(self, ways):
        self.skills, self.copied, self.followed = [Skill() for _ in range(ways)], Beta(), Beta()

    def fade(self, factor):
        for one in (*self.skills, self.copied, self.followed):
            one.fade(factor)

    def tail(self):
        """How many tokens an n-gram is expected to add where a draft was accepted whole."""
        return self.followed.hits / (self.followed.misses + 1)


class Pace(Wrapper):
    """Draft in the way, and as far, as promises the most tokens for each unit of time; see above. It should
    be the outermost drafter.

    ways: a list of Way, whose drafters get a rule of its own; by default `candidates(model, costs)`. costs: a
    Costs table, by weights unless one is given. risk: what experiments may cost, as a part of plain decoding.
    most: the longest draft. What is learnt outlives the run; each row starts from it and learns for itself,
    in `rows`, which fade by `fade` a round. chosen: {name: rounds} over its life.

    In a batch the rows share each pass, and so the way, which is that of the most tokens over all rows. What
    each row knows is its own, and so are how far it drafts and where it stops. The promise holds for the row
    with the fewest new tokens, for each of which plain decoding needs a pass. What a fast row wins does not
    pay for a slow one.

    The promise is kept over the life of a Pace: what was won on one text may be lost on the next one. Not in
    the prices, and so not in the promise: the reading of the prompt, and the time of its own thinking.
    """

    def __init__(self, model, ways=None, costs=None, risk=0.01, most=MOST, fade=0.95):
        self.model, self.costs = model, costs or weight_costs(model.c)
        self.ways = candidates(model, self.costs) if ways is None else list(ways)
        self.lookup = NGram(TAIL, 3)
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
        self.past, self.purse, self.saved = Memory(len(self.ways)), STAKE, STAKE
        self.chosen, self.n = {}, 0
        self.start(1)

    def start(self, rows):
        """For so many rows: nothing is written yet, and what a pass over T tokens of each takes."""
        self.rows, self.written = [deepcopy(self.past) for _ in range(rows)], [0] * rows
        self.least, self.begun = 0, None
        self.block = cache(lambda T: self.costs.block(rows * T) / self.costs.block(rows))

    def begin(self, state, trace):
        same_model(self.model, state)
        super().begin(state, trace)
        self.always = {tap for tap in state.taps if tap not in self.own} | set(self.needed)
        self.start(len(state.known))
        self.look(state)
        head = self.costs.head / self.costs.whole       # of the target itself
        loss = (self.scoring_price(WINDOW) + head * self.block(WINDOW)) * self.grown
        if self.exits and loss <= self.purse - STAKE / 2:
            self.purse -= loss
            places, true = last_places(state, {tap: trace[tap] for tap in self.own}, WINDOW)
            self.score(state, places, state.probs(self.model.unembed(places[self.last])), true.tolist())

    # --- what to do now

    def look(self, state):
        """How long the text is now, and by how much a pass has grown: since its beginning, and a token."""
        self.live = [b for b, left in enumerate(state.left_cpu) if left > 0]
        self.n = max(map(len, state.known))
        self.grown = self.whole(self.n) / self.costs.whole
        self.slope = self.whole(self.n + 1) / self.whole(self.n) - 1

    def propose(self, state):
        self.look(state)
        self.found, self.sures = self.lookup.found(state), []
        self.rate = self.choose(state)
        self.scores = self.experiment()
        state.taps = tuple(sorted(self.always | self.own if self.scores else self.always))
        name = self.way.name + ", then n-gram" * self.tail
        self.chosen[name] = self.chosen.get(name, 0) + 1
        self.price, self.once = self.way.price(self.n), self.way.once()
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
        skills = [row.skills[self.ways.index(self.way)] for row in self.rows]
        self.check = self.checking(self.way)
        self.table = state.send([skill.by_tenths() for skill in skills])        # (B, 10)
        self.mean = state.send([skill.all.mean() for skill in skills])          # (B,)
        self.reach = torch.ones_like(self.mean)     # how likely all drafted tokens so far are accepted

    def enough(self, k, logits):
        """After k + 1 drafted tokens: does what one more promises fall below its price, in tokens? (B,)"""
        tenth = (10 * raw_probs(logits).amax(-1)).long().clamp(max=9)           # (B,)
        self.sures.append(tenth)
        self.reach = self.reach * self.table.gather(1, tenth[:, None])[:, 0]
        more = self.price + self.check(k + 3) - self.check(k + 2)
        return self.reach * self.mean < self.rate * more

    def choose(self, state):
        """Set way, tail and lengths to what promises most: tokens for the time of a pass, which it returns.
        Where nothing promises more than 1, nothing is drafted."""
        best, room = 1.0, [max(0, min(self.most, left - 1)) for left in state.left_cpu]
        self.way, self.tail, self.lengths = self.nothing, False, [0] * len(room)
        hits = [min(len(hit), more) for hit, more in zip(self.found, room, strict=True)]
        after, none = [row.tail() for row in self.rows], [0.0] * len(room)
        options = [(self.copying, False, [row.copied.mean() for row in self.rows], hits)]
        tails = (False, True) if max(after) > 0.05 else (False,)
        for i, way in enumerate(self.ways):
            alphas, rooms = [row.skills[i].all.mean() for row in self.rows], [min(way.most, m) for m in room]
            options += [(way, tail, alphas, rooms) for tail in tails]
        for way, tail, alphas, rooms in options:
            bill = self.bill(way, tail)
            most = next((g for g in range(self.most, 0, -1) if (bill[g] - 1) * self.grown <= self.purse), 0)
            rooms = [min(most, more) for more in rooms]
            promise, lengths = self.promise(alphas, rooms, bill, after if tail else none)
            if promise > best:
                best, self.way, self.tail, self.lengths = promise, way, tail, lengths
                if way.stops:                   # where `enough` says
                    self.lengths = [more * (want > 0) for more, want in zip(rooms, lengths, strict=True)]
        return best

    def promise(self, alphas, rooms, bill, afters):
        """(tokens for the time of a pass, the best length of each row). afters: the tokens that a tail is
        expected to add where the draft is accepted whole."""
        lengths, tokens = [], 0.0
        for b, (alpha, room, after) in enumerate(zip(alphas, rooms, afters, strict=True)):
            best, length, most, expected, reach = 1.0, 0, 1.0, 1.0, 1.0
            for g in range(1, room + 1):
                reach *= alpha
                expected += reach
                if (expected + reach * after) / bill[g] > best:
                    best, length, most = (expected + reach * after) / bill[g], g, expected + reach * after
            lengths.append(length)
            tokens += most * (b in self.live)
        longest = max(lengths)
        return (tokens / len(self.live) / bill[longest] if longest else 1.0), lengths

    # --- what it takes

    def checking(self, way):
        """T -> what the pass takes that verifies T tokens of each row, with the rows that ride along."""
        part, rows = way.rides
        if not rows:
            return self.block
        return lambda T: self.block(T) + part * (self.block(T * (1 + rows)) - self.block(T))

    def takes(self, way, price, once, rounds):
        """[what a round takes], relative to a pass over one token at its beginning, for (how many tokens it
        drafts, how many it verifies, whether a tail forces a second reading of the draft)."""
        check, shared, slope = self.checking(way), way.shared, self.slope   # the text grows while it drafts
        return [(once + drafted * price + shared * lost + check(T)) * (1 + slope * (T - 1))
                for drafted, T, lost in rounds]

    def bill(self, way, tail):
        """[what a round takes in which it drafts 0, 1, 2, ... tokens, and a tail]"""
        more = TAIL * tail
        return self.takes(way, way.price(self.n), way.once(),
                          [(g, g + 1 + more, tail) for g in range(self.most + 1)])

    def pay(self, r):
        """Book what the round wrote and what it took. The purse is what was won over plain decoding, in
        passes over a text that has just begun. It never falls below 0."""
        T = r.p.shape[1]
        drafted = len(self.sures) or (max(self.pair.drafted) if self.tail else T - 1)
        again = self.tail and T - 1 > drafted
        (taken,) = self.takes(self.way, self.price, self.once, [(drafted, T, again)])
        taken += self.scoring_price(T) * self.scores
        for b in self.live:
            self.written[b] += len(r.new[b])
        least, before = min(self.written[b] for b in self.live), self.least
        self.purse += ((least - before) * (1 + self.risk) - taken) * self.grown
        self.least = least

    # --- what may be risked

    def scoring_price(self, places):
        """What it takes to see what every exit would have drafted at so many places: rows of the head."""
        return self.costs.head / self.costs.whole * sum(
            getattr(model, "share", 1.0) * self.block(len(exits) * places)
            for model, exits in self.heads.items())

    def experiment(self):
        """Spend what was saved on the way that is least known: score the exits in this round (True); or, if
        nothing tells of it but its own drafts, draft one token with it. Half of the stake is never spent so:
        it is for drafts that promise a gain."""
        self.saved = min(STAKE, self.saved + self.risk)
        if self.begun:                          # its rows rode along in the last round, and now it drafts
            self.try_out(self.begun)
            return False
        known = [min(self.rows[b].skills[i].known() for b in self.live) for i in range(len(self.ways))]
        doubted = [i for i, much in enumerate(known) if much < DOUBT and self.most]
        for way in (self.ways[i] for i in sorted(doubted, key=lambda i: known[i])):
            loss, planned = self.loss(way)
            if loss * self.rate > STAKE:        # trap: what can never be saved for must not stop all others
                continue
            if loss * self.rate > self.saved or loss * self.grown > self.purse - max(planned, STAKE / 2):
                return False
            self.saved -= loss * self.rate
            if way.leaves is None:
                self.try_out(way)
            return way.leaves is not None
        return False

    def loss(self, way):
        """(what an experiment with this way can lose, what the draft can lose that was chosen beside it)"""
        if way.leaves:
            longest = max(self.lengths)
            return (self.scoring_price(longest + 1 + TAIL * self.tail),
                    (self.bill(self.way, self.tail)[longest] - 1) * self.grown)
        bill = self.bill(way, False)
        return bill[1] - 1 + (bill[0] - 1 if cold(way) else 0.0), 0.0

    def try_out(self, way):
        """Draft one token in this way. One whose rows have yet to ride along drafts it in the next round."""
        self.begun = way if cold(way) else None
        self.way, self.tail = way, False
        self.lengths = [int(b in self.live) for b in range(len(self.rows))]

    # --- what became of it

    def observe(self, state, r):
        super().observe(state, r)
        for memory in (self.past, *self.rows):
            memory.fade(self.fade)
        self.pay(r)
        if self.scores and all(r.trace.get(tap) is not None for tap in self.own):
            true = [[k < len(new) for k in range(r.p.shape[1])] for new in r.new]
            self.score(state, r.trace, r.p, true)
        elif self.way is not self.nothing and self.way is not self.copying:
            self.count(r)
        self.read(r)

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
        K, rows = len(self.sures), []
        if K:
            both = torch.minimum(r.p[:, :K], r.draft.q[:, :K]).double().sum(-1).clamp(max=1)    # (B, K)
            rows = torch.cat([both, torch.stack(self.sures, 1).double()], 1).tolist()
        heads = self.pair.drafted if self.pair else r.proposed.tolist()
        for b, (drafted, kept) in enumerate(zip(heads, r.accepted.tolist(), strict=True)):
            for k in range(min(drafted, int(r.proposed[b]), kept + 1)):
                # a drafter without logits: whether it was accepted is all there is
                hit, sure = (rows[b][k], rows[b][K + k] / 10 + 0.05) if K else (float(k < kept), 0.5)
                self.learn(self.ways.index(self.way), b, hit, sure)

    def learn(self, i, b, hit, sure):
        for memory in (self.past, self.rows[b]):
            memory.skills[i].add(hit, sure)

    def read(self, r):
        """What would an n-gram have copied? The text tells, whatever drafted."""
        for b in self.live:
            pairs = enumerate(zip(self.found[b], r.new[b], strict=False))
            same = next((k for k, (x, y) in pairs if x != y), None)
            kept = min(len(self.found[b]), len(r.new[b])) if same is None else same
            for memory in (self.past, self.rows[b]):
                if self.found[b]:
                    memory.copied.add(kept, same is not None)
                memory.followed.add(kept, 1)

    def beliefs(self):
        """{name: (how often its tokens are accepted, as it is believed now; what one takes, relative to a
        pass)} of each way."""
        known = {way.name: (skill.all.mean(), way.price(self.n))
                 for way, skill in zip(self.ways, self.past.skills, strict=True)}
        return known | {"n-gram": (self.past.copied.mean(), 0.0)}


def cold(way):
    """Whether a way drafts only if its rows rode along in the round before, and they did not."""
    return bool(way.rides[1]) and way.drafter.last is None
