"""Where drafts come from: the flags of generate.py for it, and the drafter that they choose.

No drafter is implemented here. Each function reads flags and files and calls one class.
"""
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

import checkpoint
from control import MOST
from layerskip import SelfDraft, ShortHead, early_exit, without
from machine import parallel
from machine.packed import LARGE
from machine.quant import KINDS, byte_costs, quantise, size
from methods import heads
from methods.arms import candidates
from methods.pace import Pace
from methods.suffix import Suffix
from methods.trees import best_tree
from speculative import ModelDraft, NGram, ancestors
from support import cli
from support.measure import kept_costs

NAMES = ("auto", "none", "ngram", "suffix", "exit", "skip", *KINDS, *heads.KINDS)
GAMMA = {"auto": MOST, "none": 0, "ngram": 7, "suffix": 7, "exit": 2}  # the defaults; else 3
GOES_WITH = {"exit_layer": ("exit",), "skip": ("skip", "auto"),
             "draft_vocab": ("auto", "exit", "skip", "model", *KINDS), "tree": ("heads", *heads.KINDS)}


class Plan(NamedTuple):
    """How a run drafts. make: () -> a new drafter, one for each run, because a rule learns from its
    text. note: the line that the run prints about it."""
    draft: str
    make: Callable
    gamma: int
    note: str


def add_flags(group):
    add = group.add_argument
    add("--draft", metavar="HOW", help=f"{', '.join(NAMES)}; or a folder with a small model of the same "
        "tokenizer, or with trained heads. auto (the default) chooses before every draft what promises most; "
        f"{' and '.join(KINDS)} draft with the model itself in few bits; from {next(iter(heads.KINDS))} on "
        "the names are trained heads, read from heads/HOW in the model's folder")
    add("--exit-layer", type=int, metavar="E", help="draft with the first E blocks (default: a sixth)")
    add("--skip", metavar="SET", help="skip, auto: draft without some sub-layers: a3,m4 skips "
        'attention 3 and MLP 4; or a file with {"attn": [3], "mlp": [4], "gamma": 2}, as search.py writes it')
    add("--gamma", type=int, metavar="G",
        help="how many tokens to draft per round (auto: at most); levels of a tree")
    add("--tree", type=int, metavar="N", help="trained heads: draft a tree of N tokens")
    add("--draft-vocab", metavar="FILE", help="draft with few tokens and a shorter output head (not for "
        "lookup and trained heads), as search.py --draft-vocab writes it")


def kind_of(a):
    """The draft that the flags choose: one of NAMES, or "model" or "heads" for a folder."""
    if a.draft is None:
        return "exit" if a.exit_layer is not None else "auto" if a.skip is None else "skip"
    if a.draft in NAMES:
        return a.draft
    for kind, file in (("heads", heads.FILE), ("model", "config.json")):
        if (Path(a.draft) / file).is_file():
            return kind
    raise ValueError(f"--draft {a.draft}: neither a folder with a small model or with trained heads, nor one "
                     f"of {', '.join(NAMES)}")


def check(a):
    """Raises ValueError, in one line, for flags that do not go together."""
    kind = kind_of(a)
    for flag, kinds in GOES_WITH.items():
        if getattr(a, flag) is not None and kind not in kinds:
            raise ValueError(f"--{flag.replace('_', '-')} does not go with --draft {kind}; see --help")
    if kind == "skip" and a.skip is None:
        raise ValueError("--draft skip needs --skip with the sub-layers, such as a3,m4 or a file")
    for flag, least, most in (("gamma", 0, 1000), ("tree", 1, 128)):
        if getattr(a, flag) is not None and not least <= getattr(a, flag) <= most:
            raise ValueError(f"--{flag} must be from {least} to {most}, got {getattr(a, flag)}")


def plan(a, model, tokenizer):
    """The Plan that the flags ask for."""
    kind, L, why = kind_of(a), model.c.n_layers, ""
    gamma = a.gamma if a.gamma is not None else GAMMA.get(kind, 3)
    if kind == "none":
        return Plan(kind, lambda: None, 0, "draft: none")
    if kind in ("ngram", "suffix"):
        return Plan(kind, lambda: NGram(gamma, 3) if kind == "ngram" else Suffix(gamma), gamma,
                    f"draft: {kind}, gamma {gamma}")
    if kind == "auto":
        return weighed(a, model, gamma)
    if kind in GOES_WITH["tree"]:
        return trained(a, model, kind)
    if kind in ("exit", "skip"):
        drafting = short(a, model)
        if kind == "exit":
            E = max(1, L // 6) if a.exit_layer is None else a.exit_layer
            sublayers, where = early_exit(L, E), f"after block {E}"
        else:
            attn, mlp, found = cli.skip_set(a.skip)
            sublayers, where = without(L, attn, mlp), a.skip
            if a.gamma is None and found is not None:
                gamma = found
                why = " because its search found no gain; --gamma G drafts anyway" * (found == 0)
        return Plan(kind, lambda: SelfDraft(drafting, sublayers, gamma), gamma,
                    f"draft: {kind} {where}, gamma {gamma}{why}")
    if kind == "model":
        small, other = checkpoint.load(a.draft, model.tok.device, model.tok.dtype)
        if other.get_vocab() != tokenizer.get_vocab():
            raise ValueError(f"{a.draft}: its tokenizer differs from the target's, so ids mean other words")
    else:
        small = quantise(model.model if a.fast else model, kind)
    drafting = short(a, model.alongside(small) if a.fast else small)
    return Plan(kind, lambda: ModelDraft(drafting, gamma), gamma, f"draft: {kind}, gamma {gamma}")


def short(a, model):
    """The model, or with --draft-vocab a ShortHead around it."""
    ids = a.draft_vocab and cli.read_vocab(a.draft_vocab, model.c.vocab_size)
    return ShortHead(model, ids) if ids else model


def weighed(a, model, gamma):
    """auto: a Pace with the usual candidates, and with what is named or lies beside the weights."""
    c, alone, folder = model.c, parallel.place()[1] == 1, Path(a.model)
    skip = (cli.read_skip(a.skip, c.n_layers) if a.skip is not None else
            cli.read_beside(folder / "skip.json", cli.read_skip, c.n_layers))
    vocab = (cli.read_vocab(a.draft_vocab, c.vocab_size) if a.draft_vocab is not None else
             cli.read_beside(folder / "draft_vocab.json", cli.read_vocab, c.vocab_size))
    # heads fit only the weights that they lie beside; a skip set that is named is weighed in their place
    found = trained_beside(a.model, model) if alone and not a.quant and a.skip is None else []
    # trap: measured costs differ between machines and processes, and so would the uniforms a draft spends
    measured = alone and (a.fast or a.temperature == 0) and size(model.blocks) >= LARGE
    costs = kept_costs(model) if measured else byte_costs(model)
    return Plan("auto", lambda: Pace(model, candidates(model, costs, skip, vocab, found), costs, most=gamma),
                gamma, f"draft: auto, with costs {'as measured here' if measured else 'by weights'}")


# --- trained heads


def trained_beside(folder, model):
    """The trained heads beside the weights, in heads/KIND. Those of another shape are left out."""
    files = (Path(folder) / "heads" / kind / heads.FILE for kind in heads.KINDS)
    found = [cli.read_beside(file, lambda file: heads.load(file.parent, model)) for file in files]
    return [head for head in found if head]


def trained(a, model, kind):
    """Trained heads draft a chain or a tree."""
    folder = Path(a.draft) if kind == "heads" else Path(a.model) / "heads" / kind
    if not (folder / heads.FILE).is_file():
        raise FileNotFoundError(f"{folder}: no heads: train them, python -m lab.train_heads {kind} "
                                f"--model {a.model} --out {folder}")
    head = heads.load(folder, model)
    most, shape, where = head.step.most, None, f" after block {head.step.trunk}" if head.step.trunk else ""
    gamma = a.gamma if a.gamma is not None else min(most, MOST if a.tree else 3)
    if a.tree:
        levels = max(1, min(most, gamma))
        shape = best_tree(head.ranks, a.tree, heads.pricing(head)(0), 0.0, head.branches, levels) or [0]
        gamma = max(ancestors(torch.tensor([shape]))[0].sum(-1).tolist()) - 1
        where += f", trees of {len(shape)} tokens"
    return Plan(head.kind, lambda: head.drafter(gamma, shape), gamma,
                f"draft: {head.kind}{where}, gamma {gamma}")
