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
from machine import parallel
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


def drafter(text, model, gamma):
    """The drafter NAME(model, gamma), where gamma is a number, or the Rule of --rule."""
    found = made(text, Drafter, "(model, gamma)", model, gamma)
    where = line_of(text, type(found), load_object(text))
    if not isinstance(vars(found).get("rule"), Rule):
        raise ValueError(f"{where}: the drafter has no rule: call super().__init__(gamma) in its "
                         "__init__")
    last = 2 * model.c.n_layers - 1
    taps = found.taps
    if not isinstance(taps, tuple | list) or not all(tap in range(last + 1) for tap in taps):
        raise ValueError(f"{where}: taps must be a tuple of sub-layers from 0 to {last}, "
                         f"not {taps!r}")
    return Checked(text, found)


def rule(text, gamma):
    """The rule NAME(gamma)."""
    found = made(text, Rule, "(gamma)", gamma)
    if not isinstance(vars(found).get("longest"), int):
        where = line_of(text, type(found), load_object(text))
        raise ValueError(f"{where}: the rule has no whole number "
                         "`longest`: call super().__init__(gamma) in its __init__")
    return CheckedRule(text, found)


def made(text, kind, takes, *args):
    """NAME(*args), which must be a `kind`, or ValueError is raised."""
    build = load_object(text)
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


def line_of(text, *things):
    """"FILE, line N", where the file begins to define the first of these functions and classes that
    it defines; FILE.py:NAME, which is `text`, if it defines none of them."""
    path = Path(text.rpartition(":")[0]).resolve()
    for thing in things:
        try:
            if Path(inspect.getsourcefile(thing)).resolve() == path:
                return f"{path.name}, line {inspect.getsourcelines(thing)[1]}"
        except (TypeError, OSError):    # no source, as for a `partial`
            pass
    return text


class Called:
    """A base for what stands in for the object that FILE.py:NAME made, and calls its methods."""

    def where(self, method):
        """The line to blame for what this method of the reader's object returned."""
        return line_of(self.text, method, type(self.inner), load_object(self.text))

    @contextmanager
    def calling(self, method):
        """Blame the file for any error. Only errors that the library words itself stay."""
        try:
            with blamed(self.text):
                yield
        except (ValueError, OSError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as e:
            raise ValueError(f"{self.where(method)}: {type(e).__name__}: {e}") from e


class Checked(Called, Wrapper):
    """Around a reader's drafter. It reports what is wrong with a draft, before the loop fails later
    and far from the cause. It cannot see whether q is what the tokens were drawn from."""

    def __init__(self, text, drafter):
        Wrapper.__init__(self, drafter)
        self.text = text
        self.inner = drafter
        self.rounds = 0

    @contextmanager
    def reading(self, method, state):
        """The same as `calling`. A method that changes the text or the loop's state is refused."""
        with self.calling(method):
            before = self.read_only(state)
            yield
            after = self.read_only(state)
            changed = [name for name in before if before[name] != after[name]]
        if changed:
            raise ValueError(f"{self.where(method)}: {method.__name__} changes {changed[0]}, which "
                             "a drafter may only read")

    def read_only(self, state):
        """{name: a copy of what a drafter may not change}"""
        known = [list(text) for text in state.known]
        rows = zip(state.tokens.tolist(), known, strict=True)
        facts = {
            "state.known": known,
            "state.left": list(state.left),
            "state.n": state.n.tolist(),
            "state.tokens": [row[: len(text)] for row, text in rows]}
        if self.rounds <= WATCHED:
            for name, kept in (("keys", state.cache.k), ("values", state.cache.v)):
                rows = [kept[:, b, :, : len(text) - 1] for b, text in enumerate(known)]
                raw = [row.contiguous().view(torch.uint8).cpu().numpy().tobytes() for row in rows]
                facts[f"the {name} of the text in state.cache"] = raw
        return facts

    def begin(self, state, trace):
        self.rounds = 0
        with self.reading(self.inner.begin, state):
            super().begin(state, trace)

    def propose(self, state):
        with self.reading(self.inner.propose, state):
            draft = super().propose(state)
            wrong = fault(draft, state)
        if wrong:
            raise ValueError(f"{self.where(self.inner.propose)}: {wrong}")
        return parallel.agreed_draft(draft)

    def observe(self, state, r):
        self.rounds += 1
        with self.reading(self.inner.observe, state):
            super().observe(state, r)


def fault(draft, state):
    """What is wrong with a draft, in words; None if nothing is."""
    B = len(state.known)
    V = state.model.c.vocab_size
    if not isinstance(draft, Draft):
        return f"propose must return a Draft, not {in_words(draft)}"
    tokens = draft.tokens
    if not is_tensor(tokens, state, torch.long) or tokens.dim() != 2 or len(tokens) != B:
        return (f"Draft.tokens must be (B, K) int64 ids with B = {B}, as `state.send` makes them "
                f"of lists, not {in_words(tokens)}")
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < V:
        return f"Draft.tokens must be ids from 0 to {V - 1}"
    K = tokens.shape[1]
    length = draft.length
    if length is None:
        length = torch.full_like(state.n, K)
    fine = is_tensor(length, state, torch.long) and length.shape == (B,)
    if not fine or not 0 <= int(length.min()) <= int(length.max()) <= K:
        return (f"Draft.length must be (B,) int64 numbers from 0 to K = {K} with B = {B}, not "
                f"{in_words(length)}")
    live = torch.arange(K, device=length.device) < length[:, None]
    if draft.q is not None and (wrong := fault_of_q(draft.q, tokens, live, V, state)):
        return wrong
    if not isinstance(draft.reuse, Reuse | None):
        return f"Draft.reuse must be a Reuse, not {in_words(draft.reuse)}"
    if isinstance(draft, Tree):
        parents = draft.parents
        fine = is_tensor(parents, state, torch.long) and parents.shape in ((1, K), (B, K))
        if not fine or any(not 0 <= row[k] <= k for row in parents.tolist() for k in range(K)):
            return "Tree.parents must be (B or 1, K) int64, with each parent before its child"
    return None


def fault_of_q(q, tokens, live, V, state):
    """The same for its q. live (B, K) marks the places that count."""
    shape = (*tokens.shape, V)
    if not is_tensor(q, state) or not q.is_floating_point() or q.shape != shape:
        return (f"Draft.q must be (B, K, V) = {shape}, the distributions that the tokens were "
                f"drawn from, not {in_words(q)}")
    if not live.any():
        return None
    rows = q[live].double()
    sums = rows.sum(-1)
    if not (rows >= 0).all() or not ((sums - 1).abs() < 0.01).all():
        return ("Draft.q must hold distributions, as `state.probs(logits)` makes them of logits: "
                f"its numbers run from {float(rows.min()):.3g}, and its rows sum to "
                f"{float(sums.min()):.3g} to {float(sums.max()):.3g}")
    if not (q.gather(2, tokens[..., None])[..., 0][live] > 0).all():
        return "Draft.q is 0 for a drafted token, which cannot have been drawn from it"
    return None


def is_tensor(value, state, dtype=None):
    """Whether it is a tensor of this dtype, by default any, on the device of the state."""
    if not isinstance(value, torch.Tensor) or value.device != state.tokens.device:
        return False
    return dtype in (None, value.dtype)


def in_words(value):
    """What a value is, in the words of a message."""
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.dtype} on {value.device}"
    return type(value).__name__


class CheckedRule(Called, Rule):
    """Around a reader's rule. It reports what is wrong with what the rule returns."""

    def __init__(self, text, rule):
        self.text = text
        self.inner = rule

    @property
    def longest(self):
        return self.inner.longest

    @longest.setter
    def longest(self, longest):
        self.inner.longest = longest

    @property
    def stop(self):
        return self.inner.stop and self.stops

    @stop.setter
    def stop(self, stop):
        self.inner.stop = stop

    def begin(self, state):
        with self.calling(self.inner.begin):
            self.inner.begin(state)

    def how_far(self, state):
        with self.calling(self.inner.how_far):
            gammas = self.inner.how_far(state)
        B = len(state.known)
        numbers = gammas
        if not isinstance(gammas, list):
            numbers = [gammas] * B
        if len(numbers) != B or not all(isinstance(gamma, int) for gamma in numbers):
            where = self.where(self.inner.how_far)
            raise ValueError(f"{where}: how_far must return a whole number, or a list of"
                             f" one for each row (B = {B}), not {gammas!r}")
        return parallel.agreed(gammas)

    def stops(self, k, logits, token):
        with self.calling(self.inner.stop):
            stops = self.inner.stop(k, logits, token)
        B = len(token)
        if not isinstance(stops, list) or [type(stop) for stop in stops] != [bool] * B:
            where = self.where(self.inner.stop)
            raise ValueError(f"{where}: stop must return a list of True or False for"
                             f" each row (B = {B}), as `.tolist()` makes it, not {stops!r}")
        return parallel.agreed(stops)

    def learn(self, state, r):
        with self.calling(self.inner.learn):
            self.inner.learn(state, r)
