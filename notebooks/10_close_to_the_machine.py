# %% [markdown]
# # 10. Close to the machine: what a token waits for
#
# This notebook looks at what the machine does with a pass: how many operations are launched for one
# token, and how many bytes are read. Then it shows how the folder `machine/` reduces both: passes that
# are recorded once and replayed, weights of few bits, and one model on two processes. Recording and
# splitting do not change the text, up to rounding; the last part takes away the rounding, too.
#
# > **A pass of a small model waits for operations to be launched, a pass of
# > a large model for bytes to be read. A recording removes the first wait. Fewer bits shorten the
# > second, and several devices share it.**
#
# You need [2, the cache](02_kv_cache.ipynb), [4, speculative decoding](04_speculative_decoding.ipynb)
# and [5, layer skipping](05_layer_skipping.ipynb). About 40 minutes.

# %%
# %run start.py
MODEL = ROOT / "weights" / "stories-llama"      # or a folder with your own Llama or Gemma-2
SHIPPED = MODEL.name == "stories-llama"         # what the text says of figures is checked for this model

# %%
from model import Placement
from support.files import read_prompts
from kvcache import KVCache
from speculative import generate, prefill, rounds

torch.set_grad_enabled(False)
model, tokenizer = checkpoint.load(MODEL, "cpu", torch.float32)
c, L = model.c, model.c.n_layers
prompt = checkpoint.encode(tokenizer, read_prompts("stories")[0]["prompt"], c.bos)
cache, n = KVCache(c, 1, len(prompt) + 64, torch.float32), len(prompt)
prefill(model, torch.tensor([prompt]), cache)
print(f"{L} blocks of {c.dim} numbers; the prompt has {n} tokens")

# %% [markdown]
# ## Count the launches
#
# PyTorch can report each operation just before it runs, so we can count them. A *view* only looks at the
# same memory in another shape. It computes nothing, so we leave it out. On a GPU, each of the others
# would *launch* one or more *kernels* (programs that run on the GPU).

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
launches = {name: count(lambda subs=subs: one_pass(model, 1, subs)).total() for name, subs in parts.items()}
a, m = (launches[name] - launches["no sub-layer"] for name in ("one attention", "one MLP"))
print(f"{launches['all']} launches for one token: {a} an attention, {m} an MLP, "
      f"{launches['no sub-layer']} for embedding and head")
assert launches["all"] == launches["no sub-layer"] + L * (a + m)

# %% jupyter={"source_hidden": true}
names = count(lambda: one_pass(model))
products = sum(k for name, k in names.items() if name in ("mm", "addmm", "linear"))
top = names.most_common(14)
figure, ((side,),) = plots.axes(1, 1, width=8, height=3.2)
heavy = ("mm", "addmm", "linear")
side.bar([name for name, _ in top], [k for _, k in top],
         color=[plots.HUES[1 if name in heavy else 0] for name, _ in top])
side.tick_params(axis="x", rotation=60)
side.set(ylabel="launches for one token", title="orange: a product with a weight matrix")
print(f"{products} of {names.total()} launches: four per block, and the output head")
assert products == 4 * L + 1
figure

# %% [markdown]
# Few are products with a weight matrix. Most launches add, multiply or copy a few hundred numbers.
# *Launching* such an operation takes longer than running it: Python calls torch, torch looks up types
# and devices, allocates memory for the result, and calls the kernel.
#
# ## Count the bytes
#
# A pass over one token reads every matrix of the blocks and of the output head once, and the keys and
# values of all tokens before it. `byte_costs` adds that up, here in float32.

# %%
from machine.quant import byte_costs

costs = byte_costs(model)
table = {"attention": sum(costs.sublayers[::2]), "MLP": sum(costs.sublayers[1::2]), "head": costs.head,
         f"keys and values of {n} tokens": L * costs.slot * n}
for name, number in table.items():
    print(f"{name:30} {number / 1e6:7.2f} MB")
print(f"{'together':30} {sum(table.values()) / 1e6:7.2f} MB for one token")

# %% [markdown]
# Which of the two counts matters? We time three things in turn: the whole pass; its matrix products
# alone; and a pass of a model that has as many blocks but is so narrow that there is almost nothing to
# read. The narrow one has only launches.
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
one_pass(narrow, cache=thin)                                    # the first pass also computes the angles
assert count(lambda: one_pass(narrow, cache=thin)) == names, "the same launches"
work = {"the pass": lambda: one_pass(model), "its products": products_only,
        "a narrow model's pass": lambda: one_pass(narrow, cache=thin)}
ms = {name: 1e3 * s for name, s in interleave(work, 15).items()}
print("  ".join(f"{name}: {t:.2f} ms" for name, t in ms.items()), f"({torch.get_num_threads()} threads)")

# %% jupyter={"source_hidden": true}
figure, ((side,),) = plots.axes(1, 1, width=8, height=2.2)
side.barh(list(ms), list(ms.values()), color=["#808080", plots.HUES[1], plots.HUES[0]])
side.set(xlabel="milliseconds on this machine, now")
side.invert_yaxis()
figure

# %% [markdown]
# On a small model the launches cost about as much as the products, or more. (The two do not add up to
# the pass: each product is launched, too, and the other operations of the real pass work on more
# numbers.)
#
# For larger models this turns around: bytes grow with the square of the width, launches only with the
# depth. Here are shapes of known models on paper, in bfloat16, on a device that reads 3.35 TB/s (an
# H100, by its data sheet). We assume that a launch takes 5 microseconds.
#
# **Predict:** how large must a model be before it waits longer for bytes than for launches?

# %%
from control import weight_costs
from lab.bench.shared import SHAPES                             # what the model cards say

LAUNCH, READS = 5e-6, 3.35e12                                   # seconds; bytes per second
shapes = {"this one": c} | SHAPES


def reading(shape, bits=16):
    """Seconds for the blocks in this many bits per weight, and the head in 16."""
    by_weights = weight_costs(shape)
    return (sum(by_weights.sublayers) * bits / 8 + 2 * by_weights.head) / READS


def launching(shape, seconds=LAUNCH):
    return seconds * (launches["no sub-layer"] + shape.n_layers * (a + m))


for seconds in (LAUNCH, 1e-6):
    waits = (name for name, shape in shapes.items() if reading(shape) > launching(shape, seconds))
    first = next(waits, "none")
    print(f"with {1e6 * seconds:.0f} us per launch, the smallest shape that waits longer for bytes: {first}")

# %% jupyter={"source_hidden": true}
figure, ((side,),) = plots.axes(1, 1, width=8, height=3)
for k, shape in enumerate(shapes.values()):
    both = 1e3 * launching(shape), 1e3 * reading(shape)
    side.bar([k - 0.2, k + 0.2], both, 0.4, color=[plots.HUES[0], plots.HUES[1]])
side.set_xticks(range(len(shapes)), shapes, rotation=30, ha="right")
side.set(yscale="log", ylabel="ms per token, on paper", title="blue: launching, orange: reading")
large = shapes["Llama 3.1 8B"]
assert not SHIPPED or LAUNCH != 5e-6 or 0.9 < launching(large) / reading(large) < 1.1
figure

# %% [markdown]
# Near 8 billion parameters the two are equal. A launch of 1 microsecond moves the point to a model an
# eighth as large.
#
# ## Record once, replay
#
# A *recording* stores all operations of a pass and then launches them at once. `machine/recorded.py`
# can do it in three ways: on a CPU as a compiled program; on a GPU as a *CUDA graph*, a stored list of
# kernels with a single launch; and, for tests, as `paper`, which runs everything again but in memory of
# its own, so that whatever would break a graph breaks it, too. We use `paper`. `Recorded` stands in for
# the model, and the loop does not notice.

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
# Whatever is fixed in a recording must be part of its key: which sub-layers, how many rows, how many
# tokens, and how many slots it reads. Whatever changes from round to round must be an input: the
# states, the position, the table of angles. A pass is recorded when its key comes up for the second
# time. Here is what this run has recorded.

# %%
*_, (state, _) = rounds(fast, [prompt], 24, SelfDraft(fast, exit_subs, 3))
for (subs, rows, width, *reads), tape in fast.home(state.cache).tapes.items():
    what = "recorded" if tape else "seen once"
    print(f"sub-layers {subs[0]:2} to {subs[-1]:2}, {rows} row, {width} tokens, "
          f"reads {reads[0]:3} slots: {what}")

# %% [markdown]
# How many operations does the host launch now? Inside a replay it launches none, so we count each
# replay as one.
#
# **Predict:** of the hundreds of operations that an *eager* pass, which is not recorded, and the loop
# around it launch, how many are left?

# %% jupyter={"source_hidden": true}
from torch.utils._python_dispatch import _disable_current_modes


class OneLaunch(recorded.Tape):
    """As with a graph, a replay is a single launch."""

    def replay(self):
        with _disable_current_modes():
            super().replay()
        self.output.add_(0)             # counts as the one launch, and changes nothing

# %% jupyter={"source_hidden": true}
honest, recorded.Tape = recorded.Tape, OneLaunch
replayed = Recorded(model, "paper", widths=(1, 2, 4))
replayed.rehearse(lambda: generate(replayed, [prompt], 4, cache=cache))
recorded.Tape = honest

# %% jupyter={"source_hidden": true}
def a_round(one):
    """What the second round of plain decoding launches: {operation: how often}"""
    steps = rounds(one, [prompt], 4, cache=cache)
    next(steps)
    return count(lambda: next(steps))


host = {name: a_round(one).total() for name, one in (("eager", model), ("recorded", replayed))}
assert host["recorded"] < host["eager"] / 3

# %% jupyter={"source_hidden": true}
loop = host["eager"] - launches["all"]
figure, ((side,),) = plots.axes(1, 1, width=8, height=2.2)
side.barh(list(host), [loop] * 2, color="#808080", label="the loop: draw, verify, append")
passes = [k - loop for k in host.values()]
side.barh(list(host), passes, left=[loop] * 2, color=plots.HUES[0], label="the pass")
side.set(xlabel="operations that the host launches for one token")
side.legend(frameon=False)
print(host, "of which the loop", loop)
figure

# %% [markdown]
# What is left is mostly the loop itself, which decides what is drafted, and draws. The rest copies
# inputs into the recording and the output out of it.
#
# A compiled program saves more than launches: it *fuses*. An addition and the multiplication after it
# become one loop over memory, and nothing is written and read again in between. `python -m lab.bench
# plain --fast` measures the gain in tokens/s. This is the table of
# [BENCHMARKS.md](../lab/BENCHMARKS.md), which also names the machine:

# %% jupyter={"source_hidden": true}
from IPython.display import Markdown

paragraphs = (ROOT / "lab" / "BENCHMARKS.md").read_text(encoding="utf-8").split("\n\n")
Markdown(next(text for text in paragraphs if text.startswith("|") and "ours, recorded" in text))

# %% [markdown]
# ## A wrong program, and how it is caught
#
# Compilers have bugs. The one in torch 2.13 looks for patterns that it can replace by faster code, and
# it takes our attention for one of them: scores, plus a mask, softmax. But here the G query heads that
# share a key are folded into one axis with the T tokens, so the replacement computes other numbers,
# without a warning (pytorch issues 195320 and 195383). `machine/recorded.py` turns these patterns off,
# and still checks every recording.
#
# Compiling takes minutes on a slow machine, so **the next cell is a simulation**: not the compiler's
# program, but ours with a mistake of that kind. It reads the mask's rows in the order (token, head),
# while the scores have (head, token).

# %% jupyter={"source_hidden": true}
G = c.n_heads // c.n_kv_heads


def confuse(attention, inputs):
    """The inputs of an attention, with the mask in a wrong order."""
    x, cos, sin, mask, store = inputs
    if mask is not None:                                            # (1, 1, 1, T, S)
        T = mask.shape[3]
        mask = mask.repeat_interleave(G, 3).unflatten(3, (G, T))[:, :, 0]       # (1, 1, G, T, S)
    return x, cos, sin, mask, store

# %% jupyter={"source_hidden": true}
class Miscompiled(recorded.Tape):
    def replay(self):
        hooks = [b.attn.register_forward_pre_hook(confuse) for b in model.blocks]
        super().replay()
        [hook.remove() for hook in hooks]

# %% [markdown]
# **Predict:** can this mistake change a pass over a single token? And over two?

# %% jupyter={"source_hidden": true}
def off(T):
    """The largest error of the logits of a block of T tokens, and the largest logit."""
    right = one_pass(model, T)
    hooks = [b.attn.register_forward_pre_hook(confuse) for b in model.blocks]
    wrong = one_pass(model, T)
    [hook.remove() for hook in hooks]
    return float((wrong - right).abs().max()), float(right.abs().max())

# %% jupyter={"source_hidden": true}
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
# A single token has no mask, so it is right; from two tokens on, the logits are wrong. A test of plain
# decoding would pass, and then verification, which reads several tokens, would fail. So `Recorded`
# compares *each* new recording with the eager pass on its first real input, both its output and what it
# writes into the cache. A recording that differs is not used, and that pass stays eager.
#
# What would `Recorded` write without this check?

# %% jupyter={"source_hidden": true}
messages = []
recorded.Tape = Miscompiled
guarded = Recorded(model, "paper", widths=(4,), say=messages.append)
right = generate(model, [prompt], 32)[0][0]
safe = generate(guarded, [prompt], 32, SelfDraft(guarded, exit_subs, 3))[0][0]
limits, recorded.TOLERANCE = recorded.TOLERANCE, dict.fromkeys(recorded.TOLERANCE, torch.inf)
trusting = Recorded(model, "paper", widths=(4,))                # without the check
wrong = generate(trusting, [prompt], 32, SelfDraft(trusting, exit_subs, 3))[0][0]
recorded.Tape, recorded.TOLERANCE = honest, limits
print(*messages[:3], sep="\n")
print("checked:  ", repr(tokenizer.decode(safe)))
print("unchecked:", repr(tokenizer.decode(wrong)))
assert safe == right and (G == 1 or messages and wrong != right)

# %% [markdown]
# The unchecked text reads well, but after a while it is not the text that the model would write. That
# makes the mistake dangerous.
#
# ## What four bits keep
#
# Where a pass waits for bytes, smaller weights help. NF4 (Dettmers et al. 2023) stores four bits per
# weight: the number of one of 16 levels, relative to the largest weight of its group of 64. Weights are
# distributed much like a bell curve, so the levels divide a bell curve into equal shares, and lie close
# together in the middle. They come from a formula, not from data.

# %% jupyter={"source_hidden": true}
from machine.quant import BLOCK, KINDS, codebook, quantise, size

levels = codebook()
w = torch.cat([b.mlp.gate_up.flatten() for b in model.blocks]).unflatten(0, (-1, BLOCK))     # (groups, 64)
scaled = (w / w.abs().amax(1, keepdim=True)).flatten()
figure, ((side,),) = plots.axes(1, 1, width=8, height=2.8)
side.hist(scaled[:: max(1, len(scaled) // 200_000)].numpy(), bins=120, density=True, color="#c8d8e8")
side.vlines(levels, 0, 0.5, color=plots.HUES[1], lw=2)
side.set(xlabel="weight, relative to the largest of its group of 64", yticks=[],
         title="blue: this model's weights; orange: the 16 levels")
assert len(levels) == 16 and float(levels[7]) == 0 and float(levels.abs().max()) == 1
figure

# %% [markdown]
# The peaks at both ends are the largest weight of each group. How much of a matrix is lost?

# %% jupyter={"source_hidden": true}
half, _ = checkpoint.load(MODEL, "cpu", torch.bfloat16)
twins = {kind: quantise(model, kind) for kind in KINDS}
packed = {kind: quantise(half, kind) for kind in KINDS}
paths = {"wqkv": "attn", "wo": "attn", "gate_up": "mlp", "down": "mlp"}
lost = {kind: {} for kind in KINDS}
for kind, twin in twins.items():
    for name, part in paths.items():
        both = ([getattr(getattr(b, part), name) for b in one.blocks] for one in (model, twin))
        lost[kind][name] = sum(float((w - q.full(w.dtype)).norm() / w.norm())
                               for w, q in zip(*both, strict=True)) / L
    before, after = (size(one.blocks) / 1e6 for one in (half, packed[kind]))
    print(f"{kind}: {after:4.1f} MB of blocks instead of {before:.1f};",
          "  ".join(f"{name} off by {error:.2%}" for name, error in lost[kind].items()))
assert all(0.08 < error < 0.1 for error in lost["nf4"].values()) or not SHIPPED

# %% [markdown]
# An error of nine percent sounds large. But in a sum over many weights the errors partly cancel, and
# what counts is what the model *predicts*. A copy in few bits can even draft for the model, without
# training. So we measure how often its greedy token is the model's own (alpha), on three stories, and
# what it costs (c): the bytes that it reads, relative to a pass in bfloat16.
#
# **Predict:** which drafts best for the fewest bytes: the first blocks as they are, all blocks in four
# bits, or the first blocks in four bits?

# %%
from search import Teacher

stories = [checkpoint.encode(tokenizer, line["text"], c.bos)[:200] for line in read_prompts("stories")[:3]]
teachers = [Teacher(model, ids) for ids in stories]
steps = sorted({max(1, round(L * share)) for share in (0.1, 0.25, 0.5, 0.75, 1)})
points = {}


def acceptance(teacher, one, subs):
    """How likely the first token is accepted after each place, where another model drafts."""
    x = one.run(one.embed(teacher.tokens), Placement.span(0, teacher.p.shape[1]), sublayers=subs)
    return teacher.overlap(teacher.probs(one.unembed(x)))


for kind, one in {"as it is": model, **twins}.items():
    bytes_of = byte_costs(packed.get(kind, half))
    points[kind] = []
    for E in steps:
        subs = early_exit(L, E)
        alpha = float(torch.cat([acceptance(t, one, subs) for t in teachers]).mean())
        points[kind].append((bytes_of.step(subs) * bytes_of.whole / byte_costs(half).whole, alpha))

# %%
from control import best_gamma, expected_speedup

speeds = {}
for kind, row in points.items():
    for E, (c_bytes, alpha) in zip(steps, row, strict=True):
        speeds[kind, E] = expected_speedup(alpha, best_gamma(alpha, c_bytes), c_bytes)
    E = max(steps, key=lambda E: speeds[kind, E])
    (c_bytes, alpha), (c_all, alpha_all) = row[steps.index(E)], row[-1]
    print(f"{kind:8} all blocks: alpha {alpha_all:.3f} at c {c_all:.2f}, speed {speeds[kind, L]:.2f}; "
          f"best: {E:2} blocks, alpha {alpha:.2f} at c {c_bytes:.2f}, speed {speeds[kind, E]:.2f}")
if SHIPPED:
    exits = max(speeds["as it is", E] for E in steps)
    best = max(speeds, key=speeds.get)
    assert best[0] != "as it is" and best[1] < L
    assert exits < speeds["nf4", L] < speeds[best] < exits + 0.3

# %% tags=["gallery"] jupyter={"source_hidden": true}
figure, ((side,),) = plots.axes(1, 1, width=7, height=4)
for (kind, row), hue in zip(points.items(), plots.HUES, strict=False):
    side.plot(*zip(*row, strict=True), color=hue, marker="o", label=kind)
side.plot([0, 1], [0, 1], color="#808080", ls="--", lw=1, label="alpha = c: no gain")
side.set(xlabel="c: bytes per drafted token, relative to a bfloat16 pass", ylabel="alpha",
         xlim=(0, 1.05), ylim=(0, 1.05), title=f"drafting with the first {', '.join(map(str, steps))} blocks")
side.legend(frameon=False, loc="lower right")
assert points["as it is"][-1][1] == 1 and points["int8"][-1][1] > 0.9
figure

# %% [markdown]
# Both at once, the first blocks in few bits, but by little. At the same c, all blocks in four bits are
# right far more often than an exit of the model as it is. But the first blocks are cheaper still, so that
# the best gains hardly differ. The output head, which stays in 16 bits, is most of what the cheapest
# drafts read. (Say which pass you mean: against one in float32, the copies' c would be little more than
# half as large, and they would seem to win clearly.)
#
# The picture counts bytes. By the *clock*, such a draft gains only where a product reads the few bits
# directly. On a CPU torch has one for int8 and one for int4, in bfloat16. For NF4 the whole matrix is
# rebuilt each time: there four bits save memory and no time. (And a copy needs memory of its own, while
# an early exit needs none.)
#
# So `--draft int4` keeps all blocks, and puts the output head in four bits, too. It is so near to the
# model that it needs no cache: it reads the model's keys, writes rough ones for its own tokens, and the
# pass that verifies them overwrites these. If nearly all is accepted, a round of $\gamma$ tokens brings
# $\gamma + 1$ for $\gamma c + 1$ passes, which is at most $1 / c$. So what counts is c, and three to five
# tokens are enough. For a large model without trained heads, `auto` has it among its candidates.
#
# ## Two processes, one text
#
# A model that is too large for one device can be split. Each process keeps some heads of every
# attention and some columns of every MLP. Twice per block, an all-reduce adds up their results, so that
# every process has the full state again. `torchrun` starts the processes.

# %%
from machine.parallel import Part

share = [checkpoint.load(MODEL, "cpu", torch.float32, part=Part(rank, 2))[0] for rank in range(2)]
for rank, half in enumerate(share):
    print(f"process {rank}: {size(half.blocks) / 1e6:5.1f} of {size(model.blocks) / 1e6:.1f} MB of blocks,",
          f"wqkv {tuple(half.blocks[0].attn.wqkv.shape)} of {tuple(model.blocks[0].attn.wqkv.shape)}")

# %% jupyter={"source_hidden": true}
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
# The text is the same as that of one process (the cell checks it). Do not read its tokens/s as a gain:
# the two processes share one memory. On several GPUs each reads from its own.
#
# Here is a model of 70 billion parameters in bfloat16, on paper. Each device reads its share of the
# weights. Then all of them wait for one another, 2 L + 2 times per token. How long one all-reduce takes
# is assumed: 10 to 50 microseconds.

# %%
SUMS = 10e-6, 50e-6                                             # seconds per all-reduce
large = replace(SHAPES["Llama 3.1 8B"], dim=8192, n_layers=80, n_heads=64, hidden_dim=28672)
worlds = 1, 2, 4, 8
shares = [1e3 * reading(large) / world for world in worlds]
waiting = [[1e3 * each * (2 * large.n_layers + 2) * (world > 1) for world in worlds] for each in SUMS]
for world, share, *waits in list(zip(worlds, shares, *waiting, strict=True))[1:]:
    fast, slow = (shares[0] / (share + wait) for wait in waits)
    print(f"{world} devices are {fast:.1f} times as fast as one, or {slow:.1f} with the slower all-reduce")

# %% jupyter={"source_hidden": true}
figure, ((side,),) = plots.axes(1, 1, width=7, height=3)
for k, (each, waits) in enumerate(zip(SUMS, waiting, strict=True)):
    at = [i + 0.4 * k - 0.2 for i in range(4)]
    shown = side.bar(at, shares, 0.36, color=plots.HUES[1], label="reading" if k == 0 else None)
    side.bar(at, waits, 0.36, bottom=shares, color=(plots.HUES[0], plots.HUES[5])[k],
             label=f"waiting, {1e6 * each:.0f} us per all-reduce")
side.set_xticks(range(4), [f"{world} device{'s' * (world > 1)}" for world in worlds])
side.set(ylabel="ms per token, on paper")
side.legend(frameon=False)
figure

# %% [markdown]
# The reading shrinks with each device, the waiting does not.
#
# **Try it:** set `SUMS = 1e-6, 10e-6`. How near to eight do you get?
#
# ## The same text, to the bit
#
# The proof of [notebook 4](04_speculative_decoding.ipynb) is about distributions. A machine rounds, and
# how it rounds depends on the shape of a pass. In float32 it hardly ever matters. In bfloat16, two
# tokens are often so close that one bit decides between them, and from there on the texts differ. We read
# the same text in blocks of 1, 2, 4 and 8 tokens, and compare rows of logits, bit by bit, with those of a
# block of 8.

# %% jupyter={"source_hidden": true}
tokens = torch.tensor([prompt + generate(model, [prompt], 48)[0][0]])[:, :48]
thick = KVCache(half.c, 1, 64, half.attention_dtype())
prefill(half, tokens, thick)


def row(start, T, end):
    """The logits after token `start`, read in a block of T; `end`: how many slots the pass reads."""
    at = Placement.span(start, start + T)._replace(same=False, end=end)
    return half.unembed(half.run(half.embed(tokens[:, start : start + T]), at, thick))[0, 0]


for reads in "up to the block", "all slots":
    equal = dict.fromkeys((1, 2, 4), 0)
    for start in range(39, 9, -1):      # backwards: what lies before stays as it is
        ends = {T: 64 if reads == "all slots" else start + T for T in (1, 2, 4, 8)}
        for T in equal:
            equal[T] += torch.equal(row(start, T, ends[T]), row(start, 8, ends[8]))
    print(f"{reads:15}", *(f"{T} of 8: {n} of 30 rows equal" for T, n in equal.items()), sep="   ")

# %% [markdown]
# How many rows are equal differs from machine to machine: a block of another size may take another routine,
# and where a longer sum is cut, the number of slots makes a difference, too
# ([figures of a GPU](../lab/BENCHMARKS.md#on-a-gpu)). So `machine/exact.py` gives every pass the same number
# of rows, by adding dead ones, and lets it read all slots. That settles greedy texts.
#
# When we sample, drafting also spends other random numbers than plain decoding does. In a `Race` they
# belong to places instead: every token v arrives after e_v / p_v, with e_v exponential and drawn by
# seed, position and v, and the first to arrive is written. It is v with probability p_v. The draft runs
# the same race with its q, and a drafted token stays if it won both.
#
# **Predict:** of eight texts, how many does a draft leave as they were: as usual, and made exact?

# %%
from machine.exact import Exact, few_suffice
from sampling import Coins, Race, to_probs

openings = [checkpoint.encode(tokenizer, line["prompt"], c.bos)[:24] for line in read_prompts("stories")[:8]]
made = Exact(half, 2, cut=False) if few_suffice(half, prompt) else Exact(half)


def unchanged(one, temperature, coins):
    def look(logits):
        return to_probs(logits, temperature)

    count = 0
    for seed, opening in enumerate(openings):
        plain, drafted = (generate(one, [opening], 40, drafter, look, coins(seed))[0]
                          for drafter in (None, SelfDraft(one, exit_subs, 3)))
        count += plain == drafted
    return count


for temperature in 0, 0.8:
    usual, exact = unchanged(half, temperature, Coins), unchanged(made, temperature, Race)
    print(f"temperature {temperature}: {usual} of 8 as usual, {exact} of 8 made exact")
    assert exact == 8

# %% [markdown]
# So no drafter can change a token any more, not even a wrong one: it only costs time. The price is a
# few dead rows in short passes, and a few drafts more that are rejected, since two runs of a race
# agree less often than `verify` accepts. `generate.py --exact` does both.
#
# ## Questions
#
# Each answer is folded, and so is the cell below it that checks the answer.
#
# **1.** How many operations are launched for a block of four tokens, compared with one token?
#
# <details><summary>Answer</summary>
# About as many: a product of four rows is one launch, too. A longer block also needs a mask, which
# takes a few launches, and copies where tokens and heads change places. So verifying a draft is cheap
# even where only launches count.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
more = {T: count(lambda T=T: one_pass(model, T)).total() for T in (1, 4)}
assert more[4] < 1.4 * more[1]
print(f"{more[4]} for four tokens, {more[1]} for one")

# %% [markdown]
# **2.** NF4 takes 4.127 bits per weight (four, and its part of the scales) instead of the 16 of
# bfloat16. Is the whole model 3.88 times smaller?
#
# <details><summary>Answer</summary>
# No. Embeddings, output head and norms stay as they are, and in a small model with a large vocabulary
# they are a large part.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
smaller = size(half) / size(packed["nf4"])
blocks = size(half.blocks) / size(packed["nf4"].blocks)
assert smaller < blocks <= 16 / 4.1
print(f"the whole model is {smaller:.2f} times smaller, its blocks {blocks:.2f} times")

# %% [markdown]
# **3.** A copy drafts with alpha = 0.95 and c = 0.3. What is its best speed-up, and with which gamma?
# And a draft with alpha = 0.8 at half that cost?
#
# <details><summary>Answer</summary>
# 2.18 with gamma 8, and 2.11 with gamma 5. At half the cost, a draft that is rejected four times as
# often gains almost as much.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
for alpha, cost in ((0.95, 0.3), (0.8, 0.15)):
    gamma = best_gamma(alpha, cost)
    print(f"alpha {alpha}, c {cost}: {expected_speedup(alpha, gamma, cost):.2f} times with gamma {gamma}")
    assert round(expected_speedup(alpha, gamma, cost), 2) == {0.95: 2.18, 0.8: 2.11}[alpha]

# %% [markdown]
# Next: [a real model](11_a_real_model.ipynb), which was not trained for drafting. Does it pay there?
#
# In the lab: [beyond](../lab/notebooks/beyond.ipynb), four ideas rebuilt small.
