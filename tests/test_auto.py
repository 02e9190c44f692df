"""On a GPU `auto` does no harm: with a simulated one, whose clock charges for
what the host does."""
import time
from dataclasses import replace
from functools import partial
from itertools import islice

import pytest
from paper_gpu import Clock
from tiny import LLAMA, PROMPTS, make

from layerskip import SelfDraft, early_exit
from machine.pieces import Piece
from machine.recorded import Recorded, Session
from machine.tapes import Tape
from methods.arms import candidates
from methods.pace import Pace
from sampling import Coins, to_probs
from speculative import rounds
from support import measure
from support.measure import as_measured, by_clock, measure_arms

SUBLAYER, HEAD = 75.0, 75.0     # microseconds in a graph; a plain round takes 1.2 milliseconds
NEW = 200


def world(damp):
    """A model whose blocks from the second on add only a part of what they did. With 0 an exit
    after the first block is always right, and with 1 hardly ever."""
    m = make(replace(LLAMA, max_len=256), seed=3, device="cuda")
    for b in m.blocks[1:]:
        for w in (b.attn.wo, b.mlp.down):
            w.mul_(damp)
    return m


@pytest.mark.parametrize("damp, T", [(0.0, 0.0), (0.3, 0.8), (1.0, 0.8)])
def test_auto_is_never_far_below_the_best(damp, T, monkeypatch):
    monkeypatch.setattr(measure, "CONTEXT", 16)
    with Clock() as clock:
        def timed(f, model, inputs, fixed, session):
            """A graph takes as long as its sub-layers."""
            micros = len(f.sublayers) * SUBLAYER if isinstance(f, Piece) else HEAD
            tape = Tape(partial(f, model), inputs, fixed)
            replay = tape.replay
            tape.replay = lambda: clock.replay(replay, micros)
            return tape

        m = Recorded(world(damp), Session([timed], pytest.fail))
        machine = by_clock(m, repeats=3)
        openings = [[(i * step) % 17 for i in range(16)] for step in (1, 3, 5)]
        table = measure_arms(m, candidates(m, machine), machine, openings)

        def auto():
            arms = [as_measured(arm, table[arm.name]) for arm in candidates(m, machine)]
            return Pace(m, arms, machine, clock=time.perf_counter)

        def written(drafter, count=NEW):
            probs = lambda logits: to_probs(logits, T)      # noqa: E731
            steps = rounds(m, PROMPTS[:1], NEW, drafter, probs, Coins(1))
            return sum(len(r.new[0]) for _, r in islice(steps, count))

        ways = {"plain": lambda: None, "auto": auto}
        ways |= {g: lambda g=g: SelfDraft(m, early_exit(6, 1), g) for g in (2, 4)}
        parts = [arm.alone(2) for arm in candidates(m, machine)]   # as support/auto.py does
        m.rehearse(lambda: [written(drafter, 4) for drafter in (None, auto(), *parts)])
        found = {}
        for name, way in ways.items():
            drafter = way()
            start = clock.host
            found[name] = 1000 * written(drafter) / (clock.host - start)
    best = max(found.values())
    assert found["auto"] >= 0.97 * found["plain"], found
    assert found["auto"] >= 0.95 * best, found
