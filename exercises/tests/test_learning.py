"""A head that learns while it writes: exercise 28, exercises/learning.py."""
import torch
from teach import promise, same_law
from tiny import TINY, law, make, oracle, warm

from exercises.learning import Learner
from sampling import to_probs
from speculative import generate


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
