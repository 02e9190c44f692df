"""The command behind generate.py. It reads the flags, loads the model, writes the texts and shows
them.

The one thing to remember: it only consumes what `speculative.rounds` yields.
"""
import json
import sys
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import checkpoint
import sampling
from files import check_writable, guarded, write_file
from machine import parallel
from machine.exact import exactly, fast
from machine.fused import fuse
from machine.quant import KINDS
from sampling import Coins, Race, row_seeds, to_probs
from speculative import check_prompts, rounds
from support import chat, cli, drafts, own, page, report, show, stats
from support.texts import numbered_texts
from verification import verify, verify_block

WEIGHTS = Path(__file__).resolve().parent.parent / "weights"
CLASHES = (     # flags that do not go together, and why
    ("page", "tree", "--page shows chains, coin by coin, not trees: leave out --page or --tree"),
    ("rule", "tree", "--rule says how far a chain goes on: leave out --rule or --tree"),
    ("exact", "page", "--exact does not go with --page"),
    ("exact", "tree", "--exact does not go with --tree"))


class Options(SimpleNamespace):
    """What the command line asks for, with an attribute for each flag of `parser`."""

    def sampling(self):
        """The settings of `to_probs`."""
        return {name: vars(self)[name] for name in ("temperature", "top_k", "top_p", "min_p")}


def parser():
    p = cli.Parser(description="Self-speculative decoding of Llama, Gemma-2 and Qwen.",
                   allow_abbrev=False)
    add = p.add_argument_group("text").add_argument
    add("prompt", nargs="?", metavar="PROMPT", help="the text to continue; - reads standard input")
    add("--prompt-file", type=Path, metavar="FILE",
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
    add("--model", type=Path, metavar="DIR", default=WEIGHTS / "stories-llama",
        help="a Hugging Face folder (default: weights/stories-llama)")
    add("--device", help="cpu or cuda (default: cuda if there is a GPU)")
    add("--dtype", choices=cli.DTYPES, help="default: as stored")
    add("--fast", action="store_true",
        help="compute a pass in one call: of C++ on a CPU, which is compiled in seconds, once per "
             "machine; as a CUDA graph on a GPU")
    add("--exact", action="store_true",
        help="the same text to the bit with every draft, at any temperature: a row of logits "
             "depends on its text alone, and random numbers belong to a position and a row of the "
             "batch")
    add("--quant", choices=KINDS, help="quantise the matrices of the model's blocks")
    add = p.add_argument_group("what is shown").add_argument
    add("--compare", action="store_true",
        help="also time plain decoding, and compare the two texts")
    add("--picture", type=Path, metavar="FILE",
        help="write the coloured text as an SVG (first prompt)")
    add("--page", type=Path, metavar="FILE",
        help="write a page that steps through the run in a browser (first prompt)")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    return p


def parse(argv):
    """The Options. Raises ValueError for flags that are wrong or do not go together."""
    options = Options(**vars(parser().parse_args(argv)))
    given = vars(options)
    if (options.prompt is None) == (options.prompt_file is None):
        raise ValueError("give one prompt, or a batch with --prompt-file")
    for flag, suffix in (("picture", ".svg"), ("page", ".html")):
        if given[flag] is not None and given[flag].suffix != suffix:
            raise ValueError(f"--{flag} must name a {suffix} file, got {str(given[flag])!r}")
    for one, other, why in CLASHES:
        if given[one] and given[other]:
            raise ValueError(why)
    sampling.check(**options.sampling())
    for name, value in options.sampling().items():
        if value is not None and options.temperature == 0 and name != "temperature":
            raise ValueError(f"--{name.replace('_', '-')} does nothing at temperature 0, which is "
                             "greedy: add --temperature T")
    drafts.check_flags(options)
    return options


# --- the prompts


def texts_of(options):
    """The texts to continue, by the names that messages give them. There is one, or the batch of
    --prompt-file."""
    file = options.prompt_file
    pipe = options.prompt == "-" or (file and file.exists() and not file.is_file())
    if pipe and parallel.here() != (0, 1):
        raise ValueError("only one process can read standard input or a pipe: give a prompt or a "
                         "file")
    if file:
        lines = numbered_texts(file, "prompt", "\n")
        return {f"{file}, line {n}": text for n, text in lines.items()}
    text = options.prompt
    if text == "-":
        text = cli.read_input().removesuffix("\n")
    return {"the prompt": text}


def encoded(options, c, tokenizer, texts):
    """The ids of each text. With --chat the model's own template surrounds it."""
    render = None
    if options.chat:
        render = chat.message(options.model)
    prompts = []
    for name, text in texts.items():
        if render:
            text = render(text)
        with guarded(name):
            prompts.append(checkpoint.encode(tokenizer, text, c.bos, not options.chat))
    return prompts


# --- writing


class Writer:
    """Continues the prompts (lists of ids) with any drafter."""

    def __init__(self, options, model, tokenizer, prompts):
        self.options = options
        self.model = model
        self.tokenizer = tokenizer
        self.prompts = prompts

    def rounds(self, drafter, player=None):
        """What `speculative.rounds` yields. The page's `player` records coins and
        distributions."""
        options = self.options
        greedy = options.temperature == 0
        look = to_probs
        coins = Coins(options.seed)
        if options.exact and not greedy:    # a greedy text does not depend on them
            coins = Race(row_seeds(options.seed, len(self.prompts)))
        if player:
            coins = player.coins
            look = player.look
        if parallel.here() != (0, 1):
            coins = parallel.Agreed(coins)
        verifier = verify if options.page or greedy else verify_block   # a page explains `verify`
        probs = partial(look, **options.sampling())
        return rounds(self.model, self.prompts, options.max_new, drafter, probs, coins,
                      self.model.c.eos, None, verifier)

    def rehearse(self, drafters):
        """Record the passes of the first 24 rounds, before anything is timed or printed. drafters:
        () -> new ones."""
        def write():
            for drafter in drafters():
                for _ in islice(self.rounds(drafter), 24):
                    pass
        self.model.rehearse(write)

    def watch(self, drafter, player=None):
        """One run as a show.Generation. A single text is printed while it is written. The page's
        `player` receives every round."""
        seen = show.Generation(self.tokenizer, self.prompts, drafter)
        colour = show.colours(sys.stdout)
        opening = [show.paint([(prompt, None)]) for prompt in seen.prompts]
        if self.options.chat:
            opening = [""] * len(opening)
        live = not self.options.json and len(opening) == 1
        if live:
            print(opening[0], end="", flush=True)
        for step in seen.watch(self.rounds(drafter, player)):
            if player:
                player.add(*step)
            if live:
                print(seen.fresh(colour), end="", flush=True)
        if live:
            print(seen.fresh(colour))
        elif not self.options.json:
            for b, prompt in enumerate(opening):
                print(prompt + seen.fresh(colour, b), end="\n\n")
        return seen


def load_model(options):
    """(model, tokenizer), quantised, split or fused, with the passes that --exact or --fast ask
    for."""
    part = parallel.here()
    alone = part == (0, 1)
    for flag in ("fast", "exact"):
        if vars(options)[flag] and not alone:
            raise ValueError(f"--{flag} works in one process, not in several")
    model, tokenizer = checkpoint.load(
        options.model, options.device, cli.DTYPES.get(options.dtype), KINDS.get(options.quant),
        None if alone else part)
    model = fuse(model) if alone else parallel.unite(model)
    if options.exact:
        model = exactly(model, options.fast)
    elif options.fast:
        model = fast(model)
    return model, tokenizer


def run(options):
    drafts.check_before_loading(options)
    for path in filter(None, (options.picture, options.page)):
        check_writable(path)
    texts = texts_of(options)
    model, tokenizer = load_model(options)
    prompts = encoded(options, model.c, tokenizer, texts)
    check_prompts(model, prompts, options.max_new, list(texts))
    writer = Writer(options, model, tokenizer, prompts)
    plan = drafts.Plan(options, model, tokenizer)
    if options.fast:
        without = [None] if options.compare else []
        writer.rehearse(lambda: [plan.make(), *plan.parts(), *without])
    player = None
    if options.page:
        player = page.Player(tokenizer, prompts[0], options.seed)
    seen = writer.watch(stats.Timed(plan.make()), player)
    r = report.of_run(options, model, plan, list(texts.values()), seen)
    try:
        if parallel.here()[0] == 0:
            if options.picture:
                show.picture(seen, options.picture)
            if player:
                settings = {"model": options.model.name, "draft": plan.note, **options.sampling()}
                write_file(options.page, player.html(settings | {"seed": options.seed}))
    finally:    # a full disk does not cost the answer
        if options.compare:
            r |= report.against_plain(writer, plan, r["outputs"])
        print(json.dumps(r) if options.json else report.summary(r, seen))
    different = r.get("first_divergence")
    return int(bool(different and (options.exact or not different["near_tie"])))


def main(argv=None):
    """Returns the exit status of `cli.main`, or 1 after a difference that --compare cannot
    explain."""
    def start(argv):
        options = parse(argv)
        with parallel.together(), own.blamed(options.draft), own.blamed(options.rule):
            return run(options)
    return cli.main(start, argv)
