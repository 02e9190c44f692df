"""Token recycling as a chain: of each token, what the target last wanted after it.

The paper keeps eight candidates and drafts a tree. As a chain it is worth about as much as `methods.suffix`
on stories, and less wherever a text repeats itself: `python -m lab.bench self --only suffix recycling`.
"""
from speculative import NGram, wanted


class Recycle(NGram):
    """Token Recycling (Luo et al., arXiv 2408.08696), top 1. Rejected drafts teach it, too."""

    def __init__(self, rule):
        super().__init__(rule, 1)

    def enter(self, state):
        """What the text says: {token: what followed it last}."""
        for b, text in enumerate(state.known):
            new = text[self.done[b] :]
            self.index[b].update(zip(new, new[1:], strict=False))
            self.done[b] = len(text) - 1

    def observe(self, state, r):
        for b, best in enumerate(r.logits.argmax(-1).tolist()):
            if r.new[b]:
                last = state.known[b][-len(r.new[b]) - 1]
                self.index[b].update(zip([last, *r.draft.tokens[b].tolist()], best, strict=True))
        super().observe(state, r)

    def found(self, state):
        hits = []
        for text, after, most in zip(state.known, self.index, wanted(state, self.rule)[0], strict=True):
            hit = text[-1:]
            while len(hit) <= most and hit[-1] in after:
                hit.append(after[hit[-1]])
            hits.append(hit[1:])
        return hits
