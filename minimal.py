"""Self-speculative decoding on one page: one text, no cache, one position at a time, nothing clever.

The one thing to remember: the first blocks of the model draft, and the whole model checks every
drafted token. So the text is exactly what the whole model alone would have written; when sampling, it
has the same distribution. `speculative.py` does this with a cache, for many texts and any kind of
draft. A test checks that both write the same text with the same random numbers.
"""
from pathlib import Path

import torch

import checkpoint
from model import Placement
from sampling import Coins, to_probs


def distribution(model, tokens, blocks, probs):
    """The distribution of the token after `tokens`, from the first `blocks` blocks and the head. (V,)"""
    x = model.embed(torch.tensor([tokens]))                                     # (1, T, dim)
    at = Placement.span(0, len(tokens))
    x = model.run(x, at, sublayers=range(2 * blocks))                    # a block is two sub-layers
    return probs(model.unembed(x[:, -1:]))[0, 0]


def speculate(model, tokens, exit_layer, gamma, probs, coins):
    """One round. Returns the gamma drafted tokens, how many were accepted, and what to append."""
    # Draft: the first blocks write `gamma` tokens, each drawn from their own distribution q.
    drafted, q, p = [], [], []
    for _ in range(gamma):
        q.append(distribution(model, tokens + drafted, exit_layer, probs))
        drafted.append(int(coins.choose(q[-1])))
    # Verify: p is the whole model's distribution at the same places (with a cache: from one pass).
    # Drafted token k is accepted with probability min(1, p / q), and the first rejection ends the round.
    for k in range(gamma + 1):
        p.append(distribution(model, tokens + drafted[:k], model.c.n_layers, probs))
    passed = [bool(coins.flip(p[k][t] / q[k][t])) for k, t in enumerate(drafted)]
    accepted = (passed + [False]).index(False)
    # Correct: a token from the residual max(p - q, 0), what p has and q lacks, replaces the
    # rejected one. If the whole draft was accepted, a bonus token from p follows it.
    residual = (p[accepted] - q[accepted]).clamp(min=0) if accepted < gamma else p[accepted]
    residual = residual if residual.sum() > 0 else p[accepted]  # where p = q, rounding can leave nothing
    return drafted, accepted, drafted[:accepted] + [int(coins.choose(residual))]


@torch.inference_mode()
def rounds(model, tokens, max_new, exit_layer, gamma, probs=to_probs, coins=None):
    """Yield (drafted, accepted, new) per round, until max_new tokens are written or the text ends."""
    tokens, coins, left = list(tokens), coins or Coins(), min(max_new, model.c.max_len - len(tokens))
    while left > 0:
        drafted, accepted, new = speculate(model, tokens, exit_layer, min(gamma, left - 1), probs, coins)
        end = next((i + 1 for i, t in enumerate(new) if t in model.c.eos), len(new))
        tokens, left = tokens + new[:end], 0 if new[end - 1] in model.c.eos else left - end
        yield drafted, accepted, new[:end]


if __name__ == "__main__":
    model, tokenizer = checkpoint.load(Path(__file__).parent / "weights/stories-llama", "cpu", torch.float32)
    prompt = checkpoint.encode(tokenizer, "Once upon a time", model.c.bos)
    for drafted, accepted, new in rounds(model, prompt, max_new=40, exit_layer=2, gamma=3):
        print(f"drafted {tokenizer.decode(drafted)!r:26} accepted {accepted}   new {tokenizer.decode(new)!r}")
