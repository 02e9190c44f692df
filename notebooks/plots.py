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
