"""Tokens per round by block verification and token by token, with the same seeds and drafts, and
from the same distribution."""
import time
from functools import partial
from itertools import product

import torch
from tqdm import tqdm

import generate
from lab.bench.real import options_of
from lab.bench.shared import figures, kinds_of, load, page, prompts_of
from methods.block import verify_block
from sampling import Coins, to_probs
from speculative import generate as write
from verification import verify

GAMMAS, TEMPERATURES, SEEDS = range(2, 7), (0.8, 1.0), 4
JUDGES = {"token by token": verify, "block": verify_block}
COLUMNS = {"temperature": "{temperature}", "gamma": "{gamma}",
           "tau, token by token": "{tau[token by token]:.2f}", "tau, block": "{tau[block]:.2f}",
           "gain": "{gain:+.1%}", "speed": "{speed:.2f}"}


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
    for line, temperature, gamma in tqdm([*product(lines, TEMPERATURES, GAMMAS)], disable=None):
        spent = {name: torch.zeros(3).double() for name in JUDGES}  # tokens, passes, seconds
        probs = partial(to_probs, temperature=temperature)
        # A B A B, text by text
        for seed, ids, (name, judge) in product(seeds, prompts, JUDGES.items()):
            start = time.perf_counter()
            drafter = plans[line, gamma].make()
            (out,), passes = write(
                model, [ids], a.new, drafter, probs, Coins(seed), verify=judge)
            spent[name] += torch.tensor([len(out), passes, time.perf_counter() - start])
        tau = {name: float(tokens / passes) for name, (tokens, passes, _) in spent.items()}
        one, two = tau.values()
        slow, fast = (float(tokens / seconds) for tokens, _, seconds in spent.values())
        rows.append({"draft": line, "temperature": temperature, "gamma": gamma, "tau": tau,
                     "gain": two / one - 1, "speed": fast / slow})
    lines = [f"{a.model}, {a.dtype}; {len(prompts)} prompts, {a.new} tokens, {len(seeds)} seeds; "
             f"{a.machine}", "", *figures(((row["draft"], row) for row in rows), COLUMNS, "draft")]
    return page(lines), {"rows": rows}
