"""Drafted and plain decoding, side by side: the speed of each, and whether the texts are the
same."""
import math
import time
from typing import NamedTuple

import torch

from drafter import Drafter
from kvcache import KVCache, prefill
from speculative import collect
from support.report import speed
from support.stats import Stopwatch

REPEATS = 3     # interleaved runs, after a warm-up of each


def against_plain(options, model, prompts, plan, start, outputs):
    """Time drafted and plain decoding in turn. The printed `outputs` must be the plain ones, unless
    they were sampled without --exact."""
    makers = {"drafted": plan.make, "plain": Drafter}
    runs = compare(start, makers, len(outputs), REPEATS)
    drafted, plain = (speed(run.tokens, run.reading, run.seconds) for run in runs.values())
    texts = runs["plain"].outputs
    found = {
        **drafted,
        "identical": None,
        "first_divergence": None,
        "ratio": runs["drafted"].rate / runs["plain"].rate if runs["plain"].tokens else None,
        "baseline": plain | {"target_passes": runs["plain"].passes, "ids": texts},
    }
    if options.exact or options.temperature == 0:
        ids = [output["ids"] for output in outputs]
        different = divergence(model, prompts, ids, texts)
        found |= {"first_divergence": different, "identical": different is None}
    return found


def lines(r):
    """What the comparison says: the gain, and whether the text is the same."""
    if r["ratio"] is None:
        return [verdict(r)]
    plain = r["baseline"]
    passes = f"{r['target_passes']} passes instead of {plain['target_passes']}"
    if r["new_tokens"] != plain["new_tokens"]:
        passes = (f"{r['target_passes']} passes for {r['new_tokens']} tokens, "
                  f"{plain['target_passes']} in plain decoding for {plain['new_tokens']}")
    gain = (f"{passes}, and {r['ratio']:.2f} times as fast: {r['tokens_per_second']:.0f} tokens/s, "
            f"plain decoding {plain['tokens_per_second']:.0f} (medians of {REPEATS} runs in turn)")
    return [gain, verdict(r)]


def verdict(r):
    """Whether the text is the same as in plain decoding."""
    d = r["first_divergence"]
    if r["identical"] is None:
        return ("sampled texts may differ: drafting spends more random numbers (compare at "
                "temperature 0, or with --exact)")
    if d is None:
        return f"identical to plain decoding in {r['dtype']}, token for token"
    equal = f"{d['position']} equal token{'s' * (d['position'] != 1)}"
    if len(r["outputs"]) > 1:
        equal += f" of output {d['output']}"
    if r["exact"]:
        return (f"NOT identical to plain decoding, which --exact promises, after {equal}: "
                "please report it")
    gap = f"{d['gap']:.3g} apart, and rounding in {r['dtype']} explains up to {d['rounding']:.2g}"
    if d["near_tie"]:
        return (f"after {equal} a near-tie was decided differently from plain decoding: "
                f"two logits are {gap}")
    return (f"NOT identical to plain decoding, and not by a near-tie: after {equal} two logits "
            f"are {gap}")


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
