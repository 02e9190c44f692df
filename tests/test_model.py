"""The forward pass against itself without a cache, and by hand; against `transformers`:
test_checkpoint.py.

In float64 both sides agree to 1e-14, so that 1e-12 leaves no room for a mistake.
"""
import math
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from teach import Mistakes, compare, short
from tiny import FAMILIES, GEMMA, GEMMA3, LLAMA, MORE, make, wide

import model
from kvcache import KVCache, prefill
from model import Placement, RMSNorm, Transformer

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
    assert error(got, want) < 1e-12
    assert all(error(parts[tap], whole[tap]) < 1e-12 for tap in whole)


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
    """If 1 + w were rounded to bfloat16, every third number would be another one."""
    g = torch.Generator().manual_seed(0)
    norm = RMSNorm(GEMMA, 512)
    norm.weight.data = (torch.randn(512, generator=g) * 0.3).bfloat16()
    x = torch.randn(64, 512, generator=g).bfloat16()
    got = norm(x)
    assert got.dtype == torch.bfloat16
    assert (got == norm.double()(x.double()).bfloat16()).double().mean() > 0.999


def test_embeddings_are_scaled_by_the_rounded_scale():
    m = Transformer(replace(GEMMA, embed_scale=3584**0.5)).bfloat16().requires_grad_(False)
    m.tok.data.fill_(1.5)
    assert m.embed(torch.tensor([[1]])).unique().tolist() == [89.5], (
        "1.5 * 59.75, not 1.5 * 59.87 = 90")
    assert m.double().embed(torch.tensor([[1]])).unique().tolist() == [1.5 * 3584**0.5]


# --- pure functions by hand (`visible`: test_properties.py)


def by_hand(name, want, *args):
    """A function of the model must give this, in float64. A wrong answer is told from others by
    what the mistakes of exercises/wrong.txt give."""
    shown = ", ".join(short(a) for a in args)
    compare(vars(model)[name](*args), wide(want), Mistakes(name, lambda f: f(*args)),
            f"{name}({shown})")


def test_softcap_by_hand():
    by_hand("softcap", [0.0, 1.5231883119115297, -1.5231883119115297, 2.0],
            wide([0.0, 2.0, -2.0, 1000.0]), 2.0)


def test_frequencies_by_hand():
    by_hand("frequencies", [1.0, 0.1, 0.01, 0.001], 8, 10000.0)


def test_frequencies_of_linear_scaling_by_hand():
    """The factor divides, because positions are squeezed into the trained range."""
    by_hand("frequencies", [0.25, 0.025, 0.0025, 0.00025], 8, 10000.0,
            {"rope_type": "linear", "factor": 4.0})


def test_frequencies_of_llama3_by_hand():
    """In 1000 positions the pairs turn 159, 15.9, 1.59 and 0.159 times: the third is blended."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 1000}
    keep = (10 / (2 * math.pi) - 1) / 3         # 0.197 of the third pair stays
    third = keep * 0.01 + (1 - keep) * 0.01 / 8
    by_hand("frequencies", [1.0, 0.1, third, 0.001 / 8], 8, 10000.0, scaling)


def test_rotate_by_hand():
    """Pair (x0, x2) turns by 90 degrees, pair (x1, x3) not at all: (1, 3) becomes (-3, 1)."""
    cos, sin = wide([0.0, 1.0, 0.0, 1.0]), wide([-1.0, 0.0, 1.0, 0.0])
    by_hand("rotate", [-3.0, 2.0, 1.0, 4.0], wide([1.0, 2.0, 3.0, 4.0]), cos, sin)
