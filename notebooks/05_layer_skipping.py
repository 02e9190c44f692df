# %% [markdown]
# # 5. Layer skipping: a draft is a shorter list
#
# The model drafts for itself with some of its own sub-layers. No second model is needed, and no second cache.
# This notebook asks which sub-layers: how often would their guesses be accepted, what do they cost, when does
# it pay, and who decides while a text is being written?
#
# > **The one thing to remember: a draft is a subsequence of `range(2L)`, and it gains only where alpha > c.**
#
# Before it: [4, speculative decoding](04_speculative_decoding.ipynb). After it: [6, search](06_search.ipynb).

# %%
# %run start.py
MODEL = ROOT / "weights" / "stories-llama"      # or a folder with your own Llama or Gemma-2

# %%
import torch

import checkpoint
from notebooks import plots

torch.set_grad_enabled(False)
model, tokenizer = checkpoint.load(MODEL, dtype=torch.float32)
c, device, L = model.c, model.tok.device, model.c.n_layers
print(f"{L} blocks, so sub-layers 0 to {2 * L - 1}: even ones are attentions, odd ones are MLPs")

# %% [markdown]
# ## Three ways to say which sub-layers draft
#
# - **Early exit** (LayerSkip: Elhoushi et al. 2024): the first E blocks, `range(2 * E)`.
# - **A skip set** (Draft & Verify: Zhang et al. 2023): any attentions and MLPs may be left out.
# - **Nothing skipped**: the draft is the model itself. It is always accepted and saves nothing.
#
# All are lists. What stands before the first gap is computed exactly as the whole model would compute it, so
# the check need not repeat it. The library calls that the *shared prefix*.

# %%
from layerskip import early_exit, without, shared_prefix

middle = range(max(1, L // 3), L - L // 3)
drafts = {"the whole model": list(range(2 * L)),
          f"exit after block {max(1, L // 4)}": early_exit(L, max(1, L // 4)),
          "middle attentions skipped": without(L, attn=middle),
          "middle blocks skipped": without(L, attn=middle, mlp=middle),
          "every second block": without(L, attn=range(1, L, 2), mlp=range(1, L, 2))}
for name, subs in drafts.items():
    print(f"{name:26} {len(subs):3} of {2 * L} sub-layers, of which {shared_prefix(subs)} are shared")

# %%
figure, ((side,),) = plots.axes(1, 1, width=11, height=2.4)
for y, subs in enumerate(drafts.values()):
    shared = shared_prefix(subs)
    for i in range(2 * L):
        hue = "#e8e8e8" if i not in subs else plots.HUES[2] if i < shared else plots.HUES[i % 2]
        hatch = None if i in subs else "////"
        side.bar(i, 0.8, bottom=y - 0.4, width=0.9, color=hue, hatch=hatch, ec="white")
side.set_yticks(range(len(drafts)), drafts)
side.invert_yaxis()
side.set(xlabel="sub-layer",
         title="green: shared with the check; blue: attention, orange: MLP after a gap; pale: skipped")
figure

# %% [markdown]
# ## How often would a guess be accepted?
#
# One could decode and count. But there is a cheaper way that needs no decoding. Take a text, run the whole
# model over it once, and keep all states. Then ask, *for every position at once*: if a draft began here, what
# would its first guess be, and how likely would it be accepted? That is the sum of min(p, q) (Leviathan et
# al. 2023, Corollary 3.6). `search.Teacher` does this.
#
# For an early exit it is easy to check by hand: its guess is the best token of the state after E blocks.

# %%
from search import Teacher
from support.files import read_prompts

story = checkpoint.encode(tokenizer, read_prompts("stories")[0]["text"], c.bos)[:160]
teacher = Teacher(model, story)                                 # greedy: p and q are one-hot
E = max(1, L // 3)
best = model.unembed(teacher.states[2 * E]).argmax(-1)          # after E blocks
naive = (best == model.unembed(teacher.states[-1]).argmax(-1)).double()[0].cpu()
assert torch.equal(naive, teacher.acceptance(early_exit(L, E)))
print(f"exit after block {E}: {float(naive.mean()):.0%} of the first guesses would be accepted")

# %% [markdown]
# **Predict:** which single sub-layer is it worst to leave out? An early or a late one, an attention or an
# MLP?

# %%
exits = [float(teacher.acceptance(early_exit(L, e)).mean()) for e in range(1, L + 1)]
single = [float(teacher.acceptance([i for i in range(2 * L) if i != gone]).mean()) for gone in range(2 * L)]

# %%
figure, ((left, right),) = plots.axes(1, 2, width=6)
left.plot(range(1, L + 1), exits, color=plots.HUES[0], marker="o", label="alpha of the exit")
left.plot([0, L], [0, 1], color="#808080", ls=":", label="share of the blocks")
left.set(xlabel="exit after block", ylabel="alpha", ylim=(0, 1.02))
left.legend(frameon=False)
for kind, name in enumerate(("attention", "MLP")):
    right.bar(range(kind, 2 * L, 2), single[kind::2], color=plots.HUES[kind], label=name)
right.set(xlabel="the one sub-layer that is skipped", ylabel="alpha of all others", ylim=(0, 1.19))
right.legend(frameon=False, loc="upper right", ncols=2)
figure

# %% [markdown]
# Hardly any single sub-layer is indispensable, except at the very beginning: there the first ones make the
# state that all others read. That is what makes skipping possible. But a draft is cheap only if it skips
# many of them, and then the damage adds up.
#
# ## What does a guess cost?
#
# Where tokens are written one at a time, reading the weights takes the time. So the cost of a drafted step is
# the share of the weights that it reads: its sub-layers **and the head**, which turns the state into logits.

# %%
from control import weight_costs

costs = weight_costs(c)
c_exits = [costs.step(early_exit(L, e)) for e in range(1, L + 1)]
E = max(1, L // 6)
share = sum(costs.sublayers[: 2 * E]) / costs.whole
assert abs(share + costs.head / costs.whole - c_exits[E - 1]) < 1e-9
print(f"exit after block {E}: sub-layers {share:.2f} + head {costs.head / costs.whole:.2f} = "
      f"c {c_exits[E - 1]:.2f}")

# %% [markdown]
# Now both in one plane. A draft gains where it lies above the dashed line alpha = c; the contours say how
# much at the best gamma.
#
# **Predict:** which exit is best? The most accurate, the cheapest, or one between?

# %% tags=["gallery"]
from control import best_gamma, expected_speedup

figure, ((side,),) = plots.axes(1, 1, width=7, height=5)
plots.draw_plane(side, exits[:-1], c_exits[:-1])
side.plot(c_exits[:-1], exits[:-1], color=plots.HUES[0], marker="o", ms=4, lw=1)
for e in {1, 2, L // 4, L // 2, L - 1} & set(range(1, L)):
    side.annotate(f"exit {e}", (c_exits[e - 1], exits[e - 1]), xytext=(7, -9), textcoords="offset points",
                  fontsize=8)
for name in ("middle blocks skipped", "every second block"):
    alpha, cost = float(teacher.acceptance(drafts[name]).mean()), costs.step(drafts[name])
    side.plot(cost, alpha, "s", color=plots.HUES[1])
    side.annotate(name, (cost, alpha), xytext=(4, -17), textcoords="offset points", fontsize=8)
speed = [expected_speedup(a, best_gamma(a, p), p) for a, p in zip(exits, c_exits, strict=True)]
print(f"exit {speed.index(max(speed)) + 1} promises most: {max(speed):.2f} times plain decoding")
figure

# %% [markdown]
# Compare the orange squares, skip sets that were chosen blindly, with the exits of the same cost. How to
# choose with open eyes is the subject of [the next notebook](06_search.ipynb).
#
# ## Predicted and measured
#
# What does each exit promise, and what comes out on this machine? The promise follows the whole series of
# acceptances along the text (`expected_tokens`). The measurement runs drafts and plain decoding in turn, A B
# A B, and takes medians.

# %%
from layerskip import SelfDraft
from speculative import rounds
from support.stats import compare

chosen = sorted({max(1, L // 12), max(1, L // 6), max(1, L // 4), max(1, L // 2)})
series = {e: teacher.acceptance(early_exit(L, e)) for e in chosen}
gammas = {e: max(1, best_gamma(series[e], c_exits[e - 1], most=6)) for e in chosen}
promised = {e: expected_speedup(series[e], gammas[e], c_exits[e - 1]) for e in chosen}
makers = {e: lambda e=e: SelfDraft(model, early_exit(L, e), gammas[e]) for e in chosen}
prompt = story[:24]
timed = compare(lambda d: rounds(model, [prompt], 24, d), {"plain": lambda: None, **makers}, 1, repeats=3)
measured = {e: timed[e].rate / timed["plain"].rate for e in chosen}
assert all(timed[e].outputs == timed["plain"].outputs for e in chosen), "the text is always the same"
for e in chosen:
    print(f"exit {e:2}, gamma {gammas[e]}: promised {promised[e]:.2f}, measured {measured[e]:.2f}")

# %%
figure, ((side,),) = plots.axes(1, 1, width=7, height=3)
for shift, values, hue, name in ((-0.2, promised, plots.HUES[5], "promised by alpha and c"),
                                 (0.2, measured, plots.HUES[0], "measured here, now")):
    side.bar([i + shift for i in range(len(chosen))], [values[e] for e in chosen], 0.4, color=hue, label=name)
side.axhline(1, color="#404040", lw=0.8)
side.set_xticks(range(len(chosen)), [f"exit {e}, gamma {gammas[e]}" for e in chosen])
side.set(ylabel="times plain decoding", ylim=(0, 1.35 * max(*promised.values(), *measured.values())))
side.legend(frameon=False, loc="upper left", ncols=2)
figure

# %% [markdown]
# The promise is about weights that must be read. A small model on a CPU also spends time on everything else:
# Python, small tensors, a block of several tokens that costs more than one. So the clock may say less (or, on
# a text that is easier than the story, more). Tokens per pass travel from machine to machine; seconds do not.
#
# ## Who decides how far to draft?
#
# A fixed gamma is a compromise. A *rule* decides anew in each round, and no rule can change the text. We
# trace one over a story, **do no harm**: it estimates alpha from what became of its drafts so far, drafts
# as far as the formula says, and stops where that does not pay. We give it two drafts: the good exit, and a
# useless one, which skips the first half of the model. (`control.Confidence` stops at an unsure token
# instead, and `lab/rules.py` has the rules of other papers.)
#
# **Predict:** how many tokens will the useless draft propose before it is silenced? Will it ever be asked
# again?

# %%
from control import DoNoHarm

subs, cost = early_exit(L, max(1, L // 6)), costs.step(early_exit(L, max(1, L // 6)))

# %%
def traced(rule, sublayers, note, count=60):
    """A run under a rule: for each round what was drafted, what was kept, and what `note(rule)` says."""
    seen = []
    for _, r in rounds(model, [prompt], count, SelfDraft(model, sublayers, rule)):
        seen.append((int(r.proposed), int(r.accepted), note(rule)))
    return [list(column) for column in zip(*seen, strict=True)]


def draw_trace(side, drafted, kept):
    side.bar(range(len(drafted)), drafted, 1, color="#56b4e9", label="drafted")
    side.bar(range(len(kept)), kept, 0.6, color=plots.HUES[0], label="accepted")
    side.set(xlabel="round", ylabel="tokens")

# %%
bad = list(range(L, 2 * L))
figure, sides = plots.axes(2, 2, width=6, height=2.5)
for row, (name, sublayers) in zip(sides, (("a good exit", subs), ("a useless draft", bad)), strict=True):
    price = costs.step(sublayers)
    drafted, kept, mean = traced(DoNoHarm(price, gamma=6), sublayers, lambda rule: rule.seen[0].mean())
    draw_trace(row[0], drafted, kept)
    row[0].set_title(name)
    row[1].plot(mean, color=plots.HUES[1], label="estimate of alpha")
    row[1].axhline(price, color="#808080", ls=":", label="c")
    row[1].set(xlabel="round", ylim=(0, 1.02))
    print(f"{name}: {sum(drafted)} drafted in {len(drafted)} rounds, {sum(kept)} accepted")
sides[0][1].legend(frameon=False, fontsize=8)
figure

# %% [markdown]
# A silenced draft is asked again now and then, for a single guess: the text may have become easier.
#
# ## The head, and a smaller draft vocabulary
#
# A drafted step pays for the whole head, although most tokens of the vocabulary are never guessed. The fewer
# sub-layers draft and the larger the vocabulary is, the more that weighs. Here is the head's part of c for
# the shapes of two known models, too (Llama 3: 128,256 tokens; Gemma-2: 256,000).

# %%
from model import Config

shapes = {"this model": c,
          "Llama-3-8B": Config(128_256, 4096, 32, 32, 8, 128, 14_336),
          "Gemma-2-9B": Config(256_000, 3584, 42, 16, 8, 256, 14_336)}
for name, shape in shapes.items():
    parts = weight_costs(shape)
    step = parts.step(early_exit(shape.n_layers, shape.n_layers // 4))
    print(f"{name:11} exit after a quarter: c = {step:.2f}, of which the head {parts.head / parts.whole:.2f}")

# %% [markdown]
# So let the draft choose among the n most frequent tokens only. The check uses the whole vocabulary as
# before, so the text stays exact. Guesses outside of the n become impossible: alpha falls a little, c falls,
# too.
#
# **Predict:** how many tokens cover most of what this draft would say?

# %%
from layerskip import ShortHead

counts = torch.zeros(c.vocab_size)
for line in read_prompts("stories")[1:]:                        # other stories than the one we score on
    ids = torch.tensor(checkpoint.encode(tokenizer, line["text"], c.bos))
    counts += torch.bincount(ids, minlength=c.vocab_size)
frequent = counts.argsort(descending=True, stable=True).tolist()
sizes = [n for n in (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192) if n < c.vocab_size] + [c.vocab_size]
short = early_exit(L, max(1, L // 6))
alphas = [float(teacher.acceptance(short, ShortHead(model, frequent[:n])).mean()) for n in sizes]
prices = [costs.step(short, n / c.vocab_size) for n in sizes]   # n of the V rows of the head
for size, alpha, price in zip(sizes, alphas, prices, strict=True):
    print(f"{size:6} tokens: alpha {alpha:.2f}, c {price:.2f}")

# %% [markdown]
# Once more by hand: the best token *among the n*, and how often it is the best one of the whole model.

# %%
said = model.unembed(teacher.states[len(short)])[0]             # (T, V): what the draft would say
wanted = model.unembed(teacher.states[-1])[0].argmax(-1)
few = torch.tensor(frequent[:512], device=device)
naive = (few[said[:, few].argmax(-1)] == wanted).double().cpu()
assert torch.equal(naive, teacher.acceptance(short, ShortHead(model, frequent[:512])))

# %%
figure, ((left, right),) = plots.axes(1, 2, height=3)
left.plot(sizes, alphas, color=plots.HUES[0], marker="o", label="alpha")
left.plot(sizes, prices, color=plots.HUES[1], marker="s", ls="--", label="c")
left.set(xlabel="tokens the draft may say", xscale="log", ylim=(0, 1))
left.legend(frameon=False, loc="upper left")
gain = [expected_speedup(a, best_gamma(a, p), p) for a, p in zip(alphas, prices, strict=True)]
right.plot(sizes, gain, color=plots.HUES[2], marker="o")
right.set(xlabel="tokens the draft may say", xscale="log", ylabel="best promised speed-up")
figure

# %% [markdown]
# ## Why a published experiment came out slower
#
# A searched skip set for Gemma-2 9B (repository ccs96307/fast-llm-inference) was measured at alpha .41 and c
# .61: 24.1 tokens a second, where plain decoding made 29.7.

# %%
assert best_gamma(0.41, 0.61) == 0
measured_there = 24.1 / 29.7
assert abs(measured_there - 0.81) < 0.005
for gamma in range(1, 4):
    print(f"gamma {gamma}: the formula promises {expected_speedup(0.41, gamma, 0.61):.2f}")
print(f"measured: {measured_there:.2f}; to break even at this price, alpha would have to be 0.61")

# %% [markdown]
# No gamma helps: alpha lies below c. Nothing is wrong with the program, and the text was right. The draft was
# just not worth its price: a model that was not trained to be left early needs most of its layers to speak.
#
# ## Two families, and what the training recipe is worth
#
# Left, the exits of the shipped Llama beside the shipped Gemma-2, over the share of the blocks. Right, two
# small twins that differ only in training: one with LayerSkip's recipe (layers dropped at random, and a loss
# at the exits), one without. Their figures come from `weights/twin.json`.

# %%
import json

gemma, words = checkpoint.load(ROOT / "weights" / "stories-gemma2", device, torch.float32)
line = checkpoint.encode(words, read_prompts("stories")[0]["text"], gemma.c.bos)[:160]
other = Teacher(gemma, line)
layers = gemma.c.n_layers
gemma_exits = [float(other.acceptance(early_exit(layers, e)).mean()) for e in range(1, layers + 1)]
twins = json.loads((ROOT / "weights" / "twin.json").read_text(encoding="utf-8"))
for kind, table in twins["recipe"]["files"].items():
    assert table["agreement"][0] > twins["plain"]["files"][kind]["agreement"][0]

# %%
figure, ((left, right),) = plots.axes(1, 2)
left.plot([e / L for e in range(1, L + 1)], exits, color=plots.HUES[0], marker="o", label=Path(MODEL).name)
left.plot([e / layers for e in range(1, layers + 1)], gemma_exits, color=plots.HUES[1], marker="s",
          label="stories-gemma2")
for name, hue, mark in (("recipe", plots.HUES[2], "o"), ("plain", plots.HUES[3], "s")):
    runs = torch.tensor([table["agreement"] for table in twins[name]["files"].values()])
    share = [(e + 1) / runs.shape[1] for e in range(runs.shape[1])]
    right.plot(share, runs.mean(0), color=hue, marker=mark, label=f"trained with the {name}"
               if name == "recipe" else "plain twin")
    right.fill_between(share, runs.min(0).values, runs.max(0).values, color=hue, alpha=0.15, lw=0)
for side, title in ((left, "alpha of each exit"), (right, "the twins (band: all kinds of text)")):
    side.set(xlabel="share of the blocks", ylabel="alpha", ylim=(0, 1.02), title=title)
    side.legend(frameon=False)
figure

# %% [markdown]
# On every kind of text the first exit agrees with the whole model more often where the recipe was used. That
# is what the recipe buys.
#
# ## Questions
#
# **1.** Two drafts have four sub-layers each, but one of them leaves out sub-layer 0. Which one makes the
# check cheaper?
#
# <details><summary>Answer</summary>
# The one that keeps sub-layer 0: its shared prefix is longer, and the check skips what the draft has
# computed. (The formula ignores this; it is a gain on top.)
# </details>

# %%
assert shared_prefix([0, 1, 2, 3]) == 4 and shared_prefix([1, 2, 3, 4]) == 0
print("four sub-layers less to check, or none")

# %% [markdown]
# **2.** Doubling the vocabulary: does it make an early exit more or less attractive?
#
# <details><summary>Answer</summary>
# Less. The head is paid for in each drafted step, so c grows for a small draft, while the layers saved are
# the same.
# </details>

# %%
from dataclasses import replace

large = weight_costs(replace(c, vocab_size=2 * c.vocab_size))
assert large.step(early_exit(L, 1)) > costs.step(early_exit(L, 1))
print(f"c of exit 1: {costs.step(early_exit(L, 1)):.2f} -> {large.step(early_exit(L, 1)):.2f}")

# %% [markdown]
# **3.** A rule stops a draft after a token of low confidence. Why *after* it, and not before?
#
# <details><summary>Answer</summary>
# The token has been drawn from q. If it were thrown away for what it is, the guesses that remain would not be
# distributed as q, and the text would not be exact (question 2 of the notebook before).
# </details>

# %%
from control import Confidence

strict = SelfDraft(model, subs, Confidence(1.1, 4))
lengths = [int(r.proposed) for _, r in rounds(model, [prompt], 30, strict)]
assert set(lengths[:-1]) == {1}                                 # no token is confident enough: one is kept
print("with a threshold that nobody reaches each draft has one token:", lengths)

# %% [markdown]
# **4.** The estimate of alpha is exactly c. Draft or not?
#
# <details><summary>Answer</summary>
# It makes no difference: one guess adds alpha tokens for c passes, and (1 + alpha) / (1 + c) is 1. Two
# guesses already lose.
# </details>

# %%
assert abs(expected_speedup(0.3, 1, 0.3) - 1) < 1e-12 and expected_speedup(0.3, 2, 0.3) < 1
print([round(expected_speedup(0.3, gamma, 0.3), 3) for gamma in range(4)])

# %% [markdown]
# Next: [search](06_search.ipynb). There are 2^(2L) skip sets. Which one is best?
