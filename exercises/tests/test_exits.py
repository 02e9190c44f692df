"""What trains a draft, and which exit drafts a token: exercises 22 to 24, exercises/exits.py."""
import itertools
import math
import random
from functools import partial
from itertools import accumulate

import pytest
import torch
from teach import compare, look, promise, same_law, short
from test_answers import learns
from test_sampling import from_p
from tiny import warm, wide

from exercises.exits import draw_at_exit, enabled_exits, exit_loss, head_loss
from sampling import Coins, to_probs

# --- a head


def numbers(seed, *shape):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=rng, dtype=torch.float64) * 2


def cross_entropy(p, logits):
    return -float((p * logits.log_softmax(-1)).sum())


def head_by_rows(head, target, ahead, length, mistake=None):
    """The loss by its definition, row by row, or with a mistake that a student might make."""
    texts = []
    T = head.shape[1]
    for b, count in enumerate(length.tolist()):
        count = {"one more": count + 1, "padding": T}.get(mistake, count)
        texts.append([0.0] * (ahead if mistake == "all rows" else 0))
        for t in range(min(count, T) - ahead):
            at = {"same row": t, "next row": t + 1}.get(mistake, t + ahead)
            p = target[b, at].softmax(-1)
            q = head[b, t].softmax(-1)
            far = cross_entropy(p, head[b, t])
            if mistake == "likeliest":
                far = -math.log(q[p.argmax()])
            elif mistake == "other way":
                far = cross_entropy(q, target[b, at])
            elif mistake == "divergence":
                far -= cross_entropy(p, target[b, at])
            texts[-1].append(far)
    rows = sum(texts, [])
    if mistake == "sum":
        return sum(rows)
    if mistake == "B T":
        return sum(rows) / head.shape[0] / T
    if mistake == "B N":
        return sum(rows) / head.shape[0] / (T - ahead)
    if mistake == "texts":
        return sum(sum(text) / len(text) for text in texts if text) / len(texts)
    return sum(rows) / max(1, len(rows))


HEADS = {
    "same row": "row t of the head is compared with row t of the target: it is about row t + ahead",
    "next row": "`ahead` is ignored: row t of the head is about row t + ahead",
    "likeliest": "this looks at p's most likely token alone; a draft is accepted by the whole of p",
    "other way": "p and q are swapped: -(p log q), where p is the target's",
    "divergence": "this is the divergence; the cross-entropy keeps the entropy of p, "
                  "which has no gradient",
    "padding": "`length` is ignored: the rows after a text count",
    "one more": "the last row that counts is row length - ahead - 1; "
                "its target is the text's last row",
    "all rows": "divide by the rows that count: the last `ahead` of a text have no target",
    "sum": "this is the sum; divide by the number of rows that count",
    "B T": "this is the mean over all B T rows; divide by the number of rows that count",
    "B N": "this is the mean over B (T - ahead) rows; divide by the number of rows that count",
    "texts": "this is the mean of the texts' means; every row counts alike, whatever text it is in"}


def check_head(given, head, target, ahead, length):
    mistakes = {why: head_by_rows(head, target, ahead, length, name) for name, why in HEADS.items()}
    got = head_loss(head, target, ahead, length)
    compare(got, head_by_rows(head, target, ahead, length), mistakes, given, 1e-9)


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_the_loss_of_a_head(ahead):
    """And by hand: two rows of a head, for p = 1/2, 1/2 and 1/4, 3/4."""
    lengths = [7, 4, 5]
    given = f"random logits of 3 texts of {lengths} rows out of 7, 5 tokens, ahead = {ahead}"
    check_head(given, numbers(ahead, 3, 7, 5), numbers(8, 3, 7, 5), ahead, torch.tensor(lengths))
    p = [[0.9, 0.1], [0.5, 0.5], [0.25, 0.75]]
    q = [[0.25, 0.75], [0.5, 0.5], [0.9, 0.1]]
    got = head_loss(wide([q]).log(), wide([p]).log(), 1, torch.tensor([3]))
    by_hand = (-0.5 * math.log(0.25) - 0.5 * math.log(0.75) + math.log(2)) / 2
    compare(got, by_hand, {},
            f"softmax of the head = {q}, of the target = {p}, ahead = 1, length = 3", 1e-9)


def test_what_a_head_need_not_learn():
    """The rows after a text, rows without a target, and what is next to impossible."""
    head = numbers(1, 2, 6, 4)
    target = numbers(2, 2, 6, 4)
    length = torch.tensor([6, 3])
    want = head_by_rows(head, target, 2, length)
    head[1, 1:] = math.nan
    target[1, 3:] = math.nan
    compare(head_loss(head, target, 2, length), want, {
        "the rows that do not count are multiplied by 0, but 0 times NaN is NaN: "
        "leave them out": math.nan},
        "2 texts of [6, 3] rows out of 6, ahead = 2; the rows that do not count are NaN", 1e-9)
    for ahead, lengths in ((2, [2, 1]), (6, [6, 3]), (9, [6, 3])):
        compare(head_loss(head, target, ahead, torch.tensor(lengths)), 0.0, {
            "0 / 0: where no row counts, the loss is 0": math.nan},
            f"texts of {lengths} rows out of 6, ahead = {ahead}: no row counts", 1e-9)
    head = wide([[[0, -1000, 1], [0, 0, 0]]])
    target = wide([[[0, 0, 0], [1, 1, 0]]])
    length = torch.tensor([2])
    compare(head_loss(head, target, 1, length), head_by_rows(head, target, 1, length), {
        "the softmax rounds to 0, and its logarithm is -inf: take log_softmax": math.inf},
        "a head with the logits [0, -1000, 1]", 1e-9)


def test_a_head_learns_and_its_teacher_does_not():
    head, target = (numbers(seed, 2, 5, 3).requires_grad_() for seed in (3, 4))
    given = "2 texts of [5, 4] rows, ahead = 1"
    loss = head_loss(head, target, 1, torch.tensor([5, 4]))
    promise(loss.requires_grad, given, "a loss with a gradient", "a number without one",
            "the head must learn: neither .item() nor detach()")
    loss.backward()
    promise(target.grad is None or not target.grad.any(), given,
            "no gradient in the target's logits",
            "a gradient", "the target would learn to be as simple as its head: detach its logits")
    want = (head.softmax(-1) - target.roll(-1, 1).softmax(-1)).detach() / 7
    want[0, 4:] = 0
    want[1, 3:] = 0
    compare(head.grad, want, {},
            f"{given}: the gradient of the head's logits is (q - p) / rows", 1e-9)


def test_what_is_no_text_leaves_no_gradient():
    """The rows after a text hold NaN: their gradient is 0, and that of the others stays what it
    is."""
    grads = []
    for filling in (0.0, math.nan):
        head, target = (numbers(seed, 2, 5, 3) for seed in (3, 4))
        target[1, 3:] = filling
        head.requires_grad_()
        head_loss(head, target, 1, torch.tensor([5, 3])).backward()
        grads.append(head.grad)
    poisoned = grads[0].clone()
    poisoned[1, 2:4] = math.nan
    compare(grads[1], grads[0], {
        "rows that do not count were left out after the product: "
        "in the backward pass 0 times NaN is NaN; "
        "select first": poisoned},
        "2 texts of [5, 3] rows out of 5, ahead = 1, the target is NaN after a text: "
        "the head's gradient",
        1e-9)


# --- the exits


def schedule(step, steps, L, every, mistake=None):
    """The exits of a step, as `look` draws them."""
    # in whole numbers: step / (steps / (2 * L)) can round below one
    known = 2 * L * step // steps
    known = {"whole": step // max(1, steps // (2 * L)), "late": L * step // steps,
             "float": int(step / (steps / (2 * L)))}.get(mistake, known)
    row = ""
    for block in range(L):
        if every:
            by = {"backwards": -step, "still": 0}.get(mistake, step)
            on = (block - by) % every == 0
        else:
            place = block if mistake == "upwards" else L - 1 - block
            on = place <= known
        row += ".x"[on or block == L - 1 and mistake != "last"]
    return row


SCHEDULES = {
    "last": "the last exit is the model itself: every step trains it",
    "backwards": "it rotates the wrong way: each step trains the exits one block further",
    "still": "`step` is ignored: the exits rotate",
    "whole": "1 / (2 L) of the steps need not be a whole number: round at the end",
    "late": "all exits are on after half of the steps",
    "float": "a division of floats can come out just below a whole number: "
             "multiply first, 2 L step // steps",
    "upwards": "it begins with the first blocks; it goes down from the last one"}


@pytest.mark.parametrize("L, every, steps", [
    (6, 3, 9), (5, 2, 100), (4, 1, 8), (3, 5, 8), (4, None, 16), (4, None, 12), (7, None, 30),
    (2, None, 2), (14, None, 36), (1, None, 5), (1, 2, 5), (11, None, 1000), (24, None, 7),
    (9, 4, 30)])
def test_the_exits_of_a_step(L, every, steps):
    def pictures(mistake=None):
        return [schedule(step, steps, L, every, mistake) for step in asked]

    asked = range(0, steps, 1 + steps // 40)
    got = [enabled_exits(step, steps, L, every) for step in asked]
    given = f"the steps {asked} of {steps}, L = {L}, every = {every}; x: this exit is trained"
    look(torch.stack(got), pictures(),
         {why: pictures(name) for name, why in SCHEDULES.items()}, given)


def test_the_exits_by_hand():
    """Every third one of six; and of four in 16 steps one more after every second."""
    for L, every, steps, want in ((6, 3, 9, "x..x.x .x..xx ..x..x x..x.x"),
                                  (4, None, 16, "...x ...x ..xx ..xx .xxx .xxx xxxx xxxx xxxx")):
        rows = want.split()
        look(torch.stack([enabled_exits(step, steps, L, every) for step in range(len(rows))]),
             rows, {},
             f"steps 0, 1, 2, ... of {steps}, L = {L}, every = {every}; x: this exit is trained")


def exits_by_rows(logits, tokens, L, scale, mistake=None):
    """LayerSkip's loss by its definition, or with a mistake."""
    table = [scale * total for total in accumulate(range(L))]
    if mistake != "last alike":
        table[L - 1] = L - 1 + scale * sum(range(L - 1))
    loss = 0.0
    weights = 0.0
    for block, said in logits.items():
        weight = {"alike": 1.0, "linear": scale * block, "shallow": L - block}.get(
            mistake, table[block])
        shift = 0 if mistake == "own token" else 1
        rows = [(b, t) for b in range(len(said)) for t in range(said.shape[1] - shift)]
        far = sum(-float(said[b, t].log_softmax(-1)[tokens[b, t + shift]]) for b, t in rows)
        loss += weight * far / (1 if mistake == "sum" else len(rows))
        weights += weight
    return loss / (1 if mistake == "not scaled" else weights or 1.0)


EXITS = {
    "alike": "all exits count alike; an exit's weight is scale (0 + 1 + ... + l)",
    "linear": "the weight grows with the square of the depth: scale (0 + 1 + ... + l)",
    "shallow": "the weights are upside down: deep exits count more, "
               "because predicting is easier there",
    "last alike": "`scale` cancels: the last exit's weight is "
                  "L - 1 + scale (0 + 1 + ... + (L - 2))",
    "own token": "row t is compared with token t, which it has read: it predicts token t + 1",
    "sum": "this sums over the rows; a cross-entropy is their mean",
    "not scaled": "divide by the sum of the weights of the exits that are trained"}


@pytest.mark.parametrize("L, trained, scale", [
    (4, (1, 3), 0.2), (4, (0, 1, 2, 3), 1.0), (9, (2, 5, 8), 0.1),
    (3, (0, 1, 2), 0.0), (6, (5,), 0.5), (32, (7, 15, 31), 0.2)])
def test_the_loss_of_the_exits(L, trained, scale):
    logits = {block: numbers(block, 2, 5, 4) for block in trained}
    tokens = torch.randint(4, (2, 5), generator=torch.Generator().manual_seed(L))
    mistakes = {why: exits_by_rows(logits, tokens, L, scale, name) for name, why in EXITS.items()}
    compare(exit_loss(logits, tokens, L, scale), exits_by_rows(logits, tokens, L, scale), mistakes,
            f"random logits of the exits {trained} of {L}, scale = {scale}, 2 texts of 5 tokens",
            1e-9)


def test_the_loss_of_the_exits_trains_them():
    logits = {block: numbers(block, 2, 4, 3) for block in (1, 2)}
    learns(lambda: exit_loss(logits, torch.tensor([[0, 1, 2, 0], [2, 2, 1, 0]]), 3, 0.7),
           {f"logits[{block}]": x for block, x in logits.items()}, "the exits 1 and 2 of three")


def test_a_model_of_one_block_has_one_exit():
    """Its weight by the formula is 0; whatever it is, the mean is the cross-entropy of this
    exit."""
    said = numbers(1, 2, 4, 3)
    tokens = torch.tensor([[0, 1, 2, 0], [2, 2, 1, 0]])
    for scale in (0.0, 0.5):
        want = exits_by_rows({0: said}, tokens, 1, scale, "alike")
        assert float(exit_loss({0: said}, tokens, 1, scale)) == pytest.approx(want)


def test_the_loss_of_two_exits_by_hand():
    """Blocks 1 and 3 of four, scale = 0.5: weights 0.5 and 3 + 1.5; losses log 2 and log 4."""
    logits = {1: torch.zeros(1, 2, 2).double(), 3: wide([[[0, math.log(3)], [0, 0]]])}
    got = exit_loss(logits, torch.tensor([[1, 0]]), 4, 0.5)
    compare(got, (0.5 * math.log(2) + 4.5 * math.log(4)) / 5, {},
            "blocks 1 and 3 of four, scale = 0.5", 1e-9)


# --- an exit for each token

P = [[[0.5, 0.3, 0.2], [0.4, 0.4, 0.2], [0.3, 0.6, 0.1]],       # (E, B, V)
     [[0.7, 0.2, 0.1], [0.3, 0.3, 0.4], [0.1, 0.8, 0.1]],
     [[0.92, 0.08, 0.0], [0.1, 0.5, 0.4], [0.5, 0.2, 0.3]],
     [[0.6, 0.2, 0.2], [0.2, 0.2, 0.6], [0.2, 0.3, 0.5]]]
COLD = partial(to_probs, temperature=0.5, top_k=2)
EXIT = {
    "none": "where no exit is sure, the last one drafts",
    "surest": "this is the surest exit; the draft leaves at the first one that is sure enough",
    "all": "each row leaves at an exit of its own; you wait until all rows are sure",
    "drafting": "sure is the model itself, without temperature and cuts: a one-hot is always sure",
    "last": "this is the last exit that is sure; it is the first one that drafts"}


def exit_of(threshold, probs, mistake=None):
    """The exits of the three rows, or those of a mistake."""
    p = probs(from_p(*P)) if mistake == "drafting" else wide(P)
    found = []
    for row in p.amax(-1).T.tolist():
        last = 0 if mistake == "none" else len(row) - 1
        sure = [e for e, most in enumerate(row) if most > threshold - 1e-12] or [last]
        e = sure[-1] if mistake == "last" else sure[0]
        found.append(row.index(max(row)) if mistake == "surest" else e)
    return [max(found)] * len(found) if mistake == "all" else found


@pytest.mark.parametrize("probs", [to_probs, COLD, warm], ids=["greedy", "cold", "warm"])
@pytest.mark.parametrize("threshold", [0.0, 0.35, 0.55, 0.65, 0.75, 0.95])
def test_the_first_exit_that_is_sure(threshold, probs):
    given = (f"threshold = {threshold}, and four exits whose largest probabilities are, "
             "for three rows each, "
             f"{short(wide(P).amax(-1))}")
    exits, token, q = draw_at_exit(from_p(*P), threshold, probs, Coins(3))
    want = exit_of(threshold, probs)
    compare(exits, want,
            {why: exit_of(threshold, probs, name) for name, why in EXIT.items()}, given)
    at = torch.tensor(want), torch.arange(3)
    drawn = probs(from_p(*P))
    compare(q, drawn[at], {
        "q comes from another exit than the one that drafts": drawn[-1],
        "q is what the token is drawn from, with temperature and cuts: probs(logits)": wide(P)[at]},
        given, 1e-9)
    promise(token.shape == (3,), given, "tokens (B,)", token)


def test_exits_of_drawn_models():
    """Any number of exits, one included, and of rows."""
    draw = random.Random(0)
    for E, B in itertools.product((1, 2, 5), (1, 2, 4)):
        logits, threshold = numbers(E + 9 * B, E, B, 3), draw.uniform(0.4, 0.9)
        sure = (logits.softmax(-1).amax(-1) >= threshold).T.tolist()
        want = [row.index(True) if True in row else E - 1 for row in sure]
        exits, _, q = draw_at_exit(logits, threshold, COLD, Coins(0))
        given = (f"{E} exits, {B} rows, threshold {threshold:.4g}; "
                 f"the exits that are sure, row by row: {sure}")
        compare(exits, want, {}, given)
        compare(q, COLD(logits)[want, range(B)], {}, given, 1e-9)


def test_an_exit_is_sure_at_the_threshold_itself():
    logits = wide([[[0, 0]] * 2, [[0, -800]] * 2, [[0, 0]] * 2])
    for threshold, want, above in ((0.5, [0, 0], [1, 1]), (1.0, [1, 1], [2, 2])):
        exits, *_ = draw_at_exit(logits, threshold, warm, Coins(0))
        compare(exits, want, {"an exit is sure at the threshold, too: >=, not >": above},
                f"threshold = {threshold}, and three exits whose largest probabilities are "
                "0.5, 1 and 0.5")


def test_a_token_is_drawn_from_the_q_that_comes_back():
    """The verifier divides by this q: drawn from anything else, the text has another
    distribution."""
    first = [[0.7, 0.2, 0.1], [0.5, 0.3, 0.2]]
    second = [[0.1, 0.8, 0.1], [0.2, 0.1, 0.7]]
    raw = wide([first[0], second[1]])
    shallow, deep = COLD(from_p(first, second))
    q = torch.stack([shallow[0], deep[1]])

    def drawn(rows):
        return lambda coins: tuple(int(coins.choose(row)) for row in rows)

    def looks(coins):
        tokens = []
        for b in range(2):
            token = int(coins.choose(shallow[b]))
            tokens.append(token if first[b][token] >= 0.6 else int(coins.choose(deep[b])))
        return tuple(tokens)

    want = {(a, b): float(q[0, a] * q[1, b]) for a in range(3) for b in range(3)
            if q[0, a] * q[1, b] > 0}
    same_law(lambda coins: tuple(
            draw_at_exit(from_p(first, second), 0.6, COLD, coins)[1].tolist()), want, {
        "an exit looks at the token that it drew: then q is not what it was drawn from": looks,
        "the token is drawn at the last exit; draw it from the q that you return": drawn(deep),
        "the token is drawn without temperature and cuts; "
        "draw it from the q that you return": drawn(raw),
        "this is the most likely token; draw it": lambda coins: tuple(q.argmax(-1).tolist())},
        f"threshold = 0.6, the first exit says {first}, the second {second}, "
        "q has temperature 0.5 and "
        "top_k = 2: the tokens of both rows", "draw each row by coins.choose(q), from its own q")
