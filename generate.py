"""The command line: a prompt goes in, and its continuation comes out token by token, coloured by
origin.

    python generate.py "Once upon a time" --compare
    torchrun --nproc-per-node 2 generate.py "Once upon a time"      on two devices

The one thing to remember: this file only consumes what `speculative.rounds` yields.
"""
import json
import sys
from itertools import islice
from pathlib import Path

import torch

import checkpoint
import sampling
from files import check_writable, guarded, write_file
from machine import parallel
from machine.exact import exactly, fast
from machine.fused import fuse
from machine.quant import KINDS
from sampling import Coins, Race, row_seeds, to_probs
from speculative import check_prompts, rounds
from support import chat, cli, drafts, own, page, show, stats
from support.texts import numbered_texts
from verification import verify, verify_block

WEIGHTS = Path(__file__).resolve().parent / "weights"
REPEATS = 3  # interleaved runs in --compare, after a warm-up of each


def flags():
    p = cli.Parser(description="Self-speculative decoding of Llama, Gemma-2 and Qwen.",
                   allow_abbrev=False)
    add = p.add_argument_group("text").add_argument
    add("prompt", nargs="?", metavar="PROMPT", help="the text to continue; - reads standard input")
    add("--prompt-file", metavar="FILE",
        help='a batch: one prompt per line, in .jsonl {"prompt": ...}')
    add("--chat", action="store_true",
        help="the prompt is a message: use the model's chat template")
    add("--max-new", type=int, default=200, metavar="N",
        help="how many tokens to write (default: 200)")
    drafts.add_flags(p.add_argument_group("draft"))
    add = p.add_argument_group("sampling").add_argument
    add("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    add("--top-k", type=int, metavar="K", help="sample from the K most likely tokens")
    add("--top-p", type=float, metavar="P",
        help="sample from the likeliest tokens that together reach P")
    add("--min-p", type=float, metavar="P",
        help="and from those at least P times as likely as the likeliest")
    add("--seed", type=int, default=0, help="seed of the random numbers (default: 0)")
    add = p.add_argument_group("model and machine").add_argument
    add("--model", metavar="DIR", default=WEIGHTS / "stories-llama", help="a Hugging Face folder")
    add("--device", help="cpu or cuda (default: cuda if there is a GPU)")
    add("--dtype", choices=["float32", "bfloat16", "float16", "float64"], help="default: as stored")
    add("--fast", action="store_true",
        help="compute a pass in one call: of C++ on a CPU, which is compiled in seconds, once per "
             "machine; as a CUDA graph on a GPU")
    add("--exact", action="store_true",
        help="the same text to the bit with every draft, at any temperature: a row of logits "
             "depends on its text alone, and random numbers belong to a position and a row of the "
             "batch")
    add("--quant", choices=KINDS, help="store the matrices of the model's blocks in few bits")
    add = p.add_argument_group("what is shown").add_argument
    add("--compare", action="store_true",
        help="time plain decoding, too, and compare the two texts")
    add("--picture", metavar="FILE", help="write the coloured text as an SVG (first prompt)")
    add("--page", metavar="FILE",
        help="write a page that steps through the run in a browser (first prompt)")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    return p


def parse(argv):
    a = flags().parse_args(argv)
    if (a.prompt is None) == (a.prompt_file is None):
        raise ValueError("give one prompt, or a batch with --prompt-file")
    for flag, path, suffix in (("picture", a.picture, ".svg"), ("page", a.page, ".html")):
        if path is not None and Path(path).suffix != suffix:
            raise ValueError(f"--{flag} must name a {suffix} file, got {path!r}")
    if a.page and a.tree:
        raise ValueError("--page shows chains, coin by coin, not trees: leave out --page or --tree")
    sampling.check(a.temperature, a.top_k, a.top_p, a.min_p)
    for flag in ("page", "tree"):
        if a.exact and getattr(a, flag):
            raise ValueError(f"--exact does not go with --{flag}")
    cut = next((name for name in ("top_k", "top_p", "min_p") if getattr(a, name) is not None), None)
    if cut and a.temperature == 0:
        raise ValueError(f"--{cut.replace('_', '-')} does nothing at temperature 0, which is "
                         "greedy: add --temperature T")
    drafts.check(a)
    return a


def read_prompts(a):
    """{what to call it in a message: text} of the texts to continue: one, or the batch of
    --prompt-file."""
    if a.prompt_file is not None:
        file = Path(a.prompt_file)
        if file.exists() and not file.is_file():
            check_alone()
        lines = numbered_texts(file, "prompt", "\n")
        return {f"{file}, line {n}": text for n, text in lines.items()}
    if a.prompt == "-":
        check_alone()
        return {"the prompt": cli.read_input().removesuffix("\n")}
    return {"the prompt": a.prompt}


def check_alone():
    if parallel.place() != (0, 1):
        raise ValueError("only one process can read standard input or a pipe: give a prompt or a "
                         "file")


class Writer:
    """Continues the prompts with any drafter, as the flags say."""

    def __init__(self, a, model, tokenizer, texts):
        self.a = a
        self.tokenizer = tokenizer
        self.texts = list(texts.values())
        self.eos = set(model.c.eos)
        self.prompts = []
        if a.chat:
            texts = dict(texts)
            render = chat.read_template(a.model)
            for name, text in texts.items():
                texts[name] = render([{"role": "user", "content": text}])
        for name, text in texts.items():
            with guarded(name):
                self.prompts.append(checkpoint.encode(tokenizer, text, model.c.bos, not a.chat))
        check_prompts(model, self.prompts, a.max_new, list(texts))
        self.model = self.passes(model)

    def passes(self, model):
        """What stands in for the model, as the flags say."""
        if self.a.exact:
            return exactly(model, self.a.fast)
        return fast(model) if self.a.fast else model

    def rounds(self, drafter, player=None):
        """What `speculative.rounds` yields. player: the page's, to record coins and
        distributions."""
        a = self.a
        look = to_probs
        coins = Coins(a.seed)
        if a.exact and a.temperature > 0:   # greedily nothing depends on them
            coins = Race(row_seeds(a.seed, len(self.prompts)))
        if player:
            coins = player.coins
            look = player.look
        if parallel.place() != (0, 1):
            coins = parallel.Agreed(coins)
        rule = verify if a.page or a.temperature == 0 else verify_block  # a page explains `verify`

        def probs(logits):
            return look(logits, a.temperature, a.top_k, a.top_p, a.min_p)

        return rounds(self.model, self.prompts, a.max_new, drafter, probs, coins, self.eos,
                      None, rule)

    def rehearse(self, makers):
        """Record the passes of the first 24 rounds, before anything is timed or printed."""
        def write():
            for make in makers:
                for _ in islice(self.rounds(make()), 24):
                    pass
        self.model.rehearse(write)

    def watch(self, drafter, player=None):
        """One run as a show.Generation. A single text is printed while it is written. player: the
        page's, which receives every round."""
        seen = show.Generation(self.tokenizer, self.prompts, drafter)
        colour = show.colours(sys.stdout)
        opening = [show.paint([(prompt, None)]) for prompt in seen.prompts]
        if self.a.chat:
            opening = [""] * len(opening)
        live = not self.a.json and len(opening) == 1
        steps = seen.watch(self.rounds(drafter, player))   # checks the prompts first
        if live:
            print(opening[0], end="", flush=True)
        for step in steps:
            if player:
                player.add(*step)
            if live:
                print(seen.fresh(colour), end="", flush=True)
        if live:
            print(seen.fresh(colour))
        elif not self.a.json:
            for b, prompt in enumerate(opening):
                print(prompt + seen.fresh(colour, b), end="\n\n")
        return seen


def run(a):
    drafts.check_processes(a)
    drafts.load_own(a)
    for path in filter(None, (a.picture, a.page)):
        check_writable(Path(path))
    rank, world = parallel.place()
    texts = read_prompts(a)
    device = checkpoint.find_device(a.device)
    for flag in ("fast", "exact"):
        if getattr(a, flag) and world > 1:
            raise ValueError(f"--{flag} works in one process, not in several")
    dtype = a.dtype and getattr(torch, a.dtype)
    quant = KINDS.get(a.quant)
    part = parallel.place() if world > 1 else None
    model, tokenizer = checkpoint.load(a.model, device, dtype, quant, part)
    if world > 1:
        model = parallel.join(model)
    else:
        model = fuse(model)
    writer = Writer(a, model, tokenizer, texts)
    plan = drafts.plan(a, writer.model, tokenizer)
    if a.fast:
        makers = [plan.make]
        if a.compare:
            makers.append(lambda: None)
        writer.rehearse(makers)
    player = None
    if a.page:
        player = page.Player(tokenizer, writer.prompts[0], a.seed)
    seen = writer.watch(stats.Timed(plan.make()), player)
    r = report(writer, plan, seen)
    try:
        if a.picture and rank == 0:
            show.picture(seen, Path(a.picture))
        if player and rank == 0:
            settings = vars(a) | {"model": Path(a.model).name, "draft": plan.note}
            write_file(Path(a.page), player.html(settings))
    finally:    # a full disk does not cost the answer
        if a.compare:
            r |= against_plain(writer, plan, r["outputs"])
        print(json.dumps(r) if a.json else summary(r, seen))
    different = r.get("first_divergence")
    return int(bool(different and (a.exact or not different["near_tie"])))


def report(writer, plan, seen):
    """What --json prints about a run."""
    a = writer.a
    model = writer.model
    n = seen.counts
    outputs = []
    for text, row in zip(writer.texts, seen.rows, strict=True):
        written = "".join(t.text for t in row)
        outputs.append({"prompt": text, "text": written, "ids": [t.id for t in row]})
    how = plan.note
    if plan.draft == "auto":
        how += f": {seen.timed.drafters[0].summary()}"
    return {
        "outputs": outputs,
        **speed(n.tokens, seen.timed.reading, sum(seen.timed.seconds.values())),
        "target_passes": n.passes,
        "tokens_per_pass": n.tau,
        "accepted": n.accepted,
        "proposed": n.proposed,
        "alpha": n.alpha if n.drafted else None,
        "draft": plan.draft,
        "gamma": plan.gamma,
        "how": how,
        "fast": a.fast and model.replays(),
        "exact": a.exact,
        "quant": a.quant,
        "processes": parallel.place()[1],
        "dtype": str(model.tok.dtype).removeprefix("torch."),
        "device": str(model.tok.device),
        "threads": torch.get_num_threads(),
        "seed": a.seed,
        "own_settings": chat.own_settings(a.model) if a.temperature == 0 else "",
    }


def speed(tokens, reading, seconds):
    """Tokens and seconds of one run. seconds: those after the prompts were read."""
    return {"new_tokens": tokens, "reading_seconds": reading, "seconds": seconds,
            "tokens_per_second": tokens / seconds if seconds else 0.0}


def against_plain(writer, plan, printed):
    """Time drafting beside plain decoding, and compare the printed text with the plain one."""
    prompts = writer.prompts
    makers = {"drafted": plan.make, "plain": lambda: None}
    drafted, plain = stats.compare(writer.rounds, makers, len(prompts), REPEATS).values()
    baseline = speed(plain.tokens, plain.reading, plain.seconds)
    baseline |= {"target_passes": plain.passes, "ids": plain.outputs}
    found = {
        **speed(drafted.tokens, drafted.reading, drafted.seconds),
        "identical": None,
        "first_divergence": None,
        "ratio": drafted.rate / plain.rate if plain.tokens else None,
        "baseline": baseline,
    }
    if writer.a.exact or writer.a.temperature == 0:     # sampled texts may differ
        ids = [output["ids"] for output in printed]
        different = stats.divergence(writer.model, prompts, ids, plain.outputs)
        found["first_divergence"] = different
        found["identical"] = different is None
    return found


def summary(r, seen):
    """The lines after the text: legend, counts, how it drafted, how fast it was, and the
    verdict."""
    lines = [show.legend(show.colours(sys.stdout)), seen.summary(), r["how"], rates(r)]
    if r["own_settings"]:
        lines.append(f"this is greedy; the model's own settings: {r['own_settings']}")
    if "baseline" in r:
        lines.append(verdict(r))
    return "\n".join(filter(None, lines))


def rates(r):
    """How fast the run was, in one line."""
    line = f"{r['tokens_per_second']:.0f} tokens/s in {r['dtype']} on {r['device']}"
    line += f", {r['threads']} threads"
    if r["quant"]:
        line += f", blocks in {r['quant']}"
    if r["fast"]:
        line += ", in fast passes"
    if r["exact"]:
        line += ", exact"
    if r["processes"] > 1:
        line += f", {r['processes']} processes"
    if "baseline" not in r:
        seconds = f"{r['reading_seconds']:.2g} s"
        return f"{line}, after reading the prompt in {seconds} (one run, while printing)"
    ratio = "unknown" if r["ratio"] is None else f"{r['ratio']:.2f}"
    line += f"; plain decoding {r['baseline']['tokens_per_second']:.0f}: ratio {ratio}"
    return f"{line} (after reading the prompt; medians of {REPEATS} interleaved runs)"


def verdict(r):
    """Whether the text is that of plain decoding, in one line."""
    d = r["first_divergence"]
    if r["identical"] is None:
        return ("sampled texts may differ: drafting spends more random numbers (compare at "
                "temperature 0, or with --exact)")
    if d is None:
        return f"identical to plain decoding in {r['dtype']}, token for token"
    equal = f"{d['position']} equal tokens"
    if len(r["outputs"]) > 1:
        equal += f" of output {d['output']}"
    if r["exact"]:
        return (f"NOT identical to plain decoding, which --exact promises, after {equal}: "
                "please report it")
    gap = f"{d['gap']:.3g} apart, and rounding in {r['dtype']} explains up to {d['rounding']:.2g}"
    if d["near_tie"]:
        return (f"after {equal} a near-tie was decided differently from plain decoding: "
                f"two logits are {gap}")
    return (f"NOT identical to plain decoding, and not by a near-tie: after {equal} two logits "
            f"are {gap}")


def main(argv=None):
    """Exit status: 0; 1: an unexplained difference (--compare); 2: bad input; 130: Ctrl-C."""
    def start(argv):
        a = parse(argv)
        with parallel.together(), own.blamed(a.draft, a.rule):
            return run(a)
    return cli.main(start, argv)


if __name__ == "__main__":
    sys.exit(main())
