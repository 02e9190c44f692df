"""`chain` by its outcomes, all enumerated: exercise 10. What the library's own must keep, its
loop shows."""
import random
from functools import partial

import pytest
import torch
from teach import Mistakes, compare, fail, same_law, short
from tiny import Branch, Says, law, state_of, wide

from drafter import chain
from sampling import Coins

LOGITS = wide([[0.0, 1.0, 2.0], [2.0, 0.5, 0.0], [1.0, 0.0, 0.5]])     # by the last token


def best_two(logits):
    """A setting that the raw softmax does not know of: of each distribution the best two tokens
    stay."""
    p = logits.softmax(-1)
    p = p * (p >= p.topk(2, -1).values[..., -1:])
    return p / p.sum(-1, keepdim=True)


def draft(chain, rule, coins, known=([1, 0],), left=(9, 9)):
    """What chain returns for these texts: rows of live tokens, q (B, K, V), and how often it
    stepped."""
    steps = []
    state = state_of([*map(list, known)], list(left)[: len(known)], best_two, coins)

    def step(token, k):
        steps.append(k)
        if k != len(steps) - 1:
            fail("the steps of a chain", f"step(token, {len(steps) - 1})", f"step(token, {k})",
                 "k is the offset of the token that is read: "
                 "0 for the last known one, then 1, 2, ...")
        return LOGITS[token]                                                    # (B, 1, V)

    draft = chain(state, step, rule)
    K = draft.tokens.shape[1]
    live = [K] * len(known) if draft.length is None else draft.length.tolist()
    rows = [row[:n] for row, n in zip(draft.tokens.tolist(), live, strict=True)]
    return rows, draft.q, len(steps)


def lengths(chain, *given):
    return torch.tensor([len(row) for row in draft(chain, *given)[0]])


def draws(rule, given, last=None):
    """A chain after token 0 has the distribution of draws one by one, which end after `last`."""
    def one_by_one(coins):
        tokens = [0]
        while len(tokens) <= rule.how_far(None) and tokens[-1] != last:
            tokens.append(int(coins.choose(best_two(LOGITS[tokens[-1]]))))
        return tuple(tokens[1:])

    def run(chain, coins):
        return tuple(draft(chain, rule, coins)[0][0])

    same_law(partial(run, chain), law(one_by_one), Mistakes("chain", run, run=True),
             f"{given}, a text that ends with token 0; {{drafted tokens: probability}}",
             "each token is drawn from state.probs(step(the token before it))")


def test_chain_draws_each_token_after_the_one_before():
    draws(Says(2), "gamma = 2")


def test_chain_returns_the_q_that_it_drew_from():
    def once(coins):
        (tokens,), q, _ = draft(chain, Says(2), coins)
        compare(q, best_two(LOGITS[[0, *tokens[:-1]]])[None],
                Mistakes("chain", lambda f: draft(f, Says(2), Branch(coins.path))[1]),
                f"q of the drafted tokens {tokens} after token 0")

    law(once)


def test_chain_keeps_the_token_that_stops_it():
    """The rule stops after token 2, and that token is still proposed."""
    def stop(k, logits, token):
        if logits.shape != (1, 3) or token.shape != (1,) or not (logits == LOGITS).all(1).any():
            fail("what a rule's `stop` gets",
                 "the raw logits (B, V) = (1, 3) and the token (B,) = (1,)",
                 f"{short(logits)} and {short(token)}",
                 "stop(k, logits, token) gets the raw logits, not q, and neither has a place T")
        return (token == 2).tolist()

    draws(Says(5, stop), "a rule that stops after token 2, and at most 5 tokens", 2)


def test_chain_rows_draw_for_themselves():
    def run(chain, coins):
        return tuple(t for (t,) in draft(chain, Says(1), coins, ([1, 0], [2]))[0])

    first, second = best_two(LOGITS[0]).tolist(), best_two(LOGITS[2]).tolist()
    want = {(a, b): x * y for a, x in enumerate(first) for b, y in enumerate(second)}
    same_law(partial(run, chain), want, Mistakes("chain", run, run=True),
             "two texts, a token of each; {tokens: probability}", "each row draws from its own q")


def test_chain_rows_end_one_by_one(record_property):
    """Row 0 stops at once, row 1 after five tokens. What the rule says of row 0 later changes
    nothing."""
    rule = Says(6, lambda k, logits, token: [k in (0, 2), k == 4])
    given = rule, Coins(0), ([1, 0], [2])
    compare(lengths(chain, *given), [1, 5], Mistakes("chain", lambda f: lengths(f, *given)),
            "gamma = 6; the rule stops row 0 after tokens 1 and 3, row 1 after token 5: lengths")
    steps = draft(chain, *given)[2]
    if steps > 5:
        record_property("remark", f"right, but it takes {steps} steps where 5 would do: what is "
                                  "drafted after all rows have stopped is never read")


@pytest.mark.parametrize("stop", [None, lambda k, logits, token: torch.zeros(2).bool()],
                         ids=["no stop rule", "a stop rule"])
@pytest.mark.parametrize("want, left, most", [
    ([3, 1], [9, 9], [3, 1]), ([2, 2], [9, 2], [2, 1]), (3, [1, 9], [0, 3]), (0, [9, 9], [0, 0])])
def test_chain_lengths(want, left, most, stop):
    """No row drafts more than it wants, nor than it may still emit less one. gamma = 0: no step,
    no q."""
    given = Says(want, stop), Coins(0), ([1, 0], [2]), left
    compare(lengths(chain, *given), most, Mistakes("chain", lambda f: lengths(f, *given)),
            f"gamma = {want}, and rows that may still emit {left} tokens: the lengths")
    _, q, steps = draft(chain, *given)
    if not any(most) and (q is not None or steps):
        fail("gamma = 0", "q = None and no step", f"{short(q)}, {steps} steps")


def test_chain_rows_of_drawn_rules():
    """Any lengths, stops at any place, and of each live token the q that it was drawn from."""
    deal = random.Random(0)
    for seed in range(60):
        B = deal.randint(1, 4)
        known = [[deal.randrange(3) for _ in range(deal.randint(1, 3))] for _ in range(B)]
        want, left = ([deal.randint(0, 7) for _ in range(B)] for _ in range(2))
        stops = [[deal.random() < 0.2 for _ in range(B)] for _ in range(8)]
        most = [max(0, min(n, room - 1)) for n, room in zip(want, left, strict=True)]
        ends = [next((k + 1 for k in range(8) if stops[k][b]), 9) for b in range(B)]
        rule = Says(want, lambda k, logits, token, stops=stops: stops[k])
        given = (f"rows that want {want} tokens, may still emit {left}, "
                 f"and are stopped after token {ends} (9: never)")
        case = rule, Coins(seed), known, left
        compare(lengths(chain, *case), list(map(min, most, ends)),
                Mistakes("chain", lambda f, case=case: lengths(f, *case)), f"{given}: the lengths")
        rows, q, _ = draft(chain, *case)
        for b, row in enumerate(rows):
            if row:
                before = [known[b][-1], *row[:-1]]
                compare(q[b, : len(row)], best_two(LOGITS[before]), {},
                        f"{given}; q of row {b}, which drafted {row} after token {known[b][-1]}")
