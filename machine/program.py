"""Compiled programs: passes as C++, written once per machine into the user's cache folder.

A program holds no weights. It reads those of the model where they lie, and so it serves every piece
of every model of the same shapes.

    model, f --export--> graph --Inductor--> C++ --g++--> *.pt2 in the cache folder
                            matrices, norms of any blocks --load--^

Compiling takes some ten seconds, most of them in g++, on one core. So it is done by other
processes, as many as there are cores, while the passes run eagerly.
"""
import copy
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from machine.quant import SHARE
from support import files

FEW = 8     # rows of x up to which a product is faster as sums than as the library's own
WIDEST = 16     # tokens of a block that a program for any width takes
# trap: the pattern matcher takes masked grouped attention for another pattern, and the result is
# wrong
NO_PATTERNS = {"pattern_matcher": False}
ROOT = Path(__file__).resolve().parent.parent


# --- writing


class Program(nn.Module):
    """f(model, *inputs) as torch.export takes it: with the weights in a module."""

    def __init__(self, model, f):
        super().__init__()
        self.model = model
        self.f = f

    def forward(self, *inputs):
        return self.f(self.model, *inputs)


def product(x, w, bias=None):
    """`F.linear` for few rows x (..., dim), written as sums: Inductor turns them into loops that
    read each weight once for FEW rows, while the library's matrix product takes two to three times
    as long."""
    return sums(x.flatten(0, -2), w).to(x.dtype).view(*x.shape[:-1], -1)


def int8_product(x, codes, scale):
    """`torch._weight_int8pack_mm` for few rows x (R, dim): the codes are summed, and the sum is
    scaled."""
    return (sums(x, codes) * scale).to(x.dtype)


def sums(x, w):
    """x (R, K) times w (N, K), one sum for each number, in float32 or wider. (R, N)"""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    # trap: else each row is recomputed per output
    wide = wide.as_strided(wide.shape, wide.stride())
    together = max(n for n in range(1, FEW + 1) if len(x) % n == 0)
    groups = wide.view(-1, together, 1, x.shape[1])
    each = [(groups[:, i] * w.to(wide.dtype)).sum(-1) for i in range(together)]     # (groups, N)
    return torch.stack(each, 1).flatten(0, 1)


def write(path, model, f, inputs, fixed, products, any_width):
    """Compile f(model, *inputs, *fixed) into the file `path`, *.pt2. inputs, fixed: the (shape,
    dtype) of each; a program serves any number of slots, and with it any length of masks (6
    dimensions), of angles and of caches. products: "library"; "sums"; or "packed", with packed
    matrices, which the program gets as constants. any_width: it serves blocks of 2 to WIDEST
    tokens; sums are written for one width."""
    any_length = torch.export.Dim.DYNAMIC
    width = torch.export.Dim("width", min=2, max=WIDEST)
    examples = []
    lengths = []
    for shape, dtype in inputs:
        masks = len(shape) == 6
        free = {5: any_length} if masks else {}
        if any_width:
            place = 4 if masks else 1
            free[place] = width
            shape = *shape[:place], FEW, *shape[place + 1 :]    # the same, whichever came first
        examples.append(torch.zeros(shape, dtype=dtype))
        lengths.append(free)
    for shape, dtype in fixed:
        examples.append(torch.zeros(shape, dtype=dtype))
        lengths.append({len(shape) - 2: any_length})
    settings = {
        **NO_PATTERNS,
        "aot_inductor.package_constants_in_so": False,      # the weights stay with the model
        "freezing": products == "packed",
        "emulate_precision_casts": True,    # half types round as in eager passes, however it is cut
        "cpp.enable_floating_point_contract_flag": "fast"}  # one instruction multiplies and adds
    # trap: lengths that are equal here become one number in the program: longer caches
    for i in range(len(inputs) + 2, len(examples)):
        examples[i] = F.pad(examples[i], (0, 0, 0, 1))
    with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings(action="ignore"):
        program = torch.export.export(
            Program(model, f), tuple(examples), strict=False,
            dynamic_shapes={"inputs": tuple(lengths)})
        if products == "sums":
            program = program.run_decompositions({
                torch.ops.aten.linear.default: product,
                torch.ops.aten._weight_int8pack_mm.default: int8_product})
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(path), inductor_configs=settings)


# --- in other processes


def hollow(model):
    """A copy of the model without its weights: of the same shapes, on no device."""
    memo = {}
    for w in [*model.parameters(), *model.buffers()]:
        empty = torch.empty_like(w, device="meta")
        memo[id(w)] = nn.Parameter(empty, False) if isinstance(w, nn.Parameter) else empty
    return copy.deepcopy(model, memo)


class Compilers:
    """Processes that write programs. The jobs lie in a folder, and each process takes one after the
    other until there are none."""

    def __init__(self, say):
        self.say = say
        self.folder = None
        self.processes = []     # all that were started
        self.asked = []     # paths of programs
        self.there = 0      # how many of these were waited for

    def ask(self, path, *what):
        """Have `write(path, *what)` done. Raises OSError where that cannot be."""
        usual = "clang++" if sys.platform == "darwin" else "g++"
        if not shutil.which(os.environ.get("CXX", usual)):
            raise FileNotFoundError("no C++ compiler: install g++ or clang, or name it in CXX")
        path.parent.mkdir(parents=True, exist_ok=True)
        files.check_writable(path)      # now, not after a minute
        self.folder = self.folder or tempfile.TemporaryDirectory()
        model, *rest = what
        job = Path(self.folder.name) / f"{len(self.asked):04}-{path.stem}"
        threads = torch.get_num_threads()   # programs are written for a number of them
        job.with_suffix(".part").write_bytes(pickle.dumps((threads, path, hollow(model), *rest)))
        job.with_suffix(".part").replace(job.with_suffix(".job"))
        self.asked.append(path)
        self.start()

    def start(self):
        """Start processes for the jobs that wait, as many as there are cores. No more than there
        were jobs: one that could not even start would be started for ever."""
        waiting = len([*Path(self.folder.name).glob("*.job")])
        idle = (os.cpu_count() or 1) - len(self.running())
        untried = len(self.asked) - len(self.processes)
        for _ in range(min(waiting, idle, untried)):
            command = [sys.executable, "-m", "machine.program", self.folder.name]
            self.processes.append(subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

    def running(self):
        return [process for process in self.processes if process.poll() is None]

    def failure(self, path):
        """Why a program could not be written; None if it is there or will be."""
        if path.is_file():
            return None
        for file in Path(self.folder.name).glob(f"*-{path.stem}.failed"):
            return file.read_text()
        self.start()
        if self.running() or path.is_file():    # which it may have become since
            return None
        return "the process that compiles it has ended"

    def pending(self):
        return [path for path in self.asked if not (path.is_file() or self.failure(path))]

    def wait(self):
        """Until all programs are there that were asked for. Returns whether any was since the last
        wait."""
        total = len(self.asked) - self.there
        began = time.perf_counter()
        missing = None
        while pending := self.pending():
            if len(pending) != missing:
                missing = len(pending)
                done = total - missing
                left = "a minute or two"
                if done:
                    left = f"about {(time.perf_counter() - began) / done * missing:.0f} s"
                self.say(f"compiling, once per machine: {done} of {total} programs, {left} left")
            time.sleep(0.05)
        self.there = len(self.asked)
        return total > 0


def work(folder):
    """Take jobs from the folder until there are none."""
    while jobs := sorted(Path(folder).glob("*.job")):
        mine = jobs[0].with_suffix(".taken")
        try:
            jobs[0].rename(mine)
        except FileNotFoundError:   # another process was faster
            continue
        try:
            threads, path, model, *rest = pickle.loads(mine.read_bytes())
            torch.set_num_threads(threads)
            with tempfile.TemporaryDirectory() as own:
                program = Path(own) / path.name
                write(program, model.to_empty(device="cpu"), *rest)
                files.keep(path, program.read_bytes())
        except Exception as e:      # whatever a compiler raises
            mine.with_suffix(".failed").write_text(f"{type(e).__name__}: {e}".split("\n")[0])


# --- running


class Weights(TorchFunctionMode):
    """Collects what a pass reads, in the order of use: its `matrices`, and the `vectors` of its
    norms that are computed from weights, such as 1 + w."""

    def __init__(self):
        super().__init__()
        self.matrices = []
        self.vectors = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.linear:
            self.matrices.append(args[1])
        if func is F.rms_norm:
            w = kwargs.get("weight")
            if w is not None and not isinstance(w, nn.Parameter):
                self.vectors.append(w)
        return func(*args, **kwargs)


class Compiled:
    """A C++ program that reads the model's own weights, where they lie, `shift` blocks after its
    own. used: the Weights of the pass; pack: a function that returns a matrix as a `Packed`."""

    def __init__(self, path, model, shift, used, pack):
        # trap: `torch._inductor.aoti_load_package` does this, too, but loads the compiler first
        loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
        later = partial(re.sub, r"(?<=^model.blocks.)\d+", lambda i: str(int(i[0]) + shift))
        names = loader.get_constant_fqns()
        # constants that the compiler made: vectors, and then packed matrices, in the order of use
        made = [name for name in names if name.startswith("_frozen_param")]
        made.sort(key=lambda name: int(name.removeprefix("_frozen_param")))
        values = []
        if made:
            values = [*used.vectors, *(pack(w).packed for w in used.matrices)]
        stored = model.state_dict(prefix="model.")
        self.weights = dict(zip(made, values, strict=True))
        for name in set(names) - set(made):
            if name.startswith("constant"):     # the one number that torch's int4 product takes
                self.weights[name] = torch.tensor(SHARE)
            else:
                self.weights[name] = stored[later(name)]
        loader.load_constants(self.weights, False, check_full_update=True, user_managed=True)
        self.run = loader.boxed_run

    def __call__(self, inputs, fixed):
        return self.run([*inputs, *fixed])[0]


if __name__ == "__main__":
    work(sys.argv[1])
