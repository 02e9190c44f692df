"""The search for sub-layers to skip, against the truth: all 4,096 sets of twelve groups of sub-layers.

The one thing to remember: a search is judged by its regret, how far the best set it has seen is from the best
there is, and by whether its objective ranks sets as a stopwatch would.
"""
import math
import statistics
import time
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from control import AdaptiveExit, weight_costs
from lab.bench.shared import ROOT, SETS, WEIGHTS, figures, load, page, prompt_ids, read_prompts, table
from layerskip import SelfDraft, early_exit
from methods.dynamic import aside, nearest
from search import Calibration, Space, Trial, search, speedup
from speculative import generate
from support import plots
from support.measure import measure_costs

LANDSCAPE = ROOT / "notebooks" / "landscape.npz"
BUDGETS, SEEDS = (25, 50, 100), 20


@dataclass(frozen=True)
class Bands(Space):
    """Sets of which every one can be scored: bit j skips all of `bands[j]`, of which `skippable[j]` is the
    first."""
    bands: tuple[tuple[int, ...], ...] = ()

    def sublayers(self, z):
        gone = {sub for band, bit in zip(self.bands, z, strict=True) if bit for sub in band}
        return [i for i in range(2 * self.n_layers) if i not in gone]


def bands(n_layers, count=6):
    """Two bits for each of `count` bands of blocks, its attentions and its MLPs. The bands reach from block 1
    to the last one and widen with the depth, as the first blocks matter one by one."""
    edges = [1]
    while len(edges) <= count:
        edges.append(max(edges[-1] + 1, round(n_layers ** (len(edges) / count))))
    groups = [tuple(range(2 * low + kind, 2 * min(high, n_layers), 2))
              for low, high in pairwise(edges) for kind in (0, 1)]
    groups = tuple(filter(None, groups))
    return Bands(n_layers, tuple(group[0] for group in groups), bands=groups)


def bits(number, n):
    return [number >> j & 1 for j in range(n)]


def enumerate_sets(space, calibration, costs):
    """alpha, c, gamma, speed-up of every set; set number k skips the bits of k. Four arrays (2^n,)."""
    rows = []
    for k in tqdm(range(1 << len(space.skippable)), desc="every set", disable=None):
        t = speedup(calibration, costs, space.sublayers(bits(k, len(space.skippable))))
        rows.append((t.alpha, t.cost, t.gamma, t.speedup))
    return dict(zip(("alpha", "c", "gamma", "speedup"), np.array(rows).T, strict=True))


# --- published objectives, beside `speedup`


def matchness(calibration, costs, sublayers):
    """How often the draft's likeliest token is also the target's (SWIFT, arXiv 2410.06916). It ignores costs:
    without bounds the best set is the one that skips nothing."""
    drafts = [(t.p, t.draft(sublayers, calibration.drafting)) for t in calibration.teachers]
    hits = torch.cat([(p.argmax(-1) == q.argmax(-1)).double().flatten() for p, q in drafts])
    return speedup(calibration, costs, sublayers)._replace(value=float(hits.mean()))


def tokens_per_second(calibration, costs, sublayers):
    """Measured: the first 32 tokens of each document are continued by 32, with the adaptive exit (Draft &
    Verify, Zhang et al. 2023, section 3.2). The values are as noisy as the machine."""
    teacher, count, start = calibration.teachers[0], 0, time.perf_counter()
    model, prompt = teacher.model, min(32, teacher.model.c.max_len - 1)
    for ids in calibration.ids:
        drafter = SelfDraft(calibration.drafting or model, sublayers, AdaptiveExit())
        (out,), _ = generate(model, [ids[:prompt]], 32, drafter, teacher.probs)
        count += len(out)
    rate = count / (time.perf_counter() - start)
    return speedup(calibration, costs, sublayers)._replace(value=rate)


# --- the competitors: each asks `evaluate` what sets, tuples of n bits, are worth, until it raises Enough


def random_search(space, evaluate, seed, count):
    g = torch.Generator().manual_seed(seed)
    while True:
        evaluate(tuple(space.random(g).int().tolist()))


def local_search(space, evaluate, seed, count):
    """Flip single bits of a random set in random order and keep the first improvement; restart from another
    random set when none helps."""
    g, n = torch.Generator().manual_seed(seed), len(space.skippable)
    while True:
        z = tuple(space.random(g).int().tolist())
        value, improved = evaluate(z), True
        while improved:
            improved = False
            for j in torch.randperm(n, generator=g).tolist():
                near = z[:j] + (1 - z[j],) + z[j + 1 :]
                if (found := evaluate(near)) > value:
                    z, value, improved = near, found, True
                    break


def gaussian_process(space, evaluate, seed, count):
    def trial(sublayers):
        z = tuple(int(sub not in set(sublayers)) for sub in space.skippable)
        return Trial(evaluate(z), 0.0, 0.0, 0, 0.0)

    for _ in search(space, trial, count, seed):
        pass


def tpe(space, evaluate, seed, count):
    """Optuna's default sampler on one categorical variable a bit, as fast-llm-inference uses it."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)

    def objective(trial):
        return evaluate(tuple(trial.suggest_int(f"b{j}", 0, 1) for j in range(len(space.skippable))))

    sampler = optuna.samplers.TPESampler(seed=seed)
    optuna.create_study(direction="maximize", sampler=sampler).optimize(objective, n_trials=10 * count)


@torch.inference_mode()
def clasp(calibration, space):
    """CLaSp's choice for each number of skips, from all positions of the calibration text at once, sub-layer
    by sub-layer. [set for 1 skip, for 2, ...]"""
    teachers = calibration.teachers
    lengths = [t.p.shape[1] for t in teachers]
    states = [torch.cat(xs, 1)[0] for xs in zip(*(t.states for t in teachers), strict=True)]    # (N, dim)

    def each(teacher, x, i):    # sub-layer i at every position of x (1, T, dim), each as the first of a draft
        at = torch.arange(x.shape[1], device=x.device)[None]
        return aside(teacher.model, teacher.cache, x, at, [i])

    def run(i, x):  # (J, N, dim), one set and one text after the other: together they would not fit
        sets = ([each(*pair, i) for pair in zip(teachers, one[None].split(lengths, 1), strict=True)]
                for one in x)
        return torch.cat([torch.cat(parts, 1) for parts in sets])

    sets = nearest(states, run, space.skippable, len(space.skippable))
    return [tuple(int(sub in gone) for sub in space.skippable) for gone in sets]


class Enough(Exception):
    """The budget is spent."""


def run_method(method, space, worth, seed, count):
    """The best value seen after each of `count` evaluations; a set asked for again costs nothing."""
    seen, best, most = {}, [], min(count, 2 ** len(space.skippable))

    def evaluate(z):
        if z not in seen:
            seen[z] = worth(z)
            best.append(max(seen[z], best[-1] if best else -math.inf))
            if len(seen) == most:
                raise Enough
        return seen[z]

    try:
        method(space, evaluate, seed, count)
    except Enough:
        pass
    return best + best[-1:] * (count - len(best))


def regrets(space, land, bar):
    """{method: (seeds, budget) best values so far}."""
    def worth(z):
        return float(land["speedup"][sum(b << j for j, b in enumerate(z))])

    methods = {"Gaussian process": gaussian_process, "local search": local_search, "random": random_search}
    if find_spec("optuna"):
        methods["TPE (Optuna)"] = tpe
    found = {}
    for name, method in methods.items():
        found[name] = []
        for seed in range(SEEDS):
            found[name].append(run_method(method, space, worth, seed, max(BUDGETS)))
            bar.update()
    return found


def sign_test(wins, losses):
    """One-sided: how likely so many wins, or more, are by chance."""
    n = wins + losses
    return sum(math.comb(n, k) for k in range(wins, n + 1)) / 2**n


def ranks(values):
    return torch.tensor(values, dtype=torch.float64).argsort(stable=True).argsort(stable=True).double()


def rank_correlation(a, b):
    """Spearman's, without ties to speak of."""
    return float(torch.corrcoef(torch.stack([ranks(a), ranks(b)]))[0, 1])


# --- the stopwatch


def measured_speedup(model, prompts, sublayers, gamma, new, repeats):
    """Of a draft over plain decoding: A B A B on each prompt, the median of the paired ratios."""
    ratios = []
    for ids in prompts:
        for repeat in range(repeats + 1):
            seconds = []
            for drafter in (None, SelfDraft(model, sublayers, gamma)):
                start = time.perf_counter()
                generate(model, [ids], new, drafter)
                seconds.append(time.perf_counter() - start)
            ratios += [seconds[0] / seconds[1]] * (repeat > 0)
    return statistics.median(ratios)


def objectives_against_the_clock(a, model, prompts, space, land, calibration, costs):
    """Rank correlation of each objective with measured speed, on sets spread over the range of speed-ups."""
    order = np.argsort(land["speedup"], kind="stable")
    chosen = order[np.linspace(0, len(order) - 1, 16 if a.quick else 64).astype(int)]
    sets = [bits(int(k), len(space.skippable)) for k in chosen]
    seen = {name: [] for name in ("measured", "speedup", "matchness", "tokens_per_second")}
    for z in tqdm(sets, desc="stopwatch", disable=None):
        subs = space.sublayers(z)
        for objective in (speedup, matchness, tokens_per_second):
            seen[objective.__name__].append(objective(calibration, costs, subs).value)
        gamma = speedup(calibration, costs, subs).gamma
        seen["measured"].append(measured_speedup(model, prompts[:4], subs, gamma, 64, 1 if a.quick else 3))
    clock = seen.pop("measured")
    return {name: rank_correlation(values, clock) for name, values in seen.items()}


def best_set(space, entries):
    """The sub-layers that stay in the best of the trials that `search` yielded."""
    return space.sublayers([int(b) for b in max(entries, key=lambda e: e["value"])["bits"]])


def over_everything(a, model, calibration, prompts):
    """All 2L bits but the first two, with measured costs: the search beside the best early exit and CLaSp's
    best set."""
    L, costs = model.c.n_layers, measure_costs(model, repeats=20 if a.quick else 100)
    space, score = Space(L, tuple(range(2, 2 * L))), partial(speedup, calibration, costs)
    start, scoring = time.perf_counter(), []

    def timed(subs):
        began = time.perf_counter()
        trial = score(subs)
        scoring.append(time.perf_counter() - began)
        return trial
    entries = list(search(space, timed, 60 if a.quick else 200))
    spent = time.perf_counter() - start
    exits = [early_exit(L, e) for e in range(1, L)]
    dp = [space.sublayers(z) for z in clasp(calibration, space) if sum(z) < len(z)]
    sets = {"found by the search": best_set(space, entries),
            "best early exit": max(exits, key=lambda subs: score(subs).value),
            "CLaSp's best": max(dp, key=lambda subs: score(subs).value)}
    seen = {}
    for name, subs in sets.items():
        t = score(subs)
        seen[name] = {"sublayers": subs, "alpha": t.alpha, "c": t.cost, "gamma": t.gamma,
                      "predicted": t.speedup,
                      "measured": measured_speedup(model, prompts, subs, t.gamma, a.new, 1 if a.quick else 3)}
    return {"sets": seen, "trials_per_second": len(entries) / spent, "trials": len(entries),
            "share_in_process": 1 - sum(scoring) / spent, "curve": [e["value"] for e in entries]}


def transfer(model, tokenizer, trials):
    """{calibrated on: {promised on: speed-up}}: a search sees the first half of one kind of documents, and
    its set is scored on the second half of every kind."""
    L, costs, halves = model.c.n_layers, weight_costs(model.c), {}
    for name in SETS:
        texts = [line["text"] for line in read_prompts(name)]
        halves[name] = [Calibration(model, tokenizer, part, 512) for part in (texts[:4], texts[4:])]
    space, found = Space(L, tuple(range(2, 2 * L))), {}
    for name in tqdm(SETS, desc="transfer", disable=None):
        entries = list(search(space, partial(speedup, halves[name][0], costs), trials))
        subs = best_set(space, entries)
        found[name] = {other: speedup(halves[other][1], costs, subs).speedup for other in SETS}
    return found


def landscape(a, space, calibration, costs):
    """What every set is worth: from the file, which only the shipped Llama has, or scored anew."""
    shipped = Path(a.model).resolve() == WEIGHTS / "stories-llama"
    if shipped and LANDSCAPE.is_file():
        return dict(np.load(LANDSCAPE))
    land = enumerate_sets(space, calibration, costs)
    if shipped:
        LANDSCAPE.parent.mkdir(exist_ok=True)
        np.savez_compressed(LANDSCAPE, **land)
    return land


def run(a):
    (model, tokenizer), (exact, _) = load(a), load(a, "float32")  # whose scores do not hang on rounding
    documents = [line["text"] for line in read_prompts("stories")]
    prompts = prompt_ids("stories", tokenizer, model.c)
    space, costs = bands(model.c.n_layers), weight_costs(model.c)
    calibration = Calibration(exact, tokenizer, documents, 512)
    land = landscape(a, space, calibration, costs)
    with tqdm(total=4 * SEEDS, desc="methods", disable=None) as bar:
        curves = regrets(space, land, bar)
    optimum, best = float(land["speedup"].max()), bits(int(land["speedup"].argmax()), len(space.skippable))
    data = {"optimum": optimum, "optimum_set": space.sublayers(best), "curves": curves,
            "correlation": objectives_against_the_clock(a, model, prompts, space, land, calibration, costs),
            "everything": over_everything(a, model, calibration, prompts),
            "transfer": transfer(exact, tokenizer, 40 if a.quick else 150)}
    draw = partial(plots.regrets, curves, optimum,
                   f"{a.model}: the best of all {len(land['c']):,} sets promises {optimum:.3f}")
    return markdown(a, land, data), data, draw


def first_within(curve, level):
    """How many evaluations until the best so far reaches `level`; None: never."""
    return next((i + 1 for i, value in enumerate(curve) if value >= level), None)


EVERY = {"kept": "{kept}", "alpha": "{alpha:.3f}", "c": "{c:.3f}", "gamma": "{gamma}",
         "promised": "{predicted:.2f}", "measured": "{measured:.2f}"}


def markdown(a, land, data):
    optimum, curves = data["optimum"], data["curves"]
    lines = [f"{a.model}; all {len(land['c']):,} sets of groups of sub-layers: the best, which keeps "
             f"{' '.join(map(str, data['optimum_set']))}, promises {optimum:.4f}, the median set "
             f"{np.median(land['speedup']):.4f}; {SEEDS} seeds; {a.machine}", ""]
    head = ["method", *(f"regret at {b}" for b in BUDGETS), *(f"optimum by {b}" for b in BUDGETS),
            "within 1 %, median evaluations", "wins against random at 50"]
    rows = []
    for name, runs in curves.items():
        at = [[optimum - run[b - 1] for run in runs] for b in BUDGETS]
        near = statistics.median(first_within(run, 0.99 * optimum) or math.inf for run in runs)
        row = [name, *(f"{statistics.median(r):.4f}" for r in at),
               *(f"{sum(x < 1e-9 for x in r) / len(r):.0%}" for r in at),
               "never" if math.isinf(near) else f"{near:.0f}"]
        pairs = [(run[49], other[49]) for run, other in zip(runs, curves["random"], strict=True)]
        wins, losses = sum(x > y for x, y in pairs), sum(x < y for x, y in pairs)
        row.append("" if name == "random" else f"{wins} : {losses}, p = {sign_test(wins, losses):.1g}")
        rows.append(row)
    lines += table(head, rows)
    lines += ["Rank correlation with measured speed: " + ", ".join(
        f"{name} {value:.2f}" for name, value in data["correlation"].items()), ""]
    every = data["everything"]
    sets = [(name, r | {"kept": " ".join(map(str, r["sublayers"]))}) for name, r in every["sets"].items()]
    lines += figures(sets, EVERY, "all sub-layers but 0 and 1")
    lines += [f"{every['trials']} trials, {every['trials_per_second']:.1f} a second, "
              f"{every['share_in_process']:.0%} of the time in the Gaussian process", ""]
    lines += table(["calibrated on, promised on held-out", *SETS], [
        [name, *(f"{r[other]:.2f}" for other in SETS)] for name, r in data["transfer"].items()])
    return page(lines)
