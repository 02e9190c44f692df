"""Drafts read what their prices say, and priced by what passes really read, Pace loses no more than
it promises."""
from dataclasses import replace

import pytest
from test_heads import wild
from test_pace import IDS, SKIP
from tiny import GEMMA, LIVELY, PROMPTS, each_family, make

from drafter import ModelDraft
from lab.m2r2 import M2R2
from lab.transfer import Transfer
from layerskip import SelfDraft
from methods.arms import candidates
from methods.costs import by_weights
from methods.kangaroo import ExitBlock, Kangaroo
from methods.medusa import Medusa
from methods.pace import STAKE, Pace
from methods.prophet import Prophet
from methods.standin import ShortHead
from speculative import generate, rounds


def metered(monkeypatch, models, others=()):
    """A list that gets the weights that each call reads, as `by_weights` counts them. others:
    (thing, the name of its method, what a call reads)"""
    read = []

    def watch(thing, name, weights):
        act = getattr(thing, name)

        def acted(*args, **kwargs):
            read.append(weights(*args, **kwargs))
            return act(*args, **kwargs)

        monkeypatch.setattr(thing, name, acted)

    for model in models:
        m = by_weights(model.c)
        parts = m.attention * m.unit, m.mlp * m.unit
        every = range(2 * model.c.n_layers)
        watch(model, "run", lambda x, at, cache=None, subs=None, *_, of=parts, every=every, **__: (
            sum(of[i % 2] for i in (every if subs is None else subs))))
        watch(model, "unembed", lambda x, only=None, head=m.head * m.unit, V=model.c.vocab_size: (
            head if only is None else head * len(only) / V))
    for thing, name, weights in others:
        watch(thing, name, lambda *_, weights=weights: weights)
    return read


READ = {    # a drafter, and what a token of it reads: w, of the model, and s, of a small one
    "exit": (lambda m, small: SelfDraft(m, range(8), 3), lambda w, s: w.draft(range(8)).start),
    "skip": (lambda m, small: SelfDraft(m, range(1, 12), 3),
             lambda w, s: w.draft(range(1, 12)).start),
    "short head": (lambda m, small: SelfDraft(ShortHead(m, [4, 9, 0, 2, 16]), range(8), 3),
                   lambda w, s: w.draft(range(8), 5 / 17).start),
    "draft model": (lambda m, small: ModelDraft(small, 3), lambda w, s: s.unit / w.unit)}


@pytest.mark.parametrize("name, family", [*zip(READ, 2 * ["llama", "gemma2"], strict=True)])
def test_a_round_costs_its_drafts_and_one_pass(models, name, family, monkeypatch):
    """What draft and verification share is read once for each token, the last draft included."""
    (drafter, cost), m, small = READ[name], models[family], make(GEMMA, 1)
    machine = by_weights(m.c)
    each = cost(machine, by_weights(small.c))
    read = metered(monkeypatch, [m, small])
    steps = rounds(m, PROMPTS[:1], 20, drafter(m, small))
    next(steps)
    read.clear()        # what the prompt and the first round took
    lengths = [r.draft.tokens.shape[1] for _, r in steps]
    assert sum(read) / machine.unit == pytest.approx(sum(k * each + 1 for k in lengths), abs=1e-9)
    assert max(lengths) == 3


@each_family
@pytest.mark.parametrize("rows", [1, 3])
def test_by_weights_it_is_never_slower_than_it_promises(family, rows, monkeypatch):
    """A draft of each kind alone, and all at once, of which little is accepted."""
    m = make(replace(LIVELY[family], max_len=128), 4)
    heads = [wild(head) for head in (
        Kangaroo(m, 2), ExitBlock(m, 1), M2R2(m, 2), Medusa(m, 3), Transfer(m, 3, 2),
        Prophet(m, 1))]
    _, _, m2r2, medusa, transfer, _ = heads
    one, other = (next(head.weights.parameters())[0].numel() for head in (medusa, transfer))
    own = [(m2r2, "rise", m2r2.count()), (medusa, "after", one), (transfer, "spread", 2 * other)]
    machine = replace(by_weights(m.c), slope=0.0)   # the meter does not count slots
    ways = candidates(m, machine, SKIP, None, heads) + candidates(m, machine, None, IDS)
    read = metered(monkeypatch, [m, *(head.own for head in heads if head.own)], own)
    for some in (*([way] for way in ways), ways):
        drafter = Pace(m, some, machine)
        drafter.balance += 4    # it may lose more, so that it tries more
        lookup = drafter.copies.drafter
        begin = lookup.begin    # the prompt's own reading apart
        lookup.begin = lambda state, trace, begin=begin: (begin(state, trace), read.clear())
        generate(m, PROMPTS[:rows], 40, drafter)
        assert sum(read) / machine.unit <= 40 * 1.01 + STAKE + 4
