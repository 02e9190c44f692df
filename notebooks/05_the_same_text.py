# %% [markdown]
# # 5. The same text: more than the same distribution
#
# Notebook 4 proved that drafting does not change the *distribution* of a text. Two questions are
# left. Could an exact rule accept more than that one? Yes: *block verification* does. And can
# drafting leave the *text* itself unchanged, token for token, even when we sample, and even in
# bfloat16? Two things stand in the way, the random numbers and the rounding. This notebook removes
# both.
#
# > **Noise that belongs to a place in the text does not depend on who drafted. A sum that is always
# > taken in one order does not depend on how many tokens a pass reads.**
#
# You need [4, speculative decoding](04_speculative_decoding.ipynb). About 25 minutes.

# %%
# %run start.py
MODEL = ROOT / "weights" / "stories-llama"      # or a folder with your own Llama or Gemma-2
SHIPPED = MODEL.name == "stories-llama"         # the text's figures are checked for this model

# %%
from sampling import Coins, to_probs
from speculative import generate
from support.texts import read_prompts

torch.set_grad_enabled(False)
model, tokenizer = checkpoint.load(MODEL, "cpu", torch.float32)
c = model.c
L = model.c.n_layers
EXIT = max(1, L // 4)                                           # a quarter of the blocks drafts
prompt = checkpoint.encode(tokenizer, read_prompts("stories")[0]["prompt"], c.bos)
print(f"{EXIT} of {L} blocks draft; the prompt has {len(prompt)} tokens")

# %% [markdown]
# ## Block verification: one test for the draft as a whole
#
# Token by token, a ratio p/q above 1 is cut to 1, and the surplus is lost. *Block verification*
# (Sun et al. 2025, [2403.10444](https://arxiv.org/abs/2403.10444)) carries it on. The first i
# drafted tokens have the weight w_i = min(1, w_{i-1} p/q), with w_0 = 1, so a token with p > q
# makes up for an earlier one with p < q. Each prefix flips a coin. The whole draft passes with
# probability w, its weight. A shorter prefix passes with probability Z / (Z + 1 - w_i), where Z is
# the sum of max(w_i p - q, 0) over the next token. The *longest* prefix that passes is accepted,
# even if a shorter one failed. The correction is drawn from this max(w_i p - q, 0), with the i of
# the accepted prefix.
#
# Here is the paper's example: two tokens, A and B, with p = (1/3, 2/3) and q = (2/3, 1/3) at every
# place, and two drafted per round.
#
# **Predict:** which of the drafts AA, AB, BA and BB are accepted further than before?

# %% jupyter={"source_hidden": true}
from itertools import product

from methods.block import verify_block
from notebooks.outcomes import every_path, total
from verification import verify

third = torch.tensor([1, 2], dtype=torch.float64) / 3
p_s = third.expand(1, 3, 2)                                     # (B, K+1, V)
q_s = third.flip(0).expand(1, 2, 2)                             # (B, K, V)
chances = {}
for rule in (verify, verify_block):
    mean = 0.0
    for draft in product((0, 1), repeat=2):
        ends = every_path(lambda coins, rule=rule, draft=draft:
                          int(rule(p_s, q_s, torch.tensor([draft]), coins)[0]))
        law = total(ends)                                       # {how many are accepted: chance}
        chances[rule.__name__, draft] = law
        mean += float(q_s[0, 0, list(draft)].prod()) * sum(k * law[k] for k in law)
    print(f"{rule.__name__:12} accepts {mean:.3f} = {mean * 9:.0f}/9 of two tokens on average")

# %% jupyter={"source_hidden": true}
figure, ((side,),) = plots.axes(1, 1, width=9, height=2.8)
for at, (name, draft) in enumerate(sorted(chances, key=lambda key: (key[1], key[0]))):
    x = at // 2 + (-0.2 if name == "verify" else 0.2)
    below = 0.0
    for k, hue in enumerate((plots.HUES[-1], plots.HUES[5], plots.HUES[0])):
        chance = chances[name, draft].get(k, 0.0)
        side.bar(x, chance, 0.36, bottom=below, color=hue,
                 label=f"{k} accepted" if at == 0 else None)
        below += chance
side.set_xticks([at + shift for at in range(4) for shift in (-0.2, 0.2)],
                 [f"{draft}\n{rule}" for draft in ("AA", "AB", "BA", "BB")
                  for rule in ("by token", "block")],
                fontsize=9)
side.set(ylabel="probability")
side.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
figure

# %% [markdown]
# Only AB. Its A has the ratio 1/2 and its B the ratio 2, which makes up for it, so the whole draft
# always passes. AA pays part of that back, but on average more is accepted. Is the text still
# exact? We ask the enumeration of notebook 4, with the model: three tokens, two drafted per round,
# and only the two most likely tokens at each place.

# %% jupyter={"source_hidden": true}
from layerskip import SelfDraft
from speculative import rounds

two = lambda z: to_probs(z.double(), temperature=1.5, top_k=2)


def write(coins):
    drafter = SelfDraft(model, range(2 * EXIT), 2)
    steps = rounds(model, [prompt], 3, drafter, two, coins, verify=verify_block)
    return tuple(t for _, r in steps for t in r.new[0])


speculative = total(every_path(write))
plain = total(every_path(lambda coins:
                         tuple(generate(model, [prompt], 3, None, two, coins)[0][0])))
apart = max(abs(speculative[t] - plain[t]) for t in plain)
assert speculative.keys() == plain.keys() and apart < 1e-5
print(f"{len(plain)} texts; the largest difference in probability from plain decoding:",
      f"{apart:.1e}")

# %% [markdown]
# Both rules keep the distribution. Neither keeps the *text*: with the same seed, plain and drafted
# decoding write different stories, because a drafted round spends more coins, and spends them on
# other decisions.
#
# ## A race: coins that belong to places
#
# Here is another way to draw from p. Let all tokens of the vocabulary run a race. Token v has an
# exponentially distributed time e_v, and arrives at e_v / p_v: a likely token runs faster. The
# first one to arrive is written. It is v with probability p_v / (the sum of all p), which is p_v,
# because the minimum of exponential times is won in proportion to their rates.
#
# So draw e_v from the seed, the *position* and v alone. Then a text depends on the seed and on p,
# and on nothing else. A draft runs the same race with its own q. A drafted token is accepted if it
# also wins with p; otherwise the winner with p is written. No matter what drafts, the text consists
# of winners with p.
#
# The picture shows one place of a story: the times of eight tokens, with p and with q, in two
# races. (↵ is the newline.)

# %%
import minimal
from sampling import uniforms

probs = lambda z: to_probs(z, temperature=0.8)
p = minimal.distribution(model, prompt, L, probs)               # (V,) the whole model
q = minimal.distribution(model, prompt, EXIT, probs)            # (V,) its first blocks


def run_race(seed):
    """(when each token arrives with p, and with q): two tensors (V,), from the same times e."""
    e = -(1 - uniforms(seed, 0, len(p))).log()
    return e / p, e / q


races = [tuple(int(times.argmin()) for times in run_race(seed)) for seed in range(400)]
agree = sum(a == b for a, b in races) / len(races)
overlap = float(torch.minimum(p, q).sum())
print(f"the winners with p and with q are the same token in {agree:.0%} of {len(races)} races "
      f"(± {(agree * (1 - agree) / len(races)) ** 0.5:.0%}); `verify` would accept {overlap:.0%}")
likely = (p + q).topk(5).indices.tolist()
for t in likely[:3]:
    print(f"{tokenizer.decode([t])!r:10} p = {float(p[t]):.2f}, wins "
          f"{sum(a == t for a, _ in races) / len(races):.2f} of the races with p")

# %% tags=["gallery"] jupyter={"source_hidden": true}
apart = next(seed for seed, (a, b) in enumerate(races) if a != b and a in likely)
alike = next(seed for seed, (a, b) in enumerate(races) if a == b)
figure, (sides,) = plots.axes(1, 2, width=5, height=3.2)
for side, seed, title in ((sides[0], alike, "one winner: accepted"),
                          (sides[1], apart, "two winners: p's is written")):
    with_p, with_q = run_race(seed)
    early = (with_p + with_q).topk(8, largest=False).indices.tolist()
    shown = list(dict.fromkeys([*races[seed], *early]))[:8]
    for times, hue, mark, name in ((with_p, plots.HUES[0], "o", "with p"),
                                   (with_q, plots.HUES[1], "s", "with q")):
        side.plot(range(len(shown)), times[shown], mark, color=hue, label=name)
        first = shown.index(int(times.argmin()))
        side.plot(first, times[shown[first]], mark, color=hue, ms=15, fillstyle="none", mew=1.5)
    words = [plots.word(tokenizer, t) for t in shown]
    side.set_xticks(range(len(shown)), words, rotation=90, fontsize=9)
    side.set(yscale="log", title=title)
sides[0].set_ylabel("time of arrival; circled: the first")
sides[0].legend(frameon=False, fontsize=9)
figure

# %% [markdown]
# Tokens that p and q like equally arrive at nearly the same times, so mostly the same token wins.
# But the two races agree less often than `verify` accepts: no rule accepts one token more often
# than `verify` does, and here the written token is chosen without knowing q. With the *total
# variation* TV = 1 - sum of min(p, q), they agree in at least (1 - TV) / (1 + TV) of the cases
# (Daliri, Musco and Suresh 2024, [2408.07978](https://arxiv.org/abs/2408.07978)). The library's
# `Race` is a kind of `Coins`, so the loop of notebook 4 runs it unchanged: for it, p and q are the
# one-hots of their winners.
#
# ## Rounding: a sum has an order
#
# In exact arithmetic we would be done. But a machine rounds after each addition, so a sum depends
# on the order of its terms. And a library multiplies one row with one routine and eight rows with
# another, each with an order of its own. We compare the rows of a product with the same rows among
# sixteen, bit by bit: for torch's `F.linear`, and for a loop of ours (`machine/rows.cpp`) that
# multiplies any number of rows in one order.
#
# **Predict:** how many rows of `F.linear` will be equal?

# %%
import torch.nn.functional as F

from machine.quant import Looped
from machine.rows import multiplies

w = model.blocks[0].mlp.gate_up.detach()
x = torch.randn(16, c.dim, generator=torch.Generator().manual_seed(0))
ways = {"F.linear": w}
if multiplies(model):                                           # the loop needs a C++ compiler
    ways["our loop"] = Looped(w)
for name, matrix in ways.items():
    among = F.linear(x, matrix)
    equal = {T: sum(map(torch.equal, F.linear(x[:T], matrix), among)) for T in (1, 2, 3, 4, 8)}
    print(f"{name:8}:", ", ".join(f"{same} of {T} equal" for T, same in equal.items()))
assert "our loop" not in ways or all(T == same for T, same in equal.items())

# %% [markdown]
# Where fewer rows are equal than there are, this library takes another routine for them than for
# sixteen. The differences are in the last digits, and mostly do not matter. In bfloat16, with its 8
# binary digits, two tokens are sometimes so close that the last bit decides between them. From
# there on, the texts differ.
#
# `machine.exact.exactly` returns a model whose passes do not have this problem. We read one text in
# blocks of 1, 2, 3 and 4 tokens, and compare the rows of logits, bit by bit, with the same rows in
# a block of 8.
#
# **Predict:** of 100 rows, how many are equal in passes as usual?

# %% jupyter={"source_hidden": true}
from kvcache import KVCache, prefill
from machine.exact import exactly
from model import Placement

half, _ = checkpoint.load(MODEL, "cpu", torch.bfloat16)
made = exactly(half)
line = torch.tensor([prompt + generate(model, [prompt], 48)[0][0]])


def equal_rows(one, T, width=8):
    """The share of rows that are equal in a block of T tokens and at the start of a longer one."""
    cache = KVCache(c, 1, line.shape[1] + width, one.attention_dtype())
    prefill(one, line, cache)

    def read(start, count):
        at = Placement.span(start, start + count)
        return one.unembed(one.run(one.embed(line[:, start : start + count]), at, cache))[0]

    same = []
    for start in range(line.shape[1] - width, 9, -1):           # backwards: earlier slots stay
        same += map(torch.equal, read(start, T), read(start, width)[:T])
    return sum(same) / len(same)


for name, one in {"as usual": half, "made exact": made}.items():
    shares = {T: equal_rows(one, T) for T in (1, 2, 3, 4)}
    print(f"{name:10}", ", ".join(f"blocks of {T}: {share:.0%}" for T, share in shares.items()))
assert set(shares.values()) == {1.0}, "made exact"

# %% [markdown]
# How many are equal as usual differs from machine to machine ([a
# GPU](../lab/BENCHMARKS.md#on-a-gpu)), so nothing can be built on it. On a CPU with a C++ compiler,
# `exactly` builds every pass from loops with one fixed order, including the pass over the prompt.
# Elsewhere it gives every pass the same shape: eight rows, some of which may be dead, over all
# slots of the cache.
#
# ## Both together
#
# Now we write eight texts with and without a draft, with the same seeds, and count the pairs that
# are identical: with coins or races, with passes as usual or exact ones. (Greedily, coins and races
# are the same, since neither matters.)
#
# **Predict:** which of them keep all eight texts, greedily and at temperature 0.8?

# %%
from machine.exact import Race

openings = [checkpoint.encode(tokenizer, line["prompt"], c.bos)[:24]
            for line in read_prompts("stories")[:8]]
DRAFT = range(2 * EXIT)                                         # the sub-layers that draft


def unchanged(one, temperature, coins):
    """How many of the texts a draft leaves as they were."""
    look = lambda logits: to_probs(logits, temperature)
    count = 0
    for seed, opening in enumerate(openings):
        plain, drafted = (generate(one, [opening], 64, drafter, look, coins(seed))[0]
                          for drafter in (None, SelfDraft(one, DRAFT, 3)))
        count += plain == drafted
    return count


kept = {}
for temperature, coins in ((0, Coins), (0.8, Coins), (0.8, Race)):
    for name, one in (("as usual", half), ("exact", made)):
        kept[temperature, coins, name] = unchanged(one, temperature, coins)
        print(f"temperature {temperature:3}, {coins.__name__:5}, passes {name:8}: "
              f"{kept[temperature, coins, name]} of {len(openings)} texts are identical")
assert kept[0, Coins, "exact"] == kept[0.8, Race, "exact"] == len(openings)
assert kept[0.8, Coins, "exact"] < len(openings)

# %% [markdown]
# Greedy decoding needs only the exact passes. When we sample, both are needed. With passes as usual
# a text survives if no two of its tokens were that close, and nothing promises it. With both, no
# drafter can change a token. `generate.py --exact` does both.
#
# There is a price. The prompt is read more slowly, since a library multiplies many rows faster than
# the loop. And a few more drafted tokens are rejected, since two races agree less often than
# `verify` accepts.
#
# **Try it:** let the second half of the model draft: `DRAFT = range(L, 2 * L)`. Which texts change?
#
# <details><summary>Answer</summary>
# With races and exact passes none: a useless draft costs time, never a token.
# </details>
#
# ## Questions
#
# Each answer is folded, and so is the cell below it that checks the answer.
#
# **1.** p = (0.5, 0.3, 0.2) and q = (0.2, 0.3, 0.5). `verify` accepts 0.7 of the drafted tokens. In
# how many races do p and q have the same winner? (Token v wins both with probability 1 / sum over w
# of max(p_w / p_v, q_w / q_v).)
#
# <details><summary>Answer</summary>
# In 0.63: 0.2 for the first token, 0.231 for the second and 0.2 for the third.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
p3 = torch.tensor([0.5, 0.3, 0.2])
q3 = torch.tensor([0.2, 0.3, 0.5])
both = [float(1 / torch.maximum(p3 / p3[v], q3 / q3[v]).sum()) for v in range(3)]
e = -(1 - uniforms(0, 0, 30_000)).log().view(-1, 3)             # ten thousand races of three tokens
seen = float(((e / p3).argmin(1) == (e / q3).argmin(1)).double().mean())
assert round(sum(both), 2) == 0.63 and abs(seen - sum(both)) < 0.02
print("by the formula", " + ".join(f"{one:.3f}" for one in both),
      f"= {sum(both):.3f}; in ten thousand races {seen:.3f}")

# %% [markdown]
# **2.** Notebook 3 draws with one uniform number: the token on whose piece of the line u falls.
# Suppose each position has its own u, for the target and for the draft. Then a drafter cannot
# change the text, either. What is wrong with that?
#
# <details><summary>Answer</summary>
# The pieces lie in the order of the ids. Where q has less than p of an early token, all later
# pieces are shifted, and the same u falls on another token. With p = (1/2, 1/2, 0) and q = (0, 1/2,
# 1/2), the two never agree, although they share half of their probability. Their races agree in a
# third of the cases.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
p3 = torch.tensor([0.5, 0.5, 0.0])
q3 = torch.tensor([0.0, 0.5, 0.5])
u = uniforms(0, 0, 10_000)[:, None].float()
lines = [(u < weights.cumsum(0)).double().argmax(1) for weights in (p3, q3)]
ways = lines, ((e / p3).argmin(1), (e / q3).argmin(1))
seen = [float((a == b).double().mean()) for a, b in ways]
assert seen[0] == 0 and abs(seen[1] - 1 / 3) < 0.02
print(f"on one line they agree in {seen[0]:.2f} of the draws, in a race in {seen[1]:.2f}")

# %% [markdown]
# **3.** Does block verification accept more than `verify` when a draft has a single token?
#
# <details><summary>Answer</summary>
# No. With one token there is no earlier ratio to make up for: its weight is min(1, p/q), which is
# the rule of notebook 4. For one token no exact rule accepts more.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
for token in (0, 1):
    one = torch.tensor([[token]])
    by_token, by_block = (total(every_path(lambda coins, rule=rule, one=one:
                                           int(rule(p_s[:, :2], q_s[:, :1], one, coins)[0])))
                          for rule in (verify, verify_block))
    assert all(abs(by_token.get(k, 0) - by_block.get(k, 0)) < 1e-12 for k in (0, 1))
print("one token: both rules accept with the same probability")

# %% [markdown]
# Next: [layer skipping](06_layer_skipping.ipynb). Which part of the model should draft?
