"""Loading and saving: every form a Hugging Face folder comes in, every way it can be broken, nothing lost."""
import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import expected
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, GEMMA, LLAMA, devices, make, shard

import checkpoint

ROOT = Path(checkpoint.__file__).parent
LINEAR, LLAMA3 = {"rope_type": "linear", "factor": 2.0}, expected.SCALING
CONFIGS = FAMILIES | {
    "tied": replace(LLAMA, tied=True), "wide-heads": replace(LLAMA, head_dim=12, bos=3, eos=(5, 6)),
    "llama3": replace(LLAMA, rope_theta=500.0, rope_scaling=LLAMA3),
    "linear": replace(LLAMA, rope_scaling=LINEAR),
    "no-caps": replace(GEMMA, attn_softcap=None, final_softcap=None, tied=False, norm_eps=1e-6),
    "gelu": replace(LLAMA, act="gelu"), "silu": replace(GEMMA, act="silu")}
IDS = torch.tensor([[1, 5, 3, 2, 9, 4, 4, 7, 0, 16, 8, 8]])
EMBED, HEAD, UP = "model.embed_tokens.weight", "lm_head.weight", "model.layers.3.mlp.up_proj.weight"


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
    tensors = {key: t.clone() for key, t in (load_file(path) | changes).items() if key not in drop}
    save_file(tensors, path)


def same(a, b):
    one, other = a.state_dict(), b.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def agrees_with_transformers(m, folder):
    """Whether a float64 model has the logits of that in a folder. Returns the latter."""
    from transformers import AutoModelForCausalLM
    m.scale.fill_(m.c.embed_scale)
    with expected.wide():
        theirs = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager")
    want = expected.logits(theirs, IDS)
    assert float((m(IDS) - want).abs().max() / want.abs().max()) < 1e-12
    return theirs


def refused(folder, *words, error=ValueError, device="cpu"):
    with pytest.raises((ValueError, OSError)) as e:
        checkpoint.load(folder, device)
    assert type(e.value) is error
    assert "\n" not in str(e.value), "a refusal is one line"
    assert all(word in str(e.value) for word in words), str(e.value)


# --- there and back


@pytest.mark.parametrize("name, dtype", [*zip(CONFIGS, itertools.cycle(checkpoint.DTYPES.values()))])
def test_saving_and_loading_loses_nothing(name, dtype, tmp_path):
    """Not here, and not in `transformers`."""
    from transformers import AutoTokenizer
    m, folder = saved(CONFIGS[name], tmp_path / "new" / "folder", dtype)
    again, tokenizer = checkpoint.load(folder, "cpu")
    assert again.c == m.c and again.tok.dtype == dtype, "without a dtype the stored one stays"
    assert same(again, m) and torch.equal(again(IDS), m(IDS))
    assert not again.training and not any(p.requires_grad for p in again.parameters())
    assert tokenizer.to_str() == expected.byte_tokenizer().to_str()
    checkpoint.save(again.double(), folder, tokenizer)
    theirs, words = agrees_with_transformers(again, folder), AutoTokenizer.from_pretrained(folder)
    assert theirs.config.max_position_embeddings == 64
    assert words("Once upon").input_ids == tokenizer.encode("Once upon").ids
    if m.c.bos is not None:
        assert (words.bos_token, words.eos_token) == ("a", "c")
        assert theirs.generation_config.eos_token_id == [5, 6] and theirs.config.bos_token_id == 3


# --- the forms a checkpoint comes in


@devices
@pytest.mark.parametrize("name", FAMILIES)
def test_shards_of_any_dtype_load_like_one_file(name, device, tmp_path):
    """Also with tables and a copy of the embeddings, as in older files; of mixed types the embeddings' is the
    model's."""
    m, folder = saved(replace(FAMILIES[name], tied=True), tmp_path, torch.bfloat16)
    table = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(6)}
    edit_weights(folder, **table, **{HEAD: m.tok, "model.norm.weight": m.norm.weight.double()})
    shard(folder, 3)
    for dtype in (None, torch.float16, torch.float64):
        again = checkpoint.load(str(folder), device, dtype)[0]
        assert again.tok.device.type == device
        assert same(again.cpu(), make(m.c).bfloat16().to(dtype or torch.bfloat16))


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
    for eos in ("</s>", [1, "2"], [1, True], 1.0, {"id": 1}):
        generation.write_text(json.dumps({"eos_token_id": eos}))
        refused(folder, "eos_token_id")


@pytest.mark.parametrize("kind, more", [
    ("Gemma2", {}), ("Gemma2", dict(attn_logit_softcapping=None, final_logit_softcapping=None)),
    ("Llama", {}), ("Llama", dict(num_key_value_heads=None, head_dim=None, rope_scaling=None))], ids=str)
def test_what_a_config_leaves_out_is_what_transformers_takes(kind, more, tmp_path):
    import transformers
    least = dict(vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=8,
                 intermediate_size=96, architectures=[f"{kind}ForCausalLM"], bos_token_id=None,
                 eos_token_id=None)
    whole = getattr(transformers, f"{kind}Config")(**least, **more).to_dict()
    found = []
    for content in (least | more, whole):
        (tmp_path / "config.json").write_text(json.dumps(content))
        found.append(checkpoint.read_config(tmp_path))
    assert found[0] == found[1] and len(whole) > len(least) + len(checkpoint.FAMILIES[kind.lower()])


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 77.0}
FORMS = {     # what config.json says, and how the weights change, given the embeddings
    "a tied head with values of its own": ({}, lambda tok: {HEAD: tok.flip(0)}),
    "a tied matrix under the head's name": ({}, lambda tok: {HEAD: tok}),
    "linear rope of an early spelling": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, None),
    "rope as transformers 5 writes it": ({"rope_parameters": LLAMA3 | {"rope_theta": 500.0}}, None),
    "two spellings of rope": ({"rope_parameters": YARN, "rope_scaling": LINEAR, "rope_theta": 300.0}, None),
    "a llama3 rope without its length": (
        {"rope_scaling": {k: v for k, v in LLAMA3.items() if k[0] != "o"}, "rope_theta": 500.0}, None)}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_form_is_understood_as_by_transformers(family, name, tmp_path):
    m, folder = saved(replace(FAMILIES[family], tied=True), tmp_path, torch.float64)
    said, held = FORMS[name]
    edit(folder / "config.json", drop=["rope_scaling", "rope_theta"])
    edit(folder / "config.json", **said)
    edit_weights(folder, [EMBED] * ("matrix" in name), **(held(m.tok) if held else {}))
    agrees_with_transformers(checkpoint.load(folder, "cpu")[0], folder)


# --- refusals


REFUSED = [
    (LLAMA, dict(quantization_config={"quant_method": "gptq", "bits": 4}), "gptq"),
    (LLAMA, dict(attention_bias=True), "attention_bias"), (LLAMA, dict(mlp_bias=True), "mlp_bias"),
    (GEMMA, dict(use_bidirectional_attention=True), "use_bidirectional_attention"),
    (GEMMA, dict(layer_types=["full_attention", "sliding_attention"] * 3), "layer_types"),
    (LLAMA, dict(architectures=["MistralForCausalLM"], model_type="mistral"), "Mistral"),
    (LLAMA, dict(architectures=["LlamaForCausalLM", "Other"]), "Other"),
    (LLAMA, dict(model_type="gemma2"), "LlamaForCausalLM"),
    (LLAMA, dict(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "yarn"),
    (LLAMA, dict(rope_scaling={"rope_type": "linear"}), "factor"),
    (LLAMA, dict(rope_scaling=LLAMA3 | {"low_freq_factor": 4.0}), "low_freq_factor"),
    (LLAMA, dict(rope_scaling=LINEAR | {"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
    (LLAMA, dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
    (LLAMA, dict(hidden_act="relu"), "relu"), (GEMMA, dict(hidden_activation="gelu"), "gelu"),
    (LLAMA, dict(vocab_size=None), "vocab_size"), (LLAMA, dict(hidden_size="32"), "hidden_size '32'"),
    (LLAMA, dict(num_hidden_layers=100_000), "100000 layers"), (LLAMA, dict(rope_theta=-1.0), "rope_theta"),
    (GEMMA, dict(query_pre_attn_scalar=0), "query"), (GEMMA, dict(sliding_window=None), "sliding_window"),
    (LLAMA, dict(bos_token_id=17), "bos_token_id 17"),
    (LLAMA, dict(hidden_size=2**30, intermediate_size=2**30), "shape")]


@pytest.mark.parametrize("c, changes, word", REFUSED, ids=[word for _, _, word in REFUSED])
def test_what_would_be_computed_wrongly_is_refused_by_name(c, changes, word, tmp_path):
    edit(saved(c, tmp_path)[1] / "config.json", **changes)
    refused(tmp_path, word)


@pytest.mark.parametrize("drop, changes, word", [
    ([UP], {}, UP), ([HEAD], {}, HEAD), ([], {UP: torch.ones(32, 48)}, "(32, 48)"),
    ([], {EMBED: torch.ones(())}, EMBED), ([], {"extra.bias": torch.ones(32)}, "extra.bias"),
    ([], {UP: torch.ones(48, 32, dtype=torch.int8)}, "I8")], ids=str)
def test_tensors_that_are_missing_left_over_or_misshapen_are_named(drop, changes, word, tmp_path):
    edit_weights(saved(LLAMA, tmp_path)[1], drop, **changes)
    refused(tmp_path, word)


@pytest.mark.parametrize("name", [
    "config.json", "generation_config.json", "tokenizer.json", "model.safetensors"])
def test_what_is_missing_or_damaged_is_named(name, tmp_path):
    refused(tmp_path / "nowhere", "nowhere", error=FileNotFoundError)
    path = saved(LLAMA, tmp_path)[1] / name
    raw = path.read_bytes()
    for damaged in (raw[: len(raw) // 2], raw[:-1], raw[:20], raw[:7], b"", b"[]", b"\xff\xfe", raw + b"x",
                    b"[" * 100_000, bytes(8) + raw[8:], b"version https://git-lfs.github.com/spec/v1"):
        path.write_bytes(damaged)
        refused(tmp_path, str(path))
    if "config" not in name:
        refused(tmp_path, "git lfs pull")
    path.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    if name == "model.safetensors":
        refused(tmp_path, "only pickles")
    elif name != "generation_config.json":
        refused(tmp_path, str(path), error=FileNotFoundError)


def test_an_index_names_files_that_are_there_and_whole(tmp_path):
    index = shard(saved(LLAMA, tmp_path)[1], 3)
    first = tmp_path / "model-00001-of-00003.safetensors"
    kept = first.read_bytes()
    first.write_bytes(kept[:100])
    refused(tmp_path, first.name)
    first.unlink()
    refused(tmp_path, first.name, error=FileNotFoundError)
    for where in (None, [], "x", {EMBED: 3}):
        edit(index, weight_map=where)
        refused(tmp_path, "weight_map")


def test_a_device_that_is_not_there_is_refused(monkeypatch, tmp_path):
    saved(LLAMA, tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("gpu", "mps", "meta", "cpu:x", "cuda", torch.device("cuda", 0)):
        refused(tmp_path, str(device), device=device)
    assert checkpoint.load(tmp_path)[0].tok.device.type == "cpu", "no device given, no CUDA: the CPU"


# --- prompts


@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_text_has_the_ids_that_transformers_gives_it(adds_bos, tmp_path):
    from transformers import AutoTokenizer
    checkpoint.save(make(LLAMA), tmp_path, expected.byte_tokenizer(adds_bos))
    ours = checkpoint.load(tmp_path, "cpu")[1]
    for settings in ({}, {"add_bos_token": True, "add_eos_token": True}, {"add_bos_token": False}):
        edit(tmp_path / "tokenizer_config.json", **settings)
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        for text, special in itertools.product(("Once upon", "<s>Once", "Once</s>upon"), (True, False)):
            want = theirs(text, add_special_tokens=special).input_ids
            assert checkpoint.encode(ours, text, 0, special) == want
    assert checkpoint.encode(ours, "", bos=0) == [0]
    for text, word in (("", "bos_token_id"), ("ab\ud800c", "position 2")):
        with pytest.raises(ValueError, match=word):
            checkpoint.encode(expected.byte_tokenizer(), text)


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
import sys, checkpoint
def resident():    # bytes of memory that no file backs
    return 1024 * int(open("/proc/self/status").read().split("RssAnon:")[1].split()[0])
def watch(frame, event, arg):    # at every call of a C function and every return from one
    sizes.append(resident())
checkpoint.load(sys.argv[1], "cpu")    # whatever the first load imports and allocates once
sizes = [resident()]
sys.setprofile(watch)
model, _ = checkpoint.load(sys.argv[2], "cpu")
print(max(sizes) - sizes[0])
"""


def test_loading_takes_little_more_memory_than_the_model(tmp_path):
    """Never two copies: the model, one and a half of its largest tensor, and 8 MB for the rest."""
    c = replace(LLAMA, vocab_size=4000, dim=1024, n_layers=2, n_heads=16, head_dim=64, hidden_dim=2816)
    saved(LLAMA, tmp_path / "small")
    m, _ = saved(c, tmp_path / "large", torch.bfloat16)
    sizes = [2 * piece.numel() for _, piece in checkpoint.parts(m)]
    argv = [sys.executable, "-c", CHILD, tmp_path / "small", tmp_path / "large"]
    grown = int(subprocess.run(argv, cwd=ROOT, capture_output=True, check=True).stdout)
    assert sum(sizes) - 1e6 <= grown <= sum(sizes) + 1.5 * max(sizes) + 8e6
