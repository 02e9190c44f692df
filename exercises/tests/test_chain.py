"""`chain` by its outcomes, all enumerated: exercise 10. What the library's own must keep, its
loop shows."""
import random
from functools import partial

import pytest
import torch
from teach import compare, fail, same_law, short
from tiny import Says, law, state_of, wide

from drafter import chain
from sampling import Coins

LOGITS = wide([[0.0, 1.0, 2.0], [2.0, 0.5, 0.0], [1.0, 0.0, 0.5]])     # by the last token
CHAIN = {
    "stale": "step reads the last known token every time; "
             "it must read the token that was drawn before it",
    "raw": "tokens are drawn from the raw softmax; "
           "temperature, top-k and the like are in state.probs",
    "argmax": "the most likely token is taken; "
              "a draft must be drawn from q, or q is not its distribution"}


def best_two(logits):
    """A setting that the raw softmax does not know of: of each distribution the best two tokens
    stay."""
    p = logits.softmax(-1)
    p = p * (p >= p.topk(2, -1).values[..., -1:])
    return p / p.sum(-1, keepdim=True)


def two_steps(coins, mistake=None):
    """Two tokens of a chain after token 0, one by one."""
    tokens = [0]
    for _ in range(2):
        row = LOGITS[0 if mistake == "stale" else tokens[-1]]
        q = row.softmax(-1) if mistake == "raw" else best_two(row)
        tokens.append(int(q.argmax() if mistake == "argmax" else coins.choose(q)))
    return tuple(tokens[1:])


def draft(rule, coins, known=([1, 0],), left=(9, 9)):
    """What chain returns for these texts: rows of live tokens, q (B, K, V), and how often it
    stepped."""
    steps = []
    state = state_of(list(known), list(left)[: len(known)], best_two, coins)

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


def test_chain_draws_each_token_after_the_one_before():
    same_law(lambda coins: tuple(draft(Says(2), coins)[0][0]), law(two_steps),
             {why: partial(two_steps, mistake=name) for name, why in CHAIN.items()},
             "gamma = 2 and texts that end with token 0; {drafted tokens: probability}",
             "each token is drawn from state.probs(step(the token before it))")


def test_chain_returns_the_q_that_it_drew_from():
    def once(coins):
        (tokens,), q, _ = draft(Says(2), coins)
        before = [0, *tokens[:-1]]
        compare(q, best_two(LOGITS[before])[None], {
            "q must be what the token was drawn from, state.probs(logits), not the raw softmax":
                LOGITS[before].softmax(-1)[None],
            "each q belongs to the next token: keep the q that *this* token was drawn from":
                best_two(LOGITS[tokens])[None]}, f"q of the drafted tokens {tokens} after token 0")

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

    def once(coins):
        (tokens,), _, _ = draft(Says(5, stop), coins)
        late = len(tokens) - 1 - tokens.index(2) if 2 in tokens else 0
        if late or (len(tokens) < 5 and tokens[-1:] != [2]):
            why = ("the drawn token that stops the draft is dropped; "
                   "to drop a token for what it is changes "
                   "the distribution of the text")
            if late:
                why = f"it stops {late} token(s) too late"
                why = "it does not stop" if len(tokens) == 5 and late > 1 else why
            fail("a rule that stops after token 2, and at most 5 tokens",
                 "the draft ends with its first 2, or has 5 tokens",
                 f"the live tokens {tokens}", why)

    law(once)


def test_chain_rows_draw_for_themselves():
    first, second = best_two(LOGITS[0]).tolist(), best_two(LOGITS[2]).tolist()
    want = {(a, b): x * y for a, x in enumerate(first) for b, y in enumerate(second)}
    same_law(lambda coins: tuple(t for (t,) in draft(Says(1), coins, ([1, 0], [2]))[0]), want, {},
             "two texts, a token of each; {tokens: probability}", "each row draws from its own q")


def test_chain_rows_end_one_by_one(record_property):
    """Row 0 stops at once, row 1 after five tokens. What the rule says of row 0 later changes
    nothing."""
    rule = Says(6, lambda k, logits, token: [k in (0, 2), k == 4])
    rows, _, steps = draft(rule, Coins(0), ([1, 0], [2]))
    got = [len(row) for row in rows]
    if got != [1, 5]:
        fail("gamma = 6; the rule stops row 0 after tokens 1 and 3, row 1 after token 5",
             [1, 5], got,
             "a row that has stopped goes on again: once stopped, always stopped")
    if steps > 5:
        record_property("remark", f"right, but it takes {steps} steps where 5 would do: "
                                  "what is drafted "
                                  "after all rows have stopped is never read")


@pytest.mark.parametrize("stop", [None, lambda k, logits, token: torch.zeros(2).bool()],
                         ids=["no stop rule", "a stop rule"])
@pytest.mark.parametrize("want, left, lengths", [
    ([3, 1], [9, 9], [3, 1]), ([2, 2], [9, 2], [2, 1]), (3, [1, 9], [0, 3]), (0, [9, 9], [0, 0])])
def test_chain_lengths(want, left, lengths, stop):
    """No row drafts more than it wants, nor than it may still emit less one. gamma = 0: no step,
    no q."""
    rows, q, steps = draft(Says(want, stop), Coins(0), ([1, 0], [2]), left)
    got = [len(row) for row in rows]
    if got != lengths:
        fail(f"gamma = {want}, and rows that may still emit {left} tokens", lengths, got,
             "each row has its own length: `wanted` says how many tokens each may draft, "
             "and `varied`, whether they differ")
    if not any(lengths) and (q is not None or steps):
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
        rows, q, _ = draft(rule, Coins(seed), known, left)
        given = (f"rows that want {want} tokens, may still emit {left}, "
                 f"and are stopped after token {ends}")
        longer = [end if end <= max(most) else n for n, end in zip(most, ends, strict=True)]
        compare(torch.tensor([len(row) for row in rows]), list(map(min, most, ends)), {
            "a stop after a row's own end makes the row longer": longer},
            f"{given} (9: never): the lengths")
        for b, row in enumerate(rows):
            if row:
                before = [known[b][-1], *row[:-1]]
                compare(q[b, : len(row)], best_two(LOGITS[before]), {},
                        f"{given}; q of row {b}, which drafted {row} after token {known[b][-1]}")
