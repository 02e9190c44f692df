"""The proof for a GPU, rehearsed on a CPU: its files, what is left out, and that a second start
goes on."""
from functools import partial

from tiny import command

from lab import proof

call = command(proof.main)
TINY = ["--device", "cpu", "--tiny"]


def test_a_rehearsal_of_what_is_measured(call, tmp_path):
    """The parts that need no minute; `make gpu-rehearsal` runs all of them."""
    flags = [*TINY, "--out", tmp_path, "--smollm", tmp_path / "none"]
    assert call(*flags, "--only", "waits", "models")[0] == 0
    said = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert said.keys() == {"waits.txt", "models.txt", "errors.txt", "contents.md"}
    assert said["waits.txt"].count("promised") == 4 and said["models.txt"].count(
        "same text True") == 2
    assert "| tests.txt | left out |" in said["contents.md"] and "a rehearsal" in said[
        "contents.md"]
    before = (tmp_path / "models.txt").read_text()
    (tmp_path / "waits.txt").write_text("".join(said["waits.txt"].splitlines(True)[:2]))   # cut off
    assert call(*flags, "--only", "waits")[0] == 0
    assert (tmp_path / "models.txt").read_text() == before


def test_a_row_that_fails_costs_no_other_and_is_tried_again(tmp_path):
    asked = []

    def value(name, fails):
        asked.append(name)
        return {"x": 1 / (not fails)}

    for failing, counted in ("b", 1), ("", 0):
        page = proof.Page(tmp_path / "part.txt")
        for name in "abc":
            page.row(name, partial(value, name, name == failing))
        assert page.failed == counted
    assert asked == ["a", "b", "c", "b"]
    lines = (tmp_path / "part.txt").read_text().splitlines()
    assert [line.split(":")[0] for line in lines] == ["| a | x 1 |", "FAILED b", "| c | x 1 |",
                                                      "| b | x 1 |"]


def test_a_gpu_that_is_not_there_is_one_line(call, tmp_path, monkeypatch):
    monkeypatch.setattr(proof.torch.cuda, "is_available", lambda: False)
    call.refuses(["--out", tmp_path], tmp_path, "no CUDA device", "--tiny")
