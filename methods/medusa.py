"""Medusa (arXiv 2401.10774) has a head for each of the next tokens, all of which read one state."""
import torch
import torch.nn.functional as F
from torch import nn

from drafter import chain
from methods.base import Head, HeadDraft, normed
from model import Refused


class Medusa(Head):
    """Residual blocks on the final state (section 2.1). Head k computes W (x + silu(W_k x)), where
    W_k starts at zero, and W is the model's final norm and output head. In the paper each head
    trains a W of its own, which with a large vocabulary is much larger than W_k.

    With `markov` > 0, all heads share a bias from the token before, W_2 W_1[token], of that rank
    (DeepSpec's DSpark). So a head knows what the head before it drafted.
    """
    kind = "medusa"
    branches = True

    def __init__(self, model, heads, markov=0):
        dim = model.c.dim
        V = model.c.vocab_size
        self.model = model
        self.steps = heads
        self.arguments = {"heads": heads, "markov": markov}
        self.taps = [2 * model.c.n_layers - 1]
        self.weights = nn.ParameterDict({"inner": model.tok.new_zeros(heads, dim, dim)})
        self.longest = heads
        if markov:
            noise = torch.randn(V, markov, generator=torch.Generator().manual_seed(0))
            self.weights.before = nn.Parameter(0.02 * noise.to(model.tok))
            self.weights.bias = nn.Parameter(model.tok.new_zeros(V, markov))

    def per_token(self):
        return self.weights.inner[0].numel() + self.arguments["markov"] * self.model.c.vocab_size

    def after(self, x, k, before):
        """The raw logits (B, T, V) of head k = 0, 1, ... after final states x (B, T, dim). They are
        for the token k + 1 places after the next one. `before` (B, T) is the token before that."""
        w = self.weights
        x = normed(x)
        logits = self.model.unembed(x + F.silu(self.model.linear(x, w.inner[k])))
        if self.arguments["markov"]:
            logits = logits + self.model.linear(F.embedding(before, w.before), w.bias)
        return logits

    def predict(self, tokens, trace, cache):
        x = trace[self.taps[0]]
        for k in range(1, self.steps + 1):
            yield k, self.after(x[:, :-k], k - 1, tokens[:, k:])

    def drafter(self, rule, parents=None):
        return MedusaDraft(self, rule, parents)


class MedusaDraft(HeadDraft):
    """Drafts with one head per token, all of which read the same state.

    `parents` is None for a chain, or the parents of a tree, level by level, as
    `methods.trees.best_tree` makes them. All rows draft as many of its levels as the rule says for
    any row. Raises ValueError for a rule that drafts more tokens than there are heads.
    """

    def __init__(self, head, rule, parents=None):
        super().__init__(head, rule)
        self.parents = parents
        if self.rule.longest > head.steps:
            raise Refused(f"{head.steps} heads cannot draft {self.rule.longest} tokens: "
                          "one token each")

    def last(self, state):
        """What its heads read. (B, 1, dim)"""
        return self.notes.last(state)

    def propose(self, state):
        last = self.last(state)
        said = []

        def step(token, k):
            said.append(self.head.after(last, k, token))
            return said[-1]                                                     # (B, 1, V)

        draft = chain(state, step, self.rule)
        if said and self.parents:
            from methods.trees import branch  # late: only trees need it

            return branch(state, draft, torch.cat(said, 1), self.parents)
        return draft
