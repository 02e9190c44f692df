"""How far a stand-in's results may differ from the model's, which is by rounding only."""
import torch

TOLERANCE = {   # for a pass of about sixteen sub-layers, as `distance` measures
    torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def tolerance(dtype, sublayers):
    """How far a pass over this number of sub-layers may be off. The errors of half precision add up
    like a random walk."""
    grown = 1.0
    if dtype in (torch.float16, torch.bfloat16):
        grown = max(1.0, sublayers / 16) ** 0.5
    return TOLERANCE[dtype] * grown


def distance(a, b):
    """The largest distance between a vector of a (..., D) and the same vector of b, relative to the
    length of b's vector, or to the mean length if that is larger."""
    length = b.double().norm(dim=-1)
    return float(((a.double() - b).norm(dim=-1) / length.clamp(min=length.mean())).max())
