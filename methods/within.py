"""Speculation inside speculation: a draft is itself drafted for.

    lookup  --drafts for-->  the model in int4  --drafts for-->  the target

The model in few bits is nearly always right, but each of its tokens takes a pass of its own. So
another drafter drafts for it, and it verifies by its own rule. Whoever drafted, what it writes is
distributed as if each token had been drawn from its q: that is what the theorem says. So its text
is a draft, and the rows of its q are what the target's rule needs.

TriForce (arXiv 2404.11912) has two levels for long texts: its middle one is the target with a part
of its cache. The vertical cascade of CS Drafting (arXiv 2312.11462) goes on with smaller and
smaller models, down to one that is no network.
"""
from dataclasses import replace

import torch
from torch.nn.utils.rnn import pad_sequence

from drafter import Draft, Drafter, Wrapper, wanted
from speculative import one_round
from verification import verify


class Within(Drafter):
    """Draft with a copy of the target in few bits (`machine.quant.quantise`), for which another
    drafter, `inner`, drafts: lookup, a SelfDraft with some of the copy's sub-layers, a ModelDraft,
    or a trained head on the copy (`methods.heads.load`). The copy uses the target's cache.

    One draft of 5 tokens, where inner drafts 2 at a time:

        inner          a b   drafts from what the target has judged
        the copy       a c   rejects b, and writes c
        inner's twin   d e   has observed a and c: `Drafter.ahead`
        the copy       d e f
        the target     accepts a c d; inner observes that, and its twin is dropped

    So a head reads the copy's states for tokens that the target has not judged, and the target's
    for all others. Raises ValueError for a drafter that chooses among others: it learns from every
    round, and could not take that back.
    """

    def __init__(self, model, inner, rule):
        super().__init__(rule)
        self.model = model
        self.inner = inner
        self.taps = inner.taps
        if isinstance(inner, Wrapper):
            raise ValueError(f"a {type(inner).__name__} cannot forget a draft that is rejected: "
                             "inside, use a drafter that does not wrap others")

    def begin(self, state, trace):
        super().begin(state, trace)
        self.inner.begin(replace(state, model=self.model), trace)

    def propose(self, state):
        rough = replace(    # it writes its tokens where the text's are still unknown
            state,
            model=self.model,
            known=[list(text) for text in state.known],
            left=wanted(state, self.rule),
            taps=self.taps)
        inside = []
        inner = self.inner
        while max(rough.left) > 0:
            inside.append(one_round(rough, inner, verify))
            inner = inner.ahead(rough, inside[-1])
        if not inside:
            return Draft.none(state)
        q = []                  # each row's, of all its tokens
        for b in range(len(state.known)):
            q.append(torch.cat([r.p[b, : len(r.new[b])] for r in inside]))
        q_padded = pad_sequence(q, batch_first=True)                            # (B, K, V)
        steps = torch.arange(q_padded.shape[1], device=state.n.device)
        tokens = rough.read(state.after(steps))                                 # (B, K)
        return Draft(tokens, q_padded, state.send([len(rows) for rows in q]))

    def observe(self, state, r):
        super().observe(state, r)
        self.inner.observe(state, r)
