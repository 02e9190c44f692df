"""`transformers` in float64, a scaling of rotary positions as Llama 3 has it,
and byte-level tokenizers."""
import contextlib
import string
from unittest import mock

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

SCALING = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
               # of 8 frequencies 2 stay, 2 blend, 4 are divided
               original_max_position_embeddings=64)


@contextlib.contextmanager
def wide():
    """Inside, `transformers` computes in float64 throughout. Its norms, angles and soft-max raise
    half types to float32: here the name float32 means float64."""
    import transformers.modeling_utils  # noqa: F401  trap: what is first loaded inside stays wide
    with mock.patch.multiple(torch, float32=torch.float64, float=torch.float64), \
            mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(default)


def byte_level(special, tokens):
    """A byte-level tokenizer."""
    t = Tokenizer(models.BPE({token: i for i, token in enumerate([*special, *tokens])}, []))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens([AddedToken(token, special=True) for token in special])
    return t


def byte_tokenizer(adds_bos=False):
    """Of 64 tokens: <s>, </s>, the space, letters and digits up to 8. With `adds_bos` each text
    begins with <s>."""
    t = byte_level(["<s>", "</s>"], ["Ġ", *string.ascii_letters, *string.digits[:9]])
    if adds_bos:
        t.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return t
