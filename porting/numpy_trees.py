"""What trees of drafts add to numpy_port.py: with this file, every case passes.

Siblings share a position, but not a slot. So the rotation goes by depth, a mask says which tokens
see which, and the slots of the accepted path move together before the next round.
"""
import json
import sys
from functools import partial

import numpy as np
from numpy_port import OPS, Model, choose, pack, propose, rounds, run, tensor, to_probs


def ancestors(parents):
    """tree[i][j]: does node i see node j, itself or an ancestor? Node 0 is the last known token."""
    tree = [[1] + [0] * len(parents)]
    for k, parent in enumerate(parents, 1):
        tree.append([int(j == k or seen) for j, seen in enumerate(tree[parent])])
    return tree


def visible(positions, end, window, slots, tree):
    """mask[i][s] for a tree whose nodes stand at these positions and slots."""
    mask = [[0] * end for _ in slots]
    for i, own in enumerate(positions):
        for s in range(slots[-1] + 1):
            j = s - slots[0]  # which node; below 0 it is an older token, whose slot is its position
            back = own - (s if j < 0 else positions[j])
            mask[i][s] = int((j < 0 or tree[i][j]) and (window is None or back < window))
    return mask


def run_tree(m, tokens, first, parents, cache, sublayers=None):
    """numpy_port's `run` over the nodes of a tree: logits, and the positions of the nodes."""
    tree = ancestors(parents)
    at, slots = [first + sum(row) - 1 for row in tree], range(first, first + len(tokens))
    seen = partial(visible, slots=slots, tree=tree)
    return run(m, tokens, first, cache, sublayers, at, seen)[0], at


def keep(cache, first, path):
    """Move the accepted nodes to the slots first, first + 1, ..."""
    cache[:, :, :, [first + i for i in range(len(path))]] = (
        cache[:, :, :, [first + node for node in path]])


def verify(p, q, draft, parents, flips, coin):
    """p: a row per node, q: a row per drafted token. Returns the accepted path, the token after it,
    and the ratios. What a node's rejected children leave of its p replaces p for the next child."""
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


def propose_tree(m, r, texts, left, caches, coins):
    """numpy_port's `propose` for one text, with siblings of the first tokens of the chain. Each is
    drawn from what is left of q; if nothing is left, it is the likeliest unused token."""
    (draft,), _, (q,), spent = propose(m, r, texts, left, caches, coins)
    K, logits, rest, last, text = len(draft), [], [row.copy() for row in q], list(draft), texts[0]
    parents = list(range(K))
    for k in range(K):      # the draft's logits again: same cache entries
        token, at = (text + draft)[len(text) - 1 + k], len(text) - 1 + k
        logits.append(run(m, [token], at, caches[0], r["drafter"]["sublayers"])[0][0])
    for width in r["drafter"]["widths"]:
        for k in range(min(width, K, left[0] - 1 - len(draft))):
            rest[k][last[k]], logits[k][last[k]] = 0, -np.inf
            top = np.eye(len(rest[k]))[np.argmax(logits[k])]
            q.append(rest[k] / rest[k].sum() if rest[k].sum() > 0 else top)
            spent.append(next(coins))
            last[k] = choose(q[-1], spent[-1])
            draft.append(last[k])
            parents.append(k)
    return [draft], [parents], [q], spent


def check_tree(m, r, block, first, cache, parents, q, flips, coin):
    logits, at = run_tree(m, block, first, parents, cache)
    p = [to_probs(row, **r["sampling"]) for row in logits]
    path, token, ratio = verify(p, q, block[1:], parents, flips, coin)
    keep(cache, first, path)
    return at, p, path[1:], token, ratio


def blocks(r):
    m = Model(r["model"])
    cache, logits = np.zeros(m.shape, "f4"), []
    for b in r["blocks"]:
        parents = range(len(b["tokens"]) - 1) if b["parents"] is None else b["parents"]
        logits.append(pack(run_tree(m, b["tokens"], b["first"], parents, cache, b["sublayers"])[0]))
        keep(cache, b["first"], b["keep"] or [])
    return {"logits": logits}


def judge(r):
    p = tensor(r["p"])
    q = np.eye(p.shape[1])[r["draft"]] if r["q"] is None else tensor(r["q"])
    path, token, _ = verify(p, q, r["draft"], r["parents"], r["uniforms"], r["uniforms"][-1])
    return {"node": path[-1], "token": token}


TREES = {
    "visible": lambda r: {
        "mask": visible(r["positions"], r["end"], r["window"], r["slots"], r["tree"])},
    "blocks": blocks, "verify": judge, "rounds": lambda r: rounds(r, propose_tree, check_tree)}

if __name__ == "__main__":
    for line in sys.stdin:
        case = json.loads(line)
        answer = (TREES if case["trees"] else OPS)[case["op"]](case)
        print(json.dumps({"case": case["case"], **answer}))
