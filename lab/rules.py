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
    """Confidence with a threshold that steers the acceptance towards `target` (Draft & Verify,
    Zhang et al. 2023, section 3.3), each row on its own. The threshold outlives the run, as in the
    paper's code, and so does the running acceptance, which starts at 0."""

    def __init__(self, gamma=12, threshold=0.6, target=0.9):
        super().__init__(gamma)
        self.start, self.target, self.threshold = threshold, target, []

    def begin(self, state):
        rows = len(state.known)
        if len(self.threshold) != rows:
            self.threshold, self.acceptance = [self.start] * rows, [0.0] * rows

    def how_far(self, state):
        self.bar = state.send(self.threshold)  # (B,) once a round, not once a token
        return self.longest

    def stop(self, k, logits, token):
        return (confidence(logits, token) < self.bar).tolist()

    def learn(self, state, r):
        for b, (drafted, kept) in enumerate(outcomes(r)):
            if drafted:
                m = self.acceptance[b] = (self.acceptance[b] + kept / drafted) / 2
                move = 0.01 if m < self.target else 0.0 if drafted == self.longest else -0.01
                self.threshold[b] += 0.1 * move     # beta2 = 0.9: the new threshold counts a tenth


class Gate(Rule):
    """Draft only after a token that the target was sure of, each row on its own (the repository
    fast-llm-inference by ccs96307, with a threshold of 0.5)."""

    def __init__(self, gamma, threshold=0.5):
        super().__init__(gamma)
        self.threshold = threshold

    def begin(self, state):
        self.sure = [1.0] * len(state.known)  # the target has not judged the prompt's last token

    def how_far(self, state):
        return [self.longest if sure >= self.threshold else 0 for sure in self.sure]

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
        self.start, self.up = start, up

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
    1 - sqrt(`scale` H) (SVIP, arXiv 2411.18462; the constants are those of its repository)."""

    def __init__(self, gamma=40, threshold=0.3, scale=0.15):
        super().__init__(gamma)
        self.threshold, self.scale = threshold, scale

    def stop(self, k, logits, token):
        # trap: -q log q is NaN where a draft vocabulary leaves q = 0; `entr` knows the limit
        return ((self.scale * torch.special.entr(raw_probs(logits)).sum(1)).sqrt()
                > self.threshold).tolist()


class AnnealedConfidence(Confidence):
    """Confidence at a temperature of its own for each exit, 1 + slope (1 - depth), because early
    exits are surer than they should be (SpecBound, arXiv 2604.12247). depth: the share of the
    blocks that draft. The threshold and the slope are ours."""

    def __init__(self, gamma=MOST, depth=1 / 6, threshold=0.6, slope=1.0):
        super().__init__(threshold, gamma)
        self.temperature = 1 + slope * (1 - depth)

    def stop(self, k, logits, token):
        return super().stop(k, logits / self.temperature, token)


class Thompson(Rule):
    """Go on after each token with a probability drawn from a Beta distribution of what became of
    all drafts so far, each row on its own (the "Beta-TS" of EESD, arXiv 2406.03853; the uniform
    prior is ours). It ignores the tokens, so the length is drawn ahead, with random
    numbers of its own."""

    def __init__(self, gamma=MOST, seed=0):
        super().__init__(gamma)
        self.random, self.seen = random.Random(seed), []

    def begin(self, state):
        if len(self.seen) != len(state.known):
            self.seen = [Beta() for _ in state.known]

    def how_far(self, state):
        lengths, draw = [1] * len(self.seen), self.random
        for b, seen in enumerate(self.seen):
            while (lengths[b] < self.longest
                   and draw.random() < draw.betavariate(seen.hits + 1, seen.misses + 1)):
                lengths[b] += 1
        return lengths

    def learn(self, state, r):
        for row, (drafted, kept) in zip(self.seen, outcomes(r), strict=True):
            row.add(kept, kept < drafted)


# --- rules of control.py and methods/arms.py, for `--rule`: with one setting of many


class DoNoHarm(Rule):
    """Never much slower than plain decoding, however bad the draft is. Each row keeps an
    exponentially weighted acceptance rate and drafts as far as the formula says. Each round without
    a draft saves `risk` passes; a row that has saved the cost of a drafted step drafts one token.
    So a useless draft costs `risk` passes per round, whatever c is. A cost below `FLOOR`
    counts as `FLOOR`, because the estimate of a useless draft falls no lower than 0.045."""
    FLOOR = 0.05

    def __init__(self, cost, gamma=MOST, risk=0.01, fade=0.95):
        super().__init__(gamma)
        self.cost = max(cost, self.FLOOR)
        self.risk = risk
        self.fade = fade
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
                self.saved[b] += self.risk
                if self.saved[b] >= self.cost:
                    gamma = 1
                    self.saved[b] -= self.cost
            wanted.append(gamma)
        return wanted

    def learn(self, state, r):
        for b, (drafted, kept) in enumerate(outcomes(r)):
            if drafted:
                for seen in (self.seen[b], self.past):
                    seen.fade(self.fade)
                    seen.add(kept, kept < drafted)


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
