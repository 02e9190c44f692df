"""What runs on CUDA, on a GPU of paper: the CPU's numbers, and no wait that is not known."""
import expected
import pytest
import torch
from paper_gpu import PaperGPU
from tiny import FAMILIES, LLAMA, PROMPTS, make

import checkpoint
from control import AdaptiveExit, Confidence
from lab.bench import counts
from layerskip import SelfDraft
from methods.then import Then
from sampling import Coins, to_probs
from speculative import ModelDraft, NGram, Rule, State, rounds

DRAFTERS = {
    "plain": lambda m, small: None,
    "n-gram, then model": lambda m, small: Then(NGram(2, 1), ModelDraft(small, 2)),
    "model, confidence": lambda m, small: ModelDraft(small, Confidence(0.3, 4)),
    "exit, adaptive exit": lambda m, small: SelfDraft(m, range(8), AdaptiveExit(0.3, gamma=4))}


@pytest.fixture
def gpu():
    with PaperGPU() as gpu:
        yield gpu


def calls(gpu):
    """What the host has waited for since this was last called, such as ["item"]."""
    waits, gpu.waits = gpu.waits, []
    return [wait.split()[-1] for wait in waits]


@pytest.mark.parametrize("waits, action", [
    (["item"], lambda y: y[0].item()),
    (["to"], lambda y: torch.ones(3).to("cuda", non_blocking=True)),
    (["__getitem__"], lambda y: y[y > 0]), (["__getitem__"], lambda y: y[[0, 1]]),
    ([], lambda y: torch.ones(3).pin_memory().to("cuda", non_blocking=True)),
    ([], lambda y: y[1:].sum() + y.shape[0])])
def test_what_waits_and_what_is_no_mix_of_devices(gpu, waits, action):
    y = torch.ones(3, device="cuda")
    action(y)
    assert calls(gpu) == waits and y.is_cuda and make(LLAMA, device="cuda").tok.is_cuda
    with pytest.raises(RuntimeError, match="must be on one device"):
        y + torch.ones(3)


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
    texts = {}
    warm = lambda logits: to_probs(logits, 0.8)  # noqa: E731
    for device in ("cpu", "cuda"):
        m, small = (make(FAMILIES[family], device=device) for _ in range(2))
        drafter, left, texts[device] = DRAFTERS[name](m, small), 9, []
        calls(gpu)
        known = ["tensor", "tensor", "tolist"]  # prompts, lengths; are the logits finite?
        for state, r in rounds(m, PROMPTS[:rows], left, drafter, warm, Coins(3)):
            texts[device].append(r.new)
            known += known_waits(drafter, r, left)
            left = max(state.left_cpu)
        assert calls(gpu) == (known if device == "cuda" else [])
    assert texts["cuda"] == texts["cpu"]


@pytest.mark.parametrize("lengths, offsets, want", [
    ([255], (3, 4), (257, 258)), ([100, 7, 9], (0, 2), (6, 101)), ([100, 2], (-3, 1), (0, 100)),
    ([1090, 1097], (0, 8), (1089, 1100))])
def test_the_span_of_a_block_is_that_of_all_rows(gpu, lengths, offsets, want):
    n, known = torch.tensor(lengths, device="cuda"), [[0] * length for length in lengths]
    state = State(torch.zeros(len(n), 1100, device="cuda"), n, n, *5 * [None], known, [9], None)
    calls(gpu)
    at = state.at(*offsets)
    assert (at.first, at.end) == want and not {"item", "tolist", "_local_scalar_dense"} & set(calls(gpu))


def test_a_checkpoint_is_loaded_straight_onto_the_gpu(gpu, tmp_path):
    checkpoint.save(make(LLAMA).float(), tmp_path, expected.byte_tokenizer())
    calls(gpu)
    m, _ = checkpoint.load(tmp_path)
    assert calls(gpu) == ["copy_" for _ in checkpoint.parts(m)], "each tensor, into its final place"
    assert all(t.is_cuda for t in (*m.parameters(), m.scale))


def test_one_wait_a_round_and_few_operations(monkeypatch):
    some = "plain", "exit", "model", "exit, then n-gram of 2", "exit, do no harm", "exit, stop rule"
    monkeypatch.setattr(counts, "DRAFTERS", {name: counts.DRAFTERS[name] for name in some})
    found = counts.counts.__wrapped__()
    waits = {name: (row["round"]["waits"], row["token"]["waits"]) for name, row in found.items()}
    assert waits == dict.fromkeys(some, (1, 0)) | {
        "exit, then n-gram of 2": (2, 0), "exit, stop rule": (2, 1)}, "none after the last draft"
    plain, step = found["plain"]["round"], found["exit"]["token"]
    assert plain["cpu"] <= 28 and step["cpu"] <= 12 and plain["cuda"] <= 49 and step["cuda"] <= 26
    assert found["exit, do no harm"] == found["exit"]
