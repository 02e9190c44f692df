"""Draws docs/loop.svg, one round of the loop, and docs/house.svg, the files. Both show what crosses
from one file to the next, with its shape.

    python docs/pictures.py
"""
from html import escape
from pathlib import Path
from typing import NamedTuple

STYLE = """
  .page { fill: #ffffff }
  .box { fill: #eef3f8; stroke: #0072b2 } .side { fill: #f6f1e7; stroke: #b07d00 }
  text { fill: #1a1a1a; font: 13px sans-serif; text-anchor: middle } .file { font-weight: bold }
  .shape { font: 12px monospace } .left { text-anchor: end } .right { text-anchor: start }
  line { stroke: #555555; stroke-width: 1.6 } .head { fill: #555555 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 }
    .box { fill: #14253a; stroke: #56b4e9 } .side { fill: #2b2413; stroke: #e0b050 }
    text { fill: #e6e6e6 } line { stroke: #aaaaaa } .head { fill: #aaaaaa }
  }"""


class Box(NamedTuple):
    """lines: the first is bold."""
    x: int
    y: int
    lines: tuple
    wide: int = 172
    high: int = 62
    kind: str = "box"


class Arrow(NamedTuple):
    """From one box to another in the same row or column, with what flows and its shape. at: its
    place on the shared side, from 0 to 1. both: it has two heads."""
    start: str
    stop: str
    flows: str
    shape: str = ""
    at: float = 0.5
    both: bool = False


LOOP = {
    "state": Box(24, 40, ("speculative.py", "State: slot = position")),
    "draft": Box(294, 40, ("layerskip.py, methods/", "propose: tokens and q")),
    "embed": Box(564, 40, ("model.py", "embed")),
    "run": Box(564, 158, ("model.py", "run: 2L sub-layers")),
    "unembed": Box(564, 276, ("model.py", "unembed")),
    "probs": Box(294, 276, ("sampling.py", "to_probs")),
    "verify": Box(24, 276, ("verification.py", "verify: min(1, p / q)")),
    "commit": Box(24, 158, ("speculative.py", "commit")),
    "cache": Box(294, 158, ("kvcache.py", "(L, B, Hkv, S, D)"), kind="side")}
ROUND = (
    Arrow("state", "draft", "tokens", "(B, S)"),
    Arrow("draft", "embed", "D and draft", "(B, K+1)"),
    Arrow("embed", "run", "x", "(B, K+1, dim)"),
    Arrow("run", "unembed", "x", "(B, K+1, dim)"),
    Arrow("unembed", "probs", "logits", "(B, K+1, V)"),
    Arrow("probs", "verify", "p", "(B, K+1, V)"),
    Arrow("verify", "commit", "accepted, next", "(B,)"),
    Arrow("commit", "state", "n grows", "(B,)"),
    Arrow("run", "cache", "keys, values", both=True))

HOUSE = {
    "support": Box(16, 40, ("support/", "what they show"), wide=150),
    "commands": Box(260, 40, ("generate.py, search.py", "the commands"), wide=240),
    "folder": Box(16, 232, ("checkpoint.py", "families.py, files.py"), wide=150),
    "root": Box(260, 170, ("the library, in reading order", "model.py, kvcache.py",
                           "sampling.py, verification.py", "drafter.py, speculative.py",
                           "layerskip.py, control.py", "", "minimal.py: all on one page"),
                wide=240, high=186),
    "methods": Box(596, 170, ("methods/", "heads, trees,", "suffix decoding,", "Pace: one method,",
                              "one file"), wide=148, high=186),
    "machine": Box(260, 424, ("machine/", "the same pass, faster"), wide=240),
    "others": Box(16, 424, ("lab/  notebooks/  tests/", "exercises/, porting/",
                            "import all of these"), wide=190, high=72, kind="side")}
DOORS = (
    Arrow("commands", "support", "State, Round", "(B, K+1)"),
    Arrow("commands", "root", "prompts", "B lists", at=0.1),
    Arrow("root", "commands", "new tokens", "B lists", at=0.9),
    Arrow("folder", "root", "weights", "(out, in)"),
    Arrow("root", "methods", "tokens", "(B, S)", at=0.18),
    Arrow("root", "methods", "states", "(B, T, dim)", at=0.5),
    Arrow("methods", "root", "draft, q", "(B, K, V)", at=0.82),
    Arrow("root", "machine", "x", "(B, T, dim)", both=True))


def text(x, y, words, kind=""):
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>'


def draw(box):
    drawn = [f'<rect x="{box.x}" y="{box.y}" width="{box.wide}" height="{box.high}" rx="8" '
             f'class="{box.kind}"/>']
    y = box.y + box.high / 2 + 5 - 10 * (len(box.lines) - 1)
    for k, words in enumerate(box.lines):
        drawn.append(text(box.x + box.wide / 2, y + 20 * k, words, "" if k else "file"))
    return drawn


def overlap(a, a_size, b, b_size, at):
    """A place on what two sides have in common."""
    low = max(a, b)
    high = min(a + a_size, b + b_size)
    return low + at * (high - low)


def ends(a, b, at):
    """Where an arrow between two boxes in one row or one column begins and ends."""
    if a.x + a.wide < b.x or b.x + b.wide < a.x:
        y = overlap(a.y, a.high, b.y, b.high, at)
        first, last = (a.x + a.wide, b.x) if b.x > a.x else (a.x, b.x + b.wide)
        return first, y, last, y
    x = overlap(a.x, a.wide, b.x, b.wide, at)
    first, last = (a.y + a.high, b.y) if b.y > a.y else (a.y, b.y + b.high)
    return x, first, x, last


def connect(boxes, arrow):
    x1, y1, x2, y2 = ends(boxes[arrow.start], boxes[arrow.stop], arrow.at)
    way = ' marker-start="url(#head)"' if arrow.both else ""
    drawn = [f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" '
             f'marker-end="url(#head)"{way}/>']
    if x1 == x2:    # a column: words beside it
        middle = (y1 + y2) / 2
        return [*drawn, text(x1 - 10, middle + 4, arrow.flows, "left"),
                text(x1 + 10, middle + 4, arrow.shape, "shape right")]
    middle = (x1 + x2) / 2
    return [*drawn, text(middle, y1 - 9, arrow.flows), text(middle, y1 + 20, arrow.shape, "shape")]


def picture(title, boxes, arrows, high):
    parts = [part for box in boxes.values() for part in draw(box)]
    parts += [part for arrow in arrows for part in connect(boxes, arrow)]
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {high}">',
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" '
        'markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path class="head" d="M0 0L8 4L0 8z"/></marker></defs>',
        f'<rect class="page" width="760" height="{high}" rx="10"/>', *parts, text(380, 22, title),
        "</svg>", ""])


if __name__ == "__main__":
    here = Path(__file__).parent
    loop = "one round: B rows of text, K drafted tokens after the last known one, D"
    (here / "loop.svg").write_text(picture(loop, LOOP, ROUND, 360), encoding="utf-8")
    house = "the house: its rooms, and what passes through their doors"
    (here / "house.svg").write_text(picture(house, HOUSE, DOORS, 512), encoding="utf-8")
