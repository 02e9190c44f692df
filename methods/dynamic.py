"""Drafts that change while they run, as published: CLaSp chooses which blocks to skip, DEL after which
block to leave.

The target checks every round, whatever drafted it, so a drafter may change its sub-layers between any two
rounds. What it learns from is nearly free: the states that drafting and verifying compute anyway. In a batch
the rows share one choice, since they share each pass. The constants are the published ones.
"""
import torch

from control import Confidence, expected_speedup, plan, weight_costs
from layerskip import SelfDraft, early_exit
from methods.drafting import ScratchTail, same_model
from model import Placement
from sampling import raw_probs
from speculative import pick


def aside(model, cache, x, positions, sublayers):
    """Run `sublayers` for x (B, T, dim), each token on its own, as the first one of a draft: it reads what
    the cache holds before its position (B, T), and itself. (B, T, dim)"""
    T, S = x.shape[1], cache.k.shape[3]
    slots = torch.arange(S, S + T, device=x.device)[None]
    own = torch.eye(T, dtype=torch.bool, device=x.device)[None]
    at = Placement(positions, slots, 0, S + T, own)
    return model.run(x, at, ScratchTail(cache, 0, S), sublayers)


def overlaps(probs, p, logits):
    """How likely a draft would be accepted at each place, the sum of min(p, q), and how sure it is there, the
    largest raw probability. p (..., V), logits (..., V) -> two tensors (...), float64."""
    both = torch.minimum(p, probs(logits)).double().sum(-1)
    return both.clamp(max=1), raw_probs(logits).amax(-1).double()


def last_places(state, trace, count):
    """The last places of each prompt: {tap: (B, count, dim)}, and which of them there are (B, count)."""
    at = state.n[:, None] + torch.arange(-count, 0, device=state.n.device)      # (B, count)
    return {tap: pick(x, at.clamp(min=0)) for tap, x in trace.items()}, at >= 0


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
        self.choose(state, trace, [0] * len(state.known), [len(text) - 1 for text in state.known])

    def observe(self, state, r):
        super().observe(state, r)
        if max(map(len, state.known)) >= self.due:
            first = [len(text) - len(new) - 1 for text, new in zip(state.known, r.new, strict=True)]
            self.choose(state, r.trace, first, r.accepted.tolist())

    def choose(self, state, trace, first, which):
        """first: where each row's trace begins; which: the token in it whose states count."""
        self.due = max(map(len, state.known)) + self.every
        first, which = state.send([first, which])[..., None]                    # (B, 1) both
        at = first + which
        states = [self.model.embed(state.read(at)), *(pick(trace[tap], which) for tap in self.taps)]
        states = [x[:, 0] for x in states]                                      # (B, dim)

        def run(u, x):  # (J, B, dim)
            x = x.transpose(0, 1)
            here = at.expand(x.shape[:2])
            return aside(self.model, state.cache, x, here, [2 * u, 2 * u + 1]).transpose(0, 1)

        L = self.model.c.n_layers
        gone = nearest(states, run, range(L), self.skips)[-1]
        self.sublayers = [i for i in range(2 * L) if i // 2 not in gone]


class DEL(SelfDraft):
    """Leave after the block that promises the most tokens for the layers that are run, and stop where it is
    unsure (DEL, arXiv 2504.05598).

    What exit l would have drafted at each place of the last round is known without drafting: its *shadow
    token*, from the states that drafting and verifying left behind. Its acceptances and their complements are
    counted, and so is how sure it was of both; old counts fade by `omega` a round. The exit of the best
    expected speed drafts, up to `gamma` tokens, and stops after a token less sure than a threshold, the mean
    of how sure it was where it would have been accepted and where it would not.

    Different here: `costs` know the head's share, where theirs counts layers, and nothing is drafted where
    nothing gains. Counts start from a uniform prior, a hit at confidence 1 and a miss at 0, where
    their threshold is NaN until both were seen. When sampling, a shadow counts as the sum of min(p, q), not
    as a match of the likeliest tokens. And shadows are not free, each costs a row of the head: score fewer
    exits (`exits`), or only every `every`th round. The rule "FS", their baseline, is `lab.rules.Schedule`.
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
