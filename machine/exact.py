"""The same text, to the bit: passes of one shape.

Two runs differ where the same row of logits is rounded differently in a pass over one token than in
a pass over four: another routine multiplies, or a sum over the slots is split differently. Here
every pass reads all slots of its cache, and none has a single row. Where that is not enough, all
have the same number of rows. So a row depends only on the text before it, and not on how the text
was divided into passes.
"""
import copy
from collections import Counter
from weakref import WeakKeyDictionary

import torch

from kvcache import KVCache
from machine.blocks import pad, widen
from methods.standin import StandIn
from model import SPARE, Placement
from speculative import prefill

MOST = 16   # rows up to which `few_suffice` compares them


class Exact(StandIn):
    """Stands in for a Transformer. Every pass with a cache has at least `rows` rows for each text,
    and at most `most` in all, by default `rows`. So a longer one is cut into pieces, also a prompt,
    and so is a large batch; a shorter one gets dead rows, which land after the block, where nothing
    is read. trap: from some number of rows on another routine multiplies, and then a text would
    depend on those beside it.

    Raises ValueError for a tree: its keys stand in other slots until they are accepted, and sums
    over them round differently.
    """

    def __init__(self, model, rows=8, most=None):
        self.model = model
        self.rows = rows
        self.most = most or rows
        self.parts = WeakKeyDictionary()    # {cache: {texts: that part of it}}

    def run(self, x, at, cache=None, sublayers=None, trace=None):
        """`Transformer.run`."""
        if cache is None:
            return self.model.run(x, at, None, sublayers, trace)
        if at.tree is not None:
            raise ValueError("a tree cannot be exact: its keys stand in other slots, and sums "
                             "over them round differently")
        B = x.shape[0]
        slots = at.slots.expand(B, -1)
        together = max(1, self.most // max(2, self.rows))       # texts of a pass
        if B <= together:
            return self.read(x, slots, cache, sublayers, trace)
        xs = []
        traces = []
        for first in range(0, B, together):
            texts = slice(first, first + together)
            seen = dict.fromkeys(trace or ())
            part = self.part(cache, texts)
            xs.append(self.read(x[texts], slots[texts], part, sublayers, seen))
            traces.append(seen)
        join_traces(trace, traces, 0)
        return torch.cat(xs)

    def read(self, x, slots, cache, sublayers, trace):
        """`run` for texts that are read together."""
        xs = []
        traces = []
        for first, part, count in self.pieces(x, self.most // x.shape[0]):
            own = slots[:, first : first + count]
            here = Placement(own, own, 0, cache.k.shape[3])
            here = widen(here, part.shape[1] - count, here.end)
            seen = dict.fromkeys(trace or ())
            xs.append(self.model.run(part, here, cache, sublayers, seen)[:, :count])
            traces.append({tap: y[:, :count] for tap, y in seen.items() if y is not None})
        join_traces(trace, traces, 1)
        return join(xs, 1)

    def pieces(self, x, length):
        """x (B, T, dim) -> [(the first row, a piece of up to `length` with dead rows after it, how
        many rows of it count)]"""
        pieces = []
        length = max(length, self.rows)
        for i, part in enumerate(x.split(length, 1)):
            count = part.shape[1]
            pieces.append((length * i, pad(part, max(count, self.rows)), count))
        return pieces

    def part(self, cache, texts):
        """The cache of some texts of a batch (a slice): of the same memory."""
        parts = self.parts.setdefault(cache, {})
        key = texts.start, texts.stop
        if key not in parts:
            part = copy.copy(cache)
            part.k = cache.k[:, texts]
            part.v = cache.v[:, texts]
            part.layers = list(zip(part.k, part.v, strict=True))
            parts[key] = part
        return parts[key]

    def unembed(self, x, rows=None):
        """`Transformer.unembed`."""
        B, T, dim = x.shape
        logits = []
        for _, part, count in self.pieces(x.reshape(1, B * T, dim), self.most):
            logits.append(self.model.unembed(part, rows)[:, :count])
        return join(logits, 1).view(B, T, -1)


def join(parts, dim):
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def join_traces(trace, parts, dim):
    """Put into `trace` what its taps saw in each part."""
    for tap in parts[0]:
        if parts[0][tap] is not None:
            trace[tap] = join([part[tap] for part in parts], dim)


@torch.inference_mode()
def equal_rows(model, ids, starts, widths, all_slots=True):
    """{T: (equal, compared)} for T in widths: how many rows of logits are the same to the bit in a
    block of T tokens and in blocks of 8. The blocks begin at `starts` in the text `ids`. trap: one
    product of random numbers would not tell, since half types round away what differs."""
    tokens = torch.tensor([ids], device=model.tok.device)
    cache = KVCache(model.c, 1, len(ids) + SPARE, model.attention_dtype(), tokens.device)
    prefill(model, tokens, cache)

    def rows(start, T):
        at = Placement.span(start, start + T, tokens.device)._replace(same=False)
        if all_slots:
            at = at._replace(end=cache.k.shape[3])
        return model.unembed(model.run(model.embed(tokens[:, start : start + T]), at, cache))[0]

    same, compared = Counter(), Counter()
    for start in sorted(starts, reverse=True):  # so that what lies before a block is untouched
        eights = [rows(first, 8) for first in range(start, start + max(widths), 8)]
        want = torch.cat(eights)
        for T in widths:
            same[T] += sum(map(torch.equal, rows(start, T), want[:T]))
            compared[T] += T
    return {T: (same[T], compared[T]) for T in widths}


def few_suffice(model, ids):
    """Whether this machine gives rows in blocks of 2, 3, 4 and MOST tokens the very bits that they
    have in blocks of 8, so that passes need not have one shape."""
    if model.tok.dtype == torch.float16 and not model.tok.is_cuda:
        return False    # trap: there one row in 70 differs, which a short check may miss
    text = (list(ids) * 64)[:64]
    found = equal_rows(model, text, starts=(5, 31, 44), widths=(2, 3, 4, MOST))
    return all(same == compared for same, compared in found.values())
