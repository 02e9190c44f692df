# %% [markdown]
# # 8. Adapting: drafts that change while they run
#
# No draft is best for every text. On a story an early exit may guess well, on code a copy of earlier lines,
# and on some texts nothing helps. So a program should find out *while it writes*, and at little cost. This
# notebook shows what one can learn from a run for free, two published systems that live from it, DEL and
# SWIFT, and a controller that weighs everything by what counts: tokens for each unit of time.
#
# > **The one thing to remember: what an experiment costs is known before it is made. So one can save for it,
# > and never lose more than was saved.**
#
# Before it: [5, layer skipping](05_layer_skipping.ipynb), and [6, search](06_search.ipynb).

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
# ## What a trace tells
#
# When the target checks a draft, its states pass through all blocks. They are there anyway; the loop only
# has to keep them: a *trace*. The state after block E is exactly what an early exit after E blocks would
# have had. So the output head can say, for every place of the round, what *every* exit would have drafted
# there, without drafting. DEL calls these guesses *shadow tokens*.
#
# Here are the shadow tokens of all exits along a piece of the story. `Teacher` keeps the states of one
# pass.

# %%
from layerskip import early_exit
from search import Teacher

teacher = Teacher(model, story)                                 # greedy: p and q are one-hot
shadows = torch.stack([model.unembed(teacher.states[2 * e])[0].argmax(-1) for e in range(1, L)])    # (L-1, T)
right = shadows == model.unembed(teacher.states[-1])[0].argmax(-1)
for e in (1, L // 2, L - 1):        # what the trace tells is what the exit itself would have drafted
    assert torch.equal(right[e - 1].double().cpu(), teacher.acceptance(early_exit(L, e)))
print(f"{right.numel()} guesses of {L - 1} exits at {len(story)} places, from one pass over the text")

# %% [markdown]
# **Predict:** will the picture have columns, places where all exits are right or all are wrong? Or only
# rows?

# %%
piece = slice(24, 64)
figure, ((side,),) = plots.axes(1, 1, width=11, height=3.4)
side.imshow(right[:, piece].cpu(), aspect="auto", cmap="Greys", vmax=1.7, origin="lower")
words = [tokenizer.decode([t]).strip() for t in story[piece.start + 1 : piece.stop + 1]]
side.set_xticks(range(len(words)), words, rotation=90, fontsize=8)
side.set_yticks(range(0, L - 1, 3), range(1, L, 3))
side.set(ylabel="exit after block", title="dark: the exit's guess is what the whole model says next")
figure

# %% [markdown]
# Both. Deeper exits are right more often, and some words are easy for all of them. The words below are
# those of the story; the model itself would at times have said another one, and it is the model that a
# guess must meet.
#
# A trace does not tell everything. A skip set reads states that no pass of the whole model ever had,
# because what stands after its first gap gets another input. Only its own drafts can say what it is worth.

# %%
from layerskip import without

gap = without(L, attn=[L // 3], mlp=[L // 3])
x = model.embed(torch.tensor([story], device=model.tok.device))
at = Placement.at(0, len(story), x.device)
before, after = (model.run(x, at, sublayers=gap[:n]) for n in (2 * (L // 3), len(gap)))
assert torch.allclose(before, teacher.states[2 * (L // 3)], atol=1e-4)
print("before its gap the draft has the target's states; at its end it is off by",
      f"{float((after - teacher.states[-1]).norm() / teacher.states[-1].norm()):.0%}")

# %% [markdown]
# ## DEL: a table that fills up
#
# DEL (arXiv 2504.05598) counts for each exit how many of its shadow tokens are right and how many are
# wrong, and lets old counts fade by 5 % a round. From these counts it knows alpha of all exits, and it
# drafts with the exit of the highest expected speed. Let us watch it while it writes.

# %%
from methods.dynamic import DEL
from speculative import rounds

drafter, table, chosen, lengths = DEL(model, gamma=8), [], [], []
for _, r in rounds(model, [prompt], 80, drafter):
    hits, misses = drafter.counts[:2]
    table.append((hits + 1) / (hits + misses + 2))              # (L-1,) alpha of each exit, as DEL believes
    chosen.append(len(drafter.sublayers) // 2 if drafter.rule.most else None)
    lengths.append(int(r.proposed))
table = torch.stack(table)                                      # (rounds, L-1)
print(f"{len(table)} rounds wrote 80 tokens; exits that it chose: {sorted(set(chosen) - {None})}")

# %% [markdown]
# **Predict:** all exits start with the same belief, one half. Which rows will leave it first?

# %%
figure, ((upper,), (lower,)) = plots.axes(2, 1, width=10, height=2.7)
image = upper.imshow(table.T, aspect="auto", cmap="viridis", vmin=0, vmax=1, origin="lower")
upper.plot([None if e is None else e - 1 for e in chosen], color="white", drawstyle="steps-mid", lw=2)
upper.set_yticks(range(0, L - 1, 3), range(1, L, 3))
upper.set(ylabel="exit after block", title="the table of alphas; white: the exit that DEL chose")
figure.colorbar(image, ax=upper)
lower.bar(range(len(lengths)), lengths, 0.9, color=plots.HUES[0])
lower.set(xlabel="round", ylabel="tokens drafted", xlim=(-0.5, len(lengths) - 0.5))
figure

# %% [markdown]
# The table is full from the first column on: DEL has already scored the prompt (of a long one, the last 32
# places). After that it changes slowly, since the counts stand for about twenty rounds.
#
# Is it right? For each exit, the alpha that DEL believes at the end, and the share of right guesses over
# the text that it wrote.

# %%
from speculative import generate

(written,), _ = generate(model, [prompt], 80)
whole = Teacher(model, prompt + written)
true = [float(whole.acceptance(early_exit(L, e))[len(prompt) - 1 :].mean()) for e in range(1, L)]
figure, ((side,),) = plots.axes(1, 1, width=6, height=3.2)
side.plot(range(1, L), true, color="#808080", marker="o", label="in the whole text")
side.plot(range(1, L), table[-1], color=plots.HUES[1], marker="s", label="as DEL believes at its end")
side.set(xlabel="exit after block", ylabel="alpha", ylim=(0, 1.02))
side.legend(frameon=False)
figure

# %% [markdown]
# The two need not be equal, as the counts fade: DEL speaks of the last rounds, not of the whole text. That is
# what lets it follow a text that changes.
#
# The price of it: each shadow token is a row of the output head. A large GPU hardly notices, since it reads
# the head once for all rows. On a CPU the rows of all exits can cost more than the pass itself. That is why
# the library's `DEL` can score a few exits only, or every fourth round only.
#
# ## SWIFT: a search on one request
#
# SWIFT (arXiv 2410.06916) looks for sub-layers to skip *on the text that it is writing*. After the first
# tokens (its window) it scores a random set in each round, and in every 25th one that a Gaussian process has
# chosen (notebook 6), by its *matchness*: how often the set's likeliest token is the next one of the window.
# A better set takes the place of the one that drafts.

# %%
from lab.swift import SWIFT

swift, best = SWIFT(model, window=24, gamma=8, widths=()), []
for _ in rounds(model, [prompt], 90, swift):
    best.append(swift.best)
scores = [score for _, score in swift.seen]
tops = [max(scores[: i + 1]) for i in range(len(scores))]
print(f"{len(scores)} sets were scored while 90 tokens were written: the first one {scores[0]:.2f}, "
      f"the best {tops[-1]:.2f}")

# %%
figure, ((left, wide),) = plots.axes(1, 2, width=5.5, height=3.2)
left.plot(scores, ".", color="#808080", label="a candidate")
left.plot(tops, color=plots.HUES[0], label="the best so far")
left.set(xlabel="sets scored", ylabel="matchness in the window", ylim=(-0.02, 1.02))
left.legend(frameon=False, loc="upper left")
sets = [swift.seen[0][0], max(swift.seen, key=lambda seen: seen[1])[0]]
grid = [[i in gone for i in range(2 * L)] for gone in sets]
wide.imshow(grid, aspect="auto", cmap="Greys", vmax=1.6)
wide.set_yticks((0, 1), ("the first set", "the best set"))
wide.set(xlabel="sub-layer (dark: skipped)")
figure

# %% [markdown]
# **Predict:** the best set skips as many sub-layers as the first one, so its price is nearly the same. Is it
# worth it?

# %%
from control import best_gamma, expected_speedup

for name, gone in zip(("the first set", "the best set"), sets, strict=True):
    kept = swift.kept(gone)
    alpha, price = float(whole.acceptance(kept)[len(prompt) :].mean()), costs.step(kept)
    print(f"{name}: alpha {alpha:.2f}, c {price:.2f}, "
          f"promised {expected_speedup(alpha, best_gamma(alpha, price), price):.2f} times plain decoding")
print(f"the search itself took as long as {len(scores) * costs.step(swift.kept(sets[0])):.0f} passes")

# %% [markdown]
# (Where alpha does not exceed c, the promise is 1.00: do not draft.) Two things stand against SWIFT here. Its
# sets keep more than half of the model, so that a guess is dear, and a little better is all that the best
# one can be. And each set that is scored costs about as much as a drafted token, so a short text ends before
# the search has paid for itself. It was made for long texts, and for large models that lose little when
# blocks are left out.
#
# ## Pace: weigh everything by what counts
#
# The library's own controller asks one question before every draft: *which way to draft, and how far,
# promises the most tokens for the time it takes?* The candidates are nothing at all, a copy of earlier text
# (an n-gram), a few exits, a skip set and trained heads where there are some. For each the promise is
#
# $$\frac{1 + \alpha + \dots + \alpha^\gamma}{\gamma c + 1}$$
#
# with c from a table of costs, and alpha from the text for n-grams, and from
# their own drafts for all else. A way that drafts seldom is hardly known. So every 16 rounds Pace also asks
# how much it *may well* promise, with an alpha one standard deviation above its mean; where that is more than
# the best has to offer, the way is tried out. Where nothing promises at least 5 % more than plain decoding
# (thinking takes time, too), Pace rests: it thinks again a few rounds later, or as soon as the text repeats
# itself. A stream of prompts whose kind changes:

# %%
from lab.bench.dynamic import Thinking, stream
from methods.arms import candidates
from methods.pace import Pace

prompts, kinds = stream(tokenizer, c, 2)
pace, texts, passes = Thinking(Pace(model, candidates(model, costs), costs)), [], []
for ids in prompts:
    (text,), count = generate(model, [ids], 32, pace, eos=c.eos)
    texts.append(text)
    passes.append(count)
print(f"{len(prompts)} prompts, {sum(map(len, texts))} tokens in {sum(passes)} passes")

# %% [markdown]
# **Predict:** on which kind of text will it copy most?

# %% tags=["gallery"]
figure, ((upper,), (lower,)) = plots.axes(2, 1, width=10, height=2.6)
rounds_of = pace.choices()
plots.draw_choices(upper, rounds_of, kinds, plots.hues_of(dict.fromkeys(w for p in rounds_of for w in p)))
upper.set_title("what Pace chose, prompt by prompt")
tau = [len(text) / count for text, count in zip(texts, passes, strict=True)]
lower.bar(range(len(tau)), tau, 0.9, color=plots.HUES[0])
lower.axhline(1, color="#404040", ls="--", lw=1)
lower.set(ylabel="tokens for each pass", xlim=upper.get_xlim(), xlabel="prompt (dashed: plain decoding)")
figure

# %% [markdown]
# ## What it may lose
#
# A draft can fail. But its price is known before: a token of a draft costs c, and so many are drafted. Pace
# keeps a balance, which begins with two passes, the *stake*. Whatever it wins over plain decoding goes in,
# and each token that is written adds `risk`, 1 % of a pass. A round begins only if the balance covers its
# cost with nothing accepted. So the balance never falls below zero, and that *is* the guarantee: by its table
# of costs, never slower than plain decoding by more than 1 %, and two passes. By the clock it holds as far as
# the table is right.
#
# We give it a draft that is worth nothing, and compare with one who drafts two tokens in every round.

# %%
from layerskip import SelfDraft
from methods.arms import self_draft
from methods.pace import STAKE

useless = list(range(L, 2 * L))                                 # the second half of the model, alone
careful = Pace(model, [self_draft("useless", model, useless, costs)], costs)
purse, tokens = [], []
for state, _ in rounds(model, [prompt], 120, careful):
    purse.append(careful.balance)
    tokens.append(len(state.known[0]) - len(prompt))
stubborn, c_useless = [], costs.step(useless)
for state, r in rounds(model, [prompt], 120, SelfDraft(model, useless, 2)):
    before = stubborn[-1][1] if stubborn else 0.0
    stubborn.append((len(state.known[0]) - len(prompt), before + len(r.new[0]) - 1 - 2 * c_useless))
print(f"rounds: {careful.chosen}; the balance was never below {min(purse):.2f}")

# %%
won = [p - STAKE - 0.01 * t for p, t in zip(purse, tokens, strict=True)]
figure, ((left, near),) = plots.axes(1, 2, width=5.5, height=3.2)
for side in (left, near):
    side.plot(tokens, won, color=plots.HUES[0], label="Pace")
    side.plot([0, 120], [-STAKE, -STAKE - 1.2], color="#404040", ls=":", label="what Pace may lose at most")
    side.set(xlabel="tokens written", ylabel="passes won over plain decoding")
left.plot(*zip(*stubborn, strict=True), color=plots.HUES[1], ls="--", label="two tokens in every round")
left.legend(frameon=False, fontsize=8)
near.set_title("the same, without the stubborn one")
assert all(w >= -STAKE - 0.01 * t - 1e-6 for w, t in zip(won, tokens, strict=True))
figure

# %% [markdown]
# The blue curve goes down a little at first: Pace tries the draft, and learns that it is useless. From then
# on it tries it again at most as often as `risk` has paid for. (Where the curve rises, an n-gram has copied
# something.)
#
# ## Questions
#
# **1.** Pace changes its way of drafting between any two rounds. Can that change the text?
#
# <details><summary>Answer</summary>
# No. The target checks every round, whatever drafted it. When greedy the text is the same, token by token;
# when sampling it has the same distribution.
# </details>

# %%
same, _ = generate(model, [prompt], 60, Pace(model))
assert same == generate(model, [prompt], 60)[0]
print("the same 60 tokens")

# %% [markdown]
# **2.** DEL's counts fade by 5 % a round. After how many rounds does a count weigh only half?
#
# <details><summary>Answer</summary>
# After 14: .95 to the power of 14 is .49.
# </details>

# %%
assert 0.95**14 < 0.5 < 0.95**13
print(f"after 13 rounds {0.95**13:.2f}, after 14 {0.95**14:.2f}")

# %% [markdown]
# **3.** Why does the trace tell of every early exit, but not of a skip set?
#
# <details><summary>Answer</summary>
# An exit runs the first sub-layers of the target on the target's own states, so the target's states are its
# states. After a gap a skip set has states of its own, and the target never computes them.
# </details>

# %%
from layerskip import shared_prefix

assert shared_prefix(early_exit(L, L - 1)) == 2 * (L - 1) and shared_prefix(gap) == 2 * (L // 3) < len(gap)
print("of the exit all sub-layers are shared, of the skip set only those before its gap")

# %% [markdown]
# **4.** What is left of Pace if the longest draft may have no token?
#
# <details><summary>Answer</summary>
# Plain decoding: one pass for each token.
# </details>

# %%
_, count = generate(model, [prompt], 20, Pace(model, most=0))
assert count == 20
print("20 tokens in 20 passes")

# %% [markdown]
# Next: [close to the machine](09_close_to_the_machine.ipynb). What does a pass really cost, and what if the
# numbers had fewer bits?
