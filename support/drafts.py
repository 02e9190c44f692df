"""Where drafts come from: the flags of generate.py about it, and the drafter that they ask for.

The one thing to remember: nothing of a drafter is here. A function reads flags and files, refuses what does
not fit together, and calls one class.
"""
import sys
from pathlib import Path

import torch

import checkpoint
from control import MOST, DoNoHarm
from layerskip import SelfDraft, ShortHead, early_exit
from machine import parallel
from machine.quant import KINDS, byte_costs, quantise, size
from machine.recorded import Recorded
from methods import heads
from methods.arms import candidates
from methods.pace import Pace
from methods.trees import best_tree
from speculative import ModelDraft, NGram, Then, ancestors
from support import cli
from support.costs import kept_costs

LARGE = 64e6    # bytes of blocks from which on costs are measured without being asked
SMALL = Path(__file__).resolve().parent.parent / "weights" / "stories-draft"
OWNER = {"costs": "auto", "exit_layer": "exit", "skip": "skip",
         "draft_model": "model"}    # the draft that a flag goes with
ALSO = {"auto": ("skip",), **dict.fromkeys(KINDS, ("exit", "skip"))}   # go with it, too
GAMMA = {"auto": MOST, "none": 0, "exit": 2, "skip": 3, "ngram": 8, "model": 3,
         **dict.fromkeys((*KINDS, *heads.KINDS), 3)}    # if neither a flag nor a file says


def add_flags(group):
    add = group.add_argument
    add("--draft", choices=GAMMA, help="where drafts come from (default: auto); auto: what promises "
        "most, judged anew before every draft; int8 and nf4: the model itself in few bits, all of it or what "
        "--exit-layer or --skip leaves; kangaroo and below: trained heads")
    add("--exit-layer", type=int, metavar="E", help="draft with the first E blocks (default: a sixth)")
    add("--skip", metavar="SET", help="draft without some sub-layers: a3,m4 skips attention 3 and MLP 4; or "
        'a file with {"attn": [3], "mlp": [4], "gamma": 2}, as search.py writes it')
    add("--draft-model", metavar="DIR", help="draft with a small model that has the same tokenizer")
    add("--draft-vocab", metavar="FILE", help="draft with few tokens only, and so with a shorter head, as "
        "search.py --draft-vocab writes it")
    add("--heads", metavar="DIR", help="the trained heads to draft with, as lab/train_heads.py writes them "
        "(default: heads/KIND in the model's folder)")
    add("--tree", type=int, metavar="N", help="with trained heads: draft a tree of N tokens, in the shape "
        "that promises most")
    add("--costs", metavar="HOW", help="auto: what the parts of a pass take: weights, by what is read of "
        "them; measured, once on this machine, and then kept; or a file from lab.bench costs --out (default: "
        "measured for large models at temperature 0, else weights)")
    add("--gamma", type=int, metavar="G",
        help="how many tokens to draft per round (auto: at most); levels of a tree")
    add("--do-no-harm", action="store_true",
        help="draft only as far as it pays, judging by what has been accepted so far and by the bytes that "
        "are read (nf4 drafts take longer); G is then the most, and a --tail is not judged")
    add("--tail", type=int, metavar="N",
        help="after each draft, append up to N tokens copied from earlier text")


def check(a):
    """Fill in a.draft. Raises ValueError, in one line, for flags that do not go together."""
    given = [flag for flag in OWNER if getattr(a, flag) is not None]
    # auto does no harm and adds tails by itself, and would have many shapes of passes recorded
    usual = "exit" if a.do_no_harm or a.tail is not None or a.fast else "auto"
    a.draft = a.draft or (OWNER[given[0]] if given else usual)
    wrong = next((flag for flag in given if OWNER[flag] not in (a.draft, *ALSO.get(a.draft, ()))), None)
    if wrong:
        raise ValueError(f"--{wrong.replace('_', '-')} goes with --draft {OWNER[wrong]}, not {a.draft}")
    if {"exit_layer", "skip"} <= set(given):
        raise ValueError("--exit-layer and --skip say twice which sub-layers draft: leave one of them out")
    if a.draft == "skip" and a.skip is None:
        raise ValueError("--draft skip needs --skip with the sub-layers, such as a3,m4 or a file")
    if a.draft in ("none", "ngram") and (a.do_no_harm or a.tail is not None or a.draft_vocab is not None):
        raise ValueError("--do-no-harm, --tail and --draft-vocab go with --draft exit, skip or model, not "
                         f"{a.draft}")
    if a.draft == "auto" and (a.do_no_harm or a.tail is not None):
        raise ValueError("--draft auto does no harm and adds n-grams where they pay: leave out "
                         "--do-no-harm and --tail")
    trained = ", ".join(heads.KINDS)
    for flag in ("heads", "tree"):
        if getattr(a, flag) is not None and a.draft not in heads.KINDS:
            raise ValueError(f"--{flag} goes with trained heads, --draft {trained}, not {a.draft}")
    if a.draft in heads.KINDS and a.draft_vocab is not None:
        raise ValueError(f"--draft-vocab goes with --draft auto, exit, skip or model, not {a.draft}")
    if a.tree is not None and (a.tree < 1 or a.tail is not None):
        raise ValueError("--tree needs at least one token, and no --tail, as it has several ends")
    if a.tail is not None and a.tail < 1:
        raise ValueError(f"--tail must be at least 1, got {a.tail}")


def drafters(a, model, tokenizer):
    """A function that makes the drafter which the flags ask for: a new one for each run, because a rule
    learns from the text. Fills in a.gamma, a.exit_layer and a.gainless (a search found no gain)."""
    a.gainless = False
    if a.draft == "auto":
        return automatic(a, model)
    if a.draft in ("none", "ngram"):
        a.gamma = GAMMA[a.draft] if a.gamma is None else a.gamma
        return lambda: NGram(a.gamma, 3) if a.draft == "ngram" else None
    draft, cost = trained(a, model) if a.draft in heads.KINDS else part(a, model, tokenizer)

    def make():
        drafter = draft(DoNoHarm(cost, a.gamma) if a.do_no_harm else a.gamma)
        return drafter if a.tail is None else Then(drafter, NGram(a.tail, 3))

    return make


def part(a, model, tokenizer):
    """(rule -> a drafter with some sub-layers of the model, or with another model; what a drafted token costs
    relative to a pass of the target, by the bytes of both)."""
    L, sublayers, small, found, share = model.c.n_layers, None, None, None, 1.0
    if a.draft == "exit" and a.exit_layer is None:
        a.exit_layer = max(1, L // 6)
    if a.exit_layer is not None:
        sublayers = early_exit(L, a.exit_layer)
    elif a.skip is not None:
        sublayers, found = cli.read_skip(a.skip, L), cli.read_gamma(a.skip)
    if a.draft == "model":
        small = load_small(a.draft_model or SMALL, model, tokenizer)
    elif a.draft in KINDS:
        small = quantise(model.model if a.fast else model, a.draft)
    small = Recorded(small) if small and a.fast else small
    drafting = small or model
    if a.draft_vocab:
        drafting = ShortHead(drafting, cli.read_vocab(a.draft_vocab, drafting.c.vocab_size))
        share = drafting.share
    a.gainless = found == 0 and a.gamma is None and not a.do_no_harm
    if a.gamma is None:
        a.gamma = MOST if a.do_no_harm else GAMMA[a.draft] if found is None else found
    own, every = byte_costs(drafting), range(2 * drafting.c.n_layers)
    cost = own.step(sublayers or every, share) * own.whole / byte_costs(model).whole
    if small:
        return lambda rule: ModelDraft(drafting, rule, sublayers), cost
    return lambda rule: SelfDraft(drafting, sublayers, rule), cost


def automatic(a, model):
    """As `drafters`, for --draft auto: a Pace with the usual candidates, and with the skip set, the draft
    vocabulary and the trained heads that are named, or that lie beside the weights. Fills in a.costs and
    a.table, the Costs."""
    c = model.c
    skip = (cli.read_skip(a.skip, c.n_layers) if a.skip else
            cli.read_beside(a.model, "skip", cli.read_skip, c.n_layers))
    vocab = (cli.read_vocab(a.draft_vocab, c.vocab_size) if a.draft_vocab else
             cli.read_beside(a.model, "draft_vocab", cli.read_vocab, c.vocab_size))
    # heads are for the very weights that lie there; and what has taps is not replayed from recordings
    plain = not a.fast and not a.quant and parallel.place()[1] == 1
    found = trained_beside(a, model) if plain else []
    a.table = costs = costs_of(a, model, a.temperature > 0)
    a.gamma = GAMMA["auto"] if a.gamma is None else a.gamma
    return lambda: Pace(model, candidates(model, costs, skip, vocab, found), costs, most=a.gamma)


def costs_of(a, model, sampling=False):
    """The Costs that --costs asks for. Fills in a.costs."""
    plain = not a.fast and parallel.place()[1] == 1
    if a.costs is None:     # trap: when sampling, another table would spend the seed's uniforms otherwise
        a.costs = "measured" if plain and not sampling and size(model.blocks) >= LARGE else "weights"
    if a.costs == "weights":
        return byte_costs(model)
    if a.costs != "measured":
        return cli.read_costs(a.costs, model.c)
    if not plain:   # single sub-layers are not recorded, and several processes would each measure their own
        raise ValueError("--costs measured goes with one process and without --fast: give weights or a file")
    return kept_costs(model)[0]


def load_heads(folder, model):
    head = heads.load(folder, model)
    if head.strange:
        print(f"draft: {folder}: trained for other weights of this shape, so fewer of its drafts may be "
              "accepted; the text is still the model's own", file=sys.stderr, flush=True)
    return head


def trained_beside(a, model):
    """The trained heads that lie beside the weights, in heads/KIND. Those of another shape are left out."""
    found = []
    for folder in (Path(a.model) / "heads" / kind for kind in heads.KINDS):
        if (folder / heads.FILE).is_file():
            try:
                found.append(load_heads(folder, model))
            except ValueError as e:
                print(f"draft: left out, as {e}", file=sys.stderr, flush=True)
    return found


def trained(a, model):
    """(rule -> the drafter with trained heads that the flags ask for, what a drafted token costs). Fills in
    a.gamma, a.exit_layer and a.tree, as not every tree can be drafted."""
    folder = Path(a.heads or Path(a.model) / "heads" / a.draft)
    if not (folder / heads.FILE).is_file():
        raise FileNotFoundError(f"{folder}: no heads: train them, python -m lab.train_heads {a.draft} "
                                f"--model {a.model} --out {folder}")
    head = load_heads(folder, model)
    if head.kind != a.draft:
        raise ValueError(f"{folder}: these heads are for --draft {head.kind}, not {a.draft}")
    step, most, shape = heads.step_cost(head), getattr(head, "steps", MOST), None
    a.exit_layer = head.shape.get("exit_layer")
    if a.gamma is None:
        a.gamma = min(most, MOST if a.do_no_harm or a.tree else GAMMA[a.draft])
    if a.tree:
        levels = max(1, min(most, a.gamma))
        # more nodes than these have no place, and looking for the best ones takes long
        ways = len(head.ranks) or 1
        places = sum(ways ** d for d in range(1, levels + 1)) if head.branches else ways * levels
        shape = best_tree(head.ranks, min(a.tree, places), step, 0.0, head.branches, levels) or [0]
        a.tree = len(shape)
        a.gamma = max(ancestors(torch.tensor([shape]))[0].sum(-1).tolist()) - 1
    return lambda rule: head.drafter(rule, shape), step


def load_small(folder, model, tokenizer):
    small, other = checkpoint.load(folder, model.tok.device, model.tok.dtype)
    if other.get_vocab() != tokenizer.get_vocab():
        raise ValueError(f"{folder}: its tokenizer differs from the target's: its ids mean other words")
    return small


def chosen(r):
    """What --draft auto chose, and why, in one line."""
    often = sorted(r["chosen"].items(), key=lambda item: -item[1])
    how = {"weights": "by weights", "measured": "as measured here"}.get(r["costs"], f"of {r['costs']}")
    line = (f"draft: auto, with costs {how}: "
            + (", ".join(f"{name} in {rounds} rounds" for name, rounds in often) or "no round"))
    best = next((name.split(", then")[0] for name, _ in often if name != "nothing"), None)
    if best is None:
        return f"{line}: no draft promised a gain"
    alpha, price = r["beliefs"][best]
    return f"{line}; of {best} {alpha:.0%} are accepted, and a token costs {price:.0%} of a pass"


def told(r, a):
    """How the run drafted, in one line."""
    if r["draft"] == "auto":
        return chosen(r)
    where = "" if r["exit_layer"] is None else f" after block {r['exit_layer']}"
    where += "" if a.skip is None else f" {a.skip}" if a.draft == "skip" else f" without {a.skip}"
    where += f", trees of {r['tree']} tokens" if r["tree"] else ""
    far = f"gamma up to {a.gamma} as it pays" if a.do_no_harm else f"gamma {a.gamma}"
    tail = f", then up to {a.tail} by n-gram" if a.tail is not None else ""
    why = " because its search found no gain; --gamma G drafts all the same" if a.gainless else ""
    return f"draft: {r['draft']}{where}, {far}{tail}{why}"
