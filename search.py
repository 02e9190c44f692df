"""Which sub-layers to skip: a search that repeats exactly and, killed at any moment, can be resumed.

    python search.py --model weights/stories-llama --text stories.txt --trials 200 --out found
    python generate.py "Once upon a time" --model weights/stories-llama --skip found/skip.json --compare

The one thing to remember: a trial needs one forward pass over a text and no stopwatch; alpha and c say what a
skip set is worth, and trial i depends on nothing but the seed and the trials before it.
"""
import hashlib
import itertools
import json
import math
import os
import sys
import time
from collections import Counter
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

import checkpoint
from control import AdaptiveExit, best_gamma, expected_speedup, weight_costs
from gaussian import GaussianProcess, climb, expected_improvement
from layerskip import SelfDraft, ShortHead, Teacher, skipped
from sampling import to_probs
from speculative import generate
from support import cli, plots
from support.files import BOUNDARY, LOCK, lock, read_documents, replacing, write_file
from support.measure import read_costs

LOG, FOUND, VOCAB = "trials.jsonl", "skip.json", "draft_vocab.json"
FIRST = 10   # random trials, before the process is asked
REFIT = 5    # trials between two fits of its hyper-parameters
MAY_CHANGE = {"trials", "out", "resume", "device"}  # when a run is resumed


# --- objectives


class Calibration:
    """The text that skip sets are scored on: the first `tokens` tokens of its documents, one Teacher each.
    drafting: a ShortHead that stands in for the model while it drafts."""

    def __init__(self, model, tokenizer, documents, tokens, probs=to_probs, drafting=None):
        self.model, self.probs, self.teachers, self.ids = model, probs, [], []
        self.drafting, self.share = (model, 1.0) if drafting is None else (drafting, drafting.share)
        for text in documents:
            ids = checkpoint.encode(tokenizer, text, model.c.bos)[: min(tokens, model.c.max_len)]
            self.ids.append(ids)
            self.teachers.append(Teacher(model, ids, probs))
            tokens -= len(ids)
            if tokens <= 0:
                break

    def acceptance(self, sublayers):
        """A series of acceptances for each document. Where a draft overflows its dtype the acceptance is NaN;
        it counts as 0, as `verify` would refuse that draft."""
        return [teacher.acceptance(sublayers, self.drafting).nan_to_num(0.0) for teacher in self.teachers]


@dataclass
class Trial:
    """What is known about a set of sub-layers after it was scored."""
    value: float    # what the search maximises
    alpha: float
    cost: float     # the c of the formulas
    gamma: int      # the best one
    speedup: float  # expected with this gamma


TRIAL = ["trial", "bits", "value", "alpha", "c", "gamma", "speedup", "theta", "expected"]  # a line of the log


def speedup(calibration, costs, sublayers):
    """The expected speed-up with the best gamma (Leviathan et al. 2023, Theorem 3.8, on acceptances along a
    text). Gamma is at least 1: values below 1 still tell a bad set from a worse one."""
    series, cost = calibration.acceptance(sublayers), costs.step(sublayers, calibration.share)
    gamma = best_gamma(series, cost, least=1, block=costs.block)
    gain = expected_speedup(series, gamma, cost, costs.block(gamma + 1))
    return Trial(gain, float(torch.cat(series).mean()), cost, gamma, gain)


def matchness(calibration, costs, sublayers):
    """How often the draft's best token is also the target's (SWIFT, arXiv 2410.06916). It ignores costs: set
    `--min-skips`, or the best set is the one that skips nothing."""
    found, hits = speedup(calibration, costs, sublayers), []
    for teacher in calibration.teachers:
        q = teacher.draft(sublayers, calibration.drafting)
        hits.append((q.argmax(-1) == teacher.p.argmax(-1)).double().flatten())
    found.value = float(torch.cat(hits).mean())
    return found


def tokens_per_second(calibration, costs, sublayers):
    """Measured: the first 32 tokens of each document are continued by as many, with the adaptive exit (Draft
    & Verify, Zhang et al. 2023, section 3.2). The values are as noisy as the machine."""
    found = speedup(calibration, costs, sublayers)
    prompt, count, start = min(32, calibration.model.c.max_len - 1), 0, time.perf_counter()
    for ids in calibration.ids:
        drafter = SelfDraft(calibration.drafting, sublayers, AdaptiveExit())
        (out,), _ = generate(calibration.model, [ids[:prompt]], 32, drafter, calibration.probs)
        count += len(out)
    found.value = count / (time.perf_counter() - start)
    return found


OBJECTIVES = {f.__name__: f for f in (speedup, matchness, tokens_per_second)}


# --- the search itself


@dataclass(frozen=True)
class Space:
    """All sets that may be tried, as vectors of bits: bit j is 1 where sub-layer `skippable[j]` is skipped.
    From `least` to `most` bits are 1."""
    n_layers: int
    skippable: tuple[int, ...]
    least: int = 0
    most: int = 10**9

    def sublayers(self, z):
        """The sub-layers that stay."""
        gone = {sub for sub, bit in zip(self.skippable, z, strict=True) if bit}
        return [i for i in range(2 * self.n_layers) if i not in gone]

    def groups(self):
        """The group of each bit, for the kernel: 0 for attention, 1 for an MLP."""
        return torch.tensor([sub % 2 for sub in self.skippable])

    def allowed(self, z):
        """z (..., n) -> (...) bool."""
        count = z.sum(-1)
        return (count >= self.least) & (count <= min(self.most, len(self.skippable)))

    def counts(self):
        """How many sub-layers may be skipped."""
        return range(self.least, min(self.most, len(self.skippable)) + 1)

    def random(self, g):
        """First draw the number of skips, each equally likely; then one of the sets of that size."""
        n, counts = len(self.skippable), self.counts()
        count = counts[int(torch.randint(len(counts), (), generator=g))]
        z = torch.zeros(n, dtype=torch.float64)
        z[torch.randperm(n, generator=g)[:count]] = 1
        return z

    def every(self):
        """Every set, those with few skips first."""
        n = len(self.skippable)
        for count in self.counts():
            for gone in itertools.combinations(range(n), count):
                yield torch.tensor([float(j in gone) for j in range(n)], dtype=torch.float64)


def propose(space, zs, ys, seed, theta=None):
    """(z, theta, expected) for trial i = len(zs).

    z (n,): the set to try, None where every set was tried. theta: the hyper-parameters of the process.
    expected: [mean, standard deviation] of the value that it expects of z. Both are None in the first,
    random, trials. zs (i, n), ys (i,): the trials so far; the argument theta: that of trial i - 1.
    """
    i, g = len(zs), torch.Generator().manual_seed((seed * 1_000_003 + len(zs)) % 2**63)
    known = {tuple(z) for z in zs.tolist()}
    drawn = (space.random(g) for _ in range(1000))
    untried = (z for z in itertools.chain(drawn, space.every()) if tuple(z.tolist()) not in known)
    if i < FIRST:
        return next(untried, None), None, None
    process = GaussianProcess(zs, ys, space.groups(), theta, fit=theta is None or i % REFIT == 0)

    def score(z):
        new = torch.cdist(z, zs, p=1).min(1).values > 0.5
        return torch.where(new, expected_improvement(*process.predict(z), float(ys.max())), -math.inf)

    tops = zs[ys.argsort(descending=True, stable=True)[:8]]
    ends, values = climb(score, torch.stack([*tops, *(next(drawn) for _ in range(16))]), space.allowed)
    z = ends[int(values.argmax())]
    if float(values.max()) == -math.inf:
        z = next(untried, None)
    expected = None if z is None else [float(v) for v in process.predict(z[None])]
    return z, process.theta.tolist(), expected


def observed(space, entries):
    """The sets that were tried (N, n) and their values (N,). A value that is not finite counts as much as the
    worst of the others."""
    zs = torch.tensor([[int(b) for b in e["bits"]] for e in entries], dtype=torch.float64)
    ys = torch.tensor([e["value"] for e in entries], dtype=torch.float64)
    fine = ys.isfinite()
    worst = float(ys[fine].min()) if fine.any() else 0.0
    return zs.view(-1, len(space.skippable)), torch.where(fine, ys, worst)


def search(space, evaluate, count, seed=0, entries=()):
    """Continue from the trials in `entries` until there are `count`, or until every set was tried. Yields
    each new trial as an entry of the log, with the seconds that proposing it took. evaluate(sublayers) ->
    Trial."""
    entries = list(entries)
    while len(entries) < count:
        start = time.perf_counter()
        theta = entries[-1]["theta"] if entries else None
        z, theta, expected = propose(space, *observed(space, entries), seed, theta)
        if z is None:
            return
        seconds = time.perf_counter() - start
        bits, found = "".join(str(int(b)) for b in z), astuple(evaluate(space.sublayers(z)))
        entries.append(dict(zip(TRIAL, (len(entries), bits, *found, theta, expected), strict=True)))
        yield entries[-1], seconds


# --- the log


def header(a, model, tokenizer, documents, costs, space):
    """The first line of the log: everything that the trials depend on."""
    weights = hashlib.sha256()
    for name, piece in checkpoint.parts(model):
        raw = piece.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes()
        weights.update(name.encode() + raw)
    settings = {k: v for k, v in vars(a).items() if k not in MAY_CHANGE | {"model", "text", "costs"}}
    text = hashlib.sha256("\0".join(documents).encode() + tokenizer.to_str().encode())
    return {"model": weights.hexdigest(), "text": text.hexdigest(), **settings, "free": list(space.skippable),
            "costs": [*costs.sublayers, costs.head, *itertools.chain(*costs.blocks), costs.call]}


def as_line(entry):
    """An entry as a line of the log, in bytes."""
    return (json.dumps(entry) + "\n").encode()


def is_trial(entry, number, head):
    """Whether an entry could have been written by this program as trial `number` of this run."""
    def numbers(values, count):
        return (isinstance(values, list) and len(values) == count
                and all(type(x) is float and math.isfinite(x) for x in values))

    if not isinstance(entry, dict) or list(entry) != TRIAL:
        return False
    bits, kinds = entry["bits"], 1 + max(sub % 2 for sub in head["free"])
    return (type(entry["trial"]) is type(entry["gamma"]) is int and entry["trial"] == number
            and isinstance(bits, str) and len(bits) == len(head["free"]) and not set(bits) - {"0", "1"}
            and numbers([entry[key] for key in ("value", "alpha", "c", "speedup")], 4) and entry["gamma"] > 0
            and (entry["theta"] is entry["expected"] is None
                 or numbers(entry["theta"], kinds + 2) and numbers(entry["expected"], 2)))


def read_log(path, head):
    """The trials of a log that an interrupted run left, and how many bytes of it are whole lines. A last line
    that does not end was being written when the run stopped, and is ignored. Raises ValueError, naming file
    and line, for anything else that this run could not have written."""
    def refuse(number, why):
        raise ValueError(f"{path}, line {number}: {why}; nothing was changed") from None

    raw, entries = path.read_bytes(), []
    whole = raw.rfind(b"\n") + 1
    if not whole and not as_line(head).startswith(raw):
        refuse(1, "not the beginning of this run")
    for number, line in enumerate(raw[:whole].split(b"\n")[:-1], 1):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            refuse(number, "not a line of this program")
        if number > 1:
            if not is_trial(entry, number - 2, head):
                refuse(number, f"not trial {number - 2} of this run")
            entries.append(entry)
        elif not isinstance(entry, dict) or entry.keys() != head.keys():
            refuse(number, "not a line of this program")
        elif entry != head:
            wrong = next(key for key in head if entry[key] != head[key])
            refuse(number, f"this run had another {wrong}: repeat that, or name another --out")
    return entries, whole


# --- the command line


def parse(argv):
    p = cli.Parser(description="Search for the sub-layers to skip while drafting.", allow_abbrev=False)
    p.add_argument("--model", required=True, metavar="DIR", help="a Hugging Face folder")
    p.add_argument("--text", required=True, metavar="FILE", help="text of the kind that will be written: "
                   f'documents separated by {BOUNDARY}, or lines of JSON with "text"')
    p.add_argument("--out", required=True, metavar="DIR", help="for the log, skip.json, the front, a picture")
    p.add_argument("--resume", action="store_true", help="continue where the log in --out ends")
    p.add_argument("--trials", type=int, default=100, metavar="N", help="in all, resumed runs included")
    p.add_argument("--objective", choices=OBJECTIVES, default="speedup", help="what a set is judged by")
    p.add_argument("--tokens", type=int, default=512, metavar="N", help="of the text, to score drafts on")
    p.add_argument("--temperature", type=float, default=0.0, metavar="T", help="at which drafts will be used")
    p.add_argument("--top-p", type=float, metavar="P", help="with which drafts will be used")
    p.add_argument("--costs", metavar="FILE", help="measured costs, from lab.bench costs --out (default: the "
                   "weights read)")
    p.add_argument("--protect", default="0,1", metavar="I,J", help="sub-layers that are never skipped")
    p.add_argument("--min-skips", type=int, default=0, metavar="N", help="skip at least N sub-layers")
    p.add_argument("--max-skips", type=int, metavar="N", help="skip at most N sub-layers")
    p.add_argument("--draft-vocab", type=int, metavar="N", help="draft with only the N most frequent "
                   f"tokens of the text, which are written to {VOCAB} in --out (FR-Spec, arXiv 2502.14856)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", help="cpu or cuda (default: cuda if there is one)")
    p.add_argument("--dtype", choices=["float32", "bfloat16", "float16", "float64"], default="float32")
    a = p.parse_args(argv)
    if a.trials < 1 or a.tokens < 16 or a.draft_vocab is not None and a.draft_vocab < 1:
        raise ValueError("--trials and --draft-vocab must be at least 1 and --tokens at least 16")
    return a


def find_space(a, n_layers):
    """The Space that --protect, --min-skips and --max-skips describe."""
    try:
        kept = {int(i) for i in a.protect.split(",") if i.strip()}
    except ValueError:
        raise ValueError(f"--protect takes numbers of sub-layers, such as 0,1, got {a.protect!r}") from None
    if kept and not 0 <= min(kept) <= max(kept) < 2 * n_layers:
        raise ValueError(f"--protect: sub-layers run from 0 to {2 * n_layers - 1}, got {a.protect}")
    skippable = tuple(i for i in range(2 * n_layers) if i not in kept)
    most = min(len(skippable), 2 * n_layers - 1)  # something must stay
    most = most if a.max_skips is None else min(most, a.max_skips)
    if not 0 <= a.min_skips <= most or not skippable:
        raise ValueError(f"--min-skips {a.min_skips} and --max-skips {most} leave no set of {len(skippable)} "
                         "sub-layers to choose from")
    return Space(n_layers, skippable, a.min_skips, most)


def most_frequent(documents, tokenizer, c, count):
    """The draft vocabulary: {"ids": the `count` most frequent tokens of the documents, the most frequent
    first, "share": of the text}. Each document ends with an end of text, which drafts should know, too."""
    seen = Counter()
    for text in documents:
        seen.update(checkpoint.encode(tokenizer, text) + list(c.eos[:1]))
    if len(seen) < count:
        raise ValueError(f"--draft-vocab {count}: the text holds only {len(seen)} different tokens")
    ids = sorted(seen, key=lambda i: (-seen[i], i))[:count]
    return {"ids": ids, "share": sum(seen[i] for i in ids) / seen.total()}


def append(file, entry):
    """Write one line of the log; it is on the disk before the next trial begins."""
    file.write(as_line(entry))
    file.flush()
    os.fsync(file.fileno())


def front(entries):
    """The trials that no other one beats in both alpha and c, ordered by c."""
    best, kept = -1.0, []
    for e in sorted(entries, key=lambda e: (e["c"], -e["alpha"])):
        if e["alpha"] > best:
            best = e["alpha"]
            kept.append(e)
    return kept


def describe(space, entry):
    """What generate.py --skip reads: the blocks whose attention or MLP is skipped, and what that is worth."""
    sublayers = space.sublayers([int(b) for b in entry["bits"]])
    attn, mlp = skipped(space.n_layers, sublayers)
    return {"attn": attn, "mlp": mlp, "gamma": entry["gamma"] if entry["speedup"] > 1 else 0,
            "alpha": entry["alpha"], "c": entry["c"], "predicted_speedup": entry["speedup"],
            "sublayers": sublayers}


def finish(space, entries, out):
    """Write skip.json, front.json and search.png beside the log. Returns the best trial."""
    best = max(entries, key=lambda e: e["value"])
    for name, content in {FOUND: describe(space, best),
                          "front.json": [describe(space, e) for e in front(entries)]}.items():
        write_file(out / name, json.dumps(content) + "\n")
    zs, ys = observed(space, entries)
    z = zs[entries.index(best)]
    process = GaussianProcess(zs, ys, space.groups(), entries[-1]["theta"])
    flips = process.predict((z - torch.eye(len(z), dtype=torch.float64)).abs())
    with replacing(out / "search.png") as path:
        plots.search(entries, front(entries), best, space.skippable, [t.tolist() for t in flips], path)
    return best


def run(argv):
    a = parse(argv)
    out = Path(a.out)
    there = {p.name for p in out.iterdir()} - {LOCK} if out.is_dir() else set()
    if there and not a.resume:
        raise ValueError(f"{out} is not empty: continue with --resume, or name another --out")
    if there and LOG not in there:
        raise ValueError(f"{out} holds no {LOG}, so no search made it: name another --out")
    model, tokenizer = checkpoint.load(a.model, a.device, getattr(torch, a.dtype))
    documents, space = read_documents(Path(a.text)), find_space(a, model.c.n_layers)
    vocab = most_frequent(documents, tokenizer, model.c, a.draft_vocab) if a.draft_vocab else None
    costs = read_costs(a.costs, model.c) if a.costs else weight_costs(model.c)
    head = header(a, model, tokenizer, documents, costs, space)
    calibration = Calibration(model, tokenizer, documents, a.tokens,
                              partial(to_probs, temperature=a.temperature, top_p=a.top_p),
                              vocab and ShortHead(model, vocab["ids"]))
    out.mkdir(parents=True, exist_ok=True)
    with lock(out):
        best = run_trials(a, out, head, space, partial(OBJECTIVES[a.objective], calibration, costs))
        if vocab:
            write_file(out / VOCAB, json.dumps(vocab) + "\n")
    print(f"{out / FOUND}: skips {best['bits'].count('1')} of {2 * model.c.n_layers} sub-layers, alpha "
          f"{best['alpha']:.3f}, c {best['c']:.3f}; gamma {best['gamma']} promises {best['speedup']:.2f} "
          "times plain decoding")
    if vocab:
        print(f"{out / VOCAB}: {len(vocab['ids'])} of {model.c.vocab_size} tokens, which are "
              f"{vocab['share']:.1%} of the text")


def run_trials(a, out, head, space, evaluate):
    """Read the log, make the trials that are left, and write what was found. Returns the best trial. Only one
    process at a time may be here."""
    log = out / LOG
    entries, whole = read_log(log, head) if log.is_file() else ([], 0)
    proposing, start, old = 0.0, time.time(), len(entries)
    bar = tqdm(total=max(a.trials, old), initial=old, unit="trial", disable=None)
    with bar, open(log, "ab") as file:
        file.truncate(whole)
        if whole == 0:
            append(file, head)
        for entry, seconds in search(space, evaluate, a.trials, a.seed, entries):
            append(file, entry)
            entries.append(entry)
            proposing += seconds
            bar.set_postfix_str(f"best {max(e['value'] for e in entries):.4g}", refresh=False)
            bar.update()
    best, spent = finish(space, entries, out), time.time() - start
    if len(entries) > old:
        print(f"{(len(entries) - old) / spent:.1f} trials/s, {proposing / spent:.0%} of the time in the "
              "Gaussian process", file=sys.stderr)
    return best


def main(argv=None):
    return cli.main(run, argv)


if __name__ == "__main__":
    sys.exit(main())
