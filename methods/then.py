"""Two drafts, one after the other: a model drafts, and an n-gram continues where it ends."""
from dataclasses import replace

import torch
import torch.nn.functional as F

from layerskip import SelfDraft, early_exit
from speculative import Draft, NGram, Wrapper


class Then(Wrapper):
    """b continues where a ends: `Then(SelfDraft(...), NGram(...))` looks up what followed the draft's last
    tokens earlier in the text (the "n-gram tail"; CAS-Spec, arXiv 2510.26843, cascades them like this).

    b must read neither the target's cache, which has no entries for a's tokens yet, nor its states,
    because b observes only its own part of what was drafted and written: so b is an `NGram`, or a
    `ModelDraft` of another model. If b adds tokens, a's `reuse` is lost, because those states are
    not computed for b's tokens.
    """

    def propose(self, state):
        a, b = self.drafters
        head = a.propose(state).cut(max(state.left_cpu) - 1)
        if head.parents is not None:
            raise ValueError("a tree has several ends: put it around both drafters, Siblings(Then(a, b))")
        length = (state.left - 1).clamp(0, head.tokens.shape[1])                # (B,)
        length = length if head.length is None else torch.minimum(head.length, length)
        # the tail needs the first draft's tokens on the host: one wait for all of them
        *drafts, self.drafted = torch.cat([head.tokens, length[:, None]], 1).T.tolist()
        head = head.cut(max(self.drafted))
        known = [text + [draft[row] for draft in drafts[:m]]
                 for row, (text, m) in enumerate(zip(state.known, self.drafted, strict=True))]
        left = [max(0, more - m) for more, m in zip(state.left_cpu, self.drafted, strict=True)]
        n, left_device = state.send([[len(text) for text in known], left]).unbind()
        longer = replace(state, tokens=state.tokens.clone(), n=n, left=left_device, known=known,
                         left_cpu=left)
        longer.tokens.scatter_(1, state.at(1, 1 + head.tokens.shape[1]).slots, head.tokens)
        return join(head, length, b.propose(longer))

    def observe(self, state, r):
        """Each learns from its own part. Unless all of a's part was accepted, b's was never tested."""
        a, b = self.drafters
        drafted = torch.tensor(self.drafted)
        first, tested = r.accepted.minimum(drafted), r.accepted >= drafted
        a.observe(state, replace(r, accepted=first, proposed=r.proposed.minimum(drafted)))
        proposed = (r.proposed - drafted).clamp(min=0) * tested
        b.observe(state, replace(r, accepted=r.accepted - first, proposed=proposed,
                                 new=[row[m:] for row, m in zip(r.new, self.drafted, strict=True)]))


def join(head, length, tail):
    """One Draft: the first `length` (B,) tokens of each row of head, and the tail's right after them."""
    B, T = tail.tokens.shape
    if T == 0:
        return replace(head, length=length)
    at = length[:, None] + torch.arange(T, device=length.device)                # (B, T)
    tokens = F.pad(head.tokens, (0, T)).scatter(1, at, tail.tokens)
    q = head.q if tail.q is None else tail.q
    if q is not None:
        V = q.shape[-1]     # the q of copied tokens is one-hot
        first, second = (F.one_hot(draft.tokens, V).to(q.dtype) if draft.q is None else draft.q
                         for draft in (head, tail))
        q = F.pad(first, (0, 0, 0, T)).scatter(1, at[..., None].expand(B, T, V), second)
    return Draft(tokens, q, length + (T if tail.length is None else tail.length), traced=head.traced)


def cascade(model, gamma):
    """An exit after a sixth of the blocks, then lookup: `--draft methods/then.py:cascade`."""
    L = model.c.n_layers
    return Then(SelfDraft(model, early_exit(L, max(1, L // 6)), gamma), NGram(7, 3))
