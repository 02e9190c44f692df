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
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from drafter import Draft, Drafter, Reuse
from kvcache import KVCache, pick, prefill
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
