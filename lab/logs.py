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

TITLES = "per-position acceptance rate:|acceptance rate per position =|acc rate/pos ="
RATES = re.compile(rf"(?:{TITLES})\s*\(?((?:[\d.]+[,\s]*)+)", re.I)
TOTALS = re.compile(r"statistics\s+(\S+?):?\s+#calls", re.I)
REQUEST = re.compile(r"draft acceptance(?: rate)? =[\s\d.]+\(\s*(\d+) accepted /\s*(\d+) gen", re.I)
WRITTEN = re.compile(r"(?<!prompt) eval time =.*?/\s*(\d+) tokens", re.I)
MEAN = "mean acceptance length", "mean acc len", "mean len"


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
            raise ValueError("the rates must lie between 0 and 1 and fall from position to "
                             "position: each counts the drafts that were accepted up to there")
        if self.rounds is not None and self.rounds < self.drafts:
            self.rounds = None      # drafts of several texts in one call

    def length(self):
        """The mean length of a draft, or None."""
        return self.drafted / self.drafts if self.drafted and self.drafts else None

    def share(self):
        """The share of rounds that had a draft. It is 1 where the log does not count the others."""
        return self.drafts / self.rounds if self.rounds else 1.0

    def equally_long(self):
        """Whether the drafts were equally long, so that each position was reached by every draft.
        Then the mean length is a whole number, up to rounding and a draft that the end cut."""
        length = self.length()
        if length is None:
            return False
        whole = round(length)
        return whole >= len(self.rates) and abs(length - whole) <= min(0.02 + 0.01 * whole, 0.25)


def number(line, *titles):
    """The number after the first of these titles that the line has, or None."""
    for title in titles:
        found = re.search(re.escape(title) + r"\s*[:=]\s*([\d.]+)", line, re.I)
        if found:
            return float(found[1])
    return None


def rates_in(line):
    """The acceptance rates by position. () if there are none."""
    found = RATES.search(line)
    return tuple(float(x) for x in re.findall(r"\d*\.?\d+", found[1])) if found else ()


def read(text):
    """The Drafts of each drafter in a log. Raises ValueError if there are none."""
    lines = text.splitlines()
    for reader in (llama_totals, llama_requests, vllm, sglang):
        found = reader(lines)
        if found:
            return found
    raise ValueError("no acceptance rates found: paste the lines of vLLM with 'SpecDecoding "
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
        calls = re.search(r"#calls\(b,g,a\)\s*=\s*\d+\s+(\d+)", line)
        drafts = number(line, "#gen drafts")
        if drafts is None:
            continue
        rates = rates_in(line)
        if not rates and drafts:
            rates = (number(line, "#acc drafts") / drafts,)
        spent = re.search(r"dur\(b,g,a\)\s*=\s*[\d.]+,\s*([\d.]+)", line)
        made.append(Drafts(
            name, drafts, number(line, "#acc tokens"), number(line, "#gen tokens"),
            float(calls[1]) if calls else None, rates, float(spent[1]) if spent else None,
            number(line, *MEAN)))
    return made


def llama_requests(lines):
    made = []
    written = None
    for line in lines:
        if found := WRITTEN.search(line):
            written = int(found[1])
        if found := REQUEST.search(line):
            accepted, drafted = map(float, found.groups())
            mean = number(line, *MEAN)
            rates = rates_in(line)
            longer = sum(rates) or (mean or 1) - 1
            if accepted and not longer:
                raise ValueError("this line of llama.cpp has no mean acceptance length: paste the "
                                 "line with 'statistics', too")
            rounds = None if written is None else written - 1 - accepted   # one is of the prompt
            drafts = accepted / longer if accepted else drafted / (len(rates) or 1)
            made.append(Drafts("llama.cpp", drafts, accepted, drafted, rounds, rates, None, mean))
            written = None
    return added(made)


def vllm(lines):
    made = []
    last = None     # without counts nothing can be added up
    speed = None
    for line in lines:
        written = number(line, "avg generation throughput")
        speed = speed if written is None else written
        rates = rates_in(line)
        if not rates:
            continue
        accepted = number(line, "accepted")
        drafted = number(line, "drafted")
        mean = number(line, *MEAN)
        if drafted is None:
            percent = number(line, "avg draft acceptance rate", "avg acceptance rate")
            length = sum(rates) / percent * 100 if percent else None
            last = Drafts("The last line", 1.0, sum(rates), length, None, rates, None, mean)
            continue
        drafts = accepted / sum(rates) if sum(rates) else drafted / len(rates)
        rounds = None
        if speed is not None and (per_second := number(line, "drafted throughput")):
            rounds = max(drafts, speed * drafted / per_second - accepted)
        made.append(Drafts("vLLM", drafts, accepted, drafted, rounds, rates, None, mean))
        speed = None
    return [last] if last else added(made)


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
    places = range(max(len(d.rates) for d in parts))
    reached = [sum(d.drafts * d.rates[k] for d in parts if k < len(d.rates)) for k in places]
    totals = {}
    for name in ("accepted", "drafted", "rounds"):
        values = [vars(d)[name] for d in parts]
        totals[name] = None if None in values else sum(values)
    rates = tuple(count / drafts for count in reached) if drafts else ()
    return [Drafts(parts[0].name, drafts, rates=rates, **totals)]
