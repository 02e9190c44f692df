"""Makes the traces that a port is checked against: models, cases and answers.

    python porting/make.py core        traces/, but for what follows
    python porting/make.py stories     traces/stories/: the cases on weights/stories-llama

A case whose closest decision is nearer than MARGIN to going the other way is thrown away, and another seed is
tried. So rounding in float32 cannot turn a token of any trace.
"""
import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from checkpoint import encode, parts, read_config, read_tokenizer, stored_shape, write_config  # noqa: E402
from model import Config, Transformer, frequencies  # noqa: E402
from porting import check  # noqa: E402
from porting.library_port import answer, pack  # noqa: E402
from porting.wrong_ports import MISTAKES, answers, wrong_port  # noqa: E402
from speculative import ancestors  # noqa: E402

MARGIN, TRIES = 1e-4, 1000
TOLERANCE = [1e-6, 1e-5, 1e-5, 1e-5, 1e-5, 1e-4, 1e-4, 1e-5, 1e-3]  # of each step
LLAMA, GEMMA = "porting/traces/llama", "porting/traces/gemma2"
SHIPPED, PROMPT = "weights/stories-llama", "Once upon a time"
LINEAR = dict(rope_type="linear", factor=3.0)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)  # of 4 frequencies 1 stays, 1 blends, 2 are divided
SHAPE = Config(vocab_size=40, dim=32, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=8, hidden_dim=48,
               max_len=40, rope_theta=500.0, rope_scaling=LLAMA3, bos=0, eos=(1,))
CONFIGS = {  # the window is shorter than the texts, and the soft-caps are small enough to bite
    LLAMA: SHAPE,
    GEMMA: replace(SHAPE, head_dim=16, rope_theta=10_000.0, rope_scaling=None, tied=True, norm_eps=1e-6,
                   act="gelu", norm_offset=1.0, embed_scale=32**0.5, post_norm=True, query_scale=24**-0.5,
                   attn_softcap=2.0, final_softcap=6.0, window=5)}
V, D = SHAPE.vocab_size, SHAPE.head_dim
FREQS = pack(frequencies(D, 500.0))

# --- models


def random_model(c, seed=0):
    """Random weights, all exact in float32. The earlier half of the blocks says much, so that the text does
    not stand still, and the later half little, so that the drafts of the earlier are often accepted."""
    g, m = torch.Generator().manual_seed(seed), Transformer(c).double().requires_grad_(False)
    for p in m.parameters():
        p.copy_(torch.randn(p.shape, generator=g) * 0.2 if p.dim() > 1 else
                1 - c.norm_offset + torch.randn(p.shape, generator=g) * 0.1)
    for i, b in enumerate(m.blocks):
        late = i >= c.n_layers // 2
        for w in (b.attn.wo, b.mlp.down):
            w.mul_(0.4 if late else 1.0)
        for post in (b.attn_post, b.mlp_post) if c.post_norm else ():
            post.weight.add_(-0.2 if late else 2.0)
    for p in m.parameters():
        p.copy_(p.float())
    return m


def save_model(m, folder):
    """In the layout of Hugging Face, but without a tokenizer: every case gives ids."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.float().reshape(stored_shape(p)).contiguous() for name, p in parts(m)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    config = write_config(m.c, torch.float32) | {"bos_token_id": m.c.bos, "eos_token_id": list(m.c.eos)}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


# --- what the cases are made of; g is the generator of one attempt


def noise(g, *shape, std=1.0, mean=0.0):
    """A random tensor, as numbers that are exact in float32."""
    return pack((torch.randn(shape, generator=g) * std + mean).float())


def norming(g, std, mean):
    return dict(x=noise(g, 3, 32, std=std, mean=mean), weight=noise(g, 32, std=0.1, mean=1.0), eps=1e-5,
                offset=0.0)


def simplex(g, *shape):
    """Random distributions over few tokens, with some zeros."""
    p = torch.randn(shape, generator=g).mul(1.5).softmax(-1)
    p = p.masked_fill(torch.rand(shape, generator=g) < 0.25, 0) + 1e-3 * torch.eye(shape[-1])[0]
    return pack((p / p.sum(-1, keepdim=True)).float())


def ids(g, count, vocab=V):
    return torch.randint(2, vocab, (count,), generator=g).tolist()


def chance(g, count):
    return torch.rand(count, generator=g, dtype=torch.float64).tolist()


def tensor(*rows):
    return pack(torch.tensor(rows if len(rows) > 1 else rows[0], dtype=torch.float64))


def logs(*p):
    return pack(torch.tensor(p).log())


def see(parents):
    """Whom the nodes of a tree see, as zeros and ones."""
    return ancestors(torch.tensor([parents])).int()[0].tolist()


def seen(positions, slots, end, tree=None, window=None):
    return dict(positions=positions, slots=slots, end=end, tree=tree, window=window)


def attending(g, heads, T, cap, window):
    """The inputs of attention: T tokens after four others."""
    n = 4 + T
    mask = [[int(j <= 4 + i and 4 + i - j < window) for j in range(n)] for i in range(T)]
    return dict(q=noise(g, heads, T, D), k=noise(g, 2, n, D), v=noise(g, 2, n, D), mask=mask,
                scale=24**-0.5 if cap else D**-0.5, cap=cap)


def sub(g, model, i, first, T):
    """A sub-layer over T tokens, of which an attention finds `first` others in its cache."""
    c = CONFIGS[model]
    shape = c.n_kv_heads, first, c.head_dim
    past = None if i % 2 else dict(k=noise(g, *shape), v=noise(g, *shape))
    return dict(model=model, sublayer=i, first=first, x=noise(g, T, c.dim), past=past)


def block(first, tokens, sublayers=None, parents=None, keep=None):
    return dict(first=first, tokens=tokens, sublayers=sublayers, parents=parents, keep=keep)


def growing(g, model, *sizes):
    """Blocks one after the other onto one cache."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return dict(model=model, blocks=[block(n, ids(g, T)) for n, T in zip(starts, sizes, strict=True)])


def drafting(g, model, sublayers):
    """Two tokens drafted one by one with some of the sub-layers, and then verified with all."""
    text = ids(g, 9)
    return dict(model=model, blocks=[block(0, text[:5]), block(5, text[5:6], sublayers),
                                     block(6, text[6:7], sublayers), block(5, text[5:8]), block(7, text[8:])])


def branching(g, model):
    """A tree of five, of which node 3 and its child 4 are accepted; then the text goes on after them."""
    return dict(model=model, blocks=[block(0, ids(g, 4)), block(4, ids(g, 5), None, [0, 1, 0, 3], [0, 3, 4]),
                                     block(7, ids(g, 2))])


def sampling(temperature=0.0, top_k=None, top_p=None, min_p=None):
    return dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


def filtering(logits, *settings):
    return dict(logits=logits, sampling=sampling(*settings))


def judging(p, q, draft, uniforms, parents=None):
    return dict(p=p, q=q, draft=draft, uniforms=uniforms, parents=parents)


def lookup(gamma, n=1):
    return dict(kind="ngram", gamma=gamma, n=n)


def partly(gamma, sublayers, widths=()):
    return dict(kind="sublayers", gamma=gamma, sublayers=list(sublayers), widths=list(widths))


def writing(g, model, drafter, max_new=14, rows=(6,), settings=(0.0,), eos=0, vocab=V):
    """Prompts of the given lengths, to be continued."""
    return dict(model=model, prompts=[ids(g, n, vocab) for n in rows], max_new=max_new, drafter=drafter,
                sampling=sampling(*settings), seed=int(torch.randint(2**40, (), generator=g)),
                eos=ids(g, eos))


def story():
    """The prompt's ids, by the model's own tokenizer."""
    return encode(read_tokenizer(ROOT / SHIPPED), PROMPT, read_config(ROOT / SHIPPED).bos)


# --- what a trace of rounds must show to be worth keeping


def tally(a):
    """(accepted, drafted) of every row of every round."""
    return [(kept, len(draft)) for r in a["rounds"]
            for kept, draft in zip(r["accepted"], r["draft"], strict=True) if draft]


def mixed(a):
    """Some drafts are accepted whole, some in part, some not at all; and the text does not stand still."""
    kinds = {(kept > 0) + (kept == drafted) for kept, drafted in tally(a)}
    return kinds == {0, 1, 2} and lively(a)


def lively(a):
    """No answer is a few tokens over and over."""
    rows = zip(*(r["new"] for r in a["rounds"]), strict=True)
    return all(len({t for new in row if new for t in new}) >= 4 for row in rows)


def copied(a):
    """Drafts come from the text, and some are refused."""
    found = [kept == drafted for kept, drafted in tally(a)]
    return {True, False} <= set(found) and sum(kept for kept, _ in tally(a)) >= 3


def ends_inside(a):
    """The last round accepts an end of text inside its draft: not at once, and before the last token."""
    *earlier, last = a["rounds"]
    (new,), (draft,), (kept,) = (last[key] for key in ("new", "draft", "accepted"))
    return len(earlier) >= 2 and 1 < kept < len(draft) and new == draft[:kept]


def passed(flips, ratio):
    """How many guesses pass before the first that does not."""
    return next((k for k, (u, r) in enumerate(zip(flips, ratio, strict=False)) if u >= r), len(ratio))


def crossed(a):
    """Some text keeps another number of guesses if flips are spent place by place, not text by text."""
    return mixed(a) and any(passed(r["u_flip"][b :: len(r["ratio"])], ratio) != kept
                            for r in a["rounds"] if r["u_flip"]
                            for b, (ratio, kept) in enumerate(zip(r["ratio"], r["accepted"], strict=True))
                            if ratio)


def overshoots(a):
    """More guesses pass in the last round than stand before its end of text."""
    last = a["rounds"][-1]
    return len(a["rounds"]) >= 2 and 0 < last["accepted"][0] < passed(last["u_flip"], last["ratio"][0])


def branched(a):
    """An accepted path goes through a sibling."""
    return lively(a) and any(r["new"][0][: r["accepted"][0]] != r["draft"][0][: r["accepted"][0]]
                             for r in a["rounds"])


def refused_at(k):
    return lambda a: a["accepted"] == k


# --- the cases: number, kind, inputs, and maybe what must hold of the answer. The hundreds are the step.
# From 80 on: trees. From 90 on: weights/stories-llama. What each case catches stands in answers.jsonl alone.

EXIT, SKIP = range(4), [0, 1, 2, 5, 6, 7]
CASES = [
    (101, "weights", lambda g: dict(model=LLAMA)),
    (102, "weights", lambda g: dict(model=GEMMA)),
    # 2 norm
    (201, "norm", lambda g: norming(g, 0.7, 0.5)),
    (202, "norm", lambda g: norming(g, 2e-3, 0.0)),
    (203, "norm", lambda g: norming(g, 1.0, 0.0) | dict(weight=noise(g, 32, std=0.3), offset=1.0)),
    # 3 rope
    (301, "frequencies", lambda g: dict(head_dim=8, theta=10_000.0, scaling=None)),
    (302, "frequencies", lambda g: dict(head_dim=8, theta=500.0, scaling=LINEAR)),
    (303, "frequencies", lambda g: dict(head_dim=16, theta=500.0, scaling=LLAMA3)),
    (304, "rotate", lambda g: dict(x=noise(g, 4, D), positions=[3, 4, 11, 37], freqs=FREQS)),
    # 4 mask and attention
    (401, "visible", lambda g: seen([0, 1, 2], [0, 1, 2], 3)),
    (402, "visible", lambda g: seen([4, 5, 6], [4, 5, 6], 9)),
    (403, "visible", lambda g: seen([4, 5, 6], [4, 5, 6], 7, window=3)),
    (404, "softcap", lambda g: dict(x=noise(g, 12, std=30.0), cap=30.0)),
    (405, "attend", lambda g: attending(g, 4, 3, None, 99)),
    (406, "attend", lambda g: attending(g, 8, 3, 2.0, 4)),
    (481, "visible", lambda g: seen([4, 5, 6, 5], [4, 5, 6, 7], 8, see([0, 1, 0]))),
    (482, "visible", lambda g: seen([4, 5, 6, 5, 6, 7, 8], [*range(4, 11)], 11, see([0, 1, 0, 3, 4, 5]),
     3)),
    # 5 sub-layer
    (501, "sublayer", lambda g: sub(g, LLAMA, 0, 4, 3)),
    (502, "sublayer", lambda g: sub(g, LLAMA, 1, 4, 3)),
    (503, "sublayer", lambda g: sub(g, GEMMA, 0, 6, 3)),
    (504, "sublayer", lambda g: sub(g, GEMMA, 2, 6, 3)),
    (505, "sublayer", lambda g: sub(g, GEMMA, 1, 6, 3)),
    # 6 forward
    (601, "forward", lambda g: dict(model=LLAMA, tokens=ids(g, 7))),
    (602, "forward", lambda g: dict(model=GEMMA, tokens=ids(g, 9))),
    # 7 cache
    (701, "blocks", lambda g: growing(g, LLAMA, 4, 3, 1, 2)),
    (702, "blocks", lambda g: growing(g, GEMMA, 3, 4, 1, 3)),
    (703, "blocks", lambda g: dict(model=LLAMA, blocks=[
        block(0, ids(g, 5)), block(5, ids(g, 4)), block(7, ids(g, 2)), block(6, ids(g, 1))])),
    (704, "blocks", lambda g: drafting(g, LLAMA, [0, 1, 5, 6, 7])),
    (705, "blocks", lambda g: drafting(g, GEMMA, SKIP)),
    (781, "blocks", lambda g: branching(g, LLAMA)),
    (782, "blocks", lambda g: branching(g, GEMMA)),
    # 8 coins and sampling
    (801, "uniforms", lambda g: dict(seed=0, first=0, count=6)),
    (802, "uniforms", lambda g: dict(seed=1234567890123, first=4094, count=6)),
    (803, "probs", lambda g: filtering(tensor(0.5, 2.0, 2.0, 1.0))),
    (804, "probs", lambda g: filtering(tensor(900.0, 899.5, 898.0, 0.0), 0.7)),
    (805, "probs", lambda g: filtering(tensor(1.0, 3.0, 2.0, 2.0, 2.0, 0.0), 1.0, 3)),
    (806, "probs", lambda g: filtering(logs(0.1, 0.3, 0.1, 0.4, 0.1), 1.0, 3, 0.85)),
    (807, "probs", lambda g: filtering(logs(0.1, 0.3, 0.45, 0.05, 0.1), 0.5, None, 0.8)),
    (808, "probs", lambda g: filtering(logs(0.05, 0.3, 0.1, 0.4, 0.1, 0.05), 1.0, None, 0.75, 0.2)),
    (809, "choose", lambda g: dict(weights=noise(g, 9, std=0.01, mean=0.3), u=chance(g, 1)[0])),
    (810, "choose", lambda g: dict(weights=tensor(0.0, 0.0, 0.5, 0.5), u=0.0)),
    (811, "choose", lambda g: dict(weights=tensor(0.25, 0.25, 0.5), u=0.25)),
    (812, "verify", lambda g: judging(
        tensor([0.5, 0.25, 0.25, 0.0], [0.125, 0.375, 0.375, 0.125], [0.25] * 4, [0.5, 0.5, 0.0, 0.0]),
        tensor([0.5, 0.25, 0.125, 0.125], [0.125, 0.125, 0.25, 0.5], [0.25, 0.5, 0.125, 0.125]),
        [0, 3, 1], [0.7, 0.6, 0.9, 0.1]), refused_at(1)),
    (813, "verify", lambda g: judging(simplex(g, 3, 6), simplex(g, 2, 6), ids(g, 2, 6), chance(g, 3)),
     refused_at(2)),
    (814, "verify", lambda g: judging(simplex(g, 5, 6), simplex(g, 4, 6), ids(g, 4, 6), chance(g, 5)),
     refused_at(0)),
    (815, "verify", lambda g: judging(simplex(g, 4, 6), None, ids(g, 3, 6), chance(g, 4)),
     refused_at(1)),
    (816, "verify", lambda g: judging(
        tensor([0.0, 1.0], [0.5, 0.5]), tensor([[0.5, 0.5]]), [0], [0.0, 0.5])),
    (817, "verify", lambda g: judging(
        tensor([0.25, 0.75], [0.5, 0.5]), tensor([[0.5, 0.75]]), [0], [0.75, 0.375])),
    (818, "probs", lambda g: filtering(tensor(*[1.0] * 4), 1.0, None, 0.5)),
    (819, "probs", lambda g: filtering(tensor(*[1.0] * 4), 1.0, None, None, 1.0)),
    (881, "verify", lambda g: judging(simplex(g, 6, 6), simplex(g, 5, 6), [2, 3, 4, 5, 3], chance(g, 6),
     [0, 1, 0, 3, 0]), lambda a: a["node"] in (3, 4)),
    (882, "verify", lambda g: judging(simplex(g, 5, 6), None, [2, 3, 4, 5], chance(g, 5), [0, 0, 1, 2]),
     lambda a: a["node"] in (2, 4)),
    # 9 round
    (901, "ngram", lambda g: dict(text=[5, 6, 7, 5, 6, 8, 9, 2, 5, 6], n=2, gamma=3)),
    (902, "ngram", lambda g: dict(text=[4, 4, 4], n=2, gamma=3)),
    (903, "rounds", lambda g: writing(g, LLAMA, partly(3, EXIT)), mixed),
    (904, "rounds", lambda g: writing(g, GEMMA, dict(kind="none"), 12), lively),
    (905, "rounds", lambda g: writing(g, GEMMA, partly(3, SKIP)), mixed),
    (906, "rounds", lambda g: writing(g, LLAMA, lookup(4), 20, (9,)), copied),
    (907, "rounds", lambda g: writing(g, LLAMA, partly(0, EXIT), 6), lively),
    (908, "rounds", lambda g: writing(g, LLAMA, partly(3, EXIT), 10, (7, 2, 4)), mixed),
    (909, "rounds", lambda g: writing(g, GEMMA, partly(3, EXIT), 16, (5,), (1.2, None, 0.8)), mixed),
    (910, "rounds", lambda g: writing(g, LLAMA, partly(2, SKIP), 14, (5,), (0.9, 12, None, 0.05)),
     mixed),
    (911, "rounds", lambda g: writing(g, LLAMA, partly(4, EXIT), 20, eos=2), ends_inside),
    (912, "rounds", lambda g: writing(g, LLAMA, partly(4, EXIT), 99, (29,)), mixed),
    (913, "rounds", lambda g: writing(g, LLAMA, partly(2, EXIT), 9, (3, 6), (1.0,)), mixed),
    (914, "rounds", lambda g: writing(g, GEMMA, lookup(3), 12, (12, 4), (0.7,)), copied),
    (915, "rounds", lambda g: writing(g, LLAMA, partly(2, EXIT), 9, (3, 6, 4), (1.0,)), crossed),
    (916, "rounds", lambda g: writing(g, LLAMA, partly(4, EXIT), 20, eos=2), overshoots),
    (981, "rounds", lambda g: writing(g, GEMMA, partly(3, EXIT, [3, 1]), 16), branched),
    (982, "rounds", lambda g: writing(g, LLAMA, partly(2, EXIT, [2, 1]), 16, settings=(1.0,)),
     branched),
]
STORY_CASES = [
    (191, "weights", lambda g: dict(model=SHIPPED)),
    (691, "forward", lambda g: dict(model=SHIPPED, tokens=story())),
    # the story itself; `words` is for ports that have a tokenizer
    (991, "rounds", lambda g: writing(g, SHIPPED, partly(3, EXIT), 24) | dict(prompts=[story()],
     words=PROMPT), lambda a: lively(a) and any(kept for kept, _ in tally(a))),
]


# --- making them


def pose(number, op, build, seed):
    """A case as one seed makes it."""
    inputs = build(torch.Generator().manual_seed(seed))
    return {"case": number, "step": number // 100, "op": op, "trees": number % 100 // 10 == 8, **inputs}


def settle(number, op, build, wanted=None):
    """The first seed whose case has the margin and shows what is wanted, with that case and its answer."""
    for seed in range(number * TRIES, (number + 1) * TRIES):
        request = pose(number, op, build, seed)
        told, margin = answer(request)
        if (margin >= MARGIN or is_exact(request)) and (wanted is None or wanted(told)):
            return seed, request, told, margin
    raise SystemExit(f"case {number}: none of {TRIES} seeds has the margin and shows what it should")


def is_exact(request):
    """Whether all numbers of a choice are multiples of 1/8, or all logits are equal: then nothing that
    decides is ever rounded, and a decision on the very edge is safe, too."""
    return (request["op"] in ("choose", "verify") and all(x * 8 % 1 == 0 for x in check.numbers(request))
            or request["op"] == "probs" and len(set(request["logits"]["data"])) == 1)


def with_prints(value, brief):
    """Beside every tensor its fingerprint; if brief, in place of its numbers."""
    if isinstance(value, list):
        return [with_prints(v, brief) for v in value]
    if not isinstance(value, dict):
        return value
    if "data" not in value:
        return {key: with_prints(v, brief) for key, v in value.items()}
    told = {"shape": value["shape"], **check.fingerprint(value["data"])}
    return told if brief else told | {"data": value["data"]}


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def write(folder, cases, brief=False):
    requests, answers, rounds = [], [], []
    catches = {line["case"]: line["catches"] for line in check.read_lines(folder / "answers.jsonl")}
    for number, *case in cases:
        seed, request, told, margin = settle(number, *case)
        requests.append(request)
        answers.append({"case": number, "catches": catches.get(number, "TODO: the mistake that it catches"),
                        "tolerance": TOLERANCE[number // 100 - 1], "seed": seed,
                        "margin": None if margin == float("inf") else round(margin, 6)})
        if "words" in request:
            new = [t for r in told["rounds"] for t in r["new"][0]]
            answers[-1]["words"] = read_tokenizer(ROOT / SHIPPED).decode(story() + new)
        rounds += [{"case": number, **line} for line in told.pop("rounds", [])]
        answers[-1]["answer"] = with_prints(told, brief)
        print(f"{number} {request['op']:12} margin {margin:.1e}", flush=True)
    write_lines(folder / "cases.jsonl", requests)
    write_lines(folder / "answers.jsonl", answers)
    write_lines(folder / "rounds.jsonl", rounds)


def write_mistakes():
    """What each wrong port says where it is wrong: a fingerprint of the whole answer. Where it cannot be told
    from the fingerprint of the right answer, it is left out: a right answer must not be called a mistake."""
    cases, lines = check.read_cases(check.TRACES), []
    requests = [check.absolute(request) for request, _ in cases.values()]
    for scope, old, new, mistake in MISTAKES:
        for number, wrong in answers(wrong_port(scope, old, new), requests).items():
            expect = cases[number][1]
            if check.differ(expect["answer"], json.loads(json.dumps(wrong)), expect["tolerance"], []):
                told, right = (check.print_of(x, sorted(expect["answer"])) for x in (wrong, expect["answer"]))
                if not check.alike(told, right, expect["tolerance"]):
                    lines.append({"case": number, "mistake": mistake, "print": told})
        print(f"{sum(line['mistake'] == mistake for line in lines):3} cases name it: {mistake}", flush=True)
    write_lines(check.TRACES / "mistakes.jsonl", lines)


def digest():
    """Of all files of the core traces. It stands in check.py beside the version."""
    files = sorted(p for p in check.TRACES.rglob("*") if p.is_file() and check.STORIES not in p.parents)
    return hashlib.sha256(b"".join(p.read_bytes() for p in files)).hexdigest()[:12]


@torch.inference_mode()
def main(argv):
    torch.set_num_threads(1)  # these models are too small to share
    if argv == ["core"]:
        for folder, c in CONFIGS.items():
            save_model(random_model(c), ROOT / folder)
        write(check.TRACES, CASES)
        write_mistakes()
        if digest() != check.DIGEST:
            print(f"These are not the traces of version {check.VERSION}. If others have those, raise VERSION "
                  f"in porting/check.py. In any case write there: DIGEST = {digest()!r}")
    elif argv == ["stories"]:
        write(check.STORIES, STORY_CASES, brief=True)
    else:
        raise SystemExit("say core or stories: which traces?")


if __name__ == "__main__":
    main(sys.argv[1:])
