"""Draft, verify, repeat: one loop for every drafter. p is the target's distribution, q the draft's.

The one thing to remember: plain decoding is speculative decoding with an empty draft, and a position without
a proposal has q = 0, so that max(p - q, 0) = p. Bonus token, ragged draft lengths and plain decoding are one
formula.
"""
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from kvcache import KVCache
from model import SPARE
from sampling import Coins, to_probs


@dataclass
class State:
    """What the loop knows. Row b has the tokens[b, :n[b]]; all but the last of them are in the cache."""
    tokens: torch.Tensor       # (B, S) slot = position; whatever stands at or behind n is dead
    n: torch.Tensor            # (B,) tokens known: the only length there is
    left: torch.Tensor         # (B,) tokens the row may still emit; 0 = finished
    cache: KVCache
    probs: Callable            # logits -> distribution, the same for target and draft
    coins: Coins
    vocab: int                 # the target's, for drafters with a head of their own
    text: list[list[int]]      # the host's copy of the known tokens: nobody waits to read them
    room: list[int]            # the host's copy of `left`

    def at(self, *offsets):
        """Positions counted from each row's last known token (offset 0). A slice if there is one row on the
        CPU and the offsets are consecutive, else (B, T)."""
        first, T = offsets[0], len(offsets)
        run = offsets == tuple(range(first, first + T))
        if run and len(self.text) == 1 and not self.n.is_cuda:
            last = len(self.text[0]) - 1
            return slice(last + first, last + first + T)
        steps = (torch.arange(first - 1, first - 1 + T, device=self.n.device) if run
                 else torch.stack([torch.full_like(self.n[:1], o - 1) for o in offsets], 1))
        # beside a longer draft a row at its limit overshoots: clamped, into a slot that is always dead
        return (self.n[:, None] + steps).clamp_(max=self.tokens.shape[1] - 1)

    def end(self, T):
        """A host bound: one past the last slot that a block of T tokens reads. On CUDA rounded up to 256,
        512, 1024..., so that few shapes occur."""
        end = max(map(len, self.text)) - 1 + T
        if self.n.is_cuda:
            end = max(256, 1 << (end - 1).bit_length())
        return min(end, self.tokens.shape[1])

    def read(self, positions):
        """The tokens at `positions`, a slice or (B, T). (B, T)"""
        return self.tokens[:, positions] if isinstance(positions, slice) else self.tokens.gather(1, positions)

    def send(self, rows):
        """Host ints, lists or a tensor, as a tensor on the state's device; the host does not wait for it."""
        t = torch.as_tensor(rows)
        return t.pin_memory().to(self.n.device, non_blocking=True) if self.n.is_cuda else t


@dataclass
class Draft:
    """A proposal, as data."""
    tokens: torch.Tensor                  # (B, K)
    q: torch.Tensor | None = None  # (B, K, V) the very tensors the tokens were drawn from; None: certain ones
    length: torch.Tensor | None = None    # (B,) how many of the K each row proposes; None: all
    reuse: tuple | None = None          # (i, x): the target's first i sub-layers already gave x (B, K+1, dim)

    @classmethod
    def none(cls, state):
        return cls(state.tokens[:, :0])

    def cut(self, K):
        """The first K proposals."""
        if self.tokens.shape[1] <= K:
            return self
        q, reuse = self.q, self.reuse
        return Draft(self.tokens[:, :K], None if q is None else q[:, :K], self.length,
                     None if reuse is None else (reuse[0], reuse[1][:, : K + 1]))


@dataclass
class Round:
    """What happened in one draft-verify round: all that stepping, colours, statistics and traces need."""
    draft: Draft               # as verified: `length` is clipped to what each row may still emit
    logits: torch.Tensor      # (B, K+1, V) the target's, behind the final soft-cap and before the temperature
    p: torch.Tensor            # (B, K+1, V)
    accepted: torch.Tensor     # (B,) on the CPU; never more than len(new)
    proposed: torch.Tensor     # (B,) on the CPU: draft.length
    new: list[list[int]]       # tokens appended to each row, cut behind the first end-of-text id
    x: torch.Tensor            # (B, K+1, dim) the target's final states
    trace: list | None         # the residual stream behind each sub-layer that verification ran, if asked for
    start: torch.Tensor        # (B,) n before the round


class Drafter:
    """Where drafts come from. This one never proposes anything: plain decoding."""
    wants_trace = False
    stop = None  # a chain drafter's stop rule, see `chain`

    def begin(self, state, x):
        """After prefill. x (B, T, dim): the target's final states on the prompts."""

    def propose(self, state):
        """The next Draft."""
        return Draft.none(state)

    def observe(self, state, round):
        """After a round: learn from it."""


def verify(p, q, tokens, coins, length=None):
    """Speculative sampling (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023, Theorem 1).

    p (B, K+1, V), q (B, K, V) or None for certain proposals, tokens (B, K), length (B,) or None for K
    everywhere. Returns how many were accepted (B,) and the token behind them (B,), which is distributed as if
    p had been sampled.
    """
    B, K = tokens.shape
    if q is not None and q.shape[-1] != p.shape[-1]:
        raise ValueError(f"the draft has a vocabulary of {q.shape[-1]}, the target of {p.shape[-1]}")
    if K == 0:  # nothing was proposed anywhere: q = 0
        return torch.zeros(B, dtype=torch.long, device=p.device), coins.choose(p[:, 0])
    if length is None:
        length = torch.full((B,), K, device=p.device)
    x, row = tokens[..., None], torch.arange(B, device=p.device)
    px = p[:, :K].gather(2, x)[..., 0]                                          # (B, K)
    qx = 1.0 if q is None else q.gather(2, x)[..., 0]
    fine = coins.flip(px / qx) & (torch.arange(K, device=p.device) < length[:, None])
    accepted = fine.cumprod(1).sum(1)                                           # (B,)

    # The token behind comes from max(p - q, 0), and q = 0 behind a row's last proposal.
    at, refused = accepted.clamp(max=K - 1), (accepted < length)[:, None]
    p = p[row, accepted]                                                        # (B, V)
    q = torch.zeros_like(p).scatter_(1, tokens[row, at, None], 1.0) if q is None else q[row, at]
    rest = (p - q * refused).clamp_(min=0)
    # trap: where p = q up to rounding a refusal can leave nothing; then p itself is the right law
    return accepted, coins.choose(torch.where(rest.sum(-1, keepdim=True) > 0, rest, p))


def prefill(model, tokens, cache, block=256):
    """Run the whole model over tokens (B, T) into slots 0 .. T-1, `block` tokens at a time. Returns x (B, T,
    dim)."""
    return torch.cat([model.run(model.embed(part), slice(i * block, i * block + part.shape[1]), cache)
                      for i, part in enumerate(tokens.split(block, 1))], 1)


def wanted(state, gamma):
    """How many tokens each row is to draft, no more than it may emit, and whether the rows differ. gamma: an
    int, or a function of the state that gives one, or a list with one for each row."""
    want = gamma(state) if callable(gamma) else gamma
    rows = [want] * len(state.room) if isinstance(want, int) else want
    most = [max(0, min(g, room - 1)) for g, room in zip(rows, state.room, strict=True)]
    return most, len(set(most)) > 1


def chain(state, step, gamma, stop=None):
    """The one loop that draws a chain of tokens, for every drafter that predicts them one by one.

    step(token (B, 1), k) gives the raw logits (B, 1, V) for the token behind `token`, which stands at offset
    k. gamma: how many to draw, see `wanted`. stop(k, logits, token) -> (B,) bool says after a draw which rows
    end, *with the drawn token kept* (to drop it would bias the law); no step is computed once all have ended.
    Returns tokens (B, K), q (B, K, V) or None, length (B,) or None: what is behind a row's length is dead.
    """
    most, varied = wanted(state, gamma)
    K, own = max(most), state.send(most) if varied else None                    # (B,) each row its own
    token, tokens, qs = state.read(state.at(0)), [], []
    length, going = own, None                                                   # (B,)
    if stop:
        length, going = None, state.left > 1 if own is None else (state.left > 1) & (own > 0)
    for k in range(K):
        logits = step(token, k)                                                 # (B, 1, V)
        q = state.probs(logits)
        token = state.coins.choose(q)                                           # (B, 1)
        tokens.append(token)
        qs.append(q)
        if stop:
            length = going.long() if length is None else length + going
            going = going & ~stop(k, logits[:, 0], token[:, 0])
            going = going if own is None else going & (own > k + 1)
            if k + 1 < K and not going.any():   # the one place that waits for the device while drafting
                break
    return (torch.cat(tokens, 1), torch.cat(qs, 1), length) if tokens else (state.tokens[:, :0], None, None)


def check_prompts(model, prompts, max_new):
    """Raise ValueError, in one line, for prompts that cannot be continued."""
    c = model.c
    if max_new < 0:
        raise ValueError(f"max_new must be at least 0, got {max_new}")
    for b, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {b} is empty: give it at least one token, such as the begin-of-text id")
        if len(prompt) >= c.max_len:
            raise ValueError(f"prompt {b} has {len(prompt)} tokens and fills the context of {c.max_len}")
        bad = next((t for t in prompt if not 0 <= t < c.vocab_size), None)
        if bad is not None:
            raise ValueError(f"prompt {b} holds token id {bad}, but ids run from 0 to {c.vocab_size - 1}")


def rounds(model, prompts: Sequence[Sequence[int]], max_new: int, drafter: Drafter | None = None,
           probs=to_probs, coins: Coins | None = None, eos=()) -> Iterator[tuple[State, Round]]:
    """Continue every prompt, yielding (state, round) after each draft-verify round. A generator: stepping in
    a notebook, streaming, colours and statistics are consumers of it.

    prompts is a ragged list of lists of ids. A row ends at the first id in `eos`, after max_new tokens, or
    when prompt and answer fill the context. Without a drafter every draft is empty: plain decoding. Raises
    ValueError for prompts that cannot be continued and for NaN or infinite logits.
    """
    check_prompts(model, prompts, max_new)
    text = [list(map(int, prompt)) for prompt in prompts]
    room = [min(max_new, model.c.max_len - len(t)) for t in text]
    S = max((len(t) + r for t, r in zip(text, room, strict=True)), default=0) + SPARE
    device = model.tok.device
    tokens = torch.tensor([t + [0] * (S - len(t)) for t in text], device=device)  # (B, S)
    n, left = torch.tensor([[len(t) for t in text], room], device=device)
    cache = KVCache(model.c, len(text), S, model.attention_dtype(), device)
    state = State(tokens, n, left, cache, probs, coins or Coins(), model.c.vocab_size, text, room)
    return loop(model, state, drafter or Drafter(), set(eos))


@torch.inference_mode()  # a tenth faster than no_grad; clone a Round's tensors to train on them
def loop(model, state, drafter, eos):
    if max(state.room, default=0) > 0:
        # a short row's padding lands in dead slots
        drafter.begin(state, prefill(model, state.tokens[:, : max(map(len, state.text))], state.cache))
    while max(state.room, default=0) > 0:
        draft = drafter.propose(state).cut(max(state.room) - 1)
        K = draft.tokens.shape[1]
        length = (state.left - 1).clamp_(0, K)                                  # (B,)
        draft = replace(draft, length=length if draft.length is None else torch.minimum(draft.length, length))
        block = torch.cat([state.read(state.at(0)), draft.tokens], 1)           # (B, K+1)
        first, x = draft.reuse or (0, model.embed(block))
        trace = [] if drafter.wants_trace else None
        x = model.run(x, state.at(*range(K + 1)), state.cache, range(first, 2 * model.c.n_layers),
                      trace=trace, end=state.end(K + 1))
        logits = model.unembed(x)
        p = state.probs(logits)
        accepted, last = verify(p, draft.q, draft.tokens, state.coins, draft.length)
        start = state.n
        new, accepted, proposed = commit(state, draft, accepted, last, logits, eos)
        round = Round(draft, logits, p, accepted, proposed, new, x, trace, start)
        drafter.observe(state, round)
        yield state, round


def commit(state, draft, accepted, last, logits, eos):
    """Append what was accepted and the token behind it. Only here does the loop wait for the device."""
    out = F.pad(draft.tokens, (0, 1)).scatter_(1, accepted[:, None], last[:, None])  # (B, K+1)
    slots = state.at(*range(1, out.shape[1] + 1))
    if isinstance(slots, slice):
        state.tokens[:, slots] = out
    else:
        state.tokens.scatter_(1, slots, out)
    peak = logits.abs().amax((1, 2))                                     # (B,) NaN and infinity survive it
    facts = torch.cat([torch.stack([accepted, draft.length, peak.isfinite()], 1), out], 1)
    new, kept, proposed = [], [], []
    for b, (a, offered, finite, *row) in enumerate(facts.tolist()):
        if not finite:
            raise ValueError(f"the model's logits for row {b} are NaN or infinite: its weights are damaged, "
                             f"or {logits.dtype} is too narrow for them")
        row = row[: a + 1] if state.room[b] else []
        row = next((row[: i + 1] for i, t in enumerate(row) if t in eos), row)
        state.text[b] += row
        state.room[b] = 0 if eos.intersection(row) else state.room[b] - len(row)
        new.append(row)
        kept.append(min(a, len(row)))
        proposed.append(offered)
    host = torch.tensor([[len(t) for t in state.text], state.room, kept, proposed])     # (4, B)
    state.n, state.left = state.send(host[:2]).unbind()
    return new, host[2], host[3]


def generate(model, prompts, max_new, drafter=None, probs=to_probs, coins=None, eos=()):
    """The continuation of every prompt as lists of ids, and the number of target passes behind the
    prefill."""
    outputs, passes = [[] for _ in prompts], 0
    for _, round in rounds(model, prompts, max_new, drafter, probs, coins, eos):
        passes += 1
        for output, new in zip(outputs, round.new, strict=True):
            output += new
    return outputs, passes


# --- two drafters that need nothing from the target; layerskip.py has the one that does


def check_gamma(gamma):
    if not callable(gamma) and not (isinstance(gamma, int) and gamma >= 0):
        raise ValueError(f"gamma, how many tokens to draft, must be a whole number from 0 up, got {gamma}")
    return gamma


class NGram(Drafter):
    """Prompt lookup (Saxena 2023): copy what followed the last time the text held its final n tokens."""

    def __init__(self, gamma, n):
        if n < 1:
            raise ValueError(f"n, the number of tokens to look up, must be at least 1, got {n}")
        self.gamma, self.n = check_gamma(gamma), n

    def begin(self, state, x):
        self.index, self.done = [{} for _ in state.text], [0] * len(state.text)  # n-gram -> what is behind
        self.observe(state, None)

    def observe(self, state, round):
        for b, text in enumerate(state.text):
            last = len(text) - self.n  # the final n-gram: nothing follows it yet
            for i in range(self.done[b], last):
                self.index[b][tuple(text[i : i + self.n])] = i + self.n
            self.done[b] = max(self.done[b], last)

    def propose(self, state):
        hits = []
        for text, index, most in zip(state.text, self.index, wanted(state, self.gamma)[0], strict=True):
            at = index.get(tuple(text[-self.n :]), len(text))
            hits.append(text[at : at + most])
        K = max(map(len, hits))
        if K == 0:
            return Draft.none(state)
        tokens = state.send([hit + [0] * (K - len(hit)) for hit in hits])       # (B, K)
        return Draft(tokens, None, state.send([len(hit) for hit in hits]))


class ModelDraft(Drafter):
    """A separate small model with the same vocabulary and a cache of its own (Leviathan et al. 2023).

    It re-reads every token since its last proposal, at least two: rewriting a slot is harmless, and so
    nothing is special about full acceptance, where it never saw its own last draft, or about rounds in which
    a gate kept it from drafting.
    """

    def __init__(self, model, gamma, stop=None):
        self.model, self.gamma, self.stop = model, check_gamma(gamma), stop

    def begin(self, state, x):
        c, needed = self.model.c, state.tokens.shape[1] - SPARE
        if c.vocab_size != state.vocab:
            raise ValueError(f"the draft model's vocabulary is {c.vocab_size}, the target's {state.vocab}")
        if c.max_len < needed:
            raise ValueError(f"the draft model's context is {c.max_len}, but prompt and answer need {needed}")
        self.cache = KVCache(c, *state.tokens.shape, self.model.attention_dtype(), state.tokens.device)
        prefill(self.model, state.tokens[:, : x.shape[1]], self.cache)
        self.held = [len(text) for text in state.text]  # per row: how many slots hold what the text says

    def propose(self, state):
        m, n = self.model, [len(text) for text in state.text]
        T = min(max(n), max(2, *(b - held for b, held in zip(n, self.held, strict=True))))

        def step(token, k):
            if k > 0:
                return m.unembed(m.run(m.embed(token), state.at(k), self.cache, end=state.end(k + 1)))
            at = state.at(*range(1 - T, 1))
            if isinstance(at, slice):
                return m.unembed(m.run(m.embed(state.read(at)), at, self.cache)[:, -1:])
            # a row shorter than T starts at its first token instead and reads on into dead slots
            short = at[:, :1].clamp(max=0)              # (B, 1) minus how many are missing
            x = m.run(m.embed(state.read(at - short)), at - short, self.cache, end=state.end(1))
            return m.unembed(x.gather(1, (T - 1 + short)[..., None].expand(-1, 1, x.shape[-1])))

        tokens, q, length = chain(state, step, self.gamma, self.stop)
        K = tokens.shape[1]
        if K == 0:
            return Draft.none(state)
        self.held = [b + K - 1 for b in n]  # it read its own drafts but the last; `observe` drops the refused
        return Draft(tokens, q, length)

    def observe(self, state, round):
        # a row may have drafted less than the longest, and another drafter gone on where it ended
        rows = zip(self.held, state.text, round.new, round.accepted.tolist(), strict=True)
        self.held = [min(held, len(text) - 1, len(text) - len(new) + kept) for held, text, new, kept in rows]
