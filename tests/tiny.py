"""What the tests share: tiny random models of both families in float64, ragged prompts, an oracle, and the
enumerator of every outcome of the production loop."""

import resource
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from model import Config, Transformer
from sampling import Coins
from speculative import Draft, Round

torch.set_num_threads(1)  # these models are too small to share
DEVICES = ["cpu", "cuda"]  # conftest.py: of paper, where there is none

LLAMA = Config(vocab_size=17, dim=32, n_layers=6, n_heads=4, n_kv_heads=2, head_dim=8, hidden_dim=48,
               max_len=64)
GEMMA = replace(LLAMA, head_dim=16, tied=True, act="gelu", norm_offset=1.0, embed_scale=32**0.5,
                post_norm=True, query_scale=24**-0.5, attn_softcap=50.0, final_softcap=30.0, window=5)
FAMILIES = {"llama": LLAMA, "gemma2": GEMMA}
LIVELY = {"llama": LLAMA, "gemma2": replace(GEMMA, embed_scale=0.7)}  # else Gemma repeats itself
each_family = pytest.mark.parametrize("family", FAMILIES)
devices = pytest.mark.parametrize("device", DEVICES)
PROMPTS = [[1, 5, 3, 2, 9, 4, 4, 7], [3, 8], [2], [1, 2, 3, 1, 2, 3, 1, 2]]  # one of them a single token


def make(c, seed=0, device="cpu"):
    """A random model with logits far enough apart that float64 never meets a tie."""
    torch.manual_seed(seed)
    m = Transformer(c).double()
    for p in m.parameters():
        torch.nn.init.normal_(p.data, std=0.35 if p.dim() > 1 else 0.1)
        if p.dim() == 1:
            p.data += 1 - c.norm_offset
    return m.requires_grad_(False).eval().to(device)


@torch.no_grad()
def oracle(m, prompt, count):
    """Greedy decoding in four lines, without a cache: shares no code with the loop."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(m(torch.tensor([ids], device=m.tok.device))[0, -1].argmax()))
    return ids[len(prompt) :]


class Branch(Coins):
    """Coins that take a prescribed path through all decisions and multiply up its probability."""

    def __init__(self, path):
        self.path, self.i, self.weight, self.arity = path, 0, 1.0, []

    def pick(self, weights):
        weights = weights / weights.sum()
        live = weights.nonzero()[:, 0]
        if self.i == len(self.path):
            self.path.append(0)
        self.arity.append(len(live))
        chosen = live[self.path[self.i]]
        self.i += 1
        self.weight *= float(weights[chosen])
        return chosen

    def flip(self, prob):
        heads = [self.pick(torch.stack([1 - a, a])) for a in prob.nan_to_num(0.0).clamp(max=1).flatten()]
        return torch.tensor([bool(h) for h in heads], device=prob.device).view(prob.shape)

    def choose(self, weights):
        rows = weights.reshape(-1, weights.shape[-1])
        return torch.stack([self.pick(row) for row in rows]).view(weights.shape[:-1])


def law(run, branch=Branch):
    """{outcome: probability} over every path that run(coins) can take."""
    got, path = {}, []
    while True:
        coins = branch(path)
        outcome = run(coins)
        got[outcome] = got.get(outcome, 0.0) + coins.weight
        path = path[: coins.i]
        while path and path[-1] == coins.arity[len(path) - 1] - 1:
            path.pop()
        if not path:
            return got
        path[-1] += 1


def tree(folder):
    """All that a folder holds, to see that nothing was changed."""
    return {str(p): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


@contextmanager
def full_disk(size):
    """Inside, no file can be written beyond this size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def make_round(new, accepted, proposed, tokens=None, q=None, vocab=9):
    """A Round of given outcome, with p the same everywhere."""
    B, K = len(new), max([*proposed, *(len(row) for row in tokens or [])])
    tokens = torch.tensor(tokens) if tokens else torch.zeros(B, K, dtype=torch.long)
    p = torch.full((B, K + 1, vocab), 1 / vocab)
    accepted, proposed = torch.tensor(accepted), torch.tensor(proposed)
    sure = [[1 / vocab] * len(row) for row in new]
    return Round(Draft(tokens, q, proposed), p.log(), p, accepted, proposed, new, sure, {})
