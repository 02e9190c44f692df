"""Hidden Transfer (arXiv 2404.12022): pseudo states of the tokens to come, which run through the
upper blocks. By our tables Medusa and EAGLE gain more."""
import torch
import torch.nn.functional as F
from torch import nn

from lab.aside import ScratchTail, masks
from methods.base import Head
from methods.costs import by_weights
from methods.medusa import MedusaDraft
from model import Placement, Refused


def own_weights(model, **tensors):
    """A module that holds these tensors as weights, in the model's type and on its device."""
    # trap: of a dict it would sort the names, and so the states of the optimiser
    return nn.ParameterDict([(name, t.to(model.tok)) for name, t in tensors.items()])


class TransferDraft(MedusaDraft):
    """In the paper drafting and verifying are one pass, in which the pseudo states ride along with
    each token of the block. Here the pseudo states of the last token read take a pass of their own
    through the upper blocks. They stand where the next tokens will, and see what that token sees
    and the pseudo states before them. The same round's verification overwrites what they write."""

    def last(self, state):
        """The final states of each row's pseudo states. (B, N, dim)"""
        head = self.head
        N = max(1, min(head.steps, max(state.room)))
        if head.arguments["inject_layer"] > 0:
            x = self.notes.last(state)                                           # (B, 1, dim)
        else:
            x = head.model.embed(state.read((state.n[:, None] - 2).clamp(min=0)))
        rows = head.spread(x)[:, 0, :N]                                         # (B, N, dim)
        above = range(2 * head.arguments["inject_layer"], 2 * head.model.c.n_layers)
        return head.model.run(rows, state.span(0, N), state.cache, above)


class Transfer(Head):
    """Hidden Transfer (arXiv 2404.12022): linear maps of a token's state after block t make pseudo
    states of the tokens to come, which run through the blocks above t, each one seeing what its
    token sees and those before it. The model's own head says of pseudo state k the token k places
    after the next.

    t = 0 is a predicting stream of ProphetNet (arXiv 2001.04063), with a learnt embedding; t = L is
    a Medusa head without its residual block. The pseudo states start as copies.
    """
    kind = "transfer"
    branches = True

    def __init__(self, model, inject_layer, steps):
        L, dim = model.c.n_layers, model.c.dim
        if not 0 <= inject_layer <= L:
            raise Refused(f"the inject layer must lie between 0 and {L} (all blocks), got "
                          f"{inject_layer}")
        self.model = model
        self.arguments = {"inject_layer": inject_layer, "steps": steps}
        self.steps = steps
        self.taps = [2 * max(1, inject_layer) - 1]
        self.weights = own_weights(model, matrix=torch.eye(dim).repeat(steps, 1, 1),
                                   bias=torch.zeros(steps, dim))
        self.longest = steps

    def per_token(self):
        """A share of its own weights and of the blocks above, which one pass reads for all rows."""
        c = self.model.c
        counted = by_weights(c)
        blocks = c.n_layers - self.arguments["inject_layer"]
        above = blocks * (counted.attention + counted.mlp) * counted.unit
        return (self.count() + above) / self.steps

    def spread(self, x):
        """The pseudo states of each token, (B, T, dim) -> (B, T, steps, dim)."""
        w = self.weights
        return F.linear(x, w.matrix.flatten(0, 1)).unflatten(-1, w.bias.shape) + w.bias

    def after(self, rows, k, before):
        """What row k of the final pseudo states (B, steps, dim) says, (B, 1, V)."""
        return self.model.unembed(rows[:, k : k + 1])

    def predict(self, tokens, trace, cache):
        m = self.model
        T = tokens.shape[1]
        t = self.arguments["inject_layer"]
        rows = self.spread(trace[self.taps[0]] if t > 0 else m.embed(tokens)).flatten(1, 2)
        at = riders(T, self.steps, tokens.device)
        hidden = masks(m, at.positions[:, T:], at.positions, at.tree[:, T:])
        at = Placement(at.positions[:, T:], at.slots[:, T:], 0, at.end)
        x = m.bare.run(rows, at, ScratchTail(cache, 0, T), range(2 * t, 2 * m.c.n_layers),
                         masks=hidden)
        x = x.unflatten(1, (T, -1))                                             # (B, T, steps, dim)
        for k in range(1, self.steps + 1):
            yield k, m.unembed(x[:, :-k, k - 1])

    def drafter(self, rule, parents=None):
        return TransferDraft(self, rule, parents)


def riders(T, N, device=None):
    """The Placement of T tokens and, after them, of N rows that ride along with each. These stand
    where the next tokens will, and see what their token sees, themselves, and their token's rows
    before them.

    >>> at = riders(2, 2)
    >>> at.positions.tolist(), at.tree.int().tolist()[0][4:]    # the rows of token 1
    ([[0, 1, 1, 2, 2, 3]], [[1, 1, 0, 0, 1, 0], [1, 1, 0, 0, 1, 1]])
    """
    token, row = torch.arange(T, device=device), torch.arange(T * N, device=device)
    mine = row[:, None] // N                                                    # each row's token
    tree = torch.cat([token <= mine, (row // N == mine) & (row <= row[:, None])], 1)
    text = F.pad(torch.ones(T, T, dtype=torch.bool, device=device).tril(), (0, T * N))
    tree = torch.cat([text, tree])[None]                                        # (1, T+T*N, T+T*N)
    slots = torch.arange(T + T * N, device=device)[None]
    return Placement(torch.cat([token, row // N + 1 + row % N])[None], slots, 0, T + T * N, tree)
