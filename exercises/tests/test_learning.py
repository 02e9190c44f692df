"""A head that learns while it writes: exercise 28, exercises/learning.py."""
import torch
import torch.nn.functional as F
from teach import Mistakes, compare, promise, same_law
from tiny import TINY, law, make, oracle, warm, wide

from exercises.learning import Learner, learn
from sampling import to_probs
from speculative import generate


def stepped(*given, rate=0.5):
    weight, x, p, accepted, length = given
    case = weight, x, p, torch.tensor(accepted), torch.tensor(length), rate
    return lambda f: f(*case)


def test_a_step_by_hand():
    """Two tokens, a state of one number, 2. The head gives 1/2 to both, the target 1 to token 0.
    The gradient is (1/2 - 1) 2 for token 0, and (1/2 - 0) 2 for token 1."""
    step = stepped(wide([[0.0], [0.0]]), wide([[[2.0]]]), wide([[[1, 0], [0, 1]]]), [0], [1])
    compare(step(learn), [[0.5], [-0.5]], Mistakes("learn", step),
            "W = 0, x = 2, p = 1, 0; one draft, which was rejected, and rate = 0.5", 1e-9)
    rows = stepped(wide([[0.0], [0.0]]), wide([[[9.0], [2.0]], [[4.0], [9.0]]]),
                   wide([[[0.5, 0.5], [1, 0], [0, 1]], [[0, 1], [1, 0], [1, 0]]]), [1, 0], [2, 1])
    compare(rows(learn), [[0.5 * (1 - 2) / 2], [0.5 * (-1 + 2) / 2]], Mistakes("learn", rows),
            "two rows of two drafts: of row 0 the second was rejected (x = 2, p = 1, 0), of row 1 "
            "the first (x = 4, p = 0, 1)", 1e-9)


def test_what_was_accepted_teaches_nothing():
    weight = wide([[1.0], [2.0]])
    step = stepped(weight, wide([[[2.0]], [[3.0]]]), wide([[[1, 0], [0, 1]]] * 2), [1, 0], [1, 0])
    compare(step(learn), weight, Mistakes("learn", step),
            "a draft that was accepted, and a row without a draft: W stays")


def some(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_step_lowers_the_loss():
    """Its direction is that of autograd's gradient."""
    weight, x = some(1, 5, 3), some(2, 4, 2, 3)
    p = some(3, 4, 3, 5).softmax(-1)
    step = stepped(weight, x, p, [0, 1, 2, 1], [1, 2, 2, 1], rate=0.1)
    w = weight.clone().requires_grad_()
    logits = F.linear(torch.stack([x[0, 0], x[1, 1]]), w)
    loss = -(torch.stack([p[0, 0], p[1, 1]]) * logits.log_softmax(-1)).sum(-1).mean()
    loss.backward()
    compare(step(learn), weight - 0.1 * w.grad, Mistakes("learn", step),
            "four rows with 1, 2, 2, 1 drafts, of which 0, 1, 2, 1 were accepted: two examples",
            1e-9)


def test_a_head_that_learns_changes_no_law():
    """Of three tokens, all outcomes of two or three rounds, with steps that are far too long."""
    m = make(TINY, 1)

    def text(coins, learning=True):
        drafter = Learner(m, 1, 1, 3.0) if learning else None
        return tuple(generate(m, [[1]], 3, drafter, warm, coins)[0][0])

    same_law(text, law(lambda coins: text(coins, learning=False)), {},
             "three tokens of a tiny model, one drafted per round by a head that learns; "
             "{text: probability}",
             "`learn` must not change the weight that it is given: return a new one")


@torch.inference_mode()
def test_a_head_that_learns_changes_no_greedy_text():
    m = make(TINY, 1)
    drafter = Learner(m, 1, 3, 0.5)
    before = drafter.weight.clone()
    for prompt in ([1, 2], [2]):
        want = oracle(m, prompt, 20)
        got = generate(m, [prompt], 20, drafter, to_probs)[0][0]
        promise(got == want, f"20 greedy tokens after {prompt}, with a head that learns",
                f"{want}", f"{got}")
    promise(not torch.equal(before, drafter.weight), "40 tokens", "another weight than before",
            "the same", "the head has not learnt")
