"""What the benchmarks share: models, prompts, forecasts and tables.

The one thing to remember: a speed is a ratio, measured in one process A B A B, medians after a warm-up.
"""
import json
from pathlib import Path

import torch

import checkpoint
from control import best_gamma, expected_speedup
from model import Transformer
from speculative import Wrapper

ROOT = Path(__file__).resolve().parent.parent
WEIGHTS = ROOT / "weights"
SETS = "stories", "dialogues", "maths", "code"


def load(a, dtype=None, folder=None):
    """(model, tokenizer) as the flags say, or in another dtype, or from another folder."""
    return checkpoint.load(folder or a.model, a.device, getattr(torch, dtype or a.dtype))


def random_model(c, dtype=torch.float32, seed=0, device="cpu"):
    """Made where it is to stay, as a large one would not fit anywhere else."""
    torch.manual_seed(seed)
    with torch.device("meta"):
        model = Transformer(c).requires_grad_(False).eval()
    model = model.to(dtype).to_empty(device=device)
    model.scale.fill_(c.embed_scale)  # trap: `to_empty` forgets buffers too
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.02) if p.dim() > 1 else torch.nn.init.constant_(p, 1 - c.norm_offset)
    return model


def read_prompts(name):
    """The lines of benchmarks/prompts/NAME.jsonl: {"prompt", "text", "source", "licence"}."""
    lines = (ROOT / "benchmarks" / "prompts" / f"{name}.jsonl").read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


def prompt_ids(name, tokenizer, c):
    """The prompts of one kind, as ids."""
    return [checkpoint.encode(tokenizer, line["prompt"], c.bos) for line in read_prompts(name)]


def forecast(series, cost, block=lambda T: 1.0):
    """(alpha, best gamma, speed-up at it) of series of acceptances, one a text, where a drafted step costs
    `cost` and a pass over T tokens block(T)."""
    gamma = best_gamma(series, cost, block=block)
    gain = expected_speedup(series, gamma, cost, block(gamma + 1))
    return float(torch.cat(series).mean()), gamma, gain


class Noting(Wrapper):
    """A drafter of one row, and a list that gets (accepted, proposed) of each round."""

    def __init__(self, drafter, seen):
        super().__init__(drafter)
        self.seen = seen

    def observe(self, state, r):
        super().observe(state, r)
        self.seen.append((int(r.accepted[0]), int(r.proposed[0])))


def by_position(seen):
    """How often the first, second, ... token of a draft was accepted, where it was tested. seen: what a
    `Noting` noted.

    >>> by_position([(2, 2), (0, 2), (1, 2), (0, 0)])
    [0.6666666666666666, 0.5]
    """
    most = max((proposed for _, proposed in seen), default=0)
    tested = [[kept > k for kept, proposed in seen if proposed > k and kept >= k] for k in range(most)]
    return [sum(t) / len(t) for t in tested if t]


def table(head, rows):
    """The lines of a Markdown table, and an empty one."""
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)] + [""]


def page(lines):
    return "\n".join(lines).rstrip()
