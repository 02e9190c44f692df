"""What trees of drafts add to numpy_port.py: with this file, every case passes.

The one thing to remember: siblings share a position, but not a slot. So a token is turned by its depth, a
mask says who sees whom, and the slots of the accepted path are moved together before the next round.
"""
import itertools
import json
import sys

import numpy as np
from numpy_port import OPS, Model, attend, bits, choose, pack, propose, rotate, run, tensor, to_probs


def ancestors(parents):
    """tree[i][j]: does node i see node j? Itself, and all it hangs on. Node 0 is the last known token."""
    tree = [[1] + [0] * len(parents)]
    for k, parent in enumerate(parents, 1):
        tree.append([int(j == k or seen) for j, seen in enumerate(tree[parent])])
    return tree


def visible(positions, slots, end, tree, window):
    """mask[i][s] for a tree whose nodes stand at these positions and slots."""
    mask = [[0] * end for _ in slots]
    for i, own in enumerate(positions):
        for s in range(slots[-1] + 1):
            j = s - slots[0]    # which node; below 0 it is an older token, whose slot is its position
            back = own - (s if j < 0 else positions[j])
            mask[i][s] = int((j < 0 or tree[i][j]) and (window is None or back < window))
    return mask


def attention_of(tree):
    """numpy_port's attention, for a block that is a tree."""
    def attention(m, layer, x, slots, cache):
        at = [slots[0] + sum(row) - 1 for row in tree]
        name, end, (keys, values) = f"model.layers.{layer}.self_attn.", slots[-1] + 1, cache[:, layer]
        q, k, v = ((x @ m.w[f"{name}{part}_proj.weight"].T).reshape(len(x), -1, m.D) for part in "qkv")
        q, k = rotate(q, at, m.freqs), rotate(k, at, m.freqs)
        keys[:, slots], values[:, slots] = k.swapaxes(0, 1), v.swapaxes(0, 1)                   # (Hkv, T, D)
        mask = visible(at, slots, end, tree, m.window if layer % 2 == 0 else None)
        y = attend(q.swapaxes(0, 1), keys[:, :end], values[:, :end], mask, m.scale, m.cap)
        return y @ m.w[f"{name}o_proj.weight"].T
    return attention


def keep(cache, first, path):
    """Move the accepted nodes to the slots first, first + 1, ..."""
    cache[:, :, :, [first + i for i in range(len(path))]] = cache[:, :, :, [first + node for node in path]]


def verify(p, q, draft, parents, flips, coin):
    """p: a row for each node, q: a row for each guess. Returns the accepted path, the token after it, and the
    ratios. What a node's refused children leave of its p takes the place of p for the next child."""
    rest, ratio, path = [np.array(row, float) for row in p], [], [0]
    for k, t in enumerate(draft):
        left = rest[parents[k]]
        ratio.append(float(left[t] / q[k][t]))
        less = np.maximum(left - q[k], 0)
        if less.sum() > 0:
            rest[parents[k]] = less / less.sum()
    for k in range(len(draft)):
        if parents[k] == path[-1] and flips[k] < ratio[k]:
            path.append(k + 1)
    return path, choose(rest[path[-1]], coin), ratio


def siblings(m, r, text, left, cache, draft, q, coins):
    """Further guesses for the first tokens of a chain, appended to draft and q. Each is drawn from what those
    before it left of q; where they left nothing, it is the most likely token yet. Returns parents and the
    uniforms spent."""
    K, logits, rest, last = len(draft), [], [row.copy() for row in q], list(draft)
    parents, spent = list(range(K)), []
    for k in range(K):      # the draft's logits once more: it writes what it wrote
        at = len(text) - 1 + k
        logits.append(run(m, [(text + draft)[at]], at, cache, r["drafter"]["sublayers"])[0][0])
    for width in r["drafter"]["widths"]:
        for k in range(min(width, K, left - 1 - len(draft))):
            rest[k][last[k]], logits[k][last[k]] = 0, -np.inf
            top = np.eye(len(rest[k]))[np.argmax(logits[k])]
            q.append(rest[k] / rest[k].sum() if rest[k].sum() > 0 else top)
            spent.append(next(coins))
            last[k] = choose(q[-1], spent[-1])
            draft.append(last[k])
            parents.append(k)
    return parents, spent


def one_round(m, r, text, left, cache, coins):
    (draft,), (q,), drawn = propose(m, r, [text], [left], [cache], coins)
    parents, spent = siblings(m, r, text, left, cache, draft, q, coins)
    tree, block, first = ancestors(parents), [text[-1], *draft], len(text) - 1
    p = [to_probs(row, **r["sampling"]) for row in run(m, block, first, cache, None, attention_of(tree))[0]]
    flips, coin = [next(coins) for _ in draft], next(coins)
    path, token, ratio = verify(p, q, draft, parents, flips, coin)
    keep(cache, first, path)
    new = [block[node] for node in path[1:]] + [token]
    end = next((i + 1 for i, t in enumerate(new) if t in r["eos"]), len(new))
    text += new[:end]
    told = dict(positions=[first + sum(row) - 1 for row in tree], block=block, parents=parents, draft=draft,
                p=[p[parent][t] for parent, t in zip(parents, draft, strict=True)],
                q=[row[t] for row, t in zip(q, draft, strict=True)], ratio=ratio,
                accepted=min(len(path) - 1, end), token=token, new=new[:end])
    told = {name: [value] for name, value in told.items()}
    return told | dict(u_draft=drawn + spent, u_flip=flips, u_next=[coin])


def rounds(r):
    m, text, lines = Model(r["model"]), list(r["prompts"][0]), []
    coins = (bits(r["seed"], i) * 2.0**-53 for i in itertools.count())
    left, cache = min(r["max_new"], m.max_len - len(text)), np.zeros(m.shape, "f4")
    run(m, text, 0, cache)
    while left > 0:
        lines.append({"round": len(lines), **one_round(m, r, text, left, cache, coins)})
        left = 0 if text[-1] in r["eos"] else left - len(lines[-1]["new"][0])
    return {"rounds": lines}


def blocks(r):
    m = Model(r["model"])
    cache, logits = np.zeros(m.shape, "f4"), []
    for b in r["blocks"]:
        tree = ancestors(range(len(b["tokens"]) - 1) if b["parents"] is None else b["parents"])
        logits.append(pack(run(m, b["tokens"], b["first"], cache, b["sublayers"], attention_of(tree))[0]))
        keep(cache, b["first"], b["keep"] or [])
    return {"logits": logits}


def judge(r):
    p, q = tensor(r["p"]), np.eye(r["p"]["shape"][1])[r["draft"]] if r["q"] is None else tensor(r["q"])
    path, token, _ = verify(p, q, r["draft"], r["parents"], r["uniforms"], r["uniforms"][-1])
    return {"node": path[-1], "token": token}


TREES = {
    "visible": lambda r: {"mask": visible(r["positions"], r["slots"], r["end"], r["tree"], r["window"])},
    "blocks": blocks, "verify": judge, "rounds": rounds}

if __name__ == "__main__":
    for line in sys.stdin:
        case = json.loads(line)
        answer = (TREES if case["trees"] else OPS)[case["op"]](case)
        print(json.dumps({"case": case["case"], **answer}))
