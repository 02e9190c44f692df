# %% [markdown]
# # 11. A real model
#
# The models of the other notebooks were made for this repository: small, and trained so that their first
# blocks can draft. This one was not. SmolLM2-135M-Instruct is a public chat model, a Llama of 30 blocks,
# small enough for any laptop. `make smollm` puts it into `runs/smollm`.
#
# We ask of each way to draft the same question: *does alpha exceed c?* First of those that need no
# training, which fail, then of one that has learnt for six minutes on a GPU.
#
# > **Measure alpha and c before you write any code. The formula tells you
# > what will fail.**
#
# Before it: [5, layer skipping](05_layer_skipping.ipynb), and [8, trained heads](08_trained_heads.ipynb).
# About 30 minutes.

# %%
# %run start.py
MODEL = ROOT / "runs" / "smollm"        # made by `make smollm`

# %%
from control import best_gamma, expected_speedup, weight_costs
from speculative import generate, rounds
from support.chat import read_template

torch.set_grad_enabled(False)
model, tokenizer = checkpoint.load(MODEL, dtype=torch.float32)
L, costs, render = model.c.n_layers, weight_costs(model.c), read_template(MODEL)

def ask(question):
    """The question in the model's chat template, as ids."""
    return checkpoint.encode(tokenizer, render([{"role": "user", "content": question}]), special=False)

prompt = ask("How do bees make honey?")
(answer,), passes = generate(model, [prompt], 80, eos=model.c.eos)
print(tokenizer.decode(answer), f"\n\n{len(answer)} tokens, {passes} passes")

# %% [markdown]
# ## Leaving early
#
# An exit after block E drafts what the output head says there. One pass over the answer shows what
# *every* exit would have drafted, and so how often each of them is right.
#
# **Predict:** after how many of the 30 blocks does the head agree with the whole model on half of the
# tokens?

# %%
from layerskip import early_exit
from search import Teacher

def exits(model, ids, first):
    """[(c, alpha)] of all exits, on the tokens from place `first` on."""
    teacher, costs, L = Teacher(model, ids), weight_costs(model.c), model.c.n_layers
    return [(costs.step(early_exit(L, e)), float(teacher.acceptance(early_exit(L, e))[first:].mean()))
            for e in range(1, L)]

real = exits(model, prompt + answer, len(prompt) - 1)
half = next(e for e, (_, alpha) in enumerate(real, 1) if alpha >= 0.5)
print(f"after {half} of {L} blocks; a draft of them costs {real[half - 1][0]:.2f} passes")

# %% [markdown]
# A drafted token has to cost less than it brings: alpha > c. Here are all exits of this model beside
# those of `stories-llama`, which LayerSkip's recipe trained to be left early.

# %% tags=["gallery"] jupyter={"source_hidden": true}
from support.files import read_prompts

ours, words = checkpoint.load(ROOT / "weights" / "stories-llama", dtype=torch.float32)
story = checkpoint.encode(words, read_prompts("stories")[1]["prompt"], ours.c.bos)
(told,), _ = generate(ours, [story], 80, eos=ours.c.eos)
trained = exits(ours, story + told, len(story) - 1)
figure, ((side,),) = plots.axes(1, 1, width=6.5, height=4)
for points, name, hue in ((real, "SmolLM2-135M", plots.HUES[1]), (trained, "stories-llama", plots.HUES[0])):
    side.plot(*zip(*points, strict=True), "o-", ms=4, color=hue, label=name)
side.plot([0, 1], [0, 1], "--", color=plots.HUES[-1], lw=1)
side.text(0.62, 0.55, "alpha = c", color=plots.HUES[-1], rotation=33)
side.set(xlabel="c, cost of a drafted token by weights", ylabel="alpha", xlim=(0, 1.02), ylim=(0, 1.02),
         title="every exit of both models")
side.legend(frameon=False)
figure

# %% [markdown]
# SmolLM2 lies below the line everywhere. In its first blocks it computes something that the
# output head cannot read yet. Nothing during its training asked for that. The trained model lies far
# above the line at its first exits: its recipe showed each exit the labels, so that the head can read
# what those blocks know.
#
# Can SmolLM2 be taught? Half an hour of that recipe on two processor cores, over 299,000 tokens of its own
# answers, took exit 4 from an alpha of 0.04 to 0.28, on answers that it had not seen. From about as many
# tokens EAGLE, which you will meet below, learnt 0.46, and it leaves the model as it was.
# ([BENCHMARKS](../lab/BENCHMARKS.md#a-real-model) has the command.)
#
# The formula says what the best exit of SmolLM2 as it is would bring.

# %%
gains = [expected_speedup(alpha, max(1, best_gamma(alpha, c)), c) for c, alpha in real]
gain, e = max(gains), 1 + gains.index(max(gains))
print(f"the best exit, {e}: {gain:.2f} times plain decoding, before any overhead")

# %% [markdown]
# ## Skipping layers
#
# Perhaps some sub-layer in the middle does little. We leave out each of the 60 alone, and see how often
# the rest still agrees.

# %%
teacher, first, every = Teacher(model, prompt + answer), len(prompt) - 1, [*range(2 * L)]
alone = [float(teacher.acceptance(every[:i] + every[i + 1 :])[first:].mean()) for i in every]

# %% jupyter={"source_hidden": true}
figure, ((side,),) = plots.axes(1, 1, width=9, height=3)
for kind, name, hue in ((0, "attention", plots.HUES[0]), (1, "MLP", plots.HUES[1])):
    side.bar([i // 2 + 0.4 * kind for i in every[kind::2]], alone[kind::2], 0.4, color=hue, label=name)
side.set(xlabel="block", ylabel="alpha", ylim=(0, 1.15), title="alpha when one sub-layer is left out")
side.legend(frameon=False, ncols=2, loc="upper right")
figure

# %% [markdown]
# Most of them can go alone. But each saves only about one sixtieth of a pass, and the losses add up:
# leave out the least important first, then also the second, and so on.

# %%
order, row = sorted(every, key=lambda i: -alone[i]), []
for count in (1, 2, 4, 8, 12, 16, 24):
    left = sorted(set(every) - set(order[:count]))
    alpha, c = float(teacher.acceptance(left)[first:].mean()), costs.step(left)
    row.append((count, alpha, c, expected_speedup(alpha, 1, c)))
    print(f"{count:2} of {2 * L} left out: alpha {alpha:.2f}, c {c:.2f}, speed {row[-1][3]:.2f}")
assert max(speed for *_, speed in row) < 1.1

# %% [markdown]
# A draft that costs 0.9 passes can only bring 1.05 times the speed, even if it is always right. (Why?
# With gamma 1, two tokens for 1.9 passes.) To gain, a skip set has to leave out *much* and stay right,
# and here it does not.
#
# ## What a head costs
#
# So something new has to be trained: EAGLE, one block that reads the next token and a mix of three states,
# after 7, 15 and all 30 blocks. How much does a drafted token cost? The block has a thirtieth of the trunk's
# weights. But then comes the output head.

# %%
head_share = costs.head / costs.whole
print(f"blocks {1 - head_share:.0%} of a pass, output head {head_share:.0%}: {model.c.vocab_size:,} rows")

# %% [markdown]
# With 49,152 tokens the output head weighs as much as eight blocks. A *short head* drafts only the
# tokens that occur often. It stays exact, since a token with q = 0 is never drafted, and the target
# still knows all of them.

# %%
from methods import heads

eagle = heads.load(MODEL / "heads" / "eagle", model)
vocab = eagle.own.ids.tolist()
print(f"c with the whole head {head_share + eagle.step.weights / costs.whole:.2f}, "
      f"with {len(vocab):,} tokens {heads.pricing(eagle)(0):.2f}")
print(f"{sum(t in set(vocab) for t in answer) / len(answer):.0%} of this answer's tokens are among them")

# %% [markdown]
# ## What the head has learnt
#
# It was trained on a GPU for six minutes, on answers of the model itself: to some three thousand prompts of
# ours, and to seven thousand questions that the model asked itself. (Give a chat model its template up to
# the place where the user speaks, and it writes what a user might ask.) Here it answers questions that were
# not among ours ([its card](../weights/smollm/heads/eagle/README.md)). Green is drafted and accepted.

# %%
from IPython.display import HTML, display

seen = plots.record(model, tokenizer, [prompt], 80, eagle.drafter(2))
display(HTML(plots.text_html(seen)))
assert [t.id for t in seen.rows[0]] == answer, "the text of plain decoding"

# %% [markdown]
# The text is the same, token for token. **Look** at which tokens were rejected: are they the ones that
# you would have found hard, too?
#
# Now the acceptance rate by place in the draft, on several kinds of text.

# %%
QUESTIONS = {
    "chat": "What should I know before I keep a parrot?",
    "maths": "A train leaves at 9:40 and arrives at 12:15. How long does it take? Show your work.",
    "code": "Write a Python function that returns the longest word of a sentence.",
    "translation": 'Translate into French: "The old man mends his nets while the gulls wait on the pier."'}
GAMMA, found = 4, {}
for kind, question in QUESTIONS.items():
    kept, tested, tokens, count = [0] * GAMMA, [0] * GAMMA, 0, 0
    for _, r in rounds(model, [ask(question)], 64, eagle.drafter(GAMMA), eos=model.c.eos):
        accepted, proposed = int(r.accepted), int(r.proposed)
        tokens, count = tokens + len(r.new[0]), count + 1
        for k in range(min(accepted + 1, proposed)):
            tested[k], kept[k] = tested[k] + 1, kept[k] + (k < accepted)
    found[kind] = sum(kept) / sum(tested)
    places = " / ".join(f"{a / n:.2f}" for a, n in zip(kept, tested, strict=True) if n)
    print(f"{kind:12} alpha {found[kind]:.2f}, by place {places}, tokens per pass {tokens / count:.2f}")

# %% [markdown]
# **Change it:** set GAMMA to 2. What happens to the tokens per pass, and what to alpha? And why is a
# translation so hard for this head? (Its short head was chosen from English answers.)
#
# ## When to turn it off
#
# The formula with the costs by weights, for each kind of text.

# %%
c = heads.pricing(eagle)(0)
for kind, alpha in found.items():
    gamma = best_gamma(alpha, c)
    print(f"{kind:12} best gamma {gamma}: {expected_speedup(alpha, gamma, c):.2f} times plain decoding")

# %% [markdown]
# By the clock it is less: checking a block of three tokens costs more than checking one, on many
# processors much more. With a block that costs twice a token, which of these drafts still pay?

# %%
for block in (1.0, 1.2, 1.6, 2.0):
    def cost(T, block=block):
        """A block of two or more tokens costs this much."""
        return block if T > 1 else 1.0

    best = {kind: best_gamma(alpha, c, pass_cost=cost) for kind, alpha in found.items()}
    print(f"block {block}:", ", ".join(
        f"{kind} {expected_speedup(found[kind], g, c, cost(g + 1)):.2f}" for kind, g in best.items()))

# %% [markdown]
# Where no gamma brings more than 1.00, `best_gamma` returns 0: draft nothing. `generate.py` decides this
# while it writes. Its default, `--draft auto`, weighs lookup and this head before every draft, counts
# what each of them has cost and brought, and stops where nothing pays ([notebook
# 9](09_adapting.ipynb)). What all this brings by the clock stands in
# [BENCHMARKS](../lab/BENCHMARKS.md#a-real-model).

# %% [markdown]
# <details><summary>Questions</summary>
#
# **1.** Would an exit gain if the output head were free? *The exits' c would fall by a fifth of a pass;
# compare with the plot: the first exits' alpha is below 0.1, so no.*
#
# **2.** The head knows its training text far better than new text. Which would help more: more passes
# over the same text, or more text? *More text: what it lacks is what it has never seen.*
#
# **3.** Why may you not train the head on answers of another model? *You may, and it would draft what
# that model would say. Acceptance compares with this one.*
# </details>
