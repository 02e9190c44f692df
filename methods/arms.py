"""Arms: ways to draft with known costs, from which `methods.pace` chooses; and a rule that stops a
draft by calibrated confidence."""
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from control import MOST, Beta, expected_speedup, outcomes
from drafter import Drafter, ModelDraft, Rule
from layerskip import SelfDraft, early_exit
from methods.base import Reader
from methods.heads import pricing, shorter
from methods.standin import ShortHead
from sampling import raw_probs

FADE = 0.95     # the share of the counts that remains after each round
TRUST = 0.98    # the same for a bin of confidence, after each token in it
KNOWN = 4       # tests that the training of a head, or an earlier text, counts for


class Calibrated(Rule):
    """Stop drafting when the next token's chance of being accepted falls below its price.

    The draft's own confidence, in bins of a tenth, is calibrated by how often it was right in that
    bin. `skill` is its acceptance rate, at first `prior`, which counts for `tests` tests.
    bars[k]: token k is the last if the chance of the next one is below it: what one more costs in
    passes, times the tokens per pass.
    """

    def __init__(self, bars=None, gamma=MOST, prior=0.5, tests=0):
        super().__init__(gamma)
        self.bars = [0.3] * gamma if bars is None else bars
        self.sure = []
        self.skill = Beta(tests * prior, tests * (1 - prior), prior)
        self.trust = [Beta(prior=min(i + 0.5, 9.5) / 10) for i in range(11)]

    def how_far(self, state):
        self.sure = []  # [token][row]: its tenth
        # the chance that all tokens so far, and the next, are accepted
        self.reach = [self.skill.mean()] * len(state.known)
        return self.longest

    def stop(self, k, logits, token):
        sure = raw_probs(logits).amax(-1).nan_to_num(0.0)   # NaN is no index; the loop reports it
        tenths = [int(10 * chance) for chance in sure.tolist()]
        self.sure.append(tenths)
        trust = [self.trust[i].mean() for i in tenths]
        self.reach = [reach * chance for reach, chance in zip(self.reach, trust, strict=True)]
        return [reach < self.bars[k] for reach in self.reach]

    def learn(self, state, r):
        # also while others draft, so that an old bad estimate fades
        self.skill.fade(FADE)
        for b, (drafted, kept) in enumerate(outcomes(r)):
            for k, tenths in enumerate(self.sure[: min(drafted, kept + 1)]):
                self.count(k < kept, tenths[b])
        self.sure = []

    def count(self, hit, tenth):
        """A token of this confidence was accepted, or not."""
        self.trust[tenth].fade(TRUST)
        for beta in (self.skill, self.trust[tenth]):
            beta.add(hit, 1 - hit)


@dataclass(eq=False)
class Arm:
    """A way to draft at most `most` tokens. The costs are in target passes over one token;
    pass_cost(T) is that of a pass over T tokens."""
    name: str
    drafter: Drafter
    price: Callable     # n -> of a drafted token after n others
    once: float = 0.0   # of each round
    late: Callable = lambda pass_cost: 0.0      # pass_cost -> of reading first what others wrote
    most: int = MOST


def self_draft(name, model, sublayers, costs):
    """The Arm of a SelfDraft. model: the target, or a ShortHead around it."""
    own = costs.pricing(sublayers, model.share)
    whole = costs.pricing(range(2 * model.c.n_layers))
    return Arm(name, SelfDraft(model, sublayers, Calibrated()), lambda n: own(n) / whole(n))


def head_draft(head, costs, vocab=None):
    """The Arm of a trained head (methods/heads.py). vocab: a draft vocabulary (its ids) if it has
    none."""
    if vocab:
        head = shorter(head, vocab)
    rule = Calibrated(gamma=head.price.longest)
    if head.ranks:
        rule = Calibrated(gamma=head.price.longest, prior=head.ranks[0], tests=KNOWN)
    drafter = head.drafter(rule)
    arm = Arm(head.kind.replace("_", " "), drafter, pricing(head, costs), most=head.price.longest)
    if isinstance(drafter, Reader):     # it first reads what was written
        trunk = head.price.trunk
        own = sum(costs.sublayers[: 1 if trunk else 2]) / costs.whole
        if trunk:   # without a trunk it is EAGLE's block, which reads that together with D
            arm.once = own
        arm.late = lambda pass_cost: own * (pass_cost(max(1, drafter.unread)) - 1)
    return arm


def few_bits(twin, c, costs):
    """The Arm of the model itself in few bits, whose step takes c of the model's own."""
    every = range(2 * twin.c.n_layers)
    whole = costs.pricing(every)

    def price(n):       # what a longer text adds costs both the same
        return (c * costs.whole + whole(n) - whole(costs.context)) / whole(n)

    rule = Calibrated(prior=0.9, tests=KNOWN)
    return Arm("few bits", SelfDraft(twin, every, rule), price)


def small_model(model, c, costs):
    """The Arm of a smaller model, whose step takes c of the target's, however long the text is."""
    drafter = ModelDraft(model, Calibrated())

    def late(pass_cost):
        return c * (pass_cost(max(1, drafter.unread)) - 1)

    return Arm("small model", drafter, lambda n: c, late=late)


def candidates(model, costs, skip=None, vocab=None, heads=(), rough=None, small=None):
    """The usual arms: of trained heads the one that promises most; without any, exits after some
    parts of the blocks, and a skip set (its sub-layers) if there is one. And the quantised model and
    a smaller one, if there are any: rough and small, each the model and what its step costs. Exits
    and skip sets draft with the draft vocabulary `vocab` (its ids), if there is one and the shorter
    head saves more than any step costs."""
    L = model.c.n_layers
    if vocab and costs.head * (1 - len(vocab) / model.c.vocab_size) < costs.call:
        vocab = None
    models = []
    if rough:
        models.append(few_bits(*rough, costs))
    if small:
        models.append(small_model(*small, costs))
    if heads:
        arms = [head_draft(head, costs, vocab) for head in heads]
        return [max(arms, key=partial(promised, costs)), *models]
    drafting = ShortHead(model, vocab) if vocab else model
    layers = sorted({max(1, round(L * part)) for part in model.exits} - {L})
    drafts = {f"exit {e}": early_exit(L, e) for e in layers}
    if skip:
        drafts["skip set"] = skip
    return [self_draft(name, drafting, subs, costs) for name, subs in drafts.items()] + models


def promised(costs, arm):
    """The highest expected speed-up of an arm, by what its rule knows so far."""
    alpha = arm.drafter.rule.skill.mean()
    gains = []
    for g in range(1, 1 + arm.most):
        verify_cost = arm.once + costs.pass_cost(1 + g)
        gains.append(expected_speedup(alpha, g, arm.price(0), verify_cost))
    return max(gains)
