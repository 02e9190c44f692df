"""A few kills of search.py and train.py, and whether a difference would be noticed.

The one thing to remember: `python tests/kill.py` kills fifty times.
"""
import json
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import kill
import pytest
import torch
from safetensors.torch import save_file

import train


def test_killed_runs_end_like_undisturbed_ones():
    """Each of the two programs once: in a process of its own, as only one that has never trained may fork."""
    command = [sys.executable, kill.ROOT / "tests" / "kill.py", "--kills", "2", "--seed", "1"]
    r = subprocess.run(command, capture_output=True, text=True)
    assert r.returncode == 0, r.stdout + r.stderr
    assert r.stdout.startswith("seed 1, 2 kills") and r.stdout.endswith("\n2 kills, 0 runs differ\n")
    assert "search: 1 kills, all equal\ntrain, llama: " in r.stdout


@pytest.fixture
def pair(tmp_path):
    """Two folders of equal files, and a function that writes the training state of one."""
    def state(out, **changes):
        facts = {"step": 3, "losses": [1.5], "evals": [], "seconds": 9.0} | changes
        weights = {"a": torch.tensor([1.0, facts.pop("weight", 2.0)])}
        save_file(weights, tmp_path / out / train.STATE, metadata={"run": json.dumps(facts)})
    (tmp_path / "a").mkdir()
    for name in ("trials.jsonl", "skip.json", "model.safetensors", "README.md"):
        (tmp_path / "a" / name).write_text("{}\n")
    state("a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    return tmp_path / "a", tmp_path / "b", state


@pytest.mark.parametrize("changes, found", [
    ({}, []), ({"seconds": 10.0}, []), ({"step": 4}, [train.STATE]), ({"losses": [1.25]}, [train.STATE]),
    ({"evals": [1]}, [train.STATE]), ({"weight": 2.0000002}, [train.STATE])], ids=str)
def test_a_training_state_may_differ_in_its_seconds_only(changes, found, pair):
    a, b, state = pair
    state("b", **changes)
    assert kill.differences(a, b) == kill.differences(b, a) == found


def test_a_file_that_differs_or_is_missing_is_named(pair):
    a, b, _ = pair
    (b / "README.md").write_text("took longer")
    (b / "skip.json").write_text("{ }\n")
    (b / "model.safetensors").unlink()
    (b / "more").write_text("")
    assert kill.differences(a, b) == kill.differences(b, a) == ["model.safetensors", "more", "skip.json"]


def test_a_run_that_hangs_or_fails_is_an_error(monkeypatch, tmp_path):
    def wrong(argv):
        print("what went wrong")
        return 2
    monkeypatch.setattr(kill, "HANGS", 60)
    with pytest.raises(RuntimeError, match="status 2, what went wrong"):
        kill.finished((SimpleNamespace(main=wrong), []), tmp_path / "out")
    monkeypatch.setattr(kill, "HANGS", 0.2)
    with pytest.raises(RuntimeError, match="status None, it hangs"):
        kill.finished((SimpleNamespace(main=lambda argv: time.sleep(99)), []), tmp_path / "out")
