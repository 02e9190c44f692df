"""What `--exact` promises and costs: how many texts stay the same to the bit when something else changes, and
what time they take."""
import statistics
from functools import partial
from time import perf_counter

import torch

from kvcache import KVCache
from lab.bench.shared import SETS, load, page, prompt_ids, table
from layerskip import SelfDraft, early_exit
from machine.exact import exactly, fast
from methods.suffix import Suffix
from model import SPARE
from sampling import Coins, Race, to_probs
from speculative import rounds
from support.stats import Stopwatch

PROBS = {"greedy": to_probs, "T 0.8": partial(to_probs, temperature=0.8, top_p=0.95)}
MORE = 64, 100      # slots that another cache has more
BLOCKS = 3, 5, 7    # tokens of a block: a draft, and the token before it


def usual_coins(seeds):
    """What texts draw from without --exact: in a batch all draw from the same."""
    return Coins(seeds[0])


def write(model, coins, probs, prompts, seeds, new, slots, drafter=None):
    """([(ids, their rows of logits)] of each prompt, seconds since the prompts were read), in a cache of so
    many slots. coins: Race, or `usual_coins`."""
    cache = KVCache(model.c, len(prompts), slots, model.attention_dtype(), model.tok.device)
    found = [([], []) for _ in prompts]
    watch = Stopwatch(drafter)
    for _, r in rounds(model, prompts, new, watch, probs, coins(seeds), cache=cache):
        for b, (ids, logits) in enumerate(found):
            ids += r.new[b]
            logits += r.logits[b, : len(r.new[b])]
    return found, perf_counter() - watch.now


def alone(model, coins, probs, prompts, new, slots, draft=lambda model: None):
    """What `write` returns, each prompt by itself. draft(model): a drafter."""
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
        found[f"in blocks of {T}"] = partial(plain, draft=lambda model, T=T: SelfDraft(model, exit_, T - 1))
    found["in a batch of four"] = partial(write, **texts, slots=slots, seeds=[*range(len(prompts))])
    found["on one thread"] = partial(on_one_thread, plain)
    for n in MORE:
        found[f"in a cache of {n} slots more"] = partial(plain, slots=slots + n)
    return found


def over_usual(way, exact, usual, probs, repeats):
    """The time that a way takes with --exact, relative to without: medians, runs in turn, after a warm-up.
    Greedily nothing depends on the race, and generate.py leaves it out."""
    coins = usual_coins if probs is to_probs else Race
    seconds = []
    for _ in range(repeats + 1):
        _, mine = way(exact, coins, probs)
        _, theirs = way(usual, usual_coins, probs)
        seconds.append((mine, theirs))
    mine, theirs = zip(*seconds[1:], strict=True)
    return statistics.median(mine) / statistics.median(theirs)


def run(a):
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
    words = (f"{a.model}, {a.dtype}; {a.machine}; texts of {a.new} tokens with --exact: how many are the "
             "same to the bit as with nothing changed, and their time over the same without --exact, in "
             f"{'fast' if a.fast else 'eager'} passes, after the prompt was read")
    rows = [[what, *cells] for what, cells in lines.items()]
    text = page([words, "", *table(["changed", *titles], rows)])
    return text, {"counts": counts, "cost": cost}
