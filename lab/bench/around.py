"""What a token takes around its pass: the distribution, the draw, the verdict, the bookkeeping."""
from functools import partial

import torch

from kvcache import new_cache
from model import Placement
from sampling import Coins, to_probs
from speculative import rounds
from support.measure import interleave

SETTINGS = {
    "greedy": {},
    "T 0.8": {"temperature": 0.8},
    "T 0.8, top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "T 0.7, top-p 0.8, top-k 20": {"temperature": 0.7, "top_p": 0.8, "top_k": 20}}


@torch.inference_mode()
def around(model, repeats=30, first=64):
    """{setting: (seconds around the pass, their share of a plain token)}, of rounds and passes in
    turn."""
    ids = [i % model.c.vocab_size for i in range(first)]
    cache = new_cache(model, 1, first + repeats + 8)
    token = torch.tensor([ids[-1:]])
    at = Placement.span(first, first + 1)

    def one_pass():
        return model.unembed(model.run(model.embed(token), at, cache))

    ways = {"pass": one_pass}
    for name, settings in SETTINGS.items():
        probs = partial(to_probs, **settings)
        steps = rounds(model, [ids], repeats + 4, None, probs, Coins(), eos=())
        next(steps)     # with the prompt
        ways[name] = partial(next, steps)
    times = interleave(ways, repeats)
    found = {}
    for name in SETTINGS:
        more = max(0.0, times[name] - times["pass"])
        found[name] = more, more / times[name]
    return found
