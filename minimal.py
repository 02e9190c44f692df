"""Self-speculative decoding on one page, for one text and one position at a time.

The one thing to remember: the first blocks of the model draft, and the whole model checks every
drafted token. So the text is exactly what the whole model alone would have written; when sampling,
it has the same distribution.

`rounds` does it without a cache, in the fewest words. `rounds_with_cache` reads each token once.
`speculative.py` does the same for many texts and any kind of draft. A test checks that all three
write the same text with the same random numbers.
"""
from pathlib import Path

import torch

import checkpoint
from kvcache import KVCache
from model import Placement
from sampling import Coins, to_probs
from speculative import until

# --- what both share: which drafted tokens are accepted


def verify(p, q, drafted, coins):
    """How many drafted tokens are accepted, and the token after them. p has gamma + 1 distributions
    (V,) of the whole model, and q the gamma distributions from which the tokens were drafted."""
    # Token k is accepted with probability min(1, p / q). The first rejection ends the draft. All
    # coins are flipped, even after it, so that the random numbers agree with a batch.
    passed = [bool(coins.flip(p[k][token] / q[k][token])) for k, token in enumerate(drafted)]
    accepted = 0
    while accepted < len(drafted) and passed[accepted]:
        accepted += 1
    # A token from the residual max(p - q, 0), what p has and q lacks, replaces the rejected one. If
    # the whole draft was accepted, a bonus token from p follows it.
    weights = p[accepted]
    if accepted < len(drafted):
        residual = (p[accepted] - q[accepted]).clamp(min=0)
        if residual.sum() > 0:      # where p = q, rounding can leave nothing
            weights = residual
    return accepted, int(coins.choose(weights))


# --- without a cache


def distribution(model, tokens, blocks, probs):
    """The distribution of the token after `tokens`, from the first `blocks` blocks. (V,)"""
    x = model.embed(torch.tensor([tokens]))                                     # (1, T, dim)
    at = Placement.span(0, len(tokens))
    x = model.run(x, at, sublayers=range(2 * blocks))                   # a block is two sub-layers
    return probs(model.unembed(x[:, -1:]))[0, 0]


@torch.inference_mode()
def rounds(model, tokens, max_new, exit_layer, gamma, probs=to_probs, coins=None):
    """Yield (drafted, accepted, new) per round, for max_new tokens or until the text ends."""
    tokens = list(tokens)
    coins = coins or Coins()
    left = min(max_new, model.c.max_len - len(tokens))
    while left > 0:
        # Draft: the first blocks write tokens, each drawn from their own distribution q.
        drafted = []
        q = []
        for _ in range(min(gamma, left - 1)):
            q.append(distribution(model, tokens + drafted, exit_layer, probs))
            drafted.append(int(coins.choose(q[-1])))
        # Verify: p is the whole model's distribution at the same places, and after the last.
        p = []
        for k in range(len(drafted) + 1):
            p.append(distribution(model, tokens + drafted[:k], model.c.n_layers, probs))
        accepted, token = verify(p, q, drafted, coins)
        # Append.
        new = until(model.c.eos, [*drafted[:accepted], token])
        tokens += new
        left -= len(new)
        if new[-1] in model.c.eos:
            left = 0
        yield drafted, accepted, new


# --- with a cache


@torch.inference_mode()
def rounds_with_cache(model, tokens, max_new, exit_layer, gamma, probs=to_probs, coins=None):
    """Like `rounds`, but a cache keeps the keys and values of all tokens before the last known one,
    D. The first blocks read D and the drafted tokens one by one, the others all of them at once."""
    tokens = list(tokens)
    coins = coins or Coins()
    left = min(max_new, model.c.max_len - len(tokens))
    cache = KVCache(model.c, 1, len(tokens) + left, model.attention_dtype(), model.tok.device)
    first_blocks = range(2 * exit_layer)
    other_blocks = range(2 * exit_layer, 2 * model.c.n_layers)
    before = len(tokens) - 1                # how many tokens are in the cache
    if before > 0:
        x = model.embed(torch.tensor([tokens[:-1]]))                            # (1, T, dim)
        model.run(x, Placement.span(0, before), cache)
    while left > 0:
        # Draft: what the first blocks make of each token is kept, for the other blocks to go on
        # from.
        drafted = []
        q = []
        xs = []
        K = min(gamma, left - 1)
        for k in range(K + 1):
            token = drafted[-1] if drafted else tokens[-1]
            x = model.embed(torch.tensor([[token]]))                            # (1, 1, dim)
            at = Placement.span(before + k, before + k + 1)
            xs.append(model.run(x, at, cache, first_blocks))
            if k < K:       # the last drafted token is only verified
                q.append(probs(model.unembed(xs[-1]))[0, 0])
                drafted.append(int(coins.choose(q[-1])))
        # Verify: the other blocks read D and all drafted tokens at once.
        at = Placement.span(before, before + len(xs))
        x = model.run(torch.cat(xs, 1), at, cache, other_blocks)                # (1, K+1, dim)
        p = probs(model.unembed(x))[0]                                          # (K+1, V)
        accepted, token = verify(p, q, drafted, coins)
        # Append. What rejected tokens left in the cache is overwritten before anything reads it.
        new = until(model.c.eos, [*drafted[:accepted], token])
        tokens += new
        before += len(new)
        left -= len(new)
        if new[-1] in model.c.eos:
            left = 0
        yield drafted, accepted, new


if __name__ == "__main__":
    weights = Path(__file__).parent / "weights/stories-llama"
    model, tokenizer = checkpoint.load(weights, "cpu", torch.float32)
    prompt = checkpoint.encode(tokenizer, "Once upon a time", model.c.bos)
    for drafted, accepted, new in rounds(model, prompt, max_new=40, exit_layer=2, gamma=3):
        draft = repr(tokenizer.decode(drafted))
        print(f"drafted {draft:26} accepted {accepted}   new {tokenizer.decode(new)!r}")
