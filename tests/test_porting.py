"""The traces that ports are checked against are what the library says, with a margin at every decision; the
checker passes what is right, and names what is wrong."""
import ast
import json
import math
import re
import runpy
import stat
import sys
from pathlib import Path

import pytest
import torch
from tiny import command

from checkpoint import encode, read_config, read_tokenizer
from porting import check, make
from porting.library_port import Watch, answer, cut_margin, edge_margin, load, tree_margin
from porting.wrong_ports import MISTAKES, answers, wrong_port

PORTING = Path(__file__).parent.parent / "porting"
CORE, STORIES = check.read_cases(check.TRACES), check.read_cases(check.STORIES)
ALL = CORE | STORIES
NUMPY = [sys.executable, PORTING / "numpy_port.py"]
call = command(check.main)


# --- the traces


@pytest.mark.parametrize("step", range(1, 10))
def test_the_library_says_what_the_traces_say_and_nothing_hangs_on_rounding(step):
    """And the tolerances leave room for a port that computes in float32."""
    numbers = [n for n, (request, _) in ALL.items() if request["step"] == step]
    assert len(numbers) >= 3
    for number in numbers:
        request, expect = ALL[number]
        got, margin = answer(request)
        wrong = check.differ(expect["answer"], json.loads(json.dumps(got)), 1e-6, [])
        assert not wrong, f"case {number}: {wrong}. If that is meant, make the traces anew: porting/make.py"
        assert margin >= make.MARGIN or make.is_exact(request), f"case {number}: a decision within rounding"
        assert expect["margin"] == (None if margin == math.inf else pytest.approx(margin, abs=1e-6))
        got = json.loads(json.dumps(answer(request, torch.float32)[0]))
        assert not check.differ(expect["answer"], got, expect["tolerance"] / 2, []), number


def test_make_makes_these_very_cases():
    assert [case[0] for case in make.CASES + make.STORY_CASES] == [*CORE, *STORIES]
    for number, op, build, wanted, catches in make.CASES:
        committed, expect = CORE[number]
        request = json.loads(json.dumps(make.pose(number, op, build, expect["seed"])))
        assert not check.differ(request, committed, 1e-5, []), number
        assert wanted is None or wanted(expect["answer"]), number
        assert expect["catches"] == catches and len(catches) > 15


def test_make_makes_these_very_models():
    for folder, c in make.CONFIGS.items():
        m, committed = make.random_model(c), load(make.ROOT / folder, torch.float64)
        assert committed.c == c
        for ours, theirs in zip(m.parameters(), committed.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_traces_are_those_of_the_version_and_small():
    assert make.digest() == check.DIGEST, "the traces were changed: raise VERSION, and set DIGEST beside it"
    assert sum(p.stat().st_size for p in check.TRACES.rglob("*") if p.is_file()) < 2e6


def test_the_story_is_in_words_too():
    """For a port that has a tokenizer."""
    request, expect = STORIES[991]
    folder = make.ROOT / make.SHIPPED
    tokenizer = read_tokenizer(folder)
    ids = request["prompts"][0] + [t for r in expect["answer"]["rounds"] for t in r["new"][0]]
    assert tokenizer.decode(ids) == expect["words"] and expect["words"].startswith(request["words"])
    assert encode(tokenizer, request["words"], read_config(folder).bos) == request["prompts"][0]


def tensors(value):
    if isinstance(value, dict):
        return [value["data"]] if "data" in value else [t for v in value.values() for t in tensors(v)]
    return [t for v in value for t in tensors(v)] if isinstance(value, list) else []


def test_no_case_contains_its_answer():
    for number, (request, expect) in ALL.items():
        for key, value in expect["answer"].items():
            assert request.get(key) != value, f"case {number}: {key}"
        given = tensors(request)
        assert not any(t in given for t in tensors(expect["answer"])), f"case {number}: its input answers it"


def test_every_tensor_has_its_fingerprint():
    found = 0
    for _, expect in CORE.values():
        for line in json.dumps(expect["answer"]).split('{"shape": ')[1:]:
            found += '"sum"' in line and '"magnitudes"' in line and '"values"' in line
            assert '"sum"' in line
    assert found > 60


def test_the_rounds_show_what_the_issue_of_speculation_is():
    """Sampling, a ragged batch, the context limit, gamma 0: each stands in some case, and shows itself there.
    Of the others make.py says what they must show."""
    rounds = {n: (r, e["answer"]["rounds"]) for n, (r, e) in ALL.items() if r["op"] == "rounds"}
    kinds = {(r["drafter"]["kind"], r["sampling"]["temperature"] > 0) for r, _ in rounds.values()}
    assert kinds == {("none", False), ("sublayers", False), ("sublayers", True), ("ngram", False),
                     ("ngram", True)}
    assert {len(r["prompts"]) for r, _ in rounds.values()} >= {1, 2, 3}
    request, lines = rounds[912]
    assert len(request["prompts"][0]) + sum(len(r["new"][0]) for r in lines) == make.SHAPE.max_len
    assert all(not draft for r in rounds[907][1] for draft in r["draft"])


# --- margins


def test_the_margin_of_a_choice_is_the_distance_to_the_nearest_edge():
    weights = torch.tensor([[0.2, 0.3, 0.5], [1.0, 1.0, 2.0]])
    assert edge_margin(weights[:1], torch.tensor([0.45])) == pytest.approx(0.05)
    assert edge_margin(weights[1:], torch.tensor([0.3])) == pytest.approx(0.2)     # .3 * 4 = 1.2 beside 1
    assert edge_margin(weights[:1], torch.tensor([0.99])) == pytest.approx(0.01)   # the last edge counts, too


def test_the_margin_of_a_flip_is_the_distance_to_the_chance():
    coins = Watch()
    coins.pool = torch.tensor([0.3, 0.9, 0.5, 0.99], dtype=torch.float64)
    coins.flip(torch.tensor([[0.35, 7.0, 0.2]]))
    assert coins.margin == pytest.approx(0.05)          # .3 beside .35; .9 beside 1; .5 beside .2
    coins.flip(torch.tensor([[7.0]]))
    assert coins.margin == pytest.approx(0.01)          # .99 beside 1: a coin in float32 may be 1
    Watch().flip(torch.zeros(1, 0))                     # nothing to be decided


def test_the_margin_of_the_filters_is_that_of_their_nearest_cut():
    logits = torch.tensor([1.0, 3.0, 2.9, 0.0, -1.0]).double()
    assert cut_margin(logits) == pytest.approx(0.1)
    assert cut_margin(logits, 1.0) == math.inf
    assert cut_margin(logits, 1.0, top_k=1) == pytest.approx(0.1)
    p = torch.tensor([0.5, 0.3, 0.2]).double()
    assert cut_margin(p.log(), 1.0, top_p=0.79) == pytest.approx(0.01)             # .8 comes before the third
    assert cut_margin(p.log(), 1.0, min_p=0.42) == pytest.approx(0.01)             # .2 beside .21
    assert cut_margin(p.log(), 1.0, top_k=2, top_p=0.62) == pytest.approx(0.005, 1e-4)     # .625
    assert cut_margin(torch.zeros(3), ties=True) == math.inf and cut_margin(torch.zeros(3)) == 0


def test_the_margin_of_a_tree_is_what_refused_siblings_leave():
    p, q = torch.tensor([[0.5, 0.5], [0.5, 0.5]]), torch.tensor([[0.49, 0.51], [1.0, 0.0]])
    assert tree_margin(p, [0, 0], [0, 0], q) == pytest.approx(0.01)
    assert tree_margin(p, [0], [0], None) == pytest.approx(0.5)
    q = torch.tensor([[0.6, 0.4], [0.05, 0.95]])        # what is left for the second: (0, 1)
    assert tree_margin(p, [0, 1], [0, 0], q) == pytest.approx(0.05, rel=1e-4)


def test_a_case_that_cannot_be_had_with_a_margin_is_given_up_loudly(monkeypatch):
    monkeypatch.setattr(make, "TRIES", 20)
    near = dict(weights=make.tensor(0.3, 0.3), u=0.50001)
    with pytest.raises(SystemExit, match="case 7: none of 20 seeds has the margin"):
        make.settle(7, "choose", lambda g: near, None)
    with pytest.raises(SystemExit, match="shows what it should"):
        make.settle(7, "choose", lambda g: near | dict(u=0.3), lambda a: a["token"] == 1)


def test_only_what_cannot_be_rounded_is_exact():
    exact = dict(op="choose", weights=make.tensor(0.25, 0.5), u=0.125)
    assert make.is_exact(exact) and not make.is_exact(exact | dict(u=0.3))
    assert not make.is_exact(exact | dict(op="probs"))


# --- ports


def test_the_numpy_port_passes(call):
    status, out, _ = call("--core", *NUMPY)
    core = sum(not request["trees"] for request, _ in CORE.values()) + 1
    assert status == 0 and f"{core} of {core} cases pass (traces version 1;" in out and "999 ok" in out
    status, out, _ = call("--stories", *NUMPY)
    assert status == 0 and "3 of 3 cases pass" in out


def test_a_top_p_of_1_is_off_in_the_numpy_port():
    """The likeliest token has all the mass that a float can tell, and the others stay."""
    port = runpy.run_path(str(PORTING / "numpy_port.py"))
    for top_p in (None, 1):
        assert port["to_probs"]([60.0, 0.0], 1.0, None, top_p, None)[1] > 0


def test_with_trees_the_numpy_port_passes_those_too(call):
    trees = [n for n, (request, _) in CORE.items() if request["trees"]]
    flags = [flag for n in trees for flag in ("--case", n)]
    status, out, _ = call(*flags, sys.executable, PORTING / "numpy_trees.py")
    assert status == 0 and len(trees) == 8 and "8 of 8 cases pass" in out


def test_the_numpy_port_is_small_and_numpy_alone():
    source = (PORTING / "numpy_port.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 300
    needs = {"numpy_port": {"numpy"}, "numpy_trees": {"numpy", "numpy_port"}, "check": set()}
    for name, others in needs.items():
        tree = ast.parse((PORTING / f"{name}.py").read_text(encoding="utf-8"))
        found = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
        found |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert found - set(sys.stdlib_module_names) == others


@pytest.mark.parametrize("old, new, mistake", MISTAKES, ids=[m[2].replace(" ", "-") for m in MISTAKES])
def test_a_wrong_port_is_refused_by_name(old, new, mistake):
    """At the first case that it fails. make.py has run it on all of them."""
    refusing = [line["case"] for line in check.read_lines(check.TRACES / "mistakes.jsonl")
                if line["mistake"] == mistake]
    first = {min(refusing): CORE[min(refusing)]}
    found = answers(wrong_port(old, new), [check.absolute(request) for request, _ in first.values()])
    verdicts, _ = check.judge(first, found)
    said = check.first_difference(first, verdicts, found)
    assert f"This very answer comes out if {mistake}." in said
    right = answers(wrong_port(old, old), [check.absolute(json.loads(json.dumps(first[min(refusing)][0])))])
    assert check.judge(first, right)[0] == {min(refusing): None}


def test_a_mistake_must_be_made_once():
    with pytest.raises(AssertionError, match="stands 0 times in numpy_port.py"):
        wrong_port("goto", "")


def test_names_are_those_of_the_very_case_and_answer():
    line = next(line for line in check.read_lines(check.TRACES / "mistakes.jsonl") if line["case"] == 812)
    a, b = {"accepted": 3, "token": 0}, {"accepted": 2, "token": 3}
    assert line["print"] == check.print_of(a, ["accepted", "token"])
    assert check.named(812, CORE[812][1], a) == ["every draft is accepted"]
    assert check.named(812, CORE[812][1], b) == [] and check.named(812, CORE[812][1], {}) == []
    assert check.named(813, CORE[812][1], a) == []


def test_no_right_answer_is_called_a_mistake():
    """What cannot be told from a right answer by its fingerprint is not in mistakes.jsonl."""
    for number, (_, expect) in CORE.items():
        assert check.named(number, expect, expect["answer"]) == [], number


def test_what_differs_in_form_alone_is_not_called_a_mistake():
    """Not even where its numbers are those of a known mistake."""
    y, k = CORE[201][1]["answer"]["y"], CORE[501][1]["answer"]["k"]
    heads, T, D = k["shape"]
    wrong = answers(wrong_port("keepdims=True) + eps) *", "keepdims=True)) *"), [CORE[202][0]])[202]
    assert check.named(202, CORE[202][1], wrong) == ["the norm leaves out eps"]
    moved = torch.tensor(k["data"], dtype=torch.float64).view(heads, T, D).swapaxes(0, 1).flatten().tolist()
    for number, changed in [
        (201, {"y": {"data": y["data"]}}), (201, {"y": {"shape": [96], "data": y["data"]}}),
        (201, {"y": y["data"]}), (201, {}), (202, {"y": {"shape": [96], "data": wrong["y"]["data"]}}),
        (501, {"k": {"shape": [T, heads, D], "data": moved}}), (501, {"k": None}), (811, {"token": "2"}),
        (401, {"mask": [1, 0, 0, 1, 1, 0, 1, 1, 1]}), (301, {"freqs": {"shape": [4], "data": [[1.0] * 4]}}),
    ]:
        case, whole = {number: CORE[number]}, changed if number != 501 else CORE[501][1]["answer"] | changed
        said = check.first_difference(case, check.judge(case, {number: whole})[0], {number: whole})
        assert "The numbers may be right; their form is not." in said, (number, changed)
        assert "This very answer" not in said and "Usually" not in said
    assert all(check.formed(expect["answer"], expect["answer"]) for _, expect in ALL.values())
    numbers = CORE[501][1]["answer"] | {"k": k | {"data": moved}}
    assert check.formed(CORE[501][1]["answer"], numbers)            # the numbers alone are wrong
    assert check.formed([[1], None], [[1, 2], [3], [4]]) and not check.formed([[1]], [1])


def test_the_lowest_case_that_differs_is_shown():
    cases = {n: CORE[n] for n in (301, 302, 303)}
    verdicts = {301: None, 302: "this differs", 303: "so does this"}
    said = check.first_difference(cases, verdicts, {302: {}, 303: {}})
    assert "case 302" in said and "this differs" in said and "so does this" not in said
    assert check.first_difference(cases, dict.fromkeys(cases), {}) is None


def test_the_first_answer_to_a_case_counts(call, tmp_path):
    port = script(tmp_path, "print('\\n'.join(json.dumps({'case': 811, 'token': t}) for t in (0, 1)))")
    status, out, _ = call("--case", 811, port)
    assert status == 1 and "811 NO" in out


def test_a_port_with_another_mistake_hears_the_usual_ones():
    found = answers(wrong_port("0.044715", "0.1"), [check.absolute(CORE[505][0])])
    cases = {505: CORE[505]}
    said = check.first_difference(cases, check.judge(cases, found)[0], found)
    assert "This very answer" not in said and "Usually: the exact gelu instead of the tanh one" in said
    assert "x[0, 0]: expected" in said and "numbers differ)" in said


def test_a_port_that_does_not_use_the_weights_it_is_given_is_refused(call, tmp_path):
    """It passes every case, and only the one with other weights, made on the spot, tells."""
    fixed = wrong_port('open(f"{folder}/model.safetensors", "rb")',
                       f'open({str(check.TRACES)!r} + "/llama/model.safetensors", "rb")')
    port = tmp_path / "port.py"
    port.write_text(fixed, encoding="utf-8")
    status, out, _ = call("--case", 903, "--case", 999, sys.executable, port)
    assert status == 1 and "903 ok   999 NO" in out and "somewhere else than the weights" in out


def test_other_weights_change_the_text_as_foretold(tmp_path):
    for _ in range(3):
        request, expect = check.rolled(*CORE[903], tmp_path)
        got, _ = answer(request)
        assert not check.differ(expect["answer"], got, 1e-6, [])
        new = [[r["new"] for r in e["answer"]["rounds"]] for e in (expect, CORE[903][1])]
        assert new[0] != new[1]


def script(folder, body):
    """An executable that answers each case by the body, a Python expression or statement on `case`."""
    path = folder / "port"
    path.write_text(f"#!{sys.executable}\nimport json, sys, time\nfor line in sys.stdin:\n"
                    f"    case = json.loads(line)\n    {body}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize("body, words", [
    ("print('hello')", "line 1 of what it printed is no answer: 'hello'"),
    ("print(json.dumps({'y': 1}))", "is no answer"),
    ("print('[' * 100_000)", "is no answer"),
    ("sys.exit('no memory')", "ended with status 1, with 0 cases answered, and its last words are 'no mem"),
    ("time.sleep(60)", "was stopped after 1.0 seconds, with 0 cases answered"),
    ("sys.exit(3)", "with 0 cases answered; the first without an answer is case 301"),
    ("print('{\"case\": 301, \"y\": -nan}')", "is no answer (nan and inf are not JSON): '{"),
    ("pass", "0 of 2 cases pass"),
])
def test_a_port_that_gives_no_answer(call, tmp_path, body, words):
    seconds = 1 if "sleep" in body else 60
    status, out, _ = call("--seconds", seconds, "--case", 301, "--case", 302, script(tmp_path, body))
    assert status == 1 and words in out and "301 --   302 --" in out


@pytest.mark.parametrize("answer, words", [
    ({"freqs": {"shape": [4], "data": [1, 0.1, 0.01, 1e-3]}}, None),
    ({"freqs": {"shape": [4], "data": [1, 0.1, 0.01, 2e-3]}},
     "freqs[3]: expected 0.001, got 0.002, which is 0.001 off (1 of 4 numbers differ)"),
    ({"freqs": {"shape": [4], "data": [1, 0.1, 0.01, float("nan")]}}, "got NaN"),
    ({"freqs": {"shape": [2, 2], "data": [1, 0.1, 0.01, 1e-3]}}, "a tensor of shape [4], got [2, 2]"),
    ({"freqs": {"shape": [4], "data": [1, 0.1]}}, "expected a flat list of 4 numbers"),
    ({"freqs": {"shape": [4], "data": [1, 0.1, 0.01, None]}}, "expected a flat list of 4 numbers"),
    ({"freqs": [1, 0.1, 0.01, 1e-3]}, "expected an object"),
    ({}, "freqs: expected an object, got nothing"),
    ({"todo": True}, ""),
])
def test_what_is_said_of_an_answer(answer, words):
    got = {301: {"case": 301, **answer}}
    verdict = check.judge({301: CORE[301]}, got)[0][301]
    assert verdict == words if not words else words in verdict
    if words:
        assert "case 301, frequencies (step 3, rope)" in check.first_difference(
            {301: CORE[301]}, {301: verdict}, got)


def test_whole_numbers_must_be_the_same_and_others_may_be_rounded():
    def ok(want, got, tolerance=1e-3):
        return check.differ(want, got, tolerance, []) is None

    assert ok([1, 2], [1, 2]) and not ok([1, 2], [1, 3]) and not ok([1, 2], [1]) and not ok([1], "1")
    assert ok(None, None) and not ok(None, 1) and not ok(3, None)
    assert ok([True, 0], [True, 0]) and not ok(1, True) and not ok([True], [1]) and not ok(False, 0)
    assert ok(1.0, 1) and ok(2.0, 2.0019) and not ok(2.0, 2.0021) and ok(0.1, 0.1009) and not ok(0.1, 0.102)
    assert not ok(1.0, True) and not ok(1.0, float("inf")) and not ok(1.0, None)
    want = {"shape": [3], **check.fingerprint([1e3, -1e3, 2.0])}
    assert ok(want, {"shape": [3], "data": [1e3, -1e3 + 0.5, 2.0]})     # by the sum of the magnitudes
    assert not ok(want, {"shape": [3], "data": [1e3, -1e3 + 3, 2.0]})
    assert ok(want, want) and not ok(want, want | {"values": [0.0] * 5})


def test_which_cases_are_asked_for(call, capsys, tmp_path, monkeypatch):
    port = script(tmp_path, "print(json.dumps({'case': case['case'], 'todo': True}))")
    status, out, _ = call("--to", 3, port)
    assert status == 1 and "0 of 10 cases pass" in out and "304 --" in out and "401" not in out
    _, out, _ = call("--core", port)
    assert "481" not in out and "991" not in out and "999 --" in out
    call.refuses(["--case", 12345, port], tmp_path, "there is no such case")
    call.refuses(["--case", 301, "no_port"], tmp_path, "no_port: cannot be run (No such file or directory)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    call.refuses(["--case", 301, "port"], tmp_path, "did you mean ./port?")
    assert check.parse(["--to", "1", "./port", "--to", "2", "--big"]).to == 1
    said = capsys.readouterr().err
    assert "--to stands after the port" in said and "--big" not in said
    with pytest.raises(SystemExit):
        check.main([])
    assert "name a port" in capsys.readouterr().err


# --- the page


def test_the_page_says_what_the_code_does():
    page = (PORTING / "README.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (\d)\. (.*?): cases? [\d to and]+$", page, re.M))
    assert [name.lower() for name in sections.values()] == check.STEPS
    for number, (request, _) in CORE.items():
        words = page.split(f"\n## {number // 100}. ")[1].split("\n## ")[0]
        assert f"`{request['op']}` (" in words, request["op"]
        for key in request.keys() - {"case", "step", "op", "trees"}:
            assert re.search(rf"\b{key}\b", words), f"{request['op']}: {key} is not explained"
        for key in CORE[number][1]["answer"]:
            assert f"`{key}`" in words or request["trees"], f"{request['op']}: {key} is not explained"
    asked, told = (json.loads(re.search(rf"^{word} +(.*)$", page, re.M)[1]) for word in ("asked", "answered"))
    assert asked.keys() == CORE[404][0].keys()
    assert not check.differ(told["y"], answer(asked)[0]["y"], 1e-7, [])


def test_the_page_names_only_what_is_there():
    page = (PORTING / "README.md").read_text(encoding="utf-8")
    for name in re.findall(r"`([\w/]+\.(?:py|jsonl))`", page):
        assert any((folder / name).is_file() for folder in (PORTING, PORTING.parent)), name
    for line in re.findall(r"^python porting/check.py (.*?)(?:  |$)", page, re.M):
        check.parse(line.split("#")[0].split())
