"""The command that measures, side by side in one process, A B A B, with medians after a warm-up.

    python -m lab.bench real         every way to draft, over plain decoding: see lab/bench/real.py
    python -m lab.bench check        is your model computed right? what could drafting gain on it?
    python -m lab.bench costs        what blocks, head and several tokens take on this machine
    python -m lab.bench plain        plain decoding, compared with transformers
    python -m lab.bench rows         products with few rows, compared with reading the matrices
    python -m lab.bench bits         how far a quantised target is from the model, by KL
    python -m lab.bench exact        what changes a text that is the same to the bit, and what not
    python -m lab.bench block        block verification, compared with token by token
    python -m lab.bench counts       operations and GPU waits of a round: counted, so free of noise
    python -m lab.bench search       the search for a skip set, compared with all 4,096 sets
    python -m lab.bench beyond       ProphetNet, HAMburger and a sparse self-draft, measured
"""
import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from datetime import date
from pathlib import Path

import torch

import checkpoint
from lab.bench import beyond, bits, block, check, counts, exact, passes, real, search
from lab.bench.shared import CHATS, DEFAULT, SETS
from machine.files import check_writable, hardware, write_file
from model import Refused
from support import cli
from support.flags import within

MODEL = "model dtype device"
COMMANDS = {    # (Namespace) -> (Markdown, data); the flags that it reads; their defaults
    "real": (real.run, f"{MODEL} new repeats quick fast prompts only draft draft-model heads "
                       "dither quant gguf", {"new": 48, "quick": 1}),
    "check": (check.run, "model device new fast", {}),
    "costs": (passes.run_costs, f"{MODEL} repeats fast", {}),
    "plain": (passes.run_plain, f"{MODEL} new repeats", {}),
    "rows": (passes.run_rows, f"{MODEL} repeats", {}),
    "bits": (bits.run, "model text pieces", {}),
    "exact": (exact.run, f"{MODEL} new repeats quick fast", {"quick": 4}),
    "block": (block.run, f"{MODEL} new quick prompts draft", {}),
    "counts": (counts.run, "", {}),
    "search": (search.run, "model device", {}),
    "beyond": (beyond.run, "model device new quick", {})}
COUNT = within(1, 10**6)
FLAGS = {
    "model": dict(metavar="DIR", default=DEFAULT, help="a Hugging Face folder"),
    "dtype": dict(choices=["float32", "bfloat16", "float16", "float64"], default="bfloat16"),
    "device": dict(choices=["cpu", "cuda"], default="cpu"),
    "new": dict(type=within(8, 10**6), default=128, metavar="N",
                help="tokens to write (default: %(default)s)"),
    "repeats": dict(type=COUNT, metavar="N", help="how often each is run"),
    "quick": dict(nargs="?", type=COUNT, const=1, metavar="N",
                  help="one prompt of each kind, or N"),
    "fast": dict(action="store_true", help="in fast passes, as generate.py --fast has them"),
    "prompts": dict(nargs="+", metavar="KIND",
                    help=f"only these of {', '.join(CHATS)}; of a model without a chat template of "
                         f"{', '.join(SETS)}; or a file with a prompt in each line, in .jsonl "
                         '{"prompt": ...}'),
    "only": dict(nargs="+", metavar="WORD", help="only ways to draft with one of these words in "
                 "their names, and plain decoding; transformers and llama.cpp only if named"),
    "draft": dict(nargs="+", metavar="LINE", help="these ways to draft: each a line of what "
                  'follows --draft in generate.py, as in "exit --gamma 3"'),
    "draft-model": dict(metavar="DIR", help="a small model with the same tokenizer, which drafts"),
    "heads": dict(metavar="DIR", help="a folder of trained heads (default: MODEL/heads)"),
    "dither": dict(action="store_true", help="first add noise to the target's weights, uniform and "
                   "as wide as a step of int4: weights that came in 4 bits lie on a grid, which "
                   "flatters int4, and with the noise its gain is a lower bound"),
    "text": dict(metavar="FILE", required=True, help="a text to read"),
    "pieces": dict(type=COUNT, default=16, metavar="N",
                   help="pieces of the text (default: %(default)s)"),
    "quant": dict(choices=["int8", "int4"], help="quantise the target, as generate.py --quant"),
    "gguf": dict(metavar="FILE", help="for llama.cpp: --model in a GGUF file (default: SmolLM2)"),
    "out": dict(metavar="PATH", help="write PATH.json and PATH.md; as lab/results/NAME, documents "
                "can take their figures from it (lab/figures.py)",
                type=lambda path: re.sub(r"\.(json|md)$", "", path))}


class Flags(argparse.Namespace):
    device = "cpu"

    @property
    def machine(self):
        return hardware(torch.device(self.device))


def parse(argv):
    p = cli.Parser(usage="python -m lab.bench WHAT [flags]", allow_abbrev=False, epilog=__doc__,
                   description="Measure. `WHAT --help` lists the flags that WHAT reads.",
                   formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = p.add_subparsers(dest="what", required=True, metavar="WHAT")
    for what, (_, flags, defaults) in COMMANDS.items():
        one = kinds.add_parser(what, usage=f"python -m lab.bench {what} [flags]",
                               allow_abbrev=False)
        for flag in (*flags.split(), "out"):
            one.add_argument(f"--{flag}", **FLAGS[flag])
        one.set_defaults(**defaults)
    a = p.parse_args(argv, Flags())
    if a.out is not None:
        if not os.path.basename(a.out).strip("."):
            raise Refused(f"--out {a.out!r} names a folder: name two files in it, without their "
                          "suffix, such as FOLDER/costs")
        for suffix in (".json", ".md"):
            check_writable(Path(a.out + suffix))
    checkpoint.find_device(a.device)
    return a


def commit():
    """The present commit, with a + where a file was changed since; None outside a repository."""
    git = ["git", "-C", os.path.dirname(__file__), "describe", "--always", "--dirty=+"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def run(argv):
    a = parse(argv)
    words = map(str, sys.argv[1:] if argv is None else argv)
    try:
        text, data = COMMANDS[a.what][0](a)
    except ModuleNotFoundError as e:
        raise Refused(f"{e.name} is not installed: see requirements-dev.txt") from None
    data = {"command": shlex.join(["python", "-m", "lab.bench", *words]), "commit": commit(),
            "date": date.today().isoformat(), "machine": a.machine, "torch": torch.__version__,
            "flags": vars(a), **data}
    print(text)
    if a.out:
        write_file(Path(a.out + ".json"), json.dumps(data, indent=1) + "\n")
        write_file(Path(a.out + ".md"), text + "\n")
    return data.get("status")


def main(argv=None):
    return cli.main(run, argv)


if __name__ == "__main__":
    sys.exit(main())
