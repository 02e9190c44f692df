"""minimal.py is `speculative.rounds` at batch 1:
the same tokens, and the same coins spent on them."""
import math
import runpy
from dataclasses import replace

import pytest
import torch
from test_sampling import Ledger
from tiny import FAMILIES, PROMPTS, make

import minimal
from layerskip import SelfDraft, early_exit
from sampling import to_probs
from speculative import rounds


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("gamma, exit_layer, settings", [
    (0, 2, dict(temperature=1.4)), (1, 4, {}), (3, 4, dict(temperature=1.1, top_p=0.8)),
    (3, 6, dict(temperature=1.4))])
@pytest.mark.parametrize("write", [minimal.rounds, minimal.rounds_with_cache])
def test_it_is_the_loop_at_batch_1(family, gamma, exit_layer, settings, write):
    probs = lambda logits: to_probs(logits, **settings)  # noqa: E731
    m = make(replace(FAMILIES[family], eos=(4, 9), max_len=20))
    for prompt in PROMPTS:
        page, loop = Ledger(3), Ledger(3)
        ours = list(write(m, prompt, 16, exit_layer, gamma, probs, page))
        drafter = SelfDraft(m, early_exit(6, exit_layer), gamma)
        theirs = [(r.draft.tokens[0].tolist(), int(r.accepted), r.new[0]) for _, r in rounds(
            m, [prompt], 16, drafter, probs, loop, m.c.eos)]
        assert [(drafted, min(kept, len(new)), new) for drafted, kept, new in ours] == theirs
        assert page.uniforms == loop.uniforms and torch.equal(page.pool, loop.pool)
        kinds = [[kind for kind, *shape in coins.spent for _ in range(math.prod(shape))]
                 for coins in (page, loop)]
        assert kinds[0] == kinds[1], "each coin is spent on the same thing"


def test_it_prints_each_round_from_any_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(minimal.__file__, run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "drafted ', there was'              accepted 3   new ', there was a'"
    assert len(lines) > 8
