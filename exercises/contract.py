"""What a result must look like, whatever its numbers are: how many values, and the type, shape,
dtype and device of each. guard.py checks this in every call of an answer, before a test reads the
result."""
import numbers
from typing import NamedTuple

import torch

LONG, BOOL, F32, F64 = torch.long, torch.bool, torch.float32, torch.float64


class Tensor(NamedTuple):
    """dtype None: any floating one. optional: None will do."""
    shape: tuple
    dtype: torch.dtype | None
    device: torch.device | str = "cpu"
    optional: bool = False


def like(x, dtype=None, shape=None):
    return Tensor(x.shape if shape is None else shape, dtype or x.dtype, x.device)


def at_least_float32(x):
    return torch.promote_types(x.dtype, F32)


def mask(g):
    """What `visible` returns."""
    T = g["slots"].shape[1] if g["tree"] is None else g["tree"].shape[-2]
    return Tensor((len(g["slots"]), T, g["end"]), BOOL)


def written(g):
    """What a cache returns, keys or values; the tests know how many slots."""
    B, Hkv, _, D = g["k"].shape
    return Tensor((B, Hkv, None, D), g["self"].k.dtype)


def drafted(state):
    """The parts of a Draft of so many rows."""
    B = len(state.known)
    return {"tokens": Tensor((B, None), LONG), "q": Tensor((B, None, None), None, optional=True),
            "length": Tensor((B,), LONG, optional=True)}


WHOLE = "a whole number"
NUMBER = "a number"
KINDS = {WHOLE: numbers.Integral, NUMBER: numbers.Real}
FORMS = {   # {function: its results, from its arguments by name}
    **dict.fromkeys(("expected_tokens", "expected_tokens_along", "Counts.alpha", "draft_cost",
                     "speed", "break_even", "cost_in_bits", "pass_seconds"),
                    lambda g: {"the result": NUMBER}),
    **dict.fromkeys(("softcap", "RMSNorm.forward", "Attention.forward"),
                    lambda g: {"the result": like(g["x"])}),
    "rotate": lambda g: {"the result": like(g["x"], torch.result_type(g["x"], g["cos"]),
                                            torch.broadcast_shapes(g["x"].shape, g["cos"].shape))},
    "frequencies": lambda g: {
        "the result": Tensor((g["head_dim"] // 2,), F64, g["device"] or "cpu")},
    "visible": lambda g: {"the mask": mask(g)},
    **dict.fromkeys(("KVCache.write", "PagedCache.write"),
                    lambda g: {"the keys": written(g), "the values": written(g)}),
    "to_probs": lambda g: {"the result": like(g["logits"], at_least_float32(g["logits"]))},
    "Coins.choose": lambda g: {"the ids": like(g["weights"], LONG, g["weights"].shape[:-1])},
    "verify": lambda g: dict.fromkeys(("accepted", "token"), Tensor(g["tokens"].shape[:1], LONG)),
    "verify_tree": lambda g: dict.fromkeys(("node", "token"), Tensor(g["tokens"].shape[:1], LONG)),
    **dict.fromkeys(("chain", "SelfDraft.propose"), lambda g: drafted(g["state"])),
    "best_gamma": lambda g: {"gamma": WHOLE},
    "GaussianProcess.predict": lambda g: dict.fromkeys(
        ("mean", "deviation"), Tensor(g["z"].shape[:1], F64)),
    "expected_improvement": lambda g: {"the result": like(g["mean"])},
    "climb": lambda g: {"the ends": Tensor(g["starts"].shape, None),
                        "their scores": Tensor(g["starts"].shape[:1], None)},
    "Race.settle": lambda g: {"the winners": like(g["p"])},
    "best_bits": lambda g: {"bits": WHOLE, "gamma": WHOLE, "speed": NUMBER},
    "largest_batch": lambda g: {"the result": WHOLE},
    "head_loss": lambda g: {"the loss": like(g["head"], shape=())},
    "enabled_exits": lambda g: {"the exits": Tensor((g["L"],), BOOL)},
    "exit_loss": lambda g: {"the loss": like(next(iter(g["logits"].values())), shape=())},
    "learn": lambda g: {"the new weight": like(g["weight"])},
    "constrain": lambda g: {"the result": like(g["p"])},
    "ring_mask": lambda g: {"the mask": Tensor((g["T"], g["size"]), BOOL)},
    "ring_size": lambda g: {"the result": WHOLE},
    "draw_at_exit": lambda g: {
        "exit": Tensor(g["logits"].shape[1:2], LONG), "token": Tensor(g["logits"].shape[1:2], LONG),
        "q": like(g["logits"], at_least_float32(g["logits"]), g["logits"].shape[1:])}}


def words(form):
    """A form, or a value, as a student reads it."""
    if isinstance(form, str):
        return form
    if isinstance(form, (Tensor, torch.Tensor)):
        shape = ", ".join("any" if n is None else str(n) for n in form.shape)
        shape += "," * (len(form.shape) == 1)
        dtype = str(form.dtype or "a floating type").removeprefix("torch.")
        device = "" if str(form.device) == "cpu" else f" on {form.device}"
        return f"a tensor ({shape}) in {dtype}{device}"
    return f"{type(form).__name__}: {form!r:.60}"


def wrong(form, value):
    """Why a value has not this form; None if it has."""
    if form in KINDS:
        if isinstance(value, torch.Tensor) and value.shape == ():
            value = value.item()
        fits = isinstance(value, KINDS[form]) and not isinstance(value, bool)
        return None if fits else "another type"
    if value is None and form.optional:
        return None
    if not isinstance(value, torch.Tensor):
        return "that is no tensor"
    fits = [want in (None, n) for want, n in zip(form.shape, value.shape, strict=False)]
    if len(form.shape) != value.dim() or not all(fits):
        return "another shape"
    if value.layout != torch.strided:
        return "another layout: a plain, dense tensor is wanted"
    if not (value.dtype == form.dtype or form.dtype is None and value.is_floating_point()):
        return ("another dtype: ids and counts are int64, masks bool, and numbers keep the type "
                "that came in")
    if value.device.type != torch.device(form.device).type:
        return "another device: make new tensors with device=..., or from a tensor that came in"
    return None


def check(name, called, given, result):
    """Fail the test if a result has another form than FORMS says."""
    from teach import fail

    if name not in FORMS:
        return
    forms = FORMS[name](given)
    if name in ("chain", "SelfDraft.propose"):
        if type(result).__name__ != "Draft":
            fail(called, "a Draft(tokens, q, length)", words(result), "another type")
        result = result.tokens, result.q, result.length
    elif len(forms) == 1:
        result = [result]
    elif not isinstance(result, (tuple, list)) or len(result) != len(forms):
        want = "; ".join(f"{part}: {words(form)}" for part, form in forms.items())
        fail(called, f"{len(forms)} results: {want}", words(result))
    for (part, form), value in zip(forms.items(), result, strict=True):
        why = wrong(form, value)
        if why:
            fail(called, f"{part}: {words(form)}", words(value), why)
