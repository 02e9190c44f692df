"""Passes over few rows in C++: products by a reference, passes by the eager model, and bits that
depend neither on the number of rows, nor on how a text is cut, nor on the number of threads."""
import platform
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from tiny import GEMMA, LIVELY, LLAMA, MORE, PROMPTS, Unsure, each_family, make

from kvcache import KVCache, prefill
from layerskip import SelfDraft
from machine import rows
from machine.few import FewRows
from machine.quant import Int4, Int8, quantise
from methods.eagle import Eagle
from methods.jump import Jump
from methods.kangaroo import Kangaroo
from methods.standin import ShortHead
from methods.trees import Siblings
from model import Placement
from speculative import generate

ROOT = Path(__file__).resolve().parent.parent
HALF = torch.bfloat16, torch.float16
SOME = LIVELY | MORE
SHAPED = SOME | {   # what the families leave out
    "no window": replace(LIVELY["gemma2"], window=None, n_layers=2),
    "odd sizes": replace(LLAMA, n_heads=3, n_kv_heads=1, head_dim=10, dim=30, hidden_dim=70)}
dtypes = pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
SHAPES = (5, 8), (70, 100), (33, 64), (64, 576), (16, 1500), (11, 5000)   # of matrices, (N, K)
COUNTS = *range(1, 20), 33, 64      # of rows, from one tile of the loop to eight


def kinds(w):
    """{what: (a matrix of this kind, the numbers that it stands for,
    how far a product may be off)}"""
    found = {"plain": (w, w, 1e-6)}
    for kind in Int8, Int4:
        q, rounds = kind(w), kind(w)
        rounds.rounds = True
        found[kind.__name__] = q, q.full(torch.float64), 1e-6
        found[f"{kind.__name__}, x rounded"] = rounds, q.full(torch.float64), 1e-2
    return found


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_the_product_and_a_row_of_it_has_the_same_bits_in_any_company(shape, dtype):
    """Before rounding, because half precision would hide a difference. On one thread and on two."""
    g = torch.Generator().manual_seed(0)
    w = torch.randn(shape, generator=g).to(dtype)
    x = torch.randn(70, shape[1], generator=g).to(dtype).float()
    for what, (matrix, numbers, near) in kinds(w).items():
        weight = rows.describe(matrix)
        y = rows.call(rows.library(), x, weight, torch.float32)
        want = x.double() @ numbers.double().T
        assert (y - want).norm() < near * want.norm(), what
        for count in COUNTS:
            assert torch.equal(rows.call(rows.library(), x[:count], weight, torch.float32),
                               y[:count]), what
        threads = torch.get_num_threads()
        torch.set_num_threads(3 - min(threads, 2))
        assert torch.equal(rows.call(rows.library(), x, weight, torch.float32), y), what
        torch.set_num_threads(threads)


@dtypes
def test_a_number_of_half_the_bits_is_the_nearest_and_of_two_the_even_one(dtype):
    """Of sums without an error: halves of the last bit, the largest and the smallest numbers,
    infinity and NaN."""
    bits = torch.arange(-2**15, 2**15).to(torch.int16)
    numbers = bits.view(torch.float16).float()
    steps = torch.tensor([0.0, 2**-8, 2**-9, 3 * 2**-9, -(2**-9), 2**-11, 2**-12, 3 * 2**-12])
    x = torch.cat([numbers, ((1 + steps) * 2.0 ** torch.arange(-14, 17)[:, None]).flatten(),
                   torch.tensor([65519.0, 65520.0, 65536.0, 1e9, -65520.0])])[:, None]
    one = torch.ones(1, 1)
    # float32 in, the half type out: what a pass does between two products
    got = rows.call(rows.library(), x.to(dtype), rows.describe(one), dtype)
    assert torch.equal(got.nan_to_num(7.0), x.to(dtype).nan_to_num(7.0))
    sums = torch.cat([torch.ones(8, 1), steps[:, None]], 1).to(dtype)   # 1 + a step
    both = torch.ones(1, 2, dtype=dtype)
    got = rows.call(rows.library(), sums, rows.describe(both), dtype)
    assert torch.equal(got, (1 + steps[:, None]).to(dtype))


@dtypes
@pytest.mark.parametrize("family", SHAPED)
@torch.inference_mode()
def test_a_pass_is_the_eager_one_with_the_same_bits(family, dtype):
    """In blocks of 1 to 16 tokens, in two parts, in a batch, in a longer cache."""
    model = make(SHAPED[family]).to(dtype)
    fast = FewRows(model)
    tokens = torch.tensor([[1, 5, 3, 2, 9, 4, 4, 7] * 6])
    near = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}[dtype]

    def read(m, T, parts=(None,), texts=1, slots=60, trace=None):
        """The logits of rows 20 to 35, in blocks of T tokens."""
        cache = KVCache(m.c, texts, slots, m.attention_dtype())
        prefill(model, tokens[:, :20].expand(texts, -1), cache)
        found = []
        for start in range(20, 36, T):
            x = m.embed(tokens[:, start : min(36, start + T)].expand(texts, -1))
            at = Placement.span(start, start + x.shape[1])
            for part in parts:
                x = m.run(x, at, cache, part, trace)
            found.append(m.unembed(x)[-1:])
        return torch.cat(found, 1)

    want, whole = read(model, 16), read(fast, 16)
    assert fast.replays() and (whole - want).norm() < near * want.norm()
    for T in range(1, 16):
        assert torch.equal(read(fast, T), whole), T
    rest = [*range(3, 2 * model.c.n_layers)]
    assert torch.equal(read(fast, 4, parts=([0, 1, 2], rest)), whole)
    assert torch.equal(read(fast, 4, texts=3), whole)
    assert torch.equal(read(fast, 5, slots=124), whole)
    trace = dict.fromkeys([0, rest[0], rest[-1]])
    read(fast, 16, trace=trace)
    seen = dict.fromkeys(trace)
    read(model, 16, trace=seen)
    for tap, state in seen.items():
        assert (trace[tap] - state).norm() < near * state.norm()


def picking(shape, g):
    """A matrix of one 1 per row, so that a product has no sum and no error."""
    rows_, columns = shape
    return torch.zeros(shape).scatter_(1, torch.randint(columns, (rows_, 1), generator=g), 1.0)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("family", SOME)
@torch.inference_mode()
def test_half_types_are_rounded_where_the_eager_pass_rounds_them(family, dtype):
    """Products without a sum leave what lies between them: norms, biases, activations, soft-caps.
    Their exponentials are off by 1e-7, which moves few numbers to their neighbours; a rounding that
    is missing moves every third one."""
    model = make(SOME[family], seed=3)
    g = torch.Generator().manual_seed(0)
    for w in model.parameters():
        if w.dim() == 2:
            w.copy_(picking(w.shape, g))
    model = model.to(dtype)
    fast = FewRows(model)
    x = torch.randn(1, 16, model.c.dim, generator=g).to(dtype)
    for i in range(4):
        at = Placement.span(0, 16)
        want, got = (KVCache(model.c, 1, 20, torch.float32) for _ in range(2))
        y = model.run(x, at, want, [i])
        same = (fast.run(x, at, got, [i]) == y).float().mean()
        assert same > 0.98, i
        assert torch.equal(got.v, want.v)       # a product, a bias, and no rotation
        x = 4 * y
    assert (fast.unembed(x) == model.unembed(x)).float().mean() > 0.98
    assert fast.replays()


@each_family
@torch.inference_mode()
def test_a_path_of_a_tree_has_the_bits_of_a_chain(family):
    """In two texts at different places. Three of the six nodes are on the path, so a sum in another
    order than by slots shows."""
    model = FewRows(make(LIVELY[family]).float())
    path = [0, 2, 5]
    tokens = torch.tensor([[3, 7, 1, 9, 4, 8], [5, 2, 2, 8, 0, 6]])
    sees = torch.eye(6, dtype=torch.bool)
    sees[1:, 0] = True
    sees[5, 2] = True
    for n in range(1, 22):
        first = torch.tensor([[n], [n + 3]])
        cache = KVCache(model.c, 2, 40, torch.float32)
        before = torch.arange(2 * n + 6).view(2, -1) % 17
        model.run(model.embed(before), Placement.span(0, n + 3), cache)
        places = first + torch.tensor([0, 1, 1, 1, 1, 2])
        at = Placement(places, first + torch.arange(6), n, n + 9, sees[None])
        tree = model.run(model.embed(tokens), at, cache)
        slots = first + torch.arange(3)
        chain = model.run(model.embed(tokens[:, path]), Placement(slots, slots, n, n + 6), cache)
        assert torch.equal(tree[:, path], chain), n


def rough(model, kind):
    """A copy that drafts for the model, in the same passes."""
    return model.alongside(quantise(model, kind, kind, rounds=True))


DRAFTERS = {    # for others see test_exact.py
    "stopped": lambda m: SelfDraft(m, range(8), Unsure(5)),
    "int8": lambda m: SelfDraft(rough(m, "int8"), range(12), 3),
    "int4, short": lambda m: SelfDraft(ShortHead(rough(m, "int4"), [3, 5, 9]), range(12), 3),
    "eagle, tree": lambda m: Siblings(fitted(Eagle(m), m).drafter(3), [2, 1]),
    "kangaroo": lambda m: fitted(Kangaroo(m, 2), m).drafter(3),
    "jump": lambda m: fitted(Jump(m, 3), m).drafter(3)}


def fitted(head, model):
    head.own = model.alongside(head.own)
    return head


@each_family
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_texts_are_plain_ones(family, name, dtype):
    """== to plain decoding in the same passes, without any flag: a round has at most 16 rows."""
    fast = FewRows(make(LIVELY[family]).to(dtype))
    for prompt in PROMPTS:
        want, _ = generate(fast, [prompt], 24)
        assert generate(fast, [prompt], 24, DRAFTERS[name](fast))[0] == want


def test_what_it_does_not_know_runs_eagerly():
    """float64, many rows, no cache."""
    wide = make(LLAMA)
    assert not FewRows(wide).replays()
    assert generate(FewRows(wide), PROMPTS, 8) == generate(wide, PROMPTS, 8)
    model = make(LLAMA).float()
    fast = FewRows(model)
    fast.few = 24
    x, at = torch.randn(1, 25, model.c.dim), Placement.span(0, 25)
    for cache in None, KVCache(model.c, 1, 80, torch.float32):
        assert torch.equal(fast.run(x, at, cache), model.run(x, at, cache))


def test_a_prompt_in_the_loop(monkeypatch):
    """Where torch has no fast product, all rows are the loop's, so a prompt may be cut anywhere."""
    monkeypatch.setattr(rows, "few", lambda dtype: rows.ALL)
    fast = FewRows(make(GEMMA).bfloat16())
    tokens = torch.arange(2 * 90).view(2, 90) % GEMMA.vocab_size
    found = []
    for fast.chunk in 80, 7:
        cache = KVCache(fast.c, 2, 90, fast.attention_dtype())
        found.append((prefill(fast, tokens, cache), cache.k, cache.v))
    for whole, cut in zip(*found, strict=True):
        assert torch.equal(whole, cut)


def test_a_matrix_of_a_trained_head():
    fast = FewRows(make(LLAMA).bfloat16())
    x = torch.randn(1, 9, 40).bfloat16()
    w = torch.randn(70, 40).bfloat16()
    y = fast.linear(x, w)
    torch.testing.assert_close(y, torch.nn.functional.linear(x, w))
    for i in range(9):
        assert torch.equal(fast.linear(x[:, i : i + 1], w), y[:, i : i + 1])


def nan(model):
    model.blocks[2].mlp.down[0, 0] = torch.nan


def strange_head(model):
    """A head that is not contiguous would be computed by the library, whose rows depend on those
    beside them."""
    model.head = torch.nn.Parameter(model.head.T.contiguous().T, requires_grad=False)


@pytest.mark.parametrize("spoil, said", [(nan, "stay eager"), (strange_head, "")])
def test_a_pass_that_would_be_wrong_is_not_used(spoil, said, capsys):
    model = make(LLAMA).float()
    spoil(model)
    assert not FewRows(model).replays() and said in capsys.readouterr().err


# --- compiling


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache folder, for loops that are compiled without optimising."""
    command, more = rows.compiler()
    monkeypatch.setenv("CXX", shlex.join([command, *more, "-O0"]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rows.library.cache_clear()
    yield tmp_path
    rows.library.cache_clear()


@pytest.mark.parametrize("command, why", [
    ("no-such-compiler", "CXX"), ("false", "failed"), ("g++ --no-such-flag", "failed")])
def test_without_a_compiler_one_line_says_so(folder, monkeypatch, capsys, command, why):
    monkeypatch.setenv("CXX", command)
    model = make(LLAMA).float()
    fast = FewRows(model)
    assert generate(fast, PROMPTS, 8) == generate(model, PROMPTS, 8) and not fast.replays()
    q = Int8(torch.randn(8, 64))
    assert torch.allclose(q.product(torch.ones(1, 64)), q.full(torch.float32).sum(1), atol=1e-4)
    said = [line for line in capsys.readouterr().err.splitlines() if "because of" in line]
    assert len(said) == 1 and why in said[0]


FIRST = [sys.executable, "-c", "from machine import rows; print(rows.library() is not None)"]


def first():
    """What `rows.library` writes in a new process."""
    run = subprocess.run(FIRST, cwd=ROOT, capture_output=True, text=True)
    return run.stdout + run.stderr


def test_two_processes_may_compile_at_once(folder):
    runs = [subprocess.Popen(FIRST, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [run.communicate()[0] for run in runs] == ["True\n"] * 2
    assert [path.suffix for path in (folder / "self-speculative-decoding").iterdir()] == [".so"]


def test_a_damaged_kept_file_is_compiled_anew(folder):
    """A truncated library would end each later run with SIGBUS, and no output."""
    assert "compiling" in first() and "True\n" == first()
    [path] = folder.rglob("*.so")
    whole = path.read_bytes()
    path.write_bytes(whole[:5000])
    said = first()
    assert "compiling" in said and "True" in said
    assert [p.read_bytes() for p in folder.rglob("*.so")] == [whole]


def test_what_cannot_be_loaded_or_is_another_library_is_not_used(folder, monkeypatch, capsys):
    """A folder that is mounted without the right to execute, and functions that are missing."""
    first()
    load = rows.ctypes.CDLL

    def refuse(path):
        if path.startswith(str(folder)):
            raise OSError("failed to map segment from shared object")
        return load(path)

    for cdll in (refuse, lambda path: load(None) if path.startswith(str(folder)) else load(path)):
        rows.library.cache_clear()
        monkeypatch.setattr(rows.ctypes, "CDLL", cdll)
        assert rows.library() is not None
        assert "is not used: " in capsys.readouterr().err


def test_other_instruction_sets_have_another_file(monkeypatch):
    """On ARM the processor has no name, and virtual machines share theirs."""
    mine = rows.fingerprint()
    assert mine == rows.fingerprint()
    with monkeypatch.context() as patched:
        patched.setattr(rows, "flags", lambda flags=rows.flags: [*flags(), "-D__A_SET__=1"])
        assert rows.fingerprint() != mine
    with monkeypatch.context() as patched:      # what -march=native stands for
        patched.setattr(rows.subprocess, "run", lambda *_, **__: Mock(stdout=b"__A_SET__"))
        assert rows.fingerprint() != mine
    names = set()
    for flags in ("fp asimd", "fp asimd sve bf16"):
        monkeypatch.setattr(Path, "read_text", lambda *_, text=flags, **__: f"Features : {text}")
        names.add(rows.fingerprint())
    assert len(names) == 2


def test_what_is_compiled_wrongly_is_not_kept(folder, monkeypatch, tmp_path_factory, capsys):
    """A row that depends on those beside it by a last bit:
    a float32 shows it, a rounded number may not."""
    source = tmp_path_factory.mktemp("wrong")
    for file in rows.SOURCES:
        text = file.read_text()
        text = text.replace("vf sum[M][2] = {};",
                            "vf sum[M][2] = {}; if (M > 2) sum[0][0] += 1e-7f;")
        (source / file.name).write_text(text)
    monkeypatch.setattr(rows, "SOURCES", [source / file.name for file in rows.SOURCES])
    assert rows.library() is None and not list(folder.rglob("*.so"))
    assert "depends on the rows beside it" in capsys.readouterr().err


MACHINES = {"this one": rows.flags()}
if platform.machine() == "x86_64":      # which is one of these
    MACHINES = {"any": ["-march=x86-64"], "AVX2": ["-mavx2", "-mfma"],
                "AVX-512": ["-march=skylake-avx512"],
                "AVX512_BF16": ["-march=cooperlake"]}
CROSS = shutil.which("aarch64-linux-gnu-g++")
if CROSS:
    MACHINES["NEON"] = ["-march=armv8.2-a"]


@pytest.mark.parametrize("name", MACHINES)
def test_it_compiles_for_other_processors(name, tmp_path):
    compiler = [CROSS] if name == "NEON" else rows.compiler()[:1]
    command = [*compiler, "-O0", "-std=c++17", "-Wno-psabi", "-fPIC", *MACHINES[name]]
    subprocess.run([*command, "-S", "-o", tmp_path / "rows.s", rows.SOURCES[-1]], check=True)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_copy_that_rounds_is_checked_as_roughly_as_it_rounds(kind, capsys):
    """Even in float32, where a last bit that differs moves some numbers of x
    to their neighbours."""
    model = make(replace(LLAMA, dim=512, hidden_dim=1024, n_layers=24), seed=1).float()
    for w in model.blocks.parameters():
        w.data *= 8
    assert FewRows(quantise(model, kind, kind, rounds=True)).replays(), capsys.readouterr().err
