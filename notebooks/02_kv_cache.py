# %% [markdown]
# # 2. The KV cache: never compute the same key twice
#
# To write a text the model is asked again and again, each time with one token more. Almost everything that it
# computes it has computed before. This notebook keeps what can be kept, and shows the memory slot by slot. It
# also explains why *rolling back*, taking back tokens that turned out wrong, can be nearly free. Speculative
# decoding (notebook 4) rolls back in most of its rounds.
#
# > **The one thing to remember: slot = position, and the cache does not store how full it is. Rolling back is
# > starting the next block earlier.**
#
# Before it: [1, the forward pass](01_forward_pass.ipynb). After it: [3, sampling](03_sampling.ipynb).

# %%
# %run start.py
MODEL = ROOT / "weights" / "stories-llama"      # or a folder with your own Llama or Gemma-2

# %%
import torch

import checkpoint
from model import Placement
from notebooks import plots

torch.set_grad_enabled(False)
model, tokenizer = checkpoint.load(MODEL, dtype=torch.float32)
c, device = model.c, model.tok.device
text = "Once upon a time, there was a dog named Max. Max had a red ball."
prompt = checkpoint.encode(tokenizer, text, c.bos)
print(len(prompt), "tokens in the prompt; the context holds", c.max_len)

# %% [markdown]
# ## Without a cache
#
# The obvious way to write: run the model over the whole text, take the best next token, append it, repeat.

# %%
def write(ids, count):
    """Greedy decoding without a cache. Returns the text and how many positions were computed for it."""
    ids, computed = list(ids), 0
    for _ in range(count):
        logits = model(torch.tensor([ids], device=device))      # (1, T, V): every position, every time
        computed += len(ids)
        ids.append(int(logits[0, -1].argmax()))
    return ids, computed


slow, computed = write(prompt, 20)
print(tokenizer.decode(slow))
print(f"{computed} positions were computed to write 20 tokens")

# %% [markdown]
# In every step only the last row of the logits was used. But what about the states of the other positions,
# are they not needed for the last row? They are: its attention reads their **keys and values**. But it reads
# nothing else of them. And because no token sees a later one, the keys and values of the old tokens are in
# each step the same numbers as in the step before. So keep them.
#
# ## With a cache
#
# The cache is two tensors, one for keys and one for values, with a *slot* for each position of the context:

# %%
from kvcache import KVCache

cache = KVCache(c, batch=1, slots=len(prompt) + 24, dtype=model.attention_dtype(), device=device)
print("k and v:", tuple(cache.k.shape), "= blocks, rows, key-value heads, slots, D")

# %% [markdown]
# The prompt is read in one pass that fills the first slots (*prefill*). After that each pass reads a single
# token, writes its key and value into the next slot, and looks at all slots up to its own.

# %%
def write_cached(ids, count, cache):
    ids, computed, first = list(ids), 0, 0                      # the first block is the whole prompt
    for _ in range(count):
        tokens = torch.tensor([ids[first:]], device=device)
        at = Placement.at(first, len(ids), device)              # slot = position: one range says both
        x = model.run(model.embed(tokens), at, cache)
        computed += tokens.shape[1]
        ids.append(int(model.unembed(x[:, -1:])[0, -1].argmax()))
        first = len(ids) - 1                                    # from now on one token
    return ids, computed


fast, computed = write_cached(prompt, 20, cache)
assert fast == slow
print(f"the same text, with {computed} positions instead")

# %% [markdown]
# **Predict:** how does the time for one more token grow with the length of the text, without a cache and with
# one? Sketch both curves before you run the next cell.

# %%
from support.measure import interleave

lengths = [n for n in (16, 64, 128, 256, 384, 500) if n <= c.max_len]
line = torch.randint(c.vocab_size, (1, max(lengths)), device=device)
full = KVCache(c, 1, max(lengths), model.attention_dtype(), device)
model.run(model.embed(line), Placement.at(0, max(lengths), device), full)
actions = {}
for n in lengths:
    actions["without", n] = lambda n=n: model(line[:, :n])
    actions["with", n] = lambda n=n: model.unembed(
        model.run(model.embed(line[:, n - 1 : n]), Placement.at(n - 1, n, device), full))
times = interleave(actions, repeats=5)      # seconds, the median of five; the actions take turns

# %%
figure, ((left, right),) = plots.axes(1, 2)
for kind, hue, mark in (("without", plots.HUES[1], "s"), ("with", plots.HUES[0], "o")):
    spent = [1e3 * times[kind, n] for n in lengths]
    left.plot(lengths, spent, color=hue, marker=mark, label=f"{kind} a cache")
    computed = [n * (n + 1) / 2 if kind == "without" else n for n in lengths]
    right.plot(lengths, computed, color=hue, marker=mark)
left.set(xlabel="length of the text", ylabel="milliseconds for one more token", ylim=(0, None))
right.set(xlabel="length of the text", ylabel="positions computed for the whole text")
left.legend(frameon=False)
figure

# %% [markdown]
# Without a cache the time grows with the length, and the work for a whole text with its square. With a cache
# one more token costs nearly the same everywhere: reading all the weights takes most of the time, and they do
# not grow. (On a GPU both curves start flatter, because a short text does not fill it.)
#
# ## The cache as a row of slots
#
# From here on we draw the cache. A slot holds the key and the value of one token, in all blocks and heads; we
# write the token into it. Three things happen to slots: a block of tokens is appended, some of them turn out
# to be wrong, and the next block overwrites them.

# %%
from matplotlib.patches import Rectangle

FILL = {"known": ("#0072b240", None), "new": ("#009e7360", None), "dead": ("#80808030", "////"),
        "empty": ("none", None)}                                # a hue, and hatching for who sees no hues

# %%
def draw(rows, size=14):
    """rows: (label, [(text, kind), ...]) from top to bottom; a kind is a key of FILL."""
    figure, ((side,),) = plots.axes(1, 1, width=0.78 * size, height=0.62 * len(rows) + 0.5)
    for y, (label, slots) in enumerate(rows):
        for x, (text, kind) in enumerate(slots + [("", "empty")] * (size - len(slots))):
            fill, hatch = FILL[kind]
            side.add_patch(Rectangle((x, y), 0.94, 0.8, fc=fill, ec="#808080", hatch=hatch, lw=0.8))
            side.text(x + 0.47, y + 0.4, text.strip(), ha="center", va="center", fontsize=8, parse_math=False)
        side.text(-0.2, y + 0.4, label, ha="right", va="center", fontsize=9)
    side.set(xlim=(0, size), ylim=(len(rows), -0.1), xticks=[], yticks=[])
    side.spines[:].set_visible(False)
    return figure

# %% [markdown]
# Here is one round of speculative decoding, seen from the cache. Somebody guesses three tokens. The model
# reads the last known token and the three guesses as one block. It finds the first guess right and the
# second wrong, and puts its own token there. So two slots hold keys of tokens that are not part of the text:
# they are *dead*. In the picture known tokens are blue, those that the pass reads are green, and dead slots
# are hatched. Guesses that are still open, or wrong, have a question mark.

# %% tags=["gallery"]
names = [tokenizer.decode([t], skip_special_tokens=False) for t in slow[len(prompt) - 5 :]]
past = [(t, "known") for t in names[:5]]
good, other, later = names[5], names[6], names[7]
wrong = [("blue?", "dead"), ("sky?", "dead")]
block = [(t, "new") for t in (names[4], good + "?", "blue?", "sky?")]
more = [(other, "new"), (later + "?", "new")]
draw([("after the prompt", past[:4]),
      ("the block: last token, 3 guesses", past[:4] + block),
      ("one kept, one refused, one not tested", past + [(good, "known")] + wrong),
      ("the next block overwrites them", past + [(good, "known")] + more)], size=11)

# %% [markdown]
# Nothing was deleted. The next block begins at the first dead slot and overwrites it. Dead slots after it do
# no harm, because **a token sees only slots up to its own**, and those were all written by then. Nobody
# needs to know how full the cache is: where a block stands says everything.
#
# Let us check it with real tensors: after the right text we write rubbish into the cache, go back, and go on.

# %%
def step(ids, start, cache):
    """Read ids[start:] as one block and return the logits after its last token. (V,)"""
    block = torch.tensor([ids[start:]], device=device)
    x = model.run(model.embed(block), Placement.at(start, len(ids), device), cache)
    return model.unembed(x[:, -1:])[0, 0]


n = len(prompt)
cache = KVCache(c, 1, n + 16, model.attention_dtype(), device)
before = step(prompt, 0, cache)
rubbish = prompt + torch.randint(c.vocab_size, (10,)).tolist()
step(rubbish, n, cache)                                         # ten wrong guesses fill slots n .. n+9
after = step(slow[: n + 3], n, cache)                           # rolled back: start again at slot n
clean = model(torch.tensor([slow[: n + 3]], device=device))[0, -1]
assert torch.allclose(after, clean, atol=1e-3)
print("after rubbish and rolling back, largest difference:", float((after - clean).abs().max()))

# %% [markdown]
# ## Who sees which slot: the one mask
#
# `model.visible` is the only rule. Its arguments are the positions of a block, and it returns for each of its
# tokens the slots that may be read. Three cases with slots 0 to 11 from left to right, black where a token
# sees:

# %%
from model import visible


def positions(first, count):
    return torch.arange(first, first + count)[None]             # (1, T)


cases = {"the prompt: 6 tokens from slot 0": visible(positions(0, 6), positions(0, 6), 12),
         "a block of 4 from slot 6": visible(positions(6, 4), positions(6, 4), 12),
         "the same, with a window of 5": visible(positions(6, 4), positions(6, 4), 12, window=5)}
# %%
figure, (sides,) = plots.axes(1, 3, width=4, height=2.4)
for side, (name, mask) in zip(sides, cases.items(), strict=True):
    side.imshow(mask[0], cmap="Greys", vmin=0, vmax=1.3)
    side.set_xticks([x - 0.5 for x in range(13)], [""] * 13)
    side.set_yticks(range(mask.shape[1]), [f"token {i}" for i in range(mask.shape[1])], fontsize=8)
    side.grid(axis="x", color="#c0c0c0", lw=0.5)
    side.set_title(name, fontsize=10)
    side.set_xlabel("slots 0 to 11", fontsize=9)
figure

# %% [markdown]
# The slots at the right are white for everybody, whatever they hold. That is why dead slots need no cleaning.
#
# ## Ragged rows for free
#
# With a batch of texts, each row accepts another number of guesses. So the rows become *ragged*: their ends
# no longer stand in one column. Where slot = position this needs no code: each row hands in its own
# positions.

# %%
from speculative import generate

texts = ["Once upon a time", "The little bird was very tired. It wanted to"]
prompts = [checkpoint.encode(tokenizer, t, c.bos) for t in texts]
together, _ = generate(model, prompts, 12)
alone = [generate(model, [p], 12)[0][0] for p in prompts]
assert together == alone
for p, out in zip(prompts, together, strict=True):
    print(f"{len(p)} tokens, then:", tokenizer.decode(out))

# %% [markdown]
# The end of both rows, with guesses that we have made up: all three are right in one row, and one in the
# other.

# %%
rows = []
for p, out, kept in zip(prompts, together, (3, 1), strict=True):
    known = [(tokenizer.decode([t])[:7] or "start", "known") for t in p][-7:]
    text = [tokenizer.decode([t])[:7] for t in out]
    known += [(t, "known") for t in text[:kept]]
    rows += [(f"{kept} of 3 guesses were right", known + [("sky?", "dead"), ("blue?", "dead")][: 3 - kept]),
             ("the next block", known + [(t, "new") for t in text[kept : kept + 3]])]
draw(rows, size=13)

# %% [markdown]
# ## The classical cache, and the bug that it invites
#
# Most libraries grow their cache with `cat` and cut it with `truncate`. Here it is in a dozen lines. It works
# as long as no call is forgotten.

# %%
class CatCache:
    def __init__(self, layers):
        self.k, self.v = [None] * layers, [None] * layers

    def write(self, layer, k, v, at, start=0):                  # the arguments of KVCache.write
        for kept, new in ((self.k, k), (self.v, v)):
            kept[layer] = new if kept[layer] is None else torch.cat([kept[layer], new], 2)
        return self.k[layer], self.v[layer]

    def truncate(self, n):
        self.k, self.v = ([t[:, :, :n] for t in part] for part in (self.k, self.v))

# %%
classic = CatCache(c.n_layers)
step(prompt, 0, classic)
assert torch.allclose(step(slow[: n + 1], n, classic), step(slow[: n + 1], n, cache), atol=1e-3)
print("one token after the prompt: the same logits as with slots")

# %% [markdown]
# Now a guess is refused, and we forget to truncate.
#
# **Predict:** will there be an error message?

# %%
def after_a_refusal(truncate):
    classic = CatCache(c.n_layers)
    step(prompt, 0, classic)
    wrong = prompt + [(slow[n] + 1) % c.vocab_size]
    step(wrong, n, classic)                                     # the refused guess
    if truncate:
        classic.truncate(n)
    return step(slow[: n + 1], n, classic).softmax(-1)


right, forgot = after_a_refusal(True), after_a_refusal(False)
print("probability that moved:", float((right - forgot).abs().sum() / 2))
for name, p in (("truncated", right), ("forgotten", forgot)):
    print(name, [(tokenizer.decode([t]), round(float(p[t]), 3)) for t in p.topk(3).indices.tolist()])

# %% [markdown]
# No error, only another distribution: the model reads a token that is not in the text. The text that comes
# out looks reasonable, and that is the trouble. And in a batch `truncate` cuts all rows at the same length,
# while each row needs its own. A cache without a length can have neither bug.
#
# ## Three questions that readers ask
#
# > **Why are queries not cached?** A query is used by its own token, once, in the pass that reads it. Keys
# > and values are read by all later tokens. A cached step computes one query, one key and one value in each
# > head, and *reads* all keys and values of the past. Nobody asks for a query of the past.
#
# > **Do two equal words share an entry?** No. A slot belongs to a *position*. In block 0, before the
# > rotation, the entries of two equal words are equal; but from block 1 on each contains what was read around
# > it.

# %%
reading = checkpoint.encode(tokenizer, "Max had a red ball. Tom had a blue ball. They", c.bos)
word = tokenizer.encode(" had").ids[-1]
one, two = [i for i, t in enumerate(reading) if t == word][:2]
cache = KVCache(c, 1, len(reading), model.attention_dtype(), device)
step(reading, 0, cache)
alike = torch.cosine_similarity(cache.v[:, 0, :, one].flatten(1), cache.v[:, 0, :, two].flatten(1)).cpu()
assert torch.isclose(alike[0], torch.tensor(1.0), atol=1e-4) and alike[1:].max() < 0.9999
figure, ((side,),) = plots.axes(1, 1, width=7, height=2.8)
side.bar(range(c.n_layers), alike, color=plots.HUES[0])
side.set(xlabel="block", ylabel="cosine of the two values", ylim=(min(0, float(alike.min())), 1.05),
         title="the values of the two words ' had'")
figure

# %% [markdown]
# > **Does a sliding window shrink the context?** In Gemma-2 every second block sees only the last `window`
# > tokens. But a token that is just inside the window has itself read what was just inside *its* window.
# > With each such block the reach grows by window - 1. And the other blocks see everything anyway.
#
# Let us measure the reach. We take the shipped Gemma-2, narrow its window to 4, run *only* its sliding
# blocks, and change each earlier token in turn: does the last position notice?

# %%
from dataclasses import replace

from model import Transformer

gemma, _ = checkpoint.load(ROOT / "weights" / "stories-gemma2", dtype=torch.float32)
narrow = Transformer(replace(gemma.c, window=4)).to(device)
narrow.load_state_dict(gemma.state_dict())
narrow.double()                                                 # a weak influence counts, rounding does not
T = 24
line = torch.randint(gemma.c.vocab_size, (1, T), generator=torch.Generator().manual_seed(0)).to(device)
changed = line.repeat(T, 1)
changed[range(T), range(T)] = (line[0] + 1) % gemma.c.vocab_size        # row j: token j is another one
sliding = [[2 * i, 2 * i + 1] for i in range(0, gemma.c.n_layers, 2)][:6]

# %%
reach = []
for count in range(len(sliding) + 1):
    subs = [i for pair in sliding[:count] for i in pair]
    at = Placement.at(0, T, device)
    a, b = (narrow.run(narrow.embed(t), at, sublayers=subs)[:, -1] for t in (line, changed))
    reach.append(((a - b).abs().amax(1) > 1e-8).float().cpu())
    assert int(reach[-1].sum()) == min(T, 1 + 3 * count), "each block reaches window - 1 = 3 further"
figure, ((side,),) = plots.axes(1, 1, width=8, height=2.6)
side.imshow(torch.stack(reach), cmap="Greys", vmin=0, vmax=1.4, aspect="auto")
side.set(xlabel="token that was changed (the last one is at the right)", ylabel="sliding blocks run")
figure

# %% [markdown]
# ## How much memory?
#
# $$\text{bytes} = 2 \cdot L \cdot B \cdot H_{kv} \cdot S \cdot D \cdot \text{bytes per number}$$
#
# The 2 stands for keys and values; there are B rows and S slots. Predict first, then measure the tensors.

# %%
def cache_bytes(layers, kv_heads, head_dim, slots, batch=1, size=2):
    return 2 * layers * batch * kv_heads * slots * head_dim * size


cache = KVCache(c, batch=3, slots=c.max_len, dtype=torch.float32, device=device)
predicted = cache_bytes(c.n_layers, c.n_kv_heads, c.head_dim, c.max_len, batch=3, size=4)
assert predicted == cache.k.nbytes + cache.v.nbytes
print(f"three rows of {c.max_len} slots in float32: {predicted / 2**20:.1f} MiB, predicted and measured")

# %% [markdown]
# The same formula for two models that do not fit into this notebook. Their shapes: Llama 3 8B has 32 blocks
# and 8 key-value heads of 128 (Llama team 2024, table 3); Gemma-2 9B has 42 blocks, 8 key-value heads of 256
# and a window of 4,096 in half of the blocks (Gemma team 2024, table 1). Both store two bytes a number.
#
# **Predict:** which one needs more for 8,192 tokens? By how much would it shrink if sliding blocks kept only
# their window?

# %%
GiB, far = 2**30, range(0, 32769, 1024)
curves = {
    "Llama-3-8B": [cache_bytes(32, 8, 128, s) / GiB for s in far],
    "the same without grouping (32 KV heads)": [cache_bytes(32, 32, 128, s) / GiB for s in far],
    "Gemma-2-9B, all slots kept": [cache_bytes(42, 8, 256, s) / GiB for s in far],
    "Gemma-2-9B, sliding blocks keep 4,096": [
        (cache_bytes(21, 8, 256, s) + cache_bytes(21, 8, 256, min(s, 4096))) / GiB for s in far]}
for name, gib in curves.items():
    print(f"{name:40} {gib[8]:5.2f} GiB for 8,192 tokens of one text")
*_, whole, windowed = curves.values()
assert curves["Llama-3-8B"][8] == 1 and whole[8] > 2.6 and windowed[8] == 0.75 * whole[8]

# %%
figure, ((side,),) = plots.axes(1, 1, width=8)
for (name, gib), hue, line in zip(curves.items(), (0, 0, 1, 1), ("-", ":", "-", "--"), strict=True):
    side.plot(far, gib, color=plots.HUES[hue], ls=line, label=name)
side.set(xlabel="tokens of one text", ylabel="GiB")
side.legend(frameon=False)
figure

# %% [markdown]
# Gemma-2-9B needs more than twice as much, and keeping only the windows would save it a quarter. For one
# short text the cache is small beside the weights (16 GB for Llama-3-8B). For many long texts it is the
# larger part, and every token of every pass must read it.
#
# ## Questions
#
# **1.** After a prompt of m tokens, n more are written without a cache. How many positions are computed? How
# many with one?
#
# <details><summary>Answer</summary>
# Without: m + (m+1) + ... + (m+n-1) = n·m + n(n-1)/2. With: m + n - 1, as the last token written is never
# read.
# </details>

# %%
m, count = len(prompt), 20
assert write(prompt, count)[1] == count * m + count * (count - 1) // 2
fresh = KVCache(c, 1, m + count, model.attention_dtype(), device)
assert write_cached(prompt, count, fresh)[1] == m + count - 1
print("counted")

# %% [markdown]
# **2.** The library fills a new cache with zeros, although no token may see an unwritten slot. Why not leave
# the memory as it is?
#
# <details><summary>Answer</summary>
# A hidden slot gets weight 0, but 0 · NaN is NaN. Memory that was never written may hold anything.
# </details>

# %%
poisoned = KVCache(c, 1, m + 8, model.attention_dtype(), device)
poisoned.v[:, :, :, m + 4 :] = torch.nan                        # beyond what the block writes
at = Placement.at(0, m, device)._replace(end=m + 8)             # all slots are read
spoilt = model.unembed(model.run(model.embed(torch.tensor([prompt], device=device)), at, poisoned))
assert spoilt.isnan().any()
print("NaN in slots that no token may see reached the logits")

# %% [markdown]
# **3.** A rejected guess left its key in slot 20. The next block starts at slot 20 and has one token. In
# which pass could a token see the old key?
#
# <details><summary>Answer</summary>
# In none. The pass that starts at slot 20 overwrites it before its attention reads, and every later token
# comes after that.
# </details>

# %%
slots = positions(20, 1)
assert visible(slots, slots, 21)[0, 0].tolist() == [True] * 21  # itself, too: its own key is there by then
assert not visible(positions(19, 1), positions(19, 1), 21)[0, 0, 20]
print("slot 20 is first read by the token that has just overwritten it")

# %% [markdown]
# **4.** How many texts of 8,192 tokens can Llama-3-8B write at a time, until its cache is as large as its
# weights (8.03 billion numbers of two bytes)?
#
# <details><summary>Answer</summary>
# One gibibyte a text, and 16.06 GB of weights are just under 15 GiB: with the fifteenth text the cache is the
# larger one.
# </details>

# %%
assert round(8.03e9 * 2 / 1e9) == 16 and 14 < 8.03e9 * 2 / cache_bytes(32, 8, 128, 8192) < 15
print("from the fifteenth text on")

# %% [markdown]
# Next: [sampling](03_sampling.ipynb). The model gives a distribution. How does it become *one* token?
