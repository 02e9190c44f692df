"""Arms: ways to draft with known costs, from which `methods.pace` chooses; and a rule that stops a
draft by calibrated confidence."""
import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from control import MOST, expected_tokens
from drafter import Drafter, ModelDraft, Rule
from layerskip import SelfDraft, early_exit
from methods.counts import Beta, outcomes
from methods.heads import pricing, shorter
from methods.standin import ShortHead
from sampling import raw_probs

FADE = 0.95     # the share of the counts that remains after each round
BIN_FADE = 0.98     # the same for a bin of confidence, after each token in it
UNKNOWN = 11    # the bin of a confidence that was not asked for
EXITS = 1 / 12, 1 / 6, 1 / 4, 1 / 3     # shares of the blocks after which it is good to leave
PRIOR = 4       # tests that the training of a head, or an earlier text, counts for


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
        self.bins = [Beta(prior=min(i + 0.5, 9.5) / 10) for i in range(1 + UNKNOWN)]

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
        # also while others draft, so that an old bad estimate fades
        self.acceptance.fade(FADE)
        if not self.tenths:
            return      # another arm drafted
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
    """A way to draft, and what it costs. drafting(n, g) is the cost, in target passes over one
    token, of g tokens after n others. drafting(n, 0) is the part that occurs only once, to read
    what others have written. `longest` is the longest draft."""
    name: str
    drafter: Drafter
    drafting: Callable
    longest: int = MOST

    def further(self, n):
        """The cost of each token after the first."""
        return self.drafting(n, 2) - self.drafting(n, 1)

    def alone(self, longest, asks=False):
        """Its drafter without Pace, for drafts of this length. With asks, its rule is asked, but
        never stops."""
        drafter = copy.copy(self.drafter)
        drafter.rule = Calibrated([0.0] * longest, longest)
        drafter.rule.asks = asks
        return drafter


def by_token(price):
    """The `drafting` of an Arm whose tokens each cost price(n)."""
    price = lru_cache(1)(price)     # a round asks for the same n many times
    return lambda n, g: g * price(n)


def with_reading(drafting, drafter, each, once, costs):
    """The `drafting` of an Arm whose drafter first reads what was written since it last drafted.
    Its pass over one of these tokens costs `each`, of which `drafting` contains all but `once`."""
    def cost(n, g):
        follower = drafter.follower
        unread = costs.pass_cost(max(1, follower.unread), len(follower.filled)) if follower else 1.0
        return each * (unread - 1) + once * (g > 0) + drafting(n, g)

    return cost


def self_draft(name, model, sublayers, costs):
    """The Arm of a SelfDraft. model: the target, or a ShortHead around it."""
    own = costs.pricing(sublayers, model.share)
    whole = costs.pricing(range(2 * model.c.n_layers))
    drafting = by_token(lambda n: own(n) / whole(n))
    return Arm(name, SelfDraft(model, sublayers, Calibrated()), drafting)


def head_draft(head, costs, vocab=None):
    """The Arm of a trained head (methods/heads.py). It drafts with the draft vocabulary `vocab`
    (its ids) if it has none of its own."""
    if vocab:
        head = shorter(head, vocab)
    longest = head.price.longest
    rule = Calibrated(gamma=longest)
    if head.ranks:
        rule = Calibrated(gamma=longest, prior=head.ranks[0], tests=PRIOR)
    drafter = head.drafter(rule)
    drafting = by_token(pricing(head, costs))
    if head.price.reads:
        # an adapter reads one token even if it missed none; EAGLE's block drafts with that one
        each = sum(costs.sublayers[: 1 if head.price.trunk else 2]) / costs.whole
        drafting = with_reading(drafting, drafter, each, each * (head.price.trunk > 0), costs)
    return Arm(head.kind.replace("_", " "), drafter, drafting, longest)


def quantised(twin, c, costs):
    """The Arm of a quantised copy of the model, whose step costs c target passes."""
    every = range(2 * twin.c.n_layers)
    whole = costs.pricing(every)
    saved = (1 - c) * costs.whole       # a longer text costs both the same
    rule = Calibrated(prior=0.9, tests=PRIOR)
    drafting = by_token(lambda n: 1 - saved / whole(n))
    return Arm("quantised copy", SelfDraft(twin, every, rule), drafting)


def smaller(model, c, costs):
    """The Arm of a smaller model, whose step costs c target passes, however long the text is."""
    drafter = ModelDraft(model, Calibrated())
    return Arm("small model", drafter,
               with_reading(by_token(lambda n: c), drafter, c, 0.0, costs))


def candidates(model, costs, skip=None, vocab=None, heads=(), rough=None, small=None):
    """The usual arms. Of the trained heads, only the most promising one is an arm. The quantised
    copy `rough` and the smaller model `small` join it if there are any, each given as the model and
    the cost of its step. Without all of these, the arms are exits after some parts of the blocks.
    Without heads, the skip set `skip` (its sub-layers) is an arm if there is one. Exits, skip sets
    and heads draft with the draft vocabulary `vocab` (its ids), if there is one and the shorter
    head saves more than the fixed cost of a step."""
    L = model.c.n_layers
    if vocab and costs.head * (1 - len(vocab) / model.c.vocab_size) < costs.call:
        vocab = None
    models = []
    if rough:
        models.append(quantised(*rough, costs))
    if small:
        models.append(smaller(*small, costs))
    if heads:
        best = max((head_draft(head, costs, vocab) for head in heads),
                   key=lambda arm: promised(arm, costs))
        return [best, *models]
    short = ShortHead(model, vocab) if vocab else model
    drafts = {}
    if not models:      # an exit only pays on a model that was trained for it
        layers = sorted({max(1, round(L * part)) for part in EXITS} - {L})
        drafts = {f"exit {e}": early_exit(L, e) for e in layers}
    if skip:
        drafts["skip set"] = skip
    return [self_draft(name, short, subs, costs) for name, subs in drafts.items()] + models


def promised(arm, costs):
    """The highest expected speed-up of an arm, by what its rule knows so far."""
    alpha = arm.drafter.rule.acceptance.mean()
    return max(expected_tokens(alpha, g) / (arm.drafting(0, g) + costs.pass_cost(1 + g))
               for g in range(1, 1 + arm.longest))
