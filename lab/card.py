"""The model card says what a trained model is, how it was made, and what each of its exits is
worth. The run itself writes it, so it cannot describe any other run."""
from pathlib import Path

from machine.files import hardware, write_file

CARD = """# {title}

{about}

| | |
|---|---|
| shape | {shape} |
| data | {data} |
| tokens | {tokens:,} |
| command | `{command}` |
| hardware, time | {hardware}, {minutes:.0f} minutes |

Held-out text, float32. Agreement: how often the best token is the whole model's. Before: at the
start. {words}

{table}
"""


def write(run, tables, column, **facts):
    """Write the card into the folder of a `train.Run`. tables: {file: {what: [values]}}; column:
    what a value belongs to; facts: the title, what it is (`about`), its shape, its data, and what
    the table's `words` mean."""
    head, *rows = [[column, *range(1, 1 + len(next(iter(tables.values()))["loss"]))]]
    for file, table in tables.items():
        before = {"agreement before": run.before[file]["agreement"]}
        for what, values in (table | before).items():
            rows.append([f"{what}, {Path(file).stem}", *(f"{x:.2f}" for x in values)])
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows)]
    text = CARD.format(table="\n".join(lines), tokens=run.step * run.block, command=run.a.command,
                       hardware=hardware(run.device), minutes=run.seconds / 60, **facts)
    write_file(Path(run.a.out) / "README.md", text)


def model_card(run, tables):
    """tables: {file: what each exit is worth on it}."""
    c = run.model.c
    weights = sum(p.numel() for p in run.model.parameters())
    family = "Gemma-2" if c.post_norm else "Llama"
    write(run, tables, "exit after block", title=Path(run.a.out).name,
          about=f"A {family} of {weights / 1e6:.1f} M weights, trained by this repository's "
                "`lab/train.py`.",
          shape=f"{c.n_layers} layers, dim {c.dim}, {c.n_heads} heads of {c.head_dim}, "
                f"{c.n_kv_heads} for keys and values, hidden {c.hidden_dim}, vocabulary "
                f"{c.vocab_size:,}, context {c.max_len}, bfloat16",
          data=", ".join(run.text.train),
          words="Loss: nats per token. What an exit gains: `python -m lab.bench check`.")


def head_card(run, tables):
    """tables: {file: what the head is worth on it, step by step}."""
    a = run.a
    head = run.head
    shape = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in head.arguments.items())
    write(run, tables, "step", title=f"{head.kind} for {Path(a.model).resolve().name}",
          about="Trained heads, made by this repository's `lab/train_heads.py`. They draft for the "
                "model with whose frozen weights they were trained, and for no other.",
          shape=f"{shape}; {head.count() / 1e6:.2f} M weights in bfloat16",
          data=f"own text at temperature {a.temperature:g}",
          words="Step: the first, second, ... token that a head predicts. Loss: KL(p || q) in "
                "nats. Overlap: the sum of min(p, q), the acceptance at temperature 1.")
