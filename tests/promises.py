"""What every drafter promises, whatever it drafts. Each promise is tested here once. A file of
tests puts its own drafters, {name: model -> drafter}, or some `names` of them, to it: `test_poison
= promises.poison(DRAFTERS)`. No text shows whether a drafter drafts *well*, so that is for the
other tests. """
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from paper_gpu import PaperGPU
from teach import equal
from tiny import DEVICES, LIVELY, PROMPTS, each_family, law, make, warm

from drafter import ModelDraft
from methods.prophet import ProphetDraft
from methods.wrapper import Wrapper
from sampling import Coins, to_probs
from speculative import generate, rounds
from verification import verify


def write(m, drafter, count, prompts=PROMPTS, eos=()):
    """What is written; no draft may be longer than the room that is left."""
    out = [[] for _ in prompts]
    drafted = 0
    room = [min(count, m.c.max_len - len(p)) for p in prompts]
    for state, r in rounds(m, prompts, count, drafter, eos=eos):
        assert r.draft.tokens.shape[1] <= max(room) - 1
        assert all(k <= max(0, left - 1) for k, left in zip(r.proposed.tolist(), room, strict=True))
        for row, new in zip(out, r.new, strict=True):
            row += new
        room = list(state.left)
        drafted += int(r.proposed.sum())
    assert drafted or drafter is None or count < 20, "it drafted nothing"
    return out


def cut(rows, eos, count):
    """The first `count` tokens of each row, or up to its first token in eos."""
    return [row[: next((i + 1 for i, t in enumerate(row[:count]) if t in eos), count)]
            for row in rows]


class Turns(Wrapper):
    """The drafters in turn, a round each."""

    def begin(self, state, trace):
        super().begin(state, trace)
        self.round = 0

    def propose(self, state):
        self.round += 1
        return self.drafters[self.round % len(self.drafters)].propose(state)


class Watched(Wrapper):
    """Shows each draft, and the state in which it was drafted, to `look`."""

    def __init__(self, drafter, look):
        super().__init__(drafter)
        self.look = look

    def propose(self, state):
        draft = super().propose(state)
        self.look(state, draft)
        return draft


def compared(drafter, by_hand, far):
    """The drafter. How far each q is from by_hand(a row's text, the tokens of its draft), (K, V) or
    None, is put into `far`."""
    def look(state, draft):
        for b, text in enumerate(state.known):
            K = draft.tokens.shape[1] if draft.length is None else int(draft.length[b])
            K = min(K, state.left[b] - 1)
            want = by_hand(text, draft.tokens[b, :K].tolist()) if K > 0 else None
            if want is not None:
                far.extend((draft.q[b, :K] - want).abs().amax(-1).tolist())
    return Watched(drafter, look)


def reader(model, rule, far):
    """A draft model, compared with what it says of the whole text without a cache."""
    def by_hand(text, tokens):
        ids = torch.tensor([text + tokens], device=model.tok.device)
        return model(ids)[0, len(text) - 1 : -1].softmax(-1)
    return compared(ModelDraft(model, rule), by_hand, far)


# --- greedy texts are those of plain decoding


def greedy_identity(drafters, names=None, on=DEVICES):
    """In a ragged batch, and alone."""
    @pytest.mark.parametrize("device", on)
    @each_family
    @pytest.mark.parametrize("name", names or drafters)
    def test(truth, family, name, device):
        m, count = make(LIVELY[family], device=device), 20 if device == "cpu" else 6
        assert write(m, drafters[name](m), count) == [row[:count] for row in truth[family]]
        if device == "cpu":
            assert write(m, drafters[name](m), 12, PROMPTS[:1]) == [truth[family][0][:12]]
    return test


def end_of_text(drafters, names=None, places=range(12)):
    """Each token of the answer is an end-of-text id in turn, alone and with a second one, so that
    it falls on every place of a draft."""
    @pytest.mark.parametrize("name", names or drafters)
    @each_family
    def test(models, truth, family, name):
        m, rows = models[family], truth[family]
        for i in places if m.tok.device.type == "cpu" else places[::4]:
            for eos in ({rows[0][i]}, {rows[0][i], rows[1][0]}):
                assert write(m, drafters[name](m), 12, eos=eos) == cut(rows, eos, 12)
    return test


def context_limit(drafters, names=None):
    """Rows reach the limit one by one, the last of them inside a draft, and with an end of text. A
    limit of few tokens ends them before the first draft, or inside it."""
    @pytest.mark.parametrize("name", names or drafters)
    @each_family
    def test(truth, family, name):
        m = make(replace(LIVELY[family], max_len=20))
        want = [row[: 20 - len(p)] for row, p in zip(truth[family], PROMPTS, strict=True)]
        for n in (99, 0, 1, 2):
            assert write(m, drafters[name](m), n) == [row[:n] for row in want]
        for eos in (set(), {want[0][-1]} - set(want[0][:-1])):
            assert write(m, drafters[name](m), 99, PROMPTS[:1], eos) == want[:1]
    return test


class Poisoned(Wrapper):
    """Fills what must not be read with large finite garbage after each round: the slots after the
    last known token, in the tokens, the target's cache and the drafters' own."""

    def observe(self, state, r):
        super().observe(state, r)
        for b, text in enumerate(state.known):
            state.tokens[b, len(text) :] = 16
            spoil(state.cache, b, len(text) - 1)
            for part in inside(self):
                if part.follower:
                    spoil(part.follower.cache, b, part.follower.filled[b])
                elif isinstance(part, ProphetDraft):
                    spoil(part.cache, b, 0)         # it starts afresh in each round


def spoil(cache, row, start):
    cache.k[:, row, :, start:] = cache.v[:, row, :, start:] = 1e4


def inside(drafter):
    """The drafters that a wrapper hands everything on to, and theirs."""
    for part in getattr(drafter, "drafters", ()):
        yield from (part, *inside(part))


def poison(drafters, names=None, count=24):
    """Nothing after the last known token is ever read:
    the text might not show it, but the drafts do."""
    @each_family
    @pytest.mark.parametrize("name", names or drafters)
    def test(models, truth, family, name):
        m, runs = models[family], []
        for drafter in (drafters[name](m), Poisoned(drafters[name](m))):
            runs.append([])
            for _, r in rounds(m, PROMPTS, count, drafter):
                drafted = [row[:k] for row, k in zip(r.draft.tokens.tolist(), r.proposed.tolist(),
                                                     strict=True)]
                runs[-1].append((r.new, r.accepted.tolist(), drafted))
        for b, want in enumerate(truth[family]):
            assert sum((new[b] for new, *_ in runs[1]), []) == want[:count]
        assert runs[0] == runs[1], "a draft read a slot that holds nothing"
    return test


def proposing_again(drafters, names=None):
    """By hand, between two rounds and outside inference mode: greedy, it drafts the same again, and
    so does the next round."""
    @pytest.mark.parametrize("name", names or drafters)
    def test(models, name):
        m = models["llama"]
        drafter = drafters[name](m)
        steps = rounds(m, PROMPTS, 20, drafter)
        next(steps)
        state, _ = next(steps)
        first, again = (drafter.propose(state).tokens for _ in range(2))
        assert first.shape[1] > 0 and torch.equal(first, again)
        _, r = next(steps)
        assert torch.equal(r.draft.tokens, first[:, : r.draft.tokens.shape[1]])
    return test


def damaged_weights(drafters, names=None):
    """NaN and infinity give the same one line: in a weight, before the first draft, and in the
    embedding of a token that the text first reaches later."""
    @pytest.mark.parametrize("name", names or drafters)
    def test(truth, name):
        rows = truth["llama"]
        early = {t for p, row in zip(PROMPTS, rows, strict=True) for t in (0, *p, row[0])}
        late = next(t for t in rows[0] if t not in early)
        for part, row, value in (("blocks.0.mlp.down", 3, math.nan), ("head", 3, math.inf),
                                 ("head", 3, -math.inf), ("tok", late, math.nan)):
            m, done = make(LIVELY["llama"]), 0
            m.get_parameter(part)[row] = value
            with pytest.raises(ValueError,
                               match=r"logits for row \d are NaN or infinite: .* damaged"):
                for _ in rounds(m, PROMPTS, 30, drafters[name](m)):
                    done += 1
            assert part == "tok" or not done, "a prompt that shows the damage began a round"
    return test


# --- drafts are what they should be, which no text can show


def right_drafts(drafters):
    """drafters: {name: (model, far) -> one that is `compared`}"""
    @each_family
    @pytest.mark.parametrize("name", drafters)
    def test(models, family, name):
        m, far = models[family], []
        drafter = drafters[name](m, far)
        for prompts in (PROMPTS, PROMPTS[:1]):
            generate(m, prompts, 14, drafter, warm, Coins(2))
        assert len(far) > 10 and max(far) < 1e-9
    return test


# --- the exact law: every outcome of the production loop, enumerated


def target_law(m, prompt, probs, count):
    """{answer: probability} by multiplying the target's own conditionals, without loop or cache."""
    out = {(): 1.0}
    for _ in range(count):
        out = {(*ids, t): w * float(p) for ids, w in out.items()
               for t, p in enumerate(probs(m(torch.tensor([[*prompt, *ids]]))[0, -1])) if p > 0}
    return out


def exact_law(laws, count=2, room=3, judge=verify):
    """The first `count` of `room` tokens, after however many rounds, have the law of the model's
    own. Each outcome comes from a drafter that has learnt nothing yet. laws:
    {name: (config, model -> drafter)}"""
    hot = partial(to_probs, temperature=2.0, top_p=0.9)
    return every_outcome(laws, laws, [[1, 2, 1]], count, room, hot, judge)


def exact_law_of_a_ragged_batch(laws, names, judge=verify):
    """The rows share their coins and nothing else."""
    cooler = partial(to_probs, temperature=1.5, top_p=0.7)
    return every_outcome(laws, names, [[1, 2, 1], [2]], 2, 2, cooler, judge)


def every_outcome(laws, names, prompts, count, room, probs, judge):
    @pytest.mark.parametrize("name", names)
    def test(name):
        c, build = laws[name]
        m, seen = make(c, 3), set()

        def run(coins):
            out = [[] for _ in prompts]
            for _, r in rounds(m, prompts, room, build(m), probs, coins, verify=judge):
                seen.update(zip(r.accepted.tolist(), r.proposed.tolist(), strict=True))
                for row, new in zip(out, r.new, strict=True):
                    row += new
                if min(map(len, out)) >= count:
                    break
            return tuple(tuple(row[:count]) for row in out)

        want = {(): 1.0}
        for prompt in prompts:
            own = target_law(m, prompt, probs, count)
            want = {(*rows, ids): w * own[ids] for rows, w in want.items() for ids in own}
        assert equal(law(run), want)
        assert len(want) > 4, "a law of so few outcomes proves little"
        assert len(seen) > 1, "the case should have drafts with several ends"
    return test


# --- on a simulated GPU


def one_wait_a_round(drafters, names=None, extra=()):
    """And the text of the CPU, with a seed. Some drafters wait `extra` times more,
    {name: how often}."""
    @pytest.mark.parametrize("name", names or drafters)
    @pytest.mark.parametrize("family, rows", [("llama", 1), ("gemma2", 4)])
    def test(family, rows, name):
        probs, texts = (lambda x: to_probs(x, temperature=0.8, top_p=0.95)), {}
        most = 1 + dict(extra).get(name, 0)
        with PaperGPU() as gpu:
            for device in ("cpu", "cuda"):
                m = make(LIVELY[family], device=device)
                drafter, texts[device] = drafters[name](m), []
                for _, r in rounds(m, PROMPTS[:rows], 9, drafter, probs, Coins(3)):
                    texts[device].append(r.new)
                    waits, gpu.waits = gpu.waits, []
                    # not the sending of the prompts
                    if device == "cuda" and len(texts["cuda"]) > 1:
                        assert 1 <= len(waits) <= most, waits
        assert texts["cuda"] == texts["cpu"]
    return test
