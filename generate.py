"""A prompt in, coloured text out: self-speculative decoding from the command line.

    python generate.py "Once upon a time" --compare

The one thing to remember: this file only consumes what `speculative.rounds` yields.
"""
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

import checkpoint
import sampling
from control import MOST, Controlled, DoNoHarm, Then, weight_costs
from layerskip import SelfDraft, early_exit
from sampling import Coins, to_probs
from speculative import ModelDraft, NGram, generate, rounds
from support import chat, cli, show
from support.cli import read_skip
from support.files import read_text

WEIGHTS = Path(__file__).resolve().parent / "weights"
OWN_FLAG = {"exit": "exit_layer", "skip": "skip", "model": "draft_model"}  # what each way to draft adds
GAMMA = {"none": 0, "exit": 2, "skip": 3, "ngram": 4, "model": 3}
PATHS = "model", "skip", "draft_model", "prompt_file", "picture"
REPEATS = 3  # of A B in --compare, behind a warm-up of each


def parse(argv):
    p = cli.Parser(
        description="Self-speculative decoding of a Llama or Gemma-2 checkpoint.", allow_abbrev=False)
    p.add_argument("prompt", nargs="?", metavar="PROMPT")
    p.add_argument("--prompt", dest="text", metavar="TEXT", help="the same; - reads standard input")
    p.add_argument("--prompt-file", metavar="FILE", help="a batch: one prompt a line, or JSONL with prompt")
    p.add_argument("--chat", action="store_true", help="put it as the checkpoint's chat template says")
    p.add_argument("--model", metavar="DIR", default=WEIGHTS / "stories-llama", help="a Hugging Face folder")
    p.add_argument("--draft", choices=GAMMA, help="where drafts come from (default: exit)")
    p.add_argument(
        "--exit-layer", type=int, metavar="E", help="draft with the first E blocks (default: a sixth)"
    )
    p.add_argument("--skip", metavar="SET", help='skip sub-layers: a3,m4 or a file {"attn": [3], "mlp": [4]}')
    p.add_argument("--draft-model", metavar="DIR", help="a small model with the same tokenizer")
    p.add_argument("--gamma", type=int, metavar="G", help="tokens to draft per round")
    p.add_argument("--do-no-harm", action="store_true",
                   help="draft as far as it pays, judging by what has been accepted; G is the most")
    p.add_argument("--tail", type=int, metavar="N",
                   help="behind each draft up to N tokens more, looked up in the text")
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
    p.add_argument("--picture", metavar="FILE", help="draw the coloured text as PNG or SVG (first prompt)")
    p.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    a = p.parse_args(argv)
    implied = [kind for kind, flag in OWN_FLAG.items() if getattr(a, flag) is not None]
    a.draft = a.draft or (implied[0] if implied else "exit")
    wrong = next((kind for kind in implied if kind != a.draft), None)
    if wrong:
        raise ValueError(f"--{OWN_FLAG[wrong].replace('_', '-')} goes with --draft {wrong}, not {a.draft}")
    if a.draft == "skip" and a.skip is None:
        raise ValueError("--draft skip needs --skip with the sub-layers, such as a3,m4 or a file")
    if a.draft in ("none", "ngram") and (a.do_no_harm or a.tail is not None):
        raise ValueError(f"--do-no-harm and --tail go with --draft exit, skip or model, not {a.draft}")
    if a.tail is not None and a.tail < 1:
        raise ValueError(f"--tail must be at least 1, got {a.tail}")
    if not -(2**63) <= a.seed < 2**63:
        raise ValueError(f"--seed must fit in 64 bits, got {a.seed}")
    if a.picture and Path(a.picture).suffix not in (".png", ".svg"):
        raise ValueError(f"--picture must name a .png or .svg file, got {a.picture}")
    empty = next((name for name in PATHS if getattr(a, name) == ""), None)
    if empty:
        raise ValueError(f"--{empty.replace('_', '-')} is empty")
    if sum(given is not None for given in (a.prompt, a.text, a.prompt_file)) != 1:
        raise ValueError("give one prompt: as an argument, with --prompt, or a batch with --prompt-file")
    sampling.check(a.temperature, a.top_k, a.top_p, a.min_p)
    return a


def read_prompts(a):
    """The texts to continue: one, or the batch of --prompt-file."""
    if a.prompt_file is None:
        text = a.prompt if a.text is None else a.text
        if text == "-":
            text = sys.stdin.buffer.read().decode("utf-8", "surrogateescape").removesuffix("\n")
        return [text]
    path = Path(a.prompt_file)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    lines = [(i, line) for i, line in enumerate(read_text(path).splitlines(), 1) if line.strip()]
    if not lines:
        raise ValueError(f"{path}: no prompts, every line is empty")
    return [read_jsonl(path, *line) for line in lines] if path.suffix == ".jsonl" else [t for _, t in lines]


def read_jsonl(path, number, line):
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError, RecursionError):
        prompt = None
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(f'{path}, line {number}: expected a JSON object with a text under "prompt"')
    return prompt


def make_drafter(a, model, tokenizer, device):
    """The drafter that the flags ask for; fills in a.gamma and a.exit_layer."""
    if a.gamma is None:
        a.gamma = MOST if a.do_no_harm else GAMMA[a.draft]
    drafter = draft_alone(a, model, tokenizer, device)
    if a.do_no_harm:
        drafter = Controlled(drafter, DoNoHarm(step_cost(drafter, model), a.gamma))
    return drafter if a.tail is None else Then(drafter, NGram(a.tail, 3))


def step_cost(drafter, model):
    """What a drafted step costs relative to a pass of the target, by the weights that it reads."""
    costs = weight_costs(model.c)
    if isinstance(drafter, ModelDraft):
        return weight_costs(drafter.model.c).whole / costs.whole
    return costs.c(drafter.sublayers)


def draft_alone(a, model, tokenizer, device):
    L = model.c.n_layers
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


class Reading:
    """A stand-in for the model that shows on a terminal how much of a long prompt has been read."""

    def __init__(self, model, tokens):
        self.model, few = model, tokens < 1024
        self.bar = tqdm(total=tokens, desc="reading", unit=" tokens", leave=False, disable=few or None)

    def __getattr__(self, name):
        return getattr(self.model, name)

    def run(self, x, positions, *args, **kwargs):
        x = self.model.run(x, positions, *args, **kwargs)
        if not self.bar.disable:
            self.bar.update(x.shape[1])
            if self.bar.n >= self.bar.total:
                self.bar.close()
        return x


def settings(a, model):
    """What `rounds` and `generate` take behind the drafter."""
    probs = lambda logits: to_probs(logits, a.temperature, a.top_k, a.top_p, a.min_p)  # noqa: E731
    return {"probs": probs, "coins": Coins(a.seed), "eos": {*model.c.eos, *a.eos}}


def watch(model, tokenizer, prompts, a, drafter):
    """One run as a show.Generation, a single text printed as it is accepted. Ctrl-C ends it early."""
    seen, colour = show.Generation(tokenizer, prompts, show.Timed(drafter)), show.colours(sys.stdout)
    seen.interrupted, started, live = False, False, not a.json and len(prompts) == 1
    reading = Reading(model, max(map(len, prompts)))
    steps = rounds(reading, prompts, a.max_new, seen.timed, **settings(a, model))
    try:
        for _ in seen.watch(steps):
            if live:
                before, started = "" if started else opening(seen.prompts[0], a), True
                print(before + seen.fresh(colour), end="", flush=True)
    except KeyboardInterrupt:
        seen.close()
        seen.interrupted = True
    if live:
        print(seen.fresh(colour))
    elif not a.json:
        for b, prompt in enumerate(seen.prompts):
            print(f"{opening(prompt, a)}{seen.fresh(colour, b)}\n")
    return seen


def opening(prompt, a):
    """The prompt as it is printed: its text goes on in the answer, unless it was a message."""
    return "" if a.chat else show.paint([(prompt, None)])


def timed(model, prompts, a, drafter):
    start = time.perf_counter()
    outputs, _ = generate(model, prompts, a.max_new, drafter, **settings(a, model))
    return outputs, time.perf_counter() - start


def compare(model, prompts, a, drafter):
    """Drafted against plain, A B A B, each warmed up before: (outputs, median seconds) of either."""
    runs = {drafter: [], None: []} if drafter else {None: []}
    for _ in range(REPEATS + 1):
        for drafting, results in runs.items():
            results.append(timed(model, prompts, a, drafting))
    both = [(r[-1][0], statistics.median(spent for _, spent in r[1:])) for r in runs.values()]
    return both[0], both[-1]


def divergence(model, prompts, ours, plain):
    """Where greedy answers first part, with the gap between the two best logits there: rounding or a bug?"""
    b = next(b for b, pair in enumerate(zip(ours, plain, strict=True)) if pair[0] != pair[1])
    pairs = enumerate(zip(ours[b], plain[b], strict=False))
    at = next((i for i, (x, y) in pairs if x != y), min(len(ours[b]), len(plain[b])))
    with torch.inference_mode():
        logits = model(torch.tensor([prompts[b] + plain[b][:at]], device=model.tok.device))[0, -1].float()
    best = logits.topk(2)
    return {"output": b, "position": at, "ids": best.indices.tolist(),
            "top2_gap": float(best.values[0] - best.values[1])}


def run(a):
    texts, device = read_prompts(a), checkpoint.find_device(a.device)
    model, tokenizer = checkpoint.load(a.model, device, a.dtype and getattr(torch, a.dtype))
    prompts, a.eos = texts, ()
    if a.chat:
        render = chat.read_template(a.model)
        prompts = [render([{"role": "user", "content": text}]) if text else text for text in texts]
        a.eos = chat.end_of_turn(render, tokenizer)
    prompts = [checkpoint.encode(tokenizer, prompt, model.c.bos) for prompt in prompts]
    drafter = make_drafter(a, model, tokenizer, device)
    start = time.perf_counter()
    seen = watch(model, tokenizer, prompts, a, drafter)
    r = report(a, model, seen, texts, time.perf_counter() - start)
    if a.picture:
        show.picture(seen, a.picture)
    if a.compare and not seen.interrupted:
        r |= against_plain(a, model, tokenizer, prompts, texts, drafter)
    print(json.dumps(r) if a.json else summary(r, a, seen))
    # in half precision a block of tokens rounds differently from a single one; otherwise nothing may differ
    different = r.get("identical") is False and r["dtype"] in ("float32", "float64")
    return 130 if seen.interrupted else int(different)


def report(a, model, seen, texts, seconds):
    outputs = [{"prompt": text, "text": "".join(t.text for t in row), "ids": [t.id for t in row]}
               for text, row in zip(texts, seen.rows, strict=True)]
    new = sum(map(len, seen.rows))
    return {
        "outputs": outputs, "new_tokens": new, "seconds": seconds, "tokens_per_second": new / seconds,
        "target_passes": seen.passes, "tokens_per_pass": new / max(1, seen.turns),
        "acceptance": seen.accepted / seen.proposed if seen.proposed else None,
        "draft": a.draft, "exit_layer": a.exit_layer, "gamma": a.gamma, "do_no_harm": a.do_no_harm,
        "tail": a.tail,
        "dtype": str(model.tok.dtype).removeprefix("torch."), "device": str(model.tok.device),
        "threads": torch.get_num_threads(), "seed": a.seed, "interrupted": seen.interrupted,
    }


def against_plain(a, model, tokenizer, prompts, texts, drafter):
    (ours, our_seconds), (plain, plain_seconds) = compare(model, prompts, a, drafter)
    same = ours == plain if a.temperature == 0 else None
    new = [sum(map(len, outputs)) for outputs in (ours, plain)]
    outputs = [{"prompt": text, "text": tokenizer.decode(ids + out)[len(tokenizer.decode(ids)):], "ids": out}
               for text, ids, out in zip(texts, prompts, plain, strict=True)]
    return {
        "seconds": our_seconds, "tokens_per_second": new[0] / our_seconds, "identical": same,
        "first_divergence": divergence(model, prompts, ours, plain) if same is False else None,
        "ratio": plain_seconds / our_seconds,
        "baseline": {"seconds": plain_seconds, "tokens_per_second": new[1] / plain_seconds,
                     "outputs": outputs},
    }


def summary(r, a, seen):
    plain = None  # seconds of a plain pass
    if "baseline" in r:
        plain = r["baseline"]["seconds"] / max(1, *(len(o["ids"]) for o in r["baseline"]["outputs"]))
    how = r["draft"] + {"exit": f" behind block {r['exit_layer']}", "skip": f" {a.skip}"}.get(r["draft"], "")
    far = f"gamma up to {a.gamma} as it pays" if a.do_no_harm else f"gamma {a.gamma}"
    far += f", then up to {a.tail} by n-gram" if a.tail is not None else ""
    lines = ["", show.legend(show.colours(sys.stdout)), seen.summary(plain),
             f"draft: {how}, {far}; {r['tokens_per_second']:.0f} tokens/s in {r['dtype']} "
             f"on {r['device']}, {r['threads']} threads"]
    if "baseline" not in r:
        return "\n".join(line for line in lines if line) + " (one run, while printing)"
    lines[-1] += (f"; plain decoding {r['baseline']['tokens_per_second']:.0f}: ratio {r['ratio']:.2f} "
                  f"(medians of {REPEATS} interleaved runs)")
    if r["identical"] is None:
        lines.append("identity is a question for temperature 0: here two runs spend their coins differently")
    elif r["identical"]:
        lines.append(f"identical to plain decoding in {r['dtype']}, token for token")
    else:
        d = r["first_divergence"]
        lines.append(
            f"NOT identical to plain decoding: they part at new token {d['position']}, where the best "
            f"logits (ids {d['ids'][0]} and {d['ids'][1]}) are {d['top2_gap']:.3g} apart in {r['dtype']}")
    return "\n".join(line for line in lines if line)


def main(argv=None):
    """Exit status: 0; 1 if --compare found a difference that rounding cannot explain; 2 for bad input; 130
    after Ctrl-C."""
    return cli.main(lambda argv: run(parse(argv)), argv)


if __name__ == "__main__":
    sys.exit(main())
