"""A cache in pages, as servers have it: exercise 27, which exercises/tests/test_paged.py grades."""
import torch


class PagedCache:
    """Keys and values in pages of `page` slots, which all texts of a batch take from one pool
    (PagedAttention, Kwon et al. 2023, arXiv 2309.06180, section 4.1).

    A text has a table of its pages: slot s of row b stands in page tables[b][s // page], at s %
    page. `free` holds the pages that no text has. So a text takes as much memory as it is long, and
    what a rejected draft took goes back.
    """

    def __init__(self, c, batch, slots, dtype, page, pages):
        shape = c.n_layers, pages, c.n_kv_heads, page, c.head_dim
        self.keys = torch.zeros(shape, dtype=dtype)
        self.values = torch.zeros(shape, dtype=dtype)
        self.page = page
        self.free = list(range(pages))
        self.tables = [[] for _ in range(batch)]
        # the loop asks for the shape that a whole cache has; this takes no memory
        self.k = torch.empty(c.n_layers, batch, c.n_kv_heads, slots, c.head_dim, dtype=dtype,
                             device="meta")

    def write(self, layer, k, v, at, start=0):
        """Store k, v (B, Hkv, T, D) in the slots of their tokens, `at` a Placement, and return what
        these tokens may read, the slots start .. at.end-1 (B, Hkv, S, D), in tensors of their own.
        A slot for which a text has no page yet reads as 0. A text takes pages as it needs them, and
        no other ones. Raises MemoryError if none is free."""
        B, Hkv, T, D = k.shape
        slots = at.slots.expand(B, T)
        for table, last in zip(self.tables, slots.amax(1).tolist(), strict=True):
            while len(table) * self.page <= last:
                if not self.free:
                    raise MemoryError("no page is free")
                table.append(self.free.pop())
        found = []
        for pool, new in ((self.keys[layer], k), (self.values[layer], v)):
            out = new.new_zeros(B, Hkv, at.end, D, dtype=pool.dtype)
            for b, table in enumerate(self.tables):
                pages = torch.tensor(table)
                pool[pages[slots[b] // self.page], :, slots[b] % self.page] = (
                    new[b].transpose(0, 1).to(pool.dtype))
                mine = pool[pages].transpose(0, 1).flatten(1, 2)[:, : at.end]   # (Hkv, slots, D)
                out[b, :, : mine.shape[1]] = mine
            found.append(out[:, :, start:])
        return tuple(found)


def keep(paged, lengths):
    """Row b of a PagedCache needs its first lengths[b] slots alone: the pages that hold none of
    them are free again."""
    for table, length in zip(paged.tables, lengths, strict=True):
        pages = -(-length // paged.page)
        paged.free += table[pages:]
        del table[pages:]
