"""The models, prompts and tables that the benchmarks share."""
import os
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

import checkpoint
from model import Config, Refused, Transformer
from support.chat import message
from support.texts import PROMPTS, read_prompts, read_texts

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = ROOT / "weights"
DEFAULT = os.path.relpath(WEIGHTS / "stories-llama")    # of --model
SETS = "stories", "dialogues", "maths", "code"      # texts that a base model continues
CHATS = "chat", "summaries", "code_edits", "maths", "translation", "json"   # questions
LLAMA = Config(vocab_size=128_256, dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, head_dim=64,
               hidden_dim=8192, max_len=4096, tied=True)
GEMMA = Config(vocab_size=256_000, dim=2304, n_layers=26, n_heads=8, n_kv_heads=4, head_dim=256,
               hidden_dim=9216, max_len=4096, tied=True, norm_eps=1e-6, act="gelu", norm_offset=1.0,
               embed_scale=2304**0.5, post_norm=True, query_scale=256**-0.5, attn_softcap=50.0,
               final_softcap=30.0, window=4096)
# the shapes of Llama 2, and of TinyLlama, which drafts for it
SEED = dict(vocab_size=32_000, tied=False)
SHAPES = {
    "TinyLlama 1.1B": replace(LLAMA, n_layers=22, n_kv_heads=4, hidden_dim=5632, **SEED),
    "Llama 3.2 1B": LLAMA,
    "Gemma-2 2B": GEMMA,
    "Llama 3.2 3B": replace(LLAMA, dim=3072, n_layers=28, n_heads=24, head_dim=128),
    "Llama 3.1 8B": replace(LLAMA, dim=4096, n_layers=32, head_dim=128, hidden_dim=14336,
                            tied=False),
    "Gemma-2 9B": replace(GEMMA, dim=3584, n_layers=42, n_heads=16, n_kv_heads=8, hidden_dim=14336,
                          embed_scale=3584**0.5),
    "Llama 2 13B": replace(LLAMA, dim=5120, n_layers=40, n_heads=40, n_kv_heads=40, head_dim=128,
                           hidden_dim=13824, **SEED)}


class Sample(NamedTuple):
    """One prompt continued once."""
    ids: list
    seconds: float          # after the prompt was read
    drafting: float = 0.0   # of these
    rounds: tuple = ()      # (accepted, proposed)


def load(a, dtype=None):
    """(model, tokenizer), in the dtype of the flags unless another is given."""
    return checkpoint.load(a.model, a.device, getattr(torch, dtype or a.dtype))


def random_model(c, dtype=torch.float32, device="cpu"):
    """Made where it is to stay, as a large one would not fit anywhere else."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Transformer(c).requires_grad_(False).eval()
    model = model.to(dtype).to_empty(device=device)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.02) if p.dim() > 1 else torch.nn.init.constant_(
            p, 1 - c.norm_offset)
    return model


def prompt_ids(name, tokenizer, c):
    """The prompts of one kind, as ids."""
    return [checkpoint.encode(tokenizer, line["prompt"], c.bos) for line in read_prompts(name)]


def template_of(folder):
    """The chat template of a model, or None of a base model."""
    try:
        return message(folder)
    except ValueError:
        return None


def kinds_of(a):
    """The kinds of prompts that --prompts names, or that suit the model."""
    return a.prompts or (CHATS if template_of(a.model) else SETS)


def prompts_of(a, kind, tokenizer):
    """The first a.quick prompts of a kind or of a file, as ids. A chat model gets them in its
    template, and of a kind that is in both folders the one in lab/prompts."""
    render = template_of(a.model)
    folders = [PROMPTS, ROOT / "lab" / "prompts"]
    if render:
        folders.reverse()
    files = [*(folder / f"{kind}.jsonl" for folder in folders), Path(kind)]
    path = next((file for file in files if file.is_file()), None)
    if path is None:
        raise Refused(f"--prompts {kind}: neither a file nor one of "
                      f"{', '.join(dict.fromkeys(CHATS + SETS))}")
    texts = read_texts(path, "prompt", "\n")[: a.quick]
    if render:
        texts = [render(text) for text in texts]
    return [checkpoint.encode(tokenizer, text, special=not render) for text in texts]


def table(head, rows):
    """The lines of a Markdown table, and an empty one."""
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)] + [""]


def figures(rows, columns, head=""):
    """The lines of a table of (name, {key: figure}). columns: {title: how, as in "{key:.2f}"}; a
    cell is empty where there is no such figure, or None.

    >>> columns = {"%": "{alpha:.0%}", "": "{by[weights]}"}
    >>> figures([("exit 1", {"alpha": 0.75, "by": {"clock": 2}})], columns)
    ['|  | % |  |', '| --- | --- | --- |', '| exit 1 | 75% |  |', '']
    """
    def cell(how, r):
        try:
            return how.format_map(r)
        except (KeyError, TypeError):
            return ""
    return table([head, *columns],
                 [[name, *(cell(how, r) for how in columns.values())] for name, r in rows])


def tables(results, columns):
    """The lines of a table with a title for each {title: {name: {key: figure}}}."""
    return [line for title, rows in results.items()
            for line in (f"**{title}**", "", *figures(rows.items(), columns))]


def page(lines):
    return "\n".join(lines).rstrip()
