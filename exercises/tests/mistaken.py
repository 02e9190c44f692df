"""What the tests of answers share beyond teach.py."""
import torch
from teach import Mistakes, compare, promise
from tiny import wide


def gives(function, table, arguments, rtol=1e-9):
    """The function must give what a table says of each row of arguments."""
    def each(f):
        return wide([f(*row) for row in table])

    compare(each(function), wide([*table.values()]), Mistakes(function.__name__, each),
            f"({arguments}) = {[*table]}", rtol)


DETACHED = ("what is trained needs its gradient: "
            "no detach, .item(), .data or torch.no_grad on the way")


def learns(call, parts, given):
    """A backward pass through call() must give each of `parts`, {name: tensor in float64}, the
    gradient that small steps show."""
    drawn = torch.Generator().manual_seed(0)

    def some(shape):
        return torch.randn(shape, generator=drawn, dtype=torch.float64)

    for x in parts.values():
        x.grad = None
        x.requires_grad_()
    out = call()
    weights = some(out.shape)
    promise(out.requires_grad, given, "a result with a gradient", "one without", DETACHED)
    (out * weights).sum().backward()
    for name, x in parts.items():
        step = some(x.shape) * 1e-6
        with torch.no_grad():
            x += step
            more = (call() * weights).sum()
            x -= 2 * step
            slope = float(more - (call() * weights).sum()) / 2
            x += step
        got = 0.0 if x.grad is None else float((x.grad * step).sum())
        promise(abs(got - slope) < 1e-4 * abs(slope),
                f"{given}; backward(), and a small step of `{name}`",
                f"a change of {slope:.4g}", f"{got:.4g}", DETACHED)


def gradients(call, parts):
    """The gradients of `parts`, {name: tensor}, by a backward pass through call() with weights that
    are always the same."""
    for x in parts.values():
        x.grad = None
        x.requires_grad_()
    out = call()
    if out.requires_grad:
        drawn = torch.Generator().manual_seed(0)
        (out * torch.randn(out.shape, generator=drawn, dtype=torch.float64)).sum().backward()
    found = [torch.zeros_like(x) if x.grad is None else x.grad.clone() for x in parts.values()]
    for x in parts.values():
        x.requires_grad_(False)
    return found
