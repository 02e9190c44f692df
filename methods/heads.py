"""Trained heads: small modules on a frozen model that draft for it, and what they learn to predict.

A head learns to predict the model's next tokens from states that the model computes anyway. The
model does not change, and neither does its text.

    kind        reads                            predicts                       its own weights
    Kangaroo    the state after block E          the next token                 an attention
    ExitBlock   the state after block E          the next token                 a block
    Eagle       the token, the final state       the next token                 a block, a matrix
                before it
    Medusa      the final state                  head k = 1, 2, ...: the        a matrix per head
                                                 token k places after the next
    Prophet     the final state, the next        the tokens after that, one     one block or two
                token and its own drafts         by one

All of them use the model's embedding, final norm and output head. `own` is a Transformer of a block
or two that shares these with the model. Its blocks start as copies of the model's: an ExitBlock
starts as the exit one block later. Each kind has `weights` (all that is trained), `shape`
(arguments of its constructor), `taps` (the states it reads), `predict` (logits for a whole text,
for training) and `drafter`.
"""
import copy
import json
from collections import Counter
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import checkpoint
from control import MOST, weight_costs
from files import replacing
from layerskip import early_exit
from methods import drafting
from methods.drafting import unit
from methods.standin import VOCAB, ShortHead, read_vocab
from methods.trees import Siblings
from model import Placement, Transformer

FILE = "heads.safetensors"
AHEAD = 4   # tokens that a prophet learns to predict from one state
SHAPE = attrgetter(     # of a model: its heads fit every other model of this shape
    "vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "post_norm")


def graft(model, first, count, hidden_dim=None, kind=Transformer):
    """A Transformer, of this kind, that shares embedding, final norm and head with the model, and
    has `count` blocks of its own. They start as copies of the model's from block `first` on, with
    the first hidden_dim units of their MLPs. They attend to the whole text, without a sliding
    window."""
    last = model.c.n_layers - 1
    units = hidden_dim or model.c.hidden_dim
    c = replace(model.c, n_layers=count, hidden_dim=units, window=None)
    own = kind(replace(c, vocab_size=1, tied=True)).to(model.tok.device, model.tok.dtype)
    own.c = c
    own.tok = model.tok
    own.norm = model.norm
    own.head = model.head
    own.scale = model.scale
    for i, mine in enumerate(own.blocks, first):
        like = model.blocks[min(i, last)]
        for name, p in mine.named_parameters():
            w = attrgetter(name)(like)
            if not isinstance(w, torch.Tensor):     # quantised
                w = w.full(p.dtype)
            if name == "mlp.gate_up":
                w = w.unflatten(0, (2, -1))[:, :units].flatten(0, 1)
            p.data.copy_(w[:, :units] if name == "mlp.down" else w)
    return own


@dataclass(frozen=True)
class Step:
    """What one drafted token costs: `trunk` blocks of the model, `weights` of its own, a share of
    the `output` head. reads: whether its attention reads the whole text. most: the longest
    draft."""
    weights: float
    trunk: int = 0
    output: float = 1.0
    reads: bool = False
    most: int = MOST


class Head:
    """What all kinds share. draft: the class of its drafter, in methods/drafting.py; step: what a
    drafted token costs; branches: whether any node of its trees may have children, or only first
    children. ranks: the chance that the model's greedy token is the head's first, second, ...
    choice, if measured.

    Each kind has predict(tokens (B, T), trace, cache), for training. It yields (k, logits
    (B, N, V)): row n is what the head says of the token k places after the next one. trace: the
    target's states at `taps`; cache: the target's keys and values of the text.
    """
    branches = False
    ranks = ()

    def state(self, trace):
        """What it reads of a trace. (B, T, taps * dim)"""
        return torch.cat([trace[tap] for tap in self.taps], -1)

    def drafter(self, rule, shape=None):
        """A drafter of chains, or of trees of this shape, a list of parents."""
        if self.branches:
            return self.draft(self, rule, shape)
        families = Counter(shape).values()      # how many children each parent has
        widths = [sum(size > i for size in families) for i in range(1, max(families, default=0))]
        chain = self.draft(self, rule)
        if widths:
            return Siblings(chain, widths)
        return chain


class ExitBlock(Head):
    """An exit with its own block, which reads a copy of the state, so that the trunk is untouched
    (lucidrains' "extra block"). Raises ValueError for a block that the model does not have."""
    kind = "exit_block"
    draft = drafting.ExitDraft
    sublayers = [0, 1]
    lacks = ()

    def __init__(self, model, exit_layer):
        self.taps = early_exit(model.c.n_layers, exit_layer)[-1:]
        self.model = model
        self.shape = {"exit_layer": exit_layer}
        self.own = graft(model, exit_layer, 1)
        for part in self.lacks:
            delattr(self.own.blocks[0], part)
        self.weights = self.own.blocks
        self.step = Step(count(self), trunk=exit_layer, reads=True)

    def predict(self, tokens, trace, cache):
        at = Placement.span(0, tokens.shape[1], tokens.device)
        x = self.own.run(trace[self.taps[0]], at, sublayers=self.sublayers)
        yield 0, self.own.unembed(x)


class Kangaroo(ExitBlock):
    """The adapter of Kangaroo (arXiv 2404.18911, section 3.1): attention without an MLP."""
    kind = "kangaroo"
    sublayers = [0]
    lacks = "mlp", "mlp_norm", "mlp_post"


class EagleBlock(Transformer):
    """The block of an Eagle, which takes what `Eagle.join` made, or one state for each token."""

    def enter(self, x):
        """(B, T, dim + n * dim) -> (B, T, dim)"""
        x, before = x.tensor_split([self.c.dim], -1)
        if before.shape[-1] > self.c.dim:       # n states of the target, not the block's own
            states = before.unflatten(-1, (-1, self.c.dim))
            before = F.linear(unit(states).flatten(-2), self.mix)
        return x + F.linear(unit(before), self.matrix)


class Eagle(Head):
    """EAGLE (arXiv 2401.15077): a block that reads each token's embedding and the final state of
    the token before it, from which the target chose it. After a drafted token it reads its own
    output instead. The paper maps both with one matrix (dim, 2 dim); ours, (dim, dim), maps the
    state and starts at zero.

    It is trained on the first token of a draft, and on the second, which reads the block's output
    (HASS, arXiv 2408.15766); later tokens are drafted like the second.

    fused: it reads a mix of the final state and of the states after a quarter and half of the
    blocks (EAGLE-3, arXiv 2503.01840, section 3.1), at first the final state alone.
    """
    kind = "eagle"
    draft = drafting.EagleDraft
    reach = 2   # steps that it is trained on; more can be evaluated

    def __init__(self, model, fused=False):
        L = model.c.n_layers
        dim = model.c.dim
        self.model = model
        self.shape = {"fused": bool(fused)}
        blocks = (L // 4, L // 2, L) if fused else (L,)
        self.taps = [2 * max(1, b) - 1 for b in blocks]
        self.own = graft(model, 0, 1, kind=EagleBlock)
        self.own.matrix = nn.Parameter(model.tok.new_zeros(dim, dim))
        self.weights = nn.Module()
        self.weights.blocks = self.own.blocks
        if fused:       # (dim, 3 dim): at first the final state alone
            self.own.mix = nn.Parameter(F.pad(torch.eye(dim).to(model.tok), (2 * dim, 0)))
            self.weights.mix = self.own.mix
        self.weights.matrix = self.own.matrix
        self.step = Step(count(self), reads=True)

    def join(self, tokens, before):
        """Embeddings of tokens (B, T) beside the states (B, T, n * dim) of those before them."""
        return torch.cat([self.own.embed(tokens), before], -1)

    def predict(self, tokens, trace, cache):
        T = tokens.shape[1]
        device = tokens.device
        ones = torch.ones(T, T, dtype=torch.bool, device=device)
        positions = torch.arange(T, device=device)[None]
        before = self.state(trace)
        inputs = []                         # of all steps so far: each token once per step
        seen = []                           # the rows of the mask: who sees whom among them
        for k in range(1, 1 + self.reach):
            moved = F.pad(before, (0, 0, 1, 0))[:, :-1]     # the state of the token before each
            inputs.append(self.own.enter(self.join(tokens, moved)))
            text = ones.tril(1 - k)                         # keys of the first step
            drafted = [ones.tril(d).triu(d) for d in range(2 - k, 1)]   # one key of each later step
            seen = [F.pad(rows, (0, T)) for rows in seen]
            seen.append(torch.cat([text, *drafted], 1))
            slots = torch.arange(k * T, device=device)[None]
            at = Placement(positions.repeat(1, k), slots, 0, k * T, torch.cat(seen)[None])
            x = self.own.run(torch.cat(inputs, 1), at)[:, -T:]
            before = x.detach()
            yield k, self.own.unembed(x[:, k:])


class Medusa(Head):
    """Residual blocks on the final state (Medusa, arXiv 2401.10774, section 2.1): head k computes W
    (x + silu(W_k x)), where W_k starts at zero, and W is the model's final norm and output head. In
    the paper each head trains a W of its own, which with a large vocabulary is much larger than
    W_k.

    markov: the rank of a bias from the token before, W_2 W_1[token] (DeepSpec's DSpark), shared by
    all heads; 0: none. With it a head knows what the head before it drafted.
    """
    kind = "medusa"
    draft = drafting.MedusaDraft
    branches = True

    def __init__(self, model, heads, markov=0):
        dim = model.c.dim
        V = model.c.vocab_size
        self.model = model
        self.steps = heads
        self.shape = {"heads": heads, "markov": markov}
        self.taps = [2 * model.c.n_layers - 1]
        self.weights = nn.ParameterDict({"inner": model.tok.new_zeros(heads, dim, dim)})
        self.step = Step(count(self) / heads + markov * V, most=heads)
        if markov:
            noise = torch.randn(V, markov, generator=torch.Generator().manual_seed(0))
            self.weights.before = nn.Parameter(0.02 * noise.to(model.tok))
            self.weights.bias = nn.Parameter(model.tok.new_zeros(V, markov))

    def after(self, x, k, before):
        """The raw logits (B, T, V) of head k, from 0 on, after final states x (B, T, dim): for the
        token k + 1 places after the next. before (B, T): the token before that one."""
        w = self.weights
        x = unit(x)
        logits = self.model.unembed(x + F.silu(F.linear(x, w.inner[k])))
        if self.shape["markov"]:
            logits = logits + F.linear(F.embedding(before, w.before), w.bias)
        return logits

    def predict(self, tokens, trace, cache):
        x = trace[self.taps[0]]
        for k in range(1, self.steps + 1):
            yield k, self.after(x[:, :-k], k - 1, tokens[:, k:])


class Prophet(Head):
    """A decoder of one or two blocks that reads the final state of the last token read, the next
    token, which the target chose from it, and its own drafts (lucidrains' "prophet transformer").
    Its MLPs are half as wide as the model's, because it runs once per drafted token."""
    kind = "prophet"
    draft = drafting.ProphetDraft

    def __init__(self, model, blocks):
        self.model = model
        self.shape = {"blocks": blocks}
        self.own = graft(model, 0, blocks, max(1, model.c.hidden_dim // 2))
        self.taps = [2 * model.c.n_layers - 1]
        self.weights = self.own.blocks
        self.step = Step(count(self))

    def predict(self, tokens, trace, cache):
        N = tokens.shape[1] - AHEAD                                        # a window for each state
        start = unit(trace[self.taps[0]][:, :N, None])                          # (B, N, 1, dim)
        ids = tokens[:, 1:].unfold(1, AHEAD, 1)                                 # (B, N, AHEAD)
        x = torch.cat([start, self.own.embed(ids)], 2).flatten(0, 1)           # (B*N, 1+AHEAD, dim)
        at = Placement.span(0, 1 + AHEAD, x.device)
        x = self.own.run(x, at).unflatten(0, (-1, N))                         # (B, N, 1+AHEAD, dim)
        for k in range(1, 1 + AHEAD):
            yield k, self.own.unembed(x[:, :, k])


KINDS = {head.kind: head for head in (Kangaroo, ExitBlock, Eagle, Medusa, Prophet)}


def count(head):
    """The number of a head's own weights."""
    return sum(p.numel() for p in head.weights.parameters())


def pricing(head, costs=None):
    """n -> the cost of a drafted token after n others, relative to a target pass, by a Costs table
    or by weights. The head's own weights are not in the table: each costs as much as a weight of
    the model's blocks or of its output head, whichever costs more."""
    step = head.step
    by_count = weight_costs(head.model.c)
    costs = costs or by_count
    rate = max(sum(costs.sublayers) / sum(by_count.sublayers), costs.head / by_count.head)
    own = rate * step.weights
    slot = costs.slot * step.reads
    part = costs.pricing(range(2 * step.trunk), step.output)
    whole = costs.pricing(range(len(costs.sublayers)))
    return lambda n: (part(n) + own + slot * (n - costs.context)) / whole(n)


def shorter(head, ids):
    """The head with a draft vocabulary (`methods.standin.ShortHead`), unless it has one."""
    twin = copy.copy(head)
    part = "own" if "own" in vars(head) else "model"
    if head.step.output == 1:
        short = ShortHead(getattr(head, part), ids)
        setattr(twin, part, short)
        twin.step = replace(head.step, output=short.share)
    return twin


# --- files


def save(head, folder):
    """Write a head in bfloat16."""
    about = {
        "kind": head.kind,
        "shape": head.shape,
        "model": SHAPE(head.model.c),
        "ranks": list(head.ranks)}
    weights = {name: p.detach().bfloat16() for name, p in head.weights.state_dict().items()}
    with replacing(Path(folder) / FILE) as path:
        save_file(weights, path, metadata={"heads": json.dumps(about)})


def facts(folder):
    """What `save` noted of a head: its "kind" and "shape", the shape of its "model", and
    "ranks"."""
    path = Path(folder) / FILE
    with checkpoint.guarded(f"{path}: no trained heads for this model"):
        noted = json.loads(safe_open(path, framework="pt").metadata()["heads"])
        return {key: noted[key] for key in ("kind", "shape", "model", "ranks")}


def load(folder, model, kinds=KINDS):
    """The head that `save` wrote, on this model and in its dtype, with the draft vocabulary that it
    learnt, if one lies beside it, and recorded if the model is. Raises ValueError, in one line, for
    a file that is missing or damaged or was made for a model of another shape or vocabulary."""
    path = Path(folder) / FILE
    vocab = Path(folder) / VOCAB
    about = facts(folder)
    with checkpoint.guarded(f"{path}: no trained heads for this model"):
        file = safe_open(path, framework="pt")
        if about["model"] != list(SHAPE(model.c)):
            raise ValueError("their model has another shape or vocabulary: train heads for this "
                             "one")
        if about["kind"] not in kinds:
            raise ValueError(f"their kind is {about['kind']!r}, and known are {', '.join(kinds)}")
        head = kinds[about["kind"]](model, **about["shape"])
        head.weights.load_state_dict({name: file.get_tensor(name) for name in file.keys()})
        head.ranks = [float(r) for r in about["ranks"]]
    if "own" in vars(head):
        head.own = model.alongside(head.own)
    if vocab.is_file():
        head = shorter(head, read_vocab(vocab, model.c.vocab_size))
    return head
