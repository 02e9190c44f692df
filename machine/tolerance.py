"""How far what stands in for a model may be off: only rounding may differ."""
import torch

TOLERANCE = {   # of a pass of some sixteen sub-layers, by `distance`
    torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def tolerance(dtype, sublayers):
    """How far a pass over so many sub-layers may be off: the errors of half precision add up like a
    random walk."""
    grown = 1.0
    if dtype in (torch.float16, torch.bfloat16):
        grown = max(1.0, sublayers / 16) ** 0.5
    return TOLERANCE[dtype] * grown


def distance(a, b):
    """The largest distance of a vector of a (..., D) from that of b, relative to the latter's
    length, or to the mean length if that is larger."""
    length = b.double().norm(dim=-1)
    return float(((a.double() - b).norm(dim=-1) / length.clamp(min=length.mean())).max())
