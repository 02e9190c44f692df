"""M2R2 (arXiv 2502.02040), reconstructed. A second row of each token runs ahead through the first
blocks. By our tables it is worth no more than a bare exit."""
from functools import partial

import torch
import torch.nn.functional as F

from lab.aside import ScratchTail, masks
from lab.transfer import own_weights
from layerskip import SelfDraft, early_exit
from methods.base import Head, normed
from methods.kangaroo import Kangaroo
from model import Placement, StandIn


class TwoRowDraft(SelfDraft):
    """Early exit by an accelerated row that runs beside the ordinary one (M2R2, arXiv 2502.02040).
    What is handed over to the target is the ordinary row."""

    def __init__(self, head, rule):
        super().__init__(head, early_exit(head.c.n_layers, head.arguments["exit_layer"]), rule)

    def logits(self, state, x, k):
        return self.model.unembed(self.model.states[:, :, -1])


class M2R2(Head, StandIn):
    """Accelerated residuals (M2R2, arXiv 2502.02040), in our reading of the paper, whose code is
    not public.

    Beside the ordinary row of each token a second one runs through the first E blocks, with the
    same weights and an adapter of rank r for each block: f <- block(f) + up down normed(f). After
    block i it should equal the ordinary row after block i L / E, and so at the exit the final one.
    It reads the ordinary keys and values of the tokens before it and its own, and writes none, so
    that the cache stays the target's. Both rows are in one pass, which reads each weight once.
    Without adapters, rank 0, the second row is the first, which makes a bare early exit.

    `rank` is None for as many weights as Kangaroo's adapter has. The head stands in for its model
    while it drafts. Not here are the paper's gate, which drafted too far when we tried it, and its
    loading of experts.
    """
    kind = "m2r2"
    reads = True

    def __init__(self, model, exit_layer, rank=None):
        L = model.c.n_layers
        dim = model.c.dim
        E = len(early_exit(L, exit_layer)) // 2
        if rank is None:
            rank = max(1, round(Kangaroo(model, exit_layer).count() / (2 * dim * E)))
        self.model = model
        self.arguments = {"exit_layer": E, "rank": rank}
        self.taps = [2 * -(-i * L // E) - 1 for i in range(1, 1 + E)]
        down = 0.02 * torch.randn(E, rank, dim, generator=torch.Generator().manual_seed(0))
        self.weights = own_weights(model, down=down, up=torch.zeros(E, dim, rank))
        self.trunk = early_exit(L, E)

    def rise(self, run, x, at, cache, trace=None):
        """The states after each of the first E blocks, (B, T, dim) each. Of the rows x (B, T, dim)
        those that the cache, a ScratchTail, does not keep are accelerated."""
        kept = cache.T
        for i, (down, up) in enumerate(zip(self.weights.down, self.weights.up, strict=True)):
            more = F.linear(F.linear(normed(x[:, kept:]), down), up)
            x = run(x, at, cache, [2 * i, 2 * i + 1], trace)
            x = torch.cat([x[:, :kept], x[:, kept:] + more], 1)
            yield x

    def run(self, x, at, cache, sublayers, trace):
        """`Transformer.run` of the first E blocks over one token of each row, x (B, 1, dim). Beside
        it runs the accelerated row, whose states stay in `states` (B, 1, E, dim). If the model is a
        stand-in, it computes the ordinary row by itself, which the target reads to the bit."""
        places = at.positions                                                   # (B or 1, 1)
        beyond = torch.full_like(places, at.end)
        if isinstance(self.model, StandIn):
            y = self.model.run(x, at, cache, sublayers, trace)
            second = Placement(places, beyond, at.first, at.end + 1)
            rows = self.rise(self.model.bare.run, x, second, ScratchTail(cache, 0, at.end))
            self.states = torch.stack(list(rows), 2)
            return y
        slots = torch.cat([places, beyond], 1)                                  # (B or 1, 2)
        alone = torch.eye(2, dtype=torch.bool, device=x.device)[None]  # neither sees the other
        both = Placement(torch.cat([places, places], 1), slots, at.first, at.end + 1, alone)
        rows = list(self.rise(self.model.run, torch.cat([x, x], 1), both,
                              ScratchTail(cache, 1, at.end), trace))
        trace.update({tap: y[:, :1] for tap, y in trace.items()})
        self.states = torch.stack([y[:, 1:] for y in rows], 2)
        return rows[-1][:, :1]

    def predict(self, tokens, trace, cache):
        T = tokens.shape[1]
        device = tokens.device
        at = torch.arange(T, device=device)[None]                               # (1, T)
        before = torch.ones(T, T, dtype=torch.bool, device=device).tril(-1)
        own = torch.eye(T, dtype=torch.bool, device=device)
        hidden = masks(self.model, at, torch.cat([at, at], 1), torch.cat([before, own], 1)[None])
        run = partial(self.model.bare.run, masks=hidden)
        at = Placement(at, T + at, 0, 2 * T)
        rows = list(self.rise(run, self.model.embed(tokens), at, ScratchTail(cache, 0, T)))
        self.states = torch.stack(rows, 2)                                      # (B, T, E, dim)
        self.ahead = torch.stack([trace[tap] for tap in self.taps], 2)
        yield 0, self.model.unembed(rows[-1])

    def chains(self, rule):
        return TwoRowDraft(self, rule)

    def besides(self):
        """An additional loss, a tenth of the distance of the accelerated states from where they
        belong. (It changed nothing that we could measure.)"""
        return 0.1 * (normed(self.states) - normed(self.ahead)).pow(2).mean()
