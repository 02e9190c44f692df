"""What `by_clock` makes of known timings; and a table is measured once for each machine, model
and dtype, whatever lies in the cache folder."""
import itertools
import json
import math
from dataclasses import astuple, replace

import pytest
import torch
from tiny import GEMMA, LLAMA, PROMPTS, make

from machine.quant import quantise
from machine.recorded import Recorded, Session
from machine.tapes import simulated
from methods.arms import candidates, self_draft
from methods.costs import Machine, by_bytes, by_weights
from sampling import to_probs
from support import measure
from support.measure import Measured, as_measured, by_clock, kept_costs, measure_arms


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """The machines that were measured so far. Each is another one, and they are kept in
    tmp_path."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machines = []

    def another(model, *how, **more):
        parts = 0.1 * (len(machines) + 1), 1 / 3, 0.7, 0.1, 1e-7
        machines.append(Machine.of(model.c.n_layers, *parts, ((1, 1.0), (17, 4 / 3))))
        return machines[-1]

    monkeypatch.setattr(measure, "by_clock", another)
    monkeypatch.setattr(measure, "measure_arms", lambda model, arms, *how, **more: {
        arm.name: Measured(0.0, 0.1 * len(machines), 0.01, 0.5) for arm in arms})
    return machines


def test_what_a_machine_is_made_of(models, monkeypatch):
    """Here a plain round takes 45 s and its step 3, of which the head takes 2. 960 more tokens add
    9.6 s. Blocks share the rest by their bytes. A model that records does so with whole passes."""
    called = []
    fast = Recorded(models["llama"], Session([simulated]))

    def fake(actions, *how):
        called.extend(action() for action in actions.values())
        plain = {T: 43.0 + 2 * T for T in measure.WIDTHS} | {"far": 54.6}
        return {"step": 3.0, "head": 2.0} | {(T, ""): seconds for T, seconds in plain.items()}

    monkeypatch.setattr(measure, "interleave", fake)
    with torch.no_grad():
        m = by_clock(fast, repeats=3)
    assert {key.piece.sublayers for key in fast.tapes if key.piece} == {tuple(range(12))}
    slope = 9.6 / 960 / 6
    block = 42 / 6 - 64 * slope
    counted = by_bytes(models["llama"])
    mlp = block * counted.mlp / (counted.attention + counted.mlp)
    want = Machine.of(6, block - mlp, mlp, 2.0, 1.0, slope)
    assert astuple(m)[:6] == pytest.approx(astuple(want)[:6])
    assert m.wide == tuple((T, (43 + 2 * T) / 45) for T in measure.WIDTHS)
    assert m.verify(64) * m.unit == pytest.approx(45)
    assert m.verify(1024) * m.unit == pytest.approx(54.6)
    assert [x.shape for x in called[2::2]] == [(1, 1, 17)] * 10, "one token before each round"
    assert [x.shape for x in called[3::2]] == [(1, T, 17) for T in (*measure.WIDTHS, 1)]


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
    assert measure.measure_step(fast, twin) == 0.25
    assert seen == [(64, 65)] * 2 and fast.replays(), "rehearsed, and measured"


def test_a_measurement_ends_in_time_after_five_repeats(monkeypatch):
    monkeypatch.setattr(measure.time, "perf_counter", itertools.count().__next__)
    for limit, repeats in (math.inf, 9), (0, 5):
        calls = []
        measure.interleave({"": lambda calls=calls: calls.append(0)}, 9, limit)
        assert len(calls) == 1 + repeats


@pytest.mark.parametrize("rows", [1, 3])
def test_a_real_measurement(models, rows):
    """With the run's own settings, and as many rows."""
    seen = []

    def probs(logits):
        seen.append(len(logits))
        return to_probs(logits, 0.7, top_k=4)

    m = by_clock(models["gemma2"], probs, rows, repeats=1)
    assert set(seen) == {rows} and min(m.attention, m.mlp, m.head, m.unit) >= 0
    assert m.draft(range(12)).start == pytest.approx(1) and m.wide[0] == (1, 1.0)
    seen.clear()
    ends = make(replace(models["gemma2"].c, eos=tuple(range(17))))      # any token ends a text
    arms = candidates(ends, m)
    found = measure_arms(ends, arms, m, PROMPTS, probs, rows, repeats=1)
    assert set(seen) == {rows} and [*found] == [arm.name for arm in arms]
    assert all(min(numbers) >= 0 for numbers in found.values())


def test_what_drafts_take_by_hand(models, monkeypatch):
    """A plain round takes 2 s, and a block of T tokens (T + 9) / 10 of it. A round with one token
    takes .1 + .3 of it more, one with four .1 + 4 * .3, and asking 4 * .05."""
    m = Machine.of(6, 1.0, 1.0, 1.0, wide=((1, 1.0), (11, 2.0)))
    arm, = candidates(models["llama"], m)[:1]
    times = {"plain": 2.0, (arm.name, "one"): 2 * (1.1 + 0.4), (arm.name, "most"): 2 * (1.4 + 1.3),
             (arm.name, "asked"): 2 * (1.4 + 1.5)}
    monkeypatch.setattr(measure, "interleave", lambda *_: times)
    *found, alpha = measure_arms(models["llama"], [arm], m, [[0] * 64])[arm.name]
    assert found == pytest.approx([0.1, 0.3, 0.05])
    for asking in (0.05, 0.001):
        dear = as_measured(arm, Measured(0.1, 0.3, asking, alpha))
        asks = asking < 0.01
        assert dear.drafter.rule.asks == asks
        assert dear.cost(64, 4) == pytest.approx(0.1 + 4 * (0.3 + asking * asks))


def test_how_often_a_draft_is_right_is_measured_in_a_text_of_its_own(models):
    """One is always right and one hardly ever, at each place. The ways to draft that are timed
    write into one cache, so their texts are not the model's."""
    m = models["llama"]
    machine = by_weights(LLAMA)
    right = self_draft("right", m, range(12), machine)
    arms = [right, *candidates(m, machine, small=(make(LLAMA, 9), 0.1))]
    found = measure_arms(m, arms, machine, PROMPTS, repeats=1)
    assert found["right"][-1] > 0.95 and found["small model"][-1] < 0.3
    *_, small = (as_measured(arm, found[arm.name]) for arm in arms)
    rate = small.drafter.rule.acceptance
    assert rate.mean() == pytest.approx(found["small model"][-1])
    assert rate.hits + rate.misses == measure.TESTS


def test_a_table_that_makes_no_sense_is_refused_and_a_short_one_read(tmp_path):
    path = tmp_path / "costs.json"
    short = {"attention": 1, "mlp": 2, "head": 2}
    for damage in ({"blocks": 5}, {"head": -1}, {"slope": "0"}, {"wide": 1},
                   {"passes": [[1, 1.0]]}, {"wide": [[1, math.inf]]}):
        path.write_text(json.dumps(short | damage))
        with pytest.raises(ValueError, match="costs.json: not a table of costs"):
            measure.read_machine(path, LLAMA)
    path.write_text(json.dumps(short | {"unit": 3.0}))
    assert measure.read_machine(path, LLAMA) == Machine(6, 0.05, 0.1, 0.1, unit=60.0)


def test_a_table_is_kept_and_measured_again_only_if_it_is_damaged(
        measured, capsys, tmp_path, monkeypatch):
    m = make(LLAMA)
    arms = candidates(m, by_weights(LLAMA))
    first = kept_costs(m, arms)
    again, found = kept_costs(make(LLAMA), arms)
    assert len(measured) == 1 and found == first[1]
    assert again.attention == pytest.approx(first[0].attention) and first[0] is measured[0]
    (table,) = tmp_path.rglob("costs-*.json")
    table.write_bytes(table.read_bytes()[:-9])
    capsys.readouterr()
    for _ in range(2):
        assert kept_costs(m, arms)[1]["exit 1"] == (0.0, 0.2, 0.01, 0.5)
    assert table.name in capsys.readouterr().err.splitlines()[0] and len(measured) == 2
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert kept_costs(m, arms)[0] is measured[2] and "not kept" in capsys.readouterr().err


def test_other_arms_rows_settings_models_types_and_machines_have_their_own_table(
        models, measured, monkeypatch):
    m = models["llama"]
    machine = by_weights(m.c)
    for _ in range(2):
        kept_costs(m)
        kept_costs(m, candidates(m, machine))
        kept_costs(m, candidates(m, machine, small=(m, 0.1)))
        kept_costs(m, candidates(m, machine, small=(m, 0.2)))
        kept_costs(m, rows=2)
        kept_costs(m, settings=(("top_p", 0.9),))
        kept_costs(Recorded(m, Session([simulated])))
        for other in (make(m.c).float(), quantise(m, "int8"), make(GEMMA),
                      make(replace(m.c, window=5))):
            kept_costs(other)
        assert len(measured) == 11
    same = make(m.c, seed=1)
    same(torch.tensor([[1, 2, 3]]))     # nor does it matter what it has read so far
    kept_costs(same)
    assert len(measured) == 11
    monkeypatch.setattr("machine.files.hardware", lambda device: "another one, 64 threads")
    kept_costs(m)
    assert len(measured) == 12
