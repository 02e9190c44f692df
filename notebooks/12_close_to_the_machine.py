# %% [markdown]
# # 12. Close to the machine: what a token waits for
#
# What does the machine do during a pass? It launches operations, and it reads bytes. We count both.
# Then we look at what the folder `machine/` does about them: a product that reads a matrix once for
# several tokens, passes in one call, quantised weights, one model on two processes. None of this
# changes the text, except by rounding, and [notebook 5](05_the_same_text.ipynb) shows how even that
# can be avoided.
#
# > **A pass of a small model waits for operations to be launched, a pass of a large one for bytes
# > to be read. A pass in one call removes the first wait. A block of tokens waits for the same
# > bytes as one token. Fewer bits shorten the wait, and several devices share it.**
#
# You need [2, the cache](02_kv_cache.ipynb), [4, speculative
# decoding](04_speculative_decoding.ipynb) and [6, layer skipping](06_layer_skipping.ipynb). About
# 40 minutes.

# %%
# %run start.py
MODEL = ROOT / "weights" / "stories-llama"      # or a folder with your own Llama or Gemma-2
SHIPPED = MODEL.name == "stories-llama"         # the text's figures are checked for this model

# %%
from kvcache import KVCache, prefill
from model import Placement
from speculative import generate
from support.texts import read_prompts

torch.set_grad_enabled(False)
model, tokenizer = checkpoint.load(MODEL, "cpu", torch.float32)
c = model.c
L = model.c.n_layers
prompt = checkpoint.encode(tokenizer, read_prompts("stories")[0]["prompt"], c.bos)
cache = KVCache(c, 1, len(prompt) + 64, torch.float32)
n = len(prompt)
prefill(model, torch.tensor([prompt]), cache)
print(f"{L} blocks of {c.dim} numbers; the prompt has {n} tokens")

# %% [markdown]
# ## Count the launches
#
# PyTorch can report each operation just before it runs. We count all of them except *views*, which
# only look at the same memory in another shape. On a GPU, each of the others would *launch* one or
# more *kernels* (programs that run on the GPU).

# %% jupyter={"source_hidden": true}
from torch.utils._python_dispatch import TorchDispatchMode


class Launches(TorchDispatchMode):
    """Counts each operation of torch by its name."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with self:                      # an operation that is made of others counts as these
            out = func.decompose(*args, **(kwargs or {}))
        if out is not NotImplemented:
            return out
        name = func.overloadpacket.__name__
        self.names[name] += not (func.is_view or name == "_unsafe_view")
        return func(*args, **(kwargs or {}))

# %% jupyter={"source_hidden": true}
from collections import Counter


def one_pass(model, T=1, sublayers=None, cache=cache):
    """A pass over T tokens after the prompt, with a cache."""
    x = model.embed(torch.full((1, T), 5))
    return model.unembed(model.run(x, Placement.span(n, n + T), cache, sublayers))


def count(action):
    """{operation: how often it was launched}"""
    with Launches() as seen:
        seen.names = Counter()
        action()
    return +seen.names

# %%
parts = {"all": None, "no sub-layer": [], "one attention": [2], "one MLP": [3]}
launches = {name: count(lambda subs=subs: one_pass(model, 1, subs)).total()
            for name, subs in parts.items()}
a, m = (launches[name] - launches["no sub-layer"] for name in ("one attention", "one MLP"))
print(f"{launches['all']} launches for one token: {a} an attention, {m} an MLP, "
      f"{launches['no sub-layer']} for embedding and head")
assert launches["all"] == launches["no sub-layer"] + L * (a + m)

# %% jupyter={"source_hidden": true}
names = count(lambda: one_pass(model))
products = sum(k for name, k in names.items() if name in ("mm", "addmm", "linear"))
assert products == 4 * L + 1, "four per block, and the output head"
print(f"{products} of them are products with a weight matrix; most frequent:", names.most_common(4))

# %% [markdown]
# Most launches add, multiply or copy a few hundred numbers. *Launching* such an operation takes
# longer than running it: Python calls torch, torch looks up types and devices, allocates memory for
# the result, and calls the kernel.
#
# ## Count the bytes
#
# A pass over one token reads every matrix of the blocks and of the output head once, and the keys
# and values of all tokens before it. `by_bytes` adds that up, here in float32.

# %%
from methods.costs import by_bytes, size

costs = by_bytes(model)        # of a pass; its unit is the bytes that a pass reads in a short text
table = {"attention": L * costs.attention, "MLP": L * costs.mlp,
         "head": costs.head, f"keys and values of {n} tokens": L * costs.slope * n}
for name, share in table.items():
    print(f"{name:30} {share * costs.unit / 1e6:7.2f} MB")
print(f"{'together':30} {costs.verify(n) * costs.unit / 1e6:7.2f} MB for one token")

# %% [markdown]
# Which count matters? We time the whole pass, its matrix products alone, and a pass of a model that
# has as many blocks but is so narrow that there is hardly anything to read: it has only launches.
#
# **Predict:** which of the two takes longer, the products or the launches?

# %% jupyter={"source_hidden": true}
from dataclasses import replace

import torch.nn.functional as F

from model import Transformer
from support.measure import interleave

narrow = Transformer(replace(c, vocab_size=64, dim=32, hidden_dim=32, head_dim=8)).eval()
for w in narrow.parameters():
    torch.nn.init.normal_(w, std=0.02)
matrices = [w for w in model.parameters() if w.dim() == 2][not c.tied :]     # head and blocks
rows = [torch.ones(1, 1, w.shape[1]) for w in matrices]
products_only = lambda: [F.linear(x, w) for x, w in zip(rows, matrices, strict=True)]
thin = KVCache(narrow.c, 1, n + 8, torch.float32)
one_pass(narrow, cache=thin)                                    # this also computes the angles
assert count(lambda: one_pass(narrow, cache=thin)) == names, "the same launches"
work = {"the pass": lambda: one_pass(model), "its products": products_only,
        "a narrow model's pass": lambda: one_pass(narrow, cache=thin)}
for name, seconds in interleave(work, 15).items():
    print(f"{name}: {1e3 * seconds:.2f} ms")

# %% [markdown]
# On a small model both count. (The two need not add up to the pass: the launches of the products
# are in both, and the narrow model's other operations move fewer numbers.)
#
# For larger models the bytes win: they grow with the square of the width, launches only with the
# depth. Here is the calculation for some known models, in bfloat16, on an H100, which reads 3.35
# TB/s by its data sheet. What a launch takes there follows from a stored run: eager decoding at the
# shape of Llama 3.1 8B, whose tokens mostly waited for launches.
#
# **Predict:** how large must a model be before it waits longer for bytes than for launches?

# %%
from methods.costs import by_weights
from lab.bench.shared import SHAPES                             # what the model cards say
from lab.figures import stored

H100 = stored("gpu-shapes")["Llama 3.1 8B"]["eager: tokens/s"]
READS = 3.35e12                                                 # bytes per second
large = replace(SHAPES["Llama 3.1 8B"], dim=8192, n_layers=80, n_heads=64, hidden_dim=28672)
shapes = {"this one": c} | SHAPES | {"Llama 3.1 70B": large}
LAUNCH = 1 / H100 / (launches["no sub-layer"] + shapes["Llama 3.1 8B"].n_layers * (a + m))


def reading(shape):
    """Seconds to read the blocks and the head, at two bytes per weight."""
    return 2 * by_weights(shape).unit / READS


def launching(shape):
    return LAUNCH * (launches["no sub-layer"] + shape.n_layers * (a + m))


print(f"{H100} tokens/s, so a launch took {1e6 * LAUNCH:.0f} microseconds")
for name, shape in shapes.items():
    print(f"{name:14} per token: launching {1e3 * launching(shape):5.2f} ms, "
          f"reading {1e3 * reading(shape):5.2f} ms")
longer = [name for name, shape in shapes.items() if reading(shape) > launching(shape)]
print("waits longer for bytes than for launches:", ", ".join(longer) or "none of these")

# %% [markdown]
# So with eager passes nearly every model that fits into such a device waits for launches, and
# neither fewer bytes nor a shorter draft would help it.
#
# **Try it:** suppose a launch takes 1 microsecond. Where are they equal then? Set `LAUNCH`.
#
# <details><summary>Answer</summary>
# Near 1 billion.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
ratios = {name: 1e-6 / LAUNCH * launching(shape) / reading(shape) for name, shape in shapes.items()}
nearest = min(ratios, key=lambda name: abs(ratios[name] - 1))
assert not SHIPPED or nearest == "TinyLlama 1.1B"
print(f"{nearest}: launching takes {ratios[nearest]:.2f} times as long as reading")

# %% [markdown]
# ## A block at the price of a token
#
# Verifying a draft is a pass over a few tokens, so each matrix is multiplied with a few rows. We
# time such products with a matrix as wide as the matrices of SmolLM2, a small public model, but so
# long that it fits into no cache. `F.linear` is torch's product. For comparison we time a sum over
# as many bytes, which does little more than read them.
#
# **Predict:** four rows need four times as many multiplications as one. Does the product take four
# times as long?

# %%
from machine.quant import Looped
from machine.rows import multiplies

assert multiplies(model), "this section needs a C++ compiler, such as g++"
matrix = torch.randn(2**16, 576).bfloat16()
x = torch.randn(16, 576).bfloat16()
ways = {"F.linear": matrix, "our loop": Looped(matrix)}          # a Looped has a product of its own
few = 1, 2, 3, 4, 6, 8, 10, 12, 14, 16
as_large = torch.ones(matrix.nbytes // 4)
work = {(name, T): lambda w=w, T=T: F.linear(x[:T], w) for name, w in ways.items() for T in few}
work["reading"] = as_large.sum
times = {name: 1e3 * seconds for name, seconds in interleave(work, 15).items()}
print(f"{matrix.nbytes / 1e6:.0f} MB; a sum over them takes {times['reading']:.1f} ms")
for name in ways:
    one = times[name, 1]
    listed = ", ".join(f"{T} rows {times[name, T] / one:.2f}" for T in (2, 4, 8, 16))
    print(f"{name:8}: one row takes {one:.1f} ms; relative to that, {listed}")

# %% [markdown]
# The loop is in `machine/rows.cpp`. It goes through the matrix once, as one stream of bytes:
#
#     for each output n                   one row of the matrix
#         for 64 weights of it            a few registers
#             for each row m of x         sum[m] += these weights times 64 numbers of x
#
# While the next weights are on their way from memory, the processor multiplies those that are
# there, with row after row. Up to a few rows it would only have waited. So a block of four tokens
# costs about what one token costs, until the multiplications take longer than the reading.
#
# A product is not a pass. Between products there are norms, attention and additions, which are
# launched one by one. So `machine/pass.cpp` has loops for these as well, and a whole pass is a
# single call from Python. `fast(model)` stands in for the model and makes these calls.

# %%
from machine.exact import fast

half, _ = checkpoint.load(MODEL, "cpu", torch.bfloat16)
quick = fast(half)
in_one_call = count(lambda: one_pass(quick)).total()
print(f"{in_one_call} launches for one token, instead of {count(lambda: one_pass(half)).total()}")
blocks = {(one, T): lambda one=one, T=T: one_pass(one, T) for one in (half, quick) for T in few}
passes = {key: 1e3 * seconds for key, seconds in interleave(blocks, 15).items()}
print(f"a pass over one token: {passes[half, 1]:.1f} ms as usual, "
      f"{passes[quick, 1]:.1f} ms in one call")
print(f"a block of four, relative to that: {passes[half, 4] / passes[half, 1]:.2f} as usual, "
      f"{passes[quick, 4] / passes[quick, 1]:.2f} in one call")
assert in_one_call < 20

# %% tags=["gallery"] jupyter={"source_hidden": true}
figure, ((left, right),) = plots.axes(1, 2, width=4.8, height=3.4)
done = {name: [T * matrix.numel() / 1e6 / times[name, T] for T in few] for name in ways}
plots.curves(left, few, done, xlabel="rows of x = multiplications per weight read", xscale="log",
             ylabel="billion multiplications per second", yscale="log",
             title=f"a product, {matrix.nbytes / 1e6:.0f} MB")
left.plot(few, [T * matrix.numel() / 1e6 / times["reading"] for T in few],
          color=plots.HUES[-1], ls="--", lw=1, label="a sum over the bytes")
left.minorticks_off()
left.set_xticks(few[:5] + (16,), few[:5] + (16,))
left.legend(frameon=False, fontsize=9, loc="lower right")
named = {"as usual": half, "in one call": quick}
plots.curves(right, few, {name: [passes[one, T] for T in few] for name, one in named.items()},
             xlabel="tokens of a block", ylabel="milliseconds", ylim=(0, None),
             title="a pass of this model")
figure

# %% [markdown]
# On the left is a *roofline*. On the dashed slope a product would take as long as a sum over its
# bytes: twice the rows, twice the multiplications in the same time. Along such a slope a product
# waits for memory, and a row more costs nothing. Where its points bend away from it, the
# multiplications take longer, and each further row costs its own time. (torch's sum is not the
# fastest way to read on every machine, so a good loop may lie above the slope.)
#
# On the right is a whole pass. The matrices of this small model stay in the processor's caches, so
# there is less to wait for, and more of a block's time is multiplication than in a model that
# memory must deliver.
#
# **This curve is why drafting pays at all.** Suppose T rows cost T times as much as one row. Then a
# round that drafts gamma tokens would cost more than gamma + 1 passes, and would write at most
# gamma + 1 tokens. We put three costs of a block into the formula of notebook 4, for alpha 0.7 and
# c 0.1: this one, and the two that we have measured.

# %%
from control import expected_speedup

block_of = {"T rows cost T": dict(zip(few, few, strict=True))}
block_of |= {name: {T: times[name, T] / times[name, 1] for T in few} for name in ways}
for name, cost in block_of.items():
    gains = {T - 1: expected_speedup(0.7, T - 1, 0.1, cost[T]) for T in (2, 4, 8)}
    listed = ", ".join(f"{gain:.2f} with gamma {gamma}" for gamma, gain in gains.items())
    print(f"{name:13}: {listed} times plain decoding")
always_right = [expected_speedup(1.0, T - 1, 0.1, T) for T in few[1:]]
assert max(always_right) < 1, "where T rows cost T, every draft is a loss"

# %% [markdown]
# ## Record once, replay
#
# A GPU needs another remedy. There a library multiplies few rows well, but each kernel must be
# launched. A *CUDA graph* is a stored list of kernels with a single launch: the pass is *recorded*
# once and replayed from then on. We use a simulation of it, `simulated`, which is made for tests:
# it runs everything again, but in memory of its own, so that whatever would break a graph also
# breaks the simulation. `Recorded` stands in for the model, and the loop does not notice. It
# records passes in a rehearsal only.

# %%
from layerskip import SelfDraft, early_exit
from machine.recorded import Recorded, Session
from machine.tapes import Tape, simulated

recorded = Recorded(model, Session([simulated]), widths=(1, 2, 4))
exit_subs = early_exit(L, max(1, L // 4))
write = lambda one: generate(one, [prompt], 24, SelfDraft(one, exit_subs, 3))[0][0]
recorded.rehearse(lambda: write(recorded))
texts = [write(model), write(recorded)]
assert texts[0] == texts[1]
print(tokenizer.decode(texts[1]))

# %% [markdown]
# A recording is made for given sub-layers and a given number of rows, tokens and slots. What
# changes from round to round is its input: the states, the position, the masks. So per pass the
# host launches one replay and a few copies. A graph still has as many kernels as before. So
# `machine/pieces.py` first has them *fused* by a compiler: an addition and a multiplication become
# one loop over memory.
#
# Both remedies, the call on a CPU and the graph on a GPU, are behind `generate.py --fast`.
# [BENCHMARKS](../lab/BENCHMARKS.md#on-a-gpu) has what graphs gained on an H100.

# %% [markdown]
# ## A wrong program, and how it is caught
#
# Compilers have bugs. The one in torch 2.13 takes our attention for a pattern that it knows, and
# replaces it by code that computes other numbers, without a warning (pytorch issues 195320 and
# 195383). `machine/pieces.py` turns these patterns off, and `Recorded` still checks every recording
# against an eager pass on its first real input. (So does `fast` on a CPU, once per model.) **The
# next cell simulates** such a mistake: its program reads the mask's rows in the order (token,
# head), while the scores have (head, token). We write a text without the check, then with it.
#
# **Predict:** does the wrong program change a text of plain decoding? And one that was drafted?

# %% jupyter={"source_hidden": true}
from functools import partial

from machine import tolerance

G = c.n_heads // c.n_kv_heads


def confuse(attention, inputs):
    """The inputs of an attention, with the mask in a wrong order."""
    x, cos, sin, mask, store = inputs
    if mask is not None:                                            # (1, 1, 1, T, S)
        T = mask.shape[3]
        mask = mask.repeat_interleave(G, 3).unflatten(3, (G, T))[:, :, 0]       # (1, 1, G, T, S)
    return x, cos, sin, mask, store


class Miscompiled(Tape):
    def replay(self):
        hooks = [b.attn.register_forward_pre_hook(confuse) for b in model.blocks]
        super().replay()
        for hook in hooks:
            hook.remove()


def by_wrong_program(width, say=lambda message: None):
    """A text of passes over blocks of `width` tokens: 1 for plain decoding."""
    def miscompiled(f, model, inputs, fixed, session):
        return Miscompiled(partial(f, model), inputs, fixed)

    one = Recorded(model, Session([miscompiled], say), widths=(width,))
    drafter = SelfDraft(one, exit_subs, 3) if width > 1 else None
    one.rehearse(lambda: generate(one, [prompt], 32, drafter))
    return generate(one, [prompt], 32, drafter)[0][0]


right = generate(model, [prompt], 32)[0][0]
limits = tolerance.TOLERANCE
messages = []
tolerance.TOLERANCE = dict.fromkeys(limits, torch.inf)            # without the check
texts = {"plain": by_wrong_program(1), "drafted": by_wrong_program(4)}
tolerance.TOLERANCE = limits
texts["drafted, checked"] = by_wrong_program(4, messages.append)
print(f"the right text: {tokenizer.decode(right)!r}")
for name, text in texts.items():
    print(f"{name}: {'the right text' if text == right else repr(tokenizer.decode(text))}")
print(messages[0])
assert texts["plain"] == texts["drafted, checked"] == right
assert G == 1 or texts["drafted"] != right

# %% [markdown]
# For a single token both orders are the same, so plain decoding is right, and a test of it passes.
# A block of several tokens is wrong, and what is written reads well, which makes the mistake
# dangerous. With the check, a recording that is off is not used, and its pass stays eager.
#
# ## What four bits keep
#
# Where a pass waits for bytes, smaller weights help. int8 stores each weight as a whole number from
# -127 to 127, times one scale for the row. int4 divides a row into groups of 32, and each group has
# 16 equally spaced levels from its smallest weight to its largest. (NF4, of QLoRA, puts its 16
# levels closer together near zero, where most weights are.)

# %% jupyter={"source_hidden": true}
from machine.quant import KINDS, SHARE, quantise

levels = range(16)
w = torch.cat([b.mlp.gate_up.flatten() for b in model.blocks])
w = w.unflatten(0, (-1, SHARE))                                 # (groups, 32)
low, high = w.aminmax(dim=1, keepdim=True)
scaled = (15 * (w - low) / (high - low)).flatten()
figure, ((side,),) = plots.axes(1, 1, width=8, height=2.8)
some = scaled[:: max(1, len(scaled) // 200_000)]
side.hist(some.numpy(), bins=120, density=True, color="#c8d8e8")
side.vlines(levels, 0, 0.03, color=plots.HUES[1], lw=2)
side.set(xlabel="weight, from the smallest of its group of 32 (0) to the largest (15)", yticks=[],
         title="blue: this model's weights; orange: the 16 levels of int4")
figure

# %% [markdown]
# The peaks at both ends are the smallest and the largest weight of each group. How far off is the
# largest matrix of a block, on average?

# %% jupyter={"source_hidden": true}
twins = {kind: quantise(model, kind) for kind in KINDS}
copies = {kind: quantise(half, kind) for kind in KINDS}
for kind, twin in twins.items():
    both = [(a.mlp.gate_up, b.mlp.gate_up) for a, b in zip(model.blocks, twin.blocks, strict=True)]
    lost = sum(float((w - q.full(w.dtype)).norm() / w.norm()) for w, q in both) / L
    before, after = (size(one.blocks) / 1e6 for one in (half, copies[kind]))
    print(f"{kind}: {after:4.1f} MB of blocks instead of {before:.1f}; "
          f"gate_up is off by {lost:.1%}")

# %% [markdown]
# That sounds like a lot. But in a sum over many weights the errors partly cancel, and what counts
# is what the model *predicts*. So a quantised copy can draft for the model, without training. We
# measure how often its greedy token is the model's own (alpha), on three stories, and what it reads
# (c), relative to a pass in bfloat16.
#
# **Predict:** which drafts best for the fewest bytes: the first blocks as they are, all blocks in
# four bits, or the first blocks in four bits?

# %%
from search import Teacher

stories = [checkpoint.encode(tokenizer, line["text"], c.bos)[:200]
           for line in read_prompts("stories")[:3]]
teachers = [Teacher(model, ids) for ids in stories]
steps = sorted({max(1, round(L * share)) for share in (0.1, 0.25, 0.5, 0.75, 1)})
points = {}


def acceptance(teacher, one, subs):
    """How likely the first token is accepted after each place, where another model drafts."""
    x = one.run(one.embed(teacher.tokens), Placement.span(0, teacher.p.shape[1]), sublayers=subs)
    return teacher.overlap(teacher.probs(one.unembed(x)))


for kind, one in {"as it is": model, **twins}.items():
    costs = by_bytes(copies.get(kind, half))
    points[kind] = []
    for E in steps:
        subs = early_exit(L, E)
        alpha = float(torch.cat([acceptance(t, one, subs) for t in teachers]).mean())
        points[kind].append((costs.draft(subs).start * costs.unit / by_bytes(half).unit, alpha))

# %%
from control import best_gamma

speeds = {}
for kind, row in points.items():
    for E, (c_bytes, alpha) in zip(steps, row, strict=True):
        speeds[kind, E] = expected_speedup(alpha, best_gamma(alpha, c_bytes), c_bytes)
    E = max(steps, key=lambda E: speeds[kind, E])
    c_bytes, alpha = row[steps.index(E)]
    c_all, alpha_all = row[-1]
    print(f"{kind:8} all blocks: alpha {alpha_all:.3f} at c {c_all:.2f}, "
          f"speed {speeds[kind, L]:.2f}; "
          f"best: {E:2} blocks, alpha {alpha:.2f} at c {c_bytes:.2f}, speed {speeds[kind, E]:.2f}")
if SHIPPED:
    exits = max(speeds["as it is", E] for E in steps)
    best = max(speeds, key=speeds.get)
    assert best[0] != "as it is" and best[1] < L
    assert exits < speeds["int4", L] < speeds[best] < exits + 0.3

# %% jupyter={"source_hidden": true}
figure, ((side,),) = plots.axes(1, 1, width=7, height=4)
for (kind, row), hue in zip(points.items(), plots.HUES, strict=False):
    side.plot(*zip(*row, strict=True), color=hue, marker="o", label=kind)
side.plot([0, 1], [0, 1], color="#808080", ls="--", lw=1, label="alpha = c: no gain")
side.set(xlabel="c: bytes per drafted token, relative to a bfloat16 pass", ylabel="alpha",
         xlim=(0, 1.05), ylim=(0, 1.05),
         title=f"drafting with the first {', '.join(map(str, steps))} blocks")
side.legend(frameon=False, loc="lower right")
assert points["as it is"][-1][1] == 1 and points["int8"][-1][1] > 0.9
figure

# %% [markdown]
# The first blocks, quantised, though not by much. At the same c, all blocks in four bits are right
# far more often than an exit of the model as it is. But the first blocks are cheaper still, so the
# best gains hardly differ. (The output head stays in 16 bits here. It is most of what the cheapest
# drafts read.) By the *clock* such a draft gains only where a product reads the quantised weights
# directly, as the loop does. To save multiplications as well, a draft may also round x to int8: it
# only drafts, so the text stays exact.
#
# This model was trained for its exits. On one that was not, exits fail and all blocks in four bits
# gain: [notebook 13](13_a_real_model.ipynb) shows both.
#
# ## Two processes, one text
#
# A model that is too large for one device can be split. Each process keeps some heads of every
# attention and some columns of every MLP. Twice per block, an all-reduce adds up their results, so
# that every process has the full state again. `torchrun` starts the processes.

# %% jupyter={"source_hidden": true}
import os
import subprocess

words = read_prompts("stories")[0]["prompt"]
argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "generate.py", words, "--model", str(MODEL), "--max-new", "24", "--dtype", "float32",
        "--device", "cpu"]
one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
out = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, env=one_thread)
alone = tokenizer.decode(prompt + generate(model, [prompt], 24)[0][0])
print(out.stdout[: out.stdout.find("\n", len(alone))] if out.returncode == 0 else out.stderr[-500:])
assert " ".join(alone.split()) in " ".join(out.stdout.split()), "the text of one process"

# %% [markdown]
# One process writes the same text. Our two processes share one memory, so nothing is gained, but
# each GPU has a memory of its own. Here is the calculation for 70 billion parameters in bfloat16.
# Each device reads its share of the weights, and then all wait for one another, 2 L + 2 times per
# token: twice per block, once for the output head, and once to agree on the token. We assume 10 or
# 50 microseconds each time.
#
# **Predict:** are eight devices eight times as fast?

# %%
SUMS = 10e-6, 50e-6                                             # seconds per all-reduce
worlds = 1, 2, 4, 8
shares = [1e3 * reading(large) / world for world in worlds]
waiting = [[1e3 * each * (2 * large.n_layers + 2) * (world > 1) for world in worlds]
           for each in SUMS]
for world, share, *waits in list(zip(worlds, shares, *waiting, strict=True))[1:]:
    fast, slow = (shares[0] / (share + wait) for wait in waits)
    print(f"{world} devices are {fast:.1f} times as fast as one, "
          f"or {slow:.1f} with the slower all-reduce")

# %% [markdown]
# The reading shrinks with each device, but the waiting does not.
#
# **Try it:** set `SUMS = 1e-6, 10e-6`. How close to eight do you get?
#
# <details><summary>Answer</summary>
# 7.8 with one microsecond per all-reduce.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
eight = shares[0] / (shares[-1] + 1e3 * 1e-6 * (2 * large.n_layers + 2))
assert round(eight, 1) == 7.8
print(f"{worlds[-1]} devices would be {eight:.2f} times as fast as one")

# %% [markdown]
# ## Questions
#
# Each answer is folded, and so is the cell below it that checks the answer.
#
# **1.** How many operations are launched for a block of four tokens, compared with one token?
#
# <details><summary>Answer</summary>
# About as many: a product of four rows is also one launch. A longer block also needs a mask, which
# takes a few launches, and copies where tokens and heads change places. So verifying a draft is
# cheap even where only launches count.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
more = {T: count(lambda T=T: one_pass(model, T)).total() for T in (1, 4)}
assert more[4] < 1.4 * more[1]
print(f"{more[4]} for four tokens, {more[1]} for one")

# %% [markdown]
# **2.** int4 takes 5 bits per weight (four, and its part of the group's step and offset) instead of
# the 16 of bfloat16. Is the whole model 3.2 times smaller?
#
# <details><summary>Answer</summary>
# No. Embeddings, output head and norms stay as they are, and in a small model with a large
# vocabulary they are a large part. (The blocks alone come close.)
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
smaller = size(half) / size(copies["int4"])
blocks = size(half.blocks) / size(copies["int4"].blocks)
assert smaller < blocks <= 16 / 5
print(f"the whole model is {smaller:.2f} times smaller, its blocks {blocks:.2f} times")

# %% [markdown]
# Next: [a real model](13_a_real_model.ipynb), which was not trained for drafting. Does it pay
# there?
#
# In the lab: [beyond](../lab/notebooks/beyond.ipynb), four ideas rebuilt small.
