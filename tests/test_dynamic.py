"""DEL: the text stays, and each choice of an exit is the one that its paper describes."""
from types import SimpleNamespace
from unittest.mock import Mock

import promises
import pytest
import torch
from tiny import LLAMA, PROMPTS, TINY_GEMMA, each_family, make, warm

from layerskip import early_exit
from methods import dynamic
from methods.costs import Machine
from methods.dynamic import DEL
from sampling import Coins, to_probs
from search import Teacher
from speculative import generate, rounds

FREE = Machine(6, 0.001, 0.001, 0.0)     # every draft gains, the earlier ones more


def priced(drafter, machine):
    """A DEL with other costs."""
    L = drafter.model.c.n_layers
    drafter.costs = [machine.draft(early_exit(L, e)).start for e in drafter.exits]
    return drafter


DRAFTERS = {"del": lambda m: priced(DEL(m, exits=[2, 5], every=2, gamma=4), FREE)}
test_greedy_identity = promises.greedy_identity(DRAFTERS)
test_poison = promises.poison(DRAFTERS, count=12)   # neither drafts nor scores read what is dead
test_exact_law = promises.exact_law({
    "del": (TINY_GEMMA, lambda m: priced(DEL(m, gamma=2), Machine(3, 0.002, 0.002, 0.0))),
}, count=2, room=2)


def test_only_the_target_itself_can_teach(models):
    with pytest.raises(ValueError, match="the same model that decodes"):
        generate(models["llama"], PROMPTS, 4, DEL(make(LLAMA, 9)))


@each_family
def test_shadows_are_what_each_exit_would_have_drafted(models, family, monkeypatch):
    """At the prompt's last two places and along every text, whatever drafted, by `Teacher`."""
    monkeypatch.setattr(dynamic, "OMEGA", 1.0)
    monkeypatch.setattr(dynamic, "WINDOW", 2)
    m, exits = models[family], [1, 3, 5]
    drafter, want, places = priced(DEL(m, exits=exits, gamma=3), FREE), 0, 0
    *_, (state, _) = rounds(m, PROMPTS, 12, drafter, warm, Coins(5))
    for prompt, text in zip(PROMPTS, state.known, strict=True):
        teacher, n = Teacher(m, text, warm), len(prompt)
        a = torch.stack([teacher.acceptance(early_exit(6, e)) for e in exits])
        want += a[:, max(0, n - 2) : n].sum(1) + a[:, n - 1 : len(text) - 1].sum(1)
        places += min(2, n) + len(text) - n
    hits, misses, _, _ = drafter.counts
    assert (hits - want).abs().max() < 1e-6
    assert (hits + misses).tolist() == pytest.approx([places] * 3)


def headless(m, machine):
    """A DEL with one exit, whose states are logits already, and score(logits, p, true) for it."""
    drafter = priced(DEL(m, exits=[1]), machine)
    drafter.model = SimpleNamespace(unembed=lambda x: x, c=m.c)
    state = SimpleNamespace(probs=to_probs)
    return drafter, lambda logits, p, true: drafter.score(state, {1: logits}, p, true)


def test_counts_fade_by_hand(models, monkeypatch):
    """Two places a round: one that agrees, sure to .9, and one that does not, sure to .6."""
    monkeypatch.setattr(dynamic, "OMEGA", 0.5)
    drafter, score = headless(models["llama"], FREE)
    for _ in range(2):
        score(torch.tensor([[[0.9, 0.1], [0.4, 0.6], [0.5, 0.5]]]).log(),
              torch.tensor([[[1.0, 0.0]] * 3]), torch.tensor([[True, True, False]]))
    assert drafter.counts[:, 0].tolist() == pytest.approx([1.5, 1.5, 1.5 * 0.9, 1.5 * 0.6])
    assert drafter.rule.threshold == pytest.approx(((1.35 + 1) / 2.5 + 0.9 / 2.5) / 2)


def test_del_knows_the_heads_share(models):
    """Counted by weights, a block has 3072 + 4608 and the head 544."""
    assert DEL(models["llama"]).costs[0] == pytest.approx((7680 + 544) / (6 * 7680 + 544))
    machine = Machine.of(6, 1.0, 1.0, 22.0)     # a draft costs 24 of 34
    drafter, score = headless(models["llama"], machine)
    score(torch.zeros(1, 1, 17).double(), to_probs(torch.zeros(1, 1, 17)), torch.tensor([[True]]))
    assert drafter.counts[0] == 1 and drafter.rule.longest == 0, "one hit: alpha = 2/3 < 24/34"


@each_family
def test_del_drafts_at_the_exit_that_pays_and_not_at_all_where_none_does(models, family):
    m = models[family]
    drafter = priced(DEL(m), Machine.of(6, 1.0, 1.0, 100.0))
    assert sum(int(r.proposed.sum()) for _, r in rounds(m, PROMPTS, 20, drafter)) == 0
    assert bool((drafter.counts[:2].sum(0) > 15).all()), "and it goes on learning"
    drafter = priced(DEL(m), Machine(6, 0.0001, 0.0001, 0.0))    # the best alpha wins
    generate(m, PROMPTS, 20, drafter, warm, Coins(1))
    alphas = (drafter.counts[0] + 1) / (drafter.counts[:2].sum(0) + 2)
    assert drafter.sublayers == early_exit(6, 1 + int(alphas.argmax()))
    assert drafter.rule.longest == 18


def test_shadows_are_scored_as_often_as_asked(models):
    drafter = DEL(models["llama"], every=3)
    drafter.score = Mock(wraps=drafter.score)
    _, passes = generate(models["llama"], PROMPTS, 20, drafter)
    assert drafter.score.call_count == 1 + passes // 3
