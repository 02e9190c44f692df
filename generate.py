"""The command line. A prompt goes in, and its continuation comes out token by token, coloured by
origin.

    python generate.py "Once upon a time" --draft exit
    torchrun --nproc-per-node 2 generate.py "Once upon a time"      on two devices

It reads from top to bottom. What a flag asks for is imported where it is asked for.
"""
import signal
import sys
from functools import partial
from importlib import import_module

if __name__ == "__main__":      # until the modules are loaded, Ctrl-C ends without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import checkpoint
from drafter import Drafter
from layerskip import SelfDraft, early_exit
from sampling import Coins, to_probs
from speculative import check_prompts, rounds
from support import cli, flags, report, show, stats
from support.flags import Plan, Source, processes
from verification import verify

# --- where drafts come from


def no_draft(options, model, tokenizer):
    return Plan(options, lambda limit: Drafter(), 0)


def exit_draft(options, model, tokenizer):
    blocks = options.exit_layer
    if blocks is None:
        blocks = max(1, model.c.n_layers // 6)
    build = partial(SelfDraft, options.short(model), early_exit(model.c.n_layers, blocks))
    return Plan(options, build, options.length(2), f" after block {blocks}")


def later(module, name):
    """A source in another file, which is imported when it is named."""
    return lambda *args: getattr(import_module(module), name)(*args)


HEADS = Source(later("support.drafts", "trained"), "gamma tree rule")
QUANTISED = Source(later("support.drafts", "itself_quantised"), "gamma skip draft-vocab rule")
SOURCES = {     # the names for --draft, and the flags that go with them
    "auto": Source(later("support.auto", "auto"), "gamma skip draft-vocab draft-model draft-quant"),
    "none": Source(no_draft, ""),
    "exit": Source(exit_draft, "gamma exit-layer draft-vocab rule"),
    "skip": Source(later("support.drafts", "without_some"), "gamma skip draft-vocab rule"),
    "ngram": Source(later("support.drafts", "ngram"), "gamma rule"),
    "suffix": Source(later("support.drafts", "suffix"), "gamma rule"),
    **dict.fromkeys(flags.KINDS, QUANTISED),
    **dict.fromkeys(("kangaroo", "exit_block", "eagle", "medusa", "prophet", "jump"), HEADS),
    # for --draft with a path; these are not names for it
    "model": Source(later("support.drafts", "small_model"), "gamma draft-quant draft-vocab rule"),
    "heads": HEADS,
    "file": Source(later("support.drafts", "from_a_file"), "gamma rule")}


def parse(argv):
    return flags.parse(argv, SOURCES)


def plan_of(options, model, tokenizer, rows=1):
    options = flags.Options(**vars(options) | {"rows": rows})   # a copy that knows the batch
    return SOURCES[options.source].plan(options, model, tokenizer)


# --- a run


def load(options):
    """(model, tokenizer), computed as --quant, --fast and --exact ask."""
    if processes() > 1:
        return import_module("support.processes").load(options)
    quant = None
    if options.quant:
        quant = import_module("machine.quant").KINDS[options.quant]
    dtype = cli.DTYPES.get(options.dtype)
    model, tokenizer = checkpoint.load(options.model, options.device, dtype, quant)
    if options.quant:
        import_module("machine.quant").quantise_head(model)
    if options.exact:
        model = import_module("machine.exact").exactly(model, options.fast)
    elif options.fast:
        model = import_module("machine.exact").fast(model)
    return model, tokenizer


def write(options, model, prompts, drafter, player=None):
    """What `rounds` yields, with the settings of the command line. The page's `player` records
    coins and distributions."""
    probs = partial(player.look if player else to_probs, **options.sampling())
    coins = player.coins if player else Coins(options.seed)
    if options.exact and options.temperature > 0:   # a greedy text does not depend on them
        exact = import_module("machine.exact")
        coins = exact.Race(exact.row_seeds(options.seed, len(prompts)))
    if processes() > 1:
        coins = import_module("machine.parallel").Agreed(coins)
    rule = verify
    if options.verify == "block":
        rule = import_module("methods.block").verify_block
    return rounds(model, prompts, options.max_new, drafter, probs, coins, verify=rule)


def complete(options):
    """Load, draft and verify, print. Returns the exit status."""
    for path in filter(None, (options.picture, options.page)):
        import_module("machine.files").check_writable(path)
    texts = {"the prompt": options.prompt}
    if options.prompt_file or options.prompt == "-":
        texts = import_module("support.texts").batch(options.prompt, options.prompt_file)
    model, tokenizer = load(options)
    encode = partial(checkpoint.encode, tokenizer, bos=model.c.bos)
    if options.chat:
        encode = import_module("support.chat").encoder(options.model, encode)
    prompts = [encode(text) for text in texts.values()]
    check_prompts(model, prompts, options.max_new, list(texts))
    plan = plan_of(options, model, tokenizer, len(prompts))
    start = partial(write, options, model, prompts)
    if options.fast:
        plan.rehearse(model, start)
    player = None
    if options.page:
        player = import_module("support.page").Player(tokenizer, prompts[0], options.seed)
    seen = show.Generation(tokenizer, prompts, stats.Timed(plan.make(), options.compare))
    live = len(prompts) == 1 and not options.json
    colour = show.colours(sys.stdout)
    if live and not options.chat:
        print(show.paint([(seen.prompts[0], None)]), end="", flush=True)
    for state, r in seen.watch(start(seen.timed, player)):
        if player:
            player.add(state, r)
        if live:
            print(seen.fresh(colour), end="", flush=True)
    if live:
        print(seen.fresh(colour))
    elif not options.json:
        seen.print_all(colour, options.chat)
    return report.conclude(options, model, plan, texts, seen, player, start)


def run(argv):
    options = parse(argv)
    if processes() == 1:
        return complete(options)
    with import_module("support.processes").group(options):
        return complete(options)


def main(argv=None):
    """Returns the exit status of `cli.main`, or 1 after a difference that --compare cannot
    explain."""
    return cli.main(run, argv)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
