"""Wrong ports, made from numpy_port.py by changing one place of it each: what check.py must refuse by name.

The one thing to remember: make.py runs them all and keeps a fingerprint of each wrong answer. A port in any
language that makes one of these mistakes gives one of these answers, and so the checker can say which it is.
"""
from pathlib import Path

import numpy as np

SOURCE = Path(__file__).with_name("numpy_port.py").read_text(encoding="utf-8")

MISTAKES = [  # what stands in numpy_port.py exactly once, what stands there instead, "comes out if ..."
    ("one, other = i, i + len(freqs)", "one, other = 2 * i, 2 * i + 1",
     "rope pairs neighbours instead of halves"),
    ("a * cos - b * sin, b * cos + a * sin", "a * cos + b * sin, b * cos - a * sin",
     "rope turns the other way"),
    ("(-2 * i / head_dim)", "(-i / head_dim)", "the exponent of a frequency is i / D instead of 2i / D"),
    ('if scaling["rope_type"] == "llama3":', "if False:", "llama3 scaling divides every frequency"),
    ("keepdims=True) + eps) *", "keepdims=True)) *", "the norm leaves out eps"),
    ("* (offset + weight)", "* weight", "the norm multiplies by w instead of 1 + w"),
    ("int(s <= own and", "int(positions[0] <= s <= own and",
     "the mask is square: a block does not see the cache before it"),
    ("own - s < window", "own - s <= window", "the window is one token too wide"),
    ("np.tanh(x / cap) * cap", "np.tanh(x) * cap", "the soft-cap forgets to divide"),
    ("g = h // group", "g = h % len(k)", "query head h reads key head h mod Hkv"),
    ("np.where(mask[t], softcap(k[g] @ q[h, t] * scale, cap), -np.inf)",
     "softcap(np.where(mask[t], k[g] @ q[h, t] * scale, -np.inf), cap)",
     "the soft-cap comes after the mask"),
    ("q, k = rotate(q, at, m.freqs), rotate(k, at, m.freqs)",
     "q, k = rotate(q, [t + len(at) for t in at], m.freqs), rotate(k, at, m.freqs)",
     "queries are turned by the position after the block: the cache's offset had moved on already"),
    ("q, k = rotate(q, at, m.freqs), rotate(k, at, m.freqs)",
     "q, k = (rotate(x, range(len(at)), m.freqs) for x in (q, k))", "positions start at 0 in each block"),
    ("m.window if layer % 2 == 0 else None", "m.window", "every layer slides, not only the even ones"),
    ("(act * up) @ down.T", "(gate * up) @ down.T", "the MLP has no activation"),
    ("np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))",
     "np.vectorize(math.erf)(gate / math.sqrt(2))", "the gelu is the exact one, not the tanh one"),
    ("    return x + y\n", "    return x\n",
     "a sub-layer returns its input: a stand-in that was never replaced"),
    ("embedding[tokens] * m.embed_scale", "embedding[tokens]", "embeddings are not scaled"),
    ("softcap(x @ m.w.get(\"lm_head.weight\", embedding).T, m.last_cap)",
     "x @ m.w.get(\"lm_head.weight\", embedding).T", "logits are not soft-capped"),
    ("(seed + (i + 1) * 0x", "(seed + i * 0x", "number i of the coins is the one before it"),
    ("key=lambda t: (-logits[t], t)", "key=lambda t: (-logits[t], -t)", "ties go to the higher id"),
    ("before = np.cumsum(kept) - kept", "before = np.cumsum(kept)",
     "top-p leaves out the token that reaches it"),
    ("    for i in range(len(kept)):\n        if top_p",
     "    kept = softmax(np.array(sorted(logits)[::-1], float) / temperature)[:top_k]\n"
     "    before = np.cumsum(kept) - kept\n    for i in range(len(kept)):\n        if top_p",
     "top-p comes before top-k"),
    ("    before = np.cumsum(kept) - kept\n",
     "    kept = np.where(kept >= (min_p or 0) * kept[0], kept, 0)\n    kept /= kept.sum()\n"
     "    before = np.cumsum(kept) - kept\n", "min-p comes before top-p"),
    ("if total > u * running[-1]", "if total >= u * running[-1]", "u = 0 chooses a token of weight 0"),
    ("if total > u * running[-1]", "if total > u", "weights are taken to sum to 1"),
    ("flips[accepted] < ratio[accepted]", "flips[accepted] <= ratio[accepted]",
     "u = 0 accepts a token that the target never writes"),
    ("flips[accepted] < ratio[accepted]", "True", "every draft is accepted"),
    ("np.maximum(p[accepted] - q[accepted], 0) if accepted < len(draft) else p[accepted]", "p[accepted]",
     "the replacement is drawn from p instead of max(p - q, 0)"),
    ("if accepted < len(draft) else p[accepted]", "if accepted < len(draft) else p[accepted - 1]",
     "the bonus token is drawn from the last draft's row"),
    ("rest if rest.sum() > 0 else p[accepted]", "rest if rest.sum() > 0 else np.ones(len(rest))",
     "an empty residual becomes uniform"),
    ("r[\"uniforms\"], r[\"uniforms\"][-1])", "r[\"uniforms\"][1:], r[\"uniforms\"][0])",
     "the coin of the choice is spent before the flips"),
    ("i in reversed(range(len(text) - n)):", "i in range(len(text) - n):",
     "the first occurrence is copied instead of the last one"),
    ("new = [*draft[:accepted], token]", "new = [*draft[: accepted + 1], token]",
     "a refused draft stays in the text"),
    ("new = [*draft[:accepted], token]", "new = draft[:accepted] or [token]",
     "the token after the accepted drafts is left out"),
    ("for _ in range(max(map(len, drafts)))] for _ in texts]", "for _ in draft] for draft in drafts]",
     "a text with a shorter draft spends fewer flips"),
    ("next((i + 1 for i, t in enumerate(new) if t in r[\"eos\"]), len(new))", "len(new)",
     "text goes on after an end of text inside a draft"),
    ("m.max_len - len(text)", "m.max_len - 1 - len(text)", "the last place of the context stays empty"),
    ("d.get(\"gamma\", 0), more - 1)", "d.get(\"gamma\", 0), more)",
     "a round drafts one token more than has room"),
]


def wrong_port(old, new):
    """The source of the port with that mistake."""
    if SOURCE.count(old) != 1:
        raise AssertionError(f"stands {SOURCE.count(old)} times in numpy_port.py, not once: {old!r}")
    return SOURCE.replace(old, new)


def answers(source, requests):
    """{number: answer} of a port given by its source, run in this process. A case that it cannot finish has
    none."""
    space, found = {"__name__": "port"}, {}
    exec(compile(source, "wrong port", "exec"), space)  # our own source, with one line changed
    for request in requests:
        if not request["trees"]:
            try:
                with np.errstate(all="ignore"):
                    found[request["case"]] = space["OPS"][request["op"]](request)
            except (ArithmeticError, LookupError, StopIteration, ValueError):
                continue
    return found
