"""Arms: ways to draft with known costs, from which `methods.pace` chooses; and a rule that stops a
draft by calibrated confidence."""
import copy
from dataclasses import dataclass

from control import MOST
from drafter import Drafter, ModelDraft, Rule
from layerskip import SelfDraft, early_exit
from methods.costs import Line, promise
from methods.counts import Beta, outcomes
from methods.heads import drafting, shorter
from methods.lookup import DEPTH, Suffix
from methods.standin import ShortHead
from sampling import raw_probs

FADE = 0.95     # the share of the counts that remains after each round
IDLE = 0.98     # the same after a round in which another arm drafted
BIN_FADE = 0.98     # the same for a bin of confidence, after each token in it
UNKNOWN = 11    # the bin of a confidence that was not asked for
EXITS = 1 / 12, 1 / 6, 1 / 4, 1 / 3     # exits to try, as shares of the model's depth
COPY = 7    # tokens that may be copied, because with the last one they fill a recorded block of 8
PRIOR = 4       # tests that what is known of a draft beforehand counts for


class Calibrated(Rule):
    """Stop drafting when the next token's chance of being accepted falls below its price.

    The draft's own confidence, in bins of a tenth, is calibrated by how often it was right in that
    bin. The rate of `acceptance` begins as `prior`, which counts for `tests` tests. The draft stops
    after token k if the next token's chance is below bars[k], which is the cost of one more token
    in passes, times the tokens that a pass yields.
    """

    def __init__(self, bars=None, gamma=MOST, prior=0.5, tests=0):
        super().__init__(gamma)
        self.bars = bars or [0.3] * gamma
        self.asks = True    # whether it ever stops a draft; asking is slow on a GPU
        self.tenths = []    # [token][row]: the tenth of its confidence, which is its bin
        self.reach = []     # by row, the chance that all tokens so far, and the next, are right
        self.acceptance = Beta(tests * prior, tests * (1 - prior), prior)
        # a confidence is what it says, unless the draft is right more often than that by its prior
        doubt = min(1.0, 4 * (1 - prior))
        sure = [min(i + 0.5, 9.5) / 10 for i in range(1 + UNKNOWN)]
        self.bins = [Beta(prior=1 - doubt * (1 - chance)) for chance in sure]

    @property
    def stop(self):
        return self.unlikely if self.asks else None

    def how_far(self, state):
        self.tenths = []
        if not self.asks:   # their confidence is unknown, and has a bin of its own
            self.tenths = [[UNKNOWN] * len(state.known)] * self.longest
        self.reach = [self.acceptance.mean()] * len(state.known)
        return self.longest

    def unlikely(self, k, logits, token):
        """Which rows stop after token k: see `drafter.chain`."""
        sure = raw_probs(logits).amax(-1).nan_to_num(0.0)   # NaN is no index; the loop reports it
        tenths = [int(10 * chance) for chance in sure.tolist()]
        self.tenths.append(tenths)
        right = [self.bins[tenth].mean() for tenth in tenths]
        self.reach = [reach * chance for reach, chance in zip(self.reach, right, strict=True)]
        return [reach < self.bars[k] for reach in self.reach]

    def learn(self, state, r):
        if not self.tenths:     # another arm drafted: an old bad estimate fades, too, but slowly
            self.acceptance.fade(IDLE)
            return
        self.acceptance.fade(FADE)
        for b, (drafted, kept) in enumerate(outcomes(r)):
            for k, tenths in enumerate(self.tenths[: min(drafted, kept + 1)]):
                self.count(k < kept, tenths[b])
        self.tenths = []

    def count(self, hit, tenth):
        """A token of this confidence was accepted, or not."""
        self.bins[tenth].fade(BIN_FADE)
        for beta in (self.acceptance, self.bins[tenth]):
            beta.add(hit, 1 - hit)


@dataclass(eq=False)
class Arm:
    """A way to draft, and what it costs."""
    name: str
    drafter: Drafter
    each: Line              # a drafted token
    once: float = 0.0       # a draft, whatever its length
    reading: float = 0.0    # each token but one that the drafter has not read
    longest: int = MOST     # tokens of a draft

    def cost(self, n, g):
        """A draft of g > 0 tokens in a text of n tokens, if the drafter has read the text."""
        return self.once + g * self.each.at(n)

    def catch_up(self):
        """What the drafter must read first."""
        follower = self.drafter.follower
        return self.reading * max(0, follower.unread - 1) if follower else 0.0

    def hope(self):
        """An optimistic estimate of its acceptance rate, so that what was little tried is tried."""
        return self.drafter.rule.acceptance.high()

    def propose(self, state):
        return self.drafter.propose(state)

    def alone(self, longest, asks=False):
        """Its drafter without Pace, for drafts of this length. With asks, its rule is asked, but
        never stops."""
        drafter = copy.copy(self.drafter)
        drafter.rule = Calibrated([0.0] * longest, longest)
        drafter.rule.asks = asks
        return drafter


class Copies(Arm):
    """Suffix decoding. The copy is known before the round, and how many of its tokens were right is
    known after it, also when another arm drafted. A long match is right more often than a short
    one."""

    def __init__(self):
        super().__init__("suffix", Suffix(COPY, factor=4.0), Line(0.0))   # Pace cuts its drafts
        # how often copied tokens are right, by the bits of the length of their match: before any
        # count .29 after one token, .65 after two or three, .82 after four to seven
        self.rates = [Beta(prior=1 - 2**0.5 * 0.5**k) for k in range(1, 1 + DEPTH.bit_length())]
        self.found = []     # what each row would copy

    def look(self, state):
        """Find what may be copied in this round."""
        self.drafter.enter(state)
        self.found = self.drafter.found(state)
        self.longest = max(map(len, self.found))

    def hope(self):
        """The acceptance rate of what may be copied now, on average over the rows."""
        rates = [self.rate(m).mean() if m else 0.0 for m in self.drafter.matched]
        return sum(rates) / len(rates)

    def rate(self, matched):
        """That of copies after a match of so many tokens, at least one."""
        return self.rates[matched.bit_length() - 1]

    def propose(self, state):
        return self.drafter.copy(state, self.found)

    def learn(self, new):
        """Compare what could have been copied with the `new` tokens of each row."""
        for m, copied, row in zip(self.drafter.matched, self.found, new, strict=False):
            same = [x == y for x, y in zip(copied, row, strict=False)]
            if same:
                right = [*same, False].index(False)
                rate = self.rate(m)
                rate.fade(FADE)
                rate.add(right, right < len(same))
        self.found = []


def self_draft(name, model, sublayers, machine):
    """The Arm of a SelfDraft. model: the target, or a ShortHead around it."""
    each = machine.draft(sublayers, model.share)
    return Arm(name, SelfDraft(model, sublayers, Calibrated()), each)


def head_draft(head, machine, vocab=None):
    """The Arm of a trained head (methods/heads.py). It drafts with the draft vocabulary `vocab`
    (its ids) if it has none of its own."""
    if vocab:
        head = shorter(head, vocab)
    rule = Calibrated(gamma=head.longest)
    if head.ranks:
        rule = Calibrated(gamma=head.longest, prior=head.ranks[0], tests=PRIOR)
    arm = Arm(head.kind.replace("_", " "), head.drafter(rule), drafting(head, machine),
              longest=head.longest)
    if head.own and head.reads:
        block = machine.attention
        if head.trunk:      # an adapter reads one token even if it missed none
            arm.once = block
        else:               # EAGLE's block drafts with that one
            block += machine.mlp
        arm.reading = block * machine.further()
    return arm


def quantised(twin, c, machine):
    """The Arm of a quantised copy of the model, whose step costs c in a short text."""
    every = range(2 * twin.c.n_layers)
    each = machine.draft(every)._replace(start=c)       # a longer text costs both the same
    return Arm("quantised copy", SelfDraft(twin, every, Calibrated(prior=0.95, tests=PRIOR)), each)


def smaller(model, c, machine):
    """The Arm of a smaller model, whose step costs c, however long the text is."""
    drafter = ModelDraft(model, Calibrated(prior=0.75, tests=PRIOR))
    return Arm("small model", drafter, Line(c), reading=c * machine.further())


def candidates(model, machine, skip=None, vocab=None, heads=(), rough=None, small=None):
    """The usual arms: the most promising of the trained heads; exits after some parts of the
    blocks, if there is no other model to draft with; the skip set `skip` (its sub-layers), if there
    are no heads; the quantised copy `rough` and the smaller model `small`, each given as the model
    and the cost of its step. Exits, skip sets and heads draft with the draft vocabulary `vocab`,
    its ids, if there is one and the shorter head saves more than the fixed cost of a step."""
    L = model.c.n_layers
    if vocab and machine.head * (1 - len(vocab) / model.c.vocab_size) < machine.step:
        vocab = None
    arms = []
    if heads:
        trained = [head_draft(head, machine, vocab) for head in heads]
        arms.append(max(trained, key=lambda arm: promised(arm, machine)))
    short = ShortHead(model, vocab) if vocab else model
    if not rough and not small:     # an exit only pays on a model that was trained for it
        layers = sorted({max(1, round(L * part)) for part in EXITS} - {L})
        arms += [self_draft(f"exit {e}", short, early_exit(L, e), machine) for e in layers]
    if skip and not heads:
        arms.append(self_draft("skip set", short, skip, machine))
    if rough:
        arms.append(quantised(*rough, machine))
    if small:
        arms.append(smaller(*small, machine))
    return arms


def promised(arm, machine):
    """The highest expected speed-up of an arm, by what its rule knows so far."""
    alpha = arm.drafter.rule.acceptance.mean()
    costs = [machine.verify(0, 1 + g) + (arm.cost(0, g) if g else 0.0)
             for g in range(1 + arm.longest)]
    return promise(costs, alpha)[0]
