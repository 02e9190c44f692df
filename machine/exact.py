"""The same text, to the bit: passes of one shape.

Two runs differ where the same row of logits is rounded differently in a pass over one token than in
a pass over four: another routine multiplies, or a sum over the slots is split differently. Here
every pass reads all slots of its cache, and none has a single row. Where that is not enough, all
have the same number of rows. So a row depends only on the text before it, and not on how the text
was divided into passes.
"""
import copy
from collections import Counter
from functools import partial
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

    pads=False: the model itself adds dead rows, up to `rows` or the next power of two. Raises
    ValueError for a tree: its keys stand in other slots until they are accepted, and sums over them
    round differently.
    """

    def __init__(self, model, rows=8, most=None, pads=True):
        self.model = model
        self.rows = rows
        self.most = most or rows
        self.pads = pads
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
        together = max(1, self.most // self.rows)       # texts of a pass
        xs = []
        traces = []
        for first in range(0, B, together):
            texts = slice(first, min(B, first + together))
            part = cache if together >= B else self.part(cache, texts)
            y, seen = self.read(x[texts], slots[texts], part, sublayers, trace or ())
            xs.append(y)
            traces.append(seen)
        for tap in traces[0]:
            trace[tap] = join([seen[tap] for seen in traces], 0)
        return join(xs, 0)

    def read(self, x, slots, cache, sublayers, taps):
        """(`run`'s result, {tap: its state}) for texts that are read together."""
        xs = []
        traces = []
        for here, part, count in self.pieces(x, slots):
            at = Placement(here, here, 0, cache.k.shape[3])
            at = widen(at, part.shape[1] - count, at.end)
            seen = dict.fromkeys(taps)
            xs.append(self.model.run(part, at, cache, sublayers, seen)[:, :count])
            traces.append({tap: y[:, :count] for tap, y in seen.items() if y is not None})
        return join(xs, 1), {tap: join([seen[tap] for seen in traces], 1) for tap in traces[0]}

    def pieces(self, x, slots):
        """x (B, T, dim), slots (B, T) -> [(slots of a piece, the piece with its dead rows, how many
        rows of it count)]"""
        length = self.rows
        while 2 * length * x.shape[0] <= self.most:
            length *= 2
        pieces = []
        for part, here in zip(x.split(length, 1), slots.split(length, 1), strict=True):
            count = part.shape[1]
            if self.pads:
                part = pad(part, max(count, self.rows))
            pieces.append((here, part, count))
        return pieces

    def part(self, cache, texts):
        """The cache of some texts of a batch (a slice), in the same memory."""
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
        x = x.reshape(1, B * T, dim)
        logits = [self.model.unembed(part, rows)[:, :count] for _, part, count in self.pieces(x, x)]
        return join(logits, 1).view(B, T, -1)


def exactly(model, ids):
    """The model in exact passes: of two rows and more where these are found to suffice on the text
    `ids`, and of eight elsewhere. The model may be `Recorded(..., exact=True)`."""
    recorded = hasattr(model, "rehearse")
    check = partial(few_suffice, model, ids)
    if recorded:
        model.rehearse(check)       # its programs are compiled side by side
    if not check():
        return Exact(model)
    if recorded:                    # what is wider than its widths would run eagerly
        return Exact(model, model.widths[0], model.widths[-1], pads=False)
    return Exact(model, 2, MOST)


def join(parts, dim):
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


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
