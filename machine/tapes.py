"""Recordings of a pass, which are CUDA graphs or simulated ones for tests, and the memory of the
caches whose addresses a graph holds.
"""
import math
import time
from functools import partial
from weakref import WeakSet, ref

import torch

from machine.blocks import Piece, compiled, single

PATIENCE = 60   # seconds that a process may compile whole passes


class Tape:
    """A simulated recording of f(model, *inputs, *fixed). Each replay runs f again, but on its own
    buffers, to which the inputs are copied, and into memory that the next replay of any tape
    overwrites, like graphs that share memory. The `fixed` tensors are not copied."""
    plainer = None      # the class that records what this one cannot
    made = WeakSet()

    def __init__(self, f, model, inputs, fixed):
        self.inputs = [x.clone() for x in inputs]
        self.fixed = fixed              # trap: what it reads must outlive it
        self.f = self.prepare(f, model)
        self.record()

    def prepare(self, f, model):
        """What is recorded, a function of the inputs and the fixed tensors."""
        return partial(f, model)

    def compute(self):
        return self.f(*self.inputs, *self.fixed)

    def record(self):
        self.output = self.compute()
        Tape.made.add(self)

    def replay(self):
        for tape in Tape.made:
            tape.output.fill_(math.nan)
        self.output.copy_(self.compute())

    def __call__(self, inputs):
        for mine, x in zip(self.inputs, inputs, strict=True):
            mine.copy_(x)
        self.replay()
        return self.output.clone()


class Graph(Tape):
    """A CUDA graph. All of them share one pool of scratch memory, as only one runs at a time."""
    pool = None
    newest = None   # trap: a pool whose graphs have all been deleted accepts no other

    def record(self):
        Graph.pool = Graph.pool or torch.cuda.graph_pool_handle()
        self.compute()          # compiles what is to be compiled
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=Graph.pool):     # records launches, computes nothing
            self.output = self.compute()
        Graph.newest = self.graph

    def replay(self):
        self.graph.replay()


class JoinedGraph(Graph):
    """A graph whose small kernels are joined within each sub-layer."""
    plainer = Graph

    def prepare(self, f, model):
        if isinstance(f, Piece):
            return partial(f.joined, compiled(single), model)
        return super().prepare(f, model)


class Program(JoinedGraph):
    """A graph of one compiled program for the whole pass, whose kernels are joined even across
    sub-layers, so that it rounds like no other pass. Every sub-layer takes a second or so to
    compile. Once the patience is at an end, kernels are joined within each sub-layer only."""
    plainer = JoinedGraph
    spent = 0.0     # seconds, in this process

    def prepare(self, f, model):
        if isinstance(f, Piece) and Program.spent < PATIENCE:
            return partial(f.whole, compiled(Piece.__call__), model)
        return super().prepare(f, model)

    def record(self):
        start = time.monotonic()
        super().record()
        Program.spent += time.monotonic() - start


class Home:
    """The memory of a cache, and the recordings that hold its addresses."""

    def __init__(self, cache):
        self.cache = ref(cache)
        self.memory = cache.k, cache.v
        self.tapes = {}

    def move_in(self, cache):
        """Give the cache this memory, and a copy of it to the one that was here, if that is still
        in use."""
        before = self.cache()
        if before is not None:
            before.use(*(t.clone() for t in self.memory))
        for here, there in zip(self.memory, (cache.k, cache.v), strict=True):
            here.copy_(there)
        cache.use(*self.memory)
        self.cache = ref(cache)
