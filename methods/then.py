"""Two drafts, one after the other: a model drafts, and an n-gram continues where it ends."""
from dataclasses import replace

import torch

from speculative import Draft, Wrapper


class Then(Wrapper):
    """b goes on where a ends: `Then(SelfDraft(...), NGram(...))` looks up what followed the draft's last
    tokens earlier in the text (the "n-gram tail"; CAS-Spec, arXiv 2510.26843, cascades them so).

    b should read neither the target's cache, which holds nothing yet for a's tokens, nor its states, since of
    a round b gets its own part of what was drafted and written, and all else whole: it is to be an `NGram`,
    or a `ModelDraft` of another model. Where b adds tokens, a's `reuse` is lost, because nobody has computed
    those states for b's tokens.
    """

    def __init__(self, a, b):
        super().__init__(a, b)

    def propose(self, state):
        a, b = self.drafters
        head = a.propose(state).cut(max(state.left_cpu) - 1)
        if head.parents is not None:
            raise ValueError("a tree has several ends: put it around both drafters, Siblings(Then(a, b))")
        K = head.tokens.shape[1]
        length = (state.left - 1).clamp(0, K)                                   # (B,)
        length = length if head.length is None else torch.minimum(head.length, length)
        # the tail needs the head's tokens on the host: one wait for all of them
        *drafts, self.drafted = torch.cat([head.tokens, length[:, None]], 1).T.tolist()
        known = [text + [draft[row] for draft in drafts[:m]]
                 for row, (text, m) in enumerate(zip(state.known, self.drafted, strict=True))]
        left = [max(0, more - m) for more, m in zip(state.left_cpu, self.drafted, strict=True)]
        n, left_device = state.send([[len(text) for text in known], left]).unbind()
        longer = replace(state, tokens=state.tokens.clone(), n=n, left=left_device, known=known,
                         left_cpu=left)
        if K > 0:
            longer.tokens.scatter_(1, state.at(1, K + 1).slots, head.tokens)
        return join(head, length, b.propose(longer), max(self.drafted))

    def observe(self, state, r):
        """Each learns of its own part. Where a's part was not accepted whole, b's was never tested."""
        a, b = self.drafters
        drafted = torch.tensor(self.drafted)
        first, tested = r.accepted.minimum(drafted), r.accepted >= drafted
        a.observe(state, replace(r, accepted=first, proposed=r.proposed.minimum(drafted)))
        proposed = (r.proposed - drafted).clamp(min=0) * tested
        b.observe(state, replace(r, accepted=r.accepted - first, proposed=proposed,
                                 new=[row[m:] for row, m in zip(r.new, self.drafted, strict=True)]))


def join(head, length, tail, longest):
    """One Draft: the first `length` (B,) tokens of each row of head, and the tail's right after them.
    longest: the largest of `length`, known to the host."""
    (B, A), T = head.tokens.shape, tail.tokens.shape[1]
    if T == 0:
        return replace(head, length=length)
    at = torch.arange(longest + T, device=length.device).expand(B, -1)          # (B, K)
    after = (at - length[:, None]).clamp(max=T - 1)     # negative: the head's token; else which of the tail's
    source = torch.where(after < 0, at, A + after)

    def place(first, second):  # (B, A, ...), (B, T, ...) -> (B, K, ...)
        both = torch.cat([first, second], 1)
        index = source.reshape(*source.shape, *[1] * (both.dim() - 2))
        return both.gather(1, index.expand(-1, -1, *both.shape[2:]))

    q = None if head.q is None and tail.q is None else place(one_hot(head, tail.q), one_hot(tail, head.q))
    return Draft(place(head.tokens, tail.tokens), q, length + (T if tail.length is None else tail.length),
                 traced=head.traced)


def one_hot(draft, like):
    """The q of a draft (B, K, V): its own, or for copied tokens the one-hot, shaped like another's."""
    if draft.q is not None:
        return draft.q
    zeros = torch.zeros(*draft.tokens.shape, like.shape[-1], dtype=like.dtype, device=like.device)
    return zeros.scatter_(2, draft.tokens[..., None], 1.0)
