# %% [markdown]
# # 3. Sampling: from a distribution to one token
#
# The model does not choose a token. It gives a probability to every token. This notebook shows the
# ways to choose one, on a real distribution. It ends with a rule that makes the rest of the library
# testable: **randomness is an argument.** A distribution and one uniform number, a *coin*,
# determine the token. The same coin gives the same token on every machine and in every language.
#
# You need [1, the forward pass](01_forward_pass.ipynb). About 35 minutes.

# %%
# %run start.py
MODEL = ROOT / "weights" / "stories-llama"      # or a folder with your own Llama or Gemma-2

# %%
torch.set_grad_enabled(False)
model, tokenizer = checkpoint.load(MODEL, dtype=torch.float32)
c = model.c
device = model.tok.device
opening = "One day, a little girl went to the park. There she saw a big"
prompt = checkpoint.encode(tokenizer, opening, c.bos)
logits = model(torch.tensor([prompt], device=device))[0, -1].cpu()     # (V,): for the next token
print("logits", tuple(logits.shape), "from", float(logits.min()), "to", float(logits.max()))

# %% [markdown]
# ## One real distribution
#
# Softmax turns logits into probabilities: take the exponential of each, and divide by their sum.
# Here are the most likely tokens after "There she saw a big".

# %%
p = (logits - logits.max()).exp()
p = p / p.sum()
assert torch.allclose(p, logits.softmax(-1))
top = p.argsort(descending=True)[:12]
names = [plots.word(tokenizer, t) for t in top.tolist()]
print(f"the {len(top)} most likely of {c.vocab_size:,} tokens have {float(p[top].sum()):.0%} "
      f"of the probability; the least likely one has {float(p.min()):.1e}")

# %% jupyter={"source_hidden": true}
figure, ((side,),) = plots.axes(1, 1, width=8, height=3)
plots.bars(side, names, p[top])
side.set_ylabel("probability")
figure

# %% [markdown]
# There is a long tail: thousands of tokens, each very unlikely. Together they matter, and one odd
# word can lead a whole story astray. The settings below deal with the tail.
#
# ## Temperature: sharper or flatter
#
# Divide the logits by T before the softmax. A T below 1 makes the distribution sharper, a T above 1
# flatter.
#
# **Predict:** what should T = 0 mean? A division by zero?

# %%
from sampling import to_probs

temperatures = (0, 0.5, 1, 2)
for T in temperatures:
    if T > 0:
        assert torch.allclose((logits / T).softmax(-1), to_probs(logits, temperature=T), atol=1e-6)

# %% tags=["gallery"] jupyter={"source_hidden": true}
figure, sides = plots.axes(2, 2, height=2.7)
for side, T in zip(sides.flat, temperatures, strict=False):
    plots.bars(side, names, to_probs(logits, temperature=T)[top])
    shown = to_probs(logits, temperature=T)[top]
    side.set(title=f"temperature {T}", ylim=(0, 1.05 * float(shown.max())), ylabel="probability")
figure

# %% [markdown]
# (Each panel has a scale of its own.) As T falls towards 0, all the probability moves to the most
# likely token. So the library defines T = 0 as that limit, a *one-hot* distribution: 1 for the best
# token and 0 for all others. Greedy decoding is then no special case. It is sampling from a
# one-hot, and everything that holds for sampling holds for it.
#
# ## Three ways to cut the tail
#
# - **top-k** keeps the k most likely tokens.
# - **top-p** (Holtzman et al. 2020, "nucleus sampling") keeps the most likely tokens until
#   together they have a given share of the probability.
# - **min-p** (Nguyen et al. 2024) keeps every token that is at least min-p times as likely as the
#   best one.
#
# What remains is scaled to sum to 1 again. Each takes a few lines:

# %%
def top_k(p, k):
    kept = torch.zeros_like(p).scatter(0, p.topk(k).indices, 1.0)
    return p * kept / (p * kept).sum()


def top_p(p, mass):
    order = p.argsort(descending=True, stable=True)
    before = p[order].cumsum(0) - p[order]                      # the mass of all more likely tokens
    kept = torch.zeros_like(p).scatter(0, order[before < mass], 1.0)
    return p * kept / (p * kept).sum()


def min_p(p, share):
    kept = (p >= share * p.max()).float()
    return p * kept / (p * kept).sum()


cuts = {"top-k 5": (top_k(p, 5), to_probs(logits, 1.0, top_k=5)),
        "top-p 0.8": (top_p(p, 0.8), to_probs(logits, 1.0, top_p=0.8)),
        "min-p 0.1": (min_p(p, 0.1), to_probs(logits, 1.0, min_p=0.1))}
for name, (naive, library) in cuts.items():
    assert torch.allclose(naive, library, atol=1e-6)
    print(f"{name}: {int((library > 0).sum())} tokens stay")

# %% jupyter={"source_hidden": true}
figure, (sides,) = plots.axes(1, 3, width=3.4, height=3)
highest = max(float(library.max()) for _, library in cuts.values())
for side, (name, (_, library)) in zip(sides, cuts.items(), strict=True):
    plots.bars(side, names, library[top])
    side.bar(range(len(top)), p[top], fc="none", ec="#404040", lw=0.9)
    side.set(title=f"{name}: {int((library > 0).sum())} stay", ylim=(0, 1.05 * highest))
sides[0].set_ylabel("probability")
figure

# %% [markdown]
# The outlines show the distribution before the cut. The more of the tail a cut removes, the more it
# raises what is left. How many tokens stay depends on how sure the model is. Let us read a story
# and count, at each position, how many tokens could follow.
#
# **Predict:** which of the three curves is flat? Which of the other two jumps higher?

# %%
from support.texts import read_prompts

story = checkpoint.encode(tokenizer, read_prompts("stories")[1]["text"], c.bos)[:44]
along = model(torch.tensor([story], device=device))[0].cpu()            # (T, V)
settings = {"top-k 5": dict(top_k=5), "top-p 0.8": dict(top_p=0.8), "min-p 0.1": dict(min_p=0.1)}
stay = {name: (to_probs(along, 1.0, **cut) > 0).sum(-1) for name, cut in settings.items()}
for name, counts in stay.items():
    print(f"{name}: {int(counts.min())} to {int(counts.max())} tokens stay")

# %% jupyter={"source_hidden": true}
figure, ((side,),) = plots.axes(1, 1, width=10, height=3.6)
for (name, counts), hue, line in zip(stay.items(), plots.HUES, ("-", "--", ":"), strict=False):
    side.step(range(len(story)), counts, where="mid", color=hue, ls=line, lw=1.8, label=name)
words = ["start", *(plots.word(tokenizer, t)[:9] for t in story[1:])]
side.set_xticks(range(len(story)), words, rotation=90, fontsize=9)
side.set(xlabel="after this token", ylabel="tokens that may follow", yscale="log",
         xlim=(-1, len(story)))
side.legend(frameon=False)
figure

# %% [markdown]
# Top-k allows the same number everywhere: too many where only one word fits, and too few where a
# hundred do. Top-p and min-p follow the model: where it is sure, both leave one token. Where it is
# unsure, top-p jumps higher, because it must add up many small probabilities to reach its sum.
#
# **Try it:** set top-p to 0.95. Which parts of its curve will move, the peaks or the valleys?
#
# <details><summary>Answer</summary>
# The peaks move most: a long tail needs many more tokens to reach 0.95. A valley where one token
# has more than 95 % stays at 1.
# </details>
#
# ## The order of the filters
#
# The order matters. With a temperature above 1, the distribution becomes flatter, so a top-p that
# comes after it keeps more tokens than one that comes before it. Libraries differ here:
# `transformers` applies the temperature first, and so do we; llama.cpp applies it last by default.
# The same settings can mean two different distributions.

# %%
hot = 1.8
first = to_probs(logits, temperature=hot, top_p=0.8)                    # temperature, then top-p
kept = to_probs(logits, temperature=1.0, top_p=0.8)                     # top-p, then temperature
last = to_probs(kept.log(), temperature=hot)
moves = float((first - last).abs().sum() / 2)
print(f"probability that must move to turn one into the other: {moves:.2f}")
assert hot < 1 or (first > 0).sum() >= (last > 0).sum()

# %% jupyter={"source_hidden": true}
figure, (sides,) = plots.axes(1, 2, height=2.9)
for side, q, when in zip(sides, (first, last), ("first", "last"), strict=True):
    plots.bars(side, names, q[top])
    side.set(title=f"temperature {when}: {int((q > 0).sum())} tokens stay",
             ylim=(0, 1.05 * float(max(first.max(), last.max()))))
sides[0].set_ylabel("probability")
figure

# %% [markdown]
# **Try it:** set `hot = 0.5`. Which of the two orders keeps more tokens now?
#
# <details><summary>Answer</summary>
# Temperature last. It cuts before the distribution becomes sharper.
# </details>
#
# The library has one order (temperature, top-k, top-p, min-p) in one function, `to_probs`. Plain
# decoding uses it, and so do both sides of speculative decoding: the draft, and the model that
# checks it. If the *draft* were filtered in another order, the text would stay exact, but fewer
# drafted tokens would be accepted. If the *checking* model were, the distribution of the text would
# change.
#
# ## Choosing: the coin decides
#
# Put the probabilities side by side on a line from 0 to 1. Drop a point on the line, uniformly at
# random. The token is the one whose piece was hit. (This is the inverse of the cumulative
# distribution.)

# %%
def pick(p, u):
    """The token that the uniform number u in [0, 1) falls on."""
    total = float(p.double().sum())
    reached = 0.0
    for token, weight in enumerate(p.double().tolist()):
        reached += weight
        if u * total < reached:                                 # strictly: never an empty piece
            return token
    return token


short = to_probs(logits, temperature=1.0, top_k=8)
marks = {u: f"u = {u}: '{plots.word(tokenizer, pick(short, u))}'" for u in (0.1, 0.5, 0.9)}
ids = short.nonzero()[:, 0].tolist()
plots.draw_line([plots.word(tokenizer, t) for t in ids], short[ids].tolist(), marks)

# %% [markdown]
# The pieces are in the order of their ids, not of their sizes. Any fixed order works, as long as it
# is the same everywhere. **u is an argument**: if you know p and u, you know the token. The
# library's `Coins` does the same for whole batches. (`uniforms(seed, first, count)` are the numbers
# it uses.)

# %%
from sampling import Coins, uniforms

coins = Coins(seed=3)
for u in uniforms(3, 0, 50).tolist():
    assert pick(short, u) == int(coins.choose(short))
five = [tokenizer.decode([pick(short, u)]) for u in uniforms(3, 0, 5).tolist()]
print("fifty tokens, chosen by hand and by the library:", five, "...")

# %% [markdown]
# ## Where the coins come from
#
# Random number generators differ between libraries, and between CPU and GPU. With them, no two
# programs could be compared token by token. So the library brings its own: SplitMix64 (Steele, Lea
# and Flood 2014). It takes about ten lines in any language. Number i does not depend on the numbers
# before it, so you can compute the millionth one directly.

# %%
def splitmix(seed, i):
    """Number i of the stream of a seed, as 64 bits."""
    mask = 2**64 - 1
    z = (seed + (i + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


assert splitmix(0, 0) == 0xE220A8397B1DCDAF                     # as published, for seed 0
naive = [(splitmix(42, i) >> 11) * 2.0**-53 for i in range(1000)]
assert naive == uniforms(42, 0, 1000).tolist()
print(naive[:3])

# %% [markdown]
# Do they look random? On the left is a histogram. On the right, each number is plotted against the
# next one. A pattern there would mean that one coin says something about the following one. (Eyes
# are poor judges of a histogram. The test at the end of this notebook judges this one.)

# %% jupyter={"source_hidden": true}
u = uniforms(7, 0, 4000)
figure, ((left, right),) = plots.axes(1, 2, width=4, height=3.2)
left.hist(u.numpy(), bins=20, color=plots.HUES[0], ec="white")
left.axhline(len(u) / 20, color=plots.HUES[1], ls="--")
left.set(xlabel="u", ylabel="how many of 4,000")
right.scatter(u[:-1], u[1:], s=1, color=plots.HUES[0])
right.set(xlabel="u", ylabel="the next u", aspect="equal")
figure

# %% [markdown]
# A seed determines a whole text. Here are the same coins at different temperatures:

# %%
from speculative import generate

for T in (0, 0.5, 1.0, 1.5):
    for seed in (1, 2):
        (out,), _ = generate(model, [prompt], 16, None, lambda z, T=T: to_probs(z, T), Coins(seed))
        print(f"T = {T}, seed {seed}: ...{tokenizer.decode(out)!r}")

# %% [markdown]
# ## Does the sampler sample? A test with chance in it
#
# Draw many tokens and count them. If the sampler is right, token t should come up about n·p(t)
# times. Pearson's statistic measures how far off the counts are:
#
# $$\chi^2 = \sum_t \frac{(\text{count}_t - n\,p_t)^2}{n\,p_t}$$
#
# For a correct sampler and m tokens, its distribution is known, with mean m - 1. We compare two
# samplers: ours, and a "simplified" one that draws from probabilities rounded to multiples of 1/20.
# (A thousandth is added to each, so that a token that was rounded down to 0 can still be drawn.)

# %%
def chi_square(p, drawn):
    """The statistic, and the probability that a correct sampler reaches at least this value."""
    expected = len(drawn) * p.double()
    counts = torch.bincount(drawn, minlength=len(p))
    x = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(p) - 1) / 2, dtype=torch.float64)
    return float(x), float(torch.special.gammaincc(freedom, x / 2))


draws = 20_000
some = to_probs(logits, temperature=1.0, top_k=10)
some = some[some > 0]                                           # without thousands of zeros
rounded = (some * 20).round() / 20 + 0.001
for name, weights in (("the library", some), ("rounded to 1/20", rounded)):
    x, chance = chi_square(some, Coins(0).choose(weights.expand(draws, -1)))
    print(f"{name:16} chi-square {x:7.1f}; "
          f"a correct sampler reaches it with probability {chance:.3f}")
x, chance = chi_square(torch.full((20,), 1 / 20), (20 * uniforms(7, 0, 4000)).long())
print(f"the histogram above, 20 bars: chi-square {x:.1f}, reached with probability {chance:.3f}")

# %% [markdown]
# **Try it:** with 20,000 draws the mistake is obvious. Set `draws` to 200, then to 20. What do you
# expect?
#
# <details><summary>Answer</summary>
# The excess over 9 falls in proportion to the draws. With 20 draws it is lost in the chance
# variation.
# </details>
#
# **Predict:** repeat the test of the correct sampler 200 times. How often will its probability be
# below 5 %?

# %%
many = Coins(1).choose(some.expand(200 * 2000, -1)).view(200, 2000)
good = torch.tensor([chi_square(some, row)[0] for row in many])
many = Coins(1).choose(rounded.expand(200 * 2000, -1)).view(200, 2000)
bad = torch.tensor([chi_square(some, row)[0] for row in many])
assert abs(good.mean() - 9) < 1.2 and bad.mean() > good.mean()
limit = 16.92                                                   # a correct one exceeds it in 5 %
assert abs(torch.special.gammaincc(torch.tensor(4.5), torch.tensor(limit / 2)) - 0.05) < 1e-4
print(f"beyond the limit: {(good > limit).float().mean():.1%} of the correct sampler's tests "
      f"(of 200: ± {(0.05 * 0.95 / 200) ** 0.5:.1%})")

# %% jupyter={"source_hidden": true}
figure, ((side,),) = plots.axes(1, 1, width=8, height=3)
edges = torch.logspace(0, 3, 61).tolist()
for values, hue, name in ((good, plots.HUES[0], "the library"),
                          (bad, plots.HUES[1], "rounded to 1/20")):
    side.hist(values.numpy(), bins=edges, color=hue, alpha=0.6, label=name)
side.axvline(limit, color="#404040", ls="--", label="the 5 % limit")
side.set(xlabel="chi-square of 2,000 draws of ten tokens", ylabel="how many of 200 tests",
         xscale="log")
side.legend(frameon=False, fontsize=9, loc="upper left")
figure

# %% [markdown]
# By construction, a correct sampler fails such a test one time in twenty. A suite with a hundred of
# these tests would fail nearly every time. If we demand one in a million instead of 5 %, small
# mistakes pass. This is the price of a test with chance in it.
#
# Because our coins are an argument, there is a better way. Instead of drawing many times, go
# through *every* outcome of the coin, add up the probabilities, and compare exactly. The next
# notebook does this with a whole round of speculative decoding.
#
# ## Questions
#
# Answer first. Then unfold the answer, and the check that is folded below it.
#
# **1.** What does the distribution become as T grows without bound?
#
# <details><summary>Answer</summary>
# Uniform: all tokens become equally likely, 1/V each.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
uniform = torch.full_like(p, 1 / c.vocab_size)
assert torch.allclose(to_probs(logits, temperature=1e9), uniform, rtol=1e-3)
print("uniform over", c.vocab_size, "tokens")

# %% [markdown]
# **2.** Which value of min-p gives greedy decoding?
#
# <details><summary>Answer</summary>
# min-p = 1: only a token as likely as the best one stays. (With a tie, several do.)
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
assert torch.equal(to_probs(logits, temperature=1.0, min_p=1.0), to_probs(logits, temperature=0))
print("one token stays")

# %% [markdown]
# **3.** A sampler compares `u * total <= reached` instead of `<`. When does it give a different
# token? Is that bad?
#
# <details><summary>Answer</summary>
# When u falls exactly on an edge, above all when u = 0. If the first tokens have probability 0, it
# returns token 0, whose probability is 0.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
weights = torch.tensor([0.0, 0.0, 1.0])


class Zero(Coins):
    def take(self, count, device):
        return torch.zeros(count, dtype=torch.float64)


assert int(Zero().choose(weights)) == pick(weights, 0.0) == 2
print("u = 0 skips tokens of probability 0")

# %% [markdown]
# **4.** Two prompts are sampled in one batch with seed 5, then each alone with seed 5. Are the
# texts equal?
#
# <details><summary>Answer</summary>
# Only where a row gets the same coins. The rows of a batch share one stream: row 0 takes the first
# number, row 1 the second. Alone, the second prompt would get the first one. Greedy rows do not
# depend on coins. (But a batch may round differently: notebook 5.)
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
other = checkpoint.encode(tokenizer, "The dog was", c.bos)
warm = lambda z: to_probs(z, temperature=1.0)
(row, _), _ = generate(model, [prompt, other], 1, None, warm, Coins(5))
(alone,), _ = generate(model, [prompt], 1, None, warm, Coins(5))
assert row == alone                                             # both were drawn with coin 0
batch, _ = generate(model, [prompt, other], 8)
assert batch == [generate(model, [ids], 8)[0][0] for ids in (prompt, other)]
print("the first token of row 0 is the same; greedy rows are the same to the end")

# %% [markdown]
# Next: [speculative decoding](04_speculative_decoding.ipynb). It takes two distributions, p and q,
# and a few coins, and the text stays the same.
