"""The model card: what a trained model is, how it was made, and what each of its exits is worth.

The one thing to remember: the run itself writes the card, so it cannot describe any other run.
"""
import os
import shlex
from pathlib import Path

from support import cli


def card(run, tables, sample, command):
    """The card of a `train.Run`, in Markdown. tables: {file: what each exit is worth on it}; sample: a text
    that the model wrote; command: the flags that repeat the run."""
    a, c = run.a, run.model.c
    count = sum(p.numel() for p in run.model.parameters())
    exits = [e for e in range(1, c.n_layers + 1) if e in {1, 2, 3} or e % 2 == 0 or e == c.n_layers]
    lines = [f"# {Path(a.out).name}", "", f"A {count / 1e6:.1f} M-parameter "
             f"{'Gemma-2' if c.post_norm else 'Llama'}, made by this repository's `lab/train.py` to show "
             "self-speculative decoding on weights small enough to ship.", "", "| | |", "|---|---|",
             *(f"| {name} | {value} |" for name, value in facts(run, command)), "",
             f"Validation text, up to 32,768 tokens of each file in windows of {a.context}, float32, "
             "teacher-forced. Loss: nats per token. Agreement: how often an exit's best token is that of the "
             "last block. Speed-up: the best that the formula promises where c is the share of the weights "
             "that a drafted step reads.", "",
             "| exit after block | " + " | ".join(map(str, exits)) + " |", "|---" * (len(exits) + 1) + "|"]
    for name, table in tables.items():
        for kind, values in table.items():
            cells = (f"{values[e - 1]:.2f}" if e <= len(values) else "" for e in exits)
            lines.append(f"| {kind}, {Path(name).stem} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "![Loss, exits, speed-up](training.png)", "",
                      f"Greedy sample: \"{sample}\"", ""])


def facts(run, command):
    """The rows of the card's first table: (name, value)."""
    a, c, tokens = run.a, run.model.c, run.step * run.a.batch * run.a.context
    plain = not a.dropout and not a.exit_weight
    recipe = "plain next-token loss" if plain else (
        f"sub-layer dropout that grows with depth to {a.dropout}; early-exit loss on one random exit a step "
        f"through the shared norm and head: for the first {a.curriculum:.0%} of the run weight "
        f"{0.3 * a.exit_weight:.2g}, labels only, every exit equally often; then weight {a.exit_weight:g}, "
        f"{a.distil:.0%} of it distilled from the model's own final distribution, {a.shallow:.0%} of the "
        f"exits in the first {a.shallow_end:.0%} of the blocks")
    if a.teacher:
        recipe += f"; {a.taught:.0%} of the final loss imitates {Path(a.teacher).name}"
    window = f", window {c.window} on even layers" if c.window else ""
    return [
        ("shape", f"{c.n_layers} layers, dim {c.dim}, {c.n_heads} heads of {c.head_dim}, {c.n_kv_heads} for "
         f"keys and values, hidden {c.hidden_dim}, tied embeddings, vocabulary {c.vocab_size:,}, context "
         f"{c.max_len}{window}, bfloat16"),
        ("data", a.about or ", ".join(run.text.train)),
        ("recipe", f"from {f'the weights of {Path(a.start).name}' if a.start else 'fresh weights'} on: "
         f"{tokens / 1e6:.3g} M tokens, sequences of {a.context}, batch {a.batch}; {recipe}"),
        ("optimiser", f"Muon (lr {a.muon_lr:g}) for matrices, AdamW (lr {a.lr:g}) for embeddings and norms, "
         f"warm-up {a.warmup} steps, linear to 2 % over the last {a.decay:.0%}; products in {a.dtype}"),
        ("hardware, time", f"{cli.machine(run.device)}, {run.seconds / 60:.0f} minutes"),
        ("command", f"`python -m lab.train {command}`")]


def head_card(run, tables, command):
    """The card of a `train_heads.Run`, in Markdown. tables: {file: what the head is worth on it, step by
    step}; command: the flags that repeat the run."""
    a, head, first = run.a, run.head, run.evals[0]["files"]
    count, like = (sum(p.numel() for p in module.parameters()) for module in (head.weights, run.model))
    steps = range(1, 1 + len(next(iter(tables.values()))["loss"]))
    shape = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in head.shape.items())
    facts = {
        "shape": f"{shape}; {count / 1e6:.2f} M weights in bfloat16, beside the model's {like / 1e6:.1f} M, "
        "which are frozen",
        "data": ", ".join(run.text.train) + f" at temperature {a.temperature:g}" * (not a.data)
        + f", {sum(map(len, run.text.train.values())):,} tokens",
        "recipe": f"{run.step * a.batch * a.context / 1e6:.3g} M tokens, sequences of {a.context}, batch "
        f"{a.batch}; the loss is KL(p || q) with the model's own distribution p, each step's .8 times as "
        "much as that of the one before"
        + ", and the distance of its states, as weighted, and the loss of its gate" * (head.kind == "m2r2"),
        "optimiser": f"AdamW (lr {a.lr:g}), warm-up {a.warmup} steps, linear to 2 % over the last "
        f"{a.decay:.0%}; float32",
        "hardware, time": f"{cli.machine(run.device)}, {run.seconds / 60:.0f} minutes",
        "command": f"`python -m lab.train_heads {command}`"}
    lines = [f"# {head.kind} for {Path(a.model).resolve().name}", "",
             "Trained heads, made by this repository's `lab/train_heads.py`. They draft for the model with "
             "whose weights they were trained, and for no other.",
             "", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items()), "",
             "Held-out text, float32, teacher-forced. Step: the first, second, ... token that a head says "
             "of a text. Loss: KL(p || q) in nats. Agreement: how often its best token is the model's. "
             "Top 5: how often the model's is among the head's best five. Overlap: the sum of min(p, q), "
             "which is the acceptance at temperature 1. Before: at the start of the training.", "",
             "| step | " + " | ".join(map(str, steps)) + " |", "|---" * (len(steps) + 1) + "|"]
    for name, table in tables.items():
        before = {"agreement before": first[name]["agreement"]}
        for kind, values in (table | before).items():
            lines.append(f"| {kind}, {Path(name).stem} | " + " | ".join(f"{v:.2f}" for v in values) + " |")
    return "\n".join([*lines, "", "![Loss and agreement](training.png)", ""])


def command(given, default):
    """The flags that repeat a run. given, default: {flag: value}. DATA stands for the folder that holds all
    its text, wherever that is."""
    files = [Path(f).resolve() for f in (*given["data"], *given["valid"])]
    root = os.path.commonpath([f.parent for f in files]) if files else ""
    words = []
    for name, value in given.items():
        if name in ("data", "valid"):
            value = [f"DATA/{os.path.relpath(Path(f).resolve(), root)}" for f in value]
        if name == "out" or name not in {"resume", "device", "about", "every"} and value != default[name]:
            values = value if isinstance(value, list) else [] if value is True else [value]
            values = (v if isinstance(v, str) else str(v).removesuffix(".0") for v in values)
            words += [f"--{name.replace('_', '-')}", *values]
    return " ".join(shlex.quote(word) for word in words)
