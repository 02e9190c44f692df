"""The traces that ports are checked against are what the library says, with a margin at every
decision; the checker passes what is right, and names what is wrong."""
import json
import math
import os
import runpy
import select
import sys
from pathlib import Path

import pytest
import torch
from tiny import command

from exercises.cuts import change
from porting import check, make
from porting.library_port import answer
from porting.make import MISTAKES, SOURCE, answers, wrong_port

PORTING = Path(__file__).parents[1]
CORE, STORIES = check.read_cases(check.TRACES), check.read_cases(check.STORIES)
ALL = CORE | STORIES
NUMPY = [sys.executable, PORTING / "numpy_port.py"]
call = command(check.main)


# --- the traces


@pytest.mark.parametrize("step", range(1, 11))
def test_the_library_says_what_the_traces_say_and_nothing_hangs_on_rounding(step):
    """And the tolerances leave room for a port that computes in float32."""
    for number, (request, expect) in ALL.items():
        if request["step"] != step:
            continue
        got, margin = answer(request)
        wrong = check.differ(expect["answer"], json.loads(json.dumps(got)), 1e-6)
        assert not wrong, (f"case {number}: {wrong}. "
                           "If that is meant, make the traces anew: porting/make.py")
        assert margin >= make.MARGIN or make.is_exact(request), (
            f"case {number}: a decision within rounding")
        assert expect["margin"] == (None if margin == math.inf else pytest.approx(margin, abs=1e-6))
        got = json.loads(json.dumps(answer(request, torch.float32)[0]))
        assert not check.differ(expect["answer"], got, expect["tolerance"] / 2), number


def test_a_case_that_rounding_could_turn_is_refused(tmp_path):
    near = {"case": 1, "step": 8, "op": "choose", "u": 0.50001,
            "weights": {"shape": [2], "data": [0.3, 0.3]}}
    make.write_lines(tmp_path / "cases.jsonl", [near])
    make.write_lines(tmp_path / "answers.jsonl", [])
    with pytest.raises(SystemExit, match="case 1: its closest decision is within"):
        make.write(tmp_path, tmp_path)


def test_the_traces_are_those_of_the_version_and_small():
    assert make.digest() == check.DIGEST, (
        "the traces were changed: raise VERSION, and set DIGEST beside it")
    assert sum(p.stat().st_size for p in check.TRACES.rglob("*") if p.is_file()) < 2e6


# --- ports


def test_the_numpy_ports_pass(call):
    """The plain one all cases but those of trees, the other one all."""
    core = sum(not request["trees"] for request, _ in CORE.values()) + 1
    status, out, _ = call("--core", *NUMPY)
    version = f"(traces version {check.VERSION})"
    assert status == 0 and f"{core} of {core} cases pass {version}" in out and "999 ok" in out
    status, out, _ = call(sys.executable, PORTING / "numpy_trees.py")
    assert status == 0 and f"{len(ALL) + 1} of {len(ALL) + 1} cases pass" in out


def test_a_top_p_of_1_is_off_in_the_numpy_port():
    """The likeliest token has all the mass that a float can tell, and the others stay."""
    port = runpy.run_path(str(PORTING / "numpy_port.py"))
    assert port["to_probs"]([60.0, 0.0], 1.0, None, 1, None)[1] > 0


@pytest.mark.parametrize("scope, old, new, mistake", MISTAKES,
                         ids=[m[3].replace(" ", "-") for m in MISTAKES])
def test_a_wrong_port_is_refused_by_name(scope, old, new, mistake):
    """At the first case that it fails. make.py has run it on all of them."""
    refusing = [line["case"] for line in check.read_lines(check.TRACES / "mistakes.jsonl")
                if line["mistake"] == mistake]
    number = min(refusing)
    found = answers(wrong_port(scope, old, new), [check.absolute(CORE[number][0])])
    said, _ = check.report({number: CORE[number]}, found)
    assert f"    This very answer comes out if {mistake}." in said


HALF = """
import numpy as np
def half(x):        # to the nearest bfloat16, of two equally near ones to the even one
    bits = np.asarray(x, "f4").view("u4")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view("f4")
def half_softcap(x, cap):
    return x if cap is None else half(half(np.tanh(half(x / cap))) * cap)
"""
HALVES = [      # what makes numpy_port.py a port in bfloat16: where it rounds
    ("read_weights", "np.frombuffer(raw, '<f4')", "half(np.frombuffer(raw, '<f4'))"),
    ("norm", "x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * (offset + weight)",
     "half(x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * (offset + weight))"),
    ("attention", "(x @ m.w[f'{name}{part}_proj.weight'].T)",
     "half(x @ m.w[f'{name}{part}_proj.weight'].T)"),
    ("attention", "y @ m.w[f'{name}o_proj.weight'].T",
     "half(half(y) @ m.w[f'{name}o_proj.weight'].T)"),
    ("mlp", "(x @ gate.T, x @ up.T)", "(half(x @ gate.T), half(x @ up.T))"),
    ("mlp", "(act * up) @ down.T", "half(half(half(act) * up) @ down.T)"),
    ("sublayer", "x + y", "half(x + y)"),
    ("run", "embedding[tokens] * m.embed_scale", "half(embedding[tokens] * half(m.embed_scale))"),
    ("run", "softcap(x @ m.w.get('lm_head.weight', embedding).T, m.last_cap)",
     "half_softcap(half(x @ m.w.get('lm_head.weight', embedding).T), m.last_cap)"),
    ("one_sublayer", "tensor(r['x'])", "half(tensor(r['x']))"),
    ("", "norm(tensor(r['x']), tensor(r['weight'])",
     "norm(half(tensor(r['x'])), half(tensor(r['weight']))"),
    ("", "pack(softcap(tensor(r['x'])", "pack(half_softcap(half(tensor(r['x']))")]


@pytest.mark.parametrize("scope, old, new", [
    ("", "", ""),
    ("norm", "(offset + weight)", "half(offset + weight)"),
    ("norm", "x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)",
     "half(x / half(np.sqrt(half((x * x).mean(-1, keepdims=True)) + eps)))"),
    ("run", "half(m.embed_scale)", "m.embed_scale"),
    ("attention", "(k.swapaxes(0, 1), v.swapaxes(0, 1))",
     "(half(k.swapaxes(0, 1)), v.swapaxes(0, 1))"),
    ("attention", "half(half(y) @", "half(y @"),
    ("mlp", "half(half(act) * up)", "half(act) * up"),
    ("half_softcap", "half(half(np.tanh(half(x / cap))) * cap)", "half(np.tanh(x / cap) * cap)"),
], ids=["right", "1+w", "inside the norm", "sqrt(dim)", "cache", "attention's output",
        "act times up", "soft-cap"])
def test_a_port_in_bfloat16_is_seen_to_round_where_the_library_does(scope, old, new):
    """By its bits, of which the right port, whose sums run otherwise, has nearly all."""
    source = HALF + SOURCE
    for row in HALVES:
        source = change(source, *row)
    if old:
        source = change(source, scope, old, new)
    cases = check.read_half(check.TRACES)
    found = answers(source, [check.absolute(request) for request, _ in cases.values()])
    verdicts = check.judge(cases, found)
    wrong = {number: verdict for number, verdict in verdicts.items() if verdict is not None}
    assert bool(wrong) == bool(old), wrong


def test_the_answers_in_bfloat16_are_those_of_the_library_and_not_of_float32(call):
    cases = check.read_half(check.TRACES)
    for number, (request, expect) in cases.items():
        assert check.differ_half(expect["answer"], answer(request)[0]) is None, number
    status, out, _ = call("--bfloat16", *NUMPY)
    assert status == 1 and f"0 of {len(cases)} cases pass" in out
    assert "numbers are others in bfloat16" in out


def test_exact_says_whether_rounding_depends_on_the_block(call):
    requests, found = check.exact_requests(), {}
    for fours, ones in zip(requests[::2], requests[1::2], strict=True):
        found[ones["case"]] = answer(ones)[0]
        data = sum((block["data"] for block in found[ones["case"]]["logits"]), [])
        found[fours["case"]] = {"logits": {"data": data}}
    lines, right = check.report_exact(found)
    assert right and all("every logit has the same bits" in line for line in lines)
    found[3]["logits"]["data"][50] += 1e-12
    lines, right = check.report_exact(found)
    assert not right and "llama: every" in lines[0] and "gemma2: logit 10 of token 1 is" in lines[1]
    status, out, _ = call("--exact", *script("print(json.dumps({'case': case['case']}))"))
    assert status == 1 and out.count("no answer") == 2


def test_what_the_runner_says_about_a_wrong_answer():
    """The cause of this very answer to this very case, but none that a passing case refutes, no
    word of form about a wrong number, the margin of a flipped token, and the name of a key that is
    misspelt."""
    def said(answer, number, passing=None):
        verdicts = check.judge({number: CORE[number]}, {number: answer})
        return str(check.first_difference(CORE, verdicts | (passing or {}), {number: answer}))

    every = {"accepted": 3, "token": 0}
    assert "comes out if every draft is accepted" in said(every, 812)
    assert "comes out" not in said(every, 813) + said({"accepted": 2, "token": 3}, 812)
    other = next(line["case"] for line in check.read_lines(check.TRACES / "mistakes.jsonl")
                 if line["mistake"] == "every draft is accepted" and line["case"] != 812)
    assert "every draft is accepted" not in said(every, 812, {other: None})
    assert "no decision of this case is closer than" in said(every, 813)
    right = json.loads(json.dumps(CORE[903][1]["answer"]))
    flat = {"rounds": [line | {"p": sum(line["p"], [])} for line in right["rounds"]]}
    assert "their form is not" in said(flat, 903)
    right["rounds"][-1]["new"][0][-1] += 1
    assert "form" not in said(right, 903) and "Rounding is not the cause" in said(right, 903)
    short = {"freq": CORE[301][1]["answer"]["freqs"]}
    assert "there is no key 'freqs', but a key 'freq'" in said(short, 301)


def test_a_port_that_does_not_use_the_weights_it_is_given_is_refused(call, tmp_path):
    """It passes every case but the one with other weights, which is made on the spot."""
    port = tmp_path / "port.py"
    port.write_text(wrong_port("", 'open(f"{folder}/model.safetensors", "rb")',
                               f'open({str(check.TRACES)!r} + "/llama/model.safetensors", "rb")'))
    status, out, _ = call("--case", 903, "--case", 999, sys.executable, port)
    assert status == 1 and "903 ok   999 NO" in out and "somewhere else than the weights" in out
    request, expect = check.rolled(*CORE[903], tmp_path)
    assert not check.differ(expect["answer"], answer(request)[0], 1e-6)
    assert expect["answer"]["rounds"][0]["new"] != CORE[903][1]["answer"]["rounds"][0]["new"]


def script(body):
    """A command that runs the body, a Python statement, for each `case`."""
    return [sys.executable, "-c",
            "import json, sys, time\nfor line in sys.stdin:\n    case = json.loads(line)\n"
            f"    {body}"]


@pytest.mark.parametrize("body, words", [
    ("print('hello')", "line 1 of what it printed is no answer: 'hello'"),
    ("sys.exit('no memory')",
     "ended with status 1, with 0 cases answered, and its last words are 'no mem"),
    ("print(json.dumps({'case': '301'}))", "line 1: \"case\" is the string '301', not a number"),
    ("time.sleep(60)", "was stopped after 1.0 seconds, with 0 cases answered"),
    ("print('{\"case\": 301, \"y\": -nan}')", "is no answer (nan and inf are not JSON): '{"),
    ("pass", "ended with status 0 and printed nothing: does it read standard input"),
])
def test_a_port_that_gives_no_answer(call, body, words):
    seconds = 1 if "sleep" in body else 60
    status, out, _ = call("--seconds", seconds, "--case", 301, "--case", 302, *script(body))
    assert status == 1 and words in out and "301 --   302 --" in out


def test_a_port_that_prints_for_ever_is_stopped(call, monkeypatch):
    """Even if all of it is one line."""
    monkeypatch.setattr(check, "MOST", 2**20)
    status, out, _ = call("--case", 301, *script("while True: sys.stdout.write('x' * 9999)"))
    assert status == 1
    assert "stopped because it printed more than 1 MB, with 0 cases answered" in out


@pytest.mark.parametrize("last, words", [
    ("wait", "stopped after 1.0 seconds"), ("exit 0", "0 of 1 cases"), ("exit 3", "status 3")])
def test_what_a_port_has_started_ends_with_it(call, tmp_path, last, words):
    """The child inherits the writing end of a pipe, whose end comes once the child has ended."""
    os.mkfifo(tmp_path / "alive")
    pipe = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    (tmp_path / "port.sh").write_text(f"exec 3> {tmp_path / 'alive'}\nsleep 100 &\n{last}\n")
    status, out, _ = call("--seconds", 1, "--case", 301, "sh", tmp_path / "port.sh")
    assert status == 1 and words in out
    assert select.select([pipe], [], [], 30)[0] and os.read(pipe, 1) == b""
    os.close(pipe)


def test_a_panic_is_told_by_its_message_and_not_by_its_backtrace():
    err = ("thread 'main' panicked at src/main.rs:5:9:\nindex out of bounds: the len is 3\n"
           "stack backtrace:\n   0: rust_begin_unwind\n   1: core::panicking::panic_fmt\n"
           "             at /rustc/library/core/src/panicking.rs:72:14\n   2: port::main\n"
           "note: Some details are omitted")
    assert check.last_words(err).endswith("main.rs:5:9: index out of bounds: the len is 3")


def test_uniforms_are_compared_to_nine_digits():
    """A float32 has seven: its uniforms are refused, and right ones of nine digits pass."""
    expect = CORE[903][1]
    said = json.loads(json.dumps(expect["answer"]))
    for digits, right in (("%.9g", True), ("%.7g", False)):
        for line in said["rounds"]:
            line["u_next"] = [float(digits % u) for u in line["u_next"]]
        assert (check.judge({903: CORE[903]}, {903: said})[903] is None) == right


def test_which_cases_are_asked_for(call, tmp_path):
    port = script("print(json.dumps({'case': case['case'], 'todo': True}))")
    status, out, _ = call("--to", 3, *port)
    assert status == 1 and "0 of 11 cases pass" in out and "304 --" in out and "401" not in out
    status, out, _ = call("--case", 304, "--tolerance", 1e-9, *NUMPY)
    assert status == 1 and "304 NO" in out
    call.refuses(["--case", 12345, *port], tmp_path, "there is no such case")
    for flags, trees, stories in (([], True, True), (["--no-trees"], False, True),
                                  (["--no-stories"], True, False), (["--core"], False, False)):
        out = call(*flags, *port)[1]
        assert ("981 --" in out, "991 --" in out) == (trees, stories)
    call.refuses(["--case", 301, "no_port"], tmp_path, "no_port: cannot be run")
