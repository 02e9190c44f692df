"""What the command lines share: how a program ends, whatever happens inside it;
and what it reads."""
import io
import os
import sys

import pytest
import torch

from support import cli
from support.texts import numbered_texts


def ending(error):
    """A program that ends with this error."""
    def run(argv):
        raise error
    return run


@pytest.mark.parametrize("error, line", [
    (ValueError("two\nlines,\ta tab\r\n and  blanks "), "two lines, a tab and blanks"),
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
                          TypeError("memory"), KeyError("x")], ids=repr)
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
