"""What only a GPU can show, by one command: `make gpu-proof`. docs/gpu.md says what each part
proves.

Each part is a process with a limit and a file of its own. The file is written row by row, so that a
cut-off costs only the rest, and a second start measures only what is missing. `--tiny` rehearses
all of it, also without a GPU: with tiny models and, where there is no CUDA, simulated recordings
and a simulated GPU.
"""
import argparse
import contextlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

import checkpoint
import generate
from control import Confidence
from lab.bench.passes import rehearsed, step
from lab.bench.shared import GEMMA, LLAMA, ROOT, SHAPES, WEIGHTS, random_model
from layerskip import SelfDraft, early_exit
from machine.exact import Exact
from machine.files import hardware, write_file
from machine.quant import KINDS, Int4, quantise
from machine.recorded import Recorded, Session
from machine.tapes import graph, joined, program, simulated
from machine.tolerance import distance
from methods.costs import by_weights
from methods.lookup import NGram
from model import Refused
from speculative import rounds
from support import cli
from support.measure import interleave

SMALL = dict(vocab_size=64, dim=32, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=8, hidden_dim=48,
             max_len=128)
TINY = {"tiny Llama": replace(LLAMA, **SMALL), "tiny Gemma-2": replace(GEMMA, **SMALL, window=9)}
NAMES = "Llama 3.2 1B", "Llama 3.1 8B", "Llama 3.2 3B", "Gemma-2 2B"
WIDTHS = 2, 4, 8, 16, 32
# the files with tests for the device "cuda"; none of them needs transformers
TESTS = [f"tests/test_{name}.py" for name in ("gpu", "dynamic", "pace", "quant", "suffix")]
PACKAGES = {"safetensors": "all parts", "tokenizers": "all parts", "jinja2": "models, by --chat",
            "pytest": "tests", "hypothesis": "tests, one file of them"}


class Page:
    """The file of a part. A row that it has is not measured again."""

    def __init__(self, path):
        self.path, self.failed = path, 0
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        self.have = {line.split(" | ")[0].removeprefix("| ") for line in text.splitlines()}

    def say(self, line):
        print(line, flush=True)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(line + "\n")

    def row(self, name, measure):
        """Write | name | what measure() returns, {column: number or text} |, or why it fails.
        Returns the columns of a row that was measured now."""
        if name in self.have:
            return None
        try:
            cells = measure()
        except Exception as e:      # the other rows can still be measured
            self.failed += 1
            self.say(f"FAILED {name}: {type(e).__name__}: {str(e)[:200]}")
            traceback.print_exc()
            return None
        shown = (f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                 for key, value in cells.items())
        self.say(f"| {name} | {' | '.join(shown)} |")
        return cells


# --- the parts: each fills its page


def tests(a, page):
    """Those that ask for the device "cuda"; without a GPU they run on a simulated one."""
    which = [TESTS[0], "-k", "uniforms or plain"] if a.tiny else [*TESTS, "-k", "cuda"]
    words = [sys.executable, "-m", "pytest", *which, "-vv", "--tb=short", "-p", "no:cacheprovider",
             "--continue-on-collection-errors"]
    run = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                           text=True)
    for line in run.stdout:
        page.say(line.rstrip())
    page.failed += run.wait() != 0


def waits(a, page):
    """How often the host waits for the device in a round, and what it launches, by the profiler."""
    model, tokenizer = checkpoint.load(WEIGHTS / "stories-llama", a.device)
    ids = checkpoint.encode(tokenizer, "Once upon a time", model.c.bos)
    exit2 = range(4)
    ways = {"plain": (lambda: None, 1), "lookup": (lambda: NGram(4, 2), 1),
            "exit 2, gamma 3": (lambda: SelfDraft(model, exit2, 3), 1),
            "exit 2, a stop rule, gamma 3": (lambda: SelfDraft(model, exit2, Confidence(0.1, 3)),
                                             4)}
    for name, (make, promised) in ways.items():
        page.row(name, partial(profiled, a, model, ids, make, promised))


def profiled(a, model, ids, make, promised):
    steps = rounds(model, [ids], 100, make())
    for _ in range(3):      # what happens only once
        next(steps)
    count = 3 if a.tiny else 12
    activities = [torch.profiler.ProfilerActivity.CPU]
    if a.device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as seen:
        for _ in range(count):
            next(steps)
    found = Counter()
    for event in seen.key_averages():
        for word in ("Synchronize", "LaunchKernel", "aten::"):
            found[word] += event.count * (word in event.key)
    waited = found["Synchronize"] / count
    if waited > promised + 0.2:     # a round or two end otherwise; a CPU never waits
        raise RuntimeError(f"{waited:.2f} waits per round, where {promised} are promised")
    return {"waits per round": waited, "promised": promised,
            "launches": found["LaunchKernel"] / count, "operations": found["aten::"] / count}


def shapes(a, page):
    """Large models of random weights in bfloat16: what memory allows, and what is made of it."""
    read = bandwidth(a)
    page.row("memory", lambda: {"GB/s": read / 1e9, "device": hardware(torch.device(a.device))})
    for name, c in (TINY if a.tiny else {name: SHAPES[name] for name in NAMES}).items():
        try:
            shape(a, page, name, c, read)
        except Exception as e:      # such as a model that does not fit
            page.failed += 1
            page.say(f"FAILED {name}: {type(e).__name__}: {str(e)[:200]}")
        if a.device == "cuda":
            torch.cuda.empty_cache()


def bandwidth(a):
    """Bytes per second that a sum reads."""
    x = torch.randn(2**14 if a.tiny else 2**29, dtype=torch.bfloat16, device=a.device)
    return 8 * x.nbytes / interleave({"read": lambda: [x.sum() for _ in range(8)]}, 5)["read"]


def shape(a, page, name, c, read):
    model = random_model(c, torch.bfloat16, device=a.device)
    L = c.n_layers
    new = 8 if a.tiny else 64
    ids = torch.randint(c.vocab_size, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    bytes_read = 2 * (by_weights(c).unit + L * c.n_kv_heads * c.head_dim * 2 * (64 + new / 2))
    on_gpu = a.device == "cuda"
    repeats = 3 if a.tiny else 10

    def speed(write, **more):
        rate = new / interleave({"": write}, 1 if a.tiny else 3)[""]
        return {"tokens/s": rate, "of what memory allows": rate * bytes_read / read, **more}

    def stand_in(widths, way=joined):
        return Recorded(model, Session([way if on_gpu else simulated]), widths)

    def recorded(one):
        start = time.perf_counter()
        write = rehearsed(one, ids, new)
        return speed(write, **{"seconds to record": time.perf_counter() - start})

    def eager():
        return [token for _, r in rounds(model, [ids], new) for token in r.new[0]]

    def blocks():
        times = interleave({T: step(fast, T, 64) for T in (1, *WIDTHS)}, repeats)
        return {f"{T}": times[T] / times[1] for T in WIDTHS}

    def ratio(draft):
        times = interleave({"draft": draft, "one": step(fast, 1, 64)}, repeats)
        return {"c by the clock": times["draft"] / times["one"]}

    def leaving(e):
        part = early_exit(L, e)
        return ratio(step(fast, 1, 64, part)) | {"c by weights": by_weights(c).draft(part).start}

    def quantised(kind):
        return ratio(step(fast.alongside(quantise(model, kind)), 1, 64))

    ways = {"": lambda: stand_in((1,)), ", kernels not joined": lambda: stand_in((1,), graph),
            ", passes of 8": lambda: stand_in((8,)), ", exact": lambda: Exact(stand_in((8,)))}
    if L <= 16:     # a program of more takes too long to compile here
        ways[", one program"] = lambda: stand_in((1,), program)
    page.row(f"{name}, plain, eager", lambda: speed(eager))
    for words, make in ways.items():
        page.row(f"{name}, plain, recorded{words}", lambda make=make: recorded(make()))
    fast = stand_in((1, *WIDTHS))
    page.row(f"{name}, blocks", blocks)
    for e in sorted({max(1, L // n) for n in (8, 4, 2)}):
        page.row(f"{name}, exit {e}", partial(leaving, e))
    for kind in KINDS if L <= 16 else ():
        page.row(f"{name}, {kind}", partial(quantised, kind))


def few_bits(a, page):
    """torch's own product with weights of four bits, matrix by matrix: what it takes, relative to
    bfloat16, and how far it is from the product with the rounded matrix. It would be a draft's; c
    is their sum."""
    for name, c in (TINY if a.tiny else {name: SHAPES[name] for name in NAMES[:2]}).items():
        inside = c.n_heads * c.head_dim
        shapes = {"wqkv": (inside + 2 * c.n_kv_heads * c.head_dim, c.dim), "wo": (c.dim, inside),
                  "gate_up": (2 * c.hidden_dim, c.dim), "down": (c.dim, c.hidden_dim),
                  "head": (c.vocab_size, c.dim)}
        for matrix, (N, K) in shapes.items():
            K = -(-K // 128) * 128  # torch packs so many columns together; only tiny models differ
            page.row(f"{name}, {matrix}, {N} x {K}", partial(four_bits, a, N, K))


def four_bits(a, N, K):
    """The columns of `few_bits` for one matrix. Copies of it fill the caches, as other matrices
    would. In torch's format a weight is (code - 8) * step + zero."""
    on_gpu = a.device == "cuda"
    w = torch.randn(N, K, dtype=torch.bfloat16, device=a.device)
    ours = Int4(w)
    codes, *pairs = ours.numbers()                                              # (N, K)
    step, offset = (part.float() for part in pairs)                             # (N, K / 32)
    scales = torch.stack([step, offset + 8 * step], -1).transpose(0, 1)         # (K / 32, N, 2)
    scales = scales.contiguous().to(torch.bfloat16)
    if on_gpu:
        pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
        packed = torch._convert_weight_to_int4pack(pairs.contiguous(), 8)
        multiply = torch._weight_int4pack_mm
    else:
        packed = torch._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 2)
        multiply = torch._weight_int4pack_mm_for_cpu
    copies = range(1 if a.tiny else max(2, 2**29 // w.nbytes))
    whole = [w.clone() for _ in copies]
    small = [packed.clone() for _ in copies]
    forms = {"bfloat16": lambda _, x: [F.linear(x, w) for w in whole][-1],
             "int4": lambda _, x: [multiply(x, w, 32, scales) for w in small][-1]}
    found = {}
    for rows in 1, 8:
        x = torch.randn(rows, K, dtype=torch.bfloat16, device=a.device)
        way = graph if on_gpu else simulated
        tapes = {name: way(f, None, [x], [], Session()) for name, f in forms.items()}
        ways = {name: partial(tape, [x]) for name, tape in tapes.items()}
        times = interleave(ways, 2 if a.tiny else 10)
        found[f"time, {rows} rows"] = times["int4"] / times["bfloat16"]
        found[f"off, {rows} rows"] = distance(ways["int4"](), F.linear(x, ours.full(w.dtype)))
    return found


def models(a, page):
    """Real weights by the command that users run: each draft over the fastest plain decoding."""
    folders = [WEIGHTS / "stories-draft"] if a.tiny else [
        *([Path(a.smollm)] if a.smollm and Path(a.smollm).is_dir() else []),
        WEIGHTS / "stories-llama", WEIGHTS / "stories-gemma2"]
    for folder, temperature in product(folders, (0, 0.8)):
        chat = folder.name == "smollm"
        drafts = ["auto", "exit"] if a.tiny else ["auto", "suffix", "int8", *(
            ["eagle"] if (folder / "heads" / "eagle").is_dir() else []), *["exit"] * (not chat)]
        found = {draft: page.row(
            f"{folder.name}, {draft}, T {temperature}",
            partial(by_command, a, folder, draft, temperature, *["--chat"] * chat))
            for draft in drafts}
        if all(found.values()):
            page.row(f"{folder.name}, auto and the others, T {temperature}", partial(over, found))


def over(found):
    """auto's speed relative to the best of the others, plain decoding among them."""
    ratios = {draft: cells["times plain"] for draft, cells in found.items()}
    auto = ratios.pop("auto")
    return {"auto over plain": auto, "auto over the best": auto / max(1.0, *ratios.values())}


def exact(a, page):
    """`--exact` in graphs: texts with and without a draft, greedy and sampled, and what it costs
    without one."""
    names = ["stories-draft"] if a.tiny else ["stories-llama", "stories-gemma2"]
    dtypes = ["bfloat16"] if a.tiny else ["bfloat16", "float32"]
    drafts = ["exit"] if a.tiny else ["exit", "eagle", "suffix"]
    for dtype, temperature, name, draft in product(dtypes, (0, 0.8), names, drafts):
        page.row(f"{name}, {dtype}, {draft}, T {temperature}",
                 partial(by_command, a, WEIGHTS / name, draft, temperature, "--exact", "--dtype",
                         dtype))


def by_command(a, folder, draft, temperature, *flags):
    words = ["How does a bicycle stay upright?" if "--chat" in flags else "Once upon a time",
             "--model", str(folder), "--draft", draft, "--temperature", str(temperature),
             "--device", a.device, "--max-new", "8" if a.tiny else "192", "--compare", "--json",
             *flags, *["--fast"] * (a.device == "cuda")]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = generate.main(words)
    if status == 2:
        raise Refused(err.getvalue().strip())
    r = json.loads(out.getvalue())
    return {"times plain": r["ratio"], "tokens/s": r["tokens_per_second"],
            "plain": r["baseline"]["tokens_per_second"], "tau": r["tokens_per_pass"],
            "alpha": r["alpha"], "same text": r["identical"], "recorded": r["fast"]}


class Part(NamedTuple):
    seconds: int
    fill: Callable
    proves: str


PARTS = {
    "tests": Part(140, tests, "what runs on a CPU gives the same on CUDA"),
    "waits": Part(60, waits, "one wait per round, and one per drafted token where a rule may stop"),
    "exact": Part(90, exact, "with --exact, a text is the same to the bit with every draft"),
    "shapes": Part(170, shapes, "how near to its memory's speed decoding comes; what blocks and "
                   "drafts cost"),
    "few_bits": Part(40, few_bits, "what a draft of four bits would cost by torch's own product"),
    "models": Part(150, models, "what each draft gains on real weights"),
}


# --- the command


def parse(argv):
    p = cli.Parser(description="Prove on a GPU what only a GPU can show.", allow_abbrev=False)
    p.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    p.add_argument("--tiny", action="store_true", help="a rehearsal: tiny models, no figure means "
                   "anything")
    p.add_argument("--out", default=os.environ.get("OUT") or "gpu", metavar="DIR",
                   help="for the files")
    p.add_argument("--smollm", metavar="DIR", help="the folder of SmolLM2 (make smollm)")
    p.add_argument("--only", nargs="+", choices=PARTS, default=[], help="these parts, and from the "
                   "beginning")
    p.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    a = p.parse_args(argv)
    if a.device == "cuda" and not torch.cuda.is_available():
        raise Refused("torch finds no CUDA device; to rehearse: --device cpu --tiny")
    return a


def run(argv):
    a = parse(argv)
    out = Path(a.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    if a.tiny:
        torch.set_num_threads(1)
    if a.part:      # the process of one part: status 1 if a row or a test failed
        page = Page(out / f"{a.part}.txt")
        PARTS[a.part].fill(a, page)
        page.say("done")
        return int(page.failed > 0)
    for name, use in PACKAGES.items():
        if importlib.util.find_spec(name) is None:
            print(f"missing: the package {name}, for {use}")
    if not (a.smollm and Path(a.smollm).is_dir()):
        print("missing: the folder of SmolLM2 (--smollm), in models")
    states = dict.fromkeys(PARTS, "missing")
    for name, part in PARTS.items():
        file = out / f"{name}.txt"
        if name in a.only:
            file.unlink(missing_ok=True)
        if file.exists() and file.read_text(encoding="utf-8").rstrip().endswith("\ndone"):
            states[name] = "done before"
        elif a.only and name not in a.only:
            states[name] = "left out"
        else:
            states[name] = in_a_process(argv, name, part.seconds, out)
        contents(out, a, states)    # now, because all of it may be cut off
    print((out / "contents.md").read_text(encoding="utf-8"))
    return int(any("FAILED" in state for state in states.values()))


def in_a_process(argv, name, seconds, out):
    """How a part ended, in words."""
    start = time.monotonic()
    words = [sys.executable, "-m", "lab.proof", *argv, "--out", str(out), "--part", name]
    with open(out / "errors.txt", "a", encoding="utf-8") as errors:
        try:
            status = subprocess.run(words, cwd=ROOT, stderr=errors, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            return f"cut off after {seconds} s: start again for the rest"
    ends = {0: "done", 1: "done, but some of it FAILED"}
    return f"{ends.get(status, 'FAILED')} ({time.monotonic() - start:.0f} s)"


def contents(out, a, states):
    """The table of contents, after each part."""
    lines = [f"{hardware(torch.device(a.device))}; torch {torch.__version__}"
             + "; a rehearsal: no figure means anything" * a.tiny, "",
             "| file | state | what it proves |", "|---|---|---|"]
    lines += [f"| {name}.txt | {states[name]} | {part.proves} |" for name, part in PARTS.items()]
    write_file(out / "contents.md", "\n".join(lines) + "\n")


def main(argv=None):
    return cli.main(run, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
