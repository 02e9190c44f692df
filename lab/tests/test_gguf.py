"""A Llama as llama.cpp keeps it: written with the package `gguf`, read back, the same model and tokenizer."""
import json
import sys
from dataclasses import replace

import gguf
import pytest
import torch
from stories import story_tokenizer
from tiny import LIVELY, make

import checkpoint
from lab import gguf as ours
from support.chat import read_template

C = replace(LIVELY["llama"], vocab_size=303, bos=0, eos=(0,))


def write(path, m, tokenizer, arch="llama", kind="gpt2", scaled=False):
    c, writer = m.c, gguf.GGUFWriter(path, arch)
    parts = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(parts["vocab"], key=parts["vocab"].get)
    tokens += [f"<{i}>" for i in range(len(tokens), c.vocab_size)]
    for add, value in ((writer.add_block_count, c.n_layers), (writer.add_context_length, c.max_len),
                       (writer.add_embedding_length, c.dim), (writer.add_feed_forward_length, c.hidden_dim),
                       (writer.add_head_count, c.n_heads), (writer.add_head_count_kv, c.n_kv_heads),
                       (writer.add_key_length, c.head_dim), (writer.add_rope_freq_base, c.rope_theta),
                       (writer.add_layer_norm_rms_eps, c.norm_eps), (writer.add_tokenizer_model, kind),
                       (writer.add_tokenizer_pre, "gpt-2"), (writer.add_token_list, tokens),
                       (writer.add_token_types, [3] + [1] * (len(tokens) - 1)),
                       (writer.add_token_merges, [" ".join(pair) for pair in parts["merges"]]),
                       (writer.add_add_bos_token, True), (writer.add_bos_token_id, 0),
                       (writer.add_eos_token_id, 0),
                       (writer.add_chat_template, "{{ messages[0]['content'] }}")):
        add(value)
    if scaled:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    for name, piece in checkpoint.parts(m):
        w = piece.detach().float().reshape(checkpoint.stored_shape(name, piece))
        if "q_proj" in name or "k_proj" in name:
            # llama.cpp's order of the rows: the two numbers that rotate together side by side
            heads = c.n_heads if "q_proj" in name else c.n_kv_heads
            w = w.view(heads, 2, -1, c.dim).transpose(1, 2).reshape(w.shape)
        writer.add_tensor(ours.their_name(name), w.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_folder_holds_the_model_of_the_file(tmp_path):
    tokenizer, m = story_tokenizer(), make(C).bfloat16()
    write(tmp_path / "m.gguf", m, tokenizer)
    assert ours.main([str(tmp_path / "m.gguf"), str(tmp_path / "out")]) == 0
    got, read = checkpoint.load(tmp_path / "out", "cpu")
    assert got.c == C
    assert all(torch.equal(a, b) for a, b in zip(got.parameters(), m.parameters(), strict=True))
    text = "Lily saw a big dog.\n  It was 12 years old<|endoftext|>."
    assert checkpoint.encode(read, text) == checkpoint.encode(tokenizer, text)
    assert read_template(tmp_path / "out")([{"role": "user", "content": "Hi"}]) == "Hi"


@pytest.mark.parametrize("changes, words", [({"arch": "qwen2"}, "architecture is qwen2"),
                                            ({"kind": "llama"}, "its tokenizer is llama"),
                                            ({"scaled": True}, "scaled rotary angles")])
def test_what_is_not_read_is_named(tmp_path, capsys, changes, words):
    write(tmp_path / "m.gguf", make(C), story_tokenizer(), **changes)
    assert ours.main([str(tmp_path / "m.gguf"), str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_file_of_something_else(tmp_path, capsys):
    (tmp_path / "m.gguf").write_text("no model")
    assert ours.main([str(tmp_path / "m.gguf"), str(tmp_path / "out")]) == 2
    assert "not a readable GGUF file" in capsys.readouterr().err


def test_without_its_package(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert ours.main([str(tmp_path / "m.gguf"), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == "gguf.py: the package gguf is not installed: pip install gguf\n"
