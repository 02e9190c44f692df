"""Does this library compute your checkpoint right? Any folder that loads is compared with
transformers. What drafting could gain on it stands in lab/bench/ceiling.py."""
import gc
import itertools
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

import checkpoint
from checkpoint import guarded
from kvcache import KVCache
from lab.bench.ceiling import worth
from lab.bench.passes import their_text
from lab.bench.shared import SETS, page, prompt_ids, read_prompts, table
from layerskip import SelfDraft, early_exit
from model import Placement, Refused
from speculative import generate
from support.chat import read_template
from support.compare import parting

RIGHT, WRONG, NONE = "right", "DIFFERS", "-"
HALF = torch.bfloat16, torch.float16
TOLERANCE = 5e-5  # of the largest logit; in float32 two right programs differ by 1e-6 to 1e-5
LENGTH = 128                # tokens of the text for logits
NEW = 24                    # and of the greedy texts: a pass of the largest model takes seconds
CHUNKS = 1, 2, 7, 1, 32     # how many tokens each pass into the cache takes, again and again
TEXTS = ("Once upon a time", " two  spaces,\ttabs\n\nand lines \r\n",
         "def f(x):\n    return x**2 + 1e-5",
         "naïve café, Größe 你好 русский عربي \U0001f44d\U0001f3fd e\u0301 \u00a0\u200bx\u2028y",
         "1234567890 3.14", "I'll, they've; DON'T", "...!?")
USER, ANSWER, SYSTEM = ({"role": role, "content": text} for role, text in (
    ("user", "  What is 2 + 2? <b>é</b>\n"), ("assistant", "4."), ("system", "Be short.")))
CHATS = {"a question": ([USER], True), "an answer": ([USER, ANSWER], False),
         "three turns": ([USER, ANSWER, USER], True), "a system prompt": ([SYSTEM, USER], True)}


class Row(NamedTuple):
    check: str
    ours: str
    theirs: str       # what transformers gives, or the tolerance
    verdict: str


class Pass(NamedTuple):
    """One reading of a text that both libraries compute, in float32 and without a cache."""
    name: str
    ids: list
    window: int | None
    positions: torch.Tensor     # (T,)


def judge(name, ours, theirs, fine):
    return Row(name, ours, theirs, RIGHT if fine else WRONG)


# --- transformers: one model in memory at a time, and only what it says is kept


def theirs_in(folder, dtype, device):
    from transformers import AutoModelForCausalLM, GenerationConfig
    # trap: of their ways to compute attention only "eager" has Gemma-2's soft-caps everywhere
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    # no end of text, no penalties of the folder's
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model.to(device).eval()


def their_logits(model, p):
    """(T, V) float32, on the CPU."""
    device, model.config.sliding_window = model.device, p.window
    ids, at = torch.tensor([p.ids], device=device), p.positions[None].to(device)
    # trap: without an attention mask they take a jump of the positions for another text's start
    out = model(ids, position_ids=at, attention_mask=torch.ones_like(ids), use_cache=False)
    return out.logits[0].float().cpu()


def shaken(p):
    """The same pass with each position moved to the next float32, up and down in turn.

    transformers computes its angles in float32, which is no more exact than that. How far it moves
    the logits depends on the context, on theta and on the depth, and so it is measured.
    """
    at = p.positions.float()
    return p._replace(positions=torch.nextafter(at, math.inf * (-1.0) ** torch.arange(len(at))))


@torch.inference_mode()
def ask(folder, device, passes, prompts, new, stored):
    """All that transformers is asked about the model: its context, logits and greedy texts, and the
    logits of the first pass in the stored dtype, if that is a half one."""
    model = theirs_in(folder, torch.float32, device)
    said = {"max_len": model.config.max_position_embeddings,
            "greedy": [their_text(model, torch.tensor([ids], device=device), new)[0].tolist()
                       for ids in prompts]}
    # last, because these change the window
    said["logits"] = [their_logits(model, p) for p in passes]
    said["tolerance"] = [TOLERANCE + 2 * apart(their_logits(model, shaken(p)), logits)
                         for p, logits in zip(passes, said["logits"], strict=True)]
    del model
    gc.collect()
    if stored in HALF:
        said["half"] = their_logits(theirs_in(folder, stored, device), passes[0])
        gc.collect()
    return said


# --- tokenizer and chat template


def check_tokenizer(folder, tokenizer):
    """Ids, and the text that they make again; and the prompts that messages become."""
    from transformers import AutoTokenizer, logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with guarded(f"{folder}: transformers cannot read its tokenizer"):
        theirs = AutoTokenizer.from_pretrained(folder)
    wrong = []
    special = [t.content for t in tokenizer.get_added_tokens_decoder().values()][:8]
    texts = [*TEXTS, f"a {' b'.join(special)} c",
             *(read_prompts(name)[0]["text"][:500] for name in SETS)]
    for text in texts:
        ids = attempt(checkpoint.encode, tokenizer, text)
        want = attempt(lambda text: theirs(text).input_ids, text)
        back = partial(theirs.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if want != ids or ids and attempt(back, ids) != attempt(tokenizer.decode, ids):
            wrong.append(repr(text[:20]))
    found = f"not equal: {', '.join(wrong)}" if wrong else "equal"
    rows = [judge(f"tokenizer: ids of {len(texts)} texts, and back", found, "AutoTokenizer",
                  not wrong)]
    return rows + check_chats(folder, tokenizer, theirs)


def attempt(f, *args):
    """f(*args), or None where it refuses them in any way."""
    try:
        with guarded("refused"):
            return f(*args)
    except ValueError:
        return None


def check_chats(folder, tokenizer, theirs):
    """A template that refuses messages must refuse them in both."""
    def chat(render, encode, messages, more):
        """(text, ids), each None where the template or the tokenizer refuses."""
        text = attempt(render, messages, more)
        return text, text and attempt(encode, text)

    try:
        render = read_template(folder)
    except ValueError:
        return [judge("chat template", "none found", "has one", False) if theirs.chat_template
                else Row("chat template", "none: a base model", "", NONE)]

    def render_theirs(messages, more):
        return theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=more)

    rows = []
    for name, given in CHATS.items():
        ours = chat(render, partial(checkpoint.encode, tokenizer, special=False), *given)
        want = chat(render_theirs, partial(theirs.encode, add_special_tokens=False), *given)
        rows.append(judge(f"chat template: {name}", *("text and ids" if all(made) else "refused"
                                                      for made in (ours, want)), ours == want))
    return rows


# --- logits


def plan(c, ids):
    """The passes that both compute: the text; the text with a smaller window if it does not fill
    the model's; and tokens spread over the whole context, for the angles of a long text."""
    T = len(ids)
    count = min(T, 48)
    at = torch.arange(T)
    passes = [Pass(f"logits, {T} tokens at once", ids, c.window, at)]
    if c.window and 4 <= T <= c.window:
        passes.append(Pass(f"logits, window {T // 4} instead of {c.window}", ids, T // 4, at))
    at = torch.linspace(0, c.max_len - 1, count, dtype=torch.float64).long()
    passes.append(Pass(f"logits, {count} tokens spread over positions 0 to {c.max_len - 1}",
                       ids[:count], c.window and c.max_len, at))
    return passes


@torch.inference_mode()
def our_logits(model, p):
    """(T, V) float32, on the CPU."""
    whole = model.c
    device = model.tok.device
    tokens = torch.tensor([p.ids], device=device)
    model.c = replace(whole, window=p.window)
    T = len(p.ids)
    at = Placement(p.positions[None].to(device), torch.arange(T, device=device)[None], 0, T)
    table = model.angles(int(p.positions.max()) + 1)
    logits = model.unembed(model.run(model.embed(tokens), at, table=table))     # (1, T, V)
    model.c = whole
    return logits[0].float().cpu()


@torch.inference_mode()
def cached_logits(model, ids):
    """The same of a text that goes into the cache in uneven chunks."""
    tokens = torch.tensor([ids], device=model.tok.device)
    parts = []
    at = 0
    cache = KVCache(model.c, 1, len(ids), model.attention_dtype(), tokens.device)
    for size in itertools.cycle(CHUNKS):
        part = tokens[:, at : at + size]
        x = model.run(model.embed(part), Placement.span(at, at + part.shape[1], part.device), cache)
        parts.append(model.unembed(x)[0].float().cpu())                     # (size, V)
        at += size
        if at >= len(ids):
            return torch.cat(parts)


def apart(got, want):
    """The largest difference, of the largest logit. NaN stays NaN, which is within no tolerance."""
    return float((got - want).abs().max() / want.abs().max())


def check_logits(model, passes, said):
    """In float32."""
    found = [(p.name, our_logits(model, p)) for p in passes]
    found.append((f"the same in chunks of {', '.join(map(str, CHUNKS))} through the cache",
                  cached_logits(model, passes[0].ids)))
    wanted = [[*given, given[0]] for given in (said["logits"], said["tolerance"])]
    return [judge(name, f"{(gap := apart(ours, theirs)):.1e}", f"{tolerance:.1e}", gap <= tolerance)
            for (name, ours), theirs, tolerance in zip(found, *wanted, strict=True)]


def check_rounding(half, theirs, want, stored):
    """How far the stored half dtype is from float32, which rounds in both libraries."""
    ours, theirs = (float((x - want).norm() / want.norm()) for x in (half, theirs))
    return judge(f"error of {str(stored)[6:]} against float32, root mean square", f"{ours:.1e}",
                 f"{theirs:.1e}", ours <= 1.5 * theirs)


def check_texts(model, prompts, new, said):
    """Greedy texts in float32, both prompts in one ragged batch. They may part where two logits
    tie."""
    L = model.c.n_layers
    rows = []
    exit_layer = (L + 2) // 3
    drafters = {"plain": None, f"exit {exit_layer}": SelfDraft(model, early_exit(L, exit_layer), 3)}
    for name, drafter in drafters.items():
        texts, _ = generate(model, prompts, new, drafter, eos=())
        parts = [parting(model, *row) for row in zip(prompts, texts, said["greedy"], strict=True)
                 if row[1] != row[2]]
        ours = "; ".join(f"parts at token {p['position']}, logits {p['gap']:.0e} apart"
                         for p in parts)
        rows.append(judge(f"greedy text, {name}: {len(prompts)} x {new} tokens", ours or "equal",
                          "its text", all(p["near_tie"] for p in parts)))
    return rows


def texts(tokenizer, c):
    """(ids of the text for logits, two prompts). Raises ValueError for a tokenizer that makes other
    ids than the model has."""
    text = " ".join(read_prompts(name)[0]["text"] for name in SETS)
    ids = checkpoint.encode(tokenizer, text, c.bos)[: min(c.max_len, LENGTH)]
    prompts = [prompt_ids(name, tokenizer, c)[0][: c.max_len // 2] for name in ("stories", "code")]
    used = [i for part in (ids, *prompts) for i in part]
    if not all((ids, *prompts)) or max(used) >= c.vocab_size:
        raise Refused(f"the tokenizer makes ids up to {max(used, default=None)}, but "
                      f"config.json has a vocabulary of {c.vocab_size}")
    return ids, prompts


def run(a):
    """One model is in memory at a time, first ours as stored, then theirs, then ours in float32."""
    folder = Path(a.model)
    # refuses in one line what it would compute wrongly
    model, tokenizer = checkpoint.load(folder, a.device)
    c, stored = model.c, model.tok.dtype
    ids, prompts = texts(tokenizer, c)
    new = min(a.new, NEW, c.max_len - max(map(len, prompts)))
    passes = plan(c, ids)
    half = our_logits(model, passes[0]) if stored in HALF else None
    del model
    rows = check_tokenizer(folder, tokenizer)
    with guarded(f"{folder}: transformers cannot compute this model"):
        said = ask(folder, a.device, passes, prompts, new, stored)
    model, _ = checkpoint.load(folder, a.device, torch.float32)
    rows += check_logits(model, passes, said)
    if half is not None:
        rows.append(check_rounding(half, said["half"], said["logits"][0], stored))
    rows += check_texts(model, prompts, new, said)
    theirs = said["max_len"]
    rows.append(judge("context", str(c.max_len), str(theirs), c.max_len == theirs))
    del model, said
    helps = []
    found = {}
    if c.n_layers > 1:
        helps, found = worth(a, *checkpoint.load(folder, a.device))
    wrong = [r.check for r in rows if r.verdict == WRONG]
    verdict = (f"{len(wrong)} of {len(rows)} differ: {'; '.join(wrong)}" if wrong else
               "All checks are right: this is the model that transformers computes")
    lines = [f"{a.model}, compared with transformers; {a.machine}; differences of the largest "
             "logit, in float32", "",
             *table(Row._fields, [[cell.replace("|", "\\|") for cell in r] for r in rows]),
             verdict, "", *helps]
    data = {"checks": [r._asdict() for r in rows], "verdict": verdict, "status": int(bool(wrong)),
            "help": found}
    return page(lines), data
