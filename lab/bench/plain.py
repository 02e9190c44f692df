"""Plain decoding, measured beside transformers.

The one thing to remember: what is compared is given the same weights, prompt, dtype and threads.
"""
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

import checkpoint
from kvcache import KVCache
from lab.bench.shared import WEIGHTS, page, random_model, table
from machine.recorded import Recorded
from model import SPARE, Config, Placement
from speculative import generate, rounds
from support.measure import interleave

SHAPE_110M = Config(vocab_size=32_000, dim=768, n_layers=12, n_heads=12, n_kv_heads=12, head_dim=64,
                    hidden_dim=2048, max_len=1024)
TEXT = "Once upon a time there was a little girl who lived in a house near the big forest with her mother. "
BLOCKS, BATCHES = (1, 2, 4, 8, 16), (1, 2, 4, 8, 16)


class Pair:
    """The same weights in this library and in transformers."""

    def __init__(self, folder, dtype, device):
        from transformers import AutoModelForCausalLM

        self.ours, _ = checkpoint.load(folder, device, dtype)
        self.theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
        self.theirs.generation_config.eos_token_id = None  # both write all the tokens
        self.device = torch.device(device)

    def generators(self, prompts, new):
        """Both continue the prompts greedily: two functions that return the ids."""
        ids = torch.tensor(prompts, device=self.device)
        return {"ours": lambda: generate(self.ours, prompts, new)[0],
                "transformers": lambda: their_text(self.theirs, ids, new).tolist()}


def their_text(model, ids, new, **flags):
    """What a model of transformers writes after ids (B, T), greedily. (B, new)"""
    return model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
                          max_new_tokens=new, **flags)[:, ids.shape[1] :]


def compiled(theirs, prompt, new):
    """A function that returns what transformers writes with a cache of fixed size and the step of one token
    compiled, as its guide to fast decoding says."""
    from transformers import StaticCache
    device, ids = theirs.device, torch.tensor([prompt], device=theirs.device)
    # trap: a sliding layer's cache counts in Python: were its numbers fixed, each token compiled anew
    one = torch.compile(theirs.forward)

    @torch.no_grad()
    def write():
        cache, run, found = StaticCache(config=theirs.config, max_cache_len=len(prompt) + new), theirs, []
        tokens, at = ids, torch.arange(len(prompt), device=device)
        for _ in range(new):
            said = run(tokens, past_key_values=cache, cache_position=at, logits_to_keep=1)
            tokens, at, run = said.logits[:, -1:].argmax(-1).clone(), at[-1:] + 1, one
            found.append(tokens)
        return torch.cat(found, 1)[0].tolist()

    return write


def recorded(model, prompt, new):
    """A function that continues the prompt in recorded passes, which are all recorded now. It returns the
    ids."""
    fast, slots = Recorded(model), min(len(prompt) + new, model.c.max_len) + SPARE
    cache = KVCache(model.c, 1, slots, fast.attention_dtype(), fast.tok.device)

    def write():
        return [token for _, r in rounds(fast, [prompt], new, cache=cache) for token in r.new[0]]

    fast.rehearse(write)
    return write


def matrices(model):
    """The model's own matrix-vector products for one token, and nothing else: the bound for batch 1."""
    widths = {w.shape[1] for w in model.parameters() if w.dim() == 2}
    x = {n: torch.ones(1, 1, n, dtype=model.tok.dtype, device=model.tok.device) for n in widths}
    weights = [w for b in model.blocks for w in (b.attn.wqkv, b.attn.wo, b.mlp.gate_up, b.mlp.down)]
    weights.append(model.tok if model.head is None else model.head)
    return lambda: [F.linear(x[w.shape[1]], w) for w in weights]


def step(model, T, at, sublayers=None):
    """A pass over T tokens after `at` others, with positions as the loop gives them on this device."""
    device = model.tok.device
    here = Placement.at(at, at + T, device)._replace(same=device.type == "cpu")
    cache = KVCache(model.c, 1, at + T, model.attention_dtype(), device)
    tokens = torch.full((1, T), 5, device=device)
    return lambda: model.unembed(model.run(model.embed(tokens), here, cache, sublayers))


def launches(model, prompt):
    """Kernel launches of a plain round, counted by the profiler."""
    steps = rounds(model, [prompt], 16)
    next(steps)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        next(steps)
    return sum(e.count for e in seen.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA)


def agree(ours, theirs):
    """How many first tokens are the same."""
    return next((i for i, (x, y) in enumerate(zip(ours, theirs, strict=True)) if x != y), len(ours))


def measure(folder, dtype, device, a, bar):
    """All of `plain` for one model and dtype, as a dict for JSON."""
    pair, prompt = Pair(folder, dtype, device), a.prompt[:32]
    both = pair.generators([prompt], a.new)
    others = {"ours, recorded": recorded(pair.ours, prompt, a.new),
              "transformers, compiled": compiled(pair.theirs, prompt, a.new)} if a.fast else {}
    ours, theirs = (run()[0] for run in both.values())
    r = {"same tokens": agree(ours, theirs),
         "others": {name: agree(ours, run()) for name, run in others.items()}}
    bar.update()
    r["decode"] = interleave(both | others, a.repeats)
    bar.update()
    single = interleave({"matrices": matrices(pair.ours), "pass": step(pair.ours, 1, 64)}, 10 * a.repeats)
    r["bound"] = single["matrices"] * a.new / r["decode"]["ours"]
    if a.quick:
        return r
    r["blocks"] = interleave({T: step(pair.ours, T, 64) for T in BLOCKS}, 5 * a.repeats)
    bar.update()
    r["batches"] = {B: interleave(pair.generators([prompt] * B, a.new // 4), a.repeats) for B in BATCHES}
    bar.update()
    return r


def markdown(results, a):
    """The tables of `plain`."""
    lines = [f"plain decoding, greedy, 32-token prompt, {a.new} new tokens; {a.device}: {a.machine}; "
             f"torch {torch.__version__}; medians of {a.repeats} runs A B A B", ""]
    speed = []
    for name, r in results.items():
        ours, theirs = r["decode"]["ours"], r["decode"]["transformers"]
        speed.append([name, f"{a.new / ours:.1f}", f"{a.new / theirs:.1f}", f"{theirs / ours:.2f}",
                      f"{r['bound']:.2f}", f"{r['same tokens']} of {a.new}"])
    lines += table(["model, dtype", "tokens/s", "transformers", "ratio", "of the bound", "same first tokens"],
                   speed)
    if a.fast:
        lines += table(["model, dtype", "way", "tokens/s", "ours / it", "same first tokens"], [
            [name, way, f"{a.new / r['decode'][way]:.1f}",
             f"{r['decode'][way] / r['decode']['ours']:.2f}", f"{same} of {a.new}"]
            for name, r in results.items() for way, same in r["others"].items()])
    return page(lines if a.quick else lines + details(results))


def details(results):
    """The tables that --quick leaves out."""
    blocks, batches = [], []
    for name, r in results.items():
        blocks.append([name, *(f"{s / r['blocks'][1]:.2f}" for s in r["blocks"].values())])
        batches.append([name, *(f"{s['transformers'] / s['ours']:.2f}" for s in r["batches"].values())])
    return [*table(["cost of a block, relative to one token", *map(str, BLOCKS)], blocks),
            *table(["ratio at batch", *map(str, BATCHES)], batches)]


def run(a):
    a.repeats = a.repeats or 5
    _, tokenizer = checkpoint.load(WEIGHTS / "stories-llama", "cpu")
    a.prompt = checkpoint.encode(tokenizer, TEXT * 4, 0)
    shapes = {"stories-llama": None, "stories-gemma2": None, "110M shape": SHAPE_110M}  # None: in weights/
    dtypes = torch.bfloat16, torch.float32
    results, bar = {}, tqdm(total=4 * len(shapes) * len(dtypes), disable=None)
    with bar, tempfile.TemporaryDirectory() as made:
        for name, c in shapes.items():
            for dtype in dtypes:
                folder = Path(made) if c else WEIGHTS / name
                if c:
                    checkpoint.save(random_model(c, dtype), folder, tokenizer)
                results[f"{name}, {str(dtype)[6:]}"] = measure(folder, dtype, a.device, a, bar)
    return markdown(results, a), {"results": results}
