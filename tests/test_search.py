"""What a set is worth by hand, searches with known ends, and a run that is killed. The Teacher's
own tests stand in test_layerskip.py."""
import itertools
import json
import math
import multiprocessing
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import expected
import pytest
import torch
from tiny import FAMILIES, LLAMA, argv_of, command, make, wide

import checkpoint
from control import expected_tokens_along
from lab.save import save
from methods.costs import by_weights
from methods.standin import ShortHead, read_vocab
from sampling import to_probs
from search import Calibration, Space, Teacher, Trial, speedup
from support import search
from support.skips import read_skip
from support.texts import BOUNDARY

TEXTS = ["Once upon a time", "She saw", "x", "never read"]      # 16 tokens, 7, 1
SMALL = dict(vocab_size=64, n_layers=3)
WARM = partial(to_probs, temperature=0.7, top_p=0.8)
call = command(search.main)


def calibrate(model, texts=TEXTS, tokens=24, probs=to_probs):
    return Calibration(model, expected.byte_tokenizer(), texts, tokens, probs)


def test_a_calibration_takes_the_first_tokens_document_by_document():
    model, tokenizer = make(replace(LLAMA, **SMALL, max_len=12)), expected.byte_tokenizer()
    one, two = tokenizer.encode(TEXTS[0]).ids[:12], tokenizer.encode(TEXTS[1]).ids
    for tokens, ids in ((3, [one[:3]]), (12, [one]), (13, [one, two[:1]]), (99, [one, two])):
        assert calibrate(model, TEXTS[:2], tokens).ids == ids


@pytest.mark.parametrize("last", [1.0, 9.0, 60.0])
@pytest.mark.parametrize("family, probs", [("llama", to_probs), ("gemma2", WARM)])
def test_speedup_by_hand(family, probs, last):
    """A block of 17 tokens costs `last`. Gamma is at least 1 even where nothing is gained."""
    model = make(replace(FAMILIES[family], **SMALL))
    costs = replace(by_weights(model.c), wide=((1, 1.0), (17, last)))
    sizes = [sum(p.numel() for p in part.parameters()) for b in model.blocks
             for part in (b.attn, b.mlp)]
    head, calibration = model.c.vocab_size * model.c.dim, calibrate(model, probs=probs)
    for subs in (range(6), [0, 1, 3, 4, 5], [2, 5]):
        series = [Teacher(model, ids, probs).acceptance(subs) for ids in calibration.ids]
        c = (sum(sizes[i] for i in subs) + head) / (sum(sizes) + head)
        gains = [expected_tokens_along(series, g) / (g * c + 1 + (last - 1) * g / 16)
                 for g in range(1, 17)]
        t = speedup(calibration, costs, subs)
        assert t.speedup == pytest.approx(max(gains)) == gains[t.gamma - 1]
        assert (t.cost, t.alpha) == pytest.approx((c, float(torch.cat(series).mean())))
        assert last < 60 or (t.gamma == 1 and t.speedup < 1)


def everything(n):
    return list(itertools.product((0, 1), repeat=n))


def planted(n, seed=0):
    """A function of the bits with terms of one and of two, as {set: value}."""
    g, z = torch.Generator().manual_seed(seed), wide(everything(n))
    w, pairs = (torch.randn(*shape, generator=g).double() for shape in ((n,), (n, n)))
    values = z @ w + (z @ pairs.triu(1) * z).sum(1) / 2
    return dict(zip(everything(n), values.tolist(), strict=True))


def run(space, worth, count, seed=0, entries=()):
    """The entries that a search for the best set adds."""
    def evaluate(sublayers):
        z = tuple(int(sub not in sublayers) for sub in space.skippable)
        return Trial(worth(z), 0.0, 0.0, 1)
    return list(search.search(space, evaluate, count, seed, entries))


def sets(entries):
    return [tuple(map(int, e["bits"])) for e in entries]


def test_sets_that_may_be_tried():
    """Any number of skips is equally likely, then any such set."""
    space, g = Space(4, (0, 2, 3, 7)), torch.Generator().manual_seed(0)
    assert space.sublayers((1, 0, 0, 1)) == [1, 2, 3, 4, 5, 6]
    assert space.allowed(wide(everything(4))).all()
    assert not Space(2, (0, 1, 2, 3)).allowed(torch.ones(4)), "something must stay"
    drawn = [tuple(space.random(g).int().tolist()) for _ in range(3000)]
    for z in everything(4):
        assert drawn.count(z) == pytest.approx(3000 / 5 / math.comb(4, sum(z)), rel=0.3)


def test_it_finds_the_optimum_within_sixty_trials():
    values = planted(10, 2)
    entries = run(Space(8, tuple(range(2, 12))), values.get, 60)
    assert max(e["speedup"] for e in entries) == max(values.values())
    assert len(set(sets(entries))) == 60
    fits = [e["theta"] for e in entries]
    assert fits[9] is None and fits[10] == fits[14] != fits[15] == fits[19], (
        "a fit lasts five trials")


def test_it_ends_when_every_set_was_tried():
    assert sorted(sets(run(Space(6, (2, 3, 5, 6)), sum, 100))) == everything(4)


def test_a_trial_follows_from_the_seed_and_the_trials_before_it():
    values, space = planted(8).get, Space(5, tuple(range(8)))
    whole = run(space, values, 18)
    for cut in (0, 9, 14, 18):
        torch.manual_seed(cut)
        assert run(space, values, 18, entries=json.loads(json.dumps(whole[:cut]))) == whole[cut:]
    assert sets(run(space, values, 18, seed=1)) != sets(whole)


@pytest.fixture
def flags(tmp_path, monkeypatch):
    """A command line, with a model whose drafts are worth something, a text and costs."""
    monkeypatch.chdir(tmp_path)
    model = make(replace(LLAMA, **SMALL)).float()
    for b in model.blocks[1:]:
        b.mlp.down.mul_(0.3)
        b.attn.wo.mul_(0.2)
    save(model, tmp_path / "model", expected.byte_tokenizer())
    Path("text.txt").write_text(BOUNDARY.join(TEXTS))
    Path("costs.json").write_text('{"attention": 0.5, "mlp": 2.0, "head": 1.5, "step": 1.0}')
    given = dict(model="model", text="text.txt", out="out", tokens=24, trials=6, device="cpu")
    return lambda **changes: argv_of(given | changes)


def test_a_run_finds_the_best_set_at_the_costs_of_a_file(call, flags):
    """At a temperature, with a draft vocabulary."""
    assert call(*flags(costs="costs.json", temperature=0.7, top_p=0.8, trials=12,
                       draft_vocab=16))[0] == 0
    model, tokenizer = checkpoint.load("model", "cpu", torch.float32)
    entries = [json.loads(line) for line in Path("out/trials.jsonl").read_text().splitlines()[1:]]
    short = ShortHead(model, read_vocab("out/draft_vocab.json", 64))
    teachers = Calibration(model, tokenizer, TEXTS, 24, WARM).teachers
    for e in entries:
        subs = [0, 1] + [sub for sub, bit in enumerate(e["bits"], 2) if bit == "0"]
        alpha = float(torch.cat([teacher.acceptance(subs, short) for teacher in teachers]).mean())
        c = (sum((0.5, 2.0)[i % 2] for i in subs) + 1.5 * 16 / 64 + 1) / 10
        assert (e["alpha"], e["c"]) == pytest.approx((alpha, c))
        assert (e["speedup"] < max(e["speedup"] for e in entries)
                or read_skip("out/skip.json", 3) == subs)


def test_where_nothing_is_gained_the_advice_is_not_to_draft():
    entry = {"bits": "01", "alpha": 0.5, "c": 0.25, "gamma": 3}
    assert ([search.skip_file(Space(2, (1, 2)), entry | {"speedup": s})["gamma"]
             for s in (1.1, 1.0)]
            == [3, 0])


def killed(argv):
    """A search whose process is killed in its fourth trial."""
    calls, honest = itertools.count(), search.speedup
    search.speedup = lambda *args: honest(*args) if next(calls) < 3 else os.kill(os.getpid(),
                                                                                 signal.SIGKILL)
    search.main(argv)


def test_a_search_that_was_killed_goes_on_where_it_was(call, flags):
    """Wherever in its log that was. Another search starts from nothing, and says so."""
    process = multiprocessing.get_context("fork").Process(target=killed, args=[flags()])
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    contents = lambda out: {p.name: p.read_bytes() for p in Path(out).iterdir()}     # noqa: E731
    log, _, want = contents("out")["trials.jsonl"], call(*flags(out="whole")), contents("whole")
    lines = want["trials.jsonl"].splitlines(True)
    assert log == b"".join(lines[:4])
    for left in (log, log[:-9], lines[0]):
        Path("out/trials.jsonl").write_bytes(left)
        assert "new search" not in call(*flags())[2] and contents("out") == want
    # as another program may have added
    for other in (b"7\n", b'{"step": 1}\n', b"half of a line\n"):
        Path("out/trials.jsonl").write_bytes(b"".join(lines[:3]) + other + lines[3])
        call.refuses(flags(), Path("out"), "out/trials.jsonl is damaged")
    Path("out/trials.jsonl").write_bytes(log)
    assert "new search" in call(*flags(seed=1))[2] and contents("out") != want


def test_another_model_text_or_space_is_another_search(flags):
    model, other, a, costs = make(LLAMA), make(LLAMA), search.parse(flags()), by_weights(LLAMA)
    other.blocks[5].mlp.down[-1, -1] += 1e-9
    heads = [search.header(a, m, expected.byte_tokenizer(), texts, costs, Space(6, free))["search"]
             for m in (model, other) for texts in (["ab"], ["a", "b"]) for free in ((1, 2), (1, 3))]
    assert len(set(heads)) == 8


@pytest.mark.parametrize("change, word", [
    ({"model": "none"}, "none"), ({"text": "no.txt"}, "no.txt"), ({"costs": "no.json"}, "no.json"),
    ({"tokens": 15}, "--tokens"), ({"top_p": 0}, "top_p"),
    ({"draft_vocab": 64}, "draft vocabulary of 64"), ({"out": "taken"}, "taken"),
    ({"out": "logged"}, "logged")], ids=str)
def test_bad_input_is_one_line(change, word, call, flags, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "poems.txt").touch()
    (tmp_path / "logged").mkdir()
    (tmp_path / "logged" / "trials.jsonl").write_text('{"loss": 1.5}\n')   # another program's
    call.refuses(flags(**change), tmp_path, word)
