"""Worked examples of `visible` for exercise 4, with the masks that well-known mistakes give.
That any mask is its definition is a property in tests/test_properties.py."""
import torch
from teach import look, promise

from model import visible


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
    mask, given = visible(at, at, 5), "rows with blocks in slots 3 4 and 1 2, end = 5"
    promise(mask.shape == (2, 2, 5), given, "(2, 2, 5)", str(tuple(mask.shape)),
            "one mask per row: (B, T, end)")
    look(mask[0], ["xxxx.", "xxxxx"], {}, f"{given}; row 1")
    look(mask[1], ["xx...", "xxx.."], {
        "the second row was given the first row's mask": ["xxxx.", "xxxxx"]}, f"{given}; row 2")


def test_visible_within_a_window():
    at = torch.tensor([[0, 1, 2, 3]])
    look(visible(at, at, 4, window=2)[0], ["x...", "xx..", ".xx.", "..xx"], {
        "window off by one: a key is visible iff i - j < window": ["x...", "xx..", "xxx.", ".xxx"],
        "window off by one: it counts the token itself": ["x...", ".x..", "..x.", "...x"],
        "the window was ignored": ["x...", "xx..", "xxx.", "xxxx"]},
        "a block in slots 0 1 2 3, end = 4, window = 2; x: may read")
    look(visible(at[:, 3:], at[:, 3:], 4, window=2)[0], ["..xx"], {
        "the window holds inside the block only; it cuts the slots before it, too": ["xxxx"]},
        "a block in slot 3, end = 4, window = 2")


def test_visible_where_slots_are_not_positions():
    """Scoring: three known tokens again, each on its own, in slots behind their first copies."""
    at, alone = torch.tensor([[0, 1, 2]]), torch.eye(3, dtype=torch.bool)
    look(visible(at, at + 3, 6, alone)[0], ["...x..", "x...x.", "xx...x"], {
        "before the block a token sees *smaller* positions, not its own first copy":
            ["x..x..", "xx..x.", "xxx..x"],
        "a token must not see the slots of its own future": ["xxxx..", "xxx.x.", "xxx..x"],
        "slot <= position fails with a tree, or where slots differ": ["x.....", "xx....", "xxx..."],
        "slot <= own slot fails with a tree, or where slots differ": ["xxxx..", "xxxxx.", "xxxxxx"],
        "tree was ignored inside the block": ["...x..", "x..xx.", "xx.xxx"]},
        "tokens at positions 0 1 2 in slots 3 4 5, which see only themselves of the block")
    look(visible(at, at + 3, 6, window=2)[0], ["...x..", "x..xx.", ".x..xx"], {
        "inside the block a key's position is its token's, not its slot":
            ["...x..", "x..xx.", ".x.xxx"]},
        "a chain at positions 0 1 2 in slots 3 4 5, window = 2")


def test_visible_in_a_tree():
    """Root at position 2 with two children at 3; the second child, in slot 4, has a child at 4."""
    tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
    positions, slots = torch.tensor([[2, 3, 3, 4]]), torch.tensor([[2, 3, 4, 5]])
    given = f"positions {positions.tolist()}, slots {slots.tolist()}, tree {tree.int().tolist()}"
    look(visible(positions, slots, 7, tree)[0], ["xxx....", "xxxx...", "xxx.x..", "xxx.xx."], {
        "tree[i, j] says that i sees j, not j sees i": ["xxxxxx.", "xx.x...", "xx..xx.", "xx...x."],
        "tree was ignored": ["xxx....", "xxxx...", "xxxxx..", "xxxxxx."]}, given)
    near = visible(positions, slots, 7, tree, window=2)[0]
    look(near, [".xx....", "..xx...", "..x.x..", "....xx."], {
        "the window is a distance of positions, not of slots":
            [".xx....", "..xx...", "....x..", "....xx."]}, f"{given}, window = 2")
