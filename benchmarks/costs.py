"""What drafting costs on this machine, and what a draft would be worth for any model.

The one thing to remember: alpha comes from one pass over a text and c from a stopwatch or from the bytes of
the weights; nothing has to be decoded to know whether alpha > c.
"""

from pathlib import Path

import torch
from tqdm import tqdm

import checkpoint
from benchmarks.shared import SETS, forecast, read_prompts, table
from control import measure_costs, weight_costs
from layerskip import Teacher, early_exit
from sampling import to_probs
from speculative import generate
from support.cli import read_skip
from support.files import read_text

# --- costs


def run_costs(a):
    model, _ = checkpoint.load(a.model, a.device, getattr(torch, a.dtype))
    costs, bytes_ = measure_costs(model, repeats=a.repeats or (20 if a.quick else 100)), weight_costs(model.c)
    rows = [
        [name, f"{1e6 * seconds:.0f}", f"{seconds / costs.whole:.4f}", f"{size / bytes_.whole:.4f}"]
        for name, seconds, size in [
            *(
                (f"{'MLP' if i % 2 else 'attention'} {i // 2}", s, b)
                for i, (s, b) in enumerate(zip(costs.sublayers, bytes_.sublayers, strict=True))
            ),
            ("head", costs.head, bytes_.head),
        ]
    ]
    lines = [f"one token behind 64 others, {a.model}, {a.dtype}; {a.machine}; medians", ""]
    lines += table(["part", "microseconds", "share", "share by bytes"], rows)
    data = {"model": str(a.model), "sublayers": costs.sublayers, "head": costs.head, "unit": "seconds"}
    return "\n".join(lines).rstrip(), data, None


# --- will it help?


def teachers(model, tokenizer, a, probs=to_probs):
    """The texts to score drafts on, as Teachers, and how many of their first tokens to leave out: those of
    --text; or what the model itself goes on to say behind the prompts, which is what a draft will meet."""
    if a.text:
        ids = checkpoint.encode(tokenizer, read_text(Path(a.text)), model.c.bos)
        size = min(512, model.c.max_len)
        return [(Teacher(model, ids[i : i + size], probs), 0) for i in range(0, min(len(ids), 2048), size)]
    made = []
    for name in SETS:
        for line in read_prompts(name)[: 1 if a.quick else 2]:
            ids = checkpoint.encode(tokenizer, line["prompt"], model.c.bos)[: model.c.max_len // 2]
            (new,), _ = generate(model, [ids], a.new, probs=probs, eos=model.c.eos)
            made.append((Teacher(model, ids + new, probs), len(ids) - 1))
    return made


def run_help(a):
    """Alpha, c and what they promise, for every exit or one skip set."""
    model, tokenizer = checkpoint.load(a.model, a.device, getattr(torch, a.dtype))
    L = model.c.n_layers
    exits = range(1, L) if a.exit_layer is None else [a.exit_layer]
    drafts = (
        {a.skip: read_skip(a.skip, L)}
        if a.skip
        else {f"exit {e}": early_exit(L, e) for e in exits}
    )
    texts, bytes_ = teachers(model, tokenizer, a), weight_costs(model.c)
    costs, rows, found = measure_costs(model, repeats=20 if a.quick else 50), [], {}
    for name, subs in tqdm(drafts.items(), disable=None, leave=False):
        alphas = [t.acceptance(subs)[skip:] for t, skip in texts]
        c = costs.c(subs)
        alpha, gamma, gain = forecast(alphas, c)
        found[name] = {
            "sublayers": subs,
            "alpha": alpha,
            "c": c,
            "c_bytes": bytes_.c(subs),
            "gamma": gamma,
            "speedup": gain,
        }
        rows.append([name, f"{alpha:.3f}", f"{c:.3f}", f"{bytes_.c(subs):.3f}", f"{gamma}", f"{gain:.2f}"])
    name, best = max(found.items(), key=lambda item: (item[1]["speedup"], item[1]["alpha"] - item[1]["c"]))
    flags = f"--skip {name}" if a.skip else f"--exit-layer {name.split()[1]}"
    verdict = (
        f"Worth it: {name} with gamma {best['gamma']} promises {best['speedup']:.2f} times plain "
        f"decoding; try: generate.py --model {a.model} {flags} --gamma {best['gamma']} --compare"
        if best["gamma"]
        else f"No gain: alpha exceeds c nowhere; {name} comes nearest, alpha {best['alpha']:.2f} against c "
        f"{best['c']:.2f}. Try --draft ngram, or search.py"
    )
    count = sum(len(t.p[0]) - skip for t, skip in texts)
    lines = [
        f"{a.model}, {a.dtype}; {a.machine}; greedy, {count} tokens of "
        f"{a.text or 'its own answers to benchmarks/prompts'}",
        "",
    ]
    lines += table(["draft", "alpha", "c", "c by bytes", "best gamma", "speed-up promised"], rows)
    return "\n".join([*lines, verdict]), {"drafts": found, "verdict": verdict}, None
