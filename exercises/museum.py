"""A museum of bugs that real projects shipped. Each exhibit is a change of our code and the
smallest input that shows it. How far its distribution is from the target's is computed here. The
tour is museum.md.

    python exercises/museum.py                          all exhibits
    python exercises/museum.py --five 7                 which of five verifiers is wrong? None of
                                                        them is on that page
    python exercises/museum.py --five 7 --answer 3 --p .6 .3 .1 --q .2 .3 .5
                                                        number 3, as these p and q show
"""
import argparse
import ast
import difflib
import itertools
import random
import re
import sys
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from tiny import TINY, Fixed, Says, law, make, state_of, wide  # noqa: E402

import minimal  # noqa: E402
from drafter import chain  # noqa: E402
from exercises import answers  # noqa: E402
from exercises.cuts import bare, change, find, read  # noqa: E402
from exercises.serving import constrain, ring_mask, ring_size  # noqa: E402
from methods.trees import verify_tree  # noqa: E402
from sampling import Coins, to_probs  # noqa: E402
from speculative import until  # noqa: E402
from verification import verify  # noqa: E402

OURS = {"verify": verify, "verify_tree": verify_tree, "chain": chain, "until": until,
        "to_probs": to_probs,
        "Coins": Coins, "rounds_with_cache": minimal.rounds_with_cache, "constrain": constrain,
        "ring_size": ring_size}
WARM = {"temperature": 1.0}


class Exhibit(NamedTuple):
    """A bug. p, q: a distribution for each place, the same whatever came before."""
    name: str
    file: str               # of ours,
    scope: str              # the function that is changed,
    changes: tuple          # and how: (what stands there, what instead), ...
    p: list = ()            # (K+1, V)
    q: list | None = None   # (K, V), or None: the draft is copied
    case: dict = {}         # what else is given: copied, eos, sampling, points, grammar, rounds

    @property
    def where(self):
        """Where its lines stand: those of `verify` also in the frame that it shares."""
        return "" if self.file == "verification.py" else self.scope


# --- the law of a verifier


def changed(e):
    """(the name of what is changed, it with the bug, its source, our source)"""
    ours = (ROOT / e.file).read_text(encoding="utf-8")
    source = ours
    for old, new in e.changes:
        source = change(source, e.where, old, new)
    name = e.scope.split(".")[0]
    space = {"__name__": e.file.removesuffix(".py").replace("/", "."),
             "__file__": str(ROOT / e.file)}
    exec(compile(source, e.file, "exec"), space)    # our own source, with these lines changed
    return name, space[name], source, ours


def diff(e):
    """The changed lines, as `-` and `+`."""
    *_, source, ours = changed(e)
    old, new = (bare(find(ast.parse(text), e.where)).splitlines() for text in (ours, source))
    return [line.rstrip() for line in difflib.ndiff(old, new) if line[0] in "+-"]


def round_of(e, tools, rounds):
    """run(coins) -> the text that so many rounds write, completed with draws from p to as many
    tokens as p has rows, or to an end of text."""
    sampling, eos = (e.case.get(key, default) for key, default in (("sampling", WARM), ("eos", ())))
    grammar = torch.tensor(e.case["grammar"]) if "grammar" in e.case else None
    right = to_probs(wide(e.p).log(), **sampling)                               # (N, V)
    K = len(e.q or e.case["copied"])

    def round_after(before, coins):
        state = state_of([[0]], [9], lambda x: to_probs(x, **sampling), coins)
        if e.q is None:
            tokens, q = torch.tensor([e.case["copied"]]), None
        else:
            draft = tools["chain"](state, lambda token, k: wide(e.q)[k].log()[None, None], Says(K))
            tokens, q = draft.tokens, draft.q
        p = tools["to_probs"](wide(e.p)[len(before) : len(before) + K + 1].log(), **sampling)[None]
        if grammar is not None:
            p = tools["constrain"](p, tokens, grammar, torch.tensor([0]))
        if e.scope == "verify_tree":        # a chain is also a tree
            accepted, token = tools["verify_tree"](p, tokens, torch.arange(K)[None], coins, q)
        else:
            accepted, token = tools["verify"](p, q, tokens, coins)
        return tools["until"](eos, [*before, *tokens[0, : int(accepted)].tolist(), int(token)])

    def once(coins):
        text = []
        for _ in range(rounds):
            text = round_after(text, coins)
        while len(text) < len(right) and not set(eos) & set(text):
            text = [*text, int(coins.choose(masked(right[len(text)], grammar, text)))]
        return tuple(text)
    return once


def masked(row, grammar, text):
    """p after a text, without what the grammar forbids, if there is one; it starts in state 0."""
    if grammar is None:
        return row
    state = 0
    for token in text:
        state = max(0, int(grammar[state, token]))
    row = row * (grammar[state] >= 0)
    return row / row.sum()


def in_a_ring(slots, coins):
    """The text that two rounds write of a layer with a window of 2, after the tokens 0 and 1,
    drafting one token from 1/2, 1/2. Its p of token 1 is 0.8, and 0.3 less for each 1 that it
    reads."""
    text = [0, 1]
    ring = {0: 0, 1: 1}
    q = wide([[0.5, 0.5]])
    for _ in range(2):
        last = len(text) - 1
        draft = coins.choose(q)
        ring[last % slots] = text[last]
        ring[(last + 1) % slots] = int(draft)
        ones = [sum(ring[s] for s in range(slots) if row[s])
                for row in ring_mask(last, 2, slots, 2).tolist()]
        p = wide([[0.2 + 0.3 * n, 0.8 - 0.3 * n] for n in ones])
        accepted, token = verify(p[None], q[None], draft[None], coins)
        text += [int(draft)] * int(accepted) + [int(token)]
    return tuple(text[2:4])


def law_by_points(run, coins, points):
    """For a bug that uses a uniform twice: {text: share of the points (N, uniforms) at which it
    comes}."""
    kind = type("", (coins,), {"__init__": Fixed.__init__, "take": Fixed.take})
    found = {}
    for row in points:
        one = kind(*row)
        one.noise = -(-row[-3:]).log1p()        # of three tokens: see `machine.exact.Race`
        one.seed = int(row[-4] * 2**40)
        text = run(one)
        found[text] = found.get(text, 0.0) + 1 / len(points)
    return found


def laws(e, tools=None):
    """(the law of the exhibit's verifier, the right one): {text: probability}. tools: ours instead
    of it."""
    if tools is None:
        name, function, *_ = changed(e)
        tools = OURS | {name: function}
    if e.scope == "rounds_with_cache":
        model = make(TINY, 1)       # a model of three tokens that drafts with its first block
        return tuple(law(lambda coins, rounds=rounds: tuple(t for *_, new in rounds(
            model, [1], 3, 1, 1, lambda x: to_probs(x, 1.0), coins) for t in new))
            for rounds in (tools[e.scope], minimal.rounds))
    if e.scope == "ring_size":
        return tuple(law(partial(in_a_ring, slots)) for slots in (tools["ring_size"](2, 1), 99))
    right = law(round_of(e, tools, 0))
    run = round_of(e, tools, e.case.get("rounds", 1))
    if "points" in e.case:
        return law_by_points(run, tools["Coins"], e.case["points"]()), right
    return law(run), right


def off(e, tools=None):
    """How far the law of an exhibit's verifier is from the target's: half the sum of the
    differences. 0: the same law, 1: nothing in common."""
    one, two = laws(e, tools)
    return sum(abs(one.get(key, 0.0) - two.get(key, 0.0)) for key in one.keys() | two.keys()) / 2


def sobol():
    """Points that fill a cube evenly: what is computed with them is right to 0.002."""
    return torch.quasirandom.SobolEngine(9).draw(2**13, dtype=torch.float64).clamp(1e-12, 1 - 1e-12)


# --- the exhibits

HALF, FIFTH = [0.5, 0.5], [0.2, 0.8]
INPUTS = {      # of each exhibit: p, q, and what else is given
    "every draft is accepted": ([HALF, HALF], [FIFTH]),
    "the residual through a softmax": ([HALF, HALF], [FIFTH]),
    "only the rejected token is set to zero": ([[0.2, 0.4, 0.4]] * 2, [[0.6, 0.4, 0.0]]),
    "the replacement comes from the next row": ([[1.0, 0.0], [0.0, 1.0]], [HALF]),
    "the bonus token is the likeliest one": ([HALF, [0.6, 0.4]], [HALF]),
    "the bonus token forgets the temperature, here 0.5": ([HALF, FIFTH], [HALF]),
    "one uniform decides twice": ([[0.4, 0.4, 0.2]] * 2, [[0.2, 0.2, 0.6]], {"points": sobol}),
    "draft and residual race by the same noise":
        ([[0.1, 0.6, 0.3], [1.0, 0.0, 0.0]], [[0.6, 0.3, 0.1]], {"points": sobol}),
    "the draft is argmax, q is soft": ([HALF, HALF], [[0.8, 0.2]]),
    "drawn from the cut q, judged by the whole one":
        ([[0.5, 0.5, 0.0]] * 2, [[0.4, 0.3, 0.3]], {"sampling": WARM | {"top_k": 2}}),
    "block verification by products of uniforms":
        ([[1 / 3, 2 / 3]] * 3, [[2 / 3, 1 / 3]] * 2, {"points": sobol}),
    "the first draft is never tested": ([[1.0, 0.0]] * 2, None, {"copied": [1]}),
    "of equal logits the last one wins":
        ([HALF, HALF], None, {"copied": [0], "sampling": {"temperature": 0.0}}),
    "a coin of 0 accepts what has no chance":
        ([[1.0, 0.0]] * 2, [[0.0, 1.0]], {"points": lambda: wide([[0.0] * 9])}),
    "an end of text inside the draft is passed over": ([HALF, HALF], [HALF], {"eos": [0]}),
    "the draft draws the same number each round":
        ([HALF] * 4, [HALF], {"points": sobol, "rounds": 2}),
    "one state of the grammar for the whole block":
        ([HALF, HALF], [HALF], {"grammar": [[1, -1], [-1, 0]]})}
ROWS = itertools.groupby(read(Path(__file__).with_suffix(".txt")), key=lambda row: row.why)
FOUND = [Exhibit(name, rows[0].file, rows[0].scope, tuple((row.old, row.new) for row in rows),
                 *INPUTS.get(name, ()))
         for name, rows in ((name, list(group)) for name, group in ROWS)]
EXHIBITS = [e for e in FOUND if not e.name.startswith("right")]
RIGHT = [e for e in FOUND if e.name.startswith("right")]    # other ways to write `verify`


# --- which of these five is wrong?


PROBES = ([0.5, 0.3, 0.2], [0.2, 0.2, 0.6]), ([0.1, 0.6, 0.3], [0.3, 0.3, 0.4])


@cache
def unprinted():
    """Wrong verifiers that museum.md does not show: those wrong answers to exercise 9 of which one
    line is changed, and whose law is off."""
    found = []
    for old, new, why in answers.changes("verify"):
        if not why or re.search(r"import|torch\.allclose|set_grad|globals|coins\.flip =", new):
            continue        # what goes around the exercise
        e = Exhibit(why, "verification.py", "verify", ((old, new),))
        with suppress(Exception):       # some do not run, or fit another function as well
            if any(off(e._replace(p=[p] * 3, q=[q] * 2)) > 0.01 for p, q in PROBES):
                found.append(e)
    return found


def five(seed):
    """Five verifiers, of which one is wrong, and its number from 1."""
    rng = random.Random(seed)
    rows = [rng.choice(unprinted()), *rng.sample(RIGHT, 4)]
    wrong = rows[0]
    rng.shuffle(rows)
    return rows, rows.index(wrong) + 1


def rows(table):
    return "; ".join(", ".join(f"{x:.3g}" for x in row) for row in table)


def show(e):
    """The lines of an exhibit."""
    yield from diff(e)
    if e.p:
        drawn = f"q {rows(e.q)}" if e.q else f"the draft {e.case['copied']}, copied"
        extra = [f", {key} {e.case[key]}" for key in e.case if key not in ("copied", "points")]
        yield f"p {rows(e.p)}   {drawn}{''.join(extra)}"
    yield f"off by {off(e):.3f}"


def judge(seed, number, p, q):
    """What there is to say about an answer to `five`: (is it right?, a sentence)."""
    shown, wrong = five(seed)
    if not 1 <= number <= len(shown):
        raise ValueError(f"--answer must be a number from 1 to {len(shown)}, got {number}")
    for name, row in (("p", p), ("q", q)):
        if len(row) != len(p) or len(row) < 2 or min(row) < 0 or abs(sum(row) - 1) > 1e-6:
            raise ValueError(f"--{name} must be a distribution, both of as many tokens, got {row}")
    far = off(shown[number - 1]._replace(p=[p, p, p], q=[q, q]))
    if far > 1e-9:
        return True, f"right: with these p and q, number {number} is off by {far:.3f}"
    if number == wrong:
        return False, f"number {number} is wrong, but with these p and q its law is right"
    return False, f"the law of number {number} is right for these p and q, and for all others"


def main(argv=None):
    p = argparse.ArgumentParser(
        description="Bugs that real projects shipped, and how far off they are.")
    p.add_argument("--five", type=int, metavar="SEED",
                   help="which of these five verifiers is wrong?")
    p.add_argument("--answer", type=int, metavar="N", help="the number of the wrong one")
    p.add_argument("--p", type=float, nargs="+", metavar="X", help="and p, the same at each place,")
    p.add_argument("--q", type=float, nargs="+", metavar="X", help="and q, for which it is off")
    a = p.parse_args(argv)
    if a.five is None:
        for i, e in enumerate(EXHIBITS, 1):
            print(f"{i}. {e.name}", *show(e), "", sep="\n")
        return 0
    if a.answer is None:
        for i, e in enumerate(five(a.five)[0], 1):
            print(f"{i}.", *diff(e), "", sep="\n")
        return 0
    try:
        right, text = judge(a.five, a.answer, a.p or [], a.q or [])
    except ValueError as e:
        p.error(str(e))
    print(text)
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
