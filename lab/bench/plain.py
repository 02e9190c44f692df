"""Plain decoding, measured beside transformers; how long prompts are read; and ways to multiply."""
import tempfile
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

import checkpoint
from kvcache import KVCache
from lab.bench.shared import WEIGHTS, figures, load, page, random_model, table
from machine.fused import fuse
from machine.packed import gain, pack, packs
from machine.recorded import Recorded
from model import Config, Placement
from speculative import generate, prefill, rounds
from support.measure import interleave

SHAPE_110M = Config(vocab_size=32_000, dim=768, n_layers=12, n_heads=12, n_kv_heads=12, head_dim=64,
                    hidden_dim=2048, max_len=1024)
TEXT = "Once upon a time there was a little girl who lived in a house near the big forest with her mother. "
BLOCKS = 1, 2, 4, 8, 16
BATCHES = 1, 2, 4, 8, 16
PROMPTS = 512, 2000, 4000


def their_text(model, ids, new, **flags):
    """What a model of transformers writes after ids (B, T), greedily unless flags say otherwise. (B, new)"""
    flags = {"do_sample": False, "pad_token_id": 0} | flags
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new,
                          **flags)[:, ids.shape[1] :]


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


def recorded(fast, prompt, new):
    """A function that continues the prompt by a Recorded, whose passes are all recorded now. It returns the
    ids."""
    def write():
        return [token for _, r in rounds(fast, [prompt], new) for token in r.new[0]]

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
    here = Placement.span(at, at + T, device)._replace(same=device.type == "cpu")
    cache = KVCache(model.c, 1, at + T, model.attention_dtype(), device)
    tokens = torch.full((1, T), 5, device=device)
    return lambda: model.unembed(model.run(model.embed(tokens), here, cache, sublayers))


def agree(ours, theirs):
    """How many first tokens are the same."""
    return next((i for i, (x, y) in enumerate(zip(ours, theirs, strict=True)) if x != y), len(ours))


def measure(model, theirs, prompt, new, repeats, fast):
    """All of `plain` for one model, as a dict for JSON."""
    def both(prompts, count):
        ids = torch.tensor(prompts, device=theirs.device)
        return {"transformers": lambda: their_text(theirs, ids, count).tolist(),
                "ours": lambda: generate(model, prompts, count)[0]}

    ways = both([prompt], new)
    if fast:
        ways |= {"transformers, compiled": compiled(theirs, prompt, new),
                 "ours, recorded": recorded(Recorded(model), prompt, new)}
    texts = {name: way()[0] for name, way in ways.items()}
    seconds, bound = interleave(ways, repeats), interleave({"": matrices(model)}, 10 * repeats)[""] * new
    blocks = interleave({T: step(model, T, 64) for T in BLOCKS}, 5 * repeats)
    batches = {B: interleave(both([prompt] * B, new // 4), repeats) for B in BATCHES}
    return {"ways": {name: {"rate": new / s, "ratio": seconds["transformers"] / s, "bound": bound / s,
                            "same": agree(texts[name], texts["transformers"])}
                     for name, s in seconds.items()},
            "blocks": [s / blocks[1] for s in blocks.values()],
            "batches": [s["transformers"] / s["ours"] for s in batches.values()]}


WAYS = {"tokens/s": "{rate:.1f}", "times transformers": "{ratio:.2f}", "of the bound": "{bound:.2f}",
        "same first tokens": "{same}"}


def run(a):
    from transformers import AutoModelForCausalLM

    _, tokenizer = checkpoint.load(WEIGHTS / "stories-llama", "cpu")
    prompt, repeats, results = checkpoint.encode(tokenizer, TEXT * 4, 0)[:32], a.repeats or 5, {}
    shapes = {"stories-llama": None, "stories-gemma2": None, "110M shape": SHAPE_110M}  # None: in weights/
    dtypes = torch.bfloat16, torch.float32
    with tempfile.TemporaryDirectory() as made:
        for (name, c), dtype in tqdm([*product(shapes.items(), dtypes)], disable=None):
            folder = Path(made) if c else WEIGHTS / name
            if c:
                checkpoint.save(random_model(c, dtype), folder, tokenizer)
            model, _ = checkpoint.load(folder, a.device, dtype)
            theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(a.device)
            theirs.generation_config.eos_token_id = None    # both write all the tokens
            results[f"{name}, {str(dtype)[6:]}"] = measure(model, theirs, prompt, a.new, repeats, a.fast)
    ways = [(f"{name}, {way}", r) for name, found in results.items() for way, r in found["ways"].items()]
    blocks, batches = ([[name, *(f"{x:.2f}" for x in found[part])] for name, found in results.items()]
                       for part in ("blocks", "batches"))
    lines = [f"plain decoding, greedy, 32-token prompt, {a.new} new tokens; {a.device}: {a.machine}; "
             f"torch {torch.__version__}; medians of {repeats} runs A B A B", "",
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
        rows.append([str(T), f"{T / times['transformers']:.0f}", *(f"{speed:.2f}" for speed in speeds)])
    words = f"reading a prompt; {a.model}, {a.dtype}; {a.machine}; medians of interleaved runs"
    names = ["tokens", "transformers, tokens/s", *(f"{name}, times as fast" for name in ours)]
    return page([words, "", *table(names, rows)]), {"rows": rows}


class Multiplies(Recorded):
    """Recorded passes that all multiply in one way: see `Recorded.products`."""

    def __init__(self, model, way):
        super().__init__(model)
        self.way = way

    def products(self, rows, packs):
        return self.way


@torch.inference_mode()
def run_packed(a):
    """What a pass over a block of tokens takes, by each way to multiply."""
    forms = {"F.linear": load(a)[0], "packed": load(a)[0]}
    plain = forms["F.linear"]
    if not packs(plain.tok.dtype):
        raise ValueError(f"this processor packs no matrices in {a.dtype}: try --dtype float32")
    keep = gain(forms["packed"], 1) < 0.95
    pack(forms["packed"], keep)
    passes = {(form, T): step(model, T, 100) for form, model in forms.items() for T in BLOCKS}
    if a.fast:
        forms |= {f"recorded, {way}": Multiplies(plain, way) for way in ("library", "sums", "packed")}
        for form in [*forms][2:]:
            mine = {(form, T): step(forms[form], T, 100) for T in BLOCKS}
            forms[form].rehearse(lambda mine=mine: [act() for act in mine.values()])
            passes |= mine
    times = interleave(passes, a.repeats or 15)
    one = min(seconds for (_, T), seconds in times.items() if T == 1)
    rows = [[form, *(f"{1e3 * times[form, T]:.1f} ({times[form, T] / one:.2f})" for T in BLOCKS)]
            for form in forms]
    words = (f"{a.model}, {a.dtype}; {a.machine}; ms a pass (in fastest passes over one token); "
             f"packed: {'single rows by the plain matrix' if keep else 'nothing else'}")
    data = {f"{form} {T}": seconds for (form, T), seconds in times.items()}
    return page([words, "", *table(["tokens", *map(str, BLOCKS)], rows)]), {"times": data}
