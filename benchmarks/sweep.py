"""Small heads that the benchmark trains itself, all on the same text and for the same time: where Hidden
Transfer should begin, and the prophet beside early exit, extra block and recycling.

The one thing to remember: these heads are trained for a minute or so, and are worth less than those that
train_heads.py makes; but they differ in one thing only, and so they can be compared.
"""
import time

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

import train_heads
from benchmarks.shared import Noting, by_position, load, prompt_ids, steps, table
from kvcache import Beside, KVCache
from layerskip import SelfDraft, early_exit
from methods import heads
from methods.drafting import ExitDraft, pick, unit
from methods.heads import AHEAD, ExitBlock, Prophet, Transfer
from speculative import ahead, rounds
from support import corpus

STEPS = 3   # of a Transfer


# --- recycling


class Recycled(ExitBlock):
    """An exit block that also reads the final state of the last token that the target has read: lucidrains'
    "recycling". There it is added to the input of the trunk, so that draft and target no longer share any
    state; here the block alone reads it, and the trunk is untouched."""
    kind = "recycled"

    def __init__(self, model, exit_layer):
        super().__init__(model, exit_layer)
        self.taps = [*self.taps, 2 * model.c.n_layers - 1]
        self.weights = nn.Module()
        self.weights.blocks = self.own.blocks
        self.weights.matrix = nn.Parameter(torch.zeros_like(model.tok[:1]).repeat(model.c.dim, 1))

    def carry(self, final):
        """What a final state adds to the block's input."""
        return F.linear(unit(final), self.weights.matrix)

    def predict(self, tokens, trace, cache):
        """As those of `Transfer`: drafts that begin at node j read the exit's states of the tokens to come,
        and all of them the same final state, that of the token before j."""
        (B, T), M, at = tokens.shape, AHEAD - 1, torch.arange(tokens.shape[1], device=tokens.device)
        exits, carried = (trace[tap] for tap in self.taps)
        carried = F.pad(self.carry(carried), (0, 0, 1, 0))[:, :-1]              # (B, T, dim), 0 for the first
        after = at[:, None] + 1 + torch.arange(M, device=tokens.device)         # (T, M)
        rows = exits[:, after.clamp(max=T - 1)] + carried[:, :, None]           # (B, T, M, dim)
        seen = torch.ones(1, T, T, dtype=torch.bool, device=tokens.device).tril()
        seen = torch.cat([F.pad(seen, (0, T * M)), ahead(seen, M)], 1)          # (1, T+T*M, T+T*M)
        nothing, slots = KVCache(self.own.c, B, 0, self.own.attention_dtype(), tokens.device), T + T * M
        x = self.own.run(torch.cat([exits + carried, rows.flatten(1, 2)], 1),
                         torch.cat([at, after.flatten()])[None], Beside(nothing, 0, 0), self.sublayers,
                         torch.arange(slots, device=tokens.device)[None], seen, span=slice(0, slots))
        yield 1, self.own.unembed(x[:, 1:T])
        x = x[:, T:].unflatten(1, (T, M))                                       # (B, T, M, dim)
        for m in range(1, M + 1):
            yield m + 1, self.own.unembed(x[:, 1 : T - m, m - 1])

    def drafter(self, rule):
        return RecycledDraft(self, rule)


class RecycledDraft(ExitDraft):
    """As `ExitDraft`: after each round the block reads what was verified once more, now with the final state
    of the token before each."""

    def begin(self, state, trace):
        super().begin(state, trace)
        exits, final = (trace[tap] for tap in self.taps)
        carried = F.pad(self.head.carry(final), (0, 0, 1, 0))                   # (B, T+1, dim)
        self.read(exits + carried[:, :-1], slice(0, exits.shape[1]), None)
        self.carried = pick(carried, state.n - 1)[:, None]                      # (B, 1, dim)

    def logits(self, state, x, k):
        return super().logits(state, x + self.carried, k)

    def observe(self, state, r):
        SelfDraft.observe(self, state, r)
        exits, final = (r.trace[tap] for tap in self.taps)
        carried = torch.cat([self.carried, self.head.carry(final)], 1)          # (B, K+2, dim)
        new, T = [len(row) for row in r.new], exits.shape[1]    # n has grown: the block stands before it
        if len(new) == 1:
            block = state.at(-new[0], T - new[0])
        else:
            block = state.after(torch.arange(-1, T - 1, device=state.n.device) - state.send(new)[:, None])
        self.read(exits + carried[:, :-1], block, state.span(-max(new), T - min(new)))
        self.carried = pick(carried, state.send([len(row) for row in r.new]))[:, None]


# --- training


def train(head, flags, text):
    """Train a head for flags.minutes, and return what `train_heads.evaluate` says of it, and from how many
    tokens it has learnt, "trained"."""
    device = head.model.tok.device
    run = train_heads.Run(flags, head.model, text, device, head)
    while run.progress() < 1:
        start = time.perf_counter()
        run.train_step()
        run.seconds += time.perf_counter() - start
    told = train_heads.evaluate(head, text.valid[train_heads.OWN], flags.context, train_heads.MEASURED)
    return told | {"trained": run.step * flags.batch * flags.context}


def prepare(a, model, tokenizer, count):
    """(flags of train_heads.py, the text) for `count` heads that share the minutes."""
    context = min(64 if a.quick else 256, model.c.max_len)
    flags = train_heads.parse(["transfer", "--model", str(a.model), "--out", "-", "--tokens", "1e12",
                               "--batch", "2" if a.quick else "4", "--context", str(context),
                               "--warmup", "5"])
    minutes = a.minutes if a.minutes is not None else 0.1 if a.quick else 8.0
    flags.minutes = minutes / count
    written = train_heads.write_text(model, 600 if a.quick else 5e4, 0, context)
    return flags, corpus.split({train_heads.OWN: written}, {}, [1.0], tokenizer, context)


def drafted(model, prompts, new, make):
    """(tau, how often the first, second, ... drafted token was accepted where it was tested), greedy."""
    seen, tokens = [], 0
    for ids in prompts:
        for _, r in rounds(model, [ids], new, Noting(make(), seen), eos=model.c.eos):
            tokens += len(r.new[0])
    return tokens / len(seen), by_position(seen)


# --- what is measured


def run(a, tokenizer):
    """(lines, data): the sweep of Transfer's inject layer, and the heads that lucidrains' README names."""
    model, _ = load(a, "float32")
    L, E = model.c.n_layers, max(1, model.c.n_layers // 6)
    if model.c.bos is None:
        return ["No small heads: this model has no begin-of-text id to start a text of its own with.", ""], {}
    layers = sorted({L * quarter // 4 for quarter in range(5)})
    named = {f"transfer from {t}": Transfer(model, t, STEPS) for t in layers}
    named |= {"extra block": ExitBlock(model, E), "recycling": Recycled(model, E),
              "prophet": Prophet(model, 1)}
    flags, text = prepare(a, model, tokenizer, len(named))
    prompts, found = prompt_ids("stories", tokenizer, model.c)[: 2 if a.quick else 8], {}
    for name, head in tqdm(named.items(), desc="training", disable=None, leave=False):
        told = train(head, flags, text)
        steps = STEPS if name.startswith("transfer") else AHEAD
        tau, positions = drafted(model, prompts, a.new, lambda h=head, k=steps: h.drafter(k))
        found[name] = {key: told[key] for key in ("agreement", "overlap", "trained")}
        found[name] |= {"tau": tau, "positions": positions, "c_weights": heads.step_cost(head),
                        "parameters": sum(p.numel() for p in head.weights.parameters())}
    tau, positions = drafted(model, prompts, a.new, lambda: SelfDraft(model, early_exit(L, E), AHEAD))
    data = {"transfer": {t: found.pop(f"transfer from {t}") | {"rows": STEPS * (L - t) / L} for t in layers},
            "lucidrains": {f"exit {E}": {"tau": tau, "positions": positions}} | found,
            "minutes": flags.minutes}
    return lines(data), data


def lines(data):
    rows = [[str(t), f"{r['rows']:.2f}", f"{r['trained']:,}", steps(r["agreement"]), steps(r["overlap"]),
             f"{r['tau']:.2f}"] for t, r in data["transfer"].items()]
    beside = [[name, *(f"{r[key]:,}" if key in r else "" for key in ("parameters", "trained")),
               steps(r["positions"]), f"{r['tau']:.2f}"] for name, r in data["lucidrains"].items()]
    trained = f"each trained here for {60 * data['minutes']:.0f} s on text of the model's own"
    return [f"**Hidden Transfer from each depth**, {trained}: what {STEPS} pseudo states for each token "
            "take, in passes over a token, and what they say; tau on stories, greedy", "",
            *table(["after block", "rows", "tokens learnt", "agreement by step", "overlap by step", "tau"],
                   rows),
            f"**Prophet beside early exit, extra block and recycling**, {trained}; up to {AHEAD} tokens "
            "drafted on stories, greedy", "",
            *table(["draft", "parameters", "tokens learnt", "alpha by position", "tau"], beside)]
