"""`--draft auto`: a Pace over the usual candidates, and over what is named or lies beside the
weights. What measures is imported only where something is measured."""
import time
from functools import partial
from importlib import import_module
from pathlib import Path

from checkpoint import encode
from control import MOST
from machine.files import read_beside
from methods import heads
from methods.arms import candidates, promised
from methods.costs import LARGE, by_bytes, size
from methods.pace import Pace
from methods.standin import VOCAB, read_vocab
from sampling import to_probs
from support.flags import Plan, processes


def auto(options, model, tokenizer):
    folder = options.model
    alone = processes() == 1
    vocab = named_or_beside(
        options.draft_vocab, folder / VOCAB, read_vocab, model.c.vocab_size)
    trained = []
    # heads fit only the weights that they lie beside; a skip set that is named takes their place
    if alone and not options.quant and options.skip is None:
        trained = trained_beside(folder, model)
    skip = None
    if not trained:
        read_skip = import_module("support.skips").read_skip
        skip = named_or_beside(options.skip, folder / "skip.json", read_skip, model.c.n_layers)
    # trap: several processes would measure different costs, and so draft different tokens. With
    # other costs a draft also spends other random numbers, so the same seed writes another text
    large = size(model.blocks) >= LARGE or model.tok.is_cuda    # bytes do not tell a GPU's time
    same = options.temperature == 0 or options.exact    # another draft, the same text
    measured = alone and (options.fast or large and same)
    machine = by_bytes(model)
    unit = machine.unit
    rough = None
    if measured and large and import_module("machine.rows").multiplies(model):
        drafts = import_module("support.drafts")
        twin = model.alongside(drafts.copy_of(model, "int4", tokenizer))
        rough = twin, by_bytes(twin).unit / unit
    small = None
    if options.draft_model is not None:
        drafts = import_module("support.drafts")
        other = drafts.load_small(options, options.draft_model, model, tokenizer)
        other = drafts.padded(other, model)
        small = other, by_bytes(other).unit / unit
    table = {}
    clock = None
    about = ", with costs counted in bytes"

    def arms():
        found = candidates(model, machine, skip, vocab, trained, rough, small)
        if not table:
            return found
        found = [measure.as_measured(arm, table[arm.name]) for arm in found]
        # exits are worth nearly the same, and to choose among all of them takes long
        exits = [arm for arm in found if arm.name.startswith("exit ")]
        worse = sorted(exits, key=partial(promised, machine=machine))[:-1]
        return [arm for arm in found if arm not in worse]

    if measured:
        about = ", with costs as measured here"
        clock = time.perf_counter
        measure = import_module("support.measure")
        settings = options.sampling()
        probs = partial(to_probs, **settings)
        texts = [encode(tokenizer, text, model.c.bos) for text in measure.OPENINGS]
        machine, table = measure.kept_costs(
            model, arms(), texts, probs, options.rows, tuple(settings.items()))

    def build(longest):
        return Pace(model, arms(), machine, longest, clock)

    def parts():
        return [arm.alone(min(2, arm.longest)) for arm in arms()]

    return Plan(options, build, options.length(MOST), about, parts=parts)


def named_or_beside(path, beside, read, size):
    """read(path, size), by default of the file beside the weights, or None if there is none."""
    if path is not None:
        return read(path, size)
    return read_beside(beside, read, size)


def trained_beside(folder, model):
    """The trained heads beside the weights, in heads/KIND. Heads of another shape are left out."""
    files = (Path(folder) / "heads" / kind / heads.FILE for kind in heads.KINDS)
    found = [read_beside(file, lambda file: heads.load(file.parent, model)) for file in files]
    return [head for head in found if head]
