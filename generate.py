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
from layerskip import StandIn
from machine import parallel
from machine.quant import KINDS
from machine.recorded import Recorded
from sampling import Coins, to_probs
from speculative import rounds
from support import chat, cli, drafts, page, show, stats
from support.costs import as_data
from support.files import read_jsonl, read_lines

WEIGHTS = Path(__file__).resolve().parent / "weights"
PATHS = "model", "skip", "draft_model", "draft_vocab", "heads", "costs", "prompt_file", "picture", "page"
LARGEST = {"gamma": 1000, "tail": 1000, "tree": 1000,    # the most that make sense per round
           "max_new": 10**7, "top_k": 10**7}
REHEARSED = 24  # rounds, before recorded passes are timed
REPEATS = 3  # interleaved runs in --compare, after a warm-up of each


def flags():
    p = cli.Parser(
        description="Self-speculative decoding of a Llama or Gemma-2 checkpoint.", allow_abbrev=False)
    add = p.add_argument_group("text").add_argument
    add("prompt", nargs="?", metavar="PROMPT")
    add("--prompt", dest="text", metavar="TEXT", help="the same as PROMPT; - reads standard input")
    add("--prompt-file", metavar="FILE", help='a batch: one prompt per line, or JSON or JSONL with '
        '{"prompt": ...}')
    add("--chat", action="store_true", help="treat the prompt as a message, by the model's chat template")
    add("--max-new", type=int, default=200, metavar="N", help="how many tokens to write (default: 200)")
    drafts.add_flags(p.add_argument_group("draft"))
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


def parse(argv):
    a = flags().parse_args(argv)
    drafts.check(a)
    far = next((flag for flag, most in LARGEST.items() if (getattr(a, flag) or 0) > most), None)
    if far:
        raise ValueError(f"--{far.replace('_', '-')} must be at most {LARGEST[far]}, "
                         f"got {getattr(a, far)}")
    if not -(2**63) <= a.seed < 2**63:
        raise ValueError(f"--seed must fit in 64 bits, got {a.seed}")
    if a.picture and Path(a.picture).suffix not in (".png", ".svg"):
        raise ValueError(f"--picture must name a .png or .svg file, got {a.picture}")
    if a.page and Path(a.page).suffix != ".html":
        raise ValueError(f"--page must name a .html file, got {a.page}")
    if a.page and a.tree:
        raise ValueError("--page shows chains, coin by coin, and no trees: leave out --page or --tree")
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
            text = cli.read_input().removesuffix("\n")
        return [text]
    path = Path(a.prompt_file)
    as_json = path.suffix.lower() in (".json", ".jsonl")
    prompts = (read_jsonl(path, "prompt", 'a text under "prompt"') if as_json else
               [line for _, line in read_lines(path)])
    if not prompts:
        raise ValueError(f"{path}: no prompts, every line is empty")
    return prompts


class Reading(StandIn):
    """A stand-in that shows on a terminal how much of a long prompt has been read."""

    def __init__(self, model, tokens):
        self.model, few = model, tokens < 1024
        self.bar = tqdm(total=tokens, desc="reading", unit=" tokens", leave=False, disable=few or None)

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
                                       KINDS.get(a.quant), parallel.place())
    model = parallel.join(model) if world > 1 else model
    prompts, a.eos = texts, ()
    if a.chat:
        render = chat.read_template(a.model)
        prompts = [render([{"role": "user", "content": text}]) for text in texts]
        a.eos = chat.end_of_turn(a.model, render, tokenizer)
    prompts = [checkpoint.encode(tokenizer, prompt, model.c.bos, not a.chat) for prompt in prompts]
    a.cache, model = None, Recorded(model) if a.fast else model
    make = drafts.drafters(a, model, tokenizer)
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
        "accepted": n.accepted, "proposed": n.proposed, "alpha": n.alpha if n.drafted else None,
        "draft": a.draft, "exit_layer": a.exit_layer, "gamma": a.gamma, "do_no_harm": a.do_no_harm,
        "tail": a.tail, "tree": a.tree, "fast": a.fast and model.replays(), "quant": a.quant,
        "processes": parallel.place()[1], **automatic(a, seen.timed.drafters[0]),
        "dtype": str(model.tok.dtype).removeprefix("torch."), "device": str(model.tok.device),
        "threads": torch.get_num_threads(), "seed": a.seed, "interrupted": seen.interrupted,
    }


def automatic(a, drafter):
    """What --draft auto reckoned with, chose and believes now."""
    if a.draft != "auto":
        return {"costs": "weights", "cost_table": None, "chosen": None, "beliefs": None}
    return {"costs": a.costs, "cost_table": as_data(a.table), "chosen": drafter.chosen,
            "beliefs": drafter.beliefs()}


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
                                   drafts.told(r, a), rates(r), verdict(r) if plain else ""]))


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
