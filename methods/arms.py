"""Arms: ways to draft with known costs, from which `methods.pace` chooses; and a rule that stops a
draft by calibrated confidence."""
from collections.abc import Callable
from dataclasses import dataclass

import torch

from control import MOST, Beta, outcomes
from layerskip import SelfDraft, ShortHead, early_exit, shared_prefix
from methods.drafting import Reader
from methods.heads import pricing, shorter
from sampling import raw_probs
from speculative import Drafter, Rule

FADE = 0.95     # the share of the counts that remains after each round
KNOWN = 16      # tests that the training of a head, or an earlier text, counts for
EXITS = 1 / 12, 1 / 6, 1 / 4, 1 / 3     # parts of the blocks
TRUST = 0.98    # the same for a bin of confidence, after each token in it


class Calibrated(Rule):
    """Stop drafting when the next token's chance of being accepted falls below its price.

    The draft's own confidence, in bins of a tenth, is calibrated by how often it was right in that
    bin. `skill` is its acceptance rate, at first `prior`, as if known from so many `tests`. bars: the price
    of each of the `gamma` tokens, in tokens: what one more costs, times the tokens per pass that are reached.
    """

    def __init__(self, bars=None, gamma=MOST, prior=0.5, tests=0):
        super().__init__(gamma)
        self.bars = [0.3] * gamma if bars is None else bars
        self.sure, self.skill = [], Beta(tests * prior, tests * (1 - prior), prior)
        self.trust = [Beta(prior=min(i + 0.5, 9.5) / 10) for i in range(11)]

    def gamma(self, state):
        self.sure = []
        self.reach = self.skill.mean()  # the chance that all tokens so far, and the next, are accepted
        self.table = state.send([beta.mean() for beta in self.trust])           # (11,)
        return self.most

    def stop(self, k, logits, token):
        # trap: NaN, from damaged weights, is no index; the loop reports it
        tenth = (10 * raw_probs(logits).amax(-1)).nan_to_num().int()            # (B,) 0 to 10
        self.sure.append(tenth)
        self.reach = self.reach * self.table.index_select(0, tenth)
        return self.reach < self.bars[k]

    def learn(self, state, r):
        if not self.sure:       # another arm drafted
            return
        K, tenths = len(self.sure), torch.stack(self.sure, 1).tolist()          # (B, K)
        hits = torch.minimum(r.p[:, :K], r.draft.q[:, :K]).sum(-1).clamp(max=1).tolist()
        self.skill.fade(FADE)
        for b, (drafted, kept) in enumerate(outcomes(r)):
            for k in range(min(drafted, kept + 1, K)):
                self.count(hits[b][k], tenths[b][k])
        self.sure = []

    def count(self, hit, tenth):
        """A token of this confidence would be accepted with probability `hit`."""
        self.trust[tenth].fade(TRUST)
        for beta in (self.skill, self.trust[tenth]):
            beta.add(hit, 1 - hit)


@dataclass(eq=False)
class Arm:
    """A way to draft at most `most` tokens. In passes: price(n), of one after n others; once, of a round;
    late(block), to read first what others wrote; shared, what is lost where a tail continues its draft."""
    name: str
    drafter: Drafter
    price: Callable
    once: float = 0.0
    late: Callable = lambda block: 0.0
    shared: float = 0.0
    most: int = MOST


def self_draft(name, model, sublayers, costs):
    """The Arm of a SelfDraft. model: the target, or a ShortHead in its stead."""
    exact, share = shared_prefix(sublayers), getattr(model, "share", 1.0)
    own, whole = costs.pricing(sublayers, share), costs.pricing(range(2 * model.c.n_layers))
    return Arm(name, SelfDraft(model, sublayers, Calibrated()), lambda n: own(n) / whole(n),
               shared=sum(costs.sublayers[:exact]) / costs.whole)


def head_draft(head, costs, vocab=None):
    """The Arm of a trained head (methods/heads.py). vocab: a draft vocabulary (its ids) if it has none."""
    head = shorter(head, vocab) if vocab else head
    trunk, drafter = head.step.trunk, head.drafter(Calibrated(
        None, head.step.most, *((head.ranks[0], KNOWN) if head.ranks else ())))
    arm = Arm(head.kind.replace("_", " "), drafter, pricing(head, costs),
              shared=sum(costs.sublayers[: 2 * trunk]) / costs.whole, most=head.step.most)
    if isinstance(drafter, Reader):    # it first reads what was written; EAGLE's block does so with D
        own = sum(costs.sublayers[: 1 if trunk else 2]) / costs.whole
        arm.once, arm.late = own * (trunk > 0), lambda block: own * (block(max(1, drafter.unread)) - 1)
    return arm


def candidates(model, costs, skip=None, vocab=None, heads=()):
    """The usual arms: exits after some parts of the blocks; a skip set (its sub-layers) if there is one;
    trained heads. All of them draft with the draft vocabulary `vocab` (its ids) if there is one."""
    L, exits = model.c.n_layers, getattr(model, "exits", EXITS)
    drafting = ShortHead(model, vocab) if vocab else model
    layers = sorted({max(1, round(L * part)) for part in exits} - {L})
    drafts = {f"exit {e}": early_exit(L, e) for e in layers} | ({"skip set": skip} if skip else {})
    return ([self_draft(name, drafting, subs, costs) for name, subs in drafts.items()]
            + [head_draft(head, costs, vocab) for head in heads])
