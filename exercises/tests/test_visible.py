"""Worked examples of `visible` for exercise 4. That any mask is its definition is a property in
tests/test_properties.py."""
import pytest
import torch
from teach import Mistakes, look, picture

from model import visible

ALONE = torch.eye(3, dtype=torch.bool)
# the root with two children, the second of which has a child
TREE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
AT = [[2, 3, 3, 4]]
SLOTS = [[2, 3, 4, 5]]
CASES = {   # positions, slots, end, tree, window, and what each token may read
    "behind a filled cache": ([[2, 3]], [[2, 3]], 5, None, None, "xxx.. xxxx."),
    "rows at different places": (
        [[3, 4], [1, 2]], [[3, 4], [1, 2]], 5, None, None, "xxxx. xxxxx xx... xxx.."),
    "within a window": ([[0, 1, 2, 3]], [[0, 1, 2, 3]], 4, None, 2, "x... xx.. .xx. ..xx"),
    "a window before the block": ([[3]], [[3]], 4, None, 2, "..xx"),
    "scoring: three known tokens again, behind their first copies": (
        [[0, 1, 2]], [[3, 4, 5]], 6, ALONE, None, "...x.. x...x. xx...x"),
    "slots are not positions": ([[0, 1, 2]], [[3, 4, 5]], 6, None, 2, "...x.. x..xx. .x..xx"),
    "a tree": (AT, SLOTS, 7, TREE, None, "xxx.... xxxx... xxx.x.. xxx.xx."),
    "a tree within a window": (AT, SLOTS, 7, TREE, 2, ".xx.... ..xx... ..x.x.. ....xx.")}


@pytest.mark.parametrize("name", CASES)
def test_visible_by_hand(name):
    positions, slots, end, tree, window, want = CASES[name]

    def draw(f):
        return f(torch.tensor(positions), torch.tensor(slots), end, tree, window).flatten(0, 1)

    shown = None if tree is None else tree.int().tolist()
    look(draw(visible), want.split(), Mistakes("visible", lambda f: picture(draw(f))),
         f"positions {positions} in slots {slots}, end = {end}, tree = {shown}, window = {window}; "
         "x: may read")
