"""What all trained heads share. A trained head is a small module on a frozen model that drafts for
it.

A head learns to predict the model's next tokens from states that the model computes anyway. The
model does not change, and neither does its text. Each kind has a file of its own, which says what
it learns to predict and how it drafts.
"""
from collections import Counter
from dataclasses import dataclass, replace
from operator import attrgetter

import torch
import torch.nn.functional as F

from control import MOST
from drafter import Drafter
from kvcache import KVCache, pick
from layerskip import same_model
from methods.trees import Siblings
from model import Placement, Transformer


def unit(x):
    """x (..., dim), each vector scaled to a root mean square of 1, as the final norm does
    anyway."""
    return F.rms_norm(x, x.shape[-1:])


def graft(model, first, count, hidden_dim=None):
    """A Transformer that shares embedding, final norm and head with the model, and has `count`
    blocks of its own. They start as copies of the model's from block `first` on, with the first
    hidden_dim units of their MLPs. They attend to the whole text, without a sliding window."""
    last = model.c.n_layers - 1
    units = hidden_dim or model.c.hidden_dim
    c = replace(model.c, n_layers=count, hidden_dim=units, window=None)
    own = Transformer(replace(c, vocab_size=1, tied=True)).to(model.tok.device, model.tok.dtype)
    own.c = c
    own.tok = model.tok
    own.norm = model.norm
    own.head = model.head
    for i, mine in enumerate(own.blocks, first):
        like = model.blocks[min(i, last)]
        for name, p in mine.named_parameters():
            w = attrgetter(name)(like)
            if not isinstance(w, torch.Tensor):     # quantised
                w = w.full(p.dtype)
            if name == "mlp.gate_up":
                w = w.unflatten(0, (2, -1))[:, :units].flatten(0, 1)
            p.data.copy_(w[:, :units] if name == "mlp.down" else w)
    return own


@dataclass(frozen=True)
class Price:
    """What one drafted token costs: `weights` of the head's own, `trunk` blocks of the model and
    the share `output` of the output head. `reads` tells whether its attention covers the whole
    text, and `longest` is the longest draft."""
    weights: float
    trunk: int = 0
    output: float = 1.0
    reads: bool = False
    longest: int = MOST


class Head:
    """What all kinds share, and what a new kind declares."""
    kind = ""           # its name
    shape = {}          # the arguments of its constructor
    model = None        # the frozen model
    own = None          # a Transformer of a few blocks of its own that shares all else; see `graft`
    weights = None      # a module that holds all that is trained
    taps = ()           # the states of the target that it reads
    price = None        # a Price: what a drafted token costs
    branches = False    # whether any node of its trees may have children, or only first children
    ranks = ()          # the chance that the model's greedy token is its first, second, ... choice

    def state(self, trace):
        """What it reads of a trace. (B, T, taps * dim)"""
        return torch.cat([trace[tap] for tap in self.taps], -1)

    def count(self):
        """The number of its own weights."""
        return sum(p.numel() for p in self.weights.parameters())

    def predict(self, tokens, trace, cache):
        """What training compares with the target. Yields (k, logits (B, N, V)), where row n is what
        the head says of the token k places after the next one. tokens (B, T) are the text, trace
        holds the target's states at `taps`, and cache its keys and values."""
        raise NotImplementedError

    def chains(self, rule):
        """The drafter of chains with this head."""
        raise NotImplementedError

    def drafter(self, rule, shape=None):
        """A drafter of chains, or of trees of this shape, a list of parents."""
        families = Counter(shape).values()      # how many children each parent has
        widths = [sum(size > i for size in families) for i in range(1, max(families, default=0))]
        if widths:
            return Siblings(self.chains(rule), widths)
        return self.chains(rule)


# --- drafting


class HeadDraft(Drafter):
    """The drafter of a head. It notes the target's states of all tokens that the target has run,
    even in rounds in which another drafter drafts:

        slot      0  1  2  3  4  5  6
        token     a  b  c  d  e  f  g       g is the last known token, which the target has not run
        noted     a  b  c  d  e  f  .       the target's state of each (a slot later if late = 1)
    """
    late = 0    # how many places after its token a state is read

    def __init__(self, head, *args):
        super().__init__(*args)
        self.head = head
        self.taps = head.taps

    def begin(self, state, trace):
        same_model(self.head.model, state)
        super().begin(state, trace)
        x = self.head.state(trace)                                              # (B, T, taps * dim)
        B, T, dim = x.shape
        self.rows = torch.arange(B, device=x.device)[:, None]                   # (B, 1)
        self.noted = x.new_zeros(B, state.tokens.shape[1], dim)                 # (B, S, taps * dim)
        self.noted[:, self.late : self.late + T] = x

    def observe(self, state, r):
        super().observe(state, r)
        x = self.head.state(r.trace)  # (B, K+1, taps * dim)
        # trap: within `Then`, r.accepted counts only this drafter's part
        lengths = state.send([len(row) for row in r.new])
        offsets = torch.arange(x.shape[1], device=x.device) + self.late
        slots = state.positions(offsets - lengths[:, None])
        self.noted[self.rows, slots] = x    # `scatter_` takes eight times as long

    def last(self, state):
        """The state of each row's last token read. (B, 1, taps * dim)"""
        # a prompt of one token has no token before D: its first draft uses D's own state
        return pick(self.noted, (state.n[:, None] - 2).clamp(min=0))


class Reader(HeadDraft):
    """A HeadDraft with its own block, whose cache holds the text and, while it drafts, its draft.

    The block reads the noted states before its own next draft. In the picture above, after two
    rounds of other drafters, it holds the slots of a, b and c, and d, e and f are unread. In a
    batch, all rows re-read as many tokens as the row that is furthest behind, because reading a
    token again is harmless. What a rejected draft left in the cache is overwritten before it is
    read.
    """

    def __init__(self, head, *args):
        super().__init__(head, *args)
        self.own = head.own
        self.unread = 0
        self.held = [0]     # of each row: how many slots of the cache agree with the text
        self.widest = self.own.widest

    def begin(self, state, trace):
        super().begin(state, trace)
        device = self.noted.device
        self.cache = KVCache(self.own.c, *state.tokens.shape, self.own.attention_dtype(), device)
        T = max(state.lengths)
        chunk = self.own.chunk
        for first in range(0, T, chunk):
            at = Placement.span(first, min(first + chunk, T), device)
            self.own.run(self.inputs(state, at.slots), at, self.cache, [0])
        self.held = [n - 1 for n in state.lengths]
        self.unread = self.late

    def observe(self, state, r):
        super().observe(state, r)
        missing = [n - held for n, held in zip(state.lengths, self.held, strict=True)]
        self.unread = self.late - 1 + max(missing)

    def inputs(self, state, slots):
        """What was noted at `slots` (B or 1, T), which the block reads. (B, T, taps * dim)"""
        return self.noted[self.rows, slots]

    def catch_up(self, state, sublayers=None):
        """Read what is unread, at least one token. Returns the block's output at each row's last
        token. (B, 1, dim)"""
        for start in range(self.late - self.unread, self.late, self.widest):
            stop = min(start + self.widest, self.late)
            at, last = state.back(stop - start, stop)
            x = self.own.run(self.inputs(state, at.slots), at, self.cache, sublayers)
        self.held = [n - 1 + self.late for n in state.lengths]
        self.unread = 0
        return pick(x, last)
