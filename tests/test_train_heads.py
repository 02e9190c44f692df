"""Training heads: they learn, a run that is interrupted ends as one that is not, and what is refused."""
import json
import shlex
from dataclasses import replace

import pytest
import torch
from matplotlib import image
from test_train import same_end, state
from tiny import GEMMA, LLAMA, PROMPTS, argv_of, command, foreseeable, make, story, story_tokenizer

import checkpoint
import generate
import train
import train_heads
from methods import heads
from sampling import to_probs
from speculative import rounds
from support import corpus

FLAGS = {"context": 24, "batch": 8, "tokens": 2e4, "text": 4000, "lr": 0.01, "warmup": 3, "every": 1e6,
         "temperature": 0.9, "device": "cpu"}
SHORT = FLAGS | {"tokens": 960, "text": 500, "batch": 4}    # ten steps
KINDS = {"kangaroo": ["--exit-layer", "2"], "exit_block": ["--exit-layer", "2"],
         "m2r2": ["--exit-layer", "2"], "medusa": ["--heads", "2"],
         "transfer": ["--inject-layer", "3", "--steps", "2"], "prophet": [], "eagle": []}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("tame") / "model"
    checkpoint.save(foreseeable(), out, story_tokenizer())
    return out


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    out = tmp_path_factory.mktemp("gemma") / "model"
    m = make(replace(GEMMA, vocab_size=300, norm_eps=1e-6, bos=0, eos=(0,))).float()
    checkpoint.save(m, out, story_tokenizer())
    return out


def line(kind, folder, out, given=SHORT, *more):
    return [kind, *argv_of({"model": folder, "out": out, **given}), *KINDS[kind], *more]


@pytest.fixture(scope="module", params=KINDS)
def product(request, folder):
    """(kind, folder) of a run that has ended, in its place beside the weights."""
    out = folder / "heads" / request.param
    assert train_heads.main(line(request.param, folder, out, FLAGS)) == 0
    return request.param, out


call = command(train_heads.main)


def test_training_learns(product, folder):
    """Held-out text: every step of the head agrees with the model far more often than before, and the heads
    as loaded are worth what the card says."""
    kind, out = product
    facts, tensors = state(out)
    evals = [next(iter(e["files"].values())) for e in facts["evals"]]
    before, after = evals[0], evals[-1]
    for old, new in zip(before["agreement"], after["agreement"], strict=True):
        assert new > 0.3 and new > old + 0.1, f"{kind}: {before['agreement']} -> {after['agreement']}"
    assert all(new < 0.7 * old for old, new in zip(before["loss"], after["loss"], strict=True))
    model, _ = checkpoint.load(folder, "cpu", torch.float32)
    head = heads.load(out, model)
    ranks = head.ranks
    held_out = tensors["text.valid"]
    text = train_heads.write_text(model, FLAGS["text"], 0, FLAGS["context"], FLAGS["temperature"])
    assert torch.cat([tensors["text.train"], held_out]).equal(text)
    table = train_heads.evaluate(head, held_out, 24, 4 * train_heads.MEASURED)
    assert table["ranks"] == pytest.approx(ranks) and sum(ranks) < 1 + 1e-9 and ranks[0] == max(ranks)
    assert sum(table["agreement"]) / len(table["agreement"]) == pytest.approx(ranks[0])
    card = (out / "README.md").read_text()
    assert f"| data | own text at temperature 0.9, {len(text) - len(held_out):,} tokens |" in card
    for name in ("loss", "agreement", "top 5", "overlap"):
        cells = " | ".join(f"{v:.2f}" for v in table[name])
        assert f"| {name}, own text | {cells} |" in card
    if kind == "m2r2":
        check_gate(head, held_out[: len(held_out) // 24 * 24].view(-1, 24).long())
    cells = " | ".join(f"{v:.2f}" for v in before["agreement"])
    assert f"| agreement before, own text | {cells} |" in card


@torch.no_grad()
def check_gate(head, rows):
    """Where it foresees a refusal fewer drafts are accepted, in texts (B, T) that it has not seen."""
    (said, target), = heads.judged(head, rows)
    overlap = torch.minimum(said.softmax(-1), target.softmax(-1)).sum(-1)
    both = torch.stack([overlap.flatten(), head.gate().sigmoid().flatten()])
    assert both.corrcoef()[0, 1] > 0.3 and both.mean(1).diff().abs() < 0.1, "the gate has learnt nothing"


def test_what_was_trained_is_accepted(product, folder):
    """In the loop, when sampling: far more often than the drafts of the same head before."""
    kind, out = product
    model, _ = checkpoint.load(folder, "cpu", torch.float32)
    head = heads.load(out, model)
    untrained = train_heads.build(train_heads.parse(line(kind, folder, out)), model)
    rates = []
    for h in (untrained, head):
        done = [r for _, r in rounds(model, [[0, t] for t in range(1, 12)], 22, h.drafter(2),
                                     lambda x: to_probs(x, 1.0))]
        rates.append(sum(int(r.accepted.sum()) for r in done) / sum(int(r.proposed.sum()) for r in done))
    assert rates[1] > rates[0] + 0.07, rates


def test_what_stands_in_the_folder(product, folder):
    kind, out = product
    assert {p.name for p in out.iterdir()} == {heads.FILE, train.STATE, "README.md", "training.png", ".lock"}
    assert image.imread(out / "training.png").std() > 0.05
    card = (out / "README.md").read_text()
    assert card.startswith(f"# {kind} for model\n") and "![Loss and agreement](training.png)" in card
    command = card.split("`python train_heads.py ")[1].split("`")[0]
    again = train_heads.parse(shlex.split(command))
    assert vars(again) | {"every": 0, "device": 0} == vars(train_heads.parse(
        line(kind, folder, out, FLAGS))) | {"every": 0, "device": 0}, "the card's command repeats the run"


def test_text_is_drawn_from_the_model(folder):
    """Whole texts, one after the other, each as long as it may be; and the same with the same seed."""
    model, _ = checkpoint.load(folder, "cpu", torch.float32)
    ids, twin, other, cold = (train_heads.write_text(model, 600, seed, 24, *given).tolist()
                              for seed, *given in ((0,), (0,), (1,), (0, 0.2)))
    assert ids == twin != other and len(ids) >= 600 and ids[0] == 0 and len(set(cold)) < len(set(ids))
    starts = [i for i, t in enumerate(ids) if t == 0]
    assert max(b - a for a, b in zip(starts, [*starts[1:], len(ids)], strict=True)) <= 24
    texts = [ids[a:b] for a, b in zip(starts, [*starts[1:], len(ids)], strict=True)]
    assert len(texts) % train_heads.ROWS == 0
    sure = [model(torch.tensor([text])).softmax(-1)[0, :-1].gather(1, torch.tensor(text[1:])[:, None])
            for text in texts if len(text) > 1]
    assert float(torch.cat(sure).mean()) > 0.2, "not what the model says"
    # an opening is drawn at temperature 1, whatever comes after it
    assert train_heads.write_text(model, 600, 0, 24, 0.2, 23).tolist() == ids
    opened = train_heads.write_text(model, 600, 0, 24, 1e-9, 4).tolist()
    starts = [at for at, t in enumerate(opened) if t == 0 not in opened[at + 1 : at + 24]]
    for text in (opened[at : at + 24] for at in starts):
        assert model(torch.tensor([text])).argmax(-1)[0, 4:-1].tolist() == text[5:]
    assert len({tuple(opened[at : at + 5]) for at in starts}) > 3


def test_losses_by_hand():
    """KL(p || q), a head's own gradients, and none for the model."""
    m = make(replace(LLAMA, vocab_size=5)).requires_grad_(True)
    head, tokens = heads.Medusa(m, 2), torch.tensor([PROMPTS[0]]) % 5
    found, besides = train_heads.losses(head, tokens)
    p, trace = m(tokens).softmax(-1).detach(), {11: None}
    m.run(m.embed(tokens), slice(0, tokens.shape[1]), trace=trace)
    q = heads.Medusa(m, 2).after(trace[11], 1).softmax(-1).detach()
    want = [float(p[0, n + 2, v] * (p[0, n + 2, v] / q[0, n, v]).log()) for n in range(6) for v in range(5)]
    assert float(found[1].detach()) == pytest.approx(sum(want) / 6, rel=1e-5)
    assert len(found) == 2 and besides == 0
    sum(found).backward()
    assert head.weights.inner.grad.abs().sum() > 0
    assert m.blocks[0].attn.wqkv.grad is None, "the target is a label: no gradient flows into it"


# --- interruptions


@pytest.mark.parametrize("kind", ["kangaroo", "medusa"])
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(kind, folder, tmp_path, monkeypatch):
    """Bit by bit, also where the text is what the model wrote: it is not written again."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train_heads.main(line(kind, folder, whole)) == 0
    run = train.open_run(train_heads.parse(line(kind, folder, parts)), train_heads.fresh_run)
    for _ in range(3):
        run.train_step()
    run.save()
    run.train_step()    # this one is lost
    run.lock.close()
    monkeypatch.setattr(train_heads, "write_text", None)
    assert train_heads.main(line(kind, folder, parts, SHORT, "--resume")) == 0
    assert (whole / heads.FILE).read_bytes() == (parts / heads.FILE).read_bytes()
    same_end(whole, parts)


# --- the text of files


def test_data_of_files(folder, tmp_path, call):
    a, b = tmp_path / "a.txt", tmp_path / "b.txt"
    a.write_text(story(1, 12))
    b.write_text(story(2, 12))
    out = tmp_path / "out"
    given = {name: value for name, value in SHORT.items() if name != "text"}
    argv = line("medusa", folder, out, given, "--data", f"{a}=3", str(b))
    status, _, err = call(*argv)
    assert status == 0, err
    assert set(state(out)[0]["evals"][-1]["files"]) == {"a.txt", "b.txt"}
    model, tokenizer = checkpoint.load(folder, "cpu", torch.float32)
    text = train_heads.read_text(train_heads.parse(argv), model, tokenizer)
    assert text.weights == [3.0, 1.0] and text.train["a.txt"][0] == 0
    want = [t for d in corpus.read_documents(a) for t in checkpoint.encode(tokenizer, d, 0)]
    assert text.train["a.txt"].tolist() + text.valid["a.txt"].tolist() == want
    part = train_heads.read_text(train_heads.parse([*argv, "--text", "400"]), model, tokenizer)
    assert part.weights == [1.0, 1.0], "the files' sizes are their weights now"
    assert part.train["a.txt"].tolist() + part.valid["a.txt"].tolist() == want[:300]
    assert len(part.train["b.txt"]) + len(part.valid["b.txt"]) == 100


# --- what is refused


@pytest.mark.parametrize("more, message", [
    (["--exit-layer", "2"], "--exit-layer is no flag of medusa"),
    (["--blocks", "1"], "--blocks is no flag of medusa"),
    (["--rank", "4"], "--rank is no flag of medusa"),
    (["--rank", "0"], "--rank must be at least 1, or nothing is trained, got 0"),
    (["--align", "-1"], "--align must lie within 0 and 1e30, got -1.0"),
    (["--heads", "0"], "heads must be at least 1, got 0"),
    (["--heads", "24"], "--context 24 is too short for 24 steps"),
    (["--context", "65"], "--context 65 exceeds the context of"),
    (["--context", "4"], "--context must lie within 5 and"),
    (["--lr", "0"], "--lr must be positive"),
    (["--decay", "2"], "--decay must lie within 0 and 1, got 2"),
    (["--data", "none.txt"], "none.txt: no such file"),
    (["--model", "nowhere"], "nowhere"),
    (["--nonsense"], "unrecognized arguments: --nonsense; see --help"),
])
def test_bad_input_is_one_line_and_status_2(folder, tmp_path, call, more, message):
    call.refuses(line("medusa", folder, tmp_path / "out")[:-2] + more, tmp_path, message)


def test_other_runs_and_other_models_are_refused(product, folder, gemma, tmp_path, call):
    kind, out = product
    for argv, message in (
            (line(kind, folder, out, FLAGS), "holds a run already: continue with --resume"),
            (line(kind, folder, out, FLAGS | {"lr": 0.5}, "--resume"),
             "holds a run with another lr (0.01, now 0.5)"),
            (line(kind, gemma, out, FLAGS, "--resume"), "holds a run with another")):
        call.refuses(argv, out, message)
    (tmp_path / "file").write_text("")
    call.refuses(line(kind, folder, tmp_path, FLAGS), tmp_path,
                 "is not empty and holds no checkpoint.safetensors")


def test_a_model_without_a_first_id_needs_data(tmp_path, call):
    model = tmp_path / "model"
    checkpoint.save(make(replace(LLAMA, vocab_size=300)).float(), model, story_tokenizer())
    call.refuses(line("medusa", model, tmp_path / "out"), tmp_path,
                 "no begin-of-text id to start a text with: give text with --data")


# --- generate.py


def generated(capsys, *argv):
    status = generate.main([*map(str, argv), "--json", "--dtype", "float32", "--max-new", "24"])
    out, err = capsys.readouterr()
    return status, json.loads(out) if out else None, err


def test_generate_drafts_with_the_heads_beside_the_weights(product, folder, capsys):
    kind, out = product
    status, plain, _ = generated(capsys, "Lily saw", "--model", folder, "--draft", "none")
    status, r, err = generated(capsys, "Lily saw", "--model", folder, "--draft", kind)
    assert status == 0, err
    assert r["outputs"] == plain["outputs"] and r["target_passes"] < plain["target_passes"]
    assert r["draft"] == kind and r["gamma"] == (2 if kind in ("medusa", "transfer") else 3)
    assert r["tree"] is None
    assert r["exit_layer"] == (2 if kind in ("kangaroo", "exit_block", "m2r2") else None)
    for more in (["--tree", 6], ["--heads", out, "--gamma", 1], ["--do-no-harm"], ["--tail", 2],
                 ["--tree", 5, "--do-no-harm"]):
        status, again, err = generated(capsys, "Lily saw", "--model", folder, "--draft", kind, *more)
        assert status == 0 and again["outputs"] == plain["outputs"], (more, err)
        assert again["tree"] == (more[1] if more[0] == "--tree" else None)
        if more == ["--tree", 6]:
            assert again["target_passes"] <= plain["target_passes"]


def test_generate_refuses_heads_that_do_not_fit(product, folder, gemma, capsys, tmp_path):
    kind, out = product
    for argv, message in [
            (["--model", gemma, "--draft", kind], f"no heads: train them, python train_heads.py {kind}"),
            (["--model", folder, "--draft", kind, "--heads", tmp_path], f"{tmp_path}: no heads"),
            (["--model", gemma, "--draft", kind, "--heads", out], "trained for other weights"),
            (["--draft", "exit", "--heads", out], "--heads goes with trained heads, --draft kangaroo, "),
            (["--draft", "skip", "--skip", "a3", "--tree", "4"], "--tree goes with trained heads"),
            (["--model", folder, "--draft", kind, "--tree", "0"], "--tree needs at least one token"),
            (["--model", folder, "--draft", kind, "--tree", "4", "--tail", "2"], "no --tail"),
            (["--model", folder, "--draft", kind, "--draft-vocab", "x"], "--draft-vocab goes with"),
            (["--model", folder, "--draft", kind, "--exit-layer", "1"], "--exit-layer goes with"),
            (["--model", folder, "--draft", "medusa" if kind != "medusa" else "prophet", "--heads", out],
             f"these heads are for --draft {kind}, not")]:
        status, r, err = generated(capsys, "Lily", *argv)
        assert (status, r) == (2, None) and message in err and len(err.splitlines()) == 1, err
    if kind == "medusa":
        status, _, err = generated(capsys, "Lily", "--model", folder, "--draft", kind, "--gamma", 3)
        assert status == 2 and "2 heads draft that many tokens, not 3" in err
