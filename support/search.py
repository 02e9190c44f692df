"""The command behind search.py, with the log from which a stopped search goes on."""
import hashlib
import json
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

import checkpoint
from checkpoint import parse_json, read_text
from machine.files import check_writable, note, write_file
from methods.costs import by_weights
from methods.standin import VOCAB, ShortHead, most_frequent
from model import Refused
from sampling import to_probs
from search import Calibration, Space, search, speedup
from support import cli
from support.measure import read_machine
from support.texts import BOUNDARY, read_texts

LOG = "trials.jsonl"
KEYS = {"bits", "alpha", "c", "gamma", "speedup", "theta"}     # of a trial, see `search`
FOUND = "skip.json"


def parse(argv):
    p = cli.Parser(description="Search for the sub-layers to skip while drafting.",
                   allow_abbrev=False)
    add = p.add_argument
    add("--model", required=True, metavar="DIR", help="a Hugging Face folder")
    add("--text", required=True, metavar="FILE",
        help=f'documents, separated by {BOUNDARY} or in lines of JSON under "text"')
    add("--out", required=True, metavar="DIR",
        help="for the results; a stopped search goes on there")
    add("--trials", type=int, default=100, metavar="N", help="in all, including earlier runs")
    add("--tokens", type=int, default=512, metavar="N",
        help="how much of the text to score drafts on")
    add("--temperature", type=float, default=0.0, metavar="T",
        help="at which the drafts will be used")
    add("--top-p", type=float, metavar="P", help="with which the drafts will be used")
    add("--costs", metavar="FILE",
        help="from lab.bench costs --out (default: costs counted in weights)")
    add("--draft-vocab", type=int, metavar="N",
        help=f"draft with only the N most frequent tokens of the text, written to {VOCAB} "
             "(FR-Spec)")
    add("--seed", type=int, default=0)
    add("--device", help="cpu or cuda (default: cuda if there is one)")
    add("--dtype", choices=cli.DTYPES, default="float32")
    a = p.parse_args(argv)
    if a.trials < 1 or a.tokens < 16 or a.draft_vocab is not None and a.draft_vocab < 1:
        raise Refused("--trials and --draft-vocab must be at least 1 and --tokens at least 16")
    return a


def header(a, model, tokenizer, documents, machine, space):
    """The first line of the log, with a hash of all that trials depend on, and the sub-layer of
    each bit."""
    flags = a.tokens, a.temperature, a.top_p, a.draft_vocab, a.seed, a.dtype
    facts = *flags, model.c, tokenizer.to_str(), documents, machine, space
    h = hashlib.sha256(repr(facts).encode())
    for p in model.parameters():
        h.update(p.detach().cpu().contiguous().view(torch.uint8).numpy())
    return {"search": h.hexdigest(), "skippable": list(space.skippable)}


def resume(path, header):
    """Prepare the log for appending. It consists of a `header` and a line for each trial. Returns
    the trials of an earlier run, except a last one that a kill cut off. If the old header differs,
    there are none. Raises ValueError for a damaged log, and for a folder that holds something
    else."""
    text = read_text(path) if path.is_file() else ""
    found, *lines = map(parse_json, text.split("\n"))
    if found != header:
        lines = []
        if isinstance(found, dict) and found.keys() == header.keys():
            note(path, "this log belongs to a different model, text or set of flags; "
                       "starting a new search")
        elif path.parent.exists() and any(path.parent.iterdir()):
            raise Refused(f"{path.parent} is not empty, and no search made it: name another "
                          "--out")
    trials = lines[:-1]     # a whole line ends with a newline, after which nothing is left
    if not all(isinstance(trial, dict) and trial.keys() >= KEYS for trial in trials):
        raise Refused(f"{path} is damaged, or another program wrote to it: repair it, or name "
                      "another --out")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, "".join(json.dumps(line) + "\n" for line in [header, *trials]))
    return trials


def skip_file(space, entry):
    """The content of a file for generate.py --skip. It names the blocks that lose their attention
    or MLP, and the gain."""
    gone = [sub for sub, bit in zip(space.skippable, entry["bits"], strict=True) if bit == "1"]
    attn = [sub // 2 for sub in gone if sub % 2 == 0]
    mlp = [sub // 2 for sub in gone if sub % 2 == 1]
    gamma = entry["gamma"] if entry["speedup"] > 1 else 0
    return {"attn": attn, "mlp": mlp, "gamma": gamma, "alpha": entry["alpha"], "c": entry["c"],
            "predicted_speedup": entry["speedup"]}


def run(argv):
    a = parse(argv)
    model, tokenizer = checkpoint.load(a.model, a.device, cli.DTYPES[a.dtype])
    c = model.c
    out = Path(a.out)
    documents = read_texts(Path(a.text), "text", BOUNDARY)
    if c.n_layers == 1:
        raise Refused(f"{a.model}: the first block always stays, and there is no other")
    space = Space(c.n_layers, tuple(range(2, 2 * c.n_layers)))
    machine = read_machine(a.costs, c) if a.costs else by_weights(c)
    probs = partial(to_probs, temperature=a.temperature, top_p=a.top_p)
    short = None
    if a.draft_vocab:  # also count each document's end of text, which drafts should know
        texts = [checkpoint.encode(tokenizer, text) + list(c.eos[:1]) for text in documents]
        vocab = most_frequent(texts, a.draft_vocab)
        short = ShortHead(model, vocab["ids"])
    calibration = Calibration(model, tokenizer, documents, a.tokens, probs, short)
    first = header(a, model, tokenizer, documents, machine, space)
    entries = resume(out / LOG, first)
    for name in (FOUND, VOCAB):
        check_writable(out / name)
    trials = search(space, partial(speedup, calibration, machine), a.trials, a.seed, entries)
    with open(out / LOG, "a") as log:
        for entry in tqdm(trials, initial=len(entries), total=a.trials, unit="trial", disable=None):
            log.write(json.dumps(entry) + "\n")
            log.flush()
            entries.append(entry)
    best = max(entries, key=lambda e: e["speedup"])
    write_file(out / FOUND, json.dumps(skip_file(space, best)) + "\n")
    print(f"{out / FOUND}: alpha {best['alpha']:.3f}, c {best['c']:.3f}; gamma {best['gamma']} "
          f"promises {best['speedup']:.2f} times plain decoding")
    if short:
        write_file(out / VOCAB, json.dumps(vocab) + "\n")
        print(f"{out / VOCAB}: {a.draft_vocab} tokens, which are {vocab['share']:.1%} of the text")


def main(argv=None):
    return cli.main(run, argv)
