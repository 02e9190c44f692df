"""A prompt in, text out: self-speculative decoding from the command line.

    python generate.py "Once upon a time" --compare

The one thing to remember: this file only consumes what `speculative.rounds` yields.
"""

import argparse
import json
import re
import statistics
import sys
import time
from pathlib import Path

import torch

import checkpoint
import sampling
from layerskip import SelfDraft, early_exit, keep
from sampling import Coins, to_probs
from speculative import ModelDraft, NGram, rounds

WEIGHTS = Path(__file__).resolve().parent / "weights"
OWN_FLAG = {"exit": "exit_layer", "skip": "skip", "model": "draft_model"}  # what each way to draft adds
GAMMA = {"none": 0, "exit": 2, "skip": 3, "ngram": 4, "model": 3}
REPEATS = 3  # of A B in --compare, behind a warm-up of each


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ValueError(f"{message}; see --help")


def parse(argv):
    p = Parser(description="Self-speculative decoding of a Llama or Gemma-2 checkpoint.", allow_abbrev=False)
    p.add_argument("prompt")
    p.add_argument("--model", metavar="DIR", default=WEIGHTS / "stories-llama", help="a Hugging Face folder")
    p.add_argument("--draft", choices=GAMMA, help="where drafts come from (default: exit)")
    p.add_argument(
        "--exit-layer", type=int, metavar="E", help="draft with the first E blocks (default: a sixth)"
    )
    p.add_argument("--skip", metavar="SET", help='skip sub-layers: a3,m4 or a file {"attn": [3], "mlp": [4]}')
    p.add_argument("--draft-model", metavar="DIR", help="a small model with the same tokenizer")
    p.add_argument("--gamma", type=int, metavar="G", help="tokens to draft per round")
    p.add_argument("--max-new", type=int, default=200, metavar="N")
    p.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    p.add_argument("--top-k", type=int, metavar="K")
    p.add_argument("--top-p", type=float, metavar="P")
    p.add_argument("--min-p", type=float, metavar="P")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", help="cpu or cuda (default: cuda if there is one)")
    p.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16", "float64"], help="default: as stored"
    )
    p.add_argument("--compare", action="store_true", help="time plain decoding beside it, compare the texts")
    p.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    a = p.parse_args(argv)
    implied = [kind for kind, flag in OWN_FLAG.items() if getattr(a, flag) is not None]
    a.draft = a.draft or (implied[0] if implied else "exit")
    wrong = next((kind for kind in implied if kind != a.draft), None)
    if wrong:
        raise ValueError(f"--{OWN_FLAG[wrong].replace('_', '-')} goes with --draft {wrong}, not {a.draft}")
    if a.draft == "skip" and a.skip is None:
        raise ValueError("--draft skip needs --skip with the sub-layers, such as a3,m4 or a file")
    if not -(2**63) <= a.seed < 2**63:
        raise ValueError(f"--seed must fit in 64 bits, got {a.seed}")
    sampling.check(a.temperature, a.top_k, a.top_p, a.min_p)
    return a


def read_skip(text, n_layers):
    """The sub-layers that stay: "a3,m4" skips attention 3 and MLP 4, anything else names a file of
    {"attn": [...], "mlp": [...]}, whose other keys are ignored."""
    names = [name.strip() for name in text.split(",")]
    if all(re.fullmatch(r"[am][0-9]{1,6}", name) for name in names):
        attn, mlp = ([int(name[1:]) for name in names if name[0] == kind] for kind in "am")
        return keep(n_layers, attn, mlp)
    sets = checkpoint.read_json(Path(text))
    attn, mlp = sets.get("attn", []), sets.get("mlp", [])
    if not all(isinstance(s, list) and all(type(i) is int for i in s) for s in (attn, mlp)):
        raise ValueError(f'{text}: "attn" and "mlp" must be lists of block numbers')
    return keep(n_layers, attn, mlp)


def make_drafter(a, model, tokenizer, device):
    """The drafter that the flags ask for; fills in a.gamma and a.exit_layer."""
    a.gamma, L = GAMMA[a.draft] if a.gamma is None else a.gamma, model.c.n_layers
    if a.draft == "exit":
        a.exit_layer = max(1, L // 6) if a.exit_layer is None else a.exit_layer
        return SelfDraft(model, early_exit(L, a.exit_layer), a.gamma)
    if a.draft == "skip":
        return SelfDraft(model, read_skip(a.skip, L), a.gamma)
    if a.draft == "ngram":
        return NGram(a.gamma, 2)
    if a.draft == "model":
        folder = a.draft_model or WEIGHTS / "stories-draft"
        small, other = checkpoint.load(folder, device, model.tok.dtype)
        if other.get_vocab() != tokenizer.get_vocab():
            raise ValueError(f"{folder}: its tokenizer differs from the target's: its ids mean other words")
        return ModelDraft(small, a.gamma)
    return None


def answer(tokenizer, ids, new):
    """The text of the new tokens. trap: alone they would lose a leading space with some tokenizers."""
    return tokenizer.decode(ids + new)[len(tokenizer.decode(ids)) :]


def decode(model, ids, a, drafter, tokenizer=None):
    """One answer and its statistics; with a tokenizer the text is printed as it is accepted."""
    probs = lambda logits: to_probs(logits, a.temperature, a.top_k, a.top_p, a.min_p)  # noqa: E731
    out, shown, passes, accepted, proposed = [], "", 0, 0, 0
    start = time.perf_counter()
    for _, r in rounds(model, [ids], a.max_new, drafter, probs, Coins(a.seed), model.c.eos):
        out += r.new[0]
        passes, accepted, proposed = passes + 1, accepted + int(r.accepted), proposed + int(r.proposed)
        if tokenizer:  # a character whose bytes are not all there yet waits for the next round
            text = a.prompt + answer(tokenizer, ids, out).rstrip("\ufffd")
            print(text[len(shown) :], end="", flush=True)
            shown = text
    seconds = time.perf_counter() - start
    return {
        "ids": out,
        "seconds": seconds,
        "target_passes": passes,
        "tokens_per_pass": len(out) / max(1, passes),
        "acceptance": accepted / proposed if proposed else None,
    }


def divergence(model, ids, ours, plain):
    """Where two greedy answers part, with the gap between the two best logits there: rounding or a bug?"""
    pairs = enumerate(zip(ours, plain, strict=False))
    at = next((i for i, (x, y) in pairs if x != y), min(len(ours), len(plain)))
    with torch.inference_mode():
        logits = model(torch.tensor([ids + plain[:at]], device=model.tok.device))[0, -1].float()
    best = logits.topk(2)
    return {"position": at, "ids": best.indices.tolist(), "top2_gap": float(best.values[0] - best.values[1])}


def compare(model, ids, a, drafter):
    """Drafted against plain, A B A B, each warmed up before: medians, and whether the texts are the same."""
    runs = {"ours": (drafter, []), "plain": (None, [])}
    for repeat in range(REPEATS + 1):
        for drafting, seen in runs.values():
            result = decode(model, ids, a, drafting)
            seen += [result] * (repeat > 0)
    ours, plain = ([r["seconds"] for r in seen] for _, seen in runs.values())
    a_ids, b_ids = (seen[-1]["ids"] for _, seen in runs.values())
    same = a_ids == b_ids if a.temperature == 0 else None
    return {
        "seconds": statistics.median(ours),
        "identical": same,
        "first_divergence": divergence(model, ids, a_ids, b_ids) if same is False else None,
        "ratio": statistics.median(plain) / statistics.median(ours),
        "baseline": {
            "seconds": statistics.median(plain),
            "ids": b_ids,
            "tokens_per_second": len(b_ids) / statistics.median(plain),
        },
    }


def run(a):
    device = checkpoint.find_device(a.device)
    model, tokenizer = checkpoint.load(a.model, device, a.dtype and getattr(torch, a.dtype))
    ids = checkpoint.encode(tokenizer, a.prompt, model.c.bos)
    drafter = make_drafter(a, model, tokenizer, device)
    r = decode(model, ids, a, drafter, None if a.json else tokenizer)
    if a.compare:
        r |= compare(model, ids, a, drafter)
        plain = r["baseline"].pop("ids")
        r["baseline"]["outputs"] = [{"prompt": a.prompt, "text": answer(tokenizer, ids, plain), "ids": plain}]
    new = r.pop("ids")
    result = {
        "outputs": [{"prompt": a.prompt, "text": answer(tokenizer, ids, new), "ids": new}],
        "new_tokens": len(new),
        "tokens_per_second": len(new) / r["seconds"],
        **r,
        "draft": a.draft,
        "exit_layer": a.exit_layer,
        "gamma": a.gamma,
        "dtype": str(model.tok.dtype).removeprefix("torch."),
        "device": str(model.tok.device),
        "threads": torch.get_num_threads(),
        "seed": a.seed,
    }
    print(json.dumps(result) if a.json else summary(result, a))
    # in half precision a block of tokens rounds differently from a single one; otherwise nothing may differ
    return int(result.get("identical") is False and result["dtype"] in ("float32", "float64"))


def summary(r, a):
    share = r["acceptance"]
    drafts = "nothing was drafted" if share is None else f"{share:.0%} of the drafts accepted"
    how = r["draft"] + {"exit": f" behind block {r['exit_layer']}", "skip": f" {a.skip}"}.get(r["draft"], "")
    lines = [
        f"\n\n{r['new_tokens']} tokens in {r['target_passes']} passes, {r['tokens_per_pass']:.2f} a pass",
        f"{drafts} (draft: {how}, gamma {r['gamma']})",
        f"{r['tokens_per_second']:.0f} tokens/s in {r['dtype']} on {r['device']}, {r['threads']} threads",
    ]
    if not a.compare:
        return "\n".join(lines) + " (one run, while printing)"
    lines[2] += (
        f"; plain decoding {r['baseline']['tokens_per_second']:.0f}: ratio {r['ratio']:.2f} "
        f"(medians of {REPEATS} interleaved runs)"
    )
    if r["identical"] is None:
        lines.append(
            "identity is a question for temperature 0: here two runs spend their coins differently"
        )
    elif r["identical"]:
        lines.append(f"identical to plain decoding in {r['dtype']}, token for token")
    else:
        d = r["first_divergence"]
        lines.append(
            f"NOT identical to plain decoding: they part at new token {d['position']}, where the best logits "
            f"(ids {d['ids'][0]} and {d['ids'][1]}) are {d['top2_gap']:.3g} apart in {r['dtype']}"
        )
    return "\n".join(lines)


def main(argv=None):
    """Exit status: 0; 1 if --compare found a difference that rounding cannot explain; 2 for bad input."""
    try:
        return run(parse(argv))
    except (ValueError, OSError) as e:
        print(f"generate.py: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
