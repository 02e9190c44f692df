"""Two texts that should be equal, from any engines: where they part, and whether rounding explains it.

    python -m lab.verdict --model DIR --prompt "Once upon a time" ours.txt theirs.txt

A file holds what was written after the prompt: the text, or in .json a list of token ids. The two logits
are those of the model in float64. Exit status 0: equal, or a near-tie; 1: rounding does not explain it; 2:
bad input.
"""
import json
import sys
from pathlib import Path

import torch

import checkpoint
from speculative import check_prompts
from support import cli
from support.files import guarded
from support.stats import parting


def parse(argv):
    p = cli.Parser(description="Near-tie or bug? Of two texts that should be equal.", allow_abbrev=False)
    p.add_argument("texts", nargs=2, metavar="FILE", help="a text that was written, or in .json its ids")
    p.add_argument("--model", required=True, metavar="DIR", help="a Hugging Face folder")
    p.add_argument("--prompt", required=True, metavar="TEXT", help="what both texts continue")
    p.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16",
                   help="in which the engines computed (default: bfloat16)")
    return p.parse_args(argv)


def ids_of(path, tokenizer, prompt):
    """The ids of a continuation. A text is encoded with its prompt, as tokens may cross the border."""
    text = Path(path).read_text(encoding="utf-8")
    if Path(path).suffix != ".json":
        return tokenizer.encode(prompt + text, add_special_tokens=False).ids[
            len(tokenizer.encode(prompt, add_special_tokens=False).ids) :]
    ids = json.loads(text)
    if not (isinstance(ids, list) and all(isinstance(i, int) for i in ids)):
        raise ValueError("a .json file must hold a list of token ids")
    return ids


def run(argv):
    a = parse(argv)
    model, tokenizer = checkpoint.load(a.model, "cpu", torch.float64)
    prompt = checkpoint.encode(tokenizer, a.prompt, model.c.bos)
    found = []
    for path in a.texts:
        with guarded(path):
            found.append(ids_of(path, tokenizer, a.prompt))
    check_prompts(model, [prompt + ids for ids in found], 1, a.texts)
    if found[0] == found[1]:
        print(f"equal: {len(found[0])} tokens")
        return 0
    d = parting(model, prompt, *found, getattr(torch, a.dtype))
    words = [tokenizer.decode([i]) for i in d["ids"]]
    if len(words) < 2:
        print(f"after {d['position']} equal tokens one text ends, and the other goes on with {words[0]!r}")
        return 1
    verdict = "a near-tie" if d["near_tie"] else "NOT a near-tie: one of the two is wrong"
    print(f"after {d['position']} equal tokens {words[0]!r} and {words[1]!r} follow. The less likely lies "
          f"{d['gap']:.3g} below the best logit; rounding in {a.dtype} explains up to {d['rounding']:.2g}: "
          f"{verdict}")
    return int(not d["near_tie"])


def main(argv=None):
    return cli.main(run, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
