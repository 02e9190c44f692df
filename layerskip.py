"""Drafting with the target's own sub-layers. One drafter does early exit (LayerSkip), skip sets
(Draft & Verify), and a quantised copy of the model.

The one thing to remember: the sub-layers before the first gap (the first that is skipped) compute
exactly what the target would. Its pass reuses their keys, values and hidden states (`Draft.reuse`).
A quantised copy hands nothing over, because everything it computes is slightly off.
"""
from collections.abc import Sequence

import torch

from drafter import Drafter, Reuse, Rule, chain
from model import Refused, Transformer


def without(n_layers: int, attn: Sequence[int] = (), mlp: Sequence[int] = ()) -> list[int]:
    """The sub-layers that stay when the attentions of the blocks in `attn` and the MLPs of those in
    `mlp` are skipped. Raises ValueError for a block that does not exist, and if nothing stays.

    >>> without(3, attn=[1], mlp=[1, 2])
    [0, 1, 4]
    """
    for name, blocks in (("attention", attn), ("MLP", mlp)):
        bad = next((i for i in blocks if not 0 <= i < n_layers), None)
        if bad is not None:
            raise Refused(f"cannot skip the {name} of block {bad}: blocks run from 0 to "
                          f"{n_layers - 1}")
    gone = [2 * i for i in attn] + [2 * i + 1 for i in mlp]
    return check_sublayers([i for i in range(2 * n_layers) if i not in gone], n_layers)


def early_exit(n_layers: int, exit_layer: int) -> list[int]:
    """The sub-layers of the first `exit_layer` blocks."""
    if not 1 <= exit_layer <= n_layers:
        raise Refused(f"exit layer must lie between 1 and {n_layers} (all blocks), "
                      f"got {exit_layer}")
    return list(range(2 * exit_layer))


def check_sublayers(sublayers, n_layers):
    subs = list(sublayers)
    if not subs:
        raise Refused("the skip set leaves no sub-layer to draft with")
    if subs != sorted(set(subs)) or subs[0] < 0 or subs[-1] >= 2 * n_layers:
        raise Refused(f"sub-layers must rise within 0 .. {2 * n_layers - 1}, got {subs}")
    return subs


def shared_prefix(sublayers):
    """How many sub-layers a draft runs before its first gap. The target need not repeat them.

    >>> shared_prefix([0, 1, 2, 5, 6]), shared_prefix([1, 2])
    (3, 0)
    """
    return next((i for i, sub in enumerate(sublayers) if i != sub), len(sublayers))


def same_model(model, state):
    """Raise ValueError if a drafter's model is not the target, whose states and cache it uses."""
    if model.blocks is not state.model.blocks:
        raise Refused("this drafter reads the target's hidden states, so it must be built with "
                      "the same model that decodes")


class SelfDraft(Drafter):
    """Draft with a subset of the target's sub-layers. range(2E) is early exit after the first E
    blocks (Elhoushi et al. 2024, section 4), and any other subset is layer skipping
    (Zhang et al. 2023, section 3).

    Two tokens d1, d2 are drafted after the last known token D like this:

        block          D      d1     d2
        before the gap kept   kept   run last: no token is drafted from d2, but d2 must be verified
        after the gap  rough  rough  -          the target's pass begins here, and runs all three

    Drafts write into the target's cache. Before the first gap they write what the target would.
    After it a draft reads exact old keys and its own rough new ones. The target's pass in this
    round overwrites the rough ones before anything else reads them. So a draft needs no cache of
    its own, and never has to read what the target wrote.

    `model` is the target, or a quantised copy (`machine.quant.quantise`), which is so close to the
    target that the target's keys are as good as its own. Any other model needs its own cache, and a
    `ModelDraft` has one.
    """

    def __init__(self, model: Transformer, sublayers: Sequence[int], rule: Rule | int):
        super().__init__(rule)
        self.model = model
        self.sublayers = check_sublayers(sublayers, model.c.n_layers)

    def begin(self, state, trace):
        self.is_target = self.model.blocks is state.model.blocks
        if not self.is_target and self.model.c != state.model.c:
            raise Refused("this drafter uses the target's cache, so it must be built with the "
                          "model that decodes, or with a quantised copy of it")
        super().begin(state, trace)

    def logits(self, state, x, k):
        """The draft's raw logits (B, 1, V), by its state x (B, 1, dim) of the token at offset k."""
        return self.model.unembed(x)

    def propose(self, state):
        m = self.model
        subs = self.sublayers
        shared = shared_prefix(subs)
        xs = []
        traces = []

        def run_shared(token, k):  # the target's pass will not repeat this
            traces.append(dict.fromkeys(tap for tap in state.taps if tap < shared))
            at = state.span(k, k + 1)
            xs.append(m.run(m.embed(token), at, state.cache, subs[:shared], traces[-1]))
            return xs[-1]                                                       # (B, 1, dim)

        def step(token, k):
            x = run_shared(token, k)
            if shared < len(subs):
                x = m.run(x, state.span(k, k + 1), state.cache, subs[shared:])
            return self.logits(state, x, k)

        draft = chain(state, step, self.rule)
        if self.is_target and xs:
            run_shared(draft.tokens[:, -1:], len(xs))   # the last drafted token is only verified
            trace = {tap: torch.cat([part[tap] for part in traces], 1) for tap in traces[0]}
            draft.reuse = Reuse(shared, torch.cat(xs, 1), trace)
        return draft
