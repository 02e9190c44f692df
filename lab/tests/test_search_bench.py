"""The sets of bands and the competitors by which the search is judged."""
from dataclasses import replace

import pytest
import torch
from test_search import SMALL, calibrate, everything, planted
from tiny import FAMILIES, make

from lab.bench import search as bench
from methods.costs import by_weights
from search import Space, speedup


@pytest.mark.parametrize("n_layers", [2, 7, 24, 80])
def test_bands_cover_every_block_but_the_first_once(n_layers):
    space = bench.bands(n_layers)
    assert sorted(sub for band in space.bands for sub in band) == list(range(2, 2 * n_layers))
    assert len(space.bands) == min(12, 2 * n_layers - 2)
    for j, band in enumerate(space.bands):
        z = [int(i == j) for i in range(len(space.bands))]
        assert sorted(set(range(2 * n_layers)) - set(space.sublayers(z))) == list(band)


@pytest.mark.parametrize("method", [bench.random_search, bench.gaussian_process])
@pytest.mark.parametrize("count", [13, 50])
def test_a_method_sees_as_many_sets_as_it_may(method, count):
    """Each counts once, and a budget larger than all of them ends."""
    values, asked = planted(5, 1), []
    worth = lambda z: asked.append(z) or values[z]      # noqa: E731
    curve = bench.run_method(method, Space(3, (0, 1, 2, 4, 5)), worth, 7, count)
    tried = list(dict.fromkeys(asked))
    assert len(tried) == min(count, 32)
    assert curve == [max(values[z] for z in tried[: i + 1]) for i in range(count)]


def test_methods_end_at_the_best_of_all_sets(monkeypatch):
    model, space = make(replace(FAMILIES["llama"], **SMALL)), Space(3, (1, 2, 4))
    calibration, costs = calibrate(model), by_weights(model.c)
    land = bench.enumerate_sets(space, calibration, costs)
    for k, z in enumerate(everything(3)):
        t = speedup(calibration, costs, space.sublayers(z[::-1]))
        assert [land[name][k] for name in land] == [t.alpha, t.cost, t.gamma, t.speedup]
    monkeypatch.setattr(bench, "SEEDS", 4)
    monkeypatch.setattr(bench, "BUDGETS", (8,))
    curves = bench.regrets(space, land)
    assert [runs[0][-1] for runs in curves.values()] == [land["speedup"].max()] * 2
    for seed, curve in enumerate(curves["random"]):
        first = space.random(torch.Generator().manual_seed(seed))
        assert curve[0] == speedup(calibration, costs, space.sublayers(first)).speedup
