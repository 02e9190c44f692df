"""The search for sub-layers to skip, compared with the truth about all 4,096 sets of twelve groups.
Its regret is how far the best set it has seen is from the best there is."""
import statistics
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from lab.bench.shared import ROOT, WEIGHTS, load, page, read_prompts, table
from methods.costs import by_weights
from search import Calibration, Space, Trial, search, speedup

LANDSCAPE = ROOT / "notebooks" / "landscape.npz"
BUDGETS, SEEDS = (25, 50, 100), 20


@dataclass(frozen=True)
class Bands(Space):
    """So few sets that every one can be scored. Bit j skips all of `bands[j]`, of which
    `skippable[j]` is the first."""
    bands: tuple[tuple[int, ...], ...] = ()

    def sublayers(self, z):
        gone = {sub for band, bit in zip(self.bands, z, strict=True) if bit for sub in band}
        return [i for i in range(2 * self.n_layers) if i not in gone]


def bands(n_layers, count=6):
    """Two bits for each of `count` bands of blocks, its attentions and its MLPs. The bands reach
    from block 1 to the last one and widen with the depth, as the first blocks matter one by one."""
    edges = [1]
    while len(edges) <= count:
        edges.append(max(edges[-1] + 1, round(n_layers ** (len(edges) / count))))
    groups = [tuple(range(2 * low + kind, 2 * min(high, n_layers), 2))
              for low, high in pairwise(edges) for kind in (0, 1)]
    groups = tuple(filter(None, groups))
    return Bands(n_layers, tuple(group[0] for group in groups), bands=groups)


def bits(number, n):
    return [number >> j & 1 for j in range(n)]


def enumerate_sets(space, calibration, machine):
    """alpha, c, gamma and speed-up of every set, four arrays (2^n,). Set number k skips the bits
    of k."""
    rows = []
    for k in tqdm(range(1 << len(space.skippable)), desc="every set", disable=None):
        t = speedup(calibration, machine, space.sublayers(bits(k, len(space.skippable))))
        rows.append((t.alpha, t.cost, t.gamma, t.speedup))
    return dict(zip(("alpha", "c", "gamma", "speedup"), np.array(rows).T, strict=True))


# --- the competitors return the worth of each set that they try, in turn


def random_search(space, worth, seed, count):
    g, seen = torch.Generator().manual_seed(seed), {}
    while len(seen) < min(count, 2 ** len(space.skippable)):
        z = tuple(space.random(g).int().tolist())
        seen[z] = worth(z)              # a set that is drawn again counts once
    return list(seen.values())


def gaussian_process(space, worth, seed, count):
    def trial(sublayers):
        z = tuple(int(sub not in set(sublayers)) for sub in space.skippable)
        return Trial(worth(z), 0.0, 0.0, 0)

    return [entry["speedup"] for entry in search(space, trial, count, seed)]


METHODS = {"Gaussian process": gaussian_process, "random": random_search}


def run_method(method, space, worth, seed, count):
    """The best value seen after each of `count` evaluations. It stays where all sets are tried
    sooner."""
    best = list(accumulate(method(space, worth, seed, count), max))
    return best + best[-1:] * (count - len(best))


def regrets(space, land):
    """{method: (seeds, budget) best values so far}."""
    def worth(z):
        return float(land["speedup"][sum(b << j for j, b in enumerate(z))])

    def curves(name, method):
        return [run_method(method, space, worth, seed, max(BUDGETS))
                for seed in tqdm(range(SEEDS), name, disable=None)]

    return {name: curves(name, method) for name, method in METHODS.items()}


def landscape(a, space, calibration, machine):
    """What every set is worth, from the file, which only the shipped Llama has, or scored now."""
    shipped = Path(a.model).resolve() == WEIGHTS / "stories-llama"
    if shipped and LANDSCAPE.is_file():
        return dict(np.load(LANDSCAPE))
    land = enumerate_sets(space, calibration, machine)
    if shipped:
        np.savez_compressed(LANDSCAPE, **land)
    return land


def run(a):
    # in float32, so that scores do not hang on rounding
    model, tokenizer = load(a, "float32")
    space = bands(model.c.n_layers)
    documents = [line["text"] for line in read_prompts("stories")]
    calibration = Calibration(model, tokenizer, documents, 512)
    land = landscape(a, space, calibration, by_weights(model.c))
    optimum = float(land["speedup"].max())
    kept = space.sublayers(bits(int(land["speedup"].argmax()), len(space.skippable)))
    curves = regrets(space, land)
    lines = [f"{a.model}; all {len(land['c']):,} sets of groups of sub-layers: the best, which "
             f"keeps {' '.join(map(str, kept))}, promises {optimum:.4f}, the median set "
             f"{np.median(land['speedup']):.4f}; {SEEDS} seeds", ""]
    head = ["method", *(f"regret at {b}" for b in BUDGETS), *(f"optimum by {b}" for b in BUDGETS),
            "within 1 %, median evaluations"]
    rows = []
    for name, runs in curves.items():
        at = [[optimum - run[b - 1] for run in runs] for b in BUDGETS]
        near = statistics.median(sum(best < 0.99 * optimum for best in run) + 1 for run in runs)
        rows.append([name, *(f"{statistics.median(r):.4f}" for r in at),
                     *(f"{sum(x < 1e-9 for x in r) / len(r):.0%}" for r in at),
                     f"{near:.0f}" if near <= max(BUDGETS) else "never"])
    return page(lines + table(head, rows)), {"optimum": optimum, "optimum_set": kept,
                                             "curves": curves}
