"""When to draft and how far, and what it is worth.

The one thing to remember: drafting gains only where alpha > c, the share of first drafts that are accepted
above the cost of a drafted step relative to a pass of the target.

A rule gives any chain drafter its `gamma` and `stop`; none can change the text. Confidences come from the raw
softmax, and so they mean something at temperature 0, too.
"""
import statistics
import time
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F

from kvcache import KVCache
from speculative import Draft, Drafter, check_gamma

MOST = 16  # drafts longer than this are not considered


# --- the speed-up model


def expected_tokens(alpha, gamma):
    """Tokens that a target pass yields behind gamma drafts: (1 - alpha^(gamma+1)) / (1 - alpha), gamma + 1 at
    alpha = 1 (Leviathan et al. 2023, eq. 1).

    alpha: a number; or a series (T,) of acceptances at successive positions of a text, or a list of them, one
    a text, along which rounds are then followed. Acceptances cluster, and a round starts where another
    was refused: the formula at their mean says too much, and so does the mean run over all positions. Raises
    ValueError where no series is as long as a draft.
    """
    if isinstance(alpha, (int, float)):
        return sum(alpha ** i for i in range(gamma + 1))
    if gamma == 0:
        return 1.0
    tokens = rounds = 0.0
    for series in [alpha] if isinstance(alpha, torch.Tensor) else alpha:
        a = series.tolist()
        starts = [1.0] + [0.0] * (len(a) + 1)  # how probable it is that a round starts at each position
        for i in range(len(a) - gamma + 1):
            reach = starts[i]
            rounds += reach
            tokens += reach
            for k in range(i, i + gamma):
                starts[k + 1] += reach * (1 - a[k])
                reach *= a[k]
                tokens += reach
            starts[i + gamma + 1] += reach
    if not rounds:
        raise ValueError(f"no series of acceptances is as long as a draft of {gamma} tokens")
    return tokens / rounds


def expected_speedup(alpha, gamma, c):
    """Over plain decoding, where verifying gamma + 1 tokens costs as much as one (Leviathan et al. 2023,
    Theorem 3.8)."""
    return expected_tokens(alpha, gamma) / (gamma * c + 1)


def best_gamma(alpha, c, most=MOST, least=0):
    """The gamma of the highest expected speed-up, from `least` on; by default 0, do not draft, where none
    exceeds 1."""
    if not isinstance(alpha, (int, float)):
        most = min(most, max(len(a) for a in ([alpha] if isinstance(alpha, torch.Tensor) else alpha)))
    return max(range(least, most + 1), key=lambda gamma: expected_speedup(alpha, gamma, c))


@dataclass(frozen=True)
class Costs:
    """What the parts of a pass over one token take, in any unit: each of the 2L sub-layers, and the head."""
    sublayers: tuple[float, ...]
    head: float

    @property
    def whole(self):
        return sum(self.sublayers) + self.head

    def c(self, sublayers):
        """The cost of a drafted step relative to a pass of the target. Both include the head."""
        return (sum(self.sublayers[i] for i in sublayers) + self.head) / self.whole


def weight_costs(c):
    """Costs by the number of weights: where tokens are written one by one, reading them is what takes the
    time."""
    attn = c.dim * c.head_dim * (2 * c.n_heads + 2 * c.n_kv_heads)
    return Costs((attn, 3 * c.dim * c.hidden_dim) * c.n_layers, c.vocab_size * c.dim)


@torch.no_grad()
def interleave(actions, repeats):
    """{name: median seconds}: every action once as a warm-up, then A B A B."""
    seconds = {name: [] for name in actions}
    for repeat in range(repeats + 1):
        for name, action in actions.items():
            start = time.perf_counter()
            action()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[name] += [time.perf_counter() - start] * (repeat > 0)
    return {name: statistics.median(s) for name, s in seconds.items()}


def measure_costs(model, at=64, repeats=50):
    """Costs in seconds: each sub-layer alone, and the head, on one token behind `at` others."""
    cache = KVCache(model.c, 1, at + 1, model.attention_dtype(), model.tok.device)
    x, here = model.embed(torch.full((1, 1), 5, device=model.tok.device)), slice(at, at + 1)
    parts = {i: partial(model.run, x, here, cache, [i]) for i in range(2 * model.c.n_layers)}
    times = interleave({**parts, "empty": partial(model.run, x, here, cache, []),
                        "head": partial(model.unembed, x)}, repeats)
    empty = times.pop("empty")  # what a call takes that runs nothing
    head = times.pop("head")
    return Costs(tuple(max(0.0, s - empty) for s in times.values()), head + empty)


# --- rules


class Rule:
    """How far to draft. `gamma` is asked before each draft, `stop` (if there is one) behind each drawn token,
    see `speculative.chain`; `learn` is told what became of it. This one: always the same."""
    stop = None

    def __init__(self, gamma):
        if callable(gamma):
            raise ValueError("a rule needs a whole number of tokens: it is itself what says how many")
        self.most = check_gamma(gamma)

    def begin(self, state):
        """Before the first round of a run. What was learnt in earlier runs may stay."""

    def gamma(self, state):
        """How many tokens to draft: an int, or a list with one for each row."""
        return self.most

    def learn(self, state, round):
        """After a round."""


class Controlled(Drafter):
    """A chain drafter under a rule, which takes the place of its own `gamma` and `stop`. Raises ValueError
    for a drafter that has no `gamma`."""

    def __init__(self, drafter, rule):
        if not hasattr(drafter, "gamma"):
            raise ValueError(f"{type(drafter).__name__} asks no rule how far to draft: control its parts")
        self.drafter, self.rule = drafter, rule
        self.wants_trace = drafter.wants_trace
        drafter.gamma, drafter.stop = rule.gamma, rule.stop

    def begin(self, state, x):
        self.rule.begin(state)
        self.drafter.begin(state, x)

    def propose(self, state):
        return self.drafter.propose(state)

    def observe(self, state, round):
        self.drafter.observe(state, round)
        self.rule.learn(state, round)


class Schedule(Rule):
    """Longer after a draft that was accepted whole, shorter otherwise, each row on its own.

    `Schedule(g)` adds and takes one (the baseline "FS" of DEL, arXiv 2504.05598); `Schedule(g, up=2)` is
    transformers' "heuristic", and up=0, down=0 its "constant".
    """

    def __init__(self, gamma, up=1, down=1, most=MOST):
        super().__init__(gamma)
        self.up, self.down, self.longest = up, down, most

    def begin(self, state):
        self.now = [self.most] * len(state.text)

    def gamma(self, state):
        return self.now

    def learn(self, state, round):
        for b, (drafted, kept) in enumerate(outcomes(round)):
            if drafted:
                change = self.up if kept == drafted else -self.down
                self.now[b] = min(max(1, self.now[b] + change), max(self.longest, self.most))


class Confidence(Rule):
    """Stop behind a token that the draft gives less than `threshold` (transformers'
    assistant_confidence_threshold: 0.4; Kangaroo, arXiv 2404.18911: 0.6)."""

    def __init__(self, threshold, gamma=MOST):
        super().__init__(gamma)
        self.threshold = threshold

    def stop(self, k, logits, token):
        return confidence(logits, token) < self.threshold


class AdaptiveExit(Rule):
    """Confidence with a threshold that steers the acceptance towards `target` (Draft & Verify, Zhang et al.
    2023, section 3.3), each row on its own. The threshold outlives the run, as in the paper's code, and so
    does the acceptance, which starts at 0."""

    def __init__(self, threshold=0.6, target=0.9, beta1=0.5, beta2=0.9, epsilon=0.01, gamma=12):
        super().__init__(gamma)
        self.start, self.target, self.epsilon = threshold, target, epsilon
        self.beta1, self.beta2, self.threshold = beta1, beta2, []

    def begin(self, state):
        if len(self.threshold) != len(state.text):
            self.threshold, self.acceptance = [self.start] * len(state.text), [0.0] * len(state.text)

    def gamma(self, state):
        self.bar = state.send(self.threshold)  # (B,) once a round, not once a token
        return self.most

    def stop(self, k, logits, token):
        return confidence(logits, token) < self.bar

    def learn(self, state, round):
        for b, (drafted, kept) in enumerate(outcomes(round)):
            if drafted:
                m = self.acceptance[b] = self.beta1 * self.acceptance[b] + (1 - self.beta1) * kept / drafted
                up, full = m < self.target, drafted == self.most
                aim = self.threshold[b] + (self.epsilon if up else 0 if full else -self.epsilon)
                self.threshold[b] = self.beta2 * self.threshold[b] + (1 - self.beta2) * aim


class Gate(Rule):
    """Draft only behind a token that the target was sure of (the repository fast-llm-inference by ccs96307:
    0.5), each row on its own."""

    def __init__(self, gamma, threshold=0.5):
        super().__init__(gamma)
        self.threshold = threshold

    def begin(self, state):
        self.sure = [1.0] * len(state.text)  # nothing is known yet of the prompt's last token

    def gamma(self, state):
        return [self.most if sure >= self.threshold else 0 for sure in self.sure]

    def learn(self, state, round):
        self.sure = target_confidence(state, round, self.sure)


class ValueGate(Gate):
    """The gate by expected value: draft iff the acceptance to be expected behind a target token of this
    confidence exceeds c, as far as the formula says.

    It learns the acceptance of first drafts in ten classes of confidence, and that of later ones in one more.
    Old evidence fades, and a class without any is tried: so none is given up for good.
    """

    def __init__(self, c, gamma=MOST, fade=0.99):
        super().__init__(gamma)
        self.c, self.fade = c, fade
        self.first, self.later = [Beta() for _ in range(10)], Beta()

    def kind(self, sure):
        return self.first[min(9, int(10 * sure))]

    def gamma(self, state):
        self.asked = [self.kind(sure) for sure in self.sure]
        return [max(plan(kind.mean(), self.later.mean(), self.c, self.most), kind.hits + kind.misses < 0.5)
                for kind in self.asked]

    def learn(self, state, round):
        for beta in (*self.first, self.later):
            beta.fade(self.fade)
        for (drafted, kept), kind in zip(outcomes(round), self.asked, strict=True):
            if drafted:
                kind.add(min(kept, 1), kept == 0)
                self.later.add(max(0, kept - 1), 0 < kept < drafted)
        super().learn(state, round)


class DoNoHarm(Rule):
    """Never much slower than plain decoding, whatever the draft is worth: gamma by the formula from a decayed
    acceptance estimate of each row, none where alpha <= c.

    A row that does not draft tries one token again when it has saved up for it: each round earns `risk`
    passes, a try costs c. So a useless draft of any price costs a share of `risk`, once a few tries have told
    that it is useless.
    """

    def __init__(self, c, gamma=MOST, risk=0.01, fade=0.95):
        super().__init__(gamma)
        self.c, self.risk, self.decay, self.past, self.saved = c, risk, fade, Beta(), []

    def begin(self, state):
        self.seen = [self.past.copy() for _ in state.text]  # what other texts taught is where a row starts
        if len(self.saved) != len(state.text):
            self.saved = [self.c] * len(state.text)

    def gamma(self, state):
        wanted = []
        for b, seen in enumerate(self.seen):
            gamma = plan(seen.mean(), seen.mean(), self.c, self.most)
            if gamma == 0:
                self.saved[b] += self.risk
                if self.saved[b] >= self.c:
                    gamma, self.saved[b] = 1, self.saved[b] - self.c
            wanted.append(gamma)
        return wanted

    def learn(self, state, round):
        for b, (drafted, kept) in enumerate(outcomes(round)):
            if drafted:
                for beta in (self.seen[b], self.past):
                    beta.fade(self.decay)
                    beta.add(kept, kept < drafted)


class Beta:
    """A Beta(1, 1) prior, uniform, and faded counts: Laplace's rule of succession."""

    def __init__(self, hits=0.0, misses=0.0):
        self.hits, self.misses = hits, misses

    def copy(self):
        return Beta(self.hits, self.misses)

    def mean(self):
        return (self.hits + 1) / (self.hits + self.misses + 2)

    def fade(self, factor):
        self.hits, self.misses = self.hits * factor, self.misses * factor

    def add(self, hits, misses):
        self.hits, self.misses = self.hits + hits, self.misses + misses


def plan(first, later, c, most):
    """The best gamma where the first draft is accepted with probability `first`, each behind an accepted one
    with `later`."""
    best, top, tokens, reach = 0, 1.0, 1.0, first
    for gamma in range(1, most + 1):
        tokens, reach = tokens + reach, reach * later
        if tokens / (gamma * c + 1) > top:
            best, top = gamma, tokens / (gamma * c + 1)
    return best


def outcomes(round):
    """(drafted, accepted) of each row. trap: where an end of text cuts the accepted ones short, nothing
    behind it was refused."""
    pairs = zip(round.proposed.tolist(), round.accepted.tolist(), round.new, strict=True)
    return [(kept if len(new) == kept else drafted, kept) for drafted, kept, new in pairs]


def confidence(logits, token):
    """The raw probability of `token`. logits (B, V), token (B,) -> (B,)"""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.softmax(1, dtype=wide).gather(1, token[:, None])[:, 0]


def target_confidence(state, round, before):
    """The target's raw probability of each row's last known token; `before` for rows that stood still."""
    at = [len(text) - 1 - start for text, start in zip(state.text, round.start.tolist(), strict=True)]
    logits = torch.stack([row[i] for row, i in zip(round.logits, at, strict=True)])     # (B, V)
    token = torch.tensor([text[-1] for text in state.text], device=logits.device)
    sure = confidence(logits, token).tolist()
    return [s if i >= 0 else b for i, s, b in zip(at, sure, before, strict=True)]


# --- two drafts, one behind the other


class Then(Drafter):
    """b goes on where a ends: `Then(SelfDraft(...), NGram(...))` looks up in the text what followed the last
    time it went like the draft (the "n-gram tail"; CAS-Spec, arXiv 2510.26843, cascades them so).

    b must not need the target's cache behind the text, as `SelfDraft` does: nobody has filled it there.
    """

    def __init__(self, a, b):
        self.a, self.b, self.wants_trace = a, b, a.wants_trace or b.wants_trace

    def begin(self, state, x):
        self.a.begin(state, x)
        self.b.begin(state, x)

    def propose(self, state):
        head = self.a.propose(state).cut(max(state.room) - 1)
        K = head.tokens.shape[1]
        clip = (state.left - 1).clamp(0, K)
        length = clip if head.length is None else torch.minimum(head.length, clip)      # (B,)
        self.drafted = length.tolist()
        text, room, tokens = [], [], state.tokens.clone()
        rows = zip(state.text, state.room, head.tokens.tolist(), self.drafted, strict=True)
        for b, (known, left, draft, m) in enumerate(rows):
            tokens[b, len(known) : len(known) + m] = head.tokens[b, :m]
            text.append(known + draft[:m])
            room.append(max(0, left - m))
        n, left = state.send([[len(t) for t in text], room]).unbind()
        tail = self.b.propose(replace(state, tokens=tokens, n=n, left=left, text=text, room=room))
        return join(head, length, tail, state.vocab)

    def observe(self, state, round):
        """Each learns of its own part; b's was refused unseen where a's was not accepted whole."""
        drafted = torch.tensor(self.drafted)
        first, over = round.accepted.minimum(drafted), round.accepted >= drafted
        self.a.observe(state, replace(round, accepted=first, proposed=round.proposed.minimum(drafted)))
        new = [row[m:] for row, m in zip(round.new, self.drafted, strict=True)]
        self.b.observe(state, replace(round, accepted=round.accepted - first, new=new,
                                      proposed=(round.proposed - drafted).clamp(min=0) * over))


def join(head, length, tail, vocab):
    """One Draft: of each row the first `length` (B,) tokens of head, right behind them the tail's."""
    (B, A), T = head.tokens.shape, tail.tokens.shape[1]
    if T == 0:
        return replace(head, length=length)
    more = torch.full_like(length, T) if tail.length is None else tail.length
    at = torch.arange(int((length + more).max()), device=length.device).expand(B, -1)     # (B, K)
    behind = (at - length[:, None]).clamp(max=T - 1)  # whose token is it? from 0: this one of the tail
    source = torch.where(behind < 0, at, A + behind)

    def place(first, second):  # (B, A, ...), (B, T, ...) -> (B, K, ...)
        both = torch.cat([first, second], 1)
        index = source.reshape(*source.shape, *[1] * (both.dim() - 2))
        return both.gather(1, index.expand(-1, -1, *both.shape[2:]))

    q = None
    if head.q is not None or tail.q is not None:  # beside drawn tokens a certain one has a one-hot q
        dtype = (tail.q if head.q is None else head.q).dtype
        q = place(*(F.one_hot(d.tokens, vocab).to(dtype) if d.q is None else d.q for d in (head, tail)))
    return Draft(place(head.tokens, tail.tokens), q, length + more)
