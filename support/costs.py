"""Measured costs: what the parts of a pass take on this machine, measured once and kept.

The one thing to remember: a table of costs decides how the text is drafted, and never what it says. But only
with the same table does a run repeat round by round, and no two measurements are the same: so a table is
measured once for each machine, model and dtype, and lies in the user's cache folder from then on.
"""
import hashlib
import json
import sys

import torch

from control import interleave, measure_costs
from support.cli import machine, read_costs
from support.files import keep, kept

SECONDS = 3.0       # that a measurement may take, if so few repeats allow it
REPEATS = 3, 30     # at least, at most
PASSES = 30         # so many passes take about as long as one repeat of all that is measured


def to_stderr(line):
    print(f"costs: {line}", file=sys.stderr, flush=True)


def as_data(costs):
    """A Costs table as `support.cli.read_costs` reads it."""
    return {"sublayers": costs.sublayers, "head": costs.head, "blocks": costs.blocks, "slot": costs.slot,
            "at": costs.at, "call": costs.call}


def kept_costs(model, folder=None, say=to_stderr):
    """(the Costs of this model on this machine, in seconds; their file). They are measured where they are not
    kept yet, or cannot be read. say: is told what takes long and what went wrong, in one line."""
    name = f"costs-{identity(model)}.json"
    path = kept(name, folder)
    if path is not None:
        try:
            return read_costs(path, model.c), path
        except ValueError as e:
            say(f"measured anew, as {e}")
    say(f"measuring what a pass takes, about {SECONDS:.0f} seconds")
    costs = quick(model)
    try:
        path = keep(name, f"{json.dumps(as_data(costs))}\n".encode(), folder)
        say(f"kept for later runs; if the machine was busy, delete {path} to measure anew")
        return read_costs(path, model.c), path
    except OSError as e:
        say(f"not kept, so the next run measures anew: {e}")
    return costs, None


def quick(model):
    """Costs in seconds, from as many repeats as fit into `SECONDS`."""
    token = torch.zeros(1, 1, dtype=torch.long, device=model.tok.device)
    one = interleave({"pass": lambda: model(token)}, 3)["pass"]
    low, high = REPEATS
    return measure_costs(model, repeats=max(low, min(high, int(SECONDS / PASSES / max(one, 1e-9)))))


def identity(model):
    """A name for all that costs depend on: how they are measured, the machine with its number of threads,
    torch, and the shapes and types of the weights; the weights themselves are no matter."""
    weights = [(name, tuple(w.shape), w.dtype) for name, w in model.state_dict().items()]
    facts = "rounds", torch.__version__, machine(model.tok.device), model.tok.device.type, model.c, weights
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
