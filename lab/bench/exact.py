"""What `--exact` promises and costs. It counts how many texts stay the same to the bit when
something else changes, and how long they take.

With --prompts N it counts as the tests of engines do. How many of N drafted texts equal plain
decoding's, with --exact and without? (The test of EAGLE in vLLM asks for 60 of 100 greedy
texts.) All texts run the race, so that a sampled text has the same noise with every draft, and only
rounding can change it.
"""
import statistics
from functools import partial
from time import perf_counter

import torch
from tqdm import tqdm

import checkpoint
from kvcache import KVCache
from lab.bench.shared import ROOT, SETS, load, page, prompt_ids, table
from lab.train_heads import ask
from layerskip import SelfDraft, early_exit
from machine.exact import exactly, fast
from machine.quant import quantise
from methods.pace import COPY
from methods.suffix import Suffix
from model import SPARE
from sampling import Coins, Race, to_probs
from speculative import rounds
from support.chat import read_template
from support.drafts import trained_beside
from support.stats import Stopwatch
from support.texts import read_texts

PROBS = {"greedy": to_probs, "T 0.8": partial(to_probs, temperature=0.8, top_p=0.95)}
INSTRUCTIONS = ROOT / "lab" / "prompts" / "instructions.jsonl"
MORE = 64, 100      # slots that another cache has more
BLOCKS = 3, 5, 7    # tokens of a block: a draft, and the token before it


def usual_coins(seeds):
    """What texts draw from without --exact. In a batch all draw from the same coins."""
    return Coins(seeds[0])


def write(model, coins, probs, prompts, seeds, new, slots, drafter=None):
    """([(ids, their rows of logits)] of each prompt, seconds since the prompts were read), in a
    cache of so many slots. `coins` is Race, or `usual_coins`."""
    cache = KVCache(model.c, len(prompts), slots, model.attention_dtype(), model.tok.device)
    found = [([], []) for _ in prompts]
    watch = Stopwatch(drafter)
    for _, r in rounds(model, prompts, new, watch, probs, coins(seeds), cache=cache):
        for b, (ids, logits) in enumerate(found):
            ids += r.new[b]
            logits += r.logits[b, : len(r.new[b])]
    return found, perf_counter() - watch.now


def alone(model, coins, probs, prompts, new, slots, draft=lambda model: None):
    """What `write` returns, each prompt by itself. draft(model) makes a drafter."""
    texts = [write(model, coins, probs, [ids], [seed], new, slots, draft(model))
             for seed, ids in enumerate(prompts)]
    return [text for (text,), _ in texts], sum(seconds for _, seconds in texts)


def on_one_thread(way, *args):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return way(*args)
    finally:
        torch.set_num_threads(threads)


def changes(prompts, new, L):
    """{what is changed: way(model, coins, probs), which writes}. The first changes nothing."""
    slots = max(map(len, prompts)) + new + SPARE
    texts = dict(prompts=prompts, new=new)
    exit_ = early_exit(L, max(1, L // 4))
    plain = partial(alone, **texts, slots=slots)
    found = {"nothing": plain,
             "drafted by an exit": partial(plain, draft=lambda model: SelfDraft(model, exit_, 3)),
             "drafted by lookup": partial(plain, draft=lambda model: Suffix(5))}
    for T in BLOCKS:
        found[f"in blocks of {T}"] = partial(
            plain, draft=lambda model, T=T: SelfDraft(model, exit_, T - 1))
    found["in a batch of four"] = partial(write, **texts, slots=slots, seeds=[*range(len(prompts))])
    found["on one thread"] = partial(on_one_thread, plain)
    for n in MORE:
        found[f"in a cache of {n} slots more"] = partial(plain, slots=slots + n)
    return found


def opening(a, model, tokenizer):
    """The first a.prompts instructions as ids, in the chat template if there is one."""
    texts = read_texts(INSTRUCTIONS, "prompt", "\n")[: a.prompts]
    if len(texts) < a.prompts:
        raise ValueError(f"--prompts {a.prompts}: there are only {len(texts)} instructions")
    try:
        read_template(a.model)
    except ValueError:      # a base model
        return [checkpoint.encode(tokenizer, text, model.c.bos) for text in texts]
    return ask(a.model, tokenizer, texts)


def drafts(folder, model, twin):
    """{name: make(), a drafter}: lookup, the model itself in int4, and the heads beside it."""
    rough = model.alongside(twin)
    every = range(2 * model.c.n_layers)
    found = {"lookup": lambda: Suffix(COPY), "itself in int4": lambda: SelfDraft(rough, every, 3)}
    for head in trained_beside(folder, model):
        found[head.kind] = partial(head.drafter, min(3, head.price.longest), None)
    return found


def same_texts(model, prompts, new, makers):
    """{(draft, temperature): how many texts equal plain decoding's}"""
    counts = {(draft, name): 0 for draft in makers for name in PROBS}
    for name, probs in PROBS.items():
        for seed, ids in enumerate(tqdm(prompts, name, disable=None, leave=False)):
            def text(drafter, ids=ids, seed=seed, probs=probs):
                slots = len(ids) + new + SPARE
                (found,), _ = write(model, Race, probs, [ids], [seed], new, slots, drafter)
                return found[0]

            want = text(None)
            for draft, make in makers.items():
                counts[draft, name] += text(make()) == want
    return counts


def run_prompts(a):
    model, tokenizer = load(a)
    prompts = opening(a, model, tokenizer)
    twin = quantise(model, "int4", head="int4", rounds=True)
    usual = fast(model) if a.fast else model
    modes = {"without --exact": usual, "with --exact": exactly(model, a.fast)}
    cells = {}
    counts = {}
    for mode, one in modes.items():
        found = same_texts(one, prompts, a.new, drafts(a.model, one, twin))
        for (draft, name), count in found.items():
            cells.setdefault(draft, []).append(f"{count} of {len(prompts)}")
            counts[f"{draft}, {name}, {mode}"] = count
    words = (f"{a.model}, {a.dtype}; {a.machine}; in {'fast' if a.fast else 'eager'} passes: how "
             f"many of {len(prompts)} drafted texts of {a.new} tokens equal plain decoding's")
    titles = [f"{name}, {mode}" for mode in modes for name in PROBS]
    rows = [[draft, *row] for draft, row in cells.items()]
    return page([words, "", *table(["draft", *titles], rows)]), {"counts": counts}


def over_usual(way, exact, usual, probs, repeats):
    """The time that a way takes with --exact, relative to without, as medians of runs in turn after
    a warm-up. Greedily nothing depends on the race, and generate.py leaves it out."""
    coins = usual_coins if probs is to_probs else Race
    seconds = []
    for _ in range(repeats + 1):
        _, mine = way(exact, coins, probs)
        _, theirs = way(usual, usual_coins, probs)
        seconds.append((mine, theirs))
    mine, theirs = zip(*seconds[1:], strict=True)
    return statistics.median(mine) / statistics.median(theirs)


def run(a):
    if a.prompts:
        return run_prompts(a)
    model, tokenizer = load(a)
    prompts = [prompt_ids(kind, tokenizer, model.c)[0] for kind in SETS]
    usual = fast(model) if a.fast else model
    exact = exactly(model, a.fast)
    ways = changes(prompts, a.new, model.c.n_layers)
    lines = {}
    counts = []
    cost = {}
    for name, probs in PROBS.items():
        want, _ = ways["nothing"](exact, Race, probs)

        def compare(what, got, name=name, want=want):
            """Add the cells of one change."""
            texts = [x[0] == y[0] for x, y in zip(got, want, strict=True)]
            rows = [torch.equal(s, t) for x, y in zip(got, want, strict=True)
                    for s, t in zip(x[1], y[1], strict=False)]
            counts.append(((what, name), (sum(texts), sum(rows), len(rows))))
            cells = [f"{sum(texts)} of {len(texts)}", f"{sum(rows) / len(rows):.0%}"]
            lines.setdefault(what, []).extend(cells)

        for what, way in ways.items():
            compare(what, way(exact, Race, probs)[0])
            cost[f"{what}, {name}"] = over_usual(way, exact, usual, probs, a.repeats or 3)
            lines[what].append(f"{cost[f'{what}, {name}']:.2f}")
        what = "without --exact, drafted by lookup"
        compare(what, ways["drafted by lookup"](usual, Race, probs)[0])
        lines[what].append("")
    titles = [f"{name}: {what}" for name in PROBS for what in ("texts", "rows of logits", "time")]
    words = (f"{a.model}, {a.dtype}; {a.machine}; texts of {a.new} tokens with --exact: how many "
             "are the same to the bit as with nothing changed, and their time over the same "
             f"without --exact, in {'fast' if a.fast else 'eager'} passes, after the prompt was "
             "read")
    rows = [[what, *cells] for what, cells in lines.items()]
    text = page([words, "", *table(["changed", *titles], rows)])
    return text, {"counts": counts, "cost": cost}
