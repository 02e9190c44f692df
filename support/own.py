"""The reader's own drafter (`--draft FILE.py:NAME`) or rule (`--rule FILE.py:NAME`).

Whatever goes wrong in that file becomes one line that names its line, as for all other bad input.
That includes wrong values that it returns and changes that it may not make. Of the `State`, a
drafter writes to nothing but the cache's slots after the text.
"""
import importlib.util
import inspect
import sys
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path

import torch

from drafter import Draft, Drafter, Reuse, Rule, Wrapper
from methods.trees import Tree
from speculative import State

WATCHED = 8     # calls of a method in which the cache is compared, which reads all of it twice


def names_a_file(text):
    """Whether --draft or --rule names an object of a file, as FILE.py:NAME does."""
    return str(text).rpartition(":")[0].endswith(".py")


@cache
def load_object(text):
    """The object NAME of FILE.py. Raises ValueError or FileNotFoundError."""
    file, _, name = text.rpartition(":")
    path = Path(file).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"{file}: there is no such file")
    spec = importlib.util.spec_from_file_location(f"own_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module     # trap: a dataclass looks up the module that it stands in
    sys.path.append(str(path.parent))   # its own imports, from the same folder
    with blamed(text):
        spec.loader.exec_module(module)
    there = vars(module)
    if not callable(there.get(name)):
        kind = "is not callable" if name in there else "is not there"
        raise ValueError(f"{file}: {name} {kind}; a class or a function is needed")
    return there[name]


def made(text, kind, *args):
    """NAME(*args), which must be a `kind`, or ValueError is raised."""
    build = load_object(text)
    with blamed(text, build):
        found = build(*args)
    if not isinstance(found, kind):
        raise ValueError(f"{text} returned a {type(found).__name__}: a {kind.__name__} is needed")
    return found


# --- the line to blame


@contextmanager
def blamed(text, *things):
    """Within it, an exception becomes a ValueError that names a line of FILE.py, if `text` is
    FILE.py:NAME. This is the last line of the file that the exception passed through. If it passed
    through none, it is the line that defines the first of `things`, unless the library worded the
    error itself."""
    try:
        yield
    except (Exception, SystemExit) as e:
        path = path_of(text)
        frames = inspect.getinnerframes(e.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == path]
        if isinstance(e, SyntaxError) and e.filename == path:   # where nothing ran
            lines.append(e.lineno)
        worded = isinstance(e, (ValueError, OSError, MemoryError, torch.OutOfMemoryError))
        if lines:
            place = f"{Path(path).name}, line {lines[-1]}"
        elif things and not worded:
            place = line_of(text, *things)
        else:
            raise
        raise ValueError(f"{place}: {type(e).__name__}: {e}") from e


def line_of(text, *things):
    """"FILE.py, line N", where the file begins to define the first of these functions and classes,
    or NAME, that it defines; FILE.py:NAME if it defines none of them."""
    path = path_of(text)
    for thing in (*things, load_object(text)):
        try:
            if str(Path(inspect.getsourcefile(thing)).resolve()) == path:
                return f"{Path(path).name}, line {inspect.getsourcelines(thing)[1]}"
        except (TypeError, OSError):    # no source, as for a `partial`
            pass
    return text


def path_of(text):
    return str(Path(str(text).rpartition(":")[0]).resolve())


# --- what is watched


def drafter(text, model, gamma):
    """The drafter NAME(model, gamma), where gamma is a number or a Rule. What is wrong with its
    drafts is reported before the loop fails later and far from the cause. Whether q is what the
    tokens were drawn from cannot be seen."""
    found = made(text, Drafter, model, gamma)
    where = line_of(text, type(found))
    if not isinstance(vars(found).get("rule"), Rule):
        raise ValueError(f"{where}: the drafter has no rule: call super().__init__(gamma) in its "
                         "__init__")
    last = 2 * model.c.n_layers - 1
    taps = found.taps
    if not isinstance(taps, tuple | list) or not all(tap in range(last + 1) for tap in taps):
        raise ValueError(f"{where}: taps must be a tuple of sub-layers from 0 to {last}, "
                         f"not {taps!r}")
    return WatchedDrafter(text, found)


def rule(text, gamma):
    """The rule NAME(gamma)."""
    found = made(text, Rule, gamma)
    if not isinstance(vars(found).get("longest"), int):
        raise ValueError(f"{line_of(text, type(found))}: the rule has no whole number `longest`: "
                         "call super().__init__(gamma) in its __init__")
    return WatchedRule(text, found)


class WatchedDrafter(Wrapper):
    """Stands in for a reader's drafter, and watches each call."""

    def __init__(self, text, found):
        super().__init__(found)
        self.begin = watched(text, found, found.begin)
        self.propose = watched(text, found, found.propose, wrong_draft)
        self.observe = watched(text, found, found.observe)


class WatchedRule(Rule):
    """Stands in for a reader's rule, and watches each call."""

    def __init__(self, text, found):
        self.text = text
        self.found = found
        self.begin = watched(text, found, found.begin)
        self.how_far = watched(text, found, found.how_far, wrong_length)
        self.learn = watched(text, found, found.learn)

    @property
    def longest(self):
        return self.found.longest

    @longest.setter
    def longest(self, longest):
        self.found.longest = longest

    @property
    def stop(self):
        stop = self.found.stop
        return stop and watched(self.text, self.found, stop, wrong_stop)


def watched(text, found, method, wrong=lambda result, *args: None):
    """What calls a method of the reader's object. Its own line is blamed for any error, for changes
    of the state, and for what wrong(result, *args) says."""
    things = method, type(found)
    calls = count()

    def call(*args):
        with_cache = next(calls) < WATCHED
        states = [arg for arg in args if isinstance(arg, State)]
        with blamed(text, *things):
            before = [read_only(state, with_cache) for state in states]
            result = method(*args)
            what = wrong(result, *args)
            after = [read_only(state, with_cache) for state in states]
        for facts, now in zip(before, after, strict=True):
            changed = [name for name in facts if facts[name] != now[name]]
            if changed:
                what = f"{method.__name__} changes {changed[0]}, which may only be read here"
        if what:
            raise ValueError(f"{line_of(text, *things)}: {what}")
        return result

    return call


def read_only(state, with_cache):
    """{name: a copy of what a drafter or rule may not change}"""
    facts = {
        "state.known": [list(text) for text in state.known],
        "state.left": list(state.left),
        "state.n": state.n.tolist(),
        "state.tokens": state.tokens.tolist()}
    if with_cache:
        for name, kept in (("keys", state.cache.k), ("values", state.cache.v)):
            rows = [kept[:, b, :, : n - 1] for b, n in enumerate(state.lengths)]
            raw = [row.contiguous().view(torch.uint8).cpu().numpy().tobytes() for row in rows]
            facts[f"the {name} of the text in state.cache"] = raw
    return facts


# --- what is wrong, in words; None if nothing is


def wrong_length(gammas, state):
    B = len(state.known)
    whole = isinstance(gammas, int)
    some = isinstance(gammas, list) and [isinstance(gamma, int) for gamma in gammas] == [True] * B
    if not whole and not some:
        return (f"how_far must return a whole number, or a list of one for each row (B = {B}), not "
                f"{gammas!r}")
    return None


def wrong_stop(stops, k, logits, token):
    B = len(token)
    if not isinstance(stops, list) or [type(stop) for stop in stops] != [bool] * B:
        return (f"stop must return a list of True or False for each row (B = {B}), as `.tolist()` "
                f"makes it, not {stops!r}")
    return None


def wrong_draft(draft, state):
    B = len(state.known)
    V = state.model.c.vocab_size
    if not isinstance(draft, Draft):
        return f"propose must return a Draft, not {in_words(draft)}"
    tokens = draft.tokens
    if not are_numbers(tokens, state, (B, None), V - 1):
        return (f"Draft.tokens must be (B, K) int64 ids from 0 to {V - 1} with B = {B}, as "
                f"`state.send` makes them of lists, not {in_words(tokens)}")
    K = tokens.shape[1]
    length = draft.length
    if length is None:
        length = torch.full_like(state.n, K)
    if not are_numbers(length, state, (B,), K):
        return (f"Draft.length must be (B,) int64 numbers from 0 to K = {K} with B = {B}, not "
                f"{in_words(length)}")
    if draft.q is not None and (what := wrong_q(draft.q, tokens, length, V)):
        return what
    if not isinstance(draft.reuse, Reuse | None):
        return f"Draft.reuse must be a Reuse, not {in_words(draft.reuse)}"
    if isinstance(draft, Tree):
        parents = draft.parents
        fine = any(are_numbers(parents, state, (n, K), K) for n in (1, B))
        if not fine or any(row[k] > k for row in parents.tolist() for k in range(K)):
            return "Tree.parents must be (B or 1, K) int64, with each parent before its child"
    return None


def wrong_q(q, tokens, length, V):
    """The same for its q (B, K, V), of which the places below `length` count."""
    shape = (*tokens.shape, V)
    if not is_tensor(q, tokens.device, shape) or not q.is_floating_point():
        return (f"Draft.q must be (B, K, V) = {shape}, the distributions that the tokens were "
                f"drawn from, not {in_words(q)}")
    live = torch.arange(shape[1], device=q.device) < length[:, None]
    if not live.any():
        return None
    rows = q[live].double()
    sums = rows.sum(-1)
    if not (rows >= 0).all() or not ((sums - 1).abs() < 0.01).all():
        return ("Draft.q must hold distributions, as `state.probs(logits)` makes them of logits: "
                f"its numbers run from {float(rows.min()):.3g}, and its rows sum to "
                f"{float(sums.min()):.3g} to {float(sums.max()):.3g}")
    if not (rows.gather(1, tokens[live][:, None]) > 0).all():
        return "Draft.q is 0 for a drafted token, which cannot have been drawn from it"
    return None


def are_numbers(value, state, shape, most):
    """Whether it is an int64 tensor of this shape (None: any size) with numbers from 0 to most."""
    if not is_tensor(value, state.tokens.device, shape) or value.dtype != torch.long:
        return False
    return not value.numel() or 0 <= int(value.min()) <= int(value.max()) <= most


def is_tensor(value, device, shape):
    if not isinstance(value, torch.Tensor) or value.device != device or value.dim() != len(shape):
        return False
    return all(want in (None, size) for want, size in zip(shape, value.shape, strict=True))


def in_words(value):
    """What a value is, in the words of a message."""
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.dtype} on {value.device}"
    return type(value).__name__
