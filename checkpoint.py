"""From a Hugging Face folder to a model and its tokenizer, and back.

The one thing to remember: `layout` says which tensors of a checkpoint each parameter holds. Loading
copies them into it one by one, saving copies them out, and no pickle is ever opened.
"""
import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from model import MLP, Attention, Config, Transformer
from support.files import find_weights, guarded, read_json, read_text, read_tokenizer, replacing, write_file

FAMILIES = {  # defaults of keys that config.json leaves out; None: derived from other keys
    "llama": dict(
        num_key_value_heads=None, head_dim=None, rms_norm_eps=1e-6, rope_theta=1e4, tie_word_embeddings=False,
        max_position_embeddings=2048, hidden_act="silu"),
    "gemma2": dict(
        num_key_value_heads=4, head_dim=256, rms_norm_eps=1e-6, rope_theta=1e4, tie_word_embeddings=True,
        max_position_embeddings=8192, hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256,
        attn_logit_softcapping=50.0, final_logit_softcapping=30.0, sliding_window=4096)}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "gemma2": "Gemma2ForCausalLM"}
KEYS = {  # a field of Config that is a positive number, and its key in config.json
    "vocab_size": "vocab_size", "dim": "hidden_size", "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads", "n_kv_heads": "num_key_value_heads", "head_dim": "head_dim",
    "hidden_dim": "intermediate_size", "norm_eps": "rms_norm_eps", "rope_theta": "rope_theta",
    "max_len": "max_position_embeddings"}
GEMMA2 = {"window": "sliding_window", "attn_softcap": "attn_logit_softcapping",
          "final_softcap": "final_logit_softcapping"}
ROPE = {"default": (), "linear": ("factor",), "llama3": (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}
ACTS = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
BESIDE = "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json"


def load(folder, device=None, dtype=None, quant=None, part=None):
    """(model, tokenizer) from a Llama or Gemma-2 folder in the Hugging Face layout.

    device: None is CUDA if there is one, else the CPU. dtype: None keeps the stored one. quant: a function
    of a matrix, such as machine.quant.NF4, whose result replaces each matrix of the blocks. part: this
    process's part of the model, a machine.parallel.Part. Needs memory for the model and one more matrix.
    Raises FileNotFoundError or ValueError (one line) for what is missing, damaged or unsupported.
    """
    folder, device = Path(folder), find_device(device)
    c, tokenizer, files = read_config(folder), read_tokenizer(folder), find_weights(folder)
    if c.tied and HEAD in files:    # as in transformers 5, the weights decide whether the head is tied
        head = files.pop(HEAD)
        embed = files.setdefault(EMBED, head)
        if head.get_dtype() != embed.get_dtype() or not torch.equal(head[...], embed[...]):
            c, files[HEAD] = replace(c, tied=False), head
    if c.n_layers > len(files):
        raise ValueError(f"config.json says {c.n_layers} layers, but there are {len(files)} tensors")
    with guarded(f"{folder}: no model has the shape that config.json says"), torch.device("meta"):
        model = Transformer(c)
    check_tensors(files, model)
    model = (part.of(model) if part else model).eval().to(dtype or DTYPES[files[EMBED].get_dtype()])
    model.scale = torch.full((), c.embed_scale, dtype=model.tok.dtype, device=device)
    for module, key, names in layout(model):
        filled = torch.empty_like(getattr(module, key), device=device)
        for name, piece in zip(names, split(module, key, filled), strict=True):
            stored = part.read(files[name], stored_shape(piece)) if part else files[name][:]
            piece.copy_(stored.view(piece.shape))
        small = quant and isinstance(module, Attention | MLP)
        put(module, key, quant(filled) if small else torch.nn.Parameter(filled, requires_grad=False))
    model.beside = {name: read_text(folder / name) for name in BESIDE if (folder / name).is_file()}
    return model, tokenizer


def save(model, folder, tokenizer):
    """Write config, weights and tokenizer in the form that `transformers` reads. A loaded model
    keeps its chat template, special tokens and settings."""
    c, folder, beside = model.c, Path(folder), getattr(model, "beside", {})
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().reshape(stored_shape(p)).contiguous() for name, p in parts(model)}
    with replacing(folder / "model.safetensors") as path:
        save_file(tensors, path, metadata={"format": "pt"})
    ids = {"bos_token_id": c.bos, "eos_token_id": list(c.eos) or None}
    settings = json.loads(beside.get("generation_config.json", "{}"))
    special = {"bos_token": c.bos, "eos_token": next(iter(c.eos), None)}
    names = {key: tokenizer.id_to_token(i) for key, i in special.items() if i is not None}
    names["tokenizer_class"] = "PreTrainedTokenizerFast"
    texts = {"tokenizer_config.json": json.dumps(names, indent=2)} | beside | {
        "config.json": json.dumps(write_config(c, model.tok.dtype) | ids, indent=2),
        "generation_config.json": json.dumps(settings | ids, indent=2),
        "tokenizer.json": tokenizer.to_str(pretty=True)}
    for name, text in texts.items():
        write_file(folder / name, text)


def encode(tokenizer, text, bos=None, special=True):
    """The ids of a prompt, as `AutoTokenizer` makes them: the post-processor of tokenizer.json alone
    decides whether a begin-of-text id comes first. An empty prompt becomes `bos`, the model's
    begin-of-text id. special: False for a rendered chat template, which has its special tokens already."""
    with guarded("the tokenizer cannot take this prompt"):
        text.encode()   # a clearer error for invalid Unicode than the tokenizer's
        ids = tokenizer.encode(text, add_special_tokens=special).ids
    if not ids and bos is None:
        raise ValueError("the prompt is empty, and config.json has no bos_token_id to begin with")
    return ids or [bos]


def layout(model):
    """(module, name of its parameter, names of the checkpoint tensors in it) for every parameter."""
    # trap: in Llama, post_attention_layernorm is the norm *before* the MLP
    norms = {"mlp_norm": "post_attention"} if not model.c.post_norm else {
        "attn_post": "post_attention", "mlp_norm": "pre_feedforward", "mlp_post": "post_feedforward"}
    block = {"attn.wqkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
             "attn.wo": ["self_attn.o_proj"], "mlp.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
             "mlp.down": ["mlp.down_proj"], "attn_norm.weight": ["input_layernorm"]}
    block |= {f"{norm}.weight": [f"{name}_layernorm"] for norm, name in norms.items()}
    yield model, "tok", [EMBED]
    yield model.norm, "weight", ["model.norm.weight"]
    if not model.c.tied:
        yield model, "head", [HEAD]
    for i, b in enumerate(model.blocks):
        for path, names in block.items():
            module, key = path.split(".")
            yield getattr(b, module), key, [f"model.layers.{i}.{name}.weight" for name in names]


def split(module, key, p):
    """The pieces of a parameter, one for each checkpoint tensor in it."""
    if key == "wqkv":   # group by group: its queries, its key and its value
        p = p.view(*module.grouped, -1)                                         # (Hkv, G+2, D, dim)
        return p[:, :-2], p[:, -2], p[:, -1]
    return p.chunk(2) if key == "gate_up" else (p,)


def parts(model):
    """(name of a checkpoint tensor, the piece of a parameter that it fills) for every tensor.

    >>> c = Config(vocab_size=9, dim=4, n_layers=1, n_heads=6, n_kv_heads=2, head_dim=2, hidden_dim=5)
    >>> [(name, *piece.shape) for name, piece in parts(Transformer(c))][3]
    ('model.layers.0.self_attn.q_proj.weight', 2, 3, 2, 4)
    """
    for module, key, names in layout(model):
        yield from zip(names, split(module, key, getattr(module, key)), strict=True)


def put(module, key, value):
    """Replace a parameter of a module by `value`, a parameter or a module."""
    delattr(module, key)
    setattr(module, key, value)


def stored_shape(piece):
    """A checkpoint stores vectors and matrices only: (..., dim) is flattened to (rows, dim)."""
    return tuple(piece.shape) if piece.dim() == 1 else (piece.shape[:-1].numel(), piece.shape[-1])


def check_tensors(files, model):
    """Raise ValueError unless the files hold exactly the model's tensors, in its shapes, as floats."""
    want = {name: stored_shape(piece) for name, piece in parts(model)}
    have = {name: tuple(stored.get_shape()) if stored.get_dtype() in DTYPES else stored.get_dtype()
            for name, stored in files.items() if not name.endswith("rotary_emb.inv_freq")}  # of Llama 1 and 2
    for name in sorted(want.keys() | have.keys()):
        if name not in have:
            raise ValueError(f"tensor {name} is missing: is one of the files missing, too?")
        if isinstance(have[name], str):
            raise ValueError(f"tensor {name} is stored as {have[name]}, and known are {', '.join(DTYPES)}: "
                             "take the checkpoint that was not quantised")
        if name not in want:
            raise ValueError(f"tensor {name}: this architecture has no use for it, so the logits would be "
                             "others: a variant of it, or a quantised checkpoint?")
        if want[name] != have[name]:
            raise ValueError(f"tensor {name}: config.json needs {want[name]}, found {have[name]}")


def find_device(device=None):
    """The device of that name, by default CUDA if there is one, else the CPU. ValueError if missing."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    there = ["cpu", *["cuda"][:gpus], *(f"cuda:{i}" for i in range(gpus))]
    name = str(device or ("cuda" if gpus else "cpu"))
    if name not in there:
        raise ValueError(f"device {name} is missing or unsupported: available are {', '.join(there)}")
    return torch.device(name)


def read_config(folder):
    """config.json (and the end-of-text ids of generation_config.json) as a Config. Raises
    ValueError for anything that this library would compute wrongly."""
    path = folder / "config.json"
    given = read_json(path)
    eos = read_eos(folder, given)
    with guarded(path):     # a value of an unexpected type fails somewhere below
        names, family = given.get("architectures"), given.get("model_type")
        if family is None:
            raise ValueError("it has no model_type, which names the architecture, such as llama or gemma2")
        if family not in FAMILIES or names not in (None, [ARCHITECTURES[family]]):
            raise ValueError(f"architecture {names or family}: need one of {[*ARCHITECTURES.values()]}")
        gemma, rope = family == "gemma2", given.get("rope_scaling") or given.get("rope_parameters") or {}
        raw = FAMILIES[family] | {key: value for key, value in (given | rope).items()
                                  if value is not None or key in GEMMA2.values()}
        raw["num_key_value_heads"] = raw["num_key_value_heads"] or raw["num_attention_heads"]
        raw["head_dim"] = raw["head_dim"] or raw["hidden_size"] // raw["num_attention_heads"]
        raw.setdefault("original_max_position_embeddings", raw["max_position_embeddings"])
        raw.setdefault("rope_type", raw.get("type", "default"))
        activation = "hidden_activation" if gemma else "hidden_act"
        turn = "sliding_attention" if gemma else "full_attention", "full_attention"
        bos = raw.get("bos_token_id")
        keys, scaling = KEYS | GEMMA2 if gemma else KEYS, ROPE.get(raw["rope_type"], ())

        def check(key, fine):
            if not fine:
                raise ValueError(f"{key} {raw.get(key)!r} is not supported")

        for key in ("quantization_config", "attention_bias", "mlp_bias", "use_bidirectional_attention"):
            check(key, not raw.get(key))
        for key in (*keys.values(), *scaling, *["query_pre_attn_scalar"] * gemma):
            number = isinstance(raw.get(key), int | float) and raw[key] > 0
            check(key, number or key.endswith("softcapping") and raw[key] is None)
        check("rope_type", raw["rope_type"] in ROPE)
        check("low_freq_factor", len(scaling) < 4 or raw["low_freq_factor"] < raw["high_freq_factor"])
        check("partial_rotary_factor", raw.get("partial_rotary_factor", 1) == 1)
        check(activation, raw[activation] in ACTS)
        check("layer_types", all(name == turn[i % 2] for i, name in enumerate(raw.get("layer_types", []))))
        check("bos_token_id", bos is None or type(bos) is int and 0 <= bos < raw["vocab_size"])
        check("head_dim", raw["head_dim"] % 2 == 0)     # the rotation turns pairs
        fields = {field: raw[key] for field, key in keys.items()}
        if gemma:
            fields |= {"norm_offset": 1.0, "post_norm": True, "embed_scale": raw["hidden_size"] ** 0.5,
                       "query_scale": raw["query_pre_attn_scalar"] ** -0.5}
        fields["rope_scaling"] = {key: raw[key] for key in ("rope_type", *scaling)} if scaling else None
        return Config(**fields, tied=bool(raw["tie_word_embeddings"]), act=ACTS[raw[activation]],
                      bos=bos, eos=eos)


def read_eos(folder, given):
    """The end-of-text ids: those of generation_config.json if it names any, else those of config.json,
    which is `given`."""
    path = folder / "generation_config.json"
    settings = read_json(path) if path.is_file() else {}
    if "eos_token_id" not in settings:
        path, settings = folder / "config.json", given
    eos = settings.get("eos_token_id")
    if eos is None:
        return ()
    eos = tuple(eos) if isinstance(eos, list) else (eos,)
    if not all(type(t) is int for t in eos):
        raise ValueError(f"{path}: eos_token_id must be a token id or a list of them, got {list(eos)}")
    return eos


def write_config(c, dtype):
    """The inverse of `read_config`, without the special ids."""
    family, keys = ("gemma2", KEYS | GEMMA2) if c.post_norm else ("llama", KEYS)
    act = next(name for name, act in ACTS.items() if act == c.act)
    raw = {"architectures": [ARCHITECTURES[family]], "model_type": family, "hidden_act": act,
           "torch_dtype": str(dtype).removeprefix("torch."), "tie_word_embeddings": c.tied,
           "rope_scaling": c.rope_scaling, **{key: getattr(c, field) for field, key in keys.items()}}
    if family == "gemma2":
        scalar = round(c.query_scale ** -2, 6)
        raw |= {"hidden_activation": act, "query_pre_attn_scalar": int(scalar) if scalar % 1 == 0 else scalar}
    return raw
