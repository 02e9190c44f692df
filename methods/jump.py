"""Jump drafting (the package economize 0.3.2): a draft begins in the middle of the model."""
import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from drafter import chain
from methods.base import Head, HeadDraft, graft, normed
from model import Placement, Refused


class Jump(Head):
    """A matrix predicts a token's state before block `start`, from its embedding and from the state
    of the token before it after the last of `blocks` blocks. Copies of these blocks run on it, and
    a second matrix leads to the model's output head.

        blocks         read    D        d1
        after them     exact   -        -
        the copies     exact . predicted . predicted      (a dot is the first matrix)
        before them    exact   -        -

    The copies learn, but need no cache of their own. They read the keys and values of the model's
    own blocks, and write beside them those of the draft, which the target overwrites. So there is
    no text to catch up with.

    It is trained on `reach` tokens in a row, each of which reads the state predicted for the one
    before it. `fit` starts both matrices. Raises ValueError for blocks that do not exist.
    """
    kind = "jump"
    reads = True
    reach = 3

    def __init__(self, model, start, blocks=1):
        last = model.c.n_layers - blocks
        dim = model.c.dim
        if not 0 <= start <= last:
            raise Refused(f"a jump over {start} blocks does not land before {blocks} more of "
                          f"{model.c.n_layers}")
        self.model = model
        self.arguments = {"start": start, "blocks": blocks}
        self.layers = slice(start, start + blocks)
        self.taps = [2 * (start + blocks) - 1]
        self.own = graft(model, start, blocks)
        self.weights = nn.Module()
        self.weights.blocks = self.own.blocks
        self.weights.matrix = nn.Parameter(model.tok.new_zeros(dim, 2 * dim))
        self.weights.readout = nn.Parameter(model.tok.new_zeros(dim, dim))

    @torch.no_grad()
    def fit(self, tokens):
        """Start both matrices by least squares: with them the target's own states in texts (B, T)
        lead to the state before the copies, and to the final one."""
        x = self.model.embed(tokens)
        first = 2 * self.layers.start - 1       # -1, before any block, is the embedding
        last = 2 * self.model.c.n_layers - 1
        trace = dict.fromkeys([first, self.taps[0], last])
        self.model.run(x, Placement.span(0, tokens.shape[1], tokens.device), trace=trace)
        trace[-1] = x
        after = normed(trace[self.taps[0]])
        both = torch.cat([after[:, :-1], normed(x)[:, 1:]], -1)
        lead(self.weights.matrix, both, (trace[first] - x)[:, 1:])
        lead(self.weights.readout, after, normed(trace[last]) - after)

    def part(self, cache):
        """The target's cache at the copied blocks, in the same memory."""
        part = copy.copy(cache)
        part.use(cache.k[self.layers], cache.v[self.layers])
        return part

    def land(self, tokens, before):
        """What enters the copies, by tokens and the states before them. (B, T, dim)"""
        x = self.own.embed(tokens)
        both = torch.cat([normed(before), normed(x)], -1)
        return x + self.own.linear(both, self.weights.matrix)

    def read_out(self, x):
        """Raw logits (B, T, V) by what leaves the copies (B, T, dim)."""
        x = normed(x)
        return self.own.unembed(x + self.own.linear(x, self.weights.readout))

    def predict(self, tokens, trace, cache):
        T = tokens.shape[1]
        at = Placement.span(0, T, tokens.device)
        ones = torch.ones(T, T, dtype=torch.bool, device=tokens.device)
        zeros = torch.zeros((), dtype=self.own.attention_dtype(), device=tokens.device)
        keys = Steps(self.part(cache))
        x = trace[self.taps[0]]
        for k in range(1, 1 + self.reach):
            # the text up to where the draft began, and a key of each step since then
            seen = [ones.tril(-k), *(ones.tril(d).triu(d) for d in range(1 - k, 1))]
            mask = zeros.masked_fill(~torch.cat(seen, 1), -math.inf)        # (T, (1+k) T)
            before = F.pad(x, (0, 0, 1, 0))[:, :-1]
            x = self.own.run(self.land(tokens, before), at, keys, masks={None: mask})
            yield k, self.read_out(x[:, k:])

    def chains(self, rule):
        return JumpDraft(self, rule)


def lead(matrix, x, y):
    """Make it the matrix that leads from x (B, T, N) to y (B, T, M) with the least error."""
    x = x.flatten(0, 1).double()
    y = y.flatten(0, 1).double()
    # trap: on a CPU `lstsq` is wrong at times where columns of x depend on each other
    matrix.copy_((torch.linalg.pinv(x.mT @ x, hermitian=True) @ (x.mT @ y)).mT)


class Steps:
    """A cache for training: the target's keys and values, and behind them those of each step."""

    def __init__(self, cache):
        self.layers = [[pair] for pair in cache.layers]

    def write(self, layer, k, v, at, start=0):
        """As `KVCache.write`."""
        self.layers[layer].append((k, v))
        keys, values = zip(*self.layers[layer], strict=True)
        return torch.cat(keys, 2), torch.cat(values, 2)


class JumpDraft(HeadDraft):
    """The drafter of a Jump. Its first token reads the target's exact state."""

    def begin(self, state, trace):
        super().begin(state, trace)
        self.cache = self.head.part(state.cache)

    def propose(self, state):
        head = self.head
        self.before = self.notes.last(state)                                    # (B, 1, dim)

        def step(token, k):
            x = head.land(token, self.before)
            self.before = head.own.run(x, state.span(k, k + 1), self.cache)
            return head.read_out(self.before)                                   # (B, 1, V)

        return chain(state, step, self.rule)
