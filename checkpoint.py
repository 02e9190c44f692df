"""From a Hugging Face folder to a model and its tokenizer. families.py reads config.json.

`layout` says which tensors of a checkpoint each parameter holds. Loading copies them into it one by
one, and no pickle is ever opened. Bad input gives one clear line.
"""
import json
import re
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from tokenizers import AddedToken, Tokenizer

import families
from model import MLP, Attention, Refused, Transformer

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
SPECIAL = "bos", "eos", "unk", "sep", "pad", "cls", "mask"      # tokens that settings name
TOKEN_FLAGS = "single_word", "lstrip", "rstrip", "normalized", "special"


def load(folder, device=None, dtype=None, quant=None, part=None):
    """(model, tokenizer) from a folder in the Hugging Face layout, of one of `families.FAMILIES`.

    The default `device` is CUDA if there is one, else the CPU, and the default `dtype` is the
    stored one. `quant` is a function of a matrix, such as machine.quant.Int4, whose result replaces
    each matrix of the blocks. `part` is this process's part of the model, a machine.parallel.Part.
    Loading needs memory for the model and one more matrix. Raises OSError or Refused if something
    is missing, damaged or unsupported.
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
        raise Refused(f"config.json says {c.n_layers} layers, but there are {len(files)} "
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
                stored = part.slice_of(files[name], stored_shape(name, piece))
            else:
                stored = files[name][:]
            piece.copy_(stored.view(piece.shape))
        value = torch.nn.Parameter(filled, requires_grad=False)
        if quant and isinstance(module, Attention | MLP) and filled.dim() == 2:
            value = quant(filled)
        put(module, key, value)
    return model, tokenizer


def put(module, key, value):
    """Replace a parameter of a module by `value`, a parameter or a module."""
    delattr(module, key)
    setattr(module, key, value)


def encode(tokenizer, text, bos=None, special=True):
    """The ids of a prompt, as `AutoTokenizer` makes them. The post-processor of tokenizer.json
    alone decides whether a begin-of-text id comes first. An empty prompt becomes `bos`, the model's
    begin-of-text id. `special` is False for a chat template, which renders its special tokens."""
    with guarded("the tokenizer cannot take this prompt"):
        text.encode()   # a clearer error for invalid Unicode than the tokenizer's
        ids = tokenizer.encode(text, add_special_tokens=special).ids
    if not ids and bos is None:
        raise Refused("the prompt is empty, and config.json has no bos_token_id to begin with")
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
            raise Refused(f"tensor {name} is missing: is one of the files also missing?")
        dtype = have[name].dtype
        shape = have[name].shape
        if dtype not in DTYPES:
            raise Refused(f"tensor {name} is stored as {dtype}, but only {', '.join(DTYPES)} "
                          "can be read: take the checkpoint that was not quantised")
        if name not in want:
            raise Refused(f"unexpected tensor {name}: this architecture does not use it, so the "
                          "logits would be wrong. Is this a variant, or a quantised checkpoint?")
        if want[name] != shape:
            raise Refused(f"tensor {name}: config.json needs {want[name]}, found {shape}")


def find_device(device=None):
    """The device of that name, by default CUDA if there is one. Raises ValueError if missing."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    there = ["cpu"]
    if gpus:
        there = ["cuda", *(f"cuda:{i}" for i in range(gpus)), "cpu"]
    name = str(device or there[0])
    if name not in there:
        raise Refused(f"device {name} is missing or unsupported: available are "
                      f"{', '.join(there)}")
    return torch.device(name)


# --- files


@contextmanager
def guarded(what):
    """Any exception raised inside becomes a Refused of one line, which begins with `what`.

    trap: when the tokenizer library, which is written in Rust, panics at a damaged file, it raises
    a BaseException, not an Exception.
    """
    try:
        yield
    except (KeyboardInterrupt, OSError):
        raise
    except BaseException as e:
        reason = str(e) if isinstance(e, ValueError) else repr(e)
        raise Refused(f"{what}: {' '.join(reason.split())[:300]}") from None


def download_first(name):
    """The end of a message that says how to get a folder of this name. It is empty unless the name
    looks like OWNER/MODEL, a model on the Hugging Face hub."""
    owner, _, model = str(name).partition("/")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)) or Path(owner).exists():
        return ""
    return ("; if it is a model on the Hugging Face hub, download it first: "
            f"hf download {name} --local-dir runs/{model}")


def check_folder(folder):
    """Raise FileNotFoundError where there is no folder."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: there is no such folder{download_first(folder)}")


def check_fetched(path):
    """Raise Refused for the pointer that Git leaves in place of a file that LFS has not fetched."""
    with open(path, encoding="latin-1") as file:    # which takes any bytes
        if file.read(64).startswith("version https://git-lfs"):
            raise Refused(f"{path}: a Git LFS pointer instead of the file: run git lfs pull in its "
                          "folder")


def read_text(path):
    with guarded(f"{path}: not readable as UTF-8 text"):
        return path.read_text(encoding="utf-8-sig")     # skips a byte order mark


def parse_json(text):
    """The value of a JSON text; None if it is not valid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def read_json(path):
    content = parse_json(read_text(path))
    if not isinstance(content, dict):
        check_fetched(path)
        raise Refused(f"{path}: expected a JSON object, whole and valid")
    return content


def read_config(folder):
    """config.json, and the end-of-text ids of generation_config.json, as a Config. Raises Refused
    for anything that this library would compute wrongly."""
    check_folder(folder)
    path = folder / "config.json"
    given = read_json(path)
    eos = read_eos(folder, given)
    with guarded(path):     # a value of an unexpected type fails somewhere below
        c = families.config(given, eos)
        beyond = [i for i in eos if not 0 <= i < c.vocab_size]
        if beyond:      # an answer would never end there
            raise Refused(f"eos_token_id {beyond[0]} is no id: they run from 0 to "
                          f"{c.vocab_size - 1}")
    return c


def read_eos(folder, given):
    """The end-of-text ids. If generation_config.json has the key, even as null, it decides.
    Otherwise config.json does, which is `given`."""
    path = folder / "generation_config.json"
    settings = read_json(path) if path.is_file() else {}
    if "eos_token_id" not in settings:
        path = folder / "config.json"
        settings = given
    eos = settings.get("eos_token_id")
    if eos is None:
        return ()
    eos = tuple(eos) if isinstance(eos, list) else (eos,)
    if not all(type(t) is int for t in eos):
        raise Refused(f"{path}: eos_token_id must be a token id or a list of them, got {list(eos)}")
    return eos


def read_tokenizer(folder):
    """The tokenizer of a Hugging Face folder."""
    check_folder(folder)
    path = folder / "tokenizer.json"
    check_fetched(path)
    with guarded(f"{path}: not a readable tokenizer"):
        tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()  # trap: the file may ask for a length, but a prompt must stay as it is
    tokenizer.no_truncation()
    with guarded(f"{folder / 'tokenizer_config.json'}: its tokens are not readable"):
        add_listed(tokenizer, token_settings(folder))
    return tokenizer


def token_settings(folder):
    """The content of tokenizer_config.json. As in transformers, two older files add to it, but only
    where it does not list its tokens."""
    files = {name: folder / f"{name}.json" for name in (
        "tokenizer_config", "special_tokens_map", "added_tokens")}
    given = {name: read_json(path) if path.is_file() else {} for name, path in files.items()}
    settings = given["tokenizer_config"]
    if settings.get("added_tokens_decoder") is None:
        settings |= given["special_tokens_map"]
        settings |= {"added_tokens_decoder": {i: t for t, i in given["added_tokens"].items()}}
    return settings


def add_listed(tokenizer, settings):
    """Add the tokens that only `token_settings` lists, as fine-tunes save them. Otherwise they
    would be cut into pieces."""
    named = [settings.get(f"{name}_token") for name in SPECIAL]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        if isinstance(settings.get(key), list):
            named += settings[key]
    special = [t if isinstance(t, dict) else {"content": t} for t in named if t]
    names = {t["content"] for t in special}

    def add(token):
        flags = {"special": token["content"] in names} | token
        flags = {key: flags[key] for key in TOKEN_FLAGS if key in flags}
        tokenizer.add_tokens([AddedToken(token["content"], **flags)])

    there = {t.content for t in tokenizer.get_added_tokens_decoder().values()}
    for i, token in sorted(settings["added_tokens_decoder"].items(), key=lambda pair: int(pair[0])):
        token = token if isinstance(token, dict) else {"content": token}
        if token["content"] not in there:
            add(token)
            there.add(token["content"])
            if tokenizer.token_to_id(token["content"]) != int(i):
                raise Refused(f"{token['content']!r} cannot have the id {i}: the next free one is "
                              f"{tokenizer.token_to_id(token['content'])}")
    for token in special:
        if token["content"] not in there:
            add(token | {"special": True, "normalized": False})


@dataclass(frozen=True)
class Stored:
    """A tensor of a safetensors file; indexing reads it. For that the file is opened again, because
    all that was read of an open file stays in memory."""
    path: str
    name: str
    dtype: str
    shape: tuple

    def __getitem__(self, index):
        return safe_open(self.path, framework="pt").get_slice(self.name)[index]


def find_weights(folder):
    """{tensor name: its Stored}, from the single file of a Hugging Face folder or from all files
    that its index names. Where several files hold a tensor, the index says which one counts."""
    single = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    where = {}
    if not single.is_file() and index.is_file():
        listed = read_json(index)
        with guarded(f"{index}: weight_map must name a file for each tensor"):
            where = {name: folder / file for name, file in listed["weight_map"].items()}
            if any(Path(file).is_absolute() or ".." in Path(file).parts
                   for file in listed["weight_map"].values()):
                raise Refused("a file outside this folder")
    found = {}
    for path in sorted(set(where.values())) or [single]:
        check_fetched(path)
        with guarded(f"{path}: truncated or damaged safetensors file"):
            file = safe_open(str(path), framework="pt")
        for name in file.keys():
            if where.get(name, path) == path:
                part = file.get_slice(name)
                found[name] = Stored(str(path), name, part.get_dtype(), tuple(part.get_shape()))
    return found
