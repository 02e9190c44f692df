"""Skip sets chosen while the text is written, by dynamic programming over the residual stream.
CLaSp skips a given number of blocks, and KnapSpec weighs attentions and MLPs by the time that they
take. By our tables an early exit gains more than either."""
import torch

from control import Confidence, best_gamma, expected_speedup
from kvcache import pick
from lab.aside import aside
from layerskip import SelfDraft, same_model
from methods.costs import by_weights


def nearest(states, run, times, most, least=-1.0):
    """For each time that skipping may save, from 1 to `most`, the units without which the residual
    stream stays nearest to the target's, by cosine. Returns [their numbers], None where no set
    saves just that, and the states after the last unit (most + 1, N, dim), with nothing skipped at
    first.

    A unit is run or skipped as a whole, a block or a sub-layer. states[u] (N, dim): the target's
    residual stream at N places as it enters unit u, and at last as it leaves the last one. run(u,
    x) applies unit u to x (J, N, dim). times[u]: what skipping it saves, a whole number; 0: it is
    never skipped. least: a set whose cosine falls below it is given up.

    In the table best[j] are the states after the units so far, of which skipping saved j. The next
    one is either run on best[j] or skipped from best[j - its time], whichever ends nearer to the
    target's states.
    """
    best = states[0].expand(most + 1, *states[0].shape).clone()                 # (J, N, dim)
    gone = torch.zeros(most + 1, len(times), dtype=torch.bool, device=best.device)      # (J, units)
    there = torch.arange(most + 1, device=best.device) == 0  # (J,) is there such a set?

    def near(x, u):     # (J,) -2 where there is nothing
        cosine = torch.cosine_similarity(x.double(), states[u].double(), -1).mean(-1)
        return torch.where(there & (cosine >= least), cosine, -2.0)

    for u, time in enumerate(times):
        ran = run(u, best)
        keep = near(ran, u + 1)
        skip = near(best, u + 1).roll(time)
        skip[: time or most + 1] = -2.0
        choose = keep >= skip                                                   # (J,)
        gone = torch.where(choose[:, None], gone, gone.roll(time, 0))
        gone[:, u] = ~choose
        best = torch.where(choose[:, None, None], ran, best.roll(time, 0))
        there = torch.maximum(keep, skip) > -2.0
    return [[u for u, bit in enumerate(row) if bit] if yes else None
            for row, yes in zip(gone[1:].tolist(), there[1:].tolist(), strict=True)], best


class Nearest(SelfDraft):
    """What both share. After the prompt, and then after every `every` tokens, `choose` sees the
    target's states as they enter each unit, and as they leave the last one, at some places
    (B, N)."""

    def __init__(self, model, units, rule, every):
        super().__init__(model, range(2 * model.c.n_layers), rule)
        self.units = units
        self.every = every
        self.taps = tuple(unit[-1] for unit in units)

    def begin(self, state, trace):
        same_model(self.model, state)
        super().begin(state, trace)

    def observe(self, state, r):
        super().observe(state, r)
        if max(state.lengths) >= self.due:
            rows = zip(state.known, r.new, strict=True)
            first = state.send([[len(text) - len(new) - 1] for text, new in rows])
            self.look(state, r.trace, first, self.which(state, r))

    def look(self, state, trace, first, which):
        """first (B, 1): where each row's trace begins. which (B, N): the tokens in it whose states
        count."""
        self.due = max(state.lengths) + self.every
        at = first + which
        states = [self.model.embed(state.read(at)), *(pick(trace[tap], which) for tap in self.taps)]
        B, N = at.shape

        def run(u, x):      # (J, B*N, dim): each place sees the text before it, and itself
            J = len(x)
            x = x.unflatten(1, (B, N)).transpose(0, 1).flatten(1, 2)            # (B, J*N, dim)
            y = aside(self.model, state.cache, x, at.repeat(1, J), self.units[u])
            return y.unflatten(1, (J, N)).transpose(0, 1).flatten(1, 2)

        self.choose([x.flatten(0, 1) for x in states], run)

    def skip(self, gone):
        self.sublayers = [i for u, unit in enumerate(self.units) for i in unit if u not in gone]


class CLaSp(Nearest):
    """Skip the `skips` blocks (by default 45 % of them) without which the last accepted token's
    states stay nearest to the target's (CLaSp, arXiv 2505.24196).

    Its dynamic programme runs all its sets in one pass of each block, as tokens of one place that
    do not see each other. `every`, the draft's length and its threshold come from the port to
    Spec-Bench. The port is for one row; here the cosine is the mean over the rows.
    """

    def __init__(self, model, gamma=8, skips=None, every=128, threshold=0.7):
        blocks = [[2 * i, 2 * i + 1] for i in range(model.c.n_layers)]
        super().__init__(model, blocks, Confidence(threshold, gamma), every)
        self.skips = max(1, round(0.45 * len(blocks))) if skips is None else skips

    def begin(self, state, trace):
        super().begin(state, trace)
        self.look(state, trace, 0, state.n[:, None] - 1)

    def which(self, state, r):
        return state.send(r.accepted.tolist())[:, None]

    def choose(self, states, run):
        self.skip(nearest(states, run, [1] * len(self.units), self.skips)[0][-1])


class KnapSpec(Nearest):
    """Skip what promises the most (KnapSpec, arXiv 2602.20217). It is CLaSp's table over
    sub-layers, where a set is as large as the time that it saves, a small whole number for an
    attention and one for an MLP. For every such time there is a set, and alpha is how often its
    best token was the target's at the last `window` places; the set and the length of the best
    expected speed draft, none if none gains.

    Two things differ here. Times come from a `Machine`, by default counting the weights, and
    alpha starts from one hit and one miss, since few places are counted. The first and the last
    block are always run, and sets whose cosine falls below a half are given up, as in the authors'
    code.
    """

    def __init__(self, model, gamma=8, machine=None, every=128, window=16):
        L = model.c.n_layers
        super().__init__(model, [[i] for i in range(2 * L)], 0, every)
        self.machine = machine or by_weights(model.c)
        self.window = window
        self.longest = gamma
        parts = self.machine.attention, self.machine.mlp
        self.times = [min(5, round(t / min(parts))) if 1 < i < 2 * L - 2 else 0
                      for i, t in enumerate(L * parts)]

    def begin(self, state, trace):
        super().begin(state, trace)
        steps = torch.arange(-self.window, 0, device=state.n.device)
        self.look(state, trace, 0, (state.n[:, None] + steps).clamp(min=0))

    def which(self, state, r):
        steps = torch.arange(r.p.shape[1], device=state.n.device)
        return torch.minimum(steps, state.send(r.accepted.tolist())[:, None])

    def choose(self, states, run):
        sets, ends = nearest(states, run, self.times, sum(self.times), least=0.5)
        said = self.model.unembed(torch.cat([states[-1][None], ends[1:]])).argmax(-1)  # (J, B*N)
        hits = (said[1:] == said[:1]).sum(1).tolist()
        best = 1.0
        self.rule.longest = 0
        for gone, hit in zip(sets, hits, strict=True):
            if gone is not None:
                alpha = (hit + 1) / (said.shape[1] + 2)
                left = [i for i in range(len(self.units)) if i not in gone]
                cost = self.machine.draft(left).start
                gamma = best_gamma(alpha, cost, self.longest)
                speed = expected_speedup(alpha, gamma, cost)
                if speed > best:
                    best = speed
                    self.rule.longest = gamma
                    self.skip(gone)
