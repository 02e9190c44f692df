"""Two drafts, one after the other: a model drafts, and an n-gram continues where it ends."""
from dataclasses import replace

import torch
import torch.nn.functional as F

from layerskip import SelfDraft, early_exit
from methods.trees import Tree
from sampling import one_hot
from speculative import Draft, NGram, Wrapper


class Then(Wrapper):
    """b continues where a ends: `Then(SelfDraft(...), NGram(...))` looks up what followed the
    draft's last tokens earlier in the text (the "n-gram tail"; CAS-Spec, arXiv 2510.26843, cascades
    them like this).

    b must read neither the target's cache, which has no entries for a's tokens yet, nor its states,
    because b observes only its own part of what was drafted and written: so b is an `NGram`, or a
    `ModelDraft` of another model. If b adds tokens, a's `reuse` is lost, because those states are
    not computed for b's tokens.
    """

    def propose(self, state):
        a, b = self.drafters
        head = a.propose(state).fit(state)
        if isinstance(head, Tree):
            raise ValueError("a tree has several ends: put it around both drafters, "
                             "Siblings(Then(a, b))")
        # the tail needs the first draft's tokens on the host: one wait for all of them
        *columns, self.drafted = torch.cat([head.tokens, head.length[:, None]], 1).T.tolist()
        head = head.cut(max(self.drafted))
        known = []
        left = []
        for row, m in enumerate(self.drafted):
            known.append(state.known[row] + [column[row] for column in columns[:m]])
            left.append(max(0, state.left[row] - m))
        n = state.send([len(text) for text in known])
        longer = replace(state, tokens=state.tokens.clone(), n=n, known=known, left=left)
        slots = state.span(1, 1 + head.tokens.shape[1]).slots
        longer.tokens.scatter_(1, slots, head.tokens)
        return join(head, b.propose(longer))

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


def join(head, tail):
    """One Draft: in each row the tokens of head, and the tail's right after them."""
    B, T = tail.tokens.shape
    if T == 0:
        return head
    length = tail.length
    if length is None:
        length = T
    spot = head.length[:, None] + torch.arange(T, device=head.tokens.device)    # (B, T)
    tokens = F.pad(head.tokens, (0, T)).scatter(1, spot, tail.tokens)
    q = head.q if tail.q is None else tail.q
    if q is not None:       # that of copied tokens is one-hot
        first = one_hot(head.tokens, q) if head.q is None else head.q
        second = one_hot(tail.tokens, q) if tail.q is None else tail.q
        spot = spot[..., None].expand_as(second)                                # (B, T, V)
        q = F.pad(first, (0, 0, 0, T)).scatter(1, spot, second)
    return Draft(tokens, q, head.length + length)


def cascade(model, gamma):
    """An exit after a sixth of the blocks, then lookup: `--draft methods/then.py:cascade`."""
    L = model.c.n_layers
    return Then(SelfDraft(model, early_exit(L, max(1, L // 6)), gamma), NGram(7, 3))
