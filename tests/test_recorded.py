"""Recorded passes write what eager ones write, each way a recording can go wrong, and that a graph
waits for nothing, on simulated recordings."""
import math
import re
from contextlib import contextmanager
from functools import partial
from unittest.mock import Mock

import promises
import pytest
import torch
from paper_gpu import PaperGPU
from tiny import FAMILIES, LIVELY, LLAMA, PROMPTS, Says, Unsure, a_tree, each_family, make, small

from drafter import ModelDraft
from kvcache import KVCache, prefill
from layerskip import SelfDraft, without
from machine import tapes
from machine.blocks import Piece, single
from machine.recorded import Recorded
from machine.tapes import Graph, JoinedGraph, Program, Tape
from methods.lookup import NGram
from model import Placement, Transformer
from sampling import Coins, to_probs
from speculative import generate, rounds

DRAFTERS = {
    "none": lambda m: None,
    "exit, stopped": lambda m: SelfDraft(m, range(8), Unsure(5)),
    "skip": lambda m: SelfDraft(m, without(6, attn=[1, 4], mlp=[2]), 3),
    "model": lambda m: ModelDraft(small(m), Says(lambda state: sum(map(len, state.known)) % 6))}


on_paper = partial(Recorded, tape=Tape, widths=(1, 2, 4, 8), say=pytest.fail)


@pytest.fixture(scope="module")
def models():
    return {family: on_paper(make(c)) for family, c in LIVELY.items()}


# --- texts and single passes


test_poison = promises.poison(DRAFTERS, ["exit, stopped", "model"])


@each_family
@pytest.mark.parametrize("name", DRAFTERS)
def test_texts_of_batches_of_several_sizes(models, truth, family, name):
    m, warm = models[family], lambda logits: to_probs(logits, 1.2, top_p=0.9)
    for rows in (slice(4), slice(1), slice(4)):
        want = [row[:24] for row in truth[family][rows]]
        assert generate(m, PROMPTS[rows], 24, DRAFTERS[name](m))[0] == want
    a, b = (generate(model, PROMPTS, 20, DRAFTERS[name](model), warm, Coins(7))
            for model in (m, m.model))
    assert a == b, "drawn texts"


@each_family
@pytest.mark.parametrize("as_slice", [True, False])
@torch.inference_mode()
def test_a_replayed_block_is_the_eager_one(models, family, as_slice):
    """Padding changes nothing, also where the block ends with the cache."""
    eager, S = models[family].model, 17
    tokens = torch.randint(17, (2, S))
    for widths, T in (((1, 2, 4, 8), 1), ((1, 2, 4, 8), 5), ((7,), 5)):
        m = on_paper(eager, widths=widths)
        for start in range(1, S - T + as_slice, 2 - as_slice):  # the last slot of a tensor is dead
            caches = KVCache(m.c, 2, S, torch.float64), KVCache(m.c, 2, S, torch.float64)
            here, x = Placement.span(start, start + T), m.embed(tokens[:, start : start + T])
            at = here if as_slice else here._replace(same=False)
            for cache in caches:
                prefill(eager, tokens[:, :start], cache)
            want = eager.run(x, here, caches[1])
            for _ in range(2):
                assert (m.run(x, at, caches[0]) - want).abs().max() < 1e-9, (T, start)
            off = caches[0].k[:, :, :, : start + T] - caches[1].k[:, :, :, : start + T]
            assert off.abs().max() < 1e-9, (T, start)


@each_family
@torch.inference_mode()
def test_a_tree_is_replayed(models, family):
    """Dead tokens fill the block to 4 and 8, and the slots after it are finite."""
    eager = models[family].model
    for widths in (1, 2, 4), (8,):
        m = on_paper(eager, widths=widths)
        for _ in range(3):
            x, at, caches = a_tree(eager)
            want = eager.run(x, at, caches[1])
            assert (m.run(x, at, caches[0]) - want).abs().max() < 1e-9
            assert caches[0].k.isfinite().all() and caches[0].v.isfinite().all()
        assert m.replays()


def test_what_is_wide_or_has_no_cache_runs_eagerly(models):
    m = on_paper(models["llama"].model)
    x, cache = m.embed(torch.tensor([[1, 2, 3]])), KVCache(m.c, 1, 30, torch.float64)
    assert m.run(x.repeat(1, 3, 1), Placement.span(4, 13), cache).shape == (1, 9, 32)
    assert torch.equal(m.run(x, Placement.span(4, 7), cache, []), x)
    assert m.run(x, Placement.span(0, 3)).shape == x.shape
    assert not any(m.all_tapes())


@each_family
def test_a_traced_pass_is_that_of_an_eager_pass(models, family):
    """Also of an attention, after which it is cut. A skipped state stays None."""
    eager, m, subs = models[family].model, on_paper(models[family].model), [0, 1, 3, 6, 7, 8, 11]
    cache, x = KVCache(m.c, 1, 30, torch.float64), m.embed(torch.tensor([[1, 2, 3]]))
    for sublayers in (None, subs):
        for taps in ([3], [3, 7, 11], [2, 8]):
            want, got = dict.fromkeys(taps), dict.fromkeys(taps)
            last = eager.run(x, Placement.span(4, 7), cache, sublayers, want)
            for _ in range(3):
                assert ((m.run(x, Placement.span(4, 7), cache, sublayers, got) - last).abs().max()
                        < 1e-9)
            for tap, state in want.items():
                assert got[tap] is None if state is None else (got[tap] - state).abs().max() < 1e-9
    assert m.replays()


# --- what is recorded and kept


def test_a_used_cache_needs_no_cleaning_and_keeps_its_recordings(models, truth):
    m, cache, made = on_paper(models["gemma2"].model), None, []
    for _ in range(3):
        for state, _ in rounds(m, PROMPTS, 24, SelfDraft(m, range(8), 4), cache=cache):
            cache = state.cache
        assert [text[-24:] for text in state.known] == [row[:24] for row in truth["gemma2"]]
        cache.k.mul_(-3)
        made.append([*m.home(cache).tapes.values()])
    assert len(made[0]) > 3 and made[0] == made[2]
    with pytest.raises(ValueError, match="cache of 4 rows and"):
        rounds(m, PROMPTS, 40, cache=cache)


@each_family
@pytest.mark.parametrize("name", ["exit, stopped", "skip", "model"])
def test_new_caches_replay_what_was_recorded_with_others(models, truth, monkeypatch, family, name):
    """Even for a draft with its own cache, and while others are still in use:
    contents change places."""
    m, replays = on_paper(models[family].model), []
    own = m.alongside(small(m))
    replay = Tape.replay
    monkeypatch.setattr(Tape, "replay", lambda tape: replays.append(tape) or replay(tape))

    def steps():
        return rounds(m, PROMPTS, 24, ModelDraft(own, 3) if name == "model" else DRAFTERS[name](m))

    m.rehearse(lambda: [*steps()])
    made = {id(tape) for one in (m, own) for tapes in one.all_tapes() for tape in tapes.values()}
    replays.clear()
    for found in zip(*(steps() for _ in range(3)), strict=True):
        states = [state for state, _ in found]
    want = [row[:24] for row in truth[family]]
    assert all([text[-24:] for text in state.known] == want for state in states)
    assert len({state.cache.k.data_ptr() for state in states}) == 3 and len(m.homes) == 1
    assert made >= {id(tape) for tape in replays} != set(), "nothing else is replayed"


def test_what_is_recorded(models):
    """One token through the first 4 blocks, and 4 tokens through the last 2, each in all widths, as
    a later round may need them. Prompts are not, and after `rehearse` nothing else is."""
    m, cache = on_paper(models["llama"].model), None

    def write(sublayers=range(8)):
        return [state.cache for state, _ in rounds(
            m, [PROMPTS[0]], 25, SelfDraft(m, sublayers, 3), cache=cache)][0]

    cache = write()
    made = {(key.piece.sublayers, key.width) for key in m.home(cache).tapes}
    assert made >= {(tuple(part), width) for part in (range(8), range(8, 12)) for width in m.widths}
    m.rehearse(write)
    before = dict(m.home(cache).tapes)
    write([0, 3, 5])
    assert m.home(cache).tapes == before
    assert len(m.homes) == 1, "recordings of a cache go with it"


# --- recordings that are wrong


def rounded(tape, count):
    """It computes a little less exactly than the eager pass."""
    tape.output.copy_(tape.output.float())


def careless(tape, count):
    """The output is right, but a key in the cache is not."""
    for keys in tape.fixed[2:3]:
        keys[0, 0, 2] = math.nan


def moody(tape, count):
    """Only the first two replays are wrong: their inputs were odd."""
    tape.output.mul_(2.0 if count < 2 else 1.0)


def broken(tape, count):
    raise RuntimeError("this pass cannot\nbe recorded")


@pytest.mark.parametrize("spoil, why", [(rounded, r"off by [\d.]+e-0[789]"), (careless, "off by"),
                                        (moody, ""), (broken, "RuntimeError: this pass cannot$")])
def test_a_wrong_recording_is_refused(models, spoil, why):
    """In one line for each, and no text is wrong."""
    counts = iter(range(1000))

    class Spoilt(Tape):
        def replay(self):
            super().replay()
            spoil(self, next(counts))

    m, said = models["llama"].model, []
    fast = on_paper(m, tape=Spoilt, widths=(4,), say=said.append)
    for prompt in PROMPTS:
        assert generate(fast, [prompt], 24, NGram(3, 1)) == generate(m, [prompt], 24, NGram(3, 1))
    found = [line for line in said if re.search(f"sub-layers, batch 1, blocks of 4: .*{why}", line)]
    assert bool(found) == (spoil is not moody), said
    assert len(said) < 40 and all("\n" not in line for line in said)
    assert fast.replays() == (spoil not in (rounded, broken)), "the head has no keys"


# --- CUDA, simulated


@each_family
def test_nothing_inside_a_graph_waits(family, monkeypatch):
    """As far as it can be seen without a GPU: one pool, and nothing asks for values."""
    pools = []

    @contextmanager
    def capture(graph, pool):
        pools.append(pool)
        torch.cuda.set_sync_debug_mode("error")
        yield
        torch.cuda.set_sync_debug_mode("default")

    with PaperGPU():
        # trap: only what was computed while it was captured is there to replay
        for name, fake in ("graph", capture), ("CUDAGraph", Mock), ("graph_pool_handle", object):
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(Graph, "pool", None)
        m = make(FAMILIES[family], device="cuda")
        fast = Recorded(m, Graph, say=pytest.fail)
        prompts = [PROMPTS[0] * 2, PROMPTS[3] + PROMPTS[1]]
        fast.unembed = m.unembed    # it would be replayed twice in a round
        (_, got), (_, want) = (next(rounds(model, prompts, 20, SelfDraft(model, range(1, 12), 1)))
                               for model in (fast, m))
        assert got.new == want.new
        assert len(pools) == 4 and len(set(pools)) == 1, "the draft and its check, in both widths"


@each_family
@torch.inference_mode()
def test_joined_blocks_are_the_blocks(family):
    """One compiled function serves all sub-layers of a kind."""
    m, count = make(FAMILIES[family]), []

    def compiler(graph, inputs):
        count.append(graph)
        return graph.forward

    compiled = torch.compile(single, backend=compiler)
    program = torch.compile(Piece.__call__, backend="eager")
    first = torch.tensor([[5], [7]])
    for width, end in (1, 24), (1, 19), (4, 24), (4, 19), (7, 19):
        angles = [t[:end] for t in m.angles(end)]
        x = torch.randn(2, width, m.c.dim).double()
        for sublayers in range(12), [0, 1, 2, 3, 5, 6, 8, 9, 10, 11]:
            piece = Piece(tuple(sublayers), (3, 8), True)
            texts = []
            once = (width, end) == (4, 19) and len(sublayers) < 12
            whole = partial(piece.whole, program) if once else piece
            for run in piece, partial(piece.joined, compiled), whole:
                torch.manual_seed(width)
                cache = KVCache(m.c, 2, 32, torch.float64)
                cache.k.normal_(), cache.v.normal_()
                fixed = [t for i in sublayers if i % 2 == 0 for t in cache.layers[i // 2]]
                texts.append((run(m, x, first, *angles, *fixed), cache.k, cache.v))
            for one, joined, whole in zip(*texts, strict=True):
                assert (joined - one).abs().max() < 1e-9 and (whole - one).abs().max() < 1e-9
    kinds = 2       # attentions and MLPs
    assert len(count) <= 2 * kinds, "for single tokens, and for all other widths and lengths"


def test_what_fails_is_recorded_in_a_plainer_way(models):
    """With one line, and only for this model: another one is compiled for itself."""
    class Fails(Tape):
        plainer = Tape

        def record(self):
            raise RuntimeError("no compiler\nhere")

    class Off(Tape):
        plainer = Tape

        def replay(self):
            super().replay()
            self.output += 1

    m = models["llama"].model
    for tape, why in ((Fails, "of RuntimeError: no compiler"), (Off, "it is off by")):
        said = []
        fast = on_paper(m, tape=tape, say=said.append)
        for _ in range(3):
            assert generate(fast, PROMPTS[:1], 9) == generate(m, PROMPTS[:1], 9)
        assert fast.replays() and fast.alongside(m).tape is Tape
        assert len(said) == 1 and said[0].startswith(f"recorded with more kernels, because {why}")
    assert JoinedGraph.plainer is Graph and Program.plainer is JoinedGraph


def test_whole_passes_are_compiled_within_a_minute(models, monkeypatch):
    """A simulated program takes 25 seconds to compile. The fourth pass has joined kernels."""
    monkeypatch.setattr(Program, "spent", 0.0)
    clock = iter(range(0, 1000, 25))
    monkeypatch.setattr(tapes.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(Graph, "record", lambda tape: None)
    m = models["llama"].model
    piece = Piece(tuple(range(12)), (), True)
    ways = [Program(piece, m, [], []).f.func.__name__ for _ in range(4)]
    assert ways == ["whole"] * 3 + ["joined"]
    assert Program(Transformer.unembed, m, [], []).f.func is Transformer.unembed


def test_replays_wait_for_nothing(truth):
    with PaperGPU() as gpu:
        fast, cache = on_paper(make(LLAMA, device="cuda")), None
        for fast.frozen in (False, True):
            gpu.waits = []
            for state, _ in rounds(fast, PROMPTS, 20, SelfDraft(fast, range(8), 3), cache=cache):
                cache = state.cache
        assert all(wait.startswith("speculative.py") for wait in gpu.waits)
        assert [text[-20:] for text in state.known] == [row[:20] for row in truth["llama"]]
