"""The same text, to the bit: passes of one shape.

Two runs differ where the same row of logits is rounded differently in a pass over one token than in
a pass over four: another routine multiplies, or a sum over the slots is split differently. Here
every pass reads all slots of its cache, and none has a single row. Where that is not enough, all
have the same number of rows. So a row depends only on the text before it, and not on how the text
was divided into passes.
"""
from collections import Counter

import torch

from kvcache import KVCache
from machine.blocks import pad, widen
from methods.standin import StandIn
from model import SPARE, Placement
from speculative import prefill


class Exact(StandIn):
    """Stands in for a Transformer. Every pass with a cache has at least `rows` rows, and at most
    `most`, by default as many: a longer one is cut into pieces, also a prompt, and a shorter one
    gets dead rows, which land after the block, where nothing is read.

    Raises ValueError for a tree: its keys stand in other slots until they are accepted, and sums
    over them round differently.
    """

    def __init__(self, model, rows=8, most=None):
        self.model = model
        self.rows = rows
        self.most = most or rows

    def pieces(self, x):
        """x (B, T, dim) -> [(the first row, a piece with dead rows after it, how many rows of it
        count)]"""
        pieces = []
        for i, part in enumerate(x.split(self.most, 1)):
            count = part.shape[1]
            pieces.append((self.most * i, pad(part, max(count, self.rows)), count))
        return pieces

    def run(self, x, at, cache=None, sublayers=None, trace=None):
        """`Transformer.run`."""
        if cache is None:
            return self.model.run(x, at, None, sublayers, trace)
        if at.tree is not None:
            raise ValueError("a tree cannot be exact: its keys stand in other slots, and sums "
                             "over them round differently")
        slots = at.slots.expand(x.shape[0], -1)
        xs = []
        traces = []
        for first, part, count in self.pieces(x):
            own = slots[:, first : first + count]
            here = Placement(own, own, 0, cache.k.shape[3])
            here = widen(here, part.shape[1] - count, here.end)
            seen = dict.fromkeys(trace or ())
            xs.append(self.model.run(part, here, cache, sublayers, seen)[:, :count])
            traces.append({tap: y[:, :count] for tap, y in seen.items() if y is not None})
        for tap in traces[0]:
            trace[tap] = join([part[tap] for part in traces])
        return join(xs)

    def unembed(self, x, rows=None):
        """`Transformer.unembed`."""
        logits = []
        for _, part, count in self.pieces(x):
            logits.append(self.model.unembed(part, rows)[:, :count])
        return join(logits)


def join(parts):
    """(B, T, ...) each, one after the other."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


@torch.inference_mode()
def equal_rows(model, ids, starts, widths, all_slots=True):
    """{T: (equal, compared)} for T in widths: how many rows of logits are the same to the bit in a
    block of T tokens and in one of 8. The blocks begin at `starts` in the text `ids`. trap: one
    product of random numbers would not tell, since half types round away what differs."""
    tokens = torch.tensor([ids], device=model.tok.device)
    cache = KVCache(model.c, 1, len(ids) + SPARE, model.attention_dtype(), tokens.device)
    prefill(model, tokens, cache)

    def rows(start, T):
        at = Placement.span(start, start + T, tokens.device)._replace(same=False)
        if all_slots:
            at = at._replace(end=cache.k.shape[3])
        return model.unembed(model.run(model.embed(tokens[:, start : start + T]), at, cache))[0, :8]

    same, compared = Counter(), Counter()
    for start in sorted(starts, reverse=True):  # so that what lies before a block is untouched
        want = rows(start, 8)
        for T in widths:
            got = rows(start, T)
            same[T] += sum(map(torch.equal, got, want[: len(got)]))
            compared[T] += len(got)
    return {T: (same[T], compared[T]) for T in widths}


def few_suffice(model, ids):
    """Whether this machine gives rows in blocks of 2, 4 and 16 tokens the very bits that they have
    in blocks of 8, so that passes need not have one shape."""
    text = (list(ids) * 64)[:64]
    found = equal_rows(model, text, starts=(5, 31, 48), widths=(2, 4, 16))
    return all(same == compared for same, compared in found.values())
