"""A real public model (make smollm): what each way to draft gains over the fastest plain decoding,
on six kinds of chat.

    python -m lab.bench real --model runs/smollm --fast
    python -m lab.bench real --model runs/qwen15 --draft-model runs/qwen05 --fast

With `--fast` on a CPU a row of logits has the same bits in every block. So each greedy text must be
plain decoding's, token for token, and no second model is needed to check it. Elsewhere every method
also writes the first text of each kind in float64.
"""
import time
from functools import cache, partial
from itertools import product
from pathlib import Path

import torch

from control import expected_speedup
from drafter import ModelDraft, NGram
from files import note, read_tokenizer
from lab.bench import llamacpp
from lab.bench.drafters import Bench, Method, check_only, chosen, fixed, header, their_methods
from lab.bench.dynamic import living
from lab.bench.heads import shapes
from lab.bench.shared import load, page, tables
from lab.train_heads import ask
from layerskip import SelfDraft, early_exit
from machine.exact import fast
from machine.fused import fuse
from machine.quant import ROWS, SHARE, Int4, Matrix, byte_costs, quantise
from machine.rows import FEW, multiplies
from methods import heads
from methods.arms import candidates
from methods.pace import COPY, Pace
from methods.suffix import Suffix
from model import put
from support.drafts import fit, load_small
from support.measure import kept_costs, measure_step
from support.texts import read_texts
from verification import verify_block

PROMPTS = Path(__file__).resolve().parents[1] / "prompts"
KINDS = "chat", "summaries", "code_edits", "maths", "translation", "json"
CHAINS, NODES = (1, 2, 3), 8    # lengths of a head's drafts, tokens of its tree
ITSELF = {"int8": (3,), "int4": (3, 5)}     # lengths of the drafts of the model in few bits
SMALL = {None: (3,), "int4": (3, 5)}        # and of a small model: as it is, and in few bits
COLUMNS = {"tokens/s": "{tokens_per_second:.1f}", "ratio to plain": "{ratio:.2f}",
           "by the formula": "{predicted:.2f}", "tau": "{tau:.2f}", "alpha": "{tested:.2f}",
           "alpha by place": "{places}", "bytes": "{bytes:.2f}", "c": "{c:.3f}",
           "block": "{block:.2f}"}


def chat_ids(a, kind, tokenizer):
    """The prompts of one kind, or of a file, in the model's chat template, as ids."""
    path = PROMPTS / f"{kind}.jsonl" if kind in KINDS else Path(kind)
    if not path.is_file():
        raise ValueError(f"--prompts {kind}: neither a file nor one of {', '.join(KINDS)}")
    return ask(a.model, tokenizer, read_texts(path, "prompt", "\n")[: a.quick])


@torch.no_grad()
def dither(model):
    """Add noise to each matrix of a model, in place. It is uniform, and as wide as a step of int4.
    Then the weights lie on no grid, as before they were first quantised."""
    g = torch.Generator().manual_seed(0)
    for w in model.parameters():
        if w.dim() == 2:
            for some in w.split(ROWS):
                step = Int4(some).groups[:, 0].float().repeat_interleave(SHARE, 1)[:, : w.shape[1]]
                some += (step * (torch.rand(step.shape, generator=g) - 0.5)).to(w.dtype)


# --- ways to draft


@cache
def rough(model, kind):
    """The copy of a model in few bits, which is made when the first text needs it."""
    twin = quantise(model, kind, head=kind, rounds=True)
    if model.tok.dtype == torch.float64:    # no product has to rebuild its matrix
        for module in list(twin.modules()):
            for name, w in list(module.named_children()):
                if isinstance(w, Matrix):
                    put(module, name, torch.nn.Parameter(w.full(w.dtype), requires_grad=False))
    return model.alongside(twin)


step_cost = cache(measure_step)     # it is measured once


def itself(kind, gamma, model):
    return SelfDraft(rough(model, kind), range(2 * model.c.n_layers), gamma)


def helped(smalls, kind, gamma, model):
    small = smalls[model.tok.dtype]
    return ModelDraft(fit(rough(small, kind) if kind else small, model), gamma)


def drafting(make, gamma):
    """The Method of make(model) -> Drafter of gamma tokens."""
    return Method(lambda: lambda model, small: make(model), gamma=gamma)


def whole_models(smalls):
    """{name: Method} of drafts by the model itself in few bits, and by a small one."""
    methods = {}
    for kind, lengths in ITSELF.items():
        for g in lengths:
            methods[f"{kind}, gamma {g}"] = drafting(partial(itself, kind, g), g)
    for kind, lengths in SMALL.items() if smalls else ():
        name = f"small model in {kind}" if kind else "small model"
        for g in lengths:
            methods[f"{name}, gamma {g}"] = drafting(partial(helped, smalls, kind, g), g)
    return methods


def trained_heads(trained):
    """{name: Method}. trained: {folder: {dtype: head}}"""
    methods = {}
    for name, loaded in trained.items():
        head = next(iter(loaded.values()))
        drafts = {f"gamma {g}": (g, None) for g in CHAINS if g <= head.price.longest}
        tree = shapes(head, heads.pricing(head)(0))[f"tree of {NODES}"]
        drafts[f"tree of {NODES}"] = min(NODES, head.price.longest), tree
        for shape, (levels, parents) in drafts.items():
            methods[f"{name}, {shape}"] = drafting(
                lambda model, loaded=loaded, levels=levels, parents=parents: (
                    loaded[model.tok.dtype].drafter(levels, parents)), None if parents else levels)
    return methods


def adapting(model, trained, smalls):
    """The Method of `auto`, as generate.py has it with --draft-model and --draft-quant int4. The
    costs are those of the timed model, even where the one in float64 decodes."""
    def make(m):
        costs = kept_costs(model)
        own = None
        if multiplies(model):
            own = rough(m, "int4"), step_cost(model, rough(model, "int4"))
        small = None
        if smalls:
            few = [rough(smalls[each.tok.dtype], "int4") for each in (m, model)]
            small = fit(few[0], m), step_cost(model, few[1])
        own_heads = [loaded[m.tok.dtype] for loaded in trained.values()]
        arms = candidates(m, costs, heads=own_heads, rough=own, small=small)
        return Pace(m, arms, costs, most=FEW - 1)

    return living(make)


def ways(model, trained, smalls):
    """{name: Method}. trained: {folder: {dtype: head}}; smalls: {dtype: the small model}"""
    L = model.c.n_layers
    e = max(1, L // 6)
    methods = {"plain": Method(gamma=0)} | fixed(f"exit {e}", early_exit(L, e), 1)
    methods |= {"n-gram": drafting(lambda model: NGram(COPY, 3), None),
                "suffix": drafting(lambda model: Suffix(COPY), None)}
    return methods | whole_models(smalls) | trained_heads(trained) | {
        "auto": adapting(model, trained, smalls)}


# --- the table


def promise(model, m, r):
    """A row of the table. For drafts of fixed length it gets the bytes that a drafted token reads,
    relative to a plain pass, and the gain that alpha, c and the block promise."""
    if m and m.gamma and "c" in r:      # m: None of others' decoding
        r["predicted"] = expected_speedup(r["tested"], m.gamma, r["c"], r["block"])
        drafter = m.start()(model, None)
        if isinstance(drafter, SelfDraft | ModelDraft):
            costs = byte_costs(drafter.model)
            subs = drafter.sublayers or range(2 * drafter.model.c.n_layers)
            r["bytes"] = costs.step(subs) * costs.whole / byte_costs(model).whole
    return r


def opened(a, tokenizer):
    """({dtype: (model, None)}, {dtype: small model}): as timed, and also in float64 if a row of
    logits depends on its block."""
    models = {}
    smalls = {}
    for dtype in (a.dtype, "float64"):
        m = load(a, dtype)[0]
        if a.dither:
            dither(m)
        if dtype == a.dtype:
            m = fuse(m)
            m = fast(m) if a.fast else m
        models[dtype] = m, None
        if a.draft_model:
            smalls[m.tok.dtype] = load_small(a.draft_model, m, tokenizer)
        if m.replays() and not m.tok.is_cuda:
            break
    return models, smalls


def run_real(a):
    llamas = {}
    if any("llama.cpp" in word for word in a.only or ()):
        llamas = llamacpp.opened(2048, a.gguf)
    began = time.perf_counter()
    results = {}
    tokenizer = read_tokenizer(Path(a.model))
    prompts = {kind: chat_ids(a, kind, tokenizer) for kind in a.prompts or KINDS}
    models, smalls = opened(a, tokenizer)
    model = models[a.dtype][0]
    where = Path(a.heads or f"{a.model}/heads")
    trained = {}
    for file in sorted(where.glob(f"*/{heads.FILE}")):
        trained[file.parent.name] = {
            m.tok.dtype: heads.load(file.parent, m) for m, _ in models.values()}
    for T, kind in product((0.0, 0.8), prompts):
        methods = ways(model, trained, smalls)
        flags = {"temperature": T} if T else {}
        bench = Bench(models, prompts[kind], flags, a.new, a.repeats or 1, judge=verify_block,
                      warm=not results)
        theirs = {}
        if a.only and not T:
            theirs = their_methods(a, bench, max(1, model.c.n_layers // 6))
            theirs |= llamacpp.ways(llamas, model.c, a.new)
            check_only(a.only, methods | theirs)
        rows = bench.table(chosen(methods | theirs, a.only), (), kind, checked=[0])
        title = f"{Path(kind).stem}, T {T:g}"
        results[title] = {name: promise(model, methods.get(name), r) for name, r in rows.items()}
        found = ", ".join(f"{name} {r['ratio']:.2f}" for name, r in rows.items())
        note("real", f"{title}, after {time.perf_counter() - began:.0f} s: {found}")
    lines = header(a, a.repeats or 1, checked="to the bit" if len(models) == 1 else (
        "in float64 on the first prompt of each kind"))
    if a.dither:
        lines += ["The target's weights got noise as wide as a step of int4.", ""]
    lines += tables(results, COLUMNS)
    return page(lines + llamacpp.blocks(llamas)), {"results": results}
