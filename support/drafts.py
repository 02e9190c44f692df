"""Where drafts come from: the flags of generate.py about it, and the drafter that they choose.

Nothing of a drafter is here. Each function reads flags and files and calls one class.
"""
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

import checkpoint
from control import MOST, Costs
from layerskip import SelfDraft, ShortHead, early_exit
from machine import parallel
from machine.quant import KINDS, quantise
from machine.recorded import Recorded
from methods import heads
from methods.arms import candidates
from methods.pace import Pace
from methods.trees import best_tree
from speculative import ModelDraft, NGram, ancestors
from support import cli
from support.files import note
from support.measure import costs_of

NAMES = ("auto", "none", "ngram", "exit", "skip", *KINDS, *heads.KINDS)
GAMMA = {"auto": MOST, "none": 0, "ngram": 8, "exit": 2}    # if neither --gamma nor a file says; else 3
GOES_WITH = {"exit_layer": ("exit", *KINDS), "skip": ("skip", "auto", *KINDS),
             "draft_vocab": ("auto", "exit", "skip", "model", *KINDS), "tree": ("heads", *heads.KINDS)}


class Plan(NamedTuple):
    """How a run drafts. make: () -> a new drafter, one for each run, because a rule learns from its text."""
    draft: str                      # what --json calls it
    make: Callable
    gamma: int
    note: str                       # the line that the run prints about it
    exit_layer: int | None = None
    tree: int | None = None         # its nodes: fewer than --tree if it has no places for more
    costs: str = "weights"          # auto: where the costs come from, and the costs
    table: Costs | None = None


def add_flags(group):
    add = group.add_argument
    add("--draft", metavar="HOW", help=f"{', '.join(NAMES)}; or a folder with a small model of the same "
        "tokenizer, or with trained heads. auto (the default) chooses before every draft what promises most; "
        f"{' and '.join(KINDS)} draft with the model itself in few bits; from {next(iter(heads.KINDS))} on "
        "they are trained heads, read from heads/HOW in the model's folder")
    add("--exit-layer", type=int, metavar="E", help="exit, int8, nf4: draft with the first E blocks (exit: a "
        "sixth by default)")
    add("--skip", metavar="SET", help="skip, auto, int8, nf4: draft without some sub-layers: a3,m4 skips "
        'attention 3 and MLP 4; or a file with {"attn": [3], "mlp": [4], "gamma": 2}, as search.py writes it')
    add("--gamma", type=int, metavar="G",
        help="how many tokens to draft per round (auto: at most); levels of a tree")
    add("--tree", type=int, metavar="N", help="trained heads: draft a tree of N tokens")
    add("--draft-vocab", metavar="FILE", help="but for ngram and trained heads: draft with few tokens only, "
        "and so with a shorter output head, as search.py --draft-vocab writes it")


def kind_of(a):
    """The draft that the flags choose: one of NAMES, or "model" or "heads" for a folder."""
    if a.draft is None:
        # trap: with --fast auto would have passes of many shapes recorded
        return "exit" if a.exit_layer is not None else "skip" if a.skip else "exit" if a.fast else "auto"
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
    if a.exit_layer is not None and a.skip:
        raise ValueError("--exit-layer and --skip say twice which sub-layers draft: leave one of them out")
    if kind == "skip" and not a.skip:
        raise ValueError("--draft skip needs --skip with the sub-layers, such as a3,m4 or a file")
    if a.tree is not None and a.tree < 1:
        raise ValueError(f"--tree must be at least 1, got {a.tree}")


def plan(a, model, tokenizer):
    """The Plan that the flags ask for."""
    kind = kind_of(a)
    gamma = a.gamma if a.gamma is not None else GAMMA.get(kind, 3)
    if kind == "none":
        return Plan(kind, lambda: None, 0, "draft: none")
    if kind == "ngram":
        return Plan(kind, lambda: NGram(gamma, 3), gamma, f"draft: ngram, gamma {gamma}")
    if kind == "auto":
        return weighed(a, model, gamma)
    if kind in GOES_WITH["tree"]:
        return trained(a, model, kind)
    return part(a, model, tokenizer, kind)


def part(a, model, tokenizer, kind):
    """Some sub-layers of the model draft, or another model does."""
    L, E, sublayers, found, small, where = model.c.n_layers, a.exit_layer, None, None, None, ""
    if kind == "exit" and E is None:
        E = max(1, L // 6)
    if E is not None:
        sublayers, where = early_exit(L, E), f" after block {E}"
    if a.skip:
        sublayers, found = cli.read_skip(a.skip, L), cli.read_gamma(a.skip)
        where = f" {a.skip}" if kind == "skip" else f" without {a.skip}"
    if kind == "model":
        small = load_small(a.draft, model, tokenizer)
    elif kind in KINDS:
        small = quantise(model.model if a.fast else model, kind)
    small = Recorded(small) if small and a.fast else small
    drafting = small or model
    if a.draft_vocab:
        drafting = ShortHead(drafting, cli.read_vocab(a.draft_vocab, drafting.c.vocab_size))
    gamma = next(g for g in (a.gamma, found, GAMMA.get(kind, 3)) if g is not None)

    def make():
        return ModelDraft(drafting, gamma, sublayers) if small else SelfDraft(drafting, sublayers, gamma)

    note = f"draft: {kind}{where}, gamma {gamma}"
    if found == 0 and a.gamma is None:
        note += " because its search found no gain; --gamma G drafts all the same"
    return Plan(kind, make, gamma, note, E)


def load_small(folder, model, tokenizer):
    small, other = checkpoint.load(folder, model.tok.device, model.tok.dtype)
    if other.get_vocab() != tokenizer.get_vocab():
        raise ValueError(f"{folder}: its tokenizer differs from the target's: its ids mean other words")
    return small


def weighed(a, model, gamma):
    """auto: a Pace with the usual candidates, and with the skip set, the draft vocabulary and the trained
    heads that are named or that lie beside the weights."""
    c, alone = model.c, not a.fast and parallel.place()[1] == 1
    skip = (cli.read_skip(a.skip, c.n_layers) if a.skip else
            cli.read_beside(a.model, "skip", cli.read_skip, c.n_layers))
    vocab = (cli.read_vocab(a.draft_vocab, c.vocab_size) if a.draft_vocab else
             cli.read_beside(a.model, "draft_vocab", cli.read_vocab, c.vocab_size))
    # heads are for the very weights that lie there; and what has taps is not replayed from recordings
    found = trained_beside(a.model, model) if alone and not a.quant else []
    # trap: a measured table differs from machine to machine, and so does where the seed's uniforms are spent.
    # Parts of a pass are not recorded, and several processes would each measure their own
    how, table = costs_of(model, None if alone and a.temperature == 0 else "weights")
    note = f"draft: auto, with costs {'by weights' if how == 'weights' else 'as measured here'}"
    return Plan("auto", lambda: Pace(model, candidates(model, table, skip, vocab, found), table, most=gamma),
                gamma, note, costs=how, table=table)


def chosen(rounds, beliefs):
    """What --draft auto chose, and why, to follow its note. rounds: {name: rounds}; beliefs: {name: (how
    often its tokens are accepted, what one costs)}."""
    often = sorted(rounds.items(), key=lambda item: -item[1])
    line = ", ".join(f"{name} in {count} rounds" for name, count in often) or "no round"
    best = next((name.split(", then")[0] for name, _ in often if name != "nothing"), None)
    if best is None:
        return f"{line}: no draft promised a gain"
    alpha, price = beliefs[best]
    return f"{line}; of {best} {alpha:.0%} are accepted, and a token costs {price:.0%} of a pass"


# --- trained heads


def trained_beside(folder, model):
    """The trained heads that lie beside the weights, in heads/KIND. Those of another shape are left out."""
    found = []
    for path in (Path(folder) / "heads" / kind for kind in heads.KINDS):
        if (path / heads.FILE).is_file():
            try:
                found.append(heads.load(path, model))
            except ValueError as e:
                note("draft", f"left out, as {e}")
    return found


def trained(a, model, kind):
    """Trained heads draft a chain or a tree."""
    folder = Path(a.draft) if kind == "heads" else Path(a.model) / "heads" / kind
    if not (folder / heads.FILE).is_file():
        raise FileNotFoundError(f"{folder}: no heads: train them, python -m lab.train_heads {kind} "
                                f"--model {a.model} --out {folder}")
    head = heads.load(folder, model)
    most, shape, tree = head.step.most, None, ""
    gamma = a.gamma if a.gamma is not None else min(most, MOST if a.tree else 3)
    if a.tree:
        levels = max(1, min(most, gamma))
        shape = best_tree(head.ranks, a.tree, heads.pricing(head)(0), 0.0, head.branches, levels) or [0]
        gamma = max(ancestors(torch.tensor([shape]))[0].sum(-1).tolist()) - 1
        tree = f", trees of {len(shape)} tokens"
    E = head.step.trunk or None
    where = "" if E is None else f" after block {E}"
    return Plan(head.kind, lambda: head.drafter(gamma, shape), gamma,
                f"draft: {head.kind}{where}{tree}, gamma {gamma}", E, shape and len(shape))
