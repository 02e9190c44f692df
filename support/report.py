"""What generate.py reports about a run, as JSON for scripts or as the lines after the text."""
import json
import sys
from importlib import import_module

import torch

from support import show
from support.flags import processes


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
        how += f": {seen.timed.drafter.summary()}"
    return {
        "prompts": seen.prompts,    # as the model reads them
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
        "processes": processes(),
        "dtype": str(model.tok.dtype).removeprefix("torch."),
        "device": str(model.tok.device),
        "threads": torch.get_num_threads(),
        "seed": options.seed,
    }


def conclude(options, model, plan, texts, seen, player, start):
    """Write pictures and pages, compare, and print the report. Returns the exit status."""
    found = of_run(options, model, plan, list(texts.values()), seen)
    try:
        if options.picture:
            import_module("support.picture").draw(seen, options.picture)
        if player:
            player.save(options, plan.note)
    finally:    # a full disk does not cost the answer
        lines = summary(found, seen)
        if options.compare:
            compare = import_module("support.compare")
            found |= compare.against_plain(options, model, seen.ids, plan, start, found["outputs"])
            lines = [*summary(found, seen), *compare.lines(found)]
        print(json.dumps(found) if options.json else "\n".join(lines))
    different = found.get("first_divergence")
    return int(bool(different and (options.exact or not different["near_tie"])))


def speed(tokens, reading, seconds):
    """Tokens and seconds of one run. `seconds` begins after the prompts were read."""
    return {"new_tokens": tokens, "reading_seconds": reading, "seconds": seconds,
            "tokens_per_second": tokens / seconds if seconds else 0.0}


def summary(r, seen):
    """The lines after the text, which are the legend, the counts, how it drafted and how fast it
    was."""
    lines = [seen.summary(), r["how"], rates(r)]
    if show.colours(sys.stdout):
        names = [show.paint([(name, origin)]) for origin, (*_, name) in show.STYLES.items()]
        lines.insert(0, "  ".join(names))
    return lines


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
    return f"{line}, after reading the prompt in {r['reading_seconds']:.2g} s"
