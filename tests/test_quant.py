"""Quantised models: the codes by hand, the products, and that nothing else changes. (What their
drafts promise: test_speculative.py and test_paper_gpu.py.)"""
import weakref
from dataclasses import replace
from unittest.mock import Mock

import expected
import pytest
import torch
import torch.nn.functional as F
from tiny import FAMILIES, PROMPTS, each_family, make, oracle, warm

import checkpoint
from lab.save import save
from layerskip import SelfDraft, without
from machine import quant, rows
from machine.quant import KINDS, Int4, Int8, quantise
from methods.costs import by_bytes, by_weights
from model import Placement
from search import Teacher
from speculative import generate

kinds = pytest.mark.parametrize("kind", KINDS)

def matrices(model):
    return [w for b in model.blocks for w in (b.attn.wqkv, b.attn.wo, b.mlp.gate_up, b.mlp.down)]


def dense(model):
    """A quantised model with ordinary matrices instead, those that its own stand for."""
    other = make(model.c)
    for w, q in zip(matrices(other), matrices(model), strict=True):
        w.data.copy_(q.full(w.dtype))
    return other


# --- the codes


def test_int8_by_hand():
    q = Int8(torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0], [254.0, 2.9, -3.1]]))
    assert q.numbers()[0].tolist() == [[64, -127, 32], [0, 0, 0], [127, 1, -2]]
    lane = q.tiles[0, 0].view(8, 16, 4)     # line i, output n, weights 4i .. 4i+3
    assert lane[0, 2].tolist() == [127, 1, -2, 0] and lane[:, :3].count_nonzero() == 6
    assert q.full(torch.float64)[0].tolist() == pytest.approx([64 * 2 / 127, -2, 32 * 2 / 127])
    assert q.full(torch.bfloat16)[1:].tolist() == [[0, 0, 0], [254, 2, -4]]


def test_int8_in_half_precision():
    """A scale of 8.7e-8 would be 6e-8 in float16, and 185 would wrap to -71. Codes are rounded
    once."""
    assert Int8(torch.full((1, 4), 1.1e-5).half()).numbers()[0].tolist() == [[127] * 4]
    w = torch.randn(1, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    q = Int8(w)
    codes, scale = q.numbers()
    assert torch.equal(codes, (w.float() / scale).round().to(torch.int8))


def test_int4_by_hand():
    """A group of 32 from -8 to 7, where steps are 1, and a short one of equal weights."""
    row = torch.cat([torch.arange(-8.0, 8).repeat_interleave(2), torch.full((3,), 0.25)])[None]
    q = Int4(row)
    codes, step, offset = q.numbers()
    assert codes[0, :32].tolist() == [k // 2 for k in range(32)]
    assert (step[0, 0], offset[0, 0]) == (1, -8)
    lines = q.tiles[0, 0, :256].view(4, 16, 4)      # weights 4i .. 4i+3 below, 16+4i .. above
    assert lines[:, 0].flatten().tolist() == [k // 2 | 8 + k // 2 << 4 for k in range(16)]
    assert torch.equal(q.full(torch.float32)[:, :32], row[:, :32])


def test_int4_codes_stay_within_four_bits():
    """In bfloat16 the offset 100.2 becomes 100, and the largest weight is 27 steps away."""
    row = torch.full((1, 32), 100.45)
    row[0, 0] = 100.2
    codes, *_ = Int4(row).numbers()
    assert codes.max() == 15
    assert (Int4(row).full(torch.float32) - row).abs().max() < 0.5


@pytest.mark.parametrize("kind", [Int8, Int4])
def test_only_a_draft_rounds_x(kind):
    """To int8: next to 100, the number 0.1 is lost."""
    w = torch.eye(32)
    x = torch.full((1, 32), 0.1)
    x[0, 0] = 100.0
    for drafts in (False, True):
        q = kind(w)
        q.rounds = drafts
        assert (q.product(x)[0, 1] == 0) == drafts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int4_is_off_by_half_a_step(dtype):
    """Steps and offsets are rounded to bfloat16. The last group of a row is padded."""
    w = torch.randn(40, 70, generator=torch.Generator().manual_seed(0)).to(dtype)
    full = Int4(w).full(torch.float32)
    assert full.shape == w.shape
    groups = F.pad(w.float(), (0, 26)).unflatten(1, (3, 32))
    steps = (groups.amax(2) - groups.amin(2)) / 15
    off = F.pad(full - w.float(), (0, 26)).unflatten(1, (3, 32)).abs().amax(2)
    assert (off <= 0.6 * steps + 1e-6).all()


# --- the product


@kinds
@pytest.mark.parametrize("dtype, device, near", [
    (torch.float64, "cpu", 1e-12), (torch.bfloat16, "cpu", 2e-2), (torch.bfloat16, "cuda", 2e-2)],
                         ids=str)
def test_the_product_is_that_of_the_matrix_it_stands_for(kind, dtype, device, near, monkeypatch):
    """Also where rows.cpp has one of its own, which is for at most 64 rows; x may be a view."""
    rows.library()      # compiled now, and checked by `call`
    few = Mock(wraps=rows.call)
    monkeypatch.setattr(rows, "call", few)
    torch.manual_seed(0)
    q = KINDS[kind](torch.randn(130, 96).to(dtype).to(device))
    whole, block = q.full(dtype).cpu().double(), torch.randn(3, 22, 96)
    for x in (block[:1, :1], block, block[:, -1:], torch.randn(96, 4).T):
        x = x.to(dtype).to(device)
        y, want = F.linear(x, q), x.cpu().double() @ whole.T
        assert y.shape == want.shape and y.dtype == dtype and y.is_cuda == (device == "cuda")
        assert (y.cpu().double() - want).norm() / want.norm() < near
    assert few.call_count == 3 * (dtype == torch.bfloat16 and device == "cpu")


def test_nothing_else_takes_it_for_a_matrix():
    for call in (torch.matmul, lambda x, w: F.linear(x, w, torch.ones(4))):
        with pytest.raises(TypeError):
            call(torch.ones(1, 4), Int8(torch.ones(4, 4)))


@each_family
@kinds
def test_a_quantised_model_is_the_model_of_its_matrices(kind, family):
    """In one pass, in `Teacher`, and as a target."""
    m = make(FAMILIES[family])
    t, ids = quantise(m, kind), torch.tensor([PROMPTS[0]])
    other = dense(t)
    assert torch.equal(t(ids), other(ids)) and not torch.allclose(t(ids), m(ids), atol=1e-3)
    a, b = (Teacher(x, PROMPTS[0], warm).acceptance([0, 1, 4, 7]) for x in (t, other))
    assert torch.equal(a, b)
    drafter = SelfDraft(t, without(6, attn=[1], mlp=[2]), 3)
    assert generate(t, PROMPTS, 10, drafter)[0] == [oracle(other, p, 10) for p in PROMPTS]


@kinds
def test_a_copy_shares_what_is_not_quantised_and_nothing_else(kind):
    m = make(FAMILIES["llama"])
    before = [w.clone() for w in matrices(m)]
    t = quantise(m, kind)
    assert t.tok is m.tok and t.head is m.head and t.norm.weight is m.norm.weight
    assert all(map(torch.equal, matrices(m), before))
    assert all(isinstance(w, KINDS[kind]) for w in matrices(t))
    for a, b in zip(matrices(quantise(t, "int8")), matrices(t), strict=True):
        assert torch.equal(a.tiles, Int8(b.full(torch.float64)).tiles)


def test_costs_by_bytes():
    """Without quantisation they only count weights."""
    m = make(replace(FAMILIES["llama"], n_layers=2, dim=256, hidden_dim=512))
    c, weights = by_bytes(m), by_weights(m.c)
    assert c.draft(range(4), 0.5) == pytest.approx(weights.draft(range(4), 0.5))
    for kind, bits in (("int8", 8), ("int4", 5)):
        own = by_bytes(quantise(m, kind))
        assert own.head * own.unit == pytest.approx(c.head * c.unit) == 17 * 256 * 8
        few, many = ((one.attention + one.mlp) * one.unit for one in (own, c))
        assert few / many == pytest.approx(bits / 64, rel=0.1)


# --- loading


def test_loading_never_holds_two_matrices_in_full(tmp_path):
    m, seen = make(FAMILIES["gemma2"]).bfloat16(), []
    save(m, tmp_path, expected.byte_tokenizer())

    def watched(w):
        seen.append(weakref.ref(w))
        assert [whole() is w for whole in seen if whole() is not None] == [True]
        return Int8(w)

    got = checkpoint.load(tmp_path, "cpu", quant=watched)[0].state_dict()
    want = quantise(m).state_dict()
    assert len(seen) == 24 and got.keys() == want.keys()
    assert all(map(torch.equal, got.values(), want.values()))


@each_family
def test_a_quantised_target_has_its_head_in_int8(family):
    m, q = make(FAMILIES[family]), make(FAMILIES[family])
    quant.quantise_head(q)
    ids = torch.tensor([PROMPTS[0]])
    x = m.run(m.embed(ids), Placement.span(0, ids.shape[1]))
    head = m.tok if m.head is None else m.head
    assert torch.equal(q.head.tiles, Int8(head).tiles)
    assert torch.equal(q.unembed(x), m.unembed(x, q.head.full(torch.float64)))
    assert torch.equal(q.embed(ids), m.embed(ids))


def test_a_copy_keeps_a_head_in_int8_that_int4_would_spoil():
    """Rows with one large number each, whose others four bits round away."""
    ids = [*range(17)] * 3
    m = make(FAMILIES["llama"]).float()
    m.head[:] = 0
    m.head[:, :17] = torch.eye(17)
    assert isinstance(quant.draft_copy(m, "int4", ids).head, Int4)
    m.head[:, 0] = 40.0
    twin = quant.draft_copy(m, "int4", ids)
    assert isinstance(twin.head, Int8) and twin.head.rounds
    assert isinstance(twin.blocks[0].mlp.down, Int4)
    assert torch.equal(quant.draft_copy(twin, "int4", ids).head.tiles, twin.head.tiles)
