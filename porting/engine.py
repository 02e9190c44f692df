"""Sends an engine the cases of engine.json: does it verify drafts as it should?

    python porting/engine.py ./my-engine                  all of them
    python porting/engine.py --rule token ./my-engine     the cases of one rule; may be repeated
    python porting/engine.py --texts 20000 ./my-engine    judge an engine with noise of its own

An engine is any program that reads one JSON case per line and prints one answer per line, as in
check.py. It needs no model: p, q, the drafted tokens and the uniforms are given. README.md, "Only
verification", says what each rule computes. Nothing but Python's standard library is needed here.
"""
import argparse
import itertools
import json
import math
import random
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from porting import check  # noqa: E402

CASES = Path(__file__).with_name("engine.json")
RULES = ["token", "block", "tree", "race", "match"]     # in which order they are reported
KEPT_HERE = {"answer", "margin", "wrong", "law"}    # what the engine does not get
EXACT = 1e-6                                    # how far the numbers of a law may be off
SURE = 4.0      # standard deviations: a right engine is called wrong once in 30,000 tests

# --- what is sent


def draws(case):
    """All draws of a law: (chance, tokens, uniforms). Every draft that q can draw, or the copied
    one; law[i]: into how many equal parts uniform i is cut, of which it takes the middles."""
    V = len(case["p"][0])
    drafts = [case["tokens"]]
    if case["q"] is not None:
        drafts = itertools.product(range(V), repeat=len(case["q"]))
    for tokens in drafts:
        chance = 1.0
        for row, token in zip(case["q"] or [], tokens):     # noqa: B905, copied tokens have no row
            chance *= row[token]
        if chance > 0:
            for parts in itertools.product(*map(range, case["law"])):
                uniforms = [(i + 0.5) / n for i, n in zip(parts, case["law"], strict=True)]
                yield chance / math.prod(case["law"]), list(tokens), uniforms


def requests_of(case):
    """What the engine gets of a case: one request, or one for each draw of a law."""
    request = {key: value for key, value in case.items() if key not in KEPT_HERE}
    if "law" not in case:
        return [request]
    return [request | {"case": 100_000 * case["case"] + i, "tokens": tokens, "uniforms": uniforms}
            for i, (_, tokens, uniforms) in enumerate(draws(case))]


# --- what is answered


def law_of(case, answers):
    """The answers to all draws of a law: how far the text is off, in total variation, and how many
    tokens are accepted on average. Each text is completed with draws from p, whose rows depend on
    the place alone."""
    p = places_of(case)
    written = Counter()
    accepted = 0.0
    for (chance, tokens, _), answer in zip(draws(case), answers, strict=True):
        text = text_of(case, tokens, answer)
        written[text] += chance
        accepted += chance * (len(text) - 1)
    law = Counter()
    for text, chance in written.items():
        for rest in itertools.product(range(len(p[0])), repeat=len(p) - len(text)):
            law[text + rest] += chance * chance_of(rest, p[len(text) :])
    texts = itertools.product(range(len(p[0])), repeat=len(p))
    off = sum(abs(law[text] - chance_of(text, p)) for text in texts) / 2
    return {"off": off, "accepted": accepted}


def parents_of(case):
    return case.get("parents") or range(len(case["p"]) - 1)


def places_of(case):
    """The rows of p by their place in the text. In a law, siblings have the same row."""
    places = [0]
    for parent in parents_of(case):
        places.append(places[parent] + 1)
    return [case["p"][places.index(place)] for place in range(max(places) + 1)]


def text_of(case, tokens, answer):
    """The accepted tokens, and the one after them."""
    text = [answer["token"]]
    node = answer["accepted"]
    while node > 0:
        text.insert(0, tokens[node - 1])
        node = parents_of(case)[node - 1]
    return tuple(text)


def chance_of(tokens, p):
    return math.prod(row[token] for row, token in zip(p, tokens, strict=True))


def form(case, answer):
    """What is wrong with the form of one answer; None if nothing is."""
    ranges = {"accepted": len(case["p"]), "token": len(case["p"][0])}
    for key, end in ranges.items():
        got = answer.get(key)
        if isinstance(got, bool) or not isinstance(got, int) or not 0 <= got < end:
            return f"{key}: expected a whole number from 0 to {end - 1}, got {check.brief(got)}"
    return None


def replies_to(case, requests, answers):
    """(the answers to these requests of a case, None) or (None, what is wrong with their form).
    Both are None if the engine leaves one of them out, or says `todo`."""
    found = [answers.get(request["case"]) for request in requests]
    if any(answer is None or answer.get("todo") for answer in found):
        return None, None
    trouble = check.first(form(case, answer) for answer in found)
    return (None, trouble) if trouble else (found, None)


def said(case, answers):
    """`replies_to`, but with what the engine says in the form of case["answer"]."""
    found, trouble = replies_to(case, requests_of(case), answers)
    if found is None:
        return None, trouble
    if "law" in case:
        return law_of(case, found), None
    keys = ["accepted", "token"]
    if case["rule"] == "race":
        keys = ["tokens", *keys]
    return {key: found[0].get(key) for key in keys}, None


def alike(want, got):
    return all(abs(got[key] - x) <= EXACT if isinstance(x, float) else got[key] == x
               for key, x in want.items())


def differ(case, got):
    """How an answer differs, in words; None if it does not."""
    want = case["answer"]
    if alike(want, got):
        return None
    if "law" not in case:
        return ", ".join(f"{key}: expected {want[key]}, got {got[key]}"
                         for key in want if got[key] != want[key])
    if got["off"] > EXACT:
        return f"the text has another distribution, off by {got['off']:.4f} in total variation"
    return (f"the distribution of the text is right, but {got['accepted']:.4f} drafted tokens "
            f"are accepted on average, not {want['accepted']:.4f}")


def judge(cases, answers):
    """{number: (what the engine says, None if that is right, else what is wrong)}; cases without an
    answer are left out."""
    found = {}
    for case in cases:
        got, trouble = said(case, answers)
        if trouble or got:
            found[case["case"]] = got, trouble or differ(case, got)
    return found


def explain(cases, mistakes, found):
    """The mistakes that give all answers of a rule; else those that give the first wrong one."""
    def names(chosen):
        fitting = []
        for i, mistake in enumerate(mistakes):
            rows = [(case["wrong"].get(str(i), case["answer"]), found[case["case"]][0])
                    for case in chosen]
            if all(got and alike(want, got) for want, got in rows):
                fitting.append(mistake)
        return fitting

    if all_of_them := names(cases):
        return [f"An engine in which {name} gives all these answers." for name in all_of_them]
    first = [case for case in cases if found[case["case"]][1]][:1]
    return [f"An engine in which {name} gives this answer." for name in names(first)]


# --- an engine whose noise cannot be given: its texts are counted


def many_requests(case, count, noise):
    """Requests without uniforms. Their drafts are drawn here, from q."""
    request = {key: value for key, value in case.items() if key not in KEPT_HERE}
    for i in range(count):
        tokens = case["tokens"]
        if case["q"] is not None:
            tokens = [noise.choices(range(len(row)), row)[0] for row in case["q"]]
        yield request | {"case": 1_000_000 * case["case"] + i, "tokens": tokens}


def chi_squared(counts, chances):
    """How far the counts of all texts are from their chances, in standard deviations (Wilson and
    Hilferty's approximation).

    >>> round(chi_squared([60, 40], [0.5, 0.5]), 1)
    1.7
    >>> chi_squared([9, 1], [1.0, 0.0])     # a text that p never writes is one too many
    inf
    """
    total = sum(counts)
    possible = [(c, x * total) for c, x in zip(counts, chances, strict=True) if x > 0]
    free = len(possible) - 1
    if sum(c for c, _ in possible) < total:
        return math.inf
    if free == 0:
        return 0.0
    distance = sum((c - x) ** 2 / x for c, x in possible)
    spread = 2 / (9 * free)
    return ((distance / free) ** (1 / 3) - 1 + spread) / math.sqrt(spread)


def judge_texts(case, requests, answers, noise):
    """What the texts of a law say, in words, and whether they are right. They are completed with
    draws from p."""
    p = places_of(case)
    V = len(p[0])
    replies, trouble = replies_to(case, requests, answers)
    if replies is None:
        return trouble or "todo", False
    written = Counter()
    lengths = []
    for request, reply in zip(requests, replies, strict=True):
        text = text_of(case, request["tokens"], reply)
        lengths.append(len(text) - 1)
        rest = [noise.choices(range(V), row)[0] for row in p[len(text) :]]
        written[(*text, *rest)] += 1
    texts = list(itertools.product(range(V), repeat=len(p)))
    counts = [written[text] for text in texts]
    if chi_squared(counts, [chance_of(text, p) for text in texts]) > SURE:
        return "the text has another distribution than p", False
    count = len(lengths)
    mean = sum(lengths) / count
    error = math.sqrt(sum((n - mean) ** 2 for n in lengths)) / count
    want = case["answer"]["accepted"]
    right = abs(mean - want) <= SURE * error + 1 / count
    return (f"the distribution is right, {'and' if right else 'but'} {mean:.4f} drafted tokens are "
            f"accepted on average, and ours {want:.4f}"), right


def check_texts(command, cases, count, seconds):
    """(a line for each law, whether all are right, what else went wrong)"""
    noise = random.Random(0)
    laws = [case for case in cases if "law" in case]
    sent = {case["case"]: list(many_requests(case, count, noise)) for case in laws}
    answers, trouble = check.ask(command, list(itertools.chain(*sent.values())), seconds)
    found = [judge_texts(case, sent[case["case"]], answers, noise) for case in laws]
    lines = [f"{case['rule']:5} case {case['case']}: {words}"
             for case, (words, _) in zip(laws, found, strict=True)]
    return lines, all(right for _, right in found), trouble


def report(cases, mistakes, found):
    """A line for each rule, then its first difference and what explains it."""
    lines = []
    for rule in dict.fromkeys(case["rule"] for case in cases):
        chosen = [case for case in cases if case["rule"] == rule]
        answered = [case for case in chosen if case["case"] in found]
        wrong = [case["case"] for case in answered if found[case["case"]][1]]
        laws = [found[case["case"]][1] for case in answered if "law" in case]
        lines.append(f"{rule:5} {len(answered) - len(wrong)} of {len(chosen)} cases right"
                     f"{', the others todo' * (len(answered) < len(chosen))}")
        if wrong:
            if laws and not any(laws):
                lines[-1] += "; but the law of its texts is right"
            lines.append(f"      case {wrong[0]}: {found[wrong[0]][1]}")
            lines += [f"      {line}" for line in explain(answered, mistakes, found)]
    return lines


def main(argv=None):
    a = argparse.ArgumentParser(description="Check how an engine verifies drafts.")
    a.add_argument("--rule", action="append", choices=RULES, help="only this rule; may be repeated")
    a.add_argument("--texts", type=int, metavar="N",
                   help="for an engine with noise of its own: N texts of each law, no uniforms")
    a.add_argument("--seconds", type=float, default=300,
                   help="stop the engine after this time (default 300)")
    a.add_argument("command", nargs=argparse.REMAINDER, help="the engine, such as ./my-engine")
    args = a.parse_args(argv)
    if not args.command:
        a.error("name an engine, such as ./my-engine")
    if args.texts is not None and args.texts < 100:
        a.error("--texts needs at least 100 texts to say anything")
    kit = json.loads(CASES.read_text(encoding="utf-8"))
    cases = [case for case in kit["cases"] if case["rule"] in (args.rule or RULES)]
    try:
        if args.texts:
            lines, right, trouble = check_texts(args.command, cases, args.texts, args.seconds)
        else:
            sent = [request for case in cases for request in requests_of(case)]
            answers, trouble = check.ask(args.command, sent, args.seconds)
            found = judge(cases, answers)
            lines = report(cases, kit["mistakes"], found)
            right = sum(wrong is None for _, wrong in found.values()) == len(cases)
    except ValueError as e:
        print(f"engine.py: {e}", file=sys.stderr)
        return 2
    if trouble:
        lines.append(f"The engine: {trouble}")
    print("\n".join(lines))
    return int(not right or trouble is not None)


if __name__ == "__main__":
    sys.exit(main())
