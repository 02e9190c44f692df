"""A run for the eye, with tokens coloured by where they came from.

Everything here consumes what `speculative.rounds` yields; the loop does not know about it.
"""
import os
from dataclasses import dataclass

from support.stats import Counts

# Where a token came from: a hue that colour-blind readers can tell apart (Okabe & Ito 2008), the
# codes for a terminal (also underline, bold or dim, not only a hue), the line below it elsewhere,
# the name in the legend.
STYLES = {
    "accepted": ("#0072b2", "38;5;32", "solid", "accepted draft"),
    "correction": ("#d55e00", "4;38;5;166", "dashed", "correction"),
    "bonus": ("#009e73", "1;38;5;29", "double", "bonus token"),
    "plain": ("#808080", "2", "dotted", "plain"),
}
# trap: a model can write escape sequences that take over a terminal, so control characters become
# visible signs
SIGNS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
SIGNS |= dict.fromkeys(range(128, 160), "\ufffd")
SIGNS |= dict.fromkeys((*range(0xD800, 0xE000), 0xFFFE, 0xFFFF), "\ufffd")  # no characters of XML


def origins(r, b=0):
    """Where each of r.new[b] came from, as keys of STYLES. Accepted drafts come first. The last
    token is the correction of a rejected one, the bonus after a draft that was accepted whole or,
    if nothing was drafted, a plain token."""
    accepted = int(r.accepted[b])
    proposed = int(r.proposed[b])
    last = "correction"
    if proposed == 0:
        last = "plain"
    elif accepted == proposed:
        last = "bonus"
    # nothing follows an end-of-text id inside the accepted draft
    return ["accepted"] * accepted + [last] * (len(r.new[b]) - accepted)


def colours(stream):
    """Whether this stream is a terminal with colours, and its user wants them (no-color.org)."""
    return stream.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")


def paint(pieces, colour=True):
    """(text, origin) pairs as one string that is safe to print. Text of origin None has no
    colour."""
    painted = []
    for raw, origin in pieces:
        text = raw.translate(SIGNS)
        if colour and origin and text:
            text = f"\x1b[{STYLES[origin][1]}m{text}\x1b[0m"
        painted.append(text)
    return "".join(painted)


class Stream:
    """Turns token ids into text, each piece as soon as its characters are complete. Part of a
    character decodes to U+FFFD, which is held back while it is at the end of the text.

    Only the ids since the last token that was complete by itself are decoded again."""

    def __init__(self, tokenizer, ids):
        self.decode = tokenizer.decode
        self.ids = list(ids)    # at first the prompt
        self.text = self.decode(self.ids)
        if self.text.endswith("\ufffd") and not spelt_out(tokenizer, self.ids):
            self.text = self.text.rstrip("\ufffd")
        self.shown = len(self.text)

    def push(self, token):
        """The text that this token completes, which may include bytes of earlier tokens, or be
        nothing yet."""
        self.ids.append(token)
        whole = self.decode(self.ids)
        piece = self.advance(whole.rstrip("\ufffd"))
        alone = self.decode([token])
        if piece and alone and whole.endswith(alone) and "\ufffd" not in alone:
            # trap: decoded alone, the next token would lose its leading space, so this one stays
            self.ids = [token]
            self.shown = len(alone)
        return piece

    def rest(self):
        """What was held back. Call it after the last token."""
        return self.advance(self.decode(self.ids))

    def advance(self, whole):
        piece = whole[self.shown :]
        self.shown = max(self.shown, len(whole))
        return piece


def spelt_out(tokenizer, ids):
    """Whether a prompt whose text ends with U+FFFD holds that very character. Part of another one
    would not be encoded in this way again."""
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    return tokenizer.encode(whole, add_special_tokens=False).ids[-1:] == ids[-1:]


@dataclass
class Token:
    id: int
    origin: str  # a key of STYLES
    text: str    # what it completed, or "" if it is special or its character needs more bytes


class Generation:
    """A run as text, with `prompts` (texts), `rows` (the `Token`s after each of them) and `counts`.

    `prompts` are given as lists of ids, as for `rounds`. `timed` is the run's `Timed` drafter,
    which knows where the time went.
    """

    def __init__(self, tokenizer, prompts, timed=None):
        self.ids = prompts
        self.streams = [Stream(tokenizer, prompt) for prompt in prompts]
        self.prompts = [stream.text for stream in self.streams]
        self.rows = [[] for _ in prompts]
        self.unseen = [[] for _ in prompts]     # what `fresh` has not returned yet
        self.counts = Counts()
        self.timed = timed

    def watch(self, steps):
        """Add what `rounds` yields, and yield it again."""
        for state, r in steps:
            self.add(r)
            yield state, r
        self.close()

    def add(self, r):
        self.counts.add(r)
        for b, new in enumerate(r.new):
            for token, origin in zip(new, origins(r, b), strict=True):
                text = self.streams[b].push(token)
                self.rows[b].append(Token(token, origin, text))
                self.unseen[b].append((text, origin))

    def close(self):
        """Call it after the last round. An incomplete character is shown as U+FFFD."""
        for row, stream, unseen in zip(self.rows, self.streams, self.unseen, strict=True):
            rest = stream.rest()
            if row and rest:
                row[-1].text += rest
                unseen.append((rest, row[-1].origin))

    def fresh(self, colour=True, b=0):
        """What row b has written since the last call, to print. Call it once more after the last
        round."""
        pieces = self.unseen[b]
        self.unseen[b] = []
        return paint(pieces, colour)

    def print_all(self, colour, chat):
        """Print every row, a blank line after each, after its prompt unless it is a chat."""
        for b, prompt in enumerate(self.prompts):
            opening = "" if chat else paint([(prompt, None)])
            print(opening + self.fresh(colour, b), end="\n\n")

    def summary(self):
        """Up to three lines about the counts and where the time went."""
        n = self.counts
        line = f"{n.tokens} token{'s' * (n.tokens != 1)} in {n.passes} pass{'es' * (n.passes != 1)}"
        if len(self.rows) > 1:
            line += f" over {len(self.rows)} rows"
        lines = [f"{line}: {n.tau:.2f} per pass (tau)"]
        if n.proposed:
            lines.append(f"{n.accepted} of {n.proposed} drafted tokens accepted "
                         f"({n.accepted / n.proposed:.0%}), {n.alpha:.0%} of the first ones "
                         "(alpha)")
        if self.timed and self.timed.waits and n.proposed:
            total = sum(self.timed.seconds.values())
            parts = [f"{part} {s / total:.0%}" for part, s in self.timed.seconds.items()]
            lines.append(f"time: {', '.join(parts)}")
        return "\n".join(lines)
