"""Train heads on a frozen model: Kangaroo, EAGLE, jumps, M2R2, Medusa, Hidden
Transfer and prophets.

    python -m lab.train_heads medusa --model DIR --out DIR/heads/medusa

The teacher is the model itself. It also writes the text, at a low temperature, so that its heads
learn what it says where they will draft, and nobody needs its training data. What a head learns to
say is not the text but the model's whole distribution, because acceptance compares the two.
"""
import copy
import json
import math
import random
import sys
from itertools import chain, cycle, islice, repeat
from pathlib import Path

import torch
from tqdm import tqdm

import checkpoint
from kvcache import KVCache
from lab import card, corpus, train
from lab.m2r2 import M2R2
from lab.save import save_head
from lab.transfer import Transfer
from machine.files import write_file
from methods import heads
from methods.standin import VOCAB, ShortHead, most_frequent
from methods.trees import rank_acceptance
from model import Placement, Refused, StandIn
from sampling import Coins, to_probs
from speculative import generate
from support import cli
from support.chat import message
from support.texts import read_texts

EXIT = ("exit-layer", None, 0, 2**20, "after which block it reads (default: a sixth)")
BLOCKS = ("blocks", 1, 1, 2**20, "how many (default: 1)")
SHAPE = {  # the flags of each kind, as in train.add_numbers; a default of None depends on the model
    "kangaroo": [EXIT], "exit_block": [EXIT],
    "eagle": [("fused", 0, 0, 1,
               "1: it also reads the states after a quarter and half of the blocks")],
    "m2r2": [EXIT],
    "medusa": [("heads", 3, 1, 2**20, "how many (default: 3)"),
               ("markov", 64, 0, 2**20, "rank of a bias by the token before, 0 for none (default: "
                "64)")],
    "transfer": [("inject-layer", None, 0, 2**20, "after which block rows of future tokens begin "
                  "(default: half of them)"),
                 ("steps", 3, 1, 2**20, "rows for each token (default: 3)")],
    "prophet": [BLOCKS],
    "jump": [("start", None, 0, 2**20, "the first block that it runs (default: after two thirds)"),
             BLOCKS]}
TEXT = (
    ("text", 1.5e5, 1.0, 1e30, "how many tokens it writes"),
    ("temperature", 0.5, 1e-30, 1e30, "at which it writes"),
    ("opening", 0, 0, 2**40, "but the first N tokens at 1"))
KINDS = heads.KINDS | {head.kind: head for head in (M2R2, Transfer)}
MEASURED = 4096     # tokens of held-out text
FITTED = 20_000     # tokens that a head is fitted to before it is trained
RANKS = 5           # of how many ranks a head's acceptance is measured, for the shape of a tree
OWN = "own text"    # the name of what the model writes itself
ROWS = {"cpu": 32, "cuda": 512}     # texts that it writes at a time


# --- the command line


def parse(argv):
    p = cli.Parser(add_help=False)      # what all kinds share
    p.add_argument("--model", required=True, metavar="DIR", help="a Hugging Face folder")
    p.add_argument("--out", required=True, metavar="DIR",
                   help="for the heads; generate.py looks into heads/KIND in the model's folder")
    p.add_argument("--resume", action="store_true",
                   help="continue the run in --out from its last checkpoint")
    p.add_argument("--vocab", type=train.number(1, 2**30), metavar="N", help="learn to say only "
                   "the text's N most frequent tokens: with a large vocabulary many times cheaper; "
                   f"writes {VOCAB} beside the heads")
    p.add_argument("--loss", choices=LOSSES, default="overlap", help="overlap: what acceptance "
                   "counts, the distance of p and q, and a tenth of cross-entropy (DSpark); kl: "
                   "KL(p || q)")
    p.add_argument("--prompts", nargs="+", default=[], metavar="FILE", help="it writes answers to "
                   'these, lines of {"prompt": text}, by its chat template')
    p.add_argument("--device", help="cpu or cuda (default: cuda if there is one)")
    steps = [row for row in train.STEPS if row[0] != "muon-lr"]
    for title, rows in (("text", TEXT), ("optimisation", steps)):
        train.add_numbers(p.add_argument_group(title), rows)
    p.set_defaults(tokens=6e5, batch=4, context=256, lr=2e-3, warmup=20)
    whole = cli.Parser(description="Train a head that drafts for a frozen model.")
    kinds = whole.add_subparsers(dest="kind", required=True)
    for kind in KINDS:
        one = kinds.add_parser(kind, parents=[p], allow_abbrev=False)
        train.add_numbers(one.add_argument_group("shape"), SHAPE[kind])
    a = whole.parse_args(argv)
    a.command = train.command_line("lab.train_heads", argv)
    if a.kind == "medusa" and a.vocab and a.markov:
        raise Refused("the bias by the token before is of all tokens: --vocab goes with "
                      "--markov 0")
    return a


def fresh_head(a, model):
    """The head that the flags ask for, fresh."""
    L = model.c.n_layers
    usual = {"exit_layer": max(1, L // 6), "inject_layer": L // 2, "start": 2 * L // 3}
    given = {name: getattr(a, name)
             for name in (flag.replace("-", "_") for flag, *_ in SHAPE[a.kind])}
    shape = {name: usual[name] if value is None else value for name, value in given.items()}
    return KINDS[a.kind](model, **shape)


# --- the text


def ask(folder, tokenizer, texts):
    """Some prompts in the chat template of a model's folder, as ids."""
    render = message(folder)
    return [checkpoint.encode(tokenizer, render(text), special=False) for text in texts]


def write_text(model, count, seed, length, temperature=1.0, opening=0, prompts=None):
    """At least `count` tokens of texts that the model draws at this temperature, but the first
    `opening` of each at 1, one text after the other, each from a begin-of-text id to its end or to
    `length` tokens. (N,) int32. prompts: what it answers instead, again and again, because a chat
    model says little unasked."""
    c = model.c
    ids = []
    coins = Coins(seed)
    if c.bos is None and not prompts:
        raise Refused("this model has no begin-of-text id to start a text with: give it "
                      "--prompts")
    begun = cycle(prompts or [[c.bos]])
    with tqdm(total=int(count), desc="writing", unit="tok", unit_scale=True, disable=None) as bar:
        while len(ids) < count:
            warmth = chain(repeat(1.0, opening), repeat(temperature))           # one for each round
            rows = list(islice(begun, ROWS[model.tok.device.type]))
            texts, _ = generate(model, rows, length - 1, None,
                                lambda logits, warmth=warmth: to_probs(logits, next(warmth)), coins,
                                c.eos)
            # trap: one id may both begin and end a text
            for row, text in zip(rows, texts, strict=True):
                ids += row + (text[:-1] if text[-1] == c.bos else text)
            bar.update(len(ids) - bar.n)
    return torch.tensor(ids, dtype=torch.int32)


# --- training


class Rows(StandIn):
    """A model whose head says only some tokens. Its logits are (B, T, N)."""

    def __init__(self, model, rows):
        self.model, self.rows = model, rows

    def unembed(self, x):
        return self.model.unembed(x, self.rows)


def judged(head, tokens):
    """What a head and its model say of the same tokens of texts (B, T): for each step of the head
    raw logits (B, N, V) of both, its own with gradients. The model's pass has none."""
    model = head.model
    B, T = tokens.shape
    last = 2 * model.c.n_layers - 1
    with torch.no_grad():
        cache = KVCache(model.c, B, T, model.attention_dtype(), tokens.device)
        trace = dict.fromkeys([*head.taps, last])
        model.run(model.embed(tokens), Placement.span(0, T, tokens.device), cache, trace=trace)
        target = model.unembed(trace[last])                                     # (B, T, V)
    # row n is of the token k places after the next
    for k, said in head.predict(tokens, trace, cache):
        yield said, target[:, k : k + said.shape[1]]


def kl(logp, logq):
    """KL(p || q), in nats."""
    return (logp.exp() * (logp - logq)).sum(-1)


def overlap(logp, logq):
    """The distance |p - q|, which is twice the chance of a rejection, and a tenth of cross-entropy,
    without which a q that gives p's tokens nothing would have no gradient (DeepSpec's DSpark)."""
    p = logp.exp()
    return 0.9 * (p - logq.exp()).abs().sum(-1) - 0.1 * (p * logq).sum(-1)


# of log p and log q (B, N, V) -> (B, N); how much less a step counts than the one before
LOSSES = {"kl": (kl, 0.8), "overlap": (overlap, math.exp(-1 / 4))}  # Medusa, section 2.2.1; DSpark


def losses(head, batch, loss=kl):
    """How far the head's distributions lie from the model's, as `loss` has it, at each step of the
    head, averaged over the texts (B, T)."""
    return [loss(target.float().log_softmax(-1), said.float().log_softmax(-1)).mean()
            for said, target in judged(head, batch)]


@torch.no_grad()
def evaluate(head, tokens, context, most):
    """What a head is worth on the first `most` tokens, cut into windows: of each of its steps the
    "loss", the "agreement" of its best token with the model's and the "overlap", the sum of min(p,
    q). "ranks": the greedy acceptance of its first, second, ... guess, averaged over its steps."""
    windows = corpus.windows(tokens, context, most, context).to(head.model.tok.device)
    total = 0.0
    for rows in windows.split(max(1, 1024 // context)):
        found = []
        for said, target in judged(head, rows):
            logp, logq = target.float().log_softmax(-1), said.float().log_softmax(-1)
            p, q = logp.exp(), logq.exp()
            ranks = rank_acceptance(to_probs(target), q, min(RANKS, q.shape[-1]))
            far = (p * (logp - logq)).masked_fill(q == 0, 0.0).sum(-1).mean()   # if it may say it
            found.append([float(far), float(torch.minimum(p, q).sum(-1).mean()), *ranks])
        total = total + len(rows) * torch.tensor(found, dtype=torch.float64)
    loss, overlap, *ranks = (total / len(windows)).T.tolist()       # lists over the steps
    return {"loss": loss, "agreement": ranks[0], "overlap": overlap,
            "ranks": [sum(r) / len(r) for r in ranks]}


class Run(train.Run):
    """A head, its optimiser and what was done so far, kept as lab/train.py keeps a model."""

    def __init__(self, a, model, text, device):
        self.model = model
        self.head = fresh_head(a, model)
        super().__init__(a, text, device)

    def build(self):
        a = self.a
        some = next(iter(self.text.train.values()))
        self.head.fit(corpus.windows(some, a.context, FITTED, a.context).to(self.device))
        self.vocab = None
        self.taught = copy.copy(self.head)  # with --vocab it and its model say only those tokens
        if a.vocab:
            texts = [row.tolist() for row in self.text.train.values()]
            self.vocab = most_frequent(texts, a.vocab)
            rows = ShortHead(self.model, self.vocab["ids"]).rows
            for part in {"model", "own"} & vars(self.head).keys():
                setattr(self.taught, part, Rows(getattr(self.head, part), rows))
        return self.head.weights, [train.adamw(self.head.weights.parameters(), a.lr)]

    def objective(self, batch):
        measure, fade = LOSSES[self.a.loss]
        found = losses(self.taught, batch[:, :-1], measure)
        weights = [fade**k for k in range(len(found))]
        loss = sum(w * far for w, far in zip(weights, found, strict=True)) / sum(weights)
        if isinstance(self.taught, M2R2):
            loss = loss + self.taught.besides()
        return loss, sum(found).detach() / len(found)

    def evaluate(self, tokens, most=MEASURED):
        head = heads.shorter(self.head, self.vocab["ids"]) if self.vocab else self.head
        return evaluate(head, tokens, self.a.context, most)

    def finish(self):
        """Write the heads in bfloat16 and their card."""
        out = Path(self.a.out)
        self.head.weights.bfloat16().float()    # as the file will hold them
        tables = {name: self.evaluate(s, 4 * MEASURED) for name, s in self.text.valid.items()}
        ranks = zip(*(table.pop("ranks") for table in tables.values()), strict=True)
        self.head.ranks = [sum(r) / len(r) for r in ranks]
        save_head(self.head, out)
        if self.vocab:
            write_file(out / VOCAB, json.dumps(self.vocab) + "\n")
        card.head_card(self, tables)


def fresh_run(a, device, text):
    """As `train.fresh_run`."""
    model, tokenizer = train.long_enough(a, a.model, device)
    fresh_head(a, model)    # a wrong shape is refused before minutes of writing
    if text is None:
        asked = [text for name in a.prompts for text in read_texts(Path(name), "prompt", "\n")]
        prompts = ask(a.model, tokenizer, asked) if asked else None
        random.Random(a.seed).shuffle(prompts or [])
        written = write_text(model, a.text, a.seed, a.context, a.temperature, a.opening, prompts)
        text = corpus.split({OWN: written}, {}, [1.0], tokenizer, a.context)
    return Run(a, model, text, device)


def main(argv=None):
    def run(argv):
        train.train(train.open_run(parse(argv), fresh_run))
    return cli.main(run, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
