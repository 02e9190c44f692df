"""The GGUF file that is written for llama.cpp, read back."""
from dataclasses import replace

import expected
import pytest
import torch
from gguf import GGUFReader
from tiny import GEMMA, LLAMA, make

from lab.bench import peers
from model import frequencies, rope, rotate

CONFIGS = {"llama": replace(LLAMA, vocab_size=5, dim=20, hidden_dim=12),
           "tied": replace(LLAMA, tied=True, n_kv_heads=4),
           "llama3": replace(LLAMA, head_dim=12, rope_theta=500.0, rope_scaling=expected.SCALING)}


def tensors_of(path, dtype):
    return {t.name: torch.from_numpy(t.data.copy()).view(torch.float32 if len(t.shape) == 1 else dtype)
            for t in GGUFReader(path).tensors}


@pytest.mark.parametrize("name, dtype", [
    *zip(CONFIGS, (torch.float32, torch.float16, torch.bfloat16), strict=True)])
def test_the_file_holds_the_model(tmp_path, name, dtype):
    """Every tensor; and llama.cpp's rotation, of neighbours, of the file's Q and K gives the scores of
    ours."""
    m, c = make(CONFIGS[name]).to(dtype), CONFIGS[name]
    peers.write_gguf(m, tmp_path / "m.gguf")
    t, b, (Hkv, N, D) = tensors_of(tmp_path / "m.gguf", dtype), m.blocks[3], m.blocks[3].attn.grouped
    wqkv = b.attn.wqkv.view(Hkv, N, D, c.dim)
    want = {"attn_v": wqkv[:, -1].flatten(0, 1), "attn_output": b.attn.wo,
            "ffn_gate": b.mlp.gate_up[: c.hidden_dim], "ffn_up": b.mlp.gate_up[c.hidden_dim :],
            "ffn_down": b.mlp.down, "attn_norm": b.attn_norm.weight.float(),
            "ffn_norm": b.mlp_norm.weight.float()}
    assert all(torch.equal(t[f"blk.3.{key}.weight"], w) for key, w in want.items())
    assert torch.equal(t["token_embd.weight"], m.tok) and ("output.weight" in t) == (not c.tied)
    assert len(t) == 2 + (not c.tied) + 9 * 6 + (c.rope_scaling is not None)
    x = torch.randn(5, c.dim, generator=torch.Generator().manual_seed(0)).double()
    at, qkv = torch.arange(5.0).double(), torch.einsum("td,hgkd->thgk", x, wqkv.double())
    angles = rope(at, frequencies(D, c.rope_theta, c.rope_scaling))
    ours = rotate(qkv[:, :, :-1], *(a[:, None, None] for a in angles))      # (T, Hkv, G+1, D)
    base = c.rope_theta ** -(torch.arange(0, D, 2).double() / D)
    angle = at[:, None, None, None] * base / t.get("rope_freqs.weight", 1)

    def turned(name):
        y = x @ t[f"blk.3.{name}.weight"].double().T
        a, b = y.view(5, Hkv, -1, D // 2, 2).unbind(-1)
        cos, sin = angle.cos(), angle.sin()
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(3)

    pairs = (ours[:, :, :-1], ours[:, :, -1:]), (turned("attn_q"), turned("attn_k"))
    got, want = (torch.einsum("thgd,shxd->hgts", q, k) for q, k in pairs)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_what_the_format_lacks_is_refused(tmp_path):
    for m in (make(GEMMA).float(), make(LLAMA)):
        with pytest.raises(ValueError, match="^only a Llama in float32, float16, bfloat16"):
            peers.write_gguf(m, tmp_path / "m.gguf")
