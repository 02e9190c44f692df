"""Recorded passes write what eager ones write: the tests of the loop once more, on recordings of paper; each
way a recording can go wrong; and compiled programs, on shapes so small that they are compiled in seconds."""
import json
import math
import re
from contextlib import contextmanager
from functools import partial

import promises
import pytest
import torch
from paper_gpu import PaperGPU
from test_speculative import (  # noqa: F401  a test of the loop, on the models below
    DRAFTERS,
    RESTLESS,
    test_what_is_shared_is_handed_over_and_not_run_again,
)
from tiny import FAMILIES, LIVELY, LLAMA, PROMPTS, each_family, make

import generate as program
from kvcache import KVCache
from layerskip import SelfDraft
from machine import recorded
from machine.recorded import Recorded
from sampling import Coins, to_probs
from speculative import NGram, generate, prefill, rounds


def wrong(line):
    raise AssertionError(line)


def written(state):
    return [text[len(p) :] for text, p in zip(state.known, PROMPTS, strict=True)]


on_paper = partial(Recorded, how="paper", widths=(1, 2, 4, 8), reach=16, say=wrong)


@pytest.fixture(scope="module")
def models():
    return {family: on_paper(make(c)) for family, c in LIVELY.items()}


# --- texts


test_poison = promises.poison(RESTLESS)
test_single_rows = promises.rows_equal_solo_runs(DRAFTERS, ["exit", "skip", "model, stopped"])


@each_family
@pytest.mark.parametrize("name", DRAFTERS)
def test_batches(models, truth, family, name):
    m = models[family]
    assert generate(m, PROMPTS, 24, DRAFTERS[name](m))[0] == [row[:24] for row in truth[family]]


def test_batches_of_several_sizes(models):
    m = on_paper(models["llama"].model)
    for _ in range(2):
        for prompts in (PROMPTS, PROMPTS[:1], PROMPTS[1:3]):
            assert generate(m, prompts, 12, NGram(3, 1)) == generate(m.model, prompts, 12, NGram(3, 1))


@each_family
def test_sampled_texts_are_those_of_eager_passes(models, family):
    fast, warm = models[family], lambda logits: to_probs(logits, 1.2, top_p=0.9)
    for name in ("exit, stopped", "skip"):
        a, b = (generate(m, PROMPTS, 30, DRAFTERS[name](m), warm, Coins(7)) for m in (fast, fast.model))
        assert a == b


@each_family
def test_a_used_cache_needs_no_cleaning_and_keeps_its_recordings(models, truth, family):
    m, cache, made = on_paper(models[family].model), None, []
    for _ in range(3):
        for state, _ in rounds(m, PROMPTS, 24, SelfDraft(m, range(8), 4), cache=cache):
            cache = state.cache
        assert written(state) == [row[:24] for row in truth[family]]
        cache.k.mul_(-3)
        made.append([tape for tape in m.tapes[cache].values() if tape])
    assert len(made[1]) > 3 and made[1] == made[2]


@pytest.mark.parametrize("size", [(3, 99), (4, 10)])
def test_a_cache_of_another_size_is_refused(models, size):
    cache = KVCache(LLAMA, *size, torch.float64)
    with pytest.raises(ValueError, match=f"cache of {size[0]} rows and {size[1]} slots, but 4 and 56 are"):
        rounds(models["llama"], PROMPTS, 40, cache=cache)


# --- single passes


@each_family
@pytest.mark.parametrize("as_slice", [True, False])
@pytest.mark.parametrize("widths", [(1, 2, 4, 8), (7,)])
@torch.inference_mode()
def test_a_replayed_block_is_the_eager_one(models, family, as_slice, widths):
    """Padding neither changes what is computed nor reaches a slot that is known, also where the block ends
    with the cache or with the reach of its recording."""
    eager, S = models[family].model, 17
    m, tokens = on_paper(eager, widths=widths), torch.randint(17, (2, S))
    for T in (1, 5):
        for start in range(1, S - T + as_slice, 2 - as_slice):  # the last slot of a tensor is dead
            caches = KVCache(m.c, 2, S, torch.float64), KVCache(m.c, 2, S, torch.float64)
            here, x = slice(start, start + T), m.embed(tokens[:, start : start + T])
            at = here if as_slice else torch.arange(start, start + T).expand(2, T)
            for cache in caches:
                prefill(eager, tokens[:, :start], cache)
            want = eager.run(x, here, caches[1])
            for _ in range(2):
                got = m.run(x, at, caches[0], span=slice(start, start + T))
                assert torch.equal(got, want) or (got - want).abs().max() < 1e-9, (T, start)
            off = caches[0].k[:, :, :, : start + T] - caches[1].k[:, :, :, : start + T]
            assert off.abs().max() < 1e-9, (T, start)


def test_what_is_recorded(models):
    """Seen twice, one token through the first 4 blocks, 4 tokens through the last 2; prompts and rarities are
    not; and after `rehearse` nothing else is."""
    m, cache = on_paper(models["llama"].model, reach=64), None
    state, _ = next(rounds(m, [PROMPTS[0]], 5))
    assert set(m.tapes[state.cache].values()) == {None}
    del state
    write = lambda: [s.cache for s, _ in rounds(m, [PROMPTS[0]], 25, SelfDraft(m, range(8), 3), cache=cache)]  # noqa: E731
    cache = write()[0]
    seen = {(key[0], key[2]) for key, tape in m.tapes[cache].items() if tape}
    assert seen >= {(tuple(range(8)), 1), (tuple(range(8, 12)), 4)}
    assert all(width in (1, 2, 4) for _, width in seen)
    m.rehearse(write)
    before = dict(m.tapes[cache])
    for _ in range(3):
        for _ in rounds(m, [PROMPTS[0]], 25, SelfDraft(m, [0, 3, 5], 6), cache=cache):
            pass
    assert m.tapes[cache] == before
    assert len(m.tapes) == 2, "recordings of a cache go with it"


def test_exact_passes_have_one_width_and_one_reach(models):
    m = on_paper(models["llama"].model, exact=True)
    for state, _ in rounds(m, PROMPTS, 24, SelfDraft(m, [0, 1, 3, 4], 5)):  # noqa: B007
        pass
    tapes = m.tapes[state.cache] | m.tapes[m]
    assert all(tapes.values()) and {key[2] for key in tapes} == {8}
    assert {key[3] for key in m.tapes[state.cache]} == {state.cache.k.shape[3]}
    assert len(m.tapes[state.cache]) == 4 and len(m.tapes[m]) == 1, "whole, two parts of the draft, the rest"


def test_programs_are_kept_for_other_caches(models, monkeypatch):
    """And one serves any number of slots; here it is not compiled, but run."""
    m, made = models["gemma2"].model, []

    def make(self, name, key, f, inputs, fixed):
        made.append(key)
        return lambda inputs, fixed: f(m, *inputs, *fixed)

    monkeypatch.setattr(Recorded, "make", make)
    monkeypatch.setattr(recorded, "find_compiler", lambda: "a compiler")
    fast = Recorded(m, "compile", widths=(4,), say=wrong)
    for count in (20, 20, 40):
        assert generate(fast, PROMPTS, count, NGram(3, 1)) == generate(m, PROMPTS, count, NGram(3, 1))
    assert len(made) == len(set(made)) == 2


def test_the_oldest_recordings_are_forgotten(models, monkeypatch):
    monkeypatch.setattr(recorded, "KEEP", 3)
    m = on_paper(models["llama"].model)
    for state, _ in rounds(m, PROMPTS, 24, SelfDraft(m, range(8), 4)):  # noqa: B007
        assert all(len(tapes) <= 3 for tapes in m.tapes.values())
    assert len(m.tapes[state.cache]) == 3


def test_what_has_a_trace_or_a_tree_or_is_wide_runs_eagerly(models):
    m = on_paper(models["llama"].model)
    x, own = m.embed(torch.tensor([[1, 2, 3]])), torch.ones(3, 3, dtype=torch.bool).tril()
    for _ in range(3):
        cache = KVCache(m.c, 1, 30, torch.float64)
        for trace, tree in (({3: None}, None), (None, own)):
            y = m.run(x, slice(4, 7), cache, trace=trace, tree=tree)
            assert torch.equal(y, m.model.run(x, slice(4, 7), cache, tree=tree))
        assert trace is None and m.run(x.repeat(1, 3, 1), slice(4, 13), cache).shape == (1, 9, 32)
        assert m.run(x, slice(4, 7), cache, []) is x and m.run(x, slice(4, 7)).shape == x.shape
    assert not m.tapes


@pytest.mark.parametrize("width", [1, 8])
@pytest.mark.parametrize("how", ["compile", "paper"])
@pytest.mark.parametrize("slots", [30, 200, 203])
def test_sliding_layers_read_little(models, slots, how, width):
    """One row passes all places of its cache. It needs no more recordings than if lengths doubled, and what
    the block of its last place sees is what its recordings hold, in the window of 5, too."""
    m, W = models["gemma2"].model, 5
    fast, seen = Recorded(m, how, widths=(width,), reach=16, say=wrong), {}
    for at in range(slots - width + 1):
        cos, _, near = fast.lengths(slice(at, at + width), width, slots)
        assert at + width <= len(cos) <= slots and torch.equal(near, cos[: len(near)])
        assert len(cos) - len(near) <= max(0, at - W + 1), "the first token's window is cut"
        seen.setdefault((len(cos), len(near)), at)
    reaches = [reach for reach, _ in seen]
    if how == "paper":
        assert len(seen) == len(set(reaches)) <= 1 + math.ceil(math.log2(slots / 16))
    step = max(b - a for a, b in zip([0, *reaches], reaches, strict=False))
    assert len(near) <= W + width + step and (how == "paper" or step == 16)
    assert len(fast.lengths(slice(0, 1), width, slots)[2]) == reaches[0]


def test_rows_that_stand_far_apart(models):
    """The longest row decides how far a recording reads, and the shortest one from where."""
    m = on_paper(models["gemma2"].model, widths=(1,), reach=4)
    texts = [[[2] * 20, [3, 1] * 10], [[1, 5, 3] * 11, [2] * 31], [[1, 5, 3] * 11, [4, 8]]]
    cache = KVCache(m.c, 2, 51, torch.float64)
    for _ in range(2):
        for prompts in texts:
            assert generate(m, prompts, 10, cache=cache) == generate(m.model, prompts, 10)
    keys = {key[3:] for key, tape in m.tapes[cache].items() if tape}
    assert len({reach for reach, _ in keys}) < len(keys)


# --- recordings that are wrong


class Rounded(recorded.Tape):
    """Computes a little less exactly than the eager pass."""

    def replay(self):
        super().replay()
        self.output.copy_(self.output.float())


class Careless(recorded.Tape):
    """Right, but it writes a wrong key."""
    key = 3.0

    def replay(self):
        super().replay()
        if self.fixed:
            self.fixed[3][0, 0, 2] = self.key


class Blank(Careless):
    """Writes no number at all."""
    key = math.nan


class Broken(recorded.Tape):
    def record(self, f):
        raise RuntimeError("this pass cannot\nbe recorded")


@pytest.mark.parametrize("tape, message", [
    (Rounded, r"sub-layers, batch 1, blocks of 4: recording refused, as it is off by \de-0[789]"),
    (Careless, r"sub-layers, batch 1, blocks of 4: recording refused, as it is off by \d"),
    (Blank, r"sub-layers, batch 1, blocks of 4: recording refused, as it is off by"),
    (Broken, r"sub-layers, batch 1, blocks of 4: not recorded, because of RuntimeError: this pass cannot$")])
def test_a_wrong_recording_is_refused(models, monkeypatch, tape, message):
    """By name, and no text is wrong."""
    m, said = models["llama"].model, []
    monkeypatch.setattr(recorded, "Tape", tape)
    fast = on_paper(m, widths=(4,), say=said.append)
    for prompt in PROMPTS:
        assert generate(fast, [prompt], 24, NGram(3, 1)) == generate(m, [prompt], 24, NGram(3, 1))
    assert any(re.search(message, line) for line in said), said
    assert len(said) < 40 and all("\n" not in line for line in said)


def test_a_program_that_cannot_be_kept_is_run(models, monkeypatch):
    """Where a file stands in the place of the cache folder. Here it is not compiled, but run."""
    m, said = models["llama"].model, []
    functions = {}

    def write(path, model, f, *args):
        path.write_text("program")
        functions[path.name] = f

    class Compiled:
        def __init__(self, path, model):
            assert path.read_text() == "program"
            self.f = functions[path.name]

        def __call__(self, inputs, fixed):
            return self.f(m, *inputs, *fixed)

    monkeypatch.setattr(recorded, "write_program", write)
    monkeypatch.setattr(recorded, "Compiled", Compiled)
    monkeypatch.setattr(recorded, "find_compiler", lambda: "a compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    fast = Recorded(m, "compile", widths=(4,), say=said.append)
    assert generate(fast, PROMPTS, 20, NGram(3, 1)) == generate(m, PROMPTS, 20, NGram(3, 1))
    assert fast.replays() and sum("not kept" in line for line in said) == len(functions) == 2


@pytest.mark.parametrize("tape", [recorded.Tape, Broken])
def test_passes_are_called_recorded_only_where_one_is(tape, monkeypatch, capsys):
    monkeypatch.setattr(recorded, "Tape", tape)
    monkeypatch.setattr(program, "Recorded", lambda model: Recorded(model, "paper"))
    assert program.main("Once --max-new 6 --draft none --fast --json".split()) == 0
    assert json.loads(capsys.readouterr().out)["fast"] is (tape is not Broken)


@pytest.mark.parametrize("dtype, n_sublayers, most", [
    (torch.float64, 64, 1e-12), (torch.float32, 64, 1e-5), (torch.float16, 64, 2e-2),
    (torch.bfloat16, 64, 0.12),
    (torch.bfloat16, 16, 6e-2), (torch.bfloat16, 4, 6e-2), (torch.bfloat16, 0, 6e-2)])
def test_half_types_lie_further_off_the_deeper_a_pass_is(dtype, n_sublayers, most):
    assert recorded.tolerance(dtype, n_sublayers) == pytest.approx(most)


# --- CUDA, on paper


@each_family
def test_nothing_inside_a_graph_waits(family, monkeypatch):
    """Captured, as far as it can be seen without a GPU: one pool, and nothing asks for values."""
    with PaperGPU():
        pools = []

        @contextmanager
        def capture(graph, pool):
            pools.append(pool)
            torch.cuda.set_sync_debug_mode("error")
            yield
            torch.cuda.set_sync_debug_mode("default")

        class Once:
            def replay(self):
                """What was computed while it was captured is right for the first replay."""

        for name, fake in {"graph": capture, "CUDAGraph": Once, "graph_pool_handle": object}.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(recorded.Graph, "pool", None)
        m = make(FAMILIES[family], device="cuda")
        fast, prompts = Recorded(m, exact=True, say=wrong), [PROMPTS[0] * 2, PROMPTS[3] + PROMPTS[1]]
        fast.unembed = m.unembed    # it would be replayed twice in a round
        steps, want = (rounds(model, prompts, 20, SelfDraft(model, range(1, 12), 1)) for model in (fast, m))
        (_, got), (_, r) = next(steps), next(want)
        assert fast.how == "graph" and got.new == r.new
        assert len(pools) == 2 and len(set(pools)) == 1, "the draft and its check"


def test_replays_wait_for_nothing():
    with PaperGPU() as gpu:
        m = make(LLAMA, device="cuda")
        fast, cache = on_paper(m), None
        for _ in range(2):
            gpu.waits = []
            for state, _ in rounds(fast, PROMPTS, 20, SelfDraft(fast, range(8), 3), cache=cache):
                cache = state.cache
        inside = [wait for wait in gpu.waits if not wait.startswith("speculative.py")]
        assert not [wait for wait in inside if not wait.startswith("recorded.py")]
        gpu.waits, fast.frozen = [], True
        assert generate(fast, PROMPTS, 20)[0] == written(state)
        assert all(wait.startswith("speculative.py") for wait in gpu.waits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_product_as_sums_is_the_product(dtype):
    """Of half types it is rounded once, at the end."""
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=g).to(dtype) for shape in ((2, 3, 40), (7, 40)))
    want, got = torch.nn.functional.linear(x.double(), w.double()), recorded.product(x, w)
    assert got.dtype == dtype and got.shape == (2, 3, 7)
    if dtype == torch.bfloat16:
        assert torch.equal(got, want.to(dtype))
    assert (got - want).abs().max() < {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
