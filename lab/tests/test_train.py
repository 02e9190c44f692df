"""The training recipe by hand, what it learns, killed runs that are resumed, what is saved."""
import signal
from types import SimpleNamespace

import pytest
import torch
from stories import story
from tiny import FAMILIES, argv_of, command, each_family, make

import checkpoint
from lab import train
from model import Placement

SMALL = dict(layers=3, dim=32, heads=4, kv_heads=2, hidden=48, context=16, batch=4, vocab=300,
             tokens=640, warmup=3, device="cpu")
SHAPE = dict.fromkeys(flag.replace("-", "_") for flag in train.SHAPE)       # what --start decides
TOKENS = torch.tensor([[1, 5, 3, 2, 9, 4, 4, 7, 0, 16, 8], [3, 8, 8, 1, 2, 6, 11, 15, 2, 2, 0]])
call, approx = command(train.main), pytest.approx


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for seed, name in enumerate("ab"):
        (folder / f"{name}.txt").write_text(story(seed, 40))
    return [f"{folder}/a.txt=2", f"{folder}/b.txt"]


@pytest.fixture
def flags(data, tmp_path):
    given = {"data": data, **SMALL}     # ten steps
    return lambda out="out", **changes: argv_of({"out": tmp_path / out, **given, **changes})


@pytest.fixture
def begin(flags):
    """A Run that is ready to train."""
    return lambda *out, **changes: train.open_run(train.parse(flags(*out, **changes)))


def state(out):
    """What a run's checkpoint holds."""
    return torch.load(out / train.STATE, weights_only=True)


def choices(n_layers, **changes):
    """What 3000 steps train."""
    a = {"dropout": 0.4, "shallow": 0.7, "shallow_end": 0.5, **changes}
    g = torch.Generator().manual_seed(0)
    return [train.choose(SimpleNamespace(**a), n_layers, g) for _ in range(3000)]


def test_what_a_step_draws():
    rates = train.drop_rates(2, 0.4).tolist()
    assert rates == approx([0, 0.4 * (2 ** (1 / 3) - 1), 0.4 * (2 ** (2 / 3) - 1), 0.4])
    kept = [kept for kept, _ in choices(2)]
    assert [sum(i not in k for k in kept) / 3000 for i in range(4)] == approx(rates, abs=0.03)
    assert sum(not {2, 3} & {*k} for k in kept) / 3000 == approx(rates[2] * rates[3], abs=0.03)
    exits = [e for _, e in choices(6)]
    assert [exits.count(e) / 3000 for e in range(1, 6)] == approx([0.7 / 3] * 3 + [0.15] * 2,
                                                                  abs=0.03)
    assert {e for _, e in choices(10, shallow=1, shallow_end=1 / 6)} == {1, 2}
    assert {e for n in (1, 2) for _, e in choices(n)} == {1}, "not after the last block"


@each_family
@pytest.mark.parametrize("distil", [0.0, 0.3, 1.0])
def test_losses_and_their_gradients_by_hand(family, distil):
    """No gradient flows into what is imitated; what is dropped has neither a say nor a gradient."""
    m = make(FAMILIES[family]).requires_grad_(True)
    labels = TOKENS[:, 1:, None]
    at = Placement.span(0, 10)
    kept, below = [0, 1, 3, 4, 6, 9, 10], [0, 1, 3, 4]
    x = m.embed(TOKENS[:, :-1])
    full, early = (m.unembed(m.run(x, at, sublayers=part)).log_softmax(-1)
                   for part in (kept, below))
    label, exit_label = (-logq.gather(-1, labels).mean() for logq in (full, early))
    imitated = -(full.exp().detach() * early).sum(-1).mean()
    got = train.losses(m, TOKENS, kept, 3, distil)
    for ours, hand in zip(got, (label, (1 - distil) * exit_label + distil * imitated), strict=True):
        assert ours.item() == approx(hand.item(), rel=1e-5)
        grads = (torch.autograd.grad(x, [*m.parameters()], retain_graph=True, allow_unused=True)
                 for x in (ours, hand))
        for g, h in zip(*grads, strict=True):
            assert (g is None) == (h is None)
            assert g is None or torch.allclose(g, h, rtol=1e-4, atol=1e-5 * float(h.abs().max()))


@each_family
def test_one_batch_is_learnt_by_heart(family, begin):
    run = begin(family=family, tokens=64 * 60, dropout=0, lr=0.02, muon_lr=0.05)
    muon, adamw = (o.param_groups[0]["params"] for o in run.optimisers)
    assert len(muon) == 4 * 3 and len(muon + adamw) == len([*run.model.parameters()])
    batch = run.text.batch(0, 0, 4, 16)
    run.text.batch = lambda *_: batch
    assert min(train.evaluate(run.model, batch[0], 16, 16)["loss"]) > 5
    for _ in range(40):
        run.train_step()
    early, late, last = train.evaluate(run.model, batch[0], 16, 16)["loss"]
    assert max(early, late) < 1.5 and max(run.loss, last) < 0.2


def test_the_gradient_is_clipped_and_the_exit_loss_weighted(begin, monkeypatch):
    def gradient(weight, clip=1e9):     # what one step passes to the optimisers
        monkeypatch.setattr(train, "CLIP", clip)
        run = begin(f"{weight} {clip}", dropout=0, distil=0, warmup=0, exit_weight=weight)
        before = torch.nn.utils.parameters_to_vector(run.model.parameters()).detach()
        run.optimisers = [torch.optim.SGD(run.model.parameters(), lr=1.0)]
        run.train_step()
        return before - torch.nn.utils.parameters_to_vector(run.model.parameters()).detach()

    plain, one, three = map(gradient, (0, 1, 3))
    assert (three - plain - 3 * (one - plain)).norm() < 0.02 * (three - plain).norm()
    assert (one - plain).norm() > 0.1 * plain.norm() and one.norm() > 0.5
    assert gradient(1, 0.125).norm().item() == approx(0.125, rel=1e-4)


def test_the_learning_rate_of_each_step(begin):
    """Of 1000 steps, a warm-up, and a linear decay to 2 % and no less."""
    run = begin(tokens=64_000, warmup=100, decay=0.5)
    for run.step, share in {0: 0.01, 49: 0.5, 99: 1, 500: 1, 750: 0.5, 989: 0.022,
                            999: 0.02}.items():
        run.train_step()
        assert [o.param_groups[0]["lr"] for o in run.optimisers] == approx(
            [0.02 * share, 0.003 * share])
        assert all(p.grad is None for p in run.model.parameters()), "gradients add up"


def test_each_exit_is_measured_as_a_truncated_model():
    m, tokens = make(FAMILIES["gemma2"]), torch.arange(649) ** 2 % 17
    x, labels = m.embed(tokens[:640].view(40, 16)), tokens[1:641].view(40, 16, 1)
    logits = [m.unembed(m.run(x, Placement.span(0, 16), sublayers=range(2 * e)))
              for e in range(1, 7)]
    loss = [float(-z.log_softmax(-1).gather(-1, labels).mean()) for z in logits]
    agreement = [float((z.argmax(-1) == logits[-1].argmax(-1)).double().mean()) for z in logits]
    got = train.evaluate(m, tokens, 16, 10**6)
    assert got == {"loss": approx(loss), "agreement": approx(agreement)}
    assert train.evaluate(m, tokens, 16, 47) == train.evaluate(m, tokens[:48], 16, 10**6)


def ends_alike(call, flags, tmp_path, **changes):
    """A run that is resumed must end as one that nothing stopped."""
    for name in ("out", "whole"):
        assert call(*flags(name, resume=True, **changes))[0] == 0
    one, other = (state(tmp_path / name) for name in ("out", "whole"))
    assert one["step"] == other["step"] and one["loss"] == other["loss"]
    assert one["weights"].keys() == other["weights"].keys()
    assert all(torch.equal(t, other["weights"][key]) for key, t in one["weights"].items())


def save_half(state, path):
    """A kill while step 4 is saved."""
    torch.save(state, path)
    if state["step"] == 4:
        raise KeyboardInterrupt


def test_a_training_that_was_killed_ends_as_one_that_was_not(call, flags, tmp_path, monkeypatch):
    changes = {"family": "gemma2", "dropout": 0.5}
    monkeypatch.setattr(train, "EVERY", -1.0)
    with monkeypatch.context() as patch:
        patch.setattr(train, "torch", SimpleNamespace(**vars(torch) | {"save": save_half}))
        assert call(*flags(**changes))[0] == 130 and state(tmp_path / "out")["step"] == 3
    ends_alike(call, flags, tmp_path, **changes)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_keeps_all_steps_that_were_taken(number, call, flags, tmp_path, monkeypatch):
    class Stopped(train.Run):
        def train_step(self):
            if self.step == 1:
                signal.raise_signal(number)
            super().train_step()

    before = signal.getsignal(signal.SIGINT)    # ignored, where the tests run in the background
    with monkeypatch.context() as patch:
        patch.setattr(train, "Run", Stopped)
        status, _, err = call(*flags())
    assert status == 130 and state(tmp_path / "out")["step"] == 2 and "--resume" in err
    assert signal.getsignal(signal.SIGINT) is before
    ends_alike(call, flags, tmp_path)


def test_what_cannot_be_resumed_is_refused(call, flags, begin, tmp_path):
    begin()
    path = tmp_path / "out" / train.STATE
    call.refuses(flags(), tmp_path, "--resume")
    call.refuses(flags(resume=True, lr=0.1), tmp_path, "another run")
    call.refuses(flags(out="", resume=True), tmp_path, "--out")     # a folder of other files
    own = path.read_bytes()
    whole = torch.load(path, weights_only=True)
    for other in ([1, 2], whole | {"weights": {"w": torch.ones(2)}}):
        torch.save(other, path)     # another program's
        call.refuses(flags(resume=True), tmp_path, path, "not a checkpoint of this")
    path.write_bytes(own[:-100])
    call.refuses(flags(resume=True), tmp_path, path, "damaged")


def test_bad_input_is_refused(call, flags, tmp_path):
    for changes, word in (({"dropout": 1.1}, "--dropout"), ({"lr": "nan"}, "--lr"),
                          ({"kv_heads": 3}, "--kv-heads 3"), ({"data": ["none.txt"]}, "none.txt"),
                          ({"context": 9999}, "a.txt")):
        call.refuses(flags(**changes), tmp_path, word)
    status, _, err = call(*flags(muon_lr=1e25, warmup=0, dropout=0))
    assert (status, state(tmp_path / "out")["step"]) == (2, 0) and "lower --lr" in err


@each_family
def test_what_was_saved_has_the_same_logits_and_learns_on(family, begin, call, flags, tmp_path):
    """It is what was trained, in bfloat16."""
    out = tmp_path / "out"
    assert call(*flags(family=family))[0] == 0
    m, tokenizer = checkpoint.load(out, "cpu", torch.float32)
    run, further = begin(family=family, resume=True), begin("further", **SHAPE, start=out)
    for p in run.model.parameters():
        p.data = p.data.bfloat16().float()
    for other in (run, further):
        assert m.c == other.model.c and tokenizer.to_str() == other.text.tokenizer.to_str()
        assert torch.equal(m(TOKENS), other.model(TOKENS))
    further.train_step()
    assert not any(map(torch.equal, m.blocks[0].parameters(), further.model.blocks[0].parameters()))
    assert "| agreement before, a | " in (out / "README.md").read_text()
    call.refuses(flags("b", **SHAPE | {"layers": 2, "start": out}), out, "--layers")
