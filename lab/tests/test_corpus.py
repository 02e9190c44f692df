"""Text to tokens and back, what is held out, and which windows a step draws."""
import pytest
import torch
from stories import story

from lab.corpus import BOUNDARY, Corpus, read


def test_documents_come_back_as_they_were_and_the_end_is_held_out(tmp_path):
    odd = "".join(map(chr, range(14, 0xD800))) + "\U0010ffff\ufffe\u200b\ufeff"
    told = ["one", "  two\n\nlines ", odd, *story(1).split(BOUNDARY)]
    (tmp_path / "a").write_text(BOUNDARY.join(["", "\n", *(f"\n{text}\n" for text in told)]))
    for length in (16, 4000):   # a fiftieth of the text, or one window
        c = read([str(tmp_path / "a")], [], length, 300)
        whole = torch.cat([c.train["a"], c.valid["a"]])
        texts = c.tokenizer.decode(whole.tolist(), skip_special_tokens=False).split(BOUNDARY)
        assert texts == ["", *told] and int(whole[0]) == 0
        assert len(c.valid["a"]) == max(length + 1, int(0.02 * len(whole)))


def test_the_tokenizer_has_not_seen_what_is_measured_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {"a": story(0), "b": story(1), "v": "never " * 99}.items():
        (tmp_path / name).write_text(text)
    runs = [read(["a", b], v, 16, 300) for b, v in (("b=2", ["v"]), ("b", ["v"]), ("b", []))]
    assert [*runs[0].train, *runs[0].valid] == ["a", "b", "v"] and runs[0].weights == [1, 2]
    assert len({c.tokenizer.to_str() for c in runs}) == 1


def test_windows_follow_from_seed_and_step_and_reach_every_place():
    def windows(step, seed=0, rows=32):
        streams = {"a": torch.arange(40), "b": torch.arange(1000, 1020)}
        return Corpus(streams, {}, (1.0, 3.0), None).batch(seed, step, rows, 8)

    seen = torch.cat([windows(step) for step in range(99)])
    assert seen.shape == (99 * 32, 9) and bool((seen.diff(dim=1) == 1).all())
    assert {*seen[:, 0].tolist()} == {*range(40 - 8), *range(1000, 1020 - 8)}
    torch.manual_seed(5)
    assert torch.equal(windows(1), seen[32:64])
    assert not torch.equal(seen[:32], seen[32:64]) and not torch.equal(windows(0, 1), seen[:32])
    share = float((windows(0, rows=4000)[:, 0] >= 1000).double().mean())
    assert share == pytest.approx(3 * 20 / (40 + 3 * 20), abs=0.03), "by weight times size"


@pytest.mark.parametrize("files, valid, word", [
    (["a=0"], [], "a=0"), (["a=x"], [], "a=x"), (["a", "a"], [], "same name"), (["c"], [], "c"),
    (["x"], ["a"], "few"), (["a"], ["x"], "few"), (["empty"], [], "empty"), (["ff"], [], "UTF-8")])
def test_bad_files_are_refused(files, valid, word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {"a": story(0).encode(), "x": b"x", "empty": b"\n", "ff": b"\xff"}.items():
        (tmp_path / name).write_bytes(text)
    with pytest.raises((ValueError, OSError), match=word):
        read(files, valid, 16, 300)
