"""HAMburger: entries by hand, one computation for learning, writing and drafting, what its score means, and a
text that does not change where the model checks it."""
import copy
import doctest
import inspect
from dataclasses import replace
from pathlib import Path

import promises
import pytest
import torch
from test_heads import Turns
from tiny import LIVELY, LLAMA, PROMPTS, TINY, TINY_GEMMA, each_family, make, oracle, warm

from layerskip import SelfDraft, without
from notebooks import hamburger
from notebooks.hamburger import BurgerDraft, Hamburger, begins, latest, losses, pack, score, tune, write
from sampling import Coins
from speculative import NGram, Then, generate, rounds

ROOT = Path(__file__).parent.parent


def wild(model, **shape):
    """A HAMburger with random new parts, and a trunk that is no longer the model."""
    burger = Hamburger(model, heads=2, **shape).requires_grad_(False)
    g = torch.Generator().manual_seed(1)
    trunk = set(burger.trunk.parameters())
    for p in burger.parameters():
        noise = torch.randn(p.shape, generator=g, dtype=torch.float64).to(p)
        p += (0.02 if p in trunk else 0.3) * noise
    return burger


@pytest.fixture(scope="module")
def burgers(models):
    return {family: wild(m) for family, m in models.items()}


def test_its_first_line_says_what_it_is_not_and_nobody_imports_it():
    lines = inspect.getsource(hamburger).splitlines()
    assert "NOT lossless" in lines[0] and "NOT the model" in lines[0] and len(lines) <= 220
    for path in (p for folder in (".", "methods", "machine", "support") for p in ROOT.glob(f"{folder}/*.py")):
        assert "hamburger" not in path.read_text(encoding="utf-8"), path


# --- entries


def test_entries_begin_where_the_teacher_is_unsure():
    """By hand: .6 is less than .3 of 2.5, which stays the largest; .04 is almost 0; 4 in a row are enough."""
    entropy = torch.tensor([[9.0, 2.5, 0.6, 0.74, 0.76, 0.04, 0.2, 0.3, 0.01, 0.01, 0.01, 0.01],
                            [0.0, 0.0, 0.04, 0.06, 0.01, 0.04, 0.01, 0.01, 3.0, 3.0, 0.89, 0.91]])
    shown = ["".join(".x"[int(b)] for b in row) for row in begins(entropy, 4)]
    assert shown == ["xx..x..x...x", "xx.x...xxx.x"]


def test_packing_loses_nothing():
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(17, (3, 20), generator=g)
    first = torch.rand(3, 20, generator=g) < 0.5
    first[:, 0] = True
    first |= torch.arange(20) % 4 == 0              # none has more than four
    entries, count = pack(tokens, first, 4)
    for b in range(3):
        rows = [entry[:k].tolist() for entry, k in zip(entries[b], count[b].tolist(), strict=True)]
        assert sum(rows, []) == tokens[b].tolist()
        starts = [sum(map(len, rows[:i])) for i, row in enumerate(rows) if row]
        assert starts == first[b].nonzero()[:, 0].tolist()
    assert count.shape[1] == first.sum(1).max() and (count == 0).any(), "rows differ"


# --- one computation


def test_a_single_token_stays_as_it_is_and_padding_is_nobody(burgers):
    burger = burgers["llama"]
    ids, count = torch.tensor([[[5, 0, 0, 0], [3, 7, 2, 0], [0, 0, 0, 0]]]), torch.tensor([[1, 3, 0]])
    x = burger.compose(ids, count)
    assert torch.equal(x[0, 0], burger.trunk.embed(ids[0, 0, :1])[0])
    other = ids.clone()
    other[0, 0, 1:], other[0, 1, 3], other[0, 2] = 9, 9, 9
    assert torch.allclose(burger.compose(other, count)[:, :2], x[:, :2], atol=1e-12)
    turned = torch.tensor([[[5, 0, 0, 0], [2, 7, 3, 0], [0, 0, 0, 0]]])
    assert (burger.compose(turned, count)[0, 1] - x[0, 1]).abs().max() > 1e-3, "the order counts"
    mean = burger.trunk.embed(ids[0, 1, :3]).mean(0)
    assert (x[0, 1] - mean).abs().max() > 1e-3
    fresh = Hamburger(make(LIVELY["llama"]), heads=2)
    assert torch.allclose(fresh.compose(ids, count)[0, 1], fresh.trunk.embed(ids[0, 1, :3]).mean(0))


def test_the_merging_by_hand(burgers):
    """One head at a time, with plain loops."""
    burger, ids = burgers["llama"], [3, 7, 2]
    got = burger.compose(torch.tensor([[[*ids, 0]]]), torch.tensor([[3]]))[0, 0]
    x = burger.trunk.tok[ids]                                                   # (3, dim)
    mean, D = x.mean(0), x.shape[1] // 2
    both = x @ burger.kv.T + burger.place[:3]
    pieces = []
    for h in range(2):
        mine = slice(h * D, (h + 1) * D)
        k, v = both[:, :2 * D][:, mine], both[:, 2 * D :][:, mine]
        pieces.append(torch.softmax(k @ mean[mine] / D**0.5, 0) @ v)
    assert torch.allclose(got, mean + burger.out @ torch.cat(pieces))


@each_family
def test_a_token_is_said_from_all_tokens_before_it_in_its_entry(burgers, family):
    burger = burgers[family]
    features = latest(burger, [[[5], [3, 7]]])
    said = burger.following(features, torch.tensor([[[2, 9, 4]]]))[0, 0]        # (4, dim)
    for j in range(3):
        ids = torch.tensor([[[2, 9, 4]]])
        ids[0, 0, j] = 11
        moved = (burger.following(features, ids)[0, 0] - said).abs().amax(-1) > 1e-9
        assert moved.tolist() == [k > j for k in range(4)]


@each_family
def test_entries_of_one_token_at_the_start_are_the_model(models, family):
    """Word by word, and as a writer; and the trunk is a copy."""
    m = models[family]
    burger, tokens = Hamburger(m, heads=2), torch.tensor(PROMPTS[:1])
    features = burger.read(torch.nn.functional.pad(tokens[..., None], (0, 3)), torch.ones_like(tokens))
    assert torch.allclose(burger.trunk.unembed(features[:, :, 3]), m(tokens), atol=1e-9)
    assert score(burger, m, tokens, 2.0) == (pytest.approx(0, abs=1e-9), 1.0)   # 2: no head is so sure
    assert sum(write(burger, PROMPTS[0], 9, 2.0), []) == oracle(m, PROMPTS[0], 9)
    before = m.tok.clone()
    with torch.no_grad():
        burger.trunk.tok += 1
    assert torch.equal(m.tok, before) and burger.micro.tok is burger.trunk.tok


@each_family
def test_a_batch_of_texts_is_each_of_them(burgers, family):
    """Of other lengths, entries and positions: what is padded is not read, and the position is that of the
    last token."""
    burger = burgers[family]
    rows = [[[5], [3], [7, 2, 9], [4]], [[1], [2, 2]], [[4], [4, 4, 1, 3], [8], [8], [8, 9]]]
    together = latest(burger, rows)
    for b, row in enumerate(rows):
        assert torch.allclose(latest(burger, [row]), together[b : b + 1], atol=1e-9)
    ids, at, m = torch.tensor([[5, 3]]), torch.tensor([[0, 4]]), burger.trunk
    second = burger.compose(torch.tensor([[[3, 7, 2, 9]]]), torch.tensor([[4]]))
    want = m.run(torch.cat([m.embed(ids[:, :1]), second], 1), at)   # the second entry ends with token 4
    assert torch.allclose(latest(burger, [[[5], [3, 7, 2, 9]]])[0, 0, 3], want[0, 1], atol=1e-9)


@each_family
def test_learning_sees_what_writing_computes(models, burgers, family, monkeypatch):
    """Each token of a text, said by hand from the entries before it, and the same losses."""
    monkeypatch.setattr(hamburger, "SHARE", 0.97)           # a random model is never sure
    burger, m = burgers[family], models[family]
    tokens = torch.tensor([[1, 5, 3, 2, 9, 4, 4, 7, 7, 7, 2, 11], [3, 8, 8, 8, 1, 2, 2, 16, 0, 4, 4, 4]])
    tokens = torch.cat([tokens, torch.tensor([generate(m, PROMPTS[:1], 11)[0][0] + [3]])])
    p = m(tokens)
    entropy = -(p.softmax(-1) * p.log_softmax(-1)).sum(-1)
    entropy = torch.cat([entropy[:, :1], entropy[:, :-1]], 1)
    first, kl, stop = begins(entropy, 4), [], []
    for b, text in enumerate(tokens.tolist()):
        row, said = [[text[0]]], []
        for t in range(1, len(text)):
            if first[b, t] and t > 1:
                row, said = [*row, said], []
            x = burger.following(latest(burger, [row]), torch.tensor([[said]], dtype=torch.long))[0, 0, -1]
            q, teach = burger.trunk.unembed(x[None, None])[0, 0].log_softmax(-1), p[b, t - 1].log_softmax(-1)
            kl.append(float((teach.exp() * (teach - q)).sum()))
            if t + 1 < len(text):
                ends, goes = burger.ending(x), bool(~first[b, t + 1])
                stop.append(float(torch.nn.functional.softplus(ends if goes else -ends)))
            said = said + [text[t]]
    got = losses(burger, m, tokens)
    assert 0.3 < first.double().mean() < 0.9, "entries of several tokens"
    assert float(got[0]) == pytest.approx(sum(kl) / len(kl)) and float(got[1]) == pytest.approx(
        sum(stop) / len(stop))


def test_the_score_is_that_of_a_writer(models, burgers):
    """By hand: the entries that it would have made of a text, token by token."""
    burger, m = burgers["llama"], models["llama"]
    tokens = torch.tensor([[1, 5, 3, 2, 9, 4, 4, 7, 7, 7], [3, 8, 8, 8, 1, 2, 2, 16, 0, 4]])
    entries, kl, confidence = 0, 0.0, 0.5
    for text in tokens.tolist():
        row, said, p = [[text[0]]], [], m(torch.tensor([text]))[0].log_softmax(-1)
        for t in range(1, len(text)):
            x = burger.following(latest(burger, [row]), torch.tensor([[said]], dtype=torch.long))[0, 0, -1]
            q = burger.trunk.unembed(x[None, None])[0, 0].log_softmax(-1)
            kl += float((p[t - 1].exp() * (p[t - 1] - q)).sum())
            said.append(text[t])
            if 1 - torch.sigmoid(burger.ending(x)) < confidence or len(said) == 4 or t + 1 == len(text):
                row, said, entries = [*row, said], [], entries + 1
    got = score(burger, m, tokens, confidence)
    assert got == (pytest.approx(kl / 18), pytest.approx(18 / entries)) and 1 < got[1] < 4
    assert score(burger, m, tokens, 0.0)[1] == pytest.approx(18 / 6) and score(burger, m, tokens, 2.0)[1] == 1


def test_what_is_written_is_what_is_scored(burgers):
    """The entries of a greedy text are those that the score finds in it, and coins make another text."""
    burger = burgers["llama"]
    entries = list(write(burger, PROMPTS[0][:1], 15, 0.5))
    text = torch.tensor([PROMPTS[0][:1] + sum(entries, [])])
    assert text.shape == (1, 16) and len({len(entry) for entry in entries}) > 1
    assert score(burger, burger.trunk, text, 0.5)[1] == pytest.approx(15 / len(entries))
    drawn = [list(write(burger, [1], 15, 0.5, warm, Coins(s))) for s in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_tuning_learns_and_leaves_the_teacher_alone(monkeypatch):
    """One batch, again and again: both losses fall, and the trunk learns with the rest."""
    monkeypatch.setattr(hamburger, "SHARE", 0.9)
    m = make(replace(LLAMA, n_layers=2)).float()
    before, burger = copy.deepcopy(m.state_dict()), Hamburger(m, heads=2, blocks=1)
    batch = torch.randint(17, (4, 12), generator=torch.Generator().manual_seed(0))
    found = tune(burger, m, [batch] * 40, (3e-3, 3e-2))
    assert len(found) == 40 and all(torch.equal(before[k], v) for k, v in m.state_dict().items())
    assert found[-1][0] < 0.5 * found[0][0] and found[-1][1] < 0.8 * found[0][1]
    pairs = zip(burger.trunk.parameters(), m.parameters(), strict=True)
    assert all((p != q).any() for p, q in pairs), "the whole trunk"
    assert all(p.abs().max() > 0 for p in burger.parameters()), "and all that began as zero"


# --- checked by the model


DRAFTERS = {
    "burger": lambda m: BurgerDraft(wild(m), 0.5),
    "never stops": lambda m: BurgerDraft(wild(m, most=3), 0.0),
    "longer than an entry": lambda m: BurgerDraft(wild(m, most=2, blocks=1), 0.4, 5),
    "and n-gram": lambda m: Then(BurgerDraft(wild(m), 0.5), NGram(3, 1)),
    "in turns": lambda m: Turns(BurgerDraft(wild(m), 0.5), SelfDraft(m, without(6, [3]), 2), NGram(7, 1)),
}


@each_family
def test_a_burger_reads_what_others_wrote(models, family):
    """Also where a round wrote more tokens than an entry may have."""
    m, longest = models[family], 0
    burger = BurgerDraft(wild(m), 0.5)
    drafter = Turns(burger, SelfDraft(m, range(12), 7))     # drafts that are always accepted
    for state, r in rounds(m, PROMPTS, 20, drafter):
        longest = max(longest, *map(len, r.new))
        assert [sum(row, []) for row in burger.rows] == state.known
        assert all(len(entry) <= burger.burger.most for row in burger.rows for entry in row)
    assert longest == 8


test_greedy_identity = promises.greedy_identity(DRAFTERS, on=["cpu"])
test_greedy_identity_on_a_gpu = promises.greedy_identity(DRAFTERS, ["burger"], on=["cuda"])
test_exact_law = promises.exact_law({
    family: (c, lambda m: BurgerDraft(wild(m, most=3, blocks=1), 0.5))
    for family, c in (("llama", TINY), ("gemma2", TINY_GEMMA))}, count=2)


def test_an_untouched_burger_drafts_as_the_model_does(models):
    """Its first draft is what the model itself would say."""
    m = models["llama"]
    drafter = BurgerDraft(Hamburger(m, heads=2), 2.0)
    firsts = [r.accepted.tolist() for _, r in rounds(m, PROMPTS, 8, drafter)]
    assert firsts[0] == [1, 1, 1, 1], "two tokens then share an entry"


def test_doctests():
    assert doctest.testmod(hamburger).attempted > 2 and not doctest.testmod(hamburger).failed
