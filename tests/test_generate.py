"""The command line: what it prints, the JSON that scripts read, and one line with status 2 for bad input."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import LLAMA, make

import checkpoint
import generate

ROOT = Path(__file__).parent.parent
STORIES, SMALL = ROOT / "weights" / "stories-llama", ROOT / "weights" / "stories-draft"
SHORT = ["--max-new", "12", "--device", "cpu"]


@pytest.fixture
def call(capsys):
    def run(*argv):
        status = generate.main([str(a) for a in argv])
        return status, *capsys.readouterr()

    return run


def as_json(call, *argv):
    status, out, err = call("Once upon a time", *SHORT, "--json", *argv)
    assert status == 0 and err == "" and out.count("\n") == 1, "one object and nothing else"
    return json.loads(out)


def test_text_streams_and_a_summary_follows(call):
    status, out, err = call("Once upon a time", *SHORT)
    assert (status, err) == (0, "")
    text, summary = out.split("\n\n")
    assert text == "Once upon a time, there was a little girl named Lily. She loved to"
    assert "12 tokens in" in summary and "draft: exit behind block 2, gamma 2" in summary


@pytest.mark.parametrize(
    "flags, draft, gamma",
    [
        (["--draft", "none"], "none", 0),
        ([], "exit", 2),
        (["--exit-layer", "3", "--gamma", "1"], "exit", 1),
        (["--skip", "a3,m4,a11"], "skip", 3),
        (["--draft", "ngram"], "ngram", 4),
        (["--draft", "model"], "model", 3),
        (["--draft-model", SMALL, "--gamma", "0"], "model", 0),
    ],
)
def test_json_of_every_way_to_draft(call, flags, draft, gamma):
    plain = as_json(call, "--dtype", "float32", "--draft", "none")
    r = as_json(call, "--dtype", "float32", *flags)
    assert r["outputs"] == plain["outputs"], "drafting must not change the text"
    assert r["outputs"][0]["prompt"] == "Once upon a time"
    assert len(r["outputs"][0]["ids"]) == r["new_tokens"] == 12
    assert (r["draft"], r["gamma"], r["dtype"], r["device"], r["seed"]) == (draft, gamma, "float32", "cpu", 0)
    assert r["threads"] == torch.get_num_threads()
    assert r["tokens_per_pass"] == pytest.approx(12 / r["target_passes"])
    assert r["tokens_per_second"] == pytest.approx(12 / r["seconds"])
    assert (r["acceptance"] is None) == (gamma == 0 or draft == "none" or r["target_passes"] == 12)
    assert r["exit_layer"] == {"exit": 3 if flags else 2}.get(draft)


def test_skip_file(call, tmp_path):
    file = tmp_path / "skip.json"
    file.write_text(json.dumps({"attn": [3, 11], "mlp": [4], "alpha": 0.8, "note": "ignored"}))
    by_file, by_name = as_json(call, "--skip", file), as_json(call, "--skip", "a3, m4, a11")
    assert by_file["target_passes"] == by_name["target_passes"]


def test_compare(call):
    r = as_json(call, "--compare", "--dtype", "float32")
    assert r["identical"] is True and r["first_divergence"] is None
    assert r["baseline"]["outputs"] == r["outputs"]
    assert r["ratio"] == pytest.approx(r["baseline"]["seconds"] / r["seconds"])
    assert r["baseline"]["tokens_per_second"] == pytest.approx(12 / r["baseline"]["seconds"])


def test_compare_while_sampling_says_why_identity_is_no_question(call):
    assert as_json(call, "--compare", "--temperature", "0.8")["identical"] is None
    out = call("Once upon a time", *SHORT, "--compare", "--temperature", "0.8")[1]
    assert "identity is a question for temperature 0" in out


def test_compare_reports_a_divergence_and_its_gap(call, monkeypatch):
    """A crooked drafter stands for rounding: in bfloat16 it is reported, in float32 it is a failure."""
    honest = generate.decode

    def crooked(model, ids, a, drafter, tokenizer=None):
        r = honest(model, ids, a, drafter, tokenizer)
        if drafter:
            r["ids"][5] += 1
        return r

    monkeypatch.setattr(generate, "decode", crooked)
    for dtype, status in (("bfloat16", 0), ("float32", 1)):
        argv = ["Once upon a time", *SHORT, "--compare", "--dtype", dtype]
        got, out, _ = call(*argv)
        assert got == status and "NOT identical" in out and "part at new token 5" in out
        d = json.loads(call(*argv, "--json")[1])["first_divergence"]
        assert d["position"] == 5 and d["top2_gap"] > 0 and len(d["ids"]) == 2


def test_seed_repeats_a_sampled_run(call):
    texts = [as_json(call, "--temperature", "1", "--top-p", "0.9", "--seed", s)["outputs"] for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_end_of_text_ends_the_answer(call):
    ids = as_json(call, "--max-new", "400", "--dtype", "float32")["outputs"][0]["ids"]
    assert ids[-1] == 0 and 0 not in ids[:-1] and len(ids) < 400


def test_half_a_character_waits(monkeypatch, capsys):
    """The bytes of one character may come in different rounds; the terminal never sees half of it."""
    model, tokenizer = checkpoint.load(STORIES, "cpu")
    snow = tokenizer.encode("\u2603").ids
    assert len(snow) > 1, "the test needs a character of several tokens"

    class R:
        accepted = proposed = 0

    def rounds(*_):
        for t in [*snow, *tokenizer.encode("!").ids]:
            r = R()
            r.new = [[t]]
            yield None, r

    monkeypatch.setattr(generate, "rounds", rounds)
    generate.decode(model, tokenizer.encode("a").ids, generate.parse(["a"]), None, tokenizer)
    assert capsys.readouterr().out == "a\u2603!"


# --- bad input


def bad(call, message, *argv):
    status, out, err = call(*argv)
    assert status == 2 and out == "", "nothing is printed before the error"
    assert err.startswith("generate.py: ") and err.count("\n") == 1, "one line on standard error"
    assert message in err, err


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "the following arguments are required: prompt"),
        (["x", "--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["x", "--draft", "magic"], "invalid choice: 'magic'"),
        (["x", "--gamma", "two"], "argument --gamma: invalid int value: 'two'"),
        (["x", "--gamma", "-1"], "gamma, how many tokens to draft, must be a whole number from 0 up, got -1"),
        (["x", "--max-new", "-5"], "max_new must be at least 0, got -5"),
        (["x", "--temperature", "-0.1"], "temperature must be 0 (greedy) or a positive number, got -0.1"),
        (["x", "--temperature", "nan"], "temperature must be 0 (greedy) or a positive number, got nan"),
        (["x", "--top-k", "0"], "top_k must be a whole number, at least 1, got 0"),
        (["x", "--top-p", "0"], "top_p must lie in (0, 1], got 0.0"),
        (["x", "--top-p", "1.1"], "top_p must lie in (0, 1], got 1.1"),
        (["x", "--min-p", "2"], "min_p must lie in (0, 1], got 2.0"),
        (["x", "--seed", str(2**70)], "--seed must fit in 64 bits"),
        (["x", "--exit-layer", "0"], "exit layer must lie between 1 and 12 (all blocks), got 0"),
        (["x", "--exit-layer", "13"], "exit layer must lie between 1 and 12 (all blocks), got 13"),
        (["x", "--skip", "a12"], "cannot skip the attention of block 12: blocks run from 0 to 11"),
        (["x", "--skip", "m99"], "cannot skip the MLP of block 99"),
        (["x", "--skip", ",".join(f"a{i},m{i}" for i in range(12))], "the skip set leaves no sub-layer"),
        (["x", "--skip", "nowhere.json"], "nowhere.json: no such file"),
        (["x", "--draft", "skip"], "--draft skip needs --skip"),
        (["x", "--draft", "ngram", "--exit-layer", "2"], "--exit-layer goes with --draft exit, not ngram"),
        (["x", "--draft-model", "nowhere"], "nowhere: no such folder"),
        (["x", "--model", "nowhere"], "nowhere: no such folder"),
        (["x", "--device", "abacus"], "unknown device 'abacus': say cpu or cuda"),
        (["x", "--device", "meta"], "device meta is not supported: say cpu or cuda"),
        ([""], "the prompt is empty"),
        (["ab\udcff"], "the prompt is not valid UTF-8 at character 2"),
        (["word " * 600], "tokens and fills the context of 512"),
    ],
)
def test_bad_flags(call, argv, message):
    bad(call, message, *argv)


def test_cuda_asked_for_and_absent(call, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    bad(call, "CUDA was asked for, but torch finds no GPU here", "x", "--device", "cuda")


@pytest.mark.parametrize(
    "content, message",
    [
        ("[1, 2]", "expected a JSON object, got list"),
        ("{", "not readable as JSON"),
        ('{"attn": 3}', '"attn" and "mlp" must be lists of block numbers'),
        ('{"attn": ["3"]}', '"attn" and "mlp" must be lists of block numbers'),
        ('{"mlp": [12]}', "cannot skip the MLP of block 12"),
    ],
)
def test_bad_skip_files(call, tmp_path, content, message):
    (tmp_path / "skip.json").write_text(content)
    bad(call, message, "x", "--skip", tmp_path / "skip.json")


def test_draft_model_of_another_tokenizer(call, tmp_path):
    shutil.copytree(SMALL, tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    spec = json.loads(file.read_text())
    vocab = spec["model"]["vocab"]
    first, second = list(vocab)[300:302]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(spec))
    bad(call, "its tokenizer differs from the target's", "x", "--draft-model", tmp_path / "other")


def test_draft_model_of_another_vocabulary(call, tmp_path):
    _, tokenizer = checkpoint.load(SMALL, "cpu")
    checkpoint.save(make(LLAMA).float(), tmp_path / "other", tokenizer)
    message = "the draft model's vocabulary is 17, the target's 4096"
    bad(call, message, "x", "--draft-model", tmp_path / "other")


def test_damaged_weights(call, tmp_path):
    shutil.copytree(SMALL, tmp_path / "nan")
    file = tmp_path / "nan" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, file)
    status, _, err = call("x", "--model", tmp_path / "nan", "--device", "cpu")
    assert status == 2 and err.count("\n") == 1 and "NaN or infinite: its weights are damaged" in err


@pytest.mark.parametrize("argv, status", [(["Hi", "--max-new", "3"], 0), (["Hi", "--gamma", "-1"], 2)])
def test_as_a_program_from_another_folder(tmp_path, argv, status):
    command = [sys.executable, ROOT / "generate.py", *argv]
    r = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert r.returncode == status and "Traceback" not in r.stderr
    assert r.stdout.startswith("Hi") if status == 0 else r.stderr.count("\n") == 1
