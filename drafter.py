"""Where drafts come from, how far they go, and what a drafter must tell the loop.

The one thing to remember: no drafter can change the distribution of the text. It hands over tokens
with the very q that they were drawn from, and the loop does the rest.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from kvcache import new_cache, pick
from model import SPARE, Placement, Refused, Transformer

MOST = 16  # the longest draft that is considered; a rule with a published limit may draft more


@dataclass
class Reuse:
    """What the draft already computed with the target's own sub-layers, so the target can skip
    it."""
    first: int                 # the pass begins at this sub-layer
    x: torch.Tensor            # (B, K+1, dim) what enters it
    trace: dict                # {tap: (B, K+1, dim)} of the taps before it


@dataclass
class Draft:
    """What a drafter proposes, a chain of tokens for each row. (For trees see `methods.trees`.)"""
    tokens: torch.Tensor                # (B, K)
    q: torch.Tensor | None = None       # (B, K, V) the very tensors that tokens were drawn from;
    #                                     None: tokens were copied, so q is one-hot
    length: torch.Tensor | None = None  # (B,) how many of the K are each row's draft; None: all
    reuse: Reuse | None = None

    @classmethod
    def none(cls, state):
        return cls(state.tokens[:, :0])

    def cut(self, K: int) -> Draft:
        """The first K drafted tokens. If that is not all, nothing is reused."""
        if self.tokens.shape[1] <= K:
            return self
        q = None if self.q is None else self.q[:, :K]
        length = None if self.length is None else self.length.clamp(max=K)
        return replace(self, tokens=self.tokens[:, :K], q=q, length=length, reuse=None)

    def trimmed(self, state) -> Draft:
        """The draft as it is verified. `length` leaves room in each row for the token after it."""
        draft = self.cut(max(state.room))
        K = draft.tokens.shape[1]
        length = state.send([min(K, room) for room in state.room])
        if draft.length is not None:
            length = torch.minimum(length, draft.length)
        return replace(draft, length=length)

    def place(self, state) -> Placement:
        """The Placement of its block, which is the last known token and the K drafted ones."""
        return state.span(0, self.tokens.shape[1] + 1)

    def judge(self, state, r, verify):
        """Verify the draft by the pass in a Round r. Returns the Round, how many tokens are
        accepted (B,), and the token after them (B,). A tree returns the Round of a chain."""
        return r, *verify(r.p, self.q, self.tokens, state.coins, self.length)


class Rule:
    """How far to draft. `how_far` is called before each draft and `learn` after each round. A rule
    may have a method `stop`, which `chain` calls after each drawn token. No rule can change the
    distribution of the text. This one always drafts the same number of tokens."""
    stop = None

    def __init__(self, gamma: int):
        if type(gamma) is not int or gamma < 0:
            raise Refused("gamma, how many tokens to draft, must be a whole number from 0 up, "
                          f"got {gamma}")
        self.longest = gamma

    def begin(self, state):
        """Called before the first round of a run. What was learnt in earlier runs may stay."""

    def how_far(self, state) -> int | list[int]:
        """How many tokens to draft, for all rows or as a list with a number for each."""
        return self.longest

    def learn(self, state, r):
        """Called after a Round r."""


class Drafter:
    """Where drafts come from. This one drafts nothing, which is plain decoding.

    A whole number as `rule` stands for a Rule that always drafts that many. `taps` are the target's
    sub-layers whose outputs the drafter reads. `begin` gets the outputs for the prompt, and
    `Round.trace` holds the outputs for a round.
    """
    taps: tuple[int, ...] = ()
    follower: Follower | None = None    # its own cache of the text, if it has one

    def __init__(self, rule: Rule | int = 0):
        self.rule = rule if isinstance(rule, Rule) else Rule(rule)

    def begin(self, state, trace):
        """Called after the prompt was read. trace is {tap: (B, T, dim)}."""
        self.rule.begin(state)

    def propose(self, state) -> Draft:
        """The next Draft."""
        return Draft.none(state)

    def observe(self, state, r):
        """Called after a Round r, to learn from it."""
        self.rule.learn(state, r)


def wanted(state, rule: Rule) -> list[int]:
    """How many tokens each row drafts, with room for the token after them."""
    gammas = rule.how_far(state)
    if isinstance(gammas, int):
        gammas = [gammas] * len(state.left)
    return [min(gamma, room) for gamma, room in zip(gammas, state.room, strict=True)]


@torch.inference_mode()     # as in the loop, so that `propose` can also be called by hand
def chain(state, step, rule):
    """Draw a chain of tokens one by one, as every drafter with a model does. Returns a Draft.

    step(token (B, 1), k) reads `token`, which stands k tokens after the last known one, and returns
    the raw logits (B, 1, V) of the token after it. After each draw, a rule's stop(k, logits (B, V),
    token (B,)) returns a list of bools, which tells the rows that stop there. *The drawn token
    stays*, because discarding it for its value would change the distribution of the text. While any
    row goes on, all rows draw and spend uniforms:

        row 0   a b c d   length 4
        row 1   a ! . .   length 2: it stopped at "!", which is still part of its draft
    """
    lengths = wanted(state, rule)
    token = state.last()
    tokens = []
    qs = []
    while len(tokens) < max(lengths):
        k = len(tokens)
        logits = step(token, k)                                                 # (B, 1, V)
        q = state.coins.settle(state.probs(logits), state.n[:, None], k - 1)
        token = state.coins.choose(q)                                           # (B, 1)
        tokens.append(token)
        qs.append(q)
        if rule.stop:   # here, and only here, a chain waits for the device
            for b, stops in enumerate(rule.stop(k, logits[:, 0], token[:, 0])):
                if stops:
                    lengths[b] = min(lengths[b], k + 1)
    if not tokens:
        return Draft.none(state)
    return Draft(torch.cat(tokens, 1), torch.cat(qs, 1), state.send(lengths))


# --- a draft model


class Follower:
    """A drafter's own cache, which follows the text. The first filled[b] slots of row b agree with
    the text; what stands after them is dead, and is overwritten before it is read.

    It follows the text up to the offset `stop`, counted as in `State.span`: 1 includes the last
    known token D, 0 does not. Reading a token again only rewrites the same keys and values, so all
    rows read as many tokens as the row that is furthest behind.
    """

    def __init__(self, model, state, stop, sublayers=None):
        self.model = model
        self.state = state
        self.stop = stop
        self.sublayers = sublayers
        self.cache = new_cache(model, *state.tokens.shape)
        self.filled = [0] * len(state.known)

    @property
    def unread(self):
        """How many tokens the row that is furthest behind has not read."""
        return self.missing(self.state)

    def missing(self, state):
        rows = zip(state.lengths, self.filled, strict=True)
        return max(n - 1 + self.stop - filled for n, filled in rows)

    def catch_up(self, state, inputs, least=1):
        """Read inputs(slots) (B, T, dim) of all that is unread, at least `least` tokens. Returns x
        at each row's last token (B, 1, dim), or None if no text has a token before `stop`."""
        stop = self.stop
        T = min(max(state.lengths) - 1 + stop, max(least, self.missing(state)))
        width = self.model.widest
        if not any(self.filled):    # a prompt
            width = self.model.chunk
        x = None
        for first in range(stop - T, stop, width):
            end = min(first + width, stop)
            at, last = state.back(end - first, end)
            x = self.model.run(inputs(at.slots), at, self.cache, self.sublayers)
        self.filled = [n - 1 + stop for n in state.lengths]
        return None if x is None else pick(x, last.clamp(min=0))


class ModelDraft(Drafter):
    """Draft with a smaller model of the same vocabulary, or with some sub-layers of one. It has its
    own cache (Leviathan et al. 2023).

    Before each draft it reads the tokens it has not read yet, at least the last two known ones.
    After a fully accepted draft two are missing, the last drafted token and the bonus token.
    Otherwise one is.
    """

    def __init__(self, model: Transformer, rule: Rule | int,
                 sublayers: Sequence[int] | None = None):
        super().__init__(rule)
        self.model = model
        self.sublayers = sublayers

    def begin(self, state, trace):
        super().begin(state, trace)
        c = self.model.c
        vocab = state.model.c.vocab_size
        needed = state.tokens.shape[1] - SPARE
        if c.vocab_size != vocab:
            raise Refused(f"the draft model's vocabulary is {c.vocab_size}, the target's "
                          f"{vocab}")
        if c.max_len < needed:
            raise Refused(f"the draft model's context is {c.max_len}, but prompt and answer "
                          f"need {needed}")
        self.follower = Follower(self.model, state, 1, self.sublayers)
        self.follower.catch_up(state, partial(self.embed, state))

    def embed(self, state, slots):
        return self.model.embed(state.read(slots.expand(len(state.known), -1)))

    def propose(self, state):
        m = self.model

        def step(token, k):
            if k == 0:
                return m.unembed(self.follower.catch_up(state, partial(self.embed, state), least=2))
            x = m.run(m.embed(token), state.span(k, k + 1), self.follower.cache, self.sublayers)
            return m.unembed(x)

        draft = chain(state, step, self.rule)
        K = draft.tokens.shape[1]
        if K > 0:   # all but the last drafted token are read; `observe` drops the rejected ones
            self.follower.filled = [n + K - 1 for n in state.lengths]
        return draft

    def observe(self, state, r):
        super().observe(state, r)
        # A row may have drafted less than the longest one, or another drafter may have continued
        # its draft. The last accepted token may be a sibling, which this drafter has not read.
        rows = zip(state.known, r.new, r.accepted.tolist(), strict=True)
        agree = [len(text) - len(new) + accepted - 1 for text, new, accepted in rows]
        self.follower.filled = list(map(min, self.follower.filled, agree))
