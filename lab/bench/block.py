"""Tokens per round by block verification and token by token, with the same seeds and drafts, and
from the same distribution."""
import time
from functools import partial
from itertools import product

import torch
from tqdm import tqdm

import generate
from lab.bench.real import options_of
from lab.bench.shared import kinds_of, load, page, prompts_of, table
from methods.block import verify_block
from sampling import Coins, to_probs
from speculative import generate as write
from verification import verify

GAMMAS, TEMPERATURES, SEEDS = range(2, 7), (0.8, 1.0), 4
JUDGES = {"token by token": verify, "block": verify_block}


@torch.inference_mode()
def run(a):
    model, tokenizer = load(a)
    lines = a.draft or ["exit"]
    plans = {(line, gamma): generate.plan_of(
        options_of(a, f"{line} --gamma {gamma}"), model, tokenizer)
             for line, gamma in product(lines, GAMMAS)}
    prompts = [ids for kind in kinds_of(a) for ids in prompts_of(a, kind, tokenizer)]
    seeds = range(1 if a.quick else SEEDS)
    rows = []
    data = []
    for line, temperature, gamma in tqdm([*product(lines, TEMPERATURES, GAMMAS)], disable=None):
        spent = {name: [] for name in JUDGES}
        probs = partial(to_probs, temperature=temperature)
        # A B A B, text by text
        for seed, ids, (name, judge) in product(seeds, prompts, JUDGES.items()):
            start = time.perf_counter()
            drafter = plans[line, gamma].make()
            (out,), passes = write(
                model, [ids], a.new, drafter, probs, Coins(seed), verify=judge)
            spent[name].append((len(out), passes, time.perf_counter() - start))
        sums = {name: [sum(column) for column in zip(*runs, strict=True)]
                for name, runs in spent.items()}
        tau = {name: tokens / passes for name, (tokens, passes, _) in sums.items()}
        one, two = tau.values()
        slow, fast = (tokens / seconds for tokens, _, seconds in sums.values())
        rows.append([line, f"{temperature}", str(gamma), f"{one:.2f}", f"{two:.2f}",
                     f"{two / one - 1:+.1%}", f"{fast / slow:.2f}"])
        data.append({"draft": line, "temperature": temperature, "gamma": gamma, "tau": tau,
                     "speed": fast / slow})
    head = ["draft", "temperature", "gamma", "tau, token by token", "tau, block", "gain", "speed"]
    lines = [f"{a.model}, {a.dtype}; {len(prompts)} prompts, {a.new} tokens, {len(seeds)} seeds; "
             f"{a.machine}", "", *table(head, rows)]
    return page(lines), {"rows": data}
