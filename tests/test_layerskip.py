"""Skip sets, how users write them, and how often a text accepts a draft, as in the loop. (That
drafts are what the sub-layers say: test_speculative.py.)"""
import json
from dataclasses import replace

import pytest
import torch
from tiny import LIVELY, LLAMA, each_family, make, warm

from layerskip import SelfDraft, early_exit, without
from machine.files import read_beside
from machine.quant import quantise
from methods.standin import ShortHead, most_frequent, read_vocab
from sampling import to_probs
from search import Teacher
from speculative import rounds
from support.skips import read_skip

IDS = [1, 5, 3, 2, 9, 4, 4, 7, 0, 16, 8, 8, 2, 11, 3, 3, 5]  # longer than the window of 5
SOME = [4, 9, 0, 2, 16, 3, 8]
DRAFTS = {
    "exit": early_exit(6, 4),
    "skip": without(6, attn=[1, 4], mlp=[2]),
    "skip the first block": without(6, attn=[0], mlp=[0]),
    "only attention": without(6, mlp=range(6))}


# --- skip sets


def test_skip_sets_by_hand():
    assert without(3, attn=[1], mlp=[0, 2]) == [0, 3, 4], "attention i is sub-layer 2i"
    assert without(3, attn=(2, 1, 1)) == [0, 1, 3, 5], "any order, and twice is once"
    assert early_exit(3, 1) == [0, 1] and early_exit(3, 3) == without(3) == [*range(6)]


# --- a draft vocabulary


def test_a_short_head_knows_its_tokens_and_no_other(models):
    """Of a head in int8, too."""
    others = sorted(set(range(17)) - set(SOME))
    for m in (models["gemma2"], quantise(models["gemma2"], head="int8")):
        x, short = m.embed(torch.tensor([IDS])), ShortHead(m, SOME)
        got, whole = short.unembed(x), m.unembed(x)
        assert got.shape == whole.shape and (got - whole)[..., SOME].abs().max() < 1e-12
        assert got[..., others].isneginf().all() and short.share == 7 / 17


def test_a_draft_vocabulary_is_of_the_most_frequent_tokens():
    texts = [3, 1, 1, 2, 2, 7], [1, 3, 2, 7], [2, 7]
    assert most_frequent(texts, 3) == {"ids": [2, 1, 7], "share": 10 / 12}


# --- acceptance, as a Teacher scores it


@pytest.mark.parametrize("ids", [None, SOME], ids=["whole", "short"])
@each_family
def test_acceptance_is_that_of_the_loop(models, family, ids):
    """Of its first round after each prefix, of one drafted token. One teacher scores all."""
    m, probs = models[family], lambda logits: to_probs(logits, 1.3, top_p=0.95)
    teacher, short, seen = Teacher(m, IDS, probs), ids and ShortHead(m, ids), set()
    prefixes = [IDS[: i + 1] for i in range(len(IDS))]
    for sublayers in DRAFTS.values():
        _, r = next(rounds(m, prefixes, 2, SelfDraft(short or m, sublayers, 1), probs))
        got = teacher.acceptance(sublayers, short)
        assert (got - torch.minimum(r.p[:, 0], r.draft.q[:, 0]).sum(-1)).abs().max() < 1e-12
        assert (teacher.q(sublayers, short)[0] - r.draft.q[:, 0]).abs().max() < 1e-12
        assert 0 <= float(got.min()) < float(got.max()) <= 1
        seen.add(tuple(got.tolist()))
    assert len(seen) == len(DRAFTS), "acceptances that do not differ prove little"


def test_texts_of_one_token_and_of_the_whole_context(models):
    m = make(replace(LIVELY["gemma2"], max_len=len(IDS)))
    long = Teacher(models["gemma2"], IDS).acceptance(DRAFTS["skip"])
    for n in (1, len(IDS)):
        assert torch.equal(Teacher(m, IDS[:n]).acceptance(DRAFTS["skip"]), long[:n])


def test_acceptances_are_float64_and_from_0_to_1():
    """Whatever the weights are, whatever two rounded distributions sum to,
    and where a draft overflows."""
    teacher = Teacher(make(LLAMA).to(torch.bfloat16), IDS, warm)
    assert teacher.acceptance(DRAFTS["exit"]).dtype == torch.float64
    assert teacher.overlap(torch.full_like(teacher.p, torch.nan)).tolist() == [0.0] * len(IDS)
    teacher.p = teacher.p * 1.0001
    assert teacher.overlap(teacher.p).tolist() == [1.0] * len(IDS)


@pytest.mark.parametrize("call, message", [
    (lambda m: without(3, attn=[-1]), "attention of block -1"),
    (lambda m: early_exit(3, 0), "exit layer.* 3.* 0"),
    (lambda m: read_skip("m3,a1,m77", 6), "MLP of block 77"),
    (lambda m: read_skip(",".join(f"a{i},m{i}" for i in range(6)), 6), "no sub-layer"),
    (lambda m: Teacher(m, []), "a text of 0 tokens cannot be scored: the context holds 1 to 64"),
    (lambda m: Teacher(m, IDS).acceptance([]), "no sub-layer"),
    (lambda m: Teacher(m, IDS).acceptance([0, 12]), "must rise within 0 .. 11"),
    (lambda m: most_frequent([[5], [5, 2]], 3), "only 2 different tokens")])
def test_what_cannot_be_is_refused(models, call, message):
    with pytest.raises(ValueError, match=message):
        call(models["llama"])


# --- files and words


def test_skip_sets_as_users_write_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "a3.json"     # a file may be called almost like a skip set
    for text, attn, mlp in (('{"attn": [1, 4], "mlp": [2]}', [1, 4], [2]),
                            ('{"mlp": [5], "alpha": 0.4}', [], [5])):
        file.write_text(text)
        assert read_skip("a3.json", 6) == without(6, attn, mlp)
    assert read_skip("a3,m4", 6) == without(6, [3], [4])
    assert read_skip(" a5 , a0,m5,a5", 6) == without(6, [0, 5], [5])
    for words in ("a3,m", "a3,,m4", "A3"):
        with pytest.raises(FileNotFoundError, match=words):
            read_skip(words, 6)


@pytest.mark.parametrize("read, size, texts", [
    (read_skip, 6,
     ['{"mlp": ["3"]}', '{"attn": [true]}', '{"attn": null}', '{"attn": [6]}', "[3]", "{}"]),
    (read_vocab, 17,
     ['{"ids": 3}', '{"ids": []}', '{"ids": [1, 1]}', '{"ids": [17]}', '{"ids": [true]}'])])
def test_files_that_make_no_sense_are_refused(read, size, texts, tmp_path):
    file = tmp_path / "file.json"
    for text in texts:
        file.write_text(text)
        with pytest.raises(ValueError, match="file.json: expected|block 6"):
            read(str(file), size)


def test_what_lies_beside_weights_by_chance_is_left_out(tmp_path):
    file = tmp_path / "skip.json"
    assert read_beside(file, read_skip, 17) is None, "there is no such file"
    for content, want in (({"rows": 3}, None), ({"attn": [1]}, without(17, attn=[1]))):
        file.write_text(json.dumps(content))
        assert read_beside(file, read_skip, 17) == want
