"""HAMburger's merging by hand, its one computation for learning and writing, and its exact
drafts."""
import promises
import pytest
import torch
import torch.nn.functional as F
from tiny import PROMPTS, TINY, TINY_GEMMA, each_family, oracle

from drafter import NGram
from lab import hamburger
from lab.hamburger import BurgerDraft, Hamburger, begins, latest, losses, score, write
from methods.then import Then
from model import Placement

TEXTS = torch.tensor([[1, 5, 3, 2, 9, 4, 4, 7, 7, 7], [3, 8, 8, 8, 1, 2, 2, 16, 0, 4]])


def wild(model, **shape):
    """A HAMburger with random new parts, and a trunk that is no longer the model."""
    burger = Hamburger(model, **shape).requires_grad_(False)
    g, trunk = torch.Generator().manual_seed(1), set(burger.trunk.parameters())
    for p in burger.parameters():
        noise = torch.randn(p.shape, generator=g, dtype=torch.float64).to(p)
        p += (0.02 if p in trunk else 0.3) * noise
    return burger


def test_the_merging_by_hand(models):
    """One head at a time. A single token stays as it is, and padding is not read."""
    burger, ids = wild(models["llama"]), [3, 7, 2]
    tokens = torch.tensor([[[*ids, 9], [5, 9, 9, 9]]])
    got = burger.compose(tokens, torch.tensor([[3, 1]]))[0]
    x = burger.trunk.tok[ids]                                                   # (3, dim)
    mean, pieces = x.mean(0), []
    keys, values = (x @ burger.kv.T + burger.place[:3]).chunk(2, -1)
    for query, k, v in zip(mean.chunk(4), keys.chunk(4, -1), values.chunk(4, -1), strict=True):
        pieces.append((k @ query / 8**0.5).softmax(0) @ v)
    assert torch.allclose(got[0], mean + burger.out @ torch.cat(pieces))
    assert torch.equal(got[1], burger.trunk.tok[5])
    x = torch.stack([burger.trunk.embed(torch.tensor([5]))[0], got[0]])[None]
    at = Placement(torch.tensor([[0, 3]]), torch.tensor([[0, 1]]), 0, 4)  # stands at its last token
    want = burger.trunk.run(x, at._replace(end=2), table=burger.trunk.angles(4))[0, 1]
    assert torch.allclose(latest(burger, [[[5], ids]])[0, 0, 3], want)


@each_family
def test_untouched_it_is_the_model(models, family):
    """With entries of one token, as a scorer and as a writer."""
    m, burger = models[family], Hamburger(models[family])
    assert score(burger, m, torch.tensor(PROMPTS[:1]), 2.0) == (pytest.approx(0, abs=1e-9), 1.0)
    assert sum(write(burger, PROMPTS[0], 9, 2.0), []) == oracle(m, PROMPTS[0], 9)


def said(burger, row, entry, p):
    """After the entries `row` and the tokens `entry`: KL(p || what a step says), its stop logit."""
    x = burger.following(latest(burger, [row]), torch.tensor([[entry]]).long())[0, 0, -1]
    q = burger.trunk.unembed(x[None, None])[0, 0].log_softmax(-1)
    return float((p.exp() * (p - q)).sum()), burger.ending(x)


@each_family
def test_learning_sees_what_writing_computes(models, family, monkeypatch):
    """Each token of a text, said by hand from the entries before it, and the same losses."""
    monkeypatch.setattr(hamburger, "SHARE", 0.97)           # a random model is never sure
    burger, p, kl, stop = wild(models[family]), models[family](TEXTS).log_softmax(-1), [], []
    first = begins(F.pad(-(p.exp() * p).sum(-1)[:, :-1], (1, 0)), 4)
    assert 0.3 < first.double().mean() < 0.9, "entries of several tokens"
    for b, text in enumerate(TEXTS.tolist()):
        row, entry = [[text[0]]], []
        for t in range(1, len(text)):
            if first[b, t] and t > 1:
                row, entry = [*row, entry], []
            far, ends = said(burger, row, entry, p[b, t - 1])
            kl.append(far)
            if t + 1 < len(text):
                stop.append(float(F.softplus(-ends if first[b, t + 1] else ends)))
            entry = [*entry, text[t]]
    assert [float(x) for x in losses(burger, models[family], TEXTS)] == pytest.approx(
        [sum(kl) / len(kl), sum(stop) / len(stop)])


test_greedy_identity = promises.greedy_identity({
    "entries of two": lambda m: BurgerDraft(wild(m, most=2, blocks=1), 0.4),
    "and n-gram": lambda m: Then(BurgerDraft(wild(m), 0.5), NGram(3, 1))}, on=["cpu"])
test_exact_law = promises.exact_law({
    family: (c, lambda m: BurgerDraft(wild(m, most=3, blocks=1), 0.5))
    for family, c in (("llama", TINY), ("gemma2", TINY_GEMMA))}, count=2)
