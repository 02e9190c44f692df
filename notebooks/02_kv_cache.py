# %% [markdown]
# # 2. The KV cache: never compute the same key twice
#
# To write a text, we run the model again and again, each time with one more token. Almost
# everything it computes was computed before. This notebook keeps what can be kept, and shows the
# memory slot by slot. It also shows why *rolling back*, that is, taking back tokens that turned out
# wrong, can be nearly free. Speculative decoding (notebook 4) rolls back in every round that
# rejects a token.
#
# The library's cache rests on one decision: slot = position, and the cache does not store how full
# it is. To roll back, start the next block of tokens earlier.
#
# You need [1, the forward pass](01_forward_pass.ipynb). About 40 minutes.

# %%
# %run start.py
MODEL = ROOT / "weights" / "stories-llama"      # or a folder with your own Llama or Gemma-2

# %%
from model import Placement

torch.set_grad_enabled(False)
model, tokenizer = checkpoint.load(MODEL, dtype=torch.float32)
c = model.c
device = model.tok.device
text = "Once upon a time, there was a dog named Max. Max had a red ball."
prompt = checkpoint.encode(tokenizer, text, c.bos)
print(len(prompt), "tokens in the prompt; the context holds", c.max_len)

# %% [markdown]
# ## Without a cache
#
# The obvious way to write is to run the model over the whole text, take the most likely next token,
# append it, and repeat.

# %%
def write(ids, count):
    """Greedy decoding without a cache. Returns the text, and how many positions it computed."""
    ids = list(ids)
    computed = 0
    for _ in range(count):
        logits = model(torch.tensor([ids], device=device))      # (1, T, V): all of it, every time
        computed += len(ids)
        ids.append(int(logits[0, -1].argmax()))
    return ids, computed


slow, computed = write(prompt, 20)
print(tokenizer.decode(slow))
print(f"{computed} positions were computed to write 20 tokens")

# %% [markdown]
# Each step used only the last row of the logits. Does that row need the other positions at all? It
# does: the attention of the last token reads their **keys and values**. It reads nothing else of
# them. And since no token sees a later one, the keys and values of old tokens are the same in every
# step. So we keep them.
#
# ## With a cache
#
# The cache is two tensors, one for keys and one for values. Each has one *slot* per position of the
# context:

# %%
from kvcache import KVCache

cache = KVCache(c, batch=1, slots=len(prompt) + 24, dtype=model.attention_dtype(), device=device)
print("k and v:", tuple(cache.k.shape), "= blocks, rows, key-value heads, slots, D")

# %% [markdown]
# One pass over the prompt fills the first slots. This is called the *prefill*. After that, each
# pass reads a single token, writes its key and value into the next slot, and sees all slots up to
# its own.

# %%
def write_cached(ids, count, cache):
    ids = list(ids)
    computed = 0
    first = 0                                                   # the first pass reads all of it
    for _ in range(count):
        tokens = torch.tensor([ids[first:]], device=device)
        at = Placement.span(first, len(ids), device)            # slot = position: one range
        x = model.run(model.embed(tokens), at, cache)
        computed += tokens.shape[1]
        ids.append(int(model.unembed(x[:, -1:])[0, -1].argmax()))
        first = len(ids) - 1                                    # from now on, one token per pass
    return ids, computed


fast, computed = write_cached(prompt, 20, cache)
assert fast == slow
print(f"the same text, with {computed} positions instead")

# %% [markdown]
# **Predict:** how does the time for one more token grow with the length of the text, without a
# cache and with one? Sketch both curves before you run the next two cells.

# %%
from support.measure import interleave

lengths = [n for n in (16, 64, 128, 256, 384, 500) if n <= c.max_len]
line = torch.randint(c.vocab_size, (1, max(lengths)), device=device)
full = KVCache(c, 1, max(lengths), model.attention_dtype(), device)
model.run(model.embed(line), Placement.span(0, max(lengths), device), full)
actions = {}
for n in lengths:
    actions["without", n] = lambda n=n: model(line[:, :n])
    actions["with", n] = lambda n=n: model.unembed(
        model.run(model.embed(line[:, n - 1 : n]), Placement.span(n - 1, n, device), full))
times = interleave(actions, repeats=5)      # seconds: the median of five; the actions take turns

# %% jupyter={"source_hidden": true}
figure, ((left, right),) = plots.axes(1, 2)
spent = {f"{kind} a cache": [1e3 * times[kind, n] for n in lengths] for kind in ("without", "with")}
plots.curves(left, lengths, spent, xlabel="length of the text",
             ylabel="milliseconds for one more token", ylim=(0, None))
work = {"without a cache": [n * (n + 1) // 2 for n in lengths], "with a cache": lengths}
plots.curves(right, lengths, work, xlabel="length of the text",
             ylabel="positions computed for the whole text")
figure

# %% [markdown]
# Without a cache, the time per token grows with the length, and the work for a whole text with its
# square. With a cache, most of the time for one more token goes into work that does not depend on
# the length, such as reading the weights. (On a GPU the upper curve starts out flatter, because a
# short text does not fill it.)
#
# ## Several tokens in one pass
#
# A pass over several tokens reads the weights once, as a pass over one does. The whole course rests
# on how much longer it takes: a pass that checks a draft is a pass over several tokens.
#
# **Predict:** how much longer does a pass over 4 tokens take than a pass over one? And over 32?

# %%
widths = 1, 2, 4, 8, 16, 32
n = 64
blocks = {T: lambda T=T: model.unembed(
    model.run(model.embed(line[:, n : n + T]), Placement.span(n, n + T, device), full))
    for T in widths}
taken = interleave(blocks, repeats=15)
relative = {T: taken[T] / taken[1] for T in widths}
print(", ".join(f"{T} tokens {relative[T]:.2f}" for T in widths))

# %% jupyter={"source_hidden": true}
figure, ((side,),) = plots.axes(1, 1, width=6)
plots.curves(side, widths, {"measured here": [*relative.values()], "T tokens cost T": widths},
             xlabel="tokens in a pass", ylabel="time, relative to one token", ylim=(0, 12),
             title="what a block costs")
figure

# %% [markdown]
# A pass over several tokens costs far less than as many passes over one. How much more than a
# single one depends on the machine and on the model: [notebook 12](12_close_to_the_machine.ipynb)
# shows why, and [BENCHMARKS](../lab/BENCHMARKS.md#fast-passes) measures it on an idle machine,
# where a block of four tokens of a large model costs hardly more than one.
#
# ## The cache as a row of slots
#
# From here on we draw the cache. A slot holds the key and the value of one token, in all blocks and
# heads. The picture writes the token into it. Three things happen: a block of tokens is appended,
# some of them turn out to be wrong, and the next block overwrites those.
#
# Here is one round of speculative decoding, as the cache sees it. Something cheap drafts three
# tokens. The model reads the last known token and the three drafted ones as one block. It accepts
# the first drafted token, rejects the second, and writes its own token in that place. Two slots now
# hold keys of tokens that are not part of the text. We call these slots *dead*.
#
# Known tokens are blue. Tokens that the current pass reads are green. Dead slots are hatched. A
# question mark stands after a drafted token that has not been accepted.

# %% tags=["gallery"] jupyter={"source_hidden": true}
names = [tokenizer.decode([t], skip_special_tokens=False) for t in slow[len(prompt) - 5 :]]
past = [(t, "known") for t in names[:5]]
good = names[5]
other = names[6]
later = names[7]
wrong = [("blue?", "dead"), ("sky?", "dead")]
block = [(t, "new") for t in (names[4], good + "?", "blue?", "sky?")]
more = [(other, "new"), (later + "?", "new")]
picture = [("all but the last token of the prompt", past[:4]),
           ("the block: the last token, 3 drafted", past[:4] + block),
           ("1 accepted, 1 rejected, 1 not tested", past + [(good, "known")] + wrong),
           ("the next block overwrites them", past + [(good, "known")] + more)]
plots.draw_slots(picture, [len(prompt) - 5] * 4, size=10)

# %% [markdown]
# Nothing was deleted. The next block begins at the first dead slot and overwrites it. Dead slots
# further to the right do no harm, because **a token sees only slots up to its own**, and all of
# those have been rewritten by then. So the cache need not know how full it is. The positions of the
# next block say everything.
#
# We check this with real tensors. After the correct text we write ten wrong tokens into the cache,
# roll back, and continue.

# %%
def step(ids, start, cache):
    """Read ids[start:] as one block and return the logits after its last token. (V,)"""
    block = torch.tensor([ids[start:]], device=device)
    x = model.run(model.embed(block), Placement.span(start, len(ids), device), cache)
    return model.unembed(x[:, -1:])[0, 0]


n = len(prompt)
back = 0
cache = KVCache(c, 1, n + 16, model.attention_dtype(), device)
step(prompt, 0, cache)
rubbish = prompt + torch.randint(c.vocab_size, (10,)).tolist()
step(rubbish, n, cache)                                         # ten wrong tokens from slot n on
after = step(slow[: n + 3], n + back, cache)                    # roll back: start again at slot n
clean = model(torch.tensor([slow[: n + 3]], device=device))[0, -1]
print("after rubbish and rolling back, largest difference:", float((after - clean).abs().max()))
assert back > 0 or torch.allclose(after, clean, atol=1e-3)

# %% [markdown]
# **Try it:** set `back = 1`, so that the block starts one slot too late. What do you expect: an
# error, a large difference, or none? And with `back = -1`, one slot too early?
#
# <details><summary>Answer</summary>
# With 1 there is no error, but a large difference: one wrong token stays in sight. With -1 there is
# none: the block reads the last token of the prompt again, and writes the same key and value.
# </details>
#
# ## Who sees which slot: the one mask
#
# `model.visible` is the only rule. It takes the positions of a block, and returns for each token
# which slots it may read. Below are three cases with the slots 0 to 11 from left to right. Black
# means that the token sees the slot. (The window belongs to Gemma-2: in every second block a token
# sees only the last few slots.)

# %%
from model import visible


def positions(first, count):
    return torch.arange(first, first + count)[None]             # (1, T)


window = 5
block = positions(6, 4)
cases = {"the prompt: 6 tokens from slot 0": visible(positions(0, 6), positions(0, 6), 12),
         "a block of 4 from slot 6": visible(block, block, 12),
         f"the same, with a window of {window}": visible(block, block, 12, window=window)}
plots.draw_masks(cases)

# %% [markdown]
# The slots on the right are white for every token, whatever they hold. That is why dead slots need
# no cleaning.
#
# **Try it:** set `window = 1`. How many black squares will each row of the third picture have, and
# where?
#
# <details><summary>Answer</summary>
# One: each token sees only its own slot.
# </details>
#
# ## Ragged rows for free
#
# In a batch of texts, each row accepts a different number of drafted tokens. The rows become
# *ragged*: they no longer end in the same column. Where slot = position, this needs no extra code.
# Each row brings its own positions.

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
# Here are the ends of both rows, with drafted tokens that we made up. In the first row all three
# are accepted, in the second row only one.

# %% jupyter={"source_hidden": true}
rows = []
firsts = []
for p, out, accepted in zip(prompts, together, (3, 1), strict=True):
    known = [(tokenizer.decode([t])[:7] or "start", "known") for t in p][-6:]
    firsts += 2 * [max(0, len(p) - 6)]
    text = [tokenizer.decode([t])[:7] for t in out]
    known += [(t, "known") for t in text[:accepted]]
    dead = [("sky?", "dead"), ("blue?", "dead")][: 3 - accepted]
    block = [text[accepted], *(t + "?" for t in text[accepted + 1 : accepted + 3])]
    rows += [(f"{accepted} of 3 accepted", known + dead),
             ("the next block", known + [(t, "new") for t in block])]
plots.draw_slots(rows, firsts)

# %% [markdown]
# ## The usual cache, and the bug that comes with it
#
# Many libraries grow their cache with `cat` and cut it with `truncate`. Here it is in a dozen
# lines. It works as long as you never forget a call.

# %%
class CatCache:
    def __init__(self, layers):
        self.k = [None] * layers
        self.v = [None] * layers

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
# Now a drafted token is rejected, and we forget to truncate.
#
# **Predict:** will there be an error message?

# %%
def after_a_rejection(truncate):
    classic = CatCache(c.n_layers)
    step(prompt, 0, classic)
    wrong = prompt + [(slow[n] + 1) % c.vocab_size]
    step(wrong, n, classic)                                     # the rejected token
    if truncate:
        classic.truncate(n)
    return step(slow[: n + 1], n, classic).softmax(-1)


right = after_a_rejection(True)
forgot = after_a_rejection(False)
print(f"probability that moved: {float((right - forgot).abs().sum() / 2):.3f}")
for name, p in (("truncated", right), ("forgotten", forgot)):
    top = p.topk(3).indices.tolist()
    print(name, [(tokenizer.decode([t]), round(float(p[t]), 3)) for t in top])

# %% [markdown]
# There is no error, only a different distribution: the model reads a token that is not in the text.
# The output still looks reasonable, which makes the bug hard to find. (With two tokens there would
# be an error, because our mask is made from positions, and its width is not that of the cache. A
# mask made from the length of the cache fits at any length, and the bug stays silent.) A batch
# makes it worse: `truncate` cuts all rows at the same length, but each row needs its own. A cache
# without a length can have neither bug.
#
# ## Three questions that readers ask
#
# > **Why are queries not cached?** A query is used once, by its own token, in the pass that reads
# > that token. Keys and values are read by all later tokens. A cached step computes one query, one
# > key and one value per head, and *reads* all earlier keys and values. No later step needs an old
# > query.
#
# > **Do two equal words share an entry?** No. A slot belongs to a *position*. In block 0 the values
# > of two equal words are equal, and so are their keys before the rotation. From block 1 on, they
# > depend on the text before the word. The picture compares the two values of the word " had" in
# > one text.

# %%
reading = checkpoint.encode(tokenizer, "Max had a red ball. Tom had a blue ball. They", c.bos)
word = tokenizer.encode(" had").ids[-1]
one, two = [i for i, t in enumerate(reading) if t == word][:2]
cache = KVCache(c, 1, len(reading), model.attention_dtype(), device)
step(reading, 0, cache)
values = [cache.v[:, 0, :, at].flatten(1) for at in (one, two)]         # (L, H_kv * D) of each
alike = torch.cosine_similarity(*values).cpu()
assert torch.isclose(alike[0], torch.tensor(1.0), atol=1e-4) and alike[1:].max() < 0.9999

# %% jupyter={"source_hidden": true}
figure, ((side,),) = plots.axes(1, 1, width=8, height=2.8)
side.bar(range(c.n_layers), alike, color=plots.HUES[0])
side.set(xlabel="block", ylabel="cosine of the two values", ylim=(min(0, float(alike.min())), 1.05))
figure

# %% [markdown]
# > **Does a sliding window shrink the context?** Less than it seems. In Gemma-2 every second block
# > sees only the last `window` tokens. But a token at the edge of the window has itself read what
# > was at the edge of *its* window. Each such block extends the reach by window - 1. And the other
# > blocks see everything anyway.
#
# We measure the reach. Take the shipped Gemma-2, narrow its window to 4, and run *only* its sliding
# blocks. Then change one earlier token at a time: does the last position notice?

# %%
from dataclasses import replace

from model import Transformer

gemma, _ = checkpoint.load(ROOT / "weights" / "stories-gemma2", dtype=torch.float32)
narrow = Transformer(replace(gemma.c, window=4)).to(device)
narrow.load_state_dict(gemma.state_dict())
narrow.double()                                     # rounding would hide a weak influence
T = 24
g = torch.Generator().manual_seed(0)
line = torch.randint(gemma.c.vocab_size, (1, T), generator=g).to(device)
changed = line.repeat(T, 1)
changed[range(T), range(T)] = (line[0] + 1) % gemma.c.vocab_size        # row j: token j differs
sliding = [[2 * i, 2 * i + 1] for i in range(0, gemma.c.n_layers, 2)][:6]
reach = []
for count in range(len(sliding) + 1):
    subs = [i for pair in sliding[:count] for i in pair]
    at = Placement.span(0, T, device)
    a, b = (narrow.run(narrow.embed(t), at, sublayers=subs)[:, -1] for t in (line, changed))
    reach.append(((a - b).abs().amax(1) > 1e-8).float().cpu())
    assert int(reach[-1].sum()) == min(T, 1 + 3 * count), "each block reaches 3 further"

# %% jupyter={"source_hidden": true}
figure, ((side,),) = plots.axes(1, 1, width=8, height=2.6)
side.imshow(torch.stack(reach), cmap="Greys", vmin=0, vmax=1.4, aspect="auto")
side.set(xlabel="the token that was changed (the last one is on the right)",
         ylabel="sliding blocks run", title="black: the last position notices",
         yticks=range(len(reach)))
figure

# %% [markdown]
# ## How much memory?
#
# $$\text{bytes} = 2 \cdot L \cdot B \cdot H_{kv} \cdot S \cdot D \cdot \text{bytes per number}$$
#
# The 2 stands for keys and values. There are B rows and S slots. We compute the size first, and
# then look at the tensors.

# %%
def cache_bytes(layers, kv_heads, head_dim, slots, batch=1, size=2):
    return 2 * layers * batch * kv_heads * slots * head_dim * size


cache = KVCache(c, batch=3, slots=c.max_len, dtype=torch.float32, device=device)
predicted = cache_bytes(c.n_layers, c.n_kv_heads, c.head_dim, c.max_len, batch=3, size=4)
assert predicted == cache.k.nbytes + cache.v.nbytes
print(f"three rows of {c.max_len} slots in float32: {predicted / 2**20:.1f} MiB, as predicted")

# %% [markdown]
# The same formula for two models that are too large for this notebook. Llama 3 8B has 32 blocks and
# 8 key-value heads of 128 numbers (Llama team 2024, table 3). Gemma-2 9B has 42 blocks, 8 key-value
# heads of 256 numbers, and a window of 4,096 in half of its blocks (Gemma team 2024, table 1). Both
# store two bytes per number.
#
# **Predict:** which one needs more memory for 8,192 tokens? How much would Gemma-2 save if its
# sliding blocks kept only their window?

# %%
GiB = 2**30
far = range(0, 32769, 1024)
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

# %% jupyter={"source_hidden": true}
figure, ((side,),) = plots.axes(1, 1, width=8)
for (name, gib), hue, line in zip(curves.items(), (0, 0, 1, 1), ("-", ":", "-", "--"), strict=True):
    side.plot(far, gib, color=plots.HUES[hue], ls=line, label=name)
side.set(xlabel="tokens of one text", ylabel="GiB")
side.legend(frameon=False)
figure

# %% [markdown]
# At 8,192 tokens Gemma-2-9B needs more than twice as much, and keeping only the windows would save
# a quarter of it. For one short text the cache is small compared with the weights (16 GB for
# Llama-3-8B). For many long texts it is the larger part, and every pass must read all of it.
#
# **Try it:** a device holds 24 GB. How many texts of 8,192 tokens fit beside Llama-3-8B? And with 8
# bits per number (`size=1`)?
#
# <details><summary>Answer</summary>
# 7.9 GB are left. A text takes one gibibyte, so seven fit. With 8 bits it takes half of one, so
# fourteen do.
# </details>
#
# ## Questions
#
# Answer first. Then unfold the answer, and the check that is folded below it.
#
# **1.** After a prompt of m tokens, we write n more without a cache. How many positions are
# computed? How many with a cache?
#
# <details><summary>Answer</summary>
# Without: m + (m+1) + ... + (m+n-1) = n·m + n(n-1)/2. With: m + n - 1, because the last token
# written is never read.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
m = len(prompt)
count = 20
assert write(prompt, count)[1] == count * m + count * (count - 1) // 2
fresh = KVCache(c, 1, m + count, model.attention_dtype(), device)
assert write_cached(prompt, count, fresh)[1] == m + count - 1
print("both counts agree")

# %% [markdown]
# **2.** The library fills a new cache with zeros, although no token may see an unwritten slot. Why
# not leave the memory as it is?
#
# <details><summary>Answer</summary>
# A hidden slot gets weight 0, but 0 · NaN is NaN. Memory that was never written may hold anything.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
poisoned = KVCache(c, 1, m + 8, model.attention_dtype(), device)
poisoned.v[:, :, :, m + 4 :] = torch.nan                        # beyond what the block writes
at = Placement.span(0, m, device)._replace(end=m + 8)             # all slots are read
spoilt = model.unembed(model.run(model.embed(torch.tensor([prompt], device=device)), at, poisoned))
assert spoilt.isnan().any()
print("NaN in slots that no token may see reached the logits")

# %% [markdown]
# **3.** A rejected token left its key in slot 20. The next block starts at slot 20 and has one
# token. In which pass could a token see the old key?
#
# <details><summary>Answer</summary>
# In none. The pass that starts at slot 20 overwrites the slot before its attention reads it, and
# every later token comes after that.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
slots = positions(20, 1)
assert visible(slots, slots, 21)[0, 0].tolist() == [True] * 21  # its own key is there by then
assert not visible(positions(19, 1), positions(19, 1), 21)[0, 0, 20]
print("slot 20 is first read by the token that has just overwritten it")

# %% [markdown]
# **4.** Llama-3-8B writes several texts of 8,192 tokens at the same time. From how many texts on is
# its cache larger than its weights (8.03 billion numbers of two bytes)?
#
# <details><summary>Answer</summary>
# The cache takes one gibibyte per text. The weights take 16.06 GB, which is just under 15 GiB. So
# with the fifteenth text the cache becomes the larger one.
# </details>

# %% jupyter={"source_hidden": true, "outputs_hidden": true}
weights = 8.03e9 * 2
one_text = cache_bytes(32, 8, 128, 8192)
assert round(weights / 1e9) == 16 and 14 < weights / one_text < 15
fitting = [int((24e9 - weights) // (one_text * share)) for share in (1, 0.5)]   # the trial above
assert fitting == [7, 14]
print("from the fifteenth text on")

# %% [markdown]
# Next: [sampling](03_sampling.ipynb). The model gives a distribution. How does it become *one*
# token?
