"""What llama.cpp, vLLM and SGLang log about their drafts, as counts.

A rate alone says little. A lookup that drafts in 4 of 800 rounds may accept 12 tokens each time,
and a draft that stops early is never tested at its later positions. So a log is read for its
counts, and what it does not hold stays None.

- llama.cpp prints totals for each drafter since the server started ("statistics"), so the last line
  of each counts. If there are none, its lines for single requests are added up.
- vLLM prints what happened since its last line, so its lines are added up.
- SGLang prints mean lengths over equally many passes, weighted here by the running requests.
"""
import re
from dataclasses import dataclass
from itertools import pairwise

from model import Refused

TOTALS = re.compile(r"statistics\s+(\S+?):?\s+#calls\(b,g,a\) =[\s\d]+,.*#acc tokens", re.I)
REQUEST = re.compile(r"draft acceptance(?: rate)? =[\s\d.]+\(\s*(\d+) accepted /\s*(\d+) gen", re.I)
WRITTEN = re.compile(r"(?<!prompt) eval time =.*?/\s*(\d+) tokens", re.I)
RATES = "per-position acceptance rate", "acceptance rate per position", "acc rate/pos"
MEAN = "mean acceptance length", "mean acc len", "mean len"
PERCENT = "avg draft acceptance rate", "avg acceptance rate"


@dataclass
class Drafts:
    """What a log holds about one drafter. Counts are None if the log lacks them, and may be in any
    common unit if it holds only ratios."""
    name: str
    drafts: float
    accepted: float | None          # drafted tokens that were accepted
    drafted: float | None = None    # drafted tokens
    rounds: float | None = None     # target passes after the prompt, with a draft or without
    rates: tuple = ()       # by position: the share of drafts that were accepted up to there
    ms: float | None = None         # spent on drafting
    mean: float | None = None       # the mean acceptance length that is printed beside the rates

    def __post_init__(self):
        if any(after > before for before, after in pairwise([1.0, *self.rates])):
            raise Refused("the rates must lie between 0 and 1 and fall from position to "
                          "position: each counts the drafts that were accepted up to there")
        if self.rounds is not None and self.rounds < self.drafts:
            self.rounds = None      # drafts of several texts in one call

    def length(self):
        """The mean length of a draft, or None."""
        if not self.drafted or not self.drafts:
            return None
        return self.drafted / self.drafts

    def share(self):
        """The share of rounds that had a draft. It is 1 where the log does not count the others."""
        return self.drafts / (self.rounds or self.drafts)

    def equally_long(self):
        """Whether the drafts were equally long, so that each position was reached by every draft.
        Then the mean length is a whole number, up to rounding and a draft that the end cut."""
        length = self.length()
        if length is None:
            return False
        whole = round(length)
        return whole >= len(self.rates) and abs(length - whole) <= min(0.02 + 0.01 * whole, 0.25)


def numbers(line, *titles):
    """The numbers after the first of these titles that the line has. [] if it has none."""
    for title in titles:
        found = re.search(re.escape(title) + r"\s*[:=]\s*\(?([\d.,\s]+)", line, re.I)
        if found:
            return [float(x) for x in re.findall(r"\d*\.?\d+", found[1])]
    return []


def number(line, *titles):
    """The first of `numbers`, or None."""
    return next(iter(numbers(line, *titles)), None)


def read(text):
    """The Drafts of each drafter in a log. Raises Refused if there are none."""
    lines = text.splitlines()
    for reader in (llama_totals, llama_requests, vllm, sglang):
        found = reader(lines)
        if found:
            return found
    raise Refused("no acceptance rates found: paste the lines of vLLM with 'SpecDecoding "
                  "metrics', of llama.cpp with 'draft acceptance' or 'statistics', or of SGLang "
                  "with 'accept len'")


# --- one function per form of line, each from a list of lines to a list of Drafts


def llama_totals(lines):
    """A drafter is called in each round in which those before it had no draft."""
    last = {}
    for line in lines:
        if found := TOTALS.search(line):
            last[found[1]] = line
    made = []
    for name, line in last.items():
        _, calls, _ = numbers(line, "#calls(b,g,a)")
        _, ms, _ = numbers(line, "dur(b,g,a)") or (None, None, None)
        drafts = number(line, "#gen drafts")
        rates = numbers(line, *RATES)
        if not rates and drafts:
            rates = [number(line, "#acc drafts") / drafts]      # those with an accepted token
        made.append(Drafts(name, drafts, number(line, "#acc tokens"), number(line, "#gen tokens"),
                           calls, tuple(rates), ms, number(line, *MEAN)))
    return made


def llama_requests(lines):
    made = []
    written = None
    for line in lines:
        if found := WRITTEN.search(line):
            written = int(found[1])
        if found := REQUEST.search(line):
            made.append(request(line, *map(float, found.groups()), written))
            written = None
    return added(made)


def request(line, accepted, drafted, written):
    """The Drafts of one request. written: its tokens, the first of which is the prompt's, or
    None."""
    rates = numbers(line, *RATES)
    mean = number(line, *MEAN)
    longer = sum(rates) or (mean or 1) - 1      # accepted tokens of a draft
    if longer:
        drafts = accepted / longer
    elif accepted:
        raise Refused("this line of llama.cpp has no mean acceptance length: paste the line "
                      "with 'statistics', too")
    else:
        drafts = drafted / max(1, len(rates))
    rounds = None
    if written is not None:
        rounds = written - 1 - accepted
    return Drafts("llama.cpp", drafts, accepted, drafted, rounds, tuple(rates), None, mean)


def vllm(lines):
    made = []
    last = None     # without counts nothing can be added up
    speed = None
    for line in lines:
        written = number(line, "avg generation throughput")
        if written is not None:
            speed = written
        if rates := tuple(numbers(line, *RATES)):
            if number(line, "drafted") is None:
                last = bare(line, rates)
            else:
                made.append(interval(line, rates, speed))
            speed = None
    return [last] if last else added(made)


def bare(line, rates):
    """The Drafts of a line without counts, in units of one draft."""
    length = None
    if percent := number(line, *PERCENT):
        length = sum(rates) / percent * 100
    return Drafts("The last line", 1.0, sum(rates), length, None, rates, None, number(line, *MEAN))


def interval(line, rates, speed):
    """The Drafts of a line of vLLM. speed: tokens per second of the line before it, or None."""
    accepted = number(line, "accepted")
    drafted = number(line, "drafted")
    drafts = drafted / len(rates)
    if sum(rates):
        drafts = accepted / sum(rates)
    rounds = None
    per_second = number(line, "drafted throughput")
    if speed is not None and per_second:
        rounds = max(drafts, speed * drafted / per_second - accepted)
    return Drafts("vLLM", drafts, accepted, drafted, rounds, rates, None, number(line, *MEAN))


def sglang(lines):
    """Each of its passes has a draft."""
    made = []
    for line in lines:
        if longer := number(line, "accept len"):
            texts = number(line, "#running-req") or 1.0
            made.append(Drafts("SGLang", texts, (longer - 1) * texts, None, texts))
    return added(made)


def added(parts):
    """[the sum of Drafts of one kind], or [] of none."""
    if len(parts) < 2:
        return parts
    drafts = sum(d.drafts for d in parts)
    rates = []
    for k in range(max(len(d.rates) for d in parts)):
        reached = sum(d.drafts * d.rates[k] for d in parts if k < len(d.rates))
        rates.append(reached / drafts)
    totals = {}
    for name in ("accepted", "drafted", "rounds"):
        values = [vars(d)[name] for d in parts]
        if None not in values:
            totals[name] = sum(values)
    return [Drafts(parts[0].name, drafts, rates=tuple(rates), **{"accepted": None} | totals)]
