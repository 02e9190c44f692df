"""What a run did, and how long it took.

A rate is the tokens divided by the seconds of the same run. Reading the prompts does not count,
because drafting speeds up only the writing.
"""
import time
from dataclasses import dataclass

import torch

from drafter import Drafter


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


class Stopwatch(Drafter):
    """Wraps a drafter (None for plain decoding) and measures the seconds until the target and the
    draft model have read the prompts. It starts when it is made, so make one right before each
    run."""

    def __init__(self, drafter=None):
        self.drafter = drafter or Drafter()
        self.rule = self.drafter.rule
        self.taps = self.drafter.taps
        self.reading = 0.0
        self.now = time.perf_counter()

    def lap(self, state, wait=True):
        """The seconds since the last lap. On CUDA this waits for the device, unless told not to."""
        if wait and state.n.is_cuda:
            torch.cuda.synchronize(state.n.device)
        before = self.now
        self.now = time.perf_counter()
        return self.now - before

    def begin(self, state, trace):
        self.drafter.begin(state, trace)
        self.reading = self.lap(state)

    def propose(self, state):
        return self.drafter.propose(state)

    def observe(self, state, r):
        self.drafter.observe(state, r)


class Timed(Stopwatch):
    """A stopwatch that also times the parts of a round. `seconds` holds how long drafting (with
    `observe`), verifying and the rest of the loop took after the prompts were read. The rest
    includes the code that consumes the rounds. With `waits` it synchronises four times per round
    with a GPU, which costs a little of what it measures. Without, only their sum is right there."""

    def __init__(self, drafter=None, waits=True):
        super().__init__(drafter)
        self.waits = waits
        self.seconds = {"draft": 0.0, "verify": 0.0, "loop": 0.0}

    def begin(self, state, trace):
        super().begin(state, trace)
        self.waits = self.waits or not state.n.is_cuda  # a CPU has always finished

    def propose(self, state):
        self.seconds["loop"] += self.lap(state, self.waits)
        draft = super().propose(state)
        self.seconds["draft"] += self.lap(state, self.waits)
        return draft

    def observe(self, state, r):
        self.seconds["verify"] += self.lap(state, self.waits)
        super().observe(state, r)
        self.seconds["draft"] += self.lap(state, self.waits)
