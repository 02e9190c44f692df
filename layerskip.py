"""Drafting with the target's own sub-layers: early exit (LayerSkip) and skip sets (Draft & Verify), one
drafter for both; and how often a text accepts such a draft.

The one thing to remember: the sub-layers before the first gap compute exactly what the verifier would, so
their keys, values and hidden states are handed over (`reuse`), not computed again.
"""
import torch

from kvcache import KVCache
from sampling import to_probs
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


class Teacher:
    """The target's own pass over a text, kept so that any number of drafts can be scored against it.

    Raises ValueError for a text that is empty or longer than the context.
    """

    @torch.inference_mode()
    def __init__(self, model, ids, probs=to_probs):
        c, T = model.c, len(ids)
        if not 0 < T <= c.max_len:
            raise ValueError(f"a text of {T} tokens cannot be scored: the context holds 1 to {c.max_len}")
        if not 0 <= min(ids) <= max(ids) < c.vocab_size:
            raise ValueError(f"the text holds token id {max(ids)}, but ids run from 0 to {c.vocab_size - 1}")
        self.model, self.probs = model, probs
        self.cache = KVCache(c, 1, 2 * T, model.attention_dtype(), model.tok.device)
        x, trace = model.embed(torch.tensor([ids], device=model.tok.device)), []
        model.run(x, slice(0, T), self.cache, trace=trace)
        self.states = [x, *trace]                       # behind the first i sub-layers: (1, T, dim) each
        self.p = probs(model.unembed(trace[-1]))        # (1, T, V)

    @torch.inference_mode()
    def draft(self, sublayers):
        """q (1, T, V): what the first drafted token behind each position is drawn from.

        Position i reads the target's keys before i and its own at i, as the first step of a draft does: its
        block lies in slots of its own behind the target's, and sees nothing of itself but itself.
        """
        subs, T = check_sublayers(sublayers, self.model.c.n_layers), self.p.shape[1]
        shared = next((i for i, sub in enumerate(subs) if i != sub), len(subs))
        own = torch.eye(T, dtype=torch.bool, device=self.p.device)
        x = self.model.run(self.states[shared], slice(0, T), self.cache, subs[shared:], slice(T, 2 * T), own)
        return self.probs(self.model.unembed(x))

    def acceptance(self, sublayers):
        """How likely the first drafted token behind each position is accepted: sum of min(p, q) (Leviathan et
        al. 2023, Corollary 3.6). (T,) float64, on the CPU."""
        both = torch.minimum(self.p, self.draft(sublayers)).double().sum(-1)
        return both[0].clamp(max=1).cpu()  # trap: in float32 a distribution may sum to more, and equals gain


def acceptance(model, sublayers, ids, probs=to_probs):
    """The acceptances (T,) of a draft along the text `ids`, teacher-forced in one pass; see `Teacher`."""
    return Teacher(model, ids, probs).acceptance(sublayers)
