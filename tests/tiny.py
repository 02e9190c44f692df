"""What the tests share: tiny random models of both families in float64, ragged prompts, an oracle,
the enumerator of every outcome of the production loop, rules and coins whose answers are given."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter import Draft, Rule
from kvcache import KVCache, prefill
from machine.recorded import Session
from machine.tapes import simulated
from model import Config, Placement, Transformer
from sampling import Coins, to_probs
from speculative import Round, State, rounds
from support.page import Player

torch.set_num_threads(1)  # these models are too small to share
DEVICES = ["cpu", "cuda"]  # conftest.py: a simulated one, where there is none

LLAMA = Config(vocab_size=17, dim=32, n_layers=6, n_heads=4, n_kv_heads=2, head_dim=8,
               hidden_dim=48, max_len=64)
GEMMA = replace(LLAMA, head_dim=16, tied=True, act="gelu", norm_offset=1.0, embed_scale=32**0.5,
                post_norm=True, query_scale=24**-0.5, attn_softcap=50.0,
                final_softcap=30.0, window=5)
GEMMA3 = replace(GEMMA, attn_softcap=None, final_softcap=None, global_every=3, local_theta=100.0,
                 qk_norm=True)
FAMILIES = {"llama": LLAMA, "gemma2": GEMMA}
QWEN = {"qwen2": replace(LLAMA, qkv_bias=True), "qwen3": replace(LLAMA, head_dim=12, qk_norm=True)}
LIVELY = {"llama": LLAMA, "gemma2": replace(GEMMA, embed_scale=0.7)}  # else Gemma repeats itself
# families of which each test of a machine or a file takes one more, but not every promise
MORE = QWEN | {"gemma3": replace(GEMMA3, embed_scale=0.7)}
TINY = Config(vocab_size=3, dim=16, n_layers=3, n_heads=2, n_kv_heads=1, head_dim=8, hidden_dim=24,
              max_len=32)
# for exact laws
TINY_GEMMA = replace(TINY, tied=True, act="gelu", norm_offset=1.0, embed_scale=4.0, post_norm=True,
                     query_scale=0.3, attn_softcap=5.0, final_softcap=3.0, window=2)
TINY_GEMMA3 = replace(TINY_GEMMA, attn_softcap=None, global_every=3, local_theta=9.0, qk_norm=True)
each_family = pytest.mark.parametrize("family", FAMILIES)
# one of them a single token
PROMPTS = [[1, 5, 3, 2, 9, 4, 4, 7], [3, 8], [2], [1, 2, 3, 1, 2, 3, 1, 2]]


def make(c, seed=0, device="cpu"):
    """A random model with logits far enough apart that float64 never meets a tie."""
    torch.manual_seed(seed)
    m = Transformer(c).double()
    for p in m.parameters():
        torch.nn.init.normal_(p.data, std=0.35 if p.dim() > 1 else 0.1)
        if p.dim() == 1:
            p.data += 1 - c.norm_offset
    return m.requires_grad_(False).eval().to(device)


def small(m, seed=5):
    """A draft model for m."""
    return make(replace(m.c, n_layers=2), seed, m.tok.device)


@torch.no_grad()
def oracle(m, prompt, count):
    """Greedy decoding in four lines, without a cache: shares no code with the loop."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(m(torch.tensor([ids], device=m.tok.device))[0, -1].argmax()))
    return ids[len(prompt) :]


def read(m, ids, taps=(), cache=None, sublayers=None):
    """One pass over a text: its states (1, T, dim), and those after each of these sub-layers."""
    x, trace = m.embed(torch.tensor([ids], device=m.tok.device)), dict.fromkeys(taps)
    return m.run(x, Placement.span(0, len(ids)), cache, sublayers, trace=trace), trace


def a_tree(m):
    """A root, two children and a grandchild in each of two texts, the second of which is a single
    token: (x (2, 4, dim), its Placement, two caches that hold what is before it)."""
    sees = torch.tensor([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]], dtype=bool)
    places = torch.tensor([[6, 7, 7, 8], [0, 1, 1, 2]])
    at = Placement(places, places[:, :1] + torch.arange(4), 0, 10, sees)
    caches = [KVCache(m.c, 2, 24, m.attention_dtype()) for _ in range(2)]
    for cache in caches:
        prefill(m, torch.arange(12).view(2, 6) % 17, cache)
    return m.embed(torch.tensor([[3, 7, 1, 9], [5, 2, 2, 8]])), at, caches


def warm(logits):
    return to_probs(logits, 1.0)


def wide(rows):
    return torch.tensor(rows, dtype=torch.float64)


class Says(Rule):
    """As far as given: a number, a list of one for each row, or a function of the state;
    and a stop rule."""

    def __init__(self, gamma, stop=None):
        super().__init__(0)
        self.how_far = gamma if callable(gamma) else lambda state: gamma
        self.stop = stop


class Unsure(Rule):
    """End a row where the most likely token has less than .6."""

    def stop(self, k, logits, token):
        return (logits.softmax(-1).amax(-1) < 0.6).tolist()


class Fixed(Coins):
    """Coins whose uniforms are known."""

    def __init__(self, *uniforms):
        self.uniforms = wide(uniforms)

    def take(self, count, device):
        taken, self.uniforms = self.uniforms[:count], self.uniforms[count:]
        assert len(taken) == count
        return taken.to(device)


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
        heads = [self.pick(torch.stack([1 - a, a]))
                 for a in prob.nan_to_num(0.0).clamp(max=1).flatten()]
        return torch.tensor(heads, dtype=torch.bool, device=prob.device).view(prob.shape)

    def choose(self, weights):
        rows = weights.reshape(-1, weights.shape[-1])
        return torch.stack([self.pick(row) for row in rows]).view(weights.shape[:-1])


def law(run):
    """{outcome: probability} over every path that run(coins) can take."""
    got, path = {}, []
    while True:
        coins = Branch(path)
        outcome = run(coins)
        got[outcome] = got.get(outcome, 0.0) + coins.weight
        path = path[: coins.i]
        while path and path[-1] == coins.arity[len(path) - 1] - 1:
            path.pop()
        if not path:
            return got
        path[-1] += 1


def plant(parents, law_at, coins):
    """A tree whose siblings are drawn without replacement from law_at(tokens on the way to them).
    Returns its tokens, what each was drawn from, and the way to each node."""
    tokens, q, way = [], [], [()]
    for k, parent in enumerate(parents):
        left = law_at(way[parent]).clone()
        left[[tokens[other] for other in range(k) if parents[other] == parent]] = 0
        q.append(left / left.sum())
        tokens.append(int(coins.choose(q[-1])))
        way.append((*way[parent], tokens[-1]))
    return tokens, q, way


def opened():
    """A Session of simulated recordings, in which whatever is new is recorded."""
    session = Session([simulated], pytest.fail)
    session.open = True
    return session


def tree(folder):
    """All that a folder holds."""
    return {str(p): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def state_of(known, left, probs=warm, coins=None):
    """The State of a loop without a model, between two rounds."""
    S = max(map(len, known)) + 9
    tokens = torch.tensor([text + [0] * (S - len(text)) for text in known])
    n = torch.tensor([len(text) for text in known])
    return State(tokens, n, known, left, None, None, probs, coins, ())


def make_round(new, accepted, proposed):
    """A Round of given outcome, with nothing drafted and p the same everywhere."""
    tokens = torch.zeros(len(new), max(proposed), dtype=torch.long)
    p = torch.full((len(new), max(proposed) + 1, 9), 1 / 9)
    accepted, proposed = torch.tensor(accepted), torch.tensor(proposed)
    return Round(Draft(tokens, None, proposed), p.log(), p, {}, accepted, proposed, new)


def play(model, tokenizer, prompt, max_new, drafter=None, probs=to_probs, seed=0, eos=()):
    """A whole run of one prompt, a list of ids, as a Player."""
    player = Player(tokenizer, prompt, seed)
    for state, r in rounds(model, [prompt], max_new, drafter, probs, player.coins, eos):
        player.add(state, r)
    return player


class Command:
    """A command's `main`, called within a test."""

    def __init__(self, main, capsys):
        self.main, self.capsys = main, capsys

    def __call__(self, *argv):
        """(status, standard output, standard error)"""
        return self.main([str(word) for word in argv]), *self.capsys.readouterr()

    def refuses(self, argv, folder, *words):
        """Status 2, and one line that names program and cause; and the folder is as it was."""
        before = tree(folder)
        status, out, err = self(*argv)
        assert (status, out) == (2, "") and err.count("\n") == 1 and err.endswith("\n"), (
            status, out, err)
        *package, program = self.main.__module__.split(".")
        program = ".".join(package) if program == "__main__" else f"{program}.py"
        assert err.startswith(f"{program}: ") and all(str(word) in err for word in words), err
        assert tree(folder) == before, "something was written or lost"


def command(main):
    """A fixture that gives this Command."""
    return pytest.fixture(lambda capsys: Command(main, capsys))


def argv_of(given):
    """The command line of {flag: value}; None leaves a flag out, True stands alone,
    a list is many words."""
    line = []
    for name, value in given.items():
        values = value if isinstance(value, list) else [] if value is True else [value]
        line += [f"--{name.replace('_', '-')}", *map(str, values)] if value is not None else []
    return line


def shard(folder, count):
    """Spread a checkpoint's weights over several files, with an index, as large models come.
    Its path."""
    tensors = load_file(folder / "model.safetensors")
    where = {key: f"model-{i % count + 1:05}-of-{count:05}.safetensors"
             for i, key in enumerate(tensors)}
    for file in sorted(set(where.values())):
        save_file({key: t.clone() for key, t in tensors.items() if where[key] == file},
                  folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": where}))
    (folder / "model.safetensors").unlink()
    return index
