"""Training heads on a frozen model: Kangaroo, an exit block, EAGLE, M2R2, Medusa, Hidden Transfer, a prophet.

    python -m lab.train_heads medusa --model weights/stories-llama --out weights/stories-llama/heads/medusa

The one thing to remember: the teacher is the model itself. By default it also writes the text, at a
low temperature, so that its heads learn what it says where they will draft, and nobody needs its training
data. What a head is told to say is not the text but the model's whole distribution, because acceptance
compares the two.
"""
import sys
from itertools import chain, repeat
from pathlib import Path

import torch
from tqdm import tqdm

import checkpoint
from lab import card, corpus, train
from methods import heads
from methods.heads import M2R2
from methods.trees import rank_acceptance
from sampling import Coins, to_probs
from speculative import rounds
from support import cli, plots
from support.files import BOUNDARY, replacing, write_file

SHAPE = {"kangaroo": ["exit_layer"], "exit_block": ["exit_layer"], "eagle": [],
         "m2r2": ["exit_layer", "rank", "align"], "medusa": ["heads", "own_head"],
         "transfer": ["inject_layer", "steps"], "prophet": ["blocks"]}  # the flags of each kind
MEASURED = 4096     # tokens of held-out text
OWN = "own text"    # the name of what the model writes itself
OWN_TEXT = 1.5e5    # tokens of it
ROWS = 32           # texts that it writes at a time


# --- the command line


def parse(argv):
    p = cli.Parser(description="Train a head that drafts for a frozen model.", allow_abbrev=False)
    p.add_argument("kind", choices=heads.KINDS)
    p.add_argument("--model", required=True, metavar="DIR", help="a Hugging Face folder")
    p.add_argument("--out", required=True, metavar="DIR", help="for the heads; generate.py looks into "
                   "heads/KIND in the model's folder")
    p.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --out")
    shape = p.add_argument_group("shape")
    shape.add_argument("--exit-layer", type=int, metavar="E", help="kangaroo, exit_block, m2r2: after which "
                       "block (default: a sixth)")
    shape.add_argument("--rank", type=int, metavar="R", help="m2r2: of each adapter (default: in all as many "
                       "weights as Kangaroo's adapter has)")
    shape.add_argument("--align", type=float, metavar="W", help="m2r2: what the distance from the states "
                       "further up counts, beside the distributions (default: 0.1)")
    shape.add_argument("--heads", type=int, metavar="N", help="medusa: how many (default: 3)")
    shape.add_argument("--own-head", action="store_true", default=None, help="medusa: one output head each")
    shape.add_argument("--inject-layer", type=int, metavar="T", help="transfer: after which block rows of "
                       "future tokens begin (default: half of them)")
    shape.add_argument("--steps", type=int, metavar="N", help="transfer: rows for each token (default: 3)")
    shape.add_argument("--blocks", type=int, metavar="N", help="prophet: how many (default: 1)")
    text = p.add_argument_group("text")
    text.add_argument("--data", nargs="+", default=[], metavar="FILE[=W]", help="documents separated by "
                      f"{BOUNDARY}, drawn W times as often (default: what the model writes)")
    text.add_argument("--text", type=float, metavar="N", help="how many tokens it writes (default: "
                      f"{OWN_TEXT:g}), or are taken from --data, by weight (default: all)")
    text.add_argument("--temperature", type=float, default=0.5, metavar="T", help="at which it writes")
    text.add_argument("--opening", type=int, default=0, metavar="N", help="but the first N tokens at 1")
    steps = p.add_argument_group("optimisation")
    for flag, default, what in (
            ("tokens", 6e5, "how many to train on"), ("lr", 2e-3, "of AdamW"),
            ("decay", 0.5, "in the last P of the run the rate falls linearly to 2 %%"),
            ("clip", 1.0, "the greatest norm of a gradient"), ("every", 5, "minutes between checkpoints")):
        steps.add_argument(f"--{flag}", type=float, default=default, metavar="X", help=what)
    for flag, default, what in (
            ("batch", 4, "sequences of --context tokens"), ("context", 256, "tokens of a sequence"),
            ("warmup", 20, "steps to the full rate"), ("seed", 0, "of texts and batches")):
        steps.add_argument(f"--{flag}", type=int, default=default, metavar="N", help=what)
    steps.add_argument("--device", help="cpu or cuda (default: cuda if there is one)")
    p.set_defaults(valid=[], minutes=None, dtype="float32", start=None, teacher=None)
    return check_flags(p.parse_args(argv))


def check_flags(a):
    """The same flags. Raises ValueError for numbers that make no sense, and for a flag of another kind."""
    for low, high, names in ((heads.AHEAD + 1, 2**20, "context"), (1, 2**20, "batch"),
                             (0, 2**40, "seed warmup opening"), (0, 1, "decay")):
        for name in names.split():
            if not low <= getattr(a, name) <= high:
                raise ValueError(f"--{name} must lie within {low} and {high}, got {getattr(a, name)}")
    for name in ("tokens", "text", "lr", "clip", "every", "temperature"):
        if getattr(a, name) is not None and not 0 < getattr(a, name) < 1e30:
            raise ValueError(f"--{name} must be positive and below 1e30, got {getattr(a, name)}")
    if a.rank is not None and a.rank < 1:
        raise ValueError(f"--rank must be at least 1, or nothing is trained, got {a.rank}")
    if a.align is not None and not 0 <= a.align < 1e30:
        raise ValueError(f"--align must lie within 0 and 1e30, got {a.align}")
    for name in sorted(set().union(*SHAPE.values()) - {*SHAPE[a.kind]}):
        if getattr(a, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} is no flag of {a.kind}")
    steps = a.heads or a.steps or 3
    if steps >= a.context:
        raise ValueError(f"--context {a.context} is too short for {steps} steps")
    a.tokenizer = a.model
    return a


def build(a, model):
    """The head that the flags ask for, fresh."""
    L = model.c.n_layers
    usual = {"exit_layer": max(1, L // 6), "rank": None, "align": 0.1, "heads": 3, "own_head": False,
             "inject_layer": L // 2, "steps": 3, "blocks": 1}
    given = {name: getattr(a, name) for name in SHAPE[a.kind] if getattr(a, name) is not None}
    return heads.KINDS[a.kind](model, **{name: usual[name] for name in SHAPE[a.kind]} | given)


# --- the text


def write_text(model, count, seed, length, temperature=1.0, opening=0):
    """At least `count` tokens of texts that the model draws at this temperature, but the first `opening` of
    each at 1, one text after the other, each from a begin-of-text id to its end or to `length` tokens. (N,)
    int32."""
    c, ids, coins = model.c, [], Coins(seed)
    if c.bos is None:
        raise ValueError("this model has no begin-of-text id to start a text with: give text with --data")
    with tqdm(total=int(count), desc="writing", unit="tok", unit_scale=True, disable=None) as bar:
        while len(ids) < count:
            warmth = chain(repeat(1.0, opening), repeat(temperature))           # one for each round
            begun = rounds(model, [[c.bos]] * ROWS, length - 1, None,
                           lambda logits, warmth=warmth: to_probs(logits, next(warmth)), coins, c.eos)
            for state, r in begun:  # noqa: B007
                bar.update(sum(map(len, r.new)))
            for row in state.known:
                ids += row[:-1] if row[-1] == c.bos else row    # where one id begins and ends a text
    return torch.tensor(ids, dtype=torch.int32)


def read_text(a, model, tokenizer):
    """The Corpus of --data. Any tokenizer will do: each document begins as a prompt would."""
    documents, weights = corpus.read_weighted(a.data)
    ids = {name: [t for text in texts for t in checkpoint.encode(tokenizer, text, model.c.bos)]
           for name, texts in documents.items()}
    if a.text:      # then each file's size is its weight
        cuts = [int(a.text * w / sum(weights)) for w in weights]
        ids = {name: row[:cut] for (name, row), cut in zip(ids.items(), cuts, strict=True)}
        weights = [1.0] * len(weights)
    streams = {name: torch.tensor(row, dtype=torch.int32) for name, row in ids.items()}
    return corpus.split(streams, {}, weights, tokenizer, a.context)


# --- training


def losses(head, batch, memory=None):
    """How far the head's distributions lie from the model's, in nats: KL(p || q) of each step of the head,
    averaged over the texts (B, T); and what else counts, a number, which only M2R2 has. memory: see
    `heads.judged`."""
    found, besides = [], 0.0
    for said, target in heads.judged(head, batch, memory):
        logp, logq = target.float().log_softmax(-1), said.float().log_softmax(-1)       # (B, N, V)
        found.append((logp.exp() * (logp - logq)).sum(-1).mean())
        if isinstance(head, M2R2):
            besides = head.besides(torch.minimum(logp, logq).exp().sum(-1).detach())
    return found, besides


@torch.no_grad()
def evaluate(head, tokens, context, most):
    """What a head is worth on the first `most` tokens, cut into windows: of each of its steps the "loss", the
    "agreement" of its best token with the model's, how often the model's is among its best five, "top 5",
    and the "overlap", the sum of min(p, q). "ranks": the greedy acceptance of its first, second, ... guess,
    averaged over its steps."""
    starts = range(0, max(1, min(most, len(tokens)) // context) * context, context)
    windows = torch.stack([tokens[i : i + context] for i in starts]).long().to(head.model.tok.device)
    total, count = 0.0, 0
    for rows in windows.split(max(1, 1024 // context)):
        found = []
        for said, target in heads.judged(head, rows):
            p, q = target.float().softmax(-1), said.float().softmax(-1)
            ranks = rank_acceptance(to_probs(target), q, min(heads.RANKS, q.shape[-1]))
            kl = (p * (target.float().log_softmax(-1) - said.float().log_softmax(-1))).sum(-1).mean()
            found.append([float(kl), float(torch.minimum(p, q).sum(-1).mean()), *ranks])
        total = total + len(rows) * torch.tensor(found, dtype=torch.float64)
        count += len(rows)
    loss, overlap, *ranks = (total / count).T.tolist()      # lists over the steps
    five = [sum(column) for column in zip(*ranks, strict=True)]
    return {"loss": loss, "agreement": ranks[0], "top 5": five, "overlap": overlap,
            "ranks": [sum(r) / len(r) for r in ranks]}


class Run(train.Run):
    """A head, its optimiser and what was done so far, kept as lab/train.py keeps a model."""

    def __init__(self, a, model, text, device, head=None):
        self.a, self.model, self.text, self.device = a, model, text, device
        self.head = build(a, model) if head is None else head
        self.trained = self.head.weights
        self.optimisers = [torch.optim.AdamW(self.trained.parameters(), lr=a.lr, betas=(0.9, 0.95),
                                             weight_decay=0.0)]
        self.rates, self.memory = [a.lr], {}
        self.start()
        self.settings |= {"model": heads.fingerprint(model)}

    def train_step(self):
        a, progress = self.a, self.progress()
        # the same windows come again and again, so that the model reads each of them once only
        batch = self.text.batch(a.seed, self.step, a.batch, a.context - 1, grid=a.context)
        found, besides = losses(self.head, batch.long().to(self.device), self.memory)
        weights = [0.8 ** k for k in range(len(found))]     # later steps count less (Medusa, section 2.2.1)
        loss = sum(w * step for w, step in zip(weights, found, strict=True)) / sum(weights)
        self.update(loss + besides, progress)
        self.losses.append([sum(loss.item() for loss in found) / len(found), None, None])

    def measure(self):
        a, held_out = self.a, self.text.valid.items()
        files = {name: evaluate(self.head, s, a.context, MEASURED) for name, s in held_out}
        self.evals.append({"tokens": self.step * a.batch * a.context, "files": files})

    def lines(self):
        for name, table in self.evals[-1]["files"].items():
            yield f"{name}: agreement by step " + " ".join(f"{v:.2f}" for v in table["agreement"])

    def tensors(self):
        yield from super().tensors()
        if not self.a.data:     # what was written is not written again
            yield from ((f"text.{kind}", s) for kind, s in (("train", self.text.train[OWN]),
                                                            ("valid", self.text.valid[OWN])))


def fresh_run(a, device, tokenizer, file):
    """As `train.fresh_run`. The text that the model wrote is read from the checkpoint, where there is one."""
    model, _ = train.long_enough(a, a.model, device)
    build(a, model)     # a wrong shape is refused before minutes of writing
    if a.data:
        text = read_text(a, model, tokenizer)
    elif file is None:
        written = write_text(model, a.text or OWN_TEXT, a.seed, a.context, a.temperature, a.opening)
        text = corpus.split({OWN: written}, {}, [1.0], tokenizer, a.context)
    else:
        with checkpoint.guarded(f"{a.out}: not a checkpoint of this program, or damaged"):
            parts = [{OWN: file.get_tensor(f"text.{kind}")} for kind in ("train", "valid")]
        text = corpus.Corpus(*parts, [1.0], tokenizer)
    return Run(a, model, text, device)


def finish(run):
    """Write the heads in bfloat16, their picture and their card. Returns {file: what they are worth}, as
    written."""
    out = Path(run.a.out)
    run.head.weights.bfloat16().float()     # as the file will hold them
    tables = {name: evaluate(run.head, s, run.a.context, 4 * MEASURED) for name, s in run.text.valid.items()}
    ranks = zip(*(table.pop("ranks") for table in tables.values()), strict=True)
    run.head.ranks = [sum(r) / len(r) for r in ranks]
    heads.save(run.head, out)
    with replacing(out / "training.png") as path:
        plots.heads(run.losses, run.a.batch * run.a.context, run.evals, path)
    default = vars(parse([run.a.kind, "--model", "x", "--out", "x"]))
    given = {name: getattr(run.a, name) for name in default if name not in ("kind", "tokenizer")}
    command = f"{run.a.kind} {card.command(given, default)}"
    write_file(out / "README.md", card.head_card(run, tables, command))
    return tables


def run(argv):
    begun = train.open_run(parse(argv), fresh_run)
    train.train(begun)
    finish(begun)


def main(argv=None):
    return cli.main(run, argv)


if __name__ == "__main__":
    sys.exit(main())
