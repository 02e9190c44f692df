"""Small reconstructions of four systems, M2R2, ProphetNet, HAMburger and a sparse self-draft. Each
answers one question that its paper leaves open.
"""
import copy
import statistics
from functools import partial
from itertools import chain
from operator import mul
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

import checkpoint
from control import weight_costs
from lab import corpus, sparse, train, train_heads
from lab.aside import masks
from lab.bench.shared import SETS, SHAPES, figures, load, page, prompt_ids, read_prompts, table
from lab.hamburger import BurgerDraft, Hamburger, score, tune
from lab.m2r2 import M2R2
from lab.train_heads import OWN
from lab.transfer import Transfer, riders
from methods import heads
from model import Placement
from sampling import to_probs
from search import Teacher
from speculative import rounds
from support.stats import Counts

CONTEXT, BATCH, GAMMA, SINKS = 128, 8, 3, 4
LARGE, WINDOW = SHAPES["Llama 3.1 8B"], 1024    # on paper
SHAPE = {"layers": 4, "dim": 128, "heads": 2, "kv-heads": 1, "hidden": 352}    # of a ProphetNet
COLD = 0.5                                      # the temperature that HAMburger imitates
CONFIDENCES = 0.5, 0.8, 0.9, 2.0  # 2: no head is so sure, so that each step says one token


class Sizes(NamedTuple):
    """How much of everything."""
    text: int = 300_000     # tokens that the model writes itself; the twin half as many
    heads: int = 100_000    # tokens that each head learns from
    streams: int = 280_000  # tokens that each ProphetNet learns from
    seeds: int = 3          # of ProphetNets
    burger: int = 280       # steps of HAMburger
    measured: int = 4096    # tokens of held-out text


SIZES = Sizes()


# --- what they share


def parsed(parse, flags, *words):
    """What a command makes of words and of {flag: value}."""
    pairs = [(f"--{name}", str(value)) for name, value in flags.items()]
    return parse([*words, *chain(*pairs)])


def finished(run):
    while run.progress() < 1:
        run.train_step()
    return run


def own_text(model, tokenizer, count, measured, length=256):
    """A Corpus of what the model writes: `count` tokens to learn from and `measured` others to
    measure on, or more, in texts of at most `length`, since a group of texts takes as
    long as its longest."""
    streams = [{OWN: train_heads.write_text(model, tokens, seed, min(length, model.c.max_len))}
               for seed, tokens in enumerate((count, measured))]
    return corpus.split(*streams, [1.0], tokenizer, CONTEXT)


def taught(model, text, tokens, kind, *words):
    """A head of lab/train_heads.py, with its flags, trained on the text."""
    flags = {"model": "given", "out": "nowhere", "tokens": tokens, "context": CONTEXT,
             "batch": BATCH, "device": model.tok.device.type}
    a = parsed(train_heads.parse, flags, kind, *words)
    return finished(train_heads.Run(a, model, text, model.tok.device)).head


def worth(model, prompts, drafter, new, cost):
    """What is reported of a drafter, from greedy answers to all prompts, which are one batch.
    cost(K) is what a draft of K tokens takes, in passes of the target, by the
    weights that it reads."""
    counts = Counts()
    for _, r in rounds(model, prompts, new, drafter, eos=model.c.eos):
        counts.add(r)
    return {"accepted": counts.accepted / max(1, counts.proposed), "tau": counts.tau,
            "by_weights": counts.tau / (1 + cost(counts.proposed / max(1, counts.turns)))}


# --- M2R2: is an accelerated row better than an adapter with as many weights?


def accelerated(model, text, prompts, new, exits):
    """{name: what was found} of a bare exit, Kangaroo, and M2R2 as a whole and, at the first of the
    exits, without its alignment."""
    found, held_out = {}, text.valid[OWN]
    for e in exits:
        learn = partial(taught, model, text, SIZES.heads)
        kangaroo, m2r2 = (learn(kind, "--exit-layer", str(e)) for kind in ("kangaroo", "m2r2"))
        made = {"no adapters": M2R2(model, e, 0), "Kangaroo": kangaroo, "M2R2": m2r2}
        if e == exits[0]:
            made["M2R2, no alignment"] = learn("m2r2", "--exit-layer", str(e), "--align", "0")
        for name, head in made.items():
            c = heads.pricing(head)(0)
            alpha = train_heads.evaluate(head, held_out, CONTEXT, SIZES.measured)["agreement"][0]
            found[f"exit {e}, {name}"] = {
                "rows": 2 if head.shape.get("rank") else 1, "weights": head.count(), "c": c,
                "alpha": alpha, **worth(model, prompts, head.drafter(GAMMA), new, partial(mul, c))}
    return found


# --- ProphetNet: does it help the model itself to foresee more than the next token?


def stream_losses(model, head, batch):
    """The cross-entropy of each stream for windows (B, T+1). The model's own comes first, then the
    losses of the rows of the head, a Transfer from the embeddings on, each of which foresees a
    token further. (ProphetNet is an encoder and a decoder; this is a decoder alone.) All is one
    pass, so that the losses of the rows also train the keys and values that they read."""
    T, N, device = batch.shape[1] - 1, head.steps, batch.device
    x, at = model.embed(batch[:, :-1]), riders(T, N, device)
    x = model.run(torch.cat([x, head.spread(x).flatten(1, 2)], 1), at)
    rows = [x[:, :T], *x[:, T:].unflatten(1, (T, N)).unbind(2)]                 # (B, T, dim) each
    return [F.cross_entropy(model.unembed(row[:, : T - k]).flatten(0, 1),
                            batch[:, 1 + k :].flatten())
            for k, row in enumerate(rows)]


class Streams(train.Run):
    """As `train.Run`, with streams that foresee more than the next token. Each counts the same, as
    in the code of ProphetNet."""

    def __init__(self, a, text, device, streams):
        super().__init__(a, text, device)
        self.head = Transfer(self.model, 0, streams - 1)
        self.trained = nn.ModuleList([self.model, self.head.weights])
        self.optimisers.append(torch.optim.AdamW(self.head.weights.parameters(), lr=a.lr,
                                                 betas=(0.9, 0.95), weight_decay=0.0))

    def train_step(self):
        a = self.a
        batch = self.text.batch(a.seed, self.step, a.batch, a.context).long().to(self.device)
        found = stream_losses(self.model, self.head, batch)
        self.update(sum(found) / len(found))
        self.losses.append([found[0].item(), None, None])


def prophet(text, device, streams, seed, tokens, shape=SHAPE):
    """A finished run of a tiny model with so many streams. `shape` holds some flags of
    lab/train.py."""
    a = parsed(train.parse, {
        "out": "nowhere", "data": "given", "device": device.type, "dtype": "float32", "seed": seed,
        "tokens": tokens, "context": CONTEXT, "batch": BATCH, "warmup": 20, "dropout": 0,
        "exit-weight": 0} | shape)
    plain = streams == 1
    return finished(train.Run(a, text, device) if plain else Streams(a, text, device, streams))


def prophets(text, device, new):
    """"1", "3": the models' own losses on held-out text, one for each seed; "drafts": what the last
    seed's streams are worth as a Transfer, and those that learnt when its model
    of one was finished."""
    held_out, found = text.valid[OWN], {"1": [], "3": [], "drafts": {}}
    prompts = held_out[: 16 * (min(128, len(held_out)) // 16)].view(-1, 16).tolist()
    for seed in range(SIZES.seeds):
        runs = {n: prophet(text, device, n, seed, SIZES.streams) for n in (1, 3)}
        for n, run in runs.items():
            found[str(n)].append(train.evaluate(run.model, held_out, CONTEXT,
                                                SIZES.measured)["loss"][-1])
    plain, flags = runs[1].model.requires_grad_(False), ("--inject-layer", "0", "--steps", "2")
    made = {"with the model": runs[3].head,
            "later": taught(plain, text, SIZES.heads, "transfer", *flags)}
    for name, head in made.items():
        found["drafts"][name] = worth(head.model, prompts, head.drafter(2), min(new, CONTEXT - 16),
                                      partial(mul, heads.pricing(head)(0)))
    return found


# --- HAMburger: what is left of its speed where its trust is checked?


def cooled(model, temperature):
    """A copy that says at temperature 1 what the model says at this one; where logits have a
    soft-cap, it has at least the same best tokens."""
    cold, offset = copy.deepcopy(model), model.c.norm_offset
    cold.norm.weight.data = (offset + cold.norm.weight.data) / temperature - offset
    return cold


def hamburgers(model, tokenizer, prompts, new):
    """{confidence: what was found} of one HAMburger, alone and as a drafter for the model. It
    imitates the model at a lower temperature, because at temperature 1 a small one
    is hardly ever sure."""
    device, costs, cold = model.tok.device, weight_costs(model.c), cooled(model, COLD)
    burger, text = Hamburger(cold), own_text(cold, tokenizer, SIZES.text // 2, SIZES.measured)
    batches = [text.batch(0, i, BATCH // 2, CONTEXT - 1).long().to(device)
               for i in range(SIZES.burger)]
    tune(burger, cold, batches)
    rows = max(1, SIZES.measured // 4 // CONTEXT)  # each takes as many passes as it has entries
    windows = text.valid[OWN][: rows * CONTEXT].view(rows, CONTEXT).long().to(device)
    # a micro step
    small = (sum(costs.sublayers[: 2 * burger.micro.c.n_layers]) + costs.head) / costs.whole
    cost, found = lambda K: (1 + small * (K - 1)) * (K > 0), {}
    for confidence in CONFIDENCES:
        kl, tokens = score(burger, cold, windows, confidence)
        checked = worth(model, prompts, BurgerDraft(burger, confidence), new, cost)
        found[str(confidence)] = {"kl": kl, "tokens": tokens, "alone": tokens / cost(tokens),
                                  **checked}
    return found


# --- a sparse self-draft: how much of the text must a draft see?


@torch.inference_mode()
def sparse_acceptance(teacher, sinks, window):
    """How likely the first drafted token after each position of the teacher's text is accepted, if
    the draft sees so few tokens. As in `Teacher.acceptance`, each position has a slot of its own.
    (T,) float64"""
    T, m = teacher.p.shape[1], teacher.model
    at = torch.arange(T, device=teacher.p.device)
    own = torch.eye(T, dtype=torch.bool, device=at.device)
    seen = sparse.sparse(at[:, None], T, sinks, window) & ~own                  # (T, T)
    hidden = masks(m, at[None], torch.cat([at, at])[None], torch.cat([seen, own], 1)[None])
    at = Placement(at[None], T + at[None], 0, 2 * T)
    x = m.bare().run(teacher.states[0], at, teacher.cache, masks=hidden)
    return teacher.overlap(teacher.probs(m.unembed(x)))


def long_texts(tokenizer, c, count):
    """The longest texts of support/prompts, as ids, cut to the same length, at most 256 tokens."""
    texts = [checkpoint.encode(tokenizer, line["text"], c.bos)[: min(256, c.max_len)]
             for name in SETS for line in read_prompts(name)]
    texts = sorted(texts, key=len, reverse=True)[:count]
    return [ids[: len(texts[-1])] for ids in texts]


def sparse_drafts(model, texts, new):
    """{window: what was found} in the second half of texts of the same length: alpha with sinks and
    without, and at temperature 1, "overlap"; and tau, where greedy text goes on."""
    T, c, halves = len(texts[0]), model.c, [ids[: len(ids) // 2] for ids in texts]
    warm = [Teacher(model, ids, lambda x: to_probs(x, 1.0)) for ids in texts]
    cold, costs, found = [Teacher(model, ids) for ids in texts], weight_costs(c), {}
    for window in (w for w in (8, 16, 32, 64, 128) if w < T // 2):
        def alpha(teachers, sinks, window=window):
            return float(
                torch.cat([sparse_acceptance(t, sinks, window)[T // 2 :] for t in teachers]).mean())

        n, drafter = 3 * T // 4, sparse.SparseDraft(model, GAMMA, SINKS, window)
        unread = sparse.unread(costs, n, SINKS, window) / ((n + 1) * c.n_layers * costs.slot)
        checked = worth(model, halves, drafter, min(new, T // 2 - 1), float)  # it reads all weights
        found[str(window)] = {"alpha": alpha(cold, SINKS), "no_sinks": alpha(cold, 0),
                              "overlap": alpha(warm, SINKS), "unread": unread, **checked}
    return found


def paper():
    """[{tokens, what a pass reads, ...}] of a large model. It has the bytes in half precision, and
    what a draft with the whole model's weights would gain at most if alpha were 0.8 or 0.9."""
    costs, rows = weight_costs(LARGE), []
    for n in (1024 * 2**k for k in range(8)):
        cache, spared = n * LARGE.n_layers * costs.slot, sparse.unread(costs, n, SINKS, WINDOW)
        rows.append({"tokens": n, "weights": 2 * costs.whole, "cache": 2 * cache,
                     "unread": 2 * spared, "c": sparse.step_cost(costs, n, SINKS, WINDOW),
                     "promise": {str(alpha): sparse.promise(costs, n, alpha, SINKS, WINDOW)
                                 for alpha in (0.8, 0.9)}})
    return rows


LOOP = {"accepted": "{accepted:.2f}", "tau": "{tau:.2f}", "speed-up by weights": "{by_weights:.2f}"}
M2R2_COLUMNS = {"rows": "{rows}", "own weights": "{weights:,}", "c by weights": "{c:.3f}",
                "alpha": "{alpha:.3f}", **LOOP}
BURGER_COLUMNS = {"KL alone": "{kl:.3f}", "tokens a step alone": "{tokens:.2f}",
                  "speed-up alone, by weights": "{alone:.2f}", **LOOP}
SPARSE_COLUMNS = {"alpha": "{alpha:.3f}", "alpha without sinks": "{no_sinks:.3f}",
                  "at temperature 1": "{overlap:.3f}", "keys and values not read": "{unread:.0%}",
                  "tau": "{tau:.2f}"}
PAPER_COLUMNS = {"GB a pass reads": "{read:.1f}", "of them keys and values": "{cached:.1f}",
                 "GB a draft leaves": "{left:.1f}", "c by bytes": "{c:.2f}",
                 "speed-up if alpha is 0.8": "{promise[0.8][1]:.2f} (gamma {promise[0.8][0]})",
                 "if it is 0.9": "{promise[0.9][1]:.2f} (gamma {promise[0.9][0]})"}


def m2r2_lines(found):
    lines = ["**M2R2**: is an accelerated row better than an adapter with as many weights? Rows: "
             "those of a drafted token in the blocks below the exit.", ""]
    for name, rows in found.items():
        lines += [f"{name}:", "", *figures(rows.items(), M2R2_COLUMNS, "draft")]
    return lines


def prophet_lines(found):
    change = [b - a for a, b in zip(found["1"], found["3"], strict=True)]
    error = statistics.stdev(change) / len(change) ** 0.5
    noise = statistics.mean(map(statistics.stdev, (found["1"], found["3"])))
    return ["**ProphetNet**: does it help a model to foresee more than the next token? Its own "
            "loss, in nats a token of held-out text, and what its streams are worth as drafts.", "",
            *table(["streams", *(f"seed {s}" for s in range(len(change)))],
                   [[n, *(f"{loss:.4f}" for loss in found[n])] for n in "13"]),
            f"Three streams change it by {statistics.mean(change):+.4f} (standard error "
            f"{error:.4f}), a seed by {noise:.4f}.", "",
            *figures(found["drafts"].items(), LOOP, "streams learnt")]


def burger_lines(found):
    return [f"**HAMburger**, which imitates the model at temperature {COLD}: what is left of its "
            "speed where its trust is checked? Alone it writes another text, and KL is what it is "
            "off, in nats a token; checked, its text is exact. At confidence 2 each step says one "
            "token.", "", *figures(found.items(), BURGER_COLUMNS, "confidence")]


def sparse_lines(found, on_paper):
    rows = []
    for r in on_paper:
        read = {"read": r["weights"] + r["cache"], "cached": r["cache"], "left": r["unread"]}
        rows.append((f"{r['tokens']:,}", r | {name: size / 1e9 for name, size in read.items()}))
    return [f"**A sparse self-draft**: how much of the text must a draft see? {SINKS} sinks and a "
            "window, in the second halves of texts of up to 256 tokens.", "",
            *figures(found.items(), SPARSE_COLUMNS, "window"),
            f"On paper, Llama 3.1 8B in a half type, {SINKS} sinks and a window of {WINDOW:,}:", "",
            *figures(rows, PAPER_COLUMNS, "tokens")]


def run(a):
    m2r2, exits = {}, (1 / 6, 1 / 12, 1 / 4)        # shares of the blocks
    for folder, share in ([(a.twin, 2)] if a.twin else []) + [(a.model, 1)]:    # this text goes on
        model, tokenizer = load(a, "float32", folder)
        text = own_text(model, tokenizer, SIZES.text // share, SIZES.measured)
        kinds = [prompt_ids(name, tokenizer, model.c) for name in SETS]
        prompts = [ids for kind in kinds for ids in kind[: a.quick or 4]]
        after = list(dict.fromkeys(max(1, round(model.c.n_layers * part)) for part in exits))
        m2r2[folder] = accelerated(model, text, prompts, a.new, after if share == 1 else after[:1])
    parts = {"prophet": partial(prophets, text, model.tok.device, a.new),
             "hamburger": partial(hamburgers, model, tokenizer, prompts, a.new),
             "sparse": partial(sparse_drafts, model, long_texts(tokenizer, model.c, 16), a.new),
             "paper": paper}
    data = {"m2r2": m2r2} | {name: part() for name, part in tqdm(parts.items(), disable=None)}
    lines = [f"{a.model}, float32; {a.machine}; {SIZES.text:,} tokens of its own text, each head "
             f"learnt from {SIZES.heads:,}; gamma {GAMMA}", "", *m2r2_lines(m2r2),
             *prophet_lines(data["prophet"]),
             *burger_lines(data["hamburger"]), *sparse_lines(data["sparse"], data["paper"])]
    return page(lines), data
