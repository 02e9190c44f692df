"""What `measure_costs` makes of known timings; and a table is measured once for each machine, model
and dtype, whatever lies in the cache folder."""
import itertools
import json
import math

import pytest
import torch
from tiny import GEMMA, LLAMA, make

from control import Costs
from machine import kept
from machine.blocks import Piece
from machine.kept import identity
from machine.quant import quantise
from machine.recorded import Recorded, Session
from machine.tapes import simulated
from support import measure
from support.measure import WIDTHS, kept_costs, measure_costs, measure_step, read_costs


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """The tables that were measured so far. Each is another one, and they are kept in tmp_path."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tables = []

    def another(model, **how):
        parts, blocks = (0.1 * (len(tables) + 1), 1 / 3) * model.c.n_layers, ((1, 1.0), (17, 4 / 3))
        tables.append(Costs(parts, 0.7, blocks, 1e-7, 64, model.c.window, 0.1))
        return tables[-1]

    monkeypatch.setattr(measure, "measure_costs", another)
    return tables


def test_costs_leave_out_the_call_itself(models, monkeypatch):
    """Here a call takes half a second, each part 1.5 s and its number more; the sub-layers, of 84 s
    together, are scaled to what a pass takes besides the step around them."""
    called = []

    def fake(actions, *how):
        called.extend(action() for action in actions.values())
        times = {name: 2.0 + name for name in actions if isinstance(name, int)}
        blocks = {(T, which): 99.0 if which else 43.0 + 2 * T for T in WIDTHS
                  for which in ("before", "")}
        return times | {"empty": 0.5, "step": 3.0, "head": 2.0, "far": 13.6, "choose": 9.0} | blocks

    monkeypatch.setattr(measure, "interleave", fake)
    with torch.no_grad():
        costs = measure_costs(models["llama"], repeats=3)
    assert costs == Costs(tuple(0.5 * (1.5 + i) for i in range(12)), 2.0,
                          tuple((T, (43 + 2 * T) / 45) for T in WIDTHS),
                          slot=pytest.approx(0.5 * (13.6 - 4) / 960), context=64, call=1.0,
                          thinking=9.0)
    assert costs.whole == 45 and costs.step(range(2)) == pytest.approx((0.5 * 4 + 3) / 45)
    assert [x.shape for _, x in called[15:33:2]] == [(1, 1, 17)] * 9, "one token before each block"
    assert [x.shape for _, x in called[16:33:2]] == [(1, T, 17) for T in WIDTHS]


def test_a_step_of_a_copy_is_relative_to_the_models(models, monkeypatch):
    """Both read a token after 64 others, and both are recorded if the model is."""
    seen = []

    def fake(actions, *how):
        for act in actions.values():
            act()
        return {"model": 4.0, "twin": 1.0}

    monkeypatch.setattr(measure, "interleave", fake)
    fast = Recorded(models["llama"], Session([simulated]))
    twin = fast.alongside(quantise(models["llama"], "int4"))
    monkeypatch.setattr(twin, "run", lambda x, at, cache: seen.append((at.first, at.end)) or x)
    assert measure_step(fast, twin) == 0.25
    assert seen == [(64, 65)] * 2 and fast.replays(), "rehearsed, and measured"


def test_a_measurement_ends_in_time_after_five_repeats(monkeypatch):
    monkeypatch.setattr(measure.time, "perf_counter", itertools.count().__next__)
    for limit, repeats in (math.inf, 9), (0, 5):
        calls = []
        measure.interleave({"": lambda calls=calls: calls.append(0)}, 9, limit)
        assert len(calls) == 1 + repeats


def test_a_real_measurement_is_a_table(models):
    costs = measure_costs(models["gemma2"], repeats=1)
    assert len(costs.sublayers) == 12 and min(*costs.sublayers, costs.head) > 0
    assert 0 < costs.step(range(4)) < costs.step(range(12)) == 1 and costs.window == 5


def test_other_machines_models_and_types_have_other_tables(monkeypatch):
    model, same = make(LLAMA), make(LLAMA, seed=1)
    same(torch.tensor([[1, 2, 3]]))     # nor does it matter what it has read so far
    names = [identity(m)
             for m in (model, same, make(LLAMA).float(), quantise(model, "int8"), make(GEMMA))]
    assert names[0] == names[1] and len(set(names)) == 4
    monkeypatch.setattr(kept, "hardware", lambda device: "another one, 64 threads")
    assert identity(model) not in names


def test_a_table_that_makes_no_sense_is_refused_and_a_short_one_read(tmp_path):
    path = tmp_path / "costs.json"
    short = {"sublayers": [1, 2] * 6, "head": 5}
    for damage in ({"sublayers": [1.0]}, {"head": -1}, {"slot": "0"}, {"passes": 1},
                   {"blocks": [[1, 1.0]]}, {"loss": 1.5}):
        path.write_text(json.dumps(short | damage))
        with pytest.raises(ValueError, match="costs.json: not a table of costs"):
            read_costs(path, LLAMA)
    path.write_text(json.dumps(short))
    assert read_costs(path, LLAMA) == Costs((1, 2) * 6, 5, ((1, 1.0),))


def test_a_table_is_kept_and_measured_again_only_if_it_is_damaged(
        measured, capsys, tmp_path, monkeypatch):
    assert kept_costs(make(LLAMA)) == kept_costs(make(LLAMA)) == measured[0]
    (table,) = tmp_path.rglob("costs-*.json")
    table.write_bytes(table.read_bytes()[:-9])
    capsys.readouterr()
    assert kept_costs(make(LLAMA)) == kept_costs(make(LLAMA)) == measured[1]
    assert table.name in capsys.readouterr().err.splitlines()[0]
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert kept_costs(make(LLAMA)) == measured[2] and "not kept" in capsys.readouterr().err


def test_a_recorded_model_replays_passes_and_has_its_own_table(models, measured, monkeypatch):
    recorded, made = Recorded(models["llama"], Session([simulated])), []
    assert kept_costs(recorded) != kept_costs(models["llama"]) and len(measured) == 2
    monkeypatch.setattr(Recorded, "record", lambda self, f, *args: made.append(f))
    measure_costs(recorded, repeats=2)
    pieces = {f.sublayers for f in made if isinstance(f, Piece)}
    assert pieces == {tuple(range(12))}, "no sub-layer alone"
