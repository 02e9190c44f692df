"""Tiny random `transformers` models, and the script that writes tests/expected/*.safetensors: their weights
under Hugging Face's names, input ids, and the logits that `transformers` computes in float64.

The tests read the files without `transformers`; run `python tests/expected.py` only to change the models.
"""
import contextlib
import json
import string
from pathlib import Path
from unittest import mock

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

HERE = Path(__file__).parent / "expected"
SHAPE = dict(vocab_size=64, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16, max_position_embeddings=128, rms_norm_eps=1e-5,
             bos_token_id=0, eos_token_id=1, pad_token_id=None)
SCALING = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
               original_max_position_embeddings=64)    # of 8 frequencies 2 stay, 2 blend, 4 are divided
LLAMA3 = SCALING | dict(rope_theta=500.0)
MODELS = {  # windows shorter than the texts, and soft-caps small enough to bite
    "llama": dict(tie_word_embeddings=False),
    "llama3": dict(tie_word_embeddings=False, rope_parameters=LLAMA3),
    "gemma2": dict(sliding_window=6, query_pre_attn_scalar=24, attn_logit_softcapping=2.0,
                   final_logit_softcapping=3.0, attn_implementation="eager")}


@contextlib.contextmanager
def wide():
    """Inside, `transformers` computes in float64 throughout. Its norms, angles and soft-max raise half types
    to float32: here the name float32 means float64."""
    with mock.patch.multiple(torch, float32=torch.float64, float=torch.float64), \
            mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(default)


def build(name):
    """A random float64 `transformers` model: weights spread out, norms included, and exact in float32."""
    from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM
    kinds = (Gemma2Config, Gemma2ForCausalLM) if name == "gemma2" else (LlamaConfig, LlamaForCausalLM)
    with wide():
        m = kinds[1](kinds[0](**SHAPE, **MODELS[name])).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for p in m.parameters():
        p.copy_(torch.randn(p.shape, generator=generator) * 0.3 + (p.dim() == 1 and name != "gemma2"))
    return m


def logits(m, ids):
    """What `transformers` says, in float64. (B, T, V)"""
    with wide(), torch.no_grad():
        return m(ids).logits


def byte_level(special, tokens, merges=(), adds_bos=True):
    """A byte-level tokenizer; with `adds_bos` each text begins with the first of the special tokens."""
    t = Tokenizer(models.BPE({token: i for i, token in enumerate([*special, *tokens])}, [*merges]))
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    t.add_special_tokens([AddedToken(token, special=True) for token in special])
    if adds_bos:
        t.post_processor = processors.TemplateProcessing(f"{special[0]} $A", special_tokens=[(special[0], 0)])
    return t


def byte_tokenizer(adds_bos=False):
    """Of 64 tokens: <s>, </s>, the space, letters and digits up to 8."""
    return byte_level(["<s>", "</s>"], ["Ġ", *string.ascii_letters, *string.digits[:9]], adds_bos=adds_bos)


def main():
    HERE.mkdir(exist_ok=True)
    from safetensors.torch import save_file
    for name in MODELS:
        m, ids = build(name), torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(0))
        tensors = {key: w.float() for key, w in m.state_dict().items()}
        if m.config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        path = HERE / f"{name}.safetensors"
        save_file(tensors | {"input_ids": ids, "logits": logits(m, ids)}, path,
                  metadata={"config": json.dumps(m.config.to_dict(), sort_keys=True)})
        print(path.name, path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
