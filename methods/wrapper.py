"""A drafter around others, such as one that adds siblings or chooses among them."""
from drafter import Drafter


class Wrapper(Drafter):
    """A drafter around others, which forwards each call to all and takes the draft of the first."""

    def __init__(self, *drafters: Drafter):
        self.drafters = drafters
        self.rule = drafters[0].rule
        self.taps = tuple(sorted({tap for drafter in drafters for tap in drafter.taps}))

    def begin(self, state, trace):
        for drafter in self.drafters:
            drafter.begin(state, trace)

    def propose(self, state):
        return self.drafters[0].propose(state)

    def observe(self, state, r):
        for drafter in self.drafters:
            drafter.observe(state, r)
