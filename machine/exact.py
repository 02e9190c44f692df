"""The same text, to the bit: passes of one shape.

Two runs part where the same row of logits is rounded differently in a pass of one token than in a pass of
four: another routine multiplies, or a sum over the slots is cut elsewhere. So here every pass has as many
rows as any other and reads all slots of its cache. A row then depends on the text before it, and on
nothing else: not on what was drafted, nor on how the text was cut into passes.

The one thing to remember: what is added to a pass is dead, but it decides how the rest is rounded.
"""
import torch

from kvcache import KVCache
from machine.blocks import pad, place
from methods.standin import StandIn
from model import SPARE, Placement
from speculative import prefill


class Exact(StandIn):
    """Stands in for a Transformer. Every pass with a cache has `rows` rows: a longer one is cut into pieces,
    also a prompt, and a shorter one gets dead rows, which land after the block, where nothing is read.

    cut=False, where `few_suffice`: at least so many rows, and longer passes stay whole. Raises ValueError
    for a tree: its keys stand in other slots until they are accepted, and sums over them round differently.
    """

    def __init__(self, model, rows=8, cut=True):
        self.model = model
        self.rows = rows
        self.cut = cut

    def pieces(self, x):
        """x (B, T, dim) -> [(the first row, a piece with dead rows after it, how many rows of it count)]"""
        parts = x.split(self.rows, 1) if self.cut else [x]
        return [(self.rows * i, pad(part, max(part.shape[1], self.rows)), part.shape[1])
                for i, part in enumerate(parts)]

    def run(self, x, at, cache=None, sublayers=None, trace=None):
        """`Transformer.run`."""
        if cache is None:
            return self.model.run(x, at, None, sublayers, trace)
        if at.tree is not None:
            raise ValueError("a tree cannot be exact: its keys stand in other slots, and sums over them "
                             "round differently")
        slots = at.slots.expand(x.shape[0], -1)
        whole, seen = [], []
        for first, part, count in self.pieces(x):
            here = place(part.shape[1], slots[:, first : first + 1], cache.k.shape[3])
            seen.append(dict.fromkeys(trace or ()))
            whole.append(self.model.run(part, here, cache, sublayers, seen[-1])[:, :count])
            for tap, y in seen[-1].items():
                seen[-1][tap] = None if y is None else y[:, :count]
        for tap in trace or ():
            if seen[0][tap] is not None:
                trace[tap] = torch.cat([one[tap] for one in seen], 1)
        return torch.cat(whole, 1)

    def unembed(self, x, rows=None):
        """`Transformer.unembed`."""
        return torch.cat([self.model.unembed(part, rows)[:, :count] for _, part, count in self.pieces(x)], 1)


@torch.inference_mode()
def few_suffice(model, ids):
    """Does this machine give rows in blocks of 2, 3 and 16 tokens the very bits that they have in blocks of
    8? Compared at three places of a text of these ids, through the whole model. If so, passes need not be
    cut. trap: one product of random numbers does not tell: half types round away what differs."""
    text = (list(ids) * 64)[:64]
    tokens = torch.tensor([text], device=model.tok.device)
    cache = KVCache(model.c, 1, len(text) + SPARE, model.attention_dtype(), tokens.device)
    prefill(model, tokens, cache)

    def rows(start, T):
        """The first rows of logits of the block of T tokens from `start` on."""
        at = Placement.at(start, start + T, tokens.device)._replace(same=False, end=cache.k.shape[3])
        x = model.run(model.embed(tokens[:, start : start + T]), at, cache)
        return model.unembed(x)[0, :8]

    for start in 48, 31, 5:     # backwards, so that what lies before is untouched
        want = rows(start, 8)
        for T in 2, 3, 16:
            got = rows(start, T)
            if not torch.equal(got, want[: len(got)]):
                return False
    return True
