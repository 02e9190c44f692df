"""One model on several devices: tensor parallelism, for what no single one can hold.

Every process runs the same loop on the same tokens, but keeps only some heads of each attention, some columns
of each MLP and some rows of the head. Twice per block all add up what they have, and then all know the same.

    torchrun --nproc-per-node 2 generate.py "Once upon a time"

    each process keeps      of                          and then
    some rows               wqkv, gate_up               goes on alone, with its own part of the cache
    some columns            wo, down                    all add up what came out: `Added`
    some rows               the head                    all lay side by side what came out: `Joined`
    everything              embeddings, norms           has what the others have

Logits are therefore the same bits everywhere, and so is what is drawn from them; where two GPUs differ after
all, what rank 0 drew counts (`Agreed`). (Shoeybi et al. 2019, Megatron-LM, arXiv 1909.08053, section 3.)
"""
import os
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from checkpoint import put
from machine.quant import Matrix
from model import Transformer
from sampling import Coins

LIMIT = timedelta(minutes=5)  # so long a process waits for the others, which may still be reading weights


class Part(NamedTuple):
    """What one process reads of a model, for `checkpoint.load`."""
    rank: int
    world: int

    def of(self, model):
        """The same model, without memory, with this process's heads, columns of each MLP and rows of the head
        only. Raises ValueError where the heads or columns cannot be shared evenly."""
        c, world = model.c, self.world
        for what, count in (("key-value heads", c.n_kv_heads), ("columns of an MLP", c.hidden_dim)):
            if count % world:
                raise ValueError(f"{world} processes cannot share {count} {what} evenly")
        with torch.device("meta"):
            own = Transformer(replace(c, n_heads=c.n_heads // world, n_kv_heads=c.n_kv_heads // world,
                                      hidden_dim=c.hidden_dim // world))
        if own.head is not None:
            own.head = nn.Parameter(own.head[: -(-c.vocab_size // world)].detach())
        return own

    def read(self, stored, shape):
        """This process's slice of a stored tensor, where `shape` is smaller than the tensor."""
        cuts = []
        for whole, own in zip(stored.get_shape(), shape, strict=True):
            first = min(self.rank * own, whole - own)   # where uneven, the last slice overlaps
            cuts.append(slice(first, first + own))
        return stored[tuple(cuts)].contiguous()


def place():
    """The part of this process: which one it is, and of how many."""
    alone = not (dist.is_available() and dist.is_initialized())
    return Part(0, 1) if alone else Part(dist.get_rank(), dist.get_world_size())


def talk(collective, *args):
    """All processes call this together. Raises ConnectionError, in one line, where one of them does not."""
    try:
        collective(*args)
    except RuntimeError as e:
        rank, world = place()
        raise ConnectionError(f"process {rank} of {world} has lost the others: one of them has ended, or "
                              f"does not answer ({str(e).splitlines()[0]})") from None


class Added(Matrix):
    """A matrix of which each process has some columns, and x has only those, too."""

    def __init__(self, own):
        super().__init__()
        self.own = own

    def product(self, x):
        y = F.linear(x, self.own)
        talk(dist.all_reduce, y)
        return y


class Joined(Matrix):
    """A matrix of N rows of which each process has equally many: where N cannot be shared evenly, the last
    process has some rows of the one before it, too."""

    def __init__(self, own, N):
        super().__init__()
        self.own, self.twice = own, len(own) * place()[1] - N

    def product(self, x):
        return self.gather(F.linear(x, self.own))

    def gather(self, y):
        """(..., own rows) of each process -> (..., N)"""
        parts = [torch.empty_like(y) for _ in range(place()[1])]
        talk(dist.all_gather, parts, y)
        return torch.cat([*parts[:-1], parts[-1][..., self.twice :]], -1)

    def __getitem__(self, ids):
        """Some rows, on every process: what a `ShortHead` copies. (len(ids), K)"""
        return self.gather(self.own.T.contiguous()).T[ids]


def join(model):
    """Make one model of what `checkpoint.load(..., part=place())` has read in each process."""
    (rank, world), V, own = place(), model.c.vocab_size, model.head
    if own is None:     # the embeddings are there in full, and so the head is a part of them
        n = -(-V // world)
        own = nn.Parameter(model.tok[min(rank * n, V - n) :][:n], requires_grad=False)
    put(model, "head", Joined(own, V))
    for b in model.blocks:
        put(b.attn, "wo", Added(b.attn.wo))
        put(b.mlp, "down", Added(b.mlp.down))
    return model


class Agreed(Coins):
    """Other coins, of which each process gets what rank 0 got."""

    def __init__(self, coins):
        self.coins = coins

    def flip(self, prob):
        return self.shared(self.coins.flip(prob))

    def choose(self, weights):
        return self.shared(self.coins.choose(weights))

    def shared(self, outcome):
        talk(dist.broadcast, outcome, 0)
        return outcome


@contextmanager
def together():
    """Within it the processes that torchrun has started are a group; without torchrun it does nothing.

    Only rank 0 prints. Where something goes wrong, the first process that notices it says so, and all the
    others end in silence, with status 2.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield
        return
    store, rank, world = next(dist.rendezvous("env://", timeout=LIMIT))
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group(store=store, rank=rank, world_size=world, timeout=LIMIT)
    try:
        if rank == 0:
            yield
        else:
            with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
                yield
        talk(dist.barrier)
        dist.destroy_process_group()
    except Exception:
        with suppress(RuntimeError):    # the process that kept the count is gone
            if store.add("spoken", 1) > 1:
                raise SystemExit(2) from None
        raise
