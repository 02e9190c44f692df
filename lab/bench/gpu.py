"""One command for the day a GPU is there: what the machine can do, and what is made of it.

    python -m lab.bench.gpu --out gpu.json                     everything
    python -m lab.bench.gpu --out gpu.json --resume            the parts that gpu.json lacks
    python -m lab.bench.gpu --out x.json --tiny --device cpu   whether it runs at all: no figure counts

The one thing to remember: one token costs the bytes that it reads, and so the bound of each speed is measured
in the same run: bytes of weights and cache, divided by the rate at which this device reads.
"""
import json
import sys
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import checkpoint
from control import expected_speedup, interleave, weight_costs
from lab.bench.plain import agree, launches, step
from lab.bench.shared import GEMMA, LLAMA, SHAPES, WEIGHTS, figures, random_model, read_prompts
from layerskip import SelfDraft, early_exit
from speculative import NGram, generate
from support import cli
from support.files import read_json, write_file

NAMES = "Llama 3.2 1B", "Llama 3.1 8B", "Gemma-2 2B", "Gemma-2 9B"
SMALL = dict(vocab_size=64, dim=32, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=8, hidden_dim=48,
             max_len=64)
TINY = {"tiny Llama": replace(LLAMA, **SMALL), "tiny Gemma-2": replace(GEMMA, **SMALL, window=9)}
WIDTHS, GAMMA = (1, 2, 3, 4, 5, 6, 8, 16, 64), 4


class Bench:
    """Sizes, what was found so far, and one model at a time."""

    def __init__(self, a):
        self.device, self.repeats = checkpoint.find_device(a.device), a.repeats
        self.shapes = TINY if a.tiny else {name: SHAPES[name] for name in NAMES}
        self.found, self.held = {}, (None, None)
        self.trained = ["stories-draft"] if a.tiny else ["stories-llama", "stories-gemma2"]
        self.prompt, self.new = (12, 8) if a.tiny else (128, 128)
        self.bytes, self.side, self.calls = (2**12, 16, 2) if a.tiny else (2**30, 8192, 1000)

    def model(self, name):
        """Random weights, of which the later three quarters of the blocks say little, so that an early exit
        often agrees: the acceptance is planted, the work is that of a trained model."""
        if self.held[0] != name:
            self.held = None, None  # the last one makes room first
            model = random_model(self.shapes[name], torch.bfloat16, device=self.device)
            for b in model.blocks[len(model.blocks) // 4 :]:
                b.attn.wo.mul_(0.1)
                b.mlp.down.mul_(0.1)
            self.held = name, model
        return self.held[1]

    def noise(self, *size):
        """trap: zeros are multiplied faster, as a GPU that has less to switch runs at a higher clock."""
        return torch.randn(*size, dtype=torch.bfloat16, device=self.device)

    def ids(self, c):
        """(1, T), the same on every device."""
        ids = torch.randint(c.vocab_size, (1, self.prompt), generator=torch.Generator().manual_seed(0))
        return ids.to(self.device)

    def speeds(self, ways, c=None):
        """What {name: write(count)} takes a token: many tokens less one, and so without the prompt. With a
        Config: beside the bytes of weights, keys and values that a token reads, at the measured rate."""
        s = interleave({(way, count): partial(write, count) for way, write in ways.items()
                        for count in (1, 1 + self.new)}, self.repeats)
        s = {way: (s[way, 1 + self.new] - s[way, 1]) / self.new for way in ways}
        rows = {way: {"ms a token": 1e3 * s[way], "tokens/s": 1 / s[way],
                      "times the first row": s[next(iter(ways))] / s[way]} for way in ways}
        if c:
            context = c.n_layers * c.n_kv_heads * c.head_dim * (self.prompt + self.new / 2)
            bound = 2 * (weight_costs(c).whole + 2 * context) / self.found["constants"]["read"]["per second"]
            for way in ways:
                rows[way]["share of the bound"] = bound / s[way]
        return rows


def can_record(device):
    return device.type == "cuda" and torch.version.cuda is not None


def recorded(action, device):
    """The action as one CUDA graph, whose launches cost next to nothing; elsewhere the action itself."""
    if not can_record(device):
        return action
    action()  # libraries set themselves up at the first call, and that cannot be recorded
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    return graph.replay


# --- what is measured: each function returns {row: {column: number}}


def constants(bench):
    """What bounds everything else."""
    n, side, calls = bench.bytes, bench.side, bench.calls
    x, y, a, small = bench.noise(n // 2), bench.noise(n // 2), bench.noise(side, side), bench.noise(2048)

    def adds():
        for _ in range(calls):
            small.add_(1)

    work = {"copy": (16 * n, "bytes", lambda: [y.copy_(x) for _ in range(8)]),
            "read": (8 * n, "bytes", lambda: [x.sum() for _ in range(8)]),
            "product": (2 * side**3, "operations", lambda: a @ a),
            "launch": (calls, "launches", adds),
            "launch in a graph": (calls, "launches", recorded(adds, bench.device)),
            "wait": (calls, "waits", lambda: [small[0].item() for _ in range(calls)])}
    s = interleave({name: action for name, (_, _, action) in work.items()}, bench.repeats)
    rows = {name: {"unit": unit, "per second": size / s[name]} for name, (size, unit, _) in work.items()}
    for name in ("launch", "launch in a graph", "wait"):
        rows[name]["microseconds"] = 1e6 * s[name] / calls
    return rows


def blocks(bench, name):
    """What a block of T tokens costs, and a drafted step, relative to one token through the whole model."""
    model, at, L = bench.model(name), bench.prompt, bench.shapes[name].n_layers
    exits = {f"exit {E}": early_exit(L, E) for E in sorted({max(1, L // n) for n in (8, 4, 2)})}
    s = interleave({f"{T} tokens": step(model, T, at) for T in WIDTHS}
                   | {key: step(model, 1, at, subs) for key, subs in exits.items()}, 4 * bench.repeats)
    rows = {key: {"ms": 1e3 * s[key], "relative": s[key] / s["1 tokens"]} for key in s}
    for key, subs in exits.items():
        rows[key]["by weights"] = weight_costs(model.c).step(subs)
    if can_record(bench.device):
        rows["launches of a plain round"] = {"count": launches(model, [1] * at)}
    return rows


def decoding(bench, name):
    """Plain and self-speculative decoding of the same text."""
    model, c, texts = bench.model(name), bench.shapes[name], {}
    ids, E = bench.ids(c).tolist(), c.n_layers // 4
    drafters = {"plain": lambda: None,
                f"exit {E}": partial(SelfDraft, model, early_exit(c.n_layers, E), GAMMA)}

    def write(way, count):
        texts[way] = generate(model, ids, count, drafters[way]())
    rows = bench.speeds({way: partial(write, way) for way in drafters}, c)
    for way, ((text,), passes) in texts.items():
        same = agree(text, texts["plain"][0][0])
        rows[way] |= {"tokens a pass": len(text) / passes, "tokens as plain": same}
    cost = bench.found[f"{name}: blocks"][f"exit {E}"]["relative"]
    rows[f"promised for exit {E} at alpha .8"] = {"times the first row": expected_speedup(0.8, GAMMA, cost)}
    return rows


def shipped(bench, name):
    """A trained model end to end in both dtypes: its speed, and how far its texts are those of plain decoding
    and of float32 on the CPU."""
    rows, count = {}, 1 + bench.new
    for dtype in (torch.float32, torch.bfloat16):
        model, tokenizer = checkpoint.load(WEIGHTS / name, bench.device, dtype)
        ids = checkpoint.encode(tokenizer, read_prompts("stories")[0]["prompt"], model.c.bos)
        if not rows:
            (truth,), _ = generate(checkpoint.load(WEIGHTS / name, "cpu", dtype)[0], [ids], count)
        L, skip = model.c.n_layers, WEIGHTS / name / "skip.json"
        drafts = {f"exit {max(1, L // 4)}": early_exit(L, max(1, L // 4))}
        drafts |= {"skip set": cli.read_skip(str(skip), L)} if skip.is_file() else {}
        drafters = {"plain": lambda: None, "n-gram": lambda: NGram(8, 3)}
        drafters |= {way: partial(SelfDraft, model, subs, GAMMA) for way, subs in drafts.items()}
        texts = {way: generate(model, [ids], count, make())[0][0] for way, make in drafters.items()}
        ways = {way: lambda n, m=model, i=ids, make=make: generate(m, [i], n, make())
                for way, make in drafters.items()}
        for way, row in bench.speeds(ways).items():
            text = texts[way]
            rows[f"{way}, {str(dtype)[6:]}"] = row | {"tokens as plain": agree(text, texts["plain"]),
                                                      "as float32 on the CPU": agree(text, truth)}
    return rows


def parts(bench):
    """{name: what measures it}, in this order: the later ones need the earlier ones, or take longer."""
    todo = {"constants": partial(constants, bench)}
    for name in bench.shapes:
        todo |= {f"{name}: {f.__name__}": partial(f, bench, name) for f in (blocks, decoding)}
    todo |= {name: partial(shipped, bench, name) for name in bench.trained}
    return todo


# --- the command line


def show(name, rows):
    """A part as a Markdown table."""
    columns = dict.fromkeys(key for row in rows.values() for key in row)
    print("\n".join(["", f"## {name}", "", *figures(rows.items(), {
        key: f"{{{key}:.3g}}" if isinstance(next(r[key] for r in rows.values() if key in r), float)
        else f"{{{key}}}" for key in columns})[:-1]]), flush=True)


def parse(argv):
    p = cli.Parser(usage="python -m lab.bench.gpu --out FILE [flags]", description="Measure a GPU.",
                   allow_abbrev=False)
    p.add_argument("--out", required=True, metavar="FILE", help="JSON, written anew after each part")
    p.add_argument("--resume", action="store_true", help="keep the parts that FILE holds")
    p.add_argument("--repeats", type=int, default=5, metavar="N", help="of each timing")
    p.add_argument("--device", default="cuda", metavar="NAME", help="cuda, or cpu for a trial")
    p.add_argument("--tiny", action="store_true", help="a trial: sizes at which no figure means anything")
    a = p.parse_args(argv)
    if a.repeats < 1:
        raise ValueError("--repeats must be at least 1")
    if not Path(a.out).resolve().parent.is_dir():
        raise ValueError(f"--out {a.out}: no such folder")
    if Path(a.out).exists() and not a.resume:
        raise ValueError(f"{a.out} is there already: go on with --resume, or name another --out")
    return a


def run(argv):
    a, failed = parse(argv), 0
    bench, out = Bench(a), Path(a.out)
    head = {"machine": cli.machine(bench.device), "torch": torch.__version__, "tiny": a.tiny,
            "repeats": a.repeats}
    old = read_json(out) if out.exists() else head | {"parts": {}}
    wrong = next((key for key in head if old.get(key) != head[key]), None)
    if wrong:
        raise ValueError(f"{out} is of a run with another {wrong}: name another --out")
    bench.found = old["parts"]
    print(", ".join(f"{key} {value}" for key, value in head.items()), flush=True)
    for name, measure in parts(bench).items():
        try:
            bench.found[name] = bench.found.get(name) or measure()
        except Exception:  # whatever one part meets, the others can still be measured
            traceback.print_exc()
            print(f"{name}: failed")
            failed += 1
            continue
        write_file(out, json.dumps(head | {"parts": bench.found}, indent=1) + "\n")
        show(name, bench.found[name])
    return int(failed > 0)


def main(argv=None):
    return cli.main(run, argv)


if __name__ == "__main__":
    sys.exit(main())
