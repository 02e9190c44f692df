"""Drafting with the target's own sub-layers: early exit (LayerSkip) and skip sets (Draft & Verify), one
drafter for both.

The one thing to remember: the sub-layers before the first gap compute exactly what the verifier would, so
their keys, values and hidden states are handed over (`reuse`), not computed again.
"""
import torch

from speculative import Draft, Drafter, chain, check_gamma


def keep(n_layers, attn=(), mlp=()):
    """The sub-layers that stay when the attentions of the blocks in `attn` and the MLPs of those in `mlp` are
    skipped. Raises ValueError for a block that does not exist and where nothing stays."""
    for name, skipped in (("attention", attn), ("MLP", mlp)):
        bad = next((i for i in skipped if not 0 <= i < n_layers), None)
        if bad is not None:
            raise ValueError(f"cannot skip the {name} of block {bad}: blocks run from 0 to {n_layers - 1}")
    gone = {2 * i for i in attn} | {2 * i + 1 for i in mlp}
    return check_sublayers([i for i in range(2 * n_layers) if i not in gone], n_layers)


def skipped(n_layers, sublayers):
    """The inverse of `keep`: (attn, mlp), the blocks whose attention or MLP is not among the sub-layers."""
    gone = sorted(set(range(2 * n_layers)) - set(sublayers))
    return [i // 2 for i in gone if i % 2 == 0], [i // 2 for i in gone if i % 2]


def early_exit(n_layers, exit_layer):
    """The sub-layers of the first `exit_layer` blocks. Raises ValueError if there are not so many, or
    none."""
    if not 1 <= exit_layer <= n_layers:
        raise ValueError(f"exit layer must lie between 1 and {n_layers} (all blocks), got {exit_layer}")
    return list(range(2 * exit_layer))


def check_sublayers(sublayers, n_layers):
    subs = list(sublayers)
    if not subs:
        raise ValueError("the skip set leaves no sub-layer to draft with")
    if subs != sorted(set(subs)) or subs[0] < 0 or subs[-1] >= 2 * n_layers:
        raise ValueError(f"sub-layers must rise within 0 .. {2 * n_layers - 1}, got {subs}")
    return subs


class SelfDraft(Drafter):
    """Draft with a subset of the target's sub-layers: range(2E) is early exit behind block E (Elhoushi et al.
    2024, section 4), any other subset is layer skipping (Zhang et al. 2023, section 3).

    Drafts write into the target's cache: below the first gap what the verifier would write, above it only
    into slots that the verifier overwrites.
    """

    def __init__(self, model, sublayers, gamma, stop=None):
        self.model, self.sublayers = model, check_sublayers(sublayers, model.c.n_layers)
        self.gamma, self.stop = check_gamma(gamma), stop

    def propose(self, state):
        m, subs, xs = self.model, list(self.sublayers), []
        shared = next((i for i, sub in enumerate(subs) if i != sub), len(subs))

        def carry(token, k):  # through the sub-layers that the verifier will not repeat
            x = m.run(m.embed(token), state.at(k), state.cache, subs[:shared], end=state.end(k + 1))
            xs.append(x)
            return x

        def step(token, k):
            x = carry(token, k)
            if shared < len(subs):
                x = m.run(x, state.at(k), state.cache, subs[shared:], end=state.end(k + 1))
            return m.unembed(x)

        tokens, q, length = chain(state, step, self.gamma, self.stop)
        K = tokens.shape[1]
        if K == 0:
            return Draft.none(state)
        carry(tokens[:, -1:], K)                      # the last draft is not drafted from, but it is verified
        return Draft(tokens, q, length, reuse=(shared, torch.cat(xs, 1)))
