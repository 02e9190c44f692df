"""The same exercise in another dress: functions and arguments of other names, another order, and some of
another meaning, so that the library's own solution does not fit.

The one thing to remember: a wrapper with the library's name and signature translates, and so the library's
tests grade a variant, too.
"""
import ast
import random
from typing import NamedTuple

from exercises import splice

FUNCTIONS = {
    "softcap": ("bend", "squash"), "rotate": ("turn_pairs", "spin"), "frequencies": ("speeds", "paces"),
    "RMSNorm.forward": ("normalise", "rescale"), "visible": ("may_read", "sees"),
    "Attention.forward": ("attend", "mix"), "KVCache.write": ("put", "insert"),
    "to_probs": ("distribution_of", "weigh"), "Coins.choose": ("draw_index", "pick"),
    "verify": ("judge", "check_draft"), "chain": ("draw_chain", "sketch"),
    "SelfDraft.propose": ("guess", "draft_ahead"), "expected_tokens": ("tokens_a_round", "yield_of"),
    "best_gamma": ("best_length", "how_far"), "GaussianProcess.predict": ("foresee", "expect_at"),
    "expected_improvement": ("hoped_gain", "mean_gain"), "climb": ("ascend", "walk_uphill"),
    "verify_tree": ("judge_tree", "check_tree"), "Counts.alpha": ("first_hits", "share_tested")}

ARGUMENTS = {
    "x": ("values", "inputs"), "cap": ("bound", "limit"), "cos": ("cosine", "c_part"),
    "sin": ("sine", "s_part"),
    "head_dim": ("width", "size"), "theta": ("base", "ground"), "scaling": ("stretch", "extension"),
    "device": ("where", "machine"), "positions": ("places", "stands"), "slots": ("cells", "shelves"),
    "end": ("stop", "border"), "tree": ("family", "graph"), "window": ("span", "reach_back"),
    "mask": ("hidden", "shade"), "store": ("keep_them", "deposit"),
    "layer": ("level", "storey"),
    "k": ("keys_in", "new_keys"), "v": ("values_in", "new_values"), "recent": ("newest", "tail"),
    "logits": ("raw", "scores_in"), "temperature": ("heat", "warmth"), "top_k": ("how_many", "at_most"),
    "top_p": ("share", "nucleus"), "min_p": ("floor", "least_share"), "weights": ("shares", "lots"),
    "p": ("target_says", "judged_by"), "q": ("draft_says", "drawn_from"), "tokens": ("guesses", "ids"),
    "coins": ("purse", "chance"), "length": ("live", "count_of"), "state": ("known_text", "situation"),
    "step": ("ahead", "one_more"), "rule": ("policy", "advice"), "alpha": ("kept_rate", "accept"),
    "gamma": ("ahead_by", "drafted"), "cost": ("price", "toll"), "most": ("ceiling", "upper"),
    "least": ("bottom", "lower"), "block": ("price_of_width", "toll_of_width"), "z": ("sets", "bits"),
    "mean": ("centre", "middle"), "std": ("doubt", "spread"), "best": ("record", "so_far"),
    "score": ("height", "worth"), "starts": ("feet", "origins"), "allowed": ("open_to", "permitted"),
    "parents": ("hangs_on", "mothers")}

# function, argument: what is handed over instead, as an expression; and how it is turned back
MEANINGS = {
    ("softcap", "cap"): ("None if cap is None else 1 / cap", "None if {0} is None else 1 / {0}"),
    ("rotate", "sin"): ("-sin", "-{0}"),
    ("frequencies", "theta"): ("math.log(theta)", "math.exp({0})"),
    ("visible", "window"): ("None if window is None else window - 1", "None if {0} is None else {0} + 1"),
    ("KVCache.write", "end"): ("end - 1", "{0} + 1"),
    ("verify", "p"): ("p.log()", "{0}.exp()"),
    ("verify", "q"): ("None if q is None else q.log()", "None if {0} is None else {0}.exp()"),
    ("verify_tree", "p"): ("p.log()", "{0}.exp()"),
    ("verify_tree", "q"): ("None if q is None else q.log()", "None if {0} is None else {0}.exp()"),
    ("expected_tokens", "alpha"): ("[1 - a for a in alpha] if isinstance(alpha, list) else 1 - alpha",
                                   "[1 - a for a in {0}] if isinstance({0}, list) else 1 - {0}"),
    ("best_gamma", "alpha"): ("[1 - a for a in alpha] if isinstance(alpha, list) else 1 - alpha",
                              "[1 - a for a in {0}] if isinstance({0}, list) else 1 - {0}"),
    ("expected_improvement", "std"): ("std * std", "{0}.sqrt()")}


class Disguise(NamedTuple):
    name: str       # of the student's function, with its class
    decorators: list
    head: str       # "def judge(guesses, ...)"
    wrapper: list   # lines of the function that has the library's name
    legend: list    # (the student's name of an argument, the expression that it gets)
    back: list      # lines that turn the arguments back into the library's


def disguise(module, name, seed):
    """The Disguise of a function. seed: an int; for the same one it is the same."""
    node = splice.find(ast.parse(splice.source(module)), name)
    decorators, head = splice.signature(node)
    draw = random.Random(f"{seed} {name}")
    outer, _, inner = name.rpartition(".")
    new = draw.choice(FUNCTIONS[name])
    args = [arg.arg for arg in node.args.args if arg.arg != "self"]
    names = {arg: draw.choice(ARGUMENTS[arg]) for arg in args}
    defaults = dict(zip(args[::-1], map(ast.unparse, node.args.defaults[::-1]), strict=False))
    free = [arg for arg in args if arg not in defaults]
    draw.shuffle(free)
    listed = ["self"] * bool(outer) + [names[arg] for arg in free] + [
        f"{names[arg]}={text}" for arg, text in defaults.items()][::-1]
    legend = [(names[arg], MEANINGS.get((name, arg), (arg,))[0]) for arg in [*free, *list(defaults)[::-1]]]
    call = f"{'self.' if outer else ''}{new}"
    if "property" not in decorators:
        call += f"({', '.join(f'{theirs}={ours}' for theirs, ours in legend)})"
    back = [f"{arg} = {MEANINGS.get((name, arg), ('', '{0}'))[1].format(names[arg])}" for arg in args]
    return Disguise(f"{outer}.{new}" if outer else new, decorators, f"def {new}({', '.join(listed)})",
                    [*(f"@{d}" for d in decorators), f"{head}:", f"    return {call}"], legend, back)


def stub(module, name, seed):
    """As splice.stub, in disguise. The docstring is the library's; a legend says what is called what."""
    d = disguise(module, name, seed)
    node = splice.find(ast.parse(splice.source(module)), name)
    pad, method = "    " * (1 + ("." in name)), "." in name
    width = max([len(theirs) for theirs, _ in d.legend], default=0)
    lines = [*(f"@{decorator}" for decorator in d.decorators), f"{d.head}:"]
    lines = ["    " * method + line for line in lines]
    theirs = splice.signature(node)[1].removeprefix("def ")
    lines += [f'{pad}"""A variant of `{theirs}`, which is described below.']
    lines += ["", f"{pad}Yours gets"] * bool(d.legend)
    lines += [f"{pad}    {theirs:{width}}  in place of  {ours}" for theirs, ours in d.legend]
    said = ast.get_docstring(node, clean=False)
    lines += ["", pad + said.rstrip()] if said else []
    lines += [f'{pad}"""', f"{pad}raise NotImplementedError"]
    return "\n".join([f"class {d.name.split('.')[0]}:"] * method + lines) + "\n"


def solution(module, name, seed):
    """The library's own function in disguise: what a student would write. Only the grader's test uses it."""
    d = disguise(module, name, seed)
    node, lines = splice.find(ast.parse(splice.source(module)), name), splice.original(module, name)
    method = "." in name
    pad = "    " * (1 + method)
    head = ["    " * method + line for line in [*(f"@{x}" for x in d.decorators), f"{d.head}:"]]
    body = [*head, *(pad + line for line in d.back), *lines[splice.head(node) :]]
    return "\n".join([f"class {d.name.split('.')[0]}:"] * method + body) + "\n"
