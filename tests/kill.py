"""search.py and train.py, killed at random moments and resumed until they are done: what they leave must
equal, bit for bit, what a run leaves that nobody disturbed.

The one thing to remember: only the moments are random; all that a run writes follows from its flags. The
seed is printed, and `python tests/kill.py --seed S` repeats its moments as far as a clock can.
"""
import argparse
import itertools
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import expected  # noqa: E402
import torch._dynamo  # noqa: E402, F401  each child would import it with its first optimiser, which takes seconds
from safetensors import safe_open  # noqa: E402
from tiny import LLAMA, make, story  # noqa: E402

import checkpoint  # noqa: E402
import search  # noqa: E402
import train  # noqa: E402
from support import files, plots  # noqa: E402

FORK = multiprocessing.get_context("fork")  # as importing torch anew would take longer than all the rest
HANGS = 120  # seconds that no run takes
SMALL = ("--layers 3 --dim 32 --heads 4 --kv-heads 2 --head-dim 8 --hidden 48 --context 16 --window 5 "
         "--vocab 300 --batch 4 --tokens 640 --warmup 3 --every 1e-9 --prompt Lily --device cpu").split()


def commands(folder):
    """{name: (the module, its flags)}, and the files that they read."""
    (folder / "text.txt").write_text(story(0))
    model = make(replace(LLAMA, vocab_size=64, n_layers=3)).float()
    for b in model.blocks[1:]:  # so weak that drafts without them are worth something
        b.attn.wo.mul_(0.2)
        b.mlp.down.mul_(0.3)
    checkpoint.save(model, folder / "model", expected.byte_tokenizer())
    text, more = str(folder / "text.txt"), "--trials 20 --tokens 64 --protect 0 --device cpu".split()
    return {"search": (search, ["--model", str(folder / "model"), "--text", text, *more]),
            "train, llama": (train, ["--data", text, *SMALL]),
            "train, gemma2": (train, ["--data", text, "--family", "gemma2", *SMALL])}


def work(command, out):
    """In a child: run the command, or go on with it. Drawing is left out, as it takes long, too."""
    module, flags = command
    sys.stdout = sys.stderr = log = open(out.with_suffix(".log"), "a", encoding="utf-8")
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)
    plots.search = plots.training = lambda *args: args[-1].write_bytes(b"picture")
    sys.exit(module.main([*flags, "--out", str(out), "--resume"]))


def run_for(seconds, command, out):
    """The exit status of the command; None if it had not ended by then and was killed."""
    child = FORK.Process(target=work, args=(command, out))
    child.start()
    child.join(seconds)
    status = child.exitcode
    if status is None:
        child.kill()
        child.join()
    return status


def finished(command, out):
    """Let it run to its end, which is to be a good one."""
    status = run_for(HANGS, command, out)
    if status != 0:
        said = out.with_suffix(".log").read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{out.name}: status {status}, {'it hangs' if status is None else said}")


def disturbed(command, out, span, rng, most):
    """Kill it again and again, each time within `span` seconds of its start, until it is done before that or
    was killed `most` times and may end. Returns what each kill met."""
    met = []
    while len(met) < most:
        if run_for(rng.uniform(0, span), command, out) is not None:
            break
        names = {p.name for p in out.iterdir()} - {files.LOCK} if out.is_dir() else set()
        met.append("a file half written" if any(name.endswith(files.TEMPORARY) or name.startswith(".tmp")
                                                 for name in names) else
                   "nothing yet" if not names else
                   "the run at its end" if names & {search.FOUND, "model.safetensors"} else "the run at work")
    finished(command, out)  # once more after a good end: that must change nothing
    return met


def content(path):
    """A file's bytes; of the training state all but the seconds that it took."""
    if path.name != train.STATE:
        return path.read_bytes()
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["run"])
        del facts["seconds"]
        return facts, {key: file.get_tensor(key).numpy().tobytes() for key in file.keys()}


def differences(a, b):
    """The names of the files that are not equal. A model's card tells how long the training took."""
    names = {p.name for folder in (a, b) for p in folder.iterdir()} - {"README.md"}
    return sorted(name for name in names if not ((a / name).is_file() and (b / name).is_file()
                                                 and content(a / name) == content(b / name)))


def run(folder, kills, seed, seconds):
    """Yield (name of the command, what each kill met, the files that differ) until so many kills are done."""
    rng, spans, left, end = random.Random(seed), {}, kills, time.monotonic() + seconds
    todo = commands(folder)
    for number, name in enumerate(itertools.cycle(todo)):
        if left <= 0 or time.monotonic() > end:
            return
        whole, out, begun = folder / name, folder / f"{name}, run {number}", time.monotonic()
        if name not in spans:
            finished(todo[name], whole)
            spans[name] = time.monotonic() - begun
        met = disturbed(todo[name], out, spans[name], rng, min(left, 1 + kills // 6))
        left -= len(met)
        yield name, met, differences(whole, out)


def main(argv=None):
    p = argparse.ArgumentParser(description="Kill search.py and train.py, resume them, and compare.")
    p.add_argument("--kills", type=int, default=50, metavar="N")
    p.add_argument("--minutes", type=float, default=10, metavar="M", help="begin no more runs after that")
    p.add_argument("--seed", type=int, default=random.randrange(10**6), metavar="S", help="other moments")
    a = p.parse_args(argv)
    print(f"seed {a.seed}, {a.kills} kills, at most {a.minutes:g} minutes", flush=True)
    folder, met, wrong = Path(tempfile.mkdtemp(prefix="kill-")), Counter(), 0
    for name, kills, differ in run(folder, a.kills, a.seed, 60 * a.minutes):
        met.update(kills)
        wrong += bool(differ)
        verdict = f"{', '.join(differ)} DIFFER" if differ else "all equal"
        print(f"{name}: {len(kills)} kills, {verdict}", flush=True)
    print("they met " + ", ".join(f"{what} {count} times" for what, count in met.most_common()))
    print(f"{met.total()} kills, {wrong} runs differ" + (f": {folder}" if wrong else ""))
    if not wrong:
        shutil.rmtree(folder)
    return int(wrong > 0 or met.total() < a.kills)


if __name__ == "__main__":
    sys.exit(main())
