# %% [markdown]
# # 10. Adapting: drafts that change while they run
#
# No draft is best for every text. One story is easy for a shallow exit, another needs a deeper one.
# A program should find this out *while it writes*, and at little cost. This notebook shows what a
# run reveals for free, and two published systems that use it: DEL chooses an exit, and SWIFT
# searches for a skip set.
#
# > **Verifying a draft computes what every early exit would have drafted. So a program can compare
# > all exits although it drafts with one.**
#
# You need [6, layer skipping](06_layer_skipping.ipynb), and [7, search](07_search.ipynb).
# About 25 minutes.

# %%
# %run start.py
MODEL = ROOT / "weights" / "stories-llama"      # or a folder with your own Llama or Gemma-2
SHIPPED = MODEL.name == "stories-llama"         # the text's figures are checked for this model

# %%
from methods.costs import by_weights
from model import Placement
from support.texts import read_prompts

torch.set_grad_enabled(False)
model, tokenizer = checkpoint.load(MODEL, dtype=torch.float32)
c = model.c
L = model.c.n_layers
costs = by_weights(model.c)
story = checkpoint.encode(tokenizer, read_prompts("stories")[1]["text"], c.bos)[:120]
prompt = story[:24]
print(f"{L} blocks; a story of {len(story)} tokens, of which {len(prompt)} are the prompt")

# %% [markdown]
# ## What a trace reveals
#
# When the target verifies a draft, its states pass through all blocks. The loop only has to keep
# them: a *trace*. The state after block E is exactly the state of an early exit after E blocks. So
# the output head can compute, for every place of the round, what *every* exit would have drafted
# there, without drafting. DEL calls these tokens *shadow tokens*.
#
# Here are the shadow tokens of all exits along a piece of the story. `Teacher` keeps the states of
# one pass.

# %%
from layerskip import early_exit
from search import Teacher

teacher = Teacher(model, story)                                 # greedy: p and q are one-hot
shadows = [model.unembed(teacher.states[2 * e])[0].argmax(-1) for e in range(1, L)]
shadows = torch.stack(shadows)                                  # (L-1, T)
right = shadows == model.unembed(teacher.states[-1])[0].argmax(-1)
for e in (1, L // 2, L - 1):      # the same as when the exit itself drafts
    assert torch.equal(right[e - 1].double().cpu(), teacher.acceptance(early_exit(L, e)))
print(f"{right.numel()} shadow tokens, of {L - 1} exits at {len(story)} places, "
      "from one pass over the text")

# %% [markdown]
# **Predict:** the picture will have a row for each exit and a column for each place. Will it look
# like stripes across (some exits are good), or stripes down (some places are easy)?

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
# Mostly stripes down. Whether a token is predicted right depends more on the place than on the
# exit: many places are right for nearly all exits, and at a few even deep exits are wrong. (The
# model would sometimes write another word than the story's, and it is the model that an exit has to
# predict.)
#
# A trace does not reveal everything. A skip set has states of its own: after its first gap, each
# sub-layer gets another input than in a pass of the whole model. Only its own drafts can show how
# often its tokens are right.

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
# counts fade by 5 % per round. The counts give alpha of every exit. DEL drafts with the exit whose
# best draft length promises the most *tokens per layer* (TPL): the expected tokens of a round,
# divided by the layers that run for it. (Ours divides by costs, which include the output head.)
#
# How far it really drafts is decided token by token, which the paper calls *dynamic draft exiting*.
# A draft ends after a token whose *confidence*, the largest probability in the exit's distribution,
# is below a threshold. The threshold lies midway between the exit's mean confidence where its
# shadow tokens were right and where they were wrong.
#
# We watch DEL while it writes.

# %%
from methods.dynamic import DEL
from speculative import rounds

table = []
chosen = []
lengths = []


class Watched(DEL):
    def propose(self, state):
        chosen.append(len(self.sublayers) // 2 if self.rule.longest else None)
        return super().propose(state)


drafter = Watched(model, gamma=8)
for _, r in rounds(model, [prompt], 80, drafter):
    hits, misses = drafter.counts[:2]
    table.append((hits + 1) / (hits + misses + 2))              # (L-1,) DEL's estimates of alpha
    lengths.append(int(r.proposed))
table = torch.stack(table)                                      # (rounds, L-1)
print(f"{len(table)} rounds wrote 80 tokens")

# %% [markdown]
# **Predict:** does it choose a deep exit or a shallow one? And will all drafts be equally long?

# %% tags=["gallery"] jupyter={"source_hidden": true}
figure, ((upper,), (lower,)) = plots.axes(2, 1, width=10, height=2.7)
image = upper.imshow(table.T, aspect="auto", cmap="viridis", vmin=0, vmax=1, origin="lower")
shown = [None if e is None else e - 1 for e in chosen]
upper.plot(shown, color="white", drawstyle="steps-mid", lw=2)
upper.set_yticks(range(0, L - 1, 3), range(1, L, 3))
upper.set(ylabel="exit after block", xticks=[],
          title="DEL's estimates of alpha; white: the exit it chose")
figure.colorbar(image, ax=upper)
lower.bar(range(len(lengths)), lengths, 0.9, color=plots.HUES[0])
lower.set(xlabel="round", ylabel="tokens drafted", title="how far it drafted before it was unsure",
          xlim=(-0.5, len(lengths) - 0.5))
print("exits:", *("-" if e is None else e for e in chosen))
figure

# %% [markdown]
# (The estimates in a column are those after the round, and the white line is the exit that drafted
# in it, which was chosen by the estimates before.) A shallow one: deep exits have a higher alpha,
# but cost too much. The choice moves between neighbours that are nearly equally fast. The table is
# full from the first column on, since DEL has scored the prompt. It changes slowly, since its
# counts cover about twenty rounds. The lengths change from round to round: a draft goes on while
# the exit is sure of its tokens, and that depends on the place in the text.
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
by_exit = [whole.acceptance(early_exit(L, e))[places] for e in range(1, L)]
by_exit = torch.stack(by_exit)                                  # (L-1, 80)
true = by_exit.mean(1)
recent = by_exit[:, -40:].mean(1)
off = [float((table[-1] - alpha).abs().mean()) for alpha in (true, recent)]
print(f"DEL's estimates are off by {off[0]:.3f} from the whole text, "
      f"by {off[1]:.3f} from its last 40 tokens")
assert not SHIPPED or off[1] < off[0] and max(true[4 : L // 2]) < true[3] + 0.02

# %% jupyter={"source_hidden": true}
figure, ((side,),) = plots.axes(1, 1, width=7, height=3.2)
side.plot(range(1, L), true, color="#808080", marker="o", ms=4, label="in the whole text")
side.plot(range(1, L), recent, color=plots.HUES[0], marker="o", ms=4, ls="--",
          label="in its last 40 tokens")
side.plot(range(1, L), table[-1], color=plots.HUES[1], marker="s", ms=4,
          label="DEL's estimate at the end")
side.set(xlabel="exit after block", ylabel="alpha", ylim=(0, 1.02))
side.legend(frameon=False)
figure

# %% [markdown]
# DEL is closer to the last 40 tokens, because old counts fade, if slowly. This is how DEL follows a
# text that changes. Look at the shape of the curves, too. From exit 4 to the middle of the model,
# more blocks buy nothing.
#
# There is a price. For each shadow token, the output head must be applied to one more state. A
# large GPU hardly notices, since it reads the head once for all of them. On a CPU the shadow tokens
# of all exits can cost more than the pass itself. So the library's `DEL` can score a few exits
# only, or only every n-th round.
#
# ## SWIFT: a search while it writes
#
# SWIFT (arXiv 2410.06916) searches for sub-layers to skip *on the text that it is writing*. After
# the first tokens, its window, it scores one candidate set per round. Most candidates are random;
# every 25th is chosen by a Gaussian process (notebook 7). The score is the *matchness*: how often
# the set's likeliest token is the next token of the window. A candidate that beats the current set
# replaces it.
#
# **Predict:** the candidates skip as many sub-layers as the first set, so c hardly changes. How
# much faster will the best of them be than the first?

# %%
from lab.swift import SWIFT

swift = SWIFT(model, window=24, gamma=8, widths=())
for _ in rounds(model, [prompt], 90, swift):
    pass
scores = [score for _, score in swift.seen]
tops = [max(scores[: i + 1]) for i in range(len(scores))]
matched = [round(score * swift.window) for score in (scores[0], tops[-1])]
print(f"{len(scores)} sets were scored while 90 tokens were written, "
      f"on {swift.window} tokens each; the first matches {matched[0]}, the best {matched[1]}")

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
# **Try it:** score on twice as many tokens: `window=48`. Will the best matchness be higher or
# lower?
#
# <details><summary>Answer</summary>
# One would expect it to be lower: a longer window leaves less to luck, and fewer sets are scored
# before the text ends. But one run cannot show that: of 24 tokens, a single one makes a difference
# of 0.04.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
longer = SWIFT(model, window=48, gamma=8, widths=())
for _ in rounds(model, [prompt], 90, longer):
    pass
top = max(score for _, score in longer.seen)
for one, best in ((swift, tops[-1]), (longer, top)):
    print(f"{len(one.seen)} sets were scored on {one.window} tokens each; the best matches "
          f"{round(best * one.window)} of them, "
          f"{best:.2f} ± {(best * (1 - best) / one.window) ** 0.5:.2f}")

# %% [markdown]
# What is the best set worth? In the window its score was the largest of all, and that is luck as
# well as merit. So we measure it on what was written after the window.

# %%
from control import best_gamma, expected_speedup

worth = []
for name, gone in zip(("the first set", "the best set"), sets, strict=True):
    kept = swift.kept(gone)
    after = slice(places.start + swift.window, places.stop)
    right = whole.acceptance(kept)[after]
    price = costs.draft(kept).start
    alpha = float(right.mean())
    error = float(right.std() / len(right) ** 0.5)
    worth.append(alpha)
    assert not SHIPPED or price > 0.5 and max(worth) - min(worth) < 1.5 * error
    print(f"{name}: alpha {alpha:.2f} ± {error:.2f}, c {price:.2f}, "
          f"speed-up {expected_speedup(alpha, best_gamma(alpha, price), price):.2f}")
cost = len(scores) * costs.draft(swift.kept(sets[0])).start
print(f"the search itself cost as much as {cost:.0f} passes")

# %% [markdown]
# Little, for three reasons. SWIFT's sets keep more than half of the model, so a drafted token is
# expensive. The best of many scores from a short window is flattered by chance (notebook 7): after
# the window the two sets cannot be told apart. And scoring a set costs
# about as much as a drafted token, so our one short text ends before the search has paid for
# itself. In the paper the search goes on over many requests, which share its cost, and the models
# are large and lose little when blocks are skipped.
#
# ## By the clock
#
# All of them write the same text, in turn. *CLaSp* (arXiv 2505.24196, `lab/clasp.py`) is a third
# way to choose: it leaves out the blocks without which the states of the last token stay nearest to
# the trace's. The rival that counts is the exit that we would have taken without any of them.
#
# **Predict:** which of them is faster than the fixed exit?

# %% jupyter={"source_hidden": true}
from lab.clasp import CLaSp
from layerskip import SelfDraft
from support.compare import compare

makers = {"plain": lambda: None,
          "exit 2, gamma 2": lambda: SelfDraft(model, early_exit(L, 2), 2),
          "DEL": lambda: DEL(model, gamma=8),
          "DEL, four exits": lambda: DEL(model, gamma=8, exits=range(1, 5)),
          "SWIFT": lambda: SWIFT(model, window=24, gamma=8, widths=()),
          "CLaSp": lambda: CLaSp(model)}
timed = compare(lambda drafter: rounds(model, [prompt], 80, drafter), makers, 1, repeats=3)
for name, one in timed.items():
    print(f"{name:15} {80 / one.passes:.2f} tokens per pass, "
          f"{one.rate / timed['plain'].rate:.2f} times plain decoding")

# %% [markdown]
# To look is not free: DEL applies the output head to the states of every exit that it scores, SWIFT
# runs its candidates, and CLaSp runs all blocks again. A DEL that scores four exits drafts as well
# as one that scores them all, at a fraction of that price. (One text and the medians of three runs:
# small differences are chance.)
#
# ## Questions
#
# Each answer is folded, and so is the cell below it that checks the answer.
#
# **1.** DEL's counts fade by 5 % per round. After how many rounds does a count weigh only half?
#
# <details><summary>Answer</summary>
# After 14: 0.95 to the power of 14 is 0.49.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
assert 0.95**14 < 0.5 < 0.95**13
print(f"after 13 rounds {0.95**13:.2f}, after 14 {0.95**14:.2f}")

# %% [markdown]
# **2.** Why does the trace reveal what every early exit would draft, but not what a skip set would?
#
# <details><summary>Answer</summary>
# An exit runs the first sub-layers of the target on the target's own states. After its gap, a skip
# set has states of its own, and the target never computes those.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
from layerskip import shared_prefix

assert shared_prefix(early_exit(L, L - 1)) == 2 * (L - 1)
assert shared_prefix(gap) == 2 * (L // 3) < len(gap)
print("the exit shares all of its sub-layers with the target, "
      "the skip set only those before its gap")

# %% [markdown]
# Next: [Pace](11_pace.ipynb). DEL chooses among exits. How can a program choose among all ways to
# draft, and be sure not to lose by it?
