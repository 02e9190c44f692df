"""What notebooks show: charts of plain data, and what `rounds` yields in colours."""
import html
import math

import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from control import best_gamma, expected_speedup
from speculative import rounds
from support.show import SIGNS, STYLES, Generation, origins
from support.stats import Timed

# hues that colour-blind readers can tell apart (Okabe & Ito 2008)
HUES = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#808080"
# where there are more things to tell apart
MORE = "#f0e442", "#8c564b", "#b0b000", "#6a3d9a", "#17becf"


def axes(rows, columns, width=5.0, height=3.6):
    """A figure and its axes, without frames."""
    size = (width * columns, height * rows)
    figure = Figure(figsize=size, facecolor="white", layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for side in grid.flat:
        side.spines[["top", "right"]].set_visible(False)
    return figure, grid


def curves(side, x, lines, **labels):
    """Lines {name: y} over x, each with its own hue and mark. labels: what `side.set` takes."""
    for (name, y), hue, mark in zip(lines.items(), HUES, "os^vD", strict=False):
        side.plot(x, y, color=hue, marker=mark, ms=4, label=name)
    side.set(**labels)
    if len(lines) > 1:
        side.legend(frameon=False, fontsize=9)


def bars(side, names, values, hue=HUES[0], shift=0.0, width=0.8, **rest):
    """A bar for each name, with the names written upwards below. rest: what `side.bar` takes."""
    side.bar([i + shift for i in range(len(names))], values, width, color=hue, **rest)
    side.set_xticks(range(len(names)), names, rotation=90, fontsize=9)


def word(tokenizer, token):
    """A token's text as a label: without spaces, and with a sign where nothing would be seen."""
    text = tokenizer.decode([token]).replace("\n", "\u21b5")
    return text.translate(SIGNS).strip() or "\u2423"


def draw_updates(lengths, updates):
    """Notebook 1. lengths (2L + 1) holds the stream's length after each sub-layer, updates (2L) the
    length of each update, relative to the stream that it is added to."""
    figure, ((left, right),) = axes(1, 2)
    curves(left, range(len(lengths)), {"x": lengths}, xlabel="sub-layers applied",
           ylabel="mean length of x", ylim=(0, None))
    for kind, name in enumerate(("attention", "MLP")):
        right.bar(range(kind, len(updates), 2), updates[kind::2], color=HUES[kind], label=name)
    right.axhline(1, color=HUES[-1], ls=":", lw=1)
    right.set(xlabel="sub-layer", ylabel="length of the update / length of x", yscale="log")
    right.legend(frameon=False)
    return figure


def draw_rotation(freqs, count=64):
    """Notebook 1. freqs (D/2) holds the angle by which each pair turns per position."""
    at = torch.arange(count)
    figure, ((left, right),) = axes(1, 2)
    cosines = (at[None] * freqs[:, None]).cos()
    image = left.imshow(cosines, aspect="auto", cmap="RdBu", vmin=-1, vmax=1)
    left.set(xlabel="position m", ylabel="pair i", title="cosine of the angle of each pair")
    figure.colorbar(image, ax=left)
    for hand, pair in enumerate([0, len(freqs) // 4, len(freqs) // 2]):
        angle = at * freqs[pair]
        radius = 1 - 0.2 * hand
        right.plot(radius * angle.cos(), radius * angle.sin(), color=HUES[hand],
                   marker="os^"[hand], ms=3, lw=0, label=f"pair {pair}")
    right.set(aspect="equal", title=f"three hands at positions 0 to {count - 1}", xticks=[],
              yticks=[], frame_on=False)
    right.legend(frameon=False, loc="center")
    return figure


def draw_maps(maps, names, circles):
    """Notebook 1. Attention maps {title: (T, T)} over T tokens with these names. circles (T, T)
    marks cells of the last map."""
    figure, (sides,) = axes(1, len(maps), width=3.5, height=4.2)
    for side, (title, weights) in zip(sides, maps.items(), strict=True):
        side.imshow(weights, cmap="Blues", vmin=0, vmax=1)
        side.set_title(title, fontsize=11)
        side.set_xticks(range(len(names)), names, rotation=90, fontsize=9)
        side.set_yticks(range(len(names)), names if side is sides[0] else [], fontsize=9)
    marked = circles.nonzero().T.flip(0)
    sides[-1].scatter(*marked, s=26, facecolors="none", edgecolors=HUES[1], lw=1)
    sides[0].set_ylabel("this token looks ...")
    figure.supxlabel("... at this one", fontsize=10)
    return figure


def draw_lens(said, sure, depths, after, tokenizer):
    """Notebook 1. said and sure (depths, T) hold the most likely token at each depth and its
    probability, `after` the names of the T tokens read. Where the last depth says the same token,
    it is bold."""
    figure, ((side,),) = axes(1, 1, width=10, height=0.8 + 0.32 * len(said))
    image = side.imshow(sure, origin="lower", aspect="auto", cmap="Blues", vmin=0, vmax=2)
    figure.colorbar(image, ax=side, boundaries=[k / 50 for k in range(51)], ticks=[0, 0.5, 1],
                    label="probability", fraction=0.03, pad=0.01)
    for y, row in enumerate(said.tolist()):
        for t, token in enumerate(row):
            same = token == said[-1, t]
            side.text(t, y, word(tokenizer, token)[:10], ha="center", va="center", fontsize=10,
                      parse_math=False, weight="bold" if same else "normal",
                      style="normal" if same else "italic")
    side.set_xticks(range(len(after)), after, fontsize=10)
    side.set_yticks(range(len(depths)), depths)
    side.set(xlabel="after this token", ylabel="blocks applied")
    return figure


def draw_losses(losses, uniform):
    """Notebook 1. losses {name: loss}; uniform is the loss of a model that knows nothing."""
    figure, ((side,),) = axes(1, 1, width=8, height=3.4)
    order = sorted(losses, key=losses.get)
    shown = side.barh(order, [losses[name] for name in order],
                      color=[HUES[2] if name == "as trained" else HUES[0] for name in order])
    side.bar_label(shown, fmt=" %.3f", fontsize=9)
    side.axvline(uniform, color=HUES[1], ls="--", lw=1.5)
    side.text(uniform - 0.1, 0, "all tokens equally likely", color=HUES[1], ha="right", va="center")
    side.set(xlabel="loss in nats per token, with this one field as in Llama",
             xlim=(0, 1.12 * max(uniform, *losses.values())))
    return figure


# Notebook 2: a hue for each kind of slot, and hatching for those who see no hues
FILL = {"known": ("#0072b240", None), "new": ("#009e7360", None), "dead": ("#80808030", "////"),
        "empty": ("none", None)}


def draw_slots(rows, firsts, size=12):
    """Notebook 2. Rows (label, [(text, kind), ...]) from top to bottom, each from another slot on.
    A kind is a key of FILL."""
    figure, ((side,),) = axes(1, 1, width=10, height=0.72 * len(rows) + 0.3)
    for y, ((label, slots), first) in enumerate(zip(rows, firsts, strict=True)):
        for x, (text, kind) in enumerate(slots + [("", "empty")] * (size - len(slots))):
            fill, hatch = FILL[kind]
            side.add_patch(Rectangle((x, y), 0.94, 0.8, fc=fill, ec="#808080", hatch=hatch, lw=0.8))
            box = dict(fc="white", ec="none", alpha=0.8, pad=1) if hatch else None
            side.text(x + 0.47, y + 0.4, text.strip(), ha="center", va="center", fontsize=9,
                      parse_math=False, bbox=box)
            side.text(x + 0.47, y + 0.89, first + x, ha="center", va="center", fontsize=6.5,
                      color="#606060")
        side.text(-0.2, y + 0.4, label, ha="right", va="center", fontsize=10)
    side.set(xlim=(0, size), ylim=(len(rows), -0.1), xticks=[], yticks=[])
    side.spines[:].set_visible(False)
    return figure


def draw_masks(cases):
    """Notebook 2. Masks {title: (1, T, S)}, black where a token sees a slot."""
    figure, (sides,) = axes(1, len(cases), width=3.6, height=2.3)
    for side, (name, mask) in zip(sides, cases.items(), strict=True):
        slots = mask.shape[2]
        side.imshow(mask[0], cmap="Greys", vmin=0, vmax=1.3)
        side.set_xticks(range(slots), range(slots), fontsize=8)
        side.set_xticks([x - 0.5 for x in range(slots + 1)], minor=True)
        side.tick_params(axis="x", which="minor", length=0)
        tokens = range(mask.shape[1])
        side.set_yticks(tokens, [f"token {i}" for i in tokens], fontsize=9)
        side.grid(axis="x", which="minor", color="#c0c0c0", lw=0.5)
        side.set_title(name, fontsize=11)
        side.set_xlabel("slot", fontsize=10)
    return figure


def draw_line(names, pieces, marks):
    """Notebook 3. The names' probabilities, `pieces`, side by side; marks {u: label} point at u."""
    figure, ((side,),) = axes(1, 1, width=10, height=1.9)
    left = 0.0
    for name, piece, hue in zip(names, pieces, (*HUES, *MORE), strict=False):
        side.barh(0, piece, left=left, color=hue, alpha=0.45, ec="white")
        side.text(left + piece / 2, 0, name, ha="center", va="center", fontsize=10,
                  rotation=90 if piece < 0.06 else 0)
        left += piece
    for u, label in marks.items():
        side.annotate(label, (u, 0.4), (u, 0.75), ha="center", arrowprops=dict(arrowstyle="->"),
                      annotation_clip=False)
    side.set(xlim=(0, 1), ylim=(-0.4, 1.1), yticks=[], xlabel="u")
    return figure


def draw_outcomes(paths, name):
    """Notebook 4. The tree of outcomes. Its paths come from `outcomes.every_path`, and each ends in
    a text, a tuple of tokens; name(token) names one. Equal texts have the same hue."""
    figure, ((side,),) = axes(1, 1, width=10, height=0.55 * len(paths) + 0.9)
    ends = list(dict.fromkeys(text for _, text in paths))
    depth = max(len(steps) for steps, _ in paths)
    nodes = {}                                                  # decisions so far: the leaves below
    for y, (steps, _) in enumerate(paths):
        for k in range(len(steps) + 1):
            nodes.setdefault(tuple(taken for *_, taken in steps[:k]), []).append(y)
    middle = {node: (ys[0] + ys[-1]) / 2 for node, ys in nodes.items()}
    for y, (steps, text) in enumerate(paths):
        hue = HUES[ends.index(text) % len(HUES)]
        product = 1.0
        for k, (options, chances, taken) in enumerate(steps):
            start, end = (tuple(t for *_, t in steps[:n]) for n in (k, k + 1))
            product *= chances[taken]
            heights = [middle[start], middle[end], middle[end]]
            side.plot([k, k + 0.25, k + 1], heights, color="#808080", lw=1)
            label = options[taken] if isinstance(options[taken], str) else name(options[taken])
            if nodes[end][0] == y:                              # once for each branch
                ink = HUES[1] if label == "rejected" else "black"
                side.text(k + 0.3, middle[end] - 0.08, f"{label}  {chances[taken]:.2f}",
                          fontsize=10, color=ink, va="bottom")
        side.plot([len(steps), depth], [y, y], color="#808080", lw=1, ls=":")
        side.text(depth + 0.05, y, f"{' '.join(map(name, text))}  {product:.3f}", fontsize=10,
                  va="center", bbox=dict(boxstyle="round", fc=hue + "2b", ec=hue))
    titles = "draft a token", "accept it?", "the next token", "one more"
    heading = dict(fontsize=10, style="italic", color="#606060")
    for k, title in enumerate(titles[:depth]):
        side.text(k + 0.3, -0.75, title, **heading)
    side.text(depth + 0.05, -0.75, "text and probability", **heading)
    side.set(xlim=(0, depth + 1.1), ylim=(len(paths) - 0.4, -0.9), xticks=[], yticks=[])
    side.spines[:].set_visible(False)
    return figure


def draw_texts(laws, names):
    """Notebook 4. laws {name: {text: probability}}, in the order of names {text: its label}."""
    figure, ((side,),) = axes(1, 1, width=10, height=3.6)
    for i, (law, hue) in enumerate(zip(laws, (HUES[7], HUES[0], HUES[1], HUES[4]), strict=False)):
        chances = [laws[law].get(t, 0) for t in names]
        side.bar([x + 0.2 * i - 0.3 for x in range(len(names))], chances, 0.2, color=hue, label=law)
    side.set_xticks(range(len(names)), names.values(), rotation=30, ha="right", fontsize=10)
    side.set(ylabel="probability of the text", title="grey and blue agree; the mistakes do not")
    side.legend(frameon=False)
    return figure


def draw_sublayers(drafts, shared, count):
    """Notebook 6. drafts {name: sub-layers}, out of `count` = 2L. shared {name: how many of
    them the check need not repeat}."""
    figure, ((side,),) = axes(1, 1, width=10, height=2.6)
    for y, (name, subs) in enumerate(drafts.items()):
        for i in range(count):
            hue = HUES[2] if i < shared[name] else HUES[i % 2]
            hatch = None
            if i not in subs:
                hue = "#e8e8e8"
                hatch = "////"
            side.bar(i, 0.8, bottom=y - 0.4, width=0.9, color=hue, hatch=hatch, ec="white")
    side.set_yticks(range(len(drafts)), drafts, fontsize=10)
    side.invert_yaxis()
    side.set_xlabel("sub-layer")
    side.set_title("green: shared with the check; blue, orange: attention, MLP after a gap; "
                   "pale: skipped", fontsize=10)
    return figure


def draw_traces(traces):
    """Notebook 6. traces {title: (drafted, accepted, estimate of alpha, c)}. The first three hold
    a value per round, and c is one number."""
    figure, sides = axes(len(traces), 2, width=5, height=2.2)
    for (left, right), (title, trace) in zip(sides, traces.items(), strict=True):
        drafted, accepted, mean, c = trace
        step = math.ceil(max(drafted) / 3)
        left.bar(range(len(drafted)), drafted, 1, color=HUES[5], label="drafted")
        left.bar(range(len(accepted)), accepted, 0.6, color=HUES[0], label="accepted")
        left.set(ylabel="tokens", title=title, yticks=range(0, 1 + max(drafted), step))
        right.plot(mean, color=HUES[1], label="estimate of alpha")
        right.axhline(c, color=HUES[-1], ls=":", label="c")
        right.set(ylim=(0, 1.02))
    for side in sides[0]:
        side.legend(frameon=False, fontsize=9, ncols=2)
    for side in sides[-1]:
        side.set_xlabel("round")
    return figure


def draw_choices(side, prompts, kinds, hues):
    """What was chosen along a stream of prompts. Each prompt has {way: rounds} in `prompts` and its
    kind in `kinds`; each way has its colour in `hues`."""
    below = [0.0] * len(prompts)
    for way, hue in hues.items():
        part = [rounds.get(way, 0) / max(1, sum(rounds.values())) for rounds in prompts]
        side.bar(range(len(prompts)), part, bottom=below, color=hue, label=way, width=0.9, lw=0)
        below = [a + b for a, b in zip(below, part, strict=True)]
    starts = [i for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
    side.set_xticks([i - 0.5 for i in starts], [kinds[i] for i in starts], ha="left", fontsize=8)
    side.set(ylabel="share of the rounds", ylim=(0, 1))
    side.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))


def hues_of(ways):
    """{way: its colour}; "nothing" is grey."""
    named = [way for way in ways if way != "nothing"]
    return dict(zip(named, (*HUES[:-1], *MORE) * len(named), strict=False)) | {"nothing": HUES[-1]}


def draw_plane(side, alphas, costs):
    """Skip sets in the plane of alpha and c, with contours of the best speed-up. A gain lies above
    the diagonal."""
    grid = [i / 60 for i in range(1, 60)]
    gains = [[expected_speedup(alpha, best_gamma(alpha, cost), cost) for cost in grid]
             for alpha in grid]
    shown = side.contour(grid, grid, gains, levels=[1.1, 1.25, 1.5, 2, 3, 4], colors=HUES[-1],
                         linewidths=0.7)
    side.clabel(shown, fontsize=7)
    side.plot([0, 1], [0, 1], color=HUES[-1], lw=1, ls="--")
    side.scatter(costs, alphas, s=8, color=HUES[0], alpha=0.5, linewidths=0, label="trials")
    side.set(xlabel="c, cost of a drafted step", ylabel="alpha", xlim=(0, 1), ylim=(0, 1.01),
             title="a gain lies above alpha = c")


def record(model, tokenizer, prompts, max_new, drafter):
    """A whole run, timed, as a show.Generation, and each row's `Round.sure`. All but the tokenizer
    are arguments of `rounds`."""
    seen = Generation(tokenizer, prompts, Timed(drafter))
    seen.sure = [[] for _ in prompts]
    for _, r in seen.watch(rounds(model, prompts, max_new, seen.timed)):
        for row, sure in zip(seen.sure, r.sure, strict=True):
            row += sure
    return seen


def span(text, origin=None, title=""):
    """A piece of text in HTML. The letters keep the page's own colour, light or dark; only the
    background and the line below are set."""
    hue, _, line, _ = STYLES.get(origin, [""] * 4)
    width = 3 if line == "double" else 2
    look = f"background:{hue}2b;border-bottom:{width}px {line} {hue};border-radius:3px"
    text = html.escape(text.translate(SIGNS))
    style = look if origin else "opacity:.7"
    return f'<span style="{style}" title="{html.escape(title)}">{text}</span>'


def text_html(seen):
    """What `record` returns: legend, texts and summary. A token's tooltip has its origin, its id
    and the target's own raw probability of it."""
    blocks = [" ".join(span(name, origin) for origin, (*_, name) in STYLES.items())]
    for prompt, row, sure in zip(seen.prompts, seen.rows, seen.sure, strict=True):
        block = span(prompt)
        for t, p in zip(row, sure, strict=True):
            if t.text:
                title = f"{t.origin}, id {t.id}, target's raw probability {p:.3g}"
                block += span(t.text, t.origin, title)
        blocks.append(block)
    style = "white-space:pre-wrap;word-break:normal;line-height:1.9;background:none;color:inherit"
    blocks.append(span(seen.summary()))
    return "".join(f'<pre style="{style}">{block}</pre>' for block in blocks)


def round_html(r, tokenizer):
    """A Round as a table: p, q and the verdict on each drafted token, then the row's new tokens. A
    token that was never tested is dead: it comes after a rejected token, after an end of text or
    after its row's draft."""
    def name(token):
        return f"{token} {tokenizer.decode([token], skip_special_tokens=False)!r}"

    drafted = r.draft.tokens[..., None]                                                 # (B, K, 1)
    q = r.draft.q
    p = r.p[:, : drafted.shape[1]].gather(2, drafted)[..., 0]                           # (B, K)
    q = torch.ones_like(p) if q is None else q.gather(2, drafted)[..., 0]               # (B, K)
    lines = ["<tr><th>row<th>drafted<th>p<th>q<th>verdict"]
    counts = zip(r.accepted.tolist(), r.proposed.tolist(), strict=True)
    for b, (accepted, proposed) in enumerate(counts):
        for k, token in enumerate(drafted[b, :, 0].tolist()):
            verdict = "dead"
            if k < accepted:
                verdict = "accepted"
            elif k == accepted < proposed:
                verdict = "rejected"
            cells = b, html.escape(name(token)), f"{p[b, k]:.3g}", f"{q[b, k]:.3g}", verdict
            lines.append("<tr>" + "".join(f"<td>{cell}" for cell in cells))
        new = zip(r.new[b], origins(r, b), strict=True)
        spans = (span(name(t), origin, origin) for t, origin in new)
        lines.append(f'<tr><td>{b}<td colspan="4" style="text-align:left">new: {" ".join(spans)}')
    return f"<table>{''.join(lines)}</table>"


def place(parents):
    """Where to draw each node of a tree: its depth, and its row. A first child stays in the row of
    its parent."""
    depth = {0: 0}
    row = {0: 0}
    todo = [0]
    rows = 0
    while todo:         # depth first, so that no lines cross
        node = todo.pop()
        if node > 0:
            parent = parents[node - 1]
            first = parents.index(parent) == node - 1
            rows += not first
            depth[node] = depth[parent] + 1
            row[node] = row[parent] if first else rows
        todo += [k for k in range(len(parents), 0, -1) if parents[k - 1] == node]
    return depth, row


def draw_tree(side, parents, words):
    """A tree from left to right, with a label for each node. Its hue is its rank among its
    siblings: blue, orange, green, pink. Node 0 is black."""
    depth, row = place(parents)
    hues = ["#404040", *(HUES[parents[:k].count(parent)] for k, parent in enumerate(parents))]
    for k, parent in enumerate(parents, 1):
        side.plot([depth[parent], depth[k]], [-row[parent], -row[k]], color=hues[k], lw=1.2,
                  zorder=0)
    for k, word in enumerate(words):
        side.text(depth[k], -row[k], word, ha="center", va="center", fontsize=9, parse_math=False,
                  bbox=dict(boxstyle="round", fc="white", ec=hues[k], lw=1.4))
    side.set(xlim=(-0.5, max(depth.values()) + 0.5), ylim=(-max(row.values()) - 0.6, 0.6))
    side.axis("off")


def tree_and_mask(parents, mask, names):
    """A drafted tree and the mask (K+1, K+1) of its block. Node 0 and each drafted token have a
    name."""
    figure, ((left, right),) = axes(1, 2, width=5.4)
    draw_tree(left, parents, names)
    left.set_title("the draft; blue, orange, green: first, second, third child", fontsize=10)
    right.imshow(mask, cmap="Blues", vmax=1.5)
    right.set_xticks(range(len(names)), names, rotation=90)
    right.set_yticks(range(len(names)), names)
    right.set_title("its mask: a row sees what is blue", fontsize=10)
    return figure


def draw_reading(side, head, L):
    """Notebook 9. What a trained head reads (squares), what it runs of the model (orange) and
    of its own (green), and which token it predicts (arrows). A column is a token, a row a height
    in the model; D, the last known token, is column 1. `explain_reading` has the legend."""
    exits = "exit_layer" in head.arguments
    top = head.taps[-1] // 2 + 1                                # how high it reads
    ground = top if exits else 0                                # where its own module stands
    # the height of an attention, a matrix, or a block
    tall = {"kangaroo": L / 12, "medusa": L / 12}.get(head.kind, L / 6)
    side.bar([-2, -1, 0], L, 0.7, color="#dce9f2")
    if exits:
        side.bar([1, 2, 3], top, 0.7, color="#f2d0b8")
    reads = {"eagle": range(-2, 1), "medusa": [0], "prophet": [0]}.get(head.kind, range(-2, 4))
    side.plot(list(reads), [top] * len(reads), "s", color=HUES[0], ms=7, zorder=3)
    side.set_xticks(range(-2, 5), ["", "", "read", "D", "+1", "+2", "+3"])
    side.set(title=head.kind.replace("_", " "), xlim=(-2.6, 4.4), ylim=(0, L * 1.45),
             yticks=[0, *([top] if exits else []), L])
    if head.kind == "medusa":
        for k in range(3):
            side.bar(0.4 * k - 0.4, tall, 0.3, bottom=L * 1.08, color=HUES[2])
            side.annotate("", (2 + k, L * (1.3 - 0.1 * k)), (0.4 * k - 0.25, L * 1.12),
                          arrowprops=dict(arrowstyle="->", color=HUES[1]))
        return
    side.bar([1, 2, 3], tall, 0.7, bottom=ground + L / 24, color=HUES[2])
    for k in range(3):
        side.annotate("", (2 + k, L * 1.38), (1 + k, ground + tall + L / 24),
                      arrowprops=dict(arrowstyle="->", color=HUES[1]))
    if not exits:                                               # states that enter its module
        passed = dict(arrowstyle="->", color="#606060", ls=":", lw=1.5)
        side.annotate("", (0.75, L / 8), (0, top), arrowprops=passed)
        for k in (1, 2) if head.kind == "eagle" else ():        # its own output
            side.plot([k + 0.36, k + 0.66], [L / 8, L / 8], color="#606060", ls=":", lw=2)


def explain_reading(side):
    """Notebook 9. The legend of `draw_reading`, on axes of its own."""
    side.axis("off")
    marks = ((Rectangle((0, 0), 1, 1, color="#dce9f2"), "computed by the target already"),
             (Line2D([], [], marker="s", color=HUES[0], ls=""), "a state that the head reads"),
             (Rectangle((0, 0), 1, 1, color="#f2d0b8"), "blocks of the model that drafting runs"),
             (Rectangle((0, 0), 1, 1, color=HUES[2]),
              "the head's own: an attention or\na matrix (low), a block (high)"),
             (Line2D([], [], color="#606060", ls=":"), "a state passed on"),
             (Line2D([], [], color=HUES[1]), "predicts this token"))
    side.legend(*zip(*marks, strict=True), loc="center", frameon=False, fontsize=9)


def draw_paths(paths, L):
    """Notebook 9. Which blocks run for which token, a chart for each {title: (the blocks that a
    drafted token runs, their hue, what it enters with)}. A column is a token, a row a block. What
    it enters with is None for the embedding, or (from, to), the blocks above which the state of the
    token before it is taken, and below which it goes on."""
    figure, (sides,) = axes(1, len(paths), width=3.4, height=3.2)
    for side, (title, (blocks, hue, jump)) in zip(sides, paths.items(), strict=True):
        side.bar([-2, -1, 0], L, 0.7, color="#dce9f2")
        for k in (1, 2, 3):
            for i in blocks:
                side.bar(k, 0.9, 0.7, bottom=i + 0.05, color=hue)
            if jump:
                start, end = jump
                side.annotate("", (k - 0.3, end), (k - 0.65, start),
                              arrowprops=dict(arrowstyle="->", color="#606060", ls=":", lw=1.5))
        side.set_xticks(range(-2, 4), ["", "", "read", "D", "+1", "+2"])
        side.set(title=title, ylim=(0, L), yticks=[0, L // 2, L])
    sides[0].set_ylabel("block")
    return figure
