"""Small heads that the benchmark trains itself, all on the same text and for the same time: where Hidden
Transfer should begin, and the prophet beside early exit, extra block and recycling.

The one thing to remember: these heads are trained for a minute or so, and are worth less than those that
lab/train_heads.py makes; but they differ in one thing only, and so they can be compared.
"""
import time

from tqdm import tqdm

from lab import corpus, train_heads
from lab.bench.shared import Noting, by_position, load, prompt_ids, steps, table
from layerskip import SelfDraft, early_exit
from methods import heads
from methods.heads import AHEAD, Eagle, ExitBlock, Prophet, Transfer
from speculative import rounds

STEPS = 3   # of a Transfer


# --- training


def train(head, flags, text):
    """Train a head for flags.minutes, and return what `train_heads.evaluate` says of it, and from how many
    tokens it has learnt, "trained"."""
    device = head.model.tok.device
    run = train_heads.Run(flags, head.model, text, device, head)
    while run.progress() < 1:
        start = time.perf_counter()
        run.train_step()
        run.seconds += time.perf_counter() - start
    told = train_heads.evaluate(head, text.valid[train_heads.OWN], flags.context, train_heads.MEASURED)
    return told | {"trained": run.step * flags.batch * flags.context}


def prepare(a, model, tokenizer, count):
    """(flags of lab/train_heads.py, the text) for `count` heads that share the minutes."""
    context = min(64 if a.quick else 256, model.c.max_len)
    flags = train_heads.parse(["transfer", "--model", str(a.model), "--out", "-", "--tokens", "1e12",
                               "--batch", "2" if a.quick else "4", "--context", str(context),
                               "--warmup", "5"])
    minutes = a.minutes if a.minutes is not None else 0.1 if a.quick else 8.0
    flags.minutes = minutes / count
    written = train_heads.write_text(model, 600 if a.quick else 5e4, 0, context, flags.temperature)
    return flags, corpus.split({train_heads.OWN: written}, {}, [1.0], tokenizer, context)


def drafted(model, prompts, new, make):
    """(tau, how often the first, second, ... drafted token was accepted where it was tested), greedy."""
    seen, tokens = [], 0
    for ids in prompts:
        for _, r in rounds(model, [ids], new, Noting(make(), seen), eos=model.c.eos):
            tokens += len(r.new[0])
    return tokens / len(seen), by_position(seen)


# --- what is measured


def run(a, tokenizer):
    """(lines, data): the sweep of Transfer's inject layer, and the heads that lucidrains' README names."""
    model, _ = load(a, "float32")
    L, E = model.c.n_layers, max(1, model.c.n_layers // 6)
    if model.c.bos is None:
        return ["No small heads: this model has no begin-of-text id to start a text of its own with.", ""], {}
    layers = sorted({L * quarter // 4 for quarter in range(5)})
    named = {f"transfer from {t}": Transfer(model, t, STEPS) for t in layers}
    named |= {"extra block": ExitBlock(model, E), "recycling (eagle)": Eagle(model),
              "prophet": Prophet(model, 1)}
    flags, text = prepare(a, model, tokenizer, len(named))
    prompts, found = prompt_ids("stories", tokenizer, model.c)[: 2 if a.quick else 8], {}
    for name, head in tqdm(named.items(), desc="training", disable=None, leave=False):
        told = train(head, flags, text)
        steps = STEPS if name.startswith("transfer") else AHEAD
        tau, positions = drafted(model, prompts, a.new, lambda h=head, k=steps: h.drafter(k))
        found[name] = {key: told[key] for key in ("agreement", "overlap", "trained")}
        found[name] |= {"tau": tau, "positions": positions, "c_weights": heads.step_cost(head),
                        "parameters": sum(p.numel() for p in head.weights.parameters())}
    tau, positions = drafted(model, prompts, a.new, lambda: SelfDraft(model, early_exit(L, E), AHEAD))
    data = {"transfer": {t: found.pop(f"transfer from {t}") | {"rows": STEPS * (L - t) / L} for t in layers},
            "lucidrains": {f"exit {E}": {"tau": tau, "positions": positions}} | found,
            "minutes": flags.minutes}
    return lines(data), data


def lines(data):
    rows = [[str(t), f"{r['rows']:.2f}", f"{r['trained']:,}", steps(r["agreement"]), steps(r["overlap"]),
             f"{r['tau']:.2f}"] for t, r in data["transfer"].items()]
    beside = [[name, *(f"{r[key]:,}" if key in r else "" for key in ("parameters", "trained")),
               steps(r["positions"]), f"{r['tau']:.2f}"] for name, r in data["lucidrains"].items()]
    trained = f"each trained here for {60 * data['minutes']:.0f} s on text of the model's own"
    return [f"**Hidden Transfer from each depth**, {trained}: what {STEPS} pseudo states for each token "
            "take, in passes over a token, and what they say; tau on stories, greedy", "",
            *table(["after block", "rows", "tokens learnt", "agreement by step", "overlap by step", "tau"],
                   rows),
            f"**Prophet beside early exit, extra block and recycling**, {trained}; up to {AHEAD} tokens "
            "drafted on stories, greedy", "",
            *table(["draft", "parameters", "tokens learnt", "alpha by position", "tau"], beside)]
