"""The model card: what a trained model is, how it was made, and what each of its exits is worth.

The one thing to remember: the run itself writes the card, so it cannot describe any other run.
"""
from pathlib import Path

from support import cli

CARD = """# {title}

{about}

| | |
|---|---|
{facts}

{columns}

{table}
![How it was trained](training.png)
"""


def count(module):
    return sum(p.numel() for p in module.parameters())


def markdown(run, title, about, facts, columns, head, numbers, tables):
    """A card. facts: {name: value}; head: what the numbers count, `numbers` the columns to show, from 1 on;
    tables: {file: {what: [value of each number]}}."""
    facts |= {"hardware, time": f"{cli.machine(run.device)}, {run.seconds / 60:.0f} minutes",
              "command": f"`{run.a.command}`"}
    rows = [f"| {head} | " + " | ".join(map(str, numbers)) + " |", "|---" * (len(numbers) + 1) + "|"]
    for name, table in tables.items():
        for what, values in table.items():
            cells = (f"{values[n - 1]:.2f}" if n <= len(values) else "" for n in numbers)
            rows.append(f"| {what}, {Path(name).stem} | " + " | ".join(cells) + " |")
    return CARD.format(title=title, about=about, columns=columns, table="\n".join([*rows, ""]),
                       facts="\n".join(f"| {name} | {value} |" for name, value in facts.items()))


def model_card(run, tables, sample):
    """The card of a `train.Run`. tables: {file: what each exit is worth on it}; sample: a text that the model
    wrote."""
    a, c = run.a, run.model.c
    exits = [e for e in range(1, c.n_layers + 1) if e in {1, 2, 3} or e % 2 == 0 or e == c.n_layers]
    recipe = "plain next-token loss" if not a.dropout and not a.exit_weight else (
        f"sub-layer dropout up to {a.dropout}; loss of one random exit a step, weight {a.exit_weight:g}, "
        f"{a.distil:.0%} of it distilled from the final distribution; {a.shallow:.0%} of the exits in the "
        f"first {a.shallow_end:.0%} of the blocks")
    facts = {
        "shape": f"{c.n_layers} layers, dim {c.dim}, {c.n_heads} heads of {c.head_dim}, {c.n_kv_heads} for "
        f"keys and values, hidden {c.hidden_dim}, vocabulary {c.vocab_size:,}, context {c.max_len}"
        + f", window {c.window} on even layers" * bool(c.window) + ", bfloat16",
        "data": a.about or ", ".join(run.text.train),
        "recipe": f"from {f'the weights of {Path(a.start).name}' if a.start else 'fresh weights'} on: "
        f"{run.step * run.block / 1e6:.3g} M tokens, sequences of {a.context}, batch {a.batch}; {recipe}",
        "optimiser": f"Muon (lr {a.muon_lr:g}) for matrices, AdamW (lr {a.lr:g}) for embeddings and norms, "
        f"warm-up {a.warmup} steps, linear to 2 % over the last {a.decay:.0%}; products in {a.dtype}",
        "greedy sample": sample}
    about = (f"A {count(run.model) / 1e6:.1f} M-parameter {'Gemma-2' if c.post_norm else 'Llama'}, made by "
             "this repository's `lab/train.py` to show self-speculative decoding on weights small enough to "
             "ship.")
    columns = (f"Validation text, up to 32,768 tokens of each file in windows of {a.context}, float32. Loss: "
               "nats per token. Agreement: how often an exit's best token is that of the last block. Speed-"
               "up: the best that the formula promises where c counts the weights that a drafted step reads.")
    return markdown(run, Path(a.out).name, about, facts, columns, "exit after block", exits, tables)


def head_card(run, tables):
    """The card of a `train_heads.Run`. tables: {file: what the head is worth on it, step by step}."""
    a, head = run.a, run.head
    steps = range(1, 1 + len(next(iter(tables.values()))["loss"]))
    shape = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in head.shape.items())
    facts = {
        "shape": f"{shape}; {count(head.weights) / 1e6:.2f} M weights in bfloat16, beside the model's "
        f"{count(run.model) / 1e6:.1f} M, which are frozen",
        "data": ", ".join(run.text.train) + f" at temperature {a.temperature:g}" * (not a.data)
        + f", {sum(map(len, run.text.train.values())):,} tokens",
        "recipe": f"{run.step * run.block / 1e6:.3g} M tokens, sequences of {a.context}, batch {a.batch}; "
        "KL(p || q) with the model's own distribution p, each step's .8 times that of the one before"
        + ", the distance of its states and the loss of its gate" * (head.kind == "m2r2"),
        "optimiser": f"AdamW (lr {a.lr:g}), warm-up {a.warmup} steps, linear to 2 % over the last "
        f"{a.decay:.0%}; float32"}
    about = ("Trained heads, made by this repository's `lab/train_heads.py`. They draft for the model with "
             "whose weights they were trained, and for no other.")
    columns = ("Held-out text, float32. Step: the first, second, ... token that a head foresees. Loss: "
               "KL(p || q) in nats. Agreement: how often its best token is the model's. Top 5: how often the "
               "model's is among its best five. Overlap: the sum of min(p, q), the acceptance at temperature "
               "1. Before: at the start of the training.")
    before = {name: {"agreement before": t["agreement"]} for name, t in run.evals[0]["files"].items()}
    tables = {name: table | before[name] for name, table in tables.items()}
    title = f"{head.kind} for {Path(a.model).resolve().name}"
    return markdown(run, title, about, facts, columns, "step", steps, tables)
