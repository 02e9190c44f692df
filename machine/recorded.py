"""Recorded passes on a GPU. A stand-in records a pass once and replays it from then on.

A pass of a small model is hundreds of tiny operations, and most of its time goes into starting
them. A CUDA graph starts all of them at once, but it freezes shapes, addresses and Python numbers.
So whatever differs between two rounds must be one of its inputs, or part of the key that it is
stored under, and a pass reads all slots of its cache, also those after the text. On a CPU
`machine.few` does the same in one call of C++.
"""
from collections import Counter
from functools import partial
from typing import NamedTuple

import torch

from machine.blocks import Piece, pad, widen
from machine.standin import StandIn
from machine.tapes import Home, Program
from machine.tolerance import distance, tolerance
from model import Transformer
from support import files

TRIES = 3       # recordings of a pass that may fail their check before it stays eager


class Key(NamedTuple):
    """What a recording freezes. `piece` is None for the output head."""
    piece: Piece | None
    rows: int               # texts
    width: int              # tokens of a block


class Recorded(StandIn):
    """Stands in for a Transformer that is not being trained. Passes over blocks of at most
    widths[-1] tokens, trees included, are replayed from recordings. All others run eagerly.

    `tape` is the class that records, by default CUDA graphs of compiled programs. A block is padded
    to the next of `widths` with dead tokens, whose keys go to the spare slots of a cache. `say` is
    called with a line about what fails, and prints it by default. Do not move, cast or train the
    model later.
    """

    def __init__(self, model, tape=Program, widths=(1, 8), say=None, lead=None):
        super().__init__(model)
        self.tape = tape
        self.widths = widths
        self.widest = widths[-1]
        self.say = say or partial(files.note, "recorded")
        self.tapes = {}         # {key: tape} of functions that read no cache
        self.homes = {}         # {shape and dtype of a cache: the Home of the others}
        self.failed = Counter()     # {key: recordings that failed; after TRIES it stays eager}
        self.frozen = False
        self.lead = lead or self            # once the lead is frozen, nothing new is recorded
        model.angles(1)         # trap: the table may still have another dtype

    def rehearse(self, write):
        """Call write(), which records all that it needs. From then on nothing new is recorded."""
        self.frozen = False
        write()
        self.frozen = True

    def alongside(self, model):
        return Recorded(model, self.tape, self.widths, self.say, self.lead)

    @torch.inference_mode()
    def run(self, x, at, cache=None, sublayers=None, trace=None):
        """`Transformer.run`."""
        if sublayers is None:
            sublayers = range(2 * self.c.n_layers)
        traced = tuple(i for i in trace or () if i in sublayers)
        states = None
        if cache is not None and sublayers and (at.tree is not None or at.positions is at.slots):
            states = self.states(Piece(tuple(sublayers), traced, at.tree is None), x, at, cache)
        if states is None:
            return self.model.run(x, at, cache, sublayers, trace)
        T = x.shape[1]
        for i, state in zip(traced, states, strict=False):
            trace[i] = state[:, :T]
        return states[-1][:, :T]

    def states(self, piece, x, at, cache):
        """What `piece` returns for x, replayed, or None if it should run eagerly."""
        B, T, _ = x.shape
        W = self.width(T)
        if W is None:
            return None
        S = cache.k.shape[3]
        if at.same and (at.first == 0 or at.end + W - T > S):
            return None     # first is 0 in a prompt, which is read once, so recording would not pay
        tapes = self.home(cache).tapes      # trap: a new cache may change its memory here
        fixed = [t[:S] for t in self.model.angles(S)]
        for i in piece.sublayers:
            if i % 2 == 0:
                fixed += cache.layers[i // 2]
        if not piece.chain:
            at = widen(at, W - T, S)
        inputs = [pad(x, W), *piece.placed(at, B, W)]
        return self.play(tapes, Key(piece, B, W), piece, inputs, fixed)

    def home(self, cache):
        """The Home of a cache. A new cache moves into the memory of another of its size."""
        kind = cache.k.shape, cache.k.dtype
        if kind not in self.homes:
            used = {other: home for other, home in self.homes.items() if home.cache() is not None}
            self.homes = used | {kind: Home(cache)}
        home = self.homes[kind]
        if home.cache() is not cache:
            home.move_in(cache)
        return home

    def width(self, T):
        """The width that a block of T tokens is padded to, or None if it runs eagerly."""
        return next((width for width in self.widths if width >= T), None)

    @torch.inference_mode()
    def unembed(self, x, only=None):
        """`Transformer.unembed`. A head of few rows runs eagerly, because it is no more than a
        product."""
        T = x.shape[1]
        width = self.width(T)
        y = None
        if only is None and width:
            x = pad(x, width)
            y = self.play(self.tapes, Key(None, *x.shape[:2]), Transformer.unembed, (x,), [])
        if y is None:
            y = self.model.unembed(x, only)
        return y[:, :T]

    def replays(self):
        """Whether any pass is replayed. If no recording passed its check, none is."""
        return any(self.all_tapes())

    def all_tapes(self):
        return [self.tapes, *(home.tapes for home in self.homes.values())]

    def play(self, tapes, key, f, inputs, fixed):
        """f(model, *inputs, *fixed), replayed. It is None if f should run eagerly. What is new is
        recorded at once, because a pass that was eager the first time would round differently."""
        if key not in tapes and not self.lead.frozen:
            x, *placed = inputs
            # trap: a width that no round of a rehearsal needed would run eagerly from then on
            for width in self.widths if key.piece is None or key.piece.chain else [key.width]:
                other = key._replace(width=width)
                if other not in tapes and self.failed[other] < TRIES:
                    block = x if width == key.width else x[:, :1].repeat(1, width, 1)
                    self.record(tapes, other, f, [block, *placed], fixed)
        return tapes[key](inputs) if key in tapes else None

    def record(self, tapes, key, f, inputs, fixed):
        """Keep a recording of f, if it agrees with f on these inputs."""
        sublayers = key.piece.sublayers if key.piece else ()
        want = f(self.model, *inputs, *fixed)
        kept = [t.clone() for t in fixed]
        try:
            tape = self.tape(f, self.model, inputs, fixed)
            got = tape(inputs)
        except Exception as e:  # whatever a compiler raises, the pass itself can run eagerly
            why = f"{type(e).__name__}: {e}".split("\n")[0]
            return self.give_up(tapes, key, f, inputs, fixed, f"because of {why}")
        pairs = zip([got, *fixed[2:]], [want, *kept[2:]], strict=True)
        off = [distance(a, b) for a, b in pairs]
        most = tolerance(want.dtype, len(sublayers))
        if all(d <= most for d in off):     # trap: `max` of NaN and a number can be either
            tapes[key] = tape
            return
        for t, before in zip(fixed, kept, strict=True):
            t.copy_(before)
        self.failed[key] += 1   # the next input will tell whether this one was odd
        if self.failed[key] == TRIES:
            why = f"because it is off by {max(off):.2g} of the eager pass"
            self.give_up(tapes, key, f, inputs, fixed, why)

    def give_up(self, tapes, key, f, inputs, fixed, why):
        """Record this pass and all that follow in a plainer way. If there is none, it stays
        eager."""
        if self.tape.plainer:
            self.say(f"recorded with more kernels, {why}")
            self.tape = self.tape.plainer
            self.failed[key] = 0
            return self.record(tapes, key, f, inputs, fixed)
        what = f"{len(key.piece.sublayers)} sub-layers" if key.piece else "the head"
        self.say(f"{what}, batch {key.rows}, blocks of {key.width}: not recorded, {why}")
        self.failed[key] = TRIES
