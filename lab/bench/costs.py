"""What drafting costs on this machine, and what a draft would be worth for any model."""
from tqdm import tqdm

from control import weight_costs
from lab.bench.shared import SETS, figures, forecast, load, page, prompt_ids, table
from layerskip import early_exit
from machine.exact import fast
from search import Teacher
from speculative import generate, rounds
from support.cli import read_skip
from support.measure import measure_costs
from support.stats import compare


def run_costs(a):
    model, _ = load(a)
    if a.fast:
        model = fast(model)
    costs = measure_costs(model, repeats=a.repeats or 100)
    weights = weight_costs(model.c)
    names = [f"{kind} {i}" for i in range(model.c.n_layers) for kind in ("attention", "MLP")]
    parts = zip([*names, "head", "all else"], *((*c.sublayers, c.head, c.call) for c in (costs, weights)),
                strict=True)
    rows = [[name, f"{1e6 * seconds:.0f}", f"{seconds / costs.whole:.4f}", f"{count / weights.whole:.4f}"]
            for name, seconds, count in parts]
    how = "in fast passes, " * a.fast
    lines = [f"one token after 64 others, {how}{a.model}, {a.dtype}; {a.machine}; medians", "",
             *table(["part", "microseconds", "share", "share by weights"], rows),
             *table(["tokens in a block", *(str(T) for T, _ in costs.passes)],
                    [["relative to one token", *(f"{cost:.2f}" for _, cost in costs.passes)]]),
             f"Every 1,000 tokens more before it add {1e9 * costs.slot:.0f} microseconds to an attention."]
    return page(lines), {**vars(costs), "unit": "seconds"}


def against_plain(model, prompts, drafter, new, repeats):
    """(tau, speed relative to plain decoding): drafted and plain in turn, prompt by prompt. drafter():
    a new one."""
    makers = {"plain": lambda: None, "drafted": drafter}
    runs = [compare(lambda d, ids=ids: rounds(model, [ids], new, d, eos=model.c.eos), makers, 1, repeats)
            for ids in prompts]

    def total(name, what):
        return sum(getattr(run[name], what) for run in runs)

    rate = {name: total(name, "tokens") / total(name, "seconds") for name in makers}
    return total("drafted", "tokens") / total("drafted", "passes"), rate["drafted"] / rate["plain"]


def teachers(model, tokenizer, a):
    """The texts to score drafts on: [(Teacher, unscored)], where the first `unscored` positions are left out.
    They are what the model itself writes after the prompts, which is what a draft will meet."""
    c, made = model.c, []
    for name in SETS:
        for ids in prompt_ids(name, tokenizer, c)[: a.quick or 2]:
            ids = ids[: c.max_len // 2]
            (new,), _ = generate(model, [ids], a.new, eos=c.eos)
            made.append((Teacher(model, ids + new), len(ids) - 1))
    return made


def run_help(a):
    return promises(a, *load(a))


def promises(a, model, tokenizer):
    """Alpha, c and what they promise, for every exit or one skip set."""
    L, found = model.c.n_layers, {}
    drafts = {a.skip: read_skip(a.skip, L)} if a.skip else {
        f"exit {e}": early_exit(L, e) for e in range(1, L)}
    texts, costs = teachers(model, tokenizer, a), measure_costs(model)
    for name, subs in tqdm(drafts.items(), disable=None, leave=False):
        series = [t.acceptance(subs)[unscored:] for t, unscored in texts]
        alpha, gamma, gain = forecast(series, costs.step(subs), costs.pass_cost)
        found[name] = {"sublayers": subs, "alpha": alpha, "c": costs.step(subs),
                       "c_weights": weight_costs(model.c).step(subs), "gamma": gamma, "speedup": gain}
    best = max(found, key=lambda name: (found[name]["speedup"], found[name]["alpha"] - found[name]["c"]))
    scored = sum(len(t.p[0]) - unscored for t, unscored in texts)
    said = verdict(a, best, found[best])
    lines = [f"{a.model}, {str(model.tok.dtype)[6:]}; {a.machine}; greedy, {scored} tokens of its own "
             "answers to support/prompts", "", *figures(found.items(), PROMISED, "draft"), said]
    return page(lines), {"drafts": found, "verdict": said}


PROMISED = {"alpha": "{alpha:.3f}", "c": "{c:.3f}", "c by weights": "{c_weights:.3f}",
            "best gamma": "{gamma}", "speed-up promised": "{speedup:.2f}"}


def verdict(a, name, best):
    """One line: the draft that promises most and how to try it, or why there is none."""
    if not best["gamma"]:
        return (f"No gain: {name} comes nearest, alpha {best['alpha']:.2f} against c {best['c']:.2f}. "
                "Try --draft ngram, or search.py")
    flags = f"--skip {name}" if a.skip else f"--exit-layer {name.split()[1]}"
    flags += f" --gamma {best['gamma']} --compare"
    return (f"Worth it: {name} with gamma {best['gamma']} promises {best['speedup']:.2f} times plain "
            f"decoding; try: generate.py --model {a.model} {flags}")
