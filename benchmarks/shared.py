"""What the benchmarks share: paths, prompts, random models, tables, and the one way to time things.

The one thing to remember: a speed is a ratio, measured in one process A B A B, medians after a warm-up.
"""
import json
from pathlib import Path

import torch

from control import best_gamma, expected_speedup
from model import Transformer

ROOT = Path(__file__).resolve().parent.parent
WEIGHTS = ROOT / "weights"
SETS = "stories", "dialogues", "maths", "code"


def read_prompts(name):
    """The lines of benchmarks/prompts/NAME.jsonl: {"prompt", "text", "source", "licence"}."""
    lines = (ROOT / "benchmarks" / "prompts" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def random_model(c, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    model = Transformer(c).requires_grad_(False).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.02) if p.dim() > 1 else torch.nn.init.constant_(p, 1 - c.norm_offset)
    return model.to(dtype)


def table(head, rows):
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)] + [""]


def forecast(alphas, c):
    """(alpha, best gamma, speed-up at it) of acceptance series (one a text) at the cost c."""
    gamma = best_gamma(alphas, c)
    return float(torch.cat(alphas).mean()), gamma, expected_speedup(alphas, gamma, c)
