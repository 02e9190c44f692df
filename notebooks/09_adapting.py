# %% [markdown]
# # 9. Adapting: drafts that change while they run
#
# No way of drafting is best for every text. On a story an early exit may predict well, on code it may
# be enough to copy earlier lines, and on some texts nothing helps. A program should find this out
# *while it writes*, and at little cost. This notebook shows what a run reveals for free, two published
# systems that use it (DEL and SWIFT), and a controller that weighs every way of drafting by tokens per
# unit of time.
#
# > **The cost of an experiment is known before it is made. So a program can
# > save up for it, and never lose more than it has saved.**
#
# Before it: [5, layer skipping](05_layer_skipping.ipynb), and [6, search](06_search.ipynb). About 30
# minutes.

# %%
# %run start.py
MODEL = ROOT / "weights" / "stories-llama"      # or a folder with your own Llama or Gemma-2

# %%
import torch

import checkpoint
from model import Placement
from support.files import read_prompts
from control import weight_costs
from notebooks import plots

torch.set_grad_enabled(False)
model, tokenizer = checkpoint.load(MODEL, dtype=torch.float32)
c, L, costs = model.c, model.c.n_layers, weight_costs(model.c)
story = checkpoint.encode(tokenizer, read_prompts("stories")[1]["text"], c.bos)[:120]
prompt = story[:24]
print(f"{L} blocks; a story of {len(story)} tokens, of which {len(prompt)} are the prompt")

# %% [markdown]
# ## What a trace reveals
#
# When the target verifies a draft, its states pass through all blocks. The loop only has to keep them:
# a *trace*. The state after block E is exactly the state of an early exit after E blocks. So the output
# head can compute, for every place of the round, what *every* exit would have drafted there, without
# drafting. DEL calls these tokens *shadow tokens*.
#
# Here are the shadow tokens of all exits along a piece of the story. `Teacher` keeps the states of one
# pass.

# %%
from layerskip import early_exit
from search import Teacher

teacher = Teacher(model, story)                                 # greedy: p and q are one-hot
shadows = torch.stack([model.unembed(teacher.states[2 * e])[0].argmax(-1) for e in range(1, L)])    # (L-1, T)
right = shadows == model.unembed(teacher.states[-1])[0].argmax(-1)
for e in (1, L // 2, L - 1):      # the same as when the exit itself drafts
    assert torch.equal(right[e - 1].double().cpu(), teacher.acceptance(early_exit(L, e)))
print(f"{right.numel()} shadow tokens, of {L - 1} exits at {len(story)} places, from one pass over the text")

# %% [markdown]
# **Predict:** the picture will have a row for each exit and a column for each place. Will it look like
# stripes across (some exits are good), or stripes down (some places are easy)?

# %% jupyter={"source_hidden": true}
piece = slice(24, 64)
figure, ((side,),) = plots.axes(1, 1, width=11, height=3.4)
side.imshow(right[:, piece].cpu(), aspect="auto", cmap="Greys", vmax=1.7, origin="lower")
words = [tokenizer.decode([t]).strip() for t in story[piece.start + 1 : piece.stop + 1]]
side.set_xticks(range(len(words)), words, rotation=90, fontsize=8)
side.set_yticks(range(0, L - 1, 3), range(1, L, 3))
side.set(ylabel="exit after block", title="dark: the exit predicts the token that the whole model predicts")
figure

# %% [markdown]
# Mostly stripes down. Whether a token is predicted right depends more on the place than on the exit:
# many places are right for nearly all exits, and at a few even deep exits are wrong. (The words below
# are those of the story. The model would sometimes write another one, and it is the model that an exit
# has to predict.)
#
# A trace does not reveal everything. A skip set has states of its own: after its first gap, each
# sub-layer gets another input than in a pass of the whole model. What such a set is worth, only its own
# drafts can show.

# %%
from layerskip import without

gap = without(L, attn=[L // 3], mlp=[L // 3])
x = model.embed(torch.tensor([story], device=model.tok.device))
at = Placement.span(0, len(story), x.device)
before, after = (model.run(x, at, sublayers=gap[:n]) for n in (2 * (L // 3), len(gap)))
assert torch.allclose(before, teacher.states[2 * (L // 3)], atol=1e-4)
print("up to its gap the draft has the target's states; at its end they differ by",
      f"{float((after - teacher.states[-1]).norm() / teacher.states[-1].norm()):.0%}")

# %% [markdown]
# ## DEL: alpha of every exit
#
# DEL (arXiv 2504.05598) counts for each exit how many of its shadow tokens are right and wrong. Old
# counts fade by 5 % per round. The counts give alpha of every exit, and DEL drafts with the exit that
# has the highest expected speed. We watch it while it writes.

# %%
from methods.dynamic import DEL
from speculative import rounds

drafter, table, chosen, lengths = DEL(model, gamma=8), [], [], []
for _, r in rounds(model, [prompt], 80, drafter):
    hits, misses = drafter.counts[:2]
    table.append((hits + 1) / (hits + misses + 2))              # (L-1,) DEL's estimates of alpha
    chosen.append(len(drafter.sublayers) // 2 if drafter.rule.most else None)
    lengths.append(int(r.proposed))
table = torch.stack(table)                                      # (rounds, L-1)
print(f"{len(table)} rounds wrote 80 tokens; the exits it chose: {sorted(set(chosen) - {None})}")

# %% [markdown]
# **Predict:** DEL has seen no draft yet when the first round begins. Does it start from nothing? And
# does it choose a deep exit or a shallow one?

# %% jupyter={"source_hidden": true}
figure, ((upper,), (lower,)) = plots.axes(2, 1, width=10, height=2.7)
image = upper.imshow(table.T, aspect="auto", cmap="viridis", vmin=0, vmax=1, origin="lower")
upper.plot([None if e is None else e - 1 for e in chosen], color="white", drawstyle="steps-mid", lw=2)
upper.set_yticks(range(0, L - 1, 3), range(1, L, 3))
upper.set(ylabel="exit after block", title="DEL's estimates of alpha; white: the exit it chose")
figure.colorbar(image, ax=upper)
lower.bar(range(len(lengths)), lengths, 0.9, color=plots.HUES[0])
lower.set(xlabel="round", ylabel="tokens drafted", xlim=(-0.5, len(lengths) - 0.5))
figure

# %% [markdown]
# The table is full from the first column on, since DEL has scored the prompt (of a long prompt, the
# last 32 places). It chooses shallow exits: deep ones have a higher alpha, but cost too much. Its
# estimates change slowly, since its counts cover about twenty rounds. The choice moves between
# neighbours that are nearly equally fast.
#
# Are the estimates right? The next picture compares them, at the end of the run, with the share of
# right shadow tokens in the text that it wrote: in all of it, and in its last 40 tokens.
#
# **Predict:** which of the two will DEL be closer to?

# %%
from speculative import generate

(written,), _ = generate(model, [prompt], 80)
whole = Teacher(model, prompt + written)
true = [float(whole.acceptance(early_exit(L, e))[len(prompt) - 1 :].mean()) for e in range(1, L)]
recent = [float(whole.acceptance(early_exit(L, e))[-40:].mean()) for e in range(1, L)]

# %% jupyter={"source_hidden": true}
figure, ((side,),) = plots.axes(1, 1, width=7, height=3.2)
side.plot(range(1, L), true, color="#808080", marker="o", ms=4, label="in the whole text")
side.plot(range(1, L), recent, color=plots.HUES[0], marker="o", ms=4, ls="--", label="in its last 40 tokens")
side.plot(range(1, L), table[-1], color=plots.HUES[1], marker="s", ms=4, label="DEL's estimate at the end")
side.set(xlabel="exit after block", ylabel="alpha", ylim=(0, 1.02))
side.legend(frameon=False)
figure

# %% [markdown]
# It is close to the last 40 tokens and between the two nearly everywhere: old counts fade, but slowly.
# The end of this text was harder than the rest, and the estimates show it. This is how DEL follows a
# text that changes.
#
# Look at the shape as well. Alpha rises over the first four exits. Then it is flat, with dips at some
# exits, and it rises again in the second half. Between exit 4 and the middle of the model, more blocks
# buy nothing.
#
# There is a price. For each shadow token, the output head must be applied to one more state. A large
# GPU hardly notices, since it reads the head once for all of them. On a CPU the shadow tokens of all
# exits can cost more than the pass itself. So the library's `DEL` can score only a few exits, or score
# only every fourth round.
#
# ## SWIFT: a search on one request
#
# SWIFT (arXiv 2410.06916) searches for sub-layers to skip *on the text that it is writing*. After the
# first tokens, its window, it scores one candidate set per round. Most candidates are random; every
# 25th is chosen by a Gaussian process (notebook 6). The score is the *matchness*: how often the set's
# likeliest token is the next token of the window. A candidate that beats the current set replaces it.
#
# **Predict:** how much will the best matchness improve while 90 tokens are written?

# %%
from lab.swift import SWIFT

swift = SWIFT(model, window=24, gamma=8, widths=())
for _ in rounds(model, [prompt], 90, swift):
    pass
scores = [score for _, score in swift.seen]
tops = [max(scores[: i + 1]) for i in range(len(scores))]
print(f"{len(scores)} sets were scored while 90 tokens were written: the first one {scores[0]:.2f}, "
      f"the best {tops[-1]:.2f}")

# %% jupyter={"source_hidden": true}
figure, ((left, wide),) = plots.axes(1, 2, width=5.5, height=3.2)
left.plot(scores, ".", color="#808080", label="a candidate")
left.plot(tops, color=plots.HUES[0], label="the best so far")
left.set(xlabel="sets scored", ylabel="matchness in the window", ylim=(-0.02, 1.02))
left.legend(frameon=False, loc="lower left")
sets = [swift.seen[0][0], max(swift.seen, key=lambda seen: seen[1])[0]]
grid = [[i in gone for i in range(2 * L)] for gone in sets]
wide.imshow(grid, aspect="auto", cmap="Greys", vmax=1.6)
wide.set_yticks((0, 1), ("the first set", "the best set"))
wide.set(xlabel="sub-layer (dark: skipped)")
figure

# %% [markdown]
# It improves within the first few candidates, and then no more.
#
# **Predict:** the best set skips as many sub-layers as the first one, so its c is nearly the same. How
# much speed-up does the better matchness bring?

# %%
from control import best_gamma, expected_speedup

for name, gone in zip(("the first set", "the best set"), sets, strict=True):
    kept = swift.kept(gone)
    alpha, price = float(whole.acceptance(kept)[len(prompt) :].mean()), costs.step(kept)
    print(f"{name}: alpha {alpha:.2f}, c {price:.2f}, "
          f"speed-up {expected_speedup(alpha, best_gamma(alpha, price), price):.2f}")
print(f"the search itself cost as much as {len(scores) * costs.step(swift.kept(sets[0])):.0f} passes")

# %% [markdown]
# Little, for two reasons. SWIFT's sets keep more than half of the model, so a drafted token is
# expensive, and even the best set gains little. And scoring a set costs about as much as a drafted
# token, so a short text ends before the search has paid for itself. SWIFT was made for long texts, and
# for large models that lose little when blocks are skipped.
#
# ## Pace: weigh everything by time
#
# `Pace`, the library's own controller, answers one question before every draft: *which way of drafting,
# and which length, gives the most tokens for the time?* It can draft nothing, copy earlier text (suffix
# decoding), or use one of several exits, a skip set, or trained heads where there are any. Each gets a
# value, the expected speed:
#
# $$\frac{1 + \alpha + \dots + \alpha^\gamma}{\gamma c + 1}$$
#
# c comes from a table of costs. Alpha of a copy comes from the text, which shows what copies would have
# been worth; those that continue a longer match have an alpha of their own. Alpha of everything else
# comes from its own drafts, so for a drafter that is seldom used it is uncertain. So Pace takes it to be
# one standard deviation above its mean: what is little known is tried, and then it is known. What was
# learnt long ago fades, and so it is tried again. If nothing is at least 5 % faster than plain decoding,
# Pace drafts nothing.
#
# We give it a stream of prompts whose kind changes: two stories, two dialogues, two maths problems, two
# pieces of code, and then all four kinds again.
#
# **Predict:** on which kind will it copy most?

# %%
from collections import Counter

from methods.arms import candidates
from methods.pace import Pace

stream = [(kind, checkpoint.encode(tokenizer, line["prompt"], c.bos)) for first in (0, 4)
          for kind in ("stories", "dialogues", "maths", "code")
          for line in read_prompts(kind)[first : first + 2]]
kinds = [kind for kind, _ in stream]
pace, chosen, tau = Pace(model, candidates(model, costs), costs), [], []
for _, ids in stream:
    before = Counter(pace.chosen)
    (text,), passes = generate(model, [ids], 32, pace, eos=c.eos)
    chosen.append(dict(Counter(pace.chosen) - before))          # {way of drafting: rounds} for this prompt
    tau.append(len(text) / passes)
for kind in dict.fromkeys(kinds):
    ways = sum((Counter(one) for one, its in zip(chosen, kinds, strict=True) if its == kind), Counter())
    print(f"{kind:9}: {ways['suffix'] / ways.total():4.0%} of the rounds copy something")

# %% tags=["gallery"] jupyter={"source_hidden": true}
figure, ((upper,), (lower,)) = plots.axes(2, 1, width=10, height=2.6)
plots.draw_choices(upper, chosen, kinds, plots.hues_of(dict.fromkeys(way for one in chosen for way in one)))
upper.set_title("what Pace chose for each prompt")
lower.bar(range(len(tau)), tau, 0.9, color=plots.HUES[0])
lower.axhline(1, color="#404040", ls="--", lw=1)
lower.set(ylabel="tokens per pass", xlim=upper.get_xlim(), xlabel="prompt (dashed: plain decoding)")
figure

# %% [markdown]
# On code. Stories and dialogues mostly get an exit. Which one depends on what was tried so far, since
# exits 2 and 4 are worth nearly the same: Pace keeps what it has learnt when the next prompt begins.
#
# ## What it may lose
#
# A draft can fail. But its cost is known before the round: each drafted token costs c, and their number
# is fixed by then. Pace keeps a balance. It starts at two passes, the *stake*. Each written token adds
# one pass, which is what it would have cost without drafting, and a small extra, `risk`, of 1 %. Each
# round subtracts what it costs. A round begins only if the balance covers its cost with nothing
# accepted, so the balance never falls below zero. That *is* the guarantee: by its table of costs, Pace
# is never slower than plain decoding by more than 1 % and two passes. By the clock, it holds as far as
# the table is right.
#
# To test it, we give Pace a useless draft: the second half of the model alone. Beside it runs a fixed
# rule that drafts two tokens with it in every round.
#
# **Predict:** how often will Pace try the useless draft in 120 tokens?

# %%
from layerskip import SelfDraft
from methods.arms import self_draft
from methods.pace import STAKE

useless = list(range(L, 2 * L))                                 # the second half of the model, alone
careful = Pace(model, [self_draft("useless", model, useless, costs)], costs)
balances, tokens = [STAKE], [0]
for state, _ in rounds(model, [prompt], 120, careful):
    balances.append(careful.balance)
    tokens.append(len(state.known[0]) - len(prompt))
fixed, cost = [(0, 0.0)], costs.step(useless)
for state, r in rounds(model, [prompt], 120, SelfDraft(model, useless, 2)):
    fixed.append((len(state.known[0]) - len(prompt), fixed[-1][1] + len(r.new[0]) - 1 - 2 * cost))
print(f"rounds: {careful.chosen}; the balance was never below {min(balances):.2f}")

# %% jupyter={"source_hidden": true}
won = [p - STAKE - 0.01 * t for p, t in zip(balances, tokens, strict=True)]
figure, ((left, near),) = plots.axes(1, 2, width=5.5, height=3.2)
for side in (left, near):
    side.plot(tokens, won, color=plots.HUES[0], label="Pace")
    side.plot([0, 120], [-STAKE, -STAKE - 1.2], color="#404040", ls=":", label="the guarantee")
    side.set(xlabel="tokens written", ylabel="passes saved")
left.plot(*zip(*fixed, strict=True), color=plots.HUES[1], ls="--", label="two tokens in every round")
left.legend(frameon=False, fontsize=8)
near.set_title("the same without the fixed rule")
assert all(w >= -STAKE - 0.01 * t - 1e-6 for w, t in zip(won, tokens, strict=True))
figure

# %% [markdown]
# Six times. In the first round the blue curve drops by half a pass: Pace tries the draft, and it fails.
# After that the curve is flat, since Pace drafts nothing, and then it rises in steps wherever a copy
# has been accepted. Once a failure is long ago, Pace tries again, and the curve drops a little. The
# fixed rule loses about one pass per token.
#
# Change `useless` to `list(range(L))`, the *first* half of the model, and run both cells again.
# **Predict:** will Pace draft now? Which curve ends higher?
#
# <details><summary>Answer</summary>
# It drafts with it in four of ten rounds and copies in the others, and both curves rise. Pace ends much
# higher, since it drafts only where that pays, and copies where it can.
# </details>
#
# ## Questions
#
# Each answer is folded, and so is the cell below it that checks the answer.
#
# **1.** Pace changes its way of drafting between any two rounds. Can that change the text?
#
# <details><summary>Answer</summary>
# No. The target verifies every round, whatever drafted it. In greedy decoding the text is the same,
# token by token; in sampling it has the same distribution.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
same, _ = generate(model, [prompt], 60, Pace(model))
assert same == generate(model, [prompt], 60)[0]
print("the same 60 tokens")

# %% [markdown]
# **2.** DEL's counts fade by 5 % per round. After how many rounds does a count weigh only half?
#
# <details><summary>Answer</summary>
# After 14: 0.95 to the power of 14 is 0.49.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
assert 0.95**14 < 0.5 < 0.95**13
print(f"after 13 rounds {0.95**13:.2f}, after 14 {0.95**14:.2f}")

# %% [markdown]
# **3.** Why does the trace reveal what every early exit would draft, but not what a skip set would?
#
# <details><summary>Answer</summary>
# An exit runs the first sub-layers of the target on the target's own states. After its gap, a skip set
# has states of its own, and the target never computes those.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
from layerskip import shared_prefix

assert shared_prefix(early_exit(L, L - 1)) == 2 * (L - 1) and shared_prefix(gap) == 2 * (L // 3) < len(gap)
print("the exit shares all of its sub-layers with the target, the skip set only those before its gap")

# %% [markdown]
# **4.** What does Pace do if `most`, its longest draft, is 0?
#
# <details><summary>Answer</summary>
# Plain decoding: one pass per token.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
_, count = generate(model, [prompt], 20, Pace(model, most=0))
assert count == 20
print("20 tokens in 20 passes")

# %% [markdown]
# Next: [close to the machine](10_close_to_the_machine.ipynb). What does a pass really cost, and what if
# its weights had fewer bits?
