"""What a sparse draft reads, how often it is accepted, what it is worth by bytes; streams that
teach their model; and `lab.bench beyond` as a whole."""
import itertools
from copy import deepcopy
from dataclasses import replace

import promises
import pytest
import torch
import torch.nn.functional as F
from test_heads import Turns, wild
from tiny import PROMPTS, TINY, TINY_GEMMA, Unsure, each_family, warm

from control import Costs, expected_tokens
from drafter import NGram
from lab import train
from lab.bench import __main__ as bench
from lab.bench import beyond
from lab.bench.shared import WEIGHTS
from lab.sparse import SparseDraft, step_cost, unread
from lab.train_heads import judged
from lab.transfer import Transfer
from layerskip import SelfDraft
from methods.trees import Siblings
from sampling import Coins
from search import Teacher
from speculative import rounds

test_greedy_identity = promises.greedy_identity({
    "siblings": lambda m: Siblings(SparseDraft(m, 3, 1, 2), [3, 1]),
    "in turns": lambda m: Turns(SparseDraft(m, 3, 1, 3), SelfDraft(m, range(8), 3), NGram(3, 1))})
test_poison = promises.poison({"sparse": lambda m: SparseDraft(m, 4, 1, 3)})
test_one_wait_per_round = promises.one_wait_a_round({"sparse": lambda m: SparseDraft(m, 4, 1, 3)})
test_exact_law = promises.exact_law({
    "siblings": (TINY, lambda m: Siblings(SparseDraft(m, 1, 0, 1), [1])),
    "gemma2": (TINY_GEMMA, lambda m: SparseDraft(m, Unsure(2), 1, 1))}, count=2)


@each_family
@pytest.mark.parametrize("sinks, window", [(2, 3), (0, 2), (1, 99)])
def test_a_draft_reads_its_sinks_and_its_window_and_nothing_else(models, family, sinks, window):
    """Spoil one slot after the other. The draft changes if it is to read it, and
    otherwise not a bit."""
    m = models[family]
    state, _ = next(rounds(m, PROMPTS, 9))
    drafter, cache = SparseDraft(m, 1, sinks, window), state.cache
    drafter.begin(state, {})

    def drafted():
        now = replace(state, cache=deepcopy(state.cache), coins=Coins(0), probs=warm)
        return drafter.propose(now).q

    want = drafted()
    for j in range(max(map(len, state.known)) - 1):
        state.cache = deepcopy(cache)
        state.cache.v[:, :, :, j] += 3.0
        changed = (drafted() != want).flatten(1).any(1).tolist()
        for text, was in zip(state.known, changed, strict=True):
            own = len(text) - 1
            assert was == (j < own and (j < sinks or own - j < window)), (j, len(text))


@each_family
def test_sparse_acceptance_is_that_of_the_first_draft(models, family):
    """At each position it is what the drafter draws its first token from after that prompt."""
    m, ids = models[family], [1, 5, 3, 2, 9, 4, 4, 7, 7, 2]
    for sinks, window in ((2, 3), (0, 1)):
        got, want = beyond.sparse_acceptance(Teacher(m, ids, warm), sinks, window), []
        for n in range(1, len(ids) + 1):
            _, r = next(rounds(m, [ids[:n]], 3, SparseDraft(m, 1, sinks, window), warm))
            want.append(float(torch.minimum(r.p[0, 0], r.draft.q[0, 0]).sum()))
        assert got.tolist() == pytest.approx(want) and want[-1] < 1 - 1e-6


@pytest.mark.parametrize("own_window", [None, 6])
def test_what_is_not_read_is_counted(own_window):
    """Token by token, attention by attention."""
    costs = Costs((5.0, 7.0) * 4, 3.0, slot=2.0, window=own_window)
    for n, sinks, window in itertools.product((0, 4, 9, 20), (0, 3), (1, 2, 5, 30)):
        hidden = 0
        for i, j in itertools.product((0, 2, 4, 6), range(n)):
            reach = own_window if own_window and i in (0, 4) else 99
            hidden += n - j < reach and not (j < sinks or n - j < window)
        assert unread(costs, n, sinks, window) == 2.0 * hidden


def test_what_it_is_worth_by_hand():
    """A step reads 3 + 5 numbers of weights per block, the head, and 2 numbers per token and block.
    Llama 3.1 8B: 32 blocks, 8 KV heads of 128, bfloat16: 128 KiB per token; 15 GB of weights."""
    costs = Costs((3.0, 5.0, 3.0, 5.0), 4.0, slot=2.0)
    assert step_cost(costs, 100, 4, 17) == (20 + 2 * 2 * 20) / (20 + 2 * 2 * 100)
    rows = {r["tokens"]: r for r in beyond.paper()}
    assert rows[1024]["unread"] == 0 and rows[1024]["promise"]["0.9"] == (0, 1.0)
    r = rows[131072]
    assert r["cache"] == 131072 * 131072 and r["unread"] == (131072 - 1024 - 4 + 1) * 131072
    assert r["weights"] == pytest.approx(15.0e9, rel=0.01)
    assert r["c"] == pytest.approx(1 - r["unread"] / (r["weights"] + r["cache"]))
    gains = [expected_tokens(0.9, g) / (g * r["c"] + 1) for g in range(12)]
    assert r["promise"]["0.9"] == (gains.index(max(gains)), pytest.approx(max(gains)))


@each_family
def test_streams_say_in_training_what_a_transfer_says(models, family):
    """The next token by the model itself, without the streams; later ones as the head drafts."""
    m, head = models[family], wild(Transfer(models[family], 0, 2))
    batch = torch.tensor([[1, 5, 3, 2, 9, 4, 4, 7, 7, 2], [3, 8, 8, 1, 2, 2, 16, 0, 4, 4]])
    want = [train.losses(m, batch, range(12))[0], *(
        F.cross_entropy(logits.flatten(0, 1), batch[:, 1 + k :].flatten())
        for k, (logits, _) in enumerate(judged(head, batch[:, :-1]), 1))]
    torch.testing.assert_close(torch.stack(beyond.stream_losses(m, head, batch)), torch.stack(want))


def test_the_whole_command(monkeypatch):
    """Two blocks of stories-draft, and a step or two of everything."""
    monkeypatch.setattr(beyond, "SIZES", beyond.Sizes(300, 1024, 1024, 2, 1, 130))
    monkeypatch.setattr(beyond, "CONFIDENCES", (0.5, 2.0))
    argv = ["beyond", "--model", str(WEIGHTS / "stories-draft"), "--quick", "--new", "8"]
    _, data = beyond.run(bench.parse(argv))
    rows, = data["m2r2"].values()
    m2r2, kangaroo = rows["exit 1, M2R2"]["weights"], rows["exit 1, Kangaroo"]["weights"]
    assert m2r2 == pytest.approx(kangaroo, rel=0.1) and len(rows) == 4, "as many weights"
    assert data["hamburger"]["2.0"]["tokens"] == 1 <= data["hamburger"]["0.5"]["tokens"]
    assert all(0 <= r["alpha"] <= 1 <= r["tau"] for r in data["sparse"].values())
