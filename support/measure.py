"""What passes and drafts cost on this machine, and how often drafts are accepted, by measurement or
from tables in files.

A table decides how a text is drafted, never what it says. It is measured in whole rounds, with the
settings of the run, and kept in the user's cache folder for later runs with the same machine,
model, dtype and settings.
"""
import json
import math
import statistics
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from checkpoint import guarded, read_json
from control import MOST
from drafter import Draft, Drafter
from kvcache import new_cache
from machine.files import cache_file, identity, keep, note, read_beside
from methods.arms import Calibrated
from methods.costs import LARGE, Machine, by_bytes, size
from methods.counts import Beta, outcomes
from methods.pace import OVERHEAD
from model import SPARE, Placement, Refused
from sampling import Coins, raw_probs, to_probs
from speculative import State, one_round, rounds
from verification import verify

WIDTHS = 1, 2, 3, 4, 5, 8, 9, 13, MOST + 1      # tokens of the passes that are timed
SECONDS = 3.0       # for a measurement that a run has to wait for
CONTEXT = 64        # tokens before the one whose cost is measured
ROUNDS = 4          # at least, in which an acceptance rate is measured, in each of OPENINGS
AFTER = 32          # tokens written in each, because a small model soon repeats itself
TESTS = 8           # that a measured acceptance rate counts for: a text may be of another kind
# a story, a question and code
OPENINGS = """Once upon a time there was a little girl who lived with her brother in a small house
by the sea. Every morning they walked along the beach and looked for shells. One day they found a
box in the sand. It was old and heavy, and it was locked. "What do you think is in it?" asked the
girl.
""", """Question: Why do the leaves of many trees turn red or yellow in autumn before they fall?
Explain it in a few sentences, so that a child can understand it.

Answer:""", '''def mean(numbers):
    """The average of a list of numbers, or None if the list is empty."""
'''


class Measured(NamedTuple):
    """What was measured of an Arm."""
    once: float     # what a draft costs, whatever its length
    each: float     # what each of its tokens costs
    asking: float   # what it costs to ask its rule after a token
    alpha: float    # how often a drafted token is accepted


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


def by_clock(model, probs=to_probs, rows=1, repeats=50, limit=math.inf):
    """The Machine of a model in seconds, at these settings of `to_probs` and with so many rows. It
    times whole rounds, with drafts of 0 to 16 tokens and in a text 16 times as long; a step without
    sub-layers; and the head. The blocks take what is left of a plain round, and attentions and MLPs
    share it by the bytes that they read."""
    far = 16 * CONTEXT
    L = model.c.n_layers
    device = model.tok.device
    cache = new_cache(model, rows, far + MOST + 1)
    tokens = torch.arange(cache.k.shape[3], device=device).repeat(rows, 1) % model.c.vocab_size
    here = Placement.span(CONTEXT, CONTEXT + 1, device)
    x = model.embed(tokens[:, :1])
    coins = Coins()

    def step():
        logits = model.unembed(model.run(model.embed(tokens[:, :1]), here, cache, []))
        return coins.choose(probs(logits)), raw_probs(logits)

    def after(n):       # the state of a loop after n tokens and the last known one
        known = [tokens[0, : n + 1].tolist() for _ in range(rows)]
        lengths = torch.full((rows,), n + 1, device=device)
        return State(tokens, lengths, known, [far] * rows, cache, model, probs, coins, ())

    def round_of(state, T):     # a round, which is then taken back
        n = state.n
        count = len(state.known[0])
        r = one_round(state, Given(T - 1), verify)
        for text in state.known:
            del text[count:]
        state.n = n
        state.left = [far] * rows
        return r.logits

    # trap: a pass takes longer after other work. It follows a pass here, as in plain decoding
    near = after(CONTEXT)
    passes = {}
    for T in WIDTHS:
        passes[T, "before"] = partial(round_of, near, 1)
        passes[T, ""] = partial(round_of, near, T)
    passes["far", "before"] = partial(round_of, after(far), 1)
    passes["far", ""] = passes["far", "before"]
    model.rehearse(lambda: [passes[T, ""]() for T in WIDTHS])
    times = interleave(
        {"step": step, "head": partial(model.unembed, x), **passes}, repeats, limit)
    plain = times[1, ""]
    slope = max(0.0, times["far", ""] - plain) / (far - CONTEXT) / L
    block = max(0.0, (plain - times["step"]) / L - CONTEXT * slope)
    counted = by_bytes(model)
    share = counted.attention / (counted.attention + counted.mlp)
    return Machine.of(
        L,
        attention=share * block,
        mlp=(1 - share) * block,
        head=times["head"],
        step=max(0.0, times["step"] - times["head"]),
        slope=slope,
        wide=tuple((T, times[T, ""] / plain) for T in WIDTHS))


class Given(Drafter):
    """Drafts that cost only what it takes to send them to the device, as copies do."""

    def __init__(self, length):
        super().__init__()
        self.length = length

    def propose(self, state):
        if self.length == 0:
            return Draft.none(state)
        rows = len(state.known)
        drafted = state.send([[0] * self.length] * rows)
        return Draft(drafted, None, state.send([self.length] * rows))


def measure_arms(model, arms, machine, texts, probs=to_probs, rows=1, repeats=5, limit=math.inf):
    """{the name of each arm: what was Measured}, in whole rounds that continue the first of some
    texts (their ids), with drafts of one and of up to four tokens; and how often they are right in
    all of them."""
    longest = min(CONTEXT, model.c.max_len // 4)
    texts = [list(text[:longest]) for text in texts]
    n = len(texts[0])
    new = 3 * longest
    cache = new_cache(model, rows, longest + new + SPARE)

    def begin(drafter, text=texts[0], new=new):
        return rounds(model, [text] * rows, new, drafter, probs, eos=(), cache=cache)

    far = {arm.name: min(4, arm.longest) for arm in arms}
    ways = {"plain": partial(next, begin(None))}
    for arm in arms:
        most = far[arm.name]
        ways[arm.name, "one"] = partial(next, begin(arm.alone(1)))
        ways[arm.name, "most"] = partial(next, begin(arm.alone(most)))
        ways[arm.name, "asked"] = partial(next, begin(arm.alone(most, asks=True)))
    model.rehearse(lambda: [step() for step in ways.values()])
    times = interleave(ways, repeats, limit)
    plain = machine.verify(n)
    found = {}
    for arm in arms:
        most = far[arm.name]
        took = {way: plain * times[arm.name, way] / times["plain"]
                for way in ("one", "most", "asked")}
        one = took["one"] - machine.verify(n, 2)
        each = max(0.0, took["most"] - machine.verify(n, 1 + most) - one) / max(1, most - 1)
        asking = max(0.0, (took["asked"] - took["most"]) / most)
        # trap: above, all write into one cache, so what they accept there means nothing
        runs = [begin(arm.alone(most), text, AFTER) for text in texts]
        alpha = acceptance(runs, limit / len(arms))
        found[arm.name] = Measured(max(0.0, one - each), each, asking, alpha)
    return found


def acceptance(runs, seconds):
    """How often a drafted token is accepted in some runs of `rounds`, each of which ends early, but
    not before ROUNDS, after its share of the seconds."""
    rate = Beta()
    for steps in runs:
        begun = time.perf_counter()
        for i, (_, r) in enumerate(steps, 1):
            for drafted, kept in outcomes(r):
                rate.add(kept, min(1, drafted - kept))
            if i >= ROUNDS and time.perf_counter() > begun + seconds / len(runs):
                break
    return rate.mean()


def as_measured(arm, measured):
    """The Arm with the costs and the acceptance rate that were measured. A rule that takes long to
    ask is not asked."""
    rule = Calibrated(gamma=arm.longest, prior=measured.alpha, tests=TESTS)
    rule.asks = measured.asking <= OVERHEAD
    arm.drafter.rule = rule
    asked = measured.asking * rule.asks
    start = max(0.0, measured.each + asked - CONTEXT * arm.each.slope)
    return replace(arm, once=measured.once, each=arm.each._replace(start=start))


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
    model.rehearse(lambda: [act() for act in steps.values()])
    times = interleave(steps, 20)
    return times["twin"] / times["model"]


# --- tables in files


def read_machine(path, c):
    """The Machine in a file with its fields, for a model of this Config. The costs may have any
    unit, and only "attention", "mlp" and "head" must be there. Raises ValueError for any other
    file."""
    raw = read_json(Path(path))
    with guarded(f"{path}: not a table of costs for this model, as lab.bench costs --out writes "
                 "it"):
        for key in ("arms", "around", "command", "commit", "date", "flags", "machine", "torch"):
            raw.pop(key, None)      # these are not costs
        unit = raw.pop("unit", 1.0)
        wide = tuple(map(tuple, raw.pop("wide", ((1, 1.0),))))
        if raw.pop("blocks", c.n_layers) != c.n_layers:
            raise Refused(f"expected {c.n_layers} blocks")
        numbers = [unit, *raw.values(), *(number for pair in wide for number in pair)]
        if not all(0 <= x < math.inf for x in numbers):
            raise Refused("expected numbers from 0 up")
        machine = Machine.of(c.n_layers, **raw, wide=wide)
        return replace(machine, unit=machine.unit * unit)


def kept_costs(model, arms=(), texts=((0,),), probs=to_probs, rows=1, settings=()):
    """(the Machine of this model here in seconds, what `measure_arms` finds), measured if no valid
    tables are kept for the same arms, rows and `settings`, which say what `probs` does."""
    facts = (type(model).__name__, tuple(Machine.__dataclass_fields__), Measured._fields, rows,
             settings, [(arm.name, arm.each) for arm in arms])
    path = cache_file(f"costs-{identity(model, *facts)}.json")
    if kept := read_beside(path, read_costs, model.c, [arm.name for arm in arms]):
        return kept
    if size(model.blocks) >= LARGE:
        note("costs", "measuring what passes and drafts take and how often drafts are right, about "
                      f"{3 * SECONDS:.0f} seconds; it is kept for later runs, which correct it as "
                      "they go")
    machine = by_clock(model, probs, rows, repeats=30, limit=SECONDS)
    found = measure_arms(model, arms, machine, texts, probs, rows, limit=SECONDS)
    try:
        keep(path, json.dumps(asdict(machine) | {"arms": found}).encode())
    except OSError as e:
        note("costs", f"not kept, so the next run measures again: {e}")
    return machine, found


def read_costs(path, c, names):
    """(the Machine, what `measure_arms` found of the arms with these names) in a file of
    `kept_costs`."""
    found = {}
    with guarded(f"{path}: not the costs of these drafts"):
        for name, numbers in read_json(Path(path))["arms"].items():
            found[name] = Measured(*map(float, numbers))
        if sorted(found) != sorted(names):
            raise Refused(f"expected {', '.join(names)}")
    return read_machine(path, c), found
