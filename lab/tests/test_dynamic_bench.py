"""Drafts that adapt. Priced by what passes really read, Pace loses no more than it promises; and
the benchmark reports the regret that it defines."""
import math
from dataclasses import replace

import pytest
import torch
from test_heads import wild
from test_pace import IDS, SKIP
from tiny import LIVELY, PROMPTS, each_family, make

from control import weight_costs
from lab.bench import dynamic
from lab.bench.drafters import Bench, metered
from lab.m2r2 import M2R2
from lab.transfer import Transfer
from methods.heads import ExitBlock, Kangaroo, Medusa, Prophet
from methods.pace import STAKE, Pace, candidates
from speculative import generate


@each_family
@pytest.mark.parametrize("rows", [1, 3])
def test_by_weights_it_is_never_slower_than_it_promises(family, rows):
    """A draft of each kind alone, and all at once, of which little is accepted."""
    m = make(replace(LIVELY[family], max_len=128), 4)
    heads = [wild(head) for head in (
        Kangaroo(m, 2), ExitBlock(m, 1), M2R2(m, 2), Medusa(m, 3), Transfer(m, 3, 2),
        Prophet(m, 1))]
    costs = replace(weight_costs(m.c), slot=0.0)    # the meter does not count slots
    ways = candidates(m, costs, SKIP, None, heads) + candidates(m, costs, None, IDS)
    with metered([m], heads) as read:
        for some in (*([way] for way in ways), ways):
            drafter = Pace(m, some, costs)
            drafter.balance += 4    # it may lose more, so that it tries more
            begin = drafter.lookup.begin    # the prompt's own reading apart
            drafter.lookup.begin = lambda state, trace, begin=begin: (begin(state, trace),
                                                                      read.clear())
            generate(m, PROMPTS[:rows], 40, drafter)
            assert sum(read) / costs.whole <= 40 * 1.01 + STAKE + 4


def test_the_stream_on_a_tiny_model(models):
    m, kinds = models["llama"], ["stories", "stories", "code", "code"]
    heads, costs = {torch.float64: [wild(Kangaroo(m, 2))]}, weight_costs(m.c)
    bench = Bench({"float64": (m, None)}, PROMPTS, {}, 6, 1)
    methods, fixed = dynamic.all_methods(m.c, SKIP, None, heads, costs)
    rows = dynamic.column(bench, methods, fixed, kinds, "greedy")
    assert not any(r["parted"] for r in rows.values()), "every method writes the same text"
    best = [max(1.0, *(rows[name]["read"][i] for name in fixed)) for i in range(4)]
    for r in rows.values():
        regret = math.prod(b / x for b, x in zip(best, r["read"], strict=True)) ** 0.25 - 1
        assert r["weights"]["regret"] == pytest.approx(regret)
