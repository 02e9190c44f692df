"""What all trained heads share. A trained head is a small module on a frozen model that drafts for
it.

A head learns to predict the model's next tokens from states that the model computes anyway. The
model does not change, and neither does its text. Each kind has a file of its own, which says what
it learns to predict and how it drafts.
"""
from collections import Counter
from dataclasses import replace
from operator import attrgetter

import torch
import torch.nn.functional as F

from control import MOST
from drafter import Drafter
from layerskip import same_model
from model import Transformer


def normed(x):
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


class Head:
    """What all kinds share, and what a new kind declares."""
    kind = ""           # its name
    arguments = {}      # of its constructor
    model = None        # the frozen model
    own = None          # a Transformer of a few blocks of its own that shares all else; see `graft`
    weights = None      # a module that holds all that is trained
    taps = ()           # the states of the target that it reads
    trunk = ()          # the model's sub-layers that a drafted token runs
    reads = False       # whether an attention of its own covers the whole text
    longest = MOST      # tokens of a draft
    branches = False    # whether any node of its trees may have children, or only first children
    ranks = ()          # the chance that the model's greedy token is its first, second, ... choice

    def tapped(self, trace):
        """What it reads of a trace. (B, T, taps * dim)"""
        return torch.cat([trace[tap] for tap in self.taps], -1)

    def count(self):
        """The number of its own weights."""
        return sum(p.numel() for p in self.weights.parameters())

    def per_token(self):
        """How many weights of its own a drafted token reads."""
        return self.count()

    def fit(self, tokens):
        """Called before training, with texts (B, T), to start from what they show."""

    def predict(self, tokens, trace, cache):
        """What training compares with the target. Yields (k, logits (B, N, V)), where row n is what
        the head says of the token k places after the next one. tokens (B, T) are the text, trace
        holds the target's states at `taps`, and cache its keys and values."""
        raise NotImplementedError

    def chains(self, rule):
        """The drafter of chains with this head."""
        raise NotImplementedError

    def drafter(self, rule, parents=None):
        """A drafter of chains, or of trees with these parents; see `methods.trees`."""
        families = Counter(parents).values()      # how many children each parent has
        widths = [sum(size > i for size in families) for i in range(1, max(families, default=0))]
        if not widths:
            return self.chains(rule)
        from methods.trees import Siblings  # late: only trees need it

        return Siblings(self.chains(rule), widths)


# --- drafting


class Notes:
    """The target's states of all tokens that it has run, which a head drafts from. Those of every
    round are kept, also where another drafter drafts.

        slot      0  1  2  3  4  5  6
        token     a  b  c  d  e  f  g       g is the last known token, which the target has not run
        noted     a  b  c  d  e  f  .       the target's state of each
    """

    def __init__(self, head, state, trace):
        same_model(head.model, state)
        self.head = head
        self.state = state
        x = head.tapped(trace)                                                  # (B, T, taps * dim)
        B, T, dim = x.shape
        self.rows = torch.arange(B, device=x.device)[:, None]                   # (B, 1)
        self.noted = x.new_zeros(B, state.tokens.shape[1], dim)                 # (B, S, taps * dim)
        self.noted[:, :T] = x
        self.waiting = []       # the trace, n and new tokens of the rounds since the last draft

    def observe(self, state, r):
        # trap: within `Then`, r.accepted counts only this drafter's part
        self.waiting.append((r.trace, state.n, [len(row) for row in r.new]))

    @torch.inference_mode()
    def note(self):
        """Write what is waiting to its slots. It is only done for a draft, because another drafter
        may draft in most rounds."""
        for trace, n, lengths in self.waiting:
            x = self.head.tapped(trace)                                     # (B, K+1, taps * dim)
            first = n - 1 - self.state.send(lengths)                            # (B,)
            slots = first[:, None] + torch.arange(x.shape[1], device=n.device)
            slots.clamp_(max=self.noted.shape[1] - 1)   # a row near its limit overshoots
            self.noted[self.rows, slots] = x    # `scatter_` takes eight times as long
        self.waiting = []

    def at(self, slots):
        """The states at `slots` (B or 1, T). (B, T, taps * dim)"""
        self.note()
        return self.noted[self.rows, slots.clamp(min=0)]

    def last(self, state):
        """The state of each row's last token read. (B, 1, taps * dim)"""
        # a prompt of one token has no token before D: its first draft uses D's own state
        return self.at(state.n[:, None] - 2)


class HeadDraft(Drafter):
    """The drafter of a head, with Notes of the target's states."""

    def __init__(self, head, rule):
        super().__init__(rule)
        self.head = head
        self.taps = head.taps

    def begin(self, state, trace):
        super().begin(state, trace)
        self.notes = Notes(self.head, state, trace)

    def observe(self, state, r):
        super().observe(state, r)
        self.notes.observe(state, r)
