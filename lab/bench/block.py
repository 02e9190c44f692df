"""Tokens per round by block verification and token by token, with the same seeds and from the same
distribution."""
import time
from functools import partial
from itertools import product

import torch

from lab.bench.real import KINDS, chat_ids
from lab.bench.shared import SETS, beside, load, page, prompt_ids, table
from layerskip import SelfDraft, early_exit
from methods import heads
from sampling import Coins, to_probs
from speculative import generate
from support.cli import read_skip
from verification import verify, verify_block

GAMMAS, TEMPERATURES, SEEDS = range(2, 7), (0.8, 1.0), 4
JUDGES = {"token by token": verify, "block": verify_block}


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
        # A B A B, text by text
        for seed, ids, (name, judge) in product(seeds, prompts, JUDGES.items()):
            start = time.perf_counter()
            (out,), passes = generate(model, [ids], a.new, make(gamma), probs, Coins(seed),
                                      model.c.eos, verify=judge)
            spent[name].append((len(out), passes, time.perf_counter() - start))
        sums = {name: [sum(column) for column in zip(*runs, strict=True)]
                for name, runs in spent.items()}
        tau = {name: tokens / passes for name, (tokens, passes, _) in sums.items()}
        one, two = tau.values()
        slow, fast = (tokens / seconds for tokens, _, seconds in sums.values())
        rows.append([f"{temperature}", str(gamma), f"{one:.2f}", f"{two:.2f}",
                     f"{two / one - 1:+.1%}", f"{fast / slow:.2f}"])
        data.append({"temperature": temperature, "gamma": gamma, "tau": tau, "speed": fast / slow})
    lines = [f"{len(prompts)} prompts, {a.new} tokens, {len(seeds)} seeds; drafts: {what}. "
             f"{a.machine}.", "",
             *table(["temperature", "gamma", "tau, token by token", "tau, block", "gain", "speed"],
                    rows)]
    return page(lines), {"rows": data, "drafts": what}
