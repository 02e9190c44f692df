"""What the grader is tested on: plausible wrong answers, each with words of the message that must name it, and
right answers of another shape, which must pass.

The one thing to remember: a wrong answer is the original with one phrase changed, as in tests/mutants.py; but
here it does not suffice that a test fails, it must say why.
"""
from typing import NamedTuple


class Wrong(NamedTuple):
    name: str       # of the exercise
    old: str        # stands exactly once in the original functions
    new: str
    says: str       # words that the grader's message must contain


WRONG = {
    "KVCache.write": [
        ("return keys[:, :, read], values[:, :, read]", "return k, v", "only the new block comes back"),
        ("return keys[:, :, read], values[:, :, read]", "return keys, values", "all slots come back"),
        ("keys[:, :, slots], values[:, :, slots] = k, v", "keys[:, :, slots], values[:, :, slots] = k, k",
         "keys are stored where values belong"),
        ("slots[:, None, :, None].expand_as(k)", "slots[:1, None, :, None].expand_as(k)",
         "all rows went to row 0's slots"),
        ("self.layers[layer]", "self.layers[0]", "`layer` is ignored"),
        ("self.layers[layer]", "(t[layer].clone() for t in (self.k, self.v))", "nothing is kept"),
        ("max(0, end - recent)", "end - recent", "a start below 0"),
        ("0 if recent is None else max(0, end - recent)", "0", "`recent` is ignored"),
    ],
    "to_probs": [
        ("if temperature == 0:", "if False:", "it is not shared"),
        ("return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)",
         "return logits.softmax(-1)", "temperature 0 is the exact one-hot"),
        ("/ max(temperature, 1e-30)", "* temperature", "divided by the temperature, not multiplied"),
        ("p.cumsum(-1) - p >= top_p", "p.cumsum(-1) > top_p", "the token with which the mass reaches top_p"),
        ("p.cumsum(-1) - p >= top_p", "p.cumsum(-1) - p > top_p", "as soon as its mass *reaches* top_p"),
        ("p < min_p * p[..., :1]", "p < min_p", "the bound is min_p times"),
        ("ids, p / p.sum(-1, keepdim=True))", "ids, p)", "what stays must be scaled to sum to 1"),
        ("p, ids = order.values[..., :top_k].softmax(-1), order.indices[..., :top_k]",
         "p, ids = order.values.softmax(-1)[..., :top_k], order.indices[..., :top_k]",
         "top_k comes before top_p, and what it leaves is scaled first"),
        ("logits.sort(dim=-1, descending=True, stable=True)",
         "logits.flip(-1).sort(dim=-1, descending=True, stable=True)\n"
         "    order = torch.return_types.sort((order.values, logits.shape[-1] - 1 - order.indices))",
         "the lower ids stay, not the higher ones"),
    ],
    "Coins.choose": [
        ("right=True", "right=False", "u = 0 chose a token of probability zero"),
        ("u * cdf[..., -1:]", "u", "u must be scaled by their sum"),
        ("torch.searchsorted(cdf, u * cdf[..., -1:], right=True)", "weights.argmax(-1, keepdim=True)",
         "the most likely id, whatever u is"),
        ("        cdf = weights.double().cumsum(-1)",
         "        weights, order = weights.sort(dim=-1, descending=True, stable=True)\n"
         "        cdf = weights.double().cumsum(-1)\n"
         "        u = self.take(cdf[..., 0].numel(), cdf.device).view(*cdf.shape[:-1], 1)\n"
         "        at = torch.searchsorted(cdf, u * cdf[..., -1:], right=True)\n"
         "        return order.gather(-1, at.clamp_(max=cdf.shape[-1] - 1))[..., 0]\n"
         "        cdf = weights.double().cumsum(-1)",
         "not over falling weights"),
        ("weights.double().cumsum(-1)", "weights.cumsum(-1)", "small weights need float64"),
    ],
    "verify": [
        # bugs that judges and courses have let through
        ("passed = coins.flip(p_drafted / q_drafted) &", "passed = torch.ones_like(tokens).bool() &",
         "every draft is accepted"),
        ("residual = (p - q * refused).clamp_(min=0)", "residual = p",
         "replaced by a token from p"),
        ("p = p[row, accepted] ", "p = p[row, accepted.clamp(max=K - 1)] ",
         "the bonus token is drawn from the row of p that judged the last draft"),
        ("return accepted, coins.choose(", "return accepted + (accepted == length), coins.choose(",
         "the bonus token is counted as accepted"),
        ("> 0, residual, p)", "> 0, residual, torch.ones_like(p))",
         "an empty residual is made uniform"),
        # others
        ("p_drafted / q_drafted", "q_drafted / p_drafted", "upside down"),
        ("passed.cumprod(1).sum(1)", "passed.sum(1)", "drafts after the first refusal are counted"),
        ("(p - q * refused).clamp_(min=0)", "(p - q * refused).abs()", "must be cut off"),
        ("(accepted < length)[:, None]", "(accepted < K)[:, None]", "where nothing was proposed q must count"),
        (" & (torch.arange(K, device=p.device) < length[:, None])", "", "`length` is ignored"),
        ("coins.choose(torch.where(residual.sum(-1, keepdim=True) > 0, residual, p))", "coins.choose(residual)",
         "rounding can refuse"),
        ("q = torch.zeros_like(p).scatter_(1, tokens[row, at, None], 1.0) if q is None else q[row, at]",
         "q = torch.zeros_like(p) if q is None else q[row, at]", "replaced by a token from p"),
    ],
    "chain": [
        ("            length = going.long() if length is None else length + going\n"
         "            going = going & ~rule.stop(k, logits[:, 0], token[:, 0])",
         "            going = going & ~rule.stop(k, logits[:, 0], token[:, 0])\n"
         "            length = going.long() if length is None else length + going",
         "stops the draft is dropped"),
        ("logits = step(token, k)", "logits = step(state.read(state.at(0)), k)",
         "step reads the last known token every time"),
        ("q = state.probs(logits)", "q = logits.softmax(-1)", "drawn from the raw softmax"),
        ("token = state.coins.choose(q)", "token = q.argmax(-1)", "the most likely token is taken"),
        ("qs.append(q)", "qs.append(logits.softmax(-1))", "not the raw softmax"),
        ("going = going & ~rule.stop", "going = ~rule.stop", "once stopped, always stopped"),
        ("most, varied = wanted(state, rule)", "most, varied = wanted(state, rule)[0], False",
         "each row has its own length"),
        ("step(token, k)  ", "step(token, k + 1)  ", "k is the offset of the token that is read"),
    ],
    "expected_tokens, best_gamma": [
        ("sum(alpha ** i for i in range(gamma + 1))", "sum(alpha ** i for i in range(1, gamma + 1))",
         "the bonus token is missing"),
        ("sum(alpha ** i for i in range(gamma + 1))", "1 + alpha * gamma", "only if all before it are accepted"),
        ("sum(alpha ** i for i in range(gamma + 1))", "sum(alpha ** i for i in range(gamma))",
         "the sum ends one too early"),
        ("reach = starts[i]", "reach = 1.0", "every position counts alike"),
        ("expected_speedup(alpha, gamma, cost, block(gamma + 1))", "expected_tokens(alpha, gamma)",
         "the most tokens are not the best speed"),
        ("cost, block(gamma + 1))", "cost, 1e-9)", "a round costs a pass of the target, too"),
        ("range(least, most + 1)", "range(max(1, least), most + 1)", "0 is a gamma, too"),
        ("block(gamma + 1)", "1.0", "`block` is ignored"),
        ("block(gamma + 1)", "block(max(1, gamma))", "block(T) is asked for T = gamma"),
    ],
    "alpha": [
        ("self.hits / max(1, self.drafted)", "self.accepted / max(1, self.proposed)", "accepted / drafted is no alpha"),
        ("self.hits / max(1, self.drafted)", "self.accepted / max(1, self.turns)", "accepted tokens per round"),
        ("self.hits / max(1, self.drafted)", "self.hits / max(1, self.turns)", "rounds without a draft count"),
        ("self.hits / max(1, self.drafted)", "self.hits / max(1, self.passes)", "divide by `drafted`"),
    ],
}

SHAPES = {}
