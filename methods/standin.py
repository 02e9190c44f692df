"""Draft models with another vocabulary, through a shorter output head or one with other padding."""
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F

from checkpoint import read_json
from model import Refused, StandIn

VOCAB = "draft_vocab.json"  # the name of a file with a draft vocabulary


class ShortHead(StandIn):
    """The model with a draft vocabulary (FR-Spec, arXiv 2502.14856), which are the N tokens in
    `ids`. It has only their rows of the output head, and stands in for the model wherever a drafter
    takes one.

    All other tokens have the logit -inf, so q = 0 and they are never drafted. The target keeps its
    whole head, so the text stays exact. In a model of few blocks the head costs as much as several
    blocks.
    """

    def __init__(self, model, ids):
        head = model.tok if model.head is None else model.head
        super().__init__(model)
        self.share = len(ids) / model.c.vocab_size
        self.ids = torch.tensor(ids, device=model.tok.device)                   # (N,)
        self.rows = head[self.ids].detach()                                     # (N, dim), a copy

    def unembed(self, x):
        short = self.model.unembed(x, self.rows)                                # (B, T, N)
        logits = short.new_full((*x.shape[:2], self.model.c.vocab_size), -math.inf)
        return logits.index_copy_(2, self.ids, short)                           # (B, T, V)


def short_head(model, path):
    """The model with the draft vocabulary in a file."""
    return ShortHead(model, read_vocab(path, model.c.vocab_size))


class Padded(StandIn):
    """A draft model with the target's tokenizer and another number of padded rows (Qwen2.5 0.5B has
    151,936 ids, 7B has 152,064), as a model with the target's `vocab_size`.

    It never drafts an id that only it has, because its logit is cut off. An id that only the target
    has gets the logit -inf, so q = 0; should the text hold one, it reads its own last id instead.
    """

    def __init__(self, model, vocab_size):
        super().__init__(model)
        self.c = replace(model.c, vocab_size=vocab_size)

    def embed(self, tokens):
        return self.model.embed(tokens.clamp(max=self.model.c.vocab_size - 1))

    def unembed(self, x):
        more = self.c.vocab_size - self.model.c.vocab_size
        return F.pad(self.model.unembed(x), (0, more), value=-math.inf)    # below 0, `pad` cuts off


def most_frequent(texts, count):
    """A draft vocabulary for texts of token ids. It is a dict of "ids", the `count` most frequent
    ones in falling order, and "share", which is their share of the texts. Raises ValueError if
    there are fewer different ids."""
    seen = Counter(token for ids in texts for token in ids)
    if len(seen) < count:
        raise Refused(f"a draft vocabulary of {count}: the text holds only {len(seen)} "
                      "different tokens")
    ids = sorted(seen, key=lambda i: (-seen[i], i))[:count]
    return {"ids": ids, "share": sum(seen[i] for i in ids) / seen.total()}


def read_vocab(path, vocab_size):
    """The ids of a draft vocabulary, the most frequent first, from a file with {"ids": [...]}."""
    ids = read_json(Path(path)).get("ids")
    fine = isinstance(ids, list) and all(type(i) is int and 0 <= i < vocab_size for i in ids)
    if not fine or not 0 < len(set(ids)) == len(ids):
        raise Refused(f"{path}: expected different token ids from 0 to {vocab_size - 1} under "
                      '"ids", as search.py --draft-vocab writes them')
    return ids
