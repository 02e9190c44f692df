"""The port in JavaScript: it passes the kit whole, writes what Python writes on every shipped
model, and cuts texts into the same tokens. Where there is no node, these tests only warn."""
import json
import shutil
import subprocess
import warnings

import pytest
import torch
from tiny import command

from checkpoint import read_tokenizer
from porting import check
from porting.library_port import answer

ENGINE = check.ROOT / "porting" / "web" / "engine.js"
SHIPPED = ["stories-llama", "stories-gemma2", "stories-plain", "stories-draft"]
TEXTS = ["Once upon a time", "", "  Two  spaces,\n\n\ttabs \n", "It's 12.5 o'clock: \"we'LL've\"!",
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


def test_it_passes_the_whole_kit(call):
    if node("-e", "") is None:
        return
    status, out, _ = call("node", ENGINE)
    count = len(check.read_cases(check.TRACES)) + len(check.read_cases(check.STORIES)) + 1
    assert status == 0 and f"{count} of {count} cases pass" in out and "982 ok" in out


def drafted(folder, prompt, blocks, temperature=0.0, case=1):
    """A case of step 9: 40 tokens, drafted by the first blocks of the model."""
    sampling = {"temperature": temperature, "top_k": None, "top_p": None, "min_p": None}
    sublayers = list(range(2 * blocks))
    drafter = {"kind": "sublayers", "gamma": 3, "sublayers": sublayers, "widths": []}
    return {"case": case, "op": "rounds", "trees": False, "model": str(folder), "prompts": [prompt],
            "max_new": 40, "seed": 7, "eos": [0], "sampling": sampling, "drafter": drafter}


@torch.inference_mode()
def test_its_rounds_are_those_of_python_on_every_shipped_model():
    """Greedy and at temperature 0.8, drafting with half of the blocks: tokens, p and q."""
    requests = []
    for name in SHIPPED:
        folder = check.ROOT / "weights" / name
        L = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
        prompt = read_tokenizer(folder).encode("Once upon a time").ids
        for temperature in (0.0, 0.8):
            requests.append(drafted(folder, prompt, L // 2, temperature, len(requests)))
    for request, got in zip(requests, node(ENGINE, lines=requests) or [], strict=False):
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
          console.log(JSON.stringify([ids, t.decode(ids)]));
        }"""
    tokenizer = read_tokenizer(folder)
    want = [tokenizer.encode(text).ids for text in TEXTS]
    got = node("-e", script, ENGINE, folder, json.dumps(TEXTS))
    assert got in (None, [[ids, tokenizer.decode(ids, skip_special_tokens=False)] for ids in want])
