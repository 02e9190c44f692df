# %% [markdown]
# # 1. The forward pass: from a prompt to logits
#
# A language model is one function: token ids go in, and for every position a score for each possible next
# token comes out. This notebook computes that function twice. First it writes each part in a few lines, from
# the equation of the paper that introduced it. Then it compares the result with the library's `model.py`.
# At the end nothing in that file is a mystery, and one sentence of it carries the rest of this course:
#
# > **A transformer of L blocks is 2L residual updates x ← x + f(x). A self-speculative draft is a shorter
# > list of them.**
#
# You need Python, and you should know what a matrix product and a softmax are. The other notebooks build on
# this one: [2, the cache](02_kv_cache.ipynb), [3, sampling](03_sampling.ipynb),
# [4, speculative decoding](04_speculative_decoding.ipynb), [5, layer skipping](05_layer_skipping.ipynb),
# [6, search](06_search.ipynb), [7, trees](07_trees.ipynb), [8, trained heads](08_trained_heads.ipynb),
# [9, adapting](09_adapting.ipynb) and [10, close to the machine](10_close_to_the_machine.ipynb).
#
# No number in the text depends on the weights: every figure is computed here, so the notebook also runs on a
# model of your own. Change `MODEL` in the first cell.

# %%
# %run start.py
MODEL = ROOT / "weights" / "stories-llama"      # or a folder with your own Llama or Gemma-2

# %%
import torch

import checkpoint
from model import Placement
from notebooks import plots

torch.set_grad_enabled(False)                   # nothing is trained here
model, tokenizer = checkpoint.load(MODEL, dtype=torch.float32)
c, device = model.c, model.tok.device
print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} million weights on {device}")
print(f"L = {c.n_layers} blocks, width {c.dim}, {c.n_heads} query heads, {c.n_kv_heads} key-value heads, "
      f"D = {c.head_dim}, vocabulary V = {c.vocab_size}")

# %% [markdown]
# ## Text becomes tokens
#
# The model knows no letters, only numbers from 0 to V - 1. A *tokenizer* cuts a text into pieces and gives
# each piece its number. Frequent words are one piece; rare words are several. A special token stands before
# every prompt: it marks the beginning of a text.
#
# **Predict:** into how many pieces will the sentence below be cut: one for each word, fewer, or more?

# %%
text = ("Once upon a time, there was a dog named Max. Max had a red ball. "
        "One day, Max lost his red ball. Max was sad")
ids = checkpoint.encode(tokenizer, text, c.bos)
pieces = [tokenizer.decode([t], skip_special_tokens=False) for t in ids]
assert len(ids) > len(text.split())
print(len(text.split()), "words,", len(ids), "tokens")
for start in range(0, len(ids), 8):
    print("  ".join(f"{t} {piece!r}" for t, piece in list(zip(ids, pieces, strict=True))[start : start + 8]))

# %% [markdown]
# There are more tokens than words: punctuation has tokens of its own. Note that a space belongs to the
# *beginning* of the next piece. `' ball'` and `'ball'` are two different tokens, and a model that has seen
# only the first one knows little about the second.
#
# ## Tokens become vectors
#
# The *embedding* is a table with one row of `dim` numbers for each token. To embed is to look up.

# %%
tokens = torch.tensor([ids], device=device)     # (1, T): one text, T tokens
x = model.tok[tokens[0]][None] * c.embed_scale  # (1, T, dim); embed_scale is 1 for Llama
assert torch.allclose(x, model.embed(tokens))
print("tokens", tuple(tokens.shape), "-> x", tuple(x.shape))
print(x[0, :3, :6])

# %% [markdown]
# ## 2L updates of one running sum
#
# From here on nothing changes the shape of `x`. Each block adds two things to it: what its *attention* found
# in earlier positions, and what its *MLP* made of the result. Because each of them is added to what was
# there, `x` is called the *residual stream*. The library numbers the 2L *sub-layers*: attention of block 0,
# MLP of block 0, attention of block 1, and so on.
#
# ```
# x <- x + f_0(x)         attention 0
# x <- x + f_1(x)         MLP 0
# x <- x + f_2(x)         attention 1
# ...
# ```
#
# `model.run` applies any list of them. So we can apply them one at a time and keep every state on the way.

# %%
states, where = [model.embed(tokens)], Placement.at(0, len(ids), device)    # the positions 0 .. T-1
for i in range(2 * c.n_layers):
    states.append(model.run(states[-1], where, sublayers=[i]))
logits = model.unembed(states[-1])                              # (1, T, V)
assert torch.allclose(logits, model(tokens), atol=1e-3)
print(len(states), "states of shape", tuple(states[0].shape), "-> logits", tuple(logits.shape))

# %% [markdown]
# **Predict:** does each update change the stream a little, or does it replace what was there? The left
# picture shows the length of `x` after each sub-layer; the right one shows how long each update is beside the
# stream that it is added to.

# %%
lengths = torch.stack([s[0, 1:].norm(dim=-1).mean() for s in states])    # 1: without the start token
updates = torch.stack([((b - a)[0, 1:].norm(dim=-1) / a[0, 1:].norm(dim=-1)).mean()
                       for a, b in zip(states, states[1:], strict=False)])
figure, ((left, right),) = plots.axes(1, 2)
left.plot(lengths.cpu(), color=plots.HUES[0], marker=".")
left.set(xlabel="sub-layers applied", ylabel="mean length of x", ylim=(0, None))
for kind, name in enumerate(("attention", "MLP")):
    right.bar(range(kind, 2 * c.n_layers, 2), updates[kind::2].cpu(), color=plots.HUES[kind], label=name)
right.axhline(1, color="#808080", ls=":", lw=1)
right.set(xlabel="sub-layer", ylabel="length of the update / length of x", yscale="log")
right.legend(frameon=False)
for side in (left, right):
    side.xaxis.get_major_locator().set_params(integer=True)
figure

# %% [markdown]
# The first updates weigh more than all that came before them (they lie above the dotted line); the later ones
# are small corrections. Hold on to this picture. If late updates are small, a model *without* them might
# often say the same thing. That is the whole hope of self-speculative decoding, and further below we test it.
#
# Now we open the sub-layers. Each is a norm, then attention or an MLP.
#
# ## RMSNorm: forget the length, keep the direction
#
# $$\mathrm{norm}(x)_i = \frac{x_i}{\sqrt{\tfrac1n \sum_j x_j^2 + \varepsilon}}\; w_i
# \qquad\text{(Zhang and Sennrich 2019, eq. 4)}$$
#
# The division makes the root mean square of the vector 1, so a sub-layer sees the direction of the stream
# but not its length. Then each coordinate gets a trained weight.

# %%
def rms_norm(x, w):
    return x / (x.square().mean(-1, keepdim=True) + c.norm_eps).sqrt() * (c.norm_offset + w)


block = model.blocks[0]
normed = rms_norm(states[0], block.attn_norm.weight)
assert torch.allclose(normed, block.attn_norm(states[0]), atol=1e-5)
print("before:", states[0][0, 5, :5])
print("after: ", normed[0, 5, :5])

# %% [markdown]
# (`norm_offset` is 0 for Llama. Gemma-2 multiplies by 1 + w; we come back to it.)
#
# ## RoPE: a position is a rotation
#
# Attention compares a query with keys. As it stands it would not know *where* a key is: "dog bites man" and
# "man bites dog" would be the same. Rotary position embedding (RoFormer, Su et al. 2021) turns each query and
# key by an angle that grows with its position m. The D numbers of a head are D/2 pairs, each a point in a
# plane, and pair i turns by
#
# $$m\,\theta_i, \qquad \theta_i = \theta^{-2i/D} \qquad\text{(RoFormer, eq. 15)}$$
#
# The first pair turns by one radian a token, the last one almost not at all: a clock with many hands.

# %%
from model import frequencies, rope, rotate

freqs = frequencies(c.head_dim, c.rope_theta, c.rope_scaling, device)   # (D/2,)
at = torch.arange(64, device=device)
figure, ((left, right),) = plots.axes(1, 2)
image = left.imshow((at[None] * freqs[:, None]).cos().cpu(), aspect="auto", cmap="RdBu", vmin=-1, vmax=1)
left.set(xlabel="position m", ylabel="pair i", title="cosine of the angle of each pair")
figure.colorbar(image, ax=left)
for hand, pair in enumerate([0, len(freqs) // 4, len(freqs) // 2]):
    angle, radius = (at * freqs[pair]).cpu(), 1 - 0.2 * hand
    right.plot(radius * angle.cos(), radius * angle.sin(), color=plots.HUES[hand], marker="os^"[hand], ms=3,
               lw=0, label=f"pair {pair}")
right.set(aspect="equal", title="three hands at positions 0 to 63", xticks=[], yticks=[], frame_on=False)
right.legend(frameon=False, loc="center")
figure

# %% [markdown]
# A turn in a plane is a product with a complex number of length 1. That gives RoPE in two lines. The library
# does the same with real numbers. Note which coordinates form a pair: i and i + D/2, the convention of
# Hugging Face's files. Meta's own files pair 2i and 2i + 1, and to mix the two up is a common mistake
# of anybody who ports a model: at position 0 nothing turns, so a test with one token passes.

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
# **Predict:** move both of them 500 positions to the right. What happens to their product?

# %%
print("query and key at 512 and 510:", float(turn(q, 512) @ turn(k, 510)))
assert torch.isclose(turn(q, 512) @ turn(k, 510), turn(q, 12) @ turn(k, 10))

# %% [markdown]
# Nothing. A turn changes the length of neither, and two equal turns leave the angle between them as it was
# (RoFormer, eq. 16). So attention sees the *distance* of two tokens, although each was turned by its own
# position alone. This matters in the next notebook: a key can be turned once, stored, and used by all later
# queries.
#
# ## Attention: look back, and copy what fits
#
# $$\mathrm{attention}(Q, K, V) = \mathrm{softmax}\!\Big(\frac{QK^\top}{\sqrt D} + \text{mask}\Big)\,V
# \qquad\text{(Vaswani et al. 2017, eq. 1)}$$
#
# Every position asks a question (its query). Every position offers a label (its key) and a content (its
# value). A position copies a mixture of contents, weighted by how well their labels fit its question. The
# mask forbids looking into the future: there the score is minus infinity and the weight 0.
#
# In *grouped-query attention* (Ainslie et al. 2023) G query heads share one key-value head. `wqkv` stacks the
# matrices: for each key-value head its G queries, its key and its value. Here is one head, written out.
# (`window` and `softcap` belong to Gemma-2 and do nothing for Llama; they are explained further below.)

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
# All heads side by side, times one more matrix: that is the sub-layer. The library computes the heads in one
# product; the result is the same. (`block_only` tells it that there is no cache: see the next notebook.)

# %%
layer, G = c.n_layers // 2, c.n_heads // c.n_kv_heads
block = model.blocks[layer]
heads = [head(layer, kv, g)[1] for kv in range(c.n_kv_heads) for g in range(G)]
naive = torch.cat(heads, -1) @ block.attn.wo.T                          # (T, H*D) -> (T, dim)
cos, sin = (t[: len(ids), None, None] for t in model.angles(len(ids)))  # (T, 1, 1, D)
mask = model.masks(where, len(ids), 0)[c.window if layer % 2 == 0 else None]
library = block.attn(block.attn_norm(states[2 * layer]), cos, sin, mask, block_only)[0]
assert torch.allclose(naive, library, atol=1e-4)
print("naive", naive[4, :4], "library", library[4, :4])

# %% [markdown]
# What do heads look at? We compute all maps of all blocks and let three questions choose the heads to show:
# which head looks most at the token just before? Which looks most at the first token, where nothing is to be
# learnt? And which looks most at *what followed the same word last time*? The last kind is called an
# *induction head* (Olsson et al. 2022): after " Max" it looks for the words that came after an earlier "
# Max".

# %%
maps = {(layer, kv * G + g): head(layer, kv, g)[0].cpu() for layer in range(c.n_layers)
        for kv in range(c.n_kv_heads) for g in range(G)}
T = len(ids)
previous, first = torch.zeros(T, T), torch.zeros(T, T)
previous[range(1, T), range(T - 1)] = first[1:, 0] = 1
after = torch.tensor([[float(0 < j < i and ids[j - 1] == ids[i]) for j in range(T)] for i in range(T)])
found = {}
for name, wanted in (("the token before", previous), ("the first token", first),
                     ("what followed last time", after)):
    found[name] = max(maps, key=lambda at: float((maps[at] * wanted).sum() / wanted.any(1).sum()))
print("(block, head):", found)

# %%
figure, (sides,) = plots.axes(1, 3, width=4.4, height=4.9)
labels = [piece.strip() or "⏎" for piece in pieces]
labels[0] = "start"
for side, (name, at) in zip(sides, found.items(), strict=True):
    side.imshow(maps[at], cmap="Blues", vmin=0, vmax=1)
    side.set_title(f"{name}\nblock {at[0]}, head {at[1]}", fontsize=10)
    side.set_xticks(range(T), labels, rotation=90, fontsize=7)
    side.set_yticks(range(T), labels, fontsize=7)
sides[2].scatter(*after.nonzero().T.flip(0), s=22, facecolors="none", edgecolors=plots.HUES[1], lw=0.8)
sides[0].set_ylabel("this token looks ...")
figure.supxlabel("... at this one", fontsize=10)
figure

# %% [markdown]
# (The small circles mark what the third question asks for. Judge for yourself how well the best head of this
# model answers it.)
#
# The upper right triangle is empty in all maps: no token sees a later one. This is why one pass over T tokens
# gives the right distribution after *each* of them, and that is what will let one pass check several guesses.
#
# ## The MLP: each position thinks for itself
#
# $$\mathrm{MLP}(x) = W_\mathrm{down}\,\big(\mathrm{act}(W_\mathrm{gate}\,x) \odot W_\mathrm{up}\,x\big)
# \qquad\text{(SwiGLU: Shazeer 2020)}$$
#
# No position sees another one here. The gate decides how much of each hidden unit passes.

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
# Now the whole model fits in one cell: nothing but norms, attention, MLPs and sums. `attn_post` and
# `mlp_post` are second norms, which only Gemma-2 has; for Llama they do nothing.

# %%
x = model.tok[tokens] * c.embed_scale
for i, block in enumerate(model.blocks):
    mask = model.masks(where, T, 0)[c.window if i % 2 == 0 else None]
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
# The head turns the last state into logits. Nothing stops us from giving it an *earlier* state, for all of
# them have the same shape. This is the *logit lens* (nostalgebraist 2020). Each row of the picture is a
# depth, each column a position; the cell shows the most likely next token, darker where the model is surer.
# The top row is the whole model.
#
# **Predict:** at which depth does the last column begin to say what the top row says?

# %%
from support.show import SIGNS  # control characters become visible signs

depths = [*range(0, c.n_layers, max(1, c.n_layers // 12)), c.n_layers]
lens = torch.cat([model.unembed(states[2 * e]) for e in depths])[:, -9:].softmax(-1).cpu()
sure, said = lens.max(-1)                                               # (depths, 9): after so many blocks
names = [[tokenizer.decode([t]).translate(SIGNS).strip() or "␣" for t in row] for row in said.tolist()]

# %% tags=["gallery"]
figure, ((side,),) = plots.axes(1, 1, width=11, height=0.8 + 0.3 * len(said))
side.imshow(sure, origin="lower", aspect="auto", cmap="Blues", vmin=0, vmax=2)
for y, row in enumerate(names):
    for t, name in enumerate(row):
        same = said[y, t] == said[-1, t]
        side.text(t, y, name[:12], ha="center", va="center", fontsize=8.5, parse_math=False,
                  weight="bold" if same else "normal", style="normal" if same else "italic")
side.set_xticks(range(9), labels[-9:])
side.set_yticks(range(len(depths)), depths)
side.set(xlabel="after this token", ylabel="blocks applied")
figure

# %% [markdown]
# Bold words agree with the whole model. Easy words are there early and stay. Hard ones come late or change.
# Go down the last column from the top, as long as the words are bold: there the answer was settled. In the
# lowest row no block has run: where the head is the embedding table itself (`tied`), the model mostly repeats
# the token that it has just read.
#
# The same over a longer text, as a curve: how often does the best token after E blocks equal the best one of
# the whole model? We read a story that the model did not write.

# %%
from support.files import read_prompts

story = checkpoint.encode(tokenizer, read_prompts("stories")[0]["text"], c.bos)[:200]
trace = dict.fromkeys(range(2 * c.n_layers))                            # `run` fills in what we ask for
model.run(model.embed(torch.tensor([story], device=device)), Placement.at(0, len(story), device), trace=trace)
best = torch.stack([model.unembed(trace[i])[0].argmax(-1) for i in trace])      # (2L, T)
agreement = (best == best[-1]).float().mean(1).cpu()
figure, ((side,),) = plots.axes(1, 1, width=7)
side.plot(range(1, 2 * c.n_layers + 1), agreement, color=plots.HUES[0], marker=".")
side.plot([0, 2 * c.n_layers], [0, 1], color="#808080", ls=":", lw=1)
side.set(xlabel="sub-layers applied", ylabel="share of tokens", ylim=(0, 1.02),
         title="how often the best token is already that of the whole model")
side.xaxis.get_major_locator().set_params(integer=True)
figure

# %% [markdown]
# Wherever the curve lies above the dotted diagonal, a part of the work gives more than its share of the
# answers, and a draft by the first sub-layers can pay. (The shipped models were trained to speak early; on
# others the curve stays low for long. Try your own.)
#
# And this is all that "early exit" means in the library: a shorter list.

# %%
E = max(1, c.n_layers // 4)
draft = model.run(model.embed(tokens), where, sublayers=range(2 * E))
assert torch.equal(draft, states[2 * E]) or torch.allclose(draft, states[2 * E], atol=1e-4)
print(f"range({2 * E}) is the exit after block {E}: it says",
      repr(tokenizer.decode([int(model.unembed(draft)[0, -1].argmax())])))

# %% [markdown]
# ## What Gemma-2 does differently
#
# The second family differs from Llama in eight fields of the configuration, and each but `window` is read on
# exactly one line of the forward pass in `model.py`. There is no second class.

# %%
from dataclasses import fields, replace

from model import Config, Transformer

gemma, words = checkpoint.load(ROOT / "weights" / "stories-gemma2", dtype=torch.float32)
llama = {f.name: f.default for f in fields(Config)}
differs = ["act", "norm_offset", "embed_scale", "post_norm", "query_scale", "attn_softcap", "final_softcap",
           "window"]
assert len(differs) == 8 and all(getattr(gemma.c, name) != llama[name] for name in differs)
own = checkpoint.encode(words, read_prompts("stories")[0]["text"], gemma.c.bos)[:200]
line = torch.tensor([own], device=device)                       # the story, cut by Gemma-2's own tokenizer
for name in differs:
    print(f"{name:14} Llama: {llama[name]!s:8} Gemma-2: {getattr(gemma.c, name)}")

# %% [markdown]
# - `act`: the MLP's gate is a GELU instead of a SiLU; two nearly equal curves.
# - `norm_offset`: norms multiply by 1 + w, so that weights near 0 mean "leave it as it is".
# - `embed_scale`: embeddings are multiplied by the root of `dim`.
# - `post_norm`: a second norm after each attention and MLP, before the sum.
# - `query_scale`: scores are divided by the root of a number of its own, not by that of D.
# - `attn_softcap`, `final_softcap`: cap · tanh(z / cap) keeps scores and logits within ±cap (Gemma 2,
#   section 2).
# - `window`: every second block sees only the last `window` tokens.
#
# What is each one worth? Set one field at a time back to Llama's value, keep all the weights, and measure the
# loss: minus the natural logarithm of the probability of each next token, on the same story. (The unit of
# natural logarithms is the *nat*.)
#
# **Predict:** which field hurts most when it is wrong? Which one would you not notice?

# %%
def loss(m):
    return float(torch.nn.functional.cross_entropy(m(line)[0, :-1], line[0, 1:]))


def with_field(name):
    other = Transformer(replace(gemma.c, **{name: llama[name]})).to(device)
    other.load_state_dict(gemma.state_dict(), strict=False)             # all weights but unused post-norms
    return other.eval()


losses = {"as trained": loss(gemma)} | {name: loss(with_field(name)) for name in differs}
for name, value in losses.items():
    print(f"{name:14} {value:7.3f} nats a token")

# %%
figure, ((side,),) = plots.axes(1, 1, width=7, height=3.2)
order = sorted(losses, key=losses.get)
guess = torch.tensor(float(gemma.c.vocab_size)).log()         # all tokens equally likely
side.barh(order, [losses[name] for name in order],
          color=[plots.HUES[2] if name == "as trained" else plots.HUES[0] for name in order])
side.axvline(float(guess), color=plots.HUES[1], ls="--", lw=1)
side.text(float(guess), -0.4, " blind guess", color=plots.HUES[1], fontsize=9, va="top")
side.set(xlabel="loss, nats a token, with this one field as in Llama", ylim=(-1.1, len(order) - 0.4))
figure

# %% [markdown]
# Some mistakes make noise, and anybody finds them. Others hardly change the loss: the text still looks right.
# The quiet ones are the dangerous ones for whoever ports a model, and they are why the library's tests
# compare logits and not texts. (`query_scale` may cost exactly nothing: where it was set to the root of D, as
# in our small model, the two agree.)
#
# ## Questions
#
# Answer first; unfold the answer; then run the cell that checks it.
#
# **1.** Two tokens of the prompt are exchanged, say the third and the fourth. Which rows of the logits
# change?
#
# <details><summary>Answer</summary>
# All rows from the third on. Rows before it cannot see either token.
# </details>

# %%
swapped = tokens.clone()
swapped[0, [2, 3]] = tokens[0, [3, 2]]
changed = ((model(swapped) - model(tokens)).abs().amax(-1)[0] > 1e-3).tolist()
assert not any(changed[:2]) and changed[2]
print("".join("x" if row else "." for row in changed))

# %% [markdown]
# **2.** We leave out the attention of block 0 and run everything else. Which tokens still learn of others,
# and from which block on?
#
# <details><summary>Answer</summary>
# All of them, from block 1 on: a skipped sub-layer is only one term less in the sum. With <i>all</i>
# attentions skipped each position knows only itself.
# </details>

# %%
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
print("the MLPs alone see nothing but their own token")

# %% [markdown]
# **3.** How many numbers must be read to write one token? (Without looking: is it nearer to the number of
# weights, or to the number of tokens so far?)
#
# <details><summary>Answer</summary>
# All weights, except that the embedding table is only looked up; but where it is also the head
# (<code>tied</code>), it is read after all. This is why one pass over three tokens costs hardly more than one
# over a single token: the same weights serve all three.
# </details>

# %%
from control import weight_costs

matrices = sum(p.numel() for n, p in model.named_parameters() if p.dim() > 1 and (c.tied or n != "tok"))
assert weight_costs(c).whole == matrices
print(f"{matrices:,} numbers a token, of which the head has {weight_costs(c).head / matrices:.0%}")

# %% [markdown]
# **4.** Why is RoPE applied to queries and keys, but not to values?
#
# <details><summary>Answer</summary>
# The turn is there so that a <i>product</i> depends on the distance. A value is not compared with anything,
# it is copied; a turned value would say something else at each position.
# </details>

# %%
same = torch.tensor([ids[:1] + [ids[1]] * 8], device=device)    # one word, eight times
x = model.blocks[0].attn_norm(model.embed(same))
v = x[0] @ model.blocks[0].attn.wqkv.view(*model.blocks[0].attn.grouped, c.dim)[0, -1].T
assert torch.allclose(v[1:], v[1].expand_as(v[1:]), atol=1e-5)
print("in block 0 the same word has the same value at every position")

# %% [markdown]
# Next: [the cache](02_kv_cache.ipynb). Writing a text token by token, we would compute all of the above again
# and again for tokens that do not change. What can be kept?
