"""What a chat model answers, as text to train its heads on.

    python -m lab.own --model runs/smollm --prompts lab/prompts/instructions.jsonl --out runs/own.txt

A head learns to say what its model says, so its text is best written by the model itself. A chat model says
little after a begin-of-text id alone; it has to be asked. Each document is a prompt in the model's template
and the answer. After a stop the same command goes on where the file ends.
"""
import random
import sys
from itertools import chain, repeat
from pathlib import Path

import torch
from tqdm import tqdm

import checkpoint
from lab.train import add_numbers
from sampling import Coins, to_probs
from speculative import generate
from support import cli
from support.chat import read_template
from support.files import BOUNDARY, read_texts


def write(a):
    model, tokenizer = checkpoint.load(a.model, a.device, torch.float32)
    render, out = read_template(a.model), Path(a.out)
    prompts = [checkpoint.encode(tokenizer, render([{"role": "user", "content": text}]), special=False)
               for name in a.prompts for text in read_texts(Path(name), "prompt", "\n")]
    prompts = [ids for ids in prompts if len(ids) + a.most <= model.c.max_len] * a.repeats
    random.Random(a.seed).shuffle(prompts)      # so that a part of the file is of all kinds, too
    done = len(read_texts(out, "text", BOUNDARY)) if out.is_file() else 0
    done -= done % a.batch
    with tqdm(total=len(prompts), initial=done, unit="answer", disable=None) as bar:
        for first in range(done, len(prompts), a.batch):
            asked = prompts[first : first + a.batch]
            warmth = chain(repeat(1.0, a.opening), repeat(a.temperature))       # one for each round
            said, _ = generate(model, asked, a.most, None, lambda logits, warmth=warmth: to_probs(
                logits, next(warmth)), Coins(a.seed + first), model.c.eos)
            with out.open("a", encoding="utf-8") as file:
                for prompt, answer in zip(asked, said, strict=True):
                    text = tokenizer.decode(prompt + answer, skip_special_tokens=False)
                    file.write(f"{text}\n{BOUNDARY}\n")
            bar.update(len(asked))


def main(argv=None):
    def run(argv):
        p = cli.Parser(description="Let a chat model answer prompts, as text to train its heads on.")
        p.add_argument("--model", required=True, metavar="DIR", help="a Hugging Face folder")
        p.add_argument("--prompts", required=True, nargs="+", metavar="FILE", help='{"prompt": text} a line')
        p.add_argument("--out", required=True, metavar="FILE", help="documents for lab.train_heads --data")
        p.add_argument("--device", help="cpu or cuda (default: cuda if there is one)")
        add_numbers(p, (("batch", 32, 1, 2**20, "prompts that are answered together"),
                        ("most", 192, 1, 2**20, "tokens of an answer at most"),
                        ("repeats", 1, 1, 2**20, "answers to each prompt"),
                        ("temperature", 0.5, 1e-30, 1e30, "at which answers are drawn"),
                        ("opening", 4, 0, 2**20, "but their first tokens at 1"),
                        ("seed", 0, 0, 2**40, "")))
        write(p.parse_args(argv))
    return cli.main(run, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
