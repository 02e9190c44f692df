"""Recorded passes write what eager ones write, each way a recording can go wrong, and that a graph waits for
nothing, on recordings of paper; and programs of a single block, which are compiled in seconds."""
import math
import re
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import promises
import pytest
import torch
from paper_gpu import PaperGPU
from tiny import FAMILIES, GEMMA, LIVELY, LLAMA, PROMPTS, Says, Unsure, each_family, make, small

from kvcache import KVCache
from layerskip import SelfDraft, without
from machine import program, recorded
from machine.blocks import Bands, joined, piece, run_piece, stack_masks, widen
from machine.recorded import Recorded
from methods.trees import ancestors
from model import Placement
from sampling import Coins, to_probs
from speculative import ModelDraft, NGram, generate, prefill, rounds

DRAFTERS = {
    "none": lambda m: None,
    "exit, stopped": lambda m: SelfDraft(m, range(8), Unsure(5)),
    "skip": lambda m: SelfDraft(m, without(6, attn=[1, 4], mlp=[2]), 3),
    "model": lambda m: ModelDraft(small(m), Says(lambda state: sum(map(len, state.known)) % 6))}


on_paper = partial(Recorded, how="paper", widths=(1, 2, 4, 8), reach=16, say=pytest.fail)


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
    a, b = (generate(model, PROMPTS, 20, DRAFTERS[name](model), warm, Coins(7)) for model in (m, m.model))
    assert a == b, "drawn texts"


@each_family
@pytest.mark.parametrize("as_slice", [True, False])
@torch.inference_mode()
def test_a_replayed_block_is_the_eager_one(models, family, as_slice):
    """Padding changes nothing, also where the block ends with the cache or the reach of its recording."""
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
def test_a_tree_is_replayed_also_while_it_grows(models, family):
    """A root, two children and a grandchild; the last two are also read in a pass of their own. Dead tokens
    fill the block to 4 and 8, and the slots after it are finite. The second text is a single token."""
    eager, nodes = models[family].model, torch.tensor([[3, 7, 1, 9], [5, 2, 2, 8]])
    tree = ancestors(torch.tensor([[0, 0, 1]]))
    places = torch.tensor([[6, 7, 7, 8], [0, 1, 1, 2]])
    slots = places[:, :1] + torch.arange(4)
    whole = Placement(places, slots, 0, 10, tree)
    first = Placement(places[:, :2], slots[:, :2], 0, 8, tree[:, :2, :2])
    rest = whole._replace(tree=tree[:, 2:])
    for widths in (1, 2, 4), (8,):
        m, x = on_paper(eager, widths=widths), eager.embed(nodes)
        for _ in range(3):
            caches = [KVCache(m.c, 2, 24, torch.float64) for _ in range(2)]
            for cache in caches:
                prefill(eager, torch.arange(12).view(2, 6) % 17, cache)
            want = eager.run(x, whole, caches[1])
            assert (m.run(x, whole, caches[0]) - want).abs().max() < 1e-9
            parts = [m.run(x[:, :2], first, caches[0]), m.run(x[:, 2:], rest, caches[0])]
            assert (torch.cat(parts, 1) - want).abs().max() < 1e-9
            assert caches[0].k.isfinite().all() and caches[0].v.isfinite().all()
        assert m.replays()


@each_family
def test_masks_of_chains_are_cut_from_one_line(family):
    m = make(FAMILIES[family])
    bands = Bands(m)
    for first, T, end in ((1, 1, 24), (0, 4, 9), (7, 8, 15), (70, 3, 90), (5, 2, 24)):
        at = widen(Placement.span(first, first + T), 0, end)
        assert torch.equal(bands(first, T, end), stack_masks(m, at, T))


def test_what_is_wide_or_has_no_cache_runs_eagerly(models):
    m = on_paper(models["llama"].model)
    x = m.embed(torch.tensor([[1, 2, 3]]))
    for _ in range(3):
        cache = KVCache(m.c, 1, 30, torch.float64)
        assert m.run(x.repeat(1, 3, 1), Placement.span(4, 13), cache).shape == (1, 9, 32)
        assert torch.equal(m.run(x, Placement.span(4, 7), cache, []), x)
        assert m.run(x, Placement.span(0, 3)).shape == x.shape
    assert not any(m.all_tapes())


@each_family
def test_a_traced_pass_is_that_of_an_eager_pass(models, family):
    """It is cut after an attention that is traced, not after an MLP. A skipped state stays None."""
    eager, m, subs = models[family].model, on_paper(models[family].model), [0, 1, 3, 6, 7, 8, 11]
    cache, x = KVCache(m.c, 1, 30, torch.float64), m.embed(torch.tensor([[1, 2, 3]]))
    for sublayers in (None, subs):
        for taps in ([3], [3, 7, 11], [2, 8]):
            want, got = dict.fromkeys(taps), dict.fromkeys(taps)
            last = eager.run(x, Placement.span(4, 7), cache, sublayers, want)
            for _ in range(3):
                assert (m.run(x, Placement.span(4, 7), cache, sublayers, got) - last).abs().max() < 1e-9
            for tap, state in want.items():
                assert got[tap] is None if state is None else (got[tap] - state).abs().max() < 1e-9
    every = tuple(range(12))
    assert {key[0] for key in m.home(cache).tapes} == {
        every, every[:3], every[3:9], every[9:], tuple(subs), (0, 1, 3, 6, 7, 8), (11,)}
    m.piece = 4
    m.cut.clear()
    m.run(x, Placement.span(4, 7), cache)
    assert {every[:4], every[4:8], every[8:]} == {part for parts in m.cut.values() for part, _ in parts}


# --- what is recorded and kept


def test_a_used_cache_needs_no_cleaning_and_keeps_its_recordings(models, truth):
    m, cache, made = on_paper(models["gemma2"].model), None, []
    for _ in range(3):
        for state, _ in rounds(m, PROMPTS, 24, SelfDraft(m, range(8), 4), cache=cache):
            cache = state.cache
        assert [text[-24:] for text in state.known] == [row[:24] for row in truth["gemma2"]]
        cache.k.mul_(-3)
        made.append([tape for tape in m.home(cache).tapes.values() if tape])
    assert len(made[1]) > 3 and made[1] == made[2]
    with pytest.raises(ValueError, match="cache of 4 rows and"):
        rounds(m, PROMPTS, 40, cache=cache)


@each_family
@pytest.mark.parametrize("name", ["exit, stopped", "skip", "model"])
def test_new_caches_replay_what_was_recorded_with_others(models, truth, monkeypatch, family, name):
    """Of a draft with its own cache, too, and while others are still in use: contents change places."""
    m, replays = on_paper(models[family].model), []
    own = m.alongside(small(m))
    replay = recorded.Tape.replay
    monkeypatch.setattr(recorded.Tape, "replay", lambda tape: replays.append(tape) or replay(tape))

    def steps():
        return rounds(m, PROMPTS, 24, ModelDraft(own, 3) if name == "model" else DRAFTERS[name](m))

    m.rehearse(lambda: [*steps()])
    made = {id(tape) for one in (m, own) for tapes in one.all_tapes() for tape in tapes.values() if tape}
    replays.clear()
    for found in zip(*(steps() for _ in range(3)), strict=True):
        states = [state for state, _ in found]
    want = [row[:24] for row in truth[family]]
    assert all([text[-24:] for text in state.known] == want for state in states)
    assert len({state.cache.k.data_ptr() for state in states}) == 3 and len(m.homes) == 1
    assert made == {id(tape) for tape in replays}, "all that was recorded is replayed"


def test_what_is_recorded(models):
    """What is seen twice: one token through the first 4 blocks, 4 tokens through the last 2. Prompts are not;
    and after `rehearse` nothing else is."""
    m, cache = on_paper(models["llama"].model, reach=64), None
    state, _ = next(rounds(m, [PROMPTS[0]], 5))
    assert set(m.home(state.cache).tapes.values()) == {None}
    del state

    def write():
        return [s.cache for s, _ in rounds(m, [PROMPTS[0]], 25, SelfDraft(m, range(8), 3), cache=cache)]

    cache = write()[0]
    seen = {(key[0], key[2]) for key, tape in m.home(cache).tapes.items() if tape}
    assert seen >= {(tuple(range(8)), 1), (tuple(range(8, 12)), 4)}
    assert all(width in (1, 2, 4) for _, width in seen)
    m.rehearse(write)
    before = dict(m.home(cache).tapes)
    for _ in range(3):
        generate(m, [PROMPTS[0]], 25, SelfDraft(m, [0, 3, 5], 6), cache=cache)
    assert m.home(cache).tapes == before
    assert len(m.homes) == 1, "recordings of a cache go with it"


def test_lengths_are_few(models):
    """One row passes all places of its cache. It needs no more recordings than if lengths doubled."""
    fast, slots = on_paper(models["gemma2"].model), 203
    reaches = [len(fast.angles_read(end, slots)[0]) for end in range(1, slots + 1)]
    assert all(end <= reach <= slots for end, reach in enumerate(reaches, 1))
    assert len(set(reaches)) <= 1 + math.ceil(math.log2(slots / 16))


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
def test_a_wrong_recording_is_refused(models, monkeypatch, spoil, why):
    """In one line for each, and no text is wrong."""
    counts = iter(range(1000))

    class Spoilt(recorded.Tape):
        def replay(self):
            super().replay()
            spoil(self, next(counts))

    monkeypatch.setattr(recorded, "Tape", Spoilt)
    m, said = models["llama"].model, []
    fast = on_paper(m, widths=(4,), say=said.append)
    for prompt in PROMPTS:
        assert generate(fast, [prompt], 24, NGram(3, 1)) == generate(m, [prompt], 24, NGram(3, 1))
    found = [line for line in said if re.search(f"sub-layers, batch 1, blocks of 4: .*{why}", line)]
    assert bool(found) == (spoil is not moody), said
    assert len(said) < 40 and all("\n" not in line for line in said)
    assert fast.replays() == (spoil not in (rounded, broken)), "the head has no keys"


# --- CUDA, on paper


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

    class Once:
        def replay(self):
            """What was computed while it was captured is right for the first replay."""

    with PaperGPU():
        for name, fake in ("graph", capture), ("CUDAGraph", Once), ("graph_pool_handle", object):
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(recorded.Graph, "pool", None)
        m = make(FAMILIES[family], device="cuda")
        fast, prompts = Recorded(m, say=pytest.fail), [PROMPTS[0] * 2, PROMPTS[3] + PROMPTS[1]]
        fast.unembed = m.unembed    # it would be replayed twice in a round
        fast.joins = False          # a compiler does not know paper
        steps, want = (rounds(model, prompts, 20, SelfDraft(model, range(1, 12), 1)) for model in (fast, m))
        for _ in range(2):      # seen, and recorded
            (_, got), (_, r) = next(steps), next(want)
        assert fast.how == "graph" and got.new == r.new
        assert len(pools) == 2 and len(set(pools)) == 1, "the draft and its check"


@each_family
@torch.inference_mode()
def test_joined_blocks_are_the_blocks(family):
    """One compiled function serves all sub-layers of a kind."""
    m, count = make(FAMILIES[family]), []

    def compiler(graph, inputs):
        count.append(graph)
        return graph.forward

    compiled = torch.compile(piece, backend=compiler)
    first = torch.tensor([[5], [7]])
    for width, end in (1, 24), (1, 19), (4, 24), (4, 19), (7, 19):
        angles = [t[:end] for t in m.angles(end)]
        x = torch.randn(2, width, m.c.dim).double()
        slots = (first + torch.arange(width)).clamp(max=end - 1)
        placed = slots, slots, stack_masks(m, Placement(slots, slots, 0, end), width)
        for sublayers in range(12), [0, 1, 2, 3, 5, 6, 8, 9, 10, 11]:
            texts = []
            for run in run_piece, partial(joined, compiled):
                torch.manual_seed(width)
                cache = KVCache(m.c, 2, 32, torch.float64)
                cache.k.normal_(), cache.v.normal_()
                fixed = [t for i in sublayers if i % 2 == 0 for t in cache.layers[i // 2]]
                texts.append((run(sublayers, m, x, *placed, *angles, *fixed), cache.k, cache.v))
            for got, want in zip(*texts, strict=True):
                assert (got - want).abs().max() < 1e-9
    kinds = 2 if m.c.window is None else 3
    assert len(count) <= 2 * kinds, "for single tokens, and for all other widths and lengths"


def test_replays_wait_for_nothing(truth):
    with PaperGPU() as gpu:
        fast, cache = on_paper(make(LLAMA, device="cuda")), None
        for fast.frozen in (False, False, True):
            gpu.waits = []
            for state, _ in rounds(fast, PROMPTS, 20, SelfDraft(fast, range(8), 3), cache=cache):
                cache = state.cache
        assert all(wait.startswith("speculative.py") for wait in gpu.waits)
        assert [text[-20:] for text in state.known] == [row[:20] for row in truth["llama"]]


# --- compiled programs


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")
    return tmp_path


def write(model, drafter=None):
    """(text, logits (20, V)) of one answer."""
    seen = [(r.new[0], r.logits[0, : len(r.new[0])]) for _, r in rounds(model, PROMPTS[:1], 20, drafter)]
    return sum((new for new, _ in seen), []), torch.cat([logits for _, logits in seen])


def test_programs_are_compiled_once(folder):
    """The draft is the first sub-layer, and the verification goes on where it ended."""
    model, other = (make(replace(LLAMA, n_layers=1), seed) for seed in (0, 3))
    said, four = [], partial(Recorded, widths=(4,))
    fast = four(model, say=said.append)
    text, logits = write(model)
    drafters = None, SelfDraft(fast, range(1), 3)
    fast.rehearse(lambda: [write(fast, drafter) for drafter in drafters])
    for drafter in drafters:
        drafted, same = write(fast, drafter)
        assert drafted == text and (same - logits).abs().max() < 1e-9
    assert {key[0] for key, tape in fast.tapes.items() if tape} == {(0,), (1,), (0, 1), None}
    assert len([*folder.rglob("*.pt2")]) == 4
    assert "0 of 4 programs" in said[0] and re.search(r"3 of 4 programs, about \d+ s left", said[-1])

    later = four(other, say=pytest.fail)  # weights of the same shapes need no other program
    before = write(later)[1]
    for w in other.parameters():
        w.data.mul_(0.5)
    assert not torch.equal(write(later)[1], before), "the weights are read where they lie"

    said.clear()
    for path in folder.rglob("*.pt2"):  # a damaged program is not run, but made anew
        path.write_bytes(path.read_bytes()[:-2000])
    damaged = four(model, say=said.append)
    x = torch.randn(1, 3, 32).double()
    damaged.rehearse(lambda: damaged.unembed(x))
    assert ["damaged" in line for line in said][:2] == [True, False] and damaged.replays()
    for fast in damaged, four(model, say=pytest.fail):
        assert (fast.unembed(x) - model.unembed(x)).abs().max() < 1e-9


@torch.inference_mode()
def test_one_program_reads_any_window_any_part_of_a_cache_and_any_block_like_its_own(folder):
    """It is written while a whole text lies in the window of 5, and a whole cache of 16 slots is read."""
    model, said = make(replace(GEMMA, n_layers=4)), []
    fast = Recorded(model, widths=(1,), say=said.append)
    fast.piece = 2      # every second block has a window
    states = torch.randn(40, 1, 1, 32).double()
    early, *caches = (KVCache(model.c, 1, slots, torch.float64) for slots in (16, 60, 60))
    for t in (caches[0].k, caches[0].v, caches[1].k, caches[1].v):  # what lies in a wrong place is not 0
        t.copy_(torch.ones_like(t).cumsum(-2))
    fast.rehearse(lambda: fast.run(states[0], Placement.span(1, 2), early))
    fast.frozen = False
    for at, x in enumerate(states):
        got, want = (m.run(x, Placement.span(at, at + 1), cache)
                     for m, cache in zip((fast, model), caches, strict=True))
        assert (got - want).abs().max() < 1e-9, at
    assert len([*folder.rglob("*.pt2")]) == 2 and sum(map(bool, fast.tapes.values())) == 4


@torch.inference_mode()
def test_exact_rows_depend_neither_on_the_width_nor_on_the_cuts(folder):
    """A program of two sub-layers must round its state between them, as two programs do. Each row is read in
    a block of two in one pass, and in a block of four in two parts."""
    model = make(replace(LLAMA, dim=64, n_layers=1)).to(torch.bfloat16)
    fast = Recorded(model, widths=(1, 2, 4), say=lambda line: None, exact=True)
    assert fast.widths == [2, 4]
    cache = KVCache(model.c, 1, 40, model.attention_dtype())

    def read(T, traced):
        """The logits of 16 rows."""
        rows = []
        for start in range(0, 16, T):
            at = Placement.span(start, start + T)._replace(first=0, end=40, same=False)
            x = model.embed(torch.arange(start, start + T)[None] % 17)
            rows.append(fast.unembed(fast.run(x, at, cache, None, dict.fromkeys(traced))))
        return torch.cat(rows, 1)

    ways = (2, ()), (4, (0,))
    fast.rehearse(lambda: [read(*way) for way in ways])
    assert torch.equal(*(read(*way) for way in ways))
    assert {key[0] for key, tape in fast.tapes.items() if tape} == {(0,), (1,), (0, 1), None}


@torch.inference_mode()
def test_programs_with_packed_matrices_serve_other_blocks_too(folder, monkeypatch):
    """A compiler folds 1 + w into constants: a program of Gemma-2 gets those of the blocks that it runs. With
    a bias, as in Qwen2. It takes blocks of any width, also once nothing new is recorded."""
    monkeypatch.setattr(recorded, "LARGE", 0)
    c = replace(GEMMA, n_layers=2, window=None, qkv_bias=True)
    model, said = make(c).float(), []
    fast = Recorded(model, widths=(16,), say=said.append)
    fast.piece = 2
    caches = [KVCache(c, 1, 24, torch.float32) for _ in range(2)]

    def read(start, T):
        x, at = torch.randn(1, T, 32), Placement.span(start, start + T)
        return [m.unembed(m.run(x, at, cache)) for m, cache in zip((fast, model), caches, strict=True)]

    fast.rehearse(lambda: read(4, 3))
    for start, T in ((7, 3), (10, 2), (9, 5), (2, 16)):
        got, want = read(start, T)
        assert (got - want).abs().max() < 1e-4 * want.abs().max()
    assert {key[2] for key in fast.tapes} == {2, 3, 5, 16}
    assert len([*folder.rglob("*.pt2")]) == 1, "one for two pieces; a packed head needs none"
    assert len(fast.packed) == 2 * 4 + 1 and all(fast.tapes.values())
    monkeypatch.setattr(recorded, "multiplies", lambda dtype: False)
    plain = Recorded(model, widths=(4,), say=said.append)
    plain.rehearse(lambda: plain.unembed(torch.randn(1, 3, 32)))
    assert len([*folder.rglob("*.pt2")]) == 2, "a processor without units gets other programs"
    assert plain.replays() and not plain.packed


def test_without_a_compiler_one_line_says_so(folder, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    m, said = make(LLAMA), []
    fast = Recorded(m, say=said.append)
    assert generate(fast, PROMPTS, 8) == generate(m, PROMPTS, 8)
    assert len(said) == 1 and "CXX" in said[0]


def test_what_cannot_be_compiled_runs_eagerly_and_one_line_says_why(folder, monkeypatch):
    """Neither a compiler that fails nor a process that is killed keeps a run waiting."""
    monkeypatch.setenv("CXX", "false")
    m, said = make(LLAMA), []
    broken = Recorded(m, widths=(1,), say=said.append)
    broken.unembed = m.unembed
    broken.rehearse(lambda: generate(broken, PROMPTS[:1], 4))
    assert not broken.replays() and "sub-layers, batch 1, blocks of 1: not recorded, because of" in said[-1]

    monkeypatch.setattr(recorded.program.sys, "executable", "false")
    killed = Recorded(m, widths=(1,), say=said.append)
    killed.rehearse(lambda: generate(killed, PROMPTS[:1], 4))
    assert not killed.replays() and "ended" in said[-1]
    assert generate(killed, PROMPTS[:1], 4) == generate(m, PROMPTS[:1], 4)


@pytest.mark.parametrize("dtype, most", [(torch.bfloat16, 0.0), (torch.float64, 1e-13)])
def test_a_product_as_sums_is_the_product(dtype, most):
    """Of half types it is rounded once, at the end."""
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=g).to(dtype) for shape in ((2, 3, 40), (7, 40)))
    got, want = program.product(x, w), torch.nn.functional.linear(x.double(), w.double()).to(dtype)
    assert got.dtype == dtype and (got - want).abs().max() <= most
