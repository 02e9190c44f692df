"""The trained heads: their kinds, what each costs, and how it is loaded from a file.

    kind        reads                            predicts                       its own weights
    Kangaroo    the state after block E          the next token                 an attention
    ExitBlock   the state after block E          the next token                 a block
    Eagle       the token, the final state       the next token                 a block, a matrix
                before it
    Medusa      the final state                  head k = 1, 2, ...: the        a matrix per head
                                                 token k places after the next
    Prophet     the final state, the next        the tokens after that, one     one block or two
                token and its own drafts         by one
    Jump        the token, the state in the      the next token                 a block or more,
                middle of the model before it                                   two matrices

All of them use the model's embedding, final norm and output head. A new kind is a file beside this
one and an entry in KINDS, which imports it when a head of this kind is loaded. Then `--draft` takes
a folder with it, and with an entry in SOURCES of generate.py it has a name there, too.
"""
import copy
import json
from importlib import import_module
from operator import attrgetter
from pathlib import Path

from safetensors import safe_open

from checkpoint import guarded
from methods.costs import Line, by_weights
from methods.standin import VOCAB, ShortHead, read_vocab
from model import Refused


def kind(module, name):
    """make(model, **shape), which makes a head of the kind in another file."""
    def make(model, /, **shape):
        return getattr(import_module(module), name)(model, **shape)

    return make


KINDS = {
    "kangaroo": kind("methods.kangaroo", "Kangaroo"),
    "exit_block": kind("methods.kangaroo", "ExitBlock"),
    "eagle": kind("methods.eagle", "Eagle"),
    "medusa": kind("methods.medusa", "Medusa"),
    "prophet": kind("methods.prophet", "Prophet"),
    "jump": kind("methods.jump", "Jump")}
FILE = "heads.safetensors"
FITS = attrgetter(     # of a model: its heads fit every other model of this shape
    "vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "post_norm")


def drafting(head, machine=None) -> Line:
    """What a drafted token of a head costs, by a Machine, or counting the weights read. Each of the
    head's own weights costs what a weight of the model's blocks or of its output head does,
    whichever is more."""
    c = head.model.c
    counted = by_weights(c)
    machine = machine or counted
    block = (machine.attention + machine.mlp) / (counted.attention + counted.mlp)
    rate = max(block, machine.head / counted.head) / counted.unit
    share = (head.own or head.model).share
    return machine.draft(head.trunk, share, rate * head.per_token(), head.reads)


def shorter(head, ids):
    """The head with a draft vocabulary (`methods.standin.ShortHead`), unless it has one."""
    if (head.own or head.model).share < 1:
        return head
    twin = copy.copy(head)
    if head.own:
        twin.own = ShortHead(head.own, ids)
    else:
        twin.model = ShortHead(head.model, ids)
    return twin


# --- files


def facts(folder):
    """The kind, the arguments ("shape"), the model and the ranks that the file of a head notes."""
    path = Path(folder) / FILE
    with guarded(f"{path}: no trained heads for this model"):
        noted = json.loads(safe_open(path, framework="pt").metadata()["heads"])
        if not isinstance(noted["kind"], str) or not isinstance(noted["shape"], dict):
            raise Refused("its kind or its shape makes no sense")
        return {key: noted[key] for key in ("kind", "shape", "model", "ranks")}


def load(folder, model, kinds=KINDS):
    """The head in a folder, on this model and in its dtype, with the draft vocabulary that it
    learnt, if one lies beside it. Its own blocks are computed in the same way as the model's.
    Raises ValueError for a file that is missing or damaged or was made for a model of another shape
    or vocabulary."""
    path = Path(folder) / FILE
    vocab = Path(folder) / VOCAB
    about = facts(folder)
    with guarded(f"{path}: no trained heads for this model"):
        file = safe_open(path, framework="pt")
        if about["model"] != list(FITS(model.c)):
            raise Refused("their model has another shape or vocabulary: train heads for this "
                          "one")
        if about["kind"] not in kinds:
            raise Refused(f"unknown kind {about['kind']!r}; known kinds are {', '.join(kinds)}")
        head = kinds[about["kind"]](model, **about["shape"])
        head.weights.load_state_dict({name: file.get_tensor(name) for name in file.keys()})
        head.ranks = [float(r) for r in about["ranks"]]
    if head.own:
        head.own = model.alongside(head.own)
    if vocab.is_file():
        head = shorter(head, read_vocab(vocab, model.c.vocab_size))
    return head
