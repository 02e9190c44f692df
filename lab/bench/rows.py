"""Products of few rows, with each matrix of a model by the loops of machine/rows.cpp and by the
library, beside the time that reading as many bytes takes."""
from functools import partial

import torch
import torch.nn.functional as F

from lab.bench.plain import reading
from lab.bench.shared import load, page, table
from machine.quant import KINDS, size
from machine.rows import call, describe, library, multiplies
from support.measure import interleave

ROWS = 1, 2, 3, 4, 5, 8, 16


def matrices(model):
    """All that one token is multiplied with."""
    weights = [w for b in model.blocks for w in (b.attn.wqkv, b.attn.wo, b.mlp.gate_up, b.mlp.down)]
    return [*weights, model.tok if model.head is None else model.head]


def forms(weights):
    """{name: the matrices in this form}: as they are, and quantised, without and
    with a rounded x."""
    found = {"the loop": weights}
    for kind in ("int8", "int4"):
        for rounds, words in (False, ""), (True, ", x rounded"):
            found[kind + words] = [KINDS[kind](w) for w in weights]
            for w in found[kind + words]:
                w.rounds = rounds
    return found


@torch.inference_mode()
def run(a):
    model, _ = load(a)
    if not multiplies(model):
        raise ValueError(f"no loops for {a.dtype} on {a.device}: `rows` needs a CPU, a C++ "
                         "compiler, and --dtype float32, bfloat16 or float16")
    weights = matrices(model)
    dtype = model.tok.dtype
    xs = {w.shape[1]: torch.randn(max(ROWS), w.shape[1]).to(dtype) for w in weights}
    # each form is kept: a Weight holds addresses only
    kept = forms(weights)
    bytes_of = {name: sum(map(size, some)) for name, some in kept.items()}
    bytes_of["F.linear"] = bytes_of["the loop"]

    def library_product(count):
        return [F.linear(xs[w.shape[1]][:count], w) for w in weights]

    def by_loops(described, count):
        return [call(library(), xs[w.k][:count], w, dtype) for w in described]

    ways = {"F.linear": library_product}
    ways |= {name: partial(by_loops, [describe(w) for w in some]) for name, some in kept.items()}
    actions = {(name, count): partial(way, count) for name, way in ways.items() for count in ROWS}
    for name in ways:
        actions[name, "memory"] = reading(bytes_of[name], a.device)
    times = interleave(actions, a.repeats or 15)
    lines = []
    for name in ways:
        one = times[name, 1]
        cells = [f"{1e3 * times[name, count]:.2f} ({times[name, count] / one:.2f})"
                 for count in ROWS]
        lines.append([name, f"{bytes_of[name] / 1e6:.0f}", f"{1e3 * times[name, 'memory']:.2f}",
                      *cells])
    words = (f"{a.model}, {a.dtype}; {a.machine}; ms for all matrices of the blocks and the head "
             "(relative to one row); to read: a sum over as many bytes")
    head = ["rows", "MB", "to read", *map(str, ROWS)]
    data = {f"{name}, {count}": seconds for (name, count), seconds in times.items()}
    return page([words, "", *table(head, lines)]), {"times": data}
