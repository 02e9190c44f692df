"""What of a jump does the work? Train it and its variants, and other heads, on one text with one
budget, for several seeds.

    python -m lab.jumps --model weights/stories-llama --text 2e5 --tokens 1e5

Printed, with the standard deviation over the seeds: how often the first, second and third token of
a draft is the model's own in held-out text, what a drafted token costs by weights, and what drafts
of three tokens would gain by these two.
"""
import statistics
import sys

import torch
import torch.nn.functional as F
from torch import nn

import checkpoint
from lab import corpus, train_heads
from methods import heads
from methods.base import unit
from methods.costs import by_weights
from methods.jump import Jump
from support import cli

SEEDS = 0, 1, 2


class Gated(Jump):
    """Beside the matrix stands a gated MLP of the model's width. It starts as nothing."""
    hidden = 1

    def __init__(self, model, start, blocks=1):
        super().__init__(model, start, blocks)
        dim = model.c.dim
        self.weights.gate_up = nn.Parameter(0.02 * torch.randn(2 * dim, 2 * dim))
        self.weights.down = nn.Parameter(torch.zeros(dim, dim))

    def land(self, tokens, before):
        x = self.own.embed(tokens)
        both = torch.cat([unit(before), unit(x)], -1)
        gate, up = F.linear(both, self.weights.gate_up).chunk(2, -1)
        return x + F.linear(both, self.weights.matrix) + F.linear(F.silu(gate) * up,
                                                                  self.weights.down)


class Frozen(Jump):
    """The blocks are the model's own, and only the matrices learn."""

    def __init__(self, model, start, blocks=1):
        super().__init__(model, start, blocks)
        del self.weights.blocks
        self.own.requires_grad_(False)

    def count(self):
        return super().count() + sum(p.numel() for p in self.own.blocks.parameters())


class Unfitted(Jump):
    """The matrices start as nothing."""

    def fit(self, tokens):
        pass


VARIANTS = {"jump": Jump, "jump, gated MLP": Gated, "jump, frozen blocks": Frozen,
            "jump, no least squares": Unfitted}


def measured(a, name, text, model):
    """{"agreement": [by step], "overlap": [...], "c": by weights} of one trained head."""
    kind = name.split(",")[0]
    shape = ["--start", str(a.start)] if kind == "jump" else []
    argv = [kind, "--model", a.model, "--out", "-", "--text", str(a.text), "--tokens",
            str(a.tokens), "--seed", str(a.seed), *shape, *(["--lr", a.lr] if a.lr else [])]
    torch.manual_seed(a.seed)
    try:
        if kind == "jump":
            train_heads.KINDS["jump"] = VARIANTS[name]
        run = train_heads.Run(train_heads.parse(argv), model, text, torch.device("cpu"))
    finally:
        train_heads.KINDS["jump"] = Jump
    for _ in range(run.steps):
        run.train_step()
    run.head.weights.bfloat16().float()
    found = run.evaluate(next(iter(text.valid.values())), 4 * train_heads.MEASURED)
    return {"agreement": found["agreement"][:3], "overlap": found["overlap"][:3],
            "c": heads.drafting(run.head, by_weights(model.c)).start, "weights": run.head.count()}


def main(argv):
    p = cli.Parser(description=__doc__.splitlines()[0])
    p.add_argument("--model", required=True)
    p.add_argument("--text", type=float, default=2e5)
    p.add_argument("--tokens", type=float, default=1e5)
    p.add_argument("--start", type=int, default=2)
    p.add_argument("--lr")
    p.add_argument("--names", nargs="+",
                   default=[*VARIANTS, "eagle", "kangaroo", "medusa", "prophet"])
    a = p.parse_args(argv)
    model, tokenizer = checkpoint.load(a.model, torch.device("cpu"), torch.float32)
    found = {name: [] for name in a.names}
    for a.seed in SEEDS:
        written = train_heads.write_text(model, a.text, a.seed, 256, 0.5)
        text = corpus.split({"own text": written}, {}, [1.0], tokenizer, 256)
        for name in a.names:
            found[name].append(measured(a, name, text, model))
            print(a.seed, name, found[name][-1], flush=True)
    for name, runs in found.items():
        print(name, runs[0]["weights"], "c", round(runs[0]["c"], 3))
        for what in ("agreement", "overlap"):
            steps = list(zip(*(run[what] for run in runs), strict=True))
            print("   ", what, " / ".join(
                f"{statistics.mean(s):.3f} ± {statistics.stdev(s):.3f}" for s in steps))
        gains = []
        for run in runs:
            tokens, reach = 1.0, 1.0
            for rate in (run["agreement"] + run["agreement"][-1:] * 3)[:3]:
                reach *= rate
                tokens += reach
            gains.append(tokens / (1 + 3 * run["c"]))
        print("    by weights", f"{statistics.mean(gains):.3f} ± {statistics.stdev(gains):.3f}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
