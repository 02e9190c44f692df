"""lucidrains' "prophet transformer" is a small decoder that writes the draft from one state of the
model."""
import torch

from drafter import chain
from kvcache import new_cache
from methods.base import Head, HeadDraft, graft, normed
from model import Placement

AHEAD = 4   # tokens that a prophet learns to predict from one state


class Prophet(Head):
    """A decoder of one or two blocks that reads the final state of the last token read, the next
    token, which the target chose from it, and its own drafts. Its MLPs are half as wide as the
    model's, because it runs once per drafted token."""
    kind = "prophet"

    def __init__(self, model, blocks):
        self.model = model
        self.arguments = {"blocks": blocks}
        self.own = graft(model, 0, blocks, max(1, model.c.hidden_dim // 2))
        self.taps = [2 * model.c.n_layers - 1]
        self.weights = self.own.blocks

    def predict(self, tokens, trace, cache):
        N = tokens.shape[1] - AHEAD                                        # a window for each state
        start = normed(trace[self.taps[0]][:, :N, None])                        # (B, N, 1, dim)
        ids = tokens[:, 1:].unfold(1, AHEAD, 1)                                 # (B, N, AHEAD)
        x = torch.cat([start, self.own.embed(ids)], 2).flatten(0, 1)           # (B*N, 1+AHEAD, dim)
        at = Placement.span(0, 1 + AHEAD, x.device)
        x = self.own.run(x, at).unflatten(0, (-1, N))                         # (B, N, 1+AHEAD, dim)
        for k in range(1, 1 + AHEAD):
            yield k, self.own.unembed(x[:, :, k])

    def chains(self, rule):
        return ProphetDraft(self, rule)


class ProphetDraft(HeadDraft):
    """A small decoder writes the draft token by token, each round from the final state of the last
    token read; it sees no other text (lucidrains' "prophet", after MEGABYTE, arXiv 2305.07185)."""

    def begin(self, state, trace):
        super().begin(state, trace)
        self.cache = new_cache(self.head.own, *state.tokens.shape)

    def propose(self, state):
        own = self.head.own
        last = self.notes.last(state)

        def step(token, k):     # slots count from the state, so all rows stand at the same place
            x = own.embed(token)
            at = Placement.span(k + 1, k + 2, x.device)
            if k == 0:
                x = torch.cat([normed(last), x], 1)
                at = Placement.span(0, 2, x.device)
            return own.unembed(own.run(x, at, self.cache)[:, -1:])              # (B, 1, V)

        return chain(state, step, self.rule)
