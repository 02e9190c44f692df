"""A first few of the fuzzer's cases, each kind of corruption among them, and whether the fuzzer itself would
notice what it looks for.

The one thing to remember: `python tests/fuzz.py` runs ten thousand cases, or as many as half an
hour allows.
"""
import mmap
import os
import pickle
import random
import shutil
import signal
import sys
import time

import fuzz
import pytest
import torch


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    for name, base in fuzz.BASES.items():
        fuzz.make_base(folder / name, *base)
    return folder


def test_the_first_cases_pass_and_every_kind_is_among_them(capsys):
    status, cases = fuzz.main(["--cases", str(len(fuzz.KINDS))]), len(fuzz.KINDS)
    out = capsys.readouterr().out
    assert status == 0, out
    assert out.endswith(f"\n{cases} passed, 0 failed\n") and all(kind in out for kind in fuzz.KINDS)


def test_a_run_that_runs_out_of_time_says_how_far_it_came(capsys, monkeypatch):
    monkeypatch.setattr(fuzz, "BATCH", 1)
    assert fuzz.main(["--first", "50", "--cases", "60", "--minutes", "1e-9", "--seed", "7"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("seed 7, cases 50 to 59, at most 1e-09 minutes\n")
    assert "the time is up after 1 of 10 cases: go on with --first 51 --seed 7\n" in out
    assert out.endswith("\n1 passed, 0 failed\n")


def prepared(number, bases, room):
    """The case without the names of temporary folders, and what is in its folder."""
    room.mkdir()
    case = fuzz.prepare(number, 0, bases, room)
    files = {p.relative_to(room): p.read_bytes() if p.is_file() else os.path.lexists(p)
             for p in sorted(room.rglob("*")) if not p.is_char_device()}
    shutil.rmtree(room)
    return case.kind, case.how, [a.replace(str(room), "") for a in case.argv], files


def test_a_case_is_the_same_on_every_run_and_no_kind_leaves_all_as_it_was(bases, tmp_path):
    changed = set()
    for number in range(2 * len(fuzz.KINDS)):
        case = prepared(number, bases, tmp_path / "room")
        assert case == prepared(number, bases, tmp_path / "room")
        kind, how, _, files = case
        base = bases / how.split(",")[0]
        good = {p.name: p.read_bytes() for p in base.iterdir()}
        if {path.name: content for path, content in files.items() if path.name in good} != good:
            changed.add(kind)
    assert changed == set(fuzz.KINDS) - {"intact", "files: pickle beside"}


@pytest.mark.parametrize("protocol", range(8))
def test_a_pickle_that_is_opened_leaves_a_mark(protocol, tmp_path):
    file = tmp_path / "folder" / "model.bin"
    file.parent.mkdir()
    file.write_bytes(fuzz.pickled(file, random.Random(protocol)))
    if file.read_bytes().startswith(b"PK"):  # as torch.save writes it
        torch.load(file, weights_only=False)
    else:
        pickle.loads(file.read_bytes())
    assert (tmp_path / "marker").exists()


FINE = '{"outputs": [{"ids": [1, 2]}]}\n'


@pytest.mark.parametrize("status, out, err, want, words", [
    (0, FINE, "", None, None), (0, FINE, "", 0, None), (2, "", "generate.py: no\n", None, None),
    (0, FINE, "", 2, "status 0, not 2"), (2, "", "generate.py: no\n", 0, "status 2, not 0"),
    (1, FINE, "", None, "status 1"), (None, "", "", None, "status None"),
    (0, FINE, "warning\n", None, "on stderr"), (0, "", "", None, "not one line"),
    (0, FINE + FINE, "", None, "not one line"), (0, FINE.replace("1", "NaN"), "", None, "NaN"),
    (0, FINE.replace("1", "1, 1, 1, 1"), "", None, "odd ids"), (2, FINE, "generate.py: no\n", None, "stdout"),
    (2, "", "", None, "plain"), (2, "", "no\n", None, "plain"), (2, "", "generate.py: a\nb\n", None, "plain"),
    (2, "", "generate.py: \x1b[31m\n", None, "plain"), (2, "", "generate.py: Traceback\n", None, "plain"),
    (2, "", f"generate.py: {'x' * 400}\n", None, "413 characters"),
    (2, "", "generate.py: cannot allocate\n", None, "memory")], ids=str)
def test_a_bad_answer_is_noticed(status, out, err, want, words):
    wrong = fuzz.judge(["--json"], status, out, err, want)
    assert wrong is None if words is None else words in wrong


@pytest.mark.parametrize("out, words", [("Hello\tyou\n", None), ("", "empty"), ("\x1b[31m", "repaint")])
def test_a_bad_text_is_noticed(out, words):
    wrong = fuzz.judge([], 0, out, "")
    assert wrong is None if words is None else words in wrong


def test_whatever_goes_wrong_is_noticed_and_the_next_case_runs(monkeypatch):
    def forever():
        while True:
            pass

    def touch(size):
        """trap: bytes may come from a heap that this process already holds, as `train.keep_memory` wants."""
        memory = mmap.mmap(-1, size)
        memory[:: mmap.PAGESIZE] = b"x" * len(range(0, size, mmap.PAGESIZE))

    def allowed():
        print(FINE, end="")
        touch(fuzz.PEAK * 2 // 3)

    ways = [
        (lambda room: print(FINE, end=""), None),
        (lambda room: {}["x"], "KeyError from a library: 'x'"),
        (lambda room: sys.exit(3), "SystemExit"),
        (lambda room: forever(), "hangs"),
        (lambda room: time.sleep(99), "hangs"),
        (lambda room: os.kill(os.getpid(), signal.SIGKILL), "crashes with SIGKILL"),
        (lambda room: allowed(), None),
        (lambda room: touch(fuzz.PEAK * 4 // 3), " MB"),
        (lambda room: len(bytes(2 * fuzz.SPACE)), "MemoryError"),
        (lambda room: os.write(2, b"a library says"), "a library says"),
        (lambda room: open(f"{room}/marker", "w").close(), "a pickle was opened"),
        (lambda room: print(FINE, end=""), None)]

    def prepare(number, seed, bases, room):
        return fuzz.Case(number, "config: odd values", "", [str(number), str(room), "--json"])

    def act(argv):
        ways[int(argv[0])][0](argv[1])
        return 0

    monkeypatch.setattr(fuzz, "PEAK", 2**28)  # far beyond what a fresh child reads of its libraries
    monkeypatch.setattr(fuzz, "SECONDS", 5)
    monkeypatch.setattr(fuzz, "CLOCK", 15)
    monkeypatch.setattr(fuzz, "prepare", prepare)
    monkeypatch.setattr(fuzz.generate, "main", act)
    cases = fuzz.run(range(len(ways)))
    assert [case.number for case in cases] == list(range(len(ways)))
    for case, (_, words) in zip(cases, ways, strict=True):
        assert words == case.wrong or words and words in str(case.wrong), (case, words)
    assert fuzz.summarize(cases) == len(ways) - 3
