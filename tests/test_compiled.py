"""Passes compiled for the CPU, of one block so small that its programs are made in seconds. That is most of
what these tests take, and so they share four of them."""
from dataclasses import replace

import pytest
import torch
from tiny import GEMMA, LLAMA, PROMPTS, make

from kvcache import KVCache
from layerskip import SelfDraft
from machine.recorded import Recorded
from speculative import NGram, generate, rounds


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compiled")
    quick = torch._inductor.config.patch({"aot_inductor.compile_wrapper_opt_level": "O0"})
    with pytest.MonkeyPatch.context() as patch, quick:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def model():
    return make(replace(LLAMA, n_layers=1)).to(torch.bfloat16)


def write(model, drafter=None, prompt=PROMPTS[0], count=20):
    """(text, logits (count, V)) of one answer."""
    seen = [(r.new[0], r.logits[0, : len(r.new[0])]) for _, r in rounds(model, [prompt], count, drafter)]
    return sum((new for new, _ in seen), []), torch.cat([logits for _, logits in seen])


@pytest.fixture(scope="module")
def programs(folder, model):
    """The folder with what plain decoding needs, also where the first test runs in another process."""
    write(Recorded(model, widths=(4,), exact=True, say=lambda line: None))
    return folder


def test_plain_and_speculative_decoding_are_the_same_bit_for_bit(folder, model):
    """In bfloat16, where a block of another width, or a pass in two parts, is as a rule rounded otherwise.
    The draft is the first sub-layer, and the verification goes on where it ended."""
    said = []

    def say(line):
        said.append(line)
        assert "compiling, which takes a minute" in line

    fast = Recorded(model, widths=(4,), exact=True, say=say)
    text, logits = write(fast)
    for drafter in (NGram(3, 1), SelfDraft(fast, range(1), 3)):
        drafted, same = write(fast, drafter)
        assert drafted == text and torch.equal(same, logits)
    names = "2 sub-layers", "the head", "1 sub-layers", "1 sub-layers"
    assert (sorted(line.split(":")[0] for line in said)
            == sorted(f"{name}, batch 1, blocks of 4" for name in names))
    assert (logits - write(model)[1]).abs().max() < 0.05 * logits.abs().max()


def test_later_starts_compile_nothing_and_any_cache_will_do(programs, model):
    """Weights of the same shape need no other program, nor do longer texts."""
    def wrong(line):
        raise AssertionError(line)

    other = make(replace(LLAMA, n_layers=1), seed=3).to(torch.bfloat16)
    fast = Recorded(other, widths=(4,), exact=True, say=wrong)
    (text, logits), (want, eager) = (write(m, None, PROMPTS[0] * 3, 30) for m in (fast, other))
    same = next((i for i, (a, b) in enumerate(zip(text, want, strict=True)) if a != b), 30)
    assert (logits - eager)[: same + 1].abs().max() < 0.05 * eager.abs().max() and same > 3
    for w in other.parameters():
        w.data.mul_(0.5)
    halved = write(fast)[1]
    assert not torch.equal(halved, logits[:20]), "the weights are read where they lie"


@torch.inference_mode()
def test_one_program_reads_any_window(folder):
    """It is written while all of a text lies in the window of 5, and reads the last slots of a longer one."""
    model, said = make(replace(GEMMA, n_layers=1)), []
    fast = Recorded(model, widths=(1,), folder=folder / "window", say=said.append)
    states, caches = torch.randn(60, 1, 1, 32).double(), [KVCache(GEMMA, 1, 60, torch.float64) for _ in "ab"]
    for at, x in enumerate(states):
        got, want = (m.run(x, slice(at, at + 1), cache, [0])
                     for m, cache in zip((fast, model), caches, strict=True))
        assert (got - want).abs().max() < 1e-9, at
    assert len(said) == 1 and "compiling" in said[0] and any(fast.tapes[fast].values())


@torch.inference_mode()
def test_one_program_reads_a_part_of_any_cache(folder):
    """It is written where all of a cache of 16 slots is read."""
    model, said = make(replace(LLAMA, n_layers=1)), []
    fast = Recorded(model, widths=(1,), folder=folder / "part", say=said.append)
    states = torch.randn(32, 1, 1, 32).double()
    short, *caches = [KVCache(LLAMA, 1, slots, torch.float64) for slots in (16, 40, 40)]
    for t in (caches[0].k, caches[0].v, caches[1].k, caches[1].v):  # what lies in a wrong place is not 0
        t.copy_(torch.ones_like(t).cumsum(-2))
    for x in states[:2]:
        fast.run(x, slice(1, 2), short, [0])
    for at, x in enumerate(states):
        got, want = (m.run(x, slice(at, at + 1), cache, [0])
                     for m, cache in zip((fast, model), caches, strict=True))
        assert (got - want).abs().max() < 1e-9, at
    assert len(said) == 1 and "compiling" in said[0] and any(fast.tapes[fast].values())


def test_a_damaged_program_is_not_run(programs, model, tmp_path):
    said = []
    fast = Recorded(model, widths=(4,), exact=True, folder=tmp_path, say=said.append)
    for path in (programs / "self-speculative-decoding").glob("*.pt2"):
        (tmp_path / path.name).write_bytes(path.read_bytes()[:-2000])
    assert generate(fast, [PROMPTS[0]], 8) == generate(model, [PROMPTS[0]], 8)
    assert len(said) == 2 and all(": not recorded, because of RuntimeError" in line for line in said)


def test_without_a_compiler_one_line_says_so(model, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    said = []
    fast = Recorded(model, folder=tmp_path, say=said.append)
    assert generate(fast, PROMPTS, 8, NGram(3, 1)) == generate(model, PROMPTS, 8, NGram(3, 1))
    assert said == ["no C++ compiler is found, so all runs eagerly: install g++ or clang, or name it in CXX"]


@pytest.mark.parametrize("how, device, message", [
    ("graph", "cpu", "passes on cpu cannot be recorded by 'graph'"),
    ("compile", "cuda", "passes on cuda cannot be recorded by 'compile'"),
    ("tape", "cpu", "passes on cpu cannot be recorded by 'tape'")])
def test_what_does_not_suit_the_device_is_refused(model, how, device, message):
    with pytest.raises(ValueError, match=message):
        Recorded(make(LLAMA, device=device), how)


@pytest.mark.parametrize("widths", [(0, 4), (16,)])
def test_widths_beyond_the_spare_slots_are_refused(model, widths):
    with pytest.raises(ValueError, match="widths must lie between 1 and 9, got"):
        Recorded(model, widths=widths)
