# %% [markdown]
# # 10. Adapting: drafts that change while they run
#
# No way of drafting is best for every text. On a story an early exit may predict well, on code it may
# be enough to copy earlier lines, and on some texts nothing helps. A program should find this out
# *while it writes*, and at little cost. This notebook shows what a run reveals for free, two published
# systems that use it (DEL and SWIFT), how earlier text is copied (suffix decoding), and a controller that
# weighs every way of drafting by tokens per unit of time.
#
# > **The cost of an experiment is known before it is made. So a program can
# > save up for it, and never lose more than it has saved.**
#
# You need [6, layer skipping](06_layer_skipping.ipynb), and [7, search](07_search.ipynb).
# About 45 minutes.

# %%
# %run start.py
MODEL = ROOT / "weights" / "stories-llama"      # or a folder with your own Llama or Gemma-2
SHIPPED = MODEL.name == "stories-llama"         # what the text says of figures is checked for this model

# %%
from model import Placement
from support.texts import read_prompts
from control import weight_costs

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
words = [plots.word(tokenizer, t) for t in story[piece.start + 1 : piece.stop + 1]]
side.set_xticks(range(len(words)), words, rotation=90, fontsize=8)
side.set_yticks(range(0, L - 1, 3), range(1, L, 3))
side.set(ylabel="exit after block", xlabel="next token of the story",
         title="dark: the exit predicts the token that the whole model predicts")
figure

# %% [markdown]
# Mostly stripes down. Whether a token is predicted right depends more on the place than on the exit:
# many places are right for nearly all exits, and at a few even deep exits are wrong. (The model would
# sometimes write another word than the story's, and it is the model that an exit has to predict.)
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
# **Predict:** does it choose a deep exit or a shallow one?

# %% jupyter={"source_hidden": true}
figure, ((upper,), (lower,)) = plots.axes(2, 1, width=10, height=2.7)
image = upper.imshow(table.T, aspect="auto", cmap="viridis", vmin=0, vmax=1, origin="lower")
upper.plot([None if e is None else e - 1 for e in chosen], color="white", drawstyle="steps-mid", lw=2)
upper.set_yticks(range(0, L - 1, 3), range(1, L, 3))
upper.set(ylabel="exit after block", title="DEL's estimates of alpha; white: the exit it chose", xticks=[])
figure.colorbar(image, ax=upper)
lower.bar(range(len(lengths)), lengths, 0.9, color=plots.HUES[0])
lower.set(xlabel="round", ylabel="tokens drafted", xlim=(-0.5, len(lengths) - 0.5))
figure

# %% [markdown]
# A shallow one: deep exits have a higher alpha, but cost too much. The choice moves between neighbours
# that are nearly equally fast. The table is full from the first column on, since DEL has scored the
# prompt. It changes slowly, since its counts cover about twenty rounds.
#
# Are the estimates right? The next picture compares them, at the end of the run, with the share of
# right shadow tokens in the text that it wrote: in all of it, and in its last 40 tokens.
#
# **Predict:** which of the two will DEL be closer to?

# %%
from speculative import generate

(written,), _ = generate(model, [prompt], 80)
whole = Teacher(model, prompt + written)
places = slice(len(prompt) - 1, -1)                             # those whose next token was written
by_exit = torch.stack([whole.acceptance(early_exit(L, e))[places] for e in range(1, L)])   # (L-1, 80)
true, recent = by_exit.mean(1), by_exit[:, -40:].mean(1)
off = [float((table[-1] - alpha).abs().mean()) for alpha in (true, recent)]
print(f"DEL's estimates are off by {off[0]:.3f} from the whole text, by {off[1]:.3f} from its last 40 tokens")
assert not SHIPPED or off[1] < off[0] and max(true[4 : L // 2]) < true[3] + 0.02

# %% jupyter={"source_hidden": true}
figure, ((side,),) = plots.axes(1, 1, width=7, height=3.2)
side.plot(range(1, L), true, color="#808080", marker="o", ms=4, label="in the whole text")
side.plot(range(1, L), recent, color=plots.HUES[0], marker="o", ms=4, ls="--", label="in its last 40 tokens")
side.plot(range(1, L), table[-1], color=plots.HUES[1], marker="s", ms=4, label="DEL's estimate at the end")
side.set(xlabel="exit after block", ylabel="alpha", ylim=(0, 1.02))
side.legend(frameon=False)
figure

# %% [markdown]
# To the last 40 tokens: old counts fade, but slowly. This is how DEL follows a text that changes. Look at
# the shape as well. From exit 4 to the middle of the model, more blocks buy nothing.
#
# There is a price. For each shadow token, the output head must be applied to one more state. A large
# GPU hardly notices, since it reads the head once for all of them. On a CPU the shadow tokens of all
# exits can cost more than the pass itself. So the library's `DEL` can score a few exits only, or only
# every n-th round.
#
# ## SWIFT: a search while it writes
#
# SWIFT (arXiv 2410.06916) searches for sub-layers to skip *on the text that it is writing*. After the
# first tokens, its window, it scores one candidate set per round. Most candidates are random; every
# 25th is chosen by a Gaussian process (notebook 7). The score is the *matchness*: how often the set's
# likeliest token is the next token of the window. A candidate that beats the current set replaces it.
#
# **Predict:** the candidates skip as many sub-layers as the first set, so c hardly changes. How much
# faster will the best of them be than the first?

# %%
from lab.swift import SWIFT

swift = SWIFT(model, window=24, gamma=8, widths=())
for _ in rounds(model, [prompt], 90, swift):
    pass
scores = [score for _, score in swift.seen]
tops = [max(scores[: i + 1]) for i in range(len(scores))]
print(f"{len(scores)} sets were scored while 90 tokens were written, on {swift.window} tokens each: "
      f"the first one {scores[0]:.2f}, the best {tops[-1]:.2f}")

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
# The matchness rises within the first few candidates, and then no more.
#
# **Try it:** score on twice as many tokens: `window=48`. Will the best matchness be higher or lower?
#
# <details><summary>Answer</summary>
# Lower: a longer window leaves less to luck, and fewer sets are scored before the text ends.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
longer = SWIFT(model, window=48, gamma=8, widths=())
for _ in rounds(model, [prompt], 90, longer):
    pass
top = max(score for _, score in longer.seen)
assert not SHIPPED or top < tops[-1] or swift.window != 24
print(f"{len(longer.seen)} sets were scored on {longer.window} tokens each; the best {top:.2f}")

# %% [markdown]
# What is the best set worth, measured on all that was written?

# %%
from control import best_gamma, expected_speedup

worth = []
for name, gone in zip(("the first set", "the best set"), sets, strict=True):
    kept = swift.kept(gone)
    right, price = whole.acceptance(kept)[places], costs.step(kept)
    alpha, error = float(right.mean()), float(right.std() / len(right) ** 0.5)
    worth.append(alpha)
    assert not SHIPPED or price > 0.5 and max(worth) - min(worth) < 1.5 * error
    print(f"{name}: alpha {alpha:.2f} ± {error:.2f}, c {price:.2f}, "
          f"speed-up {expected_speedup(alpha, best_gamma(alpha, price), price):.2f}")
print(f"the search itself cost as much as {len(scores) * costs.step(swift.kept(sets[0])):.0f} passes")

# %% [markdown]
# Little, for three reasons. SWIFT's sets keep more than half of the model, so a drafted token is
# expensive. The best of many scores from a short window is flattered by chance (notebook 7): on the
# whole text the two sets are hardly further apart than one standard error. And scoring a set costs about
# as much as a drafted token, so our one short text ends before the search has paid for itself. In the
# paper the search goes on over many requests, which share its cost, and the models are large and lose
# little when blocks are skipped.
#
# ## Suffix decoding: copy what came before
#
# The cheapest draft is text that is already there. *Prompt lookup* takes the last n tokens, looks for the
# same n tokens earlier in the text, and copies what followed them. *Suffix decoding* (arXiv 2411.04975)
# does not fix n. It tries every *suffix*, the last token, the last two, and so on, and counts what has
# followed each of them so far. From a suffix of m tokens it follows the most frequent next token, for at
# most 2 m tokens and as long as the chance of the whole copy stays above a limit. The copy that promises
# most accepted tokens is drafted.
#
# Here it writes code. **Look:** which copies are right?

# %%
from methods.suffix import Suffix

code = checkpoint.encode(tokenizer, read_prompts("code")[0]["prompt"], c.bos)
lookup = Suffix(7)
print("suffix that is known already -> copy                                 accepted")
for state, r in rounds(model, [code], 48, lookup):
    (m,), drafted, n = lookup.matched, r.draft.tokens[0].tolist(), len(state.known[0]) - len(r.new[0])
    if drafted:
        known = tokenizer.decode(state.known[0][n - m : n]), tokenizer.decode(drafted)
        print(f"{known[0][-30:]!r:34} -> {known[1]!r:34} {int(r.accepted)} of {len(drafted)}")

# %% [markdown]
# Names recur often, whole phrases less often. Nothing is computed for a copy, so c is 0. It gains
# wherever a text repeats itself: in code, in summaries of a prompt, in lists. (The paper also keeps the
# texts of earlier requests, and can draft a tree.)
#
# **Try it:** take a story instead of the code: `read_prompts("stories")`. How many copies will be right?
#
# <details><summary>Answer</summary>
# Fewer. A story repeats names and short phrases, and this small model sometimes a whole one; but seldom as
# long as in code.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
from support.stats import Counts

copied = {}
for kind in ("code", "stories"):
    openings = [checkpoint.encode(tokenizer, line["prompt"], c.bos) for line in read_prompts(kind)[:4]]
    counts = Counts()
    for _, r in rounds(model, openings, 48, Suffix(7), eos=c.eos):
        counts.add(r)
    copied[kind] = counts.accepted / counts.proposed
    print(f"{kind}: {counts.accepted} of {counts.proposed} copied tokens accepted, {copied[kind]:.0%}; "
          f"tau {counts.tau:.2f}")
assert not SHIPPED or copied["stories"] < copied["code"]

# %% [markdown]
# ## Pace: weigh everything by time
#
# `Pace`, the library's own controller, answers one question before every draft: *which drafter, and which
# length, writes the most tokens per unit of time?* It can draft nothing, use suffix decoding (`suffix`), or
# one of several exits, a skip set, or trained heads where there are any. Each gets a value, the expected
# speed:
#
# $$\frac{1 + \alpha + \dots + \alpha^\gamma}{\gamma c + 1}$$
#
# c comes from a table of costs. Alpha of suffix decoding comes from the text, which shows what its
# copies would have been worth, whichever way was chosen. Alpha of everything else comes from its own
# drafts, so for a drafter that is seldom used it is uncertain. Pace takes it to be one standard deviation
# above its mean, so it tries what it knows little about, and its old counts fade, so it tries again what
# failed long ago. If nothing is at least 5 % faster than plain decoding, Pace drafts nothing.
#
# We give it a stream of prompts whose kind changes: two stories, two dialogues, two maths problems, two
# pieces of code, and then all four kinds again.
#
# **Predict:** on which kind will it choose suffix decoding most often?

# %%
from collections import Counter

from methods.arms import candidates
from methods.pace import MARGIN, Pace

assert MARGIN == 0.05
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
share = {}
for kind in dict.fromkeys(kinds):
    ways = sum((Counter(one) for one, its in zip(chosen, kinds, strict=True) if its == kind), Counter())
    share[kind] = ways["suffix"] / ways.total()
    print(f"{kind:9}: {share[kind]:4.0%} of the rounds by suffix decoding")
assert not SHIPPED or max(share, key=share.get) == "code"

# %% tags=["gallery"] jupyter={"source_hidden": true}
figure, ((upper,), (lower,)) = plots.axes(2, 1, width=10, height=2.6)
plots.draw_choices(upper, chosen, kinds, plots.hues_of(dict.fromkeys(way for one in chosen for way in one)))
upper.set_title("what Pace chose for each prompt")
lower.bar(range(len(tau)), tau, 0.9, color=plots.HUES[0])
lower.axhline(1, color="#404040", ls="--", lw=1)
lower.set(ylabel="tokens per pass", xlabel="a bar for each prompt; dashed: plain decoding",
          xlim=upper.get_xlim(), xticks=upper.get_xticks(), xticklabels=[])
figure

# %% [markdown]
# On code. Stories and dialogues mostly get an exit. Which one depends on what was tried so far, since
# neighbours are worth nearly the same. Pace keeps what it has learnt when the next prompt begins.
#
# ## What it may lose
#
# A draft can fail. But its cost is known before the round: each drafted token costs c, and their number
# is fixed by then. Pace keeps a balance. It starts at two passes, the *stake*. Each written token adds
# one pass, which is what it would have cost without drafting, and a small extra, `risk`, of 1 %. Each
# round subtracts what it costs. A round begins only if the balance covers what it would lose with nothing
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
tries = careful.chosen["useless"]
print(f"Pace tried the useless draft in {tries} of {sum(careful.chosen.values())} rounds")
print(f"rounds: {careful.chosen}; the balance was never below {min(balances):.2f}")
assert STAKE == 2 and min(balances) >= 0
if SHIPPED and useless == list(range(L, 2 * L)):                # what the text below the picture says
    assert tries < 12 and 0.4 < STAKE - balances[1] < 0.6
    assert 0.9 < -fixed[-1][1] / fixed[-1][0] < 1.1

# %% jupyter={"source_hidden": true}
won = [p - STAKE - 0.01 * t for p, t in zip(balances, tokens, strict=True)]
figure, ((side,),) = plots.axes(1, 1, width=8, height=3.6)
side.plot(tokens, won, color=plots.HUES[0], label="Pace")
side.plot([0, 120], [-STAKE, -STAKE - 1.2], color="#404040", ls=":", label="the guarantee")
side.plot(*zip(*fixed, strict=True), color=plots.HUES[1], ls="--",
          label=f"two in every round: {fixed[-1][1]:.0f} at the end")
side.axhline(0, color="#808080", lw=0.8)
side.set(xlabel="tokens written", ylabel="passes saved", ylim=(-12, max(won) + 2))
side.legend(frameon=False, loc="upper left")
assert all(w >= -STAKE - 0.01 * t - 1e-6 for w, t in zip(won, tokens, strict=True))
figure

# %% [markdown]
# A few times. In the first round the blue curve drops by half a pass: Pace tries the draft, and it
# fails. After that Pace drafts nothing, and the curve is flat. It rises in steps wherever a copy by
# suffix decoding has been accepted. Once a failure is long ago, Pace tries again, and the curve drops a
# little. The fixed rule loses about one pass per token.
#
# **Try it:** set `useless = list(range(L))`, the *first* half of the model. Will Pace draft now? Which
# curve will end higher?
#
# <details><summary>Answer</summary>
# It drafts with it in some of the rounds and copies in others, and both curves rise. Pace ends higher,
# since it drafts only where that pays, and copies where it can. Question 4 checks it.
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
# **4.** The first half of the model is a good draft, but not a cheap one. Who gains more with it: Pace,
# or a rule that drafts two tokens in every round?
#
# <details><summary>Answer</summary>
# Pace: it drafts only as far as the balance covers and the value says, and copies where that is better.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
good = list(range(L))
free, spent = Pace(model, [self_draft("first half", model, good, costs)], costs), 0.0
for _ in rounds(model, [prompt], 120, free):
    pass
for _ in rounds(model, [prompt], 120, SelfDraft(model, good, 2)):
    spent += 1 + 2 * costs.step(good)
saved = free.balance - STAKE - 0.01 * 120, 120 - spent
assert not SHIPPED or saved[0] > saved[1] > 0
print("of 120 passes, Pace saves {:.0f}, the fixed rule {:.0f};".format(*saved), free.chosen)

# %% [markdown]
# **5.** The last token came four times so far; it was followed by "a" three times, and by "the" once.
# "a" was always followed by "big". What does suffix decoding promise of the copy "a big"?
#
# <details><summary>Answer</summary>
# 1.5 accepted tokens: "a" has a chance of 0.75, and "big" after it the same.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
seen = {(0,): {1: 3, 2: 1}, (0, 1): {3: 3}}                     # 0: the last token, 1: a, 2: the, 3: big
assert Suffix(7).follow(seen, (0,), 2) == (1.5, [1, 3])
print("0.75 + 0.75 = 1.5")

# %% [markdown]
# Next: [close to the machine](12_close_to_the_machine.ipynb). What does a pass really cost, and what if
# its weights had fewer bits?
