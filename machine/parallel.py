"""One model on several devices, by tensor parallelism, if no single device can hold it.

Every process runs the same loop on the same tokens, but keeps only some heads of each attention,
some columns of each MLP and some rows of the output head. Two all-reduces per block restore the
full state.

    torchrun --nproc-per-node 2 generate.py "Once upon a time"

    each process keeps      of                          and then
    some rows               wqkv, gate_up               goes on alone, with its part of the cache
    some columns            wo, down                    an all-reduce adds up the results (`Added`)
    some rows               the output head             an all-gather joins the results (`Joined`)
    everything              embeddings, norms           has what the others have

So the logits are the same bits everywhere, and so are the tokens drawn from them. If two GPUs
differ after all, the draw of rank 0 counts (`Agreed`). A reader's own drafter or rule is refused,
because it may return something else in each process. (Shoeybi et al. 2019, Megatron-LM, arXiv
1909.08053, section 3.)
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
from model import Refused, Transformer
from sampling import Coins

LIMIT = timedelta(minutes=5)  # how long a process waits for others that are still loading weights


class Part(NamedTuple):
    """The part of a model that one process reads, for `checkpoint.load`."""
    rank: int
    world: int

    def of(self, model):
        """The same model, without memory, with only this process's attention heads, MLP columns and
        rows of the output head. Raises ValueError if heads or columns cannot be shared evenly."""
        c = model.c
        world = self.world
        for what, count in (("key-value heads", c.n_kv_heads), ("columns of an MLP", c.hidden_dim)):
            if count % world:
                raise Refused(f"{world} processes cannot share {count} {what} evenly")
        with torch.device("meta"):
            own = Transformer(replace(
                c,
                n_heads=c.n_heads // world,
                n_kv_heads=c.n_kv_heads // world,
                hidden_dim=c.hidden_dim // world))
        if own.head is not None:
            own.head = nn.Parameter(own.head[: -(-c.vocab_size // world)].detach())
        return own

    def slice_of(self, stored, shape):
        """This process's slice of a stored tensor, where `shape` is smaller than the tensor."""
        cuts = []
        for whole, own in zip(stored.shape, shape, strict=True):
            first = min(self.rank * own, whole - own)   # where uneven, the last slice overlaps
            cuts.append(slice(first, first + own))
        return stored[tuple(cuts)].contiguous()


def here():
    """The Part of this process, with its rank and the number of processes."""
    alone = not (dist.is_available() and dist.is_initialized())
    return Part(0, 1) if alone else Part(dist.get_rank(), dist.get_world_size())


def talk(collective, *args):
    """All processes call this together. Raises ConnectionError if one of them does not."""
    try:
        collective(*args)
    except RuntimeError as e:
        rank, world = here()
        raise ConnectionError(f"process {rank} of {world} has lost the others: one of them has "
                              f"ended, or does not answer ({str(e).splitlines()[0]})") from None


class Added(Matrix):
    """A matrix split by columns. Each process has some, and the same columns of x."""

    def __init__(self, own):
        super().__init__(own.dtype)
        self.own = own

    def product(self, x):
        y = F.linear(x, self.own)
        talk(dist.all_reduce, y)
        return y


class Joined(Matrix):
    """A matrix split by rows. Each process has the same number of rows. If N cannot be divided
    evenly, the last process repeats some rows of the one before it."""

    def __init__(self, own, N):
        super().__init__(own.dtype)
        self.own = own
        self.twice = len(own) * here()[1] - N

    def product(self, x):
        return self.gather(F.linear(x, self.own))

    def gather(self, y):
        """(..., own rows) of each process -> (..., N)"""
        parts = [torch.empty_like(y) for _ in range(here()[1])]
        talk(dist.all_gather, parts, y)
        return torch.cat([*parts[:-1], parts[-1][..., self.twice :]], -1)

    def __getitem__(self, ids):
        """Some rows, on every process, for a `ShortHead` to copy. (len(ids), K)"""
        own = self.own.full(self.dtype) if isinstance(self.own, Matrix) else self.own
        return self.gather(own.T.contiguous()).T[ids]


def unite(model):
    """Join the parts that `checkpoint.load(..., part=here())` read in each process into one
    model."""
    rank, world = here()
    V = model.c.vocab_size
    own = model.head
    if own is None:     # tied: the head is a slice of the embeddings, which are here in full
        n = -(-V // world)
        own = nn.Parameter(model.tok[min(rank * n, V - n) :][:n], requires_grad=False)
    put(model, "head", Joined(own, V))
    for b in model.blocks:
        put(b.attn, "wo", Added(b.attn.wo))
        put(b.mlp, "down", Added(b.mlp.down))
    return model


class Agreed(Coins):
    """A wrapper around coins, which gives every process what rank 0 drew."""

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
    """Within it the processes that torchrun started form a group; without torchrun it does nothing.

    Only rank 0 prints. If something fails, the first process that notices reports it, and all
    others end without a message, with status 2.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 or dist.is_initialized():
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
            with open(os.devnull, "w") as nowhere:
                with redirect_stdout(nowhere), redirect_stderr(nowhere):
                    yield
        talk(dist.barrier)
        dist.destroy_process_group()
    except Exception:
        with suppress(RuntimeError):    # the process with the store may have ended
            if store.add("spoken", 1) > 1:
                raise SystemExit(2) from None
        raise
