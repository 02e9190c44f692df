"""Texts, a tokenizer and a model that training has something to learn from."""
import random
from dataclasses import replace

from tiny import LLAMA, make

from lab.corpus import train_tokenizer
from support.texts import BOUNDARY


def story(seed, count=60):
    """Documents of few words."""
    draw = random.Random(seed)
    words = ("Lily Tom Anna", "saw took lost found", "the a", "cat ball dog tree")
    sentences = (" ".join(draw.choice(part.split()) for part in words) + "."
                 for _ in range(6 * count))
    return BOUNDARY.join(" ".join(next(sentences) for _ in range(6)) for _ in range(count))


def story_tokenizer():
    """A byte-level BPE of 300 tokens, whose id 0 separates documents."""
    return train_tokenizer(story(0).split(BOUNDARY), 300)


def foreseeable():
    """A model whose text can be foreseen. It has few tokens, and as attention is weak, one tells
    the next."""
    m = make(replace(LLAMA, vocab_size=300, bos=0, eos=(0,)), 1).float()
    for b in m.blocks:
        b.attn.wo *= 0.05
    m.head *= 4
    m.head[12:] = 0
    return m
