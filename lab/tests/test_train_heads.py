"""Heads in training learn and draft, and a killed run that is resumed ends as any other."""
import shutil
from dataclasses import replace

import pytest
import torch
from stories import foreseeable, story_tokenizer
from test_train import state
from tiny import LLAMA, PROMPTS, argv_of, command, make

import checkpoint
from lab import train, train_heads
from lab.save import save
from methods import heads
from methods.medusa import Medusa
from methods.standin import read_vocab
from model import Placement
from speculative import generate, rounds

FLAGS = dict(context=24, batch=8, tokens=1.6e4, text=4000, lr=0.01, warmup=3, temperature=0.9,
             device="cpu")
KINDS = {"kangaroo": "--exit-layer 2", "m2r2": "--exit-layer 2", "prophet": "", "eagle": "",
         "medusa": "--heads 2", "jump": "--start 3", "transfer": "--inject-layer 3 --steps 2"}
call = command(train_heads.main)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("tame") / "model"
    save(foreseeable(), out, story_tokenizer())
    return out


def line(kind, folder, out, *more, **given):
    argv = argv_of({"model": folder, "out": out, **FLAGS, **given})
    return [kind, *argv, *KINDS[kind].split(), *more]


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_learns(kind, folder, capsys):
    """In text held out it agrees with the model far more often than before; as loaded it is worth
    what its file says, and drafts the same text in fewer passes."""
    out = folder / "heads" / kind
    assert train_heads.main(line(kind, folder, out)) == 0
    model, _ = checkpoint.load(folder, "cpu", torch.float32)
    head, held = heads.load(out, model, train_heads.KINDS), state(out)
    after = train_heads.evaluate(head, held["text"]["valid"]["own text"], 24,
                                 4 * train_heads.MEASURED)
    before = held["before"]["own text"]
    for old, new in zip(before["agreement"], after["agreement"], strict=True):
        assert new > 0.3 and new > old + 0.1
    assert all(new < 0.7 * old for old, new in zip(before["loss"], after["loss"], strict=True))
    assert after["ranks"] == pytest.approx(head.ranks) and head.ranks[0] > 0.3
    prompt = checkpoint.encode(story_tokenizer(), "Lily saw", model.c.bos)
    drafter = head.drafter(min(3, head.longest))
    plain, drafted = (generate(model, [prompt], 24, each) for each in (None, drafter))
    assert plain[0] == drafted[0] and drafted[1] < 0.8 * plain[1]


@pytest.mark.parametrize("kind", ["eagle", "m2r2"])
def test_a_short_vocabulary_and_the_loss_that_acceptance_counts(kind, folder, tmp_path, capsys):
    out = tmp_path / "short"
    assert train_heads.main(line(kind, folder, out, "--vocab", "12", "--loss", "overlap")) == 0
    held, model = state(out), checkpoint.load(folder, "cpu", torch.float32)[0]
    ids = read_vocab(out / "draft_vocab.json", model.c.vocab_size)
    assert len(ids) == 12
    head = heads.shorter(heads.load(out, model, train_heads.KINDS), ids)
    after = train_heads.evaluate(head, held["text"]["valid"]["own text"], 24,
                                 train_heads.MEASURED)["overlap"]
    before = held["before"]["own text"]["overlap"]
    assert all(new > old + 0.1 for old, new in zip(before, after, strict=True))
    prompt = checkpoint.encode(story_tokenizer(), "Lily saw", model.c.bos)
    for _, r in rounds(model, [prompt], 24, head.drafter(3)):
        assert set(r.draft.tokens[0].tolist()) <= set(ids)


def test_text_is_drawn_from_the_model(folder):
    """Each text ends by itself or at 24 tokens. Its opening is drawn at temperature 1."""
    model, _ = checkpoint.load(folder, "cpu", torch.float32)
    warm, same, other, opened = (train_heads.write_text(model, 600, *given).tolist() for given in (
        (0, 24), (0, 24, 0.2, 23), (1, 24), (0, 24, 1e-9, 4)))
    assert warm == same != other and len(warm) >= 600
    starts = (i for i, t in enumerate(opened) if t == 0 not in opened[i + 1 : i + 24])
    texts = [opened[i : i + 24] for i in starts]
    assert all(model(torch.tensor([t])).argmax(-1)[0, 4:-1].tolist() == t[5:] for t in texts)


def test_a_chat_model_answers_prompts(folder, tmp_path):
    """Each of them once before any of them again, in the template's words."""
    (tmp_path / "some.jsonl").write_text('{"prompt": "Lily saw"}\n{"prompt": "Tom took"}\n')
    folder = shutil.copytree(folder, tmp_path / "chat")
    (folder / "chat_template.jinja").write_text("Then {{ messages[0].content }} the")
    flags = ["--prompts", str(tmp_path / "some.jsonl")]
    a = train_heads.parse(line("medusa", folder, tmp_path / "out", *flags, text=900))
    written = train_heads.fresh_run(a, torch.device("cpu"), None).text
    text = "".join(written.tokenizer.decode(part["own text"].tolist())
                   for part in (written.train, written.valid))
    one, two = (text.count(f"Then {prompt} the") for prompt in ("Lily saw", "Tom took"))
    assert min(one, two) >= 10 and abs(one - two) <= 1


def test_the_loss_is_the_kl_divergence_from_the_model():
    m = make(replace(LLAMA, vocab_size=5)).requires_grad_(True)
    head, tokens, trace = Medusa(m, 2), torch.tensor([PROMPTS[0]]) % 5, {11: None}
    first, second = train_heads.losses(head, tokens)
    p = m(tokens).softmax(-1).detach()
    m.run(m.embed(tokens), Placement.span(0, 8), trace=trace)
    q = head.after(trace[11], 1, tokens).softmax(-1).detach()
    want = (p[0, 2:] * (p[0, 2:] / q[0, :6]).log()).sum(-1).mean()
    assert second.item() == pytest.approx(want.item(), rel=1e-5)
    (first + second).backward()
    assert head.weights.inner.grad.any() and m.blocks[0].attn.wqkv.grad is None


def test_a_resumed_training_does_not_write_its_text_again(folder, tmp_path, monkeypatch):
    argv = line("kangaroo", folder, tmp_path / "out", "--resume", tokens=960)
    train.open_run(train_heads.parse(argv), train_heads.fresh_run)
    monkeypatch.setattr(train_heads, "write_text", None)
    assert train_heads.main(argv) == 0


def test_bad_input_is_refused(folder, tmp_path, call):
    for more, word in ((["--steps", "1"], "--steps"), (["--lr", "0"], "--lr"),
                       (["--context", "65"], "65"), (["--model", "none"], "none")):
        call.refuses(line("medusa", folder, tmp_path / "out") + more, tmp_path, word)
