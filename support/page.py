"""A run as one page to step through: a single file, which needs no network, for a browser or a phone.

A page is data beside a template, `page.html`. What a model writes is data, too.
"""
import json
from pathlib import Path

import torch

from sampling import Coins
from support.show import SIGNS, STYLES, Stream, origins

TEMPLATE = Path(__file__).with_name("page.html")
SHOWN = 6  # tokens with bars at each place


class SeenCoins(Coins):
    """Coins that keep a list of what was taken."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.seen = []

    def take(self, count, device):
        self.seen.append(super().take(count, device))
        return self.seen[-1]


class Player:
    """Collects row 0 of a run for the page. Give its `coins` to `rounds`, and each of its rounds to `add`."""

    def __init__(self, tokenizer, prompt, seed=0):
        self.decode, self.stream = tokenizer.decode, Stream(tokenizer, prompt)
        self.coins, self.prompt = SeenCoins(seed), self.stream.text
        self.tokens, self.rounds = list(prompt), []

    def text(self, token):
        """A token alone, with control characters as visible signs."""
        return self.decode([token], skip_special_tokens=False).translate(SIGNS)

    def add(self, state, r):
        taken, self.coins.seen = self.coins.seen, []
        new = r.new[0]
        if not new:     # row 0 has ended before the others
            return
        drafted = r.draft.tokens[0, : int(r.draft.length[0])].tolist()
        accepted, proposed, start = int(r.accepted[0]), int(r.proposed[0]), len(self.tokens) - 1
        block = [self.text(t) for t in (self.tokens[-1], *drafted)]
        self.tokens += new
        # the round's last coins: one for each draft, row by row, and then one a row for the token after them
        flips = taken[-2].tolist() if drafted else []
        places = [self.place(r, k, t, accepted, proposed, flips[k]) for k, t in enumerate(drafted)]
        if accepted == len(drafted):
            places.append(self.place(r, accepted, None, accepted, proposed))
        written = [[self.stream.push(t).translate(SIGNS), o] for t, o in zip(new, origins(r), strict=True)]
        after = self.text(new[accepted]) if len(new) > accepted else None
        self.rounds.append({
            "start": start, "block": block, "drafted": len(drafted), "accepted": accepted, "new": written,
            "places": places, "next": after, "coin": short(taken[-1][0]),
            "tokens": len(new) + (self.rounds[-1]["tokens"] if self.rounds else 0)})

    def place(self, r, k, token, accepted, proposed, coin=None):
        """Place k of a draft: its token, if there is one, the verdict on it, and bars of p, q and
        max(p - q, 0) where p or q is large."""
        verdict = "accepted" if k < accepted else "refused" if k < proposed else "dead"
        if verdict == "dead" and token is not None or k > accepted:
            return {"text": self.text(token), "verdict": "dead", "bars": []}
        p, own = r.p[0, k], [] if token is None else [token]
        q = torch.zeros_like(p)
        if own:
            q = q.index_fill(0, r.draft.tokens[0, k], 1.0) if r.draft.q is None else r.draft.q[0, k]
        large = torch.maximum(p, q).topk(min(SHOWN, len(p))).indices.tolist()
        ids = dict.fromkeys([*large, *own])
        bars = [[self.text(t), short(p[t]), short(q[t]), short((p[t] - q[t]).clamp(min=0))]
                for t in ids if p[t] > 0 or q[t] > 0]
        if token is None:
            return {"text": None, "bars": bars}
        return {"text": self.text(token), "verdict": verdict, "p": short(p[token]), "q": short(q[token]),
                "coin": short(coin), "bars": bars}

    def html(self):
        if not self.rounds:
            raise ValueError("nothing was written, so there is no round to step through")
        styles = {origin: [hue, line, name] for origin, (hue, _, line, name) in STYLES.items()}
        data = json.dumps({"prompt": self.prompt.translate(SIGNS), "styles": styles, "rounds": self.rounds,
                           "tokens": [self.text(t) for t in self.tokens]}, separators=(",", ":"))
        # trap: "</script>" ends a script wherever it stands, also within a string
        return TEMPLATE.read_text(encoding="utf-8").replace("DATA", data.replace("<", "\\u003c"))

def short(value):
    """Four digits are enough to look at."""
    return float(f"{float(value):.4g}")
