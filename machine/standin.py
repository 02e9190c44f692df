"""What stands in for a model. A loop or a drafter calls `embed`, `run` and `unembed` of its model.
So an object that answers these calls can take its place anywhere, and compute them in another way.
"""
import torch


class StandIn:
    """A Transformer as generate.py hands it on, with what a drafter may ask of it. Everything that
    a subclass does not define is forwarded to `model`."""

    share = 1.0         # of the output head that a draft reads
    widest = 256        # tokens that one pass may take
    exits = 1 / 12, 1 / 6, 1 / 4, 1 / 3     # parts of the blocks after which it is good to leave

    def __init__(self, model):
        self.model = model

    def __getattr__(self, name):
        if name == "model":     # trap: copy.copy looks it up before it is set: endless recursion
            raise AttributeError(name)
        return getattr(self.model, name)

    def bare(self):
        """The Transformer itself."""
        return self.model

    def alongside(self, model):
        """Another model of the same run, such as a draft, computed in the same way."""
        return StandIn(model)

    def rehearse(self, write):
        """Get ready for all passes that write() makes, before anything is timed."""

    def replays(self):
        """Whether passes are computed faster than by the Transformer itself."""
        return False


class Around(StandIn):
    """A stand-in around another one, whose answers it gives unless it has its own."""

    def __init__(self, model):
        super().__init__(stand_in(model))
        self.share = self.model.share
        self.widest = self.model.widest
        self.exits = self.model.exits

    def bare(self):
        return self.model.bare()

    def alongside(self, model):
        return self.model.alongside(model)

    def rehearse(self, write):
        self.model.rehearse(write)

    def replays(self):
        return self.model.replays()


def stand_in(model):
    """The model, as a StandIn."""
    return model if isinstance(model, StandIn) else StandIn(model)


# --- how far what stands in may be off

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
