"""What the clock says of costs while a text is written."""
from collections import deque


class Watch:
    """Corrects costs by the seconds of each round. A thing, which is an arm, "wide" passes or
    "thinking", costs what the table says times `ratio`. Plain passes are the measure, so a machine
    that is twice as slow changes nothing, and so one round in EVERY is plain. Without a clock
    nothing is corrected."""
    LAST = 9        # rounds that count
    EVERY = 32

    def __init__(self, clock=None, unit=1.0):
        self.clock = clock      # () -> seconds
        self.unit = unit        # the seconds of a cost of 1.0, by the table
        self.began = 0.0
        self.seconds = {}       # {thing: what it took lately, by what the table says}
        self.waited = self.EVERY - 3    # rounds since a plain one
        self.ratios = {}        # those of the things that were asked for since the last `stop`

    def start(self):
        if self.clock:
            self.began = self.clock()

    def stop(self, thing, cost=1.0):
        """This thing took the seconds since the last `stop`."""
        if self.clock:
            now = self.clock()
            taken = max(0.0, now - self.began) / (cost * self.unit)
            self.seconds.setdefault(thing, deque(maxlen=self.LAST)).append(taken)
            self.began = now
            self.ratios = {}

    def passed(self, cost, plain):
        """A pass of the target ends the round."""
        self.stop("plain" if plain else "wide", cost)
        self.waited = 0 if plain else self.waited + 1

    def due(self):
        return self.clock and self.waited >= self.EVERY

    def ratio(self, thing):
        """The median of the last ratios. The table's word counts as much as two of them."""
        if thing not in self.ratios:
            self.ratios[thing] = self.median(thing)
        return self.ratios[thing]

    def median(self, thing):
        told = 0.0 if thing == "thinking" else 1.0
        plain = max(self.plain(), 1e-9)
        found = [taken / plain for taken in self.seconds.get(thing, ())]
        return middle([told, told, *found][-self.LAST :])

    def plain(self):
        """What plain passes take, as the lower median. That of wide ones counts as one of them,
        so that the first one cannot mislead where the machine just paused."""
        found = list(self.seconds.get("plain", ()))
        found.append(middle(self.seconds.get("wide", found or [1.0])))
        return sorted(found)[(len(found) - 1) // 2]


def middle(numbers):
    """The median, or the larger of the two in the middle."""
    return sorted(numbers)[len(numbers) // 2]
