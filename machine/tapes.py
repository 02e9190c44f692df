"""Ways to record a pass. Each is a function way(f, model, inputs, fixed, session), which returns a
recording of f(model, *inputs, *fixed): a function of inputs that replays it."""
from functools import partial

import torch

from machine.pieces import Piece, compiled, single


class Tape:
    """A simulated recording. Each replay runs f again, but on its own buffers, to which the inputs
    are copied, and into memory that the next replay overwrites. `fixed` tensors are not copied."""

    def __init__(self, f, inputs, fixed):
        self.f = f
        self.inputs = [x.clone() for x in inputs]
        self.fixed = fixed              # trap: what it reads must outlive it
        self.output = self.compute()

    def compute(self):
        return self.f(*self.inputs, *self.fixed)

    def replay(self):
        self.output.copy_(self.compute())

    def __call__(self, inputs):
        for mine, x in zip(self.inputs, inputs, strict=True):
            mine.copy_(x)
        self.replay()
        return self.output.clone()


class Graph(Tape):
    """A CUDA graph."""

    def __init__(self, f, inputs, fixed, session):
        super().__init__(f, inputs, fixed)      # compiles what is to be compiled
        session.pool = session.pool or torch.cuda.graph_pool_handle()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=session.pool):   # records, computes nothing
            self.output = self.compute()
        session.newest = self.graph

    def replay(self):
        self.graph.replay()


# --- the ways


def simulated(f, model, inputs, fixed, session):
    """For tests."""
    return Tape(partial(f, model), inputs, fixed)


def graph(f, model, inputs, fixed, session):
    """A graph of the kernels as they are."""
    return Graph(partial(f, model), inputs, fixed, session)


def joined(f, model, inputs, fixed, session):
    """A graph whose small kernels are joined within each sub-layer."""
    if isinstance(f, Piece):
        f = partial(f.joined, compiled(single))
    return Graph(partial(f, model), inputs, fixed, session)


def program(f, model, inputs, fixed, session):
    """A graph of one compiled program for the whole pass, whose kernels are joined even across
    sub-layers, so that it rounds like no other pass. Every sub-layer takes a second or so to
    compile."""
    if isinstance(f, Piece):
        f = partial(f.program, compiled(Piece.__call__))
    return Graph(partial(f, model), inputs, fixed, session)
