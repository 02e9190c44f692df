"""Where drafts come from, but for those of generate.py itself. Each function makes the Plan of a
source from the flags. No drafter is implemented here."""
from functools import partial
from pathlib import Path

import torch

import checkpoint
from control import MOST
from drafter import ModelDraft
from layerskip import SelfDraft, without
from machine.quant import draft_copy
from methods import heads
from methods.lookup import NGram, Suffix
from methods.standin import Padded
from methods.trees import ancestors, best_tree
from model import Refused
from support import own, skips
from support.flags import Plan

ROOT = Path(__file__).resolve().parent.parent
# some words, numbers and code, on which the heads of a copy are compared
TEXT = ("The sea is salty because rivers carry minerals from the rocks into it. Question: how many "
        "are 12 times 7? Answer: 84.\n\ndef add(a, b):\n    return a + b\n")
OF_THE_LAB = {"transfer": "lab/transfer.py:Transfer", "m2r2": "lab/m2r2.py:M2R2"}


def ngram(options, model, tokenizer):
    return Plan(options, partial(NGram, n=3), options.length(7))


def suffix(options, model, tokenizer):
    return Plan(options, Suffix, options.length(7))


def without_some(options, model, tokenizer):
    attn, mlp, gamma = skips.skip_set(options.skip)
    about = f" {options.skip}"
    if gamma == 0 and options.gamma is None:
        about += ", whose search found no gain (--gamma G drafts anyway)"
    build = partial(SelfDraft, options.short(model), without(model.c.n_layers, attn, mlp))
    return Plan(options, build, options.length(3 if gamma is None else gamma), about)


def small_model(options, model, tokenizer):
    about = ""
    if options.draft_quant is not None:
        about = f" in {options.draft_quant}"
    other = load_small(options, options.draft, model, tokenizer)
    build = partial(ModelDraft, padded(options.short(other), model))
    return Plan(options, build, options.length(3), about)


def load_small(options, folder, model, tokenizer):
    """The model in a folder as a draft for the target, computed in the same way."""
    other, words = checkpoint.load(folder, model.tok.device, model.tok.dtype)
    if words.get_vocab() != tokenizer.get_vocab():
        raise Refused(f"{folder}: its tokenizer differs from the target's, so ids mean other words")
    quant = options.draft_quant
    if quant is not None:
        other = copy_of(other, quant, tokenizer)
    return model.alongside(other)


def copy_of(model, kind, tokenizer):
    """A quantised copy that drafts."""
    return draft_copy(model, kind, checkpoint.encode(tokenizer, TEXT, model.c.bos))


def padded(other, model):
    """A draft model, padded to the vocabulary of the target if that differs."""
    if other.c.vocab_size == model.c.vocab_size:
        return other
    return Padded(other, model.c.vocab_size)


def itself_quantised(options, model, tokenizer):
    """A quantised copy of the model drafts with all of its sub-layers, or without some."""
    L = model.c.n_layers
    kind = options.source
    sublayers = range(2 * L)
    if options.skip is not None:
        sublayers = skips.read_skip(options.skip, L)
    about = ""
    if model.tok.is_cuda:
        about = ", which saves memory but no time on a GPU, where each product rebuilds its matrix"
    twin = model.alongside(copy_of(model, kind, tokenizer))
    build = partial(SelfDraft, options.short(twin), sublayers)
    return Plan(options, build, options.length(3), about)


def trained(options, model, tokenizer):
    """Trained heads draft a chain or a tree."""
    kind = options.source
    folder = Path(options.draft) if kind == "heads" else options.model / "heads" / kind
    if not (folder / heads.FILE).is_file():
        raise Refused(
            f"{folder}: no trained heads here. To train a first version in seconds, run: python -m "
            f"lab.train_heads {kind} --model {options.model} --text 3e3 --tokens 6e3 --out "
            f"{folder} (more --tokens make a better one)")
    kinds = heads.KINDS
    kind = heads.facts(folder)["kind"]
    if kind in OF_THE_LAB:      # loaded only if it is asked for
        kinds = {kind: own.load_object(str(ROOT / OF_THE_LAB[kind]))}
    head = heads.load(folder, model, kinds)
    longest = head.longest
    about = f" after block {len(head.trunk) // 2}" if head.trunk else ""
    gamma = min(longest, options.length(MOST if options.tree else 3))
    if options.gamma is not None:
        gamma = options.gamma
    if not options.tree or gamma == 0:
        return Plan(options, head.drafter, gamma, about, head.kind)
    head.drafter(gamma)     # raises what a chain of this length would raise
    cost = heads.drafting(head).start
    levels = min(longest, gamma)
    parents = best_tree(head.ranks, options.tree, cost, 0.0, head.branches, levels) or [0]
    levels = max(ancestors(torch.tensor([parents]))[0].sum(-1).tolist()) - 1
    about += f", trees of {len(parents)} tokens"
    return Plan(options, lambda limit: head.drafter(limit, parents), levels, about, head.kind)


def from_a_file(options, model, tokenizer):
    build = partial(own.drafter, options.draft, model)
    return Plan(options, build, options.length(3), name=options.draft)
