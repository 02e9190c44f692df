"""The library as a port. It answers every case, so that the traces are made with it and tested
against it.

Wherever an answer depends on a decision between tokens, `Watch` notes how far that decision was
from going the other way. No other port can say this, and without it a trace might depend on
rounding.
"""
import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

import model
import speculative
import verification
from checkpoint import parts, read_config
from drafter import Drafter
from kvcache import KVCache
from layerskip import SelfDraft
from machine.exact import Race
from methods.lookup import NGram
from methods.trees import Siblings, Tree, ancestors, verify_tree
from methods.wrapper import Wrapper
from model import Attention, Config, RMSNorm, Transformer
from porting.check import ROOT, fingerprint
from sampling import Coins, to_probs
from speculative import State

RANKS = 4  # top tokens that must be clearly apart: siblings take the second and the third


def load(folder, dtype):
    """The model of a folder, without its tokenizer: every case gives ids."""
    m = Transformer(read_config(Path(folder))).to(dtype).requires_grad_(False).eval()
    tensors = load_file(Path(folder) / "model.safetensors")
    for name, piece in parts(m):
        piece.copy_(tensors[name].view(piece.shape))
    return m


def short(x):
    """All numbers of a tensor in one list, with the nine digits that float32 needs."""
    return [float(f"{v:.9g}") for v in x.flatten().tolist()]


def pack(x):
    """A tensor in JSON."""
    return {"shape": list(x.shape), "data": short(x)}


def unpack(packed, dtype=torch.float64):
    return torch.tensor(packed["data"], dtype=torch.float64).view(packed["shape"]).to(dtype)


# --- margins


def edge_margin(weights, u):
    """How far u * (the sum of the weights) is from the nearest edge of their cumulative sums, in
    probability. weights (..., V), u (...)"""
    cdf = weights.double().cumsum(-1)
    edges = torch.cat([torch.zeros_like(cdf[..., :1]), cdf], -1)
    return float((u[..., None] * cdf[..., -1:] - edges).abs().min())


def cut_margin(logits, temperature=0.0, top_k=None, top_p=None, min_p=None, ties=False):
    """How far the nearest decision of `to_probs` is from going the other way. ties: equal logits
    are equal on purpose, in a case that gives them, so that neither can overtake the other."""
    ordered = logits.double().sort(descending=True).values
    gaps = ordered[..., :-1] - ordered[..., 1:]
    gaps = gaps.masked_fill((gaps == 0) & ties, math.inf)
    if temperature == 0:
        return float(gaps[..., :RANKS].min())
    k = min(top_k or ordered.shape[-1], ordered.shape[-1])
    p = (ordered[..., :k] / temperature).softmax(-1)
    found = [math.inf] if k == ordered.shape[-1] else [float(gaps[..., k - 1].min())]
    if top_p not in (None, 1):
        before = p.cumsum(-1) - p
        found.append(float((before - top_p).abs().min()))
        p = p.masked_fill(before >= top_p, 0)
    if min_p is not None:
        found.append(float((p - min_p * p[..., :1])[p > 0].abs().min()))
    return min(found)


def tree_margin(p, tokens, parents, q):
    """The smallest sum of a residual of p after a rejected sibling, leaving out those that are
    exactly 0."""
    rest, found = p.double().clone(), [1.0]
    for k, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        drawn = (torch.zeros_like(rest[0]).index_fill_(0, torch.tensor(token), 1.0)
                 if q is None else q[k])
        less = (rest[parent] - drawn).clamp(min=0)
        if less.sum() > 0:
            found.append(float(less.sum()))
            rest[parent] = less / less.sum()
    return min(found)


class Watch(Coins):
    """Coins that record what they were spent on, and the smallest margin."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.spent = []         # [(kind, uniforms, chances or chosen)]
        self.margin = math.inf  # the smallest

    def note(self, margin):
        self.margin = min(self.margin, margin)

    def take(self, count, device):
        self.taken = super().take(count, device)
        return self.taken

    def flip(self, prob):
        passed = super().flip(prob)
        if prob.numel():
            capped = prob.nan_to_num(-1.0).clamp(max=1)
            self.note(float((self.taken.view(prob.shape) - capped).abs().min()))
        self.spent.append(("flip", self.taken.tolist(), prob))
        return passed

    def choose(self, weights):
        chosen = super().choose(weights)
        self.note(edge_margin(weights, self.taken.view(chosen.shape)))
        self.spent.append(("choose", self.taken.tolist(), chosen))
        return chosen


# --- one function for each kind of case: (case, dtype, coins) -> answer


def weights(r, dtype, coins):
    tensors = load_file(ROOT / r["model"] / "model.safetensors")
    return {"tensors": {name: {"shape": list(x.shape), **fingerprint(x.double().flatten().tolist())}
                        for name, x in sorted(tensors.items())}}


def norm(r, dtype, coins):
    w = unpack(r["weight"], dtype)
    config = Config(1, 1, 1, 1, 1, 2, 1, norm_eps=r["eps"], norm_offset=r["offset"])
    layer = RMSNorm(config, len(w)).to(dtype)
    layer.weight.data.copy_(w)
    return {"y": pack(layer(unpack(r["x"], dtype)).detach())}


def turn(r, dtype, coins):
    cos, sin = model.rope(torch.tensor(r["positions"]), unpack(r["freqs"]))
    return {"y": pack(model.rotate(unpack(r["x"], dtype), cos.to(dtype), sin.to(dtype)))}


def visible(r, dtype, coins):
    tree = None if r["tree"] is None else torch.tensor([r["tree"]]) == 1
    at, slots = torch.tensor([r["positions"]]), torch.tensor([r["slots"]])
    mask = model.visible(at, slots, r["end"], tree, r["window"])
    return {"mask": mask[0].int().tolist()}


def attend(r, dtype, coins):
    """The library's attention with identity matrices, no rotation, and a cache that holds the given
    keys and values."""
    q, k, v = (unpack(r[name], dtype) for name in ("q", "k", "v"))    # (H, T, D), (Hkv, S, D) twice
    (H, T, D), Hkv = q.shape, k.shape[0]
    N = H // Hkv + 2
    layer = Attention(Config(1, Hkv * N * D, 1, H, Hkv, D, 1, query_scale=r["scale"],
                             attn_softcap=r["cap"])).to(dtype)
    for w in (layer.wqkv, layer.wo):
        nn.init.eye_(w.data)
    x = torch.zeros(1, T, Hkv, N, D, dtype=dtype)
    x[0, :, :, :-2] = q.view(Hkv, H // Hkv, T, D).permute(2, 0, 1, 3)
    one = torch.ones(T, 1, 1, D, dtype=dtype)
    hidden = torch.zeros(1, 1, 1, T, k.shape[1], dtype=dtype)
    hidden.masked_fill_(torch.tensor(r["mask"]) == 0, -math.inf)
    y = layer(x.flatten(2), one, one * 0, hidden, lambda *new: (k[None], v[None]))
    return {"y": pack(y[0, :, : H * D].detach())}


def sublayer(r, dtype, coins):
    m, x, first = load(ROOT / r["model"], dtype), unpack(r["x"], dtype), r["first"]
    at, layer = model.Placement.span(first, first + len(x)), r["sublayer"] // 2
    cache = KVCache(m.c, 1, at.end, m.attention_dtype())
    if r["past"]:
        cache.k[layer, 0, :, :first] = unpack(r["past"]["k"])
        cache.v[layer, 0, :, :first] = unpack(r["past"]["v"])
    y = {"x": pack(m.run(x[None], at, cache, [r["sublayer"]])[0])}
    if r["past"]:
        y |= {"k": pack(cache.k[layer, 0, :, first:]), "v": pack(cache.v[layer, 0, :, first:])}
    return y


def forward(r, dtype, coins):
    m = load(ROOT / r["model"], dtype)
    x, trace = m.embed(torch.tensor([r["tokens"]])), dict.fromkeys(range(2 * m.c.n_layers))
    logits = m.unembed(m.run(x, model.Placement.span(0, x.shape[1]), trace=trace))
    return {"embedded": pack(x[0]), "sublayers": [pack(y[0]) for y in trace.values()],
            "logits": pack(logits[0])}


def blocks(r, dtype, coins):
    m, logits = load(ROOT / r["model"], dtype), []
    cache = KVCache(m.c, 1, m.c.max_len + model.SPARE, dtype)
    for b in r["blocks"]:
        first, T = b["first"], len(b["tokens"])
        at = model.Placement.span(first, first + T)
        if b["parents"] is not None:
            tree = ancestors(torch.tensor([b["parents"]]))
            at = at._replace(positions=first + depths(b["parents"]), tree=tree, same=False)
        x = m.run(m.embed(torch.tensor([b["tokens"]])), at, cache, b["sublayers"])
        logits.append(pack(m.unembed(x)[0]))
        if b["keep"] is not None:
            src = first + torch.tensor([b["keep"]])
            cache.move(src, first + torch.arange(src.shape[1])[None])
    return {"logits": logits}


def depths(parents):
    """The depth of each node of a tree: (1, K+1), the last known token at 0."""
    return ancestors(torch.tensor([parents], dtype=torch.long)).sum(-1) - 1


def uniforms(r, dtype, coins):
    coins = Coins(r["seed"])
    coins.index = r["first"]
    return {"bits": (coins.take(r["count"], torch.device("cpu")) * 2**53).long().tolist()}


def probs(r, dtype, coins):
    logits = unpack(r["logits"], dtype)
    coins.note(cut_margin(logits, **r["sampling"], ties=True))
    return {"p": pack(to_probs(logits, **r["sampling"]))}


def choose(r, dtype, coins):
    coins.pool = torch.tensor([r["u"]], dtype=torch.float64)
    return {"token": int(coins.choose(unpack(r["weights"], dtype)))}


def verify(r, dtype, coins):
    p, q = (None if r[name] is None else unpack(r[name], dtype)[None] for name in ("p", "q"))
    tokens = torch.tensor([r["draft"]])
    coins.pool = torch.tensor(r["uniforms"], dtype=torch.float64)
    if r["parents"] is None:
        accepted, token = verification.verify(p, q, tokens, coins)
        return {"accepted": int(accepted), "token": int(token)}
    coins.note(tree_margin(p[0], r["draft"], r["parents"], None if q is None else q[0]))
    node, token = verify_tree(p, tokens, torch.tensor([r["parents"]]), coins, q)
    return {"node": int(node), "token": int(token)}


def ngram(r, dtype, coins):
    tokens, drafter = torch.tensor([r["text"]]), NGram(r["gamma"], r["n"])
    n = torch.tensor([tokens.shape[1]])
    state = State(tokens, n, [r["text"]], [r["gamma"] + 1], None, None, to_probs, coins, ())
    drafter.begin(state, {})
    return {"draft": drafter.propose(state).tokens[0].tolist()}


# --- rounds


class Notes(Wrapper):
    """A wrapper around a drafter: keeps what it proposed, how much of that fits into each text, and
    what was known before. After the round a tree is gone from all this."""

    def propose(self, state):
        self.known, self.left = [list(text) for text in state.known], list(state.left)
        self.draft = super().propose(state)
        self.lengths = self.draft.trimmed(state).length.tolist()
        return self.draft


def drafter_of(r, m):
    d = r["drafter"]
    if d["kind"] == "none":
        return Drafter()
    if d["kind"] == "ngram":
        return NGram(d["gamma"], d["n"])
    return Siblings(SelfDraft(m, d["sublayers"], d["gamma"]), d["widths"])


def rounds(r, dtype, coins):
    m, p = load(ROOT / r["model"], dtype), []
    coins.seed = r["seed"]

    def probs(logits):
        p.append(to_probs(logits, **r["sampling"]))
        coins.note(cut_margin(logits, **r["sampling"]))
        return p[-1]

    notes, lines = Notes(drafter_of(r, m)), []
    if all(len(prompt) >= m.c.max_len for prompt in r["prompts"]):      # which the loop refuses
        return {"rounds": lines}
    for _, outcome in speculative.rounds(m, r["prompts"], r["max_new"], notes, probs, coins,
                                         r["eos"]):
        *drawn, last = coins.spent
        flips = [spent for spent in drawn if spent[0] == "flip"]
        rows = [row_of(notes, outcome, p[-1], coins, b, flips, last)
                for b in range(len(r["prompts"]))]
        names = next(row for row in rows if row)
        lines.append({"round": len(lines),
                      **{name: [row and row[name] for row in rows] for name in names},
                      "u_draft": [u for kind, us, _ in drawn if kind == "choose" for u in us],
                      "u_flip": [u for s in flips for u in s[1]], "u_next": last[1]})
        coins.spent = []
    return {"rounds": lines}


def row_of(notes, outcome, p, coins, b, flips, last):
    """What one round did to text b; None once its answer is complete."""
    draft, text, K = notes.draft, notes.known[b], notes.lengths[b]
    if not notes.left[b]:
        return None
    tokens, parents = draft.tokens[b, :K].tolist(), list(range(K))
    if isinstance(draft, Tree):
        parents = draft.parents[0].tolist()
        coins.note(tree_margin(p[b], tokens, parents, draft.q[b]))
        coins.note(min(abs(1 - x) or 1.0 for x in draft.q[b, range(K), tokens].tolist()))
    return {"positions": [len(text) - 1 + d for d in depths(parents)[0].tolist()],
            "block": [text[-1], *tokens], "parents": parents, "draft": tokens,
            "p": short(p[b, parents, tokens]),
            "q": [1.0] * K if draft.q is None else short(draft.q[b, range(K), tokens]),
            "ratio": short(flips[0][2][b, :K]) if K else [],
            "accepted": int(outcome.accepted[b]), "token": int(last[2][b]), "new": outcome.new[b]}


# --- races


class Close(Race):
    """A Race that notes how much less likely its winners could have become without losing, as a
    share of their probability: 1 - (arrival of the first) / (arrival of the second)."""

    def __init__(self, seeds, note):
        super().__init__(seeds)
        self.note = note

    def settle(self, p, position, offset=0):
        won = super().settle(p, position, offset)
        safe = 0.0
        lost = 1.0
        while lost - safe > 1e-7:
            less = (safe + lost) / 2
            if torch.equal(super().settle(p * (1 - less * won), position, offset), won):
                safe = less
            else:
                lost = less
        self.note(safe)
        return won


def race(r, dtype, coins):
    p = unpack(r["p"], dtype)
    position = torch.tensor([[r["position"]]])
    won = Close(r["seed"], coins.note).settle(p[None, None], position)
    return {"token": int(won.argmax())}


def race_rounds(r, dtype, coins):
    """All texts as one batch: a port may write them one after the other."""
    m = load(ROOT / r["model"], dtype)

    def probs(logits):
        coins.note(cut_margin(logits, **r["sampling"]))
        return to_probs(logits, **r["sampling"])

    texts = [[] for _ in r["prompts"]]
    noise = Close(r["seeds"], coins.note)
    drafter = drafter_of(r, m)
    for _, o in speculative.rounds(m, r["prompts"], r["max_new"], drafter, probs, noise, r["eos"]):
        lengths = o.draft.length.tolist()
        for b, new in enumerate(o.new):
            draft = o.draft.tokens[b, : lengths[b]].tolist()
            if new:
                texts[b].append({"draft": draft, "accepted": int(o.accepted[b]), "new": new})
    return {"texts": texts}


# --- a port


OPS = dict(
    frequencies=lambda r, *_: {
        "freqs": pack(model.frequencies(r["head_dim"], r["theta"], r["scaling"]))},
    softcap=lambda r, dtype, _: {"y": pack(model.softcap(unpack(r["x"], dtype), r["cap"]))},
    weights=weights, norm=norm, rotate=turn, visible=visible, attend=attend, sublayer=sublayer,
    forward=forward, blocks=blocks, uniforms=uniforms, probs=probs, choose=choose, verify=verify,
    ngram=ngram, rounds=rounds, race=race, race_rounds=race_rounds)


@torch.inference_mode()
def answer(request, dtype=None):
    """The answer to a case, and the margin of its closest decision. dtype: by default the one that
    the case names, else float64."""
    coins = Watch()
    dtype = dtype or getattr(torch, request.get("dtype", "float64"))
    return OPS[request["op"]](request, dtype, coins), coins.margin
