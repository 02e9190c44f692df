"""Runs an answer in its own namespace and checks every call before a test reads its result, so that
the tests need not. The result must have the type, shape, dtype and device that contract.py asks
for. No argument may change, nor anything that an argument returned when it was called. No result
may share memory with an argument or with another result. All random numbers must come from the
coins, and torch must stay as it was. Every tensor arrives with unusual strides, because in the
library many are slices and transposes, and in memory that a call before it used, as in a loop that
writes into its buffers: what was remembered by an address or an id is then wrong.
"""
import functools
import inspect
import math
import random
import sys
import types
from contextlib import nullcontext

import torch

from exercises import contract

# These may return an argument, or a part of one.
ITSELF = {"softcap", "KVCache.write", "climb", "counterexample"}
# These look for an example, for which any random numbers will do.
SEARCHES = {"counterexample", "ring_counterexample"}
OFTEN = 20                              # what answers have replaced is looked for so often
KEPT = 2                                # how many earlier results are also checked for changes


def frozen(x):
    """A copy of everything in x that must not change. Spending coins and writing to a cache is
    allowed, so of coins only the seeds are copied, and of a cache nothing."""
    if isinstance(x, torch.Tensor):
        return None if x.is_meta else x.detach().clone()
    if isinstance(x, (int, float, str, range, type(None))):
        return x
    if isinstance(x, torch.nn.Module):
        plain = {name: v for name, v in vars(x).items()
                 if isinstance(v, (int, float, str, type(None)))}
        return plain | {name: frozen(t) for name, t in x.state_dict(keep_vars=True).items()}
    if isinstance(x, dict):
        return {key: frozen(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [frozen(part) for part in x]
    if type(x).__name__ in ("KVCache", "PagedCache") or callable(x) or not hasattr(x, "__dict__"):
        return None
    coins = any(kind.__name__ == "Coins" for kind in type(x).__mro__)
    return {key: frozen(value) for key, value in vars(x).items() if key == "seeds" or not coins}


def changed(old, new, name):
    """(name, old, new) of the first part that has changed; None if nothing has."""
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        same = old.shape == new.shape and old.dtype == new.dtype
        return None if same and torch.allclose(old, new, 0, 0, equal_nan=True) else (name, old, new)
    if type(old) is type(new) is dict and old.keys() == new.keys():
        pairs = [(old[key], new[key], f"{name}.{key}" if name else str(key)) for key in old]
    elif type(old) is type(new) is list and len(old) == len(new):
        pairs = [(a, b, f"{name}[{i}]") for i, (a, b) in enumerate(zip(old, new, strict=True))]
    else:
        return None if old == new or old != old else (name, old, new)
    return next(filter(None, (changed(*pair) for pair in pairs)), None)


def tensors(x, name=""):
    """(name, tensor) for every tensor in x that has numbers."""
    if isinstance(x, torch.Tensor):
        return [(name, x)] * bool(x.numel() and not x.is_meta)
    if isinstance(x, (list, tuple)):
        return [pair for i, part in enumerate(x) for pair in tensors(part, f"{name}[{i}]")]
    if isinstance(x, dict):
        return [pair for key, part in x.items()
                for pair in tensors(part, f"{name}.{key}".strip("."))]
    return [] if callable(x) or not hasattr(x, "__dict__") else tensors(vars(x), name)


def share(a, b):
    """Whether two tensors share an element in memory."""
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr() or a.dtype != b.dtype:
        return False
    places = torch.arange(a.untyped_storage().nbytes() // a.element_size())
    one, two = (places.as_strided(t.shape, t.stride(), t.storage_offset()) for t in (a, b))
    return bool(torch.isin(one, two).any())


def strided(x):
    """The same values, as tensors that are not contiguous: last dimension first, with gaps between
    them."""
    if isinstance(x, torch.Tensor):
        order = list(range(x.dim()))[::-1]
        turned = x.permute(order)
        return torch.stack([turned, turned], -1)[..., 0].permute(order)
    return x


class Memory:
    """Where the arguments of a function lie, call after call: values of the same name, shape and
    type are copied into the tensors of the call before, and settings into its dictionary."""

    def __init__(self):
        self.tensors = {}
        self.dicts = {}

    def hold(self, name, value, again):
        """The value as an answer gets it. again: whether it may lie where an earlier one did."""
        if isinstance(value, dict):
            kept = self.dicts.setdefault(name, {})
            kept.clear()
            kept.update((key, self.hold((name, key), part, again)) for key, part in value.items())
            return kept
        if isinstance(value, list):
            return [self.hold((name, i), part, again) for i, part in enumerate(value)]
        if type(value) is not torch.Tensor or value.is_meta or not again:
            return strided(value)
        place = name, value.shape, value.dtype, torch.is_inference_mode_enabled()
        if place not in self.tensors:
            self.tensors[place] = strided(value)
            return self.tensors[place]
        return self.tensors[place].copy_(value)

    def release(self, result):
        """A result that is an argument itself keeps its values."""
        parts = [out for _, out in tensors(result)]
        self.tensors = {place: t for place, t in self.tensors.items()
                        if not any(t.untyped_storage().data_ptr()
                                   == out.untyped_storage().data_ptr() for out in parts)}


def trained(x):
    """Whether a backward pass may go through this argument."""
    if isinstance(x, torch.nn.Module):
        return any(map(trained, x.parameters()))
    if isinstance(x, dict):
        return any(map(trained, x.values()))
    return isinstance(x, torch.Tensor) and x.requires_grad


def recorded(function, returned):
    """The function; what it returns is appended to `returned`, together with a copy."""
    def call(*args, **kwargs):
        found = function(*args, **kwargs)
        returned.append((found, frozen(found)))
        return found
    return call


def settings():
    """What any code can change in torch for all other code."""
    return {"the gradient mode": torch.is_grad_enabled(),
            "the default dtype": torch.get_default_dtype(),
            "the default device": torch.get_default_device(),
            "the number of threads": torch.get_num_threads()}


def replaced(originals):
    """The name of what an answer has put something else in place of, which is taken back; None if
    nothing. originals: [(place, what stood there)]. Torch itself wraps some of its functions when
    more of it is loaded."""
    other = None
    for place, stood in originals:
        if [*map(vars(place).get, stood)] == [*stood.values()]:     # by identity, in one step
            continue
        for name, value in stood.items():
            there = vars(place).get(name)
            if there is not value and not str(getattr(there, "__module__", "")).startswith("torch"):
                setattr(place, name, value)
                other = f"{place.__name__}.{name}"
    return other


def watched(name, original, answer, originals):
    """A stand-in for the original: it calls the answer, and fails the test if this call broke a
    rule."""
    arguments = inspect.signature(original)
    kept = []
    calls = []
    memory = Memory()

    @functools.wraps(original)
    def call(*args, **kwargs):
        # trap: above, it would load the library before the answer is put in
        from teach import no_other_chance

        bound = arguments.bind(*args, **kwargs)
        returned = {}
        given = bound.arguments
        # what a backward pass will read must stay as it is
        again = not (torch.is_grad_enabled() and any(map(trained, given.values())))
        for key, value in given.items():
            if callable(value) and not isinstance(value, torch.nn.Module):
                returned[key] = []
                given[key] = recorded(value, returned[key])
            else:
                given[key] = memory.hold(key, value, again)
        called = f"a call of {name}({', '.join(given)})"
        given = dict(given)
        before = frozen([given, kept])
        modes = settings()
        with nullcontext() if name in SEARCHES else no_other_chance(called):
            result = answer(*bound.args, **bound.kwargs)
        calls.append(called)
        look = len(calls) <= OFTEN or len(calls) % OFTEN == 0      # it takes longer than most calls
        check_surroundings(called, originals if look else (), modes, returned)
        check_memory(called, given, kept, before, [] if name in ITSELF else tensors(result),
                     not hasattr(original, "__wrapped__"))     # else in torch.inference_mode itself
        bound.apply_defaults()
        contract.check(name, called, bound.arguments, result)
        if name in ITSELF:
            memory.release(result)
        kept[:] = [*kept, result][-KEPT:] if name != "KVCache.write" else []
        return result
    return call


def check_surroundings(called, originals, modes, returned):
    """What other code uses must stay. returned: {argument: [(what a call of it returned, a
    copy)]}."""
    from teach import fail

    other = replaced(originals)
    if other:
        fail(called, f"{other} stays as it is", "another one in its place",
             "all code that runs later would call yours; give it a name of your own")
    for what, now in settings().items():
        if now != modes[what]:
            fail(called, f"{what} stays {modes[what]}", now,
                 "it holds for all code that runs later; "
                 "to change it for a while, write `with torch.no_grad():` and the like")
    for key, found in returned.items():
        if any(changed(copy, frozen(now), "") for now, copy in found):
            fail(called, f"what `{key}` returned stays as it is", "it has changed",
                 "something is done in place; what `store` returns, for one, is the cache itself: "
                 "work on a clone")


def check_memory(called, given, kept, before, results, trainable):
    """Arguments and earlier results must stay as they are, and results share no memory with
    them."""
    from teach import fail, short

    if trainable and not torch.is_inference_mode_enabled():
        for at, out in results:
            if out.is_inference() and not any(t.is_inference() for _, t in tensors(given)):
                fail(called, "a result through which a backward pass can go",
                     f"the result{at} was made in inference mode", "torch.no_grad is enough")
    for now, old, why in (
            (given, before[0], "something is done in place, as by `x[...] =`, `+=`, or a method "
             "that ends in _; work on a clone, because the caller goes on with what it gave you"),
            (kept, before[1], "two calls hand out the same tensor; make a new one in each")):
        found = changed(old, frozen(now), "")
        if found:
            where, was, came = found
            what = f"`{where}`" if now is given else "the result of an earlier call"
            fail(called, f"{what} stays as it is: {short(was):.200}", f"{short(came):.200}", why)
    for at, out in results:
        if any(n > 1 and step == 0 for n, step in zip(out.shape, out.stride(), strict=True)):
            fail(called, "results in memory of their own", f"rows of the result{at} that are one",
                 "what is written into one row would change the others: `expand` makes no copy")
    others = [(f"`{name}`", t) for name, t in tensors(given)]
    for at, out in results:
        for other, t in others:
            if share(out, t):
                fail(called, "results in memory of their own",
                     f"the result{at} is (a part of) {other}",
                     "return a copy, because the caller goes on with both and may change one")
        others.append((f"the result{at}", out))


def install(task, code):
    """Put an answer in place of the functions of a task. The answer gets a copy of the names of
    their module, so its assignments change nothing outside."""
    library = task.library
    own = sys.modules["answer"] = types.ModuleType("answer")
    vars(own).update({key: value for key, value in vars(library).items()
                      if not key.startswith("__")})
    exec(code, vars(own))
    originals = []
    for name in task.functions:
        outer, _, last = name.rpartition(".")
        place, mine = library, own
        if outer:
            place = getattr(library, outer)
            mine = vars(own)[outer]
            setattr(own, outer, place)
        old = vars(place)[last]
        new = vars(mine)[last]
        if isinstance(old, property):
            setattr(place, last, property(watched(name, old.fget, new.fget, originals)))
        else:
            setattr(place, last, watched(name, old, new, originals))
    # with it come the modules that no answer may change
    from teach import no_other_chance  # noqa: F401

    modules = [sys.modules[name] for name in ("teach", "tiny", "pytest", "sampling")]
    originals += [(place, {name: value for name, value in vars(place).items()
                           if name[0] != "_" and callable(value)})
                  for place in (torch, torch.Tensor, torch.nn.functional, math, random,
                                *modules, modules[-1].Coins)]
