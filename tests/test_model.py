"""The forward pass against `transformers`, against itself without a cache, and against arithmetic by hand.

One thing to remember: in float64 both sides agree to 1e-14, so that 1e-12 leaves no room for a mistake.
"""
import json
import math
from dataclasses import replace

import expected
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from teach import compare, look
from tiny import DEVICES, GEMMA, LLAMA, devices, fork, make

import checkpoint
from kvcache import KVCache
from model import RMSNorm, Transformer, frequencies, rope, rotate, softcap, visible
from speculative import prefill

SCALING = expected.LLAMA3 | {"original_max_position_embeddings": 16}
LLAMA3 = replace(LLAMA, rope_theta=50.0, rope_scaling=SCALING)
CONFIGS = {"llama": LLAMA, "llama3": LLAMA3, "gemma2": GEMMA}
families = pytest.mark.parametrize("name", CONFIGS)


def error(got, want):
    return float((got - want).abs().max() / want.abs().max())


def some_tokens(B, T, device="cpu", seed=1):
    return torch.randint(17, (B, T), generator=torch.Generator().manual_seed(seed)).to(device)


def some_x(B, T):
    return torch.randn(B, T, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def new_cache(m, B, slots):
    return KVCache(m.c, B, slots, m.attention_dtype(), m.tok.device)


def whole(m, tokens):
    """The final states without a cache, in one block: what every other way must give."""
    return m.run(m.embed(tokens), slice(0, tokens.shape[1]))


# --- against transformers


@devices
@pytest.mark.parametrize("name", expected.MODELS)
def test_logits_are_those_of_transformers(name, device, tmp_path):
    theirs, ids = expected.build(name), expected.texts(2, 40)
    theirs.save_pretrained(tmp_path)
    expected.byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    m, _ = checkpoint.load(tmp_path, device, torch.float64)
    assert error(m(ids.to(device)).cpu(), expected.logits(theirs, ids)) < 1e-12


def unpack(name, folder):
    """A committed file -> our model, the input ids, the logits they must give."""
    with safe_open(expected.HERE / f"{name}.safetensors", framework="pt") as f:
        tensors = {key: f.get_tensor(key) for key in f.keys()}
        config = json.loads(f.metadata()["config"])
    ids, want = tensors.pop("input_ids"), tensors.pop("logits")
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    expected.byte_tokenizer().save(str(folder / "tokenizer.json"))
    return checkpoint.load(folder, "cpu", torch.float64)[0], ids, want


@pytest.mark.parametrize("name", ["llama", "llama3", "gemma2"])
def test_logits_are_the_committed_ones(name, tmp_path):
    m, ids, want = unpack(name, tmp_path)
    assert error(m(ids), want) < 1e-12


OTHER = {"llama": dict(norm_eps=1.1e-5, rope_theta=9999.0, act="gelu", norm_offset=1e-5, embed_scale=1.001,
                       query_scale=0.251, attn_softcap=50.0, final_softcap=1000.0, window=23),
         "llama3": dict(rope_scaling=None, rope_theta=499.0),
         "gemma2": dict(norm_eps=1.1e-5, rope_theta=9999.0, act="silu", norm_offset=0.999, embed_scale=5.65,
                        query_scale=None, attn_softcap=None, final_softcap=None, window=7)}
CHANGES = [(name, field, value) for name, fields in OTHER.items() for field, value in fields.items()]
CHANGES += [("llama3", "rope_scaling", expected.LLAMA3 | {key: expected.LLAMA3[key] * 1.01}) for key in
            ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")]


@pytest.mark.parametrize("name, field, value", CHANGES, ids=[str(i) for i in range(len(CHANGES))])
def test_the_committed_logits_see_every_field(name, field, value, tmp_path):
    """A wrong config field cannot hide: a small change of any of them is a thousand tolerances away."""
    m, ids, want = unpack(name, tmp_path)
    twin = Transformer(replace(m.c, **{field: value})).double().requires_grad_(False)
    twin.load_state_dict(m.state_dict(), strict=False)
    twin.scale.fill_(twin.c.embed_scale)
    assert error(twin(ids), want) > 1e-9, f"{field} = {value!r} changes nothing"


# --- blocks, caches, ragged rows


@devices
@families
@pytest.mark.parametrize("block", [1, 3, 20])
def test_cached_blocks_equal_the_full_pass(name, block, device):
    """Also where the window, 5, is shorter than the block, and where the last block is short."""
    m, tokens = make(CONFIGS[name], device=device), some_tokens(2, 20, device)
    assert error(prefill(m, tokens, new_cache(m, 2, 24), block), whole(m, tokens)) < 1e-12


@devices
@families
def test_rows_at_different_places_equal_their_full_passes(name, device):
    """Prompts end inside a prefill block, rows advance unevenly; dead slots hold garbage."""
    m, tokens = make(CONFIGS[name], device=device), some_tokens(3, 32, device)
    cache, n, T = new_cache(m, 3, 32), torch.tensor([4, 13, 1], device=device), 4
    row = torch.arange(3, device=device)
    slot = torch.arange(32, device=device)
    wrong = torch.where(slot < n[:, None], tokens, (tokens + 1) % 17)
    x = prefill(m, wrong[:, :13], cache, 6)
    want = whole(m, tokens)
    for b in range(3):
        assert error(x[b, : n[b]], want[b, : n[b]]) < 1e-12
    for advance in ([1, 4, 2], [4, 0, 3], [2, 1, 4], [0, 0, 0]):
        dead = (slot >= n[:, None])[None, :, None, :, None]
        cache.k.masked_fill_(dead, 1e3)
        cache.v.masked_fill_(dead, -1e3)
        at = n[:, None] + torch.arange(T, device=device)
        x = m.run(m.embed(tokens[row[:, None], at]), at, cache, span=slice(int(n.min()), int(n.max()) + T))
        assert error(x, want[row[:, None], at]) < 1e-12
        n = n + torch.tensor(advance, device=device)


@families
def test_slices_and_tensors_of_positions_agree(name):
    """With a cache, in blocks that end anywhere, with any host bounds `span`, and without a cache."""
    m, tokens = make(CONFIGS[name]), some_tokens(2, 20)
    x, one, other = m.embed(tokens), new_cache(m, 2, 24), new_cache(m, 2, 24)
    for start, stop, span in ((0, 7, slice(0, 7)), (7, 8, slice(5, 9)), (8, 13, None),
                              (11, 17, slice(11, 24)), (17, 20, slice(17, 20))):
        at = torch.arange(start, stop).expand(2, -1)
        a = m.run(x[:, start:stop], slice(start, stop), one)
        b = m.run(x[:, start:stop], at, other, span=span)
        assert error(a, b) < 1e-12
        assert torch.allclose(one.k, other.k, rtol=1e-12, atol=1e-13)
        assert torch.allclose(one.v, other.v, rtol=1e-12, atol=1e-13)
    assert error(m.run(x, torch.arange(20).expand(2, -1)), m.run(x, slice(0, 20))) < 1e-12


@families
def test_a_single_token_needs_no_mask(name):
    """A slice of one token reads the last W slots and masks none, in texts shorter and longer than W."""
    m, tokens = make(CONFIGS[name]), some_tokens(2, 20)
    one, other, want = new_cache(m, 2, 24), new_cache(m, 2, 24), whole(m, tokens)
    assert m.masks(want[:, :1], slice(3, 4), slice(3, 4), 4, None)[m.c.window] is None
    for t in range(20):
        x = m.embed(tokens[:, t : t + 1])
        masked = m.run(x, torch.full((2, 1), t), other, span=slice(t, t + 1))
        assert error(m.run(x, slice(t, t + 1), one), want[:, t : t + 1]) < 1e-12
        assert error(masked, want[:, t : t + 1]) < 1e-12


@devices
@families
@pytest.mark.parametrize("as_tree", [False, True])
def test_sliding_layers_read_their_window_only(name, device, as_tree):
    """Rows at 14 and 11: with W = 5 the slots before 7 are not touched, though they hold NaN."""
    m, T, n = make(CONFIGS[name], device=device), 4, torch.tensor([14, 11], device=device)
    tokens, cache, read = some_tokens(2, 24, device), new_cache(m, 2, 24), {}
    prefill(m, tokens[:, :14], cache)
    slots, tree = n[:, None] + torch.arange(T, device=device), None             # (2, T)
    where = {"slots": slots}
    if as_tree:     # two branches below the first token
        tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], device=device).bool()
        where |= {"tree": tree}
    positions = slots if tree is None else n[:, None] + tree.sum(-1) - 1
    x = m.embed(tokens[:, -T:])
    want = m.run(x, positions, fork(cache), **where)   # without a span all slots are read
    if m.c.window is not None:
        cache.k[::2, :, :, :7] = cache.v[::2, :, :, :7] = math.nan
    write = cache.write

    def watched(layer, *args, **more):
        keys, values = write(layer, *args, **more)
        read[layer] = keys.shape[2], values.shape[2]
        return keys, values

    cache.write = watched
    got = m.run(x, positions, cache, **where, span=slice(11, 18))
    assert error(got, want) < 1e-12
    few, all_of_them = (18 if m.c.window is None else 11,) * 2, (18, 18)
    assert read == {0: few, 1: all_of_them, 2: few, 3: all_of_them, 4: few, 5: all_of_them}


@families
def test_a_long_block_reads_its_window_only(name):
    m, x = make(CONFIGS[name]), some_x(2, 20)
    want, cache = m.run(x, slice(0, 20)), new_cache(m, 2, 24)
    m.run(x[:, :12], slice(0, 12), cache)
    if m.c.window is not None:
        cache.k[::2, :, :, :8] = math.nan
    assert error(m.run(x[:, 12:], slice(12, 20), cache), want[:, 12:]) < 1e-12


def test_a_tree_of_one_row_reads_its_window_only():
    """As the loop lays it out on the CPU: the slots are a slice, the positions are not."""
    m, x, tree = make(CONFIGS["gemma2"]), some_x(1, 15), torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]])
    cache, where = new_cache(m, 1, 24), {"slots": slice(12, 15), "tree": tree.bool()}
    m.run(x[:, :12], slice(0, 12), cache)
    want = m.run(x[:, 12:], torch.tensor([[12, 13, 13]]), fork(cache), **where)
    cache.k[::2, :, :, :8] = math.nan
    got = m.run(x[:, 12:], torch.tensor([[12, 13, 13]]), cache, **where, span=slice(12, 15))
    assert error(got, want) < 1e-12


@families
def test_only_distances_matter_without_a_cache(name):
    """Rotary positions are relative: any start gives the same, also behind the table's first 256 rows."""
    m, x = make(CONFIGS[name]), some_x(2, 9)
    want = m.run(x, slice(0, 9))
    for start in (7, 252, 900):
        assert error(m.run(x, slice(start, start + 9)), want) < 1e-11    # cos(900) has lost three digits
    rows = torch.tensor([[3], [40]]) + torch.arange(9)
    assert error(m.run(x, rows), want) < 1e-12
    assert torch.equal(m.run(x, slice(0, 9)), want)                     # the table has grown meanwhile


def test_the_angles_follow_the_type_of_the_weights():
    m, x, at = make(LLAMA), some_x(1, 9), slice(0, 9)
    want = m.run(x, at)
    assert error(m.float().run(x.float(), at), want) < 1e-5
    assert m.table[0].dtype == torch.float32
    fresh = make(LLAMA).float().double()
    assert torch.equal(m.double().run(x, at), fresh.run(x, at)), "the table has stayed in float32"


# --- sub-layers


@families
def test_every_sublayer_can_be_the_border(name):
    """range(k) and then range(k, 2L) is the whole model, with a cache and without."""
    m, x, at = make(CONFIGS[name]), some_x(2, 8), slice(0, 8)
    want = m.run(x, at)
    for k in range(2 * m.c.n_layers + 1):
        assert torch.equal(m.run(m.run(x, at, sublayers=range(k)), at, sublayers=range(k, 12)), want)
        cache = new_cache(m, 2, 8)
        got = m.run(m.run(x, at, cache, sublayers=range(k)), at, cache, sublayers=range(k, 12))
        assert torch.equal(got, want)


@families
def test_the_trace_holds_the_state_after_each_sublayer(name):
    m, x, at = make(CONFIGS[name]), some_x(2, 8), slice(0, 8)
    for sublayers in (range(12), [0, 3, 4, 11], []):
        trace = dict.fromkeys(range(12))
        out = m.run(x, at, sublayers=sublayers, trace=trace)
        assert [i for i, state in trace.items() if state is not None] == list(sublayers)
        for k, i in enumerate(sublayers):
            assert torch.equal(trace[i], m.run(x, at, sublayers=sublayers[: k + 1]))
        assert torch.equal(out, trace[sublayers[-1]] if sublayers else x)
        some = {3: None}
        m.run(x, at, sublayers=sublayers, trace=some)
        assert list(some) == [3] and (some[3] is None) == (3 not in sublayers), "only what was asked for"


@families
def test_skipping_a_sublayer_equals_silencing_it(name):
    """x + 0 = x: whatever surrounds the last matrix of f_i, its post-norm above all, is skipped with it."""
    m, x, at = make(CONFIGS[name]), some_x(2, 8), slice(0, 8)
    for i in range(12):
        twin = make(CONFIGS[name])
        block = twin.blocks[i // 2]
        (block.mlp.down if i % 2 else block.attn.wo).zero_()
        rest = [j for j in range(12) if j != i]
        assert torch.equal(m.run(x, at, sublayers=rest), twin.run(x, at)), f"sub-layer {i}"


def test_an_mlp_of_gemma2_by_hand():
    m, x = make(GEMMA), some_x(2, 8)
    for layer, b in enumerate(m.blocks):
        def norm(x, w):
            return x / (x.pow(2).mean(-1, keepdim=True) + GEMMA.norm_eps).sqrt() * (1 + w)

        def gelu(x):
            return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

        gate, up = b.mlp.gate_up[:48], b.mlp.gate_up[48:]
        y = norm(x, b.mlp_norm.weight)
        y = norm((gelu(y @ gate.T) * (y @ up.T)) @ b.mlp.down.T, b.mlp_post.weight)
        assert error(m.run(x, slice(0, 8), sublayers=[2 * layer + 1]), x + y) < 1e-12


@pytest.mark.parametrize("name, layer", [("llama", 0), ("gemma2", 0), ("gemma2", 1)])
def test_an_attention_by_hand(name, layer):
    """Head by head and token by token: who shares which key, what is scaled, capped and out of the window."""
    c, x, T = CONFIGS[name], some_x(1, 8), 8
    m = make(replace(c, attn_softcap=2.0) if name == "gemma2" else c)
    b, D = m.blocks[layer], c.head_dim

    def norm(x, w):
        return x / (x.pow(2).mean(-1, keepdim=True) + c.norm_eps).sqrt() * (c.norm_offset + w)

    heads = norm(x[0], b.attn_norm.weight) @ b.attn.wqkv.T
    heads = heads.view(T, c.n_kv_heads, 4, D)                            # two queries, their key, their value

    def turn(head, t):  # as complex numbers x_i + i x_{i + D/2}
        angle = t * c.rope_theta ** (-torch.arange(D // 2) / (D // 2)).double()
        z = torch.complex(head[: D // 2], head[D // 2 :]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([z.real, z.imag])

    y = torch.zeros(T, c.n_heads, D, dtype=torch.float64)
    for i in range(T):
        first = max(0, i - 4) if name == "gemma2" and layer == 0 else 0   # window 5: itself and four before
        for h in range(c.n_heads):
            q = turn(heads[i, h // 2, h % 2], i) * (24**-0.5 if name == "gemma2" else 8**-0.5)
            scores = torch.stack([q @ turn(heads[j, h // 2, 2], j) for j in range(first, i + 1)])
            scores = 2 * torch.tanh(scores / 2) if name == "gemma2" else scores
            y[i, h] = scores.softmax(0) @ heads[first : i + 1, h // 2, 3]
    out = y.view(T, -1) @ b.attn.wo.T
    if name == "gemma2":
        out = norm(out, b.attn_post.weight)
    assert error(m.run(x, slice(0, T), sublayers=[2 * layer]), x + out) < 1e-12


# --- blocks whose slots are not their positions


@devices
@families
@pytest.mark.parametrize("sublayers", [None, [0, 1, 4, 5, 7, 10]], ids=["all", "some"])
def test_one_scoring_pass_equals_each_token_on_its_own(name, sublayers, device):
    """On a cache that holds the T tokens, a block at slots T .. 2T-1 whose tokens do not see each other."""
    m, tokens, T = make(CONFIGS[name], device=device), some_tokens(2, 9, device), 9
    cache, x, alone = new_cache(m, 2, 2 * T), m.embed(tokens), torch.eye(9, dtype=torch.bool, device=device)
    prefill(m, tokens, cache)
    held, other = cache.k.clone(), fork(cache)
    at = torch.arange(T, device=device).expand(2, -1)
    got = m.run(x, at, other, sublayers, slots=T + at, tree=alone)
    same = m.run(x, slice(0, T), fork(cache), sublayers, slots=slice(T, 2 * T), tree=alone)
    assert error(same, got) < 1e-12
    assert torch.equal(other.k[:, :, :, :T], held[:, :, :, :T]) and torch.equal(cache.k, held)
    for j in range(T):
        one, here = x[:, j : j + 1], slice(j, j + 1)
        solo = m.run(one, here, fork(cache), sublayers)
        assert error(got[:, here], solo) < 1e-12
        assert error(m.run(one, here, fork(cache), sublayers, slots=slice(T, T + 1)), solo) < 1e-12
    if sublayers is None:
        assert error(got, whole(m, tokens)) < 1e-12


@families
@pytest.mark.parametrize("device", ["meta", *DEVICES[1:]])
def test_run_never_waits_for_the_device(name, device):
    """A meta tensor has no values: nothing can ask for one. On CUDA torch itself forbids to synchronise."""
    m = make(CONFIGS[name], device=device)
    cache, x, at = new_cache(m, 2, 24), some_x(2, 4).to(device), torch.arange(4).expand(2, 4).to(device)
    alone, trace = torch.eye(4, dtype=torch.bool, device=device), dict.fromkeys(range(12))
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        m.run(x, at + 5, cache, span=slice(5, 16), trace=trace)
        m.run(x, at, cache, range(3, 12), slots=at + 8, tree=alone, span=slice(0, 16))
        m.run(x[:, 2:], at, cache, slots=at + 8, tree=alone[2:], span=slice(0, 16))     # a tree that grows
        cache.move(at + 1, at)
        m.run(x, slice(0, 4), cache)
        m.run(x[:, :1], slice(7, 8), cache)
        m.unembed(m.run(x, at))
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert all(state.shape == x.shape for state in trace.values())


# --- norms, scales, the cache


def test_the_norm_of_gemma2_works_in_float32():
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(replace(GEMMA, dim=512))
    norm.weight.data = (torch.randn(512, generator=generator) * 0.3).bfloat16()
    x = torch.randn(64, 512, generator=generator).bfloat16()
    wide, w = x.double(), norm.weight.double()
    exact = wide / (wide.pow(2).mean(-1, keepdim=True) + GEMMA.norm_eps).sqrt() * (1 + w)
    got = norm(x)
    assert got.dtype == torch.bfloat16
    right = float((got == exact.bfloat16()).double().mean())
    assert right > 0.999, f"only {right:.0%} are exact but for one rounding: was 1 + w rounded to bfloat16?"


def test_the_scale_of_embeddings_is_exact_in_float64():
    m = Transformer(GEMMA).double()
    assert float(m.scale) == 32**0.5, "the scale went through float32 on its way to float64"


@devices
def test_a_new_cache_is_all_zeros(device):
    cache = KVCache(GEMMA, 3, 10, torch.float64, device)
    assert cache.k.shape == cache.v.shape == (6, 3, 2, 10, 16)
    assert not cache.k.any() and not cache.v.any(), "zeros, not empty: 0, a dead slot's weight, * NaN is NaN"


@devices
def test_slots_as_a_slice_and_as_a_tensor_write_the_same(device):
    k, v = torch.rand(2, 3, 2, 4, 16, dtype=torch.float64, device=device)
    one, other = (KVCache(GEMMA, 3, 10, torch.float64, device) for _ in range(2))
    a = one.write(2, k, v, slice(3, 7), 7)
    b = other.write(2, k, v, torch.arange(3, 7, device=device).expand(3, -1), 7)
    assert torch.equal(one.k, other.k) and torch.equal(one.v, other.v)
    assert all(torch.equal(x, y) and x.shape == (3, 2, 7, 16) for x, y in zip(a, b, strict=True))
    assert torch.equal(a[0][:, :, 3:], k) and torch.equal(a[1][:, :, 3:], v)
    untouched = one.k.clone()
    untouched[2, :, :, 3:7] = 0
    assert not untouched.any()


# --- pure functions by hand; one of them alone: `pytest -k softcap`, frequencies, rope, rotate or visible


def test_softcap_by_hand():
    x = [0.0, 2.0, -2.0, 1000.0]
    compare(softcap(torch.tensor(x).double(), 2.0), [0.0, 1.5231883119115297, -1.5231883119115297, 2.0], {
        "the sum inside tanh is x / cap, not x": [2 * math.tanh(a) for a in x],
        "multiply by cap at the end, or everything is within (-1, 1)": [math.tanh(a / 2) for a in x],
        "this clips; tanh bends smoothly": [max(-2.0, min(2.0, a)) for a in x],
        "multiply by x inside tanh where you must divide": [2 * math.tanh(a * 2) for a in x]},
        f"softcap({x}, 2.0)")


def test_softcap_leaves_small_values_and_its_input_alone():
    x = torch.tensor([1e-4, -2e-4]).double()
    kept = x.clone()
    assert (softcap(x, 50.0) - x).abs().max() < 1e-14, "near 0, cap * tanh(x / cap) is x"
    assert torch.equal(x, kept), "softcap must not change its argument in place"
    assert softcap(x, None) is x, "no cap: x itself"
    assert softcap(x.float(), 50.0).dtype == torch.float32


def test_frequencies_by_hand():
    compare(frequencies(8, 10000.0), [1.0, 0.1, 0.01, 0.001], {
        "the exponent is 2i / D: a step of 2 in the numerator": [10000 ** (-i / 8) for i in range(4)],
        "the exponent is negative: frequencies fall from 1": [1.0, 10.0, 100.0, 1000.0],
        "the first pair turns fastest": [0.001, 0.01, 0.1, 1.0],
        "i runs from 0": [0.1, 0.01, 0.001, 0.0001],
        "the exponent is 2i / D, not 2i / (D / 2)": [10000 ** (-4 * i / 8) for i in range(4)]},
        "frequencies(head_dim=8, theta=10000.0)")
    assert frequencies(8, 10000.0).dtype == torch.float64, "float32 is off by 0.01 at position 100,000"
    assert frequencies(256, 10000.0).shape == (128,), "one frequency for each pair, so D / 2 of them"


def test_frequencies_of_linear_scaling_by_hand():
    scaling = {"rope_type": "linear", "factor": 4.0}
    compare(frequencies(8, 10000.0, scaling), [0.25, 0.025, 0.0025, 0.00025], {
        "factor divides: positions are squeezed into the trained range": [4.0, 0.4, 0.04, 0.004],
        "factor divides the frequencies, it does not multiply theta": [40000 ** (-i / 4) for i in range(4)],
        "the scaling was ignored": [1.0, 0.1, 0.01, 0.001]}, f"frequencies(8, 10000.0, {scaling})")


def test_frequencies_of_llama3_by_hand():
    """In 1000 positions the pairs turn 159, 15.9, 1.59 and .159 times: above 4 stays, below 1 is divided."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 1000}
    keep = (10 / (2 * math.pi) - 1) / 3                                   # 0.197 of the third pair stays
    third = keep * 0.01 + (1 - keep) * 0.01 / 8
    compare(frequencies(8, 10000.0, scaling), [1.0, 0.1, third, 0.001 / 8], {
        "fast and slow are swapped: those that turn often stay, the slow ones are divided":
            [1 / 8, 0.1 / 8, (1 - keep) * 0.01 + keep * 0.01 / 8, 0.001],
        "turns = length * frequency / (2 pi): the 2 pi is missing": [1.0, 0.1, 0.01, 0.001 / 8],
        "between the two factors it blends, it does not jump": [1.0, 0.1, 0.01 / 8, 0.001 / 8],
        "factor divides all of them only in linear scaling": [1 / 8, 0.1 / 8, 0.01 / 8, 0.001 / 8],
        "the scaling was ignored": [1.0, 0.1, 0.01, 0.001]}, f"frequencies(8, 10000.0, {scaling})")


def test_rope_by_hand():
    cos, sin = rope(torch.tensor([0, 1, 2]), torch.tensor([1.0, 0.5]).double())
    c, s = ([[f(t * w) for w in (1.0, 0.5)] for t in range(3)] for f in (math.cos, math.sin))    # (3, 2) each
    compare(cos, [[a, b, a, b] for a, b in c], {
        "cos is interleaved (a a b b); this pairing is half-split (a b a b)": [[a, a, b, b] for a, b in c],
        "cos and sin are swapped": [[-a, -b, a, b] for a, b in s],
        "positions start at 0": [[math.cos(t * w) for w in (1.0, 0.5, 1.0, 0.5)] for t in (1, 2, 3)]})
    compare(sin, [[-a, -b, a, b] for a, b in s], {
        "the sign of sin is on the wrong half: it is x1 cos - x2 sin": [[a, b, -a, -b] for a, b in s],
        "the sign of the rotation is missing: sin starts with a minus": [[a, b, a, b] for a, b in s],
        "sin is interleaved; this pairing is half-split": [[-a, a, -b, b] for a, b in s]})


def test_rope_is_precise_far_out():
    cos, sin = rope(torch.tensor([[131071]]), torch.tensor([1.0]).double())
    assert cos.shape == sin.shape == (1, 1, 2), "the shape is that of positions, then D"
    assert abs(float(cos[0, 0, 0]) - math.cos(131071.0)) < 1e-10, "angles need float64: float32 has 7 digits"


def test_rotate_by_hand():
    """Pair (x0, x2) turns by 90 degrees, pair (x1, x3) not at all: (1, 3) becomes (-3, 1)."""
    cos, sin = torch.tensor([0.0, 1.0, 0.0, 1.0]).double(), torch.tensor([-1.0, 0.0, 1.0, 0.0]).double()
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).double()
    compare(rotate(x, cos, sin), [-3.0, 2.0, 1.0, 4.0], {
        "it turns the wrong way: sin already carries its sign": [3.0, 2.0, -1.0, 4.0],
        "sin already carries the sign: you gave it a second one": [3.0, 2.0, 1.0, 4.0],
        "x_i is paired with its neighbour; here x_i goes with x_{i + D/2}": [-2.0, 2.0, 4.0, 4.0],
        "the pairs (x0, x1), (x2, x3) are those of Meta's own files, not these": [-2.0, 1.0, 3.0, 4.0],
        "sin must multiply the *other* half of x": [-1.0, 2.0, 3.0, 4.0]},
        "rotate([1, 2, 3, 4], cos = [0, 1, 0, 1], sin = [-1, 0, 1, 0])")


def test_rotate_keeps_lengths_and_depends_on_distances_only():
    q, k = torch.randn(2, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    cos, sin = rope(torch.arange(50), frequencies(16, 100.0))
    at = [(rotate(q, c, s), rotate(k, c, s)) for c, s in zip(cos, sin, strict=True)]
    assert torch.equal(at[0][0], q), "position 0 turns nothing"
    assert all(abs(a.norm() - q.norm()) < 1e-12 for a, _ in at), "a rotation keeps the length"
    for i, j in ((20, 10), (49, 39)):
        same = torch.allclose(at[i][0] @ at[j][1], at[10][0] @ at[0][1], rtol=0, atol=1e-12)
        assert same, "q at i times k at j may depend on i - j only: is one of them turned the other way?"


def test_rotate_serves_every_shape():
    x = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    cos, sin = (a[:, :, None] for a in rope(torch.tensor([[0, 1, 2], [7, 8, 9]]), frequencies(8, 100.0)))
    kept, got = x.clone(), rotate(x, cos, sin)
    assert torch.equal(x, kept), "rotate must not change its argument in place"
    assert got.shape == x.shape and torch.equal(got[1, 2, 3], rotate(x[1, 2, 3], cos[1, 2, 0], sin[1, 2, 0]))


def test_visible_in_the_first_block():
    at = torch.tensor([[0, 1, 2]])
    look(visible(at, at, 4)[0], ["x...", "xx..", "xxx."], {
        "a token must see itself": ["....", "x...", "xx.."],
        "a token sees what stands behind it: the mask is upside down": ["xxx.", ".xx.", "..x."],
        "slot 3 is behind the block, and dead": ["x..x", "xx.x", "xxxx"],
        "the first token sees the second: causal inside the block, too": ["xxx."] * 3,
        "no mask at all": ["xxxx"] * 3}, "a block in slots 0 1 2, end = 4; x: may read")


def test_visible_behind_a_filled_cache():
    at = torch.tensor([[2, 3]])
    look(visible(at, at, 5)[0], ["xxx..", "xxxx."], {
        "the block does not see the slots before it": ["..x..", "..xx."],
        "the block does not see itself": ["xx...", "xx..."],
        "the first token sees the second: causal inside the block, too": ["xxxx.", "xxxx."],
        "everything below `end` is visible, dead slots too": ["xxxxx", "xxxxx"]},
        "a block in slots 2 3, end = 5; x: may read")


def test_visible_for_rows_at_different_places():
    at = torch.tensor([[3, 4], [1, 2]])
    mask = visible(at, at, 5)
    assert mask.shape == (2, 2, 5), "one mask a row: (B, T, end)"
    look(mask[0], ["xxxx.", "xxxxx"], {}, "rows with blocks in slots 3 4 and 1 2, end = 5; the first row")
    look(mask[1], ["xx...", "xxx.."], {"the second row was given the first row's mask": ["xxxx.", "xxxxx"]},
         "rows with blocks in slots 3 4 and 1 2, end = 5; the second row")


def test_visible_within_a_window():
    at = torch.tensor([[0, 1, 2, 3]])
    look(visible(at, at, 4, window=2)[0], ["x...", "xx..", ".xx.", "..xx"], {
        "window off by one: a key is visible iff i - j < window": ["x...", "xx..", "xxx.", ".xxx"],
        "window off by one: it counts the token itself": ["x...", ".x..", "..x.", "...x"],
        "the window was ignored": ["x...", "xx..", "xxx.", "xxxx"]},
        "a block in slots 0 1 2 3, end = 4, window = 2; x: may read")
    at = torch.tensor([[3, 4]])
    look(visible(at, at, 5, window=2)[0], ["..xx.", "...xx"], {
        "the window holds inside the block only; it cuts the slots before it, too": ["xxxx.", "...xx"],
        "the window was ignored": ["xxxx.", "xxxxx"]}, "a block in slots 3 4, end = 5, window = 2")


def test_visible_where_slots_are_not_positions():
    """Scoring: three known tokens again, each on its own, in slots behind their first copies."""
    at, alone = torch.tensor([[0, 1, 2]]), torch.eye(3, dtype=torch.bool)
    look(visible(at, at + 3, 6, alone)[0], ["...x..", "x...x.", "xx...x"], {
        "before the block a token sees *smaller* positions, not its own first copy":
            ["x..x..", "xx..x.", "xxx..x"],
        "a token must not see the slots of its own future": ["xxxx..", "xxx.x.", "xxx..x"],
        "tree was ignored inside the block": ["...x..", "x..xx.", "xx.xxx"]},
        "tokens at positions 0 1 2 in slots 3 4 5, which see only themselves of the block")
    look(visible(at, at + 3, 6, window=2)[0], ["...x..", "x..xx.", ".x..xx"], {
        "inside the block a key's position is its token's, not its slot": ["...x..", "x..xx.", ".x.xxx"],
        "the window is a distance of positions, not of slots": ["...x..", "...xx.", "....xx"]},
        "a chain at positions 0 1 2 in slots 3 4 5, window = 2")


def test_visible_in_a_tree():
    """Root at position 2 with two children at 3; the second child, in slot 4, has a child at position 4."""
    tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
    positions, slots = torch.tensor([[2, 3, 3, 4]]), torch.tensor([[2, 3, 4, 5]])
    look(visible(positions, slots, 7, tree)[0], ["xxx....", "xxxx...", "xxx.x..", "xxx.xx."], {
        "tree[i, j] says that i sees j, not j sees i": ["xxxxxx.", "xx.x...", "xx..xx.", "xx...x."],
        "tree was ignored": ["xxx....", "xxxx...", "xxxxx..", "xxxxxx."],
        "a child sees its sister: slots of the block are not 'before the block'":
            ["xxx....", "xxxx...", "xxxxx..", "xxxxxx."]},
         f"positions {positions.tolist()}, slots {slots.tolist()}, tree {tree.int().tolist()}")
    look(visible(positions, slots, 7, tree, window=2)[0], [".xx....", "..xx...", "..x.x..", "....xx."], {
        "the window is a distance of positions, not of slots": [".xx....", "..xx...", "....x..", "....xx."]},
        f"the same tree and window = 2: positions {positions.tolist()}, slots {slots.tolist()}")


def test_embeddings_are_scaled_by_the_rounded_scale():
    m = Transformer(replace(GEMMA, embed_scale=3584**0.5)).bfloat16().requires_grad_(False)
    m.tok.data.fill_(1.5)
    x = m.embed(torch.tensor([[1]]))
    assert x.dtype == torch.bfloat16 and float(x[0, 0, 0]) == 89.5, "1.5 * 59.75, not 1.5 * 59.87 = 90"
