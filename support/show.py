"""A run for the eye: tokens coloured by where they came from, in a terminal or as a picture.

Everything here consumes what `speculative.rounds` yields; the loop does not know about it.
"""
import html
import os
import re
from dataclasses import dataclass

from support.files import write_file
from support.stats import Counts

# Where a token came from: a hue that colour-blind readers can tell apart (Okabe & Ito 2008), the codes for a
# terminal (underline, bold or dim, too, not only a hue), the line below it elsewhere, the name in the legend.
STYLES = {
    "accepted": ("#0072b2", "38;5;32", "solid", "accepted draft"),
    "correction": ("#d55e00", "4;38;5;166", "dashed", "correction"),
    "bonus": ("#009e73", "1;38;5;29", "double", "bonus token"),
    "plain": ("#808080", "2", "dotted", "plain"),
}
# trap: a model can write escape sequences that take over a terminal: control characters become visible signs
SIGNS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
SIGNS |= dict.fromkeys(range(128, 160), "\ufffd")
SIGNS |= dict.fromkeys((*range(0xD800, 0xE000), 0xFFFE, 0xFFFF), "\ufffd")     # no characters of XML


def origins(r, b=0):
    """Where each of r.new[b] came from, as keys of STYLES: accepted drafts, then the correction of a rejected
    one, the bonus after a draft that was accepted whole or, if nothing was drafted, a plain token."""
    accepted, proposed = int(r.accepted[b]), int(r.proposed[b])
    last = "plain" if proposed == 0 else "bonus" if accepted == proposed else "correction"
    # nothing follows an end-of-text id inside the accepted draft
    return ["accepted"] * accepted + [last] * (len(r.new[b]) - accepted)


def colours(stream):
    """Whether this stream is a terminal with colours, and its user wants them (no-color.org)."""
    return stream.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")


def paint(pieces, colour=True):
    """(text, origin) pairs as one string that is safe to print. Text of origin None has no colour."""
    return "".join(f"\x1b[{STYLES[origin][1]}m{text}\x1b[0m" if colour and origin and text else text
                   for raw, origin in pieces for text in [raw.translate(SIGNS)])


def legend(colour=True):
    """One line for the terminal, empty without colours: then there is nothing to explain."""
    return "  ".join(paint([(name, origin)]) for origin, (*_, name) in STYLES.items()) if colour else ""


class Stream:
    """Token ids in, text out: each piece of text as soon as its characters are complete. Part of a character
    decodes to U+FFFD, which is held back while it is at the end of the text."""

    def __init__(self, tokenizer, ids):
        self.decode, self.ids = tokenizer.decode, list(ids)
        self.text = self.decode(self.ids)
        if self.text.endswith("\ufffd") and not spelt_out(tokenizer, self.ids):
            self.text = self.text.rstrip("\ufffd")
        self.shown = len(self.text)

    def push(self, token):
        """The text that this token completes: its own, with bytes of earlier tokens, or nothing yet."""
        self.ids.append(token)
        # trap: decoded alone, a token can lose its leading space
        return self.read(self.decode(self.ids).rstrip("\ufffd"))

    def rest(self):
        """What was held back. Call it after the last token."""
        return self.read(self.decode(self.ids))

    def read(self, whole):
        piece, self.shown = whole[self.shown :], max(self.shown, len(whole))
        return piece


def spelt_out(tokenizer, ids):
    """Whether a prompt whose text ends with U+FFFD holds that character: part of another one would
    not be encoded so again."""
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    return tokenizer.encode(whole, add_special_tokens=False).ids[-1:] == ids[-1:]


@dataclass
class Token:
    id: int
    origin: str  # a key of STYLES
    p: float     # the target's own raw probability of it: softmax of the logits, before temperature and cuts
    text: str    # what it completed: nothing if it is special, or if its character needs more bytes


class Generation:
    """A run as text: `prompts` (texts), `rows` (the `Token`s after each of them) and `counts`.

    prompts: lists of ids, as for `rounds`. timed: the run's `Timed` drafter, which knows where the time went.
    """

    def __init__(self, tokenizer, prompts, timed=None):
        self.streams = [Stream(tokenizer, prompt) for prompt in prompts]
        self.prompts, self.rows = [s.text for s in self.streams], [[] for _ in prompts]
        self.unseen = [[] for _ in prompts]     # what `fresh` has not returned yet
        self.counts, self.timed = Counts(), timed

    def watch(self, steps):
        """Add what `rounds` yields, and yield it again."""
        for state, r in steps:
            self.add(r)
            yield state, r
        self.close()

    def add(self, r):
        self.counts.add(r)
        for b, (new, sure) in enumerate(zip(r.new, r.sure, strict=True)):
            for token, p, origin in zip(new, sure, origins(r, b), strict=True):
                text = self.streams[b].push(token)
                self.rows[b].append(Token(token, origin, p, text))
                self.unseen[b].append((text, origin))

    def close(self):
        """After the last round: an incomplete character is shown as U+FFFD."""
        for row, stream, unseen in zip(self.rows, self.streams, self.unseen, strict=True):
            if row and (rest := stream.rest()):
                row[-1].text += rest
                unseen.append((rest, row[-1].origin))

    def fresh(self, colour=True, b=0):
        """What row b has written since the last call, to print. Call it once more after the last round."""
        pieces, self.unseen[b] = self.unseen[b], []
        return paint(pieces, colour)

    def summary(self):
        """Up to three lines: counts, and where the time went."""
        n, rows = self.counts, len(self.rows)
        lines = [f"{n.tokens} token{'s' * (n.tokens != 1)} in {n.passes} pass{'es' * (n.passes != 1)}"
                 f"{f' over {rows} rows' * (rows > 1)}: {n.tau:.2f} per pass (tau)"]
        if n.proposed:
            lines += [f"{n.accepted} of {n.proposed} drafted tokens accepted "
                      f"({n.accepted / n.proposed:.0%}), {n.alpha:.0%} of the first ones (alpha)"]
        if self.timed and n.proposed:
            seconds = self.timed.seconds
            parts = ", ".join(f"{part} {s / sum(seconds.values()):.0%}" for part, s in seconds.items())
            lines += [f"time: {parts}"]
        return "\n".join(lines)


def picture(generation, path, columns=72, wide=8, pitch=27, margin=20):
    """Draw the first text as an SVG file: a box per token, in lines of at most `columns` characters."""
    row, boxes, line, column = generation.rows[0], [], 2, 0     # boxes: [(line, column, text, origin)]
    pieces = [(word, None) for word in re.findall(r"\s*\S+", generation.prompts[0])]
    pieces += [(t.text, t.origin) for t in row]
    rest = "".join(text for text, _ in pieces)
    for token, origin in pieces:
        word, rest = re.match(r"\s*\S*", rest)[0], rest[len(token) :]  # lines break between words
        for i, text in enumerate(token.translate(SIGNS).split("\n")):
            if i or column + max(len(text), len(word) * text.startswith(" ")) > columns:
                line, column, text = line + 1, 0, text.lstrip()
            bare = text.strip()
            boxes += [(line, column + text.index(bare), bare, origin)] if bare else []
            column += len(text)
    width, height, column = columns * wide + 2 * margin, pitch * (line + 3) + 2 * margin, 0
    boxes.append((line + 2, 0, generation.summary().split("\n")[0], None))
    for origin, (*_, name) in STYLES.items():
        if count := sum(t.origin == origin for t in row):
            boxes += [(0, column, name, origin), (0, column + len(name) + 1, str(count), None)]
            column += len(name) + len(str(count)) + 4
    drawn = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="13" '
             'font-family="monospace"><rect width="100%" height="100%" fill="white"/>']
    for line, column, text, origin in boxes:
        x, y, w = margin + wide * column, margin + pitch * line, wide * len(text)
        if origin:
            hue, _, style, _ = STYLES[origin]
            drawn.append(f'<rect x="{x}" y="{y}" width="{w}" height="20" rx="3" fill="{hue}" opacity=".17"/>')
            dashes = {"dashed": "5 3", "dotted": "2 3"}.get(style, "")
            for up in (0, 3) if style == "double" else (0,):
                drawn.append(f'<path d="M{x + 2} {y + 20 - up}h{w - 4}" stroke="{hue}" stroke-width="1.5" '
                             f'stroke-dasharray="{dashes}"/>')
        drawn.append(f'<text x="{x}" y="{y + 14}" textLength="{w}" fill="{"#1a1a1a" if origin else "#666"}">'
                     f'{html.escape(text)}</text>')
    write_file(path, "\n".join([*drawn, "</svg>\n"]))
