"""Recorded passes: a stand-in for the model that records a pass once and replays it from then on.

A pass of a small model is hundreds of tiny operations, and most of its time goes into starting
them. A recording starts all of them at once, but it freezes shapes, addresses and Python numbers:
whatever differs between two rounds must be one of its inputs, or part of the key that it is stored
under.

    how="compile"   on a CPU    a C++ program made by Inductor, kept in the user's cache folder
    how="graph"     on CUDA     the launches of all kernels, as one CUDA graph
    how="paper"     anywhere    for tests: records nothing, but fails wherever a graph would
"""
import math
import sys
from collections import Counter
from functools import cache, partial
from itertools import groupby
from pathlib import Path

import torch

from machine import program
from machine.blocks import Bands, ends, joined, pad, piece, run_piece, stack_masks, widen
from machine.packed import HUGE, LARGE, Packed, multiplies
from machine.program import FEW, NO_PATTERNS, WIDEST, Compiled, Compilers, Weights
from machine.quant import Matrix, size
from machine.tapes import Graph, Home, Tape
from methods.standin import StandIn
from model import Transformer
from support import files
from support.measure import identity

TRIES = 3   # recordings of a pass that may fail their check before it stays eager
ANY = "any"     # width of a program that takes blocks of 2 to WIDEST tokens
PIECE = 5   # blocks that a program has at most: it takes a second more to compile for each
TOLERANCE = {   # how far, by `distance`, a recording may differ from the eager pass
    torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


class Recorded(StandIn):
    """Stands in for a Transformer that is not being trained: passes over blocks of at most
    widths[-1] tokens, also of a tree, are replayed from recordings; all others run eagerly.
    A pass is cut into pieces of a few blocks. Programs are shared: by all pieces of as many blocks,
    by all single blocks, all attentions, all MLPs.

        blocks          0 1 2 3 4   5 6 7 8 9   10 11 12 13 14  15 ...
        a pass          [ program ] [the same ] [  the same   ] ...
        an exit after 6 [ program ] [5][6]                       [i]: the program of a block

    A piece returns the states after all its blocks, so that a head may trace any of them.

    how: see above; by default what suits the model's device. widths: a block is padded to the next
    of these with dead tokens, which land in the spare slots of a cache; not where a program takes
    any width, as those with packed matrices do. reach: graphs distinguish as few text lengths as if
    these doubled from `reach` on. say: called with a line about what takes long or fails, by
    default `print` to standard error. exact: a row of two or more is the same to the bit in every
    pass: all passes multiply in one way, and are recorded when they are first seen.
    Do not move, cast or train the model later: packed matrices are copies.
    """

    def __init__(self, model, how=None, widths=None, reach=256, say=None, lead=None, exact=False):
        self.model = model
        self.how = how or ("graph" if model.tok.is_cuda else "compile")
        if widths is None:
            widths = (1, 8)
            if self.how == "compile":   # two rows cost hardly less than four
                widths = (2, 4, 8, 16) if exact else (1, 4, 8, 16)
        self.widths = [width for width in widths if width > 1 or not exact]     # single rows differ
        self.reach = reach
        self.say = say or partial(files.note, "recorded")
        self.exact = exact
        self.tapes = {}  # {key: tape} of all that reads no cache, and of programs, which read any
        self.loaded = {}    # {key of a program that takes any width: it}
        self.homes = []     # of graphs, which read one cache
        L = model.c.n_layers
        self.piece = math.inf               # sub-layers
        if self.how == "compile":
            sizes = [n for n in range(1, PIECE + 1) if L % n == 0]
            if model.c.window is not None:      # every second block has one
                sizes = [n for n in sizes if n % 2 == 0] or sizes
            self.piece = 2 * max(sizes)
        self.exits = (min(1 / 6, self.piece / 2 / L),)      # as deep as a piece
        self.cut = {}       # {(sub-layers, traced ones): [(piece, those of it)]}
        self.bands = Bands(model)
        self.packed = {}                    # {address of a matrix: it as a Packed}
        self.weight = size(model.blocks)    # in bytes
        self.output = model.tok if model.head is None else model.head
        self.packs = all(map(can_pack, matrices(model.blocks)))
        self.packs_head = can_pack(self.output)
        self.refused = Counter()            # {key: recordings that failed their check}
        self.frozen = False
        self.patient = True     # it waits for a program that must be compiled
        self.lead = lead or self            # once the lead is frozen, nothing new is recorded
        self.compilers = lead.compilers if lead else Compilers(self.say)
        self.joins = True                   # in graphs, small kernels: see `joined`
        model.angles(1)                     # trap: the table may be that of another dtype

    def rehearse(self, write):
        """Call write() twice, which records all that it needs, and again once the programs are
        compiled. From then on nothing new is recorded."""
        self.frozen = False
        self.patient = False
        try:
            write()
            write()
            while self.compilers.wait():
                write()
        finally:
            self.patient = True
        self.frozen = True

    def alongside(self, model):
        """Another model of the same run, such as a draft: recorded, too, and rehearsed with this
        one."""
        widths = None if self.exact else self.widths    # a draft need not be exact
        return Recorded(model, self.how, widths, self.reach, self.say, self.lead)

    @torch.inference_mode()
    def run(self, x, at, cache=None, sublayers=None, trace=None):
        """`Transformer.run`."""
        if sublayers is None:
            sublayers = range(2 * self.c.n_layers)
        trace = {} if trace is None else trace
        T = x.shape[1]
        placed = self.place(x, at, cache)
        if placed:
            at, inputs, angles, kind = placed
            x = pad(x, inputs[0].shape[1])
        tapes = self.tapes
        if cache is not None and self.how != "compile":
            tapes = self.home(cache).tapes
        cuts = tuple(sublayers), tuple(trace)
        if cuts not in self.cut:
            self.cut[cuts] = self.pieces(*cuts)
        for part, traced in self.cut[cuts]:
            states = None
            if placed:
                fixed = angles + [t for i in part if i % 2 == 0 for t in cache.layers[i // 2]]
                f = partial(run_piece, part)
                states = self.play(tapes, (part, *kind), f, (x, *inputs), fixed)
            if states is None:
                seen = dict.fromkeys(traced)
                x = self.model.run(x, at, cache, part, seen)
                trace.update(seen)
            else:
                x = states[-1]
                for i in traced:
                    trace[i] = states[ends(part).index(i)]
        for i in trace:
            if trace[i] is not None:
                trace[i] = trace[i][:, :T]
        return x[:, :T]

    def pieces(self, sublayers, traced):
        """The sub-layers in pieces, each with those of it that are traced. A piece ends when it is
        long enough, or after an attention whose output is traced."""
        parts = []
        part = []
        for i in sublayers:
            part.append(i)
            if (i in traced and i % 2 == 0) or len(part) == self.piece:
                parts += self.common(part)
                part = []
        parts += self.common(part)
        return [(part, [i for i in part if i in traced]) for part in parts]

    def common(self, part):
        """These sub-layers as pieces that have a program in common with others: as they are if
        they fill a piece, or else block by block."""
        if len(part) == self.piece and part[0] % 2 == 0 and part[-1] - part[0] == self.piece - 1:
            yield tuple(part)
        elif self.how == "compile":
            for _, block in groupby(part, key=lambda i: i // 2):
                yield tuple(block)
        elif part:
            yield tuple(part)

    def home(self, cache):
        """The Home of a cache: a new one moves into the memory of another of its size."""
        for home in self.homes:
            if home.cache() is cache:
                return home
        fitting = [home for home in self.homes if home.fits(cache)]
        if not fitting:
            self.homes = [home for home in self.homes if home.cache() is not None]
            self.homes.append(Home(cache))
            return self.homes[-1]
        empty = [home for home in fitting if home.cache() is None]
        home = (empty or fitting)[0]
        home.move_in(cache)
        return home

    def place(self, x, at, cache):
        """What all pieces of a pass over x (B, T, dim) share: the Placement of their padded block;
        its positions, slots and masks; the angles to read; and the rest of their keys. None if they
        run eagerly."""
        B, T, dim = x.shape
        width, products = self.fill(B, T, self.packs)
        if not width or cache is None:
            return None
        S = cache.k.shape[3]
        end = at.end + width - T
        if at.same and (at.first == 0 or end > S):
            return None     # first is 0 in a prompt, which is read once: recording would not pay
        angles = self.angles_read(min(end, S), S)
        block = at
        at = widen(block, width - T, len(angles[0]))
        if block.same:
            masks = self.bands(block.first, width, at.end)
        else:
            masks = stack_masks(self.model, at, width)
        # trap: a program relies on the strides of its inputs, too
        positions = at.positions[:, -width:].expand(B, width).contiguous()
        slots = at.slots[:, -width:].expand(B, width).contiguous()
        masks = masks.expand(-1, B, *masks.shape[2:]).contiguous()
        kind = B, width, products, dim, x.dtype, cache.k.dtype
        if self.how != "compile":
            kind = *kind, len(angles[0])    # programs read any number of slots
        return at, (positions, slots, masks), angles, kind

    @torch.inference_mode()
    def unembed(self, x, rows=None):
        """`Transformer.unembed`; eagerly with a packed head and one of few rows, which are no more
        than a product."""
        B, T, _ = x.shape
        width, products = self.fill(B, T, self.packs_head)
        y = None
        if rows is None and width:
            x = pad(x, width)
            if products == "packed":
                rows = self.pack(self.output)
            else:
                key = None, B, width, products, x.dtype
                y = self.play(self.tapes, key, Transformer.unembed, (x,), [])
        if y is None:
            y = self.model.unembed(x, rows)
        return y[:, :T]

    def replays(self):
        """Whether any pass is replayed: there may be no compiler, or no recording passed its
        check."""
        return any(tape for tapes in self.all_tapes() for tape in tapes.values())

    def all_tapes(self):
        return [self.tapes, *(home.tapes for home in self.homes)]

    def fill(self, B, T, packs):
        """The width that a block of T tokens is padded to, None if it runs eagerly; and how its
        program multiplies, see `products`."""
        width = next((width for width in self.widths if width >= T), None)
        products = None
        if width and self.how == "compile":
            products = self.products(B * width, packs)
            if 1 < T <= WIDEST and products != "sums" and not self.exact:
                width = T       # its program takes any
        return width, products

    def angles_read(self, end, slots):
        """[cos, sin] for `run_piece`: the table of angles for all positions that are read,
        (reach, D) each. The reach is a multiple of `step`: a compiled program takes any, graphs
        need one recording for each."""
        step = 16
        if self.how != "compile":
            count = 1 + math.ceil(math.log2(max(1, slots / self.reach)))
            step = 8 * math.ceil(slots / (8 * count))
        reach = min(slots, step * math.ceil(end / step))
        return [t[:reach] for t in self.model.angles(reach)]

    def play(self, tapes, key, f, inputs, fixed):
        """f(model, *inputs, *fixed), replayed; None if it should run eagerly: when it is seen for
        the first time, and if its recording failed its check."""
        tape = tapes.get(key)
        if tape is None and (self.exact or program_key(key) in self.loaded):
            # exact: never eager first, and replayed later. loaded: it is only to be checked
            tape = self.record(key, f, inputs, fixed)
            tapes[key] = tape or (False if self.lead.patient else None)
        elif tape is None and not self.lead.frozen:
            tape = self.record(key, f, inputs, fixed) if key in tapes else None
            tapes[key] = tape
        return tape(inputs, fixed) if tape else None

    def record(self, key, f, inputs, fixed):
        """A recording of f that agrees with f on these inputs; False if there will be none."""
        sublayers, rows, width = key[:3]
        what = f"{len(sublayers)} sub-layers" if sublayers else "the head"
        name = f"{what}, batch {rows}, blocks of {width}"
        with Weights() as used:
            want = f(self.model, *inputs, *fixed)
        kept = [t.clone() for t in fixed]
        try:
            tape = self.make(key, f, inputs, fixed, used)
            if tape is None:
                return None
            got = tape(inputs, fixed)
        except Exception as e:  # whatever a compiler raises, the pass itself can run eagerly
            self.say(f"{name}: not recorded, because of {type(e).__name__}: {e}".split("\n")[0])
            return False
        pairs = zip([got, *fixed[2:]], [want, *kept[2:]], strict=True)
        off = [float(distance(a, b)) for a, b in pairs]
        most = TOLERANCE[want.dtype]
        if want.dtype in (torch.float16, torch.bfloat16):   # their errors add up like a random walk
            most *= max(1.0, len(sublayers or ()) / 16) ** 0.5
        if all(d <= most for d in off):     # trap: of NaN and a number, `max` can take either
            return tape
        for t, before in zip(fixed, kept, strict=True):
            t.copy_(before)
        self.refused[key] += 1
        if self.refused[key] < TRIES:
            return None     # the next input will tell whether this one was odd
        self.say(f"{name}: recording dropped, because it is off by {max(off):.2g} of the eager "
                 "pass")
        return False

    def pack(self, w):
        """A matrix of the model in packed form, made once."""
        address = w.data_ptr()
        if address not in self.packed:
            self.packed[address] = Packed(w)
        return self.packed[address]

    def products(self, rows, packs):
        """How a pass over this many rows multiplies fastest: in "sums" if the rows are few, else
        with "packed" matrices where the processor has units for them, or as the "library" does. The
        matrices of a small model lie in the processor's caches: there sums win longer. exact: in
        one way for all rows, because each rounds differently."""
        packs = packs and self.weight < HUGE
        if self.exact:
            return "packed" if packs and self.weight >= LARGE else "sums"
        few = 2 * FEW
        if self.weight >= LARGE:
            few = 1 if packs else FEW
        if rows <= few:
            return "sums"
        return "packed" if packs else "library"

    def make(self, key, f, inputs, fixed, used):
        """A recording; None if its program is still being compiled."""
        if self.how == "paper":
            return Tape(partial(f, self.model), inputs, fixed)
        if self.how == "graph":
            return self.make_graph(key[0], f, inputs, fixed)
        return self.make_program(key, f, inputs, fixed, used)

    def make_program(self, key, f, inputs, fixed, used):
        key = program_key(key)
        if key in self.loaded:
            return self.loaded[key]
        sublayers, rows, width, products, *rest = key
        shift = 0
        if sublayers:       # compiled as the first blocks
            shift = sublayers[0] // 2
            if self.c.window is not None:   # trap: every second block has none
                shift = shift // 2 * 2
            sublayers = tuple(i - 2 * shift for i in sublayers)
            f = partial(run_piece, sublayers)
        makers = Transformer, type(self.model), run_piece, program.write
        sources = [Path(sys.modules[m.__module__].__file__).read_bytes() for m in makers]
        facts = sublayers, rows, width, products, rest, sources
        path = files.cache_file(f"{identity(self.model, *facts)}.pt2")

        def load():
            made = Compiled(path, self.model, shift, used, self.pack)
            if width == ANY:
                self.loaded[key] = made
            return made

        if path.is_file():
            try:
                return load()
            except Exception:   # cut short, or damaged in another way
                self.say("a program in the cache folder is damaged, and so it is made anew")
                path.unlink()
        compilers = self.compilers
        if path not in compilers.asked:
            shapes = [[(t.shape, t.dtype) for t in tensors] for tensors in (inputs, fixed)]
            try:
                compilers.ask(path, self.model, f, *shapes, products, width == ANY)
            except OSError:
                self.lead.frozen = True     # what has no program yet runs eagerly
                raise
        if self.lead.patient:
            compilers.wait()
        if why := compilers.failure(path):
            raise RuntimeError(why)
        return load() if path.is_file() else None

    def make_graph(self, sublayers, f, inputs, fixed):
        if sublayers and self.joins:
            try:
                pass_ = partial(joined, compiled_piece(), sublayers, self.model)
                return Graph(pass_, inputs, fixed)
            except Exception as e:      # whatever a compiler raises
                self.joins = False
                why = f"{type(e).__name__}: {e}".split("\n")[0]
                self.say(f"kernels are not joined, because of {why}")
        return Graph(partial(f, self.model), inputs, fixed)


def distance(a, b):
    """The largest distance of a vector of a (..., D) from that of b, relative to the latter's
    length, or to the mean length if that is larger."""
    length = b.double().norm(dim=-1)
    return ((a.double() - b).norm(dim=-1) / length.clamp(min=length.mean())).max()


def program_key(key):
    """The key of a tape as that of its program, which may take any width."""
    sublayers, rows, width, products, *rest = key
    if 1 < width <= WIDEST and products in ("packed", "library"):
        width = ANY
    return sublayers, rows, width, products, *rest


def matrices(blocks):
    """All matrices of some blocks."""
    plain = [w for w in blocks.parameters() if w.dim() == 2]
    return plain + [m for m in blocks.modules() if isinstance(m, Matrix)]


def can_pack(w):
    return isinstance(w, torch.Tensor) and multiplies(w.dtype)


@cache
def compiled_piece():
    """One for all models, compiled anew for each shape."""
    # trap: after eight, which is usual, it gives up silently
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(piece, options=NO_PATTERNS)
