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

from speculative import Draft, Drafter, ModelDraft, one_round, wanted
from verification import verify


class Within(Drafter):
    """Draft with a copy of the target in few bits (`machine.quant.quantise`), for which another
    drafter, `inner`, drafts. The copy uses the target's cache.

    inner learns of a token only when the target has judged it. So it must keep nothing that it
    would have to take back, such as keys of its own: it is lookup, or a SelfDraft with some of the
    copy's sub-layers.
    """

    def __init__(self, model, inner, rule):
        super().__init__(rule)
        self.model = model
        self.inner = inner
        if inner.taps or isinstance(inner, ModelDraft):
            raise ValueError(f"a {type(inner).__name__} keeps keys or states of tokens that may be "
                             "rejected: inside, use lookup or a SelfDraft")

    def begin(self, state, trace):
        super().begin(state, trace)
        self.inner.begin(replace(state, model=self.model), trace)

    def propose(self, state):
        rough = replace(    # it writes its tokens where the text's are still unknown
            state,
            model=self.model,
            known=[list(text) for text in state.known],
            left=wanted(state, self.rule),
            taps=())
        inside = []
        while max(rough.left) > 0:
            inside.append(one_round(rough, self.inner, verify))
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
