"""A Hugging Face folder to a model and its tokenizer, and back: config.json, safetensors, tokenizer.json.

The one thing to remember: `parts` names every tensor of a checkpoint once, with the piece of a parameter that
it fills. Loading copies into the pieces, saving copies out of them, and no pickle is ever opened.
"""
import json
import math
import os
import shlex
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn

from model import MLP, Attention, Config, Transformer
from support.files import read_json, read_text, replacing, write_file

FAMILIES = {  # defaults for keys that config.json leaves out; None: derived from other keys
    "llama": dict(
        num_key_value_heads=None, head_dim=None, rms_norm_eps=1e-6, rope_theta=1e4, tie_word_embeddings=False,
        max_position_embeddings=2048, hidden_act="silu"),
    "gemma2": dict(
        num_key_value_heads=4, head_dim=256, rms_norm_eps=1e-6, rope_theta=1e4, tie_word_embeddings=True,
        max_position_embeddings=8192, hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256,
        attn_logit_softcapping=50.0, final_logit_softcapping=30.0, sliding_window=4096)}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "gemma2": "Gemma2ForCausalLM"}
ACTS = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
CONVERT = ('python -c "import sys, transformers as t; d, new = sys.argv[1:]; '
           '[m.from_pretrained(d).save_pretrained(new) for m in (t.AutoModelForCausalLM, t.AutoTokenizer)]"')
BESIDE = "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json"
ROPE_KEYS = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor",
                                               "original_max_position_embeddings")}


@torch.inference_mode(False)  # trap: in that mode a view does not know its base, see `fill`
def load(folder, device=None, dtype=None, quant=None, part=(0, 1)):
    """(model, tokenizer) from a Llama or Gemma-2 folder in the Hugging Face layout.

    device: None is CUDA if there is one, else the CPU. dtype: None keeps the stored one. quant: a function of
    a matrix, such as machine.quant.NF4, whose result takes the place of each matrix of the blocks. part:
    (rank, world), where this process is one of several, which read a part of the model each; see `share`.
    Each tensor is read and copied to its final place before the next one is read. Raises FileNotFoundError or
    ValueError, in one line, for whatever is missing, damaged or not supported.
    """
    folder, device = Path(folder), find_device(device)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    c = read_config(folder)
    tokenizer = read_tokenizer(folder)
    c, files = settle_tying(c, find_weights(folder))
    if c.n_layers > len(files):
        raise ValueError(f"config.json says {c.n_layers} layers, but the weights are {len(files)} tensors")
    try:
        with torch.device("meta"):
            model = Transformer(c)
    except RuntimeError:  # the size in bytes exceeds 63 bits
        raise ValueError("config.json asks for a model larger than any memory") from None
    check_tensors(files, model)
    if part != (0, 1):
        model = share(c, part[1])
    if dtype is None:
        dtype = DTYPES[files[EMBED]().get_dtype()]
    model = model.to(dtype).requires_grad_(False).eval()
    model.scale = torch.empty((), dtype=dtype, device=device).fill_(c.embed_scale)
    fill(model, files, device, quant, part[0])
    model.beside = {name: read_text(folder / name) for name in BESIDE if (folder / name).is_file()}
    return model, tokenizer


def save(model, folder, tokenizer):
    """Write config, weights and tokenizer in the form that `transformers` reads. A loaded model keeps its
    chat template, special tokens and settings. Raises ValueError for a quantised model."""
    if not isinstance(model.blocks[0].attn.wqkv, torch.Tensor):
        raise ValueError("a quantised model cannot be saved: save the model that it was made from")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().reshape(stored_shape(p)).contiguous() for name, p in parts(model)}
    with replacing(folder / "model.safetensors") as path:
        save_file(tensors, path, metadata={"format": "pt"})
    beside = getattr(model, "beside", {})
    ids = {"bos_token_id": model.c.bos, "eos_token_id": list(model.c.eos) or None}
    special = {"bos_token": model.c.bos, "eos_token": next(iter(model.c.eos), None)}
    names = {key: tokenizer.id_to_token(i) for key, i in special.items() if i is not None}
    names["tokenizer_class"] = "PreTrainedTokenizerFast"
    texts = {"tokenizer_config.json": as_json(names)} | beside
    texts["config.json"] = as_json(write_config(model.c, model.tok.dtype) | ids)
    texts["generation_config.json"] = as_json(json.loads(beside.get("generation_config.json", "{}")) | ids)
    texts["tokenizer.json"] = tokenizer.to_str(pretty=True)
    for name, text in texts.items():
        write_file(folder / name, text)


def as_json(content):
    return json.dumps(content, indent=2) + "\n"


def encode(tokenizer, text, bos=None, special=True):
    """The ids of a prompt, as `AutoTokenizer` makes them: the post-processor of tokenizer.json alone decides
    whether a begin-of-text id comes first (transformers 5 ignores `add_bos_token` beside it). An empty prompt
    becomes `bos`, the model's begin-of-text id. special: False for a rendered chat template, which writes its
    special tokens itself. Raises ValueError for an empty prompt without a bos, and for text that is not
    Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise ValueError(f"the prompt is not valid UTF-8 at character {e.start}") from None
    with guarded("the tokenizer cannot take this prompt"):
        ids = tokenizer.encode(text, add_special_tokens=special).ids
        tokenizer.decode(ids, skip_special_tokens=False)
    if not ids and bos is None:
        raise ValueError("the prompt is empty, and config.json has no bos_token_id to begin with: give it at "
                         "least one character")
    return ids or [bos]


# --- tensors


def parts(model):
    """(name in the checkpoint, the piece of a parameter that it fills) for every tensor.

    A parameter may hold several tensors: `wqkv` has queries, keys and values, group by group.

    >>> c = Config(vocab_size=9, dim=4, n_layers=1, n_heads=6, n_kv_heads=2, head_dim=2, hidden_dim=5,
    ...            tied=True)
    >>> for name, piece in parts(Transformer(c)):
    ...     print(name, *piece.shape)
    model.embed_tokens.weight 9 4
    model.norm.weight 4
    model.layers.0.self_attn.q_proj.weight 2 3 2 4
    model.layers.0.self_attn.k_proj.weight 2 2 4
    model.layers.0.self_attn.v_proj.weight 2 2 4
    model.layers.0.self_attn.o_proj.weight 4 12
    model.layers.0.mlp.gate_proj.weight 5 4
    model.layers.0.mlp.up_proj.weight 5 4
    model.layers.0.mlp.down_proj.weight 4 5
    model.layers.0.input_layernorm.weight 4
    model.layers.0.post_attention_layernorm.weight 4
    """
    yield EMBED, model.tok
    yield "model.norm.weight", model.norm.weight
    if model.head is not None:
        yield HEAD, model.head
    for i, b in enumerate(model.blocks):
        wqkv = b.attn.wqkv.view(*b.attn.grouped, -1)                            # (Hkv, G+2, D, dim)
        gate, up = b.mlp.gate_up.chunk(2)
        pieces = {"self_attn.q_proj": wqkv[:, :-2], "self_attn.k_proj": wqkv[:, -2],
                  "self_attn.v_proj": wqkv[:, -1], "self_attn.o_proj": b.attn.wo,
                  "mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": b.mlp.down,
                  "input_layernorm": b.attn_norm.weight}
        if model.c.post_norm:
            pieces |= {"post_attention_layernorm": b.attn_post.weight,
                       "pre_feedforward_layernorm": b.mlp_norm.weight,
                       "post_feedforward_layernorm": b.mlp_post.weight}
        else:  # trap: in Llama this name is the norm *before* the MLP
            pieces |= {"post_attention_layernorm": b.mlp_norm.weight}
        yield from ((f"model.layers.{i}.{name}.weight", piece) for name, piece in pieces.items())


def share(c, world):
    """The part of a model, without memory, that each of `world` processes keeps (see machine/parallel.py):
    its own heads, its own columns of each MLP and rows of the head; embeddings and norms are whole. Raises
    ValueError where the heads or columns cannot be shared evenly."""
    for what, count in (("key-value heads", c.n_kv_heads), ("columns of an MLP", c.hidden_dim)):
        if count % world:
            raise ValueError(f"{world} processes cannot share {count} {what} evenly")
    with torch.device("meta"):
        model = Transformer(replace(c, n_heads=c.n_heads // world, n_kv_heads=c.n_kv_heads // world,
                                    hidden_dim=c.hidden_dim // world))
    if model.head is not None:
        model.head = nn.Parameter(model.head[: -(-c.vocab_size // world)].detach())
    return model


def fill(model, files, device, quant=None, rank=0):
    """Give memory to one parameter after the other of a model that has none, and read it. A matrix of the
    blocks is quantised before the next one is read, so that no two of them are there in full."""
    owners = {id(p): (module, key) for module in model.modules()
              for key, p in module.named_parameters(recurse=False)}
    # without memory, a piece still knows which parameter it is a view of, and where it lies in it
    base = lambda part: id(part[1] if part[1]._base is None else part[1]._base)     # noqa: E731
    for owner, pieces in groupby(parts(model), base):
        module, key = owners[owner]
        filled = torch.empty_like(getattr(module, key), device=device)
        for name, piece in pieces:
            place = filled.as_strided(piece.shape, piece.stride(), piece.storage_offset())
            place.copy_(read_tensor(files[name](), stored_shape(piece), rank).view(piece.shape))
        small = quant and isinstance(module, Attention | MLP)
        put(module, key, quant(filled) if small else nn.Parameter(filled, requires_grad=False))


def read_tensor(stored, shape, rank):
    """A stored tensor. Where `shape` is smaller, only the slice of process `rank` is read."""
    cuts = []
    for whole, own in zip(stored.get_shape(), shape, strict=True):
        first = min(rank * own, whole - own)    # where it cannot be shared evenly, the last one overlaps
        cuts.append(slice(first, first + own))
    return stored[tuple(cuts)].contiguous()


def put(module, key, value):
    """Let value, a parameter or a module, take a parameter's place."""
    delattr(module, key)
    setattr(module, key, value)


def stored_shape(piece):
    """A checkpoint stores vectors and matrices only: (..., dim) is flattened to (rows, dim)."""
    return tuple(piece.shape) if piece.dim() == 1 else (math.prod(piece.shape[:-1]), piece.shape[-1])


def find_weights(folder):
    """{tensor name: a function that opens it, as safetensors' lazy slice}."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.is_file():
        handle = open_weights(single)
        return {name: partial(handle.get_slice, name) for name in handle.keys()}
    if index.is_file():
        where = read_json(index).get("weight_map")
        if not isinstance(where, dict) or any(Path(str(file)).name != file for file in where.values()):
            raise ValueError(f"{index}: weight_map must name a file of this folder for each tensor")
        handles = {name: open_weights(folder / name) for name in sorted(set(where.values()))}
        lost = next((name for name, file in where.items() if name not in handles[file].keys()), None)
        if lost is not None:
            raise ValueError(f"{index}: {where[lost]} has no tensor {lost}")
        return {name: partial(handles[file].get_slice, name) for name, file in where.items()}
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if pickles:
        raise ValueError(f"{folder}: only pickles ({pickles[0]}), which can run code and are never opened; "
                         f"convert them once: {CONVERT} {shlex.quote(str(folder))} NEW")
    raise FileNotFoundError(f"{folder}: no model.safetensors and no model.safetensors.index.json")


def open_weights(path):
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file, but the index names it")
    check_pointer(path)
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError) as e:
        raise ValueError(f"{path}: truncated or damaged safetensors file ({e})") from None


def check_pointer(path):
    """Raises ValueError for what Git leaves in a file's place where LFS has not fetched it."""
    with open(path, "rb") as file:
        if file.read(23) == b"version https://git-lfs":
            raise ValueError(f"{path}: a Git LFS pointer instead of the file: run git lfs pull in its folder")


def settle_tying(c, files):
    """(c, files) where config.json and the weights agree on tying. As in transformers 5 the weights decide: a
    tied head that is stored with other values is a head of its own, and a tied matrix may be stored under
    either name."""
    if c.tied and HEAD in files:
        head = files.pop(HEAD)
        if EMBED not in files:
            return c, files | {EMBED: head}
        if not equal(files[EMBED](), head()):
            return replace(c, tied=False), files | {HEAD: head}
    return c, files


def equal(a, b, rows=4096):
    """Whether two stored matrices are the same, without reading either as a whole."""
    shape = a.get_shape()
    return shape == b.get_shape() and len(shape) == 2 and all(
        torch.equal(a[i : i + rows].double(), b[i : i + rows].double()) for i in range(0, shape[0], rows))


def check_tensors(files, model):
    """Raises ValueError unless every tensor is there, with its shape and a floating type, and none is left
    over."""
    extra = {name for name in files if not name.endswith("rotary_emb.inv_freq")}  # in Llama 1 and 2, unused
    for name, piece in parts(model):
        if name not in files:
            hint = " (untied: tie_word_embeddings is false)" if name == HEAD else ""
            raise ValueError(f"the weights lack tensor {name}{hint}")
        stored, want = files[name](), stored_shape(piece)
        if tuple(stored.get_shape()) != want:
            raise ValueError(f"tensor {name} has shape {tuple(stored.get_shape())}, config.json wants {want}")
        if stored.get_dtype() not in DTYPES:
            raise ValueError(f"tensor {name} has type {stored.get_dtype()}, not one of {', '.join(DTYPES)}")
        extra.discard(name)
    if extra:
        raise ValueError(f"{len(extra)} tensors have no place in config.json's model, such as {min(extra)}")


def find_device(device=None):
    """The device of that name; None is CUDA if there is a GPU, else the CPU. Raises ValueError for a device
    that is not there."""
    try:
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (RuntimeError, TypeError):
        raise ValueError(f"unknown device {device!r}: say cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("CUDA was asked for, but torch finds no GPU here: leave the device out, or say cpu")
    last = torch.cuda.device_count() - 1
    if device.type == "cuda" and device.index is not None and device.index > last:
        raise ValueError(f"{device} was asked for, but the last GPU here is cuda:{last}")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device} is not supported: say cpu or cuda")
    return device


# --- config.json and tokenizer.json


def read_tokenizer(folder):
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    check_pointer(path)
    with guarded(f"{path}: not a readable tokenizer"):
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_padding()  # trap: the file may ask for some length, but a prompt must stay as it is
        tokenizer.no_truncation()
        for i in range(300):  # some damaged tokenizers load, but crash when they decode
            tokenizer.decode([i], skip_special_tokens=False)
        return tokenizer


@contextmanager
def guarded(what):
    """Whatever the tokenizer library raises inside becomes a ValueError.

    trap: the library is written in Rust. A damaged file can make it panic, and a panic prints to file
    descriptor 2 and reaches Python as a BaseException, not as an Exception.
    """
    null, kept = os.open(os.devnull, os.O_WRONLY), os.dup(2)  # this order also works where 2 is closed
    os.dup2(null, 2)
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as e:
        raise ValueError(f"{what} ({e})") from None
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def read_config(folder):
    """config.json (and the end-of-text ids of generation_config.json) as a Config. Raises ValueError for
    whatever this library would compute wrongly: other architectures, biases, rope types, activations, layer
    patterns."""
    path, other = folder / "config.json", folder / "generation_config.json"
    raw, generation = read_json(path), read_json(other) if other.is_file() else {}
    try:
        return Config(**read_fields(raw, generation))
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from None


def read_fields(raw, generation):
    """The fields of a Config, as the two files have them."""
    family = read_family(raw)
    raw = FAMILIES[family] | raw
    for key in {"head_dim", "num_key_value_heads", "hidden_activation"} & FAMILIES[family].keys():
        raw[key] = FAMILIES[family][key] if raw[key] is None else raw[key]
    number = partial(read_number, raw)
    shape = read_shape(raw, number)
    act = raw["hidden_activation"] if family == "gemma2" else raw["hidden_act"]
    if not isinstance(act, str) or act not in ACTS:
        raise ValueError(f"activation {act!r} is not supported; {' and '.join(ACTS)} are")
    if not isinstance(raw["tie_word_embeddings"], bool):
        raise ValueError(f"tie_word_embeddings must be true or false, got {raw['tie_word_embeddings']!r}")
    theta, scaling = read_rope(raw)
    kinds = raw.get("layer_types")
    turn = ["sliding_attention" if family == "gemma2" else "full_attention", "full_attention"]
    if kinds is not None and kinds != [turn[i % 2] for i in range(min(shape["n_layers"], 2**16))]:
        raise ValueError(f"layer_types must be {turn[0]} and {turn[1]} in turn, got {kinds}")
    return shape | dict(
        rope_theta=theta, rope_scaling=scaling, tied=raw["tie_word_embeddings"], act=ACTS[act],
        max_len=number("max_position_embeddings"), **read_special(raw, generation, shape["vocab_size"]),
        **(read_gemma2(raw, number) if family == "gemma2" else {}))


def read_family(raw):
    """A key of FAMILIES. Refuses architectures and variants that are not written here."""
    named = raw.get("architectures") or [ARCHITECTURES.get(raw.get("model_type"), raw.get("model_type"))]
    family = next((f for f, name in ARCHITECTURES.items() if named == [name]), None)
    if family is None or raw.get("model_type", family) != family:
        raise ValueError(f"architecture {raw.get('architectures') or raw.get('model_type')} is not "
                         f"supported; Llama 1 to 3.x and Gemma-2 are ({', '.join(ARCHITECTURES.values())})")
    how = raw.get("quantization_config")
    if how:
        how = how.get("quant_method", how) if isinstance(how, dict) else how
        raise ValueError(f"the weights are quantised ({how}), which is not supported: load the original, and "
                         "quantise it with --quant")
    for key in ("attention_bias", "mlp_bias", "use_bidirectional_attention"):
        if raw.get(key):
            raise ValueError(f"{key} is not supported")
    return family


def read_number(raw, key, kind=int, default=None):
    """A positive number of config.json, as an int or a float."""
    value = default if raw.get(key) is None else raw[key]
    if value is None:
        raise ValueError(f"{key} is missing")
    fine = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    if not fine or not 0 < value < 2**31:
        raise ValueError(f"{key} must be a {'whole' if kind is int else 'positive'} number, got {value!r}")
    return kind(value)


def read_shape(raw, number):
    """The fields of a Config that say how large its tensors are, and the epsilon of the norms."""
    vocab, dim, heads = map(number, ("vocab_size", "hidden_size", "num_attention_heads"))
    kv_heads = number("num_key_value_heads", default=heads)
    head_dim = number("head_dim", default=dim // heads)
    if heads % kv_heads:
        raise ValueError(f"{heads} attention heads cannot share {kv_heads} key-value heads evenly")
    if head_dim % 2 or raw.get("partial_rotary_factor", 1) != 1:
        raise ValueError(f"rotary embedding needs an even head_dim and all of it, got head_dim {head_dim}, "
                         f"partial_rotary_factor {raw.get('partial_rotary_factor', 1)}")
    return dict(vocab_size=vocab, dim=dim, n_layers=number("num_hidden_layers"), n_heads=heads,
                n_kv_heads=kv_heads, head_dim=head_dim, hidden_dim=number("intermediate_size"),
                norm_eps=number("rms_norm_eps", float))


def read_gemma2(raw, number):
    """The fields of a Config that only Gemma-2 has."""
    caps = {field: None if raw[key] is None else number(key, float) for field, key in (
        ("attn_softcap", "attn_logit_softcapping"), ("final_softcap", "final_logit_softcapping"))}
    return caps | dict(norm_offset=1.0, embed_scale=number("hidden_size") ** 0.5, post_norm=True,
                       query_scale=number("query_pre_attn_scalar", float) ** -0.5,
                       window=number("sliding_window"))


def read_rope(raw):
    """(theta, scaling) from either spelling: `rope_parameters`, or `rope_theta` and `rope_scaling`, which
    wins in transformers 5 where a file has both."""
    spec = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(spec, dict):
        raise ValueError(f"rope_scaling must be an object, got {spec!r}")
    theta = spec.get("rope_theta", raw["rope_theta"])
    kind = spec.get("rope_type", spec.get("type", "default"))
    if kind != "default" and kind not in list(ROPE_KEYS):
        raise ValueError(f"rope type {kind!r} is not supported; default, {' and '.join(ROPE_KEYS)} are")
    if spec.get("partial_rotary_factor", 1) != 1:
        raise ValueError("partial_rotary_factor is not supported: rotary embedding needs all of a head")
    usual = {"original_max_position_embeddings": raw["max_position_embeddings"]}
    scaling = {key: spec.get(key, usual.get(key)) for key in ROPE_KEYS.get(kind, ())}
    for key, value in {"rope_theta": theta, **scaling}.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 2**63:
            raise ValueError(f"{key} must be a positive number, got {value!r}")
    if kind == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise ValueError("low_freq_factor must be below high_freq_factor")
    return float(theta), {"rope_type": kind, **scaling} if scaling else None


def read_special(raw, generation, vocab):
    """The begin- and end-of-text ids. For the latter, generation_config.json has priority."""
    eos = generation.get("eos_token_id", raw.get("eos_token_id"))
    eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(type(t) is int for t in eos):
        raise ValueError(f"eos_token_id must be a token id or a list of them, got {eos!r}")
    bos = raw.get("bos_token_id")
    if bos is not None and not (type(bos) is int and 0 <= bos < vocab):
        raise ValueError(f"bos_token_id must be a token id below {vocab}, got {bos!r}")
    return {"bos": bos, "eos": tuple(eos)}


def write_config(c, dtype):
    """The inverse of `read_config`, without the special ids."""
    family = "gemma2" if c.post_norm else "llama"
    raw = {"architectures": [ARCHITECTURES[family]], "model_type": family,
           "torch_dtype": str(dtype).removeprefix("torch."), "vocab_size": c.vocab_size, "hidden_size": c.dim,
           "intermediate_size": c.hidden_dim, "num_hidden_layers": c.n_layers,
           "num_attention_heads": c.n_heads, "num_key_value_heads": c.n_kv_heads, "head_dim": c.head_dim,
           "max_position_embeddings": c.max_len, "rms_norm_eps": c.norm_eps,
           "rope_theta": c.rope_theta, "rope_scaling": c.rope_scaling,
           "tie_word_embeddings": c.tied, "attention_bias": False}
    act = next(name for name, kind in ACTS.items() if kind == c.act)
    if family == "llama":
        return raw | {"hidden_act": act, "mlp_bias": False}
    scalar = round(c.query_scale ** -2, 6)
    return raw | {"hidden_act": act, "hidden_activation": act, "sliding_window": c.window,
                  "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
                  "attn_logit_softcapping": c.attn_softcap, "final_logit_softcapping": c.final_softcap}
