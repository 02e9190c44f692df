"""Loading and saving: every form a Hugging Face folder comes in, every way it can be broken,
nothing lost."""
import itertools
import json
from dataclasses import replace

import expected
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, GEMMA, GEMMA3, LLAMA, QWEN, make, shard
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import checkpoint
from lab.save import beside, save

LINEAR, LLAMA3 = {"rope_type": "linear", "factor": 2.0}, expected.SCALING
CONFIGS = FAMILIES | {
    **{name: replace(c, bos=3, eos=(5,)) for name, c in QWEN.items()},
    "wide-heads": replace(LLAMA, head_dim=12, bos=3, eos=(5, 6)),
    "llama3": replace(LLAMA, rope_theta=500.0, rope_scaling=LLAMA3),
    "silu": replace(GEMMA, act="silu"),
    "linear": replace(LLAMA, rope_scaling=LINEAR, tied=True, act="gelu"),
    "no-caps": replace(GEMMA, attn_softcap=None, final_softcap=None, tied=False, norm_eps=1e-6),
    "gemma3": GEMMA3,
    "gemma3 of every default": replace(GEMMA3, global_every=6, rope_theta=1e6, local_theta=1e4),
    "gemma3, scaled": replace(GEMMA3, rope_scaling=LINEAR, final_softcap=5.0, tied=False)}
IDS = torch.tensor([[1, 5, 3, 2, 9, 4, 4, 7, 0, 16, 8, 8]])
EMBED, HEAD, UP = "model.embed_tokens.weight", "lm_head.weight", "model.layers.3.mlp.up_proj.weight"


def saved(c, folder, dtype=torch.float32):
    """A random model, and the folder it was saved to."""
    m = make(c).to(dtype)
    save(m, folder, expected.byte_tokenizer())
    return m, folder


def edit(file, drop=(), **changes):
    """Change keys of a JSON file, or tensors of a safetensors file, where None drops one."""
    if file.suffix == ".safetensors":
        tensors = load_file(file) | changes
        save_file({key: t.clone() for key, t in tensors.items() if t is not None}, file)
    else:
        content = json.loads(file.read_text()) if file.exists() else {}
        kept = {key: value for key, value in content.items() if key not in drop}
        file.write_text(json.dumps(kept | changes))


def agrees_with_transformers(m, folder):
    """Whether a float64 model has the logits of that in a folder. Returns the latter."""
    with expected.wide(), torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        want = theirs(IDS).logits
    assert float((m(IDS) - want).abs().max() / want.abs().max()) < 1e-12
    return theirs


def refused(folder, word, error=ValueError, device="cpu"):
    with pytest.raises(error) as e:
        checkpoint.load(folder, device)
    assert word in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize("name, dtype",
                         [*zip(CONFIGS, itertools.cycle(checkpoint.DTYPES.values()))])
def test_saving_and_loading_loses_nothing(name, dtype, tmp_path):
    m, folder = saved(CONFIGS[name], tmp_path / "new" / "folder", dtype)
    assert (folder / "model.safetensors").stat().st_mode & 0o777 == 0o644, "all users may read it"
    again, tokenizer = checkpoint.load(folder, "cpu")
    assert again.c == m.c and again.tok.dtype == dtype and not again.training
    assert torch.equal(again(IDS), m(IDS)) and not any(p.requires_grad for p in again.parameters())
    save(again.double(), folder, tokenizer)
    theirs, words = agrees_with_transformers(again, folder), AutoTokenizer.from_pretrained(folder)
    assert words("Once upon").input_ids == tokenizer.encode("Once upon").ids
    assert (words.bos_token, words.eos_token) == (("a", "c") if m.c.bos else (None, None))
    ends = theirs.generation_config.eos_token_id or []
    assert (theirs.config.bos_token_id, tuple(ends)) == (m.c.bos, m.c.eos)


def test_shards_of_any_dtype_load_like_one_file(tmp_path):
    m, folder = saved(replace(GEMMA, tied=True), tmp_path, torch.bfloat16)
    edit(folder / "model.safetensors", **{HEAD: m.tok, "model.norm.weight": m.norm.weight.double(),
                                          "model.layers.0.self_attn.rotary_emb.inv_freq":
                                              torch.ones(4)})
    index = shard(folder, 3)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        again = checkpoint.load(str(folder), "cpu", None if dtype == torch.bfloat16 else dtype)[0]
        assert all(
            map(torch.equal, again.parameters(), make(m.c).bfloat16().to(dtype).parameters()))
    for where in (3, "../model.safetensors", "sub/../../x", "/etc/passwd"):
        edit(index, weight_map={EMBED: where})
        refused(folder, "weight_map")


def test_the_index_says_which_file_counts(tmp_path):
    """A file in a subfolder, and a stale copy of a tensor in another file."""
    m, folder = saved(LLAMA, tmp_path)
    index = shard(folder, 2)
    where = json.loads(index.read_text())["weight_map"]
    first, last = sorted(set(where.values()))
    for key, file in itertools.product((UP, EMBED), (first, last)):
        if where[key] != file:
            edit(folder / file, **{key: torch.zeros(1)})
    (folder / "sub").mkdir()
    (folder / last).rename(folder / "sub" / last)
    where = {key: f"sub/{file}" if file == last else file for key, file in where.items()}
    edit(index, weight_map=where)
    assert torch.equal(checkpoint.load(folder, "cpu")[0](IDS), m(IDS))


@pytest.mark.parametrize("first", ["generation_config.json", "config.json"])
def test_end_of_text_ids_come_in_every_form(first, tmp_path):
    """generation_config.json comes first, where it has the key."""
    saved(LLAMA, tmp_path)
    edit(tmp_path / "config.json", eos_token_id=3)
    if first == "config.json":
        edit(tmp_path / "generation_config.json", drop=["eos_token_id"])
    for stored, want in ((None, ()), (7, (7,)), (0, (0,)), ([7, 0, 9], (7, 0, 9)), ([], ())):
        edit(tmp_path / first, eos_token_id=stored)
        assert checkpoint.read_config(tmp_path).eos == want
    for stored in ("</s>", [1, True], {"id": 1}):
        edit(tmp_path / first, eos_token_id=stored)
        refused(tmp_path, f"{first}: eos_token_id")
    for stored in (17, [1, 17], -1):
        edit(tmp_path / first, eos_token_id=stored)
        refused(tmp_path, f"eos_token_id {17 if stored != -1 else -1} is no id")


@pytest.mark.parametrize("kind, more", [
    ("Gemma2", {}), ("Gemma2", dict(attn_logit_softcapping=None, final_logit_softcapping=None)),
    ("Gemma3Text", {}), ("Gemma3Text", dict(sliding_window_pattern=2)),
    ("Gemma3Text", dict(rope_scaling={"rope_type": "linear", "factor": 8.0})),
    ("Qwen2", {}), ("Qwen3", {}), ("Qwen2", dict(num_key_value_heads=None)),
    ("Qwen3", dict(num_key_value_heads=None, use_sliding_window=True)),
    ("Qwen2", dict(use_sliding_window=True, max_window_layers=2)),
    ("Qwen3", dict(use_sliding_window=True, max_window_layers=0, sliding_window=None)),
    ("Qwen2",
     dict(use_sliding_window=True, max_window_layers=0, layer_types=["full_attention"] * 2)),
    ("Llama", {}), ("Llama", dict(num_key_value_heads=None, head_dim=None, rope_scaling=None))],
                         ids=str)
def test_what_a_config_leaves_out_is_what_transformers_takes(kind, more, tmp_path):
    least = more | dict(
        vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=8,
        intermediate_size=96, bos_token_id=None, eos_token_id=None)
    settings = getattr(transformers, f"{kind}Config")
    least["model_type"] = settings.model_type
    whole = settings(**least).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(whole))
    want = checkpoint.read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(least))
    assert checkpoint.read_config(tmp_path) == want


@pytest.mark.parametrize("family", FAMILIES | QWEN)
def test_the_weights_decide_whether_a_head_is_tied(family, tmp_path):
    """It has values of its own, or the tied matrix stands under its name."""
    m, folder = saved(replace(CONFIGS[family], tied=True), tmp_path, torch.float64)
    for tensors in {HEAD: m.tok.flip(0)}, {HEAD: m.tok, EMBED: None}:
        edit(folder / "model.safetensors", **tensors)
        agrees_with_transformers(checkpoint.load(folder, "cpu")[0], folder)


FULL = LINEAR | {"rope_theta": 500.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 77.0}
EARLY = {"type": "linear", "factor": 2.0}
NEW = {"rope_theta": 500.0} | {k: v for k, v in LLAMA3.items()
                               if k != "original_max_position_embeddings"}
SPELLINGS = [{"rope_parameters": NEW},
             {"rope_parameters": YARN, "rope_scaling": EARLY, "rope_theta": 300.0}]
OF_EACH_KIND = [    # of block
    {}, {"rope_theta": 500.0}, {"rope_local_base_freq": 50.0, "rope_scaling": LINEAR},
    {"rope_parameters": {"full_attention": FULL}},
    {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}},
    {"rope_parameters": {"full_attention": FULL, "sliding_attention": {"rope_theta": 50.0}},
     "rope_theta": 7.0, "rope_local_base_freq": 7.0}]


@pytest.mark.parametrize("name, said", [*itertools.product(FAMILIES | QWEN, SPELLINGS),
                                        *(("gemma3", said) for said in OF_EACH_KIND)], ids=str)
def test_rotations_are_spelt_as_transformers_4_and_5_do(name, said, tmp_path):
    """Or left out."""
    _, folder = saved(CONFIGS[name], tmp_path, torch.float64)
    edit(folder / "config.json", ["rope_scaling", "rope_theta", "rope_local_base_freq"], **said)
    agrees_with_transformers(checkpoint.load(folder, "cpu")[0], folder)


TOOL = {"content": "<tool>", "special": False, "normalized": False, "lstrip": False,
        "rstrip": False, "single_word": False}
REFUSED = {"config.json": [
    (LLAMA, dict(model_type="mistral"), "model_type 'mistral'"),
    (LLAMA, dict(model_type=None), "no model_type"),
    (QWEN["qwen2"], dict(architectures=["Qwen2Model"]),
     "['Qwen2Model'] is not supported for model_type"),
    (LLAMA, dict(architectures=["LlamaForCausalLMEagle3"]), "Eagle3"),
    (LLAMA, dict(rope_parameters={"full_attention": {"rope_type": "default"}}), "by layer type"),
    (LLAMA, dict(rope_scaling={"type": "yarn", "factor": 4}), "yarn"),
    (LLAMA, dict(rope_scaling={"rope_type": "linear"}), "factor"),
    (LLAMA, dict(rope_scaling=LLAMA3 | {"low_freq_factor": 4.0}), "low_freq_factor"),
    (LLAMA, dict(rope_scaling=LINEAR | {"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
    (LLAMA, dict(rope_theta=-1), "theta"), (LLAMA, dict(head_dim=7), "head_dim 7"),
    (LLAMA, dict(quantization_config={"quant_method": "gptq"}), "gptq"),
    (GEMMA, dict(mlp_bias=True), "mlp_bias"), (LLAMA, dict(attention_bias=True), "attention_bias"),
    (GEMMA, dict(use_bidirectional_attention=True), "bidirectional"),
    (LLAMA, dict(hidden_act="relu"), "relu"), (GEMMA, dict(hidden_activation="gelu"), "gelu"),
    (GEMMA, dict(layer_types=["full_attention", "sliding_attention"] * 3), "layer_types"),
    (GEMMA, dict(sliding_window=None), "window"),
    (GEMMA3, dict(attn_logit_softcapping=50.0), "attn_logit_softcapping"),
    (GEMMA3, dict(layer_types=["sliding_attention"] * 6), "layer_types"),
    (GEMMA3, dict(sliding_window_pattern=1.5), "sliding_window_pattern"),
    (GEMMA3, dict(rope_parameters={"sliding_attention": LINEAR}), "linear"),
    (QWEN["qwen2"], dict(use_sliding_window=True, max_window_layers=5), "use_sliding_window"),
    (QWEN["qwen3"], dict(attention_bias=True), "attention_bias True"),
    (QWEN["qwen3"], dict(layer_types=["sliding_attention"] * 6), "layer_types"),
    (LLAMA, dict(bos_token_id=17), "17"), (LLAMA, dict(bos_token_id=-1), "-1"),
    (LLAMA, dict(num_hidden_layers=10**5), "100000 layers"),
    (LLAMA, dict(hidden_size="32"), "'32'"), (LLAMA, dict(hidden_size=2**60), "shape")
], "model.safetensors": [
    (LLAMA, {UP: None}, f"{UP} is missing"), (LLAMA, {HEAD: None}, HEAD),
    (LLAMA, {UP: torch.ones(32, 48)}, "(32, 48)"), (LLAMA, {EMBED: torch.ones(())}, EMBED),
    (LLAMA, {UP: torch.ones(48, 32).to(torch.float8_e4m3fn)}, "F8_E4M3"),
    (LLAMA, {UP: torch.ones(48, 32, dtype=torch.int8)}, "I8"),
    (LLAMA, {"extra.bias": torch.ones(32)}, "extra.bias: this architecture does not use it")
], "tokenizer_config.json": [
    (LLAMA, dict(added_tokens_decoder={"70": TOOL}),
     "'<tool>' cannot have the id 70: the next free one is 64"),
    (LLAMA, dict(added_tokens_decoder={"x": TOOL}), "tokenizer_config.json")]}


@pytest.mark.parametrize("name, c, changes, word", [
    pytest.param(name, *row, id=row[-1]) for name, rows in REFUSED.items() for row in rows])
def test_what_would_be_computed_wrongly_is_refused_by_name(name, c, changes, word, tmp_path):
    edit(saved(c, tmp_path)[1] / name, **changes)
    refused(tmp_path, word)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_what_is_missing_or_damaged_is_named(name, tmp_path):
    path = saved(LLAMA, tmp_path)[1] / name
    raw = path.read_bytes()
    path.unlink()
    refused(tmp_path, str(path), FileNotFoundError)
    for damaged in (raw[:-1], b"", b"[]", raw + b"x", b"[" * 100_000,
                    b"version https://git-lfs.github.com"):
        path.write_bytes(damaged)
        refused(tmp_path, str(path))
    refused(tmp_path, "git lfs pull")


def test_a_device_that_is_not_there_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("gpu", "mps", "meta", "cpu:x", "cuda", torch.device("cuda", 0)):
        refused(tmp_path, f"device {device}", device=device)
    assert checkpoint.find_device() == torch.device("cpu")


MINE = TOOL | {"content": "<|mine|>", "special": True, "rstrip": True}


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("files", [
    {}, {"tokenizer_config": {"add_bos_token": True, "add_eos_token": True}},
    {"tokenizer_config": {"add_bos_token": False}},
    {"tokenizer_config": {"added_tokens_decoder": {"65": MINE, "64": TOOL}}},
    {"tokenizer_config": {"added_tokens_decoder": {"64": MINE}, "pad_token": "Lily",
                          "extra_special_tokens": ["<tool>"]}},
    {"tokenizer_config": {"pad_token": "Lily", "eos_token": MINE | {"__type": "AddedToken"}}},
    {"special_tokens_map": {"pad_token": "<tool>", "additional_special_tokens": ["Lily"]}},
    {"tokenizer_config": {"added_tokens_decoder": {}},
     "special_tokens_map": {"pad_token": "<tool>"}},
    {"added_tokens": {"<|mine|>": 65, "<tool>": 64},
     "special_tokens_map": {"sep_token": "<tool>"}}], ids=str)
def test_a_text_has_the_ids_that_transformers_gives_it(files, adds_bos, tmp_path):
    """Tokens that other files list, as fine-tunes save them, are one id each."""
    save(make(LLAMA), tmp_path, expected.byte_tokenizer(adds_bos))
    for name, content in files.items():
        edit(tmp_path / f"{name}.json", **content)
    ours = checkpoint.read_tokenizer(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text, special in itertools.product(
            ("Once upon", "<s>Once", "Once</s>upon", "Once<|mine|> <tool> more", "<tool><tool>",
             "Lily<|mine|>", " <|mine|>Lily "), (True, False)):
        want = theirs(text, add_special_tokens=special).input_ids
        assert checkpoint.encode(ours, text, 0, special) == want, text
        assert ours.decode(want, skip_special_tokens=True) == theirs.decode(
            want, skip_special_tokens=True)


def test_a_text_without_ids():
    """An empty one becomes the begin-of-text id, if there is one."""
    tokenizer = expected.byte_tokenizer()
    assert checkpoint.encode(tokenizer, "", bos=0) == [0]
    for text, word in (("", "bos_token_id"), ("ab\ud800c", "position 2")):
        with pytest.raises(ValueError, match=word):
            checkpoint.encode(tokenizer, text)


def test_a_chat_model_that_was_loaded_and_saved_is_the_same(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    save(make(replace(LLAMA, bos=0, eos=(1,))), old,
                    expected.byte_tokenizer(adds_bos=True))
    (old / "chat_template.jinja").write_text(
        "{{ bos_token }}{{ messages[0].content }}{{ pad_token }}")
    (old / "special_tokens_map.json").write_text('{"pad_token": "z"}')
    edit(old / "generation_config.json", temperature=0.6, do_sample=True)
    m, tokenizer = checkpoint.load(old, "cpu")
    save(m, new, tokenizer, beside(old))
    one, other = (AutoTokenizer.from_pretrained(folder) for folder in (old, new))
    for t in (one, other):
        assert (t.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
                == "<s>Hiz")
    assert GenerationConfig.from_pretrained(new).temperature == 0.6
