"""The search for sub-layers to skip, against the truth: all 4,096 sets of the six middle blocks.

The one thing to remember: a search is judged by its regret, how far the best set it has seen is from the best
there is, and by whether its objective ranks sets as a stopwatch would.
"""
import math
import statistics
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import checkpoint
from benchmarks.shared import ROOT, SETS, WEIGHTS, read_prompts, table
from control import measure_costs, weight_costs
from layerskip import SelfDraft, early_exit
from search import Calibration, Space, Trial, matchness, search, speedup, tokens_per_second
from speculative import generate
from support import plots

LANDSCAPE = ROOT / "notebooks" / "landscape.npz"
BUDGETS, SEEDS = (25, 50, 100), 20


def middle(n_layers):
    """The 12 bits: attention and MLP of the six middle blocks."""
    first = (n_layers - 6) // 2
    return Space(n_layers, tuple(range(2 * first, 2 * first + 12)))


def bits(number, n=12):
    return [number >> j & 1 for j in range(n)]


def enumerate_sets(space, calibration, costs):
    """alpha, c, gamma, speed-up of every set; set number k skips the bits of k. Four arrays (2^n,)."""
    rows = []
    for k in tqdm(range(1 << len(space.skippable)), desc="every set", disable=None):
        t = speedup(calibration, costs, space.sublayers(bits(k, len(space.skippable))))
        rows.append((t.alpha, t.cost, t.gamma, t.speedup))
    return dict(zip(("alpha", "c", "gamma", "speedup"), np.array(rows).T, strict=True))


# --- the competitors: each asks what sets, (n,) tuples of bits, are worth, until `evaluate` says Enough


def random_search(space, evaluate, seed, count):
    g = torch.Generator().manual_seed(seed)
    while True:
        evaluate(tuple(space.random(g).int().tolist()))


def local_search(space, evaluate, seed, count):
    """First improvement over single flips in random order, from a random set; anew from another one where no
    flip helps."""
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


def clasp(calibration, space):
    """CLaSp's dynamic programme (arXiv 2505.24196): for each number of skips the set whose residual stream
    stays nearest to the target's, by cosine. [set for 1 skip, for 2, ...]

    Its table: best[j], a state behind i sub-layers of which j were skipped. The next sub-layer is either run
    on best[j] or skipped from best[j-1], whichever is nearer to the target's state there.
    """
    model, n = calibration.model, len(space.skippable)
    teachers = calibration.teachers
    best = {0: ([t.states[0] for t in teachers], ())}

    @torch.inference_mode()
    def apply(t, x, i):
        T = x.shape[1]
        own = torch.eye(T, dtype=torch.bool, device=x.device)
        return model.run(x, slice(0, T), t.cache, [i], slice(T, 2 * T), own)

    def near(xs, i):
        cosines = [torch.cosine_similarity(x.double(), t.states[i + 1].double(), -1).flatten()
                   for x, t in zip(xs, teachers, strict=True)]
        return float(torch.cat(cosines).mean())

    for i in range(2 * model.c.n_layers):
        following = {}
        for j in range(min(n, i + 1) + 1):
            options = []
            if j in best:
                xs, gone = best[j]
                options.append(([apply(t, x, i) for t, x in zip(teachers, xs, strict=True)], gone))
            if i in space.skippable and j - 1 in best:
                xs, gone = best[j - 1]
                options.append((xs, (*gone, i)))
            if options:
                following[j] = max(options, key=lambda o: near(o[0], i))
        best = following
    return [tuple(int(sub in best[j][1]) for sub in space.skippable) for j in sorted(best) if j]


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


def installed(name):
    try:
        __import__(name)
    except ImportError:
        return False
    return True


def regrets(space, land, calibration, bar):
    """{method: (seeds, budget) best values so far}."""
    worth = lambda z: float(land["speedup"][sum(b << j for j, b in enumerate(z))])  # noqa: E731
    methods = {"Gaussian process": gaussian_process, "local search": local_search, "random": random_search}
    if installed("optuna"):
        methods["TPE (Optuna)"] = tpe
    found = {}
    for name, method in methods.items():
        found[name] = []
        for seed in range(SEEDS):
            found[name].append(run_method(method, space, worth, seed, max(BUDGETS)))
            bar.update()
    order = clasp(calibration, space)
    in_turn = lambda space, evaluate, seed, count: [evaluate(z) for z in order]  # noqa: E731
    found["CLaSp"] = [run_method(in_turn, space, worth, 0, max(BUDGETS))]
    return found


def sign_test(wins, losses):
    """One-sided: how likely are so many wins, or more, by chance?"""
    n = wins + losses
    return sum(math.comb(n, k) for k in range(wins, n + 1)) / 2**n


def ranks(values):
    return torch.tensor(values, dtype=torch.float64).argsort(stable=True).argsort(stable=True).double()


def rank_correlation(a, b):
    """Spearman's, without ties to speak of."""
    return float(torch.corrcoef(torch.stack([ranks(a), ranks(b)]))[0, 1])


# --- the stopwatch


def measured_speedup(model, prompts, sublayers, gamma, new, repeats):
    """Of a skip set over plain decoding: A B A B on each prompt, the median of the paired ratios."""
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
    sets = [bits(int(k)) for k in order[np.linspace(0, len(order) - 1, 16 if a.quick else 64).astype(int)]]
    seen = {name: [] for name in ("measured", "speedup", "matchness", "tokens_per_second")}
    for z in tqdm(sets, desc="stopwatch", disable=None):
        subs = space.sublayers(z)
        for objective in (speedup, matchness, tokens_per_second):
            seen[objective.__name__].append(objective(calibration, costs, subs).value)
        gamma = speedup(calibration, costs, subs).gamma
        seen["measured"].append(measured_speedup(model, prompts[:4], subs, gamma, 64, 1 if a.quick else 3))
    clock = seen.pop("measured")
    return {name: rank_correlation(values, clock) for name, values in seen.items()}


def over_everything(a, model, calibration, prompts):
    """All 2L bits but the first two, with measured costs: the search beside the best early exit and CLaSp's
    best set."""
    L, costs = model.c.n_layers, measure_costs(model, repeats=20 if a.quick else 100)
    space = Space(L, tuple(range(2, 2 * L)))
    entries, start, thought = [], time.perf_counter(), 0.0
    for entry, seconds in search(space, partial(speedup, calibration, costs), 60 if a.quick else 200):
        entries.append(entry)
        thought += seconds
    spent = time.perf_counter() - start
    best = max(entries, key=lambda e: e["value"])
    sets = {"found by the search": space.sublayers([int(b) for b in best["bits"]])}
    score = partial(speedup, calibration, costs)
    exits = [early_exit(L, e) for e in range(1, L)]
    sets["best early exit"] = max(exits, key=lambda subs: score(subs).value)
    dp = [space.sublayers(z) for z in clasp(calibration, space) if sum(z) < len(z)]
    sets["CLaSp's best"] = max(dp, key=lambda subs: score(subs).value)
    seen = {}
    for name, subs in sets.items():
        t = score(subs)
        seen[name] = {"sublayers": subs, "alpha": t.alpha, "c": t.cost, "gamma": t.gamma, "predicted": t.speedup,
                      "measured": measured_speedup(model, prompts, subs, t.gamma, a.new, 1 if a.quick else 3)}
    return {"sets": seen, "trials_per_second": len(entries) / spent, "share_in_process": thought / spent,
            "trials": len(entries), "curve": [e["value"] for e in entries]}


def transfer(model, tokenizer, trials):
    """{calibrated on: {measured on: (speed-up promised there, of the set found there itself)}} by held-out
    documents: a search sees the first half of a domain, and its set is scored on the second half of all."""
    L, costs, halves = model.c.n_layers, weight_costs(model.c), {}
    for name in SETS:
        texts = [line["text"] for line in read_prompts(name)]
        halves[name] = [Calibration(model, tokenizer, part, 512) for part in (texts[:4], texts[4:])]
    space, found = Space(L, tuple(range(2, 2 * L))), {}
    for name in tqdm(SETS, desc="transfer", disable=None):
        entries = [e for e, _ in search(space, partial(speedup, halves[name][0], costs), trials)]
        best = max(entries, key=lambda e: e["value"])
        subs = space.sublayers([int(b) for b in best["bits"]])
        found[name] = {other: speedup(halves[other][1], costs, subs).speedup for other in SETS}
    return found


def run(a):
    model, tokenizer = checkpoint.load(a.model, a.device, getattr(torch, a.dtype))
    exact = checkpoint.load(a.model, a.device, torch.float32)[0]  # scores that do not hang on rounding
    lines = read_prompts("stories")
    documents = [line["text"] for line in lines]
    prompts = [checkpoint.encode(tokenizer, line["prompt"], model.c.bos) for line in lines]
    space, costs = middle(model.c.n_layers), weight_costs(model.c)
    calibration = Calibration(exact, tokenizer, documents, 512)
    if LANDSCAPE.is_file() and Path(a.model).resolve() == WEIGHTS / "stories-llama":
        land = dict(np.load(LANDSCAPE))
    else:
        land = enumerate_sets(space, calibration, costs)
        if Path(a.model).resolve() == WEIGHTS / "stories-llama":
            LANDSCAPE.parent.mkdir(exist_ok=True)
            np.savez_compressed(LANDSCAPE, **land)
    with tqdm(total=4 * SEEDS, desc="methods", disable=None) as bar:
        curves = regrets(space, land, calibration, bar)
    optimum = float(land["speedup"].max())
    data = {
        "optimum": optimum, "optimum_set": bits(int(land["speedup"].argmax())), "curves": curves,
        "correlation": objectives_against_the_clock(a, model, prompts, space, land, calibration, costs),
        "everything": over_everything(a, model, calibration, prompts),
        "transfer": transfer(exact, tokenizer, 40 if a.quick else 150)}
    draw = partial(plots.regrets, curves, optimum,
                   f"{a.model}: the best of all 4,096 sets promises {optimum:.3f}")
    return markdown(a, land, data), data, draw


def first_within(curve, level):
    """How many evaluations until the best so far reaches `level`; None: never."""
    return next((i + 1 for i, value in enumerate(curve) if value >= level), None)


def markdown(a, land, data):
    optimum, curves = data["optimum"], data["curves"]
    lines = [f"{a.model}; all 4,096 sets of the six middle blocks: the best promises {optimum:.4f}, the "
             f"median set {np.median(land['speedup']):.4f}; {SEEDS} seeds; {a.machine}", ""]
    head = ["method", *(f"regret at {b}" for b in BUDGETS), *(f"optimum by {b}" for b in BUDGETS),
            "within 1 %, median evaluations", "wins against random at 50"]
    rows = []
    for name, runs in curves.items():
        at = [[optimum - run[b - 1] for run in runs] for b in BUDGETS]
        near = statistics.median(first_within(run, 0.99 * optimum) or math.inf for run in runs)
        row = [name, *(f"{statistics.median(r):.4f}" for r in at),
               *(f"{sum(x < 1e-9 for x in r) / len(r):.0%}" for r in at),
               "never" if math.isinf(near) else f"{near:.0f}"]
        pairs = [(run[49], other[49]) for run, other in zip(runs, curves["random"], strict=False)]
        wins, losses = sum(x > y for x, y in pairs), sum(x < y for x, y in pairs)
        fair = len(runs) == SEEDS and name != "random"
        row.append(f"{wins} : {losses}, p = {sign_test(wins, losses):.1g}" if fair else "")
        rows.append(row)
    lines += table(head, rows)
    lines += ["Rank correlation with measured speed: " + ", ".join(
        f"{name} {value:.2f}" for name, value in data["correlation"].items()), ""]
    every = data["everything"]
    lines += table(["all sub-layers but 0 and 1", "kept", "alpha", "c", "gamma", "promised", "measured"], [
        [name, " ".join(map(str, r["sublayers"])), f"{r['alpha']:.3f}", f"{r['c']:.3f}", str(r["gamma"]),
         f"{r['predicted']:.2f}", f"{r['measured']:.2f}"] for name, r in every["sets"].items()])
    lines += [f"{every['trials']} trials, {every['trials_per_second']:.1f} a second, "
              f"{every['share_in_process']:.0%} of the time in the Gaussian process", ""]
    lines += table(["calibrated on, promised on held-out", *SETS], [
        [name, *(f"{r[other]:.2f}" for other in SETS)] for name, r in data["transfer"].items()])
    return "\n".join(lines).rstrip()
