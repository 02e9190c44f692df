"""Kangaroo (arXiv 2404.18911) exits after some blocks, through a small adapter of its own. In
lucidrains' "extra block" the adapter is a whole block."""
from drafter import Follower
from layerskip import SelfDraft, early_exit
from methods.base import Head, Notes, graft
from model import Placement


class ExitBlock(Head):
    """An exit with its own block, which reads a copy of the state, so that the trunk is untouched
    (lucidrains' "extra block"). Raises ValueError for a block that the model does not have."""
    kind = "exit_block"
    sublayers = [0, 1]
    reads = True
    lacks = ()

    def __init__(self, model, exit_layer):
        self.trunk = early_exit(model.c.n_layers, exit_layer)
        self.taps = self.trunk[-1:]
        self.model = model
        self.arguments = {"exit_layer": exit_layer}
        self.own = graft(model, exit_layer, 1)
        for part in self.lacks:
            delattr(self.own.blocks[0], part)
        self.weights = self.own.blocks

    def predict(self, tokens, trace, cache):
        at = Placement.span(0, tokens.shape[1], tokens.device)
        x = self.own.run(trace[self.taps[0]], at, sublayers=self.sublayers)
        yield 0, self.own.unembed(x)

    def chains(self, rule):
        return ExitDraft(self, rule)


class Kangaroo(ExitBlock):
    """The adapter of Kangaroo (arXiv 2404.18911, section 3.1) is attention without an MLP."""
    kind = "kangaroo"
    sublayers = [0]
    lacks = "mlp", "mlp_norm", "mlp_post"


class ExitDraft(SelfDraft):
    """Early exit with an adapter before the model's head, whose cache holds the text before D. The
    paper's second early exit is the rule `control.Confidence(0.6)`."""

    def __init__(self, head, rule):
        super().__init__(head.model, head.trunk, rule)
        self.head = head
        self.taps = head.taps

    def begin(self, state, trace):
        super().begin(state, trace)
        self.notes = Notes(self.head, state, trace)
        # of what was read only keys and values are needed: run the attention alone
        self.follower = Follower(self.head.own, state, 0, [0])
        self.follower.catch_up(state, self.notes.at)

    def logits(self, state, x, k):
        own = self.head.own
        if self.follower.unread > 0:
            self.follower.catch_up(state, self.notes.at)
        x = own.run(x, state.span(k, k + 1), self.follower.cache, self.head.sublayers)
        return own.unembed(x)

    def observe(self, state, r):
        super().observe(state, r)
        self.notes.observe(state, r)
