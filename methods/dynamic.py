"""Drafts that change while they run, as published: SWIFT and CLaSp choose which sub-layers to skip, DEL after
which block to leave.

The one thing to remember: the target checks every round whatever drafted it, so a drafter may change its
sub-layers between any two rounds. What it learns from is nearly free: the states that drafting and verifying
compute anyway, and the text that is already written.

All three draft with the target's own sub-layers. In a batch the rows share one choice, since they share each
pass. The constants are the published ones; the docstrings name the faults that are mended here.
"""
import torch

from control import Confidence, expected_speedup, plan, weight_costs
from kvcache import Beside
from layerskip import SelfDraft, check_sublayers, early_exit
from methods.drafting import pick, same_model
from methods.trees import Siblings
from sampling import raw_probs
from search import GaussianProcess, expected_improvement
from speculative import Wrapper

# --- trying a draft without a trace


def aside(model, cache, x, positions, sublayers):
    """Run `sublayers` for x (B, T, dim), each token on its own, as the first one of a draft: it reads what
    the cache holds before its position (B, T), and itself. (B, T, dim)"""
    (B, T, _), S = x.shape, cache.k.shape[3]
    slots = torch.arange(S, S + T, device=x.device).expand(B, T)
    own = torch.eye(T, dtype=torch.bool, device=x.device)
    return model.run(x, positions, Beside(cache, 0, S), sublayers, slots, own, span=slice(0, S + T))


def overlaps(probs, p, logits):
    """How likely a draft would be accepted at each place, the sum of min(p, q), and how sure it is there, the
    largest raw probability. p (..., V), logits (..., V) -> two tensors (...), float64."""
    both = torch.minimum(p, probs(logits)).double().sum(-1)
    return both.clamp(max=1), raw_probs(logits).amax(-1).double()


def last_places(state, trace, count):
    """The last places of each prompt: {tap: (B, count, dim)}, and which of them there are (B, count)."""
    at = state.n[:, None] + torch.arange(-count, 0, device=state.n.device)      # (B, count)
    row = torch.arange(len(at), device=at.device)[:, None]
    return {tap: x[row, at.clamp(min=0)] for tap, x in trace.items()}, at >= 0


# --- SWIFT


class SWIFT(Wrapper):
    """Search for the sub-layers to skip on the text itself (SWIFT, arXiv 2410.06916).

    Each candidate, a random set of the published size and every 25th time one that the Gaussian process
    promises most of, is scored in one pass by its *matchness*: how often its likeliest token is the next one
    of the window, the first `window` tokens that this text wrote. A better set takes the incumbent's place.
    The search (the "optimisation phase") ends at a score above `enough`, after more than `patience`
    candidates in a row that were no better, or after `most` in all; then nothing but drafting is left (the
    "acceleration phase").

    Mended. Theirs keeps the best score of all texts, so that a search that has ended never begins again, and
    does not score the set that it starts with: here the incumbent is scored anew when a text begins. They
    tell the process a point of the box [0, 1]^n that is not the set that was scored, and maximise mean + 2.5
    deviations: here it sees sets, and of them the one with the largest expected improvement is tried. They
    copy the whole cache for every draft and every score; and they draw the bonus token from the unprocessed
    distribution. Their places have 1 to 10 guesses, by confidence; here all have 1 + len(widths).
    """

    def __init__(self, model, skip_ratio=0.45, window=32, enough=0.95, patience=300, most=1000, every=25,
                 threshold=0.8, gamma=25, widths=(25, 25), seed=0):
        self.model, self.c = model, model.c
        self.free = range(2, 2 * model.c.n_layers - 2)      # the first and the last block stay
        self.count = int(len(self.free) * skip_ratio)
        if not self.count:
            raise ValueError(f"of {model.c.n_layers} blocks SWIFT skips none at a ratio of {skip_ratio}")
        odd_first = sorted(self.free, key=lambda i: (i // 2 % 2 == 0, i))
        self.gone = frozenset(odd_first[: self.count])      # blocks 1, 3, 5, ...
        self.draft = SelfDraft(model, self.kept(self.gone), Confidence(threshold, gamma))
        super().__init__(Siblings(self.draft, widths))
        self.window, self.enough, self.patience, self.most = window, enough, patience, most
        self.every, self.random = every, torch.Generator().manual_seed(seed)
        self.tried, self.stale, self.seen = 0, 0, []        # seen: [(set, its score)]

    def kept(self, gone):
        return check_sublayers([i for i in range(2 * self.c.n_layers) if i not in gone], self.c.n_layers)

    def begin(self, state, trace):
        same_model(self.model, state)
        super().begin(state, trace)
        self.start, self.best = [len(text) for text in state.known], None

    def observe(self, state, r):
        super().observe(state, r)
        written = [len(text) - n for text, n in zip(state.known, self.start, strict=True)]
        rows = [b for b, count in enumerate(written) if count >= self.window]
        if not rows or self.searched():
            return
        if self.best is None:                               # a new text: first of all the incumbent
            self.best = self.score(state, self.gone, rows)
            return
        self.tried, self.stale = self.tried + 1, self.stale + 1
        gone = self.candidate()
        score = self.score(state, gone, rows)
        if score > self.best:
            self.gone, self.best, self.stale = gone, score, 0
            self.draft.sublayers = self.kept(gone)

    def searched(self):
        """Whether the search has ended."""
        if self.best is None:
            return False
        return self.best > self.enough or self.stale > self.patience or self.tried >= self.most

    @torch.inference_mode(False)    # trap: in the loop's inference mode nothing can be fitted
    def candidate(self):
        """The next set to try."""
        count = 1 if self.tried % self.every or len(self.seen) < 2 else 256
        sets = [self.random_set() for _ in range(count)]
        if count == 1:
            return sets[0]
        z, y = self.bits([gone for gone, _ in self.seen]), torch.tensor([score for _, score in self.seen])
        mean, std = GaussianProcess(z, y, torch.tensor([i % 2 for i in self.free])).predict(self.bits(sets))
        return sets[int(expected_improvement(mean, std, self.best).argmax())]

    def random_set(self):
        order = torch.randperm(len(self.free), generator=self.random).tolist()
        return frozenset(self.free[j] for j in order[: self.count])

    def bits(self, sets):
        return torch.tensor([[float(i in gone) for i in self.free] for gone in sets], dtype=torch.float64)

    def score(self, state, gone, rows):
        """The matchness of a set, over the rows that have written a window, and a note of it."""
        at = state.send([[n - 1 + k for k in range(self.window)] for n in self.start])      # (B, W)
        at = at.clamp(max=state.tokens.shape[1] - 2)    # a row near the end of the context has no such window
        x = aside(self.model, state.cache, self.model.embed(state.read(at)), at, self.kept(gone))
        hits = self.model.unembed(x).argmax(-1) == state.read(at + 1)
        score = float(hits[state.send(rows)].double().mean())
        self.seen.append((gone, score))
        return score


# --- CLaSp


def nearest(states, run, free, most):
    """CLaSp's dynamic programme (arXiv 2505.24196): for each number of skips the set whose residual stream
    stays nearest to the target's, by cosine. [the units that are skipped by the set of 1 skip, of 2, ...]

    A unit is what is skipped or run as a whole: a sub-layer, or a block. states[u] (N, dim): the target's
    residual stream at N places as it enters unit u, and at last as it leaves the last one. run(u, x) applies
    unit u to x (J, N, dim). free: the units that may be skipped, at most `most` of them.

    Its table: best[j] are the states after the units so far, of which j were skipped. The next unit is either
    run on best[j] or skipped from best[j-1], whichever ends nearer to the target's states there.
    """
    best, units = states[0][None], len(states) - 1                              # (J, N, dim)
    gone = torch.zeros(1, units, dtype=torch.bool, device=best.device)          # (J, units)

    def near(x, u):
        return torch.cosine_similarity(x.double(), states[u].double(), -1).mean(-1)     # (J,)

    for u in range(units):
        ran = run(u, best)
        if u in free:
            never, skip = gone.new_full((1,), -2.0, dtype=torch.float64), gone.clone()
            skip[:, u] = True
            keep = torch.cat([near(ran, u + 1), never]) >= torch.cat([never, near(best, u + 1)])    # (J+1,)
            ran = torch.where(keep[:, None, None], torch.cat([ran, ran[-1:]]), torch.cat([best[:1], best]))
            gone = torch.where(keep[:, None], torch.cat([gone, gone[-1:]]), torch.cat([gone[:1], skip]))
        best, gone = ran[: most + 1], gone[: most + 1]
    return [[u for u, bit in enumerate(row) if bit] for row in gone[1:].tolist()]


class CLaSp(SelfDraft):
    """Skip the `skips` blocks without which the last accepted token's states stay nearest to the target's
    (CLaSp, arXiv 2505.24196), chosen anew after every `every` tokens.

    Its dynamic programme runs all its sets in one pass of each block, as tokens of one place that do not see
    each other. `every`, the draft's length and where it stops are those of the port to Spec-Bench; theirs is
    for one row, and here the cosine is the mean over the rows.
    """

    def __init__(self, model, skips, every=128, threshold=0.7, gamma=8):
        L = model.c.n_layers
        if not 0 < skips < L:
            raise ValueError(f"CLaSp skips from 1 to {L - 1} of {L} blocks, got {skips}")
        super().__init__(model, range(2 * L), Confidence(threshold, gamma))
        self.skips, self.every, self.taps = skips, every, tuple(range(1, 2 * L, 2))

    def begin(self, state, trace):
        same_model(self.model, state)
        super().begin(state, trace)
        last = [len(text) - 1 for text in state.known]
        self.choose(state, trace, last, last)

    def observe(self, state, r):
        super().observe(state, r)
        if max(map(len, state.known)) >= self.due:
            first = [len(text) - len(new) - 1 for text, new in zip(state.known, r.new, strict=True)]
            kept = r.accepted.tolist()
            self.choose(state, r.trace, kept, [n + k for n, k in zip(first, kept, strict=True)])

    def choose(self, state, trace, which, where):
        """which: for each row, the token of the trace whose states count; where: its position."""
        self.due = max(map(len, state.known)) + self.every
        which, at = state.send([which, where]).unbind()                         # (B,) both
        states = [self.model.embed(state.read(at[:, None]))[:, 0]]              # (B, dim)
        states += [pick(trace[tap], which) for tap in self.taps]

        def run(u, x):  # (J, B, dim)
            x = x.transpose(0, 1)
            here = at[:, None].expand(x.shape[:2])
            return aside(self.model, state.cache, x, here, [2 * u, 2 * u + 1]).transpose(0, 1)

        L = self.model.c.n_layers
        gone = nearest(states, run, range(L), self.skips)[-1]
        self.sublayers = [i for i in range(2 * L) if i // 2 not in gone]


# --- DEL


class DEL(SelfDraft):
    """Leave after the block that promises the most tokens for the layers that are run, and stop where it is
    unsure (DEL, arXiv 2504.05598).

    What exit l would have drafted at each place of the last round is known without drafting: its *shadow
    token*, from the states that drafting and verifying left behind. Its acceptances and their complements are
    counted, and so is how sure it was of both; old counts fade by `omega` a round. The exit of the best
    expected speed drafts, up to `gamma` tokens, and stops after a token less sure than a threshold, the mean
    of how sure it was where it would have been accepted and where it would not.

    Mended. Theirs counts layers: here `costs` know the head's share. Theirs drafts a token even where the
    best is not to draft. Counts start from a uniform prior, a hit at confidence 1 and a miss at 0, where
    their threshold is NaN until both were seen. When sampling, a shadow counts as the sum of min(p, q), not
    as a match of the likeliest tokens. And shadows are not free, each costs a row of the head: score fewer
    exits (`exits`), or only every `every`th round. The rule "FS", their baseline, is `control.Schedule`.
    """

    def __init__(self, model, exits=None, costs=None, omega=0.95, gamma=18, every=1, window=32):
        L = model.c.n_layers
        self.exits = list(range(1, L) if exits is None else exits)
        super().__init__(model, early_exit(L, self.exits[0]), Confidence(0.5, gamma))
        self.taps = (*(2 * e - 1 for e in self.exits), 2 * L - 1)
        costs = costs or weight_costs(model.c)
        self.costs = [costs.step(early_exit(L, e)) for e in self.exits]
        self.omega, self.longest, self.every, self.window = omega, gamma, every, window
        self.counts, self.round = torch.zeros(4, len(self.exits), dtype=torch.float64), 0

    def begin(self, state, trace):
        same_model(self.model, state)
        super().begin(state, trace)
        trace, true = last_places(state, trace, self.window)
        self.score(state, trace, state.probs(self.model.unembed(trace[self.taps[-1]])), true)

    def observe(self, state, r):
        super().observe(state, r)
        self.round += 1
        if self.round % self.every == 0:
            true = state.send([[k < len(new) for k in range(r.p.shape[1])] for new in r.new])
            self.score(state, r.trace, r.p, true)

    def score(self, state, trace, p, true):
        """Count what every exit would have drafted at the places where `true` (B, T) says that all before
        was accepted, and choose. p (B, T, V): the target's distribution after each place."""
        states = torch.stack([trace[tap] for tap in self.taps[:-1]])            # (E, B, T, dim)
        logits = self.model.unembed(states.flatten(0, 1)).unflatten(0, states.shape[:2])
        hit, sure = overlaps(state.probs, p, logits)                            # (E, B, T) both
        parts = torch.stack([hit, 1 - hit, hit * sure, (1 - hit) * sure])
        self.counts = self.omega * self.counts + (parts * true).sum((2, 3)).cpu()           # (4, E)
        hits, misses, sure_hits, sure_misses = self.counts
        alphas = (hits + 1) / (hits + misses + 2)
        bars = ((sure_hits + 1) / (hits + 1) + sure_misses / (misses + 1)) / 2
        best = 1.0
        self.rule.most = 0                                                      # do not draft, if none gains
        for e, alpha, cost, bar in zip(self.exits, alphas.tolist(), self.costs, bars.tolist(), strict=True):
            gamma = plan(alpha, alpha, cost, self.longest)
            speed = expected_speedup(alpha, gamma, cost)
            if speed > best:
                best, self.rule.most, self.rule.threshold = speed, self.longest, bar
                self.sublayers = early_exit(self.model.c.n_layers, e)
