"""Packed matrices: the products of `F.linear`, and so the same texts, for every way to draft."""
import pytest
import torch
import torch.nn.functional as F
from tiny import LIVELY, PROMPTS, make

from layerskip import SelfDraft
from machine import packed
from machine.packed import Packed, pack, pack_where_it_pays
from machine.quant import quantise, size
from methods.heads import Eagle
from methods.standin import ShortHead
from speculative import NGram, generate

NEAR = {torch.float32: 1e-6, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype, near", [pair for pair in NEAR.items() if packed.packs(pair[0])])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_a_product_is_that_of_the_plain_matrix(rows, dtype, near):
    torch.manual_seed(0)
    w, x = torch.randn(96, 64).to(dtype), torch.randn(2, rows, 64).to(dtype)
    matrix = Packed(w)
    want = F.linear(x.double(), w.double())
    assert (F.linear(x, matrix).double() - want).norm() < near * want.norm()
    assert torch.equal(matrix.full(dtype), w) and size(matrix) == w.nbytes


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("family", LIVELY)
def test_texts_of_a_ragged_batch(family, keep):
    plain, m = (make(LIVELY[family]).float() for _ in range(2))
    rows, blocks = plain.unembed(plain.embed(torch.tensor([[1, 2]])))[..., [3, 5]], size(m.blocks)
    pack(m, keep)
    assert size(m.blocks) == blocks
    want, _ = generate(plain, PROMPTS, 24)
    for drafter in None, SelfDraft(m, range(8), 3), NGram(4, 2), Eagle(m).drafter(3):
        assert generate(m, PROMPTS, 24, drafter)[0] == want
        assert generate(m, PROMPTS[:1], 24, drafter)[0] == want[:1]
    short = ShortHead(m, [3, 5])
    assert torch.allclose(short.unembed(m.embed(torch.tensor([[1, 2]])))[..., [3, 5]], rows, atol=1e-5)
    assert isinstance(short.rows, Packed), "the rows of a short head are packed, too"
    assert torch.equal(quantise(m).blocks[0].mlp.down.codes, quantise(plain).blocks[0].mlp.down.codes)


def test_only_what_is_large_and_faster_is_packed(monkeypatch):
    m, wide = make(LIVELY["llama"]).float(), make(LIVELY["llama"])
    assert 0 < packed.gain(m, 1) < 1000
    monkeypatch.setattr(packed, "LARGE", 0)

    def form(model, one, block):
        """Of a matrix, where packing is worth that with a single row, and with a block."""
        monkeypatch.setattr(packed, "gain", lambda model, rows: one if rows == 1 else block)
        return pack_where_it_pays(model).blocks[0].mlp.down

    assert isinstance(form(m, 1.5, 1.0), torch.Tensor) and isinstance(form(wide, 1.5, 1.5), torch.Tensor)
    monkeypatch.setattr(packed, "HUGE", 0)
    assert isinstance(form(m, 0.8, 1.5), torch.Tensor), "too large to be kept twice"
    monkeypatch.setattr(packed, "HUGE", 1e9)
    assert form(m, 0.8, 1.5).plain is not None
    assert form(make(LIVELY["llama"]).float(), 1.0, 1.5).plain is None
    assert isinstance(form(m, 1.0, 1.5), Packed), "it is packed already"
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    half = form(make(LIVELY["llama"]).bfloat16(), 1.0, 1.5)
    assert isinstance(half, torch.Tensor), "on a processor that cannot"
