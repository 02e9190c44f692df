"""What `--exact` promises and costs.

How many texts stay the same when they are drafted, or when the batch or the threads change, without
--exact and with it? (The test of EAGLE in vLLM asks for 60 of 100 greedy texts.) All texts run the
race, so that a sampled text has the same noise with every draft, and only rounding can change it.
With --repeats N it also tells the time of each.
"""
from functools import partial

import torch
from tqdm import tqdm

from lab.bench.shared import load, page, prompts_of, table
from layerskip import SelfDraft, early_exit
from machine.exact import Race, exactly, fast
from machine.quant import quantise
from methods.arms import COPY
from methods.lookup import Suffix
from sampling import Coins, to_probs
from speculative import generate
from support.auto import trained_beside
from support.measure import interleave

PROBS = {"greedy": to_probs, "T 0.8": partial(to_probs, temperature=0.8, top_p=0.95)}


def usual_coins(seeds):
    """What texts draw from without --exact. In a batch all draw from the same coins."""
    return Coins(seeds[0])


def write(model, prompts, new, coins, probs, draft=lambda: None):
    """The text of each prompt, written by itself. `coins` is Race or `usual_coins`."""
    return [generate(model, [ids], new, draft(), probs, coins([seed]), eos=())[0][0]
            for seed, ids in enumerate(prompts)]


def in_a_batch(model, prompts, new, coins, probs):
    return generate(model, prompts, new, None, probs, coins(range(len(prompts))), eos=())[0]


def on_one_thread(way, *args):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return way(*args)
    finally:
        torch.set_num_threads(threads)


def ways_of(a, model, twin, prompts):
    """{what is changed: way(coins, probs), which returns the texts}. The first changes nothing.
    `twin` is the model in int4."""
    L = model.c.n_layers
    rough = model.alongside(twin)
    drafts = {"lookup": lambda: Suffix(COPY),
              "an exit": lambda: SelfDraft(model, early_exit(L, max(1, L // 4)), 6),
              "itself in int4": lambda: SelfDraft(rough, range(2 * L), 3)}
    for head in trained_beside(a.model, model):
        drafts[head.kind] = partial(head.drafter, min(3, head.longest))
    plain = partial(write, model, prompts, a.new)
    ways = {"nothing": plain}
    ways |= {f"drafted by {name}": partial(plain, draft=draft) for name, draft in drafts.items()}
    return ways | {"in a batch": partial(in_a_batch, model, prompts, a.new),
                   "on one thread": partial(on_one_thread, plain)}


def over_usual(exact, usual, probs, repeats):
    """The time of a way with --exact, relative to without. Greedily nothing depends on the race,
    and generate.py leaves it out."""
    coins = usual_coins if probs is to_probs else Race
    seconds = interleave({"exact": partial(exact, coins, probs),
                          "usual": partial(usual, usual_coins, probs)}, repeats)
    return seconds["exact"] / seconds["usual"]


def run(a):
    model, tokenizer = load(a)
    prompts = prompts_of(a, "instructions", tokenizer)
    twin = quantise(model, "int4", head="int4", rounds=True)
    usual = ways_of(a, fast(model) if a.fast else model, twin, prompts)
    exact = ways_of(a, exactly(model, a.fast), twin, prompts)
    found = {what: {} for what in usual}
    for name, probs in PROBS.items():
        for mode, ways in ("without --exact", usual), ("with --exact", exact):
            want = ways["nothing"](Race, probs)
            for what, way in tqdm(ways.items(), f"{name}, {mode}", disable=None):
                same = sum(x == y for x, y in zip(way(Race, probs), want, strict=True))
                found[what][f"{name}, {mode}"] = f"{same} of {len(prompts)}"
        for what in usual if a.repeats else ():
            time = over_usual(exact[what], usual[what], probs, a.repeats)
            found[what][f"{name}, time"] = f"{time:.2f}"
    words = (f"{a.model}, {a.dtype}; {a.machine}; in {'fast' if a.fast else 'eager'} passes: "
             f"how many of {len(prompts)} texts of {a.new} tokens are as with nothing changed, and "
             "their time relative to without --exact")
    rows = [[what, *cells.values()] for what, cells in found.items()]
    return page([words, "", *table(["changed", *found["nothing"]], rows)]), {"found": found}
