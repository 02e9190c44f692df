"""Fused attention: the states of explicit attention."""
from dataclasses import replace

import pytest
import torch
from test_model import LAYOUTS, error, some_x
from tiny import GEMMA, LLAMA, MORE, make

from kvcache import KVCache, prefill
from machine import fused
from machine.fused import Fused, fuse
from model import Placement


@pytest.fixture(autouse=True)
def _few_are_long(monkeypatch):
    monkeypatch.setattr(fused, "LONG", 3)


@pytest.mark.parametrize("name", ["llama", *MORE])
@pytest.mark.parametrize("chunk", [7, 20])
def test_a_prompt(name, chunk):
    """At once, and in pieces that see the keys of those before."""
    c = {"llama": replace(LLAMA, query_scale=0.2), **MORE}[name]
    tokens = torch.arange(40).view(2, 20) * 7 % 17
    want = prefill(make(c), tokens, KVCache(c, 2, 24, torch.float64))
    m = fuse(make(c))
    assert isinstance(m.blocks[0].attn, Fused)
    m.chunk = chunk
    assert error(prefill(m, tokens, KVCache(c, 2, 24, torch.float64)), want) < 1e-12
    assert error(m.run(m.embed(tokens), Placement.span(0, 20)), want) < 1e-12


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_of_a_ragged_batch_and_a_tree(layout):
    states = []
    for m in make(LLAMA), fuse(make(LLAMA)):
        cache = KVCache(m.c, 2, 24, torch.float64)
        m.run(some_x(2, 14), Placement.span(0, 14), cache)
        states.append(m.run(some_x(2, 3), LAYOUTS[layout][0], cache))
    assert error(states[1], states[0]) < 1e-12


def test_half_types():
    """As near to float64 as explicit attention is, whose keys and scores are in float32."""
    x = some_x(2, 20).bfloat16()
    at = Placement.span(0, 20)
    want = make(LLAMA).run(x.double(), at)
    far = error(make(LLAMA).bfloat16().run(x, at), want)
    assert error(fuse(make(LLAMA)).bfloat16().run(x, at), want) < 2 * far


def test_a_short_block_has_the_very_bits_of_explicit_attention():
    x = some_x(2, 2)
    at = Placement.span(0, 2)
    assert torch.equal(fuse(make(LLAMA)).run(x, at), make(LLAMA).run(x, at))


def test_a_soft_cap_stays_explicit():
    m = fuse(make(GEMMA))
    assert not isinstance(m.blocks[0].attn, Fused)
    assert m.chunk == make(GEMMA).chunk


@pytest.mark.parametrize("what", ["a tree", "a window"])
def test_a_tree_and_a_window_from_the_first_slot(what):
    """Where the block is all there is to read, it may still not be a chain."""
    tree = torch.ones(6, 6, dtype=torch.bool).tril()
    tree[3, 2] = False
    here = torch.arange(6)[None]
    at = {"a tree": Placement(here - (here > 2).long(), here, 0, 6, tree),
          "a window": Placement.span(0, 6)}[what]
    c = replace(LLAMA, window=4) if what == "a window" else LLAMA
    states = [m.run(some_x(2, 6), at) for m in (make(c), fuse(make(c)))]
    assert error(states[1], states[0]) < 1e-12
