"""`lab.bench check` calls right what is right, and catches each planted error."""
from dataclasses import replace

import expected
import pytest
import torch
from tiny import GEMMA, LLAMA, make
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

import checkpoint
from kvcache import KVCache
from lab.bench import __main__ as bench
from lab.bench import check
from lab.bench.check import RIGHT, WRONG
from lab.bench.shared import WEIGHTS
from lab.save import save
from layerskip import SelfDraft

COMMON = dict(vocab_size=64, max_len=128, bos=0, eos=(1,), norm_eps=1e-2)
CONFIGS = {
    "llama": replace(LLAMA, **COMMON, tied=True, rope_theta=500.0, rope_scaling=expected.SCALING),
    "gemma": replace(GEMMA, **COMMON, window=64, attn_softcap=2.0, final_softcap=3.0)}
TEMPLATE = ("{{ bos_token }}{% for m in messages %}{{ m['role'] if m['role'] != 'system' else "
            "raise_exception('no') }} {{ m['content'] | trim }}</s>{% endfor %}"
            "{% if add_generation_prompt %}assistant {% endif %}")


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """{family: (its folder, the passes, the prompts, what transformers says of them)}"""
    found = {}
    for family, c in CONFIGS.items():
        folder = tmp_path_factory.mktemp(family)
        save(make(c).bfloat16(), folder, expected.byte_tokenizer(adds_bos=True))
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        ids, prompts = check.texts(checkpoint.read_tokenizer(folder), c)
        passes = check.plan(c, ids[:64])
        said = check.ask(folder, "cpu", passes, prompts, 12, torch.float32)
        found[family] = folder, passes, prompts, said
    return found


@pytest.fixture
def call(asked, monkeypatch):
    """lab.bench check, but what looks at the clock: (status, {row: verdict})"""
    monkeypatch.setattr(check, "worth", lambda *_: ([], {}))
    monkeypatch.setattr(check, "LENGTH", 64)

    def run(family):
        argv = ["check", "--model", str(asked[family][0]), "--new", "12"]
        _, data = check.run(bench.parse(argv))
        return data["status"], {r["check"]: r["verdict"] for r in data["checks"]}
    return run


def test_a_tokenizer_that_refuses_texts_ends_in_no_traceback(tmp_path):
    """A WordLevel without its token for the unknown refuses what transformers also refuses."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="<unk>"))
    save(make(replace(CONFIGS["llama"], vocab_size=2, bos=None, eos=())), tmp_path,
                    tokenizer)
    assert not wrong(check.check_tokenizer(tmp_path, tokenizer))
    assert bench.main(["check", "--model", str(tmp_path)]) == 2


def load(folder):
    return checkpoint.load(folder, "cpu", torch.float32)[0]


def wrong(rows):
    return [r.check for r in rows if r.verdict == WRONG]


@pytest.mark.parametrize("family", CONFIGS)
def test_what_is_right_is_called_right(call, family):
    status, rows = call(family)
    assert status == 0 and {*rows.values()} == {RIGHT}
    assert sum(name.startswith(("chat template: ", "error of bfloat16")) for name in rows) == 5
    assert ("logits, window 16 instead of 64" in rows) == (family == "gemma")


def test_far_angles_in_float32_are_no_difference_and_a_wrong_norm_is(tmp_path):
    """Deep in a long context transformers' angles move the logits by more than a thousandth."""
    c = replace(LLAMA, vocab_size=64, n_layers=12, max_len=8192, rope_theta=500.0)
    save(make(c).float(), tmp_path, expected.byte_tokenizer())
    passes, model = check.plan(c, [i * i % 61 for i in range(64)]), load(tmp_path)
    said = check.ask(tmp_path, "cpu", passes, [], 1, torch.float32)
    rows = check.check_logits(model, passes, said)
    assert wrong(rows) == [] and 1e-3 < float(rows[1].ours) and float(rows[1].theirs) < 0.05
    model.blocks[7].mlp_norm = torch.nn.Identity()
    assert len(wrong(check.check_logits(model, passes, said))) == 3


@pytest.mark.parametrize("family, lie", [
    ("llama", {"rope_scaling": None}), ("llama", {"norm_eps": 1.01e-2}),
    ("gemma", {"attn_softcap": 9.0})])
def test_a_config_that_is_misread_is_caught(asked, monkeypatch, family, lie):
    (folder, passes, _, said), read = asked[family], checkpoint.read_config
    monkeypatch.setattr(checkpoint, "read_config", lambda folder: replace(read(folder), **lie))
    model = load(folder)
    rows = check.check_logits(model, check.plan(model.c, passes[0].ids), said)
    assert {"logits, 64 tokens at once", rows[-1].check} <= set(wrong(rows))


def test_an_angle_that_is_misread_far_away_and_a_cache_that_errs_are_caught(asked, monkeypatch):
    folder, passes, _, said = asked["llama"]
    model = load(folder)
    model.angles(128)
    model.table = [t.clone().index_copy_(1, torch.arange(100, 256), t[:, :156])
                   for t in model.table]
    rows = check.check_logits(model, passes, said)
    assert wrong(rows) == ["logits, 48 tokens spread over positions 0 to 127"]
    write = KVCache.write
    monkeypatch.setattr(KVCache, "write", lambda *a, **to: [0.9 * kv for kv in write(*a, **to)])
    rows = check.check_logits(load(folder), passes, said)
    assert wrong(rows) == [rows[-1].check]


def test_a_wrong_text_is_caught_and_a_tie_is_not(asked, monkeypatch):
    (folder, _, prompts, said), generate = asked["gemma"], check.generate

    def lies(model, prompts, new, drafter=None, eos=()):
        (first, second), passes = generate(model, prompts, new, drafter, eos=eos)
        return [first, [*second[:-1], (second[-1] + isinstance(drafter, SelfDraft)) % 64]], passes

    monkeypatch.setattr(check, "generate", lies)
    rows = check.check_texts(load(folder), prompts, 12, said)
    assert wrong(rows) == ["greedy text, exit 2: 2 x 12 tokens"]
    monkeypatch.setattr(check, "parting", lambda *_: {"position": 1, "gap": 0.0, "near_tie": True})
    assert wrong(check.check_texts(load(folder), prompts, 12, said)) == []


def test_another_tokenization_and_another_chat_are_caught(call, asked, monkeypatch):
    encode, read, folder = checkpoint.encode, check.read_template, asked["llama"][0]
    ours = checkpoint.read_tokenizer(folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    rows = check.check_chats(WEIGHTS / "stories-llama", ours, theirs)
    assert wrong(rows) == ["chat template"], "they find one, we do not"
    monkeypatch.setattr(check, "read_template", lambda f: lambda m, more=True: read(f)(m, True))
    assert wrong(check.check_chats(folder, ours, theirs)) == ["chat template: an answer"]
    monkeypatch.setattr(checkpoint, "encode", lambda *a, **how: encode(*a, **how) + [5])
    status, rows = call("llama")
    assert status == 1 and [*rows.values()].count(WRONG) == 4, "ids and three chats"


def test_a_context_that_is_misread_is_caught(call, monkeypatch):
    read = checkpoint.read_config
    monkeypatch.setattr(checkpoint, "read_config", lambda folder: replace(read(folder), max_len=64))
    status, rows = call("llama")
    assert status == 1 and [name for name in rows if rows[name] == WRONG] == ["context"]


def test_rounding_is_held_against_theirs():
    want = torch.full((64, 4), 2.0)
    verdicts = [check.check_rounding(want + off, want + 0.1, want, torch.half).verdict
                for off in (0.14, 0.2, float("nan"))]
    assert verdicts == [RIGHT, WRONG, WRONG]
