"""The forward pass against itself without a cache, and by hand; against `transformers`:
test_checkpoint.py.

In float64 both sides agree to 1e-14, so that 1e-12 leaves no room for a mistake.
"""
import math
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from teach import compare, look, promise
from tiny import FAMILIES, GEMMA, GEMMA3, LLAMA, MORE, make

from kvcache import KVCache, prefill
from model import Placement, RMSNorm, Transformer, frequencies, rotate, softcap, visible

SOME = FAMILIES | MORE
some_family = pytest.mark.parametrize("family", SOME)


def error(got, want):
    return float((got - want).abs().max() / want.abs().max())


def some_x(B, T):
    return torch.randn(B, T, 32, generator=torch.Generator().manual_seed(2)).double()


# --- blocks and caches


@some_family
@pytest.mark.parametrize("block", [1, 3, 20])
def test_cached_blocks_equal_the_full_pass(family, block):
    """Also where the window, 5, is shorter than the block, and where the last block is short."""
    m, tokens = make(SOME[family]), torch.arange(40).view(2, 20) * 7 % 17
    m.chunk = block
    parts, whole = {2: None, 11: None}, {2: None, 11: None}
    got = prefill(m, tokens, KVCache(m.c, 2, 24, torch.float64), trace=parts)
    want = m.run(m.embed(tokens), Placement.span(0, 20), trace=whole)
    off = max(error(got, want), *(error(parts[tap], whole[tap]) for tap in whole))
    promise(off < 1e-12, f"a tiny {family} that reads two texts of 20 tokens in blocks of {block}",
            "the states of one pass over the whole text", f"states that are off by {off:.2g}",
            "a key or value lies in another slot, or of another block is read what `end` or "
            "`start` excludes")


BRANCHES = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()    # a root and two children
RAGGED = torch.tensor([[14, 15, 16], [11, 12, 13]])
LAYOUTS = {  # where three tokens stand, the first slot that a window of 5 still sees
    "slice": (Placement.span(12, 15), 8),
    "rows": (Placement(RAGGED, RAGGED, 11, 17), 7),
    "tree": (Placement(RAGGED - torch.tensor([0, 0, 1]), RAGGED, 11, 17, BRANCHES[None]), 7),
    "tree of one row": (Placement(torch.tensor([[12, 13, 13]]), torch.arange(12, 15)[None], 12, 15,
                                  BRANCHES[None]), 8)}      # as the loop lays it out on the CPU


@pytest.mark.parametrize("c", [GEMMA, GEMMA3], ids=["gemma2", "gemma3"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sliding_layers_read_their_window_only(layout, c):
    """The slots before it are not touched, though they hold NaN."""
    m, x, (at, first) = make(c), some_x(2, 24), LAYOUTS[layout]
    cache, block = KVCache(m.c, 2, 24, torch.float64), x[:, 12:15]
    m.run(x[:, :14], Placement.span(0, 14), cache)
    want = m.run(block, at._replace(first=0, same=False), deepcopy(cache))    # all slots are read
    for layer in range(c.n_layers):
        if c.window_of(layer):
            cache.k[layer, :, :, :first] = cache.v[layer, :, :, :first] = math.nan
    assert error(m.run(block, at, cache), want) < 1e-12


@some_family
def test_only_distances_matter(family):
    """Rotary positions are relative: any start will do, also behind the table's first 256 rows."""
    m, x = make(SOME[family]), some_x(2, 9)
    want = m.run(x, Placement.span(0, 9))
    for start in (7, 252, 900):
        later = [t[:, start : start + 9] for t in m.angles(start + 9)]
        got = m.run(x, Placement.span(0, 9), table=later)
        assert error(got, want) < 1e-11     # cos(900): three digits less


def test_the_angles_follow_the_type_of_the_weights():
    m, x, at = make(LLAMA), some_x(1, 9), Placement.span(0, 9)
    assert error(m.float().run(x.float(), at), make(LLAMA).run(x, at)) < 1e-5
    fresh = make(LLAMA).float().double()
    assert torch.equal(m.double().run(x, at), fresh.run(x, at)), "the table has stayed in float32"


# --- sub-layers


@some_family
def test_the_trace_holds_the_state_after_each_sublayer(family):
    """And each can be the border between a draft and what verification still has to run."""
    m, x, at = make(SOME[family]), some_x(2, 8), Placement.span(0, 8)
    for sublayers in (range(12), [0, 3, 4, 11], []):
        trace = dict.fromkeys(range(12))
        out = m.run(x, at, sublayers=sublayers, trace=trace)
        assert [i for i, state in trace.items() if state is not None] == list(sublayers)
        for k, i in enumerate(sublayers):
            assert torch.equal(trace[i], m.run(x, at, sublayers=sublayers[: k + 1]))
            assert torch.equal(m.run(trace[i], at, sublayers=sublayers[k + 1 :]), out)
        assert torch.equal(out, trace[sublayers[-1]] if sublayers else x)


# --- norms and scales


def test_the_norm_of_gemma2_works_in_float32():
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(GEMMA, 512)
    norm.weight.data = (torch.randn(512, generator=generator) * 0.3).bfloat16()
    x = torch.randn(64, 512, generator=generator).bfloat16()
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + GEMMA.norm_eps).sqrt()
    exact *= GEMMA.norm_offset + norm.weight.double()
    got = norm(x)
    given = "64 rows of 512 numbers and a weight, all in bfloat16, offset = 1"
    promise(got.dtype == torch.bfloat16, given, "bfloat16", str(got.dtype),
            "the result has the type of x")
    right = float((got == exact.bfloat16()).double().mean())
    promise(right > 0.999, given, "the exact norm, rounded once",
            f"{right:.0%} of the numbers are this",
            "was 1 + w rounded to bfloat16? Compute in float32 or wider, and round at the end")


def test_embeddings_are_scaled_by_the_rounded_scale():
    m = Transformer(replace(GEMMA, embed_scale=3584**0.5)).bfloat16().requires_grad_(False)
    m.tok.data.fill_(1.5)
    assert m.embed(torch.tensor([[1]])).unique().tolist() == [89.5], (
        "1.5 * 59.75, not 1.5 * 59.87 = 90")
    assert m.double().embed(torch.tensor([[1]])).unique().tolist() == [1.5 * 3584**0.5]


# --- pure functions by hand; one of them alone: `pytest -k softcap`, frequencies, rotate, visible


def test_softcap_by_hand():
    x = [0.0, 2.0, -2.0, 1000.0]
    want = [0.0, 1.5231883119115297, -1.5231883119115297, 2.0]
    compare(softcap(torch.tensor(x).double(), 2.0), want, {
        "the sum inside tanh is x / cap, not x": [2 * math.tanh(a) for a in x],
        "multiply by cap at the end: this is within (-1, 1)": [math.tanh(a / 2) for a in x],
        "this clips; tanh bends smoothly": [max(-2.0, min(2.0, a)) for a in x]},
        f"softcap({x}, 2.0)")


def test_frequencies_by_hand():
    got = frequencies(8, 10000.0)
    promise(got.dtype == torch.float64, "frequencies(8, 10000.0)", "float64", str(got.dtype),
            "float32 is off by 0.01 at position 100,000")
    compare(got, [1.0, 0.1, 0.01, 0.001], {
        "the exponent is 2i / D: count in steps of 2": [10000 ** (-i / 8) for i in range(4)],
        "the exponent is negative: frequencies fall from 1": [1.0, 10.0, 100.0, 1000.0]},
        "frequencies(head_dim=8, theta=10000.0)")


def test_frequencies_of_linear_scaling_by_hand():
    scaling = {"rope_type": "linear", "factor": 4.0}
    compare(frequencies(8, 10000.0, scaling), [0.25, 0.025, 0.0025, 0.00025], {
        "factor divides: positions are squeezed into the trained range": [4.0, 0.4, 0.04, 0.004],
        "factor divides the frequencies, not theta": [40000 ** (-i / 4) for i in range(4)]},
        f"frequencies(8, 10000.0, {scaling})")


def test_frequencies_of_llama3_by_hand():
    """In 1000 positions the pairs turn 159, 15.9, 1.59 and 0.159 times: the third is blended."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 1000}
    keep = (10 / (2 * math.pi) - 1) / 3         # 0.197 of the third pair stays
    third = keep * 0.01 + (1 - keep) * 0.01 / 8
    compare(frequencies(8, 10000.0, scaling), [1.0, 0.1, third, 0.001 / 8], {
        "fast and slow are swapped: those that turn often stay, the slow ones are divided":
            [1 / 8, 0.1 / 8, (1 - keep) * 0.01 + keep * 0.01 / 8, 0.001],
        "turns = length * frequency / (2 pi): the 2 pi is missing": [1.0, 0.1, 0.01, 0.001 / 8],
        "between the two factors it blends, it does not jump": [1.0, 0.1, 0.01 / 8, 0.001 / 8]},
        f"frequencies(8, 10000.0, {scaling})")


def test_rotate_by_hand():
    """Pair (x0, x2) turns by 90 degrees, pair (x1, x3) not at all: (1, 3) becomes (-3, 1)."""
    cos, sin = torch.tensor([[0.0, 1.0, 0.0, 1.0], [-1.0, 0.0, 1.0, 0.0]]).double()
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).double()
    compare(rotate(x, cos, sin), [-3.0, 2.0, 1.0, 4.0], {
        "it turns the wrong way: sin already carries its sign": [3.0, 2.0, -1.0, 4.0],
        "sin already carries the sign: you gave it a second one": [3.0, 2.0, 1.0, 4.0],
        "x_i is paired with its neighbour; here x_i goes with x_{i + D/2}": [-2.0, 2.0, 4.0, 4.0],
        "the pairs (x0, x1), (x2, x3) are those of Meta's own files": [-2.0, 1.0, 3.0, 4.0],
        "sin must multiply the *other* half of x": [-1.0, 2.0, 3.0, 4.0]},
        "rotate([1, 2, 3, 4], cos = [0, 1, 0, 1], sin = [-1, 0, 1, 0])")


def test_visible_in_the_first_block():
    at = torch.tensor([[0, 1, 2]])
    mask = visible(at, at, 4)
    promise(mask.dtype == torch.bool, "a block in slots 0 1 2", "a mask of torch.bool",
            str(mask.dtype))
    look(visible(at, at, 4)[0], ["x...", "xx..", "xxx."], {
        "a token must see itself": ["....", "x...", "xx.."],
        "a token sees what stands behind it: the mask is upside down": ["xxx.", ".xx.", "..x."],
        "slot 3 is behind the block, and dead": ["x..x", "xx.x", "xxxx"],
        "the first token sees the second: causal inside the block, too": ["xxx."] * 3},
        "a block in slots 0 1 2, end = 4; x: may read")
