"""The command that measures, side by side in one process, A B A B, with medians after a warm-up.

    python -m lab.bench counts       operations and GPU waits of a round: counted, so free of noise
    python -m lab.bench plain        plain decoding beside transformers
    python -m lab.bench costs        what each sub-layer and the head take on this machine
    python -m lab.bench help         will drafting help? what drafts promise, and the most possible
    python -m lab.bench check        is your model computed right? beside transformers; and `help`
    python -m lab.bench self         every way to draft, four kinds of text, beside transformers
    python -m lab.bench dynamic      drafts that adapt, on a stream of prompts whose kind changes
    python -m lab.bench quant        drafts and targets in few bits, measured, and on paper
    python -m lab.bench exact        what changes a text that is the same to the bit, and what not
    python -m lab.bench rows         products with few rows, beside the time of reading the matrices
    python -m lab.bench prompts      how long a prompt is read, beside transformers
    python -m lab.bench block        block verification beside token by token
    python -m lab.bench heads        trained heads: their chains and trees, beside untrained drafts
    python -m lab.bench search       the search for a skip set against the truth of all 4,096
    python -m lab.bench real         a real public model, over plain decoding: see lab/bench/real.py
    python -m lab.bench beyond       ProphetNet, HAMburger and a sparse self-draft, measured
"""
import argparse
import json
import os
import sys
from datetime import date
from pathlib import Path

import torch

import checkpoint
from files import check_writable, write_file
from lab.bench import (
    beyond,
    block,
    ceiling,
    check,
    costs,
    counts,
    drafters,
    dynamic,
    exact,
    heads,
    plain,
    quant,
    rows,
    search,
)
from lab.bench.real import KINDS, run_real
from lab.bench.shared import DEFAULT, SETS, WEIGHTS
from machine.kept import hardware
from support import cli

RUNS = {    # -> (Markdown, data)
    "counts": counts.run, "plain": plain.run, "rows": rows.run,
    "prompts": plain.run_prompts, "costs": costs.run_costs,
    "help": ceiling.run, "check": check.run, "self": drafters.run, "dynamic": dynamic.run,
    "quant": quant.run, "block": block.run, "heads": heads.run, "real": run_real,
    "search": search.run, "beyond": beyond.run, "exact": exact.run}


LOADS = "model", "dtype", "device"
RUN = *LOADS, "new", "repeats", "quick"
READS = {   # the flags of each, beside --out
    "counts": (), "plain": ("model", "device", "new", "repeats", "fast"),
    "rows": (*LOADS, "repeats"),
    "prompts": (*LOADS, "repeats"), "costs": (*LOADS, "repeats", "fast"),
    "help": (*LOADS, "new", "fast"), "check": ("model", "device", "new", "fast"),
    "self": (*RUN, "fast", "skip", "draft-vocab", "draft-model", "prompts", "only"),
    "dynamic": (*RUN, "fast", "skip", "draft-vocab", "only"),
    "quant": RUN, "block": (*LOADS, "new", "quick", "skip", "prompts", "heads"),
    "heads": (*RUN, "fast", "prompts", "heads"),
    "real": (*RUN, "fast", "prompts", "heads", "draft-model", "only", "dither", "gguf"),
    "search": (*LOADS, "new", "repeats"), "beyond": ("model", "device", "new", "quick"),
    "exact": (*LOADS, "new", "repeats", "fast", "prompts")}


def at_least(least):
    def read(text):
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return int(text)

    read.__name__ = "int"       # which argparse names if `text` is no number
    return read


FLAGS = {
    "model": dict(metavar="DIR", default=DEFAULT),
    "dtype": dict(choices=["float32", "bfloat16", "float16", "float64"], default="bfloat16"),
    "device": dict(choices=["cpu", "cuda"], default="cpu"),
    "new": dict(type=at_least(8), default=128, metavar="N", help="tokens to write"),
    "repeats": dict(type=at_least(1), metavar="N", help="how often each is run (plain 5, self 2, "
                    "dynamic 1: some 35 methods, 128 tokens after each of 32 prompts, at two "
                    "temperatures)"),
    "quick": dict(nargs="?", type=int, const=1, metavar="N", help="one prompt of each kind, or N"),
    "fast": dict(action="store_true", help="in fast passes; plain: also in them"),
    "skip": dict(metavar="SET", help="this skip set, a3,m4 or a skip.json (self, dynamic, block: "
                 "by default the one beside the weights)"),
    "draft-vocab": dict(metavar="FILE", help="the tokens of this file, the most frequent first (by "
                        "default draft_vocab.json beside the weights)"),
    "draft-model": dict(metavar="DIR", default=os.path.relpath(WEIGHTS / "stories-draft"),
                        help="a small model with the same tokenizer"),
    "prompts": dict(nargs="+", metavar="KIND", choices=(*SETS, *KINDS),
                    help=f"only these of {', '.join(SETS)}; block: {', '.join(KINDS)}"),
    "only": dict(nargs="+", metavar="WORD", help="only ways to draft with one of these words in "
                 "their names, and plain decoding; real: transformers and llama.cpp only if named"),
    "heads": dict(metavar="DIR", help="heads, real: trained heads (MODEL/heads); block: one"),
    "dither": dict(action="store_true", help="first add noise to the target's weights, uniform and "
                   "as wide as a step of int4: weights that came in 4 bits lie on a grid, which "
                   "flatters int4, and with the noise its gain is a lower bound"),
    "gguf": dict(metavar="FILE", help="with --only llama.cpp: --model in a GGUF file (default: "
                 "SmolLM2)"),
    "out": dict(metavar="PATH", help="write PATH.json and PATH.md")}
OTHERWISE = {   # flags that mean something else to one command
    "exact": {"prompts": dict(nargs=None, choices=None, type=at_least(1), metavar="N", default=None,
                              help="of N prompts, how many drafted texts equal plain decoding's")},
    "real": {
        "new": dict(default=48, help="tokens to write (default: 48)"), "quick": dict(
            default=1, help="how many prompts of each kind (default: 1)"),
        "draft-model": dict(default=None),
        "prompts": dict(choices=None, help=f"only these of {', '.join(KINDS)}; or a file of "
                        'prompts, one per line, in .jsonl {"prompt": ...}')}}


class Flags(argparse.Namespace):
    @property
    def machine(self):
        return hardware(torch.device(self.device))


def parse(argv):
    p = cli.Parser(usage="python -m lab.bench WHAT [flags]", allow_abbrev=False, epilog=__doc__,
                   description="Measure. `WHAT --help` lists the flags that WHAT reads.",
                   formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = p.add_subparsers(dest="what", required=True, metavar="WHAT")
    for what, flags in READS.items():
        one = kinds.add_parser(what, usage=f"python -m lab.bench {what} [flags]",
                               allow_abbrev=False)
        one.set_defaults(device="cpu")
        for flag in (*flags, "out"):
            one.add_argument(f"--{flag}", **FLAGS[flag] | OTHERWISE.get(what, {}).get(flag, {}))
    a = p.parse_args(argv, Flags())
    if a.out is not None:
        if not os.path.basename(a.out).strip("."):
            raise ValueError(f"--out {a.out!r} names a folder: name two files in it, without their "
                             "suffix, such as FOLDER/costs")
        for suffix in (".json", ".md"):
            check_writable(Path(a.out + suffix))
    checkpoint.find_device(a.device)
    return a


def run(argv):
    a = parse(argv)
    try:
        text, data = RUNS[a.what](a)
    except ModuleNotFoundError as e:
        raise ValueError(f"{e.name} is not installed: see requirements-dev.txt") from None
    data = {"flags": vars(a), "machine": a.machine, "torch": torch.__version__,
            "date": date.today().isoformat(), **data}
    print(text)
    if a.out:
        write_file(Path(a.out + ".json"), json.dumps(data, indent=1) + "\n")
        write_file(Path(a.out + ".md"), text + "\n")
    return data.get("status")


def main(argv=None):
    return cli.main(run, argv)


if __name__ == "__main__":
    sys.exit(main())
