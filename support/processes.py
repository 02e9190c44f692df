"""generate.py in several processes, as torchrun starts them: which flags cannot be split, and the
part of the model that each of them loads."""
import checkpoint
from machine import parallel
from machine.quant import KINDS
from methods.heads import KINDS as HEADS
from model import Refused
from support import cli
from support.flags import names_a_file


def group(options):
    """The context in which the processes run. Raises Refused for what needs one process."""
    for flag in ("fast", "exact"):
        if vars(options)[flag]:
            raise Refused(f"--{flag} works in one process, not in several")
    file = options.prompt_file
    if options.prompt == "-" or file and file.exists() and not file.is_file():
        raise Refused("only one process can read standard input or a pipe: give a prompt or a file")
    if options.source in ("heads", *HEADS):
        raise Refused("trained heads read whole matrices of the model, and several processes hold "
                      "only parts of them: run one process, or choose another --draft")
    for text in filter(names_a_file, (options.draft, options.rule)):
        raise Refused(f"several processes might each draft something else with {text}: run one "
                      "process, or choose another --draft")
    return parallel.together()


def load(options):
    """This process's part of the model, united with the others."""
    dtype = cli.DTYPES.get(options.dtype)
    model, tokenizer = checkpoint.load(
        options.model, options.device, dtype, KINDS.get(options.quant), parallel.here())
    return parallel.unite(model), tokenizer
