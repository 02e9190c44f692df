"""The reader's own drafter or rule: `--draft FILE.py:NAME`, `--rule FILE.py:NAME`.

What goes wrong in that file is one line that names its line, as for all other bad input.
"""
import importlib.util
import inspect
import sys
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from speculative import Draft, Drafter, Rule, Wrapper


def names_a_file(text):
    """Whether --draft or --rule names an object of a file: FILE.py:NAME."""
    return str(text).rpartition(":")[0].endswith(".py")


@cache
def load(text):
    """The object NAME of FILE.py. Raises ValueError or FileNotFoundError, in one line."""
    file, _, name = text.rpartition(":")
    path = Path(file).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"{file}: there is no such file")
    spec = importlib.util.spec_from_file_location(f"own_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module     # trap: a dataclass looks up the module that it stands in
    sys.path.append(str(path.parent))   # its own imports, from beside it
    with blamed(text):
        spec.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        kind = "is not callable" if hasattr(module, name) else "is not there"
        raise ValueError(f"{file}: {name} {kind}; a class or a function is needed")
    return getattr(module, name)


def drafter(text, model, gamma):
    """The drafter NAME(model, gamma). gamma: a number, or the Rule of --rule."""
    return Checked(made(text, Drafter, "(model, gamma)", model, gamma))


def rule(text, gamma):
    """The rule NAME(gamma)."""
    return made(text, Rule, "(gamma)", gamma)


def made(text, kind, takes, *args):
    """NAME(*args), which must be a `kind`. Raises ValueError, in one line."""
    build = load(text)
    try:
        inspect.signature(build).bind(*args)
    except TypeError as e:
        raise ValueError(f"{text} must take {takes}: {e}") from None
    found = build(*args)
    if not isinstance(found, kind):
        raise ValueError(f"{text} returned a {type(found).__name__}: a {kind.__name__} is needed")
    return found


@contextmanager
def blamed(*texts):
    """Within it, an exception that passes through one of the files named by `texts`, each
    FILE.py:NAME or anything else, becomes a ValueError that names file and line."""
    files = {str(Path(text.rpartition(":")[0]).resolve()) for text in texts if names_a_file(text)}
    try:
        yield
    except (Exception, SystemExit) as e:
        frames = inspect.getinnerframes(e.__traceback__)
        places = [(frame.filename, frame.lineno) for frame in frames]
        if isinstance(e, SyntaxError):      # the parser's line, where nothing ran
            places.append((str(e.filename), e.lineno))
        own = [(file, line) for file, line in places if file in files]
        if not own:
            raise
        file, line = own[-1]
        raise ValueError(f"{Path(file).name}, line {line}: {type(e).__name__}: {e}") from e


class Checked(Wrapper):
    """Around a reader's drafter: it says in one line what is wrong with a draft, where the loop
    would fail later, far from the cause. It cannot see whether q is what the tokens were drawn
    from."""

    def propose(self, state):
        draft = super().propose(state)
        if not isinstance(draft, Draft):
            raise ValueError(f"propose must return a Draft, not a {type(draft).__name__}")
        tokens = draft.tokens
        B = len(state.known)
        V = state.model.c.vocab_size
        if tokens.dtype != torch.long or tokens.dim() != 2 or len(tokens) != B:
            raise ValueError(f"Draft.tokens must be (B, K) int64 ids with B = {B}, not "
                             f"{tuple(tokens.shape)} {tokens.dtype}")
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < V:
            raise ValueError(f"Draft.tokens must be ids from 0 to {V - 1}")
        if draft.q is not None and draft.q.shape != (*tokens.shape, V):
            raise ValueError(f"Draft.q must be (B, K, V) = {(*tokens.shape, V)}, the distributions "
                             f"that the tokens were drawn from, not {tuple(draft.q.shape)}")
        return draft
