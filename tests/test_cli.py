"""What the command lines share: how a program ends, whatever happens inside it."""
import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch

import generate
from support import cli

STORIES = Path(__file__).parent.parent / "weights" / "stories-llama"


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


@pytest.mark.parametrize("error", [ValueError, OSError, FileNotFoundError, PermissionError, UnicodeError])
def test_bad_input_is_one_line_and_status_2(error, capsys):
    assert told(capsys, error("file.txt: no text")) == "file.txt: no text"


def test_a_message_is_one_printable_line(capsys):
    assert told(capsys, ValueError("two\nlines,\ta tab\r\n and  blanks ")) == "two lines, a tab and blanks"
    assert told(capsys, ValueError("\x1b[31mred\x07 \udcff")) == "\ufffd[31mred\ufffd \ufffd"
    assert told(capsys, ValueError("naïve 日本語")) == "naïve 日本語"


def test_a_long_message_keeps_both_ends(capsys):
    line = told(capsys, ValueError("a" * 300 + "b" * 10**6 + "c" * 200))
    assert line == "a" * 240 + " ... " + "c" * 100
    assert told(capsys, ValueError("d" * 360)) == "d" * 360


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB."), MemoryError(),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported elsewhere"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory")], ids=repr)
def test_too_little_memory_is_no_bug(error, capsys):
    assert "not enough memory" in told(capsys, error)


def test_the_cpus_own_words_for_too_little_memory(capsys):
    with pytest.raises(RuntimeError) as e:
        torch.empty(1 << 60, dtype=torch.int8)
    assert "not enough memory" in told(capsys, e.value)


@pytest.mark.parametrize("error", [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("unsupported memory format option"), RuntimeError("other shapes"), TypeError("memory"),
    KeyError("x")], ids=repr)
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
    assert (tmp_path / "out").read_text() == ""
    assert capsys.readouterr().err == ""


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

    assert cli.main(run, []) == 2 and getattr(sys, closed).isatty() is False
    assert out.getvalue() == ("text\n" if closed == "stderr" else "test_cli.py: bad\n")


def test_standard_input_of_any_make(monkeypatch):
    for raw, text in ((b"a\r\nb\r\n", "a\nb\n"), (b"\xef\xbb\xbfa", "a"), (b"a\xff", "a\udcff")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), "ascii", newline="\n"))
        assert cli.read_input() == text
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ValueError, match="standard input is closed"):
        cli.read_input()


@pytest.mark.parametrize("name, content", [
    ("a.txt", "\ufeffone\r\ntwo\r\n"),
    ("a.jsonl", '\ufeff{"prompt": "one"}\r\n{"prompt": "two"}'),
    ("a.JSONL", '{"prompt": "one"}\n{"prompt": "two"}\n'), ("a.json", '["one",\n {"prompt": "two"}]'),
    ("a.json", '{"prompt": "one"}\n{"prompt": "two"}')])
def test_prompt_files_of_any_make(name, content, tmp_path):
    (tmp_path / name).write_bytes(content.encode())
    a = generate.parse(["--prompt-file", str(tmp_path / name)])
    assert generate.read_prompts(a) == ["one", "two"]


@pytest.mark.parametrize("content", ['["one", 2]', '["one"', '[""]', '"one"', "[" * 10**5])
def test_a_json_file_without_prompts_is_refused(content, tmp_path):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match="a.json, (entry|line) "):
        generate.read_prompts(generate.parse(["--prompt-file", str(tmp_path / "a.json")]))


@pytest.mark.parametrize("argv", [
    ["--gamma", 3000000], ["--draft", "medusa", "--tree", 3000], ["--tail", 10**9], ["--top-k", 10**30],
    ["--max-new", 10**30], ["--window", 10**30], ["--sinks", 10**30]], ids=str)
def test_numbers_out_of_all_proportion(argv):
    """They are refused before a model is loaded."""
    with pytest.raises(ValueError, match=f"{argv[-2]} must be at most .*, got {argv[-1]}$"):
        generate.parse(["x", "--model", "nowhere", *map(str, argv)])


def test_a_tree_is_as_large_as_what_is_drafted(capsys):
    """These heads have places for 6 levels of 5 ranks."""
    argv = ["Once", "--model", str(STORIES), "--max-new", "2", "--draft", "eagle"]
    flags = ["--gamma", "6", "--tree", "600"]
    assert generate.main([*argv, *flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tree"] == 30


def test_a_wrong_flag_is_bad_input():
    p = cli.Parser()
    p.add_argument("--count", type=int)
    for argv, word in ((["--count", "x"], "--count"), (["--other"], "--other")):
        with pytest.raises(ValueError, match=f"{word}.*; see --help$"):
            p.parse_args(argv)


def test_the_machine_is_named(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert re.fullmatch(r"[^\s:].*, 3 threads", cli.machine(torch.device("cpu")))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"Giant {device}")
    assert cli.machine(torch.device("cuda", 1)) == "Giant cuda:1"


def test_a_machine_without_proc_is_named_too(monkeypatch):
    def nothing(*args, **kwargs):
        raise FileNotFoundError
    monkeypatch.setattr(cli.Path, "read_text", nothing)
    monkeypatch.setattr(cli.platform, "processor", lambda: "")
    monkeypatch.setattr(cli.platform, "machine", lambda: "riscv64")
    assert cli.machine(torch.device("cpu")).startswith("riscv64, ")
    monkeypatch.setattr(cli.Path, "read_text", lambda *args, **kwargs: "vendor: x\nflags: y\n")
    assert cli.machine(torch.device("cpu")).startswith("riscv64, ")
