"""What trains a draft, and which exit drafts a token: exercises 22 to 24, exercises/exits.py."""
import math
from functools import partial
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from mistaken import learns
from teach import Mistakes, compare, look, picture, promise, same_law, short
from test_sampling import from_p
from tiny import warm, wide

from exercises.exits import draw_at_exit, enabled_exits, exit_loss, head_loss
from sampling import Coins, to_probs

# --- a head


def numbers(seed, *shape):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=rng, dtype=torch.float64) * 2


def head_by_rows(head, target, ahead, length):
    """The loss by its definition, row by row."""
    rows = [-float(target[b, t + ahead].softmax(-1) @ head[b, t].log_softmax(-1))
            for b, count in enumerate(length.tolist()) for t in range(count - ahead)]
    return sum(rows) / max(1, len(rows))


def check_head(given, head, target, ahead, length, want=None):
    case = head, target, ahead, torch.tensor(length)
    compare(head_loss(*case), head_by_rows(*case) if want is None else want,
            Mistakes("head_loss", lambda f: f(*case)), f"{given}, ahead = {ahead}", 1e-9)


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_the_loss_of_a_head(ahead):
    """And by hand: two rows of a head, for p = 1/2, 1/2 and 1/4, 3/4."""
    check_head("random logits of 3 texts of [7, 4, 5] rows out of 7, 5 tokens",
               numbers(ahead, 3, 7, 5), numbers(8, 3, 7, 5), ahead, [7, 4, 5])
    p = [[0.9, 0.1], [0.5, 0.5], [0.25, 0.75]]
    q = [[0.25, 0.75], [0.5, 0.5], [0.9, 0.1]]
    by_hand = (-0.5 * math.log(0.25) - 0.5 * math.log(0.75) + math.log(2)) / 2
    check_head(f"softmax of the head = {q}, of the target = {p}, length = 3",
               wide([q]).log(), wide([p]).log(), 1, [3], by_hand)


def test_what_a_head_need_not_learn():
    """The rows after a text, rows without a target, and what is next to impossible."""
    head = numbers(1, 2, 6, 4)
    target = numbers(2, 2, 6, 4)
    want = head_by_rows(head, target, 2, torch.tensor([6, 3]))
    head[1, 1:] = math.nan
    target[1, 3:] = math.nan
    check_head("2 texts of [6, 3] rows out of 6; the rows that do not count are NaN",
               head, target, 2, [6, 3], want)
    for ahead, lengths in ((2, [2, 1]), (6, [6, 3]), (9, [6, 3])):
        check_head(f"texts of {lengths} rows out of 6: no row counts", head, target, ahead, lengths)
    check_head("a head with the logits [0, -1000, 1]", wide([[[0, -1000, 1], [0, 0, 0]]]),
               wide([[[0, 0, 0], [1, 1, 0]]]), 1, [2])


def test_a_head_learns_and_its_teacher_does_not():
    head, target = (numbers(seed, 2, 5, 3).requires_grad_() for seed in (3, 4))
    given = "2 texts of [5, 4] rows, ahead = 1"
    learns(lambda: head_loss(head, target, 1, torch.tensor([5, 4])), {"head": head}, given)
    promise(target.grad is None or not target.grad.any(), given,
            "no gradient in the target's logits",
            "a gradient", "the target would learn to be as simple as its head: detach its logits")


def test_what_is_no_text_leaves_no_gradient():
    """The rows after a text hold NaN: their gradient is 0, and that of the others stays what it
    is."""
    def gradient(f, filling=math.nan):
        head, target = (numbers(seed, 2, 5, 3) for seed in (3, 4))
        target[1, 3:] = filling
        loss = f(head.requires_grad_(), target, 1, torch.tensor([5, 3]))
        loss.backward()
        return () if loss.isnan() else head.grad

    compare(gradient(head_loss), gradient(head_loss, 0.0), Mistakes("head_loss", gradient),
            "2 texts of [5, 3] rows out of 5, ahead = 1, the target is NaN after a text: "
            "the head's gradient", 1e-9)


# --- the exits


def check_exits(steps, L, every, asked, want):
    def drawn(f):
        return picture(torch.stack([f(step, steps, L, every) for step in asked]))

    look(torch.stack([enabled_exits(step, steps, L, every) for step in asked]), want,
         Mistakes("enabled_exits", drawn),
         f"the steps {asked} of {steps}, L = {L}, every = {every}; x: this exit is trained")


@pytest.mark.parametrize("L, every, steps", [
    (6, 3, 9), (5, 2, 100), (4, 1, 8), (3, 5, 8), (4, None, 16), (4, None, 12), (7, None, 30),
    (2, None, 2), (14, None, 36), (1, None, 5), (1, 2, 5), (11, None, 1000), (24, None, 7),
    (9, 4, 30)])
def test_the_exits_of_a_step(L, every, steps):
    """In whole numbers: step / (steps / (2 * L)) can round below one."""
    def on(step, block):
        rotated = every and (block - step) % every == 0
        reached = not every and L - 1 - block <= 2 * L * step // steps
        return bool(block == L - 1 or rotated or reached)

    asked = range(0, steps, 1 + steps // 40)
    check_exits(steps, L, every, asked, [
        "".join(".x"[on(step, block)] for block in range(L)) for step in asked])


def test_the_exits_by_hand():
    """Every third one of six; and of four in 16 steps one more after every second."""
    check_exits(9, 6, 3, range(4), "x..x.x .x..xx ..x..x x..x.x".split())
    check_exits(16, 4, None, range(9),
                "...x ...x ..xx ..xx .xxx .xxx xxxx xxxx xxxx".split())


def check_loss(given, logits, tokens, L, scale, want):
    compare(exit_loss(logits, tokens, L, scale), want,
            Mistakes("exit_loss", lambda f: f(logits, tokens, L, scale)), given, 1e-9)


@pytest.mark.parametrize("L, trained, scale", [
    (4, (1, 3), 0.2), (4, (0, 1, 2, 3), 1.0), (9, (2, 5, 8), 0.1),
    (3, (0, 1, 2), 0.0), (6, (5,), 0.5), (32, (7, 15, 31), 0.2)])
def test_the_loss_of_the_exits(L, trained, scale):
    """LayerSkip's loss by its definition, row by row."""
    logits = {block: numbers(block, 2, 5, 4) for block in trained}
    tokens = torch.randint(4, (2, 5), generator=torch.Generator().manual_seed(L))
    weights = [scale * total for total in accumulate(range(L))]
    weights[L - 1] = L - 1 + scale * sum(range(L - 1))
    loss = 0.0
    for block, said in logits.items():
        rows = [-float(said[b, t].log_softmax(-1)[tokens[b, t + 1]])
                for b in range(2) for t in range(4)]
        loss += weights[block] * sum(rows) / len(rows)
    check_loss(f"random logits of the exits {trained} of {L}, scale = {scale}, 2 texts of 5 tokens",
               logits, tokens, L, scale, loss / sum(weights[block] for block in trained))


def test_the_loss_of_the_exits_trains_them():
    logits = {block: numbers(block, 2, 4, 3) for block in (1, 2)}
    learns(lambda: exit_loss(logits, torch.tensor([[0, 1, 2, 0], [2, 2, 1, 0]]), 3, 0.7),
           {f"logits[{block}]": x for block, x in logits.items()}, "the exits 1 and 2 of three")


def test_a_model_of_one_block_has_one_exit():
    """Its weight by the formula is 0; whatever it is, the mean is the cross-entropy of this
    exit."""
    said = numbers(1, 1, 4, 3)
    tokens = torch.tensor([[0, 1, 2, 0]])
    for scale in (0.0, 0.5):
        check_loss(f"a model of one block, scale = {scale}", {0: said}, tokens, 1, scale,
                   F.cross_entropy(said[0, :-1], tokens[0, 1:]))


def test_the_loss_of_two_exits_by_hand():
    """Blocks 1 and 3 of four, scale = 0.5: weights 0.5 and 3 + 1.5; losses log 2 and log 4."""
    logits = {1: torch.zeros(1, 2, 2).double(), 3: wide([[[0, math.log(3)], [0, 0]]])}
    check_loss("blocks 1 and 3 of four, scale = 0.5", logits, torch.tensor([[1, 0]]), 4, 0.5,
               (0.5 * math.log(2) + 4.5 * math.log(4)) / 5)


# --- an exit for each token

P = [[[0.5, 0.3, 0.2], [0.4, 0.4, 0.2], [0.3, 0.6, 0.1]],       # (E, B, V)
     [[0.7, 0.2, 0.1], [0.3, 0.3, 0.4], [0.1, 0.8, 0.1]],
     [[0.92, 0.08, 0.0], [0.1, 0.5, 0.4], [0.5, 0.2, 0.3]],
     [[0.6, 0.2, 0.2], [0.2, 0.2, 0.6], [0.2, 0.3, 0.5]]]
COLD = partial(to_probs, temperature=0.5, top_k=2)


def check_exit(given, logits, threshold, probs, exits):
    """The exits of the rows, and the q of each at its exit."""
    def leaves(f):
        return f(logits, threshold, probs, Coins(3))[0]

    def drafts(f):
        found, _, q = f(logits, threshold, probs, Coins(3))
        return q if found.tolist() == exits else ()

    compare(leaves(draw_at_exit), exits, Mistakes("draw_at_exit", leaves), given)
    compare(drafts(draw_at_exit), probs(logits)[exits, range(len(exits))],
            Mistakes("draw_at_exit", drafts), given, 1e-9)


@pytest.mark.parametrize("probs", [to_probs, COLD, warm], ids=["greedy", "cold", "warm"])
@pytest.mark.parametrize("threshold, exits", [
    (0.0, [0, 0, 0]), (0.35, [0, 0, 0]), (0.55, [1, 3, 0]), (0.65, [1, 3, 1]), (0.75, [2, 3, 1]),
    (0.95, [3, 3, 3])])
def test_the_first_exit_that_is_sure(threshold, exits, probs):
    check_exit(f"threshold = {threshold}, and four exits whose largest probabilities are, for "
               f"three rows each, {short(wide(P).amax(-1))}", from_p(*P), threshold, probs, exits)


def test_an_exit_is_sure_at_the_threshold_itself():
    logits = wide([[[0, 0]] * 2, [[0, -800]] * 2, [[0, 0]] * 2])
    for threshold, want in ((0.5, [0, 0]), (1.0, [1, 1])):
        check_exit(f"threshold = {threshold}, and three exits whose largest probabilities are "
                   "0.5, 1 and 0.5", logits, threshold, warm, want)


def test_a_token_is_drawn_from_the_q_that_comes_back():
    """The verifier divides by this q: drawn from anything else, the text has another
    distribution."""
    first = [[0.7, 0.2, 0.1], [0.5, 0.3, 0.2]]
    second = [[0.1, 0.8, 0.1], [0.2, 0.1, 0.7]]
    q = COLD(from_p([first[0], second[1]]))[0]

    def run(draw_at_exit, coins):
        _, token, found = draw_at_exit(from_p(first, second), 0.6, COLD, coins)
        return tuple(token.tolist()) if torch.allclose(found, q) else ()

    want = {(a, b): float(q[0, a] * q[1, b]) for a in range(3) for b in range(3)
            if q[0, a] * q[1, b] > 0}
    same_law(partial(run, draw_at_exit), want, Mistakes("draw_at_exit", run, run=True),
             f"threshold = 0.6, the first exit says {first}, the second {second}, q has "
             "temperature 0.5 and top_k = 2: the tokens of both rows",
             "draw each row by coins.choose(q), from its own q")
