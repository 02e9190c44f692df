"""What notebooks show: charts of plain data, and what `rounds` yields in colours."""
import html

import torch
from matplotlib.figure import Figure

from control import best_gamma, expected_speedup
from speculative import rounds
from support.show import SIGNS, STYLES, Generation, origins
from support.stats import Timed

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


def record(model, tokenizer, prompts, max_new, drafter):
    """A whole run, timed, as a show.Generation. All but the tokenizer are arguments of `rounds`."""
    seen = Generation(tokenizer, prompts, Timed(drafter))
    for _ in seen.watch(rounds(model, prompts, max_new, seen.timed)):
        pass
    return seen


def span(text, origin=None, title=""):
    """A piece of text in HTML. The letters keep the page's own colour, light or dark; only the background and
    the line below are set."""
    hue, _, line, _ = STYLES.get(origin, [""] * 4)
    look = f"background:{hue}2b;border-bottom:{3 if line == 'double' else 2}px {line} {hue};border-radius:3px"
    text = html.escape(text.translate(SIGNS))
    return f'<span style="{look if origin else "opacity:.7"}" title="{html.escape(title)}">{text}</span>'


def text_html(seen):
    """A show.Generation: legend, texts and summary. A token's tooltip has its origin, its id and the target's
    own raw probability of it."""
    blocks = [" ".join(span(name, origin) for origin, (*_, name) in STYLES.items())]
    for prompt, row in zip(seen.prompts, seen.rows, strict=True):
        spans = (span(t.text, t.origin, f"{t.origin}, id {t.id}, target's raw probability {t.p:.3g}")
                 for t in row if t.text)
        blocks.append(span(prompt) + "".join(spans))
    style = "white-space:pre-wrap;word-break:normal;line-height:1.9;background:none;color:inherit"
    return "".join(f'<pre style="{style}">{block}</pre>' for block in [*blocks, span(seen.summary())])


def round_html(r, tokenizer):
    """A Round as a table: p, q and the verdict on each drafted token, then the row's new tokens. A token that
    was never tested is dead: it comes after a rejected token, after an end of text or after its row's draft.
    """
    def name(token):
        return f"{token} {tokenizer.decode([token], skip_special_tokens=False)!r}"

    drafted, q = r.draft.tokens[..., None], r.draft.q                                   # (B, K, 1)
    p = r.p[:, : drafted.shape[1]].gather(2, drafted)[..., 0]                           # (B, K)
    q = torch.ones_like(p) if q is None else q.gather(2, drafted)[..., 0]               # (B, K)
    lines = ["<tr><th>row<th>drafted<th>p<th>q<th>verdict"]
    for b, (accepted, proposed) in enumerate(zip(r.accepted.tolist(), r.proposed.tolist(), strict=True)):
        for k, token in enumerate(drafted[b, :, 0].tolist()):
            verdict = "accepted" if k < accepted else "rejected" if k == accepted < proposed else "dead"
            cells = b, html.escape(name(token)), f"{p[b, k]:.3g}", f"{q[b, k]:.3g}", verdict
            lines.append("<tr>" + "".join(f"<td>{cell}" for cell in cells))
        spans = (span(name(t), origin, origin) for t, origin in zip(r.new[b], origins(r, b), strict=True))
        lines.append(f'<tr><td>{b}<td colspan="4" style="text-align:left">new: {" ".join(spans)}')
    return f"<table>{''.join(lines)}</table>"


def place(parents):
    """Where to draw each node of a tree: its depth, and its row. A first child stays in its parent's row."""
    depth, row, todo, rows = {0: 0}, {0: 0}, [0], 0
    while todo:                                                 # depth first, so that no lines cross
        node = todo.pop()
        if node > 0:
            parent = parents[node - 1]
            first = parents.index(parent) == node - 1
            rows += not first
            depth[node], row[node] = depth[parent] + 1, row[parent] if first else rows
        todo += [k for k in range(len(parents), 0, -1) if parents[k - 1] == node]
    return depth, row


def draw_tree(side, parents, words=()):
    """A tree from left to right, with a label for each node if there are any; node 0 is black."""
    depth, row = place(parents)
    for k, parent in enumerate(parents, 1):
        side.plot([depth[parent], depth[k]], [-row[parent], -row[k]], color="#808080", lw=1, zorder=0)
    for k in row:
        side.plot(depth[k], -row[k], "o", color=HUES[0] if k else "#404040", ms=6)
    for k, word in enumerate(words):
        side.text(depth[k], -row[k], word, ha="center", va="center", fontsize=9,
                  bbox=dict(boxstyle="round", fc="white", ec=HUES[0] if k else "#404040"))
    side.set(xlim=(-0.5, max(depth.values()) + 0.5), ylim=(-max(row.values()) - 0.6, 0.6))
    side.axis("off")


def tree_and_mask(parents, mask, names):
    """A drafted tree, and the mask (K+1, K+1) of its block. names: of node 0 and of each drafted token."""
    figure, ((left, right),) = axes(1, 2, width=5.4)
    draw_tree(left, parents, names)
    left.set_title("the draft")
    right.imshow(mask, cmap="Blues", vmax=1.5)
    right.set_xticks(range(len(names)), names, rotation=90)
    right.set_yticks(range(len(names)), names)
    right.set_title("its mask: a row sees what is blue")
    return figure


def draw_reading(side, head, L):
    """What a trained head reads (squares) and runs (orange), and what predicts which token (arrows). A column
    is a token, a row a height in the model; D, the last known token, is column 1."""
    exits = "exit_layer" in head.shape
    top, low = head.taps[0] // 2 + 1, head.shape.get("exit_layer", 1)       # top: how high it reads
    side.bar([-2, -1, 0], L, 0.7, color="#dce9f2")
    if head.kind != "medusa":
        side.bar([1, 2, 3], low, 0.7, color="#f2d0b8")
    for column in range(-2, 4) if exits else range(-2, 1) if head.kind == "eagle" else [0]:
        side.plot(column, top, "s", color=HUES[0], ms=8)
    if head.kind in ("eagle", "prophet"):
        side.plot([0, 1], [top, low], color="#808080", ls=":", lw=2)
    for k in range(3):
        start = (0, L) if head.kind == "medusa" else (1 + k, top if exits else 1)
        side.annotate("", (2 + k, L * 1.12), start, arrowprops=dict(arrowstyle="->", color=HUES[1]))
    side.set_xticks(range(-2, 5), ["", "", "read", "D", "+1", "+2", "+3"])
    side.set(title=head.kind, ylim=(0, L * 1.15), yticks=[0, *([low] if exits else []), L])
