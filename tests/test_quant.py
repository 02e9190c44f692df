"""Models in few bits: the table, the codes by hand, the products, and that nothing else changes."""
import copy
import json
from dataclasses import replace

import expected
import promises
import pytest
import torch
import torch.nn.functional as F
from paper_gpu import PaperGPU
from test_speculative import DRAFTERS
from tiny import FAMILIES, PROMPTS, TINY, TINY_GEMMA, devices, each_family, make, oracle, warm
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

import bench
import checkpoint
from benchmarks import quant as bench_quant
from control import weight_costs
from layerskip import SelfDraft, ShortHead, Teacher, without
from machine import quant
from machine.quant import BLOCK, KINDS, NF4, Int8, byte_costs, codebook, quantise, size
from methods.trees import Siblings
from sampling import Coins
from speculative import ModelDraft, NGram, Then, generate, rounds

kinds = pytest.mark.parametrize("kind", KINDS)

PUBLISHED = [  # Dettmers et al. 2023, QLoRA, appendix E
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0]


def matrices(model):
    return [w for b in model.blocks for w in (b.attn.wqkv, b.attn.wo, b.mlp.gate_up, b.mlp.down)]


def dense(model):
    """A quantised model with ordinary matrices, of what its own stand for: it shares no product with it."""
    model = copy.deepcopy(model)
    for module in list(model.blocks.modules()):
        for name, w in list(module.named_children()):
            if isinstance(w, (Int8, NF4)):
                delattr(module, name)
                setattr(module, name, nn.Parameter(w.full(model.tok.dtype), requires_grad=False))
    return model


# --- the codes


def test_the_codebook_is_the_published_one():
    assert codebook().tolist() == pytest.approx(PUBLISHED, abs=3e-7)
    assert codebook().dtype == torch.float32 and codebook()[[0, 7, 15]].tolist() == [-1, 0, 1], "exactly"


def test_int8_by_hand():
    q = Int8(torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0], [254.0, 2.9, -3.1]]))
    assert q.codes.tolist() == [[64, -127, 32], [0, 0, 0], [127, 1, -2]] and q.codes.dtype == torch.int8
    assert q.full(torch.float64)[0].tolist() == pytest.approx([64 * 2 / 127, -2, 32 * 2 / 127])
    assert q.full(torch.float32)[1:].tolist() == [[0, 0, 0], [254, 2, -4]]
    assert q.full(torch.bfloat16).dtype == torch.bfloat16


def test_a_scale_that_rounds_down_leaves_no_room():
    w = torch.full((1, 4), 1.1e-5, dtype=torch.float16)     # a scale of 8.7e-8, where float16 counts by 6e-8
    q = Int8(w)
    assert q.scale.dtype == torch.float16 and q.codes.tolist() == [[127] * 4], "185 would wrap to -71"


def test_codes_of_half_types_are_rounded_once():
    w = torch.randn(1, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    q = Int8(w)
    assert torch.equal(q.codes[0], (w[0].double() / q.scale.double()).round().to(torch.int8))


def test_nf4_by_hand():
    """Two blocks of 64, of magnitudes 2 and .5; the second is short: two levels and then nothing."""
    row = torch.zeros(1, 66)
    row[0, :4] = torch.tensor([2.0, -2.0, 0.3, -0.2])   # 1, -1, .15, -.1
    row[0, 64:] = torch.tensor([0.5, 0.12])             # 1, .24
    q = NF4(row)
    assert q.codes.shape == (1, 64) and q.codes[0, :3].tolist() == [15 * 16 + 0, 9 * 16 + 6, 7 * 16 + 7]
    assert q.codes[0, 32:34].tolist() == [15 * 16 + 10, 7 * 16 + 7]
    assert q.mean == 1.25 and q.most.tolist() == [127, -127] and float(q.scale) == pytest.approx(0.75 / 127)
    full = q.full(torch.float64)
    assert full.shape == (1, 66) and full.dtype == torch.float64
    want = [2, -2, 2 * PUBLISHED[9], 2 * PUBLISHED[6], 0]
    assert full[0, :5].tolist() == pytest.approx(want) and full[0, 64:].tolist() == pytest.approx(
        [0.5, 0.5 * PUBLISHED[10]])


def test_each_weight_is_the_nearest_level_of_its_block():
    torch.manual_seed(0)
    w = torch.randn(70, 200)    # more rows than are quantised at a time, and a short last block
    blocks = F.pad(w, (0, 56)).view(70, 4, BLOCK)
    most = blocks.abs().amax(-1, keepdim=True)
    nearest = (blocks / most)[..., None].sub(codebook()).abs().argmin(-1)
    q = NF4(w)
    codes = torch.stack([q.codes // 16, q.codes % 16], -1).view(70, 4, BLOCK)
    assert torch.equal(codes.long(), nearest)
    kept = q.full(torch.float32) / (codebook()[nearest].flatten(1)[:, :200]).where(w != 0, 1)
    levels = codebook()[nearest].flatten(1)[:, :200]
    want = most.expand_as(blocks).flatten(1)[:, :200]
    assert (kept - want)[levels != 0].abs().max() <= float(q.scale.max()) / 2 + 1e-6, "magnitudes in 8 bits"
    assert float((kept - want)[levels != 0].abs().max()) > 0, "which they are"


@pytest.mark.parametrize("make_codes, error, bits", [(Int8, 0.0087, 8 + 32 / 4096), (NF4, 0.092, 4.127)])
def test_error_and_bits(make_codes, error, bits):
    """On normally distributed weights; a bfloat16 rounds to .0017. 4.127 is 4 + 8 / 64 + 32 / (64 * 256)."""
    torch.manual_seed(0)
    w = torch.randn(256, 4096)
    q = make_codes(w)
    table = q.pairs.nbytes if make_codes is NF4 else 0
    assert float((q.full(torch.float32) - w).norm() / w.norm()) == pytest.approx(error, rel=0.03)
    assert 8 * (size(q) - table) / w.numel() == pytest.approx(bits, abs=1e-3)


@kinds
def test_rows_of_zeros_and_extremes(kind):
    w = torch.zeros(3, 130)
    w[2] = 1e-30
    q = KINDS[kind](w)
    assert torch.equal(q.full(torch.float32)[:2], w[:2])
    assert q.full(torch.float32)[2].tolist() == pytest.approx([1e-30] * 130, rel=0.01)


# --- the product


@devices
@kinds
@pytest.mark.parametrize("dtype, near", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float16, 4e-3),
                                         (torch.bfloat16, 2e-2)], ids=str)
def test_the_product_is_that_of_the_matrix_it_stands_for(kind, dtype, near, device, monkeypatch):
    """Also where torch has one of its own; x may be a view."""
    torch.manual_seed(0)
    honest, seen = torch._weight_int8pack_mm, []
    monkeypatch.setattr(torch, "_weight_int8pack_mm", lambda *args: seen.append(0) or honest(*args))
    w = torch.randn(130, 96, dtype=dtype).to(device)
    q = KINDS[kind](w)
    whole = q.full(dtype).cpu().double()
    assert 0.001 < (whole - w.cpu().double()).norm() / whole.norm() < 0.12
    ones, block = torch.randn(1, 1, 96), torch.randn(3, 17, 96)
    for x in (ones, block, block[:, -1:], torch.randn(96, 4).T):
        x = x.to(dtype).to(device)
        y = F.linear(x, q)
        want = x.cpu().double() @ whole.T
        assert y.shape == want.shape and y.dtype == dtype and y.is_cuda == (device == "cuda")
        assert (y.cpu().double() - want).norm() / want.norm() < near
    assert len(seen) == 4 * ((kind, dtype, device) == ("int8", torch.bfloat16, "cpu"))


def test_nothing_else_takes_it_for_a_matrix():
    for call in (torch.matmul, lambda x, w: F.linear(x, w, torch.ones(4))):
        with pytest.raises(TypeError):
            call(torch.ones(1, 4), Int8(torch.ones(4, 4)))


def test_a_quantised_model_is_not_saved(tmp_path):
    with pytest.raises(ValueError, match="^a quantised model cannot be saved: save the model that"):
        checkpoint.save(quantise(make(FAMILIES["llama"])), tmp_path, expected.byte_tokenizer())
    assert not list(tmp_path.iterdir())


@each_family
@kinds
def test_a_quantised_model_is_the_model_of_its_matrices(kind, family):
    """In `run`, for any sub-layers, and in `Teacher`."""
    m = make(FAMILIES[family])
    t = quantise(m, kind)
    other, ids = dense(t), torch.tensor([PROMPTS[0]])
    assert torch.equal(t(ids), other(ids)) and not torch.allclose(t(ids), m(ids), atol=1e-3)
    for subs in (None, range(6), [0, 3, 4, 11]):
        a, b = (x.run(x.embed(ids), slice(0, 8), sublayers=subs) for x in (t, other))
        assert torch.equal(a, b)
    a, b = (Teacher(x, PROMPTS[0], warm) for x in (t, other))
    assert torch.equal(a.acceptance([0, 1, 4, 7]), b.acceptance([0, 1, 4, 7]))
    assert a.acceptance(range(12)).tolist() == pytest.approx([1.0] * 8)


def test_a_copy_shares_what_is_not_quantised_and_nothing_else():
    m = make(FAMILIES["llama"])
    before = [w.clone() for w in matrices(m)]
    t = quantise(m, "nf4")
    assert t.tok is m.tok and t.head is m.head and t.norm.weight is m.norm.weight and t.scale is m.scale
    assert t.blocks is not m.blocks and t.blocks[0].mlp_norm.weight is m.blocks[0].mlp_norm.weight
    assert all(map(torch.equal, matrices(m), before)) and all(isinstance(w, NF4) for w in matrices(t))
    again = quantise(t, "int8")
    for a, b in zip(matrices(again), matrices(t), strict=True):
        assert torch.equal(a.codes, Int8(b.full(torch.float64)).codes)
    with pytest.raises(ValueError, match="^unknown kind 'int4' of quantisation: int8 and nf4 are known$"):
        quantise(m, "int4")


def test_costs_by_bytes():
    """Without quantisation they are those by weights."""
    m = make(replace(FAMILIES["llama"], n_layers=2, dim=256, hidden_dim=512))
    c, weights = byte_costs(m), weight_costs(m.c)
    assert c.step(range(4), 0.5) == pytest.approx(weights.step(range(4), 0.5)) and c.head == 17 * 256 * 8
    for kind, bits in (("int8", 8), ("nf4", 4.13)):
        own = byte_costs(quantise(m, kind))
        assert own.head == c.head
        assert sum(own.sublayers) / sum(c.sublayers) == pytest.approx(bits / 64, rel=0.1)


# --- drafting


@pytest.fixture(scope="module")
def targets():
    """{family: (a quantised model, what its matrices say without cache or loop)}"""
    made = {"llama": quantise(make(FAMILIES["llama"]), "nf4"), "gemma2": quantise(make(FAMILIES["gemma2"]))}
    return {family: (m, [oracle(dense(m), p, 10) for p in PROMPTS]) for family, m in made.items()}


@each_family
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_identity_of_a_quantised_target(targets, name, family):
    m, want = targets[family]
    assert generate(m, PROMPTS, 10, DRAFTERS[name](m))[0] == want


COPIES = {  # drafters that have a copy of their model in few bits
    "all": lambda m: ModelDraft(quantise(m), 3),
    "exit": lambda m: ModelDraft(quantise(m), 3, range(8)),
    "skip": lambda m: ModelDraft(quantise(m, "nf4"), 3, without(6, attn=[1, 4], mlp=[2])),
    "exit of a stranger": lambda m: SelfDraft(quantise(m, "nf4"), range(8), 3),
    "short head": lambda m: ModelDraft(ShortHead(quantise(m, "nf4"), [4, 9, 0, 2, 16, 3]), 3),
    "then n-gram": lambda m: Then(ModelDraft(quantise(m, "nf4"), 3), NGram(3, 1)),
    "siblings": lambda m: Siblings(ModelDraft(quantise(m), 3), (1, 1))}


test_greedy_identity_with_a_copy = promises.greedy_identity(COPIES)


@each_family
def test_a_copy_is_a_good_draft_and_the_more_bits_the_better(family):
    m = make(FAMILIES[family])
    passes = [generate(m, PROMPTS, 24, ModelDraft(draft, 3))[1] for draft in (
        m, quantise(m, "int8"), quantise(m, "nf4"), make(m.c, 9))]
    assert passes[0] == 6 and passes == sorted(passes) and passes[0] < passes[2] < passes[3]


LAWS = {
    "int8 target, exit": (TINY, "int8", lambda m, t: (t, SelfDraft(t, range(4), 2))),
    "nf4 target, skip": (TINY_GEMMA, "nf4", lambda m, t: (t, SelfDraft(t, [0, 2, 3, 5], 2))),
    "nf4 target, model": (TINY, "nf4", lambda m, t: (t, ModelDraft(make(replace(TINY, n_layers=1), 7), 2))),
    "nf4 copy": (TINY, "nf4", lambda m, t: (m, ModelDraft(t, 2))),
    "int8 copy, exit": (TINY_GEMMA, "int8", lambda m, t: (m, ModelDraft(t, 2, range(4)))),
    "nf4 copy of int8": (TINY, "int8", lambda m, t: (t, ModelDraft(quantise(t, "nf4"), 2, [0, 1, 3, 5])))}


@pytest.mark.parametrize("name", LAWS)
def test_exact_law(name):
    c, kind, build = LAWS[name]
    m = make(c, 3)
    target, drafter = build(m, quantise(m, kind))
    promises.assert_exact(target, lambda _: drafter, count=2, room=2)


# --- on the GPU of paper, and loading


@kinds
def test_on_a_gpu_all_of_it_is_there_and_nothing_waits(kind):
    m = make(FAMILIES["gemma2"]).float()
    with PaperGPU() as gpu:
        m = m.to("cuda")
        gpu.waits.clear()
        t = quantise(m, kind)
        # the table of NF4 is made on the CPU
        assert all(b.is_cuda for b in t.buffers()) and len(gpu.waits) == (24 if kind == "nf4" else 0)
        before = gpu.operations["cuda"]
        x = F.linear(torch.ones(1, 1, 32, device="cuda"), t.blocks[0].mlp.gate_up)
        assert x.is_cuda and gpu.operations["cuda"] - before >= 4, "what it does inside is seen"
        moved = copy.deepcopy(t).to("cpu")
        with pytest.raises(RuntimeError, match="must be on one device"):
            F.linear(x[..., :32], moved.blocks[0].mlp.gate_up)
        gpu.waits.clear()
        for state, _ in rounds(m, PROMPTS, 8, ModelDraft(t, 2), warm, Coins(0)):
            assert state.cache.k.is_cuda
        assert {wait.split(":")[0] for wait in gpu.waits} == {"speculative.py"}


class Peak(TorchDispatchMode):
    """The most bytes that tensors took at any one time."""

    def __init__(self):
        super().__init__()
        self.live, self.most = WeakIdKeyDictionary(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.device.type != "meta":
                self.live[t.untyped_storage()] = t.untyped_storage().nbytes()
        self.most = max(self.most, sum(self.live.values()))
        return out


@pytest.mark.parametrize("kind, family", [("int8", "gemma2"), ("nf4", "llama")])
def test_loading_a_quantised_model_takes_little(tmp_path, kind, family, monkeypatch):
    """No more than the quantised model and one matrix. Here 64 rows would be a quarter of a matrix; of a
    large model they are very little."""
    monkeypatch.setattr(quant, "ROWS", 8)
    c = replace(FAMILIES[family], n_layers=3, dim=256, hidden_dim=1024)
    m = make(c).bfloat16()
    checkpoint.save(m, tmp_path, expected.byte_tokenizer())
    with Peak() as peak:
        got, _ = checkpoint.load(tmp_path, "cpu", quant=KINDS[kind])
    want = quantise(m, kind)
    assert all(map(torch.equal, got.state_dict().values(), want.state_dict().values()))
    assert got.state_dict().keys() == want.state_dict().keys()
    matrix = m.blocks[0].mlp.gate_up.nbytes     # the largest: it holds two tensors, read one by one
    assert size(got) < peak.most < size(got) + 1.75 * matrix < size(m)


# --- the benchmark


@each_family
def test_the_acceptance_of_a_copy_is_that_of_its_first_drafts(family):
    """Of the target's own exit it is the Teacher's; of a copy, what a pass over the text says."""
    m = make(FAMILIES[family])
    t, teacher = quantise(m, "nf4"), Teacher(m, PROMPTS[0], warm)
    assert bench_quant.acceptance(teacher, m, range(8)).tolist() == pytest.approx(
        teacher.acceptance(range(8)).tolist())
    p, q = (warm(x(torch.tensor([PROMPTS[0]])))[0] for x in (m, dense(t)))
    assert bench_quant.acceptance(teacher, t, range(12)).tolist() == pytest.approx(
        torch.minimum(p, q).sum(-1).tolist())


@each_family
def test_the_acceptance_of_an_assistant_of_another_size(family):
    """It reads the text by its own embeddings."""
    text = torch.tensor([PROMPTS[0]])
    m, small = make(FAMILIES[family]), make(replace(FAMILIES[family], dim=24, n_layers=2))
    assert bench_quant.acceptance(Teacher(m, PROMPTS[0], warm), small, range(4)).tolist() == pytest.approx(
        torch.minimum(warm(m(text)), warm(small(text)))[0].sum(-1).tolist())


def test_bytes_on_paper():
    """As large as the checkpoints on Hugging Face are, and as bitsandbytes makes them: 13B in about 7 GB."""
    gigabytes = {name: bench_quant.paper_bytes(c)[2] / 1e9 for name, c in bench_quant.SHAPES.items()}
    known = {"TinyLlama 1.1B": 2.2, "Llama 3.2 1B": 2.5, "Llama 3.2 3B": 6.4, "Llama 3.1 8B": 16.1,
             "Gemma-2 2B": 5.2, "Gemma-2 9B": 18.5, "Llama 2 13B": 26.0}
    assert gigabytes == pytest.approx(known, abs=0.06)
    seed = bench_quant.paper_bytes(bench_quant.SHAPES["Llama 2 13B"], "nf4")
    assert seed[2] == pytest.approx(7.2e9, rel=0.01)
    assert bench_quant.paper_bytes(bench_quant.LARGE)[2] == pytest.approx(141.1e9, rel=0.001)
    c = replace(FAMILIES["llama"], n_layers=2, dim=256, hidden_dim=512)
    for kind in KINDS:
        own = byte_costs(quantise(make(c).bfloat16(), kind))
        blocks, head, whole = bench_quant.paper_bytes(c, kind)
        assert blocks == pytest.approx(sum(own.sublayers), rel=0.07) and head == own.head
        assert whole == blocks + 2 * head


def test_known_shapes_on_paper():
    """By hand: 40 blocks of 317.2 M weights and a head of 163.8 M, which stays in bfloat16. At alpha .9 and
    c = 6.87 / 25.7 five drafts bring (1 - .9^6) / .1 = 4.69 tokens for 2.34 passes."""
    lines = bench_quant.paper_table()
    row = next([cell.strip() for cell in line.split("|")[2:-1]] for line in lines if "Llama 2 13B |" in line)
    assert row == ["26.0", "13.3", "7.2", "0.51", "3", "1.37", "0.27", "5", "2.00"]
    assert len(lines) == 2 + len(bench_quant.SHAPES) + 3 and "9.4 GB together" in lines[-2]


def test_several_devices_on_paper():
    """One token of a 70B model in bfloat16 reads 139 GB, in 41.5 ms at 3.35 TB/s."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in bench_quant.several_table()[2:-1]]
    assert [row[1] for row in rows] == ["1", "2", "4", "8"] * 2
    assert rows[0] == ["bfloat16", "1", "141.1", "139.0", "0", "16", "41.5", "41.5"]
    assert rows[2][3:] == ["34.8", "162", "16", "12.0", "18.5"], "34.8 / 3.35 ms, and 162 sums"


def test_the_benchmark_runs(capsys):
    draft = bench_quant.WEIGHTS / "stories-draft"
    argv = ["quant", "--model", str(draft), "--quick", "--new", "8", "--repeats", "1"]
    assert bench.main([*argv, "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)["models"]["stories-draft"]
    assert err == "" and set(found) == {"bfloat16", "int8", "nf4"}
    assert list(found["bfloat16"]) == ["exit 1", "int8", "int8, exit 1", "nf4", "nf4, exit 1"]
    for row in (row for rows in found.values() for row in rows.values()):
        assert 0 <= row["alpha"] <= 1 <= row["tau"] <= 4 and 0 < row["c_clock"] and row["speed"] > 0
        assert row["speed_bytes"] == pytest.approx(row["tau_predicted"] / (3 * row["c_bytes"] + 1))
    exits, int8, nf4 = (found["bfloat16"][name] for name in ("exit 1", "int8", "nf4"))
    assert exits["megabytes"] == 0 < nf4["megabytes"] < int8["megabytes"]
    assert nf4["c_bytes"] < int8["c_bytes"] < 1
    assert int8["alpha"] > nf4["alpha"] - 0.05 and int8["alpha"] > exits["alpha"]
    assert found["nf4"]["stories-draft"]["c_bytes"] > 1, "the draft has all its bits, and the target has not"
