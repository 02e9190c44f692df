"""A prompt in, coloured text out: self-speculative decoding from the command line.

    python generate.py "Once upon a time" --compare
    torchrun --nproc-per-node 2 generate.py "Once upon a time"      on two devices

The one thing to remember: this file only consumes what `speculative.rounds` yields.
"""
import json
import sys
from itertools import islice
from pathlib import Path

import torch
from tqdm import tqdm

import checkpoint
import sampling
from control import MOST, DoNoHarm
from layerskip import SelfDraft, ShortHead, early_exit
from machine import parallel
from machine.quant import KINDS, byte_costs, quantise
from machine.recorded import Recorded
from methods import heads
from methods.pace import Pace, candidates
from methods.trees import Siblings, best_tree, widths_of
from sampling import Coins, to_probs
from speculative import ModelDraft, NGram, Then, ancestors, rounds
from support import chat, cli, page, show, stats
from support.files import read_text

WEIGHTS = Path(__file__).resolve().parent / "weights"
OWN_FLAG = {"auto": "costs", "exit": "exit_layer", "skip": "skip", "model": "draft_model"}  # whose draft
ALSO = {"auto": ("skip",), "int8": ("exit", "skip"), "nf4": ("exit", "skip")}  # flags that go with it, too
GAMMA = {"auto": MOST, "none": 0, "exit": 2, "skip": 3, "ngram": 4, "model": 3,
         **dict.fromkeys((*KINDS, *heads.KINDS), 3)}    # if neither a flag nor a file says
PATHS = "model", "skip", "draft_model", "draft_vocab", "heads", "costs", "prompt_file", "picture", "page"
REHEARSED = 24  # rounds, before recorded passes are timed
REPEATS = 3  # interleaved runs in --compare, after a warm-up of each


def flags():
    p = cli.Parser(
        description="Self-speculative decoding of a Llama or Gemma-2 checkpoint.", allow_abbrev=False)
    add = p.add_argument_group("text").add_argument
    add("prompt", nargs="?", metavar="PROMPT")
    add("--prompt", dest="text", metavar="TEXT", help="the same as PROMPT; - reads standard input")
    add("--prompt-file", metavar="FILE", help='a batch: one prompt a line, or JSONL with {"prompt": ...}')
    add("--chat", action="store_true", help="treat the prompt as a message, by the model's chat template")
    add("--max-new", type=int, default=200, metavar="N", help="how many tokens to write (default: 200)")
    add_draft(p.add_argument_group("draft"))
    add = p.add_argument_group("sampling").add_argument
    add("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    add("--top-k", type=int, metavar="K", help="sample from the K most likely tokens")
    add("--top-p", type=float, metavar="P", help="sample from the most likely tokens that together reach P")
    add("--min-p", type=float, metavar="P", help="no token below P times the most likely one")
    add("--seed", type=int, default=0, help="of the random numbers (default: 0)")
    add = p.add_argument_group("model and machine").add_argument
    add("--model", metavar="DIR", default=WEIGHTS / "stories-llama", help="a Hugging Face folder")
    add("--device", help="cpu or cuda (default: cuda if there is a GPU)")
    add("--dtype", choices=["float32", "bfloat16", "float16", "float64"], help="default: as stored")
    add("--fast", action="store_true", help="replay recorded passes: on a CPU they are compiled when they "
        "are first needed, some minutes once on a machine; on a GPU they are CUDA graphs")
    add("--quant", choices=KINDS, help="keep the matrices of the model's blocks in few bits")
    add = p.add_argument_group("what is shown").add_argument
    add("--compare", action="store_true", help="time plain decoding, too, and compare the two texts")
    add("--picture", metavar="FILE", help="draw the coloured text as PNG or SVG (first prompt)")
    add("--page", metavar="FILE", help="write a page to step through the run in a browser (first prompt)")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    return p


def add_draft(group):
    add = group.add_argument
    add("--draft", choices=GAMMA, help="where drafts come from (default: exit); auto: what promises most, "
        "judged anew before every draft; int8 and nf4: a copy of the model in few bits, all of it or what "
        "--exit-layer or --skip leaves; kangaroo and below: trained heads")
    add("--exit-layer", type=int, metavar="E", help="draft with the first E blocks (default: a sixth)")
    add("--skip", metavar="SET", help="draft without some sub-layers: a3,m4 skips attention 3 and MLP 4; or "
        'a file with {"attn": [3], "mlp": [4], "gamma": 2}, as search.py writes it')
    add("--draft-model", metavar="DIR", help="draft with a small model that has the same tokenizer")
    add("--draft-vocab", metavar="FILE", help="draft with few tokens only, and so with a shorter head, as "
        "search.py --draft-vocab writes it")
    add("--heads", metavar="DIR", help="the trained heads to draft with, as train_heads.py writes them "
        "(default: heads/KIND in the model's folder)")
    add("--tree", type=int, metavar="N", help="with trained heads: draft a tree of N tokens, in the shape "
        "that promises most")
    add("--costs", metavar="FILE", help="auto: measured costs, from bench.py costs --out (default: the "
        "weights read)")
    add("--gamma", type=int, metavar="G", help="how many tokens to draft per round; levels of a tree")
    add("--do-no-harm", action="store_true",
        help="draft only as far as it pays, judging by what has been accepted so far; G is then the most")
    add("--tail", type=int, metavar="N",
        help="after each draft, append up to N tokens copied from earlier text")


def parse(argv):
    a = flags().parse_args(argv)
    implied = [kind for kind, flag in OWN_FLAG.items() if getattr(a, flag) is not None]
    a.draft = a.draft or (implied[0] if implied else "exit")
    wrong = next((kind for kind in implied if kind not in (a.draft, *ALSO.get(a.draft, ()))), None)
    if wrong:
        raise ValueError(f"--{OWN_FLAG[wrong].replace('_', '-')} goes with --draft {wrong}, not {a.draft}")
    if {"exit", "skip"} <= set(implied):
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
        raise ValueError(f"--draft-vocab goes with --draft exit, skip or model, not {a.draft}")
    if a.tree is not None and (a.tree < 1 or a.tail is not None):
        raise ValueError("--tree needs at least one token, and no --tail, as it has several ends")
    if a.tail is not None and a.tail < 1:
        raise ValueError(f"--tail must be at least 1, got {a.tail}")
    if not -(2**63) <= a.seed < 2**63:
        raise ValueError(f"--seed must fit in 64 bits, got {a.seed}")
    if a.picture and Path(a.picture).suffix not in (".png", ".svg"):
        raise ValueError(f"--picture must name a .png or .svg file, got {a.picture}")
    if a.page and Path(a.page).suffix != ".html":
        raise ValueError(f"--page must name a .html file, got {a.page}")
    empty = next((name for name in PATHS if getattr(a, name) == ""), None)
    if empty:
        raise ValueError(f"--{empty.replace('_', '-')} is empty")
    if sum(given is not None for given in (a.prompt, a.text, a.prompt_file)) != 1:
        raise ValueError("give one prompt: as an argument, with --prompt, or a batch with --prompt-file")
    sampling.check(a.temperature, a.top_k, a.top_p, a.min_p)
    return a


def read_prompts(a):
    """The texts to continue: one, or the batch of --prompt-file."""
    if a.prompt_file is None:
        text = a.prompt if a.text is None else a.text
        if text == "-" and parallel.place() != (0, 1):
            raise ValueError("standard input goes to one process only: give the prompt, or --prompt-file")
        if text == "-":
            text = sys.stdin.buffer.read().decode("utf-8", "surrogateescape").removesuffix("\n")
        return [text]
    path = Path(a.prompt_file)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    # trap: `splitlines` also splits at U+2028 and others, which a JSON text may hold
    lines = [(i, line) for i, line in enumerate(read_text(path).split("\n"), 1) if line.strip()]
    if not lines:
        raise ValueError(f"{path}: no prompts, every line is empty")
    return [read_jsonl(path, *line) for line in lines] if path.suffix == ".jsonl" else [t for _, t in lines]


def read_jsonl(path, number, line):
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError, RecursionError):
        prompt = None
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(f'{path}, line {number}: expected a JSON object with a text under "prompt"')
    return prompt


def drafters(a, model, tokenizer):
    """A function that makes the drafter which the flags ask for: a new one for each run, because a rule
    learns from the text. Fills in a.gamma and a.exit_layer."""
    L, sublayers, small, found, share = model.c.n_layers, None, None, None, 1.0
    a.gainless = False
    if a.draft == "auto":
        return automatic(a, model)
    trained, price = head_drafter(a, model) if a.draft in heads.KINDS else (None, None)
    if a.draft == "exit" and a.exit_layer is None:
        a.exit_layer = max(1, L // 6)
    if a.exit_layer is not None:
        sublayers = early_exit(L, a.exit_layer)
    elif a.skip is not None:
        sublayers, found = cli.read_skip(a.skip, L), cli.read_gamma(a.skip)
    if a.draft == "model":
        small = load_small(a.draft_model or WEIGHTS / "stories-draft", model, tokenizer)
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

    def make():
        rule = a.gamma
        if a.do_no_harm:  # what a drafted step costs relative to a pass of the target, by their bytes
            own, every = byte_costs(drafting), range(2 * drafting.c.n_layers)
            step = price or own.step(sublayers or every, share) * own.whole / byte_costs(model).whole
            rule = DoNoHarm(step, a.gamma)
        if trained:
            drafter = trained(rule)
        elif small:
            drafter = ModelDraft(drafting, rule, sublayers)
        elif sublayers:
            drafter = SelfDraft(drafting, sublayers, rule)
        else:
            return NGram(rule, 2) if a.draft == "ngram" else None
        return drafter if a.tail is None else Then(drafter, NGram(a.tail, 3))

    return make


def automatic(a, model):
    """As `drafters`, for --draft auto: a Pace with the usual candidates, and with the skip set and the draft
    vocabulary that are named, or that lie beside the weights."""
    beside = {name: Path(a.model) / f"{name}.json" for name in ("skip", "vocab")}
    skip, vocab = a.skip or beside["skip"], a.draft_vocab or beside["vocab"]
    skip = cli.read_skip(str(skip), model.c.n_layers) if a.skip or skip.is_file() else None
    vocab = cli.read_vocab(str(vocab), model.c.vocab_size) if a.draft_vocab or vocab.is_file() else None
    costs = cli.read_costs(a.costs, model.c) if a.costs else byte_costs(model)
    a.gamma = GAMMA["auto"] if a.gamma is None else a.gamma
    return lambda: Pace(model, candidates(model, costs, skip, vocab), costs, most=a.gamma)


def head_drafter(a, model):
    """(rule -> the drafter with trained heads that the flags ask for, what a drafted token costs). Fills in
    a.gamma and a.exit_layer."""
    folder = Path(a.heads or Path(a.model) / "heads" / a.draft)
    if not (folder / heads.FILE).is_file():
        raise FileNotFoundError(f"{folder}: no heads: train them, python train_heads.py {a.draft} --model "
                                f"{a.model} --out {folder}")
    head, ranks = heads.load(folder, model)
    if head.kind != a.draft:
        raise ValueError(f"{folder}: these heads are for --draft {head.kind}, not {a.draft}")
    step, most, shape = heads.step_cost(head), getattr(head, "steps", MOST), None
    a.exit_layer = head.shape.get("exit_layer")
    if a.gamma is None:
        a.gamma = min(most, MOST if a.do_no_harm or a.tree else GAMMA[a.draft])
    branches = a.draft in ("medusa", "transfer")    # else a tree is a chain with siblings
    if a.tree:
        levels = max(1, min(most, a.gamma))
        shape = best_tree(ranks, a.tree, step, 0.0, branches, levels) or [0]
        a.gamma = max(ancestors(torch.tensor([shape]))[0].sum(-1).tolist()) - 1

    def trained(rule):
        if shape is None:
            return head.drafter(rule)
        return head.drafter(rule, shape) if branches else Siblings(head.drafter(rule), widths_of(shape)[1])

    return trained, step


def load_small(folder, model, tokenizer):
    small, other = checkpoint.load(folder, model.tok.device, model.tok.dtype)
    if other.get_vocab() != tokenizer.get_vocab():
        raise ValueError(f"{folder}: its tokenizer differs from the target's: its ids mean other words")
    return small


class Reading:
    """A stand-in for the model that shows on a terminal how much of a long prompt has been read."""

    def __init__(self, model, tokens):
        self.model, few = model, tokens < 1024
        self.bar = tqdm(total=tokens, desc="reading", unit=" tokens", leave=False, disable=few or None)

    def __getattr__(self, name):
        return getattr(self.model, name)

    def run(self, x, positions, *args, **kwargs):
        x = self.model.run(x, positions, *args, **kwargs)
        if not self.bar.disable:
            self.bar.update(x.shape[1])
            if self.bar.n >= self.bar.total:
                self.bar.close()
        return x


def begin(model, prompts, a, drafter, coins=None):
    """The rounds that the flags ask for. coins: those of a page, which looks at them."""
    probs = lambda logits: to_probs(logits, a.temperature, a.top_k, a.top_p, a.min_p)  # noqa: E731
    coins, eos = coins or Coins(a.seed), {*model.c.eos, *a.eos}
    if parallel.place() != (0, 1):
        coins = parallel.Agreed(coins)
    return rounds(model, prompts, a.max_new, drafter, probs, coins, eos, a.cache)


def rehearse(model, prompts, a, makers):
    """Have recorded what the first rounds need, before anything is timed or printed."""
    def write():
        for make in makers:
            for state, _ in islice(begin(model, prompts, a, make()), REHEARSED):
                a.cache = state.cache   # whose addresses graphs hold
    model.rehearse(write)


def watch(model, tokenizer, prompts, a, drafter):
    """One run as a show.Generation; a single text is printed while it is written. Ctrl-C ends it early."""
    seen, colour = show.Generation(tokenizer, prompts, stats.Timed(drafter)), show.colours(sys.stdout)
    seen.interrupted, started, live = False, False, not a.json and len(prompts) == 1
    seen.player = page.Player(tokenizer, prompts[0], a.seed) if a.page else None
    coins = seen.player.coins if a.page else None
    try:
        for step in seen.watch(begin(Reading(model, max(map(len, prompts))), prompts, a, seen.timed, coins)):
            if a.page:
                seen.player.add(*step)
            if live:
                before, started = "" if started else opening(seen.prompts[0], a), True
                print(before + seen.fresh(colour), end="", flush=True)
    except KeyboardInterrupt:
        seen.close()
        seen.interrupted = True
    if live:
        print(seen.fresh(colour))
    elif not a.json:
        for b, prompt in enumerate(seen.prompts):
            print(f"{opening(prompt, a)}{seen.fresh(colour, b)}\n")
    return seen


def opening(prompt, a):
    """The prompt as it is printed before the answer, which continues it. A message is not printed."""
    return "" if a.chat else show.paint([(prompt, None)])


def run(a):
    texts, device, (rank, world) = read_prompts(a), checkpoint.find_device(a.device), parallel.place()
    if a.fast and world > 1:
        raise ValueError("--fast goes with one process, not with several")
    model, tokenizer = checkpoint.load(a.model, device, a.dtype and getattr(torch, a.dtype),
                                       KINDS.get(a.quant), (rank, world))
    model = parallel.join(model) if world > 1 else model
    prompts, a.eos = texts, ()
    if a.chat:
        render = chat.read_template(a.model)
        prompts = [render([{"role": "user", "content": text}]) if text else text for text in texts]
        a.eos = chat.end_of_turn(render, tokenizer)
    prompts = [checkpoint.encode(tokenizer, prompt, model.c.bos) for prompt in prompts]
    a.cache, model = None, Recorded(model) if a.fast else model
    make = drafters(a, model, tokenizer)
    if a.fast:
        rehearse(model, prompts, a, [make, lambda: None] if a.compare else [make])
    seen = watch(model, tokenizer, prompts, a, make())
    r = report(a, model, seen, texts)
    if a.picture and rank == 0:
        show.picture(seen, a.picture)
    if a.page and rank == 0:
        seen.player.save(a.page)
    if a.compare and not seen.interrupted:
        r |= against_plain(a, model, tokenizer, prompts, r["outputs"], make)
    print(json.dumps(r) if a.json else summary(r, a, seen))
    unexplained = r.get("first_divergence") and not r["first_divergence"]["near_tie"]
    return 130 if seen.interrupted else int(bool(unexplained))


def report(a, model, seen, texts):
    outputs = [{"prompt": text, "text": "".join(t.text for t in row), "ids": [t.id for t in row]}
               for text, row in zip(texts, seen.rows, strict=True)]
    n, seconds = seen.counts, sum(seen.timed.seconds.values())
    return {
        "outputs": outputs, **speed(n.tokens, seen.timed.reading, seconds),
        "target_passes": n.passes, "tokens_per_pass": n.tau,
        "acceptance": n.accepted / n.proposed if n.proposed else None,
        "draft": a.draft, "exit_layer": a.exit_layer, "gamma": a.gamma, "do_no_harm": a.do_no_harm,
        "tail": a.tail, "tree": a.tree, "fast": a.fast, "quant": a.quant,
        "processes": parallel.place()[1], "costs": a.costs or "weights",
        "chosen": seen.timed.drafters[0].chosen if a.draft == "auto" else None,
        "dtype": str(model.tok.dtype).removeprefix("torch."), "device": str(model.tok.device),
        "threads": torch.get_num_threads(), "seed": a.seed, "interrupted": seen.interrupted,
    }


def speed(tokens, reading, seconds):
    """Tokens and seconds of one run. seconds: after the prompts were read."""
    return {"new_tokens": tokens, "reading_seconds": reading, "seconds": seconds,
            "tokens_per_second": tokens / seconds if seconds else 0.0}


def against_plain(a, model, tokenizer, prompts, printed, make):
    """Drafting timed beside plain decoding, and the printed text compared with the plain one."""
    makers = {"drafted": make} if a.draft != "none" else {}
    runs = stats.compare(lambda drafter: begin(model, prompts, a, drafter), makers | {"plain": lambda: None},
                         len(prompts), REPEATS)
    plain, drafted = runs["plain"], runs.get("drafted", runs["plain"])
    ours = [output["ids"] for output in printed]
    different = stats.divergence(model, prompts, ours, plain.outputs) if a.temperature == 0 else None
    outputs = [{"prompt": o["prompt"], "text": tokenizer.decode(ids + out)[len(tokenizer.decode(ids)):],
                "ids": out} for o, ids, out in zip(printed, prompts, plain.outputs, strict=True)]
    return {
        **speed(drafted.tokens, drafted.reading, drafted.seconds),
        "identical": different is None if a.temperature == 0 else None, "first_divergence": different,
        "ratio": drafted.rate / plain.rate if plain.tokens else None,
        "baseline": speed(plain.tokens, plain.reading, plain.seconds)
        | {"target_passes": plain.passes, "outputs": outputs},
    }


def summary(r, a, seen):
    plain, one = r.get("baseline"), None
    if plain:
        one = plain["seconds"] / max(1, plain["target_passes"])
    return "\n".join(filter(None, [show.legend(show.colours(sys.stdout)), seen.summary(one, r.get("ratio")),
                                   method(r, a), rates(r), verdict(r) if plain else ""]))


def method(r, a):
    """How the run drafted, in one line."""
    if r["draft"] == "auto":
        often = sorted(r["chosen"].items(), key=lambda item: -item[1])
        return (f"draft: auto, with costs by {r['costs']}: "
                + ", ".join(f"{name} in {rounds} rounds" for name, rounds in often))
    where = "" if r["exit_layer"] is None else f" after block {r['exit_layer']}"
    where += "" if a.skip is None else f" {a.skip}" if a.draft == "skip" else f" without {a.skip}"
    where += f", trees of {r['tree']} tokens" if r["tree"] else ""
    far = f"gamma up to {a.gamma} as it pays" if a.do_no_harm else f"gamma {a.gamma}"
    tail = f", then up to {a.tail} by n-gram" if a.tail is not None else ""
    why = " because its search found no gain; --gamma G drafts all the same" if a.gainless else ""
    return f"draft: {r['draft']}{where}, {far}{tail}{why}"


def rates(r):
    """How fast the run was, in one line."""
    line = f"{r['tokens_per_second']:.0f} tokens/s in {r['dtype']} on {r['device']}, {r['threads']} threads"
    line += f", blocks in {r['quant']}" if r["quant"] else ""
    line += ", in recorded passes" if r["fast"] else ""
    line += f", {r['processes']} processes" if r["processes"] > 1 else ""
    if "baseline" not in r:
        return f"{line}, after reading the prompt in {r['reading_seconds']:.2g} s (one run, while printing)"
    plain, ratio = r["baseline"], "unknown" if r["ratio"] is None else f"{r['ratio']:.2f}"
    return (f"{line}; plain decoding {plain['tokens_per_second']:.0f}: ratio {ratio} ({r['new_tokens']} and "
            f"{plain['new_tokens']} tokens, after reading the prompt in {r['reading_seconds']:.2g} and "
            f"{plain['reading_seconds']:.2g} s; medians of {REPEATS} interleaved runs)")


def verdict(r):
    """Whether the text is that of plain decoding, in one line."""
    d = r["first_divergence"]
    if r["identical"] is None:
        return ("sampled texts may differ, as drafting uses the random numbers differently; compare texts at "
                "temperature 0")
    if d is None:
        return f"identical to plain decoding in {r['dtype']}, token for token"
    equal = f"{d['position']} equal tokens" + f" of output {d['output']}" * (len(r["outputs"]) > 1)
    gap = f"{d['gap']:.3g} apart, and rounding in {r['dtype']} explains up to {d['rounding']:.2g}"
    if d["near_tie"]:
        return f"after {equal} a near-tie was decided otherwise than in plain decoding: two logits are {gap}"
    return f"NOT identical to plain decoding, and no near-tie explains it: after {equal} two logits are {gap}"


def main(argv=None):
    """Exit status: 0; 1 if --compare found a difference that rounding cannot explain; 2 after bad input; 130
    after Ctrl-C."""
    def start(argv):
        with parallel.together():
            return run(parse(argv))
    return cli.main(start, argv)


if __name__ == "__main__":
    sys.exit(main())
