"""Answers the cases of traces/ again with the library, and records what wrong ports and wrong
engines answer instead: a port in any language that makes one of their mistakes gives one of these
answers, so the checker can name the mistake. Each is made by one change from wrong.txt, a port from
numpy_port.py and an engine from the library.

    python -m porting.make core        traces/, without the next ones
    python -m porting.make stories     traces/stories/: the cases on weights/stories-llama
    python -m porting.make engine      engine.json

The cases themselves (cases.jsonl) and the two small models that they run on are data, which were
drawn at random once. A case whose closest decision is within MARGIN of going the other way is an
error, and its inputs must be changed. Rounding in float32 therefore cannot change a token of any
trace.
"""
import hashlib
import json
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FunctionType

import numpy as np
import torch

from checkpoint import read_tokenizer
from exercises.cuts import change, read
from methods import block
from porting import check, engine, library_engine
from porting.check import ROOT
from porting.library_port import Close, Watch, answer, tree_margin

PORT = "porting/numpy_port.py"
SOURCE = (ROOT / PORT).read_text(encoding="utf-8")
ROWS = read(Path(__file__).with_name("wrong.txt"))
MISTAKES = [row[1:5] for row in ROWS if row.file == PORT]   # scope, old, new, mistake
ENGINES = [row[:5] for row in ROWS if row.file != PORT]     # file, scope, old, new, mistake
MARGIN = 1e-4
ENGINE_MARGIN = 1e-3
MAY_FAIL = {    # others: "race"
    "verification.py": ["token", "block"], "methods/block.py": ["block"],
    "methods/trees.py": ["tree"], "porting/library_engine.py": ["race", "match"]}
# of a new case, by its step
TOLERANCE = [1e-6, 1e-5, 1e-5, 1e-5, 1e-5, 1e-4, 1e-4, 1e-5, 1e-3, 1e-3]


def wrong_port(scope, old, new):
    """The source of the port with that mistake."""
    return change(SOURCE, scope, old, new)


def answers(source, requests):
    """{number: answer} of a port given by its source, run in this process. Failed cases have no
    answer."""
    space, found = {"__name__": "port"}, {}
    exec(compile(source, "wrong port", "exec"), space)  # our own source, with one line changed
    for request in requests:
        if not request["trees"]:
            with suppress(ArithmeticError, LookupError, StopIteration, ValueError):
                with np.errstate(all="ignore"):
                    found[request["case"]] = space["OPS"][request["op"]](request)
    return found


def wrong_engine(file, scope, old, new):
    """`library_engine.answer` with a mistake in one function of the library or of itself."""
    space = {"__name__": "engine", "__file__": str(ROOT / "porting" / "library_engine.py")}
    source = change((ROOT / file).read_text(encoding="utf-8"), scope, old, new)
    exec(compile(source, file, "exec"), space)
    if "answer" in space:
        return space["answer"]
    rules = {rule: space.get(f.__name__, f) for rule, f in library_engine.RULES.items()}
    if file == "verification.py":   # block verification shares its parts
        shared = vars(block) | {name: space[name] for name in ("against", "next_token")}
        rules["block"] = FunctionType(block.verify_block.__code__, shared, argdefs=(None,))
    return partial(library_engine.answer, rules=rules)


def is_exact(request):
    """Whether all numbers of a choice are multiples of 1/8, or all logits are equal: then nothing
    is rounded, and even a decision exactly on the edge is safe."""
    if "rule" in request:
        chances = [request["p"], request["q"], request["uniforms"]]
        return all(x * 8 % 1 == 0 for x in check.numbers(chances))
    if request.get("u") == 1 - 2**-53:      # the largest uniform
        request = request | {"u": 0}
    return (request["op"] in ("choose", "verify")
            and all(x * 8 % 1 == 0 for x in check.numbers(request))
            or request["op"] == "probs" and len(set(request["logits"]["data"])) == 1)


def with_prints(value, brief):
    """Add to every tensor its fingerprint; if brief, in place of its numbers."""
    if isinstance(value, list):
        return [with_prints(v, brief) for v in value]
    if not isinstance(value, dict):
        return value
    if "data" not in value:
        return {key: with_prints(v, brief) for key, v in value.items()}
    told = {"shape": value["shape"], **check.fingerprint(value["data"])}
    return told if brief else told | {"data": value["data"]}


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def write(folder, out, brief=False):
    """Answer the cases of a folder; `out` receives the files. What an earlier answer said about its
    tolerance and about what it catches stays."""
    earlier = {line["case"]: line for line in check.read_lines(folder / "answers.jsonl")}
    lines, rounds = [], []
    for request in check.read_lines(folder / "cases.jsonl"):
        number = request["case"]
        told, margin = answer(request)
        if margin < MARGIN and not is_exact(request):
            raise SystemExit(f"case {number}: its closest decision is within {margin:.1e} "
                             "of another")
        lines.append(earlier.get(number) or {
            "case": number, "catches": "say here which mistake it catches",
            "tolerance": TOLERANCE[request["step"] - 1]})
        lines[-1]["margin"] = None if margin == float("inf") else round(margin, 6)
        if "words" in request:
            ids = request["prompts"][0] + [t for r in told["rounds"] for t in r["new"][0]]
            lines[-1]["words"] = read_tokenizer(ROOT / request["model"]).decode(ids)
        rows = told.pop("rounds", None)
        rounds += [{"case": number, **line} for line in rows or ()]
        if rows == []:
            told["rounds"] = []     # which the file of rounds cannot say
        lines[-1]["answer"] = with_prints(told, brief)
        print(f"{number} {request['op']:12} margin {margin:.1e}", flush=True)
    write_lines(out / "answers.jsonl", lines)
    write_lines(out / "rounds.jsonl", rounds)


def write_half(out):
    """The answers in bfloat16 to the cases of single functions and of whole passes."""
    lines = []
    for request in check.half_cases(check.read_lines(check.TRACES / "cases.jsonl")):
        lines.append({"case": request["case"], "answer": answer(request)[0]})
    write_lines(out / "bfloat16.jsonl", lines)


def write_mistakes(out):
    """The fingerprint of each wrong answer of each wrong port. One that equals the fingerprint of
    the right answer is left out: a right answer must not be called a mistake."""
    cases, lines = check.read_cases(check.TRACES), []
    requests = [check.absolute(request) for request, _ in cases.values()]
    for scope, old, new, mistake in MISTAKES:
        for number, wrong in answers(wrong_port(scope, old, new), requests).items():
            expect = cases[number][1]
            said = json.loads(json.dumps(wrong))
            if check.differ(expect["answer"], said, expect["tolerance"]):
                told, right = (check.print_of(x, sorted(expect["answer"]))
                               for x in (wrong, expect["answer"]))
                if not check.alike(told, right, expect["tolerance"]):
                    lines.append({"case": number, "mistake": mistake, "print": told})
        print(f"{sum(line['mistake'] == mistake for line in lines):3} cases name it: {mistake}",
              flush=True)
    write_lines(out / "mistakes.jsonl", lines)


def replies(reply, cases):
    """{number: answer} of an engine, given as a function. Where it fails there is none."""
    found = {}
    for case in cases:
        for request in engine.requests_of(case):
            with suppress(ArithmeticError, LookupError, RuntimeError):
                found[request["case"]] = reply(request)
    return found


def engine_answer(case, reply=library_engine.answer):
    """What an engine, given as a function, says to a case; None where it fails."""
    return engine.said(case, replies(reply, [case]))[0]


def engine_margin(case):
    """How far the closest decision of a case is from going the other way."""
    coins = Watch()
    rules = library_engine.RULES | {"race": lambda seed: Close(seed, coins.note)}
    for request in engine.requests_of(case):
        library_engine.answer(request, rules, coins)
        if case["rule"] == "tree":
            q = None if case["q"] is None else torch.tensor(case["q"])
            coins.note(tree_margin(torch.tensor(case["p"]), request["tokens"], case["parents"], q))
    return coins.margin


def write_engine(cases):
    """Answer the cases of engines, with the right engine and with the wrong ones."""
    for case in cases:
        case["margin"] = round(engine_margin(case), 6)
        if case["margin"] < ENGINE_MARGIN and not is_exact(case):
            raise SystemExit(f"case {case['case']}: its closest decision is within "
                             f"{case['margin']}")
        case["answer"] = engine_answer(case)
        case["wrong"] = {}
    for i, (file, *row, mistake) in enumerate(ENGINES):
        reply = wrong_engine(file, *row)
        for case in (case for case in cases if case["rule"] in MAY_FAIL.get(file, ["race"])):
            got = engine_answer(case, reply)
            if got and not engine.alike(case["answer"], got):
                case["wrong"][str(i)] = got
        print(f"{sum(str(i) in case['wrong'] for case in cases):3} cases name it: {mistake}",
              flush=True)
    mistakes = json.dumps([mistake for *_, mistake in ENGINES])
    rows = ",\n".join(map(json.dumps, cases))
    engine.CASES.write_text(f'{{"mistakes": {mistakes},\n"cases": [\n{rows}\n]}}\n',
                            encoding="utf-8")


def digest():
    """A digest of all files of the core traces. check.py holds it together with the version."""
    files = sorted(p for p in check.TRACES.rglob("*")
                   if p.is_file() and check.STORIES not in p.parents)
    return hashlib.sha256(b"".join(p.read_bytes() for p in files)).hexdigest()[:12]


@torch.inference_mode()
def main(argv):
    torch.set_num_threads(1)  # these models are too small to share
    if argv == ["core"]:
        write(check.TRACES, check.TRACES)
        write_half(check.TRACES)
        write_mistakes(check.TRACES)
        if digest() != check.DIGEST:
            print(f"These are not the traces of version {check.VERSION}. "
                  "If others have those, raise VERSION "
                  f"in porting/check.py. In any case write there: DIGEST = {digest()!r}")
    elif argv == ["stories"]:
        write(check.STORIES, check.STORIES, brief=True)
    elif argv == ["engine"]:
        write_engine(json.loads(engine.CASES.read_text(encoding="utf-8"))["cases"])
    else:
        raise SystemExit("say core, stories or engine: which cases?")


if __name__ == "__main__":
    main(sys.argv[1:])
