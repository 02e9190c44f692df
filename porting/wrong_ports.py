"""Wrong ports, each made from numpy_port.py by one change: mistakes that check.py must name. And wrong
engines, each made from the library by one change: mistakes that engine.py must name.

make.py runs them all and stores a fingerprint of each wrong answer. A port in any language that
makes one of these mistakes gives one of these answers, so the checker can name the mistake.
"""
from functools import partial
from pathlib import Path

import numpy as np

from porting.check import ROOT
from porting.library_engine import RULES, answer
from support.cuts import change

SOURCE = Path(__file__).with_name("numpy_port.py").read_text(encoding="utf-8")

MISTAKES = [  # function of numpy_port.py, what stands there once, what instead, "comes out if ..."
    ("rotate", "i, i + len(freqs)", "2 * i, 2 * i + 1", "rope pairs neighbours instead of halves"),
    ("rotate", "a * cos - b * sin, b * cos + a * sin", "a * cos + b * sin, b * cos - a * sin",
     "rope turns the other way"),
    ("rotate", "position * f), math.sin(position * f)",
     "np.float32(position) * np.float32(f)), math.sin(np.float32(position) * np.float32(f))",
     "angles are computed in float32"),
    ("frequencies", "2 * i", "i", "the exponent of a frequency is i / D instead of 2i / D"),
    ("frequencies", 'scaling["rope_type"] == "llama3"', "False",
     "llama3 scaling divides every frequency"),
    ("norm", "(x * x).mean(-1, keepdims=True) + eps", "(x * x).mean(-1, keepdims=True)",
     "the norm leaves out eps"),
    ("norm", "offset + weight", "weight", "the norm multiplies by w instead of 1 + w"),
    ("visible", "s <= own", "positions[0] <= s <= own",
     "the mask is square: a block does not see the cache before it"),
    ("visible", "s < window", "s <= window", "the window is one token too wide"),
    ("softcap", "x / cap", "x", "the soft-cap forgets to divide"),
    ("attend", "h // group", "h % len(k)", "query head h reads key head h mod Hkv"),
    ("attend", "np.where(mask[t], softcap(k[g] @ q[h, t] * scale, cap), -np.inf)",
     "softcap(np.where(mask[t], k[g] @ q[h, t] * scale, -np.inf), cap)",
     "the soft-cap comes after the mask"),
    ("attention", "rotate(q, at, m.freqs)", "rotate(q, [t + len(at) for t in at], m.freqs)",
     "queries are turned by the position after the block: the cache's offset had moved on already"),
    ("attention", "(rotate(q, at, m.freqs), rotate(k, at, m.freqs))",
     "(rotate(x, range(len(at)), m.freqs) for x in (q, k))", "positions start at 0 in each block"),
    ("attention", "m.window if layer % 2 == 0 else None", "m.window",
     "every layer slides, not only the even ones"),
    ("mlp", "act * up", "gate * up", "the MLP has no activation"),
    ("mlp", "np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate ** 3))",
     "np.vectorize(math.erf)(gate / math.sqrt(2))", "the gelu is the exact one, not the tanh one"),
    ("sublayer", "x + y", "x", "a sub-layer returns its input: a stand-in that was never replaced"),
    ("run", "embedding[tokens] * m.embed_scale", "embedding[tokens]", "embeddings are not scaled"),
    ("run", 'softcap(x @ m.w.get("lm_head.weight", embedding).T, m.last_cap)',
     'x @ m.w.get("lm_head.weight", embedding).T', "logits are not soft-capped"),
    ("bits", "seed + (i + 1)", "seed + i", "number i of the coins is the one before it"),
    ("bits", "0x94D049BB133111EB % 2**64", "0x94D049BB133111EB", "64-bit products are not cut off"),
    ("to_probs", "(-logits[t], t)", "(-logits[t], -t)", "ties go to the higher id"),
    ("to_probs", "np.cumsum(kept) - kept", "np.cumsum(kept)",
     "top-p leaves out the token that reaches it"),
    ("to_probs", "before[i] >= top_p", "before[i] > top_p",
     "top-p keeps a token although those before it reach it exactly"),
    ("to_probs", "kept[i] < min_p * kept[0]", "i and kept[i] <= min_p * kept[0]",
     "min-p drops a token that is exactly on the edge"),
    ("to_probs", "before = np.cumsum(kept) - kept",
     "before = np.cumsum(kept) - kept\nkept = softmax(np.array(sorted(logits)[::-1], float) / "
     "temperature)[:top_k]\nbefore = np.cumsum(kept) - kept", "top-p comes before top-k"),
    ("to_probs", "kept = softmax(np.array([logits[t] for t in order], float) / temperature)",
     "kept = softmax(np.array([logits[t] for t in order], float) / temperature)\nkept = "
     "np.where(kept >= (min_p or 0) * kept[0], kept, 0)\nkept /= kept.sum()",
     "min-p comes before top-p"),
    ("choose", "total > u", "total >= u", "u = 0 chooses a token of weight 0"),
    ("choose", "u * running[-1]", "u", "weights are taken to sum to 1"),
    ("verify", "flips[accepted] < ratio[accepted]", "flips[accepted] <= ratio[accepted]",
     "u = 0 accepts a token that the target never writes"),
    ("verify", "flips[accepted] < ratio[accepted]", "True", "every draft is accepted"),
    ("verify", "np.maximum(p[accepted] - q[accepted], 0) if accepted < len(draft) else p[accepted]",
     "p[accepted]", "the replacement is drawn from p instead of max(p - q, 0)"),
    ("verify", "np.maximum(p[accepted] - q[accepted], 0) if accepted < len(draft) else p[accepted]",
     "np.maximum(p[accepted] - q[accepted], 0) if accepted < len(draft) else p[accepted - 1]",
     "the bonus token is drawn from the last draft's row"),
    ("verify", "rest if rest.sum() > 0 else p[accepted]",
     "rest if rest.sum() > 0 else np.ones(len(rest))", "an empty residual becomes uniform"),
    ("verify", "rest if rest.sum() > 0 else p[accepted]",
     "np.eye(len(rest))[rest.argmax()] if accepted == len(draft) else rest if rest.sum() > 0 else "
     "p[accepted]",
     "the bonus token is the likeliest one"),
    ("verify", "flips[accepted] < ratio[accepted]",
     "np.prod(flips[:accepted + 1]) < np.prod(np.minimum(ratio[:accepted + 1], 1))",
     "each test compares products: of the uniforms so far, and of the ratios"),
    ("check_chain", 'p = [to_probs(logits, **r["sampling"]) for logits in run(m, block, first, cache)[0]]',
     'logits = run(m, block, first, cache)[0]\np = [to_probs(row, **r["sampling"]) for row in logits]\n'
     'p[-1] = p[-1] if r["sampling"]["temperature"] == 0 else softmax(logits[-1])',
     "the bonus token forgets the temperature and the filters"),
    ("judge", 'verify(p, q, r["draft"], r["uniforms"], r["uniforms"][-1])',
     'verify(p, q, r["draft"], r["uniforms"][1:], r["uniforms"][0])',
     "the coin of the choice is spent before the flips"),
    ("lookup", "reversed(range(len(text) - n))", "range(len(text) - n)",
     "the first occurrence is copied instead of the last one"),
    ("one_text", "[block[i] for i in accepted]", "block[1:len(accepted) + 2]",
     "a refused draft stays in the text"),
    ("one_text", "[block[i] for i in accepted] + [token]", "[block[i] for i in accepted] or [token]",
     "the token after the accepted drafts is left out"),
    ("rounds", "[[next(coins) for _ in range(max(map(len, drafts)))] for _ in texts]",
     "[[next(coins) for _ in draft] for draft in drafts]",
     "a text with a shorter draft spends fewer flips"),
    ("rounds", "flips[b]", "sum(flips, [])[b::len(texts)]",
     "the flips of a batch are spent place by place instead of text by text"),
    ("propose", "for k in range(max(most)):\n    for b, text in enumerate(texts):",
     "for b, text in enumerate(texts):\n    for k in range(max(most)):",
     "the uniforms of a batch's drafts are spent text by text instead of place by place"),
    ("one_text", "min(len(accepted), end)", "len(accepted)",
     "`accepted` counts guesses after an end of text"),
    ("one_text", 'next((i + 1 for i, t in enumerate(new) if t in r["eos"]), len(new))', "len(new)",
     "text goes on after an end of text inside a draft"),
    ("rounds", 'm, texts, lines = (Model(r["model"]), [list(prompt) for prompt in r["prompts"]], [])',
     'r = r | {"eos": r["eos"][:1]}\n'
     'm, texts, lines = (Model(r["model"]), [list(prompt) for prompt in r["prompts"]], [])',
     "only the first id of `eos` ends a text"),
    ("rounds", "m.max_len - len(text)", "m.max_len - len(text) - 1",
     "the last place of the context stays empty"),
    ("propose", "more - 1", "more", "a round drafts one token more than has room"),
    ("attention", "keys[:, first:end], values[:, first:end] = k.swapaxes(0, 1), v.swapaxes(0, 1)",
     "start = min(first, m.max_len - 8)\nkeys[:, start:start + len(x)], values[:, start:start + len(x)] = "
     "(k.swapaxes(0, 1), v.swapaxes(0, 1))",
     "blocks are padded to 8 tokens, and at the end of the context their write is clamped: it moves back"),
    ("race", "(position + 1) * len(p)", "position * len(p)", "a token's noise is that of the place before"),
    ("race", "(position + 1) * len(p) + v", "((position + 1) * len(p) + v) % 2**32",
     "the number of a uniform is cut off at 32 bits"),
    ("race", "-math.log1p(-u) / chance", "u / chance", "the arrival is u / p, without the logarithm"),
    ("race", "-math.log1p(-u) / chance", "-math.log1p(-u) * chance", "the arrival is e * p, not e / p"),
    ("race", "-math.log1p(-u) / chance", "-math.log(max(u, 1e-30)) / chance",
     "e is -log(u), not -log(1 - u)"),
    ("race", "-math.log1p(-u) / chance if chance > 0 else math.inf", "-math.log1p(-u) / max(chance, 1e-30)",
     "u = 0 lets a token win that has no chance"),
    ("race_text", "seed, at)", "seed + 1, at)", "the draft has noise of its own"),
    ("race_text", "seed, at)", "seed, at + 1)", "the draft runs the race of the next place"),
    ("race_text", 'd, text, lines = (r["drafter"], list(prompt), [])', """
d, text, lines = (r["drafter"], list(prompt), [])
draws = itertools.count(len(prompt) - 1)
race = lambda p, seed, position: globals()["race"](p, seed, next(draws))""",
     "the noise goes by the number of draws, not by the position"),
    ("race_text", "winners = [race(row, seed, first + k) for k, row in enumerate(p)]", """
q = [to_probs(run(m, [token], first + k, cache, d["sublayers"])[0][0], **r["sampling"])
     for k, token in enumerate([text[-1], *draft][:-1])]
flips = [bits(seed + 1, first + k) * 2.0**-53 for k in range(len(draft))]
passed = [flips[k] < p[k][t] / q[k][t] for k, t in enumerate(draft)]
rest = [np.maximum(row - other, 0) for row, other in zip(p, q)] + [p[-1]]
winners = [draft[k] if k < len(draft) and passed[k] else race(row, seed, first + k)
           for k, row in enumerate(rest)]""",
     "p / q decides, and the replacement is drawn with the noise of the draft"),
    ("race_rounds", "prompt, seed)", 'prompt, r["seeds"][0])', "all texts race with the seed of the first"),
]

RESIDUAL = "residual = (p - q).clamp_(min=0)"
REPLACED = "torch.where(rejected[:, None], {}, p)"
CHANCE = "mass / (mass + 1 - weight[:, 1:])"
ROWS = {        # file: [(function, what stands there once, what instead, "an engine in which ...")]
    "verification.py": [
        ("verify", "B, K = tokens.shape", "B, K = tokens.shape\np = one_hot(coins.choose(p), p)",
         "a draft is accepted if p draws it, too: that is exact, but it is the rule `match`"),
        ("verify", "coins.flip(ratio[..., 0])", "(coins.flip(ratio[..., 0]) | True)",
         "every draft is accepted"),
        ("verify", "coins.flip(ratio[..., 0])",
         "(coins.flip(ratio[..., 0]) | True) & (p[:, :K].argmax(-1) == tokens)",
         "a draft passes if it is the likeliest token"),
        ("verify", " / q.gather(2, drafted)", "", "a draft is tested by p alone, not by p / q"),
        ("verify", "p[:, :K].gather", "p[:, 1:].gather", "a draft is tested by the row of p after its own"),
        ("verify", "ratio[..., 0])", "ratio[..., 0].clamp(min=1e-9))",
         "u = 0 accepts a token that p never writes"),
        ("verify", "passed.cumprod(1).sum(1)", "passed.sum(1)", "flips after a rejection count"),
        ("verify", "passed = coins.flip", "coins.pool = coins.pool.roll(-1)\npassed = coins.flip",
         "the uniform of the choice is spent before the flips"),
        ("verify", " & (place < length[:, None])", "", "dead drafts after the length are tested"),
        ("verify", "accepted < length", "accepted < K", "a short draft counts as rejected at its end"),
        ("verify", RESIDUAL, "residual = p", "the replacement is drawn from p"),
        ("verify", RESIDUAL, "residual = " + REPLACED.format("(p - q).clamp(min=0).softmax(-1)"),
         "the replacement is drawn from the softmax of max(p - q, 0)"),
        ("verify", "(p - q)", "(q - p)", "the replacement is drawn from max(q - p, 0)"),
        ("verify", "(p - q)", "(p - q * (q.amax() < 1))", "a copied token stays in the residual"),
        ("verify", "q[row, accepted.clamp(max=K - 1)]", "q[row, 0]",
         "the residual has the q of the first draft"),
        ("verify", RESIDUAL, RESIDUAL + "\nresidual[:, -1] += 1 - residual.sum(-1)",
         "the residual is not scaled to sum to 1: the last token gets the rest"),
        ("verify", "torch.where(some, residual, p)", "torch.where(some, residual, p)[:, :1024]",
         "only the first 1,024 tokens can be chosen"),
        ("verify", "torch.where(some, residual, p)", "torch.where(some, residual, torch.ones_like(p))",
         "an empty residual becomes uniform"),
        ("verify", "max=K - 1)] * rejected[:, None]", "max=K - 1)]",
         "the token after a whole draft is drawn from max(p - q, 0), too"),
        ("verify", "p = p[row, accepted]", "p = p[row, accepted.clamp(max=K - 1)]",
         "the bonus token is drawn from the last draft's row"),
        ("verify", "p = p[row, accepted]",
         "p = torch.where(rejected[:, None], p[row, accepted], q[row, (length - 1).clamp(min=0)])",
         "the bonus token is drawn from q"),
        ("verify", RESIDUAL, "residual = torch.where(rejected[:, None], (p - q).clamp(min=0), "
         "one_hot(p.argmax(-1), p))", "the bonus token is the likeliest one"),
        ("verify_block", "B, K = tokens.shape", "return verify(p, q, tokens, coins, length)",
         "drafts are tested token by token"),
        ("verify_block", "(passed * (place + 1)).amax(1)", "passed.cumprod(1).sum(1)",
         "the first flip that fails ends the draft"),
        ("verify_block", "(passed * (place + 1)).amax(1)", "passed.sum(1)",
         "the flips that pass are counted: it is the longest prefix that counts"),
        ("verify_block", "(weights[-1] * r).clamp(max=1)", "weights[-1] * r", "weights are not cut off at 1"),
        ("verify_block", f"torch.where(whole, weight[:, 1:], {CHANCE})", "weight[:, 1:]",
         "each prefix passes with w, not with Z / (Z + 1 - w)"),
        ("verify_block", f"torch.where(whole, weight[:, 1:], {CHANCE})", CHANCE,
         "the whole draft passes with Z / (Z + 1 - w), not with w"),
        ("verify_block", "place + 1 == length[:, None]", "place + 1 == K",
         "the last draft is that before padding"),
        ("verify_block", " & (place < length[:, None])", "", "dead drafts after the length are tested"),
        ("verify_block", "residual = residual[row, accepted.clamp(max=K - 1)]",
         "residual = (p - q[row, accepted.clamp(max=K - 1)]).clamp(min=0)",
         "the replacement is drawn from max(p - q, 0), not from max(w p - q, 0)"),
        ("verify_block", "F.pad(residual.sum(-1)[:, 1:], (0, 1))", "residual.sum(-1)",
         "Z is that of the place before")],
    "methods/trees.py": [
        ("verify_tree", "ratio = left.gather", "ratio = p[row, parents[:, k]].gather",
         "siblings are tested against p, not against what is left of it"),
        ("verify_tree", "less / mass", "less", "what is left of p is not scaled to sum to 1"),
        ("verify_tree", "torch.where(falls, less / mass, left)", "left",
         "a rejected sibling takes nothing from p"),
        ("verify_tree", "rest[row, node]", "p[row, node]", "the token after the path is drawn from p"),
        ("verify_tree", "parents = parents.expand(B, K)", "parents = place.expand(B, K)",
         "each token's parent is the one before it"),
        ("verify_tree", "& (parents[:, k] == node)", "& (parents[:, k] <= node)",
         "the child of a rejected node is accepted"),
        ("verify_tree", "& (parents[:, k] == node)", "& (parents[:, k] == node) & "
         "(parents[0, k] not in parents[0, :k])", "only a first sibling is accepted"),
        ("verify_tree", "live[:, k, None] & (mass > 0)", "mass > 0", "dead nodes take their part of p"),
        ("verify_tree", "coins.flip(chance) & live", "coins.flip(chance)", "dead nodes are tested"),
        ("verify_tree", "coins.flip(chance)", "coins.flip(chance.clamp(min=1e-9))",
         "u = 0 accepts a token that p never writes")],
    "sampling.py": [
        ("Race.settle", "u.neg_().log1p_().neg_() / p", "u / p",
         "the arrival is u / p, without the logarithm"),
        ("Race.settle", "u.neg_().log1p_().neg_() / p", "u.neg_().log1p_().neg_() * p",
         "the arrival is e * p"),
        ("Race.settle", "u.neg_().log1p_().neg_()", "u.log_().neg_()", "e is -log(u), not -log(1 - u)"),
        ("Race.settle", "(nan=torch.inf)", "(nan=0.0)", "u = 0 beside p = 0 wins: 0 / 0")],
    "porting/library_engine.py": [
        ("answer", "p = one_hot(coins.choose(p), p)",
         "coins.pool = coins.pool.roll(1)\np = one_hot(coins.choose(p), p)",
         "a place is drawn with the uniform of the place before"),
        ("answer", "one_hot(coins.choose(p), p)", "one_hot(p.argmax(-1), p)",
         "the likeliest token of p is written, without a draw"),
        ("answer", 'return {"accepted": int(accepted), "token": int(token)}', """
if r["rule"] == "match" and accepted < length:
    coins.pool = torch.tensor(r["uniforms"][-1:], dtype=torch.float64)
    token = coins.choose(torch.tensor(r["p"][int(accepted)]))
return {"accepted": int(accepted), "token": int(token)}""",
         "after a rejected draft the token is drawn again, from p"),
        ("answer", 'q = race.settle(q, place[:, :-1])',
         'q = rules["race"](r["seed"] + 1).settle(q, place[:, :-1])', "the draft has noise of its own"),
        ("answer", "race.settle(q, place[:, :-1])", "race.settle(q, place[:, 1:])",
         "the draft runs the race of the next place"),
        ("answer", "p = race.settle(p, place)", "p = race.settle(p, place + q.shape[1])",
         "the noise goes by the number of draws, not by the position"),
        ("answer", "p = race.settle(p, place)\nq = race.settle(q, place[:, :-1])\ntokens = q.argmax(-1)", """
tokens = race.settle(q, place[:, :-1]).argmax(-1)
drawn_from = q
passed = race.flip((p[:, :-1] / q).gather(2, tokens[..., None]))
q = torch.nn.functional.one_hot(tokens, q.shape[-1]).to(p)
p[:, :-1] = torch.where(passed, q, (p[:, :-1] - drawn_from).clamp(min=0))
p = race.settle(p, place)""",
         "p / q decides, and the replacement is drawn with the noise of the draft")],
}
ENGINES = [(file, *row) for file, rows in ROWS.items() for row in rows]


def wrong_engine(file, scope, old, new):
    """`library_engine.answer` with a mistake in one function of the library or of itself."""
    space = {"__name__": "engine", "__file__": str(ROOT / "porting" / "library_engine.py")}
    exec(compile(change((ROOT / file).read_text(encoding="utf-8"), scope, old, new), file, "exec"), space)
    if "answer" in space:
        return space["answer"]
    return partial(answer, rules={rule: space.get(f.__name__, f) for rule, f in RULES.items()})


def wrong_port(scope, old, new):
    """The source of the port with that mistake."""
    return change(SOURCE, scope, old, new)


def answers(source, requests):
    """{number: answer} of a port given by its source, run in this process. Failed cases have no answer."""
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
