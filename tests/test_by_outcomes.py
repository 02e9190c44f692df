"""`verify` and `verify_tree` by their outcomes, all enumerated: what counts is the distribution
of the text. A verifier that keeps few drafts may be right all the same, so each text is completed
by p before it is compared, and what is kept is only remarked on. A wrong one is told from others by
what the mistakes of exercises/wrong.txt give."""
import itertools
import math
from functools import partial
from typing import NamedTuple

import pytest
import torch
from teach import Mistakes, fail, promise, same_law
from tiny import law, plant, wide

from methods.trees import verify_tree
from sampling import Coins
from verification import verify


class Tables(NamedTuple):
    """The distributions of target and draft after each token. The last row, -1, is the first
    token's."""
    p: torch.Tensor     # (V + 1, V)
    q: torch.Tensor     # (V + 1, V)


def mixed(V, seed):
    p, q = torch.rand(2, V + 1, V, generator=torch.Generator().manual_seed(seed),
                      dtype=torch.float64) + 0.1
    return Tables(p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True))


def mostly_sure(V=300, unsure=(0, 3, 8)):
    """Tables of a long text 0, 1, 2, ... of a large vocabulary. Only after the tokens `unsure` is
    the next one in doubt."""
    p = torch.eye(V, dtype=torch.float64)[[*range(1, V), 0, 0]]
    q = p.clone()
    for t in unsure:
        p[t] = q[t] = 0
        p[t, [t + 1, t + 50, 299]] = wide([0.5, 0.3, 0.2])
        q[t, [t + 1, t + 50]] = wide([0.8, 0.2])
    return Tables(p, q)


P = wide([[0.1, 0.2, 0.7], [0.6, 0.3, 0.1], [0.25, 0.25, 0.5], [0.45, 0.2, 0.35]])
Q = wide([[0.1, 0.201, 0.699], [0.2, 0.2, 0.6], [0.5, 0.35, 0.15], [0.2, 0.75, 0.05]])
SMALL, FOUR, LONG = Tables(P, Q), mixed(4, 1), mostly_sure()
CLOSE = Tables(P, P + wide([1e-8, -2e-8, 1e-8]))        # what a rejection leaves is next to nothing
GREEDY = Tables(torch.eye(3, dtype=torch.float64)[[1, 2, 0, 2]], Q)     # a target that is sure
RARE = Tables(wide([[1e-6, 0.4, 0.599999]] * 4), Q)     # a token that the target seldom writes
NAMED = {"rare": RARE, "small": SMALL, "four": FOUR, "long": LONG, "greedy": GREEDY}


def target_law(p, count, start=()):
    """{text: probability} of drawing tokens from p after the text `start`, until it has `count`."""
    found = {tuple(start): 1.0}
    for _ in range(count - len(start)):
        found = {(*text, t): weight * float(p[text[-1] if text else -1, t])
                 for text, weight in found.items()
                 for t in p[text[-1] if text else -1].nonzero()[:, 0].tolist()}
    return found


def completed(found, *tables, count):
    """{text or texts: probability}, each completed to `count` tokens by its p."""
    whole = {}
    for texts, weight in found.items():
        laws = [target_law(tables[b], count, text) for b, text in enumerate(texts)]
        outcomes = {(): weight}
        for one in laws:
            outcomes = {(*done, text): w * x for done, w in outcomes.items()
                        for text, x in one.items()}
        for outcome, w in outcomes.items():
            whole[outcome] = whole.get(outcome, 0.0) + w
    return whole


def planted(coins, parents, tables, copied=None):
    """Drafts drawn from q, or `copied` ones. Returns their tokens, what each was drawn from, and
    the way to each. The parents of a chain of K are range(K)."""
    if copied is None:
        return plant(parents, lambda way: tables.q[way[-1] if way else -1], coins)
    way = [()]
    for token, parent in zip(copied, parents, strict=True):
        way.append((*way[parent], token))
    return copied, None, way


def after(way, p):
    """The target's distributions at the start and after each draft: rows of p."""
    return torch.stack([p[path[-1] if path else -1] for path in way])


def written(verifier, parents, count, copied=None, tables=SMALL, length=None):
    """A run of one round, which plants drafts and verifies them. Its outcome is a text of at most
    `count` tokens, alone in a tuple."""
    def once(coins):
        tokens, q, way = planted(coins, parents, tables, copied)
        node, token = verifier(after(way, tables.p), q, tokens, parents, coins, length)
        most = len(tokens) if length is None else length
        if not 0 <= node <= most:
            bonus = "the bonus token is counted as accepted; it is not a draft"
            fail(f"{most} proposed tokens", f"the last accepted one, 0 (none) to {most}", node,
                 bonus if length is None else DEAD)
        return (*way[node], token)[:count],
    return once


DEAD = "`length` is ignored: what a row does not propose is dead, and is never accepted"


def writes_the_law(verifier, given, parents, count, copied=None, tables=SMALL, length=None,
                   otherwise=None):
    """The texts of a round have the distribution of plain decoding; if not, the likely mistake is
    named, or `otherwise`: where it is given, easier cases would have shown each mistake."""
    case = parents, count, copied, tables, length
    want = {(text,): weight for text, weight in target_law(tables.p, count).items()}
    wrong = {}
    if verifier in NAMES and not otherwise:
        wrong = Mistakes(NAMES[verifier], lambda judge, coins: written(
            partial(verifier, judge=judge), *case)(coins), run=True)
    same_law(written(verifier, *case), want, wrong,
             f"{given}, in a vocabulary of {tables.p.shape[1]} tokens; the text must have the "
             "distribution of plain decoding, {text: probability}", otherwise,
             lambda found: completed(found, tables.p, count=count))


def one_row(p, q, tokens, parents, coins, length, judge=verify):
    """`verify`, or another judge of chains, called for one row."""
    found = judge(p[None], None if q is None else torch.stack(q)[None],
                  torch.tensor([tokens], dtype=torch.long), coins,
                  None if length is None else torch.tensor([length]))
    return numbers(found, "accepted", "token")


def one_walk(p, q, tokens, parents, coins, length, judge=verify_tree):
    """`verify_tree`, or another judge of trees, called for one row."""
    found = judge(p[None], torch.tensor([tokens], dtype=torch.long),
                  torch.tensor([list(parents)], dtype=torch.long), coins,
                  None if q is None else torch.stack(q)[None],
                  None if length is None else torch.tensor([length]))
    return numbers(found, "node", "token")


def numbers(found, *names):
    """What a verifier returns for one row."""
    for name, got in zip(names, found, strict=True):
        if not isinstance(got, torch.Tensor) or got.shape != (1,):
            fail("one row", f"{name} as a tensor (B,) = (1,)", f"{got!r:.100}")
    return tuple(map(int, found))


NAMES = {one_row: "verify", one_walk: "verify_tree"}    # the exercises that they stand for


# --- verify


def test_verify_a_rare_token():
    writes_the_law(one_row, "1 draft from q, where p gives token 0 a millionth", [0], 2,
                   tables=RARE, otherwise="a draft with p > 0 is accepted with probability p/q, "
                                          "however small p is")


@pytest.mark.parametrize("K, length", [(1, None), (2, None), (2, 1), (3, None)])
def test_verify_drawn_drafts(K, length, record_property):
    writes_the_law(one_row, f"{K} draft{'s' * (K > 1)} from q, {length or K} proposed",
                   range(K), K + 1, length=length, otherwise=None if K < 3 else LATER)

    def keeps(coins):
        (token,), q, way = planted(coins, [0], SMALL)
        return one_row(after(way, P), q, [token], [0], coins, None)[0] > 0

    kept = law(keeps).get(True, 0.0)
    most = float(torch.minimum(P[-1], Q[-1]).sum())
    if kept < most - 1e-9:
        record_property("remark", "right, but it gains less than it could: it accepts "
                        f"{kept:.0%} of single drafts, where min(1, p/q) accepts {most:.0%}, the "
                        "sum of min(p, q)")


LATER = ("one draft and two come out right; from the third draft on, is each judged and replaced "
         "by its own rows of p and q, and only if all before it were accepted?")


@pytest.mark.parametrize("tokens, tables", [
    ([], "small"), ([1], "small"), ([2, 0, 1], "small"),
    ([2, 0], "greedy"), ([2, 1], "greedy"), ([0], "rare")])
def test_verify_copied_drafts(tokens, tables):
    """Copied proposals have no q: it is a one-hot. So is the p of a greedy target."""
    given = f"the copied proposals {tokens}, q = None"
    given += ", p greedy: 2, 0, 1, ..." * (tables == "greedy")
    writes_the_law(one_row, given, range(len(tokens)), len(tokens) + 1, tokens, NAMED[tables])


@pytest.mark.parametrize("verifier, parents",
                         [(one_row, [0, 1]), (one_walk, [0, 1]), (one_walk, [0, 0])],
                         ids=["verify", "verify_tree", "siblings"])
def test_where_p_is_almost_q(verifier, parents):
    writes_the_law(verifier, f"drafts that hang on the nodes {parents}", parents, 3, tables=CLOSE,
                   otherwise=LATER)


def rows_stand_for_themselves(verifier, parents, lengths, unsure, dead=None):
    """Some texts in one batch. Row `unsure` has drafts from q; the targets of the others are sure
    of each token, and some of their drafts are right. What a row does not propose may hold
    anything, even NaN: `dead`. None: all drafts are copied, and there is no q."""
    B = len(lengths)
    eye = torch.eye(3, dtype=torch.float64)
    tables = [eye[[(t + 1 + b) % 3 for t in range(3)] + [b % 3]] for b in range(B)]
    tables[unsure] = P
    drafts = [[b % 3, (2 * b + 1 + b % 2) % 3] for b in range(B)]
    if dead is not None:
        drafts[unsure] = None

    def once(coins):
        rows = [planted(coins, *row) for row in zip(parents, [SMALL] * B, drafts, strict=True)]
        p = torch.stack([after(way, table) for (*_, way), table in zip(rows, tables, strict=True)])
        ids, qs = torch.tensor([tokens for tokens, *_ in rows]), None
        if dead is not None:
            qs = torch.stack([eye[tokens] if q is None else torch.stack(q)
                              for tokens, q, _ in rows])
            qs[torch.arange(2) >= torch.tensor(lengths)[:, None]] = dead
        length = None if min(lengths) == 2 else torch.tensor(lengths)
        node, token = verifier(p, ids, qs, coins, length)
        if not all(0 <= n <= most for n, most in zip(node, lengths, strict=True)):
            fail(f"rows of {lengths} proposals", "no more accepted than proposed",
                 node.tolist(), DEAD)
        return tuple((*way[n], t)[:3] for (*_, way), n, t in zip(
            rows, node.tolist(), token.tolist(), strict=True))

    drawn = "copied: q = None" if dead is None else f"drawn, and q of the dead ones is {dead}"
    same_law(once, completed({((),) * B: 1.0}, *tables, count=3), {},
             f"{B} rows that propose {lengths} tokens, which are {drawn}; {{texts: probability}}",
             "each row has its own rows of p and q, its own parents, and its own length; where NaN "
             "came, what is dead is computed with: 0 * NaN is NaN, so choose with torch.where or "
             "by an index", lambda found: completed(found, *tables, count=3))


batches = pytest.mark.parametrize("unsure, lengths, dead", [
    (0, [2, 1], math.nan), (1, [0, 2], 0.2), (2, [1, 0, 2, 1], 0.2), (3, [0, 1, 2, 2], math.nan),
    (1, [2, 2, 2], 0.2), (0, [1, 2, 0], None), (3, [2, 2, 2, 2], None)], ids=str)


def chains_stand_for_themselves(judge, lengths, unsure, dead):
    def verifier(p, tokens, q, coins, length):
        return judge(p, q, tokens, coins, length)

    rows_stand_for_themselves(verifier, [range(2)] * len(lengths), lengths, unsure, dead)


@batches
def test_verify_rows_stand_for_themselves(unsure, lengths, dead):
    chains_stand_for_themselves(verify, lengths, unsure, dead)


@pytest.mark.parametrize("verifier", [
    lambda p, tokens, coins: verify(p, None, tokens, coins),
    lambda p, tokens, coins: verify_tree(p, tokens, tokens[:1], coins)],
    ids=["verify", "verify_tree"])
def test_a_batch_without_a_draft(verifier):
    """Plain decoding of three texts: one token each, from the row's own p."""
    def once(coins):
        accepted, token = verifier(P[:3, None], torch.zeros(3, 0).long(), coins)
        promise(not accepted.any(), "three texts, K = 0", "[0, 0, 0] accepted", accepted)
        return tuple(token.tolist())

    want = {ids: float(P[range(3), ids].prod()) for ids in itertools.product(range(3), repeat=3)}
    same_law(once, want, {}, "three texts, K = 0 and q = None; {tokens: probability}",
             "each row draws from its own p")


@pytest.mark.parametrize("verifier", [one_row, one_walk])
def test_where_nothing_is_left(verifier):
    """p is q up to rounding, and gives token 2 nothing. The chance of a rejection is one in a
    billion."""
    q, p = wide([0.5, 0.5, 0.0]), wide([0.5, 0.5 - 1e-9, 0.0])
    outcomes = law(lambda coins: verifier(torch.stack([p, p]), [q], [1], [0], coins, None))
    never = [weight for (_, token), weight in outcomes.items() if token == 2]
    if never:
        why = "an empty residual is made uniform, so tokens come that the target never writes"
        if math.isnan(never[0]):
            why = "rounding can reject a draft where p = q, and then nothing is left to draw from"
        fail("p = [.5, .5 - 1e-9, 0], q = [.5, .5, 0], and token 1 rejected",
             "token 0 or 1", "token 2",
             f"{why}; where nothing is left of max(p - q, 0), p itself is right")


def test_verify_refuses_another_vocabulary():
    given = "p of 3 tokens, q of 4, and the draft 1"
    try:
        got = verify(wide([[[0.2, 0.3, 0.5]] * 2]), wide([[[0.25] * 4]]),
                     torch.tensor([[1]]), Coins(0))
    except ValueError as e:
        got = str(e)
    except RuntimeError as e:
        got = f"RuntimeError: {e}"
    promise("vocabulary" in str(got), given, "a ValueError that names both vocabularies", str(got),
            "call check_vocabulary(p, q), which is in scope, before anything else")


# --- verify_tree


@pytest.mark.parametrize("parents, tables, length", [
    ([0], "small", None), ([0, 0], "small", None), ([0, 1, 0], "small", None),
    ([0, 0, 2], "small", None), ([0, 0, 1, 1], "small", None), ([0, 1, 2], "small", None),
    ([0, 0, 0], "four", None), ([0, 1, 0], "small", 2), ([0, 0, 1], "small", 1),
    ([0, 1, 1, 2, *range(4, 9)], "long", None)], ids=str)
def test_verify_tree_drawn_siblings(parents, tables, length):
    proposed = len(parents) if length is None else length
    writes_the_law(one_walk, "a tree of siblings drawn without replacement, which hang on the "
                   f"nodes {parents}, {proposed} of them proposed", parents,
                   min(len(parents), 4 if tables == "small" else 10), tables=NAMED[tables],
                   length=length)


@pytest.mark.parametrize("parents, tokens, tables", [
    ([], [], "small"), ([0, 0, 2], [1, 2, 0], "small"), ([0, 0], [1, 1], "small"),
    ([0, 0, 1, 1], [0, 2, 1, 2], "small"), ([0, 1, 1, 1], [2, 3, 0, 1], "four"),
    ([0, 1, 2, 2, 2], [1, 0, 0, 3, 2], "four")], ids=str)
def test_verify_tree_copied_siblings(parents, tokens, tables):
    writes_the_law(one_walk, f"the copied tokens {tokens}, which hang on the nodes {parents}, "
                   "q = None", parents, max(1, min(len(parents), 4)), tokens, NAMED[tables])


@batches
@pytest.mark.parametrize("parents", [[[0, 0], [0, 1]], [[0, 0]]],
                         ids=["own parents", "shared parents"])
def test_verify_tree_rows_stand_for_themselves(parents, unsure, lengths, dead):
    """Each row has its parents, or one row of them stands for all."""
    B = len(lengths)
    given = torch.tensor(parents if len(parents) == 1 else (parents * B)[:B])

    def verifier(p, tokens, q, coins, length):
        return verify_tree(p, tokens, given, coins, q, length)

    rows_stand_for_themselves(verifier, given.expand(B, 2).tolist(), lengths, unsure, dead)
