"""How often a sparse draft is accepted, and what it is worth by bytes; streams that teach their
model; and `lab.bench beyond` as a whole."""
import pytest
import torch
import torch.nn.functional as F
from test_heads import wild
from tiny import each_family, warm

from control import expected_tokens
from lab import train
from lab.bench import __main__ as bench
from lab.bench import beyond
from lab.bench.shared import WEIGHTS
from lab.sparse import SparseDraft
from lab.train_heads import judged
from lab.transfer import Transfer
from search import Teacher
from speculative import rounds


@each_family
def test_sparse_acceptance_is_that_of_the_first_draft(models, family):
    """At each position it is what the drafter draws its first token from after that prompt."""
    m = models[family]
    ids = [1, 5, 3, 2, 9, 4, 4, 7, 7, 2]
    for sinks, window in ((2, 3), (0, 1)):
        got = beyond.sparse_acceptance(Teacher(m, ids, warm), sinks, window)
        want = []
        for n in range(1, len(ids) + 1):
            _, r = next(rounds(m, [ids[:n]], 3, SparseDraft(m, 1, sinks, window), warm))
            want.append(float(torch.minimum(r.p[0, 0], r.draft.q[0, 0]).sum()))
        assert got.tolist() == pytest.approx(want) and want[-1] < 1 - 1e-6


def test_what_it_is_worth_by_hand():
    """Llama 3.1 8B has 32 blocks and 8 KV heads of 128, so 128 KiB per token in half precision."""
    rows = beyond.paper()
    assert rows["1,024"]["c"] == rows["1,024"]["speed-up if alpha is 0.9"] == 1
    r = rows["131,072"]
    assert r["of keys and values"] == pytest.approx(131072 * 131072 / 1e9)
    assert r["GB read"] - r["of keys and values"] == pytest.approx(15.0, rel=0.01)
    assert r["c"] == pytest.approx(1 - (131072 - 1024 - 4 + 1) * 131072 / 1e9 / r["GB read"])
    gains = [expected_tokens(0.9, g) / (g * r["c"] + 1) for g in range(12)]
    best = r["gamma if alpha is 0.9"], r["speed-up if alpha is 0.9"]
    assert best == (gains.index(max(gains)), pytest.approx(max(gains)))


@each_family
def test_streams_say_in_training_what_a_transfer_says(models, family):
    """The next token by the model itself, without the streams; later ones as the head drafts."""
    m = models[family]
    head = wild(Transfer(m, 0, 2))
    batch = torch.tensor([[1, 5, 3, 2, 9, 4, 4, 7, 7, 2], [3, 8, 8, 1, 2, 2, 16, 0, 4, 4]])
    want = [train.losses(m, batch, range(12))[0], *(
        F.cross_entropy(logits.flatten(0, 1), batch[:, 1 + k :].flatten())
        for k, (logits, _) in enumerate(judged(head, batch[:, :-1]), 1))]
    torch.testing.assert_close(torch.stack(beyond.stream_losses(m, head, batch)), torch.stack(want))


def test_the_whole_command(monkeypatch):
    """Two blocks of stories-draft, and a step or two of everything."""
    monkeypatch.setattr(beyond, "SIZES", beyond.Sizes(150, 1024, 2, 1, 130))
    monkeypatch.setattr(beyond, "CONFIDENCES", (0.5, 2.0))
    argv = ["beyond", "--model", str(WEIGHTS / "stories-draft"), "--quick", "--new", "8"]
    text, data = beyond.run(bench.parse(argv))
    assert data["hamburger"]["2.0"]["tokens a step alone"] == 1
    assert {"loss, seed 0", "loss, seed 1", "tau"} <= data["prophet"]["3 streams"].keys()
    assert all(0 <= r["alpha"] <= 1 <= r["tau"] for r in data["sparse"].values())
    assert text.count("\n| 1 stream |") == text.count("\n| 131,072 |") == 1
