"""The command line: what it prints, the JSON that scripts read,
and one line with status 2 for bad input."""
import io
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tiny import command

import checkpoint
import generate
from control import MOST
from machine import exact
from machine.exact import row_seeds
from machine.quant import KINDS
from machine.recorded import Recorded, Session
from machine.tapes import simulated
from speculative import generate as write
from support import compare, report

ROOT = Path(__file__).parent.parent
STORIES, SMALL = ROOT / "weights" / "stories-llama", ROOT / "weights" / "stories-draft"
TEXT = ", there was a little girl named Lily. She loved to"
SHORT = ["--max-new", "12", "--device", "cpu", "--dtype", "float32"]
call = command(generate.main)


@pytest.fixture
def once(monkeypatch):
    """The runs of --compare are not repeated, as nothing here is measured."""
    monkeypatch.setattr(compare, "REPEATS", 1)


@pytest.fixture(scope="module")
def ids(stories):
    """The answer of plain decoding, by the library."""
    model, tokenizer = stories
    prompt = checkpoint.encode(tokenizer, "Once upon a time", model.c.bos)
    return write(model, [prompt], 12, eos=set(model.c.eos))[0][0]


def as_json(call, *argv):
    status, out, err = call("Once upon a time", *SHORT, "--json", *argv)
    assert status == 0 and err == "" and out.count("\n") == 1, "one object and nothing else"
    return json.loads(out)


def test_text_streams_and_a_summary_follows(call, tmp_path):
    status, out, err = call("Once upon a time", *SHORT, "--draft", "exit", "--picture",
                            tmp_path / "run.svg")
    assert (status, err) == (0, "") and "Lily" in (tmp_path / "run.svg").read_text()
    text, summary = out.split("\n", 1)
    assert text == "Once upon a time" + TEXT and "\x1b" not in out, "no colours in a pipe"
    assert "12 tokens in" in summary and "draft: exit after block 4, gamma 2\n" in summary


@pytest.mark.parametrize("flags, draft, gamma", [
    (["--draft", "none"], "none", 0), ([], "auto", MOST),
    (["--exit-layer", "3", "--gamma", "1"], "exit", 1), (["--draft", "ngram"], "ngram", 7),
    (["--draft", SMALL, "--gamma", "0"], "model", 0), (["--draft", SMALL], "model", 3),
    (["--draft", "medusa", "--tree", "4", "--gamma", "0"], "medusa", 0),
    (["--draft", "int4"], "int4", 3),
    (["--draft", "eagle", "--gamma", "6", "--tree", "128"], "eagle", 6),
    (["--draft", STORIES / "heads" / "kangaroo"], "kangaroo", 3),
    (["--skip", "a3,m4", "--gamma", "5"], "skip", 5)], ids=str)
def test_json_of_every_way_to_draft(call, ids, flags, draft, gamma):
    r = as_json(call, *flags)
    assert r["outputs"] == [{"prompt": "Once upon a time", "text": TEXT, "ids": ids}], (
        "the text stays")
    assert (r["draft"], r["gamma"], r["dtype"], r["device"]) == (draft, gamma, "float32", "cpu")
    assert r["new_tokens"] == 12 and r["tokens_per_pass"] == pytest.approx(12 / r["target_passes"])
    assert r["tokens_per_second"] == pytest.approx(12 / r["seconds"])
    drafted = gamma > 0 and draft != "ngram"    # nothing in this text comes again
    assert (r["target_passes"] < 12) == drafted == (r["alpha"] is not None) == (r["proposed"] > 0)
    assert 0 <= r["accepted"] <= r["proposed"]
    assert r["how"].startswith(f"draft: {draft}") and ("trees" in r["how"]) == (draft == "eagle")
    said = re.sub(r" \(.*?\)", "", r["how"].partition("rounds: ")[2])    # without the reasons
    drafting = sum(int(arm.split()[-1]) for arm in said.split(", ") if said)
    assert drafting == (r["target_passes"] if draft == "auto" else 0)


@pytest.mark.parametrize("kind, flags", [
    ("int4", ["--draft", SMALL]), ("int8", ["--draft", "int4"])])
def test_a_quantised_target(call, once, kind, flags):
    """Drafting does not change its text."""
    model, _ = generate.load(generate.parse(["x", "--quant", kind]))
    assert isinstance(model.blocks[0].mlp.down, KINDS[kind])
    r = as_json(call, "--quant", kind, "--compare", *flags)
    assert r["quant"] == kind and r["identical"] is True and r["target_passes"] < 12


# --- compared with plain decoding


def test_compare(call, once):
    r = as_json(call, "--compare")
    plain = r["baseline"]
    assert r["identical"] is True and r["first_divergence"] is None
    assert plain["ids"] == [r["outputs"][0]["ids"]]
    assert plain["new_tokens"] == plain["target_passes"] == 12
    said = call("Once upon a time", *SHORT, "--compare")[1]
    assert "identical to plain decoding" in said and "passes instead of 12" in said
    longer = compare.lines({**r, "new_tokens": 20})[0]
    assert "passes for 20 tokens, 12 in plain decoding for 12, and" in longer
    nothing = as_json(call, "--compare", "--max-new", "0")
    assert nothing["ratio"] is None and nothing["identical"] is True
    assert r["ratio"] == pytest.approx(r["tokens_per_second"] / plain["tokens_per_second"])
    assert as_json(call, "--compare", "--temperature", "1")["identical"] is None, "samples differ"


@pytest.mark.parametrize("flags", [["--draft", "int8"], ["--draft", "ngram", "--compare"]])
def test_fast_passes_write_the_same_text(call, once, ids, monkeypatch, flags):
    """Those of a CPU; and simulated recordings, which are made before the
    first token is printed."""
    made = []
    for fast in exact.fast, lambda m: made.append(
            Recorded(m, Session([simulated]))) or made[-1]:
        monkeypatch.setattr(exact, "fast", fast)
        r = as_json(call, "--fast", *flags)
        assert r["outputs"][0]["ids"] == ids and r["fast"] and r.get("identical", True)
    assert len(made) == 1 and not made[0].session.open and made[0].replays()


@pytest.mark.parametrize("flags", [[], ["--fast"]])
def test_exact_texts_are_those_of_plain_decoding_when_sampled_too(call, once, flags):
    """In the stored dtype, bfloat16."""
    for more in ["--draft", "exit"], ["--temperature", "0.8", "--draft", "auto"]:
        status, out, _ = call("Once upon a time", *flags, *more, "--exact", "--max-new", "16",
                              "--json", "--compare")
        r = json.loads(out)
        assert status == 0 and r["identical"] is True and r["exact"] and r["dtype"] == "bfloat16"


def test_a_prompt_that_stands_in_a_batch_four_times_gives_four_exact_samples(call, tmp_path):
    """Each is the text of a run alone with the seed of its row, whatever drafts."""
    (tmp_path / "same.txt").write_text("Once upon a time\n" * 4)

    def texts(*argv):
        out = call(*argv, "--exact", "--temperature", "1", "--json", *SHORT)[1]
        return [output["ids"] for output in json.loads(out)["outputs"]]

    four = texts("--prompt-file", tmp_path / "same.txt", "--seed", "5", "--draft", "exit")
    seeds = row_seeds(5, 4)
    assert len(set(map(tuple, four))) == 4 and seeds[0] == 5
    for seed, text in zip(seeds, four, strict=True):
        assert texts("Once upon a time", "--seed", str(seed), "--draft", "none") == [text]


@pytest.mark.parametrize("near", [True, False])
def test_compare_judges_the_printed_text(call, once, monkeypatch, near):
    """Its token 5 is made wrong here. Only a near-tie explains a difference, and with --exact
    nothing does."""
    honest = report.of_run

    def wrong(*args):
        found = honest(*args)
        found["outputs"][0]["ids"][5] += 1
        return found

    monkeypatch.setattr(report, "of_run", wrong)
    if near:
        tie = dict(position=5, gap=0.1, rounding=0.2, near_tie=True)
        monkeypatch.setattr(compare, "parting", lambda *args: tie)
    status, out, _ = call("Once upon a time", *SHORT, "--compare", "--json")
    r = json.loads(out)
    d = r["first_divergence"]
    assert (status, d["output"], d["position"], d["near_tie"]) == (1 - near, 0, 5, near)
    assert r["identical"] is False and ("NOT identical" in compare.verdict(r)) != near
    status, out, _ = call("Once upon a time", *SHORT, "--compare", "--exact")
    assert status == 1 and "NOT identical to plain decoding, which --exact promises" in out


def test_seed_repeats_a_sampled_run(call):
    texts = [as_json(call, "--temperature", "1", "--top-p", "0.9", "--seed", s)["outputs"]
             for s in (1, 1, 3)]
    assert texts[0] == texts[1] != texts[2]
    greedy = as_json(call)["outputs"]
    assert as_json(call, "--temperature", "1", "--min-p", "1")["outputs"] == greedy, (
        "only the likeliest stay")


# --- batches and pipes


def test_batches_and_messages_that_name_their_lines(call, tmp_path):
    """From a file, and from a pipe."""
    texts = ["Once upon a time", "User: hello", "x"]
    lines = tmp_path / "b.txt"
    lines.write_text("\n".join(texts))
    common = ["--max-new", "9", "--dtype", "float32", "--device", "cpu"]
    alone = [json.loads(call(text, "--json", *common)[1])["outputs"][0] for text in texts]
    r = json.loads(call("--prompt-file", lines, "--json", *common)[1])
    assert r["outputs"] == alone and r["new_tokens"] == 27
    said = call("--prompt-file", lines, *common)[1]
    assert all(one["prompt"] + one["text"] in said for one in alone)
    lines.write_text("Once\n\n" + "word " * 600 + "\nTwo\n")
    call.refuses(["--prompt-file", lines], tmp_path, "b.txt, line 3 has 60",
                 "fills the context of 512")
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=["\n".join(texts)])
    writer.start()
    assert json.loads(call("--prompt-file", tmp_path / "pipe", "--json", *common)[1])[
        "outputs"] == alone
    writer.join()


@pytest.mark.parametrize("flag, name", [("--picture", "x.svg"), ("--page", "x.html")])
def test_what_cannot_be_written_costs_no_answer(call, tmp_path, monkeypatch, flag, name):
    """It is refused before a model is loaded;
    if the disk is full only later, the answer is printed."""
    (tmp_path / "old").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "load", None)
        call.refuses(["x", flag, tmp_path / "none" / name], tmp_path, "none", "cannot be written")
    path = tmp_path / name
    path.write_text("old")
    monkeypatch.setattr(os, "fsync",
                        lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    status, out, err = call("Once upon a time", *SHORT, "--json", flag, path)
    assert status == 2 and json.loads(out)["outputs"][0]["text"] == TEXT
    assert "No space left" in err and err.count("\n") == 1 and path.read_text() == "old"


def test_standard_input(call, monkeypatch, tmp_path):
    def send(raw):
        stream = io.TextIOWrapper(io.BytesIO(raw), "ascii", newline="\n")
        monkeypatch.setattr(sys, "stdin", stream)

    send(b"\xef\xbb\xbfOnce upon\r\na time\r\n")
    out = json.loads(call("-", *SHORT, "--json")[1])["outputs"][0]
    assert out["prompt"] == "Once upon\na time", "only the newline that ends the input goes"
    send(b"ab\xff")
    call.refuses(["-"], tmp_path, "cannot take this prompt")


# --- bad input


@pytest.mark.parametrize("argv, culprit", [
    ("", "prompt"), ("x --prompt-file y", "prompt"), ("--prompt-file no.txt", "no.txt"),
    ("--prompt-file /", "/: Is a directory"),
    ("x --chat", "chat template"), (f"'{'word ' * 600}'", "the prompt has 602 tokens"),
    ("x --picture run.png", "run.png"), ("x --page run.png", "run.png"),
    ("x --page a.html --draft eagle --tree 3", "--page"),
    ("x --page x.html --exact", "--exact: not allowed with argument --page"),
    ("x --draft medusa --tree 8 --exact", "--exact: not allowed with argument --tree"),
    ("x --temperature inf", "inf"), ("x --temperature 1 --min-p 1.1", "min_p"),
    *((f"x {flag} 1", f"{flag} does nothing") for flag in ("--top-k", "--top-p", "--min-p")),
    ("x --gamma 1001", "--gamma"), ("x --tree 3", "--tree"), ("x --draft skip", "--skip"),
    ("x --skip a3 --exit-layer 2", "--skip"), ("x --draft ngram --exit-layer 2", "--exit-layer"),
    ("x --exit-layer 25", "25"), ("x --draft eagle --draft-vocab v", "-vocab"),
    ("x --draft none --gamma 2", "--draft none: unrecognized arguments: --gamma"),
    ("x --draft medusa --tree 8 --gamma 99", "3 heads cannot draft 99"),
    ("x --draft-quant int4", "name one with --draft DIR"),
    ("x --draft int8 --draft-quant int4", "--draft int8: unrecognized arguments"),
    (f"x --draft {SMALL} --draft-model {SMALL}", "--draft model: unrecognized arguments"),
    ("x --draft-model /dev", "config.json"), ("x --draft nowhere", "nowhere"),
    ("x --draft Qwen/Qwen3-0.6B", "hf download Qwen/Qwen3-0.6B"),
    ("x --model Qwen/Qwen3-0.6B", "hf download Qwen/Qwen3-0.6B --local-dir runs/Qwen3-0.6B"),
    (f"x --model {SMALL} --draft medusa", "lab.train_heads medusa"),
    ("x --device abacus", "abacus")], ids=lambda x: x[-40:])
def test_bad_input_is_one_line(call, argv, culprit, tmp_path):
    call.refuses(shlex.split(argv), tmp_path, culprit)


@pytest.mark.parametrize("argv, culprit", [
    ("-", "standard input"), ("--prompt-file /dev/null", "a pipe"), ("x --fast", "--fast"),
    ("x --exact", "--exact")])
def test_what_goes_with_one_process_only(call, monkeypatch, argv, culprit, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    call.refuses(argv.split(), tmp_path, culprit)


# --- what a run imports


@pytest.mark.parametrize(("flags", "most", "longest"), [("--draft exit", 16, 3000), ("", 33, 5000)])
def test_a_run_imports_little_before_its_first_token(flags, most, longest):
    """A reader of the simplest command has this much to follow, and one of the default this."""
    code = f"""
import sys, generate
generate.main(["Once upon a time", "--max-new", "2", "--json", *{flags.split()}])
files = [m.__file__ for m in list(sys.modules.values()) if getattr(m, "__file__", None)]
print(*sorted(set(files)), sep="\\n")
"""
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    paths = [Path(line) for line in out.stdout.splitlines()[1:]]
    ours = [p for p in paths if p.is_relative_to(ROOT) and ".venv" not in p.parts]
    lines = sum(len(p.read_text(encoding="utf-8").splitlines()) for p in ours)
    assert {p.name for p in ours} >= {"generate.py", "layerskip.py", "speculative.py"}
    assert len(ours) <= most and lines <= longest, (len(ours), lines, ours)
