"""EAGLE (arXiv 2401.15077). One block drafts from the model's final states, token after token."""
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from drafter import Follower, chain
from methods.base import Head, HeadDraft, graft, normed
from model import Placement


class Eagle(Head):
    """A block that reads each token's embedding and the final state of the token before it, from
    which the target chose it. After a drafted token it reads its own output instead. The paper maps
    both with one matrix (dim, 2 dim). Ours is (dim, dim), maps the state alone and starts at zero.

    It is trained on the first token of a draft, and on the second, which reads the block's output
    (HASS, arXiv 2408.15766). Later tokens are drafted like the second.

    If `fused`, it reads a mix of the final state and of the states after a quarter and half of the
    blocks (EAGLE-3, arXiv 2503.01840, section 3.1). The mix starts as the final state alone.
    """
    kind = "eagle"
    reads = True
    reach = 2   # steps that it is trained on; more can be evaluated

    def __init__(self, model, fused=False):
        L = model.c.n_layers
        dim = model.c.dim
        self.model = model
        self.arguments = {"fused": bool(fused)}
        blocks = (L // 4, L // 2, L) if fused else (L,)
        self.taps = [2 * max(1, b) - 1 for b in blocks]
        self.own = graft(model, 0, 1)
        self.weights = nn.Module()
        self.weights.blocks = self.own.blocks
        if fused:       # (dim, 3 dim): at first the final state alone
            self.weights.mix = nn.Parameter(F.pad(torch.eye(dim).to(model.tok), (2 * dim, 0)))
        self.weights.matrix = nn.Parameter(model.tok.new_zeros(dim, dim))

    def join(self, tokens, before):
        """The inputs of the block (B, T, dim), by tokens (B, T) and what stands before each: states
        of the target (B, T, taps * dim), or the block's own output (B, T, dim)."""
        x = self.own.embed(tokens)
        if before.shape[-1] > x.shape[-1]:
            states = before.unflatten(-1, (len(self.taps), -1))
            before = self.own.linear(normed(states).flatten(-2), self.weights.mix)
        return x + self.own.linear(normed(before), self.weights.matrix)

    def predict(self, tokens, trace, cache):
        T = tokens.shape[1]
        device = tokens.device
        ones = torch.ones(T, T, dtype=torch.bool, device=device)
        positions = torch.arange(T, device=device)[None]
        before = self.tapped(trace)
        inputs = []                         # of all steps so far: each token once per step
        seen = []                           # the rows of the mask: who sees whom among them
        for k in range(1, 1 + self.reach):
            moved = F.pad(before, (0, 0, 1, 0))[:, :-1]     # the state of the token before each
            inputs.append(self.join(tokens, moved))
            text = ones.tril(1 - k)                         # keys of the first step
            drafted = [ones.tril(d).triu(d) for d in range(2 - k, 1)]   # one key of each later step
            seen = [F.pad(rows, (0, T)) for rows in seen]
            seen.append(torch.cat([text, *drafted], 1))
            slots = torch.arange(k * T, device=device)[None]
            at = Placement(positions.repeat(1, k), slots, 0, k * T, torch.cat(seen)[None])
            x = self.own.run(torch.cat(inputs, 1), at)[:, -T:]
            before = x.detach()
            yield k, self.own.unembed(x[:, k:])

    def chains(self, rule):
        return EagleDraft(self, rule)


class EagleDraft(HeadDraft):
    """The drafter of an Eagle. Its block reads D last, together with all that it has not read."""

    def begin(self, state, trace):
        super().begin(state, trace)
        self.follower = Follower(self.head.own, state, 1)
        self.follower.catch_up(state, partial(self.inputs, state))

    def inputs(self, state, slots):
        """The tokens at `slots` (B or 1, T), each with the target's state of the one before it.
        (B, T, dim)"""
        tokens = state.read(slots.expand(len(state.known), -1))
        before = self.notes.at(slots - 1) * (slots > 0)[..., None]
        return self.head.join(tokens, before)

    def propose(self, state):
        own = self.head.own

        def step(token, k):
            if k == 0:
                self.said = self.follower.catch_up(state, partial(self.inputs, state))
            else:
                x = self.head.join(token, self.said)
                self.said = own.run(x, state.span(k, k + 1), self.follower.cache)
            return own.unembed(self.said)                                       # (B, 1, V)

        return chain(state, step, self.rule)
