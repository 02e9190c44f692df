"""Rules for how far to draft. Here are published ones, and `DoNoHarm`, which is ours.

On our stream of prompts (BOOK.md, "Drafts that adapt", greedy) the two schedules gain a little more
than a fixed draft length of 4 at the same exit, `DoNoHarm` as much as that, and the rules that stop
by confidence, entropy or chance less.

    python generate.py "Once upon a time" --draft exit --rule lab/rules.py:Thompson
"""
import random
from dataclasses import replace

import torch

from control import MOST, Confidence, best_gamma, confidence
from drafter import Rule
from methods.arms import Calibrated
from methods.counts import Beta, outcomes
from sampling import raw_probs


class AdaptiveExit(Rule):
    """Confidence with a threshold that steers the acceptance towards 0.9 (Draft & Verify, Zhang et
    al. 2023, section 3.3), each row on its own. The threshold outlives the run, as in the paper's
    code, and so does the running acceptance, which starts at 0."""

    def __init__(self, gamma=12):
        super().__init__(gamma)
        self.threshold = []

    def begin(self, state):
        rows = len(state.known)
        if len(self.threshold) != rows:
            self.threshold = [0.6] * rows
            self.acceptance = [0.0] * rows

    def how_far(self, state):
        self.bar = state.send(self.threshold)  # (B,) once a round, not once a token
        return self.longest

    def stop(self, k, logits, token):
        return (confidence(logits, token) < self.bar).tolist()

    def learn(self, state, r):
        for b, (drafted, kept) in enumerate(outcomes(r)):
            if drafted:
                self.acceptance[b] = (self.acceptance[b] + kept / drafted) / 2
                if self.acceptance[b] < 0.9:        # moves of 0.01, which count a tenth (beta2)
                    self.threshold[b] += 0.001
                elif drafted < self.longest:
                    self.threshold[b] -= 0.001


class Gate(Rule):
    """Draft only after a token that the target was sure of, at least 0.5, each row on its own (the
    repository fast-llm-inference by ccs96307)."""

    def begin(self, state):
        self.sure = [1.0] * len(state.known)  # the target has not judged the prompt's last token

    def how_far(self, state):
        return [self.longest if sure >= 0.5 else 0 for sure in self.sure]

    def learn(self, state, r):
        self.sure = [row[-1] if row else before
                     for row, before in zip(r.sure, self.sure, strict=True)]


class Schedule(Rule):
    """Longer after a draft that was accepted whole, shorter otherwise, each row on its own.

    `Schedule(start)` adds and takes one (the baseline "FS" of DEL, arXiv 2504.05598);
    `Schedule(start, up=2)` is transformers' "heuristic".
    """

    def __init__(self, start, up=1):
        super().__init__(max(start, MOST))
        self.start = start
        self.up = up

    def begin(self, state):
        self.now = [self.start] * len(state.known)

    def how_far(self, state):
        return self.now

    def learn(self, state, r):
        for b, (drafted, kept) in enumerate(outcomes(r)):
            if drafted:
                change = self.up if kept == drafted else -1
                self.now[b] = min(max(1, self.now[b] + change), self.longest)


class Entropy(Rule):
    """Stop after a token whose distribution has a high entropy H: the acceptance is at least about
    1 - sqrt(0.15 H) (SVIP, arXiv 2411.18462; the constants are those of its repository)."""

    def __init__(self, gamma=40, threshold=0.3):
        super().__init__(gamma)
        self.threshold = threshold

    def stop(self, k, logits, token):
        # trap: -q log q is NaN where a draft vocabulary leaves q = 0; `entr` knows the limit
        entropy = torch.special.entr(raw_probs(logits)).sum(1)
        return ((0.15 * entropy).sqrt() > self.threshold).tolist()


class AnnealedConfidence(Confidence):
    """Confidence at a temperature of its own for each exit, 2 - depth, because early exits are
    surer than they should be (SpecBound, arXiv 2604.12247). depth: the share of the blocks that
    draft. The threshold and the slope are ours."""

    def __init__(self, gamma=MOST, depth=1 / 6, threshold=0.6):
        super().__init__(threshold, gamma)
        self.temperature = 2 - depth

    def stop(self, k, logits, token):
        return super().stop(k, logits / self.temperature, token)


class Thompson(Rule):
    """Go on after each token with a probability drawn from a Beta distribution of what became of
    all drafts so far, each row on its own (the "Beta-TS" of EESD, arXiv 2406.03853; the uniform
    prior is ours). It ignores the tokens, so the length is drawn ahead, with random numbers of its
    own."""

    def __init__(self, gamma=MOST):
        super().__init__(gamma)
        self.random = random.Random(0)
        self.seen = []

    def begin(self, state):
        if len(self.seen) != len(state.known):
            self.seen = [Beta() for _ in state.known]

    def how_far(self, state):
        return [self.length(seen.hits + 1, seen.misses + 1) for seen in self.seen]

    def length(self, a, b):
        length = 1
        while length < self.longest and self.random.random() < self.random.betavariate(a, b):
            length += 1
        return length

    def learn(self, state, r):
        for row, (drafted, kept) in zip(self.seen, outcomes(r), strict=True):
            row.add(kept, kept < drafted)


class DoNoHarm(Rule):
    """Never much slower than plain decoding, however bad the draft is. Each row keeps an
    exponentially weighted acceptance rate and drafts as far as the formula says. Each round without
    a draft saves `RISK` passes; a row that has saved the cost of a drafted step drafts one token.
    So a useless draft costs `RISK` passes per round, whatever c is. A cost below `FLOOR` counts as
    `FLOOR`, because the estimate of a useless draft falls no lower than 0.045."""
    RISK = 0.01
    FADE = 0.95
    FLOOR = 0.05

    def __init__(self, cost, gamma=MOST):
        super().__init__(gamma)
        self.cost = max(cost, self.FLOOR)
        self.past = Beta()
        self.saved = []

    def begin(self, state):
        # starts from the estimate of earlier texts
        self.seen = [replace(self.past) for _ in state.known]
        if len(self.saved) != len(state.known):
            self.saved = [self.cost] * len(state.known)

    def how_far(self, state):
        wanted = []
        for b, seen in enumerate(self.seen):
            gamma = best_gamma(seen.mean(), self.cost, self.longest)
            if gamma == 0 and self.longest > 0:
                self.saved[b] += self.RISK
                if self.saved[b] >= self.cost:
                    gamma = 1
                    self.saved[b] -= self.cost
            wanted.append(gamma)
        return wanted

    def learn(self, state, r):
        for b, (drafted, kept) in enumerate(outcomes(r)):
            if drafted:
                for seen in (self.seen[b], self.past):
                    seen.fade(self.FADE)
                    seen.add(kept, kept < drafted)


# --- for `--rule`: rules of control.py, methods/arms.py and above, with one setting of many


def unsure(gamma):
    """transformers' stop, at a confidence below 0.4."""
    return Confidence(0.4, gamma)


def second_exit(gamma):
    """Kangaroo's, at a confidence below 0.6 (arXiv 2404.18911)."""
    return Confidence(0.6, gamma)


def do_no_harm(gamma):
    """For a draft that costs a sixth of a pass, as `--draft exit` nearly does."""
    return DoNoHarm(1 / 6, gamma)


def expected_value(gamma):
    """Stop where the next token's chance of being accepted falls below its price."""
    return Calibrated(gamma=gamma)
