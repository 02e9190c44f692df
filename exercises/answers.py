"""Correct answers of another shape than the library's: loops instead of tensors, other coins, less
gained. They must pass. The wrong answers stand in wrong.txt."""
SHAPES = {
    "constrain": ["""
def constrain(p, tokens, grammar, state):
    out = torch.zeros_like(p)
    for b, at in enumerate(state.tolist()):
        for k in range(p.shape[1]):
            for v in range(p.shape[2]):
                if at < 0 or grammar[at, v] >= 0:       # after a forbidden draft anything will do
                    out[b, k, v] = p[b, k, v]
            out[b, k] /= out[b, k].sum()
            at = -1 if at < 0 or k == tokens.shape[1] else int(grammar[at, tokens[b, k]])
    return out
"""],
    "ring_mask, ring_size, ring_counterexample": ["""
def ring_mask(first, T, size, window):
    mask = torch.zeros(T, size, dtype=torch.bool)
    for t in range(T):
        for back in range(min(window, first + t + 1)):
            mask[t, (first + t - back) % size] = True
    return mask

def ring_size(window, gamma):
    return len({*range(window)} | {*range(window - 1, window + gamma)})

def ring_counterexample(window, gamma):
    run = []
    while replay(window + gamma - 1, window, gamma, run, ring_mask) is None:
        run.append(gamma)
    return run
"""],
    "frequencies": ["""
from __future__ import annotations
from sampling import Coins
import functools

@functools.cache
def powers(half: int, theta: float) -> torch.Tensor:
    return torch.tensor([theta ** (-i / half) for i in range(half)], dtype=torch.float64)

def frequencies(head_dim: int, theta: float, scaling: dict | None = None,
                device=None) -> torch.Tensor:
    found = powers(head_dim // 2, theta).to(device)
    if scaling is None:
        return found
    keep = torch.zeros_like(found)
    if scaling["rope_type"] == "llama3":
        turns = scaling["original_max_position_embeddings"] * found / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        keep = ((turns - low) / (high - low)).clip(0, 1)
    return found * (keep + (1 - keep) / scaling["factor"])

if __name__ == "__main__":
    import matplotlib.pyplot as plt
    plt.plot(frequencies(8, 1e4))
print(frequencies(8, 1e4) @ torch.ones(3))
"""],
    "counterexample": ["""
def counterexample():
    # in float32
    return torch.tensor([[1.0, 2.0]] * 3) / 3, torch.tensor([[2.0, 1.0]] * 2) / 3

from sampling import Coins
p, q = counterexample()
for seed in range(3):
    print(first_failure(p[None], q[None], torch.tensor([[0, 1]]), Coins(seed)))
"""],
    "expected_tokens, best_gamma": ["""
def expected_tokens(alpha, gamma):
    return gamma + 1 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)

def expected_tokens_along(series, gamma):
    tokens = rounds = torch.zeros((), dtype=torch.float64)
    for text in series:
        starts = torch.zeros(len(text) + 2, dtype=torch.float64)
        starts[0] = 1
        for i in range(len(text) - gamma + 1):
            reach = torch.cat([torch.ones(1).double(), text[i : i + gamma].double().cumprod(0)])
            ends = -torch.diff(reach, append=torch.zeros(1).double())
            starts[i + 1 : i + gamma + 2] += starts[i] * ends
            tokens, rounds = tokens + starts[i] * reach.sum(), rounds + starts[i]
    if rounds == 0:
        raise ValueError("no text is long enough")
    return tokens / rounds

def best_gamma(alpha, cost, most=MOST, least=0, pass_cost=lambda T: 1.0):
    best = least
    for gamma in range(least, most + 1):
        if expected_speedup(alpha, gamma, cost, pass_cost(gamma + 1)) > expected_speedup(
                alpha, best, cost, pass_cost(best + 1)):
            best = gamma
    return best

import torch
assert best_gamma(0.8, 0.2) == 5, "my trial fails"
"""],
    "cost_in_bits, best_bits": ["""
def cost_in_bits(bits, size, bandwidth, call, group=32):
    read = size * bits / 8
    if bits < 16:
        read += size / group * 2        # a scale of two bytes for each group
    return (read / bandwidth + call) / (2 * size / bandwidth + call)

def best_bits(alphas, size, bandwidth, call, pass_cost, most=8):
    found = [(1.0, 16, 0)]
    for bits in sorted(alphas):
        c, tokens, chance = cost_in_bits(bits, size, bandwidth, call), 1.0, 1.0
        for gamma in range(1, most + 1):
            chance *= alphas[bits]
            tokens += chance
            found.append((tokens / (gamma * c + pass_cost(gamma + 1)), bits, gamma))
    speed, bits, gamma = max(found)
    return bits, gamma, speed
"""],
    "pass_seconds, largest_batch": ["""
def pass_seconds(rows, width, size, cache, bandwidth, flops):
    read = (2 * size + rows * cache) / bandwidth
    return read if read > rows * width * 2 * size / flops else rows * width * 2 * size / flops

def largest_batch(alpha, gamma, cost, seconds, most):
    tokens, best = sum(alpha ** i for i in range(gamma + 1)), 0
    for rows in range(1, most + 1):
        plain = seconds(rows, 1)
        if gamma * cost * plain + seconds(rows, gamma + 1) < tokens * plain:
            best = rows
    return best
"""],
    "head_loss": ["""
def head_loss(head, target, ahead, length):
    rows = []
    for b, count in enumerate(length.tolist()):
        for t in range(count - ahead):
            teacher = torch.distributions.Categorical(logits=target[b, t + ahead].detach())
            rows.append(F.cross_entropy(head[b, t], teacher.probs))
    return torch.stack(rows).mean() if rows else head.new_zeros(())

import torch.nn.functional as F
"""],
    "enabled_exits, exit_loss": ["""
def enabled_exits(step, steps, L, every=None):
    if every is not None:
        found = {l for l in range(L) if l % every == step % every}
    else:
        found = {l for l in range(L) if (L - 1 - l) * steps <= 2 * L * step}
    return torch.tensor([l in found | {L - 1} for l in range(L)])

def exit_loss(logits, tokens, L, scale):
    e = torch.arange(L).cumsum(0).double() * scale
    e[-1] = L - 1 + (e[-2] if L > 1 else 0)
    blocks = sorted(logits, reverse=True)
    far = [-logits[l].log_softmax(-1)[:, :-1].gather(2, tokens[:, 1:, None]).mean() for l in blocks]
    return torch.stack(far) @ (e[blocks] / e[blocks].sum())
"""],
    "draw_at_exit": ["""
def draw_at_exit(logits, threshold, probs, coins):
    B, deepest = logits.shape[1], len(logits) - 1
    exits, q = [], []
    for b in range(B):
        e = 0
        while e < deepest and raw_probs(logits[e, b]).max() < threshold:
            e += 1
        exits.append(e)
        q.append(probs(logits[e, b]))
    return torch.tensor(exits), coins.choose(torch.stack(q)), torch.stack(q)
"""],
    "softcap, rotate": ["""
def softcap(x, cap):
    return x if cap is None else cap * (1 - 2 / ((2 * x / cap).exp() + 1))

def rotate(x, cos, sin):
    D = x.shape[-1]
    return x * cos + torch.stack([x[..., (i + D // 2) % D] for i in range(D)], -1) * sin
"""],
    "RMSNorm.forward": ["""
class RMSNorm(nn.Module):
    def forward(self, x):
        wide = x.double()
        length = (wide ** 2).mean(-1, keepdim=True).add(self.eps).sqrt()
        return (wide / length * (self.offset + self.weight.double())).to(x.dtype)
"""],
    "visible": ["""
def chain_of(T):
    return torch.tensor([[j <= i for j in range(T)] for i in range(T)])

def visible(positions, slots, end, tree=None, window=None):
    B, T = slots.shape
    tree = (chain_of(T) if tree is None else tree).expand(B, T, T)
    mask = torch.zeros(B, T, end, dtype=torch.bool)
    for b in range(B):
        at = {int(s): int(p) for s, p in zip(slots[b], positions[b])}
        places = {int(s): j for j, s in enumerate(slots[b])}
        for t in range(T):
            i = int(positions[b, t])
            for s in range(end):
                seen = bool(tree[b, t, places[s]]) if s in places else s < min(i, int(slots[b, 0]))
                mask[b, t, s] = seen and (window is None or i - at.get(s, s) < window)
    return mask
"""],
    "KVCache.write": ["""
class KVCache:
    def write(self, layer, k, v, at, start=0):
        B, _, T, _ = k.shape
        slots = at.slots.expand(B, T)
        for b in range(B):
            for t in range(T):
                self.k[layer, b, :, int(slots[b, t])] = k[b, :, t]
                self.v[layer, b, :, int(slots[b, t])] = v[b, :, t]
        keys, values = self.k[layer, :, :, start : at.end], self.v[layer, :, :, start : at.end]
        return keys.clone(), values.clone()
"""],
    "to_probs": ["""
def to_probs(logits, temperature=0.0, top_k=None, top_p=None, min_p=None):
    check(temperature, top_k, top_p, min_p)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    rows = [one(row, temperature, top_k, top_p, min_p)
            for row in logits.reshape(-1, logits.shape[-1])]
    return torch.stack(rows).view(logits.shape)

def one(row, temperature, top_k, top_p, min_p):
    falling, out = sorted(range(len(row)), key=lambda i: -float(row[i])), torch.zeros_like(row)
    p = ((row - row.max()) / max(temperature, 1e-30)).exp()
    kept = falling[: 1 if temperature == 0 else top_k]
    if top_p is not None and top_p < 1:
        total, mass, few = p[kept].sum(), 0.0, []
        while mass < top_p or not few:
            few.append(kept[len(few)])
            mass += p[few[-1]] / total
        kept = few
    if min_p is not None:
        kept = [i for i in kept if p[i] >= min_p * p[kept[0]]]
    out[kept] = p[kept] / p[kept].sum()
    return out
"""],
    "Coins.choose": ["""
class Coins:
    def choose(self, weights):
        rows, found = weights.reshape(-1, weights.shape[-1]).double().tolist(), []
        for row, u in zip(rows, self.take(len(rows), weights.device).tolist()):
            last, total = max((i for i, w in enumerate(row) if w > 0), default=0), math.fsum(row)
            found.append(next(i for i, t in enumerate(accumulate(row))
                              if i == last or t > u * total))
        return torch.tensor(found).view(weights.shape[:-1])

import math
from itertools import accumulate
"""],
    "verify": ["""
def verify(p, q, tokens, coins, length=None):
    check_vocabulary(p, q)
    kept, after = [], []
    for b in range(len(tokens)):
        most = tokens.shape[1] if length is None else int(length[b])
        for k in range(most):
            t = int(tokens[b, k])
            drawn = torch.eye(p.shape[-1], dtype=p.dtype)[t] if q is None else q[b, k]
            if not bool(coins.flip(p[b, k, t] / drawn[t])):
                left = torch.relu(p[b, k] - drawn)
                after.append(coins.choose(left if left.sum() > 0 else p[b, k]))
                kept.append(k)
                break
        else:
            kept.append(most)
            after.append(coins.choose(p[b, most]))
    return torch.tensor(kept), torch.stack(after)
""", """
def verify(p, q, tokens, coins, length=None):
    # draw from p at each place, and go on as long as it is what was drafted:
    # right, but it keeps fewer
    check_vocabulary(p, q)
    B, K = tokens.shape
    most = torch.full((B,), K) if length is None else length
    accepted, token = torch.zeros(2, B, dtype=torch.long)
    for b in range(B):
        for k in range(int(most[b]) + 1):
            token[b], accepted[b] = coins.choose(p[b, k]), k
            if k == most[b] or token[b] != tokens[b, k]:
                break
    return accepted, token
"""],
    "chain": ["""
def chain(state, step, rule):
    # all steps, even where all rows have ended: right, but slower
    most = wanted(state, rule)
    token, tokens, qs, over, count = state.last(), [], [], [n == 0 for n in most], [0] * len(most)
    for k in range(max(most)):
        logits = step(token, k)
        qs.append(state.probs(logits))
        token = torch.stack([state.coins.choose(row) for row in qs[-1]])
        tokens.append(token)
        stop = rule.stop(k, logits[:, 0], token[:, 0]) if rule.stop else None
        for b in range(len(most)):
            count[b] += not over[b]
            over[b] = over[b] or count[b] == most[b] or bool(stop is not None and stop[b])
    if not tokens:
        return Draft(state.tokens[:, :0])
    return Draft(torch.cat(tokens, 1), torch.cat(qs, 1), torch.tensor(count))
"""],
    "Race.settle": ["""
class Race(Coins):
    def settle(self, p, position, offset=0):
        # the same race by logarithms, row by row: the largest log p - log e wins
        B, T, V = p.shape
        winners = torch.zeros_like(p)
        for b, row in enumerate(position.expand(B, T) + offset + 1):
            u = uniform(self.seeds[b % len(self.seeds)], row[:, None] * V + torch.arange(V))
            e = (-torch.log1p(-u)).clamp(min=1e-300)
            winners[b].scatter_(1, (p[b].double().log() - e.log()).argmax(-1, keepdim=True), 1.0)
        return winners
"""],
    "SelfDraft.propose": ["""
class SelfDraft(Drafter):
    def propose(self, state):
        # the whole draft, step by step, and nothing handed over:
        # right, but the target runs it all again
        def step(token, k):
            x = self.model.embed(token)
            for i in self.sublayers:
                x = self.model.run(x, state.span(k, k + 1), state.cache, [i])
            return self.model.unembed(x)

        return chain(state, step, self.rule)
"""],
    "climb": ["""
def climb(score, starts, allowed):
    ends = torch.stack([top(score, start, allowed) for start in starts.double()])
    return ends.float(), score(ends)

def top(score, here, allowed):
    worth = lambda z: float(score(z[None])[0])
    near = [torch.where(torch.arange(len(here)) == i, 1 - here, here) for i in range(len(here))]
    best = max([z for z in near if bool(allowed(z[None])[0])], key=worth, default=here)
    return top(score, best, allowed) if worth(best) > worth(here) else here
"""],
}
