"""Skip sets as users write them."""
import re
from pathlib import Path

from checkpoint import read_json
from layerskip import without
from model import Refused


def skip_set(text):
    """The blocks whose attention is skipped, the blocks whose MLP is skipped, and how far to draft
    (None if that is left open). `text` may be "a3,m4", which skips attention 3 and MLP 4, or a file
    of search.py."""
    names = [name.strip() for name in str(text).split(",")]
    if all(re.fullmatch(r"[am][0-9]{1,6}", name) for name in names):
        attn, mlp = ([int(name[1:]) for name in names if name[0] == kind] for kind in "am")
        return attn, mlp, None
    sets = read_json(Path(text))
    attn, mlp, gamma = sets.get("attn", []), sets.get("mlp", []), sets.get("gamma")
    fine = {"attn", "mlp"} & sets.keys() and isinstance(attn, list) and isinstance(mlp, list)
    if not fine or not all(type(i) is int and i >= 0 for i in (*attn, *mlp, gamma or 0)):
        raise Refused(f'{text}: expected lists of block numbers under "attn" and "mlp", and '
                      'maybe a "gamma", as search.py writes them')
    return attn, mlp, gamma


def read_skip(text, n_layers):
    """The sub-layers that stay when the ones in `skip_set` are skipped."""
    attn, mlp, _ = skip_set(text)
    return without(n_layers, attn, mlp)
