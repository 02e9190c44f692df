"""Drafting with a trained head: four drafters for the kinds of heads in methods/heads.py.

A head drafts from states that the target computes anyway. They come as `taps` of the prompt and of
every round, so a head follows the text even when another drafter drafts.

The last token read is the one before the last known token D: the target chose D after it and has
not run D itself yet. `methods.trees.Siblings` adds siblings to the chains of any of these drafters.
"""
import torch
import torch.nn.functional as F

from kvcache import KVCache
from layerskip import SelfDraft, early_exit, same_model
from methods.trees import branch
from model import Placement
from speculative import Drafter, chain, observed, pick


def unit(x):
    """x (..., dim), each vector scaled to a root mean square of 1, as the final norm does
    anyway."""
    return F.rms_norm(x, x.shape[-1:])


class Reader(Drafter):
    """A drafter with its own block, whose cache holds the text and, while it drafts, its draft.

    It keeps the target's states of all written tokens, also from rounds in which another drafter
    drafts, and its block reads them before its own next draft. After two such rounds:

        slot      0  1  2  3  4  5  6
        token     a  b  c  d  e  f  g       g is the last known token: the target has not run it yet
        noted     a  b  c  d  e  f  .       the target's state of each (if late = 1: a slot later)
        cache     a  b  c  .  .  .  .       held: 3 slots agree with the text; unread: d, e, f

    Reading a token again is harmless: in a batch each row reads as many tokens as the row that
    misses the most. What a rejected draft left in the cache is overwritten before it is read.
    """
    # the block reads the state of a token together with the token that many places after it
    late = 0
    ahead = observed

    def __init__(self, head, *args):
        super().__init__(*args)
        self.head = head
        self.own = head.own
        self.taps = head.taps
        self.unread = 0
        self.most = self.own.widest

    def begin(self, state, trace):
        same_model(self.head.model, state)
        super().begin(state, trace)
        x = self.head.state(trace)                                              # (B, T, taps * dim)
        B, T, dim = x.shape
        S = state.tokens.shape[1]
        self.rows = torch.arange(B, device=x.device)[:, None]                   # (B, 1)
        self.noted = x.new_zeros(B, S, dim)
        self.noted[:, self.late : self.late + T] = x
        self.cache = KVCache(self.own.c, B, S, self.own.attention_dtype(), x.device)
        for first in range(0, T, 256):
            at = Placement.span(first, min(first + 256, T), x.device)
            self.own.run(self.inputs(state, at.slots), at, self.cache, [0])
        self.held = [len(text) - 1 for text in state.known]
        self.unread = self.late

    def observe(self, state, r):
        super().observe(state, r)
        x = self.head.state(r.trace)  # (B, K+1, taps * dim)
        T = x.shape[1]
        lengths = [len(row) for row in r.new]
        if len(lengths) == 1:   # the round of one row is a slice, which is faster
            first = len(state.known[0]) - lengths[0] + self.late - 1
            self.noted[:, first : first + T] = x
        else:
            steps = torch.arange(self.late - 1, self.late - 1 + T, device=x.device)
            slots = state.after(steps - state.send(lengths)[:, None])
            self.noted[self.rows, slots] = x    # `scatter_` takes eight times as long
        missing = [len(text) - held for text, held in zip(state.known, self.held, strict=True)]
        self.unread = self.late - 1 + max(missing)

    def inputs(self, state, slots):
        """What was noted at `slots` (B or 1, T), which the block reads. (B, T, taps * dim)"""
        return self.noted[self.rows, slots]

    def catch_up(self, state, sublayers=None):
        """Read what is unread, at least one token. Returns the block's output at each row's last
        token. (B, 1, dim)"""
        for start in range(self.late - self.unread, self.late, self.most):
            stop = min(start + self.most, self.late)
            at, last = state.back(stop - start, stop)
            x = self.own.run(self.inputs(state, at.slots), at, self.cache, sublayers)
        self.held = [len(text) - 1 + self.late for text in state.known]
        self.unread = 0
        return pick(x, last)


class ExitDraft(Reader, SelfDraft):
    """Early exit with an adapter before the model's head (Kangaroo, arXiv 2404.18911), whose cache
    holds the text before D. The paper's second early exit is a rule: `control.Confidence(0.6)`."""

    def __init__(self, head, rule):
        sublayers = early_exit(head.model.c.n_layers, head.step.trunk)
        super().__init__(head, head.model, sublayers, rule)

    def logits(self, state, x, k):
        if self.unread:     # only keys and values are needed: run the attention alone
            self.catch_up(state, [0])
        x = self.own.run(x, state.span(k, k + 1), self.cache, self.head.sublayers)
        return self.own.unembed(x)


class EagleDraft(Reader):
    """A block that reads a token and the final state of the token before it; for a drafted token,
    its own output instead of that state (EAGLE, arXiv 2401.15077). It reads D last, with all unread
    tokens."""
    late = 1

    def inputs(self, state, slots):
        tokens = state.read(slots.expand(len(self.noted), -1))
        return self.own.enter(self.head.join(tokens, super().inputs(state, slots)))

    def propose(self, state):
        def step(token, k):
            if k == 0:
                self.said = self.catch_up(state)
            else:
                x = self.own.enter(self.head.join(token, self.said))
                self.said = self.own.run(x, state.span(k, k + 1), self.cache)
            return self.own.unembed(self.said)                                  # (B, 1, V)

        return chain(state, step, self.rule)


class LastState(Drafter):
    """Keeps the state of the last token read."""
    ahead = observed

    def __init__(self, head, rule):
        super().__init__(rule)
        self.head = head
        self.taps = head.taps

    def begin(self, state, trace):
        same_model(self.head.model, state)
        super().begin(state, trace)
        # a prompt of one token has no token before D: its first draft uses D's own state
        self.trace = trace
        self.index = [max(0, len(text) - 2) for text in state.known]

    def observe(self, state, r):
        super().observe(state, r)
        # trap: within `Then`, r.accepted counts only this drafter's part
        self.trace = r.trace
        self.index = [max(0, len(row) - 1) for row in r.new]

    def last(self, state):
        """The state of each row's last token read. (B, 1, dim)"""
        return pick(self.trace[self.taps[0]], state.send(self.index)[:, None])


class MedusaDraft(LastState):
    """All tokens at once: none depends on the others (Medusa, arXiv 2401.10774).

    shape: None for a chain; else the parents of a tree, as `methods.trees.best_tree` makes them.
    All rows draft as many of its levels as the rule says for any row. Raises ValueError for more
    levels than heads.
    """

    def __init__(self, head, rule, shape=None):
        super().__init__(head, rule)
        self.shape = shape
        if self.rule.most > head.steps:
            raise ValueError(f"{head.steps} heads cannot draft {self.rule.most} tokens: "
                             "one token each")

    def propose(self, state):
        last = self.last(state)
        said = []

        def step(token, k):
            said.append(self.head.after(last, k, token))
            return said[-1]                                                     # (B, 1, V)

        draft = chain(state, step, self.rule)
        if said and self.shape:
            return branch(state, draft, torch.cat(said, 1), self.shape)
        return draft


class ProphetDraft(LastState):
    """A small decoder writes the draft token by token, each round from the final state of the last
    token read; it sees no other text (lucidrains' "prophet", after MEGABYTE, arXiv 2305.07185)."""

    def begin(self, state, trace):
        super().begin(state, trace)
        own = self.head.own
        self.cache = KVCache(own.c, *state.tokens.shape, own.attention_dtype(), state.n.device)

    def propose(self, state):
        own = self.head.own
        last = self.last(state)

        def step(token, k):     # slots count from the state, so all rows stand at the same place
            x = own.embed(token)
            at = Placement.span(k + 1, k + 2, x.device)
            if k == 0:
                x = torch.cat([unit(last), x], 1)
                at = Placement.span(0, 2, x.device)
            return own.unembed(own.run(x, at, self.cache)[:, -1:])              # (B, 1, V)

        return chain(state, step, self.rule)
