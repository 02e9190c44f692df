"""Where `--exact` ends: how many texts stay the same to the bit when something else changes."""
from functools import partial

import torch

from kvcache import KVCache
from lab.bench.shared import SETS, load, page, prompt_ids, table
from layerskip import SelfDraft, early_exit
from machine.exact import Exact, exactly
from machine.packed import pack_where_it_pays
from machine.recorded import Recorded
from methods.suffix import Suffix
from model import SPARE
from sampling import Race, to_probs
from speculative import rounds

PROBS = {"greedy": to_probs, "T 0.8": partial(to_probs, temperature=0.8, top_p=0.95)}
MORE = 64, 100      # slots that another cache has more


def write(model, prompts, new, probs, seeds, slots, drafter=None):
    """[(ids, their rows of logits)] of each prompt, in a cache of so many slots."""
    cache = KVCache(model.c, len(prompts), slots, model.attention_dtype(), model.tok.device)
    found = [([], []) for _ in prompts]
    for _, r in rounds(model, prompts, new, drafter, probs, Race(seeds), cache=cache):
        for b, (ids, logits) in enumerate(found):
            ids += r.new[b]
            logits += r.logits[b, : len(r.new[b])]
    return found


def run(a):
    model, tokenizer = load(a)
    prompts = [prompt_ids(kind, tokenizer, model.c)[0] for kind in SETS]
    plain = Recorded(model, exact=True) if a.fast else pack_where_it_pays(model)
    exact = exactly(plain, prompts[0])
    eight = Exact(plain)
    slots = max(map(len, prompts)) + a.new + SPARE
    L = model.c.n_layers
    exit_ = SelfDraft(exact, early_exit(L, max(1, L // 4)), 3)
    seeds = range(len(prompts))
    alone = partial(each, prompts, a.new, seeds)

    def one_thread(probs):
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return alone(exact, probs, slots)
        finally:
            torch.set_num_threads(threads)

    changes = {
        "drafted by an exit": lambda probs: alone(exact, probs, slots, exit_),
        "drafted by lookup": lambda probs: alone(exact, probs, slots, Suffix(5)),
        "in a batch of four": lambda probs: write(exact, prompts, a.new, probs, [*seeds], slots),
        "on one thread": one_thread,
        "in passes of eight rows": lambda probs: alone(eight, probs, slots),
        **{f"in a cache of {n} slots more": partial(alone, exact, slots=slots + n) for n in MORE},
        "without --exact, drafted": lambda probs: alone(plain, probs, slots, Suffix(5))}
    lines = []
    data = {}
    for what, change in changes.items():
        cells = [what]
        for name, probs in PROBS.items():
            want = alone(exact, probs, slots)
            got = change(probs)
            texts = [x[0] == y[0] for x, y in zip(got, want, strict=True)]
            rows = [torch.equal(s, t) for x, y in zip(got, want, strict=True)
                    for s, t in zip(x[1], y[1], strict=False)]
            cells += [f"{sum(texts)} of {len(texts)}", f"{sum(rows) / len(rows):.0%}"]
            data[what, name] = sum(texts), sum(rows), len(rows)
        lines.append(cells)
    head = ["changed", *(f"{name}: {what}" for name in PROBS for what in ("texts", "rows of logits"))]
    text = page([f"Passes of at least {exact.rows} rows.", "", *table(head, lines)])
    return text, {"counts": [*data.items()]}


def each(prompts, new, seeds, model, probs, slots, drafter=None):
    """What `write` returns, each prompt by itself."""
    return [write(model, [ids], new, probs, [seed], slots, drafter)[0]
            for ids, seed in zip(prompts, seeds, strict=True)]
