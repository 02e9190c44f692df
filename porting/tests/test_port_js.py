"""The port in JavaScript: with kernels and without, it passes the kit whole and writes what Python
writes on every shipped model; and it cuts texts into the same tokens. Where there is no node, these
tests only warn."""
import json
import shutil
import subprocess
import warnings

import pytest
import tokenizers
import torch
from tiny import command

from checkpoint import read_tokenizer
from porting import check
from porting.library_port import answer
from porting.web import assemble

ENGINE = check.ROOT / "porting" / "web" / "engine.js"
KERNELS, FUSED = assemble.BINARIES
WITH = pytest.mark.parametrize("kernels", [(), (KERNELS,)], ids=["loops", "kernels"])
SHIPPED = ["stories-llama", "stories-gemma2", "stories-plain", "stories-draft"]
LONG = ["a" * 20000, "the" * 4000, "qwertzuiop" * 3000]
TEXTS = ["\ufeffOnce", "Once upon a time", "", "  Two  spaces,\n\n\ttabs \n",
         "It's 12.5 o'clock: \"we'LL've\"!",
         "na\u00efve \u6771\u4eac \U0001f642", "an <|endoftext|> inside", "a\u00a0b\u0085c \u2028d"]
call = command(check.main)


def node(*args, lines=()):
    """The lines that node prints, as JSON; None if there is no node."""
    if not shutil.which("node"):
        warnings.warn("the port in JavaScript was not run: there is no node", stacklevel=2)
        return None
    text = "".join(json.dumps(line) + "\n" for line in lines)
    done = subprocess.run(["node", *args], input=text, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.split("\n") if line]


def test_the_kernels_are_those_of_their_source_and_small():
    """And a browser's own check finds nothing wrong with them."""
    source = assemble.SOURCE.read_text(encoding="utf-8")
    made = {path: assemble.assemble(source, fused) for path, fused in assemble.BINARIES.items()}
    assert all(path.read_bytes() == code for path, code in made.items())
    assert sum(map(len, made.values())) <= 2**14
    script = "console.log(WebAssembly.validate(require('fs').readFileSync(process.argv[1])))"
    assert node("-e", script, KERNELS) in (None, [True])


@WITH
def test_it_passes_the_whole_kit(call, kernels):
    if node("-e", "") is None:
        return
    status, out, _ = call("node", ENGINE, *kernels)
    count = len(check.read_cases(check.TRACES)) + len(check.read_cases(check.STORIES)) + 1
    assert status == 0 and f"{count} of {count} cases pass" in out and "982 ok" in out


def test_kernels_give_a_token_the_same_bits_in_every_block():
    """Five tokens together (two, two and one), and one by one."""
    tokens = [0, 423, 307, 260, 482]
    together = [{"first": 0, "tokens": tokens}]
    alone = [{"first": i, "tokens": [token]} for i, token in enumerate(tokens)]
    folder = str(check.ROOT / "weights" / "stories-llama")
    requests = [{"case": i, "op": "blocks", "model": folder, "blocks": blocks}
                for i, blocks in enumerate((together, alone))]
    answers = node(ENGINE, KERNELS, lines=requests) or []
    logits = [sum((block["data"] for block in answer["logits"]), []) for answer in answers]
    assert not logits or len(logits[0]) == 5 * 4096 and logits[0] == logits[1]


def drafted(folder, prompt, blocks, temperature=0.0, case=1):
    """A case of step 9: 40 tokens, drafted by the first blocks of the model."""
    sampling = {"temperature": temperature, "top_k": None, "top_p": None, "min_p": None}
    sublayers = list(range(2 * blocks))
    drafter = {"kind": "sublayers", "gamma": 3, "sublayers": sublayers, "widths": []}
    return {"case": case, "op": "rounds", "trees": False, "model": str(folder), "prompts": [prompt],
            "max_new": 40, "seed": 7, "eos": [0], "sampling": sampling, "drafter": drafter}


@WITH
@torch.inference_mode()
def test_its_rounds_are_those_of_python_on_every_shipped_model(kernels):
    """Greedy and at temperature 0.8, drafting with half of the blocks: tokens, p and q."""
    requests = []
    for name in SHIPPED:
        folder = check.ROOT / "weights" / name
        L = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
        prompt = read_tokenizer(folder).encode("Once upon a time").ids
        for temperature in (0.0, 0.8):
            requests.append(drafted(folder, prompt, L // 2, temperature, len(requests)))
    for request, got in zip(requests, node(ENGINE, *kernels, lines=requests) or [], strict=False):
        want = json.loads(json.dumps(answer(request, torch.float32)[0]))
        assert check.differ(want, got, 1e-3) is None, request["model"]
        assert any(line["accepted"] != [0] for line in want["rounds"])


@pytest.mark.parametrize("name", SHIPPED)
def test_its_tokenizer_is_that_of_python(name):
    folder = check.ROOT / "weights" / name
    script = """const { makeTokenizer } = require(process.argv[1]), fs = require("fs");
        const t = makeTokenizer(JSON.parse(fs.readFileSync(process.argv[2] + "/tokenizer.json")));
        for (const text of JSON.parse(process.argv[3])) {
          const ids = t.encode(text);
          console.log(JSON.stringify([ids, t.decode(ids), ids.map(t.reader()).join("")]));
        }"""
    tokenizer = read_tokenizer(folder)
    texts = TEXTS + LONG
    want = [tokenizer.encode(text).ids for text in texts]
    read = [tokenizer.decode(ids, skip_special_tokens=False) for ids in want]
    got = node("-e", script, ENGINE, folder, json.dumps(texts))
    assert got in (None, [[ids, text, text] for ids, text in zip(want, read, strict=True)])


def test_a_word_of_200_000_letters_and_digits_that_are_cut_one_by_one():
    script = """const { makeTokenizer } = require(process.argv[1]), fs = require("fs");
        const file = JSON.parse(fs.readFileSync(process.argv[2] + "/tokenizer.json"));
        console.log(makeTokenizer(file).encode("a".repeat(200000)).length);
        const digits = { type: "Digits", individual_digits: true };
        file.pre_tokenizer = { type: "Sequence", pretokenizers: [digits, file.pre_tokenizer] };
        console.log(JSON.stringify(makeTokenizer(file).encode("It is 1999, no 5")));"""
    folder = check.ROOT / "weights" / "stories-llama"
    tokenizer = read_tokenizer(folder)
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    count = len(tokenizer.encode("a" * 200_000).ids)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, tokenizer.pre_tokenizer])
    got = node("-e", script, ENGINE, folder)
    assert got in (None, [count, tokenizer.encode("It is 1999, no 5").ids])
