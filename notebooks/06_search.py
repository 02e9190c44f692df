# %% [markdown]
# # 6. Search: which sub-layers to skip?
#
# With 2L sub-layers there are 2^(2L) sets, more than anybody can try. This notebook looks at a corner of that
# world where every set *was* tried, so that we know the truth. In it we build a Gaussian process that learns
# from a few trials where to look next, and we see what its answer is worth.
#
# > **The one thing to remember: for every set the process predicts a value and says how unsure it is; the
# > next trial goes where the expected improvement is largest.**
#
# Before it: [5, layer skipping](05_layer_skipping.ipynb).

# %%
# %run start.py
MODEL = ROOT / "weights" / "stories-llama"      # or a folder with your own Llama or Gemma-2

# %%
import numpy as np
import torch

import checkpoint
from lab.bench import search as bench
from control import weight_costs
from search import Calibration, speedup
from notebooks import plots

torch.set_grad_enabled(False)
model, tokenizer = checkpoint.load(MODEL, dtype=torch.float32)
c, L, costs = model.c, model.c.n_layers, weight_costs(model.c)
stories = [line["text"] for line in bench.read_prompts("stories")]
calibration = Calibration(model, tokenizer, stories, 512)
print(f"2^{2 * L} = {2.0 ** (2 * L):.1e} sets; {sum(map(len, calibration.ids))} tokens to judge them by")

# %% [markdown]
# ## What a set is worth
#
# The last notebook gives the objective: alpha from one pass over a text (`Teacher`), c from the weights, and
# the speed-up of the best gamma. `search.speedup` puts them together, and to score one set is a *trial*. No
# stopwatch is needed, so a trial gives the same value every time.

# %%
for name, subs in (("everything", range(2 * L)), ("a quarter", range(2 * max(1, L // 4)))):
    t = speedup(calibration, costs, list(subs))
    print(f"{name:10} alpha {t.alpha:.2f}, c {t.cost:.2f}, best gamma {t.gamma}: promised {t.speedup:.3f}")

# %% [markdown]
# ## A landscape that we know
#
# All sub-layers together have more sets than anybody can score. So let groups of them be skipped or not:
# bands of blocks, which widen with the depth, and of each band the attentions or the MLPs. Twelve groups have
# 2^12 = 4,096 sets. `lab.bench search` has scored all of them for the shipped Llama and keeps them in
# `notebooks/landscape.npz`. (For a model of your own the next cell scores 64 sets of six groups.) A set is
# written as a row of bits, 1 for each group that is skipped; `a3-4` are the attentions of the blocks 3 and 4,
# and `m3-4` their MLPs.

# %%
shipped = Path(MODEL).resolve() == bench.WEIGHTS / "stories-llama"
if shipped:
    space, land = bench.bands(L), dict(np.load(bench.LANDSCAPE))
else:
    space = bench.bands(L, 3)
    land = bench.enumerate_sets(space, calibration, costs)
n = len(space.skippable)
value = torch.tensor(land["speedup"])                           # (2^n,): set k skips the bits of k
z = torch.tensor([bench.bits(k, n) for k in range(2**n)], dtype=torch.float64)      # (2^n, n)
names = ["am"[band[0] % 2] + "-".join(map(str, sorted({band[0] // 2, band[-1] // 2})))
         for band in space.bands]
print("bits:", *names)

# %% [markdown]
# A file can be older than the model that it speaks of. So score a few sets anew.

# %%
for k in (0, 5, 2**n - 1):
    fresh = speedup(calibration, costs, space.sublayers(z[k]))
    assert abs(fresh.speedup - value[k]) < 0.02, "other weights: python -m lab.bench search"
    print(f"set {k:4}: {float(value[k]):.3f} in the file, {fresh.speedup:.3f} now")

# %% [markdown]
# **Predict:** what share of all sets is worth more than skipping nothing at all (1.0)?

# %%
figure, ((left, right),) = plots.axes(1, 2, width=4.8)
left.hist(value.numpy(), bins=60, color=plots.HUES[0])
left.axvline(1, color="#404040", ls="--", lw=1)
left.set(xlabel="promised speed-up", ylabel="how many sets")
image = right.hexbin(land["c"], land["alpha"], C=value, gridsize=40, cmap="viridis")
least = float(land["c"].min())
right.plot([least, 1], [least, 1], color="#404040", ls="--", lw=1)
right.set(xlabel="c", ylabel="alpha", title="mean speed-up of the sets there; dashed: alpha = c")
figure.colorbar(image, ax=right)
top = int(value.argmax())
print(f"{float((value > 1).double().mean()):.1%} of the sets gain; the best promises {float(value[top]):.3f}")
print("it skips", [name for name, bit in zip(names, z[top], strict=True) if bit])
figure

# %% [markdown]
# A landscape over bits has no picture. But one can look along a path that flips one bit at a time. (A *Gray
# code* is such a path; it visits each set of six chosen bits once.) Neighbours on the path are similar sets,
# and often of similar value: this is what a search can learn from.

# %%
six = min(6, n)
order = [k ^ (k >> 1) for k in range(2**six)]                   # Gray code: neighbours differ in one bit
base = top & ~(2**six - 1)                                      # all other bits as in the best set
path = torch.tensor([base | k for k in order])
assert all((z[a] - z[b]).abs().sum() == 1 for a, b in zip(path, path[1:], strict=False))


def draw_slice(side, title=""):
    side.plot(value[path], color="#808080", lw=1, label="truth")
    side.set(xlabel="sets along the path", ylabel="speed-up", title=title)

# %%
figure, ((upper,), (lower,)) = plots.axes(2, 1, width=9, height=1.9)
draw_slice(upper)
lower.imshow(z[path][:, :six].T, aspect="auto", cmap="Greys", vmax=1.6)
lower.set_yticks(range(six), names[:six])
lower.set_xlabel("dark: skipped")
figure

# %% [markdown]
# ## A Gaussian process, in three steps
#
# How should a program guess the value of a set that nobody has tried? A Gaussian process treats all values
# as random numbers that belong together: when the value of one set becomes known, its guess for similar sets
# moves, and it becomes surer of them. How strongly two sets belong together is their *covariance*, and a
# *kernel* is the formula for it.
#
# **1. The kernel: similar sets have similar values.** A set has covariance 1 with itself. Each bit in which
# two sets differ multiplies it by a factor rho = exp(-weight); attention and MLP bits have a weight each,
# and both are learnt.

# %%
from search import GaussianProcess, distances, expected_improvement, kernel

groups = space.groups()                                         # 0: attention, 1: MLP
theta = torch.tensor([0.3, 0.1, 1.0, 1e-3], dtype=torch.float64).log()  # two weights, signal, noise
rho = torch.exp(-theta[groups].exp())                           # (n,): the factor of each bit


def by_factors(a, b):
    return theta[-2].exp() * torch.where(a == b, 1.0, rho).prod()


library = kernel(distances(z[path], z[path], groups), theta)
naive = torch.stack([torch.stack([by_factors(a, b) for b in z[path[:8]]]) for a in z[path[:8]]])
assert torch.allclose(naive, library[:8, :8])

# %%
figure, ((left, right),) = plots.axes(1, 2, width=4.6)
image = left.imshow(library, cmap="viridis", vmin=0, vmax=1)
left.set(title="covariance along the path", xlabel="set", ylabel="set")
figure.colorbar(image, ax=left)
bits = torch.arange(7)
right.plot(bits, torch.exp(-0.3 * bits), color=plots.HUES[0], marker="o", label="attention bits (weight 0.3)")
right.plot(bits, torch.exp(-0.1 * bits), color=plots.HUES[1], marker="s", label="MLP bits (weight 0.1)")
right.set(xlabel="bits that differ", ylabel="covariance", ylim=(0, 1.05))
right.legend(frameon=False)
figure

# %% [markdown]
# **2. Regression: the values seen so far, spread by the kernel.** Let y be the values seen, K the
# covariances of the tried sets with each other, k those of a new set with the tried ones, k** that of the
# new set with itself, and sigma the noise of a trial. Then the new set's value is expected to be mu, give or
# take s (Rasmussen and Williams 2006, eq. 2.25 and 2.26):
#
# $$\mu = k^\top (K + \sigma^2 I)^{-1} y, \qquad s^2 = k_{**} - k^\top (K + \sigma^2 I)^{-1} k$$

# %%
g = torch.Generator().manual_seed(0)
tried = torch.randperm(2**n, generator=g)[:20]
process = GaussianProcess(z[tried], value[tried], groups, theta.tolist(), fit=False)
K = process.covariance(theta)                                   # with the noise on its diagonal
k = kernel(distances(z[tried], z[path], groups), theta)         # (20, 64)
naive = process.mean + process.std * (k.T @ torch.linalg.inv(K) @ process.y)
spread = process.std * (theta[-2].exp() - (k * (torch.linalg.inv(K) @ k)).sum(0)).clamp(min=0).sqrt()
mean, std = process.predict(z[path])
assert torch.allclose(naive, mean) and torch.allclose(spread, std)
print("the textbook's formula and the library agree on", len(path), "sets")

# %% [markdown]
# **Predict:** we show the process 5, 20 and 60 trials from *anywhere* among all sets (few of them on this
# path). Where will its band be narrow?

# %%
figure, sides = plots.axes(3, 1, width=7, height=1.6)
for (side,), count in zip(sides, (5, 20, 60), strict=True):
    tried = torch.randperm(2**n, generator=torch.Generator().manual_seed(0))[: min(count, 2**n)]
    process = GaussianProcess(z[tried], value[tried], groups)   # now with a fit of theta
    mean, std = process.predict(z[path])
    draw_slice(side, f"after {count} trials")
    side.set_xlabel("sets along the path" if count == 60 else "")
    side.plot(mean, color=plots.HUES[0], label="expected")
    side.fill_between(range(len(path)), mean - 2 * std, mean + 2 * std, color=plots.HUES[0], alpha=0.15, lw=0,
                      label="two standard deviations")
    here = [i for i, at in enumerate(path.tolist()) if at in tried.tolist()]
    side.plot(here, value[path[here]], "o", color=plots.HUES[1], label="tried")
figure.legend(*sides[1][0].get_legend_handles_labels(), loc="outside lower center", frameon=False, ncols=4)
figure

# %% [markdown]
# Few of the trials lie on the path, and still the band becomes narrow all along it and follows it: what was
# learnt about a bit elsewhere holds here, too. (It stays too low at the tops: the path runs past the best
# sets of all, which are better than nearly everything that was tried.)
#
# **3. The likelihood: which weights fit?** Nobody sets the weights by hand. The *likelihood* says how
# probable the values seen would be under given weights, and the process looks for the weights (`theta`) that
# make it largest. Here is minus its logarithm, so that less is better:

# %%
grid = torch.linspace(-7, 2, 30, dtype=torch.float64)
surface = torch.tensor([[float(process.loss(torch.stack([a, b, *process.theta[-2:]]))) for a in grid]
                        for b in grid])
figure, ((side,),) = plots.axes(1, 1, width=5.5, height=4)
lowest = float(surface.min())
shown = side.contourf(grid, grid, surface - lowest, levels=[0, 1, 2, 4, 8, 16, 32, 64, 128], cmap="viridis_r",
                      extend="max")
side.plot(*process.theta[:2], "*", color=plots.HUES[1], ms=14)
side.set(xlabel="log weight of attention bits", ylabel="log weight of MLP bits",
         title="the star: where the fit ended")
figure.colorbar(shown, ax=side, label="worse by so many nats")
assert float(process.loss(process.theta)) < lowest + 2
figure

# %% [markdown]
# ## Where to look next
#
# A trial is worth making where it may beat the best so far: because much is expected there, or because little
# is known. *Expected improvement* weighs both (Jones et al. 1998, eq. 15). By its definition it is an average
# over all values that the process thinks possible:
#
# $$EI = E\big[\max(0, f - f_\text{best})\big], \qquad f \sim N(\mu, s^2)$$

# %%
tried = torch.randperm(2**n, generator=torch.Generator().manual_seed(0))[:20]
process = GaussianProcess(z[tried], value[tried], groups)
mean, std = process.predict(z[path])
best = float(value[tried].max())
draws = torch.randn(200_000, generator=g, dtype=torch.float64)
naive = torch.stack([(m + s * draws - best).clamp(min=0).mean() for m, s in zip(mean, std, strict=True)])
gain = expected_improvement(mean, std, best)
assert torch.allclose(naive, gain, atol=2e-3)

# %% tags=["gallery"]
figure, ((upper,), (lower,)) = plots.axes(2, 1, width=9, height=1.9)
draw_slice(upper)
upper.plot(mean, color=plots.HUES[0])
upper.fill_between(range(len(path)), mean - 2 * std, mean + 2 * std, color=plots.HUES[0], alpha=0.15, lw=0)
upper.axhline(best, color=plots.HUES[2], ls="--", lw=1)
upper.text(0, best, "best so far", color=plots.HUES[2], fontsize=8, va="bottom")
lower.fill_between(range(len(path)), 0, gain, color=plots.HUES[3], alpha=0.6, lw=0)
at = int(gain.argmax())
lower.annotate("try this one", (at, float(gain[at])), (at + 3, float(gain[at]) * 0.8),
               arrowprops=dict(arrowstyle="->"))
lower.set(ylabel="expected improvement", ylim=(0, 1.2 * float(gain.max()) + 1e-9))
figure

# %% [markdown]
# ## Does it search better than chance?
#
# Five seeds of our search against five of drawing sets at random, fifty trials each. *Regret* is how far the
# best set so far falls short of the best of all.
#
# **Predict:** after how many trials will the two curves part?

# %%
worth = lambda bits: float(value[sum(b << j for j, b in enumerate(bits))])
budget = min(50, 2**n)
curves = {name: [bench.run_method(method, space, worth, seed, budget) for seed in range(5)]
          for name, method in (("ours", bench.gaussian_process), ("random", bench.random_search))}

# %%
figure, ((side,),) = plots.axes(1, 1, width=7)
for (name, runs), hue, line in zip(curves.items(), plots.HUES, ("-", "--"), strict=False):
    regret = (value.max() - torch.tensor(runs)).clamp(min=1e-4)         # (5, budget); 1e-4 stands for 0
    side.plot(regret.T, color=hue, alpha=0.3, lw=1, ls=line)
    side.plot(regret.median(0).values, color=hue, lw=2.5, ls=line, label=f"{name}, median of five")
side.axvline(9.5, color="#808080", ls=":", lw=1)
side.set(xlabel="trials", ylabel="regret (at the bottom: the best set of all)", yscale="log")
side.legend(frameon=False)
figure

# %% [markdown]
# The first ten trials (left of the dotted line) are random in both. Then the process begins to choose.
#
# ## Is the found set better than an early exit?
#
# The corner above skips whole bands only. `search.py` chose among *single* sub-layers, all but the first two,
# and wrote what it found to `skip.json`. Beside it, every early exit, on the same text.

# %%
import json

found = Path(MODEL) / "skip.json"
subs = json.loads(found.read_text(encoding="utf-8"))["sublayers"] if found.is_file() else [0, 1]
text = Calibration(model, tokenizer, stories[4:], 256)          # not the stories that the search has seen
trials = {f"exit {e}": speedup(text, costs, list(range(2 * e))) for e in range(1, L // 2 + 1)}
trials["found set"] = speedup(text, costs, subs)
print("the found set keeps" if found.is_file() else "search.py has not run here; in place of its set:", subs)
for name, t in trials.items():
    print(f"{name:10} alpha {t.alpha:.2f}, c {t.cost:.2f}, gamma {t.gamma}, promised {t.speedup:.3f}")

# %%
from layerskip import shared_prefix

figure, ((upper,), (side,)) = plots.axes(2, 1, width=8, height=2.2)
for i in range(2 * L):
    hue = "#e0e0e0" if i not in subs else plots.HUES[2] if i < shared_prefix(subs) else plots.HUES[i % 2]
    upper.bar(i, 1, color=hue, hatch=None if i in subs else "////", ec="white")
upper.set(yticks=[], xlabel="sub-layer",
          title="green: shared; blue: attention, orange: MLP after a gap; pale: skipped")
side.bar(list(trials), [t.speedup for t in trials.values()],
         color=[plots.HUES[1] if name == "found set" else plots.HUES[0] for name in trials])
side.axhline(1, color="#404040", lw=0.8)
side.set(ylabel="promised speed-up", ylim=(0.8, None))
side.tick_params(axis="x", rotation=45)
figure

# %% [markdown]
# How much the search gains over the best exit depends on how the model was trained. Where the recipe taught
# every exit to speak, an exit is hard to beat.
#
# ## Does it transfer?
#
# A set found on stories was fitted to stories. What does it promise on other texts, beside the exit that was
# best on stories?

# %%
best_exit = max((name for name in trials if name != "found set"), key=lambda name: trials[name].speedup)
exit_subs = list(range(2 * int(best_exit.split()[1])))
kinds = {}
for kind in ("stories", "dialogues", "maths", "code"):
    texts = [line["text"] for line in bench.read_prompts(kind)][4:]
    there = Calibration(model, tokenizer, texts, 256)
    kinds[kind] = [speedup(there, costs, kept).speedup for kept in (subs, exit_subs)]
    print(f"{kind:10} found set {kinds[kind][0]:.2f}, {best_exit} {kinds[kind][1]:.2f}")

# %%
figure, ((side,),) = plots.axes(1, 1, width=7, height=3)
for which, (name, hue) in enumerate((("found set", plots.HUES[1]), (best_exit, plots.HUES[0]))):
    heights = [pair[which] for pair in kinds.values()]
    side.bar([i + 0.4 * which - 0.2 for i in range(len(kinds))], heights, 0.4, color=hue, label=name)
side.axhline(1, color="#404040", lw=0.8)
side.set_xticks(range(len(kinds)), kinds)
side.set(ylabel="promised speed-up", ylim=(0.8, None))
side.legend(frameon=False)
figure

# %% [markdown]
# ## Exercise: another acquisition
#
# *Upper confidence bound* (Srinivas et al. 2010) is simpler than expected improvement: the next trial goes
# where mean + beta · standard deviation is largest. Write `ucb(mean, std, beta)`, and a loop of 40 trials
# over our landscape: ten random sets first; then fit, score *all* sets, and try the best one that is new.
#
# The next cell holds a solution; in JupyterLab it is folded. Write your own below it, under the same names,
# before you unfold it. Then run the cell after it, which checks whichever was defined last.

# %% jupyter={"source_hidden": true}
def ucb(mean, std, beta=2.0):
    return mean + beta * std


def ucb_search(z, value, groups, count, seed):
    """The numbers of the sets that were tried, in order."""
    g = torch.Generator().manual_seed(seed)
    tried = torch.randperm(len(z), generator=g)[: min(10, len(z) // 2)].tolist()
    while len(tried) < count:
        process = GaussianProcess(z[tried], value[tried], groups)
        score = ucb(*process.predict(z))
        score[tried] = -torch.inf
        tried.append(int(score.argmax()))
    return tried

# %%
m, s = torch.tensor([1.0, 1.0, 2.0]), torch.tensor([0.0, 0.5, 0.0])
assert torch.equal(ucb(m, s, 0.0), m), "with beta 0 only the mean counts"
assert ucb(m, s, 4.0).argmax() == 1 and ucb(m, s, 1.0).argmax() == 2, "beta is the price of not knowing"
tried = ucb_search(z, value, groups, min(40, 2**n), seed=0)
assert len(set(tried)) == len(tried) == min(40, 2**n), "each set once"
chosen = value[torch.tensor(tried[min(10, 2**n // 2) :])]               # after the random ones
chance = sum(float(chosen.mean() > v) for v in value) / len(value)
enough = 0.6 if n > 6 else 0.5 if n == 6 else 0                 # of few sets many are tried, good or not
assert chance >= enough, "after the random sets your choices should be better than most"
print(f"the {len(chosen)} chosen sets are on average better than {chance:.0%} of all; the best has "
      f"regret {float(value.max() - value[tried].max()):.4f}")

# %% [markdown]
# ## Questions
#
# **1.** The kernel's weight of attention bits goes to zero. What does the process believe then?
#
# <details><summary>Answer</summary>
# That attention bits do not matter: sets that differ only in them have covariance 1, so the same value.
# </details>

# %%
flat = torch.tensor([1e-12, 0.1, 1.0, 1e-3], dtype=torch.float64).log()
a, b = z[:1], groups[None].eq(0).double()                       # nothing skipped; all attentions skipped
assert torch.isclose(kernel(distances(a, b, groups), flat), torch.ones(1, 1, dtype=torch.float64))
print("covariance 1")

# %% [markdown]
# **2.** How large is the expected improvement at a set that was tried already, if there is no noise?
#
# <details><summary>Answer</summary>
# Nothing is unknown there, and its value is at most the best: 0.
# </details>

# %%
tried = torch.randperm(2**n, generator=torch.Generator().manual_seed(0))[:20]
exact = torch.tensor([0.3, 0.1, 1.0, 1e-12], dtype=torch.float64).log().tolist()
process = GaussianProcess(z[tried], value[tried], groups, exact, fit=False)
again = expected_improvement(*process.predict(z[tried]), float(value[tried].max()))
assert float(again.max()) < 1e-4
print("largest:", float(again.max()))

# %% [markdown]
# **3.** The objective is alpha alone ("matchness" in SWIFT). Which set does a search without limits find?
#
# <details><summary>Answer</summary>
# The one that skips nothing: its alpha is 1. Without the cost in the objective one must force a number of
# skips.
# </details>

# %%
assert land["alpha"].argmax() == 0 and land["alpha"][0] == 1
print("set 0 skips nothing and is always accepted")

# %% [markdown]
# Next: [trees and trained heads](07_trees_and_heads.ipynb). So far every draft is one chain of tokens, and
# nothing was trained for it. What is gained with a tree, and with a small part that learns to draft?
