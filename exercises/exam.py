"""The answers of exam.md for numbers of your own. Print them, and change the numbers in the
questions.

    python exercises/exam.py --p .5 .3 .2 --q .2 .3 .5 --alpha .7 --cost .2
"""
import argparse
import sys
from itertools import product


def verifier(p, q):
    """Question 1: (how often a draft is accepted, what comes after a rejection, the law of the
    first token if the replacement is drawn from p, its distance from p)."""
    accepted = [min(a, b) for a, b in zip(p, q, strict=True)]
    rate = sum(accepted)
    rest = [a - both for a, both in zip(p, accepted, strict=True)]
    wrong = [both + (1 - rate) * a for a, both in zip(p, accepted, strict=True)]
    distance = sum(abs(a - b) for a, b in zip(p, wrong, strict=True)) / 2
    return rate, [x / sum(rest) for x in rest] if sum(rest) else p, wrong, distance


def weights(p, q, draft):
    """The weight of each prefix of a draft by blocks, the empty one first."""
    found = [1.0]
    for t in draft:
        found.append(min(1.0, found[-1] * p[t] / q[t]))
    return found


def blocks(p, q, draft=(0, 1)):
    """Question 2: for each of the two rules, token by token and by blocks, (how often the whole
    draft is accepted, how many tokens of all drafts of its length are accepted on average)."""
    by_token = 1.0
    for t in draft:
        by_token *= min(1.0, p[t] / q[t])
    rate = verifier(p, q)[0]
    mean = 0.0
    for drawn in product(range(len(q)), repeat=len(draft)):
        chance = 1.0
        for t in drawn:
            chance *= q[t]
        if chance:      # at least i tokens are accepted with probability w_i
            mean += chance * sum(weights(p, q, drawn)[1:])
    return ((by_token, sum(rate ** i for i in range(1, len(draft) + 1))),
            (weights(p, q, draft)[-1], mean))


def pays(alpha, cost, wide=1.5, most=3):
    """Question 3: (the speeds of one to `most` drafted tokens, that of two where the pass over
    three tokens costs `wide`, the share of two drafted tokens that is accepted)."""
    tokens = [sum(alpha ** i for i in range(gamma + 1)) for gamma in range(most + 1)]
    speeds = [tokens[gamma] / (1 + gamma * cost) for gamma in range(1, most + 1)]
    return speeds, tokens[2] / (wide + 2 * cost), (tokens[2] - 1) / 2


def cache(known, drafted, accepted):
    """Question 4: (the slots that the pass writes, those that are dead afterwards, the slot at
    which the next block starts)."""
    written = list(range(known - 1, known + drafted))
    start = known + accepted
    return written, [slot for slot in written if slot >= start], start


def row(numbers):
    return ", ".join(f"{x:.4g}" for x in numbers)


def main(argv=None):
    a = argparse.ArgumentParser(description="The answers of exam.md for your own numbers.")
    a.add_argument("--p", type=float, nargs="+", default=[0.6, 0.3, 0.1], metavar="X")
    a.add_argument("--q", type=float, nargs="+", default=[0.3, 0.3, 0.4], metavar="X")
    a.add_argument("--block-p", type=float, default=0.25, metavar="X", help="p of token 0 of two")
    a.add_argument("--block-q", type=float, default=0.75, metavar="X", help="q of token 0 of two")
    a.add_argument("--alpha", type=float, default=0.6)
    a.add_argument("--cost", type=float, default=0.25, help="the paper's c")
    a.add_argument("--wide", type=float, default=1.5, help="the cost of a pass over three tokens")
    a.add_argument("--cache", type=int, nargs=3, default=[5, 3, 1],
                   metavar=("KNOWN", "DRAFTED", "ACCEPTED"))
    args = a.parse_args(argv)
    for name, x in (("p", args.p), ("q", args.q)):
        if len(x) != len(args.p) or min(x) < 0 or abs(sum(x) - 1) > 1e-6:
            a.error(f"--{name} must be a distribution, both of as many tokens, got {x}")
    for name, x in (("block-p", args.block_p), ("block-q", args.block_q), ("alpha", args.alpha)):
        if not 0 < x < 1:
            a.error(f"--{name} must lie between 0 and 1, got {x}")
    rate, after, wrong, off = verifier(args.p, args.q)
    print(f"1. (a) {rate:.4g} (b) ({row(after)}) (c) ({row(wrong)}), off by {off:.4g} (d) q = p")
    tokens, whole = blocks([args.block_p, 1 - args.block_p], [args.block_q, 1 - args.block_q])
    print(f"2. (a) {tokens[0]:.4g} token by token, {whole[0]:.4g} by blocks "
          f"(b) {tokens[1]:.4g} and {whole[1]:.4g}")
    speeds, slow, share = pays(args.alpha, args.cost, args.wide)
    print(f"3. (a) {row(speeds)} (b) {slow:.4g} (c) {share:.4g}")
    written, dead, start = cache(*args.cache)
    print(f"4. (a) slots {written} (b) {dead} are dead (c) the next block starts at {start}")


if __name__ == "__main__":
    sys.exit(main())
