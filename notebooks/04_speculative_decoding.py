# %% [markdown]
# # 4. Speculative decoding: guess, check, and change nothing
#
# A cheap model guesses a few tokens. The expensive one, the *target*, checks all of them in one pass and
# keeps those that are right. This notebook goes from the *mechanism* (a program on one page) to the *proof*
# (three lines, and an enumeration of all that can happen), to the *economics* (when to turn it off), and at
# last compares the formulas with a real model.
#
# > **The one thing to remember: a guess t from q is accepted with probability min(1, p(t) / q(t)), and a
# > refused one is replaced from max(p - q, 0). Together that is p. Nobody can tell from the text who has
# > drafted.**
#
# Before it: [3, sampling](03_sampling.ipynb). After it: [5, layer skipping](05_layer_skipping.ipynb).

# %%
# %run start.py
MODEL = ROOT / "weights" / "stories-llama"      # or a folder with your own Llama or Gemma-2

# %%
import torch

import checkpoint
from sampling import Coins, to_probs
from notebooks import plots

torch.set_grad_enabled(False)
model, tokenizer = checkpoint.load(MODEL, dtype=torch.float32)
c, device = model.c, model.tok.device
EXIT = max(1, c.n_layers // 6)                                  # the first sixth of the blocks will draft
prompt = checkpoint.encode(tokenizer, "Once upon a time, there was a little", c.bos)
print(f"{EXIT} of {c.n_layers} blocks draft; the whole model checks")

# %% [markdown]
# ## The mechanism: `minimal.py`, line by line
#
# The library has the whole idea on one page, without a cache and without a batch. We read it with a real
# text. First, what does a part of the model say about the next token?

# %%
import inspect

import minimal

print(inspect.getsource(minimal.distribution))

# %% [markdown]
# We take a story and look for a place in it where the part and the whole disagree a good deal.

# %%
from search import Teacher
from support.files import read_prompts

probs = lambda z: to_probs(z, temperature=1.0, top_k=8)
story = checkpoint.encode(tokenizer, read_prompts("stories")[0]["text"], c.bos)[:80]
agree = Teacher(model, story, probs).acceptance(range(2 * EXIT))        # (T,): notebook 5 explains it
place = story[: int((agree[5:] - 0.6).abs().argmin()) + 6]
with torch.device(device):                                      # the page was written for one device
    p = minimal.distribution(model, place, c.n_layers, probs).cpu()     # (V,) the whole model
    q = minimal.distribution(model, place, EXIT, probs).cpu()           # (V,) its first blocks
print("...", tokenizer.decode(place[-16:]), "...")

# %%
shown = ((p + q) > 0).nonzero()[:, 0]
shown = shown[p[shown].argsort(descending=True, stable=True)]
names = [tokenizer.decode([t]).strip() or "␣" for t in shown.tolist()]


def bars(side, values, hue, label=None, shift=0.0, width=0.8):
    """values (V,) at the tokens that p or q gives a chance."""
    side.bar([i + shift for i in range(len(shown))], values[shown], width, color=hue, label=label)
    side.set_xticks(range(len(shown)), names, rotation=90, fontsize=8)

# %%
figure, ((side,),) = plots.axes(1, 1, width=9, height=3)
bars(side, p, plots.HUES[0], "p: the whole model", -0.2, 0.4)
bars(side, q, plots.HUES[1], f"q: the first {EXIT} blocks", 0.2, 0.4)
side.set_ylabel("probability of the next token")
side.legend(frameon=False)
figure

# %% [markdown]
# They share much, but they are not equal. If we drew from q and kept what we drew, the text would be the
# draft's. So each guess passes a test, and here is all of it. One call of `speculate` is a *round*.

# %%
source = inspect.getsource(minimal.speculate)
draft, verify = source.index("    # Draft"), source.index("    # Verify")
print(source[draft:verify])

# %% [markdown]
# **Draft.** The number of guesses in a round is called `gamma`. Each token is drawn from q, appended, and the
# next one is drawn after it. The distributions are kept: the test needs the very q that the token was drawn
# from.

# %%
correct = source.index("    # Correct")
print(source[verify:correct])

# %% [markdown]
# **Verify.** The whole model says p at the same places. All of these places are known before it runs, so with
# a cache it is *one* pass over gamma + 1 tokens. A guess that p likes at least as much as q does is always
# kept. Otherwise a coin with probability p/q decides. The first refusal ends the round: later guesses were
# made after a token that is not in the text.

# %%
print(source[correct:])

# %% [markdown]
# **Correct.** After a refusal the next token comes from max(p - q, 0): from where p has more than q. If all
# guesses were kept, the last row of p gives one token more, free of charge: the *bonus*. So a round writes at
# least one token and at most gamma + 1.
#
# Now watch a few rounds. Guesses after a refused one are `dead`: they were never tested.

# %%
with torch.device(device):
    for drafted, accepted, new in minimal.rounds(model, prompt, 24, EXIT, 3, probs, Coins(1)):
        guesses = [tokenizer.decode([t]) for t in drafted]
        verdicts = ["kept"] * accepted + ["REFUSED"] * (accepted < len(drafted))
        verdicts += ["dead"] * (len(drafted) - len(verdicts))
        print(f"{' '.join(f'{g!r} {v},' for g, v in zip(guesses, verdicts, strict=True)):70}"
              f" -> {tokenizer.decode(new)!r}")

# %% [markdown]
# ## The proof, as a picture
#
# Draw the two distributions over each other. What they share, min(p, q), is written as accepted guesses. What
# q has too much of is refused. What p has too much of, max(p - q, 0), is written as corrections. The two
# overhangs have equal size, because p and q both sum to 1: so each refusal pays for exactly one correction.
#
# **Predict:** which token is most often refused? Which one comes most often as a correction?

# %% tags=["gallery"]
kept, residual = torch.minimum(p, q), (p - q).clamp(min=0)
figure, (sides,) = plots.axes(1, 3, width=4.2, height=3)
bars(sides[0], p, plots.HUES[0], "p", -0.2, 0.4)
bars(sides[0], q, plots.HUES[1], "q", 0.2, 0.4)
bars(sides[1], kept, plots.HUES[5], "min(p, q)")
sides[1].bar(range(len(shown)), (q - kept)[shown], bottom=kept[shown], color="#d55e0066", hatch="////",
             ec="white", lw=0, label="refused")
bars(sides[2], kept, plots.HUES[5], "accepted guesses")
sides[2].bar(range(len(shown)), residual[shown], bottom=kept[shown], color=plots.HUES[2], label="corrections")
for side, title in zip(sides, ("two distributions", "drafted: q", "written: p again"), strict=True):
    side.set(ylim=(0, 1.1 * float(torch.maximum(p, q).max())), title=title)
    side.legend(frameon=False, fontsize=8)
figure

# %% [markdown]
# In three lines, for any token t (Leviathan et al. 2023, appendix A.1; Chen et al. 2023, Theorem 1):
#
# $$P(t\text{ accepted}) = q(t)\,\min\!\big(1, \tfrac{p(t)}{q(t)}\big) = \min(p(t), q(t))$$
# $$P(\text{refusal}) = 1 - \textstyle\sum_s \min(p(s), q(s)) = \sum_s \max(p(s) - q(s), 0)$$
# $$P(t) = \min(p(t), q(t)) + P(\text{refusal})\cdot\frac{\max(p(t) - q(t), 0)}{\sum_s \max(p(s) - q(s), 0)}
# = \min(p, q) + \max(p - q, 0) = p(t)$$

# %%
accepted = q * (p / q).nan_to_num(0.0).clamp(max=1)             # drawn from q, and kept
refusal = 1 - accepted.sum()
text = accepted + refusal * residual / residual.sum()
assert torch.allclose(text, p, atol=1e-6) and torch.isclose(refusal, residual.sum(), atol=1e-6)
print(f"alpha = sum of min(p, q) = {float(kept.sum()):.3f} of the guesses are accepted at this place")
most = [tokenizer.decode([int(overhang.argmax())]) for overhang in (q - kept, residual)]
print(f"refused most often: {most[0]!r}; most often a correction: {most[1]!r}")

# %% [markdown]
# ## The exact distribution, by enumeration
#
# A proof is about the idea; a program can still be wrong. So we let the *program* run, and go through
# everything that can happen. A `Coins` object makes all random decisions; ours decides as we tell it, and
# multiplies up how likely that was. Then one run for each path through all decisions gives the exact
# probability of each text: no samples, no noise.

# %%
class Script(Coins):    # follows given decisions, and then always takes the first option
    def __init__(self, decisions):
        self.decisions, self.options, self.weight = iter(decisions), [], 1.0

    def choose(self, weights):                                  # (..., V): there is one row here
        w = weights.flatten() / weights.sum()
        live = w.nonzero()[:, 0]
        self.options.append(len(live))
        token = live[next(self.decisions, 0)]
        self.weight *= float(w[token])
        return token.view(weights.shape[:-1])

    def flip(self, prob):
        return torch.stack([self.choose(torch.stack([1 - a, a])).bool()
                            for a in prob.clamp(max=1).flatten()]).view(prob.shape)

# %%
def every_outcome(run):
    """{text: probability} over all paths that run(coins) can take, and how many paths there were."""
    chances, decisions, count = {}, [], 0
    while decisions is not None:
        coins = Script(decisions)
        text = run(coins)
        chances[text], count = chances.get(text, 0.0) + coins.weight, count + 1
        taken = (decisions + [0] * len(coins.options))[: len(coins.options)]
        while taken and taken[-1] == coins.options[len(taken) - 1] - 1:
            taken.pop()                                         # all options of this decision are done
        decisions = taken[:-1] + [taken[-1] + 1] if taken else None
    return chances, count

# %% [markdown]
# We keep the two best tokens at each place, so that there are not too many paths, and write three tokens.

# %%
from layerskip import SelfDraft
from speculative import rounds
from verification import verify

two = lambda z: to_probs(z.double(), temperature=1.5, top_k=2)
drafter = SelfDraft(model, range(2 * EXIT), 2)


def speculative_text(coins, verify=verify):
    steps = rounds(model, [prompt], 3, drafter, two, coins, verify=verify)
    return tuple(t for _, r in steps for t in r.new[0])


chances, paths = every_outcome(speculative_text)
print(f"{paths} paths lead to {len(chances)} texts; their probabilities sum to {sum(chances.values()):.12f}")

# %% [markdown]
# And what would the model alone do? Its own probabilities, multiplied along each text.

# %%
def plain_chances(count):
    chances = {(): 1.0}
    for _ in range(count):
        longer = {}
        for text, weight in chances.items():
            p = two(model(torch.tensor([[*prompt, *text]], device=device))[0, -1])
            longer |= {text + (t,): weight * float(p[t]) for t in p.nonzero()[:, 0].tolist()}
        chances = longer
    return chances


truth = plain_chances(3)
assert chances.keys() == truth.keys() and all(abs(chances[t] - truth[t]) < 1e-5 for t in truth)
print("largest difference:", max(abs(chances[t] - truth[t]) for t in truth))

# %% [markdown]
# ## A planted mistake
#
# The most natural mistake: after a refusal, draw the next token from p. Is p not what we want? Here is
# `verify` for one row with this mistake, and beside it a second one: accept everything.
#
# **Predict:** which texts will the first mistake make too likely?

# %%
from functools import partial


def resample_from_p(p, q, tokens, coins, length):
    passed = [bool(coins.flip(p[:, k, t] / q[:, k, t])) for k, t in enumerate(tokens[0].tolist())]
    accepted = [*passed, False].index(False)
    return torch.tensor([accepted]), coins.choose(p[:, accepted])       # wrong: max(p - q, 0) after a refusal


def accept_everything(p, q, tokens, coins, length):
    return length, coins.choose(p[:, -1])


# %%
wrong_rules = {}
for wrong in (resample_from_p, accept_everything):
    text = partial(speculative_text, verify=wrong)      # the loop takes any rule of verification
    wrong_rules[wrong.__name__.replace("_", " ")], _ = every_outcome(text)
assert all(max(abs(wrong.get(t, 0) - truth[t]) for t in truth) > 1e-3 for wrong in wrong_rules.values())

# %%
order = sorted(truth, key=truth.get, reverse=True)
figure, ((side,),) = plots.axes(1, 1, width=11, height=3.4)
for i, (name, found) in enumerate({"the model alone": truth, "the library": chances, **wrong_rules}.items()):
    side.bar([x + 0.2 * i - 0.3 for x in range(len(order))], [found.get(t, 0) for t in order], 0.2,
             color=[plots.HUES[7], plots.HUES[0], plots.HUES[1], plots.HUES[4]][i], label=name)
side.set_xticks(range(len(order)), [tokenizer.decode(t).strip() for t in order], rotation=35, ha="right",
                fontsize=8)
side.set(ylabel="probability of the text", title="grey and blue agree; the mistakes do not")
side.legend(frameon=False)
figure

# %% [markdown]
# The first mistake writes too often what the draft likes: after a refusal it may draw a token of which q has
# too much already. Both mistakes write fluent text. No reader would notice, and a test that only looks at
# greedy texts would not notice the first one either. An enumeration finds any of them at once.
#
# ## The library's loop, one step at a time
#
# `rounds` is a Python generator: each `next` gives one round, with everything that happened in it. Each line
# of the table is a guess: its id and its text, the p and q that it got, and the verdict. Below stands what
# the round has written. ([run.html](../docs/run.html) is a page that steps through a whole run in the same
# way.)

# %%
from IPython.display import HTML

warm = lambda z: to_probs(z, temperature=0.8)
run = rounds(model, [prompt], 60, SelfDraft(model, range(2 * EXIT), 3), warm, Coins(7))
state, r = next(run)
HTML(plots.round_html(r, tokenizer))

# %% [markdown]
# That was the first round. Run the next cell again and again to step on.

# %%
state, r = next(run)
HTML(plots.round_html(r, tokenizer))

# %% [markdown]
# Every field of a round, and what the loop knows after it. The draft comes first: its tokens, their q, how
# many there are, `parents`, which only drafts that branch have (notebook 7), and `traced`. Then: the
# target's logits and its p, how many guesses were accepted and how many proposed, the `new` tokens, how
# `sure` the target was of each (its probability, at temperature 1), and a `trace` of states.

# %%
def brief(value):
    return f"tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) and value.dim() > 1 else value


for name, value in {**vars(r.draft), **vars(r)}.items():
    if name not in ("draft", "reuse"):
        print(f"{name:9} {brief(value)}")
print("reuse     the target starts at sub-layer", r.draft.reuse[0], "as the draft has run those before it")
print("known    ", repr(tokenizer.decode(state.known[0])))
print("left     ", state.left_cpu, "tokens may still be written")
print("n        ", state.n.tolist(), "tokens are known: the next block starts at slot n - 1")

# %% [markdown]
# ## Who drafts? Three answers on real text
#
# - the model's own first blocks (`SelfDraft`: no other weights are needed);
# - a small model with the same tokenizer (`ModelDraft`; Leviathan et al. 2023);
# - the text itself: what followed the last time when the last two tokens occurred (`NGram`; Saxena 2023).
#
# The text is greedy, so all of them must write the very same one. Point at a token to see where it came from.

# %%
from speculative import ModelDraft, NGram, generate

drafters = {"first blocks": lambda gamma: SelfDraft(model, range(2 * EXIT), gamma),
            "n-gram": lambda gamma: NGram(gamma, 2)}
small, other = checkpoint.load(ROOT / "weights" / "stories-draft", device, torch.float32)
if other.get_vocab() == tokenizer.get_vocab():                  # else its ids would mean other words
    drafters["small model"] = lambda gamma: ModelDraft(small, gamma)
gamma, (plain, passes) = 5, generate(model, [prompt], 80)
runs = {name: plots.record(model, tokenizer, [prompt], 80, make(gamma)) for name, make in drafters.items()}
for name, seen in runs.items():
    assert [t.id for t in seen.rows[0]] == plain[0]
    print(f"{name:13} {seen.counts.passes} passes instead of {passes}")

# %%
from IPython.display import display

for name, seen in runs.items():
    display(HTML(f"<b>{name}</b>"), HTML(plots.text_html(seen)))

# %% [markdown]
# The colours say where each token came from; the line below each colour says the same without it. Under the
# text stand the counts, where the time went, and what limits the speed.
#
# ## Acceptance by position
#
# Let drafts be long, and count for each place of a draft: how often was it *tested* (everything before it was
# accepted), and how often was it then accepted? We use four story beginnings.
#
# **Predict:** is the sixth guess, *if it is tested*, accepted less often than the first one?

# %%

K = 6
prompts = [checkpoint.encode(tokenizer, line["prompt"], c.bos) for line in read_prompts("stories")[:4]]
tested, kept = torch.zeros(K), torch.zeros(K)
for ids in prompts:
    for _, r in rounds(model, [ids], 48, SelfDraft(model, range(2 * EXIT), K)):
        proposed, accepted = int(r.proposed), int(r.accepted)
        tested[: min(accepted + 1, proposed)] += 1
        kept[:accepted] += 1
print("tested  ", tested.int().tolist())
print("accepted", kept.int().tolist())

# %%
figure, ((left, right),) = plots.axes(1, 2)
left.plot(range(1, K + 1), kept / tested, color=plots.HUES[0], marker="o", label="accepted of tested")
left.plot(range(1, K + 1), kept / tested[0], color=plots.HUES[1], marker="s", label="accepted of all drafts")
first = float(kept[0] / tested[0])
powers = [first**k for k in range(1, K + 1)]
left.plot(range(1, K + 1), powers, color="#808080", ls=":", label="alpha to the k")
left.set(xlabel="place in the draft", ylabel="share of guesses", ylim=(0, 1.05))
right.bar(range(1, K + 1), tested, color="#56b4e9", label="tested")
right.bar(range(1, K + 1), kept, color=plots.HUES[0], width=0.5, label="accepted")
right.set(xlabel="place in the draft", ylabel="how many")
for side in (left, right):
    side.legend(frameon=False)
figure

# %% [markdown]
# What makes late guesses rare is that they are *reached* ever less often. Whether a guess that is reached is
# accepted more or less often than the first one differs from text to text. If each tested guess is accepted
# with the same probability alpha, independently, a round writes
#
# $$E[\text{tokens}] = 1 + \alpha + \alpha^2 + \dots + \alpha^\gamma
# = \frac{1 - \alpha^{\gamma+1}}{1 - \alpha} \qquad\text{(Leviathan et al. 2023, eq. 1)}$$
#
# ## Two ratios that are easily confused
#
# - **alpha** = accepted / *tested*: what the formula wants. Where all places are alike it does not matter
#   which are counted; the library counts the first guess of each round, which is always tested.
# - **yield** = accepted / *proposed*: what is easily counted, and what vLLM reports as "draft acceptance
#   rate". Dead guesses pull it down.
#
# **Predict:** alpha is 0.8 and drafts have 5 tokens. How many tokens does a round write? How large is the
# yield? And what does the formula say if somebody puts the yield into it?

# %%
from control import expected_tokens

alpha, gamma = 0.8, 5
tokens = expected_tokens(alpha, gamma)
yields = (tokens - 1) / gamma
confused = expected_tokens(yields, gamma)
assert abs(tokens - 3.7) < 0.05 and abs(confused - 2.1) < 0.05
print(f"{tokens:.2f} tokens a round; yield {yields:.2f}; with the yield in place of alpha: {confused:.2f}")

# %% [markdown]
# 2.1 tokens are forecast where 3.7 come. Here is the same for all alphas. The green marks are the tokens a
# round that our drafts really wrote:

# %%
grid = torch.linspace(0, 0.99, 100)
true = torch.tensor([expected_tokens(float(a), gamma) for a in grid])
wrong = torch.tensor([expected_tokens(float(y), gamma) for y in (true - 1) / gamma])
figure, ((side,),) = plots.axes(1, 1, width=7)
side.plot(grid, true, color=plots.HUES[0], label="the formula with alpha")
side.plot(grid, wrong, color=plots.HUES[1], ls="--", label="the formula with the yield")
for (name, seen), mark in zip(runs.items(), "os^", strict=False):
    came = 1 + seen.counts.accepted / max(1, seen.counts.drafted)       # in the rounds that had a draft
    side.plot(seen.counts.alpha, came, mark, color=plots.HUES[2], ms=7, label=name)
side.set(xlabel="alpha", ylabel=f"tokens a round, gamma = {gamma}")
side.legend(frameon=False)
figure

# %% [markdown]
# ## The economics: when to turn it off
#
# Guesses are not free. Let c be the cost of drafting one token, in passes of the whole model. A round with
# gamma guesses costs gamma·c + 1 passes (where checking several tokens costs no more than checking one), so
#
# $$\text{speed-up} = \frac{1 + \alpha + \dots + \alpha^\gamma}{\gamma c + 1}
# \qquad\text{(Leviathan et al. 2023, Theorem 3.8)}$$
#
# The first guess adds alpha tokens and costs c. So **drafting gains only where alpha > c**. Where it does,
# there is a best gamma: each further guess costs the same and is reached less often.

# %%
from control import best_gamma, expected_speedup

figure, ((left, right),) = plots.axes(1, 2)
cases = [(0.8, 0.1), (0.8, 0.3), (0.5, 0.3), (0.4, 0.6)]
for (alpha, cost), hue, mark in zip(cases, plots.HUES, "os^v", strict=False):
    speed = [expected_speedup(alpha, gamma, cost) for gamma in range(9)]
    left.plot(speed, color=hue, marker=mark, ms=4, label=f"alpha {alpha}, c {cost}")
    best = best_gamma(alpha, cost, most=8)
    left.plot(best, speed[best], marker="*", ms=14, color=hue)
left.axhline(1, color="#808080", ls=":")
left.set(xlabel="gamma", ylabel="times plain decoding", ylim=(0.4, 3))
left.legend(frameon=False, fontsize=8, ncols=2, loc="upper center")
plots.draw_plane(right, [alpha for alpha, _ in cases], [cost for _, cost in cases])
right.collections[-1].set(sizes=[40], alpha=1)
figure

# %% [markdown]
# The stars mark the best gamma. For the last pair it is 0: turn drafting off. The dots in the right picture
# are the same four pairs, among lines of equal best speed-up. Below the diagonal there is nothing to gain.
#
# ## Reconcile with a real checkpoint
#
# Does the formula tell the truth about our model? We compare the tokens a round that it promises with those
# that come. The promise uses one number, alpha: how often the first guess of a round was accepted.
#
# **Predict:** will the formula promise too much or too little?

# %%
from support.stats import Counts

rows = []
for gamma in (1, 2, 3, 4, 6):
    seen = Counts()
    for ids in prompts[:2]:
        for _, r in rounds(model, [ids], 48, SelfDraft(model, range(2 * EXIT), gamma)):
            seen.add(r)
    promised, yields = expected_tokens(seen.alpha, gamma), seen.accepted / seen.proposed
    rows.append((gamma, seen.alpha, yields, promised, seen.tau))
    print(f"gamma {gamma}: alpha {seen.alpha:.2f}, yield {yields:.2f}, promised {promised:.2f}, "
          f"came {seen.tau:.2f}")

# %%
figure, ((side,),) = plots.axes(1, 1, width=7)
gammas = [row[0] for row in rows]
side.plot(gammas, [row[3] for row in rows], color=plots.HUES[1], ls="--", marker="s", label="promised")
side.plot(gammas, [row[4] for row in rows], color=plots.HUES[0], marker="o", label="came")
side.plot(gammas, [expected_tokens(row[2], row[0]) for row in rows], color="#808080", ls=":",
          label="promised, had we taken the yield for alpha")
side.set(xlabel="gamma", ylabel="tokens a pass of the whole model", ylim=(1, None))
side.legend(frameon=False)
figure

# %% [markdown]
# The two curves are near each other. The formula knows one alpha for all places: where whole stretches of a
# text are easy or hard, it promises too little; where guesses get worse along a draft, and where the last
# draft of a text is cut short, too much. `expected_tokens` can also follow a whole series of acceptances
# along a text; [the next notebook](05_layer_skipping.ipynb) uses that. What the clock says is still another
# matter, because c depends on the machine.
#
# ## Questions
#
# **1.** p and q are both one-hot (greedy). What does the rule min(1, p/q) become?
#
# <details><summary>Answer</summary>
# A guess is kept if it is the target's best token, and refused otherwise; the correction is the target's best
# token. No coin matters.
# </details>

# %%
from verification import verify

q, p = torch.eye(4)[None, 1:3], torch.eye(4)[None, [1, 3, 0]]          # q guesses 1, 2; p wants 1, 3, 0
for seed in range(5):
    accepted, token = verify(p, q, torch.tensor([[1, 2]]), Coins(seed))
    assert (int(accepted), int(token)) == (1, 3)
print("whatever the coins: one accepted, then the target's own token")

# %% [markdown]
# **2.** Somebody sees that a drawn guess has a low q and throws it away before the check, to save time. Is
# the text still exact?
#
# <details><summary>Answer</summary>
# No. The guesses that are left are no longer distributed as q, so min(1, p/q) is the wrong test. A rule may
# stop drafting <i>after</i> a token, but the token that was drawn must be checked.
# </details>

# %%
p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
keep = q >= 0.25                                                # drop guesses that looked unlikely
accepted = torch.minimum(p, q) * keep
plain = p * (q * ~keep).sum()                                   # nothing is proposed: a plain token from p
refused = 1 - accepted.sum() - plain.sum()
text = accepted + plain + refused * (p - q).clamp(min=0) / (p - q).clamp(min=0).sum()
assert not torch.allclose(text, p, atol=0.01)
print("wanted", [round(x, 3) for x in p.tolist()], "got", [round(x, 3) for x in text.tolist()])

# %% [markdown]
# **3.** The draft is the whole model itself. How many passes do n tokens take with gamma guesses a round?
#
# <details><summary>Answer</summary>
# Every guess is accepted, each round writes gamma + 1 tokens: n / (gamma + 1), rounded up. (It saves no time,
# since c is 1.)
# </details>

# %%
for gamma in (1, 3, 7):
    _, passes = generate(model, [prompt], 24, SelfDraft(model, range(2 * c.n_layers), gamma))
    assert passes == -(-24 // (gamma + 1))
print("ceil(n / (gamma + 1)), a test that finds bugs which no comparison of texts can see")

# %% [markdown]
# **4.** With alpha = 0.4 and c = 0.6, would a longer draft help?
#
# <details><summary>Answer</summary>
# No. Each further guess costs as much and is reached less often. If the first one does not pay, none does.
# </details>

# %%
assert best_gamma(0.4, 0.6) == 0
assert all(expected_speedup(0.4, g + 1, 0.6) < expected_speedup(0.4, g, 0.6) for g in range(10))
print([round(expected_speedup(0.4, g, 0.6), 2) for g in range(5)])

# %% [markdown]
# Next: [layer skipping](05_layer_skipping.ipynb). Which part of the model should draft?
