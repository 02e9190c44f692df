"""Where do two texts part that should be equal, from any engines, and does rounding explain it?

    python -m lab.verdict --model DIR --prompt "Once upon a time" ours.txt theirs.txt

A file holds what was written after the prompt, as text or in .json as a list of token ids. What is
compared are the ids of prompt and text together, because a token may cross the border between them.
After "time" the text "s up" changes the prompt's last token. The two logits are those of the model
in float64.

Exit status 0: equal, or a near-tie; 1: rounding does not explain it; 2: bad input.
"""
import json
import os
import sys
from pathlib import Path

import torch

import checkpoint
from checkpoint import guarded
from model import Refused
from speculative import check_prompts
from support import cli
from support.compare import parting


def parse(argv):
    p = cli.Parser(description="Near-tie or bug? Of two texts that should be equal.",
                   allow_abbrev=False)
    p.add_argument("texts", nargs=2, metavar="FILE", help="a text that was written, or in .json "
                   "its ids")
    p.add_argument("--model", required=True, metavar="DIR", help="a Hugging Face folder")
    p.add_argument("--prompt", required=True, metavar="TEXT", help="what both texts continue")
    p.add_argument("--dtype", choices=["bfloat16", "float16", "float32", "float64"],
                   default="bfloat16", help="in which the engines computed (default: bfloat16)")
    return p.parse_args(argv)


def ids_of(path, prompt, encode):
    """The ids of a prompt and its continuation. encode(text) makes ids."""
    # trap: read as text, different ends of lines would be the same
    text = Path(path).read_bytes().decode("utf-8-sig")
    if Path(path).suffix != ".json":
        return encode(prompt + text)
    ids = json.loads(text)
    if not (isinstance(ids, list) and all(type(i) is int for i in ids)):
        raise Refused("a .json file must hold a list of token ids")
    return encode(prompt) + ids


def run(argv):
    a = parse(argv)
    model, tokenizer = checkpoint.load(a.model, "cpu", torch.float64)

    def encode(text):
        return checkpoint.encode(tokenizer, text, model.c.bos)

    found = []
    for path in a.texts:
        with guarded(path):
            found.append(ids_of(path, a.prompt, encode))
    check_prompts(model, found, 1, a.texts)
    # all but a token that crosses the border
    prompt = os.path.commonprefix([encode(a.prompt), *found])
    ours, theirs = (ids[len(prompt) :] for ids in found)
    if ours == theirs:
        print(f"equal: {len(ours)} tokens")
        return 0
    if not prompt:
        raise Refused(f"the texts change the first token of the prompt {a.prompt!r}, and "
                      "nothing comes before it: name a longer prompt")
    d = parting(model, prompt, ours, theirs, getattr(torch, a.dtype))
    words = [tokenizer.decode([i]) for i in d["ids"]]
    if len(words) < 2:
        print(f"after {d['position']} equal tokens one text ends, and the other goes on with "
              f"{words[0]!r}")
        return 1
    verdict = "a near-tie" if d["near_tie"] else "NOT a near-tie: one of the two is wrong"
    print(f"after {d['position']} equal tokens {words[0]!r} and {words[1]!r} follow. The less "
          f"likely lies {d['gap']:.3g} below the best logit; rounding in {a.dtype} explains up to "
          f"{d['rounding']:.2g}: {verdict}")
    return int(not d["near_tie"])


def main(argv=None):
    return cli.main(run, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
