"""Measured costs are kept: once for each machine, model and dtype, and whatever lies in the folder does no
harm."""
import json
import os
import pwd
from dataclasses import replace

import pytest
import torch
from tiny import FAMILIES, GEMMA, LLAMA, each_family, make

from control import Costs
from machine.quant import quantise
from support import costs as module
from support.costs import as_data, identity, kept_costs, quick
from support.files import cache_folder, keep, kept


class Measured:
    """In place of a stopwatch: each measurement gives another table."""

    def __init__(self, monkeypatch):
        self.times = 0
        monkeypatch.setattr(module, "quick", self)

    def __call__(self, model):
        self.times += 1
        c = model.c
        parts, blocks = (0.1 * self.times, 1 / 3) * c.n_layers, ((1, 1.0), (17, 4 / 3))
        return Costs(parts, 0.7, blocks, 1e-7, 64, c.window, 0.1)


@each_family
def test_a_table_is_measured_once(tmp_path, monkeypatch, family):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, measured, said = make(FAMILIES[family]), Measured(monkeypatch), []
    first, path = kept_costs(model, say=said.append)
    assert path.parent == cache_folder() == tmp_path / "self-speculative-decoding"
    assert len(said) == 2 and str(path) in said[1]
    again, same = kept_costs(make(FAMILIES[family], seed=1), say=said.append)     # other weights: no matter
    assert (again, same, measured.times, len(said)) == (first, path, 1, 2)
    measured.times = 0
    assert first == measured(model), "not a digit is lost"


def test_other_machines_models_and_types_have_other_tables(monkeypatch):
    model = make(LLAMA)
    names = [identity(m) for m in (model, make(LLAMA, seed=1), make(LLAMA).float(), quantise(model, "int8"),
                                   make(replace(LLAMA, n_layers=5)), make(GEMMA))]
    assert names[0] == names[1] and len(set(names)) == 5
    monkeypatch.setattr(module, "machine", lambda device: "another one, 64 threads")
    assert identity(model) not in names
    model(torch.tensor([[1, 2, 3]])), model.angles(slice(0, 50), 60)
    assert identity(model) == identity(make(LLAMA)), "what it has read so far is no matter"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"sublayers": [1.0], "head": 1.0}', None])
def test_a_damaged_table_is_measured_anew(tmp_path, monkeypatch, content):
    model, measured, said = make(LLAMA), Measured(monkeypatch), []
    _, path = kept_costs(model, tmp_path, said.append)
    whole = json.loads(path.read_text(encoding="utf-8"))
    text = json.dumps(whole | {"head": -1}) if content is None else content
    path.write_text(text, encoding="utf-8")
    costs, _ = kept_costs(model, tmp_path, said.append)
    assert costs.sublayers[0] == 0.2 and "measured anew, as " in said[2] and len(said) == 5
    assert kept_costs(model, tmp_path, said.append)[0] == costs and measured.times == 2


def unknown(uid):
    raise KeyError(uid)


@pytest.mark.parametrize("cache", ["/dev/null", "/proc", "/" + "x" * 300, None])
def test_where_nothing_can_be_kept_the_run_goes_on(cache, monkeypatch):
    """It is no folder, read-only, or cannot be looked at; None: the user has no home, either."""
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    if cache:
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
    measured, said = Measured(monkeypatch), []
    costs, path = kept_costs(make(LLAMA), say=said.append)
    assert path is None and costs.head == 0.7 and measured.times == 1
    assert said[-1].startswith("not kept, so the next run measures anew: ")


def test_caches_lie_in_the_home_folder(monkeypatch, tmp_path):
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert keep("a", b"1") == kept("a") == tmp_path / ".cache" / "self-speculative-decoding" / "a"


def test_two_runs_may_keep_one_file_at_once(monkeypatch, tmp_path):
    """While one of them is in the middle of writing, another process does all of it."""
    honest = os.fsync

    def interrupted(file):
        monkeypatch.setattr(os, "fsync", honest)
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: 12345)
            keep("a", b"other", tmp_path)
        assert kept("a", tmp_path).read_bytes() == b"other"

    monkeypatch.setattr(os, "fsync", interrupted)
    assert keep("a", b"own", tmp_path).read_bytes() == b"own"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("one, repeats", [(5.0, 3), (0.01, 10), (1e-4, 30), (0.0, 30)])
def test_measuring_is_quick(monkeypatch, one, repeats):
    """Fewer repeats where a pass takes long: three seconds in all, where three repeats allow it."""
    seen = []
    monkeypatch.setattr(module, "interleave", lambda actions, count: dict.fromkeys(actions, one))
    monkeypatch.setattr(module, "measure_costs", lambda model, repeats: seen.append(repeats) or "costs")
    assert quick(make(LLAMA)) == "costs" and seen == [repeats]


@each_family
def test_a_real_measurement_is_a_table(tmp_path, monkeypatch, family):
    monkeypatch.setattr(module, "SECONDS", 0.05)
    costs, path = kept_costs(make(replace(FAMILIES[family], n_layers=2)), tmp_path, lambda line: None)
    assert len(costs.sublayers) == 4 and min(costs.sublayers) > 0 and costs.head > 0 and costs.at == 64
    assert 0 < costs.step(range(2)) < costs.step(range(4)) == 1
    assert json.loads(json.dumps(as_data(costs))) == json.loads(path.read_text(encoding="utf-8"))
