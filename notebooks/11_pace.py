# %% [markdown]
# # 11. Pace: choose how to draft, and never lose much
#
# On a story an early exit may predict well, on code it may be enough to copy earlier lines, and on
# some texts nothing helps. `Pace` is the library's own controller, and what `generate.py` uses by
# default. It learns from the rounds so far which way of drafting writes the most tokens per unit of
# time. And it can promise something: by its table of costs, it is never slower than plain decoding
# by more than half a percent and two passes.
#
# > **The cost of an experiment is known before it is made. So a program can
# > save up for it, and never lose more than it has saved.**
#
# You need [6, layer skipping](06_layer_skipping.ipynb), and from [4, speculative
# decoding](04_speculative_decoding.ipynb) how earlier text is copied. About 20 minutes.

# %%
# %run start.py
MODEL = ROOT / "weights" / "stories-llama"      # or a folder with your own Llama or Gemma-2
SHIPPED = MODEL.name == "stories-llama"         # the text's figures are checked for this model

# %%
from methods.costs import by_weights
from speculative import generate, rounds
from support.texts import read_prompts

torch.set_grad_enabled(False)
model, tokenizer = checkpoint.load(MODEL, dtype=torch.float32)
c = model.c
L = model.c.n_layers
machine = by_weights(model.c)
prompt = checkpoint.encode(tokenizer, read_prompts("stories")[1]["text"], c.bos)[:24]
print(f"{L} blocks; the prompt has {len(prompt)} tokens")

# %% [markdown]
# ## Weigh everything by time
#
# Before every draft, Pace answers one question: *which drafter, and which length, writes the most
# tokens per unit of time?* It can draft nothing, use suffix decoding (`suffix`), or one of several
# exits, a skip set, or trained heads where there are any. Each gets a value, the expected speed:
#
# $$\frac{1 + \alpha + \dots + \alpha^\gamma}{\gamma c + 1}$$
#
# All costs have one unit, a pass of the model over one token of a short text. c comes from a
# `Machine`, which here counts the weights that are read; `generate.py --fast` measures it by the
# clock, and corrects it after every round. Alpha of suffix decoding can be counted in
# every round: compare what it would have copied with what was written. Alpha of everything else
# comes from its own drafts, so for a drafter that is seldom used it is uncertain. Pace takes it to
# be one standard deviation above its mean, so it tries what it knows little about, and its old
# counts fade, so it tries again what failed long ago. (`generate.py --fast` measures alpha as well,
# in a short story, so its first guess is a good one.) If nothing is at least 5 % faster than plain
# decoding, Pace drafts nothing.
#
# We give it a stream of prompts whose kind changes: two stories, two dialogues, two maths problems,
# two pieces of code, and then all four kinds again.
#
# **Predict:** on which kind will it choose suffix decoding most often?

# %%
from collections import Counter

from methods.arms import candidates
from methods.pace import EARLIER, MARGIN, RISK, STAKE, Pace

assert MARGIN == 0.05 and EARLIER == 8
stream = [(kind, checkpoint.encode(tokenizer, line["prompt"], c.bos)) for first in (0, 4)
          for kind in ("stories", "dialogues", "maths", "code")
          for line in read_prompts(kind)[first : first + 2]]
kinds = [kind for kind, _ in stream]
pace = Pace(model, candidates(model, machine), machine)
chosen = []
tau = []
speeds = {"Pace": []}                                           # tokens per pass's worth of weights
for _, ids in stream:
    before = Counter(pace.chosen)
    balance = max(pace.balance, STAKE)                          # with which the text begins
    (text,), passes = generate(model, [ids], 32, pace, eos=c.eos)
    chosen.append(dict(Counter(pace.chosen) - before))          # {way of drafting: rounds}
    tau.append(len(text) / passes)
    cost = balance + (1 + RISK) * len(text) - pace.balance      # how the balance is kept: see below
    speeds["Pace"].append(len(text) / cost)
share = {}
for kind in dict.fromkeys(kinds):
    ways = Counter()
    for one, its in zip(chosen, kinds, strict=True):
        ways += Counter(one if its == kind else {})
    share[kind] = ways["suffix"] / ways.total()
    print(f"{kind:9}: {share[kind]:4.0%} of the rounds by suffix decoding")
assert not SHIPPED or max(share, key=share.get) == "code"

# %% [markdown]
# Is that better than one way of drafting for the whole stream? Here is the speed of Pace beside
# that of each exit with three tokens per draft, and of suffix decoding alone, as the mean over the
# four prompts of a kind.

# %% jupyter={"source_hidden": true}
from layerskip import SelfDraft, early_exit
from methods.lookup import Suffix

one_way = {f"exit {e}, gamma 3": (early_exit(L, e), 3) for e in (2, 4, 6)} | {"suffix": (None, 7)}
for name, (subs, gamma) in one_way.items():
    price = machine.draft(subs).start if subs else 0.0
    speeds[name] = []
    for _, ids in stream:
        drafter = SelfDraft(model, subs, gamma) if subs else Suffix(gamma)
        done = [r for _, r in rounds(model, [ids], 32, drafter, eos=c.eos)]
        cost = sum(1 + price * int(r.proposed) for r in done)
        speeds[name].append(sum(len(r.new[0]) for r in done) / cost)
for name, each in speeds.items():
    by_kind = {kind: sum(s for s, its in zip(each, kinds, strict=True) if its == kind) / 4
               for kind in share}
    listed = ", ".join(f"{kind} {s:.2f}" for kind, s in by_kind.items())
    print(f"{name:15} {sum(each) / len(each):.2f} times plain decoding: {listed}")

# %% tags=["gallery"] jupyter={"source_hidden": true}
figure, ((upper,), (lower,)) = plots.axes(2, 1, width=10, height=2.6)
ways = dict.fromkeys(way for one in chosen for way in one)
plots.draw_choices(upper, chosen, kinds, plots.hues_of(ways))
upper.set_title("what Pace chose for each prompt")
lower.bar(range(len(tau)), tau, 0.9, color=plots.HUES[0])
lower.axhline(1, color="#404040", ls="--", lw=1)
lower.set(ylabel="tokens per pass", xlabel="a bar for each prompt; dashed: plain decoding",
          xlim=upper.get_xlim(), xticks=upper.get_xticks(), xticklabels=[])
figure

# %% [markdown]
# On code. Stories and dialogues mostly get an exit. Which one depends on what was tried so far,
# since neighbours are worth nearly the same. When the next prompt begins, Pace keeps what it has
# learnt, but all earlier texts then count for eight tests of an exit at most.
#
# ## What it may lose
#
# A draft can fail. But its cost is known before the round: each drafted token costs c, and their
# number is fixed by then. Pace keeps a balance. It starts at eight passes, the *stake*. Each
# written token adds one pass, which is what it would have cost without drafting, and half a percent
# more.
# Each round subtracts what it costs. A round begins only if the balance covers what it would lose
# with nothing accepted, so the balance never falls below zero. That *is* the guarantee, in one
# line: *cost <= stake + 1.005 times what plain decoding of the same tokens costs*. By the clock, it
# holds as far as the costs are right, and two rounds with a draft are enough to correct its cost.
# One round in thirty-two is plain, so that the clock also says what a pass takes without a draft.
#
# The stake belongs to all ways of drafting. If one draft could lose all of it, no other would be
# made. So a draft may lose at most half of the balance. And since even a good draft fails at times,
# each text begins with at least the whole stake.
#
# Here is one round, worked through. A draft costs 0.2 passes per token, seven of ten of its tokens
# are accepted, and a block costs what one token costs.

# %%
from methods.arms import Arm
from methods.costs import Line
from methods.pace import promise

arm = Arm("an example", None, Line(0.2))
alpha = 0.7
balance = STAKE
offers = [1.0] + [machine.verify(0, 1 + g) + arm.cost(0, g) for g in range(1, 17)]
for g in (1, 2, 3, 4):
    tokens = sum(alpha**i for i in range(1 + g))
    print(f"{g} drafted: {tokens:.2f} tokens for {offers[g]:.1f} passes, "
          f"{tokens / offers[g]:.2f} per pass")
speed, g = promise(offers, alpha)
assert g == 3 and round(speed, 2) == 1.58
print(f"so it drafts {g}, which promises {speed:.2f}; the most that half of the balance covers is "
      f"{max(k for k, cost in enumerate(offers) if cost - 1 <= balance / 2)}")
for accepted in (0, 3):
    after = balance + (1 + RISK) * (1 + accepted) - offers[g]
    print(f"{accepted} accepted: the balance is then {balance:.3f} + {1 + RISK} x {1 + accepted} "
          f"- {offers[g]:.1f} = {after:.3f}")

# %% [markdown]
# With nothing accepted the round has lost 0.6 passes, less the half percent. With all three
# accepted it has won 2.4: four tokens for 1.6 passes.
#
# To test it, we give Pace a useless draft: the second half of the model alone. Copies would win
# back what it loses, so this Pace may not copy. We compare it with a fixed rule that drafts two
# tokens in every round.
#
# **Predict:** how often will Pace try the useless draft in 120 tokens? And how near will it come to
# what it may lose?

# %%
from methods.arms import self_draft


class WithoutCopies(Pace):
    def choose(self, n, room, thinking):
        self.copies.longest = 0                                 # as if there were nothing to copy
        return super().choose(n, room, thinking)


useless = list(range(L, 2 * L))                                 # the second half of the model
careful = WithoutCopies(model, [self_draft("useless", model, useless, machine)], machine)
won = [(0, 0.0)]                                                # (tokens written, passes saved)
for state, _ in rounds(model, [prompt], 120, careful):
    n = len(state.known[0]) - len(prompt)
    won.append((n, careful.balance - STAKE - RISK * n))
fixed = [(0, 0.0)]
cost = machine.draft(useless).start
for state, r in rounds(model, [prompt], 120, SelfDraft(model, useless, 2)):
    n = len(state.known[0]) - len(prompt)
    fixed.append((n, fixed[-1][1] + len(r.new[0]) - 1 - 2 * cost))
print(f"Pace tried the useless draft in {careful.chosen['useless']} of "
      f"{sum(careful.chosen.values())} rounds; it saved {won[-1][1]:.2f} passes, "
      f"and was allowed to lose {STAKE + 120 * RISK:.1f}")
print(f"two in every round save {fixed[-1][1]:.0f}")
if SHIPPED and useless == list(range(L, 2 * L)):                # what the text below says
    assert careful.chosen["useless"] < 12 and won[-1][1] < -1
    assert 0.9 < -fixed[-1][1] / fixed[-1][0] < 1.1

# %% jupyter={"source_hidden": true}
figure, ((side,),) = plots.axes(1, 1, width=8, height=3.6)
side.plot(*zip(*won, strict=True), color=plots.HUES[0], label="Pace, without copies")
side.plot([0, 120], [-STAKE, -STAKE - 120 * RISK], color="#404040", ls=":", label="the guarantee")
side.plot(*zip(*fixed, strict=True), color=plots.HUES[1], ls="--",
          label=f"two in every round: {fixed[-1][1]:.0f} at the end")
side.axhline(0, color="#808080", lw=0.8)
side.set(xlabel="tokens written", ylabel="passes saved",
         ylim=(-STAKE - 2, max(1, *(w for _, w in won)) + 1))
side.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 0.25))
assert all(w >= -STAKE - RISK * n - 1e-6 for n, w in won)
figure

# %% [markdown]
# A few times. Each try costs half a pass, and the blue curve drops. In between, Pace drafts
# nothing, and the curve is flat. It stays far above the guarantee, because Pace has learnt what the
# draft is worth long before the balance is spent. The fixed rule loses about one pass per token.
# (With copies Pace would write this text with fewer passes than plain decoding: a failing draft
# does not keep it from copying.)
#
# **Try it:** set `useless = list(range(L))`, the *first* half of the model. Will Pace draft now?
# Which curve will end higher?
#
# <details><summary>Answer</summary>
# Now it drafts, and both curves rise. Question 2 compares their ends.
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
# **2.** The first half of the model is a good draft, but not a cheap one. Who gains more with it:
# Pace, or a rule that drafts two tokens in every round?
#
# <details><summary>Answer</summary>
# Pace: it drafts only as far as the balance covers and the value says. But most of its lead in this
# text comes from copies.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
good = list(range(L))
saved = {}
for name, kind in (("Pace", Pace), ("Pace without copies", WithoutCopies)):
    free = kind(model, [self_draft("first half", model, good, machine)], machine)
    for _ in rounds(model, [prompt], 120, free):
        pass
    saved[name] = free.balance - STAKE - RISK * 120
done = [r for _, r in rounds(model, [prompt], 120, SelfDraft(model, good, 2))]
price = machine.draft(good).start
saved["two in every round"] = 120 - sum(1 + price * int(r.proposed) for r in done)
print("of 120 passes saved:", {name: round(passes, 1) for name, passes in saved.items()})
assert not SHIPPED or list(saved) == sorted(saved, key=saved.get, reverse=True)

# %% [markdown]
# Next: [close to the machine](12_close_to_the_machine.ipynb). What does a pass really cost, and
# what if its weights had fewer bits?
