"""A draft by the whole model that reads only a few of the keys and values in the cache.

What such a draft saves grows with the text. Every drafted token reads all weights, as a pass of the
target does; but after a hundred thousand tokens the cache is as large as the weights, and a draft
that reads its first few and its last few tokens leaves nearly all of it where it is.

    slot                      0  1  2  3  4  5  6  7  8
    the model reads           x  x  x  x  x  x  x  x  x    for the token at slot 8;
    2 sinks, a window of 3    x  x  .  .  .  .  x  x  x    its draft leaves out four of them

A model attends to its first tokens, whatever they are (attention sinks, arXiv 2309.17453), and the
last ones. MagicDec (arXiv 2408.11049) drafts in this way with all weights; docs/papers.md names its
relatives.
"""
import torch

from drafter import Drafter, chain
from lab.aside import masks
from layerskip import same_model


def sparse(at, end, sinks, window):
    """Which of the slots 0 .. end-1 does a sparse token at `at` (B, 1) read? (B, end) bool

    >>> sparse(torch.tensor([[8]]), 9, sinks=2, window=3).int().tolist()
    [[1, 1, 0, 0, 0, 0, 1, 1, 1]]
    """
    slot = torch.arange(end, device=at.device)
    return (slot <= at) & ((slot < sinks) | (at - slot < window))


class SparseDraft(Drafter):
    """Draft with the model itself, where each token reads the first `sinks` tokens and, with
    itself, the last `window`.

    It drafts into the target's cache. What it writes there is rough, since other states make other
    keys and values, and so it hands nothing over: the verifying pass runs the whole block again and
    overwrites it. The mask hides keys and does not skip them. Only a kernel that gathers would save
    time.
    """

    def __init__(self, model, rule, sinks=4, window=64):
        super().__init__(rule)
        self.model = model
        self.sinks = sinks
        self.window = window

    def begin(self, state, trace):
        same_model(self.model, state)
        super().begin(state, trace)

    def propose(self, state):
        m = self.model

        def step(token, k):
            at = state.span(k, k + 1)._replace(first=0, same=False)
            seen = sparse(at.slots, at.end, self.sinks, self.window)[:, None]  # (B, 1, end)
            hidden = masks(m, at.slots, torch.arange(at.end, device=seen.device)[None], seen)
            return m.unembed(m.bare.run(m.embed(token), at, state.cache, masks=hidden))

        return chain(state, step, self.rule)


def step_cost(machine, n, sinks, window):
    """What a drafted token after n others costs relative to a pass of the target over one token, by
    what each reads. Where an attention has a window of its own, as Gemma-2's have, a draft reads up
    to `sinks` tokens less than is counted here.

    >>> from methods.costs import Machine
    >>> machine = Machine.of(1, attention=9.0, mlp=9.0, head=2.0, slope=2.0)
    >>> round(step_cost(machine, 10, sinks=2, window=5), 6)         # 32 / 40
    0.8
    """
    return machine.verify(min(n, sinks + window - 1)) / machine.verify(n)
