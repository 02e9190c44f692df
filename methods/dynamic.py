"""A draft that changes while it runs: DEL chooses after which block to exit, between any two
rounds.

Learning is nearly free, because it uses states that drafting and verifying compute anyway. In a
batch the rows share one choice, since they share each pass. The constants are the published ones.
"""
import torch

from control import Confidence, acceptance_rate, best_gamma, expected_speedup
from kvcache import pick
from layerskip import SelfDraft, early_exit, same_model
from methods.costs import by_weights
from sampling import raw_probs

OMEGA = 0.95    # the share of the counts that remains when a round is scored
WINDOW = 32     # how many of the prompt's last tokens are scored


class DEL(SelfDraft):
    """Exit after the block that promises the most tokens for the layers that run, and stop when the
    draft is unsure (DEL, arXiv 2504.05598).

    The token that an exit would have drafted at each place of the last round, its *shadow token*,
    is known from the states of drafting and verifying. DEL counts how many shadows would have been
    accepted and rejected, with the exit's confidence. Old counts fade. The exit with the best
    expected speed drafts up to `gamma` tokens. It stops after a token whose confidence is below a
    threshold, midway between its mean confidence in accepted and in rejected shadows.

    It differs from the paper in four ways. The costs include the head, where the paper counts
    layers. Nothing is drafted if nothing gains. Counts start from a hit at confidence 1 and a miss
    at 0, because the paper's threshold is NaN until both occur. When sampling, a shadow counts as
    the sum of min(p, q), not as a match of the likeliest tokens. Each shadow costs a product with
    the head, so DEL may score few `exits`, or only every n-th round (`every`).
    """

    def __init__(self, model, gamma=18, exits=None, every=1):
        L = model.c.n_layers
        self.exits = list(range(1, L)) if exits is None else list(exits)
        super().__init__(model, early_exit(L, self.exits[0]), Confidence(0.5, gamma))
        self.taps = (*(2 * e - 1 for e in self.exits), 2 * L - 1)
        machine = by_weights(model.c)
        self.costs = [machine.draft(early_exit(L, e)).start for e in self.exits]
        self.longest = gamma
        self.every = every
        self.counts = torch.zeros(4, len(self.exits), dtype=torch.float64)
        self.round = 0

    def begin(self, state, trace):
        same_model(self.model, state)
        super().begin(state, trace)
        last = torch.arange(-WINDOW, 0, device=state.n.device)
        slots = state.n[:, None] + last                                         # (B, window)
        trace = {tap: pick(x, slots.clamp(min=0)) for tap, x in trace.items()}
        p = state.probs(self.model.unembed(trace[self.taps[-1]]))
        self.score(state, trace, p, slots >= 0)

    def observe(self, state, r):
        super().observe(state, r)
        self.round += 1
        if self.round % self.every == 0:
            true = state.send([[k < len(new) for k in range(r.p.shape[1])] for new in r.new])
            self.score(state, r.trace, r.p, true)

    def score(self, state, trace, p, true):
        """Count what every exit would have drafted where `true` (B, T) says that all tokens before
        were accepted, and choose the exit. p (B, T, V) is the target's distribution after each
        place."""
        states = torch.stack([trace[tap] for tap in self.taps[:-1]])            # (E, B, T, dim)
        logits = self.model.unembed(states.flatten(0, 1)).unflatten(0, states.shape[:2])
        hit = acceptance_rate(p, state.probs(logits))                           # (E, B, T)
        sure = raw_probs(logits).amax(-1).double()                              # (E, B, T)
        parts = torch.stack([hit, 1 - hit, hit * sure, (1 - hit) * sure])
        self.counts = OMEGA * self.counts + (parts * true).sum((2, 3)).cpu()           # (4, E)
        hits, misses, sure_hits, sure_misses = self.counts
        alphas = (hits + 1) / (hits + misses + 2)
        bars = ((sure_hits + 1) / (hits + 1) + sure_misses / (misses + 1)) / 2
        best = 1.0
        self.rule.longest = 0       # do not draft if none gains
        rows = zip(self.exits, alphas.tolist(), self.costs, bars.tolist(), strict=True)
        for e, alpha, cost, bar in rows:
            speed = expected_speedup(alpha, best_gamma(alpha, cost, self.longest), cost)
            if speed > best:
                best = speed
                self.rule.longest = self.longest
                self.rule.threshold = bar
                self.sublayers = early_exit(self.model.c.n_layers, e)
