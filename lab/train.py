"""Training tiny models that can be left early: LayerSkip's recipe (Elhoushi et al. 2024) for both families.

    python -m lab.train --out my-model --data stories.txt=2 code.txt --valid stories-valid.txt --tokens 8e6

The one thing to remember: training skips sub-layers with the same call that drafting uses, `run` over a part
of them, so a draft computes exactly what was trained.
"""
import argparse
import copy
import ctypes
import json
import math
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tqdm import tqdm

import checkpoint
from control import best_gamma, expected_speedup, weight_costs
from lab import card, corpus
from layerskip import early_exit
from model import Config, Transformer, fill
from speculative import generate
from support import cli, plots
from support.files import BOUNDARY, LOCK, TEMPORARY, lock, replacing, write_file

STATE = "checkpoint.safetensors"
LITTER = ".tmp??????"  # safetensors writes such a file and renames it: a kill in between leaves it there
# when a run is resumed
MAY_CHANGE = {"out", "resume", "valid", "tokenizer", "minutes", "every", "twin", "about", "prompt", "device",
              "dtype"}
SHAPE = "family", "layers", "dim", "heads", "kv_heads", "head_dim", "hidden", "window"  # or that of --start


# --- the command line


def parse(argv):
    p = cli.Parser(description="Train a tiny Llama or Gemma-2 so that skipping works.", allow_abbrev=False)
    p.add_argument("--out", required=True, metavar="DIR", help="for the model, its card and its checkpoint")
    p.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --out")
    p.add_argument("--data", nargs="+", default=[], metavar="FILE[=W]", help="documents separated by "
                   f"{BOUNDARY}, drawn W times as often (default: Python's own standard library)")
    p.add_argument("--valid", nargs="+", default=[], metavar="FILE", help="measure on these (default: "
                   f"the last {corpus.HELD_OUT:.0%}% of each training file, which is then not trained on)")
    p.add_argument("--start", metavar="DIR", help="train the model in DIR further, with its shape and "
                   "tokenizer (continual pretraining), such as a model that cannot yet be left early")
    p.add_argument("--tokenizer", metavar="DIR", help="take the tokenizer of DIR instead of training one")
    p.add_argument("--vocab", type=int, default=4096, metavar="N", help="size of a new tokenizer")
    add_shape(p.add_argument_group("shape"))
    add_recipe(p.add_argument_group("recipe, after LayerSkip (arXiv 2404.16710), one random exit a step "
                                    "(--dropout 0 --exit-weight 0 is plain training)"))
    add_steps(p.add_argument_group("optimisation"))
    other = p.add_argument_group("what is written beside the model")
    other.add_argument("--every", type=float, default=5, metavar="M", help="minutes between checkpoints")
    other.add_argument("--prompt", default="Once upon a time", help="what the samples begin with")
    other.add_argument("--about", default="", metavar="TEXT", help="for the card: sources and licences")
    other.add_argument("--twin", metavar="FILE", help="train two models, below --out, that differ only "
                       "in the recipe, and write both tables to this JSON file")
    return check_flags(p.parse_args(argv), p)


def add_shape(group):
    """--context, the length of the windows, and what SHAPE names."""
    group.add_argument("--family", choices=["llama", "gemma2"], default="llama")
    for flag, default in {"layers": 12, "dim": 256, "heads": 4, "kv-heads": 2, "head-dim": 64, "hidden": 704,
                          "context": 512}.items():
        group.add_argument(f"--{flag}", type=int, default=default, metavar="N")
    group.add_argument("--window", type=int, default=128, metavar="N", help="of Gemma-2's sliding layers")


def add_recipe(group):
    group.add_argument("--dropout", type=float, default=0.15, metavar="P",
                       help="how often the last sub-layer is dropped; the others less, the earlier they come "
                       "(LayerSkip, section 4.1)")
    group.add_argument("--exit-weight", type=float, default=1.0, metavar="W",
                       help="of the early-exit loss relative to the final one (LayerSkip, section 4.1)")
    group.add_argument("--distil", type=float, default=0.5, metavar="P", help="the share of the early-exit "
                       "loss that imitates the model's own final distribution instead of the labels, as "
                       "acceptance compares the two (soft labels as in Kangaroo, arXiv 2404.18911)")
    group.add_argument("--shallow", type=float, default=0.7, metavar="P",
                       help="how often the exit is a shallow one, where drafts come from (our choice; "
                       "LayerSkip weighs deep exits more)")
    group.add_argument("--shallow-end", type=float, default=1 / 6, metavar="P",
                       help="the share of the blocks up to which an exit is shallow (default: a sixth)")
    group.add_argument("--teacher", metavar="DIR", help="the final distribution imitates that of the model "
                       "in DIR, which has the same tokenizer (soft labels, arXiv 1503.02531)")
    group.add_argument("--taught", type=float, default=0.7, metavar="P", help="the share of the final loss "
                       "that imitates --teacher instead of the labels")
    group.add_argument("--curriculum", type=float, default=0.2, metavar="P", help="in the first P of the run "
                       "every exit is drawn equally often and learns from labels only, with .3 times "
                       "--exit-weight (our choice; LayerSkip's curriculum is over the exits)")


def add_steps(group):
    group.add_argument("--tokens", type=float, default=8e6, metavar="N", help="how many to train on")
    group.add_argument("--minutes", type=float, metavar="M", help="train no longer, resumed runs included; "
                       "the learning rate then follows the clock, and no run repeats another exactly")
    group.add_argument("--batch", type=int, default=16, metavar="N", help="sequences of --context tokens")
    group.add_argument("--lr", type=float, default=3e-3, help="of AdamW: embeddings and norms")
    group.add_argument("--muon-lr", type=float, default=0.02, help="of Muon: matrices (Jordan et al. 2024)")
    group.add_argument("--warmup", type=int, default=100, metavar="N", help="steps to the full learning rate")
    group.add_argument("--decay", type=float, default=0.5, metavar="P", help="in the last P of the run both "
                       "rates fall linearly to 2 %%")
    group.add_argument("--clip", type=float, default=1.0, metavar="X", help="the greatest norm of a gradient")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--device", help="cpu or cuda (default: cuda if there is one)")
    group.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16",
                       help="of the products; weights are float32. A CPU without bfloat16 units is faster in "
                       "float32")


def check_flags(a, p):
    """The same flags. Raises ValueError for numbers that make no sense, and beside --start for a shape."""
    for name in ("tokenizer", "vocab", *SHAPE):
        if a.start and getattr(a, name) != p.get_default(name):
            raise ValueError(f"--{name.replace('_', '-')} is a matter of the model in {a.start}: "
                             "leave it out")
    for low, high, names in (
            (1, 2**20, "vocab layers dim heads kv_heads head_dim hidden context window batch"),
            (0, 2**40, "seed warmup"), (0, 1, "dropout distil taught shallow shallow_end curriculum decay")):
        for name in names.split():
            if not low <= getattr(a, name) <= high:
                raise ValueError(f"--{name.replace('_', '-')} must lie within {low} and {high}, got "
                                 f"{getattr(a, name)}")
    for name in ("tokens", "minutes", "every", "lr", "muon_lr", "clip", "exit_weight"):
        value = getattr(a, name)
        if not (value is None or 0 < value < 1e30 or value == 0 and name == "exit_weight"):
            raise ValueError(f"--{name.replace('_', '-')} must be positive and below 1e30, got {value}")
    if a.heads % a.kv_heads or a.head_dim % 2:
        raise ValueError(f"--heads {a.heads} must be a multiple of --kv-heads {a.kv_heads}, and --head-dim "
                         f"{a.head_dim} even")
    return a


# --- the recipe


def drop_rates(n_layers, most):
    """How often each of the 2L sub-layers is dropped: most * (2^(l / (2L-1)) - 1) for sub-layer l, from 0 to
    `most` (LayerSkip, section 4.1, which drops whole blocks)."""
    return most * (2 ** torch.linspace(0, 1, 2 * n_layers, dtype=torch.float64) - 1)


def choose(a, n_layers, progress, g):
    """What one step trains: (sub-layers kept, exit layer, weight of its loss, distilled share of its
    loss)."""
    kept = (torch.rand(2 * n_layers, generator=g, dtype=torch.float64) >= drop_rates(n_layers, a.dropout))
    u, v = torch.rand(2, generator=g, dtype=torch.float64).tolist()
    in_curriculum, end = progress < a.curriculum, max(1, round(n_layers * a.shallow_end))
    low, high = (1, n_layers) if in_curriculum else (1, end + 1) if u < a.shallow else (end + 1, n_layers)
    exit_layer = min(low + int(v * max(1, high - low)), max(1, n_layers - 1))
    weight, distil = (0.3 * a.exit_weight, 0.0) if in_curriculum else (a.exit_weight, a.distil)
    return kept.nonzero()[:, 0].tolist(), exit_layer, weight, distil


def losses(model, batch, sublayers, exit_layer=None, distil=0.0, teacher=None, taught=0.0):
    """(final loss, early-exit loss or None) of windows (B, T+1), in nats a token.

    The final targets are the labels and, for the share `taught`, the distribution of another model, the
    teacher. The early exit uses the final norm and head, which all exits share. Its targets are the labels
    and, for the distilled share, the final distribution of this same pass, as acceptance compares the two. No
    gradient flows into that target: else the whole model would learn to be as simple as its exit.
    """
    tokens, labels = batch[:, :-1].long(), batch[:, 1:].long().flatten()        # (B, T), (B*T,)
    at, x = slice(0, tokens.shape[1]), model.embed(tokens)                      # (B, T, dim)
    if exit_layer is not None:
        x = exit_x = model.run(x, at, sublayers=[i for i in sublayers if i < 2 * exit_layer])
    x = model.run(x, at, sublayers=[i for i in sublayers if i >= 2 * (exit_layer or 0)])
    logits = model.unembed(x).float().flatten(0, 1)                             # (B*T, V)
    with torch.no_grad():  # what the teacher says of each next token
        wise = teacher and teacher.unembed(teacher.run(teacher.embed(tokens), at)).float().flatten(0, 1)
    final = imitation(logits, labels, wise, taught if teacher else 0.0)
    if exit_layer is None:
        return final, None
    return final, imitation(model.unembed(exit_x).float().flatten(0, 1), labels, logits.detach(), distil)


def imitation(logits, labels, target, share):
    """The cross-entropy of logits (N, V) with labels (N,) and, for a share of it, with the distribution that
    the logits `target` (N, V) stand for (soft labels: Hinton et al. 2015, arXiv 1503.02531)."""
    logq, loss = logits.log_softmax(-1), 0.0
    if share < 1:
        loss = loss + (1 - share) * F.nll_loss(logq, labels)
    if share > 0:
        loss = loss - share * (target.softmax(-1) * logq).sum(-1).mean()
    return loss


@torch.no_grad()
def evaluate(model, tokens, context, most):
    """{"loss": [of each exit], "agreement": [of each exit]} over the first `most` tokens, cut into windows:
    the loss after each block in nats a token, and how often its best token is that of the last block. One
    pass gives all exits, because the states before an exit equal those of the whole model ("logit lens")."""
    starts = range(0, max(1, min(most, len(tokens) - 1) // context) * context, context)
    windows = torch.stack([tokens[i : i + context + 1] for i in starts]).long().to(model.tok.device)
    loss, agreed = 0.0, 0.0
    for rows in windows.split(max(1, 512 // context)):
        trace, labels = dict.fromkeys(range(1, 2 * model.c.n_layers, 2)), rows[:, 1:].flatten()
        model.run(model.embed(rows[:, :-1]), slice(0, context), trace=trace)
        logits = torch.stack([model.unembed(x).float().flatten(0, 1) for x in trace.values()])  # (L, B*T, V)
        right = logits.gather(2, labels.expand(len(logits), -1)[..., None])[..., 0]             # (L, B*T)
        loss = loss + (logits.logsumexp(-1) - right).double().sum(1)
        best = logits.argmax(-1)
        agreed = agreed + (best == best[-1]).double().sum(1)
    count = windows.shape[0] * context
    return {"loss": (loss / count).tolist(), "agreement": (agreed / count).tolist()}


def speedups(c, agreement):
    """The best speed-up that the formula promises each exit but the last: its alpha is its agreement, its
    cost the share of the weights that it reads."""
    costs, table = weight_costs(c), []
    for exit_layer, alpha in enumerate(agreement[:-1], 1):
        cost = costs.step(early_exit(c.n_layers, exit_layer))
        table.append(expected_speedup(alpha, best_gamma(alpha, cost), cost))
    return table


# --- a run


def shape(a, tokenizer):
    """The Config that the flags and the tokenizer ask for."""
    boundary, vocab = tokenizer.token_to_id(BOUNDARY), tokenizer.get_vocab()
    fields = dict(vocab_size=max(vocab.values()) + 1, dim=a.dim, n_layers=a.layers, n_heads=a.heads,
                  n_kv_heads=a.kv_heads, head_dim=a.head_dim, hidden_dim=a.hidden, max_len=a.context,
                  tied=True, bos=boundary, eos=(boundary,))
    if a.family == "gemma2":
        fields |= dict(norm_eps=1e-6, act="gelu", norm_offset=1.0, embed_scale=a.dim**0.5, post_norm=True,
                       query_scale=a.head_dim**-0.5, attn_softcap=50.0, final_softcap=30.0, window=a.window)
    return Config(**fields)


def first_model(a, tokenizer, device):
    """What a run begins with, in float32: the model of --start, or one of the shape that the flags ask for,
    with fresh weights."""
    if not a.start:
        model = Transformer(shape(a, tokenizer)).float()
        fill(model, model.c, a.seed)
        return model.to(device)
    return long_enough(a, a.start, device)[0].requires_grad_(True)


def find_teacher(a, tokenizer, device):
    """The model of --teacher in float32, or None. It has to give the tokens the same numbers."""
    if not a.teacher:
        return None
    model, its_own = long_enough(a, a.teacher, device)
    if its_own.get_vocab() != tokenizer.get_vocab():
        raise ValueError(f"the teacher {a.teacher} has another tokenizer: take it with --tokenizer, or leave "
                         "--teacher out")
    return model


def long_enough(a, folder, device):
    """(model, tokenizer) of a folder, in float32. Raises ValueError if its context is below --context."""
    model, tokenizer = checkpoint.load(folder, device, torch.float32)
    if a.context > model.c.max_len:
        raise ValueError(f"--context {a.context} exceeds the context of {folder}: {model.c.max_len}")
    return model, tokenizer


class Run:
    """A model, its optimisers and what was done so far; one file, the checkpoint, holds all of it."""

    def __init__(self, a, text, device):
        self.a, self.text, self.device = a, text, device
        self.model = self.trained = first_model(a, text.tokenizer, device)
        self.teacher = find_teacher(a, text.tokenizer, device)
        matrices = [p for p in self.model.blocks.parameters() if p.dim() == 2]
        chosen = set(map(id, matrices))
        rest = [p for p in self.model.parameters() if id(p) not in chosen]
        self.optimisers = [torch.optim.Muon(matrices, lr=a.muon_lr, weight_decay=0.0),
                           torch.optim.AdamW(rest, lr=a.lr, betas=(0.9, 0.95), weight_decay=0.0)]
        self.rates = [a.muon_lr, a.lr]
        self.start()

    def start(self):
        """Nothing is done yet."""
        a = self.a
        self.steps = max(1, round(a.tokens / (a.batch * a.context)))
        self.step, self.seconds, self.losses, self.evals = 0, 0.0, [], []
        settings = {k: v for k, v in vars(a).items() if k not in MAY_CHANGE}
        folders = {name: value and Path(value).name for name, value in settings.items()
                   if name in ("start", "teacher")}
        self.settings = settings | folders | {"data": [Path(f).name for f in a.data],
                                              "text": self.text.hash()}

    def progress(self):
        """From 0 to 1, by steps or by the clock, whichever is ahead."""
        clock = self.seconds / (60 * self.a.minutes) if self.a.minutes else 0.0
        return min(1.0, max(self.step / self.steps, clock))

    def precision(self):
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.a.dtype == "bfloat16")

    def train_step(self):
        a, progress = self.a, self.progress()
        g = torch.Generator().manual_seed(a.seed * 1_000_003 + self.step + 2**40)
        kept, exit_layer, weight, distil = choose(a, self.model.c.n_layers, progress, g)
        batch = self.text.batch(a.seed, self.step, a.batch, a.context).to(self.device)
        with self.precision():
            final, exit_loss = losses(self.model, batch, kept, exit_layer if weight else None, distil,
                                      self.teacher, a.taught)
        self.update(final if exit_loss is None else final + weight * exit_loss, progress)
        self.losses.append([final.item(), None if exit_loss is None else exit_loss.item(), exit_layer])

    def update(self, loss, progress):
        """One step of the optimisers down the gradient of the loss."""
        a = self.a
        scale = min(1.0, (self.step + 1) / max(1, a.warmup), max(0.02, (1 - progress) / max(a.decay, 1e-9)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained.parameters(), a.clip)
        for optimiser, rate in zip(self.optimisers, self.rates, strict=True):
            optimiser.param_groups[0]["lr"] = rate * scale
            optimiser.step()
            optimiser.zero_grad()
        self.step += 1

    def measure(self):
        with self.precision():
            files = {name: evaluate(self.model, s, self.a.context, 8192)
                     for name, s in self.text.valid.items()}
        self.evals.append({"tokens": self.step * self.a.batch * self.a.context, "files": files})

    def lines(self):
        """What is printed of the last measurement: of each file all exits; and a sample."""
        for name, table in self.evals[-1]["files"].items():
            loss, agreement = (" ".join(f"{v:.2f}" for v in table[key]) for key in ("loss", "agreement"))
            yield f"{name}: loss by exit {loss}; agreement {agreement}"
        yield sample(self)

    # --- the checkpoint: one safetensors file, replaced as a whole

    def tensors(self):
        yield from ((f"model.{name}", p.data) for name, p in self.trained.named_parameters())
        for i, optimiser in enumerate(self.optimisers):
            for j, state in optimiser.state_dict()["state"].items():
                yield from ((f"{i}.{j}.{key}", value) for key, value in state.items())

    def save(self):
        facts = {"step": self.step, "seconds": self.seconds, "losses": self.losses, "evals": self.evals,
                 "settings": self.settings, "tokenizer": self.text.tokenizer.to_str()}
        with replacing(Path(self.a.out) / STATE) as path:
            save_file(dict(self.tensors()), path, metadata={"run": json.dumps(facts)})

    def check(self, settings):
        """Raises ValueError where a run that was begun with other settings cannot be resumed with these."""
        wrong = next((k for k, v in self.settings.items() if settings.get(k) != v), None)
        if wrong:
            raise ValueError(f"{self.a.out} holds a run with another {wrong} ({settings.get(wrong)}, now "
                             f"{self.settings[wrong]}): repeat that, or name another --out")

    def restore(self, file, facts):
        self.step, self.seconds, self.losses, self.evals = (
            facts[k] for k in ("step", "seconds", "losses", "evals"))
        with torch.no_grad():
            for name, p in self.trained.named_parameters():
                p.copy_(file.get_tensor(f"model.{name}"))
        for i, optimiser in enumerate(self.optimisers):
            names = [key for key in file.keys() if key.startswith(f"{i}.")]
            state = optimiser.state_dict()
            for _, j, key in (name.split(".") for name in names):
                state["state"].setdefault(int(j), {})[key] = file.get_tensor(f"{i}.{j}.{key}")
            optimiser.load_state_dict(state)


def sample(run):
    """What the model writes after the prompt, greedily, on one line."""
    ids = checkpoint.encode(run.text.tokenizer, run.a.prompt, run.model.c.bos)
    (new,), _ = generate(run.model, [ids], min(60, run.model.c.max_len - len(ids)), eos=run.model.c.eos)
    return " ".join(run.text.tokenizer.decode(ids + new).split())


def between(c):
    """The ids between two documents for a model that has its own: the end of one, the begin of the next."""
    ids = list(dict.fromkeys([*c.eos[:1], *([] if c.bos is None else [c.bos])]))
    if not ids:
        raise ValueError("the model of --start names neither bos_token_id nor eos_token_id, so nothing can "
                         "separate the documents")
    return ids


def fresh_run(a, device, tokenizer, file):
    """A Run of which nothing is done. tokenizer: None trains one."""
    start = between(checkpoint.read_config(Path(a.start))) if a.start else None
    run = Run(a, corpus.read(a.data, a.valid, a.context, a.vocab, tokenizer, start), device)
    if len(checkpoint.encode(run.text.tokenizer, a.prompt, run.model.c.bos)) >= a.context:
        raise ValueError("--prompt fills the context")
    return run


def open_run(a, fresh=fresh_run):
    """A fresh Run, or with --resume the one that --out holds. It keeps the lock of --out. Raises ValueError
    where --out holds anything else, or where another process has the lock. fresh: makes a Run from the flags,
    the device, the tokenizer, and the open checkpoint, None where there is none yet."""
    out, device, facts, file = Path(a.out), checkpoint.find_device(a.device), None, None
    damaged = f"{out / STATE}: not a checkpoint of this program, or damaged"
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: --out names a folder")
    there = {p.name for p in out.iterdir()} if out.is_dir() else set()
    there -= {STATE + TEMPORARY, LOCK, *(p.name for p in out.glob(LITTER))}
    if STATE in there:
        if not a.resume:
            raise ValueError(f"{out} holds a run already: continue with --resume, or name another --out")
        held = lock(out)  # before its checkpoint is read
        with checkpoint.guarded(damaged):
            file = safe_open(out / STATE, framework="pt")
            facts = json.loads(file.metadata()["run"])
            tokenizer, settings = Tokenizer.from_str(facts["tokenizer"]), dict(facts["settings"])
    elif there:
        raise ValueError(f"{out} is not empty and holds no {STATE}: name another --out")
    if not facts:
        folder = a.start or a.tokenizer
        tokenizer = checkpoint.read_tokenizer(Path(folder)) if folder else None
    run = fresh(a, device, tokenizer, file)
    if facts:
        run.check(settings)
        with checkpoint.guarded(damaged):
            run.restore(file, facts)
    else:
        out.mkdir(parents=True, exist_ok=True)
        held = lock(out)
        run.measure()
        run.save()
    run.lock = held  # for as long as there is this run
    for litter in out.glob(LITTER):
        litter.unlink()
    return run


def train(run):
    """Take the steps that are left, and save a checkpoint every few minutes."""
    block, started, saved = run.a.batch * run.a.context, time.monotonic() - run.seconds, run.seconds
    keep_memory()
    pace = dict(mininterval=1 if sys.stderr.isatty() else 60)  # a file needs fewer lines than a terminal
    with tqdm(total=run.steps * block, initial=run.step * block, unit="tok", unit_scale=True, **pace) as bar:
        while run.progress() < 1:
            run.train_step()
            run.seconds = time.monotonic() - started
            final, exit_loss, exit_layer = run.losses[-1]
            if not math.isfinite(final):
                raise ValueError(f"the loss is {final} at step {run.step}: try a lower --lr and --muon-lr")
            exits = f", exit {exit_layer} {exit_loss:.2f}" if exit_loss else ""
            bar.set_postfix_str(f"loss {final:.2f}{exits}", refresh=False)
            bar.update(block)
            if run.seconds - saved > 60 * run.a.every:
                run.measure()
                bar.write("\n".join(run.lines()), file=sys.stderr)
                run.seconds = saved = time.monotonic() - started
                run.save()
    if run.evals[-1]["tokens"] != run.step * block:
        run.measure()
    run.save()


def keep_memory():
    """Tell glibc to keep the memory that tensors free. trap: else it returns large blocks to the system and
    asks for new ones, page by page, thousands of times a step, which takes longer than the arithmetic."""
    trim_threshold, mmap_max = -1, -4
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, -1)
    except (OSError, AttributeError):  # another system, another allocator
        pass


# --- what is written beside the model


def repeat(a):
    """The flags that repeat a run."""
    return card.command(vars(a), vars(parse(["--out", "x"])))


def finish(run):
    """Write the model in bfloat16, its picture and its card. Returns {file: table} of the model as written:
    in each table loss, agreement and speed-up of every exit."""
    out = Path(run.a.out)
    checkpoint.save(copy.deepcopy(run.model).bfloat16(), out, run.text.tokenizer)
    model, _ = checkpoint.load(out, run.device, torch.float32)
    tables = {name: evaluate(model, s, run.a.context, 32768) for name, s in run.text.valid.items()}
    for table in tables.values():
        table["speedup"] = speedups(model.c, table["agreement"])
    history = [{**e, "speedup": speedups(model.c, [statistics.mean(column) for column in zip(
        *(f["agreement"] for f in e["files"].values()), strict=True)])} for e in run.evals]
    with replacing(out / "training.png") as path:
        plots.training(run.losses, run.a.batch * run.a.context, history, tables, path)
    write_file(out / "README.md", card.card(run, tables, sample(run), repeat(run.a)))
    return tables


def twin(a):
    """Train two models that differ in the recipe only, and write their tables as JSON."""
    out, file = Path(a.out), Path(a.twin)
    if file.is_dir() or not file.parent.is_dir() and file.parent.resolve() != out.resolve():
        raise ValueError(f"{file}: --twin must name a file, in --out or in a folder that is there")
    changes = {"recipe": {}, "plain": {"dropout": 0.0, "exit_weight": 0.0}}
    runs = {name: open_run(argparse.Namespace(**{**vars(a), "out": str(out / name), "twin": None, **change}))
            for name, change in changes.items()}
    result = {"command": f"python -m lab.train {repeat(a)}"}
    for name, run in runs.items():
        train(run)
        result[name] = {"tokens": run.step * a.batch * a.context, "files": finish(run),
                        "parameters": sum(p.numel() for p in run.model.parameters())}
    write_file(file, json.dumps(result, indent=1) + "\n")


def run(argv):
    a = parse(argv)
    if a.twin:
        return twin(a)
    begun = open_run(a)
    train(begun)
    finish(begun)


def main(argv=None):
    return cli.main(run, argv)


if __name__ == "__main__":
    sys.exit(main())
