"""Training: the recipe by hand, runs that are interrupted, what is refused, and what stands there at the end.
"""
import argparse
import copy
import json
import math
import os
import shlex
import shutil
import signal
import time
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

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
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import FAMILIES, LLAMA, argv_of, command, each_family, make, story, tree

import checkpoint
import train
from support import card, corpus, files, plots
from support.files import replacing

SMALL = {"layers": 3, "dim": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "hidden": 48, "context": 16,
         "window": 5, "vocab": 300, "batch": 4, "tokens": 640, "warmup": 3, "every": 1e6, "prompt": "Lily",
         "device": "cpu"}  # ten steps
SHAPE = ["tokenizer", "vocab", *train.SHAPE]  # not beside --start
draw = plots.training
TOKENS = torch.tensor([[1, 5, 3, 2, 9, 4, 4, 7, 0, 16, 8, 8], [3, 8, 8, 1, 2, 6, 11, 15, 2, 2, 0, 1]])


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder with a.txt and b.txt to train on and v/v.txt to measure on."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "v").mkdir()
    for seed, (name, count) in enumerate({"a": 60, "b": 20, "v/v": 10}.items()):
        (folder / f"{name}.txt").write_text(story(seed, count))
    return folder


@pytest.fixture
def flags(texts, tmp_path):
    """A command line: SMALL, changed."""
    def line(out="out", **changes):
        given = {"out": tmp_path / out, "data": [f"{texts / 'a.txt'}=2", texts / "b.txt"], **SMALL}
        return argv_of(given | changes)
    return line


@pytest.fixture
def begin(flags):
    """A Run that is ready to train. It gives its lock back, as the tests open a folder again."""
    def opened(*out, **changes):
        run = train.open_run(train.parse(flags(*out, **changes)))
        run.lock.close()
        return run
    return opened


call = command(train.main)


@pytest.fixture(scope="module", params=FAMILIES)
def product(request, texts, tmp_path_factory):
    """(family, folder, flags) of a run that has ended."""
    out = tmp_path_factory.mktemp("product") / request.param
    argv = argv_of({"out": out, "data": [f"{texts}/a.txt=2", f"{texts}/b.txt"], "valid": f"{texts}/v/v.txt",
                    **SMALL, "family": request.param, "lr": 0.0123456789012345, "seed": 12345678901,
                    "about": "Tales"})
    assert train.main(argv) == 0
    return request.param, out, argv


@pytest.fixture(autouse=True)
def no_picture(monkeypatch):
    """Drawing takes longer than all the rest, and so only `product` does it."""
    monkeypatch.setattr(plots, "training", lambda *args: Path(args[-1]).write_bytes(b"a picture"))


def state(out):
    """What a run's checkpoint holds: (facts, tensors)."""
    with safe_open(Path(out) / train.STATE, framework="pt") as file:
        return json.loads(file.metadata()["run"]), {key: file.get_tensor(key) for key in file.keys()}


def same_end(a, b):
    """Losses, exits, weights and what the optimisers know are equal bit by bit."""
    (facts, tensors), (facts_b, tensors_b) = state(a), state(b)
    assert all(facts[key] == facts_b[key] for key in ("step", "losses", "settings")), "losses or exits differ"
    assert tensors.keys() == tensors_b.keys() and {key.split(".")[0] for key in tensors} > {"model", "0"}
    assert all(torch.equal(t, tensors_b[key]) for key, t in tensors.items()), "the weights differ"


@pytest.fixture(name="run", params=FAMILIES)
def short_run(request, call, flags, monkeypatch):
    """For the promises of resumed.py: six steps; the runs of `product` test what is written in the end."""
    monkeypatch.setattr(train, "finish", lambda run: None)
    step = train.Run.train_step

    def before_step(f):
        monkeypatch.setattr(train.Run, "train_step", lambda run: (f(), step(run)))
    six = partial(flags, family=request.param, every=1e-9, tokens=64 * 6, dropout=0.5)
    return Run(call, six, before_step, lambda out: state(out)[0]["step"], same_end, train.STATE)


def trainable(family, **changes):
    return make(replace(FAMILIES[family], **changes)).requires_grad_(True)


def parameters(model, sublayer):
    layer, is_mlp = divmod(sublayer, 2)
    b = model.blocks[layer]
    modules = (b.mlp, b.mlp_norm, b.mlp_post) if is_mlp else (b.attn, b.attn_norm, b.attn_post)
    return [p for module in modules for p in module.parameters()]


def moved(model, loss):
    """Which parameters get a gradient from a loss: sub-layers by number, and "tok", "norm", "head"."""
    model.zero_grad()
    loss.backward()
    groups = {i: parameters(model, i) for i in range(2 * model.c.n_layers)}
    groups |= {"tok": [model.tok], "norm": [model.norm.weight]}
    groups |= {} if model.head is None else {"head": [model.head]}
    some = {name: [p.grad is not None and bool(p.grad.any()) for p in ps] for name, ps in groups.items()}
    assert all(len(set(flags)) == 1 for flags in some.values()), "a sub-layer is trained in part"
    return {name for name, flags in some.items() if flags[0]}


def nll(probabilities, labels):
    return -probabilities.gather(-1, labels[..., None]).log().mean()


# --- which sub-layers a step keeps


def test_drop_rates_by_hand():
    got = train.drop_rates(2, 0.2).tolist()
    assert got == pytest.approx([0, 0.2 * (2 ** (1 / 3) - 1), 0.2 * (2 ** (2 / 3) - 1), 0.2])
    assert train.drop_rates(1, 0.5).tolist() == pytest.approx([0, 0.5])
    many = train.drop_rates(12, 0.15)
    assert len(many) == 24 and bool((many.diff() > 0).all()), "every deeper sub-layer is dropped more often"


def choices(count, n_layers, progress, **changes):
    """What so many steps train, at this place of a run."""
    a = {"dropout": 0.4, "curriculum": 0.2, "shallow": 0.7, "shallow_end": 0.5, "exit_weight": 2.0,
         "distil": 0.25} | changes
    g = torch.Generator().manual_seed(0)
    return [train.choose(argparse.Namespace(**a), n_layers, progress, g) for _ in range(count)]


def near(count, n, share):
    return abs(count / n - share) <= 4 * math.sqrt(share * (1 - share) / n)


def test_sublayers_are_dropped_as_often_as_their_rate_says():
    n = 3000
    kept = [c[0] for c in choices(n, 3, 0.5)]
    assert all(k == sorted(set(k)) and set(k) <= set(range(6)) for k in kept)
    for i, rate in enumerate(train.drop_rates(3, 0.4).tolist()):
        count = sum(i not in k for k in kept)
        assert near(count, n, rate), f"sub-layer {i} is dropped {count / n:.3f} of the time, not {rate:.3f}"
    both = sum(4 not in k and 5 not in k for k in kept)
    assert near(both, n, math.prod(train.drop_rates(3, 0.4)[4:].tolist())), "each is dropped on its own"
    assert all(0 in c[0] and 5 not in c[0] for c in choices(100, 3, 0.5, dropout=1.0))
    assert all(c[0] == list(range(6)) for c in choices(100, 3, 0.5, dropout=0.0))


@each_family
def test_what_is_dropped_is_really_not_run(family):
    m, kept = trainable(family), [0, 1, 3, 4, 6, 9, 10]
    want = [x.item() for x in train.losses(m, TOKENS, kept, 3, 0.5)]
    for i in set(range(12)) - set(kept):
        for p in parameters(m, i):
            p.data.fill_(math.nan)
    final, early = train.losses(m, TOKENS, kept, 3, 0.5)
    assert [final.item(), early.item()] == want, "a dropped sub-layer has a say"
    assert moved(m, final + early) >= set(kept)
    assert all(p.grad is None for i in set(range(12)) - set(kept) for p in parameters(m, i))


def test_a_step_leaves_out_what_was_dropped(begin):
    run = begin(dropout=1)   # the last sub-layer is never kept
    for p in parameters(run.model, 5):
        p.data.fill_(math.nan)
    before = [p.clone() for p in parameters(run.model, 0)]
    run.train_step()
    run.train_step()
    assert all(math.isfinite(x) for x in run.losses[-1])
    assert not any(torch.equal(p, q) for p, q in zip(parameters(run.model, 0), before, strict=True))
    assert all(p.isnan().all() for p in parameters(run.model, 5)), "the optimiser must leave it alone"


def test_in_float32_no_product_is_rounded_to_bfloat16(begin):
    seen = {}
    for dtype in ("float32", "bfloat16"):
        run = begin(dtype, dtype=dtype, dropout=0, curriculum=0)
        batch = run.text.batch(run.a.seed, 0, run.a.batch, run.a.context)
        exact = train.losses(copy.deepcopy(run.model).double(), batch, range(2 * run.a.layers))[0].item()
        run.train_step()
        seen[dtype] = abs(run.losses[0][0] - exact)
    assert seen["float32"] < 1e-5 < seen["bfloat16"], seen


# --- which exit it trains, and how


def test_exits_of_the_curriculum():
    """All alike, labels only, and a weight of 3 tenths."""
    n = 3000
    got = choices(n, 6, 0.1999)
    for e in range(1, 6):
        assert near(sum(c[1] == e for c in got), n, 1 / 5), f"exit {e} is not drawn as often as the others"
    assert {c[3] for c in got} == {0.0}, "labels only"
    assert [c[2] for c in got] == pytest.approx([0.6] * n)


def test_afterwards_most_exits_lie_in_the_lower_half():
    n = 3000
    got = choices(n, 6, 0.2)
    for e in range(1, 6):
        share = 0.7 / 3 if e <= 3 else 0.3 / 2
        assert near(sum(c[1] == e for c in got), n, share), f"exit {e} is not drawn {share:.0%} of the time"
    assert {c[1:] for c in got} == {(e, 2.0, 0.25) for e in range(1, 6)}


def test_where_shallow_ends_is_a_share_of_the_blocks():
    ends = {24: 4, 12: 2, 10: 2, 6: 1, 2: 1, 1: 1}
    for n_layers, end in ends.items():
        drawn = {c[1] for c in choices(300, n_layers, 0.9, shallow=1.0, shallow_end=1 / 6)}
        assert drawn == set(range(1, end + 1)), f"of {n_layers} blocks {drawn}"
    assert {c[1] for c in choices(300, 8, 0.9, shallow=0.0, shallow_end=0.25)} == {3, 4, 5, 6, 7}
    assert {c[1] for c in choices(300, 4, 0.9, shallow=0.0, shallow_end=1.0)} == {3}
    assert train.parse(["--out", "x"]).shallow_end == 1 / 6


@pytest.mark.parametrize("n_layers", [1, 2, 3, 4, 7])
def test_no_exit_lies_after_the_last_block_but_one(n_layers):
    for progress in (0.0, 0.5, 1.0):
        exits = {c[1] for c in choices(300, n_layers, progress)}
        assert exits == set(range(1, max(2, n_layers))), f"{exits} at {progress:.0%}"


def test_steps_and_seeds_differ_and_nothing_else_counts(begin):
    def chosen(out, **changes):
        run = begin(out, exit_weight=1, layers=6, dropout=0.9, lr=1e-9, muon_lr=1e-9, **changes)
        torch.manual_seed(len(out))
        for _ in range(8):
            run.train_step()
        return [r[2] for r in run.losses], [r[0] for r in run.losses]
    one, again, other = chosen("a"), chosen("again"), chosen("other", seed=1)
    assert one == again
    assert one[0] != other[0] and len(set(one[0])) > 2, "exits must follow seed and step"


def test_every_step_asks_for_its_own_batch(begin):
    run, seen = begin(seed=7), []
    batch = run.text.batch
    run.text.batch = lambda *args: seen.append(args) or batch(*args)
    for _ in range(3):
        run.train_step()
    assert seen == [(7, 0, 4, 16), (7, 1, 4, 16), (7, 2, 4, 16)]


# --- the losses


@each_family
@pytest.mark.parametrize("distil", [0.0, 0.3, 1.0])
def test_losses_by_hand(family, distil):
    m, kept, labels = make(FAMILIES[family]), [0, 1, 3, 5, 6, 9, 10], TOKENS[:, 1:]
    at, x = slice(0, 11), m.embed(TOKENS[:, :-1])
    q = m.unembed(m.run(x, at, sublayers=[0, 1, 3, 5])).softmax(-1)
    p = m.unembed(m.run(x, at, sublayers=kept)).softmax(-1)
    final, early = train.losses(m, TOKENS, kept, 3, distil)
    assert float(final) == pytest.approx(float(nll(p, labels)), rel=1e-5)
    imitation = -(p * q.log()).sum(-1).mean()
    assert abs(imitation - nll(q, labels)) > 0.1, "the parts of the mixture must differ"
    assert float(early) == pytest.approx(float((1 - distil) * nll(q, labels) + distil * imitation), rel=1e-5)
    final, early = train.losses(m, TOKENS.int(), kept)
    assert early is None and float(final) == pytest.approx(float(nll(p, labels)), rel=1e-5), "without an exit"


@each_family
@pytest.mark.parametrize("taught", [0.0, 0.3, 1.0])
def test_what_a_teacher_adds(family, taught):
    """The whole teacher's distribution, for a share of the final loss; the exit imitates its own model."""
    m, kept, labels = make(FAMILIES[family]), [0, 1, 3, 5, 6, 9, 10], TOKENS[:, 1:]
    teacher = make(LLAMA, seed=5).requires_grad_(True)
    target, p = teacher(TOKENS[:, :-1]).detach().softmax(-1), m.unembed(m.run(
        m.embed(TOKENS[:, :-1]), slice(0, 11), sublayers=kept)).softmax(-1)
    soft = -(target * p.log()).sum(-1).mean()
    assert abs(soft - nll(p, labels)) > 0.1, "the parts of the mixture must differ"
    final, early = train.losses(m, TOKENS, kept, 3, 0.5, teacher, taught)
    assert float(final) == pytest.approx(float((1 - taught) * nll(p, labels) + taught * soft), rel=1e-5)
    assert float(early) == float(train.losses(m, TOKENS, kept, 3, 0.5)[1])
    assert not final.requires_grad, "the teacher learns"


@each_family
@pytest.mark.parametrize("distil", [0.0, 0.3, 1.0])
def test_what_the_exit_loss_moves(family, distil):
    """What lies below the exit, and what all exits share."""
    m, kept = trainable(family, tied=family == "gemma2"), [0, 1, 3, 4, 5, 6, 9, 10]
    shared = {"tok", "norm", "head"} if m.head is not None else {"tok", "norm"}
    for exit_layer in (1, 3, 5):
        early = train.losses(m, TOKENS, kept, exit_layer, distil)[1]
        below = {i for i in kept if i < 2 * exit_layer}
        assert moved(m, early) == shared | below, f"exit {exit_layer}: too much or too little is trained"
    final = train.losses(m, TOKENS, kept, 3, distil)[0]
    assert moved(m, final) == shared | set(kept), "the final loss trains all that was run"


@each_family
def test_what_is_imitated_gets_no_gradient(family):
    m, at = trainable(family), slice(0, 11)
    early = train.losses(m, TOKENS, range(12), 3, 1.0)[1]
    moved(m, early)
    got = {name: p.grad.clone() for name, p in m.named_parameters() if p.grad is not None}
    target = m(TOKENS[:, :-1]).softmax(-1).detach()
    q = m.unembed(m.run(m.embed(TOKENS[:, :-1]), at, sublayers=range(6))).log_softmax(-1)
    moved(m, -(target * q).sum(-1).mean())
    want = {name: p.grad for name, p in m.named_parameters() if p.grad is not None}
    assert got.keys() == want.keys()
    for name, g in want.items():
        assert torch.allclose(got[name], g, rtol=1e-4, atol=1e-6 * float(g.abs().max())), name


# --- a step


@each_family
def test_one_batch_is_learnt_by_heart(family, begin):
    run = begin(family=family, tokens=64 * 60, dropout=0, exit_weight=1, lr=0.02, muon_lr=0.05)
    batch = run.text.batch(0, 0, 4, 16)
    run.text.batch = lambda *_: batch
    for _ in range(40):
        run.train_step()
    first, last = run.losses[0], run.losses[-1]
    assert first[0] > 5 and first[1] > 5, "fresh weights know nothing"
    assert last[0] < 0.2, f"the final loss falls to {last[0]:.2f} only"
    early = {e: loss for _, loss, e in run.losses[-20:]}
    assert early.keys() == {1, 2} and max(early.values()) < 1.5, f"the exits' losses are {early}"
    files = train.evaluate(run.model, batch[0], 16, 16)
    assert files["loss"][-1] < 0.2, "what is measured is not what was trained"


@each_family
def test_fresh_weights(family, begin):
    m = begin(family=family).model
    for name, p in m.named_parameters():
        assert p.dtype == torch.float32
        if p.dim() > 1:
            assert float(p.detach().std()) == pytest.approx(0.02, rel=0.15), name
        else:
            assert bool((p + m.c.norm_offset == 1).all()), "a fresh norm multiplies by 1"
    assert float(m.scale) == pytest.approx(m.c.embed_scale) and m.c.bos == 0 and m.c.eos == (0,)
    again, other = (begin(f"{seed}", family=family, seed=seed).model for seed in (0, 1))
    assert torch.equal(again.tok, m.tok) and not torch.equal(other.tok, m.tok)


def test_matrices_go_to_muon_and_the_rest_to_adamw(begin):
    run = begin(family="gemma2")
    muon, adamw = ([p for group in o.param_groups for p in group["params"]] for o in run.optimisers)
    assert len(muon) == 4 * 3 and {id(p) for p in muon + adamw} == {id(p) for p in run.model.parameters()}
    assert run.model.tok.data_ptr() in {p.data_ptr() for p in adamw} and len(adamw) == 4 * 3 + 2
    assert (type(run.optimisers[0]), type(run.optimisers[1])) == (torch.optim.Muon, torch.optim.AdamW)


def gradients(run):
    """What a step hands to the optimisers: the way that plain gradient descent goes at a rate of 1."""
    before = [p.detach().clone() for p in run.model.parameters()]
    run.optimisers, run.rates = [torch.optim.SGD(run.model.parameters())], [1.0]
    run.train_step()
    return [p - q.detach() for p, q in zip(before, run.model.parameters(), strict=True)]


def test_the_gradient_is_clipped(begin):
    free, clipped = (
        torch.cat([g.flatten() for g in gradients(begin(f"{clip}", clip=clip, warmup=0))]).norm().item()
        for clip in (1e9, 0.125))
    assert free > 0.5, "the test must see a gradient that is too long"
    assert clipped == pytest.approx(0.125, rel=1e-4)


def test_the_exit_loss_is_weighted(begin):
    found = []
    for weight in (0, 1, 3):
        run = begin(f"{weight}", exit_weight=weight, dropout=0, curriculum=0, distil=0, clip=1e9, warmup=0)
        found.append(gradients(run)[[name for name, _ in run.model.named_parameters()].index("norm.weight")])
        assert (run.losses[0][1] is None) == (weight == 0)
    plain, one, three = found
    assert torch.allclose(three - plain, 3 * (one - plain), rtol=1e-2, atol=1e-3 * float(one.abs().max()))
    assert float((one - plain).abs().max()) > 0.1 * float(plain.abs().max()), "the exit loss is not added"


def test_a_step_starts_from_no_gradient(begin):
    run = begin()
    run.train_step()
    assert all(p.grad is None for p in run.model.parameters()), "gradients add up"


def rates(run, steps):
    """The learning rates of these steps, as shares of --muon-lr and --lr."""
    shares = []
    for run.step in steps:
        run.train_step()
        got = [o.param_groups[0]["lr"] / rate for o, rate in zip(run.optimisers, (0.02, 0.003), strict=True)]
        assert got[0] == pytest.approx(got[1]), "both rates follow one schedule"
        shares.append(got[0])
    return shares


def test_the_learning_rate_of_each_step(begin):
    run = begin(tokens=64_000, warmup=100, decay=0.5)
    assert run.steps == 1000
    assert rates(run, (0, 49, 98)) == pytest.approx([0.01, 0.5, 0.99]), "warm-up"
    assert rates(run, (99, 300, 500)) == pytest.approx([1, 1, 1]), "constant"
    assert rates(run, (600, 750, 900)) == pytest.approx([0.8, 0.5, 0.2]), "linear decay"
    assert rates(run, (989, 990, 995, 999)) == pytest.approx([0.022, 0.02, 0.02, 0.02]), "to 2 % and no less"
    run = begin("constant", tokens=6400, warmup=0, decay=0)
    assert rates(run, (0, 50, 99)) == pytest.approx([1, 1, 1]), "without either it never changes"


# --- how far a run is


def test_progress_by_steps_or_by_the_clock(begin):
    """Whichever is ahead."""
    run = begin(minutes=2)
    assert (run.steps, run.progress()) == (10, 0)
    run.step, run.seconds = 3, 60
    assert run.progress() == 0.5
    run.step = 6
    assert run.progress() == 0.6
    run.seconds = 500
    assert run.progress() == 1, "never beyond the end"
    run.a.minutes = None
    assert run.progress() == 0.6
    assert begin("tiny", tokens=1).steps == 1, "at least one step"


class Clock:
    """Every look at it takes a while."""

    def __init__(self, seconds):
        self.now, self.seconds = 1000.0, seconds

    def monotonic(self):
        self.now += self.seconds
        return self.now

    def __getattr__(self, name):
        return getattr(time, name)


def test_minutes_end_a_run_and_count_what_was_before(begin, monkeypatch):
    monkeypatch.setattr(train, "time", Clock(30))
    run = begin(minutes=2)
    train.train(run)
    assert (run.step, run.seconds) == (4, 120)
    again = begin(minutes=3.4, resume=True)
    assert again.seconds == 120
    train.train(again)
    assert (again.step, again.seconds) == (7, 210), "the minutes of a resumed run start anew"


@pytest.mark.parametrize("steps, saves", [(10, [3, 6, 9, 10]), (9, [3, 6, 9, 9])])
def test_a_checkpoint_every_few_minutes_and_one_at_the_end(steps, saves, begin, monkeypatch):
    """What was measured at the last step is not measured again."""
    run, saved = begin(every=2.5, tokens=64 * steps), []
    monkeypatch.setattr(train, "time", Clock(60))
    monkeypatch.setattr(train.Run, "save", lambda run: saved.append(run.step))
    train.train(run)
    assert saved == saves and [e["tokens"] // 64 for e in run.evals] == sorted({0, *saves})


# --- measuring


@each_family
def test_each_exit_is_measured_as_a_truncated_model(family):
    m = make(FAMILIES[family])
    tokens = torch.randint(17, (16 * 40 + 9,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    windows, labels, at = tokens[:640].long().view(40, 16), tokens[1:641].long(), slice(0, 16)
    logits = torch.stack([m.unembed(m.run(m.embed(windows), at, sublayers=range(2 * e))).flatten(0, 1)
                          for e in range(1, 7)])                                        # (L, 640, V)
    got = train.evaluate(m, tokens, 16, 10**6)
    assert got["loss"] == pytest.approx([float(nll(x.softmax(-1), labels)) for x in logits], rel=1e-5)
    want = [float((x.argmax(-1) == logits[-1].argmax(-1)).double().mean()) for x in logits]
    assert got["agreement"] == pytest.approx(want) and got["agreement"][-1] == 1
    assert 0 < want[0] < 1, "the test must see both"


def test_only_the_first_tokens_are_measured():
    m = make(LLAMA)
    tokens = torch.randint(17, (200,), generator=torch.Generator().manual_seed(0))
    two = train.evaluate(m, tokens[:33], 16, 10**6)
    assert train.evaluate(m, tokens, 16, 32) == train.evaluate(m, tokens, 16, 47) == two
    assert train.evaluate(m, tokens, 16, 48) != two
    assert train.evaluate(m, tokens[:48], 16, 10**6) == two, "47 tokens have a successor: two windows"
    assert train.evaluate(m, tokens, 16, 5) == train.evaluate(m, tokens[:17], 16, 16), "at least one window"


def test_speedups_by_hand():
    agreement = [0.0, 0.5, 0.9, 0.99, 1.0, 1.0]
    block = 32 * 8 * (2 * 4 + 2 * 2) + 3 * 32 * 48
    want = []
    for e, alpha in enumerate(agreement[:-1], 1):
        c = (e * block + 17 * 32) / (6 * block + 17 * 32)
        tokens = [sum(alpha**i for i in range(gamma + 1)) for gamma in range(17)]
        want.append(max(n / (gamma * c + 1) for gamma, n in enumerate(tokens)))
    assert train.speedups(LLAMA, agreement) == pytest.approx(want)
    assert want[0] == 1, "what is never accepted is never drafted"


# --- interrupted runs


@pytest.mark.parametrize("name", [".tmpcrE7OO", train.STATE + files.TEMPORARY])
@pytest.mark.parametrize("saved", [False, True])
def test_what_a_kill_leaves_is_tidied_up(saved, name, begin, tmp_path):
    """A checkpoint that safetensors, or we, had only begun to write: the first of a run, or a later one."""
    litter = tmp_path / "out" / name
    if saved:
        begin()
    litter.parent.mkdir(exist_ok=True)
    litter.write_bytes(b"half a checkpoint")
    run = begin(resume=True)
    run.save()
    assert run.step == 0 and not litter.exists()


def test_a_run_that_has_ended_is_only_written_again(product, monkeypatch):
    """Its picture, too."""
    _, out, argv = product
    before = tree(out)
    monkeypatch.setattr(train.Run, "train_step", lambda run: pytest.fail("there is nothing left to train"))
    monkeypatch.setattr(plots, "training", draw)
    for path in out.iterdir():
        if path.name not in (train.STATE, files.LOCK):
            path.write_bytes(b"damaged")
    assert train.main([*argv, "--resume"]) == 0 and tree(out) == before


def test_a_resumed_run_may_change_what_trains_nothing(begin, call, flags, texts, tmp_path):
    begin(valid=[texts / "v" / "v.txt"]).save()
    changes = dict(valid=[texts / "b.txt"], minutes=1000, every=2, about="me", prompt="Tom",
                   tokenizer=tmp_path / "nowhere")
    assert call(*flags(resume=True, **changes))[0] == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| data | me |" in card and '"Tom' in card and "| loss, b |" in card


def test_a_loss_that_is_no_number_ends_the_run(call, flags, tmp_path):
    status, _, err = call(*flags(muon_lr=1e25, warmup=0, dropout=0))
    assert status == 2 and "lower --lr" in err.splitlines()[-1]
    assert state(tmp_path / "out")[0]["step"] == 0, "the last sound checkpoint stays"


# --- what is refused


NUMBERS = {  # flags, and what is no such number
    "0 -1": "vocab layers dim heads kv_heads head_dim hidden context window batch tokens every minutes lr "
            "muon_lr clip",
    "-1": "warmup seed exit_weight",
    "-1 1.1 1e9": "dropout distil taught shallow shallow_end curriculum decay"}


def test_the_table_of_numbers_is_complete():
    given = vars(train.parse(["--out", "x", "--minutes", "1"]))
    assert {k for k, v in given.items() if type(v) in (int, float)} == set(" ".join(NUMBERS.values()).split())


@pytest.mark.parametrize("flag, bad", [(flag, bad) for bad in NUMBERS for flag in NUMBERS[bad].split()])
def test_wrong_numbers_are_refused_by_name(flag, bad, call, flags, tmp_path):
    """And the extremes are not."""
    for value in [*bad.split(), "nan", "inf", "-inf", "x", "", "9" * 40, "1e40"]:
        call.refuses(flags(**{flag: value}), tmp_path, f"--{flag.replace('_', '-')}")
    for value in ["0"] * (bad[0] != "0") + ["1"] * ("1.1" in bad):
        assert getattr(train.parse(flags(**{flag: value})), flag) == int(value)


def test_the_help_prints(capsys):
    with pytest.raises(SystemExit) as e:
        train.main(["--help"])
    text = capsys.readouterr().out
    assert e.value.code == 0 and "the last 2% of each training file" in " ".join(text.split())


WRONG = {
    "a flag that does not exist": (dict(nonsense=1), ["--nonsense"]),
    "a flag cut short": (dict(tok=100), ["--tok"]),
    "a family that does not exist": (dict(family="bert"), ["--family", "bert"]),
    "heads that cannot share": (dict(kv_heads=3), ["--heads 4", "--kv-heads 3"]),
    "an odd head": (dict(head_dim=7), ["--head-dim", "7"]),
    "a vocabulary without all bytes": (dict(vocab=256), ["--vocab", "257", "256"]),
    "a device that does not exist": (dict(device="gpu"), ["gpu"]),
    "no prompt": (dict(prompt=""), ["prompt", "empty"]),
    "a prompt that is not Unicode": (dict(prompt="a\udcff"), ["prompt", "UTF-8"]),
    "no such tokenizer": (dict(tokenizer="nowhere"), ["nowhere", "tokenizer.json", "no such file"]),
    "no such file": (dict(data=["nowhere.txt"]), ["nowhere.txt", "no such file"]),
    "no such file to measure on": (dict(valid=["nowhere.txt"]), ["nowhere.txt", "no such file"]),
    "a folder": (dict(data=["."]), ["no such file"]),
    "text too short": (dict(context=100_000), ["a.txt", "too few", "100000", "--context"]),
    "a twin in a folder that does not exist": (dict(twin="nowhere/twin.json"), ["nowhere", "--twin"]),
    "a twin that is a folder": (dict(twin="."), ["--twin"])}


def test_a_model_is_trained_further(product, begin, texts, tmp_path):
    """Its weights, shape and tokenizer are those of the folder, whatever the text; all of them learn."""
    _, out, _ = product
    model, tokenizer = checkpoint.load(out, "cpu", torch.float32)
    changes = dict.fromkeys(SHAPE) | {"start": out, "context": 12, "dtype": "float32"}
    changes["data"] = [texts / "b.txt"]         # of which another tokenizer would be trained
    run = begin(**changes)
    assert run.model.c == model.c and run.text.tokenizer.to_str() == tokenizer.to_str()
    old = dict(model.named_parameters())
    assert all(torch.equal(p, old[name]) for name, p in run.model.named_parameters())
    with torch.no_grad():
        assert run.evals[0]["files"] == {name: train.evaluate(model, s, 12, 8192)
                                         for name, s in run.text.valid.items()}
    run.train_step()
    moved = {name for name, p in run.model.named_parameters() if not torch.equal(p, old[name])}
    assert {"tok", "norm.weight", "blocks.0.attn.wqkv", "blocks.2.mlp.down"} <= moved
    run.save()
    again = begin(resume=True, **changes)
    assert again.step == 1 and all(torch.equal(p, q) for p, q in zip(
        again.model.parameters(), run.model.parameters(), strict=True))
    assert f"the weights of {out.name}" in card.card(run, {}, "", "")


def test_what_is_trained_further_keeps_its_shape(product, begin, call, flags, tmp_path):
    _, out, _ = product
    for flag in SHAPE:
        changes = dict.fromkeys(SHAPE) | {flag: OTHER.get(flag, out), "start": out}
        call.refuses(flags(**changes), tmp_path, f"--{flag.replace('_', '-')}", "leave it out")
    changes = dict.fromkeys(SHAPE) | {"start": out}
    call.refuses(flags(**changes | {"context": 17}), tmp_path, "--context 17", out, "16")
    call.refuses(flags(**changes | {"start": tmp_path}), tmp_path, tmp_path, "tokenizer.json")
    begin(**changes)
    other = dict.fromkeys(SHAPE) | {"resume": True}
    call.refuses(flags(**other), tmp_path, "another start")


def test_a_teacher_is_asked_in_each_step(product, begin, tmp_path):
    """Also beside --start, and when the run goes on; the card names it."""
    _, out, _ = product
    changes = {"tokenizer": out, "teacher": out, "taught": 1.0, "dropout": 0, "dtype": "float32"}
    run = begin(**changes)
    run.train_step()
    alone = begin("alone", **changes | {"teacher": None})
    alone.train_step()
    assert run.losses[0][0] != alone.losses[0][0] and run.losses[0][1:] == alone.losses[0][1:]
    run.save()
    moved = shutil.copytree(out, tmp_path / "elsewhere" / out.name)
    assert begin(resume=True, **changes | {"teacher": moved}).step == 1
    with pytest.raises(ValueError, match="another teacher"):
        begin(resume=True, **changes | {"teacher": None})
    assert f"100% of the final loss imitates {out.name}" in card.card(run, {}, "", "")
    begin("further", **dict.fromkeys(SHAPE) | {"start": out, "teacher": out}).train_step()


def test_a_teacher_has_the_same_tokenizer(product, call, flags, tmp_path):
    _, out, _ = product
    call.refuses(flags(teacher=out, vocab=290), tmp_path, out, "another tokenizer", "--tokenizer")
    call.refuses(flags(tokenizer=out, teacher=out, context=17), tmp_path, "--context 17", out, "16")
    call.refuses(flags(teacher=tmp_path), tmp_path, tmp_path, "config.json")


@pytest.mark.parametrize("case", WRONG)
def test_wrong_flags_are_refused(case, call, flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changes, words = WRONG[case]
    call.refuses(flags(**changes), tmp_path, *words)


def test_a_prompt_leaves_room_for_one_token(begin, call, flags, tmp_path):
    call.refuses(flags(prompt="z" * 15), tmp_path, "--prompt")   # with the begin-of-text id 16 tokens
    run = begin(prompt="z" * 14)
    assert train.sample(run).startswith("z" * 14)


@pytest.mark.parametrize("content, words", [
    (b"", ["no text"]), (b"\n \n".replace(b" ", b""), ["no text"]),
    (f"{corpus.BOUNDARY}\n{corpus.BOUNDARY}{corpus.BOUNDARY}\n\n".encode(), ["no text"]),
    (b"Lily saw \xff the cat", ["UTF-8", "0xff"]), (b"Lily saw the cat.", ["too few"])],
    ids=["empty", "newlines", "separators", "not utf-8", "short"])
def test_files_without_usable_text_are_refused(content, words, call, flags, texts, tmp_path):
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    call.refuses(flags(data=[texts / "a.txt", path]), tmp_path, "bad.txt", *words)
    call.refuses(flags(valid=[path]), tmp_path, "bad.txt", *words)


def test_a_tokenizer_must_know_the_separator(call, flags, tmp_path):
    (tmp_path / "t").mkdir()
    expected.byte_tokenizer().save(str(tmp_path / "t" / "tokenizer.json"))
    call.refuses(flags(tokenizer=tmp_path / "t"), tmp_path, corpus.BOUNDARY)
    (tmp_path / "t" / "tokenizer.json").write_text("{")
    call.refuses(flags(tokenizer=tmp_path / "t"), tmp_path, "tokenizer.json")


def test_both_runs_of_a_twin_are_checked_before_either_starts(begin, call, flags, tmp_path):
    begin("out/plain")
    status, _, err = call(*flags(twin=tmp_path / "twin.json"))
    assert status == 2 and "plain" in err and "--resume" in err
    assert state(tmp_path / "out" / "recipe")[0]["step"] == 0, "hours were spent before"


OTHER = {"vocab": 290, "family": "gemma2", "layers": 2, "dim": 16, "heads": 2, "kv_heads": 4, "head_dim": 10,
         "hidden": 40, "context": 12, "window": 6, "dropout": 0.2, "exit_weight": 0.5, "distil": 0.1,
         "taught": 0.1, "shallow": 0.1, "shallow_end": 0.9, "curriculum": 0.1, "tokens": 641, "batch": 5,
         "lr": 0.1, "muon_lr": 0.1, "warmup": 4, "decay": 0.1, "clip": 2, "seed": 1}


def test_another_setting_cannot_go_on_with_a_run(begin, call, flags, tmp_path):
    """Every setting is either free or tested here."""
    rest = vars(train.parse(["--out", "x"])).keys() - train.MAY_CHANGE - OTHER.keys()
    assert rest == {"data", "start", "teacher"}
    begin()
    for flag, value in OTHER.items():
        words = f"another {flag} (", f"now {value}", "--out"
        call.refuses(flags(resume=True, **{flag: value}), tmp_path, *words)


def test_another_text_cannot_go_on_with_a_run(begin, call, flags, texts, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text((texts / f"{name}.txt").read_text())
    data = [tmp_path / "a.txt", tmp_path / "b.txt"]
    begin(data=data)
    again = flags(resume=True, data=data)
    call.refuses(flags(resume=True, data=data[::-1]), tmp_path, "another data")
    call.refuses(flags(resume=True, data=[data[0], f"{data[1]}=3"]), tmp_path, "another data")
    data[1].write_text(story(8, 20))
    call.refuses(again, tmp_path, "another text")
    data[1].unlink()
    call.refuses(again, tmp_path, "b.txt", "no such file")


def test_a_damaged_checkpoint_is_refused(begin, call, flags, tmp_path):
    path = Path(begin().a.out) / train.STATE
    whole, (facts, tensors) = path.read_bytes(), state(path.parent)
    for damaged in (b"", b"x", whole[:7], whole[:100], whole[: len(whole) // 2], whole[:-1], whole + b"x",
                    bytes(8) + whole[8:], b"\xff" * 100, whole.replace(b"model.tok", b"model.kot"),
                    whole.replace(b'\\"step', b'\\"stop'), whole.replace(b'\\"settings', b'\\"sittengs'),
                    whole.replace(b'\\"tokenizer', b'\\"tokeniser'), whole.replace(b'\\"evals', b'\\"avels')):
        assert damaged != whole
        path.write_bytes(damaged)
        call.refuses(flags(resume=True), tmp_path, path, "damaged")
    for run in (None, "", "[]", "{}", "null", json.dumps(facts | {"tokenizer": "{}"}),
                json.dumps(facts | {"settings": 3})):
        save_file(tensors, path, metadata=None if run is None else {"run": run})
        call.refuses(flags(resume=True), tmp_path, path, "damaged")
    save_file(tensors | {"model.norm.weight": torch.ones(33)}, path, metadata={"run": json.dumps(facts)})
    call.refuses(flags(resume=True), tmp_path, path, "damaged")


# --- what stands there in the end


def test_the_model_is_written_in_bfloat16(product):
    family, out, argv = product
    m, t = checkpoint.load(out, "cpu")
    assert m.tok.dtype == torch.bfloat16
    assert (m.c.post_norm, m.c.window) == ((True, 5) if family == "gemma2" else (False, None))
    assert (m.c.n_layers, m.c.dim, m.c.max_len, m.c.tied) == (3, 32, 16, True)
    assert (m.c.bos, m.c.eos, m.c.vocab_size) == (0, (0,), t.get_vocab_size())
    run = train.open_run(train.parse([*argv, "--resume"]))
    for name, p in run.model.named_parameters():
        assert torch.equal(m.get_parameter(name), p.bfloat16()), f"{name} is not what was trained"


def test_writing_the_model_leaves_the_run_alone(begin):
    run = begin()
    before = [p.clone() for p in run.model.parameters()]
    train.finish(run)
    for p, q in zip(run.model.parameters(), before, strict=True):
        assert p.dtype == torch.float32 and torch.equal(p, q)


@pytest.mark.parametrize("given, want", [
    ("--out x", "--out x"),
    ("--out a.0 --data t/train/a.txt=0.5 t/train/b.txt --valid t/valid/a.txt",
     "--out a.0 --data DATA/train/a.txt=0.5 DATA/train/b.txt --valid DATA/valid/a.txt"),
    ("--out x --data t/../t/a.txt=2", "--out x --data DATA/a.txt=2"),
    ("--out x --data t/a/b=1 t/c=4/d=2", "--out x --data DATA/a/b=1 DATA/c=4/d=2"),
    ("--out x --tokens 12e6 --lr 1e-4 --seed 12345678901 --exit-weight 0 --minutes 1.5",
     "--out x --exit-weight 0 --tokens 12000000 --minutes 1.5 --lr 0.0001 --seed 12345678901"),
    ("--out x --prompt 'Once, I' --resume --every 1 --device cpu --about me", "--out x --prompt 'Once, I'")])
def test_commands_by_hand(given, want):
    assert train.repeat(train.parse(shlex.split(given))) == want


def test_a_card_repeats_its_run(product, texts):
    _, out, argv = product
    card = (out / "README.md").read_text()
    line = card.split("| command | `python train.py ")[1].split("`")[0]
    assert "DATA/a.txt=2" in line and "DATA/v/v.txt" in line and str(texts) not in line
    again = vars(train.parse(shlex.split(line.replace("DATA", str(texts)))))
    for key, value in vars(train.parse(argv)).items():
        assert again[key] == value or key in ("every", "device", "about"), f"--{key} is lost"


def test_a_card_holds_what_was_measured(product, texts):
    family, out, argv = product
    card = (out / "README.md").read_text()
    m, _ = checkpoint.load(out, "cpu", torch.float32)
    v = train.open_run(train.parse([*argv, "--resume"])).text.valid["v.txt"]
    table = train.evaluate(m, v, 16, 32768)
    for kind, values in (table | {"speedup": [*train.speedups(m.c, table["agreement"]), None]}).items():
        cells = " | ".join("" if x is None else f"{x:.2f}" for x in values)
        assert f"\n| {kind}, v | {cells} |\n" in card, kind
    assert card.startswith(f"# {family}\n")
    assert "| exit after block | 1 | 2 | 3 |\n|---|---|---|---|\n" in card
    assert f"Greedy sample: \"{train.sample(train.open_run(train.parse([*argv, '--resume'])))}\"" in card
    assert "| data | Tales |" in card and "![Loss, exits, speed-up](training.png)" in card
    assert image.imread(out / "training.png").std() > 0.05
    assert ("window 5 on even layers" in card) == (family == "gemma2")
    assert f"{sum(p.numel() for p in m.parameters()) / 1e6:.1f} M-parameter" in card
    assert all(row.count("|") == 3 for row in card.split("|---|---|\n")[1].split("\n\n")[0].splitlines())


def test_the_sample_begins_with_the_prompt_and_keeps_to_the_context(begin):
    run = begin(prompt="Lily saw")
    assert train.sample(run).startswith("Lily saw")
    ids = checkpoint.encode(run.text.tokenizer, train.sample(begin("b", prompt="Tom took the cat. Tom")), 0)
    assert len(ids) <= 16


def test_a_twin_writes_both_tables(call, flags, texts, tmp_path):
    argv = flags(twin=tmp_path / "out" / "twin.json", valid=[texts / "v" / "v.txt"])
    assert call(*argv)[0] == 0
    file = tmp_path / "out" / "twin.json"
    got = json.loads(file.read_text())
    assert got.keys() == {"command", "recipe", "plain"} and "--twin" in got["command"]
    for name in ("recipe", "plain"):
        m, _ = checkpoint.load(tmp_path / "out" / name, "cpu", torch.float32)
        assert got[name]["tokens"] == 640
        assert got[name]["parameters"] == sum(p.numel() for p in m.parameters())
        table = got[name]["files"]["v.txt"]
        lengths = {kind: len(values) for kind, values in table.items()}
        assert lengths == {"loss": 3, "agreement": 3, "speedup": 2}
        assert table["speedup"] == train.speedups(m.c, table["agreement"])
    settings = [state(tmp_path / "out" / name)[0]["settings"] for name in ("recipe", "plain")]
    assert {k for k in settings[0] if settings[0][k] != settings[1][k]} == {"dropout", "exit_weight"}
    assert (settings[1]["dropout"], settings[1]["exit_weight"]) == (0, 0)
    assert "plain next-token loss" in (tmp_path / "out" / "plain" / "README.md").read_text()
    before = file.read_text()
    assert call(*argv, "--resume")[0] == 0 and file.read_text() == before


def test_a_tokenizer_with_gaps(begin, tmp_path):
    """Its last id has a row, too."""
    begin("first")
    t = json.loads(state(tmp_path / "first")[0]["tokenizer"])
    last = max(t["model"]["vocab"], key=t["model"]["vocab"].get)
    t["model"]["vocab"][last] = 400
    (tmp_path / "tokenizer.json").write_text(json.dumps(t))
    run = begin(tokenizer=tmp_path)
    assert run.text.tokenizer.token_to_id(last) == 400 and run.model.c.vocab_size == 401


def test_charts_of_what_is_rare(tmp_path):
    """A single block, which has no exit before its end; steps without an exit loss; other files than once."""
    old = [{"tokens": 0, "files": {"old.txt": {"loss": [5.0]}}, "speedup": []}]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw([[5.0, None, 1]], 64, old, {"new.txt": {"loss": [4.0], "agreement": [1.0]}},
             tmp_path / "a.png")
    pixels = image.imread(tmp_path / "a.png")
    assert pixels.shape[:2] == (864, 1200) and pixels[..., :3].std() > 0.05, "it shows nothing"


# --- files are replaced as a whole


@pytest.mark.parametrize("error", [OSError("full"), checkpoint.SafetensorError("full"), None], ids=repr)
def test_a_failure_leaves_the_old_file(error, monkeypatch, tmp_path):
    """While the new one is written, or, None, when it is to take the old one's place."""
    def fail(*args):
        raise OSError("no")
    monkeypatch.setattr(os, "replace", fail)    # the one call that changes files without a moment in between
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(OSError, match="file: cannot be written.*untouched"):
        with replacing(path) as part:
            part.write_text("half of the n")
            assert path.read_text() == "old", "the old file stays until the new one is whole"
            if error:
                raise error
    assert tree(tmp_path) == {str(path): b"old"}


def test_a_new_file_takes_the_place_of_the_old_one(tmp_path):
    """And others may read it."""
    for old in (None, "old"):
        path = tmp_path / f"{old}"
        if old:
            path.write_text(old)
        with replacing(path) as part:
            assert part.parent == path.parent, "only within a folder a file can be replaced at once"
            part.touch(mode=0o600)  # as safetensors does
            part.write_text("new")
        assert path.read_text() == "new" and path.stat().st_mode & 0o777 == 0o644
    assert len(tree(tmp_path)) == 2


def test_a_file_is_on_the_disk_before_it_replaces_the_old_one(monkeypatch, tmp_path):
    seen = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, real=real: (seen.append(name), real(*args)))
    with replacing(tmp_path / "file") as part:
        part.write_text("new")
    assert seen == ["fsync", "replace"], "after a power cut there may be neither"


def test_a_lock_ends_with_its_process(tmp_path):
    held = files.lock(tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path}: another process"):
        files.lock(tmp_path)
    held.close()
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        held = files.lock(tmp_path)
        os.write(sink, b"locked")
        signal.pause()
    assert os.read(source, 6) == b"locked"
    with pytest.raises(ValueError, match="another process"):
        files.lock(tmp_path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    files.lock(tmp_path).close()


def test_what_is_reported_while_training(begin):
    run = begin()
    run.evals = [{"files": {"a.txt": {"loss": [2.0, 1.5], "agreement": [0.625, 1.0]}}}]
    assert list(run.lines()) == ["a.txt: loss by exit 2.00 1.50; agreement 0.62 1.00", train.sample(run)]
