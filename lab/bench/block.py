"""Tokens per round by block verification beside token by token, and of trees by traversal: with the
same seeds and from the same distribution."""
import statistics
import time
from functools import partial
from itertools import product

import torch

from drafter import Wrapper
from lab.bench.real import KINDS, chat_ids
from lab.bench.shared import SETS, beside, load, page, prompt_ids, table
from lab.traversal import verify_traversal
from layerskip import SelfDraft, early_exit
from methods import heads
from methods.trees import Siblings, Tree, verify_tree
from sampling import Coins, to_probs
from speculative import generate
from support.cli import read_skip
from verification import verify, verify_block

GAMMAS, TEMPERATURES, SEEDS = range(2, 7), (0.8, 1.0), 4
JUDGES = {"token by token": verify, "block": verify_block}
TREES = {"token by token": verify_tree, "traversal": verify_traversal}
WIDTHS = {"2 / 2 / 2": [2, 2, 2], "3 / 2 / 1": [3, 2, 1]}   # siblings at each place of a chain of three
TRIES = 8       # of each tree


class Judged(Wrapper):
    """Hands its drafter's trees on, and first has each of them judged by both rules. `depths`: how many
    tokens each accepts, on average over TRIES."""

    def __init__(self, drafter):
        super().__init__(drafter)
        self.depths = {name: [] for name in TREES}

    def propose(self, state):
        draft = super().propose(state)
        if isinstance(draft, Tree):
            at = draft.place(state)
            block = torch.cat([state.last(), draft.tokens], 1)
            p = state.probs(state.model.unembed(state.model.run(state.model.embed(block), at, state.cache)))
            for (name, judge), seed in product(TREES.items(), range(TRIES)):
                node, _ = judge(p, draft.tokens, draft.parents, Coins(seed), draft.q)
                self.depths[name].append(int(at.tree[0, node].sum()) - 1)
        return draft


def trees(a, model, make, prompts):
    """The lines of a table: drafted tokens accepted per round. make(gamma): a drafter of chains."""
    rows = []
    for temperature, (shape, widths) in product(TEMPERATURES, WIDTHS.items()):
        judged = Judged(Siblings(make(len(widths)), widths))
        for ids in prompts:
            generate(model, [ids], a.new, judged, partial(to_probs, temperature=temperature), Coins(0),
                     model.c.eos)
        one, two = (statistics.fmean(depths) for depths in judged.depths.values())
        gain = (two + 1) / (one + 1) - 1
        rows.append([f"{temperature}", shape, f"{one:.2f}", f"{two:.2f}", f"{gain:+.1%}"])
    return table(["temperature", "siblings", "accepted, token by token", "traversal", "gain in tau"], rows)


@torch.inference_mode()
def run(a):
    model, tokenizer = load(a)
    L = model.c.n_layers
    if a.heads:
        make, what = heads.load(a.heads, model).drafter, f"those of {a.heads}"
        prompts = [ids for kind in a.prompts or KINDS for ids in chat_ids(a, kind, tokenizer)]
    else:
        subs = beside(a, "skip", a.skip, read_skip, L) or early_exit(L, max(1, L // 6))
        make, what = partial(SelfDraft, model, subs), f"{len(subs)} of {2 * L} sub-layers"
        prompts = [ids for kind in a.prompts or SETS[:2]
                   for ids in prompt_ids(kind, tokenizer, model.c)[: a.quick]]
    seeds, rows, data = range(1 if a.quick else SEEDS), [], []
    for temperature, gamma in product(TEMPERATURES, GAMMAS):
        spent, probs = {name: [] for name in JUDGES}, partial(to_probs, temperature=temperature)
        for seed, ids, (name, judge) in product(seeds, prompts, JUDGES.items()):    # A B A B, text by text
            start = time.perf_counter()
            (out,), passes = generate(model, [ids], a.new, make(gamma), probs, Coins(seed), model.c.eos,
                                      verify=judge)
            spent[name].append((len(out), passes, time.perf_counter() - start))
        sums = {name: [sum(column) for column in zip(*runs, strict=True)] for name, runs in spent.items()}
        tau = {name: tokens / passes for name, (tokens, passes, _) in sums.items()}
        one, two = tau.values()
        slow, fast = (tokens / seconds for tokens, _, seconds in sums.values())
        rows.append([f"{temperature}", str(gamma), f"{one:.2f}", f"{two:.2f}", f"{two / one - 1:+.1%}",
                     f"{fast / slow:.2f}"])
        data.append({"temperature": temperature, "gamma": gamma, "tau": tau, "speed": fast / slow})
    lines = [f"{len(prompts)} prompts, {a.new} tokens, {len(seeds)} seeds; drafts: {what}. {a.machine}.", "",
             *table(["temperature", "gamma", "tau, token by token", "tau, block", "gain", "speed"], rows),
             "Trees:", "", *trees(a, model, make, prompts)]
    return page(lines), {"rows": data, "drafts": what}
