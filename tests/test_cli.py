"""What the command lines share: how a program ends, whatever happens inside it; and what it is given to
read."""
import io
import sys

import pytest
import torch

import generate
from support import cli


def ending(error):
    """A program that ends with this error."""
    def run(argv):
        raise error
    return run


def told(capsys, error):
    """The one line that stands on standard error."""
    status = cli.main(ending(error), [])
    out, err = capsys.readouterr()
    assert status == 2 and out == "" and err.count("\n") == 1 and err.endswith("\n")
    assert err.startswith("test_cli.py: "), "the line names the program"
    return err[len("test_cli.py: ") : -1]


@pytest.mark.parametrize("returned, status", [(None, 0), (0, 0), (1, 1), (130, 130)])
def test_a_program_ends_with_what_it_returns(returned, status, capsys):
    seen = []
    assert cli.main(lambda argv: seen.append(argv) or returned, ["a", "b"]) == status
    assert seen == [["a", "b"]] and capsys.readouterr() == ("", "")


@pytest.mark.parametrize("error, line", [
    (ValueError("two\nlines,\ta tab\r\n and  blanks "), "two lines, a tab and blanks"),
    (OSError("\x1b[31mred\x07 \udcff naïve 日本語"), "\ufffd[31mred\ufffd \ufffd naïve 日本語"),
    (UnicodeError("a" * 300 + "b" * 10**6 + "c" * 200), "a" * 240 + " ... " + "c" * 100)],
    ids=["blanks", "signs", "long"])
def test_bad_input_is_one_printable_line_and_status_2(error, line, capsys):
    assert told(capsys, error) == line


def test_too_little_memory_is_no_bug(capsys):
    with pytest.raises(RuntimeError) as e:
        torch.empty(1 << 60, dtype=torch.int8)
    for error in (e.value, MemoryError(), torch.OutOfMemoryError("CUDA"),
                  RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported elsewhere")):
        assert "not enough memory" in told(capsys, error)


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: an illegal memory access was encountered"),
                                   TypeError("memory"), KeyError("x")], ids=repr)
def test_our_own_bugs_are_not_hidden(error):
    with pytest.raises(type(error)):
        cli.main(ending(error), [])


def test_ctrl_c_is_status_130_without_a_word(capsys):
    assert cli.main(ending(KeyboardInterrupt()), []) == 130
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_has_left_is_status_141(capsys, monkeypatch, tmp_path):
    """What is still printed then, such as by Python at its end, goes nowhere."""
    with open(tmp_path / "out", "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert cli.main(ending(BrokenPipeError()), []) == 141
        print("more", flush=True)
    assert (tmp_path / "out").read_text() == capsys.readouterr().err == ""


def test_an_encoding_that_lacks_a_character_replaces_it(monkeypatch):
    """As Windows does where output goes to a file or a pipe."""
    out = io.TextIOWrapper(io.BytesIO(), "cp1252")
    monkeypatch.setattr(sys, "stdout", out)
    assert cli.main(lambda argv: print("é 你好", flush=True), []) == 0
    assert out.buffer.getvalue().rstrip() == b"\xe9 ??"


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_closed_stream_swallows_what_is_its_own(closed, monkeypatch):
    out = io.StringIO()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None if name == closed else out)

    def run(argv):
        print("text", file=sys.stdout)
        raise ValueError("bad")

    assert cli.main(run, []) == 2
    assert out.getvalue() == ("text\n" if closed == "stderr" else "test_cli.py: bad\n")


def test_standard_input_of_any_make(monkeypatch):
    for raw, text in ((b"a\r\nb\r\n", "a\nb\n"), (b"\xef\xbb\xbfa", "a"), (b"a\xff", "a\udcff")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), "ascii", newline="\n"))
        assert cli.read_input() == text
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ValueError, match="standard input is closed"):
        cli.read_input()


def prompts_of(path, content):
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return generate.read_prompts(generate.parse(["--prompt-file", str(path)]))


@pytest.mark.parametrize("name, content", [
    ("a.txt", "\ufeffone\u2028\r\n\r\n two\x85"), ("a.json", '["one\u2028",\n {"prompt": " two\x85"}]'),
    ("a.JSONL", '\ufeff{"prompt": "one\u2028", "id": 1}\r\n{"prompt": " two\x85"}')])
def test_prompt_files_of_any_make(name, content, tmp_path):
    """Only a newline ends a prompt: a text may hold what Python's `splitlines` takes for one."""
    assert prompts_of(tmp_path / name, content) == ["one\u2028", " two\x85"]


@pytest.mark.parametrize("name, content, culprit", [
    ("p.txt", "\n  \n", "no prompts"), ("p.txt", b"caf\xe9", "UTF-8"), ("p.jsonl", "Once", "line 1"),
    ("p.jsonl", '{"prompt": "a"}\n{"text": "b"}', "line 2"), ("p.jsonl", '{"prompt": 3}', "line 1"),
    ("p.json", '["one", 2]', "entry 2"), ("p.json", '[""]', "entry 1"), ("p.json", "[" * 10**5, "line 1")])
def test_prompt_files_that_make_no_sense_are_refused(name, content, culprit, tmp_path):
    with pytest.raises(ValueError, match=f"{name}.*{culprit}"):
        prompts_of(tmp_path / name, content)


def test_the_machine_is_named(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(cli.Path, "read_text", lambda *args, **kwargs: "model name\t: A chip\nflags: y\n")
    assert cli.machine(torch.device("cpu")) == "A chip, 3 threads"
    monkeypatch.setattr(cli.Path, "read_text", lambda *args, **kwargs: "vendor: x\nflags: y\n")
    monkeypatch.setattr(cli.platform, "processor", lambda: "riscv64")
    assert cli.machine(torch.device("cpu")) == "riscv64, 3 threads"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"Giant {device}")
    assert cli.machine(torch.device("cuda", 1)) == "Giant cuda:1"
