# %% [markdown]
# # 9. Close to the machine: what a token waits for
#
# The library says *what* is computed. This notebook looks at what the machine does with it: how many
# operations are started for one token, how many bytes are read, and how the folder `machine/` changes both
# without changing the text: passes that are recorded once and replayed, weights of four bits, and one model
# on two processes.
#
# > **The one thing to remember: a pass of a small model waits for operations to be started, and a pass of a
# > large one for bytes to be read. A recording removes the first wait; fewer bits shorten the second,
# > and several devices share it.**
#
# Before it: notebooks 1 to 6, above all [2, the cache](02_kv_cache.ipynb) and [4, speculative
# decoding](04_speculative_decoding.ipynb).

# %%
# %run start.py
MODEL = ROOT / "weights" / "stories-llama"      # or a folder with your own Llama or Gemma-2

# %%
import torch

import checkpoint
from model import Placement
from support.files import read_prompts
from kvcache import KVCache
from speculative import generate, prefill, rounds
from notebooks import plots

torch.set_grad_enabled(False)
model, tokenizer = checkpoint.load(MODEL, "cpu", torch.float32)
c, L = model.c, model.c.n_layers
prompt = checkpoint.encode(tokenizer, read_prompts("stories")[0]["prompt"], c.bos)
cache, n = KVCache(c, 1, len(prompt) + 64, torch.float32), len(prompt)
prefill(model, torch.tensor([prompt]), cache)
print(f"{L} blocks of {c.dim} numbers; the prompt has {n} tokens")

# %% [markdown]
# ## Count what is started
#
# torch tells whoever asks about each operation, just before it runs. So we can count. An operation that only
# looks at the same memory in another shape is a *view*: it computes nothing, and we leave it out. On a GPU
# each of the others would be the *launch* of one *kernel* (a program that runs on the GPU) or more.

# %%
from torch.utils._python_dispatch import TorchDispatchMode


class Launches(TorchDispatchMode):
    """Within it each operation of torch is counted by its name."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with self:                      # what torch puts together from others is counted as these
            out = func.decompose(*args, **(kwargs or {}))
        if out is not NotImplemented:
            return out
        name = func.overloadpacket.__name__
        self.names[name] += not (func.is_view or name == "_unsafe_view")
        return func(*args, **(kwargs or {}))

# %%
from collections import Counter


def one_pass(model, T=1, sublayers=None, cache=cache):
    """A pass over T tokens after the prompt, with a cache."""
    x = model.embed(torch.full((1, T), 5))
    return model.unembed(model.run(x, Placement.at(n, n + T), cache, sublayers))


def count(action):
    """{operation: how often it was started}"""
    with Launches() as seen:
        seen.names = Counter()
        action()
    return +seen.names

# %%
parts = {"all": None, "no sub-layer": [], "one attention": [2], "one MLP": [3]}
launches = {name: count(lambda subs=subs: one_pass(model, 1, subs)).total() for name, subs in parts.items()}
a, m = (launches[name] - launches["no sub-layer"] for name in ("one attention", "one MLP"))
print(f"{launches['all']} launches for one token: {a} an attention, {m} an MLP, "
      f"{launches['no sub-layer']} for embedding and head")
assert launches["all"] == launches["no sub-layer"] + L * (a + m)

# %% [markdown]
# **Predict:** how many of these launches are products with a weight matrix, the work that the model is made
# of?

# %%
names = count(lambda: one_pass(model))
products = sum(k for name, k in names.items() if name in ("mm", "addmm", "linear"))
top = names.most_common(14)
figure, ((side,),) = plots.axes(1, 1, width=8, height=3.2)
heavy = ("mm", "addmm", "linear")
side.bar([name for name, _ in top], [k for _, k in top],
         color=[plots.HUES[1 if name in heavy else 0] for name, _ in top])
side.tick_params(axis="x", rotation=60)
side.set(ylabel="started for one token", title="orange: a product with a weight matrix")
print(f"{products} of {names.total()}: four a block, and the head")
assert products == 4 * L + 1
figure

# %% [markdown]
# Most launches are small: they add, multiply or copy a few hundred numbers. To *start* such an operation
# takes longer than the operation: Python calls torch, torch looks up types and devices, takes memory for the
# result, and calls the kernel.
#
# ## Count what is read
#
# A pass over one token reads every matrix once. (Of the embeddings it reads one row, but where the head is
# the same matrix, all of it.) It also reads the keys and values of all tokens before it. `byte_costs` adds
# up.

# %%
from machine.quant import byte_costs

costs = byte_costs(model)
table = {"attention": sum(costs.sublayers[::2]), "MLP": sum(costs.sublayers[1::2]), "head": costs.head,
         f"keys and values of {n} tokens": L * costs.slot * n}
for name, number in table.items():
    print(f"{name:30} {number / 1e6:7.2f} MB")
print(f"{'together':30} {sum(table.values()) / 1e6:7.2f} MB for one token")

# %% [markdown]
# Which of the two counts is the one that matters? Three clocks can tell, running in turn: the whole pass; the
# model's own matrix products and nothing else; and a pass of a model that has as many blocks, but is so
# narrow that there is nearly nothing to read, and only the launches remain.

# %%
from dataclasses import replace

from lab.bench.plain import matrices
from lab.bench.shared import random_model
from support.measure import interleave

narrow = random_model(replace(c, vocab_size=64, dim=32, hidden_dim=32, head_dim=8))
thin = KVCache(narrow.c, 1, n + 8, torch.float32)
one_pass(narrow, cache=thin)                                    # the first pass also makes a table of angles
assert count(lambda: one_pass(narrow, cache=thin)) == names, "the same launches"
work = {"the pass": lambda: one_pass(model), "its products": matrices(model),
        "a narrow model's pass": lambda: one_pass(narrow, cache=thin)}
ms = {name: 1e3 * s for name, s in interleave(work, 15).items()}
print("  ".join(f"{name}: {t:.2f} ms" for name, t in ms.items()), f"({torch.get_num_threads()} threads)")

# %%
figure, ((side,),) = plots.axes(1, 1, width=8, height=2.2)
side.barh(list(ms), list(ms.values()), color=["#808080", plots.HUES[1], plots.HUES[0]])
side.set(xlabel="milliseconds on this machine, now")
side.invert_yaxis()
figure

# %% [markdown]
# The two need not add up to the pass: products must be started, too, and so that part is in both. But the
# picture is clear. On a small model what is *started* counts as much as what is read, or more.
#
# For larger models this turns around. Bytes grow with the square of the width, launches only with the depth.
# So here are shapes of known models on paper, on a device that reads 3.35 TB/s (an H100, by its data sheet).
# That a launch takes 5 microseconds is assumed.

# %%
from lab.bench.quant import READS, SHAPES, paper_bytes

each, shapes = 5e-6, {"this one": c} | SHAPES
figure, ((side,),) = plots.axes(1, 1, width=8, height=3)
for k, name in enumerate(shapes):
    s, (blocks, head, _) = shapes[name], paper_bytes(shapes[name])
    started = 1e3 * each * (launches["no sub-layer"] + s.n_layers * (a + m))
    read = 1e3 * (blocks + head) / READS
    side.bar([k - 0.2, k + 0.2], [started, read], 0.4, color=[plots.HUES[0], plots.HUES[1]])
    print(f"{name:15} starting {started:5.2f} ms, reading {read:6.3f} ms")
side.set_xticks(range(len(shapes)), shapes, rotation=30, ha="right")
side.set(yscale="log", ylabel="ms a token, on paper", title="blue: starting, orange: reading in bfloat16")
figure

# %% [markdown]
# ## Record once, replay
#
# A *recording* notes all operations of a pass, and then starts them at once. `machine/recorded.py` has three
# ways: on a CPU a compiled program; on a GPU a *CUDA graph*, a stored list of kernels that is started as one;
# and for tests `paper`, which runs everything anew but on memory of its own, so that whatever would break a
# graph breaks it, too. We use the last.
# `Recorded` stands in for the model, and the loop does not know.

# %%
from layerskip import SelfDraft, early_exit
from machine import recorded
from machine.recorded import Recorded

fast = Recorded(model, "paper", widths=(1, 2, 4))
exit_subs = early_exit(L, max(1, L // 4))
texts = [generate(one, [prompt], 24, SelfDraft(one, exit_subs, 3))[0][0] for one in (model, fast)]
assert texts[0] == texts[1]
print(tokenizer.decode(texts[1]))

# %% [markdown]
# Whatever is frozen in a recording must be part of the key by which it is found: which sub-layers, how many
# rows, how wide a block, and how many slots it reads. Whatever changes from round to round must be an input:
# the states, the position, the table of angles. Here is what this run has recorded.

# %%
*_, (state, _) = rounds(fast, [prompt], 24, SelfDraft(fast, exit_subs, 3))
for (subs, rows, width, *reads), tape in fast.tapes[state.cache].items():
    what = "recorded" if tape else "seen once"
    print(f"sub-layers {subs[0]:2} to {subs[-1]:2}, {rows} row, {width} tokens, "
          f"reads {reads[0]:3} slots: {what}")

# %% [markdown]
# How many operations does the host start now? Inside a replay it starts none. So we let a replay count as
# one.

# %%
from torch.utils._python_dispatch import _disable_current_modes


class OneLaunch(recorded.Tape):
    """As a graph does it: all launches of a replay are one."""

    def replay(self):
        with _disable_current_modes():
            super().replay()
        self.output.add_(0)             # stands for the one launch, and changes nothing

# %%
honest, recorded.Tape = recorded.Tape, OneLaunch
replayed = Recorded(model, "paper", widths=(1, 2, 4))
replayed.rehearse(lambda: generate(replayed, [prompt], 4, cache=cache))
recorded.Tape = honest

# %%
def a_round(one):
    """What is started in the second round of plain decoding: {operation: how often}"""
    steps = rounds(one, [prompt], 4, cache=cache)
    next(steps)
    return count(lambda: next(steps))


host = {name: a_round(one).total() for name, one in (("eager", model), ("recorded", replayed))}
assert host["recorded"] < host["eager"] / 3

# %%
loop = host["eager"] - launches["all"]
figure, ((side,),) = plots.axes(1, 1, width=8, height=2.2)
side.barh(list(host), [loop] * 2, color="#808080", label="the loop: draw, check, append")
passes = [k - loop for k in host.values()]
side.barh(list(host), passes, left=[loop] * 2, color=plots.HUES[0], label="the pass")
side.set(xlabel="operations that the host starts for one token")
side.legend(frameon=False)
print(host, "of which the loop", loop)
figure

# %% [markdown]
# What remains is the loop itself, which is Python and has to be: it decides what is drafted, and draws.
# Beside it stand a few copies into the recording's inputs, and one copy out.
#
# A compiled program saves more than launches: it *fuses*. An addition and the multiplication after it become
# one loop over memory, and nothing in between is written and read again. How much that is on a real machine
# is measured by `python -m lab.bench plain --fast`; the repository's own measurement names its machine.

# %%
paragraphs = (ROOT / "lab" / "BENCHMARKS.md").read_text(encoding="utf-8").split("\n\n")
found = [i for i, text in enumerate(paragraphs) if text.startswith("|") and "ours, recorded" in text]
for i in found[:1]:
    print(paragraphs[i - 2], paragraphs[i], sep="\n\n")

# %% [markdown]
# ## A wrong program, and how it is caught
#
# A compiler may be wrong. The one in torch 2.13 has a list of patterns that it replaces by faster code, and
# takes our attention for one of them: scores, plus a mask, softmax. In ours the G query heads that share a
# key are folded into one axis with the T tokens, and what it makes of it computes other numbers, without a
# warning (pytorch issues 195320 and 195383). `machine/recorded.py` turns these patterns off, and trusts
# nobody.
#
# To compile takes minutes on a slow machine, so **the next cell is a simulation**: it is not the compiler's
# program but one of ours with a mistake of that kind. It takes the mask's rows in the order (token, head),
# where the scores have (head, token).

# %%
G = c.n_heads // c.n_kv_heads


def confuse(attention, inputs):
    """The inputs of an attention, with the mask in a wrong order."""
    x, cos, sin, mask, store = inputs
    if mask is not None:                                            # (1, 1, 1, T, S)
        T = mask.shape[3]
        mask = mask.repeat_interleave(G, 3).unflatten(3, (G, T))[:, :, 0]       # (1, 1, G, T, S)
    return x, cos, sin, mask, store

# %%
class Miscompiled(recorded.Tape):
    def replay(self):
        hooks = [b.attn.register_forward_pre_hook(confuse) for b in model.blocks]
        super().replay()
        [hook.remove() for hook in hooks]

# %% [markdown]
# **Predict:** a token that is read alone sees everything before it. Can this mistake change it?

# %%
def off(T):
    """The largest error of the logits of a block of T tokens, beside the largest logit."""
    right = one_pass(model, T)
    hooks = [b.attn.register_forward_pre_hook(confuse) for b in model.blocks]
    wrong = one_pass(model, T)
    [hook.remove() for hook in hooks]
    return float((wrong - right).abs().max()), float(right.abs().max())

# %%
widths = range(1, 9)
errors = [off(T) for T in widths]
figure, ((side,),) = plots.axes(1, 1, width=7, height=2.8)
side.plot(widths, [size for _, size in errors], color="#808080", marker=".", label="largest logit")
side.plot(widths, [error for error, _ in errors], color=plots.HUES[1], marker="o", label="largest error")
side.set(xlabel="tokens in the block", ylabel="logits", ylim=(-0.5, None), title="a wrong program, simulated")
side.legend(frameon=False)
assert errors[0][0] == 0 and (G == 1 or errors[3][0] > 0.1)
figure

# %% [markdown]
# One token alone has no mask: it is right. Whoever tests plain decoding finds nothing, and then drafts four
# tokens. So `Recorded` compares *each* new recording with the eager pass on its first real input, what comes
# out as well as what was written into the cache. What is off is refused by its name, and that pass stays
# eager.

# %%
said = []
recorded.Tape = Miscompiled
guarded = Recorded(model, "paper", widths=(4,), say=said.append)
safe = generate(guarded, [prompt], 24, SelfDraft(guarded, exit_subs, 3))[0][0]
limits, recorded.TOLERANCE = recorded.TOLERANCE, dict.fromkeys(recorded.TOLERANCE, torch.inf)
trusting = Recorded(model, "paper", widths=(4,))                # without the check
wrong = generate(trusting, [prompt], 24, SelfDraft(trusting, exit_subs, 3))[0][0]
recorded.Tape, recorded.TOLERANCE = honest, limits
print(*said[:3], sep="\n")
print("checked:  ", repr(tokenizer.decode(safe)))
print("unchecked:", repr(tokenizer.decode(wrong)))
assert safe == texts[0] and (G == 1 or said)

# %% [markdown]
# ## What four bits keep
#
# Where a pass waits for bytes, smaller weights are the way. NF4 (Dettmers et al. 2023) keeps four bits a
# weight: the number of one of 16 levels. Weights are distributed much like a bell curve, so the levels lie
# where a bell curve has equal shares: close together in the middle. They come from a formula, not from data.

# %%
from machine.quant import BLOCK, KINDS, codebook, quantise, size

levels = codebook()
w = torch.cat([b.mlp.gate_up.flatten() for b in model.blocks]).unflatten(0, (-1, BLOCK))     # (blocks, 64)
scaled = (w / w.abs().amax(1, keepdim=True)).flatten()
figure, ((side,),) = plots.axes(1, 1, width=8, height=2.8)
side.hist(scaled[:: max(1, len(scaled) // 200_000)].numpy(), bins=120, density=True, color="#c8d8e8")
side.vlines(levels, 0, 0.5, color=plots.HUES[1], lw=2)
side.set(xlabel="weight, as a part of the largest of its block of 64", yticks=[],
         title="blue: this model's weights; orange: the 16 levels")
assert len(levels) == 16 and float(levels[7]) == 0 and float(levels.abs().max()) == 1
figure

# %% [markdown]
# The two peaks at the sides are the largest weight of each block, by which all others are measured. What is
# lost?

# %%
twins = {kind: quantise(model, kind) for kind in KINDS}
paths = {"wqkv": "attn", "wo": "attn", "gate_up": "mlp", "down": "mlp"}
lost = {kind: {} for kind in KINDS}
for kind, twin in twins.items():
    for name, part in paths.items():
        both = ([getattr(getattr(b, part), name) for b in one.blocks] for one in (model, twin))
        lost[kind][name] = sum(float((w - q.full(w.dtype)).norm() / w.norm())
                               for w, q in zip(*both, strict=True)) / L
    print(f"{kind}: {size(twin.blocks) / 1e6:5.1f} MB of blocks instead of {size(model.blocks) / 1e6:.1f};",
          "  ".join(f"{name} off by {error:.2%}" for name, error in lost[kind].items()))

# %% [markdown]
# Nine percent of a weight sounds like much. But errors of many weights cancel in a sum, and what counts is
# what the model *says*. A copy in few bits can even serve as a draft of the whole model, without any
# training. So ask how often its greedy word is the model's own (alpha), on three stories, and what it costs
# in bytes (c).

# %%
from lab.bench.quant import acceptance
from search import Teacher

stories = [checkpoint.encode(tokenizer, line["text"], c.bos)[:200] for line in read_prompts("stories")[:3]]
teachers = [Teacher(model, ids) for ids in stories]
steps = sorted({max(1, round(L * share)) for share in (0.1, 0.25, 0.5, 0.75, 1)})
points = {}
for kind, one in {"float32": model, **twins}.items():
    bytes_of = byte_costs(one)
    points[kind] = []
    for E in steps:
        subs = early_exit(L, E)
        alpha = float(torch.cat([acceptance(t, one, subs) for t in teachers]).mean())
        points[kind].append((bytes_of.step(subs) * bytes_of.whole / costs.whole, alpha))

# %% tags=["gallery"]
figure, ((side,),) = plots.axes(1, 1, width=7, height=4)
for (kind, row), hue in zip(points.items(), plots.HUES, strict=False):
    side.plot(*zip(*row, strict=True), color=hue, marker="o", label=kind)
side.plot([0, 1], [0, 1], color="#808080", ls="--", lw=1, label="alpha = c: no gain")
side.set(xlabel="c: bytes of a drafted token, in passes of the whole model",
         ylabel="alpha: how often accepted", xlim=(0, 1.05), ylim=(0, 1.05),
         title=f"a draft runs the first {', '.join(map(str, steps))} blocks")
side.legend(frameon=False, loc="lower right")
for kind in KINDS:
    print(f"{kind}, all blocks: alpha {points[kind][-1][1]:.3f} at c {points[kind][-1][0]:.2f}")
assert points["float32"][-1][1] == 1 and points["int8"][-1][1] > 0.9
figure

# %% [markdown]
# For the same bytes a copy in few bits is right far more often than a draft that leaves early, and it may
# leave early, too. By the *clock* such a draft gains only where a product reads four bits as they are. Torch
# on a CPU has no such product for NF4: the whole matrix is made anew each time. Then four bits save memory,
# and no time. (And the copy takes memory of its own, while a draft that leaves early takes none.)
#
# ## Two processes, one text
#
# What is too large for one device is shared. Each process keeps some heads of every attention and some
# columns of every MLP; twice in each block all add up what they have, and know the same again. `torchrun`
# starts them.

# %%
from machine.parallel import Part

share = [checkpoint.load(MODEL, "cpu", torch.float32, part=Part(rank, 2))[0] for rank in range(2)]
for rank, half in enumerate(share):
    print(f"process {rank}: {size(half.blocks) / 1e6:5.1f} of {size(model.blocks) / 1e6:.1f} MB of blocks,",
          f"wqkv {tuple(half.blocks[0].attn.wqkv.shape)} of {tuple(model.blocks[0].attn.wqkv.shape)}")

# %%
import os
import subprocess

words = read_prompts("stories")[0]["prompt"]
argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "generate.py",
        words, "--model", str(MODEL), "--max-new", "24", "--dtype", "float32", "--device", "cpu"]
one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
out = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, env=one_thread)
alone = tokenizer.decode(prompt + generate(model, [prompt], 24)[0][0])
print(out.stdout if out.returncode == 0 else out.stderr[-500:])
assert " ".join(alone.split()) in " ".join(out.stdout.split()), "the text of one process"

# %% [markdown]
# Two processes on one CPU are no faster, since they share its memory. On several GPUs each brings its own.
# Here is a model of 70 billion parameters in bfloat16, on paper: each device reads its share of the weights,
# and then all wait for one another, 2 L + 2 times a token. How long one such sum takes is assumed: 10 to 50
# microseconds.

# %%
from lab.bench.quant import LARGE, SUMS

blocks, head, _ = paper_bytes(LARGE)
worlds = 1, 2, 4, 8
reading = [1e3 * (blocks + head) / world / READS for world in worlds]
figure, ((side,),) = plots.axes(1, 1, width=7, height=3)
side.bar(range(4), reading, color=plots.HUES[1], label="reading")
waiting = [[1e3 * s * (2 * LARGE.n_layers + 2) * (world > 1) for world in worlds] for s in SUMS]
side.bar(range(4), waiting[1], bottom=reading, color="#c8d8e8", label=f"sums of {1e6 * SUMS[1]:.0f} us")
side.bar(range(4), waiting[0], bottom=reading, color=plots.HUES[0], label=f"sums of {1e6 * SUMS[0]:.0f} us")
side.set_xticks(range(4), [f"{world} device{'s' * (world > 1)}" for world in worlds])
side.set(ylabel="ms a token, on paper")
side.legend(frameon=False)
figure

# %% [markdown]
# ## Questions
#
# **1.** A block of four tokens: how many operations are started for it, beside those for one token?
#
# <details><summary>Answer</summary>
# About as many: a product of four rows is one launch, too. A block of more than one needs a mask, which takes
# a few, and copies where tokens and heads change places. This is why checking a draft is cheap even where
# nothing but launches counts.
# </details>

# %%
more = {T: count(lambda T=T: one_pass(model, T)).total() for T in (1, 4)}
assert more[4] < 1.4 * more[1]
print(f"{more[4]} for four tokens, {more[1]} for one")

# %% [markdown]
# **2.** NF4 has 4.127 bits a weight (four, and its part of the scale of its group) instead of 32. Is the
# whole model 7.75 times smaller?
#
# <details><summary>Answer</summary>
# No. Embeddings, head and norms stay as they are, and in a small model with many tokens they are a large
# part.
# </details>

# %%
smaller = size(model) / size(twins["nf4"])
assert smaller < size(model.blocks) / size(twins["nf4"].blocks) <= 32 / 4.1
print(f"the whole model {smaller:.2f} times, its blocks {size(model.blocks) / size(twins['nf4'].blocks):.2f}")

# %% [markdown]
# **3.** A copy drafts with alpha = .95 and c = .3. What is its best speed-up, and with which gamma? And with
# a draft that is right only 80 % of the time, at half that price?
#
# <details><summary>Answer</summary>
# 2.18 times with gamma 8, and 2.11 times with gamma 5: at half the price a draft that is wrong four times as
# often is worth nearly as much.
# </details>

# %%
from control import best_gamma, expected_speedup

for alpha, cost in ((0.95, 0.3), (0.8, 0.15)):
    gamma = best_gamma(alpha, cost)
    print(f"alpha {alpha}, c {cost}: {expected_speedup(alpha, gamma, cost):.2f} times with gamma {gamma}")
    assert round(expected_speedup(alpha, gamma, cost), 2) == {0.95: 2.18, 0.8: 2.11}[alpha]

# %% [markdown]
# Readers who have Triton, or its interpreter, go one step closer: [kernels.py](../lab/notebooks/kernels.py)
# writes four operations of this model by hand, each beside the line of torch that it replaces.
#
# In the lab: [beyond](../lab/notebooks/10_beyond.ipynb), four ideas rebuilt small.
