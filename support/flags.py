"""The flags of generate.py, which of them go together, and the Plan that they make."""
import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import sampling
from checkpoint import download_first
from drafter import MOST, Drafter
from model import Refused
from support import cli

WEIGHTS = Path(__file__).resolve().parent.parent / "weights"
PATHS = "model", "heads", "file"    # sources that --draft names by a path
KINDS = "int8", "int4"     # of quantised matrices


class Options(SimpleNamespace):
    """What the command line asks for, with an attribute for each flag of `parser`."""
    rows = 1    # prompts of the batch

    def sampling(self):
        """The settings of `to_probs`."""
        return {name: vars(self)[name] for name in ("temperature", "top_k", "top_p", "min_p")}

    def length(self, default):
        """How many tokens to draft: --gamma, or the default; MOST for a rule of the reader's."""
        if self.gamma is not None:
            return self.gamma
        return default if self.rule is None else MOST

    def short(self, model):
        """The model, with a shorter output head if --draft-vocab names one."""
        if self.draft_vocab is None:
            return model
        return import_module("methods.standin").short_head(model, self.draft_vocab)


@dataclass
class Plan:
    """How a run drafts. Every run needs a new drafter, because a rule learns from its text."""
    options: Options
    build: Callable[..., Drafter]   # of a limit: how many tokens to draft, or a Rule
    gamma: int
    about: str = ""                 # what is printed after its name
    name: str | None = None         # by default the source's
    parts: Callable = list          # () -> drafters that a run may switch to, for a rehearsal

    @property
    def draft(self):
        return self.name or self.options.source

    def make(self):
        if self.options.rule is None:
            return self.build(self.gamma)
        rule = import_module("support.own").rule(self.options.rule, self.gamma)
        return self.build(rule)

    def rehearse(self, model, start):
        """Let the model get ready for the passes of the first 24 rounds, before anything is timed.
        start(drafter) yields what `rounds` yields."""
        def write():
            for drafter in (self.make(), *self.parts(), Drafter()):
                for _ in islice(start(drafter), 24):
                    pass

        model.rehearse(write)

    @property
    def note(self):
        """The line that the run prints about it."""
        note = f"draft: {self.draft}{self.about}, gamma "
        if self.draft == "auto" or self.options.rule is not None:
            note += "at most "
        note += str(self.gamma)
        if self.options.rule is not None:
            note += f", rule {self.options.rule}"
        return note


class Source(NamedTuple):
    """What --draft can name: plan(options, model, tokenizer) -> Plan, and the flags of OF_DRAFTS
    that go with it."""
    plan: Callable
    flags: str


def processes():
    """How many processes torchrun has started, or 1."""
    return int(os.environ.get("WORLD_SIZE", 1))


# --- the parser


def within(least, most):
    """An argparse type: a number from `least` to `most`, whole if `least` is."""
    kind = type(least)

    def convert(text):
        number = kind(text)
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"must be from {least} to {most}, got {number}")
        return number

    convert.__name__ = {int: "whole number", float: "number"}[kind]
    return convert


def of_a_file(text):
    """An argparse type: FILE.py:NAME."""
    if not names_a_file(text):
        raise argparse.ArgumentTypeError(f"must be FILE.py:NAME, got {text!r}")
    return text


def names_a_file(text):
    return str(text).rpartition(":")[0].endswith(".py")


def ending(suffix):
    """An argparse type: a path with this ending."""
    def convert(text):
        if Path(text).suffix != suffix:
            raise argparse.ArgumentTypeError(f"must name a {suffix} file, got {text!r}")
        return Path(text)

    return convert


OF_DRAFTS = {   # flags that go with some sources only
    "gamma": dict(
        type=within(0, 1000), metavar="G",
        help="how many tokens to draft per round (auto, --rule: at most); levels of a tree"),
    "exit-layer": dict(
        type=int, metavar="E", help="draft with the first E blocks (default: a sixth)"),
    "skip": dict(
        metavar="SET",
        help="skip, auto: draft without some sub-layers: a3,m4 skips attention 3 and MLP 4; or a "
             'file with {"attn": [3], "mlp": [4], "gamma": 2}, as search.py writes it'),
    "rule": dict(
        type=of_a_file, metavar="FILE.py:NAME",
        help="your own rule for how far to draft, NAME: (gamma) -> Rule; lab/rules.py has the "
             "published ones"),
    "tree": dict(
        type=within(1, 128), metavar="N", help="trained heads: draft a tree of N tokens"),
    "draft-vocab": dict(
        metavar="FILE",
        help="draft with few tokens and a shorter output head (not for lookup and trained heads), "
             "as search.py --draft-vocab writes it"),
    "draft-model": dict(
        metavar="DIR",
        help="auto: choose among the usual drafts and this small model, which needs the same "
             "tokenizer"),
    "draft-quant": dict(
        choices=KINDS,
        help="quantise the matrices of the small model (--draft DIR or --draft-model)")}


def parser(sources, only=None):
    """The parser of all flags, or of those that go with one source."""
    p = cli.Parser(description="Self-speculative decoding of Llama, Gemma and Qwen.",
                   allow_abbrev=False)
    group = p.add_argument_group("text")
    text = group.add_mutually_exclusive_group(required=True)
    text.add_argument("prompt", nargs="?", metavar="PROMPT",
        help="the text to continue; - reads standard input")
    text.add_argument("--prompt-file", type=Path, metavar="FILE",
        help='a batch: one prompt per line, in .jsonl {"prompt": ...}')
    add = group.add_argument
    add("--chat", action="store_true",
        help="the prompt is a message: use the model's chat template")
    add("--max-new", type=int, default=200, metavar="N",
        help="how many tokens to write (default: 200)")
    add = p.add_argument_group("draft").add_argument
    add("--draft", metavar="HOW",
        help=f"{listed(sources)}; or a folder with a "
             "small model of the same tokenizer, or with trained heads; or your own, "
             "FILE.py:NAME, where NAME is (model, gamma) -> Drafter. auto (the default) chooses "
             "before every draft what promises most; int4 and the like draft with the model "
             "itself, quantised; from kangaroo on the names are trained heads, read from "
             "heads/HOW in the model's folder")
    for name, how in OF_DRAFTS.items():
        if name != "tree" and (only is None or name in sources[only].flags.split()):
            add(f"--{name}", **how)
    one = p.add_argument_group("one of these").add_mutually_exclusive_group().add_argument
    if only is None or "tree" in sources[only].flags.split():
        one("--tree", **OF_DRAFTS["tree"])
    one("--exact", action="store_true",
        help="the same text to the bit with every draft, at any temperature: a row of logits "
             "depends on its text alone, and random numbers belong to a position and a row of the "
             "batch")
    one("--page", type=ending(".html"), metavar="FILE",
        help="write a page that steps through the run in a browser (first prompt)")
    add = p.add_argument_group("sampling").add_argument
    add("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    add("--top-k", type=int, metavar="K", help="sample from the K most likely tokens")
    add("--top-p", type=float, metavar="P",
        help="sample from the likeliest tokens that together reach P")
    add("--min-p", type=float, metavar="P",
        help="drop tokens less likely than P times the most likely one")
    add("--seed", type=int, default=0, help="seed of the random numbers (default: 0)")
    add("--verify", choices=("token", "block"), default="token",
        help="accept a draft token by token (default) or as a block, which accepts more of a "
             "sampled draft")
    add = p.add_argument_group("model and machine").add_argument
    add("--model", type=Path, metavar="DIR", default=WEIGHTS / "stories-llama",
        help="a Hugging Face folder (default: weights/stories-llama)")
    add("--device", help="cpu or cuda (default: cuda if there is a GPU)")
    add("--dtype", choices=cli.DTYPES, help="default: as stored")
    add("--fast", action="store_true",
        help="compute a pass in one call: of C++ on a CPU, which is compiled in seconds, once per "
             "machine; as a CUDA graph on a GPU")
    add("--quant", choices=KINDS, help="quantise the matrices of the model's blocks")
    add = p.add_argument_group("what is shown").add_argument
    add("--compare", action="store_true",
        help="also time plain decoding, and compare the two texts")
    add("--picture", type=ending(".svg"), metavar="FILE",
        help="write the coloured text as an SVG (first prompt)")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    return p


def parse(argv, sources):
    """The Options. Raises Refused for flags that are wrong or do not go together."""
    options = Options(**vars(parser(sources).parse_args(argv)))
    options.source = source_of(options, sources)
    try:
        parser(sources, options.source).parse_args(argv)
    except Refused as e:    # flags that other sources take
        raise Refused(f"--draft {options.source}: {e}") from None
    sampling.check(**options.sampling())
    for name, value in options.sampling().items():
        if value is not None and options.temperature == 0 and name != "temperature":
            raise Refused(f"--{name.replace('_', '-')} does nothing at temperature 0, which is "
                          "greedy: add --temperature T")
    if options.source == "skip" and options.skip is None:
        raise Refused("--draft skip needs --skip with the sub-layers, such as a3,m4 or a file")
    if options.source == "auto" and options.draft_quant and not options.draft_model:
        raise Refused("--draft-quant quantises a small model: name one with --draft DIR, or with "
                      "--draft-model DIR")
    if options.tree and options.rule:
        raise Refused("--rule says how far a chain goes on: leave out --rule or --tree")
    if options.verify == "block" and (options.tree or options.page):
        raise Refused("--verify block judges chains, and --page explains token by token: leave out "
                      "--verify, --tree or --page")
    return options


def source_of(options, sources):
    """The source that the flags choose, a key of `sources`."""
    draft = options.draft
    if draft is None:
        if options.exit_layer is not None:
            return "exit"
        return "auto" if options.skip is None else "skip"
    if draft in sources and draft not in PATHS:
        return draft
    if names_a_file(draft):
        return "file"
    if Path(draft).is_dir():
        return "model" if (Path(draft) / "config.json").is_file() else "heads"
    raise Refused(f"--draft {draft}: neither a folder with a small model or with trained heads, "
                  f"nor FILE.py:NAME, nor one of {listed(sources)}{download_first(draft)}")


def listed(sources):
    """The names for --draft."""
    return ", ".join(name for name in sources if name not in PATHS)
