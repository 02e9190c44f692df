"""From a Hugging Face folder to a model and its tokenizer, and back. families.py reads config.json.

The one thing to remember: `layout` says which tensors of a checkpoint each parameter holds. Loading
copies them into it one by one, saving copies them out, and no pickle is ever opened.
"""
import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from families import read_config, write_config
from files import find_weights, guarded, read_text, read_tokenizer, replacing, write_file
from model import MLP, Attention, Transformer, put

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
BESIDE = (      # files that `save` writes as they were loaded
    "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "generation_config.json")


def load(folder, device=None, dtype=None, quant=None, part=None):
    """(model, tokenizer) from a folder in the Hugging Face layout, of one of `families.FAMILIES`.

    The default `device` is CUDA if there is one, else the CPU, and the default `dtype` is the
    stored one. `quant` is a function of a matrix, such as machine.quant.NF4, whose result replaces
    each matrix of the blocks. `part` is this process's part of the model, a machine.parallel.Part.
    Loading needs memory for the model and one more matrix. Raises FileNotFoundError or ValueError
    if something is missing, damaged or unsupported.
    """
    folder = Path(folder)
    device = find_device(device)
    c = read_config(folder)
    tokenizer = read_tokenizer(folder)
    files = find_weights(folder)
    if c.tied and HEAD in files:    # as in transformers 5, the weights decide whether it is tied
        head = files.pop(HEAD)
        embed = files.setdefault(EMBED, head)
        if head.dtype != embed.dtype or not torch.equal(head[...], embed[...]):
            c = replace(c, tied=False)
            files[HEAD] = head
    if c.n_layers > len(files):
        raise ValueError(f"config.json says {c.n_layers} layers, but there are {len(files)} "
                         "tensors")
    with guarded(f"{folder}: no model has the shape that config.json says"), torch.device("meta"):
        model = Transformer(c)
    check_tensors(files, model)
    if part:
        model = part.of(model)
    model = model.eval().to(dtype or DTYPES[files[EMBED].dtype])
    for module, key, names in layout(model):
        filled = torch.empty_like(module.get_parameter(key), device=device)
        for name, piece in zip(names, split(module, key, filled), strict=True):
            if part:
                stored = part.read(files[name], stored_shape(name, piece))
            else:
                stored = files[name][:]
            piece.copy_(stored.view(piece.shape))
        value = torch.nn.Parameter(filled, requires_grad=False)
        if quant and isinstance(module, Attention | MLP) and filled.dim() == 2:
            value = quant(filled)
        put(module, key, value)
    model.beside = {name: read_text(folder / name) for name in BESIDE if (folder / name).is_file()}
    return model, tokenizer


def save(model, folder, tokenizer):
    """Write config, weights and tokenizer in the form that `transformers` reads. A loaded model
    keeps its chat template, special tokens and settings."""
    c = model.c
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, piece in parts(model):
        tensors[name] = piece.detach().reshape(stored_shape(name, piece)).contiguous()
    with replacing(folder / "model.safetensors") as path:
        save_file(tensors, path, metadata={"format": "pt"})

    ids = {"bos_token_id": c.bos, "eos_token_id": list(c.eos) or None}
    settings = json.loads(model.beside.get("generation_config.json", "{}"))
    special = {"bos_token": c.bos, "eos_token": next(iter(c.eos), None)}
    names = {key: tokenizer.id_to_token(i) for key, i in special.items() if i is not None}
    names["tokenizer_class"] = "PreTrainedTokenizerFast"
    texts = {"tokenizer_config.json": json.dumps(names, indent=2)}
    texts |= model.beside
    texts["config.json"] = json.dumps(write_config(c, model.tok.dtype) | ids, indent=2)
    texts["generation_config.json"] = json.dumps(settings | ids, indent=2)
    texts["tokenizer.json"] = tokenizer.to_str(pretty=True)
    for name, text in texts.items():
        write_file(folder / name, text)


def encode(tokenizer, text, bos=None, special=True):
    """The ids of a prompt, as `AutoTokenizer` makes them. The post-processor of tokenizer.json
    alone decides whether a begin-of-text id comes first. An empty prompt becomes `bos`, the model's
    begin-of-text id. `special` is False for a chat template, which renders its special tokens."""
    with guarded("the tokenizer cannot take this prompt"):
        text.encode()   # a clearer error for invalid Unicode than the tokenizer's
        ids = tokenizer.encode(text, add_special_tokens=special).ids
    if not ids and bos is None:
        raise ValueError("the prompt is empty, and config.json has no bos_token_id to begin with")
    return ids or [bos]


def layout(model):
    """(module, name of its parameter, names of the stored tensors in it) for every parameter."""
    c = model.c
    weights = {
        "attn.wqkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "attn.wo": ["self_attn.o_proj"],
        "mlp.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "mlp.down": ["mlp.down_proj"],
        "attn_norm.weight": ["input_layernorm"],
        "mlp_norm.weight": ["post_attention_layernorm"]}    # trap: the norm *before* the MLP
    if c.post_norm:
        weights |= {
            "attn_post.weight": ["post_attention_layernorm"],
            "mlp_norm.weight": ["pre_feedforward_layernorm"],
            "mlp_post.weight": ["post_feedforward_layernorm"]}
    if c.qk_norm:
        weights |= {
            "attn.q_norm.weight": ["self_attn.q_norm"],
            "attn.k_norm.weight": ["self_attn.k_norm"]}
    yield model, "tok", [EMBED]
    yield model.norm, "weight", ["model.norm.weight"]
    if not c.tied:
        yield model, "head", [HEAD]
    for i, b in enumerate(model.blocks):
        here = f"model.layers.{i}"
        for path, names in weights.items():
            module, key = path.rsplit(".", 1)
            yield b.get_submodule(module), key, [f"{here}.{name}.weight" for name in names]
        if c.qkv_bias:
            yield b.attn, "bias", [f"{here}.{name}.bias" for name in weights["attn.wqkv"]]


def split(module, key, p):
    """The pieces of a parameter, one for each checkpoint tensor in it."""
    if key in ("wqkv", "bias"):     # group by group: its queries, its key and its value
        p = p.view(*module.grouped, *p.shape[1:])                   # (Hkv, G+2, D, dim), or no dim
        return p[:, :-2], p[:, -2], p[:, -1]
    if key == "gate_up":
        return p.chunk(2)
    return (p,)


def parts(model):
    """(name of a checkpoint tensor, the piece of a parameter that it fills) for every tensor.

    >>> from model import Config
    >>> c = Config(vocab_size=9, dim=4, n_layers=1, n_heads=6, n_kv_heads=2, head_dim=2,
    ...            hidden_dim=5)
    >>> [(name, *piece.shape) for name, piece in parts(Transformer(c))][3]
    ('model.layers.0.self_attn.q_proj.weight', 2, 3, 2, 4)
    """
    for module, key, names in layout(model):
        yield from zip(names, split(module, key, module.get_parameter(key)), strict=True)


def stored_shape(name, piece):
    """A checkpoint stores only vectors and matrices, so (..., dim) is flattened to (rows, dim)."""
    if piece.dim() == 1 or name.endswith("bias"):
        return (piece.numel(),)
    return piece.shape[:-1].numel(), piece.shape[-1]


def check_tensors(files, model):
    """Raise ValueError unless the files hold the model's tensors, no others, in its shapes."""
    want = {name: stored_shape(name, piece) for name, piece in parts(model)}
    computed = "rotary_emb.inv_freq"    # in files of Llama 1 and 2
    have = {name: stored for name, stored in files.items() if not name.endswith(computed)}
    for name in sorted(want.keys() | have.keys()):
        if name not in have:
            raise ValueError(f"tensor {name} is missing: is one of the files also missing?")
        dtype = have[name].dtype
        shape = have[name].shape
        if dtype not in DTYPES:
            raise ValueError(f"tensor {name} is stored as {dtype}, but only {', '.join(DTYPES)} "
                             "can be read: take the checkpoint that was not quantised")
        if name not in want:
            raise ValueError(f"unexpected tensor {name}: this architecture does not use it, so the "
                             "logits would be wrong. Is this a variant, or a quantised checkpoint?")
        if want[name] != shape:
            raise ValueError(f"tensor {name}: config.json needs {want[name]}, found {shape}")


def find_device(device=None):
    """The device of that name, by default CUDA if there is one. Raises ValueError if missing."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    there = ["cpu"]
    if gpus:
        there = ["cuda", *(f"cuda:{i}" for i in range(gpus)), "cpu"]
    name = str(device or there[0])
    if name not in there:
        raise ValueError(f"device {name} is missing or unsupported: available are "
                         f"{', '.join(there)}")
    return torch.device(name)
