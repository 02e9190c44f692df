"""What a quantised model is worth as a draft, and as a target with a small assistant. It takes less
memory, but less time only where a product reads the quantised weights directly."""
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

import control
from drafter import ModelDraft
from lab.bench.costs import against_plain
from lab.bench.plain import step
from lab.bench.shared import LLAMA, SETS, SHAPES, WEIGHTS, figures, load, page, prompt_ids, table
from layerskip import SelfDraft, early_exit
from machine.quant import KINDS, byte_costs, quantise, size
from model import Placement
from search import Teacher
from speculative import generate
from support.measure import interleave, measure_costs

GAMMA, MEGABYTE = 3, 1e6
# of a weight; int8 without its scales
BITS = {"bfloat16": 16, "int8": 8, "int4": 4 + 2 * 16 / 32, "nf4": 4 + 8 / 64 + 32 / (64 * 256)}
# 70B
LARGE = replace(LLAMA, dim=8192, n_layers=80, n_heads=64, head_dim=128, hidden_dim=28672,
                tied=False)
READS = 3.35e12  # bytes a second: an H100's memory, by NVIDIA's data sheet
# seconds for all devices to add up a few kilobytes: assumed, a good case and a usual one
SUMS = 1e-5, 5e-5


# --- measured


def copies(model):
    """{name: (model, sub-layers)}: drafts in few bits, whole and left half way,
    beside the plain exit."""
    half, every = early_exit(model.c.n_layers, model.c.n_layers // 2), range(2 * model.c.n_layers)
    found = {f"exit {model.c.n_layers // 2}": (model, half)}
    for kind in KINDS:
        twin = quantise(model, kind, head=kind, rounds=True)
        found |= {kind: (twin, every), f"{kind}, exit {model.c.n_layers // 2}": (twin, half)}
    return found


def teachers(model, tokenizer, a):
    """The texts to score drafts on, as [(Teacher, unscored)], where the first `unscored` positions
    are left out. The model itself wrote them after the prompts, as it does when
    a draft meets them."""
    c = model.c
    made = []
    for name in SETS:
        for ids in prompt_ids(name, tokenizer, c)[: a.quick or 2]:
            ids = ids[: c.max_len // 2]
            (new,), _ = generate(model, [ids], a.new, eos=c.eos)
            made.append((Teacher(model, ids + new), len(ids) - 1))
    return made


def acceptance(teacher, draft, subs):
    """How likely the first drafted token after each position of the teacher's text is accepted,
    where the draft is a model of its own. (T,) float64"""
    with torch.inference_mode():
        x = draft.run(draft.embed(teacher.tokens), Placement.span(0, teacher.p.shape[1]),
                      sublayers=subs)
        return teacher.overlap(teacher.probs(draft.unembed(x)))


def measure(a, model, tokenizer, drafts, owns):
    """{name: what was found} of each draft, {name: (model, sub-layers)}, of one target. owns:
    {name: bytes} that a draft takes which is a model of its own; the others are
    the target's own sub-layers."""
    texts, every = teachers(model, tokenizer, a), range(2 * model.c.n_layers)
    prompts = [prompt_ids(name, tokenizer, model.c)[0] for name in SETS]
    repeats, whole, rows = a.repeats or 3, byte_costs(model).whole, {}
    verify_cost = measure_costs(model, repeats=10 * repeats).pass_cost(GAMMA + 1)
    clock = interleave({name: step(m, 1, 64, subs) for name, (m, subs) in (
        {"target": (model, every)} | drafts).items()}, 10 * repeats)
    for name, (draft, subs) in tqdm(drafts.items(), disable=None, leave=False):
        series = [acceptance(t, draft, subs)[unscored:] for t, unscored in texts]
        own = byte_costs(draft)
        by_bytes, by_clock = own.step(subs) * own.whole / whole, clock[name] / clock["target"]
        make = partial(SelfDraft, draft, subs, GAMMA)
        if draft.c != model.c:
            make = partial(ModelDraft, draft, GAMMA, subs)
        tau, speed = against_plain(model, prompts, make, a.new, repeats)
        expected = control.expected_tokens_along(series, GAMMA)
        rows[name] = {"alpha": float(torch.cat(series).mean()),
                      "megabytes": owns.get(name, 0) / MEGABYTE,
                      "c_bytes": by_bytes, "c_clock": by_clock, "tau": tau,
                      "tau_predicted": expected, "speed": speed,
                      "speed_bytes": expected / control.round_cost(GAMMA, by_bytes),
                      "speed_clock": expected / control.round_cost(GAMMA, by_clock, verify_cost)}
    return rows


COLUMNS = {"alpha": "{alpha:.3f}", "tau, predicted": "{tau_predicted:.2f}", "tau": "{tau:.2f}",
           "more MB": "{megabytes:.1f}", "c by bytes": "{c_bytes:.3f}",
           "c by the clock": "{c_clock:.3f}",
           "speed-up by bytes": "{speed_bytes:.2f}", "by the clock": "{speed_clock:.2f}",
           "measured": "{speed:.2f}"}


def measured(a):
    """{target: (its bytes, {draft: what was found})}. For the default model
    both that are shipped."""
    found, folders = {}, [Path(a.model)]
    if folders[0].resolve() == WEIGHTS / "stories-llama":
        folders.append(WEIGHTS / "stories-gemma2")
    for folder in folders:
        model, tokenizer = load(a, folder=folder)
        drafts = copies(model)
        owns = {name: size(draft.blocks) + size(draft.head)
                for name, (draft, _) in drafts.items() if draft is not model}
        found[folder.name] = size(model), measure(a, model, tokenizer, drafts, owns)
        small, other = load(a, folder=WEIGHTS / "stories-draft")
        for kind in KINDS if other.get_vocab() == tokenizer.get_vocab() else ():
            target = quantise(model, kind)
            assistant = {"stories-draft": (small, range(2 * small.c.n_layers))}
            found[f"{folder.name} in {kind}"] = size(target), measure(
                a, target, tokenizer, assistant, {"stories-draft": size(small)})
    return found


# --- on paper


def paper_bytes(c, kind="bfloat16"):
    """(bytes of the blocks, bytes of the head, bytes of the whole model) with its
    blocks in few bits."""
    costs = control.weight_costs(c)
    blocks, head = sum(costs.sublayers) * BITS[kind] / 8, 2 * costs.head
    return blocks, head, blocks + head * (1 if c.tied else 2)


def paper_table():
    """For each shape: memory, the c of a copy in few bits, and what it gains at most
    if alpha is .9."""
    head, rows = ["model", *(f"GB in {kind}" for kind in BITS)], []
    head += [f"{what} of {kind}" for kind in KINDS
             for what in ("c", "best gamma at alpha .9", "speed-up")]
    for name, c in SHAPES.items():
        row = [name, *(f"{paper_bytes(c, kind)[2] / 1e9:.1f}" for kind in BITS)]
        whole = paper_bytes(c)
        for kind in KINDS:
            cost = sum(paper_bytes(c, kind)[:2]) / sum(whole[:2])
            gamma = control.best_gamma(0.9, cost, control.MOST)
            row += [f"{cost:.2f}", f"{gamma}", f"{control.expected_speedup(0.9, gamma, cost):.2f}"]
        rows.append(row)
    small, large = paper_bytes(SHAPES["TinyLlama 1.1B"]), paper_bytes(SHAPES["Llama 2 13B"], "nf4")
    seed = (f"Llama 2 13B in nf4 with TinyLlama in bfloat16: {(small[2] + large[2]) / 1e9:.1f} GB "
            f"together, c by bytes {sum(small[:2]) / sum(large[:2]):.2f}")
    return [*table(head, rows), seed, ""]


def run(a):
    found = measured(a)
    rows = [(f"{target}, {weight / MEGABYTE:.1f} MB; {name}", row)
            for target, (weight, drafts) in found.items() for name, row in drafts.items()]
    lines = [f"{a.dtype}; gamma {GAMMA}; {a.machine}", "", *figures(rows, COLUMNS, "target; draft"),
             "On paper, by bytes alone, with products that read few bits as they are (here int8 "
             "and int4 have one for few rows on a CPU); a pass reads all blocks and the head once:",
             "", *paper_table()]
    return page(lines), {"models": {target: drafts for target, (_, drafts) in found.items()}}
