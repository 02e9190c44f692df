# %% [markdown]
# # 8. Trees: several drafted tokens for one place
#
# A chain of drafted tokens ends at its first rejection: every token after it is lost. What if a
# second drafted token for the same place were ready? Then the draft is a *tree*. The target reads
# all of it in one pass, and one path through it is accepted.
#
# > **Siblings are tokens drafted for the same place. They are tried one after the other. Each
# > rejection takes something away from p, and the next sibling is tried against what is left. So a
# > tree changes how many tokens a pass writes, but not their distribution.**
#
# You need [4, speculative decoding](04_speculative_decoding.ipynb), and [6, layer
# skipping](06_layer_skipping.ipynb) for the early exit that drafts here. About 40 minutes.

# %%
# %run start.py
MODEL = ROOT / "weights" / "stories-llama"      # or a folder with your own Llama or Gemma-2
SHIPPED = MODEL.name == "stories-llama"         # the text's figures are checked for this model

# %%
from methods.costs import by_weights
from layerskip import SelfDraft
from model import Placement
from sampling import Coins, to_probs
from search import Teacher
from support.texts import read_prompts

torch.set_grad_enabled(False)
model, tokenizer = checkpoint.load(MODEL, dtype=torch.float32)
c = model.c
device = model.tok.device
L = model.c.n_layers
EXIT = max(1, L // 6)                                           # a sixth of the blocks drafts
prompt = checkpoint.encode(tokenizer, "The old man looked at the", c.bos)
print(f"{L} blocks, of which the first {EXIT} draft")

# %% [markdown]
# ## A tree and its mask
#
# `Siblings` wraps any drafter that drafts a chain. With widths `[2, 1]`, the token at the first
# place gets two siblings, and the one at the second place gets one. Siblings are drawn from the
# same q, but without replacement: never the same token twice.
#
# The loop below runs twelve rounds, and keeps the tree whose first two siblings are the most
# uncertain: neither sure to be accepted nor sure to be rejected.

# %%
from itertools import islice

from methods.wrapper import Wrapper
from methods.trees import Siblings, ancestors
from speculative import rounds


class Kept(Wrapper):
    """Remembers the last draft as it was, before verification cuts it to a chain."""

    def propose(self, state):
        self.draft = super().propose(state)
        return self.draft


# %% jupyter={"source_hidden": true}
warm = lambda z: to_probs(z, temperature=1.0)
kept = Kept(Siblings(SelfDraft(model, range(2 * EXIT), 3), [2, 1]))
seen = []
for state, r in islice(rounds(model, [prompt], 60, kept, warm, Coins(0)), 12):
    draft = kept.draft
    tokens, parents, q = (part[0].cpu() for part in (draft.tokens, draft.parents, draft.q))
    left = r.p[0, 0].cpu()
    chances = []
    for k in [k for k, parent in enumerate(parents.tolist()) if parent == 0][:2]:
        chances.append(min(1.0, float(left[tokens[k]] / q[k, tokens[k]])))
        left = (left - q[k]).clamp(min=0)
        left = left / left.sum().clamp(min=1e-9)
    known = state.known[0][: -len(r.new[0])]                    # before this round
    unsure = min(min(chance, 1 - chance) for chance in chances)
    seen.append((unsure, known, tokens.tolist(), parents.tolist(), q))
_, known, tokens, parents, q = max(seen, key=lambda one: one[0])
print("after: ...", tokenizer.decode(known[-12:]))
print("drafted:", [tokenizer.decode([t]) for t in tokens], "parents:", parents)

# %% [markdown]
# `parents` is the whole shape: entry number k is the parent of drafted token number k, and 0 is the
# last known token. So a chain is `[0, 1, 2, ...]`, and here the last three tokens branch off the
# chain.
#
# **Predict:** the target reads all of these tokens in one pass. Number 4 is the second child of the
# last known token. Which tokens must it see? Which ones must it not see?

# %% tags=["gallery"] jupyter={"source_hidden": true}
words = [tokenizer.decode(known[-1:]), *(tokenizer.decode([t]) for t in tokens)]
names = [f"{k}: {word.strip() or '␣'}" for k, word in enumerate(words)]
tree = ancestors(torch.tensor([parents]))[0]                    # (K+1, K+1): what each node sees
plots.tree_and_mask(parents, tree, names)

# %% [markdown]
# Number 4 sees the known tokens and itself. It does not see 1, 2 and 3, which belong to another
# branch. In general a node sees itself and its ancestors. The colour of a node is its *rank*: blue
# for the first child of its parent, orange for the second, green for the third. Siblings are tried
# in this order.
#
# **Try it:** in the next cell, draw a `SHAPE` that holds four different texts, in five nodes.

# %%
SHAPE = [0, 0, 1, 3]
numbers = [str(k) for k in range(len(SHAPE) + 1)]
plots.tree_and_mask(SHAPE, ancestors(torch.tensor([SHAPE]))[0], numbers)

# %% [markdown]
# <details><summary>Answer</summary>
# Each leaf ends one text, so any shape with four leaves does, such as
# <code>[0, 0, 0, 0, 1]</code>.
# </details>
#
# Two siblings have the same *position* in the text, which follows from their depth, but two *slots*
# in the cache. So one pass reads several texts at once. Does each path really get the same logits
# as if it were alone? We read the tree in one pass and then each path by itself.

# %%
from kvcache import KVCache, prefill

n = len(known)
K = len(parents)
cache = KVCache(c, 1, n + K, model.attention_dtype(), device)
block = torch.tensor([[known[-1], *tokens]], device=device)

# %%
prefill(model, torch.tensor([known], device=device), cache)
positions = n - 2 + tree.sum(-1)[None].to(device)               # the last known token is at n - 1
slots = torch.arange(n - 1, n + K, device=device)[None]
at = Placement(positions, slots, n - 1, n + K, tree[None].to(device))
x = model.run(model.embed(block), at, cache)
together = model.unembed(x)[0]                                  # (K+1, V): one row per node
for k in range(K + 1):
    path = [int(t) for t, on in zip(block[0], tree[k], strict=True) if on]
    alone = model(torch.tensor([known[:-1] + path], device=device))[0, -1]
    assert torch.allclose(alone, together[k], atol=1e-3)        # sums in another order
print(f"one pass over {K + 1} tokens gives the logits of {K + 1} passes over one text each")

# %% [markdown]
# ## The walk, step by step
#
# Now p is known after each node, and we walk down from the last known token. Try the first child.
# If it is rejected, try the next one against what is *left* of p. If one is accepted, go on with
# its children. Here is the walk for one text in plain Python. `u` holds one uniform number per
# drafted token, tried or not.

# %%
def walk(p, tokens, parents, q, u):
    """(the last accepted node, what the next token is drawn from, what happened)"""
    node = 0
    left = p[0].clone()
    tale = []
    for k, token in enumerate(tokens):
        if parents[k] != node:                                  # on another branch: not tried
            continue
        chance = min(1.0, float(left[token] / q[k][token]))
        tale.append((node, k, float(left[token]), float(q[k][token]), chance, bool(u[k] < chance)))
        if u[k] < chance:
            node = k + 1
            left = p[k + 1].clone()
        else:
            left = (left - q[k]).clamp(min=0)
            left = left / left.sum()
    return node, left, tale

# %%
from methods.trees import verify_tree
from sampling import uniforms

p = warm(together).cpu()                                        # (K+1, V); q is (K, V)
ends = set()
for seed in range(200):
    node, left, _ = walk(p, tokens, parents, q, uniforms(seed, 0, K))
    line = torch.tensor([tokens])
    own, _ = verify_tree(p[None], line, torch.tensor([parents]), Coins(seed), q[None])
    assert int(own) == node
    ends.add(node)
print("200 walks end at the same node as the library's `verify_tree`; these nodes:", sorted(ends))

# %% [markdown]
# Let us follow one walk. `left` and `q` are the two probabilities of the token, `chance` is min(1,
# left / q), and the token is accepted if `u` is below it.
#
# **Try it:** set `SEED = 3`. Cover the last column, and tell the verdicts from `chance` and `u`.

# %% jupyter={"source_hidden": true}
def narrate(seed):
    u = uniforms(seed, 0, K).tolist()
    node, _, tale = walk(p, tokens, parents, q, u)
    for at, k, had, drawn, chance, ok in tale:
        print(f"after {names[at]:9} try {names[k + 1]:9} left {had:.3f}  q {drawn:.3f}  "
              f"chance {chance:.2f}  u {u[k]:.2f}  {'accepted' if ok else 'rejected'}")
    print("then the next token is drawn from what is left after", names[node])


def eventful(seed):
    """Whether the walk ends with a second chance that was taken, and how much it tried."""
    verdicts = [ok for *_, ok in walk(p, tokens, parents, q, uniforms(seed, 0, K))[2]]
    return verdicts[-2:] == [False, True], len(verdicts)

# %%
SEED = max(range(60), key=eventful)                             # or any number of yours
narrate(SEED)

# %% [markdown]
# ## What a rejection leaves
#
# The last known token has three children. The pictures show, for eight tokens, what each child is
# tried against if those before it are rejected: blue is what is left of p, orange is what it was
# drawn from.
#
# **Predict:** what happens to the orange bar of a token after it has been rejected? And to its blue
# bar?

# %% jupyter={"source_hidden": true}
family = [k for k, parent in enumerate(parents) if parent == 0]
likely = (p[0] + q[0]).topk(8).indices.tolist()
left = p[0]
shown = torch.tensor(list(dict.fromkeys([tokens[k] for k in family] + likely))[:8])
figure, (sides,) = plots.axes(1, len(family), width=3.4, height=3)
for side, k in zip(sides, family, strict=True):
    side.bar(torch.arange(8) - 0.2, left[shown], 0.4, color=plots.HUES[0], label="left of p")
    side.bar(torch.arange(8) + 0.2, q[k][shown], 0.4, color=plots.HUES[1], label="drawn from")
    words = [tokenizer.decode([t]).strip() or "␣" for t in shown.tolist()]
    side.set_xticks(range(8), words, rotation=90)
    side.set_title(f"try {names[k + 1]}\nchance {float((left / q[k])[tokens[k]].clamp(max=1)):.2f}")
    assert not SHIPPED or k != family[-1] or left[tokens[k]] < 1e-6, "the third child has no chance"
    left = (left - q[k]).clamp(min=0)
    assert not SHIPPED or left[tokens[k]] == 0, "the blue bar of a rejected token"
    left = left / left.sum()
sides[0].legend(frameon=False)
figure

# %% [markdown]
# Both disappear. The orange bar goes because the next sibling is drawn from q without that token,
# rescaled: to draw the same token again would be a waste. The blue bar goes because a token can
# only be rejected where q exceeds p, and q is subtracted. What p and q share has had its chance.
# Where p exceeds q, something is left, and a later sibling can hit it. Where q exceeds p, as at the
# third child here, nothing is left: its chance is 0.
#
# ## Why the text is exact: one line
#
# Write R for what is left of p when a token is tried, and Q for what that token was drawn from. As
# in notebook 4, the token is accepted with probability min(1, R/Q), and the probability of a
# rejection is the sum of max(R - Q, 0). So if the token after a rejection is distributed as R', the
# rescaled rest, then together they give R (Sequoia, arXiv 2402.12374, appendix F):
#
# $$\min(R, Q) \;+\; \textstyle\sum \max(R - Q, 0)\cdot\underbrace{\frac{\max(R - Q, 0)}
# {\sum \max(R - Q, 0)}}_{R'} \;=\; R$$
#
# After the last sibling, the token is drawn from what is left, so it has this distribution. Then
# what follows the sibling before it has the right distribution as well, and so on, back to the
# first sibling, where R is p. Q may depend on all earlier siblings, and that is what allows drawing
# without replacement. In the library, R is `left` and Q is `q[:, k]`:

# %%
import inspect

source = inspect.getsource(verify_tree)
print(source[source.index("    for k in range(K):") : source.index("    passed = ")])

# %% [markdown]
# We can check it without a proof. Cut p and q to six tokens and go through *every* way to draw two
# siblings; add up how likely each token is to be written.

# %%
some = (p[0] + q[0]).topk(6).indices
p6, q6 = (x[some].double() / x[some].sum() for x in (p[0], q[0]))


def families(q):
    """Every way to draw two siblings: its chance, and [(token, what it was drawn from)] of both."""
    for a in range(len(q)):
        rest = q.clone()
        rest[a] = 0
        rest = rest / rest.sum()                                # without replacement
        for b in range(len(q)):
            if b != a:
                yield q[a] * rest[b], [(a, q), (b, rest)]


def written(p, q, order=lambda siblings: siblings):
    """How likely each token is to be written, by recursive rejection."""
    out = torch.zeros_like(p)
    for chance, siblings in families(q):
        left = p
        for token, drawn in order(siblings):
            accepted = (left[token] / drawn[token]).clamp(max=1)
            out[token] += chance * accepted
            chance = chance * (1 - accepted)
            left = (left - drawn).clamp(min=0)
            left = left / left.sum().clamp(min=1e-300)
        out += chance * left                                    # both rejected
    return out

# %%
assert torch.allclose(written(p6, q6), p6)
print("p:      ", [round(v, 4) for v in p6.tolist()])
print("written:", [round(v, 4) for v in written(p6, q6).tolist()])

# %% [markdown]
# The rule is called *recursive rejection*. SpecInfer (arXiv 2305.09781, May 2023) verifies trees
# with it under the name *multi-step speculative sampling*, and draws every sibling from the whole
# q, or from another draft model. Multi-candidate verification (2401.06706, January 2024) draws
# without replacement, and so do the trees of Sequoia (2402.12374) and of recursive speculative
# decoding (2402.14160), both of February 2024.
#
# It is not the only rule. *SpecTr* (2310.15141) draws k tokens independently and accepts the first
# that passes a stricter test, which is also exact. *Typical acceptance* (Medusa, 2401.10774)
# accepts any token that p considers likely enough, without a coin (question 3). How much *any*
# exact rule can accept is a problem of optimal transport, and [lab/optimal.py](../lab/optimal.py)
# computes it.
#
# ## Which shape?
#
# A sibling helps where the first drafted token is often rejected; depth helps where it is often
# accepted. So measure the *rank acceptance*: how often the target's own token is the draft's
# likeliest token, its second likeliest, and so on. Here it is for greedy decoding, on four stories.

# %%
from methods.trees import best_tree, rank_acceptance, tree_tokens

stories = [checkpoint.encode(tokenizer, line["text"], c.bos)[:120]
           for line in read_prompts("stories")[:4]]
teachers = [Teacher(model, ids, lambda z: z) for ids in stories]
both = [(to_probs(teacher.p), teacher.q(range(2 * EXIT))) for teacher in teachers]
p_all, q_all = (torch.cat(part, 1) for part in zip(*both, strict=True))
ranks = rank_acceptance(p_all, q_all, 4)
level = by_weights(c).draft(range(2 * EXIT)).start
rounded = [round(rank, 2) for rank in ranks]
print("the target's token is the exit's first, second, ... choice:", rounded)
print(f"drafting one level costs {level:.2f} passes by weights")

# %% [markdown]
# From these numbers a dynamic programme finds the best tree of a given size (Sequoia, section 3.1).
# Best means fastest, and that depends on two costs, both in passes of the target: `depth_cost`,
# what drafting one more level costs, and `node_cost`, what one more token in the target's block
# costs. The speed of a tree is
#
# $$\frac{\text{tokens per pass}}{1 + \text{levels} \cdot \text{depth\_cost}
# + \text{nodes} \cdot \text{node\_cost}}$$
#
# We take cheap levels of 0.05 passes, such as a small head would have, and nodes that cost nothing.
#
# **Predict:** is the best tree of four nodes a chain? And the best tree of eight? Would free levels
# make trees deeper, or wider?

# %%
DEPTH_COST = 0.05


def speed(shape):
    """(levels, tokens per pass, speed)"""
    levels = int(ancestors(torch.tensor([shape]))[0].sum(-1).max()) - 1
    tokens = tree_tokens(shape, ranks)
    return levels, tokens, tokens / (1 + levels * DEPTH_COST)


best = {nodes: best_tree(ranks, nodes, DEPTH_COST, node_cost=0.0) for nodes in (4, 8, 16)}
for nodes, shape in best.items():
    for name, one in ((f"best tree of {nodes}", shape), (f"chain of {nodes}", list(range(nodes)))):
        levels, per_pass, gain = speed(one)
        print(f"{name:16} levels {levels:2}, tokens per pass {per_pass:.2f}, speed {gain:.2f}")
print("the best tree of 8:", best[8])
assert not SHIPPED or DEPTH_COST != 0.05 or best[4] == [0, 1, 2, 3] and best[8] != list(range(8))

# %% jupyter={"source_hidden": true}
figure, (sides,) = plots.axes(1, 3, width=3.6, height=3.0)
for side, (nodes, shape) in zip(sides, best.items(), strict=True):
    plots.draw_tree(side, shape, range(len(shape) + 1))
    side.set_title(f"{nodes} nodes, speed {speed(shape)[2]:.2f}")
figure

# %% [markdown]
# Four nodes make a chain. Of eight, some are better spent on siblings: further levels would cost
# more time than they save. Compare the list of parents with the picture in the middle: the tokens
# are numbered level by level, and within a level by their parents.
#
# **Try it:** set `DEPTH_COST = 0`, and then to what a level of this exit really costs (printed
# above).
#
# <details><summary>Answer</summary>
# Free levels make deep trees, and expensive levels make shallow and wide ones.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
shapes = {cost: best_tree(ranks, 8, cost, node_cost=0.0) for cost in (0.0, 0.05, level)}
deep = [speed(shape)[0] for shape in shapes.values()]
assert not SHIPPED or deep[0] > deep[1] > deep[2]
for cost, shape in shapes.items():
    print(f"the best tree of 8 where a level costs {cost:.2f} passes: {shape}")

# %% [markdown]
# One shape for all rounds is a compromise. *EAGLE-2* (arXiv 2406.16858) grows a new tree in each
# round: level by level, it continues the nodes with the largest product of the draft's
# probabilities along their path, and at last keeps the best nodes of all. Where the draft is sure,
# its tree is deep, and where it is not, wide.
#
# Free nodes are also an assumption. On a GPU that waits for memory, a pass over 16 tokens costs
# about as much as a pass over one. On a CPU it does not, and a large tree can lose.
# `python -m lab.bench real --fast` measures it.
#
# ## In the loop
#
# A tree is a drafter like any other. Here are a chain of three and the same chain with siblings,
# greedy, on eight stories.
#
# **Predict:** how many more tokens per pass will three siblings bring, and how many eight? Will the
# text change? And will the clock agree?

# %%
from functools import partial

from support.compare import compare

prompts = [checkpoint.encode(tokenizer, line["prompt"], c.bos) for line in read_prompts("stories")]
chain = SelfDraft(model, range(2 * EXIT), 3)
drafters = {"plain": None, "chain of 3": chain, "with 3 siblings": Siblings(chain, [3]),
            "with 8 siblings": Siblings(chain, [3, 3, 2])}
run = lambda ids, drafter: rounds(model, [ids], 48, drafter)
makers = {name: lambda drafter=drafter: drafter for name, drafter in drafters.items()}
done = [compare(partial(run, ids), makers, 1, repeats=1) for ids in prompts]     # in turn
texts = {name: [one[name].outputs[0] for one in done] for name in drafters}
per_text = {name: torch.tensor([len(one[name].outputs[0]) / one[name].passes for one in done])
            for name in drafters}
rates = {name: torch.tensor([one[name].rate for one in done]) for name in drafters}
for name in drafters:
    same = sum(a == b for a, b in zip(texts[name], texts["plain"], strict=True))
    clock = (rates[name] / rates["plain"]).log()
    print(f"{name:16} {per_text[name].mean():.2f} tokens per pass; by the clock "
          f"{clock.mean().exp():.2f} times plain decoding; {same} of {len(prompts)} texts as there")


def more(name, than):
    """How many more tokens per pass, text by text: the mean, and its standard error."""
    difference = per_text[name] - per_text[than]
    return float(difference.mean()), float(difference.std() / len(prompts) ** 0.5)


three = more("with 3 siblings", "chain of 3")
five = more("with 8 siblings", "with 3 siblings")
print("three siblings bring {:.2f} ± {:.2f}".format(*three),
      "and five more {:.2f} ± {:.2f} tokens per pass".format(*five))
clock = (rates["with 8 siblings"] / rates["chain of 3"]).log()
print(f"by the clock, eight siblings are {clock.mean().exp():.2f} times as fast as the chain "
      f"(± {clock.std() / len(prompts) ** 0.5:.2f})")
assert not SHIPPED or three[0] > max(2 * three[1], five[0])

# %% [markdown]
# The text stays the same. The first siblings bring most, and the later ones little. Drafting them
# reads no more weights, because they come from the same logits as the chain. But they have to be
# chosen, and the target's block is longer. On a small model on a CPU that costs more than the
# siblings bring. It pays where a wider pass is nearly free.
#
# ## Questions
#
# Each answer is folded, and so is the cell below it that checks the answer.
#
# **1.** A tree has three levels and eleven nodes. How many tokens can a pass over it write at most?
#
# <details><summary>Answer</summary>
# Four: at most one node of each level is accepted, and then comes one token of the target. Width
# only makes this more likely.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
run = rounds(model, [prompts[0]], 48, drafters["with 8 siblings"])
longest = max(len(r.new[0]) for _, r in run)
assert longest <= 4
print(f"never more than 4; seen here: {longest}")

# %% [markdown]
# **2.** Suppose a program sorts the siblings before they are verified, the likeliest first. Is the
# text still exact?
#
# <details><summary>Answer</summary>
# No. Each sibling is verified against the q that it was drawn from, which belongs to its place in
# the order of drawing. After sorting, the first sibling is the likelier of two draws, so it is no
# longer distributed as q.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
wrong = written(p6, q6, lambda siblings: sorted(siblings, key=lambda one: -float(q6[one[0]])))
moved = float((wrong - p6).abs().sum() / 2)
assert moved > 1e-3
print(f"{moved:.1%} of the probability has moved to other tokens")

# %% [markdown]
# **3.** Typical acceptance keeps the likeliest sibling whose p is above min(0.09, 0.3 exp(-H)),
# where H is the entropy of p. If none is, it writes p's likeliest token. Is the text exact?
#
# <details><summary>Answer</summary>
# No. It accepts likely tokens more often than p would draw them. That is a different distribution,
# so a different text; it may be a good one.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
limit = min(0.09, 0.3 * float(torch.exp(-torch.special.entr(p6).sum())))
typical = torch.zeros_like(p6)
for chance, siblings in families(q6):
    passing = [token for token, _ in siblings if p6[token] > limit]
    typical[max(passing, key=lambda token: float(p6[token])) if passing else p6.argmax()] += chance
assert (typical - p6).abs().max() > 1e-3
print("p:      ", [round(v, 4) for v in p6.tolist()])
print("typical:", [round(v, 4) for v in typical.tolist()])

# %% [markdown]
# **4.** At temperature 0, q is a one-hot, and after the first token nothing of it is left. What are
# the siblings then, and how many of them can be accepted?
#
# <details><summary>Answer</summary>
# The library takes the next most likely tokens of the draft. p is also a one-hot, so either one
# sibling is accepted or none.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
greedy = Kept(Siblings(SelfDraft(model, range(2 * EXIT), 1), [1, 1]))
state, r = next(rounds(model, [prompt], 8, greedy))
logits = Teacher(model, prompt, lambda z: z).q(range(2 * EXIT))[0, -1]
assert greedy.draft.tokens[0].tolist() == logits.topk(3).indices.tolist()
assert (greedy.draft.q.amax(-1) == 1).all()
siblings = [tokenizer.decode([t]) for t in greedy.draft.tokens[0]]
print("siblings:", siblings, "accepted:", int(r.accepted[0]))

# %% [markdown]
# **5.** Suppose each sibling is drawn from the whole q, as in SpecInfer. Is the text still exact?
# Which way accepts more?
#
# <details><summary>Answer</summary>
# It is exact: Q is q each time. It accepts less, since a sibling that repeats a rejected token has
# no chance.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
def accepted(p, tries):
    """How likely one of two siblings is accepted. tries: as `families`."""
    total = 0.0
    for chance, siblings in tries:
        left = p
        for token, drawn in siblings:
            one = (left[token] / drawn[token]).clamp(max=1)
            total += chance * one
            chance = chance * (1 - one)
            left = (left - drawn).clamp(min=0)
            left = left / left.sum().clamp(min=1e-300)
    return float(total)


again = [(q6[a] * q6[b], [(a, q6), (b, q6)]) for a in range(6) for b in range(6)]
assert accepted(p6, again) < accepted(p6, families(q6))
print(f"with replacement {accepted(p6, again):.3f}, without {accepted(p6, families(q6)):.3f}")

# %% [markdown]
# **6.** A tree has a single branch. Which function of notebook 4 does the same as `verify_tree`
# then?
#
# <details><summary>Answer</summary>
# <code>verify</code>, with the same coins: a chain is a tree without siblings.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
from verification import verify

line = torch.tensor([tokens[:3]])                               # the chain within our tree
rows = p[:4][None]
for seed in range(50):
    accepted, token = verify(rows, q[None, :3], line, Coins(seed))
    node, other = verify_tree(rows, line, torch.tensor([[0, 1, 2]]), Coins(seed), q[None, :3])
    assert int(accepted) == int(node) and int(token) == int(other)
print("50 seeds: the same node and the same token")

# %% [markdown]
# Next: [trained heads](09_trained_heads.ipynb). So far a part of the model has drafted. What can a
# small module do that is trained to draft?
