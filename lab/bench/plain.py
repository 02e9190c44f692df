"""Plain decoding, measured beside transformers; and how long prompts are read."""
import tempfile
from functools import partial
from itertools import product
from pathlib import Path

import torch
from tqdm import tqdm

import checkpoint
from kvcache import KVCache, prefill
from lab.bench.shared import DEFAULT, WEIGHTS, figures, load, page, random_model, table
from machine.exact import fast
from machine.fused import fuse
from machine.quant import size
from model import Config, Placement
from speculative import generate
from support.measure import interleave

SHAPE_110M = Config(vocab_size=32_000, dim=768, n_layers=12, n_heads=12, n_kv_heads=12, head_dim=64,
                    hidden_dim=2048, max_len=1024)
TEXT = ("Once upon a time there was a little girl who lived in a house near the big forest with "
        "her mother. ")
BLOCKS = 1, 2, 4, 8, 16
BATCHES = 1, 2, 4, 8, 16
PROMPTS = 512, 2000, 4000


def their_text(model, ids, new, **flags):
    """What a model of transformers writes after ids (B, T), greedily unless
    flags say otherwise. (B, new)"""
    flags = {"do_sample": False, "pad_token_id": 0} | flags
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new,
                          **flags)[:, ids.shape[1] :]


def compiled(theirs, prompt, new):
    """A function that returns what transformers writes with a cache of fixed size and the step of
    one token compiled, as its guide to fast decoding says."""
    from transformers import StaticCache
    device, ids = theirs.device, torch.tensor([prompt], device=theirs.device)
    # trap: a sliding layer counts in Python, and with fixed numbers each token would compile anew
    one = torch.compile(theirs.forward)

    @torch.no_grad()
    def write():
        cache = StaticCache(config=theirs.config, max_cache_len=len(prompt) + new)
        run = theirs
        found = []
        tokens, at = ids, torch.arange(len(prompt), device=device)
        for _ in range(new):
            said = run(tokens, past_key_values=cache, cache_position=at, logits_to_keep=1)
            tokens, at, run = said.logits[:, -1:].argmax(-1).clone(), at[-1:] + 1, one
            found.append(tokens)
        return torch.cat(found, 1).tolist()

    return write


def rehearsed(model, prompt, new):
    """A function that continues the prompt and returns [its ids]. The model, a
    StandIn, gets ready now."""
    def write():
        return generate(model, [prompt], new)[0]

    model.rehearse(write)
    return write


def reading(count, device):
    """A function that reads so many bytes, as fast as memory allows. It sums a
    tensor of that size."""
    x = torch.ones(count // 4, device=device)
    return lambda: x.sum().item()


def step(model, T, at, sublayers=None):
    """A pass over T tokens after `at` others, with positions as the loop gives
    them on this device."""
    device = model.tok.device
    here = Placement.span(at, at + T, device)._replace(same=device.type == "cpu")
    cache = KVCache(model.c, 1, at + T, model.attention_dtype(), device)
    tokens = torch.full((1, T), 5, device=device)
    return lambda: model.unembed(model.run(model.embed(tokens), here, cache, sublayers))


def agree(ours, theirs):
    """How many first tokens are the same."""
    return next((i for i, (x, y) in enumerate(zip(ours, theirs, strict=True)) if x != y), len(ours))


def measure(model, theirs, prompt, new, repeats, in_fast_passes):
    """All of `plain` for one model, as a dict for JSON."""
    def both(prompts, count):
        ids = torch.tensor(prompts, device=theirs.device)
        return {"transformers": lambda: their_text(theirs, ids, count).tolist(),
                "ours": lambda: generate(model, prompts, count)[0]}

    ways = both([prompt], new)
    others = {}
    if in_fast_passes:
        quick = fast(model)
        ways |= {"transformers, compiled": compiled(theirs, prompt, new),
                 "ours, fast": rehearsed(quick, prompt, new)}
        read = reading(size(model.blocks) + size(model.tok if model.head is None else model.head),
                       model.tok.device)
        others = {"first token": rehearsed(quick, prompt, 1),
                  "weights": lambda: [read() for _ in range(new)]}
    texts = {name: way()[0] for name, way in ways.items()}
    seconds = interleave(ways | others, repeats)
    rows = {name: {"rate": new / seconds[name], "ratio": seconds["transformers"] / seconds[name],
                   "same": agree(texts[name], texts["transformers"])} for name in ways}
    if in_fast_passes:
        token = (seconds["ours, fast"] - seconds["first token"]) / (new - 1)
        rows["ours, fast"]["share"] = seconds["weights"] / new / token
    blocks = interleave({T: step(model, T, 64) for T in BLOCKS}, 5 * repeats)
    batches = {B: interleave(both([prompt] * B, new // 4), repeats) for B in BATCHES}
    return {"ways": rows, "blocks": [s / blocks[1] for s in blocks.values()],
            "batches": [s["transformers"] / s["ours"] for s in batches.values()]}


WAYS = {"tokens/s": "{rate:.1f}", "times transformers": "{ratio:.2f}",
        "share of the memory bound": "{share:.2f}", "same first tokens": "{same}"}


def run(a):
    from transformers import AutoModelForCausalLM

    _, tokenizer = checkpoint.load(WEIGHTS / "stories-llama", "cpu")
    prompt, repeats, results = checkpoint.encode(tokenizer, TEXT * 4, 0)[:32], a.repeats or 5, {}
    shapes = {Path(a.model).name: Path(a.model)}
    if a.model == DEFAULT:
        shapes |= {"stories-gemma2": WEIGHTS / "stories-gemma2", "110M shape": SHAPE_110M}
    dtypes = torch.bfloat16, torch.float32
    with tempfile.TemporaryDirectory() as made:
        for (name, folder), dtype in tqdm([*product(shapes.items(), dtypes)], disable=None):
            if isinstance(folder, Config):
                checkpoint.save(random_model(folder, dtype), Path(made), tokenizer)
                folder = Path(made)
            model, _ = checkpoint.load(folder, a.device, dtype)
            theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(a.device)
            theirs.generation_config.eos_token_id = None    # both write all the tokens
            results[f"{name}, {str(dtype)[6:]}"] = measure(model, theirs, prompt, a.new, repeats,
                                                           a.fast)
    ways = [(f"{name}, {way}", r) for name, found in results.items()
            for way, r in found["ways"].items()]
    blocks, batches = ([[name, *(f"{x:.2f}" for x in found[part])]
                        for name, found in results.items()]
                       for part in ("blocks", "batches"))
    lines = [f"plain decoding, greedy, 32-token prompt, {a.new} new tokens; {a.device}: "
             f"{a.machine}; torch {torch.__version__}; medians of {repeats} runs A B A B", "",
             *figures(ways, WAYS, "model, dtype, way"),
             *table(["cost of a block, relative to one token", *map(str, BLOCKS)], blocks),
             *table(["ours, times transformers, at batch", *map(str, BATCHES)], batches)]
    return page(lines), {"results": results}


@torch.inference_mode()
def run_prompts(a):
    """How long a prompt is read, beside transformers."""
    from transformers import AutoModelForCausalLM
    explicit, tokenizer = load(a)
    ours = {"explicit attention": explicit, "fused": fuse(load(a)[0])}
    theirs = AutoModelForCausalLM.from_pretrained(a.model, dtype=explicit.tok.dtype).to(a.device)
    ids = checkpoint.encode(tokenizer, TEXT * 1000, 0)
    rows = []
    for T in PROMPTS:
        tokens = torch.tensor([ids[:T]], device=a.device)

        def read(model, tokens=tokens):
            cache = KVCache(model.c, *tokens.shape, model.attention_dtype(), a.device)
            return model.unembed(prefill(model, tokens, cache)[:, -1:])

        ways = {"transformers": partial(theirs, tokens, use_cache=True, logits_to_keep=1)}
        ways |= {name: partial(read, model) for name, model in ours.items()}
        times = interleave(ways, a.repeats or 5)
        speeds = [times["transformers"] / times[name] for name in ours]
        rows.append([str(T), f"{T / times['transformers']:.0f}",
                     *(f"{speed:.2f}" for speed in speeds)])
    words = f"reading a prompt; {a.model}, {a.dtype}; {a.machine}; medians of interleaved runs"
    names = ["tokens", "transformers, tokens/s", *(f"{name}, times as fast" for name in ours)]
    return page([words, "", *table(names, rows)]), {"rows": rows}
