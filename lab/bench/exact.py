"""What `--exact` promises and costs.

How many texts stay the same to the bit when they are drafted, or when the batch, the threads or the
cache change, without --exact and with it? (The test of EAGLE in vLLM asks for 60 of 100 greedy
texts.) All texts run the race, so that a sampled text has the same noise with every draft, and only
rounding can change it. With --repeats N it also tells the time of each.
"""
import statistics
from functools import partial
from time import perf_counter

import torch
from tqdm import tqdm

from kvcache import KVCache
from lab.bench.shared import load, page, prompts_of, table
from layerskip import SelfDraft, early_exit
from machine.exact import exactly, fast
from machine.quant import quantise
from methods.pace import COPY
from methods.suffix import Suffix
from model import SPARE
from sampling import Coins, Race, to_probs
from speculative import rounds
from support.drafts import trained_beside
from support.stats import Stopwatch

PROBS = {"greedy": to_probs, "T 0.8": partial(to_probs, temperature=0.8, top_p=0.95)}
MORE = 100      # slots that another cache has more


def usual_coins(seeds):
    """What texts draw from without --exact. In a batch all draw from the same coins."""
    return Coins(seeds[0])


def write(model, prompts, new, slots, coins, probs, seeds, drafter=None):
    """([(ids, their rows of logits)] of each prompt, seconds since the prompts were read), in a
    cache of so many slots. `coins` is Race or `usual_coins`."""
    cache = KVCache(model.c, len(prompts), slots, model.attention_dtype(), model.tok.device)
    found = [([], []) for _ in prompts]
    watch = Stopwatch(drafter)
    for _, r in rounds(model, prompts, new, watch, probs, coins(seeds), cache=cache):
        for b, (ids, logits) in enumerate(found):
            ids += r.new[b]
            logits += r.logits[b, : len(r.new[b])]
    return found, perf_counter() - watch.now


def alone(model, prompts, new, slots, coins, probs, draft=lambda: None):
    """What `write` returns, each prompt by itself. draft() makes a drafter."""
    texts = [write(model, [ids], new, slots, coins, probs, [seed], draft())
             for seed, ids in enumerate(prompts)]
    return [text for (text,), _ in texts], sum(seconds for _, seconds in texts)


def on_one_thread(way, *args):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return way(*args)
    finally:
        torch.set_num_threads(threads)


def ways_of(a, model, twin, prompts):
    """{what is changed: way(coins, probs)}, which return what `write` does. The first changes
    nothing. `twin` is the model in int4."""
    L = model.c.n_layers
    slots = max(map(len, prompts)) + a.new + SPARE
    rough = model.alongside(twin)
    drafts = {"lookup": lambda: Suffix(COPY),
              "an exit": lambda: SelfDraft(model, early_exit(L, max(1, L // 4)), 6),
              "itself in int4": lambda: SelfDraft(rough, range(2 * L), 3)}
    for head in trained_beside(a.model, model):
        drafts[head.kind] = partial(head.drafter, min(3, head.price.longest))
    plain = partial(alone, model, prompts, a.new, slots)
    ways = {"nothing": plain}
    ways |= {f"drafted by {name}": partial(plain, draft=draft) for name, draft in drafts.items()}
    ways["in a batch"] = partial(write, model, prompts, a.new, slots, seeds=range(len(prompts)))
    ways["on one thread"] = partial(on_one_thread, plain)
    ways[f"in a cache of {MORE} slots more"] = partial(alone, model, prompts, a.new, slots + MORE)
    return ways


def same(got, want):
    """(how many texts are equal, the share of their rows of logits that are)"""
    pairs = list(zip(got, want, strict=True))
    rows = [torch.equal(s, t) for mine, other in pairs
            for s, t in zip(mine[1], other[1], strict=False)]
    return sum(mine[0] == other[0] for mine, other in pairs), sum(rows) / len(rows)


def over_usual(exact, usual, probs, repeats):
    """The time of a way with --exact, relative to without, as medians of runs in turn after a
    warm-up. Greedily nothing depends on the race, and generate.py leaves it out."""
    coins = usual_coins if probs is to_probs else Race
    seconds = [(exact(coins, probs)[1], usual(usual_coins, probs)[1]) for _ in range(repeats + 1)]
    mine, theirs = zip(*seconds[1:], strict=True)
    return statistics.median(mine) / statistics.median(theirs)


def run(a):
    model, tokenizer = load(a)
    prompts = prompts_of(a, "instructions", tokenizer)
    twin = quantise(model, "int4", head="int4", rounds=True)
    modes = {"without --exact": fast(model) if a.fast else model,
             "with --exact": exactly(model, a.fast)}
    ways = {mode: ways_of(a, one, twin, prompts) for mode, one in modes.items()}
    usual, exact = ways.values()
    cells = {what: [] for what in usual}
    data = {}
    for name, probs in PROBS.items():
        for mode in modes:
            want, _ = ways[mode]["nothing"](Race, probs)
            for what, way in tqdm(ways[mode].items(), f"{name}, {mode}", disable=None):
                texts, rows = same(way(Race, probs)[0], want)
                data[f"{what}, {name}, {mode}"] = {"texts": texts, "rows": rows}
                cells[what].append(f"{texts} of {len(prompts)} ({rows:.0%})")
        for what in cells if a.repeats else ():
            time = over_usual(exact[what], usual[what], probs, a.repeats)
            data[f"{what}, {name}, with --exact"]["time"] = time
            cells[what].append(f"{time:.2f}")
    titles = [f"{name}, {what}" for name in PROBS
              for what in [*modes, *(["time"] if a.repeats else [])]]
    words = (f"{a.model}, {a.dtype}; {a.machine}; in {'fast' if a.fast else 'eager'} passes: how "
             f"many of {len(prompts)} texts of {a.new} tokens are the same as with nothing changed "
             "(and how many rows of logits, to the bit); time relative to without --exact, after "
             "the prompt was read")
    rows = [[what, *found] for what, found in cells.items()]
    return page([words, "", *table(["changed", *titles], rows)]), {"counts": data}
