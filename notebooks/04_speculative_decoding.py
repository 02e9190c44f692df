# %% [markdown]
# # 4. Speculative decoding: draft, check, and change nothing
#
# A cheap model drafts a few tokens. The expensive one, the *target*, checks all of them in one
# pass, and keeps them up to the first one it rejects (Leviathan et al. 2023,
# [2211.17192](https://arxiv.org/abs/2211.17192), and, independently, Chen et al. 2023,
# [2302.01318](https://arxiv.org/abs/2302.01318)). We begin with the *mechanism*, a program on one
# page. Then comes the *proof*: three lines, and an enumeration of everything that can happen. Last
# come the *economics*: when to turn it off.
#
# You need [3, sampling](03_sampling.ipynb), and the cache of [2](02_kv_cache.ipynb). About 45
# minutes.

# %%
# %run start.py
MODEL = ROOT / "weights" / "stories-llama"      # or a folder with your own Llama or Gemma-2

# %%
from sampling import Coins, to_probs

torch.set_grad_enabled(False)
model, tokenizer = checkpoint.load(MODEL, dtype=torch.float32)
c = model.c
device = model.tok.device
EXIT = max(1, c.n_layers // 6)                                  # a sixth of the blocks will draft
prompt = checkpoint.encode(tokenizer, "Once upon a time, there was a little", c.bos)
print(f"{EXIT} of {c.n_layers} blocks draft; the whole model checks")

# %% [markdown]
# ## The mechanism: `minimal.py`, line by line
#
# `minimal.py` has the whole idea on one page: first without a cache, then with one. We read it
# along with a real text. What does a part of the model say about the next token, and what does the
# whole model say?
#
# We take a story, and in it a place where the part and the whole model disagree a good deal.
# (`Teacher` finds it; notebook 6 explains how.)

# %%
import inspect

import minimal
from search import Teacher
from support.texts import read_prompts

probs = lambda z: to_probs(z, temperature=1.0, top_k=8)
story = checkpoint.encode(tokenizer, read_prompts("stories")[0]["text"], c.bos)[:80]
agree = Teacher(model, story, probs).acceptance(range(2 * EXIT))        # (T,): 1 where p = q
after = 5 + int((agree[5:] - 0.6).abs().argmin())               # closest to 0.6; not at the start
place = story[: after + 1]                                      # the text up to there
with torch.device(device):                                      # where minimal.py makes tensors
    p = minimal.distribution(model, place, c.n_layers, probs).cpu()     # (V,) the whole model
    q = minimal.distribution(model, place, EXIT, probs).cpu()           # (V,) its first blocks
print("...", tokenizer.decode(place[-16:]), "...")
print("the model expects", [tokenizer.decode([t]) for t in p.topk(2).indices.tolist()],
      "and its first blocks", [tokenizer.decode([t]) for t in q.topk(2).indices.tolist()])

# %% [markdown]
# If we drew from q and kept every token, we would write the draft's text, not the target's. So each
# drafted token must pass a test. Here is all of it. One turn of this loop is a *round*.

# %%
loop = inspect.getsource(minimal.rounds)
print(loop[loop.index("    while left"):])

# %% [markdown]
# **Draft.** The number of tokens drafted per round is called `gamma`. We keep the distributions,
# because the test needs exactly the q that each token was drawn from.
#
# **Verify.** The whole model gives p at the same places. All drafted tokens are known before it
# runs, so with a cache this is *one* pass over gamma + 1 tokens. What does `verify` do with them?

# %%
print(inspect.getsource(minimal.verify))

# %% [markdown]
# A drafted token t, drawn from q, is accepted with probability min(1, p(t) / q(t)). The first
# rejection ends the round, because the later tokens were drafted after a token that is not in the
# text. In its place comes the *correction*, drawn from the *residual* max(p - q, 0). If all are
# accepted, the p after the last of them gives one more token for free, the *bonus*. So each round
# writes at least one token and at most gamma + 1.
#
# Now watch a few rounds. Tokens drafted after a rejected one are never tested. We call them *dead*.

# %%
gamma = 3
with torch.device(device):
    for drafted, accepted, new in minimal.rounds(model, prompt, 24, EXIT, gamma, probs, Coins(1)):
        verdicts = ["accepted"] * accepted + ["REJECTED"] * (accepted < len(drafted))
        verdicts += ["dead"] * (len(drafted) - len(verdicts))
        line = ", ".join(f"{tokenizer.decode([t])!r} {verdict}"
                         for t, verdict in zip(drafted, verdicts, strict=True))
        print(f"{line:60} -> {tokenizer.decode(new)!r}")

# %% [markdown]
# **Try it:** set `gamma = 6`. What do you expect for the number of rounds, and of dead tokens?
#
# <details><summary>Answer</summary>
# Fewer rounds, because easy stretches need fewer. More dead tokens, because each rejection wastes a
# longer rest.
# </details>
#
# ## With a cache
#
# Without a cache, every token of the text is read again for each distribution. With the cache of
# [notebook 2](02_kv_cache.ipynb), each token is read once. Here are "Draft" and "Verify" again.
# **Find the lines that differ,** before you read on.

# %%
cached = inspect.getsource(minimal.rounds_with_cache)
print(cached[cached.index("        # Draft") : cached.index("        accepted, token")])

# %% [markdown]
# - The first blocks read D, the last known token, and each drafted token as it comes. Their states
#   (`xs`) are kept, because the whole model would compute the same.
# - The other blocks read all of them in one pass. So a round reads the weights of the first blocks
#   and of the output head gamma + 1 times, and all other weights once.
# - Nothing is taken back after a rejection. The next round begins at a lower place and overwrites
#   it.
#
# The two write the same text with the same random numbers:

# %% jupyter={"source_hidden": true}
texts = []
with torch.device(device):
    for way in (minimal.rounds, minimal.rounds_with_cache):
        texts.append([new for *_, new in way(model, prompt, 48, EXIT, gamma, probs, Coins(1))])
assert texts[0] == texts[1]
print("equal, all", sum(map(len, texts[0])), "tokens")

# %% [markdown]
# `speculative.rounds` is this loop for many texts at once, and for any kind of draft:
#
# ![One round of the loop](../docs/loop.svg)
#
# ## The proof, as a picture
#
# The common part of the two distributions, min(p, q), is written as accepted tokens. Where q has
# more than p, the surplus is rejected. Where p has more than q, max(p - q, 0), the missing part is
# written as corrections. Both surpluses have the same size, because p and q both sum to 1. The
# size of the common part is the chance that a drafted token is accepted. It is called **alpha**.
#
# **Predict:** which token is rejected most often? Which one is the most frequent correction?

# %%
common = torch.minimum(p, q)
residual = (p - q).clamp(min=0)

# %% tags=["gallery"] jupyter={"source_hidden": true}
shown = ((p + q) > 0).nonzero()[:, 0]
shown = shown[p[shown].argsort(descending=True, stable=True)]
names = [plots.word(tokenizer, t) for t in shown.tolist()]
figure, (sides,) = plots.axes(1, 3, width=3.4, height=3.2)
plots.bars(sides[0], names, p[shown], plots.HUES[0], -0.2, 0.4, label="p")
plots.bars(sides[0], names, q[shown], plots.HUES[1], 0.2, 0.4, label="q")
plots.bars(sides[1], names, common[shown], plots.HUES[5], label="accepted")
plots.bars(sides[1], names, (q - common)[shown], "#d55e0066", bottom=common[shown],
           label="rejected", hatch="////", ec="white", lw=0)
plots.bars(sides[2], names, common[shown], plots.HUES[5], label="accepted")
plots.bars(sides[2], names, residual[shown], plots.HUES[2], bottom=common[shown],
           label="corrections")
for side, title in zip(sides, ("two distributions", "drafted: q", "written: p again"), strict=True):
    side.set(ylim=(0, 1.1 * float(torch.maximum(p, q).max())), title=title)
    side.legend(frameon=False, fontsize=9)
figure

# %% [markdown]
# In three lines, for any token t (Leviathan et al., appendix A.1; Chen et al., Theorem 1):
#
# $$P(t\text{ accepted}) = q(t)\,\min\!\big(1, \tfrac{p(t)}{q(t)}\big) = \min(p(t), q(t))$$
# $$P(\text{rejection}) = 1 - \textstyle\sum_s \min(p(s), q(s)) = \sum_s \max(p(s) - q(s), 0)$$
# $$P(t) = \min(p(t), q(t))
# + P(\text{rejection})\cdot\frac{\max(p(t) - q(t), 0)}{\sum_s \max(p(s) - q(s), 0)}
# = \min(p, q) + \max(p - q, 0) = p(t)$$

# %%
accepted = q * (p / q).nan_to_num(0.0).clamp(max=1)             # drawn from q, and accepted
rejection = 1 - accepted.sum()
text = accepted + rejection * residual / residual.sum()
assert torch.allclose(text, p, atol=1e-6) and torch.isclose(rejection, residual.sum(), atol=1e-6)
print(f"alpha = sum of min(p, q) = {float(common.sum()):.3f}, the chance of acceptance here")
most = [tokenizer.decode([int(surplus.argmax())]) for surplus in (q - common, residual)]
print(f"rejected most often: {most[0]!r}; most frequent correction: {most[1]!r}")

# %% [markdown]
# ## The exact distribution, by enumeration
#
# The proof is about the idea. A program can still be wrong. So we run the *program*, and go through
# everything that can happen. A `Coins` object makes every random decision, so we pass one that
# decides as we prescribe and multiplies the probabilities (`notebooks/outcomes.py`). One run per
# path gives the exact probability of every text, without samples and without noise.
#
# To keep the tree small, only the two most likely tokens at each place keep a probability. We draft
# one token per round and write two, at the same place in the story as above.

# %%
from layerskip import SelfDraft
from notebooks.outcomes import every_path, probability, total
from speculative import rounds
from verification import verify

two = lambda z: to_probs(z.double(), temperature=1.5, top_k=2)


def write(coins, count, gamma, verify=verify):
    """Run the library's loop with these coins. Returns the `count` tokens it writes."""
    drafter = SelfDraft(model, range(2 * EXIT), gamma)
    steps = rounds(model, [place], count, drafter, two, coins, verify=verify)
    return tuple(t for _, r in steps for t in r.new[0])


paths = every_path(lambda coins: write(coins, count=2, gamma=1))
plots.draw_outcomes(paths, lambda token: plots.word(tokenizer, token))

# %% [markdown]
# Each branch is one decision with its probability, and a path multiplies them; dots only lead to
# the text. Equal texts have the same colour. Some come about in two ways, once as an accepted token
# followed by the bonus, and once as a correction followed by one more token. The two add up.
#
# What would the model do by itself? Multiply its own probabilities along each text:

# %% jupyter={"source_hidden": true}
def plain_law(count):
    chances = {(): 1.0}
    for _ in range(count):
        longer = {}
        for text, weight in chances.items():
            p = two(model(torch.tensor([[*place, *text]], device=device))[0, -1])
            longer |= {text + (t,): weight * float(p[t]) for t in p.nonzero()[:, 0].tolist()}
        chances = longer
    return chances


alone = plain_law(2)
speculative = total(paths)
assert alone.keys() == speculative.keys()
assert all(abs(alone[t] - speculative[t]) < 1e-5 for t in alone)
for text in alone:
    ways = [f"{probability(steps):.3f}" for steps, end in paths if end == text]
    print(f"{tokenizer.decode(text)!r:16} alone {alone[text]:.3f}   speculative {' + '.join(ways)}")

# %% [markdown]
# The sums agree. A larger tree needs no drawing: three tokens, two drafted per round.

# %% jupyter={"source_hidden": true}
paths = every_path(lambda coins: write(coins, count=3, gamma=2))
speculative = total(paths)
truth = plain_law(3)
apart = max(abs(speculative[t] - truth[t]) for t in truth)
assert speculative.keys() == truth.keys() and apart < 1e-5
print(f"{len(paths)} paths, {len(truth)} texts; all sum to {sum(speculative.values()):.12f}")
print("largest difference from the model alone:", apart)

# %% [markdown]
# ## A planted mistake
#
# The most natural mistake is to draw the next token from p after a rejection. Is p not what we
# want? Here is `verify` for one row with this mistake. Beside it is a second one: accept
# everything.

# %%
def resample_from_p(p, q, tokens, coins, length):
    passed = [bool(coins.flip(p[:, k, t] / q[:, k, t])) for k, t in enumerate(tokens[0].tolist())]
    accepted = [*passed, False].index(False)
    return torch.tensor([accepted]), coins.choose(p[:, accepted])   # wrong after a rejection


def accept_everything(p, q, tokens, coins, length):
    return length, coins.choose(p[:, -1])


laws = {"the model alone": truth, "the library": speculative}
for wrong in (resample_from_p, accept_everything):              # the loop takes any rule
    name = wrong.__name__.replace("_", " ")
    laws[name] = total(every_path(lambda coins, wrong=wrong: write(coins, 3, 2, verify=wrong)))
    assert max(abs(laws[name].get(t, 0) - truth[t]) for t in truth) > 1e-3
words = {t: tokenizer.decode(t).strip() for t in sorted(truth, key=truth.get, reverse=True)}
plots.draw_texts(laws, words)

# %% [markdown]
# The first mistake writes too often what the draft prefers: after a rejection it may draw a token
# that was drafted too often already. Both mistakes write fluent text, which no reader would doubt.
# A test that compares greedy texts would miss the first one. An enumeration finds both at once.
#
# Such mistakes were shipped: [a museum](../exercises/museum.md) shows them. In the second,
# `transformers` took a *softmax* of the residual instead of scaling it to sum to 1
# ([#28508](https://github.com/huggingface/transformers/pull/28508)).
#
# **Predict,** on paper: p = (0.5, 0.5) and q = (0.2, 0.8). Which token does it write too often, and
# why?

# %% jupyter={"source_hidden": true}
p_two = torch.tensor([0.5, 0.5])
q_two = torch.tensor([0.2, 0.8])
left = (p_two - q_two).clamp(min=0)                             # (0.3, 0): never the second
text = torch.minimum(p_two, q_two) + left.sum() * left.softmax(-1)
off = float((text - p_two).abs().sum() / 2)
assert abs(off - 0.128) < 5e-4 and text[1] > p_two[1]           # the museum's figure
print(f"written {text[0]:.3f} and {text[1]:.3f}; {off:.3f} of the probability has moved")

# %% [markdown]
# The second token: a softmax is never 0, so what q has too much of can come back as its own
# replacement.
#
# ## The library's loop, one step at a time
#
# `rounds` is a Python generator: each `next` gives one round and everything that happened in it.
# Each line of the table is a drafted token, with its p, its q and the verdict.
# ([run.html](../docs/run.html) steps through a whole run in the same way.)
#
# **Try it:** run the second cell again and again. Cover the last column: which verdicts do p and q
# settle?
#
# <details><summary>Answer</summary>
# Where p is at least q, the token is accepted; where p is 0, it is rejected. In between a coin
# decides. After a rejection nothing is tested.
# </details>

# %%
from IPython.display import HTML, display

warm = lambda z: to_probs(z, temperature=0.8)
run = rounds(model, [prompt], 60, SelfDraft(model, range(2 * EXIT), 3), warm, Coins(12))

# %%
state, r = next(run)
display(HTML(plots.round_html(r, tokenizer)))
print("text so far:", tokenizer.decode(state.known[0]))

# %% [markdown]
# ## What drafts? Three answers on real text
#
# - the model's own first blocks (`SelfDraft`; it needs no other weights);
# - a small model with the same tokenizer (`ModelDraft`; Leviathan et al.);
# - the text itself: whatever followed the last two tokens when they last occurred (`NGram`; Saxena
#   2023).
#
# We decode greedily, so all three must write the same text, but for a near-tie that rounding
# decides ([notebook 5](05_the_same_text.ipynb)). We also look at the clock. (The speed is the
# median of five runs in turn; what else the machine does can still move it by a tenth.)

# %%
from drafter import ModelDraft
from methods.lookup import NGram
from speculative import generate
from support.compare import compare

drafters = {"first blocks": lambda gamma: SelfDraft(model, range(2 * EXIT), gamma),
            "n-gram": lambda gamma: NGram(gamma, 2)}
small, other = checkpoint.load(ROOT / "weights" / "stories-draft", device, torch.float32)
if other.get_vocab() == tokenizer.get_vocab():                  # else its ids mean other words
    drafters["small model"] = lambda gamma: ModelDraft(small, gamma)
gamma = 5
plain, passes = generate(model, [prompt], 80)
runs = {name: plots.record(model, tokenizer, [prompt], 80, make(gamma))
        for name, make in drafters.items()}
makers = {"plain": lambda: None}
makers |= {name: lambda make=make: make(gamma) for name, make in drafters.items()}
write_on = lambda drafter: rounds(model, [prompt], 80, drafter)
timed = compare(write_on, makers, 1, repeats=5)         # in turn; the median
for name, seen in runs.items():
    assert [t.id for t in seen.rows[0]] == plain[0]
    print(f"{name:13} {seen.counts.passes} passes instead of {passes}, "
          f"{timed[name].rate / timed['plain'].rate:.2f} times as fast")

# %%
for name, seen in runs.items():
    display(HTML(f"<b>{name}</b>"), HTML(plots.text_html(seen)))

# %% [markdown]
# The colour and the line below a token show where it came from; hover over it for more. The n-gram
# saves nothing here: a short story seldom repeats itself.
#
# ## Acceptance by position
#
# Make the drafts long, and count for each place in a draft: how often was it *tested*, that is, how
# often was everything before it accepted? And how often was it then accepted? We continue eight
# stories.
#
# **Predict:** is the sixth token, *when it is tested*, accepted less often than the first?

# %% jupyter={"source_hidden": true}
from control import expected_tokens
from support.stats import Counts

K = 6
prompts = [checkpoint.encode(tokenizer, line["prompt"], c.bos) for line in read_prompts("stories")]
tested = torch.zeros(K)
kept = torch.zeros(K)
seen = Counts()
for ids in prompts:
    for _, r in rounds(model, [ids], 64, SelfDraft(model, range(2 * EXIT), K)):
        seen.add(r)
        proposed = int(r.proposed)
        accepted = int(r.accepted)
        tested[: min(accepted + 1, proposed)] += 1
        kept[:accepted] += 1
rate = kept / tested
error = (rate * (1 - rate) / tested).sqrt()                     # the standard error of a share
for k in range(K):
    print(f"place {k + 1}: {int(kept[k]):3} of {int(tested[k]):3} accepted, "
          f"{rate[k]:.2f} ± {error[k]:.2f}")
if Path(MODEL).name == "stories-llama":
    apart = (rate - rate[0]).abs()
    assert (apart < 2 * (error**2 + error[0] ** 2).sqrt()).all(), "no place stands out"
    assert kept[1:].sum() / tested[1:].sum() < rate[0], "fewer on the whole"

# %% jupyter={"source_hidden": true}
figure, ((left, right),) = plots.axes(1, 2)
at = range(1, K + 1)
first = float(rate[0])
left.errorbar(at, rate, yerr=2 * error, color=plots.HUES[0], marker="o", ms=4, capsize=3,
              label="accepted of tested (bars: 2 standard errors)")
left.plot(at, kept / tested[0], color=plots.HUES[1], marker="s", ms=4,
          label="accepted of all drafts")
left.plot(at, [first**k for k in at], color="#808080", ls=":",
          label="if every place were like the first")
left.set(xlabel="place k in the draft", ylabel="share of drafted tokens", ylim=(0, 1.05))
left.legend(frameon=False, fontsize=8, loc="lower left")
right.bar(at, tested, color=plots.HUES[5], label="tested")
right.bar(at, kept, color=plots.HUES[0], width=0.5, label="accepted")
right.set(xlabel="place k in the draft", ylabel="how many")
right.legend(frameon=False)
figure

# %% [markdown]
# Accepted tokens become rare at late places because those places are *reached* less and less often.
# A late token that is reached is accepted about as often as a first one: the differences are within
# the error bars. If every place were exactly like the first, the orange line would be the dotted
# one. Then each tested token is accepted with the same probability alpha, and a round writes, on
# average (we call it **tau**),
#
# $$E[\text{tokens}] = 1 + \alpha + \alpha^2 + \dots + \alpha^\gamma
# = \frac{1 - \alpha^{\gamma+1}}{1 - \alpha} \qquad\text{(Leviathan et al., eq. 1)}$$
#
# ## Two ratios that are easily confused
#
# - **alpha** = accepted / *tested*. The formula needs this one. The library counts the first token
#   of each round, which is always tested.
# - **yield** = accepted / *drafted*, with all drafted tokens counted. vLLM reports it as "draft
#   acceptance rate". Dead tokens pull it down.
#
# **Predict:** alpha is 0.8 and each draft has 5 tokens. How many tokens does a round write? How
# large is the yield? And what does the formula give if you put the yield in by mistake?

# %% jupyter={"source_hidden": true}
alpha = 0.8
gamma = 5
tokens = expected_tokens(alpha, gamma)
yields = (tokens - 1) / gamma
confused = expected_tokens(yields, gamma)
print(f"{tokens:.2f} tokens per round; yield {yields:.2f}; with the yield as alpha: {confused:.2f}")
yields = seen.accepted / seen.proposed
right = expected_tokens(seen.alpha, K)
confused = expected_tokens(yields, K)
print(f"our drafts: {seen.tau:.2f} tokens per round; "
      f"predicted with alpha {seen.alpha:.2f}: {right:.2f} ({right / seen.tau - 1:+.0%}), "
      f"with the yield {yields:.2f}: {confused:.2f}")
assert Path(MODEL).name != "stories-llama" or 0.04 < right / seen.tau - 1 < 0.08

# %% [markdown]
# The formula with alpha is a little too high. After the first place, fewer were accepted on the
# whole, and the last draft of each text is cut short. With the yield in its place it is useless.
#
# ## The economics: when to turn it off
#
# Drafting is not free. Let c be the cost of drafting one token, in passes of the whole model. A
# round with gamma drafted tokens costs gamma·c + 1 passes (if checking several tokens costs no more
# than checking one), so
#
# $$\text{speed-up} = \frac{1 + \alpha + \dots + \alpha^\gamma}{\gamma c + 1}
# \qquad\text{(Leviathan et al., Theorem 3.8)}$$
#
# The first drafted token adds alpha tokens and costs c. So **drafting gains only where alpha > c**
# (Corollary 3.9). Where it gains, there is a best gamma, because each further token costs the same
# and is reached less often.
#
# **Try it:** sort the four pairs below by their best gamma. Which one should not draft at all? How
# cheap must the draft of the third pair become before two tokens are best? Change its c.
#
# <details><summary>Answer</summary>
# Below 0.2: two tokens bring 1.75 for 2c + 1 passes, one brings 1.5 for c + 1.
# </details>

# %%
from control import best_gamma, expected_speedup

pairs = [(0.8, 0.1), (0.8, 0.3), (0.5, 0.3), (0.4, 0.6)]       # (alpha, c)
speeds = {f"alpha {alpha}, c {cost}": [expected_speedup(alpha, gamma, cost) for gamma in range(9)]
          for alpha, cost in pairs}
best = [best_gamma(alpha, cost, most=8) for alpha, cost in pairs]
print("best gamma:", dict(zip(speeds, best, strict=True)))

# %% jupyter={"source_hidden": true}
figure, ((left, right),) = plots.axes(1, 2, height=3.8)
plots.curves(left, range(9), speeds, xlabel="gamma", ylabel="times plain decoding", ylim=(0.3, 3.2))
for values, at, hue in zip(speeds.values(), best, plots.HUES, strict=False):
    left.plot(at, values[at], marker="*", ms=14, color=hue)
left.axhline(1, color="#808080", ls=":", label="plain decoding")
left.legend(frameon=False, fontsize=9, ncols=2, loc="upper center")
plots.draw_plane(right, [alpha for alpha, _ in pairs], [cost for _, cost in pairs])
right.collections[-1].set(sizes=[40], alpha=1)
figure

# %% [markdown]
# The stars mark the best gamma. For the last pair it is 0: turn drafting off. The dots in the right
# picture are the same four pairs, among lines of equal best speed-up. Below the diagonal there is
# nothing to gain.
#
# The clock may say something else, because c depends on the machine ([notebook
# 6](06_layer_skipping.ipynb)). So does the cost of checking several tokens ([notebook
# 12](12_close_to_the_machine.ipynb)).
#
# ## Suffix decoding: copy what came before
#
# Copied text is the cheapest draft. An n-gram looks for the last n tokens, with one n for all
# texts. *Suffix decoding* (Oliaro et al. 2024, [2411.04975](https://arxiv.org/abs/2411.04975))
# tries every *suffix*: the last token, the last two, and so on, and counts what has followed each
# of them so far. From a suffix of m tokens it follows the most frequent next token, for at most 2m
# tokens, and as long as the chance of the whole copy stays above a limit. It drafts the copy that
# promises the most accepted tokens.
#
# Here it writes code. **Look:** which copies are right?

# %% jupyter={"source_hidden": true}
from methods.lookup import Suffix

code = checkpoint.encode(tokenizer, read_prompts("code")[0]["prompt"], c.bos)
lookup = Suffix(7)
print("suffix that is known already -> copy                                 accepted")
for state, r in rounds(model, [code], 32, lookup):
    drafted = r.draft.tokens[0].tolist()
    before = len(state.known[0]) - len(r.new[0])
    if drafted:
        suffix = tokenizer.decode(state.known[0][before - lookup.matched[0] : before])
        print(f"{suffix[-30:]!r:34} -> {tokenizer.decode(drafted)!r:34} "
              f"{int(r.accepted)} of {len(drafted)}")

# %% [markdown]
# Names recur often, whole phrases less often. A copy costs no computation, so it gains wherever a
# text repeats itself: in code, in summaries of a prompt, in lists. A story repeats names and short
# phrases only:

# %% jupyter={"source_hidden": true}
copied = {}
for kind in ("code", "stories"):
    openings = [checkpoint.encode(tokenizer, line["prompt"], c.bos)
                for line in read_prompts(kind)[:4]]
    counts = Counts()           # its tau: tokens written per round
    for _, r in rounds(model, openings, 48, Suffix(7), eos=c.eos):
        counts.add(r)
    copied[kind] = counts.accepted / counts.proposed
    print(f"{kind}: {counts.accepted} of {counts.proposed} copied tokens accepted, "
          f"{copied[kind]:.0%}; {counts.tau:.2f} tokens per pass")
assert Path(MODEL).name != "stories-llama" or copied["stories"] < copied["code"]

# %% [markdown]
# ## Questions
#
# Answer first. Then unfold the answer, and the check that is folded below it.
#
# **1.** p and q are both one-hot (greedy). What does the rule min(1, p/q) become?
#
# <details><summary>Answer</summary>
# A drafted token is accepted if it is the target's best token, and rejected otherwise. The
# correction is the target's best token. The coins do not matter.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
from verification import verify

q = torch.eye(4)[None, 1:3]                                     # drafts 1, 2
p = torch.eye(4)[None, [1, 3, 0]]                               # wants 1, 3, 0
for seed in range(5):
    accepted, token = verify(p, q, torch.tensor([[1, 2]]), Coins(seed))
    assert (int(accepted), int(token)) == (1, 3)
print("whatever the coins: one accepted, then the target's own token")

# %% [markdown]
# **2.** A program sees that a drafted token has a low q, and drops it before the check to save
# time. Is the text still exact?
#
# <details><summary>Answer</summary>
# No. The tokens that are left are no longer distributed as q, so min(1, p/q) is the wrong test. A
# rule may stop drafting <i>after</i> a token, but a token that was drawn must be checked.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
p = torch.tensor([0.5, 0.3, 0.2])
q = torch.tensor([0.2, 0.3, 0.5])
keep = q >= 0.25                                                # drop tokens that look unlikely
accepted = torch.minimum(p, q) * keep
plain = p * (q * ~keep).sum()                                   # nothing proposed: drawn from p
rejected = 1 - accepted.sum() - plain.sum()
text = accepted + plain + rejected * (p - q).clamp(min=0) / (p - q).clamp(min=0).sum()
assert not torch.allclose(text, p, atol=0.01)
print("wanted", [round(x, 3) for x in p.tolist()], "got", [round(x, 3) for x in text.tolist()])

# %% [markdown]
# **3.** The draft is the whole model itself. How many passes do n tokens take with gamma drafted
# tokens per round?
#
# <details><summary>Answer</summary>
# Every drafted token is accepted, so each round writes gamma + 1 tokens: n / (gamma + 1) passes,
# rounded up. (It saves no time, since c is 1.)
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
for gamma in (1, 3, 7):
    _, passes = generate(model, [prompt], 24, SelfDraft(model, range(2 * c.n_layers), gamma))
    assert passes == -(-24 // (gamma + 1))
print("ceil(n / (gamma + 1)): this finds bugs that no comparison of texts can find")

# %% [markdown]
# **4.** The last token has occurred four times so far. Three times "a" followed it, and once "the".
# "a" was always followed by "big". How many accepted tokens does suffix decoding expect of the copy
# "a big"?
#
# <details><summary>Answer</summary>
# 1.5: "a" has a chance of 0.75, and then "big" is certain, so it has the same.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
seen = {(0,): {1: 3, 2: 1}, (0, 1): {3: 3}}         # 0: the last token, 1: a, 2: the, 3: big
assert Suffix(7).follow(seen, (0,), 2) == (1.5, [1, 3])
print("0.75 + 0.75 = 1.5")

# %% [markdown]
# Next: [the same text](05_the_same_text.ipynb). Drafting keeps the distribution. Can it keep the
# text itself?
