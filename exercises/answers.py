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
}

SHAPES = {}
