"""What a pass over a block of tokens takes, with the matrices as they are and packed for this processor."""
import torch

from kvcache import KVCache
from lab.bench.shared import load, page, table
from machine.packed import gain, pack
from model import Placement
from support.measure import interleave

WIDTHS = 1, 2, 3, 4, 6, 8, 16


@torch.inference_mode()
def run(a):
    forms = {"plain": load(a)[0], "packed": load(a)[0]}
    keep = gain(forms["packed"], 1) < 0.95
    pack(forms["packed"], keep)

    def reading(model, T):
        cache = KVCache(model.c, 1, 128, model.attention_dtype(), model.tok.device)
        tokens, at = torch.full((1, T), 5), Placement.at(100, 100 + T)
        return lambda: model.unembed(model.run(model.embed(tokens), at, cache))

    times = interleave({(form, T): reading(model, T) for form, model in forms.items() for T in WIDTHS},
                       a.repeats or 15)
    one = times["plain", 1]
    rows = [[form, *(f"{1e3 * times[form, T]:.1f} ({times[form, T] / one:.2f})" for T in WIDTHS)]
            for form in forms]
    words = f"{a.model}, {a.dtype}; {a.machine}; ms a pass (in plain passes over one token); " + (
        "single rows by the plain matrix" if keep else "packed alone")
    return page([words, "", *table(["tokens", *map(str, WIDTHS)], rows)]), {
        "times": {f"{form} {T}": s for (form, T), s in times.items()}}
