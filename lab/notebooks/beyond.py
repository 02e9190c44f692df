# %% [markdown]
# # Beyond: four ideas, rebuilt small
#
# Four more ways to draft, or to need fewer passes. M2R2 has no public code. ProphetNet and
# HAMburger need training on a scale that few people can repeat. The last idea is a draft that reads
# only a part of the text. Here each of them is a **reconstruction**: our reading of the paper, at a
# scale where one can look at it. None of the figures below speaks for the original. But each paper
# leaves a question open that we can try to answer.
#
# | system | the question |
# |---|---|
# | M2R2 (arXiv 2502.02040) | is an accelerated row better than an adapter with as many weights? |
# | ProphetNet (arXiv 2001.04063) | does it help a model to predict more than the next token? |
# | HAMburger (arXiv 2505.20438) | what is left of its speed where its guesses are checked? |
# | a sparse self-draft (MagicDec, arXiv 2408.11049) | how much of the text must a draft see? |
#
# > **Whatever drafts, the check is the same, and so is the text. What is not
# > checked is another model.**
#
# The training runs in this notebook take seconds, and only show how each idea works. The answers
# come from runs that train for half an hour. They are quoted at the end of each section, and
# [the lab book](../BOOK.md#beyond) has their commands.
#
# You need notebooks [6](../../notebooks/06_layer_skipping.ipynb) and
# [9](../../notebooks/09_trained_heads.ipynb). About 25 minutes.

# %%
# %run start.py
MODEL = ROOT / "weights" / "stories-llama"      # or a folder with your own Llama or Gemma-2
SHIPPED = MODEL.name == "stories-llama"         # the text's figures are checked for this model

# %%
import json

import torch
from IPython.display import Markdown

import checkpoint
from lab import train
from lab.bench import beyond
from notebooks import plots

model, tokenizer = checkpoint.load(MODEL, dtype=torch.float32)
c = model.c
device = model.tok.device
L = model.c.n_layers
LONG = ROOT / "lab" / "notebooks" / "beyond.json"   # written by `python -m lab.bench beyond`
long = json.loads(LONG.read_text(encoding="utf-8")) if LONG.is_file() else {}
later = Markdown("*The long run has not been made yet.*")

# %% [markdown]
# ## The text to learn from
#
# Three of the four learn, and they learn from text that the model writes itself, drawn from its own
# distribution. So its training data is not needed, and the head learns the kind of text that it
# will have to draft.

# %%
length = min(64, c.max_len)
text = beyond.own_text(model, tokenizer, 3000, 1000, length)
held_out = text.valid[beyond.OWN].long().to(device)             # another text, to measure on
print(f"{len(text.train[beyond.OWN]):,} tokens to learn from, "
      f"{len(held_out):,} to measure on. It begins:")
print(tokenizer.decode(held_out[:60].tolist()))

# %% [markdown]
# ## M2R2: a row that runs ahead
#
# A token's state changes from block to block, slowly. M2R2 (Mixture of Multi-rate Residuals) puts a
# second row beside it, which runs through the *same* first blocks, with a small low-rank map added
# to each of them. It is trained to be, after block i, where the ordinary row will be much further
# up. After E blocks it should stand where the ordinary one stands at the end, and there it drafts.
# (In a mixture of experts it would also tell early which experts to load. Our models have none, so
# this part has no counterpart here.)
#
# The fast row reads the ordinary keys and values, and writes nothing. So the cache stays the
# target's. The ordinary row is handed over to the check, as in any early exit.
#
# Kangaroo's adapter (one attention on top of the exit) is its natural rival: we give both the same
# number of weights. Before any training M2R2's row is the ordinary one, so that it drafts what a
# bare exit drafts. And whatever it has learnt, the check makes it exact:

# %%
from lab.m2r2 import M2R2
from methods.kangaroo import Kangaroo
from speculative import generate

E = max(1, L // 6)
prompt = checkpoint.encode(tokenizer, "Once upon a time", c.bos)
plain, passes = generate(model, [prompt], 32)
heads = {"bare exit": M2R2(model, E, 0), "Kangaroo": Kangaroo(model, E), "M2R2": M2R2(model, E)}
for name, head in heads.items():
    drafted, fewer = generate(model, [prompt], 32, head.drafter(3))
    assert drafted == plain
    print(f"{name:10} {head.count():8,} weights of its own, {fewer} passes instead of {passes}")

# %% [markdown]
# Which is better, once both have learnt from the same 100,000 tokens? Here are the figures of a
# stored run ([the lab book](../BOOK.md#beyond) has its command):

# %% jupyter={"source_hidden": true}
from lab.figures import stored

for name, row in stored("m2r2").items():
    print(f"{name:36} alpha {row['alpha']:.3f}, tau {row['tau']:.2f}, "
          f"speed-up by weights {row['speed-up']:.2f}")

# %% [markdown]
# After the earliest exits Kangaroo's adapter is right more often than M2R2's row, and on a model
# without trained exits by far. After exits 4 and 6 the two cannot be told apart. So the answer is
# no.
#
# ## ProphetNet: to predict more than one token
#
# A language model learns to say the next token. ProphetNet trains it in several *streams*. The
# first is the model as it is. For each of the others, an extra row for each token starts from an
# embedding of its own, and predicts the token after the next, the one after that, and so on. It
# sees what its token sees, and no other row sees it. It was published as a way to write better
# texts, not to write faster. But a row that looks ahead is just what drafts in `Transfer` with t =
# 0 (lab/transfer.py).
#
# In [lucidrains' repository](https://github.com/lucidrains/speculative-decoding) a question about a
# relative of this is open: does the loss of the streams help the model's own? Only a comparison can
# tell: the same tiny model, from the same seed, on the same batches, with one stream (plain
# training) and with three. Two seeds, because the seed alone also moves the loss.
#
# **Predict:** will the gap between one and three streams be larger than that between two seeds?

# %%
small = "--layers 2 --dim 64 --hidden 176 --batch 4 --context 64 --warmup 5".split()
runs = {(n, seed): beyond.prophet(text, device, n, seed, 8192, *small)
        for seed in range(2) for n in (1, 3)}
losses = {key: train.evaluate(run.model, held_out, 64, 1024)["loss"][-1]
          for key, run in runs.items()}
for (n, seed), loss in losses.items():
    print(f"{n} stream{'s' * (n > 1)}, seed {seed}: {loss:.3f} nats per token of held-out text")
streams = [losses[3, seed] - losses[1, seed] for seed in range(2)]
seeds = [losses[n, 1] - losses[n, 0] for n in (1, 3)]
print("three streams instead of one: {:+.3f}, {:+.3f};".format(*streams),
      "another seed: {:+.3f}, {:+.3f}".format(*seeds))
assert not SHIPPED or min(streams) > max(map(abs, seeds)), "a little more than the seeds differ"

# %% [markdown]
# With three streams the loss is higher with both seeds, and by a little more than the seeds differ.
# That is a hint, but two seeds are few, and the training has hardly begun. The long run has more of
# both:

# %% jupyter={"source_hidden": true}
if SHIPPED and long:
    one, three = ([r[f"loss, seed {seed}"] for seed in range(3)]
                  for r in long["prophet"].values())
    assert min(three) > max(one) + 0.2
Markdown("\n".join(beyond.shown(long["prophet"]))) if long else later

# %% [markdown]
# No: three streams make the model's own loss worse, by far more than a seed does. As drafts they
# do not pay for their rows.
#
# ## HAMburger: several tokens in one place
#
# So far each token had a place of its own in the cache, and took a step of its own to be written.
# HAMburger merges tokens: an *entry* of up to four tokens has one key and one value in each block,
# and one step says all tokens of the next entry. Which tokens belong together? Those that follow
# almost surely: "upon a time" after "Once". The paper cuts by the entropy of the model: an entry
# ends before a token that is hard to predict. "Hard" is relative: a token joins the entry if its
# entropy is below 0.05 nats, or below 0.3 times the largest entropy in the entry so far. So after a
# very hard token, a moderately hard one still joins. This needs no training, and we can look at it.
#
# A small model is hardly ever sure at temperature 1. So we imitate it at temperature 0.5
# (`cooled`).

# %%
from lab.hamburger import SHARE, SURE, BurgerDraft, Hamburger, begins, tune, write

cold = beyond.cooled(model, 0.5)
words = beyond.own_text(cold, tokenizer, 2000, 500, length)
story = words.valid[beyond.OWN][:44].long().to(device)
with torch.no_grad():
    entropy = torch.distributions.Categorical(logits=cold(story[None])).entropy()
entropy = torch.nn.functional.pad(entropy[:, :-1], (1, 0))      # of what each token was drawn from
first = begins(entropy, 4)[0].cpu()
assert (SURE, SHARE) == (0.05, 0.3)
entry = first.cumsum(0) - 1
print(f"{len(story)} tokens in {int(first.sum())} entries")

# %% tags=["gallery"]
figure, ((side,),) = plots.axes(1, 1, width=11, height=3)
hues = [plots.HUES[int(e) % 2] for e in entry]
side.bar(range(len(story)), entropy[0].cpu(), color=hues, width=0.8)
for t, e in enumerate(entry.tolist()):
    side.axvspan(t - 0.5, t + 0.5, color=plots.HUES[e % 2], alpha=0.12, lw=0)
labels = [tokenizer.decode([t]).strip() for t in story.tolist()]
side.set_xticks(range(len(story)), labels, rotation=90, fontsize=8)
side.set(ylabel="entropy, nats", xlim=(-0.6, len(story) - 0.4),
         title="entropy of each token; the colour changes where a new entry begins")
figure

# %% [markdown]
# Then everything learns together: a copy of the model as the *trunk*, an embedder that merges the
# tokens of an entry, a small decoder that says the tokens after the first, and a head that says
# where the entry ends. This is **another model**, and alone it writes another text; that is why it
# is a file of the lab ([hamburger.py](../hamburger.py)) and no part of the library.

# %%
burger = Hamburger(cold, blocks=1)
batches = [words.batch(0, step, 2, 47).long().to(device) for step in range(30)]
learnt = tune(burger, cold, batches, (3e-4, 4e-3))
print(f"KL from the model: {learnt[0][0]:.2f} nats per token, "
      f"after {len(learnt)} steps {learnt[-1][0]:.2f}")
said = sum(write(burger, prompt, 24, 0.3), [])
print("after so little training it writes:", tokenizer.decode(said))

# %% [markdown]
# Now let the untouched model check what a step says. Then it is a drafter like any other, and
# exact. But each of its steps is a pass of a model as large as the target, so a checked step costs
# two passes.

# %%
drafted, fewer = generate(model, [prompt], 32, BurgerDraft(burger, 0.3))
assert drafted == plain
print(f"{fewer} passes of the model, and as many of the trunk, instead of {passes}; the same text")

# %% jupyter={"source_hidden": true}
for confidence, row in stored("hamburger").items():
    print(f"confidence {confidence}: unchecked, it is off by {row['KL alone']:.2f} nats per token")
assert not SHIPPED or all(found["speed-up"] < 1 for found in long.get("hamburger", {}).values())
Markdown("\n".join(beyond.shown(long["hamburger"]))) if long else later

# %% [markdown]
# (The name of a row is the confidence below which an entry ends.) The lower the confidence, the
# more tokens a step says, and the further the text is from the model's. (Even where each step says
# a single token it is not the model, because what the trunk learnt for the sake of the other tokens
# has moved it away.) With the check nothing is left of the speed.
#
# ## A sparse self-draft: to see less
#
# In a long text the cache is larger than the weights, and reading it takes most of a pass. So let
# the whole model draft, but let its attention read only the first few tokens (*sinks*) and a window
# of the last ones. It is a mask, and nothing is trained. Here is the calculation for Llama 3.1 8B
# with a window of 1,024:

# %%
rows = beyond.paper()
figure, ((left, right),) = plots.axes(1, 2, width=5)
at = [1024 * 2**k for k in range(len(rows))]
plots.curves(left, at, {"a pass": [r["GB read"] for r in rows.values()],
                        "a drafted token": [r["c"] * r["GB read"] for r in rows.values()]},
             xscale="log", xlabel="tokens before it", ylabel="GB read", ylim=(0, None))
plots.curves(right, at, {f"if alpha is {a}": [r[f"speed-up if alpha is {a}"] for r in rows.values()]
                         for a in (0.8, 0.9)},
             xscale="log", xlabel="tokens before it", ylabel="speed-up at most")
figure

# %% [markdown]
# This is one text. In a batch each text has a cache of its own, and the weights are read once for
# all: that is the case that MagicDec was made for.
#
# Alpha depends on the text. On ours (too short for a gain, but long enough for a question) we can
# measure it: after each token of the second half of a text, how likely is the first drafted token
# accepted? Large models need the sinks (arXiv 2309.17453); does ours?
#
# **Predict:** which costs more: a window of 8 instead of 64, or to lose the sinks, which are 4
# tokens?

# %%
from search import Teacher

teachers = [Teacher(model, ids) for ids in beyond.long_texts(tokenizer, c, 2)]
size = teachers[0].p.shape[1]
windows = [w for w in (4, 8, 16, 32, 64, 128, 256) if w <= size]
curves = {sinks: {w: torch.stack([beyond.sparse_acceptance(t, sinks, w)[size // 2 :]
                                  for t in teachers]).mean() for w in windows}
          for sinks in (4, 0)}
figure, ((side,),) = plots.axes(1, 1, width=7, height=3.2)
plots.curves(side, windows, {f"{sinks} sinks": list(curve.values())
                             for sinks, curve in curves.items()},
             xlabel="window", ylabel="alpha", xscale="log", ylim=(0, 1.02))
side.set_xticks(windows, windows)
by_sinks = max(curves[4][w] - curves[0][w] for w in windows)
assert not SHIPPED or curves[4][64] - curves[4][8] > 10 * by_sinks
figure

# %% [markdown]
# On this model a window of 8 costs far more than the loss of the sinks.

# %% jupyter={"source_hidden": true}
if SHIPPED and long:
    at_64 = long["sparse"]["64"]
    assert 0.87 < at_64["alpha"] < 0.89 and 0.6 < at_64["not read"] < 0.7
Markdown("\n".join(beyond.shown(long["sparse"]))) if long else later

# %% [markdown]
# On our texts a draft must see much of what came before: even a window of 64, a third of the text,
# costs some of its alpha.
#
# ## Questions
#
# Each answer is folded, and so is the cell below it that checks the answer.
#
# **1.** Can a stream of ProphetNet change what the model says of the next token, while both learn
# in one pass?
#
# <details><summary>Answer</summary>
# Not in that pass: no token sees a row. Only the gradients of the streams change the model, for the
# next step.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
run = runs[3, 0]
batch = text.batch(0, 0, 2, 32).long().to(device)
with torch.no_grad():
    alone = train.losses(run.model, batch, range(2 * run.model.c.n_layers))[0]
    beside = beyond.stream_losses(run.model, run.head, batch)[0]
assert abs(alone - beside) < 1e-4
print(f"loss {float(alone):.4f} alone, {float(beside):.4f} beside two more streams")

# %% [markdown]
# **2.** A HAMburger that has learnt nothing yet never goes on after the first token of an entry.
# What does it write?
#
# <details><summary>Answer</summary>
# The model's own greedy text: an entry of one token is that token's embedding, and the first token
# of an entry comes straight from the trunk.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
fresh = Hamburger(model, blocks=1)
assert sum(write(fresh, prompt, 12, confidence=2.0), []) == plain[0][:12]
print("the same twelve tokens")

# %% [markdown]
# Four ideas, one loop. M2R2 and the sparse draft only draft. ProphetNet's streams change the model
# that they are trained with, and a HAMburger is another model. But whatever drafts, the target
# checks it. A draft that is checked can be as wild as you like: that is the freedom of speculative
# decoding. The figures are in [the lab book](../BOOK.md#beyond), and everything else begins at the
# [README](../../README.md).
