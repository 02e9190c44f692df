"""Text to train and measure on, from files of documents to a byte-level BPE, streams of tokens, and
batches.

Every document begins with the begin-of-text id, and the batch of a step depends on nothing but seed
and step, so that a run can be resumed or repeated exactly.
"""
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from model import Refused
from support.texts import BOUNDARY, read_texts

HELD_OUT = 0.02  # the share of each training file that is measured on where no other file is given


def train_tokenizer(documents, vocab):
    """A byte-level BPE (Radford et al. 2019, section 2.2), which can encode any text and decode it
    again without loss, of at least 257 tokens. Id 0 is the boundary of documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(documents, trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[BOUNDARY], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOUNDARY} $A", special_tokens=[(BOUNDARY, tokenizer.token_to_id(BOUNDARY))])
    return tokenizer


def stream(tokenizer, documents, start=None):
    """All documents in one row, each after the ids in `start`, or as a
    prompt begins: (N,) int32."""
    rows = tokenizer.encode_batch(documents, add_special_tokens=start is None)
    return torch.tensor([t for row in rows for t in (*(start or ()), *row.ids)], dtype=torch.int32)


@dataclass
class Corpus:
    """Streams of tokens by file name, and what weighs how much."""
    train: dict           # {file name: (N,) int32}
    valid: dict           # the same, to measure on
    weights: list         # one for each training file: how often it is drawn, relative to its size
    tokenizer: Tokenizer

    def batch(self, seed, step, rows, length):
        """Windows (rows, length + 1) at random places. The chance of a file is its weight times its
        size."""
        g = torch.Generator().manual_seed(seed * 1_000_003 + step)
        streams = list(self.train.values())
        sizes = torch.tensor([len(s) for s in streams], dtype=torch.float64)
        share = torch.tensor(self.weights, dtype=torch.float64) * sizes
        files = torch.multinomial(share, rows, replacement=True, generator=g).tolist()
        where = torch.rand(rows, generator=g, dtype=torch.float64).tolist()
        windows = []
        for file, u in zip(files, where, strict=True):
            start = int(u * (len(streams[file]) - length))
            windows.append(streams[file][start : start + length + 1])
        return torch.stack(windows)


def windows(tokens, size, most, stride):
    """Rows of `size` tokens, each begun `stride` later, of the first `most` tokens (N,): (n, size)
    int64, of which there is at least one."""
    count = max(1, min(most, len(tokens) - size + stride) // stride)
    return tokens.unfold(0, size, stride)[:count].long()


def read_weighted(items):
    """(documents by file name, the weight of each file) of FILE or FILE=WEIGHT; a
    FILE alone weighs 1."""
    documents, weights = {}, []
    for item in items:
        path, _, weight = item.rpartition("=") if "=" in item else (item, "", "1")
        if not re.fullmatch(r"\d*\.?\d+", weight) or float(weight) == 0:
            raise Refused(f"{item}: expected FILE or FILE=W, where W is a number above 0")
        weights.append(float(weight))
        if Path(path).name in documents:
            raise Refused(f"{item}: two files have the same name")
        documents[Path(path).name] = read_texts(Path(path), "text", BOUNDARY)
    return documents, weights


def read(files, valid, length, vocab=4096, tokenizer=None, start=None):
    """A Corpus whose streams are longer than `length`.

    files: each FILE or FILE=WEIGHT. valid: files to measure on; an empty list stands for the last
    part of each training file. Without a tokenizer, one of `vocab` tokens is trained. start: the
    ids between two documents, such as end-of-text and begin-of-text (default: those that the
    tokenizer puts before a prompt). Raises ValueError or FileNotFoundError for files that are
    missing, empty or too short.
    """
    documents, weights = read_weighted(files)
    held_out, _ = read_weighted(valid)
    tokenizer = tokenizer or train_tokenizer((t for texts in documents.values() for t in texts),
                                             vocab)
    train = {name: stream(tokenizer, texts, start) for name, texts in documents.items()}
    valid = {name: stream(tokenizer, texts, start) for name, texts in held_out.items()}
    return split(train, valid, weights, tokenizer, length)


def split(train, valid, weights, tokenizer, length):
    """A Corpus of streams by name. Without any to measure on, the last part of each is held out.
    Raises ValueError where one is not longer than `length`."""
    if not valid:
        cuts = {name: max(0, len(s) - max(length + 1, int(HELD_OUT * len(s))))
                for name, s in train.items()}
        valid = {name: s[cuts[name] :] for name, s in train.items()}
        train = {name: s[: cuts[name]] for name, s in train.items()}
    for name, s in [*train.items(), *valid.items()]:
        if len(s) <= length:
            raise Refused(f"{name}: {len(s)} tokens are too few for one sequence of {length} "
                          "and the token after it; give more text or a smaller --context")
    return Corpus(train, valid, weights, tokenizer)
