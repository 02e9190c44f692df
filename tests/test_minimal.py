"""minimal.py is `speculative.rounds` at batch 1: the same tokens, and the same coins spent on them."""
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_sampling import Ledger
from tiny import FAMILIES, PROMPTS, make, oracle

import minimal
from layerskip import SelfDraft, early_exit
from sampling import to_probs
from speculative import rounds

ROOT = Path(__file__).parent.parent
SETTINGS = {"greedy": {}, "warm": dict(temperature=1.4), "top-p": dict(temperature=1.1, top_p=0.8)}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("gamma, exit_layer", [(0, 2), (1, 4), (3, 4), (3, 6)])
def test_it_is_the_loop_at_batch_1(family, settings, gamma, exit_layer):
    probs = lambda logits: to_probs(logits, **SETTINGS[settings])  # noqa: E731
    m = make(replace(FAMILIES[family], eos=(4, 9), max_len=28))
    for prompt in PROMPTS:
        page, loop = Ledger(3), Ledger(3)
        ours = list(minimal.rounds(m, prompt, 24, exit_layer, gamma, probs, page))
        drafter = SelfDraft(m, early_exit(6, exit_layer), gamma)
        theirs = [(r.draft.tokens[0].tolist(), r.new[0]) for _, r in rounds(
            m, [prompt], 24, drafter, probs, loop, m.c.eos)]
        assert [(drafted, new) for drafted, _, new in ours] == theirs
        assert page.uniforms == loop.uniforms and torch.equal(page.pool, loop.pool)
        kinds = [[kind for kind, *shape in coins.spent for _ in range(math.prod(shape))]
                 for coins in (page, loop)]
        assert kinds[0] == kinds[1], "each coin is spent on the same thing"


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_the_whole_model(family):
    m = make(FAMILIES[family])
    for prompt in PROMPTS:
        new = [t for *_, new in minimal.rounds(m, prompt, 20, 4, 3) for t in new]
        assert new == oracle(m, prompt, 20)


def test_it_runs_alone_and_prints_each_round(tmp_path):
    run = subprocess.run([sys.executable, str(ROOT / "minimal.py")], cwd=tmp_path, capture_output=True,
                         text=True)
    lines = run.stdout.splitlines()
    assert run.returncode == 0 and run.stderr == ""
    assert lines[0] == "drafted ', there was'              accepted 3   new ', there was a'"
    assert len(lines) > 8
