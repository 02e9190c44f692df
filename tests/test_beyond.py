"""The last four systems as they are trained and measured: streams that teach their model, how often a sparse
draft is accepted, figures on paper, and the command as a whole."""
import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from test_heads import wild
from tiny import LLAMA, PROMPTS, each_family, make, story, story_tokenizer, warm

import bench
import checkpoint
import train
from benchmarks import beyond
from benchmarks.beyond import Streams, counted, own_text, prophet, sparse_acceptance, stream_losses, taught
from benchmarks.shared import WEIGHTS
from control import weight_costs
from layerskip import Teacher
from methods import heads
from methods.heads import Transfer
from methods.sparse import SparseDraft, step_cost
from speculative import Wrapper, generate, rounds
from support import corpus
from support.stats import Counts
from train_heads import OWN

DRAFT = WEIGHTS / "stories-draft"
TINY_SHAPE = {"layers": 2, "dim": 32, "heads": 2, "kv-heads": 1, "head-dim": 8, "hidden": 48,
              "context": 32, "batch": 4, "warmup": 2}


@pytest.fixture(scope="module")
def text():
    tokenizer = story_tokenizer()
    stream = corpus.stream(tokenizer, story(0).split(corpus.BOUNDARY))
    return corpus.split({OWN: stream}, {}, [1.0], tokenizer, beyond.CONTEXT)


# --- streams


@each_family
def test_streams_say_in_training_what_a_transfer_says(models, family):
    """Of each token the next by the model itself, which does not see the streams, and later ones by the rows,
    as the head says them when it drafts."""
    m = models[family]
    batch = torch.tensor([[1, 5, 3, 2, 9, 4, 4, 7, 7, 2], [3, 8, 8, 1, 2, 2, 16, 0, 4, 4]])
    head = wild(Transfer(m, 0, 2))
    got = [float(loss.detach()) for loss in stream_losses(m, head, batch)]
    assert len(got) == 3 and got[0] == pytest.approx(float(train.losses(m, batch, range(12))[0]))
    for k, (said, _) in enumerate(heads.judged(head, batch[:, :-1]), 1):
        want = F.cross_entropy(said.flatten(0, 1), batch[:, 1 + k :].flatten())
        assert got[k] == pytest.approx(float(want.detach()))


def test_the_streams_teach_what_they_read():
    """Keys and values of the first block, and the embeddings, learn from a row's loss alone. The rows are
    those of ProphetNet: what they start from does not depend on the token."""
    m = make(LLAMA)
    head = wild(Transfer(m, 0, 2))
    head.weights.matrix.data.zero_()
    m.requires_grad_(True)
    batch = torch.tensor([PROMPTS[0]])
    stream_losses(m, head, batch)[2].backward()
    rows = m.blocks[0].attn.wqkv.grad.view(2, 4, 8, 32)                         # two queries, key, value
    assert (rows[:, 2].abs().amax((1, 2)) > 0).all() and (rows[:, 3].abs().amax((1, 2)) > 0).all()
    assert m.tok.grad[PROMPTS[0][0]].abs().max() > 0


def test_a_run_with_streams_differs_in_the_streams_only(text):
    """The same model at the start, the same batches, and at the end a better one, and streams that learnt."""
    runs = {n: prophet(text, torch.device("cpu"), n, 1, 2 * 4 * 32, TINY_SHAPE) for n in (1, 3)}
    assert runs[1].steps == runs[3].steps == 2 and type(runs[1]) is train.Run
    assert runs[1].losses[0][0] == pytest.approx(runs[3].losses[0][0], rel=1e-5)
    assert runs[1].losses[1][0] != runs[3].losses[1][0], "the streams changed the first step"
    fresh = Transfer(runs[3].model, 0, 2).weights
    for p, q in zip(runs[3].head.weights.parameters(), fresh.parameters(), strict=True):
        assert (p != q).any(), "the streams learnt"
    long = prophet(text, torch.device("cpu"), 3, 1, 40 * 4 * 32, TINY_SHAPE)
    held_out = text.valid[OWN]
    first, last = ([float(x.detach()) for x in stream_losses(r.model, r.head, held_out[None, :129].long())]
                   for r in (runs[3], long))
    assert all(b < 0.8 * a for a, b in zip(first, last, strict=True))
    assert isinstance(long, Streams) and long.model.c.n_layers == 2


def test_the_noise_of_seeds_is_paired():
    """Both move a lot from seed to seed, and the change not at all."""
    mean, error, noise = beyond.seed_noise({"1": [1.0, 2.0, 3.0], "3": [0.5, 1.5, 2.5]})
    assert (mean, error, noise) == (-0.5, 0.0, 1.0)
    assert beyond.seed_noise({"1": [1.0, 1.0, 1.0], "3": [1.0, 2.0, 3.0]})[1] == pytest.approx(3 ** -0.5)


# --- heads, counts


def test_a_head_is_taught(text):
    m = make(replace(LLAMA, vocab_size=300, n_layers=2, max_len=128, bos=0)).float()
    before = {name: p.clone() for name, p in m.named_parameters()}
    head = taught(m, text, 3 * 8 * 128, "m2r2", "--exit-layer", "1", "--rank", "2")
    assert head.kind == "m2r2" and head.shape == {"exit_layer": 1, "rank": 2, "align": 0.1}
    assert head.weights.up.abs().max() > 0 and all(torch.equal(before[k], p) for k, p in m.named_parameters())
    written = own_text(m, text.tokenizer, 900, 300, length=40)
    (learnt,), (measured,) = written.train.values(), written.valid.values()
    assert len(learnt) >= 900 and len(measured) >= 300 and not torch.equal(learnt[:300], measured[:300])
    assert written.batch(0, 0, 2, beyond.CONTEXT).shape == (2, beyond.CONTEXT + 1)


def test_a_speed_by_weights_is_that_of_rounds():
    """By hand: 10 rounds that wrote 25 tokens and drafted 30, of which 15 were accepted."""
    counts = Counts(passes=10, turns=10, tokens=25, drafted=10, hits=9, proposed=30, accepted=15)
    assert counted(counts, lambda K: 0.1 * K) == {
        "drafted": 3.0, "accepted": 0.5, "tau": 2.5, "by_weights": pytest.approx(2.5 / 1.3)}


# --- HAMburger


@each_family
def test_a_cooled_model_says_at_temperature_1_what_the_model_says_at_another(models, family):
    m = models[family]
    cold, tokens = beyond.cooled(m, 0.5), torch.tensor([PROMPTS[0]])
    if family == "llama":
        assert torch.allclose(cold(tokens), 2 * m(tokens))
    assert (cold(tokens).argmax(-1) == m(tokens).argmax(-1)).all() and cold.blocks is not m.blocks
    entropies = [float(torch.distributions.Categorical(logits=x(tokens)).entropy().mean()) for x in (cold, m)]
    assert entropies[0] < 0.8 * entropies[1]


# --- the sparse draft


@each_family
@pytest.mark.parametrize("sinks, window", [(2, 3), (0, 1), (1, 4)])
def test_sparse_acceptance_is_that_of_the_first_draft(models, family, sinks, window):
    """Position by position: what the drafter draws its first token from after that prompt."""
    m, ids = models[family], [1, 5, 3, 2, 9, 4, 4, 7, 7, 2, 11, 6]
    got = sparse_acceptance(Teacher(m, ids, warm), sinks, window)
    for n in range(1, len(ids) + 1):
        _, r = next(rounds(m, [ids[:n]], 3, SparseDraft(m, 1, sinks, window), warm))
        assert float(got[n - 1]) == pytest.approx(float(torch.minimum(r.p[0, 0], r.draft.q[0, 0]).sum()))
    assert float(got[-1]) < 1 - 1e-6


def test_a_window_over_everything_is_always_accepted():
    m = make(LLAMA)
    teacher = Teacher(m, PROMPTS[0], warm)
    assert sparse_acceptance(teacher, 0, 8).tolist() == pytest.approx([1.0] * 8)
    assert (sparse_acceptance(teacher, 4, 4) > 1 - 1e-9).tolist() == [True] * 8, "4 and 4 are all 8"
    assert float(sparse_acceptance(teacher, 3, 4)[7]) < 1 - 1e-6


def test_the_paper_by_hand():
    """Llama 3 8B: 32 blocks, 8 KV heads of 128, bfloat16: 128 KiB a token; and 15 GB of weights a pass."""
    rows = {r["tokens"]: r for r in beyond.paper()}
    assert list(rows) == [1024 * 2**k for k in range(8)]
    assert rows[131072]["cache"] == 131072 * 131072
    assert rows[131072]["unread"] == (131072 - 1024 - 4 + 1) * 131072 and rows[1024]["unread"] == 0
    assert rows[1024]["weights"] == pytest.approx(15.0e9, rel=0.01)
    r = rows[131072]
    assert r["c"] == pytest.approx((r["weights"] + r["cache"] - r["unread"]) / (r["weights"] + r["cache"]))
    assert r["c"] == step_cost(weight_costs(beyond.LARGE), 131072, 4, 1024)
    gains = [rows[n]["promise"]["0.9"][1] for n in rows]
    assert gains[0] == 1.0 and gains == sorted(gains) and gains[-1] > 1.3, "it grows with the text"


def test_the_texts_are_long_and_of_one_length():
    _, tokenizer = checkpoint.load(DRAFT)
    c = replace(LLAMA, max_len=512, bos=0)
    texts = beyond.long_texts(tokenizer, c, 4)
    assert [len(ids) for ids in texts] == [256] * 4 and len({tuple(ids) for ids in texts}) == 4
    assert {len(ids) for ids in beyond.long_texts(tokenizer, replace(c, max_len=64), 9)} == {64}
    assert 130 < len(beyond.long_texts(tokenizer, c, 32)[0]) < 256, "as long as the shortest of all 32"


# --- the command


@pytest.fixture
def little(monkeypatch):
    monkeypatch.setattr(beyond, "QUICK", beyond.Sizes(600, 1024, 1024, 2, 2, 200))


def test_the_whole_command(little, capsys, monkeypatch, tmp_path):
    """Two blocks of stories-draft, with itself as its twin, and a step or two of everything. Each drafter
    writes the text of plain decoding."""
    same, counts = [], beyond.written

    class Kept(Wrapper):
        def observe(self, state, r):
            super().observe(state, r)
            self.known = state.known

    def written(model, prompts, drafter, new):
        kept = Kept(drafter)
        found = counts(model, prompts, kept, new)
        plain, _ = generate(model, prompts, new, eos=model.c.eos)
        same.append(kept.known == [ids + more for ids, more in zip(prompts, plain, strict=True)])
        return found

    monkeypatch.setattr(beyond, "written", written)
    (tmp_path / "twin").symlink_to(DRAFT)
    words = "--model", str(DRAFT), "--twin", str(tmp_path / "twin"), "--quick", "--new", "8", "--json"
    assert bench.main(["beyond", *words]) == 0
    data = json.loads(capsys.readouterr().out)
    assert all(same) and len(same) == 2 * 5 + 2 + 4 + 4
    assert set(data["m2r2"]) == {str(DRAFT), str(tmp_path / "twin")}
    rows = data["m2r2"][str(DRAFT)]
    assert list(rows) == [f"exit 1, {name}" for name in (
        "no adapters", "Kangaroo", "M2R2", "M2R2, no alignment", "M2R2, gate")]
    assert rows["exit 1, M2R2"]["weights"] == pytest.approx(rows["exit 1, Kangaroo"]["weights"], rel=0.1)
    assert [r["rows"] for r in rows.values()] == [1, 1, 2, 2, 2]
    assert len(data["prophet"]["1"]) == len(data["prophet"]["3"]) == len(data["prophet"]["streams"]) == 2
    assert set(data["prophet"]["drafts"]) == {"with the model", "later"}
    assert data["hamburger"]["2.0"]["tokens"] == 1 <= data["hamburger"]["0.5"]["tokens"]
    assert set(data["sparse"]) == {"8", "16", "32", "64"}
    assert all(0 <= r["alpha"] <= 1 <= r["tau"] for r in data["sparse"].values())


def test_its_tables_say_what_was_found():
    found = {"1": [2.0, 3.0], "3": [1.5, 2.75], "streams": [[0.5, 0.25], [0.7, 0.35]],
             "drafts": {"later": {"drafted": 2.0, "accepted": 0.5, "tau": 1.75, "by_weights": 1.5}}}
    lines = "\n".join(beyond.prophet_lines(found))
    assert "| 3 | 1.5000 | 2.7500 |" in lines and "by -0.3750 (standard error 0.1250)" in lines
    assert "60% and 30% of the places" in lines and "| later | 2.00 | 0.50 | 1.75 | 1.50 |" in lines
    row = {"alpha": 0.9, "no_sinks": 0.5, "overlap": 0.75, "unread": 0.125, "tau": 3.25}
    lines = "\n".join(beyond.sparse_lines({"16": row}, beyond.paper()[-1:]))
    assert "| 16 | 0.900 | 0.500 | 0.750 | 12% | 3.25 |" in lines
    assert "| 131,072 | 32.2 | 17.2 | 17.0 |" in lines


@pytest.mark.parametrize("L, quick, want", [(12, False, [2, 1, 3]), (24, False, [4, 2, 6]), (24, True, [4]),
                                            (2, False, [1])])
def test_the_exits(L, quick, want):
    assert beyond.exits_of(L, quick) == want
