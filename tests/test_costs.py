"""What `control.measure_costs` makes of timings that are known; and a table is measured once for each
machine, model and dtype, whatever lies in the folder."""
import json
import pwd
from dataclasses import replace

import pytest
import torch
from tiny import GEMMA, LLAMA, make

from control import WIDTHS, Costs, measure_costs
from machine.quant import quantise
from support import costs as module
from support.costs import identity, kept_costs, quick
from support.files import cache_folder


class Measured:
    """In place of a stopwatch: each measurement gives another table."""

    def __init__(self, monkeypatch):
        self.times = 0
        monkeypatch.setattr(module, "quick", self)

    def __call__(self, model):
        self.times += 1
        parts, blocks = (0.1 * self.times, 1 / 3) * model.c.n_layers, ((1, 1.0), (17, 4 / 3))
        return Costs(parts, 0.7, blocks, 1e-7, 64, model.c.window, 0.1)


def test_costs_leave_out_the_call_itself(models, monkeypatch):
    """Here a call takes half a second, each part 1.5 s and its number more; the sub-layers, of 84 s
    together, are scaled to what a pass takes besides the step around them."""
    called = []

    def fake(actions, repeats):
        called.extend(action() for action in actions.values())
        times = {name: 2.0 + name for name in actions if isinstance(name, int)}
        blocks = {(T, which): 99.0 if which else 43.0 + 2 * T
                  for T in WIDTHS for which in ("before", "")}
        return times | {"empty": 0.5, "step": 3.0, "head": 2.0, "far": 13.6} | blocks

    monkeypatch.setattr("control.interleave", fake)
    with torch.no_grad():
        costs = measure_costs(models["llama"], repeats=3)
    assert costs == Costs(tuple(0.5 * (1.5 + i) for i in range(12)), 2.0,
                          tuple((T, (43 + 2 * T) / 45) for T in WIDTHS),
                          slot=pytest.approx(0.5 * (13.6 - 4) / 960), at=64, call=1.0)
    assert costs.whole == 45 and costs.step(range(2)) == pytest.approx((0.5 * 4 + 3) / 45)
    assert [x.shape for _, x in called[15:33:2]] == [(1, 1, 17)] * 9, "one token before each block"
    assert [x.shape for _, x in called[16:33:2]] == [(1, T, 17) for T in WIDTHS]


def test_a_real_measurement_is_a_table(models):
    costs = measure_costs(models["gemma2"], repeats=1)
    assert len(costs.sublayers) == 12 and min(costs.sublayers) > 0 and costs.head > 0 and costs.window == 5
    assert 0 < costs.step(range(4)) < costs.step(range(12)) == 1


@pytest.mark.parametrize("one, repeats", [(5.0, 3), (0.01, 10), (0.0, 30)])
def test_measuring_is_quick(monkeypatch, one, repeats):
    """Fewer repeats where a pass takes long: three seconds in all, where three repeats allow it."""
    monkeypatch.setattr(module, "interleave", lambda actions, count: dict.fromkeys(actions, one))
    monkeypatch.setattr(module, "measure_costs", lambda model, repeats: repeats)
    assert quick(make(LLAMA)) == repeats


def test_a_table_is_measured_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, measured, said = make(GEMMA), Measured(monkeypatch), []
    first, path = kept_costs(model, say=said.append)
    assert path.parent == cache_folder() == tmp_path / "self-speculative-decoding" and len(said) == 2
    assert kept_costs(make(GEMMA, seed=1), say=said.append) == (first, path), "other weights: no matter"
    assert measured.times == 1 and len(said) == 2
    measured.times = 0
    assert first == measured(model), "not a digit is lost"


def test_other_machines_models_and_types_have_other_tables(monkeypatch):
    model = make(LLAMA)
    names = [identity(m) for m in (model, make(LLAMA, seed=1), make(LLAMA).float(), quantise(model, "int8"),
                                   make(replace(LLAMA, n_layers=5)), make(GEMMA))]
    assert names[0] == names[1] and len(set(names)) == 5
    model(torch.tensor([[1, 2, 3]])), model.angles(60)
    assert identity(model) == names[0], "what it has read so far is no matter"
    monkeypatch.setattr(module, "machine", lambda device: "another one, 64 threads")
    assert identity(model) not in names


@pytest.mark.parametrize("damage", [
    "{", "[]", {"sublayers": [1.0]}, {"head": -1}, {"at": -1}, {"slot": "0"}, {"call": float("inf")},
    {"blocks": [[1, 1.0], [1, 2.0]]}, {"blocks": [[2, 1.0]]}, {"blocks": [[1, 0]]}], ids=str)
def test_a_damaged_table_is_measured_anew(tmp_path, monkeypatch, damage):
    model, measured, said = make(LLAMA), Measured(monkeypatch), []
    _, path = kept_costs(model, tmp_path, said.append)
    whole = json.loads(path.read_text())
    path.write_text(damage if isinstance(damage, str) else json.dumps(whole | damage))
    costs, _ = kept_costs(model, tmp_path, said.append)
    assert costs.sublayers[0] == 0.2 and path.name in said[2] and len(said) == 5
    assert kept_costs(model, tmp_path, said.append)[0] == costs and measured.times == 2


def unknown(uid):
    raise KeyError(uid)


@pytest.mark.parametrize("cache", ["/dev/null", "/" + "x" * 300, None])
def test_where_nothing_can_be_kept_the_run_goes_on(cache, monkeypatch):
    """It is no folder, or cannot be looked at; None: the user has no home, either."""
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    if cache:
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
    measured, said = Measured(monkeypatch), []
    costs, path = kept_costs(make(LLAMA), say=said.append)
    assert path is None and costs.head == 0.7 and measured.times == 1 and "not kept" in said[-1]
