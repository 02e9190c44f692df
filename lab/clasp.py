"""CLaSp (arXiv 2505.24196): skip the blocks that change the residual stream least, chosen anew while the text
is written. By our tables an early exit gains more."""
import torch

from control import Confidence
from lab.aside import aside
from layerskip import SelfDraft
from speculative import pick


def nearest(states, run, most):
    """CLaSp's dynamic programme (arXiv 2505.24196): for each number of skips, from 1 to `most`, the set of
    blocks without which the residual stream stays nearest to the target's, by cosine.

    states[u] (N, dim): the target's residual stream at N places as it enters block u, and at last as it
    leaves the last one. run(u, x) applies block u to x (J, N, dim).

    Its table: best[j] are the states after the blocks so far, of which j were skipped. The next one is either
    run on best[j] or skipped from best[j-1], whichever ends nearer to the target's states there.
    """
    best, blocks = states[0][None], len(states) - 1                             # (J, N, dim)
    gone = torch.zeros(1, blocks, dtype=torch.bool, device=best.device)         # (J, blocks)
    never = gone.new_full((1,), -2.0, dtype=torch.float64)

    def near(x, u):
        return torch.cosine_similarity(x.double(), states[u].double(), -1).mean(-1)     # (J,)

    for u in range(blocks):
        ran, skip = run(u, best), gone.clone()
        skip[:, u] = True
        keep = torch.cat([near(ran, u + 1), never]) >= torch.cat([never, near(best, u + 1)])    # (J+1,)
        best = torch.where(keep[:, None, None], torch.cat([ran, ran[-1:]]), torch.cat([best[:1], best]))
        gone = torch.where(keep[:, None], torch.cat([gone, gone[-1:]]), torch.cat([gone[:1], skip]))
        best, gone = best[: most + 1], gone[: most + 1]
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
        gone = nearest(states, run, self.skips)[-1]
        self.sublayers = [i for i in range(2 * L) if i // 2 not in gone]
