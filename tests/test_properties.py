"""Properties of the pure functions, on inputs that hypothesis makes up and shrinks: each compares
with a slow definition that shares no code with ours.
Damaged files are refused in one line, whatever the damage."""
import itertools
import json
import math
import struct
from functools import partial

import expected
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from teach import compare, promise
from tiny import LLAMA, make, wide

import checkpoint
from kvcache import KVCache
from lab.save import save
from model import frequencies, rope, rotate, visible
from sampling import Coins, uniforms

settings.register_profile("here", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("here")
# of an exercise: to shrink an input on which a student's answer fails would take half a minute
unshrunk = partial(settings, phases=[Phase.explicit, Phase.generate], report_multiple_bugs=False)


# --- sampling


def splitmix(seed, i):
    z = (seed + (i + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return (z ^ z >> 31) / 2**11 // 1 / 2**53


@given(st.integers(-(2**63), 2**63 - 1),
       st.lists(st.sampled_from([1, 7, 1500, 4096, 5000]), min_size=1, max_size=4))
@settings(max_examples=20)
def test_coins_are_splitmix64_in_purchases_of_any_size(seed, counts):
    coins = Coins(seed)
    got = torch.cat([coins.take(count, torch.device("cpu")) for count in counts])
    assert torch.equal(got, uniforms(seed, 0, sum(counts)))
    for i in (0, counts[0] - 1, sum(counts) - 1):
        assert abs(float(got[i]) - splitmix(seed, i)) < 2**-52


# --- the model


@given(st.data(), st.integers(1, 7), st.integers(0, 30), st.none() | st.integers(1, 24),
       st.integers(1, 3))
@unshrunk()
def test_visible_is_its_definition(data, T, first, window, rows):
    """One tree or a tree for each row."""
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    tree = torch.rand(rows, T, T, generator=g) < 0.5
    firsts = [first + 2 * b for b in range(rows)]
    slots = torch.tensor(firsts)[:, None] + torch.arange(T)
    positions = slots[:, :1] + torch.randint(4, (rows, T), generator=g).sort(-1).values
    end, asked = first + 2 * rows + T, data.draw(st.sampled_from([tree, tree[:1], tree[0], None]))
    seen = torch.ones(T, T).bool().tril() if asked is None else asked
    want = torch.zeros(rows, T, end, dtype=torch.bool)
    for b, t, s in itertools.product(range(rows), range(T), range(end)):
        own, inside = int(positions[b, t]), firsts[b] <= s < firsts[b] + T
        at = int(positions[b, s - firsts[b]]) if inside else s
        sees = (bool(seen.expand(rows, T, T)[b, t, s - firsts[b]]) if inside
                else s < firsts[b] and s < own)
        want[b, t, s] = sees and (window is None or own - at < window)
    compare(visible(positions, slots, end, asked, window), want, {},
            f"visible({positions.tolist()}, {slots.tolist()}, {end}, tree = "
            f"{None if asked is None else asked.int().tolist()}, window = {window})")


@given(st.integers(1, 8), st.integers(0, 400), st.integers(0, 400), st.integers(0, 99))
@unshrunk()
def test_rotation_keeps_lengths_and_knows_distances_only(half, i, j, shift):
    freqs, g = frequencies(2 * half, 500.0), torch.Generator().manual_seed(half)
    x, y = torch.randn(2, 2 * half, generator=g, dtype=torch.float64)
    turn = lambda v, at: rotate(v, *rope(torch.tensor(at), freqs))  # noqa: E731
    promise(turn(x, i).dtype == x.dtype, "x in float64", "float64", str(turn(x, i).dtype))
    compare(turn(x, i).norm(), x.norm(), {},
            f"the length of a vector of {2 * half} numbers, turned to {i}", 1e-11)
    off = float((turn(x, i) @ turn(y, j) - turn(x, i + shift) @ turn(y, j + shift)).abs())
    promise(off < 1e-10, f"two vectors at {i} and {j}, and both {shift} further",
            "the same product",
            f"it differs by {off:.2g}", "a product of rotated vectors knows their distance only")
    by_pairs = [complex(x[k], x[k + half]) * complex(math.cos(i * f), math.sin(i * f))
                for k, f in enumerate(freqs.tolist())]
    want = wide([z.real for z in by_pairs] + [z.imag for z in by_pairs])
    compare(turn(x, i) + 9, want + 9, {}, f"pairs as complex numbers, turned to position {i}",
            1e-11)


@given(st.permutations(range(6)), st.permutations(range(6)), st.integers(1, 6))
def test_a_cache_moves_all_slots_at_once(some, others, count):
    """They may overlap."""
    cache, src, dst = KVCache(LLAMA, 2, 6, torch.float64), some[:count], others[:count]
    cache.k += torch.arange(12.0).view(2, 1, 6, 1)
    cache.v -= cache.k
    old, want = cache.k.clone(), cache.k.clone()
    for row, (here, there) in enumerate([(src, dst), (dst, src)]):
        for a, b in zip(here, there, strict=True):
            want[:, row, :, b] = old[:, row, :, a]
    cache.move(torch.tensor([src, dst]), torch.tensor([dst, src]))
    assert torch.equal(cache.k, want) and torch.equal(cache.v, -want)


# --- damaged files: loaded, or refused in one line


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save(make(LLAMA).float(), folder, expected.byte_tokenizer())
    return folder


def loads_or_refuses(folder, name, content):
    kept = (folder / name).read_bytes()
    (folder / name).write_bytes(content)
    try:
        checkpoint.load(folder, "cpu")
    except (ValueError, OSError) as e:
        assert "\n" not in str(e) and str(e)
    finally:
        (folder / name).write_bytes(kept)


NAMES = ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors"]
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = (PLAIN | st.lists(PLAIN, max_size=3)
          | st.dictionaries(st.text(max_size=5), PLAIN, max_size=3))


@given(st.sampled_from(NAMES), st.data())
def test_cut_off_and_overwritten_files(folder, name, data):
    raw = (folder / name).read_bytes()
    at = data.draw(st.integers(0, min(len(raw), 3000) - 1))
    loads_or_refuses(folder, name, raw[:at])
    loads_or_refuses(folder, name, raw[:at] + data.draw(st.binary(max_size=9)) + raw[at + 1 :])


@given(st.data())
def test_any_value_of_any_key_of_config_json(folder, data):
    raw = json.loads((folder / "config.json").read_text())
    for key in data.draw(st.sets(st.sampled_from(sorted(raw)), min_size=1, max_size=3)):
        raw[key] = data.draw(VALUES | st.integers(0, 9))
    loads_or_refuses(folder, "config.json", json.dumps(raw).encode())


@given(st.data())
def test_any_header_of_the_weights(folder, data):
    """Entries that are lost, or whose type, shape or place is another one."""
    raw = (folder / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header, body = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    name = data.draw(st.sampled_from(sorted(header)))
    header[name] = data.draw(VALUES | st.fixed_dictionaries({
        "dtype": st.sampled_from(["F32", "BF16", "I64", "F99"]),
        "shape": st.lists(st.integers(-1, 99) | st.just(2**62), max_size=3),
        "data_offsets": st.lists(st.integers(0, len(body)) | st.just(2**63), min_size=2,
                                 max_size=2)}))
    text = json.dumps(header).encode()
    loads_or_refuses(folder, "model.safetensors", struct.pack("<Q", len(text)) + text + body)
