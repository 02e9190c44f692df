"""A cache in pages: exercise 27, exercises/paged.py."""
from dataclasses import replace

import torch
from teach import Mistakes, compare, fail, promise
from tiny import LIVELY, PROMPTS, make, wide

from exercises.paged import PagedCache, keep
from layerskip import SelfDraft
from model import Placement
from sampling import Coins, to_probs
from speculative import rounds

ONE = replace(LIVELY["llama"], n_layers=1, n_kv_heads=1, head_dim=1)    # a number for each slot


def pages_of(cache):
    return [len(table) for table in cache.tables]


def written(cache, write, *blocks):
    """What the last of these blocks reads, its keys (B, slots). A block: keys, and where."""
    for keys, at in blocks:
        k = wide(keys)[:, None, :, None]
        found = write(cache, 0, k, 10 * k, at)      # the grader's guard sees that it is a pair
    return torch.cat([t[:, 0, :, 0] for t in found])


def to(*slots):
    """A Placement at these slots of each row."""
    slots = torch.tensor(slots)
    return Placement(slots, slots, int(slots.min()), int(slots.max()) + 1)


def test_a_table_for_each_text():
    """Pages of two slots, five in all. Row 0 has three tokens, row 1 one."""
    blocks = ([[1, 2, 3], [4, 5, 6]], Placement.span(0, 3)), ([[7], [8]], to([3], [1]))

    def reads(write):
        cache = PagedCache(ONE, 2, 8, torch.float64, 2, 5)
        found = written(cache, write, *blocks)
        promise(pages_of(cache) == [2, 2] and len(cache.free) == 1,
                "pages of two slots, and two texts of at most 4 slots",
                "two pages for each, and one free", f"{pages_of(cache)}, {len(cache.free)} free",
                "a text takes a page when it first writes into one of its slots")
        held = sorted(sum(cache.tables, []) + cache.free)
        promise(held == [0, 1, 2, 3, 4], "five pages", "each in one table, or free", f"{held}")
        return found

    want = [[1, 2, 3, 7], [4, 8, 6, 0]]
    compare(reads(PagedCache.write), want + [[10 * x for x in row] for row in want],
            Mistakes("PagedCache.write", reads),
            "two texts of three tokens, then token 3 of the first and token 1 of the second; "
            "pages of two slots: the keys that they read, and the values")


def test_what_was_rejected_goes_back():
    cache = PagedCache(ONE, 1, 20, torch.float64, 4, 3)
    for start, kept, pages in ((0, 4, 1), (4, 8, 2), (8, 9, 3), (8, 8, 2), (8, 5, 2), (4, 4, 1),
                               (2, 0, 0)):
        written(cache, PagedCache.write, ([[1] * 4], Placement.span(start, start + 4)))
        keep(cache, [kept])
        promise(pages_of(cache) == [pages] and len(cache.free) == 3 - pages,
                f"pages of 4 slots, three in all; slots {start} to {start + 3} are written, and "
                f"the first {kept} slots are kept", f"{pages} pages held, {3 - pages} free",
                f"{pages_of(cache)[0]} held, {len(cache.free)} free",
                "a page goes back if none of its slots is needed")
    try:
        written(cache, PagedCache.write, ([[1] * 13], Placement.span(0, 13)))
    except MemoryError:
        return
    fail("three pages of 4 slots, and a text of 13 tokens", "a MemoryError", "no error")


@torch.inference_mode()
def test_a_text_in_pages_is_the_same_to_the_bit():
    """Drafted rounds of four texts, in just as many pages as they need."""
    for family, c in LIVELY.items():
        m = make(c)
        runs = []
        for paged in (False, True):
            cache = None
            if paged:
                cache = PagedCache(c, 4, 64, torch.float64, 4, 4 * 9)
            said = []
            steps = rounds(m, PROMPTS, 20, SelfDraft(m, [0, 1, 3, 4, 7], 3),
                           lambda x: to_probs(x, 1.0), Coins(1), (), cache)
            for state, r in steps:
                said.append((r.new, r.p))
                if paged:
                    keep(cache, [n - 1 for n in state.lengths])
            runs.append(said)
        given = f"20 tokens of four texts with a tiny {family}, drafted, in pages of 4 slots"
        for n, ((new, p), (same, q)) in enumerate(zip(*runs, strict=True)):
            promise(new == same, f"{given}: round {n}", f"{new}", f"{same}",
                    "another slot is read than was written: look at the tables")
            compare(q, p, {}, f"{given}: p of round {n}, to the bit", 0.0)
