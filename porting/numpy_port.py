"""A port of the library in numpy alone, with plain loops in float32. It passes every case without
trees.

It follows README.md step by step, from top to bottom, and nothing in it is clever.
"""
import itertools
import json
import math
import sys

import numpy as np


def read_weights(folder):
    """{name: float32 array} of a file: eight bytes with the length of the JSON, the JSON, the
    numbers."""
    with open(f"{folder}/model.safetensors", "rb") as file:
        blob = file.read()
    start, tensors = 8 + int.from_bytes(blob[:8], "little"), {}
    for name, entry in json.loads(blob[8:start]).items():
        if name != "__metadata__":
            raw = blob[slice(*(start + at for at in entry["data_offsets"]))]
            if entry["dtype"] == "BF16":    # the upper half of a float32
                raw = (np.frombuffer(raw, "<u2").astype("<u4") << 16).tobytes()
            tensors[name] = np.frombuffer(raw, "<f4").reshape(entry["shape"])
    return tensors


def fingerprint(x):
    flat = x.astype(float).flatten().tolist()
    return {"shape": list(x.shape), "sum": math.fsum(flat),
            "magnitudes": math.fsum(abs(v) for v in flat),
            "values": [flat[i * (len(flat) - 1) // 4] for i in range(5)]}


class Model:
    """The weights, and what config.json says about them."""

    def __init__(self, folder):
        with open(f"{folder}/config.json") as file:
            c = json.load(file)
        self.w, self.gemma = read_weights(folder), c["model_type"] == "gemma2"
        self.L, self.H = c["num_hidden_layers"], c["num_attention_heads"]
        self.Hkv, self.D = c["num_key_value_heads"], c["head_dim"]
        self.eps, self.max_len = c["rms_norm_eps"], c["max_position_embeddings"]
        self.freqs = frequencies(self.D, c["rope_theta"], c.get("rope_scaling"))
        self.offset, self.embed_scale = (
            (1.0, math.sqrt(c["hidden_size"])) if self.gemma else (0.0, 1.0))
        self.scale = (c["query_pre_attn_scalar"] if self.gemma else self.D) ** -0.5
        self.cap, self.last_cap = c.get("attn_logit_softcapping"), c.get("final_logit_softcapping")
        self.window = c["sliding_window"] if self.gemma else None
        self.shape = 2, self.L, self.Hkv, self.max_len, self.D      # of a cache: slot = position


def norm(x, weight, eps, offset):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * (offset + weight)


def frequencies(head_dim, theta, scaling):
    freqs = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    for i, f in enumerate(freqs if scaling else []):
        keep = 0.0
        if scaling["rope_type"] == "llama3":
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            turns = scaling["original_max_position_embeddings"] * f / (2 * math.pi)
            keep = min(1.0, max(0.0, (turns - low) / (high - low)))
        freqs[i] = keep * f + (1 - keep) * f / scaling["factor"]
    return freqs


def rotate(x, positions, freqs):
    """x (T, ..., D): turn token t by its position."""
    y = x.copy()
    for t, position in enumerate(positions):
        for i, f in enumerate(freqs):
            one, other = i, i + len(freqs)
            cos, sin, a, b = (
                math.cos(position * f), math.sin(position * f), x[t, ..., one], x[t, ..., other])
            y[t, ..., one], y[t, ..., other] = a * cos - b * sin, b * cos + a * sin
    return y


def visible(positions, end, window):
    """mask[i][s]: does token i of the block see slot s? Without trees slot = position."""
    return [[int(s <= own and (window is None or own - s < window)) for s in range(end)]
            for own in positions]


def softcap(x, cap):
    return x if cap is None else np.tanh(x / cap) * cap


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attend(q, k, v, mask, scale, cap):
    """q (H, T, D), k and v (Hkv, S, D) -> (T, H * D)"""
    (H, T, D), group = q.shape, q.shape[0] // k.shape[0]
    y = np.zeros((T, H, D), "f4")
    for h in range(H):
        g = h // group
        for t in range(T):
            scores = np.where(mask[t], softcap(k[g] @ q[h, t] * scale, cap), -np.inf)
            y[t, h] = softmax(scores) @ v[g]
    return y.reshape(T, H * D)


def attention(m, layer, x, first, at, cache, see):
    """x (T, dim), after the norm, whose tokens stand in the slots from `first` on, at the positions
    `at`. Writes to the cache before it reads."""
    name, end, (keys, values) = f"model.layers.{layer}.self_attn.", first + len(x), cache[:, layer]
    q, k, v = ((x @ m.w[f"{name}{part}_proj.weight"].T).reshape(len(x), -1, m.D) for part in "qkv")
    q, k = rotate(q, at, m.freqs), rotate(k, at, m.freqs)
    keys[:, first:end], values[:, first:end] = k.swapaxes(0, 1), v.swapaxes(0, 1)      # (Hkv, T, D)
    mask = see(at, end, m.window if layer % 2 == 0 else None)
    y = attend(q.swapaxes(0, 1), keys[:, :end], values[:, :end], mask, m.scale, m.cap)
    return y @ m.w[f"{name}o_proj.weight"].T


def mlp(m, layer, x):
    gate, up, down = (m.w[f"model.layers.{layer}.mlp.{name}_proj.weight"]
                      for name in ("gate", "up", "down"))
    gate, up = x @ gate.T, x @ up.T
    if m.gemma:     # gelu, its tanh approximation
        act = gate * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    else:           # silu
        act = gate / (1 + np.exp(-gate))
    return (act * up) @ down.T


def sublayer(m, i, x, first, at, cache, see=visible):
    """x + f_i(x): 2 * layer is an attention, 2 * layer + 1 an MLP."""
    layer, is_mlp = divmod(i, 2)
    before = ("pre_feedforward" if m.gemma else "post_attention") if is_mlp else "input"
    y = norm(x, m.w[f"model.layers.{layer}.{before}_layernorm.weight"], m.eps, m.offset)
    y = mlp(m, layer, y) if is_mlp else attention(m, layer, y, first, at, cache, see)
    if m.gemma:     # a second norm, after f and before the sum
        after = "post_feedforward" if is_mlp else "post_attention"
        y = norm(y, m.w[f"model.layers.{layer}.{after}_layernorm.weight"], m.eps, m.offset)
    return x + y


def run(m, tokens, first, cache, sublayers=None, at=None, see=visible):
    """Run the model over a block of tokens in the slots from `first` on: logits (T, V), and x
    before the first sub-layer and after each. Without trees a token's position is its slot."""
    at, embedding = at or [first + i for i in range(len(tokens))], m.w["model.embed_tokens.weight"]
    states = [embedding[tokens] * m.embed_scale]
    for i in range(2 * m.L) if sublayers is None else sublayers:
        states.append(sublayer(m, i, states[-1], first, at, cache, see))
    x = norm(states[-1], m.w["model.norm.weight"], m.eps, m.offset)
    return softcap(x @ m.w.get("lm_head.weight", embedding).T, m.last_cap), states


def bits(seed, i):
    """Number i of a seed's stream. % 2**64 is needed because Python's integers do not wrap
    around."""
    z = (seed + (i + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return (z ^ (z >> 31)) >> 11


def to_probs(logits, temperature, top_k, top_p, min_p):
    """logits (V,) -> p (V,). Ties go to the lower id."""
    p, order = np.zeros(len(logits)), sorted(
        range(len(logits)), key=lambda t: (-logits[t], t))[:top_k]
    if temperature == 0:
        p[order[0]] = 1.0
        return p
    kept = softmax(np.array([logits[t] for t in order], float) / temperature)
    before = np.cumsum(kept) - kept
    for i in range(len(kept)):
        if (top_p not in (None, 1) and before[i] >= top_p
                or min_p is not None and kept[i] < min_p * kept[0]):
            kept[i] = 0
    p[order] = kept / kept.sum()
    return p


def choose(weights, u):
    """The first token at which the running sum is greater than u times the whole sum."""
    running = list(itertools.accumulate(map(float, weights)))
    return next(t for t, total in enumerate(running) if total > u * running[-1])


def verify(p, q, draft, flips, coin):
    """p: K+1 rows, q: K rows. Returns the number of accepted tokens, the token after them, the
    ratios."""
    ratio, accepted = [float(p[k][t] / q[k][t]) for k, t in enumerate(draft)], 0
    while accepted < len(draft) and flips[accepted] < ratio[accepted]:
        accepted += 1
    rest = np.maximum(p[accepted] - q[accepted], 0) if accepted < len(draft) else p[accepted]
    return accepted, choose(rest if rest.sum() > 0 else p[accepted], coin), ratio


def lookup(text, n, most):
    """What followed the last earlier occurrence of the text's final n tokens."""
    for i in reversed(range(len(text) - n)):    # not the final ones themselves
        if text[i : i + n] == text[-n:]:
            return text[i + n : i + n + most]
    return []


def propose(m, r, texts, left, caches, coins):
    """For each text a draft, the parent of each of its tokens (the one before it) and what it was
    drawn from; and the uniforms spent."""
    d, V, spent = r["drafter"], len(m.w["model.embed_tokens.weight"]), []
    most = [max(0, min(d.get("gamma", 0), more - 1)) for more in left]
    drafts, q = [[] for _ in texts], [[] for _ in texts]
    if d["kind"] == "ngram":
        drafts = [lookup(text, d["n"], n) for text, n in zip(texts, most, strict=True)]
        q = [[np.eye(V)[t] for t in x] for x in drafts]
        return drafts, [range(len(x)) for x in drafts], q, []
    for k in range(max(most)):
        for b, text in enumerate(texts):
            spent.append(next(coins))           # also for a text that drafts fewer
            if k < most[b]:
                logits = run(m, (text + drafts[b])[-1:], len(text) - 1 + k, caches[b],
                             d["sublayers"])[0]
                q[b].append(to_probs(logits[0], **r["sampling"]))
                drafts[b].append(choose(q[b][-1], spent[-1]))
    return drafts, [range(len(x)) for x in drafts], q, spent


def check_chain(m, r, block, first, cache, parents, q, flips, coin):
    """The whole model reads a block: the positions of its tokens, p after each, which of them are
    accepted, the token after those, and the ratios."""
    p = [to_probs(logits, **r["sampling"]) for logits in run(m, block, first, cache)[0]]
    accepted, token, ratio = verify(p, q, block[1:], flips, coin)
    return [first + i for i in range(len(block))], p, range(1, accepted + 1), token, ratio


def one_text(m, r, text, cache, draft, parents, q, flips, coin, check):
    """One round of one text, to which the new tokens are appended."""
    first, block = len(text) - 1, [text[-1], *draft]
    at, p, accepted, token, ratio = check(m, r, block, first, cache, parents, q, flips, coin)
    new = [block[i] for i in accepted] + [token]
    end = next((i + 1 for i, t in enumerate(new) if t in r["eos"]), len(new))
    text += new[:end]
    return dict(positions=at, block=block, parents=list(parents), draft=draft,
                p=[p[parent][t] for parent, t in zip(parents, draft, strict=True)],
                q=[row[t] for row, t in zip(q, draft, strict=True)], ratio=ratio,
                accepted=min(len(accepted), end), token=token, new=new[:end])


def rounds(r, propose=propose, check=check_chain):
    m, texts, lines = Model(r["model"]), [list(prompt) for prompt in r["prompts"]], []
    coins = (bits(r["seed"], i) * 2.0**-53 for i in itertools.count())
    left = [min(r["max_new"], m.max_len - len(text)) for text in texts]
    caches = [np.zeros(m.shape, "f4") for _ in texts]
    for text, cache in zip(texts, caches, strict=True):
        run(m, text, 0, cache)
    while max(left) > 0:
        drafts, parents, q, drawn = propose(m, r, texts, left, caches, coins)
        flips = [[next(coins) for _ in range(max(map(len, drafts)))] for _ in texts]
        last = [next(coins) for _ in texts]
        lines.append(dict(round=len(lines), u_draft=drawn, u_flip=sum(flips, []), u_next=last))
        for b, text in enumerate(texts):
            row = {} if left[b] <= 0 else one_text(
                m, r, text, caches[b], drafts[b], parents[b], q[b], flips[b], last[b], check)
            for name in "positions block parents draft p q ratio accepted token new".split():
                lines[-1].setdefault(name, []).append(row.get(name))
            left[b] = 0 if text[-1] in r["eos"] else left[b] - len(row.get("new", []))
    return {"rounds": lines}


def race(p, seed, position):
    """The token after `position`: the first to arrive, where token v takes e / p_v, and e = -log(1
    - u) with a number u of its own for each token of each place."""
    arrives = []
    for v, chance in enumerate(p):
        u = bits(seed, (position + 1) * len(p) + v) * 2.0**-53
        arrives.append(-math.log1p(-u) / chance if chance > 0 else math.inf)
    return arrives.index(min(arrives))


def race_text(m, r, prompt, seed):
    """All rounds of one text. What is drafted changes how many passes it takes, never a token of
    it."""
    d, text, lines = r["drafter"], list(prompt), []
    left = min(r["max_new"], m.max_len - len(text))
    cache = np.zeros(m.shape, "f4")
    run(m, text, 0, cache)
    while left > 0:
        first = len(text) - 1
        most = min(d.get("gamma", 0), left - 1)
        draft = lookup(text, d["n"], most) if d["kind"] == "ngram" else []
        while d["kind"] == "sublayers" and len(draft) < most:
            at = first + len(draft)
            logits = run(m, (text + draft)[-1:], at, cache, d["sublayers"])[0]
            draft.append(race(to_probs(logits[0], **r["sampling"]), seed, at))
        logits = run(m, [text[-1], *draft], first, cache)[0]
        p = [to_probs(row, **r["sampling"]) for row in logits]
        winners = [race(row, seed, first + k) for k, row in enumerate(p)]
        accepted = 0
        while accepted < len(draft) and draft[accepted] == winners[accepted]:
            accepted += 1
        new = winners[: accepted + 1]
        end = next((i + 1 for i, t in enumerate(new) if t in r["eos"]), len(new))
        text += new[:end]
        left = 0 if text[-1] in r["eos"] else left - end
        lines.append({"draft": draft, "accepted": min(accepted, end), "new": new[:end]})
    return lines


def race_rounds(r):
    m = Model(r["model"])
    pairs = zip(r["prompts"], r["seeds"], strict=True)
    return {"texts": [race_text(m, r, prompt, seed) for prompt, seed in pairs]}


def tensor(x):
    return np.array(x["data"], "f4").reshape(x["shape"])


def pack(x):
    return {"shape": list(np.shape(x)), "data": np.ravel(x).astype(float).tolist()}


def one_sublayer(r):
    m, x, first, layer = Model(r["model"]), tensor(r["x"]), r["first"], r["sublayer"] // 2
    at, cache = [first + t for t in range(len(x))], np.zeros(m.shape, "f4")
    if r["past"]:
        cache[:, layer, :, :first] = tensor(r["past"]["k"]), tensor(r["past"]["v"])
    y = sublayer(m, r["sublayer"], x, first, at, cache)
    return {"x": pack(y), "k": pack(cache[0, layer][:, at]), "v": pack(cache[1, layer][:, at])}


def forward(r):
    m, tokens = Model(r["model"]), r["tokens"]
    logits, states = run(m, tokens, 0, np.zeros(m.shape, "f4"))
    return {"embedded": pack(states[0]), "sublayers": [pack(x) for x in states[1:]],
            "logits": pack(logits)}


def blocks(r):
    m = Model(r["model"])
    cache = np.zeros(m.shape, "f4")
    return {"logits": [pack(run(m, b["tokens"], b["first"], cache, b["sublayers"])[0])
                       for b in r["blocks"]]}


def judge(r):
    p = tensor(r["p"])
    q = np.eye(p.shape[1])[r["draft"]] if r["q"] is None else tensor(r["q"])
    accepted, token, _ = verify(p, q, r["draft"], r["uniforms"], r["uniforms"][-1])
    return {"accepted": accepted, "token": token}


OPS = {
    "weights": lambda r: {
        "tensors": {n: fingerprint(x) for n, x in read_weights(r["model"]).items()}},
    "norm": lambda r: {"y": pack(norm(tensor(r["x"]), tensor(r["weight"]), r["eps"], r["offset"]))},
    "frequencies": lambda r: {"freqs": pack(frequencies(r["head_dim"], r["theta"], r["scaling"]))},
    "rotate": lambda r: {"y": pack(rotate(tensor(r["x"]), r["positions"], r["freqs"]["data"]))},
    "visible": lambda r: {"mask": visible(r["positions"], r["end"], r["window"])},
    "softcap": lambda r: {"y": pack(softcap(tensor(r["x"]), r["cap"]))},
    "attend": lambda r: {"y": pack(attend(tensor(r["q"]), tensor(r["k"]), tensor(r["v"]), r["mask"],
                                          r["scale"], r["cap"]))},
    "sublayer": one_sublayer, "forward": forward, "blocks": blocks,
    "uniforms": lambda r: {"bits": [bits(r["seed"], r["first"] + i) for i in range(r["count"])]},
    "probs": lambda r: {"p": pack(to_probs(tensor(r["logits"]), **r["sampling"]))},
    "choose": lambda r: {"token": choose(tensor(r["weights"]), r["u"])},
    "verify": judge, "rounds": rounds, "race_rounds": race_rounds,
    "race": lambda r: {"token": race(tensor(r["p"]), r["seed"], r["position"])},
    "ngram": lambda r: {"draft": lookup(r["text"], r["n"], r["gamma"])}}

if __name__ == "__main__":
    for line in sys.stdin:
        case = json.loads(line)
        answer = {"todo": True} if case["trees"] else OPS[case["op"]](case)
        print(json.dumps({"case": case["case"], **answer}))
