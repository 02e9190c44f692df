"""One command for the day a GPU is there: what the machine can do, and what is made of it."""
import json
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import checkpoint
from control import expected_speedup, weight_costs
from lab.bench.plain import agree, step
from lab.bench.shared import GEMMA, LLAMA, SHAPES, WEIGHTS, figures, page, random_model, read_prompts
from layerskip import SelfDraft, early_exit
from speculative import NGram, generate, rounds
from support import cli
from support.files import read_json, write_file
from support.measure import interleave
from support.stats import compare

NAMES = "Llama 3.2 1B", "Llama 3.1 8B", "Gemma-2 2B", "Gemma-2 9B"
SMALL = dict(vocab_size=64, dim=32, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=8, hidden_dim=48,
             max_len=64)
TINY = {"tiny Llama": replace(LLAMA, **SMALL), "tiny Gemma-2": replace(GEMMA, **SMALL, window=9)}
WIDTHS, GAMMA, REPEATS = (1, 2, 3, 4, 5, 6, 8, 16, 64), 4, 5


# --- what is measured: each function returns {row: {column: number}}


def constants(device, tiny):
    """What bounds everything else."""
    n, side, calls = (2**12, 16, 2) if tiny else (2**30, 8192, 1000)
    # trap: zeros are multiplied faster, as a GPU that has less to switch runs at a higher clock
    noise = partial(torch.randn, dtype=torch.bfloat16, device=device)
    x, square, small = noise(n // 2), noise(side, side), noise(2048)

    def adds():
        for _ in range(calls):
            small.add_(1)

    work = {"read": (8 * n, "bytes", lambda: [x.sum() for _ in range(8)]),
            "product": (2 * side**3, "operations", lambda: square @ square),
            "launch": (calls, "launches", adds),
            "wait": (calls, "waits", lambda: [small[0].item() for _ in range(calls)])}
    s = interleave({name: action for name, (_, _, action) in work.items()}, REPEATS)
    return {name: {"unit": unit, "per second": size / s[name], "microseconds": 1e6 * s[name] / size}
            for name, (size, unit, _) in work.items()}


def shape(device, tiny, c, read):
    """What a block of T tokens costs, and a drafted step, relative to one token through the whole model; and
    plain and self-speculative decoding of the same text. read: bytes a second that the device reads."""
    # the later three quarters of the blocks say little, so that an early exit often agrees: the acceptance is
    # planted, the work is that of a trained model
    model, L, count = random_model(c, torch.bfloat16, device=device), c.n_layers, 8 if tiny else 128
    for b in model.blocks[L // 4 :]:
        b.attn.wo.mul_(0.1)
        b.mlp.down.mul_(0.1)
    ids = torch.randint(c.vocab_size, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    exits = {f"a step of exit {e}": early_exit(L, e) for e in sorted({max(1, L // n) for n in (8, 4, 2)})}
    s = interleave({f"a pass over {T}": step(model, T, count) for T in WIDTHS}
                   | {key: step(model, 1, count, subs) for key, subs in exits.items()}, 4 * REPEATS)
    rows = {key: {"ms": 1e3 * s[key], "relative": s[key] / s["a pass over 1"]} for key in s}
    for key, subs in exits.items():
        rows[key]["by weights"] = weight_costs(c).step(subs)
    context = L * c.n_kv_heads * c.head_dim * 1.5 * count      # keys, and as many values, half way
    bound, e = 2 * (weight_costs(c).whole + 2 * context) / read, L // 4
    drafters = {"plain": lambda: None, f"exit {e}": partial(SelfDraft, model, early_exit(L, e), GAMMA)}
    found = decoded(model, ids, drafters, count)
    for row in found.values():
        row["share of the bound"] = bound * row["tokens/s"]
    cost = rows[f"a step of exit {e}"]["relative"]
    found[f"promised for exit {e} at alpha .8"] = {"times plain": expected_speedup(0.8, GAMMA, cost)}
    return rows | found


def decoded(model, ids, drafters, new):
    """{name: speed, and how far its text is that of plain decoding} of `new` tokens with each drafter, {name:
    make()}; one of them is "plain"."""
    runs = compare(lambda drafter: rounds(model, [ids], new, drafter), drafters, 1, REPEATS)
    plain = runs["plain"]
    return {name: {"tokens/s": run.rate, "tokens a pass": run.tokens / run.passes,
                   "times plain": run.rate / plain.rate,
                   "as plain": agree(run.outputs[0], plain.outputs[0]), "text": run.outputs[0]}
            for name, run in runs.items()}


def shipped(device, tiny, name):
    """A trained model end to end in both dtypes: its speed, and how far its texts are those of plain decoding
    and of float32 on the CPU."""
    rows, count = {}, 8 if tiny else 128
    for dtype in (torch.float32, torch.bfloat16):
        model, tokenizer = checkpoint.load(WEIGHTS / name, device, dtype)
        ids = checkpoint.encode(tokenizer, read_prompts("stories")[0]["prompt"], model.c.bos)
        if not rows:
            (truth,), _ = generate(checkpoint.load(WEIGHTS / name, "cpu", dtype)[0], [ids], count)
        L = model.c.n_layers
        subs = cli.read_beside(WEIGHTS / name / "skip.json", cli.read_skip, L)
        drafts = {"exit": early_exit(L, max(1, L // 4))} | ({"skip set": subs} if subs else {})
        drafters = {"plain": lambda: None, "n-gram": lambda: NGram(8, 3)}
        drafters |= {way: partial(SelfDraft, model, kept, GAMMA) for way, kept in drafts.items()}
        for way, row in decoded(model, ids, drafters, count).items():
            row["as float32 on the CPU"] = agree(row["text"], truth)
            rows[f"{way}, {str(dtype)[6:]}"] = row
    return rows


def parts(device, tiny, found):
    """{name: what measures it}, in this order: all but the first need the first."""
    shapes = TINY if tiny else {name: SHAPES[name] for name in NAMES}
    todo = {"constants": partial(constants, device, tiny)}
    for name, c in shapes.items():
        todo[name] = lambda c=c: shape(device, tiny, c, found["constants"]["read"]["per second"])
    for name in ["stories-draft"] if tiny else ["stories-llama", "stories-gemma2"]:
        todo[name] = partial(shipped, device, tiny, name)
    return todo


def shown(name, rows):
    """The lines of one part."""
    kinds = {key: type(value) for row in rows.values() for key, value in row.items() if key != "text"}
    columns = {key: f"{{{key}:.3g}}" if kind is float else f"{{{key}}}" for key, kind in kinds.items()}
    return [f"**{name}**", "", *figures(rows.items(), columns)]


def run(a):
    """The parts that --out lacks. Each is written as soon as it is measured."""
    if not a.out:
        raise ValueError("gpu needs --out: what is measured is kept there, part by part")
    head, file = {"machine": a.machine, "tiny": bool(a.quick)}, Path(f"{a.out}.json")
    kept = read_json(file) if file.exists() else head | {"parts": {}}
    wrong = next((key for key in head if kept.get(key) != head[key]), None)
    if wrong:
        raise ValueError(f"{file} is of a run with another {wrong}: name another --out")
    found, lines, failed = kept["parts"], [], 0
    for name, measure in parts(torch.device(a.device), a.quick, found).items():
        try:
            found[name] = found.get(name) or measure()
        except Exception:  # whatever one part meets, the others can still be measured
            traceback.print_exc()
            failed = 1
            continue
        write_file(file, json.dumps(kept, indent=1) + "\n")
        lines += shown(name, found[name])
    return page(lines), head | {"parts": found, "status": failed}
