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
from pathlib import Path

import torch

from drafter import Draft, Drafter, Reuse, Rule, Wrapper
from methods.trees import Tree

WATCHED = 8     # rounds in which the cache is compared, which reads all of it twice


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


# --- what stands in for the reader's objects


class CheckedDrafter(Wrapper):
    """Around a reader's drafter, NAME(model, gamma), where gamma is a number or the Rule of --rule.
    It reports what is wrong with a draft, before the loop fails later and far from the cause. It
    cannot see whether q is what the tokens were drawn from."""

    def __init__(self, text, model, gamma):
        found = made(text, Drafter, model, gamma)
        where = line_of(text, type(found))
        if not isinstance(vars(found).get("rule"), Rule):
            raise ValueError(f"{where}: the drafter has no rule: call super().__init__(gamma) in "
                             "its __init__")
        last = 2 * model.c.n_layers - 1
        taps = found.taps
        if not isinstance(taps, tuple | list) or not all(tap in range(last + 1) for tap in taps):
            raise ValueError(f"{where}: taps must be a tuple of sub-layers from 0 to {last}, "
                             f"not {taps!r}")
        super().__init__(found)
        self.text = text
        self.rounds = 0

    @contextmanager
    def reading(self, method, state):
        """Blame this method for any error, and for a change of the text or the loop's state."""
        things = method, type(self.drafters[0])
        with blamed(self.text, *things):
            before = self.read_only(state)
            yield
            after = self.read_only(state)
        for name in before:
            if before[name] != after[name]:
                raise ValueError(f"{line_of(self.text, *things)}: {method.__name__} changes "
                                 f"{name}, which a drafter may only read")

    def read_only(self, state):
        """{name: a copy of what a drafter may not change}"""
        facts = {
            "state.known": [list(text) for text in state.known],
            "state.left": list(state.left),
            "state.n": state.n.tolist(),
            "state.tokens": state.tokens.tolist()}
        if self.rounds <= WATCHED:
            for name, kept in (("keys", state.cache.k), ("values", state.cache.v)):
                rows = [kept[:, b, :, : n - 1] for b, n in enumerate(state.lengths)]
                raw = [row.contiguous().view(torch.uint8).cpu().numpy().tobytes() for row in rows]
                facts[f"the {name} of the text in state.cache"] = raw
        return facts

    def begin(self, state, trace):
        self.rounds = 0
        with self.reading(self.drafters[0].begin, state):
            super().begin(state, trace)

    def propose(self, state):
        method = self.drafters[0].propose
        with self.reading(method, state):
            draft = method(state)
            wrong = fault(draft, state)
        if wrong:
            raise ValueError(f"{line_of(self.text, method, type(self.drafters[0]))}: {wrong}")
        return draft

    def observe(self, state, r):
        self.rounds += 1
        with self.reading(self.drafters[0].observe, state):
            super().observe(state, r)


class CheckedRule(Rule):
    """Around a reader's rule, NAME(gamma). It reports what is wrong with what the rule returns."""

    def __init__(self, text, gamma):
        self.text = text
        self.inner = made(text, Rule, gamma)
        if not isinstance(vars(self.inner).get("longest"), int):
            raise ValueError(f"{line_of(text, type(self.inner))}: the rule has no whole number "
                             "`longest`: call super().__init__(gamma) in its __init__")

    @property
    def longest(self):
        return self.inner.longest

    @property
    def stop(self):
        return self.inner.stop and self.stops

    def call(self, method, *args):
        with blamed(self.text, method, type(self.inner)):
            return method(*args)

    def wrong(self, method, what):
        return ValueError(f"{line_of(self.text, method, type(self.inner))}: {what}")

    def begin(self, state):
        self.call(self.inner.begin, state)

    def how_far(self, state):
        gammas = self.call(self.inner.how_far, state)
        B = len(state.known)
        numbers = gammas if isinstance(gammas, list) else [gammas] * B
        if len(numbers) != B or not all(isinstance(gamma, int) for gamma in numbers):
            raise self.wrong(self.inner.how_far, "how_far must return a whole number, or a list of "
                             f"one for each row (B = {B}), not {gammas!r}")
        return gammas

    def stops(self, k, logits, token):
        stops = self.call(self.inner.stop, k, logits, token)
        B = len(token)
        if not isinstance(stops, list) or [type(stop) for stop in stops] != [bool] * B:
            raise self.wrong(self.inner.stop, "stop must return a list of True or False for each "
                             f"row (B = {B}), as `.tolist()` makes it, not {stops!r}")
        return stops

    def learn(self, state, r):
        self.call(self.inner.learn, state, r)


# --- what is wrong with a draft


def fault(draft, state):
    """What is wrong with a draft, in words; None if nothing is."""
    B = len(state.known)
    V = state.model.c.vocab_size
    if not isinstance(draft, Draft):
        return f"propose must return a Draft, not {in_words(draft)}"
    tokens = draft.tokens
    if not are_numbers(tokens, state, (B, None), V - 1):
        return (f"Draft.tokens must be (B, K) int64 ids from 0 to {V - 1} with B = {B}, as "
                f"`state.send` makes them of lists, not {in_words(tokens)}")
    K = tokens.shape[1]
    length = torch.full_like(state.n, K) if draft.length is None else draft.length
    if not are_numbers(length, state, (B,), K):
        return (f"Draft.length must be (B,) int64 numbers from 0 to K = {K} with B = {B}, not "
                f"{in_words(length)}")
    if draft.q is not None and (wrong := fault_of_q(draft.q, tokens, length, V)):
        return wrong
    if not isinstance(draft.reuse, Reuse | None):
        return f"Draft.reuse must be a Reuse, not {in_words(draft.reuse)}"
    if isinstance(draft, Tree):
        parents = draft.parents
        fine = any(are_numbers(parents, state, (n, K), K) for n in (1, B))
        if not fine or any(row[k] > k for row in parents.tolist() for k in range(K)):
            return "Tree.parents must be (B or 1, K) int64, with each parent before its child"
    return None


def fault_of_q(q, tokens, length, V):
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
