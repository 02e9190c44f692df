"""Drafting with a trained head: four drafters for the kinds of heads in methods/heads.py.

The one thing to remember: a head drafts from states that the target computed anyway. They come as `taps` of
the prompt and of every round, so that a head knows the text also where another drafter drafted.

    drafter        heads                  drafts from                               its draft
    ExitDraft      Kangaroo, ExitBlock    the state of each token after block E     a chain
    EagleDraft     Eagle                  each token, the final state before it     a chain
    MedusaDraft    Medusa                 the final state of the last token read    a chain or a tree
    ProphetDraft   Prophet                its final state, and the draft so far     a chain

The last token read is the one before the last known token D: the target chose D after it, and nobody has
run D itself yet. `methods.trees.Siblings` gives the chains of all of them siblings.
"""
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from kvcache import KVCache
from layerskip import SelfDraft, early_exit
from methods.trees import siblings
from model import Placement
from speculative import Draft, Drafter, chain


def unit(x):
    """x (..., dim), each vector scaled to a root mean square of 1, which the final norm would do anyway. What
    is added to the mean square is torch's own: 2^-23, and 2^-52 in float64."""
    return F.rms_norm(x, x.shape[-1:])


def pick(x, at):
    """Of x (B, T, ...) the one at place `at` (B,) of each row. (B, ...)"""
    return x[torch.arange(len(at), device=at.device), at]


class ScratchTail:
    """A cache for one pass over a block of which it keeps the first T tokens. The others see what it holds
    before the slot `end`, and each other; what they write is forgotten. Their slots begin at `end`."""

    def __init__(self, cache, T, end):
        self.cache, self.T, self.end = cache, T, end

    def write(self, layer, k, v, at, start=0):
        T = self.T
        if T > 0:   # trap: in training nothing may be written to what gradients flow through
            self.cache.write(layer, k[:, :, :T], v[:, :, :T], at._replace(slots=at.slots[:, :T]))
        keys, values = (t[:, :, start : self.end] for t in self.cache.layers[layer])
        return torch.cat([keys, k[:, :, T:]], 2), torch.cat([values, v[:, :, T:]], 2)


def same_model(model, state):
    if model.blocks is not state.model.blocks:
        raise ValueError("this drafter reads the target's own states: give it the model that decodes")


class Reader(Drafter):
    """A drafter with a block of its own, whose cache holds the text and, while it drafts, its own drafts. In
    rounds in which others draft it only notes the states of what was written, and reads all of them at once
    before it drafts again: `unread` says how many. What it wrote of refused drafts is overwritten or dead."""

    def hold(self, head):
        self.head, self.own, self.taps = head, head.own, head.taps
        self.noted, self.unread = [], 0

    def begin(self, state, trace):
        same_model(self.head.model, state)
        super().begin(state, trace)
        self.cache = KVCache(self.own.c, *state.tokens.shape, self.own.attention_dtype(), state.n.device)
        self.noted, self.unread = [[] for _ in state.known], 0      # of each row some (T, dim)
        self.held = [len(text) - 1 for text in state.known]         # how many tokens are read or noted
        for i, x in enumerate(self.inputs(state, trace).split(256, 1)):
            self.own.run(x, Placement.at(256 * i, 256 * i + x.shape[1], x.device), self.cache, [0])

    def observe(self, state, r):
        super().observe(state, r)
        rows = zip(r.trace[self.taps[0]], state.known, r.new, strict=True)
        for b, (x, text, new) in enumerate(rows):
            first = len(text) - 1 - len(new)        # where the block stands: at D, before it went on
            self.noted[b].append(x[self.held[b] - first : len(new)])
            self.held[b] = len(text) - 1
        self.unread = max(sum(map(len, states)) for states in self.noted)

    def take_noted(self, state, last):
        """(x, at, more): the noted states (B, T, dim), the Placement of the run whose last one belongs at
        offset `last` from D, and how many states each row has. A row with fewer of them than another one gets
        dead states after its own, for slots that are overwritten before anybody reads them."""
        x = pad_sequence([torch.cat(states) for states in self.noted], batch_first=True)    # (B, T, dim)
        more = [sum(map(len, states)) for states in self.noted]
        self.noted, self.unread = [[] for _ in more], 0
        if len(more) == 1:
            return x, state.at(last + 1 - more[0], last + 1), more
        steps = torch.arange(last, last + x.shape[1], device=state.n.device)                # (T,)
        slots = state.after(steps - state.send(more)[:, None])                              # (B, T)
        at = state.at(last + 1 - max(more), last + 1 + x.shape[1] - min(more))
        return x, at._replace(positions=slots, slots=slots), more


class ExitDraft(Reader, SelfDraft):
    """Early exit with an adapter between the exit and the model's head (Kangaroo, arXiv 2404.18911). The
    paper's second early exit is a rule: `control.Confidence(0.6)`. The adapter's cache holds the states after
    the exit of the text before D."""

    def __init__(self, head, rule):
        super().__init__(head.model, early_exit(head.model.c.n_layers, head.shape["exit_layer"]), rule)
        self.hold(head)

    def inputs(self, state, trace):
        return trace[self.taps[0]]

    def logits(self, state, x, k):
        if self.unread:     # keys and values alone are needed: the adapter's attention
            noted, at, _ = self.take_noted(state, -1)
            self.own.run(noted, at, self.cache, [0])
        x = self.own.run(x, state.at(k), self.cache, self.head.sublayers)
        return self.own.unembed(x)


class EagleDraft(Reader):
    """A block that reads a token and the final state of the one before; of a drafted one, what it said itself
    (EAGLE, arXiv 2401.15077). D is read last, with all that was written since the last draft.

    What is noted of a token is the final state, which the block reads with the token after."""

    def __init__(self, head, rule):
        super().__init__(rule)
        self.hold(head)

    def begin(self, state, trace):
        super().begin(state, trace)
        final = F.pad(trace[self.taps[0]], (0, 0, 1, 0))                        # (B, T+1, dim)
        self.noted = [[x[len(text) - 1 : len(text)]] for x, text in zip(final, state.known, strict=True)]
        self.unread = 1

    def inputs(self, state, trace):
        final = trace[self.taps[0]]
        return self.head.join(state.tokens[:, : final.shape[1]], F.pad(final, (0, 0, 1, -1)))

    def propose(self, state):
        def step(token, k):
            if k > 0:
                x, at = self.said, state.at(k)
            else:
                x, at, more = self.take_noted(state, 0)
                token = state.read(at.slots)
            x = self.own.run(self.head.join(token, x), at, self.cache)
            self.said = x[:, -1:] if k > 0 or len(more) == 1 else pick(x, state.send(more) - 1)[:, None]
            return self.own.unembed(self.said)                                  # (B, 1, V)

        return Draft(*chain(state, step, self.rule))


class LastState(Drafter):
    """Keeps the state of the last token read."""

    def __init__(self, head, rule):
        super().__init__(rule)
        self.head, self.taps = head, head.taps

    def begin(self, state, trace):
        same_model(self.head.model, state)
        super().begin(state, trace)
        # a prompt of one token has no token read before D: its first draft is a guess from D's own state
        self.read = trace, [max(0, len(text) - 2) for text in state.known]

    def observe(self, state, r):
        super().observe(state, r)
        # trap: where `Then` goes on, r.accepted counts our own part only
        self.read = r.trace, [max(0, len(row) - 1) for row in r.new]

    def last(self, state):
        """The state of each row's last token read. (B, 1, dim)"""
        trace, at = self.read
        return pick(trace[self.taps[0]], state.send(at))[:, None]


class MedusaDraft(LastState):
    """All tokens at once: none depends on the others (Medusa, arXiv 2401.10774).

    shape: None for a chain; else the parents of a tree, such as `methods.trees.best_tree` makes them, level
    by level. The i-th child of a node is the i-th token of one draw without replacement from what the head of
    its level says. So all families of a level offer the same tokens, which changes nothing for the text: only
    one of them is tried. Where nothing is left to draw, as when greedy, it is the i-th most likely token. A
    rule says how many levels each row has. Raises ValueError for more levels than there are heads.
    """

    def __init__(self, head, rule, shape=None):
        super().__init__(head, rule)
        self.shape = None if shape is None else Shape(shape)
        levels = head.steps if shape is None else self.shape.depth
        if levels > head.steps or self.rule.most > levels:
            raise ValueError(f"{head.steps} heads draft that many tokens, not {max(levels, self.rule.most)}"
                             if shape is None or levels > head.steps else
                             f"a tree of {levels} levels has no place for gamma {self.rule.most}")

    def propose(self, state):
        said, last = [], self.last(state)

        def step(token, k):
            said.append(self.head.after(last, k))
            return said[-1]                                                     # (B, 1, V)

        tokens, q, length = chain(state, step, self.rule)
        draft = Draft(tokens, q, length)
        if tokens.shape[1] == 0 or self.shape is None:
            return draft
        return self.shape.grow(state, draft, torch.cat(said, 1))


class Shape:
    """A tree's parents, level by level, and how its tokens are found among those drawn for each level."""

    def __init__(self, parents):
        depths = [0]
        for parent in parents:
            depths.append(depths[parent] + 1)
        if depths != sorted(depths):
            raise ValueError(f"a tree must be given level by level, got the parents {list(parents)}")
        self.parents, self.depth = list(parents), depths[-1]
        self.nodes = [(d, parents[:k].count(parents[k])) for k, d in enumerate(depths[1:])]     # depth, rank
        self.until = list(accumulate(depths.count(d) for d in range(1, self.depth + 1)))  # nodes to depth d

    def grow(self, state, draft, logits):
        """The tree of a chain (B, K) and of what was said of each of its places (B, K, V)."""
        K = draft.tokens.shape[1]
        nodes = self.nodes[: self.until[K - 1]]
        ranks = range(1, 1 + max(rank for _, rank in nodes))
        widths = [max(depth for depth, rank in nodes if rank == r) for r in ranks]
        tokens, q = draft.tokens, draft.q
        if widths:
            others, other_q = siblings(draft, logits, widths, state.coins)      # (B, S), (B, S, V)
            tokens, q = torch.cat([tokens, others], 1), torch.cat([q, other_q], 1)
        starts = [0, *accumulate(widths, initial=K)]        # of each rank's columns
        columns, parents = state.send([[starts[rank] + depth - 1 for depth, rank in nodes],
                                       self.parents[: len(nodes)]]).unbind()
        length = draft.length
        if length is not None:
            length = state.send([0, *self.until])[length]
        return Draft(tokens[:, columns], q[:, columns], length, parents=parents[None])


class ProphetDraft(LastState):
    """A small decoder writes the draft token by token. It starts anew in each round, from the final state of
    the last token read, and sees no other text (lucidrains' "prophet", after MEGABYTE, arXiv 2305.07185)."""

    def begin(self, state, trace):
        super().begin(state, trace)
        own, (B, S) = self.head.own, state.tokens.shape
        self.cache = KVCache(own.c, B, S, own.attention_dtype(), state.n.device)

    def propose(self, state):
        own, last = self.head.own, self.last(state)

        def step(token, k):     # its slots count from the state, and so all rows stand at the same place
            x, first = own.embed(token), k + 1
            if k == 0:
                x, first = torch.cat([unit(last), x], 1), 0
            at = Placement.at(first, k + 2, x.device)
            return own.unembed(own.run(x, at, self.cache)[:, -1:])              # (B, 1, V)

        return Draft(*chain(state, step, self.rule))
