"""Checkpoints corrupted by machine: each must load and generate, or be refused in one clear line; never a
traceback, a crash, a hang, an opened pickle, or more memory than the files warrant.

The one thing to remember: case i is the same on every run, and `python tests/fuzz.py --case i` shows it. A
run ends after 10,000 cases or half an hour, and says how far it came.
"""

import argparse
import copy
import json
import math
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import unicodedata
import warnings
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from expected import SCALING, byte_level  # noqa: E402
from tiny import GEMMA, LLAMA, make, shard  # noqa: E402

import checkpoint  # noqa: E402
import generate  # noqa: E402

SECONDS, CLOCK = 20, 200  # what a case may take: seconds of the processor, and by the clock, if it waits
SPACE, LENGTH = 2**30, 400  # bytes of address space, and of its line on stderr
PEAK = 64 * 2**20  # resident memory that a case may add; a panic in Rust alone reads 50 MB of its own symbols
FORK = multiprocessing.get_context("fork")
BATCH = 100  # cases to one child: a fresh one starts with fresh memory
LOADS, REFUSED = 0, 2  # exit statuses
INDEX, WEIGHTS = "model.safetensors.index.json", "*.safetensors"

# --- the checkpoints before anything happens to them

SPECIAL, MERGES = ["<s>", "</s>", "<unk>"], [("H", "e"), ("l", "l")]
TOKENS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, MERGES)]
VOCAB = [*SPECIAL, *TOKENS]
SHAPE = dict(vocab_size=len(VOCAB), bos=0, eos=(1,))
BASES = {  # name: (config, stored type, number of files)
    "llama": (replace(LLAMA, **SHAPE), torch.float32, 1),
    "llama-shards": (replace(LLAMA, **SHAPE, tied=True, rope_scaling=SCALING), torch.bfloat16, 3),
    "gemma": (replace(GEMMA, **SHAPE), torch.bfloat16, 1),
    "gemma-shards": (replace(GEMMA, **SHAPE | {"tied": False}), torch.float32, 3),
}
CHAT = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}{% endfor %}"


def make_base(folder, c, dtype, files):
    checkpoint.save(make(c).to(dtype), folder, byte_level(SPECIAL, TOKENS, MERGES))
    config = folder / "tokenizer_config.json"
    write(config, read(config) | {"chat_template": CHAT})
    write(folder / "skip.json", {"attn": [1], "mlp": [2]})
    if files > 1:
        shard(folder, files)


# --- where a corruption takes place: each of these calls way(what is there, rng), which changes it


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def write(path, content):
    path.write_text(json.dumps(content), encoding="utf-8")


def in_bytes(path, way, rng):
    raw, how = way(path.read_bytes(), rng)
    path.write_bytes(raw)
    return how


def in_json(path, way, rng):
    content = read(path)
    how = way(content, rng)
    write(path, content)
    return how


def split(raw):
    """(header, tensors) of a safetensors file: 8 bytes with the length of the header, JSON, raw tensors."""
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    return raw[8:end], raw[end:]


def join(header, body):
    return struct.pack("<Q", len(header)) + header + body


def in_header(path, way, rng):
    header, body = split(path.read_bytes())
    header = json.loads(header)
    how = way(header, rng)
    path.write_bytes(join(json.dumps(header).encode(), body))
    return how


def in_tensors(path, way, rng):
    """The file is written as it should be; an index beside it knows of the change, or it does not."""
    content, index = load_file(path), path.parent / INDEX
    name = rng.choice(list(content))
    how = way(content, name, rng)
    save_file({key: t.contiguous() for key, t in content.items()}, path)
    if index.is_file() and rng.random() < 0.6:
        old = read(index)
        others = {key: file for key, file in old["weight_map"].items() if file != path.name}
        write(index, old | {"weight_map": others | dict.fromkeys(content, path.name)})
    return f"{name} {how}"


def in_folder(path, way, rng):
    return way(path, rng)


# --- bytes and text


def flip(raw, rng, start=0, stop=None):
    raw, stop = bytearray(raw), len(raw) if stop is None else stop
    count = rng.choice([1, 1, 2, 8, 64])
    for _ in range(count):
        raw[rng.randrange(start, stop)] ^= rng.randrange(1, 256)
    return bytes(raw), f"{count} bytes flipped"


def flip_header(raw, rng):
    return flip(raw, rng, 8, 8 + len(split(raw)[0]))


def flip_tensors(raw, rng):
    return flip(raw, rng, 8 + len(split(raw)[0]))


def truncate(raw, rng):
    size = rng.randrange(rng.choice([10, 3000, len(raw)]))
    return raw[:size], f"truncated to {size} of {len(raw)} bytes"


def header_length(raw, rng):
    n, rest = len(split(raw)[0]), len(raw) - 8
    length = rng.choice([0, 1, 2, 7, n - 1, n + 1, n + 8, rest, rest + 1, 10**8, 10**8 + 1, 2**31, 2**32,
                         2**63 - 1, 2**63, 2**64 - 1, 2**64 - 8, rng.randrange(n)])
    return struct.pack("<Q", length) + raw[8:], f"the header's length, {n}, is given as {length}"


def header_text(raw, rng):
    """The header damaged as any JSON may be, with a length that agrees."""
    header, body = split(raw)
    header, how = rng.choice([damage_text, encode_badly, nest])(header, rng)
    return join(header, body), f"header: {how}"


def damage_text(raw, rng):
    at, many, new = rng.randrange(len(raw)), rng.choice([1, 2, 10]), rng.choice(b',{\0"\xff/')
    ways = {
        "bytes flipped": flip(raw, rng)[0],
        "cut short": raw[:at],
        "a piece missing": raw[:at] + raw[at + many :],
        "a piece twice": raw[: at + many] + raw[at:],
        "a character more": raw[:at] + bytes([new]) + raw[at:],
        "a digit for another": raw.replace(b"%d" % rng.randrange(10), b"%d" % rng.randrange(10)),
        "all of it twice": raw + raw,
    }
    way = rng.choice(list(ways))
    return ways[way], f"{way}, at {at}"


def encode_badly(raw, rng):
    text = raw.decode("utf-8")
    ways = {
        "UTF-16": text.encode("utf-16"),
        "UTF-16 without a mark": text.encode("utf-16-le"),
        "UTF-32": text.encode("utf-32"),
        "a byte order mark": b"\xef\xbb\xbf" + raw,
        "a byte that is not UTF-8": raw[:-2] + b"\xff" + raw[-2:],
        "an overlong character": raw.replace(b'"', b'"\xc0\x80', 1),
        "a lone surrogate": raw.replace(b'"', b'"\\ud800', 1),
        "an escape": raw.replace(b'"', b'"\\u001b[2J\\n', 1),
        "a null behind it": raw + b"\0",
        "keys twice": raw.rstrip()[:-1] + b', "model_type": 3, "eos_token_id": "x", "weight_map": 3}',
        "single quotes": raw.replace(b'"', b"'"),
        "a comment": raw + b"// the end",
    }
    way = rng.choice(list(ways))
    return ways[way], way


def nest(raw, rng):
    """JSON so deep that a reader which calls itself runs out of stack."""
    depth, (opening, closing) = rng.choice([200, 2000, 100_000]), rng.choice([("[", "]"), ('{"x":', "}")])
    deep = opening * depth + "1" + closing * rng.choice([0, depth])
    if rng.random() < 0.5:
        return deep.encode(), f"nothing but {depth} {opening}"
    content = json.loads(raw)
    container, key = place(content, rng)
    container[key] = "@"
    return json.dumps(content).replace('"@"', deep).encode(), f"{depth} {opening} at {key}"


# --- JSON

ODD_TEXT = ["", "x", "10", "None", "a\nb\rc", "\x1b[31m\0", "\ud800", "\u202e\u2028", "x" * 5000]
ODD_NUMBER = [0, 1, -1, 2, 3, 7, 17, 0.0, 0.5, 1.5, -0.5, 1e-300, 1e300, math.nan, math.inf, -math.inf]
ODD_NUMBER += [10**6, 10**9, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 10**30, -(10**30), 10**400]
ODD_OTHER = [None, True, False, [], [0], ["x"], [None] * 3000, [[[]]], {}, {"x": 1}, {"rope_type": "linear"}]
HUGE = [10**6, 10**9, 2**31 - 1, 2**31, 10**18, 10**30, 10**400, 1e300, 1e-300, 5e-324]
FACTORS = [0, -1, 1e308, 1e-308, 10**400, math.nan, True, None]
ODD_KEY = {  # what the reader looks for and a saved config.json may not have
    "architectures": [["LlamaForCausalLM"], ["Gemma2ForCausalLM"], "LlamaForCausalLM", [["x"]], ["\n"]],
    "model_type": ["llama", "gemma2", "mistral"],
    "rope_parameters": [{"rope_type": ["llama3"]}, {"rope_type": "llama3"}, {"rope_theta": {}}],
    "rope_scaling": [{"type": "linear", "factor": factor} for factor in FACTORS],
    "layer_types": [["full_attention"] * 6, ["sliding_attention"] * 6, "full_attention"],
    "partial_rotary_factor": [0.5, "1", [1]],
    "eos_token_id": [[1, 2], [10**30], -1, [[1]], list(range(3000))],
}


def place(content, rng):
    """(container, key) of some value inside a JSON object, not necessarily a leaf."""
    while True:
        key = rng.choice(list(content) if isinstance(content, dict) else range(len(content)))
        if not (isinstance(content[key], dict | list) and content[key]) or rng.random() < 0.4:
            return content, key
        content = content[key]


def short(value):
    text = ascii(value)
    return text if len(text) < 60 else text[:57] + "..."


def drop_keys(content, rng):
    gone = []
    for _ in range(rng.choice([1, 1, 2, 4])):
        if content:
            container, key = place(content, rng)
            del container[key]
            gone.append(key)
    return f"dropped {short(gone)}"


def odd_values(content, rng):
    done = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        container, key = place(content, rng)
        container[key] = copy.deepcopy(rng.choice(rng.choice([ODD_TEXT, ODD_NUMBER, ODD_NUMBER, ODD_OTHER])))
        done.append(f"{key} to {short(container[key])}")
    return f"set {', '.join(done)}"


def odd_keys(content, rng):
    key = rng.choice(list(ODD_KEY))
    content[key] = copy.deepcopy(rng.choice(ODD_KEY[key]))
    how = f"set {key} to {short(content[key])}"
    return how if rng.random() < 0.7 else f"{how}; {odd_values(content, rng)}"


def other_numbers(content, rng):
    """Numbers that could be right but are not: they often load, and then the arithmetic is strange."""
    done = []
    for key in rng.sample([key for key, v in content.items() if type(v) in (int, float)], 2):
        v = content[key]
        near, wild = [v + 1, v - 1, v * 2, v // 2, v * 1000], type(v)(v * 10.0 ** rng.randint(-30, 30))
        content[key] = rng.choice([*near, wild, rng.randrange(1, 100)])
        done.append(f"{key} to {content[key]}")
    return f"set {' and '.join(done)}"


def huge_number(content, rng):
    """One number of config.json, at any depth, is beyond everything, or next to nothing."""
    nested = [part for part in (content, *content.values()) if isinstance(part, dict)]
    container, key = rng.choice([(part, key) for part in nested for key, v in part.items()
                                 if type(v) in (int, float)])
    container[key] = rng.choice(HUGE)
    return f"set {key} to {short(container[key])}"


def swap_values(content, rng):
    (a, i), (b, j) = place(content, rng), place(content, rng)
    one, other = json.loads(json.dumps([a[i], b[j]]))  # copies: one may hold the other
    a[i], b[j] = other, one
    return f"swapped {i} and {j}"


def odd_tokenizer(content, rng):
    """Well-formed, but no tokenizer that this model was trained with."""
    big, token = rng.choice([300, 10**6, 10**9, 2**32 - 1]), content["added_tokens"][0]
    token = token | {"id": big, "content": rng.choice(["", "x", "He", "\n"])}
    pattern = rng.choice([{"Regex": "("}, {"Regex": "(x+x+)+y"}, {"Regex": ""}, {"String": ""}])
    rewrite = {"type": "Replace", "pattern": {"String": "l"}, "content": rng.choice(["", "\0", "ll" * 9])}
    settings = {
        "padding": [{"strategy": {"Fixed": big}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0,
                     "pad_type_id": 0, "pad_token": "<s>"}],
        "truncation": [{"direction": "Left", "max_length": most, "strategy": "LongestFirst", "stride": stride}
                       for most in (0, 1, 2) for stride in (0, 1, 5)],
        "pre_tokenizer": [None, {"type": "Whitespace"}, {"type": "Metaspace"},
                          {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}],
        "normalizer": [rewrite, {"type": "Lowercase"}, {"type": "Sequence", "normalizers": [rewrite] * 3},
                       {"type": "Precompiled"}, {"type": "Precompiled", "precompiled_charsmap": "AAAA"}],
        "decoder": [None, rewrite, {"type": "Strip", "content": "l", "start": 9, "stop": 9},
                    {"type": "CTC"}, {"type": "ByteFallback"}, {"type": "WordPiece", "prefix": "##"}],
        "post_processor": [None, {"type": "BertProcessing", "sep": ["</s>", 1], "cls": ["<s>", big]}],
        "added_tokens": [[], [token], content["added_tokens"] + [token], [token | {"id": 0}]],
        "model": [content["model"] | change for change in (
            {"dropout": 1.0}, {"dropout": 2.0}, {"unk_token": "nowhere"}, {"type": "WordLevel"},
            {"type": "Unigram"}, {"type": "WordPiece"}, {"type": "Unigram", "vocab": [["x", -1.0]]},
            {"vocab": {}, "merges": []}, {"vocab": {"H": 0}}, {"merges": ["H x", "y z"]}, {"merges": []},
            {"continuing_subword_prefix": "Hello" * 9}, {"end_of_word_suffix": "</w>"},
            {"byte_fallback": True}, {"vocab": dict.fromkeys(VOCAB, 0)}, {"vocab": dict.fromkeys(VOCAB, big)},
            {"vocab": {t: i + 5 for i, t in enumerate(VOCAB)}}, {"vocab": dict.fromkeys(VOCAB, -1)})],
    }
    key = rng.choice(list(settings))
    at = rng.randrange(len(settings[key]))
    content[key] = settings[key][at]
    return f"odd {key}, number {at} of {len(settings[key])}, with {big}"


def odd_template(content, rng):
    """Chat templates are programs, and all of these end."""
    text = rng.choice([
        "", "{{ x.y.z }}", "{% for %}", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ 1 / 0 }}",
        "{% include '/etc/passwd' %}", "{{ raise_exception('no\\nway') }}", "{{ messages }}", "\ud800",
        "{{ range(10 ** 9) | list }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ 10 ** 400 }}",
        "{{ " + "(" * 10_000, "{{ bos_token * 3 }}", "{% for i in range(9999) %}x{% endfor %}", "\x1b[m\n{{",
        "{{ '\\ud800' }}", "{{ 'x' * 99 }}", "{# " * 999, "{{ strftime_now('%Y' * 999) }}", "\0",
        CHAT[: rng.randrange(len(CHAT))], CHAT.replace("'", '"', 1), CHAT.replace("m[", "m.x[")])
    named = [{"name": rng.choice(["default", "tool_use", None]), "template": text}, rng.choice([None, 3, {}])]
    content["chat_template"] = rng.choice([text, text, text, named, {"default": text}])
    return f"chat_template is {short(content['chat_template'])}"


# --- the header of a safetensors file


def pick_entry(header, rng):
    name = rng.choice([key for key in header if key != "__metadata__"])
    return name, header[name]


def offsets(header, rng):
    (name, entry), other, k = pick_entry(header, rng), pick_entry(header, rng)[1], rng.choice([1, 2, 4, 100])
    (a, b), end = entry["data_offsets"], max(e["data_offsets"][1] for e in header.values() if "shape" in e)
    entry["data_offsets"] = rng.choice([
        [b, a], [a + k, b + k], [a - k, b - k], [a, b + k], [a, b - k], [a, a], [-1, b], [0, end],
        other["data_offsets"], [end, end + b - a], [2**63, 2**63 + b - a], [2**64 - 1, b], [a, 10**30],
        [a + 0.5, b], [str(a), str(b)], None, [a], [], [a, b, b], {"0": a}])
    return f"{name} at {short(entry['data_offsets'])} instead of {[a, b]}"


def types(header, rng):
    names = [key for key in header if key != "__metadata__"]
    kind = rng.choice(["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F4", "I64", "I32", "I16", "U16",
                       "I8", "U8", "BOOL", "C64", "X", "f32", "", "\n", "x" * 5000, None, 3, ["F32"]])
    for name in rng.choice([names, [rng.choice(names)]]):
        header[name]["dtype"] = kind
    return f"type {short(kind)}"


def shapes(header, rng):
    name, entry = pick_entry(header, rng)
    old, n = entry["shape"], math.prod(entry["shape"])
    entry["shape"] = rng.choice([
        old[::-1], old + [1], [1] + old, [n], [], [n // 2, 2], [2, n // 2], [2**40, 2], [2**63, 2], [2**64],
        [2**32, 2**32], [2**33, 2**31], [0, 2**40], [0], [-1, n], [-n, -1], [n + 0.0], [10**30], "x", None,
        {}, ["x"], [[n]], [True] * 3, [1] * 5000 + old, [old[0] + 1] + old[1:]])
    if rng.random() < 0.3:
        entry["data_offsets"] = [0, 0]
    return f"{name} has shape {short(entry['shape'])} instead of {old}"


def metadata(header, rng):
    said = rng.choice(rng.choice([ODD_TEXT, ODD_NUMBER, ODD_OTHER]))
    header["__metadata__"] = rng.choice([said, {"format": said}, {str(said): "x"}])
    return f"metadata {short(header['__metadata__'])}"


def aliases(header, rng):
    """Two names for the same bytes, or the name of the format's own entry."""
    name, entry = pick_entry(header, rng)
    new = rng.choice(["__metadata__", "extra", "lm_head.weight", "model.embed_tokens.weight", "\n"])
    header[new] = entry
    return f"{short(new)} is {name}"


def twice(raw, rng):
    """One name with two entries: to a reader of JSON the last one counts."""
    header, body = split(raw)
    entries = json.loads(header)
    (name, _), (other, entry) = pick_entry(entries, rng), pick_entry(entries, rng)
    return join(header.rstrip()[:-1] + f", {json.dumps(name)}: {json.dumps(entry)}}}".encode(), body), (
        f"{name} stands there twice, once as {other}")


# --- tensors


def rename(content, name, rng):
    new = rng.choice([
        name + "_", name.upper(), name.replace("weight", "bias"), name.replace("model.", "", 1),
        name.replace("layers.", "layers.0"), "model.layers.99.mlp.up_proj.weight", "rotary_emb.inv_freq",
        *(text for text in ODD_TEXT if text.isascii())])
    content[new] = content.pop(name)
    return f"is called {short(new)}"


def swap(content, name, rng):
    same = [key for key, t in content.items() if t.shape == content[name].shape]
    other = rng.choice(rng.choice([same, list(content)]))
    content[name], content[other] = content[other], content[name].clone()
    return f"and {other} are swapped"


def duplicate(content, name, rng):
    extra = ["lm_head.weight", "model.layers.6.mlp.up_proj.weight", "x.rotary_emb.inv_freq"]
    new = rng.choice([name + "2", *extra, *(text for text in ODD_TEXT if text.isascii())])
    content[new] = content[name].clone()
    return f"also stands there as {short(new)}"


def drop(content, name, rng):
    gone = rng.choice([[name], [name], list(content)])
    for key in gone:
        del content[key]
    return f"and {len(gone) - 1} others are gone"


def transpose(content, name, rng):
    t = content[name]
    content[name] = rng.choice([t.mT if t.dim() > 1 else t[None], t.flatten(), t[None], t[..., None]])
    return f"has shape {tuple(content[name].shape)} instead of {tuple(t.shape)}"


def fill(content, name, rng):
    value = rng.choice([math.nan, math.inf, -math.inf, 3e38, -3e38, 1e19, 1e-40, 0.0])
    where = rng.choice([..., 0, -1])
    content[name][where] = value
    return f"is {value} at {where}"


def cast(content, name, rng):
    kind = rng.choice(["float64", "float32", "float16", "bfloat16", "int64", "int8", "bool", "float8_e4m3fn"])
    names = rng.choice([[name], list(content)])
    for key in names:
        content[key] = content[key].to(getattr(torch, kind))
    return f"and {len(names) - 1} others are {kind}"


# --- files and folders


def odd_paths(path, rng):
    content, outside = read(path), path.parent.parent / "outside.safetensors"
    where = content["weight_map"]
    file = next(iter(where.values()))
    shutil.copy(path.parent / file, outside)
    (path.parent / "folder").mkdir()
    (path.parent / "pytorch_model.bin").write_bytes(pickled(path, rng))
    new = rng.choice([
        f"../{outside.name}", str(outside), f"./{file}", f"folder/../{file}", "", ".", "..", "/", "folder/",
        "folder", "/etc/passwd", INDEX, "config.json", "nowhere.safetensors", "pytorch_model.bin", "a\0b",
        "a\nb", "\x1b[31m", "\ud800", "x" * 300, "x" * 5000, "C:\\x", "~", None, 3, [], {}, [file]])
    for name in rng.choice([list(where), [rng.choice(list(where))]]):
        where[name] = new
    write(path, content)
    return f"the file is {short(new)}"


def replace_file(path, rng):
    """A file becomes something that is none, or none of its own."""
    content, other = path.read_bytes(), rng.choice(own_files(path.parent, "*"))
    copied = other.read_bytes()
    path.unlink()
    ways = {
        "is gone": lambda: None,
        "is empty": lambda: path.write_bytes(b""),
        "is a folder": path.mkdir,
        "is a pipe": lambda: os.mkfifo(path),
        "is a link to itself": lambda: path.symlink_to(path.name),
        "is a link to nowhere": lambda: path.symlink_to("nowhere"),
        "is a link to a device": lambda: path.symlink_to("/dev/zero"),
        "is a link to its folder": lambda: path.symlink_to("."),
        "is only zeros": lambda: path.write_bytes(bytes(len(content))),
        "is noise": lambda: path.write_bytes(rng.randbytes(rng.choice([1, 8, 100, 10_000]))),
        f"is a copy of {other.name}": lambda: path.write_bytes(copied),
        "is a number": lambda: path.write_bytes(b"9" * rng.choice([1, 400, 5000])),
        "is not readable": lambda: (path.write_bytes(content), path.chmod(0)),  # root reads it all the same
    }
    way = rng.choice(list(ways))
    ways[way]()
    return way


class Bomb:
    """Whoever unpickles this creates the file `marker`."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


def pickled(path, rng):
    content = {"model.embed_tokens.weight": Bomb(path.parent.parent / "marker")}
    if rng.random() < 0.5:
        return pickle.dumps(content, protocol=rng.randint(0, 5))
    with tempfile.TemporaryFile() as f:
        torch.save(content, f)
        f.seek(0)
        return f.read()


def pickle_beside(path, rng):
    name = rng.choice(["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth",
                       "model.pt", "model.ckpt", "tokenizer.model", "training_args.bin", "adapter.pkl"])
    (path.parent / name).write_bytes(pickled(path, rng))
    return f"{name} is a pickle"


def pickle_instead(path, rng):
    for file in [*path.parent.glob(WEIGHTS), *path.parent.glob(INDEX)]:
        file.unlink()
    return f"no weights, but {pickle_beside(path, rng)}"


def pickle_within(path, rng):
    path.write_bytes(pickled(path, rng))
    return "is a pickle"


def no_folder(path, rng):
    folder = path.parent
    shutil.rmtree(folder)
    ways = {"is gone": lambda: None, "is empty": folder.mkdir, "is a file": lambda: folder.write_text("{}"),
            "is a link to itself": lambda: folder.symlink_to(folder.name)}
    way = rng.choice(list(ways))
    ways[way]()
    return f"the folder {way}"


def intact(path, rng):
    return "nothing is wrong"


def odd_folder(path, rng):
    """In a folder with an odd name, which `prepare` gave it."""
    return rng.choice([intact, replace_file, replace_file])(path, rng)


def both(path, rng):
    header = in_header(path, rng.choice([offsets, shapes, types, metadata, aliases]), rng)
    config = in_json(path.parent / "config.json", rng.choice([odd_values, drop_keys, other_numbers]), rng)
    return f"{header}; config.json: {config}"


ODD_NAMES = ["a\nb", "\x1b[31m", "é ü", " ", "x" * 100, "\u202e", os.fsdecode(b"\xff"), "{0}%s", "a\r\tb"]
KINDS = {  # name: (where, way, file, the only status that will do, if there is one)
    "intact": (in_folder, intact, "*", LOADS),
    "config: keys dropped": (in_json, drop_keys, "config.json", None),
    "config: odd values": (in_json, odd_values, "config.json", None),
    "config: odd keys": (in_json, odd_keys, "config.json", None),
    "config: other numbers": (in_json, other_numbers, "config.json", None),
    "config: huge number": (in_json, huge_number, "config.json", None),
    "config: values swapped": (in_json, swap_values, "config.json", None),
    "config: text damaged": (in_bytes, damage_text, "config.json", None),
    "generation config: keys dropped": (in_json, drop_keys, "generation_config.json", LOADS),
    "generation config: odd values": (in_json, odd_values, "generation_config.json", None),
    "generation config: text damaged": (in_bytes, damage_text, "generation_config.json", None),
    "tokenizer: keys dropped": (in_json, drop_keys, "tokenizer.json", None),
    "tokenizer: odd values": (in_json, odd_values, "tokenizer.json", None),
    "tokenizer: values swapped": (in_json, swap_values, "tokenizer.json", None),
    "tokenizer: odd settings": (in_json, odd_tokenizer, "tokenizer.json", None),
    "tokenizer: text damaged": (in_bytes, damage_text, "tokenizer.json", None),
    "tokenizer config: odd values": (in_json, odd_values, "tokenizer_config.json", None),
    "tokenizer config: odd template": (in_json, odd_template, "tokenizer_config.json", None),
    "index: keys dropped": (in_json, drop_keys, INDEX, None),
    "index: odd values": (in_json, odd_values, INDEX, None),
    "index: odd paths": (in_folder, odd_paths, INDEX, REFUSED),
    "index: text damaged": (in_bytes, damage_text, INDEX, None),
    "skip file: odd values": (in_json, odd_values, "skip.json", None),
    "skip file: text damaged": (in_bytes, damage_text, "skip.json", None),
    "any JSON: encoding": (in_bytes, encode_badly, "*.json", None),
    "any JSON: nested deep": (in_bytes, nest, "*.json", None),
    "weights: truncated": (in_bytes, truncate, WEIGHTS, REFUSED),
    "weights: tensor bytes": (in_bytes, flip_tensors, WEIGHTS, None),
    "weights: header bytes": (in_bytes, flip_header, WEIGHTS, None),
    "weights: header length": (in_bytes, header_length, WEIGHTS, REFUSED),
    "weights: header text": (in_bytes, header_text, WEIGHTS, None),
    "weights: header values": (in_header, odd_values, WEIGHTS, None),
    "weights: metadata": (in_header, metadata, WEIGHTS, None),
    "weights: offsets": (in_header, offsets, WEIGHTS, None),
    "weights: types": (in_header, types, WEIGHTS, None),
    "weights: shapes": (in_header, shapes, WEIGHTS, None),
    "weights: aliases": (in_header, aliases, WEIGHTS, None),
    "weights: names twice": (in_bytes, twice, WEIGHTS, None),
    "tensors: renamed": (in_tensors, rename, WEIGHTS, None),
    "tensors: swapped": (in_tensors, swap, WEIGHTS, None),
    "tensors: duplicated": (in_tensors, duplicate, WEIGHTS, None),
    "tensors: dropped": (in_tensors, drop, WEIGHTS, REFUSED),
    "tensors: transposed": (in_tensors, transpose, WEIGHTS, None),
    "tensors: filled": (in_tensors, fill, WEIGHTS, None),
    "tensors: cast": (in_tensors, cast, WEIGHTS, None),
    "files: replaced": (in_folder, replace_file, "*", None),
    "files: pickle beside": (in_folder, pickle_beside, WEIGHTS, LOADS),
    "files: pickle instead": (in_folder, pickle_instead, WEIGHTS, REFUSED),
    "files: pickled weights": (in_folder, pickle_within, WEIGHTS, REFUSED),
    "files: pickled JSON": (in_folder, pickle_within, "*.json", None),
    "folder: odd name": (in_folder, odd_folder, "*", None),
    "folder: none": (in_folder, no_folder, "*", REFUSED),
    "two at once": (in_folder, both, WEIGHTS, None),
}
DRAFTS = [[], ["--draft", "none"], ["--exit-layer", "2", "--gamma", "3"], ["--skip", "a1,m2"],
          ["--draft", "ngram"], ["--draft-model", "BASE"]]
EXTRAS = [[], [], [], ["--temperature", "0.8"], ["--temperature", "1", "--top-p", "0.9", "--top-k", "9"],
          ["--dtype", "float32"], ["--dtype", "bfloat16"], ["--dtype", "float16"], ["--chat"],
          ["--compare", "--dtype", "float64"]]

# --- a case


@dataclass
class Case:
    number: int
    kind: str
    how: str  # what was done to the folder
    argv: list
    status: int | None = None  # of generate.py
    wrong: str | None = "did not end"  # None: passed
    seconds: float = 0.0
    err: str = ""


def own_files(folder, pattern):
    """What a checkpoint consists of; a file for --skip only if asked for by name."""
    return sorted(p for p in folder.glob(pattern) if p.name == pattern or p.name != "skip.json")


def prepare(number, seed, bases, room):
    """Case `number`: a folder in `room` with something wrong in it, and the command that meets it."""
    rng, kind = random.Random(f"{seed}/{number}"), list(KINDS)[number % len(KINDS)]
    where, way, file, _ = KINDS[kind]
    base = bases / rng.choice([name for name in BASES if file != INDEX or name.endswith("shards")])
    folder = room / (rng.choice(ODD_NAMES) if way is odd_folder else "bad")
    shutil.copytree(base, folder)
    path = rng.choice(own_files(folder, file))
    how = f"{base.name}, {path.name}: {where(path, way, rng)}"
    model, draft, extra = folder, rng.choice(DRAFTS), rng.choice(EXTRAS)
    if file == "skip.json":
        draft = ["--skip", folder / file]
    elif file == "tokenizer_config.json":
        extra = ["--chat"]
    elif rng.random() < 0.2:  # the draft model is the bad one
        model, draft = base, ["--draft-model", folder]
    draft = [base if flag == "BASE" else flag for flag in draft]
    argv = ["Hello", "--model", model, "--max-new", "4", "--device", "cpu", *draft, *extra]
    argv += ["--json"] if rng.random() < 0.85 else []
    return Case(number, kind, how, [str(a) for a in argv])


def judge(argv, status, out, err, want=None):
    """What is wrong with an answer, or None."""
    line, plain = err.removesuffix("\n"), "--json" not in argv
    if want is not None and status != want:
        return f"status {status}, not {want}: {line!r}"
    if status == LOADS:
        if err:
            return f"status 0, but on stderr: {err!r}"
        return odd_text(out) if plain else odd_json(out)
    if status != REFUSED:
        return f"status {status}: {line!r}"
    if not line.startswith("generate.py: ") or "Traceback" in line or not line.isprintable():
        return f"not one plain line: {err!r}"
    if out and not plain:
        return f"refused, but on stdout: {out!r}"
    if len(line) > LENGTH:
        return f"a line of {len(line)} characters: {line!r}"
    if "not enough memory" in line or "allocat" in line:
        return f"asked for too much memory: {line!r}"
    return None


def odd_json(out):
    def no_number(name):  # NaN and Infinity, which other readers of JSON refuse
        raise ValueError(name)

    try:
        [line] = out.splitlines()
        ids = json.loads(line, parse_constant=no_number)["outputs"][0]["ids"]
    except ValueError as e:
        return f"stdout is not one line of JSON ({e}): {out!r}"
    return None if len(ids) <= 4 and all(type(i) is int for i in ids) else f"odd ids: {ids}"


def odd_text(out):
    bad = any(unicodedata.category(c) == "Cc" and c not in "\n\t" for c in out)
    return f"stdout is empty, or would repaint a terminal: {out!r}" if bad or not out else None


def blame(e):
    """An exception as one line, with the deepest place in this project that it came through."""
    frames = [f for f in traceback.extract_tb(e.__traceback__) if Path(f.filename).parent == ROOT]
    where = f"{Path(frames[-1].filename).name}, {frames[-1].name}" if frames else "a library"
    return f"{type(e).__name__} from {where}: {' '.join(str(e).split())}"


def peak_memory(anew=False):
    """The most resident memory so far or, where Linux counts it, since the last call that asked for it anew.
    trap: without that, what one case took hides what all later ones of its process take."""
    clear = Path("/proc/self/clear_refs")
    if anew and clear.exists():
        clear.write_text("5")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def take(file):
    """What was written since the last time."""
    file.flush()
    with open(file.name, "rb+") as f:
        text = f.read().decode("utf-8", "backslashreplace")
        f.truncate(0)
    return text


def attempt(case, files, marker):
    """Fill in what comes of a case. files: those behind stdout and stderr."""
    start, before = time.perf_counter(), peak_memory(anew=True)
    try:
        case.status = generate.main(case.argv)
    except BaseException as e:  # a panic of a library in Rust is no Exception
        case.wrong = blame(e)
    case.seconds, grown = time.perf_counter() - start, peak_memory() - before
    out, case.err = (take(f) for f in files)
    if case.status is not None:
        case.wrong = judge(case.argv, case.status, out, case.err, KINDS[case.kind][3])
    if marker.exists():
        case.wrong = "a pickle was opened"
    if grown > PEAK:
        case.wrong = f"took {grown / 2**20:.0f} MB"


# --- many cases


def limit_memory():
    statm = Path("/proc/self/statm")
    if statm.is_file():
        most = int(statm.read_text().split()[0]) * resource.getpagesize() + SPACE
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


ALARMS = signal.SIGPROF, signal.SIGALRM


def set_alarms(seconds, clock):
    """trap: by the clock alone a case may hang for no other reason than that the machine is busy."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, clock)


def work(numbers, seed, top, sink):
    """In a child: run the cases up to the first that fails, as that one may have left something behind. Each
    is sent twice, before and after."""
    for number in (signal.SIGINT, *ALARMS):
        signal.signal(number, signal.SIG_DFL)  # so that a hang in a library's own code ends the child, too
    for category in (UserWarning, RuntimeWarning, FutureWarning):
        warnings.simplefilter("always", category)
    files = [open(top / name, "a", errors="backslashreplace", encoding="utf-8") for name in ("out", "err")]
    for stream, file in enumerate(files, 1):
        os.dup2(file.fileno(), stream)  # libraries that are not Python write there
    sys.stdout, sys.stderr = files
    limit_memory()
    room = top / "case"

    def fresh(number):
        shutil.rmtree(room, ignore_errors=True)
        room.mkdir()
        return prepare(number, seed, top / "bases", room)

    generate.main([*fresh(0).argv, "--chat"])  # libraries load parts of themselves at first use
    for number in numbers:
        case = fresh(number)
        for file in files:
            take(file)  # what went before
        sink.send(case)
        set_alarms(SECONDS, CLOCK)
        attempt(case, files, room / "marker")
        set_alarms(0, 0)
        sink.send(case)
        if case.wrong:
            return


def batch(numbers, seed, top):
    """The cases, or the first of them, run in a child; if it dies, the case it was at has failed."""
    (source, sink), cases = FORK.Pipe(duplex=False), {}
    child = FORK.Process(target=work, args=(numbers, seed, top, sink))
    child.start()
    sink.close()  # the other end of it is the child's alone
    with suppress(EOFError):
        while True:
            case = source.recv()
            cases[case.number] = case  # the later one counts
    child.join()
    ended = child.exitcode
    if ended > 0:  # a bug of this file, not of what it tests
        raise RuntimeError((top / "err").read_text())
    if ended < 0:
        case = cases[max(cases)]
        case.wrong = "hangs" if -ended in ALARMS else f"crashes with {signal.Signals(-ended).name}"
        case.err = (top / "err").read_text(errors="replace")
    return list(cases.values())


def run(numbers, seed=0, progress=lambda done: None, seconds=math.inf):
    """All the cases, or as many batches of them as begin within so many seconds."""
    numbers, done, end = list(numbers), [], time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="fuzz-") as top:
        for name, base in BASES.items():
            make_base(Path(top) / "bases" / name, *base)
        while len(done) < len(numbers) and (not done or time.monotonic() < end):
            done += batch(numbers[len(done) :][:BATCH], seed, Path(top))
            progress(done)
    return done


def summarize(cases, seed=0):
    """Print a table of outcomes, every failure, and the count. Returns how many have failed."""
    table, columns = defaultdict(Counter), ["loads", "refused", "failed"]
    for case in cases:
        table[case.kind]["failed" if case.wrong else {LOADS: "loads", REFUSED: "refused"}[case.status]] += 1
    print(f"{'corruption':34}" + "".join(f"{c:>9}" for c in columns))
    for kind in table:
        print(f"{kind:34}" + "".join(f"{table[kind][c]:9}" for c in columns))
    failed = [case for case in cases if case.wrong]
    for case in failed:
        again = f"python tests/fuzz.py --case {case.number}" + f" --seed {seed}" * (seed != 0)
        print(f"FAILED {case.number} ({case.kind}): {case.wrong[:LENGTH]}\n    {again}")
    slowest = max(cases, key=lambda case: case.seconds)
    print(f"the slowest was case {slowest.number}, {slowest.seconds:.2f} s")
    print(f"{len(cases) - len(failed)} passed, {len(failed)} failed")
    return len(failed)


def main(argv=None):
    p = argparse.ArgumentParser(description="Corrupt checkpoints and see what generate.py makes of them.")
    p.add_argument("--cases", type=int, default=10_000, metavar="N", help="run the cases below N")
    p.add_argument("--first", type=int, default=0, metavar="I", help="from case I on")
    p.add_argument("--minutes", type=float, default=30, metavar="M", help="begin no more cases after that")
    p.add_argument("--seed", type=int, default=0, metavar="S", help="other cases")
    p.add_argument("--case", type=int, metavar="I", help="run one case and show it")
    a, start = p.parse_args(argv), time.perf_counter()
    if a.case is not None:
        return show(a.case, a.seed)
    if a.minutes <= 0 or not 0 <= a.first < a.cases:
        p.error("--minutes must be positive, and --first must lie within 0 and --cases")

    def progress(done):
        failed = sum(case.wrong is not None for case in done)
        print(f"{len(done)} cases, {failed} failed, {time.perf_counter() - start:.0f} s", flush=True)

    print(f"seed {a.seed}, cases {a.first} to {a.cases - 1}, at most {a.minutes:g} minutes", flush=True)
    cases = run(range(a.first, a.cases), a.seed, progress, 60 * a.minutes)
    if len(cases) < a.cases - a.first:
        print(f"the time is up after {len(cases)} of {a.cases - a.first} cases: go on with --first "
              f"{a.first + len(cases)}" + f" --seed {a.seed}" * (a.seed != 0))
    return int(summarize(cases, a.seed) > 0)


def show(number, seed):
    """Run one case and print all that there is to know of it."""
    [case] = run([number], seed)
    print(f"case {case.number}, {case.kind}\n{case.how!r}\ngenerate.py {' '.join(map(ascii, case.argv))}")
    print(f"status {case.status} after {case.seconds:.2f} s, {case.wrong or 'passed'}\n{case.err}", end="")
    return int(case.wrong is not None)


if __name__ == "__main__":
    sys.exit(main())
