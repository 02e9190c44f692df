"""The model card tells what a trained model is, how it was made, and what each of its exits is
worth. The run itself writes it, so it cannot describe any other run."""
from pathlib import Path

from files import write_file
from lab import plots
from machine.kept import hardware

CARD = """# {title}

{about}

| | |
|---|---|
{facts}

Held-out text, float32. Agreement: how often the best token is the whole model's. {words}

{table}

![How it was trained](training.png)
"""


def write(run, title, about, facts, words, thing, tables):
    """A card in Markdown and its picture, into the folder of the run. facts: {name: value}; words:
    what the table's words mean; thing: what its columns are, one after the other; tables: {file:
    {what: [values]}}."""
    facts |= {"tokens": f"{run.step * run.block:,}", "command": f"`{run.a.command}`",
              "hardware, time": f"{hardware(run.device)}, {run.seconds / 60:.0f} minutes"}
    columns = range(1, 1 + len(next(iter(tables.values()))["loss"]))
    rows = [f"| {thing} | " + " | ".join(map(str, columns)) + " |",
            "|---" * (1 + len(columns)) + "|"]
    rows += [f"| {what}, {Path(name).stem} | " + " | ".join(f"{x:.2f}" for x in values) + " |"
             for name, table in tables.items() for what, values in table.items()]
    text = CARD.format(title=title, about=about, words=words, table="\n".join(rows),
                       facts="\n".join(f"| {name} | {value} |" for name, value in facts.items()))
    plots.training(run, tables, thing, Path(run.a.out) / "training.png")
    write_file(Path(run.a.out) / "README.md", text)


def model_card(run, tables):
    """The card of a `train.Run`. tables: {file: what each exit is worth on it}."""
    c, weights = run.model.c, sum(p.numel() for p in run.model.parameters())
    about = (f"A {'Gemma-2' if c.post_norm else 'Llama'} of {weights / 1e6:.1f} M weights, trained "
             "by this repository's `lab/train.py`.")
    shape = (f"{c.n_layers} layers, dim {c.dim}, {c.n_heads} heads of {c.head_dim}, {c.n_kv_heads} "
             f"for keys and values, hidden {c.hidden_dim}, vocabulary {c.vocab_size:,}, context "
             f"{c.max_len}, bfloat16")
    facts = {"shape": shape, "data": ", ".join(run.text.train)}
    words = "Loss: nats per token. What an exit gains: `python -m lab.bench check`."
    write(run, Path(run.a.out).name, about, facts, words, "exit after block", tables)


def head_card(run, tables):
    """The card of a `train_heads.Run`. tables: {file: what the head is worth on
    it, step by step}."""
    a, head = run.a, run.head
    about = ("Trained heads, made by this repository's `lab/train_heads.py`. They draft for the "
             "model with whose frozen weights they were trained, and for no other.")
    shape = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in head.shape.items())
    facts = {"shape": f"{shape}; {head.count() / 1e6:.2f} M weights in bfloat16",
             "data": ", ".join(a.data) or f"own text at temperature {a.temperature:g}"}
    words = ("Before: at the start. Step: the first, second, ... token that a head predicts. Loss: "
             "KL(p || q) in nats. Overlap: the sum of min(p, q), the acceptance at temperature 1.")
    tables = {name: table | {"agreement before": run.before[name]["agreement"]}
              for name, table in tables.items()}
    write(run, f"{head.kind} for {Path(a.model).resolve().name}", about, facts, words, "step",
          tables)
