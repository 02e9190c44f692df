"""A real public model (make smollm): what each way to draft gains over the fastest plain decoding, on five
kinds of chat."""
from itertools import product
from pathlib import Path

from control import expected_speedup, weight_costs
from drafter import Drafter, NGram
from lab.bench import llamacpp
from lab.bench.drafters import Bench, Method, check_only, chosen, fixed, header, their_methods
from lab.bench.dynamic import living
from lab.bench.heads import shapes
from lab.bench.shared import forecast, load, page, tables
from lab.train_heads import ask
from layerskip import SelfDraft, early_exit, without
from machine.exact import fast
from machine.fused import fuse
from machine.quant import quantise, rebuild
from machine.rows import multiplies
from methods import heads
from methods.arms import candidates
from methods.pace import COPY, Pace
from methods.suffix import Suffix
from search import Teacher
from support.measure import kept_costs, measure_step
from support.texts import read_texts
from verification import verify_block

PROMPTS = Path(__file__).resolve().parents[1] / "prompts"
KINDS = "chat", "summaries", "code_edits", "maths", "translation"
CHAINS, NODES = (1, 2, 3), 8    # lengths of a head's drafts, tokens of its tree
FEW_BITS = 3, 5                 # lengths of drafts in few bits
COLUMNS = {"tokens/s": "{tokens_per_second:.1f}", "ratio to plain": "{ratio:.2f}",
           "by the formula": "{predicted:.2f}", "tau": "{tau:.2f}", "alpha": "{tested:.2f}",
           "alpha by place": "{places}", "c": "{c:.3f}", "block": "{block:.2f}"}
PROMISES = {"alpha": "{alpha:.2f}", "c by weights": "{c:.2f}", "best gamma": "{gamma}",
            "promised": "{gain:.2f}"}


def chat_ids(a, kind, tokenizer):
    """The prompts of one kind in the model's chat template, as ids."""
    return ask(a.model, tokenizer, read_texts(PROMPTS / f"{kind}.jsonl", "prompt", "\n")[: a.quick])


def untrained(bench):
    """{draft: what the formula promises of it} of exits, and of leaving out every fourth MLP, on what the
    model itself writes."""
    L, costs, found = bench.model.c.n_layers, weight_costs(bench.model.c), {}
    drafts = {f"exit {e}": early_exit(L, e) for e in sorted({max(1, L * i // 8) for i in (1, 2, 4, 6)})}
    drafts["every fourth MLP left out"] = without(L, (), range(2, L, 4))
    written = [bench.write(lambda model, small: Drafter(), i).ids for i in range(len(bench.prompts))]
    texts = [(Teacher(bench.model, ids + new), len(ids) - 1)
             for ids, new in zip(bench.prompts, written, strict=True)]
    for name, subs in drafts.items():
        c = costs.step(subs)
        alpha, gamma, gain = forecast([t.acceptance(subs)[n:] for t, n in texts], c)
        found[name] = {"alpha": alpha, "c": c, "gamma": gamma, "gain": gain}
    return found


def ways(a, model, trained, twins):
    """{name: Method}. trained: {folder: {dtype: head}}; twins: {kind: {dtype: the model in few bits}}."""
    L, e, costs = model.c.n_layers, max(1, model.c.n_layers // 6), kept_costs(model)
    methods = {"plain": Method(gamma=0)} | fixed(f"exit {e}", early_exit(L, e), 1)
    methods |= {"n-gram": Method(lambda: lambda model, small: NGram(COPY, 3)),
                "suffix": Method(lambda: lambda model, small: Suffix(COPY))}
    for kind, made in twins.items():
        for g in FEW_BITS:
            methods[f"{kind}, gamma {g}"] = Method(lambda made=made, g=g: (
                lambda model, small: SelfDraft(made[model.tok.dtype], range(2 * L), g)), gamma=g)
    for name, loaded in trained.items():
        head = next(iter(loaded.values()))
        drafts = {f"gamma {g}": (g, None) for g in CHAINS if g <= head.price.longest}
        tree = shapes(head, heads.pricing(head)(0))[f"tree of {NODES}"]
        drafts[f"tree of {NODES}"] = min(NODES, head.price.longest), tree
        for shape, (levels, parents) in drafts.items():
            methods[f"{name}, {shape}"] = Method(lambda loaded=loaded, levels=levels, parents=parents: (
                lambda model, small: loaded[model.tok.dtype].drafter(levels, parents)),
                gamma=None if parents else levels)
    c = multiplies(model) and measure_step(model, twins["int4"][model.tok.dtype])
    methods["auto"] = living(lambda model: Pace(model, candidates(
        model, costs, heads=[loaded[model.tok.dtype] for loaded in trained.values()],
        rough=(twins["int4"][model.tok.dtype], c) if c else None), costs))
    return methods


def promise(m, r):
    """A row of the table, and of a chain of fixed length what alpha, c and its block promise."""
    if m and m.gamma and "c" in r:      # m: None of transformers
        r["predicted"] = expected_speedup(r["tested"], m.gamma, r["c"], r["block"])
    return r


def run_real(a):
    llamas = llamacpp.opened(2048) if any("llama.cpp" in word for word in a.only or ()) else {}
    models, results, promised, (_, tokenizer) = {}, {}, {}, load(a)
    twins = {kind: {} for kind in ("int8", "int4")}
    for dtype in (a.dtype, "float64"):
        m = load(a, dtype)[0]
        made = {kind: quantise(m, kind, head=kind, rounds=True) for kind in twins}
        if dtype != "float64":
            m = fast(fuse(m)) if a.fast else fuse(m)
        m = m
        models[dtype] = m, None
        for kind, twin in made.items():
            if dtype == "float64":
                rebuild(twin)
            twins[kind][m.tok.dtype] = m.alongside(twin)
    model, where = models[a.dtype][0], Path(a.heads or f"{a.model}/heads")
    trained = {file.parent.name: {m.tok.dtype: heads.load(file.parent, m) for m, _ in models.values()}
               for file in sorted(where.glob(f"*/{heads.FILE}"))}
    for T, kind in product((0.0, 0.8), a.prompts or KINDS):
        methods, theirs = ways(a, model, trained, twins), {}
        bench = Bench(models, chat_ids(a, kind, tokenizer), {"temperature": T} if T else {}, a.new,
                      a.repeats or 1, judge=verify_block)
        if not T:
            theirs = their_methods(a, bench, max(1, model.c.n_layers // 6))
            theirs |= llamacpp.ways(llamas, model.c, a.new)
            check_only(a.only, methods | theirs)
            promised[kind] = untrained(bench)
        rows = bench.table(chosen(methods | theirs, a.only), (), kind, checked=[0])
        results[f"{kind}, T {T:g}"] = {name: promise(methods.get(name), r) for name, r in rows.items()}
    lines = header(a, a.repeats or 1, " on the first prompt of each kind")
    lines += ["What the formula promises of drafts without training, by weights:", "",
              *tables(promised, PROMISES), *tables(results, COLUMNS)]
    return page(lines + llamacpp.blocks(llamas)), {"results": results, "promised": promised}
