"""The same text, to the bit. A row of logits depends on its text, not on its pass.

Two runs differ where the same row is rounded differently in a pass over one token than in a pass
over four, because another routine multiplies, or because a sum over the slots is split differently.
The loops of machine/rows.cpp add in the same order for any number of rows, so on a CPU they are
exact as they are. Elsewhere, for example on a GPU, every pass here has eight rows and reads all
slots of its cache.
"""
import copy
from math import inf
from weakref import WeakKeyDictionary

import torch

from machine.few import FewRows
from machine.fused import fuse
from machine.pieces import pad, widen
from machine.recorded import Recorded, Session
from machine.tapes import graph, joined
from model import Placement, Refused, StandIn
from sampling import Coins, indices, one_hot, signed, uniform, uniforms

ROWS = 8    # of every pass


class Exact(StandIn):
    """Every pass with a cache reads `ROWS` tokens of one text. Longer blocks, prompts included, are
    split. Shorter ones are padded with dead rows after the block, where nothing reads. Raises
    ValueError for a tree, because its keys stand in other slots until they are accepted, and sums
    over them round differently.
    """

    def __init__(self, model):
        super().__init__(model)
        self.parts = WeakKeyDictionary()    # {cache: the part of it of each text}

    def run(self, x, at, cache=None, sublayers=None, trace=None):
        """`Transformer.run`."""
        check_chain(at)
        if cache is None:
            return self.model.run(x, at, None, sublayers, trace)
        if cache not in self.parts:
            self.parts[cache] = [part(cache, b) for b in range(cache.k.shape[1])]
        slots = at.slots.expand(len(x), -1)
        rows = []
        for text, here, own in zip(x, slots, self.parts[cache], strict=True):
            pieces = zip(text[None].split(ROWS, 1), here[None].split(ROWS, 1), strict=True)
            rows.append([self.run_few(*piece, own, sublayers, trace or ()) for piece in pieces])
        joined = {key: torch.cat([torch.cat([seen[key] for seen in row], 1) for row in rows])
                  for key in rows[0][0]}
        y = joined.pop(None)
        if trace is not None:
            trace.update(joined)
        return y

    def run_few(self, x, slots, cache, sublayers, taps):
        """{None: `run`'s result, tap: its state} of at most `ROWS` tokens."""
        T = x.shape[1]
        S = cache.k.shape[3]
        at = widen(Placement(slots, slots, 0, S), ROWS - T, S)
        seen = dict.fromkeys(taps)
        seen[None] = self.model.run(pad(x, ROWS), at, cache, sublayers, seen)
        return {key: state[:, :T] for key, state in seen.items() if state is not None}

    def unembed(self, x, only=None):
        """`Transformer.unembed`."""
        B, T, dim = x.shape
        pieces = x.reshape(1, B * T, dim).split(ROWS, 1)
        logits = [self.model.unembed(pad(piece, ROWS), only) for piece in pieces]
        return torch.cat(logits, 1)[:, : B * T].view(B, T, -1)      # only the last has dead rows


class ExactRows(FewRows):
    """Exact passes by the loops of machine/rows.cpp, which then compute every pass."""
    def limit(self):
        return inf

    def run(self, x, at, cache=None, sublayers=None, trace=None):
        check_chain(at)
        return super().run(x, at, cache, sublayers, trace)


def check_chain(at):
    if at.tree is not None:
        raise Refused("a tree cannot be exact: its keys stand in other slots, and sums over "
                      "them round differently")


def part(cache, b):
    """The cache of one text of a batch, in the same memory."""
    own = copy.copy(cache)
    own.use(cache.k[:, b : b + 1], cache.v[:, b : b + 1])
    return own


def fast(model):
    """The model in fast passes, which are recorded on a GPU and in C++ on a CPU."""
    if model.tok.is_cuda:
        return Recorded(model, Session())
    return FewRows(fuse(model))


def exactly(model, recorded=True):
    """The model in exact passes, which are recorded on a GPU if `recorded` is true."""
    stand_in = ExactRows(model)
    if stand_in.replays():
        return stand_in
    if recorded and model.tok.is_cuda:
        # a program of several sub-layers rounds differently where a pass goes on after an exit
        return Exact(Recorded(model, Session((joined, graph)), widths=(ROWS,)))
    return Exact(model)


# --- random numbers that belong to positions


def row_seeds(seed, rows):
    """A seed for each row of a batch. The first row has `seed` itself, so it writes what it would
    write alone, and row b has number b of the seed's stream, times 2^53. (A `Race` of the first row
    begins at number V, so the streams have nothing in common.)

    >>> row_seeds(7, 3)
    [7, 151215513962380, 8113330931062309]
    """
    return [seed, *(int(u * 2**53) for u in uniforms(seed, 1, rows - 1).tolist())]


class Race(Coins):
    """Coins that belong to positions. A token depends on the seed, its position and p, and on
    nothing else.

    The tokens of the vocabulary race for a position. Token v arrives after e_v / p_v, where e_v is
    drawn from the exponential distribution Exp(1) by (seed, position, v). The first to arrive is
    written, which is v with probability p_v. A draft runs the same race with its q. So p and q
    become the one-hots of their winners, a drafted token is accepted if both name the same, and no
    drafter can change a token. They agree with probability

        sum over v of 1 / sum over w of max(p_w / p_v, q_w / q_v)

    which is at least (1 - TV) / (1 + TV) and at most 1 - TV, the rate of `verify` for one token,
    where TV is half the sum of |p - q| (Daliri, Musco and Suresh 2024, arXiv 2408.07978,
    drafter-invariant decoding).

    `seed` is a list with one seed for each row of a batch, as `row_seeds` makes it. If it is one
    number, all rows run the same races, and equal prompts get equal texts.

    >>> p = torch.tensor([[[0.5, 0.3, 0.2]]])
    >>> [Race(seed).settle(p, torch.tensor([[7]])).argmax().item() for seed in (0, 1)]
    [2, 1]
    """

    def __init__(self, seed=0):
        seeds = [seed] if isinstance(seed, int) else seed
        super().__init__(seeds[0])
        self.seeds = torch.tensor([signed(one) for one in seeds])

    def settle(self, p, position, offset=0):
        V = p.shape[-1]
        ids = runners(p)                                                        # (C,)
        first = (position[..., None] + offset + 1) * V
        u = uniform(self.seeds.to(p.device)[:, None, None], first + ids)        # (B, T, C)
        chances = p if len(ids) == V else p.index_select(-1, ids)
        arrives = u.neg_().log1p_().neg_() / chances
        # trap: where both p and u are 0 it is NaN, which argmin takes for the least
        return one_hot(ids.take(arrives.nan_to_num_(nan=torch.inf).argmin(-1)), p)

    def choose(self, weights):
        """The winners. After `settle`, nothing is left to chance, and no uniform is spent."""
        return weights.argmax(-1)


def runners(p):
    """The ids (C,), rising, of the tokens that race: where top-k, top-p or min-p leave few of p
    (B, T, V), those that have a chance in some row, and otherwise all."""
    sample = p[..., :64]        # to look at all of p would take as long as a part of the race
    if not p.is_cuda and 2 * sample.count_nonzero() > sample.numel():
        return torch.arange(p.shape[-1])
    return indices(p > 0)
