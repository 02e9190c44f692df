"""`bench.py check` calls right what is right, and catches each planted error. Nothing here is about speed."""
import json
import sys
from dataclasses import replace

import expected
import pytest
import torch
from tiny import GEMMA, LLAMA, make

import bench
import checkpoint
from benchmarks import check
from benchmarks.check import NONE, OPEN, RIGHT, WRONG, Pass, Row
from kvcache import KVCache
from layerskip import SelfDraft
from model import rotate as honest_rotate

CONFIGS = {
    "llama-3.2": replace(LLAMA, vocab_size=64, tied=True, max_len=128, bos=0, eos=(1,), rope_theta=500.0,
                         rope_scaling=expected.SCALING, norm_eps=1e-2),
    "gemma-2": replace(GEMMA, vocab_size=64, max_len=128, bos=0, eos=(1,), attn_softcap=2.0,
                       final_softcap=3.0, norm_eps=1e-2)}
TEMPLATE = ("{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no') }}"
            "{% endif %}{{ m['role'] }} {{ m['content'] | trim }}</s>{% endfor %}"
            "{% if add_generation_prompt %}assistant {% endif %}")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for family, c in CONFIGS.items():
        made[family] = tmp_path_factory.mktemp(family)
        checkpoint.save(make(c).bfloat16(), made[family], expected.byte_tokenizer(adds_bos=True))
        (made[family] / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.fixture(scope="module")
def asked(folders):
    """What transformers says of each, asked once: (passes, prompts, said)."""
    found = {}
    for family, folder in folders.items():
        _, tokenizer = checkpoint.load(folder, "cpu")
        a = bench.parse(["check", "--model", str(folder), "--quick"])
        ids, prompts = check.texts(tokenizer, CONFIGS[family], a)
        passes = check.plan(CONFIGS[family], ids)
        said = check.ask(folder, "cpu", passes, prompts, 12, None, torch.bfloat16)
        found[family] = passes, prompts, said
    return found


@pytest.fixture
def call(capsys, monkeypatch):
    """bench.py check without what starts processes and looks at the clock, as (status, rows, last lines)."""
    monkeypatch.setattr(check, "run_help", lambda a: (f"help in {a.dtype}", {}, None))
    monkeypatch.setattr(check, "loading", lambda folder, dtype, repeats: {"ours": [1.0, 2.0]})

    def run(folder, *argv):
        status = bench.main(["check", "--model", str(folder), "--quick", "--new", "12", "--json", *argv])
        out, err = capsys.readouterr()
        assert err == ""
        data = json.loads(out)
        return status, {r["check"]: r["verdict"] for r in data["checks"]}, data
    return run


def wrong(rows):
    return [r.check for r in rows if r.verdict == WRONG]


# --- what is right


@pytest.mark.parametrize("name", ["stories-llama", "stories-draft", "stories-gemma2"])
def test_the_shipped_models_are_right(call, name):
    """In float32, where a rounding is 6e-8, the two differ by 6e-7, which is a dozen roundings."""
    status, rows, data = call(bench.WEIGHTS / name)
    assert status == 0 and {v for v in rows.values()} == {RIGHT, NONE}, data
    assert list(rows.values()).count(NONE) == 2, "no template, and loading is no verdict"
    assert float(data["checks"][2]["ours"]) < 2e-6 and data["checks"][2]["check"].startswith("logits, 64")
    assert data["verdict"].startswith("All 1") and data["verdict"].endswith("that transformers computes")


@pytest.mark.parametrize("family", CONFIGS)
def test_folders_like_the_real_ones_are_right(call, folders, family):
    status, rows, data = call(folders[family])
    assert status == 0 and WRONG not in rows.values() and OPEN not in rows.values(), data
    chats = [name for name in rows if name.startswith("chat template: ")]
    assert len(chats) == 4 and all(rows[name] == RIGHT for name in chats)
    (half,) = [name for name in rows if "error of bfloat16" in name]
    assert rows[half] == RIGHT
    assert any("instead of" in name for name in rows) is False, "the text is longer than the window"


def test_everything_as_it_is_printed(capsys, folders):
    """With loading in fresh processes, and will-it-help."""
    status = bench.main(["check", "--model", str(folders["llama-3.2"]), "--quick", "--new", "8"])
    out, err = capsys.readouterr()
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith(str(folders["llama-3.2"]))
    assert lines[2] == "| check | ours | theirs | verdict |"
    assert any(line.startswith("| loading in bfloat16, memory | ") and " MB | " in line for line in lines)
    assert all(any(line.startswith(words) for line in lines) for words in ("All ", "| exit 1 |"))
    assert lines[-1].startswith(("Worth it: ", "No gain: "))


def test_without_transformers_it_says_what_it_could_not_check(call, folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    status, rows, data = call(folders["gemma-2"])
    assert status == 0 and data["verdict"].startswith("Nothing differs, but ")
    assert {v for v in rows.values()} == {RIGHT, OPEN, NONE} and "tokenizer" in data["verdict"]
    own = [name for name, v in rows.items() if v == RIGHT]
    assert len(own) == 4 and sum("greedy text" in name for name in own) == 3, "cache and drafts need no other"
    assert {r["theirs"] for r in data["checks"] if r["verdict"] == OPEN} == {"transformers is not installed"}


def test_a_window_longer_than_the_text_is_made_shorter(folders, asked):
    """In both, and both must then agree on something else than without it."""
    passes = check.plan(replace(CONFIGS["gemma-2"], window=64), asked["gemma-2"][0][0].ids)
    assert [p.window for p in passes] == [64, 16, 128]
    model = check.theirs_in(folders["gemma-2"], torch.float32, "cpu")
    ours = checkpoint.load(folders["gemma-2"], "cpu", torch.float32)[0]
    with torch.inference_mode():
        for p in passes:
            assert check.apart(check.our_logits(ours, p), check.their_logits(model, p)) < check.TOLERANCE
    assert ours.c == CONFIGS["gemma-2"], "as it was"
    assert check.apart(*(check.our_logits(ours, p) for p in passes[:2])) > 0.01


# --- planted errors


@pytest.mark.parametrize("family, lie", [
    ("llama-3.2", dict(rope_scaling=None)), ("llama-3.2", dict(rope_theta=501.0)),
    ("llama-3.2", dict(norm_eps=1.01e-2)), ("gemma-2", dict(final_softcap=None)),
    ("gemma-2", dict(attn_softcap=50.0)), ("gemma-2", dict(window=6)), ("gemma-2", dict(query_scale=0.25)),
    ("gemma-2", dict(embed_scale=5.0)), ("gemma-2", dict(act="silu"))], ids=str)
def test_a_config_that_is_misread_is_caught(folders, asked, monkeypatch, family, lie):
    passes, _, said = asked[family]
    read = checkpoint.read_config
    monkeypatch.setattr(checkpoint, "read_config", lambda folder: replace(read(folder), **lie))
    model, _ = checkpoint.load(folders[family], "cpu", torch.float32)
    rows, _ = check.check_logits(model, check.plan(model.c, passes[0].ids), said, "")
    assert {"logits, 64 tokens at once", rows[-1].check} <= set(wrong(rows))


def test_a_misread_angle_far_away_is_caught(folders, asked):
    """As if the table of angles ended too early: the text at the beginning does not notice."""
    passes, _, said = asked["llama-3.2"]
    model, _ = checkpoint.load(folders["llama-3.2"], "cpu", torch.float32)
    model.angles(slice(0, 1), 128)
    model.table = [t.clone().index_copy_(0, torch.arange(100, 256), t[:156]) for t in model.table]
    rows, _ = check.check_logits(model, passes, said, "")
    assert wrong(rows) == ["logits, 48 tokens spread over positions 0 to 127"]


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A folder whose far angles in float32 move the logits by more than a thousandth, and what `ask` says."""
    folder = tmp_path_factory.mktemp("deep")
    c = replace(LLAMA, vocab_size=64, n_layers=12, max_len=8192, rope_theta=500.0)
    checkpoint.save(make(c).float(), folder, expected.byte_tokenizer())
    passes = check.plan(c, [i * i % 61 for i in range(64)])
    return folder, passes, check.ask(folder, "cpu", passes, [], 1, None, torch.float32)


def test_far_angles_in_float32_are_no_difference(deep):
    folder, passes, said = deep
    model, _ = checkpoint.load(folder, "cpu", torch.float32)
    rows, _ = check.check_logits(model, passes, said, "")
    assert wrong(rows) == [] and float(rows[1].ours) > 1e-3 and float(rows[1].theirs) < 0.05


def meta_pairs(x, cos, sin):
    """The rotation with the pairs of Meta's own files."""
    D = x.shape[-1]
    order = torch.arange(D).view(-1, 2).T.flatten()
    return honest_rotate(x[..., order], cos, sin)[..., order.argsort()]


@pytest.mark.parametrize("lie", ["theta", "pairs", "norm"])
def test_a_deep_model_that_is_wrong_is_caught(deep, monkeypatch, lie):
    folder, passes, said = deep
    model, _ = checkpoint.load(folder, "cpu", torch.float32)
    if lie == "theta":
        model.c = replace(model.c, rope_theta=501.0)
    elif lie == "pairs":
        monkeypatch.setattr("model.rotate", meta_pairs)
    else:
        model.blocks[7].mlp_norm = torch.nn.Identity()
    rows, _ = check.check_logits(model, passes, said, "")
    assert len(wrong(rows)) == len(rows) == 3


class Forgetful(KVCache):
    """Loses the first key."""

    def write(self, layer, k, v, slots, end, recent=None):
        keys, values = super().write(layer, k, v, slots, end, recent)
        keys[:, :, 0] = 0
        return keys, values


def test_a_cache_that_loses_a_key_is_caught(folders, asked, monkeypatch):
    passes, _, said = asked["llama-3.2"]
    model, _ = checkpoint.load(folders["llama-3.2"], "cpu", torch.float32)
    monkeypatch.setattr(check, "KVCache", Forgetful)
    for known in (said, None):
        rows, _ = check.check_logits(model, passes, known, "absent")
        assert wrong(rows) == ["the same in chunks of 1, 2, 7, 1, 32 through the cache"]


def test_a_wrong_text_is_caught_and_a_tie_is_not(folders, asked, monkeypatch):
    _, prompts, said = asked["gemma-2"]
    model, _ = checkpoint.load(folders["gemma-2"], "cpu", torch.float32)
    generate = check.generate

    def lies(model, prompts, new, drafter=None):
        rows, passes = generate(model, prompts, new, drafter)
        if isinstance(drafter, SelfDraft):
            rows[1][-1] = (rows[1][-1] + 1) % 64
        return rows, passes

    monkeypatch.setattr(check, "generate", lies)
    for known in (said, None):
        rows = check.check_texts(model, prompts, 12, [0, 1, 5, 6], known, "")
        assert [name.split(":")[0][13:] for name in wrong(rows)] == ["exit 2", "a skip set"]
    assert rows[1].ours.startswith("parts at token 11, logits ")
    monkeypatch.setattr(check, "parting", lambda *row: {"position": 11, "gap": 0.0, "near_tie": True})
    assert wrong(check.check_texts(model, prompts, 12, [0, 1, 5, 6], said, "")) == []


def test_another_tokenization_is_caught(call, folders, monkeypatch):
    encode = checkpoint.encode

    def longer(tokenizer, text, bos=None, special=True):
        return encode(tokenizer, text, bos, special) + [5] * ("<s>" in text)

    monkeypatch.setattr(checkpoint, "encode", longer)
    status, rows, data = call(folders["llama-3.2"])
    bad = [name for name, v in rows.items() if v == WRONG]
    assert status == 1 and len(bad) == 4 and data["verdict"].startswith("4 of ")
    assert [name.split(":")[0] for name in bad] == ["tokenizer", *["chat template"] * 3], "one is refused"


def test_another_chat_is_caught(folders, monkeypatch):
    folder = folders["llama-3.2"]
    tokenizer, theirs = checkpoint.read_tokenizer(folder), check.quiet_tokenizer(folder)
    render = check.read_template(folder)
    monkeypatch.setattr(check, "read_template", lambda folder: lambda m, more=True: render(m, True))
    rows = check.check_chat(folder, tokenizer, theirs, "")
    assert wrong(rows) == ["chat template: an answer"]
    monkeypatch.undo()
    rows = check.check_chat(bench.WEIGHTS / "stories-llama", tokenizer, theirs, "")
    assert [r.verdict for r in rows] == [WRONG], "they find one, we do not"


def test_a_context_that_is_misread_is_caught(folders, asked):
    _, _, said = asked["llama-3.2"]
    model, _ = checkpoint.load(folders["llama-3.2"], "cpu", torch.float32)
    assert [r.verdict for r in check.check_context(model, [3, 4], said, "")] == [RIGHT]
    assert [r.verdict for r in check.check_context(model, [3, 4], None, "absent")] == [OPEN]
    model.c = replace(model.c, max_len=64)
    assert [r.verdict for r in check.check_context(model, [3, 4], said, "")] == [WRONG]


def test_a_prompt_that_fills_the_context_must_be_refused(folders, asked, monkeypatch):
    model, _ = checkpoint.load(folders["llama-3.2"], "cpu", torch.float32)
    monkeypatch.setattr(check, "rounds", lambda model, prompts, new: iter([None]))
    for said in (asked["llama-3.2"][2], None):
        assert [r.verdict for r in check.check_context(model, [3, 4], said, "")] == [WRONG]


# --- arithmetic


def test_differences_are_of_the_largest_logit():
    want = torch.zeros(70, 3)
    want[0, 0] = -8.0
    got = want.clone()
    got[69, 2] = 2.0
    assert check.apart(want, want) == 0 and check.apart(got, want) == 0.25
    got[3, 1] = float("nan")
    assert not check.apart(got, want) <= 1e9


def test_rounding_is_held_against_theirs():
    want, name = torch.full((70, 4), 2.0), torch.bfloat16

    def verdict(ours, theirs):
        half = {"half": None if theirs is None else want[:64] + theirs}
        ours = None if ours is None else want[:64] + ours
        (r,) = check.check_rounding(ours, half if theirs is not None else None, want, name, "absent")
        return r.verdict

    assert verdict(0.1, 0.1) == verdict(0.14, 0.1) == RIGHT and verdict(0.2, 0.1) == WRONG
    assert verdict(float("nan"), 0.1) == WRONG and verdict(0.1, None) == OPEN and verdict(None, 0.1) == NONE


def test_the_spread_reaches_the_last_position():
    *_, far = check.plan(replace(LLAMA, max_len=131_072), [1] * 256)
    assert isinstance(far, Pass) and far.positions[0] == 0 and far.positions[-1] == 131_071
    assert len(far.ids) == len(far.positions) == 48


@pytest.mark.parametrize("verdicts, words, status", [
    ([RIGHT, NONE, RIGHT], "All 2 checks are right", 0),
    ([RIGHT, OPEN], "Nothing differs, but 1 could not", 0),
    ([RIGHT, WRONG, OPEN], "1 of 2 differ: row 1", 1)])
def test_the_verdict_by_hand(verdicts, words, status):
    line, code = check.summary([Row(f"row {i}", "", "", v) for i, v in enumerate(verdicts)])
    assert line.startswith(words) and code == status


def test_what_transformers_cannot_do_is_no_verdict_on_us():
    def fails():
        raise RuntimeError("two\nlines")

    assert check.attempt(len, "abc") == (3, "")
    assert check.attempt(fails) == (None, "transformers: two lines")
    assert check.attempt(lambda: __import__("no_such_module")) == (None, "no_such_module is not installed")


@pytest.mark.parametrize("fails", ["loading", "reading"])
def test_where_their_tokenizer_fails_the_rest_is_checked(call, folders, monkeypatch, fails):
    theirs = check.quiet_tokenizer(folders["llama-3.2"])

    def broken(*args, **kwargs):
        raise AttributeError("no such\nthing")

    monkeypatch.setattr(check if fails == "loading" else type(theirs),
                        "quiet_tokenizer" if fails == "loading" else "__call__", broken)
    status, rows, data = call(folders["llama-3.2"])
    unknown = [r for r in data["checks"] if r["verdict"] == OPEN]
    assert [r["check"].split(":")[0] for r in unknown] == ["tokenizer"] + ["chat template"] * (
        1 if fails == "loading" else 3), "the fourth is refused before there are ids"
    assert {r["theirs"] for r in unknown} == {"transformers: no such thing"}
    assert status == 0 and WRONG not in rows.values() and rows["logits, 64 tokens at once"] == RIGHT


def test_a_tokenizer_that_is_too_large_for_the_model_is_refused(folders, tmp_path, capsys):
    c = replace(CONFIGS["llama-3.2"], vocab_size=20, bos=None, eos=())
    checkpoint.save(make(c), tmp_path, expected.byte_tokenizer())
    assert bench.main(["check", "--model", str(tmp_path)]) == 2
    assert "config.json has a vocabulary of 20" in capsys.readouterr().err
