"""What keeps the text exact: drafted tokens are tested, and the next token is drawn from the
residual. p is the target's distribution, q the draft's.

The one thing to remember: a position without a drafted token has q = 0, so that max(p - q, 0) = p.
So one formula covers the bonus token, drafts of different lengths and plain decoding.
"""
import torch
import torch.nn.functional as F


def verify(p, q, tokens, coins, length=None):
    """Speculative sampling (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023, Theorem 1).

    p (B, K+1, V), q (B, K, V) or None for copied drafts, tokens (B, K), length (B,) or None for K
    everywhere. Returns how many were accepted (B,) and the token after them (B,).

    The text is distributed as if sampled from p. Token t is written as a drafted token with
    probability q(t) min(1, p(t) / q(t)) = min(p(t), q(t)). A drafted token is rejected with probability
    S, the sum of max(p - q, 0). Its replacement is drawn from max(p - q, 0) / S, so t is written as a
    replacement with probability max(p(t) - q(t), 0). Together that is p(t).

    >>> from sampling import Coins
    >>> p = torch.tensor([[[0.9, 0.1], [0.2, 0.8]]])        # for the first token, and the one after it
    >>> q = torch.tensor([[[0.5, 0.5]]])
    >>> accepted, token = verify(p, q, torch.tensor([[0]]), Coins(0))   # 0.9 / 0.5 > 1: accepted
    >>> accepted.tolist(), token.tolist()                   # and a bonus token drawn from (0.2, 0.8)
    ([1], [1])
    """
    B, K = tokens.shape
    if q is not None and q.shape[-1] != p.shape[-1]:
        raise ValueError(f"the draft has a vocabulary of {q.shape[-1]}, the target of {p.shape[-1]}")
    if K == 0:  # nothing was drafted: q = 0
        return torch.zeros(B, dtype=torch.long, device=p.device), coins.choose(p[:, 0])
    if length is None:
        length = torch.full((B,), K, device=p.device)
    drafted, row = tokens[..., None], torch.arange(B, device=p.device)          # (B, K, 1)
    p_drafted = p[:, :K].gather(2, drafted)[..., 0]                             # (B, K)
    q_drafted = 1.0 if q is None else q.gather(2, drafted)[..., 0]
    # Accept token k with probability min(1, p / q). All K are tested at once; `cumprod` ends at the
    # first rejection, and the tests after it do not count.
    passed = coins.flip(p_drafted / q_drafted) & (torch.arange(K, device=p.device) < length[:, None])
    accepted = passed.cumprod(1).sum(1)                                         # (B,)

    # The next token comes from max(p - q, 0) after a rejection, and from p otherwise: there q = 0.
    at, refused = accepted.clamp(max=K - 1), (accepted < length)[:, None]
    p = p[row, accepted]                                                        # (B, V)
    q = torch.zeros_like(p).scatter_(1, tokens[row, at, None], 1.0) if q is None else q[row, at]
    residual = (p - q * refused).clamp_(min=0)
    # trap: where p = q up to rounding, the residual of a rejection can be empty; then p itself is right
    return accepted, coins.choose(torch.where(residual.sum(-1, keepdim=True) > 0, residual, p))


def verify_block(p, q, tokens, coins, length=None):
    """Block verification (Sun et al., ICLR 2025, arXiv 2403.10444, Algorithm 2): `verify` for the draft as
    a whole. The text has the same distribution; from two drafted tokens on, more are accepted on average.

    Arguments, results and coins spent are those of `verify`. A prefix of i tokens weighs w_i: w_0 = 1,
    w_i = min(1, w_{i-1} p/q): a token with p > q makes up for an earlier one with p < q. Every prefix flips
    a coin, and the longest that passes is accepted, even if a shorter one failed. Prefix i passes with
    probability Z / (Z + 1 - w_i), where Z is the sum of max(w_i p - q, 0) over the next token; the whole
    draft passes with probability w_K. So at least i tokens are accepted with probability w_i. By induction
    from the end: (w_i - Z) + (1 - w_i + Z) Z / (Z + 1 - w_i) = w_i, as the sum of min(w_i p, q) is w_i - Z.

    >>> from sampling import Coins
    >>> p = torch.tensor([[[1/3, 2/3]] * 3])                # the example of the paper, section 3
    >>> q = torch.tensor([[[2/3, 1/3]] * 2])
    >>> accepted, token = verify_block(p, q, torch.tensor([[0, 1]]), Coins(1))
    >>> accepted.tolist(), token.tolist()           # 0 fails alone, but 0, 1 passes: w = 1/2, then 1
    ([2], [1])
    """
    B, K = tokens.shape
    if K == 0:
        return verify(p, q, tokens, coins)
    length = torch.full((B,), K, device=p.device) if length is None else length
    row, k, drafted = torch.arange(B, device=p.device), torch.arange(K, device=p.device), tokens[..., None]
    q = torch.zeros_like(p[:, :K]).scatter_(2, drafted, 1.0) if q is None else q
    ratio, weight = p[:, :K].gather(2, drafted) / q.gather(2, drafted), [torch.ones_like(p[:, 0, 0])]
    for r in ratio[..., 0].unbind(1):
        weight.append((weight[-1] * r).clamp(max=1))
    weight = torch.stack(weight, 1)                                             # (B, K+1)
    residual = (weight[:, :K, None] * p[:, :K] - q).clamp_(min=0)         # (B, K, V) after k drafts
    mass = F.pad(residual.sum(-1)[:, 1:], (0, 1))                               # (B, K)
    whole = k + 1 == length[:, None]
    chance = torch.where(whole, weight[:, 1:], mass / (mass + 1 - weight[:, 1:]))
    # trap: 0 / 0 where w = 1 and p = q: any chance is right, as the rest of the draft is always accepted
    passed = coins.flip(chance) & (k < length[:, None])
    accepted = (passed * (k + 1)).amax(1)                             # (B,) the longest that passed
    p, left = p[row, accepted], residual[row, accepted.clamp(max=K - 1)]        # (B, V) both
    some = (accepted < length)[:, None] & (left.sum(-1, keepdim=True) > 0)
    return accepted, coins.choose(torch.where(some, left, p))


def verify_tree(p, tokens, parents, coins, q=None, length=None):
    """Recursive rejection (Sequoia, arXiv 2402.12374, appendix F): `verify` for a tree, which may
    hold siblings, several drafted tokens for the same place.

    p (B, K+1, V): row k is the distribution after node k. tokens (B, K), parents (B or 1, K) and
    length (B,) are those of a Draft. q (B, K, V): what each token was drawn from, which for a later
    sibling may depend on those before it; None for copied drafts. Returns the last accepted node
    (B,), 0 if there is none, and the token after it (B,).

    Siblings are tried in order. If the first is rejected, the token must come from the residual
    max(p - q, 0), scaled to sum to 1. So the residual takes p's place when the second is tried, and
    so on. After an accepted token, its children are tried. Coins are spent as by `verify`: one flip
    for each of the K tokens of every row, tried or not, then one choice per row.

    >>> from sampling import Coins
    >>> p = torch.tensor([[[0.5, 0.5, 0.0], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]])
    >>> node, token = verify_tree(p, torch.tensor([[2, 0]]), torch.tensor([[0, 0]]), Coins(0))
    >>> node.tolist(), token.tolist()               # 2 is rejected, its sibling 0 is accepted, 1 follows
    ([2], [1])
    """
    B, K = tokens.shape
    length = torch.full((B,), K, device=p.device) if length is None else length
    row, live = torch.arange(B, device=p.device), torch.arange(K, device=p.device) < length[:, None]
    parents, rest, chance = parents.expand(B, K), p.clone(), [p[:, :0, 0]]      # (B, 0): K may be 0
    for k in range(K):      # rest: what is left of p at each node, if its children up to k fail
        token, left = tokens[:, k, None], rest[row, parents[:, k]]              # (B, 1), (B, V)
        drawn = torch.zeros_like(left).scatter_(1, token, 1.0) if q is None else q[:, k]
        chance.append(left.gather(1, token) / drawn.gather(1, token))           # (B, 1)
        less = (left - drawn).clamp_(min=0)
        mass = less.sum(-1, keepdim=True)          # trap: 0 if p = q up to rounding, as in `verify`
        rest[row, parents[:, k]] = torch.where(live[:, k, None] & (mass > 0), less / mass, left)
    passed, node = coins.flip(torch.cat(chance, 1)) & live, torch.zeros_like(row)
    for k in range(K):      # the walk: from a node to the first of its children that passed
        node = torch.where(passed[:, k] & (parents[:, k] == node), k + 1, node)
    return node, coins.choose(rest[row, node])
