"""A draft vocabulary: a model with a shorter output head."""
import math
from collections import Counter

import torch

from machine.standin import Around


class ShortHead(Around):
    """A draft vocabulary (FR-Spec, arXiv 2502.14856): the model with only those rows of its output
    head that belong to the N tokens in `ids`. It stands in for the model wherever a drafter takes
    one.

    All other tokens have the logit -inf, so q = 0: they are never drafted. The target keeps its
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


def most_frequent(texts, count):
    """A draft vocabulary for texts of token ids: {"ids": the `count` most frequent, in falling
    order, "share": their share of the texts}. Raises ValueError if there are fewer different
    ids."""
    seen = Counter(token for ids in texts for token in ids)
    if len(seen) < count:
        raise ValueError(f"a draft vocabulary of {count}: the text holds only {len(seen)} "
                         "different tokens")
    ids = sorted(seen, key=lambda i: (-seen[i], i))[:count]
    return {"ids": ids, "share": sum(seen[i] for i in ids) / seen.total()}
