"""Recordings of a pass: simulated ones for tests, and CUDA graphs; and the memory of the caches
whose addresses a graph holds.
"""
import math
from functools import partial
from weakref import WeakSet, ref

import torch

from machine.blocks import compiled_piece, joined


class Tape:
    """A simulated recording: each replay runs f again, but on its own buffers, which the inputs are
    copied to, and into memory that the next replay of any tape overwrites, as with graphs that
    share memory."""
    made = WeakSet()

    @classmethod
    def of(cls, model, sublayers, f, inputs, fixed, say):
        """A recording of f(model, *inputs, *fixed). say: see `Recorded`."""
        return cls(partial(f, model), inputs, fixed)

    def __init__(self, f, inputs, fixed):
        self.inputs = [x.clone() for x in inputs]
        self.fixed = fixed              # trap: what it reads must outlive it
        self.record(f)

    def record(self, f):
        self.f = f
        self.output = f(*self.inputs, *self.fixed)
        Tape.made.add(self)

    def replay(self):
        for tape in Tape.made:
            tape.output.fill_(math.nan)
        self.output.copy_(self.f(*self.inputs, *self.fixed))

    def __call__(self, inputs, fixed):
        for mine, x in zip(self.inputs, inputs, strict=True):
            mine.copy_(x)
        self.replay()
        return self.output.clone()


class Graph(Tape):
    """A CUDA graph. All of them share one pool of scratch memory, as only one runs at a time."""
    pool = None
    newest = None   # trap: a pool whose graphs are all gone takes no other
    joins = True    # small kernels: see `joined`

    @classmethod
    def of(cls, model, sublayers, f, inputs, fixed, say):
        if sublayers and Graph.joins:
            try:
                return cls(partial(joined, compiled_piece(), sublayers, model), inputs, fixed)
            except Exception as e:      # whatever a compiler raises
                Graph.joins = False
                why = f"{type(e).__name__}: {e}".split("\n")[0]
                say(f"kernels are not joined, because of {why}")
        return super().of(model, sublayers, f, inputs, fixed, say)

    def record(self, f):
        Graph.pool = Graph.pool or torch.cuda.graph_pool_handle()
        f(*self.inputs, *self.fixed)    # compiles what is to be compiled
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=Graph.pool):     # records launches, computes nothing
            self.output = f(*self.inputs, *self.fixed)
        Graph.newest = self.graph

    def replay(self):
        self.graph.replay()


class Home:
    """The memory of a cache, and the recordings that hold its addresses."""

    def __init__(self, cache):
        self.cache = ref(cache)
        self.memory = cache.k, cache.v
        self.tapes = {}

    def fits(self, cache):
        mine = self.memory[0]
        return mine.shape == cache.k.shape and mine.dtype == cache.k.dtype

    def move_in(self, cache):
        """Give the cache this memory, and its own to the one that was here, if that is still in
        use."""
        theirs = cache.k, cache.v
        before = self.cache()
        for here, there in zip(self.memory, theirs, strict=True):
            kept = here.clone()
            here.copy_(there)
            there.copy_(kept)
        cache.use(*self.memory)
        if before is not None:
            before.use(*theirs)
        self.cache = ref(cache)
