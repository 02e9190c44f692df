"""What people look at: tokens coloured by where they came from, in a terminal, in a notebook, as a picture.

The one thing to remember: all of it consumes what `speculative.rounds` yields; the loop knows nothing of it.
"""
import html
import os
import re
import statistics
import sys
import time
from dataclasses import dataclass

import torch

from sampling import to_probs
from speculative import Drafter, Round, rounds

# origin: a hue that the colour-blind tell from the others (Okabe & Ito 2008); lest all depends on hue, how a
# terminal writes it (underlined, bold, dim) and the line below it elsewhere; its name in the legend
STYLES = {
    "accepted": ("#0072b2", "38;5;32", "solid", "accepted draft"),
    "correction": ("#d55e00", "4;38;5;166", "dashed", "correction"),
    "bonus": ("#009e73", "1;38;5;36", "double", "bonus token"),
    "plain": ("#808080", "2", "dotted", "plain"),
}
# trap: a model can write escape sequences that take over a terminal: control characters become visible signs
SIGNS = {c: 0x2400 + c for c in range(32) if chr(c) not in "\n\t"} | {127: 0x2421}
SIGNS |= dict.fromkeys(range(128, 160), "\ufffd")


def origins(round, b=0):
    """Where each of round.new[b] came from, as keys of STYLES: accepted drafts, then the correction of a
    refused one, the bonus behind a draft accepted to its end or, if nothing was proposed, a plain token."""
    accepted, proposed = int(round.accepted[b]), int(round.proposed[b])
    behind = "plain" if proposed == 0 else "bonus" if accepted == proposed else "correction"
    # an end-of-text id inside the accepted draft leaves nothing behind it
    return ["accepted"] * accepted + [behind] * (len(round.new[b]) - accepted)


def colours(stream):
    """Whether this stream is a terminal with colours whose user does not mind them (no-color.org)."""
    return stream.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")


def paint(pieces, colour=True):
    """(text, origin) pairs as one string that is safe to print; origin None is never painted."""
    safe = ((text.translate(SIGNS), origin) for text, origin in pieces)
    return "".join(f"\x1b[{STYLES[origin][1]}m{text}\x1b[0m" if colour and origin and text else text
                   for text, origin in safe)


def legend(colour=True):
    """One line for the terminal; without colours there is nothing to explain, and it is empty."""
    return "  ".join(paint([(name, origin)]) for origin, (*_, name) in STYLES.items()) if colour else ""


def span(text, origin=None, title=""):
    """A piece of text in HTML. The ink stays the page's own, light or dark; only what is around it is set."""
    hue, _, line, _ = STYLES.get(origin, [""] * 4)
    look = f"background:{hue}2b;border-bottom:{3 if line == 'double' else 2}px {line} {hue};border-radius:3px"
    text = html.escape(text.translate(SIGNS))
    return f'<span style="{look if origin else "opacity:.7"}" title="{html.escape(title)}">{text}</span>'


class Stream:
    """Token ids in, text out: a piece as soon as its characters are whole. Part of a character decodes to
    U+FFFD, which is held back while it ends the text."""

    def __init__(self, tokenizer, ids):
        self.decode, self.ids = tokenizer.decode, list(ids)
        self.text = self.decode(self.ids).rstrip("\ufffd")
        self.first, self.edge, self.shown = 0, 0, len(self.text)

    def push(self, token):
        """The text that this token completes: its own, also the bytes before it, or nothing yet."""
        self.ids.append(token)
        # trap: decoded alone, a token can lose its leading space: decode it behind the piece before it, no
        # more than that, or a long text would cost more per token than a short one
        text = self.decode(self.ids[self.first :])
        whole = text.rstrip("\ufffd")
        piece, self.shown = whole[self.shown :], max(self.shown, len(whole))
        if piece and whole == text:
            self.first, self.edge = self.edge, len(self.ids)
            self.shown = len(self.decode(self.ids[self.first :]))
        return piece

    def rest(self):
        """What is held back, when nothing more will come."""
        text = self.decode(self.ids[self.first :])
        piece, self.shown = text[self.shown :], max(self.shown, len(text))
        return piece


@dataclass
class Token:
    id: int
    origin: str  # a key of STYLES
    p: float     # what the target gave it, behind temperature and cuts: 1 when greedy
    text: str    # what it completed: nothing if it is special or a character waits for more bytes


class Generation:
    """A run as people see it: `prompts` (texts), `rows` of `Token`s behind them, and counts over all rows.

    prompts: lists of ids, as for `rounds`. timed: the run's `Timed` drafter, to know where the time went.
    """

    def __init__(self, tokenizer, prompts, timed=None):
        self.streams, self.timed = [Stream(tokenizer, prompt) for prompt in prompts], timed
        self.prompts, self.rows = [s.text for s in self.streams], [[] for _ in prompts]
        self.unseen = [[] for _ in prompts]  # what `fresh` has yet to hand out
        self.passes = self.proposed = self.accepted = 0
        self.turns = self.drafted = self.hits = 0  # by row: passes, those with a draft, its first accepted

    def watch(self, steps):
        """Hand on what `rounds` yields, taken in."""
        for state, round in steps:
            self.add(round)
            yield state, round
        self.close()

    def add(self, round):
        self.passes += 1
        counts = zip(round.new, round.proposed.tolist(), round.accepted.tolist(), strict=True)
        for b, (new, proposed, accepted) in enumerate(counts):
            self.proposed, self.accepted = self.proposed + proposed, self.accepted + accepted
            self.turns, self.drafted = self.turns + bool(new), self.drafted + bool(proposed)
            self.hits += bool(accepted)
            for i, (token, origin) in enumerate(zip(new, origins(round, b), strict=True)):
                text = self.streams[b].push(token)
                self.rows[b].append(Token(token, origin, float(round.p[b, i, token]), text))
                self.unseen[b].append((text, origin))

    def close(self):
        """No more rounds: what is left of a character shows as U+FFFD."""
        for row, stream, unseen in zip(self.rows, self.streams, self.unseen, strict=True):
            if row and (rest := stream.rest()):
                row[-1].text += rest
                unseen.append((rest, row[-1].origin))

    def fresh(self, colour=True, b=0):
        """What row b has to print since the last call. Ask once more behind the last round."""
        pieces, self.unseen[b] = self.unseen[b], []
        return paint(pieces, colour)

    def pieces(self, b=0):
        """(text, origin) of row b's prompt, whose origin is None, and of each of its tokens."""
        return [(self.prompts[b], None), *((t.text, t.origin) for t in self.rows[b])]

    def summary(self, plain=None):
        """Counts, where the time went, and what limits the speed-up, in up to four lines. plain: the seconds
        that a pass takes in plain decoding, if measured."""
        n, turns, parts = sum(map(len, self.rows)), max(1, self.turns), {}
        alpha = self.hits / max(1, self.drafted)
        batch = f" over {len(self.rows)} rows" if len(self.rows) > 1 else ""
        lines = [f"{n} tokens in {self.passes} passes{batch}: {n / turns:.2f} a pass (tau)"]
        if self.proposed:
            lines += [f"{self.accepted} of {self.proposed} drafted tokens accepted "
                      f"({self.accepted / self.proposed:.0%}), {alpha:.0%} of the first ones (alpha)"]
        if self.timed and self.passes:
            seconds = self.timed.seconds
            shares = (f"{name} {s / sum(seconds.values()):.0%}" for name, s in seconds.items())
            lines += ["time: " + ", ".join(shares)]
            one = plain or self.timed.single() or seconds["verify"] / self.passes
            parts = {name: s / self.passes / one for name, s in seconds.items()}
        sentence = limit(self.passes, n / turns, self.proposed / turns, alpha, self.drafted / turns, **parts)
        return "\n".join([*lines, sentence])

    def html(self):
        """Legend, texts and summary; a token's tooltip has its origin, id and p."""
        blocks = [" ".join(span(name, origin) for origin, (*_, name) in STYLES.items())]
        for prompt, row in zip(self.prompts, self.rows, strict=True):
            spans = (span(t.text, t.origin, f"{t.origin}, id {t.id}, p {t.p:.3g}") for t in row if t.text)
            blocks.append(span(prompt) + "".join(spans))
        style = "white-space:pre-wrap;line-height:1.9;background:none;color:inherit"
        return "".join(f'<pre style="{style}">{block}</pre>' for block in [*blocks, span(self.summary())])


def limit(passes, tau, gamma, alpha, share=1.0, draft=None, verify=1.0, loop=0.0):
    """One sentence: what keeps a run from being faster.

    Means over the passes: tau tokens came out; gamma were drafted, in a share of the passes any at all; of
    the first ones alpha were accepted. draft (None: not measured), verify and loop are times per pass, in
    passes over a single token. Each is made ideal in turn, and the one that gains most is the answer.
    """
    if gamma == 0:
        return "Nothing was drafted: every token cost a pass of the whole model."
    if passes < 8:
        return "The answer is too short to say what limits it: it took fewer than 8 passes."
    if draft is None:
        return f"A gain needs alpha > c: drafting a token must cost less than {alpha:.0%} of a target pass."
    c, cost = draft / gamma, draft + verify + loop
    if alpha <= c:
        return (f"No gain, as alpha <= c: {alpha:.0%} of the first drafts are accepted, but drafting a token "
                f"costs {c:.0%} of a target pass.")
    now = max(1, round(gamma / share))  # the length of a draft, where there is one
    # Leviathan et al. 2023, Theorem 3.8, with the measured costs
    speed = {g: sum(alpha**i for i in range(g + 1)) / (c * g + verify + loop) for g in range(now, now + 9)}
    best = max(speed, key=speed.get)
    gains = {
        f"Acceptance limits: {tau - 1:.1f} of {gamma:.1f} drafted tokens a pass are accepted; try a draft "
        "nearer to the target.": (gamma + 1) / tau,
        f"Drafting limits: it takes {draft / cost:.0%} of the time; try a cheaper draft, such as an earlier "
        "exit.": cost / (verify + loop),
        f"The block limits: on this machine a pass over it costs {verify:.1f} passes over a single "
        "token.": cost / (draft + min(1, verify) + loop),
        f"The loop limits: {loop / cost:.0%} of the time is spent outside drafter and "
        "target.": cost / (draft + verify),
        f"Short drafts limit: for alpha = {alpha:.0%} gamma {best} promises {speed[best] / speed[now]:.1f} "
        "times the speed.": speed[best] / speed[now],
        f"Proposals limit: only {share:.0%} of the passes had a draft to "
        "check.": (1 + (tau - 1) / share) / tau,
    }
    return max(gains, key=gains.get)


class Timed(Drafter):
    """Any drafter, with a stopwatch. `seconds`: what drafting (with `observe`), verifying and the rest of the
    loop took once the prompts were read; the rest includes whoever consumes the rounds. On CUDA every reading
    waits for the device, which costs a little of what it measures."""

    def __init__(self, drafter=None):
        self.drafter, self.now = drafter or Drafter(), 0.0
        self.seconds, self.verified = dict.fromkeys(("draft", "verify", "loop"), 0.0), []

    @property
    def wants_trace(self):
        return self.drafter.wants_trace

    def lap(self, state, part):
        if state.n.is_cuda:
            torch.cuda.synchronize(state.n.device)
        before, self.now = self.now, time.perf_counter()
        self.seconds[part] += self.now - before
        return self.now - before

    def begin(self, state, x):
        self.drafter.begin(state, x)
        self.lap(state, "loop")
        self.seconds, self.verified = dict.fromkeys(self.seconds, 0.0), []

    def propose(self, state):
        self.lap(state, "loop")
        draft = self.drafter.propose(state)
        self.lap(state, "draft")
        return draft

    def observe(self, state, round):
        self.verified.append((round.p.shape[1], self.lap(state, "verify")))
        self.drafter.observe(state, round)
        self.lap(state, "draft")

    def single(self):
        """The median seconds of a pass over a single token; None if there were fewer than three."""
        seconds = [s for block, s in self.verified if block == 1]
        return statistics.median(seconds) if len(seconds) > 2 else None


def record(model, tokenizer, prompts, max_new, drafter=None, probs=to_probs, coins=None, eos=()):
    """A whole run, timed, as a Generation. The arguments are those of `rounds`."""
    seen = Generation(tokenizer, prompts, Timed(drafter))
    for _ in seen.watch(rounds(model, prompts, max_new, seen.timed, probs, coins, eos)):
        pass
    return seen


def round_html(round, tokenizer=None):
    """A Round as a table: p, q and the verdict on each drafted token (dead: behind a refusal, an end of text,
    the row's own length), then the row's new tokens. A tokenizer puts texts beside the ids."""

    def name(token):
        text = tokenizer and tokenizer.decode([token], skip_special_tokens=False)
        return f"{token} {text!r}" if tokenizer else f"{token}"

    x, q = round.draft.tokens[..., None], round.draft.q                                 # (B, K, 1)
    p = round.p[:, : x.shape[1]].gather(2, x)[..., 0]                                   # (B, K)
    q = torch.ones_like(p) if q is None else q.gather(2, x)[..., 0]                     # (B, K)
    lines = ["<tr><th>row<th>drafted<th>p<th>q<th>verdict"]
    for b, (new, accepted) in enumerate(zip(round.new, round.accepted.tolist(), strict=True)):
        for k, token in enumerate(x[b, :, 0].tolist()):
            refused = k == accepted < min(int(round.proposed[b]), len(new))  # there is a token in its place
            verdict = "accepted" if k < accepted else "refused" if refused else "dead"
            cells = b, html.escape(name(token)), f"{p[b, k]:.3g}", f"{q[b, k]:.3g}", verdict
            lines.append("<tr>" + "".join(f"<td>{cell}" for cell in cells))
        spans = (span(name(t), origin, origin) for t, origin in zip(new, origins(round, b), strict=True))
        lines.append(f'<tr><td>{b}<td colspan="4" style="text-align:left">new: {" ".join(spans)}')
    return f"<table>{''.join(lines)}</table>"


def wrap(pieces, columns):
    """Break (text, origin) pairs into lines, between words, which may span pieces. Returns a list of (line,
    column, text, origin): what to draw, without the blanks between words."""
    pieces = [(text.translate(SIGNS).replace("\t", "  "), origin) for text, origin in pieces]
    owner = [i for i, (text, _) in enumerate(pieces) for _ in text]
    drawn, line, column = {}, 0, 0  # (line, piece): its first column, its text
    for word in re.finditer(r"\n|[^\S\n]|\S+", "".join(text for text, _ in pieces)):
        full = column and column + len(word[0]) > columns
        if word[0] == "\n" or full:
            line, column = line + 1, 0
        if word[0] == "\n" or full and word[0].isspace():
            continue
        for i, c in zip(owner[slice(*word.span())], word[0], strict=True):
            line, column = (line, column) if column < columns else (line + 1, 0)  # within a very long word
            first, text = drawn.get((line, i), (column, ""))
            drawn[line, i], column = (first, text + c), column + 1
    return [(line, first + len(text) - len(text.lstrip()), text.strip(), pieces[i][1])
            for (line, i), (first, text) in drawn.items() if text.strip()]


def picture(generation, path, b=0, columns=72):
    """Draw row b into a PNG or SVG file, as the name ends. Needs matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch

    # points; a character of DejaVu Sans Mono is 1233/2048 of its size wide: 8, as only whole pixels stay put
    wide, pitch, margin, size = 8, 27, 20, 8 * 2048 / 1233
    shown, at = wrap(generation.pieces(b), columns), 0
    last = max((line for line, *_ in shown), default=0)
    for origin, (*_, name) in STYLES.items():
        if count := sum(t.origin == origin for t in generation.rows[b]):
            shown += [(-1.7, at, name, origin), (-1.7, at + len(name) + 1, str(count), None)]
            at += len(name) + len(str(count)) + 4
    shown.append((last + 1.7, 0, generation.summary().split("\n")[0], None))
    width, height = columns * wide + 2 * margin, (last + 4.4) * pitch + 2 * margin
    figure = Figure(figsize=(width / 72, height / 72), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    for line, column, text, origin in shown:
        x, y, w, h = margin + column * wide, margin + (line + 2.2) * pitch, len(text) * wide, pitch * 0.74
        if origin:
            hue, _, style, _ = STYLES[origin]
            shape = FancyBboxPatch((x, y - h / 2), w, h, "round,pad=0,rounding_size=3.5")
            axes.add_patch(shape).set(facecolor=hue + "2b", edgecolor="none")
            dashes = {"dashed": (0, (2, 1.2)), "dotted": (0, (1, 1.5))}.get(style, "-")
            for up in (0, 2.4) if style == "double" else (0,):
                axes.plot([x + 2, x + w - 2], [y + h / 2 - up] * 2, color=hue, lw=1.3, ls=dashes)
        axes.text(x, y, text, family="DejaVu Sans Mono", size=size, color="#1a1a1a" if origin else "#666666",
                  va="center_baseline", parse_math=False)
    figure.savefig(path, dpi=144)


def register():
    """Show Rounds and Generations as HTML, if this module is imported into a running IPython."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None:
        formatter = shell.display_formatter.formatters["text/html"]
        formatter.for_type(Round, round_html)
        formatter.for_type(Generation, Generation.html)


register()
