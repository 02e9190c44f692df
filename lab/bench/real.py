"""What each way to draft gains over plain decoding, by the clock.

    python -m lab.bench real --model runs/smollm --fast
    python -m lab.bench real --model runs/qwen15 --draft-model runs/qwen05 --fast
    python -m lab.bench real --fast --draft "exit --rule lab/rules.py:Thompson" lab/swift.py:SWIFT

A way to draft is a line of generate.py's flags, so that whatever drafts there can be measured here.
Use --fast: a gain over slower plain decoding is no gain.

A drafted text that is not plain decoding's is a bug, and its speed means nothing. With --fast on a
CPU a row of logits has the same bits in every block, so the timed greedy texts are compared
themselves. Elsewhere every way first writes one text of each kind in float64.
"""
import shlex
import statistics
import time
from functools import partial
from itertools import product
from pathlib import Path

import torch
from tqdm import tqdm

import generate
from checkpoint import read_tokenizer
from control import expected_speedup
from drafter import ModelDraft
from lab.bench import llamacpp
from lab.bench.passes import their_text
from lab.bench.shared import Sample, kinds_of, load, page, prompts_of, tables
from layerskip import SelfDraft
from machine.exact import fast
from machine.files import note
from machine.fused import fuse
from machine.quant import ROWS, SHARE, Int4, quantise, quantise_head
from methods import heads
from methods.arms import COPY
from methods.block import verify_block
from methods.costs import by_bytes
from model import Refused
from sampling import Coins, to_probs
from speculative import rounds
from support.stats import Timed

WAYS = {    # what follows --draft in generate.py
    "plain": "none",
    "exit, gamma 1": "exit --gamma 1",
    "n-gram": "ngram",
    "suffix": "suffix",
    "int8, gamma 3": "int8 --gamma 3",
    "int4, gamma 3": "int4 --gamma 3",
    "int4, gamma 5": "int4 --gamma 5"}
HEAD = {"gamma 1": "--gamma 1", "gamma 2": "--gamma 2", "gamma 3": "--gamma 3",
        "tree of 8": "--tree 8"}
SMALL = {
    "small model, gamma 3": "--gamma 3",
    "small model in int4, gamma 3": "--gamma 3 --draft-quant int4",
    "small model in int4, gamma 5": "--gamma 5 --draft-quant int4"}
THEIRS = {"transformers, plain": {},
          "transformers, prompt lookup": {"prompt_lookup_num_tokens": COPY},
          "transformers, assistant_early_exit": {}}
SETTINGS = {    # of to_probs
    "T 0": {}, "T 0.8": {"temperature": 0.8},
    "T 0.7, top-p 0.8, top-k 20": {"temperature": 0.7, "top_p": 0.8, "top_k": 20}}
VARY = "ngram", "suffix", "auto"    # kinds whose drafts are not of one length
SHORT = 8                           # tokens that a way writes to warm up
COLUMNS = {"tokens/s": "{tokens_per_second:.1f}", "ratio to plain": "{ratio:.2f}",
           "±": "{deviation:.2f}", "lowest": "{lowest:.2f}",
           "of the best fixed draft": "{share:.2f}",
           "by the formula": "{predicted:.2f}", "tau": "{tau:.2f}", "alpha": "{alpha:.2f}",
           "by place": "{places}", "of tested": "{tested:.2f}", "bytes": "{bytes:.2f}",
           "by bytes": "{weights:.2f}", "c": "{c:.3f}",
           "block": "{block:.2f}"}      # docs/names.md defines them


@torch.no_grad()
def dither(model):
    """Add noise to each matrix of a model, in place. It is uniform, and as wide as a step of int4.
    Then the weights lie on no grid, as before they were first quantised."""
    g = torch.Generator().manual_seed(0)
    for w in model.parameters():
        if w.dim() == 2:
            for some in w.split(ROWS):
                _, steps, _ = Int4(some).numbers()
                step = steps.float().repeat_interleave(SHARE, 1)[:, : w.shape[1]]
                some += (step * (torch.rand(step.shape, generator=g) - 0.5)).to(w.dtype)


# --- ways to draft


def lines_of(a):
    """{name: what follows --draft in generate.py}, plain decoding first: the usual ways, or those
    that --draft names."""
    if a.draft:
        return {"plain": "none"} | {line.replace(" --", ", "): line for line in a.draft}
    lines = dict(WAYS)
    lines["auto"] = "auto"
    if a.draft_model:
        folder = shlex.quote(a.draft_model)
        lines |= {name: f"{folder} {flags}" for name, flags in SMALL.items()}
        lines["auto"] = f"auto --draft-model {folder} --draft-quant int4"
    for file in sorted(Path(a.heads or f"{a.model}/heads").glob(f"*/{heads.FILE}")):
        folder = shlex.quote(str(file.parent))
        for shape, flags in HEAD.items():
            lines[f"{file.parent.name}, {shape}"] = f"{folder} {flags}"
    return lines


def named(names, words):
    """The names that --only asks for, and plain decoding. Raises ValueError for a word that stands
    in no name."""
    for word in words or ():
        if not any(word in name for name in names):
            raise Refused(f"--only {word!r}: no way to draft has that in its name; here are "
                          f"{'; '.join(names)}")
    return [name for name in names
            if not words or name == "plain" or any(word in name for word in words)]


def options_of(a, line):
    """The options of generate.py with this line after its --draft."""
    return generate.parse(["", "--model", str(a.model), "--draft", *shlex.split(line)])


def with_settings(a, line, settings):
    """The line with the flags that decide what `auto` measures."""
    flags = [f" --{name.replace('_', '-')} {value}" for name, value in settings.items()]
    return line + " --fast" * a.fast + "".join(flags)


def write(model, drafter, probs, ids, seed, new):
    """The Sample of one text."""
    timed = Timed(drafter)
    text = []
    turns = []
    for _, r in rounds(model, [ids], new, timed, probs, Coins(seed), model.c.eos,
                       verify=verify_block):
        text += r.new[0]
        turns.append((int(r.accepted[0]), int(r.proposed[0])))
    return Sample(text, sum(timed.seconds.values()), timed.seconds["draft"], turns)


def ours(model, plan, probs):
    """A way to decode: begin() returns write(ids, seed, new). What the drafter learns lasts until
    the next begin()."""
    return lambda: partial(write, model, plan.make(), probs)


def theirs(a, names, exit_layer):
    """{name: a way to decode} by transformers, greedily, with its own defaults."""
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=getattr(torch, a.dtype))
    model = model.to(a.device)

    @torch.no_grad()
    def ask(flags, ids, seed, new):
        tokens = torch.tensor([ids], device=a.device)
        start = time.perf_counter()
        model(tokens, use_cache=True, logits_to_keep=1).logits.argmax().item()  # waits for a GPU
        reading = time.perf_counter() - start
        start = time.perf_counter()
        text = their_text(model, tokens, new, **flags)[0].tolist()
        return Sample(text, time.perf_counter() - start - reading)

    flags = THEIRS | {"transformers, assistant_early_exit": {"assistant_early_exit": exit_layer}}
    return {name: lambda name=name: partial(ask, flags[name]) for name in names if name in flags}


# --- what is measured


def measure(ways, prompts, new, repeats, title=""):
    """{name: the Samples of each prompt}, of all ways in turn, prompt by prompt."""
    samples = {name: [[] for _ in prompts] for name in ways}
    for _ in range(repeats):
        writers = {name: begin() for name, begin in ways.items()}
        for i, ids in enumerate(tqdm(prompts, title, disable=None)):
            for name, writer in writers.items():
                samples[name][i].append(writer(ids, i, new))
    return samples


def check_texts(texts, where):
    """Raises RuntimeError where a greedy text is not plain decoding's."""
    for name, text in texts.items():
        if text != texts["plain"]:
            raise RuntimeError(f"{name} differs from plain decoding {where}")


def check_in_double(a, options, tokenizer, prompts):
    """Every way writes the first text of each kind in float64, where no rounding explains another
    text."""
    model = opened(a, "float64")
    found = {name: generate.plan_of(some, model, tokenizer) for name, some in options.items()}
    for kind, (ids, *_) in prompts.items():
        check_texts({name: write(model, plan.make(), to_probs, ids, 0, a.new).ids
                     for name, plan in found.items()}, f"on {kind} in float64")


def table_of(a, model, found, others, prompts, probs, title):
    """{name: row} of all ways to decode on prompts of one kind."""
    # what a GPU has not recorded by then is eager
    model.rehearse(lambda: [write(model, drafter, probs, prompts[0], 0, a.new)
                            for plan in found.values()
                            for drafter in (plan.make(), *plan.parts())])
    ways = {name: ours(model, plan, probs) for name, plan in found.items()} | others
    samples = measure(ways, prompts, a.new, a.repeats or 1, title)
    return {name: row(runs, samples["plain"]) for name, runs in samples.items()}


def rate(samples):
    return statistics.median(len(s.ids) / s.seconds for s in samples)


def row(runs, plain):
    """The figures of one way, from the Samples of each prompt. The ratio is a geometric mean over
    the prompts, so that the quotient of two rows is one of paired ratios."""
    samples = sum(runs, [])
    ratios = [rate(some) / rate(others) for some, others in zip(runs, plain, strict=True)]
    r = {"tokens_per_second": rate(samples), "ratio": statistics.geometric_mean(ratios),
         "deviation": statistics.stdev(ratios) if len(ratios) > 1 else None,
         "lowest": min(ratios), "ratios": ratios, "texts": [some[0].ids for some in runs]}
    turns = [turn for s in samples for turn in s.rounds]
    if turns:
        r["tau"] = sum(len(s.ids) for s in samples) / len(turns)
    most = max((proposed for _, proposed in turns), default=0)
    if most:
        tested = [sum(min(n, k + 1) > i for k, n in turns) for i in range(most)]
        kept = [sum(k > i for k, _ in turns) for i in range(most)]
        r["alpha"] = kept[0] / tested[0]
        r["tested"] = sum(kept) / sum(tested)       # what the formula takes for every place
        r["places"] = " / ".join(f"{k / n:.2f}" for k, n in zip(kept, tested, strict=True) if n)
        r["c"], r["block"] = prices(samples, sum(plain, []))
    return r


def shared(rows, options):
    """Adds to each row of `auto` its share of what the best fixed draft reaches."""
    fixed = [rows[name]["ratio"] for name, how in options.items() if how.source != "auto"]
    for name, how in options.items():
        if how.source == "auto":
            rows[name]["share"] = rows[name]["ratio"] / max(fixed)


def prices(samples, plain):
    """(what a drafted token takes, what the rest of a round takes), in rounds of plain decoding."""
    one = sum(s.seconds for s in plain) / sum(len(s.rounds) for s in plain)
    drafting = sum(s.drafting for s in samples)
    proposed = sum(n for s in samples for _, n in s.rounds)
    rest = sum(s.seconds for s in samples) - drafting
    return drafting / proposed / one, rest / sum(len(s.rounds) for s in samples) / one


def promised(model, plan, r):
    """What of a fixed draft is known by bytes, and what the formula makes of its alpha, c and
    block."""
    how = plan.options
    if not how.gamma or how.rule or how.tree or how.source in VARY or "c" not in r:
        return {}
    found = {"predicted": expected_speedup(r["tested"], how.gamma, r["c"], r["block"])}
    drafter = plan.make()
    if type(drafter) in (SelfDraft, ModelDraft):
        machine = by_bytes(drafter.model)
        subs = drafter.sublayers or range(2 * drafter.model.c.n_layers)
        read = machine.draft(subs, drafter.model.share).start * machine.unit
        found["bytes"] = read / by_bytes(model).unit
    elif hasattr(drafter, "head"):
        found["bytes"] = heads.drafting(drafter.head, by_bytes(model)).start
    if found.get("bytes"):
        found["weights"] = r["tau"] / (1 + how.gamma * found["bytes"])
    return found


def opened(a, dtype):
    model, _ = load(a, dtype)
    if a.dither:
        dither(model)
    if a.quant:     # as generate.py --quant has it
        model = quantise(model, a.quant)
        quantise_head(model)
    return model


def run(a):
    lines = lines_of(a)
    names = named([*lines, *((*THEIRS, *llamacpp.NAMES) if a.only else ())], a.only)
    lines = {name: line for name, line in lines.items() if name in names}
    options = {name: options_of(a, with_settings(a, line, {})) for name, line in lines.items()}
    others = {}
    if set(names) & set(llamacpp.NAMES):
        others |= llamacpp.ways(a, names)
    tokenizer = read_tokenizer(Path(a.model))
    prompts = {kind: prompts_of(a, kind, tokenizer) for kind in kinds_of(a)}
    model = fuse(opened(a, a.dtype))
    if set(names) & set(THEIRS):
        others |= theirs(a, names, max(1, model.c.n_layers // 6))
    model = fast(model) if a.fast else model
    bits = model.replays() and not model.tok.is_cuda
    if not bits:
        check_in_double(a, options, tokenizer, prompts)
    found = {name: generate.plan_of(some, model, tokenizer) for name, some in options.items()}
    measure({name: ours(model, plan, to_probs) for name, plan in found.items()} | others,
            next(iter(prompts.values()))[:1], SHORT, 1)         # a warm-up
    began = time.perf_counter()
    results = {}
    stored = {}     # {settings: {way: {kind: its row}}}, as lab/figures.py reads it
    for how, kind in product(SETTINGS, prompts):
        title = f"{Path(kind).stem}, {how}"
        settings = SETTINGS[how]
        if settings and kind == next(iter(prompts)):    # auto measures at the run's settings
            for name in [name for name, some in options.items() if some.source == "auto"]:
                del found[name]     # its copy of the model first
                found[name] = generate.plan_of(
                    options_of(a, with_settings(a, lines[name], settings)), model, tokenizer)
        probs = partial(to_probs, **settings)
        rows = table_of(a, model, found, {} if settings else others, prompts[kind], probs, title)
        if bits and not settings:
            check_texts({name: rows[name]["texts"] for name in found}, f"on {kind}")
        shared(rows, options)
        for name, r in rows.items():
            del r["texts"]
            if name in found:
                r |= promised(model, found[name], r)
            stored.setdefault(how, {}).setdefault(name, {})[Path(kind).stem] = r
        results[title] = rows
        gains = ", ".join(f"{name} {r['ratio']:.2f}" for name, r in rows.items())
        note("real", f"{title}, after {time.perf_counter() - began:.0f} s: {gains}")
    head = [f"{a.model}, {a.dtype}; {a.machine}; torch {torch.__version__}; batch 1, up to {a.new} "
            f"new tokens, {a.repeats or 1} interleaved runs: medians, of ratios the geometric mean "
            "over the prompts; every greedy text of ours is plain decoding's "
            f"{'to the bit' if bits else 'in float64 on the first prompt of each kind'}", ""]
    if a.dither:
        head += ["The target's weights got noise as wide as a step of int4.", ""]
    if a.quant:
        head += [f"The target is quantised: {a.quant}, and its head int8.", ""]
    return page(head + tables(results, COLUMNS)), {"results": stored}
