"""From a model back to a Hugging Face folder, in the form that `transformers` reads, and from a
trained head to its file."""
import json
from pathlib import Path

from safetensors.torch import save_file

from checkpoint import parts, read_text, stored_shape
from families import ACTS, architecture
from machine.files import replacing, write_file
from methods.heads import FILE, FITS

NUMBERS = {     # fields of Config, and their keys in config.json
    "vocab_size": "vocab_size", "dim": "hidden_size", "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads", "n_kv_heads": "num_key_value_heads", "head_dim": "head_dim",
    "hidden_dim": "intermediate_size", "norm_eps": "rms_norm_eps", "rope_theta": "rope_theta",
    "max_len": "max_position_embeddings", "tied": "tie_word_embeddings",
    "rope_scaling": "rope_scaling"}
GEMMA = {       # the same for those that only Gemma has
    "window": "sliding_window", "attn_softcap": "attn_logit_softcapping",
    "final_softcap": "final_logit_softcapping"}
GEMMA_3 = {"global_every": "sliding_window_pattern", "local_theta": "rope_local_base_freq"}
BESIDE = (      # files that a model may have beside its weights
    "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "generation_config.json")


def beside(folder):
    """{name: text} of the files that lie beside the weights in a folder."""
    paths = [Path(folder) / name for name in BESIDE]
    return {path.name: read_text(path) for path in paths if path.is_file()}


def save(model, folder, tokenizer, texts=()):
    """Write config, weights and tokenizer. `texts`, as from `beside`, are kept: a chat template,
    special tokens, settings."""
    c = model.c
    texts = dict(texts)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, piece in parts(model):
        tensors[name] = piece.detach().reshape(stored_shape(name, piece)).contiguous()
    with replacing(folder / "model.safetensors") as path:
        save_file(tensors, path, metadata={"format": "pt"})

    ids = {"bos_token_id": c.bos, "eos_token_id": list(c.eos) or None}
    settings = json.loads(texts.get("generation_config.json", "{}"))
    special = {"bos_token": c.bos, "eos_token": next(iter(c.eos), None)}
    names = {key: tokenizer.id_to_token(i) for key, i in special.items() if i is not None}
    names["tokenizer_class"] = "PreTrainedTokenizerFast"
    texts = {"tokenizer_config.json": json.dumps(names, indent=2)} | texts
    texts["config.json"] = json.dumps(write_config(c, model.tok.dtype) | ids, indent=2)
    texts["generation_config.json"] = json.dumps(settings | ids, indent=2)
    texts["tokenizer.json"] = tokenizer.to_str(pretty=True)
    for name, text in texts.items():
        write_file(folder / name, text)


def write_config(c, dtype):
    """The content of config.json, as the inverse of `families.config`, without the special ids."""
    family = "llama"
    if c.local_theta is not None:
        family = "gemma3_text"
    elif c.post_norm:
        family = "gemma2"
    elif c.qkv_bias:
        family = "qwen2"
    elif c.qk_norm:
        family = "qwen3"
    act = next(name for name, act in ACTS.items() if act == c.act)
    raw = {
        "architectures": [architecture(family)],
        "model_type": family,
        "hidden_act": act,
        "torch_dtype": str(dtype).removeprefix("torch.")}
    raw |= {key: vars(c)[field] for field, key in NUMBERS.items()}
    if c.post_norm:
        names = GEMMA | GEMMA_3 if family == "gemma3_text" else GEMMA
        raw |= {key: vars(c)[field] for field, key in names.items()}
        raw["hidden_activation"] = act
        scalar = round(c.query_scale ** -2, 6)
        raw["query_pre_attn_scalar"] = int(scalar) if scalar % 1 == 0 else scalar
    return raw


def save_head(head, folder):
    """Write a trained head in bfloat16."""
    about = {"kind": head.kind, "shape": head.arguments, "model": FITS(head.model.c),
             "ranks": list(head.ranks)}
    weights = {name: p.detach().bfloat16() for name, p in head.weights.state_dict().items()}
    with replacing(Path(folder) / FILE) as path:
        save_file(weights, path, metadata={"heads": json.dumps(about)})
