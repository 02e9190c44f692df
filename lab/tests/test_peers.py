"""The GGUF file, read back by the format's specification."""
import math
import struct
from dataclasses import replace

import expected
import pytest
import torch
from tiny import GEMMA, LLAMA, make

from lab.bench import gguf
from model import frequencies, rope, rotate

CONFIGS = {"llama": replace(LLAMA, vocab_size=5, dim=20, hidden_dim=12),    # few end at 32 bytes
           "tied": replace(LLAMA, tied=True, n_kv_heads=4),
           "llama3": replace(LLAMA, head_dim=12, rope_theta=500.0, rope_scaling=expected.SCALING)}
TORCH = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}


class Reader:
    """A GGUF file of version 3 -> its metadata and tensors."""

    def __init__(self, path):
        self.data, self.at = path.read_bytes(), 4
        version, tensors, known = self.numbers("<IQQ")
        assert self.data[:4] == b"GGUF" and version == 3
        self.metadata, self.tensors = dict((self.string(), self.value()) for _ in range(known)), {}
        infos = [(self.string(), self.numbers(f"<{self.numbers('<I')[0]}Q"), *self.numbers("<IQ"))
                 for _ in range(tensors)]
        start = end = math.ceil(self.at / 32) * 32
        for name, sizes, kind, offset in infos:
            w = torch.frombuffer(bytearray(self.data), dtype=TORCH[kind], count=math.prod(sizes),
                                 offset=start + offset)
            assert offset % 32 == 0 and start + offset >= end, "tensors overlap"
            self.tensors[name], end = w.view(*reversed(sizes)), start + offset + w.nbytes
        assert math.ceil(end / 32) * 32 == len(self.data)

    def numbers(self, form):
        self.at += struct.calcsize(form)
        return struct.unpack_from(form, self.data, self.at - struct.calcsize(form))

    def string(self):
        return self.numbers(f"{self.numbers('<Q')[0]}s")[0].decode()

    def value(self):
        kind, = self.numbers("<I")
        return self.string() if kind == 8 else self.numbers({4: "<I", 6: "<f"}[kind])[0]


@pytest.mark.parametrize("name, dtype", [*zip(CONFIGS, TORCH.values(), strict=True)])
def test_the_file_holds_the_model(tmp_path, name, dtype):
    """Every tensor; and llama.cpp's rotation, of neighbours, of the file's Q and K gives the scores
    of ours."""
    m, c = make(CONFIGS[name]).to(dtype), CONFIGS[name]
    gguf.write(m, tmp_path / "m.gguf")
    f = Reader(tmp_path / "m.gguf")
    t, b, (Hkv, N, D) = f.tensors, m.blocks[3], m.blocks[3].attn.grouped
    wqkv = b.attn.wqkv.view(Hkv, N, D, c.dim)
    want = {"attn_v": wqkv[:, -1].flatten(0, 1), "attn_output": b.attn.wo,
            "ffn_gate": b.mlp.gate_up[: c.hidden_dim], "ffn_up": b.mlp.gate_up[c.hidden_dim :],
            "ffn_down": b.mlp.down, "attn_norm": b.attn_norm.weight.float(),
            "ffn_norm": b.mlp_norm.weight.float()}
    assert all(torch.equal(t[f"blk.3.{key}.weight"], w) for key, w in want.items())
    assert torch.equal(t["token_embd.weight"], m.tok) and ("output.weight" in t) == (not c.tied)
    assert len(t) == 2 + (not c.tied) + 9 * 6 + (c.rope_scaling is not None)
    assert f.metadata["llama.attention.head_count_kv"] == c.n_kv_heads
    x = torch.randn(5, c.dim, generator=torch.Generator().manual_seed(0)).double()
    at, qkv = torch.arange(5.0).double(), torch.einsum("td,hgkd->thgk", x, wqkv.double())
    angles = rope(at, frequencies(D, c.rope_theta, c.rope_scaling))
    ours = rotate(qkv[:, :, :-1], *(a[:, None, None] for a in angles))      # (T, Hkv, G+1, D)
    base = f.metadata["llama.rope.freq_base"] ** -(torch.arange(0, D, 2).double() / D)
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
            gguf.write(m, tmp_path / "m.gguf")
