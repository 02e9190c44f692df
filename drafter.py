"""Where drafts come from, how far they go, and what a loop needs to know of one.

The one thing to remember: no drafter and no rule can change the distribution of the text. A drafter
hands over tokens with the very q that they were drawn from, and the loop does the rest.
"""
import copy
from dataclasses import dataclass, replace

import torch

from kvcache import KVCache, pick, prefill
from model import SPARE


@dataclass
class Reuse:
    """What a draft with the target's own sub-layers computed: the target's pass skips it."""
    first: int                 # the pass begins at this sub-layer
    x: torch.Tensor            # (B, K+1, dim) what enters it
    trace: dict                # {tap: (B, K+1, dim)} of the taps before it

    def cut(self, T):
        """The same for the first T tokens of the block."""
        return Reuse(self.first, self.x[:, :T], {tap: x[:, :T] for tap, x in self.trace.items()})


@dataclass
class Draft:
    """What a drafter proposes: a chain of tokens for each row. For trees: `methods.trees.Tree`."""
    tokens: torch.Tensor                # (B, K)
    q: torch.Tensor | None = None       # (B, K, V) the very tensors that tokens were drawn from;
    #                                     None: tokens were copied, so q is one-hot
    length: torch.Tensor | None = None  # (B,) how many of the K are each row's draft; None: all
    reuse: Reuse | None = None

    @classmethod
    def none(cls, state):
        return cls(state.tokens[:, :0])

    def cut(self, K):
        """The first K drafted tokens."""
        if self.tokens.shape[1] <= K:
            return self
        q = None if self.q is None else self.q[:, :K]
        length = None if self.length is None else self.length.clamp(max=K)
        reuse = self.reuse and self.reuse.cut(K + 1)
        return replace(self, tokens=self.tokens[:, :K], q=q, length=length, reuse=reuse)

    def fit(self, state):
        """The draft as it is verified: `length` leaves room in each row for the token after it."""
        draft = self.cut(max(state.left) - 1)
        K = draft.tokens.shape[1]
        length = state.send([max(0, min(K, left - 1)) for left in state.left])
        if draft.length is not None:
            length = torch.minimum(length, draft.length)
        return replace(draft, length=length)

    def place(self, state):
        """The Placement of its block: the last known token and the K drafted ones."""
        return state.span(0, self.tokens.shape[1] + 1)

    def judge(self, state, passed, verify):
        """By the Pass over its block. Returns (draft, Pass, how many tokens are accepted (B,), the
        token after them (B,)). A tree first turns the draft and the Pass into a chain."""
        accepted, next_token = verify(passed.p, self.q, self.tokens, state.coins, self.length)
        return self, passed, accepted, next_token


class Rule:
    """How far to draft. `how_far` is called before each draft and `learn` after each round. A rule
    may have a `stop`, called after each drawn token (see `chain`). No rule can change the
    distribution of the text. This one always drafts the same number of tokens."""
    stop = None

    def __init__(self, gamma):
        if not (isinstance(gamma, int) and gamma >= 0):
            raise ValueError("gamma, how many tokens to draft, must be a whole number from 0 up, "
                             f"got {gamma}")
        self.most = gamma

    def begin(self, state):
        """Called before the first round of a run. What was learnt in earlier runs may stay."""

    def how_far(self, state):
        """How many tokens to draft: an int, or a list with one for each row."""
        return self.most

    def learn(self, state, r):
        """Called after a Round r."""


class Drafter:
    """Where drafts come from. This one drafts nothing: plain decoding.

    rule: a Rule, or a whole number for the constant one. taps: the target's sub-layers whose
    outputs it reads. `begin` gets those of the prompt, `Round.trace` holds those of the round.
    """
    taps = ()

    def __init__(self, rule=0):
        self.rule = rule if isinstance(rule, Rule) else Rule(rule)

    def begin(self, state, trace):
        """Called once the prompt is read. trace: {tap: (B, T, dim)}"""
        self.rule.begin(state)

    def propose(self, state):
        """The next Draft."""
        return Draft.none(state)

    def observe(self, state, r):
        """Called after a Round r, to learn from it."""
        self.rule.learn(state, r)

    def ahead(self, state, r):
        """The drafter that goes on after a Round r that may yet be taken back (see
        `methods.within`): the same, as long as it drafts from the known tokens alone."""
        return self


def observed(drafter, state, r):
    """A copy of the drafter that has observed r, to be dropped if r is taken back. What the two
    share are tensors addressed by slots: no slot of r is read before it is written again."""
    copied = copy.copy(drafter)
    copied.observe(state, r)
    return copied


class Wrapper(Drafter):
    """A drafter around others: it forwards each call to all, and takes the draft of the first."""

    def __init__(self, *drafters):
        self.drafters = drafters
        self.taps = tuple(sorted({tap for drafter in drafters for tap in drafter.taps}))

    def begin(self, state, trace):
        for drafter in self.drafters:
            drafter.begin(state, trace)

    def propose(self, state):
        return self.drafters[0].propose(state)

    def observe(self, state, r):
        for drafter in self.drafters:
            drafter.observe(state, r)


def wanted(state, rule):
    """How many tokens each row drafts, with room for the token after them."""
    gammas = rule.how_far(state)
    if isinstance(gammas, int):
        gammas = [gammas] * len(state.left)
    return [max(0, min(gamma, left - 1)) for gamma, left in zip(gammas, state.left, strict=True)]


def chain(state, step, rule):
    """Draw a chain of tokens one by one: what every drafter with a model does. Returns a Draft.

    step(token (B, 1), k) reads `token`, which stands at offset k (0: the last known token), and
    returns the raw logits (B, 1, V) of the token after it. A rule's stop(k, logits (B, V), token
    (B,)) says after each draw which rows stop there, a list of bools. *The drawn token stays*:
    discarding it for its value would change the distribution of the text. While any row goes on,
    all rows draw and spend uniforms:

        row 0   a b c d   length 4
        row 1   a ! . .   length 2: it stopped at "!", which is still part of its draft
    """
    lengths = wanted(state, rule)
    token = state.last()
    tokens = []
    qs = []
    while len(tokens) < max(lengths):
        k = len(tokens)
        logits = step(token, k)                                                 # (B, 1, V)
        q = state.coins.settle(state.probs(logits), state.n[:, None], k - 1)
        token = state.coins.choose(q)                                           # (B, 1)
        tokens.append(token)
        qs.append(q)
        if rule.stop:   # here, and only here, a chain waits for the device
            for b, stops in enumerate(rule.stop(k, logits[:, 0], token[:, 0])):
                if stops:
                    lengths[b] = min(lengths[b], k + 1)
    if not tokens:
        return Draft.none(state)
    return Draft(torch.cat(tokens, 1), torch.cat(qs, 1), state.send(lengths))


# --- two drafters that need nothing from the target


class NGram(Drafter):
    """Prompt lookup (Saxena 2023): copy what followed the previous occurrence of the text's last n
    tokens. Raises ValueError for a rule that stops between tokens: all are copied at once.

    again: a copy that reaches the end of the text goes on by repeating itself, as in LZ77: a text
    that repeats two tokens often repeats them again. As published, the copy ends there."""

    def __init__(self, rule, n, again=False):
        super().__init__(rule)
        self.again = again
        if n < 1:
            raise ValueError(f"n, the number of tokens to look up, must be at least 1, got {n}")
        if self.rule.stop:
            raise ValueError("an n-gram is copied at once, with no logits to stop at: give it a "
                             "rule without a stop, or a whole number")
        self.n = n

    def begin(self, state, trace):
        super().begin(state, trace)
        self.index = [{} for _ in state.known]  # n-gram -> position after its last occurrence
        self.done = [0] * len(state.known)      # how many n-grams of each row are in the index
        self.enter(state)

    def observe(self, state, r):
        super().observe(state, r)
        self.enter(state)

    def enter(self, state):
        for b, text in enumerate(state.known):
            last = len(text) - self.n  # the final n-gram: nothing follows it yet
            for i in range(self.done[b], last):
                self.index[b][tuple(text[i : i + self.n])] = i + self.n
            self.done[b] = max(self.done[b], last)

    def found(self, state):
        """The ids after the previous occurrence of each row's final n-gram; empty if it is new."""
        hits = []
        lengths = wanted(state, self.rule)
        for text, index, most in zip(state.known, self.index, lengths, strict=True):
            first = index.get(tuple(text[-self.n :]), len(text))
            hit = text[first : first + most]
            if self.again:
                hit = (hit * most)[:most]
            hits.append(hit)
        return hits

    def propose(self, state):
        hits = self.found(state)
        K = max(map(len, hits))
        if K == 0:
            return Draft.none(state)
        tokens = state.send([hit + [0] * (K - len(hit)) for hit in hits])       # (B, K)
        return Draft(tokens, None, state.send([len(hit) for hit in hits]))


class ModelDraft(Drafter):
    """Draft with another model of the same vocabulary, which has its own cache (Leviathan et al.
    2023): a smaller model, or some sub-layers of one.

    Before each draft it reads the tokens it has not read yet, at least the last two known ones.
    After a fully accepted draft two are missing: the last drafted token and the bonus token.
    Otherwise one is. Reading a token again only rewrites the same keys and values, so both cases
    share this code.
    """
    ahead = observed

    def __init__(self, model, rule, sublayers=None):
        super().__init__(rule)
        self.model, self.sublayers = model, sublayers

    def begin(self, state, trace):
        super().begin(state, trace)
        c = self.model.c
        vocab = state.model.c.vocab_size
        needed = state.tokens.shape[1] - SPARE
        if c.vocab_size != vocab:
            raise ValueError(f"the draft model's vocabulary is {c.vocab_size}, the target's "
                             f"{vocab}")
        if c.max_len < needed:
            raise ValueError(f"the draft model's context is {c.max_len}, but prompt and answer "
                             f"need {needed}")
        dtype = self.model.attention_dtype()
        self.cache = KVCache(c, *state.tokens.shape, dtype, state.tokens.device)
        prompts = state.tokens[:, : max(map(len, state.known))]
        prefill(self.model, prompts, self.cache, sublayers=self.sublayers)
        self.held = [len(text) for text in state.known]     # how many slots agree with the text

    def run(self, tokens, at):
        return self.model.run(self.model.embed(tokens), at, self.cache, self.sublayers)

    def propose(self, state):
        lengths = [len(text) for text in state.known]
        unread = [n - held for n, held in zip(lengths, self.held, strict=True)]
        T = min(max(lengths), max(2, *unread))

        def step(token, k):
            if k > 0:
                return self.model.unembed(self.run(token, state.span(k, k + 1)))
            at, last = state.back(T, 1)
            return self.model.unembed(pick(self.run(state.read(at.slots), at), last))

        draft = chain(state, step, self.rule)
        K = draft.tokens.shape[1]
        if K > 0:   # all but the last drafted token are read; `observe` drops the rejected ones
            self.held = [n + K - 1 for n in lengths]
        return draft

    def observe(self, state, r):
        super().observe(state, r)
        # A row may have drafted less than the longest one, or another drafter may have continued
        # its draft. The last accepted token may be a sibling, which this drafter has not read.
        rows = zip(state.known, r.new, r.accepted.tolist(), strict=True)
        agree = [len(text) - len(new) + kept - 1 for text, new, kept in rows]
        self.held = list(map(min, self.held, agree))
