"""What every method gains on four kinds of text, compared with transformers."""
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial

import torch
from tqdm import tqdm

import control
from control import expected_tokens_along, round_cost, weight_costs
from drafter import Drafter, ModelDraft, NGram
from lab.bench.plain import their_text
from lab.bench.shared import SETS, beside, forecast, load_both, page, prompt_ids, tables
from lab.rules import DoNoHarm, Gate
from layerskip import SelfDraft, early_exit, without
from methods.pace import COPY
from methods.standin import ShortHead, read_vocab
from methods.suffix import Suffix
from methods.then import Then
from sampling import Coins, to_probs
from search import Teacher
from speculative import rounds
from support.cli import read_skip
from support.measure import measure_costs
from support.stats import Timed, parting
from verification import verify

GAMMAS = 1, 2, 3, 4, 6
SHORT = 8       # tokens that a method writes to warm up
# the first of these methods that a head has reads its matrices
READS = "spread", "after", "rise", "join"
COLUMNS = {"tokens/s": "{tokens_per_second:.0f}", "ratio to plain": "{ratio:.2f}",
           "predicted": "{predicted:.2f}", "by weights": "{by_weights:.2f}", "tau": "{tau:.2f}",
           "alpha": "{alpha:.2f}", "c": "{c:.3f}", "block": "{block:.2f}"}


@dataclass
class Sample:
    """One prompt continued once. `decode` counts seconds after the prompt was read."""
    ids: list
    decode: float
    rounds: list = field(default_factory=list)      # (accepted, proposed)
    drafting: float = 0.0   # of these seconds
    # weights, in passes of the target over one token; over a block they count once
    read: float = 0.0

    @property
    def proposed(self):
        return sum(proposed for _, proposed in self.rounds)


@dataclass
class Method:
    """A way to decode. start() gives make(model, small), which gives a fresh drafter for each
    prompt. What a rule learns lasts from one start to the next. A method with ask(ids) has
    transformers write instead."""
    start: Callable = lambda: lambda model, small: Drafter()
    ask: Callable | None = None
    sublayers: list | None = None                  # of a self-draft
    gamma: int | None = None                       # of a fixed draft, to which the formula applies
    vocab: list | None = None                      # what it drafts with, if not with all tokens
    facts: dict = field(default_factory=dict)      # what is known before it is measured
    samples: dict = field(default_factory=dict)    # prompt -> [Sample], without the warm-up


class Bench:
    """Some prompts and one way of sampling, with models[dtype] = (target, small model or None),
    first the timed ones, last those in float64, which are left out if a row of logits has the same
    bits in every block. heads: those that draft for the timed target. warm: whether each method
    first writes a short text."""

    def __init__(self, models, prompts, flags, new, repeats, heads=(), judge=verify, warm=True):
        self.models = [*models.values()]
        self.prompts = prompts
        self.heads = heads
        self.judge = judge
        self.model, self.small = self.models[0]
        self.greedy, self.probs = not flags, partial(to_probs, **flags)
        self.new, self.repeats, self.costs = new, repeats, weight_costs(self.model.c)
        self.warm = warm

    def steps(self, i, drafter, model, new=None):
        return rounds(model, [self.prompts[i]], new or self.new, drafter, self.probs, Coins(i),
                      model.c.eos, verify=self.judge)

    def write(self, make, i, new=None):
        """Prompt i, timed and metered. `new` tells how many tokens, if not as many as usual."""
        s = Sample([], 0.0)
        with metered([m for m in (self.model, self.small) if m], self.heads) as spent:
            timed = Writing(make(self.model, self.small), spent)
            for _, r in self.steps(i, timed, self.model, new):
                s.ids += r.new[0]
                s.rounds.append((int(r.accepted[0]), int(r.proposed[0])))
        s.decode, s.drafting = sum(timed.seconds.values()), timed.seconds["draft"]
        s.read = sum(spent) / self.costs.whole
        return s

    def check_texts(self, methods, prompts):
        """Raises RuntimeError where a greedy text of ours, in float64, is not that of plain
        decoding. That is a bug, and its speed would mean nothing."""
        makers = {name: m.start() for name, m in methods.items() if not m.ask}
        model, small = self.models[-1]
        for i in prompts:
            texts = {}
            for name, make in makers.items():
                steps = self.steps(i, make(model, small), model)
                texts[name] = [token for _, r in steps for token in r.new[0]]
                if texts[name] != texts["plain"]:       # which comes first
                    raise RuntimeError(f"{name} differs from plain decoding in float64 on prompt "
                                       f"{i}")

    def run(self, methods, title):
        """All methods on each prompt, one after another, again and again, after a warm-up."""
        for m in methods.values() if self.warm else ():
            if m.ask:
                m.ask(self.prompts[0])
            else:
                self.write(m.start(), 0, SHORT)
        for _ in range(self.repeats):
            makers = {name: m.start() for name, m in methods.items()}
            for i in tqdm(range(len(self.prompts)), title, disable=None):
                for name, m in methods.items():
                    sample = m.ask(self.prompts[i]) if m.ask else self.write(makers[name], i)
                    m.samples.setdefault(i, []).append(sample)

    def table(self, methods, texts, title, checked=None):
        """{method: row}, with "parted": where greedy texts part from plain decoding in the timed
        dtype. texts: see `pilot`; checked: prompts whose texts are compared in
        float64, by default all."""
        prompts = checked or range(len(self.prompts))
        if self.greedy and len(self.models) > 1:
            self.check_texts(methods, prompts)
        # what a GPU has not recorded by then is eager
        ours = [m for m in methods.values() if not m.ask]
        self.model.rehearse(lambda: [
            self.write(make, i) for make in [m.start() for m in ours] for i in prompts])
        self.run(methods, title)
        plain = methods["plain"]
        parted = {name: self.parted(m, plain) for name, m in methods.items()}
        for name, m in methods.items():
            if parted[name] and not m.ask and len(self.models) == 1:
                raise RuntimeError(f"{name} differs from plain decoding, though a row of logits "
                                   f"has the same bits in every block: {parted[name]}")
        return {name: row(m, plain, texts) | m.facts | {"parted": parted[name]}
                for name, m in methods.items()}

    def parted(self, m, plain):
        both = [(i, runs[0].ids, plain.samples[i][0].ids) for i, runs in m.samples.items()]
        return [{"prompt": i, **parting(self.model, self.prompts[i], ours, theirs)}
                for i, ours, theirs in both if self.greedy and ours != theirs]


class Writing(Timed):
    """A timed drafter. Of what was read, `spent`, it drops what reading the prompt took."""

    def __init__(self, drafter, spent):
        super().__init__(drafter)
        self.spent = spent

    def begin(self, state, trace):
        super().begin(state, trace)
        self.spent.clear()


@contextmanager
def metered(models, heads=()):
    """Within it the list that it yields gets the weights that each call reads, as `weight_costs`
    counts them; with the matrices of trained heads."""
    spent, patched = [], []

    def watch(thing, name, weights):
        act = getattr(thing, name)

        def acted(*args, **kwargs):
            spent.append(weights(*args, **kwargs))
            return act(*args, **kwargs)

        setattr(thing, name, acted)
        patched.append((thing, name))

    for model in (*models, *(head.own for head in heads if head.own)):
        costs, V, every = weight_costs(model.c), model.c.vocab_size, range(2 * model.c.n_layers)
        watch(model, "run",
              lambda x, at, cache=None, sublayers=None, *_, costs=costs, every=every, **__: sum(
            costs.sublayers[i] for i in (every if sublayers is None else sublayers)))
        watch(model, "unembed", lambda x, only=None, costs=costs, V=V: (
            costs.head if only is None else costs.head * len(only) / V))
    for head in heads:  # the output heads of a Medusa are counted where the model is told of them
        name = next((name for name in READS if name in vars(type(head))), None)
        if name:
            # of an Eagle this is a row of its matrix
            one = next(head.weights.parameters())[0].numel()
            own = {"spread": one * getattr(head, "steps", 1), "after": one, "rise": head.count(),
                   "join": one * head.model.c.dim}[name]
            watch(head, name, lambda *_, own=own: own)
    try:
        yield spent
    finally:
        for thing, name in patched:
            delattr(thing, name)


# --- the methods


def fixed(name, sublayers, gamma, vocab=None):
    """{name: Method} of a self-draft that always drafts gamma tokens."""
    method = ruled(sublayers, lambda: gamma, vocab=vocab)
    return {f"{name}, gamma {gamma}": replace(method, gamma=gamma)}


def ruled(sublayers, new_rule, tail=False, vocab=None):
    """The Method of a self-draft under a rule, which is made once for each run through the prompts;
    with `tail`, an n-gram goes on where the draft ends; with `vocab`, the draft
    has only these tokens."""

    def start():
        rule, short = new_rule(), cache(lambda model: ShortHead(model, vocab) if vocab else model)

        def make(model, small):
            drafter = SelfDraft(short(model), sublayers, rule)
            return Then(drafter, NGram(COPY, 3)) if tail else drafter

        return make

    return Method(start, None, sublayers, vocab=vocab)


def own_methods(L, exits, skip, cost, vocab=None):
    """{name: Method} of what this library offers. exits: [(exit layer, its best gamma)], the best
    one first; cost: {exit layer or "bad": of a drafted token}; vocab: the ids
    of a draft vocabulary."""
    (e, g), bad = exits[0], without(L, range(L), ())
    best, methods = early_exit(L, e), {"plain": Method(gamma=0)}
    no_harm = partial(DoNoHarm, cost[e])
    for gamma in sorted({*GAMMAS, g}):
        methods |= fixed(f"exit {e}", best, gamma)
    for other, gamma in exits[1:]:
        methods |= fixed(f"exit {other}", early_exit(L, other), gamma)
    for gamma in (2, 4) if skip else ():
        methods |= fixed("skip set", skip, gamma)
    methods |= {"n-gram": Method(lambda: lambda model, small: NGram(COPY, 3)),
                "suffix": Method(lambda: lambda model, small: Suffix(COPY)),
                "n-gram tail": ruled(best, lambda: g, tail=True),
                "do no harm": ruled(best, no_harm),
                "do no harm, n-gram tail": ruled(best, no_harm, tail=True),
                "do no harm, a bad skip set": ruled(bad, lambda: DoNoHarm(cost["bad"])),
                "confidence 0.4": ruled(best, lambda: control.Confidence(0.4)),
                "target gate 0.5": ruled(best, lambda: Gate(g)),
                "draft model, gamma 3": Method(lambda: lambda model, small: ModelDraft(small, 3))}
    if vocab:
        for gamma in sorted({g, g + 1}):
            methods |= fixed(f"exit {e}, draft vocabulary", best, gamma, vocab)
        methods["do no harm, n-gram tail, draft vocabulary"] = ruled(best, no_harm, tail=True,
                                                                     vocab=vocab)
    return methods


def check_only(words, names):
    """Raises ValueError for a word of --only that stands in none of these names."""
    for word in words or ():
        if not any(word in name for name in names):
            raise ValueError(f"--only {word!r}: no way to draft has that in its name; here are "
                             f"{', '.join(names)}")


def chosen(methods, words):
    """Those of the methods that --only names, and plain decoding."""
    return {name: m for name, m in methods.items()
            if not words or name == "plain" or any(word in name for word in words)}


def their_methods(a, bench, exit_layer, helper=None):
    """{name: Method} of transformers, on the same weights, with its own defaults."""
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    sampling = bench.probs.keywords

    @cache
    def opened(folder):
        return AutoModelForCausalLM.from_pretrained(folder,
                                                    dtype=getattr(torch, a.dtype)).to(a.device)

    def ask(flags, ids):
        model = opened(a.model)
        if "assistant_model" in flags:
            flags = flags | {"assistant_model": opened(helper)}
        tokens = torch.tensor([ids], device=a.device)
        start = time.perf_counter()
        with torch.no_grad():
            # waits for a GPU
            model(tokens, use_cache=True, logits_to_keep=1).logits.argmax().item()
        prefill, start = time.perf_counter() - start, time.perf_counter()
        torch.manual_seed(0)
        text = their_text(model, tokens, a.new, **flags)[0].tolist()
        return Sample(text, time.perf_counter() - start - prefill)

    sampling = {"do_sample": True, "top_k": 0, **sampling} if sampling else {}
    flags = {"plain": {}, "prompt lookup": {"prompt_lookup_num_tokens": COPY},
             "assistant_early_exit": {"assistant_early_exit": exit_layer}}
    if helper:
        flags["assistant_model"] = {"assistant_model": helper}
    return {f"transformers, {name}": Method(ask=partial(ask, sampling | f))
            for name, f in flags.items()}


def pilot(bench, L):
    """Before the methods are chosen: (texts to score drafts on, what plain decoding writes, as
    [(Teacher, unscored)]; {exit or "bad": the cost of a drafted token}; [(exit, the gamma that
    promises most)], the best exit first)."""
    drafts = {e: early_exit(L, e) for e in range(1, max(1, L // 3) + 1)}
    drafts["bad"] = without(L, range(L), ())
    texts = []
    for i, ids in enumerate(bench.prompts):
        written = bench.write(lambda model, small: Drafter(), i).ids
        texts.append((Teacher(bench.model, ids + written, bench.probs), len(ids) - 1))
    costs, found = measure_costs(bench.model), []
    cost = {name: costs.step(subs) for name, subs in drafts.items()}
    for e in range(1, len(drafts)):
        series = [t.acceptance(drafts[e])[unscored:] for t, unscored in texts]
        _, gamma, gain = forecast(series, cost[e], costs.pass_cost)
        found.append((gain, e, max(1, gamma)))
    return texts, cost, [(e, gamma) for _, e, gamma in sorted(found, reverse=True)]


# --- what is reported


def rate(runs):
    return statistics.median(len(s.ids) / s.decode for s in runs)


def row(m, plain, texts):
    """What is reported of a method, as a dict. The ratio, and what is predicted, is a geometric
    mean over the prompts, so that the quotient of two rows is a paired ratio, too; c and block are
    of all prompts."""
    samples = [s for runs in m.samples.values() for s in runs]
    paired = [rate(runs) / rate(plain.samples[i]) for i, runs in m.samples.items()]
    r = {"tokens_per_second": rate(samples),
         "ratio": statistics.geometric_mean(paired), "ratios": paired}  # one per prompt
    return r if m.ask else r | drafting(m, samples, plain, texts)


def taken(samples, plain):
    """(what a drafted token takes, what a round takes beside its drafts), relative
    to a plain round."""
    one = sum(s.decode for s in plain) / sum(len(s.rounds) for s in plain)
    drafts, proposed = sum(s.drafting for s in samples), sum(s.proposed for s in samples)
    rest = sum(s.decode for s in samples) - drafts
    return drafts / proposed / one, rest / sum(len(s.rounds) for s in samples) / one


def drafting(m, samples, plain, texts):
    """The part of `row` that only our own methods have."""
    rounds = sum((s.rounds for s in samples), [])
    tokens = sum(len(s.ids) for s in samples)
    r = {"tau": tokens / len(rounds), "by_weights": tokens / sum(s.read for s in samples)}
    drafted = [accepted for accepted, proposed in rounds if proposed]
    if drafted:
        # how often the first token was accepted
        r["first"] = sum(map(bool, drafted)) / len(drafted)
        tested = [sum(min(n, k + 1) > i for k, n in rounds)
                  for i in range(max(n for _, n in rounds))]
        kept = [sum(k > i for k, _ in rounds) for i in range(len(tested))]
        # alpha of the tokens that were tested; and by their place
        r["tested"] = sum(kept) / sum(tested)
        r["places"] = " / ".join(f"{k / n:.2f}" for k, n in zip(kept, tested, strict=True) if n)
        r["c"], r["block"] = taken(samples, sum(plain.samples.values(), []))
    if m.sublayers and texts:
        series = [t.acceptance(m.sublayers, m.vocab and ShortHead(t.model, m.vocab))[unscored:]
                  for t, unscored in texts]
        r["alpha"] = float(torch.cat(series).mean())
        promised = [expected_tokens_along([a], m.gamma)
                    / round_cost(m.gamma, *taken(runs, plain.samples[i]))
                    for a, (i, runs) in zip(series, m.samples.items(), strict=True)
                    if m.gamma and len(a) >= m.gamma and runs[0].proposed]
        if promised:  # else nothing is predicted, but what was measured is not lost
            r["predicted"] = statistics.geometric_mean(promised)
    return r


def header(a, repeats, checked="in float64"):
    """The lines above a table. `checked` tells how our greedy texts were
    compared with plain decoding's."""
    return [f"{a.model}, {a.dtype}; {a.machine}; torch {torch.__version__}; batch 1, up to {a.new} "
            f"new tokens after each prompt, {repeats} interleaved runs: medians, of ratios the "
            "geometric mean over the prompts; every greedy text of ours is that of plain decoding "
            f"{checked}", ""]


def markdown(a, repeats, results):
    lines = header(a, repeats) + tables(results, COLUMNS)
    found = [(title, name, n) for title, rows in results.items() for name, r in rows.items()
             for n in r["parted"]]
    for title, name, n in found:
        why = (f"{a.dtype} rounds a block otherwise" if n["near_tie"]
               else "WHICH ROUNDING DOES NOT EXPLAIN")
        lines.append(f"- {title}, prompt {n['prompt']}, {name}: other than plain decoding from new "
                     f"token {n['position']} on, where the logits lie {n['gap']:.3g} apart, {why}")
    return page(lines)


def column(a, bench, skip, vocab, title):
    """One table, see `Bench.table`."""
    L = bench.model.c.n_layers
    texts, cost, exits = pilot(bench, L)
    methods = own_methods(L, exits[:3], skip, cost, vocab)
    methods |= their_methods(a, bench, exits[0][0], a.draft_model)
    check_only(a.only, methods)
    return bench.table(chosen(methods, a.only), texts, title)


def run(a):
    repeats, (models, tokenizer) = a.repeats or 2, load_both(a, a.draft_model)
    c = models[a.dtype][0].c
    skip = beside(a, "skip", a.skip, read_skip, c.n_layers)      # search.py wrote both
    vocab = beside(a, "draft_vocab", a.draft_vocab, read_vocab, c.vocab_size)
    tasks = [(name, {}) for name in SETS] + [("stories", {"temperature": 0.8, "top_p": 0.95})]
    results = {}
    for name, flags in (task for task in tasks if task[0] in (a.prompts or SETS)):
        title = f"{name}, {'T 0.8, top-p 0.95' if flags else 'greedy'}"
        prompts = prompt_ids(name, tokenizer, c)[: a.quick]
        bench = Bench(models, prompts, flags, a.new, repeats)
        results[title] = column(a, bench, skip, vocab, title)
    return markdown(a, repeats, results), {"results": results}
