"""From config.json to a Config, with one function for each family of models.

A setting that this library would compute wrongly is refused, and the error names it.
"""
from model import Config, Refused

ACTS = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}
SCALINGS = {    # of the rotation: what each kind needs
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}
OFF = "quantization_config", "mlp_bias", "use_bidirectional_attention"


def config(given, eos):
    """The Config that the content of config.json describes. Raises Refused, which names the key,
    for a setting that is not supported."""
    family = given.get("model_type")
    names = given.get("architectures")
    if family is None:
        raise Refused("it has no model_type, which names the architecture, such as llama or gemma2")
    if family not in FAMILIES:
        raise Refused(f"model_type {family!r} is not supported: need one of {', '.join(FAMILIES)}")
    if names not in (None, [architecture(family)]):
        raise Refused(f"architectures {names} is not supported for model_type {family!r}: need "
                      f"[{architecture(family)!r}]")
    off(given, *OFF)
    return Config(**FAMILIES[family](given), eos=eos)


def architecture(family):
    """The name of a family's class in `transformers`."""
    return f"{family.removesuffix('_text').title()}ForCausalLM"


# --- one function per family, which returns fields of Config


def llama(given):
    off(given, "attention_bias")
    alternate(given, "full_attention")
    return common(given) | {"act": act(given, "hidden_act", "silu")}


def gemma(given, max_len, global_every, caps=(None, None)):
    off(given, "attention_bias")
    alternate(given, *["sliding_attention"] * (global_every - 1), "full_attention")
    fields = common(given, kv_heads=4, head_dim=256, tied=True, max_len=max_len)
    return fields | {
        "act": act(given, "hidden_activation", "gelu_pytorch_tanh"),
        "norm_offset": 1.0,
        "embed_scale": fields["dim"] ** 0.5,
        "post_norm": True,
        "query_scale": number(given, "query_pre_attn_scalar", 256) ** -0.5,
        "attn_softcap": number(given, "attn_logit_softcapping", caps[0], null=True),
        "final_softcap": number(given, "final_logit_softcapping", caps[1], null=True),
        "window": number({"sliding_window": 4096} | given, "sliding_window"),
        "global_every": global_every}


def gemma2(given):
    return gemma(given, 8192, 2, (50.0, 30.0))


def gemma3_text(given):
    """Blocks with a window turn by a base of their own, without scaling. transformers 5 writes the
    rotation of both kinds of blocks by name."""
    kinds = given.get("rope_parameters") or {}
    off(given, "attn_logit_softcapping")    # which transformers ignores here
    own = {"rope_theta": given.get("rope_local_base_freq", 1e4)}
    own |= kinds.get("sliding_attention") or {}
    local_theta, scaling = rotation(own, None)
    require(own, "rope_type", scaling is None)
    given = {"rope_theta": 1e6} | given | {"rope_parameters": kinds.get("full_attention")}
    every = number(given, "sliding_window_pattern", 6)
    require(given, "sliding_window_pattern", type(every) is int)
    return gemma(given, 131_072, every) | {"local_theta": local_theta, "qk_norm": True}


def qwen(given, head_dim=None):
    """In Qwen a window may slide over the layers from number `max_window_layers` on, unless
    `layer_types` says for each layer whether it does. Here it must never slide."""
    fields = common(given, kv_heads=32, head_dim=head_dim, max_len=32768)
    slides = given.get("use_sliding_window") and given.get("sliding_window", 4096) is not None
    if given.get("layer_types") is None and slides:
        first = given.get("max_window_layers", 28)
        require(given, "use_sliding_window", first >= fields["n_layers"])
    alternate(given, "full_attention")
    return fields | {"act": act(given, "hidden_act", "silu")}


def qwen2(given):
    off(given, "use_mrope")
    return qwen(given) | {"qkv_bias": True}


def qwen3(given):
    off(given, "attention_bias")
    return qwen(given, head_dim=128) | {"qk_norm": True}


FAMILIES = {"llama": llama, "gemma2": gemma2, "gemma3_text": gemma3_text, "qwen2": qwen2,
            "qwen3": qwen3}


def common(given, kv_heads=None, head_dim=None, tied=False, max_len=2048):
    """The fields of all families, with one family's defaults for keys that config.json lacks."""
    dim = number(given, "hidden_size")
    heads = number(given, "num_attention_heads")
    vocab = number(given, "vocab_size")
    kv_heads = number(given, "num_key_value_heads", kv_heads, null=True)
    head_dim = number(given, "head_dim", head_dim or dim // heads)
    if head_dim % 2:    # the rotation turns pairs
        raise Refused(f"head_dim {head_dim} is not supported")
    max_len = number(given, "max_position_embeddings", max_len)
    theta, scaling = rotation(given, max_len)
    bos = given.get("bos_token_id")
    require(given, "bos_token_id", bos is None or type(bos) is int and 0 <= bos < vocab)
    return dict(
        vocab_size=vocab,
        dim=dim,
        n_layers=number(given, "num_hidden_layers"),
        n_heads=heads,
        n_kv_heads=kv_heads or heads,
        head_dim=head_dim,
        hidden_dim=number(given, "intermediate_size"),
        norm_eps=number(given, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tied=bool(given.get("tie_word_embeddings", tied)),
        max_len=max_len,
        bos=bos)


def rotation(given, max_len):
    """(theta, `Config.rope_scaling`), in the spelling of transformers 4 or 5."""
    rope = given.get("rope_scaling") or given.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in rope.values()):
        raise Refused(f"rotary settings by layer type are not supported: {[*rope]}")
    rope = {"original_max_position_embeddings": max_len} | given | rope
    theta = number(rope, "rope_theta", 1e4)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    require(rope, "partial_rotary_factor", rope.get("partial_rotary_factor") in (None, 1))
    if kind == "default":
        return theta, None
    if kind not in SCALINGS:
        raise Refused(f"rope_type {kind!r} is not supported")
    scaling = {"rope_type": kind} | {key: number(rope, key) for key in SCALINGS[kind]}
    if kind == "llama3":
        require(rope, "low_freq_factor", scaling["low_freq_factor"] < scaling["high_freq_factor"])
    return theta, scaling


# --- what a key may hold


def require(given, key, fine):
    if not fine:
        raise Refused(f"{key} {given.get(key)!r} is not supported")


def number(given, key, default=None, null=False):
    """A positive number. Null is the default, or with `null` a value of its own, None."""
    value = given.get(key, default)
    if value is None and null:
        return None
    if value is None:
        value = default
    require(given, key, isinstance(value, int | float) and value > 0)
    return value


def act(given, key, default):
    name = given.get(key) or default
    require(given, key, name in ACTS)
    return ACTS[name]


def off(given, *keys):
    """These must be off."""
    for key in keys:
        require(given, key, not given.get(key))


def alternate(given, *kinds):
    """Layer i must be of the kind kinds[i % len(kinds)]."""
    named = given.get("layer_types") or []
    fine = all(name == kinds[i % len(kinds)] for i, name in enumerate(named))
    require(given, "layer_types", fine)
