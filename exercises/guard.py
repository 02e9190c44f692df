"""Runs an answer in its own namespace and checks every call: no argument may change, no result may share
memory with an argument or another result, and all random numbers come from the coins. So no test of an
exercise needs to check these.
"""
import functools
import importlib
import inspect
import sys
import types
from itertools import combinations

import torch

# These may return an argument, or a part of one.
ITSELF = {"softcap", "KVCache.write", "climb", "counterexample"}
KEPT = 2                                # how many earlier results are checked for changes, too


def frozen(x):
    """A copy of everything in x that must not change. Spending coins and writing to a cache is allowed, so
    of coins only the seeds are copied, and of a cache nothing."""
    if isinstance(x, torch.Tensor):
        return x.detach().clone()
    if isinstance(x, (int, float, str, range, type(None))):
        return x
    if isinstance(x, torch.nn.Module):
        plain = {name: v for name, v in vars(x).items() if isinstance(v, (int, float, str, type(None)))}
        return plain | {name: frozen(t) for name, t in x.state_dict(keep_vars=True).items()}
    if isinstance(x, dict):
        return {key: frozen(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [frozen(part) for part in x]
    if type(x).__name__ == "KVCache" or callable(x) or not hasattr(x, "__dict__"):
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
    """(name, tensor) for every tensor in x that is not empty."""
    if isinstance(x, torch.Tensor):
        return [(name, x)] * bool(x.numel())
    if isinstance(x, (list, tuple)):
        return [pair for i, part in enumerate(x) for pair in tensors(part, f"{name}[{i}]")]
    if isinstance(x, dict):
        return [pair for key, part in x.items() for pair in tensors(part, f"{name}.{key}".strip("."))]
    return [] if callable(x) or not hasattr(x, "__dict__") else tensors(vars(x), name)


def share(a, b):
    """Whether two tensors share an element in memory."""
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr() or a.dtype != b.dtype:
        return False
    places = torch.arange(a.untyped_storage().nbytes() // a.element_size())
    one, two = (places.as_strided(t.shape, t.stride(), t.storage_offset()) for t in (a, b))
    return bool(torch.isin(one, two).any())


def watched(name, original):
    """A stand-in for the original: it calls `call.answer`, which `install` sets, and checks the call."""
    arguments, kept = inspect.signature(original), []

    @functools.wraps(original)
    def call(*args, **kwargs):
        from teach import (
            no_other_chance,  # trap: above, it would load the library before the answer is put in
        )

        given = dict(arguments.bind(*args, **kwargs).arguments)
        called, before = f"a call of {name}({', '.join(given)})", frozen([given, kept])
        with no_other_chance(called):
            result = call.answer(*args, **kwargs)
        check(called, given, kept, before, result, name in ITSELF)
        kept[:] = [*kept, result][-KEPT:] if name != "KVCache.write" else []
        return result
    return call


def check(called, given, kept, before, result, itself):
    """Fail the test if this call broke a rule. itself: the function may return an argument."""
    from teach import fail, short

    for now, old, why in (
            (given, before[0], "something is done in place, as by `x[...] =`, `+=`, or a method that ends in "
             "_; work on a clone, because the caller goes on with what it gave you"),
            (kept, before[1], "two calls hand out the same tensor; make a new one in each")):
        found = changed(old, frozen(now), "")
        if found:
            where, was, came = found
            what = f"`{where}`" if now is given else "the result of an earlier call"
            fail(called, f"{what} stays as it is: {short(was):.200}", f"{short(came):.200}", why)
    if itself:
        return
    results = tensors(result)
    for at, out in results:
        for other, t in tensors(given):
            if share(out, t):
                fail(called, "results in memory of their own", f"the result{at} is (a part of) `{other}`",
                     "return a copy, because the caller goes on with both and may change one")
    for (one, a), (two, b) in combinations(results, 2):
        if share(a, b):
            fail(called, "results in memory of their own", f"the results {one} and {two} are one",
                 "return two tensors, because the caller may change one")


def install(module, names, code):
    """Put an answer in place of the functions `names` of a library module. The answer gets a copy of the
    module's names, so its assignments change nothing outside."""
    library = importlib.import_module(module.removesuffix(".py").replace("/", "."))
    own = sys.modules["answer"] = types.ModuleType("answer")
    places = [(getattr(library, name.split(".")[0]) if "." in name else library, name) for name in names]
    calls = {}
    for place, name in places:
        last = name.split(".")[-1]
        old = vars(place)[last]
        calls[name] = watched(name, old.fget if isinstance(old, property) else old)
        setattr(place, last, property(calls[name]) if isinstance(old, property) else calls[name])
    vars(own).update({key: value for key, value in vars(library).items() if not key.startswith("__")})
    exec(code, vars(own))
    for place, name in places:
        outer, _, last = name.rpartition(".")
        new = vars(vars(own)[outer])[last] if outer else vars(own)[name]
        new = new.fget if isinstance(new, property) else new
        for free, cell in zip(new.__code__.co_freevars, new.__closure__ or (), strict=True):
            if free == "__class__":     # so that `super()` finds the library's class
                cell.cell_contents = place
        calls[name].answer = new
    for place, name in places:
        if "." in name:
            setattr(own, name.split(".")[0], place)
