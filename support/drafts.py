"""Where drafts come from. One table lists the drafters that generate.py offers, with their flags.

No drafter is implemented here. Each row of SOURCES reads flags and files and calls one class.
"""
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

import checkpoint
from control import MOST
from drafter import Drafter, ModelDraft, NGram
from files import download_first
from layerskip import SelfDraft, early_exit, without
from machine import parallel, rows
from machine.quant import KINDS, byte_costs, quantise, size
from methods import heads
from methods.arms import candidates
from methods.pace import Pace
from methods.standin import Padded, ShortHead, read_vocab
from methods.suffix import Suffix
from methods.trees import ancestors, best_tree
from support import cli, own
from support.measure import kept_costs, measure_arms, measure_step, priced

ROOT = Path(__file__).resolve().parent.parent
MEASURED = 64e6     # bytes of a model's blocks from which on its costs are measured
OF_THE_LAB = {"transfer": "lab/transfer.py:Transfer", "m2r2": "lab/m2r2.py:M2R2"}


class Plan:
    """How a run drafts, as its options say. A row of SOURCES fills in how a drafter is built."""

    def __init__(self, options, model, tokenizer):
        self.options = options
        self.model = model      # the target
        self.tokenizer = tokenizer
        self.kind = source_of(options)
        self.draft = self.kind  # the name that the run prints
        self.where = ""         # what it prints after that
        self.parts = list       # () -> drafters that it may choose late, for a rehearsal to try
        self.gamma = options.gamma
        if self.gamma is None:
            self.gamma = SOURCES[self.kind].gamma if options.rule is None else MOST
        self.build = SOURCES[self.kind].builder(self)   # limit -> Drafter

    def make(self):
        """A new drafter. Every run needs one, because a rule learns from its text. Its limit is
        gamma, or a new Rule of --rule."""
        limit = self.gamma
        if self.options.rule is not None:
            limit = own.rule(self.options.rule, limit)
        return self.build(limit)

    @property
    def note(self):
        """The line that the run prints about it."""
        note = f"draft: {self.draft}{self.where}, gamma {self.gamma}"
        if self.options.rule is not None:
            note += f", rule {self.options.rule}"
        return note

    def short(self, model):
        """A model, or with --draft-vocab a ShortHead around it."""
        vocab = self.options.draft_vocab
        if vocab is None:
            return model
        return ShortHead(model, read_vocab(vocab, model.c.vocab_size))


# --- the sources, each of which takes a Plan and returns its `build`


def leave_early(plan):
    L = plan.model.c.n_layers
    E = plan.options.exit_layer
    if E is None:
        E = max(1, L // 6)
    plan.where = f" after block {E}"
    return partial(SelfDraft, plan.short(plan.model), early_exit(L, E))


def skip(plan):
    options = plan.options
    attn, mlp, found = cli.skip_set(options.skip)
    plan.where = f" {options.skip}"
    if options.gamma is None and options.rule is None and found is not None:
        plan.gamma = found
        if found == 0:
            plan.where += ", whose search found no gain (--gamma G drafts anyway)"
    return partial(SelfDraft, plan.short(plan.model), without(plan.model.c.n_layers, attn, mlp))


def other_model(plan):
    if plan.options.draft_quant is not None:
        plan.where = f" in {plan.options.draft_quant}"
    other = load_small(plan, plan.options.draft)
    return partial(ModelDraft, fit(plan.short(other), plan.model))


def load_small(plan, folder):
    """The model in a folder as a draft for the target, computed in the same way."""
    model = plan.model
    quant = plan.options.draft_quant
    other, tokenizer = checkpoint.load(folder, model.tok.device, model.tok.dtype)
    if tokenizer.get_vocab() != plan.tokenizer.get_vocab():
        raise ValueError(f"{folder}: its tokenizer differs from the target's, so ids mean other "
                         "words")
    if quant is not None:
        other = quantise(other, quant, head=quant, rounds=True)
    return model.alongside(other)


def fit(other, model):
    """A draft model, padded to the vocabulary of the target if that differs."""
    if other.c.vocab_size == model.c.vocab_size:
        return other
    return Padded(other, model.c.vocab_size)


def itself_quantised(plan):
    """A quantised copy of the model drafts with all of its sub-layers, or without some."""
    model = plan.model
    L = model.c.n_layers
    sublayers = range(2 * L)
    if plan.options.skip is not None:
        sublayers = cli.read_skip(plan.options.skip, L)
    if model.tok.is_cuda:
        plan.where = (", which saves memory but no time on a GPU, where each product rebuilds its "
                      "matrix")
    twin = quantise(model, plan.kind, head=plan.kind, rounds=True)
    return partial(SelfDraft, plan.short(model.alongside(twin)), sublayers)


def trained(plan):
    """Trained heads draft a chain or a tree."""
    options = plan.options
    folder = options.model / "heads" / plan.kind
    if plan.kind == "heads":
        folder = Path(options.draft)
    if not (folder / heads.FILE).is_file():
        raise FileNotFoundError(
            f"{folder}: no trained heads here. To train a first version in seconds, run: python -m "
            f"lab.train_heads {plan.kind} --model {options.model} --text 3e3 --tokens 6e3 --out "
            f"{folder} (more --tokens make a better one)")
    kinds = heads.KINDS
    kind = heads.facts(folder)["kind"]
    if kind in OF_THE_LAB:      # loaded only if it is asked for
        kinds = {kind: own.load_object(str(ROOT / OF_THE_LAB[kind]))}
    head = heads.load(folder, plan.model, kinds)
    longest = head.price.longest
    plan.draft = head.kind
    if head.price.trunk:
        plan.where = f" after block {head.price.trunk}"
    if options.gamma is None:
        plan.gamma = min(longest, MOST if options.tree else plan.gamma)
    shape = None
    if options.tree and plan.gamma > 0:
        head.drafter(plan.gamma)    # raises what a chain of this length would raise
        levels = min(longest, plan.gamma)
        price = heads.pricing(head)(0)
        shape = best_tree(head.ranks, options.tree, price, 0.0, head.branches, levels) or [0]
        plan.gamma = max(ancestors(torch.tensor([shape]))[0].sum(-1).tolist()) - 1
        plan.where += f", trees of {len(shape)} tokens"
    return lambda limit: head.drafter(limit, shape)


def auto(plan):
    """A Pace over the usual candidates, and over what is named or lies beside the weights."""
    options = plan.options
    model = plan.model
    folder = options.model
    alone = parallel.here()[1] == 1
    skip = named_or_beside(options.skip, folder / "skip.json", cli.read_skip, model.c.n_layers)
    vocab = named_or_beside(
        options.draft_vocab, folder / "draft_vocab.json", read_vocab, model.c.vocab_size)
    found = []
    # heads fit only the weights that they lie beside; a skip set that is named takes their place
    if alone and not options.quant and options.skip is None:
        found = trained_beside(folder, model)
    # trap: several processes would measure different costs, and so draft different tokens. With
    # other costs a draft also spends other random numbers, so the same seed writes another text
    large = size(model.blocks) >= MEASURED or model.tok.is_cuda  # a GPU waits not only for bytes
    measured = alone and large and (options.fast or options.temperature == 0)
    rough = None
    if measured:
        costs = kept_costs(model)
        plan.where = ", with costs as measured here"
        if rows.multiplies(model):
            twin = model.alongside(quantise(model, "int4", head="int4", rounds=True))
            rough = twin, measure_step(model, twin)
    else:
        costs = byte_costs(model)
        plan.where = ", with costs counted in bytes"
    small = None
    if options.draft_model is not None:
        other = fit(load_small(plan, options.draft_model), model)
        if measured:
            c = measure_step(model, other)
        else:
            c = byte_costs(other).whole / byte_costs(model).whole
        small = other, c

    def arms():
        return candidates(model, costs, skip, vocab, found, rough, small)

    table = {}
    if measured and model.tok.is_cuda:      # there a step is not the sum of its parts
        table = measure_arms(model, arms(), costs)

    def build(most):
        known = arms()
        if table:
            known = [priced(arm, table[arm.name]) for arm in known]
        return Pace(model, known, costs, most)

    plan.parts = lambda: [arm.alone(min(2, arm.longest)) for arm in arms()]
    return build


def named_or_beside(path, beside, read, size):
    """read(path, size), by default of the file beside the weights, or None if there is none."""
    if path is not None:
        return read(path, size)
    return cli.read_beside(beside, read, size)


def trained_beside(folder, model):
    """The trained heads beside the weights, in heads/KIND. Heads of another shape are left out."""
    files = (Path(folder) / "heads" / kind / heads.FILE for kind in heads.KINDS)
    found = [cli.read_beside(file, lambda file: heads.load(file.parent, model)) for file in files]
    return [head for head in found if head]


def from_a_file(plan):
    plan.draft = plan.options.draft
    return partial(own.drafter, plan.draft, plan.model)


# --- the table


class Source(NamedTuple):
    """A row of the table. builder(Plan) returns its `build`, `gamma` is the default, and `flags`
    are the ones that go with it."""
    builder: Callable
    gamma: int
    flags: tuple = ()


NAMED = {
    "auto": Source(auto, MOST, ("skip", "draft_vocab", "draft_model", "draft_quant")),
    "none": Source(lambda plan: Drafter, 0),
    "ngram": Source(lambda plan: partial(NGram, n=3), 7, ("rule",)),
    "suffix": Source(lambda plan: Suffix, 7, ("rule",)),
    "exit": Source(leave_early, 2, ("exit_layer", "draft_vocab", "rule")),
    "skip": Source(skip, 3, ("skip", "draft_vocab", "rule")),
}
NAMED |= dict.fromkeys(KINDS, Source(itself_quantised, 3, ("skip", "draft_vocab", "rule")))
NAMED |= dict.fromkeys(heads.KINDS, Source(trained, 3, ("tree", "rule")))
SOURCES = NAMED | {     # what a path can name
    "model": Source(other_model, 3, ("draft_vocab", "draft_quant", "rule")),
    "heads": Source(trained, 3, ("tree", "rule")),
    "file": Source(from_a_file, 3, ("rule",)),
}
RANGES = {"gamma": (0, 1000), "tree": (1, 128)}


def add_flags(group):
    add = group.add_argument
    add("--draft", metavar="HOW",
        help=f"{', '.join(NAMED)}; or a folder with a small model of the same tokenizer, or "
             "with trained heads; or your own, FILE.py:NAME, where NAME is (model, gamma) -> "
             "Drafter. auto (the default) chooses before every draft what promises most; "
             f"{' and '.join(KINDS)} draft with the model itself, quantised; from "
             f"{next(iter(heads.KINDS))} on the names are trained heads, read from heads/HOW "
             "in the model's folder")
    add("--exit-layer", type=int, metavar="E",
        help="draft with the first E blocks (default: a sixth)")
    add("--skip", metavar="SET",
        help="skip, auto: draft without some sub-layers: a3,m4 skips attention 3 and MLP 4; or "
             'a file with {"attn": [3], "mlp": [4], "gamma": 2}, as search.py writes it')
    add("--gamma", type=int, metavar="G",
        help="how many tokens to draft per round (auto, --rule: at most); levels of a tree")
    add("--rule", metavar="FILE.py:NAME",
        help="your own rule for how far to draft, NAME: (gamma) -> Rule; lab/rules.py has the "
             "published ones")
    add("--tree", type=int, metavar="N", help="trained heads: draft a tree of N tokens")
    add("--draft-vocab", metavar="FILE",
        help="draft with few tokens and a shorter output head (not for lookup and trained "
             "heads), as search.py --draft-vocab writes it")
    add("--draft-model", metavar="DIR",
        help="auto: choose among the usual drafts and this small model, which needs the same "
             "tokenizer")
    add("--draft-quant", choices=KINDS,
        help="quantise the matrices of the small model (--draft DIR or --draft-model)")


def source_of(options):
    """The source that the flags choose, a key of SOURCES."""
    draft = options.draft
    if draft is None:
        if options.exit_layer is not None:
            return "exit"
        return "auto" if options.skip is None else "skip"
    if draft in NAMED:
        return draft
    if own.names_a_file(draft):
        return "file"
    for kind, file in (("heads", heads.FILE), ("model", "config.json")):
        if (Path(draft) / file).is_file():
            return kind
    raise ValueError(f"--draft {draft}: neither a folder with a small model or with trained heads, "
                     f"nor FILE.py:NAME, nor one of {', '.join(NAMED)}{download_first(draft)}")


def check_flags(options):
    """Raises ValueError for flags that do not go together."""
    kind = source_of(options)
    given = {flag: value for flag, value in vars(options).items() if value is not None}
    others = {flag for source in SOURCES.values() for flag in source.flags}
    for flag in given:
        if flag in others.difference(SOURCES[kind].flags):
            raise ValueError(f"--{flag.replace('_', '-')} does not go with --draft {kind}; see "
                             "--help")
    if kind == "none" and options.gamma:
        raise ValueError("--gamma does not go with --draft none, which drafts nothing")
    if kind == "auto" and options.draft_quant is not None and options.draft_model is None:
        raise ValueError("--draft-quant quantises a small model: name one with --draft DIR, or "
                         "with --draft-model DIR")
    if kind == "skip" and options.skip is None:
        raise ValueError("--draft skip needs --skip with the sub-layers, such as a3,m4 or a file")
    if options.rule is not None and not own.names_a_file(options.rule):
        raise ValueError(f"--rule must be FILE.py:NAME, got {options.rule!r}")
    for flag, (least, largest) in RANGES.items():
        if flag in given and not least <= given[flag] <= largest:
            raise ValueError(f"--{flag} must be from {least} to {largest}, got {given[flag]}")


def check_before_loading(options):
    """Raises ValueError for what would fail only after the model was loaded. The reader's own files
    are run, so that mistakes in them show at once."""
    alone = parallel.here()[1] == 1
    if SOURCES[source_of(options)].builder is trained and not alone:
        raise ValueError("trained heads read whole matrices of the model, and several processes "
                         "hold only parts of them: run one process, or choose another --draft")
    for text in filter(own.names_a_file, (options.draft, options.rule)):
        if not alone:
            raise ValueError(f"several processes might each draft something else with {text}: run "
                             "one process, or choose another --draft")
        own.load_object(text)
