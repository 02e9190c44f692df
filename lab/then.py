"""Two drafts, one after the other. A model drafts, and an n-gram continues where it ends."""
from dataclasses import replace

import torch
import torch.nn.functional as F

from drafter import Draft
from layerskip import SelfDraft, early_exit
from methods.lookup import NGram
from methods.trees import Tree
from methods.wrapper import Wrapper
from model import Refused
from sampling import one_hot


class Then(Wrapper):
    """b continues where a ends. `Then(SelfDraft(...), NGram(...))` looks up what followed the
    draft's last tokens earlier in the text. CAS-Spec (arXiv 2510.26843) cascades drafters like
    this.

    b must not read the target's cache, which does not hold a's tokens yet, or the target's states,
    because b only ever sees its own part of a round. So b is an `NGram` or a `ModelDraft` of
    another model. If b adds tokens, a's `reuse` is lost, because b's tokens have no such states.
    """

    def propose(self, state):
        a, b = self.drafters
        first = a.propose(state).trimmed(state)
        if isinstance(first, Tree):
            raise Refused("a tree has several ends: put it around both drafters, "
                          "Siblings(Then(a, b))")
        # the tail needs the first draft's tokens on the host: one wait for all of them
        rows = torch.cat([first.length[:, None], first.tokens], 1).tolist()
        self.drafted = [m for m, *_ in rows]
        first = first.cut(max(self.drafted))
        known = []
        left = []
        for text, more, (m, *tokens) in zip(state.known, state.left, rows, strict=True):
            known.append(text + tokens[:m])
            left.append(max(0, more - m))
        n = state.send([len(text) for text in known])
        longer = replace(state, tokens=state.tokens.clone(), n=n, known=known, left=left)
        slots = state.span(1, 1 + first.tokens.shape[1]).slots
        longer.tokens.scatter_(1, slots, first.tokens)
        return append(first, b.propose(longer).trimmed(longer))

    def observe(self, state, r):
        """Each learns from its own part. Unless all of a's part was accepted, b's was never
        tested."""
        a, b = self.drafters
        drafted = torch.tensor(self.drafted)
        first = r.accepted.minimum(drafted)
        tested = r.accepted >= drafted
        a.observe(state, replace(r, accepted=first, proposed=r.proposed.minimum(drafted)))
        proposed = (r.proposed - drafted).clamp(min=0) * tested
        new = [row[m:] for row, m in zip(r.new, self.drafted, strict=True)]
        b.observe(state, replace(r, accepted=r.accepted - first, proposed=proposed, new=new))


def append(first, second):
    """One Draft, with the tokens of the second right after the first one's in each row."""
    T = second.tokens.shape[1]
    if T == 0:
        return first
    length = first.length + second.length
    spot = first.length[:, None] + torch.arange(T, device=first.tokens.device)  # (B, T)
    tokens = F.pad(first.tokens, (0, T)).scatter(1, spot, second.tokens)
    like = first.q if second.q is None else second.q
    if like is None:        # both were copied
        return Draft(tokens, None, length)
    q = one_hot(first.tokens, like) if first.q is None else first.q
    more = one_hot(second.tokens, like) if second.q is None else second.q       # (B, T, V)
    q = F.pad(q, (0, 0, 0, T)).scatter(1, spot[..., None].expand_as(more), more)
    return Draft(tokens, q, length)


def cascade(model, gamma):
    """An exit after a sixth of the blocks, then lookup (`--draft lab/then.py:cascade`)."""
    L = model.c.n_layers
    return Then(SelfDraft(model, early_exit(L, max(1, L // 6)), gamma), NGram(7, 3))
