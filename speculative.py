"""Draft, verify, repeat. This is the one loop for every drafter.

The one thing to remember: plain decoding is speculative decoding with an empty draft.

Below is one round. K = 3 tokens are drafted after D, the last known token, which in the first round
is the prompt's last. Every round reads D as well, because it needs the distribution of the token
after D. p is the target's distribution, q the draft's.

    slot      7   8   9   10
    block     D   d1  d2  d3     one pass of the target reads it
    row of p  0   1   2   3      each is the distribution of the token after that slot
    judges    d1  d2  d3  -      row 0 judges d1, and so on; q has a row for each drafted token
    verdict   ok  no  dead       each passes with probability min(1, p/q); here d2 is rejected
    text      D   d1  t          t is drawn from max(p - q, 0) in row 1; had all been accepted, a
                                 bonus token would have been drawn from row 3
    next              t   e1     the next block starts at slot 9 and overwrites what d2 and d3 left
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index

import torch

from drafter import Draft, Drafter, Reuse
from kvcache import KVCache, new_cache, prefill
from model import SPARE, Placement, Refused, Transformer
from sampling import Coins, raw_probs, to_probs
from verification import verify


def rounds(model: Transformer, prompts: Sequence[Sequence[int]], max_new: int,
           drafter: Drafter | None = None, probs: Callable = to_probs, coins: Coins | None = None,
           eos: Iterable[int] | None = None, cache: KVCache | None = None,
           verify: Callable = verify) -> Iterator[tuple[State, Round]]:
    """Continue every prompt, yielding (state, round) after each draft-verify round. It is a
    generator, so a notebook can step through it, and a program can stream, colour or count tokens.

    prompts is a ragged list of lists of ids. A row ends at the first id in `eos` (by default the
    model's own), after max_new tokens, or when prompt and answer fill the context. Without a
    drafter every draft is empty, which is plain decoding. A `cache` of an earlier run can be
    reused, and its content need not be erased if it is finite. `verify` may be another rule, such
    as `methods.block.verify_block`.
    Raises ValueError for prompts that cannot be continued, a cache that does not fit, and logits
    that are NaN or infinite.
    """
    check_prompts(model, prompts, max_new)
    drafter = drafter or Drafter()
    eos = model.c.eos if eos is None else eos
    state = State.start(model, prompts, max_new, drafter.taps, probs, coins or Coins(), cache)
    return loop(state, drafter, set(eos), verify)


@torch.inference_mode()  # faster than no_grad; clone a Round's tensors to train on them
def loop(state, drafter, eos, verify):
    if any(state.left):     # read the prompts; padding falls into dead slots
        trace = dict.fromkeys(state.taps)
        prompts = state.tokens[:, : max(state.lengths)]
        prefill(state.model, prompts, state.cache, trace=trace)
        drafter.begin(state, trace)
    while any(state.left):
        r = one_round(state, drafter, verify, eos)
        # 6. Let the drafter learn from it.
        drafter.observe(state, r)
        yield state, r


def one_round(state, drafter, verify, eos=frozenset()):
    """Draft, verify and append. Returns the Round."""
    model = state.model
    sublayers = range(2 * model.c.n_layers)
    # 1. Draft, but leave room for the token after the draft.
    draft = drafter.propose(state).trimmed(state)
    # 2. The block: the last known token and the draft. Some sub-layers may have run already. In the
    # first round the prompt's last token is read again, so that every round has the same form.
    block = torch.cat([state.last(), draft.tokens], 1)                          # (B, K+1)
    ran = draft.reuse or Reuse(0, model.embed(block), {})
    # 3. One pass of the target over the block gives the distribution after each of its tokens.
    at = draft.place(state)
    trace = dict.fromkeys(state.taps) | ran.trace
    x = model.run(ran.x, at, state.cache, sublayers[ran.first :], trace)        # (B, K+1, dim)
    logits = model.unembed(x)                                                   # (B, K+1, V)
    p = state.coins.settle(state.probs(logits), at.positions)
    # 4. Verify: how many drafted tokens are accepted, and which token follows them?
    r, accepted, token = draft.judge(state, Round(draft, logits, p, trace), verify)
    # 5. Append them: n grows, and the next block starts at the new last token. No rollback.
    return commit(state, r, accepted, token, eos)


def commit(state, r, accepted, token, eos):
    """Append the accepted tokens and the token after them to each row, and write down in the Round
    what happened. Unless the drafter waits, this is the round's only synchronisation with the
    device."""
    K = r.draft.tokens.shape[1]
    after = token[:, None]
    out = torch.cat([r.draft.tokens, after], 1).scatter_(1, accepted[:, None], after)   # (B, K+1)
    state.tokens.scatter_(1, state.span(1, K + 2).slots, out)
    largest = r.logits.amax(-1)     # (B, K+1) infinite or NaN where no chance can be computed
    tokens, largest, accepted, offered = fetch(
        out, largest, accepted[:, None], r.draft.length[:, None])

    r.new = []
    kept = []
    proposed = []
    for b, [count] in enumerate(accepted):
        if not math.isfinite(sum(largest[b])):
            raise Refused(f"the model's logits for row {b} are NaN or infinite: its weights are "
                          f"damaged, or {r.logits.dtype} is too narrow for them")
        new = until(eos, tokens[b][: count + 1]) if state.left[b] else []
        state.known[b] += new
        state.left[b] -= len(new)
        if eos.intersection(new):
            state.left[b] = 0
        r.new.append(new)
        kept.append(min(count, len(new)))
        # what an end of text cut off was never tested
        proposed.append(offered[b][0] if len(new) > count else kept[b])
    r.accepted = torch.tensor(kept)
    r.proposed = torch.tensor(proposed)
    state.n = state.send(state.lengths)
    return r


def fetch(*tensors):
    """Copy tensors (B, n) to the host as lists, with one wait for the device instead of one for
    each tensor."""
    if not tensors[0].is_cuda:
        return [t.tolist() for t in tensors]
    # float32 and float64 hold every token id exactly, half precision would not
    together = torch.cat(tensors, 1).cpu()
    parts = together.split([t.shape[1] for t in tensors], 1)
    return [part.to(t.dtype).tolist() for part, t in zip(parts, tensors, strict=True)]


def until(eos, tokens):
    """The tokens up to the first that ends a text, which is included.

    >>> until({0}, [5, 0, 7])
    [5, 0]
    """
    for i, token in enumerate(tokens):
        if token in eos:
            return tokens[: i + 1]
    return tokens


def generate(model: Transformer, prompts: Sequence[Sequence[int]], max_new: int,
             drafter: Drafter | None = None, probs: Callable = to_probs, coins: Coins | None = None,
             eos: Iterable[int] | None = None, cache: KVCache | None = None,
             verify: Callable = verify) -> tuple[list[list[int]], int]:
    """The continuation of every prompt as ids, and the number of target passes after the prompt."""
    steps = rounds(model, prompts, max_new, drafter, probs, coins, eos, cache, verify)
    return collect(steps, len(prompts))


def collect(steps, rows):
    """Run `rounds` to its end. Returns the ids written into each row, and the number of target
    passes."""
    outputs = [[] for _ in range(rows)]
    passes = 0
    for _, r in steps:
        passes += 1
        for output, new in zip(outputs, r.new, strict=True):
            output += new
    return outputs, passes


# --- what the loop holds


@dataclass
class State:
    """The state of the loop. Row b is tokens[b, :n[b]]; the cache holds all but its last token.

    A drafter only reads it, with one exception. It may write to the cache's slots from n - 1 on,
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

    @classmethod
    def start(cls, model, prompts, max_new, taps, probs, coins, cache=None):
        """The state before the first round, with a new cache if none is given."""
        known = [list(map(int, prompt)) for prompt in prompts]
        left = [min(max_new, model.c.max_len - len(text)) for text in known]
        lengths = [len(text) + more for text, more in zip(known, left, strict=True)]
        S = max(lengths, default=0) + SPARE
        device = model.tok.device
        if cache is None:
            cache = new_cache(model, len(known), S)
        _, rows, _, slots, _ = cache.k.shape
        if rows != len(known) or slots < S:
            raise Refused(f"a cache of {rows} rows and {slots} slots, but {len(known)} and {S} "
                          "are needed")
        tokens = torch.tensor([text + [0] * (S - len(text)) for text in known], device=device)
        n = torch.tensor([len(text) for text in known], device=device)
        return cls(tokens, n, known, left, cache, model, probs, coins, taps)

    @property
    def lengths(self) -> list[int]:
        """How many tokens of each row are known: n on the host."""
        return [len(text) for text in self.known]

    @property
    def room(self) -> list[int]:
        """How many tokens each row may still draft, since one more follows every draft."""
        return [max(0, left - 1) for left in self.left]

    def span(self, first: int, stop: int) -> Placement:
        """The Placement of the offsets first .. stop-1, counted from each row's last known token
        (offset 0)."""
        lengths = self.lengths
        start = min(lengths) - 1 + first
        end = max(lengths) - 1 + stop
        if len(lengths) == 1 and not self.n.is_cuda:
            return Placement.span(start, end)
        slots = self.positions(torch.arange(first, stop, device=self.n.device))
        return Placement(slots, slots, max(0, start), min(end, self.tokens.shape[1]))

    def back(self, T: int, stop: int) -> tuple[Placement, torch.Tensor]:
        """The Placement of the T tokens before the offset `stop`, and the index of each row's last
        (B, 1). A row with fewer tokens starts at its first one and reads on into dead slots."""
        at = self.span(stop - T, stop)
        missing = at.slots[:, :1].clamp(max=0)      # (B, 1) 0 or less
        here = at.slots - missing
        return at._replace(positions=here, slots=here), T - 1 + missing

    def positions(self, offsets):
        """The positions of `offsets` (B or 1, T), counted as in `span`. (B, T)"""
        # a row near its limit overshoots if another drafts more: clamp to a dead slot
        return (self.n[:, None] - 1 + offsets).clamp_(max=self.tokens.shape[1] - 1)

    def last(self):
        """The last known token of each row. (B, 1)"""
        return self.read(self.n[:, None] - 1)

    def read(self, slots):
        """The tokens at `slots` (B, T). (B, T)"""
        return self.tokens.gather(1, slots)

    def send(self, numbers):
        """Copy host numbers (lists or a tensor) to the state's device, without waiting for it."""
        t = torch.as_tensor(numbers)
        if self.n.is_cuda:
            return t.pin_memory().to(self.n.device, non_blocking=True)
        return t


@dataclass
class Round:
    """One draft-verify round, for stepping, colours, statistics and traces. The pass of the target
    gives the first four fields, and `commit` fills in the rest."""
    draft: Draft               # as verified: `length` leaves room for the token after the draft
    logits: torch.Tensor       # (B, K+1, V) after the soft-cap, before the temperature
    p: torch.Tensor            # (B, K+1, V) what tokens are drawn from; one-hots after a race
    trace: dict                # {tap: (B, K+1, dim)} the residual stream after each of `taps`
    accepted: torch.Tensor | None = None    # (B,) on the CPU; never more than len(new)
    proposed: torch.Tensor | None = None    # (B,) on the CPU; drafted tokens up to an end of text
    new: list[list[int]] | None = None      # tokens appended to each row, up to an end of text

    @cached_property
    def sure(self) -> list[list[float]]:
        """The target's `raw_probs` of each new token, computed when it is read."""
        found = []
        for logits, new in zip(self.logits, self.new, strict=True):
            ids = torch.tensor(new, dtype=torch.long, device=logits.device)
            chances = raw_probs(logits[: len(new)]).gather(1, ids[:, None])     # (len(new), 1)
            found.append(chances[:, 0].tolist())
        return found


# --- what cannot be continued


def check_prompts(model, prompts, max_new, names=None):
    """Raise ValueError for prompts that cannot be continued. The message calls them by their
    `names`."""
    c = model.c
    try:
        prompts = [list(map(index, prompt)) for prompt in prompts]
    except TypeError:   # a text, one prompt alone, or what a tokenizer returns
        raise Refused("prompts must be lists of token ids, one for each text: checkpoint.encode "
                      "makes one of a text") from None
    names = names or [f"prompt {b}" for b in range(len(prompts))]
    if max_new < 0:
        raise Refused(f"max_new must be at least 0, got {max_new}")
    for name, prompt in zip(names, prompts, strict=True):
        if not len(prompt):
            raise Refused(f"{name} is empty: give it at least one token, such as the "
                          "begin-of-text id")
        if len(prompt) >= c.max_len:
            raise Refused(f"{name} has {len(prompt)} tokens and fills the context of "
                          f"{c.max_len}")
        bad = next((t for t in prompt if not 0 <= t < c.vocab_size), None)
        if bad is not None:
            raise Refused(f"{name} holds token id {bad}, but ids run from 0 to "
                          f"{c.vocab_size - 1}")
