"""Draft, verify, repeat: one loop for every drafter. p is the target's distribution, q the draft's.

The one thing to remember: plain decoding is speculative decoding with an empty draft.

One round, with K = 3 tokens drafted after D, the last known token (in the first round the prompt's
last). Every round reads D itself, too, because it needs the distribution of the token after D.

    slot      7   8   9   10
    block     D   d1  d2  d3       one target pass reads the block and gives a row of p at each slot:
    row of p  0   1   2   3        the distribution of the token after it,
    judges    d1  d2  d3  -        so row 0 judges d1, and so on; q has a row for each drafted token, too
    verdict   ok  no  dead         each passes with probability min(1, p/q); here d2 is rejected: d3 is dead
    text      D   d1  t            t is drawn from max(p - q, 0) in row 1; had all three been accepted,
                                   a bonus token would have been drawn from row 3
    next              t   e1       the next block starts at slot 9 and overwrites what d2 and d3 left
"""
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from kvcache import KVCache
from model import SPARE, Placement, Transformer
from sampling import Coins, raw_probs, to_probs
from verification import verify, verify_tree


@dataclass
class State:
    """The state of the loop. Row b is tokens[b, :n[b]]; the cache holds at least all but the last."""
    tokens: torch.Tensor       # (B, S) slot = position; entries from n on are dead
    n: torch.Tensor            # (B,) how many tokens of each row are known
    left: torch.Tensor         # (B,) how many tokens each row may still write; 0 = finished
    cache: KVCache
    model: Transformer         # the target
    probs: Callable            # logits -> distribution, the same for target and draft
    coins: Coins
    taps: tuple[int, ...]      # the sub-layers whose outputs the drafter reads
    known: list[list[int]]     # a host copy of the known tokens: reading it does not wait for a GPU
    left_cpu: list[int]        # `left`, on the host
    slots: torch.Tensor        # (1, S) 0, 1, 2, ...: `at` takes slices of it

    def at(self, first, stop=None):
        """The Placement of the offsets first .. stop-1, or of `first` alone, counted from each
        row's last known token (offset 0)."""
        stop = first + 1 if stop is None else stop
        last = [len(text) - 1 for text in self.known]
        if len(last) == 1 and not self.n.is_cuda:
            start, end = last[0] + first, last[0] + stop
            return Placement(self.slots[:, start:end], self.slots[:, start:end], start, end, same=True)
        slots = self.after(torch.arange(first - 1, stop - 1, device=self.n.device))
        return Placement(slots, slots, max(0, min(last) + first), min(max(last) + stop, self.tokens.shape[1]))

    def back(self, T, stop):
        """The Placement of the T tokens before the offset `stop`, and the index of each row's last
        (B, 1). A row with fewer tokens starts at its first one instead and reads on into dead slots."""
        at = self.at(stop - T, stop)
        missing = at.slots[:, :1].clamp(max=0)      # (B, 1) 0 or less
        return at._replace(positions=at.positions - missing, slots=at.slots - missing), T - 1 + missing

    def after(self, steps):
        """The positions of `steps` (B or 1, T), counted from each row's first unknown token. (B, T)"""
        # a row near its limit overshoots if another row drafts more: clamp to a slot that is always dead
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
        return t.pin_memory().to(self.n.device, non_blocking=True) if self.n.is_cuda else t


@dataclass
class Draft:
    """What a drafter proposes, as data."""
    tokens: torch.Tensor                  # (B, K)
    q: torch.Tensor | None = None         # (B, K, V) the very tensors that tokens were drawn from;
    #                                       None: tokens were copied, so q is one-hot
    length: torch.Tensor | None = None  # (B,) how many of the K belong to each row's draft; None: all
    reuse: tuple | None = None         # (i, x, trace): the target need not run sub-layers before i;
    #                                       x (B, K+1, dim) enters i, trace holds the taps before i
    parents: torch.Tensor | None = None  # (B or 1, K) the parent of each: 0 = the last known token,
    #                                       k = tokens[:, k - 1], an earlier one; None: a chain
    traced: bool = True                   # False: the drafter does not read this round's trace

    @classmethod
    def none(cls, state):
        return cls(state.tokens[:, :0])

    def cut(self, K):
        """The first K drafted tokens."""
        if self.tokens.shape[1] <= K:
            return self
        tokens, q, parents = (None if t is None else t[:, :K] for t in (self.tokens, self.q, self.parents))
        reuse = self.reuse
        if reuse is not None:
            first, x, trace = reuse
            reuse = first, x[:, : K + 1], {tap: y[:, : K + 1] for tap, y in trace.items()}
        return replace(self, tokens=tokens, q=q, reuse=reuse, parents=parents)


@dataclass
class Round:
    """What happened in one draft-verify round, for stepping, colours, statistics and traces. A tree
    is given as a chain: see `straighten`."""
    draft: Draft               # as verified: `length` leaves room for the token after the draft
    logits: torch.Tensor      # (B, K+1, V) the target's, after the soft-cap, before the temperature
    p: torch.Tensor            # (B, K+1, V)
    accepted: torch.Tensor     # (B,) on the CPU; never more than len(new)
    proposed: torch.Tensor     # (B,) on the CPU; how many were drafted, up to an accepted end of text
    new: list[list[int]]       # tokens appended to each row, cut after the first end-of-text id
    sure: list[list[float]]    # the target's probability of each new token: see `raw_probs`
    trace: dict            # {tap: (B, K+1, dim)} the residual stream after the sub-layers in `taps`


# --- how far to draft, and where drafts come from


class Rule:
    """How far to draft. `gamma` is called before each draft and `learn` after each round. A rule may
    have a `stop`, called after each drawn token (see `chain`). No rule can change the distribution
    of the text. This one always drafts the same number of tokens."""
    stop = None

    def __init__(self, gamma):
        if not (isinstance(gamma, int) and gamma >= 0):
            raise ValueError("gamma, how many tokens to draft, must be a whole number from 0 up, "
                             f"got {gamma}")
        self.most = gamma

    def begin(self, state):
        """Called before the first round of a run. A rule may keep what it learnt in earlier runs."""

    def gamma(self, state):
        """How many tokens to draft: an int, or a list with one for each row."""
        return self.most

    def learn(self, state, r):
        """Called after a Round r."""


class Drafter:
    """Where drafts come from. This one drafts nothing: plain decoding.

    rule: a Rule, or a whole number for the constant one. taps: the target's sub-layers whose outputs
    the drafter reads, those of the prompt in `begin` and those of every round in `Round.trace`.
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


def pick(x, at):
    """The vectors of x (B, T, dim) at the indices `at` (B, N) of each row. (B, N, dim)"""
    return x.gather(1, at[..., None].expand(-1, -1, x.shape[2]))


def wanted(state, rule):
    """How many tokens each row drafts, with room for the token after them."""
    want = rule.gamma(state)
    rows = [want] * len(state.left_cpu) if isinstance(want, int) else want
    return [max(0, min(gamma, left - 1)) for gamma, left in zip(rows, state.left_cpu, strict=True)]


def chain(state, step, rule):
    """Draw a chain of tokens one by one: what every drafter with a model does.

    step(token (B, 1), k) reads `token`, which stands at offset k (0: the last known token), and returns the
    raw logits (B, 1, V) of the token after it. Returns tokens (B, K), q (B, K, V) or None, length (B,) or
    None: tokens beyond a row's length are dead. A rule's stop(k, logits (B, V), token (B,)) says after
    each draw which rows stop there, a list of bools. *The drawn token stays*: discarding it for its value
    would change the distribution of the text. While any row goes on, all rows draw and spend uniforms:

        row 0   a b c d   length 4
        row 1   a ! . .   length 2: it stopped at "!", which is still part of its draft
    """
    most, token, tokens, qs = wanted(state, rule), state.last(), [], []
    while (k := len(tokens)) < max(most):
        logits = step(token, k)                                                 # (B, 1, V)
        q = state.coins.settle(state.probs(logits), state.n[:, None], k - 1)
        token = state.coins.choose(q)                                           # (B, 1)
        tokens.append(token)
        qs.append(q)
        if rule.stop:   # here, and only here, a chain waits for the device
            stopped = zip(most, rule.stop(k, logits[:, 0], token[:, 0]), strict=True)
            most = [min(row, k + 1) if ends else row for row, ends in stopped]
    if not tokens:
        return state.tokens[:, :0], None, None
    return torch.cat(tokens, 1), torch.cat(qs, 1), state.send(most) if len(set(most)) > 1 else None


# --- the loop


def ancestors(parents):
    """Which nodes of a tree each node sees: itself and its ancestors. Node 0 is the last known
    token, node k is tokens[:, k - 1] of the Draft. (B or 1, K) -> (B or 1, K+1, K+1) bool

    >>> ancestors(torch.tensor([[0, 1, 0]])).int().tolist()     # 2 is a child of 1, 3 a sibling of 1
    [[[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]]
    """
    B, K = parents.shape
    row = torch.arange(B, device=parents.device)
    tree = torch.eye(K + 1, dtype=torch.bool, device=parents.device).repeat(B, 1, 1)  # (B, K+1, K+1)
    for k in range(1, K + 1):
        tree[:, k] |= tree[row, parents[:, k - 1]]      # a parent comes before its children
    return tree


def layout(state, K, parents=None):
    """The Placement of the last known token and K drafted tokens."""
    at = state.at(0, K + 1)
    if parents is None:
        return at
    tree = ancestors(parents)                                                   # (B or 1, K+1, K+1)
    positions = state.after(tree.sum(-1) - 2)                   # the root sees one node: n - 1
    return at._replace(positions=positions, tree=tree, same=False)


def straighten(state, draft, tree, node, logits, p, trace):
    """Turn a verified tree into a chain that begins with the accepted path, and move the cache to match,
    so that no other code handles trees. node (B,): the last accepted one. tree: the draft's `ancestors`.
    Returns the draft, how many of its tokens were accepted (B,), and logits, p and trace in its order.

    After the path come the descendants of its last node, all rejected, and then dead tokens. The length
    is that of the longest branch through that last node: the most that could have been accepted.
    """
    B, K = draft.tokens.shape
    row, tree = torch.arange(B, device=node.device), tree.expand(B, -1, -1)
    on, below = tree[row, node], tree[row, :, node]                             # (B, K+1) both
    path = torch.where(on, 0, 2 - below.long()).argsort(dim=1, stable=True)  # (B, K+1) a permutation
    slots = state.after(torch.arange(-1, K, device=node.device))                # (B, K+1)
    state.cache.move(slots.gather(1, path), slots)
    live = torch.arange(K + 1, device=node.device) <= draft.length[:, None]     # (B, K+1)
    length = ((tree.sum(-1) - 1) * (below & live)).amax(1)                      # (B,)
    old = path[:, 1:] - 1                                                       # (B, K)
    q = None if draft.q is None else draft.q[row[:, None], old]
    logits, p, *taps = (t[row[:, None], path] for t in (logits, p, *trace.values()))
    trace = dict(zip(trace, taps, strict=True))
    return Draft(draft.tokens.gather(1, old), q, length), on.sum(1) - 1, logits, p, trace


def prefill(model, tokens, cache, block=256, sublayers=None, trace=None):
    """Run the model over tokens (B, T) into slots 0 .. T-1, `block` tokens at a time. Returns x
    (B, T, dim); sublayers and trace are those of `Transformer.run`."""
    xs, traces = [], []
    for i, part in enumerate(tokens.split(block, 1)):
        traces.append(dict.fromkeys(trace or ()))
        at = Placement.at(i * block, i * block + part.shape[1], tokens.device)
        xs.append(model.run(model.embed(part), at, cache, sublayers, traces[-1]))
    for tap in trace or ():
        trace[tap] = torch.cat([seen[tap] for seen in traces], 1)
    return torch.cat(xs, 1)


def check_prompts(model, prompts, max_new, names=None):
    """Raise ValueError, with a one-line message, for prompts that cannot be continued. names: what
    to call them there."""
    c = model.c
    if max_new < 0:
        raise ValueError(f"max_new must be at least 0, got {max_new}")
    for name, prompt in zip(names or [f"prompt {b}" for b in range(len(prompts))], prompts, strict=True):
        if not len(prompt):
            raise ValueError(f"{name} is empty: give it at least one token, such as the begin-of-text id")
        if len(prompt) >= c.max_len:
            raise ValueError(f"{name} has {len(prompt)} tokens and fills the context of {c.max_len}")
        bad = next((t for t in prompt if not 0 <= t < c.vocab_size), None)
        if bad is not None:
            raise ValueError(f"{name} holds token id {bad}, but ids run from 0 to {c.vocab_size - 1}")


def rounds(model, prompts: Sequence[Sequence[int]], max_new: int, drafter: Drafter | None = None,
           probs=to_probs, coins: Coins | None = None, eos=(), cache: KVCache | None = None,
           verify=verify) -> Iterator[tuple[State, Round]]:
    """Continue every prompt, yielding (state, round) after each draft-verify round. It is a generator
    so that a notebook can step through it, and a program can stream, colour or count the tokens.

    prompts is a ragged list of lists of ids. A row ends at the first id in `eos` (by default there is
    none: pass `model.c.eos`), after max_new tokens, or when prompt and answer fill the context. Without
    a drafter every draft is empty: plain decoding. cache: one from an earlier run, to be reused; its
    content need not be erased if it is finite. verify: `verify` or `verify_block`. Raises ValueError
    for prompts that cannot be continued, a cache that does not fit, and logits that are NaN or infinite.
    """
    check_prompts(model, prompts, max_new)
    drafter, known = drafter or Drafter(), [list(map(int, prompt)) for prompt in prompts]
    left = [min(max_new, model.c.max_len - len(row)) for row in known]
    S = max((len(row) + more for row, more in zip(known, left, strict=True)), default=0) + SPARE
    device = model.tok.device
    tokens = torch.tensor([row + [0] * (S - len(row)) for row in known], device=device)     # (B, S)
    n, left_device = torch.tensor([[len(row) for row in known], left], device=device)
    if cache is None:
        cache = KVCache(model.c, len(known), S, model.attention_dtype(), device)
    rows, slots = cache.k.shape[1], cache.k.shape[3]
    if rows != len(known) or slots < S:
        raise ValueError(f"a cache of {rows} rows and {slots} slots, but {len(known)} and {S} are needed")
    state = State(tokens, n, left_device, cache, model, probs, coins or Coins(), drafter.taps, known, left,
                  torch.arange(S, device=device)[None])
    return loop(state, drafter, set(eos), verify)


@torch.inference_mode()  # faster than no_grad; clone a Round's tensors to train on them
def loop(state, drafter, eos, verify):
    model, every = state.model, range(2 * state.model.c.n_layers)
    if max(state.left_cpu, default=0) > 0:      # read the prompts; padding falls into dead slots
        trace = dict.fromkeys(state.taps)
        x = prefill(model, state.tokens[:, : max(map(len, state.known))], state.cache, trace=trace)
        last = pick(x, state.n[:, None] - 1)                                    # (B, 1, dim)
        check_finite(largest(model.unembed(last)).tolist(), x.dtype)
        drafter.begin(state, trace)
    while max(state.left_cpu, default=0) > 0:
        # 1. Draft, but leave room for the token after the draft.
        draft = drafter.propose(state).cut(max(state.left_cpu) - 1)
        K = draft.tokens.shape[1]
        length = (state.left - 1).clamp_(0, K)                                  # (B,)
        draft = replace(draft, length=length if draft.length is None else torch.minimum(draft.length, length))
        # 2. The block: the last known token and the draft. Sub-layers that already ran do not run again.
        block = torch.cat([state.last(), draft.tokens], 1)                      # (B, K+1)
        first, x, before = draft.reuse or (0, model.embed(block), {})
        trace = dict.fromkeys(state.taps if draft.traced else ()) | before
        # 3. One pass of the target over the block gives the distribution after each of its tokens.
        at = layout(state, K, draft.parents)
        x = model.run(x, at, state.cache, every[first:], trace)                 # (B, K+1, dim)
        logits = model.unembed(x)                                               # (B, K+1, V)
        p = state.coins.settle(state.probs(logits), at.positions)
        # 4. Verify: how many drafted tokens are accepted, and which token follows them?
        if at.tree is None:
            accepted, next_token = verify(p, draft.q, draft.tokens, state.coins, draft.length)
        else:
            node, next_token = verify_tree(p, draft.tokens, draft.parents, state.coins, draft.q, draft.length)
            draft, accepted, logits, p, trace = straighten(state, draft, at.tree, node, logits, p, trace)
        # 5. Append them: n grows, and the next block starts at the new n. Nothing is rolled back.
        new, sure, accepted, proposed = commit(state, draft, accepted, next_token, logits, eos)
        # 6. Let the drafter learn from it.
        r = Round(draft, logits, p, accepted, proposed, new, sure, trace)
        drafter.observe(state, r)
        yield state, r


def largest(logits):
    """The largest magnitude in each row of (B, T, V); NaN and infinity carry through. (B,) float64"""
    return logits.abs().amax((1, 2)).double()


def check_finite(peaks, dtype):
    """Raise ValueError, with a one-line message, if a row's largest logit is NaN or infinite."""
    for b, peak in enumerate(peaks):
        if not math.isfinite(peak):
            raise ValueError(f"the model's logits for row {b} are NaN or infinite: its weights are damaged, "
                             f"or {dtype} is too narrow for them")


def commit(state, draft, accepted, next_token, logits, eos):
    """Append the accepted tokens and the next one. Only here does the loop wait for the device."""
    K = draft.tokens.shape[1]
    out = F.pad(draft.tokens, (0, 1)).scatter_(1, accepted[:, None], next_token[:, None])  # (B, K+1)
    state.tokens.scatter_(1, state.at(1, K + 2).slots, out)
    peak = largest(logits)
    sure = raw_probs(logits).gather(2, out[..., None])[..., 0]                  # (B, K+1)
    # one copy to the host, in float64, which holds every token id exactly
    facts = torch.cat([accepted[:, None], draft.length[:, None], peak[:, None], sure, out], 1)
    new, chances, kept, proposed = [], [], [], []
    facts = facts.tolist()
    check_finite([row[2] for row in facts], logits.dtype)
    for b, (yes, offered, _, *values) in enumerate(facts):
        row = [int(t) for t in values[K + 1 :][: int(yes) + 1]] if state.left_cpu[b] else []
        row = next((row[: i + 1] for i, t in enumerate(row) if t in eos), row)
        state.known[b] += row
        state.left_cpu[b] = 0 if eos.intersection(row) else state.left_cpu[b] - len(row)
        new.append(row)
        chances.append(values[: len(row)])
        kept.append(min(int(yes), len(row)))
        proposed.append(int(offered) if len(row) > yes else kept[b])
    host = torch.tensor([[len(row) for row in state.known], state.left_cpu, kept, proposed])  # (4, B)
    state.n, state.left = state.send(host[:2]).unbind()
    return new, chances, host[2], host[3]


def generate(model, prompts, max_new, drafter=None, probs=to_probs, coins=None, eos=(), cache=None,
             verify=verify):
    """The continuation of every prompt as ids, and the number of target passes after the prompt."""
    return collect(rounds(model, prompts, max_new, drafter, probs, coins, eos, cache, verify), len(prompts))


def collect(steps, rows):
    """Run `rounds` to its end: the ids that it wrote into each row, and the number of target passes."""
    outputs, passes = [[] for _ in range(rows)], 0
    for _, r in steps:
        passes += 1
        for output, new in zip(outputs, r.new, strict=True):
            output += new
    return outputs, passes


# --- two drafters that need nothing from the target


class NGram(Drafter):
    """Prompt lookup (Saxena 2023): copy what followed the previous occurrence of the text's last n
    tokens. Raises ValueError for a rule that stops between tokens, since all of them are copied at once.

    again: a copy that reaches the end of the text goes on by repeating itself, as in LZ77: a text that
    repeats two tokens often repeats them again. Without it, as published, the copy ends there."""

    def __init__(self, rule, n, again=False):
        super().__init__(rule)
        self.again = again
        if n < 1:
            raise ValueError(f"n, the number of tokens to look up, must be at least 1, got {n}")
        if self.rule.stop:
            raise ValueError(f"an n-gram is copied at once, with no logits for {type(self.rule).__name__} to "
                             "stop at: give it a rule without a stop, or a whole number")
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
        for text, index, most in zip(state.known, self.index, wanted(state, self.rule), strict=True):
            at = index.get(tuple(text[-self.n :]), len(text))
            hit = text[at : at + most]
            hits.append((hit * most)[:most] if self.again else hit)
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

    Before each draft it reads the tokens it has not read yet, at least the last two known ones. After a
    fully accepted draft two are missing: the last drafted token and the bonus token. Otherwise one is.
    Reading a token again only rewrites the same keys and values, so both cases share this code.
    """

    def __init__(self, model, rule, sublayers=None):
        super().__init__(rule)
        self.model, self.sublayers = model, sublayers

    def begin(self, state, trace):
        super().begin(state, trace)
        c, vocab, needed = self.model.c, state.model.c.vocab_size, state.tokens.shape[1] - SPARE
        if c.vocab_size != vocab:
            raise ValueError(f"the draft model's vocabulary is {c.vocab_size}, the target's {vocab}")
        if c.max_len < needed:
            raise ValueError(f"the draft model's context is {c.max_len}, but prompt and answer need {needed}")
        self.cache = KVCache(c, *state.tokens.shape, self.model.attention_dtype(), state.tokens.device)
        prompts = state.tokens[:, : max(map(len, state.known))]
        prefill(self.model, prompts, self.cache, sublayers=self.sublayers)
        self.held = [len(text) for text in state.known]  # per row: how many slots agree with the text

    def run(self, tokens, at):
        return self.model.run(self.model.embed(tokens), at, self.cache, self.sublayers)

    def propose(self, state):
        n = [len(text) for text in state.known]
        T = min(max(n), max(2, *(b - held for b, held in zip(n, self.held, strict=True))))

        def step(token, k):
            if k > 0:
                return self.model.unembed(self.run(token, state.at(k)))
            at, last = state.back(T, 1)
            return self.model.unembed(pick(self.run(state.read(at.slots), at), last))

        tokens, q, length = chain(state, step, self.rule)
        K = tokens.shape[1]
        if K == 0:
            return Draft.none(state)
        self.held = [b + K - 1 for b in n]  # not the last drafted token; `observe` drops the rejected
        return Draft(tokens, q, length)

    def observe(self, state, r):
        super().observe(state, r)
        # A row may have drafted less than the longest one, or another drafter may have continued its
        # draft. The last accepted token may be a sibling, which this drafter has not read.
        rows = zip(self.held, state.known, r.new, r.accepted.tolist(), strict=True)
        self.held = [min(held, len(text) - len(new) + kept - 1) for held, text, new, kept in rows]
