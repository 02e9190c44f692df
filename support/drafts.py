"""Where drafts come from. One table lists the drafters that generate.py offers, with their flags.

No drafter is implemented here. Each row of SOURCES reads flags and files and calls one class.
"""
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

import checkpoint
from control import MOST
from drafter import ModelDraft, NGram
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
from model import Transformer
from support import cli, own
from support.measure import kept_costs, measure_arms, measure_step, priced

ROOT = Path(__file__).resolve().parent.parent
MEASURED = 64e6     # bytes of a model's blocks from which on its costs are measured
# other kinds of heads
OF_THE_LAB = {"transfer": "lab/transfer.py:Transfer", "m2r2": "lab/m2r2.py:M2R2"}


class Plan(NamedTuple):
    """How a run drafts. make() returns a new drafter, one for each run, because a rule learns from
    its text. `note` is the line that the run prints about it. parts() returns drafters that it may
    choose late, so that a rehearsal has to try them all."""
    draft: str
    make: Callable
    gamma: int
    note: str
    parts: Callable = list


@dataclass(frozen=True)
class How:
    """The flags that say how to draft. A flag that is not given is None."""
    draft: str | None = None
    exit_layer: int | None = None
    skip: str | None = None
    gamma: int | None = None
    rule: str | None = None
    tree: int | None = None
    draft_vocab: str | None = None
    draft_model: str | None = None
    draft_quant: str | None = None


class Target(NamedTuple):
    """The model that checks the drafts, and what a source may want to know about it."""
    folder: Path
    model: Transformer
    tokenizer: Tokenizer
    quantised: bool = False
    may_measure: bool = True    # whether measured costs may decide how far to draft


class Ask(NamedTuple):
    """A request to a source, which is the flags, the target, the kind (a key of SOURCES) and
    gamma."""
    how: How
    target: Target
    kind: str
    gamma: int

    @property
    def model(self):
        return self.target.model

    def limit(self):
        """What a drafter takes as its rule, which is gamma, or a new Rule of --rule."""
        if self.how.rule is None:
            return self.gamma
        return own.rule(self.how.rule, self.gamma)

    def plan(self, make, where="", draft=None):
        """The Plan of a drafter. make(limit) returns the Drafter. `draft` is its name, if that is
        not the kind."""
        draft = draft or self.kind
        note = f"draft: {draft}{where}, gamma {self.gamma}"
        if self.how.rule is not None:
            note += f", rule {self.how.rule}"
        return Plan(draft, lambda: make(self.limit()), self.gamma, note)

    def short(self, model):
        """A model, or with --draft-vocab a ShortHead around it."""
        if self.how.draft_vocab is None:
            return model
        return ShortHead(model, read_vocab(self.how.draft_vocab, model.c.vocab_size))


# --- the sources, each of which makes a Plan


def none(ask):
    return Plan("none", lambda: None, 0, "draft: none")


def ngram(ask):
    return ask.plan(lambda limit: NGram(limit, 3))


def suffix(ask):
    return ask.plan(Suffix)


def leave_early(ask):
    L = ask.model.c.n_layers
    E = ask.how.exit_layer
    if E is None:
        E = max(1, L // 6)
    return ask.plan(partial(SelfDraft, ask.short(ask.model), early_exit(L, E)), f" after block {E}")


def skip(ask):
    how = ask.how
    attn, mlp, found = cli.skip_set(how.skip)
    sublayers = without(ask.model.c.n_layers, attn, mlp)
    chosen = how.gamma is not None or how.rule is not None
    if not chosen and found is not None:
        ask = ask._replace(gamma=found)
    plan = ask.plan(partial(SelfDraft, ask.short(ask.model), sublayers), f" {how.skip}")
    if not chosen and found == 0:
        plan = plan._replace(note=f"{plan.note} because its search found no gain; --gamma G "
                                  "drafts anyway")
    return plan


def other_model(ask):
    quant = ask.how.draft_quant
    other = ask.short(load_small(ask.how.draft, ask.target, quant))
    where = "" if quant is None else f" in {quant}"
    return ask.plan(partial(ModelDraft, fit(other, ask.model)), where)


def load_small(folder, target, quant=None):
    """The model in a folder as a draft for the target, computed in the same way. `quant` is the
    kind of its matrices, if they are quantised."""
    model = target.model
    other, own_tokenizer = checkpoint.load(folder, model.tok.device, model.tok.dtype)
    if own_tokenizer.get_vocab() != target.tokenizer.get_vocab():
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


def itself_quantised(ask):
    """A quantised copy of the model drafts with all of its sub-layers, or without some."""
    model = ask.model
    L = model.c.n_layers
    sublayers = range(2 * L)
    if ask.how.skip is not None:
        sublayers = cli.read_skip(ask.how.skip, L)
    twin = quantise(model, ask.kind, head=ask.kind, rounds=True)
    where = ""
    if model.tok.is_cuda:
        where = ", which saves memory but no time on a GPU, where each product rebuilds its matrix"
    return ask.plan(partial(SelfDraft, ask.short(model.alongside(twin)), sublayers), where)


def trained(ask):
    """Trained heads draft a chain or a tree."""
    how = ask.how
    kind = ask.kind
    folder = ask.target.folder / "heads" / kind
    if kind == "heads":
        folder = Path(how.draft)
    if not (folder / heads.FILE).is_file():
        raise FileNotFoundError(
            f"{folder}: no trained heads here. To train a first version in seconds, run: python -m "
            f"lab.train_heads {kind} --model {ask.target.folder} --text 3e3 --tokens 6e3 --out "
            f"{folder} (more --tokens make a better one)")
    head = heads.load(folder, ask.model, kinds_of(folder))
    longest = head.price.longest
    where = f" after block {head.price.trunk}" if head.price.trunk else ""
    gamma = how.gamma
    if gamma is None:
        gamma = min(longest, MOST if how.tree or how.rule else 3)
    shape = None
    if how.tree and gamma > 0:
        head.drafter(gamma)     # raises what a chain of this length would raise
        levels = min(longest, gamma)
        price = heads.pricing(head)(0)
        shape = best_tree(head.ranks, how.tree, price, 0.0, head.branches, levels) or [0]
        gamma = max(ancestors(torch.tensor([shape]))[0].sum(-1).tolist()) - 1
        where += f", trees of {len(shape)} tokens"
    ask = ask._replace(gamma=gamma)
    return ask.plan(lambda limit: head.drafter(limit, shape), where, draft=head.kind)


def kinds_of(folder):
    """The classes that may be in a folder of heads. The lab's are loaded only if one of them is."""
    kind = heads.facts(folder)["kind"]
    if kind not in OF_THE_LAB:
        return heads.KINDS
    return {kind: own.load_object(str(ROOT / OF_THE_LAB[kind]))}


def auto(ask):
    """A Pace over the usual candidates, and over what is named or lies beside the weights."""
    how = ask.how
    target = ask.target
    model = target.model
    folder = target.folder
    alone = parallel.here()[1] == 1
    skip = named_or_beside(how.skip, folder / "skip.json", cli.read_skip, model.c.n_layers)
    vocab = named_or_beside(
        how.draft_vocab, folder / "draft_vocab.json", read_vocab, model.c.vocab_size)
    found = []
    # heads fit only the weights that they lie beside; a skip set that is named takes their place
    if alone and not target.quantised and how.skip is None:
        found = trained_beside(folder, model)
    # trap: several processes would measure different costs, and so draft different tokens
    large = size(model.blocks) >= MEASURED or model.tok.is_cuda  # a GPU waits not only for bytes
    measured = alone and target.may_measure and large
    costs = kept_costs(model) if measured else byte_costs(model)
    rough = None
    if measured and rows.multiplies(model):
        twin = model.alongside(quantise(model, "int4", head="int4", rounds=True))
        rough = twin, measure_step(model, twin)
    small = None
    if how.draft_model is not None:
        other = fit(load_small(how.draft_model, target, how.draft_quant), model)
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

    def make():
        known = [priced(arm, table[arm.name]) if table else arm for arm in arms()]
        return Pace(model, known, costs, most=ask.gamma)

    said = "as measured here" if measured else "by weights"
    def parts():
        return [arm.alone(min(2, arm.longest)) for arm in arms()]

    return Plan("auto", make, ask.gamma, f"draft: auto, with costs {said}", parts)


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


def from_a_file(ask):
    return ask.plan(partial(own.drafter, ask.how.draft, ask.model), draft=ask.how.draft)


# --- the table


class Source(NamedTuple):
    """A row of the table. make(Ask) returns a Plan, `gamma` is the default, and `flags` are the
    ones that go with it."""
    make: Callable
    gamma: int
    flags: tuple = ()


NAMED = {
    "auto": Source(auto, MOST, ("skip", "draft_vocab", "draft_model", "draft_quant")),
    "none": Source(none, 0),
    "ngram": Source(ngram, 7, ("rule",)),
    "suffix": Source(suffix, 7, ("rule",)),
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
FLAGS = (       # which go with some sources only
    "exit_layer", "skip", "tree", "draft_vocab", "draft_model", "draft_quant", "rule")
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


def source_of(how):
    """The source that the flags choose, a key of SOURCES."""
    if how.draft is None:
        if how.exit_layer is not None:
            return "exit"
        return "auto" if how.skip is None else "skip"
    if how.draft in NAMED:
        return how.draft
    if own.names_a_file(how.draft):
        return "file"
    for kind, file in (("heads", heads.FILE), ("model", "config.json")):
        if (Path(how.draft) / file).is_file():
            return kind
    raise ValueError(f"--draft {how.draft}: neither a folder with a small model or with trained "
                     f"heads, nor FILE.py:NAME, nor one of {', '.join(NAMED)}"
                     f"{download_first(how.draft)}")


def check_flags(how):
    """Raises ValueError for flags that do not go together."""
    kind = source_of(how)
    given = {flag: value for flag, value in vars(how).items() if value is not None}
    for flag in FLAGS:
        if flag in given and flag not in SOURCES[kind].flags:
            raise ValueError(f"--{flag.replace('_', '-')} does not go with --draft {kind}; see "
                             "--help")
    if kind == "none" and how.gamma:
        raise ValueError("--gamma does not go with --draft none, which drafts nothing")
    if kind == "auto" and how.draft_quant is not None and how.draft_model is None:
        raise ValueError("--draft-quant quantises a small model: name one with --draft DIR, or "
                         "with --draft-model DIR")
    if kind == "skip" and how.skip is None:
        raise ValueError("--draft skip needs --skip with the sub-layers, such as a3,m4 or a file")
    if how.rule is not None and not own.names_a_file(how.rule):
        raise ValueError(f"--rule must be FILE.py:NAME, got {how.rule!r}")
    for flag, (least, largest) in RANGES.items():
        if flag in given and not least <= given[flag] <= largest:
            raise ValueError(f"--{flag} must be from {least} to {largest}, got {given[flag]}")


def check_processes(how):
    """Raises ValueError for what goes with one process only."""
    if SOURCES[source_of(how)].make is trained and parallel.here()[1] > 1:
        raise ValueError("trained heads read whole matrices of the model, and several processes "
                         "hold only parts of them: run one process, or choose another --draft")


def load_own(how):
    """Run the reader's own files before a model is loaded, so that mistakes in them show at
    once."""
    for text in (how.draft, how.rule):
        if text is not None and own.names_a_file(text):
            own.load_object(text)


def plan(how, target):
    """The Plan that the flags ask for."""
    kind = source_of(how)
    gamma = how.gamma
    if gamma is None:
        gamma = SOURCES[kind].gamma if how.rule is None else MOST
    return SOURCES[kind].make(Ask(how, target, kind, gamma))
