"""What each part of a pass costs on this machine, and the speed of a draft over plain decoding."""
from control import weight_costs
from lab.bench.shared import load, page, table
from machine.exact import fast
from speculative import rounds
from support.measure import measure_costs
from support.stats import compare


def run_costs(a):
    model, _ = load(a)
    if a.fast:
        model = fast(model)
    costs = measure_costs(model, repeats=a.repeats or 100)
    weights = weight_costs(model.c)
    names = [f"{kind} {i}" for i in range(model.c.n_layers) for kind in ("attention", "MLP")]
    parts = zip([*names, "head", "all else"],
                *((*c.sublayers, c.head, c.call) for c in (costs, weights)), strict=True)
    rows = [[name, f"{1e6 * seconds:.0f}", f"{seconds / costs.whole:.4f}",
             f"{count / weights.whole:.4f}"]
            for name, seconds, count in parts]
    how = "in fast passes, " * a.fast
    lines = [f"one token after 64 others, {how}{a.model}, {a.dtype}; {a.machine}; medians", "",
             *table(["part", "microseconds", "share", "share by weights"], rows),
             *table(["tokens in a block", *(str(T) for T, _ in costs.passes)],
                    [["relative to one token", *(f"{cost:.2f}" for _, cost in costs.passes)]]),
             f"Every 1,000 tokens more before it add {1e9 * costs.slot:.0f} microseconds to an "
             "attention."]
    return page(lines), {**vars(costs), "unit": "seconds"}


def against_plain(model, prompts, drafter, new, repeats):
    """(tau, speed relative to plain decoding), drafted and plain in turn, prompt by prompt.
    drafter() makes a new one."""
    makers = {"plain": lambda: None, "drafted": drafter}
    runs = [compare(lambda d, ids=ids: rounds(model, [ids], new, d, eos=model.c.eos), makers, 1,
                    repeats)
            for ids in prompts]

    def total(name, what):
        return sum(getattr(run[name], what) for run in runs)

    rate = {name: total(name, "tokens") / total(name, "seconds") for name in makers}
    return total("drafted", "tokens") / total("drafted", "passes"), rate["drafted"] / rate["plain"]
