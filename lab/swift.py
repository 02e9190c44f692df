"""SWIFT (arXiv 2410.06916) is a search for the sub-layers to skip on the text itself, while it is
written. By our tables it needs more text than an answer has."""
import torch

from control import Confidence
from lab.aside import aside
from layerskip import SelfDraft
from methods.trees import Siblings
from methods.wrapper import Wrapper
from search import GaussianProcess, expected_improvement


class SWIFT(Wrapper):
    """Search for the sub-layers to skip on the text itself (SWIFT, arXiv 2410.06916).

    Each candidate, a random set of the published size and every 25th time one that the Gaussian
    process promises most of, is scored in one pass by its *matchness*: how often its likeliest
    token is the next one of the window, the first `window` tokens that this text wrote. A better
    set takes the incumbent's place. The search ends at a score above ENOUGH, after more than
    PATIENCE candidates in a row that were no better, or after MOST in all.

    Changed: theirs keeps the best score of all texts, so that a search that has ended never begins
    again; here the incumbent is scored again when a text begins. Their process sees points of the
    box [0, 1]^n that are not the sets scored, and maximises mean + 2.5 deviations; ours sees sets,
    and the one with the largest expected improvement is tried. Their places have 1 to 10 guesses,
    by confidence; ours 1 + len(widths).
    """

    ENOUGH = 0.95
    PATIENCE = 300
    MOST = 1000

    def __init__(self, model, gamma=25, skip_ratio=0.45, window=32, every=25, threshold=0.8,
                 widths=(25, 25)):
        self.model = model
        self.free = range(2, 2 * model.c.n_layers - 2)      # the first and the last block stay
        self.count = int(len(self.free) * skip_ratio)
        odd_first = sorted(self.free, key=lambda i: (i // 2 % 2 == 0, i))
        self.gone = frozenset(odd_first[: self.count])      # blocks 1, 3, 5, ...
        self.draft = SelfDraft(model, self.kept(self.gone), Confidence(threshold, gamma))
        super().__init__(Siblings(self.draft, widths))
        self.window = window
        self.every = every
        self.random = torch.Generator().manual_seed(0)
        self.tried = 0
        self.stale = 0
        self.seen = []          # [(set, its score)]

    def kept(self, gone):
        return [i for i in range(2 * self.model.c.n_layers) if i not in gone]

    def begin(self, state, trace):
        super().begin(state, trace)
        self.start, self.best = state.lengths, None

    def observe(self, state, r):
        super().observe(state, r)
        rows = [b for b, text in enumerate(state.known) if len(text) - self.start[b] >= self.window]
        if rows and self.best is None:                      # a new text: first of all the incumbent
            self.best = self.score(state, self.gone, rows)
        elif (rows and self.best <= self.ENOUGH and self.stale <= self.PATIENCE
              and self.tried < self.MOST):
            self.tried += 1
            self.stale += 1
            gone = self.candidate()
            score = self.score(state, gone, rows)
            if score > self.best:
                self.gone = gone
                self.best = score
                self.stale = 0
                self.draft.sublayers = self.kept(gone)

    @torch.inference_mode(False)    # trap: in the loop's inference mode nothing can be fitted
    def candidate(self):
        """The next set to try."""
        if self.tried % self.every or len(self.seen) < 2:
            return self.random_set()
        sets = [self.random_set() for _ in range(256)]
        z = self.bits([gone for gone, _ in self.seen])
        y = torch.tensor([score for _, score in self.seen])
        mean, std = GaussianProcess(z, y, torch.tensor([i % 2 for i in self.free])).predict(
            self.bits(sets))
        return sets[int(expected_improvement(mean, std, self.best).argmax())]

    def random_set(self):
        order = torch.randperm(len(self.free), generator=self.random).tolist()
        return frozenset(self.free[j] for j in order[: self.count])

    def bits(self, sets):
        return torch.tensor([[float(i in gone) for i in self.free] for gone in sets],
                            dtype=torch.float64)

    def score(self, state, gone, rows):
        """The matchness of a set, over the rows that have written a window, and a note of it."""
        at = state.send([[n - 1 + k for k in range(self.window)] for n in self.start])      # (B, W)
        # a row near the end of the context has no such window
        at = at.clamp(max=state.tokens.shape[1] - 2)
        x = aside(self.model, state.cache, self.model.embed(state.read(at)), at, self.kept(gone))
        hits = self.model.unembed(x).argmax(-1) == state.read(at + 1)
        score = float(hits[state.send(rows)].double().mean())
        self.seen.append((gone, score))
        return score
