# %% [markdown]
# # 9. Trained heads: small modules that learn to draft
#
# So far a part of the model has drafted. A *head* is a small module that is trained to predict what
# the model will write. (It is neither an attention head nor the output head.) The model itself
# stays frozen. This notebook trains the smallest head there is, shows what five kinds of heads read
# and run, and compares what they draft with what that costs.
#
# > **The target's states hold much of what it will say next. A head reads some that are computed
# > anyway, or runs a few blocks to get them. So it drafts well at a fraction of the cost of a
# > pass.**
#
# You need [6, layer skipping](06_layer_skipping.ipynb), and [8, trees](08_trees.ipynb) for the
# trees near the end. About 40 minutes.

# %%
# %run start.py
MODEL = ROOT / "weights" / "stories-llama"      # or a folder with your own Llama or Gemma-2
SHIPPED = MODEL.name == "stories-llama"         # the text's figures are checked for this model

# %%
from methods.costs import by_weights
from layerskip import SelfDraft
from methods import heads
from methods.base import normed
from methods.eagle import Eagle
from methods.kangaroo import ExitBlock, Kangaroo
from methods.medusa import Medusa
from methods.prophet import Prophet
from search import Teacher
from speculative import rounds
from support.texts import read_prompts

model, tokenizer = checkpoint.load(MODEL, dtype=torch.float32)
model.requires_grad_(False)                                     # the model stays as it is
c = model.c
L = model.c.n_layers
costs = by_weights(model.c)
stories = [checkpoint.encode(tokenizer, line["text"], c.bos)[:256]
           for line in read_prompts("stories")]
print(f"{L} blocks; {len(stories)} stories with {sum(map(len, stories))} tokens "
      "to learn from and to test on")

# %% [markdown]
# ## The smallest head
#
# After its last block, the target has a state x for each token that it has read. The final norm and
# the output head (together `unembed`) turn x into the distribution of the *next* token. *Medusa*
# (arXiv 2401.10774) predicts further tokens from the same state: head k predicts the token k places
# after the next one. Ours adds one matrix W with a residual connection to u, which is x scaled to
# mean square 1 (`unit`):
#
# $$u = \frac{x}{\sqrt{\text{mean}(x^2)}}, \qquad
# \text{logits} = \text{unembed}\big(u + \text{silu}(W u)\big)$$
#
# W starts at zero. (In the paper each head also trains an output matrix of its own, which starts as
# a copy of the output head. We share the model's, as other heads do. That keeps the heads small.)
#
# **Predict:** what does a fresh head predict?

# %%
fresh = Medusa(model, 1)
teacher = Teacher(model, stories[0], lambda logits: logits.softmax(-1))
x = teacher.states[-1]                                          # (1, T, dim): the final states
assert torch.allclose(fresh.after(x, 0, None), model.unembed(normed(x)), atol=1e-3)
print("the fresh head predicts what the output head predicts: the next token, not the one after it")
own = model.c.vocab_size * model.c.dim
print(f"one of our heads has {fresh.count():,} weights; "
      f"with an output matrix of its own {fresh.count() + own:,}")

# %% [markdown]
# Now we train it. The teacher is the model itself: for each place of a text, the target's own
# distribution p *one place later* is what the head should predict. The loss is the probability that
# a token drawn from the head's q is rejected, which is 1 minus the sum of min(p, q) (notebook 4).
# So we train for acceptance directly, at temperature 1. (Medusa's code trains with the
# cross-entropy of the text instead.)
#
# **Predict:** after 200 steps on six short stories, what alpha will the head reach on these six,
# and on two others?

# %%
STEPS = 200
RATE = 3e-3
torch.set_grad_enabled(True)
teachers = [Teacher(model, ids, lambda logits: logits.softmax(-1)) for ids in stories]
pairs = [(t.states[-1][0, :-1].clone(), t.p[0, 1:].clone())     # the state; p one place later
         for t in teachers]
train, test = ([torch.cat(part) for part in zip(*some, strict=True)]
               for some in (pairs[2:], pairs[:2]))


def rejected(head, x, p):
    """How likely a drafted token is rejected, on average over all places x."""
    q = head.after(x[None], 0, None)[0].softmax(-1)
    return 1 - torch.minimum(p, q).sum(-1).mean()


def alphas(head):
    with torch.no_grad():
        return [1 - float(rejected(head, *some)) for some in (train, test)]


head = Medusa(model, 1)
g = torch.Generator().manual_seed(0)
course = []
optimizer = torch.optim.Adam(head.weights.parameters(), RATE)
for step in range(STEPS + 1):
    if step % 20 == 0:
        course.append((step, *alphas(head)))
    some = torch.randperm(len(train[0]), generator=g)[:128]
    loss = rejected(head, train[0][some], train[1][some])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
torch.set_grad_enabled(False)                                   # nothing below trains
_, on_train, on_test = course[-1]
print(f"alpha at temperature 1: on new stories {course[0][2]:.3f}, then {on_test:.3f}, "
      f"{on_test / course[0][2]:.1f} times as much; on those it trained on {on_train:.2f}")
assert on_test > 3 * course[0][2] and on_train > 1.2 * on_test

# %% jupyter={"source_hidden": true}
figure, ((side,),) = plots.axes(1, 1, width=7, height=3)
steps, seen, new = zip(*course, strict=True)
side.plot(steps, seen, color="#808080", ls="--", marker="o",
          label="the six stories that it trains on")
side.plot(steps, new, color=plots.HUES[0], marker="o", label="two new stories")
side.set(xlabel="training steps", ylabel="alpha at temperature 1", ylim=(0, None))
side.legend(frameon=False)
figure

# %% [markdown]
# One matrix, trained for a few seconds, raises alpha several times over. The gap between the curves
# is overfitting: six stories are far too little text. `lab/train_heads.py` trains on much more, and
# it trained the heads that come with the shipped weights.
#
# **Try it:** set `STEPS = 400`. Which of the two curves will rise more?
#
# <details><summary>Answer</summary>
# The grey one: the head memorises its six stories. More text would raise the blue one.
# </details>
#
# ## What each head reads
#
# Medusa reads one state and nothing else. Other kinds read more, and run more. The picture shows
# five kinds. A column is a token, and D is the last known token, which the target has not read yet.
#
# **Predict:** which kind will draft best? Which will cost least?

# %% tags=["gallery"] jupyter={"source_hidden": true}
E = max(1, L // 3)
kinds = [Kangaroo(model, E), ExitBlock(model, E), Eagle(model), Medusa(model, 3), Prophet(model, 1)]
figure, sides = plots.axes(2, 3, width=3, height=2.7)
for side, one in zip(sides.flat, kinds, strict=False):
    plots.draw_reading(side, one, L)
for row in sides:
    row[0].set_ylabel("block")
plots.explain_reading(sides[1, 2])
figure

# %% [markdown]
# - **Kangaroo** (arXiv 2404.18911) puts an attention between an early exit and the output head; the
#   **exit block** (from lucidrains'
#   [speculative-decoding](https://github.com/lucidrains/speculative-decoding)) puts a whole block
#   there. Both read the state at the exit, and for a drafted token that state does not exist yet:
#   the blocks up to the exit must run. (The picture draws the exit after a third of the blocks; the
#   shipped Kangaroo exits after two.)
# - **EAGLE** (arXiv 2401.15077) runs none of the model's blocks. One block of its own reads each
#   token together with the target's final state of the token before it. For drafted tokens there is
#   no such state yet, so it uses its own output. (EAGLE-3, arXiv 2503.01840, reads a mix of three
#   states: [notebook 13](13_a_real_model.ipynb).)
# - **Medusa** reads the final state of the last token that was read. Its heads predict three tokens
#   at once. But the second head does not know what the first one has drafted.
# - **The prophet** (lucidrains; not ProphetNet) is a small decoder. It starts from that final
#   state, then reads D and its own drafts.
#
# The cost of a drafted token follows from that: the blocks of the model that run for it, the head's
# own weights, and the output head. `heads.drafting` adds them up, in passes of the target. (No exit
# block is shipped, so it is missing from here on.)

# %% jupyter={"source_hidden": true}
def trained(kind, fresh):
    """The head of this kind beside the weights, or a fresh one."""
    folder = MODEL / "heads" / kind
    return heads.load(folder, model) if (folder / heads.FILE).is_file() else fresh


shipped = {one.kind: trained(one.kind, one) for one in kinds if one.kind != "exit_block"}
prices = {kind: heads.drafting(one).start for kind, one in shipped.items()}
for kind, one in shipped.items():
    print(f"{kind:9} {one.count():8,} weights, "
          f"{len(one.trunk) // 2} blocks of the model per drafted token: c = {prices[kind]:.2f}")
print(f"of each c, the output head is {costs.head:.2f}")

# %% [markdown]
# So the output head is a large part of every c, and nearly all of Medusa's. The paper's Medusa pays
# as much: each of its heads reads an output matrix of its own.
#
# ## In the loop
#
# Each head now drafts chains of three tokens. (Kangaroo's paper also stops a draft where the head
# is unsure, and Medusa's and EAGLE's draft trees.) They write eight stories, now at temperature 0,
# where a token is accepted if it is the target's likeliest. `tau` is the number of tokens per pass.
# A round takes one pass and the cost of its draft. So if only the weights that are read count, the
# speed-up is tau / (1 + cost of a draft). For comparison we measure three early exits, which need
# no weights of their own.
#
# **Predict:** which one has the highest tau? Is it also the fastest?

# %%
GAMMA = 3
COUNT = 8
prompts = [checkpoint.encode(tokenizer, line["prompt"], c.bos)
           for line in read_prompts("stories")[:COUNT]]


def measure(drafter, prompts=prompts):
    """(tokens per pass of each text, the texts, [tested, accepted] by place)"""
    each = []
    texts = []
    places = torch.zeros(2, 16)
    for ids in prompts:
        done = list(rounds(model, [ids], 48, drafter))
        texts.append([t for _, r in done for t in r.new[0]])
        each.append(len(texts[-1]) / len(done))
        for _, r in done:
            places[0, : min(int(r.accepted) + 1, int(r.proposed))] += 1
            places[1, : int(r.accepted)] += 1
    return torch.tensor(each), texts, places


def text_by_text(each, other):
    """The mean difference, and its standard error."""
    gap = each - other
    return f"{float(gap.mean()):+.2f} ± {float(gap.std() / len(gap) ** 0.5):.2f}"


_, plain, _ = measure(None)
table = {}
for kind, one in shipped.items():
    most = min(GAMMA, one.longest)                        # Medusa drafts a token per head
    table[kind] = *measure(one.drafter(most)), most * prices[kind]
for e in (max(1, L // 12), max(1, L // 8), max(1, L // 6)):
    subs = list(range(2 * e))
    table[f"exit {e}"] = *measure(SelfDraft(model, subs, GAMMA)), GAMMA * costs.draft(subs).start
gains = {name: each / (1 + cost) for name, (each, _, _, cost) in table.items()}
speeds = {name: float(each.mean()) for name, each in gains.items()}
for name, (each, texts, _, cost) in table.items():
    same = sum(a == b for a, b in zip(texts, plain, strict=True))
    print(f"{name:9} tau {float(each.mean()):.2f} ± {float(each.std() / len(each) ** 0.5):.2f}, "
          f"a draft costs {cost:.2f}, speed-up {speeds[name]:.2f}; "
          f"{same} of {len(prompts)} texts as in plain decoding")
best_exit = max((name for name in table if name.startswith("exit")), key=speeds.get)
print("text by text, kangaroo - eagle: tau", text_by_text(table["kangaroo"][0], table["eagle"][0]),
      "and speed-up", text_by_text(gains["kangaroo"], gains["eagle"]))
for kind in ("kangaroo", "eagle"):
    print(f"{kind} - {best_exit}: speed-up {text_by_text(gains[kind], gains[best_exit])}")

# %% jupyter={"source_hidden": true}
figure, ((left, right),) = plots.axes(1, 2, width=4.4, height=3)
hues = [plots.HUES[1] if name.startswith("exit") else plots.HUES[0] for name in table]
errors = [2 * float(each.std() / len(each) ** 0.5) for each, *_ in table.values()]
left.barh(list(table), [float(each.mean()) for each, *_ in table.values()], color=hues,
          ecolor="#404040", xerr=errors)
left.set(xlabel="tau, tokens per pass, with two standard errors",
         title="blue: trained, orange: an exit")
right.barh(list(table), list(speeds.values()), color=hues)
right.set(xlabel="speed-up by weights")
for side in (left, right):
    side.axvline(1, color="#404040", lw=0.8)
    side.invert_yaxis()
figure

# %% jupyter={"source_hidden": true}
figure, ((side,),) = plots.axes(1, 1, width=7, height=3.2)
drawn = [*shipped, best_exit]
for (name, hue), mark in zip(zip(drawn, plots.HUES, strict=False), "os^vD", strict=False):
    tested, kept = table[name][2]
    count = int((tested > 20).sum())                            # fewer would show mostly chance
    rate = kept[:count] / tested[:count]
    error = 2 * (rate * (1 - rate) / tested[:count]).sqrt()
    side.errorbar([k + 1 for k in range(count)], rate, yerr=error, color=hue, marker=mark,
                  capsize=3, label=name)
side.set(xlabel="place in the draft", ylabel="accepted of tested", ylim=(0, 1.02),
         title="alpha by place, with two standard errors", xticks=range(1, GAMMA + 1))
side.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
figure

# %% [markdown]
# The picture by place explains the table. Within their errors the curves are flat: a draft that has
# been right so far is right again about as often. Only EAGLE falls at the third place, where it has
# read its own output twice. The prophet and Medusa are often wrong at the first token already, and
# a cheap draft does not help much if it is rejected.
#
# The best exit is the baseline that counts: it needs no training. The lines below the table say by
# how much a head is ahead of it, and whether eight stories can tell. These speed-ups count weights,
# not seconds: [BENCHMARKS.md](../lab/BENCHMARKS.md#trained-heads) has both, on more text.
#
# **Try it:** set `GAMMA = 6`. For which drafters do you expect tau to rise, and for which the
# speed-up?
#
# <details><summary>Answer</summary>
# Tau rises for all but Medusa, which cannot draft more than three tokens. No speed-up rises: those
# of Kangaroo and EAGLE hardly change, and the prophet and the exits pay more for the longer draft
# than it brings.
# </details>
#
# ## A tree of heads
#
# The second and third choices of a head make trees, too, as those of the exit did in notebook 8.
# How often each choice is the target's token was measured when the heads were trained and is stored
# with them, so `best_tree` can pick the shape. A parent 0 in a shape is the last known token, and k
# is drafted token k. (Medusa's tree may branch anywhere. Here EAGLE continues only its first
# choices; in the paper it continues others as well.)
#
# **Predict:** does a tree help EAGLE more, or Medusa?

# %%
from methods.trees import best_tree

NODES = 8
gained = {}
for kind in ("eagle", "medusa"):
    one = shipped[kind]
    most = min(GAMMA, one.longest)
    ranks = one.ranks or [0.5, 0.15, 0.08]
    shape = best_tree(ranks, NODES, prices[kind], 0.0, one.branches, levels=most)
    chain, tree = (measure(one.drafter(most, some))[0] for some in (None, shape))
    gained[kind] = chain, tree
    print(f"{kind:6} chain of {most}: tau {chain.mean():.2f}; tree of {len(shape)}: "
          f"tau {tree.mean():.2f}, {text_by_text(tree, chain)} text by text; parents {shape}")
more = [tree - chain for chain, tree in gained.values()]
print("Medusa's tree gains more than EAGLE's by", text_by_text(more[1], more[0]))
assert not SHIPPED or GAMMA != 3 or gained["medusa"][1].mean() < gained["eagle"][0].mean()

# %% [markdown]
# Both gain. Medusa's first choices are often rejected, so its other choices have more to gain,
# though eight texts hardly show it (the last line). Even so, its tree writes fewer tokens per pass
# than EAGLE's chain.
#
# **Try it:** give Medusa a larger tree: set `NODES = 32`. Does it catch up with EAGLE's chain?
#
# <details><summary>Answer</summary>
# No. Each further sibling is accepted less often, and three heads still draft three levels.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
shape = best_tree(ranks, 32, prices["medusa"], 0.0, one.branches, levels=most)
wide, _, _ = measure(one.drafter(most, shape))
chain = gained["eagle"][0]
assert not SHIPPED or GAMMA != 3 or wide.mean() < chain.mean()
print(f"a tree of {len(shape)}: tau {wide.mean():.2f}; EAGLE's chain: {chain.mean():.2f}")

# %% [markdown]
# ## A draft that begins in the middle
#
# Kangaroo runs the model's first blocks, and EAGLE runs none. A *jump* (the package
# [economize](https://pypi.org/project/economize/) 0.3.2; no paper yet) begins between two blocks.
# A matrix predicts the state that a token would have there, from the token's embedding and from a
# state of the token before it. A trained copy of the next block runs on the prediction, and reads
# the target's own keys and values. A second matrix leads to the output head.
#
# A skip set may keep as few blocks, but has nothing in place of those that it leaves out. An exit
# keeps those before them, and pays for them.
#
# **Predict:** the same block drafts as a skip set and after a jump. What is its tau in each?

# %% jupyter={"source_hidden": true}
from methods.jump import Jump

jump = trained("jump", Jump(model, 2 * L // 3))
start = jump.layers.start
alone = [2 * start, 2 * start + 1]                              # the block that it copies
plots.draw_paths({"a jump": ([start], plots.HUES[2], (start + 1, start)),
                  "a skip set": ([start], plots.HUES[1], None),
                  "an exit": (range(start + 1), plots.HUES[1], None)}, L)

# %%
price = heads.drafting(jump).start
each, _, _ = measure(jump.drafter(GAMMA))
bare, _, _ = measure(SelfDraft(model, alone, GAMMA))
print(f"block {start} alone: tau {bare.mean():.2f} as a skip set, {each.mean():.2f} after a jump")
speed = each / (1 + GAMMA * price)
print(f"a token costs c = {price:.3f}, EAGLE's {prices['eagle']:.3f}; speed-up by weights "
      f"{speed.mean():.2f}, minus EAGLE's {text_by_text(speed, gains['eagle'])}")
assert not SHIPPED or GAMMA != 3 or each.mean() > 1.5 * bare.mean()

# %% [markdown]
# Both run one block, on the same keys and values. But the block learnt to read what the blocks
# before it make of a token. In the skip set it gets the bare embedding, which it has never seen,
# and the output head gets a state that the blocks after it should still have changed. The two
# matrices of the jump stand for what is missing on either side. They can, because most of a token's
# state in the middle follows from its embedding and from the state before it: even the
# least-squares fit that the matrices start from (`Jump.fit`) drafts. Then the matrices and the copy
# learn together, from the target's own distributions.
#
# The shipped EAGLE learnt from sixteen times as many tokens. One that learnt from as many as the
# jump drafts like it, and costs as much ([the table](../lab/BENCHMARKS.md#trained-heads)). On a
# larger model, whose exits were never trained, economize reports that a jump over 16 of 24 blocks
# gains more than its EAGLE-3 ([papers](../docs/papers.md)).

# %% [markdown]
# ## Questions
#
# Each answer is folded, and so is the cell below it that checks the answer.
#
# **1.** The shipped Medusa drafts at most three tokens. EAGLE can draft more. Why?
#
# <details><summary>Answer</summary>
# Medusa has one trained matrix for each place, and three of them. EAGLE reads its own output and
# can go on, although it gets worse the further it goes.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
assert shipped["medusa"].longest == shipped["medusa"].steps < shipped["eagle"].longest
print({kind: one.longest for kind, one in shipped.items()})

# %% [markdown]
# **2.** The heads were trained on text that is mostly stories. What happens on code: is the text
# still exact? Is it still fast?
#
# <details><summary>Answer</summary>
# It is exact: the target verifies every token. But the head predicts code less well, so tau falls.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
code = [checkpoint.encode(tokenizer, line["prompt"], c.bos)
        for line in read_prompts("code")[:COUNT]]
_, plain_code, _ = measure(None, code)
each, texts, _ = measure(shipped["eagle"].drafter(GAMMA), code)
same = sum(a == b for a, b in zip(texts, plain_code, strict=True))
assert same >= len(code) - 1                                    # a near-tie may flip
on_stories = table["eagle"][0].mean()
assert not SHIPPED or each.mean() < on_stories
print(f"eagle: tau {on_stories:.2f} on stories, {each.mean():.2f} on code")

# %% [markdown]
# **3.** EAGLE has over four times as many weights as Medusa, and reads over ten times as many of
# them per drafted token. Why is its c not even twice as large?
#
# <details><summary>Answer</summary>
# Both read the output head for each drafted token, and it has more weights than either of them
# reads of its own. (A short draft vocabulary, as in notebook 6, makes it smaller.)
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
output = costs.head
print(f"the output head alone: c = {output:.3f}; "
      f"eagle {prices['eagle']:.3f}, medusa {prices['medusa']:.3f}")
if SHIPPED:
    assert shipped["eagle"].count() > 4 * shipped["medusa"].count()
    assert shipped["eagle"].per_token() > 10 * shipped["medusa"].per_token()
    assert output < prices["medusa"] < prices["eagle"] < 2 * prices["medusa"]

# %% [markdown]
# **4.** Suppose we trained the model together with the head. The drafts would get better. What
# would be lost?
#
# <details><summary>Answer</summary> The text. The target would be another model, and what it
# verifies would be distributed as <i>its</i> p, and no longer as the p of the model we began with.
# (Medusa-2 trains both.) The cell moves one block by one percent.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
import copy

moved = copy.deepcopy(model)
g = torch.Generator().manual_seed(0)
for w in moved.blocks[L // 2].parameters():
    w.add_(0.01 * w.norm() * torch.randn(w.shape, generator=g) / w.numel() ** 0.5)
after = Teacher(moved, stories[0], lambda logits: logits.softmax(-1))
kept = torch.minimum(teacher.p, after.p).sum(-1).mean()
assert kept < 0.9999
print(f"per token, {1 - float(kept):.2%} of the probability has moved")

# %% [markdown]
# `generate.py --draft eagle` drafts with a head, and `--tree 8` with a tree of it.
#
# Next: [adapting](10_adapting.ipynb). The best way to draft changes with the text. How can a
# program choose while it writes?
