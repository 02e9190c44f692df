"""The GPU's benchmark runs to its end on a tiny scale, loses nothing, and refuses what it cannot go on with.
No figure is looked at.

The one thing to remember: what has never run anywhere will not run on the day a GPU is there.
"""
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from tiny import command, devices

from benchmarks import gpu
from benchmarks.shared import random_model

TINY = "--tiny", "--repeats", "1"
call = command(gpu.main)


@pytest.fixture
def flags(tmp_path):
    return lambda *more, device="cpu": ["--out", tmp_path / "gpu.json", *TINY, "--device", device, *more]


@pytest.fixture
def quick(monkeypatch):
    """Three parts, of which the second fails as long as `failing` says so."""
    state = SimpleNamespace(failing=True, ran=[])

    def part(name):
        state.ran.append(name)
        if name == "two" and state.failing:
            raise RuntimeError("no kernel image")
        return {"row": {"column": 1.5, "unit": "s"}}
    monkeypatch.setattr(gpu, "parts", lambda bench: {n: lambda n=n: part(n) for n in ("one", "two", "three")})
    return state


def numbers(x):
    return [n for v in x.values() for n in numbers(v)] if isinstance(x, dict) else [x]


@devices
def test_every_part_runs_and_is_written(call, flags, tmp_path, device):
    status, out, err = call(*flags(device=device))
    found = json.loads((tmp_path / "gpu.json").read_text())
    kinds = "blocks", "exactness", "decoding", "beside transformers"
    assert (status, found["torch"], found["tiny"]) == (0, torch.__version__, True)
    assert set(found["parts"]) == {"constants", "products", "stories-draft"} | {
        f"{name}: {kind}" for name in gpu.TINY for kind in kinds}
    assert all(f"\n## {name}\n" in out for name in found["parts"])
    assert all(isinstance(n, str) or 0 <= n < float("inf") for n in numbers(found["parts"]))
    for name in gpu.TINY:
        assert found["parts"][f"{name}: blocks"]["1 tokens"]["relative"] == 1
        exact = found["parts"][f"{name}: exactness"]
        assert len(exact) == 9 and all(0 <= row["share of equal rows"] <= 1 for row in exact.values())
    rows = {way: row for way, row in found["parts"]["stories-draft"].items() if way.endswith("float32")}
    assert len(rows) == 3 and all(row["tokens as plain"] == row["as float32 on the CPU"] == 9
                                  for row in rows.values()), "in float32 every text is the same"


def test_a_random_model_is_complete_and_follows_its_seed():
    for c in gpu.TINY.values():
        model, again, other = (random_model(c, torch.bfloat16, seed) for seed in (0, 0, 1))
        assert model.tok.dtype == torch.bfloat16
        assert float(model.scale) == pytest.approx(c.embed_scale, rel=0.01)
        assert torch.equal(model.tok, again.tok) and not torch.equal(model.tok, other.tok)
        assert all(p.isfinite().all() for p in model.parameters())


def test_without_transformers_nothing_is_beside_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    todo = gpu.parts(SimpleNamespace(shapes=gpu.TINY, trained=["stories-draft"]))
    assert len(todo) == 9 and not any("transformers" in name for name in todo)


def test_a_part_that_fails_costs_no_other(call, flags, quick, tmp_path):
    status, out, err = call(*flags())
    assert status == 1 and "no kernel image" in err and "two: failed" in out
    assert list(json.loads((tmp_path / "gpu.json").read_text())["parts"]) == ["one", "three"]
    quick.failing = False
    status, out, err = call(*flags("--resume"))
    assert (status, err) == (0, "") and quick.ran == ["one", "two", "three", "two"]
    assert "| row | 1.5 | s |" in out and all(f"## {name}\n" in out for name in ("one", "two", "three"))


def test_an_abort_keeps_what_was_measured(call, flags, quick, monkeypatch, tmp_path):
    def abort(name, rows):
        raise KeyboardInterrupt
    monkeypatch.setattr(gpu, "show", abort)
    assert call(*flags())[0] == 130
    assert list(json.loads((tmp_path / "gpu.json").read_text())["parts"]) == ["one"]


def test_no_part_begins_when_the_time_is_up(call, flags, quick):
    status, out, err = call(*flags("--minutes", 1e-9))
    assert status == 0 and quick.ran == [] and out.count("the time is up") == 3


def test_what_cannot_be_gone_on_with_is_refused_in_one_line(call, flags, quick, tmp_path):
    quick.failing = False
    assert call(*flags())[0] == 0
    cases = [((), "is there already"), (("--resume", "--repeats", 3), "another repeats"),
             (("--repeats", 0), "at least 1"), (("--minutes", "nan"), "positive")]
    cases += [] if torch.cuda.is_available() else [(("--device", "cuda"), "no GPU")]
    for argv, words in cases:
        call.refuses(flags(*argv), tmp_path, words)
    (tmp_path / "gpu.json").write_text("{}")
    call.refuses(flags("--resume"), tmp_path, "another")
    call.refuses(["--out", tmp_path / "none" / "x.json"], tmp_path, "no such folder")
