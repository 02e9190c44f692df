# %% [markdown]
# # 7. Trees and trained heads: several guesses at once
#
# A chain of guesses ends at its first mistake: all that was drafted after it is lost. So why not have a
# second guess ready for the same place? Then the draft is a *tree*. And who makes the guesses? So far it was
# a part of the model. This notebook also shows small modules that are *trained* to guess: heads.
#
# > **The one thing to remember: siblings, guesses for the same place, are tried one after the other, and each
# > one is tried against what those before it have left of p. So a tree changes how many tokens a pass writes,
# > but never their distribution.**
#
# Before it: [4, speculative decoding](04_speculative_decoding.ipynb), and
# [5, layer skipping](05_layer_skipping.ipynb) for the early exit that drafts here.

# %%
# %run start.py
MODEL = ROOT / "weights" / "stories-llama"      # or a folder with your own Llama or Gemma-2

# %%
import torch

import checkpoint
from model import Placement
from layerskip import SelfDraft
from sampling import Coins, to_probs
from search import Teacher
from notebooks import plots

model, tokenizer = checkpoint.load(MODEL, dtype=torch.float32)
c, device, L = model.c, model.tok.device, model.c.n_layers
EXIT = max(1, L // 6)                                           # the first sixth of the blocks will draft
prompt = checkpoint.encode(tokenizer, "Once upon a time, there was a little", c.bos)
print(f"{L} blocks; the first {EXIT} of them draft")

# %% [markdown]
# ## A tree, and who sees whom
#
# `Siblings` goes around any drafter of chains. With widths `[2, 1]` two siblings stand beside the first guess
# of the chain, and one beside the second. Siblings are drawn from the same q, but never the same token twice.
# We let it draft for eight rounds, keep each tree as it was before it was verified, and choose the one in
# which the second guess for the first place has the best chance.

# %%
from itertools import islice

from methods.trees import Siblings
from speculative import Wrapper, ancestors, rounds


class Kept(Wrapper):    # remembers the last draft as it was, before verification makes a chain of it
    def propose(self, state):
        self.draft = super().propose(state)
        return self.draft


# %%
warm = lambda z: to_probs(z, temperature=1.0)
kept = Kept(Siblings(SelfDraft(model, range(2 * EXIT), 3), [2, 1]))
seen = []
for state, r in islice(rounds(model, [prompt], 60, kept, warm, Coins(4)), 8):
    tokens, parents, q = (part[0].cpu() for part in (kept.draft.tokens, kept.draft.parents, kept.draft.q))
    second = parents.tolist().index(0, 1)                       # the second child of the last known token
    left = (r.p[0, 0].cpu() - q[0]).clamp(min=0)
    chance = float(left[tokens[second]] / left.sum().clamp(min=1e-9) / q[second, tokens[second]])
    known = state.known[0][: -len(r.new[0])]                    # before this round
    seen.append((min(1.0, chance), known, tokens.tolist(), parents.tolist(), q))
chance, known, tokens, parents, q = max(seen, key=lambda one: one[0])
print("after: ...", tokenizer.decode(known[-12:]))
print("proposals:", [tokenizer.decode([t]) for t in tokens], "parents:", parents)

# %% [markdown]
# `parents` is the whole shape. 0 is the last known token, D; k is proposal number k. So a chain is
# `[0, 1, 2, ...]`, and here the last three proposals hang beside the chain.
#
# **Predict:** the target will read all of them in one pass, as one block. Which tokens must the second child
# of D see, and which must it not see?

# %%
def place(parents):
    """Where to draw each node: its depth, and its row. A first child stays in the row of its parent."""
    depth, row, todo, rows = {0: 0}, {0: 0}, [0], 0
    while todo:                                                 # depth first, so that no lines cross
        node = todo.pop()
        if node > 0:
            parent = parents[node - 1]
            first = parents.index(parent) == node - 1
            rows += not first
            depth[node], row[node] = depth[parent] + 1, row[parent] if first else rows
        todo += [k for k in range(len(parents), 0, -1) if parents[k - 1] == node]
    return depth, row

# %%
def draw(side, parents, words, hue=plots.HUES[0]):
    depth, row = place(parents)
    for k, parent in enumerate(parents, 1):
        side.plot([depth[parent], depth[k]], [-row[parent], -row[k]], color="#808080", lw=1, zorder=0)
    for k in row:
        side.plot(depth[k], -row[k], "o", color=hue if k else "#404040", ms=6)
    for k, word in enumerate(words):
        side.text(depth[k], -row[k], word, ha="center", va="center", fontsize=9,
                  bbox=dict(boxstyle="round", fc="white", ec=hue if k else "#404040"))
    side.set(xlim=(-0.5, max(depth.values()) + 0.5), ylim=(-max(row.values()) - 0.6, 0.6))
    side.axis("off")

# %% tags=["gallery"]
words = [tokenizer.decode(known[-1:]), *(tokenizer.decode([t]) for t in tokens)]
names = [f"{k}: {word.strip() or '␣'}" for k, word in enumerate(words)]
tree = ancestors(torch.tensor([parents]))[0]                    # (K+1, K+1): who sees whom
figure, ((left, right),) = plots.axes(1, 2, width=5.4, height=3.6)
draw(left, parents, names)
left.set_title("the draft: a branch for each guess")
right.imshow(tree, cmap="Blues", vmax=1.5)
right.set_xticks(range(len(names)), names, rotation=90, fontsize=8)
right.set_yticks(range(len(names)), names, fontsize=8)
right.set(title="its mask: each row sees what is blue")
figure

# %% [markdown]
# Each node sees itself and all that it hangs on, and nothing of the other branches. Two siblings stand at
# the same *position* of the text (their depth says which), but in two *slots* of the cache. So one pass reads
# several texts at once: each path through the tree is a text. Is that true? Let us read the tree in one pass
# and each path alone.

# %%
from kvcache import KVCache
from speculative import prefill

n, K = len(known), len(parents)
cache = KVCache(c, 1, n + K, model.attention_dtype(), device)
block = torch.tensor([[known[-1], *tokens]], device=device)

# %%
with torch.no_grad():
    prefill(model, torch.tensor([known], device=device), cache)
    positions = n - 2 + tree.sum(-1)[None].to(device)           # D stands at n - 1
    slots = torch.arange(n - 1, n + K, device=device)[None]
    at = Placement(positions, slots, n - 1, n + K, tree[None].to(device))
    x = model.run(model.embed(block), at, cache)
    together = model.unembed(x)[0]                              # (K+1, V): one row after each node
    for k in range(K + 1):
        path = [int(t) for t, on in zip(block[0], tree[k], strict=True) if on]
        alone = model(torch.tensor([known[:-1] + path], device=device))[0, -1]
        assert torch.allclose(alone, together[k], atol=1e-3)
print(f"one pass over {K + 1} tokens says what {K + 1} passes over texts would have said")

# %% [markdown]
# ## The walk, step by step
#
# Now p is known after each node. From D we walk down: try the first child; where it is refused, try the next
# one, against what is *left* of p; where one is accepted, go on with its children. Here it is for one row, in
# plain Python. `u` are the uniform numbers: one for each proposal, whether it is tried or not.

# %%
def walk(p, tokens, parents, q, u):
    """(the last accepted node, what the next token is drawn from, what happened)"""
    node, left, tale = 0, p[0].clone(), []
    for k, token in enumerate(tokens):
        if parents[k] != node:                                  # it hangs elsewhere: not tried
            continue
        chance = min(1.0, float(left[token] / q[k][token]))
        tale.append((node, token, float(left[token]), float(q[k][token]), chance, bool(u[k] < chance)))
        if u[k] < chance:
            node, left = k + 1, p[k + 1].clone()
        else:
            left = (left - q[k]).clamp(min=0)
            left = left / left.sum()
    return node, left, tale

# %%
from sampling import uniforms
from verification import verify_tree

p = warm(together).cpu()                                        # (K+1, V); q is (K, V)
ends = set()
for seed in range(200):
    node, left, _ = walk(p, tokens, parents, q, uniforms(seed, 0, K))
    own, _ = verify_tree(p[None], torch.tensor([tokens]), torch.tensor([parents]), Coins(seed), q[None])
    assert int(own) == node
    ends.add(node)
print("200 walks, and the library's `verify_tree` ends each at the same node; the ends:", sorted(ends))

# %% [markdown]
# One walk, told. "asked" is the chance that the test gives, left(x) / q(x), and u is the coin. Among sixty
# seeds it is the walk with both verdicts in which most is tried.

# %%
def narrate(seed):
    u = uniforms(seed, 0, K).tolist()
    node, left, tale = walk(p, tokens, parents, q, u)
    for at, token, had, drawn, chance, ok in tale:
        k = next(i for i, t in enumerate(tokens) if t == token and parents[i] == at)
        print(f"at {names[at]:12} try {names[k + 1]:12} left {had:.3f} q {drawn:.3f} asked {chance:.2f} "
              f"u {u[k]:.2f} -> {'accepted' if ok else 'refused'}")
    print("     then the next token is drawn from what is left after", names[node])

# %%
def eventful(seed):
    tale = walk(p, tokens, parents, q, uniforms(seed, 0, K))[2]
    return len({verdict for *_, verdict in tale}), len(tale)


narrate(max(range(60), key=eventful))

# %% [markdown]
# ## What a refused guess leaves
#
# At D there are three children. Here is what the first, the second and the third of them are tried against,
# if all before them are refused: what is left of p (blue), and what the guess was drawn from (orange).
#
# **Predict:** what happens to the orange bar of a token after it has been tried?

# %%
family = [k for k, parent in enumerate(parents) if parent == 0]
left, shown = p[0], (p[0] + q[0]).topk(10).indices
figure, (sides,) = plots.axes(1, len(family), width=4, height=3)
for side, k in zip(sides, family, strict=True):
    side.bar(torch.arange(10) - 0.2, left[shown], 0.4, color=plots.HUES[0], label="left of p")
    side.bar(torch.arange(10) + 0.2, q[k][shown], 0.4, color=plots.HUES[1], label="drawn from")
    side.set_xticks(range(10), [tokenizer.decode([t]).strip() or "␣" for t in shown.tolist()], rotation=90)
    side.set_title(f"try {names[k + 1]}: chance {float((left / q[k])[tokens[k]].clamp(max=1)):.2f}")
    left = (left - q[k]).clamp(min=0)
    left = left / left.sum()
sides[0].legend(frameon=False, fontsize=8)
figure

# %% [markdown]
# It is gone: the next sibling is drawn from q without it, scaled up again, because nobody wants to hear the
# same guess twice. And p has lost all that it shares with q: that part has had its chance. What p has more of
# than q is still there, and a later guess may hit it.
#
# ## Why the text is exact: one line
#
# Write R for what is left of p when a guess is tried, and Q for what the guess was drawn from. As in notebook
# 4 a guess is kept with probability min(1, R/Q), and the chance of a refusal is the sum of max(R - Q, 0). So
# whoever draws from the scaled rest R' after a refusal completes R (Sequoia, arXiv 2402.12374, appendix F):
#
# $$\min(R, Q) \;+\; \textstyle\sum \max(R - Q, 0)\cdot\underbrace{\frac{\max(R - Q, 0)}
# {\sum \max(R - Q, 0)}}_{R'} \;=\; R$$
#
# The last guess is followed by a draw from what is left. So the last but one is followed by something that is
# distributed as its R', and so on, back to the first, where R is p. Q may depend on all guesses before: that
# is what allows "without the same token again". In the library this line is in these lines (left is R, and
# drawn is Q):

# %%
import inspect

source = inspect.getsource(verify_tree)
print(source[source.index("    for k in range(K):      # rest") : source.index("    passed, node")])

# %% [markdown]
# And without a proof: cut p and q to six tokens, go through *every* way to draw two siblings and every coin,
# and add up how likely each token is. `rules.tried` asks `verify_tree` itself how likely each flip was.

# %%
from lab.bench import rules

some = (p[0] + q[0]).topk(6).indices
small_p, small_q = (x[some].double() / x[some].sum() for x in (p[0], q[0]))
ways, drawn, chance = rules.draws(small_q, 2, again=False)      # (30, 2), (30, 2, 6), (30,)


def as_written(ways, drawn):
    each = rules.tried(small_p.expand(len(ways), -1), ways, drawn)      # (30, 2): which of them is accepted
    chances = torch.zeros(6).double().index_add(0, ways.flatten(), (chance[:, None] * each).flatten())
    rest = small_p.expand(len(ways), -1)
    for i in range(2):
        rest = (rest - drawn[:, i]).clamp(min=0)
        rest = rest / rest.sum(-1, keepdim=True).clamp(min=1e-300)
    return chances + (chance * (1 - each.sum(1))) @ rest

# %%
assert torch.allclose(as_written(ways, drawn), small_p)
print("p:      ", [round(v, 4) for v in small_p.tolist()])
print("written:", [round(v, 4) for v in as_written(ways, drawn).tolist()])

# %% [markdown]
# ## How good can a rule be?
#
# Recursive rejection is not the only rule. *SpecTr* (Sun et al. 2023) draws k guesses independently and takes
# the first that passes a stricter test. *Typical acceptance* (Medusa, arXiv 2401.10774) keeps any guess that
# p gives enough, without a coin. For small vocabularies we know the most that any exact rule can keep of the
# same guesses: it is a maximum flow, from the ways to draw into the tokens, of which each takes no more than
# p has.
#
# **Predict:** which of them comes nearest to the optimum? And which one might even lie above it?

# %%
probe = Teacher(model, known, lambda z: z)                      # raw logits, of the model and of its exit
pairs = rules.pairs(probe, range(2 * EXIT), 6)                  # (6, 2, 6): six places, six tokens
columns = ("SpecTr", "recursive, drawn again", "recursive, not again", "optimum", "typical")
curves = {name: [] for name in columns}
for k in (1, 2, 3, 4):
    found = [rules.judge(*to_probs(z, 1.0), k) for z in pairs]
    for name in columns:
        curves[name].append(sum(f[name] for f in found) / len(found))
assert all(ours <= most + 1e-9 for ours, most in zip(curves[columns[2]], curves["optimum"], strict=True))

# %%
figure, ((side,),) = plots.axes(1, 1, width=7.5, height=3.4)
for (name, values), hue, line in zip(curves.items(), plots.HUES, ("--", "-.", "-", ":", "--"), strict=False):
    side.plot([1, 2, 3, 4], values, color=hue, ls=line, marker="o", label=name)
side.set(xlabel="guesses for one place", ylabel="one of them is kept", xticks=[1, 2, 3, 4], ylim=(None, 1.02))
side.legend(frameon=False, fontsize=8)
bias = sum(rules.judge(*to_probs(z, 1.0), 2)["its bias"] for z in pairs) / len(pairs)
print(f"typical acceptance moves {bias:.0%} of the probability elsewhere; the other rules move none")
figure

# %% [markdown]
# To draw the same token again is a wasted guess, and so the library draws without replacement. (The optimum
# is that of these draws, too.) Typical acceptance may lie on either side of the optimum, because it is not
# exact: it keeps what p would not have said so often. That is another text.
#
# ## Which shape?
#
# A second guess helps where first guesses are bad, and depth helps where they are good. Measure how often the
# model's own token is the draft's first, second, ... guess: the *rank acceptance*. Then a dynamic programme
# finds the best tree of so many nodes (Sequoia, section 3.1). Here for greedy decoding, on a story.

# %%
from support.files import read_prompts
from methods.trees import best_tree, rank_acceptance, tree_tokens

story = checkpoint.encode(tokenizer, read_prompts("stories")[0]["text"], c.bos)[:120]
teacher = Teacher(model, story, lambda z: z)
ranks = rank_acceptance(to_probs(teacher.p), teacher.draft(range(2 * EXIT)), 4)
print("the model's token is guess number 1, 2, ... of the exit:", [round(rank, 2) for rank in ranks])

# %%
figure, (sides,) = plots.axes(1, 3, width=3.8, height=3.2)
for side, nodes in zip(sides, (4, 8, 16), strict=True):
    shape = best_tree(ranks, nodes, depth_cost=0.05, node_cost=0.0)
    draw(side, shape, [])
    side.set_title(f"{nodes} nodes: {tree_tokens(shape, ranks):.2f} tokens a pass\n"
                   f"(a chain of four: {tree_tokens(list(range(4)), ranks):.2f})", fontsize=10)
figure

# %% [markdown]
# These numbers count passes. On a GPU that waits for its memory a pass over 16 tokens costs about as much as
# one over a single token. On a CPU it does not, and a large tree may lose: `lab.bench heads` measures it.
#
# ## What each head sees
#
# An early exit drafts token by token. A trained head can do better, since it may read states that the target
# has computed anyway. Five kinds of the library are drawn here, and they differ in what they read. Below, a
# column is a token and a row is a height in the model; D is the last known token, which nobody has run yet.
# Blue: states that exist before the draft; a square is what the head reads. Orange: what the drafting
# itself must run. Dotted: what begins with that state. Arrows: who says which token.

# %%
from methods.heads import Eagle, ExitBlock, Kangaroo, Medusa, Prophet

E = max(1, L // 3)
all_kinds = [Kangaroo(model, E), ExitBlock(model, E), Eagle(model), Medusa(model, 3), Prophet(model, 1)]


def runs(head):
    """What drafting runs: [(column, lowest, highest block)]; the last token read is column 0, and D is 1."""
    if head.kind in ("kangaroo", "exit_block"):
        return [(1 + k, 0, E) for k in range(3)]                # the trunk up to the exit, for each token
    return [(1 + k, 0, 1) for k in range(3)] if head.kind in ("eagle", "prophet") else []

# %%
def sees(side, head):
    """What one kind reads (squares), what it runs (orange), and who says which token (arrows)."""
    top, exits = head.taps[0] // 2 + 1, "exit_layer" in head.shape      # top: how high it reads
    side.bar([-2, -1, 0], L, 0.7, color="#dce9f2")
    for column, low, high in runs(head):
        side.bar(column, high - low, 0.7, bottom=low, color="#f2d0b8")
    for column in range(-2, 4) if exits else range(-2, 1) if head.kind == "eagle" else [0]:
        side.plot(column, top, "s", color=plots.HUES[0], ms=8)
    feeds = {"prophet": [(1, 1)], "eagle": [(1, 0)]}
    for column, height in feeds.get(head.kind, []):
        side.plot([0, column], [top, height], color="#808080", ls=":")
    for k in range(3):
        start = {"medusa": (0, L), "prophet": (1 + k, 1), "eagle": (1 + k, 1)}.get(head.kind, (1 + k, top))
        side.annotate("", (2 + k, L * 1.12), start, arrowprops=dict(arrowstyle="->", color=plots.HUES[1]))

# %%
figure, (sides,) = plots.axes(1, 5, width=2.8, height=3.6)
for side, head in zip(sides, all_kinds, strict=True):
    sees(side, head)
    side.set_xticks(range(-2, 5), ["", "", "read", "D", "+1", "+2", "+3"], fontsize=8)
    side.set(title=head.kind, ylim=(0, L * 1.15), yticks=[0, E, L])
sides[0].set_ylabel("block")
figure

# %% [markdown]
# - **Kangaroo** (arXiv 2404.18911) and the **exit block** (of lucidrains'
#   [speculative-decoding](https://github.com/lucidrains/speculative-decoding)) put a piece of their own
#   between an early exit and the model's head. They read each token, their own drafts, too: so the trunk up
#   to the exit must run for each of them.
# - **EAGLE** (arXiv 2401.15077) needs no trunk: one block reads each token together with the final state of
#   the token before it. After D there are no final states yet, and it reads what it said itself.
# - **Medusa** (arXiv 2401.10774) reads the final state of the last token read, and nothing else. It says
#   three tokens at once: cheap, but its second head does not know what the first one has said (unless it is
#   trained with a bias by the token before, `markov`).
# - **The prophet** (lucidrains; not ProphetNet, which is in the lab) is a small decoder. It begins with
#   the final state and reads its own drafts.
#
# ## In the loop
#
# A head learns from the model itself: at each place of a text, what the model will say some places later.
# The loss is the distance of its distribution from the model's, which is what acceptance counts, and the
# model stays as it is (`lab/train_heads.py`). Once trained it is a drafter like any other. Here are trees
# of the Medusa heads that lie beside the weights; without any, of fresh ones. The text cannot change; only
# the number of passes can.

# %%
from methods import heads
from speculative import generate

folder = MODEL / "heads" / "medusa"
found = (folder / heads.FILE).is_file()
head = heads.load(folder, model) if found else Medusa(model, 3)
levels = min(3, head.steps)
wide = best_tree([0.5, 0.15, 0.08, 0.05], 8, 0.0, 0.0, levels=levels)
drafters = {"plain": None, f"{head.kind}, a chain": head.drafter(levels),
            f"{head.kind}, a tree of 8": head.drafter(levels, wide),
            f"exit {EXIT}, a chain": SelfDraft(model, range(2 * EXIT), 3),
            f"exit {EXIT}, siblings": Siblings(SelfDraft(model, range(2 * EXIT), 3), [3, 3, 2])}

# %%
done = {name: generate(model, [prompt], 48, drafter) for name, drafter in drafters.items()}
taus = {name: len(row) / passes for name, ((row,), passes) in done.items()}
same = sum(out == done["plain"][0] for out, _ in done.values())
assert same >= len(done) - 1                                    # in float32 a near-tie may fall otherwise
print(f"{head.kind}, {'trained' if found else 'untrained'}; {same} of {len(done)} texts are the same")

# %%
figure, ((side,),) = plots.axes(1, 1, width=7, height=2.6)
side.barh(list(taus), list(taus.values()), color=[plots.HUES[i % 6] for i in range(len(taus))])
side.axvline(1, color="#404040", lw=0.8)
side.set(xlabel="tokens a pass (tau)")
side.invert_yaxis()
figure

# %% [markdown]
# A tree can write more tokens a pass than the chain in it, as it holds more guesses; it never holds fewer.
# Whether it is also *faster* depends on what a wider pass costs on your machine. That is measured, not
# argued: `python -m lab.bench heads`.
#
# ## Questions
#
# **1.** A tree has three levels and eight nodes. How many tokens can a pass over it write at most?
#
# <details><summary>Answer</summary>
# Four: one path is accepted, at most one node of each level, and then comes the token after it. Width only
# makes this more likely.
# </details>

# %%
depth = int(ancestors(torch.tensor([wide]))[0].sum(-1).max()) - 1
longest = max(len(r.new[0]) for _, r in rounds(model, [prompt], 48, head.drafter(levels, wide)))
assert longest <= depth + 1
print(f"depth {depth}: never more than {depth + 1}; seen here: {longest}")

# %% [markdown]
# **2.** Somebody sorts the siblings before they are verified, the likeliest first. It sounds harmless. Is the
# text still exact?
#
# <details><summary>Answer</summary>
# No. What a guess was drawn from belongs to its place in the order of drawing. Sorted, the first sibling is
# the likeliest of two draws, and its distribution is no longer q.
# </details>

# %%
order = small_q[ways].argsort(1, descending=True)
wrong = as_written(ways.gather(1, order), drawn.gather(1, order[..., None].expand(-1, -1, 6)))
moved = float((wrong - small_p).abs().sum() / 2)
assert moved > 1e-3
print(f"{moved:.1%} of the probability has moved to other tokens")

# %% [markdown]
# **3.** At temperature 0 the draft's q is a one-hot: after the first guess nothing of it is left. What are
# the siblings then, and how many of them can be accepted?
#
# <details><summary>Answer</summary>
# The library takes the next most likely tokens, and each is certain. p is a one-hot, too: so one of them is
# accepted, or none.
# </details>

# %%
greedy = Kept(Siblings(SelfDraft(model, range(2 * EXIT), 1), [1, 1]))
state, r = next(rounds(model, [prompt], 8, greedy))
said = Teacher(model, prompt, lambda z: z).draft(range(2 * EXIT))[0, -1]
assert greedy.draft.tokens[0].tolist() == said.topk(3).indices.tolist()
assert (greedy.draft.q.amax(-1) == 1).all()
print("siblings:", [tokenizer.decode([t]) for t in greedy.draft.tokens[0]], "accepted:", int(r.accepted[0]))

# %% [markdown]
# **4.** A tree has one branch only. Which function of notebook 4 is `verify_tree` then?
#
# <details><summary>Answer</summary>
# `verify`, coin for coin: a chain is a tree in which nobody has a sibling.
# </details>

# %%
from verification import verify

line = torch.tensor([tokens[:3]])                               # the chain within our tree
rows = p[: 4][None]
for seed in range(50):
    accepted, token = verify(rows, q[None, :3], line, Coins(seed))
    node, other = verify_tree(rows, line, torch.tensor([[0, 1, 2]]), Coins(seed), q[None, :3])
    assert int(accepted) == int(node) and int(token) == int(other)
print("fifty seeds, the same end and the same token")

# %% [markdown]
# `lab/train_heads.py` trains heads, `generate.py --draft medusa --tree 8` drafts with them, and
# [BENCHMARKS.md](../lab/BENCHMARKS.md) says what they are worth on a machine.
#
# Next: [adapting](08_adapting.ipynb). Which draft is the best one changes with the text. Who chooses?
