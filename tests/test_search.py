"""The search for sub-layers to skip: the objectives by hand, the search on functions whose optimum is known,
runs that are killed at every byte, what is refused, and the bench that judges it.
"""
import itertools
import json
import math
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import expected
import pytest
import torch
from matplotlib import image
from resumed import (  # noqa: F401  promises of each command that can be interrupted
    Run,
    test_a_folder_of_other_files_is_refused,
    test_a_full_disk_loses_the_running_step_only,
    test_ctrl_c_loses_the_running_step_only,
    test_resume_without_a_run_starts_one,
    test_two_processes_do_not_write_in_one_folder,
)
from tiny import FAMILIES, LLAMA, argv_of, command, make, tree, wide

import checkpoint
import generate
import search
import speculative
from benchmarks import search as bench_search
from control import AdaptiveExit, Costs, expected_speedup, expected_tokens, weight_costs
from kvcache import KVCache
from layerskip import ShortHead, without
from sampling import to_probs
from search import Calibration, Space, Trial, matchness, speedup, tokens_per_second
from support import cli, corpus, plots
from support.files import LOCK

END = corpus.BOUNDARY
TEXT = END.join(["Once upon a time there was a girl", "She saw a ball and took it", "They went home"])
TEXTS = ["Once upon a time", "She saw", "x", "never read"]
FAST = {"trials": 6, "tokens": 32, "device": "cpu"}
draw = plots.search


def files(folder):
    """{name: content} of what a run has written; the lock is empty and says nothing."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != LOCK}


def everything(n):
    """All sets of n bits."""
    return list(itertools.product((0, 1), repeat=n))


# --- the objectives


@pytest.fixture(scope="module", params=FAMILIES)
def scored(request):
    """(model, calibration, costs) of a tiny model and three documents, the last one a single token long."""
    model = make(replace(FAMILIES[request.param], vocab_size=64, n_layers=3))
    return model, Calibration(model, expected.byte_tokenizer(), TEXTS, 24), weight_costs(model.c)


def states(model, ids, sublayers, upto):
    """The residual stream after the sub-layers below `upto` where a draft has only `sublayers`: position by
    position, each as the first token drafted after a text that the whole model has read. (T, dim)"""
    rows, T, cache = [], len(ids), KVCache(model.c, 1, len(ids), torch.float64)
    x = model.embed(torch.tensor([ids]))
    model.run(x, slice(0, T), cache)
    k, v = cache.k.clone(), cache.v.clone()                                     # what the verifier leaves
    for i in range(T):
        at, subs = slice(i, i + 1), [sub for sub in sublayers if sub < upto]
        rows.append(model.run(x[:, at], at, cache, subs)[0, 0])
        cache.k.copy_(k), cache.v.copy_(v)
    return torch.stack(rows)


def logits(model, ids, sublayers):
    return model.unembed(states(model, ids, sublayers, 2 * model.c.n_layers))


SETS = [range(6), range(2), [0, 1, 3, 4, 5], [1, 2, 5], [4]]


def test_a_calibration_takes_the_first_tokens_document_by_document(scored):
    model, calibration, _ = scored
    tokenizer = expected.byte_tokenizer()
    assert calibration.ids == [tokenizer.encode(t).ids for t in ("Once upon a time", "She saw", "x")]
    assert sum(map(len, calibration.ids)) == 24
    for tokens in (1, 16, 17, 23):
        ids = Calibration(model, tokenizer, ["Once upon a time", "She saw"], tokens).ids
        text = tokenizer.encode("Once upon a timeShe saw").ids
        assert sum(ids, []) == text[:tokens] and len(ids[0]) == min(16, tokens), "cut where a document ends"
        assert len(ids) == 1 + (tokens > 16), "and no empty rest"
    ids = Calibration(model, tokenizer, ["Once upon a time", "She saw"], 1000).ids
    assert list(map(len, ids)) == [16, 7], "all there is, where that is less"


def test_a_document_longer_than_the_context_is_cut(scored):
    small = make(replace(scored[0].c, max_len=8))
    ids = Calibration(small, expected.byte_tokenizer(), ["Once upon", "a time"], 11).ids
    assert list(map(len, ids)) == [8, 3]


def test_a_calibration_begins_each_document_as_the_model_wants_it(scored):
    model = make(replace(scored[0].c, bos=0))
    ids = Calibration(model, expected.byte_tokenizer(), ["She", "saw"], 5).ids
    assert [row[0] for row in ids] == [0, 0] and list(map(len, ids)) == [4, 1]


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_p": 0.8}], ids=["greedy", "sampled"])
def test_the_speedup_is_the_best_of_the_formula_by_hand(scored, settings):
    (model, _, costs), probs = scored, partial(to_probs, **settings)
    calibration = Calibration(model, expected.byte_tokenizer(), TEXTS, 24, probs)
    sizes = [sum(p.numel() for p in part.parameters()) for b in model.blocks for part in (b.attn, b.mlp)]
    for subs in SETS:
        t = speedup(calibration, costs, list(subs))
        series = []
        for ids in calibration.ids:
            p, q = probs(logits(model, ids, range(6))), probs(logits(model, ids, subs))
            series.append(torch.minimum(p, q).sum(-1).tolist())
        head = model.c.vocab_size * model.c.dim
        c = (sum(sizes[i] for i in subs) + head) / (sum(sizes) + head)
        gains = {}
        for gamma in range(1, 17):
            gains[gamma] = expected_tokens([wide(a) for a in series], gamma) / (gamma * c + 1)
        assert t.speedup == t.value == pytest.approx(max(gains.values()), rel=1e-9)
        assert gains[t.gamma] == pytest.approx(t.speedup, rel=1e-9)
        assert t.cost == pytest.approx(c, rel=1e-12)
        assert t.alpha == pytest.approx(sum(sum(a) for a in series) / 24, rel=1e-9)


def test_where_nothing_is_skipped_every_draft_is_accepted_and_nothing_is_gained(scored):
    _, calibration, costs = scored
    assert speedup(calibration, costs, range(6)) == Trial(1.0, 1.0, 1.0, 1, 1.0)


def test_the_best_gamma_where_none_gains():
    """Many documents of one token, all refused, and a long one: a single draft is worse than two."""
    series = [wide([0.0])] * 99 + [wide([0.5] * 16)]
    scored = SimpleNamespace(acceptance=lambda subs: series, share=1.0)
    t = speedup(scored, Costs((0.9, 0.1), 0.0), [0])
    gains = [expected_speedup(series, gamma, 0.9) for gamma in range(1, 17)]
    assert max(gains) < 1 and t.gamma == 1 + gains.index(max(gains)) > 1 and t.speedup == max(gains)


def test_measured_blocks_have_a_say(tmp_path):
    """Drafts are shorter where each token more makes the block dearer."""
    series, file = [wide([0.9] * 20)], tmp_path / "costs.json"
    scored = SimpleNamespace(acceptance=lambda *_: series, share=1.0)
    for last in (1.0, 4.0, 17.0):
        file.write_text(json.dumps({"sublayers": [1, 9], "head": 0, "blocks": [[1, 1.0], [17, last]]}))
        costs = cli.read_costs(file, SimpleNamespace(n_layers=1))
        t = speedup(scored, costs, [0])
        gains = [expected_tokens(series, g) / (0.1 * g + 1 + (last - 1) * g / 16) for g in range(1, 17)]
        assert (t.gamma, t.speedup) == (1 + gains.index(max(gains)), pytest.approx(max(gains)))
        assert costs.blocks == ((1, 1.0), (17, last))


def test_a_draft_that_overflows_is_a_draft_that_is_refused(scored):
    model, calibration, costs = scored
    broken = Calibration(model, expected.byte_tokenizer(), ["Once upon"], 16)
    broken.teachers[0].acceptance = lambda subs, drafting: wide([math.nan, 1.0, math.nan, 1.0])
    assert broken.acceptance([0])[0].tolist() == [0, 1, 0, 1]
    assert speedup(broken, costs, [0]).alpha == 0.5


def test_matchness_is_how_often_the_best_tokens_agree(scored):
    """Also where the draft is for sampling, and alpha is something else."""
    model, _, costs = scored
    calibration = Calibration(model, expected.byte_tokenizer(), TEXTS, 24, partial(to_probs, temperature=0.7))
    for subs in SETS:
        hits = []
        for ids in calibration.ids:
            both = (logits(model, ids, kept).argmax(-1) for kept in (range(6), subs))
            hits += torch.eq(*both).tolist()
        t, by_speed = matchness(calibration, costs, list(subs)), speedup(calibration, costs, list(subs))
        assert t.value == pytest.approx(sum(hits) / 24) and replace(t, value=by_speed.value) == by_speed
        assert len(subs) < 6 or t.value == 1


def test_a_trial_runs_only_the_sublayers_after_the_first_gap(scored, monkeypatch):
    """The target's pass is made once, when the calibration is."""
    model, _, costs = scored
    honest, calls = model.run, []

    def counting(x, positions, cache=None, sublayers=None, *args, **kwargs):
        calls.append(sublayers if sublayers is None else list(sublayers))
        return honest(x, positions, cache, sublayers, *args, **kwargs)

    monkeypatch.setattr(model, "run", counting, raising=False)
    calibration = Calibration(model, expected.byte_tokenizer(), ["Once upon", "a time"], 100)
    assert calls == [None, None], "a pass for each document"
    for subs, rest in ((range(6), []), (range(2), []), ([0, 1, 3, 5], [3, 5]), ([1, 2], [1, 2])):
        calls.clear()
        speedup(calibration, costs, list(subs))
        assert calls == [rest, rest]


def test_tokens_per_second_decodes_with_the_draft(scored, monkeypatch):
    model, calibration, costs = scored
    seen = []
    monkeypatch.setattr(search, "generate", lambda *args: seen.append(args) or speculative.generate(*args))
    t, by_speed = (score(calibration, costs, [0, 1, 4]) for score in (tokens_per_second, speedup))
    assert 0 < t.value < math.inf and replace(t, value=by_speed.value) == by_speed
    assert [args[1] for args in seen] == [[ids] for ids in calibration.ids], "the single token, too"
    assert all(args[2] == 32 and args[3].sublayers == [0, 1, 4] for args in seen)
    assert all(isinstance(args[3].rule, AdaptiveExit) for args in seen) and len({id(a[3]) for a in seen}) == 3
    seen.clear()
    short = make(replace(model.c, max_len=16))
    full = Calibration(short, expected.byte_tokenizer(), ["Once upon a time"], 16)
    assert tokens_per_second(full, costs, [0]).value > 0, "a document may fill the context"


# --- the space


def test_a_bit_is_a_sublayer_that_is_skipped():
    space = Space(3, (1, 2, 4, 5))
    assert space.sublayers((1, 0, 0, 1)) == [0, 2, 3, 4] and space.sublayers([0] * 4) == list(range(6))
    assert space.groups().tolist() == [1, 0, 0, 1]


def test_a_random_set_has_any_number_of_skips_and_then_any_of_them():
    g, space = torch.Generator().manual_seed(0), Space(3, (0, 1, 2, 3), 1, 3)
    drawn = [tuple(space.random(g).tolist()) for _ in range(3000)]
    for count, share in ((1, 1 / 12), (2, 1 / 18), (3, 1 / 12)):
        sets = [z for z in everything(4) if sum(z) == count]
        assert all(drawn.count(z) == pytest.approx(3000 * share, rel=0.25) for z in sets)
    assert {sum(z) for z in drawn} == {1, 2, 3}
    assert {sum(Space(3, (0, 1, 2)).random(g).tolist()) for _ in range(100)} == {0, 1, 2, 3}


def test_every_set_that_is_allowed_comes_once():
    for least, most in ((0, 10**9), (1, 2), (3, 3)):
        space = Space(4, (0, 2, 3, 7), least, most)
        found = [tuple(z.int().tolist()) for z in space.every()]
        assert sorted(found) == [z for z in everything(4) if least <= sum(z) <= most]
        allowed = space.allowed(wide(everything(4)))
        assert allowed.tolist() == [least <= sum(z) <= most for z in everything(4)]


# --- the search


def planted(n, seed):
    """A function of the bits with terms of one and of two, as {set: value}."""
    g = torch.Generator().manual_seed(seed)
    w, pairs = torch.randn(n, generator=g).double(), 0.5 * torch.randn(n, n, generator=g).double().triu(1)
    z = wide(everything(n))
    return dict(zip(everything(n), (z @ w + (z @ pairs * z).sum(1)).tolist(), strict=True))


def run(space, values, count, seed=0, entries=(), enough=math.inf):
    """The entries of a search for the best of {set: value}, up to the first that is worth enough."""
    def evaluate(sublayers):
        assert set(range(2 * space.n_layers)) - set(space.skippable) <= set(sublayers), "they are protected"
        z = tuple(int(sub not in sublayers) for sub in space.skippable)
        return Trial(values(z) if callable(values) else values[z], 0.0, 0.0, 1, 0.0)

    found = []
    for entry, _ in search.search(space, evaluate, count, seed, entries):
        found.append(entry)
        if entry["value"] >= enough:
            break
    return found


def sets(entries):
    return [tuple(map(int, e["bits"])) for e in entries]


@pytest.mark.parametrize("n, seed", [(10, 1), (10, 2), (11, 6), (12, 4), (12, 5)])
def test_it_finds_the_optimum_within_sixty_trials(n, seed):
    values, space = planted(n, seed), Space(8, tuple(range(2, 2 + n)))
    top = max(values.values())
    for start in range(2):
        entries = run(space, values, 60, start, enough=top)
        assert entries[-1]["value"] == top, "not within sixty trials"
        assert len(set(sets(entries))) == len(entries), "no set is tried twice"
        assert all(e["value"] == values[z] for e, z in zip(entries, sets(entries), strict=True))


def test_it_beats_random_sets_on_the_median():
    values, space = planted(12, 6), Space(6, tuple(range(12)))
    ours = [max(e["value"] for e in run(space, values, 30, seed)) for seed in range(5)]
    others = []
    for seed in range(5):
        g = torch.Generator().manual_seed(seed)
        others.append(max(values[tuple(space.random(g).int().tolist())] for _ in range(30)))
    assert sorted(ours)[2] > sorted(others)[2] + 0.5 and min(ours) > sorted(others)[2]


@pytest.mark.parametrize("sign", [1, -1])
def test_bounds_and_protected_sublayers_hold_wherever_the_gain_lies(sign):
    space = Space(6, (2, 3, 5, 6, 8, 9, 10), 2, 4)
    entries = run(space, lambda z: sign * sum(z), 30)
    assert {sum(z) for z in sets(entries)} == {2, 3, 4} and len(set(sets(entries))) == 30
    assert sum(sum(z) == (4 if sign > 0 else 2) for z in sets(entries)[10:]) >= 13, "that is where it looks"


@pytest.mark.parametrize("first", [2, 10])
def test_it_ends_when_every_set_has_been_tried(first, monkeypatch):
    monkeypatch.setattr(search, "FIRST", first)
    values = planted(3, 0)
    assert sorted(sets(run(Space(3, (1, 2, 5)), values, 100))) == everything(3)
    assert sorted(sets(run(Space(3, (1, 2, 5), 1, 1), values, 100))) == [(0, 0, 1), (0, 1, 0), (1, 0, 0)]


@pytest.mark.parametrize("first", [2, 100])
def test_it_finds_the_last_sets_where_chance_does_not(first, monkeypatch):
    monkeypatch.setattr(search, "FIRST", first)
    monkeypatch.setattr(Space, "random", lambda space, g: wide([1, 0, 1, 0]))
    assert sorted(sets(run(Space(3, (0, 1, 2, 3)), planted(4, 0), 100))) == everything(4)


def test_values_of_minus_infinity_break_nothing():
    for values in (lambda z: 1.0, lambda z: -math.inf, lambda z: -math.inf if z[0] else float(sum(z))):
        entries = run(Space(4, tuple(range(8))), values, 24)
        assert len(set(sets(entries))) == 24
    assert max(e["value"] for e in entries) == 7, "the best of those that are worth anything"
    assert all(math.isfinite(x) for e in entries[10:] for x in (*e["theta"], *e["expected"]))


def test_values_that_are_not_finite_count_as_the_worst():
    pairs = ("00", 2.0), ("01", -math.inf), ("10", 1.0), ("11", math.nan)
    entries = [{"bits": bits, "value": value} for bits, value in pairs]
    zs, ys = search.observed(Space(2, (0, 3)), entries)
    assert zs.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]] and ys.tolist() == [2, 1, 1, 1]
    assert search.observed(Space(2, (0, 3)), entries[1:2])[1].tolist() == [0]


def test_a_trial_follows_from_seed_and_trials():
    """From the seed and the trials before it, and from nothing else."""
    values, space = planted(8, 0), Space(4, tuple(range(8)))
    whole = run(space, values, 18)
    assert [e["trial"] for e in whole] == list(range(18))
    for cut in (0, 1, 9, 10, 11, 14, 15, 17):
        torch.manual_seed(cut)
        there = json.loads(json.dumps(whole[:cut]))
        assert run(space, values, 18, entries=there) == whole[cut:] and len(there) == cut
    assert run(space, values, 18, entries=whole) == []
    assert sets(run(space, values, 18, seed=1)) != sets(whole)
    changed = [e | {"value": -e["value"]} for e in whole[:12]]
    assert run(space, values, 13, entries=changed)[0]["bits"] != whole[12]["bits"], "it learns from them"


def test_it_says_what_it_expects_of_a_trial_before_it_makes_it():
    """Once there is something to learn from; and it fits its parameters anew only now and then."""
    entries = run(Space(5, tuple(range(10))), planted(10, 0), 30)
    assert [e["theta"] is e["expected"] is None for e in entries] == [True] * 10 + [False] * 20
    fitted = [e["trial"] for last, e in itertools.pairwise(entries) if e["theta"] != last["theta"]]
    assert fitted == [10, 15, 20, 25]
    late = [(*e["expected"], e["value"]) for e in entries[20:]]
    assert all(std > 0 for _, std, _ in late) and sum(abs(m - v) < 3 * s for m, s, v in late) >= 8


def test_after_the_first_trials_it_goes_where_improvement_is_expected():
    """On three of four bits' sums it has seen the neighbours of the best set, and that set is left."""
    seen = [z for z in everything(4) if sum(z) < 4]
    zs, ys = wide(seen), wide([float(sum(z)) for z in seen])
    z, theta, (mean, std) = search.propose(Space(2, (0, 1, 2, 3)), zs, ys, 0)
    assert z.tolist() == [1, 1, 1, 1] and mean > 3 and len(theta) == 4
    whole = wide(everything(4)), wide(list(range(16)))
    assert search.propose(Space(2, (0, 1, 2, 3)), *whole, 0)[0] is None, "nothing is left"


def test_it_climbs_from_the_best_sets_and_from_anywhere(monkeypatch):
    values, climbs = planted(10, 3), []
    monkeypatch.setattr(search, "climb", lambda score, starts, allowed: climbs.append((starts, score(starts)))
                        or (starts, score(starts)))
    entries = run(Space(5, tuple(range(10))), values, 13)
    for i, (starts, scores) in enumerate(climbs, 10):
        best = sorted(entries[:i], key=lambda e: -e["value"])[:8]
        assert [tuple(z) for z in starts[:8].int().tolist()] == sets(best)
        assert scores[:8].tolist() == [-math.inf] * 8, "known sets are worth nothing"
        assert len(starts) == 24 and len(starts.unique(dim=0)) > 16 and float(scores[8:].max()) > 0
    assert len(climbs) == 3


# --- the command line


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a model, another one, texts and tables of costs."""
    folder = tmp_path_factory.mktemp("made")
    c = replace(LLAMA, vocab_size=64, n_layers=3)
    for seed, name in enumerate(("model", "other")):
        m = make(c, seed).float()
        for b in m.blocks[1:]:  # drafts that are worth something
            b.mlp.down.mul_(0.3)
            b.attn.wo.mul_(0.2)
        checkpoint.save(m, folder / name, expected.byte_tokenizer())
    (folder / "text.txt").write_text(TEXT)
    (folder / "other.txt").write_text(TEXT.replace("girl", "boy"))
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in TEXT.split(END)))
    costs = {"sublayers": [1, 2.5, 1, 2, 0, 2], "head": 1.5, "machine": "mine"}
    (folder / "costs.json").write_text(json.dumps(costs))
    return folder


@pytest.fixture
def flags(made, tmp_path):
    """A command line: FAST, changed."""
    def line(out="out", **changes):
        given = {"model": made / "model", "text": made / "text.txt", "out": tmp_path / out, **FAST}
        return argv_of(given | changes)
    return line


call = command(search.main)


@pytest.fixture(scope="module")
def product(made, tmp_path_factory):
    """The folder and the flags of a run of 17 trials, seven of them by the process."""
    out = tmp_path_factory.mktemp("product") / "out"
    argv = argv_of({"model": made / "model", "text": made / "text.txt", "out": out, "tokens": 64,
                    "protect": 0, "temperature": 0.8, "top_p": 0.9, "device": "cpu", "trials": 17})
    assert search.main(argv) == 0
    return out, argv


@pytest.fixture(autouse=True)
def no_picture(monkeypatch):
    """Drawing takes longer than all the rest, and so only `product` does it."""
    monkeypatch.setattr(plots, "search", lambda *args: Path(args[-1]).write_bytes(b"picture"))


def log(out):
    """(header, trials)"""
    head, *entries = map(json.loads, (out / "trials.jsonl").read_text().splitlines())
    return head, entries


@pytest.fixture(name="run")
def short_run(call, flags, monkeypatch):
    """For the promises of resumed.py."""
    def before_step(f):
        monkeypatch.setitem(search.OBJECTIVES, "speedup", lambda *args: (f(), speedup(*args))[1])

    def same_end(a, b):
        assert files(a) == files(b)
    return Run(call, flags, before_step, lambda out: len(log(out)[1]), same_end, search.LOG)


def test_a_run_leaves_a_log_what_it_found_and_a_picture(product):
    out, _ = product
    assert sorted(files(out)) == ["front.json", "search.png", "skip.json", "trials.jsonl"]
    head, entries = log(out)
    assert [e["trial"] for e in entries] == list(range(17)) and len(set(sets(entries))) == 17
    assert head["free"] == [1, 2, 3, 4, 5] and head["temperature"] == 0.8 and head["objective"] == "speedup"
    height, width, _ = image.imread(out / "search.png").shape
    assert height > 400 and width > 600


def test_what_is_found_is_the_best_trial(product):
    out, _ = product
    found, (_, entries) = json.loads((out / "skip.json").read_text()), log(out)
    best = max(entries, key=lambda e: e["value"])
    assert list(found) == ["attn", "mlp", "gamma", "alpha", "c", "predicted_speedup", "sublayers"]
    assert [found[key] for key in ("alpha", "c", "predicted_speedup", "gamma")] == [
        best[key] for key in ("alpha", "c", "speedup", "gamma")] and best["speedup"] > 1
    kept = [0, *(sub for sub, bit in zip(range(1, 6), best["bits"], strict=True) if bit == "0")]
    assert found["sublayers"] == kept == without(3, found["attn"], found["mlp"])


def test_the_trials_of_a_log_are_those_of_the_objective(product, made):
    """As one computes them from the folder, the text and the flags."""
    model, tokenizer = checkpoint.load(made / "model", "cpu", torch.float32)
    probs = partial(to_probs, temperature=0.8, top_p=0.9)
    calibration = Calibration(model, tokenizer, TEXT.split(END), 64, probs)
    for e in log(product[0])[1]:
        subs = Space(3, (1, 2, 3, 4, 5)).sublayers([int(b) for b in e["bits"]])
        want = speedup(calibration, weight_costs(model.c), subs)
        assert [e[key] for key in search.TRIAL[2:7]] == pytest.approx(list(vars(want).values()))
        assert e["c"] == pytest.approx(want.cost)


def test_the_front_is_what_no_trial_beats(product):
    out, _ = product
    front, (_, entries) = json.loads((out / "front.json").read_text()), log(out)

    points = {(e["c"], e["alpha"]) for e in entries}
    want = sorted((c, alpha) for c, alpha in points
                  if not any(p != (c, alpha) and p[0] <= c and p[1] >= alpha for p in points))
    assert [(f["c"], f["alpha"]) for f in front] == want and 2 <= len(want) < 17
    assert all(without(3, f["attn"], f["mlp"]) == f["sublayers"] for f in front)
    last = {"gamma": 0, "alpha": 1.0, "c": 1.0, "predicted_speedup": 1.0}
    assert {key: front[-1][key] for key in last} == pytest.approx(last), "nothing skipped: not worth drafting"


def test_of_equal_trials_the_front_keeps_one():
    points = (0.5, 0.4), (0.5, 0.6), (0.5, 0.6), (0.7, 0.6), (0.2, 0.0), (0.9, 0.61), (0.1, 0.0)
    trials = [{"trial": i, "c": c, "alpha": alpha} for i, (c, alpha) in enumerate(points)]
    assert [e["trial"] for e in search.front(trials)] == [6, 1, 5]


def test_a_draft_vocabulary_is_of_the_most_frequent_tokens(made):
    _, tokenizer = checkpoint.load(made / "model")
    c = SimpleNamespace(eos=(7, 9))
    ids = [tokenizer.token_to_id(letter) for letter in "abc"]
    found = search.most_frequent(["caabb", "acb", "b"], tokenizer, c, 3)            # a 3, b 4, c 2, the end 3
    assert found == {"ids": [ids[1], *sorted([ids[0], 7])], "share": 10 / 12}
    assert search.most_frequent(["caabb"], tokenizer, SimpleNamespace(eos=()), 3)["share"] == 1
    with pytest.raises(ValueError, match="--draft-vocab 5: the text holds only 4 different tokens"):
        search.most_frequent(["caabb"], tokenizer, c, 5)


def test_sets_are_scored_with_the_draft_vocabulary(call, flags, made, tmp_path, capsys):
    argv = flags(draft_vocab=8, trials=12)
    status, printed, _ = call(*argv)
    assert status == 0 and "vocab.json: 8 of 64 tokens, which are " in printed
    vocab, (_, entries) = json.loads((tmp_path / "out" / "vocab.json").read_text()), log(tmp_path / "out")
    model, tokenizer = checkpoint.load(made / "model", "cpu", torch.float32)
    short = ShortHead(model, vocab["ids"])
    calibration = Calibration(model, tokenizer, TEXT.split(END), 32, drafting=short)
    for e in entries:
        subs = Space(3, (2, 3, 4, 5)).sublayers([int(b) for b in e["bits"]])
        alpha = torch.cat([t.acceptance(subs, short) for t in calibration.teachers]).mean()
        assert e["c"] == pytest.approx(weight_costs(model.c).step(subs, 8 / 64))
        assert e["alpha"] == pytest.approx(float(alpha)) and e["alpha"] < 1
    costs, seen = weight_costs(model.c), []
    for objective in (speedup, matchness, tokens_per_second):
        assert objective(calibration, costs, range(4)).cost == costs.step(range(4), 8 / 64)
    path = tmp_path / "out" / "vocab.json"
    path.unlink()  # as if killed before it was written
    assert call(*argv, "--resume")[0] == 0 and json.loads(path.read_text()) == vocab
    draft = ["--skip", str(tmp_path / "out" / "skip.json"), "--draft-vocab", str(path)]
    argv = ["Once upon", "--model", str(made / "model"), "--max-new", "8", "--device", "cpu", "--json"]
    for way in (draft, ["--draft", "none"]):
        assert generate.main([*argv, *way]) == 0
        seen.append(json.loads(capsys.readouterr().out)["outputs"])
    assert seen[0] == seen[1]


def test_what_is_printed(call, flags, tmp_path):
    status, out, err = call(*flags())
    found = json.loads((tmp_path / "out" / "skip.json").read_text())
    assert status == 0 and out.count("\n") == 1
    skips = 6 - len(found["sublayers"])
    assert out.startswith(f"{tmp_path / 'out' / 'skip.json'}: skips {skips} of 6 sub-layers, ")
    assert f"alpha {found['alpha']:.3f}, c {found['c']:.3f}" in out
    assert f"promises {found['predicted_speedup']:.2f} times" in out
    assert err.endswith("% of the time in the Gaussian process\n")


def test_other_objectives_rank_by_their_own_value(call, flags, tmp_path):
    assert call(*flags(objective="matchness", min_skips=1, trials=12))[0] == 0
    found, (_, entries) = json.loads((tmp_path / "out" / "skip.json").read_text()), log(tmp_path / "out")
    best = max(entries, key=lambda e: e["value"])
    assert max(entries, key=lambda e: e["speedup"]) != best and best["value"] > best["speedup"] * 0.5
    assert found["predicted_speedup"] == best["speedup"]
    assert len(found["attn"]) + len(found["mlp"]) == best["bits"].count("1")
    assert all("1" in e["bits"] for e in entries)


def test_costs_from_a_file(call, flags, made, tmp_path):
    told = json.loads((made / "costs.json").read_text()) | {"call": 2.0}
    (tmp_path / "costs.json").write_text(json.dumps(told))
    assert call(*flags(costs=tmp_path / "costs.json"))[0] == 0
    head, entries = log(tmp_path / "out")
    assert head["costs"] == [1, 2.5, 1, 2, 0, 2, 1.5, 1, 1.0, 2.0], "a run with others is not resumed"
    for e in entries:
        gone = sum(cost for cost, bit in zip((1, 2, 0, 2), e["bits"], strict=True) if bit == "1")
        assert e["c"] == pytest.approx((12 - gone) / 12)


def test_bounds_and_protected_sublayers_by_flags(call, flags, tmp_path, monkeypatch):
    monkeypatch.setattr(search, "FIRST", 100)
    assert call(*flags(protect="5, 2", min_skips=2, max_skips=3, trials=15))[0] == 0
    head, entries = log(tmp_path / "out")
    assert head["free"] == [0, 1, 3, 4] and len(entries) == 10, "that many sets there are"
    assert {e["bits"].count("1") for e in entries} == {2, 3}
    assert call(*flags("all", protect="", trials=70))[0] == 0
    entries = log(tmp_path / "all")[1]
    assert len(entries) == 63, "something must stay"
    assert call(*flags("few", max_skips=1, trials=70))[0] == 0 and len(log(tmp_path / "few")[1]) == 5


@pytest.mark.parametrize("protect, kinds", [("1,3,5", 1), ("0,2,4", 2), ("0", 2)])
def test_a_log_of_attentions_or_mlps_only_is_read_again(protect, kinds, call, flags, tmp_path, monkeypatch):
    """A process over attentions has a parameter less."""
    monkeypatch.setattr(search, "FIRST", 2)
    assert call(*flags(protect=protect, trials=4))[0] == 0
    assert [len(e["theta"]) for e in log(tmp_path / "out")[1][2:]] == [kinds + 2] * 2
    assert call(*flags(protect=protect, trials=6, resume=True))[0] == 0
    assert call(*flags("whole", protect=protect, trials=6))[0] == 0
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_jsonl_is_the_same_text(call, flags, made, tmp_path):
    odd = tmp_path / "odd.jsonl"
    odd.write_text(json.dumps({"text": "a\u2028b"}, ensure_ascii=False) + "\n\n" + '{"text": "c"}\n')
    assert search.read_documents(odd) == ["a\u2028b", "c"]
    assert search.read_documents(made / "text.jsonl") == TEXT.split(END)
    assert call(*flags())[0] == call(*flags("b", text=made / "text.jsonl"))[0] == 0
    assert files(tmp_path / "out") == files(tmp_path / "b")


@pytest.mark.parametrize("objective", ["speedup", "matchness"])
def test_documents_of_a_single_token(objective, call, flags, tmp_path):
    (tmp_path / "short.txt").write_text(END.join("abcdefgh" * 2))
    assert call(*flags(text=tmp_path / "short.txt", objective=objective, trials=2))[0] == 0
    assert [e["gamma"] for e in log(tmp_path / "out")[1]] == [1, 1], "no document holds two drafts"


# --- a run that is interrupted


def test_a_line_is_on_the_disk_before_the_next_trial_begins(call, flags, tmp_path, monkeypatch):
    seen, synced, honest = [], [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size) or honest(fd))

    def watching(*args):
        raw = (tmp_path / "out" / "trials.jsonl").read_bytes()
        assert raw.endswith(b"\n")
        assert synced == [*itertools.accumulate(map(len, raw.splitlines(True)))], "each when it was written"
        seen.append(raw.count(b"\n"))
        return speedup(*args)
    monkeypatch.setitem(search.OBJECTIVES, "speedup", watching)
    assert call(*flags())[0] == 0 and seen == [1, 2, 3, 4, 5, 6]


def test_a_log_is_the_beginning_of_a_longer_one(product, call, tmp_path):
    """And --resume goes on from one to the other, files and picture included."""
    out, argv = product
    argv = [str(tmp_path / "out") if word == str(out) else word for word in argv]
    for trials in (7, 12, 17):
        assert call(*argv[:-1], trials, "--resume")[0] == 0
        raw = (tmp_path / "out" / "trials.jsonl").read_bytes()
        assert (out / "trials.jsonl").read_bytes().startswith(raw) and raw.count(b"\n") == 1 + trials
    assert files(tmp_path / "out") | {"search.png": files(out)["search.png"]} == files(out)


def test_a_run_that_has_ended_only_writes_its_files_again(product, call, monkeypatch):
    """Also where fewer trials are asked for: none is taken back."""
    out, argv = product
    before = tree(out)
    monkeypatch.setattr(plots, "search", draw)
    monkeypatch.setitem(search.OBJECTIVES, "speedup", lambda *args: pytest.fail("nothing is left to try"))
    for trials in (17, 3):
        for name in ("skip.json", "front.json", "search.png", "skip.json.part"):
            (out / name).write_bytes(b"damaged")
        status, printed, err = call(*argv[:-1], trials, "--resume")
        assert (status, err) == (0, "") and printed.startswith(str(out)) and tree(out) == before


def test_a_run_killed_at_any_byte_comes_to_the_same_end(call, flags, tmp_path, monkeypatch):
    """Of its log, cut at each byte, all whole lines are read; and from some of them it goes on to its end."""
    monkeypatch.setattr(search, "FIRST", 3)
    assert call(*flags("whole"))[0] == call(*flags(trials=1))[0] == 0
    file, raw = tmp_path / "out" / "trials.jsonl", (tmp_path / "whole" / "trials.jsonl").read_bytes()
    head, entries = log(tmp_path / "whole")
    ends = [0, *itertools.accumulate(map(len, raw.splitlines(True)))]
    for cut in range(len(raw) + 1):
        file.write_bytes(raw[:cut])
        lines = raw[:cut].count(b"\n")
        assert search.read_log(file, head) == (entries[: max(0, lines - 1)], ends[lines]), cut
    for cut in (0, 1, ends[1] - 1, ends[1], ends[1] + 1, ends[4] - 1, ends[4], ends[6] - 9):
        file.write_bytes(raw[:cut])
        assert call(*flags(resume=True))[0] == 0 and files(tmp_path / "out") == files(tmp_path / "whole"), cut


# --- what is refused


@pytest.mark.parametrize("change, word", [
    ({"model": "other"}, "model"), ({"text": "other.txt"}, "text"), ({"costs": "costs.json"}, "costs"),
    ({"seed": 1}, "seed"), ({"tokens": 33}, "tokens"), ({"temperature": 0.5}, "temperature"),
    ({"top_p": 0.5}, "top_p"), ({"protect": "0"}, "protect"), ({"min_skips": 1}, "min_skips"),
    ({"max_skips": 2}, "max_skips"), ({"objective": "matchness"}, "objective"),
    ({"dtype": "bfloat16"}, "model")], ids=str)
def test_another_setting_is_no_resumption(change, word, call, flags, made, tmp_path):
    assert call(*flags(trials=2))[0] == 0
    change = {name: made / v if name in ("model", "text", "costs") else v for name, v in change.items()}
    call.refuses(flags(trials=9, resume=True, **change), tmp_path,
            f"trials.jsonl, line 1: this run had another {word}: ")
    assert call(*flags(trials=3, resume=True))[0] == 0


def test_the_first_line_names_weights_and_texts(flags):
    a, model, tokenizer = search.parse(flags()), make(LLAMA), expected.byte_tokenizer()

    def head(model=model, tokenizer=tokenizer, texts=("a", "b")):
        head = search.header(a, model, tokenizer, texts, weight_costs(LLAMA), Space(6, (1, 2)))
        return head["model"], head["text"]

    first, other = head(), make(LLAMA)
    assert first == head(other) and all(len(name) == 64 for name in first)
    for weight in other.parameters():
        before = weight.flatten()[-1].clone()
        weight.view(-1)[-1] += 1e-9
        assert head(other) != first and head(other)[1] == first[1]
        weight.view(-1)[-1] = before
    for change in ({"texts": ("a", "c")}, {"texts": ("ab",)}, {"tokenizer": expected.byte_tokenizer(True)}):
        assert head(**change)[0] == first[0] and head(**change)[1] != first[1]


LINE, BEGIN = "not a line of this program", "not trial "
DAMAGE = [  # (line, what it becomes: text, or changes of its object, what the refusal says)
    *((1, text, LINE) for text in ("dear diary", "[]", "{}", "", "1")), (1, {"extra": 1}, LINE),
    (1, {"seed": None}, "another seed"), (1, {"free": [2, 3]}, "another free"),
    *((3, text, LINE) for text in ("\xff\xfe", "{", "", "[" * 10**5, "1" * 5000)),
    *((3, text, BEGIN) for text in ("null", "[1]", "{}", "1", '"trial"')),
    (2, {"trial": 1}, BEGIN), (4, {"trial": 3}, BEGIN),
    *((3, {"trial": n}, BEGIN) for n in (0, "1", True, 1.0)),
    *((3, {"bits": v}, BEGIN) for v in ("", "010", "01010", "0102", "01 1", 1010, None, list("0101"))),
    *((3, {key: v}, BEGIN) for key in ("value", "alpha", "c", "speedup")
      for v in ("1.0", None, True, math.nan, -math.inf, [1.0], 10**400)),
    *((3, {"gamma": v}, BEGIN) for v in (0, -1, 1.5, "2", None, True)),
    *((3, {"theta": v}, BEGIN) for v in ([1.0] * 4, "abcd", 1.0)),
    *((3, {"theta": v, "expected": [1.0, 1.0]}, BEGIN) for v in ([1.0] * 3, [1.0] * 5, ["1"] * 4, None)),
    *((3, {"theta": [1.0] * 4, "expected": v}, BEGIN) for v in (None, [1.0], [1.0, math.nan], {"a": 1})),
    (3, {"other": 1.0}, BEGIN)]


def test_a_damaged_log_is_refused_and_left_as_it_is(call, flags, tmp_path, monkeypatch):
    assert call(*flags(trials=3))[0] == 0
    loaded = checkpoint.load(flags()[1], "cpu", torch.float32)
    monkeypatch.setattr(checkpoint, "load", lambda *args: loaded)
    file = tmp_path / "out" / "trials.jsonl"
    lines = file.read_bytes().splitlines()
    for number, change, word in DAMAGE:
        line = change.encode("latin-1") if isinstance(change, str) else json.dumps(
            json.loads(lines[number - 1]) | change).encode()
        file.write_bytes(b"\n".join([*lines[: number - 1], line, *lines[number:]]) + b"\n")
        call.refuses(flags(resume=True), tmp_path, f"trials.jsonl, line {number}: ", word)
    for key in json.loads(lines[2]):
        short = {name: value for name, value in json.loads(lines[2]).items() if name != key}
        file.write_bytes(b"\n".join([lines[0], lines[1], json.dumps(short).encode()]) + b"\n")
        call.refuses(flags(resume=True), tmp_path, "line 3: not trial 1")
    for gone in range(3):
        file.write_bytes(b"\n".join(lines[:gone] + lines[gone + 1 :]) + b"\n")
        call.refuses(flags(resume=True), tmp_path, f"line {gone + 1}: not ")
    file.write_bytes(b"all my poems, on a single line")
    call.refuses(flags(resume=True), tmp_path, "line 1: not the beginning of this run")
    file.write_bytes(b"\n".join(lines) + b"\n")
    assert call(*flags(resume=True))[0] == 0


@pytest.mark.parametrize("change, word", [
    ({"model": "nowhere"}, "nowhere"), ({"text": "nowhere.txt"}, "nowhere.txt: no such file"),
    ({"text": "nowhere.jsonl"}, "nowhere.jsonl: no such file"), ({"text": "model"}, "model: no such file"),
    ({"costs": "nowhere.json"}, "nowhere.json"), ({"text": None}, "--text"), ({"other": 1}, "--other"),
    ({"trials": 0}, "--trials"), ({"trials": "x"}, "--trials"), ({"tokens": 15}, "--tokens"),
    ({"temperature": "nan"}, "temperature"), ({"top_p": 0}, "top_p"), ({"protect": "a"}, "--protect"),
    ({"protect": "6"}, "from 0 to 5"), ({"protect": "-1"}, "from 0 to 5"),
    ({"protect": "0,1,2,3,4,5"}, "0 sub-layers to choose"), ({"min_skips": -1}, "--min-skips -1"),
    ({"min_skips": 3, "max_skips": 2}, "--min-skips 3"), ({"min_skips": 9, "max_skips": 9}, "--min-skips 9"),
    ({"min_skips": 6, "protect": ""}, "--min-skips 6"), ({"max_skips": -1}, "--max-skips -1"),
    ({"objective": "luck"}, "--objective"), ({"device": "tpu"}, "tpu")], ids=str)
def test_bad_input_is_one_line(change, word, call, flags, made, tmp_path):
    paths = {name: made / change[name] for name in ("model", "text", "costs") if change.get(name)}
    call.refuses(flags(**change | paths), tmp_path, word)


def test_damaged_costs_are_refused(call, flags, tmp_path):
    file, good = tmp_path / "costs.json", [1.0] * 6
    tables = [good[1:], [*good, 1.0], [0.0] * 6, "111111", {"0": 1.0}, None]
    tables += [[bad, *good[1:]] for bad in (-1.0, math.nan, math.inf, "1", True, None)]
    for content in [[], {}, {"sublayers": good}, {"head": 1}, *({"sublayers": t, "head": 1} for t in tables),
                    *({"sublayers": good, "head": bad} for bad in (-1, math.nan, math.inf, "1", None))]:
        file.write_text(json.dumps(content))
        call.refuses(flags(costs=file), tmp_path, "costs.json: expected")
    for blocks in ([], 3, None, [1], [[1]], [[2, 1.0]], [[1, 1.0], [1, 2.0]], [[1, 1.0], [4, 2.0], [3, 2.0]],
                   [[1, 1.0], [2, math.nan]], [[1, 1.0], [2, -1]], [[1, 1.0], ["2", 1.0]], [[1, "1"]]):
        file.write_text(json.dumps({"sublayers": good, "head": 1, "blocks": blocks}))
        call.refuses(flags(costs=file), tmp_path, 'costs.json: expected pairs under "blocks"')
    for more in ({"slot": -1}, {"slot": "1"}, {"call": -1}, {"call": None}, {"at": -1}, {"at": 1.5},
                 {"at": True}):
        file.write_text(json.dumps({"sublayers": good, "head": 1, **more}))
        call.refuses(flags(costs=file), tmp_path, 'costs.json: expected costs under "slot" and "call"')
    file.write_text("{")
    call.refuses(flags(costs=file), tmp_path, "costs.json: not readable as JSON")


@pytest.mark.parametrize("name, content, word", [
    ("a.txt", "", "no text in it"), ("a.txt", END * 3 + "\n", "no text in it"),
    ("a.jsonl", "", "no text in it"), ("a.jsonl", "\n \n", "no text in it"),
    ("a.jsonl", '{"text": "a"}\n\n{"prompt": "b"}\n', "line 3: expected"),
    ("a.jsonl", '{"text": "\\ud800"}', "surrogates"), ("a.txt", "\xff", "not readable as UTF-8")], ids=repr)
def test_text_that_cannot_be_read_is_refused(name, content, word, call, flags, tmp_path):
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    call.refuses(flags(text=tmp_path / name), tmp_path, word)


# --- the bench


@pytest.fixture(scope="module")
def bench(scored):
    return *scored, Space(3, (1, 2, 4))


def test_bands_cover_every_block_but_the_first_once():
    space = bench_search.bands(24)
    assert space.bands[:6] == ((2,), (3,), (4,), (5,), (6, 8), (7, 9)) and len(space.bands) == 12
    assert space.bands[-2] == tuple(range(28, 48, 2)) and space.skippable[-2:] == (28, 29)
    assert space.groups().tolist() == [0, 1] * 6
    for n_layers in (2, 3, 7, 10, 12, 24, 80):
        space = bench_search.bands(n_layers)
        assert sorted(sub for band in space.bands for sub in band) == list(range(2, 2 * n_layers))
        assert len(space.bands) == min(12, 2 * n_layers - 2)
        assert space.sublayers([1] * len(space.bands)) == [0, 1]
    assert len(bench_search.bands(24, 3).bands) == 6


def test_a_bit_skips_its_whole_band():
    space = bench_search.bands(24)
    z = [0] * 4 + [1] + [0] * 6 + [1]
    assert set(range(48)) - set(space.sublayers(z)) == {6, 8, *range(29, 48, 2)}


def test_every_set_is_what_a_trial_says_of_it(bench):
    _, calibration, costs, space = bench
    land = bench_search.enumerate_sets(space, calibration, costs)
    assert list(land) == ["alpha", "c", "gamma", "speedup"] and len(land["c"]) == 8
    for k in range(8):
        z = [k & 1, k >> 1 & 1, k >> 2]
        t = speedup(calibration, costs, space.sublayers(z))
        assert [land[name][k] for name in land] == [t.alpha, t.cost, t.gamma, t.speedup]


@pytest.mark.parametrize("free", [(1, 2, 4), (0, 3), (2, 3, 4, 5)])
def test_clasp_takes_the_nearer_state_at_each_step(free, bench, monkeypatch):
    """Its table with sets for states, which are computed anew for every set; it sees the same cosines."""
    model, calibration, _, _ = bench
    n, honest, seen, wanted = len(free), torch.cosine_similarity, [], []
    target = [teacher.acceptance([1, 4]) for teacher in calibration.teachers]

    targets = [[states(model, ids, range(6), upto) for ids in calibration.ids] for upto in range(7)]

    def near(gone, upto):
        cosines = []
        for ids, want in zip(calibration.ids, targets[upto], strict=True):
            x = states(model, ids, [i for i in range(6) if i not in gone], upto)
            cosines += honest(x, want, -1).tolist()
        wanted.extend(cosines * (upto - 1 in free))     # else there is nothing to choose
        return sum(cosines) / len(cosines)

    def watched(*args):
        seen.extend(honest(*args).flatten().tolist())
        return honest(*args)

    table = {0: ()}
    for i in range(6):
        options = {j: [table[j]] if j in table else [] for j in range(n + 1)}   # run it,
        for j in range(n):
            if i in free and j in table:
                options[j + 1].append((*table[j], i))                           # or skip it
        nearest = partial(max, key=lambda gone, i=i: near(gone, i + 1))
        table = {j: nearest(choice) for j, choice in options.items() if choice}
    monkeypatch.setattr(torch, "cosine_similarity", watched)
    got = bench_search.clasp(calibration, Space(3, free))
    assert all(min(abs(a - b) for b in seen) < 1e-9 for a in wanted), "these cosines, among others"
    assert all(map(torch.equal, target, [t.acceptance([1, 4]) for t in calibration.teachers])), "unharmed"
    assert got == [tuple(int(sub in table[j]) for sub in free) for j in range(1, n + 1)]
    assert [sum(z) for z in got] == list(range(1, n + 1))


METHODS = [bench_search.random_search, bench_search.local_search, bench_search.gaussian_process]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [1, 13, 32, 50])
def test_a_method_sees_as_many_sets_as_it_may(method, count):
    """Each counted once; a budget larger than all of them ends, too."""
    values, asked = planted(5, 1), []
    worth = lambda z: asked.append(z) or values[z]                              # noqa: E731
    curve = bench_search.run_method(method, Space(3, (0, 1, 2, 4, 5)), worth, 0, count)
    assert len(asked) == len(set(asked)) == min(count, 32) and set(map(len, asked)) == {5}
    assert curve == [max(values[z] for z in asked[: i + 1]) for i in range(count)]


def test_a_method_that_ends_early_keeps_its_best():
    values = {(0, 1): 1.0, (1, 0): 2.0, (1, 1): 0.0}
    method = lambda space, evaluate, seed, count: [evaluate(z) for z in (*values, *values)]  # noqa: E731
    assert bench_search.run_method(method, Space(1, (0, 1)), values.get, 0, 4) == [1, 2, 2, 2]


def test_local_search_climbs_by_flips_and_starts_anew_on_a_top():
    values, asked = {z: -sum(z) for z in everything(6)}, []
    bench_search.run_method(bench_search.local_search, Space(3, tuple(range(6))),
                            lambda z: asked.append(z) or values[z], 3, 20)
    here, climbs = asked[0], 0
    for z in asked[1 : asked.index((0,) * 6) + 1]:
        assert sum(a != b for a, b in zip(here, z, strict=True)) == 1, "one flip from the best so far"
        if values[z] > values[here]:
            here, climbs = z, climbs + 1
    assert here == (0,) * 6 and climbs == sum(asked[0]) > 1
    behind = asked[asked.index((0,) * 6) + 1 :]
    assert any(sum(z) > 1 for z in behind), "all flips of the top, and another start"


def test_the_process_is_told_what_its_sets_are_worth():
    values, asked = planted(5, 2), []
    space = Space(3, (0, 1, 2, 4, 5))
    worth = lambda z: asked.append(z) or values[z]                              # noqa: E731
    bench_search.run_method(bench_search.gaussian_process, space, worth, 7, 15)
    assert asked == sets(run(space, values, 15, seed=7))


def test_methods_against_the_truth(bench, monkeypatch, tmp_path):
    """The bench's own curves on eight sets: all end at the optimum, and the table and the chart take them."""
    _, calibration, costs, space = bench
    monkeypatch.setattr(bench_search, "SEEDS", 2)
    monkeypatch.setattr(bench_search, "BUDGETS", (2, 8))
    monkeypatch.setattr(bench_search, "find_spec", lambda name: None)
    land, ticks = bench_search.enumerate_sets(space, calibration, costs), []
    curves = bench_search.regrets(space, land, SimpleNamespace(update=lambda: ticks.append(1)))
    assert list(curves) == ["Gaussian process", "local search", "random"] and len(ticks) == 6
    for runs in curves.values():
        assert [run[-1] for run in runs] == [float(land["speedup"].max())] * 2
    for seed, run in enumerate(curves["random"]):  # the first sets that it draws, asked for one by one
        g, seen = torch.Generator().manual_seed(seed), {}
        while len(seen) < 3:
            z = tuple(space.random(g).int().tolist())
            seen.setdefault(z, speedup(calibration, costs, space.sublayers(z)).speedup)
        assert run[:3] == pytest.approx([max([*seen.values()][: i + 1]) for i in range(3)])
    plots.regrets(curves, float(land["speedup"].max()), "eight sets", tmp_path / "regrets.png")
    assert image.imread(tmp_path / "regrets.png").shape[2] == 4


def test_the_table_of_regrets_by_hand(monkeypatch):
    monkeypatch.setattr(bench_search, "SEEDS", 2)
    ours = [[1.0] * 24 + [1.995] * 30 + [2.0] * 46, [1.5] * 30 + [2.0] * 70]
    curves = {"Gaussian process": ours, "random": [[1.0] * 100, [1.9] * 100]}
    row = {"sublayers": [0, 1], "alpha": 0.5, "c": 0.25, "gamma": 2, "predicted": 1.5, "measured": 1.25}
    every = {"sets": {"best": row}, "trials": 3, "trials_per_second": 2.0, "share_in_process": 0.5}
    data = {"optimum": 2.0, "optimum_set": [0, 3], "curves": curves, "correlation": {"speedup": 0.5},
            "everything": every,
            "transfer": {name: dict.fromkeys(bench_search.SETS, 1.125) for name in bench_search.SETS}}
    land = {"speedup": torch.ones(3).numpy(), "c": torch.ones(3).numpy()}
    text = bench_search.markdown(SimpleNamespace(model="m", machine="here"), land, data)
    rows = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
            for line in text.splitlines() if line.startswith("|")}
    assert rows["Gaussian process"] == ["0.2525", "0.0025", "0.0000", "0%", "50%", "100%", "28",
                                        "2 : 0, p = 0.2"]
    assert rows["random"][-1] == "" and rows["random"][6] == "never"
    assert text.startswith("m; all 3 sets of groups of sub-layers: the best, which keeps 0 3, promises 2.0")
    assert rows["best"] == ["0 1", "0.500", "0.250", "2", "1.50", "1.25"]


def test_the_statistics_by_hand():
    assert [bench_search.first_within([1, 2, 2, 3], level) for level in (0, 2, 3, 4)] == [1, 2, 4, None]
    pairs = ((0, 0), 1), ((3, 0), 1 / 8), ((2, 1), 0.5), ((0, 3), 1)
    assert all(bench_search.sign_test(*counts) == p for counts, p in pairs)
    assert bench_search.rank_correlation([1, 5, 2], [10, 1000, 20]) == pytest.approx(1)
    assert bench_search.rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert bench_search.rank_correlation([2, 3, 4, 1], [30, 1, 40, 2]) == pytest.approx(1 - 6 * 6 / (4 * 15))
