"""Honest timing, side by side in one process: A B A B, medians, after a warm-up.

    python bench.py counts      operations and synchronisations of a round: free of noise
    python bench.py plain       plain decoding against transformers on the same weights

The one thing to remember: a speed is a ratio, measured in one run, with dtype, threads and prompt beside it.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import checkpoint
from kvcache import KVCache
from layerskip import SelfDraft
from model import Config, Transformer
from speculative import generate, rounds

HERE = Path(__file__).resolve().parent
SHAPE_110M = Config(
    vocab_size=32_000, dim=768, n_layers=12, n_heads=12, n_kv_heads=12, head_dim=64, hidden_dim=2048
)


def random_model(c, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    model = Transformer(c).requires_grad_(False).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.02) if p.dim() > 1 else torch.nn.init.constant_(p, 1 - c.norm_offset)
    return model.to(dtype)


# --- counts


class Operations(TorchDispatchMode):
    """Counts the operations that compute or copy; views cost next to nothing and are left out."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        return func(*args, **(kwargs or {}))


class Synchronisations(TorchFunctionMode):
    """Counts the calls that make the host wait for the device to have a value."""

    names = {
        "tolist",
        "item",
        "cpu",
        "numpy",
        "nonzero",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "equal",
    }
    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += getattr(func, "__name__", "") in self.names
        return func(*args, **(kwargs or {}))


def count(action):
    with torch.inference_mode(), Synchronisations() as waits, Operations() as operations:
        action()
    return {"operations": operations.count, "synchronisations": waits.count}


def counts():
    """What a plain round and a drafted step cost outside the sub-layers."""
    model = random_model(
        Config(vocab_size=64, dim=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=16, hidden_dim=32)
    )
    cache, x = KVCache(model.c, 1, 64, torch.float32), torch.zeros(1, 1, 32)
    model.run(x, slice(0, 1), cache)  # the cos/sin table is made once

    def layers(sublayers):
        full, empty = (
            count(lambda s=s: model.run(x, slice(9, 10), cache, s))["operations"] for s in (sublayers, [])
        )
        return full - empty

    def round_of(drafter):
        steps = rounds(model, [[1, 2, 3]], 60, drafter)
        next(steps)
        return count(lambda: next(steps))

    def step(stop=None):
        short, long = (round_of(SelfDraft(model, range(2), gamma, stop)) for gamma in (2, 3))
        return {key: long[key] - short[key] - layers(range(2)) * (key == "operations") for key in long}

    plain = round_of(None)
    return {
        "plain round": {**plain, "operations": plain["operations"] - layers(range(4))},
        "drafted step": step(),
        "drafted step, stop rule": step(lambda k, logits, token: token < 0),
    }


# --- plain decoding against transformers


def interleave(actions, repeats):
    """{name: seconds of each repeat}: every action once as a warm-up, then A B A B."""
    seconds = {name: [] for name in actions}
    for repeat in range(repeats + 1):
        for name, action in actions.items():
            start = time.perf_counter()
            action()
            seconds[name] += [time.perf_counter() - start] * (repeat > 0)
    return seconds


def against_transformers(folder, dtype, prompt, new, repeats):
    from transformers import AutoModelForCausalLM

    model, _ = checkpoint.load(folder, "cpu", dtype)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    theirs.generation_config.eos_token_id = None  # both write all the tokens
    ids, texts = torch.tensor([prompt]), {}

    def run_theirs():
        texts["transformers"] = theirs.generate(
            ids, max_new_tokens=new, do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(ids)
        )[0, len(prompt) :].tolist()

    def run_ours():
        texts["ours"] = generate(model, [prompt], new)[0][0]

    seconds = interleave({"ours": run_ours, "transformers": run_theirs}, repeats)
    same = next((i for i, (a, b) in enumerate(zip(*texts.values(), strict=True)) if a != b), new)
    return {name: new / statistics.median(s) for name, s in seconds.items()} | {
        "ratio": statistics.median(seconds["transformers"]) / statistics.median(seconds["ours"]),
        "same tokens": same,
    }


def plain(a):
    text = (
        "Once upon a time there was a little girl who lived in a house near the big forest with her mother. "
    )
    stories = HERE / "weights" / "stories-llama"
    _, tokenizer = checkpoint.load(stories, "cpu")
    prompt = (checkpoint.encode(tokenizer, text * 2, 0))[:32]
    print(
        f"plain decoding, batch 1, greedy, 32-token prompt, {a.new} new tokens, "
        f"{torch.get_num_threads()} threads, medians of {a.repeats} interleaved runs\n"
    )
    print("| model | dtype | ours, tokens/s | transformers, tokens/s | ratio | same first tokens |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as made:
        for name in ("stories-llama", "110M shape"):
            for dtype in (torch.bfloat16, torch.float32):
                folder = stories
                if name != "stories-llama":
                    folder = Path(made)
                    checkpoint.save(random_model(SHAPE_110M, dtype), folder, tokenizer)
                r = against_transformers(folder, dtype, prompt, a.new, a.repeats)
                speeds = f"{r['ours']:.1f} | {r['transformers']:.1f} | {r['ratio']:.2f} | {r['same tokens']}"
                print(f"| {name} | {str(dtype)[6:]} | {speeds} |", flush=True)


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("what", choices=["counts", "plain"])
    p.add_argument("--new", type=int, default=128, metavar="N")
    p.add_argument("--repeats", type=int, default=5, metavar="N")
    a = p.parse_args(argv)
    if a.what == "plain":
        return plain(a)
    print("| outside the sub-layers | operations | synchronisations |\n|---|---|---|")
    for name, c in counts().items():
        print(f"| {name} | {c['operations']} | {c['synchronisations']} |")


if __name__ == "__main__":
    sys.exit(main())
