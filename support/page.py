"""A run as one page to step through. It is `page.html` with the run in it as data, and needs no
network."""
import json
from itertools import takewhile
from pathlib import Path

import torch

from machine.files import write_file
from model import Refused
from sampling import Coins, one_hot, raw_probs, to_probs
from support.show import SIGNS, STYLES, Stream, origins

TEMPLATE = Path(__file__).with_name("page.html")
SHOWN = 6  # tokens with bars at each place, which have the largest p or q


class SeenCoins(Coins):
    """Coins that keep what was taken."""
    seen = ()

    def take(self, count, device):
        self.seen = *self.seen, super().take(count, device)
        return self.seen[-1]


class Player:
    """Collects row 0 of a run. Give `coins` and `look` to `rounds`, and each of its rounds to
    `add`."""

    def __init__(self, tokenizer, prompt, seed=0):
        self.decode = tokenizer.decode
        self.stream = Stream(tokenizer, prompt)
        self.prompt = self.stream.text
        self.coins = SeenCoins(seed)
        self.tokens = list(prompt)
        self.rounds = []
        self.looked = []  # (p or q, row 0 as it was before temperature and cuts) of this round

    def look(self, logits, **settings):
        """`to_probs`; row 0 is also kept as it was before temperature and cuts."""
        probs = to_probs(logits, **settings)
        self.looked.append((probs, raw_probs(logits[0])))
        return probs

    def text(self, token):
        """A token alone, with control characters as visible signs."""
        return self.decode([token], skip_special_tokens=False).translate(SIGNS)

    def add(self, state, r):
        coins = self.coins.seen
        looked = self.looked
        self.coins.seen = ()
        self.looked = []
        new = r.new[0]
        if not new:     # row 0 has ended before the others
            return
        drafted = r.draft.tokens[0, : int(r.draft.length[0])].tolist()
        accepted = int(r.accepted[0])
        # the draft drew from everything that was looked at before the target's own p
        before = takewhile(lambda pair: pair[0] is not r.p, looked)
        drawn = (row for q, raw in before for row in zip(q[0], raw, strict=True))
        # the round's last coins are one per drafted token, row by row, then one per row for its
        # next token. Nothing was tested after an end of text
        shown = min(accepted + 1, int(r.proposed[0]) + (accepted == len(drafted)))
        written = []
        for token, origin in zip(new, origins(r), strict=True):
            written.append([self.stream.push(token).translate(SIGNS), origin])
        self.rounds.append({
            "start": len(self.tokens) - 1,
            "block": [self.text(t) for t in (self.tokens[-1], *drafted)],
            "accepted": accepted,
            "new": written,
            "places": [self.place(r, k, drafted, drawn, coins) for k in range(shown)],
            "coin": short(coins[-1][0])})
        self.tokens += new

    def place(self, r, k, drafted, drawn, coins):
        """A place with its bars, and with its token, p, q and coin if one was drafted. A token's
        bars are p, q, and where its part ends if the residual is laid out from 0 to 1. If p and q
        are one-hot, what they were before is added."""
        p = r.p[0, k]
        q = raw_q = torch.zeros_like(p)
        tested = drafted[k : k + 1]
        if tested:
            q = one_hot(r.draft.tokens[0, k], p) if r.draft.q is None else r.draft.q[0, k]
            raw_q = next((raw for look, raw in drawn if torch.equal(look, q)), q)   # copied: no raw
        rest = (p - q).clamp(min=0)
        ends = (rest if rest.sum() > 0 else p).double().cumsum(0)
        columns = [p, q, ends / ends[-1]]
        tallest = torch.maximum(p, q)
        certain = bool(p.max() == 1 and q.max() in (0, 1))
        if certain:
            raw = [raw_probs(r.logits[0, k]), raw_q]
            tallest = torch.maximum(*raw)
            columns += raw
        _, large = tallest.topk(min(SHOWN, len(p)))
        bars = []
        for t in dict.fromkeys([*large.tolist(), *tested, *r.new[0][k : k + 1]]):
            if certain or p[t] + q[t] > 0:
                bars.append([self.text(t), *(short(x[t]) for x in columns)])
        place = {"text": None, "left": short(rest.sum()), "bars": bars}
        for t in tested:
            place |= {"text": self.text(t), "p": short(p[t]), "q": short(q[t]),
                      "coin": short(coins[-2][k])}
        return place

    def save(self, options, note):
        """Write the page that --page names."""
        settings = {"model": options.model.name, "draft": note, **options.sampling()}
        write_file(options.page, self.html(settings | {"seed": options.seed}))

    def html(self, settings=None):
        """The page, which names the settings that are not None."""
        if not self.rounds:
            raise Refused("nothing was written, so there is no round to step through")
        named = {key: value for key, value in (settings or {}).items() if value is not None}
        data = json.dumps({
            "prompt": self.prompt.translate(SIGNS),
            "settings": named,
            "styles": STYLES,
            "tokens": [self.text(t) for t in self.tokens],
            "rounds": self.rounds})
        # trap: "</script>" ends a script wherever it stands, even within a string
        return TEMPLATE.read_text(encoding="utf-8").replace("DATA", data.replace("<", "\\u003c"))


def short(value):
    """Four digits are enough to look at."""
    return float(f"{float(value):.4g}")
