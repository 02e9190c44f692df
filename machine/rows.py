"""The C++ of pass.cpp and what it includes, compiled once per machine and called by ctypes.

    library()               what is compiled, or None where that cannot be done
    describe(w)             a matrix as a Weight, one of the structs that both languages share
    call(library(), x, ...) y = x w^T for few rows, each with the same bits alone and among others

Compiling takes some five seconds. The result lies in the user's cache folder, under a name made of
the source, the instruction sets that the compiler was allowed to use, and the processor. It has
passed `check` before it is kept, and one product before it is used again.
"""
import ctypes
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from functools import cache
from math import inf
from pathlib import Path

import torch

from machine.files import cache_file, digest, find_hashed, keep, keep_hashed, note, processor
from model import Refused

WIDTHS = 24, 32, 48, 64, 256    # numbers of rows for which torch's product may be slower
ALL = 2**62     # more rows than there are
PACKED = 64     # rows from which on it pays to unpack a matrix of whole numbers
FLOATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}    # a `Kind` in rows.cpp
# a `Kind` of whole numbers, by their bits and by the form in which they take x
INTEGERS = {(8, "as it is"): 3, (4, "as it is"): 4, (8, "in bfloat16"): 3, (4, "in bfloat16"): 5,
         (8, "rounded"): 6, (4, "rounded"): 7}
FILES = "vectors.cpp", "rows.cpp", "bits.cpp", "kinds.cpp", "pass.cpp"
SOURCES = [Path(__file__).with_name(name) for name in FILES]


def fields(kind, names):
    return [(name, kind) for name in names.split()]


class Weight(Structure):
    """`Weight` in rows.cpp. It holds addresses only, so its tensors must outlive it."""
    _fields_ = [*fields(c_void_p, "data scale"), *fields(c_int64, "n k kind")]


class BlockWeights(Structure):
    """`BlockWeights` in pass.cpp."""
    _fields_ = [*fields(c_void_p, "attn_norm attn_post mlp_norm mlp_post q_norm k_norm bias"),
                *fields(Weight, "wqkv wo gate_up down"), ("window", c_int64)]


class Model(Structure):
    """`Model` in pass.cpp."""
    _fields_ = [("blocks", POINTER(BlockWeights)),
                *fields(c_int64, "dim heads kv_heads head_dim hidden gelu"),
                *fields(c_float, "eps scale softcap")]


class Pass(Structure):
    """`Pass` in pass.cpp."""
    _fields_ = [*fields(POINTER(c_int64), "sublayers places"),
                *fields(c_int64, "count B T end threads"),
                *fields(c_void_p, "positions slots masks cos sin"), ("local", c_int64),
                *fields(c_void_p, "keys values"),
                *fields(c_int64, "layer text head"), *fields(c_void_p, "x out")]


# --- compiling


def compiler():
    """The C++ compiler, and what CXX names after it, such as flags of its own. Raises
    FileNotFoundError if there is none."""
    usual = "clang++" if sys.platform == "darwin" else "g++"
    command, *more = shlex.split(os.environ.get("CXX", usual))
    if not shutil.which(command):
        raise FileNotFoundError("no C++ compiler: install g++ or clang, or name it in CXX")
    return command, more


def flags():
    """Flags for this machine. Sums must keep their order, so -ffast-math must not be among them,
    and the compiler must not choose which products it adds without rounding them."""
    native = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    threads = [] if sys.platform == "darwin" else ["-fopenmp"]
    return ["-O3", "-std=c++17", native, *threads, "-fno-math-errno", "-fno-trapping-math",
            "-ffp-contract=off", "-Wno-psabi", "-shared", "-fPIC"]


def commands():
    """The ways to compile, the best first. Some compilers come without OpenMP, that is, without
    threads."""
    command, more = compiler()
    usual = flags()
    single = [flag for flag in usual if flag != "-fopenmp"]
    return [[command, *some, *more] for some in (usual, single)]


def fingerprint():
    """A hash of what the compiled loops depend on. -march=native resolves to instruction sets,
    which the compiler names among its macros, beside its version."""
    command = commands()[0]
    macros = subprocess.run([*command, "-dM", "-E", "-x", "c++", os.devnull], capture_output=True)
    facts = [source.read_bytes() for source in SOURCES]
    return digest(*facts, " ".join(command).encode(), macros.stdout, processor().encode())


def build(stem):
    """Compile the sources, and keep the result; for `stem` see `keep_hashed`. Returns the library.
    Raises OSError or ValueError if it cannot be compiled or does not pass its check."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / f"{stem.name}.so"
        for command in commands():
            run = subprocess.run([*command, str(SOURCES[-1]), "-o", str(made)],
                                 capture_output=True, text=True)
            if run.returncode == 0:
                break
        else:
            said = run.stderr.strip().splitlines() or [f"status {run.returncode}"]
            raise Refused(f"{command[0]}, which failed: {said[0]}")
        lib = ctypes.CDLL(str(made))
        check(lib)
        try:
            keep_hashed(stem, ".so", made.read_bytes())
        except OSError as e:
            note("rows", f"not kept, so the next run compiles again: {e}")
    return lib


def load_kept(stem):
    """The library that an earlier run has kept and checked, or None if there is none that works
    here. It cannot be loaded from a folder without the right to execute."""
    path = find_hashed(stem, ".so")
    if path is None:
        return None
    try:
        lib = ctypes.CDLL(str(path))
        w = torch.ones(3, 8)    # trap: its Weight holds its address only
        y = call(lib, torch.ones(1, 8), describe(w), torch.float32)
        if y.tolist() != [[8.0, 8.0, 8.0]]:
            raise ValueError("a product is wrong")
    except (OSError, ValueError, AttributeError) as e:
        note("rows", f"{path} is not used: {e}")
        return None
    return lib


@cache
def library():
    """The compiled functions. If there are none, print one line that says why, and return None."""
    try:
        stem = cache_file(f"rows-{fingerprint()}")
        lib = load_kept(stem)
        if lib is None:
            note("rows", "compiling the loops of machine/rows.cpp, once per machine")
            lib = build(stem)
        return lib
    except (OSError, ValueError) as e:
        note("rows", f"few rows are multiplied by the library, because of {e}")
        return None


def check(lib):
    """Raise ValueError if a product is wrong, or if a row depends on the rows beside it, for each
    kind of matrix and for rows that fill no whole step."""
    for K in 8, 100, 600:
        x = torch.linspace(-1, 1, WIDTHS[0] * K).sin().view(-1, K)
        w = torch.linspace(-2, 2, 70 * K).cos().view(-1, K)
        for dtype in FLOATS:
            plain = w.to(dtype)
            y = alone(lib, x.to(dtype), describe(plain), f"{dtype}")
            if not torch.allclose(y, x.to(dtype).float() @ plain.float().T, atol=1e-3):
                raise Refused(f"a product in {dtype} is wrong")
        # any bytes are whole numbers, and these are steps and offsets in bfloat16, too
        tiles = torch.linspace(-2, 2, 5 * (K + 31) // 32 * 256).to(torch.bfloat16)
        scale = torch.ones(80)
        for kind in set(INTEGERS.values()):
            what = Weight(tiles.data_ptr(), scale.data_ptr(), 70, K, kind)
            alone(lib, x, what, f"kind {kind}")


def alone(lib, x, weight, name):
    """The product. Raises ValueError if a row of it is another one alone or among fewer rows."""
    y = call(lib, x, weight, torch.float32)
    for count in range(1, len(x)):
        if not torch.equal(call(lib, x[:count], weight, torch.float32), y[:count]):
            raise Refused(f"a row in {name} depends on the rows beside it")
    return y


@cache
def few(dtype):
    """Up to how many rows the loop multiplies faster than torch, for a matrix of this dtype. It is
    measured once per machine and then kept, so that the next run reads its prompt by the same
    routine. The least is more than any round has. It is ALL where torch has no fast product of this
    dtype, as for bfloat16 on a processor without instructions for it."""
    parts = "few", fingerprint(), torch.__version__, torch.get_num_threads(), dtype
    path = cache_file("-".join(map(str, parts)).replace("torch.", "") + ".txt")
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        count = measured(library(), dtype)
    with suppress(OSError):
        keep(path, str(count).encode())
    return count


def measured(lib, dtype):
    """The largest of WIDTHS at which the loop is faster, or the least of them. The largest of all
    stands for ALL."""
    x = torch.ones(max(WIDTHS), 1024, dtype=dtype)
    w = torch.ones(2048, 1024, dtype=dtype)
    weight = describe(w)
    ways = {"loop": lambda rows: call(lib, rows, weight, dtype), "torch": lambda rows: rows @ w.T}
    for count in reversed(WIDTHS):
        least = dict.fromkeys(ways, inf)
        for _ in range(5):
            for name, way in ways.items():
                start = time.perf_counter()
                way(x[:count])
                least[name] = min(least[name], time.perf_counter() - start)
        if least["loop"] < least["torch"]:
            return ALL if count == max(WIDTHS) else count
    return WIDTHS[0]


# --- calling


def describe(w):
    """The Weight of a matrix, which is a contiguous tensor on the CPU, or a `quant.Matrix` that
    stores whole numbers. It is None for any other."""
    if isinstance(w, torch.Tensor):
        if w.is_cuda or w.dtype not in FLOATS or not w.is_contiguous():
            return None
        return Weight(w.data_ptr(), None, *w.shape, FLOATS[w.dtype])
    return w.describe()


def multiplies(model):
    """Whether machine/rows.cpp computes this model's products of few rows."""
    return model.tok.dtype in FLOATS and not model.tok.is_cuda and library() is not None


def call(lib, x, weight, dtype, norm=None, eps=0.0, cap=0.0):
    """y (..., N) of x (..., K), as `run_product` in pass.cpp has it."""
    x = x.to(dtype).contiguous()
    y = torch.empty(*x.shape[:-1], weight.n, dtype=dtype)
    rows = x.numel() // weight.k
    lib.run_product(c_int64(FLOATS[dtype]), byref(weight), c_void_p(norm), c_float(eps),
                    c_float(cap), c_void_p(x.data_ptr()), c_void_p(y.data_ptr()), c_int64(rows),
                    c_int64(torch.get_num_threads()))
    return y
