# %% [markdown]
# # 1. The forward pass: from a prompt to logits
#
# A language model is a function. Token ids go in, and for every position a score for each possible
# next token comes out, its *logit*. This notebook computes that function twice: in a few lines per
# part, straight from the equations in the papers, and with the library's `model.py`. The two must
# agree.
#
# One observation carries the rest of the course. A transformer of L blocks is a sum: it starts from
# the embedding and adds 2L updates, x ← x + f(x), one after the other. Leave some of the updates
# out, and you have a cheaper model made of the same weights. In *self-speculative* decoding the
# model uses such a shorter list to draft its own next tokens, and then checks them with the whole
# list.
#
# You need Python, and should know what a matrix product and a softmax are. About 45 minutes. The
# notebook also runs on a model of your own: change `MODEL`. (The first cell finds the repository
# and imports `torch`, `checkpoint` and `plots`. JupyterLab folds it, as it does the cells that only
# draw.)
#
# Where it says *Predict*, write down your answer before you run the next cell.

# %%
# %run start.py
MODEL = ROOT / "weights" / "stories-llama"      # or a folder with your own Llama or Gemma-2

# %%
from model import Placement

torch.set_grad_enabled(False)                   # we train nothing here
model, tokenizer = checkpoint.load(MODEL, dtype=torch.float32)
c, device = model.c, model.tok.device
print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} million weights on {device}")
print(f"L = {c.n_layers} blocks, width {c.dim}, {c.n_heads} query heads, "
      f"{c.n_kv_heads} key-value heads, D = {c.head_dim}, vocabulary V = {c.vocab_size}")

# %% [markdown]
# ## Text becomes tokens
#
# The model does not see letters. It sees numbers from 0 to V - 1. A *tokenizer* cuts the text into
# pieces and gives each piece its number. A frequent word is one piece; a rare word is several.
# Every prompt starts with a special token that marks the beginning of a text. (Here it is called
# `<|endoftext|>`: where one text ends, the next begins.)
#
# **Predict:** how many pieces will the text below become? One per word, fewer, or more?

# %%
text = ("Once upon a time, there was a poodle named Max. Max had a red ball. "
        "One day, Max lost his red ball. Max was sad")
ids = checkpoint.encode(tokenizer, text, c.bos)
pieces = [tokenizer.decode([t], skip_special_tokens=False) for t in ids]
assert len(ids) > len(text.split())
print(len(text.split()), "words,", len(ids), "tokens")
numbered = list(zip(ids, pieces, strict=True))
for start in range(0, len(ids), 8):
    print("  ".join(f"{t} {piece!r}" for t, piece in numbered[start : start + 8]))

# %% [markdown]
# Punctuation has tokens of its own. A space belongs to the *beginning* of the piece that follows
# it. So `' ball'` and `'ball'` are two different tokens.
#
# ## Tokens become vectors
#
# The *embedding* is a table with one row of `dim` numbers per token. To embed a token is to look up
# its row.

# %%
tokens = torch.tensor([ids], device=device)     # (1, T): one text, T tokens
x = model.tok[tokens[0]][None] * c.embed_scale  # (1, T, dim); embed_scale is 1 for Llama
assert torch.allclose(x, model.embed(tokens))
print("tokens", tuple(tokens.shape), "-> x", tuple(x.shape))
print(x[0, :3, :6])

# %% [markdown]
# ## 2L updates of one running sum
#
# From here to the end the shape of `x` stays the same. Each block adds two things to it. Its
# *attention* gathers information from earlier positions. Its *MLP* then works on each position by
# itself. Both results are added to what was there before, so `x` is called the *residual stream*.
# We call the attentions and MLPs *sub-layers* and number them from 0 to 2L - 1:
#
# ```
# x <- x + f_0(x)         attention of block 0
# x <- x + f_1(x)         MLP of block 0
# x <- x + f_2(x)         attention of block 1
# ...
# ```
#
# `model.run` applies any list of sub-layers. So we can apply one at a time and keep every state on
# the way.

# %%
states, where = [model.embed(tokens)], Placement.span(0, len(ids), device)    # positions 0 .. T-1
for i in range(2 * c.n_layers):
    states.append(model.run(states[-1], where, sublayers=[i]))
logits = model.unembed(states[-1])                              # (1, T, V)
assert torch.allclose(logits, model(tokens), atol=1e-3)
print(len(states), "states of shape", tuple(states[0].shape), "-> logits", tuple(logits.shape))

# %% [markdown]
# **Predict:** does an update change the stream a little, or does it replace what was there? On the
# left below is the length of `x` after each sub-layer. On the right is the length of each update,
# divided by the length of the stream it is added to.

# %%
lengths = torch.stack([s[0, 1:].norm(dim=-1).mean() for s in states])   # 1: not the start token
updates = torch.stack([((b - a)[0, 1:].norm(dim=-1) / a[0, 1:].norm(dim=-1)).mean()
                       for a, b in zip(states, states[1:], strict=False)])
for first, end in ((0, 2), (2, 6), (6, len(updates))):
    low, high = updates[first:end].aminmax()
    print(f"updates {first} to {end - 1}: {float(low):.2f} to {float(high):.2f} of the stream")
plots.draw_updates(lengths.cpu(), updates.cpu())

# %% [markdown]
# The first two updates are larger than the stream they are added to (above the dotted line). The
# next four, of blocks 1 and 2, are still a third of it. Only then do they become small corrections
# of about a tenth. That is a hint: the model might often choose the same token *without* the late
# ones. We test that at the end of this notebook.
#
# Now we open the sub-layers. Each one is a norm, followed by an attention or an MLP.
#
# ## RMSNorm: drop the length, keep the direction
#
# $$\mathrm{norm}(x)_i = \frac{x_i}{\sqrt{\tfrac1n \sum_j x_j^2 + \varepsilon}}\; w_i
# \qquad\text{(Zhang and Sennrich 2019, eq. 4)}$$
#
# The division gives every vector a root mean square of 1. The sub-layer sees the direction of the
# stream, but not its length. Then each coordinate is multiplied by a trained weight.

# %%
def rms_norm(x, w):
    return x / (x.square().mean(-1, keepdim=True) + c.norm_eps).sqrt() * (c.norm_offset + w)


block = model.blocks[0]
normed = rms_norm(states[0], block.attn_norm.weight)
assert torch.allclose(normed, block.attn_norm(states[0]), atol=1e-5)
rms = lambda v: float(v.square().mean().sqrt())
print(f"root mean square: before {rms(states[0][0, 5]):.3f}, after the division "
      f"{rms(rms_norm(states[0], 1 - c.norm_offset)[0, 5]):.3f}")
print("the norm of x:      ", normed[0, 5, :5])
print("the norm of 10 x:   ", block.attn_norm(10 * states[0])[0, 5, :5])

# %% [markdown]
# (`norm_offset` is 0 for Llama. Gemma-2 multiplies by 1 + w. We return to it below.)
#
# ## RoPE: a position is a rotation
#
# Attention compares a query with keys. Nothing in that comparison says *where* a key is, so "dog
# bites man" and "man bites dog" would look the same. Rotary position embedding (RoFormer, Su et
# al. 2021) rotates each query and key by an angle that grows with its position m. It splits the D
# numbers of a head into D/2 pairs, and treats each pair as a point in a plane. Pair i is rotated by
#
# $$m\,\theta_i, \qquad \theta_i = \theta^{-2i/D} \qquad\text{(RoFormer, eq. 15)}$$
#
# with a constant θ (`rope_theta`). Pair 0 turns by one radian per token; the last pair hardly turns
# at all.

# %%
from model import frequencies, rope, rotate

freqs = frequencies(c.head_dim, c.rope_theta, c.rope_scaling, device)   # (D/2,)
plots.draw_rotation(freqs.cpu())

# %% [markdown]
# A rotation in the plane is a multiplication by a complex number of length 1. That gives RoPE in
# two lines. The library does the same with real numbers.
#
# The coordinates i and i + D/2 form a pair, as in Hugging Face's files. Meta's original files pair
# 2i with 2i + 1. Mixing the two up is a classic porting mistake, and a test with one token does not
# find it, because nothing is rotated at position 0.

# %%
def turn(x, m):
    """x (..., D) at position m, with complex numbers."""
    z = torch.complex(*x.double().chunk(2, -1)) * torch.polar(torch.ones_like(freqs), m * freqs)
    return torch.cat([z.real, z.imag], -1)


g = torch.Generator().manual_seed(0)
q, k = torch.randn(2, c.head_dim, generator=g, dtype=torch.float64).to(device)
assert torch.allclose(turn(q, 7), rotate(q, *rope(torch.tensor(7, device=device), freqs)))
print("query and key at 12 and 10:", float(turn(q, 12) @ turn(k, 10)))

# %% [markdown]
# **Predict:** now move both of them 500 positions to the right. What happens to their product?

# %%
at_q, at_k = 512, 510
print(f"query and key at {at_q} and {at_k}:", float(turn(q, at_q) @ turn(k, at_k)))
assert torch.isclose(turn(q, 512) @ turn(k, 510), turn(q, 12) @ turn(k, 10))

# %% [markdown]
# Nothing happens. A rotation does not change the length of a vector, and two equal rotations do not
# change the angle between two vectors (RoFormer, eq. 16). So attention sees the *distance* between
# two tokens, although each was rotated by its own position only. The next notebook depends on this:
# a key can be rotated once, stored, and used by every later query.
#
# **Try it:** set `at_k` to 500, and then `at_q` to 502. Which of the two products equals the one
# above?
#
# <details><summary>Answer</summary>
# The second: 502 and 500 are two positions apart, as 12 and 10 are.
# </details>
#
# ## Attention: look back, and copy what fits
#
# $$\mathrm{attention}(Q, K, V) =
# \mathrm{softmax}\!\Big(\frac{QK^\top}{\sqrt D} + \text{mask}\Big)\,V
# \qquad\text{(Vaswani et al. 2017, eq. 1)}$$
#
# Each position has three vectors. Its *query* says what it is looking for. Its *key* says what it
# offers. Its *value* is what others receive from it. A position takes a weighted average of the
# values. A value's weight is large where its key matches the query. The mask hides the future: it
# sets those scores to minus infinity, so their weights are 0.
#
# In *grouped-query attention* (Ainslie et al. 2023), G query heads share one key-value head. The
# matrix `wqkv` stacks, for each key-value head, its G query matrices, its key matrix and its value
# matrix. Here is one head written out. (`window` and `softcap` belong to Gemma-2 and do nothing for
# Llama.)

# %%
from model import block_only, softcap, visible


# %%
def head(layer, kv, g):
    """Weights (T, T) and output (T, D) of query head g of group kv."""
    b = model.blocks[layer]
    w = b.attn.wqkv.view(*b.attn.grouped, c.dim)[kv]                    # (G+2, D, dim)
    x = b.attn_norm(states[2 * layer])[0]                               # (T, dim)
    q, k, v = x @ w[g].T, x @ w[-2].T, x @ w[-1].T                      # (T, D) each
    q, k = (torch.stack([turn(row, m) for m, row in enumerate(part)]).float() for part in (q, k))
    at = torch.arange(len(x), device=device)[None]
    mask = visible(at, at, len(x), window=c.window if layer % 2 == 0 else None)[0]
    scores = softcap(q @ k.T * b.attn.scale, c.attn_softcap).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1), scores.softmax(-1) @ v

# %%
weights, out = head(layer=0, kv=0, g=0)
print("each row sums to 1:", weights.sum(-1)[:4], " output", tuple(out.shape))

# %% [markdown]
# Put the outputs of all heads side by side, multiply by one more matrix, and the sub-layer is
# complete. The library computes all heads in one product. (`block_only`: there is no cache yet.)

# %%
layer, G = c.n_layers // 2, c.n_heads // c.n_kv_heads
block = model.blocks[layer]
heads = [head(layer, kv, g)[1] for kv in range(c.n_kv_heads) for g in range(G)]
naive = torch.cat(heads, -1) @ block.attn.wo.T                          # (T, H*D) -> (T, dim)
cos, sin = (t[0, : len(ids), None, None] for t in model.angles(len(ids)))  # (T, 1, 1, D)
mask = model.build_masks(where, 0)[c.window if layer % 2 == 0 else None]
library = block.attn(block.attn_norm(states[2 * layer]), cos, sin, mask, block_only)[0]
assert torch.allclose(naive, library, atol=1e-4)
print("naive", naive[4, :4], "library", library[4, :4])

# %% [markdown]
# What do heads look at? We compute the weights of every head in every block, and pick three heads:
#
# - the one that looks most at the token just before;
# - the one that looks most at the first token, where there is nothing to learn;
# - the one that looks most at *what followed the same word last time*. This kind is called an
#   *induction head* (Olsson et al. 2022). At `' Max'` it looks for the token that came after an
#   earlier `' Max'`.

# %% jupyter={"source_hidden": true}
maps = {(layer, kv * G + g): head(layer, kv, g)[0].cpu() for layer in range(c.n_layers)
        for kv in range(c.n_kv_heads) for g in range(G)}
T = len(ids)
previous = torch.zeros(T, T)
first = torch.zeros(T, T)
previous[range(1, T), range(T - 1)] = first[1:, 0] = 1
after = torch.tensor([[float(0 < j < i and ids[j - 1] == ids[i]) for j in range(T)]
                      for i in range(T)])
found = {}
for name, wanted in (("the token before", previous), ("the first token", first),
                     ("what followed last time", after)):
    found[name] = max(maps, key=lambda at: float((maps[at] * wanted).sum() / wanted.any(1).sum()))
print("(block, head):", found)

# %% [markdown]
# The first token and the last twenty:

# %% jupyter={"source_hidden": true}
shown = [0, *range(max(1, T - 20), T)]
labels = ["start", *(plots.word(tokenizer, t) for t in ids[1:])]
cut = {f"{name}\nblock {at[0]}, head {at[1]}": maps[at][shown][:, shown]
       for name, at in found.items()}
plots.draw_maps(cut, [labels[t] for t in shown], after[shown][:, shown])

# %% [markdown]
# The circles mark where an induction head should look. Even the best head looks at only some of
# them.
#
# The upper right triangle is empty in every map: no token sees a later one. So one pass over T
# tokens gives the right distribution after *each* of them. That is what lets one pass check several
# drafted tokens.
#
# ## The MLP: each position by itself
#
# $$\mathrm{MLP}(x) =
# W_\mathrm{down}\,\big(\mathrm{act}(W_\mathrm{gate}\,x) \odot W_\mathrm{up}\,x\big)
# \qquad\text{(SwiGLU: Shazeer 2020)}$$
#
# Here no position sees another one. The gate decides how much of each hidden unit gets through.

# %%
act = {"silu": lambda z: z * torch.sigmoid(z),                          # Llama: "swish"
       "gelu": lambda z: torch.nn.functional.gelu(z, approximate="tanh")}[c.act]
x = block.mlp_norm(states[2 * layer + 1])
gate, up = (x @ part.T for part in block.mlp.gate_up.chunk(2))
naive = (act(gate) * up) @ block.mlp.down.T
assert torch.allclose(naive, block.mlp(x), atol=1e-4)
print(f"{c.dim} -> {up.shape[-1]} -> {c.dim} numbers; "
      f"{float((act(gate).abs() < 0.1).float().mean()):.0%} of the gates are nearly shut")

# %% [markdown]
# ## The whole model
#
# The whole model now fits in one cell. (`attn_post` and `mlp_post` are second norms that only
# Gemma-2 has.)

# %%
x = model.tok[tokens] * c.embed_scale
for i, block in enumerate(model.blocks):
    mask = model.build_masks(where, 0)[c.window if i % 2 == 0 else None]
    x = x + block.attn_post(block.attn(block.attn_norm(x), cos, sin, mask, block_only))
    x = x + block.mlp_post(block.mlp(block.mlp_norm(x)))
final = model.tok if c.tied else model.head                             # (V, dim)
naive = softcap(rms_norm(x, model.norm.weight) @ final.T, c.final_softcap)
assert torch.allclose(naive, model(tokens), atol=1e-3)
top = naive[0, -1].softmax(-1).topk(5)
print("after", repr(text[-20:]), "the model expects:")
for p, t in zip(top.values.tolist(), top.indices.tolist(), strict=True):
    print(f"  {p:.3f}  {tokenizer.decode([t])!r}")

# %% [markdown]
# ## The logit lens: what would the model say if it stopped here?
#
# The last step turns the final state into logits. It is called the *output head*, and has nothing
# to do with the heads of an attention. All states have the same shape, so we can give an *earlier*
# one to the final norm and the output head (together `unembed`). This is the *logit lens*
# (nostalgebraist 2020). In the picture each row is a depth and each column a position. A cell shows
# the most likely next token, darker where its probability is higher. The top row is the whole
# model.
#
# **Predict:** from which depth on does the last column say what the top row says?

# %% tags=["gallery"]
depths = [*range(0, c.n_layers, max(1, c.n_layers // 12)), c.n_layers]
lens = torch.cat([model.unembed(states[2 * e]) for e in depths])[:, -9:].softmax(-1).cpu()
sure, said = lens.max(-1)                                               # (depths, 9)
plots.draw_lens(said, sure, depths, labels[-9:], tokenizer)

# %% [markdown]
# A word in bold is the choice of the whole model. Easy words appear early and stay. Hard ones
# appear late, or change on the way. Go down the last column for as long as the words are bold:
# there the answer was settled. In the lowest row no block has run yet. Where the output head is the
# embedding table itself (`tied`), the model mostly repeats the token it has just read.
#
# Now the same over a longer text, a story that the model did not write. After each sub-layer, how
# often does the most likely token already agree with the whole model's?

# %%
from support.texts import read_prompts

story = checkpoint.encode(tokenizer, read_prompts("stories")[0]["text"], c.bos)[:200]
trace = dict.fromkeys(range(2 * c.n_layers))                    # `run` fills in these states
at = Placement.span(0, len(story), device)
model.run(model.embed(torch.tensor([story], device=device)), at, trace=trace)
best = torch.stack([model.unembed(trace[i])[0].argmax(-1) for i in trace])          # (2L, T)
agreement = (best == best[-1]).float().mean(1).cpu()            # (2L,)

# %% jupyter={"source_hidden": true}
figure, ((side,),) = plots.axes(1, 1, width=8)
plots.curves(side, range(1, 2 * c.n_layers + 1), {"agreement": agreement},
             xlabel="sub-layers applied", ylabel="share of tokens", ylim=(0, 1.02),
             title="same most likely token as the whole model")
side.plot([0, 2 * c.n_layers], [0, 1], color="#808080", ls=":", lw=1)
figure

# %% [markdown]
# Where the curve is above the dotted diagonal, the share of right answers is larger than the share
# of the sub-layers. There a draft by the first sub-layers can pay off, if the output head, which
# each drafted token runs as well, does not cost too much. (The shipped models were trained to be
# left early. On other models the curve stays low for longer.)
#
# "Early exit" means just this: a shorter list. The exit after E blocks runs blocks 0 to E - 1.

# %%
E = max(1, c.n_layers // 4)
draft = model.run(model.embed(tokens), where, sublayers=range(2 * E))
assert torch.equal(draft, states[2 * E]) or torch.allclose(draft, states[2 * E], atol=1e-4)
print(f"range({2 * E}) is the exit after {E} blocks: it says",
      repr(tokenizer.decode([int(model.unembed(draft)[0, -1].argmax())])))

# %% [markdown]
# **Try it:** what will the exit after 2 blocks say? And after 0 blocks, with the empty list? Read
# it off the last column of the logit lens, then set `E` and run the cell.
#
# <details><summary>Answer</summary>
# After 2 blocks it says what the whole model says, here " because". After 0 blocks it repeats "
# sad", the token that it has just read.
# </details>
#
# ## What Gemma-2 does differently
#
# The second family differs from Llama in eight fields of the configuration. Each is read on one or
# two lines of `model.py`. There is no second class.

# %% jupyter={"source_hidden": true}
import math
from dataclasses import fields, replace

from model import Config, Transformer

gemma, words = checkpoint.load(ROOT / "weights" / "stories-gemma2", dtype=torch.float32)
llama = {f.name: f.default for f in fields(Config)}
differs = ["act", "norm_offset", "embed_scale", "post_norm", "query_scale", "attn_softcap",
           "final_softcap", "window"]
assert len(differs) == 8 and all(getattr(gemma.c, name) != llama[name] for name in differs)
own = checkpoint.encode(words, read_prompts("stories")[0]["text"], gemma.c.bos)[:200]
line = torch.tensor([own], device=device)                       # the story in Gemma-2's own tokens
for name in differs:
    print(f"{name:14} Llama: {llama[name]!s:8} Gemma-2: {getattr(gemma.c, name)}")

# %% [markdown]
# - `act`: the gate of the MLP is a GELU instead of a SiLU. The two curves are nearly the same.
# - `norm_offset`: norms multiply by 1 + w, so a weight of 0 leaves a coordinate as it is.
# - `embed_scale`: embeddings are multiplied by the square root of `dim`.
# - `post_norm`: a second norm follows each attention and each MLP, before the sum.
# - `query_scale`: the factor of the scores is a field of its own. Llama always uses 1 / √D.
# - `attn_softcap`, `final_softcap`: cap · tanh(z / cap) keeps scores and logits within ±cap (Gemma
#   2, section 2).
# - `window`: every second block sees only the last `window` tokens.
#
# How much does each field matter? Set one field at a time to Llama's value, keep all the weights,
# and measure the loss on the same story. (The loss is minus the natural logarithm of the
# probability of each next token, averaged. Its unit is the *nat*.)
#
# **Predict:** which field does the most damage when it is wrong? Which one would you not notice?

# %%
def losses(m):
    return torch.nn.functional.cross_entropy(m(line)[0, :-1], line[0, 1:], reduction="none").cpu()


def with_field(name):
    other = Transformer(replace(gemma.c, **{name: llama[name]})).to(device)
    other.load_state_dict(gemma.state_dict(), strict=False)     # all weights but unused post-norms
    return other.eval()


models = {"as trained": gemma} | {name: with_field(name) for name in differs}
each = {name: losses(m) for name, m in models.items()}                  # (T - 1,) of each
for name in differs:
    gap = each[name] - each["as trained"]
    if name == "window":        # up to there, a token sees everything in both
        gap = gap[gemma.c.window :]
    print(f"{name:14} {float(gap.mean()):+.3f} ± {float(gap.std() / len(gap) ** 0.5):.3f}")
means = {name: float(part.mean()) for name, part in each.items()}
plots.draw_losses(means, uniform=math.log(gemma.c.vocab_size))

# %% [markdown]
# Three mistakes ruin the text, so you find them at once. Norms that multiply by w instead of 1 + w
# do the most damage: the loss is larger than if all tokens were equally likely. The other mistakes
# change the loss by less than twice its error (±), so these 200 tokens cannot tell them from none.
# (For `window`, the difference above the picture is that of the tokens after the first window;
# before, nothing can differ.) So a loss cannot tell which variant is the right one. These
# are the dangerous mistakes when you port a model, and the reason why the library's tests compare
# logits. (`query_scale` changes nothing, since here it equals 1 / √D.)
#
# ## Questions
#
# Answer first. Then unfold the answer, and run the check that is folded below it.
#
# **1.** Swap the third and the fourth token of the prompt. Which rows of the logits change?
#
# <details><summary>Answer</summary>
# All rows from the third on. The rows before it see neither of the two tokens.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
swapped = tokens.clone()
swapped[0, [2, 3]] = tokens[0, [3, 2]]
changed = ((model(swapped) - model(tokens)).abs().amax(-1)[0] > 1e-3).tolist()
assert not any(changed[:2]) and changed[2]
print("".join("x" if row else "." for row in changed))

# %% [markdown]
# **2.** Skip the attention of block 0 and run everything else. Which tokens can still learn from
# others, and from which block on?
#
# <details><summary>Answer</summary> All of them but the first token, from block 1 on. Skipping a
# sub-layer removes one term from the sum, nothing more. If you skip <i>all</i> attentions, each
# position sees only itself.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
def influence(sublayers):
    """Does the first word change what the model says at the end?"""
    other = tokens.clone()
    other[0, 1] = tokens[0, 5]
    a, b = (model.unembed(model.run(model.embed(t), where, sublayers=sublayers))[0, -1]
            for t in (tokens, other))
    return not torch.allclose(a, b, atol=1e-5)


every = range(2 * c.n_layers)
assert influence([i for i in every if i != 0])
assert not influence([i for i in every if i % 2])
print("with the MLPs alone, each position sees only its own token")

# %% [markdown]
# **3.** How many numbers must be read from memory to write one token? Is that closer to the number
# of weights, or to the number of tokens so far?
#
# <details><summary>Answer</summary>
# The number of weights. All of them are read, except that the embedding only looks up one row;
# where the table is also the output head (<code>tied</code>), it is read in full after all. This is
# why a pass over three tokens takes far less than three times as long as a pass over one: the same
# weights serve all three.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
from methods.costs import by_weights

matrices = sum(p.numel() for name, p in model.named_parameters()
               if p.dim() > 1 and (c.tied or name != "tok"))
assert by_weights(c).unit == matrices
print(f"{matrices:,} numbers per token, of which the head has "
      f"{by_weights(c).head:.0%}")

# %% [markdown]
# **4.** Why is RoPE applied to queries and keys, but not to values?
#
# <details><summary>Answer</summary>
# The rotation makes a <i>product</i> depend on a distance. A value is not part of such a product;
# it is only averaged. A rotated value would mean something different at each position.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
same = torch.tensor([ids[:1] + [ids[1]] * 8], device=device)    # one word, eight times
x = model.blocks[0].attn_norm(model.embed(same))
v = x[0] @ model.blocks[0].attn.wqkv.view(*model.blocks[0].attn.grouped, c.dim)[0, -1].T
assert torch.allclose(v[1:], v[1].expand_as(v[1:]), atol=1e-5)
print("in block 0 the same word has the same value at every position")

# %% [markdown]
# Next: [the cache](02_kv_cache.ipynb). To write a text token by token, we would repeat all of the
# above for tokens that have not changed. What can we keep?
