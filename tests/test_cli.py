"""What the command lines share: how a program ends, whatever happens inside it;
and what it reads."""
import io
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model import Refused
from support import cli
from support.texts import numbered_texts, read_input

ROOT = Path(__file__).resolve().parents[1]


def ending(error):
    """A program that ends with this error."""
    def run(argv):
        raise error
    return run


@pytest.mark.parametrize("error, line", [
    (Refused("two\nlines,\ta tab\r\n and  blanks "), "two lines, a tab and blanks"),
    (FileNotFoundError(2, "No such file or directory", "x y"), "x y: No such file or directory"),
    (OSError("\x1b[31mred\x07 \udcff naïve 日本語"), "\ufffd[31mred\ufffd \ufffd naïve 日本語"),
    *((error, "not enough memory for this model, batch and context: try smaller ones, or half "
              "precision")
      for error in (MemoryError(), torch.OutOfMemoryError("CUDA"),
                    RuntimeError("DefaultCPUAllocator: no"),
                    RuntimeError("CUDA error: out of memory\nkernel errors might be reported "
                                 "elsewhere")))],
    ids=lambda x: type(x).__name__)
def test_bad_input_is_one_printable_line_and_status_2(error, line, capsys):
    assert cli.main(ending(error), []) == 2
    assert capsys.readouterr() == ("", f"test_cli.py: {line}\n"), "the line names the program"


@pytest.mark.parametrize("error",
                         [RuntimeError("CUDA error: an illegal memory access was encountered"),
                          TypeError("memory"), KeyError("x"), ValueError("zip()")], ids=repr)
def test_our_own_bugs_are_not_hidden(error):
    with pytest.raises(type(error)):
        cli.main(ending(error), [])


def test_what_ends_a_program_without_a_word(monkeypatch, capsys):
    """A status, Ctrl-C, and a reader such as `head` that has gone before the last line was
    flushed."""
    assert [cli.main(run, []) for run in (lambda argv: None, lambda argv: 1)] == [0, 1]
    assert cli.main(ending(KeyboardInterrupt()), []) == 130
    left, pipe = os.pipe()
    os.close(left)
    with os.fdopen(pipe, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert cli.main(lambda argv: print("late"), []) == 141
    assert capsys.readouterr().err == ""


def test_closed_streams_are_empty_ones(monkeypatch):
    """As `<&-` and `>&-` leave them."""
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    said = []
    assert cli.main(lambda argv: said.append(read_input()) or print("x"), []) == 0
    assert cli.main(ending(Refused("no")), []) == 2
    assert said == [""] and not sys.stdout.isatty()


@pytest.mark.parametrize("files, most", [
    ({}, math.inf), ({"sys/fs/cgroup/cpu.max": "max 100000"}, math.inf),
    ({"sys/fs/cgroup/cpu.max": "250000 100000"}, 2.5),
    ({"sys/fs/cgroup/a/cpu.max": "200000 100000", "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, 2),
    ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000",
      "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 1.5),
    ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
      "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, math.inf)], ids=str)
def test_threads_are_limited_by_the_quota(files, most, monkeypatch, tmp_path):
    """Of this group and of those that it is in, in both versions of control groups."""
    for name, text in {"proc/self/cgroup": "0::/a/b\n", **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cli.quota(tmp_path) == most
    used = []
    monkeypatch.setattr(cli, "quota", lambda: most)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    cli.limit_threads()
    monkeypatch.delenv("OMP_NUM_THREADS")
    cli.limit_threads()
    assert used == [min(8, int(min(8, most)))]


@pytest.mark.parametrize("program", ["generate.py", "search.py"])
def test_ctrl_c_while_modules_load_shows_no_traceback(program, tmp_path):
    """Here it comes while torch is imported."""
    (tmp_path / "torch.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nraise ImportError")
    run = subprocess.run([sys.executable, ROOT / program, "Hi"], capture_output=True,
                         env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert (run.returncode, run.stderr) == (-signal.SIGINT, b"")


def test_an_encoding_that_lacks_a_character_replaces_it(monkeypatch):
    """As Windows does where output goes to a file or a pipe."""
    out = io.TextIOWrapper(io.BytesIO(), "cp1252")
    monkeypatch.setattr(sys, "stdout", out)
    assert cli.main(lambda argv: print("é 你好", flush=True), []) == 0
    assert out.buffer.getvalue().rstrip() == b"\xe9 ??"


def prompts_of(path, content):
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(numbered_texts(path, "prompt", "\n").values())


def test_prompt_files(tmp_path):
    """Only a newline ends a prompt: a text may hold what Python's `splitlines` takes for one."""
    for name, content in (
            ("a.txt", "\ufeffone\u2028\r\n\r\n two\x85"),
            ("a.JSONL", '\ufeff{"prompt": "one\u2028", "id": 1}\r\n{"prompt": " two\x85"}')):
        assert prompts_of(tmp_path / name, content) == ["one\u2028", " two\x85"]
    for name, content, culprit in (
            ("p.txt", "\n  \n", "no text"), ("p.txt", b"caf\xe9", "UTF-8"),
            ("p.jsonl", "Once", "line 1"), ("p.jsonl", "[" * 10**5, "line 1"),
            ("p.jsonl", '{"prompt": "a"}\n{"text": "b"}', "line 2")):
        with pytest.raises(ValueError, match=f"{name}.*{culprit}"):
            prompts_of(tmp_path / name, content)
