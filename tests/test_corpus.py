"""Text to tokens and back, what is held out, and which windows a step draws."""
import math
import random
import sysconfig

import pytest
import torch
from tiny import LLAMA, make
from tokenizers import Tokenizer, models, pre_tokenizers

import checkpoint
from support import corpus
from support.corpus import BOUNDARY, Corpus, read, train_tokenizer

TEXTS = ["Lily saw the cat and the cat saw Lily.\nThe end.", "Tom lost the ball; Tom found the ball.",
         "def f(x):\n    return x + 1", "日本語 and naïve café 🙂"]
TRICKY = ["".join(map(chr, range(256))), *map(chr, range(256)), " leading", "trailing ", "  both  ", " ",
          "\t\n \n\n", "a\r\nb", "🙂 \U0001f469\u200d\U0001f467 e\u0301", "\U0010ffff\ufffe\u200b\ufeff",
          "it's 12,345.67!", "日本語のテキスト"]


def tokenizer():
    return train_tokenizer(TEXTS, 300)


def write(folder, **texts):
    """Files of a name and content each; their paths."""
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8", newline="")
    return [str(folder / f"{name}.txt") for name in texts]


def story(seed, words=400):
    draw = random.Random(seed)
    return " ".join(draw.choice(["Lily", "Tom", "saw", "the", "cat", "ball", "and"]) for _ in range(words))


# --- the tokenizer


def test_any_text_comes_back_as_it_was():
    t, draw = tokenizer(), random.Random(0)
    scalars = [*range(0xD800), *range(0xE000, 0x110000)]  # all of Unicode but surrogates
    texts = TRICKY + ["".join(chr(draw.choice(scalars)) for _ in range(30)) for _ in range(50)]
    for text in texts:
        ids = t.encode(text, add_special_tokens=False).ids
        assert t.decode(ids) == text, f"{text!r} becomes {t.decode(ids)!r}"


def test_every_byte_has_a_token_and_merges_come_after_them():
    t = tokenizer()
    assert {t.token_to_id(c) for c in pre_tokenizers.ByteLevel.alphabet()} == set(range(1, 257))
    assert t.get_vocab_size() == 300 and t.token_to_id("Ġthe") > 256, "what is frequent is one token"
    assert train_tokenizer(["a"], 4096).get_vocab_size() == 257, "no more merges than the text has"


def test_a_prompt_begins_with_one_id_0_and_it_ends_a_text_too():
    t = tokenizer()
    assert t.token_to_id(BOUNDARY) == 0
    plain = t.encode("Lily saw", add_special_tokens=False).ids
    assert t.encode("Lily saw").ids == [0, *plain] and 0 not in plain
    assert checkpoint.encode(t, "Lily saw", bos=0) == [0, *plain], "the begin-of-text id must not be doubled"
    assert t.decode([0, *plain, 0]) == "Lily saw", "it is a special token: not part of the text"


def test_a_tokenizer_that_was_saved_gives_the_same_ids(tmp_path):
    t = tokenizer()
    checkpoint.save(make(LLAMA), tmp_path, t)
    again = checkpoint.load(tmp_path, "cpu")[1]
    for text in TRICKY + TEXTS:
        assert again.encode(text).ids == t.encode(text).ids
        assert again.decode(again.encode(text).ids) == text


@pytest.mark.parametrize("vocab", [1, 256])
def test_a_vocabulary_must_hold_all_bytes(vocab):
    with pytest.raises(ValueError, match=f"257.*{vocab}$"):
        train_tokenizer(TEXTS, vocab)
    assert train_tokenizer(TEXTS, 257).get_vocab_size() == 257, "the bytes and the separator alone will do"


# --- documents


def test_documents_are_what_stands_between_two_separators(tmp_path):
    path = tmp_path / "a.txt"
    pieces = "", "\none\n", "", "\n\n  two\n\nlines \n", "\n", "three"
    path.write_text(BOUNDARY.join(pieces), encoding="utf-8")
    assert corpus.read_documents(path) == ["one", "  two\n\nlines ", "three"], "newlines at the ends only"


def test_a_stream_has_one_begin_of_text_before_each_document():
    t = tokenizer()
    one, two = (t.encode(text, add_special_tokens=False).ids for text in TEXTS[:2])
    s = corpus.stream(t, TEXTS[:2])
    assert s.tolist() == [0, *one, 0, *two]
    assert s.dtype == torch.int32


def test_the_standard_library_is_the_default(monkeypatch, tmp_path):
    root = tmp_path / "test" / "lib"   # the folder above may have any name
    files = {"a.py": "\nimport b\n", "pkg/b.py": "x = 1", "pkg/empty.py": "\n\n", "c.txt": "no",
             "test/t.py": "no", "pkg/tests/t.py": "no", "site-packages/s.py": "no"}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "z.py").write_bytes(b"y = '\xff'")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    assert corpus.own_sources() == ["import b", "x = 1", "y = ''"]


def test_the_standard_library_is_there():
    texts = corpus.own_sources()
    assert len(texts) > 100 and all(texts) and sum(map(len, texts)) > 1e6
    assert any("class ArgumentParser" in text for text in texts)
    assert not any(BOUNDARY in text for text in texts), "it would be taken for a separator"


def test_without_files_the_standard_library_is_read(monkeypatch):
    monkeypatch.setattr(corpus, "own_sources", lambda: [story(0), story(1)])
    c = read([], [], 16, 300)
    assert list(c.train) == list(c.valid) == ["python"] and c.weights == [1.0]
    want = corpus.stream(c.tokenizer, [story(0), story(1)])
    assert torch.equal(torch.cat([c.train["python"], c.valid["python"]]), want)


# --- training and validation


def test_the_end_of_each_file_is_held_out(tmp_path):
    files = write(tmp_path, a=story(0, 3000), b=BOUNDARY.join([story(1, 60), story(2, 60)]))
    c = read(files, [], 16, 300)
    for name, texts in {"a.txt": [story(0, 3000)], "b.txt": [story(1, 60), story(2, 60)]}.items():
        whole = corpus.stream(c.tokenizer, texts)
        held_out = max(17, int(0.02 * len(whole)))
        assert len(c.valid[name]) == held_out
        assert torch.equal(torch.cat([c.train[name], c.valid[name]]), whole), "disjoint, and nothing is lost"
    assert len(c.valid["a.txt"]) > 17, "the test must see both rules"
    assert len(c.valid["b.txt"]) == 17, "at least one window and the token after it"


def test_files_to_measure_on_leave_the_training_text_alone(tmp_path):
    files = write(tmp_path, a=story(0), b=story(1), v=story(2), w=story(3))
    c = read([files[0], f"{files[1]}=2.5"], files[2:], 16, 300)
    assert (list(c.train), list(c.valid), c.weights) == (["a.txt", "b.txt"], ["v.txt", "w.txt"], [1.0, 2.5])
    for name, text in zip("abvw", map(story, range(4)), strict=True):
        assert torch.equal((c.train | c.valid)[f"{name}.txt"], corpus.stream(c.tokenizer, [text]))
    without = train_tokenizer([story(0), story(1)], 300)
    assert c.tokenizer.to_str() == without.to_str(), "the tokenizer must not have seen what is measured on"


def test_the_hash_follows_texts_and_weights(tmp_path):
    a, b = write(tmp_path, a=story(0), b=story(1))
    t = tokenizer()
    hashes = [read(files, [], 16, tokenizer=t).hash() for files in ([a], [b], [a, b], [a, f"{b}=2"])]
    assert len(set(hashes)) == 4
    assert hashes[0] == read([a], [], 16, tokenizer=t).hash()


# --- batches


def counting(weights=(1.0, 3.0), sizes=(40, 20)):
    """Streams of consecutive numbers that tell file and place."""
    train = {str(i): torch.arange(n, dtype=torch.int32) + 1000 * i for i, n in enumerate(sizes)}
    return Corpus(train, {}, list(weights), None)


def test_a_batch_depends_on_seed_and_step_only():
    c = counting()
    first = c.batch(3, 7, 4, 8)
    c.batch(3, 8, 4, 8)
    torch.manual_seed(5)
    assert torch.equal(c.batch(3, 7, 4, 8), first), "a repeated step must draw what it drew"
    assert not torch.equal(c.batch(3, 8, 4, 8), first), "every step must draw anew"
    assert not torch.equal(c.batch(4, 7, 4, 8), first), "the seed is ignored"
    assert torch.equal(counting().batch(3, 7, 4, 8), first)


def test_windows_are_whole_and_lie_within_one_file():
    c = counting()
    seen = torch.cat([c.batch(0, step, 32, 8) for step in range(50)])
    assert seen.shape == (1600, 9) and seen.dtype == torch.int32
    assert bool((seen.diff(dim=1) == 1).all()), "a window crosses the end of its file"
    starts = set(seen[:, 0].tolist())
    assert starts == {*range(40 - 8), *range(1000, 1020 - 8)}, "every place must be drawn, first and last too"
    assert {39, 1019} <= set(seen[:, -1].tolist()), "the last token of a file is never trained"


def test_windows_of_a_grid_begin_at_its_multiples():
    c = counting()
    seen = torch.cat([c.batch(0, step, 32, 8, grid=9) for step in range(20)])
    assert {*seen[:, 0].tolist()} == {0, 9, 18, 27, 1000, 1009} and bool((seen.diff(dim=1) == 1).all())


def test_files_are_drawn_by_weight_times_size():
    c, n = counting(weights=(1.0, 3.0), sizes=(40, 20)), 4000
    share = float((c.batch(0, 0, n, 8)[:, 0] >= 1000).double().mean())
    want = 3 * 20 / (1 * 40 + 3 * 20)
    assert abs(share - want) < 4 * math.sqrt(want * (1 - want) / n), f"{share} of the windows, not {want}"


@pytest.mark.parametrize("scale", [1e-320, 1e-50, 5e307])
def test_only_ratios_of_weights_matter(scale):
    c = counting(weights=(2 * scale, 2 * scale))
    assert torch.equal(c.batch(0, 0, 64, 8), counting(weights=(1.0, 1.0)).batch(0, 0, 64, 8))


# --- refusals (the command line's are in test_train.py)


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", "x", ""])
def test_a_weight_must_be_a_positive_number(weight, tmp_path):
    (file,) = write(tmp_path, a=story(0))
    with pytest.raises(ValueError, match=f"{file}={weight}: the weight must be"):
        read([f"{file}={weight}"], [], 16, 300)


def test_two_files_of_one_name_are_refused(tmp_path):
    for name in "xy":
        (tmp_path / name).mkdir()
    files = [f for name in "xy" for f in write(tmp_path / name, a=story(0))]
    for args in ((files, []), (files[:1], files)):
        with pytest.raises(ValueError, match=f"{files[1]}: two files have the same name"):
            read(*args, 16, 300)
    assert read(files[:1], files[1:], 16, 300).valid.keys() == {"a.txt"}, "one to train, one to measure: fine"


def test_text_for_one_window_is_enough_and_less_is_refused(tmp_path):
    t = Tokenizer(models.BPE({BOUNDARY: 0, "a": 1}, []))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    a, v, short = write(tmp_path, a="a" * 16, v="a" * 16, short="a" * 15)
    c = read([a], [v], 16, tokenizer=t)
    assert len(c.train["a.txt"]) == len(c.valid["v.txt"]) == 17 == c.batch(0, 0, 1, 16).shape[1]
    for files, valid in (([short], [v]), ([a], [short]), ([a], [])):
        with pytest.raises(ValueError, match=r"(short|a)\.txt: (16|0) tokens are too few"):
            read(files, valid, 16, tokenizer=t)
