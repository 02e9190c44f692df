"""Published systems that have no name of their own in generate.py, each one argument away:

    python generate.py "Once upon a time" --draft lab/systems.py:swift
    python generate.py "Once upon a time" --draft exit --rule lab/systems.py:svip

A drafter is (model, gamma) -> Drafter, a rule (gamma) -> Rule, with the settings of its paper where they
fit models of any depth. docs/papers.md has the papers, and a command for each of them.
"""
from control import Confidence, DoNoHarm
from lab.clasp import CLaSp, KnapSpec
from lab.hamburger import BurgerDraft, Hamburger
from lab.rules import AdaptiveExit, AnnealedConfidence, Entropy, Gate, Schedule, Thompson
from lab.sparse import SparseDraft
from lab.swift import SWIFT
from layerskip import SelfDraft, early_exit
from methods.arms import Calibrated
from methods.dynamic import DEL
from methods.then import Then
from speculative import NGram

SIXTH = 1 / 6   # the share of the blocks that `--draft exit` drafts with


# --- drafters


def delexit(model, gamma):
    """DEL: the exit and the length that promise most."""
    return DEL(model, gamma=gamma)


def swift(model, gamma):
    """SWIFT: a skip set searched on the text itself."""
    return SWIFT(model, gamma=gamma)


def clasp(model, gamma):
    """CLaSp: the blocks without which the last token's states stay nearest."""
    return CLaSp(model, max(1, round(0.45 * model.c.n_layers)), gamma=gamma)


def knapspec(model, gamma):
    """KnapSpec: the sub-layers whose time is worth least."""
    return KnapSpec(model, gamma=gamma)


def sparse(model, gamma):
    """MagicDec's draft: the whole model, reading few keys."""
    return SparseDraft(model, gamma)


def cascade(model, gamma):
    """CAS-Spec's cascade: an exit drafts, and lookup goes on from there."""
    L = model.c.n_layers
    return Then(SelfDraft(model, early_exit(L, max(1, round(SIXTH * L))), gamma), NGram(7, 3))


def hamburger(model, gamma):
    """HAMburger, untrained and checked; `python -m lab.hamburger` trains one that writes unchecked."""
    return BurgerDraft(Hamburger(model, most=gamma + 1), confidence=0.4)


# --- rules


def adaptive_exit(gamma):
    """Draft & Verify: a confidence threshold that steers the acceptance."""
    return AdaptiveExit(gamma=gamma)


def second_exit(gamma):
    """Kangaroo: stop at a confidence below 0.6."""
    return Confidence(0.6, gamma)


def confidence(gamma):
    """transformers: stop at a confidence below 0.4."""
    return Confidence(0.4, gamma)


def svip(gamma):
    """SVIP: stop at a high entropy."""
    return Entropy(gamma=gamma)


def specbound(gamma):
    """SpecBound: confidence at a temperature for the exit after a sixth of the blocks."""
    return AnnealedConfidence(SIXTH, gamma=gamma)


def thompson(gamma):
    """EESD: go on by a draw from a Beta distribution."""
    return Thompson(gamma)


def fs(gamma):
    """DEL's baseline FS: one more token after a draft accepted whole, else one fewer; gamma first."""
    return Schedule(gamma)


def gate(gamma):
    """fast-llm-inference: draft only after a token that the target was sure of."""
    return Gate(gamma)


def expected_value(gamma):
    """Ours: stop where the next token's chance of being accepted falls below its price."""
    return Calibrated(gamma=gamma)


def do_no_harm(gamma):
    """Ours: never much slower than plain decoding."""
    return DoNoHarm(SIXTH, gamma)
