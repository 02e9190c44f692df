"""Sends a port every case of traces/ and reports the first difference, its size and its usual
cause.

    python porting/check.py ./my-port                     every case
    python porting/check.py --to 5 ./my-port              the cases of steps 1 to 5
    python porting/check.py --case 302 python my_port.py  one case
    python porting/check.py --bfloat16 ./my-port          does it round where the library rounds?
    python porting/check.py --exact ./my-port             do blocks give the bits of single tokens?

A port is any program that reads one JSON case per line and prints one answer per line. It never
sees the expected answers: they are compared afterwards, here, with nothing but Python's standard
library.
"""
import argparse
import difflib
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

VERSION, DIGEST = 6, "3948c622b802"  # of the traces: if new ones differ, change both
ROOT = Path(__file__).resolve().parent.parent
TRACES = ROOT / "porting" / "traces"
STORIES = TRACES / "stories"
STEPS = ["safetensors", "norm", "rope", "mask and attention", "sub-layer", "forward", "cache",
         "coins and sampling", "round", "race"]
MOST = 2**26    # bytes of a port's output; all right answers together take 1 MB
ROLLED = 999  # the number of the case that `rolled` makes for every run
# a uniform has 53 bits, of which a port prints nine digits: float32 has seven
CLOSE = dict.fromkeys(("u_draft", "u_flip", "u_next"), 2e-9)
HALF = "norm", "softcap", "sublayer", "forward"     # what is also compared in bfloat16
SAME = 0.95     # the share of its numbers that must be ours
EXACT = [29, 8, 3, 25, 28, 29, 39, 16, 20, 38, 12, 32]  # the tokens that --exact reads in two ways

# --- what is compared


def fingerprint(numbers):
    """A summary of a tensor: its sum and the sum of its magnitudes, in float64, and five values:
    the first, those a quarter, a half and three quarters of the way, rounded down, and the last.

    >>> fingerprint([3.0, -1.0, 2.0])
    {'sum': 4.0, 'magnitudes': 6.0, 'values': [3.0, 3.0, -1.0, -1.0, 2.0]}
    """
    return {"sum": math.fsum(numbers), "magnitudes": math.fsum(map(abs, numbers)),
            "values": [numbers[i * (len(numbers) - 1) // 4] for i in range(5)]}


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def differ(want, got, tolerance, where="", size=1.0):
    """How an answer differs from what is expected, in words, at the first difference; None if there
    is none.

    Whole numbers must be the same. For others |got - want| may be tolerance * max(size, |want|),
    never NaN. Entries are compared before lengths: the first wrong entry says more than the number
    of entries.
    """
    if isinstance(want, dict):
        if not isinstance(got, dict):
            return f"{where or 'the answer'}: expected an object, got {brief(got)}"
        if "shape" in want and "sum" in want:
            return differ_tensor(want, got, tolerance, where)
        if wrong := misspelt(want, got, where):
            return wrong
        return first(differ(value, got.get(key), min(tolerance, CLOSE.get(key, tolerance)),
                            f"{where}.{key}".strip("."), size) for key, value in want.items())
    if isinstance(want, list):
        if not isinstance(got, list):
            return f"{where}: expected {len(want)} entries: {brief(want)}; got {brief(got)}"
        wrong = first(differ(want[i], got[i], tolerance, f"{where}[{i}]", size)
                      for i in range(min(len(want), len(got))))
        if not wrong and len(got) != len(want):
            wrong = (f"{where}: expected {len(want)} entries: {brief(want)}; "
                     f"got {len(got)} entries: {brief(got)}")
        return wrong
    if isinstance(want, float):
        if not is_number(got) or not math.isfinite(got):
            return f"{where}: expected the number {want:.9g}, got {brief(got)}{cause(got)}"
        if abs(got - want) > tolerance * max(size, abs(want)):
            return (f"{where}: expected {want:.9g}, got {got:.9g}, "
                    f"which is {abs(got - want):.2g} off")
    elif got != want or isinstance(got, bool) != isinstance(want, bool):    # in Python True == 1
        return f"{where}: expected {want}, got {brief(got)}{cause(got)}"
    return None


def first(differences):
    return next((d for d in differences if d), None)


def cause(got):
    """What usually produces a number of the wrong kind."""
    if isinstance(got, str):
        return ", a string: print numbers without quotes"
    if got is None:
        return " (JavaScript prints NaN as null)"
    if is_number(got) and got != got:
        return ": 0 / 0, or the soft-max of a row in which every slot is hidden"
    if is_number(got) and 2**53 <= abs(got) < math.inf:
        return ", which has more than 53 bits: 64-bit products must wrap around (step 8)"
    return ""


def misspelt(want, got, where):
    """Names the key of an answer that looks like a missing one; None if there is none."""
    others = [key for key in got if key not in want]
    for key in want:
        close = difflib.get_close_matches(key, others, 1)
        if key not in got and close:
            return f"{where or 'the answer'}: there is no key {key!r}, but a key {close[0]!r}"
    return None


def differ_tensor(want, got, tolerance, where):
    """`differ` for a tensor: number by number, or by its fingerprint where nothing else is
    stored."""
    if got.get("shape") != want["shape"]:
        return f"{where}: expected a tensor of shape {want['shape']}, got {brief(got.get('shape'))}"
    data, count = got.get("data"), math.prod(want["shape"])
    if data is None and "data" not in want:     # the case `weights` is answered by fingerprints
        return differ_print(want, got, count, tolerance, where)
    if not isinstance(data, list) or len(data) != count:
        size = f"{len(data)} entries" if isinstance(data, list) else brief(data)
        return f"{where}.data: expected a flat list of {count} numbers, got {size}"
    for i, x in enumerate(data):
        if not is_number(x):
            return f"{where}.data[{i}]: expected a number, got {brief(x)}{cause(x)}"
    if "data" not in want:
        return differ_print(want, fingerprint(data), count, tolerance, where)
    mean = max(1.0, want["magnitudes"] / count)
    places = itertools.product(*map(range, want["shape"]))
    bad = [d for at, a, b in zip(places, want["data"], data, strict=True)
           if (d := differ(float(a), b, tolerance, f"{where}{list(at)}", mean))]
    return f"{bad[0]} ({len(bad)} of {count} numbers differ)" if bad else None


def differ_print(want, got, count, tolerance, where=""):
    """`differ` for the fingerprint of `count` numbers. A number near 0 among large ones is the
    result of a subtraction, so its rounding error is relative to theirs. The error of a sum is
    relative to all of them."""
    sizes = {"sum": want["magnitudes"], "magnitudes": 1.0, "values": want["magnitudes"] / count}
    return first(differ(want[key], got.get(key), tolerance, f"{where}.{key}", max(1.0, size))
                 for key, size in sizes.items())


def differ_half(want, got):
    """How an answer in bfloat16 differs, in words; None if nearly all numbers are the same.
    Neighbours in bfloat16 are 4e-3 of their size apart, so a printed number leaves no doubt."""
    pairs = []
    for key in want:
        ours = numbers(want[key])
        yours = numbers(got.get(key))
        if len(ours) != len(yours):
            return f"{key}: expected {len(ours)} numbers, got {len(yours)}"
        pairs += [(key, a, b) for a, b in zip(ours, yours, strict=True)]
    wrong = [(key, a, b) for key, a, b in pairs if abs(a - b) > 1e-4 * abs(a)]
    if len(wrong) <= (1 - SAME) * len(pairs):
        return None
    key, a, b = wrong[0]
    return (f"{len(wrong)} of {len(pairs)} numbers are others in bfloat16; the first is in {key}: "
            f"expected {a:.9g}, got {b:.9g}")


def brief(value, most=70):
    text = "nothing" if value is None else json.dumps(value)
    return text if len(text) <= most else text[:most] + "..."


# --- cases


def read_lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_cases(folder):
    """{number: (request, what is expected)} of a folder of traces. The rounds of a case are in
    their own file, one per line."""
    requests = read_lines(folder / "cases.jsonl")
    expected = {line["case"]: line for line in read_lines(folder / "answers.jsonl")}
    for line in read_lines(folder / "rounds.jsonl"):
        number = line.pop("case")
        expected[number]["answer"].setdefault("rounds", []).append(line)
    return {request["case"]: (request, expected[request["case"]]) for request in requests}


def half_cases(requests):
    """The requests that are also answered in bfloat16."""
    return [request | {"dtype": "bfloat16"} for request in requests if request["op"] in HALF]


def read_half(folder):
    """`read_cases` for bfloat16: inputs, weights and what is computed are rounded to it."""
    answers = {line["case"]: line["answer"] for line in read_lines(folder / "bfloat16.jsonl")}
    why = "something is rounded at another place than ours: README.md has a table of the places"
    return {r["case"]: (r, {"answer": answers[r["case"]], "catches": why, "half": True})
            for r in half_cases(read_lines(folder / "cases.jsonl"))}


def exact_requests():
    """Of each of the two models, the same tokens in blocks of four and one by one."""
    requests = []
    for model in ("llama", "gemma2"):
        for width in (4, 1):
            every = {"sublayers": None, "parents": None, "keep": None}
            blocks = [{"first": i, "tokens": EXACT[i : i + width], **every}
                      for i in range(0, len(EXACT), width)]
            requests.append({"case": len(requests) + 1, "step": 7, "op": "blocks", "trees": False,
                             "model": f"porting/traces/{model}", "blocks": blocks})
    return requests


def absolute(request):
    """A request as the port gets it: with an absolute path to its model."""
    return request | {"model": str(ROOT / request["model"])} if "model" in request else request


def rolled(request, expect, folder):
    """A greedy case with other weights and a known answer: every token t is renamed to t + some
    number, in the rows of the embedding and of the output head and in the prompt. Then the answer
    has the same tokens, renamed. A port whose answers do not come from the weights that it is given
    fails this case."""
    source = ROOT / request["model"]
    shutil.copy(source / "config.json", folder)
    blob = bytearray((source / "model.safetensors").read_bytes())
    start = 8 + int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8:start])
    V = header["model.embed_tokens.weight"]["shape"][0]
    by = random.randrange(1, V)
    for name, entry in header.items():
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            first, last = entry["data_offsets"]
            cut = start + last - by * ((last - first) // V)
            blob[start + first : start + last] = (
                blob[cut : start + last] + blob[start + first : cut])
    (folder / "model.safetensors").write_bytes(blob)

    def rename(ids):
        return [rename(t) for t in ids] if isinstance(ids, list) else (ids + by) % V

    ids = ("block", "draft", "token", "new")
    renamed = [{key: rename(value) if key in ids else value for key, value in line.items()}
               for line in expect["answer"]["rounds"]]
    why = "the tokens come from somewhere else than the weights that the case names"
    return (request | {"case": ROLLED, "model": str(folder), "prompts": rename(request["prompts"])},
            expect | {"case": ROLLED, "catches": why, "answer": {"rounds": renamed}})


# --- the port


def ask(command, requests, seconds):
    """{number: answer}, and what else went wrong, in words; None if nothing did.

    The port writes to files, so a pipe that is full stops neither side, and a child that the port
    leaves behind holds nothing open.
    """
    with (tempfile.TemporaryFile() as questions, tempfile.TemporaryFile() as out,
          tempfile.TemporaryFile() as err):
        questions.write("".join(json.dumps(absolute(r)) + "\n" for r in requests).encode())
        questions.seek(0)
        try:
            port = subprocess.Popen(command, stdin=questions, stdout=out, stderr=err,
                                    start_new_session=True)     # a group of its own, for `end`
        except OSError as e:
            here = f"; did you mean ./{command[0]}?" * Path(command[0]).is_file()
            raise ValueError(f"{command[0]}: cannot be run ({e.strerror}){here}") from None
        try:
            stopped = watch(port, seconds, out, err)
        finally:
            end(port)
        out.seek(0)
        found, trouble = read_answers(out)
        err.seek(max(0, os.fstat(err.fileno()).st_size - 10_000))
        words = last_words(err.read().decode(errors="replace"))
    if stopped or port.returncode != 0:
        trouble = stopped or f"it ended with status {port.returncode}"
        trouble += f", with {len(found)} cases answered"
        if words:
            trouble += f", and its last words are {words[:200]!r}"
        if missing := [r["case"] for r in requests if r["case"] not in found]:
            trouble += f"; the first without an answer is case {missing[0]}"
    if not found and not trouble:
        trouble = ("it ended with status 0 and printed nothing: does it read standard input, and "
                   "does it flush what it prints?")
        if words:
            trouble += f" Its last words are {words[:200]!r}"
    return found, trouble


def watch(port, seconds, *files):
    """Wait until the port ends. If it takes too long or prints too much, say so, in words."""
    latest = time.monotonic() + seconds
    while port.poll() is None:
        if time.monotonic() > latest:
            return f"it was stopped after {seconds} seconds"
        if sum(os.fstat(file.fileno()).st_size for file in files) > MOST:
            return f"it was stopped because it printed more than {MOST >> 20} MB"
        time.sleep(0.01)
    return None


def end(port):
    """End the port and what it started, such as the program that a wrapper script calls."""
    if os.name == "posix":
        with suppress(ProcessLookupError, PermissionError):     # all of them have ended
            os.killpg(port.pid, signal.SIGKILL)
    port.kill()
    port.wait()


def read_answers(lines):
    """{number: answer}, and what is wrong with the first line that is none."""
    found, trouble = {}, None
    for place, line in enumerate(lines, 1):
        line = line.decode(errors="replace").rstrip("\r\n")
        wrong = None
        try:
            answer = json.loads(line)
            found.setdefault(answer["case"], answer)
            if isinstance(answer["case"], str):
                wrong = f'line {place}: "case" is the string {answer["case"]!r}, not a number'
        except (ValueError, KeyError, TypeError, RecursionError):
            why = " (nan and inf are not JSON)" if re.search(r"\b(nan|inf)\b", line) else ""
            wrong = f"line {place} of what it printed is no answer{why}: {line[:70]!r}"
        trouble = trouble or wrong
    return found, trouble


def last_words(err):
    """The last line of a port's standard error that names an error, else its last line. Node ends
    with its version, Java with the calls, and Rust puts the message on the line after "panicked at
    ...:", and may print a backtrace after it.

    >>> last_words("app.js:3\\n\\nError: no such op\\n    at main (app.js:3)\\n\\nNode.js v20.1.0")
    'Error: no such op'
    """
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    named = [i for i, line in enumerate(lines)
             if re.search("error|panic|exception", line, re.I) and not line.startswith("at ")]
    panics = [i for i in named if " panicked at " in lines[i]]
    i = (panics or named or [len(lines) - 1])[-1]
    return " ".join(lines[i : i + 2] if named and lines[i].endswith(":") else lines[i : i + 1])


def judge(cases, answers):
    """{number: None if it passes, else how it differs; "" if the port does not answer the case
    yet}"""
    verdicts = {}
    for number, (_, expect) in cases.items():
        answer = answers.get(number)
        if answer is None or answer.get("todo"):
            verdicts[number] = ""
        elif "half" in expect:
            verdicts[number] = differ_half(expect["answer"], answer)
        else:
            verdicts[number] = differ(expect["answer"], answer, expect["tolerance"])
    return verdicts


def numbers(value):
    """All finite numbers of an answer in one list; objects in the order of their keys."""
    if isinstance(value, dict):
        value = value.get("data", [value[key] for key in sorted(value)])
    if isinstance(value, list):
        return [x for v in value for x in numbers(v)]
    return [float(value)] if is_number(value) and math.isfinite(value) else []


def print_of(answer, keys):
    """The fingerprint of all numbers of an answer, and how many they are."""
    found = numbers([answer.get(key) for key in keys])
    return {"count": len(found), **(fingerprint(found) if found else {})}


def alike(told, got, tolerance):
    """Whether two fingerprints of whole answers are the same up to rounding."""
    count = told["count"]
    return count == got["count"] > 0 and not differ_print(told, got, count, tolerance)


def named(number, expect, answer, refuted=()):
    """The mistakes that give exactly this wrong answer: names from wrong.txt."""
    got = print_of(answer, sorted(expect["answer"]))
    return [line["mistake"] for line in read_lines(TRACES / "mistakes.jsonl")
            if line["case"] == number and line["mistake"] not in refuted
            and alike(line["print"], got, expect["tolerance"])]


def refuted_by(verdicts):
    """The mistakes that the port does not make, because a case that would fail with them passes."""
    return {line["mistake"] for line in read_lines(TRACES / "mistakes.jsonl")
            if verdicts.get(line["case"], "") is None}


def only_form(expect, answer):
    """Whether the numbers of an answer are right, one by one, or there are none at all."""
    ours = numbers(expect["answer"])
    yours = numbers({key: answer.get(key) for key in expect["answer"]})
    most = expect["tolerance"]
    return not yours or len(ours) == len(yours) and all(
        abs(a - b) <= most * max(1, abs(a)) for a, b in zip(ours, yours, strict=True))


# --- what is printed


def matrix(cases, verdicts):
    """A line for each step, or more where it has more than nine cases."""
    mark = {n: "ok" if verdict is None else "NO" if verdict else "--"
            for n, verdict in verdicts.items()}
    lines = []
    for step, name in enumerate(STEPS, 1):
        marks = [f"{n} {mark[n]}" for n, (request, _) in cases.items() if request["step"] == step]
        for i in range(0, len(marks), 9):
            lines.append(f"{f'{step} {name}' if i == 0 else '':21}" + "   ".join(marks[i : i + 9]))
    return lines


def spent_otherwise(want, got, verdict, tolerance):
    """How the uniforms of the first wrong round differ, if the round drafts as many tokens as it
    should (all rounds before it are right, so it began at the same uniform). None if they do not
    differ."""
    found = re.match(r"rounds\[(\d+)\]", verdict)
    if found is None:
        return None
    want, got = (answer["rounds"][int(found[1])] for answer in (want, got))
    try:
        if [len(row or ()) for row in want["draft"]] != [len(row or ()) for row in got["draft"]]:
            return None
        return first(differ(want[key], got[key], CLOSE[key], key) for key in CLOSE)
    except (KeyError, TypeError):
        return None


def first_difference(cases, verdicts, answers):
    """The lines that say what to fix first; none if nothing differs."""
    number = next((n for n, verdict in verdicts.items() if verdict), None)
    if number is None:
        return []
    request, expect = cases[number]
    lines = [f"The first difference: case {number}, {request['op']} (step {request['step']}, "
             f"{STEPS[request['step'] - 1]})", f"    {verdicts[number]}"]
    if "half" in expect:
        lines.append(f"    Usually: {expect['catches']}.")
        return lines
    refuted = refuted_by(verdicts)
    if only_form(expect, answers[number]):
        lines.append("    The numbers may be right; their form is not. "
                     'A tensor is {"shape": [...], "data": [...]}.')
    elif names := named(number, expect, answers[number], refuted):
        lines += [f"    This very answer comes out if {name}." for name in names]
    elif spent := spent_otherwise(expect["answer"], answers[number], verdicts[number],
                                  expect["tolerance"]):
        lines.append(f"    Uniforms are spent in another order: {spent}")
    elif expect["catches"] not in refuted:
        lines.append(f"    Usually: {expect['catches']}.")
    if expect["margin"] and re.search(r": expected -?\d+, got -?\d+$", verdicts[number]):
        lines.append(f"    Rounding is not the cause: no decision of this case is closer than "
                     f"{expect['margin']:.2g} to going the other way.")
    return lines


def report(cases, answers):
    """(lines, whether all cases pass)"""
    verdicts = judge(cases, answers)
    passed = sum(verdict is None for verdict in verdicts.values())
    lines = matrix(cases, verdicts)
    lines.append(f"{passed} of {len(cases)} cases pass (traces version {VERSION})")
    return lines + first_difference(cases, verdicts, answers), passed == len(cases)


def report_exact(answers):
    """(lines, whether all logits of a token are the same in every block that it is read in)"""
    lines, right, requests = [], True, exact_requests()
    for fours, ones in zip(requests[::2], requests[1::2], strict=True):
        both = [numbers(answers.get(r["case"], {}).get("logits")) for r in (fours, ones)]
        says = "every logit has the same bits in blocks of four and alone"
        if not both[0] or len(both[0]) != len(both[1]):
            says, right = "no answer, or not as many logits in both ways", False
        elif both[0] != both[1]:
            i = next(i for i, (a, b) in enumerate(zip(*both, strict=True)) if a != b)
            token, logit = divmod(i, len(both[0]) // len(EXACT))
            says, right = (f"logit {logit} of token {token} is {both[0][i]!r} in a block of four, "
                           f"and {both[1][i]!r} alone"), False
        lines.append(f"{Path(fours['model']).name}: {says}")
    if not right:
        lines.append("So rounding depends on the block: near a tie, the draft can change a text.")
    return lines, right


def parse(argv):
    a = argparse.ArgumentParser(description="Compare a port with the traces.")
    a.add_argument("--case", type=int, action="append", metavar="N",
                   help="only this case; may be repeated")
    a.add_argument("--to", type=int, default=10, metavar="STEP",
                   help="only the cases of steps 1 to STEP")
    a.add_argument("--core", action="store_true",
                   help="no cases of trees, and none on weights/stories-llama")
    a.add_argument("--no-trees", action="store_true", help="no cases of trees")
    a.add_argument("--no-stories", action="store_true", help="none on weights/stories-llama")
    a.add_argument("--bfloat16", action="store_true", help="steps 2 to 6 in bfloat16, bit by bit")
    a.add_argument("--exact", action="store_true", help="has a token the same bits in every block?")
    a.add_argument("--seconds", type=float, default=300,
                   help="stop the port after this time (default 300)")
    a.add_argument("--tolerance", type=float,
                   help="replaces the tolerances of the traces, for half precision")
    a.add_argument("command", nargs=argparse.REMAINDER,
                   help="the port, such as ./my-port or python port.py")
    args = a.parse_args(argv)
    if not args.command:
        a.error("name a port, such as ./my-port or python my_port.py")
    return args


def choose(args, folder):
    """The chosen cases. One has other weights, which are made in `folder`."""
    if args.bfloat16:
        cases = read_half(TRACES)
    else:
        cases = read_cases(TRACES)
        cases[ROLLED] = rolled(*cases[903], folder)
        if not (args.core or args.no_stories):
            cases |= read_cases(STORIES)
        if args.core or args.no_trees:
            cases = {n: case for n, case in cases.items() if not case[0]["trees"]}
    chosen = {n: case for n, case in sorted(cases.items())
              if case[0]["step"] <= args.to and (not args.case or n in args.case)}
    if args.tolerance is not None:
        for _, expect in chosen.values():
            expect["tolerance"] = args.tolerance
    return chosen


def main(argv=None):
    args = parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        cases = choose(args, Path(folder))
        requests = exact_requests() if args.exact else [request for request, _ in cases.values()]
        try:
            if not requests:
                raise ValueError("there is no such case")
            answers, trouble = ask(args.command, requests, args.seconds)
        except ValueError as e:
            print(f"check.py: {e}", file=sys.stderr)
            return 2
    lines, right = report_exact(answers) if args.exact else report(cases, answers)
    if trouble:
        lines.append(f"The port: {trouble}")
    print("\n".join(lines))
    return int(not right or trouble is not None)


if __name__ == "__main__":
    sys.exit(main())
