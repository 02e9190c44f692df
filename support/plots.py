"""The charts. Each function takes plain data, draws one figure and writes it to a file.

Nothing is measured here; a chart shows what another module has found.
"""
from matplotlib.figure import Figure

from control import best_gamma, expected_speedup

# hues that the colour-blind tell from one another (Okabe & Ito 2008)
HUES = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#808080"
MORE = "#f0e442", "#8c564b", "#b0b000", "#6a3d9a", "#17becf"     # where there are more things to tell apart


def axes(rows, columns, width=5.0, height=3.6):
    """A figure and its axes, without frames."""
    figure = Figure(figsize=(width * columns, height * rows), facecolor="white", layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for side in grid.flat:
        side.spines[["top", "right"]].set_visible(False)
    return figure, grid


def running_mean(values, width):
    """At each place the mean of the last `width` values that are not None, or None where there are none."""
    means = []
    for i in range(len(values)):
        seen = [v for v in values[max(0, i - width + 1) : i + 1] if v is not None]
        means.append(sum(seen) / len(seen) if seen else None)
    return means


def training(losses, block, evals, tables, path):
    """The course of a training run, and what each exit is worth at its end. losses: (final, exit's or None,
    exit layer) of each step; block: tokens in a step; evals: [{"tokens", "files": {name: {"loss": of each
    exit}}, "speedup": of each exit}]; tables: {name: {"loss", "agreement"}} at the end."""
    figure, ((loss, speed), (lens, agreed)) = axes(2, 2)
    tokens = [(i + 1) * block / 1e6 for i in range(len(losses))]
    width = max(1, len(losses) // 100)
    loss.plot(tokens, running_mean([r[0] for r in losses], width), color="#808080", lw=1, label="training")
    if any(r[1] is not None for r in losses):
        shown = [float("nan") if v is None else v for v in running_mean([r[1] for r in losses], 4 * width)]
        loss.plot(tokens, shown, color="#808080", lw=1, ls=":", label="training, a random exit")
    for (name, table), hue in zip(tables.items(), HUES * len(tables), strict=False):
        seen, label = [e for e in evals if name in e["files"]], name.removesuffix(".txt")
        loss.plot([e["tokens"] / 1e6 for e in seen], [e["files"][name]["loss"][-1] for e in seen], color=hue,
                  marker=".", label=label)
        exits = range(1, len(table["loss"]) + 1)
        lens.plot(exits, table["loss"], color=hue, marker=".", label=label)
        agreed.plot(exits, table["agreement"], color=hue, marker=".")
    for i in range(len(evals[0]["speedup"])):
        shade = i / max(1, len(evals[0]["speedup"]) - 1)
        speed.plot([e["tokens"] / 1e6 for e in evals], [e["speedup"][i] for e in evals], marker=".",
                   color=(0.85 * shade, 0.45 + 0.3 * shade, 0.7 + 0.2 * shade),
                   label=f"{i + 1}")
    top = losses[len(losses) // 50][0] if losses else None  # the first steps dwarf all others
    loss.set(xlabel="million tokens", ylabel="nats a token", title="loss", ylim=(None, top))
    speed.set(xlabel="million tokens", ylabel="times plain decoding",
              title="best speed-up, c by weights, mean of the files")
    lens.set(xlabel="exit after block", ylabel="nats a token", title="loss of each exit (logit lens)")
    agreed.set(xlabel="exit after block", ylabel="share of tokens", ylim=(0, 1.02),
               title="agreement with the last block (greedy alpha)")
    for side in (lens, agreed):
        side.xaxis.get_major_locator().set_params(integer=True)
    for side in (loss, lens):
        side.legend(frameon=False, fontsize=8)
    if evals[0]["speedup"]:  # a model of one block has no early exit
        speed.legend(frameon=False, fontsize=8, title="exit", title_fontsize=8, loc="center left",
                     bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120, format="png")


def heads(losses, block, evals, path):
    """The course of a head's training. losses: (loss, None, None) of each step; block: tokens in a step;
    evals: [{"tokens", "files": {name: {"loss", "agreement"}}}], both of each step that a head looks ahead."""
    figure, ((loss, agreed),) = axes(1, 2)
    tokens = [(i + 1) * block / 1e6 for i in range(len(losses))]
    smooth = running_mean([r[0] for r in losses], max(1, len(losses) // 50))
    loss.plot(tokens, smooth, color="#808080", lw=1, label="training")
    at = [e["tokens"] / 1e6 for e in evals]
    for name, hue in zip(evals[0]["files"], HUES * len(evals[0]["files"]), strict=False):
        tables, label = [e["files"][name] for e in evals], name.removesuffix(".txt")
        loss.plot(at, [sum(t["loss"]) / len(t["loss"]) for t in tables], color=hue, marker=".", label=label)
        for step, values in enumerate(zip(*(t["agreement"] for t in tables), strict=True), 1):
            agreed.plot(at, values, color=hue, marker=".", alpha=0.8 ** (step - 1), label=f"{label}, {step}")
    loss.set(xlabel="million tokens", ylabel="KL(p || q) in nats", ylim=(0, None),
             title="loss, mean of the steps")
    agreed.set(xlabel="million tokens", ylabel="share of tokens", ylim=(0, 1.02),
               title="agreement with the model, step by step")
    for side in (loss, agreed):
        side.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120, format="png")


def draw_choices(side, prompts, kinds, hues):
    """What was chosen along a stream. prompts: [{way: rounds} of each]; kinds: what each prompt is; hues:
    {way: its colour}. What an n-gram goes on with is hatched."""
    below = [0.0] * len(prompts)
    for way, hue in hues.items():
        part = [rounds.get(way, 0) / max(1, sum(rounds.values())) for rounds in prompts]
        side.bar(range(len(prompts)), part, bottom=below, color=hue, label=way, width=0.9, edgecolor="white",
                 lw=0, hatch="////" * (", then" in way))
        below = [a + b for a, b in zip(below, part, strict=True)]
    starts = [i for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
    side.set_xticks([i - 0.5 for i in starts], [kinds[i] for i in starts], ha="left", fontsize=8)
    side.set(ylabel="share of the rounds", ylim=(0, 1))
    side.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))


def hues_of(ways):
    """{way: its colour}, the same for a way with and without an n-gram after it; "nothing" is grey."""
    bases = dict.fromkeys(way.split(", then")[0] for way in ways if way != "nothing")
    hues = dict(zip(bases, (*HUES[:-1], *MORE) * len(bases), strict=False))
    return {way: hues[way.split(", then")[0]] for way in ways if way != "nothing"} | {"nothing": HUES[-1]}


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


def drafted(results, small, title, path):
    """Trained heads. results: {text: {method: {"positions", "head", "sequoia", "parents", "tau",
    "tau_predicted", "block"}}}, of which the first text is drawn; small, of heads that were trained for the
    picture: {"transfer": {inject layer: {"rows", "agreement"}}, "lucidrains": {draft: {"positions", "tau"}}},
    or {}."""
    figure, ((where, size), (depth, beside)) = axes(2, 2)
    text, rows = next(iter(results.items()))
    chains = {name: r["positions"] for name, r in rows.items() if r.get("positions") and "sequoia" not in r}
    draw_positions(where, chains, f"{text}: drafts")
    trees, order = {}, [name.split(",")[0] for name in chains]     # each draft has one colour
    for name, r in rows.items():
        if "sequoia" in r:
            found = trees.setdefault(name.split(", tree")[0], [])
            found.append((len(r["parents"]), r["tau"], r["tau_predicted"], r["block"]))
    for name, found in trees.items():
        hue = HUES[(order + [name]).index(name) % len(HUES)]
        nodes, tau, predicted, block = zip(*sorted(found), strict=True)
        size.plot(nodes, tau, color=hue, marker="o", label=name)
        size.plot(nodes, predicted, color=hue, marker="x", ls="--", lw=1)
        size.plot(nodes, block, color=hue, marker=".", ls=":", lw=1)
    for label, mark, dashes in ("tau predicted", "x", "--"), ("cost of the block", ".", ":"):
        size.plot([], [], color=HUES[-1], marker=mark, ls=dashes, lw=1, label=label)
    size.set(xlabel="nodes of the tree", ylabel="tokens a pass (tau), and passes", title=f"{text}: trees",
             xlim=(0, 1.5 * max(len(r.get("parents", ".")) for r in rows.values())))   # room for a legend
    swept = small.get("transfer", {})
    for step, values in enumerate(zip(*(r["agreement"] for r in swept.values()), strict=True), 1):
        depth.plot([r["rows"] for r in swept.values()], values, color=HUES[step - 1], marker="o",
                   label=f"step {step}")
    for t, r in swept.items():
        depth.annotate(f"t = {t}", (r["rows"], r["agreement"][0]), fontsize=8, textcoords="offset points",
                       xytext=(3, 4))
    depth.set(xlabel="extra rows, in passes over a token", ylabel="agreement", ylim=(0, None),
              title="Hidden Transfer from after block t")
    named = {f"{name}, tau {r['tau']:.2f}": r["positions"] for name, r in small.get("lucidrains", {}).items()}
    draw_positions(beside, named, "the same text and time of training")
    for side in (where, size, depth, beside):
        if side.get_legend_handles_labels()[0]:
            side.legend(frameon=False, fontsize=7)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=130, format="png")


def draw_positions(side, drafts, title):
    """How often the first, second, ... token of drafts is accepted. drafts: {name: [share]}."""
    for i, (name, shares) in enumerate(drafts.items()):
        side.plot(range(1, len(shares) + 1), shares, color=HUES[i % len(HUES)], marker="osD^v<"[i % 6], lw=1,
                  markersize=4, label=name)
    side.set(xlabel="position in the draft", ylabel="accepted where it was tested", ylim=(0, 1.02),
             title=title)
    side.xaxis.get_major_locator().set_params(integer=True)


def front(entries):
    """The trials of a search that no other one beats in both alpha and c, ordered by c."""
    best, kept = -1.0, []
    for e in sorted(entries, key=lambda e: (e["c"], -e["alpha"])):
        if e["alpha"] > best:
            best = e["alpha"]
            kept.append(e)
    return kept


def search(entries, front, best, skippable, path):
    """What a search found. entries: its trials {"bits", "value", "alpha", "c", "speedup", "expected"}; front:
    those that no other trial beats; best: the best of them; skippable: the sub-layer of each bit."""
    figure, ((where, sets, sure),) = axes(1, 3)
    draw_plane(where, [e["alpha"] for e in entries], [e["c"] for e in entries])
    where.plot([e["c"] for e in front], [e["alpha"] for e in front], color=HUES[1], marker=".", lw=1,
               label="front")
    where.plot([best["c"]], [best["alpha"]], marker="*", markersize=13, color=HUES[1], ls="", label="best")
    where.legend(frameon=False, fontsize=8, loc="lower right")
    sets.imshow([[int(b) for b in e["bits"]] for e in front], aspect="auto", cmap="Greys", vmin=0, vmax=1.6)
    names = [f"{'am'[sub % 2]}{sub // 2}" for sub in skippable]
    sets.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
    sets.set(title="skipped sub-layers along the front", ylabel="cheapest at the top")
    expected = [(*e["expected"], e["value"]) for e in entries if e["expected"]]
    for mean, std, value in expected:
        sure.errorbar([mean], [value], xerr=[2 * std], color=HUES[0], marker=".", lw=0.6, alpha=0.6)
    if expected:
        ends = [min(v for *_, v in expected), max(v for *_, v in expected)]
        sure.plot(ends, ends, color=HUES[-1], lw=0.8)
        inside = sum(abs(mean - value) <= 2 * std for mean, std, value in expected) / len(expected)
        sure.set_title(f"{inside:.0%} of the trials lie within 2 sd")
    sure.set(xlabel="expected value, 2 sd", ylabel="value found")
    figure.savefig(path, dpi=110, format="png")


def draw_plane(side, alphas, costs):
    """Skip sets in the plane of alpha and c, with contours of the best speed-up. A gain lies above the
    diagonal."""
    grid = [i / 60 for i in range(1, 60)]
    gains = [[expected_speedup(alpha, best_gamma(alpha, cost), cost) for cost in grid] for alpha in grid]
    shown = side.contour(grid, grid, gains, levels=[1.1, 1.25, 1.5, 2, 3, 4], colors=HUES[-1], linewidths=0.7)
    side.clabel(shown, fontsize=7)
    side.plot([0, 1], [0, 1], color=HUES[-1], lw=1, ls="--")
    side.scatter(costs, alphas, s=8, color=HUES[0], alpha=0.5, linewidths=0, label="trials")
    side.set(xlabel="c, cost of a drafted step", ylabel="alpha", xlim=(0, 1), ylim=(0, 1.01),
             title="a gain lies above alpha = c")


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
