"""The command line: what it prints, the JSON that scripts read, and one line with status 2 for bad input."""

import io
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, LLAMA, make
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm

import checkpoint
import generate
from control import Then
from support import chat

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
    text, summary = out.split("\n", 1)
    assert text == "Once upon a time, there was a little girl named Lily. She loved to"
    assert "12 tokens in" in summary and "draft: exit behind block 2, gamma 2" in summary
    assert "\x1b" not in out, "no colours where nobody watches"


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


@pytest.mark.parametrize("flags", [["--do-no-harm"], ["--skip", "a3,m4", "--do-no-harm", "--gamma", "5"],
                                   ["--draft", "model", "--do-no-harm", "--tail", "4"], ["--tail", "6"]],
                         ids=" ".join)
def test_how_far_to_draft(call, flags):
    plain = as_json(call, "--dtype", "float32", "--draft", "none")
    r = as_json(call, "--dtype", "float32", *flags)
    assert r["outputs"] == plain["outputs"] and r["target_passes"] < 12
    careful, gamma = "--do-no-harm" in flags, 5 if "--gamma" in flags else 16
    assert (r["do_no_harm"], r["gamma"]) == ((True, gamma) if careful else (False, 2))
    assert r["tail"] == (int(flags[-1]) if "--tail" in flags else None)
    _, out, _ = call("Once upon a time", *SHORT, *flags)
    assert (f"gamma up to {gamma} as it pays" in out) == careful
    assert (f"then up to {r['tail']} by n-gram;" in out) == ("--tail" in flags)


def test_a_step_costs_the_weights_that_it_reads(call):
    model, tokenizer = checkpoint.load(ROOT / "weights" / "stories-llama", dtype=torch.float32)
    a = generate.parse(["x", "--do-no-harm"])
    exit2 = generate.make_drafter(a, model, tokenizer, "cpu")
    block, head = 256 * 64 * (4 + 4 + 2 + 2) + 3 * 256 * 704, 4096 * 256
    assert exit2.rule.c == pytest.approx((2 * block + head) / (12 * block + head)) and exit2.rule.most == 16
    a = generate.parse(["x", "--draft", "model", "--do-no-harm", "--tail", "7", "--gamma", "3"])
    both = generate.make_drafter(a, model, tokenizer, "cpu")
    little = 2 * (128 * 64 * (2 + 2 + 1 + 1) + 3 * 128 * 352) + 4096 * 128
    assert both.a.rule.c == pytest.approx(little / (12 * block + head)) and both.a.rule.most == 3
    assert isinstance(both, Then) and (both.b.gamma, both.b.n) == (7, 3)


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
    honest = generate.timed

    def crooked(model, prompts, a, drafter):
        outputs, seconds = honest(model, prompts, a, drafter)
        if drafter:
            outputs[0][5] += 1
        return outputs, seconds

    monkeypatch.setattr(generate, "timed", crooked)
    for dtype, status in (("bfloat16", 0), ("float32", 1)):
        argv = ["Once upon a time", *SHORT, "--compare", "--dtype", dtype]
        got, out, _ = call(*argv)
        assert got == status and "NOT identical" in out and "part at new token 5" in out
        r = json.loads(call(*argv, "--json")[1])
        d = r["first_divergence"]
        assert d["ids"][0] == r["baseline"]["outputs"][0]["ids"][5], "the best token there is the plain one"
        assert (d["output"], d["position"]) == (0, 5) and d["top2_gap"] > 0 and len(d["ids"]) == 2


def test_seed_repeats_a_sampled_run(call):
    texts = [as_json(call, "--temperature", "1", "--top-p", "0.9", "--seed", s)["outputs"] for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_end_of_text_ends_the_answer(call):
    ids = as_json(call, "--max-new", "400", "--dtype", "float32")["outputs"][0]["ids"]
    assert ids[-1] == 0 and 0 not in ids[:-1] and len(ids) < 400


def test_picture(call, tmp_path):
    for name, start in (("run.png", b"\x89PNG"), ("run.svg", b"<?xml")):
        assert call("Once", *SHORT, "--picture", tmp_path / name)[0] == 0
        assert (tmp_path / name).read_bytes().startswith(start)


# --- batches and pipes


def test_batch_from_a_file(call, tmp_path):
    """Each line of the file is a row of one ragged batch, with the text it has alone."""
    texts = ["Once upon a time", "User: hello", "x"]
    lines, jsonl = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    lines.write_text("\n".join(texts[:2]) + "\n\n" + texts[2])
    jsonl.write_text("".join(json.dumps({"id": i, "prompt": text}) + "\n" for i, text in enumerate(texts)))
    common = ["--max-new", "9", "--json", "--dtype", "float32"]
    alone = [json.loads(call(text, *common)[1])["outputs"][0] for text in texts]
    for file in (lines, jsonl):
        r = json.loads(call("--prompt-file", file, *common)[1])
        assert r["outputs"] == alone and r["new_tokens"] == 27
    out = call("--prompt-file", lines, "--max-new", "9")[1]
    assert all(text + o["text"] in out for text, o in zip(texts, alone, strict=True))


@pytest.mark.parametrize("flag", [["-"], ["--prompt", "-"]])
def test_standard_input(call, monkeypatch, flag):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Once upon\na time\n")))
    out = json.loads(call(*flag, *SHORT, "--json")[1])["outputs"][0]
    assert out["prompt"] == "Once upon\na time", "only the newline that ends the input goes"


def test_standard_input_that_is_no_text(call, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff")))
    bad(call, "the prompt is not valid UTF-8 at character 2", "-")


def test_ctrl_c_prints_what_there_is(call, monkeypatch):
    honest = generate.rounds

    def interrupted(*args, **kwargs):
        steps = honest(*args, **kwargs)
        yield next(steps)
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "rounds", interrupted)
    status, out, err = call("Once upon a time", *SHORT, "--compare")
    assert status == 130 and out.startswith("Once upon a time, there was") and "3 tokens in 1 pass" in out
    status, out, _ = call("Once upon a time", *SHORT, "--json")
    assert status == 130 and json.loads(out)["interrupted"] and json.loads(out)["new_tokens"] == 3


def test_a_long_prompt_shows_how_much_is_read(monkeypatch, capsys):
    bars = []
    monkeypatch.setattr(
        generate, "tqdm", lambda **kwargs: bars.append(kwargs) or tqdm(**kwargs | {"disable": False})
    )
    model, _ = checkpoint.load(STORIES, "cpu")
    reading = generate.Reading(model, 300)
    generate.generate(reading, [[5] * 300], 3)
    assert bars[0]["disable"] is True and generate.Reading(model, 2000) and bars[1]["disable"] is None
    assert reading.bar.n == 300, "only the prompt counts"


def test_reader_that_stops_early(tmp_path):
    """`python generate.py ... | head -c 5` ends without a traceback."""
    run = f"{sys.executable} {ROOT / 'generate.py'} 'Once upon a time' --max-new 60 | head -c 5"
    r = subprocess.run(run, shell=True, capture_output=True, text=True)
    assert r.stdout == "Once " and r.stderr == ""


# --- chat


LLAMA3 = (
    "{{- bos_token }}{%- for message in messages %}{{- '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
GEMMA2 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}"
    "{% endif %}{% for message in messages %}{% if message['role'] == 'assistant' %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + "
    "message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
CHATS = {
    "llama": (
        LLAMA3,
        ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "gemma2": (
        GEMMA2,
        ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
        "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
    ),
}


def chat_folder(folder, family, adds_bos=True):
    """A checkpoint built like the real ones: sharded, bfloat16, byte-level tokenizer with the family's
    special tokens, template in tokenizer_config.json; small and random."""
    template, special, _ = CHATS[family]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet, vocab_size=300)
    tokenizer.train_from_iterator(["hello"], trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{special[0]} $A", special_tokens=[(special[0], 0)]
        )
    c = replace(FAMILIES[family], vocab_size=tokenizer.get_vocab_size(), max_len=96, bos=0, eos=(1,))
    checkpoint.save(make(c).bfloat16(), folder, tokenizer)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in shards.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    spec = {"bos_token": special[0], "eos_token": {"content": special[1]}, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(spec))
    return folder


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("family", CHATS)
def test_chat(call, tmp_path, monkeypatch, family, adds_bos):
    folder, asked = chat_folder(tmp_path / family, family, adds_bos), {}
    honest = generate.rounds
    monkeypatch.setattr(
        generate,
        "rounds",
        lambda model, prompts, *a, **kw: (
            asked.update(prompts=prompts, eos=kw["eos"]) or honest(model, prompts, *a, **kw)
        ),
    )
    status, out, err = call("Hi", "--chat", "--model", folder, *SHORT, "--json")
    assert status == 0, err
    tokenizer = checkpoint.load(folder, "cpu")[1]
    ids = asked["prompts"][0]
    assert ids[0] == 0 and 0 not in ids[1:], "exactly one begin-of-text"
    assert tokenizer.decode(ids[1:], skip_special_tokens=False) == CHATS[family][2]
    turn_end = tokenizer.token_to_id(CHATS[family][1][-1])
    assert asked["eos"] == {1, turn_end}, "stops at end-of-text and at the template's end of turn"
    assert json.loads(out)["outputs"][0]["prompt"] == "Hi"


def test_chat_template_in_a_file_of_its_own_wins(tmp_path):
    folder = chat_folder(tmp_path / "m", "llama")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.content | tojson }}]{% endfor %}"
    )
    assert chat.read_template(folder)([{"role": "user", "content": "a<b"}]) == '["a<b"]'


@pytest.mark.parametrize(
    "template, message",
    [
        (None, "no chat template, so this is a base model"),
        (7, "no chat template"),
        ([{"name": "tools", "template": "x"}], "no chat template"),
        ("{% for x in %}", "the chat template fails"),
        ("{{ raise_exception('no\nusers here') }}", "the chat template fails: no users here"),
        ("{{ messages.__class__.__mro__ }}", "the chat template fails: access to attribute '__class__'"),
        ("{{ 1 / 0 }}", "the chat template fails: division by zero"),
        ("", "the prompt is empty"),
    ],
)
def test_bad_templates(call, tmp_path, template, message):
    folder = chat_folder(tmp_path / "m", "llama")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    bad(call, f"...{message}...", "Hi", "--chat", "--model", folder)


# --- bad input


def bad(call, message, *argv):
    status, out, err = call(*argv)
    assert status == 2 and out == "", "nothing is printed before the error"
    assert err.startswith("generate.py: ") and err.count("\n") == 1, "one line on standard error"
    line, parts = err[len("generate.py: ") : -1], message.split("...")  # ... stands for a folder, say
    exact = line == message
    assert exact or len(parts) > 1 and line.startswith(parts[0]) and line.endswith(parts[-1]), line
    assert all(part in line for part in parts), line


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "give one prompt: as an argument, with --prompt, or a batch with --prompt-file"),
        (
            ["x", "--prompt", "y"],
            "give one prompt: as an argument, with --prompt, or a batch with --prompt-file",
        ),
        (["--prompt-file", "nowhere.txt"], "nowhere.txt: no such file"),
        (["--prompt-file", str(ROOT)], "...: no such file"),
        (["--prompt", ""], "the prompt is empty: give it at least one character"),
        (["x", "--picture", "run.gif"], "--picture must name a .png or .svg file, got run.gif"),
        (["x", "--picture", ""], "--picture is empty"),
        (["x", "--prompt-file", ""], "--prompt-file is empty"),
        (["x", "--chat"], "...: no chat template, so this is a base model: prompt it without --chat"),
        (["x", "--max-new", "1e3"], "argument --max-new: invalid int value: '1e3'; see --help"),
        (["x", "--temperature", "warm"], "argument --temperature: invalid float value: 'warm'; see --help"),
        (["x", "--temperature", "inf"], "temperature must be 0 (greedy) or a positive number, got inf"),
        (["x", "--top-p", "nan"], "top_p must lie in (0, 1], got nan"),
        (["x", "--min-p", "-1"], "min_p must lie in (0, 1], got -1.0"),
        (["x", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'...; see --help"),
        (["x", "--skip", "a1,b2"], "a1,b2: no such file"),
        (["x", "--skip", ""], "--skip is empty"),
        (["x", "--skip", str(ROOT)], "...: no such file"),
        (["x", "--draft", "none", "--draft-model", "d"], "--draft-model goes with --draft model, not none"),
        (["x", "--draft-model", str(ROOT)], "...config.json: no such file"),
        (["x", "--model", ""], "--model is empty"),
        (["x", "--model", str(ROOT / "README.md")], "...README.md: no such folder"),
        (["x", "--frobnicate"], "unrecognized arguments: --frobnicate; see --help"),
        (["x", "--draft", "magic"], "argument --draft: invalid choice: 'magic'...; see --help"),
        (["x", "--gamma", "two"], "argument --gamma: invalid int value: 'two'; see --help"),
        (["x", "--gamma", "-1"], "gamma, how many tokens to draft, must be a whole number from 0 up, got -1"),
        (["x", "--max-new", "-5"], "max_new must be at least 0, got -5"),
        (["x", "--temperature", "-0.1"], "temperature must be 0 (greedy) or a positive number, got -0.1"),
        (["x", "--temperature", "nan"], "temperature must be 0 (greedy) or a positive number, got nan"),
        (["x", "--top-k", "0"], "top_k must be a whole number, at least 1, got 0"),
        (["x", "--top-p", "0"], "top_p must lie in (0, 1], got 0.0"),
        (["x", "--top-p", "1.1"], "top_p must lie in (0, 1], got 1.1"),
        (["x", "--min-p", "2"], "min_p must lie in (0, 1], got 2.0"),
        (["x", "--seed", str(2**70)], "--seed must fit in 64 bits, got 1180591620717411303424"),
        (["x", "--exit-layer", "0"], "exit layer must lie between 1 and 12 (all blocks), got 0"),
        (["x", "--exit-layer", "13"], "exit layer must lie between 1 and 12 (all blocks), got 13"),
        (["x", "--skip", "a12"], "cannot skip the attention of block 12: blocks run from 0 to 11"),
        (["x", "--skip", "m99"], "cannot skip the MLP of block 99: blocks run from 0 to 11"),
        (
            ["x", "--skip", ",".join(f"a{i},m{i}" for i in range(12))],
            "the skip set leaves no sub-layer to draft with",
        ),
        (["x", "--skip", "nowhere.json"], "nowhere.json: no such file"),
        (["x", "--draft", "skip"], "--draft skip needs --skip with the sub-layers, such as a3,m4 or a file"),
        (["x", "--draft", "ngram", "--exit-layer", "2"], "--exit-layer goes with --draft exit, not ngram"),
        (["x", "--draft", "ngram", "--tail", "2"],
         "--do-no-harm and --tail go with --draft exit, skip or model, not ngram"),
        (["x", "--draft", "none", "--do-no-harm"],
         "--do-no-harm and --tail go with --draft exit, skip or model, not none"),
        (["x", "--tail", "0"], "--tail must be at least 1, got 0"),
        (["x", "--draft-model", "nowhere"], "nowhere: no such folder"),
        (["x", "--model", "nowhere"], "nowhere: no such folder"),
        (["x", "--device", "abacus"], "unknown device 'abacus': say cpu or cuda"),
        (["x", "--device", "meta"], "device meta is not supported: say cpu or cuda"),
        ([""], "the prompt is empty: give it at least one character"),
        (["ab\udcff"], "the prompt is not valid UTF-8 at character 2"),
        (["word " * 600], "prompt 0 has 602 tokens and fills the context of 512"),
    ],
)
def test_bad_flags(call, argv, message):
    bad(call, message, *argv)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("p.txt", b"", "p.txt: no prompts, every line is empty"),
        ("p.txt", b"\n  \n", "p.txt: no prompts, every line is empty"),
        ("p.txt", b"caf\xe9", "p.txt: not readable as UTF-8 text"),
        ("p.txt", b"ok\n" + b"word " * 600, "prompt 1 has"),
        ("p.jsonl", b"Once", 'p.jsonl, line 1: expected a JSON object with a text under "prompt"'),
        ("p.jsonl", b'{"prompt": "a"}\n{"text": "b"}', "p.jsonl, line 2: expected a JSON object"),
        ("p.jsonl", b'{"prompt": 3}', "p.jsonl, line 1: expected a JSON object"),
        ("p.jsonl", b'{"prompt": ""}', "p.jsonl, line 1: expected a JSON object"),
        ("p.jsonl", b'["prompt"]', "p.jsonl, line 1: expected a JSON object"),
    ],
)
def test_bad_prompt_files(call, tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    bad(call, f"...{message}...", "--prompt-file", tmp_path / name)


def test_cuda_asked_for_and_absent(call, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    bad(
        call,
        "CUDA was asked for, but torch finds no GPU here: leave the device out, or say cpu",
        "x",
        "--device",
        "cuda",
    )


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
    bad(call, f"...{message}...", "x", "--skip", tmp_path / "skip.json")


def test_draft_model_of_another_tokenizer(call, tmp_path):
    shutil.copytree(SMALL, tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    spec = json.loads(file.read_text())
    vocab = spec["model"]["vocab"]
    first, second = list(vocab)[300:302]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(spec))
    bad(
        call,
        "...: its tokenizer differs from the target's: its ids mean other words",
        "x",
        "--draft-model",
        tmp_path / "other",
    )


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
