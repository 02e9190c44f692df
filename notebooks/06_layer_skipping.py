# %% [markdown]
# # 6. Layer skipping: a draft is a shorter list
#
# The model drafts for itself with some of its own sub-layers. It needs no second model and no
# second cache. A draft is a subsequence of `range(2L)`, and it gains only where alpha > c. Which
# sub-layers should it be? This notebook asks how often their tokens would be accepted, what they
# cost, and when that pays off. Then a rule decides how far to draft while the text is being
# written.
#
# You need [4, speculative decoding](04_speculative_decoding.ipynb). About 45 minutes.

# %%
# %run start.py
MODEL = ROOT / "weights" / "stories-llama"      # or a folder with your own Llama or Gemma-2

# %%
torch.set_grad_enabled(False)
model, tokenizer = checkpoint.load(MODEL, dtype=torch.float32)
shipped = Path(MODEL).name == "stories-llama"
c = model.c
device = model.tok.device
L = model.c.n_layers
print(f"{L} blocks, so sub-layers 0 to {2 * L - 1}: even ones are attentions, odd ones are MLPs")

# %% [markdown]
# ## Three ways to choose sub-layers
#
# - **Early exit** (LayerSkip: Elhoushi et al. 2024,
#   [2404.16710](https://arxiv.org/abs/2404.16710)): the first E blocks, `range(2 * E)`.
# - **A skip set** (Draft & Verify: Zhang et al. 2023,
#   [2309.08168](https://arxiv.org/abs/2309.08168)): leave out any attentions and MLPs.
# - **Nothing skipped**: the draft is the model itself. It is always accepted, and saves nothing.
#
# All three are lists. (Kangaroo adds a small trained module behind an exit: notebook 9.) The
# sub-layers before the first gap compute exactly what the whole model would compute there, so the
# check need not repeat them, as in LayerSkip. We call them the *shared prefix*.

# %%
from layerskip import early_exit, shared_prefix, without

middle = range(max(1, L // 3), L - L // 3)
drafts = {"the whole model": list(range(2 * L)),
          f"exit after {max(1, L // 4)} blocks": early_exit(L, max(1, L // 4)),
          "middle attentions skipped": without(L, attn=middle),
          "middle blocks skipped": without(L, attn=middle, mlp=middle),
          "every second block": without(L, attn=range(1, L, 2), mlp=range(1, L, 2))}
for name, subs in drafts.items():
    print(f"{name:26} {len(subs):3} of {2 * L} sub-layers, "
          f"of which {shared_prefix(subs)} are shared")
plots.draw_sublayers(drafts, {name: shared_prefix(subs) for name, subs in drafts.items()}, 2 * L)

# %% [markdown]
# ## How often would a drafted token be accepted?
#
# We could decode and count. A cheaper way needs no decoding. Run the whole model over a text once,
# and keep all states. Then ask *for every position at once*: if a draft started here, what would
# its first token be, and with what probability would it be accepted? That is the sum of min(p, q)
# (Leviathan et al. 2023, Corollary 3.6). `search.Teacher` computes it, and `Calibration` has a
# teacher for each of our first stories, 512 tokens in all.
#
# For an early exit we can check it by hand: it drafts the most likely token of the state after E
# blocks.

# %%
from search import Calibration
from support.texts import read_prompts

stories = [line["text"] for line in read_prompts("stories")]
text = Calibration(model, tokenizer, stories, 512)              # greedy: p and q are one-hot
teacher = text.teachers[0]


def acceptance(sublayers, drafting=None):
    """Of a first token after each position, in these stories. (512,)"""
    return torch.cat([t.acceptance(sublayers, drafting) for t in text.teachers])


E = max(1, L // 3)
best = model.unembed(teacher.states[2 * E]).argmax(-1)          # after E blocks
naive = (best == model.unembed(teacher.states[-1]).argmax(-1)).double()[0].cpu()
assert torch.equal(naive, teacher.acceptance(early_exit(L, E)))
alpha = acceptance(early_exit(L, E))
print(f"{len(text.teachers)} of {len(stories)} stories, {len(alpha)} tokens")
print(f"exit after {E} blocks: {float(alpha.mean()):.0%} of the first drafted tokens "
      f"would be accepted (± {float(alpha.std() / len(alpha) ** 0.5):.0%})")

# %% [markdown]
# **Predict:** which single sub-layer is the worst one to skip? An early or a late one, an attention
# or an MLP?

# %%
exits = [float(acceptance(early_exit(L, e)).mean()) for e in range(1, L + 1)]
single = [float(acceptance([i for i in range(2 * L) if i != gone]).mean()) for gone in range(2 * L)]
print("worst to skip:", min(range(2 * L), key=lambda gone: single[gone]))

# %% jupyter={"source_hidden": true}
figure, ((left, right),) = plots.axes(1, 2)
plots.curves(left, range(1, L + 1), {"alpha of the exit": exits}, xlabel="blocks before the exit",
             ylabel="alpha", ylim=(0, 1.02))
left.plot([0, L], [0, 1], color="#808080", ls=":", label="share of the blocks")
left.legend(frameon=False, loc="lower right")
for kind, name in enumerate(("attention", "MLP")):
    right.bar(range(kind, 2 * L, 2), single[kind::2], color=plots.HUES[kind], label=name)
right.set(xlabel="the one sub-layer that is skipped", ylabel="alpha of the others", ylim=(0, 1.19))
right.legend(frameon=False, loc="upper right", ncols=2)
figure

# %% [markdown]
# Hardly any single sub-layer is indispensable, and that is what makes skipping possible. The
# exceptions are the very first ones, because they make the state that all others read. But a draft
# is cheap only if it skips many sub-layers, and then the damage adds up.
#
# ## What does a drafted token cost?
#
# When a large model writes one token at a time, most of the time goes into reading the weights. So
# we take as the cost of a drafted step the share of the weights that it reads: its sub-layers **and
# the output head**, which turns the state into logits (in this notebook simply *the head*).

# %%
from methods.costs import by_weights

costs = by_weights(c)
c_exits = [costs.draft(early_exit(L, e)).start for e in range(1, L + 1)]
E = max(1, L // 6)
share = E * (costs.attention + costs.mlp)
assert abs(share + costs.head - c_exits[E - 1]) < 1e-9
print(f"exit after {E} blocks: sub-layers {share:.3f} + head {costs.head:.3f} = "
      f"c {c_exits[E - 1]:.3f}")

# %% [markdown]
# Now both in one plane. A draft gains where it lies above the dashed line alpha = c. The contours
# show the speed-up at the best gamma.
#
# **Predict:** which exit is best? The most accurate, the cheapest, or one in between?

# %%
from control import best_gamma, expected_speedup

speed = [expected_speedup(a, best_gamma(a, cost), cost)
         for a, cost in zip(exits, c_exits, strict=True)]
e = speed.index(max(speed))
assert not shipped or 0 < e < exits.index(max(exits)), "neither the first nor the last"
print(f"exit {e + 1} with gamma {best_gamma(exits[e], c_exits[e])} is best: "
      f"predicted {speed[e]:.2f} times plain decoding")

# %% tags=["gallery"] jupyter={"source_hidden": true}
figure, ((side,),) = plots.axes(1, 1, width=8, height=5)
plots.draw_plane(side, exits[:-1], c_exits[:-1])
side.plot(c_exits[:-1], exits[:-1], color=plots.HUES[0], marker="o", ms=4, lw=1)
for e in {1, 2, L // 4, L // 2, L - 1} & set(range(1, L)):
    side.annotate(f"exit {e}", (c_exits[e - 1], exits[e - 1]), xytext=(5, -12),
                  textcoords="offset points", fontsize=10)
for name in ("middle blocks skipped", "every second block"):
    alpha = float(acceptance(drafts[name]).mean())
    cost = costs.draft(drafts[name]).start
    side.plot(cost, alpha, "s", color=plots.HUES[1])
    side.annotate(name, (cost, alpha), xytext=(6, -17), textcoords="offset points", fontsize=10,
                  color=plots.HUES[1])
figure

# %% [markdown]
# The best exit is neither the most accurate nor the cheapest. The orange squares are two skip sets
# that were chosen blindly, and are no better than exits of about the same cost. How to choose
# better is the subject of [the next notebook](07_search.ipynb).
#
# ## Predicted and measured
#
# How close does the prediction come to what we measure on this machine? The prediction follows the
# acceptances along the text, round by round (`expected_tokens_along`), because accepted tokens come
# in groups and their mean alone would be off. To measure, we run the drafts and plain decoding in
# turn, and take medians.

# %%
from control import best_along, expected_tokens_along, round_cost
from layerskip import SelfDraft
from speculative import rounds
from support.compare import compare

chosen = sorted({max(1, L // 12), max(1, L // 6), max(1, L // 4), max(1, L // 2)})
series = {e: [t.acceptance(early_exit(L, e)) for t in text.teachers] for e in chosen}
gammas = {e: best_along(series[e], c_exits[e - 1], most=6, least=1)[0] for e in chosen}
predicted = {e: expected_tokens_along(series[e], gammas[e]) / round_cost(gammas[e], c_exits[e - 1])
             for e in chosen}
makers = {e: lambda e=e: SelfDraft(model, early_exit(L, e), gammas[e]) for e in chosen}
prompt = text.ids[0][:24]
run = lambda drafter: rounds(model, [prompt], 24, drafter)
timed = compare(run, {"plain": lambda: None, **makers}, 1, repeats=3)
measured = {e: timed[e].rate / timed["plain"].rate for e in chosen}
assert all(timed[e].outputs == timed["plain"].outputs for e in chosen), "always the same text"
for e in chosen:
    print(f"exit {e:2}, gamma {gammas[e]}: predicted {predicted[e]:.2f}, "
          f"measured {measured[e]:.2f}")

# %% jupyter={"source_hidden": true}
figure, ((side,),) = plots.axes(1, 1, width=8, height=3)
for shift, values, hue, name in ((-0.2, predicted, plots.HUES[5], "predicted from alpha and c"),
                                 (0.2, measured, plots.HUES[0], "measured here, now")):
    side.bar([i + shift for i in range(len(chosen))], [values[e] for e in chosen], 0.4,
             color=hue, label=name)
side.axhline(1, color="#404040", lw=0.8)
side.set_xticks(range(len(chosen)), [f"exit {e}, gamma {gammas[e]}" for e in chosen])
side.set(ylabel="times plain decoding",
         ylim=(0, 1.35 * max(*predicted.values(), *measured.values())))
side.legend(frameon=False, loc="upper left", ncols=2)
figure

# %% [markdown]
# The model's own text is easier than the stories, which raises the measured gain above the
# prediction. Other things lower it: a small model on a CPU also spends time on Python and
# small tensors, and a block of several tokens costs more than one token. And 24 tokens after one
# prompt are few: some of the difference is chance. Tokens per pass carry over from one machine to
# another. Seconds do not.
#
# **Try it:** in the cell that measures, set `gammas = dict.fromkeys(chosen, 6)`. Which exit gains
# least?
#
# <details><summary>Answer</summary>
# The exit after half of the blocks: six drafted tokens cost more than three passes. But on a text
# as easy as this one even that need not be a loss.
# </details>
#
# ## How far to draft? A rule decides
#
# A fixed gamma is a compromise. A *rule* decides in each round how far to draft, and no rule can
# change the text. We follow one of them, **do no harm**. It estimates alpha from what happened to
# its own drafts. It drafts as far as the formula says, and stops where drafting does not pay off.
# Stopping is not final. Each round without a draft saves up 1 % of a pass. When that pays for one
# drafted token, the rule tries one, in case the text has become easier. (`control.Confidence`
# instead ends a draft after an unsure token, as Draft & Verify and Kangaroo do; `lab/rules.py` has
# the rules of other papers.)
#
# We give it three drafts:
#
# - a cheap exit, on a story;
# - an expensive exit, after half of the blocks, on a story sampled at temperature 1, which is
#   harder to predict;
# - a useless draft that skips the first half of the model.
#
# **Predict:** where will the estimate fall below c, and what happens then? How many tokens will the
# rule let the useless draft propose?

# %%
from lab.rules import DoNoHarm                                  # a rule of the lab
from sampling import Coins, to_probs


def traced(rule, sublayers, probs=to_probs, seed=0):
    """A run under a rule. Of each round: tokens drafted, tokens accepted, estimate of alpha."""
    seen = []
    start = checkpoint.encode(tokenizer, "Once upon a time, there was a little", c.bos)
    for _, r in rounds(model, [start], 120, SelfDraft(model, sublayers, rule), probs, Coins(seed)):
        seen.append((int(r.proposed), int(r.accepted), rule.seen[0].mean()))
    return zip(*seen, strict=True)


sampled = lambda z: to_probs(z, temperature=1.0)
cases = {"a cheap exit": (early_exit(L, max(1, L // 6)), to_probs),
         "an expensive exit": (early_exit(L, max(1, L // 2)), sampled),
         "a useless draft": (list(range(L, 2 * L)), to_probs)}
traces = {}
for name, (subs, probs) in cases.items():
    price = costs.draft(subs).start
    drafted, accepted, mean = traced(DoNoHarm(price, gamma=6), subs, probs, seed=3)
    traces[f"{name}, c = {price:.2f}"] = drafted, accepted, mean, price
    print(f"{name:18} {sum(drafted):3} tokens drafted in {len(drafted):3} rounds, "
          f"{sum(accepted):3} accepted")
tries = sum(drafted), max(drafted)
assert not shipped or tries == (2, 1), "the useless draft: two tries of one token"
plots.draw_traces(traces)

# %% [markdown]
# The cheap exit stays well above its c, and the rule changes only how far it drafts. The expensive
# exit crosses its c in both directions: after a few bad rounds the rule stops, much later one try
# succeeds, and from then on it drafts again. The useless draft gets two tries of one token in the
# whole run. (Each picture on the left has a scale of its own.)
#
# **Try it:** change `seed=3` in the cell above. Will the expensive exit be stopped every time?
#
# <details><summary>Answer</summary>
# No. Its alpha lies above its c, but a rejection or two among its first few tries are enough to
# stop it, and whether they come is chance. The other two decode greedily: no seed changes them.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
subs = early_exit(L, max(1, L // 2))
stopped = []
for seed in range(8):
    drafted, *_ = traced(DoNoHarm(costs.draft(subs).start, gamma=6), subs, sampled, seed)
    stopped.append(0 in drafted[:-1])                           # the last round may have no room
assert not shipped or len(set(stopped)) == 2, "by some seeds, not by all"
print("stopped:", dict(enumerate(stopped)))

# %% [markdown]
# ## The head, and a smaller draft vocabulary
#
# Each drafted step pays for the whole head, although most tokens of the vocabulary are never
# drafted. How large is the head's part of c? It depends on the shape. The head has V · dim weights,
# while each block has about 10 to 16 · dim². So what counts is the vocabulary *relative to* the
# width and to the number of blocks.
#
# **Predict:** our model has 4,096 tokens, Llama 3 has 128,256. Which of the models below pays the
# largest part for its head?

# %%
from model import Config

shapes = {"this model": c,
          "Llama-3-8B": Config(128_256, 4096, 32, 32, 8, 128, 14_336),
          "Gemma-2-9B": Config(256_000, 3584, 42, 16, 8, 256, 14_336),
          "Llama-3.2-1B": Config(128_256, 2048, 16, 32, 8, 64, 8192),
          "SmolLM2-135M": Config(49_152, 576, 30, 9, 3, 64, 1536)}
for name, shape in shapes.items():
    parts = by_weights(shape)
    block = (parts.attention + parts.mlp) * parts.unit
    assert not shipped or 10 < block / shape.dim**2 < 16
    step = parts.draft(early_exit(shape.n_layers, shape.n_layers // 4)).start
    print(f"{name:13} V {shape.vocab_size:7,}, width {shape.dim:5,}, {shape.n_layers} blocks; "
          f"exit after a quarter: c {step:.2f}, of which the head {parts.head:.2f}")

# %% [markdown]
# Our model and Llama-3-8B pay the same part, although one vocabulary is thirty times as large: its
# width is twenty times as large, and it has more blocks. Llama-3.2-1B has the same vocabulary with
# half the width and half the blocks, so its head is three times as large a part: half of what this
# draft reads. SmolLM2-135M is narrower still, and pays as much for fewer tokens.
#
# So let the draft choose among the n most frequent tokens only. The check uses the whole vocabulary
# as before, so the text stays exact. Tokens outside the n can no longer be drafted: alpha falls a
# little, and so does c. (Our five stories hold only a few hundred different tokens. After them the
# list goes on in the order of the ids; this tokenizer gave low ids to frequent pieces.)
#
# **Predict:** how many tokens cover most of what this draft would choose?

# %%
from methods.standin import ShortHead

counts = torch.zeros(c.vocab_size)
for story in stories[len(text.ids) :]:                          # not those that we score on
    ids = torch.tensor(checkpoint.encode(tokenizer, story, c.bos))
    counts += torch.bincount(ids, minlength=c.vocab_size)
frequent = counts.argsort(descending=True, stable=True).tolist()
sizes = [n for n in (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192) if n < c.vocab_size]
sizes.append(c.vocab_size)
short = early_exit(L, max(1, L // 6))
alphas = [float(acceptance(short, ShortHead(model, frequent[:n])).mean()) for n in sizes]
prices = [costs.draft(short, n / c.vocab_size).start for n in sizes]   # n of the V rows of the head
for size, alpha, price in zip(sizes, alphas, prices, strict=True):
    print(f"{size:6} tokens: alpha {alpha:.2f}, c {price:.2f}")

# %% [markdown]
# Once more by hand: take the most likely token *among the n*, and count how often it is the best
# one of the whole model.

# %%
said = model.unembed(teacher.states[len(short)])[0]             # (T, V): the logits of the draft
wanted = model.unembed(teacher.states[-1])[0].argmax(-1)
few = torch.tensor(frequent[:512], device=device)
naive = (few[said[:, few].argmax(-1)] == wanted).double().cpu()
assert torch.equal(naive, teacher.acceptance(short, ShortHead(model, frequent[:512])))

# %% jupyter={"source_hidden": true}
figure, ((left, right),) = plots.axes(1, 2, height=3)
plots.curves(left, sizes, {"alpha": alphas, "c": prices}, xlabel="tokens the draft may choose",
             xscale="log", ylim=(0, 1))
gain = [expected_speedup(a, best_gamma(a, price), price)
        for a, price in zip(alphas, prices, strict=True)]
right.plot(sizes, gain, color=plots.HUES[2], marker="o")
assert not shipped or gain.index(max(gain)) == sizes.index(2048), "half of the tokens"
assert not shipped or 200 < int((counts > 0).sum()) < 500, "a few hundred different tokens"
right.set(xlabel="tokens the draft may choose", xscale="log", ylabel="best predicted speed-up")
figure

# %% [markdown]
# On the shipped model half of the tokens are enough: alpha hardly falls, and c does. With fewer
# tokens alpha falls, while c hardly changes any more. Where the head is a larger part of the cost,
# a shorter list can gain more.
#
# **Try it:** the list was counted on stories. What will alpha be here if the 512 are the most
# frequent tokens of *code*? Count the `"text"` of each line of `read_prompts("code")` instead.
#
# <details><summary>Answer</summary>
# Far lower: a short list must come from the kind of text that it will draft. The longer the list,
# the smaller the difference, partly because both lists end in the same ids.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
counts = torch.zeros(c.vocab_size)
for line in read_prompts("code"):
    ids = torch.tensor(checkpoint.encode(tokenizer, line["text"], c.bos))
    counts += torch.bincount(ids, minlength=c.vocab_size)
foreign = counts.argsort(descending=True, stable=True).tolist()
of_code = [float(acceptance(short, ShortHead(model, foreign[:n])).mean()) for n in sizes]
assert not shipped or of_code[sizes.index(512)] < alphas[sizes.index(512)] - 0.1
rounded = {n: round(alpha, 2) for n, alpha in zip(sizes, of_code, strict=True)}
print("by the tokens of code:", rounded)

# %% [markdown]
# ## Why a published experiment was slower than plain decoding
#
# The repository [ccs96307/fast-llm-inference](https://github.com/ccs96307/fast-llm-inference)
# searched a skip set for Gemma-2 9B, and drafted up to five tokens per round. It reports an "accept
# rate" of 0.4057, and 24.08 tokens per second, where plain decoding reached 29.65 and the draft
# alone 48.82.
#
# **Predict:** its code computes accepted / drafted. Is that alpha? Does it tell whether drafting
# paid off?

# %%
y = 0.4057
c_there = 29.65 / 48.82
print(f"c = {c_there:.2f}; measured: {24.08 / 29.65:.2f} times plain decoding")
for drafted in (1, 2, 3, 5):                                    # per round, on average
    gain = (1 + drafted * y) / (1 + drafted * c_there)
    print(f"{drafted} drafted: {gain:.2f} times plain decoding")
assert all((1 + g * y) / (1 + g * c_there) < 1 for g in range(1, 100))

# %% [markdown]
# It is not alpha, but the *yield*. A round that drafts g tokens writes 1 + g · yield of them, for
# 1 + g · c passes, whatever alpha is. So drafts with a yield below c lose, whatever their length,
# and the speed that was measured fits about two drafted tokens per round. Shorter drafts would have
# had a higher yield, and alpha, which was not measured, may still lie above c. (The program also
# draws from p after a rejection: the first of notebook 4's mistakes. That changes the text, not its
# speed.)
#
# ## Two families, and what the training recipe is worth
#
# On the left are the exits of the shipped Llama and of the shipped Gemma-2, by their share of the
# blocks. On the right are two small twins that differ only in their training. One was trained with
# LayerSkip's recipe (layers dropped at random, and a loss at the exits), the other without. Their
# figures come from `weights/twin.json`.

# %% jupyter={"source_hidden": true}
import json

gemma, words = checkpoint.load(ROOT / "weights" / "stories-gemma2", device, torch.float32)
other = Calibration(gemma, words, stories, 512)
layers = gemma.c.n_layers
gemma_exits = []
for e in range(1, layers + 1):
    right = torch.cat([t.acceptance(early_exit(layers, e)) for t in other.teachers])
    gemma_exits.append(float(right.mean()))
twins = json.loads((ROOT / "weights" / "twin.json").read_text(encoding="utf-8"))
for kind, table in twins["recipe"]["files"].items():
    plain = twins["plain"]["files"][kind]["agreement"]
    assert all(a > b for a, b in zip(table["agreement"][:-1], plain[:-1], strict=True))

# %% jupyter={"source_hidden": true}
figure, ((left, right),) = plots.axes(1, 2)
left.plot([e / L for e in range(1, L + 1)], exits, color=plots.HUES[0], marker="o",
          label=Path(MODEL).name)
left.plot([e / layers for e in range(1, layers + 1)], gemma_exits, color=plots.HUES[1], marker="s",
          label="stories-gemma2")
for name, hue, mark in (("recipe", plots.HUES[2], "o"), ("plain", plots.HUES[3], "s")):
    runs = torch.tensor([table["agreement"] for table in twins[name]["files"].values()])
    share = [(e + 1) / runs.shape[1] for e in range(runs.shape[1])]
    right.plot(share, runs.mean(0), color=hue, marker=mark, label=f"trained with the {name}"
               if name == "recipe" else "trained without it")
    right.fill_between(share, runs.min(0).values, runs.max(0).values, color=hue, alpha=0.15, lw=0)
for side, title in ((left, "alpha of each exit"), (right, "the twins (band: all kinds of text)")):
    side.set(xlabel="share of the blocks", ylabel="alpha", ylim=(0, 1.02), title=title)
    side.legend(frameon=False)
figure

# %% [markdown]
# On the left, both models were trained to be left early, and their curves are alike. On the right,
# every exit of the twin with the recipe agrees with its whole model more often. That is what the
# recipe is for.
#
# ## Questions
#
# Answer first. Then unfold the answer, and the check that is folded below it.
#
# **1.** Two drafts have four sub-layers each, but one of them leaves out sub-layer 0. Which one
# makes the check cheaper? And the round, counting the weights that are read?
#
# <details><summary>Answer</summary>
# The one that keeps sub-layer 0 makes the check cheaper. Its shared prefix is longer, and the check
# skips what the draft has already computed. But then the last drafted token, after which nothing is
# drafted, has to run through the prefix, too. So the prefix is read gamma + 1 times, just as often
# as by gamma drafted tokens and a whole check. Only multiplications are saved.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
assert shared_prefix([0, 1, 2, 3]) == 4 and shared_prefix([1, 2, 3, 4]) == 0
prefix = costs.draft([0, 1, 2, 3]).start - costs.head           # without the output head
for gamma in (1, 3):
    reused = gamma * costs.head + (gamma + 1) * prefix + (1 - prefix)
    assert abs(reused - (1 + gamma * (prefix + costs.head))) < 1e-9
    print(f"gamma {gamma}: {reused:.3f} passes, with the prefix shared and without")

# %% [markdown]
# **2.** Double the vocabulary. Does an early exit become more or less attractive?
#
# <details><summary>Answer</summary>
# Less. Each drafted step pays for the head, so c grows for a small draft, while the layers it saves
# stay the same.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
from dataclasses import replace

large = by_weights(replace(c, vocab_size=2 * c.vocab_size))
before, after = (one.draft(early_exit(L, 1)).start for one in (costs, large))
assert after > before
print(f"c of exit 1: {before:.2f} -> {after:.2f}")

# %% [markdown]
# **3.** A rule ends a draft after a token of low confidence. Why *after* it, and not before it?
#
# <details><summary>Answer</summary>
# The token has been drawn from q. If the rule threw it away because of its value, the tokens that
# remain would not be distributed as q, and the text would not be exact (question 2 of notebook
# 4).
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
from control import Confidence

strict = SelfDraft(model, early_exit(L, max(1, L // 6)), Confidence(1.1, 4))
lengths = [int(r.proposed) for _, r in rounds(model, [prompt], 30, strict)]
assert set(lengths[:-1]) == {1}                                 # no token is confident: one each
print("with a threshold that no token reaches, each draft has one token:", lengths)

# %% [markdown]
# **4.** The estimate of alpha is exactly c. Should we draft?
#
# <details><summary>Answer</summary>
# It makes no difference for one token: it adds alpha tokens for c passes, and
# (1 + alpha) / (1 + c) is 1. Two tokens already lose.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
assert abs(expected_speedup(0.3, 1, 0.3) - 1) < 1e-12 and expected_speedup(0.3, 2, 0.3) < 1
for gamma in range(4):
    speed = expected_speedup(0.3, gamma, 0.3)
    print(f"alpha 0.3, c 0.3, gamma {gamma}: {speed:.3f} times plain decoding")

# %% [markdown]
# Next: [search](07_search.ipynb). There are 2^(2L) skip sets. Which one is best?
