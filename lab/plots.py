"""The charts of what the lab trains and measures.

The one thing to remember: nothing is measured here; a chart shows what another module has found.
"""
from support.files import replacing
from support.plots import HUES, axes, draw_choices, hues_of, running_mean


def training(run, tables, things, path):
    """The course of a `train.Run`, and what each exit of the model, or each step of a head, is worth at its
    end. tables: {file: {"loss", "agreement"}}, lists; things: what they are lists of."""
    figure, ((course, loss, agreed),) = axes(1, 3, width=4.4)
    tokens = [(i + 1) * run.block / 1e6 for i in range(len(run.losses))]
    smooth = running_mean([final for final, _, _ in run.losses], max(1, len(run.losses) // 100))
    course.plot(tokens, smooth, color=HUES[-1], lw=1)
    for (name, table), hue in zip(tables.items(), HUES * len(tables), strict=False):
        first, numbers = run.evals[0]["files"][name], range(1, 1 + len(table["loss"]))
        loss.plot(numbers, table["loss"], color=hue, marker=".", label=name.removesuffix(".txt"))
        agreed.plot(numbers, table["agreement"], color=hue, marker=".")
        agreed.plot(numbers, first["agreement"], color=hue, marker=".", ls=":", lw=1)
    top = run.losses[len(run.losses) // 50][0] if run.losses else None      # the first steps dwarf all others
    course.set(xlabel="million tokens", ylabel="nats a token", title="training loss", ylim=(None, top))
    loss.set(xlabel=things, ylabel="nats a token", title="loss on held-out text")
    agreed.set(xlabel=things, ylabel="share of tokens", ylim=(0, 1.02),
               title="agreement with the model; dotted: before")
    for side in (loss, agreed):
        side.xaxis.get_major_locator().set_params(integer=True)
    loss.legend(frameon=False, fontsize=8)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")


def choices(chosen, kinds, title, path):
    """What was chosen along a stream of prompts. chosen: {run: [{way: rounds} of each prompt]}; kinds: what
    each prompt is."""
    figure, grid = axes(len(chosen), 1, width=9.0, height=2.6)
    hues = hues_of(dict.fromkeys(way for runs in chosen.values() for rounds in runs for way in rounds))
    for (name, prompts), side in zip(chosen.items(), grid.flat, strict=True):
        draw_choices(side, prompts, kinds, hues)
        side.set_title(name)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=150, format="png")


def drafted(results, title, path):
    """Trained heads on the first of the texts. results: {text: {method: {"positions", "tree",
    "parents", "tau", "tau_predicted", "block"}}}."""
    figure, ((where, size),) = axes(1, 2)
    text, rows = next(iter(results.items()))
    chains = {name: r["positions"] for name, r in rows.items() if ", gamma" in name}
    for i, (name, shares) in enumerate(chains.items()):
        where.plot(range(1, len(shares) + 1), shares, color=HUES[i % len(HUES)], marker="osD^v<"[i % 6], lw=1,
                   markersize=4, label=name)
    where.set(xlabel="position in the draft", ylabel="accepted where it was tested", ylim=(0, 1.02),
              title=f"{text}: drafts")
    where.xaxis.get_major_locator().set_params(integer=True)
    trees, order = {}, [name.split(",")[0] for name in chains]     # each draft has one colour
    for name, r in rows.items():
        if r.get("tree"):
            found = trees.setdefault(name.split(", tree")[0], [])
            found.append((len(r["parents"]), r["tau"], r["tau_predicted"], r["block"]))
    for name, found in trees.items():
        hue = HUES[(order + [name]).index(name) % len(HUES)]
        nodes, tau, predicted, block = zip(*sorted(found), strict=True)
        size.plot(nodes, tau, color=hue, marker="o", label=name)
        size.plot(nodes, predicted, color=hue, marker="x", ls="--", lw=1)
        size.plot(nodes, block, color=hue, marker=".", ls=":", lw=1)
    size.set(xlabel="nodes of the tree", ylabel="tokens a pass (tau), and passes",
             title=f"{text}: trees; dashed: tau predicted; dotted: cost of the block")
    for side in (where, size):
        if side.get_legend_handles_labels()[0]:
            side.legend(frameon=False, fontsize=7)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=130, format="png")


def regrets(curves, optimum, title, path):
    """The best value so far, and its regret, against evaluations: medians and quartiles over seeds. curves:
    {method: for each seed the list of best values so far}."""
    figure, ((best, regret),) = axes(1, 2)
    for (name, runs), hue in zip(curves.items(), HUES, strict=False):
        spread = [sorted(optimum - v for v in column) for column in zip(*runs, strict=True)]
        x, n = range(1, len(spread) + 1), len(runs)
        middle = [s[n // 2] for s in spread]
        for side, turn in ((best, lambda v: optimum - v), (regret, lambda v: max(v, 1e-4))):
            side.plot(x, [turn(v) for v in middle], color=hue, label=name, lw=1.5)
            side.fill_between(x, [turn(s[n // 4]) for s in spread], [turn(s[3 * n // 4]) for s in spread],
                              color=hue, alpha=0.15, lw=0)
    best.set(xlabel="evaluations", ylabel="best speed-up so far", ylim=(optimum - 0.25, optimum + 0.01))
    regret.set(xlabel="evaluations", ylabel="regret (at the bottom: the optimum)", yscale="log")
    best.legend(frameon=False, fontsize=8)
    figure.suptitle(f"{title}; medians and quartiles of {max(map(len, curves.values()))} seeds", fontsize=9)
    figure.savefig(path, dpi=130, format="png")
