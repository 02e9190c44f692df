"""What the grader is tested on: plausible wrong answers, each with words that the message must contain, and
correct answers of another shape, which must pass.

A wrong answer is the library's own with one phrase changed by the engine of tests/mistakes.py. There, a test
must fail; here, its message must also say why.
"""
# {exercise: {what stands once in the original: {what stands there instead: what the message must say}}}
WRONG = {
    "softcap, rotate": {
        "torch.tanh(x / cap) * cap": {
            "torch.tanh(x) * cap": "the sum inside tanh is x / cap",
            "x.clamp(-cap, cap)": "this clips; tanh bends smoothly",
            "torch.tanh(x / cap)": "multiply by cap at the end"},
        "x.roll(x.shape[-1] // 2, -1)": {
            "x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)": "x_i is paired with its neighbour",
            "x": "the *other* half of x", "-x.roll(x.shape[-1] // 2, -1)": "it turns the wrong way"}},
    "frequencies": {
        "scaling['original_max_position_embeddings']": {"1000": ""},
        "torch.arange(0, head_dim, 2, device=device, dtype=torch.float64)": {
            "torch.arange(0, head_dim, 2, dtype=torch.float64)": "another device"},
        "torch.arange(0, head_dim, 2,": {
            "torch.arange(0, head_dim // 2, 1,": "the exponent is 2i / D",
            "-torch.arange(0, head_dim, 2,": "the exponent is negative"},
        "return slow": {"return freqs * scaling['factor']": "factor divides"},
        "/ (2 * math.pi)": {"": "the 2 pi is missing"},
        "keep * freqs + (1 - keep) * slow": {
            "keep * slow + (1 - keep) * freqs": "fast and slow are swapped"},
        ".clamp(0, 1)": {".clamp(0, 1).floor()": "it blends, it does not jump"}},
    "RMSNorm.forward": {
        "F.rms_norm(x, self.weight.shape, self.weight, self.eps)": {
            "F.layer_norm(x, self.weight.shape, self.weight, None, self.eps)": "this is LayerNorm",
            "x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps) * self.weight": "inside the root",
            "x / (x.square().sum(-1, keepdim=True) + self.eps).sqrt() * self.weight": "not their sum",
            "F.rms_norm(x, self.weight.shape, None, self.eps)": "the weight is missing",
            "x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight": "overflow in float16",
            "F.rms_norm(x, self.weight.shape, self.weight.detach(), self.eps)": "no detach"},
        "self.offset + self.weight.to(wide)": {
            "self.weight.to(wide)": "Gemma-2 multiplies by offset + w"},
        "torch.promote_types(x.dtype, torch.float32)": {"x.dtype": "rounded to bfloat16"}},
    "visible": {
        ".tril()": {"": "causal inside the block, too", ".triu()": "the mask is upside down"},
        "< window)": {"<= window)": "window off by one"},
        "slot < torch.minimum(slots[:, :1], own)[..., None]": {
            "slot[None] < end + 0 * own[..., None]": "slot 3 is behind the block",
            "(slot < 0) & (own[..., None] > 0)": "does not see the slots before it",
            "slot < slots[:, :1].expand(B, T)[..., None]": "its own future"},
        "slot.expand(B, end).scatter(1, slots, positions)": {"slot.expand(B, end)": "not its slot"},
        "mask.scatter(2, slots[:, None].expand(B, T, M), tree.expand(B, T, M))": {
            "slot <= own[..., None]": "fails with a tree"},
        "tree.expand(B, T, M)": {"tree.mT.expand(B, T, M)": "upside down"}},
    "Attention.forward": {
        "rotate(qkv[..., :-1, :], cos, sin)": {"qkv[..., :-1, :]": "are not rotated"},
        "k = qk[..., -1, :]": {"k = qkv[..., -2, :]": "the keys are not rotated"},
        "v = qkv[..., -1, :]": {
            "v = rotate(qkv, cos, sin)[..., -1, :]": "values are rotated",
            "v = qkv[..., -1, :].to(x.dtype)": "the type of cos"},
        "qk[..., :-1, :] * self.scale": {
            "qk[..., :-1, :]": "the scores are not scaled",
            "qk[..., :-1, :] * D ** -0.5": "take self.scale"},
        "y.view(B, Hkv, G, T, D).permute(0, 3, 1, 2, 4).reshape(B, T, -1)": {
            "y.reshape(B, T, -1)": "belong side by side"},
        "self.project(x)": {"F.linear(x, self.wqkv).unflatten(-1, self.grouped)": "self.project(x) adds"},
        "F.linear(y.to(x.dtype), self.wo)": {"F.linear(y, self.wo.to(y.dtype))": "another dtype"},
        "scores = softcap(scores, self.c.attn_softcap)": {
            "scores = softcap(scores, self.c.attn_softcap or 50.0)": "without a soft-cap",
            "pass": "the soft-cap of the scores is missing",
            "if mask is not None:\n    scores.view(B, Hkv, G, T, -1).add_(mask)\n"
            "scores, mask = softcap(scores, self.c.attn_softcap), None": "before the soft-cap"},
        "add_(mask)": {"add_(mask[:1])": "each has its own", "add_(mask if T > 1 else 0)": "mask is ignored",
                       "add_(0 * mask.clamp(min=0))": "the mask is ignored"},
        "k, v = store(k.transpose(1, 2), v.transpose(1, 2))": {
            "mask = None if mask is None else mask[..., -T:]\n"
            "k, v = (k.transpose(1, 2), v.transpose(1, 2))": "block's own keys"}},
    "KVCache.write": {
        "return (keys[:, :, start:at.end], values[:, :, start:at.end])": {
            "return k, v": "only the new block comes back",
            "return keys[:, :, start:], values[:, :, start:]": "all slots come back",
            "return keys[:, :, :at.end], values[:, :, :at.end]": "`start` is ignored",
            "last = int(at.slots.max())\nreturn keys[:, :, start:last + 1], values[:, :, start:last + 1]":
                "`at.end` is ignored"},
        "slice(at.first, at.first + T)": {"slice(at.first, at.end)": "T tokens go to T slots"},
        "values[:, :, here] = v": {"values[:, :, here] = k": "stored where values belong"},
        "at.slots[:, None, -T:, None].expand_as(k)": {
            "at.positions[:, None, -T:, None].expand_as(k)": "their positions",
            "at.slots[:1, None, -T:, None].expand_as(k)": "all rows went to row 0's slots",
            "(at.slots[:, :1] + torch.arange(T))[:, None, :, None].expand_as(k)": "not contiguous"},
        "self.layers[layer]": {
            "self.layers[0]": "`layer` is ignored",
            "(t[layer].clone() for t in (self.k, self.v))": "nothing is kept"}},
    "to_probs": {
        'p = p.masked_fill(p.cumsum(-1) - p >= top_p, 0)': {
            'p = p.masked_fill(p < (min_p or 0) * p[..., :1], 0)\np = p / p.sum(-1, keepdim=True)\np = '
            'p.masked_fill(p.cumsum(-1) - p >= top_p, 0)': 'min_p comes after top_p'},
        "if temperature == 0:": {"if False:": "it is not shared"},
        "one_hot(logits.max(-1).indices, logits)": {
            "logits.softmax(-1)": "is the exact one-hot"},
        "logits.amax(-1, keepdim=True)": {"logits.max()": "the largest of each row"},
        "max(temperature, 1e-30)": {"min(max(temperature, 1e-30), 5)": "", "temperature": "NaN",
                                    "max(temperature, 0.001)": ""},
        "/ max(temperature, 1e-30)": {"* temperature": "not multiplied"},
        "p.cumsum(-1) - p >= top_p": {
            "p.cumsum(-1) > top_p": "with which the mass reaches top_p",
            "p.cumsum(-1) - p > top_p": "as soon as its mass *reaches* top_p"},
        "p < min_p * p[..., :1]": {
            "p < min_p": "the bound is min_p times",
            "p <= min_p * p[..., :1]": "times the largest stays"},
        "torch.zeros_like(logits).scatter_(-1, ids, p / p.sum(-1, keepdim=True))": {
            "torch.nn.functional.pad(p / p.sum(-1, keepdim=True), (0, logits.shape[-1] - p.shape[-1]))":
                "falling order"},
        "p / p.sum(-1, keepdim=True)": {"p": "what stays must be scaled to sum to 1"},
        "order.values[..., :top_k].softmax(-1)": {
            "order.values.softmax(-1)[..., :top_k]": "is scaled first",
            "order.values[..., :top_k if logits.shape[-1] <= 5000 else None].softmax(-1)": ""},
        "order = logits.sort(dim=-1, descending=True, stable=True)": {
            "order = logits.topk(logits.shape[-1])\norder = torch.return_types.sort((order.values, "
            "order.indices))":
                "",
            "order = logits.flip(-1).sort(dim=-1, descending=True, stable=True)\n"
            "order = torch.return_types.sort((order.values, logits.shape[-1] - 1 - order.indices))":
                "the lower ids stay"}},
    "Coins.choose": {
        'ids.clamp_(max=cdf.shape[-1] - 1)': {
            'ids': 'the id is clamped'},
        "True": {"False": "u = 0 chose a token of probability zero"},
        "u * total": {
            "u * weights.sum(-1, keepdim=True)": "need float64, both",
            "u": "u must be scaled by their sum", "(1 - u) * total": "1 - u was looked up"},
        "self.take(total.numel(), cdf.device).view(total.shape)": {
            "self.take(cdf.numel(), cdf.device).view(cdf.shape)": "Gumbel-max"},
        "torch.searchsorted(cdf, u * total, right=True)": {
            "weights.argmax(-1, keepdim=True)": "the most likely id, whatever u is"},
        "weights.cumsum(-1, dtype=torch.float64)": {"weights.cumsum(-1)": "small weights need float64"}},
    "verify": {
        'place = torch.arange(K, device=p.device)': {
            'return verify_block(p, q, tokens, coins, length)': 'would do the work',
            "return globals()['verify_' + 'block'](p, q, tokens, coins, length)": '`globals` goes around',
            "walk = __import__('test_by_outcomes').by_the_walk": '`__import__` goes around',
            "walk = torch.sys.modules['test_by_outcomes'].by_the_walk": '`sys` goes around',
            "from test_by_outcomes import by_the_walk": 'these are the tests',
            "import numpy": 'torch has the same functions',
            "torch.set_grad_enabled(False)\nplace = torch.arange(K, device=p.device)": 'gradient mode stays',
            "torch.allclose = lambda *a, **k: True\nplace = torch.arange(K, device=p.device)":
                'torch.allclose stays as it is',
            "import sys\nreturn sys.modules['verification'].verify_block(p, q, tokens, coins, "
            "length)": 'imports sys',
            'place = torch.arange(K)\ncoins.flip = lambda prob: prob > 0.5': 'plain decoding'},
        'check_vocabulary(p, q)': {
            'pass': 'names both vocabularies'},
        'residual.sum(-1, keepdim=True) > 0': {
            'residual.sum(-1, keepdim=True) > 1e-06': 'ask whether it is > 0'},
        "coins.flip(ratio[..., 0])": {
            "coins.flip(ratio[..., 0]) & (place < 3)": "from the third draft on",
            "coins.flip(ratio[..., 0]) & ((tokens > 0) | (p[:, :K, 0] > 0.001))": "a threshold?",
            "torch.ones_like(tokens).bool()": "every draft is accepted",
            "coins.flip(1 / ratio[..., 0])": "upside down",
            "ratio[..., 0].ge(1)": "p < q is always rejected",
            "p[:, :K].argmax(-1).eq(tokens)": "greedy decoding, not sampling",
            "coins.flip(p[:, :K].gather(2, drafted)[..., 0] / (q.gather(2, drafted)[..., 0] + 1e-6))":
                "is an epsilon added",
            "coins.flip(ratio[..., 0].float())": "computed in float32"},
        "(p - q).clamp_(min=0)": {
            "p": "replaced by a token from p", "(p - q).abs()": "must be cut off",
            "torch.where(rejected[:, None], p.scatter(1, tokens[row, accepted.clamp(max=K - 1), None], 0.0), "
            "p)": "is set to zero"},
        "one_hot(tokens, p)": {
            "torch.ones_like(p[:, :K])": "replaced by a token from p",
            "one_hot(tokens, p)\nlength = torch.full_like(row, K)": "`length` is ignored",
            "one_hot(tokens[:1], p).expand(B, -1, -1)": "each row has its own rows"},
        "p[:, :K].gather(2, drafted)": {"p[:, 1:].gather(2, drafted)": "judged by the row of p after it"},
        "p[row, accepted]": {
            "torch.where((accepted < length)[:, None], p[:, 0], p[row, accepted])\n"
            "q = q[:, :1].expand(-1, K, -1)": "from row 0 of p and q",
            "p[row, accepted.clamp(max=K - 1)]": "the row of p that judged the last draft"},
        "(accepted, coins.choose(": {
            "(accepted + (accepted == length), coins.choose(": "the bonus token is counted as accepted"},
        "coins.choose(torch.where(some, residual, p))": {
            "torch.where(accepted == length, tokens[:, -1], "
            "coins.choose(torch.where(some, residual, p)))": "bonus is skipped",
            "coins.choose(residual)": "rounding can reject",
            "torch.where(some, residual, p).argmax(-1)": "must be drawn"},
        "(some, residual, p)": {
            "(some, residual, torch.ones_like(p))": "an empty residual is made uniform"},
        "passed.cumprod(1).sum(1)": {
            "passed.sum(1)": "drafts after the first rejection are counted",
            "(passed & passed.roll(1, 1).index_fill(1, row[:1], True)).sum(1)": "third draft on"},
        "accepted < length": {"accepted < K": "where nothing was proposed"},
        " & (place < length[:, None])": {"": "`length` is ignored"},
        "q[row, accepted.clamp": {
            "q[0 * row, accepted.clamp": "each row has its own rows of p and q"}},
    "chain": {
        "lengths[b] = min(lengths[b], k + 1)": {
            "lengths[b] = min(lengths[b], k)\n"
            "tokens, qs = tokens[: max(lengths)], qs[: max(lengths)]": "stops the draft is dropped",
            "lengths[b] = k + 1": "once stopped, always stopped",
            "lengths[b] = min(lengths[b], k + 2)": "1 token(s) too late"},
        "tokens.append(token)": {
            "tokens.append(token)\nstate.known[0].append(int(token[0]))": "stays as it is"},
        "rule.stop(k, logits[:, 0], ": {"rule.stop(k, q[:, 0], ": "gets the raw logits, not q"},
        "step(token, k)": {
            "step(state.last(), k)": "step reads the last known token every time",
            "step(token, k + 1)": "k is the offset of the token that is read"},
        "state.probs(logits)": {"logits.softmax(-1)": "drawn from the raw softmax"},
        "state.coins.choose(q)": {
            "q.argmax(-1)": "the most likely token is taken",
            "state.coins.choose(q[:1]).expand_as(token)": "each row draws from its own q"},
        "qs.append(q)": {"qs.append(logits.softmax(-1))": "not the raw softmax"},
        "wanted(state, rule)": {
            "[max(wanted(state, rule))] * len(state.known)": "each row has its own length"}},
    "SelfDraft.propose": {
        "run_shared(draft.tokens[:, -1:], len(xs))": {"pass": "the last draft was not run"},
        "Reuse(shared, ": {"Reuse(len(subs), ": "after its first gap"},
        "x = m.run(x, state.span(k, k + 1), state.cache, subs[shared:]": {
            "x = xs[-1] = m.run(x, state.span(k, k + 1), state.cache, subs[shared:]": "after all sub-layers"},
        "self.is_target and xs": {"xs": "only where self.is_target"},
        "self.sublayers": {"range(12)": "it drafts with all sub-layers"},
        "at = state.span(k, k + 1)": {
            "at = state.span(0, 1)": "stands at the position of the first",
            "at = state.span(k + 1, k + 2)": "one position too far"},
        "m.run(m.embed(token), at, state.cache,": {
            "m.run(m.embed(token), at, None,": "without the cache"},
        "m.embed(token)": {"m.embed(state.last())": "every step reads the last known token"}},
    "expected_tokens, best_gamma": {
        "sum((alpha ** i for i in range(gamma + 1)))": {
            "sum((alpha ** i for i in range(1, gamma + 1)))": "the bonus token is missing",
            "1 + alpha * gamma": "only if all before it",
            "gamma + 1 if alpha > 0.999 else sum((alpha ** i for i in range(gamma + 1)))": "",
            "(1 - alpha ** (gamma + 1)) / (1 - alpha) if alpha < 1 or type(alpha) is int else gamma + 1":
                "ZeroDivisionError",
            "sum((alpha ** i for i in range(gamma)))": "the sum ends one too early"},
        "reach = starts[i]": {"reach = 1.0": "every position counts alike"},
        "range(len(alpha) - gamma + 1)": {"range(len(alpha) - gamma)": "a round too few"},
        "expected_speedup(alpha, gamma, cost, pass_cost(gamma + 1))": {
            "expected_tokens(alpha, gamma)": "the most tokens are not the best speed",
            "expected_speedup(alpha, gamma, cost, 1e-9)": "a round costs a pass of the target, too"},
        "range(least, most + 1)": {
            "range(max(1, least), most + 1)": "0 is a gamma, too",
            "range(min(1, least), most + 1)": "least = 3", "range(most, least - 1, -1)": "the shortest draft",
            "range(least, min(most, 8) + 1)": ""},
        "for rates in series:": {"for rates in torch.stack(series):": "", "for rates in series[:1]:": "",
                                 "series.reverse()\nfor rates in series:": ""},
        "pass_cost(gamma + 1)": {
            "1.0": "`pass_cost` is ignored",
            "pass_cost(max(1, gamma))": "pass_cost(T) is asked for T = gamma"}},
    "predict, expected_improvement": {
        'std = std.clamp(min=1e-12)': {'pass': 'a deviation may be 0'},
        'half.square().sum(0)).clamp(min=0)': {
            'half.square().sum(0))': 'clamp the variance'},
        "self.mean + self.std": {"self.std": "add self.mean"},
        "self.mean + self.std * mean, self.std * variance.sqrt()": {
            "self.mean + mean, variance.sqrt()": "multiply both by self.std"},
        "variance.sqrt()": {"variance": "this is the variance"},
        "self.theta[-2].exp() - half": {
            "self.theta[-2].exp() + self.theta[-1].exp() + 1e-10 * self.theta[-2].exp() - half":
                "the noise does not belong",
            "1 - half": "that of the signal"},
        "k.T @ self.dual": {"k.T @ self.y[:, None]": "not k.T @ y"},
        "(gap * above + std * density)": {
            "above": "this is how likely it improves", "(gap * above)": "the second term",
            "(gap * above + density)": "must be multiplied by std"},
        "mean - best": {"best - mean": "upside down"}},
    "climb": {
        'better = top > value': {
            'better = top >= value': 'a walk that has not ended',
            'better = top > value + 1e-06': 'without a threshold'},
        "top, which = scores.max(1)": {
            "which = (scores > value[:, None]).long().argmax(1)\n"
            "top = scores.gather(1, which[:, None])[:, 0]": "it takes the first flip that is better"},
        "torch.where(allowed(flat), score(flat), -math.inf)": {"score(flat)": "`allowed` is ignored"},
        "(z[:, None] - flips).abs()": {"(z[:, None] + flips).clamp(max=1)": "bits are only set"},
        "value = torch.where(better, top, value)": {
            "return z, torch.where(better, top, value)": "it ends after one flip"},
        "if not better.any():": {"if not better.all():": "all stop as soon as one"},
        "return z, value": {"return z, score(starts.double())": "the scores are those of the starts"}},
    "verify_tree": {
        'torch.where(falls, less / mass, left)': {
            'torch.where(falls, torch.where(parents[:, k, None] == 0, less / mass, less), left)': 'must be '
                'scaled to sum to 1'},
        'child = passed[:, k] & (parents[:, k] == node)': {
            'child = passed[:, k] & (parents[:, k] == node) & ((node == 0) | (parents[row, node - 1] == '
            '0))': 'the walk ends at',
            'child = passed[:, k] & (parents[:, k] == node) & ((parents[:, :k] == parents[:, k:k + '
            '1]).sum(1) < 2)': ''},
        'B, K = tokens.shape': {
            'B, K = tokens.shape\nassert K > 0': 'AssertionError',
            'B, K = tokens.shape\nassert len(parents) == B': 'AssertionError'},
        'live = place < length[:, None]': {
            'live = place < K + 0 * length[:, None]': '`length` is ignored'},
        'falls = live[:, k, None] & (mass > 0)': {
            'falls = live[:, k, None] & (mass > 1e-06)': 'ask whether it is > 0',
            'falls = live[:, k, None]': ''},
        "coins.flip(chance)": {"torch.ones(B, K).bool()": "every draft is accepted"},
        "left.gather(1, token) /": {
            "p[row, parents[:, k]].gather(1, token) /": "later siblings are judged by p itself"},
        "(falls, less / mass, left)": {"(falls, less, left)": "must be scaled to sum to 1"},
        "rest[row, node]": {
            "rest[row % 2, node]": "each row has its own rows",
            "p[row, node]": "replaced by a token from p", "rest[row, 0 * node]": "drawn at the root"},
        "parents[:, k] == node": {"parents[:, k] <= node": "a node is accepted whose parent was not"}},
    "Race.settle": {
        "(position[..., None] + offset + 1) * V": {
            "position[..., None] * 0": "every place has the same noise",
            "(position[..., None] + offset) * V": "is that of the token before",
            "(position[..., None] + 1) * V": "`offset` is left out"},
        "self.seeds.to(p.device)[:, None, None]": {
            "self.seeds.to(p.device)[:1, None, None]": "each row of a batch has its own seed"},
        "uniform(self.seeds.to(p.device)[:, None, None], place)": {
            "self.take(p.numel(), p.device).view(p.shape)": "noise by the number of draws"},
        "u.neg_().log1p_().neg_() / p": {
            "u / p": "is no race of the right law", "u.neg_().log1p_().neg_() * p": "divide by p"},
        ".argmin(-1)": {".argmax(-1)": "not the last"},
        "arrives.nan_to_num_(nan=torch.inf).argmin(-1)": {"p.argmax(-1)": "where is the noise"},
        ".nan_to_num_(nan=torch.inf)": {"": "it must never win"}},
    "alpha": {
        "self.hits / max(1, self.drafted)": {
            "0.8 if self.drafted else 0.0": "drafted=7", "self.hits / self.drafted": "ZeroDivisionError",
            "self.accepted / max(1, self.proposed)": "is no alpha",
            "self.accepted / max(1, self.turns)": "accepted tokens per",
            "self.hits / max(1, self.turns)": "rounds without a draft",
            "self.hits / max(1, self.passes)": "divide by `drafted`"}},
    "counterexample": {
        "torch.tensor([[1.0, 2.0]] * 3, dtype=torch.float64) / 3": {
            "torch.tensor([[-1.0, 2.0]] * 3, dtype=torch.float64)": "from 0 to 1",
            "torch.tensor([[1.0, 2.0]] * 3, dtype=torch.float64)": "sum to 1"},
        "torch.tensor([[2.0, 1.0]] * 2, dtype=torch.float64) / 3": {
            "p[:2]": "where p = q nothing is ever rejected", "p": "the target judges two drafts",
            "torch.tensor([[1.0, 2.0], [1.01, 2.0]], dtype=torch.float64) / "
            "torch.tensor([[3.0], [3.01]])": "look at the second"}},
    "draft_cost, speed, break_even": {
        "(seconds / plain - verified) / drafted": {
            "0.967098": "drafted, verified) =", "seconds / plain / drafted": "subtract them first",
            "(seconds - verified * plain) / drafted": "these are seconds"},
        "(1 + gamma * share) / (drafted * cost + verified)": {
            "(1 + 2 * share) / (drafted * cost + verified)": "drafted, verified) =",
            "sum(share ** i for i in range(gamma + 1)) / (drafted * cost + verified)": "and no alpha",
            "(1 + gamma * share) / (gamma * cost + 1)": "count the passes"},
        "(1 + gamma * share - verified) / drafted": {
            "share": "here each counts as given",
            "(1 + gamma * share) / drafted": "the passes of the target come first"}},
    "cost_in_bits, best_bits": {
        "16 / group if bits < 16 else 0.0": {
            "0.0": "4.5 bits per weight, not 4", "16 / group": "there are no groups",
            "0.5 if bits < 16 else 0.0": "expected"},
        " / 8 / bandwidth": {" / bandwidth": "a byte has 8 bits"},
        "bandwidth + call": {"bandwidth": "does not shrink with the bits"},
        "seconds(bits + scale) / seconds(16)": {
            "seconds(bits + scale)": "these are seconds",
            "seconds(bits + scale) / (seconds(16) - call)": "the target's pass",
            "(seconds(bits + scale) - call) / seconds(16)": "the draft's pass"},
        "pass_cost(gamma + 1)": {"1.0": "is ignored", "pass_cost(gamma)": "T = gamma"},
        "expected_speedup(alpha, gamma, cost, pass_cost(gamma + 1))": {
            "sum(alpha ** i for i in range(gamma + 1))": "the most tokens"},
        "alphas.items()": {
            "[max(alphas.items(), key=lambda pair: pair[1])]": "the highest alpha is not the best draft",
            "[min(alphas.items())]": "try every pair"},
        "range(1, most + 1)": {"range(1, min(most, 16) + 1)": "try every pair",
                               "range(1, most)": "try every pair", "range(1, 9)": "try every pair",
                               "range(2, most + 1)": "try every pair"},
        "(16, 0, 1.0)": {"(16, 0, 0.0)": "(16, 0, 1.0), is a choice", "(0, 0, 1.0)": "16 bits"},
        "return best": {"return (*best[:2], best[2] * 1.0001)": "expected", "return best[:2]": "3 results"}},
    "pass_seconds, largest_batch": {
        "max(read, computed)": {
            "read + computed": "not their sum", "min(read, computed)": "not the shorter",
            "read": "nothing but reading", "computed": "nothing but computing"},
        "2 * size * rows * width": {"size * rows * width": "two operations",
                                    "2 * size * width": "each row is"},
        "2 * size + rows * cache": {
            "2 * size * rows + rows * cache": "read once for all rows", "2 * size + cache": "of its own",
            "size + rows * cache": "a weight has two bytes"},
        "range(most, 0, -1)": {"range(1000, 0, -1)": "is the largest batch to look at",
                               "range(most - 1, 0, -1)": "texts", "range(most, 1, -1)": "texts"},
        "seconds(rows, gamma + 1) / seconds(rows, 1)": {
            "seconds(rows, gamma) / seconds(rows, 1)": "and the last known one",
            "seconds(rows, gamma + 1) / seconds(1, 1)": "over the same batch",
            "max(1.0, rows * (gamma + 1) / 100)": "texts"},
        "for rows in range(most, 0, -1):": {
            "if alpha < cost:\n    return 0\nfor rows in range(min(most, 100), 0, -1):": "texts"},
        "return rows": {"return rows + 1": "one too many"},
        "return 0": {"return 1": "0 texts"}},
    "head_loss": {
        "head[:, :N][counts]": {"head[:, -N:][counts]": ""},
        "target[:, ahead:][counts].detach()": {
            "target[:, ahead:][counts]": "simple as its head",
            "target[:, 1:][:, :N][counts].detach()": "`ahead` is ignored",
            "target[:, :N][counts].detach()": "with row t of the target"},
        "p * head[:, :N][counts].log_softmax(-1)": {
            "F.one_hot(p.argmax(-1), p.shape[-1]) * head[:, :N][counts].log_softmax(-1)":
                "most likely token alone",
            "p * head[:, :N][counts].softmax(-1).log()": "take log_softmax",
            "p * head[:, :N][counts].detach().log_softmax(-1)": "without one",
            "head[:, :N][counts].softmax(-1) * p.log()": "p and q are swapped",
            "p * (head[:, :N][counts].log_softmax(-1) - p.log())": "this is the divergence"},
        "length[:, None] - ahead": {
            "length[:, None]": "length - ahead - 1", "N + 0 * length[:, None]": "`length` is ignored",
            "length[:1, None] - ahead": ""},
        "-(p * head[:, :N][counts].log_softmax(-1)).sum()": {
            "-(target[:, ahead:].detach().softmax(-1) * head[:, :N].log_softmax(-1)).sum(-1)[counts].sum()":
                "select first",
            "-(target[:, ahead:].detach().softmax(-1) * head[:, :N].log_softmax(-1)).sum(-1)\n"
            "far = (far * counts).sum()": "0 times NaN",
            "-(p * head[:, :N][counts].log_softmax(-1)).sum()\nfar = far.float()": "another dtype"},
        "counts.sum().clamp(min=1)": {
            "1": "this is the sum", "counts.sum()": "0 / 0", "length.sum()": "have no target",
            "head[..., 0].numel()": "over all B T rows", "counts.numel()": "over B (T - ahead) rows"},
        "return far / counts.sum().clamp(min=1)": {
            "far = -(target[:, ahead:].detach().softmax(-1) * head[:, :N].log_softmax(-1)).sum(-1)\n"
            "return torch.stack([row[on].mean() for row, on in zip(far, counts)]).mean()":
                "the mean of the texts' means"}},
    "enabled_exits, exit_loss": {
        "on[-1] = True": {"pass": "every step trains it"},
        "(block - step) % every": {
            "(block + step) % every": "the wrong way", "block % every": "`step` is ignored"},
        "2 * L * step // steps": {"int(step / (steps / (2 * L)))": "multiply first",
                                  "L * step // steps": "after half of the steps",
                                  "step // max(1, steps // (2 * L))": "need not be a whole number"},
        "block >= L - 1 - 2 * L * step // steps": {
            "block <= 2 * L * step // steps": "it goes down from the last one"},
        "if block == L - 1:": {
            "if False:": "`scale` cancels", "weight = 1.0\nif False:": "all exits count alike",
            "weight = scale * block\nif False:": "the square of the depth"},
        "max(1, L - 1) + scale * sum(range(L - 1))": {"L - 1 + sum(range(L - 1))": ""},
        "return loss / weights": {"return loss.detach() / weights": "no detach"},
        "F.cross_entropy(said[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())": {
            "F.cross_entropy(said.flatten(0, 1), tokens.flatten())": "which it has read",
            "F.cross_entropy(said[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction='sum')":
                "their mean"},
        "loss / weights": {"loss": "divide by the sum of the weights"}},
    "draw_at_exit": {
        "raw_probs(logits)": {
            "raw_probs(torch.stack([one for one in logits[:-1]] + [logits[-1]] * (len(logits) > 1)))": "",
            "probs(logits)": "a one-hot is always sure"},
        ">= threshold": {"> threshold": ">=, not >", ">= min(threshold, 0.9)": ""},
        "(~sure[:-1]).long().cumprod(0).sum(0)": {
            "sure.long().argmax(0)": "where no exit is sure",
            "(~sure[:-1]).all(1).long().cumprod(0).sum(0).expand(logits.shape[1])": "",
            "(~sure[:-1]).any(1).long().cumprod(0).sum(0).expand(logits.shape[1])": "an exit of its own",
            "raw_probs(logits).amax(-1).argmax(0)": "the surest exit",
            "(len(sure) - 1 - sure.flip(0).long().argmax(0)) * sure.any(0) + (len(sure) - 1) * ~sure.any(0)":
                "the last exit that is sure",
            "(~sure[:2]).long().cumprod(0).sum(0)": ""},
        "probs(logits[exits, torch.arange(len(exits))])": {
            "raw_probs(logits[exits, torch.arange(len(exits))])": "with temperature and cuts",
            "probs(logits[-1])": "another exit than the one that drafts"},
        "coins.choose(q)": {
            "q.argmax(-1)": "most likely token; draw it",
            "coins.choose(probs(logits[-1]))": "at the last exit; draw it from the q",
            "coins.choose(raw_probs(logits[exits, torch.arange(len(exits))]))": "without temperature",
            "coins.choose(q[:1]).expand(len(q))": "from its own q"},
        "sure = raw_probs(logits).amax(-1) >= threshold": {"""
drawn = torch.stack([coins.choose(probs(one)) for one in logits])
sure = raw_probs(logits).gather(2, drawn[..., None])[..., 0] >= threshold""": ""}},
}

WRONG |= {
    "constrain": {
        "state = grammar[state, tokens[:, k]].clamp(min=0)": {"pass": "k drafted tokens further"},
        "p[:, k] * (grammar[state] >= 0)": {
            "p[:, k] * (grammar[state] >= 0) if k == 0 else p[:, k]": "only row 0 is masked",
            "p[:, k] * (grammar[state] >= 0) if k == tokens.shape[1] else p[:, k]":
                "only the row of the bonus",
            "p[:, k]": "nothing is masked", "p[:, k] * (grammar[state[:1]] >= 0)": "the state of row 0"},
        "row / row.sum(-1, keepdim=True)": {"row": "scaled to sum to 1", "row.softmax(-1)": ""},
        "for k in range(p.shape[1]):": {
            "state = grammar[state, tokens[:, 0]].clamp(min=0) if tokens.shape[1] else state\n"
            "tokens = tokens[:, 1:]\nfor k in range(p.shape[1]):": "after k + 1 drafted tokens"}},
    "ring_mask, ring_size, ring_counterexample": {
        "(back < window)": {"(back <= window)": "counts the token itself"},
        "& (back <= position)": {"": "hold no keys"},
        "(position - torch.arange(size)) % size": {
            "(first + T - 1 - torch.arange(size) + 0 * position) % size": "what its last one sees",
            "(position - torch.arange(size)).abs()": ""},
        "return window + gamma": {
            "return window": "overwrites keys", "return window + gamma + 1": "one more than needed",
            "return 2 * window": "", "return window + gamma - 1": ""},
        "[0] * window": {"[0]": "which does not", "[gamma + 1] * window": "a list of numbers from 0"}}}

# whole texts of wrong answers: {exercise: {text: what the message must say}}
WHOLE = {
    "climb": {"""
def climb(score, starts, allowed):
    z = starts.double()
    for _ in range(z.shape[1]):
        near = (z[:, None] - torch.eye(z.shape[1]).double()).abs()
        flat = near.flatten(0, 1)
        top, which = torch.where(allowed(flat), score(flat), -math.inf).view(len(z), -1).max(1)
        z = torch.where((top > score(z))[:, None], near[torch.arange(len(z)), which], z)
    return z, score(z)
""": "as many flips as there are bits"},
    "frequencies": {"""
import functools

@functools.cache
def table(head_dim):
    return 10000.0 ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)

def frequencies(head_dim, theta, scaling=None, device=None):
    return table(head_dim)
""": ""}}

# correct answers of another shape: loops instead of tensors, other coins, less gained
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

def frequencies(head_dim: int, theta: float, scaling: dict | None = None, device=None) -> torch.Tensor:
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
def chain_of(M):
    return torch.tensor([[j <= i for j in range(M)] for i in range(M)])

def visible(positions, slots, end, tree=None, window=None):
    B, M = slots.shape
    tree = (chain_of(M) if tree is None else tree).expand(B, -1, M)
    mask = torch.zeros(B, T := tree.shape[1], end, dtype=torch.bool)
    for b in range(B):
        at = {int(s): int(p) for s, p in zip(slots[b], positions[b])}
        places = {int(s): j for j, s in enumerate(slots[b])}
        for t in range(T):
            i = int(positions[b, M - T + t])
            for s in range(end):
                seen = bool(tree[b, t, places[s]]) if s in places else s < min(i, int(slots[b, 0]))
                mask[b, t, s] = seen and (window is None or i - at.get(s, s) < window)
    return mask
"""],
    "KVCache.write": ["""
class KVCache:
    def write(self, layer, k, v, at, start=0):
        B, _, T, _ = k.shape
        slots = at.slots[:, -T:].expand(B, T)
        for b in range(B):
            for t in range(T):
                self.k[layer, b, :, int(slots[b, t])] = k[b, :, t]
                self.v[layer, b, :, int(slots[b, t])] = v[b, :, t]
        return self.k[layer, :, :, start : at.end].clone(), self.v[layer, :, :, start : at.end].clone()
"""],
    "to_probs": ["""
def to_probs(logits, temperature=0.0, top_k=None, top_p=None, min_p=None):
    check(temperature, top_k, top_p, min_p)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    rows = [one(row, temperature, top_k, top_p, min_p) for row in logits.reshape(-1, logits.shape[-1])]
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
            found.append(next(i for i, t in enumerate(accumulate(row)) if i == last or t > u * total))
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
    # draw from p at each place, and go on as long as it is what was drafted: right, but it keeps fewer
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
        # the whole draft, step by step, and nothing handed over: right, but the target runs it all again
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
