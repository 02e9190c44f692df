"""Slow and obvious specifications that a student may run. An answer must agree with them, but they
are no answers themselves. `start.py` copies them into the student's files, and a test keeps them
true."""
import random


def specification_of_verify(verify, p, q, Coins, rounds=4000):
    """How often each token comes first, where the draft comes from q[0] and p[0] judges it: it must
    be p[0], whatever q is. p (2, V), q (1, V). Coins: the class of that name in sampling.py."""
    counts = [0] * p.shape[-1]
    coins = Coins(0)
    for _ in range(rounds):
        draft = coins.choose(q)                                                 # (1,)
        accepted, token = verify(p[None], q[None], draft[None], coins)
        counts[int(draft if accepted else token)] += 1
    return [count / rounds for count in counts]


def specification_of_expected_tokens(alpha, gamma, rounds=20_000):
    """Play the rounds: draft after draft is accepted with probability alpha, until one is rejected;
    and one more token comes in any case."""
    tokens, coins = 0, random.Random(0)
    for _ in range(rounds):
        accepted = 0
        while accepted < gamma and coins.random() < alpha:
            accepted += 1
        tokens += accepted + 1
    return tokens / rounds


def specification_of_climb(score, end, allowed):
    """Is this the top of its surroundings? No allowed set that differs from `end` (n,) in one bit
    scores higher."""
    here = float(score(end[None])[0])
    for bit in range(len(end)):
        other = end.clone()
        other[bit] = 1 - other[bit]
        if bool(allowed(other[None])[0]) and float(score(other[None])[0]) > here:
            return False
    return True


SPECS = {"verify": specification_of_verify,
         "expected_tokens, best_gamma": specification_of_expected_tokens,
         "climb": specification_of_climb}
