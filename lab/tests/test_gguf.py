"""A Llama, a Qwen2 and a Gemma-3 as llama.cpp keeps them: written with the package `gguf`, read
back, they have the same weights and ids."""
import json
import sys
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from stories import story_tokenizer
from tiny import GEMMA3, LIVELY, QWEN, command, make
from tokenizers import Tokenizer, models, normalizers, trainers
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


TYPES = {int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32,
         bool: gguf.GGUFValueType.BOOL, str: gguf.GGUFValueType.STRING,
         list: gguf.GGUFValueType.ARRAY}


def write(path, m, tokenizer, arch="llama", pre="gpt-2", keys=(), lacks=(), tensors=(),
          endian=gguf.GGUFEndian.LITTLE):
    """keys: {key: value} besides the usual ones, or instead of them; lacks: what is left out;
    tensors: {name: array} instead of the model's."""
    c, writer = m.c, gguf.GGUFWriter(path, arch, endianess=endian)
    names = ours.FAMILIES.get(arch, ours.FAMILIES["llama"]).names
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
             "tokenizer_model": "gpt2", "tokenizer_pre": pre, "token_list": tokens,
             "token_types": types, "token_merges": [" ".join(pair) for pair in parts["merges"]],
             "add_bos_token": arch == "llama", "bos_token_id": c.bos, "eos_token_id": c.eos[0],
             "chat_template": "{{ messages[0]['content'] }}"}
    for name, value in given.items():
        getattr(writer, f"add_{name}")(value)
    usual = writer.kv_data[0]
    for key, value in dict(keys).items():
        usual.pop(key, None)
        writer.add_key_value(key, value, TYPES[type(value)])
    for key in lacks:
        usual.pop(key, None)
    for name, piece in checkpoint.parts(m):
        w = piece.detach().float().reshape(checkpoint.stored_shape(name, piece))
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            # llama.cpp's order of the rows: the two numbers that rotate together side by side
            heads = c.n_heads if "q_proj" in name else c.n_kv_heads
            w = w.view(heads, 2, -1, c.dim).transpose(1, 2).reshape(w.shape)
        if arch == "gemma3" and "norm" in name:
            w = 1 + w
        theirs = ours.their_name(name, names)
        w = dict(tensors).get(theirs, w.numpy())
        if theirs not in lacks:
            writer.add_tensor(theirs, w)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def converted(folder, m, tokenizer, *args, **changes):
    """(model, tokenizer) of the folder that is made of a file."""
    write(folder / "m.gguf", m, tokenizer, *args, **changes)
    assert ours.main([str(folder / "m.gguf"), str(folder / "out")]) == 0
    return checkpoint.load(folder / "out", "cpu")


def same(a, b):
    """Whether two models have the same tensors."""
    pairs = zip(checkpoint.parts(a), checkpoint.parts(b), strict=True)
    return all(name == other and torch.equal(x, y) for (name, x), (other, y) in pairs)


def test_the_folder_holds_the_model_of_the_file(tmp_path):
    tokenizer, m = story_tokenizer(), make(C).bfloat16()
    got, read = converted(tmp_path, m, tokenizer)
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
    got, read = converted(tmp_path, m, theirs.backend_tokenizer, "qwen2", "qwen2")
    assert got.c == c, "an answer ends at <|im_end|>, and at the end of a document"
    assert same(got, m)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in TEXTS:
        ids = checkpoint.encode(read, text)
        assert ids == theirs(text)["input_ids"] == loaded(text)["input_ids"], text
    assert len(read.get_vocab()) == len(theirs), "the rows that only pad the matrices are no tokens"


GGML, TOKENS = "tokenizer.ggml", "tokenizer.ggml.tokens"
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
OWN = ["\n", "\n\n", "  ", "   ", "<h1>"]       # llama.cpp spells tokens of spaces like this


def small_gemma():
    """(tokens, their types) of a tokenizer like Gemma's, with few merges."""
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", ours.SPACE)
    learner.train_from_iterator(SCRIPTS, trainers.BpeTrainer(vocab_size=500, show_progress=False))
    vocab = learner.get_vocab()
    learnt = [token for token in sorted(vocab, key=vocab.get) if token not in OWN]
    some_bytes = [f"<0x{i:02X}>" for i in range(256)]
    types = [3] * len(SPECIAL) + [4] * len(OWN) + [6] * 256 + [1] * len(learnt)
    return SPECIAL + OWN + some_bytes + learnt, types


def test_a_gemma3_has_the_weights_and_ids_of_transformers(tmp_path):
    """transformers reads the tokenizer of the same file by itself."""
    tokens, types = small_gemma()
    c = replace(GEMMA3, vocab_size=len(tokens), bos=2, eos=(1, 5), query_scale=0.25, rope_theta=1e6,
                local_theta=1e4, global_every=6)
    m = make(c).bfloat16()
    keys = {f"{GGML}.model": "llama", f"{GGML}.pre": "default", TOKENS: tokens,
            f"{GGML}.token_type": types, f"{GGML}.unknown_token_id": 3,
            f"{GGML}.padding_token_id": 0, f"{GGML}.add_bos_token": True,
            f"{GGML}.add_space_prefix": False, "gemma3.attention.sliding_window": c.window}
    got, read = converted(
        tmp_path, m, story_tokenizer(), "gemma3", keys=keys, lacks=[f"{GGML}.merges"])
    assert got.c == c, "a turn of a chat ends a text, too"
    assert same(got, m)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in [*TEXTS, "<start_of_turn>user\nHi<end_of_turn>\n\n\n<h1>", "a  b   c    d", ""]:
        ids = checkpoint.encode(read, text)
        assert ids == theirs(text)["input_ids"], text
        assert read.decode(ids) == theirs.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False), text


QUARTER = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}


@pytest.mark.parametrize("keys, changes", [
    # as llama.cpp reads them: without a type it is linear, and "none" beats a factor
    ({"llama.rope.scaling.type": "none"}, {}),
    ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, {}),
    ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, QUARTER),
    ({"llama.rope.scaling.factor": 4.0}, QUARTER), ({"llama.rope.scale_linear": 4.0}, QUARTER),
    ({"llama.rope.scaling.factor": 1.0}, {}),
    ({f"{GGML}.eot_token_id": 5, f"{GGML}.eom_token_id": 7}, {"eos": (0, 5, 7)}),
    # what is off, what repeats what follows from other keys, and lists of equal numbers
    ({"llama.rope.dimension_count": C.head_dim, "llama.attention.value_length": C.head_dim,
      "llama.attention.causal": True, "llama.expert_count": 0, "llama.vocab_size": 303,
      "llama.attention.head_count": [C.n_heads] * C.n_layers, "general.type": "model",
      "llama.attention.sliding_window": 0, "split.count": 1, "general.name": "x"}, {})], ids=str)
def test_what_keys_say(tmp_path, keys, changes):
    assert converted(tmp_path, make(C), story_tokenizer(), keys=keys)[0].c == replace(C, **changes)


def test_a_file_that_does_not_say_how_a_text_is_cut_needs_pre(call, tmp_path):
    path, out = tmp_path / "m.gguf", tmp_path / "out"
    write(path, make(C), story_tokenizer(), lacks=["tokenizer.ggml.pre"])
    call.refuses([path, out], tmp_path, "no tokenizer.ggml.pre", "add --pre")
    assert call(path, out, "--pre", "gpt-2")[0] == 0
    assert checkpoint.encode(checkpoint.load(out, "cpu")[1], "a 12") == checkpoint.encode(
        story_tokenizer(), "a 12")


def test_an_end_is_added_where_the_file_says_so(tmp_path):
    write(tmp_path / "m.gguf", make(C), story_tokenizer(),
          keys={"tokenizer.ggml.add_eos_token": True})
    _, tokenizer, _ = ours.read(tmp_path / "m.gguf")
    ids = checkpoint.encode(tokenizer, "Lily")
    assert (ids[0], ids[-1]) == (0, 0) and 0 not in ids[1:-1] and len(ids) > 2


REFUSED = [     # how the file is written, words of the refusal
    ({"arch": "gemma2"}, "architecture is gemma2"),
    ({"arch": "gemma3"}, "no key attention.sliding_window"),
    ({"arch": "gemma3", "keys": {"gemma3.attention.sliding_window": 5}}, "is not Gemma's"),
    ({"keys": {"llama.attention.sliding_window": 5}}, "attention.sliding_window 5"),
    ({"keys": {f"{GGML}.model": "llama"}}, "its tokenizer is llama"),
    ({"keys": {f"{GGML}.pre": "llama-bpe"}}, "llama-bpe"),
    ({"keys": {"llama.rope.scaling.type": "yarn"}}, "rope.scaling.type yarn"),
    ({"keys": {"llama.rope.dimension_count": 4}}, "rope.dimension_count 4 is not supported"),
    ({"keys": {"llama.attention.causal": False}}, "attention.causal False"),
    ({"keys": {"llama.attention.value_length": 4}}, "attention.value_length 4"),
    ({"keys": {"llama.attention.head_count": [4, 4, 2]}}, "head_count differs from layer to layer"),
    ({"keys": {"llama.feed_forward_length": [48, 24]}}, "feed_forward_length differs"),
    ({"keys": {"llama.expert_count": 4}}, "expert_count 4"),
    ({"keys": {"llama.logit_scale": 2.0}}, "logit_scale 2.0"),
    ({"keys": {"llama.a_key_of_tomorrow": 2.0}}, "a_key_of_tomorrow"),
    ({"keys": {"general.type": "adapter"}}, "general.type is adapter"),
    ({"keys": {"split.count": 2, "split.no": 0}}, "part 1 of 2 of a split file"),
    ({"keys": {f"{GGML}.eos_token_id": 32000}}, f"{GGML}.eos_token_id is 32000"),
    ({"keys": {f"{GGML}.eot_token_id": 303}}, f"{GGML}.eot_token_id is 303"),
    ({"keys": {f"{GGML}.bos_token_id": 303}}, f"{GGML}.bos_token_id is 303"),
    ({"keys": {f"{GGML}.token_type": [1] * 7}}, "303 tokens, but 7 types"),
    ({"keys": {TOKENS: [*"aba", *map(str, range(300))]}}, "tokens 0 and 2 are both 'a'"),
    ({"keys": {f"{GGML}.merges": ["qq zz"]}}, "m.gguf: "),
    ({"keys": {f"{GGML}.merges": ["a b c"]}}, "m.gguf: "),
    ({"keys": {"llama.attention.head_count": 0}}, "m.gguf: "),
    ({"lacks": [f"{GGML}.merges"]}, f"no key {GGML}.merges"),
    ({"lacks": [TOKENS, f"{GGML}.model", f"{GGML}.pre"]}, f"no key {TOKENS}"),
    ({"lacks": [f"{GGML}.bos_token_id"]}, f"no key {GGML}.bos_token_id"),
    *(({"lacks": [f"llama.{key}"]}, f"no key {key}") for key in (
        "block_count", "embedding_length", "attention.head_count", "context_length",
        "feed_forward_length", "attention.layer_norm_rms_epsilon")),
    ({"lacks": ["blk.1.ffn_up.weight"]}, "tensor blk.1.ffn_up.weight is missing"),
    ({"tensors": {"blk.1.ffn_up.weight": np.zeros((32, 48), "f4")}}, "need (48, 32)"),
    ({"tensors": {"blk.1.ffn_up.weight": np.zeros((48, 32))}}, "stored as F64"),
    ({"keys": {"llama.block_count": 1}}, "blk.1.", "is no tensor of a plain Llama"),
    ({"endian": gguf.GGUFEndian.BIG}, "byte order")]


@pytest.mark.parametrize("changes, words", [(row[0], row[1:]) for row in REFUSED],
                         ids=[row[1] for row in REFUSED])
def test_what_is_not_read_is_named(call, tmp_path, changes, words):
    path = tmp_path / "m.gguf"
    write(path, make(C), story_tokenizer(), **changes)
    call.refuses([path, tmp_path / "out"], tmp_path, path, *words)


def test_what_is_no_gguf_is_named(call, tmp_path, monkeypatch):
    path, out = tmp_path / "m.gguf", tmp_path / "out"
    call.refuses([path, out], tmp_path, path, "No such file")
    for text in ("no model", "", "GGUF"):
        path.write_text(text)
        call.refuses([path, out], tmp_path, path, "not a readable GGUF file")
    monkeypatch.setitem(sys.modules, "gguf", None)
    call.refuses([path, out], tmp_path, "the package gguf is not installed: pip install gguf")
