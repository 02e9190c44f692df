"""What a run did and what it cost: counts, a stopwatch, what limits the speed, and plain decoding beside it.

A rate is the tokens divided by the seconds of the same run. Reading the prompts does not count, because
drafting speeds up only the writing.
"""
import math
import statistics
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch

from control import expected_tokens
from kvcache import KVCache
from speculative import Drafter, Wrapper, collect, prefill


@dataclass
class Counts:
    """What happened in a run, over all its rows."""
    passes: int = 0     # passes of the target, after the prompts were read
    turns: int = 0      # row by row: passes that wrote something into the row
    tokens: int = 0     # written
    drafted: int = 0    # row by row: passes that tested a draft of the row
    hits: int = 0       # those of them that accepted the draft's first token
    proposed: int = 0   # drafted tokens, less those after an accepted end of text
    accepted: int = 0   # those of them that were accepted

    def add(self, r):
        self.passes += 1
        for new, proposed, accepted in zip(r.new, r.proposed.tolist(), r.accepted.tolist(), strict=True):
            self.turns, self.tokens = self.turns + bool(new), self.tokens + len(new)
            self.drafted, self.hits = self.drafted + bool(proposed), self.hits + bool(accepted)
            self.proposed, self.accepted = self.proposed + proposed, self.accepted + accepted

    @property
    def tau(self):
        """Tokens that a pass wrote into a row."""
        return self.tokens / max(1, self.turns)

    @property
    def alpha(self):
        """How often the first token of a draft was accepted."""
        return self.hits / max(1, self.drafted)


# --- time


class Stopwatch(Wrapper):
    """Wraps a drafter (None: plain decoding) and notes the seconds until the prompts were read, also by the
    draft model. It starts when it is made: make one right before each run."""

    def __init__(self, drafter=None):
        super().__init__(drafter or Drafter())
        self.reading, self.now = 0.0, time.perf_counter()

    def lap(self, state):
        """The seconds since the last lap. On CUDA this waits for the device."""
        if state.n.is_cuda:
            torch.cuda.synchronize(state.n.device)
        before, self.now = self.now, time.perf_counter()
        return self.now - before

    def begin(self, state, trace):
        super().begin(state, trace)
        self.reading = self.lap(state)


class Timed(Stopwatch):
    """A stopwatch for the parts of a round, too. `seconds`: what drafting (with `observe`), verifying and the
    rest of the loop took after the prompts were read; the rest includes the code that consumes the rounds.
    On CUDA it synchronises four times per round, which costs a little of what it measures."""

    def __init__(self, drafter=None):
        super().__init__(drafter)
        self.seconds = {"draft": 0.0, "verify": 0.0, "loop": 0.0}
        self.verified = []  # (tokens in the block, seconds) of each pass of the target

    def propose(self, state):
        self.seconds["loop"] += self.lap(state)
        draft = super().propose(state)
        self.seconds["draft"] += self.lap(state)
        return draft

    def observe(self, state, r):
        self.verified.append((r.p.shape[1], self.lap(state)))
        self.seconds["verify"] += self.verified[-1][1]
        super().observe(state, r)
        self.seconds["draft"] += self.lap(state)

    def plain(self):
        """The median seconds of a round without a draft, in which the target runs all its sub-layers on a
        single token; None if there were fewer than three."""
        single = [seconds for block, seconds in self.verified if block == 1]
        if len(single) < 3:
            return None
        return statistics.median(single) + self.seconds["loop"] / len(self.verified)

    def spread(self):
        """By how many seconds passes over equally many tokens differ: their standard deviation."""
        alike = {}
        for block, seconds in self.verified:
            alike.setdefault(block, []).append(seconds)
        apart = [seconds - statistics.mean(alike[block]) for block, seconds in self.verified]
        return math.hypot(*apart) / math.sqrt(max(1, len(apart) - len(alike)))


# --- what limits the speed


def limit(n, timed=None, plain=None, speedup=None):
    """One sentence: what keeps a run from being faster.

    n: its Counts. timed: its Timed drafter, if it had one. plain: the seconds that a pass of plain decoding
    takes, if that is known. speedup: over plain decoding, if it was measured.
    """
    if n.proposed == 0:
        return "Nothing was drafted: every token cost a pass of the whole model."
    if n.passes < 8:
        return "The answer is too short to say what limits it: it took fewer than 8 passes."
    alpha, tau, gamma, share = n.alpha, n.tau, n.proposed / n.turns, n.drafted / n.turns
    if timed is None:
        return f"A gain needs alpha > c: drafting a token must cost less than {alpha:.0%} of a target pass."
    draft, verify, loop = (timed.seconds[part] / n.passes for part in ("draft", "verify", "loop"))
    cost, spread, plain = draft + verify + loop, timed.spread(), plain or timed.plain()
    busy = ("The machine was too busy to say what limits the speed: passes over equally many tokens "
            f"differ by {spread / cost:.0%} of the time of a round.")
    # trap: without `plain` there is no c. The time of verifying cannot stand for a whole pass, because it
    # omits the sub-layers whose results the draft has handed over.
    if plain is not None:
        c = draft / gamma / plain
        if alpha <= c and (tau * plain / cost if speedup is None else speedup) <= 1:
            return busy if speedup is None and spread > cost - tau * plain else (
                f"No gain, as alpha <= c: {alpha:.0%} of the first drafts are accepted, but drafting a "
                f"token costs {c:.0%} of a target pass.")
    now = max(1, round(gamma / share))  # how long a draft is, if there is one
    # Leviathan et al. 2023, Theorem 3.8, with the measured costs
    speed = {g: expected_tokens(alpha, g) / (draft / gamma * g + verify + loop) for g in range(now, now + 9)}
    best = max(speed, key=speed.get)
    # {sentence: how many times as fast the run would be if what the sentence names were ideal}
    counted = {
        f"Acceptance is the limit: {tau - 1:.1f} of {gamma:.1f} drafted tokens a pass are accepted; try a "
        "draft nearer to the target.": (gamma + 1) / tau,
        f"Drafts are too short: with alpha = {alpha:.0%}, gamma {best} promises "
        f"{speed[best] / speed[now]:.1f} times the speed.": speed[best] / speed[now],
        f"Drafts are too rare: only {share:.0%} of the passes had one to check.":
            (1 + (tau - 1) / share) / tau}
    clocked = {
        f"Drafting is the limit: it takes {draft / cost:.0%} of the time; try a cheaper draft, such as an "
        "earlier exit.": cost / (verify + loop),
        f"The loop is the limit: {loop / cost:.0%} of the time is spent outside drafter and target.":
            cost / (draft + verify)}
    if plain is not None:
        clocked[f"The block is the limit: on this machine a pass over it costs {verify / plain:.1f} passes "
                "over a single token."] = cost / (draft + min(plain, verify) + loop)
    gains = counted | clocked
    most = max(gains, key=gains.get)
    return busy if most in clocked and spread > cost - cost / gains[most] else most


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
        """Tokens a second, once the prompts were read."""
        return self.tokens / self.seconds


def measure(start, drafter, rows):
    """A Run of `start(drafter)`, which yields what `rounds` yields for this number of rows."""
    watch = Stopwatch(drafter)
    outputs, passes = collect(start(watch), rows)
    return Run(outputs, passes, watch.reading, time.perf_counter() - watch.now)


def compare(start, makers, rows, repeats):
    """{name: the Run whose rate is the median of its name's}: a warm-up of each, then A B A B.

    makers: {name: () -> a drafter, or None for plain decoding}. trap: every run needs a new drafter, because
    a rule that has learnt from a text knows it the second time.
    """
    runs = {name: [] for name in makers}
    for _ in range(repeats + 1):
        for name, make in makers.items():
            runs[name].append(measure(start, make(), rows))
    return {name: sorted(r[1:], key=lambda run: run.rate)[repeats // 2] for name, r in runs.items()}


def divergence(model, prompts, ours, plain):
    """Where greedy texts differ from plain decoding, and whether rounding explains it; None if they are the
    same. If several rows differ: the first that rounding does not explain, or else the first."""
    rows = enumerate(zip(prompts, ours, plain, strict=True))
    found = [{"output": b} | parting(model, *row) for b, row in rows if row[1] != row[2]]
    return next((d for d in found if not d["near_tie"]), found[0] if found else None)


@torch.inference_mode()
def parting(model, prompt, ours, plain):
    """The first position where two answers differ, the ids there, and their `gap`: how far the less likely
    one's logit lies below the best.

    `rounding` is how far apart two logits may be and still change places, because a block of tokens is
    rounded differently from a single one: each sub-layer rounds its result to the model's dtype, and its sums
    of `dim` products to float32 or wider. Independent errors add up like the root of their number. Here are
    four, two logits in two runs, which gives the 2.
    """
    both = enumerate(zip(ours, plain, strict=False))
    at = next((i for i, (x, y) in both if x != y), min(len(ours), len(plain)))
    ids = [*ours[at : at + 1], *plain[at : at + 1]]     # one only, if the other text has ended
    tokens = torch.tensor([prompt + plain[:at]], device=model.tok.device)               # (1, T)
    cache = KVCache(model.c, 1, tokens.shape[1], model.attention_dtype(), tokens.device)
    logits = model.unembed(prefill(model, tokens, cache)[:, -1:])[0, 0].double()        # (V,)
    gap = float(logits.max() - logits[ids].min())
    dtypes = model.tok.dtype, torch.promote_types(model.tok.dtype, torch.float32)
    result, product = (torch.finfo(dtype).eps / 2 for dtype in dtypes)
    error = math.sqrt(2 * model.c.n_layers) * (result + math.sqrt(model.c.dim) * product)
    rounding = 2 * error * float(logits.abs().max())
    return {"position": at, "ids": ids, "gap": gap, "rounding": rounding,
            "near_tie": len(ids) == 2 and gap <= rounding}
