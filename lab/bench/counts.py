"""The tensor operations of a round outside the sub-layers, and its waits for the device. Both are
counted, not timed, and the GPU is simulated (see tests/paper_gpu.py)."""
from control import Confidence
from drafter import ModelDraft
from lab.bench.shared import page, random_model, table
from lab.rules import DoNoHarm
from lab.then import Then
from layerskip import SelfDraft
from methods.lookup import NGram
from model import Config
from speculative import rounds
from tests.paper_gpu import PaperGPU

SHAPE = Config(vocab_size=64, dim=32, n_layers=3, n_heads=2, n_kv_heads=1, head_dim=16,
               hidden_dim=32)
EXIT, SKIP = range(2), [0, 1, 4]
DRAFTERS = {  # (target, small model, how many tokens to draft) -> drafter
    "plain": lambda m, small, gamma: None,
    "exit": lambda m, small, gamma: SelfDraft(m, EXIT, gamma),
    "skip": lambda m, small, gamma: SelfDraft(m, SKIP, gamma),
    "n-gram": lambda m, small, gamma: NGram(gamma, 1),
    "model": lambda m, small, gamma: ModelDraft(small, gamma),
    "exit, then n-gram of 2": lambda m, small, gamma: Then(SelfDraft(m, EXIT, gamma), NGram(2, 1)),
    "exit, do no harm": lambda m, small, gamma: SelfDraft(m, EXIT, DoNoHarm(0.05, gamma)),
    "exit, stop rule": lambda m, small, gamma: SelfDraft(m, EXIT, Confidence(0.0, gamma))}


def target(device):
    """A model whose blocks after the first add nothing, so that all drafts are right and no rule
    objects."""
    model = random_model(SHAPE)
    for b in model.blocks[1:]:
        b.attn.wo.zero_()
        b.mlp.down.zero_()
    return model.to(device)


def ignore_sublayers(gpu, model, device):
    """From now on gpu.operations counts of `run` only what it does without any sub-layer."""
    run = model.run

    def counted(x, at, cache=None, sublayers=None, trace=None):
        before = gpu.operations[device]
        y = run(x, at, cache, sublayers, trace)
        gpu.operations[device] = before
        run(x, at, cache, [], trace)
        return y

    model.run = counted


def count(gpu, device, make, gamma):
    """(operations, waits) of one round that drafts `gamma` tokens."""
    model, small = target(device), target(device)
    for m in (model, small):
        ignore_sublayers(gpu, m, device)
    steps = rounds(model, [[1, 2, 3]], 100, make(model, small, gamma), eos=())
    for _ in range(12):     # by then the text repeats itself, so that there are n-grams
        next(steps)
    operations, waits = gpu.operations[device], len(gpu.waits)
    next(steps)
    return gpu.operations[device] - operations, len(gpu.waits) - waits


def counts():
    """{drafter: what a round with 2 drafted tokens takes, and what each further one takes}."""
    found = {}
    with PaperGPU() as gpu:
        for name, make in DRAFTERS.items():
            cpu, longer_cpu = (count(gpu, "cpu", make, gamma)[0] for gamma in (2, 3))
            (cuda, waits), (longer_cuda, longer_waits) = (count(gpu, "cuda", make, gamma)
                                                          for gamma in (2, 3))
            found[name] = {"round": {"cpu": cpu, "cuda": cuda, "waits": waits},
                           "token": {"cpu": longer_cpu - cpu, "cuda": longer_cuda - cuda,
                                     "waits": longer_waits - waits}}
    return found


def run(a):
    found = counts()
    head = ["outside the sub-layers", "a round of 2 drafts: operations, CPU", "operations, GPU",
            "waits", "one draft more: operations, CPU", "operations, GPU", "waits"]
    rows = [[name, *(str(n) for part in row.values() for n in part.values())]
            for name, row in found.items()]
    return page(table(head, rows)), {"counts": found}
