"""Two things that engines get wrong: drafts under a grammar, and drafts in a sliding window. These
are exercises 25 and 26, which exercises/tests/test_serving.py grades."""
import torch


def constrain(p, tokens, grammar, state):
    """The target's distributions p (B, K+1, V) under a grammar: what it forbids has probability 0,
    and the rest is scaled to sum to 1. Row k is about the token after the first k drafted ones,
    tokens (B, K).

    grammar (S, V): the state after each token in each state, -1 where the token is forbidden. state
    (B,): the state of each text before the draft. After a forbidden draft token no row counts.

    >>> p = torch.tensor([[[0.5, 0.5]] * 2])
    >>> grammar = torch.tensor([[1, -1], [-1, 0]])          # 0 and 1 take turns
    >>> constrain(p, torch.tensor([[0]]), grammar, torch.tensor([0])).tolist()
    [[[1.0, 0.0], [0.0, 1.0]]]
    """
    rows = []
    for k in range(p.shape[1]):
        row = p[:, k] * (grammar[state] >= 0)                                   # (B, V)
        rows.append(row / row.sum(-1, keepdim=True))
        if k < tokens.shape[1]:
            state = grammar[state, tokens[:, k]].clamp(min=0)
    return torch.stack(rows, 1)


def replay(size, window, gamma, accepted, mask):
    """Play rounds of gamma drafted tokens in a ring of `size` slots, of which round r accepts
    accepted[r]. Returns the first (round, position) whose token reads keys from outside its window,
    or None. mask: a function like `ring_mask`."""
    ring, text, first = [None] * size, {}, 0
    for number, kept in enumerate(accepted):
        for position in range(first, first + gamma + 1):
            # a key, as that round computed it
            text[position] = ring[position % size] = (position, number)
        for i, row in enumerate(mask(first, gamma + 1, size, window).tolist(), first):
            read = {key for key, seen in zip(ring, row, strict=True) if seen}
            if read != {text[j] for j in range(max(0, i - window + 1), i + 1)}:
                return number, i
        first += kept + 1
    return None


def ring_mask(first, T, size, window):
    """Which slots of a ring may each token of a block read, once the block is written? (T, size)
    bool. The block stands at the positions first .. first+T-1; position j is in slot j % size. A
    token sees itself and the window - 1 positions before it. size >= window.

    >>> ring_mask(3, 2, 4, 2).int().tolist()  # 3 sees 2 and 3, in slots 2 and 3; 4 sees 3 and 4
    [[0, 0, 1, 1], [1, 0, 0, 1]]
    """
    position = torch.arange(first, first + T)[:, None]
    back = (position - torch.arange(size)) % size  # how far back is the last position of each slot
    return (back < window) & (back <= position)


def ring_size(window, gamma):
    """The fewest slots of a ring that needs no rollback: whatever rounds of gamma drafted tokens
    accept, each token reads the keys of its window."""
    return window + gamma


def ring_counterexample(window, gamma):
    """How many tokens each round accepts in a run that goes wrong with one slot fewer: a list.
    gamma >= 1."""
    return [0] * window
