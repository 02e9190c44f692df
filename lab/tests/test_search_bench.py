"""The bench that judges the search: sets of bands, published objectives, competitors, CLaSp's table,
statistics."""
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from test_search import SMALL, calibrate, everything, planted, run, sets
from tiny import FAMILIES, make

from control import weight_costs
from kvcache import KVCache
from lab.bench import search as bench
from model import Placement
from search import Space, speedup


@pytest.mark.parametrize("n_layers", [2, 7, 24, 80])
def test_bands_cover_every_block_but_the_first_once(n_layers):
    space = bench.bands(n_layers)
    assert sorted(sub for band in space.bands for sub in band) == list(range(2, 2 * n_layers))
    assert len(space.bands) == min(12, 2 * n_layers - 2)
    for j, band in enumerate(space.bands):
        z = [int(i == j) for i in range(len(space.bands))]
        assert sorted(set(range(2 * n_layers)) - set(space.sublayers(z))) == list(band)


def states(model, ids, sublayers):
    """The residual stream after a draft of these sub-layers, at each position of a text that the model has
    read, as of the first token that is drafted there. (T, dim)"""
    rows, cache = [], KVCache(model.c, 1, len(ids), torch.float64)
    x = model.embed(torch.tensor([ids]))
    model.run(x, Placement.at(0, len(ids)), cache)
    k, v = cache.k.clone(), cache.v.clone()
    for i in range(len(ids)):
        rows.append(model.run(x[:, i : i + 1], Placement.at(i, i + 1), cache, sublayers)[0, 0])
        cache.k.copy_(k), cache.v.copy_(v)
    return torch.stack(rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_clasp_takes_the_nearer_state_at_each_step(family):
    """Its table with sets for states, which are computed anew for every set."""
    model, free = make(replace(FAMILIES[family], **SMALL)), (1, 2, 4)
    calibration = calibrate(model)

    def near(upto, gone):
        cosines = []
        for ids in calibration.ids:
            kept = [i for i in range(upto) if i not in gone]
            one, other = states(model, ids, range(upto)), states(model, ids, kept)
            cosines.append(torch.cosine_similarity(one, other, -1))
        return float(torch.cat(cosines).mean())

    table = {0: ()}
    for i in range(6):
        options = {j: [gone] for j, gone in table.items()}                      # run it,
        for j, gone in table.items() if i in free else ():
            options.setdefault(j + 1, []).append((*gone, i))                    # or skip it
        table = {j: max(choice, key=partial(near, i + 1)) for j, choice in options.items()}
    assert bench.clasp(calibration, Space(3, free)) == [
        tuple(int(sub in table[j]) for sub in free) for j in (1, 2, 3)]


@pytest.mark.parametrize(
    "method", [bench.random_search, bench.local_search, bench.gaussian_process])
@pytest.mark.parametrize("count", [13, 50])
def test_a_method_sees_as_many_sets_as_it_may(method, count):
    """Each counts once; a budget larger than all of them ends, too."""
    values, asked = planted(5, 1), []
    worth = lambda z: asked.append(z) or values[z]      # noqa: E731
    curve = bench.run_method(method, Space(3, (0, 1, 2, 4, 5)), worth, 7, count)
    assert len(asked) == len(set(asked)) == min(count, 32)
    assert curve == [max(values[z] for z in asked[: i + 1]) for i in range(count)]
    if method is bench.gaussian_process:
        assert asked == sets(run(Space(3, (0, 1, 2, 4, 5)), values.get, count, seed=7))


def test_methods_end_at_the_best_of_all_sets(monkeypatch):
    model, space = make(replace(FAMILIES["llama"], **SMALL)), Space(3, (1, 2, 4))
    calibration, costs = calibrate(model), weight_costs(model.c)
    land = bench.enumerate_sets(space, calibration, costs)
    for k, z in enumerate(everything(3)):
        t = speedup(calibration, costs, space.sublayers(z[::-1]))
        assert [land[name][k] for name in land] == [t.alpha, t.cost, t.gamma, t.speedup]
    monkeypatch.setattr(bench, "SEEDS", 4)
    monkeypatch.setattr(bench, "BUDGETS", (8,))
    curves = bench.regrets(space, land, SimpleNamespace(update=lambda: None))
    assert [runs[0][-1] for runs in curves.values()] == [land["speedup"].max()] * 3
    for seed, curve in enumerate(curves["random"]):
        first = space.random(torch.Generator().manual_seed(seed))
        assert curve[0] == speedup(calibration, costs, space.sublayers(first)).speedup


def test_the_statistics_by_hand():
    assert [bench.first_within([1, 2, 2, 3], level) for level in (0, 2, 3, 4)] == [1, 2, 4, None]
