"""What a run did, what it cost, and how it compares with plain decoding.

A rate is the tokens divided by the seconds of the same run. Reading the prompts does not count,
because drafting speeds up only the writing.
"""
import math
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch

from drafter import Drafter, Wrapper
from kvcache import KVCache, prefill
from speculative import collect


@dataclass
class Counts:
    """What happened in a run, over all its rows."""
    passes: int = 0     # target passes after the prompts were read
    turns: int = 0      # row by row: passes that wrote something into the row
    tokens: int = 0     # written
    drafted: int = 0    # row by row: passes that tested a draft of the row
    hits: int = 0       # the passes among these that accepted the draft's first token
    proposed: int = 0   # drafted tokens, without any after an accepted end of text
    accepted: int = 0   # proposed tokens that were accepted

    def add(self, r):
        self.passes += 1
        rows = zip(r.new, r.proposed.tolist(), r.accepted.tolist(), strict=True)
        for new, proposed, accepted in rows:
            self.turns += bool(new)
            self.tokens += len(new)
            self.drafted += bool(proposed)
            self.hits += bool(accepted)
            self.proposed += proposed
            self.accepted += accepted

    @property
    def tau(self):
        """How many tokens a pass wrote into a row, on average."""
        return self.tokens / max(1, self.turns)

    @property
    def alpha(self):
        """The share of drafts whose first token was accepted, which estimates alpha."""
        return self.hits / max(1, self.drafted)


# --- time


class Stopwatch(Wrapper):
    """Wraps a drafter (None for plain decoding) and measures the seconds until the target and the
    draft model have read the prompts. It starts when it is made, so make one right before each
    run."""

    def __init__(self, drafter=None):
        super().__init__(drafter or Drafter())
        self.reading = 0.0
        self.now = time.perf_counter()

    def lap(self, state):
        """The seconds since the last lap. On CUDA this waits for the device."""
        if state.n.is_cuda:
            torch.cuda.synchronize(state.n.device)
        before = self.now
        self.now = time.perf_counter()
        return self.now - before

    def begin(self, state, trace):
        super().begin(state, trace)
        self.reading = self.lap(state)


class Timed(Stopwatch):
    """A stopwatch that also times the parts of a round. `seconds` holds how long drafting (with
    `observe`), verifying and the rest of the loop took after the prompts were read. The rest
    includes the code that consumes the rounds. On CUDA it synchronises four times per round,
    which costs a little of what it measures."""

    def __init__(self, drafter=None):
        super().__init__(drafter)
        self.seconds = {"draft": 0.0, "verify": 0.0, "loop": 0.0}

    def propose(self, state):
        self.seconds["loop"] += self.lap(state)
        draft = super().propose(state)
        self.seconds["draft"] += self.lap(state)
        return draft

    def observe(self, state, r):
        self.seconds["verify"] += self.lap(state)
        super().observe(state, r)
        self.seconds["draft"] += self.lap(state)


# --- drafted and plain decoding, side by side


class Run(NamedTuple):
    """What one run wrote and how long it took."""
    outputs: list       # the ids written into each row
    passes: int         # of the target, after the prompts were read
    reading: float      # seconds until the prompts were read
    seconds: float      # from then on

    @property
    def tokens(self):
        return sum(map(len, self.outputs))

    @property
    def rate(self):
        """Tokens per second after the prompts were read."""
        return self.tokens / self.seconds


def measure(start, drafter, rows):
    """A Run of `start(drafter)`, which yields what `rounds` yields for this number of rows."""
    watch = Stopwatch(drafter)
    outputs, passes = collect(start(watch), rows)
    return Run(outputs, passes, watch.reading, time.perf_counter() - watch.now)


def compare(start, makers, rows, repeats):
    """{name: its Run with the median rate}, after a warm-up of each, from runs in turn, A B A B.

    `makers` maps a name to a function that makes a drafter, or None for plain decoding. trap:
    every run needs a new drafter, because a rule that has learnt from a text knows it the second
    time.
    """
    runs = {name: [] for name in makers}
    for _ in range(repeats + 1):
        for name, make in makers.items():
            runs[name].append(measure(start, make(), rows))
    return {name: sorted(r[1:], key=lambda run: run.rate)[repeats // 2] for name, r in runs.items()}


def divergence(model, prompts, ours, plain):
    """Where greedy texts differ from plain decoding, and whether rounding explains it. It is None
    if they are the same. If several rows differ, the first that rounding does not explain
    counts."""
    rows = enumerate(zip(prompts, ours, plain, strict=True))
    found = [{"output": b} | parting(model, *row) for b, row in rows if row[1] != row[2]]
    found.sort(key=lambda d: d["near_tie"])
    return next(iter(found), None)


@torch.inference_mode()
def parting(model, prompt, ours, plain, dtype=None):
    """The first position where two answers differ, the ids there, and their `gap`, which is how far
    the less likely one's logit lies below the best. `rounding` is the largest gap that rounding
    explains. A block of tokens is rounded differently from a single one. Each sub-layer rounds its
    result to the model's dtype and its sums of `dim` products to float32 or wider, and independent
    errors add up like the root of their number. Two logits in two runs have four errors, which
    gives the factor 2. The texts were written in `dtype`, by default the model's."""
    both = enumerate(zip(ours, plain, strict=False))
    place = next((i for i, (x, y) in both if x != y), min(len(ours), len(plain)))
    ids = [*ours[place : place + 1], *plain[place : place + 1]]  # only one if the other has ended
    tokens = torch.tensor([prompt + plain[:place]], device=model.tok.device)            # (1, T)
    cache = KVCache(model.c, 1, tokens.shape[1], model.attention_dtype(), tokens.device)
    logits = model.unembed(prefill(model, tokens, cache)[:, -1:])[0, 0].double()        # (V,)
    gap = float(logits.max() - logits[ids].min())
    dtype = dtype or model.tok.dtype
    result = torch.finfo(dtype).eps / 2
    product = torch.finfo(torch.promote_types(dtype, torch.float32)).eps / 2
    error = math.sqrt(2 * model.c.n_layers) * (result + math.sqrt(model.c.dim) * product)
    rounding = 2 * error * float(logits.abs().max())
    return {
        "position": place,
        "ids": ids,
        "gap": gap,
        "rounding": rounding,
        "near_tie": len(ids) == 2 and gap <= rounding}
