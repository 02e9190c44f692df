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
from tiny import GEMMA3, LIVELY, PROMPTS, Says, Unsure, a_tree, each_family, make, opened, small

from drafter import ModelDraft
from kvcache import KVCache, new_cache, prefill
from layerskip import SelfDraft, without
from machine import recorded
from machine.exact import Exact
from machine.pieces import Piece, single
from machine.recorded import Recorded, Session
from machine.tapes import Tape, graph, simulated
from methods.lookup import NGram
from model import Placement
from sampling import Coins, to_probs
from speculative import generate, rounds

DRAFTERS = {
    "none": lambda m: None,
    "exit, stopped": lambda m: SelfDraft(m, range(8), Unsure(5)),
    "skip": lambda m: SelfDraft(m, without(6, attn=[1, 4], mlp=[2]), 3),
    "model": lambda m: ModelDraft(small(m), Says(lambda state: sum(map(len, state.known)) % 6))}


WIDTHS = 1, 2, 4, 8


def on_paper(model, widths=WIDTHS, ways=(simulated,), say=pytest.fail):
    return Recorded(model, Session(ways, say), widths)


@pytest.fixture(scope="module")
def models():
    """They record whatever is new."""
    return {family: Recorded(make(c), opened(), WIDTHS) for family, c in LIVELY.items()}


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
    for widths, T in ((WIDTHS, 1), (WIDTHS, 5), ((7,), 5)):
        m = Recorded(eager, opened(), widths)
        for start in range(1, S - T + as_slice, 2 - as_slice):  # the last slot of a tensor is dead
            caches = new_cache(m, 2, S), KVCache(m.c, 2, S, torch.float64)
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
        m = Recorded(eager, opened(), widths)
        for _ in range(3):
            x, at, (filled, other) = a_tree(eager)
            cache = new_cache(m, *filled.k.shape[1:4:2])
            cache.k.copy_(filled.k)
            cache.v.copy_(filled.v)
            want = eager.run(x, at, other)
            assert (m.run(x, at, cache) - want).abs().max() < 1e-9
            assert cache.k.isfinite().all() and cache.v.isfinite().all()
        assert m.replays()


def test_what_is_wide_or_has_no_cache_of_its_own_runs_eagerly(models):
    m = on_paper(models["llama"].model)
    x, cache = m.embed(torch.tensor([[1, 2, 3]])), new_cache(m, 1, 30)
    with m.session.recording():
        assert m.run(x.repeat(1, 3, 1), Placement.span(4, 13), cache).shape == (1, 9, 32)
        assert torch.equal(m.run(x, Placement.span(4, 7), cache, []), x)
        assert m.run(x, Placement.span(0, 3)).shape == x.shape
        m.run(x, Placement.span(4, 7), KVCache(m.c, 1, 30, torch.float64))
    m.run(x, Placement.span(4, 7), cache)       # no longer a rehearsal
    assert not m.tapes


@each_family
def test_a_traced_pass_is_that_of_an_eager_pass(models, family):
    """Also of an attention, after which it is cut. A skipped state stays None."""
    eager, subs = models[family].model, [0, 1, 3, 6, 7, 8, 11]
    m = Recorded(eager, opened(), WIDTHS)
    cache, x = new_cache(m, 1, 30), m.embed(torch.tensor([[1, 2, 3]]))
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


def test_a_given_cache_keeps_its_recordings(models, truth):
    """It needs no cleaning."""
    m, made = on_paper(models["gemma2"].model), []
    cache = new_cache(m, 4, 45)
    for m.session.open in (True, True, False):
        *_, (state, _) = rounds(m, PROMPTS, 24, SelfDraft(m, range(8), 4), cache=cache)
        assert [text[-24:] for text in state.known] == [row[:24] for row in truth["gemma2"]]
        cache.k.mul_(-3)
        made.append(dict(m.tapes))
    assert len(made[0]) > 3 and made[0] == made[1] == made[2]
    with pytest.raises(ValueError, match="cache of 4 rows and"):
        rounds(m, PROMPTS, 90, cache=cache)


@each_family
@pytest.mark.parametrize("name", ["exit, stopped", "skip", "model"])
def test_later_runs_replay_what_was_rehearsed(models, truth, monkeypatch, family, name):
    """Even with a draft that has its own cache, and for shorter texts. A run beside another one
    gets a cache of its own, and runs eagerly."""
    m, replays = on_paper(models[family].model), []
    own = m.alongside(small(m))
    replay = Tape.replay
    monkeypatch.setattr(Tape, "replay", lambda tape: replays.append(tape) or replay(tape))

    def steps(count=24):
        return rounds(
            m, PROMPTS, count, ModelDraft(own, 3) if name == "model" else DRAFTERS[name](m))

    m.rehearse(lambda: [*steps()])
    tapes = dict(m.tapes)
    want = [row[:24] for row in truth[family]]
    for count in (24, 9):
        replays.clear()
        *_, (state, _) = steps(count)
        assert replays and state.cache is m.caches[0]
        assert [text[-count:] for text in state.known] == [row[:count] for row in want]
        del state
    for found in zip(steps(), steps(), strict=True):
        states = [state for state, _ in found]
    assert all([text[-24:] for text in state.known] == want for state in states)
    assert states[0].cache is not states[1].cache and m.tapes == tapes


def test_what_is_recorded(models):
    """One token through the first 4 blocks, and 4 tokens through the last 2, each in all widths, as
    a later round may need them. Prompts are not."""
    m = on_paper(models["llama"].model)
    m.rehearse(lambda: generate(m, [PROMPTS[0]], 25, SelfDraft(m, range(8), 3)))
    made = {(key.piece.sublayers, key.width) for key in m.tapes if key.piece}
    assert made >= {(tuple(part), W) for part in (range(8), range(8, 12)) for W in m.widths}
    generate(m, [PROMPTS[0]], 25, SelfDraft(m, [0, 3, 5], 3))
    assert made == {(key.piece.sublayers, key.width) for key in m.tapes if key.piece}


def test_exact_passes_of_several_texts_move_no_cache(models):
    """Each text has its own part of the cache, and its own recordings."""
    fast = Exact(on_paper(models["llama"].model, (8,)))
    prompts = PROMPTS[:3]

    def write():
        return generate(fast, prompts, 12, SelfDraft(fast, range(8), 3))[0]

    fast.rehearse(write)
    tapes = fast.model.tapes
    count = len(tapes)
    assert len({key.address for key in tapes if key.piece}) == 3 and len(fast.model.caches) == 1
    assert write() == generate(fast, prompts, 12)[0] and len(tapes) == count


# --- recordings that are wrong


def rounded(tape):
    """It computes a little less exactly than the eager pass."""
    tape.output.copy_(tape.output.float())


def careless(tape):
    """The output is right, but a key in the cache is not."""
    for keys in tape.fixed[2:3]:
        keys[0, 0, 2] = math.nan


def broken(tape):
    raise RuntimeError("this pass cannot\nbe recorded")


@pytest.mark.parametrize("spoil, why", [
    (rounded, r"off by [\d.]+e-0[789]"), (careless, "off by"),
    (broken, "RuntimeError: this pass cannot$")])
def test_a_wrong_recording_is_refused(models, spoil, why):
    """In one line for each, and no text is wrong. The next way may do."""
    class Spoilt(Tape):
        def replay(self):
            super().replay()
            spoil(self)

    def spoilt(f, model, inputs, fixed, session):
        return Spoilt(partial(f, model), inputs, fixed)

    m, said = models["llama"].model, []
    for ways in [spoilt], [spoilt, simulated]:
        fast = on_paper(m, (4,), ways, said.append)
        fast.rehearse(lambda: generate(fast, PROMPTS[:1], 24, NGram(3, 1)))     # noqa: B023
        assert generate(fast, PROMPTS[:1], 24, NGram(3, 1)) == generate(
            m, PROMPTS[:1], 24, NGram(3, 1))
        assert fast.replays() == (len(ways) == 2 or spoil is careless), "the head has no keys"
    assert said and all(line.startswith("spoilt: ") and re.search(why, line) for line in said)
    assert len(said) < 20 and all("\n" not in line for line in said)
    assert (spoilt in fast.session.ways) == (spoil is not broken), "it is not tried again"


def test_whole_passes_are_compiled_for_a_minute_only(models, monkeypatch):
    clock = iter(range(0, 1000, 25))
    monkeypatch.setattr(recorded.time, "monotonic", lambda: float(next(clock)))
    tried = []

    def slow(*args):
        tried.append(args)
        return simulated(*args)

    fast = on_paper(models["llama"].model, (1,), (slow, simulated))
    fast.rehearse(lambda: generate(fast, PROMPTS[:1], 24, SelfDraft(fast, range(8), 1)))
    assert len(tried) == 2 and len([*filter(None, fast.tapes.values())]) > 2


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
        m = make(LIVELY[family], device="cuda")
        fast = on_paper(m, (1, 8), [graph])
        fast.session.open = True
        prompts = [PROMPTS[0] * 2, PROMPTS[3] + PROMPTS[1]]
        fast.unembed = m.unembed    # it would be replayed twice in a round
        (_, got), (_, want) = (next(rounds(model, prompts, 20, SelfDraft(model, range(1, 12), 1)))
                               for model in (fast, m))
        assert got.new == want.new
        assert len(pools) == 4 and len(set(pools)) == 1, "the draft and its check, in both widths"


@pytest.mark.parametrize("c", [*LIVELY.values(), GEMMA3], ids=[*LIVELY, "gemma3"])
@torch.inference_mode()
def test_joined_blocks_are_the_blocks(c):
    """One compiled function serves all sub-layers of a kind."""
    m, count = make(c), []

    def compiler(graph, inputs):
        count.append(graph)
        return graph.forward

    compiled = torch.compile(single, backend=compiler)
    program = torch.compile(Piece.__call__, backend="eager")
    first = torch.tensor([[5], [7]])
    for width, end in (1, 24), (1, 19), (4, 24), (4, 19), (7, 19):
        angles = [t[:, :end] for t in m.angles(end)]
        x = torch.randn(2, width, m.c.dim).double()
        for sublayers in range(12), [0, 1, 2, 3, 5, 6, 8, 9, 10, 11]:
            piece = Piece(tuple(sublayers), (3, 8), True)
            texts = []
            once = (width, end) == (4, 19) and len(sublayers) < 12
            whole = partial(piece.program, program) if once else piece
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


def test_replays_wait_for_nothing(truth):
    with PaperGPU() as gpu:
        fast = on_paper(make(LIVELY["llama"], device="cuda"))
        for fast.session.open in (True, False):
            gpu.waits = []
            *_, (state, _) = rounds(fast, PROMPTS, 20, SelfDraft(fast, range(8), 3))
        assert all(wait.startswith("speculative.py") for wait in gpu.waits)
        assert [text[-20:] for text in state.known] == [row[:20] for row in truth["llama"]]
