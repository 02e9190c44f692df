# %% [markdown]
# # 3. Sampling: from a distribution to one token
#
# The model does not say a word. It says how likely each word is. This notebook shows the ways to choose one,
# as pictures of one real distribution. At the end stands a small discipline that makes all the rest of the
# library testable: **randomness is an argument.**
#
# > **The one thing to remember: a distribution and one uniform number determine the token. The same coin
# > gives the same token, on every machine and in every language.**
#
# Before it: [2, the cache](02_kv_cache.ipynb). After it:
# [4, speculative decoding](04_speculative_decoding.ipynb), where it matters that target and draft are treated
# in exactly the same way.

# %%
# %run start.py
MODEL = ROOT / "weights" / "stories-llama"      # or a folder with your own Llama or Gemma-2

# %%
import torch

import checkpoint
from notebooks import plots

torch.set_grad_enabled(False)
model, tokenizer = checkpoint.load(MODEL, dtype=torch.float32)
c, device = model.c, model.tok.device
prompt = checkpoint.encode(tokenizer, "One day, a little girl went to the park. There she saw a big", c.bos)
logits = model(torch.tensor([prompt], device=device))[0, -1].cpu()     # (V,): of the next token
print("logits", tuple(logits.shape), "from", float(logits.min()), "to", float(logits.max()))

# %% [markdown]
# ## One real distribution
#
# Softmax turns logits into probabilities: exponentials, divided by their sum. Here are the most likely tokens
# after "There she saw a big".

# %%
p = (logits - logits.max()).exp()
p = p / p.sum()
assert torch.allclose(p, logits.softmax(-1))
top = p.argsort(descending=True)[:16]
names = [tokenizer.decode([t]).strip() or "␣" for t in top.tolist()]


def bars(side, p, title="", hue=plots.HUES[0], ymax=None):
    """The most likely tokens of the raw distribution, whatever became of them in p."""
    side.bar(range(len(top)), p[top], color=hue)
    side.set_xticks(range(len(top)), names, rotation=90, fontsize=8)
    side.set(title=title, ylim=(0, ymax))

# %%
figure, ((side,),) = plots.axes(1, 1, width=8, height=3)
bars(side, p)
side.set_ylabel("probability")
print(f"the {len(top)} most likely of {c.vocab_size:,} tokens have {float(p[top].sum()):.0%} of the "
      f"probability; the least likely one has {float(p.min()):.1e}")
figure

# %% [markdown]
# There is a long tail: thousands of tokens, each very unlikely. Together they are not negligible, and one
# strange word can lead a story astray. Hence the settings that follow.
#
# ## Temperature: sharper or flatter
#
# Divide the logits by T before the softmax. Below 1 the distribution becomes sharper, above 1 flatter.
#
# **Predict:** what does T = 0 mean? A division by zero?

# %% tags=["gallery"]
from sampling import to_probs

figure, (sides,) = plots.axes(1, 4, width=3.4, height=2.9)
for side, T in zip(sides, (0, 0.5, 1, 2), strict=True):
    bars(side, to_probs(logits, temperature=T), f"temperature {T}", ymax=1.02)
    if T > 0:
        naive = (logits / T).softmax(-1)
        assert torch.allclose(naive, to_probs(logits, temperature=T), atol=1e-6)
sides[0].set_ylabel("probability")
figure

# %% [markdown]
# As T falls to 0, all the probability moves to the best token. So the library defines T = 0 as exactly that:
# a *one-hot*, 1 for the best token and 0 for all others. Greedy decoding is then not a special case. It is
# sampling from a one-hot, and everything that holds for sampling holds for it.
#
# ## Three ways to cut the tail
#
# - **top-k** keeps the k most likely tokens.
# - **top-p** (Holtzman et al. 2020, "nucleus sampling") keeps the likeliest tokens, just as many as it takes
#   to reach a given sum of probabilities.
# - **min-p** (Nguyen et al. 2024) keeps the tokens that have at least min-p times the probability of the
#   best.
#
# What stays is scaled to sum to 1 again. Each in a few lines:

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

# %%
cuts = {"top-k 5": (top_k(p, 5), to_probs(logits, 1.0, top_k=5)),
        "top-p 0.8": (top_p(p, 0.8), to_probs(logits, 1.0, top_p=0.8)),
        "min-p 0.1": (min_p(p, 0.1), to_probs(logits, 1.0, min_p=0.1))}
figure, (sides,) = plots.axes(1, 3, width=4, height=2.9)
for side, (name, (naive, library)) in zip(sides, cuts.items(), strict=True):
    assert torch.allclose(naive, library, atol=1e-6)
    bars(side, library, f"{name}: {int((library > 0).sum())} tokens stay")
    side.bar(range(len(top)), p[top], fc="none", ec="#808080", lw=0.8)      # outlines: before the cut
sides[0].set_ylabel("probability")
figure

# %% [markdown]
# The titles say how many tokens stay. At another position it would be other numbers: the three differ in what
# they do when the model is sure, and when it is not. Let us read a story and count, at each position, how
# many tokens may follow.
#
# **Predict:** which of the three curves is flat? Which of the other two jumps higher?

# %%
from support.files import read_prompts

story = checkpoint.encode(tokenizer, read_prompts("stories")[1]["text"], c.bos)[:60]
along = model(torch.tensor([story], device=device))[0].cpu()            # (T, V)
figure, ((side,),) = plots.axes(1, 1, width=11, height=3.4)
settings = {"top-k 5": dict(top_k=5), "top-p 0.8": dict(top_p=0.8), "min-p 0.1": dict(min_p=0.1)}
for (name, cut), hue, line in zip(settings.items(), plots.HUES, ("-", "--", ":"), strict=False):
    stay = (to_probs(along, 1.0, **cut) > 0).sum(-1)
    side.step(range(len(story)), stay, where="mid", color=hue, ls=line, label=name)
side.set_xticks(range(len(story)), [tokenizer.decode([t]).strip() for t in story], rotation=90, fontsize=8)
side.set(xlabel="after this token", ylabel="tokens that may follow", yscale="log", xlim=(-1, len(story)))
side.legend(frameon=False)
figure

# %% [markdown]
# Top-k allows the same number everywhere: too many where only one word fits, too few where hundreds do. Top-p
# and min-p follow the model. Where the model has no idea, top-p jumps higher: it must add up many small
# probabilities to reach its sum.
#
# ## The order of the filters
#
# The order matters. Top-p after a temperature above 1 sees a flatter distribution and keeps more tokens
# than top-p before it. Libraries differ here: `transformers` applies the temperature first, as we do; the
# default chain of llama.cpp applies it last. So the same settings can mean two different distributions.

# %%
hot = 1.8
first = to_probs(logits, temperature=hot, top_p=0.8)                    # temperature, then top-p
kept = to_probs(logits, temperature=1.0, top_p=0.8)                     # top-p, then temperature
last = to_probs(kept.log(), temperature=hot)
figure, (sides,) = plots.axes(1, 2, width=5.5, height=2.9)
for side, q, when in zip(sides, (first, last), ("first", "last"), strict=True):
    bars(side, q, f"temperature {when}: {int((q > 0).sum())} tokens stay", ymax=float(last.max()))
assert (first > 0).sum() >= (last > 0).sum()
sides[0].set_ylabel("probability")
print(f"probability that must move to make one the other: {float((first - last).abs().sum() / 2):.2f}")
figure

# %% [markdown]
# The library has one order (temperature, top-k, top-p, min-p) in one function, `to_probs`, and uses it for
# the target, for the draft and for plain decoding. If the draft were filtered in another order, its q would
# be another distribution: still exact, but accepted less often. If the *target* were, the text would change.
#
# ## Choosing: the coin decides
#
# Lay the probabilities side by side on a line from 0 to 1. Drop a point on it, uniformly. The token is the
# one whose piece was hit. (This is the inverse of the cumulative distribution.)

# %%
def pick(p, u):
    """The token that the uniform number u in [0, 1) falls on."""
    total = float(p.double().sum())
    reached = 0.0
    for token, weight in enumerate(p.double().tolist()):
        reached += weight
        if u * total < reached:                                 # strictly: a piece of length 0 is never hit
            return token
    return token

# %%
short = to_probs(logits, temperature=1.0, top_k=8)
ids = short.nonzero()[:, 0]
edges = torch.cat([torch.zeros(1), short[ids].cumsum(0)])
figure, ((side,),) = plots.axes(1, 1, width=11, height=1.7)
for i, token in enumerate(ids.tolist()):
    side.barh(0, float(short[token]), left=float(edges[i]), color=plots.HUES[i % 6], alpha=0.45, ec="white")
    side.text(float(edges[i] + edges[i + 1]) / 2, 0, tokenizer.decode([token]), ha="center", va="center",
              fontsize=9, rotation=90 if short[token] < 0.06 else 0)
for u in (0.1, 0.5, 0.9):
    side.annotate(f"u = {u}: {tokenizer.decode([pick(short, u)]).strip()}", (u, 0.4), (u, 0.75), ha="center",
                  arrowprops=dict(arrowstyle="->"), annotation_clip=False)
side.set(xlim=(0, 1), ylim=(-0.4, 1.1), yticks=[], xlabel="u")
figure

# %% [markdown]
# The pieces stand in the order of their ids, not of their size. It could be any fixed order, but it must be
# one and the same everywhere. Then **u is an argument**: who knows p and u knows the token. The library's
# `Coins` does the same for whole batches. (`uniforms(seed, first, count)` are the numbers that it takes.)

# %%
from sampling import Coins, uniforms

coins = Coins(seed=3)
for u in uniforms(3, 0, 50).tolist():
    assert pick(short, u) == int(coins.choose(short))
print("fifty tokens, chosen by hand and by the library:", [tokenizer.decode([pick(short, u)])
                                                           for u in uniforms(3, 0, 5).tolist()], "...")

# %% [markdown]
# ## Where the coins come from
#
# Random generators differ between libraries and between CPU and GPU, so that no two programs could be
# compared token by token. The library has its own: SplitMix64 (Steele, Lea and Flood 2014). It is ten lines
# in any language, and number i does not depend on the numbers before it: one can compute the millionth at
# once.

# %%
def splitmix(seed, i):
    """Number i of the stream of a seed, as 64 bits."""
    mask = 2**64 - 1
    z = (seed + (i + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


assert splitmix(0, 0) == 0xE220A8397B1DCDAF                     # the published first number of seed 0
naive = [(splitmix(42, i) >> 11) * 2.0**-53 for i in range(1000)]
assert naive == uniforms(42, 0, 1000).tolist()
print(naive[:3])

# %% [markdown]
# Do they look random? Left, a histogram; right, each number against the next one. A pattern in the right
# picture would mean that one coin tells something about the following one.

# %%
u = uniforms(7, 0, 4000)
figure, ((left, right),) = plots.axes(1, 2, width=4, height=3.2)
left.hist(u.numpy(), bins=20, color=plots.HUES[0], ec="white")
left.axhline(len(u) / 20, color=plots.HUES[1], ls="--")
left.set(xlabel="u", ylabel="how many of 4,000")
right.scatter(u[:-1], u[1:], s=1, color=plots.HUES[0])
right.set(xlabel="u", ylabel="the next u", aspect="equal")
figure

# %% [markdown]
# A seed then fixes a whole text. The same coins at different temperatures:

# %%
from speculative import generate

for T in (0, 0.5, 1.0, 1.5):
    for seed in (1, 2):
        (out,), _ = generate(model, [prompt], 16, None, lambda z, T=T: to_probs(z, T), Coins(seed))
        print(f"T = {T}, seed {seed}: ...{tokenizer.decode(out)!r}")

# %% [markdown]
# ## Does the sampler sample? A test with chance in it
#
# Draw many tokens and count. If the sampler is right, token t should come n·p(t) times, give or take.
# Pearson's statistic measures the deviation:
#
# $$\chi^2 = \sum_t \frac{(\text{count}_t - n\,p_t)^2}{n\,p_t}$$
#
# For a right sampler and m tokens it has a known distribution with mean m - 1. We compare two samplers: ours,
# and one that "simplifies" and draws from the rounded probabilities.

# %%
def chi_square(p, drawn):
    """The statistic, and how likely a right sampler deviates at least so much."""
    expected = len(drawn) * p.double()
    counts = torch.bincount(drawn, minlength=len(p))
    x = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(p) - 1) / 2, dtype=torch.float64)
    return float(x), float(torch.special.gammaincc(freedom, x / 2))


some = to_probs(logits, temperature=1.0, top_k=10)
some = some[some > 0]                                           # the ten pieces, without thousands of zeros
rounded = (some * 20).round() / 20 + 1e-3
for name, weights in (("the library", some), ("rounded to 1/20", rounded)):
    x, chance = chi_square(some, Coins(0).choose(weights.expand(20_000, -1)))
    print(f"{name:16} chi-square {x:7.1f}, and a right sampler reaches it with probability {chance:.3f}")

# %% [markdown]
# **Predict:** repeat the test of the right sampler 200 times. How often will that probability be below 5 %?

# %%
many = Coins(1).choose(some.expand(200 * 2000, -1)).view(200, 2000)
good = torch.tensor([chi_square(some, row)[0] for row in many])
many = Coins(1).choose(rounded.expand(200 * 2000, -1)).view(200, 2000)
bad = torch.tensor([chi_square(some, row)[0] for row in many])
assert abs(good.mean() - 9) < 1.2 and bad.mean() > good.mean()

# %%
figure, ((side,),) = plots.axes(1, 1, width=8, height=3)
for values, hue, name in ((good, plots.HUES[0], "the library"), (bad, plots.HUES[1], "rounded to 1/20")):
    side.hist(values.numpy(), bins=30, color=hue, alpha=0.6, label=name)
side.axvline(16.92, color="#404040", ls="--")
assert abs(torch.special.gammaincc(torch.tensor(4.5), torch.tensor(16.92 / 2)) - 0.05) < 1e-4
print(f"beyond the line: {(good > 16.92).float().mean():.1%} of the right sampler's tests")
side.text(18.5, side.get_ylim()[1] * 0.6, "5 % of a right sampler's\nlie beyond this line", fontsize=8)
side.set(xlabel="chi-square of 2,000 draws of ten tokens", ylabel="how many of 200 tests")
side.legend(frameon=False, loc="upper center")
figure

# %% [markdown]
# A right sampler fails such a test once in twenty times, by construction. So a suite with a hundred of these
# tests would fail every day. If we demand 1 in a million instead of 5 %, small mistakes pass. This is the
# price of testing with chance.
#
# Because our coins are an argument there is a better way. Instead of drawing many times, go through *every*
# outcome of the coin, add up the probabilities, and compare exactly. The next notebook does so with a
# whole round of speculative decoding.
#
# ## Questions
#
# **1.** What becomes of the distribution as T grows without bound?
#
# <details><summary>Answer</summary>
# All tokens become equally likely, 1/V each.
# </details>

# %%
assert torch.allclose(to_probs(logits, temperature=1e9), torch.full_like(p, 1 / c.vocab_size), rtol=1e-3)
print("uniform over", c.vocab_size, "tokens")

# %% [markdown]
# **2.** Which setting of min-p gives greedy decoding?
#
# <details><summary>Answer</summary>
# min-p = 1: only a token as likely as the best one stays (unless there are ties).
# </details>

# %%
assert torch.equal(to_probs(logits, temperature=1.0, min_p=1.0), to_probs(logits, temperature=0))
print("one token stays")

# %% [markdown]
# **3.** A sampler compares with `u * total <= reached` instead of `<`. When does it give another token? Is
# that bad?
#
# <details><summary>Answer</summary>
# When u falls exactly on an edge; above all for u = 0. If the first tokens have probability 0, it returns
# token 0: a token that cannot occur.
# </details>

# %%
weights = torch.tensor([0.0, 0.0, 1.0])


class Zero(Coins):
    def take(self, count, device):
        return torch.zeros(count, dtype=torch.float64)


assert int(Zero().choose(weights)) == pick(weights, 0.0) == 2
print("u = 0 skips tokens of probability 0")

# %% [markdown]
# **4.** Two prompts are sampled in one batch with seed 5, then each alone with seed 5. Are the texts equal?
#
# <details><summary>Answer</summary>
# Only as far as each row meets the same coins. The rows of a batch share one stream: row 0 takes the first
# number, row 1 the second. Alone, the second prompt would get the first. Only greedy rows, for which coins do
# not matter, are sure to be equal.
# </details>

# %%
other = checkpoint.encode(tokenizer, "The dog was", c.bos)
warm = lambda z: to_probs(z, temperature=1.0)
(row, _), _ = generate(model, [prompt, other], 1, None, warm, Coins(5))
(alone,), _ = generate(model, [prompt], 1, None, warm, Coins(5))
assert row == alone                                             # both were drawn with coin 0
batch, _ = generate(model, [prompt, other], 8)
assert batch == [generate(model, [ids], 8)[0][0] for ids in (prompt, other)]
print("the first token of row 0 is the same; greedy rows are the same to the end")

# %% [markdown]
# Next: [speculative decoding](04_speculative_decoding.ipynb). Two distributions, p and q, a few coins, and a
# text that does not change.
