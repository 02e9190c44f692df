"""A run as one page to step through: `page.html` with the run in it, as data. It needs no network."""
import json
from itertools import takewhile
from pathlib import Path

import torch

from sampling import Coins, raw_probs, to_probs
from support.show import SIGNS, STYLES, Stream, origins

TEMPLATE = Path(__file__).with_name("page.html")
SHOWN = 6  # tokens with bars at each place: those with the largest p or q
SETTINGS = "model", "draft", "temperature", "top_k", "top_p", "min_p", "seed"


class SeenCoins(Coins):
    """Coins that keep what was taken."""
    seen = ()

    def take(self, count, device):
        self.seen = *self.seen, super().take(count, device)
        return self.seen[-1]


class Player:
    """Collects row 0 of a run. Give `coins` and `look` to `rounds`, and each of its rounds to `add`."""

    def __init__(self, tokenizer, prompt, seed=0):
        self.decode, self.stream = tokenizer.decode, Stream(tokenizer, prompt)
        self.coins, self.prompt = SeenCoins(seed), self.stream.text
        self.tokens, self.rounds, self.seen = list(prompt), [], []

    def look(self, logits, *settings):
        """`to_probs`; row 0 is also kept as it was before temperature and cuts."""
        self.seen.append((to_probs(logits, *settings), raw_probs(logits[0])))
        return self.seen[-1][0]

    def text(self, token):
        """A token alone, with control characters as visible signs."""
        return self.decode([token], skip_special_tokens=False).translate(SIGNS)

    def add(self, state, r):
        coins, self.coins.seen, seen, self.seen = self.coins.seen, (), self.seen, []
        drafted, new = r.draft.tokens[0, : int(r.draft.length[0])].tolist(), r.new[0]
        if not new:     # row 0 has ended before the others
            return
        accepted, proposed, start = int(r.accepted[0]), int(r.proposed[0]), len(self.tokens) - 1
        block, self.tokens = [self.tokens[-1], *drafted], self.tokens + new
        # what the draft drew from: everything that was looked at before the target's own p
        before = takewhile(lambda pair: pair[0] is not r.p, seen)
        drawn = (row for q, raw in before for row in zip(q[0], raw, strict=True))
        # the round's last coins: one per drafted token, row by row, then one per row for its next token
        places = [self.place(r, k, t, coins[-2][k], drawn)
                  for k, t in enumerate(drafted[:proposed][: accepted + 1])]
        places += [self.place(r, accepted)] if accepted == len(drafted) else []
        written = [[self.stream.push(t).translate(SIGNS), o] for t, o in zip(new, origins(r), strict=True)]
        self.rounds.append({"start": start, "block": [self.text(t) for t in block], "accepted": accepted,
                            "new": written, "places": places, "coin": short(coins[-1][0])})

    def place(self, r, k, token=None, coin=0, drawn=()):
        """A place that was tested, or that of a bonus token. Bars of a token: p, q, where its part ends if
        the residual is laid out from 0 to 1, and, where p and q are one-hot, what they were before."""
        p, own = r.p[0, k], [] if token is None else [token]
        q = raw_q = torch.zeros_like(p)
        if own:
            q = q.index_fill(0, r.draft.tokens[0, k], 1.0) if r.draft.q is None else r.draft.q[0, k]
            raw_q = next((raw for look, raw in drawn if torch.equal(look, q)), q)   # copied: no other
        rest = (p - q).clamp(min=0)
        ends = (rest if rest.sum() > 0 else p).double().cumsum(0)
        one_hot = bool(p.max() == 1 and q.max() in (0, 1))
        columns = [p, q, ends / ends[-1], *[raw_probs(r.logits[0, k]), raw_q] * one_hot]
        _, large = torch.maximum(*columns[-2:] if one_hot else (p, q)).topk(min(SHOWN, len(p)))
        ids = dict.fromkeys([*large.tolist(), *own, *r.new[0][k : k + 1]])
        bars = [[self.text(t), *(short(x[t]) for x in columns)] for t in ids if one_hot or p[t] + q[t] > 0]
        found = {"text": None, "left": short(rest.sum()), "bars": bars}
        return found | {"text": self.text(token), "p": short(p[token]), "q": short(q[token]),
                        "coin": short(coin)} if own else found

    def html(self, settings=None):
        """The page, which names the SETTINGS among those given."""
        if not self.rounds:
            raise ValueError("nothing was written, so there is no round to step through")
        named = {key: settings[key] for key in SETTINGS if (settings or {}).get(key) is not None}
        data = json.dumps({"prompt": self.prompt.translate(SIGNS), "settings": named, "styles": STYLES,
                           "tokens": [self.text(t) for t in self.tokens], "rounds": self.rounds})
        # trap: "</script>" ends a script wherever it stands, also within a string
        return TEMPLATE.read_text(encoding="utf-8").replace("DATA", data.replace("<", "\\u003c"))


def short(value):
    """Four digits are enough to look at."""
    return float(f"{float(value):.4g}")
