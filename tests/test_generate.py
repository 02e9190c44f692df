"""The command line: what it prints, the JSON that scripts read, and one line with status 2 for bad input."""
import io
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import LLAMA, command, make
from tqdm import tqdm

import checkpoint
import generate
from control import MOST, Costs, DoNoHarm
from layerskip import SelfDraft
from machine.quant import KINDS, byte_costs
from machine.recorded import Recorded
from methods import heads
from speculative import Then
from speculative import generate as write
from support import drafts, stats
from support.stats import Run

ROOT = Path(__file__).parent.parent
STORIES, SMALL = ROOT / "weights" / "stories-llama", ROOT / "weights" / "stories-draft"
SHORT = ["--max-new", "12", "--device", "cpu", "--dtype", "float32"]
BLOCK, HEAD = 192 * 64 * (4 + 4 + 2 + 2) + 3 * 192 * 512, 4096 * 192                # weights of STORIES
SMALL_BLOCKS, SMALL_HEAD = 2 * (128 * 64 * (2 + 2 + 1 + 1) + 3 * 128 * 352), 4096 * 128
call = command(generate.main)


@pytest.fixture(scope="module")
def stories():
    """(model, tokenizer)"""
    return checkpoint.load(STORIES, dtype=torch.float32)


@pytest.fixture
def drafter(stories):
    """The drafter that flags ask for."""
    return lambda *flags: drafts.drafters(generate.parse(["x", *map(str, flags)]), *stories)()


@pytest.fixture
def once(monkeypatch):
    """The runs of --compare are not repeated, as nothing here is measured."""
    monkeypatch.setattr(generate, "REPEATS", 1)


@pytest.fixture(scope="module")
def plain(stories):
    """The answer of plain decoding, by the library: (text, ids)."""
    model, tokenizer = stories
    prompt = checkpoint.encode(tokenizer, "Once upon a time", model.c.bos)
    ids = write(model, [prompt], 12, eos=set(model.c.eos))[0][0]
    return tokenizer.decode(prompt + ids)[len("Once upon a time"):], ids


def as_json(call, *argv):
    status, out, err = call("Once upon a time", *SHORT, "--json", *argv)
    assert status == 0 and err == "" and out.count("\n") == 1, "one object and nothing else"
    return json.loads(out)


def test_text_streams_and_a_summary_follows(call, tmp_path):
    status, out, err = call("Once upon a time", *SHORT, "--draft", "exit", "--picture", tmp_path / "run.png")
    assert (status, err) == (0, "") and (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    text, summary = out.split("\n", 1)
    assert text == "Once upon a time, there was a little girl named Lily. She loved to"
    assert "12 tokens in" in summary and "draft: exit after block 4, gamma 2\n" in summary
    assert "\x1b" not in out, "no colours where nobody watches"


@pytest.mark.parametrize("flags, draft, gamma", [
    (["--draft", "none"], "none", 0), ([], "auto", MOST),
    (["--exit-layer", "3", "--gamma", "1"], "exit", 1), (["--draft", "ngram"], "ngram", 8),
    (["--draft-model", SMALL, "--gamma", "0"], "model", 0),
    (["--draft", "nf4", "--skip", "a3,m4,a11"], "nf4", 3), (["--draft", "int8"], "int8", 3),
    (["--draft", "eagle", "--gamma", "6", "--tree", "600"], "eagle", 6),
    (["--skip", "a3,m4", "--do-no-harm", "--gamma", "5"], "skip", 5),
    (["--draft", "model", "--do-no-harm", "--tail", "4"], "model", MOST)])
def test_json_of_every_way_to_draft(call, plain, flags, draft, gamma):
    r = as_json(call, *flags)
    text, ids = plain
    assert r["outputs"] == [{"prompt": "Once upon a time", "text": text, "ids": ids}], "the text stays"
    assert (r["draft"], r["gamma"], r["dtype"], r["device"], r["seed"]) == (draft, gamma, "float32", "cpu", 0)
    assert r["new_tokens"] == 12 and r["tokens_per_pass"] == pytest.approx(12 / r["target_passes"])
    assert r["tokens_per_second"] == pytest.approx(12 / r["seconds"])
    drafted = gamma > 0 and draft != "ngram"    # nothing in this text comes again
    assert (r["target_passes"] < 12) == drafted == (r["alpha"] is not None) == (r["proposed"] > 0)
    assert 0 <= r["accepted"] <= r["proposed"]
    assert r["exit_layer"] == (3 if "--exit-layer" in flags else None)
    assert r["do_no_harm"] == ("--do-no-harm" in flags) and r["tail"] == (4 if "--tail" in flags else None)
    # eagle has places for 6 levels of 5 ranks
    assert r["tree"] == (30 if draft == "eagle" else None) and r["threads"] == torch.get_num_threads()


def test_a_step_costs_the_weights_that_it_reads(drafter, stories):
    exit4 = drafter("--do-no-harm")
    assert exit4.rule.cost == pytest.approx((4 * BLOCK + HEAD) / (24 * BLOCK + HEAD))
    assert exit4.rule.most == MOST
    both = drafter("--draft", "model", "--do-no-harm", "--tail", "7", "--gamma", "3")
    head_draft, tail = both.drafters
    cost = (SMALL_BLOCKS + SMALL_HEAD) / (24 * BLOCK + HEAD)
    assert head_draft.rule.cost == pytest.approx(cost) and head_draft.rule.most == 3
    assert isinstance(both, Then) and (tail.rule.most, tail.n) == (7, 3)


def test_a_draft_vocabulary_shortens_the_head(call, plain, drafter, tmp_path):
    """Of the draft, whether it is the model's own or a small model's; the text stays."""
    path, ids = tmp_path / "vocab.json", [0, *range(200, 1223)]
    path.write_text(json.dumps({"ids": ids}))
    flags = "--draft-vocab", str(path)
    for draft, cost in ((["--exit-layer", "2"], 2 * BLOCK + HEAD / 4),
                        (["--draft", "model"], SMALL_BLOCKS + SMALL_HEAD / 4)):
        assert as_json(call, *flags, *draft)["outputs"][0]["ids"] == plain[1]
        made = drafter("--do-no-harm", *flags, *draft)
        assert made.rule.cost == pytest.approx(max(DoNoHarm.FLOOR, cost / (24 * BLOCK + HEAD)))
        assert made.model.ids.tolist() == ids
    path.write_text('{"ids": [4096]}')
    call.refuses(["x", *flags], tmp_path, "vocab.json", "4095")


@pytest.mark.parametrize("kind, flags", [
    ("nf4", ["--draft-model", SMALL]), ("int8", ["--draft", "nf4", "--exit-layer", "4"])])
def test_a_quantised_target(call, once, monkeypatch, kind, flags):
    """Drafting does not change its text; the draft is whole, or has few bits of its own."""
    honest, begun = generate.begin, []
    monkeypatch.setattr(generate, "begin", lambda *args: begun.append(args) or honest(*args))
    r = as_json(call, "--quant", kind, "--compare", *flags)
    assert r["quant"] == kind and r["identical"] is True and r["target_passes"] < 12
    assert all(isinstance(args[0].blocks[0].mlp.down, KINDS[kind]) for args in begun)
    draft = begun[0][3].drafters[0].model
    assert isinstance(draft.blocks[0].mlp.down, torch.nn.Parameter) == ("--draft-model" in flags)


def test_a_draft_in_few_bits_costs_its_own_bytes(drafter, stories):
    made = drafter("--draft", "int8", "--exit-layer", "2", "--do-no-harm")
    own, whole = byte_costs(made.model), byte_costs(stories[0])
    assert made.sublayers == list(range(4)) and made.model.tok is stories[0].tok
    assert made.rule.cost == pytest.approx((sum(own.sublayers[:4]) + own.head) / whole.whole)


def test_drafting_by_itself(call, drafter, stories, tmp_path):
    """--draft auto is Pace: with costs by weights, or of a table; with what lies beside the weights, or is
    named."""
    r = as_json(call, "--draft", "auto")
    assert sum(r["chosen"].values()) == r["target_passes"]
    L = stories[0].c.n_layers
    table = {"sublayers": [1.0] * (2 * L), "head": 5.0, "blocks": [[1, 1.0], [17, 4.0]],
             "slot": 0.5, "at": 64}
    (tmp_path / "costs.json").write_text(json.dumps(table))
    (tmp_path / "draft_vocab.json").write_text(json.dumps({"ids": [0, *range(200, 1223)]}))
    flags = "--costs", str(tmp_path / "costs.json"), "--skip", "a3,m4", "--gamma", "5"
    assert as_json(call, *flags, "--draft", "auto")["costs"] == flags[1]
    pace = drafter(*flags, "--draft", "auto", "--draft-vocab", tmp_path / "draft_vocab.json")
    assert pace.costs.blocks == ((1, 1.0), (17, 4.0)) and (pace.costs.slot, pace.costs.at) == (0.5, 64)
    ways = {way.name: way.drafter for way in pace.ways}
    assert pace.most == 5 and len(ways["skip set"].sublayers) == 2 * L - 2
    (tmp_path / "skip.json").write_text('{"attn": [2]}')
    pace = drafter("--draft", "auto", "--model", tmp_path)
    assert pace.ways[-1].name == "skip set" and pace.ways[-1].drafter.model.share == 1024 / 4096


@pytest.mark.parametrize("flags, draft", [
    ([], "auto"), (["--draft-vocab", "v.json"], "auto"), (["--tail", "3"], "exit"),
    (["--exit-layer", "2"], "exit"), (["--fast"], "exit"), (["--costs", "c.json"], "auto")])
def test_what_drafts_where_no_flag_says(flags, draft):
    assert generate.parse(["x", *flags]).draft == draft


def test_measured_costs_are_kept_and_the_text_repeats(call, tmp_path, monkeypatch):
    """Drawn or not: the second run reads the table of the first one, though another measurement would give
    another."""
    measured = []

    def quick(model):
        measured.append(len(measured) + 1)
        return Costs((0.1 / measured[-1], 1 / 3) * model.c.n_layers, 0.7, ((1, 1.0), (17, 4 / 3)), 1e-6, 64)

    monkeypatch.setattr("support.costs.quick", quick)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flags, warm = ("--costs", "measured"), ("--temperature", "0.8", "--seed", "5")
    status, out, err = call("Once upon a time", *SHORT, "--json", *flags)
    assert status == 0 and err.startswith("costs: measuring")
    runs = [json.loads(out), *(as_json(call, *flags, *more) for more in ((), warm, warm))]
    assert {(r["draft"], r["costs"]) for r in runs} == {("auto", "measured")}
    found = [[r[key] for key in ("outputs", "chosen", "beliefs", "cost_table")] for r in runs]
    assert found[0] == found[1] and found[2] == found[3]
    assert measured == [1] and runs[0]["cost_table"]["sublayers"][:2] == [0.1, 1 / 3]
    assert as_json(call, "--draft", "none")["cost_table"] is None


def test_costs_are_measured_unasked_for_large_models_only(stories, monkeypatch):
    model, tokenizer = stories
    monkeypatch.setattr("support.costs.quick", lambda model: pytest.fail("nothing should be measured"))

    def costs(*flags):
        a = generate.parse(["x", "--draft", "auto", *flags])
        drafts.drafters(a, model, tokenizer)
        return a.costs, a.table

    assert costs() == ("weights", byte_costs(model)) == costs("--costs", "weights")
    monkeypatch.setattr(drafts, "LARGE", 1e3)
    table = replace(byte_costs(model), head=7.0)
    monkeypatch.setattr(drafts, "kept_costs", lambda model: (table, None))
    assert costs() == ("measured", table) == costs("--costs", "measured")
    assert costs("--fast")[0] == "weights", "passes of parts are not recorded"
    assert costs("--temperature", "0.8")[0] == "weights", "the same seed writes the same text"
    assert costs("--temperature", "0.8", "--costs", "measured")[0] == "measured"
    with pytest.raises(ValueError, match="--costs measured goes with one process and without --fast"):
        costs("--fast", "--costs", "measured")
    monkeypatch.setattr("machine.parallel.place", lambda: (0, 2))
    assert costs()[0] == "weights", "each process would measure its own"


def test_trained_heads_beside_the_weights_are_candidates(tmp_path, capsys):
    """Those of other weights, too, but not those of another shape, and none where passes are replayed."""
    model, tokenizer = checkpoint.load(STORIES, dtype=torch.float32)
    for file in STORIES.iterdir():
        if file.name != "heads":
            (tmp_path / file.name).symlink_to(file)
    for kind in ("kangaroo", "prophet", "medusa"):
        (tmp_path / "heads" / kind).mkdir(parents=True)
    heads.save(heads.Kangaroo(model, 2), tmp_path / "heads" / "kangaroo")
    heads.save(heads.Medusa(checkpoint.load(STORIES.parent / "stories-gemma2")[0], 2),
               tmp_path / "heads" / "medusa")
    model.norm.weight.data *= 1.5
    heads.save(heads.Prophet(model, 1), tmp_path / "heads" / "prophet")
    model, tokenizer = checkpoint.load(STORIES, dtype=torch.float32)

    def names(*flags):
        a = generate.parse(["x", "--draft", "auto", "--model", str(tmp_path), *flags])
        return [way.name for way in drafts.drafters(a, model, tokenizer)().ways]

    found = names()
    assert found[-2:] == ["kangaroo", "prophet"] and "medusa" not in found
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("draft: ")]
    assert [["medusa" in line, "prophet" in line] for line in lines] == [[True, False], [False, True]]
    for flags in (["--fast"], ["--quant", "int8"]):
        assert not {"kangaroo", "prophet"} & set(names(*flags))


def test_every_run_has_a_drafter_of_its_own(stories):
    """A rule that has learnt a text knows it the second time; the weights are read once."""
    for flags in ([], ["--draft", "model"], ["--tail", "3"]):
        make = drafts.drafters(generate.parse(["x", "--do-no-harm", *flags]), *stories)
        first, second = ((d.drafters[0] if "--tail" in flags else d) for d in (make(), make()))
        assert first.rule is not second.rule and first.model is second.model


def test_gamma_of_a_skip_file(stories, tmp_path):
    """0 says that the search which wrote the file found no gain: then nothing is drafted unasked."""
    file = tmp_path / "skip.json"

    def gamma(found, *flags):
        file.write_text(json.dumps({"attn": [3, 11], "mlp": [4], "note": "ignored"} | found))
        a = generate.parse(["x", "--skip", str(file), *flags])
        drafts.drafters(a, *stories)
        return a.gamma, a.gainless

    assert gamma({}) == (3, False)
    assert gamma({"gamma": 5}) == (5, False) and gamma({"gamma": 0}) == (0, True)
    assert gamma({"gamma": 0}, "--gamma", "1") == (1, False), "what the user says comes first"
    assert gamma({"gamma": 0}, "--do-no-harm") == (MOST, False), "the rule finds its own"
    for wrong in (-1, 2.5, True):
        with pytest.raises(ValueError, match="skip.json.*gamma"):
            gamma({"gamma": wrong})


# --- beside plain decoding


def test_compare(call, once):
    r = as_json(call, "--compare")
    plain = r["baseline"]
    assert r["identical"] is True and r["first_divergence"] is None
    assert plain["outputs"] == r["outputs"] and plain["new_tokens"] == plain["target_passes"] == 12
    assert as_json(call, "--compare", "--draft", "none")["ratio"] == 1
    assert as_json(call, "--compare", "--temperature", "0.8")["identical"] is None
    assert "temperature 0" in call("Once", *SHORT, "--compare", "--temperature", "0.8")[1]
    nothing = as_json(call, "--compare", "--max-new", "0")
    assert nothing["ratio"] is None and nothing["identical"] is True and nothing["chosen"] == {}


@pytest.mark.parametrize("flags", [["--draft", "int8"], ["--draft", "ngram", "--compare"]])
def test_recorded_passes_write_the_same_text(call, once, plain, monkeypatch, flags):
    """On recordings of paper, as compiling takes long; all is recorded before the first token is printed."""
    made = []
    for module in (generate, drafts):
        monkeypatch.setattr(module, "Recorded", lambda m: made.append(Recorded(m, "paper")) or made[-1])
    assert not as_json(call, "--draft", "none")["fast"] and not made
    r = as_json(call, "--fast", *flags)
    assert r["outputs"][0]["ids"] == plain[1] and r["fast"] and r.get("identical", True)
    assert len(made) == (2 if "int8" in flags else 1) and made[0].frozen and made[0].replays()


def test_compare_divides_tokens_a_second(call, monkeypatch):
    """Two runs may write different numbers of tokens, and reading the prompt is not decoding."""
    runs, rules = {False: Run([[9] * 6], 6, 100.0, 2.0), True: Run([[9] * 30], 10, 300.0, 5.0)}, []

    def measure(start, drafter, rows):
        rules.append(drafter)
        return runs[drafter is not None]

    monkeypatch.setattr(stats, "measure", measure)
    r = as_json(call, "--compare", "--temperature", "1")
    assert (r["new_tokens"], r["seconds"], r["reading_seconds"], r["tokens_per_second"]) == (30, 5, 300, 6)
    assert len(set(map(id, rules))) == len(rules) / 2 + 1, "no two runs share what has learnt a text"
    plain = {key: value for key, value in r["baseline"].items() if key != "outputs"}
    assert plain == {"new_tokens": 6, "seconds": 2, "reading_seconds": 100, "tokens_per_second": 3,
                     "target_passes": 6} and r["ratio"] == 2


@pytest.fixture
def crooked(monkeypatch, once):
    """Token 5 of the first run, the one that is printed, is not the target's."""
    honest, runs = generate.rounds, []

    def rounds(*args):
        runs.append(0)
        for state, r in honest(*args):
            at = 5 - runs[-1]
            if len(runs) == 1 and 0 <= at < len(r.new[0]):
                r.new[0][at] += 1
            runs[-1] += len(r.new[0])
            yield state, r

    monkeypatch.setattr(generate, "rounds", rounds)
    return runs


@pytest.mark.parametrize("near", [None, True, False])
def test_compare_reports_a_difference_and_its_gap(call, crooked, monkeypatch, near):
    """The text that is judged is the printed one, and what no near-tie explains is a failure."""
    if near is not None:
        d = {"position": 5, "ids": [1, 2], "gap": 0.0625, "rounding": 0.25, "near_tie": near}
        monkeypatch.setattr(stats, "parting", lambda *args: d)
        status, out, _ = call("Once upon a time", *SHORT, "--compare")
        assert status == (0 if near else 1) and "0.0625" in out and ("NOT identical" in out) == (not near)
        return
    status, out, _ = call("Once upon a time", *SHORT, "--compare", "--json")
    r = json.loads(out)
    ours, plain, d = r["outputs"][0]["ids"], r["baseline"]["outputs"][0]["ids"], r["first_divergence"]
    assert status == 1 and r["identical"] is False and len(crooked) > 2
    assert d["ids"] == [ours[5], plain[5]] == [plain[5] + 1, plain[5]]
    assert (d["output"], d["position"], d["near_tie"]) == (0, 5, False) and d["gap"] > d["rounding"] > 0


def test_seed_repeats_a_sampled_run(call):
    texts = [as_json(call, "--temperature", "1", "--top-p", "0.9", "--seed", s)["outputs"] for s in (1, 1, 3)]
    assert texts[0] == texts[1] != texts[2]


def test_end_of_text_ends_the_answer(call):
    argv = "User: No, that is all, thank you.\nAssistant:", "--max-new", "60", "--dtype", "float32", "--json"
    ids = json.loads(call(*argv)[1])["outputs"][0]["ids"]
    assert ids[-1] == 0 and 0 not in ids[:-1] and 4 < len(ids) < 60


# --- batches and pipes


def test_batch_from_a_file(call, tmp_path):
    """Each line of the file is a row of one ragged batch, with the text it has alone."""
    texts, lines = ["Once upon a time", "User: hello", "x"], tmp_path / "prompts.txt"
    lines.write_text("\n".join(texts))
    common = ["--max-new", "9", "--dtype", "float32"]
    alone = [json.loads(call(text, "--json", *common)[1])["outputs"][0] for text in texts]
    r = json.loads(call("--prompt-file", lines, "--json", *common)[1])
    assert r["outputs"] == alone and r["new_tokens"] == 27
    out = call("--prompt-file", lines, *common)[1]
    assert all(text + o["text"] in out for text, o in zip(texts, alone, strict=True))


@pytest.mark.parametrize("flag", [["-"], ["--prompt", "-"]])
def test_standard_input(call, monkeypatch, flag):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Once upon\na time\n")))
    out = json.loads(call(*flag, *SHORT, "--json")[1])["outputs"][0]
    assert out["prompt"] == "Once upon\na time", "only the newline that ends the input goes"


def test_standard_input_that_is_no_text(call, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff")))
    call.refuses(["-"], tmp_path, "the prompt is not valid UTF-8 at character 2")


def test_ctrl_c_prints_what_there_is(call, monkeypatch):
    honest = generate.rounds

    def interrupted(*args, **kwargs):
        steps = honest(*args, **kwargs)
        yield next(steps)
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "rounds", interrupted)
    status, out, err = call("Once upon a time", *SHORT, "--draft", "exit", "--compare")
    assert status == 130 and out.startswith("Once upon a time, there was") and "3 tokens in 1 pass" in out
    status, out, _ = call("Once upon a time", *SHORT, "--draft", "exit", "--json")
    assert status == 130 and json.loads(out)["interrupted"] and json.loads(out)["new_tokens"] == 3


def test_a_long_prompt_shows_how_much_is_read(monkeypatch):
    bars = []
    monkeypatch.setattr(generate, "tqdm",
                        lambda **kwargs: bars.append(kwargs) or tqdm(**kwargs | {"disable": False}))
    model = make(replace(LLAMA, max_len=512))
    reading = generate.Reading(model, 300)
    assert len(list(generate.rounds(reading, [[5] * 300], 3, SelfDraft(model, range(4), 2)))) <= 3
    assert bars[0]["disable"] is True and generate.Reading(model, 2000) and bars[1]["disable"] is None
    assert reading.bar.n == 300, "only the prompt counts"


def test_what_goes_with_one_process_only(call, monkeypatch, tmp_path):
    monkeypatch.setattr(generate.parallel, "place", lambda: (0, 2))
    for argv, culprit in ((["-"], "standard input"), (["x", "--fast"], "--fast")):
        call.refuses(argv, tmp_path, culprit)


# --- bad input


@pytest.mark.parametrize("argv, culprit", [
    ([], "prompt"), (["x", "--prompt", "y"], "prompt"), (["x", "--prompt-file", ""], "--prompt-file"),
    (["x", "--picture", "run.gif"], "run.gif"), (["x", "--page", "run.png"], "run.png"),
    (["x", "--page", "a.html", "--draft", "eagle", "--tree", "3"], "--page"),
    (["x", "--max-new", "1e3"], "1e3"), (["x", "--temperature", "inf"], "inf"),
    (["x", "--top-k", "0"], "top_k"), (["x", "--frobnicate"], "--frobnicate"),
    (["x", "--seed", str(2**70)], "--seed"), (["x", "--gamma", "3000000"], "3000000"),
    (["x", "--draft", "skip"], "--skip"), (["x", "--skip", "a3", "--exit-layer", "2"], "--skip"),
    (["x", "--draft", "ngram", "--exit-layer", "2"], "--exit-layer"),
    (["x", "--draft", "none", "--do-no-harm"], "--do-no-harm"),
    (["x", "--draft", "ngram", "--tail", "3"], "--tail"), (["x", "--tail", "0"], "--tail"),
    (["x", "--draft", "auto", "--tail", "3"], "--tail"), (["x", "--tree", "3"], "--tree"),
    (["x", "--draft", "eagle", "--tree", "0"], "--tree"), (["x", "--heads", "h"], "--heads"),
    (["x", "--draft", "eagle", "--draft-vocab", "v"], "--draft-vocab")], ids=str)
def test_bad_flags_are_refused_before_a_model_is_loaded(argv, culprit):
    with pytest.raises(ValueError, match=culprit):
        generate.parse([*argv, "--model", "nowhere"])


@pytest.mark.parametrize("argv, culprit", [
    (["--prompt-file", "nowhere.txt"], "nowhere.txt"), (["x", "--chat"], "chat template"),
    (["x", "--exit-layer", "25"], "25"), (["x", "--skip", "a24"], "24"),
    (["x", "--costs", "nowhere.json"], "nowhere.json"), (["x", "--draft-model", "nowhere"], "nowhere"),
    (["x", "--draft", "medusa", "--heads", "nowhere"], "nowhere"),
    (["x", "--draft", "medusa", "--heads", STORIES / "heads" / "eagle"], "--draft eagle"),
    (["x", "--device", "abacus"], "abacus"), (["word " * 600], "602 tokens")], ids=lambda x: str(x)[:40])
def test_bad_flags(call, argv, culprit, tmp_path):
    call.refuses(argv, tmp_path, culprit)


def test_a_gpu_that_is_not_there(call, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    call.refuses(["x", "--device", "cuda:2"], tmp_path, "cuda:2", "cuda:1")
    for name in ("cuda", "cuda:1"):
        assert str(checkpoint.find_device(name)) == name


def test_draft_model_of_another_tokenizer(call, tmp_path):
    shutil.copytree(SMALL, tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    spec = json.loads(file.read_text())
    vocab = spec["model"]["vocab"]
    first, second = list(vocab)[300:302]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(spec))
    call.refuses(["x", "--draft-model", tmp_path / "other"], tmp_path, "other: its tokenizer differs")


def test_as_a_program_from_another_folder(tmp_path):
    """It writes its text and ends with its status. A reader that stops early, such as `head`, causes no
    traceback."""
    command = [sys.executable, ROOT / "generate.py", "Hi", "--max-new", "3"]
    nobody, pipe = os.pipe()
    os.close(nobody)  # before anything is written, whoever is faster
    programs = [subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=subprocess.PIPE, text=True)
                for out in (subprocess.PIPE, pipe)]  # side by side, as importing torch takes the longest
    os.close(pipe)
    (text, no_error), (_, no_traceback) = (program.communicate() for program in programs)
    assert [program.returncode for program in programs] == [0, 141]
    assert text.startswith("Hi") and no_error == no_traceback == ""
