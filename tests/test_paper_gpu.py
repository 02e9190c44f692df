"""What runs on CUDA, on a GPU of paper: the CPU's numbers, no mix of devices, and no wait that is not known.

One thing to remember: these tests hold the list of every wait in a run. A new one makes them fail.
"""
import copy
from functools import partial
from types import SimpleNamespace

import expected
import pytest
import torch
import torch.nn.functional as F
from paper_gpu import PaperGPU
from tiny import FAMILIES, LLAMA, PROMPTS, make

import checkpoint
import train
from benchmarks import counts
from control import AdaptiveExit, Confidence, DoNoHarm, Gate, Schedule, ValueGate
from layerskip import SelfDraft, Teacher, without
from sampling import Coins, to_probs
from speculative import ModelDraft, NGram, Rule, State, Then, rounds
from support import cli

families = pytest.mark.parametrize("family", FAMILIES)
RULES = {
    "constant": lambda: 3,
    "schedule": lambda: Schedule(2),
    "gate": lambda: Gate(3, 0.2),
    "value gate": lambda: ValueGate(0.2, 4),
    "do no harm": lambda: DoNoHarm(0.2, 4),
    "confidence": lambda: Confidence(0.3, 4),
    "adaptive exit": lambda: AdaptiveExit(0.3, gamma=4),
}
DRAFTERS = {"plain": lambda m, small: None,
            "skip": lambda m, small: SelfDraft(m, without(6, attn=[1, 4], mlp=[2]), 3),
            "skip first": lambda m, small: SelfDraft(m, range(1, 12), 2),
            "n-gram": lambda m, small: NGram(4, 1),
            "n-gram, do no harm": lambda m, small: NGram(DoNoHarm(0.01, 4), 1),
            "other blocks": lambda m, small: SelfDraft(small, range(4), 3),
            "exit, then n-gram": lambda m, small: Then(SelfDraft(m, range(8), 2), NGram(3, 1)),
            "n-gram, then model": lambda m, small: Then(NGram(2, 1), ModelDraft(small, 2))}
for name, rule in RULES.items():
    DRAFTERS[f"exit, {name}"] = lambda m, small, rule=rule: SelfDraft(m, range(8), rule())
    DRAFTERS[f"model, {name}"] = lambda m, small, rule=rule: ModelDraft(small, rule())


@pytest.fixture
def gpu():
    with PaperGPU() as gpu:
        yield gpu


def calls(gpu):
    """What the host waited for since the last time it was asked, such as ["item"]."""
    waits, gpu.waits = gpu.waits, []
    return [wait.split()[-1] for wait in waits]


def same(model, other):
    return all(torch.equal(p.cpu(), q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("lengths, offsets, want", [
    ([100], (0, 1), (99, 100)), ([100], (0, 4), (99, 103)), ([255], (3, 4), (257, 258)),
    ([100, 7, 9], (0, 2), (6, 101)), ([100, 7], (-3, 1), (3, 100)), ([100, 2], (-3, 1), (0, 100)),
    ([1090, 1097], (0, 8), (1089, 1100))])
def test_the_span_of_a_block_is_that_of_all_rows(gpu, lengths, offsets, want):
    n = torch.tensor(lengths, device="cuda")
    state = State(torch.zeros(len(lengths), 1100, device="cuda"), n, n, *5 * [None],
                  [[0] * length for length in lengths], [9])
    gpu.waits = []
    assert state.span(*offsets) == slice(*want) and not gpu.waits


# --- the paper GPU itself


def test_it_says_cuda_and_computes_what_the_cpu_does(gpu):
    x = torch.arange(6.0).view(2, 3)
    y = x.to("cuda")
    assert y.is_cuda and not y.is_cpu and y.device == torch.device("cuda:0") and not x.is_cuda
    z = F.rms_norm(y @ y.mT + 1, (2,)).softmax(-1)
    assert z.is_cuda and torch.zeros(3, device="cuda").is_cuda and torch.zeros_like(y).is_cuda
    assert z.tolist() == F.rms_norm(x @ x.mT + 1, (2,)).softmax(-1).tolist()
    assert all(t.is_cuda for t in (*y.unbind(), *y.sort(), y[0], y.T, y.new_zeros(2), y.to(torch.float64)))
    assert not z.cpu().is_cuda and not z.to("cpu").is_cuda and not torch.empty_like(y, device="cpu").is_cuda


def test_a_copy_has_memory_of_its_own(gpu):
    x = torch.zeros(2)
    y = x.to("cuda")
    back = y.cpu()
    y += 1
    assert (x.tolist(), y.tolist(), back.tolist()) == ([0, 0], [1, 1], [0, 0])
    assert y.to("cuda") is y and y[:1].data_ptr() == y.data_ptr()


def test_modules_move_with_their_parameters(gpu):
    want, m = make(LLAMA), make(LLAMA, device="cuda")
    assert all(isinstance(p, torch.nn.Parameter) and p.is_cuda for p in m.parameters())
    assert len(list(m.parameters())) == len(list(want.parameters())) and m.scale.is_cuda and same(m, want)
    back = copy.deepcopy(m).to("cpu")
    assert m.tok.is_cuda and not back.scale.is_cuda and not any(p.is_cuda for p in back.parameters())
    assert same(back, want)


@pytest.mark.parametrize("mix", [
    lambda x, y: x + y, lambda x, y: y.mul_(x), lambda x, y: torch.cat([x, y]), lambda x, y: F.linear(x, y),
    lambda x, y: y[torch.tensor([0])], lambda x, y: y.gather(1, torch.zeros(3, 1).long()),
    lambda x, y: y.__setitem__(0, x[0])])
def test_a_mix_of_devices_is_an_error(gpu, mix):
    x = torch.ones(3, 3)
    mix(x, x.clone())
    with pytest.raises(RuntimeError, match="must be on one device"):
        mix(x, x.to("cuda"))


def test_single_numbers_may_come_from_the_cpu_and_arrays_only_from_there(gpu):
    y = torch.ones(3, device="cuda")
    assert cli.machine(y.device) == "a GPU on paper"
    assert (y * torch.tensor(2.0)).tolist() == [2, 2, 2]
    with pytest.raises(TypeError, match="cannot become an array"):
        y.numpy()


@pytest.mark.parametrize("waits, action", [
    (["item"], lambda y: y[0].item()), (["__bool__"], lambda y: bool(y[0])),
    (["__int__"], lambda y: int(y[0])), (["tolist"], lambda y: y.tolist()),
    (["cpu"], lambda y: y.cpu()), (["to"], lambda y: y.to("cpu")),
    (["to"], lambda y: y.to("cpu", non_blocking=True)), (["nonzero"], lambda y: y.nonzero()),
    (["equal"], lambda y: torch.equal(y, y)), (["__getitem__"], lambda y: y[y > 0]),
    (["__getitem__"], lambda y: y[[0, 1]]), (["tensor"], lambda y: torch.tensor([1], device="cuda")),
    (["copy_"], lambda y: y.copy_(torch.ones(3))), (["to"], lambda y: torch.ones(3).to("cuda")),
    (["to"], lambda y: torch.ones(3).to("cuda", non_blocking=True)),
    (["to"], lambda y: torch.ones(3).pin_memory().to("cuda")), (["to"], lambda y: torch.ones(3).to(y)),
    (["synchronize"], lambda y: torch.cuda.synchronize()),
    ([], lambda y: torch.ones(3).pin_memory().to("cuda", non_blocking=True)),
    ([], lambda y: torch.ones(3).tolist()), ([], lambda y: y.to("cuda")), ([], lambda y: y.copy_(y + 1)),
    ([], lambda y: y[1:].sum() + y.shape[0] + len(y)), ([], lambda y: y.masked_fill_(y > 0, 2.0))])
def test_what_waits(gpu, waits, action):
    y = torch.ones(3, device="cuda")
    action(y)
    assert calls(gpu) == waits
    torch.cuda.set_sync_debug_mode("error")     # and as torch does on a real GPU
    if waits:
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
            action(y)
    else:
        action(y)


def test_a_wait_says_where(gpu):
    torch.ones(1, device="cuda").item()
    (wait,) = gpu.waits
    assert wait.startswith("test_paper_gpu.py:") and wait.endswith(" item")


@pytest.mark.parametrize("count, action", [
    (0, lambda y: (y[0], y.mT, y.unbind(), y.to(y.dtype), y.shape, y.reshape(9), y.expand(2, 3, 3))),
    (1, lambda y: y.mT.reshape(9)), (1, lambda y: y.add_(1)), (1, lambda y: y.__setitem__(0, 1.0)),
    (1, lambda y: y.clone()), (1, lambda y: y.copy_(y)), (2, lambda y: (y + 1).mul_(2)),
    (1, lambda y: y.sort()), (1, lambda y: y.cpu())])
def test_views_are_no_operations(gpu, count, action):
    y = torch.ones(3, 3, device="cuda")
    before = dict(gpu.operations)
    action(y)
    assert gpu.operations == before | {"cuda": before["cuda"] + count}


def test_afterwards_all_is_as_before():
    before = torch.cuda.is_available, torch.autocast
    with PaperGPU() as gpu:
        y = torch.ones(2, device="cuda")
    assert before == (torch.cuda.is_available, torch.autocast) and not y.is_cuda
    assert not torch.__future__.get_overwrite_module_params_on_conversion()
    y.tolist()
    assert not gpu.waits


# --- loading, drafting, scoring, training


@families
def test_a_checkpoint_is_loaded_straight_onto_the_gpu(gpu, family, tmp_path):
    checkpoint.save(make(FAMILIES[family]).float(), tmp_path, expected.byte_tokenizer())
    want, _ = checkpoint.load(tmp_path, "cpu")
    calls(gpu)
    got, _ = checkpoint.load(tmp_path)
    assert calls(gpu) == ["copy_" for _ in checkpoint.parts(got)], "one copy a tensor, into its final place"
    assert got.tok.is_cuda and got.scale.is_cuda and same(got, want)


def forbid_waits(gpu, model):
    """From now on a wait inside `run` is an error."""
    run = model.run

    def strict(*args, **more):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return run(*args, **more)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    model.run = strict
    return model


def known_waits(drafter, r, left):
    """What the host waits for in a round, where the longest row may still emit `left` tokens."""
    if isinstance(drafter, Then):   # the tail looks up on the host what follows the head's tokens
        yield "tolist"
    if getattr(drafter, "rule", Rule(0)).stop:  # does any row go on? Not asked where none may
        drawn, most = r.draft.tokens.shape[1], min(drafter.rule.most, left - 1)
        yield from ["__bool__"] * (drawn - (drawn == most))
    yield "tolist"                  # how many were accepted, and what comes after them


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("family, rows", [("llama", 1), ("gemma2", 4)])
def test_the_text_of_the_cpu_and_only_known_waits(gpu, family, rows, name):
    warm, texts = partial(to_probs, temperature=0.8, top_p=0.95), {}
    for device in ("cpu", "cuda"):
        m, small = (forbid_waits(gpu, make(FAMILIES[family], device=device)) for _ in range(2))
        drafter, left, texts[device] = DRAFTERS[name](m, small), 9, []
        calls(gpu)
        known = ["tensor", "tensor"]    # the prompts and their lengths, once
        for state, r in rounds(m, PROMPTS[:rows], left, drafter, warm, Coins(3)):
            texts[device].append(r.new)
            known += known_waits(drafter, r, left)
            left = max(state.left_cpu)
        assert calls(gpu) == (known if device == "cuda" else [])
    assert texts["cuda"] == texts["cpu"]


@families
def test_a_text_is_scored_as_on_the_cpu(gpu, family):
    on_cpu, on_gpu = (forbid_waits(gpu, make(FAMILIES[family], device=device)) for device in ("cpu", "cuda"))
    for subs in (range(8), [0, 1, 3, 4, 8], [2]):
        want = Teacher(on_cpu, PROMPTS[0]).acceptance(subs)
        got = Teacher(on_gpu, PROMPTS[0]).acceptance(subs)
        assert torch.equal(got, want) and not got.is_cuda


@families
def test_steps_of_training_end_in_the_weights_of_the_cpu(gpu, family):
    flags = ("--layers 3 --dim 32 --heads 4 --kv-heads 2 --head-dim 8 --hidden 48 --context 16 --window 5 "
             "--batch 2 --tokens 320 --curriculum 0")
    a = train.parse(["--out", "nowhere", "--family", family, *flags.split()])
    tokens = torch.randint(64, (10, 2, 17), generator=torch.Generator().manual_seed(0))
    text = SimpleNamespace(tokenizer=expected.byte_tokenizer(), hash=str,
                           batch=lambda seed, step, batch, context: tokens[step])
    runs = [train.Run(a, text, torch.device(device)) for device in ("cpu", "cuda")]
    for run in runs:
        for _ in range(3):
            run.train_step()
    assert runs[0].losses == runs[1].losses and len({loss for loss, *_ in runs[0].losses}) == 3
    assert all(p.is_cuda for p in runs[1].model.parameters()) and same(runs[1].model, runs[0].model)


# --- bench.py counts


def test_one_wait_a_round_and_few_operations():
    found = counts.counts()
    assert {name: (row["round"]["waits"], row["token"]["waits"]) for name, row in found.items()} == {
        "plain": (1, 0), "exit": (1, 0), "skip": (1, 0), "n-gram": (1, 0), "model": (1, 0),
        "exit, then n-gram of 2": (2, 0), "exit, gate": (1, 0), "exit, value gate": (1, 0),
        "exit, do no harm": (1, 0), "exit, stop rule": (2, 1)}, "nobody asks who stops after the last draft"
    plain, step = found["plain"]["round"], found["exit"]["token"]
    assert plain["cpu"] <= 28 and step["cpu"] <= 12 and plain["cuda"] <= 49 and step["cuda"] <= 26
    assert found["n-gram"]["round"]["cpu"] > plain["cpu"] + 20, "it drafted nothing"
    assert found["exit, do no harm"] == found["exit, value gate"] == found["exit, gate"] == found["exit"]
