"""How long passes take: plain decoding compared with transformers, products of few rows compared
with the time to read their matrices, and the parts of a pass."""
import os
from dataclasses import asdict
from functools import partial

import torch
import torch.nn.functional as F

import checkpoint
from kvcache import new_cache
from lab.bench.shared import figures, load, page, table
from machine.exact import fast
from machine.quant import KINDS
from machine.rows import call, describe, library, multiplies
from methods.costs import by_weights, size
from model import Placement, Refused
from sampling import Coins, to_probs
from speculative import generate, rounds
from support.measure import CONTEXT, by_clock, interleave

TEXT = ("Once upon a time there was a little girl who lived in a house near the big forest with "
        "her mother. ")
ROWS = 1, 2, 3, 4, 5, 8, 16, 17, 32, 256    # of a product
SETTINGS = {    # of to_probs
    "greedy": {},
    "T 0.8": {"temperature": 0.8},
    "T 0.8, top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "T 0.7, top-p 0.8, top-k 20": {"temperature": 0.7, "top_p": 0.8, "top_k": 20}}


# --- plain decoding


def their_text(model, ids, new, **flags):
    """What a model of transformers writes after ids (B, T), greedily. (B, new)"""
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new,
                          do_sample=False, pad_token_id=0, **flags)[:, ids.shape[1] :]


def compiled(theirs, prompt, new):
    """A function that returns what transformers writes with a cache of fixed size and the step of
    one token compiled, as its guide to fast decoding says."""
    from transformers import StaticCache
    device = theirs.device
    # trap: a sliding layer counts in Python, and with fixed numbers each token would compile again
    one = torch.compile(theirs.forward)

    @torch.no_grad()
    def write():
        cache = StaticCache(config=theirs.config, max_cache_len=len(prompt) + new)
        run = theirs
        found = []
        tokens = torch.tensor([prompt], device=device)
        at = torch.arange(len(prompt), device=device)
        for _ in range(new):
            said = run(tokens, past_key_values=cache, cache_position=at, logits_to_keep=1)
            tokens = said.logits[:, -1:].argmax(-1).clone()
            at = at[-1:] + 1
            run = one
            found.append(tokens)
        return torch.cat(found, 1)[0].tolist()

    return write


def rehearsed(model, prompt, new):
    """A function that continues the prompt and returns [its ids]. The model, a StandIn, gets ready
    now."""
    def write():
        return generate(model, [prompt], new, eos=())[0]

    model.rehearse(write)
    return write


def run_plain(a):
    from transformers import AutoModelForCausalLM

    model, tokenizer = load(a)
    prompt = checkpoint.encode(tokenizer, TEXT * 4)[:32]
    theirs = AutoModelForCausalLM.from_pretrained(a.model, dtype=model.tok.dtype).to(a.device)
    theirs.generation_config.eos_token_id = None    # both write all the tokens
    ids = torch.tensor([prompt], device=a.device)
    recorded = rehearsed(fast(model), prompt, a.new)
    ways = {"transformers": lambda: their_text(theirs, ids, a.new)[0].tolist(),
            "transformers, compiled": compiled(theirs, prompt, a.new),
            "ours": lambda: generate(model, [prompt], a.new, eos=())[0][0],
            "ours, fast": lambda: recorded()[0]}
    texts = {name: way() for name, way in ways.items()}
    same = {name: len(os.path.commonprefix([texts["transformers"], texts[name]])) for name in ways}
    seconds = interleave(ways, a.repeats or 5)
    rows = {name: {"rate": a.new / seconds[name], "same": same[name],
                   "ratio": seconds["transformers"] / seconds[name]} for name in ways}
    words = (f"{a.model}, {a.dtype}; {a.machine}; torch {torch.__version__}; plain decoding, "
             f"greedy, 32-token prompt, {a.new} new tokens; medians of interleaved runs")
    columns = {"tokens/s": "{rate:.1f}", "times transformers": "{ratio:.2f}",
               "same first tokens": "{same}"}
    return page([words, "", *figures(rows.items(), columns, "way")]), {"ways": rows}


# --- products of few rows


def reading(count, device):
    """A function that reads so many bytes as fast as memory allows, for a sum over them."""
    x = torch.ones(count // 4, device=device)
    return lambda: x.sum().item()


def forms(weights):
    """{name: the matrices in this form}: as they are, and quantised, without and with a rounded
    x."""
    found = {"the loop": weights}
    for kind in ("int8", "int4"):
        for rounded, words in (False, ""), (True, ", x rounded"):
            found[kind + words] = [KINDS[kind](w) for w in weights]
            for w in found[kind + words]:
                w.rounds = rounded
    return found


@torch.inference_mode()
def run_rows(a):
    """All products that a token needs, by the loops of machine/rows.cpp and by the library."""
    model, _ = load(a)
    if not multiplies(model):
        raise Refused(f"no loops for {a.dtype} on {a.device}: `rows` needs a CPU, a C++ "
                      "compiler, and --dtype float32, bfloat16 or float16")
    weights = [w for b in model.blocks for w in (b.attn.wqkv, b.attn.wo, b.mlp.gate_up, b.mlp.down)]
    weights.append(model.tok if model.head is None else model.head)
    widths = {w.shape[1]: [] for w in weights}
    for w in weights:   # stacked, so that the time for starting a product does not count
        widths[w.shape[1]].append(w)
    weights = [torch.cat(some) for some in widths.values()]
    dtype = model.tok.dtype
    xs = {w.shape[1]: torch.randn(max(ROWS), w.shape[1]).to(dtype) for w in weights}
    kept = forms(weights)       # trap: what `describe` returns holds addresses only
    bytes_of = {"F.linear": sum(map(size, weights))}
    bytes_of |= {name: sum(map(size, some)) for name, some in kept.items()}

    def library_product(count):
        return [F.linear(xs[w.shape[1]][:count], w) for w in weights]

    def by_loops(described, count):
        return [call(library(), xs[w.k][:count], w, dtype) for w in described]

    ways = {"F.linear": library_product}
    ways |= {name: partial(by_loops, [describe(w) for w in some]) for name, some in kept.items()}
    actions = {(name, count): partial(way, count) for name, way in ways.items() for count in ROWS}
    actions |= {(name, "memory"): reading(bytes_of[name], a.device) for name in ways}
    times = interleave(actions, a.repeats or 15)
    lines = []
    for name in ways:
        cells = [f"{1e3 * times[name, count]:.2f} ({times[name, count] / times[name, 1]:.2f})"
                 for count in ROWS]
        lines.append([name, f"{bytes_of[name] / 1e6:.0f}", f"{1e3 * times[name, 'memory']:.2f}",
                      *cells])
    words = (f"{a.model}, {a.dtype}; {a.machine}; ms for all matrices of the blocks and the head, "
             "stacked by their width (relative to one row); to read: a sum over as many bytes")
    head = ["rows", "MB", "to read", *map(str, ROWS)]
    data = {f"{name}, {count}": seconds for (name, count), seconds in times.items()}
    return page([words, "", *table(head, lines)]), {"times": data}


# --- the parts of a pass


PARTS = {
    "the blocks": lambda machine: machine.blocks * (machine.attention + machine.mlp),
    "the head": lambda machine: machine.head,
    "all else": lambda machine: machine.step}


def run_costs(a):
    model, _ = load(a)
    if a.fast:
        model = fast(model)
    clock = by_clock(model, repeats=a.repeats or 100)
    weights = by_weights(model.c)
    rows = []
    for part, of in PARTS.items():
        took = of(clock)
        micros = 1e6 * clock.unit * took
        rows.append([part, f"{micros:.0f}", f"{took:.4f}", f"{of(weights):.4f}"])
    how = "in fast passes, " * a.fast
    lines = [f"one token of a short text, {how}{a.model}, {a.dtype}; {a.machine}; medians", "",
             *table(["part", "microseconds", "share", "share by weights"], rows),
             *table(["tokens in a block", *(str(T) for T, _ in clock.wide)],
                    [["relative to one token", *(f"{cost:.2f}" for _, cost in clock.wide)]]),
             f"Every 1,000 tokens more before it add {1e9 * clock.unit * clock.slope:.0f} "
             "microseconds to an attention.", ""]
    spent = around(model, a.repeats or 30)
    lines += table(["around the pass of a plain token", *spent],
                   [["ms (share of the token)", *(f"{1e3 * s:.2f} ({part:.1%})"
                                                 for s, part in spent.values())]])
    return page(lines), {**asdict(clock), "around": spent}


@torch.inference_mode()
def around(model, repeats):
    """What a token takes around its pass: the distribution, the draw, the verdict, the bookkeeping.
    {setting: (seconds around the pass, their share of a plain token)}, of rounds and passes in
    turn."""
    ids = [i % model.c.vocab_size for i in range(CONTEXT)]
    ways = {"pass": step(model, 1, CONTEXT)}
    for name, settings in SETTINGS.items():
        steps = rounds(model, [ids], repeats + 4, None, partial(to_probs, **settings), Coins(),
                       eos=())
        next(steps)     # with the prompt
        ways[name] = partial(next, steps)
    times = interleave(ways, repeats)
    found = {}
    for name in SETTINGS:
        more = max(0.0, times[name] - times["pass"])
        found[name] = more, more / times[name]
    return found


def step(model, T, at, sublayers=None):
    """A pass over T tokens after `at` others, with positions as the loop gives them on this device.
    A recorded model has recorded it."""
    device = model.tok.device
    here = Placement.span(at, at + T, device)._replace(same=device.type == "cpu")
    cache = new_cache(model, 1, at + T)
    tokens = torch.full((1, T), 5, device=device)

    def act():
        return model.unembed(model.run(model.embed(tokens), here, cache, sublayers))

    model.rehearse(act)
    return act
