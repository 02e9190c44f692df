"""Draws docs/loop.svg: one round of the loop, the files it passes through, and what flows between them.

    python docs/loop.py
"""
from html import escape
from pathlib import Path

WIDE = 172      # of a box
HIGH = 62
BOXES = {       # name: (x, y, the file, what it does there)
    "state": (24, 40, "speculative.py", "State: slot = position"),
    "draft": (294, 40, "layerskip.py, methods/", "propose: tokens and q"),
    "embed": (564, 40, "model.py", "embed"),
    "run": (564, 158, "model.py", "run: 2L sub-layers"),
    "unembed": (564, 276, "model.py", "unembed"),
    "probs": (294, 276, "sampling.py", "to_probs"),
    "verify": (24, 276, "verification.py", "verify: min(1, p / q)"),
    "commit": (24, 158, "speculative.py", "commit"),
    "cache": (294, 158, "kvcache.py", "(L, B, Hkv, S, D)")}
ARROWS = (      # from, to, what flows, its shape
    ("state", "draft", "tokens", "(B, S)"),
    ("draft", "embed", "D and draft", "(B, K+1)"),
    ("embed", "run", "x", "(B, K+1, dim)"),
    ("run", "unembed", "x", "(B, K+1, dim)"),
    ("unembed", "probs", "logits", "(B, K+1, V)"),
    ("probs", "verify", "p", "(B, K+1, V)"),
    ("verify", "commit", "accepted, next", "(B,)"),
    ("commit", "state", "n grows", "(B,)"))
STYLE = """
  .page { fill: #ffffff } .box { fill: #eef3f8; stroke: #0072b2 } .side { fill: #f6f1e7; stroke: #b07d00 }
  text { fill: #1a1a1a; font: 13px sans-serif; text-anchor: middle } .file { font-weight: bold }
  .shape { font: 12px monospace } .left { text-anchor: end } .right { text-anchor: start }
  line { stroke: #555555; stroke-width: 1.6 } .head { fill: #555555 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } .box { fill: #14253a; stroke: #56b4e9 } .side { fill: #2b2413; stroke: #e0b050 }
    text { fill: #e6e6e6 } line { stroke: #aaaaaa } .head { fill: #aaaaaa }
  }"""


def text(x, y, words, kind=""):
    return f'<text x="{x}" y="{y}" class="{kind}">{escape(words)}</text>'


def box(name):
    x, y, file, does = BOXES[name]
    kind = "side" if name == "cache" else "box"
    middle = x + WIDE / 2
    return [f'<rect x="{x}" y="{y}" width="{WIDE}" height="{HIGH}" rx="8" class="{kind}"/>',
            text(middle, y + 26, file, "file"), text(middle, y + 46, does)]


def ends(start, stop):
    """Where an arrow between two boxes in one row or one column begins and ends."""
    (ax, ay, *_), (bx, by, *_) = BOXES[start], BOXES[stop]
    if ay == by:
        first, last = (ax + WIDE, bx) if bx > ax else (ax, bx + WIDE)
        return first, ay + HIGH / 2, last, ay + HIGH / 2
    first, last = (ay + HIGH, by) if by > ay else (ay, by + HIGH)
    return ax + WIDE / 2, first, ax + WIDE / 2, last


def arrow(start, stop, flows="", shape="", both=False):
    x1, y1, x2, y2 = ends(start, stop)
    way = ' marker-start="url(#head)"' if both else ""
    drawn = [f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" marker-end="url(#head)"{way}/>']
    if x1 == x2:    # a column: words beside it
        middle = (y1 + y2) / 2
        return [*drawn, text(x1 - 10, middle + 4, flows, "left"),
                text(x1 + 10, middle + 4, shape, "shape right")]
    middle = (x1 + x2) / 2
    return [*drawn, text(middle, y1 - 9, flows), text(middle, y1 + 20, shape, "shape")]


def picture():
    parts = [part for name in BOXES for part in box(name)]
    for row in ARROWS:
        parts += arrow(*row)
    parts += arrow("run", "cache", "keys, values", both=True)
    parts.append(text(380, 22, "one round: B rows of text, K drafted tokens after the last known one, D"))
    return "\n".join([
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 360">', f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path class="head" d="M0 0L8 4L0 8z"/></marker></defs>',
        '<rect class="page" width="760" height="360" rx="10"/>', *parts, "</svg>", ""])


if __name__ == "__main__":
    Path(__file__).with_name("loop.svg").write_text(picture(), encoding="utf-8")
