"""HAMburger (arXiv 2505.20438), a small reconstruction. It is NOT lossless and NOT the model it is
made of.

Several tokens share one entry, which is one key and one value in each block, and one step says all
tokens of the next entry. As a writer it trusts its own guesses, so its text is another one. As a
drafter, which the untouched model checks, it is exact.

    python -m lab.hamburger "Once upon a time"     trains one for seconds; it writes unchecked

    tokens     Once   upon a time   ,    there was
    entries    [ 0 ]  [     1     ] [2]  [   3   ]

An entry goes on while the next token is almost sure, and it stands at the position of its last
token.
A step reads entry m and says entry m + 1. Its first token comes from the trunk's final state, and
each other token from a small decoder, which reads states of the trunk and the entry so far.

The trunk is a copy of a model and learns with the rest. The model itself, frozen, is the teacher.
It says where entries end and what comes next (in the paper a text does). There is no cache here, to
keep this short. Each step reads all entries again, and a cache with a slot for each entry would
change only the time.
"""
import copy
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import checkpoint
from drafter import Drafter, Rule, chain
from methods.base import graft
from model import Placement
from speculative import generate
from support import cli
from support.texts import read_prompts

STORIES = Path(__file__).parents[1] / "weights" / "stories-llama"
SURE = 0.05     # nats
SHARE = 0.3     # relative to the largest entropy in the entry (the paper's code)
HEADS = 4       # of what merges the tokens of an entry


class Hamburger(nn.Module):
    """most: tokens of an entry; blocks: of the decoder that says them."""

    def __init__(self, model, most=4, blocks=2):
        super().__init__()
        self.most = most
        self.trunk = copy.deepcopy(model.bare).requires_grad_(True)
        self.micro = graft(self.trunk, 0, blocks)       # shares its embedding, final norm and head
        quarters = (max(1, round(model.c.n_layers * i / 4)) for i in (1, 2, 3, 4))
        self.taps = [2 * block - 1 for block in quarters]       # the last one: final states
        dim = model.c.dim
        g = torch.Generator().manual_seed(0)

        def fresh(*shape, std=0.0):
            return nn.Parameter((std * torch.randn(shape, generator=g)).to(model.tok))

        self.kv = fresh(2 * dim, dim, std=0.02)
        self.place = fresh(most, 2 * dim)
        self.out = fresh(dim, dim)
        self.inner = fresh(dim, dim, std=0.02)
        self.last = fresh(1, dim)

    def compose(self, tokens, count):
        """The compositional embedder. Of the tokens (B, N, S) of each entry the first `count` (B,
        N) become one embedding (B, N, dim), their mean and what attention from it to each of them
        adds."""
        x = self.trunk.embed(tokens)
        here = torch.arange(self.most, device=tokens.device) < count[..., None]
        here[..., 0] = True                             # also in padding, which holds no token
        mean = (x * here[..., None]).sum(2) / here.sum(2, keepdim=True)         # (B, N, dim)
        k, v = (F.linear(x, self.kv) + self.place).unflatten(-1, (2, HEADS, -1)).unbind(3)
        scores = torch.einsum("bnhd,bnshd->bnhs", mean.unflatten(-1, (HEADS, -1)), k)
        scores = (scores / k.shape[-1] ** 0.5).masked_fill(~here[:, :, None], -torch.inf)
        y = torch.einsum("bnhs,bnshd->bnhd", scores.softmax(-1), v).flatten(2)  # (B, N, dim)
        return mean + F.linear(y, self.out) * (count > 1)[..., None]  # one token stays as it is

    def read(self, tokens, count):
        """The trunk's states of entries after each quarter of its blocks. (B, N, 4, dim)"""
        trace = dict.fromkeys(self.taps)
        slots = torch.arange(count.shape[1], device=count.device)[None]
        at = Placement(count.cumsum(1) - 1, slots, 0, count.shape[1])
        table = self.trunk.angles(self.trunk.c.max_len)
        self.trunk.run(self.compose(tokens, count), at, trace=trace, table=table)
        return torch.stack([trace[tap] for tap in self.taps], 2)

    def following(self, features, tokens):
        """The states that say the entries after those read. features (B, N, 4, dim), tokens (B, N,
        J) that the next entries begin with -> (B, N, 1 + J, dim)."""
        x = torch.cat([features, self.micro.embed(tokens)], 2).flatten(0, 1)    # (B*N, 4+J, dim)
        x = self.micro.run(x, Placement.span(0, x.shape[1], x.device))
        x = x.unflatten(0, features.shape[:2])
        return torch.cat([features[:, :, 3:], x[:, :, 4:]], 2)

    def ending(self, x):
        """The stop head's logit (...). Is the token that x (..., dim) says the last of its
        entry?"""
        return F.linear(F.silu(F.linear(self.trunk.norm(x), self.inner)), self.last)[..., 0]

    def stops(self, x, confidence):  # where the chance that the entry goes on is below `confidence`
        return (-self.ending(x)).sigmoid() < confidence


# --- entries, and how they are learnt


def begins(entropy, most):
    """Which tokens begin an entry, (B, T), by the entropy (B, T) of what each was drawn from. A
    token begins an entry where it is not small, nor small compared with the largest in the entry.
    So do the first two, which were given. Here 0.6 is less than 0.3 of 2.5, which stays the
    largest; 0.04 is almost 0; no entry has five.

    >>> entropy = torch.tensor([[9.0, 2.5, 0.6, 0.74, 0.76, 0.04, 0.2, 0.3, 0.01, 0.01, 0.01, 0.01],
    ...                         [0.0, 0.0, 0.04, 0.06, 0.01, 0.04, 0.01, 0.01, 3.0, 3.0, 0.89,
    ...                          0.91]])
    >>> ["".join(".x"[i] for i in row) for row in begins(entropy, most=4).int().tolist()]
    ['xx..x..x...x', 'xx.x...xxx.x']
    """
    first = torch.ones_like(entropy, dtype=torch.bool)
    peak = entropy[:, 1]
    size = torch.ones_like(peak)
    for t, e in enumerate(entropy[:, 2:].unbind(1), 2):
        joins = ((e < SURE) | (e < SHARE * peak)) & (size < most)
        size = torch.where(joins, size + 1, 1)
        peak = torch.where(joins, torch.maximum(peak, e), e)
        first[:, t] = ~joins
    return first


def pack(tokens, first, most):
    """Tokens (B, T) as entries (B, N, most), and how many each one has (B, N), 0 after a row's
    last.

    >>> first = torch.tensor([[True, True, False, False]])
    >>> entries, count = pack(torch.tensor([[5, 6, 7, 8]]), first, 3)
    >>> entries.tolist(), count.tolist()
    ([[[5, 0, 0], [6, 7, 8]]], [[1, 3]])
    """
    at = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    entry = first.cumsum(1) - 1                                                 # (B, T)
    inside = at - torch.where(first, at, 0).cummax(1).values
    N = int(entry.max()) + 1
    entries = tokens.new_zeros(len(tokens), N * most).scatter(1, entry * most + inside, tokens)
    count = torch.zeros_like(entries[:, :N]).scatter_add(1, entry, torch.ones_like(entry))
    return entries.unflatten(1, (N, most)), count


def losses(burger, teacher, tokens):
    """(KL(p || q) of what is said against the teacher, loss of the stop head), in nats, of texts
    (B, T)."""
    with torch.no_grad():
        p = teacher(tokens)[:, :-1]                                             # (B, T-1, V)
    # trap: row i is about token i + 1
    entropy = F.pad(torch.distributions.Categorical(logits=p).entropy(), (1, 0))
    entries, count = pack(tokens, begins(entropy, burger.most), burger.most)
    x = burger.following(burger.read(entries, count)[:, :-1], entries[:, 1:, :-1])
    place = torch.arange(burger.most, device=tokens.device)
    count = count[:, 1:, None]
    last = (place == count - 1)[place < count]
    x = x[place < count]                                            # (B*(T-1), dim): text order
    logp = p.flatten(0, 1).log_softmax(-1)
    logq = burger.trunk.unembed(x).log_softmax(-1)
    whole = torch.arange(1, 1 + len(x), device=x.device) % p.shape[1] != 0  # not where a text ends
    stop = F.binary_cross_entropy_with_logits(burger.ending(x)[whole], last[whole].to(x.dtype))
    return (logp.exp() * (logp - logq)).sum(-1).mean(), stop


def tune(burger, teacher, batches, rates=(3e-4, 2e-3)):
    """Learn from batches (B, T), the trunk at the first of the rates and the new parts at the
    second. Returns the two losses of each step."""
    trunk = dict.fromkeys(burger.trunk.parameters(), rates[0])
    optimiser = torch.optim.AdamW([{"params": p, "lr": trunk.get(p, rates[1])}
                                   for p in burger.parameters()],
                                  betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, len(batches))
    found = []
    for tokens in batches:
        kl, stop = losses(burger, teacher, tokens)
        (kl + 0.5 * stop).backward()            # half, as in the paper's code
        nn.utils.clip_grad_norm_(burger.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        found.append((kl.item(), stop.item()))
    return found


# --- writing


def latest(burger, rows):
    """What is known after each text, a list of entries, which are lists of ids. (B, 1, 4, dim)"""
    device = burger.trunk.tok.device
    N = max(map(len, rows))
    whole = [row + [[]] * (N - len(row)) for row in rows]
    ids = torch.tensor([[entry + [0] * (burger.most - len(entry)) for entry in row]
                        for row in whole], device=device)
    count = torch.tensor([list(map(len, row)) for row in whole], device=device)
    features = burger.read(ids, count)
    return torch.stack([features[b, len(row) - 1] for b, row in enumerate(rows)])[:, None]


@torch.inference_mode()
def write(burger, prompt, max_new, confidence):
    """Write greedily without any check, and yield the ids of each entry. The prompt is not
    merged."""
    row = [[t] for t in prompt]
    while max_new > 0:
        features = latest(burger, [row])
        ids = torch.zeros(1, 1, 0, dtype=torch.long, device=features.device)    # (1, 1, J)
        for _ in range(min(burger.most, max_new)):
            x = burger.following(features, ids)[:, :, -1]                       # (1, 1, dim)
            ids = torch.cat([ids, burger.trunk.unembed(x).argmax(-1)[None]], 2)
            if burger.stops(x, confidence):
                break
        row += ids[0].tolist()
        max_new -= ids.shape[2]
        yield row[-1]


class BurgerDraft(Drafter):
    """An exact drafter, since the untouched model checks it. A draft is what one step says; what a
    round wrote, with the token that the target chose, is read as one entry."""

    def __init__(self, burger, confidence):
        rule = Rule(burger.most - 1)
        rule.stop = lambda k, logits, token: burger.stops(self.x, confidence)[:, 0].tolist()
        super().__init__(rule)
        self.burger = burger

    def begin(self, state, trace):
        super().begin(state, trace)
        self.rows = [[[t] for t in text] for text in state.known]

    def propose(self, state):
        drafted = []
        features = latest(self.burger, self.rows)                               # (B, 1, 4, dim)

        def step(token, k):
            drafted.append(token)  # the first is the last known one, and was read
            self.x = self.burger.following(features, torch.cat(drafted, 1)[:, None, 1:])[:, 0, -1:]
            return self.burger.trunk.unembed(self.x)                            # (B, 1, V)

        return chain(state, step, self.rule)

    def observe(self, state, r):
        super().observe(state, r)
        for row, new in zip(self.rows, r.new, strict=True):
            row += [new[i : i + self.burger.most] for i in range(0, len(new), self.burger.most)]


def untrained(model, gamma):
    """A BurgerDraft of which nothing has learnt yet, as in `--draft lab/hamburger.py:untrained`."""
    return BurgerDraft(Hamburger(model, most=gamma + 1), confidence=0.4)


# --- the command


def run(argv):
    p = cli.Parser(description="Train a HAMburger for seconds; it writes unchecked: NOT lossless.")
    p.add_argument("prompt")
    p.add_argument("--max-new", type=int, default=40, metavar="N")
    p.add_argument("--steps", type=int, default=20, metavar="N", help="of training (default: 20)")
    a = p.parse_args(argv)
    model, tokenizer = checkpoint.load(STORIES, dtype=torch.float32)
    ids = checkpoint.encode(tokenizer, a.prompt, model.c.bos)
    texts = [checkpoint.encode(tokenizer, line["text"]) for line in read_prompts("stories")]
    length = min(64, *map(len, texts))
    batch = torch.tensor([text[:length] for text in texts], device=model.tok.device)
    burger = Hamburger(model)
    tune(burger, model, [batch] * a.steps)
    entries = list(write(burger, ids, a.max_new, confidence=0.3))
    said = sum(entries, [])
    (plain,), _ = generate(model, [ids], len(said))
    print(tokenizer.decode(ids + said))
    same = len(os.path.commonprefix([said, plain]))
    print(f"{len(said)} tokens in {len(entries)} steps, unchecked, so NOT lossless: the model "
          f"itself would have written the first {same} of them")


def main(argv=None):
    return cli.main(run, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
