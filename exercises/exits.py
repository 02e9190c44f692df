"""What trains a draft, and which exit drafts a token: exercises 22 to 24, which
exercises/tests/test_domains.py grades."""
import torch
import torch.nn.functional as F

from sampling import raw_probs


def head_loss(head, target, ahead, length):
    """The cross-entropy of a draft head against the target's distributions, averaged over all rows
    that count; 0 if none does. No gradient flows into the target.

    head, target (B, T, V): logits. Row t of the head predicts what row t + ahead of the target
    does. length (B,): how many rows of each text are text; those after them hold anything, even
    NaN.
    """
    N = max(0, head.shape[1] - ahead)
    counts = torch.arange(N, device=head.device) < length[:, None] - ahead      # (B, N)
    # trap: select before the product:
    # a row that is left out after it still gets a gradient of 0 * NaN
    p = target[:, ahead:][counts].detach().softmax(-1)                          # (rows, V)
    far = -(p * head[:, :N][counts].log_softmax(-1)).sum()
    return far / counts.sum().clamp(min=1)


def enabled_exits(step, steps, L, every=None):
    """Which of the L exits, one after each block, step `step` of `steps` trains: bool (L,). The
    last one is always trained (LayerSkip, arXiv 2404.16710, section 4.1.2).

    every: rotational, every so many blocks, and at the next step one block further. None: gradual,
    first the last exit alone, then one more, downwards, after each 1 / (2 L) of the steps.
    """
    block = torch.arange(L)
    if every is None:
        on = block >= L - 1 - 2 * L * step // steps
    else:
        on = (block - step) % every == 0
    on[-1] = True
    return on


def exit_loss(logits, tokens, L, scale):
    """LayerSkip's loss at one step: the weighted mean of the cross-entropies of the exits that it
    trains.

    logits: {l: (B, T, V)} of these exits. tokens (B, T): row t of the logits predicts token t + 1.
    scale: 0 to 1, what all exits before the last one count.
    """
    loss = 0.0
    weights = 0.0
    for block, said in logits.items():
        weight = scale * sum(range(block + 1))
        # trap: of a single exit the formula's weight is 0, and 0 / 0 no loss
        if block == L - 1:
            weight = max(1, L - 1) + scale * sum(range(L - 1))
        loss = loss + weight * F.cross_entropy(said[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        weights += weight
    return loss / weights


def draw_at_exit(logits, threshold, probs, coins):
    """Draft one token per row at its first exit that is sure, or else at the last one: (exit (B,),
    token (B,), q (B, V)).

    logits (E, B, V): of the exits, the shallowest first. An exit is sure of a row if the largest
    probability there is at least `threshold`, without temperature and cuts. probs(logits) has both.
    """
    sure = raw_probs(logits).amax(-1) >= threshold                              # (E, B)
    exits = (~sure[:-1]).long().cumprod(0).sum(0)                               # (B,)
    q = probs(logits[exits, torch.arange(len(exits))])
    return exits, coins.choose(q), q
