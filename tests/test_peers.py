"""The GGUF file, read back by the format's specification, and the peers against this library's own texts."""
import math
import struct
import sys
from dataclasses import replace
from types import SimpleNamespace

import expected
import pytest
import torch
from tiny import GEMMA, LLAMA, PROMPTS, make

from benchmarks import gguf, peers
from model import frequencies, rope, rotate
from speculative import generate

CONFIGS = {"llama": LLAMA, "tied": replace(LLAMA, tied=True, n_kv_heads=4),
           "llama3": replace(LLAMA, head_dim=12, rope_theta=500.0, rope_scaling=expected.SCALING)}
TORCH = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}


class Reader:
    """A GGUF file of version 3 -> its metadata and tensors."""

    def __init__(self, path):
        self.data, self.at = path.read_bytes(), 0
        assert self.take(4) == b"GGUF"
        version, tensors, known = self.numbers("<IQQ")
        assert version == 3
        self.metadata = dict((self.string(), self.value()) for _ in range(known))
        infos = [(self.string(), self.sizes(), *self.numbers("<IQ")) for _ in range(tensors)]
        start = math.ceil(self.at / 32) * 32
        assert all(offset % 32 == 0 for *_, offset in infos) and len({name for name, *_ in infos}) == tensors
        self.tensors, self.end = {}, start
        for name, sizes, kind, offset in infos:
            count = math.prod(sizes)
            w = torch.frombuffer(bytearray(self.data), dtype=TORCH[kind], count=count, offset=start + offset)
            self.tensors[name] = w.view(*reversed(sizes))
            assert start + offset >= self.end, "tensors overlap"
            self.end = start + offset + w.nbytes
        assert math.ceil(self.end / 32) * 32 == len(self.data)

    def take(self, count):
        self.at += count
        return self.data[self.at - count : self.at]

    def numbers(self, form):
        return struct.unpack(form, self.take(struct.calcsize(form)))

    def string(self):
        return self.take(*self.numbers("<Q")).decode()

    def value(self):
        kind, = self.numbers("<I")
        return self.string() if kind == 8 else self.numbers({4: "<I", 6: "<f"}[kind])[0]

    def sizes(self):
        return self.numbers(f"<{self.numbers('<I')[0]}Q")


@pytest.fixture(scope="module")
def models():
    return {name: make(c).float() for name, c in CONFIGS.items()}


def written(model, tmp_path):
    gguf.write(model, tmp_path / "m.gguf")
    return Reader(tmp_path / "m.gguf")


# --- the file


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_file_holds_every_tensor(models, tmp_path, name, dtype):
    m, c = make(CONFIGS[name]).to(dtype), CONFIGS[name]
    f = written(m, tmp_path)
    assert len(f.tensors) == 2 + (not c.tied) + 9 * 6 + (c.rope_scaling is not None)
    t, b = f.tensors, m.blocks[3]
    Hkv, N, D = b.attn.grouped
    wqkv = b.attn.wqkv.view(Hkv, N, D, c.dim)
    assert torch.equal(t["token_embd.weight"], m.tok) and ("output.weight" in t) == (not c.tied)
    assert torch.equal(t["blk.3.attn_v.weight"], wqkv[:, -1].flatten(0, 1))
    assert torch.equal(t["blk.3.attn_output.weight"], b.attn.wo)
    assert torch.equal(t["blk.3.ffn_gate.weight"], b.mlp.gate_up[: c.hidden_dim])
    assert torch.equal(t["blk.3.ffn_up.weight"], b.mlp.gate_up[c.hidden_dim :])
    assert torch.equal(t["blk.3.ffn_down.weight"], b.mlp.down)
    for ours, theirs in ((b.attn_norm, "blk.3.attn_norm"), (b.mlp_norm, "blk.3.ffn_norm"),
                         (m.norm, "output_norm")):
        assert t[theirs + ".weight"].dtype == torch.float32
        assert torch.equal(t[theirs + ".weight"], ours.weight.float())
    assert t["blk.3.attn_q.weight"].dtype == dtype
    assert f.metadata["llama.vocab_size"] == 17 and f.metadata["tokenizer.ggml.model"] == "none"
    assert f.metadata["llama.attention.head_count_kv"] == c.n_kv_heads
    assert f.metadata["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(c.norm_eps)


def test_every_tensor_begins_at_a_multiple_of_32_bytes(tmp_path):
    """Here hardly any tensor ends at one."""
    m = make(replace(CONFIGS["llama"], vocab_size=5, dim=20, hidden_dim=12)).half()
    f = written(m, tmp_path)
    for name, part in (("token_embd", m.tok), ("blk.2.ffn_down", m.blocks[2].mlp.down),
                       ("blk.5.attn_output", m.blocks[5].attn.wo)):
        assert torch.equal(f.tensors[name + ".weight"], part)


@pytest.mark.parametrize("name", CONFIGS)
def test_turning_neighbours_gives_the_same_scores(models, tmp_path, name):
    """llama.cpp's rotation, over the file's Q and K, against ours over our own."""
    m, c = models[name], CONFIGS[name]
    f, D = written(m, tmp_path), c.head_dim
    x = torch.randn(5, c.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    at, freqs = torch.arange(5.0, dtype=torch.float64), frequencies(D, c.rope_theta, c.rope_scaling)
    Hkv, N, _ = m.blocks[0].attn.grouped
    qkv = (x @ m.blocks[0].attn.wqkv.double().T).view(5, Hkv, N, D)
    ours = rotate(qkv[:, :, :-1], *(t[:, None, None] for t in rope(at, freqs)))     # (T, Hkv, G+1, D)
    want = torch.einsum("thgd,shd->hgts", ours[:, :, :-1], ours[:, :, -1])

    divisors = f.tensors["rope_freqs.weight"].double() if c.rope_scaling else 1.0
    base = f.metadata["llama.rope.freq_base"] ** -(torch.arange(0, D, 2, dtype=torch.float64) / D)
    angle = at[:, None, None] * (base / divisors)                           # (T, 1, D/2)

    def turned(name):
        y = (x @ f.tensors[name].double().T).view(5, -1, D // 2, 2)
        a, b = y.unbind(-1)
        cos, sin = angle.cos(), angle.sin()
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(2)

    q, k = turned("blk.0.attn_q.weight"), turned("blk.0.attn_k.weight")
    got = torch.einsum("thgd,shd->hgts", q.view(5, Hkv, N - 2, D), k)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_what_the_format_lacks_is_refused(tmp_path):
    for m in (make(GEMMA).float(), make(LLAMA)):
        with pytest.raises(ValueError, match="^only a Llama in float32, float16, bfloat16 can be written"):
            gguf.write(m, tmp_path / "m.gguf")
    assert not list(tmp_path.iterdir())


# --- the peers


@pytest.mark.parametrize("name", CONFIGS)
def test_gpt_fast_writes_our_text(models, name):
    """Not compiled, so that it needs no GPU. The second text finds the first one's keys in its cache."""
    m = make(CONFIGS[name])
    fast = peers.GptFast(m, compiled=False)
    for prompt in (PROMPTS[0], PROMPTS[1]):
        assert fast.write(prompt, 20) == generate(m, [prompt], 20)[0][0]


class FakeLlama:
    """What `LlamaCpp` needs of llama-cpp-python; it computes nothing: the last token's successor is next."""

    def __init__(self, path, **flags):
        assert open(path, "rb").read(4) == b"GGUF"
        self.flags, self.known, self.ctx = flags, [], self

    def n_vocab(self):
        return 17

    def reset(self):
        self.known = []

    def eval(self, ids):
        self.known += ids


def logits_of(llama):
    import ctypes
    row = (ctypes.c_float * 17)()
    row[(llama.known[-1] + 1) % 17] = 1.0
    return ctypes.cast(row, ctypes.POINTER(ctypes.c_float))


@pytest.fixture
def installed(monkeypatch):
    fake = SimpleNamespace(Llama=FakeLlama, llama_get_logits=logits_of, __spec__=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)


def test_llama_cpp_reads_the_prompt_and_then_its_own_tokens(models, installed):
    peer = peers.LlamaCpp(models["llama"])
    for _ in range(2):
        assert peer.write([3, 8], 4) == [9, 10, 11, 12] and peer.llama.known == [3, 8, 9, 10, 11]
    threads = torch.get_num_threads()
    assert (peer.llama.flags["n_threads"], peer.llama.flags["n_ctx"]) == (threads, 64)
    assert peer.llama.flags["type_k"] == gguf.TYPES[torch.float32]


def test_a_peer_that_is_not_there_is_no_row(models, installed, monkeypatch):
    assert list(peers.find_peers(models["llama"])) == ["llama.cpp"]
    assert peers.find_peers(make(GEMMA).float()) == {} == peers.find_peers(make(LLAMA)), "nor one that cannot"
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    assert peers.find_peers(models["llama"]) == {}
    assert peers.markdown({"m": {"decode": {"ours": 1.0}, "peers": {}}}, 8) == []


class FakeTransformers:
    """What `Static` needs of a model of transformers: a token's successor is next."""
    device, config = "cpu", "its shape"

    def __call__(self, tokens, past_key_values, cache_position, logits_to_keep):
        past_key_values += zip(cache_position.tolist(), tokens[0].tolist(), strict=True)
        return SimpleNamespace(logits=torch.eye(17)[(tokens[:, -logits_to_keep:] + 1) % 17])


def test_transformers_reads_each_token_once_at_its_place(monkeypatch):
    made = []
    fake = SimpleNamespace(StaticCache=lambda config, max_cache_len: made.append([]) or made[-1])
    monkeypatch.setitem(sys.modules, "transformers", fake)
    peer = peers.Static(FakeTransformers(), 6, compiled=False)
    for _ in range(2):
        assert peer.write([3, 8], 4) == [9, 10, 11, 12]
    assert made == 2 * [[(0, 3), (1, 8), (2, 9), (3, 10), (4, 11)]]


def test_a_row_by_hand():
    results = {"m, float16": {"decode": {"ours": 2.0, "llama.cpp": 1.6}, "peers": {"llama.cpp": 7}}}
    assert peers.markdown(results, 8)[2] == "| m, float16 | llama.cpp | 5.0 | 0.80 | 7 of 8 |"
