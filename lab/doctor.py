"""Why does drafting gain so little here? The line that another engine prints, explained.

    python -m lab.doctor "Per-position acceptance rate: 0.600, 0.385, 0.215" --cost 0.02
    python -m lab.doctor --passes 1:8.47 2:13.49 3:15.64 5:20.67 8:28.13 < server.log
    python -m lab.doctor --plain 7.07 --runs 2:2.10:4.37 3:2.29:4.29 4:2.39:4.48

The first two forms read the rates by position that vLLM and llama.cpp log. A rate says how often
the draft was accepted up to this position, so the rates fall, and 1 plus their sum is tau. In a log
of many such lines the last one counts.

The last form needs no rates. Each run is the draft length K, the mean acceptance length and the
milliseconds per token, and --plain gives the milliseconds per token without a draft. Two runs are
enough, because tau * time / plain is the cost of a round, and this is a straight line in K. Its
slope is c, and it starts at v.

c is the cost of a drafted token and v the cost of the target's pass over the draft, both relative
to a pass over one token. In --passes the costs may have any unit.
"""
import re
import sys
from itertools import pairwise

from control import Costs, expected_tokens, round_cost
from support import cli

TITLES = r"(?:per-position acceptance rate:|acceptance rate per position =|acc rate/pos =)"
RATES = re.compile(TITLES + r"\s*\(?((?:[\d.]+[,\s]*)+)", re.I)
MEAN = re.compile(r"mean (?:acceptance length|acc len)\s*[:=]\s*([\d.]+)", re.I)
LONGEST = 16    # the longest draft that the break-even point is looked for with


# --- reading


def read_line(text):
    """(rates by position, the mean acceptance length printed beside them or None)."""
    lines = [line for line in text.splitlines() if RATES.search(line)]
    if not lines:
        raise ValueError("no acceptance rates found: paste the line of vLLM with 'Per-position "
                         "acceptance rate:' or of llama.cpp with 'acceptance rate per position ='")
    rates = [float(x) for x in re.findall(r"\d*\.?\d+", RATES.search(lines[-1])[1])]
    if any(after > before for before, after in pairwise([1.0, *rates])):
        raise ValueError("the rates must lie between 0 and 1 and fall from position to position: "
                         "each counts the drafts that were accepted up to there")
    mean = MEAN.search(lines[-1])
    return rates, mean and float(mean[1])


def pair(text):
    width, cost = text.split(":")
    return int(width), float(cost)


def triple(text):
    length, tau, ms = text.split(":")
    return int(length), float(tau), float(ms)


def passes_of(pairs):
    """The cost of a pass over T tokens as a function of T. pairs: [(width, cost in any unit)]"""
    pairs = sorted(pairs)
    if pairs[0][0] != 1 or min(cost for _, cost in pairs) <= 0:
        raise ValueError("--passes needs the cost of a pass over one token (1:...), and no cost "
                         "may be 0 or less")
    one = pairs[0][1]
    return Costs((), 1.0, tuple((width, cost / one) for width, cost in pairs)).pass_cost


def fitted(runs, plain):
    """(c, v) of the straight line through the costs of rounds, by least squares. Here rounds cost
    2.2, 2.3 and 2.4 passes with drafts of 2, 3 and 4 tokens.

    >>> c, v = fitted([(2, 2.0, 11), (3, 2.3, 10), (4, 2.4, 10)], 10)
    >>> round(c, 3), round(v, 3)
    (0.1, 2.0)
    """
    lengths = [length for length, _, _ in runs]
    if len(set(lengths)) < 2:
        raise ValueError("--runs needs at least two runs with different draft lengths")
    rounds = [tau * ms / plain for _, tau, ms in runs]
    middle = sum(lengths) / len(runs)
    mean = sum(rounds) / len(runs)
    spread = sum((K - middle) ** 2 for K in lengths)
    c = sum((K - middle) * cost for K, cost in zip(lengths, rounds, strict=True)) / spread
    return c, mean - c * middle


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
        target = (longer - tau) / reach
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


def best(alpha, cost, pass_cost):
    """(K, speed-up) of the best draft length, 0 if none gains. alpha is given by
    position, and None counts as 0."""
    gains = [1.0]
    tau = 1.0
    reach = 1.0
    for K, a in enumerate(alpha, 1):
        reach *= a or 0.0
        tau += reach
        gains.append(tau / round_cost(K, cost, pass_cost(K + 1)))
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


def halved(alpha, cost, pass_cost):
    """{what limits the gain: the best speed-up with half of it}. Half as many rejections, half the
    price of a drafted token, and half of what a block costs more than a single token."""
    surer = [(1 + (a or 0.0)) / 2 for a in alpha]
    return {"alpha": best(surer, cost, pass_cost)[1],
            "c": best(alpha, cost / 2, pass_cost)[1],
            "v": best(alpha, cost, lambda T: (1 + pass_cost(T)) / 2)[1]}


def limit(alpha, cost, pass_cost):
    """Which of "alpha", "c" and "v" brings most if it is halved."""
    gains = halved(alpha, cost, pass_cost)
    return max(gains, key=gains.get)


WORDS = {"alpha": "half as many rejections", "c": "drafted tokens at half their cost",
         "v": "blocks at half of what they cost more than one token"}


def report(rates, cost, pass_cost):
    """The lines that are printed."""
    alpha = alphas(rates)
    lines = ["position  accepted  alpha    tau  round  speed-up"]
    for K, rate in enumerate(rates, 1):
        tau = 1 + sum(rates[:K])
        price = round_cost(K, cost, pass_cost(K + 1))
        shown = "    -" if alpha[K - 1] is None else f"{alpha[K - 1]:5.2f}"
        lines.append(f"{K:8}  {rate:8.3f}  {shown}  {tau:5.3f}  {price:5.2f}  {tau / price:8.2f}")
    K, gain = best(alpha, cost, pass_cost)
    tau = 1 + sum(rates)
    if K:
        lines.append(f"Best K: {K}. It brings {1 + sum(rates[:K]):.3f} of the {tau:.3f} tokens per "
                     f"round that K {len(rates)} brings, and {gain:.2f} times plain decoding.")
    else:
        lines.append("Best K: 0. At these costs no draft gains.")
    if K and K == len(rates):
        lines.append(f"Longer drafts than {K} were not measured and may be better.")
    even = break_even(cost, pass_cost)
    lines.append("No alpha breaks even: the passes cost too much." if even is None else
                 f"Break-even: drafting gains where alpha exceeds {even:.2f}.")
    gains = halved(alpha, cost, pass_cost)
    first = limit(alpha, cost, pass_cost)
    told = "; ".join(f"{WORDS[name]} {gains[name]:.2f}" for name in gains)
    lines.append(f"The limit is {first}. The best speed-up would be with {told}.")
    return lines


def run(argv):
    p = cli.Parser(description="What the acceptance rates of another engine mean.",
                   allow_abbrev=False)
    p.add_argument("line", nargs="?", metavar="LINE",
                   help="what it printed (default: standard input)")
    p.add_argument("--cost", type=float, default=0.0, metavar="C",
                   help="of a drafted token, in target passes over one token (default 0)")
    p.add_argument("--passes", type=pair, nargs="+", default=[(1, 1.0)], metavar="WIDTH:COST",
                   help="of the target's passes, in any unit (default: all cost the same)")
    p.add_argument("--plain", type=float, metavar="MS",
                   help="per token without a draft, for --runs")
    p.add_argument("--runs", type=triple, nargs="+", metavar="K:TAU:MS",
                   help="draft length, mean acceptance length, milliseconds per token")
    a = p.parse_args(argv)
    if (a.plain is None) != (a.runs is None):
        raise ValueError("--runs and --plain belong together")
    if a.cost < 0 or a.plain is not None and a.plain <= 0:
        raise ValueError("--cost must not be negative, and --plain must be positive")
    if a.runs:
        cost, v = fitted(a.runs, a.plain)
        print(f"c {cost:.3f}, v {v:.3f}: fitted to {len(a.runs)} runs")
        print(*report(rates_of(a.runs), cost, lambda T: v if T > 1 else 1.0), sep="\n")
        return
    rates, mean = read_line(cli.read_input() if a.line is None else a.line)
    if mean is not None and abs(mean - 1 - sum(rates)) > 0.02:
        print(f"The line prints a mean length of {mean:.2f}, but its rates add up to "
              f"{1 + sum(rates):.2f}: what follows takes the rates.")
    print(*report(rates, a.cost, passes_of(a.passes)), sep="\n")


def main(argv=None):
    return cli.main(run, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
