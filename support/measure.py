"""What the parts of a pass cost on this machine, by measurement or from tables in files.

A table of costs decides how a text is drafted, never what it says. No two measurements are the
same, and a run repeats round by round only with the same table. So a table is measured once per
machine, model and dtype, and then kept in the user's cache folder.
"""
import json
import math
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from checkpoint import guarded, read_json
from control import MOST, Costs
from drafter import Draft, Drafter
from kvcache import new_cache
from machine.kept import cache_file, identity, keep
from machine.standin import bare, rehearse
from methods.pace import OVERHEAD, Pace
from model import SPARE, Placement, Refused
from sampling import Coins, raw_probs, to_probs
from speculative import State, one_round, rounds
from support.files import note, read_beside
from verification import verify

WIDTHS = 1, 2, 3, 4, 5, 8, 9, 13, MOST + 1      # of the blocks that are measured
SECONDS = 3.0       # for a measurement that a run has to wait for
CONTEXT = 64        # tokens before the one whose cost is measured


@torch.inference_mode()
def interleave(actions, repeats, limit=math.inf):
    """The median seconds of each action by name. The actions run in turn, A B A B, after one
    warm-up of each, so that a machine that slows down slows all of them. After `limit` seconds
    there are no more than five repeats."""
    seconds = {name: [] for name in actions}
    begun = time.perf_counter()
    for repeat in range(repeats + 1):
        if repeat > 5 and time.perf_counter() > begun + limit:
            break
        for name, action in actions.items():
            start = time.perf_counter()
            action()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(s[1:]) for name, s in seconds.items()}


def measure_costs(model, repeats=50, limit=math.inf):
    """Costs in seconds, for one token after CONTEXT others. It measures the head; a drafted step
    without sub-layers; each sub-layer, scaled so that the parts add up to a plain round; whole
    rounds with drafts of 0 to 16 tokens; the extra cost of an attention after 16 times as many
    tokens; and how long it takes to choose a draft. A recorded model replays its passes and its
    head; only the parts are measured eagerly."""
    far = 16 * CONTEXT
    unbounded = 2 * (model.c.n_layers > 1)      # an attention without a window, if there is one
    eager = bare(model)
    device = model.tok.device
    cache = new_cache(model, 1, far + MOST + 1)
    text = torch.arange(CONTEXT + MOST + 1, device=device)[None] % model.c.vocab_size
    eager.run(eager.embed(text[:, :CONTEXT]), Placement.span(0, CONTEXT, device), cache)
    tokens = text[:, CONTEXT:]
    here = Placement.span(CONTEXT, CONTEXT + 1, device)
    away = Placement.span(far, far + 1, device)
    x = model.embed(tokens[:, :1])
    coins = Coins()

    def step():
        logits = model.unembed(model.run(model.embed(tokens[:, :1]), here, cache, []))
        return coins.choose(to_probs(logits, 1.0)), raw_probs(logits)

    n = torch.tensor([CONTEXT + 1], device=device)
    known = text[0, : CONTEXT + 1].tolist()
    written = torch.arange(cache.k.shape[3], device=device)[None] % model.c.vocab_size
    state = State(written, n, [known], [far], cache, model, to_probs, coins, ())

    def read(T):        # a round, which is then taken back
        r = one_round(state, Given(T - 1), verify)
        del known[CONTEXT + 1 :]
        state.n = n
        state.left = [far]
        return r.new, r.logits

    parts = {i: partial(eager.run, x, here, cache, [i]) for i in range(2 * model.c.n_layers)}
    # trap: a pass takes longer after other work. It follows a pass here, as in plain decoding
    passes = {}
    for T in WIDTHS:
        passes[T, "before"] = partial(read, 1)
        passes[T, ""] = partial(read, T)
    rehearse(model, lambda: [passes[T, ""]() for T in WIDTHS])
    times = interleave({
        **parts,
        "empty": partial(eager.run, x, here, cache, []),
        "step": step,
        "head": partial(model.unembed, x),
        **passes,
        "far": partial(eager.run, x, away, cache, [unbounded])}, repeats, limit)
    plain = times[1, ""]
    alone = [max(0.0, times[i] - times["empty"]) for i in parts]
    scale = max(0.0, plain - times["step"]) / (sum(alone) or 1.0)
    costs = Costs(
        sublayers=tuple(scale * s for s in alone),
        head=times["head"],
        passes=tuple((T, times[T, ""] / plain) for T in WIDTHS),
        slot=scale * max(0.0, times["far"] - times[unbounded]) / (far - CONTEXT),
        context=CONTEXT,
        window=model.c.window,
        call=max(0.0, times["step"] - times["head"]))
    pace = Pace(model, costs=costs)
    pace.begin(state, {})
    thinking = interleave({"choose": partial(pace.decide, state)}, repeats)["choose"]
    return replace(costs, thinking=thinking)


class Given(Drafter):
    """Drafts that cost only what it takes to send them to the device, as copies do."""

    def __init__(self, length):
        super().__init__()
        self.length = length

    def propose(self, state):
        if self.length == 0:
            return Draft.none(state)
        return Draft(state.send([[0] * self.length]), None, state.send([self.length]))


def measure_arms(model, arms, costs, repeats=5):
    """{the name of each arm: what a draft takes once, what each of its tokens takes, and what it
    takes to ask its rule after a token}, in plain rounds, by the clock. All of it is measured in
    whole rounds, with drafts of one and of up to four tokens."""
    ids = [i % model.c.vocab_size for i in range(16)]
    cache = new_cache(model, 1, 96 + SPARE)

    def rounds_of(drafter):
        return partial(next, rounds(model, [ids], 80, drafter, cache=cache))

    far = {arm.name: min(4, arm.longest) for arm in arms}
    ways = {"plain": rounds_of(None)}
    for arm in arms:
        most = far[arm.name]
        ways[arm.name, "one"] = rounds_of(arm.alone(1))
        ways[arm.name, "most"] = rounds_of(arm.alone(most))
        ways[arm.name, "asked"] = rounds_of(arm.alone(most, asks=True))
    rehearse(model, lambda: [step() for step in ways.values()])
    times = interleave(ways, repeats)
    found = {}
    for name, most in far.items():
        took = {way: times[name, way] / times["plain"] for way in ("one", "most", "asked")}
        one = took["one"] - costs.pass_cost(2)
        each = max(0.0, took["most"] - costs.pass_cost(1 + most) - one) / max(1, most - 1)
        asking = max(0.0, (took["asked"] - took["most"]) / most)
        found[name] = max(0.0, one - each), each, asking
    return found


def priced(arm, measured):
    """The Arm with the costs that were measured. The cost of catching up with the text is
    unchanged. A rule that takes long to ask is not asked."""
    once, each, asking = measured
    before = arm.drafting

    def drafting(n, g):
        return before(n, 0) + (once + g * each) * (g > 0)

    arm.drafter.rule.asks = asking <= OVERHEAD
    return replace(arm, drafting=drafting)


@torch.inference_mode()
def measure_step(model, twin, context=CONTEXT):
    """The time of a token in a model that drafts, the twin, relative to one in the model. Both read
    it after `context` others."""
    def step(m):
        device = m.tok.device
        cache = new_cache(m, 1, context + 8)
        at = Placement.span(context, context + 1, device)
        token = torch.zeros(1, 1, dtype=torch.long, device=device)
        return lambda: m.unembed(m.run(m.embed(token), at, cache))

    steps = {"model": step(model), "twin": step(twin)}
    rehearse(model, lambda: [act() for act in steps.values()])
    times = interleave(steps, 20)
    return times["twin"] / times["model"]


# --- tables in files


def read_costs(path, c):
    """The Costs in a file with their fields, for a model of this Config. All but "sublayers" and
    "head" may be missing. Raises ValueError for any other file."""
    raw = read_json(Path(path))
    with guarded(f"{path}: not a table of costs for this model, as lab.bench costs --out writes "
                 "it"):
        for key in ("unit", "flags", "machine", "torch", "date"):   # which lab.bench adds
            raw.pop(key, None)
        costs = Costs(**raw)
        ratios = [ratio for _, ratio in costs.passes]
        numbers = [*costs.sublayers, costs.head, costs.slot, costs.call, costs.thinking, *ratios]
        if len(costs.sublayers) != 2 * c.n_layers or not all(0 <= x < math.inf for x in numbers):
            raise Refused(f"expected {2 * c.n_layers} sub-layers, and numbers from 0 up")
    return replace(
        costs,
        sublayers=tuple(costs.sublayers),
        passes=tuple(map(tuple, costs.passes)),
        window=c.window if costs.slot else None)


def kept_costs(model):
    """The Costs of this model on this machine, in seconds, measured if no valid table is kept."""
    fields = tuple(Costs.__dataclass_fields__)      # a table of an older version lacks some
    path = cache_file(f"costs-{identity(model, type(model).__name__, fields)}.json")
    if costs := read_beside(path, read_costs, model.c):
        return costs
    note("costs", f"measuring what a pass takes, about {SECONDS:.0f} seconds")
    costs = measure_costs(model, repeats=30, limit=SECONDS)
    try:
        keep(path, json.dumps(vars(costs)).encode())
        note("costs", f"kept for later runs; if the machine was busy, delete {path} to measure "
                      "again")
    except OSError as e:
        note("costs", f"not kept, so the next run measures again: {e}")
    return costs
