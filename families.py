"""From config.json to a Config, and back, with one function for each family of models.

The one thing to remember: a setting that this library would compute wrongly is refused, and the
error names it.
"""
from files import check_folder, guarded, read_json
from model import Config

COMMON = dict(rms_norm_eps=1e-6, rope_theta=1e4)
LLAMA = COMMON | dict(
    num_key_value_heads=None, head_dim=None, tie_word_embeddings=False,
    max_position_embeddings=2048, hidden_act="silu")
QWEN = LLAMA | dict(
    num_key_value_heads=32, max_position_embeddings=32768, sliding_window=4096,
    max_window_layers=28)
GEMMA2 = COMMON | dict(
    num_key_value_heads=4, head_dim=256, tie_word_embeddings=True, max_position_embeddings=8192,
    hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256, attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0, sliding_window=4096)
DEFAULTS = {    # of keys that config.json leaves out; None: derived from other keys
    "llama": LLAMA, "gemma2": GEMMA2, "qwen2": QWEN, "qwen3": QWEN | dict(head_dim=128)}
NUMBERS = {     # fields of Config that are positive numbers, and their keys
    "vocab_size": "vocab_size", "dim": "hidden_size", "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads", "n_kv_heads": "num_key_value_heads", "head_dim": "head_dim",
    "hidden_dim": "intermediate_size", "norm_eps": "rms_norm_eps", "rope_theta": "rope_theta",
    "max_len": "max_position_embeddings"}
LIMITS = {      # the same for those that only Gemma-2 has
    "window": "sliding_window", "attn_softcap": "attn_logit_softcapping",
    "final_softcap": "final_logit_softcapping"}
NULLS = {*LIMITS.values(), "num_key_value_heads"}   # null has a meaning: none, as many as heads
SCALINGS = {    # of the rotation: what each kind needs
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}
ACTS = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}


class Settings(dict):
    """What config.json says of a model of this family. A key that it lacks is None. Each method
    raises ValueError, which names the key, for a setting that is not supported."""

    def __init__(self, given, family):
        rope = given.get("rope_scaling") or given.get("rope_parameters") or {}
        if any(isinstance(value, dict) for value in rope.values()):
            raise ValueError(f"rotary settings by layer type are not supported: {[*rope]}")
        said = {k: v for k, v in (given | rope).items() if v is not None or k in NULLS}
        super().__init__(DEFAULTS[family] | said)

    def __missing__(self, key):
        return None

    def check(self, key, fine):
        if not fine:
            raise ValueError(f"{key} {self[key]!r} is not supported")

    def number(self, key, null=False):
        """A positive number; with `null` also None."""
        value = self[key]
        positive = isinstance(value, int | float) and value > 0
        self.check(key, positive or null and value is None)
        return value

    def act(self, key):
        self.check(key, self[key] in ACTS)
        return ACTS[self[key]]

    def without(self, *keys):
        """These must be off."""
        for key in keys:
            self.check(key, not self[key])

    def alternate(self, *kinds):
        """Layer i must be of the kind kinds[i % len(kinds)]."""
        named = self["layer_types"] or []
        self.check("layer_types", all(
            name == kinds[i % len(kinds)] for i, name in enumerate(named)))

    def scaling(self):
        """`Config.rope_scaling`."""
        kind = self.setdefault("rope_type", self["type"] or "default")
        self.check("rope_type", kind in SCALINGS)
        self.check("partial_rotary_factor", self["partial_rotary_factor"] in (None, 1))
        if kind == "default":
            return None
        self.setdefault("original_max_position_embeddings", self["max_position_embeddings"])
        found = {"rope_type": kind} | {key: self.number(key) for key in SCALINGS[kind]}
        if kind == "llama3":
            self.check("low_freq_factor", found["low_freq_factor"] < found["high_freq_factor"])
        return found


# --- one function per family: from Settings to fields of Config


def llama(s):
    s.alternate("full_attention")
    s.without("attention_bias")
    return {"act": s.act("hidden_act")}


def gemma2(s):
    s.alternate("sliding_attention", "full_attention")
    s.without("attention_bias")
    return {
        "act": s.act("hidden_activation"),
        "norm_offset": 1.0,
        "embed_scale": s["hidden_size"] ** 0.5,
        "post_norm": True,
        "query_scale": s.number("query_pre_attn_scalar") ** -0.5,
        "attn_softcap": s.number("attn_logit_softcapping", null=True),
        "final_softcap": s.number("final_logit_softcapping", null=True),
        "window": s.number("sliding_window")}


def qwen(s):
    """In Qwen a window may slide over the layers from number `max_window_layers` on, unless
    `layer_types` says for each layer whether it does. Here it must never slide."""
    slides = s["use_sliding_window"] and s["sliding_window"] is not None
    if s["layer_types"] is None and slides:
        s.check("use_sliding_window", s["max_window_layers"] >= s["num_hidden_layers"])
    s.alternate("full_attention")
    return {"act": s.act("hidden_act")}


def qwen2(s):
    s.without("use_mrope")
    return qwen(s) | {"qkv_bias": True}


def qwen3(s):
    s.without("attention_bias")
    return qwen(s) | {"qk_norm": True}


FAMILIES = {"llama": llama, "gemma2": gemma2, "qwen2": qwen2, "qwen3": qwen3}


def architecture(family):
    """The name of a family's class in `transformers`."""
    return f"{family.title()}ForCausalLM"


# --- files


def read_config(folder):
    """config.json (and the end-of-text ids of generation_config.json) as a Config. Raises
    ValueError for anything that this library would compute wrongly."""
    check_folder(folder)
    path = folder / "config.json"
    given = read_json(path)
    eos = read_eos(folder, given)
    with guarded(path):     # a value of an unexpected type fails somewhere below
        family = given.get("model_type")
        names = given.get("architectures")
        if family is None:
            raise ValueError("it has no model_type, which names the architecture, such as llama or "
                             "gemma2")
        if family not in FAMILIES:
            raise ValueError(f"model_type {family!r} is not supported: need one of "
                             f"{', '.join(FAMILIES)}")
        if names not in (None, [architecture(family)]):
            raise ValueError(f"architectures {names} is not supported for model_type {family!r}: "
                             f"need [{architecture(family)!r}]")
        s = Settings(given, family)
        s.without("quantization_config", "mlp_bias", "use_bidirectional_attention")
        s["num_key_value_heads"] = s["num_key_value_heads"] or s["num_attention_heads"]
        s["head_dim"] = s["head_dim"] or s["hidden_size"] // s["num_attention_heads"]
        fields = {field: s.number(key) for field, key in NUMBERS.items()}
        s.check("head_dim", s["head_dim"] % 2 == 0)     # the rotation turns pairs
        bos = s["bos_token_id"]
        s.check("bos_token_id", bos is None or type(bos) is int and 0 <= bos < s["vocab_size"])
        return Config(
            **fields,
            **FAMILIES[family](s),
            rope_scaling=s.scaling(),
            tied=bool(s["tie_word_embeddings"]),
            bos=bos,
            eos=eos)


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
        raise ValueError(f"{path}: eos_token_id must be a token id or a list of them, "
                         f"got {list(eos)}")
    return eos


def write_config(c, dtype):
    """The content of config.json, as the inverse of `read_config`, without the special ids."""
    family = "llama"
    if c.post_norm:
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
        "torch_dtype": str(dtype).removeprefix("torch."),
        "tie_word_embeddings": c.tied,
        "rope_scaling": c.rope_scaling}
    raw |= {key: vars(c)[field] for field, key in NUMBERS.items()}
    if family == "gemma2":
        raw |= {key: vars(c)[field] for field, key in LIMITS.items()}
        raw["hidden_activation"] = act
        scalar = round(c.query_scale ** -2, 6)
        raw["query_pre_attn_scalar"] = int(scalar) if scalar % 1 == 0 else scalar
    return raw
