"""The library as an engine. It answers the cases of engine.json, which were made with it.

    python porting/engine.py python porting/library_engine.py
"""
import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from machine.exact import Race  # noqa: E402
from methods.block import verify_block  # noqa: E402
from methods.trees import verify_tree  # noqa: E402
from sampling import Coins, one_hot  # noqa: E402
from verification import verify  # noqa: E402

RULES = {
    "token": verify, "block": verify_block, "tree": verify_tree, "race": Race, "match": verify}


def answer(r, rules=RULES, coins=None, dtype=torch.float64):
    """One case, as a batch of one row that spends the given uniforms."""
    p = torch.tensor([r["p"]], dtype=dtype)
    q = None
    if r["q"] is not None:
        q = torch.tensor(r["q"], dtype=dtype).view(1, len(r["q"]), p.shape[-1])
    coins = coins or Coins()
    if r["rule"] == "race":
        race = rules["race"](r["seed"])
        place = r["position"] + torch.arange(len(r["p"]))[None]
        p = race.settle(p, place)
        q = race.settle(q, place[:, :-1])
        tokens = q.argmax(-1)
        accepted, token = verify(p, q, tokens, coins)   # one-hots: no coin decides anything
        return {"tokens": tokens[0].tolist(), "accepted": int(accepted), "token": int(token)}
    coins.pool = torch.tensor(r["uniforms"], dtype=torch.float64)
    tokens = torch.tensor([r["tokens"]], dtype=torch.long)
    length = torch.tensor([r["length"]])
    if r["rule"] == "match":    # p becomes what is written at each place, whatever was drafted
        p = one_hot(coins.choose(p), p)
        q = None
        coins = Coins()         # one-hots: no coin decides anything
    if r["rule"] == "tree":
        parents = torch.tensor([r["parents"]], dtype=torch.long)
        accepted, token = rules["tree"](p, tokens, parents, coins, q, length)
    else:
        accepted, token = rules[r["rule"]](p, q, tokens, coins, length)
    return {"accepted": int(accepted), "token": int(token)}


if __name__ == "__main__":
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps({"case": request["case"], **answer(request)}))
