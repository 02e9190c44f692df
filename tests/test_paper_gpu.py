"""What runs on CUDA has the CPU's numbers on a simulated GPU,
and waits nowhere else than is known."""
import expected
import promises
import pytest
import torch
from paper_gpu import PaperGPU
from tiny import LLAMA, make, small

import checkpoint
from control import Confidence
from drafter import ModelDraft
from lab.save import save
from lab.then import Then
from layerskip import SelfDraft
from machine.quant import quantise
from methods.lookup import NGram
from speculative import State

test_one_wait_a_round = promises.one_wait_a_round({
    "plain": lambda m: None,
    "n-gram, then model": lambda m: Then(NGram(2, 1), ModelDraft(small(m), 2)),
    "exit, confidence": lambda m: SelfDraft(m, range(8), Confidence(0.3, 4)),
    "int8": lambda m: SelfDraft(quantise(m), range(12), 2),
    "int4": lambda m: SelfDraft(quantise(m, "int4"), range(12), 2)},
    extra={"n-gram, then model": 1, "exit, confidence": 4})


@pytest.fixture
def gpu():
    with PaperGPU() as gpu:
        yield gpu


def calls(gpu):
    """What the host has waited for since this was last called, such as ["item"]."""
    waits, gpu.waits = gpu.waits, []
    return [wait.split()[-1] for wait in waits]


@pytest.mark.parametrize("lengths, offsets, want", [
    ([255], (3, 4), (257, 258)), ([100, 7, 9], (0, 2), (6, 101)), ([100, 2], (-3, 1), (0, 100)),
    ([1090, 1097], (0, 8), (1089, 1100))])
def test_the_span_of_a_block_is_that_of_all_rows(gpu, lengths, offsets, want):
    n, known = torch.tensor(lengths, device="cuda"), [[0] * length for length in lengths]
    state = State(torch.zeros(len(n), 1100, device="cuda"), n, known, [9], *5 * [None])
    calls(gpu)
    at = state.span(*offsets)
    assert (at.first, at.end) == want
    assert not {"item", "tolist", "_local_scalar_dense"} & set(calls(gpu))


def test_a_checkpoint_is_loaded_straight_onto_the_gpu(gpu, tmp_path):
    save(make(LLAMA).float(), tmp_path, expected.byte_tokenizer())
    calls(gpu)
    m, _ = checkpoint.load(tmp_path)
    assert calls(gpu) == ["copy_" for _ in checkpoint.parts(m)], "each tensor, into its final place"
    assert all(t.is_cuda for t in m.parameters())
