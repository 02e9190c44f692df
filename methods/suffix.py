"""Suffix decoding: look up endings of every length, and copy what is likely to come, as far as it is likely.

Prompt lookup (`speculative.NGram`) copies what followed the last time the text held its final n tokens. One n
is too long for a text that seldom repeats itself, and too short for one that always does. Here all endings of
the text that have occurred before are tried, each says how often it went on how, and the draft that promises
the most accepted tokens is taken.
"""
from speculative import NGram, wanted

DEPTH = 16      # tokens of an ending and its continuation together


class Suffix(NGram):
    """SuffixDecoding (Oliaro et al., arXiv 2411.04975, section 3), a chain.

    From each ending of m tokens the path to the most frequent continuation is followed, while it is likely
    enough: a token after n tokens of which it followed k times has the chance k / n, a path the product of
    its tokens'. A path has at most `factor` * m tokens. Its score is the sum of the chances of its tokens,
    how many of them are expected to be accepted, and the best score wins.

    least: a path ends where its chance would fall below it. hits: how often an ending must have occurred.
    store: a dict that keeps the counts of all texts, for later runs; a draft may come from it, too.
    """

    def __init__(self, rule, factor=2.0, least=0.3, hits=1, store=None):
        super().__init__(rule, 1)
        self.factor, self.least, self.hits, self.store = factor, least, hits, store

    def enter(self, state):
        """Count what follows each run of tokens: {the run: {the next token: how often}}."""
        for b, text in enumerate(state.known):
            for i in range(max(1, self.done[b]), len(text)):
                for m in range(1, min(i, DEPTH) + 1):
                    for index in filter(lambda index: index is not None, (self.index[b], self.store)):
                        counts = index.setdefault(tuple(text[i - m : i]), {})
                        counts[text[i]] = counts.get(text[i], 0) + 1
            self.done[b] = len(text)

    def found(self, state):
        most = wanted(state, self.rule)[0]
        return [max(self.best(own, text, room), self.best(self.store or {}, text, room))[1]
                for text, own, room in zip(state.known, self.index, most, strict=True)]

    def best(self, index, text, room):
        """(score, path) of the best continuation of a text."""
        best = 0.0, []
        for m in range(1, min(len(text), DEPTH) + 1):
            run = tuple(text[-m:])
            if sum(index.get(run, {}).values()) < self.hits:
                break       # what has not occurred has not occurred with more tokens before it, either
            path, chance, score = [], 1.0, 0.0
            while run in index and len(path) < min(room, int(self.factor * m)):
                counts = index[run]
                token = max(counts, key=counts.get)
                chance *= counts[token] / sum(counts.values())
                if chance < self.least:
                    break
                path, score, run = [*path, token], score + chance, (*run, token)[-DEPTH:]
            best = (score, path) if score > best[0] else best
        return best
