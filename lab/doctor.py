"""Why does drafting gain so little here? What another engine logged, explained.

    python -m lab.doctor --cost 0.02 < server.log
    python -m lab.doctor --passes 1:8.47 2:13.49 3:15.64 5:20.67 8:28.13 < server.log
    python -m lab.doctor "Per-position acceptance rate: 0.600, 0.385, 0.215" --gamma 3
    python -m lab.doctor --plain 7.07 --runs 2:2.10:4.37 3:2.29:4.29 4:2.39:4.48

The first forms read what llama.cpp, vLLM or SGLang logged; logs.py says which lines. A rate by
position says how often the draft was accepted up to this position, so the rates fall, and 1 plus
their sum is the mean length of a round that had a draft. Rounds without a draft bring one token, so
tau, which is taken over all rounds, is smaller. A figure that needs more than the log holds is not
printed, and a line says what is missing.

The last form needs no log. Each run is the draft length K, the mean acceptance length and the
milliseconds per token, and --plain gives the milliseconds per token without a draft. Two runs are
enough, because tau * time / plain is the cost of a round, and this is a straight line in K. Its
slope is c, and it starts at v.

c is the cost of a drafted token and v the cost of the target's pass over the draft, both relative
to a pass over one token. In --passes the costs may have any unit. With --plain, c is measured by
the durations in a log of llama.cpp.
"""
import math
import statistics
import sys
from functools import partial
from itertools import pairwise

from control import expected_tokens, round_cost
from lab import logs
from methods.costs import between
from model import Refused
from support import cli
from support.flags import within
from support.texts import read_input

LONGEST = 16    # the longest draft that the break-even point is looked for with


# --- reading


positive = within(1e-9, 1e30)
whole = within(1, 10**6)


def pair(text):
    width, cost = text.split(":")
    return whole(width), positive(cost)


def triple(text):
    length, tau, ms = text.split(":")
    return whole(length), positive(tau), positive(ms)


def passes_of(pairs):
    """The cost of a pass over T tokens as a function of T. pairs: [(width, cost in any unit)]"""
    pairs = sorted(pairs)
    widths = [width for width, _ in pairs]
    if widths[0] != 1 or len(set(widths)) < len(widths):
        raise Refused("--passes needs the cost of a pass over one token (1:...), and each width "
                      "once")
    one = pairs[0][1]
    return partial(between, [(width, cost / one) for width, cost in pairs])


def fitted(runs, plain):
    """(c, v) of the straight line through the costs of rounds, by least squares. Here rounds cost
    2.2, 2.3 and 2.4 passes with drafts of 2, 3 and 4 tokens.

    >>> c, v = fitted([(2, 2.0, 11), (3, 2.3, 10), (4, 2.4, 10)], 10)
    >>> round(c, 3), round(v, 3)
    (0.1, 2.0)
    """
    lengths = [length for length, _, _ in runs]
    if len(set(lengths)) < 2:
        raise Refused("--runs needs at least two runs with different draft lengths")
    if min(tau for _, tau, _ in runs) < 1:
        raise Refused("--runs needs mean acceptance lengths of at least 1, because a length "
                      "counts the token after the accepted ones")
    rounds = [tau * ms / plain for _, tau, ms in runs]
    c, v = statistics.linear_regression(lengths, rounds)
    if c < 0:       # a fitted line may fall by chance
        c = 0.0
        v = statistics.fmean(rounds)
    if v <= 0:
        raise Refused("these --runs make a pass over the draft cost less than nothing: is "
                      "--plain in the same unit?")
    return c, v


def rates_of(runs):
    """Rates by position from mean lengths. Positions that no run tells apart get the same alpha.

    >>> [round(rate, 3) for rate in rates_of([(1, 1.8, 0), (3, 2.4, 0)])]
    [0.8, 0.4, 0.2]
    """
    rates = []
    tau = 1.0
    reach = 1.0
    for length, longer, _ in sorted(runs):
        K = length - len(rates)
        target = (longer - tau) / reach if reach else 0.0
        alpha = smallest(lambda a, K=K, target=target: expected_tokens(a, K) - 1 >= target)
        rates += [reach * alpha ** k for k in range(1, K + 1)]
        reach = rates[-1]
        tau = longer
    return rates


def smallest(holds):
    """The smallest x from 0 to 1 where holds(x) is true, if it is true everywhere above it."""
    low = 0.0
    high = 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return high


# --- what it means


def alphas(rates):
    """The acceptance rate at each position, given that all before it were accepted.

    >>> alphas([0.8, 0.4, 0.0, 0.0])
    [0.8, 0.5, 0.0, None]
    """
    return [after / before if before else None for before, after in pairwise([1.0, *rates])]


def over_rounds(share, tau, price):
    """(tau, price) of all rounds if a share of them has a draft. The others bring one token for a
    pass over one.

    >>> over_rounds(0.5, 3.0, 1.5)
    (2.0, 1.25)
    """
    return 1 + share * (tau - 1), 1 + share * (price - 1)


def best(alpha, cost, pass_cost, share=1.0):
    """(K, speed-up) of the best draft length, 0 if none gains. alpha is given by
    position, and None counts as 0."""
    gains = [1.0]
    longer = 1.0
    reach = 1.0
    for K, a in enumerate(alpha, 1):
        reach *= a or 0.0
        longer += reach
        tau, price = over_rounds(share, longer, round_cost(K, cost, pass_cost(K + 1)))
        gains.append(tau / price)
    K = max(range(len(gains)), key=gains.__getitem__)
    return K, gains[K]


def break_even(cost, pass_cost):
    """The smallest alpha, the same at each position, with which some draft gains; None if not even
    1 does.

    >>> round(break_even(0.2, lambda T: 1.1), 3)        # one token: 1 + alpha > 0.2 + 1.1
    0.3
    """
    def gains(alpha):
        return best([alpha] * LONGEST, cost, pass_cost)[1] > 1

    return smallest(gains) if gains(1.0) else None


def halved(alpha, cost, pass_cost, share=1.0):
    """{what limits the gain: the best speed-up with half of it}. Half as many rejections, half the
    price of a drafted token, and half of what a block costs more than a single token."""
    surer = [(1 + (a or 0.0)) / 2 for a in alpha]
    return {"alpha": best(surer, cost, pass_cost, share)[1],
            "c": best(alpha, cost / 2, pass_cost, share)[1],
            "v": best(alpha, cost, lambda T: (1 + pass_cost(T)) / 2, share)[1]}


def limit(alpha, cost, pass_cost, share=1.0):
    """Which of "alpha", "c" and "v" brings most if it is halved."""
    gains = halved(alpha, cost, pass_cost, share)
    return max(gains, key=gains.get)


WORDS = {"alpha": "half as many rejections", "c": "drafted tokens at half their cost",
         "v": "blocks at half of what they cost more than one token"}


# --- what is printed


def counted(log):
    """The line that says what the log holds."""
    length = log.length()
    drafts = "" if length is None else f" of {length:.1f} tokens on average"
    if log.rounds is None:
        return (f"{log.name}: drafts{drafts}. The log does not count the rounds without a draft, "
                "so these figures are for rounds with one.")
    return f"{log.name}: {100 * log.share():.1f} % of the rounds had a draft{drafts}."


def as_logged(log, cost, pass_cost):
    """(tokens, passes) per round of the run that was logged. passes is None if the lengths of its
    drafts are not known."""
    tau = 1 + log.accepted / log.drafts
    length = log.length()
    if length is None:
        return over_rounds(log.share(), tau, 1.0)[0], None
    low = int(length)
    v = pass_cost(low + 1)
    v += (length - low) * (pass_cost(low + 2) - v)
    return over_rounds(log.share(), tau, round_cost(length, cost, v))


def table(log, cost, pass_cost):
    """A line for each position. What a draft of K tokens costs is known if all drafts were equally
    long, or for K = 1; the last line is the run that was logged."""
    lines = ["position  accepted  alpha    tau  round  speed-up"]
    equal = log.equally_long()
    last = len(log.rates)
    for K, (rate, alpha) in enumerate(zip(log.rates, alphas(log.rates), strict=True), 1):
        known = equal or K == 1
        price = round_cost(K, cost, pass_cost(K + 1)) if known else math.nan
        tau, price = over_rounds(log.share(), 1 + sum(log.rates[:K]), price)
        if not equal and K == last and log.length():
            tau, price = as_logged(log, cost, pass_cost)
        if alpha is None or not known:
            alpha = math.nan
        lines.append(f"{K:8}  {rate:8.3f}  {alpha:5.2f}  {tau:5.3f}  {price:5.2f}  "
                     f"{tau / price:8.2f}".replace("nan", "  -"))
    return lines


def advice(log, cost, pass_cost):
    """The best draft length and what limits the gain, for drafts that were equally long."""
    rates = log.rates
    alpha = alphas(rates)
    K, gain = best(alpha, cost, pass_cost, log.share())
    if K:
        some, every = (over_rounds(log.share(), 1 + sum(rates[:k]), 1.0)[0]
                       for k in (K, len(rates)))
        lines = [f"Best K: {K}. It brings {some:.3f} of the {every:.3f} tokens per round that K "
                 f"{len(rates)} brings, and {gain:.2f} times plain decoding."]
    else:
        lines = ["Best K: 0. At these costs no draft gains."]
    if K and K == len(rates) == round(log.length()):
        lines.append(f"Longer drafts than {K} were not measured and may be better.")
    gains = halved(alpha, cost, pass_cost, log.share())
    first = limit(alpha, cost, pass_cost, log.share())
    promised = "; ".join(f"{WORDS[name]} {gains[name]:.2f}" for name in gains)
    lines.append(f"The limit is {first}. The best speed-up would be with {promised}.")
    return lines


def missing(log):
    """Why there is no advice."""
    if not log.rates:
        return ("The log holds no rates by position, so the best K is not known. With runs of "
                "different draft lengths --runs finds it.")
    if log.length() is None:
        return (f"The log does not say how long the drafts were: if each had {len(log.rates)} "
                f"tokens, add --gamma {len(log.rates)}.")
    return (f"Some drafts were shorter than others, {log.length():.1f} tokens on average. The log "
            "does not say how many reached each position, so alpha beyond the first one and the "
            "best K are not known.")


def report(log, cost, pass_cost):
    """The lines about one drafter."""
    if not log.drafts:
        return [f"{log.name}: no drafts."]
    lines = [counted(log)] if log.name else []
    if log.rates:
        lines += table(log, cost, pass_cost)
    tau, price = as_logged(log, cost, pass_cost)
    if price is None:
        lines.append(f"As logged: {tau:.3f} tokens per round.")
    else:
        lines.append(f"As logged: {tau:.3f} tokens per round, which costs {price:.2f} passes: "
                     f"{tau / price:.2f} times plain decoding.")
    if log.mean is not None and log.rates and abs(log.mean - 1 - sum(log.rates)) > 0.02:
        lines.append(f"It prints a mean length of {log.mean:.2f}, but its rates add up to "
                     f"{1 + sum(log.rates):.2f}: the table takes the rates.")
    if log.rates and log.equally_long():
        lines += advice(log, cost, pass_cost)
    else:
        lines.append(missing(log))
    even = break_even(cost, pass_cost)
    lines.append("No alpha breaks even: the passes cost too much." if even is None else
                 f"Break-even: drafting gains where alpha exceeds {even:.2f}.")
    return lines


def together(found, costs, pass_cost):
    """The line about several drafters, each called where those before it had no draft; None if one
    lacks a count."""
    if any(log.rounds is None or log.length() is None for log in found if log.drafts):
        return None
    rounds = max(log.rounds or 0 for log in found)
    tau = 1.0
    price = 1.0
    for log, cost in zip(found, costs, strict=True):
        if log.drafts:
            its_tau, its_price = as_logged(log, cost, pass_cost)
            tau += (its_tau - 1) * log.rounds / rounds
            price += (its_price - 1) * log.rounds / rounds
    return (f"All drafters: {tau:.3f} tokens per round, which costs {price:.2f} passes: "
            f"{tau / price:.2f} times plain decoding.")


def cost_of(log, a):
    """c, as measured by the log's durations or as --cost gives it."""
    if a.plain is None:
        return a.cost
    if not (log.ms and log.drafted):
        raise Refused(f"--plain without --runs needs a log with durations, but {log.name} has "
                      "none: give --cost")
    return log.ms / log.drafted / a.plain


def read_log(a):
    """The Drafts of what the command line gives."""
    found = logs.read(read_input() if a.line is None else a.line)
    for log in found:
        if log.drafted is None and a.gamma:
            log.drafted = a.gamma * log.drafts
    return found


def run(argv):
    p = cli.Parser(description="What the acceptance rates of another engine mean.",
                   allow_abbrev=False)
    p.add_argument("line", nargs="?", metavar="LINE",
                   help="what it logged (default: standard input)")
    p.add_argument("--cost", type=within(0.0, 1e30), default=0.0, metavar="C",
                   help="of a drafted token, in target passes over one token (default 0)")
    p.add_argument("--passes", type=pair, nargs="+", default=[(1, 1.0)], metavar="WIDTH:COST",
                   help="of the target's passes, in any unit (default: all cost the same)")
    p.add_argument("--gamma", type=whole, metavar="K",
                   help="tokens in each draft, where the log does not say")
    p.add_argument("--plain", type=positive, metavar="MS",
                   help="per token without a draft, for --runs or a log with durations")
    p.add_argument("--runs", type=triple, nargs="+", metavar="K:TAU:MS",
                   help="draft length, mean acceptance length, milliseconds per token")
    a = p.parse_args(argv)
    if a.runs:
        if a.plain is None:
            raise Refused("--runs and --plain belong together")
        cost, v = fitted(a.runs, a.plain)
        print(f"c {cost:.3f}, v {v:.3f}: fitted to {len(a.runs)} runs")
        rates = tuple(rates_of(a.runs))
        longest = logs.Drafts("", 1.0, sum(rates), len(rates), 1.0, rates)
        print(*report(longest, cost, lambda T: v if T > 1 else 1.0), sep="\n")
        return
    pass_cost = passes_of(a.passes)
    found = read_log(a)
    costs = [cost_of(log, a) for log in found]
    for log, cost in zip(found, costs, strict=True):
        print(*report(log, cost, pass_cost), sep="\n", end="\n\n")
    if len(found) > 1 and (line := together(found, costs, pass_cost)):
        print(line)


def main(argv=None):
    return cli.main(run, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
