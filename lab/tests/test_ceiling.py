"""The most that a draft can bring, compared with every continuation of a small model; and how many
passes `check` takes."""
from functools import partial
from itertools import product

import pytest
import torch
from test_quant import dense
from tiny import FAMILIES, PROMPTS, command, each_family, make, warm

from lab.bench import __main__ as bench
from lab.bench import ceiling
from lab.bench.shared import WEIGHTS
from machine.quant import quantise
from methods.costs import by_weights
from model import Transformer
from sampling import to_probs
from search import Teacher

sampled = partial(to_probs, temperature=1.0)
call = command(bench.main)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_no_tree_of_three_tokens_beats_the_best_tree(models, family):
    """The sum of the three largest chances of all continuations of up to three tokens, at two
    places."""
    m = models[family]
    V = m.c.vocab_size
    spots = []
    want = 0.0
    for ids, n in zip(PROMPTS, (len(PROMPTS[0]), 2), strict=False):
        spots.append((Teacher(m, ids, ceiling.raw), n))
        known = torch.tensor(ids[:n])
        chances = {(): 1.0}
        for length in range(3):
            paths = list(product(range(V), repeat=length))
            texts = torch.cat([known.expand(len(paths), n), torch.tensor(paths).long()], 1)
            for path, p in zip(paths, sampled(m(texts)[:, -1]), strict=True):
                chances |= {(*path, t): chances[path] * float(p[t]) for t in range(V)}
        want += sum(sorted((x for path, x in chances.items() if path), reverse=True)[:3])
    got = ceiling.best_trees(spots, (1, 3), sampled)
    assert got[3] == pytest.approx(1 + want / 2) and 1 < got[1] < got[3]


def test_what_lookup_copies_along_a_text(models):
    """After 5 6 5 it copies the 6, and after 5 6 5 6 the 5. After 5 6 and after the 1 nothing is
    found."""
    text = Teacher(models["llama"], [5, 6, 5, 6, 1], ceiling.raw)
    p = sampled(text.p)[0].tolist()
    assert ceiling.copied(text, 2, sampled).tolist() == pytest.approx([0, p[2][6], p[3][5], 0])


@each_family
def test_the_acceptance_of_a_copy_is_that_of_its_first_tokens(family):
    m = make(FAMILIES[family])
    twin = quantise(m, "int4")
    teacher = Teacher(m, PROMPTS[0], ceiling.raw)
    rates, choices = ceiling.scored(teacher, 1, warm, {}, twin, [])
    target, draft = (model(torch.tensor([PROMPTS[0]]))[0] for model in (m, dense(twin)))
    assert rates["itself in int4"].tolist() == pytest.approx(
        torch.minimum(warm(target), warm(draft)).sum(-1).tolist())
    order = draft.argsort(-1, descending=True)
    want = [row.tolist().index(t) for row, t in zip(order, target.argmax(-1), strict=True)]
    assert choices["itself in int4"].tolist() == want and max(want) > 0


def test_a_sibling_by_hand():
    """Of eight first tokens, five are right and two more are the second choice, so a chain of one
    brings 1 + 5/8, and with a sibling 1 + 7/8, for the price of a block of three."""
    choices = torch.tensor([0, 0, 1, 0, 3, 0, 1, 0])
    series = [torch.full((8,), 5 / 8)]

    def block(T):
        return 0.7 + 0.3 * T if T <= 3 else 100.0

    found = ceiling.wider(choices, series, 0.1, block)
    assert found["rejected"] == 3 / 8
    assert [found[name] for name in ("2nd", "3rd", "4th")] == pytest.approx([2 / 3, 0, 1 / 3])
    assert found["sibling"] == pytest.approx((1 + 7 / 8) / (0.1 + 1.6))


def test_check_reads_a_model_in_few_passes(call, monkeypatch):
    """The hundreds that it took once were eight minutes for a model of half a billion weights."""
    passes = []
    run = Transformer.run
    monkeypatch.setattr(Transformer, "run", lambda *a, **how: passes.append(1) or run(*a, **how))
    monkeypatch.setattr(ceiling, "kept_costs", lambda model: (by_weights(model.c), {}))
    status, out, _ = call("check", "--model", WEIGHTS / "stories-draft")
    assert status == 0 and "| itself in int4 |" in out and "| any 16 tokens |" in out
    assert "| with one sibling |" in out
    assert len(passes) < 320
