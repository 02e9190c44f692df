"""Block verification beside token by token: tokens per round, and by the clock."""
import statistics
from functools import partial
from itertools import product

import torch

from lab.bench.shared import SETS, beside, load, page, prompt_ids, table
from lab.traversal import verify_traversal
from layerskip import SelfDraft, early_exit
from methods.trees import Siblings
from sampling import Coins, to_probs
from speculative import Wrapper, generate, layout
from support.cli import read_skip
from support.measure import interleave
from verification import verify, verify_block, verify_tree

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
        if draft.parents is not None:
            at = layout(state, draft.tokens.shape[1], draft.parents)
            block = torch.cat([state.last(), draft.tokens], 1)
            p = state.probs(state.model.unembed(state.model.run(state.model.embed(block), at, state.cache)))
            for (name, judge), seed in product(TREES.items(), range(TRIES)):
                node, _ = judge(p, draft.tokens, draft.parents, Coins(seed), draft.q)
                self.depths[name].append(int(at.tree[0, node].sum()) - 1)
        return draft


def trees(a, model, subs, prompts):
    """The lines of a table: drafted tokens accepted per round."""
    rows = []
    for temperature, (shape, widths) in product(TEMPERATURES, WIDTHS.items()):
        judged = Judged(Siblings(SelfDraft(model, subs, len(widths)), widths))
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
    skip = None if a.exit_layer else beside(a, "skip", a.skip, read_skip, L)
    subs = early_exit(L, a.exit_layer or max(1, L // 6)) if skip is None else skip
    prompts = [ids for kind in a.prompts or SETS[:2] for ids in prompt_ids(kind, tokenizer, model.c)]
    repeats, seeds = a.repeats or 3, range(1 if a.quick else SEEDS)
    rows, data = [], []
    for temperature, gamma in product(TEMPERATURES, GAMMAS):
        def write(judge, ids, seed=0, temperature=temperature, gamma=gamma):
            return generate(model, ids, a.new, SelfDraft(model, subs, gamma),
                            partial(to_probs, temperature=temperature), Coins(seed), model.c.eos,
                            verify=judge)

        taus = {name: [] for name in JUDGES}
        for (name, judge), seed in product(JUDGES.items(), seeds):
            for ids in prompts:     # each alone, so that a round is one text's
                (out,), passes = write(judge, [ids], seed)
                taus[name].append((len(out), passes))
        tau = {name: sum(n for n, _ in runs) / sum(m for _, m in runs) for name, runs in taus.items()}
        times = interleave({name: lambda judge=judge: [write(judge, [ids]) for ids in prompts[:4]]
                            for name, judge in JUDGES.items()}, repeats)
        written = {name: statistics.fmean(n for n, _ in runs[:4]) * 4 for name, runs in taus.items()}
        speed = {name: written[name] / times[name] for name in JUDGES}
        one, two = JUDGES
        rows.append([f"{temperature}", str(gamma), f"{tau[one]:.2f}", f"{tau[two]:.2f}",
                     f"{tau[two] / tau[one] - 1:+.1%}", f"{speed[two] / speed[one]:.2f}"])
        data.append({"temperature": temperature, "gamma": gamma, "tau": tau, "tokens per second": speed})
    head = ["temperature", "gamma", "tau, token by token", "tau, block", "gain", "speed, block / token"]
    words = (f"{len(prompts)} prompts, {a.new} tokens, {len(seeds)} seeds; drafts of {len(subs)} of "
             f"{2 * L} sub-layers. {a.machine}.")
    lines = [words, "", *table(head, rows), "Trees:", "", *trees(a, model, subs, prompts)]
    return page(lines), {"rows": data, "sublayers": list(subs)}
