"""What a GPU may compute otherwise than a CPU, on CUDA where there is one, else on the simulated
GPU."""
from copy import deepcopy
from functools import partial

import promises
import pytest
import torch
from paper_gpu import Paper
from tiny import FAMILIES, LIVELY, PROMPTS, each_family, make

from control import Confidence
from layerskip import SelfDraft
from machine.recorded import Recorded, Session
from machine.tapes import joined, program, simulated
from methods.block import verify_block
from methods.eagle import Eagle
from methods.jump import Jump
from methods.kangaroo import Kangaroo
from methods.lookup import NGram, Suffix
from methods.medusa import Medusa
from methods.trees import Siblings
from sampling import Coins, to_probs, uniforms
from speculative import generate, rounds
from verification import verify

# how far logits may be from float64 ones of the same weights, root mean square.
# trap: TF32 is off by 1e-3
NEAR = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 8e-3, torch.bfloat16: 6e-2}
WAYS = {"plain": lambda m: None, "exit": lambda m: SelfDraft(m, range(8), 3),
        "gap": lambda m: SelfDraft(m, [0, 1, 2, 5, 6, 9], 4), "n-gram": lambda m: NGram(4, 2),
        "suffix": lambda m: Suffix(5), "stop": lambda m: SelfDraft(m, range(8), Confidence(0.3, 4)),
        "siblings": lambda m: Siblings(SelfDraft(m, range(8), 3), [2, 1]),
        "eagle": lambda m: Eagle(m).drafter(3), "kangaroo": lambda m: Kangaroo(m, 2).drafter(3),
        "jump": lambda m: Jump(m, 3).drafter(3),
        "medusa, tree": lambda m: Medusa(m, 3).drafter(3, [0, 0, 1, 3])}
on_cuda = pytest.mark.parametrize("device", ["cuda"])
test_greedy_identity = promises.greedy_identity(WAYS, on=["cuda"])


@on_cuda
@pytest.mark.parametrize("dtype", NEAR, ids=str)
@each_family
def test_logits_are_those_of_float64_on_a_cpu(family, dtype, device):
    """Of one text, and through a cache in blocks of several rows."""
    assert not torch.backends.cuda.matmul.allow_tf32
    m = make(FAMILIES[family]).to(dtype)
    truth = deepcopy(m).double()
    m = m.to(device)
    ids = torch.tensor([PROMPTS[0] * 3])
    want = truth(ids)[0, -1]
    got = m(ids.to(device))[0, -1].cpu().double()
    (_, r), *_ = rounds(m, [PROMPTS[0] * 3, PROMPTS[1]], 1)
    for logits in (got, r.logits[0, 0].cpu().double()):
        assert (logits - want).norm() < NEAR[dtype] * want.norm()


@on_cuda
def test_uniforms_and_what_is_made_of_them(device):
    """The same numbers, flips, choices and cuts as on a CPU, also among ties."""
    assert torch.equal(uniforms(3, 10, 5000, device).cpu(), uniforms(3, 10, 5000))
    seed = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 300, generator=seed, dtype=torch.float64).round(decimals=1)
    for settings in ({}, dict(temperature=0.8),
                     dict(temperature=1.0, top_k=40, top_p=0.9, min_p=0.02)):
        here = to_probs(logits, **settings)
        there = to_probs(logits.to(device), **settings)
        assert torch.equal(there.cpu() > 0, here > 0) and (there.cpu() - here).abs().max() < 1e-12
        coins, same = Coins(1), Coins(1)
        assert torch.equal(coins.flip(there[:, :3]).cpu(), same.flip(here[:, :3]))
        assert torch.equal(coins.choose(there).cpu(), same.choose(here))


@on_cuda
@pytest.mark.parametrize("judge", [verify, verify_block])
def test_drawn_texts_are_those_of_a_cpu(judge, device):
    """In float64, where no rounding decides a draw."""
    texts = []
    for place in "cpu", device:
        m = make(LIVELY["llama"], device=place)
        warm = partial(to_probs, temperature=0.9)
        texts.append(generate(m, PROMPTS, 24, WAYS["exit"](m), warm, Coins(5), verify=judge))
    assert texts[0] == texts[1]


@on_cuda
@each_family
def test_recorded_passes_write_what_eager_ones_do(family, device):
    """CUDA graphs, each checked against the eager pass;
    simulated recordings where there are none."""
    m = make(LIVELY[family], device=device)
    want, _ = generate(m, PROMPTS[:2], 12)
    ways = {joined: ("plain", "exit", "gap", "stop", "n-gram"), program: ("plain",)}
    for way, names in ways.items():
        way = simulated if isinstance(m.tok.data, Paper) else way
        fast = Recorded(m, Session([way], pytest.fail))
        for fast.session.open in (True, False):     # recorded, replayed
            for name in names:
                assert generate(fast, PROMPTS[:2], 12, WAYS[name](fast))[0] == want, name
        assert fast.replays()
