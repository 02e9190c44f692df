"""Drafts that are copied from the text itself, which costs next to nothing.

Prompt lookup looks up the last n tokens. One n is too long for a text that seldom repeats itself,
and too short for one that often does. So suffix decoding tries all suffixes of the text that have
occurred before. Counts say what followed each, and the draft that promises the most accepted tokens
is taken.
"""
from drafter import Draft, Drafter, Rule, wanted
from model import Refused

DEPTH = 16      # tokens of the longest suffix whose continuations are counted
LEAST = 0.3     # a path ends before its chance falls below this


class NGram(Drafter):
    """Prompt lookup (Saxena 2023): copy what followed the previous occurrence of the text's last n
    tokens. All are copied at once, so a rule that stops between tokens raises ValueError."""

    def __init__(self, rule: Rule | int, n: int):
        super().__init__(rule)
        if n < 1:
            raise Refused(f"n, the number of tokens to look up, must be at least 1, got {n}")
        if self.rule.stop:
            raise Refused("an n-gram is copied at once, with no logits to stop at: give it a "
                          "rule without a stop, or a whole number")
        self.n = n

    def begin(self, state, trace):
        super().begin(state, trace)
        self.index = [{} for _ in state.known]  # n-gram -> position after its last occurrence
        self.done = [0] * len(state.known)      # how many n-grams of each row are in the index
        self.enter(state)

    def observe(self, state, r):
        super().observe(state, r)
        self.enter(state)

    def enter(self, state):
        for b, text in enumerate(state.known):
            last = len(text) - self.n  # where the final n-gram starts, which nothing follows yet
            for i in range(self.done[b], last):
                self.index[b][tuple(text[i : i + self.n])] = i + self.n
            self.done[b] = max(self.done[b], last)

    def found(self, state):
        """The ids after the previous occurrence of each row's final n-gram; empty if it is new."""
        hits = []
        for b, length in enumerate(wanted(state, self.rule)):
            text = state.known[b]
            first = self.index[b].get(tuple(text[-self.n :]), len(text))
            hits.append(text[first : first + length])
        return hits

    def propose(self, state):
        return self.copy(state, self.found(state))

    def copy(self, state, hits):
        """The Draft of these ids for each row."""
        K = max(map(len, hits))
        if K == 0:
            return Draft.none(state)
        tokens = state.send([hit + [0] * (K - len(hit)) for hit in hits])       # (B, K)
        return Draft(tokens, None, state.send([len(hit) for hit in hits]))


class Suffix(NGram):
    """SuffixDecoding (Oliaro et al., arXiv 2411.04975, section 3), a chain.

    From each suffix of m tokens a path of at most `factor` * m tokens follows the most frequent
    next token. The chance of a path is the product of its tokens' frequencies, k / n for a token
    that came in k of n cases. Its score, the expected number of accepted tokens, is the sum of the
    chances of its prefixes. The best score wins, and `matched` holds the length of its suffix for
    each row, or 0 if there is none. (The paper also keeps a tree of earlier texts.)
    """

    def __init__(self, rule, factor=2.0):
        super().__init__(rule, 1)
        self.factor = factor
        self.matched = []

    def enter(self, state):
        """Count what follows each run of tokens, as {the run: {the next token: how often}}."""
        for b, text in enumerate(state.known):
            for i in range(max(1, self.done[b]), len(text)):
                past = tuple(text[max(0, i - DEPTH) : i])
                for m in range(len(past)):
                    counts = self.index[b].setdefault(past[m:], {})
                    counts[text[i]] = counts.get(text[i], 0) + 1
            self.done[b] = len(text)

    def found(self, state):
        lengths = wanted(state, self.rule)
        found = [self.best(*row) for row in zip(self.index, state.known, lengths, strict=True)]
        self.matched = [m for _, m, _ in found]
        return [path for *_, path in found]

    def best(self, index, text, room):
        """(score, length of the suffix, path) of the best continuation of a text."""
        best = 0.0, 0, []
        for m in range(min(len(text), DEPTH), 0, -1):
            longest = min(room, self.factor * m)
            if best[0] >= longest:
                break       # no shorter suffix can promise more
            score, path = self.follow(index, tuple(text[-m:]), int(longest))
            if score > best[0]:
                best = score, m, path
        return best

    def follow(self, index, run, longest):
        """(score, path) of at most `longest` tokens after a run of tokens."""
        path = []
        chance = 1.0
        score = 0.0
        while run in index and len(path) < longest:
            counts = index[run]
            token = max(counts, key=counts.get)
            chance *= counts[token] / sum(counts.values())
            if chance < LEAST:
                break
            path.append(token)
            score += chance
            run = (*run, token)[-DEPTH:]
        return score, path
