"""`--draft auto`: a Pace over the usual candidates, and over what is named or lies beside the
weights."""
from pathlib import Path

from control import MOST
from machine.quant import byte_costs, size
from machine.standin import alongside
from methods import heads
from methods.arms import candidates
from methods.pace import Pace
from methods.standin import VOCAB, read_vocab
from support.files import read_beside
from support.flags import Plan, processes
from support.skips import read_skip

MEASURED = 64e6     # bytes of a model's blocks from which on its costs are measured


def auto(options, model, tokenizer):
    folder = options.model
    alone = processes() == 1
    skip = named_or_beside(options.skip, folder / "skip.json", read_skip, model.c.n_layers)
    vocab = named_or_beside(
        options.draft_vocab, folder / VOCAB, read_vocab, model.c.vocab_size)
    found = []
    # heads fit only the weights that they lie beside; a skip set that is named takes their place
    if alone and not options.quant and options.skip is None:
        found = trained_beside(folder, model)
    # trap: several processes would measure different costs, and so draft different tokens. With
    # other costs a draft also spends other random numbers, so the same seed writes another text
    large = size(model.blocks) >= MEASURED or model.tok.is_cuda  # a GPU waits not only for bytes
    measured = alone and large and (options.fast or options.temperature == 0)
    rough = None
    if measured:
        from machine import rows
        from support import drafts, measure

        costs = measure.kept_costs(model)
        about = ", with costs as measured here"
        if rows.multiplies(model):
            twin = alongside(model, drafts.copy_of(model, "int4", tokenizer))
            rough = twin, measure.measure_step(model, twin)
    else:
        costs = byte_costs(model)
        about = ", with costs counted in bytes"
    small = None
    if options.draft_model is not None:
        from support import drafts

        other = drafts.load_small(options, options.draft_model, model, tokenizer)
        other = drafts.padded(other, model)
        if measured:
            c = measure.measure_step(model, other)
        else:
            c = byte_costs(other).whole / byte_costs(model).whole
        small = other, c

    def arms():
        return candidates(model, costs, skip, vocab, found, rough, small)

    table = {}
    if measured and model.tok.is_cuda:      # there a step is not the sum of its parts
        table = measure.measure_arms(model, arms(), costs)

    def build(most):
        known = arms()
        if table:
            known = [measure.priced(arm, table[arm.name]) for arm in known]
        return Pace(model, known, costs, most)

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
