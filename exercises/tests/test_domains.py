"""An answer must agree with the library on all of its domain, which is a table in its text: at all
bounds in pairs and at inputs drawn at random (exercises/domains.py). The library itself is compared
with a right answer that was written differently.

Each check_NAME makes the arguments of the function NAME from a case of its table. What a right
answer may do otherwise, such as accept fewer drafts, is compared by its distribution, or by
what it is for."""
import copy
import functools
import inspect
import itertools
import math
import sys
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial

import pytest
import torch
from paper_gpu import PaperGPU
from teach import fail, promise, short
from test_by_outcomes import LATER
from test_sampling import ALMOST_ONE
from test_serving import slow_mask
from tiny import LLAMA, Says, law, make, read, state_of, wide

from drafter import Rule
from exercises import answers, domains
from exercises.paged import PagedCache, keep
from exercises.serving import replay
from exercises.tasks import choose
from kvcache import KVCache, prefill
from layerskip import SelfDraft, shared_prefix
from machine.exact import Race
from model import Attention, Placement, RMSNorm, frequencies, rope
from sampling import Coins, signed, to_probs
from search import GaussianProcess
from speculative import State
from support.stats import Counts

INF, NAN = math.inf, math.nan


# --- what is drawn


def maker(c):
    return torch.Generator().manual_seed(c.draw.randrange(2**40))


def normal(c, *shape):
    return torch.randn(shape, generator=maker(c), dtype=torch.float64)


def whole(c, low, high, *shape):
    return torch.randint(low, high, shape, generator=maker(c))


def typed(c, word="type"):
    return getattr(torch, getattr(c, word))


def shape_of(words):
    """"2 x 1 x 3" -> (2, 1, 3), "number" -> ()"""
    return tuple(int(n) for n in str(words).split(" x ") if n.isdigit())


SIZES = {"tiny": 1e-6, "huge": 1e4, "far apart": 12, "zeros": 0, "equal": 0}


def numbers(c, *shape):
    """Of the kind and in the type that the case names."""
    x = normal(c, *shape) * SIZES.get(c.numbers, 2)
    if c.type == "float16":     # smaller ones have few digits
        x = x.sign() * x.abs().clamp(min=0.05)
    if c.numbers == "equal":
        x = x + 0.75
    if c.numbers == "some equal":
        x = x.round()
    if c.numbers in ("with -inf", "with NaN"):
        some = whole(c, 0, 3, *shape) == 0
        if shape and shape[-1]:         # one of each row stays
            some[..., 0] = False
        x = x.masked_fill(some, -INF if c.numbers == "with -inf" else NAN)
    return x.to(typed(c))


def chances(c, kind, *shape):
    """Distributions (..., V) in float64. The weights are exact in float32."""
    V = shape[-1]
    x = whole(c, 1, 60, *shape).double()
    if kind in ("some zeros", "rare"):
        x = x * (whole(c, 0, 3, *shape) > 0)
    if kind == "rare":
        x = x * 2.0**-40
    if kind == "one-hot":
        x = x * 0
    if kind in ("some zeros", "rare", "one-hot"):
        x.scatter_(-1, whole(c, 0, V, *shape[:-1], 1), 64.0)
    return x / x.sum(-1, keepdim=True)


def table_of_costs(c, most, asks=None, first=1):
    """pass_cost(T), the cost of a pass over T tokens. It notes what is asked before `first` and
    beyond `most`."""
    costs = {"flat": [1.0] * most, "rising": [1 + 0.2 * n for n in range(most)],
             "falling": [1 - 0.5 * n / most for n in range(most)],
             "rough": [1.0, *(c.draw.uniform(0.8, 1 + 0.2 * n) for n in range(1, most))]}[c.passes]

    def pass_cost(T):
        if asks and not first <= T <= most:
            asks.now.append(T)
        return costs[max(1, min(T, most)) - 1]

    return pass_cost


# --- how results are compared


def flat(x):
    """All tensors and numbers of a result, as tensors."""
    if isinstance(x, dict):
        x = list(x.values())
    if isinstance(x, (list, tuple)):
        return [t for part in x for t in flat(part)]
    return [x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=torch.float64)]


TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 0.017, torch.float16: 2e-3}
LIKELY = ("a value of the domain, which is in the exercise's text, that is treated unlike the "
          "others: look at what is special in this case")


def difference(got, want, relative=True, work=None):
    """(what is expected, what came) where two results differ; None where they are the same but for
    rounding: that of each number, or of the largest. Zeros, infinities and NaN must be the same.
    work: a narrower type in which both may compute."""
    got, want = flat(got), flat(want)
    if [t.shape for t in got] != [t.shape for t in want]:
        return tuple(f"results of the shapes {[tuple(t.shape) for t in ts]}" for ts in (want, got))
    for a, b in zip(got, want, strict=True):
        kind = b.dtype if b.is_floating_point() else None
        a, b = a.detach().cpu().double(), b.detach().cpu().double()
        same = (a == b) | (a.isnan() & b.isnan())
        if kind is not None:
            size = b.nan_to_num(0, 0, 0).abs()
            if not relative and size.numel():
                size = size.max().expand_as(size)
            near = max(TOLERANCE[kind], TOLERANCE.get(work, 0))
            same |= ((a - b).abs() <= near * size + 1e-37) & (
                (a == 0) == (b == 0) if relative else True)
        if not same.all():
            if b.numel() <= 12:
                return short(b), short(a)
            at = tuple((~same).nonzero()[0].tolist())
            place = f" at {list(at)}, the first of {int((~same).sum())} that differ"
            return short(b[at]) + place, short(a[at]) + place
    return None


def agree(got, want, given, why=LIKELY, **how):
    """Fail where two results differ."""
    found = difference(got, want, **how)
    if found:
        fail(given, *found, why)


def told(c, args):
    """A case as a student reads it: the row of the table, and the arguments that are small."""
    shown = []
    for a in args:
        if isinstance(a, torch.Tensor):
            shown.append(short(a) if a.numel() <= 9 else f"a tensor {tuple(a.shape)}")
        elif isinstance(a, Counts):
            shown.append(str(a))
        elif isinstance(a, (int, float, str, list, dict, type(None))):
            shown.append(f"{a:.6g}" if isinstance(a, float) else short(a)[:99])
    return f"{c.text}: ({', '.join(shown)})"


class Asks:
    """What an answer asked of the functions that it was given, which note it in `now`."""

    def __init__(self):
        self.now = []
        self.of = {}        # {function: what it asked}

    def __call__(self, f, run=None):
        """A call of f, or `run`, which calls it."""
        def call(*args):
            self.of[f] = self.now = []
            found = (run or f)(*args)
            self.now = []
            return found
        return call


def gradients(call, parts):
    """The gradients of `parts`, {name: tensor}, by a backward pass through call() with weights that
    are always the same."""
    for x in parts.values():
        x.grad = None
        x.requires_grad_()
    out = call()
    if out.requires_grad:
        drawn = torch.Generator().manual_seed(0)
        (out * torch.randn(out.shape, generator=drawn, dtype=torch.float64)).sum().backward()
    found = [torch.zeros_like(x) if x.grad is None else x.grad.clone() for x in parts.values()]
    for x in parts.values():
        x.requires_grad_(False)
    return found


def outcome(f, args):
    """What a call returns, and whether it refuses what it is given."""
    try:
        return f(*args), "a result"
    except ValueError:
        return (), "ValueError"


def values(c, ours, theirs, args, trained=None, around=lambda f: f, **how):
    """Both give the same numbers, and the same gradients of `trained`, {name: tensor}. around(f): a
    call of f, with what else is to be looked at."""
    given = told(c, args)
    got, said = outcome(around(ours), args)
    want, says = outcome(around(theirs), args)
    promise(said == says, given, says, said, LIKELY)
    agree(got, want, given, **how)
    if trained:
        mine, right = (gradients(lambda f=f: f(*args), trained) for f in (ours, theirs))
        agree(mine, right, f"{given}; the gradients of {[*trained]}", relative=False)


def same_chances(got, want, given, near, why):
    """Two laws {outcome: probability}, equal in proportion."""
    for key in sorted(got.keys() | want.keys(), key=str):
        a, b = got.get(key, 0.0), want.get(key, 0.0)
        if abs(a - b) > near * b + 1e-15:
            fail(given, f"{key}: {b:.6g}", f"{a:.6g}", why, f"{a - b:+.3g}")


# --- sitting 1


def check_softcap(c, ours, theirs):
    x = numbers(c, *shape_of(c.shape))
    learns = c.type == "float64" and c.numbers in ("drawn", "equal", "zeros", "tiny")
    learns &= c.cap is None or not (x.abs() > 6 * c.cap).any()      # where 1 - tanh^2 is rounded
    values(c, ours, theirs, (x, c.cap), {"x": x} if learns else None)


def check_rotate(c, ours, theirs):
    at = whole(c, 0, c.positions + 1, c.rows)
    between = shape_of(c.between)
    table = rope(at, frequencies(c.D, 10_000.0))
    cos, sin = (t.to(typed(c, "angles")).view(c.rows, *[1] * len(between), c.D) for t in table)
    x = normal(c, c.rows, *between, c.D).to(typed(c))
    values(c, ours, theirs, (x, cos, sin), relative=False)


def check_frequencies(c, ours, theirs):
    scaling = None
    if c.rope_type:
        scaling = {"rope_type": c.rope_type, "factor": c.factor, "low_freq_factor": c.low,
                   "high_freq_factor": c.low + float(c.high.split("+")[1]),
                   "original_max_position_embeddings": c.context}
    if c.device == "meta":
        ours(c.head_dim, c.theta, scaling, torch.device("meta"))
    else:
        values(c, ours, theirs, (c.head_dim, c.theta, scaling, c.device))


def check_RMSNorm_forward(c, ours, theirs):
    own = typed(c) if c.offset == 0 or c.weight == "the type of x" else typed(c, "weight")
    norm = RMSNorm(replace(LLAMA, norm_offset=c.offset, norm_eps=c.eps), c.dim).to(own)
    norm.weight.data = normal(c, c.dim).to(own)
    x = numbers(c, *shape_of(c.shape), c.dim)
    finite = c.numbers not in ("with -inf", "with NaN", "zeros", "equal", "tiny")
    learns = c.type == c.weight and c.type in ("float32", "float64") and finite and c.dim > 1
    values(c, ours, theirs, (norm, x), {"x": x, "self.weight": norm.weight} if learns else None,
           relative=False)


# --- sitting 2


def check_visible(c, ours, theirs):
    first = torch.full((c.B,), c.first) if c.rows == "alike" else whole(c, 0, c.first + 1, c.B)
    places = torch.arange(c.T)
    tree = None
    if c.tree:
        rows = {"T": 0, "1": 1, "B": c.B}[c.tree[0]]
        places = (places * 0.6).long()
        tree = whole(c, 0, 2, *[rows] * (rows > 0), c.T, c.T).bool().tril()
        tree |= torch.eye(c.T, dtype=torch.bool)
    positions = first[:, None] + places
    slots = first[:, None] + torch.arange(c.T) + (c.T + 2 if c.slots == "behind" else 0)
    values(c, ours, theirs, (positions, slots, int(slots.max()) + 1 + c.after, tree, c.window))


@functools.cache
def attention_of(Hkv, G, D, kind, family):
    more = dict(qkv_bias=True, qk_norm=True) if family == "Qwen" else {}
    return Attention(replace(LLAMA, dim=8, n_heads=Hkv * G, n_kv_heads=Hkv, head_dim=D,
                             **more)).to(kind).requires_grad_(False)


def check_Attention_forward(c, ours, theirs):
    # one module for many cases, as in a model
    a = attention_of(c.Hkv, c.G, c.D, typed(c), c.family)
    a.scale = c.scale
    a.c = replace(a.c, attn_softcap=c.softcap)
    angles = typed(c, "angles")
    rows = c.B if c.positions == "B rows" else 1
    S = c.past + c.T
    at = c.past + torch.arange(c.T) + (3 * torch.arange(rows)[:, None] if rows > 1 else 0)
    cos, sin = (t.view(rows, c.T, 1, 1, c.D).to(angles) for t in rope(at, frequencies(c.D, 50.0)))
    mask = None
    if c.mask:
        mask = torch.full((c.B if c.mask == "B rows" else 1, 1, 1, c.T, S), -INF).triu(c.past + 1)
        mask = mask.masked_fill(whole(c, 0, 4, len(mask), 1, 1, 1, S) == 0, -INF).to(angles)
        mask[..., range(c.T), range(c.past, S)] = 0     # each token sees itself
    past = normal(c, 2, c.B, c.Hkv, c.past, c.D).to(angles)
    asks = Asks()

    def store(k, v):
        asks.now += [(tuple(k.shape), k.dtype), (tuple(v.shape), v.dtype)]
        return tuple(torch.cat(pair, 2) for pair in zip(past, (k, v), strict=True))

    for _ in range(1 if c.weights == "the same as before" else 2):
        for w in a.parameters():
            w.data.copy_(normal(c, *w.shape))
        x = normal(c, c.B, c.T, 8).to(typed(c))
        learns = c.type == c.angles == "float64"
        values(c, ours, theirs, (a, x, cos, sin, mask, store), relative=False, work=angles,
               trained={"x": x, "self.wqkv": a.wqkv, "self.wo": a.wo} if learns else None,
               around=asks)
        promise(asks.of[ours] == asks.of[theirs], told(c, []),
                f"`store` called once, with {asks.of[theirs]}", f"with {asks.of[ours]}", LIKELY)


def check_KVCache_write(c, ours, theirs):
    at = Placement.span(c.first, c.first + c.T)
    end = c.first + c.T + c.after
    if c.at != "same":
        rows = 1 if c.at == "one row" else c.B
        slots = torch.arange(c.first, c.first + c.T).repeat(rows, 1)
        if c.at == "ragged":
            slots = slots - whole(c, 0, c.first + 1, rows, 1)
        else:
            slots = slots.gather(1, normal(c, rows, c.T).argsort(1))
        at = Placement(2 * slots // 3, slots, int(slots.min()), end)    # siblings share positions
    full = replace(LLAMA, n_layers=3, n_kv_heads=c.Hkv, head_dim=c.D)
    cache = KVCache(full, c.B, end + 3, typed(c))
    cache.k.copy_(normal(c, *cache.k.shape))
    cache.v.copy_(normal(c, *cache.v.shape))
    k, v = normal(c, 2, c.B, c.Hkv, c.T, c.D).to(typed(c))

    def written(f):
        mine = copy.deepcopy(cache)
        mine.use(mine.k, mine.v)
        return lambda *args: (f(mine, *args), mine.k, mine.v)

    values(c, ours, theirs,
           (c.layer, k, v, at._replace(end=end), min(c.start, end)), around=written)


def check_PagedCache_write(c, ours, theirs):
    """Three blocks, of which each keeps some tokens, against a cache without pages."""
    full = replace(LLAMA, n_layers=2, n_kv_heads=c.Hkv, head_dim=4)
    S = 3 * c.T + 8
    paged = PagedCache(full, c.B, S, typed(c), c.page, c.B * -(-S // c.page))
    whole_one = KVCache(full, c.B, S, typed(c))
    known = [c.draw.randint(0, 3) if c.rows == "ragged" else 2 for _ in range(c.B)]
    for _ in range(3):
        first = torch.tensor(known)[:, None]
        slots = first + torch.arange(c.T)
        at = Placement(slots, slots, min(known), int(slots.max()) + 1)
        if c.rows == "alike":
            at = Placement.span(known[0], known[0] + c.T)
        at = at._replace(end=min(S, at.end + c.after))
        for layer in range(2):
            k, v = normal(c, 2, c.B, c.Hkv, c.T, 4).to(typed(c))
            start = min(c.start, min(known))
            got = ours(paged, layer, k, v, at, start)
            want = whole_one.write(layer, k, v, at, start)
            for b in range(c.B):
                n = int(slots[b, -1]) + 1 - start
                agree([t[b, :, :n] for t in got], [t[b, :, :n] for t in want], told(c, [known]))
        kept = c.draw.randint(0, c.T)
        known = [n + (kept if c.rows == "alike" else c.draw.randint(0, c.T)) for n in known]
        keep(paged, known)
        pages = [-(-n // c.page) for n in known]
        promise([len(table) for table in paged.tables] == pages, told(c, [known]),
                f"{pages} pages", f"{[len(table) for table in paged.tables]}")


# --- sitting 3


def check_to_probs(c, ours, theirs):
    logits = numbers(c, *shape_of(c.shape), c.V)
    settings = [c.temperature, c.top_k, c.top_p, c.min_p]
    if c.wrong:
        bad = {"temperature": [-1.0, NAN, INF], "top_k": [0, -3, 1.5], "top_p": [0.0, 1.5, -1],
               "min_p": [0, 1.01, NAN]}
        settings[[*bad].index(c.wrong)] = c.draw.choice(bad[c.wrong])
    elif c.temperature:     # no sum may be so near to a cut that rounding decides
        p = (logits.double() / max(c.temperature, 1e-30)).nan_to_num(neginf=-1e300).softmax(-1)
        p = p.sort(-1, descending=True).values[..., : c.top_k]
        p = p / p.sum(-1, keepdim=True)
        near = 1e-12 if c.type == "float64" else 5e-7
        if c.top_p and ((p.cumsum(-1) - c.top_p).abs() < near).any():
            settings[2] = None
        if c.min_p and ((p / p[..., :1] - c.min_p).abs() < 4 * near * c.min_p).any():
            settings[3] = None
    values(c, ours, theirs, (logits, *settings))


class Counted(Coins):
    """Coins of known uniforms, and after them 0.5, that keep how many were taken and where."""

    def __init__(self, *uniforms):
        self.uniforms = [*uniforms]
        self.taken = 0

    def take(self, count, device):
        self.asked = torch.device(device).type
        first, self.taken = self.taken, self.taken + count
        self.uniforms += [0.5] * self.taken
        return wide(self.uniforms[first : self.taken]).to(device)


def check_Coins_choose(c, ours, theirs):
    shape = shape_of(c.shape)
    rows = math.prod(shape)
    weights = chances(c, c.weights, *shape, c.V)
    if c.weights.startswith("all"):
        weights = torch.full_like(weights, NAN if c.weights == "all NaN" else 0.0)
    weights = (weights * (6e4 if c.weights == "huge" else 1)).to(typed(c))
    us = {"0": [0.0] * rows, "almost 1": [ALMOST_ONE] * rows}.get(
        str(c.u), [c.draw.random() for _ in range(rows)])

    def chosen(f):
        def call(weights):
            coins = Counted(*us)
            with PaperGPU() if c.device == "cuda" else nullcontext():
                ids = f(coins, weights.to(c.device)).to("cpu")
            promise(coins.taken == rows, told(c, [weights]), f"{rows} uniforms, one for each row",
                    f"{coins.taken}", "Gumbel-max takes one per token; turn a single one into an "
                    "id by the running sum of the weights")
            promise(coins.asked == c.device, told(c, [weights]), f"take(count, {c.device})",
                    coins.asked, "the uniforms are wanted where the weights are")
            if c.weights.startswith("all"):
                return ((ids >= 0) & (ids < c.V)).all()
            return ids
        return call

    values(c, ours, theirs, (weights,), around=chosen)


def lengths(c, most):
    """How many of `most` tokens each row proposes."""
    if c.length in ("none", None, "K"):
        return [most] * c.B
    return [0 if c.length == 0 else c.draw.randint(0, most) for _ in range(c.B)]


def doubt(c, V, count=3):
    """p and two q (V,) of a few tokens, and these tokens, the first of which is the draft where it
    is copied."""
    ids = torch.randperm(V, generator=maker(c))[:count]
    p, q, r = (torch.zeros(V, dtype=torch.float64).index_add(0, ids[:n], chances(c, kind, n))
               for kind, n in (("one-hot" if c.p == "one-hot" else "mixed", len(ids)),
                               ("mixed", min(V, 3)), ("mixed", min(V, 2))))
    if c.p == "equal to q":
        p = q
    if len(ids) > 1 and c.p in ("rare", "without the drafted"):
        keep = 2.0**-30 if c.p == "rare" else 0.0
        p[ids[1]] += p[ids[0]] * (1 - keep)
        p[ids[0]] *= keep
    return p, q, r, ids


def writes(run, tables, c, given, why=LIKELY):
    """run(coins) -> a text for each row. Completed with draws from p, (N, V) for each row, they
    have p's law."""
    def completed(coins, texts):
        return tuple((*text, *(int(coins.choose(row)) for row in table[len(text) : n]))
                     for text, (table, n) in zip(texts, tables, strict=True))

    want = law(lambda coins: completed(coins, [()] * len(tables)))
    got = law(lambda coins: completed(coins, run(coins)))
    same_chances(got, want, given, 1e-6 if c.type == "float32" else 1e-9, why)


def check_verify(c, ours, theirs):
    """Only one row is in doubt at one place of its draft. The others are sure of each token, and
    the draft of some goes wrong."""
    most = lengths(c, c.K)
    sure = whole(c, 0, c.V, c.B, c.K + 1)
    p = torch.nn.functional.one_hot(sure, c.V).double()
    drafts = sure[:, : c.K].clone()
    for b in range(1, c.B):
        if c.K and c.V > 1:
            drafts[b, c.draw.randrange(c.K)] += c.draw.choice([0, 1])
    drafts %= c.V
    q = torch.nn.functional.one_hot(drafts, c.V).double()
    place = {"at the first": 0, "at the last": most[0] - 1}.get(c.doubt)
    if place is None or place < 0:
        place = c.draw.randrange(max(1, most[0]))
    p[0, place], unsure, _, (copied, *_) = doubt(c, c.V)
    if most[0] == place + 1 or not most[0]:     # the bonus token is in doubt as well
        p[0, most[0]] = doubt(c, c.V)[0]
    if c.K:
        drafts[0, place] = copied
        q[0, place] = unsure
        dead = torch.arange(c.K) >= torch.tensor(most)[:, None]
        q[dead] = c.draw.choice([NAN, 0.2])
    given = (p.to(typed(c)), None if c.q == "copied" else q.to(typed(c)))
    length = None if c.length in ("none", None) else torch.tensor(most)

    def run(coins):
        tokens = drafts.clone()
        if c.K and c.q == "drawn":
            tokens[0, place] = coins.choose(q[0, place] if place < most[0] else unsure)
        accepted, token = ours(*given, tokens, coins, length)
        promise(all(0 <= n <= m for n, m in zip(accepted.tolist(), most, strict=True)),
                told(c, []), f"of {most} proposed tokens no more accepted", accepted)
        return tuple((*row[:n], t) for row, n, t in zip(
            tokens.tolist(), accepted.tolist(), token.tolist(), strict=True))

    writes(run, [(table, n + 1) for table, n in zip(p, most, strict=True)], c,
           f"{told(c, [])}; rows that propose {most} tokens, place {place} of row 0 in doubt: "
           f"p {few(p[0, place])}, q {few(unsure)}; {{texts: probability}}",
           LIKELY if place < 2 else LATER)


def few(row):
    """A distribution as {token: probability}."""
    return {t: round(float(row[t]), 4) for t in row.nonzero()[:, 0].tolist()}


# --- sitting 4


def check_chain(c, ours, theirs):
    said = normal(c, 7, 7).to(typed(c)) * 2
    known = [[c.draw.randrange(7) for _ in range(c.draw.randint(1, 3))] for _ in range(c.B)]
    left = [c.left if b == 0 else c.draw.randint(1, 40) for b in range(c.B)]
    stops = {"never": None, "at once": lambda k, *_: [True] * c.B,
             "after the last": lambda k, *_: [k + 1 >= c.gamma] * c.B,
             "anywhere": lambda k, logits, token: (token % 3 == 1).tolist()}[c.stop]
    probs = to_probs if c.probs == "greedy" else partial(to_probs, temperature=1.5, top_k=4)

    def drafted(f):
        coins = Coins(11)
        state = state_of(known, left, probs, coins)
        steps = []
        ends = []
        logits = []

        def step(token, k):
            steps.append(k)
            logits.append(said[token])
            return logits[-1].clone()

        def stop(k, given, token):
            ends.append(k)
            promise(given.shape == (c.B, 7) and bool((given == logits[-1][:, 0]).all()),
                    told(c, []), f"stop(k, the raw logits {(c.B, 7)}, token)",
                    f"{tuple(given.shape)}, {short(given):.60}",
                    "stop(k, logits, token) gets the raw logits, not q, and they have no place T")
            return stops(k, given, token)

        draft = f(state, step, Says(c.gamma, stops and stop))
        K = draft.tokens.shape[1]
        live = [K] * c.B if draft.length is None else draft.length.tolist()
        ids = [torch.tensor(draft.tokens[b, :n].tolist()) for b, n in enumerate(live)]
        if K > max(live):
            c.remarks.append(f"right, but it takes {K} steps where {max(live)} would do: what is "
                             "drafted after all rows have stopped is never read")
        asks.now += [steps[: max(live)], ends[: max(live)], coins.index / c.B - K]
        return ids, [draft.q[b, :n] for b, n in enumerate(live) if n]

    asks = Asks()
    values(c, ours, theirs, (), around=lambda f: asks(f, partial(drafted, f)))
    (steps, ends, more), want = asks.of[ours], asks.of[theirs]
    given = told(c, [known])
    promise(steps == want[0], given, f"step(token, k) for k = {want[0]}", f"k = {steps}", LIKELY)
    promise(ends == want[1], given, f"stop(k, ...) once for each of k = {want[1]}", f"k = {ends}",
            LIKELY)
    promise(more == want[2], given, "one uniform for each row and place",
            f"{more:+g} for each row", LIKELY)


@functools.cache
def target(kind):
    model = make(LLAMA).to(getattr(torch, kind))
    read(model, [1, 2])     # which makes its table of angles
    return model


SUBLAYERS = {"all": range(12), "the first": range(4), "without the first": range(1, 12),
             "a gap": [0, 1, 3, 4, 5], "several gaps": [0, 1, 2, 5, 7, 11]}


@torch.inference_mode()
def check_SelfDraft_propose(c, ours, theirs):
    m = target(c.type)
    known = [[c.draw.randrange(17) for _ in range(c.draw.randint(1, 5))] for _ in range(c.B)]
    probs = partial(to_probs, temperature=1.0) if c.B == 1 else to_probs
    taps = {"none": (), "the first": (0,)}.get(str(c.taps).lower(), tuple(range(12)))
    drafter = SelfDraft(m if c.model == "the target" else copy.deepcopy(m),
                        list(SUBLAYERS[c.sublayers]), Rule(c.gamma))

    def proposed(f):
        state = State.start(m, known, 20, taps, probs, Coins(5))
        for b, text in enumerate(known):        # the cache holds all but the last token
            one = KVCache(m.c, 1, state.tokens.shape[1], m.attention_dtype())
            if text[1:]:
                prefill(m, torch.tensor([text[:-1]]), one)
            state.cache.k[:, b] = one.k[:, 0]
            state.cache.v[:, b] = one.v[:, 0]
        drafter.begin(state, {})
        return f(drafter, state)

    given = told(c, [known])
    draft, said = outcome(proposed, (ours,))
    want, says = outcome(proposed, (theirs,))
    promise(said == says, given, says, said, LIKELY)
    if says != "a result":
        return
    agree([draft.tokens], [want.tokens], given)
    if want.tokens.shape[1]:
        agree([draft.q], [want.q], given, relative=False)
    parts = [r and [r.first, r.x, [*r.trace], r.trace] for r in (draft.reuse, want.reuse)]
    if all(parts) and not difference(*parts, relative=False):
        return
    if draft.reuse is None:
        if want.reuse and want.reuse.first:
            c.remarks.append("right, but it gains less: the target runs the sub-layers again that "
                             "the draft shares with it; hand them over as `reuse`")
        return
    promise(c.model == "the target" and want.tokens.numel(), given, "nothing handed over",
            "a Reuse", "a copy's states are rough: hand over only where self.is_target is true")
    first, most = draft.reuse.first, shared_prefix(drafter.sublayers)
    promise(first <= most, given, f"at most {most} sub-layers", f"{first}",
            "after its first gap a draft computes other states than the target")
    promise(set(draft.reuse.trace) == {tap for tap in taps if tap < first}, given,
            f"a trace of the taps before {first}", f"{sorted(draft.reuse.trace)}")
    for b, text in enumerate(known):
        ids = [*text, *draft.tokens[b].tolist()]
        states = dict(enumerate(read(m, ids, range(12))[1].values(), 1))
        states[0] = m.embed(torch.tensor([ids]))
        here = slice(len(text) - 1, None)
        agree([draft.reuse.x[b], *(draft.reuse.trace[tap][b] for tap in draft.reuse.trace)],
              [states[first][0, here], *(states[tap + 1][0, here] for tap in draft.reuse.trace)],
              f"{given}; what is handed over of row {b}", relative=False)


def check_expected_tokens_along(c, ours, theirs):
    series = []
    for i in range(c.texts):
        T = c.T if i == 0 else c.draw.randint(0, 60)
        rates = torch.rand(T, generator=maker(c), dtype=torch.float64)
        series.append({"zeros": rates * 0, "ones": rates * 0 + 1,
                       "one at 0": rates.index_fill(0, torch.arange(min(T, 1)), 0.0)}.get(
                           c.rates, rates).to(typed(c)))
    values(c, ours, theirs, (series[::-1] if c.draw.random() < 0.5 else series, c.gamma))


def check_best_gamma(c, ours, theirs):
    most = c.least + c.more
    asks = Asks()
    dear = c.alpha if c.cost == "alpha" else c.cost
    cost = table_of_costs(c, most + 1, asks, c.least + 1)
    gamma, want = (asks(f)(c.alpha, dear, most, c.least, cost) for f in (ours, theirs))
    speeds = {g: sum(c.alpha**i for i in range(g + 1)) / (g * dear + cost(g + 1))
              for g in range(c.least, most + 1)}
    if gamma != want:       # of equal speeds the shortest, unless rounding made them unequal
        one, other = speeds.get(gamma, 0.0), speeds.get(want, 0.0)
        near = math.isclose(one, other, rel_tol=1e-12) and (gamma < want or one != other)
        promise(near, told(c, []), f"gamma = {want}, with the speed {other:.6g}",
                f"{gamma}, with {one:.6g}", LIKELY)
    asked_alone(c, asks, ours, theirs, f"pass_cost(T) for T = {c.least + 1} to {most + 1}")


def asked_alone(c, asks, ours, theirs, what):
    """Nothing is asked of a machine but what it knows."""
    promise(asks.of[ours] == asks.of[theirs], told(c, []), f"{what} alone",
            f"also for {asks.of[ours][:3]}", LIKELY)


def check_Counts_alpha(c, ours, theirs):
    hits = round(c.share * c.drafted)
    turns = c.drafted + c.draw.randrange(2) * (1 + c.drafted)       # some had no draft
    counts = Counts(-(-turns // 3), turns, turns + 2 * hits, c.drafted, hits, c.gamma * c.drafted,
                    round(hits * c.draw.uniform(1, c.gamma)))
    values(c, ours, theirs, (counts,))


def check_numbers(c, ours, theirs):
    """The axes of the domain are the arguments."""
    names = inspect.signature(theirs).parameters
    values(c, ours, theirs, tuple(getattr(c, name) for name in names))


def check_best_bits(c, ours, theirs):
    bits = c.draw.sample(range(1, 16), c.drafts)
    alphas = {b: {"zeros": 0.0, "ones": 1.0}.get(c.alphas, c.draw.random()) for b in bits}
    asks = Asks()
    cost = table_of_costs(c, c.most + 1, asks, 2)
    machine = alphas, c.size, c.bandwidth, c.call, cost, c.most
    (*pair, speed), (*want, most) = (asks(f)(*machine) for f in (ours, theirs))
    agree([speed], [most], told(c, [alphas]))
    if [*pair] != want:     # of two drafts that are equally fast either will do
        again = theirs({b: a for b, a in alphas.items() if b == pair[0]}, *machine[1:])
        promise(pair[0] in alphas and abs(again[2] - most) < 1e-9 * most,
                told(c, [alphas]), f"(bits, gamma) = {want}", f"{pair}", LIKELY)
    asked_alone(c, asks, ours, theirs, f"pass_cost(T) for T = 2 to {c.most + 1}")


def check_largest_batch(c, ours, theirs):
    costs = table_of_costs(c, 64)
    rough = {}
    asks = Asks()

    def seconds(rows, width):
        """The time of a pass, never so that rounding decides whether drafting gains."""
        if not 1 <= rows <= c.most or width not in (1, c.gamma + 1):
            asks.now.append((rows, width))
        bump = rough.setdefault((rows, width), c.draw.uniform(0.9, 1.1) if c.passes == "rough"
                                else 1.0 + 1e-7 * (width > 1))
        return (1 + rows / 37) ** (1.3 if width > 1 else 1) * costs(width) * bump

    values(c, ours, theirs, (c.alpha, c.gamma, c.cost, seconds, c.most), around=asks)
    asked_alone(c, asks, ours, theirs, f"seconds of 1 to {c.most} rows, 1 or {c.gamma + 1} wide")


# --- sitting 5


def check_GaussianProcess_predict(c, ours, theirs):
    groups = torch.arange(c.n) % min(c.groups, c.n)
    z = whole(c, 0, 2, c.seen, c.n).double()
    theta = [-1.0] * (int(groups.max()) + 1) + [0.3, math.log(max(c.noise, 1e-12))]
    process = GaussianProcess(z, normal(c, c.seen), groups, theta, fit=False)
    asked = z[whole(c, 0, c.seen, c.M)] if c.z == "seen ones" else whole(c, 0, 2, c.M, c.n)
    if c.noise == 0:        # rounding makes the variance at seen sets negative
        process.L = process.L * (1 - 1e-8)
    mean, deviation = ours(process, asked.to(typed(c)))
    want, of = theirs(process, asked.to(typed(c)))
    size = float(process.y.abs().max() * process.std) + abs(process.mean) + 1e-9
    for got, right in ((mean, want), (deviation, of)):
        near = 1e-7 * size
        promise(bool(((got - right).abs() <= near).all()), told(c, [asked]), right, got, LIKELY)


def check_expected_improvement(c, ours, theirs):
    std = torch.full((c.M,), c.deviation).to(typed(c))
    best = c.draw.uniform(-2, 2)
    values(c, ours, theirs, ((best + c.gap * std.double()).to(typed(c)), std, best),
           relative=c.type == "float64" and c.deviation > 1e-9)


def check_climb(c, ours, theirs):
    every = [tuple(bits) for bits in itertools.product((0, 1), repeat=c.n)]
    order = c.draw.sample(range(len(every)), len(every))
    worth = {bits: float(n) for bits, n in zip(every, order, strict=True)}
    if c.scores == "a plateau":
        worth = {bits: max(w, len(every) * 0.7 // 1) for bits, w in worth.items()}
    if c.scores == "all equal":
        worth = dict.fromkeys(every, 1.0)
    if c.scores == "one slope":
        worth = {bits: float(sum(b << i for i, b in enumerate(bits))) for bits in every}
    starts = [c.draw.choice(every) for _ in range(c.starts)]
    out = set() if c.allowed == "all" else {
        bits for bits in every if c.allowed == "the start alone" or c.draw.random() < 0.3}
    out -= set(starts)
    elsewhere = c.elsewhere if isinstance(c.elsewhere, float) else None
    asks = Asks()
    endless = (told(c, [starts]), "a walk that ends", "the score of 10,000 sets was asked",
               "where two sets have the same score, stay")

    def score(z):
        rows = [tuple(row) for row in z.round().int().tolist()]
        asks.now += rows
        if len(asks.now) > 10_000:
            fail(*endless)
        return torch.tensor([worth[row] if row not in out or elsewhere is None else elsewhere
                             for row in rows], dtype=torch.float64)

    def allowed(z):
        return torch.tensor([tuple(row) not in out for row in z.round().int().tolist()])

    given = torch.tensor(starts).to(typed(c))
    values(c, ours, theirs, (score, given, allowed), around=asks)
    promise(len(asks.of[ours]) <= 10_000, *endless)     # which an answer can catch
    far = {*asks.of[ours]} - {*asks.of[theirs]}
    for bits in asks.of[theirs]:    # which may leave out what is not allowed
        far -= {bits[:i] + (1 - bits[i],) + bits[i + 1 :] for i in range(c.n)}
    promise(not far, told(c, [starts]), "scores of the sets of each walk, and of their flips",
            f"also those of {sorted(far)[:3]}",
            "a set may have 60 bits: then there is no time to score all sets")


def check_verify_tree(c, ours, theirs):
    """A tree that is a chain with siblings. One place is in doubt, where up to three siblings are
    drawn, and more are fixed. p depends on the depth alone, and rows after the first are sure."""
    sure = whole(c, 0, c.V, c.depth + 1)
    p = torch.nn.functional.one_hot(sure, c.V).double()                 # (depth + 1, V)
    others = p.clone()
    place = 0 if c.doubt == "at the root" else max(0, c.depth - 1 - c.draw.randrange(2))
    p[place], *unsure, ids = doubt(c, c.V, 3 if c.siblings < 4 else 5)
    drawn = 2 if c.q == "drawn" and c.siblings < 4 else 0
    nodes = []          # (parent, depth, rank, is it on the way down?) of each
    parent = 0
    for depth in range(c.depth):
        many = c.siblings if depth == place else 1 + (c.draw.random() < 0.2)
        main = c.draw.randrange(many)
        nodes += [(parent, depth, rank, rank == main) for rank in range(many)]
        parent = len(nodes) - many + main + 1
    K = len(nodes)
    most = lengths(c, K)
    parents = torch.tensor([node[0] for node in nodes]).long().expand(
        1 if c.parents == "one row" else c.B, K)
    length = None if c.length in ("none", None) else torch.tensor(most)
    tables = [p, *[others] * (c.B - 1)]
    depths = [0, *(depth + 1 for _, depth, *_ in nodes)]
    rows = torch.stack([table[depths] for table in tables]).to(typed(c))     # (B, K + 1, V)

    def run(coins):
        tokens, q, way = [], [], [()]
        for parent, depth, rank, main in nodes:
            token = int(sure[depth]) if main else (int(sure[depth]) + 1 + rank) % c.V
            if depth == place:
                token = int(coins.choose(unsure[rank])) if rank < drawn else int(ids[rank])
            in_doubt = depth == place and rank < drawn
            tokens.append(token)
            q.append(unsure[rank] if in_doubt else torch.eye(c.V).double()[token])
            way.append((*way[parent], token))
        qs = torch.stack(q).expand(c.B, K, c.V).to(typed(c)) if K and c.q == "drawn" else None
        node, token = ours(rows, torch.tensor(tokens).long().expand(c.B, K), parents, coins, qs,
                           length)
        promise(all(0 <= n <= m for n, m in zip(node.tolist(), most, strict=True)),
                told(c, []), f"of {most} proposed nodes none later accepted", node)
        for last, got in zip(most[1:], node.tolist()[1:], strict=True):
            end = 0         # where a row ends whose p is sure of every token
            for n, (parent, depth, *_) in enumerate(nodes[:last], 1):
                if parent == end and tokens[n - 1] == int(sure[depth]):
                    end = n
            promise(got == end, told(c, [tokens]), f"in a row whose p is sure, node {end}", got,
                    "the walk goes on while a child is accepted, however deep it is")
        return tuple((*way[n], t) for n, t in zip(node.tolist(), token.tolist(), strict=True))

    writes(run, [(table, c.depth + 1) for table in tables], c,
           f"{told(c, [])}; parents {parents[0].tolist()}, {most} of them proposed, depth {place} "
           f"of row 0 in doubt: p {few(p[place])}; {{texts: probability}}")


def check_Race_settle(c, ours, theirs):
    p = chances(c, c.p, c.B, c.T, c.V).to(typed(c))
    start = whole(c, c.position, c.position + 3, c.B if c.rows == "B" else 1, 1)
    position = start + torch.arange(c.T) + 1
    seeds = [c.draw.randrange(-2**62, 2**62) for _ in range(c.B if c.seeds == "B" else 1)]
    if c.u == "one is 0":       # that of a token at the first place
        number = (int(position[0, 0]) + c.offset + 1) * c.V + c.draw.randrange(c.V)
        seeds[0] = signed(-(number + 1) * 0x9E3779B97F4A7C15 % 2**64)   # see `sampling.uniform`
    values(c, ours, theirs, (p, position, c.offset),
           around=lambda f: lambda *args: f(Race(seeds), *args))


# --- sitting 6, and what engines add


def check_head_loss(c, ours, theirs):
    head, target = (numbers(c, c.B, c.T, c.V).clone() for _ in range(2))
    most = {"0": 0, "T": c.T}.get(str(c.length))
    length = torch.full((c.B,), most) if most is not None else whole(c, 0, c.T + 1, c.B)
    if c.numbers == "with -inf":        # a head gives each token a chance
        head = normal(c, c.B, c.T, c.V).to(typed(c))
    for b, n in enumerate(length.tolist()):
        if c.dead in ("NaN in head", "NaN in both"):
            head[b, max(0, n - c.ahead) :] = NAN
        if c.dead in ("NaN in target", "NaN in both"):
            target[b, n:] = NAN
    learns = c.type != "bfloat16" and (length > c.ahead).any()
    values(c, ours, theirs, (head, target, c.ahead, length),
           {"head": head, "target": target} if learns else None)


def check_learn(c, ours, theirs):
    length = whole(c, 0, c.K + 1, c.B)
    accepted = {"all": length, "none": length * 0}.get(
        c.accepted, (torch.rand(c.B, generator=maker(c)) * (length + 1)).long())
    p = chances(c, c.p, c.B, c.K + 1, c.V).to(typed(c))
    x = normal(c, c.B, c.K, c.dim).to(typed(c))
    for b, n in enumerate(length.tolist()):
        x[b, n:] = NAN
    values(c, ours, theirs, (normal(c, c.V, c.dim).to(typed(c)), x, p, accepted, length, c.rate),
           relative=False)


def check_enabled_exits(c, ours, theirs):
    step = {"0": 0, "steps - 1": c.steps - 1, "steps": c.steps, "3 x steps": 3 * c.steps}.get(
        str(c.step), c.draw.randrange(c.steps + 1))
    case = step, c.steps, c.L
    if c.step == "whole":       # 2 L step / steps is, but steps / (2 L) is not
        case = c.draw.choice([(9, 36, 14), (9, 27, 21), (18, 45, 35)])
    values(c, ours, theirs, (*case, c.every))


def check_exit_loss(c, ours, theirs):
    some = sorted(c.draw.sample(range(c.L), min(c.L, 3)))
    exits = {"the last": [c.L - 1], "the first": sorted({0, c.L - 1}),
             "all": range(min(c.L, 9))}.get(c.exits, some)
    if c.scale == 0 and c.L - 1 not in exits:
        exits = [*exits, c.L - 1]       # else all weights are 0
    if list(exits) == [0] and c.L > 1:
        exits = [0, c.L - 1]            # the weight of the first alone is 0
    logits = {block: normal(c, c.B, c.T, c.V).to(typed(c)) for block in exits}
    values(c, ours, theirs, (logits, whole(c, 0, c.V, c.B, c.T), c.L, c.scale),
           {str(block): x for block, x in logits.items()} if c.type != "bfloat16" else None,
           relative=False)


def check_draw_at_exit(c, ours, theirs):
    logits = numbers(c, c.E, c.B, c.V)
    probs = {"greedy": to_probs, "warm": partial(to_probs, temperature=1.0),
             "cold": partial(to_probs, temperature=0.4, top_k=3)}[c.probs]
    top = logits.double().softmax(-1).amax(-1)
    threshold = c.threshold
    if ((top - threshold).abs() < 1e-5).any() and c.V > 1:      # rounding would decide
        threshold = 0.0

    def drawn(f):
        def call(logits):
            coins = Coins(9)
            return *f(logits, threshold, probs, coins), coins.index     # how many were spent
        return call

    values(c, ours, theirs, (logits,), around=drawn)


def check_constrain(c, ours, theirs):
    p = chances(c, c.p if c.p != "sum unlike 1" else "drawn", c.B, c.K + 1, c.V)
    p = p * (c.draw.choice([0.98, 1.02]) if c.p == "sum unlike 1" else 1)
    grammar = whole(c, 0, c.S, c.S, c.V)
    if c.allows != "all":
        open_ = whole(c, 0, c.V, c.S, 1)
        kept = whole(c, 0, 2 if c.allows == "some" else 1, c.S, c.V).bool()
        grammar = grammar.masked_fill(~kept.scatter(1, open_, True), -1)
        p.scatter_(2, open_[:, 0].expand(c.B, c.K + 1, c.S) % c.V,
                   2.0**-40 if c.p == "rare" else 0.25)     # something that is allowed has a chance
    state = whole(c, 0, c.S, c.B)
    tokens = whole(c, 0, c.V, c.B, c.K)
    live = torch.ones(c.B, c.K + 1, dtype=torch.bool)
    for b in range(c.B):
        at = int(state[b])
        for k in range(c.K):
            if c.draft == "allowed" and at >= 0:
                tokens[b, k] = c.draw.choice((grammar[at] >= 0).nonzero()[:, 0].tolist())
            at = int(grammar[at, tokens[b, k]]) if at >= 0 else -1
            live[b, k + 1] = at >= 0

    values(c, ours, theirs, (p.to(typed(c)), tokens, grammar, state),
           around=lambda f: lambda *args: f(*args)[live])


def check_ring_mask(c, ours, theirs):
    values(c, ours, theirs, (c.first, c.T, c.window + c.spare, c.window))


def check_ring_counterexample(c, ours, theirs):
    run, size = ours(c.window, c.gamma), c.window + c.gamma - 1
    promise(isinstance(run, list) and all(type(n) is int and 0 <= n <= c.gamma for n in run),
            told(c, []), f"a list of numbers from 0 to {c.gamma}", f"{run!r:.80}")
    promise(replay(size, c.window, c.gamma, run, slow_mask) is not None, told(c, []),
            f"a run in which a ring of {size} slots goes wrong", f"{run!r:.80}, which does not",
            "the block must overwrite a key that it reads: let the text outgrow the window")


def check_of(name):
    """The check above that has the name of the function; where there is none, all arguments are
    numbers."""
    return globals().get(f"check_{name.replace('.', '_')}", check_numbers)


def failure(name, case, ours, theirs):
    """How two functions differ on a case, in words; None if they do not."""
    try:
        check_of(name)(case, ours, theirs)
    except pytest.fail.Exception as e:
        return str(e)
    return None


def calm(f):
    """f, whose errors are those of bad input."""
    @functools.wraps(f)
    def call(*args, **kwargs):
        try:
            return f(*args, **kwargs)
        except Exception as e:
            raise ValueError from e
    return call


def mistake(name, ours, first):
    """The well-known mistake of an answer: the wrong answer that agrees with it on the first input
    for which it fails, and on every third one."""
    for why, mistaken in answers.mutants(name):
        with suppress(Exception):
            if not any(failure(name, case, calm(ours), calm(mistaken))
                       for n, case in enumerate(domains.cases(name))
                       if n == first or n % 3 == 0):
                return why
    return LIKELY


@pytest.mark.parametrize("name", domains.named())
def test_domain(name, record_property):
    """Within its domain an answer agrees with the library."""
    own = "answer" in sys.modules       # an answer is in the library's place
    ours = answers.function(vars(choose(name).library), name)
    theirs = answers.reference(name, own)
    for n, case in enumerate(domains.cases(name)):
        said = failure(name, case, ours, theirs)
        if said and LIKELY in said:
            said = said.replace(LIKELY, mistake(name, ours, n))
        if said:
            pytest.fail(said, pytrace=False)
        for remark in case.remarks[:1]:
            record_property("remark", remark)
