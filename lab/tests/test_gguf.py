"""A Llama and a Qwen2 as llama.cpp keeps them: written with the package `gguf`, read back, they
have the same weights and ids."""
import json
import sys
from dataclasses import replace

import gguf
import pytest
import torch
from stories import story_tokenizer
from tiny import LIVELY, QWEN, command, make
from transformers import AutoTokenizer, Qwen2Tokenizer

import checkpoint
from lab import gguf as ours
from support.chat import read_template

call = command(ours.main)
C = replace(LIVELY["llama"], vocab_size=303, bos=0, eos=(0,))
SCRIPTS = [
    "It's 12345 o'clock; I'LL go, THEY'D stay.", "Zażółć gęślą jaźń", "Привет, мир! Ёлка",
    "Γειά σου Κόσμε", "مرحبا بالعالم ١٢٣", "שלום עולם", "नमस्ते दुनिया", "你好，世界。",
    "こんにちは世界", "안녕하세요", "สวัสดีชาวโลก"]
TEXTS = [
    *SCRIPTS, "def f(x):\n    return x ** 2  # ½\n\n\n\tif  a!=b:\r\n\r\n   pass\n", "👩‍👧🏽 🇩🇪 ❤️",
    "<|im_start|>user\nHi<|im_end|>\n<tool_call>{}</tool_call><|endoftext|>", "e\u0301 a\u030a",
    "  two  spaces\u3000"]


def write(path, m, tokenizer, arch="llama", pre="gpt-2", kind="gpt2", scaled=False):
    c, writer = m.c, gguf.GGUFWriter(path, arch)
    parts = json.loads(tokenizer.to_str())["model"]
    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=vocab.get)
    tokens += [f"<{i}>" for i in range(len(tokens), c.vocab_size)]
    types = [1] * len(vocab) + [5] * (c.vocab_size - len(vocab))
    for i, token in tokenizer.get_added_tokens_decoder().items():
        types[i] = 3 if token.special else 4
    given = {"block_count": c.n_layers, "context_length": c.max_len, "embedding_length": c.dim,
             "feed_forward_length": c.hidden_dim, "head_count": c.n_heads,
             "head_count_kv": c.n_kv_heads, "key_length": c.head_dim,
             "rope_freq_base": c.rope_theta, "layer_norm_rms_eps": c.norm_eps,
             "tokenizer_model": kind, "tokenizer_pre": pre, "token_list": tokens,
             "token_types": types, "token_merges": [" ".join(pair) for pair in parts["merges"]],
             "add_bos_token": arch == "llama", "bos_token_id": c.bos, "eos_token_id": c.eos[0],
             "chat_template": "{{ messages[0]['content'] }}"}
    for name, value in given.items():
        getattr(writer, f"add_{name}")(value)
    if scaled:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    for name, piece in checkpoint.parts(m):
        w = piece.detach().float().reshape(checkpoint.stored_shape(name, piece))
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            # llama.cpp's order of the rows: the two numbers that rotate together side by side
            heads = c.n_heads if "q_proj" in name else c.n_kv_heads
            w = w.view(heads, 2, -1, c.dim).transpose(1, 2).reshape(w.shape)
        writer.add_tensor(ours.their_name(name), w.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def same(a, b):
    """Whether two models have the same tensors."""
    pairs = zip(checkpoint.parts(a), checkpoint.parts(b), strict=True)
    return all(name == other and torch.equal(x, y) for (name, x), (other, y) in pairs)


def test_the_folder_holds_the_model_of_the_file(tmp_path):
    tokenizer, m = story_tokenizer(), make(C).bfloat16()
    write(tmp_path / "m.gguf", m, tokenizer)
    assert ours.main([str(tmp_path / "m.gguf"), str(tmp_path / "out")]) == 0
    got, read = checkpoint.load(tmp_path / "out", "cpu")
    assert got.c == C and same(got, m)
    text = "Lily saw a big dog.\n  It was 12 years old<|endoftext|>."
    assert checkpoint.encode(read, text) == checkpoint.encode(tokenizer, text)
    assert read_template(tmp_path / "out")([{"role": "user", "content": "Hi"}]) == "Hi"


def small_qwen():
    """Qwen's tokenizer with few merges, as `transformers` has it."""
    tokenizer = Qwen2Tokenizer().train_new_from_iterator(SCRIPTS, 600, new_special_tokens=[
        "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    return tokenizer


@pytest.mark.parametrize("tied", [True, False])
def test_a_qwen2_has_the_weights_and_ids_of_transformers(tmp_path, tied):
    theirs = small_qwen()
    end, stop = theirs.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    c = replace(QWEN["qwen2"], vocab_size=len(theirs) + 9, tied=tied, bos=end, eos=(stop, end))
    m = make(c).bfloat16()
    write(tmp_path / "m.gguf", m, theirs.backend_tokenizer, "qwen2", "qwen2")
    out = tmp_path / "out"
    assert ours.main([str(tmp_path / "m.gguf"), str(out)]) == 0
    got, read = checkpoint.load(out, "cpu")
    assert got.c == c, "an answer ends at <|im_end|>, and at the end of a document"
    assert same(got, m)
    loaded = AutoTokenizer.from_pretrained(out)
    for text in TEXTS:
        ids = checkpoint.encode(read, text)
        assert ids == theirs(text)["input_ids"] == loaded(text)["input_ids"], text
    assert len(read.get_vocab()) == len(theirs), "the rows that only pad the matrices are no tokens"


def test_what_is_not_read_is_named(call, tmp_path, monkeypatch):
    path, out = tmp_path / "m.gguf", tmp_path / "out"
    for changes, words in (({"arch": "gemma2"}, "architecture is gemma2"),
                           ({"kind": "llama"}, "its tokenizer is llama"),
                           ({"scaled": True}, "scaled rotary angles")):
        write(path, make(C), story_tokenizer(), **changes)
        call.refuses([path, out], tmp_path, words)
    path.write_text("no model")
    call.refuses([path, out], tmp_path, "not a readable GGUF file")
    monkeypatch.setitem(sys.modules, "gguf", None)
    call.refuses([path, out], tmp_path, "the package gguf is not installed: pip install gguf")
