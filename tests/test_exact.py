"""The same text to the bit, `==` on ids and on rows of logits, greedy and sampled, with any draft,
alone or in a batch. And the race that decides sampled texts."""
import functools

import pytest
import torch
from tiny import LIVELY, PROMPTS, Unsure, each_family, make, small

from drafter import ModelDraft
from kvcache import new_cache
from layerskip import SelfDraft, without
from machine.exact import Exact, Race, exactly
from machine.few import FewRows
from machine.quant import quantise
from machine.recorded import Recorded, Session
from machine.tapes import simulated
from methods.block import verify_block
from methods.eagle import Eagle
from methods.jump import Jump
from methods.kangaroo import Kangaroo
from methods.lookup import NGram, Suffix
from methods.trees import Siblings
from model import StandIn
from sampling import to_probs
from speculative import rounds
from verification import verify

WAYS = {"exit": lambda m: SelfDraft(m, range(8), 3),
        "half a block": lambda m: SelfDraft(m, range(5), 2),
        "skip": lambda m: SelfDraft(m, without(6, attn=[1, 4], mlp=[2]), 4),
        "n-gram": lambda m: NGram(10, 1),
        "suffix": lambda m: Suffix(5), "stopped": lambda m: SelfDraft(m, range(8), Unsure(5)),
        "model": lambda m: ModelDraft(small(m).to(m.tok.dtype), 3),
        "eagle": lambda m: Eagle(m).drafter(3),
        "kangaroo": lambda m: Kangaroo(m, 2).drafter(3), "jump": lambda m: Jump(m, 3).drafter(3),
        "int4": lambda m: SelfDraft(quantise(m, "int4", head="int4"), range(12), 3)}
SEEDS = [3, 1, 4, 1]


def warm(logits):
    return to_probs(logits, 0.8, top_p=0.95)


def write(model, prompts, drafter=None, probs=to_probs, seeds=SEEDS, eos=(), slots=60,
          judge=verify):
    """[(ids, their rows of logits)] of each prompt, in a cache of 60 slots."""
    cache = new_cache(model, len(prompts), slots)
    found = [([], []) for _ in prompts]
    for _, r in rounds(model, prompts, 12, drafter, probs, Race(seeds), eos, cache, judge):
        for b, (ids, logits) in enumerate(found):
            ids += r.new[b]
            logits += r.logits[b, : len(r.new[b])]
    return found


def same(a, b):
    return all(x[0] == y[0] and torch.equal(torch.stack(x[1]), torch.stack(y[1]))
               for x, y in zip(a, b, strict=True))


DTYPES = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def dtype(request):
    return request.param


MODES = {"rows": exactly, "eights": Exact}      # the loops in C++; passes of eight rows


@pytest.fixture(scope="module", params=MODES)
def mode(request):
    """A model in exact passes."""
    return MODES[request.param]


@pytest.fixture(scope="module")
def plain(mode, dtype):
    """(family, probs) -> what plain decoding writes, computed once."""
    return functools.cache(
        lambda family, probs: write(mode(make(LIVELY[family]).to(dtype)), PROMPTS, probs=probs))


# --- passes


ROUGHEST = [(torch.bfloat16, family, name) for family in LIVELY for name in WAYS]
OTHERS = [(dtype, family, name) for dtype, family in zip(DTYPES[1:], LIVELY, strict=True)
          for name in ("exit", "half a block", "eagle", "int4")]


@pytest.mark.parametrize("dtype, family, name", ROUGHEST + OTHERS, indirect=["dtype"], ids=str)
def test_drafted_is_plain_to_the_bit(plain, mode, family, name, dtype):
    """In a ragged batch, greedy and sampled; and up to an end of text inside a draft."""
    m = mode(make(LIVELY[family]).to(dtype))
    for probs, judge, ends in (to_probs, verify_block, False), (warm, verify, True):
        want = plain(family, probs)
        eos = want[0][0][7] if ends else None
        stops = [ids.index(eos) + 1 if eos in ids else None for ids, _ in want]
        cut = [(ids[:stop], logits[:stop]) for (ids, logits), stop in zip(want, stops, strict=True)]
        assert same(cut, write(m, PROMPTS, WAYS[name](m), probs, eos={eos}, judge=judge))


def test_every_pass_has_one_shape():
    """Even for a prompt of 13 tokens and a draft of 10. Rounding would hide a difference here."""
    class Spy(StandIn):
        def __init__(self, model):
            super().__init__(model)
            self.seen = set()

        def run(self, x, at, cache=None, *args):
            self.seen.add((*x.shape[:2], at.end, at.slots.shape[1]))
            return self.model.run(x, at, cache, *args)

    spy = Spy(make(LIVELY["llama"]))
    model = Exact(spy)
    write(model, [PROMPTS[0] + [1] * 5, PROMPTS[1]], NGram(10, 1), seeds=[1, 2])
    write(model, PROMPTS[:2], SelfDraft(model, range(8), 3), seeds=[1, 2])
    assert spy.seen == {(1, 8, 60, 8)}


def test_in_c_all_passes_are_made_of_the_loops(monkeypatch):
    """Even prompts and batches."""
    m = exactly(make(LIVELY["llama"]).float())
    monkeypatch.setattr(m.model, "run", pytest.fail)
    assert isinstance(m, FewRows)
    write(m, [PROMPTS[0] + [1] * 20, PROMPTS[1]], SelfDraft(m, range(8), 3), seeds=[1, 2])
    assert isinstance(exactly(make(LIVELY["llama"])), Exact), "float64"


@each_family
def test_a_text_is_the_same_alone_and_in_any_company(plain, mode, family, dtype):
    m = mode(make(LIVELY[family]).to(dtype))
    for probs in to_probs, warm:
        others = write(m, PROMPTS[::-1], None, probs, SEEDS[::-1])
        assert same(plain(family, probs), others[::-1])
        for b in (0, 2):        # a long prompt, and one of a single token
            assert same([others[~b]], write(m, [PROMPTS[b]], None, probs, [SEEDS[b]]))


@each_family
def test_near_the_end_of_the_context(mode, family, dtype):
    """Dead rows go to a dead slot."""
    m = mode(make(LIVELY[family]).to(dtype))
    prompts = [PROMPTS[0] * 7, PROMPTS[1]]
    plain = write(m, prompts, probs=warm, seeds=[1, 2], slots=72)
    assert len(plain[0][0]) == 8
    assert same(plain, write(m, prompts, WAYS["exit"](m), warm, [1, 2], slots=72))


@pytest.mark.parametrize("dtype, family", [(torch.float32, "llama"), (torch.bfloat16, "gemma2")],
                         indirect=["dtype"], ids=str)
def test_recorded_passes_are_exact_too(family, dtype):
    m = make(LIVELY[family]).to(dtype)
    recorded = Recorded(m, Session([simulated], pytest.fail), widths=(8,))
    fast = Exact(recorded)
    recorded.session.open = True
    plain = write(fast, PROMPTS, probs=warm)
    assert fast.replays()
    for name in ("half a block", "eagle"):
        for recorded.session.open in (True, False):     # recorded, replayed
            assert same(plain, write(fast, PROMPTS, WAYS[name](fast), warm)), name


def test_a_tree_is_refused(mode):
    m = mode(make(LIVELY["llama"]).float())
    with pytest.raises(ValueError, match="tree"):
        write(m, PROMPTS, Siblings(SelfDraft(m, range(8), 3), [2, 1]))


# --- the race


def test_the_law_of_a_race():
    g = torch.Generator().manual_seed(0)
    places = torch.arange(40_000)[None]
    for p in torch.rand(6, 5, generator=g, dtype=torch.float64).softmax(-1) ** 3:
        p /= p.sum()
        often = Race(9).settle(p.expand(1, 40_000, 5), places).mean(1)[0]
        assert (often - p).abs().max() < 0.01, "each token wins as often as p says"


def test_a_draft_by_the_model_itself_wins_every_race():
    m = make(LIVELY["llama"])
    for _, r in rounds(m, PROMPTS, 20, SelfDraft(m, range(12), 3), warm, Race(SEEDS)):
        assert r.accepted.equal(r.proposed)
