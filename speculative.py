"""Draft, verify, repeat: one loop for every drafter. p is the target's distribution, q the draft's.

The one thing to remember: plain decoding is speculative decoding with an empty draft.

One round, with K = 3 tokens drafted after D, the last known token (in the first round the prompt's
last). Every round reads D itself, too, because it needs the distribution of the token after D.

    slot      7   8   9   10
    block     D   d1  d2  d3     one pass of the target reads it
    row of p  0   1   2   3      each is the distribution of the token after that slot
    judges    d1  d2  d3  -      row 0 judges d1, and so on; q has a row for each drafted token
    verdict   ok  no  dead       each passes with probability min(1, p/q); here d2 is rejected
    text      D   d1  t          t is drawn from max(p - q, 0) in row 1; had all been accepted, a
                                 bonus token would have been drawn from row 3
    next              t   e1     the next block starts at slot 9 and overwrites what d2 and d3 left
"""
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kvcache import KVCache
from model import SPARE, Placement, Transformer
from sampling import Coins, raw_probs, to_probs
from verification import verify


@dataclass
class State:
    """The state of the loop. Row b is tokens[b, :n[b]]; the cache holds all but its last token.

    A drafter only reads it, with one exception: it may write to the cache's slots from n - 1 on,
    because the target's next pass overwrites them before it reads them."""
    tokens: torch.Tensor       # (B, S) slot = position; entries from n on are dead
    n: torch.Tensor            # (B,) how many tokens of each row are known
    known: list[list[int]]     # the known tokens on the host: reading them does not wait for a GPU
    left: list[int]            # how many tokens each row may still write; 0 = finished
    cache: KVCache
    model: Transformer         # the target
    probs: Callable            # logits -> distribution, the same for target and draft
    coins: Coins
    taps: tuple[int, ...]      # the sub-layers whose outputs the drafter reads
    slots: torch.Tensor        # (1, S) 0, 1, 2, ...: `span` takes slices of it

    def span(self, first, stop):
        """The Placement of the offsets first .. stop-1, counted from each row's last known token
        (offset 0)."""
        last = [len(text) - 1 for text in self.known]
        start = min(last) + first
        end = max(last) + stop
        if len(last) == 1 and not self.n.is_cuda:
            here = self.slots[:, start:end]
            return Placement(here, here, start, end, same=True)
        slots = self.after(torch.arange(first - 1, stop - 1, device=self.n.device))
        return Placement(slots, slots, max(0, start), min(end, self.tokens.shape[1]))

    def back(self, T, stop):
        """The Placement of the T tokens before the offset `stop`, and the index of each row's last
        (B, 1). A row with fewer tokens starts at its first one and reads on into dead slots."""
        at = self.span(stop - T, stop)
        missing = at.slots[:, :1].clamp(max=0)      # (B, 1) 0 or less
        moved = at._replace(positions=at.positions - missing, slots=at.slots - missing)
        return moved, T - 1 + missing

    def after(self, steps):
        """The positions of `steps` (B or 1, T), counted from the first unknown token. (B, T)"""
        # a row near its limit overshoots if another drafts more: clamp to a dead slot
        return (self.n[:, None] + steps).clamp_(max=self.tokens.shape[1] - 1)

    def last(self):
        """The last known token of each row. (B, 1)"""
        return self.read(self.n[:, None] - 1)

    def read(self, slots):
        """The tokens at `slots` (B, T). (B, T)"""
        return self.tokens.gather(1, slots)

    def send(self, rows):
        """Copy host numbers (lists or a tensor) to the state's device, without waiting for it."""
        t = torch.as_tensor(rows)
        if self.n.is_cuda:
            return t.pin_memory().to(self.n.device, non_blocking=True)
        return t


class Pass(NamedTuple):
    """What one pass of the target gave, with a row for each token of the block."""
    logits: torch.Tensor       # (B, K+1, V) after the soft-cap, before the temperature
    p: torch.Tensor            # (B, K+1, V)
    trace: dict                # {tap: (B, K+1, dim)} the residual stream after each of `taps`


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


@dataclass
class Round:
    """What happened in one draft-verify round, for stepping, colours, statistics and traces."""
    draft: Draft               # as verified: `length` leaves room for the token after the draft
    logits: torch.Tensor       # (B, K+1, V) these and the next two are those of the Pass
    p: torch.Tensor            # (B, K+1, V)
    trace: dict                # {tap: (B, K+1, dim)}
    accepted: torch.Tensor     # (B,) on the CPU; never more than len(new)
    proposed: torch.Tensor     # (B,) on the CPU; how many were drafted, up to an end of text
    new: list[list[int]]       # tokens appended to each row, cut after the first end-of-text id
    sure: list[list[float]]    # the target's probability of each new token: see `raw_probs`


# --- how far to draft, and where drafts come from


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


def pick(x, index):
    """The vectors of x (B, T, dim) at `index` (B, N) in each row. (B, N, dim)"""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))


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


# --- the loop


def prefill(model, tokens, cache, chunk=None, sublayers=None, trace=None):
    """Run the model over tokens (B, T) into slots 0 .. T-1, `chunk` tokens at a time, by default
    the model's. Returns x (B, T, dim); sublayers and trace are those of `Transformer.run`."""
    chunk = chunk or model.chunk
    xs = []
    traces = []
    for i, part in enumerate(tokens.split(chunk, 1)):
        first = i * chunk
        at = Placement.span(first, first + part.shape[1], tokens.device)
        traces.append(dict.fromkeys(trace or ()))
        xs.append(model.run(model.embed(part), at, cache, sublayers, traces[-1]))
    for tap in trace or ():
        trace[tap] = torch.cat([part[tap] for part in traces], 1)
    return torch.cat(xs, 1)


def check_prompts(model, prompts, max_new, names=None):
    """Raise ValueError, with a one-line message, for prompts that cannot be continued. names: what
    to call them there."""
    c = model.c
    names = names or [f"prompt {b}" for b in range(len(prompts))]
    if max_new < 0:
        raise ValueError(f"max_new must be at least 0, got {max_new}")
    for name, prompt in zip(names, prompts, strict=True):
        if not len(prompt):
            raise ValueError(f"{name} is empty: give it at least one token, such as the "
                             "begin-of-text id")
        if len(prompt) >= c.max_len:
            raise ValueError(f"{name} has {len(prompt)} tokens and fills the context of "
                             f"{c.max_len}")
        bad = next((t for t in prompt if not 0 <= t < c.vocab_size), None)
        if bad is not None:
            raise ValueError(f"{name} holds token id {bad}, but ids run from 0 to "
                             f"{c.vocab_size - 1}")


def rounds(model, prompts: Sequence[Sequence[int]], max_new: int, drafter: Drafter | None = None,
           probs=to_probs, coins: Coins | None = None, eos=(), cache: KVCache | None = None,
           verify=verify) -> Iterator[tuple[State, Round]]:
    """Continue every prompt, yielding (state, round) after each draft-verify round. It is a
    generator: a notebook can step through it, and a program can stream, colour or count the tokens.

    prompts is a ragged list of lists of ids. A row ends at the first id in `eos` (by default there
    is none: pass `model.c.eos`), after max_new tokens, or when prompt and answer fill the context.
    Without a drafter every draft is empty: plain decoding. cache: one from an earlier run, to be
    reused; its content need not be erased if it is finite. verify: `verify` or `verify_block`.
    Raises ValueError for prompts that cannot be continued, a cache that does not fit, and logits
    that are NaN or infinite.
    """
    check_prompts(model, prompts, max_new)
    drafter = drafter or Drafter()
    known = [list(map(int, prompt)) for prompt in prompts]
    left = [min(max_new, model.c.max_len - len(text)) for text in known]
    lengths = [len(text) + more for text, more in zip(known, left, strict=True)]
    S = max(lengths, default=0) + SPARE
    device = model.tok.device
    if cache is None:
        cache = KVCache(model.c, len(known), S, model.attention_dtype(), device)
    _, rows, _, slots, _ = cache.k.shape
    if rows != len(known) or slots < S:
        raise ValueError(f"a cache of {rows} rows and {slots} slots, but {len(known)} and {S} are "
                         "needed")
    state = State(
        tokens=torch.tensor([text + [0] * (S - len(text)) for text in known], device=device),
        n=torch.tensor([len(text) for text in known], device=device),
        known=known,
        left=left,
        cache=cache,
        model=model,
        probs=probs,
        coins=coins or Coins(),
        taps=drafter.taps,
        slots=torch.arange(S, device=device)[None])
    return loop(state, drafter, set(eos), verify)


@torch.inference_mode()  # faster than no_grad; clone a Round's tensors to train on them
def loop(state, drafter, eos, verify):
    model = state.model
    if max(state.left, default=0) > 0:      # read the prompts; padding falls into dead slots
        trace = dict.fromkeys(state.taps)
        x = prefill(model, state.tokens[:, : max(map(len, state.known))], state.cache, trace=trace)
        last = pick(x, state.n[:, None] - 1)                                    # (B, 1, dim)
        check_finite(raw_probs(model.unembed(last))[:, 0, :1].tolist(), x.dtype)
        drafter.begin(state, trace)
    while max(state.left, default=0) > 0:
        r = one_round(state, drafter, verify, eos)
        # 6. Let the drafter learn from it.
        drafter.observe(state, r)
        yield state, r


def one_round(state, drafter, verify, eos=frozenset()):
    """Draft, verify and append. Returns the Round."""
    model = state.model
    sublayers = range(2 * model.c.n_layers)
    # 1. Draft, but leave room for the token after the draft.
    draft = drafter.propose(state).fit(state)
    # 2. The block: the last known token and the draft. Some sub-layers may have run already.
    block = torch.cat([state.last(), draft.tokens], 1)                          # (B, K+1)
    ran = draft.reuse or Reuse(0, model.embed(block), {})
    # 3. One pass of the target over the block gives the distribution after each of its tokens.
    at = draft.place(state)
    trace = dict.fromkeys(state.taps) | ran.trace
    x = model.run(ran.x, at, state.cache, sublayers[ran.first :], trace)        # (B, K+1, dim)
    logits = model.unembed(x)                                                   # (B, K+1, V)
    p = state.coins.settle(state.probs(logits), at.positions)
    # 4. Verify: how many drafted tokens are accepted, and which token follows them?
    verdict = draft.judge(state, Pass(logits, p, trace), verify)
    # 5. Append them: n grows, and the next block starts at the new last token. No rollback.
    return commit(state, *verdict, eos)


def check_finite(chances, dtype):
    """Raise ValueError, with a one-line message, if a row has a probability that is NaN. Where a
    logit is NaN or +inf, all are."""
    for b, row in enumerate(chances):
        if math.isnan(sum(row)):
            raise ValueError(f"the model's logits for row {b} are NaN or infinite: "
                             f"its weights are damaged, or {dtype} is too narrow for them")


def until(eos, tokens):
    """The tokens up to the first that ends a text, which is included.

    >>> until({0}, [5, 0, 7])
    [5, 0]
    """
    for i, token in enumerate(tokens):
        if token in eos:
            return tokens[: i + 1]
    return tokens


def commit(state, draft, passed, accepted, next_token, eos):
    """Append the accepted tokens and the next one. Returns the Round. It is the only wait for the
    device in a round without a stop rule."""
    K = draft.tokens.shape[1]
    out = F.pad(draft.tokens, (0, 1))
    out = out.scatter_(1, accepted[:, None], next_token[:, None])               # (B, K+1)
    state.tokens.scatter_(1, state.span(1, K + 2).slots, out)
    chances = raw_probs(passed.logits).gather(2, out[..., None])[..., 0]        # (B, K+1)
    # one copy to the host; float32 and float64 hold every token id exactly, half types would not
    facts = torch.cat([accepted[:, None], draft.length[:, None], chances, out], 1).tolist()
    check_finite([row[2 : K + 3] for row in facts], passed.logits.dtype)

    news = []
    sure = []
    kept = []
    proposed = []
    for b, (yes, offered, *row) in enumerate(facts):
        tokens = [int(token) for token in row[K + 1 :]]
        new = until(eos, tokens[: int(yes) + 1]) if state.left[b] else []
        state.known[b] += new
        state.left[b] -= len(new)
        if eos.intersection(new):
            state.left[b] = 0
        news.append(new)
        sure.append(row[: len(new)])
        kept.append(min(int(yes), len(new)))
        # what an end of text cut off was never tested
        proposed.append(int(offered) if len(new) > yes else kept[b])
    state.n = state.send([len(text) for text in state.known])
    kept, proposed = torch.tensor([kept, proposed])
    return Round(draft, *passed, kept, proposed, news, sure)


def generate(model, prompts, max_new, drafter=None, probs=to_probs, coins=None, eos=(), cache=None,
             verify=verify):
    """The continuation of every prompt as ids, and the number of target passes after the prompt."""
    steps = rounds(model, prompts, max_new, drafter, probs, coins, eos, cache, verify)
    return collect(steps, len(prompts))


def collect(steps, rows):
    """Run `rounds` to its end: the ids written into each row, and the number of target passes."""
    outputs = [[] for _ in range(rows)]
    passes = 0
    for _, r in steps:
        passes += 1
        for output, new in zip(outputs, r.new, strict=True):
            output += new
    return outputs, passes


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
