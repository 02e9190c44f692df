"""Something that takes the place of a model: the same passes, computed in another way."""


class StandIn:
    """Takes the place of a model. A subclass overrides some methods. The model answers all else."""

    model = None    # trap: without it copy.copy, which asks before it is set, would never end

    def __init__(self, model):
        self.model = model

    def __getattr__(self, name):
        return getattr(self.model, name)

    def alongside(self, model):
        """Another model of the same run, such as a draft, computed in the same way."""
        return alongside(self.model, model)

    def rehearse(self, write):
        """Get ready for all passes that write() makes, before anything is timed."""
        rehearse(self.model, write)

    def replays(self):
        """Whether passes are computed faster than by the model itself."""
        return replays(self.model)


# --- the same for any model


def bare(model):
    """The Transformer that a model is, or for which it stands in."""
    while isinstance(model, StandIn):
        model = model.model
    return model


def alongside(model, other):
    return model.alongside(other) if isinstance(model, StandIn) else other


def rehearse(model, write):
    if isinstance(model, StandIn):
        model.rehearse(write)


def replays(model):
    return isinstance(model, StandIn) and model.replays()
