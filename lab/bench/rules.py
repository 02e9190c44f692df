"""Several guesses for one place: which rule keeps one most often, and which rules are exact?"""
import torch

from sampling import Coins
from verification import verify_tree

TOKENS = 6      # of a vocabulary in which everything is enumerated


def draws(q, k, again):
    """Every way to draw k tokens from q (V,) one after the other: tokens (M, k), what each was drawn from
    (M, k, V), and how likely each way is (M,). again: whether what was drawn may be drawn once more. If not,
    a draw is from what those before it have left; where nothing is left it is the lowest other id."""
    tokens = torch.cartesian_prod(*[torch.arange(len(q))] * k).view(-1, k)      # (M, k)
    row, left, drawn = torch.arange(len(tokens)), q.repeat(len(tokens), 1), []
    free, chance = torch.ones_like(left), torch.ones_like(left[:, 0])
    for token in tokens.T:
        mass = left.sum(-1, keepdim=True)
        first = torch.zeros_like(left).scatter_(1, free.argmax(-1, keepdim=True), 1.0)
        drawn.append(torch.where(mass > 0, left / mass, first))                 # (M, V)
        chance = chance * drawn[-1][row, token]
        if not again:
            left, free = left.scatter(1, token[:, None], 0.0), free.scatter(1, token[:, None], 0.0)
    some = chance > 0
    return tokens[some], torch.stack(drawn, 1)[some], chance[some]


class Chances(Coins):
    """Coins that note how likely each flip was."""

    def flip(self, prob):
        self.noted = prob.clamp(max=1)
        return super().flip(prob)


def tried(p, tokens, q):
    """How likely each of several siblings is the one that `verify_tree` accepts: (N, k). p (N, V): what the
    token is to be distributed like; tokens (N, k), in the order in which they were drawn from q (N, k, V)."""
    k, coins = tokens.shape[1], Chances()
    verify_tree(p[:, None].expand(-1, k + 1, -1), tokens, tokens.new_zeros(1, k), coins, q)
    refused = (1 - coins.noted).cumprod(1)                                      # (N, k)
    return coins.noted * torch.cat([torch.ones_like(refused[:, :1]), refused[:, :-1]], 1)


def spectr(p, q, k):
    """How likely k-sequential selection keeps one of k independent draws, 1 - (1 - b)^k: b is the sum
    of min(q, p / rho), and rho the least number with 1 - (1 - b)^k <= rho b (Sun et al. 2023)."""
    low, high = 1.0, float(k)
    for _ in range(60):     # halving: rho lies between 1 and k
        rho = (low + high) / 2
        b = float(torch.minimum(q, p / rho).sum())
        low, high = (low, rho) if 1 - (1 - b) ** k <= rho * b else (rho, high)
    return 1 - (1 - float(torch.minimum(q, p / high).sum())) ** k


def passes(p, tokens, epsilon=0.09, delta=0.3):
    """Which tokens (N, k) are "typical" under p (V,): those above min(epsilon, delta exp(-H)), where H is the
    entropy of p (Medusa, arXiv 2401.10774; the numbers are those of its repository)."""
    return p[tokens] > min(epsilon, delta * float(torch.exp(-torch.special.entr(p).sum())))


def typical(p, tokens):
    """Medusa's typical acceptance: the likeliest of the draws that pass, and p's best token where none does.
    No coin is flipped, and so it cannot be exact. (N,)"""
    worth = torch.where(passes(p, tokens), p[tokens], -1.0)                     # (N, k)
    best, at = worth.max(1)
    return torch.where(best > 0, tokens.gather(1, at[:, None])[:, 0], p.argmax())


def optimum(p, tokens, chance):
    """The most that any exact rule can accept of these draws: the least of p(H) + 1 - P(all draws lie in H)
    over all sets H of tokens. It is the cut of a network in which each way to draw may flow into its tokens,
    and each token x takes no more than p(x) (max-flow min-cut; as a transport in Sun et al. 2023)."""
    V, bits = len(p), 1 << tokens                                               # (M, k)
    ways = torch.zeros_like(bits[:, 0])
    for bit in bits.T:
        ways = ways | bit                                                       # (M,) its tokens as bits
    sets = torch.arange(1 << V)
    inside = ((ways & ~sets[:, None]) == 0).to(p) @ chance                      # (2^V,)
    holds = (sets[:, None] >> torch.arange(V) & 1).to(p)                        # (2^V, V)
    return float((holds @ p + 1 - inside).min())


def pairs(teacher, sublayers, count):
    """Logits (count, 2, TOKENS) of the model and of its draft at places all along a text, cut to the tokens
    that the two together find most likely. teacher: a Teacher whose `probs` leaves logits as they are."""
    both = torch.stack([teacher.p[0], teacher.draft(sublayers)[0]], 1).double().cpu()   # (T, 2, V)
    both = both[torch.linspace(0, len(both) - 1, count).long()]
    top = both.softmax(-1).sum(1, keepdim=True).topk(TOKENS).indices                    # (count, 1, TOKENS)
    return both.gather(2, top.expand(-1, 2, -1))


def judge(p, q, k):
    """{column: number} at one place, with k guesses: all of it enumerated."""
    ways, apart = draws(q, k, True), draws(q, k, False)
    tokens, _, chance = apart
    written = torch.zeros_like(p).index_add_(0, typical(p, tokens), chance)     # by typical acceptance (V,)

    def kept(ways):
        return float(tried(p.expand(len(ways[0]), -1), *ways[:2]).sum(1) @ ways[2])

    return {"recursive, drawn again": kept(ways), "optimum of these": optimum(p, ways[0], ways[2]),
            "SpecTr": spectr(p, q, k), "recursive, not again": kept(apart),
            "optimum": optimum(p, tokens, chance),
            "typical": float(passes(p, tokens).any(1).double() @ chance),
            "its bias": float((written - p).abs().sum() / 2)}
