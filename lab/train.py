"""Train tiny Llamas and Gemma-2s that can be left early (LayerSkip, Elhoushi et al. 2024).

    python -m lab.train --out my-model --data stories.txt=2 code.txt --valid valid.txt --tokens 8e6

Training skips sub-layers with the same call that drafting uses, `run` over a part of them, so a
draft computes exactly what was trained.
"""
import math
import shlex
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tqdm import tqdm

import checkpoint
from lab import card, corpus
from lab.save import beside, save
from machine.files import note, replacing
from model import Config, Placement, Refused, Transformer
from support import cli
from support.flags import within as number
from support.texts import BOUNDARY

STATE = "checkpoint.pt"
EVERY = 120     # seconds between checkpoints
KEPT = "step", "seconds", "loss", "before"      # of a Run
CLIP = 1.0      # the greatest norm of a gradient
SHAPE = {"layers": 12, "dim": 256, "heads": 4, "kv-heads": 2, "hidden": 704, "vocab": 4096}
RECIPE = (      # (flag, default, lowest, highest, help)
    ("dropout", 0.15, 0.0, 1.0, "how often the last sub-layer is dropped; earlier ones less"),
    ("exit-weight", 1.0, 0.0, 1e30, "of the early-exit loss relative to the final one"),
    ("distil", 0.5, 0.0, 1.0, "the share of the early-exit loss that imitates the final "
     "distribution instead of the labels (Kangaroo, arXiv 2404.18911)"),
    ("shallow", 0.7, 0.0, 1.0, "how often the exit is a shallow one, where drafts come from (our "
     "choice; LayerSkip weighs deep exits more)"),
    ("shallow-end", 1 / 6, 0.0, 1.0, "the share of the blocks up to which an exit is shallow"))
STEPS = (
    ("tokens", 8e6, 1.0, 1e30, "how many to train on"),
    ("context", 512, 1, 2**20, "tokens of a sequence"),
    ("batch", 16, 1, 2**20, "sequences of a step"),
    ("warmup", 100, 0, 2**40, "steps to the full rate"),
    ("lr", 3e-3, 1e-30, 1e30, "of AdamW: embeddings and norms"),
    ("muon-lr", 0.02, 0.0, 1e30, "of Muon: matrices (Jordan et al. 2024); 0: AdamW learns all"),
    ("decay", 0.5, 1e-9, 1.0, "both rates fall linearly to 2 %% over this last share of the run"),
    ("seed", 0, 0, 2**40, ""))


# --- the command line


def add_numbers(group, rows):
    """A flag for each row (name, default, lowest, highest, help), of the lowest value's type."""
    for name, default, low, high, text in rows:
        group.add_argument(f"--{name}", type=number(low, high), default=default, metavar="N",
                           help=text)


def command_line(module, argv):
    """The command that began a run, for its card and its checkpoint."""
    return f"python -m {module} {shlex.join(word for word in argv if word != '--resume')}"


def parse(argv):
    p = cli.Parser(description="Train a tiny Llama or Gemma-2 so that skipping works.",
                   allow_abbrev=False)
    p.add_argument("--out", required=True, metavar="DIR",
                   help="for the model, its card and its checkpoint")
    p.add_argument("--resume", action="store_true",
                   help="continue the run in --out from its last checkpoint")
    p.add_argument("--data", required=True, nargs="+", metavar="FILE[=W]",
                   help=f"documents separated by {BOUNDARY}, drawn W times as often")
    p.add_argument("--valid", nargs="+", default=[], metavar="FILE", help="measure on these "
                   f"(default: the last {corpus.HELD_OUT:.0%}% of each training file, held out)")
    p.add_argument("--start", metavar="DIR", help="train the model in DIR further (continual "
                   "pretraining), such as a model that cannot yet be left early")
    p.add_argument("--tokenizer", metavar="DIR", help="take the tokenizer of DIR")
    p.add_argument("--family", choices=["llama", "gemma2"], default="llama")
    add_numbers(p.add_argument_group("shape"),
                [(flag, size, 1, 2**20, f"(default: {size})") for flag, size in SHAPE.items()])
    add_numbers(p.add_argument_group("LayerSkip's recipe (arXiv 2404.16710), one random exit in a "
                                     "step (plain training: --dropout 0 --exit-weight 0)"), RECIPE)
    add_numbers(p.add_argument_group("optimisation"), STEPS)
    p.add_argument("--device", help="cpu or cuda (default: cuda if there is one)")
    p.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16",
                   help="of the products; a CPU without bfloat16 units is faster in float32")
    a = p.parse_args(argv)
    a.command = command_line("lab.train", argv)
    for flag in ("tokenizer", "family", *SHAPE):
        name = flag.replace("-", "_")
        if a.start and getattr(a, name) != p.get_default(name):
            raise Refused(f"--{flag} is a matter of the model in {a.start}: leave it out")
    if a.heads % a.kv_heads or a.dim % (2 * a.heads):
        raise Refused(f"--heads {a.heads} must be a multiple of --kv-heads {a.kv_heads}, and "
                      f"--dim {a.dim} one of twice as many")
    return a


# --- the recipe


def drop_rates(n_layers, most):
    """How often each of the 2L sub-layers is dropped: most * (2^(l / (2L-1)) - 1) for sub-layer l,
    from 0 to `most` (LayerSkip, section 4.1, which drops whole blocks)."""
    return most * (2 ** torch.linspace(0, 1, 2 * n_layers, dtype=torch.float64) - 1)


def choose(a, n_layers, g):
    """What one step trains, (sub-layers kept, exit layer)."""
    kept = (torch.rand(2 * n_layers, generator=g, dtype=torch.float64)
            >= drop_rates(n_layers, a.dropout))
    u, v = torch.rand(2, generator=g, dtype=torch.float64).tolist()
    end = max(1, round(n_layers * a.shallow_end))
    low, high = (1, end + 1) if u < a.shallow else (end + 1, n_layers)
    exit_layer = min(low + int(v * max(1, high - low)), max(1, n_layers - 1))
    return kept.nonzero()[:, 0].tolist(), exit_layer


def losses(model, batch, sublayers, exit_layer=None, distil=0.0):
    """(final loss, early-exit loss or None) of windows (B, T+1), in nats a token.

    The early exit uses the final norm and head, which all exits share. Its targets are the labels
    and, for the share `distil`, the final distribution of this same pass, as acceptance compares
    the two (soft labels: Hinton et al. 2015, arXiv 1503.02531). No gradient flows into that target,
    because then the whole model would learn to be as simple as its exit.
    """
    labels = batch[:, 1:].flatten()                                             # (B*T,)
    at = Placement.span(0, batch.shape[1] - 1, batch.device)
    x = model.embed(batch[:, :-1])                                              # (B, T, dim)
    if exit_layer is not None:
        x = exit_x = model.run(x, at, sublayers=[i for i in sublayers if i < 2 * exit_layer])
    x = model.run(x, at, sublayers=[i for i in sublayers if i >= 2 * (exit_layer or 0)])
    logits = model.unembed(x).float().flatten(0, 1)                             # (B*T, V)
    final = F.cross_entropy(logits, labels)
    if exit_layer is None:
        return final, None
    logq = model.unembed(exit_x).float().flatten(0, 1).log_softmax(-1)
    p = logits.detach().softmax(-1)
    return final, (1 - distil) * F.nll_loss(logq, labels) - distil * (p * logq).sum(-1).mean()


@torch.no_grad()
def evaluate(model, tokens, context, most):
    """{"loss": [of each exit], "agreement": [of each exit]} over the first `most` tokens, cut into
    windows: the loss after each block in nats a token, and how often its best token is the last
    block's. One pass gives all exits, because an exit reads the same states as the whole model
    does ("logit lens")."""
    rows = corpus.windows(tokens, context + 1, most, context).to(model.tok.device)
    loss = 0.0
    agreed = 0.0
    for part in rows.split(max(1, 512 // context)):
        trace = dict.fromkeys(range(1, 2 * model.c.n_layers, 2))
        model.run(model.embed(part[:, :-1]), Placement.span(0, context, part.device), trace=trace)
        labels = part[:, 1:].flatten()                                          # (B*T,)
        logits = torch.stack([model.unembed(x).float().flatten(0, 1) for x in trace.values()])
        right = logits[:, torch.arange(len(labels)), labels]                    # (L, B*T)
        loss = loss + (logits.logsumexp(-1) - right).double().sum(1)
        best = logits.argmax(-1)
        agreed = agreed + (best == best[-1]).double().sum(1)
    count = rows.shape[0] * context
    return {"loss": (loss / count).tolist(), "agreement": (agreed / count).tolist()}


# --- a run


def first_model(a, tokenizer, device):
    """What a run begins with, in float32: the model of --start, or one of the shape that the flags
    ask for, with fresh weights."""
    if a.start:
        return long_enough(a, a.start, device)[0].requires_grad_(True)
    boundary = tokenizer.token_to_id(BOUNDARY)
    if boundary is None:
        raise Refused(f"the tokenizer of {a.tokenizer} has no {BOUNDARY} to separate the "
                      "documents")
    c = Config(vocab_size=max(tokenizer.get_vocab().values()) + 1, dim=a.dim, n_layers=a.layers,
               n_heads=a.heads, n_kv_heads=a.kv_heads, head_dim=a.dim // a.heads,
               hidden_dim=a.hidden, max_len=a.context, tied=True, bos=boundary, eos=(boundary,))
    if a.family == "gemma2":
        c = replace(c, norm_eps=1e-6, act="gelu", norm_offset=1.0, embed_scale=a.dim**0.5,
                    post_norm=True, query_scale=c.head_dim**-0.5, attn_softcap=50.0,
                    final_softcap=30.0, window=max(1, a.context // 4))
    model = Transformer(c).float()
    g = torch.Generator().manual_seed(a.seed)
    for p in model.parameters():
        if p.dim() > 1:
            p.data.copy_(0.02 * torch.randn(p.shape, generator=g))
        else:
            p.data.fill_(1 - c.norm_offset)     # norms multiply by 1
    return model.to(device)


def adamw(weights, rate):
    return torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)


def long_enough(a, folder, device):
    """(model, tokenizer) of a folder, in float32. Raises ValueError if its context is below
    --context."""
    model, tokenizer = checkpoint.load(folder, device, torch.float32)
    if a.context > model.c.max_len:
        raise Refused(f"--context {a.context} exceeds the context of {folder}: "
                      f"{model.c.max_len}")
    return model, tokenizer


class Run:
    """A model, its optimisers and what was done so far. One file, the checkpoint, holds all of it.
    Another kind of run has a `build`, an `objective`, an `evaluate` and a `finish` of its own."""

    def __init__(self, a, text, device):
        self.a = a
        self.text = text
        self.device = device
        self.block = a.batch * a.context        # tokens of a step
        self.steps = max(1, round(a.tokens / self.block))
        self.step = 0
        self.seconds = 0.0
        self.loss = None        # of the last step
        self.before = None      # what it was worth at the start
        self.trained, self.optimisers = self.build()

    def build(self):
        """(the module whose weights learn, their optimisers)"""
        a = self.a
        self.model = first_model(a, self.text.tokenizer, self.device)
        matrices = [p for p in self.model.blocks.parameters() if p.dim() == 2 and a.muon_lr]
        chosen = set(map(id, matrices))
        rest = [p for p in self.model.parameters() if id(p) not in chosen]
        muon = [torch.optim.Muon(matrices, lr=a.muon_lr, weight_decay=0.0)] if matrices else []
        return self.model, [*muon, adamw(rest, a.lr)]

    def objective(self, batch):
        """(what a step minimises, the loss that is shown) for windows (B, T+1)."""
        a = self.a
        g = torch.Generator().manual_seed(a.seed * 1_000_003 + self.step + 2**40)
        kept, exit_layer = choose(a, self.model.c.n_layers, g)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=a.dtype == "bfloat16"):
            final, early = losses(self.model, batch, kept, exit_layer if a.exit_weight else None,
                                  a.distil)
        return final if early is None else final + a.exit_weight * early, final

    def train_step(self):
        """One step of the optimisers down the gradient of the objective."""
        a = self.a
        batch = self.text.batch(a.seed, self.step, a.batch, a.context)
        loss, shown = self.objective(batch.long().to(self.device))
        left = 1 - self.step / self.steps
        scale = min(1.0, (self.step + 1) / max(1, a.warmup), max(0.02, left / a.decay))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained.parameters(), CLIP)
        for optimiser in self.optimisers:
            optimiser.param_groups[0]["lr"] = optimiser.defaults["lr"] * scale
            optimiser.step()
            optimiser.zero_grad()
        self.step += 1
        self.loss = shown.item()

    def evaluate(self, tokens, most=8192):
        return evaluate(self.model, tokens, self.a.context, most)

    # --- the checkpoint: one file, replaced as a whole

    def save(self):
        state = {"command": self.a.command, **{key: getattr(self, key) for key in KEPT},
                 "weights": self.trained.state_dict(),
                 "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
                 "text": vars(self.text) | {"tokenizer": self.text.tokenizer.to_str()}}
        with replacing(Path(self.a.out) / STATE) as path:
            torch.save(state, path)

    def restore(self, state):
        for key in KEPT:
            setattr(self, key, state[key])
        self.trained.load_state_dict(state["weights"])
        for optimiser, own in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(own)

    def finish(self):
        """Write the model in bfloat16 and its card."""
        texts = beside(self.a.start) if self.a.start else {}
        save(self.model.bfloat16(), Path(self.a.out), self.text.tokenizer, texts)
        self.model.float()      # as the file holds it
        card.model_card(self,
                        {name: self.evaluate(s, 32768) for name, s in self.text.valid.items()})


def fresh_run(a, device, text):
    """A Run of which nothing is done. text: the Corpus of the run that is resumed, if one is."""
    if text is None:
        start = None
        if a.start:     # between two documents stand the end of one and the begin of the next
            c = checkpoint.read_config(Path(a.start))
            start = list(dict.fromkeys(t for t in (*c.eos[:1], c.bos) if t is not None))
        folder = a.start or a.tokenizer
        tokenizer = checkpoint.read_tokenizer(Path(folder)) if folder else None
        text = corpus.read(a.data, a.valid, a.context, a.vocab, tokenizer, start)
    return Run(a, text, device)


def open_run(a, fresh=fresh_run):
    """A fresh Run, or with --resume the one that --out holds. Raises ValueError where --out holds
    anything else. fresh(a, device, text of the checkpoint or None) makes a Run."""
    out = Path(a.out)
    state = None
    text = None
    if out.exists() and any(out.iterdir()):
        if not (a.resume and (out / STATE).is_file()):
            raise Refused(f"{out} is not empty: continue its run with --resume, or name another "
                          "--out")
        with checkpoint.guarded(f"{out / STATE}: not a checkpoint of this program, or damaged"):
            state = torch.load(out / STATE, "cpu", weights_only=True)
            command = state["command"]
            text = corpus.Corpus(**state["text"] | {
                "tokenizer": Tokenizer.from_str(state["text"]["tokenizer"])})
        if command != a.command:
            raise Refused(f"{out} holds another run, which only the same flags continue: "
                          f"{command} --resume")
    run = fresh(a, checkpoint.find_device(a.device), text)
    if state:
        with checkpoint.guarded(f"{out / STATE}: not a checkpoint of this run, or damaged"):
            run.restore(state)
    else:
        out.mkdir(parents=True, exist_ok=True)
        run.before = {name: run.evaluate(tokens) for name, tokens in run.text.valid.items()}
        run.save()
    return run


@contextmanager
def patient():
    """Within it the first Ctrl-C, or SIGTERM, is only noted in the list that is yielded, so that a
    step comes to its end. The second one ends the program at once."""
    noted = []

    def note_it(number, frame):
        if noted:
            raise KeyboardInterrupt
        noted.append(number)

    before = {number: signal.signal(number, note_it) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train(run):
    """Take the steps that are left, save a checkpoint every two minutes, and write what was
    trained. A run that was killed goes on from its last checkpoint, and ends as any other. After
    Ctrl-C the checkpoint holds all steps that were taken."""
    started = time.monotonic() - run.seconds
    saved = run.seconds
    often = 1 if sys.stderr.isatty() else 60     # a file needs fewer lines
    with patient() as noted, tqdm(total=run.steps * run.block, initial=run.step * run.block,
                                  unit="tok", unit_scale=True, mininterval=often) as bar:
        while run.step < run.steps and not noted:
            run.train_step()
            run.seconds = time.monotonic() - started
            if not math.isfinite(run.loss):
                raise Refused(f"the loss is {run.loss} at step {run.step}: try a lower --lr and "
                              "--muon-lr")
            bar.set_postfix_str(f"loss {run.loss:.2f}", refresh=False)
            bar.update(run.block)
            if run.seconds - saved > EVERY:
                saved = run.seconds
                run.save()
    run.save()
    if noted:
        note("stopped", f"after step {run.step} of {run.steps}; the same flags and --resume go on")
        raise KeyboardInterrupt
    run.finish()


def main(argv=None):
    return cli.main(lambda argv: train(open_run(parse(argv))),
                    sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
