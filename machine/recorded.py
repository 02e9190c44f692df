"""Recorded passes on a GPU. A stand-in records a pass once and replays it from then on.

A pass of a small model is hundreds of tiny operations, and most of its time goes into starting
them. A CUDA graph starts all of them at once, but it freezes shapes, addresses and Python numbers.
So whatever differs between two rounds must be one of its inputs, or part of the key that it is
stored under, and a pass reads all slots of its cache, also those after the text. On a CPU
`machine.few` does the same in one call of C++.

Passes are recorded in a rehearsal and nowhere else: a Session is open or closed.
"""
import sys
import time
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

from machine.files import note
from machine.pieces import Piece, pad, widen
from machine.tapes import graph, joined, program
from machine.tolerance import distance, tolerance
from model import StandIn, Transformer

PATIENCE = 60   # seconds of a rehearsal, after which the best way, which compiles, is given up
OURS = 3    # references to a cache that only its model holds: the list's, the loop's, the call's


class Session:
    """What the recorded models of a run share: the ways to record, best first (`machine.tapes`),
    and whether passes may be recorded now. say(line) tells what fails, by default as a note."""

    def __init__(self, ways=(program, joined, graph), say=None):
        self.ways = list(ways)
        self.say = say or partial(note, "recorded")
        self.open = False
        self.begun = 0.0
        self.pool = None    # of scratch memory for all graphs, as only one runs at a time
        self.newest = None  # trap: a pool whose graphs have all been deleted accepts no other

    @contextmanager
    def recording(self):
        """Within it, passes are recorded. All that no rehearsal has recorded runs eagerly."""
        self.open = True
        self.begun = time.monotonic()
        try:
            yield
        finally:
            self.open = False


class Key(NamedTuple):
    """What a recording freezes. `piece` is None for the output head."""
    piece: Piece | None
    address: int            # of the cache's memory
    rows: int               # texts
    width: int              # tokens of a block


class Recorded(StandIn):
    """Stands in for a Transformer that is not being trained. Passes over blocks of at most
    widths[-1] tokens, trees included, are replayed if they were recorded. All others run eagerly.

    A block is padded to the next of `widths` with dead tokens, whose keys go to the spare slots of
    a cache. Only passes with a cache that the model handed out are recorded, because a recording
    holds its address. Do not move, cast or train the model later.
    """

    def __init__(self, model, session, widths=(1, 8)):
        super().__init__(model)
        self.session = session
        self.widths = widths
        self.widest = widths[-1]
        self.tapes = {}         # {Key: a recording, or None if it stays eager}
        self.caches = []        # all that were handed out
        model.angles(1)         # trap: the table may still have another dtype

    def alongside(self, model):
        return Recorded(model, self.session, self.widths)

    def rehearse(self, write):
        with self.session.recording():
            write()

    def replays(self):
        """Whether any pass is replayed. If no recording passed its check, none is."""
        return any(self.tapes.values())

    def cache(self, make, batch, slots):
        """A cache that is no longer in use and has room enough, or a new one. Much more room would
        cost time, because a pass reads all slots."""
        for cache in self.caches:
            fits = cache.k.shape[1] == batch and slots <= cache.k.shape[3] <= 2 * slots
            if fits and sys.getrefcount(cache) == OURS:
                return cache
        self.caches.append(make())
        return self.caches[-1]

    def hands_out(self, cache):
        """Whether this cache, or the one of which it is a part, was handed out here."""
        memory = cache.k.untyped_storage().data_ptr()
        return any(own.k.untyped_storage().data_ptr() == memory for own in self.caches)

    def width(self, T):
        """The width that a block of T tokens is padded to, or None if it runs eagerly."""
        return next((width for width in self.widths if width >= T), None)

    @torch.inference_mode()
    def run(self, x, at, cache=None, sublayers=None, trace=None):
        """`Transformer.run`."""
        if sublayers is None:
            sublayers = range(2 * self.c.n_layers)
        T = x.shape[1]
        traced = tuple(i for i in trace or () if i in sublayers)
        piece = Piece(tuple(sublayers), traced, at.tree is None)
        states = None
        if sublayers and self.takes(T, at, cache):
            states = self.replayed(piece, x, at, cache)
        if states is None:
            return self.model.run(x, at, cache, sublayers, trace)
        for i, state in zip(traced, states, strict=False):
            trace[i] = state[:, :T]
        return states[-1][:, :T]

    def takes(self, T, at, cache):
        """Whether a pass over such a block may be replayed."""
        W = self.width(T)
        if W is None or cache is None or not self.hands_out(cache):
            return False
        if at.tree is None and at.positions is not at.slots:
            return False
        # first is 0 in a prompt, which is read once
        return not at.same or at.first > 0 and at.end + W - T <= cache.k.shape[3]

    def replayed(self, piece, x, at, cache):
        """What `piece` returns for x, replayed, or None if it runs eagerly."""
        B, T, _ = x.shape
        W = self.width(T)
        S = cache.k.shape[3]
        fixed = [t[:, :S] for t in self.model.angles(S)]
        for i in piece.sublayers:
            if i % 2 == 0:
                fixed += cache.layers[i // 2]
        if not piece.chain:
            at = widen(at, W - T, S)
        inputs = [pad(x, W), *piece.placed(at, B, W)]
        return self.play(Key(piece, cache.k.data_ptr(), B, W), piece, inputs, fixed)

    @torch.inference_mode()
    def unembed(self, x, only=None):
        """`Transformer.unembed`. A head of few rows runs eagerly, because it is no more than a
        product."""
        B, T, _ = x.shape
        W = self.width(T)
        y = None
        if only is None and W:
            x = pad(x, W)
            y = self.play(Key(None, 0, B, W), Transformer.unembed, [x], [])
        if y is None:
            y = self.model.unembed(x, only)
        return y[:, :T]

    def play(self, key, f, inputs, fixed):
        """f(model, *inputs, *fixed), replayed. It is None if f runs eagerly."""
        if self.session.open and key not in self.tapes:
            x, *placed = inputs
            # a later round may need another width, which no round of the rehearsal needs
            widths = [key.width] if key.piece and not key.piece.chain else self.widths
            for width in widths:
                block = x if width == key.width else x[:, :1].repeat(1, width, 1)
                self.tapes[key._replace(width=width)] = self.record(f, [block, *placed], fixed)
        tape = self.tapes.get(key)
        return tape(inputs) if tape else None

    def record(self, f, inputs, fixed):
        """A recording of f in the best way that agrees with f on these inputs, or None."""
        ways = self.session.ways
        if len(ways) > 1 and time.monotonic() - self.session.begun > PATIENCE:
            ways.pop(0)
        want = f(self.model, *inputs, *fixed)
        before = [t.clone() for t in fixed]
        most = tolerance(want.dtype, len(f.sublayers) if isinstance(f, Piece) else 0)
        for way in list(ways):
            try:
                tape = way(f, self.model, inputs, fixed, self.session)
                got = tape(inputs)
            except Exception as e:  # whatever a compiler raises, the pass itself can run eagerly
                why = f"{type(e).__name__}: {e}".split("\n")[0]
                if len(ways) > 1:
                    ways.remove(way)
            else:
                pairs = zip([got, *fixed[2:]], [want, *before[2:]], strict=True)
                off = [distance(a, b) for a, b in pairs]
                if all(d <= most for d in off):     # trap: false for NaN
                    return tape
                why = f"it is off by {max(off):.2g} of the eager pass"
            self.session.say(f"{way.__name__}: {why}")
            for t, old in zip(fixed, before, strict=True):
                t.copy_(old)
        return None
