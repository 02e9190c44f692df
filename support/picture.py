"""A run as an SVG file, with a box per token."""
import html
import re

from machine.files import write_file
from support.show import SIGNS, STYLES

COLUMNS = 72    # characters of a line of the picture
WIDE = 8        # pixels of a character
PITCH = 27      # pixels from line to line
MARGIN = 20
DASHES = {"dashed": "5 3", "dotted": "2 3"}


def draw(generation, path):
    """Draw the first text as an SVG file, with a box per token. The legend stands above it, and the
    counts below."""
    row = generation.rows[0]
    pieces = []
    for origin, (*_, name) in STYLES.items():
        count = sum(t.origin == origin for t in row)
        if count:
            pieces += [(name, origin), (f" {count}   ", None)]
    pieces.append(("\n\n", None))
    pieces += [(word, None) for word in re.findall(r"\s*\S+", generation.prompts[0])]
    pieces += [(t.text, t.origin) for t in row]
    pieces.append(("\n\n" + generation.summary().split("\n")[0], None))
    boxes, lines = laid_out(pieces)
    drawn = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {COLUMNS * WIDE + 2 * MARGIN} '
             f'{lines * PITCH + 2 * MARGIN}" font-size="13" font-family="monospace">'
             '<rect width="100%" height="100%" fill="white"/>']
    for line, column, text, origin in boxes:
        x = MARGIN + WIDE * column
        y = MARGIN + PITCH * line
        w = WIDE * len(text)
        ink = "#666"
        if origin:
            ink = "#1a1a1a"
            hue, _, style, _ = STYLES[origin]
            drawn.append(f'<rect x="{x}" y="{y}" width="{w}" height="20" rx="3" fill="{hue}" '
                         'opacity=".17"/>')
            for up in (0, 3) if style == "double" else (0,):
                drawn.append(f'<path d="M{x + 2} {y + 20 - up}h{w - 4}" stroke="{hue}" '
                             f'stroke-width="1.5" stroke-dasharray="{DASHES.get(style, "")}"/>')
        drawn.append(f'<text x="{x}" y="{y + 14}" textLength="{w}" fill="{ink}">'
                     f"{html.escape(text)}</text>")
    write_file(path, "\n".join([*drawn, "</svg>\n"]))


def laid_out(pieces):
    """[(line, column, text, origin)] of (text, origin) pairs, and the number of lines. Lines break
    between words."""
    boxes = []
    line = 0
    column = 0
    rest = "".join(text for text, _ in pieces)
    for token, origin in pieces:
        word = re.match(r"\s*\S*", rest)[0]
        rest = rest[len(token) :]
        for i, text in enumerate(token.translate(SIGNS).split("\n")):
            needed = max(len(text), len(word)) if text.startswith(" ") else len(text)
            if i or column + needed > COLUMNS:
                line += 1
                column = 0
                text = text.lstrip()
            bare = text.strip()
            if bare:
                boxes.append((line, column + text.index(bare), bare, origin))
            column += len(text)
    return boxes, line + 1
