"""The reader's own drafter (`--draft FILE.py:NAME`) or rule (`--rule FILE.py:NAME`).

An error in that file shows its traceback, as always in Python. What would be silently wrong is
checked: drafts that the loop would take, though the text were then no longer the model's.
"""
import runpy
import sys
from functools import cache
from pathlib import Path

import torch

from drafter import Drafter, Rule
from methods.trees import Tree
from methods.wrapper import Wrapper
from model import Refused


@cache
def load_object(text):
    """The object NAME of FILE.py. Raises Refused if it is not there."""
    file, _, name = text.rpartition(":")
    if not Path(file).is_file():
        raise Refused(f"{file}: there is no such file")
    sys.path.append(str(Path(file).resolve().parent))   # its own imports, from the same folder
    found = runpy.run_path(file).get(name)
    if not callable(found):
        raise Refused(f"{file} has no class or function {name}")
    return found


def drafter(text, model, gamma):
    """The drafter NAME(model, gamma), with its drafts checked. gamma is a number or a Rule."""
    return Checked(text, made(text, Drafter, model, gamma))


def rule(text, gamma):
    """The rule NAME(gamma)."""
    return made(text, Rule, gamma)


def made(text, kind, *args):
    found = load_object(text)(*args)
    if not isinstance(found, kind):
        raise Refused(f"{text} returned a {type(found).__name__}: a {kind.__name__} is needed")
    return found


class Checked(Wrapper):
    """Stands in for a reader's drafter, and checks its drafts."""

    def __init__(self, text, found):
        super().__init__(found)
        self.text = text

    def propose(self, state):
        draft = super().propose(state)
        what = wrong(draft, state)
        if what:
            raise Refused(f"{self.text}: {what}")
        return draft


def wrong(draft, state):
    """What is wrong with a Draft, or with what its drafter did to the state; None if nothing is.
    Whether q is the very tensor that the tokens were drawn from cannot be seen."""
    for b, text in enumerate(state.known):
        if state.tokens[b, : len(text)].tolist() != text or int(state.n[b]) != len(text):
            return "it has changed state.tokens, state.n or state.known, which it may only read"
    V = state.model.c.vocab_size
    tokens = draft.tokens
    B, K = len(state.known), tokens.shape[1]
    if len(tokens) != B or tokens.dtype != torch.long or out_of(tokens, V - 1):
        return f"Draft.tokens must be (B, K) int64 ids from 0 to {V - 1}, with B = {B}"
    length = state.n.new_full((B,), K) if draft.length is None else draft.length
    if length.shape != (B,) or out_of(length, K):
        return f"Draft.length must be (B,) numbers from 0 to K = {K}, with B = {B}"
    if isinstance(draft, Tree):
        late = draft.parents > torch.arange(K, device=tokens.device)
        if out_of(draft.parents, K) or late.any():
            return "Tree.parents must be (B or 1, K), with each parent before its child"
    if draft.q is None:
        return None
    if draft.q.shape != (B, K, V):
        return f"Draft.q must be (B, K, V) = {(B, K, V)}, not {tuple(draft.q.shape)}"
    live = torch.arange(K, device=tokens.device) < length[:, None]
    rows = draft.q[live].double()                                               # (N, V)
    if (rows < 0).any() or ((rows.sum(-1) - 1).abs() > 0.01).any():
        return "Draft.q must hold distributions, as `state.probs(logits)` makes them of logits"
    if (rows.gather(1, tokens[live][:, None]) == 0).any():
        return "Draft.q is 0 for a drafted token, which cannot have been drawn from it"
    return None


def out_of(numbers, most):
    """Whether any of these is below 0 or above `most`."""
    return bool(((numbers < 0) | (numbers > most)).any())
