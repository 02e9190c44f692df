"""What a pass and a draft cost.

The one thing to remember: there is one unit everywhere, a pass of the target over one token of a
short text. A longer text makes target and drafts dearer by what their attentions read. (The Machine
of another model has a unit of its own, and `Machine.unit` converts one into the other.)

A `Machine` is counted by the weights that a pass reads (`by_weights`), by their bytes
(`by_bytes`), or measured by the clock (`by_clock` in support/measure.py). A `Watch`
(methods/watch.py) corrects it while a text is written.
"""
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

WIDE = 17   # tokens of a wide pass
LARGE = 64e6    # bytes of a model's blocks: a pass over these or more waits for memory


class Line(NamedTuple):
    """A cost in a text of n tokens, start + slope * n.

    >>> Line(0.5, 0.25).at(2)
    1.0
    """
    start: float
    slope: float = 0.0

    def at(self, n):
        return self.start + self.slope * n


@dataclass(frozen=True)
class Machine:
    """What the parts of a pass cost. Those of all blocks, the head and the step add up to 1.

    >>> m = Machine.of(2, attention=2.0, mlp=3.0, head=6.0, slope=0.8)
    >>> m.draft([0, 1]), m.verify(10, 3)
    (Line(start=0.6875, slope=0.05), 2.0)
    """
    blocks: int
    attention: float            # of one block
    mlp: float                  # of one block
    head: float                 # the output head
    step: float = 0.0           # what is fixed: choosing a token, starting the work
    slope: float = 0.0          # what one attention costs more for each token of the text
    wide: tuple = ((1, 1.0),)   # (T, a pass over T tokens of each row relative to one), T rising
    unit: float = 1.0           # what 1.0 is: so many weights, bytes or seconds

    @classmethod
    def of(cls, blocks, attention, mlp, head, step=0.0, slope=0.0, wide=((1, 1.0),)):
        """A Machine from costs in any unit."""
        unit = blocks * (attention + mlp) + head + step
        parts = (part / unit for part in (attention, mlp, head, step, slope))
        return cls(blocks, *parts, wide, unit)

    def draft(self, sublayers, share=1.0, own=0.0, reads=False) -> Line:
        """A drafted token that runs these sub-layers, a share of the output head and weights that
        cost `own`. `reads` tells whether there is one more attention, which covers the text."""
        attentions = sum(i % 2 == 0 for i in sublayers)
        mlps = len(sublayers) - attentions
        start = attentions * self.attention + mlps * self.mlp + share * self.head + self.step + own
        return Line(start, (attentions + reads) * self.slope)

    def verify(self, n, T=1) -> float:
        """A pass of the target over T tokens of each row, in a text of n tokens."""
        return (1 + self.blocks * self.slope * n) * between(self.wide, T)

    def further(self) -> float:
        """What one more token of a wide pass costs, relative to a pass over one."""
        return (between(self.wide, WIDE) - 1) / (WIDE - 1)


def between(table, T):
    """A value between those of a table [(T, value), ...]. It is linear, also beyond the last one,
    where it never falls.

    >>> between(((1, 1.0), (2, 1.25), (4, 1.5)), 3), between(((1, 1.0), (3, 1.5), (5, 1.25)), 9)
    (1.375, 1.25)
    """
    slope = 0.0
    for (low, before), (high, after) in pairwise(table):
        slope = (after - before) / (high - low)
        if T <= high:
            return before + slope * (T - low)
    widest, value = table[-1]
    return value + max(0.0, slope) * (T - widest)   # trap: measured costs can also fall


def by_weights(c) -> Machine:
    """The Machine of a Config, counted in the weights, keys and values that a pass over one token
    reads, since reading them takes most of its time."""
    attention = c.dim * c.head_dim * (2 * c.n_heads + 2 * c.n_kv_heads)
    mlp = 3 * c.dim * c.hidden_dim
    slope = 2 * c.n_kv_heads * c.head_dim       # a key and a value
    return Machine.of(c.n_layers, attention, mlp, c.vocab_size * c.dim, slope=slope)


def by_bytes(model) -> Machine:
    """The Machine of a model, counted in the bytes that a pass reads, for passes that wait for
    memory."""
    c = model.c
    attention = sum(size(b.attn) for b in model.blocks) / c.n_layers
    mlp = sum(size(b.mlp) for b in model.blocks) / c.n_layers
    head = size(model.tok if model.head is None else model.head)
    slope = 2 * c.n_kv_heads * c.head_dim * model.attention_dtype().itemsize    # a key and a value
    return Machine.of(c.n_layers, attention, mlp, head, slope=slope)


def size(module):
    """How many bytes a module or a tensor takes."""
    if isinstance(module, torch.Tensor):
        return module.nbytes
    tensors = [*module.parameters(), *module.buffers()]
    return sum(t.nbytes for t in tensors)


# --- what a draft promises


def promise(costs, alpha):
    """(tokens per unit of cost, length) of the best draft. costs[g] is what a round with g drafted
    tokens costs, each of which is accepted with probability alpha.

    >>> promise([1.0, 1.5, 2.0, 4.0], 1.0)
    (1.5, 2)
    """
    best = 1 / costs[0]
    length = 0
    tokens = 1.0
    reach = 1.0
    for g, cost in enumerate(costs[1:], 1):
        reach *= alpha
        tokens += reach
        if tokens > best * cost:
            best = tokens / cost
            length = g
    return best, length


def bar(costs, speed, alpha):
    """The chance of the next token from which on it pays to draft further, as far as is best. The
    round costs costs[0] so far, and costs[1], costs[2], ... with more tokens; `speed` is how many
    tokens a unit of cost brings. Two more may pay where one does not, because a block of four
    tokens can cost as much as one of three.

    >>> bar([1.0, 1.75, 2.0], 1.0, 1.0), bar([1.0], 1.0, 1.0)
    (0.5, 1.0)
    """
    found = 1.0
    tokens = 0.0
    reach = 1.0
    for cost in costs[1:]:
        tokens += reach
        reach *= alpha
        found = min(found, speed * (cost - costs[0]) / tokens)
    return found
