"""What generate.py reports about a run, as JSON for scripts or as the lines after the text."""
import sys

import torch

from machine import parallel
from support import chat, show, stats

REPEATS = 3     # interleaved runs in --compare, after a warm-up of each


def of_run(options, model, plan, texts, seen):
    """What --json prints about a run. `texts` are the prompts, and `seen` is the
    show.Generation."""
    n = seen.counts
    outputs = []
    for text, row in zip(texts, seen.rows, strict=True):
        written = "".join(t.text for t in row)
        outputs.append({"prompt": text, "text": written, "ids": [t.id for t in row]})
    how = plan.note
    if plan.draft == "auto":
        how += f": {seen.timed.drafters[0].summary()}"
    own_settings = ""
    if options.temperature == 0:
        own_settings = chat.own_settings(options.model)
    return {
        "outputs": outputs,
        **speed(n.tokens, seen.timed.reading, sum(seen.timed.seconds.values())),
        "target_passes": n.passes,
        "tokens_per_pass": n.tau,
        "accepted": n.accepted,
        "proposed": n.proposed,
        "alpha": n.alpha if n.drafted else None,
        "draft": plan.draft,
        "gamma": plan.gamma,
        "how": how,
        "fast": options.fast and model.replays(),
        "exact": options.exact,
        "quant": options.quant,
        "processes": parallel.here()[1],
        "dtype": str(model.tok.dtype).removeprefix("torch."),
        "device": str(model.tok.device),
        "threads": torch.get_num_threads(),
        "seed": options.seed,
        "own_settings": own_settings,
    }


def speed(tokens, reading, seconds):
    """Tokens and seconds of one run. `seconds` begins after the prompts were read."""
    return {"new_tokens": tokens, "reading_seconds": reading, "seconds": seconds,
            "tokens_per_second": tokens / seconds if seconds else 0.0}


def against_plain(writer, plan, outputs):
    """Time drafted and plain decoding in turn. The printed `outputs` must be the plain ones, unless
    they were sampled without --exact."""
    makers = {"drafted": plan.make, "plain": lambda: None}
    runs = stats.compare(writer.rounds, makers, len(outputs), REPEATS)
    drafted, plain = (speed(run.tokens, run.reading, run.seconds) for run in runs.values())
    texts = runs["plain"].outputs
    found = {
        **drafted,
        "identical": None,
        "first_divergence": None,
        "ratio": runs["drafted"].rate / runs["plain"].rate if runs["plain"].tokens else None,
        "baseline": plain | {"target_passes": runs["plain"].passes, "ids": texts},
    }
    if writer.options.exact or writer.options.temperature == 0:
        ids = [output["ids"] for output in outputs]
        different = stats.divergence(writer.model, writer.prompts, ids, texts)
        found |= {"first_divergence": different, "identical": different is None}
    return found


def summary(r, seen):
    """The lines after the text, which are the legend, the counts, how it drafted, how fast it was
    and the verdict."""
    lines = [seen.summary(), r["how"], rates(r)]
    if show.colours(sys.stdout):
        names = [show.paint([(name, origin)]) for origin, (*_, name) in show.STYLES.items()]
        lines.insert(0, "  ".join(names))
    if r["own_settings"]:
        lines.append(f"this is greedy; the model's own settings: {r['own_settings']}")
    if "baseline" in r:
        lines.append(verdict(r))
    return "\n".join(lines)


def rates(r):
    """How fast the run was."""
    facts = {
        f"{r['tokens_per_second']:.0f} tokens/s in {r['dtype']} on {r['device']}": True,
        f"{r['threads']} thread{'s' * (r['threads'] > 1)}": True,
        f"blocks in {r['quant']}": r["quant"],
        "in fast passes": r["fast"],
        "exact": r["exact"],
        f"{r['processes']} processes": r["processes"] > 1}
    line = ", ".join(fact for fact, holds in facts.items() if holds)
    if "baseline" not in r:
        seconds = f"{r['reading_seconds']:.2g} s"
        return f"{line}, after reading the prompt in {seconds} (one run, while printing)"
    ratio = "unknown" if r["ratio"] is None else f"{r['ratio']:.2f}"
    line += f"; plain decoding {r['baseline']['tokens_per_second']:.0f}: ratio {ratio}"
    return f"{line} (after reading the prompt; medians of {REPEATS} interleaved runs)"


def verdict(r):
    """Whether the text is the same as in plain decoding."""
    d = r["first_divergence"]
    if r["identical"] is None:
        return ("sampled texts may differ: drafting spends more random numbers (compare at "
                "temperature 0, or with --exact)")
    if d is None:
        return f"identical to plain decoding in {r['dtype']}, token for token"
    equal = f"{d['position']} equal token{'s' * (d['position'] != 1)}"
    if len(r["outputs"]) > 1:
        equal += f" of output {d['output']}"
    if r["exact"]:
        return (f"NOT identical to plain decoding, which --exact promises, after {equal}: "
                "please report it")
    gap = f"{d['gap']:.3g} apart, and rounding in {r['dtype']} explains up to {d['rounding']:.2g}"
    if d["near_tie"]:
        return (f"after {equal} a near-tie was decided differently from plain decoding: "
                f"two logits are {gap}")
    return (f"NOT identical to plain decoding, and not by a near-tie: after {equal} two logits "
            f"are {gap}")
