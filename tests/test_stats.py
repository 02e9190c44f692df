"""Counts, stopwatches, and drafted decoding compared with plain decoding."""
from types import SimpleNamespace

import pytest
import torch
from tiny import LLAMA, PROMPTS, make, make_round

from drafter import Drafter
from speculative import generate
from support import compare, stats
from support.compare import Run
from support.stats import Counts, Timed


def test_counts_by_hand():
    c = Counts()
    c.add(make_round([[1, 2, 3], [1]], [2, 0], [2, 2]))
    c.add(make_round([[], [1]], [0, 0], [0, 1]))
    assert c == Counts(passes=2, turns=3, tokens=5, drafted=3, hits=1, proposed=5, accepted=2)
    assert (c.tau, c.alpha) == (5 / 3, 1 / 3), "a finished row takes no pass"


class Slow(Drafter):
    """Reading takes it 100 seconds, drafting 3 and learning 5."""
    now = 1000.0

    def begin(self, state, trace):
        self.now += 100

    def propose(self, state):
        self.now += 3

    def observe(self, state, r):
        self.now += 5


def test_the_parts_of_a_round_add_up_and_the_prompt_does_not_count(monkeypatch):
    state = SimpleNamespace(n=SimpleNamespace(is_cuda=True, device="cuda:0"))
    slow, waits = Slow(), []
    monkeypatch.setattr(stats.time, "perf_counter", lambda: slow.now)
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)

    def start(watch):
        watch.begin(state, {})
        for _ in range(2):
            slow.now += 11
            watch.propose(state)
            slow.now += 7
            watch.observe(state, make_round([[1, 2]], [1], [1]))
            yield state, make_round([[1, 2]], [1], [1])

    got, timed = compare.measure(start, slow, 1), Timed(slow)
    assert got == Run([[1, 2, 1, 2]], 2, 100, 52) and got.rate == 4 / 52
    assert list(start(timed)) and timed.reading == 100
    assert timed.seconds == {"draft": 16, "verify": 14, "loop": 22}
    assert waits == ["cuda:0"] * (1 + 1 + 4 * 2), "once for a prompt, four times per timed round"
    waits.clear()
    alone = Timed(slow, waits=False)
    assert list(start(alone)) and sum(alone.seconds.values()) == 52
    assert waits == ["cuda:0"], "where the parts are not asked for, nothing waits for the device"


# --- where two texts part


def test_a_parting_by_an_oracle():
    model = make(LLAMA)
    plain = generate(model, PROMPTS, 8)[0]
    logits = model(torch.tensor([PROMPTS[2] + plain[2][:5]]))[0, -1]
    other = int(logits.argsort()[-4])
    ours = [*plain[:2], [*plain[2][:5], other, 0, 0], plain[3]]
    d = compare.divergence(model, PROMPTS, ours, plain)
    assert (d["output"], d["position"], d["ids"]) == (2, 5, [other, plain[2][5]])
    assert d["gap"] == pytest.approx(float(logits.max() - logits[other])) and not d["near_tie"]
    assert compare.divergence(model, PROMPTS, plain, plain) is None
    d = compare.parting(model, PROMPTS[0], plain[0][:3], plain[0])    # one ends too early
    assert (d["position"], d["ids"], d["gap"], d["near_tie"]) == (3, [plain[0][3]], 0, False)


@pytest.mark.parametrize("dtype, bits", [(torch.float32, 24), (torch.bfloat16, 8)])
def test_a_near_tie_is_what_rounding_explains_and_hides_no_other_row(dtype, bits, monkeypatch):
    """Two tokens with the same row of the head are a tie, and where they move apart it ends."""
    model, prompt = make(LLAMA).to(dtype), PROMPTS[0]
    logits = model(torch.tensor([prompt]))[0, -1]
    best = int(logits.argmax())
    model.head[0] = model.head[best]
    d, unit = compare.parting(model, prompt, [0], [best]), 2.0**-bits + 32**0.5 * 2.0**-24
    assert best and d["near_tie"] and d["rounding"] == pytest.approx(   # 12 sub-layers, sums of 32
        2 * 12**0.5 * unit * float(logits.abs().max()), rel=0.02)
    model.head[best] = model.head[0] * (1 + 2 * d["rounding"] / float(logits[best]))
    assert not compare.parting(model, prompt, [0], [best])["near_tie"]
    monkeypatch.setattr(compare, "parting", lambda *row: {"near_tie": row[2] == [2]})
    found = compare.divergence(None, PROMPTS[:3], [[1], [2], [6]], [[1], [0], [0]])
    assert found == {"output": 2, "near_tie": False}
