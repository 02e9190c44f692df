"""The table of CLaSp and KnapSpec by hand and by brute force, what they judge by, and the same
text."""
from dataclasses import replace
from itertools import combinations

import promises
import torch
from tiny import LIVELY, PROMPTS, TINY, TINY_GEMMA, each_family, make, read

from control import Costs
from lab import clasp
from lab.clasp import CLaSp, KnapSpec, nearest
from speculative import rounds

DRAFTERS = {"clasp": lambda m: CLaSp(m, skips=5, every=1, threshold=0.1),
            "knapspec": lambda m: KnapSpec(m, costs=free(m), every=3)}
test_greedy_identity = promises.greedy_identity(DRAFTERS, on=["cpu"])
test_poison = promises.poison(DRAFTERS, count=12)
test_exact_law = promises.exact_law({
    "gemma2 clasp": (TINY_GEMMA, lambda m: CLaSp(m, 2, skips=1, every=1, threshold=0.6)),
    "knapspec": (replace(TINY, n_layers=5), lambda m: KnapSpec(m, 2, free(m), every=1))})


def free(m):
    """Costs with which almost any draft gains."""
    return Costs((1.0, 2.0) * m.c.n_layers, 0.0)


@each_family
def test_clasp_judges_by_the_states_of_the_last_accepted_token(models, family, monkeypatch):
    m, seen = models[family], []
    monkeypatch.setattr(clasp, "nearest", lambda states, run, times, most: (
        seen.append((states,
                     [run(u, torch.stack([states[u] + 1, states[u]]))[1] for u in range(6)]))
        or ([[1], [1, 3]], None)))
    drafter, taps = CLaSp(m, 3, skips=2, every=1, threshold=0.0), list(range(1, 12, 2))
    ends = [[len(p) for p in PROMPTS[:3]]]
    for state, r in rounds(m, PROMPTS[:3], 8, drafter):
        lengths = zip(state.known, r.new, r.accepted.tolist(), strict=True)
        ends.append([len(text) - len(new) + kept for text, new, kept in lengths])
    for (states, ran), places in zip(seen, ends, strict=True):
        for b, (text, end) in enumerate(zip(state.known, places, strict=True)):
            _, trace = read(m, text[:end], taps)
            for u, tap in enumerate(taps):
                assert (states[u + 1][b] - trace[tap][0, -1]).abs().max() < 1e-9
                assert (ran[u][b] - trace[tap][0, -1]).abs().max() < 1e-9
    assert drafter.sublayers == [0, 1, 4, 5, 8, 9, 10, 11]


def turns(angles):
    """The states and `run` of units that turn a vector. What is skipped is
    missing from their sum."""
    turn = [torch.tensor([[torch.cos(a), torch.sin(a)], [-torch.sin(a), torch.cos(a)]])
            for a in angles]
    states = [torch.tensor([[1.0, 0.0]])]
    for matrix in turn:
        states.append(states[-1] @ matrix)
    return states, lambda u, x: x @ turn[u]


def test_the_dynamic_programme_by_hand():
    sets, _ = nearest(*turns(torch.tensor([0.5, 0.1, 0.3, 0.05])), [1, 1, 1, 1], 3)
    assert sets == [[3], [1, 3], [1, 2, 3]]


def test_times_by_brute_force():
    """Of all sets that save a given time the one that turns least is skipped; nothing
    of time 0 is."""
    angles, times = torch.tensor([0.31, 0.1, 0.17, 0.05, 0.23, 0.02]), [2, 1, 3, 1, 2, 0]
    sets, ends = nearest(*turns(angles), times, sum(times))
    every = [list(some) for n in range(1, 6) for some in combinations(range(5), n)]
    for time, found in enumerate(sets, 1):
        fit = [some for some in every if sum(times[u] for u in some) == time]
        assert found == min(fit, key=lambda some: float(angles[some].sum()), default=None)
        if found:
            left = angles.sum() - angles[found].sum()
            assert torch.allclose(ends[time][0], torch.stack([torch.cos(left), torch.sin(left)]))
    few, _ = nearest(*turns(angles), times, sum(times), least=0.99)
    assert few[0] == [3] and few[-1] is None, "what turns away too far is given up"


def test_knapspec_drafts_with_the_set_that_promises_most_and_not_at_all_where_none_gains(
        monkeypatch):
    m = make(LIVELY["llama"])
    drafter, m.unembed = KnapSpec(m, costs=free(m)), lambda x: x
    assert drafter.times == [0, 0, 1, 2, 1, 2, 1, 2, 1, 2, 0, 0]
    ends = torch.eye(17)[:13, None].repeat(1, 4, 1)         # (J, N, V) one-hot "states"
    states = [None] * 12 + [torch.eye(17)[torch.tensor([0, 0, 1, 2])]]
    # their best tokens: 1 everywhere, 2 everywhere; each right once
    monkeypatch.setattr(clasp, "nearest", lambda *_, **__: ([[4], [4, 6]] + [None] * 10, ends))
    drafter.choose(states, None)
    assert drafter.rule.longest == 0 and drafter.sublayers == [
        *range(12)], "alpha 1/3 against c 17/18"
    ends[2] = states[-1]                    # the second one is always right: alpha 5/6, and c 4/6
    drafter.costs = Costs((1.0, 1e-9) * 6, 0.0)
    drafter.choose(states, None)
    assert drafter.sublayers == [0, 1, 2, 3, 5, 7, 8, 9, 10, 11] and drafter.rule.longest > 0
