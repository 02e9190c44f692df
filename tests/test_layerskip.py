"""Skip sets as they are written, and how often a text accepts a draft: scored in one pass, and the same as in
the loop, position by position. Drafting itself is tested in test_speculative.py."""
import json
from dataclasses import replace

import pytest
import torch
from tiny import LIVELY, LLAMA, each_family, fork, make, warm

from layerskip import SelfDraft, ShortHead, Teacher, early_exit, without
from sampling import to_probs
from speculative import rounds
from support.cli import read_skip, read_vocab

IDS = [1, 5, 3, 2, 9, 4, 4, 7, 0, 16, 8, 8, 2, 11, 3, 3, 5]  # longer than the window of 5
DRAFTS = {
    "exit 1": early_exit(6, 1),
    "exit 4": early_exit(6, 4),
    "skip": without(6, attn=[1, 4], mlp=[2]),
    "skip the first attention": without(6, attn=[0]),
    "skip the first block": without(6, attn=[0], mlp=[0]),
    "only attention": without(6, mlp=range(6)),
    "no attention": without(6, attn=range(6)),
    "only the last MLP": [11],
}
each_draft = pytest.mark.parametrize("name", DRAFTS)


def first_rounds(m, sublayers, probs=to_probs, drafting=None):
    """The loop's first round behind each prefix of the text, with one drafted token: one row each."""
    prefixes = [IDS[: i + 1] for i in range(len(IDS))]
    return next(rounds(m, prefixes, 2, SelfDraft(drafting or m, sublayers, 1), probs))[1]


# --- a draft vocabulary


SOME = [4, 9, 0, 2, 16, 3, 8]


@each_family
def test_a_short_head_knows_its_tokens_and_no_other(models, family):
    m, x = models[family], models[family].embed(torch.tensor([IDS]))
    short, whole = ShortHead(m, SOME), m.unembed(x)
    got, others = short.unembed(x), sorted(set(range(17)) - set(SOME))
    assert got.shape == whole.shape and torch.allclose(got[..., SOME], whole[..., SOME], rtol=0, atol=1e-12)
    assert got[..., others].isneginf().all()
    assert torch.equal(short.rows, (m.tok if m.head is None else m.head)[SOME])
    assert short.share == 7 / 17 and short.blocks is m.blocks and short.c is m.c


@pytest.mark.parametrize("ids", [[], [1, 2, 1], [-1, 2], [3, 17]])
def test_a_draft_vocabulary_is_of_different_tokens_that_exist(models, ids):
    with pytest.raises(ValueError, match="a draft vocabulary needs different token ids from 0 to 16"):
        ShortHead(models["llama"], ids)


# --- acceptance


@each_family
@each_draft
def test_greedy_acceptance_is_whether_the_loop_accepts(models, family, name):
    m = models[family]
    got = Teacher(m, IDS).acceptance(DRAFTS[name])
    assert got.tolist() == first_rounds(m, DRAFTS[name]).accepted.tolist()


@pytest.mark.parametrize("ids", [None, SOME], ids=["whole", "short"])
@each_family
@each_draft
def test_acceptance_is_the_overlap_of_the_loops_distributions(models, family, name, ids):
    m, probs = models[family], lambda logits: to_probs(logits, 1.3, top_p=0.95)
    teacher, short = Teacher(m, IDS, probs), ids and ShortHead(m, ids)
    r, got = first_rounds(m, DRAFTS[name], probs, short), teacher.acceptance(DRAFTS[name], short)
    assert (got - torch.minimum(r.p[:, 0], r.draft.q[:, 0]).sum(-1)).abs().max() < 1e-12
    assert (teacher.p[0] - r.p[:, 0]).abs().max() < 1e-12
    assert (teacher.draft(DRAFTS[name], short)[0] - r.draft.q[:, 0]).abs().max() < 1e-12
    assert 0 <= float(got.min()) < float(got.max()) <= 1 + 1e-12
    assert r.draft.reuse is not None, "the stand-in shares the target's cache"
    assert set(r.draft.tokens.flatten().tolist()) <= set(ids or range(17))


@each_family
def test_acceptances_differ_between_drafts_and_places(models, family):
    """Else the tests above would prove little."""
    teacher = Teacher(models[family], IDS)
    seen = {name: teacher.acceptance(subs).tolist() for name, subs in DRAFTS.items()}
    assert len(set(map(tuple, seen.values()))) > 4
    assert sum(0 < sum(row) < len(IDS) for row in seen.values()) > 4


@each_family
@each_draft
def test_what_is_shared_need_not_be_computed(models, family, name):
    """The whole draft, run again from the embeddings on, gives the same."""
    m = models[family]
    teacher, T = Teacher(m, IDS, warm), len(IDS)
    own = torch.eye(T, dtype=torch.bool)
    with torch.inference_mode():
        cache = fork(teacher.cache)
        x = m.run(teacher.states[0], slice(0, T), cache, DRAFTS[name], slice(T, 2 * T), own)
        assert (teacher.draft(DRAFTS[name]) - warm(m.unembed(x))).abs().max() < 1e-12


@each_family
def test_one_teacher_scores_many_drafts(models, family):
    """Nothing of one draft is left for the next."""
    m = models[family]
    teacher = Teacher(m, IDS, warm)
    for name in [*DRAFTS, *reversed(DRAFTS)]:
        alone = Teacher(m, IDS, warm).acceptance(DRAFTS[name])
        assert torch.equal(teacher.acceptance(DRAFTS[name]), alone)
    assert len(teacher.states) == 13 and torch.equal(teacher.states[0], m.embed(torch.tensor([IDS])))


@each_family
def test_texts_of_one_token_and_of_the_whole_context(models, family):
    m = make(replace(LIVELY[family], max_len=len(IDS)))
    long = Teacher(m, IDS).acceptance(DRAFTS["skip"])
    assert torch.equal(long, Teacher(models[family], IDS).acceptance(DRAFTS["skip"]))
    for n in (1, 2, 5, 6):
        short = Teacher(m, IDS[:n]).acceptance(DRAFTS["skip"])
        assert torch.equal(short, long[:n]), "no place knows of later ones"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_acceptances_are_float64_whatever_the_weights(dtype):
    m = make(LLAMA).to(dtype)
    got = Teacher(m, IDS, warm).acceptance(DRAFTS["exit 4"])
    assert got.dtype == torch.float64 and got.device.type == "cpu" and got.shape == (len(IDS),)


@pytest.mark.parametrize("count", [0, 65, 1000])
def test_texts_that_are_empty_or_too_long_are_refused(models, count):
    message = f"^a text of {count} tokens cannot be scored: the context holds 1 to 64$"
    with pytest.raises(ValueError, match=message):
        Teacher(models["llama"], [1] * count)
    assert len(Teacher(models["llama"], [1] * 64).acceptance(range(4))) == 64


@pytest.mark.parametrize("bad", [17, -1])
def test_ids_that_the_model_does_not_have_are_refused(models, bad):
    with pytest.raises(ValueError, match=f"holds token id {bad}, but ids run from 0 to 16"):
        Teacher(models["llama"], [1, bad, 2])


@pytest.mark.parametrize("subs, words", [([], "no sub-layer"), ([0, 12], "must rise"), ([3, 1], "must rise"),
                                         ([1, 1], "must rise"), ([-1, 2], "must rise within 0 .. 11")])
def test_drafts_that_cannot_be_are_refused(models, subs, words):
    with pytest.raises(ValueError, match=words):
        Teacher(models["llama"], IDS).acceptance(subs)


# --- skip sets as users write them


@pytest.mark.parametrize("text, attn, mlp", [
    ("a3,m4", [3], [4]), ("m0", [], [0]), (" a5 , a0,m5,a5", [0, 5], [5]), ("a05", [5], [])])
def test_skip_sets_in_a_word(text, attn, mlp):
    assert read_skip(text, 6) == without(6, attn, mlp)


@pytest.mark.parametrize("content, attn, mlp", [
    ({"attn": [1, 4], "mlp": [2]}, [1, 4], [2]), ({"mlp": [5]}, [], [5]), ({}, [], []),
    ({"attn": [0], "alpha": 0.4, "model": "x"}, [0], [])])
def test_skip_sets_in_a_file(content, attn, mlp, tmp_path, monkeypatch):
    (tmp_path / "skip.json").write_text(json.dumps(content))
    assert read_skip(str(tmp_path / "skip.json"), 6) == without(6, attn, mlp)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a3.json").write_text(json.dumps(content))
    assert read_skip("a3.json", 6) == without(6, attn, mlp), "a file may be called almost like a skip set"


def test_no_acceptance_is_above_1(models, monkeypatch):
    """Whatever two rounded distributions sum to."""
    teacher = Teacher(models["llama"], IDS)
    teacher.p = teacher.p * 1.0001
    monkeypatch.setattr(teacher, "draft", lambda sublayers, drafting: teacher.p)
    assert teacher.acceptance(range(2)).tolist() == [1.0] * len(IDS)


@pytest.mark.parametrize("text, error, words", [
    ("a6", ValueError, "attention of block 6: blocks run from 0 to 5"),
    ("m3,a1,m77", ValueError, "MLP of block 77"),
    (",".join(f"{kind}{i}" for kind in "am" for i in range(6)), ValueError, "leaves no sub-layer"),
    ("a3,m", FileNotFoundError, "a3,m"), ("a3,,m4", FileNotFoundError, "a3,,m4"),
    ("a1234567", FileNotFoundError, "a1234567"), ("A3", FileNotFoundError, "A3")])
def test_skip_sets_that_make_no_sense_are_refused(text, error, words):
    with pytest.raises(error, match=words):
        read_skip(text, 6)


@pytest.mark.parametrize("content, words", [
    ('{"attn": 3}', '"attn" and "mlp" must be lists of block numbers'),
    ('{"mlp": ["3"]}', "lists of block numbers"), ('{"attn": [true]}', "lists of block numbers"),
    ('{"attn": [1.0]}', "lists of block numbers"), ('{"attn": null}', "lists of block numbers"),
    ("[3]", "expected a JSON object"), ('{"attn": [6]}', "attention of block 6")])
def test_skip_files_that_make_no_sense_are_refused(content, words, tmp_path):
    (tmp_path / "skip.json").write_text(content)
    with pytest.raises(ValueError, match=words):
        read_skip(str(tmp_path / "skip.json"), 6)


@pytest.mark.parametrize("content", ['{"ids": 3}', '{"ids": []}', '{"ids": [1, 1]}', '{"ids": [17]}', "{}",
                                     '{"ids": [-1]}', '{"ids": [1.0]}', '{"ids": [true]}', '{"ids": ["1"]}'])
def test_vocabularies_that_make_no_sense_are_refused(content, tmp_path):
    path = tmp_path / "vocab.json"
    path.write_text('{"ids": [16, 0, 3], "share": 0.5}')
    assert read_vocab(str(path), 17) == [16, 0, 3], "in the order of the file"
    path.write_text(content)
    with pytest.raises(ValueError, match='expected different token ids from 0 to 16 under "ids"'):
        read_vocab(str(path), 17)
