"""The search for sub-layers to skip: objectives by hand, searches with known ends, a run that is
killed, and what is refused.
"""
import itertools
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import expected
import pytest
import torch
from tiny import FAMILIES, LLAMA, argv_of, command, make, wide

import checkpoint
import search
from control import AdaptiveExit, Costs, expected_tokens, weight_costs
from kvcache import KVCache
from layerskip import ShortHead
from sampling import to_probs
from search import Calibration, Space, Trial, matchness, speedup, tokens_per_second
from support import cli, plots
from support.files import BOUNDARY, LOCK, lock

TEXTS = ["Once upon a time", "She saw", "x", "never read"]      # 16 tokens, 7, 1
SMALL = dict(vocab_size=64, n_layers=3)
WARM = partial(to_probs, temperature=0.7, top_p=0.8)
call = command(search.main)


# --- the objectives


def calibrate(model, texts=TEXTS, tokens=24, probs=to_probs):
    return Calibration(model, expected.byte_tokenizer(), texts, tokens, probs)


def states(model, ids, sublayers):
    """The residual stream after a draft of these sub-layers, at each position of a text that the
    model has read, as of the first token that is drafted there. (T, dim)"""
    rows, cache = [], KVCache(model.c, 1, len(ids), torch.float64)
    x = model.embed(torch.tensor([ids]))
    model.run(x, slice(0, len(ids)), cache)
    k, v = cache.k.clone(), cache.v.clone()
    for at in (slice(i, i + 1) for i in range(len(ids))):
        rows.append(model.run(x[:, at], at, cache, sublayers)[0, 0])
        cache.k.copy_(k), cache.v.copy_(v)
    return torch.stack(rows)


def test_a_calibration_takes_the_first_tokens_document_by_document():
    model = make(replace(LLAMA, **SMALL, max_len=12))
    text = expected.byte_tokenizer().encode("Once upon a She saw").ids
    for tokens, lengths in ((1, [1]), (12, [12]), (13, [12, 1]), (99, [12, 7])):
        ids = calibrate(model, TEXTS[:2], tokens).ids
        assert sum(ids, []) == text[:tokens] and list(map(len, ids)) == lengths


@pytest.mark.parametrize("family, probs", [("llama", to_probs), ("gemma2", WARM)])
def test_speedup_and_matchness_by_hand(family, probs):
    """The best gamma of the formula, and how often the best tokens agree, whatever is sampled."""
    model = make(replace(FAMILIES[family], **SMALL))
    calibration, costs = calibrate(model, probs=probs), weight_costs(model.c)
    sizes = [sum(p.numel() for p in part.parameters())
             for b in model.blocks for part in (b.attn, b.mlp)]
    head = model.c.vocab_size * model.c.dim
    for subs in (range(6), [0, 1, 3, 4, 5], [1, 2, 5]):
        both = [[model.unembed(states(model, ids, some)) for some in (range(6), subs)]
                for ids in calibration.ids]
        series = [torch.minimum(probs(p), probs(q)).sum(-1) for p, q in both]
        c = (sum(sizes[i] for i in subs) + head) / (sum(sizes) + head)
        gains = [expected_tokens(series, gamma) / (gamma * c + 1) for gamma in range(1, 17)]
        t = speedup(calibration, costs, subs)
        assert t.speedup == t.value == pytest.approx(max(gains)) == gains[t.gamma - 1]
        assert (t.cost, t.alpha) == pytest.approx((c, float(torch.cat(series).mean())))
        hits = torch.cat([p.argmax(-1) == q.argmax(-1) for p, q in both])
        assert matchness(calibration, costs, subs) == replace(t, value=float(hits.double().mean()))


@pytest.mark.parametrize("series, c, last", [
    ([wide([0.0])] * 99 + [wide([0.5] * 16)], 0.9, 1.0),    # no gain: one draft is worse than two
    ([wide([0.9] * 20)], 0.1, 4.0), ([wide([0.9] * 20)], 0.1, 17.0)])
def test_the_best_gamma_is_at_least_1_and_knows_what_a_block_costs(series, c, last):
    scored = SimpleNamespace(acceptance=lambda sublayers: series, share=1.0)
    t = speedup(scored, Costs((c, 1 - c), 0.0, ((1, 1.0), (17, last))), [0])
    gains = [expected_tokens(series, g) / (c * g + 1 + (last - 1) * g / 16) for g in range(1, 17)]
    assert (t.gamma, t.speedup) == (1 + gains.index(max(gains)), pytest.approx(max(gains)))


def test_a_draft_that_overflows_is_a_draft_that_is_refused():
    calibration = calibrate(make(replace(LLAMA, **SMALL)), TEXTS[:1])
    calibration.teachers[0].acceptance = lambda *_: wide([math.nan, 1.0, math.nan, 1.0])
    assert calibration.acceptance([0])[0].tolist() == [0, 1, 0, 1]


def test_tokens_per_second_continues_each_document(monkeypatch):
    model, seen = make(replace(LLAMA, **SMALL, max_len=16)), []
    calibration = calibrate(model)
    monkeypatch.setattr(search, "generate", lambda model, prompts, count, drafter, probs: (
        seen.append((prompts, drafter.sublayers, type(drafter.rule))) or ([[1]], None)))
    assert 0 < tokens_per_second(calibration, weight_costs(model.c), [0, 1, 4]).value < math.inf
    assert seen == [([ids[:15]], [0, 1, 4], AdaptiveExit) for ids in calibration.ids]


def test_a_draft_vocabulary_is_of_the_most_frequent_tokens():
    """The end of each document counts, too."""
    tokenizer = expected.byte_tokenizer()
    a, b = (tokenizer.token_to_id(letter) for letter in "ab")
    found = search.most_frequent(["caabb", "acb", "b"], tokenizer, SimpleNamespace(eos=(7, 9)), 3)
    assert found == {"ids": [b, *sorted([a, 7])], "share": 10 / 12}


# --- the space


def everything(n):
    return list(itertools.product((0, 1), repeat=n))


@pytest.mark.parametrize("least, most", [(0, 10**9), (1, 3)])
def test_sets_within_the_bounds(least, most):
    """A bit is a sub-layer that is skipped. Each set comes once; at random any number of skips is
    equally likely, then any set of that size."""
    space, g = Space(4, (0, 2, 3, 7), least, most), torch.Generator().manual_seed(0)
    assert space.sublayers((1, 0, 0, 1)) == [1, 2, 3, 4, 5, 6]
    assert space.groups().tolist() == [0, 0, 1, 1]
    want = [z for z in everything(4) if least <= sum(z) <= most]
    assert sorted(tuple(z.int().tolist()) for z in space.every()) == want
    assert space.allowed(wide(everything(4))).tolist() == [z in want for z in everything(4)]
    drawn = [tuple(space.random(g).int().tolist()) for _ in range(3000)]
    for z in everything(4):
        share = (z in want) / len({sum(z) for z in want}) / math.comb(4, sum(z))
        assert drawn.count(z) == pytest.approx(3000 * share, rel=0.3)


# --- the search


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
        return Trial(worth(z), 0.0, 0.0, 1, 0.0)
    return [entry for entry, _ in search.search(space, evaluate, count, seed, entries)]


def sets(entries):
    return [tuple(map(int, e["bits"])) for e in entries]


@pytest.mark.parametrize("n, seed", [(10, 2), (12, 5)])
def test_it_finds_the_optimum_within_sixty_trials(n, seed):
    values = planted(n, seed)
    entries = run(Space(8, tuple(range(2, 2 + n))), values.get, 60)
    assert max(e["value"] for e in entries) == max(values.values())
    assert len(set(sets(entries))) == 60


@pytest.mark.parametrize("sign", [1, -1])
def test_bounds_hold_wherever_the_gain_lies(sign):
    entries = run(Space(6, (2, 3, 5, 6, 8, 9, 10), 2, 4), lambda z: sign * sum(z), 30)
    assert {sum(z) for z in sets(entries)} == {2, 3, 4} and len(set(sets(entries))) == 30
    assert sum(sum(z) == 3 + sign for z in sets(entries)[10:]) >= 13, "that is where it looks"


@pytest.mark.parametrize("first", [2, 100])
def test_it_ends_when_every_set_was_tried_also_those_that_chance_does_not_find(first, monkeypatch):
    monkeypatch.setattr(search, "FIRST", first)
    monkeypatch.setattr(Space, "random", lambda space, g: wide([1, 0, 1, 0]))
    assert sorted(sets(run(Space(3, (0, 1, 2, 3)), planted(4).get, 100))) == everything(4)


def test_values_that_are_not_finite_count_as_the_worst():
    values = {"00": 2.0, "01": -math.inf, "10": 1.0, "11": math.nan}
    entries = [{"bits": bits, "value": value} for bits, value in values.items()]
    assert search.observed(Space(2, (0, 3)), entries)[1].tolist() == [2, 1, 1, 1]
    assert len(run(Space(4, tuple(range(8))), lambda z: -math.inf, 12)) == 12


def test_a_trial_follows_from_the_seed_and_the_trials_before_it():
    values, space = planted(8).get, Space(4, tuple(range(8)))
    whole = run(space, values, 18)
    for cut in (0, 9, 10, 14, 17, 18):
        torch.manual_seed(cut)
        assert run(space, values, 18, entries=json.loads(json.dumps(whole[:cut]))) == whole[cut:]
    assert sets(run(space, values, 18, seed=1)) != sets(whole)


def test_it_says_what_it_expects_of_a_trial_before_it_makes_it():
    """Once there is something to learn from; its parameters are fitted only now and then."""
    entries = run(Space(5, tuple(range(10))), planted(10).get, 30)
    assert [e["theta"] is e["expected"] is None for e in entries] == [True] * 10 + [False] * 20
    fitted = [e["trial"] for last, e in itertools.pairwise(entries) if e["theta"] != last["theta"]]
    assert fitted == [10, 15, 20, 25]


def test_it_climbs_from_the_best_sets_and_from_anywhere(monkeypatch):
    climbs = []
    monkeypatch.setattr(search, "climb", lambda score, starts, allowed: (
        climbs.append((starts, score(starts))) or climbs[-1]))
    entries = run(Space(5, tuple(range(10))), planted(10, 3).get, 11)
    (starts, scores), best = climbs[0], sorted(entries[:10], key=lambda e: -e["value"])
    assert starts[:8].tolist() == [list(z) for z in sets(best[:8])]
    assert scores[:8].tolist() == [-math.inf] * 8, "known sets are worth nothing"
    assert len(starts) == 24 and len(starts.unique(dim=0)) > 16


# --- the command


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a model whose drafts are worth something, texts, and costs."""
    folder, model = tmp_path_factory.mktemp("made"), make(replace(LLAMA, **SMALL)).float()
    for b in model.blocks[1:]:
        b.mlp.down.mul_(0.3)
        b.attn.wo.mul_(0.2)
    checkpoint.save(model, folder / "model", expected.byte_tokenizer())
    (folder / "text.txt").write_text(BOUNDARY.join(TEXTS))
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": t}) + "\n\n" for t in TEXTS))
    (folder / "empty.jsonl").write_text("\n")
    costs = {"sublayers": [1, 2.5, 1, 2, 0, 2], "head": 1.5, "call": 2.0}
    (folder / "costs.json").write_text(json.dumps(costs))
    return folder


@pytest.fixture
def flags(made, tmp_path, monkeypatch):
    """A command line. Drawing takes longer than all the rest, so there is no picture."""
    monkeypatch.setattr(plots, "search", lambda *args: Path(args[-1]).write_bytes(b"picture"))

    def line(out="out", **changes):
        given = {"model": made / "model", "text": "text.txt", "out": tmp_path / out, "tokens": 24,
                 "trials": 6, "device": "cpu"} | changes
        paths = {key: made / given[key] for key in ("text", "costs") if key in given}
        return argv_of(given | paths)
    return line


def files(folder):
    """{name: content} of what a run has written. The lock is empty."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != LOCK}


def test_a_run_finds_the_best_set_by_its_objective(call, flags, made, tmp_path, monkeypatch):
    """At the costs of a file, at a temperature, with a draft vocabulary; and draws its picture."""
    monkeypatch.undo()
    assert call(*flags(objective="matchness", costs="costs.json", text="text.jsonl", min_skips=1,
                       protect=0, temperature=0.7, top_p=0.8, trials=12, draft_vocab=16))[0] == 0
    out = tmp_path / "out"
    model, tokenizer = checkpoint.load(made / "model", "cpu", torch.float32)
    entries = [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()[1:]]
    short = ShortHead(model, cli.read_vocab(out / "draft_vocab.json", 64))
    best = max(entries, key=lambda e: e["value"])
    for e in entries:
        subs = [0] + [sub for sub, bit in enumerate(e["bits"], 1) if bit == "0"]
        overlaps = [teacher.acceptance(subs, short)
                    for teacher in Calibration(model, tokenizer, TEXTS, 24, WARM).teachers]
        c = (sum((1, 2.5, 1, 2, 0, 2)[i] for i in subs) + 1.5 * 16 / 64 + 2) / 12
        assert (e["alpha"], e["c"]) == pytest.approx((float(torch.cat(overlaps).mean()), c))
        assert e is not best or cli.read_skip(str(out / "skip.json"), 3) == subs
    assert best["speedup"] < max(e["speedup"] for e in entries)
    assert all("1" in e["bits"] for e in entries)
    assert (out / "search.png").read_bytes().startswith(b"\x89PNG")


def test_the_front_is_what_no_trial_beats():
    points = (0.5, 0.4), (0.5, 0.6), (0.5, 0.6), (0.7, 0.6), (0.2, 0.0), (0.9, 0.61), (0.1, 0.0)
    trials = [{"trial": i, "c": c, "alpha": alpha} for i, (c, alpha) in enumerate(points)]
    assert [e["trial"] for e in search.front(trials)] == [6, 1, 5]


@pytest.mark.parametrize("gain, gamma", [(1.1, 3), (1.0, 0)])
def test_where_nothing_is_gained_the_advice_is_not_to_draft(gain, gamma):
    entry = {"bits": "01", "alpha": 0.5, "c": 0.25, "gamma": 3, "speedup": gain}
    assert search.describe(Space(2, (1, 2)), entry)["gamma"] == gamma


# --- a run that is interrupted


KILLED = """
import itertools, os, sys, search
calls, honest = itertools.count(), search.speedup
def killed(*args):
    return honest(*args) if next(calls) < 3 else os.kill(os.getpid(), 9)
search.OBJECTIVES["speedup"] = killed
search.main(sys.argv[1:])
"""


def test_a_search_that_was_killed_goes_on_where_it_was(call, flags, tmp_path, monkeypatch):
    """Wherever in its log that was, and each line is on the disk before the next trial."""
    r = subprocess.run([sys.executable, "-c", KILLED, *flags()], capture_output=True,
                       cwd=Path(search.__file__).parent, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert r.returncode == -9, r.stderr
    file, synced = tmp_path / "out" / "trials.jsonl", []
    log = file.read_bytes()
    call.refuses(flags(), tmp_path, "--resume")
    call.refuses(flags(resume=True, seed=1), tmp_path, "another seed")
    with lock(tmp_path / "out"):
        call.refuses(flags(resume=True), tmp_path, "another process")
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    assert call(*flags("whole"))[0] == 0
    want = files(tmp_path / "whole")
    ends = [*itertools.accumulate(map(len, want["trials.jsonl"].splitlines(True)))]
    assert log == want["trials.jsonl"][: ends[3]] and synced[:7] == ends
    for left in (log[:-9], log[: ends[0]], log[: ends[0] - 1]):
        file.write_bytes(left)
        assert call(*flags(resume=True))[0] == 0 and files(tmp_path / "out") == want
    file.unlink()
    for name in want.keys() - {file.name}:
        (tmp_path / "out" / name).unlink()
    assert call(*flags(trials=2))[0] == 0, "killed before its first line"
    assert call(*flags(resume=True))[0] == 0, "for more trials"
    assert files(tmp_path / "out") == want


def test_another_model_or_text_is_another_run(flags):
    model, other, tokenizer = make(LLAMA), make(LLAMA), expected.byte_tokenizer()
    other.blocks[5].mlp.down[-1, -1] += 1e-9
    a, space, costs = search.parse(flags()), Space(6, (1, 2)), weight_costs(LLAMA)
    one, two, three = (search.header(a, m, tokenizer, texts, costs, space)
                       for m, texts in ((model, "ab"), (other, "ab"), (model, ["ab"])))
    assert one["model"] != two["model"] and one["text"] == two["text"] != three["text"]


@pytest.mark.parametrize("free", [[0, 2], [1, 2]], ids=["attentions only", "both"])
def test_damage_to_a_log_is_named(free, tmp_path):
    head, file = {"free": free}, tmp_path / "trials.jsonl"
    first = dict(zip(search.TRIAL, (0, "01", 1.0, 0.5, 0.5, 2, 1.0, None, None), strict=True))
    theta = [1.0] * (2 + len({sub % 2 for sub in free}))
    second = first | {"trial": 1, "theta": theta, "expected": [1.0, 0.5]}

    def read(*lines):
        file.write_bytes(b"".join(map(search.as_line, lines)))
        return search.read_log(file, head)

    assert read(head, first, second) == ([first, second], file.stat().st_size)
    for damage in ({"trial": 0}, {"bits": "012"}, {"value": math.nan}, {"theta": [1.0]}):
        with pytest.raises(ValueError, match="line 3: not trial 1"):
            read(head, first, second | damage)
    with pytest.raises(ValueError, match="line 3: not trial 1"):
        read(head, first, ["no", "trial"])
    with pytest.raises(ValueError, match="line 1: not a line of this program"):
        read({"other": 1}, first)
    for raw, culprit in ((b"my poems", "line 1: not the beginning of this run"),
                         (search.as_line(head) + b"{damaged\n", "line 2: not a line of this program")):
        file.write_bytes(raw)
        with pytest.raises(ValueError, match=culprit):
            search.read_log(file, head)


@pytest.mark.parametrize("change, word", [
    ({"model": "nowhere"}, "nowhere"), ({"text": "nowhere.txt"}, "nowhere.txt"),
    ({"text": "empty.jsonl"}, "empty.jsonl"), ({"costs": "no.json"}, "no.json"),
    ({"tokens": 15}, "--tokens"), ({"top_p": 0}, "top_p"), ({"protect": "a"}, "--protect"),
    ({"protect": "6"}, "from 0 to 5"), ({"protect": "0,1,2,3,4,5"}, "0 sub-layers"),
    ({"min_skips": 3, "max_skips": 2}, "--min-skips 3"),
    ({"min_skips": 9, "max_skips": 9}, "--min-skips 9"), ({"draft_vocab": 64}, "--draft-vocab 64"),
    ({"min_skips": 6, "protect": ""}, "--min-skips 6"), ({"out": "taken"}, "taken"),
    ({"out": "taken", "resume": True}, "taken")], ids=str)
def test_bad_input_is_one_line(change, word, call, flags, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "poems.txt").touch()
    call.refuses(flags(**change), tmp_path, word)
