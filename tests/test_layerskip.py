"""Skip sets, how users write them, and how often a text accepts a draft: scored in one pass, and the same as
in the loop, position by position. Drafting itself is tested in test_speculative.py."""
import json
from dataclasses import replace

import pytest
import torch
from tiny import LIVELY, LLAMA, each_family, make, warm

from layerskip import SelfDraft, ShortHead, Teacher, early_exit, skipped, without
from sampling import to_probs
from speculative import rounds
from support.cli import read_beside, read_skip, read_vocab

IDS = [1, 5, 3, 2, 9, 4, 4, 7, 0, 16, 8, 8, 2, 11, 3, 3, 5]  # longer than the window of 5
SOME = [4, 9, 0, 2, 16, 3, 8]
DRAFTS = {
    "exit": early_exit(6, 4),
    "skip": without(6, attn=[1, 4], mlp=[2]),
    "skip the first block": without(6, attn=[0], mlp=[0]),
    "only attention": without(6, mlp=range(6)),
}


# --- skip sets


def test_skip_sets_by_hand():
    assert without(3) == [0, 1, 2, 3, 4, 5], "nothing skipped: all sub-layers"
    assert without(3, attn=[1], mlp=[0, 2]) == [0, 3, 4], "attention i is sub-layer 2i, its MLP 2i + 1"
    assert without(3, attn=(2, 1, 1)) == [0, 1, 3, 5], "any order, and twice is once"
    assert skipped(3, [0, 3, 4]) == ([1], [0, 2])
    assert early_exit(3, 1) == [0, 1] and early_exit(3, 3) == without(3)


# --- a draft vocabulary


@each_family
def test_a_short_head_knows_its_tokens_and_no_other(models, family):
    m, x = models[family], models[family].embed(torch.tensor([IDS]))
    short, whole = ShortHead(m, SOME), m.unembed(x)
    got, others = short.unembed(x), sorted(set(range(17)) - set(SOME))
    assert got.shape == whole.shape and (got - whole)[..., SOME].abs().max() < 1e-12
    assert got[..., others].isneginf().all()
    assert short.share == 7 / 17 and short.blocks is m.blocks and short.c is m.c


# --- acceptance


@pytest.mark.parametrize("ids", [None, SOME], ids=["whole", "short"])
@each_family
def test_acceptance_is_the_overlap_of_the_loops_distributions(models, family, ids):
    """The loop's first round behind each prefix, of one drafted token. One teacher scores all drafts."""
    m, probs = models[family], lambda logits: to_probs(logits, 1.3, top_p=0.95)
    teacher, short, seen = Teacher(m, IDS, probs), ids and ShortHead(m, ids), set()
    prefixes = [IDS[: i + 1] for i in range(len(IDS))]
    for sublayers in DRAFTS.values():
        _, r = next(rounds(m, prefixes, 2, SelfDraft(short or m, sublayers, 1), probs))
        got = teacher.acceptance(sublayers, short)
        assert (got - torch.minimum(r.p[:, 0], r.draft.q[:, 0]).sum(-1)).abs().max() < 1e-12
        assert (teacher.draft(sublayers, short)[0] - r.draft.q[:, 0]).abs().max() < 1e-12
        assert 0 <= float(got.min()) < float(got.max()) <= 1
        seen.add(tuple(got.tolist()))
    assert len(seen) == len(DRAFTS), "acceptances that do not differ prove little"


@each_family
def test_texts_of_one_token_and_of_the_whole_context(models, family):
    m = make(replace(LIVELY[family], max_len=len(IDS)))
    long = Teacher(m, IDS).acceptance(DRAFTS["skip"])
    assert torch.equal(long, Teacher(models[family], IDS).acceptance(DRAFTS["skip"]))
    for n in (1, 2, 5, 6):
        short = Teacher(m, IDS[:n]).acceptance(DRAFTS["skip"])
        assert torch.equal(short, long[:n]), "no place knows of later ones"


def test_acceptances_are_float64_and_never_above_1(monkeypatch):
    """Whatever the weights are, and whatever two rounded distributions sum to."""
    teacher = Teacher(make(LLAMA).to(torch.bfloat16), IDS, warm)
    got = teacher.acceptance(DRAFTS["exit"])
    assert got.dtype == torch.float64 and got.device.type == "cpu" and got.shape == (len(IDS),)
    teacher.p = teacher.p * 1.0001
    assert teacher.overlap(teacher.p).tolist() == [1.0] * len(IDS)


@pytest.mark.parametrize("call, message", [
    (lambda m: without(3, attn=[-1]), "attention of block -1"),
    (lambda m: early_exit(3, 0), "exit layer.* 3.* 0"),
    (lambda m: early_exit(3, 4), "exit layer.* 3.* 4"),
    (lambda m: Teacher(m, []), "a text of 0 tokens cannot be scored: the context holds 1 to 64"),
    (lambda m: Teacher(m, [1] * 65), "a text of 65 tokens"),
    (lambda m: Teacher(m, [1, 17, 2]), "holds token id 17, but ids run from 0 to 16"),
    (lambda m: Teacher(m, [1, -1, 2]), "holds token id -1"),
    (lambda m: Teacher(m, IDS).acceptance([]), "no sub-layer"),
    (lambda m: Teacher(m, IDS).acceptance([0, 12]), "must rise within 0 .. 11"),
    (lambda m: Teacher(m, IDS).acceptance([-1, 2]), "must rise"),
    (lambda m: Teacher(m, IDS).acceptance([1, 1]), "must rise"),
    (lambda m: ShortHead(m, []), "a draft vocabulary needs different token ids from 0 to 16"),
    (lambda m: ShortHead(m, [1, 2, 1]), "different token ids"),
    (lambda m: ShortHead(m, [-1, 2]), "different token ids"),
    (lambda m: ShortHead(m, [3, 17]), "different token ids")])
def test_what_cannot_be_is_refused(models, call, message):
    with pytest.raises(ValueError, match=message):
        call(models["llama"])


# --- files and words


@pytest.mark.parametrize("text, attn, mlp", [
    ("a3,m4", [3], [4]), (" a5 , a0,m5,a5", [0, 5], [5]), ('{"attn": [1, 4], "mlp": [2]}', [1, 4], [2]),
    ('{"mlp": [5], "alpha": 0.4}', [], [5])])
def test_skip_sets_as_users_write_them(text, attn, mlp, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a3.json").write_text(text)     # a file may be called almost like a skip set
    assert read_skip("a3.json" if text[0] == "{" else text, 6) == without(6, attn, mlp)


@pytest.mark.parametrize("read, size, text", [
    *((read_skip, 6, text) for text in ('{"attn": 3}', '{"mlp": ["3"]}', '{"attn": [true]}', "[3]", "{}",
                                        '{"attn": [1.0]}', '{"attn": null}', '{"attn": [6]}')),
    *((read_vocab, 17, text) for text in ('{"ids": 3}', '{"ids": []}', '{"ids": [1, 1]}', '{"ids": [17]}',
                                          '{"ids": [-1]}', '{"ids": [1.0]}', '{"ids": [true]}', "{}"))])
def test_files_that_make_no_sense_are_refused(read, size, text, tmp_path):
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(ValueError, match="file.json: expected|lists of block numbers|block 6"):
        read(str(tmp_path / "file.json"), size)


@pytest.mark.parametrize("text, error", [
    ("a6", ValueError), ("m3,a1,m77", ValueError), (",".join(f"a{i},m{i}" for i in range(6)), ValueError),
    ("a3,m", FileNotFoundError), ("a3,,m4", FileNotFoundError), ("A3", FileNotFoundError)])
def test_words_that_make_no_sense_are_refused(text, error):
    with pytest.raises(error, match="of block|no sub-layer|" + text):
        read_skip(text, 6)


def test_what_lies_beside_the_weights_by_chance_is_left_out(tmp_path):
    for name, read, ours, chance in (
            ("skip", read_skip, {"attn": [1]}, {"rows": 3}),
            ("draft_vocab", read_vocab, {"ids": [16, 0]}, {"hello": 0})):
        assert read_beside(tmp_path, name, read, 17) is None, "there is no such file"
        for content, want in ((chance, None), (ours, read_skip("a1", 17) if name == "skip" else [16, 0])):
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
            assert read_beside(tmp_path, name, read, 17) == want
