# %% [markdown]
# # 13. A real model
#
# The models of the other notebooks were made for this repository: small, and trained so that their
# first blocks can draft. SmolLM2-135M-Instruct was not. It is a public chat model, a Llama of 30
# blocks, small enough for any laptop. `make smollm` puts it into `runs/smollm`.
#
# We ask each way to draft the same question: *does alpha exceed c?* First some of the model's own
# layers, then all of them in four bits, then copies of earlier text, then EAGLE, a head that was
# trained for six minutes on a GPU.
#
# > **Measure alpha and c before you write any code. The formula tells you
# > what will fail.**
#
# You need [6, layer skipping](06_layer_skipping.ipynb), [9, trained heads](09_trained_heads.ipynb),
# and of [12](12_close_to_the_machine.ipynb) what four bits keep. About 45 minutes; all cells
# together run for about five of them.

# %%
# %run start.py
MODEL = ROOT / "runs" / "smollm"        # made by `make smollm`
COUNT = 4                               # prompts of each kind
NEW = 40                                # tokens of each answer

# %%
from control import best_gamma, expected_speedup, expected_tokens
from lab.train_heads import ask
from methods.costs import by_weights
from speculative import generate, rounds
from support.texts import read_prompts, read_texts

torch.set_grad_enabled(False)
model, tokenizer = checkpoint.load(MODEL, dtype=torch.float32)
L = model.c.n_layers
costs = by_weights(model.c)


def prompts_of(kind):
    """The first prompts of a kind in the model's chat template, as ids."""
    questions = read_texts(ROOT / "lab" / "prompts" / f"{kind}.jsonl", "prompt", "\n")
    return ask(MODEL, tokenizer, questions[:COUNT])


def mean(values):
    """(mean, its standard error)"""
    values = torch.tensor(values, dtype=torch.float64)
    return float(values.mean()), float(values.std() / len(values) ** 0.5)


chat = prompts_of("chat")
answers, passes = generate(model, chat, NEW, eos=model.c.eos)
print(tokenizer.decode(answers[0]), "...")
print(f"\n{len(answers)} answers, {sum(map(len, answers))} tokens, "
      f"written side by side in {passes} passes")

# %% [markdown]
# ## Leaving early
#
# An exit after block E drafts what the output head says there. One pass over an answer shows what
# *every* exit would have drafted, and so how often each of them is right. *Alpha* is, as everywhere
# here, how often the first token of a draft is accepted.
#
# **Predict:** after how many of the 30 blocks does the head agree with the whole model on half of
# the tokens?

# %%
from layerskip import early_exit
from search import Teacher


def teachers_of(model, prompts, texts):
    """[(a Teacher, the places whose next token was written)]"""
    return [(Teacher(model, ids + text), slice(len(ids) - 1, -1))
            for ids, text in zip(prompts, texts, strict=True)]


def alpha_of(teachers, sublayers):
    """(alpha of a draft with these sub-layers, its standard error over the texts)"""
    return mean([float(teacher.acceptance(sublayers)[places].mean())
                 for teacher, places in teachers])


def exits(model, teachers):
    """[(c, alpha, its standard error)] of all exits."""
    costs = by_weights(model.c)
    L = model.c.n_layers
    drafts = [early_exit(L, e) for e in range(1, L)]
    return [(costs.draft(draft).start, *alpha_of(teachers, draft)) for draft in drafts]


teachers = teachers_of(model, chat, answers)
real = exits(model, teachers)
first = next(e for e, (_, alpha, _) in enumerate(real, 1) if alpha >= 0.5)
print(f"after {first} of {L} blocks; a token that they draft costs {real[first - 1][0]:.2f} passes")

# %% [markdown]
# A drafted token must gain more than it costs: alpha > c. Here are all exits of this model,
# compared with the exits of `stories-llama`, which LayerSkip's recipe trained to be left early. The
# bands are two standard errors wide on each side.

# %% tags=["gallery"] jupyter={"source_hidden": true}
ours, words = checkpoint.load(ROOT / "weights" / "stories-llama", dtype=torch.float32)
openings = [checkpoint.encode(words, line["prompt"], ours.c.bos)
            for line in read_prompts("stories")[:COUNT]]
stories, _ = generate(ours, openings, NEW, eos=ours.c.eos)
trained = exits(ours, teachers_of(ours, openings, stories))
figure, ((side,),) = plots.axes(1, 1, width=6.5, height=4)
both = ((trained, "stories-llama, trained to be left early", plots.HUES[0], "o"),
        (real, "SmolLM2-135M, not trained for it", plots.HUES[1], "s"))
for points, name, hue, mark in both:
    c, alpha, error = (torch.tensor(column) for column in zip(*points, strict=True))
    side.plot(c, alpha, marker=mark, ms=4, color=hue, label=name)
    side.fill_between(c, alpha - 2 * error, alpha + 2 * error, color=hue, alpha=0.2, lw=0)
side.plot([0, 1], [0, 1], "--", color=plots.HUES[-1], lw=1)
side.text(0.46, 0.49, "above this line a draft pays", color=plots.HUES[-1], rotation=33)
side.set(xlabel="c, cost of a drafted token by weights", ylabel="alpha", xlim=(0, 1.02),
         ylim=(0, 1.02), title="every exit of both models")
side.legend(frameon=False, loc="upper left", fontsize=9)
assert all(alpha + 2 * error < c for c, alpha, error in real)
assert all(alpha > c for c, alpha, _ in trained[: ours.c.n_layers // 2])
figure

# %% [markdown]
# SmolLM2 lies below the line everywhere. In its first blocks it computes something that the output
# head cannot read yet, and nothing in its training asked for states that the head can read.
# LayerSkip's recipe asks each exit for the right token, so that the head can read what the blocks
# below it know.
#
# ## Skipping layers
#
# Perhaps some sub-layer in the middle does little. We leave out each of the 60 alone. Two of the
# answers are for choosing what to leave out, the others for scoring the choice (notebook 7).

# %%
every = [*range(2 * L)]
choosing = teachers[:2]
scoring = teachers[2:]
alone = [alpha_of(choosing, every[:i] + every[i + 1 :])[0] for i in every]

# %% jupyter={"source_hidden": true}
figure, ((side,),) = plots.axes(1, 1, width=9, height=3)
for kind, name, hue in ((0, "attention", plots.HUES[0]), (1, "MLP", plots.HUES[1])):
    at = [i // 2 + 0.4 * kind - 0.2 for i in every[kind::2]]
    side.bar(at, alone[kind::2], 0.4, color=hue, label=name)
side.set(xlabel="block", ylabel="alpha", ylim=(0, 1.2),
         title="alpha when one sub-layer is left out")
side.set_xticks(range(0, L, 5))
side.set_yticks([0, 0.5, 1])
side.legend(frameon=False, ncols=2, loc="upper right")
assert min(alone) == alone[1], "the first MLP is missed most"
figure

# %% [markdown]
# The first MLP, by far. Most of the others can go alone, but none saves more than two per cent of a
# pass, and the losses add up. So leave out the least important one, then the two least important,
# and so on.

# %%
assert max(costs.attention, costs.mlp) < 0.02
order = sorted(every, key=lambda i: -alone[i])
row = []
for count in (1, 2, 4, 8, 12, 16, 24):
    left = sorted(set(every) - set(order[:count]))
    alpha, error = alpha_of(scoring, left)
    c = costs.draft(left).start
    row.append(max(expected_speedup(alpha, gamma, c) for gamma in range(1, 17)))
    print(f"{count:2} of {2 * L} left out: alpha {alpha:.2f} ± {error:.2f}, c {c:.2f}, "
          f"at best {row[-1]:.2f} times plain decoding")
assert max(row) < 1.02
limit = expected_speedup(1.0, 1, 0.9), expected_speedup(1.0, 16, 0.9), 1 / 0.9
once, often, never = limit
print(f"c 0.9 and always right: {once:.2f} with gamma 1, {often:.2f} with gamma 16, "
      f"at most {never:.2f}")

# %% [markdown]
# None of these sets gains even two per cent. (The ± is the standard error over two answers:
# neighbouring lines cannot be told apart.) At cost c per token no
# draft gains more than 1/c, however long and however right. To gain, a skip set has to leave out
# *much* and stay right, and here it does not.
#
# **Try it:** leave out whole blocks instead, the least important ones first: sort the blocks by the
# sum of the two bars. Does any number of them gain?
#
# <details><summary>Answer</summary>
# No. With a few blocks left out, alpha is about c, and there is hardly anything to gain; with many
# it is far below.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
blocks = sorted(range(L), key=lambda b: -alone[2 * b] - alone[2 * b + 1])
for count in (1, 2, 4, 8, 16):
    left = [i for i in every if i // 2 not in blocks[:count]]
    alpha, error = alpha_of(scoring, left)
    c = costs.draft(left).start
    most = max(expected_speedup(alpha, gamma, c) for gamma in range(1, 17))
    print(f"{count:2} of {L} blocks left out: alpha {alpha:.2f} ± {error:.2f}, c {c:.2f}, "
          f"at best {most:.2f}")
    assert most < 1.03

# %% [markdown]
# ## The model itself, in four bits
#
# A skip set stays right only if it keeps nearly all. So keep *all* sub-layers, and store their
# weights in fewer bits ([notebook 12](12_close_to_the_machine.ipynb)). Such a copy is so close to
# the model that it needs no cache of its own: it reads the model's keys and values and writes rough
# ones for the tokens that it drafts. The pass that verifies them overwrites these.
#
# Suppose the copy is always right. Then a round writes $\gamma + 1$ tokens for $\gamma c + 1$
# passes:
#
# $$\text{speed-up} \le \frac{\gamma + 1}{\gamma c + 1}
# = \frac{1}{c + \frac{1 - c}{\gamma + 1}} < \frac{1}{c}$$
#
# A longer draft only makes the fraction in the denominator smaller: the c stays. And 1/c is the
# speed of the copy writing alone. Where a pass waits for bytes, c is a ratio of bytes. In int4 a
# weight takes 5 bits: 4, and its part of the two numbers that its group of 32 shares.
#
# **Predict:** what is c in int4, and in int8, if the model is in bfloat16? How much can each gain
# at most with 1, 3 and 8 tokens per draft?

# %%
from layerskip import SelfDraft
from machine.quant import quantise
from methods.costs import by_bytes

half, _ = checkpoint.load(MODEL, dtype=torch.bfloat16)
twins = {kind: quantise(half, kind, head=kind, rounds=True) for kind in ("int8", "int4")}
shares = {kind: by_bytes(twin).unit / by_bytes(half).unit for kind, twin in twins.items()}
for kind, cost in shares.items():
    most = {gamma: expected_speedup(1.0, gamma, cost) for gamma in (1, 3, 8)}
    for gamma, gain in most.items():
        assert abs(1 / (cost + (1 - cost) / (gamma + 1)) - gain) < 1e-9
    listed = ", ".join(f"{gain:.2f} with {gamma}" for gamma, gain in most.items())
    print(f"{kind}: c {cost:.3f}; at most {listed}; {1 / cost:.2f} with an endless draft")
assert 0.3 < shares["int4"] < 0.34, "about a third of a pass"

# %% [markdown]
# Now let both copies draft the answers to three of our questions.
#
# **Predict:** alpha will not be quite 1. Which copy gains more: the one that is more often right,
# or the one that reads less? And which of the drafts of 1, 3 and 8 tokens is best for it?

# %% jupyter={"source_hidden": true}
import time

from support.stats import Counts, Stopwatch

GAMMAS = 1, 3, 8
drafters = {"plain": None} | {(kind, gamma): SelfDraft(twin, every, gamma)
                              for kind, twin in twins.items() for gamma in GAMMAS}
happened = {name: Counts() for name in drafters}
seconds = dict.fromkeys(drafters, 0.0)
generate(half, [chat[0]], 4, drafters["int4", 3])               # warms up
for ids in chat[:3]:
    for name, drafter in drafters.items():                      # they take turns
        watch = Stopwatch(drafter)
        for _, r in rounds(half, [ids], NEW, watch, eos=model.c.eos):
            happened[name].add(r)
        seconds[name] += time.perf_counter() - watch.now        # since the question was read
steps = {name: counts.proposed / counts.turns                   # the last draft is cut
         for name, counts in happened.items()}
gains = {}
for kind, gamma in [*drafters][1:]:
    counts = happened[kind, gamma]
    gains[kind, gamma] = counts.tau / (steps[kind, gamma] * shares[kind] + 1)
    print(f"{kind}, gamma {gamma}: alpha {counts.alpha:.2f}, {counts.tau:.2f} tokens per pass, "
          f"speed-up by bytes {gains[kind, gamma]:.2f}")
assert max(gains, key=gains.get)[0] == "int4"

# %% [markdown]
# By the clock a step of the copy need not cost its share of the bytes: attention works with the
# same keys as before, and each operation is launched as before. A block of tokens also costs more
# than one token. We measure both, put them into the formula, and compare with the clock of the runs
# above.

# %% jupyter={"source_hidden": true}
from functools import partial

from kvcache import KVCache, prefill
from model import Placement
from support.measure import interleave, measure_step

n = len(chat[0])
cache = KVCache(half.c, 1, n + 16, half.attention_dtype(), half.tok.device)
line = torch.tensor([chat[0] + answers[0][:16]], device=half.tok.device)
prefill(half, line[:, :n], cache)


def block(T):
    """A pass of the model over T tokens after the question."""
    at = Placement.span(n, n + T, line.device)
    half.unembed(half.run(half.embed(line[:, n : n + T]), at, cache))


passes = interleave({T: partial(block, T) for T in (1, *(gamma + 1 for gamma in GAMMAS))}, 10)
by_clock = {kind: measure_step(half, twin, context=n) for kind, twin in twins.items()}
rates = {name: counts.tokens / seconds[name] for name, counts in happened.items()}
clock = {name: rates[name] / rates["plain"] for name in gains}
for (kind, gamma), measured in clock.items():
    verifying = passes[gamma + 1] / passes[1]
    promised = happened[kind, gamma].tau / (steps[kind, gamma] * by_clock[kind] + verifying)
    print(f"{kind}, gamma {gamma}: c {by_clock[kind]:.2f} and block {verifying:.2f} by the clock; "
          f"promised {promised:.2f}, measured {measured:.2f} times plain decoding")
print("by the clock the best is {}, gamma {}".format(*max(clock, key=clock.get)))

# %% jupyter={"source_hidden": true}
figure, (sides,) = plots.axes(1, 2, width=4.8, height=3.4)
lengths = range(1, max(GAMMAS) + 1)
for side, (kind, cost) in zip(sides, shares.items(), strict=True):
    alpha = sum(happened[kind, gamma].hits for gamma in GAMMAS)
    alpha /= sum(happened[kind, gamma].drafted for gamma in GAMMAS)
    assert kind == "int8" or best_gamma(alpha, cost) in (3, 4, 5)
    side.plot(lengths, [expected_speedup(1.0, gamma, cost) for gamma in lengths], "--",
              color=plots.HUES[-1], label="by bytes, if always right")
    side.plot(lengths, [expected_speedup(alpha, gamma, cost) for gamma in lengths],
              color=plots.HUES[0], label=f"by bytes, alpha {alpha:.2f}")
    side.plot(GAMMAS, [gains[kind, gamma] for gamma in GAMMAS], "o", color=plots.HUES[0],
              label="by bytes, tokens as counted")
    side.plot(GAMMAS, [clock[kind, gamma] for gamma in GAMMAS], "D", color=plots.HUES[1],
              label="by the clock here")
    side.axhline(1, color="#404040", lw=0.8)
    side.set(xlabel="gamma", title=f"{kind}, c = {cost:.2f} by bytes", ylim=(0.5, 3.6))
    side.legend(frameon=False, fontsize=9, loc="upper left")
sides[0].set_ylabel("times plain decoding")
figure

# %% [markdown]
# By bytes the copy in four bits gains more, although it errs more often: alpha is high either way,
# so c decides. Its curve is flat from three to five tokens, and then it falls: the verifying pass
# is already shared by many, and longer drafts are seldom accepted whole. `--draft int4` drafts
# three.
#
# By the clock both gain less, and the formula predicts it, given what steps and blocks cost here.
# These passes are eager, so launches count, and the copy with fewer bytes need not be the faster
# one.
#
# This *flatters* int4: the weights in our file had been through four bits once, and a second
# rounding to a similar grid loses less. And in seconds int4 gains only where a product reads the
# quantised weights directly, as the loop of [notebook 12](12_close_to_the_machine.ipynb) does on a
# CPU. [BENCHMARKS](../lab/BENCHMARKS.md#the-quantised-model-as-its-own-draft) has all five kinds of
# text, in fast passes.
#
# **Try it:** draft with the first half of the blocks in int4:
# `SelfDraft(twins["int4"], every[:L], 1)`. What falls more, c or alpha?
#
# <details><summary>Answer</summary>
# Alpha. Half of the blocks cost a bit over half. But the output head cannot read what they leave,
# and that has nothing to do with the bits.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
found = Counts()
for _, r in rounds(half, chat[:3], NEW, SelfDraft(twins["int4"], every[:L], 1), eos=model.c.eos):
    found.add(r)
few = by_bytes(twins["int4"])
c = few.draft(every[:L]).start * few.unit / by_bytes(half).unit
assert found.alpha < c and c > 0.5 * shares["int4"]
print(f"c {c:.2f} instead of {shares['int4']:.2f}, alpha {found.alpha:.2f} instead of "
      f"{happened['int4', 1].alpha:.2f}")

# %% [markdown]
# ## Copying
#
# *Suffix decoding* ([notebook 4](04_speculative_decoding.ipynb)) trains nothing and runs nothing:
# it looks for the last tokens earlier in the text, prompt included, and copies what followed there.
# Its c is 0. So any alpha pays, if a pass over several tokens costs no more than a pass over one.
#
# **Predict:** on which of five kinds of text will it bring most: chat, summaries of a text in the
# prompt, small edits of code in the prompt, maths, translation?

# %%
from methods.lookup import Suffix

KINDS = "chat", "summaries", "code_edits", "maths", "translation"
questions = {kind: prompts_of(kind) for kind in KINDS}


def measure(drafter):
    """{kind: (alpha, its standard error, tau)}, and for each place in a draft [tested, accepted].
    The prompts of a kind are one batch: that saves time, and does not change acceptance."""
    found = {}
    places = {}
    for kind in KINDS:
        total = Counts()
        tested = torch.zeros(len(questions[kind]))              # per prompt: drafts tested
        hits = torch.zeros(len(questions[kind]))                # those whose first token passed
        for _, r in rounds(model, questions[kind], NEW, drafter, eos=model.c.eos):
            total.add(r)
            tested += r.proposed.cpu() > 0
            hits += r.accepted.cpu() > 0
            for proposed, accepted in zip(r.proposed.tolist(), r.accepted.tolist(), strict=True):
                for k in range(min(accepted + 1, proposed)):
                    seen = places.setdefault(k, [0, 0])
                    seen[0] += 1
                    seen[1] += k < accepted
        found[kind] = total.alpha, mean((hits / tested.clamp(min=1)).tolist())[1], total.tau
        print(f"{kind:12} alpha {total.alpha:.2f} ± {found[kind][1]:.2f}, tau {total.tau:.2f}")
    return found, places


copied, _ = measure(Suffix(7))
by_tau = sorted(KINDS, key=lambda kind: copied[kind][2])
assert by_tau[0] == "chat" and by_tau[-2:] == ["translation", "code_edits"]

# %% [markdown]
# The ± is the standard error over the prompts: four of each kind are few.
#
# Copying gains where the answer repeats the prompt, most on edits of code, and little on chat.
# Copying drafts only where it finds a copy, so the formula cannot compute tau from this alpha.
#
# ## What a head costs
#
# On chat the copy in four bits gains, but each of its tokens costs a third of a pass. A draft that
# is far cheaper has to learn what the model says. EAGLE's head is one block. Ours reads the next
# token and a mix of three states of the target, after 7, 15 and all 30 blocks. (The mix is
# EAGLE-3's, arXiv 2503.01840.) It has few weights of its own. But then comes the output head.

# %% jupyter={"source_hidden": true}
from methods import heads

eagle = heads.load(MODEL / "heads" / "eagle", model)
head_share = costs.head
own = eagle.per_token() / costs.unit
vocab = set(eagle.own.ids.tolist())
print(f"of a pass, the blocks are {1 - head_share:.0%}, the output head {head_share:.0%}: "
      f"as much as {costs.head / (costs.attention + costs.mlp):.0f} blocks; "
      f"EAGLE's own weights would be {own:.0%}")
print(f"c with the whole output head {head_share + own:.2f}, "
      f"with {len(vocab):,} of its {model.c.vocab_size:,} tokens {heads.drafting(eagle).start:.2f}")
assert [1 + tap // 2 for tap in eagle.taps] == [7, 15, 30]

# %% [markdown]
# So the head drafts only tokens that occur often: a *short head* (FR-Spec, arXiv 2502.14856). The
# text stays exact, since a token with q = 0 is never drafted, and the target still knows all of
# them.
#
# ## What the head has learnt
#
# It learnt from answers of the model itself, none of them to the prompts used here ([its
# card](../weights/smollm/heads/eagle/README.md)). The colours below show where
# each token came from.

# %%
from IPython.display import HTML, display

seen = plots.record(model, tokenizer, [chat[0]], NEW, eagle.drafter(2))
display(HTML(plots.text_html(seen)))
assert [t.id for t in seen.rows[0]] == answers[0], "the text of plain decoding"

# %% [markdown]
# Plain decoding writes the same text, token for token.
#
# **Predict:** on which kind will this head be right most often, on which least? (Its short head was
# chosen from English answers.)

# %%
GAMMA = 2
drafted, places = measure(eagle.drafter(GAMMA))
print("by alpha:", " < ".join(sorted(KINDS, key=lambda kind: drafted[kind][0])))
for k, (tested, accepted) in places.items():
    print(f"place {k + 1}: {accepted} of {tested} tested tokens accepted, {accepted / tested:.2f}")

# %% jupyter={"source_hidden": true}
c = heads.drafting(eagle).start
figure, (sides,) = plots.axes(1, 2, width=4.8, height=3.2)
for k, (name, found) in enumerate((("suffix decoding", copied), ("EAGLE", drafted))):
    at = [i + 0.4 * k - 0.2 for i in range(len(KINDS))]
    alpha, error, tau = zip(*found.values(), strict=True)
    sides[0].bar(at, alpha, 0.4, yerr=[2 * e for e in error], color=plots.HUES[k], label=name)
    sides[1].bar(at, tau, 0.4, color=plots.HUES[k])
sides[0].axhline(c, color=plots.HUES[1], ls=":")
sides[1].axhline(1, color=plots.HUES[-1], ls="--", lw=1)
sides[0].set(ylabel="alpha, with two standard errors", ylim=(0, 1.2),
             yticks=[0, 0.25, 0.5, 0.75, 1], title="dotted: EAGLE's c")
sides[1].set(ylabel="tau", title="dashed: plain decoding")
sides[0].legend(frameon=False, loc="upper left", ncols=2, fontsize=9)
for side in sides:
    side.set_xticks(range(len(KINDS)), KINDS, rotation=20)
assert all(alpha - 2 * error > c for alpha, error, _ in drafted.values())
figure

# %% [markdown]
# Alpha is far above c everywhere. The order is not certain: bars that overlap could change places
# with other prompts.
#
# ## A smaller sibling
#
# The classic draft is a smaller model of the same family. It brings its own weights and its own
# cache. SmolLM2-135M is the smallest of its family, so here is a larger pair, Qwen2.5-Coder-1.5B
# and its sister of 0.5B. These weights are too large for this page, so the table shows a stored
# run: one prompt of each kind, greedily, three tokens per draft. v is what the verifying pass
# costs, in passes over one token.
#
# **Predict:** the draft has a third of the target's weights. How often must it be right to pay?

# %% jupyter={"source_hidden": true}
from IPython.display import Markdown
from lab.figures import stored

pair = stored("qwen-run")["T 0"]
lines = ["| draft | kind | alpha | of tested | c | v | by the formula | measured |",
         "|---" * 8 + "|"]
for way in ("small model, gamma 3", "small model in int4, gamma 3", "int4, gamma 3"):
    for kind, one in pair[way].items():
        figures = (one[key] for key in ("alpha", "tested", "c", "block", "predicted", "ratio"))
        lines.append(f"| {way} | {kind} | {' | '.join(f'{figure:.2f}' for figure in figures)} |")
Markdown("\n".join(lines))

# %% [markdown]
# A round of gamma tokens costs gamma c + v. With v = 1 the first token pays where alpha > c. Where
# a block costs more than a token, the draft also has to earn v - 1, and a row of this table whose
# alpha is far above its c can still lose. c is measured in seconds here, and can be larger than the
# ratio of the weights. [BENCHMARKS](../lab/BENCHMARKS.md#a-real-pair) has the means of this run and
# a second one, and what `auto` gains.
#
# ## When to turn it off
#
# By weights a pass over several tokens costs what a pass over one does. By the clock it costs more,
# and on many processors much more.
#
# **Predict:** if a block of tokens costs twice a single one, which drafts of EAGLE still pay?

# %%
for block in (1.0, 1.2, 1.6, 2.0):
    def cost(T, block=block):
        """A block of two or more tokens costs this much."""
        return block if T > 1 else 1.0

    best = {kind: best_gamma(alpha, c, pass_cost=cost) for kind, (alpha, *_) in drafted.items()}
    listed = []
    for kind, gamma in best.items():
        gain = expected_speedup(drafted[kind][0], gamma, c, cost(gamma + 1))
        listed.append(f"{kind} {gain:.2f} (gamma {gamma})")
    print(f"block {block}:", ", ".join(listed))
assert GAMMA != 2 or [kind for kind, gamma in best.items() if gamma] == ["code_edits"]

# %% [markdown]
# At twice the cost hardly any do. Only code edits gain, by little, and there the formula is
# optimistic (question 4). Where nothing brings more than 1.00, `best_gamma` returns 0: draft
# nothing. `generate.py --draft auto` decides this while it writes. See [notebook
# 11](11_pace.ipynb).
#
# ## One table
#
# All ways in turn on the same questions, in one call per pass (`--fast`, [notebook
# 12](12_close_to_the_machine.ipynb)): how often the first drafted token is right, what a drafted
# token and the verifying pass cost by the clock, what the formula makes of these three, and what
# the clock says. A row pays where the last column is above 1.

# %% jupyter={"source_hidden": true}
from lab.bench import real as bench
from machine.exact import fast
from sampling import to_probs

quick = fast(half)
copies = {kind: quantise(half, kind, head="int8", rounds=True) for kind in ("int8", "int4")}
ways = {"plain": None,
        f"exit {L // 2}, gamma 1": SelfDraft(quick, early_exit(L, L // 2), 1),
        "int8, gamma 3": SelfDraft(quick.alongside(copies["int8"]), every, 3),
        "int4, gamma 3": SelfDraft(quick.alongside(copies["int4"]), every, 3),
        "suffix, up to 7": Suffix(7),
        "EAGLE, gamma 2": heads.load(MODEL / "heads" / "eagle", quick).drafter(2)}
begin = {name: lambda drafter=drafter: partial(bench.write, quick, drafter, to_probs)
         for name, drafter in ways.items()}
bench.measure(begin, chat[:1], 8, 1)                            # warms up
samples = bench.measure(begin, [*chat[:2], *questions["code_edits"][:2]], NEW, 2)
lines = ["| way | alpha | c | v | by the formula | by the clock |", "|---" * 6 + "|"]
for name in [*ways][1:]:
    one = bench.row(samples[name], samples["plain"])
    sizes = [n for some in samples[name] for sample in some for _, n in sample.rounds]
    formula = sum(expected_tokens(one["alpha"], n) for n in sizes)
    formula /= sum(sizes) * one["c"] + len(sizes) * one["block"]
    lines.append(f"| {name} | {one['alpha']:.2f} | {one['c']:.2f} | {one['block']:.2f} | "
                 f"{formula:.2f} | {one['ratio']:.2f} |")
Markdown("\n".join(lines))

# %% [markdown]
# (Two questions of chat and two code edits, the means of two runs. The exit's v is below 1, because
# its verifying pass runs only the blocks above the exit. The formula takes one alpha for
# all places and all rounds, which fits a copy of the model and fits lookup badly: lookup drafts
# only where it finds something.)
#
# ## Questions
#
# Each answer is folded, and so is the cell below it that checks the answer.
#
# **1.** Would an exit of SmolLM2 gain if the output head cost a drafted token nothing?
#
# <details><summary>Answer</summary>
# Hardly. An exit after one block would cost 0.03 passes, and its alpha is hardly higher than that.
# No exit would gain more than a few per cent.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
free = [(costs.draft(range(2 * e), share=0.0).start, *real[e - 1][1:]) for e in range(1, L)]
gains = [expected_speedup(alpha, 1, cheap) for cheap, alpha, _ in free]
assert round(free[0][0], 2) == 0.03 and max(gains) < 1.06
print("exit 1: c {:.3f}, alpha {:.3f} ± {:.3f},".format(*free[0]), f"speed {gains[0]:.3f}")
print(f"the best, exit {1 + gains.index(max(gains))}: speed {max(gains):.3f}")

# %% [markdown]
# **2.** A block of tokens costs 1.2 single ones. How high must the alpha of copies be, if one token
# is copied per round?
#
# <details><summary>Answer</summary>
# Above 0.2: the round writes 1 + alpha tokens for 1.2 passes. Copies are free, their verification
# is not.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
assert expected_speedup(0.19, 1, 0.0, 1.2) < 1 < expected_speedup(0.21, 1, 0.0, 1.2)
print({alpha: round(expected_speedup(alpha, 1, 0.0, 1.2), 3) for alpha in (0.19, 0.2, 0.21)})

# %% [markdown]
# **3.** The short head knows a twelfth of the vocabulary. Which tokens can the text not contain?
#
# <details><summary>Answer</summary>
# It can contain all of them: the target writes the others itself, as a correction or after a draft
# that was accepted whole.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
rare = [t for t in seen.rows[0] if t.id not in vocab]
assert rare and all(t.origin != "accepted" for t in rare)
assert 11 < model.c.vocab_size / len(vocab) < 13
print(len(rare), "of", len(seen.rows[0]), "tokens were never drafted:", [t.text for t in rare])

# %% [markdown]
# **4.** The formula takes acceptances to be independent, with one alpha. Is what it says of tau
# right?
#
# <details><summary>Answer</summary>
# Nearly, at gamma 2. Two errors work against each other. EAGLE's second token reads its own output
# instead of the target's states, and is right less often. But acceptances come in groups: where a
# text is easy, the next token is often easy as well.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
for kind, (alpha, _, tau) in drafted.items():
    promised = expected_tokens(alpha, GAMMA)
    print(f"{kind:12} formula {promised:.2f}, measured {tau:.2f}")
    assert GAMMA > 2 or abs(promised - tau) < 0.3

# %% [markdown]
# **5.** Suppose the model itself is served in int4. What does a draft by its copy in int4 gain? And
# how often must a copy in two bits be right, if it reads half as much?
#
# <details><summary>Answer</summary>
# Nothing: c is 1. At half the bytes c is 0.5, so a gain needs an alpha above 0.5, and even a copy
# that is always right gains no more than 1.6 with three tokens.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
assert expected_speedup(1.0, 3, 1.0) == 1 and round(expected_speedup(1.0, 3, 0.5), 2) == 1.6
for alpha in (0.5, 0.9, 1.0):
    gain = expected_speedup(alpha, 3, 0.5)
    print(f"c 0.5, gamma 3, alpha {alpha}: {gain:.2f} times plain decoding")

# %% [markdown]
# More ideas, rebuilt small, with their results: [the lab](../lab/notebooks/beyond.ipynb).
