"""Loading and saving: every form a Hugging Face folder comes in, every way it can be broken, nothing lost.

A refusal is a ValueError or FileNotFoundError of one line that names the culprit.
"""
import itertools
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import expected
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, GEMMA, LLAMA, devices, make, shard

import checkpoint
from model import Config

ROOT = Path(checkpoint.__file__).parent
LINEAR = {"rope_type": "linear", "factor": 2.0}
LLAMA3 = expected.SCALING
CONFIGS = FAMILIES | {
    "tied": replace(LLAMA, tied=True), "wide-heads": replace(LLAMA, head_dim=12, bos=3, eos=(5, 6)),
    "llama3": replace(LLAMA, rope_theta=500.0, rope_scaling=LLAMA3),
    "linear": replace(LLAMA, rope_scaling=LINEAR),
    "no-caps": replace(GEMMA, attn_softcap=None, final_softcap=None, tied=False, norm_eps=1e-6)}
families = pytest.mark.parametrize("name", FAMILIES)
IDS = torch.tensor([[1, 5, 3, 2, 9, 4, 4, 7, 0, 16, 8, 8]])
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def saved(c, folder, dtype=torch.float32):
    """A random model, and the folder it was saved to."""
    m = make(c).to(dtype)
    checkpoint.save(m, folder, expected.byte_tokenizer())
    return m, folder


def edit(file, drop=(), **changes):
    """Change keys of a JSON file."""
    content = {key: v for key, v in (json.loads(file.read_text()) | changes).items() if key not in drop}
    file.write_text(json.dumps(content))


def edit_weights(folder, drop=(), **changes):
    path = folder / "model.safetensors"
    tensors = {key: t.clone() for key, t in (load_file(path) | changes).items()
               if key not in drop and t is not None}
    save_file(tensors, path)


def same(a, b):
    one, other = a.state_dict(), b.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def refused(folder, *words, error=ValueError, device="cpu"):
    with pytest.raises((ValueError, OSError)) as e:
        checkpoint.load(folder, device)
    assert type(e.value) is error
    assert "\n" not in str(e.value), "a refusal is one line"
    assert all(word in str(e.value) for word in words), str(e.value)


# --- there and back


@pytest.mark.parametrize("name, dtype", [*zip(CONFIGS, itertools.cycle(checkpoint.DTYPES.values()))])
def test_saving_and_loading_loses_nothing(name, dtype, tmp_path):
    m, folder = saved(CONFIGS[name], tmp_path / "new" / "folder", dtype)
    again, tokenizer = checkpoint.load(folder, "cpu")
    assert again.c == m.c
    assert again.tok.dtype == dtype, "without a dtype the stored one stays"
    assert same(again, m) and torch.equal(again(IDS), m(IDS))
    assert tokenizer.to_str() == expected.byte_tokenizer().to_str()
    assert not again.training and not any(p.requires_grad for p in again.parameters())


@pytest.mark.parametrize("family, act", [("llama", "gelu"), ("gemma2", "silu")])
def test_the_activation_of_the_other_family_is_saved(family, act, tmp_path):
    m, folder = saved(replace(FAMILIES[family], act=act), tmp_path)
    assert checkpoint.load(folder, "cpu")[0].c.act == act


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_loads_what_was_saved_and_agrees(name, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    m, folder = saved(CONFIGS[name], tmp_path, torch.float64)
    m.scale.fill_(m.c.embed_scale)
    with expected.wide():
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64,
                                                      attn_implementation="eager")
    want = expected.logits(theirs, IDS)
    assert float((m(IDS) - want).abs().max() / want.abs().max()) < 1e-12
    assert theirs.config.max_position_embeddings == 64
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("Once upon").input_ids == expected.byte_tokenizer().encode("Once upon").ids
    if m.c.bos is not None:
        assert (tokenizer.bos_token, tokenizer.eos_token) == ("a", "c")
        assert theirs.generation_config.eos_token_id == [5, 6] and theirs.config.bos_token_id == 3


# --- the forms a checkpoint comes in


@devices
@families
def test_shards_load_like_one_file(name, device, tmp_path):
    m, folder = saved(FAMILIES[name], tmp_path)
    shard(folder, 3)
    again = checkpoint.load(str(folder), device)[0]
    assert again.tok.device.type == device and same(again.cpu(), m)


@families
def test_weights_are_converted_only_when_asked(name, tmp_path):
    m, folder = saved(FAMILIES[name], tmp_path, torch.bfloat16)
    for dtype in (torch.float16, torch.float32, torch.float64):
        assert same(checkpoint.load(folder, "cpu", dtype)[0], make(m.c).bfloat16().to(dtype))
    edit_weights(folder, **{"model.norm.weight": m.norm.weight.double()})
    assert same(checkpoint.load(folder, "cpu")[0], m), "of mixed types the embedding's decides"


@pytest.mark.parametrize("scaling", [None, LINEAR, LLAMA3], ids=["plain", "linear", "llama3"])
def test_both_spellings_of_a_config_mean_the_same(scaling, tmp_path):
    """transformers 4: rope_theta, rope_scaling, torch_dtype. transformers 5: rope_parameters, dtype."""
    m, folder = saved(replace(LLAMA, rope_theta=500.0, rope_scaling=scaling), tmp_path)
    config = folder / "config.json"
    params = {"rope_type": "default", "rope_theta": 500.0} | (scaling or {})
    four = {"rope_theta": 500.0, "rope_scaling": scaling, "torch_dtype": "float32"}
    five = {"rope_parameters": params, "dtype": "float32"}
    early = {"type" if key == "rope_type" else key: value for key, value in (scaling or {}).items()}
    for spelling in (four, five, four | {"rope_scaling": early}, four | five):
        edit(config, drop=[*four, *five])
        edit(config, **spelling)
        again = checkpoint.load(folder, "cpu")[0]
        assert again.c == m.c and torch.equal(again(IDS), m(IDS))
    edit(config, drop=[*four, *five])
    assert checkpoint.read_config(folder) == replace(m.c, rope_theta=10_000.0, rope_scaling=None)


def test_end_of_text_ids_come_in_every_form(tmp_path):
    m, folder = saved(LLAMA, tmp_path)
    config, generation = folder / "config.json", folder / "generation_config.json"
    for stored, want in ((None, ()), (7, (7,)), (0, (0,)), ([7], (7,)), ([7, 0, 9], (7, 0, 9)), ([], ())):
        generation.unlink(missing_ok=True)
        edit(config, eos_token_id=stored)
        assert checkpoint.read_config(folder).eos == want
        edit(config, eos_token_id=3)
        generation.write_text(json.dumps({"eos_token_id": stored}))
        assert checkpoint.read_config(folder).eos == want, "generation_config.json comes first"
    generation.write_text("{}")
    assert checkpoint.read_config(folder).eos == (3,), "it names none: config.json does"
    edit(config, drop=["eos_token_id"])
    assert checkpoint.read_config(folder).eos == ()


LEAST = Config(vocab_size=100, dim=64, n_layers=2, n_heads=8, n_kv_heads=8, head_dim=8, hidden_dim=96,
               norm_eps=1e-6, rope_theta=10_000.0, tied=False, max_len=2048, act="silu")
LEAST_GEMMA = replace(LEAST, n_kv_heads=4, head_dim=256, tied=True, max_len=8192, act="gelu", norm_offset=1.0,
                      embed_scale=8.0, post_norm=True, query_scale=1 / 16, attn_softcap=50.0,
                      final_softcap=30.0, window=4096)
LEFT_OUT = [    # (class, what config.json says beside the least, the Config)
    ("Llama", {}, LEAST), ("Llama", dict(num_key_value_heads=None, head_dim=None, rope_scaling=None), LEAST),
    ("Llama", dict(architectures=None, model_type="llama"), LEAST),
    ("Llama", dict(num_key_value_heads=2, head_dim=24), replace(LEAST, n_kv_heads=2, head_dim=24)),
    ("Gemma2", {}, LEAST_GEMMA), ("Gemma2", dict(hidden_act="gelu", hidden_activation=None), LEAST_GEMMA),
    ("Gemma2", dict(attn_logit_softcapping=None, final_logit_softcapping=None),
     replace(LEAST_GEMMA, attn_softcap=None, final_softcap=None)),
    ("Gemma2", dict(hidden_act="silu", hidden_activation="gelu_pytorch_tanh"), LEAST_GEMMA),
    ("Gemma2", dict(layer_types=["sliding_attention", "full_attention"]), LEAST_GEMMA)]


@pytest.mark.parametrize("kind, more, want", LEFT_OUT, ids=[f"{k}-{'+'.join(m)}" for k, m, _ in LEFT_OUT])
def test_what_a_config_leaves_out_takes_the_family_defaults(kind, more, want, tmp_path):
    content = dict(architectures=[f"{kind}ForCausalLM"], vocab_size=100, hidden_size=64, num_hidden_layers=2,
                   num_attention_heads=8, intermediate_size=96)
    (tmp_path / "config.json").write_text(json.dumps(content | more))
    assert checkpoint.read_config(tmp_path) == want


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_the_family_defaults_are_those_of_transformers(kind, tmp_path):
    from transformers import Gemma2Config, LlamaConfig
    theirs = Gemma2Config() if kind == "gemma2" else LlamaConfig()
    ours = checkpoint.FAMILIES[kind]
    for key, value in ours.items():
        want = theirs.rope_parameters["rope_theta"] if key == "rope_theta" else getattr(theirs, key)
        derived = {"num_key_value_heads": theirs.num_attention_heads, "head_dim": 4096 // 32}
        assert want == (derived[key] if value is None else value), key


@families
def test_leftovers_of_older_checkpoints_are_ignored(name, tmp_path):
    m, folder = saved(replace(FAMILIES[name], tied=True), tmp_path)
    table = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(6)}
    edit_weights(folder, **table, **{HEAD: m.tok})
    assert same(checkpoint.load(folder, "cpu")[0], m)


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 77.0}
DISAGREE = {     # (what config.json says otherwise, what the weights hold otherwise, given the embedding)
    "a tied head with values of its own": ({}, lambda tok: {HEAD: tok.flip(0)}),
    "a tied matrix under the head's name": ({}, lambda tok: {HEAD: tok, EMBED: None}),
    "two spellings of rope": ({"rope_parameters": YARN, "rope_scaling": LINEAR, "rope_theta": 300.0}, None),
    "a llama3 rope without its length": (
        {"rope_scaling": {k: v for k, v in LLAMA3.items() if k[0] != "o"}, "rope_theta": 500.0}, None)}


@pytest.mark.parametrize("name", DISAGREE)
@pytest.mark.parametrize("family", FAMILIES)
def test_where_config_and_weights_disagree_transformers_decides(family, name, tmp_path):
    from transformers import AutoModelForCausalLM
    m, folder = saved(replace(FAMILIES[family], tied=True), tmp_path, torch.float64)
    said, held = DISAGREE[name]
    edit(folder / "config.json", drop=["rope_scaling", "rope_theta"])
    edit(folder / "config.json", **said)
    edit_weights(folder, **(held(m.tok.clone()) if held else {}))
    with expected.wide():
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64,
                                                      attn_implementation="eager")
    again, want = checkpoint.load(folder, "cpu")[0], expected.logits(theirs, IDS)
    again.scale.fill_(again.c.embed_scale)
    assert float((again(IDS) - want).abs().max() / want.abs().max()) < 1e-12


# --- refusals


REFUSED = [
    ("llama", dict(quantization_config={"quant_method": "gptq", "bits": 4}), ["quantised", "gptq"]),
    ("llama", dict(attention_bias=True), ["attention_bias"]),
    ("llama", dict(mlp_bias=True), ["mlp_bias"]),
    ("gemma2", dict(use_bidirectional_attention=True), ["use_bidirectional_attention"]),
    ("gemma2", dict(layer_types=["full_attention", "sliding_attention"] * 3), ["layer_types"]),
    ("llama", dict(architectures=["MistralForCausalLM"], model_type="mistral"), ["MistralForCausalLM"]),
    ("llama", dict(architectures=["LlamaForCausalLM", "OtherForCausalLM"]), ["OtherForCausalLM"]),
    ("llama", dict(model_type="gemma2"), ["LlamaForCausalLM"]),
    ("llama", dict(rope_scaling={"rope_type": "yarn", "factor": 4.0}), ["yarn"]),
    ("llama", dict(rope_scaling={"rope_type": "linear"}), ["factor"]),
    ("llama", dict(rope_scaling=LLAMA3 | {"low_freq_factor": 4.0}), ["low_freq_factor", "high_freq_factor"]),
    ("llama", dict(rope_scaling=["linear"]), ["rope_scaling"]),
    ("llama", dict(rope_theta=-1.0), ["rope_theta"]),
    ("llama", dict(partial_rotary_factor=0.5), ["partial_rotary_factor"]),
    ("llama", dict(rope_scaling={"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}),
     ["partial_rotary_factor"]),
    ("llama", dict(head_dim=7), ["head_dim"]),
    ("llama", dict(num_key_value_heads=3), ["4", "3"]),
    ("llama", dict(hidden_act="relu"), ["relu"]),
    ("gemma2", dict(hidden_activation="gelu"), ["gelu"]),
    ("llama", dict(hidden_size="32"), ["hidden_size", "32"]),
    ("llama", dict(num_hidden_layers=100_000), ["100000 layers"]),
    ("llama", dict(vocab_size=None), ["vocab_size"]),
    ("gemma2", dict(query_pre_attn_scalar=0), ["query_pre_attn_scalar"]),
    ("gemma2", dict(attn_logit_softcapping=-5.0), ["attn_logit_softcapping"]),
    ("llama", dict(tie_word_embeddings="yes"), ["tie_word_embeddings", "yes"]),
    ("llama", dict(bos_token_id=17), ["bos_token_id", "17"]),
    ("llama", dict(hidden_size=2**30, intermediate_size=2**30), []),
]


@pytest.mark.parametrize("name, changes, words", REFUSED, ids=[f"{n}-{'+'.join(w)}" for n, _, w in REFUSED])
def test_what_would_be_computed_wrongly_is_refused_by_name(name, changes, words, tmp_path):
    edit(saved(FAMILIES[name], tmp_path)[1] / "config.json", **changes)
    refused(tmp_path, *words)


@pytest.mark.parametrize("eos", ["</s>", [1, "2"], [1, True], 1.0, {"id": 1}], ids=str)
def test_an_end_of_text_that_is_no_id_is_refused(eos, tmp_path):
    edit(saved(LLAMA, tmp_path)[1] / "generation_config.json", eos_token_id=eos)
    refused(tmp_path, "eos_token_id")


def test_tensors_that_are_missing_left_over_or_misshapen_are_named(tmp_path):
    name = "model.layers.3.mlp.up_proj.weight"
    m, folder = saved(LLAMA, tmp_path)
    edit_weights(folder, drop=[name])
    refused(folder, name)
    edit_weights(folder, **{name: torch.ones(32, 48)})
    refused(folder, name, "(32, 48)", "(48, 32)")
    edit_weights(folder, **{name: torch.ones(48, 32), "model.layers.3.self_attn.q_proj.bias": torch.ones(32)})
    refused(folder, "model.layers.3.self_attn.q_proj.bias")
    edit_weights(folder, drop=["model.layers.3.self_attn.q_proj.bias"])
    checkpoint.load(folder, "cpu")
    edit_weights(folder, **{name: torch.ones(48, 32, dtype=torch.int8)})
    refused(folder, name, "I8")
    _, tied = saved(replace(LLAMA, tied=True), tmp_path / "tied")
    edit_weights(tied, **{EMBED: torch.ones(()), HEAD: torch.ones(())})
    refused(tied, EMBED)


@pytest.mark.parametrize("c, name, words", [
    (LLAMA, HEAD, ["tie_word_embeddings"]), (GEMMA, "model.layers.1.post_feedforward_layernorm.weight", [])])
def test_an_untied_model_needs_its_head_and_gemma2_all_four_norms(c, name, words, tmp_path):
    edit_weights(saved(c, tmp_path)[1], drop=[name])
    refused(tmp_path, name, *words)


def test_damaged_weights_are_refused(tmp_path):
    path = saved(LLAMA, tmp_path)[1] / "model.safetensors"
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:-1], whole[:20], whole[:7], b"", b"\xff" * 100,
                    bytes(8) + whole[8:], whole[:8] + b"[" + whole[9:], whole + b"x"):
        path.write_bytes(damaged)
        refused(tmp_path, str(path))


def test_what_is_missing_is_named(tmp_path):
    refused(tmp_path / "nowhere", "nowhere", error=FileNotFoundError)
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "file", error=FileNotFoundError)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        folder = saved(LLAMA, tmp_path / name)[1]
        (folder / name).unlink()
        refused(folder, str(folder), name, error=FileNotFoundError)


def test_a_shard_that_the_index_names_must_be_there(tmp_path):
    index = shard(saved(LLAMA, tmp_path)[1], 3)
    first = tmp_path / "model-00001-of-00003.safetensors"
    kept = first.read_bytes()
    first.unlink()
    refused(tmp_path, first.name, error=FileNotFoundError)
    first.write_bytes(kept[:100])
    refused(tmp_path, first.name)
    first.write_bytes(kept)
    where = json.loads(index.read_text())["weight_map"]
    lost = next(key for key in where if where[key] == first.name)
    edit(index, weight_map=where | {lost: "model-00002-of-00003.safetensors"})
    refused(tmp_path, lost, "model-00002-of-00003.safetensors")
    edit(index, weight_map={key: file for key, file in where.items() if key != lost})
    refused(tmp_path, lost)


@pytest.mark.parametrize("where", [None, [], "x", {EMBED: 3}, {EMBED: "../model.safetensors"},
                                   {EMBED: "/etc/passwd"}], ids=str)
def test_an_index_names_files_of_its_own_folder(where, tmp_path):
    edit(shard(saved(LLAMA, tmp_path)[1], 3), weight_map=where)
    refused(tmp_path, "weight_map")


def test_the_advice_about_pickles_works(tmp_path):
    """They are never opened, but the command that the message gives makes a folder that loads."""
    m, folder = saved(replace(LLAMA, bos=0, eos=(1,)), tmp_path / "it's a model")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    refused(folder, "pytorch_model.bin", "pickle")
    with pytest.raises(ValueError) as e:
        checkpoint.load(folder, "cpu")
    command = str(e.value).partition("once: python ")[2]
    subprocess.run(f"{sys.executable} {command}", shell=True, check=True, cwd=tmp_path, capture_output=True)
    again, tokenizer = checkpoint.load(tmp_path / "NEW", "cpu")
    assert same(again, m) and again.c == m.c
    assert tokenizer.get_vocab() == expected.byte_tokenizer().get_vocab()


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_pointer_that_git_lfs_left_is_named(name, tmp_path):
    path = saved(LLAMA, tmp_path)[1] / name
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 134\n")
    refused(tmp_path, str(path), "git lfs pull")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe", b"[" * 100_000],
                         ids=["empty", "list", "not utf-8", "deep"])
def test_damaged_json_is_refused(name, content, tmp_path):
    path = saved(LLAMA, tmp_path)[1] / name
    path.write_bytes(content)
    refused(tmp_path, str(path))


def test_a_device_that_is_not_there_is_refused(monkeypatch, tmp_path):
    saved(LLAMA, tmp_path)
    for device in ("gpu", "mps", "meta", "cpu:x"):
        refused(tmp_path, device, device=device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(tmp_path, "CUDA was asked for, but torch finds no GPU here", device="cuda")
    refused(tmp_path, "CUDA", device=torch.device("cuda", 0))
    assert checkpoint.load(tmp_path)[0].tok.device.type == "cpu", "no device given, no CUDA: the CPU"


# --- prompts


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("settings", [{}, {"add_bos_token": True, "add_eos_token": True},
                                      {"add_bos_token": False}], ids=str)
def test_a_text_has_the_ids_that_transformers_gives_it(settings, adds_bos, tmp_path):
    from transformers import AutoTokenizer
    m = make(replace(LLAMA, bos=0, eos=(1,)))
    checkpoint.save(m, tmp_path, expected.byte_tokenizer(adds_bos))
    edit(tmp_path / "tokenizer_config.json", **settings)
    ours, theirs = checkpoint.load(tmp_path, "cpu")[1], AutoTokenizer.from_pretrained(tmp_path)
    for text in ("Once upon", "<s>Once", "Once</s>upon"):
        assert checkpoint.encode(ours, text, m.c.bos) == theirs(text).input_ids
        bare = theirs(text, add_special_tokens=False).input_ids
        assert checkpoint.encode(ours, text, m.c.bos, special=False) == bare


def test_what_no_prompt_can_be_is_refused():
    bare, framed = expected.byte_tokenizer(), expected.byte_tokenizer(adds_bos=True)
    assert checkpoint.encode(bare, "", bos=0) == checkpoint.encode(framed, "", bos=0) == [0]
    for text, word in (("", "bos_token_id"), ("ab\ud800c", "2")):
        with pytest.raises(ValueError, match=word):
            checkpoint.encode(bare, text)


def test_a_chat_model_that_was_loaded_and_saved_is_the_same(tmp_path):
    from transformers import AutoTokenizer, GenerationConfig
    old, new = tmp_path / "old", tmp_path / "new"
    checkpoint.save(make(replace(LLAMA, bos=0, eos=(1,))), old, expected.byte_tokenizer(adds_bos=True))
    (old / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}{{ pad_token }}")
    (old / "special_tokens_map.json").write_text('{"pad_token": "z"}')
    edit(old / "tokenizer_config.json", additional_special_tokens=["y"])
    edit(old / "generation_config.json", temperature=0.6, do_sample=True)
    m, tokenizer = checkpoint.load(old, "cpu")
    checkpoint.save(m, new, tokenizer)
    one, other = (AutoTokenizer.from_pretrained(folder) for folder in (old, new))
    assert one.special_tokens_map == other.special_tokens_map and one.get_vocab() == other.get_vocab()
    chats = [t.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) for t in (one, other)]
    assert chats == ["<s>Hiz"] * 2 and one("Hi").input_ids == other("Hi").input_ids
    assert GenerationConfig.from_pretrained(new).temperature == 0.6


# --- memory


CHILD = """
import sys, torch, checkpoint
torch.set_num_threads(1)
small, large = sys.argv[1:]
def resident():    # kB of memory that no file backs
    return int(open("/proc/self/status").read().split("RssAnon:")[1].split()[0])
checkpoint.load(small, "cpu")    # whatever the first load imports and allocates once
before = peak = resident()
def watch(frame, event, arg):    # at every call of a C function and every return from one
    global peak
    if event.startswith("c_"):
        peak = max(peak, resident())
sys.setprofile(watch)
model, _ = checkpoint.load(large, "cpu")
sys.setprofile(None)
print(peak - before, model.tok.dtype)
"""


def test_loading_takes_little_more_memory_than_the_model(tmp_path):
    """Never two copies: the model, one and a half of its largest tensor, and 8 MB for the rest."""
    c = replace(LLAMA, vocab_size=4000, dim=1024, n_layers=2, n_heads=16, head_dim=64, hidden_dim=2816)
    saved(LLAMA, tmp_path / "small")
    m = checkpoint.Transformer(c).bfloat16()
    for p in m.parameters():
        p.data.uniform_(-1, 1)
    checkpoint.save(m, tmp_path / "large", expected.byte_tokenizer())
    with safe_open(tmp_path / "large" / "model.safetensors", "pt") as f:
        sizes = [2 * math.prod(f.get_slice(key).get_shape()) for key in f.keys()]
    assert 55e6 < sum(sizes) < 65e6
    child = subprocess.run([sys.executable, "-c", CHILD, tmp_path / "small", tmp_path / "large"], cwd=ROOT,
                           capture_output=True, text=True, check=True)
    grown, dtype = child.stdout.split()
    assert dtype == "torch.bfloat16"
    assert sum(sizes) <= 1024 * int(grown) + 1e6, "the measurement itself must see the model arrive"
    assert 1024 * int(grown) <= sum(sizes) + 1.5 * max(sizes) + 8e6
