"""Where drafts come from: one table of the drafters that generate.py offers, and the flags for
them.

No drafter is implemented here. Each row of SOURCES reads flags and files and calls one class.
"""
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

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
from support import cli, own
from support.measure import kept_costs, measure_arms, measure_step, priced

ROOT = Path(__file__).resolve().parent.parent
MEASURED = 64e6     # bytes of a model's blocks from which on its costs are measured
# other kinds of heads
OF_THE_LAB = {"transfer": "lab/transfer.py:Transfer", "m2r2": "lab/m2r2.py:M2R2"}


class Plan(NamedTuple):
    """How a run drafts. make: () -> a new drafter, one for each run, because a rule learns from its
    text. note: the line that the run prints about it."""
    draft: str
    make: Callable
    gamma: int
    note: str


class Ask(NamedTuple):
    """What a run asks of a source."""
    a: object           # the flags
    kind: str           # a key of SOURCES
    model: object       # the target
    tokenizer: object
    gamma: int          # how many tokens to draft per round

    def limit(self):
        """What a drafter takes as its rule: gamma, or a new Rule of --rule."""
        return self.gamma if self.a.rule is None else own.rule(self.a.rule, self.gamma)

    def plan(self, make, where="", draft=None):
        """The Plan of a drafter. make(limit) -> Drafter; draft: its name, if that is not the
        kind."""
        draft = draft or self.kind
        note = f"draft: {draft}{where}, gamma {self.gamma}"
        if self.a.rule is not None:
            note += f", rule {self.a.rule}"
        return Plan(draft, lambda: make(self.limit()), self.gamma, note)

    def short(self, model):
        """A model, or with --draft-vocab a ShortHead around it."""
        if self.a.draft_vocab is None:
            return model
        return ShortHead(model, read_vocab(self.a.draft_vocab, model.c.vocab_size))


# --- the sources: each makes a Plan


def none(ask):
    return Plan("none", lambda: None, 0, "draft: none")


def ngram(ask):
    return ask.plan(lambda limit: NGram(limit, 3))


def suffix(ask):
    return ask.plan(Suffix)


def leave_early(ask):
    L = ask.model.c.n_layers
    E = ask.a.exit_layer
    if E is None:
        E = max(1, L // 6)
    return ask.plan(partial(SelfDraft, ask.short(ask.model), early_exit(L, E)), f" after block {E}")


def skip(ask):
    attn, mlp, found = cli.skip_set(ask.a.skip)
    sublayers = without(ask.model.c.n_layers, attn, mlp)
    chosen = ask.a.gamma is not None or ask.a.rule is not None
    if not chosen and found is not None:
        ask = ask._replace(gamma=found)
    plan = ask.plan(partial(SelfDraft, ask.short(ask.model), sublayers), f" {ask.a.skip}")
    if not chosen and found == 0:
        plan = plan._replace(note=f"{plan.note} because its search found no gain; --gamma G "
                                  "drafts anyway")
    return plan


def small_model(ask):
    quant = ask.a.draft_quant
    other = ask.short(load_small(ask.a.draft, ask.model, ask.tokenizer, quant))
    where = "" if quant is None else f" in {quant}"
    return ask.plan(partial(ModelDraft, fit(other, ask.model)), where)


def load_small(folder, model, tokenizer, quant=None):
    """The model in a folder as a draft for `model`, computed in the same way. quant: the kind of
    its matrices, if they are quantised."""
    other, own_tokenizer = checkpoint.load(folder, model.tok.device, model.tok.dtype)
    if own_tokenizer.get_vocab() != tokenizer.get_vocab():
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


def few_bits(ask):
    """The model itself in few bits, all of it or without some sub-layers."""
    model = ask.model
    L = model.c.n_layers
    sublayers = range(2 * L)
    if ask.a.skip is not None:
        sublayers = cli.read_skip(ask.a.skip, L)
    twin = quantise(model, ask.kind, head=ask.kind, rounds=True)
    return ask.plan(partial(SelfDraft, ask.short(model.alongside(twin)), sublayers))


def trained(ask):
    """Trained heads draft a chain or a tree."""
    a = ask.a
    kind = ask.kind
    model = ask.model
    folder = Path(a.draft) if kind == "heads" else Path(a.model) / "heads" / kind
    if not (folder / heads.FILE).is_file():
        raise FileNotFoundError(
            f"{folder}: no heads. Seconds make a first version, and more tokens a better one: "
            f"python -m lab.train_heads {kind} --model {a.model} --text 3e3 --tokens 6e3 --out "
            f"{folder}")
    head = heads.load(folder, model, kinds_of(folder))
    most = head.price.longest
    where = f" after block {head.price.trunk}" if head.price.trunk else ""
    gamma = a.gamma
    if gamma is None:
        gamma = min(most, MOST if a.tree or a.rule else 3)
    shape = None
    if a.tree and gamma > 0:
        head.drafter(gamma)     # refuses what a chain of this length is refused for
        levels = min(most, gamma)
        price = heads.pricing(head)(0)
        shape = best_tree(head.ranks, a.tree, price, 0.0, head.branches, levels) or [0]
        gamma = max(ancestors(torch.tensor([shape]))[0].sum(-1).tolist()) - 1
        where += f", trees of {len(shape)} tokens"
    ask = ask._replace(gamma=gamma)
    return ask.plan(lambda limit: head.drafter(limit, shape), where, draft=head.kind)


def kinds_of(folder):
    """The classes that may be in a folder of heads. The lab's are loaded only if one of them is."""
    kind = heads.facts(folder)["kind"]
    if kind not in OF_THE_LAB:
        return heads.KINDS
    return {kind: own.load(str(ROOT / OF_THE_LAB[kind]))}


def auto(ask):
    """A Pace with the usual candidates, and with what is named or lies beside the weights."""
    a = ask.a
    model = ask.model
    folder = Path(a.model)
    alone = parallel.place()[1] == 1
    skip = named_or_beside(a.skip, folder / "skip.json", cli.read_skip, model.c.n_layers)
    vocab = named_or_beside(
        a.draft_vocab, folder / "draft_vocab.json", read_vocab, model.c.vocab_size)
    found = []
    # heads fit only the weights that they lie beside; a skip set that is named takes their place
    if alone and not a.quant and a.skip is None:
        found = trained_beside(a.model, model)
    # trap: measured costs differ between machines and processes, and so would the uniforms a draft
    # spends
    large = size(model.blocks) >= MEASURED or model.tok.is_cuda     # a GPU waits for more than bytes
    measured = alone and (a.fast or a.temperature == 0) and large
    costs = kept_costs(model) if measured else byte_costs(model)
    said = "as measured here" if measured else "by weights"

    rough = None
    if measured and rows.multiplies(model):
        twin = model.alongside(quantise(model, "int4", head="int4", rounds=True))
        rough = twin, measure_step(model, twin)
    small = None
    if a.draft_model is not None:
        other = load_small(a.draft_model, model, ask.tokenizer, a.draft_quant)
        other = fit(other, model)
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

    return Plan("auto", make, ask.gamma, f"draft: auto, with costs {said}")


def named_or_beside(path, beside, read, size):
    """read(path, size); without a path, of the file beside the weights; None if there is none."""
    if path is not None:
        return read(path, size)
    return cli.read_beside(beside, read, size)


def trained_beside(folder, model):
    """The trained heads beside the weights, in heads/KIND. Those of another shape are left out."""
    files = (Path(folder) / "heads" / kind / heads.FILE for kind in heads.KINDS)
    found = [cli.read_beside(file, lambda file: heads.load(file.parent, model)) for file in files]
    return [head for head in found if head]


def from_a_file(ask):
    return ask.plan(partial(own.drafter, ask.a.draft, ask.model), draft=ask.a.draft)


# --- the table


class Source(NamedTuple):
    """A row of the table. make: Ask -> Plan; gamma: the default; flags: those that go with it."""
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
NAMED |= dict.fromkeys(KINDS, Source(few_bits, 3, ("skip", "draft_vocab", "rule")))
NAMED |= dict.fromkeys(heads.KINDS, Source(trained, 3, ("tree", "rule")))
SOURCES = NAMED | {     # what a path can name
    "model": Source(small_model, 3, ("draft_vocab", "draft_quant", "rule")),
    "heads": Source(trained, 3, ("tree", "rule")),
    "file": Source(from_a_file, 3, ("rule",)),
}
FLAGS = (       # which go with some sources only
    "exit_layer", "skip", "tree", "draft_vocab", "draft_model", "draft_quant", "rule")


def add_flags(group):
    add = group.add_argument
    add("--draft", metavar="HOW",
        help=f"{', '.join(NAMED)}; or a folder with a small model of the same tokenizer, or "
             "with trained heads; or your own, FILE.py:NAME, where NAME is (model, gamma) -> "
             "Drafter. auto (the default) chooses before every draft what promises most; "
             f"{' and '.join(KINDS)} draft with the model itself in few bits; from "
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
        help="store the matrices of the small model in few bits (--draft DIR or --draft-model)")


def kind_of(a):
    """The source that the flags choose, a key of SOURCES."""
    if a.draft is None:
        if a.exit_layer is not None:
            return "exit"
        return "auto" if a.skip is None else "skip"
    if a.draft in NAMED:
        return a.draft
    if own.names_a_file(a.draft):
        return "file"
    for kind, file in (("heads", heads.FILE), ("model", "config.json")):
        if (Path(a.draft) / file).is_file():
            return kind
    raise ValueError(f"--draft {a.draft}: neither a folder with a small model or with trained "
                     f"heads, nor FILE.py:NAME, nor one of {', '.join(NAMED)}"
                     f"{download_first(a.draft)}")


def check(a):
    """Raises ValueError, in one line, for flags that do not go together."""
    kind = kind_of(a)
    for flag in FLAGS:
        if getattr(a, flag) is not None and flag not in SOURCES[kind].flags:
            raise ValueError(f"--{flag.replace('_', '-')} does not go with --draft {kind}; see "
                             "--help")
    if kind == "none" and a.gamma:
        raise ValueError("--gamma does not go with --draft none, which drafts nothing")
    if kind == "auto" and a.draft_quant is not None and a.draft_model is None:
        raise ValueError("--draft-quant quantises a small model: name one with --draft DIR, or "
                         "with --draft-model DIR")
    if kind == "skip" and a.skip is None:
        raise ValueError("--draft skip needs --skip with the sub-layers, such as a3,m4 or a file")
    if a.rule is not None and a.tree:
        raise ValueError("--rule says how far a chain goes on: leave out --rule or --tree")
    if a.rule is not None and not own.names_a_file(a.rule):
        raise ValueError(f"--rule must be FILE.py:NAME, got {a.rule!r}")
    for flag, least, most in (("gamma", 0, 1000), ("tree", 1, 128)):
        if getattr(a, flag) is not None and not least <= getattr(a, flag) <= most:
            raise ValueError(f"--{flag} must be from {least} to {most}, got {getattr(a, flag)}")


def check_processes(a):
    """Raises ValueError, in one line, for what goes with one process only."""
    if SOURCES[kind_of(a)].make is trained and parallel.place()[1] > 1:
        raise ValueError("trained heads read whole matrices of the model, and several processes "
                         "hold only parts of them: run one process, or choose another --draft")


def load_own(a):
    """Run the reader's own files, before a model is loaded: what is wrong there shows at once."""
    for text in (a.draft, a.rule):
        if text is not None and own.names_a_file(text):
            own.load(text)


def plan(a, model, tokenizer):
    """The Plan that the flags ask for."""
    kind = kind_of(a)
    gamma = a.gamma
    if gamma is None:
        gamma = SOURCES[kind].gamma if a.rule is None else MOST
    return SOURCES[kind].make(Ask(a, kind, model, tokenizer, gamma))
